"""Rows of the queue plan, and the planning problem that they give at a certain time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tilecast.jobs.kueue import Quotas
from tilecast.nodes import FoundPool
from tilecast.planner.options import build_capacity
from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, QueueProblem, UnplannedJob, mark_as_running
from tilecast.planner.solver import solve
from tilecast.planner.totals import QueueReport, build_report
from tilecast.spec import SpecError
from tilecast_operator.free_gpus import FreeGpus
from tilecast_operator.kube.kinds import Key

Place: TypeAlias = tuple[str, int]
"""A pool and a number of GPUs."""
Holdings: TypeAlias = Mapping[tuple[str, str], int]
"""Number of GPUs held, by pool and ClusterQueue. The ClusterQueue is empty if pods are counted."""


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A waiting or running job in the queue plan. Times are Unix time, in seconds."""

    key: Key
    options: tuple[JobOption, ...]
    """Options for the whole run."""
    created_s: float
    weight: float = 1.0
    """Weight of the job from its namespace."""
    own_weight: float = 1.0
    """Weight of the job itself, which orders the jobs of its namespace."""
    priority: int = 0
    deadline_s: float | None = None
    """Seconds from the creation of the job."""
    queue: str = ""
    """ClusterQueue of the job."""
    quotas: tuple[tuple[str, int], ...] = ()
    """Most GPUs that the queue can use, by pool, in the order in which Kueue tries the pools."""
    requested_gpus: int = 0
    """GPUs that the pods of a waiting job request for which Kueue chooses the pool. 0 if Tilecast chooses it."""
    place: Place | None = None
    """Pool and GPUs on which the job runs or was placed. None if they are open."""
    began_s: float | None = None
    """Time at which the job started. None while it waits."""
    is_endless: bool = False
    """Whether the end of the job is unknown. It then counts as ended at the upper end of its forecast."""
    turn: tuple[float, str] | None = None
    """Creation time and UID of the job's Workload, by which Kueue sorts jobs of one priority. None if unknown."""

    @property
    def name(self) -> str:
        """Name of the job in the plan, made from kind, namespace and name."""
        return make_plan_name(self.key)


def make_plan_name(key: Key) -> str:
    """Return the name of a job in the plan, made from kind, namespace and name."""
    return f"{key.kind}/{key.namespace}/{key.name}"


def parse_plan_name(name: str) -> Key | None:
    """Return the key of the job with a name in the plan. If the name is that of a namespace, return None."""
    parts = name.split("/")
    return Key(*parts) if len(parts) == 3 else None


