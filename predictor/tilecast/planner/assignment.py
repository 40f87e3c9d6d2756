"""A plan in progress: the option of every job, the simulated times in each pool, and the score under a policy."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tilecast.planner.columns import QueueColumns
from tilecast.planner.policies import QueuePolicy
from tilecast.planner.timeline import PoolSimulation, PoolTasks, simulate_pool
from tilecast.spec import Floats, Ints

QueueScore: TypeAlias = tuple[float, ...]
"""Values to minimize, the most important first."""
_MOST_KNOWN_JOBS = 40
"""Largest queue, in jobs, whose timelines are cached."""
_MOST_KNOWN = 20_000
"""Most timelines that are cached."""


@dataclass(frozen=True, slots=True)
class PoolTimeline:
    """Jobs assigned to one pool, their simulated end times, and what they add to the score."""

    jobs: list[int]
    """Rows of the jobs, in the order in which they may start."""
    finish: Floats
    missed: float
    """Total weight of the jobs that end after they are due."""
    peak: float
    sums: tuple[float, ...]
    simulation: PoolSimulation


@dataclass(slots=True)
class Assignment:
    """A plan that can be changed: the option of every job, and the simulated timeline of every pool.

    A move assigns another option to a job. Only the pools that a move affects are simulated again.
    """

    columns: QueueColumns
    policy: QueuePolicy
    option: list[int]
    """The option of each job."""
    pools: list[PoolTimeline] = field(init=False)
    simulated: int = 0
    """Number of job starts simulated so far, by which a search is limited. Cached timelines count too."""
    _known: dict[tuple[int, ...], PoolTimeline] | None = field(init=False, repr=False)
    """Cached timelines of small queues, by pool and options of its jobs. A search meets many of them again."""
    _without: tuple[PoolTimeline, int, PoolTimeline] | None = field(init=False, repr=False, default=None)
    """Last timeline that one job left, the job, and the timeline without it. A search tries many places of one job."""

    def __post_init__(self) -> None:
        self._known = {} if len(self.option) <= _MOST_KNOWN_JOBS else None
        members: list[list[int]] = [[] for _ in self.columns.pools]
        for job, option in enumerate(self.option):
            members[self.columns.pool[option]].append(job)
        self.pools = [self._simulate_pool(pool, jobs, {}) for pool, jobs in enumerate(members)]

    @property
    def score(self) -> QueueScore:
        """Score of the plan under its policy. Lower is better."""
        return _sum_scores(self.pools)

    @property
    def finish(self) -> Floats:
        """End of each job in seconds from now, (n,)."""
        ends = np.empty(len(self.option))
        for pool in self.pools:
            ends[pool.jobs] = pool.finish
        return ends

    def try_moves(self, moves: Mapping[int, int]) -> tuple[QueueScore, dict[int, PoolTimeline]]:
        """Return the score after some moves, and the new timelines by pool. The moves are not applied.

        Args:
            moves: new options by job.
        """
        members = dict[int, list[int]]()
        for job, option in moves.items():
            for pool in (int(self.columns.pool[self.option[job]]), int(self.columns.pool[option])):
                members.setdefault(pool, list(self.pools[pool].jobs))
        for job in moves:
            line = members[int(self.columns.pool[self.option[job]])]
            line.pop(bisect_left(line, job))
        for job, option in moves.items():
            line = members[int(self.columns.pool[option])]
            line.insert(bisect_left(line, job), job)
        changed = {pool: self._simulate_members(pool, jobs, moves) for pool, jobs in members.items()}
        return _sum_scores([changed.get(index, pool) for index, pool in enumerate(self.pools)]), changed

    def apply_moves(self, moves: Mapping[int, int], changed: Mapping[int, PoolTimeline]) -> None:
        """Apply moves.

        Args:
            moves: new options by job.
            changed: the new timelines that `try_moves` returned for these moves.
        """
        for job, option in moves.items():
            self.option[job] = option
        for pool, timeline in changed.items():
            self.pools[pool] = timeline

    def copy(self) -> Assignment:
        """Return a copy that can be changed independently."""
        made = Assignment.__new__(Assignment)
        made.columns, made.policy, made.option = self.columns, self.policy, list(self.option)
        made.pools, made.simulated, made._known = list(self.pools), self.simulated, self._known
        made._without = self._without
        return made

    def _simulate_members(self, pool: int, jobs: list[int], moves: Mapping[int, int]) -> PoolTimeline:
        """Return the simulated timeline of a pool after some moves.

        If a single job has left the pool, the timeline is cached, because a search moves the same job to several pools.

        Args:
            pool: index of the pool.
            jobs: jobs of the pool after the moves, in start order.
            moves: new options by job.
        """
        old = self.pools[pool]
        if len(moves) > 1 or len(jobs) >= len(old.jobs):
            return self._simulate_pool(pool, jobs, moves)
        (job,) = moves
        if self._without is not None and self._without[0] is old and self._without[1] == job:
            self.simulated += len(jobs)
            return self._without[2]
        left = self._simulate_pool(pool, jobs, moves)
        self._without = old, job, left
        return left

    def _simulate_pool(self, pool: int, jobs: list[int], moves: Mapping[int, int]) -> PoolTimeline:
        """Return the simulated timeline of a pool.

        Args:
            pool: index of the pool.
            jobs: jobs of the pool, in start order.
            moves: new options of some jobs, which replace those in `option`.
        """
        self.simulated += len(jobs)
        if not jobs:
            return PoolTimeline(jobs, np.zeros(0), 0.0, -math.inf, (), PoolSimulation([]))
        chosen = [moves.get(job, self.option[job]) for job in jobs]
        if self._known is None:
            return self._simulate_options(pool, jobs, chosen, moves)
        key = (pool, *chosen)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = known = self._simulate_options(pool, jobs, chosen, moves)
        return known

    def _simulate_options(
        self, pool: int, jobs: list[int], chosen: list[int], moves: Mapping[int, int]
    ) -> PoolTimeline:
        """Return the simulated timeline of a pool that has jobs.

        Args:
            pool: index of the pool.
            jobs: jobs of the pool, in start order.
            chosen: option of each of these jobs.
            moves: new options of some jobs, which replace those in `option`.
        """
        columns, options, rows = self.columns, np.array(chosen), np.array(jobs)
        tasks = _build_pool_tasks(columns, pool, rows, options)
        simulation = (
            self._resume_pool_simulation(pool, rows, tasks, moves)
            if moves
            else simulate_pool(columns.pools[pool], tasks)
        )
        finish = np.array(simulation.begin) + columns.seconds[options]
        peaks, sums = self.policy.terms(columns, rows, options, finish)
        peak = -math.inf if peaks is None else float(peaks.max())
        due = columns.due[rows]
        missed = float(columns.weight[rows] @ (finish > due * (1 + 1e-9))) if due.min() < math.inf else 0.0
        return PoolTimeline(jobs, finish, missed, peak, tuple(float(column.sum()) for column in sums), simulation)

    def _resume_pool_simulation(
        self, pool: int, rows: Ints, tasks: PoolTasks, moves: Mapping[int, int]
    ) -> PoolSimulation:
        """Return the simulation of a pool after moves, resumed from the last stored state that no move can affect.

        Args:
            pool: index of the pool.
            rows: jobs of the pool after the moves.
            tasks: the requests of these jobs.
            moves: new options by job.
        """
        old, columns = self.pools[pool], self.columns
        since = old.simulation.find_last_moment(self._count_untouched(pool, moves)) if old.simulation.moments else None
        if since is None:
            return simulate_pool(columns.pools[pool], tasks)
        begin = np.full(len(rows), math.inf)
        begun = np.array(old.simulation.order[: since.started])
        old_begin = np.array(old.simulation.begin)
        begin[np.searchsorted(rows, begun)] = old_begin[np.searchsorted(np.array(old.jobs), begun)]
        return simulate_pool(columns.pools[pool], tasks, old.simulation, since, begin.tolist())

    def _count_untouched(self, pool: int, moves: Mapping[int, int]) -> int:
        """Return how many jobs of a pool, counted in the order of starts, certainly keep their starts after some moves.

        A job that leaves the pool changes no earlier start. A job that joins the pool starts after the last job ahead
        of it that has the same GPU count and queue, so it changes no start before that one.
        """
        old, columns = self.pools[pool], self.columns
        jobs, order = columns.problem.jobs, old.simulation.order
        count = len(order)
        for job, option in moves.items():
            if columns.pool[self.option[job]] == pool and math.isfinite(old.finish[bisect_left(old.jobs, job)]):
                count = min(count, order.index(job))
            if columns.pool[option] == pool:
                gpus, queue = columns.gpus[option], jobs[job].queue
                ahead = old.jobs[: bisect_left(old.jobs, job)]
                same = (one for one in reversed(ahead) if columns.gpus[self.option[one]] == gpus)
                last = next((one for one in same if jobs[one].queue == queue), None)
                if last is None:
                    return 0
                if math.isfinite(old.finish[bisect_left(old.jobs, last)]):
                    count = min(count, order.index(last))
        return count


def _build_pool_tasks(columns: QueueColumns, pool: int, jobs: Ints, options: Ints) -> PoolTasks:
    """Return the GPUs, run times and queues of the jobs of one pool, as input of a simulation.

    Args:
        columns: the queue.
        pool: index of the pool.
        jobs: the jobs, (k,).
        options: option of each job, (k,).
    """
    quotas, arrival = columns.pools[pool].quotas, columns.arrival[jobs]
    return PoolTasks(
        gpus=columns.gpus[options].tolist(),
        seconds=columns.seconds[options].tolist(),
        ready_s=arrival.tolist() if (arrival > 0).any() else None,
        queues=[columns.problem.jobs[job].queue for job in jobs] if quotas else None,
        names=jobs.tolist(),
    )


def _sum_scores(pools: Sequence[PoolTimeline]) -> QueueScore:
    used = [pool for pool in pools if pool.jobs]
    if not used:
        return ()
    missed, peak = sum(pool.missed for pool in used), max(pool.peak for pool in used)
    sums = tuple(sum(parts) for parts in zip(*(pool.sums for pool in used), strict=True))
    return (missed, *sums) if peak == -math.inf else (missed, peak, *sums)


def is_better_score(score: QueueScore, other: QueueScore) -> bool:
    """Return whether a score is lower than another score by more than rounding errors, in lexicographic order."""
    for one, two in zip(score, other, strict=True):
        if abs(one - two) > 1e-9 * max(abs(one), abs(two)):
            return one < two
    return False
