"""The kind PyTorchJob of the training operator, API kubeflow.org/v1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilecast.api.fields import Document, FieldChange, Path, value_at_path
from tilecast.jobs.interface import JobKind, Pods, read_pod_template
from tilecast.jobs.quantities import has_any_count
from tilecast.jobs.shapes import read_count_at, require_shape

_ROLES = ("Master", "Worker")
_POLICY: Path = ("spec", "runPolicy", "schedulingPolicy")


class PyTorchJob(JobKind):
    """Support for a PyTorchJob: one template for the master and one for the workers."""

    kind = "PyTorchJob"
    plural = "pytorchjobs"
    api_version = "kubeflow.org/v1"
    pod_label = "training.kubeflow.org/job-name"
    pod_names = "$name-(master|worker)-[0-9]+"
    finished = ("Succeeded", "Failed")
    suspend = ("spec", "runPolicy", "suspend")
    processes = ("spec", "nprocPerNode")
    tested = "training operator 1.9"
    placed_by = "pod templates of Master and Worker"
    resized_by = "Worker replicas"

    def pods(self, document: Document, runtime: Document | None) -> Iterator[Pods]:
        replicas = document["spec"]["pytorchReplicaSpecs"]
        require_shape(policy := value_at_path(document, _POLICY) or {}, {"priorityClass": str}, _POLICY)
        for role in (name for name in _ROLES if name in replicas):
            path = ("spec", "pytorchReplicaSpecs", role, "template", "spec")
            count = read_count_at(document, ("spec", "pytorchReplicaSpecs", role, "replicas"))
            pods = read_pod_template(role, path, count, replicas[role]["template"]["spec"])
            yield replace(pods, priority_class=policy.get("priorityClass") or pods.priority_class)

    def is_active(self, status: Document) -> bool:
        return has_any_count((status.get("replicaStatuses") or {}).values(), "active", "succeeded", "failed")

    def list_resize_changes(self, document: Document, pods: int) -> list[FieldChange]:
        replicas = document["spec"]["pytorchReplicaSpecs"]
        workers = pods - 1 if "Master" in replicas else pods
        if "Worker" not in replicas or workers < 1:
            return []
        return [FieldChange(("spec", "pytorchReplicaSpecs", "Worker", "replicas"), workers)]

    def is_resizable(self, document: Document) -> bool:
        return True


KIND = PyTorchJob()
