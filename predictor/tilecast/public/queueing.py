"""Plan a queue: assign a pool, a start and an end to each job, and compare with other numbers of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tilecast.api.documents import Document
from tilecast.hardware import Pool
from tilecast.inputs import pools as pool_inputs
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.queue import JobQueueReader, ParsedQueue, QueueDocuments
from tilecast.inputs.reading import parse_seconds
from tilecast.inputs.tracking import Track, iterate_without_progress
from tilecast.planner.entries import forecast_submitted_job
from tilecast.planner.options import build_capacity
from tilecast.planner.problem import QueueProblem, UnplannedJob
from tilecast.planner.solver import QueueSolution, solve
from tilecast.planner.totals import QueueReport, build_report
from tilecast.render.queue import EmptyQueue, NodeChange, QueueScreen
from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class QueueInputs:
    """A user's inputs to the plan of a queue: the jobs, the pools and options."""

    jobs: Sequence[Document]
    pools: PoolOptions
    policy: str = "completion"
    """A key of `tilecast.planner.policies.POLICIES`."""
    order: str = "kueue"
    """A key of `tilecast.planner.solver.ORDERS`."""
    horizon: str | None = None
    """When jobs without a deadline are due: seconds from now, or a text such as "36h"."""
    what_if: Sequence[str] = field(default_factory=tuple)
    """Nodes to add or remove in a second plan: POOL:+N or POOL:-N."""
    at: str | None = None
    """Time to use as now, in ISO 8601. If absent, the current time."""
    if_submitted: Sequence[Document] = field(default_factory=tuple)
    """Documents of one more job and of the objects it refers to. Empty if there is none."""


def plan_queue(inputs: QueueInputs, track: Track = iterate_without_progress) -> QueueScreen | EmptyQueue:
    """Return the plan of a queue. If no job can be planned, return the refused jobs with reasons.

    Args:
        inputs: the jobs, the pools and options.
        track: wraps the loops over jobs and over plans, to show their progress.

    Raises:
        SpecError: the jobs, the pools or an option cannot be read.
    """
    horizon = None if inputs.horizon is None else float(parse_seconds(inputs.horizon, "--horizon"))
    pools = pool_inputs.read_pools(inputs.pools)
    changed = _parse_node_changes(inputs.what_if, pools)
    # Price options on the larger of the old and the changed pool, so that both plans share the prices.
    widest = [replace(pool, max_nodes=max(pool.max_nodes, changed.get(pool.name, 0))) for pool in pools]
    documents, new = QueueDocuments.from_documents([*inputs.jobs, *inputs.if_submitted]), None
    if inputs.if_submitted:
        documents, new = documents.split_off_added_job(inputs.if_submitted)
    labels, devices = pool_inputs.read_node_labels(inputs.pools), pool_inputs.read_devices(inputs.pools)
    reader = JobQueueReader(documents, widest, labels, _parse_time(inputs.at), devices)
    read = reader.read(track)
    one_more = None
    if new is not None:
        quotas = {pool: dict(known) for pool, known in read.quotas.items()}
        one_more = reader.read_new_job(new, [job.name for job in read.jobs], quotas)
        read = replace(read, quotas=quotas)
    held_gpus = documents.count_held_gpus(pool_inputs.pools_by_node(inputs.pools)) if documents.pods else {}
    problem = _build_queue_problem(read, pools, horizon, held_gpus)
    orders = (inputs.order, "free" if inputs.order == "kueue" else "kueue")
    solved = list[QueueSolution]()
    for order in track(orders, "plans"):
        solved.append(solve(problem, inputs.policy, order=order))
        if not solved[0].option:
            break
    unplanned = (*read.unplanned, *solved[0].refused)
    submitted = None if one_more is None else forecast_submitted_job(solved[0], one_more)
    if not solved[0].option:
        currency = next((pool.currency for pool in problem.pools if pool.price_per_gpu_hour is not None), "USD")
        return EmptyQueue(unplanned, submitted, currency)
    solution, other = solved
    what_if = _plan_with_node_changes(problem, pools, changed, inputs, solution.columns.problem.jobs)
    return QueueScreen(build_report(solution), unplanned, what_if, build_report(other, has_payers=False), submitted)


def _parse_time(text: str | None) -> datetime:
    if text is None:
        return datetime.now(UTC)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise SpecError("--at", f"cannot read {text[:40]!r}", "write for instance 2026-11-02T08:15:04Z") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _build_queue_problem(
    read: ParsedQueue, pools: Sequence[Pool], horizon: float | None, held_gpus: Mapping[str, int]
) -> QueueProblem:  # fmt: skip
    """Return the planning problem for the jobs and the pools. GPUs held by pods outside the queue are not available.

    Args:
        read: the jobs and quotas.
        pools: the pools.
        horizon: seconds from now until jobs without a deadline are due.
        held_gpus: GPUs that pods hold, by pool. Running jobs of the queue are included.
    """
    ours = Counter[str]()
    for job in read.jobs:
        if job.is_running and job.present is not None:
            ours[job.present[0]] += job.present[1]
    others = {name: max(count - ours[name], 0) for name, count in held_gpus.items()}
    capacities = (
        replace(build_capacity(pool, others.get(pool.name, 0)), quotas=read.quotas.get(pool.name, {})) for pool in pools
    )
    return QueueProblem(read.jobs, tuple(capacities), horizon)


def _parse_node_changes(texts: Sequence[str], pools: Sequence[Pool]) -> dict[str, int]:
    """Parse the values of `--what-if`. Return the new total number of nodes for each pool that they name.

    Raises:
        SpecError: a text cannot be parsed, or removes more nodes than the pool has.
    """
    nodes, changed_nodes = {pool.name: pool.max_nodes for pool in pools}, dict[str, int]()
    for text in texts:
        name, _, change = text.rpartition(":")
        if name not in nodes:
            raise SpecError("--what-if", f"there is no pool {name[:60]!r}", f"known: {', '.join(sorted(nodes))}")
        if change[:1] not in ("+", "-") or not change[1:].isdecimal() or len(change) > 6:
            raise SpecError("--what-if", f"cannot read {text[:60]!r}", f"write for instance {name}:+2")
        changed_nodes[name] = changed_nodes.get(name, nodes[name]) + int(change)
        if changed_nodes[name] < 0:
            raise SpecError("--what-if", f"{name} has {nodes[name]} nodes", "take away no more than there are")
    return changed_nodes


def _plan_with_node_changes(
    problem: QueueProblem, pools: Sequence[Pool], changed: Mapping[str, int], inputs: QueueInputs,
    planned: Sequence[object],
) -> NodeChange | None:  # fmt: skip
    if not changed:
        return None
    other = replace(
        problem, pools=tuple(replace(pool, nodes=changed.get(pool.name, pool.nodes)) for pool in problem.pools)
    )
    solution = solve(other, inputs.policy, order=inputs.order)
    difference = {pool.name: changed[pool.name] - pool.max_nodes for pool in pools if pool.name in changed}
    outcome: QueueReport | None = build_report(solution) if solution.option else None
    lost: tuple[UnplannedJob, ...] = tuple(item for item in solution.refused if item.is_left_out)
    return NodeChange(difference, outcome, len(solution.option) - len(planned), lost)
