"""Recomputation of modules and of some layers: its notation, bytes, seconds, search and launch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tilecast import memory, search, zoo
from tilecast.api.training import Training
from tilecast.cli import main
from tilecast.explain import Explanation, explain_plan
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.recomputation import (
    BY_CODE,
    CHECKPOINTING,
    MODULES,
    RECOMPUTED,
    encode_modules,
    join_modules,
    split_modules,
)
from tilecast.spec import Framework, PartialPlan, Plan, Plans, SpecError, Workload

H100 = find_gpu("h100-sxm")
POOL = Pool("h100", H100, 8, 16, find_link(H100.intra_link), find_link("infiniband-ndr-8x400"))
DEEPSEEK = Workload(zoo.find_preset("deepseek-v3"), 4096, 2048, framework="megatron")
MIXTRAL = Workload(zoo.find_preset("mixtral-8x7b"), 4096, 256, framework="megatron")
LLAMA = Workload(zoo.find_preset("llama-3.1-8b"), 8192, 128, framework="megatron")
GPT = Workload(zoo.find_preset("gpt2-xl"), 1024, 128)
JOBS = {"deepseek": DEEPSEEK, "mixtral": MIXTRAL, "llama": LLAMA, "gpt": GPT}
PLAN = Plan(data=8, expert=8, zero_stage=1, gradient_accumulation=4)


def plan_of(workload: Workload, value: str) -> Plan:
    return replace(PLAN, expert=8 if zoo.count_experts(workload.model) else 1, checkpointing=value)


def activations(workload: Workload, value: str) -> float:
    plans = Plans.from_plans(plan_of(workload, value))
    return float(memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans).activations[0])


def step_s(workload: Workload, *plans: Plan) -> list[float]:
    return search.price(workload, Plans.from_plans(*plans), POOL).step_s.tolist()


def explained(workload: Workload, plan: Plan) -> Explanation:
    return explain_plan(workload, plan, POOL, step_s(workload, plan)[0])


def values_of(workload: Workload) -> list[str]:
    own = zoo.list_modules(workload.model)
    return [value for value in RECOMPUTED[len(CHECKPOINTING) :] if own >= {*split_modules(value)}]


def test_every_value_has_one_code_and_one_name() -> None:
    assert len(set(RECOMPUTED)) == len(RECOMPUTED) == len(BY_CODE)
    for code, value in enumerate(RECOMPUTED):
        assert encode_modules(value) == code
        assert tuple(np.array(MODULES)[BY_CODE[code]]) == split_modules(value)
        assert code < len(CHECKPOINTING) or join_modules(split_modules(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("ac=moe_act+layernorm", "layernorm+moe_act"), ("ac-layernorm+moe_act", "layernorm+moe_act"),
     ("ac=moe+moe_act+shared_experts", "moe"), ("ac-sel", "selective"), ("ac-full", "full")],
)  # fmt: skip
def test_modules_are_read_in_any_order(text: str, value: str) -> None:
    stated = PartialPlan.parse(f"dp=8,mb=1,{text}", "--plan")
    assert stated.checkpointing == value
    printed = str(Plan(data=8, checkpointing=value))
    assert PartialPlan.parse(printed, "--plan").checkpointing == value


@pytest.mark.parametrize("text", ["ac=layernorm+", "ac=norm", "ac-", "ac=full+moe", "ac=+"])
def test_unknown_modules_are_one_line_with_all_known_ones(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        PartialPlan.parse(f"dp=8,{text}", "--plan")
    assert "\n" not in str(caught.value) and caught.value.field == "--plan"


@pytest.mark.parametrize("name", JOBS)
def test_more_modules_keep_less_and_take_longer(name: str) -> None:
    workload = JOBS[name]
    values = values_of(workload)
    kept = {value: activations(workload, value) for value in ("none", "full", *values)}
    seconds = dict(zip(kept, step_s(workload, *(plan_of(workload, value) for value in kept)), strict=True))
    assert seconds["none"] < seconds["full"] and kept["full"] < kept["none"]
    for value in values:
        assert kept["full"] <= kept[value] <= kept["none"]
        assert seconds["none"] <= seconds[value] <= seconds["full"] * (1 + 1e-9)
    for less, more in itertools.product(values, values):
        if {*split_modules(less)} < {*split_modules(more)}:
            assert kept[more] <= kept[less] * (1 + 1e-12)
            assert seconds[more] >= seconds[less] * (1 - 1e-12)


def test_latent_up_projections_free_queries_keys_and_values() -> None:
    freed = activations(DEEPSEEK, "none") - activations(DEEPSEEK, "mla_up_proj")
    queries_keys_values = 2 * 4096 * 128 * (192 + 192 + 128)
    assert freed == pytest.approx(61 * queries_keys_values, rel=1e-9)


SAVE_QKV = "layernorm+mlp+attn_out"
"""MaxText's remat_policy save_qkv_proj."""


