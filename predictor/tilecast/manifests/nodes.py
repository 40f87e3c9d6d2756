"""Nodes to pools: which GPUs a cluster has, in which shapes, over which links.

Facts come in layers, the first that answers wins: a GPUPool that a user wrote, the devices of ResourceSlices, the
labels of `labels.toml` (GPU Feature Discovery, then the clouds'), the instance types of `hardware/nodes`. Where none
answers the node is left out and the report says why; nothing is guessed but the network, and then the layer says
`default`.

Whether a node is ready, cordoned or busy does not matter here: a pool is what the cluster has, not what is free.
GPUPools that discovery made are its memory: a pool keeps its name and its selector, and what it can grow to, while
its nodes come and go.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import combinations
from sys import intern
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict

from tilecast.calibration import Calibration
from tilecast.hardware import Gpu, Link, Pool, find_gpu, find_link, find_slice, normalise
from tilecast.manifests import documents, gpupool
from tilecast.manifests.door import API_VERSION, shown
from tilecast.manifests.instances import NodeType, default_network, ethernet, node_types
from tilecast.spec import SpecError

RESOURCE_SLICE = "resource-slice"
"""Layer of what a DRA driver publishes."""
MEMORY_TOLERANCE = 0.1
"""Two sources state the same GPU's memory up to 7 % apart (L4: 22888, 23034 and 24576 MiB)."""


@dataclass(frozen=True, slots=True)
class Node:
    """What matters of a Node object; small enough to keep thousands of."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[tuple[str, str, str], ...]
    """(key, value, effect), those that come and go with the node's state left out."""
    gpus: int | None
    """Whole GPUs by the device plugin; None if there is none."""
    allocatable: int
    other_devices: tuple[str, ...]
    """Extended resources that are slices of GPUs, or GPUs of other makers."""
    slices: tuple[tuple[str, int, int], ...] = ()
    """MIG slices that it offers by profile: (profile, how many, how many that pods may use)."""
    schedulable: bool = True
    """Whether new pods can start on it now: ready and not cordoned. It decides what is free, never a pool."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What matters of a ResourceSlice: the GPUs that a DRA driver offers on a node."""

    name: str
    node: str
    pool: str
    generation: int
    """A pool's slices of older generations are void."""
    devices: tuple[tuple[str, str], ...]
    """(kind, product name) of each device; the kind is that of labels.toml, whole or slice."""


@dataclass(frozen=True, slots=True)
class Level:
    """How nodes lie under one topology label: distinct values, and most nodes that share one."""

    key: str
    domains: int
    largest: int


@dataclass(frozen=True, slots=True)
class FoundPool:
    """A pool with the nodes behind it. `facts` holds value and layer of each fact."""

    pool: Pool
    nodes: int
    gpus_total: int
    gpus_allocatable: int
    facts: gpupool.Facts
    members: tuple[str, ...] = ()
    """Names of those nodes, sorted."""
    note: gpupool.Discovery | None = None
    """What discovery knows it by; None for a pool that a user wrote."""
    spot: bool = False
    kueue_flavor: str = ""
    """As its user wrote it; empty where it is to be found by the nodes' labels."""
    topology: tuple[Level, ...] = ()
    """Topology labels that the nodes carry, nearest first."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """GPU nodes that no pool has, and why. `code` is one of UnknownAccelerator, MigPartitioned, SharedGpu,
    VirtualGpu."""

    code: str
    message: str
    remedy: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodesReport:
    """What a list of nodes and GPUPools amounts to."""

    found: tuple[FoundPool, ...]
    left_out: tuple[LeftOut, ...]
    invalid: Mapping[str, SpecError]
    """GPUPools that cannot be meant, by name."""
    other_nodes: int
    """Nodes without GPUs."""
    obsolete: tuple[str, ...] = ()
    """GPUPools of discovery whose nodes are in another pool now, or gone for good."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(item.pool for item in self.found)

    def calibrated(self, table: Calibration) -> NodesReport:
        """The same, with what a cluster's runs teach about every pool."""
        found = (replace(item, pool=replace(item.pool, calibration=table)) for item in self.found)
        return replace(self, found=tuple(found))

    def require(self) -> tuple[Pool, ...]:
        """The pools, for a caller that cannot go on without.

        Raises:
            SpecError: a GPUPool is wrong, or there is no pool; the message says what was left out and why.
        """
        for name, error in self.invalid.items():
            raise SpecError(f"GPUPool {name}: {error.field}", error.problem, error.remedy)
        if self.found:
            return self.pools
        if self.left_out:
            first = self.left_out[0]
            raise SpecError("nodes", f"no usable GPU: on {len(first.nodes)} nodes {first.message}", first.remedy)
        count = f"none of the {self.other_nodes} nodes has a GPU" if self.other_nodes else "the list holds no node"
        raise SpecError("nodes", count, "give nodes with GPU labels, or a GPUPool with nodeType and maxNodes")


