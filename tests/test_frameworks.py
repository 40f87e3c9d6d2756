"""Memory that frameworks hold for a job, against closed forms, and laws common to all frameworks."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import frameworks, hardware, memory, overlap, search, zoo
from tilecast.advice import Request
from tilecast.frameworks import FRAMEWORKS, UNSET
from tilecast.inputs.gpu_list import parse_gpu_list
from tilecast.public.advising import build_launcher_requests
from tilecast.spec import Framework, Plan, Plans, Precision, SpecError, Workload

NAMES: tuple[Framework, ...] = get_args(Framework)
LLAMA = zoo.find_preset("llama-2-7b")


def bill(framework: Framework | None, plan: Plan, precision: str = "bf16", **job: object) -> memory.Footprint:
    workload = Workload(LLAMA, 2048, 64, precision, framework=framework, **job)  # type: ignore[arg-type]
    plans = Plans.from_plans(plan)
    return memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans)


def per_parameter(footprint: memory.Footprint) -> float:
    states = footprint.parameters + footprint.gradients + footprint.optimizer
    return float(states[0]) / zoo.count_parameters(Workload(LLAMA, 2048, 64))


def test_the_table_holds_what_a_job_may_name() -> None:
    assert set(FRAMEWORKS) == {UNSET, *NAMES}
    assert set(search.FRAMEWORKS) == set(frameworks.ENGINES)
    for name in NAMES:
        assert search.find_engine(name) in frameworks.ENGINES
        assert search.find_framework_features(name).parallelism


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_cell_says_where_it_comes_from(name: str) -> None:
    assert all(len(source) > 8 for source in FRAMEWORKS[name].sources.values())


@pytest.mark.parametrize("name", NAMES)
def test_changes_of_a_framework_are_in_the_order_of_versions(name: str) -> None:
    assert frameworks.find_versioned_product(name)
    changes = frameworks.TABLES[name].get("since", [])
    versions = [frameworks.parse_version(change["version"]) for change in changes]
    assert versions == sorted(set(versions))
    assert all({"version"} < set(change) <= {"version", "engine", "cells"} for change in changes)
    assumed = frameworks.TABLES[name]["version"]["assumed"]
    assert frameworks.read_framework(name, assumed) == FRAMEWORKS[name]


def test_a_version_takes_the_changes_until_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(name: str, *changes: dict[str, object]) -> None:
        monkeypatch.setitem(frameworks.TABLES, name, {**frameworks.TABLES[name], "since": [*changes]})  # type: ignore[arg-type]

    changed("ddp", {"version": "2.4", "cells": {"loss_chunks": [2.0, "a source"]}},
            {"version": "2.10", "cells": {"loss_chunks": [3.0, "a source"]}})  # fmt: skip
    changed("megatron", {"version": "0.9", "cells": {"loss_chunks": [4.0, "a source"]}})
    changed("nemo", {"version": "25.04", "engine": "0.8"}, {"version": "26.02", "engine": "0.9"})
    read = frameworks.read_framework.__wrapped__
    found = [read("huggingface", version).loss_chunks for version in ("2.3", "2.4", "2.9.1", "2.10", "3.0")]
    assert found == [1.0, 2.0, 2.0, 3.0, 3.0]
    assert [read("nemo", version).loss_chunks for version in ("24.01", "25.04", "26.01", "26.02.01")] == [4, 1, 1, 4]
    assert read("tensorflow", "2.3").loss_chunks == read("tensorflow").loss_chunks


def test_a_version_follows_a_job_only_to_frameworks_that_count_it() -> None:
    job = Workload(LLAMA, 2048, 64, framework="ddp", framework_version="2.6")
    assert frameworks.with_framework(job, "lightning").framework_version == "2.6"
    assert frameworks.with_framework(job, "megatron").framework_version is None


@pytest.mark.parametrize("text", ["", "2.x", "v2", "2..6", "-1", "1.2.3.4.5", "99999", "٢"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="frameworkVersion"):
        frameworks.parse_version(text)


def test_versions_compare_by_number() -> None:
    assert frameworks.parse_version("2.10") > frameworks.parse_version("2.9.1") > frameworks.parse_version("2.9.0")
    assert frameworks.parse_version("25.04") == frameworks.parse_version("25.4.0")


def test_a_cell_that_is_not_its_own_is_the_engines() -> None:
    assert FRAMEWORKS["nemo"].wgrad_placeholders is FRAMEWORKS["megatron"].wgrad_placeholders is True
    assert FRAMEWORKS["nemo"].loss != FRAMEWORKS["megatron"].loss


@pytest.mark.parametrize(
    ("framework", "precision", "plan", "each"),
    [
        # Megatron-LM in BF16: weight 2, gradient 4, master and moments 12; in FP16 the gradient has 2.
        ("megatron", "bf16", Plan(), 18.0),
        ("megatron", "fp16", Plan(), 16.0),
        ("megatron", "bf16", Plan(data=8, zero_stage=1), 6 + 12 / 8),
        # DDP, in the update: weight 4, gradient 4 and 4 again in buckets, moments 8. Its 16-bit casts are gone.
        ("ddp", "bf16", Plan(data=2), 20.0),
        ("ddp", "bf16", Plan(), 16.0),
        ("ddp", "fp32", Plan(), 16.0),
        # fully_shard: everything in FP32 and sharded; gathered weights are working memory. Gradients are not there yet
        # when most activations are, unless an earlier micro-batch made them.
        ("fsdp2", "bf16", Plan(data=8, zero_stage=3, gradient_accumulation=2), 16 / 8),
        ("fsdp2", "bf16", Plan(data=8, zero_stage=2, gradient_accumulation=2), 2 + 16 / 8),
        ("fsdp2", "bf16", Plan(data=8, zero_stage=3), 12 / 8),
        # Pure 16 bit: weight, gradient and two moments of 2 bytes each.
        ("torchtune", "bf16", Plan(data=4, zero_stage=3, gradient_accumulation=2), 8 / 4),
    ],
)
def test_states_take_what_the_framework_holds(framework: Framework, precision: str, plan: Plan, each: float) -> None:
    assert per_parameter(bill(framework, plan, precision, optimizer="adam")) == pytest.approx(each, rel=1e-6)


@pytest.mark.parametrize(
    ("framework", "facts", "held"),
    [
        ("ddp", {}, 4.0),
        ("ddp", {"fused_kernels": True}, 0.0),
        ("torchtune", {}, 0.0),
        ("torchtune", {"fused_optimizer": False}, 2.0),
    ],
)
def test_an_update_in_one_kernel_needs_no_roots(framework: Framework, facts: dict[str, bool], held: float) -> None:
    """Otherwise the square roots of all second moments, in their type, are alive when the activations no longer are."""
    footprint = bill(framework, Plan(gradient_accumulation=2, checkpointing="full"), optimizer="adam", **facts)
    dynamic = float(footprint.working[0] + footprint.activations[0]) / zoo.count_parameters(Workload(LLAMA, 2048, 64))
    assert dynamic == pytest.approx(held) if held else dynamic < 1.0


@given(
    framework=st.sampled_from([None, *NAMES]),
    data=st.sampled_from([1, 2, 8]),
    tensor=st.sampled_from([1, 4]),
    stage=st.integers(0, 3),
    mode=st.sampled_from(["none", "selective", "full"]),
    precision=st.sampled_from(["fp32", "bf16", "fp16", "fp8"]),
    lora=st.sampled_from([0, 8]),
)
@pytest.mark.slow
def test_the_lines_are_no_debts_and_the_figures_are_ordered(
    framework: Framework | None, data: int, tensor: int, stage: int, mode: str, precision: str, lora: int
) -> None:
    plan = Plan(data=data, tensor=tensor, zero_stage=stage, checkpointing=mode)  # type: ignore[arg-type]
    footprint = bill(framework, plan, precision, lora_rank=lora)
    assert all(value >= 0 for value in footprint.items(0).values())
    assert sum(footprint.items(0).values()) == pytest.approx(float(footprint.total[0]))
    assert footprint.allocated[0] <= footprint.reserved[0] <= footprint.device[0]
    assert footprint.lower_bytes[0] <= footprint.total[0] <= footprint.upper_bytes[0]


@given(framework=st.sampled_from([None, *NAMES]), data=st.sampled_from([2, 4, 16]), stage=st.integers(0, 2))
@pytest.mark.slow
def test_more_sharding_never_holds_more(framework: Framework | None, data: int, stage: int) -> None:
    states = [per_parameter(bill(framework, Plan(data=data, zero_stage=each))) for each in (stage, stage + 1)]
    assert states[1] <= states[0] * (1 + 1e-12)


@pytest.mark.parametrize("framework", NAMES)
def test_frozen_weights_in_four_bits_take_less(framework: Framework) -> None:
    whole, quarter = (bill(framework, Plan(), lora_rank=8, frozen_bits=bits).parameters[0] for bits in (16.0, 4.5))
    assert quarter < 0.4 * whole


def test_frozen_weights_in_eight_bits_take_a_byte_in_layers_and_two_elsewhere() -> None:
    held = {bits: bill(None, Plan(), lora_rank=8, frozen_bits=bits).parameters[0] for bits in (16, 8)}
    in_layers = zoo.count_parameters(Workload(LLAMA, 2048, 64)) - 2 * LLAMA.vocab * LLAMA.hidden - LLAMA.hidden
    assert held[16] - held[8] == pytest.approx(in_layers, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_with_weights_in_int8_need_kernels_around_them(precision: Precision) -> None:
    """MatMul8bitLt moves 3 bytes of each input in FP16 and 7 in BF16, 6 of each output and 7 of each weight."""
    job = Workload(LLAMA, 2048, 1, precision, lora_rank=8, frozen_bits=8)
    layer = zoo.build_sharded_graph(job, Plans.from_plans(Plan())).graph.layers[0]
    moved = sum(float(op.table.bytes()[0]) for op in layer.ops if op.name.endswith("quantize"))
    linears = [(4096, 3 * 4096, 3), (4096, 4096, 1), (4096, 2 * 11008, 2), (11008, 4096, 1)]
    each = 7 if precision == "bf16" else 3
    expected = sum(2048 * (each * k * modules + 6 * n) + 7 * k * n for k, n, modules in linears)
    assert moved == pytest.approx(expected)


@pytest.mark.parametrize("framework", [None, "fsdp2", "accelerate", "torchtune", "deepspeed"])
def test_weights_in_int8_are_not_split_by_zero(framework: Framework | None) -> None:
    job = replace(Workload(zoo.find_preset("llama-3.1-8b"), 4096, 64, framework=framework), lora_rank=16)
    stages = {
        bits: {
            *search.enumerate_plans(replace(job, frozen_bits=bits), parse_gpu_list("h100-sxm:8")[0]).zero_stage.tolist()
        }
        for bits in (4, 8)
    }
    assert max(stages[4]) >= 2 > max(stages[8])


def test_a_fused_loss_needs_a_quarter_of_what_an_eager_one_does() -> None:
    """Llama's logits keep 2 + 4 bytes and need 8 more if eager, against 2 and 2 if fused."""
    eager = bill(None, Plan(micro_batch=4, checkpointing="full"))
    fused = bill(None, Plan(micro_batch=4, checkpointing="full"), fused_loss=True)
    logits = 4 * 2048 * LLAMA.vocab
    assert float((eager.activations - fused.activations)[0]) == pytest.approx(4 * logits)


