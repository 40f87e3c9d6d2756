"""A queue problem: jobs with the options that each can run with, and pools with nodes and quotas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class JobOption:
    """One way to run a job: a pool and a number of GPUs, with forecast run time and cost."""

    pool: str
    gpus: int
    seconds: float
    """Forecast of the remaining run time, in seconds."""
    lower_s: float
    upper_s: float
    """Upper end of the 90 % range of `seconds`; `lower_s` is the lower end."""
    cost: float | None = None
    """Price of the remaining run. None if the pool has no price."""
    plan: str = ""
    step_s: float = math.nan

    @property
    def width(self) -> float:
        """Half-width of the 90 % range of the run time, as a natural logarithm."""
        return math.log(self.upper_s / self.lower_s) / 2 if self.lower_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A waiting or running job to be planned. Times are in seconds from now."""

    name: str
    options: tuple[JobOption, ...]
    arrival_s: float = 0.0
    """Arrival time. Negative if the job has arrived already."""
    weight: float = 1.0
    owner: str = ""
    """Owner of the job. Empty if owners do not matter."""
    own_weight: float = 1.0
    """Weight of the job among the jobs of its owner. It has no effect on other jobs."""
    priority: int = 0
    """Priority. Kueue starts jobs with a higher priority first."""
    deadline_s: float | None = None
    queue: str = ""
    """Name of the queue whose quotas the job uses."""
    present: tuple[str, int] | None = None
    """Pool and GPU count that the job runs on, was last advised, or would use without advice. None if unknown."""
    is_advised: bool = False
    """Whether `present` comes from an earlier plan. Then it does not tell where the job would run without advice."""
    is_running: bool = False
    """Whether the job runs on `present`. Its options then describe the remaining run."""
    move_s: float | None = None
    """Run time that moving the running job costs, in seconds. None if its owner does not allow moves."""


LEAST_LEFT = 0.02
"""Least share of a running job's run time that is forecast to remain, because forecasts err."""


def mark_as_running(job: QueuedJob, ran_s: float) -> QueuedJob:
    """Return a job as running. The run times and costs of its options are reduced to the remaining run.

    On the present pool, the remaining run is that of a run which has lasted for `ran_s` seconds and has not ended: the
    longer a job runs past its forecast, the less is known of its end. Other options keep the same share of their runs.

    Args:
        job: the job, with options for the whole run. `present` is the pool and GPU count that it runs on.
        ran_s: seconds for which it has run.

    Raises:
        SpecError: the job has no option for the present pool and GPU count.
    """
    here = next((item for item in job.options if (item.pool, item.gpus) == job.present), None)
    if here is None:
        where = f"{job.present[1]} GPUs of {job.present[0]}" if job.present else "nowhere"
        raise SpecError("status", f"it runs on {where}, where no forecast of it is", "see `tilecast advise`")
    ran_s = max(ran_s, 0.0)
    lower_s, seconds, upper_s = (_remaining_s(here, ran_s, share) for share in (0.05, 0.5, 0.95))
    rest = replace(_scale_option(here, seconds / here.seconds), lower_s=lower_s, seconds=seconds, upper_s=upper_s)
    left = seconds / (seconds + ran_s)
    options = tuple(rest if item is here else _scale_option(item, left) for item in job.options)
    return replace(job, options=options, is_running=True)


def _remaining_s(option: JobOption, ran_s: float, share: float) -> float:
    """Return a quantile of the remaining run time of a job that has run for `ran_s` seconds and has not ended.

    The logarithm of the whole run time has a normal distribution above its forecast and another one below it, so that
    the option's range holds 90 % of all runs. Without a range, the forecast is taken to be right.
    """
    least_s = LEAST_LEFT * option.seconds
    if not 0 < option.lower_s < option.seconds < option.upper_s:
        return max(option.seconds - ran_s, least_s)
    normal = NormalDist()
    above, below = (
        math.log(ratio) / normal.inv_cdf(0.95)
        for ratio in (option.upper_s / option.seconds, option.seconds / option.lower_s)
    )
    ran = math.log(ran_s / option.seconds) if ran_s > 0 else -math.inf
    # Not by the share of runs that have ended, which floats cannot tell from 1 far past the forecast.
    longer = normal.cdf(-ran / (above if ran > 0 else below)) * (1 - share)
    deviation = -normal.inv_cdf(longer) if longer > 0 else 0.0
    whole_s = option.seconds * math.exp(deviation * (above if deviation > 0 else below))
    return max(whole_s - ran_s, least_s * 2 * share)


