"""Forecast starts and ends of the jobs for which Kueue chooses the pool, beside jobs that follow the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilecast.planner.columns import build_columns
from tilecast.planner.entries import PoolEntry, list_planned_entries
from tilecast.planner.problem import JobOption, QueuedJob
from tilecast.planner.references import simulate_kueue
from tilecast.planner.solver import QueueSolution


def list_kueue_entries(
    solution: QueueSolution, requested_gpus: Mapping[int, int], flavors: Mapping[str, Sequence[str]]
) -> dict[int, PoolEntry]:
    """Return the start and end, with ranges, of each job for which Kueue chooses the pool, by row of the job.

    Such a job starts on the first of its pools with room, with the GPUs that its pods request. All other jobs keep
    their planned options. The ranges do not include that a job may start on another pool than forecast. A job that can
    never start is left out.

    Args:
        solution: the plan of the queue, in Kueue's order.
        requested_gpus: GPUs that the pods of each such job request, by row of the job.
        flavors: pools in the order in which Kueue tries them, by name of the job. Equal jobs need equal lists.
    """
    columns = solution.columns

    def keep_options(row: int, job: QueuedJob) -> tuple[JobOption, ...]:
        if row not in requested_gpus:
            return (columns.options[solution.option[row]],)
        order = flavors.get(job.name, ())
        here = tuple(item for item in job.options if item.pool in order or not order)
        return tuple(item for item in here if item.gpus == requested_gpus[row]) or here or job.options

    problem = columns.problem
    jobs = [replace(job, options=keep_options(row, job), is_advised=True) for row, job in enumerate(problem.jobs)]
    started = list(range(len(jobs)))
    while True:
        own = build_columns(replace(problem, jobs=tuple(jobs[row] for row in started)))
        outcome = simulate_kueue(own, flavors)
        if -1 not in outcome.option:
            break
        started = [row for row, option in zip(started, outcome.option, strict=True) if option >= 0]
    entries = list_planned_entries(replace(solution, columns=own, option=outcome.option, finish=outcome.finish))
    return {row: entry for row, entry in zip(started, entries, strict=True) if row in requested_gpus}
