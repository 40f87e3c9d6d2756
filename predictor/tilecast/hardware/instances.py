"""Instance types of clouds, with the GPUs, the network and the list price of a node.

The data and their sources are in `hardware/nodes/*.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tilecast import shipped
from tilecast.hardware import Gpu, Link, find_link, list_links
from tilecast.spec import SpecError

GIGABIT_BYTES_PER_S = 1e9 / 8


@dataclass(frozen=True, slots=True)
class NodeType:
    """An instance type of a cloud, with the GPUs, the network and the list price of a node."""

    name: str
    gpu: str
    """Name of the GPU."""
    gpus: int
    """Number of GPUs of a node. If the type has nodes of several sizes, this is the largest number."""
    inter: Link | None
    """Link between nodes. None if it is not published."""
    price_per_hour: float | None
    """On-demand list price of a node. None if it is not published."""
    currency: str
    any_size: bool = False
    """Whether the type also has nodes of fewer GPUs, with another network."""

    @property
    def price_per_gpu_hour(self) -> float | None:
        return None if self.price_per_hour is None else self.price_per_hour / self.gpus


@cache
def list_node_types() -> Mapping[str, NodeType]:
    """Return all instance types that ship with Tilecast, by name."""
    return {name: _build_node_type(name) for name in _list_rows()}


@cache
def _list_rows() -> Mapping[str, dict[str, Any]]:
    """Return the row of every instance type in the node files, with its currency, by name of the type."""
    return {
        row["type"]: {**row, "currency": table["currency"]}
        for table in _read_node_files().values()
        for row in table.get("nodes", ())
    }


@cache
def _build_node_type(name: str) -> NodeType:
    row = _list_rows()[name]
    return NodeType(
        name,
        row["gpu"],
        row["gpus"],
        _read_network(row),
        row.get("price_per_hour"),
        row["currency"],
        row.get("any_size", False),
    )


@cache
def list_clouds() -> Mapping[str, str]:
    """Return the cloud of each instance type that ships with Tilecast: the name of its file, such as `aws`."""
    return {
        row["type"]: name.removesuffix(".toml")
        for name, table in _read_node_files().items()
        for row in table.get("nodes", ())
    }


def _read_network(row: Mapping[str, Any]) -> Link | None:
    """Return the link between nodes in a row of a node file. If the row has no network, return None."""
    if "inter" in row:
        return find_link(row["inter"])
    return build_ethernet_link(row["network_gbit_per_s"]) if "network_gbit_per_s" in row else None


def find_node_type(name: str) -> NodeType | None:
    """Return the instance type with a name, in upper or lower case. If there is no such type, return None.

    Azure's prefix `Standard_` can be left out.
    """
    names, key = _index_names(), name.casefold()
    found = name if name in _list_rows() else names.get(key) or names.get(f"standard_{key}")
    return None if found is None else _build_node_type(found)


@cache
def _index_names() -> Mapping[str, str]:
    """Return the names of all instance types by name in lower case."""
    return {name.casefold(): name for name in _list_rows()}


def add_gpus_to_machine(name: str, gpu: Gpu, gpus: int) -> NodeType | None:
    """Return the instance type of a machine, such as Google's N1, with `gpus` GPUs attached.

    Its price is that of the machine plus those of the GPUs. If one of these prices is unknown, return None.
    """
    for table in _read_node_files().values():
        machine, extra = table.get("machines", {}).get(name), table.get("extra_gpus", {}).get(gpu.name)
        if machine is not None and extra is not None:
            return NodeType(name, gpu.name, gpus, None, machine + extra * gpus, table["currency"])
    return None


def find_usual_node_type(gpu: Gpu) -> NodeType | None:
    """Return the instance type to assume for nodes if only their GPU is known, or None if no cloud has the GPU.

    The type has `find_default_gpus_per_node` GPUs per node, or the next smaller number. A type with the network of the
    maker's system (`defaults.toml`) is preferred, then a type with a price, then the cheapest type.
    """
    most = find_default_gpus_per_node(gpu)
    network = find_default_network(gpu, most)
    rows = _list_rows().items()
    types = [_build_node_type(name) for name, row in rows if row["gpu"] == gpu.name and row["gpus"] <= most]

    def preference(kind: NodeType) -> tuple[int, bool, bool, float]:
        price = kind.price_per_hour
        return kind.gpus, kind.inter == network, price is not None, -(price or 0.0)

    return max(types, key=preference, default=None)


def build_ethernet_link(gbit_per_s: float) -> Link:
    """Return an Ethernet link with `gbit_per_s` Gb/s per node, and with the constants of the shipped 10 Gb/s link."""
    rate = gbit_per_s * GIGABIT_BYTES_PER_S
    return replace(find_link("ethernet-10"), name=f"ethernet-{gbit_per_s:g}", bandwidth_bytes_per_s=rate)


def find_network(name: str) -> Link:
    """Return the network with a name. For a name `ethernet-N` that no file has, return Ethernet with N Gb/s.

    Raises:
        SpecError: there is no such link.
    """
    rate = re.fullmatch(r"ethernet-(\d{1,4}(?:\.\d{1,3})?)", name)
    if rate is not None and name not in list_links() and float(rate[1]) > 0:
        return build_ethernet_link(float(rate[1]))
    return find_link(name)


def find_default_network(gpu: Gpu, gpus_per_node: int) -> Link:
    """Return the network to assume for nodes if only their GPU and the number of GPUs are known."""
    rows = _read_node_files()["defaults.toml"]["network"]
    name = gpu.sibling or gpu.name
    fitting = (
        row
        for row in rows
        if name in row.get("gpus", (name,)) and row.get("gpus_per_node", gpus_per_node) == gpus_per_node
    )
    return find_link(next(fitting)["inter"])


def find_default_gpus_per_node(gpu: Gpu) -> int:
    """Return the number of GPUs per node to assume if only the GPU is known.

    The number is that of a well-known system with this GPU. If no such system is known, return 8.
    """
    rows = _read_node_files()["defaults.toml"]["network"]
    name = gpu.sibling or gpu.name
    return next((row["gpus_per_node"] for row in rows if name in row.get("gpus", ())), 8)


@cache
def _read_node_files() -> Mapping[str, dict[str, Any]]:
    """Return the contents of the files in `hardware/nodes`, by file name.

    Raises:
        SpecError: a column of numbers in a file has no source.
    """
    tables = shipped.read_tables("tilecast.hardware", "nodes")
    for name, table in tables.items():
        require_sources(name, table)
    return tables


def require_sources(name: str, table: Mapping[str, Any]) -> None:
    """Raise SpecError if a column of numbers in a file of `hardware/nodes` has no source.

    Args:
        name: name of the file, for the message.
        table: content of the file.

    Raises:
        SpecError: a column has no source. The message names the file and the column.
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
