"""Discover the pools that nodes form, and write GPUPools that record them.

Discovery reads the GPUPools that it wrote before. So a pool keeps its name, its selector and its largest size while its
nodes come and go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilecast.api import gpu_pool
from tilecast.api.base import API_VERSION
from tilecast.nodes import naming
from tilecast.nodes.claims import ExistingPools, assign_nodes, get_selected_labels
from tilecast.nodes.devices import PublishedDevice
from tilecast.nodes.grouping import build_pool_of_nodes
from tilecast.nodes.identification import NodeProblem, NodeProperties, identify_node
from tilecast.nodes.objects import Node, ResourceSlice, read_node, read_resource_slice
from tilecast.nodes.override import override_pool
from tilecast.nodes.report import FoundPool, NodesReport, OmittedNodes
from tilecast.spec import SpecError

UNSELECTED = "no label sets the nodes apart from all others, so that no node selector leads to them"
"""Remark on a pool whose nodes no selector can select."""


def discover_pools(
    nodes: Iterable[Mapping[str, Any] | Node],
    gpupools: Iterable[Mapping[str, Any]] = (),
    slices: Iterable[Mapping[str, Any] | ResourceSlice] = (),
    forgotten_pools: Collection[str] = (),
    *,
    usable_only: bool = False,
) -> NodesReport:
    """Return the GPU pools of a cluster: one per GPUPool of a user, and the pools that all other nodes form.

    Nodes form one pool if they have the same GPU, number of GPUs, network and price. A pool is named after its GPU,
    followed by its number of GPUs per node if two pools have the same GPU.

    Args:
        nodes: Node objects, or results of `read_node`.
        gpupools: GPUPool objects, written by users and by discovery.
        slices: ResourceSlice objects, or results of `read_resource_slice`.
        forgotten_pools: names of discovered pools whose missing nodes will not return.
        usable_only: whether to count only the nodes and GPUs that a job can use now. Otherwise all nodes are counted.

    Raises:
        SpecError: an object is not a valid Node. Invalid GPUPools are returned in `invalid` instead.
    """
    all_nodes = [item if isinstance(item, Node) else read_node(item) for item in nodes]
    offered = _group_devices_by_node(slices)
    node_properties: dict[int, NodeProperties] = {}
    problems: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    others = 0
    claims, invalid = assign_nodes(all_nodes, gpupools)
    for index, item in enumerate(all_nodes):
        owner = claims.owner.get(index)
        identity = identify_node(item, claims.specs[owner] if owner else None, offered.get(item.name, ()))
        if identity is None:
            others += 1
        elif isinstance(identity, NodeProblem):
            problems[identity.code, identity.message, identity.remedy].append(item.name)
        else:
            node_properties[index] = identity
    claimed = _list_user_pools(claims, all_nodes, node_properties, invalid, usable_only=usable_only)
    discovered_pools = _list_discovered_pools(
        claims, all_nodes, node_properties, {*claims.specs, *invalid}, forgotten_pools, usable_only=usable_only
    )
    left_out = tuple(OmittedNodes(*why, tuple(sorted(names))) for why, names in sorted(problems.items()))
    current = {item.pool.name for item in discovered_pools}
    obsolete = tuple(sorted(set(claims.remembered) - current))
    entries = tuple(_add_devices(item, offered) for item in (*claimed, *discovered_pools))
    return NodesReport(entries, left_out, invalid, others, obsolete)


def _add_devices(entry: FoundPool, offered: Mapping[str, Sequence[PublishedDevice]]) -> FoundPool:
    """Return the pool with the distinct devices of its nodes.

    Args:
        entry: the pool without devices.
        offered: the devices that ResourceSlices publish, by node name.
    """
    devices = dict.fromkeys(device for name in entry.members for device in offered.get(name, ()))
    return replace(entry, devices=tuple(devices))


def _group_devices_by_node(slices: Iterable[Mapping[str, Any] | ResourceSlice]) -> dict[str, list[PublishedDevice]]:
    """Return devices by node name. Only the newest generation of each pool of ResourceSlices is used."""
    known = [item if isinstance(item, ResourceSlice) else read_resource_slice(item) for item in slices]
    newest: dict[tuple[str, str], int] = defaultdict(int)
    for item in filter(None, known):
        newest[item.node, item.pool] = max(item.generation, newest[item.node, item.pool])
    devices: dict[str, list[PublishedDevice]] = defaultdict(list)
    for item in filter(None, known):
        if item.generation == newest[item.node, item.pool]:
            devices[item.node] += item.devices
    return devices


def _list_user_pools(
    existing: ExistingPools,
    nodes: Sequence[Node],
    node_properties: Mapping[int, NodeProperties],
    invalid: dict[str, SpecError],
    *,
    usable_only: bool,
) -> list[FoundPool]:
    """Return the pools of the GPUPools that users wrote. Errors of invalid GPUPools are added to `invalid`.

    The number of nodes that a user wrote is used, even if some nodes cannot be used.
    """
    pools = []
    for name in sorted(existing.specs):
        spec = existing.specs[name]
        members = [index for index, owner in existing.owner.items() if owner == name and index in node_properties]
        try:
            if members:
                observed = build_pool_of_nodes(
                    members,
                    nodes,
                    node_properties,
                    {},
                    spec.topology_keys,
                    usable_only=usable_only and spec.max_nodes is None,
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


def _list_discovered_pools(
    existing: ExistingPools,
    nodes: Sequence[Node],
    node_properties: Mapping[int, NodeProperties],
    used_names: Collection[str],
    forgotten_pools: Collection[str],
    *,
    usable_only: bool,
) -> list[FoundPool]:
    """Return the pools of nodes that no GPUPool of a user selects, and earlier pools whose nodes may return.

    Args:
        existing: the GPUPools of users with their nodes, and the GPUPools that discovery wrote earlier.
        nodes: all nodes.
        node_properties: properties of the nodes with known GPUs, by position in `nodes`.
        used_names: names of GPUPools that users wrote.
        forgotten_pools: names of discovered pools whose missing nodes will not return.
        usable_only: whether to count only nodes that a job can use now.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, facts in node_properties.items():
        if index not in existing.owner:
            groups[facts.identity].append(index)
    known: dict[str, str] = {}
    for name in sorted(existing.remembered):
        known.setdefault(existing.remembered[name][0].identity, name)
    absent = [name for name in sorted(existing.remembered) if known.get(existing.remembered[name][0].identity) != name]
    absent += [name for identity, name in known.items() if identity not in groups]
    returning = [name for name in absent if _can_get_nodes(name, existing, nodes, forgotten_pools)]
    without_nodes = [_build_pool_without_nodes(name, *existing.remembered[name]) for name in returning]
    names = {identity: known[identity] for identity in groups if identity in known}
    old = [existing.remembered[names[identity]][1].selector if identity in names else {} for identity in groups]
    select = naming.choose_selectors(nodes, list(groups.values()), old)
    grouped = {
        identity: build_pool_of_nodes(members, nodes, node_properties, select[position], usable_only=usable_only)
        for position, (identity, members) in enumerate(groups.items())
    }
    new = {identity: item for identity, item in grouped.items() if identity not in names}
    used = {*used_names, *names.values(), *(item.pool.name for item in without_nodes)}
    names |= dict(zip(new, naming.choose_pool_names(list(new.values()), used), strict=True))
    out = list(without_nodes)
    for identity, item in grouped.items():
        name, most = names[identity], item.pool.max_nodes
        if name not in forgotten_pools and identity in known:
            away = item.unusable if usable_only else 0
            most = max(most, (existing.remembered[name][1].max_nodes or 0) - away)
        pool = replace(item.pool, name=name, max_nodes=most)
        remarks = item.remarks if pool.node_selector or len(grouped) == 1 else (*item.remarks, UNSELECTED)
        note = gpu_pool.Discovery(identity, node_properties[groups[identity][0]].gpu_source)
        out.append(replace(item, pool=pool, note=note, remarks=remarks))
    return sorted(out, key=lambda item: item.pool.name)