def test_a_policy_that_saves_the_projections_keeps_them_and_the_input_of_the_layer() -> None:
    job = replace(LLAMA, framework="jax")
    plans = Plans.from_plans(Plan(data=8, zero_stage=3))
    (layer,) = zoo.build_sharded_graph(job, plans).graph.layers
    hidden, projected = 4096, 4096 + 2 * 1024
    assert layer.kept_bytes(encode_modules(SAVE_QKV)) == pytest.approx(2 * 8192 * (hidden + projected), rel=1e-9)
    assert layer.kept_bytes(encode_modules("full")) == pytest.approx(2 * 8192 * hidden, rel=1e-9)


def test_a_policy_that_saves_the_projections_computes_all_but_them_again() -> None:
    """The last product of a layer has no reader in the backward pass, so XLA computes it once in both cases."""
    job = replace(LLAMA, framework="jax", execution="xla")
    plans = [Plan(data=8, zero_stage=3, gradient_accumulation=4, checkpointing=value) for value in (SAVE_QKV, "full")]
    runs = [{op.name: op.runs for op in explained(job, plan).operators} for plan in plans]
    fewer = {name for name in runs[0] if runs[0][name] < runs[1][name]}
    assert fewer and all(name.startswith(("attention.qkv", "attention.rotary")) for name in fewer)
    saved, full = step_s(job, *plans)
    assert saved < full


def test_megatron_cannot_recompute_all_behind_the_projections() -> None:
    with pytest.raises(SpecError, match=r"training.recomputeModules: megatron has no attn_out; use one of"):
        search.enumerate_plans(replace(LLAMA, checkpointing="attn_out"), POOL)


def test_norms_inside_products_are_not_recomputed() -> None:
    """Megatron's layers of Llama have no norm of their own; those of a job without a framework have two."""
    assert activations(LLAMA, "layernorm") == activations(LLAMA, "none")
    none, norm = step_s(LLAMA, plan_of(LLAMA, "none"), plan_of(LLAMA, "layernorm"))
    assert norm == none
    free = replace(LLAMA, framework=None)
    assert activations(free, "none") - activations(free, "layernorm") == pytest.approx(32 * 2 * 2 * 8192 * 4096)
    none, norm = step_s(free, plan_of(free, "none"), plan_of(free, "layernorm"))
    assert norm > none


def test_recomputed_experts_exchange_again() -> None:
    workload, plan = MIXTRAL, plan_of(MIXTRAL, "none")
    counts = {}
    for value in ("none", "moe_act", "moe", "full"):
        report = explained(workload, replace(plan, checkpointing=value))
        counts[value] = sum(item.runs for item in report.exchanges if item.group == "expert")
    assert counts["none"] == counts["moe_act"] < counts["moe"] == counts["full"]


def test_operators_of_named_modules_run_twice() -> None:
    one, again = (
        {item.name: item.runs for item in explained(DEEPSEEK, plan_of(DEEPSEEK, value)).operators
         if item.phase == "forward"}
        for value in ("none", "layernorm+mla_up_proj+moe_act")
    )  # fmt: skip
    doubled = {name for name in one if again[name] == 2 * one[name]}
    assert doubled == {
        "attention.norm", "attention.key-value-up", "attention.query-up", "attention.rotary", "attention.concatenate",
        "experts.norm", "experts.activation",
    }  # fmt: skip
    assert all(again[name] == one[name] for name in set(one) - doubled)


