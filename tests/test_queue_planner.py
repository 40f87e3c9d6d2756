"""The process in which the operator plans the queue."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator

import pytest

from tilecast.planner.policies import POLICIES
from tilecast.planner.problem import JobOption, PoolCapacity, UnplannedJob
from tilecast_operator import queue_planner
from tilecast_operator.kube.kinds import Key
from tilecast_operator.queue_planner import QueuePlanner
from tilecast_operator.queue_rows import QueueRow, QueueState
from tilecast_operator.report.queue_advice import QueuePlanInputs
from tilecast_operator.search_process import Cause

NOW_S = 1_767_225_600.0
REFUSED = UnplannedJob("Job/default/other", "it does not say what it trains", "annotate it")


def option(pool: str, seconds: float) -> JobOption:
    return JobOption(pool, 8, seconds, 0.9 * seconds, 1.1 * seconds, 1.0)


def inputs() -> QueuePlanInputs:
    options = option("fast", 600.0), option("slow", 900.0)
    rows = [QueueRow(Key("Job", "default", f"job-{number}"), options, NOW_S) for number in range(5)]
    return QueuePlanInputs(
        QueueState(rows, [REFUSED], (PoolCapacity("fast", 1, 8), PoolCapacity("slow", 1, 8))), "completion", {}
    )


@pytest.fixture
def causes() -> list[Cause]:
    return []


@pytest.fixture
def planner(causes: list[Cause]) -> Iterator[QueuePlanner]:
    made = QueuePlanner(has_process=True, memory_mib=640, restarted=causes.append)
    yield made
    made.stop()


@pytest.mark.slow
async def test_a_plan_of_the_process_is_that_of_a_thread(planner: QueuePlanner, causes: list[Cause]) -> None:
    in_thread = QueuePlanner(has_process=False, memory_mib=640, restarted=causes.append)
    ours, theirs = await planner.plan(inputs(), NOW_S), await in_thread.plan(inputs(), NOW_S)
    assert ours[1:] == theirs[1:] and {position.pool for position in ours.positions.values()} == {"fast", "slow", None}
    assert ours.plan.report is not None and theirs.plan.report is not None
    assert (ours.plan.report.plan, ours.plan.refused) == (theirs.plan.report.plan, theirs.plan.refused)
    assert ours.plan.report.solution.gap == theirs.plan.report.solution.gap
    assert planner.resident_bytes() > 0 and in_thread.resident_bytes() == 0
    assert causes == []


@pytest.mark.slow
async def test_a_plan_that_takes_too_long_says_so_and_the_next_is_made(
    monkeypatch: pytest.MonkeyPatch, causes: list[Cause]
) -> None:
    monkeypatch.setattr(queue_planner, "SECONDS", 0.0)
    planner = QueuePlanner(has_process=True, memory_mib=640, restarted=causes.append)
    try:
        for turn in (1, 2):
            plan, positions, _ = await planner.plan(inputs(), NOW_S)
            assert plan.problem.startswith("planning the queue of 5 jobs took longer than 0 s; serve fewer namespaces")
            assert (plan.report, plan.refused, positions) == (None, (REFUSED,), {})
            assert causes == ["timeout"] * turn
    finally:
        planner.stop()


@pytest.mark.slow
async def test_a_process_that_died_is_replaced_and_the_plan_is_made(planner: QueuePlanner, causes: list[Cause]) -> None:
    first = await planner.plan(inputs(), NOW_S)
    assert planner._process is not None
    os.kill(planner._process.pid, signal.SIGKILL)
    again = await planner.plan(inputs(), NOW_S)
    assert again.positions == first.positions and causes == ["died"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_pickled_by_its_name(name: str) -> None:
    assert pickle.loads(pickle.dumps(POLICIES[name])) is POLICIES[name]  # noqa: S301 -- made above
