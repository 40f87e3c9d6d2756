"""Parse the value of `--gpus`: GPUs or cloud instance types, with counts and links.

h100-sxm:16                         16 GPUs in the usual nodes of that GPU
8xh100                              8 GPUs, with the count in front of the name
h100-sxm:3x4                        3 nodes of 4 GPUs
p5.48xlarge:2                       2 nodes of a cloud's instance type
h100-sxm:16@infiniband-ndr-8x400    a named link, between nodes or inside them
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from tilecast.hardware import Gpu, Link, Pool, find_gpu, find_link, instances, list_gpu_names
from tilecast.hardware.boards import GIB
from tilecast.spec import SpecError

ASSUMED = "assumed"
"""Source of the properties that `--gpus` leaves open."""
STATED = "stated"
"""Source of the properties that `--gpus` states."""
_MOST_GPUS = 2**20
_REMEDY = "write NAME:COUNT, for instance h100-sxm:16, h100-sxm:2x8 (nodes x GPUs) or p5.48xlarge:2 (nodes)"


def parse_gpu_list(text: str, links: Sequence[str] = ()) -> list[Pool]:
    """Return a pool for each entry of a list such as `h100-sxm:16@infiniband-ndr-8x400,p4d.24xlarge:2`.

    The links in `links` apply to every pool, unless its entry names others. A pool is named after its GPU. If several
    pools have that GPU, a pool of an instance type is named after the type.

    Raises:
        SpecError: an entry cannot be read or names an unknown GPU, or two pools would have equal names.
    """
    pools = [_parse_entry(item.strip(), links) for item in text.split(",")]
    gpus = [pool.gpu.name for pool in pools]
    named = [
        replace(pool, name=_make_pool_name(pool.node_type))
        if gpus.count(pool.gpu.name) > 1 and pool.layers.get("gpusPerNode") == STATED and pool.node_type
        else pool
        for pool in pools
    ]
    if len({pool.name for pool in named}) < len(named):
        raise SpecError("--gpus", f"{text} names a GPU twice", "add its counts up")
    return named


def describe_short_names(text: str) -> str:
    """Return a sentence on the names of a GPU list that several products have, such as `a100`, or an empty string."""
    parts: dict[str, None] = {}
    for item in text.split(","):
        short = _read_counts(item.partition("@")[0].strip()).name.casefold()
        others = [name for name in sorted(list_gpu_names()) if name.startswith(f"{short}-")]
        if not others or short in list_gpu_names() or instances.find_node_type(short) is not None:
            continue
        gpu = _find_gpu(short)
        rest = ", ".join(name for name in others if name != gpu.name)
        parts[f"{short} is read as {gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB), not {rest}"] = None
    return f"{'; '.join(parts)}." if parts else ""


def build_assumed_pool(gpu: Gpu, count: int) -> Pool:
    """Return a pool of `count` GPUs in nodes of the GPU's usual instance type. The last node may have fewer GPUs."""
    offered, server_gpus = instances.find_usual_node_type(gpu), instances.find_default_gpus_per_node(gpu)
    # A virtual machine with a single GPU has the GPU's price, but it is not what larger jobs run on.
    usual = None if offered and offered.gpus == 1 < server_gpus else offered
    whole = usual.gpus if usual else server_gpus
    per_node = min(count, whole)
    return Pool(
        name=gpu.name,
        gpu=gpu,
        gpus_per_node=per_node,
        max_nodes=count // per_node,
        intra=find_link(gpu.intra_link),
        inter=(usual and usual.inter) or instances.find_default_network(gpu, whole),
        node_type=usual.name if usual else "",
        price_per_gpu_hour=offered.price_per_gpu_hour if offered else None,
        currency=offered.currency if offered else "USD",
        layers=dict.fromkeys(("gpusPerNode", "interNode"), ASSUMED),
        usual_gpus_per_node=whole,
        spare_gpus=count % per_node,
    )


@dataclass(frozen=True, slots=True)
class _GpuListEntry:
    """Entry of a GPU list: a name, a number of GPUs or nodes, and optionally the number of GPUs per node."""

    text: str
    name: str
    count: int
    per_node: int | None


def _parse_entry(text: str, links: Sequence[str]) -> Pool:
    """Return the pool that one entry of the list describes. It has `links`, unless the entry names others."""
    body, *own = text.split("@")
    entry = _read_counts(body.strip())
    node_type = instances.find_node_type(entry.name)
    pool = _build_pool_of_node_type(entry, node_type) if node_type else _build_pool_of_gpu(entry, _find_gpu(entry.name))
    return with_named_links(with_named_links(pool, links, "--link"), own, "--gpus")


