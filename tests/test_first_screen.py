"""The first screen of `tilecast advise`: speed, the usual plan, guessed networks, remedies, and one sense of `x`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tilecast import zoo
from tilecast.advice import Advice, Request, advise
from tilecast.advice.values import format_excess, format_ratio
from tilecast.explain import explain_plan
from tilecast.hardware import instances
from tilecast.inputs.gpu_list import parse_gpu_list
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.public.advising import AdviceInputs, compute_advice
from tilecast.render.table import advice_text
from tilecast.render.units import format_duration
from tilecast.render.wide import wide_text
from tilecast.spec import PartialPlan, Workload

LLAMA = Workload(zoo.find_preset("llama-3.1-8b"), 8192, 128)
POOLS = parse_gpu_list("h100-sxm:16,a100-80:8")


@pytest.mark.slow
def test_the_screen_has_the_speed_of_a_gpu_and_its_mfu() -> None:
    advice = advise(Request("x", LLAMA), POOLS)
    best = advice.best
    assert best is not None
    assert best.mfu == explain_plan(best.workload, best.plan, best.pool, best.step_s).mfu
    assert best.tokens_per_s_and_gpu == pytest.approx(LLAMA.tokens_per_step / best.step_s / best.gpus)
    screen = advice_text(advice)
    assert "TOK/S/GPU" in screen and f"{best.mfu:.0%}" in screen
    images = advice_text(advise(Request("x", Workload(zoo.find_preset("resnet-50"), 1, 256)), POOLS))
    assert "SAMPLES/S/GPU" in images and "TOK/S/GPU" not in images


@pytest.mark.parametrize(("name", "start"), [("gpt2", "gpt2  124M"), ("nightly", "nightly  gpt2  124M")])
def test_a_job_named_as_its_model_has_the_name_once(name: str, start: str) -> None:
    request = Request(name, Workload(zoo.find_preset("gpt2"), 1024, 64))
    assert advice_text(advise(request, parse_gpu_list("l4:1"))).startswith(f"{start} parameters")


def test_digests_and_counts_are_for_the_wide_screen() -> None:
    advice = advise(Request("x", LLAMA), POOLS)
    for text in (advice.inputs_hash, "plans priced", advice.provenance.model_version):
        assert text not in advice_text(advice) and text in wide_text(advice)


def test_a_times_sign_says_of_what() -> None:
    """`x` once meant slower, as fast, and times the time."""
    for objective in ("time", "cost"):
        screen = advice_text(advise(Request("x", LLAMA, objective), POOLS))
        uses = re.findall(r"[\d.]x [a-z]+ [a-z]+", screen)
        assert uses and all(re.fullmatch(r"[\d.]x the (time|price|GPUs|speed)", use) for use in uses), uses


def test_data_parallelism_or_fsdp_alone_is_a_row() -> None:
    advice = advise(Request("x", LLAMA), POOLS)
    usual, best = advice.usual, advice.best
    assert usual is not None and best is not None
    plan = usual.plan
    assert (plan.tensor, plan.pipeline, plan.context, plan.expert) == (1, 1, 1, 1) and plan.zero_stage in (0, 3)
    assert usual.pool.name == best.pool.name and usual.gpus == best.gpus and not usual.is_tight
    assert f"FSDP alone, {format_ratio(usual.step_s / best.step_s)} the time" in usual.reason
    (row,) = [line for line in advice_text(advice).splitlines() if line.startswith("~")]
    assert str(plan) in row


def test_a_recommendation_that_is_the_usual_plan_has_no_second_row() -> None:
    advice = advise(Request("x", Workload(zoo.find_preset("gpt2"), 1024, 64)), POOLS)
    assert advice.best is not None and advice.best.plan.zero_stage == 0
    assert advice.usual is None and "\n~" not in advice_text(advice)


def test_a_stated_plan_has_no_usual_row() -> None:
    request = Request("x", LLAMA, plan=PartialPlan.parse("fsdp8,mb1,ac-full", "plan"))
    assert advise(request, POOLS).usual is None


def test_a_guessed_network_that_decides_is_told_before_the_table() -> None:
    (pool,) = parse_gpu_list("rtx-4090:64")
    advice = advise(Request("x", replace(LLAMA, sequence_length=2048)), [pool])
    (alert,) = advice.alerts
    lines = advice_text(advice).splitlines()
    assert lines[1].startswith("! The network of rtx-4090 is a guess")
    ratio = float(re.search(r"With ethernet-100 it takes ([\d.]+)x the time", alert)[1])  # type: ignore[index]
    assert ratio < 1
    stated = replace(pool, layers={"interNode": "stated"})
    assert advise(Request("x", replace(LLAMA, sequence_length=2048)), [stated]).alerts == ()


def test_the_usual_network_of_a_gpu_is_compared_with_a_guess_of_nodes() -> None:
    (pool,) = parse_gpu_list("h100-sxm:8x1")
    guessed = replace(pool, inter=instances.build_ethernet_link(25), layers={"interNode": "default"})
    (alert,) = advise(Request("x", replace(LLAMA, sequence_length=2048)), [guessed]).alerts
    assert "With the usual infiniband-ndr-8x400" in alert and "GPUPool" in alert


def test_a_network_that_no_step_waits_for_is_not_told() -> None:
    assert advise(Request("x", LLAMA), parse_gpu_list("h100-sxm:16")).alerts == ()


@pytest.mark.parametrize(
    ("framework", "plan"),
    [("megatron", "dp8,mb1"), ("deepspeed", "dp8,mb1"), ("fsdp2", "fsdp8,mb4"), (None, "dp8,mb1")],
)
def test_a_remedy_is_possible_in_the_framework_and_has_a_price(framework: str | None, plan: str) -> None:
    """ZeRO 3 was once offered for Megatron-LM."""
    from tilecast.advice.what_if.changes import apply_change
    from tilecast.frameworks import with_framework
    from tilecast.search import find_framework_features
    from tilecast.spec import Plans

    workload = LLAMA if framework is None else with_framework(LLAMA, framework)  # type: ignore[arg-type]
    (pool,) = parse_gpu_list("h100-sxm:8")
    request = Request("x", replace(workload, global_batch=32), plan=PartialPlan.parse(plan, "plan"))
    (rejection,) = advise(request, [pool]).rejections
    change = rejection.change
    assert change is not None and change.step_s is not None and change.cost_per_1000_steps is not None
    after, wide = apply_change(change, request, pool)
    best = advise(after, [wide]).best
    assert best is not None and best.step_s == pytest.approx(change.step_s)
    assert best.cost_per_1000_steps == pytest.approx(change.cost_per_1000_steps)
    used = best.workload.framework
    assert used is None or find_framework_features(used).executes(Plans.from_plans(best.plan)).all()
    assert f"{change.text} (" in advice_text(advise(request, [pool]))


def test_a_neighbour_that_needs_less_memory_says_what_differs() -> None:
    """The change was once an empty text where only sequence parallelism differed."""
    advice = advise(Request("x", LLAMA), parse_gpu_list("gh200:8"))
    fitting = [item.change for item in advice.why_not if item.change is not None and item.change.effect == "fits"]
    assert fitting and all(change.text and change.step_s for change in fitting if change.input == "plan")


def test_bytes_that_are_too_many_have_digits() -> None:
    assert [format_excess(size) for size in (2**20, 310 * 2**20, 1.5 * 2**30, 154.4 * 2**30)] == [
        "1.0 MiB", "310 MiB", "1.5 GiB", "154 GiB",
    ]  # fmt: skip
    assert [format_ratio(ratio) for ratio in (0.514, 1.299, 23.15, 1234.5)] == ["0.51x", "1.30x", "23.1x", "1,234x"]


def test_a_tight_recommendation_names_a_plan_with_memory_to_spare() -> None:
    (pool,) = parse_gpu_list("t4:2x8")
    advice = advise(Request("x", Workload(zoo.find_preset("gpt2-xl"), 1024, 64, precision="fp16")), [pool])
    assert advice.best is not None
    if advice.best.is_tight:
        assert advice.safer is not None and not advice.safer.is_tight
        assert f"With memory to spare: {advice.safer.plan}" in advice_text(advice)
    else:
        assert advice.safer is None


def test_the_launch_of_a_tight_plan_prints_the_safer_one() -> None:
    """`--launch trainer` once printed a plan of 69-93 of 78 GiB without a word."""
    import tilecast

    asked = {"seq": 8192, "batch": 16, "gpus": "h100-sxm:16", "framework": "fsdp2"}
    advice = tilecast.advise("llama-3.1-8b", **asked)  # type: ignore[arg-type]
    best, safer = advice.best, advice.safer
    assert best is not None and best.is_tight and safer is not None
    text = advice.launch("fsdp2")
    assert f"{safer.plan}, " in text.splitlines()[1]
    assert f"{best.plan} (" in text and "may run out of memory" in text
    stated = tilecast.advise("llama-3.1-8b", plan=str(best.plan), **asked)  # type: ignore[arg-type]
    text = stated.launch("fsdp2")
    assert f"{best.plan}, " in text.splitlines()[1] and "safer is --plan" in text


def test_the_launch_of_a_plan_with_memory_to_spare_warns_of_nothing() -> None:
    import tilecast

    advice = tilecast.advise("gpt2-xl", seq=1024, batch=64, gpus="h100-sxm:8", framework="fsdp2")
    assert advice.best is not None and not advice.best.is_tight
    assert "run out of memory" not in advice.launch("fsdp2")


def test_the_safer_plan_of_a_launcher_is_the_best_of_all_its_frameworks() -> None:
    """A tight plan of DistributedDataParallel had one that needs 135 s beside it, where `fully_shard` takes 21 s."""
    found = []
    for model, gpus in (("qwen3-1.7b", "l40s:8"), ("qwen3-1.7b", "a100-80:8")):
        job = JobOptions(model, {"seq": 4096, "batch": 256})
        found.append(compute_advice(AdviceInputs(job, PoolOptions(gpus=gpus), launch="accelerate")).advice)
    tight, roomy = found
    assert tight.best is not None and tight.best.is_tight and tight.safer is not None
    assert tight.safer.workload.framework == "accelerate" and tight.safer.step_s < 1.5 * tight.best.step_s
    # As fast with memory to spare is better, whatever framework it needs.
    assert roomy.best is not None and not roomy.best.is_tight and roomy.best.workload.framework == "accelerate"


def test_a_run_time_stands_beside_its_number_of_steps() -> None:
    screen = advice_text(advise(Request("x", replace(LLAMA, steps=10_000)), POOLS))
    assert "RUN TIME" in screen and "  10,000 steps  " in screen.splitlines()[0]
    assert "steps  " not in advice_text(advise(Request("x", LLAMA), POOLS)).splitlines()[0]


def test_parts_of_nodes_among_the_trade_offs_are_explained() -> None:
    """`3x4` stood in the list without a word."""
    advice = advise(Request("x", LLAMA), parse_gpu_list("h100-sxm:16"))
    parts = [offer for offer in advice.pareto if offer.nodes > 1 and 1 < offer.gpus_per_node < 8]
    first = parts[0]
    words = f"({first.nodes}x{first.gpus_per_node}: {first.nodes} groups of {first.gpus_per_node} GPUs)"
    assert words in advice_text(advice).replace("\n            ", " ")


@pytest.mark.parametrize(
    ("gpus", "note"),
    [
        ("a100:8", "a100 is read as a100-40 (40 GiB), not a100-40-pcie, a100-80, a100-80-pcie."),
        ("H100:8@ethernet-100", "h100 is read as h100-sxm (80 GiB), not h100-64, "),
        ("a100-80:8", ""),
        ("h200:8", ""),
        ("p5.48xlarge:1", ""),
    ],
)
def test_a_short_name_of_a_gpu_says_which_one_was_taken(gpus: str, note: str) -> None:
    advice = compute_advice(AdviceInputs(JobOptions("gpt2", {"seq": 512, "batch": 64}), PoolOptions(gpus=gpus))).advice
    found = [text for text in advice.notes if " is read as " in text]
    assert [text[: len(note)] for text in found] == ([note] if note else [])


def compute(model: str, gpus: str, framework: str | None = None, **values: object) -> tuple[Advice, str]:
    """Return the advice of the command line for a model, and its screen as one line."""
    named = {} if framework is None else {"framework": framework}
    job = JobOptions(model, {"seq": 1024, "batch": 64, **named})
    found = compute_advice(AdviceInputs(job, PoolOptions(gpus=gpus), **values)).advice  # type: ignore[arg-type]
    return found, " ".join(advice_text(found).split())


def test_a_plan_without_a_framework_names_the_launchers_that_run_it() -> None:
    """The headline was once a plan that no launcher reaches in that time, without a word."""
    found, screen = compute("gpt2", "a100-80:8")
    assert found.best is not None
    (note,) = (note for note in found.notes if note.startswith("No framework"))
    assert note in screen
    stated, _ = compute("gpt2", "a100-80:8", "megatron", plan=str(found.best.plan))
    assert stated.best is not None
    assert f"megatron ({format_duration(stated.best.step_s)})" in note
    assert not any(note.startswith("No framework") for note in stated.notes)


def test_a_plan_that_no_launcher_runs_is_called_so() -> None:
    found, _ = compute("gpt2", "a100-80:8", plan="tp=2,dp=2,pp=2,zero=2,mb=1")
    (note,) = (note for note in found.notes if note.startswith("No framework"))
    assert "no launcher runs this plan" in note


def test_the_baseline_s_pool_and_gpus_stand_beside_the_ratio() -> None:
    _, screen = compute("gpt2", "a100-80:8,h100-sxm:16", baseline="a100-80:8")
    assert "Your baseline on 8 a100-80, if it runs " in screen
    assert " of what is recommended, on 16 h100-sxm." in screen


def test_a_list_price_names_its_instance_type() -> None:
    _, screen = compute("gpt2", "p5.48xlarge:1,a100-80:8")
    assert "h100-sxm $6.88 (list, p5.48xlarge)" in screen


def test_why_a_launch_s_baseline_is_on_its_pool_is_said() -> None:
    words = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", "--bf16"]
    for option, value in (
        ("num-layers", 12), ("hidden-size", 768), ("num-attention-heads", 12), ("seq-length", 1024),
        ("max-position-embeddings", 1024), ("micro-batch-size", 4), ("global-batch-size", 64),
    ):  # fmt: skip
        words += [f"--{option}", str(value)]
    job = JobOptions(None, {}, command=words)

    def ask(gpus: str, baseline: str | None = None) -> str:
        found = compute_advice(AdviceInputs(job, PoolOptions(gpus=gpus), baseline=baseline)).advice
        return " ".join(found.notes)

    assert "priced on h100-sxm, the first pool with 8 GPUs in nodes of 8; --baseline" in ask("a100-80:4,h100-sxm:16")
    assert "priced on a100-80" not in ask("a100-80:8,h100-sxm:8", "h100-sxm:8") + ask("h100-sxm:8")
