"""A kind of job: one template, as a Job of batch/v1 has it, and a number of replicas."""

from collections.abc import Iterator

from tilecast.api.fields import Document, FieldChange
from tilecast.jobs.interface import JobKind, Pods, read_pod_template
from tilecast.jobs.shapes import read_count_at


class ZetaJob(JobKind):
    """Its pods are `spec.replicas` of `spec.template`."""

    kind = "ZetaJob"
    plural = "zetajobs"
    api_version = "zeta.dev/v1"
    suspend = ("spec", "run", "pause")
    tested = "Zeta 3"

    def pods(self, document: Document, runtime: Document | None) -> Iterator[Pods]:
        count = read_count_at(document, ("spec", "replicas"))
        yield read_pod_template("", ("spec", "template", "spec"), count, document["spec"]["template"]["spec"])

    def is_finished(self, status: Document) -> bool:
        return status.get("state") in ("Done", "Failed")

    def is_active(self, status: Document) -> bool:
        return bool(status.get("active"))

    def list_resize_changes(self, document: Document, pods: int) -> list[FieldChange]:
        return [FieldChange(("spec", "replicas"), pods)]


KIND = ZetaJob()