Documents: TypeAlias = list[documents.Document]


def parse(text: str, name: str = "nodes") -> tuple[Documents, Documents, Documents]:
    """Node, GPUPool and ResourceSlice documents of a YAML or JSON text, as `kubectl get nodes,gpupools -o json` prints
    them.

    Raises:
        SpecError: the text is not YAML, or holds another kind.
    """
    found: dict[str, Documents] = {"Node": [], gpupool.KIND: [], "ResourceSlice": []}
    for index, document in enumerate(documents.load(text, name)):
        kind = document.get("kind")
        if not isinstance(kind, str) or kind not in found:
            remedy = "give Node, GPUPool and ResourceSlice objects, as `kubectl get nodes,gpupools -o json` prints them"
            raise SpecError(f"{name}: document {index + 1}", f"kind {shown(kind)} is not a node", remedy)
        found[kind].append(document)
    return found["Node"], found[gpupool.KIND], found["ResourceSlice"]


def node(document: Mapping[str, Any]) -> Node:
    """The part of a Node object that decides its pool.

    Raises:
        SpecError: the object is not shaped like a Node.
    """
    metadata = _mapping(document, "metadata", "node")
    name = str(metadata.get("name", ""))[:253]
    where = f"node {shown(name, quote=False)}"
    status, spec = _mapping(document, "status", where), _mapping(document, "spec", where)
    capacity = _mapping(status, "capacity", f"{where}: status")
    allocatable = _mapping(status, "allocatable", f"{where}: status")
    table = _labels()
    taints = spec.get("taints") or []
    if not isinstance(taints, list) or not all(isinstance(item, Mapping) for item in taints):
        raise SpecError(
            f"{where}: spec.taints", "is not a list of mappings", "give the node as the API server prints it"
        )
    devices = (
        resource
        for resource in capacity
        if (resource.startswith(table.mig_resource_prefix) or resource in table.other_gpu_resources)
        and _count(capacity[resource])
    )
    slices = {
        resource.removeprefix(table.mig_resource_prefix): (count, _count(allocatable.get(resource)) or 0)
        for resource, value in capacity.items()
        if resource.startswith(table.mig_resource_prefix) and (count := _count(value))
    }
    conditions = status.get("conditions")
    is_ready = all(
        item.get("status") == "True"
        for item in (conditions if isinstance(conditions, list) else ())
        if isinstance(item, Mapping) and item.get("type") == "Ready"
    )
    labels = _mapping(metadata, "labels", f"{where}: metadata")
    return Node(
        name=name,
        # Thousands of nodes share most of their labels.
        labels={intern(str(key)): intern(_text(value)) for key, value in labels.items()},
        taints=tuple(
            sorted(
                (str(item.get("key", "")), _text(item.get("value") or ""), str(item.get("effect", "")))
                for item in taints
                if not table.transient_taints.matches(str(item.get("key", "")))
            )
        ),
        gpus=_count(capacity.get(table.gpu_resource)),
        allocatable=_count(allocatable.get(table.gpu_resource)) or 0,
        other_devices=tuple(sorted(devices)),
        slices=tuple((profile, *counts) for profile, counts in sorted(slices.items())),
        schedulable=is_ready and not spec.get("unschedulable"),
    )


