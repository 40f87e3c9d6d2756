"""Paths of every kind of object that the operator knows in the API, and the keys of objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilecast.api import gpu_pool, pool_learning, queue_advice, training_job
from tilecast.api.base import GROUP, VERSION
from tilecast.jobs import JOB_KINDS

KUEUE = "kueue.x-k8s.io"


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """Place at which the API server serves a kind."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    is_any_version: bool = False
    """Whether it is watched in the version that the cluster prefers."""

    @property
    def api_version(self) -> str:
        """Group and version as in the `apiVersion` of an object."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the path of an object, or of a list without `name`."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


KINDS: Mapping[str, ResourceKind] = {
    "Node": ResourceKind("", "v1", "nodes"),
    "Namespace": ResourceKind("", "v1", "namespaces"),
    "CustomResourceDefinition": ResourceKind("apiextensions.k8s.io", "v1", "customresourcedefinitions"),
    "ResourceSlice": ResourceKind("resource.k8s.io", "v1", "resourceslices", is_any_version=True),
    **{
        kind: ResourceKind("resource.k8s.io", "v1", f"{kind.lower()}s")
        for kind in ("ResourceClaim", "ResourceClaimTemplate")
    },
    "DeviceClass": ResourceKind("resource.k8s.io", "v1", "deviceclasses"),
    "ClusterQueue": ResourceKind(KUEUE, "v1beta2", "clusterqueues", is_any_version=True),
    "ResourceFlavor": ResourceKind(KUEUE, "v1beta2", "resourceflavors", is_any_version=True),
    "WorkloadPriorityClass": ResourceKind(KUEUE, "v1beta2", "workloadpriorityclasses", is_any_version=True),
    "PriorityClass": ResourceKind("scheduling.k8s.io", "v1", "priorityclasses"),
    "LocalQueue": ResourceKind(KUEUE, "v1beta2", "localqueues", is_any_version=True),
    gpu_pool.KIND: ResourceKind(GROUP, VERSION, "gpupools"),
    pool_learning.KIND: ResourceKind(GROUP, VERSION, "poollearnings"),
    queue_advice.KIND: ResourceKind(GROUP, VERSION, "queueadvices"),
    training_job.KIND: ResourceKind(GROUP, VERSION, "trainingjobs"),
    **{name: ResourceKind(kind.group, kind.version, kind.plural) for name, kind in JOB_KINDS.items()},
}


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Key of a worker's task: one object, or everything of one concern at once."""

    kind: str
    namespace: str = ""
    name: str = ""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Key:
        """Return the key of an object."""
        metadata = body["metadata"]
        return cls(str(body["kind"]), str(metadata.get("namespace", "")), str(metadata["name"]))

    @property
    def path(self) -> str:
        """Path of the object in the API."""
        return KINDS[self.kind].path(self.namespace, self.name)
