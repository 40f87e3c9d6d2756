"""The kind JobSet of the API group jobset.x-k8s.io."""

from __future__ import annotations

from collections.abc import Iterator

from tilecast.api.fields import Document, FieldChange, Path, value_at_path
from tilecast.jobs.interface import RANDOM_PART, Job, JobKind, Pods, read_pod_template
from tilecast.jobs.quantities import count_or_default, has_any_count
from tilecast.jobs.shapes import read_count_at, require_shape

_SUBDOMAIN: Path = ("spec", "network", "subdomain")


class JobSet(JobKind):
    """Support for a JobSet: one template per replicated job. `spec.replicatedJobs` is immutable."""

    kind = "JobSet"
    plural = "jobsets"
    api_version = "jobset.x-k8s.io/v1alpha2"
    pod_label = "jobset.sigs.k8s.io/jobset-name"
    has_jobs = True
    pod_names = f"$name-($groups)-[0-9]+-[0-9]+-{RANDOM_PART}"
    finished = ("Completed", "Failed")
    tested = "0.12"
    placed_by = "pod templates of replicated jobs with GPUs"

    def pods(self, document: Document, runtime: Document | None) -> Iterator[Pods]:
        require_shape(value_at_path(document, _SUBDOMAIN[:-1]), {"subdomain": str}, _SUBDOMAIN[:-1])
        for index, item in enumerate(document["spec"]["replicatedJobs"]):
            above: Path = ("spec", "replicatedJobs", index)
            below: Path = (*above, "template", "spec")
            count = read_count_at(document, (*above, "replicas")) * read_count_at(document, (*below, "parallelism"))
            pod = item["template"]["spec"]["template"]["spec"]
            yield read_pod_template(str(item["name"]), (*below, "template", "spec"), count, pod)

    def is_active(self, status: Document) -> bool:
        return has_any_count(status.get("replicatedJobsStatus") or (), "active", "ready", "succeeded", "failed")

    def list_resize_changes(self, document: Document, pods: int) -> list[FieldChange]:
        """Return the changes that give the only group of GPU pods `pods` pods.

        If there is not exactly one group of GPU pods, return an empty list.
        """
        groups = [index for index, item in enumerate(self.pods(document, None)) if item.gpus]
        if len(groups) != 1:
            return []
        path: Path = ("spec", "replicatedJobs", groups[0])
        below: Path = (*path, "template", "spec")
        if count_or_default(value_at_path(document, (*below, "parallelism"))) == 1:
            return [FieldChange((*path, "replicas"), pods)]
        if count_or_default(value_at_path(document, (*path, "replicas"))) > 1:
            return []
        has_completions = value_at_path(document, (*below, "completions")) is not None
        more = [FieldChange((*below, "completions"), pods)] if has_completions else []
        return [FieldChange((*below, "parallelism"), pods), *more]

    def find_main_address(self, document: Document, job: Job) -> str:
        """Return a shell expression: MASTER_ADDR if it is set, otherwise the DNS name of the first GPU pod."""
        subdomain = value_at_path(document, _SUBDOMAIN) or job.name
        return f"${{MASTER_ADDR:-{job.name}-{job.workers[0].name}-0-0.{subdomain}}}"


KIND = JobSet()