def resource_slice(document: Mapping[str, Any]) -> Slice | None:
    """The part of a ResourceSlice that says which GPUs a node has; None if it is of another driver, or of no node.

    Every version of the API is read: attributes lie in the device, or below its `basic`.

    Raises:
        SpecError: the object is not shaped like a ResourceSlice.
    """
    metadata, spec = _mapping(document, "metadata", "resourceslice"), _mapping(document, "spec", "resourceslice")
    name, table = str(metadata.get("name", ""))[:253], _labels()
    if spec.get("driver") != table.dra_driver or not spec.get("nodeName"):
        return None
    where = f"resourceslice {shown(name, quote=False)}"
    owner = _mapping(spec, "pool", f"{where}: spec")
    devices = spec.get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(item, Mapping) for item in devices):
        remedy = "give the slice as the API server prints it"
        raise SpecError(f"{where}: spec.devices", "is not a list of mappings", remedy)
    found = []
    for device in devices:
        attributes = _mapping(_mapping(device, "basic", where) or device, "attributes", f"{where}: device")
        kind, product = (_mapping(attributes, key, where).get("string") for key in ("type", "productName"))
        found.append((intern(str(kind or table.dra_whole)), intern(str(product or ""))))
    return Slice(
        name,
        intern(str(spec["nodeName"])[:253]),
        str(owner.get("name", ""))[:253],
        _count(owner.get("generation")) or 0,
        tuple(sorted(found)),
    )


def pools(
    nodes: Iterable[Mapping[str, Any] | Node],
    gpupools: Iterable[Mapping[str, Any]] = (),
    slices: Iterable[Mapping[str, Any] | Slice] = (),
    forget: Collection[str] = (),
) -> NodesReport:
    """The pools that these nodes form, after the GPUPools that users wrote took theirs.

    One pool is one GPU product in one node shape over one kind of link at one price. It is named after its GPU,
    with the shape behind it where two pools share a GPU; once discovery has written it down it keeps that name.

    Args:
        nodes: Node objects, or what `node` made of them.
        gpupools: GPUPool objects, those that users wrote and those that discovery did.
        slices: ResourceSlice objects, or what `resource_slice` made of them.
        forget: names of discovery's pools whose missing nodes are gone for good.

    Raises:
        SpecError: an object is not shaped like a Node. A wrong GPUPool does not raise, it is in `invalid`.
    """
    everyone = [item if isinstance(item, Node) else node(item) for item in nodes]
    offered = _offered(slices)
    looks: dict[int, _Look] = {}
    problems: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    others = 0
    claims, invalid = _claims(everyone, gpupools)
    for index, item in enumerate(everyone):
        claim = claims.owner.get(index)
        look = _look(item, claims.specs[claim] if claim else None, offered.get(item.name, ()))
        if look is None:
            others += 1
        elif isinstance(look, _Problem):
            problems[look.code, look.message, look.remedy].append(item.name)
        else:
            looks[index] = look
    claimed = _claimed(claims, everyone, looks, invalid)
    discovered = _discovered(claims, everyone, looks, {*claims.specs, *invalid}, forget)
    left_out = tuple(LeftOut(*why, tuple(sorted(names))) for why, names in sorted(problems.items()))
    kept = {item.pool.name for item in discovered}
    obsolete = tuple(sorted(set(claims.remembered) - kept))
    return NodesReport((*claimed, *discovered), left_out, invalid, others, obsolete)


def _offered(slices: Iterable[Mapping[str, Any] | Slice]) -> dict[str, list[tuple[str, str]]]:
    """Devices of each node, by the newest generation of each pool of slices."""
    found = [one for item in slices if (one := item if isinstance(item, Slice) else resource_slice(item)) is not None]
    newest: dict[tuple[str, str], int] = {}
    for item in found:
        newest[item.node, item.pool] = max(item.generation, newest.get((item.node, item.pool), 0))
    out: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for item in found:
        if item.generation == newest[item.node, item.pool]:
            out[item.node] += item.devices
    return out


@dataclass(frozen=True, slots=True)
class _Look:
    """What the layers say about one node."""

    gpu: Gpu
    gpus: int
    inter: Link
    kind: NodeType | None
    spot: bool
    gpu_layer: str
    count_layer: str
    inter_layer: str

    @property
    def price(self) -> float | None:
        """List price of one GPU, or of a slice's share of one; those of spot nodes change by the hour and are not known
        here."""
        price = None if self.kind is None or self.spot else self.kind.price_per_gpu_hour
        return None if price is None else price * self.gpu.share

    @property
    def identity(self) -> str:
        """What nodes of one pool share."""
        market = "spot" if self.spot else "no price" if self.price is None else f"{self.price:.6g}"
        return f"{self.gpus} x {self.gpu.name}, {self.inter.name}, {market}"


