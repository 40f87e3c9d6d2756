"""Laws that every plan of a queue keeps: weights are relative, times are not past, totals are those of the jobs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test_queue import job, option
from tilecast.planner.entries import forecast_submitted_job, list_planned_entries, list_waiting_ends
from tilecast.planner.policies import POLICIES
from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, QueueProblem, mark_as_running
from tilecast.planner.solver import ORDERS, solve
from tilecast.planner.totals import build_report

EFFORT = 3_000
LENGTHS_S = st.floats(1.0, 1e5)


@st.composite
def queues(draw: st.DrawFn) -> QueueProblem:
    """Draw a queue of some kinds of jobs, of which some run, on pools of which one may have a quota."""
    pools = (
        PoolCapacity("a", draw(st.integers(1, 3)), 4),
        PoolCapacity("b", 2, 2, quotas=draw(st.sampled_from(({}, {"q": 2})))),
    )
    kinds = draw(st.lists(st.tuples(LENGTHS_S, LENGTHS_S, st.sampled_from((1, 2))), min_size=1, max_size=3))
    jobs = []
    for index in range(draw(st.integers(1, 8))):
        slow, fast, gpus = draw(st.sampled_from(kinds))
        ways = [
            JobOption(pool.name, gpus, s, s / 1.3, s * 1.3, s * gpus)
            for pool, s in zip(pools, (slow, fast), strict=True)
        ]
        job = QueuedJob(
            f"j{index}", tuple(ways), arrival_s=-draw(st.floats(0.0, 1e4)), weight=float(draw(st.integers(1, 4))),
            queue="q", priority=draw(st.integers(0, 1)), present=("a", gpus),
        )  # fmt: skip
        jobs.append(mark_as_running(job, draw(st.floats(0.0, 1e6))) if index == 0 and draw(st.booleans()) else job)
    return QueueProblem(tuple(jobs), pools)


@given(queues(), st.sampled_from(tuple(ORDERS)))
@settings(max_examples=15, deadline=None)
def test_weights_are_relative(problem: QueueProblem, order: str) -> None:
    doubled = replace(problem, jobs=tuple(replace(job, weight=2 * job.weight) for job in problem.jobs))
    one, two = (solve(item, order=order, effort=EFFORT) for item in (problem, doubled))
    assert one.option == two.option
    assert one.score[1:] == two.score[1:]
    assert one.bound == pytest.approx(two.bound, rel=1e-6)


@given(queues())
@settings(max_examples=15, deadline=None)
def test_no_time_that_is_shown_is_past(problem: QueueProblem) -> None:
    plan = solve(problem, effort=EFFORT)
    shown = [*list_planned_entries(plan), *forecast_submitted_job(plan, replace(problem.jobs[-1], name="new")).entries]
    for entry in shown:
        starts = (entry.start_lower_s, entry.start_s, entry.start_upper_s)
        ends = (entry.finish_lower_s, entry.finish_s, entry.finish_upper_s)
        assert 0 <= starts[0] <= starts[1] <= starts[2]
        assert 0 < ends[0] <= ends[1] <= ends[2]
        assert starts[1] < ends[1]
    assert all(end.start_s >= 0 for some in list_waiting_ends(plan).values() for end in some)


@given(queues())
@settings(max_examples=15, deadline=None)
def test_totals_are_those_of_the_jobs(problem: QueueProblem) -> None:
    shown = build_report(solve(problem, effort=EFFORT))
    jobs = shown.solution.columns.problem.jobs
    took = [place.finish_s - job.arrival_s for place, job in zip(shown.job_times, jobs, strict=True)]
    assert shown.plan.completion_s == pytest.approx(np.average(took, weights=[job.weight for job in jobs]))
    assert shown.plan.makespan_s == max(place.finish_s for place in shown.job_times)
    assert shown.solution.score[1] == pytest.approx(shown.plan.completion_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_running_job_has_its_gpus_whatever_is_said_of_its_pool(policy: str) -> None:
    here = option("a", 8, 100.0, 5.0)
    runs = mark_as_running(job("runs", here, queue="q", present=("a", 8)), 10.0)
    waits = job("waits", option("a", 4, 50.0, 5.0), queue="q")
    for pool in (
        PoolCapacity("a", 1, 8, 8, {"q": 4}),
        PoolCapacity("a", 0, 8, 0, {"q": 4}),
        PoolCapacity("a", 2, 4, 3),
    ):
        solution = solve(QueueProblem((runs, waits), (replace(pool, price_per_gpu_hour=1.0),)), policy)
        report = build_report(solution)
        ends = {solution.columns.problem.jobs[row.job].name: row.finish_s for row in report.job_times}
        assert 0 < ends["runs"] < ends["waits"] < math.inf
        assert all(math.isfinite(totals.completion_s) for totals in report.references.values())