def _scale_option(option: JobOption, remaining_fraction: float) -> JobOption:
    return replace(
        option,
        seconds=option.seconds * remaining_fraction,
        lower_s=option.lower_s * remaining_fraction,
        upper_s=option.upper_s * remaining_fraction,
        cost=None if option.cost is None else option.cost * remaining_fraction,
    )


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Nodes of a pool, GPUs used by jobs outside the plan, and quotas of queues."""

    name: str
    nodes: int
    gpus_per_node: int
    held_gpus: int = 0
    """GPUs held by others for an unknown time."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Most GPUs that each queue may use at once. A queue without an entry has no limit."""
    price_per_gpu_hour: float | None = None
    currency: str = "USD"

    @property
    def gpus(self) -> int:
        """GPUs of the pool that planned jobs can use."""
        return max(self.nodes * self.gpus_per_node - self.held_gpus, 0)

    @property
    def free(self) -> list[int]:
        """GPUs of each node that planned jobs can use. GPUs held by others are assumed to fill whole nodes first."""
        held = [
            min(max(self.held_gpus - index * self.gpus_per_node, 0), self.gpus_per_node) for index in range(self.nodes)
        ]
        return [self.gpus_per_node - taken for taken in held]

    def can_hold(self, gpus: int) -> bool:
        """Return whether a job of `gpus` GPUs fits into the empty pool, on one node or on whole nodes."""
        if gpus <= self.gpus_per_node:
            return gpus <= max(self.free, default=0)
        return gpus % self.gpus_per_node == 0 and gpus // self.gpus_per_node <= self.free.count(self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class UnplannedJob:
    """A job that cannot be planned as requested, with the problem and a remedy."""

    job: str
    problem: str
    remedy: str
    is_left_out: bool = True
    """Whether the plan leaves the job out. Otherwise the job is planned without the impossible part of its request."""


@dataclass(frozen=True, slots=True)
class QueueProblem:
    """Jobs to plan and pools to plan them on."""

    jobs: tuple[QueuedJob, ...]
    pools: tuple[PoolCapacity, ...]
    horizon_s: float | None = None
    """Seconds from now in which jobs without a deadline are due, for policies that minimize cost."""

    def pool(self, name: str) -> PoolCapacity:
        """Return the pool with the given name. Raise StopIteration for an unknown name."""
        return next(pool for pool in self.pools if pool.name == name)


def check_problem(problem: QueueProblem) -> tuple[QueueProblem, tuple[UnplannedJob, ...]]:
    """Return the problem without impossible options and jobs, and the jobs that cannot be planned as requested.

    The jobs of the returned problem are in the order in which Kueue starts them.

    Raises:
        SpecError: a name of a job or pool is not unique, or a pool or quota has an invalid number.
    """
    _require_unique_names("pools", [pool.name for pool in problem.pools])
    _require_unique_names("jobs", [job.name for job in problem.jobs])
    for pool in problem.pools:
        _check_pool(pool)
    problem = replace(problem, pools=_make_room_for_running_jobs(problem))
    by_name = {pool.name: pool for pool in problem.pools}
    remaining, refused = list[QueuedJob](), list[UnplannedJob]()
    # Equal jobs often share their options, which are checked once.
    undominated_options = dict[tuple[object, ...], tuple[JobOption, ...]]()
    for job in problem.jobs:
        key = id(job.options), job.queue, job.present, job.is_running
        if key not in undominated_options:
            kept = keep_pareto_options(
                job, [item for item in job.options if not _explain_impossible_option(job, item, by_name)]
            )
            undominated_options[key] = job.options if kept == job.options else kept
        options = undominated_options[key]
        if not options:
            refused.append(_build_refusal(job, by_name))
            continue
        feasible = job if options is job.options else replace(job, options=options)
        if job.deadline_s is not None and job.deadline_s <= 0:
            remedy = "give it a later one; it is planned as if it had none"
            refused.append(UnplannedJob(job.name, "its deadline is past", remedy, is_left_out=False))
            feasible = replace(feasible, deadline_s=None)
        remaining.append(feasible)
    feasible_problem = replace(problem, jobs=tuple(remaining))
    return sort_jobs(feasible_problem, [job.arrival_s for job in remaining]), tuple(refused)