@dataclass(frozen=True, slots=True)
class _Problem:
    code: str
    message: str
    remedy: str


@dataclass(slots=True)
class _Claims:
    """Which GPUPool owns which node, and what discovery remembers."""

    specs: dict[str, gpupool.GPUPoolSpec] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    remembered: dict[str, tuple[gpupool.Discovery, gpupool.GPUPoolSpec]] = field(default_factory=dict)

    def members(self, name: str) -> list[int]:
        return [index for index, owner in self.owner.items() if owner == name]


def _claims(nodes: Sequence[Node], gpupools: Iterable[Mapping[str, Any]]) -> tuple[_Claims, dict[str, SpecError]]:
    claims, invalid = _Claims(), {}
    for position, document in enumerate(gpupools):
        try:
            name, spec = gpupool.parse(document)
        except SpecError as error:
            metadata = document.get("metadata")
            given = metadata.get("name") if isinstance(metadata, Mapping) else None
            invalid[str(given or position + 1)[:253]] = error
        else:
            note = gpupool.discovery(document, spec)
            if note is None:
                claims.specs[name] = spec
            else:
                claims.remembered[name] = (note, spec)
    for name in sorted(claims.specs):
        wanted = _wanted(claims.specs[name])
        for index, item in enumerate(nodes):
            if wanted and index not in claims.owner and wanted.items() <= item.labels.items():
                claims.owner[index] = name
    return claims, invalid


def _wanted(spec: gpupool.GPUPoolSpec) -> Mapping[str, str]:
    """Labels of the nodes that a pool takes; none where it has no nodes of its own."""
    return spec.selector or ({gpupool.NODE_TYPE_LABEL: spec.node_type} if spec.node_type else {})


def _look(item: Node, spec: gpupool.GPUPoolSpec | None, devices: Sequence[tuple[str, str]]) -> _Look | _Problem | None:
    """What a node is; None if it has no GPU."""
    table = _labels()
    whole = [product for kind, product in devices if kind == table.dra_whole]
    if not whole and any(kind == table.dra_slice for kind, _ in devices):
        remedy = "disable MIG on the nodes meant for training"
        return _Problem("MigPartitioned", "the GPUs are cut into MIG slices (ResourceSlice)", remedy)
    profile = _profile(item, spec)
    for rule in table.partitioned:
        if rule.matches(item.labels.get(rule.label)) and not (profile and rule.code == "MigPartitioned"):
            return _Problem(rule.code, rule.message, rule.remedy)
    if item.slices and not profile:
        names = ", ".join(f"{table.mig_resource_prefix}{name}" for name, *_ in item.slices)
        remedy = "select them with a GPUPool that states mig, or disable MIG on the nodes meant for training"
        return _Problem("MigPartitioned", f"the GPUs are cut into MIG slices ({names})", remedy)
    kind = node_types().get(_node_type(item))
    named = next((layer for layer in table.layer if layer.product in item.labels), None)
    gpu, gpu_layer = _identify(item, spec, kind, whole)
    if gpu is None:
        if whole:
            products = ", ".join(shown(product) for product in sorted(set(whole))[:3])
            return _Problem("UnknownAccelerator", f"no facts for {products} of the ResourceSlices", _WRITE_POOL)
        if item.other_devices and not item.gpus:
            return _Problem("UnknownAccelerator", f"the accelerator is {item.other_devices[0]}", _WRITE_POOL)
        if named is not None:
            text = f"no facts for {shown(item.labels[named.product])} of label {named.product}"
            return _Problem("UnknownAccelerator", text, _WRITE_POOL)
        if item.gpus:
            return _Problem("UnknownAccelerator", "no label says which GPU they have", _INSTALL)
        return None
    if profile and not gpu.mig:
        try:
            gpu = find_slice(gpu, profile)
        except SpecError as error:
            return _Problem("MigPartitioned", error.problem, error.remedy)
    cut = {name: count for name, count, _ in item.slices}
    if gpu.mig in cut:
        gpus, count_layer = cut[gpu.mig], "capacity"
    elif item.gpus:
        gpus, count_layer = item.gpus, "capacity"
    elif whole:
        gpus, count_layer = len(whole), RESOURCE_SLICE
    elif named is not None and _count(item.labels.get(named.count)):
        gpus, count_layer = _count(item.labels.get(named.count)) or 0, named.name
    elif kind is not None:
        gpus, count_layer = kind.gpus, "instance type"
    elif spec is not None and spec.gpus_per_node:
        gpus, count_layer = spec.gpus_per_node, "override"
    else:
        return _Problem("UnknownAccelerator", f"nothing says how many {gpu.name} a node has", _INSTALL)
    rate = next((layer.network_mbit_per_s for layer in table.layer if layer.network_mbit_per_s in item.labels), None)
    if kind is not None:
        inter, inter_layer = kind.inter, "instance type"
    elif rate is not None and _count(item.labels[rate]):
        inter, inter_layer = ethernet((_count(item.labels[rate]) or 0) / 1000), "karpenter"
    else:
        inter, inter_layer = default_network(gpu, gpus), "default"
    spot = any(item.labels.get(mark.label) == mark.value for mark in table.spot)
    return _Look(gpu, gpus, inter, kind, spot, gpu_layer, count_layer, inter_layer)


