"""NumPy arrays of a checked queue problem, with one row per job or per option."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, QueueProblem
from tilecast.spec import Floats, Ints


@dataclass(frozen=True, slots=True)
class QueueColumns:
    """Arrays of a queue: properties of its n jobs in start order, (n,), and of the m options of all jobs, (m,)."""

    problem: QueueProblem
    weight: Floats
    share: Floats
    """Weight of each job as a share of the total weight."""
    arrival: Floats
    due: Floats
    """Deadline of each job, or the horizon if it has none. Infinite without either."""
    alone: Floats
    """Seconds of each job if it had an equal share of every pool (`isolated_s`). A running job's past time is added."""
    present: Ints
    """Index of each job's present option, or -1."""
    is_running: Ints
    kind: Ints
    """Class of each job. Jobs of one class differ only in name and arrival."""
    need: Ints
    """Class of each job by the options that it can still be given.

    Jobs of one class may differ in their present options.
    """
    first: Ints
    """Index of each job's first option, and then the number of all options, (n + 1,)."""
    job: Ints
    pool: Ints
    gpus: Ints
    seconds: Floats
    cost: Floats
    """Cost of each option, or 0 if its pool has no price."""
    width: Floats
    """Half-width of the run time's 90 % range, as a logarithm."""
    options: tuple[JobOption, ...]

    @property
    def pools(self) -> tuple[PoolCapacity, ...]:
        return self.problem.pools

    def get_option_range(self, job: int) -> range:
        """Return the indices of a job's options in the arrays over options."""
        return range(self.first[job], self.first[job + 1])

    def select_options(self, kept: Ints) -> QueueColumns:
        """Return the queue with only some of the options.

        Args:
            kept: indices of the options to select, in ascending order, with at least one option of each job.
        """
        place = np.full(len(self.options) + 1, -1)
        place[kept] = np.arange(len(kept))
        return replace(
            self,
            present=place[self.present],
            first=np.searchsorted(kept, self.first),
            job=self.job[kept],
            pool=self.pool[kept],
            gpus=self.gpus[kept],
            seconds=self.seconds[kept],
            cost=self.cost[kept],
            width=self.width[kept],
            options=tuple(self.options[item] for item in kept.tolist()),
        )


def build_columns(problem: QueueProblem) -> QueueColumns:
    """Return the arrays of a problem that `check_problem` returned."""
    jobs = problem.jobs
    given = [_list_available_options(job) for job in jobs]
    first = np.cumsum([0, *map(len, given)])
    places = {pool.name: index for index, pool in enumerate(problem.pools)}
    horizon = math.inf if problem.horizon_s is None else problem.horizon_s
    # Equal jobs share their options, which are processed once.
    same, equal = dict[int, int](), dict[tuple[JobOption, ...], int]()
    for some in given:
        if id(some) not in same:
            same[id(some)] = equal.setdefault(some, len(equal))
    which = [same[id(some)] for some in given]
    facts = [_build_option_columns(some, places) for some in equal]
    pool, gpus, seconds, cost, width = (
        np.concatenate([facts[index][row] for index in which] or [np.zeros(0)]) for row in range(5)
    )
    # A class of equal jobs is what they need, and where they are.
    kinds, needs = dict[tuple[tuple[object, ...], object, bool], int](), dict[tuple[object, ...], int]()
    kind = [
        kinds.setdefault(((index, *_list_bounding_properties(job)), job.present, job.is_advised), len(kinds))
        for job, index in zip(jobs, which, strict=True)
    ]
    need_of = [needs.setdefault(wants, len(needs)) for wants, _, _ in kinds]
    need = [need_of[number] for number in kind]
    one_of = {number: job for job, number in zip(jobs, kind, strict=True)}
    shares = {number: isolated_s(job.options, problem.pools, len(jobs)) for number, job in one_of.items()}
    waited = [max(-job.arrival_s, 0.0) * job.is_running for job in jobs]
    weight = np.array([job.weight for job in jobs], dtype=float)
    return QueueColumns(
        problem=problem,
        weight=weight,
        share=weight / weight.sum(),
        arrival=np.array([job.arrival_s for job in jobs], dtype=float),
        due=np.array([horizon if job.deadline_s is None else job.deadline_s for job in jobs], dtype=float),
        alone=np.array([shares[number] for number in kind], dtype=float) + np.array(waited, dtype=float),
        present=_find_present_options(jobs, which, list(equal), first[:-1]),
        is_running=np.array([job.is_running for job in jobs], dtype=np.int64),
        kind=np.array(kind, dtype=np.int64),
        need=np.array(need, dtype=np.int64),
        first=first,
        job=np.repeat(np.arange(len(jobs)), [len(some) for some in given]),
        pool=pool.astype(np.int64),
        gpus=gpus.astype(np.int64),
        seconds=seconds,
        cost=cost,
        width=width,
        options=tuple(chain.from_iterable(given)),
    )