@pytest.mark.parametrize(("framework", "last"), [("fsdp2", 1.0), ("torchtitan", 1.0), ("deepspeed", 2.0), ("jax", 1.0)])
def test_frameworks_that_stop_early_do_not_repeat_the_last_product(framework: str, last: float) -> None:
    job = replace(LLAMA, framework=framework)  # type: ignore[arg-type]
    once, again = (
        {item.name: item.runs for item in explained(job, replace(plan_of(job, value), zero_stage=3)).operators}
        for value in ("none", "full")
    )
    assert again["mlp.down"] == last * once["mlp.down"]
    assert again["mlp.up"] == 2 * once["mlp.up"]
    dropped = replace(job, model=replace(job.model, dropout=True))  # its mask needs the product
    repeated = {
        item.name: item.runs for item in explained(dropped, replace(plan_of(job, "full"), zero_stage=3)).operators
    }
    assert repeated["mlp.down"] == 2 * once["mlp.down"]


@pytest.mark.parametrize("workload", [LLAMA, replace(GPT, framework="torchtitan")], ids=["megatron", "torchtitan"])
def test_some_layers_lie_between_none_and_all(workload: Workload) -> None:
    layers = workload.model.layers
    full = plan_of(workload, "full")
    half, whole = (replace(workload, recompute_layers=count) for count in (layers // 2, 2 * layers))
    kept = [activations(job, value) for job, value in ((workload, "none"), (half, "full"), (whole, "full"))]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2)
    assert kept[2] == activations(workload, "full")
    none_s, full_s = step_s(workload, replace(full, checkpointing="none"), full)
    assert step_s(half, full)[0] == pytest.approx((none_s + full_s) / 2, rel=0.02)
    assert step_s(whole, full)[0] == full_s


def test_layers_are_those_of_each_stage() -> None:
    job = replace(LLAMA, recompute_layers=4)
    plan = Plan(data=2, pipeline=4, zero_stage=1, gradient_accumulation=64, checkpointing="full")
    none, half = (
        float(memory.footprint(one, zoo.build_sharded_graph(one, plans), plans).activations[0])
        for one, value in ((LLAMA, "none"), (job, "full"))
        for plans in [Plans.from_plans(replace(plan, checkpointing=value))]
    )
    layer = (activations(LLAMA, "none") - activations(LLAMA, "full")) / 32
    assert none - half == pytest.approx(4 * 4 * layer)  # layers of the first stage, micro-batches in flight


def test_the_search_tries_policies_that_the_framework_and_the_model_have() -> None:
    assert search.list_searched_recomputations(DEEPSEEK) == (
        *CHECKPOINTING, "layernorm+moe_act", "layernorm+mla_up_proj+moe_act",
    )  # fmt: skip
    assert search.list_searched_recomputations(MIXTRAL) == (*CHECKPOINTING, "layernorm+moe_act")
    assert search.list_searched_recomputations(LLAMA) == CHECKPOINTING
    assert search.list_searched_recomputations(replace(MIXTRAL, framework="torchtitan")) == CHECKPOINTING
    codes = {*np.unique(search.enumerate_plans(MIXTRAL, POOL).checkpointing).tolist()}
    assert codes == {0, 1, 2, encode_modules("layernorm+moe_act")}
    stated = replace(MIXTRAL, checkpointing="moe")
    assert {*search.enumerate_plans(stated, POOL).checkpointing.tolist()} == {encode_modules("moe")}


@pytest.mark.parametrize(
    ("framework", "value", "field"),
    [("torchtitan", "moe", "training.recomputeModules"), ("megatron", "mlp_act", "training.recomputeModules")],
)
def test_a_framework_without_modules_is_refused(framework: str, value: str, field: str) -> None:
    job = replace(MIXTRAL if value == "moe" else LLAMA, framework=framework, checkpointing=value)  # type: ignore[arg-type]
    with pytest.raises(SpecError) as caught:
        search.enumerate_plans(job, POOL)
    assert caught.value.field == field and caught.value.remedy


def test_all_layers_or_none_is_refused_with_the_field() -> None:
    job = replace(LLAMA, framework="deepspeed", checkpointing="full", recompute_layers=4)
    with pytest.raises(SpecError, match=r"training.recomputeLayers: deepspeed recomputes all layers or none"):
        search.enumerate_plans(job, POOL)


def test_modules_that_a_model_lacks_are_refused() -> None:
    with pytest.raises(SpecError, match=r"no mla_up_proj to recompute; use modules among"):
        zoo.refuse_useless_recomputation(LLAMA.model, "mla_up_proj", "plan")
    with pytest.raises(SpecError, match=r"resnet-50 have no layernorm to recompute; use none"):
        zoo.refuse_useless_recomputation(zoo.find_preset("resnet-50"), "layernorm", "plan")


@pytest.mark.parametrize(
    "fields",
    [
        {"recomputeModules": ["moe"], "activationCheckpointing": "full"},
        {"recomputeLayers": 4, "activationCheckpointing": "selective"},
        {"recomputeLayers": 4, "recomputeModules": ["moe"]},
        {"recomputeLayers": 0},
        {"recomputeModules": ["norm"]},
    ],
)
def test_contradictions_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"recompute"):
        Training.model_validate({"globalBatchSize": 8, "sequenceLength": 128, **fields})


