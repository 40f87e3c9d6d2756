"""Exchange pools and GPU counts between two jobs of one owner, by weights that the owner gives to its own jobs.

The search for a plan ignores these weights, so that they give no owner an advantage over others. Afterwards, two jobs
of one owner swap pool and GPU count if the job with the higher weight then ends earlier and no job of another owner
ends later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilecast.planner.assignment import Assignment, PoolTimeline, QueueScore
from tilecast.planner.columns import QueueColumns
from tilecast.spec import Floats

TRIED = 3
"""Most swaps that are tried for each job, those with the largest gains first."""
LEAST_GAIN = 0.03
"""Least relative gain of a swap in the weighted completion times of both jobs. It keeps jobs from moving to and fro."""


def swap_within_owners(current: Assignment, effort: int) -> None:
    """Swap pool and GPU count between jobs of one owner if the owner's weights favour it.

    Args:
        current: the plan, which is changed in place.
        effort: largest number of job starts to simulate.
    """
    columns = current.columns
    stop = current.simulated + effort
    for members in _group_jobs_by_owner(columns):
        for job in sorted(members, key=lambda one: -columns.problem.jobs[one].own_weight):
            for other, moves in _list_promising_swaps(current, members, job):
                if current.simulated >= stop:
                    return
                score, changed = current.try_moves(moves)
                is_wished = _may_reach_score(current, score) and _is_gain_of_owner(
                    current, changed, members, (job, other)
                )
                if is_wished and not _delays_others(current, changed, members):
                    current.apply_moves(moves, changed)
                    break


def _group_jobs_by_owner(columns: QueueColumns) -> Sequence[Sequence[int]]:
    """Return the waiting jobs of each owner whose jobs have different weights, one list per owner."""
    of_owner: dict[str, list[int]] = {}
    for number, job in enumerate(columns.problem.jobs):
        if job.owner and not job.is_running:
            of_owner.setdefault(job.owner, []).append(number)
    jobs = columns.problem.jobs
    return [members for members in of_owner.values() if len({jobs[one].own_weight for one in members}) > 1]


def _list_promising_swaps(current: Assignment, members: Sequence[int], job: int) -> list[tuple[int, Mapping[int, int]]]:
    """Return the best swaps of `job` with jobs of lower weight, as (other job, moves), best first.

    Args:
        current: the plan.
        members: the waiting jobs of the owner.
        job: the job that should end earlier.
    """
    columns, finish = current.columns, current.finish
    jobs, exchanges = columns.problem.jobs, list[tuple[float, int, Mapping[int, int]]]()
    for other in members:
        if jobs[other].own_weight >= jobs[job].own_weight:
            continue
        there = _find_option(columns, job, current.option[other])
        here = _find_option(columns, other, current.option[job])
        if there is None or here is None or columns.pool[there] == columns.pool[here]:
            continue
        start = finish[other] - columns.seconds[current.option[other]]
        gain = finish[job] - (start + columns.seconds[there])
        if gain > 0:
            exchanges.append((-float(gain), other, {job: there, other: here}))
    return [(other, moves) for _, other, moves in sorted(exchanges, key=lambda item: item[:2])[:TRIED]]


def _find_option(columns: QueueColumns, job: int, other_option: int) -> int | None:
    """Return the index of a job's option with the pool and GPU count of `other_option`, or None."""
    place = columns.pool[other_option], columns.gpus[other_option]
    return next((one for one in columns.get_option_range(job) if (columns.pool[one], columns.gpus[one]) == place), None)


def _compare_ends(current: Assignment, changed: Mapping[int, PoolTimeline]) -> tuple[Floats, Floats]:
    """Return the end of every job in the present plan and in the changed plan, two arrays of shape (n,)."""
    before, after = current.finish, current.finish
    for pool in changed.values():
        after[pool.jobs] = pool.finish
    return before, after


def _may_reach_score(current: Assignment, score: QueueScore) -> bool:
    """Return whether swaps may change the plan's score to `score`.

    No policy allows more missed deadlines. The completion policy allows any mean completion time, because an owner may
    shift time between its jobs. Under other policies, the deciding value must not get worse.
    """
    part = current.policy.deciding + (current.policy.name != "completion")
    return score[:part] <= current.score[:part]


def _is_gain_of_owner(
    current: Assignment, changed: Mapping[int, PoolTimeline], members: Sequence[int], pair: tuple[int, int]
) -> bool:  # fmt: skip
    """Return whether a swap reduces the weighted completion times of the pair by more than `LEAST_GAIN`.

    Args:
        current: the plan.
        changed: the timelines after the swap, by pool.
        members: the waiting jobs of the owner.
        pair: the two jobs that swap.
    """
    before, after = _compare_ends(current, changed)
    weight = np.array([current.columns.problem.jobs[one].own_weight for one in members])
    rows, two = np.array(members), np.isin(members, pair)
    took = weight * (before[rows] - current.columns.arrival[rows])
    return float((weight * (before[rows] - after[rows])).sum()) > LEAST_GAIN * float(took[two].sum())


def _delays_others(current: Assignment, changed: Mapping[int, PoolTimeline], members: Sequence[int]) -> bool:
    """Return whether any job outside `members` would end later after the change."""
    before, after = _compare_ends(current, changed)
    is_other = np.ones(len(before), dtype=bool)
    is_other[np.array(members)] = False
    return bool((after > before * (1 + 1e-9) + 1e-9)[is_other].any())