def _profile(item: Node, spec: gpupool.GPUPoolSpec | None) -> str | None:
    """The MIG profile whose slices a node offers; None where its GPUs are whole, or cut into several kinds of which
    nothing chooses one."""
    if spec is not None and spec.mig is not None:
        return spec.mig
    table = _labels()
    for layer in table.layer:
        _, cut, profile = item.labels.get(layer.product, "").partition("-MIG-")
        if cut:
            return profile
    for label in table.mig_profile_labels:
        if item.labels.get(label):
            return item.labels[label]
    return item.slices[0][0] if len(item.slices) == 1 and not item.gpus else None


_WRITE_POOL = "write a GPUPool that selects them and states the GPU"
_INSTALL = "install GPU Feature Discovery, or write a GPUPool that selects them"


def _identify(
    item: Node, spec: gpupool.GPUPoolSpec | None, kind: NodeType | None, whole: Sequence[str]
) -> tuple[Gpu | None, str]:
    if spec is not None and spec.gpu is not None:
        try:
            return spec.gpu.gpu(), "override"
        except SpecError:
            return None, ""
    if whole:
        try:
            return (find_gpu(whole[0]), RESOURCE_SLICE) if len(set(whole)) == 1 else (None, "")
        except SpecError:
            return None, ""
    for layer in _labels().layer:
        product = item.labels.get(layer.product)
        name = None if product is None else layer.gpu_name(product, _count(item.labels.get(layer.memory_mib)))
        if name is not None:
            try:
                return find_gpu(name), layer.name
            except SpecError:
                continue
    if kind is not None:
        return find_gpu(kind.gpu), "instance type"
    return None, ""


