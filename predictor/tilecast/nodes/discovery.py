"""Discovery of the pools that nodes form, and of the GPUPools that record them.

The GPUPools that discovery wrote are its memory. A pool keeps its name, its selector and the size that it can grow to
while its nodes come and go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilecast.api import gpu_pool
from tilecast.api.base import API_VERSION
from tilecast.nodes import naming
from tilecast.nodes.claims import NodeClaims, claim_nodes, selected_labels
from tilecast.nodes.devices import PublishedDevice
from tilecast.nodes.grouping import group_nodes
from tilecast.nodes.identification import NodeFacts, NodeProblem, identify_node
from tilecast.nodes.objects import Node, ResourceSlice, read_node, read_resource_slice
from tilecast.nodes.override import override_pool
from tilecast.nodes.report import FoundPool, NodesReport, OmittedNodes
from tilecast.spec import SpecError

UNSELECTED = "its nodes share no label that others lack, so that no node selector leads to them"
"""Remark on a pool whose nodes no selector selects."""


def discover_pools(
    nodes: Iterable[Mapping[str, Any] | Node],
    gpupools: Iterable[Mapping[str, Any]] = (),
    slices: Iterable[Mapping[str, Any] | ResourceSlice] = (),
    forget: Collection[str] = (),
    *,
    now: bool = False,
) -> NodesReport:
    """Return the pools that nodes form, after the GPUPools that users wrote have claimed nodes.

    A pool has one GPU product in one node shape over one kind of link at one price. It is named after its GPU, followed
    by the shape if two pools share a GPU. Once discovery has written a GPUPool, the pool keeps its name.

    Args:
        nodes: Node objects, or results of `read_node`.
        gpupools: GPUPool objects, written by users and by discovery.
        slices: ResourceSlice objects, or results of `read_resource_slice`.
        forget: names of pools of discovery whose missing nodes are gone for good.
        now: whether to count only the nodes and GPUs that a job can use now, for advice that is followed at once.
            Otherwise a pool has all nodes of the cluster, so that a node that restarts causes no new advice.

    Raises:
        SpecError: an object does not have the shape of a Node. An invalid GPUPool does not raise; it is in `invalid`.
    """
    all_nodes = [item if isinstance(item, Node) else read_node(item) for item in nodes]
    offered = _devices_by_node(slices)
    node_facts: dict[int, NodeFacts] = {}
    problems: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    others = 0
    claims, invalid = claim_nodes(all_nodes, gpupools)
    for index, item in enumerate(all_nodes):
        owner = claims.owner.get(index)
        identity = identify_node(item, claims.specs[owner] if owner else None, offered.get(item.name, ()))
        if identity is None:
            others += 1
        elif isinstance(identity, NodeProblem):
            problems[identity.code, identity.message, identity.remedy].append(item.name)
        else:
            node_facts[index] = identity
    claimed = _user_pools(claims, all_nodes, node_facts, invalid, now=now)
    discovered_pools = _discovered_pools(claims, all_nodes, node_facts, {*claims.specs, *invalid}, forget, now=now)
    left_out = tuple(OmittedNodes(*why, tuple(sorted(names))) for why, names in sorted(problems.items()))
    current = {item.pool.name for item in discovered_pools}
    obsolete = tuple(sorted(set(claims.remembered) - current))
    entries = tuple(_add_devices(item, offered) for item in (*claimed, *discovered_pools))
    return NodesReport(entries, left_out, invalid, others, obsolete)


def _add_devices(entry: FoundPool, offered: Mapping[str, Sequence[PublishedDevice]]) -> FoundPool:
    """Return the pool with the distinct devices that ResourceSlices publish for its nodes."""
    devices = dict.fromkeys(device for name in entry.members for device in offered.get(name, ()))
    return replace(entry, devices=tuple(devices))


def _devices_by_node(slices: Iterable[Mapping[str, Any] | ResourceSlice]) -> dict[str, list[PublishedDevice]]:
    """Return the devices of each node, from the newest generation of each pool of ResourceSlices."""
    known = [item if isinstance(item, ResourceSlice) else read_resource_slice(item) for item in slices]
    newest: dict[tuple[str, str], int] = defaultdict(int)
    for item in filter(None, known):
        newest[item.node, item.pool] = max(item.generation, newest[item.node, item.pool])
    devices: dict[str, list[PublishedDevice]] = defaultdict(list)
    for item in filter(None, known):
        if item.generation == newest[item.node, item.pool]:
            devices[item.node] += item.devices
    return devices


def _user_pools(
    claims: NodeClaims,
    nodes: Sequence[Node],
    node_facts: Mapping[int, NodeFacts],
    invalid: dict[str, SpecError],
    *,
    now: bool,
) -> list[FoundPool]:
    """Return the pools that users wrote, and add invalid ones to `invalid`.

    A size that a user stated is kept, whatever state the nodes are in.
    """
    pools = []
    for name in sorted(claims.specs):
        spec = claims.specs[name]
        members = [index for index, owner in claims.owner.items() if owner == name and index in node_facts]
        try:
            if members:
                observed = group_nodes(
                    members, nodes, node_facts, {}, spec.topology_keys, now=now and spec.max_nodes is None
                )
                pool, facts = override_pool(name, spec, observed.pool, observed.facts, observed.spot)
            else:
                pool, facts = override_pool(name, spec)
                observed = FoundPool(pool, 0, 0, 0, facts)
            spot = observed.spot if spec.spot is None else spec.spot
            flavor = spec.kueue_flavor or ""
            pools.append(replace(observed, pool=pool, facts=facts, spot=spot, kueue_flavor=flavor))
        except SpecError as error:
            invalid[name] = error
    return pools


def _discovered_pools(
    claims: NodeClaims,
    nodes: Sequence[Node],
    node_facts: Mapping[int, NodeFacts],
    taken: Collection[str],
    forget: Collection[str],
    *,
    now: bool,
) -> list[FoundPool]:
    """Return the pools of nodes that no user's pool owns, and remembered pools whose nodes may return.

    Args:
        claims: nodes of users' pools, and remembered pools.
        nodes: all nodes.
        node_facts: facts of the nodes with known GPUs, by position.
        taken: names of pools that users wrote.
        forget: names of pools whose missing nodes are gone for good.
        now: whether to count only nodes that a job can use now.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, facts in node_facts.items():
        if index not in claims.owner:
            groups[facts.identity].append(index)
    known: dict[str, str] = {}
    for name in sorted(claims.remembered):
        known.setdefault(claims.remembered[name][0].identity, name)
    absent = [name for name in sorted(claims.remembered) if known.get(claims.remembered[name][0].identity) != name]
    absent += [name for identity, name in known.items() if identity not in groups]
    returning = [name for name in absent if _can_return(name, claims, nodes, forget)]
    without_nodes = [_pool_without_nodes(name, *claims.remembered[name]) for name in returning]
    names = {identity: known[identity] for identity in groups if identity in known}
    old = [claims.remembered[names[identity]][1].selector if identity in names else {} for identity in groups]
    select = naming.select_groups(nodes, list(groups.values()), old)
    grouped = {
        identity: group_nodes(members, nodes, node_facts, select[position], now=now)
        for position, (identity, members) in enumerate(groups.items())
    }
    new = {identity: item for identity, item in grouped.items() if identity not in names}
    used = {*taken, *names.values(), *(item.pool.name for item in without_nodes)}
    names |= dict(zip(new, naming.name_pools(list(new.values()), used), strict=True))
    out = list(without_nodes)
    for identity, item in grouped.items():
        name, most = names[identity], item.pool.max_nodes
        if name not in forget and identity in known:
            away = item.unusable if now else 0
            most = max(most, (claims.remembered[name][1].max_nodes or 0) - away)
        pool = replace(item.pool, name=name, max_nodes=most)
        remarks = item.remarks if pool.node_selector or len(grouped) == 1 else (*item.remarks, UNSELECTED)
        note = gpu_pool.Discovery(identity, node_facts[groups[identity][0]].gpu_source)
        out.append(replace(item, pool=pool, note=note, remarks=remarks))
    return sorted(out, key=lambda item: item.pool.name)