def test_operators_kept_are_those_of_torchtitan() -> None:
    """The operators kept for a layer of Llama 3 8B take 2 (3 x 4096 + 1024 + 14336) + 4 x 32 bytes per token.

    They are its input, q, v, the output of attention with a statistic per head, and one half of the MLP.
    """
    workload = Workload(zoo.find_preset("llama-3-8b"), 8192, 8, framework="torchtitan")
    sharded = zoo.build_sharded_graph(workload, Plans.from_plans(Plan()))
    (layer,) = sharded.graph.layers
    assert layer.activation_bytes[1][0] / 8192 == 2 * (3 * 4096 + 1024 + 14336) + 4 * 32


def test_what_is_planned_ahead_is_not_cached() -> None:
    assert bill("jax", Plan()).cached[0] == 0 < bill("ddp", Plan()).cached[0]
    assert np.all(bill("torchtitan", Plan()).cached == 0)


def job_of(framework: Framework | None) -> Request:
    return Request("job", Workload(LLAMA, 2048, 64, framework=framework))


def test_a_launcher_is_the_engines_and_keeps_what_the_framework_holds() -> None:
    job = job_of("nemo")
    assert [request.workload.framework for request in build_launcher_requests(job, "megatron")] == ["nemo"]
    assert [request.workload.framework for request in build_launcher_requests(job_of("accelerate"), "trainer")] == [
        "accelerate"
    ]
    unnamed = build_launcher_requests(job_of(None), "trainer")
    assert [request.workload.framework for request in unnamed] == ["huggingface", "accelerate"]
    with pytest.raises(SpecError, match=r"deepspeed is not written for nemo, .* use --launch megatron"):
        build_launcher_requests(job, "deepspeed")
    sized = replace(job_of(None), workload=replace(job_of(None).workload, bucket_mib=25))
    assert [request.workload.framework for request in build_launcher_requests(sized, "trainer")] == ["huggingface"]
    with pytest.raises(SpecError, match="fsdp2 has no buckets of a stated size"):
        build_launcher_requests(sized, "fsdp2")
    with pytest.raises(SpecError, match="torchrun is not written for tensorflow"):
        build_launcher_requests(job_of("tensorflow"), "torchrun")