def _discovered(
    claims: _Claims, nodes: Sequence[Node], looks: Mapping[int, _Look], taken: Collection[str], forget: Collection[str]
) -> list[FoundPool]:
    """The pools of nodes that no user's pool has, and those that discovery remembers without nodes."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, look in looks.items():
        if index not in claims.owner:
            groups[look.identity].append(index)
    known: dict[str, str] = {}
    for name in sorted(claims.remembered):
        known.setdefault(claims.remembered[name][0].identity, name)
    absent = [name for name in sorted(claims.remembered) if known.get(claims.remembered[name][0].identity) != name]
    absent += [name for identity, name in known.items() if identity not in groups]
    asleep = [_asleep(name, *claims.remembered[name]) for name in absent if _can_return(name, claims, nodes, forget)]
    names = {identity: known[identity] for identity in groups if identity in known}
    old = [claims.remembered[names[identity]][1].selector if identity in names else {} for identity in groups]
    select = _selectors(nodes, list(groups.values()), old)
    found = {
        identity: _group(members, nodes, looks, select[position])
        for position, (identity, members) in enumerate(groups.items())
    }
    new = {identity: item for identity, item in found.items() if identity not in names}
    used = {*taken, *names.values(), *(item.pool.name for item in asleep)}
    names |= dict(zip(new, _names(list(new.values()), used), strict=True))
    out = list(asleep)
    for identity, item in found.items():
        name, most = names[identity], item.nodes
        if name not in forget and identity in known:
            most = max(most, claims.remembered[name][1].max_nodes or 0)
        layer = looks[groups[identity][0]].gpu_layer
        pool = replace(item.pool, name=name, max_nodes=most)
        out.append(replace(item, pool=pool, note=gpupool.Discovery(identity, layer)))
    return sorted(out, key=lambda item: item.pool.name)


def _can_return(name: str, claims: _Claims, nodes: Sequence[Node], forget: Collection[str]) -> bool:
    """Whether a remembered pool without nodes may have nodes again: none that exists, nor any that a user's pool
    would take, carries its labels."""
    spec = claims.remembered[name][1]
    labels = {**_wanted(spec), **({gpupool.NODE_TYPE_LABEL: spec.node_type} if spec.node_type else {})}
    if name in forget or not labels or not spec.max_nodes:
        return False
    if any((wanted := _wanted(mine)) and wanted.items() <= labels.items() for mine in claims.specs.values()):
        return False
    return not any(spec.selector.items() <= item.labels.items() for item in nodes)


def _asleep(name: str, note: gpupool.Discovery, spec: gpupool.GPUPoolSpec) -> FoundPool:
    """A remembered pool that has no nodes now."""
    pool, facts = gpupool.override(name, spec, layer="discovered")
    spot = bool(spec.spot)
    return FoundPool(pool, 0, 0, 0, facts, note=note, spot=spot)


def discovered(found: FoundPool) -> dict[str, Any] | None:
    """The GPUPool that discovery writes for a pool; None for one that a user wrote."""
    if found.note is None:
        return None
    pool = found.pool
    spec: dict[str, Any] = {
        "selector": dict(sorted(pool.node_selector.items())),
        "gpu": {"name": pool.gpu.name},
        "gpusPerNode": pool.gpus_per_node,
        "nodeType": pool.node_type or None,
        "maxNodes": pool.max_nodes,
        "links": {"interNode": pool.inter.name},
        "tolerations": [dict(item) for item in pool.tolerations[:16]] or None,
        "spot": found.spot or None,
    }
    present = {key: value for key, value in spec.items() if value is not None}
    checked = gpupool.parse({**_ENVELOPE, "metadata": {"name": pool.name}, "spec": present})[1]
    return gpupool.discovered(pool.name, checked, found.note)


_ENVELOPE = {"apiVersion": API_VERSION, "kind": gpupool.KIND}


def _group(
    members: Sequence[int],
    nodes: Sequence[Node],
    looks: Mapping[int, _Look],
    selector: Mapping[str, str],
    keys: Sequence[str] = (),
) -> FoundPool:
    first = looks[members[0]]
    types = {_node_type(nodes[index]) for index in members}
    gpus_per_node = min(looks[index].gpus for index in members)
    intra, domain_layer = _inside([nodes[index] for index in members], first.gpu, gpus_per_node)
    facts: gpupool.Facts = {
        "gpu": (first.gpu.name, first.gpu_layer),
        "gpusPerNode": (str(first.gpus), first.count_layer),
        "intraNode": (intra.name, "gpu"),
        "interNode": (first.inter.name, first.inter_layer),
    }
    if domain_layer:
        facts["nvlinkDomain"] = (str(intra.domain), domain_layer)
    currency = first.kind.currency if first.kind else "USD"
    if first.price is not None:
        facts["price"] = (f"{first.price:g} {currency}", "instance type")
    taints = sorted({taint for index in members for taint in nodes[index].taints if taint[2] != "PreferNoSchedule"})
    pool = Pool(
        name=first.gpu.name,
        gpu=first.gpu,
        gpus_per_node=gpus_per_node,
        max_nodes=len(members),
        intra=intra,
        inter=first.inter,
        node_type=types.pop() if len(types) == 1 else "",
        node_selector=selector,
        tolerations=tuple(_toleration(*taint) for taint in taints),
        price_per_gpu_hour=first.price,
        currency=currency,
        layers={name: layer for name, (_, layer) in facts.items()},
    )
    return FoundPool(
        pool,
        nodes=len(members),
        gpus_total=sum(looks[index].gpus for index in members),
        gpus_allocatable=sum(_allocatable(nodes[index], looks[index]) for index in members),
        facts=facts,
        members=tuple(sorted(nodes[index].name for index in members)),
        spot=all(looks[index].spot for index in members),
        topology=_levels([nodes[index] for index in members], keys or _labels().topology.keys),
    )


def _inside(members: Sequence[Node], gpu: Gpu, gpus_per_node: int) -> tuple[Link, str]:
    """The link between the GPUs of a node and, where it joins nodes, the layer that says how many: their cliques, once
    these show that a domain is smaller or larger than the product's."""
    intra, key = find_link(gpu.intra_link), _labels().nvlink_clique
    if gpu.mig or intra.beyond is not None or intra.domain <= gpus_per_node:
        return intra, ""
    cliques = Counter(item.labels[key] for item in members if item.labels.get(key))
    largest = max(cliques.values(), default=0) * gpus_per_node
    if len(cliques) > 1 or largest > intra.domain:
        return replace(intra, domain=largest), key
    return intra, "gpu"


