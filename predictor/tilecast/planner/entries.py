"""Forecast when a job would start and end on each pool while all other jobs keep their planned pools and GPU counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from tilecast.planner.assignment import Assignment
from tilecast.planner.columns import QueueColumns, build_columns
from tilecast.planner.policies import smith_ratio
from tilecast.planner.problem import JobOption, QueuedJob, QueueProblem, UnplannedJob, check_problem, sort_jobs
from tilecast.planner.ranges import TimeRanges, find_pool_ranges, find_ranges, simulate_ends
from tilecast.planner.solver import QueueSolution
from tilecast.planner.totals import LateJob, find_lateness
from tilecast.spec import Floats

EFFORT = 50_000
"""Most job starts to simulate when forecasting the ends of waiting jobs."""


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """Start and end of a job on one pool, with their ranges, in seconds from now.

    The ranges hold 90 % of starts and ends (`ranges`).
    """

    option: JobOption
    start_s: float
    start_lower_s: float
    start_upper_s: float
    finish_s: float
    finish_lower_s: float
    finish_upper_s: float
    delayed: int = 0
    """Number of other jobs that this job makes end later."""
    late_s: float | None = None
    """Time by which the job ends after its deadline, 0 if it ends in time; None if it has no deadline."""


@dataclass(frozen=True, slots=True)
class PoolEnd:
    """End of a waiting job on one pool, in seconds from now."""

    option: JobOption
    finish_s: float

    @property
    def start_s(self) -> float:
        """Start of the job, in seconds from now."""
        return max(self.finish_s - self.option.seconds, 0.0)


EndT = TypeVar("EndT", PoolEntry, PoolEnd)


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """Forecast of one more job: an entry for each pool, sorted by end, or the reason why it cannot run anywhere."""

    name: str
    entries: tuple[PoolEntry, ...]
    refusal: UnplannedJob | None = None
    """Why the job cannot run at all, or that its deadline is past."""
    late: LateJob | None = None
    """How late the job ends where it finishes first, and what would make it on time; None if it ends in time."""


def forecast_submitted_job(solution: QueueSolution, job: QueuedJob | UnplannedJob) -> SubmittedJob:
    """Return when one more job would start and end on each pool. The other jobs keep their planned options.

    In Kueue's order, the job's turn follows from priority and arrival. In a free order, it follows from the policy's
    sort key. Other jobs may end later: those behind it, and those that would have overtaken it.

    Args:
        solution: the plan of the queue.
        job: the job, with a name that no job of the queue has, or the reason why it cannot be planned.
    """
    if isinstance(job, UnplannedJob):
        return SubmittedJob(job.job, (), job)
    problem = solution.columns.problem
    feasible, refused = check_problem(QueueProblem((job,), problem.pools, problem.horizon_s))
    refusal = refused[0] if refused else None
    if not feasible.jobs:
        return SubmittedJob(job.name, (), refusal)
    columns = _insert_job(solution, feasible.jobs[0])
    names = [item.name for item in columns.problem.jobs]
    row = names.index(job.name)
    old = solution.columns.first[:-1]
    chosen = np.insert(np.array(solution.option, dtype=int) - old, row, 0) + columns.first[:-1]
    plans = simulate_ends(columns, solution.policy, chosen.tolist())
    before = np.insert(solution.finish, row, np.inf)
    due = float(columns.due[row])
    entries = _keep_first_to_finish(
        [_forecast_pool_entry(plans, row, option, before) for option in columns.get_option_range(row)]
    )
    if np.isfinite(due):
        entries = tuple(replace(item, late_s=_count_late_seconds(columns, row, item.finish_s)) for item in entries)
    return SubmittedJob(job.name, entries, refusal, find_lateness(columns, row, entries[0].finish_s))


def _count_late_seconds(columns: QueueColumns, job: int, finish_s: float) -> float:
    late = find_lateness(columns, job, finish_s)
    return 0.0 if late is None else late.late_s


def list_waiting_ends(solution: QueueSolution, effort: int = EFFORT) -> dict[int, tuple[PoolEnd, ...]]:
    """Return the end of each waiting job on every pool that it could use, by row of the job.

    The jobs are simulated in the order of their starts, until `effort` is spent. The remaining jobs are absent. The end
    on the pool of the plan is copied from the plan.

    Args:
        solution: the plan of the queue.
        effort: number of job starts that may be simulated.
    """
    columns = solution.columns
    plan = Assignment(columns, solution.policy, list(solution.option))
    effort += plan.simulated
    start = solution.finish - columns.seconds[solution.option]
    listed = dict[int, tuple[PoolEnd, ...]]()
    for row in np.argsort(start, kind="stable").tolist():
        if columns.is_running[row]:
            continue
        if plan.simulated > effort:
            break
        planned = solution.option[row]
        ends = [PoolEnd(columns.options[planned], float(solution.finish[row]))]
        for option in columns.get_option_range(row):
            if columns.pool[option] != columns.pool[planned]:
                line = plan.try_moves({row: option})[1][int(columns.pool[option])]
                ends.append(PoolEnd(columns.options[option], float(line.finish[bisect_left(line.jobs, row)])))
        listed[row] = _keep_first_to_finish(ends)
    return listed


def list_planned_entries(solution: QueueSolution) -> list[PoolEntry]:
    """Return the planned start and end of every job with their ranges, in the order of the rows."""
    ranges = find_ranges(solution.columns, solution.policy, solution.option)
    return [_make_entry(solution.columns.options[item], ranges, row) for row, item in enumerate(solution.option)]


def _insert_job(solution: QueueSolution, job: QueuedJob) -> QueueColumns:
    """Return the queue with one more job, inserted where it would start. The other jobs keep their order."""
    problem = solution.columns.problem
    larger = replace(problem, jobs=(*problem.jobs, job))
    if solution.order == "kueue" or not problem.jobs:
        return build_columns(sort_jobs(larger, [item.arrival_s for item in larger.jobs]))
    columns = build_columns(larger)
    row = len(problem.jobs)
    options = np.array(columns.get_option_range(row))
    lowest = int(options[np.argmin(smith_ratio(columns, options))])
    chosen = np.append(np.array(solution.option, dtype=int), lowest)
    rank = solution.policy.rank(columns, chosen, solution.score[solution.policy.deciding])
    behind = (
        place for place, item in enumerate(problem.jobs) if item.priority == job.priority and rank[place] > rank[row]
    )
    turn = next((place for place in behind if not problem.jobs[place].is_running), row)
    return build_columns(sort_jobs(larger, [*map(float, range(row)), turn - 0.5]))


def _forecast_pool_entry(plans: Sequence[Assignment], row: int, option: int, before: Floats) -> PoolEntry:
    """Return the entry of a job with one of its options.

    Args:
        plans: the plan at the forecasts, and at the lower and upper ends of their ranges.
        row: the job.
        option: the option.
        before: end of every job without this job, (n,).
    """
    columns = plans[0].columns
    pool = int(columns.pool[option])
    lines = [plan.try_moves({row: option})[1][pool] for plan in plans]
    jobs = lines[0].jobs
    options = np.array([option if job == row else plans[0].option[job] for job in jobs], dtype=int)
    ranges = find_pool_ranges(columns, options, [line.finish for line in lines])
    delayed = int((lines[0].finish > before[jobs] * (1 + 1e-9)).sum())
    return _make_entry(columns.options[option], ranges, bisect_left(jobs, row), delayed)


def _make_entry(option: JobOption, ranges: TimeRanges, row: int, delayed: int = 0) -> PoolEntry:
    return PoolEntry(
        option,
        float(ranges.start[row]),
        float(ranges.start_lower[row]),
        float(ranges.start_upper[row]),
        float(ranges.finish[row]),
        float(ranges.finish_lower[row]),
        float(ranges.finish_upper[row]),
        delayed,
    )


def _keep_first_to_finish(entries: Sequence[EndT]) -> tuple[EndT, ...]:
    """Return the entry with the earliest end for each pool, sorted by end. Of equal ends, take the fewest GPUs."""
    best = dict[str, EndT]()
    for entry in sorted(entries, key=lambda item: (item.finish_s, item.option.gpus)):
        best.setdefault(entry.option.pool, entry)
    return tuple(sorted(best.values(), key=lambda item: (item.finish_s, item.option.pool)))
