"""The explanation of a plan: the sums of its lines, and what they say of each kernel."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tilecast import search, zoo
from tilecast.cli import main
from tilecast.explain import Explanation, explain_plan
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.render.explain import gradient_exchanges
from tilecast.spec import Framework, Plan, Plans, Workload

H100 = find_gpu("h100-sxm")
POOL = Pool("h100", H100, 8, 4, find_link(H100.intra_link), find_link("infiniband-ndr-8x400"))
GPT = Workload(zoo.find_preset("gpt2-xl"), 1024, 64)
JOBS = {
    "gpt": GPT,
    "llama": Workload(zoo.find_preset("llama-3.2-1b"), 2048, 16),
    "mixtral": Workload(zoo.find_preset("mixtral-8x7b"), 2048, 16),
    "resnet": Workload(zoo.find_preset("resnet-50"), 1, 64),
    "bert": Workload(zoo.find_preset("bert-large"), 512, 16, execution="compiled"),
    "t5": Workload(zoo.find_preset("t5-v1.1-base"), 512, 16),
    "serving": Workload(zoo.find_preset("gpt2"), 1024, 16, training=False, optimizer="none"),
}


def explained(workload: Workload, plan: Plan) -> tuple[Explanation, search.PricedPlans]:
    priced = search.price(workload, Plans.from_plans(plan), POOL)
    return explain_plan(workload, plan, POOL, float(priced.step_s[0])), priced


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_operators_sum_to_the_compute_of_a_step(job: str, mode: str) -> None:
    """On one GPU there is no contention and no straggler, so the lines are the whole compute."""
    workload = JOBS[job]
    if not workload.training and mode != "none":
        pytest.skip("a forward pass alone recomputes nothing")
    plan = Plan(micro_batch=4, gradient_accumulation=workload.global_batch // 4, checkpointing=mode)  # type: ignore[arg-type]
    explanation, priced = explained(workload, plan)
    assert explanation.seconds * plan.gradient_accumulation == pytest.approx(float(priced.times.compute[0]))
    assert [one.seconds for one in explanation.operators] == sorted(
        (one.seconds for one in explanation.operators), reverse=True
    )
    for one in explanation.operators:
        assert 0 < one.utilization <= 1
        assert one.bound == ("compute" if one.flops / H100.peak(one.precision) >= 0.999 * one.roofline_s else "memory")
        assert one.tiles >= 1
    assert explanation.exchanges == () and explanation.gradient_bytes == 0


def test_exchanges_inside_layers_are_what_communication_is_made_of() -> None:
    """With one replica, no pipeline and no overlap, the lines are all of the communication."""
    workload = replace(GPT, overlap=False, framework="megatron-deepspeed")
    plan = Plan(tensor=5, micro_batch=4, gradient_accumulation=16)
    pool = replace(POOL, gpus_per_node=5)
    priced = search.price(workload, Plans.from_plans(plan), pool)
    explanation = explain_plan(workload, plan, pool, float(priced.step_s[0]))
    assert {one.group for one in explanation.exchanges} == {"tensor"}
    assert {one.collective for one in explanation.exchanges} == {"all_reduce"}
    straggle = float(priced.times.compute[0]) / (explanation.seconds * 16)
    exchanged = sum(one.seconds for one in explanation.exchanges) * 16 * straggle
    assert exchanged == pytest.approx(float(priced.times.communication[0]))


def test_virtual_stages_exchange_what_communication_is_made_of() -> None:
    """With one replica no gradients are exchanged, so the exchanges of a stage are all of the communication."""
    plan = Plan(pipeline=4, virtual_stages=2, micro_batch=4, gradient_accumulation=16)
    explanation, priced = explained(replace(GPT, framework="torchtitan"), plan)
    communication = float(priced.times.communication[0])
    assert communication > 0.0
    assert explanation.sums.gradients_s == pytest.approx(0.0, abs=1e-9 * communication)
    assert explanation.sums.exchanged_s * 16 * explanation.sums.waited == pytest.approx(communication)
    assert sum(one.seconds for one in explanation.exchanges) == pytest.approx(explanation.sums.exchanged_s)
    hidden, _ = explained(replace(GPT, framework="megatron"), plan)
    (sends,) = hidden.exchanges
    assert 0 < sends.exposed < 1
    assert hidden.sums.exchanged_s == pytest.approx(sends.exposed * sends.seconds)


PLANS = {
    "one": Plan(micro_batch=4, gradient_accumulation=16),
    "replicas": Plan(data=8, micro_batch=4, gradient_accumulation=2),
    "shards": Plan(data=8, zero_stage=3, micro_batch=4, gradient_accumulation=2, checkpointing="selective"),
    "stages": Plan(data=2, tensor=5, pipeline=3, micro_batch=4, gradient_accumulation=8),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_shown_multiplies_out_to_what_is_charged(name: str) -> None:
    plan = PLANS[name]
    explanation, priced = explained(GPT, plan)
    for one in explanation.operators:
        assert one.runs * one.kernel_s * math.prod(one.corrections.values()) == pytest.approx(one.seconds)
    sums, repeats, times = explanation.sums, plan.gradient_accumulation, priced.times
    compute = (sums.stage_s * repeats * sums.waited + sums.contended_s) * sums.correction
    assert compute == pytest.approx(float(times.compute[0]))
    communication = (sums.exchanged_s * repeats * sums.waited + sums.gradients_s) * sums.correction
    assert communication == pytest.approx(float(times.communication[0]))
    assert sums.contended_s >= -1e-12 and sums.gradients_s >= -1e-12
    if plan.pipeline == 1:
        assert sums.stage_s == pytest.approx(explanation.seconds)
        exposed = sum(one.seconds * one.exposed for one in explanation.exchanges)
        assert sums.exchanged_s == pytest.approx(exposed)


def test_the_screen_names_every_correction(capsys: pytest.CaptureFixture[str]) -> None:
    """A screen once showed 64 runs of 1.31 ms as 169 ms, without mentioning the factor."""
    assert (
        main(
            [
                "advise",
                "gpt2-xl",
                "--seq",
                "1024",
                "--batch",
                "64",
                "--gpus",
                "h100-sxm:16",
                "--explain",
                "--attention",
                "flash2",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "TIME = RUNS x EACH (the kernel alone) x FACTOR (in a step): " in text
    assert "factor.matrix" in text and "attention.flash2" in text and "memory." in text
    assert "Compute of a step: " in text


def test_model_flops_do_not_depend_on_the_split() -> None:
    """Tensor parallelism repeats norms and residuals on every rank, which is at most one percent here."""
    whole, _ = explained(GPT, Plan(micro_batch=1, gradient_accumulation=64))
    for plan in (
        Plan(data=8, micro_batch=2, gradient_accumulation=4, zero_stage=1),
        Plan(pipeline=4, micro_batch=1, gradient_accumulation=64, checkpointing="full"),
        Plan(tensor=5, data=2, micro_batch=4, gradient_accumulation=8),
    ):
        split, _ = explained(GPT, plan)
        assert split.model_flops == pytest.approx(whole.model_flops, rel=0.01)
    # Six FLOPs per parameter and token, plus attention (arXiv 2104.04473, appendix).
    tokens, layers, hidden = 64 * 1024, 48, 1600
    known = 72 * tokens * layers * hidden**2 * (1 + 1024 / (6 * hidden) * 0.75 + 50257 / (12 * layers * hidden))
    assert whole.model_flops == pytest.approx(known, rel=0.03)


def test_recomputation_costs_time_and_no_model_flops() -> None:
    plan = Plan(micro_batch=4, gradient_accumulation=16)
    plain, _ = explained(GPT, plan)
    again, _ = explained(GPT, replace(plan, checkpointing="full"))
    assert again.model_flops == plain.model_flops
    assert again.seconds > plain.seconds
    assert again.mfu < plain.mfu < 1


def test_a_pipeline_is_an_exchange_and_gradients_have_bytes() -> None:
    plan = Plan(data=2, pipeline=4, micro_batch=4, gradient_accumulation=8)
    explanation, _ = explained(GPT, plan)
    (stage,) = (one for one in explanation.exchanges if one.group == "pipeline")
    assert stage.size_bytes == 4 * 1024 * 1600 * 2
    assert explanation.gradient_bytes > 0


@pytest.mark.parametrize(
    ("framework", "stage", "gathers"), [("fsdp2", 3, 2), ("fsdp2", 2, 1), ("deepspeed", 2, 0), ("deepspeed", 3, 2)]
)
def test_weights_that_every_micro_batch_gathers_are_shown(framework: Framework, stage: int, gathers: int) -> None:
    """FSDP2 gathers weights again under ZeRO 2, but only gradients were shown."""
    plan = Plan(data=8, micro_batch=1, gradient_accumulation=8, zero_stage=stage)  # type: ignore[arg-type]
    explanation, _ = explained(replace(GPT, framework=framework), plan)
    rows = gradient_exchanges(explanation)
    assert rows[0][0] == "gradients, each micro-batch"
    shown = [(name, sent, runs) for what, name, sent, runs in rows if what == "weights, each micro-batch"]
    whole = 2.0 * zoo.count_parameters(GPT)
    assert shown == ([("all_gather", pytest.approx(whole), f"{gathers}")] if gathers else [])
    assert explanation.gathered_bytes == pytest.approx(whole if gathers else 0.0)


def test_pipelines_of_torchtitan_exchange_gradients_once_a_step() -> None:
    plan = Plan(data=4, pipeline=2, micro_batch=1, gradient_accumulation=8, zero_stage=2)
    explanation, _ = explained(replace(GPT, framework="torchtitan"), plan)
    assert gradient_exchanges(explanation)[0][0] == "gradients, once a step"


def test_pipelines_of_torchtitan_keep_weights_whole_from_a_backward_to_the_next_forward_pass() -> None:
    """Every pass was priced with a gather, and a stage's weights were never billed whole."""
    workload = replace(GPT, framework="torchtitan")
    plan = Plan(data=4, pipeline=2, micro_batch=1, gradient_accumulation=8, zero_stage=3, checkpointing="full")
    explanation, priced = explained(workload, plan)
    assert gradient_exchanges(explanation)[1][3] == "1"
    whole, kept = explanation.gathered_bytes, float(priced.footprint.activations[0])
    assert whole - kept < float(priced.footprint.working[0]) < whole + kept
    never, other = explained(workload, replace(plan, zero_stage=2))
    assert never.gathers == 0
    # Without a forward pass that spreads weights, every second gather goes.
    alone = replace(plan, pipeline=1, data=8)
    twice, _ = explained(workload, alone)
    assert twice.gathers == 2
    assert other.step_s[0] < priced.step_s[0]


def test_an_explanation_does_not_depend_on_what_was_priced_before() -> None:
    plan = Plan(data=2, tensor=5, micro_batch=4, gradient_accumulation=8)
    alone, priced = explained(GPT, plan)
    search.find(GPT, POOL)
    again = explain_plan(GPT, plan, POOL, float(priced.step_s[0]))
    assert again == alone
    (qkv,) = (one for one in again.operators if one.name == "attention.qkv" and one.phase == "forward")
    assert (qkv.dims["m"], qkv.dims["n"], qkv.dims["k"]) == (4 * 1024, 3 * 1600 / 5, 1600)


def test_explain_on_the_screen_and_as_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = ["advise", "mixtral-8x7b", "--seq", "4096", "--batch", "256", "--gpus", "a100-80:32", "--explain"]
    assert main(job) == 0
    screen = capsys.readouterr().out
    for word in ("MFU", "Roofline of a100-80", "experts.up", "gemm", "all_to_all", "Memory of the fullest GPU"):
        assert word in screen
    assert main([*job, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)["explanation"]
    assert document["operators"][0]["seconds"] >= document["operators"][1]["seconds"]
    assert 0 < document["mfu"] < 1
