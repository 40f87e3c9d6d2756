"""Assign nodes to the GPUPools that select them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilecast.api import gpu_pool
from tilecast.nodes.objects import Node
from tilecast.spec import SpecError


@dataclass(slots=True)
class ExistingPools:
    """GPUPools that exist before a discovery: those that users wrote, and those that an earlier discovery wrote."""

    specs: dict[str, gpu_pool.GPUPoolSpec] = field(default_factory=dict)
    """Specs of the pools that users wrote, by name."""
    owner: dict[int, str] = field(default_factory=dict)
    """Name of the user's pool that selects a node, by the node's position."""
    remembered: dict[str, tuple[gpu_pool.Discovery, gpu_pool.GPUPoolSpec]] = field(default_factory=dict)
    """Records and specs of the pools that an earlier discovery wrote, by name."""


def assign_nodes(
    nodes: Sequence[Node], gpupools: Iterable[Mapping[str, Any]]
) -> tuple[ExistingPools, dict[str, SpecError]]:
    """Return which GPUPool selects each node, and the errors of invalid GPUPool documents by name.

    If several GPUPools select a node, the alphabetically first GPUPool gets it.
    """
    claims, invalid = ExistingPools(), {}
    for position, document in enumerate(gpupools):
        try:
            name, spec = gpu_pool.parse_gpu_pool(document)
        except SpecError as error:
            metadata = document.get("metadata")
            given = metadata.get("name") if isinstance(metadata, Mapping) else None
            invalid[str(given or position + 1)[:253]] = error
        else:
            note = gpu_pool.read_discovery(document, spec)
            if note is None:
                claims.specs[name] = spec
            else:
                claims.remembered[name] = (note, spec)
    for name in sorted(claims.specs):
        own = get_selected_labels(claims.specs[name])
        for index, item in enumerate(nodes):
            if own and index not in claims.owner and own.items() <= item.labels.items():
                claims.owner[index] = name
    return claims, invalid


def get_selected_labels(spec: gpu_pool.GPUPoolSpec) -> Mapping[str, str]:
    """Return the labels by which a GPUPool selects nodes. If it selects no nodes, return an empty mapping."""
    return spec.selector or ({gpu_pool.NODE_TYPE_LABEL: spec.node_type} if spec.node_type else {})
