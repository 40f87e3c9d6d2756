"""What mode Initial changes on a job: pure functions from objects to JSON patches.

A job is placed and let go in two writes. Each names the resource version that it was computed from, so that an edit
in between is never overwritten: the API server answers 409, and the patch is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from tilecast.api.fields import Document, FieldChange, Path
from tilecast.jobs import ADMISSION_GATES, ADVISOR, APPLIED, Job, Placement, selector, tolerated

Operation: TypeAlias = dict[str, Any]

NODE_SELECTOR = "nodeSelector"
PLACED = "Placed"
"""Value of the annotation `tilecast.dev/applied` on a job that runs where the advice says; any other is the reason why
it was let go as it was."""


def placing(document: Document, changes: Sequence[FieldChange]) -> list[Operation]:
    """The patch that makes the changes; empty where there are none."""
    if not changes:
        return []
    return [_unchanged(document), *(_set(change.path, change.value) for change in changes)]


def releasing(document: Document, job: Job, outcome: str) -> list[Operation]:
    """The patch that lets a held job go: our name off its gates, or its suspension off if its author put it there for
    us; nothing that anybody else holds. Empty where we hold nothing.

    Args:
        document: the job as it is now.
        job: what was read of it.
        outcome: `PLACED`, or why not.
    """
    if not job.is_held:
        return []
    annotations = ("metadata", "annotations")
    found = [_unchanged(document), _set((*annotations, APPLIED), outcome)]
    if job.is_gated:
        left = ",".join(name for name in job.gates if name != ADVISOR)
        found.append(_set((*annotations, ADMISSION_GATES), left) if left else _remove((*annotations, ADMISSION_GATES)))
    if job.is_suspended_for_us:
        found.append(_set(job.kind.suspend, False))
    return found


def admitting(workload: Document, job: Job, placement: Placement) -> list[Operation]:
    """The patch that makes a Kueue Workload ask for the same nodes as its job; empty where it does. Kueue compares only
    counts and requests of the two, so that a selector written on the job does not reach the Workload by itself."""
    named = {_pod_set(pods.name): pods for pods in job.workers}
    found = list[Operation]()
    for index, pod_set in enumerate((workload.get("spec") or {}).get("podSets") or ()):
        pods = named.get(str(pod_set.get("name")))
        if pods is None:
            continue
        spec = (pod_set.get("template") or {}).get("spec") or {}
        path: Path = ("spec", "podSets", index, "template", "spec")
        fields: dict[str, Any] = {NODE_SELECTOR: selector(pods, placement.node_selector)}
        fields["tolerations"] = tolerated(pods, placement.tolerations)
        found += [
            _set((*path, key), value) for key, value in fields.items() if (spec.get(key) or type(value)()) != value
        ]
    return [_unchanged(workload), *found] if found else []


def is_reserved(workload: Document) -> bool:
    """Whether Kueue has decided about the Workload, so that it can no longer change."""
    conditions = (workload.get("status") or {}).get("conditions") or ()
    return any(
        item.get("type") in ("QuotaReserved", "Finished") and item.get("status") == "True" for item in conditions
    )


def _pod_set(name: str) -> str:
    """What Kueue calls the pods of that name."""
    return name.lower() or "main"


def _unchanged(document: Document) -> Operation:
    """Makes the API server refuse the patch with 409 if the object has changed."""
    return _set(("metadata", "resourceVersion"), document["metadata"]["resourceVersion"])


def _set(path: Path, value: Any) -> Operation:
    """`add` replaces what is there."""
    return {"op": "add", "path": _pointer(path), "value": value}


def _remove(path: Path) -> Operation:
    return {"op": "remove", "path": _pointer(path)}


def _pointer(path: Path) -> str:
    """RFC 6901."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