def _can_get_nodes(name: str, existing: ExistingPools, nodes: Sequence[Node], forgotten_pools: Collection[str]) -> bool:
    """Return whether a pool that discovery recorded earlier, and that has no nodes now, may get nodes again.

    The pool cannot get nodes if its name is in `forgotten_pools`, if its GPUPool has no labels or no size, if a GPUPool
    of a user selects nodes with these labels, or if an existing node matches its selector.
    """
    spec = existing.remembered[name][1]
    labels = {**get_selected_labels(spec), **({gpu_pool.NODE_TYPE_LABEL: spec.node_type} if spec.node_type else {})}
    if name in forgotten_pools or not labels or not spec.max_nodes:
        return False
    if any((own := get_selected_labels(mine)) and own.items() <= labels.items() for mine in existing.specs.values()):
        return False
    return not any(spec.selector.items() <= item.labels.items() for item in nodes)


def _build_pool_without_nodes(name: str, note: gpu_pool.Discovery, spec: gpu_pool.GPUPoolSpec) -> FoundPool:
    """Return a pool without nodes from its record `note` and from the spec that discovery wrote."""
    pool, facts = override_pool(name, spec, source="discovered")
    return FoundPool(pool, 0, 0, 0, facts, note=note, spot=bool(spec.spot))


def gpupool_document(source: FoundPool) -> dict[str, Any] | None:
    """Return the GPUPool document that discovery writes for a pool. If a user wrote the pool, return None."""
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
    return gpu_pool.build_discovered_pool(pool.name, checked, source.note)


_ENVELOPE = {"apiVersion": API_VERSION, "kind": gpu_pool.KIND}
