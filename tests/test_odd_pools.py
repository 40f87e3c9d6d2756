"""Advice on pools whose last node is smaller, and remarks on inputs that say nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tilecast import zoo
from tilecast.advice import Advice, Offer, Request, advise
from tilecast.advice.what_if.alternatives import describe_plan
from tilecast.advice.what_if.changes import apply_change, describe_pool_growth
from tilecast.cli import main
from tilecast.hardware import Pool
from tilecast.inputs.gpu_list import parse_gpu_list
from tilecast.render.launch import launch_text
from tilecast.render.launch.setting import list_launch_settings
from tilecast.render.table import advice_text
from tilecast.spec import PartialPlan, SpecError, Workload

SMALL = Workload(zoo.find_preset("gpt2"), 1024, 96)


def pool(text: str) -> Pool:
    return parse_gpu_list(text)[0]


def advise_plan(text: str, plan: str, workload: Workload = SMALL) -> Advice:
    return advise(Request("job", workload, plan=PartialPlan.parse(plan, "plan")), [pool(text)])


def best_of(advice: Advice) -> Offer:
    assert advice.best is not None
    return advice.best


SHARED = (
    "The {} groups of 4 GPUs run on {} nodes: a node of 8 holds 2 of them. "
    "Start each group by a command of its own, or ask for whole nodes."
)


@pytest.mark.parametrize(
    ("gpus", "nodes", "part", "note"),
    [
        ("h100-sxm:12", 3, 4, SHARED.format(3, 2)),
        ("h100-sxm:20", 5, 4, SHARED.format(5, 3)),
        ("h100-sxm:16", 3, 4, SHARED.format(3, 2)),
        ("h100-sxm:24", 3, 4, ""),
        ("h100-sxm:20", 3, 4, ""),
        ("h100-sxm:16", 2, 8, ""),
    ],
)
def test_groups_that_share_a_node_are_told(gpus: str, nodes: int, part: int, note: str) -> None:
    offer = replace(best_of(advise_plan("h100-sxm:8", "dp8,mb1")), pool=pool(gpus), nodes=nodes, gpus_per_node=part)
    assert offer.shared_nodes == note
    assert describe_plan((offer,), None) == ((note,) if note else ())


def test_screen_document_and_launch_say_how_many_nodes_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    advice = advise_plan("h100-sxm:12", "dp12,mb1")
    best, note = best_of(advice), SHARED.format(3, 2)
    assert note in advice.notes and note in " ".join(advice_text(advice).split())
    assert f"# {note}\n" in launch_text("megatron", *list_launch_settings(advice, best))
    assert main(["advise", "gpt2", "--seq", "1024", "--batch", "96", "--gpus", "h100-sxm:12", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (note in document["notes"]) == (document["recommendation"]["nodes"] == 3)


def test_gpus_that_stay_idle_are_named() -> None:
    def reason(advice: Advice) -> str:
        return " ".join(advice_text(advice).split())

    part = reason(advise_plan("h100-sxm:5", "dp4,mb1"))
    assert "h100-sxm is the only pool given; on 4 of its 5 GPUs (1 idle) this plan takes the least time" in part
    assert "h100-sxm with 4 GPUs is the only pool given, and this plan" in reason(advise_plan("h100-sxm:4", "dp4,mb1"))
    few = reason(advise(Request("job", SMALL, "fewestGpus", target_step_s=100.0), [pool("h100-sxm:4")]))
    assert "the only pool given, and this plan needs the fewest GPUs, 1 of 4" in few


def test_a_pool_with_a_smaller_node_grows_by_gpus() -> None:
    odd = pool("h100-sxm:12")
    change = describe_pool_growth(odd, 24, "fits")
    assert change.text == "24 GPUs instead of 12"
    assert apply_change(change, Request("job", SMALL), odd)[1].max_gpus == 24
    assert describe_pool_growth(pool("h100-sxm:16"), 24, "fits").text == "3 nodes instead of 2"
    wide = replace(SMALL, global_batch=3072)
    step_s = best_of(advise(Request("job", wide), [odd])).step_s
    (rejection,) = advise(Request("job", wide, "fewestGpus", target_step_s=step_s / 1.4), [odd]).rejections
    assert rejection.change is not None and rejection.change.text == rejection.remedy
    assert rejection.remedy.endswith(" GPUs instead of 12")


def test_zero_of_one_data_rank_is_explained() -> None:
    llama = Workload(zoo.find_preset("llama-3.2-1b"), 8192, 64)
    note = "zero1-dp1: ZeRO shards over the context-parallel ranks too."
    assert note in advise_plan("h100-sxm:4", "zero1-dp1,cp4,mb1", llama).notes
    assert note not in advise_plan("h100-sxm:4", "zero1-dp2,cp2,mb1", llama).notes
    assert note not in advise_plan("h100-sxm:4", "cp4,mb1", llama).notes


def test_a_schedule_without_a_pipeline_is_told() -> None:
    workload = replace(SMALL, pipeline_schedule="dualPipeV")
    note = "Pipeline schedule dualPipeV changes nothing: dp4,mb1 has no pipeline."
    assert note in advise_plan("h100-sxm:4", "dp4,mb1", workload).notes
    assert not any("changes nothing" in one for one in advise_plan("h100-sxm:4", "dp2,pp2,vp2,mb1", workload).notes)


def test_an_upper_bound_needs_a_limit_on_time() -> None:
    with pytest.raises(SpecError, match=r"upperBound says nothing.*give targetStepSeconds or deadlineSeconds"):
        advise(Request("job", SMALL, limits_at="upperBound"), [pool("h100-sxm:4")])
    assert advise(Request("job", SMALL, limits_at="upperBound", target_step_s=9.0), [pool("h100-sxm:4")]).best


def test_a_length_given_twice_names_both_flags(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--seq", "1024", "--batch", "96", "--gpus", "h100-sxm:4", "--steps", "10", "--tokens", "1B"]
    assert main(["advise", "gpt2", *given]) != 0
    assert "--steps and --tokens: both say how long the run is; give one" in capsys.readouterr().err
