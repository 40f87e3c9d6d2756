"""The order that an owner wishes among its own jobs, as far as it costs nobody else.

A plan counts jobs by weights that are not their owners' to choose. What an owner says of its own jobs comes after that:
two of them exchange their places where the one that it weighs more gains by it, and no job of anybody else ends later
than it did. Nobody else's job is given another place, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilecast.queue.assignment import Assignment, PoolTimeline, QueueScore
from tilecast.queue.columns import QueueColumns
from tilecast.spec import Floats

TRIED = 3
"""Exchanges that are tried of each job, those that would gain it most."""
LEAST_GAIN = 0.03
"""What an exchange has to gain, as a share of the weighted completion times of the two: less would only make jobs move
to and fro."""


def exchange(current: Assignment, effort: int) -> None:
    """Exchange places among the jobs of each owner by the owner's weights.

    Args:
        current: the plan, which changes.
        effort: jobs whose start may be simulated.
    """
    columns = current.columns
    stop = current.simulated + effort
    for members in _members(columns):
        for job in sorted(members, key=lambda one: -columns.problem.jobs[one].own_weight):
            for other, moves in _promising(current, members, job):
                if current.simulated >= stop:
                    return
                score, changed = current.tried(moves)
                is_wished = _is_allowed(current, score) and _gains(current, changed, members, (job, other))
                if is_wished and not _delays(current, changed, members):
                    current.apply(moves, changed)
                    break


def _members(columns: QueueColumns) -> Sequence[Sequence[int]]:
    """The jobs that wait of each owner that weighs them differently."""
    of_owner: dict[str, list[int]] = {}
    for number, job in enumerate(columns.problem.jobs):
        if job.owner and not job.is_running:
            of_owner.setdefault(job.owner, []).append(number)
    jobs = columns.problem.jobs
    return [members for members in of_owner.values() if len({jobs[one].own_weight for one in members}) > 1]


def _promising(current: Assignment, members: Sequence[int], job: int) -> list[tuple[int, Mapping[int, int]]]:
    """Jobs that the owner weighs less, with the moves by which `job` has their place and they have its."""
    columns, finish = current.columns, current.finish
    jobs, exchanges = columns.problem.jobs, list[tuple[float, int, Mapping[int, int]]]()
    for other in members:
        if jobs[other].own_weight >= jobs[job].own_weight:
            continue
        there = _option(columns, job, current.option[other])
        here = _option(columns, other, current.option[job])
        if there is None or here is None or columns.pool[there] == columns.pool[here]:
            continue
        start = finish[other] - columns.seconds[current.option[other]]
        gain = finish[job] - (start + columns.seconds[there])
        if gain > 0:
            exchanges.append((-float(gain), other, {job: there, other: here}))
    return [(other, moves) for _, other, moves in sorted(exchanges, key=lambda item: item[:2])[:TRIED]]


def _option(columns: QueueColumns, job: int, like: int) -> int | None:
    """The option of a job on as many GPUs of the same pool."""
    place = columns.pool[like], columns.gpus[like]
    return next((one for one in columns.of(job) if (columns.pool[one], columns.gpus[one]) == place), None)


def _ends(current: Assignment, changed: Mapping[int, PoolTimeline]) -> tuple[Floats, Floats]:
    """When every job ends now, and would end, (n,) each."""
    before, after = current.finish, current.finish
    for pool in changed.values():
        after[pool.jobs] = pool.finish
    return before, after


def _is_allowed(current: Assignment, score: QueueScore) -> bool:
    """Whether the policy allows a score: a mean of completion times is made of what owners may choose, what the other
    policies make least is not."""
    part = current.policy.deciding + 1
    return current.policy.name == "completion" or score[:part] <= current.score[:part]


def _gains(
    current: Assignment, changed: Mapping[int, PoolTimeline], members: Sequence[int], pair: tuple[int, int]
) -> bool:  # fmt: skip
    """Whether the jobs of an owner end earlier by its weights, by enough for the two that would exchange places."""
    before, after = _ends(current, changed)
    weight = np.array([current.columns.problem.jobs[one].own_weight for one in members])
    rows, two = np.array(members), np.isin(members, pair)
    took = weight * (before[rows] - current.columns.arrival[rows])
    return float((weight * (before[rows] - after[rows])).sum()) > LEAST_GAIN * float(took[two].sum())


def _delays(current: Assignment, changed: Mapping[int, PoolTimeline], members: Sequence[int]) -> bool:
    """Whether a job of anybody else would end later."""
    before, after = _ends(current, changed)
    is_other = np.ones(len(before), dtype=bool)
    is_other[np.array(members)] = False
    return bool((after > before * (1 + 1e-9) + 1e-9)[is_other].any())