def _allocatable(item: Node, look: _Look) -> int:
    """GPUs or slices that pods may use; a DRA driver's are not among the node's extended resources."""
    if look.count_layer == RESOURCE_SLICE:
        return look.gpus
    return next((usable for profile, _, usable in item.slices if profile == look.gpu.mig), item.allocatable)


def _levels(members: Sequence[Node], keys: Iterable[str]) -> tuple[Level, ...]:
    found = ((key, Counter(item.labels[key] for item in members if key in item.labels)) for key in keys)
    return tuple(Level(key, len(counts), max(counts.values())) for key, counts in found if counts)[:16]


def _claimed(
    claims: _Claims, nodes: Sequence[Node], looks: Mapping[int, _Look], invalid: dict[str, SpecError]
) -> list[FoundPool]:
    found = []
    for name in sorted(claims.specs):
        spec = claims.specs[name]
        members = [index for index in claims.members(name) if index in looks]
        try:
            if members:
                seen = _group(members, nodes, looks, {}, spec.topology_keys)
                pool, facts = gpupool.override(name, spec, seen.pool, seen.facts, seen.spot)
            else:
                pool, facts = gpupool.override(name, spec)
                seen = FoundPool(pool, 0, 0, 0, facts)
            spot = seen.spot if spec.spot is None else spec.spot
            flavor = spec.kueue_flavor or ""
            found.append(replace(seen, pool=pool, facts=facts, spot=spot, kueue_flavor=flavor))
        except SpecError as error:
            invalid[name] = error
    return found


def _names(found: Sequence[FoundPool], taken: Iterable[str]) -> list[str]:
    """Short names: the GPU, then what tells pools of one GPU apart, then a number."""
    pools = [item.pool for item in found]
    base = [item.pool.gpu.name + ("-spot" if item.spot else "") for item in found]
    shape = [f"{name}-{pool.gpus_per_node}x" for name, pool in zip(base, pools, strict=True)]
    typed = [
        f"{name}-{''.join(ch if ch.isalnum() else '-' for ch in (pool.node_type or pool.inter.name).lower())}"
        for name, pool in zip(base, pools, strict=True)
    ]
    used, out = set(taken), list[str]()
    for index in range(len(found)):
        choices = (names[index] for names in (base, shape, typed) if names.count(names[index]) == 1)
        numbered = (f"{shape[index][:56]}-{number}" for number in range(2, len(found) + len(used) + 3))
        short = (name[:63].rstrip("-.") for name in (*choices, *numbered))
        name = next(name for name in short if name not in used)
        used.add(name)
        out.append(name)
    return out


