"""Measure the step of a job from the log of one of its pods, within limits.

Only the beginning and the end of a long log are read, because programs print their arguments first. In most programs
rank 0 prints steps, and in Megatron-LM the last rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from tilecast.api.fields import as_mapping, list_mappings_in
from tilecast.jobs.interface import Job, JobKind
from tilecast.jobs.quantities import count_or_default, count_pod_gpus, count_requested_gpus
from tilecast.logs import TEXT_FORMATS, LoggedRun, find_logged_run, split_lines
from tilecast_operator.kube.kinds import Document
from tilecast_operator.observed.reports import LOG, StepReport, require_positive

HEAD_BYTES = 1 << 16
"""Bytes read from the beginning of a log."""
TAIL_BYTES = 1 << 17
"""Most bytes read from the end of a log."""
TAIL_LINES = 500
MAX_PODS = 500
"""Most pods of a job that are listed. In a larger job, the last pod, and whether all pods exist, are unknown."""
INDEX_LABELS = (
    "jobset.sigs.k8s.io/job-index",
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
)
"""Labels with the index of a pod, the most significant first."""
_ROLE = "training.kubeflow.org/replica-type"
_GROUP = "jobset.sigs.k8s.io/replicatedjob-name"
_LAUNCHER = "launcher"
"""Name of the pod group, in TrainJobs and JobSets with MPI, whose pod prints the output of all ranks."""
_CONTAINER = "kubectl.kubernetes.io/default-container"


@dataclass(frozen=True, slots=True)
class LoggingPod:
    """A pod whose log may contain the steps of a job."""

    name: str
    container: str
    node: str | None


@dataclass(frozen=True, slots=True)
class JobPods:
    """Pods of a job that are candidates for reading a log, and the number of the job's GPUs if it is known."""

    candidates: Sequence[LoggingPod]
    """Pod of rank 0, last pod and launcher, as far as they have started."""
    gpus: int | None
    """GPUs that the job requests. None if they are unknown, or if pods with GPUs are missing."""


def make_list_query(kind: JobKind, name: str) -> dict[str, str]:
    """Return the query that lists the pods of a job."""
    return {"labelSelector": f"{kind.pod_label}={name}", "limit": str(MAX_PODS)}


def make_log_query(container: str, *, is_tail: bool) -> dict[str, str]:
    """Return the query that reads the beginning or the end of a container's log."""
    if is_tail:
        return {"container": container, "tailLines": str(TAIL_LINES), "limitBytes": str(TAIL_BYTES)}
    return {"container": container, "limitBytes": str(HEAD_BYTES)}


def find_pods(page: Document, job: Job) -> JobPods:
    """Return the pods whose logs may be read, and the number of the job's GPUs if no pod is missing.

    A pod that has succeeded is not missing, because workers end while rank 0 still saves.

    Args:
        page: list of the pods with the job's label.
        job: the job, with its pods. Pods of another owner are left out.
    """
    pods = [item for item in list_mappings_in(page.get("items")) if _get_phase(item) != "Failed"]
    pods = sorted((item for item in pods if _is_of_job(item, job)), key=_pod_sort_key)
    is_whole = not as_mapping(page.get("metadata")).get("continue")
    running = [item for item in pods if _get_phase(item) == "Running"]
    started = [item for item in running if count_pod_gpus(item)]
    chosen = started[:1] + (started[1:][-1:] if is_whole else [])
    chosen += [item for item in running if _is_launcher(item) and not count_pod_gpus(item)][:1]
    is_complete = not is_whole or sum(map(count_pod_gpus, pods)) >= job.gpus
    return JobPods([_read_pod(item) for item in chosen], job.gpus or None if is_complete else None)


def read_run(heads: Sequence[bytes], tail: bytes) -> LoggedRun | None:
    """Return the run that the logs of a job's pods describe, or None if they contain no steps.

    Args:
        heads: beginnings of the logs, with that of rank 0 first. Of several logs, only the last one has steps.
        tail: end of the last log. Empty if its beginning is the whole log.
    """
    parts = [_cut_line(head, HEAD_BYTES) for head in heads] + [_cut_line(tail, TAIL_BYTES)]
    return find_logged_run(chain.from_iterable(map(split_lines, parts)), TEXT_FORMATS)


def make_report(run: LoggedRun, node: str | None, gpus: int | None) -> StepReport | None:
    """Return the report of a run that a pod on `node` has logged, or None if the run's number of GPUs is unknown.

    The number of GPUs is that in the log, or else `gpus`, the number of the job's GPUs.

    Raises:
        RefusedReport: the step is not a valid time.
    """
    if not (known := run.gpus or gpus):
        return None
    return StepReport(require_positive(run.seconds), LOG, node=node, gpus=known, plan=run.plan)


def _get_phase(pod: Document) -> object:
    return as_mapping(pod.get("status")).get("phase")


def _is_launcher(pod: Document) -> bool:
    return as_mapping(as_mapping(pod.get("metadata")).get("labels")).get(_GROUP) == _LAUNCHER


def _is_of_job(pod: Document, job: Job) -> bool:
    """Return whether a pod is not being deleted and belongs to a job.

    The pod's controller must be the job. For a kind that creates batch Jobs, such as JobSet, it must be a Job with the
    name JOB-GROUP-INDEX, because a pod does not name the owner of its owner.
    """
    metadata = as_mapping(pod.get("metadata"))
    owners = list_mappings_in(metadata.get("ownerReferences"))
    owner = next((item for item in owners if item.get("controller") is True), None)
    if owner is None or metadata.get("deletionTimestamp"):
        return False
    if not job.kind.has_jobs:
        return bool(job.uid) and owner.get("uid") == job.uid
    stem = f"{job.name}-{as_mapping(metadata.get('labels')).get(_GROUP)}-"
    name = str(owner.get("name"))
    return owner.get("kind") == "Job" and name.startswith(stem) and name.removeprefix(stem).isdecimal()


def _pod_sort_key(pod: Document) -> tuple[bool, list[int], str]:
    metadata = as_mapping(pod.get("metadata"))
    labels = as_mapping(metadata.get("labels"))
    indices = [count_or_default(labels.get(name), 0) for name in INDEX_LABELS]
    return labels.get(_ROLE, "master") != "master", indices, str(metadata.get("name"))


def _read_pod(pod: Document) -> LoggingPod:
    metadata, spec = as_mapping(pod.get("metadata")), as_mapping(pod.get("spec"))
    containers = list_mappings_in(spec.get("containers"))
    names = [str(item.get("name")) for item in containers]
    most = max(containers, key=lambda item: count_requested_gpus(as_mapping(item.get("resources"))))
    default = as_mapping(metadata.get("annotations")).get(_CONTAINER)
    node = spec.get("nodeName")
    return LoggingPod(
        str(metadata.get("name")),
        str(default) if default in names else str(most.get("name")),
        node if isinstance(node, str) else None,
    )


def _cut_line(content: bytes, limit: int) -> bytes:
    """Return a part of a log without its last line, if the limit may have cut that line."""
    if len(content) < limit:
        return content
    return content[: max(content.rfind(b"\n"), content.rfind(b"\r")) + 1]
