"""A queue as a value: jobs with the ways to run each of them, and pools with their nodes and quotas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class JobOption:
    """One way to run a job: a pool, a number of GPUs, and what comes of it."""

    pool: str
    gpus: int
    seconds: float
    """Forecast of what is left of the run."""
    lower_s: float
    upper_s: float
    """The 90 % range of that."""
    cost: float | None = None
    """Price of what is left; None where the pool has none."""
    plan: str = ""
    step_s: float = math.nan

    @property
    def width(self) -> float:
        """Half-width of the range, as a logarithm."""
        return math.log(self.upper_s / self.lower_s) / 2 if self.lower_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that waits or runs. Times are seconds from now."""

    name: str
    options: tuple[JobOption, ...]
    arrival_s: float = 0.0
    """Negative for a job that waits already."""
    weight: float = 1.0
    owner: str = ""
    """Whose it is; empty where that does not matter."""
    own_weight: float = 1.0
    """How much it counts among the jobs of its owner, and nowhere else."""
    priority: int = 0
    """Kueue starts higher ones first."""
    deadline_s: float | None = None
    queue: str = ""
    """The queue whose quotas it takes from."""
    present: tuple[str, int] | None = None
    """Pool and GPUs that it runs on, was advised before, or would take unadvised; None where nothing says so."""
    is_advised: bool = False
    """Whether an earlier plan put it where it is at present, which says nothing of where it would go by itself."""
    is_running: bool = False
    """Whether it runs where it is at present; its options say what is left."""
    move_s: float | None = None
    """What moving it would cost once it runs, in seconds of the run; None where its owner does not move it."""


LEAST_LEFT = 0.02
"""What is left at least of a job that runs, however long it has: forecasts err."""


def running(job: QueuedJob, ran_s: float) -> QueuedJob:
    """A job with what is left of it, by its forecast where it runs.

    Args:
        job: the whole job; `present` is where it runs.
        ran_s: how long it has run, in seconds.

    Raises:
        SpecError: there is no forecast of it where it runs.
    """
    here = next((item for item in job.options if (item.pool, item.gpus) == job.present), None)
    if here is None:
        where = f"{job.present[1]} GPUs of {job.present[0]}" if job.present else "nowhere"
        raise SpecError("status", f"it runs on {where}, where no forecast of it is", "see `tilecast advise`")
    left = max(1 - ran_s / here.seconds, LEAST_LEFT)
    return replace(job, options=tuple(_rest(item, left) for item in job.options), is_running=True)


def _rest(option: JobOption, left: float) -> JobOption:
    return replace(
        option,
        seconds=option.seconds * left,
        lower_s=option.lower_s * left,
        upper_s=option.upper_s * left,
        cost=None if option.cost is None else option.cost * left,
    )


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Nodes of a pool, and who may have how many of its GPUs."""

    name: str
    nodes: int
    gpus_per_node: int
    held_gpus: int = 0
    """GPUs that others hold, and no end of it is known."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """The most GPUs that a queue may have at once; a queue that is not named has no limit."""
    price_per_gpu_hour: float | None = None
    currency: str = "USD"

    @property
    def gpus(self) -> int:
        """GPUs that jobs can have."""
        return max(self.nodes * self.gpus_per_node - self.held_gpus, 0)

    @property
    def free(self) -> list[int]:
        """Free GPUs of each node while no job runs; what others hold fills whole nodes first."""
        held = [
            min(max(self.held_gpus - index * self.gpus_per_node, 0), self.gpus_per_node) for index in range(self.nodes)
        ]
        return [self.gpus_per_node - taken for taken in held]

    def holds(self, gpus: int) -> bool:
        """Whether a job of so many GPUs can ever start: on one node, or on whole nodes."""
        if gpus <= self.gpus_per_node:
            return gpus <= max(self.free, default=0)
        return gpus % self.gpus_per_node == 0 and gpus // self.gpus_per_node <= self.free.count(self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A job that cannot be planned as asked."""

    job: str
    problem: str
    remedy: str
    is_left_out: bool = True
    """Whether the plan leaves it out, rather than plan it without what cannot be."""


@dataclass(frozen=True, slots=True)
class QueueProblem:
    """Jobs and pools."""

    jobs: tuple[QueuedJob, ...]
    pools: tuple[PoolCapacity, ...]
    horizon_s: float | None = None
    """By when everything is due that has no deadline of its own, where cost decides."""

    def pool(self, name: str) -> PoolCapacity:
        """The pool of that name."""
        return next(pool for pool in self.pools if pool.name == name)


