"""Form a pool from nodes with equal GPUs, network and price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tilecast.hardware import Gpu, Link, Pool, find_link
from tilecast.nodes.identification import NodeProperties
from tilecast.nodes.labels import read_label_table
from tilecast.nodes.objects import Node
from tilecast.nodes.report import Facts, FoundPool, TopologyLevel
from tilecast.nodes.usable import find_usable_nodes


def build_pool_of_nodes(
    members: Sequence[int],
    nodes: Sequence[Node],
    node_properties: Mapping[int, NodeProperties],
    selector: Mapping[str, str],
    keys: Sequence[str] = (),
    *,
    usable_only: bool = False,
) -> FoundPool:
    """Return the pool that the given nodes form, named after its GPU.

    Args:
        members: positions in `nodes` of the pool's nodes. The first node gives the properties that all of them share.
        nodes: all nodes.
        node_properties: properties of nodes, by position in `nodes`.
        selector: labels that select the nodes.
        keys: topology labels that a user named. Empty for those of `labels.toml`.
        usable_only: whether to count only nodes that a job can use now.
    """
    first, there = node_properties[members[0]], [nodes[index] for index in members]
    types = {item.node_type for item in there}
    use = find_usable_nodes(there, [node_properties[index] for index in members], usable_only=usable_only)
    gpus_per_node = use.gpus_per_node if usable_only else min(node_properties[index].gpus for index in members)
    intra, domain_source = _find_intra_link(
        [item for item in there if not (usable_only and item.unavailable)], first.gpu, gpus_per_node
    )
    currency = first.kind.currency if first.kind else "USD"
    facts = _list_pool_properties(first, gpus_per_node, intra, domain_source, currency)
    taints = sorted({taint for item in there for taint in item.taints if taint[2] != "PreferNoSchedule"})
    pool = Pool(
        name=first.gpu.name,
        gpu=first.gpu,
        gpus_per_node=gpus_per_node,
        max_nodes=use.nodes if usable_only else len(members),
        intra=intra,
        inter=first.inter,
        node_type=types.pop() if len(types) == 1 else "",
        node_selector=selector,
        tolerations=tuple(_build_toleration(*taint) for taint in taints),
        price_per_gpu_hour=first.price,
        currency=currency,
        layers={name: source for name, (_, source) in facts.items()},
    )
    return FoundPool(
        pool,
        nodes=len(members),
        gpus_total=sum(node_properties[index].gpus for index in members),
        gpus_allocatable=sum(node_properties[index].usable for index in members if node_properties[index].is_offered),
        facts=facts,
        members=tuple(sorted(item.name for item in there)),
        spot=all(node_properties[index].spot for index in members),
        topology=_count_topology_levels(there, keys or read_label_table().topology.keys),
        unusable=len(members) - use.nodes,
        remarks=use.remarks,
    )


def _list_pool_properties(
    first: NodeProperties, gpus_per_node: int, intra: Link, domain_source: str, currency: str
) -> Facts:
    """Return the value and the source of each property of a pool, by name.

    Args:
        first: properties of one node of the pool.
        gpus_per_node: GPUs per node of the pool.
        intra: the link between the GPUs of a node.
        domain_source: source of the size of the NVLink domain. Empty if a domain is one node.
        currency: currency of the price.
    """
    facts: Facts = {
        "gpu": (first.gpu.name, first.gpu_source),
        "gpusPerNode": (str(gpus_per_node), first.count_source),
        "intraNode": (intra.name, "gpu"),
        "interNode": (first.inter.name, first.inter_source),
    }
    if domain_source:
        facts["nvlinkDomain"] = (str(intra.domain), domain_source)
    if first.price is not None:
        facts["price"] = (f"{first.price:g} {currency}", "instance type")
    return facts


def _find_intra_link(members: Sequence[Node], gpu: Gpu, gpus_per_node: int) -> tuple[Link, str]:
    """Return the link between the GPUs of a node, and where the size of its NVLink domain comes from.

    The second value is the key of a label if the label determines the size, and "gpu" if the GPU product does. It is ""
    if no NVLink domain spans nodes.
    """
    intra = find_link(gpu.intra_link)
    if gpu.mig or intra.beyond is not None or intra.domain <= gpus_per_node:
        return intra, ""
    for key in read_label_table().nvlink_domain:
        domains = Counter(item.labels[key] for item in members if item.labels.get(key))
        largest = max(domains.values(), default=0) * gpus_per_node
        if len(domains) > 1 or largest > intra.domain:
            return replace(intra, domain=largest), key
        if domains:
            break
    return intra, "gpu"


def _count_topology_levels(members: Sequence[Node], keys: Iterable[str]) -> tuple[TopologyLevel, ...]:
    counted = ((key, Counter(item.labels[key] for item in members if key in item.labels)) for key in keys)
    return tuple(TopologyLevel(key, len(counts), max(counts.values())) for key, counts in counted if counts)[:16]


def _build_toleration(key: str, value: str, effect: str) -> dict[str, str]:
    """Return the toleration, as in a pod spec, of the taint with this key, value and effect."""
    match = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
    return {"key": key, **match, "effect": effect}
