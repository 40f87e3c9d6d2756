"""Read the ResourceFlavors that a Kueue LocalQueue can use, with total and free GPU quota.

The functions are pure and work on objects of `kueue.x-k8s.io`. v1beta1 and v1beta2 have equal names for the fields used
here, except for the cohort.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilecast.api.fields import Document, as_mapping, list_mappings_in
from tilecast.nodes import gpu_resource
from tilecast.nodes.quantities import UNLIMITED, parse_gpu_count
from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class Flavor:
    """A Kueue ResourceFlavor with node labels, tolerations, and its GPU quota in one ClusterQueue."""

    name: str
    node_labels: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...]
    quota: int
    """Most GPUs of this flavor that the queue can use, including borrowed ones."""
    free: int
    """GPUs of the quota that no Workload has reserved."""


@dataclass(frozen=True, slots=True)
class LocalQueue:
    """A LocalQueue with the GPU flavors of its ClusterQueue, in the order in which Kueue tries them."""

    name: str
    cluster_queue: str
    flavors: tuple[Flavor, ...]

    def find_first_flavor(self, gpus: int) -> Flavor | None:
        """Return the flavor that Kueue assigns to a job of `gpus` GPUs, or None if none has enough quota.

        The flavor is the first one with enough free quota, or else the first one with enough quota.
        """
        now = (flavor for flavor in self.flavors if gpus <= flavor.free)
        ever = (flavor for flavor in self.flavors if gpus <= flavor.quota)
        return next(now, None) or next(ever, None)


@dataclass(frozen=True, slots=True)
class KueueObjects:
    """LocalQueues of a cluster by (namespace, name), and its ClusterQueues and ResourceFlavors by name."""

    local_queues: Mapping[tuple[str, str], Document] = field(default_factory=dict)
    cluster_queues: Mapping[str, Document] = field(default_factory=dict)
    flavors: Mapping[str, Document] = field(default_factory=dict)


def find_queue(objects: KueueObjects, namespace: str, name: str) -> LocalQueue:
    """Return the LocalQueue of a namespace and name, with the GPU flavors of its ClusterQueue.

    Raises:
        SpecError: the LocalQueue, its ClusterQueue, a ResourceFlavor or any GPU quota is missing.
    """
    label = "kueue.x-k8s.io/queue-name"
    local = objects.local_queues.get((namespace, name))
    if local is None:
        known = ", ".join(sorted(other for place, other in objects.local_queues if place == namespace)[:8])
        remedy = f"create it, or use one of {known}" if known else "create it"
        raise SpecError(label, f"there is no LocalQueue {name} in namespace {namespace}", remedy)
    cluster_queue_name = str((local.get("spec") or {}).get("clusterQueue", ""))
    cluster = objects.cluster_queues.get(cluster_queue_name)
    if cluster is None:
        raise SpecError(
            label, f"LocalQueue {name} names ClusterQueue {cluster_queue_name}, which does not exist", "create it"
        )
    siblings, given = _find_cohort_members(objects, cluster_queue_name), _list_gpu_flavors(cluster)
    for missing in sorted({str(item["name"]) for item in given} - objects.flavors.keys()):
        raise SpecError(
            label,
            f"ClusterQueue {cluster_queue_name} names ResourceFlavor {missing}, which does not exist",
            "create it",
        )
    flavors = tuple(_read_flavor(objects, cluster_queue_name, siblings, item) for item in given)
    if not flavors:
        raise SpecError(
            label, f"ClusterQueue {cluster_queue_name} has no quota of {gpu_resource()}", "add it to a resource group"
        )
    return LocalQueue(name, cluster_queue_name, flavors)


def _list_gpu_flavors(cluster_queue: Document) -> list[Document]:
    """Return the flavor entries in those resource groups of a ClusterQueue that cover GPUs."""
    groups = (cluster_queue.get("spec") or {}).get("resourceGroups") or ()
    with_gpus = (group for group in groups if gpu_resource() in (group.get("coveredResources") or ()))
    return [item for group in with_gpus for item in group.get("flavors") or ()]


def _read_flavor(
    objects: KueueObjects, cluster_queue_name: str, siblings: Iterable[str], flavor_entry: Document
) -> Flavor:
    """Return a flavor of a ClusterQueue with its GPU quota and free GPUs, including what its cohort lends.

    Args:
        objects: all Kueue objects.
        cluster_queue_name: name of the ClusterQueue.
        siblings: names of the other ClusterQueues of its cohort.
        flavor_entry: entry of the flavor in the ClusterQueue.
    """
    name = str(flavor_entry["name"])
    flavor = objects.flavors.get(name, {})
    own = next((item for _, item in _iterate_gpu_resources([flavor_entry])), {})
    nominal = parse_gpu_count(own.get("nominalQuota"))
    reserved = read_quotas(objects.cluster_queues[cluster_queue_name]).reserved.get(name, 0)
    lent = taken = 0
    for sibling in siblings:
        other = read_quotas(objects.cluster_queues[sibling])
        lent += other.lendable.get(name, 0)
        taken += other.reserved.get(name, 0)
    borrowable = min(lent, parse_gpu_count(own.get("borrowingLimit"), UNLIMITED))
    quota = nominal + borrowable
    free = min(quota - reserved, nominal + lent - reserved - taken) if borrowable else nominal - reserved
    return Flavor(
        name=name,
        node_labels=read_node_labels(flavor),
        tolerations=tuple(list_mappings_in(as_mapping(flavor.get("spec")).get("tolerations"))),
        quota=quota,
        free=max(free, 0),
    )


def _find_cohort_members(objects: KueueObjects, cluster_queue_name: str) -> list[str]:
    """Return the names of the other ClusterQueues in a ClusterQueue's cohort, which lend each other unused quota."""
    cohort = _get_cohort_name(objects.cluster_queues[cluster_queue_name])
    return [
        name
        for name, item in sorted(objects.cluster_queues.items())
        if cohort and name != cluster_queue_name and _get_cohort_name(item) == cohort
    ]


