"""Read a job document of any known kind as a `Job`."""

from __future__ import annotations

from functools import partial

from tilecast.api.base import read_mapping
from tilecast.api.fields import Document, value_at_path
from tilecast.jobs.interface import Job, JobKind, Pods
from tilecast.jobs.keys import AS_SERVED
from tilecast.jobs.kinds import JOB_KINDS, find_kind
from tilecast.nodes import gpu_resource
from tilecast.spec import SpecError

_mapping = partial(read_mapping, remedy=AS_SERVED)


def read_job(document: Document, runtime: Document | None = None) -> Job:
    """Return the job that a document describes, of any kind in `JOB_KINDS`.

    Args:
        document: the job's document.
        runtime: the TrainingRuntime or ClusterTrainingRuntime that a TrainJob names; None if it is not available.

    Raises:
        SpecError: the kind of the document is unknown, or a field that is read has a wrong type.
    """
    kind = find_kind(document)
    try:
        pods = tuple(kind.pods(document, runtime))
        is_countable = bool(kind.list_resize_changes(document, sum(item.count for item in pods)))
        return _build_job(kind, document, pods, is_countable=is_countable)
    except (KeyError, TypeError, AttributeError, IndexError):
        remedy = f"write it as `kubectl explain {kind.plural}` says"
        raise SpecError("spec", f"is not that of a {kind.kind}", remedy) from None


def read_without_pods(document: Document) -> Job:
    """Return the job that a document describes, but without its pods, so that invalid pod templates raise no error.

    Only metadata, status and the field that suspends the job are read.

    Raises:
        SpecError: the document is of an unknown kind, or its metadata or status has a wrong type.
    """
    kind = find_kind(document)
    try:
        return _build_job(kind, document, (), is_countable=False)
    except (TypeError, AttributeError):
        raise SpecError("metadata", "is not that of an object", AS_SERVED) from None


def _build_job(kind: JobKind, document: Document, pods: tuple[Pods, ...], *, is_countable: bool) -> Job:
    metadata = _mapping(document, "metadata", "job")
    status = _mapping(document, "status", "job")
    is_suspended = value_at_path(document, kind.suspend) is True
    owners = metadata.get("ownerReferences") or ()
    return Job(
        kind=kind,
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        labels={str(key): str(value) for key, value in _mapping(metadata, "labels", "metadata").items()},
        annotations={str(key): str(value) for key, value in _mapping(metadata, "annotations", "metadata").items()},
        pods=pods,
        is_suspended=is_suspended,
        has_started=not is_suspended or kind.is_active(status),
        is_finished=kind.is_finished(status),
        is_owned=any(owner.get("controller") and owner.get("kind") in JOB_KINDS for owner in owners),
        is_resizable=is_countable and kind.is_resizable(document),
        is_countable=is_countable,
        created=str(metadata.get("creationTimestamp", "")),
        pod_names=kind.find_pod_names(document),
    )


def require_gpus(job: Job) -> None:
    """Raise SpecError unless the job requests GPUs.

    Raises:
        SpecError: the job requests no GPUs.
    """
    if not job.gpus:
        remedy = f"add {gpu_resource()} to {job.kind.gpu_field}"
        if job.has_claims:
            raise SpecError("spec", "the job's ResourceClaims ask for no GPU of a known DeviceClass", remedy)
        raise SpecError("spec", "the job asks for no GPU", f"{remedy}, or claim GPUs by a ResourceClaimTemplate")
