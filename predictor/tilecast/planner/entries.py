"""Forecast when a job would start and end on each pool, if the places of all other jobs stay as planned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeVar

import numpy as np

from tilecast.planner.assignment import Assignment, PoolTimeline
from tilecast.planner.columns import QueueColumns, build_columns
from tilecast.planner.policies import smith_ratio
from tilecast.planner.problem import JobOption, QueuedJob, QueueProblem, UnplannedJob, check_problem, sort_jobs
from tilecast.planner.solver import QueueSolution
from tilecast.planner.totals import LateJob, find_lateness
from tilecast.spec import Floats

EFFORT = 50_000
"""Most job starts to simulate when forecasting the ends of waiting jobs."""


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """Start and end of a job on one pool, with their ranges, in seconds from now.

    The lower end of a range assumes that every forecast of the queue is at its lower end, and likewise the upper end.
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
    """When one more job would run: its entry on each pool, the earliest end first, or why it has none."""

    name: str
    entries: tuple[PoolEntry, ...]
    refusal: UnplannedJob | None = None
    """Why the job cannot run at all, or that its deadline is past."""
    late: LateJob | None = None
    """How late the job ends where it finishes first, and what would make it on time; None if it ends in time."""


def enter_job(solution: QueueSolution, job: QueuedJob | UnplannedJob) -> SubmittedJob:
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
    plans = _simulate_range(columns, solution, chosen.tolist())
    before = np.insert(solution.finish, row, np.inf)
    due = float(columns.due[row])
    entries = _keep_first_to_finish([_enter_pool(plans, row, option, before) for option in columns.options_of(row)])
    if np.isfinite(due):
        entries = tuple(replace(item, late_s=_count_late_seconds(columns, row, item.finish_s)) for item in entries)
    return SubmittedJob(job.name, entries, refusal, find_lateness(columns, row, entries[0].finish_s))


def _count_late_seconds(columns: QueueColumns, job: int, finish_s: float) -> float:
    late = find_lateness(columns, job, finish_s)
    return 0.0 if late is None else late.late_s


def list_waiting_ends(solution: QueueSolution, effort: int = EFFORT) -> dict[int, tuple[PoolEnd, ...]]:
    """Return when waiting jobs would end on each pool, by row of the job.

    Jobs that start first are simulated first. Jobs for which `effort` does not suffice are absent. The end on the
    planned pool is the planned one.

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
        for option in columns.options_of(row):
            if columns.pool[option] != columns.pool[planned]:
                line = plan.try_moves({row: option})[1][int(columns.pool[option])]
                ends.append(PoolEnd(columns.options[option], float(line.finish[bisect_left(line.jobs, row)])))
        listed[row] = _keep_first_to_finish(ends)
    return listed


def list_planned_entries(solution: QueueSolution) -> list[PoolEntry]:
    """Return the planned start and end of every job with their ranges, in the order of the rows."""
    columns, option = solution.columns, solution.option
    finish = [plan.finish for plan in _simulate_range(columns, solution, option)]
    chosen = [columns.options[item] for item in option]
    return [_make_entry(item, [float(ends[row]) for ends in finish]) for row, item in enumerate(chosen)]


def _insert_job(solution: QueueSolution, job: QueuedJob) -> QueueColumns:
    """Return the queue with one more job at its turn. The other jobs keep their order."""
    problem = solution.columns.problem
    larger = replace(problem, jobs=(*problem.jobs, job))
    if solution.order == "kueue" or not problem.jobs:
        return build_columns(sort_jobs(larger, [item.arrival_s for item in larger.jobs]))
    columns = build_columns(larger)
    row = len(problem.jobs)
    options = np.array(columns.options_of(row))
    lowest = int(options[np.argmin(smith_ratio(columns, options))])
    chosen = np.append(np.array(solution.option, dtype=int), lowest)
    rank = solution.policy.rank(columns, chosen, solution.score[solution.policy.deciding])
    behind = (
        place for place, item in enumerate(problem.jobs) if item.priority == job.priority and rank[place] > rank[row]
    )
    turn = next((place for place in behind if not problem.jobs[place].is_running), row)
    return build_columns(sort_jobs(larger, [*map(float, range(row)), turn - 0.5]))


def _simulate_range(columns: QueueColumns, solution: QueueSolution, option: Sequence[int]) -> tuple[Assignment, ...]:
    """Return three plans: with all forecasts as they are, at the lower ends and at the upper ends of their ranges."""
    lower, upper = (
        replace(columns, seconds=np.fromiter(map(attrgetter(name), columns.options), float, len(columns.options)))
        for name in ("lower_s", "upper_s")
    )
    return tuple(Assignment(each, solution.policy, list(option)) for each in (columns, lower, upper))


def _enter_pool(plans: Sequence[Assignment], row: int, option: int, before: Floats | None = None) -> PoolEntry:
    """Return the entry of a job with one of its options.

    Args:
        plans: the plan at the forecasts, and at the lower and upper ends of their ranges.
        row: the job.
        option: the option.
        before: end of every job without this job, (n,). If None, delayed jobs are not counted.
    """
    columns = plans[0].columns
    lines = list[PoolTimeline]()
    for plan in plans:
        _, changed = plan.try_moves({row: option})
        lines.append(changed[int(columns.pool[option])])
    finish = [float(line.finish[bisect_left(line.jobs, row)]) for line in lines]
    entry = _make_entry(columns.options[option], finish)
    if before is None:
        return entry
    others = before[lines[0].jobs]
    return replace(entry, delayed=int((lines[0].finish > others * (1 + 1e-9)).sum()))


def _make_entry(option: JobOption, finish: Sequence[float]) -> PoolEntry:
    """Return an option's entry from three ends: at the forecasts, and at the lower and upper ends of their ranges."""
    starts = [end - taken for end, taken in zip(finish, (option.seconds, option.lower_s, option.upper_s), strict=True)]
    starts = [max(start, 0.0) for start in starts]
    return PoolEntry(option, starts[0], min(starts), max(starts), finish[0], min(finish), max(finish))


def _keep_first_to_finish(entries: Sequence[EndT]) -> tuple[EndT, ...]:
    """Return for each pool the entry that finishes first, sorted by finish. Of equal ones, take the fewest GPUs."""
    best = dict[str, EndT]()
    for entry in sorted(entries, key=lambda item: (item.finish_s, item.option.gpus)):
        best.setdefault(entry.option.pool, entry)
    return tuple(sorted(best.values(), key=lambda item: (item.finish_s, item.option.pool)))