@dataclass(frozen=True, slots=True)
class PlannedQueue:
    """A queue plan, and the jobs that it leaves out."""

    report: QueueReport | None = None
    """The plan. None if there is no job to plan."""
    refused: tuple[UnplannedJob, ...] = ()
    problem: str = ""
    """Why there is no plan at all."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """State of the queue: all inputs of a plan except the time and the previous plan."""

    rows: Sequence[QueueRow] = ()
    refused: Sequence[UnplannedJob] = ()
    pools: Sequence[PoolCapacity] = field(default_factory=tuple)


def count_held_gpus(
    entries: Iterable[FoundPool], free: Mapping[str, FreeGpus], queues: Mapping[str, Quotas], rows: Iterable[QueueRow]
) -> dict[tuple[str, str], int]:
    """Return the number of GPUs that are held outside the planned queue, by pool and ClusterQueue.

    The result leaves out counts of 0, and pools whose number of free GPUs is unknown.

    Args:
        entries: The pools.
        free: The free GPUs of each pool.
        queues: The quotas of every ClusterQueue.
        rows: The jobs of the queue. Running jobs hold GPUs themselves.
    """
    ours = Counter[tuple[str, str]]()
    for row in rows:
        if row.began_s is not None and row.place is not None:
            ours[row.place[0], row.queue] += row.place[1]
    sizes = {item.pool.name: item.pool.max_nodes * item.pool.gpus_per_node for item in entries}
    others, of_flavor = Counter[tuple[str, str]](), dict[str, list[str]]()
    for name, size in sizes.items():
        known = free.get(name)
        if known is not None and known.flavor:
            of_flavor.setdefault(known.flavor, []).append(name)
        elif known is not None:
            own = sum(count for (pool, _), count in ours.items() if pool == name)
            others[name, ""] = size - known.gpus - own
    for flavor, names in of_flavor.items():
        total = sum(sizes[name] for name in names)
        for queue, quota in queues.items():
            held_gpus = quota.reserved.get(flavor, 0) - sum(ours[name, queue] for name in names)
            for name in names:  # if several pools share a flavor, nothing says which of them is held
                others[name, queue] = held_gpus * sizes[name] // max(total, 1)
    return dict(+others)


def make_capacities(
    entries: Iterable[FoundPool], held_gpus: Holdings, rows: Iterable[QueueRow]
) -> tuple[PoolCapacity, ...]:
    """Return the capacity of each pool, including the quota of each ClusterQueue."""
    quotas = dict[str, dict[str, int]]()
    for row in rows:
        for pool, quota in row.quotas:
            of_pool = quotas.setdefault(pool, {})
            of_pool[row.queue] = max(of_pool.get(row.queue, 0), quota)
    return tuple(
        replace(
            build_capacity(item.pool, sum(count for (pool, _), count in held_gpus.items() if pool == item.pool.name)),
            quotas={
                queue: max(quota - held_gpus.get((item.pool.name, queue), 0), 0)
                for queue, quota in sorted(quotas.get(item.pool.name, {}).items())
            },
        )
        for item in entries
    )


def plan_rows(state: QueueState, policy: str, previous_places: Mapping[str, Place], now_s: float) -> PlannedQueue:
    """Plan the queue at a given time. This takes seconds for thousands of jobs.

    Args:
        state: Jobs and pools.
        policy: Key of `POLICIES`.
        previous_places: Previous pool and GPUs of each job, by name.
        now_s: Unix time, in seconds.
    """
    jobs, refused = list[QueuedJob](), list(state.refused)
    # The planner keeps this order among jobs that arrived in the same second.
    for row in sorted(state.rows, key=lambda row: row.turn or (row.created_s, "")):
        try:
            job = _make_queued_job(row, previous_places.get(row.name), now_s)
        except SpecError as error:
            refused.append(UnplannedJob(row.name, error.problem, error.remedy))
        else:
            jobs += [] if job is None else [job]
    try:
        solution = solve(QueueProblem(tuple(jobs), tuple(state.pools)), policy)
    except SpecError as error:
        return PlannedQueue(None, tuple(refused), str(error))
    outcome = build_report(solution, has_payers=False) if solution.option else None
    return PlannedQueue(outcome, (*refused, *solution.refused))


def _make_queued_job(row: QueueRow, previous_place: Place | None, now_s: float) -> QueuedJob | None:
    """Return the job of a row at a certain time, or None if the job counts as ended."""
    waits = row.began_s is None
    is_open = waits and row.place is None
    options = row.options if is_open else tuple(item for item in row.options if (item.pool, item.gpus) == row.place)
    job = QueuedJob(
        name=row.name,
        options=options,
        arrival_s=min((row.turn[0] if row.turn else row.created_s) - now_s, 0.0),
        weight=row.weight,
        owner=row.key.namespace,
        own_weight=row.own_weight,
        priority=row.priority,
        deadline_s=None if row.deadline_s is None else row.created_s + row.deadline_s - now_s,
        queue=row.queue,
        present=previous_place if is_open else row.place,
        is_advised=is_open,
    )
    if row.began_s is None:
        return job
    ran_s = max(now_s - row.began_s, 0.0)
    if row.is_endless and options and ran_s > options[0].upper_s:
        return None
    return mark_as_running(job, ran_s)