def test_a_torchtune_job_of_one_gpu_holds_one_gradient_at_a_time_and_no_states() -> None:
    alone, accumulating = (
        bill("torchtune", Plan(micro_batch=64 // repeats, gradient_accumulation=repeats), optimizer="adamw")
        for repeats in (1, 2)
    )
    # The largest block is a layer: 4 products of 4,096 x 4,096 and 3 of 4,096 x 11,008, and two norms, of 2 bytes each.
    layer = 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert alone.gradients[0] in (0, layer), "none while activations are held, one at the end of the backward pass"
    assert alone.optimizer[0] == 0
    assert accumulating.optimizer[0] == 2 * accumulating.gradients[0] == 2 * accumulating.parameters[0]


@pytest.mark.parametrize(("framework", "each"), [(None, 2.0), ("litgpt", 4.0), ("torchtune", 0.0)])
def test_a_product_with_a_quantized_weight_keeps_its_input(framework: Framework | None, each: float) -> None:
    plan = Plan(micro_batch=2)
    narrow, wide = (bill(framework, plan, lora_rank=8, frozen_bits=bits).activations[0] for bits in (4, 16))
    # Inputs of a layer: of queries, keys and values, of the output, of the MLP's first products and of its second.
    inputs = 2 * 2048 * (3 * 4096 + 11008)
    assert narrow - wide == pytest.approx(32 * inputs * each)


def test_scales_are_part_of_a_quantized_weight() -> None:
    held = {name: bill(name, Plan(), lora_rank=8, frozen_bits=4).parameters[0] for name in ("torchtune", "litgpt")}
    head = 32000 * 4096
    layers = zoo.count_parameters(Workload(LLAMA, 2048, 64)) - 2 * head
    # LitGPT quantizes the projection to logits too, which torchtune leaves in 16 bits.
    more = layers * (4.5 - 4.127) / 8 - head * (16 - 4.5) / 8
    # torchtune has an adapter of its own for keys, values and the gate, each with an input side in 16 bits.
    more -= 2.0 * 32 * 8 * 3 * 4096
    assert held["litgpt"] - held["torchtune"] == pytest.approx(more, rel=0.01)


def test_chunks_of_logits_have_their_gradients_one_after_the_other() -> None:
    job = {"execution": "compiled", "lora_rank": 8, "optimizer": "none"}
    plan = Plan(micro_batch=8, checkpointing="full")
    whole = zoo.build_sharded_graph(Workload(LLAMA, 2048, 64, framework="fsdp2", **job), Plans.from_plans(plan))  # type: ignore[arg-type]
    parts = zoo.build_sharded_graph(Workload(LLAMA, 2048, 64, framework="torchtune", **job), Plans.from_plans(plan))  # type: ignore[arg-type]
    logits = 2.0 * 8 * 2048 * 32000
    assert whole.graph.last[0].working_bytes[0] == pytest.approx(logits)
    assert parts.graph.last[0].working_bytes[0] == pytest.approx(logits / 8)


def test_an_output_layer_of_its_own_is_counted() -> None:
    tied = zoo.find_preset("llama-3.2-1b")
    one, other = (zoo.count_parameters(Workload(tied, 512, 8, framework=name)) for name in ("fsdp2", "litgpt"))
    assert tied.tied_embeddings
    assert other - one == tied.vocab * tied.hidden


@pytest.mark.parametrize(
    ("framework", "data", "copies"),
    # OneFlow holds the table's gradient beside weight and moments, and shards them all; others hold only rows.
    [("oneflow", 1, 4.0), ("oneflow", 8, 4.0), (None, 8, 3.0)],
)
def test_embedding_tables_are_billed_by_rows(framework: Framework | None, data: int, copies: float) -> None:
    model = zoo.find_preset("wide-deep-criteo")
    rows = 1e6

    def held(times: float) -> float:
        grown = model.with_dimensions(table_weights=times * 16 * rows, wide_weights=times * rows)
        workload = Workload(grown, 1, 512 * data, "fp32", optimizer="adam", framework=framework)
        plans = Plans.from_plans(Plan(data=data, expert=data, micro_batch=512))
        footprint = memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans)
        return float((footprint.parameters + footprint.gradients + footprint.optimizer)[0])

    assert held(2) - held(1) == pytest.approx(copies * 4 * 17 * rows / data, rel=1e-6)


def test_rows_that_ranks_share_leave_vectors_of_every_rank() -> None:
    model = zoo.find_preset("wide-deep-criteo")
    resident = {}
    for framework in ("oneflow", "ddp"):
        workload = Workload(model, 1, 4096, "fp32", framework=framework)
        plans = Plans.from_plans(Plan(data=8, expert=8, micro_batch=512))
        resident[framework] = memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans).activations[0]
    assert resident["oneflow"] - resident["ddp"] == pytest.approx(512 * 26 * 16 * 4 * 2 * 7)