def _get_cohort_name(cluster_queue: Document) -> str:
    spec = cluster_queue.get("spec") or {}
    return str(spec.get("cohortName") or spec.get("cohort") or "")


@dataclass(frozen=True, slots=True)
class Quotas:
    """Nominal, lendable and reserved GPUs of one ClusterQueue, by flavor name. A flavor with 0 GPUs is absent."""

    nominal: Mapping[str, int]
    lendable: Mapping[str, int]
    """Part of `nominal` that other ClusterQueues of the cohort may borrow."""
    reserved: Mapping[str, int]


def read_quotas(cluster_queue: Document) -> Quotas:
    """Return the GPU quotas of a ClusterQueue. Malformed fields count as 0 GPUs."""
    nominal, lendable, reserved = Counter[str](), Counter[str](), Counter[str]()
    for group in list_mappings_in(as_mapping(cluster_queue.get("spec")).get("resourceGroups")):
        for name, quota in _iterate_gpu_resources(group.get("flavors")):
            own = parse_gpu_count(quota.get("nominalQuota"))
            nominal[name] += own
            lendable[name] += min(own, parse_gpu_count(quota.get("lendingLimit"), UNLIMITED))
    for name, usage in _iterate_gpu_resources(as_mapping(cluster_queue.get("status")).get("flavorsReservation")):
        reserved[name] += parse_gpu_count(usage.get("total"))
    return Quotas(dict(+nominal), dict(+lendable), dict(+reserved))


def read_node_labels(resource_flavor: Document) -> dict[str, str]:
    """Return `spec.nodeLabels` of a ResourceFlavor, or an empty mapping."""
    labels = as_mapping(as_mapping(resource_flavor.get("spec")).get("nodeLabels"))
    return {str(key): str(value) for key, value in labels.items()}


def _iterate_gpu_resources(flavors: object) -> Iterator[tuple[str, Document]]:
    """Yield (flavor name, resource entry) for each GPU resource in a list of flavors."""
    for flavor in list_mappings_in(flavors):
        for resource in list_mappings_in(flavor.get("resources")):
            if resource.get("name") == gpu_resource():
                yield str(flavor.get("name")), resource


def is_stopped(queue: Document) -> bool:
    """Return whether the `stopPolicy` of a LocalQueue or a ClusterQueue stops admission."""
    return as_mapping(queue.get("spec")).get("stopPolicy") not in (None, "None")
