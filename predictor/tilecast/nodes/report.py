"""Result of discovery: pools, nodes that are in no pool, and invalid GPUPools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilecast.api import gpu_pool
from tilecast.hardware import Pool
from tilecast.learning.calibration import Calibration
from tilecast.nodes.devices import PublishedDevice
from tilecast.spec import SpecError

Facts = dict[str, tuple[str, str]]
"""Value and source of each property of a pool: gpu, gpusPerNode, intraNode, interNode, nvlinkDomain, price."""


@dataclass(frozen=True, slots=True)
class TopologyLevel:
    """Number of different values of a topology label, and the largest number of nodes with the same value."""

    key: str
    domains: int
    largest: int


@dataclass(frozen=True, slots=True)
class FoundPool:
    """A pool that discovery found, its nodes, and the sources of its properties."""

    pool: Pool
    nodes: int
    gpus_total: int
    gpus_allocatable: int
    facts: Facts
    members: tuple[str, ...] = ()
    """Names of the pool's nodes, sorted."""
    note: gpu_pool.Discovery | None = None
    """Discovery's record of the pool. None for a pool that a user wrote."""
    spot: bool = False
    kueue_flavor: str = ""
    """Kueue flavor that the user wrote. Empty if it follows from the labels of the nodes."""
    topology: tuple[TopologyLevel, ...] = ()
    """Topology labels that the nodes have, nearest first."""
    unusable: int = 0
    """Number of nodes that no job can use as a whole now."""
    devices: tuple[PublishedDevice, ...] = ()
    """Distinct devices that ResourceSlices publish for the pool's nodes."""
    remarks: tuple[str, ...] = ()
    """Sentences on some of the nodes: cordoned, not ready, tainted, with missing GPUs, or partly cut by MIG."""


@dataclass(frozen=True, slots=True)
class OmittedNodes:
    """Names of GPU nodes that are in no pool for the same reason, with a remedy.

    `code` is UnknownAccelerator, MigPartitioned, SharedGpu or VirtualGpu.
    """

    code: str
    message: str
    remedy: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodesReport:
    """Result of discovery: the pools, the GPU nodes that are in no pool, and invalid GPUPools."""

    entries: tuple[FoundPool, ...]
    left_out: tuple[OmittedNodes, ...]
    invalid: Mapping[str, SpecError]
    """Invalid GPUPools, by name."""
    other_nodes: int
    """Number of nodes without GPUs."""
    obsolete: tuple[str, ...] = ()
    """Names of GPUPools of discovery whose nodes are in another pool now, or gone permanently."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(item.pool for item in self.entries)

    @property
    def devices(self) -> dict[str, tuple[PublishedDevice, ...]]:
        """Devices of ResourceSlices by pool name. A pool without devices is absent."""
        return {item.pool.name: item.devices for item in self.entries if item.devices}

    def with_calibration(self, table: Calibration) -> NodesReport:
        """Return the report with the given calibration in every pool."""
        calibrated = (replace(item, pool=replace(item.pool, calibration=table)) for item in self.entries)
        return replace(self, entries=tuple(calibrated))

    def raise_if_invalid(self) -> None:
        """Raise SpecError if a GPUPool is invalid.

        Raises:
            SpecError: a GPUPool is invalid.
        """
        for name, error in self.invalid.items():
            raise SpecError(f"GPUPool {name}: {error.field}", error.problem, error.remedy)

    def require_pools(self) -> tuple[Pool, ...]:
        """Return the pools. If none of them has usable nodes, raise SpecError.

        Raises:
            SpecError: a GPUPool is invalid, or no pool has or can have a node. The message gives the reasons.
        """
        self.raise_if_invalid()
        empty = [item for item in self.entries if item.nodes and not item.pool.max_nodes and item.remarks]
        if self.entries and len(empty) < len(self.entries):
            return self.pools
        if empty:
            problem = f"no usable GPU: pool {empty[0].pool.name}: {'; '.join(empty[0].remarks)}"
            raise SpecError("nodes", problem, "uncordon or mend the nodes, or state maxNodes in a GPUPool")
        if self.left_out:
            first = self.left_out[0]
            count = "1 node" if len(first.nodes) == 1 else f"{len(first.nodes)} nodes"
            raise SpecError("nodes", f"no usable GPU: on {count} {first.message}", first.remedy)
        count = f"none of the {self.other_nodes} nodes has a GPU" if self.other_nodes else "the list holds no node"
        raise SpecError("nodes", count, "give nodes with GPU labels, or a GPUPool with nodeType and maxNodes")