def _build_option_columns(options: Sequence[JobOption], places: Mapping[str, int]) -> Floats:
    """Return five rows for k options: pool index, GPUs, seconds, cost and width of the range, (5, k)."""
    rows = [(places[item.pool], item.gpus, item.seconds, item.cost or 0.0, item.width) for item in options]
    return np.array(rows, dtype=float).reshape(-1, 5).T


def _list_available_options(job: QueuedJob) -> tuple[JobOption, ...]:
    """Return the options that a job can still be given.

    A running job can keep its present option. If it may move, its other options are included with the time of a move
    added.
    """
    if not job.is_running:
        return job.options
    here = tuple(option for option in job.options if (option.pool, option.gpus) == job.present)
    if job.move_s is None:
        return here
    moved = (option for option in job.options if option not in here)
    return (*here, *(_add_move_time(option, job.move_s) for option in moved))


def _add_move_time(option: JobOption, seconds: float) -> JobOption:
    """Return an option with `seconds` added to its remaining run time, and its cost raised in proportion."""
    ratio = 1 + seconds / option.seconds
    cost = None if option.cost is None else option.cost * ratio
    ends = (option.seconds + seconds, option.lower_s + seconds, option.upper_s + seconds)
    return JobOption(option.pool, option.gpus, *ends, cost, option.plan, option.step_s)


def _find_present_options(
    jobs: Sequence[QueuedJob], which: Sequence[int], options: Sequence[Sequence[JobOption]], first: Ints
) -> Ints:
    """Return each job's present option as an index into the arrays over options, or -1 for a job without one, (n,).

    Args:
        jobs: the jobs.
        which: for each job, the index of its tuple in `options`.
        options: the distinct tuples of options that jobs have.
        first: index of each job's first option in the arrays, (n,).
    """
    places = [dict[tuple[str, int] | None, int]() for _ in options]
    for place, some in zip(places, options, strict=True):
        for index, item in enumerate(some):
            place.setdefault((item.pool, item.gpus), index)
    found = np.array([places[one].get(job.present, -1) for one, job in zip(which, jobs, strict=True)], dtype=int)
    return np.where(found < 0, -1, first + found)


def _list_bounding_properties(job: QueuedJob) -> tuple[object, ...]:
    """Return those properties of a job, besides its options, on which the bounds of its end and its cost depend."""
    return job.weight, job.priority, job.queue, job.deadline_s, job.is_running


def isolated_s(options: Sequence[JobOption], pools: Sequence[PoolCapacity], jobs: int) -> float:
    """Return the run time in seconds of a job that always gets 1 / `jobs` of the GPU time of every pool.

    The job uses one pool at a time and prefers its fastest pools. Finish-time fairness compares with this time (Themis,
    NSDI 2020, section 3; Gavel, OSDI 2020, section 4.2).
    """
    best = dict[str, tuple[float, float]]()
    for option in options:
        gpus = next((pool.gpus for pool in pools if pool.name == option.pool), 0)
        share = min(1.0, gpus / (jobs * option.gpus))
        rate, old = 1 / option.seconds, best.get(option.pool, (0.0, 0.0))
        if share * rate > old[0] * old[1]:
            best[option.pool] = share, rate
    left, total = 1.0, 0.0
    for share, rate in sorted(best.values(), key=lambda item: -item[1]):
        total += min(share, left) * rate
        left -= min(share, left)
    return 1 / total if total else math.inf