MEGATRON = [
    "advise",
    "deepseek-v2-lite",
    "--seq",
    "4096",
    "--batch",
    "256",
    "--gpus",
    "h100-sxm:16",
    "--launch",
    "megatron",
]
PRINTED = [
    (["--plan", "ep=8,zero=1,mb=1,ac=layernorm+mla_up_proj+moe_act"],
     "--recompute-granularity selective --recompute-modules layernorm mla_up_proj moe_act"),
    (["--plan", "pp=2,ep=8,zero=1,mb=1,ac=full", "--recompute-layers", "7"],
     "--recompute-granularity full --recompute-method block --recompute-num-layers 7"),
    (["--plan", "pp=2,ep=8,zero=1,mb=1,ac=full", "--recompute-layers", "99"],
     "--recompute-granularity full --recompute-method block --recompute-num-layers 14"),
    (["--plan", "ep=8,zero=1,mb=1,ac=full"],
     "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "flags"), PRINTED)
def test_megatron_gets_the_flags_that_are_priced(
    options: list[str], flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MEGATRON, *options, "--launch", "megatron"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    assert flags in printed


def test_torchtitan_recomputes_all_layers_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["advise", "llama-3-8b", "--seq", "8192", "--batch", "64", "--gpus", "h100-sxm:8", "--launch", "torchtitan"]
    assert main([*job, "--recompute-layers", "8"]) == 2
    assert "since 0.3 it recomputes all layers of a stage or none" in capsys.readouterr().err
    assert main([*job, "--plan", "ac=full"]) == 0
    assert "activation_checkpoint=FullAC.Config()," in capsys.readouterr().out


def offloaded(workload: Workload, share: float) -> Workload:
    return replace(workload, offloaded_activations=share)


@pytest.mark.parametrize("value", ["none", "full"])
def test_offloaded_activations_leave_the_gpu_and_take_time_at_most(value: str) -> None:
    shares = (0.0, 0.25, 0.5, 1.0)
    bills = [activations(offloaded(GPT, share), value) for share in shares]
    ends = bills[0] - (bills[0] - bills[-1])  # embedding and head stay
    assert bills == pytest.approx([ends + (1 - share) * (bills[0] - ends) for share in shares])
    seconds = [step_s(offloaded(GPT, share), plan_of(GPT, value))[0] for share in shares]
    assert seconds == sorted(seconds)


def test_a_slow_host_link_bounds_the_step() -> None:
    """Without recomputation a small layer keeps more than PCIe can take away while it runs."""
    plan = plan_of(GPT, "none")
    plans = Plans.from_plans(plan)
    sharded = zoo.build_sharded_graph(GPT, plans)
    layers = zip(sharded.graph.layers, zoo.list_layer_saved_bytes(GPT, sharded, plans), strict=True)
    kept = float(sum(block.repeat * one[0] for block, one in layers))
    whole, half = (step_s(offloaded(GPT, share), plan)[0] for share in (1.0, 0.5))
    crossing_s = 2 * plan.gradient_accumulation * kept / 50.4e9
    assert half == step_s(GPT, plan)[0] < whole  # half of them cross behind the passes
    assert whole > crossing_s


def test_offloading_needs_a_framework_that_does_it() -> None:
    plans = search.enumerate_plans(offloaded(LLAMA, 0.5), POOL)
    assert len(plans) and {*plans.pipeline.tolist()} == {1} and {*plans.checkpointing.tolist()} == {0}
    with pytest.raises(SpecError, match=r"training.offloadActivations: torchtitan keeps activations on the GPU"):
        search.enumerate_plans(offloaded(replace(LLAMA, framework="torchtitan"), 0.5), POOL)


def test_saved_tensors_wait_for_their_copy_to_the_host() -> None:
    """torchtune and TRL keep the last five saved tensors on the GPU, one for each layer that is recomputed."""
    plan = Plan(micro_batch=4, gradient_accumulation=2, zero_stage=3, data=8, checkpointing="full")
    plans = Plans.from_plans(plan)

    def working(framework: Framework, share: float) -> float:
        workload = replace(LLAMA, framework=framework, offloaded_activations=share)
        sharded = zoo.build_sharded_graph(workload, plans)
        return float(memory.FootprintTable.from_plans(workload, sharded, plans, H100).micro.layer_working[0])

    each = 4 * 8192 * 4096 * 2
    assert working("torchtune", 1.0) - working("torchtune", 0.0) == 5 * each
    assert working("accelerate", 0.5) - working("accelerate", 0.0) == 2.5 * each
    assert working("jax", 1.0) - working("jax", 0.0) == 2 * each


@pytest.mark.parametrize("framework", ["torchtune", "huggingface", "accelerate", "deepspeed", "ddp"])
def test_hooks_on_saved_tensors_offload_with_any_recomputation(framework: Framework) -> None:
    workload = offloaded(replace(LLAMA, framework=framework), 1.0)
    plans = search.enumerate_plans(workload, POOL)
    assert {0, 2} <= {*plans.checkpointing.tolist()}


def test_offloaded_activations_are_billed_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """32 layers keep 8192 x 4096 x 2 bytes each of a micro-batch that is recomputed, which is 2 GiB."""
    job = ["advise", "llama-3.1-8b", "--seq", "8192", "--batch", "8", "--gpus", "h100-sxm:8"]
    plan = ["--framework", "torchtune", "--plan", "zero=3,mb=1,ac=full"]
    assert main([*job, *plan, "--offload-activations", "1"]) == 0
    assert "Offloaded activations take at most 2.0 GiB a GPU, 16 GiB a node" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main([*job, *plan]) == 0
    assert "Offloaded" not in capsys.readouterr().out


@pytest.mark.parametrize("launcher", ["torchrun", "fsdp2", "deepspeed", "trainer", "accelerate"])
def test_a_launcher_that_cannot_offload_activations_says_so(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["advise", "llama-3.1-8b", "--seq", "2048", "--batch", "64", "--gpus", "h100-sxm:8"]
    assert main([*job, "--offload-activations", "1", "--launch", launcher]) == 2
    error = capsys.readouterr().err
    assert "is not told here of training.offloadActivations; leave it out, or launch it by megatron" in error


def test_megatron_offloads_whole_layers(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["advise", "llama-3.1-8b", "--seq", "8192", "--batch", "64", "--gpus", "h100-sxm:8", "--launch", "megatron"]
    assert main([*job, "--plan", "tp=8,sp=1,mb=1", "--offload-activations", "0.5"]) == 0
    assert "--cpu-offloading-num-layers 16" in " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    assert main([*job, "--plan", "tp=8,sp=1,mb=1", "--offload-activations", "0.51"]) == 2
    assert "whole layers" in capsys.readouterr().err
    assert main([*job, "--plan", "tp=4,pp=2,mb=1", "--offload-activations", "0.5"]) == 2
    assert "without pipeline and recomputation" in capsys.readouterr().err