def _find_gpu(name: str) -> Gpu:
    """Return the GPU with a name.

    Raises:
        SpecError: there is no such GPU. If the name is closer to an instance type, the message suggests that.
    """
    try:
        return find_gpu(name)
    except SpecError as error:
        near = get_close_matches(name.casefold(), map(str.casefold, instances.list_node_types()), n=1, cutoff=0.8)
        kind = instances.find_node_type(near[0]) if near else None
        raise error.at("--gpus", f"did you mean {kind.name}?" if kind else "") from None


def _read_counts(text: str) -> _GpuListEntry:
    """Parse `NAME:COUNT`, `NAME:NODESxGPUS` or `COUNTxNAME` into a name and counts."""
    name, colon, counts = text.partition(":")
    if not colon and (front := re.fullmatch(r"(\d+) *[x*] *(\D.*)", text)):
        name, counts = front[2], front[1]
    match = re.fullmatch(r"(\d{1,7})(?:[x*](\d{1,3}))?", counts.strip(), re.ASCII)
    if match is None or not name.strip():
        raise SpecError("--gpus", f"cannot read {text[:60]!r}", _REMEDY)
    count, per_node = int(match[1]), None if match[2] is None else int(match[2])
    if not 0 < count * (1 if per_node is None else per_node) <= _MOST_GPUS:
        raise SpecError("--gpus", f"{text[:60]!r} has no GPU, or more than {_MOST_GPUS:,}", _REMEDY)
    return _GpuListEntry(text, name.strip(), count, per_node)


def _build_pool_of_gpu(entry: _GpuListEntry, gpu: Gpu) -> Pool:
    """Return a pool for an entry that names a GPU. Nodes have the entry's size, or by default the GPU's usual size."""
    if entry.per_node is None:
        return build_assumed_pool(gpu, entry.count)
    usual = build_assumed_pool(gpu, 1)
    return replace(
        usual,
        gpus_per_node=entry.per_node,
        max_nodes=entry.count,
        node_type=usual.node_type if entry.per_node == usual.usual_gpus_per_node else "",
        layers={"gpusPerNode": STATED, "interNode": ASSUMED},
    )


def _build_pool_of_node_type(entry: _GpuListEntry, node_type: instances.NodeType) -> Pool:
    """Return a pool for an entry that names an instance type. The entry's count is a number of nodes, not of GPUs.

    Raises:
        SpecError: the entry's number of GPUs per node does not exist for the type.
    """
    gpu, per_node = find_gpu(node_type.gpu), entry.per_node or node_type.gpus
    if per_node != node_type.gpus and not (node_type.any_size and per_node < node_type.gpus):
        problem = f"{node_type.name} has {node_type.gpus} GPUs, not {per_node}"
        raise SpecError("--gpus", problem, f"write {node_type.name}:{entry.count}")
    known = node_type.inter if per_node == node_type.gpus else None
    return Pool(
        name=gpu.name,
        gpu=gpu,
        gpus_per_node=per_node,
        max_nodes=entry.count,
        intra=find_link(gpu.intra_link),
        inter=known or instances.find_default_network(gpu, node_type.gpus),
        node_type=node_type.name,
        price_per_gpu_hour=node_type.price_per_gpu_hour,
        currency=node_type.currency,
        layers={"gpusPerNode": STATED, "interNode": STATED if known else ASSUMED},
        usual_gpus_per_node=node_type.gpus,
    )


def with_named_links(pool: Pool, names: Sequence[str], flag: str) -> Pool:
    """Return the pool with the named links. If two of them connect the same GPUs, use the later one.

    Raises:
        SpecError: there is no link with a name. The message names `flag`.
    """
    for name in names:
        try:
            pool = _with_link(pool, instances.find_network(name.strip()))
        except SpecError as error:
            raise error.at(flag) from None
    return pool


def _with_link(pool: Pool, link: Link) -> Pool:
    """Return the pool with a new link: between nodes if the link's bandwidth is per node, inside nodes otherwise."""
    if link.per_node:
        return replace(pool, inter=link, layers={**pool.layers, "interNode": STATED})
    return replace(pool, intra=link, layers={**pool.layers, "intraNode": STATED})


def _make_pool_name(node_type: str) -> str:
    """Return the pool name for an instance type, with only the characters that Kubernetes names allow."""
    return re.sub(r"[^a-z0-9.-]+", "-", node_type.casefold())
