"""Exchange of places among the jobs of one owner, by the owner's weights and at nobody else's cost.

A plan weighs jobs by weights that their owners cannot choose. The weights that an owner gives to its own jobs count
afterwards. Two of its jobs exchange places if the job with the higher owner's weight gains, and no job of another owner
ends later than before. Jobs of other owners keep their places, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilecast.planner.assignment import Assignment, PoolTimeline, QueueScore
from tilecast.planner.columns import QueueColumns
from tilecast.spec import Floats

TRIED = 3
"""Most exchanges that are tried for each job: those with the largest gains for it."""
LEAST_GAIN = 0.03
"""Least gain of an exchange over the weighted completion times of both jobs, so that jobs do not move to and fro."""


def exchange_places(current: Assignment, effort: int) -> None:
    """Exchange places among the jobs of each owner by the owner's weights.

    Args:
        current: the plan, which changes.
        effort: most job starts to simulate.
    """
    columns = current.columns
    stop = current.simulated + effort
    for members in _jobs_by_owner(columns):
        for job in sorted(members, key=lambda one: -columns.problem.jobs[one].own_weight):
            for other, moves in _promising_exchanges(current, members, job):
                if current.simulated >= stop:
                    return
                score, changed = current.try_moves(moves)
                is_wished = _policy_allows(current, score) and _owner_gains(current, changed, members, (job, other))
                if is_wished and not _delays_others(current, changed, members):
                    current.apply_moves(moves, changed)
                    break


def _jobs_by_owner(columns: QueueColumns) -> Sequence[Sequence[int]]:
    """Return the waiting jobs of each owner that gives its jobs different weights."""
    of_owner: dict[str, list[int]] = {}
    for number, job in enumerate(columns.problem.jobs):
        if job.owner and not job.is_running:
            of_owner.setdefault(job.owner, []).append(number)
    jobs = columns.problem.jobs
    return [members for members in of_owner.values() if len({jobs[one].own_weight for one in members}) > 1]


def _promising_exchanges(current: Assignment, members: Sequence[int], job: int) -> list[tuple[int, Mapping[int, int]]]:
    """Return jobs with a lower owner's weight, and the moves by which `job` and each of them exchange places."""
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


def _find_option(columns: QueueColumns, job: int, like: int) -> int | None:
    """Return the job's option with the pool and GPU count of option `like`; None if there is none."""
    place = columns.pool[like], columns.gpus[like]
    return next((one for one in columns.options_of(job) if (columns.pool[one], columns.gpus[one]) == place), None)


def _compare_ends(current: Assignment, changed: Mapping[int, PoolTimeline]) -> tuple[Floats, Floats]:
    """Return when every job ends now, and when it would end after the change, (n,) each."""
    before, after = current.finish, current.finish
    for pool in changed.values():
        after[pool.jobs] = pool.finish
    return before, after


def _policy_allows(current: Assignment, score: QueueScore) -> bool:
    """Return whether the policy allows a score.

    The completion policy allows every score, because its mean of completion times may be traded between an owner's
    jobs. Under the other policies, the score may not get worse up to its deciding part.
    """
    part = current.policy.deciding + 1
    return current.policy.name == "completion" or score[:part] <= current.score[:part]


def _owner_gains(
    current: Assignment, changed: Mapping[int, PoolTimeline], members: Sequence[int], pair: tuple[int, int]
) -> bool:  # fmt: skip
    """Return whether the owner's jobs end earlier by its weights, by enough for the two jobs of the exchange."""
    before, after = _compare_ends(current, changed)
    weight = np.array([current.columns.problem.jobs[one].own_weight for one in members])
    rows, two = np.array(members), np.isin(members, pair)
    took = weight * (before[rows] - current.columns.arrival[rows])
    return float((weight * (before[rows] - after[rows])).sum()) > LEAST_GAIN * float(took[two].sum())


def _delays_others(current: Assignment, changed: Mapping[int, PoolTimeline], members: Sequence[int]) -> bool:
    """Return whether a job of another owner would end later."""
    before, after = _compare_ends(current, changed)
    is_other = np.ones(len(before), dtype=bool)
    is_other[np.array(members)] = False
    return bool((after > before * (1 + 1e-9) + 1e-9)[is_other].any())
