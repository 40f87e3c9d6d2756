"""The kind Job of the API batch/v1."""

from __future__ import annotations

from collections.abc import Iterator

from tilecast.api.fields import Document, FieldChange, value_at_path
from tilecast.jobs.interface import RANDOM_PART, JobKind, Pods, make_name_pattern, read_pod_template
from tilecast.jobs.shapes import read_count_at

MAX_BASE = 58
"""Most characters of a generated pod name before its random part. Kubernetes cuts the Job's name to this length."""
MAX_DIGITS = 6
"""Most digits of the index of a pod."""


class BatchJob(JobKind):
    """Support for a batch Job: one pod template, of which `parallelism` pods run at once."""

    kind = "Job"
    plural = "jobs"
    api_version = "batch/v1"
    pod_label = "batch.kubernetes.io/job-name"
    finished = ("Complete", "Failed")
    placed_by = "pod template"
    resized_by = "Indexed Jobs whose completions equal their parallelism"

    def pods(self, document: Document, runtime: Document | None) -> Iterator[Pods]:
        count = read_count_at(document, ("spec", "parallelism"))
        count = min(count, read_count_at(document, ("spec", "completions"), count))
        yield read_pod_template("", ("spec", "template", "spec"), count, document["spec"]["template"]["spec"])

    def find_pod_names(self, document: Document) -> str:
        """Return the pattern of the names of a Job's pods.

        A pod name begins with the Job's name, which is cut if it is too long. Pods of an Indexed Job also have an
        index, which is never cut: the longer the index, the more of the Job's name is cut.
        """
        name = str(value_at_path(document, ("metadata", "name")) or "")
        if value_at_path(document, ("spec", "completionMode")) != "Indexed":
            return make_name_pattern(f"{name}-"[:MAX_BASE]) + RANDOM_PART
        if len(name) + MAX_DIGITS + 2 <= MAX_BASE:
            return f"{make_name_pattern(name)}-[0-9]+-{RANDOM_PART}"
        bases = (
            f"{make_name_pattern(name[: MAX_BASE - count - 2])}-[0-9]{{{count}}}" for count in range(1, MAX_DIGITS + 1)
        )
        return f"({'|'.join(bases)})-{RANDOM_PART}"

    def is_active(self, status: Document) -> bool:
        # startTime is removed when a Job that ran is suspended
        return any(status.get(name) for name in ("startTime", "active", "succeeded", "failed"))

    def list_resize_changes(self, document: Document, pods: int) -> list[FieldChange]:
        """Return the changes that give a Job `pods` pods, or [] if its pods do not all run at once."""
        spec = document["spec"]
        if spec.get("completions", 1) != spec.get("parallelism", 1):
            return []
        return [FieldChange(("spec", "parallelism"), pods), FieldChange(("spec", "completions"), pods)]

    def is_resizable(self, document: Document) -> bool:
        # completions of other Jobs are immutable (KEP-3715, elastic Indexed Job)
        return bool(document["spec"].get("completionMode") == "Indexed")


KIND = BatchJob()
