"""JSON patches that place and release a job in mode Initial: pure functions of objects.

Each patch names the resource version that it was computed from, so that the API server answers 409 if the object has
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tilecast import jobs
from tilecast.api.fields import Document, FieldChange, Path, value_at_path
from tilecast.jobs import Job, Placement, Pods

Operation: TypeAlias = dict[str, Any]

NODE_SELECTOR = "nodeSelector"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PLACED = "Placed"
"""Value of the annotation `tilecast.dev/applied` on a job that runs where the advice says. Any other value except
`QUEUED` is the reason why the job does not."""
QUEUED = "Queued"
"""Value of the annotation on a job whose node choice is written, while Kueue has yet to admit the job."""
FAILED_TO_START = "FailedToStart"
"""Value of the annotation on a placed job that Kueue gave up before it started."""
CHANGED_SINCE = "ChangedSince"
"""Value of the annotation on a placed job that started without the node choice that was written."""
REQUEUED = "Requeued"
"""Value of the annotation on a job that was placed, could not start, and may run on any flavor of its ranking."""


def make_placing_patch(
    document: Document, changes: Sequence[FieldChange], chosen: Sequence[str] = ()
) -> list[Operation]:
    """Return the JSON patch that writes a node choice into a job; empty without changes.

    Args:
        document: The job.
        changes: Changes of fields of the job.
        chosen: Node labels that are recorded as part of the choice.
    """
    if not changes:
        return []
    marks = [_annotation_operation(jobs.CHOSEN_LABELS, ",".join(chosen))] if chosen else []
    return [_require_version(document), *(_set_operation(change.path, change.value) for change in changes), *marks]


def make_unplacing_patch(document: Document, changes: Sequence[FieldChange]) -> list[Operation]:
    """Return the JSON patch that removes a node choice from a job and marks the job as requeued.

    `changes` are the changes of fields that remove the choice.
    """
    operations = [_set_operation(change.path, change.value) for change in changes] + [
        _annotation_operation(jobs.APPLIED, REQUEUED)
    ]
    if value_at_path(document, ("metadata", "annotations", jobs.CHOSEN_LABELS)) is not None:
        operations.append(_annotation_operation(jobs.CHOSEN_LABELS, None))
    return [_require_version(document), *operations]


def make_widening_patch(workload: Document, job: Job, flavors: Sequence[Mapping[str, str]]) -> list[Operation]:
    """Return the JSON patch that limits a Workload to some flavors; empty if nothing changes.

    Args:
        workload: The Workload that Kueue made of the job.
        job: The job without a node choice.
        flavors: Node labels of each flavor; an empty sequence allows any flavor.
    """

    def make_fields(spec: Document, pods: Pods) -> dict[str, Any]:
        selected = {NODE_SELECTOR: dict(pods.node_selector)}
        if not flavors:
            return selected
        given = spec.get("affinity") or {}
        required = {"nodeSelectorTerms": _combine_terms(pods.affinity, flavors)}
        on_nodes = {**(given.get("nodeAffinity") or {}), REQUIRED: required}
        return {**selected, "affinity": {**given, "nodeAffinity": on_nodes}}

    return _make_pod_set_patch(workload, job, make_fields)


def _combine_terms(given: Sequence[Document], flavors: Sequence[Mapping[str, str]]) -> list[Document]:
    """Return node affinity terms that match a node if a given term matches and the node has a flavor's labels."""
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
    """Return the JSON patch that releases a held job; empty if the job is not held.

    The patch removes our name from the job's gates, moves the job from the held queue into the next one, or ends a
    suspension for us.

    Args:
        document: The job as an object.
        job: The job that was read from `document`.
        outcome: `PLACED` or `QUEUED`, or the reason why the job is not placed.
    """
    if not job.is_held:
        return []
    operations = [_require_version(document), _annotation_operation(jobs.APPLIED, outcome)]
    if job.is_gated:
        left = ",".join(name for name in job.gates if name != jobs.ADVISOR)
        operations.append(_annotation_operation(jobs.ADMISSION_GATES, left or None))
    if job.is_parked:
        queue = _set_operation(("metadata", "labels", jobs.QUEUE), job.next_queue)
        operations += [queue, _annotation_operation(jobs.NEXT_QUEUE, None)]
    if job.is_suspended_for_advice:
        operations.append(_set_operation(job.kind.suspend, False))
    return operations


