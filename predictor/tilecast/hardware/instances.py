"""Instance types of clouds: the GPUs of a node, its network and its list price.

The data are in `hardware/nodes/*.toml`; each file names its sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tilecast import shipped
from tilecast.hardware import Gpu, Link, find_link, links
from tilecast.spec import SpecError

GIGABIT_BYTES_PER_S = 1e9 / 8


@dataclass(frozen=True, slots=True)
class NodeType:
    """An instance type of a cloud."""

    name: str
    gpu: str
    gpus: int
    """GPUs of the whole node; if one name covers several sizes, GPUs of the largest."""
    inter: Link | None
    """Link between nodes; None if no source states it."""
    price_per_hour: float | None
    """On-demand list price of the whole node; None if no source states it."""
    currency: str
    any_size: bool = False
    """Whether the name also covers nodes of fewer GPUs, which have another network."""

    @property
    def price_per_gpu_hour(self) -> float | None:
        return None if self.price_per_hour is None else self.price_per_hour / self.gpus


@cache
def node_types() -> Mapping[str, NodeType]:
    """Return every instance type that ships with Tilecast, by name."""
    types: dict[str, NodeType] = {}
    for table in _read_node_files().values():
        for row in table.get("nodes", ()):
            types[row["type"]] = NodeType(
                row["type"],
                row["gpu"],
                row["gpus"],
                _read_network(row),
                row.get("price_per_hour"),
                table["currency"],
                row.get("any_size", False),
            )
    return types


def _read_network(row: Mapping[str, Any]) -> Link | None:
    if "inter" in row:
        return find_link(row["inter"])
    return build_ethernet_link(row["network_gbit_per_s"]) if "network_gbit_per_s" in row else None


def find_node_type(name: str) -> NodeType | None:
    """Return the instance type with a name in any letter case. If no file has the name, return None."""
    return node_types().get(name) or _index_types_by_name().get(name.casefold())


@cache
def _index_types_by_name() -> Mapping[str, NodeType]:
    return {name.casefold(): kind for name, kind in node_types().items()}


def add_gpus_to_machine(name: str, gpu: Gpu, gpus: int) -> NodeType | None:
    """Return the type of a machine to which GPUs are added (Google's N1).

    Its price is the price of the machine plus the prices of its GPUs. If one of these prices is unknown, return None.
    """
    for table in _read_node_files().values():
        machine, extra = table.get("machines", {}).get(name), table.get("extra_gpus", {}).get(gpu.name)
        if machine is not None and extra is not None:
            return NodeType(name, gpu.name, gpus, None, machine + extra * gpus, table["currency"])
    return None


def find_usual_node_type(gpu: Gpu) -> NodeType | None:
    """Return the instance type to assume when only the GPU's name is known. If no cloud offers the GPU, return None.

    The type has as many GPUs as the maker's system, or else the largest number below that. Among several such types,
    a type with a price is preferred.
    """
    most = find_default_gpus_per_node(gpu)
    types = [kind for kind in node_types().values() if kind.gpu == gpu.name and kind.gpus <= most]
    return max(types, key=lambda kind: (kind.gpus, kind.price_per_hour is not None), default=None)


def build_ethernet_link(gbit_per_s: float) -> Link:
    """Return an Ethernet link of `gbit_per_s` per node, with the overheads of the shipped 10 Gb/s link."""
    rate = gbit_per_s * GIGABIT_BYTES_PER_S
    return replace(find_link("ethernet-10"), name=f"ethernet-{gbit_per_s:g}", bandwidth_bytes_per_s=rate)


def find_network(name: str) -> Link:
    """Return the link between nodes with a name.

    If no file describes `ethernet-N`, return Ethernet of N Gb/s.

    Raises:
        SpecError: there is no such link.
    """
    rate = re.fullmatch(r"ethernet-(\d{1,4}(?:\.\d{1,3})?)", name)
    if rate is not None and name not in links() and float(rate[1]) > 0:
        return build_ethernet_link(float(rate[1]))
    return find_link(name)


def find_default_network(gpu: Gpu, gpus_per_node: int) -> Link:
    """Return the network between nodes to assume when only the GPU of the nodes is known."""
    rows = _read_node_files()["defaults.toml"]["network"]
    name = gpu.sibling or gpu.name
    fitting = (
        row
        for row in rows
        if name in row.get("gpus", (name,)) and row.get("gpus_per_node", gpus_per_node) == gpus_per_node
    )
    return find_link(next(fitting)["inter"])


def find_default_gpus_per_node(gpu: Gpu) -> int:
    """Return the number of GPUs per node to assume when only the GPU is known.

    This is the number in the maker's system, or 8 if no such system is known.
    """
    rows = _read_node_files()["defaults.toml"]["network"]
    name = gpu.sibling or gpu.name
    return next((row["gpus_per_node"] for row in rows if name in row.get("gpus", ())), 8)


@cache
def _read_node_files() -> Mapping[str, dict[str, Any]]:
    tables = shipped.read_tables("tilecast.hardware", "nodes")
    for name, table in tables.items():
        require_sources(name, table)
    return tables


def require_sources(name: str, table: Mapping[str, Any]) -> None:
    """Raise SpecError unless a table of `hardware/nodes` has a source for every column of numbers.

    Args:
        name: file name, for the message.
        table: content of the file.

    Raises:
        SpecError: a column has no source; the message names the file and the column.
    """
    columns = {key for row in table.get("nodes", ()) for key in NUMBERS if key in row}
    columns |= {key for key in ("machines", "extra_gpus") if key in table}
    known = table.get("sources", {})
    missing = [f"sources.{key}" for key in sorted(columns) if not known.get(key)]
    missing += [
        f"network.{place}.source" for place, row in enumerate(table.get("network", ())) if not row.get("source")
    ]
    if missing:
        raise SpecError(f"{name}: {missing[0]}", "is missing", "say where the numbers come from")


NUMBERS = ("gpus", "network_gbit_per_s", "price_per_hour")
"""Columns of an instance type that hold numbers."""