def checked(problem: QueueProblem) -> tuple[QueueProblem, tuple[Unplanned, ...]]:
    """The problem without what cannot be meant, in the order in which Kueue starts jobs, and why not the rest.

    Raises:
        SpecError: two jobs or two pools have one name, or a pool or a quota has a number that none can have.
    """
    _check_names("pools", [pool.name for pool in problem.pools])
    _check_names("jobs", [job.name for job in problem.jobs])
    for pool in problem.pools:
        _check_pool(pool)
    by_name = {pool.name: pool for pool in problem.pools}
    remaining, refused = list[QueuedJob](), list[Unplanned]()
    # Equal jobs often share their options, which are looked at once.
    alike = dict[tuple[object, ...], tuple[JobOption, ...]]()
    for job in problem.jobs:
        key = id(job.options), job.queue, job.present, job.is_running
        if key not in alike:
            alike[key] = undominated(job, [item for item in job.options if not _why_not(job, item, by_name)])
        able = replace(job, options=alike[key])
        if not able.options:
            refused.append(_nowhere(job, by_name))
            continue
        if job.deadline_s is not None and job.deadline_s <= 0:
            remedy = "give it a later one; it is planned as if it had none"
            refused.append(Unplanned(job.name, "its deadline is past", remedy, is_left_out=False))
            able = replace(able, deadline_s=None)
        remaining.append(able)
    remaining.sort(key=lambda job: (not job.is_running, -job.priority, job.arrival_s))
    return replace(problem, jobs=tuple(remaining)), tuple(refused)


def _check_names(field_: str, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise SpecError(field_, f"{count} are named {name}", "give each a name of its own")


def _check_pool(pool: PoolCapacity) -> None:
    if pool.nodes < 0 or pool.gpus_per_node < 1 or pool.held_gpus < 0:
        problem = f"{pool.nodes} nodes of {pool.gpus_per_node} GPUs, of which {pool.held_gpus} are held, are no pool"
        raise SpecError(f"pool {pool.name}", problem, "give counts from 0, and nodes of 1 GPU at least")
    for queue, quota in pool.quotas.items():
        if quota < 0:
            raise SpecError(f"pool {pool.name}", f"queue {queue} has a quota of {quota}", "give a count from 0")


def _why_not(job: QueuedJob, option: JobOption, pools: Mapping[str, PoolCapacity]) -> str:
    """Why an option can never be; empty where it can."""
    pool = pools.get(option.pool)
    if pool is None:
        return f"there is no pool {option.pool}"
    if not (0 < option.seconds < math.inf):
        return f"{option.pool}: the forecast of {option.seconds:g} s is no time"
    if job.is_running and job.present == (option.pool, option.gpus):
        return ""
    if not pool.gpus:
        return f"{pool.name} has no GPU free of others"
    if not pool.holds(option.gpus):
        return f"{pool.name} has no place for {option.gpus} GPUs at once ({pool.nodes} nodes of {pool.gpus_per_node})"
    quota = pool.quotas.get(job.queue)
    if quota is not None and quota < option.gpus:
        return f"queue {job.queue} may have {quota} GPUs of {pool.name}, it takes {option.gpus}"
    return ""


def _nowhere(job: QueuedJob, pools: Mapping[str, PoolCapacity]) -> Unplanned:
    reasons = list(dict.fromkeys(_why_not(job, option, pools) for option in job.options))
    if not reasons:
        return Unplanned(job.name, "no pool can run it", "see `tilecast advise` for what would help")
    return Unplanned(job.name, "; ".join(reasons[:3]), "give it fewer GPUs, another pool, or more quota")


def undominated(job: QueuedJob, options: Sequence[JobOption]) -> tuple[JobOption, ...]:
    """The options that no other of the same pool beats in GPUs, time and cost at once, and the present one."""
    remaining = list[JobOption]()
    for option in sorted(options, key=lambda item: (item.pool, item.gpus, item.seconds, item.cost or 0.0)):
        beaten = any(
            one.pool == option.pool and one.seconds <= option.seconds and (one.cost or 0.0) <= (option.cost or 0.0)
            for one in remaining
        )
        if not beaten or job.present == (option.pool, option.gpus):
            remaining.append(option)
    return tuple(remaining)
