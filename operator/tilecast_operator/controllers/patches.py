"""What mode Initial changes on a job: pure functions from objects to JSON patches.

A job is placed and let go in two writes. Each names the resource version that it was computed from, so that an edit
in between is never overwritten: the API server answers 409, and the patch is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tilecast.api.fields import Document, FieldChange, Path, value_at
from tilecast.jobs import (
    ADMISSION_GATES,
    ADVISOR,
    APPLIED,
    CHOSEN_LABELS,
    NEXT_QUEUE,
    QUEUE,
    Job,
    Placement,
    Pods,
    selector,
    tolerated,
)

Operation: TypeAlias = dict[str, Any]

NODE_SELECTOR = "nodeSelector"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PLACED = "Placed"
"""Value of the annotation `tilecast.dev/applied` on a job that runs where the advice says; but for the next, any other
is the reason why it does not."""
QUEUED = "Queued"
"""The same where the node choice is written and Kueue has yet to admit the job."""
FAILED_TO_START = "FailedToStart"
CHANGED_SINCE = "ChangedSince"
"""Why a job that was placed does not run as advised."""
REQUEUED = "Requeued"
"""Value of the annotation on a job that was placed, could not start, and may run on any flavor of its ranking."""


def placing(document: Document, changes: Sequence[FieldChange], chosen: Sequence[str] = ()) -> list[Operation]:
    """The patch that makes the changes; empty where there are none.

    Args:
        document: the job as it is now.
        changes: of its fields.
        chosen: node labels that are to be known as part of the choice.
    """
    if not changes:
        return []
    marks = [_set(("metadata", "annotations", CHOSEN_LABELS), ",".join(chosen))] if chosen else []
    return [_unchanged(document), *(_set(change.path, change.value) for change in changes), *marks]


def unplacing(document: Document, changes: Sequence[FieldChange]) -> list[Operation]:
    """Return the patch that makes the changes by which a node choice is taken out of a job, and says so."""
    annotations = ("metadata", "annotations")
    operations = [*(_set(change.path, change.value) for change in changes), _set((*annotations, APPLIED), REQUEUED)]
    if value_at(document, (*annotations, CHOSEN_LABELS)) is not None:
        operations.append(_remove((*annotations, CHOSEN_LABELS)))
    return [_unchanged(document), *operations]


def widening(workload: Document, job: Job, flavors: Sequence[Mapping[str, str]]) -> list[Operation]:
    """Return the patch that lets Kueue admit a Workload to some flavors alone; empty where it is so.

    Args:
        workload: what Kueue made of the job.
        job: without a node choice.
        flavors: the node labels of each; none is any.
    """
    operations = list[Operation]()
    for path, spec, pods in _pod_sets(workload, job):
        fields: dict[str, Any] = {NODE_SELECTOR: dict(pods.node_selector)}
        if flavors:
            given = spec.get("affinity") or {}
            required = {"nodeSelectorTerms": _terms(pods.affinity, flavors)}
            on_nodes = {**(given.get("nodeAffinity") or {}), REQUIRED: required}
            fields["affinity"] = {**given, "nodeAffinity": on_nodes}
        operations += [
            _set((*path, key), value) for key, value in fields.items() if (spec.get(key) or type(value)()) != value
        ]
    return [_unchanged(workload), *operations] if operations else []


def _terms(given: Sequence[Document], flavors: Sequence[Mapping[str, str]]) -> list[Document]:
    """Terms of a node affinity of which one holds on nodes where one of those given does, of one of the flavors."""
    return [
        {
            **term,
            "matchExpressions": [
                *(term.get("matchExpressions") or ()),
                *({"key": key, "operator": "In", "values": [value]} for key, value in sorted(flavor.items())),
            ],
        }
        for term in (given or ({},))
        for flavor in flavors
    ]


def releasing(document: Document, job: Job, outcome: str) -> list[Operation]:
    """The patch that lets a held job go: our name off its gates, the job into the queue that it names for us, or its
    suspension off if its author put it there for us; nothing that anybody else holds. Empty where we hold nothing.

    Args:
        document: the job as it is now.
        job: what was read of it.
        outcome: `PLACED`, or why not.
    """
    if not job.is_held:
        return []
    annotations = ("metadata", "annotations")
    operations = [_unchanged(document), _set((*annotations, APPLIED), outcome)]
    if job.is_gated:
        left = ",".join(name for name in job.gates if name != ADVISOR)
        operations.append(
            _set((*annotations, ADMISSION_GATES), left) if left else _remove((*annotations, ADMISSION_GATES))
        )
    if job.is_parked:
        operations += [_set(("metadata", "labels", QUEUE), job.next_queue), _remove((*annotations, NEXT_QUEUE))]
    if job.is_suspended_for_us:
        operations.append(_set(job.kind.suspend, False))
    return operations


def admitting(workload: Document, job: Job, placement: Placement) -> list[Operation]:
    """The patch that makes a Kueue Workload ask for the same nodes as its job; empty where it does. Kueue compares only
    counts and requests of the two, so that a selector written on the job does not reach the Workload by itself."""
    operations = list[Operation]()
    for path, spec, pods in _pod_sets(workload, job):
        fields: dict[str, Any] = {NODE_SELECTOR: selector(pods, placement.node_selector)}
        fields["tolerations"] = tolerated(pods, placement.tolerations)
        operations += [
            _set((*path, key), value) for key, value in fields.items() if (spec.get(key) or type(value)()) != value
        ]
    return [_unchanged(workload), *operations] if operations else []


def _pod_sets(workload: Document, job: Job) -> Iterator[tuple[Path, Document, Pods]]:
    """The pod specs of a Workload that are of a job's pods with GPUs: where each is, what it says, and the pods."""
    named = {_pod_set(pods.name): pods for pods in job.workers}
    for index, pod_set in enumerate((workload.get("spec") or {}).get("podSets") or ()):
        if (pods := named.get(str(pod_set.get("name")))) is not None:
            path: Path = ("spec", "podSets", index, "template", "spec")
            yield path, (pod_set.get("template") or {}).get("spec") or {}, pods


def is_reserved(workload: Document) -> bool:
    """Whether Kueue has decided about the Workload, so that it can no longer change."""
    return _holds(workload, "QuotaReserved") is not None or _holds(workload, "Finished") is not None


def verdict(job: Job, workloads: Sequence[Document], chosen: Mapping[str, str]) -> tuple[str, str] | None:
    """What became of a job that was placed and let go to Kueue, and what Kueue says of it; None while it waits.

    Args:
        job: as it is now.
        workloads: what Kueue made of it.
        chosen: the node selector that was written into it.
    """
    if not job.has_started:
        ended = next((end for item in workloads if (end := _holds(item, "Finished")) is not None), None)
        return None if ended is None else (FAILED_TO_START, str(ended.get("message", ""))[:200])
    if not any(_holds(item, "Admitted") is not None for item in workloads) and not (job.is_finished and not workloads):
        return None
    is_there = all(chosen.items() <= pods.node_selector.items() for pods in job.workers)
    return (PLACED if is_there else CHANGED_SINCE), ""


def _holds(workload: Document, kind: str) -> Document | None:
    """The condition of that type, where it is true."""
    conditions: Sequence[Document] = (workload.get("status") or {}).get("conditions") or ()
    return next((item for item in conditions if item.get("type") == kind and item.get("status") == "True"), None)


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
