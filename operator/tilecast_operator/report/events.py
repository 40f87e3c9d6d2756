"""The Events of a job: one when the answer changes, none when it stays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilecast.api.base import API_VERSION, GROUP
from tilecast.render import units
from tilecast_operator.report.status import Refusal, Verdict, message, reason, short_plan

COMPONENT = f"{GROUP}/advisor"
MAX_NOTE = 1024


@dataclass(frozen=True, slots=True)
class Note:
    """What an Event says."""

    type: str
    reason: str
    text: str


def note(verdict: Verdict, before: Mapping[str, Any], summary: Mapping[str, Any]) -> Note | None:
    """The Event for a verdict; None where the answer is the one that the status showed before.

    Args:
        verdict: the advice, or why there is none.
        before: `status.summary` as it was.
        summary: `status.summary` as it will be.
    """
    if all(before.get(key) == summary.get(key) for key in ("reason", "pool", "gpus", "plan")):
        return None
    best = None if isinstance(verdict, Refusal) else verdict.best
    if best is None:
        return Note("Warning", "RecommendationUnavailable", f"{reason(verdict)}: {message(verdict)}"[:MAX_NOTE])
    was = f" (was {before['plan']} on {before.get('gpus')} {before['pool']})" if before.get("plan") else ""
    gpus = f"{best.nodes}x{best.gpus_per_node} {best.pool.name}"
    text = f"{short_plan(best)} on {gpus}, {units.duration(best.step_s)} a step{was}"
    return Note("Normal", "RecommendationUpdated", text[:MAX_NOTE])


def event(
    found: Note,
    namespace: str,
    name: str,
    uid: str,
    kind: str,
    now: str,
    instance: str,
    api_version: str = API_VERSION,
) -> dict[str, Any]:
    """A core/v1 Event. Its name is a digest of what it says, so that saying it twice creates it once. One about an
    object without a namespace is in `default`, as the kubelet's are."""
    said = "\n".join((uid, found.reason, found.text))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{name[:200].rstrip('-.')}.{hashlib.sha256(said.encode()).hexdigest()[:16]}",
            "namespace": namespace,
        },
        "involvedObject": {
            "apiVersion": api_version,
            "kind": kind,
            **({} if api_version == "v1" else {"namespace": namespace}),
            "name": name,
            "uid": uid,
        },
        "type": found.type,
        "reason": found.reason,
        "message": found.text,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance[:128],
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
