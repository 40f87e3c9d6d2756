"""Nodes to pools: which GPUs a cluster has, in which shapes, over which links.

Facts come in layers, the first that answers wins: a GPUPool that a user wrote, the labels of `labels.toml`
(GPU Feature Discovery, then the clouds'), the instance types of `hardware/nodes`. Where none answers the node is
left out and the report says why; nothing is guessed but the network, and then the layer says `default`.

Whether a node is ready, cordoned or busy does not matter here: a pool is what the cluster has, not what is free.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import Any

from pydantic import BaseModel, ConfigDict

from tilecast.hardware import Gpu, Link, Pool, find_gpu, find_link, normalise
from tilecast.manifests import documents, gpupool
from tilecast.manifests.door import shown
from tilecast.manifests.instances import NodeType, default_network, ethernet, node_types
from tilecast.spec import SpecError

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


@dataclass(frozen=True, slots=True)
class FoundPool:
    """A pool with the nodes behind it. `facts` holds value and layer of each fact."""

    pool: Pool
    nodes: int
    gpus_total: int
    gpus_allocatable: int
    facts: gpupool.Facts


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

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(item.pool for item in self.found)

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


def parse(text: str, name: str = "nodes") -> tuple[list[documents.Document], list[documents.Document]]:
    """Node and GPUPool documents of a YAML or JSON text, as `kubectl get nodes,gpupools -o json` prints them.

    Raises:
        SpecError: the text is not YAML, or holds another kind.
    """
    found: dict[str, list[documents.Document]] = {"Node": [], gpupool.KIND: []}
    for index, document in enumerate(documents.load(text, name)):
        kind = document.get("kind")
        if not isinstance(kind, str) or kind not in found:
            remedy = "give Node and GPUPool objects, as `kubectl get nodes,gpupools -o json` prints them"
            raise SpecError(f"{name}: document {index + 1}", f"kind {shown(kind)} is not a node", remedy)
        found[kind].append(document)
    return found["Node"], found[gpupool.KIND]


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
    return Node(
        name=name,
        labels={str(key): _text(value) for key, value in _mapping(metadata, "labels", f"{where}: metadata").items()},
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
    )


def pools(nodes: Iterable[Mapping[str, Any] | Node], gpupools: Iterable[Mapping[str, Any]] = ()) -> NodesReport:
    """The pools that these nodes form, after the GPUPools that users wrote took theirs.

    One pool is one GPU product in one node shape over one kind of link at one price. It is named after its GPU,
    with the shape behind it where two pools share a GPU.

    Args:
        nodes: Node objects, or what `node` made of them.
        gpupools: GPUPool objects.

    Raises:
        SpecError: an object is not shaped like a Node. A wrong GPUPool does not raise, it is in `invalid`.
    """
    everyone = [item if isinstance(item, Node) else node(item) for item in nodes]
    looks: dict[int, _Look] = {}
    problems: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    others = 0
    claims, invalid = _claims(everyone, gpupools)
    for index, item in enumerate(everyone):
        claim = claims.owner.get(index)
        look = _look(item, claims.specs[claim] if claim else None)
        if look is None:
            others += 1
        elif isinstance(look, _Problem):
            problems[look.code, look.message, look.remedy].append(item.name)
        else:
            looks[index] = look
    found = [*_claimed(claims, everyone, looks, invalid), *_discovered(claims, everyone, looks)]
    left_out = tuple(LeftOut(*why, tuple(sorted(names))) for why, names in sorted(problems.items()))
    return NodesReport(tuple(found), left_out, invalid, others)


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
        """List price of one GPU; those of spot nodes change by the hour and are not known here."""
        return None if self.kind is None or self.spot else self.kind.price_per_gpu_hour


@dataclass(frozen=True, slots=True)
class _Problem:
    code: str
    message: str
    remedy: str


@dataclass(slots=True)
class _Claims:
    """Which GPUPool owns which node."""

    specs: dict[str, gpupool.GPUPoolSpec] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)

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
            claims.specs[name] = spec
    for name in sorted(claims.specs):
        spec = claims.specs[name]
        wanted = spec.selector or ({gpupool.NODE_TYPE_LABEL: spec.node_type} if spec.node_type else {})
        for index, item in enumerate(nodes):
            if wanted and index not in claims.owner and wanted.items() <= item.labels.items():
                claims.owner[index] = name
    return claims, invalid


def _look(item: Node, spec: gpupool.GPUPoolSpec | None) -> _Look | _Problem | None:
    """What a node is; None if it has no GPU."""
    table = _labels()
    for rule in table.partitioned:
        if rule.matches(item.labels.get(rule.label)):
            return _Problem(rule.code, rule.message, rule.remedy)
    for resource in item.other_devices:
        if resource.startswith(table.mig_resource_prefix):
            remedy = "disable MIG on the nodes meant for training"
            return _Problem("MigPartitioned", f"the GPUs are cut into MIG slices ({resource})", remedy)
    kind = node_types().get(_node_type(item))
    named = next((layer for layer in table.layer if layer.product in item.labels), None)
    gpu, gpu_layer = _identify(item, spec, kind)
    if gpu is None:
        if item.other_devices and not item.gpus:
            return _Problem("UnknownAccelerator", f"the accelerator is {item.other_devices[0]}", _WRITE_POOL)
        if named is not None:
            text = f"no facts for {shown(item.labels[named.product])} of label {named.product}"
            return _Problem("UnknownAccelerator", text, _WRITE_POOL)
        if item.gpus:
            return _Problem("UnknownAccelerator", "no label says which GPU they have", _INSTALL)
        return None
    if item.gpus:
        gpus, count_layer = item.gpus, "capacity"
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


_WRITE_POOL = "write a GPUPool that selects them and states the GPU"
_INSTALL = "install GPU Feature Discovery, or write a GPUPool that selects them"


def _identify(item: Node, spec: gpupool.GPUPoolSpec | None, kind: NodeType | None) -> tuple[Gpu | None, str]:
    if spec is not None and spec.gpu is not None:
        try:
            return spec.gpu.gpu(), "override"
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


def _discovered(claims: _Claims, nodes: Sequence[Node], looks: Mapping[int, _Look]) -> list[FoundPool]:
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, look in looks.items():
        if index not in claims.owner:
            groups[look.gpu.name, look.gpus, look.inter.name, look.price or 0.0, look.spot].append(index)
    select = _selectors(nodes, list(groups.values()))
    found = [_group(members, nodes, looks, select[position]) for position, members in enumerate(groups.values())]
    names = _names([item.pool for item in found], [looks[members[0]].spot for members in groups.values()], claims.specs)
    named = [replace(item, pool=replace(item.pool, name=name)) for item, name in zip(found, names, strict=True)]
    return sorted(named, key=lambda item: item.pool.name)


def _group(
    members: Sequence[int], nodes: Sequence[Node], looks: Mapping[int, _Look], selector: Mapping[str, str]
) -> FoundPool:
    first = looks[members[0]]
    types = {_node_type(nodes[index]) for index in members}
    intra = find_link(first.gpu.intra_link)
    facts: gpupool.Facts = {
        "gpu": (first.gpu.name, first.gpu_layer),
        "gpusPerNode": (str(first.gpus), first.count_layer),
        "intraNode": (intra.name, "gpu"),
        "interNode": (first.inter.name, first.inter_layer),
    }
    currency = first.kind.currency if first.kind else "USD"
    if first.price is not None:
        facts["price"] = (f"{first.price:g} {currency}", "instance type")
    taints = sorted({taint for index in members for taint in nodes[index].taints if taint[2] != "PreferNoSchedule"})
    pool = Pool(
        name=first.gpu.name,
        gpu=first.gpu,
        gpus_per_node=min(looks[index].gpus for index in members),
        max_nodes=len(members),
        intra=intra,
        inter=first.inter,
        node_type=types.pop() if len(types) == 1 else "",
        node_selector=selector,
        tolerations=tuple(_toleration(*taint) for taint in taints),
        price_per_gpu_hour=first.price,
        currency=currency,
        layer=first.gpu_layer,
    )
    total = sum(looks[index].gpus for index in members)
    return FoundPool(pool, len(members), total, sum(nodes[index].allocatable for index in members), facts)


def _claimed(
    claims: _Claims, nodes: Sequence[Node], looks: Mapping[int, _Look], invalid: dict[str, SpecError]
) -> list[FoundPool]:
    found = []
    for name in sorted(claims.specs):
        spec = claims.specs[name]
        members = [index for index in claims.members(name) if index in looks]
        try:
            if members:
                seen = _group(members, nodes, looks, {})
                spot = all(looks[index].spot for index in members)
                pool, facts = gpupool.override(name, spec, seen.pool, seen.facts, spot)
                found.append(replace(seen, pool=pool, facts=facts))
            else:
                pool, facts = gpupool.override(name, spec)
                found.append(FoundPool(pool, 0, 0, 0, facts))
        except SpecError as error:
            invalid[name] = error
    return found


def _names(found: Sequence[Pool], spot: Sequence[bool], taken: Iterable[str]) -> list[str]:
    """Short names: the GPU, then what tells pools of one GPU apart, then a number."""
    base = [pool.gpu.name + ("-spot" if cheap else "") for pool, cheap in zip(found, spot, strict=True)]
    shape = [f"{name}-{pool.gpus_per_node}x" for name, pool in zip(base, found, strict=True)]
    typed = [
        f"{name}-{''.join(ch if ch.isalnum() else '-' for ch in (pool.node_type or pool.inter.name).lower())}"
        for name, pool in zip(base, found, strict=True)
    ]
    used, out = set(taken), list[str]()
    for index in range(len(found)):
        choices = (names[index] for names in (base, shape, typed) if names.count(names[index]) == 1)
        numbered = (f"{shape[index]}-{number}" for number in range(2, len(found) + len(used) + 3))
        name = next(name for name in (*choices, *numbered) if name not in used)
        used.add(name)
        out.append(name[:63])
    return out


def _selectors(nodes: Sequence[Node], groups: Sequence[Sequence[int]]) -> list[dict[str, str]]:
    """For each group the fewest labels that select all of its nodes and no other, where such labels exist;
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
    return [_selector(keys, kinds, position) for position in range(len(groups))]


def _selector(
    keys: Sequence[str], kinds: Iterable[tuple[tuple[str | None, ...], int]], position: int
) -> dict[str, str]:
    own = [value for value, owner in kinds if owner == position]
    others = [value for value, owner in kinds if owner != position]
    shared = [slot for slot, text in enumerate(own[0]) if text and all(value[slot] == text for value in own)]
    for size in range(1, min(len(shared), 3) + 1):
        for slots in combinations(shared, size):
            if not any(all(value[slot] == own[0][slot] for slot in slots) for value in others):
                return {keys[slot]: str(own[0][slot]) for slot in slots}
    return {keys[slot]: str(own[0][slot]) for slot in shared}


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


class _Labels(_Data):
    instance_type: tuple[str, ...]
    gpu_resource: str
    mig_resource_prefix: str
    other_gpu_resources: tuple[str, ...]
    layer: tuple[_Layer, ...]
    partitioned: tuple[_Partitioned, ...]
    spot: tuple[_Mark, ...]
    transient_taints: _Transient


@cache
def _labels() -> _Labels:
    text = files("tilecast.manifests").joinpath("labels.toml").read_text(encoding="utf-8")
    return _Labels.model_validate(tomllib.loads(text))
