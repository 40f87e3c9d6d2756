"""Pure function that returns the object and status that a GPUPool should have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilecast import nodes
from tilecast.api.calibration import PoolCalibration, PoolError
from tilecast.api.gpu_pool import GPUPoolStatus
from tilecast.api.status import Condition
from tilecast.nodes import FoundPool
from tilecast.spec import SpecError
from tilecast_operator.free_gpus import Free
from tilecast_operator.kube.times import seconds, stamp
from tilecast_operator.objects.view import View
from tilecast_operator.report.pools import make_pool_status


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Input of `decide_pool`: a pool and everything that its object depends on except the time."""

    found: FoundPool | SpecError | None
    """The pool with its nodes, or the error in its spec; None if nothing is known of it."""
    view: View | None = None
    """The object as it was seen; None if there is none."""
    is_obsolete: bool = False
    """Whether the pool was discovered, and its nodes are in another pool now or gone for good."""
    is_discovering: bool = True
    """Whether objects of discovered pools are created, changed and deleted."""
    free: Free | None = None
    """GPUs that nobody uses; None if unknown."""
    learnt: tuple[PoolCalibration | None, PoolError | None] = (None, None)
    """Calibration and errors from the runs on the pool."""
    superseded: int = 0
    """Number of these runs that newer ones contradict."""


@dataclass(frozen=True, slots=True)
class DesiredPool:
    """Object and status that a pool should have."""

    is_deleted: bool = False
    """Whether the object should be deleted."""
    document: dict[str, Any] | None = None
    """Object to write; None leaves the object as it is."""
    status: GPUPoolStatus | None = None
    """None if there is no object yet."""
    missing_since_s: float | None = None
    """Unix time since which nodes of a discovered pool have been missing; None if none are."""


def decide_pool(facts: PoolFacts, now_s: float) -> DesiredPool:
    """Return the object and status that a GPUPool should have at `now_s`, a Unix time.

    An object that a user wrote or edited stays as it is.
    """
    found, view = facts.found, facts.view
    if facts.is_obsolete:
        return DesiredPool(is_deleted=facts.is_discovering and view is not None)
    document = nodes.discovered(found) if isinstance(found, FoundPool) and facts.is_discovering else None
    if view is None or found is None:
        return DesiredPool(document=document)
    if document is not None and view.matches_question(document):
        document = None
    current = Condition.known(view.status.get("conditions"))
    status = make_pool_status(
        found, view.generation, stamp(now_s), current, facts.free, facts.learnt, facts.superseded
    )  # fmt: skip
    return DesiredPool(document=document, status=status, missing_since_s=_find_missing_since(found, status))


def _find_missing_since(found: FoundPool | SpecError, status: GPUPoolStatus) -> float | None:
    scaled_down = next(item for item in status.conditions if item.type == "ScaledDown")
    is_discovered = isinstance(found, FoundPool) and found.note is not None
    return seconds(scaled_down.last_transition_time) if is_discovered and scaled_down.status == "True" else None