def _make_room_for_running_jobs(problem: QueueProblem) -> tuple[PoolCapacity, ...]:
    """Return the pools with room for the jobs that run on them, whatever is said of their nodes and of other jobs.

    A count of nodes or of GPUs held by others may be older than the start of a job.
    """
    running: dict[str, list[tuple[int, str]]] = {}
    for job in problem.jobs:
        if job.is_running and job.present is not None:
            pool_name, gpus = job.present
            running.setdefault(pool_name, []).append((gpus, job.queue))
    pools = []
    for pool in problem.pools:
        each, used, by_queue = pool.gpus_per_node, 0, Counter[str]()
        for gpus, queue in running.get(pool.name, ()):
            used += gpus if gpus <= each else -(-gpus // each) * each
            by_queue[queue] += gpus
        nodes = max(pool.nodes, -(-used // each))
        held_gpus = min(pool.held_gpus, nodes * each - used)
        quotas = {queue: max(quota, by_queue[queue]) for queue, quota in pool.quotas.items()}
        pools.append(replace(pool, nodes=nodes, held_gpus=held_gpus, quotas=quotas) if used else pool)
    return tuple(pools)


def sort_jobs(problem: QueueProblem, keys: Sequence[float]) -> QueueProblem:
    """Return the problem with its jobs sorted: running jobs first, then by priority, then by `keys`, one per job."""
    jobs = problem.jobs
    order = sorted(range(len(jobs)), key=lambda row: (not jobs[row].is_running, -jobs[row].priority, keys[row]))
    return replace(problem, jobs=tuple(jobs[row] for row in order))


def _require_unique_names(field_: str, names: Sequence[str]) -> None:
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


def _explain_impossible_option(job: QueuedJob, option: JobOption, pools: Mapping[str, PoolCapacity]) -> str:
    """Return the reason why an option of a job is impossible. If the option is possible, return ""."""
    pool = pools.get(option.pool)
    if pool is None:
        return f"there is no pool {option.pool}"
    if not (0 < option.seconds < math.inf):
        return f"{option.pool}: the forecast of {option.seconds:g} s is no time"
    if job.is_running and job.present == (option.pool, option.gpus):
        return ""
    if not pool.gpus:
        return f"{pool.name} has no GPU free of others"
    if not pool.can_hold(option.gpus):
        return f"{pool.name} has no place for {option.gpus} GPUs at once ({pool.nodes} nodes of {pool.gpus_per_node})"
    quota = pool.quotas.get(job.queue)
    if quota is not None and quota < option.gpus:
        return f"queue {job.queue} may have {quota} GPUs of {pool.name}, it takes {option.gpus}"
    return ""


def _build_refusal(job: QueuedJob, pools: Mapping[str, PoolCapacity]) -> UnplannedJob:
    """Return the refusal of a job that has no possible option. It names up to three reasons against its options."""
    reasons = list(dict.fromkeys(_explain_impossible_option(job, option, pools) for option in job.options))
    if not reasons:
        return UnplannedJob(job.name, "no pool can run it", "see `tilecast advise` for what would help")
    return UnplannedJob(job.name, "; ".join(reasons[:3]), "give it fewer GPUs, another pool, or more quota")


def keep_pareto_options(job: QueuedJob, options: Sequence[JobOption]) -> tuple[JobOption, ...]:
    """Return the options of each pool on the Pareto front of GPUs, time and cost. Always keep the present option."""
    remaining = list[JobOption]()
    for option in sorted(options, key=lambda item: (item.pool, item.gpus, item.seconds, item.cost or 0.0)):
        beaten = any(
            one.pool == option.pool and one.seconds <= option.seconds and (one.cost or 0.0) <= (option.cost or 0.0)
            for one in remaining
        )
        if not beaten or job.present == (option.pool, option.gpus):
            remaining.append(option)
    return tuple(remaining)
