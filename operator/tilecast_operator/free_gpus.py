"""Count the free GPUs of each pool: by Kueue's quotas if the pool has a flavor, otherwise by the running pods.

Advice does not depend on them, except for the condition CapacityAvailable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tilecast.jobs.kueue import Quotas
from tilecast.nodes import RESOURCE_SLICE, FoundPool, Node

Document: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """Number of free GPUs of a pool."""

    gpus: int
    source: str
    """Source of the number: Kueue or Pods."""
    flavor: str = ""
    nodes: Mapping[int, int] | None = None
    """Number of nodes for each number of free GPUs. None if only the sum is known."""

    def fits_plan(self, nodes: int, gpus_per_node: int) -> bool:
        """Return whether a plan on `nodes` nodes with `gpus_per_node` GPUs each could start now."""
        if nodes * gpus_per_node > self.gpus:
            return False
        return self.nodes is None or sum(n for free, n in self.nodes.items() if free >= gpus_per_node) >= nodes


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Quotas of Kueue and GPUs of running pods."""

    queues: Mapping[str, Quotas] = field(default_factory=dict)
    flavors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    used: Mapping[str, int] | None = None
    """Number of GPUs that pods hold, by node. None if pods are not read."""

    def count_free_gpus(self, pools: Iterable[FoundPool], nodes: Mapping[str, Node]) -> dict[str, FreeGpus]:
        """Return the free GPUs of each pool, by name. Pools with an unknown number are absent."""
        out = {}
        for item in pools:
            free = self._count_by_quota(item, nodes) or self._count_by_pods(item, nodes)
            if free is not None:
                out[item.pool.name] = free
        return out

    def _count_by_quota(self, found_pool: FoundPool, nodes: Mapping[str, Node]) -> FreeGpus | None:
        quota = {name for queue in self.queues.values() for name in queue.nominal}
        if found_pool.kueue_flavor:
            names = [found_pool.kueue_flavor]
        else:
            # Members of a discovered pool have the same deciding labels, so the first one's are enough.
            first = next((nodes[name] for name in found_pool.members if name in nodes), None)
            labels = found_pool.pool.node_selector if first is None else first.labels
            known = {name: self.flavors.get(name) for name in sorted(quota)}
            names = [name for name, own in known.items() if own and own.items() <= labels.items()]
        if len(names) != 1 or names[0] not in quota:
            return None
        name = names[0]
        free = sum(queue.nominal.get(name, 0) - queue.reserved.get(name, 0) for queue in self.queues.values())
        return FreeGpus(max(free, 0), "Kueue", name)

    def _count_by_pods(self, found_pool: FoundPool, nodes: Mapping[str, Node]) -> FreeGpus | None:
        there = [nodes[name] for name in found_pool.members if name in nodes]
        # Devices of a DRA driver and slices of the mixed strategy are other resources, which nobody counts.
        is_other = found_pool.facts["gpusPerNode"][1] == RESOURCE_SLICE or any(node.slices for node in there)
        if self.used is None or is_other:
            return None
        left = (max(node.allocatable - self.used.get(node.name, 0), 0) if node.schedulable else 0 for node in there)
        counted = Counter(left)
        return FreeGpus(sum(free * count for free, count in counted.items()), "Pods", nodes=counted)
