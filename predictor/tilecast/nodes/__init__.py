"""Discovery of GPU pools from the nodes of a cluster.

Each property of a node comes from the first of these sources that has it:

* a GPUPool that a user wrote;
* the devices of ResourceSlices;
* the labels of `labels.toml` (GPU Feature Discovery, then labels of clouds);
* the instance types of `hardware/nodes`.

If no source has a property, the node is left out and the report says why. Only the network may be assumed. Its source
is then `default`.

A pool describes all its nodes in the cluster. Call `discover_pools(..., usable_only=True)` to count only nodes and GPUs
that a job can use now. The remarks of a pool describe conditions of some of its nodes. Read `discovery` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from tilecast.api import documents, gpu_pool
from tilecast.api.base import format_value
from tilecast.nodes.devices import PublishedDevice
from tilecast.nodes.discovery import discover_pools, gpupool_document
from tilecast.nodes.identification import RESOURCE_SLICE
from tilecast.nodes.labels import gpu_device_classes, gpu_driver, gpu_resource, node_kind_labels
from tilecast.nodes.objects import Node, ResourceSlice, read_node, read_resource_slice
from tilecast.nodes.report import FoundPool, NodesReport, OmittedNodes, TopologyLevel
from tilecast.spec import SpecError

__all__ = [
    "RESOURCE_SLICE",
    "Documents",
    "FoundPool",
    "Node",
    "NodesReport",
    "OmittedNodes",
    "PublishedDevice",
    "ResourceSlice",
    "TopologyLevel",
    "discover_pools",
    "gpu_device_classes",
    "gpu_driver",
    "gpu_resource",
    "gpupool_document",
    "node_kind_labels",
    "parse_objects",
    "read_node",
    "read_resource_slice",
]  # fmt: skip

Documents: TypeAlias = list[documents.Document]


def parse_objects(text: str, name: str = "nodes") -> tuple[Documents, Documents, Documents]:
    """Return the Node, GPUPool and ResourceSlice documents of a YAML or JSON text.

    `kubectl get nodes,gpupools -o json` prints such text. If a node is listed more than once, the last entry is used.

    Raises:
        SpecError: the text is not YAML, or has an object of another kind.
    """
    by_kind: dict[str, Documents] = {"Node": [], gpu_pool.KIND: [], "ResourceSlice": []}
    for index, document in enumerate(documents.load_documents(text, name)):
        kind = document.get("kind")
        if not isinstance(kind, str) or kind not in by_kind:
            remedy = "give Node, GPUPool and ResourceSlice objects, as `kubectl get nodes,gpupools -o json` prints them"
            raise SpecError(f"{name}: document {index + 1}", f"kind {format_value(kind)} is not a node", remedy)
        by_kind[kind].append(document)
    last: dict[object, documents.Document] = {}
    for document in by_kind["Node"]:
        metadata = document.get("metadata")
        stated = metadata.get("name") if isinstance(metadata, Mapping) else None
        last[stated if isinstance(stated, str) else id(document)] = document
    return list(last.values()), by_kind[gpu_pool.KIND], by_kind["ResourceSlice"]
