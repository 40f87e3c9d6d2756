"""Report on a plan: its totals, the totals of the references, and the times and gains of each job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tilecast.planner.columns import QueueColumns, build_columns
from tilecast.planner.problem import JobOption, sort_jobs
from tilecast.planner.ranges import find_ranges
from tilecast.planner.references import REFERENCES, QueueOutcome
from tilecast.planner.solver import QueueSolution
from tilecast.spec import Floats


@dataclass(frozen=True, slots=True)
class QueueTotals:
    """Completion times, cost, fairness and missed deadlines of a whole queue under one plan."""

    completion_s: float
    """Weighted mean completion time."""
    worst_completion_s: float
    """99th percentile of completion times."""
    makespan_s: float
    """End of the last job."""
    cost: float | None
    """Total cost; None if a used pool has no price."""
    fairness: float
    """Largest ratio of completion time to that with an equal share of the cluster (finish-time fairness)."""
    missed: int
    """Number of jobs that end after they are due."""


def sum_outcome(columns: QueueColumns, outcome: QueueOutcome) -> QueueTotals:
    """Return the totals of a simulated outcome. The queue must have at least one job."""
    took = outcome.finish - columns.arrival
    costs = [columns.options[item].cost for item in outcome.option]
    known = [cost for cost in costs if cost is not None]
    return QueueTotals(
        completion_s=float(np.average(took, weights=columns.weight)),
        worst_completion_s=float(np.percentile(took, 99)),
        makespan_s=float(outcome.finish.max()),
        cost=sum(known) if len(known) == len(costs) else None,
        fairness=float((took / columns.alone).max()),
        missed=int((outcome.finish > columns.due * (1 + 1e-9)).sum()),
    )


@dataclass(frozen=True, slots=True)
class PlannedTimes:
    """Forecast start and end of a job in the plan, in seconds from now, and its gain over no plan."""

    job: int
    """Row of the job in the columns."""
    start_s: float
    finish_s: float
    lower_s: float
    upper_s: float
    """Upper end of the 90 % range of `finish_s`; `lower_s` is the lower end."""
    gain_s: float
    """Seconds by which the job ends earlier than if every job ran on its own best pool."""
    payers: tuple[str, ...] = ()
    """Jobs that use this job's place on its own best pool, if it ends later than there. The largest gains come first.
    """


@dataclass(frozen=True, slots=True)
class QueueReport:
    """A plan with the times of each job, its totals, and the totals of each reference."""

    solution: QueueSolution
    job_times: tuple[PlannedTimes, ...]
    plan: QueueTotals
    references: Mapping[str, QueueTotals]


MOST_PAYERS = 3


def build_report(solution: QueueSolution, *, has_payers: bool = True) -> QueueReport:
    """Return the report on a plan. The plan must have at least one job.

    Args:
        solution: the plan.
        has_payers: whether to name the jobs that delay others, which takes time quadratic in the number of jobs.
    """
    columns = solution.columns
    outcomes = _simulate_references(solution)
    wish = outcomes["ownBest"]
    gain = wish.finish - solution.finish
    start = solution.finish - columns.seconds[solution.option]
    ranges = find_ranges(columns, solution.policy, solution.option)
    lower, upper = ranges.finish_lower, ranges.finish_upper
    times = zip(start.tolist(), solution.finish.tolist(), lower.tolist(), upper.tolist(), gain.tolist(), strict=True)
    places = tuple(
        PlannedTimes(job, *row, _find_payers(solution, wish, gain, start, job) if has_payers else ())
        for job, row in enumerate(times)
    )
    own = QueueOutcome(solution.option, solution.finish)
    return QueueReport(
        solution,
        places,
        sum_outcome(columns, own),
        {name: sum_outcome(columns, outcome) for name, outcome in outcomes.items()},
    )


def _simulate_references(solution: QueueSolution) -> dict[str, QueueOutcome]:
    """Return the outcome of each reference by name. References start jobs in Kueue's order, whatever the plan does."""
    columns = solution.columns
    if solution.order == "kueue":
        return {name: find(columns) for name, (_, find) in REFERENCES.items()}
    place = {name: float(index) for index, name in enumerate(solution.kueue_order)}
    ordered = build_columns(sort_jobs(columns.problem, [place[job.name] for job in columns.problem.jobs]))
    row_of = {job.name: row for row, job in enumerate(ordered.problem.jobs)}
    rows = np.array([row_of[job.name] for job in columns.problem.jobs])
    outcomes = {}
    for name, (_, find) in REFERENCES.items():
        found = find(ordered)
        option = np.array(found.option)[rows] - ordered.first[rows] + columns.first[:-1]
        outcomes[name] = QueueOutcome(option.tolist(), found.finish[rows])
    return outcomes


@dataclass(frozen=True, slots=True)
class LateJob:
    """A job that ends after its deadline, with the latest start at which its fastest option would still meet it."""

    job: int
    """Row of the job in the columns."""
    late_s: float
    fastest: JobOption
    latest_start_s: float
    """Latest start on the fastest option, in seconds from now. Negative if no option is fast enough."""


def list_late_jobs(solution: QueueSolution) -> list[LateJob]:
    """Return the jobs that end after their deadlines, those that are most late first."""
    columns = solution.columns
    rows = np.flatnonzero(solution.finish > columns.due * (1 + 1e-9)).tolist()
    late = [find_lateness(columns, row, float(solution.finish[row])) for row in rows]
    return sorted((item for item in late if item is not None), key=lambda item: -item.late_s)


def find_lateness(columns: QueueColumns, job: int, finish_s: float) -> LateJob | None:
    """Return how late a job ends, and what would make it on time. If it meets its deadline, return None.

    Args:
        columns: the queue.
        job: row of the job.
        finish_s: end of the job, in seconds from now.
    """
    due = float(columns.due[job])
    if not finish_s > due * (1 + 1e-9):
        return None
    fastest = min(columns.get_option_range(job), key=lambda item: (columns.seconds[item], columns.gpus[item]))
    return LateJob(job, finish_s - due, columns.options[fastest], due - float(columns.seconds[fastest]))


def _find_payers(
    solution: QueueSolution, best_outcome: QueueOutcome, gain: Floats, start: Floats, job: int
) -> tuple[str, ...]:
    """Return the names of jobs that gain by the plan and use a delayed job's best pool in that job's place.

    These jobs run on the pool at times at which the delayed job would have run there without the plan. At most
    `MOST_PAYERS` names are returned, the largest gain first.

    Args:
        solution: the plan.
        best_outcome: the outcome if every job used its own best pool.
        gain: seconds by which each job ends earlier in the plan than in `best_outcome`, (n,).
        start: start of each job in the plan, (n,).
        job: the job. If the plan does not delay it, return an empty tuple.
    """
    columns = solution.columns
    if gain[job] >= 0:
        return ()
    pool = columns.pool[best_outcome.option[job]]
    begin = best_outcome.finish[job] - columns.seconds[best_outcome.option[job]]
    there = (columns.pool[solution.option] == pool) & (start < best_outcome.finish[job]) & (solution.finish > begin)
    there[job] = False
    rows = np.flatnonzero(there & (gain > 0))
    rows = rows[np.argsort(-gain[rows], kind="stable")][:MOST_PAYERS]
    return tuple(columns.problem.jobs[row].name for row in rows)
