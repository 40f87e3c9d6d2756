"""Count the nodes and GPUs of a pool that a job can use now, and write remarks on the other nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilecast.api.base import format_value
from tilecast.nodes.identification import NodeProperties
from tilecast.nodes.labels import read_label_table
from tilecast.nodes.objects import Node

MAX_NAMES = 3
"""Most nodes that a remark names."""


@dataclass(frozen=True, slots=True)
class UsableNodes:
    """Usable nodes of a pool, GPUs per node, and remarks on the other nodes."""

    gpus_per_node: int
    nodes: int
    remarks: tuple[str, ...]
    """Sentences on the other nodes of the pool, and on what all nodes require of a job."""


def find_usable_nodes(
    members: Sequence[Node], node_properties: Sequence[NodeProperties], *, usable_only: bool
) -> UsableNodes:
    """Return the usable nodes of a pool, with the number of GPUs per node that makes most GPUs usable, and remarks.

    Args:
        members: the pool's nodes.
        node_properties: the properties of these nodes, in the same order.
        usable_only: whether the pool will count only usable nodes. The remarks then say so.
    """
    whole = min(facts.gpus for facts in node_properties)
    size = _choose_gpus_per_node(
        [facts.usable for item, facts in zip(members, node_properties, strict=True) if not item.unavailable], whole
    )
    remarks = []
    why = defaultdict[str, list[str]](list)
    for item, facts in zip(members, node_properties, strict=True):
        if item.unavailable:
            why[item.unavailable].append(item.name)
        elif facts.usable < size:
            why[f"short of GPUs (pods may use {facts.usable} of {facts.gpus})"].append(item.name)
    for reason, names in sorted(why.items()):
        remarks.append(f"{_name_nodes(names, members)} {reason}{' and not counted' if usable_only else ''}")
    if usable_only and size < whole:
        remarks.append(f"pods may use {size} of the {whole} GPUs of a node; so many are counted")
    remarks += _describe_unoffered_gpus(members, node_properties)
    remarks += _describe_mig_slices(members)
    remarks += _describe_taints(members)
    return UsableNodes(size, len(members) - sum(map(len, why.values())), tuple(remarks))


def _choose_gpus_per_node(usable_counts: Iterable[int], full_count: int) -> int:
    """Return the number of GPUs per node that makes most GPUs usable. Nodes with fewer usable GPUs do not count.

    Args:
        usable_counts: number of usable GPUs of each node.
        full_count: number of GPUs of a node. It is returned if a node has all GPUs usable, or if no node has any.
    """
    counts = Counter(offer for offer in usable_counts if offer)
    if not counts or max(counts) >= full_count:
        return full_count
    return max(counts, key=lambda size: (size * sum(n for offer, n in counts.items() if offer >= size), size))


def _name_nodes(names: Sequence[str], members: Sequence[Node]) -> str:
    """Return text such as `2 of 8 nodes (a, b) are`.

    Args:
        names: names of the nodes to describe.
        members: all nodes of the pool.
    """
    examples = ", ".join(format_value(name, quote=False) for name in sorted(names)[:MAX_NAMES])
    more = ", …" if len(names) > MAX_NAMES else ""
    return f"{_describe_count(len(names), len(members))} ({examples}{more}) {_is_or_are(len(names))}"


def _describe_count(amount: int, total: int) -> str:
    if amount < total:
        return f"{amount} of {total} nodes"
    return "its only node" if total == 1 else f"all {total} nodes"


def _is_or_are(amount: int) -> str:
    return "is" if amount == 1 else "are"


def _describe_unoffered_gpus(members: Sequence[Node], node_properties: Sequence[NodeProperties]) -> list[str]:
    """Return remarks on nodes whose GPUs no device plugin offers to pods.

    Nodes that report no capacity at all get no remark.
    """
    resource = read_label_table().gpu_resource
    names = [
        item.name
        for item, facts in zip(members, node_properties, strict=True)
        if item.gpus is None and item.has_capacity and not facts.is_offered
    ]
    if not names:
        return []
    source = node_properties[0].count_source
    return [f"{_name_nodes(names, members)} without {resource}: no device plugin offers it; counted by {source}"]


def _describe_mig_slices(members: Sequence[Node]) -> list[str]:
    """Return remarks on nodes that offer whole GPUs and also MIG slices."""
    both = [item for item in members if item.gpus and item.slices]
    if not both:
        return []
    amounts = Counter[str]()
    for item in both:
        amounts.update({profile: total for profile, total, _ in item.slices})
    slices = ", ".join(f"{amount} x {profile}" for profile, amount in sorted(amounts.items()))
    names = [item.name for item in both]
    remark = f"cut in part ({slices}): only whole GPUs are counted; a GPUPool with mig takes slices"
    return [f"{_name_nodes(names, members)} {remark}"]


def _describe_taints(members: Sequence[Node]) -> list[str]:
    """Return remarks on the taints of the nodes that a job has to tolerate."""
    taints = Counter(taint for item in members for taint in item.taints if taint[2] != "PreferNoSchedule")
    remarks = []
    for (key, value, effect), amount in sorted(taints.items()):
        text = format_value(f"{key}={value}:{effect}" if value else f"{key}:{effect}", quote=False)
        which = (
            "all nodes are"
            if amount == len(members)
            else f"{_describe_count(amount, len(members))} {_is_or_are(amount)}"
        )
        remarks.append(f"{which} tainted {text}, which a job has to tolerate")
    return remarks
