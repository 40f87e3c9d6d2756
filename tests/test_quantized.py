"""Kernels and time that FP8, experts and eager code add to a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tilecast import kernels, memory, search, uncertainty, zoo
from tilecast.api import training_job
from tilecast.cli import main
from tilecast.graph import KIND_NAMES, Block, KernelTable, Op, Shards
from tilecast.hardware import find_gpu
from tilecast.inputs.gpu_list import build_assumed_pool
from tilecast.spec import ELEMENT_BYTES, PRECISIONS, Plan, Plans, SpecError, Workload
from tilecast.step import blocks as blocks_of_step

DENSE = Workload(zoo.find_preset("llama-3-8b"), 4096, 8, precision="fp8", framework="megatron", fused_kernels=True)
SPARSE = replace(DENSE, model=zoo.find_preset("qwen3-30b-a3b"))
BIASED = replace(SPARSE, model=zoo.find_preset("gpt-oss-120b"), precision="bf16")


def blocks(job: Workload, **degrees: int) -> dict[str, Block]:
    columns = {"micro_batch": 1, "tensor": 1, "context": 1, "expert": 1, "sequence_parallel": 0, **degrees}
    shards = Shards(**{name: np.array([value]) for name, value in columns.items()})
    return {block.name: block for block in zoo.build(job, shards).blocks}


def ops(job: Workload, block: str, **degrees: int) -> dict[str, Op]:
    return {op.name: op for op in blocks(job, **degrees)[block].ops}


def precision(op: Op) -> str:
    return PRECISIONS[op.table.precision[0]]


def moved(op: Op) -> float:
    return float(op.table.bytes()[0])


def test_operands_of_fp8_products_are_cast() -> None:
    layer_ops = ops(DENSE, "layer")
    tokens, hidden, wide = 4096.0, 4096.0, 14336.0
    # Reads 16 bits, and writes one byte by rows and one by columns.
    assert moved(layer_ops["mlp.down.quantize"]) == 4 * tokens * wide
    assert moved(layer_ops["mlp.down.gradient.quantize"]) == 4 * tokens * hidden
    assert moved(layer_ops["mlp.up.gradient.quantize"]) == 4 * tokens * 2 * wide
    assert "mlp.up.quantize" not in layer_ops  # the norm already writes FP8
    assert not any("quantize" in name for name in ops(replace(DENSE, precision="bf16"), "layer"))


def test_a_forward_pass_alone_casts_one_copy() -> None:
    layer_ops = ops(replace(DENSE, training=False), "layer")
    assert moved(layer_ops["mlp.down.quantize"]) == 3 * 4096.0 * 14336.0
    assert not any("gradient" in name for name in layer_ops)


def test_tensor_ranks_cast_and_gather_their_own_part() -> None:
    whole, part = ({**blocks(DENSE, tensor=4, sequence_parallel=spread)}["layer"] for spread in (0, 1))
    name = "attention.output.gradient.quantize"
    each = [moved(next(op for op in block.ops if op.name == name)) for block in (whole, part)]
    assert each[0] == 4 * each[1]
    narrow, wide = (
        {
            item.name: float(item.size_bytes[0])
            for item in blocks(job, tensor=4, sequence_parallel=1)["layer"].collectives
        }
        for job in (DENSE, replace(DENSE, precision="bf16"))
    )
    assert narrow["mlp.gather"] == wide["mlp.gather"] / 2
    assert narrow["mlp.scatter"] == wide["mlp.scatter"]  # sums stay in 16 bits


def test_router_and_head_stay_in_16_bits() -> None:
    assert precision(ops(SPARSE, "expert-layer")["experts.router"]) == "bf16"
    assert precision(ops(SPARSE, "expert-layer")["experts.up"]) == "fp8"
    assert precision(ops(SPARSE, "head")["head.logits"]) == "bf16"
    tf32 = replace(SPARSE, precision="tf32")
    assert precision(ops(tf32, "head")["head.logits"]) == "tf32"


@pytest.mark.parametrize(("framework", "calls"), [("megatron", 16.0), ("nemo", 16.0), ("torchtitan", 1.0)])
def test_a_kernel_for_each_expert_or_one_for_all(framework: Any, calls: float) -> None:
    layer_ops = ops(replace(SPARSE, framework=framework), "expert-layer", expert=8)
    assert float(np.asarray(layer_ops["experts.up"].launches).item()) == calls
    assert float(np.asarray(layer_ops["experts.up.quantize"].launches).item()) == calls
    assert layer_ops["experts.router"].launches == 1.0


def test_the_work_of_experts_is_that_of_their_tokens_however_they_are_launched() -> None:
    slots, hidden, wide = 4096 * 8.0, 2048.0, 768.0
    for framework in ("megatron", "torchtitan"):
        layer_ops = ops(replace(SPARSE, framework=framework), "expert-layer", expert=8)
        assert layer_ops["experts.up"].table.flops()[0] == 2 * slots * hidden * 2 * wide
        assert moved(layer_ops["experts.down.quantize"]) == 4 * slots * wide


def test_biases_and_limits_of_experts_are_passes_of_their_own() -> None:
    layer_ops, plain = ops(BIASED, "expert-layer", expert=8), ops(replace(SPARSE, precision="bf16"), "expert-layer")
    slots, hidden, wide = 4096 * 4.0, 2880.0, 2880.0
    # A product in FP32, a sum, a copy and a cast: 4 + (2 + 4) + 4 + 4 + 4 + 4 + 4 + 2 bytes per element.
    assert moved(layer_ops["experts.weighted-bias"]) == 28 * slots * hidden
    assert moved(layer_ops["experts.activation.clamp"]) == 16 * slots * wide
    assert not {"experts.weighted-bias", "experts.activation.clamp"} & set(plain)
    compiled = ops(replace(BIASED, execution="compiled"), "expert-layer", expert=8)
    assert "experts.activation.clamp" not in compiled


@pytest.mark.parametrize(
    ("facts", "hidden", "wide"),
    [
        # The inputs of both products, and the two inputs of the gate in 16 bits.
        ({}, 1, 1 + 4),
        ({"precision": "bf16"}, 2, 2 + 4),
        # Also the activated gate, and the outputs that the tokens' weights multiply.
        ({"precision": "bf16", "fused_kernels": False}, 2 + 2, 2 + 6),
    ],
)
def test_experts_keep_what_their_products_read(facts: dict[str, Any], hidden: int, wide: int) -> None:
    job = replace(SPARSE, **facts)
    fewer = replace(job, model=job.model.with_dimensions(top_k=4))
    more, less = (float(blocks(one, expert=8)["expert-layer"].activation_bytes[0, 0]) for one in (job, fewer))
    assert more - less == 4096 * 4 * (hidden * 2048 + wide * 768)


def test_a_norm_in_operators_takes_many_passes() -> None:
    job = replace(DENSE, precision="bf16", fused_kernels=False)
    written, fused = (ops(replace(job, framework=name), "layer") for name in ("huggingface", "fsdp2"))
    elements = 4096.0 * 4096.0
    assert moved(written["attention.norm"]) * written["attention.norm"].count == pytest.approx(36 * elements)
    assert moved(fused["attention.norm"]) == 4 * elements
    compiled = ops(replace(job, framework="huggingface", execution="compiled"), "layer")
    assert moved(compiled["attention.norm"]) == 4 * elements


def test_an_activation_in_operators_takes_as_many_kernels_as_the_model_writes() -> None:
    job = Workload(zoo.find_preset("gpt2-xl"), 1024, 8, precision="fp16")
    written, one = (ops(replace(job, framework=name), "layer") for name in ("huggingface", "ddp"))
    assert written["mlp.activation"].count == 8.0
    assert one["mlp.activation"].count == 1.0


def test_attention_meets_the_limit_of_power_later_than_products() -> None:
    gpu = find_gpu("b200")
    assert gpu.sustained_ratio["attention"] > gpu.sustained_ratio["bf16"]
    table = KernelTable.from_dimensions(
        "attention", "bf16", batch=1.0, heads=64.0, kv_heads=8.0, seq_q=8192.0, seq_kv=8192.0, head_dim=128.0,
        causal=1.0, backward=0.0,
    )  # fmt: skip
    held = replace(gpu, sustained_ratio={**gpu.sustained_ratio, "attention": gpu.sustained_ratio["bf16"]})
    assert kernels.predict_kernel_times(table, held).seconds[0] > kernels.predict_kernel_times(table, gpu).seconds[0]


@pytest.mark.parametrize(("precision", "per_watt"), [("fp8", 2.5e12), ("mxfp8", 2.5e12), ("nvfp4", 5.0e12)])
@pytest.mark.parametrize("name", ["b200", "gb200", "b300", "gb300"])
def test_quantized_products_of_blackwell_sustain_as_much_per_watt(name: str, precision: Any, per_watt: float) -> None:
    gpu = find_gpu(name)
    reached = 0.73 * gpu.sustained_ratio[precision] * gpu.peak(precision)
    assert reached / gpu.tdp_w == pytest.approx(per_watt, rel=0.02)


def test_every_kind_of_these_operators_is_priced() -> None:
    plans = Plans.from_plans(Plan(data=8, expert=8, micro_batch=1))
    for job in (SPARSE, BIASED):
        sharded = zoo.build_sharded_graph(job, plans)
        times = kernels.predict_kernel_times(sharded.graph.kernels()[0], find_gpu("gb200"))
        assert np.isfinite(times.seconds).all() and (times.seconds > 0).all()
        assert {"gemm", "attention", "elementwise"} <= {KIND_NAMES[code] for code in times.table.kind}


def test_eager_code_activates_a_gate_and_multiplies_apart() -> None:
    job = replace(DENSE, precision="bf16", framework=None)
    apart, one = (ops(replace(job, fused_kernels=fused), "layer") for fused in (False, True))
    elements = 4096.0 * 14336.0
    assert moved(apart["mlp.activation"]) == 2 * 5 * elements and apart["mlp.activation"].launches == 2.0
    assert moved(one["mlp.activation"]) == 2 * 3 * elements and one["mlp.activation"].launches == 1.0
    assert apart["attention.rotary"].count == 5.0 and one["attention.rotary"].count == 1.0


def test_bytes_of_an_element_include_the_scales_of_its_block() -> None:
    assert ELEMENT_BYTES["mxfp8"] == pytest.approx(33 / 32)
    assert ELEMENT_BYTES["nvfp4"] == pytest.approx(9 / 16)


@pytest.mark.parametrize("name", ["b200", "gb200", "b300", "gb300"])
def test_blackwell_runs_products_of_blocks_and_hopper_does_not(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.peak("mxfp8") == gpu.peak("fp8")
    assert 2.0 <= gpu.peak("nvfp4") / gpu.peak("fp8") <= 3.0
    assert not {"mxfp8", "nvfp4"} & set(find_gpu("h200").peak_flops)


def test_some_layers_of_nvfp4_stay_in_16_bits() -> None:
    job = replace(DENSE, precision="nvfp4")
    mine, bf16 = ops(job, "layer"), ops(replace(DENSE, precision="bf16"), "layer")
    share = 4 / 32
    for name, op in bf16.items():
        if name.startswith("mlp.") and op.table.kind[0] == KIND_NAMES.index("gemm"):
            kept, quantized = mine[f"{name}.bf16"], mine[name]
            assert (precision(kept), precision(quantized)) == ("bf16", "nvfp4")
            assert kept.count / op.count == pytest.approx(share)
            assert kept.count + quantized.count == pytest.approx(op.count)
    casts = [op for name, op in mine.items() if name.endswith(".quantize")]
    assert casts and all(op.count == pytest.approx(1 - share) for op in casts)
    assert not [name for name in ops(replace(DENSE, precision="mxfp8"), "layer") if name.endswith(".bf16")]


def test_narrower_products_take_less_time_and_a_wider_range() -> None:
    pool = build_assumed_pool(find_gpu("b200"), 8)
    plan = Plans.from_plans(Plan(data=8, zero_stage=1, micro_batch=1))
    steps, widths = [], []
    for name in ("bf16", "mxfp8", "nvfp4"):
        job = replace(DENSE, precision=name, sequence_length=8192, global_batch=64)
        priced = search.price(job, plan, pool)
        low, high = uncertainty.interval(job, priced, 0)
        steps.append(float(priced.step_s[0]))
        widths.append(high / low)
    assert steps == sorted(steps, reverse=True)
    assert widths[2] > widths[1]


def test_blocks_need_a_copy_for_each_direction_on_blackwell() -> None:
    pool = build_assumed_pool(find_gpu("b200"), 1)
    plan = Plans.from_plans(Plan())
    held = {}
    for name in ("bf16", "fp8", "mxfp8", "nvfp4"):
        job = replace(DENSE, precision=name)
        graph = zoo.build_sharded_graph(job, plan)
        bytes_ = memory.footprint(job, graph, plan, pool.gpu).parameters
        held[name] = float(bytes_[0]) / zoo.count_parameters(job)
    assert held["bf16"] < held["fp8"] < held["nvfp4"] < held["mxfp8"]
    assert held["mxfp8"] - held["bf16"] == pytest.approx(2 * 33 / 32, rel=0.2)


@pytest.mark.parametrize(
    ("framework", "version", "name", "known"),
    [
        ("megatron", "0.11", "mxfp8", False), ("megatron", "0.12", "mxfp8", True), ("megatron", "0.14", "nvfp4", False),
        ("nemo", "25.09", "nvfp4", False), ("nemo", "25.11", "nvfp4", True), ("nemo", None, "nvfp4", True),
    ],
)  # fmt: skip
def test_a_version_without_the_precision_is_refused(
    framework: str, version: str | None, name: str, known: bool
) -> None:
    training = {"sequenceLength": 1024, "globalBatchSize": 8, "precision": name, "framework": framework}
    training |= {"frameworkVersion": version} if version else {}
    document = training_job.training_job_document("job", {"model": {"preset": "gpt2"}, "training": training})
    if known:
        assert training_job.read_request(document).workload.precision == name
    else:
        with pytest.raises(SpecError, match="or later, or bf16"):
            training_job.read_request(document)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("mxfp8", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8"),
        ("nvfp4", "--fp4-format e2m1 --fp4-recipe nvfp4 --first-last-layers-bf16"),
    ],
)
def test_megatron_is_told_the_recipe(name: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["advise", "llama-3-8b", "--seq", "4096", "--batch", "64", "--gpus", "b200:8", "--precision", name]
    assert main([*job, "--launch", "megatron"]) == 0
    assert flags in " ".join(capsys.readouterr().out.replace("\\", " ").split())


def test_current_scaling_takes_the_host_longer_than_delayed_scaling() -> None:
    plans = Plans.from_plans(Plan(data=8, expert=8, micro_batch=1))

    def host_s(version: str, gpu: str, precision: Any = "fp8") -> float:
        job = replace(SPARSE, precision=precision, framework="nemo", framework_version=version)
        sharded = zoo.build_sharded_graph(job, plans)
        quantized = [op for block in sharded.graph.blocks for op in block.ops if op.name.endswith(".quantize")]
        assert bool(quantized) == (precision == "fp8")
        times = blocks_of_step.kernel_seconds(job, sharded, find_gpu(gpu)).blocks
        return sum(float(np.max(one.forward.host_s)) * one.block.repeat for one in times)

    assert host_s("26.04", "h100-sxm") - host_s("26.04", "gb200") > 0
    assert host_s("26.04", "h100-sxm", "bf16") == host_s("26.04", "gb200", "bf16")
    assert host_s("25.05", "h100-sxm") == host_s("25.05", "gb200")