def make_workload_patch(workload: Document, job: Job, placement: Placement) -> list[Operation]:
    """Return the JSON patch that writes the node choice of a job into its Kueue Workload; empty if it is there."""
    # Kueue compares only counts and requests of both, so a selector on the job does not reach the Workload by itself.

    def make_fields(_: Document, pods: Pods) -> dict[str, Any]:
        tolerations = jobs.add_tolerations(pods, placement.tolerations)
        return {NODE_SELECTOR: jobs.choose_selector(pods, placement.node_selector), "tolerations": tolerations}

    return _make_pod_set_patch(workload, job, make_fields)


def _make_pod_set_patch(
    workload: Document, job: Job, make_fields: Callable[[Document, Pods], dict[str, Any]]
) -> list[Operation]:
    """Return the JSON patch that sets fields of all pod sets with the job's pods with GPUs; empty if they are set.

    `make_fields` returns the fields for the present pod spec of a pod set and the pods of the job.
    """
    named, operations = {_pod_set_name(pods.name): pods for pods in job.workers}, list[Operation]()
    for index, pod_set in enumerate((workload.get("spec") or {}).get("podSets") or ()):
        if (pods := named.get(str(pod_set.get("name")))) is None:
            continue
        path, spec = ("spec", "podSets", index, "template", "spec"), (pod_set.get("template") or {}).get("spec") or {}
        fields = make_fields(spec, pods)
        changed = {key: value for key, value in fields.items() if (spec.get(key) or type(value)()) != value}
        operations += [_set_operation((*path, key), value) for key, value in changed.items()]
    return [_require_version(workload), *operations] if operations else []


def is_reserved(workload: Document) -> bool:
    """Return whether Kueue has reserved quota for a Workload, or the Workload has finished."""
    return any(_true_condition(workload, kind) is not None for kind in ("QuotaReserved", "Finished"))


def find_kueue_outcome(job: Job, workloads: Sequence[Document], chosen: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the outcome of a placed job in Kueue and the message of Kueue; None while the job waits.

    Args:
        job: The placed job.
        workloads: The Workloads that Kueue made of the job.
        chosen: The node selector that was written into the job.
    """
    if not job.has_started:
        ended = next((end for item in workloads if (end := _true_condition(item, "Finished")) is not None), None)
        return None if ended is None else (FAILED_TO_START, str(ended.get("message", ""))[:200])
    is_admitted = any(_true_condition(item, "Admitted") is not None for item in workloads)
    if not is_admitted and (workloads or not job.is_finished):
        return None
    is_there = all(chosen.items() <= pods.node_selector.items() for pods in job.workers)
    return (PLACED if is_there else CHANGED_SINCE), ""


def _true_condition(workload: Document, kind: str) -> Document | None:
    """Return the condition of type `kind` if its status is True, otherwise None."""
    conditions: Sequence[Document] = (workload.get("status") or {}).get("conditions") or ()
    return next((item for item in conditions if item.get("type") == kind and item.get("status") == "True"), None)


def _pod_set_name(name: str) -> str:
    """Return the name of Kueue's pod set for the pods called `name`."""
    return name.lower() or "main"


def _require_version(document: Document) -> Operation:
    """Return the operation that makes a patch fail with 409 if the object has changed."""
    return _set_operation(("metadata", "resourceVersion"), document["metadata"]["resourceVersion"])


def _set_operation(path: Path, value: Any) -> Operation:
    """Return the operation that adds or replaces a value."""
    return {"op": "add", "path": _json_pointer(path), "value": value}


def _annotation_operation(name: str, text: str | None) -> Operation:
    """Return the operation that sets an annotation; None removes the annotation."""
    path = ("metadata", "annotations", name)
    return {"op": "remove", "path": _json_pointer(path)} if text is None else _set_operation(path, text)


def _json_pointer(path: Path) -> str:
    """Return a path as a JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
