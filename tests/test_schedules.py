"""Pipeline schedules as a column of a plan: what is searched, written, read, priced and launched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilecast import memory, search, zoo
from tilecast.advice.enumeration import enumerate_partial_plan
from tilecast.api.status import Parallelism
from tilecast.api.training_job import BaselinePlan
from tilecast.cli import main
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.launch_options.options_table import OptionTable
from tilecast.layout import SCHEDULES
from tilecast.render.launch import write_launch
from tilecast.render.launch.setting import LaunchSetting
from tilecast.search import PlanLimits, enumeration
from tilecast.spec import PIPELINE_SCHEDULES, SCHEDULE_CODES, PartialPlan, Plan, Plans, Schedule, SpecError, Workload
from tilecast.zoo import stages

LLAMA = Workload(zoo.find_preset("llama-3-8b"), 8192, 128, framework="torchtitan")
MIXTRAL = Workload(zoo.find_preset("mixtral-8x7b"), 4096, 256)
H100 = find_gpu("h100-sxm")
POOL = Pool("h100-sxm", H100, 8, 2, find_link("nvlink4"), find_link("infiniband-ndr-8x400"))
PLAN = Plan(data=4, pipeline=4, virtual_stages=2, zero_stage=2, gradient_accumulation=32)


def find_schedules(plans: Plans) -> set[Schedule | None]:
    names = [*SCHEDULE_CODES]
    return {names[code] for code in np.unique(plans.schedule).tolist()}


def test_a_search_tries_the_schedules_of_its_framework() -> None:
    assert find_schedules(search.enumerate_plans(LLAMA, POOL)) == {None, "interleavedZeroBubble", "zbv", "dualPipeV"}
    for framework in ("megatron", "fsdp2", "deepspeed", None):
        assert find_schedules(search.enumerate_plans(replace(LLAMA, framework=framework), POOL)) == {None}
    for schedule in ("1f1b", "zbv"):
        assert find_schedules(search.enumerate_plans(replace(LLAMA, pipeline_schedule=schedule), POOL)) == {None}


def test_a_searched_schedule_suits_its_plan() -> None:
    plans = search.enumerate_plans(LLAMA, POOL)
    scheduled = plans.take(plans.schedule > 0)
    assert (scheduled.pipeline > 1).all()
    for name, law in SCHEDULES.items():
        some = plans.take(plans.schedule == SCHEDULE_CODES[name])
        assert ((some.virtual_stages >= law.virtual[0]) & (some.virtual_stages <= law.virtual[1])).all()
        assert (some.gradient_accumulation >= law.least_rounds * some.pipeline).all()
    assert search.find_framework_features("torchtitan").executes(plans).all()
    assert not search.find_framework_features("megatron").executes(scheduled).any()


def test_schedules_change_no_plan_of_1f1b() -> None:
    table = search.find(LLAMA, POOL)
    rows = np.flatnonzero(table.plans.schedule == 0)
    alone = search.tabulate_plans(LLAMA, table.plans.take(rows), POOL)
    assert (table.step_s[rows] == alone.step_s).all()
    assert (table.memory_bytes[rows] == alone.memory_bytes).all()


def test_a_plan_costs_alone_what_it_costs_in_a_search() -> None:
    table = search.find(LLAMA, POOL)
    for name in ("interleavedZeroBubble", "zbv", "dualPipeV"):
        rows = np.flatnonzero(table.plans.schedule == SCHEDULE_CODES[name])[::97]
        for row in rows.tolist():
            priced = search.price(LLAMA, Plans.from_plans(table.plans.row(row)), POOL)
            assert priced.step_s[0] == pytest.approx(table.step_s[row], rel=1e-12)
            assert priced.memory_bytes[0] == pytest.approx(table.memory_bytes[row], rel=1e-12)


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_a_schedule_of_the_plan_costs_what_it_costs_as_the_jobs(schedule: Schedule) -> None:
    bare = replace(LLAMA, framework=None)
    plan = replace(PLAN, virtual_stages=SCHEDULES[schedule].virtual[0])
    stated = search.price(replace(bare, pipeline_schedule=schedule), Plans.from_plans(plan), POOL)
    chosen = search.price(bare, Plans.from_plans(replace(plan, schedule=schedule), plan), POOL)
    assert chosen.step_s[0] == stated.step_s[0]
    assert chosen.memory_bytes[0] == stated.memory_bytes[0]


def test_a_large_search_keeps_to_1f1b(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumeration, "MOST_PLANS_TO_SCHEDULE", 100)
    found = enumeration.enumerate_bounded(LLAMA, POOL, PlanLimits())
    assert found.is_bounded
    assert find_schedules(found.plans) == {None}


@pytest.mark.parametrize("workload", [LLAMA, replace(LLAMA, framework=None), MIXTRAL])
def test_an_enumeration_knows_the_splits_of_its_plans(workload: Workload) -> None:
    found = enumeration.enumerate_bounded(workload, POOL, PlanLimits())
    splits = found.plans.distinct_splits()
    np.testing.assert_array_equal(found.splits.first, splits.first)
    np.testing.assert_array_equal(found.splits.index, splits.index)


@pytest.mark.parametrize("schedule", ["zbv", "dualPipeV"])
def test_the_first_rank_of_a_folded_pipeline_holds_both_ends(schedule: Schedule) -> None:
    bare = replace(LLAMA, framework=None)
    plans = Plans.from_plans(replace(PLAN, schedule=schedule), replace(PLAN, schedule="interleaved"))
    sharded = zoo.build_sharded_graph(bare, plans)
    kinds = stages.find_stage_kinds(sharded.graph, plans.pipeline, stages.is_folded_by_plan(sharded.graph, plans))
    assert kinds.first[:, 0].tolist() == kinds.last[:, 0].tolist()
    assert (kinds.first * kinds.last)[:, 1].max() == 0.0
    embedding, head = 128256 * 4096, 128256 * 4096
    folded, chained = sharded.held_parameters(plans)[0].tolist()
    assert folded - chained == pytest.approx(min(embedding, head), rel=0.01)
    table = search.price(bare, plans, POOL)
    compute = table.times.compute
    assert compute[0] > compute[1]
    # All ranks hold the same number of layers, whatever the order.
    assert (kinds.layers.sum(axis=0) == 8).all()


def test_a_folded_pipeline_keeps_the_activations_of_the_loss_once() -> None:
    bare = replace(LLAMA, framework=None)
    one, two = (
        memory.footprint(
            bare,
            zoo.build_sharded_graph(bare, plans),
            plans,
            H100,
        ).activations[0]
        for plans in (
            Plans.from_plans(replace(PLAN, schedule="zbv", gradient_accumulation=count)) for count in (32, 64)
        )
    )
    assert one == two


def test_schedules_are_written_and_read() -> None:
    plan = replace(PLAN, schedule="dualPipeV")
    assert str(plan) == "zero2-dp4,pp4,vp2,dualPipeV,mb1"
    assert PartialPlan.parse(str(plan), "--plan").schedule == "dualPipeV"
    assert PartialPlan.parse("pp=4,vp=2,schedule=zbv", "--plan").schedule == "zbv"
    assert Plans.from_plans(plan).row(0) == plan
    document = Parallelism.from_plan(plan)
    assert document.model_dump(by_alias=True)["pipelineSchedule"] == "dualPipeV"
    assert document.to_plan() == plan
    baseline = BaselinePlan.model_validate({"pipeline": 4, "virtualStages": 2, "pipelineSchedule": "zbv"})
    assert baseline.to_partial_plan().schedule == "zbv"


@pytest.mark.parametrize(
    ("text", "job", "problem"),
    [
        ("pp=4,vp=1,zbv,mb=1", LLAMA, "vp=1 does not suit zbv; write vp=2"),
        ("pp=1,zbv", LLAMA, "zbv schedules a pipeline, and pp is 1"),
        ("pp=4,vp=2,zbv", replace(LLAMA, framework="megatron"), "megatron has no zbv; use 1f1b, interleaved"),
        ("pp=4,vp=2,zbv", replace(LLAMA, pipeline_schedule="interleaved"), "zbv contradicts training.pipelineSchedule"),
        ("pp=8,vp=2,dualPipeV,mb=8", LLAMA, "needs 16 micro-batches, not 8"),
    ],
)
def test_a_schedule_that_cannot_run_is_one_line(text: str, job: Workload, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as refused:
        enumerate_partial_plan(job, 16, PartialPlan.parse(text, "--plan"), "--plan")
    assert "\n" not in str(refused.value)


def test_an_unknown_schedule_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["advise", "llama-3-8b", "--seq", "8192", "--batch", "128", "--gpus", "h100-sxm:16"]
    assert main([*job, "--plan", "pp=4,schedule=gpipe"]) == 2
    assert "'schedule=gpipe' is no pipeline schedule; write one of 1f1b" in capsys.readouterr().err


def titan_schedules() -> dict[str, str]:
    """Return torchtitan's name of each schedule."""
    values = OptionTable.read("torchtitan").options["parallelism.pipeline-parallel-schedule"]["values"]
    return {ours: theirs for theirs, ours in values.items()}


def test_launch_lines_state_the_schedule_of_every_searched_plan() -> None:
    table = search.enumerate_plans(LLAMA, POOL)
    for code in np.unique(table.schedule).tolist():
        for row in np.flatnonzero((table.schedule == code) & (table.pipeline > 1) & (table.zero_stage == 2))[
            :2
        ].tolist():
            plan = table.row(row)
            setting = LaunchSetting("job", LLAMA, plan, "h100-sxm", 2, 8, 1.0)
            text = write_launch("torchtitan", setting).files["job.py"]
            name = titan_schedules()[plan.schedule or ("interleaved" if plan.virtual_stages > 1 else "1f1b")]
            assert f'pipeline_parallel_schedule="{name}"' in text
    bare = replace(LLAMA, framework=None)
    with pytest.raises(SpecError, match="it has no pipeline schedule zbv"):
        write_launch("megatron", LaunchSetting("job", bare, replace(PLAN, schedule="zbv"), "h100-sxm", 2, 8, 1.0))