@pytest.mark.parametrize("framework", [None, *NAMES])
def test_the_range_is_as_wide_as_the_framework_says(framework: Framework | None) -> None:
    footprint, error = (
        bill(framework, Plan(data=2)),
        frameworks.find_framework(Workload(LLAMA, 1, 1, framework=framework)).memory_error,
    )
    assert 0 < error <= 0.2
    assert footprint.lower_bytes == pytest.approx(footprint.total * (1 - error))
    assert footprint.upper_bytes == pytest.approx(footprint.device * (1 + error))
    assert footprint.figure_range("allocated") == (
        pytest.approx(footprint.allocated * (1 - error)),
        pytest.approx(footprint.allocated * (1 + error)),
    )


@pytest.mark.parametrize(
    ("framework", "gpu", "each"),
    # FP8 weights by rows and by columns: beside 16 bits in Megatron-LM, alone in NeMo; Blackwell needs no columns.
    [("megatron", "h100-sxm", 4.0), ("megatron", "b200", 3.0), ("nemo", "h100-sxm", 2.0), ("nemo", "b200", 1.0)],
)
def test_blackwell_needs_no_fp8_weights_by_columns(framework: Framework, gpu: str, each: float) -> None:
    workload, plans = Workload(LLAMA, 2048, 64, "fp8", framework=framework), Plans.from_plans(Plan())
    footprint = memory.footprint(
        workload, zoo.build_sharded_graph(workload, plans), plans, hardware.find_gpu(gpu)
    ).parameters[0]
    ends = 2 * 32000 * 4096 + 4096
    layers = zoo.count_parameters(workload) - ends
    assert footprint == pytest.approx(2 * ends + each * layers, rel=1e-3)


@pytest.mark.parametrize(("version", "hidden"), [("0.4", False), ("0.5", True), (None, True)])
def test_megatron_hides_gradients_from_megatron_core_0_5_on(version: str | None, hidden: bool) -> None:
    job = Workload(LLAMA, 2048, 64, framework="megatron", framework_version=version)
    assert overlap.hides_gradients(job) is hidden
    assert not overlap.hides_gradients(replace(job, overlap=False))


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8", "nvfp4"])
def test_megatron_sums_gradients_in_fp32_and_recipes_of_nvidia_in_bf16(precision: str) -> None:
    """Below 16 bits, Megatron-LM's own example sums them in BF16."""
    job = Workload(LLAMA, 2048, 64, precision, framework="megatron")
    assert frameworks.gradient_bytes(job) == (4.0 if precision == "bf16" else 2.0)
    assert frameworks.gradient_bytes(replace(job, gradient_precision="fp32")) == 4.0
    assert frameworks.gradient_bytes(replace(job, gradient_precision="bf16")) == 2.0
    assert frameworks.gradient_bytes(replace(job, framework="nemo")) == 2.0
    assert frameworks.gradient_bytes(replace(job, framework="nemo", gradient_precision="fp32")) == 4.0
