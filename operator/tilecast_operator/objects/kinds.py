"""Kinds of objects that the operator reads or writes, and the paths of objects in the API."""

from __future__ import annotations

from typing import Any

from tilecast.api import gpu_pool, pool_learning, queue_advice, training_job
from tilecast.api.base import GROUP, VERSION
from tilecast.jobs import JOB_KINDS
from tilecast_operator.kube.kinds import Document, Key, Kinds, ResourceKind

KUEUE = "kueue.x-k8s.io"


KINDS: Kinds = {
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


def make_object_path(key: Key) -> str:
    """Return the path of an object in the API."""
    return KINDS[key.kind].path(key.namespace, key.name)


def complete_item(kind: str, item: Document) -> dict[str, Any]:
    """Return an item of a list with its apiVersion and kind, which lists leave out."""
    return {"apiVersion": KINDS[kind].api_version, **item, "kind": kind}
