"""Plans that a user states: their notation, their form in tables, and contradictions in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tilecast import search, zoo
from tilecast.advice import Request, advise
from tilecast.advice.enumeration import enumerate_partial_plan
from tilecast.cli import main
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.spec import PartialPlan, Plan, Plans, SpecError, Workload

H100 = find_gpu("h100-sxm")
POOL = Pool("h100", H100, 8, 2, find_link(H100.intra_link), find_link("infiniband-ndr-8x400"))
LLAMA = Workload(zoo.find_preset("llama-3.1-8b"), 8192, 128)
MIXTRAL = Workload(zoo.find_preset("mixtral-8x7b"), 4096, 64)
JOB = ["advise", "llama-3.1-8b", "--seq", "8192", "--batch", "128", "--gpus", "h100-sxm:16"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("tp=2,dp=8", PartialPlan(tensor=2, data=8)),
        (" tp = 2 , pp=4 ", PartialPlan(tensor=2, pipeline=4)),
        ("fsdp=16,mb=1,ac=sel", PartialPlan(data=16, zero_stage=3, micro_batch=1, checkpointing="selective",
                                       sequence_parallel=False)),
        ("cp=2,ep=8,vp=3,zero=1,sp=0", PartialPlan(context=2, expert=8, virtual_stages=3, zero_stage=1,
                                             sequence_parallel=False)),
        ("zero1-dp8,tp2,mb1,ac-full", PartialPlan(data=8, tensor=2, zero_stage=1, micro_batch=1, checkpointing="full",
                                             sequence_parallel=False)),
        ("FSDP-dp16 mb2", PartialPlan(data=16, zero_stage=3, micro_batch=2, checkpointing="none",
                                      sequence_parallel=False)),
        ("TP8 PP1", PartialPlan(tensor=8)),
        ("tp = 2, dp=4", PartialPlan(tensor=2, data=4)),
        ("fsdp16,mb2", PartialPlan(data=16, zero_stage=3, micro_batch=2, checkpointing="none",
                                   sequence_parallel=False)),
        ("tp8,sp,pp2,mb1", PartialPlan(tensor=8, pipeline=2, zero_stage=0, micro_batch=1, checkpointing="none",
                                  sequence_parallel=True)),
        ("dp8,zero3", PartialPlan(data=8, zero_stage=3)),
        ("TP2,DP=8,ac=None,sp", PartialPlan(data=8, tensor=2, checkpointing="none", sequence_parallel=True)),
        ("zero3-dp8", PartialPlan(data=8, zero_stage=3)),
        ("tp=2,mb=1,ac=auto,zero=auto", PartialPlan(tensor=2, micro_batch=1, sequence_parallel=False)),
    ],
)  # fmt: skip
def test_a_plan_is_read(text: str, meant: PartialPlan) -> None:
    assert PartialPlan.parse(text, "--plan") == meant


@pytest.mark.parametrize(
    "forms",
    [("fsdp8", "fsdp=8", "dp8,zero=3"), ("fsdp8,mb1", "fsdp8,mb=1", "dp=8,zero=3,mb=1"), ("dp8,tp2", "dp=8,tp=2")],
)
def test_what_is_left_out_means_the_same_in_every_form(forms: tuple[str, ...]) -> None:
    assert len({PartialPlan.parse(text, "--plan") for text in forms}) == 1


@pytest.mark.parametrize("text", ["", "dp", "tp=", "tp=0", "tp=-1", "tp=2,tp=4", "fsdp=8,zero=1", "xp=2", "ac=maybe",
                                  "zero=4", "sp=2", "tp2,tp=4", "zero1-dp8,zero2", "dp8,foo", "tp=99999999999",
                                  "mb=1.5", "tp=auto"])  # fmt: skip
def test_what_is_no_plan_is_one_line(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        PartialPlan.parse(text, "--plan")
    assert caught.value.field == "--plan" and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["fsdp=8,zero=auto", "fsdp8,zero=3", "zero=1,fsdp=8", "fsdp8,dp=8"])
def test_fsdp_says_two_things_already(text: str) -> None:
    with pytest.raises(SpecError, match=r"is said beside fsdp, which says dp and zero=3; write dp=N,zero="):
        PartialPlan.parse(text, "--plan")


@pytest.mark.parametrize("workload", [LLAMA, MIXTRAL], ids=["dense", "experts"])
def test_what_a_table_prints_means_the_plan_it_printed(workload: Workload) -> None:
    plans = search.enumerate_plans(workload, POOL)
    rng = np.random.default_rng(0)
    for row in rng.choice(len(plans), 60, replace=False):
        plan = plans.row(int(row))
        table = enumerate_partial_plan(workload, plan.gpus, PartialPlan.parse(str(plan), "plan"), "plan")
        assert list(table) == [plan]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dp=3", "does not divide the global batch 128"),
        ("tp=3", "degrees of 3 do not make 16 GPUs"),
        ("tp=16,dp=1,mb=1", ""),
        ("dp=16,mb=3", "mb=3 does not divide the 8 samples"),
        ("pp=16", ""),
        ("pp=2,vp=5", "vp=5 with pp=2 does not divide the 32 layers"),
        ("vp=2", "vp=2 with pp=1"),
        ("pp=4,vp=2,dp=4,mb=32", "needs micro-batches that pp=4 divides, not 1"),
        ("ep=2", "spreads experts, of which"),
        ("cp=16,sp=1", "sp=1 finds no tokens"),
    ],
)
def test_contradictions_are_named(text: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main([*JOB, "--plan", text])
    error = capsys.readouterr().err
    if problem:
        assert status == 2 and error.startswith("tilecast: --plan: ") and problem in error and error.count("\n") == 1
    else:
        assert status in (0, 3) and error == ""


@pytest.mark.parametrize(
    ("options", "text", "problem"),
    [
        (["--shard-degree", "7"], "fsdp16,mb1", "shardDegree 7 does not divide the 16 data-parallel ranks; let"),
        (["--shard-degree", "8"], "zero1-dp16,mb1", "ZeRO 1 has no groups of training.shardDegree 8 ranks; use zero=2"),
        (["--framework", "megatron", "--offload-activations", "0.5"], "pp=2,dp=8,mb=1,zero=1",
         "megatron offloads activations only without pipeline and recomputation; write pp=1,ac=none"),
        (["--framework", "megatron", "--offload-activations", "0.5"], "dp=16,mb=1,ac=full", "write pp=1,ac=none"),
        (["--recompute-layers", "3"], "dp16,mb1,ac=none", "ac=none contradicts training.recomputeLayers 3; write"),
        (["--recompute-modules", "layernorm"], "dp16,mb1,ac=full",
         "ac=full contradicts training.recomputeModules layernorm; write ac=layernorm or leave ac out"),
    ],
)  # fmt: skip
def test_contradictions_with_an_option_are_named(
    options: list[str], text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, *options, "--plan", text]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tilecast: --plan: ") and problem in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("stated", "text", "kept"),
    [
        ({"shard_degree": 8}, "dp=16", lambda plans: {*plans.zero_stage.tolist()} == {2, 3}),
        ({"shard_degree": 32}, "fsdp=16,mb=1", lambda plans: {*plans.zero_stage.tolist()} == {3}),
        ({"framework": "megatron", "offloaded_activations": 0.5}, "dp=16",
         lambda plans: {*plans.checkpointing.tolist()} == {0}),
    ],
)  # fmt: skip
def test_what_a_plan_leaves_open_suits_the_options(
    stated: dict[str, Any], text: str, kept: Callable[[Plans], bool]
) -> None:
    plans = enumerate_partial_plan(replace(LLAMA, **stated), 16, PartialPlan.parse(text, "plan"), "plan")
    assert len(plans) and kept(plans)


@pytest.mark.parametrize(
    ("model", "text", "problem"),
    [
        (
            "resnet-50",
            "tp=2",
            "tp=2 does not split resnet-50, whose family is priced data parallel alone; leave tp out",
        ),
        ("flux.1", "pp=2", "pp=2 does not split flux.1, whose family is priced data parallel alone; leave pp out"),
        ("flux.1", "cp=2", "cp=2 does not split flux.1, whose family is priced data parallel alone; leave cp out"),
        ("flux.1", "vp=2", "vp=2 does not split flux.1, whose family is priced data parallel alone; leave vp out"),
        ("resnet-50", "ep=2", "ep=2 spreads experts, of which resnet-50 has none; leave ep out"),
        ("gpt2", "ep=2", "ep=2 spreads experts, of which gpt2 has none; leave ep out"),
        ("gpt2", "tp=8", "does not divide the 12 heads"),
        ("gpt2", "pp=8", "leaves stages of gpt2 without a layer"),
        ("t5-v1.1-base", "pp=2", "leaves stages"),
        ("mixtral-8x7b", "ep=16", "does not divide 8 experts"),
    ],
)
def test_contradictions_with_a_model_are_named(model: str, text: str, problem: str) -> None:
    preset = zoo.find_preset(model)
    workload = Workload(preset, 512 if preset.vocab else 1, 64)
    with pytest.raises(SpecError, match=problem):
        enumerate_partial_plan(workload, 16, PartialPlan.parse(text, "plan"), "plan")


def test_the_plan_is_priced_as_it_is_and_alone() -> None:
    advice = advise(Request("job", LLAMA, plan=PartialPlan.parse("zero1-dp8,tp2,sp,mb1", "plan")), [POOL])
    assert advice.plans_evaluated == 1 and advice.best is not None
    plan = Plan(data=8, tensor=2, zero_stage=1, micro_batch=1, gradient_accumulation=16, sequence_parallel=True)
    assert advice.best.plan == plan
    assert advice.best.step_s == float(search.price(LLAMA, Plans.from_plans(plan), POOL).step_s[0])


def test_a_plan_that_does_not_fit_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--plan", "dp16,mb8"]) == 3
    screen = capsys.readouterr().out
    assert "GiB too much" in screen and "dp16,mb8" in screen


def test_more_gpus_than_a_pool_has_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--plan", "tp=2,dp=64"]) == 3
    assert "128 GPUs asked, 16 may be used" in capsys.readouterr().out
    assert main([*JOB, "--plan", "tp=2,dp=8", "--max-gpus", "8"]) == 2
    assert "multiply to 16 GPUs, above 8" in capsys.readouterr().err


def test_a_plan_and_a_framework_agree_or_say_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--plan", "tp=2,dp=8,zero=1", "--launch", "deepspeed"]) == 0
    assert '"autotp_size": 2' in capsys.readouterr().out
    assert main([*JOB, "--plan", "tp=2,dp=8,ac=sel", "--launch", "deepspeed"]) == 2
    assert "no selective recomputation" in capsys.readouterr().err


def test_the_hash_knows_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    hashes = set()
    for more in ([], ["--plan", "tp=2,dp=8"], ["--plan", "tp=2,dp=8,zero=1,mb=1"]):
        assert main([*JOB, *more, "-o", "json"]) == 0
        hashes.add(json.loads(capsys.readouterr().out)["inputsHash"])
    assert len(hashes) == 3


@pytest.mark.slow
def test_a_plan_takes_the_recomputation_of_a_flag_and_does_not_drop_it(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["advise", "gpt2-xl", "--seq=1024", "--batch=64", "--gpus=a100-80:8"]
    for flags, plan, printed in (
        (["--checkpointing=full"], "fsdp8,mb1", "fsdp8,mb1,ac-full"),
        (["--checkpointing=full"], "fsdp8,mb1,ac-full", "fsdp8,mb1,ac-full"),
        (["--recompute-modules=layernorm"], "fsdp8,mb1", "fsdp8,mb1,ac-layernorm"),
        (["--checkpointing=none"], "fsdp8,mb1", "fsdp8,mb1"),
        (["--checkpointing=auto"], "fsdp8,mb1", "fsdp8,mb1"),
        (["--micro-batch-size=1"], "fsdp8,mb1", "fsdp8,mb1"),
    ):
        assert main([*job, *flags, f"--plan={plan}"]) == 0
        assert f"1x8  {printed} " in capsys.readouterr().out
    for flag, plan in (("--checkpointing=full", "fsdp8,mb1,ac=sel"), ("--micro-batch-size=2", "fsdp8,mb1")):
        assert main([*job, flag, f"--plan={plan}"]) == 2
        error = capsys.readouterr().err
        assert "contradicts --" in error and error.endswith("; leave one of them out\n")
