"""Assignment of nodes to the GPUPools that users wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilecast.api import gpu_pool
from tilecast.nodes.objects import Node
from tilecast.spec import SpecError


@dataclass(slots=True)
class NodeClaims:
    """Nodes claimed by each GPUPool that a user wrote, and the pools that discovery remembers."""

    specs: dict[str, gpu_pool.GPUPoolSpec] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    remembered: dict[str, tuple[gpu_pool.Discovery, gpu_pool.GPUPoolSpec]] = field(default_factory=dict)

    def owned_positions(self, name: str) -> list[int]:
        """Return the positions of the nodes that a user's pool owns."""
        return [index for index, owner in self.owner.items() if owner == name]


def claim_nodes(
    nodes: Sequence[Node], gpupools: Iterable[Mapping[str, Any]]
) -> tuple[NodeClaims, dict[str, SpecError]]:
    """Return the claims of GPUPool documents on nodes, and the errors of invalid documents by name."""
    claims, invalid = NodeClaims(), {}
    for position, document in enumerate(gpupools):
        try:
            name, spec = gpu_pool.parse(document)
        except SpecError as error:
            metadata = document.get("metadata")
            given = metadata.get("name") if isinstance(metadata, Mapping) else None
            invalid[str(given or position + 1)[:253]] = error
        else:
            note = gpu_pool.discovery(document, spec)
            if note is None:
                claims.specs[name] = spec
            else:
                claims.remembered[name] = (note, spec)
    for name in sorted(claims.specs):
        own = selected_labels(claims.specs[name])
        for index, item in enumerate(nodes):
            if own and index not in claims.owner and own.items() <= item.labels.items():
                claims.owner[index] = name
    return claims, invalid


def selected_labels(spec: gpu_pool.GPUPoolSpec) -> Mapping[str, str]:
    """Return the labels of the nodes that a pool takes; none if it selects no nodes."""
    return spec.selector or ({gpu_pool.NODE_TYPE_LABEL: spec.node_type} if spec.node_type else {})
