"""The kind Job of the API batch/v1."""

from __future__ import annotations

from collections.abc import Iterator

from tilecast.api.fields import Document, FieldChange
from tilecast.jobs.interface import JobKind, Pods, read_pod_template
from tilecast.jobs.shapes import read_count_at


class BatchJob(JobKind):
    """Support for a batch Job: one pod template, with `parallelism` pods at once."""

    kind = "Job"
    plural = "jobs"
    api_version = "batch/v1"
    pod_label = "batch.kubernetes.io/job-name"
    pod_names = "$name(-[0-9]+)?-[a-z0-9]{5}"
    finished = ("Complete", "Failed")
    placed_by = "pod template"
    resized_by = "Indexed Jobs whose completions equal their parallelism"

    def pods(self, document: Document, runtime: Document | None) -> Iterator[Pods]:
        count = read_count_at(document, ("spec", "parallelism"))
        count = min(count, read_count_at(document, ("spec", "completions"), count))
        yield read_pod_template("", ("spec", "template", "spec"), count, document["spec"]["template"]["spec"])

    def is_active(self, status: Document) -> bool:
        # startTime is removed when a Job that ran is suspended
        return any(status.get(name) for name in ("startTime", "active", "succeeded", "failed"))

    def list_resize_changes(self, document: Document, pods: int) -> list[FieldChange]:
        """Return the changes that give a Job `pods` pods. If its pods do not all run at once, return an empty list."""
        spec = document["spec"]
        if spec.get("completions", 1) != spec.get("parallelism", 1):
            return []
        return [FieldChange(("spec", "parallelism"), pods), FieldChange(("spec", "completions"), pods)]

    def is_resizable(self, document: Document) -> bool:
        # completions of other Jobs are immutable (KEP-3715, elastic Indexed Job)
        return bool(document["spec"].get("completionMode") == "Indexed")


KIND = BatchJob()