def _selectors(
    nodes: Sequence[Node], groups: Sequence[Sequence[int]], old: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """For each group its old labels while they select all of its nodes and no other; then the fewest labels that do;
    otherwise every label of the candidates that its nodes share."""
    table = _labels()
    keys = [layer.product for layer in table.layer] + list(table.instance_type)
    keys += [key for layer in table.layer for key in (layer.count, layer.memory_mib) if key]
    keys += [mark.label for mark in table.spot]
    values = [tuple(item.labels.get(key) for key in keys) for item in nodes]
    home = {index: position for position, group in enumerate(groups) for index in group}
    kinds: dict[tuple[tuple[str | None, ...], int], None] = {
        (value, home.get(index, -1)): None for index, value in enumerate(values)
    }
    return [_selector(keys, kinds, position, old[position]) for position in range(len(groups))]


def _selector(
    keys: Sequence[str], kinds: Iterable[tuple[tuple[str | None, ...], int]], position: int, old: Mapping[str, str]
) -> dict[str, str]:
    own = [value for value, owner in kinds if owner == position]
    others = [value for value, owner in kinds if owner != position]
    if old and old.keys() <= set(keys):
        old_slots = [keys.index(key) for key in old]
        chosen = [owner for value, owner in kinds if all(value[slot] == old[keys[slot]] for slot in old_slots)]
        if chosen and chosen.count(position) == len(own) == len(chosen):
            return dict(old)
    shared = [slot for slot, text in enumerate(own[0]) if text and all(value[slot] == text for value in own)]
    for size in range(1, min(len(shared), 3) + 1):
        for slots in combinations(shared, size):
            if not any(all(value[slot] == own[0][slot] for slot in slots) for value in others):
                return {keys[slot]: str(own[0][slot]) for slot in slots}
    return {keys[slot]: str(own[0][slot]) for slot in shared}


def gpu_resource() -> str:
    """Name of the resource that a pod asks for to get whole GPUs."""
    return _labels().gpu_resource


@cache
def choice_labels() -> frozenset[str]:
    """Node labels that tell kinds of GPU nodes apart."""
    table = _labels()
    keys = {key for layer in table.layer for key in (layer.product, layer.count, layer.memory_mib) if key}
    return frozenset(keys | set(table.instance_type) | {mark.label for mark in table.spot})


def _node_type(item: Node) -> str:
    return next((item.labels[key] for key in _labels().instance_type if key in item.labels), "")


def _toleration(key: str, value: str, effect: str) -> dict[str, str]:
    match = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
    return {"key": key, **match, "effect": effect}


def _mapping(value: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    inner = value.get(key)
    if inner is None:
        return {}
    if not isinstance(inner, Mapping):
        raise SpecError(
            f"{where}: {key}", f"{shown(inner)} is not a mapping", "give the node as the API server prints it"
        )
    return inner


def _text(value: object) -> str:
    """A label's value; a hand-written file may hold a bare number or true."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _count(value: object) -> int | None:
    """A whole number from a label or a resource quantity; None where it is none."""
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Value(_Data):
    value: str
    gpu: str
    memory_gib: float | None = None


class _Layer(_Data):
    name: str
    product: str
    source: str
    count: str = ""
    memory_mib: str = ""
    network_mbit_per_s: str = ""
    values: tuple[_Value, ...] = ()

    def gpu_name(self, product: str, memory_mib: int | None) -> str | None:
        """The GPU's name or product that this layer's product string means; None where it is ambiguous."""
        rows = [row for row in self.values if normalise(row.value) == normalise(product)]
        if not rows:
            return product
        for row in rows:
            if row.memory_gib is None:
                return row.gpu
            wanted = row.memory_gib * 1024
            if memory_mib and abs(memory_mib - wanted) <= MEMORY_TOLERANCE * wanted:
                return row.gpu
        return rows[0].gpu if len({row.gpu for row in rows}) == 1 and not memory_mib else None


class _Partitioned(_Data):
    code: str
    label: str
    message: str
    remedy: str
    contains: str | None = None
    equals: tuple[str, ...] = ()
    above: int | None = None

    def matches(self, text: str | None) -> bool:
        """Whether the label's value says that the GPU is not a whole one."""
        if text is None:
            return False
        number = _count(text)
        return (
            text in self.equals
            or (self.contains is not None and self.contains in text)
            or (self.above is not None and number is not None and number > self.above)
        )


class _Mark(_Data):
    label: str
    value: str


class _Transient(_Data):
    prefixes: tuple[str, ...]
    keys: tuple[str, ...]

    def matches(self, key: str) -> bool:
        """Whether the taint only reports a passing state of the node."""
        return key in self.keys or key.startswith(self.prefixes)


class _Topology(_Data):
    keys: tuple[str, ...]
    source: str


class _Labels(_Data):
    instance_type: tuple[str, ...]
    gpu_resource: str
    mig_resource_prefix: str
    mig_profile_labels: tuple[str, ...]
    dra_driver: str
    dra_whole: str
    dra_slice: str
    nvlink_clique: str
    other_gpu_resources: tuple[str, ...]
    layer: tuple[_Layer, ...]
    partitioned: tuple[_Partitioned, ...]
    spot: tuple[_Mark, ...]
    transient_taints: _Transient
    topology: _Topology


@cache
def _labels() -> _Labels:
    text = files("tilecast.manifests").joinpath("labels.toml").read_text(encoding="utf-8")
    return _Labels.model_validate(tomllib.loads(text))
