"""Make the status of a GPUPool: nodes, free GPUs, the source of every property, or the error in its spec."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tilecast import nodes
from tilecast.api.calibration import PoolCalibration, PoolError
from tilecast.api.gpu_pool import Fact, GPUPoolStatus, PoolGpus, PoolSummary, TopologyLevel
from tilecast.api.status import Condition
from tilecast.nodes import FoundPool
from tilecast.spec import SpecError
from tilecast_operator.free_gpus import FreeGpus
from tilecast_operator.kube.times import format_time, parse_time
from tilecast_operator.objects.view import View
from tilecast_operator.report.job_status import ConditionContent, make_condition


def make_pool_status(
    entry: FoundPool | SpecError,
    generation: int,
    now: str,
    current: Iterable[Condition],
    free: FreeGpus | None = None,
    learnt: tuple[PoolCalibration | None, PoolError | None] = (None, None),
    superseded: int = 0,
) -> GPUPoolStatus:
    """Return the status of a GPUPool. A condition whose status is unchanged keeps its transition time.

    Args:
        entry: The pool, or the error in its spec.
        generation: Generation of the spec that was read.
        now: Time for conditions whose status changes (RFC 3339).
        current: The current conditions.
        free: The free GPUs, or None if unknown.
        learnt: Calibration and errors from the pool's runs.
        superseded: Number of the pool's runs that newer runs contradict.
    """
    before, (calibration, error) = list(current), learnt
    aspects = _make_aspects(entry, free) | ({} if calibration is None else {"Drifted": _make_drift_aspect(superseded)})
    head = {
        "observed_generation": generation,
        "conditions": [make_condition(kind, aspect, generation, now, before) for kind, aspect in aspects.items()],
        "calibration": calibration,
        "error": error,
    }
    why = aspects["Ready"].reason
    if isinstance(entry, SpecError):
        return GPUPoolStatus.from_truncated_values(**head, summary=PoolSummary(reason=why))
    return GPUPoolStatus.from_truncated_values(
        **head,
        nodes=entry.nodes,
        gpus=PoolGpus.from_truncated_values(
            total=entry.gpus_total, allocatable=entry.gpus_allocatable, free=None if free is None else free.gpus
        ),
        facts={
            name: Fact.from_truncated_values(value=value, layer=layer) for name, (value, layer) in entry.facts.items()
        },
        kueue_flavor=(free.flavor if free is not None else entry.kueue_flavor) or None,
        topology=[
            TopologyLevel.from_truncated_values(key=level.key, domains=level.domains, largest=level.largest)
            for level in entry.topology
        ],
        summary=_make_summary(entry, why, free),
    )


def _make_summary(entry: FoundPool, problem: str, free: FreeGpus | None) -> PoolSummary:
    pool, price = entry.pool, entry.pool.price_per_gpu_hour
    return PoolSummary.from_truncated_values(
        gpu=pool.gpu.name,
        shape=f"{entry.nodes}x{pool.gpus_per_node}",
        link=pool.inter.name,
        origin="User" if entry.note is None else "Discovered",
        reason=problem,
        price=None if price is None else f"{price:.4g} {pool.currency}",
        free=None if free is None else f"{free.gpus}/{entry.gpus_total}",
    )


def _make_aspects(entry: FoundPool | SpecError, free: FreeGpus | None) -> dict[str, ConditionContent]:
    """Return status, reason and message of each condition of a pool, by type of condition."""
    if isinstance(entry, SpecError):
        uncounted = "the pool's nodes are not counted"
        return {
            "Ready": ConditionContent("False", "InvalidSpec", str(entry)),
            "ScaledDown": ConditionContent("Unknown", "InvalidSpec", uncounted),
            "CapacityKnown": ConditionContent("False", "InvalidSpec", uncounted),
        }
    if entry.nodes == 0:
        ready = ConditionContent("True", "NoNodesNow", "no node of the pool exists now; it is priced as spec says")
    else:
        counted = f"{entry.nodes} nodes with {entry.gpus_total} GPUs"
        ready = ConditionContent("True", "NodesFound", "; ".join((counted, *entry.remarks)))
    if entry.nodes < entry.pool.max_nodes:
        scaled = ConditionContent("True", "FewerNodes", f"{entry.nodes} of at most {entry.pool.max_nodes} nodes exist")
    else:
        scaled = ConditionContent("False", "AllNodes", "every node that the pool can have exists")
    if free is None:
        text = "install Kueue, or the chart with capacity.readPods, to see what is free"
        known = ConditionContent("False", "NotObserved", text)
    else:
        known = ConditionContent("True", free.source, f"what is free is read from {free.source}")
    return {"Ready": ready, "ScaledDown": scaled, "CapacityKnown": known}


def _make_drift_aspect(superseded: int) -> ConditionContent:
    """Return the content of the condition Drifted for a pool with runs."""
    if superseded:
        text = f"the newest runs contradict {superseded} older ones, which no longer count; what changed on the nodes?"
        return ConditionContent("True", "ErrorsChanged", text)
    return ConditionContent("False", "ErrorsSteady", "the newest runs agree with the older ones")


@dataclass(frozen=True, slots=True)
class PoolInputs:
    """Input of `decide_pool`: a pool and everything else that its object depends on, except the time."""

    found: FoundPool | SpecError | None
    """Pool with its nodes, or the error in its spec. None if the pool is unknown."""
    view: View | None = None
    """The object as it was seen, or None."""
    is_obsolete: bool = False
    """Whether the pool was discovered, and its nodes are deleted or in another pool now."""
    is_discovering: bool = True
    """Whether objects of discovered pools are created, changed and deleted."""
    free: FreeGpus | None = None
    """Free GPUs. None if unknown."""
    learnt: tuple[PoolCalibration | None, PoolError | None] = (None, None)
    """Calibration and errors from the pool's runs."""
    superseded: int = 0
    """Number of the pool's runs that newer runs contradict."""


@dataclass(frozen=True, slots=True)
class DesiredPool:
    """Object and status that a pool should have."""

    is_deleted: bool = False
    """Whether the object should be deleted."""
    document: dict[str, Any] | None = None
    """Object to write. None leaves the object unchanged."""
    status: GPUPoolStatus | None = None
    """Status to write. None if there is no object yet."""
    missing_since_s: float | None = None
    """Unix time since which nodes of a discovered pool are missing, or None."""


def decide_pool(inputs: PoolInputs, now_s: float) -> DesiredPool:
    """Return the object and status that a GPUPool should have at `now_s`, a Unix time.

    An object that a user wrote or edited is not changed.
    """
    found, view = inputs.found, inputs.view
    if inputs.is_obsolete:
        return DesiredPool(is_deleted=inputs.is_discovering and view is not None)
    document = nodes.gpupool_document(found) if isinstance(found, FoundPool) and inputs.is_discovering else None
    if view is None or found is None:
        return DesiredPool(document=document)
    if document is not None and view.has_equal_document(document):
        document = None
    current = Condition.parse_valid_items(view.status.get("conditions"))
    learnt, superseded = inputs.learnt, inputs.superseded
    status = make_pool_status(found, view.generation, format_time(now_s), current, inputs.free, learnt, superseded)
    return DesiredPool(document=document, status=status, missing_since_s=_find_missing_since(found, status))


def _find_missing_since(found: FoundPool | SpecError, status: GPUPoolStatus) -> float | None:
    scaled_down = next(item for item in status.conditions if item.type == "ScaledDown")
    is_discovered = isinstance(found, FoundPool) and found.note is not None
    return parse_time(scaled_down.last_transition_time) if is_discovered and scaled_down.status == "True" else None
