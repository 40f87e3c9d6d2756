"""Make the JSON patches that place and release a job in mode Initial, by pure functions of objects.

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
"""Value of the annotation `tilecast.dev/applied` on a job that runs where the advice says.

Any other value except `QUEUED` is the reason why the job does not.
"""
QUEUED = "Queued"
"""Value of the annotation on a job whose node selection is written but which Kueue has not admitted yet."""
FAILED_TO_START = "FailedToStart"
"""Value of the annotation on a placed job that Kueue gave up before it started."""
CHANGED_SINCE = "ChangedSince"
"""Value of the annotation on a placed job that started without the node selection that was written."""
REQUEUED = "Requeued"
"""Value of the annotation on a placed job that could not start and may now run on any ranked flavor."""


def make_placing_patch(
    document: Document, changes: Sequence[FieldChange], chosen_labels: Sequence[str] = ()
) -> list[Operation]:
    """Return the JSON patch that writes a node selection into a job. It is empty without changes.

    Args:
        document: The job.
        changes: Changes of fields of the job.
        chosen_labels: Node labels to record as part of the node selection.
    """
    if not changes:
        return []
    marks = [_make_annotation_operation(jobs.CHOSEN_LABELS, ",".join(chosen_labels))] if chosen_labels else []
    return [_require_version(document), *(_make_set_operation(change.path, change.value) for change in changes), *marks]


def make_unplacing_patch(document: Document, changes: Sequence[FieldChange]) -> list[Operation]:
    """Return the JSON patch that removes a node selection from a job and marks the job as requeued.

    `changes` are the changes of fields that remove the selection.
    """
    operations = [_make_set_operation(change.path, change.value) for change in changes] + [
        _make_annotation_operation(jobs.APPLIED, REQUEUED)
    ]
    if value_at_path(document, ("metadata", "annotations", jobs.CHOSEN_LABELS)) is not None:
        operations.append(_make_annotation_operation(jobs.CHOSEN_LABELS, None))
    return [_require_version(document), *operations]


def make_widening_patch(workload: Document, job: Job, flavors: Sequence[Mapping[str, str]]) -> list[Operation]:
    """Return the JSON patch that lets Kueue choose only among some flavors. It is empty if nothing changes.

    Args:
        workload: The Workload that Kueue created for the job.
        job: The job without a node selection.
        flavors: Node labels of each flavor. If empty, any flavor is allowed.
    """

    def make_fields(spec: Document, pods: Pods) -> dict[str, Any]:
        selected = {NODE_SELECTOR: dict(pods.node_selector)}
        if not flavors:
            return selected
        given = spec.get("affinity") or {}
        required = {"nodeSelectorTerms": _add_flavor_terms(pods.affinity, flavors)}
        on_nodes = {**(given.get("nodeAffinity") or {}), REQUIRED: required}
        return {**selected, "affinity": {**given, "nodeAffinity": on_nodes}}

    return _make_pod_set_patch(workload, job, make_fields)


def _add_flavor_terms(terms: Sequence[Document], flavors: Sequence[Mapping[str, str]]) -> list[Document]:
    """Return node affinity terms for nodes that have the labels of a flavor and match one of the present terms."""
    return [
        {
            **term,
            "matchExpressions": [
                *(term.get("matchExpressions") or ()),
                *({"key": key, "operator": "In", "values": [value]} for key, value in sorted(flavor.items())),
            ],
        }
        for term in (terms or ({},))
        for flavor in flavors
    ]


def make_release_patch(document: Document, job: Job, outcome: str) -> list[Operation]:
    """Return the JSON patch that releases a held job. It is empty if the job is not held.

    It removes Tilecast from the job's admission gates, moves the job from the holding queue into its next queue, or
    ends a suspension that waits for Tilecast.

    Args:
        document: The job as an object.
        job: The job that was read from `document`.
        outcome: `PLACED` or `QUEUED`, or the reason why the job is not placed.
    """
    if not job.is_held:
        return []
    operations = [_require_version(document), _make_annotation_operation(jobs.APPLIED, outcome)]
    if job.is_gated:
        left = ",".join(name for name in job.gates if name != jobs.ADVISOR)
        operations.append(_make_annotation_operation(jobs.ADMISSION_GATES, left or None))
    if job.is_parked:
        queue = _make_set_operation(("metadata", "labels", jobs.QUEUE), job.next_queue)
        operations += [queue, _make_annotation_operation(jobs.NEXT_QUEUE, None)]
    if job.is_suspended_for_advice:
        operations.append(_make_set_operation(job.kind.suspend, False))
    return operations


def make_annotations_patch(document: Document, annotations: Mapping[str, str | None]) -> list[Operation]:
    """Return the JSON patch that sets annotations of an object, and removes those with the value None.

    It is empty if nothing changes.
    """
    known = document["metadata"].get("annotations") or {}
    changed = {key: value for key, value in annotations.items() if known.get(key) != value}
    if not changed:
        return []
    if not known:
        return [_require_version(document), _make_set_operation(("metadata", "annotations"), changed)]
    return [_require_version(document), *(_make_annotation_operation(key, value) for key, value in changed.items())]


def make_limit_patch(document: Document, changes: Mapping[str, str | None]) -> list[Operation]:
    """Return the JSON patch that sets or removes the label and the annotation which limit a queued job's run.

    Args:
        document: The job, which has labels and annotations.
        changes: New values by key of label or annotation. A key with the value None is removed.
    """
    operations = [_require_version(document)]
    for key, value in changes.items():
        path = ("metadata", "labels" if key == jobs.RUN_LIMIT_LABEL else "annotations", key)
        removal = {"op": "remove", "path": _make_json_pointer(path)}
        operations.append(removal if value is None else _make_set_operation(path, value))
    return operations


def make_workload_patch(workload: Document, job: Job, placement: Placement) -> list[Operation]:
    """Return the JSON patch that writes a job's node selection into its Kueue Workload.

    It is empty if nothing changes.
    """
    # Kueue compares only counts and requests of both, so a selector on the job does not reach the Workload by itself.

    def make_fields(_: Document, pods: Pods) -> dict[str, Any]:
        tolerations = jobs.add_tolerations(pods, placement.tolerations)
        return {NODE_SELECTOR: jobs.merge_node_selector(pods, placement.node_selector), "tolerations": tolerations}

    return _make_pod_set_patch(workload, job, make_fields)


def _make_pod_set_patch(
    workload: Document, job: Job, make_fields: Callable[[Document, Pods], dict[str, Any]]
) -> list[Operation]:
    """Return the JSON patch that sets fields in all GPU pod sets of a Workload. It is empty if nothing changes.

    `make_fields` takes the pod spec of a pod set and the pods of the job, and returns the fields to set.
    """
    named, operations = {_make_pod_set_name(pods.name): pods for pods in job.workers}, list[Operation]()
    for index, pod_set in enumerate((workload.get("spec") or {}).get("podSets") or ()):
        if (pods := named.get(str(pod_set.get("name")))) is None:
            continue
        path, spec = ("spec", "podSets", index, "template", "spec"), (pod_set.get("template") or {}).get("spec") or {}
        fields = make_fields(spec, pods)
        changed = {key: value for key, value in fields.items() if (spec.get(key) or type(value)()) != value}
        operations += [_make_set_operation((*path, key), value) for key, value in changed.items()]
    return [_require_version(workload), *operations] if operations else []


def is_reserved(workload: Document) -> bool:
    """Return whether Kueue has reserved quota for a Workload, or the Workload has finished."""
    return any(_find_true_condition(workload, kind) is not None for kind in ("QuotaReserved", "Finished"))


def find_kueue_outcome(
    job: Job, workloads: Sequence[Document], chosen_labels: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return the outcome of a placed job in Kueue, with Kueue's message. Return None as long as the job waits.

    Args:
        job: The placed job.
        workloads: The Workloads that Kueue created for the job.
        chosen_labels: The node selector that was written into the job.
    """
    if not job.has_started:
        ended = next((end for item in workloads if (end := _find_true_condition(item, "Finished")) is not None), None)
        return None if ended is None else (FAILED_TO_START, str(ended.get("message", ""))[:200])
    is_admitted = any(_find_true_condition(item, "Admitted") is not None for item in workloads)
    if not is_admitted and (workloads or not job.is_finished):
        return None
    is_there = all(chosen_labels.items() <= pods.node_selector.items() for pods in job.workers)
    return (PLACED if is_there else CHANGED_SINCE), ""


def _find_true_condition(workload: Document, kind: str) -> Document | None:
    """Return the condition of type `kind` if its status is True, otherwise None."""
    conditions: Sequence[Document] = (workload.get("status") or {}).get("conditions") or ()
    return next((item for item in conditions if item.get("type") == kind and item.get("status") == "True"), None)


def _make_pod_set_name(name: str) -> str:
    """Return the name that Kueue gives to the pod set of the pods called `name`."""
    return name.lower() or "main"


def _require_version(document: Document) -> Operation:
    """Return the patch operation that makes the patch fail with 409 if the object has changed."""
    return _make_set_operation(("metadata", "resourceVersion"), document["metadata"]["resourceVersion"])


def _make_set_operation(path: Path, value: Any) -> Operation:
    """Return the patch operation that sets the value at a path."""
    return {"op": "add", "path": _make_json_pointer(path), "value": value}


def _make_annotation_operation(name: str, text: str | None) -> Operation:
    """Return the patch operation that sets an annotation, or removes it if `text` is None."""
    path = ("metadata", "annotations", name)
    return {"op": "remove", "path": _make_json_pointer(path)} if text is None else _make_set_operation(path, text)


def _make_json_pointer(path: Path) -> str:
    """Return a path as a JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