def _can_return(name: str, claims: NodeClaims, nodes: Sequence[Node], forget: Collection[str]) -> bool:
    """Return whether a remembered pool without nodes may have nodes again.

    It may not if it is forgotten, selects no nodes or has no size. It may not either if a user's pool would claim nodes
    with its labels, or if an existing node matches its selector.
    """
    spec = claims.remembered[name][1]
    labels = {**selected_labels(spec), **({gpu_pool.NODE_TYPE_LABEL: spec.node_type} if spec.node_type else {})}
    if name in forget or not labels or not spec.max_nodes:
        return False
    if any((own := selected_labels(mine)) and own.items() <= labels.items() for mine in claims.specs.values()):
        return False
    return not any(spec.selector.items() <= item.labels.items() for item in nodes)


def _pool_without_nodes(name: str, note: gpu_pool.Discovery, spec: gpu_pool.GPUPoolSpec) -> FoundPool:
    """Return a remembered pool that has no nodes now."""
    pool, facts = override_pool(name, spec, source="discovered")
    return FoundPool(pool, 0, 0, 0, facts, note=note, spot=bool(spec.spot))


def gpupool_document(source: FoundPool) -> dict[str, Any] | None:
    """Return the GPUPool document that discovery writes for a pool; None for a pool that a user wrote."""
    if source.note is None:
        return None
    pool = source.pool
    spec: dict[str, Any] = {
        "selector": dict(sorted(pool.node_selector.items())),
        "gpu": {"name": pool.gpu.name},
        "gpusPerNode": pool.gpus_per_node,
        "nodeType": pool.node_type or None,
        "maxNodes": pool.max_nodes,
        "links": {"interNode": pool.inter.name},
        "tolerations": [dict(item) for item in pool.tolerations[:16]] or None,
        "spot": source.spot or None,
    }
    present = {key: value for key, value in spec.items() if value is not None}
    checked = gpu_pool.parse_gpu_pool({**_ENVELOPE, "metadata": {"name": pool.name}, "spec": present})[1]
    return gpu_pool.discovered_pool(pool.name, checked, source.note)


_ENVELOPE = {"apiVersion": API_VERSION, "kind": gpu_pool.KIND}
