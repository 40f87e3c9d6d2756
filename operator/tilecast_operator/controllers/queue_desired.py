"""Pure functions that plan the queue, and return the spec and status that the QueueAdvice should have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilecast.api.queue_advice import QueueAdviceSpec, QueueAdviceStatus
from tilecast.api.status import QueuePosition
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.times import stamp
from tilecast_operator.objects.view import View, encode_canonical
from tilecast_operator.queue_rows import PlannedQueue, QueueState, make_plan_name, parse_plan_name, plan_rows
from tilecast_operator.report import queue_advice as report


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """Input of `plan_queue`: everything that a plan depends on except the time."""

    state: QueueState
    policy: str
    """Key of `POLICIES`."""
    before: Mapping[Key, QueuePosition]
    """Position of each job in the previous plan."""


def plan_queue(facts: QueueFacts, now_s: float) -> tuple[PlannedQueue, dict[Key, QueuePosition]]:
    """Plan the queue at `now_s`, a Unix time; return the plan and the position of each job.

    This takes seconds for thousands of jobs.
    """
    rows, before = facts.state.rows, {make_plan_name(key): position for key, position in facts.before.items()}
    places = {name: (one.pool, one.gpus) for name, one in before.items() if one.pool and one.gpus}
    plan = plan_rows(facts.state, facts.policy, places, now_s)
    began = {row.name: row.began_s for row in rows if row.began_s is not None}
    placed = frozenset(row.name for row in rows if row.place is not None)
    positions = report.make_positions(plan, began, placed, before, now_s)
    return plan, {key: position for name, position in positions.items() if (key := parse_plan_name(name)) is not None}


@dataclass(frozen=True, slots=True)
class QueueAdviceFacts:
    """Input of `decide_queue_advice`: everything that the QueueAdvice depends on except the time."""

    plan: PlannedQueue
    policy: str
    """Key of `POLICIES`."""
    interval_s: float
    """Shortest time between two plans, in seconds."""
    view: View | None
    """The object as it was seen; None if there is none."""


@dataclass(frozen=True, slots=True)
class DesiredQueueAdvice:
    """Spec and status that the QueueAdvice should have."""

    spec: Document | None
    """Spec to write; None leaves the spec as it is."""
    status: QueueAdviceStatus | None
    """None if there is no object yet."""


def decide_queue_advice(facts: QueueAdviceFacts, now_s: float) -> DesiredQueueAdvice:
    """Return the spec and status that the QueueAdvice should have at `now_s`, a Unix time."""
    view, policy = facts.view, facts.policy
    spec = QueueAdviceSpec.within(policy=policy, interval_seconds=facts.interval_s).document()
    if view is None:
        return DesiredQueueAdvice(spec, None)
    is_same, before = (
        encode_canonical(view.document["spec"]) == encode_canonical(spec),
        report.parse_status(view.status),
    )
    status = report.make_status(facts.plan, policy, view.generation, stamp(now_s), before)
    return DesiredQueueAdvice(None if is_same else spec, status)
