"""Identification of a node's GPU, its number of GPUs and its network, each from the first layer that states it.

The layers are, in order: a user's GPUPool, the devices of ResourceSlices, the labels of `labels.toml` (GPU Feature
Discovery, then the clouds'), the instance types of `hardware/nodes`. If none answers, the node has a problem. Nothing
is guessed except the network; then the layer says `default`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilecast.api import gpu_pool
from tilecast.api.base import shown
from tilecast.hardware import Gpu, Link, find_gpu, find_slice, mig_profiles
from tilecast.hardware.instances import NodeType, default_network, ethernet_link, find_node_type, machine_with_gpus
from tilecast.nodes.devices import PublishedDevice
from tilecast.nodes.labels import LabelSource, label_table
from tilecast.nodes.objects import Node, find_profile
from tilecast.nodes.quantities import parse_count
from tilecast.spec import SpecError

RESOURCE_SLICE = "resource-slice"
"""Layer of facts that a DRA driver publishes."""
CAPACITY = "capacity"
"""Layer of facts that a device plugin offers."""
_WRITE_POOL = "write a GPUPool that selects them and states the GPU"
_INSTALL = "install GPU Feature Discovery, or write a GPUPool that selects them"
_UNSHARE = "turn time-slicing and MPS off on the nodes meant for training"
_UNCUT = "select them with a GPUPool that states mig, or disable MIG on the nodes meant for training"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about one node from all layers."""

    gpu: Gpu
    gpus: int
    usable: int
    """Number of the GPUs that pods may use."""
    inter: Link
    kind: NodeType | None
    spot: bool
    gpu_layer: str
    count_layer: str
    inter_layer: str

    @property
    def is_offered(self) -> bool:
        """Whether the node offers its GPUs to pods; labels and instance types may describe GPUs that nobody may use."""
        return self.count_layer in (CAPACITY, RESOURCE_SLICE)

    @property
    def price(self) -> float | None:
        """List price of one GPU, or of a slice's share of one.

        Unknown (None) for spot nodes, whose price changes by the hour.
        """
        price = None if self.kind is None or self.spot else self.kind.price_per_gpu_hour
        return None if price is None else price * self.gpu.share

    @property
    def identity(self) -> str:
        """Text that nodes of one pool share: GPUs, network and price."""
        market = "spot" if self.spot else "no price" if self.price is None else f"{self.price:.6g}"
        return f"{self.gpus} x {self.gpu.name}, {self.inter.name}, {market}"


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """Reason why a node with GPUs is in no pool."""

    code: str
    message: str
    remedy: str


def identify_node(
    item: Node, spec: gpu_pool.GPUPoolSpec | None, devices: Sequence[PublishedDevice]
) -> NodeFacts | NodeProblem | None:
    """Return the facts of a node, or the problem that keeps it out of every pool; None if it has no GPU.

    Args:
        item: the node.
        spec: the spec of the user's GPUPool that selects the node.
        devices: the devices that ResourceSlices publish for the node.
    """
    table = label_table()
    whole = [device.product for device in devices if device.kind == table.dra_whole]
    profile = _find_mig_profile(item, spec)
    problem = _find_sharing_problem(item, profile, whole, devices)
    if problem is not None:
        return problem
    kind = find_node_type(item.node_type)
    gpu, gpu_layer = _identify_gpu(item, spec, kind, whole)
    if gpu is None:
        return _unknown_gpu_problem(item, whole)
    if profile and not gpu.mig:
        try:
            gpu = find_slice(gpu, profile)
        except SpecError as error:
            remedy = error.remedy if mig_profiles(gpu) else "disable MIG on the nodes meant for training"
            return NodeProblem("MigPartitioned", error.problem, remedy)
    counted = _count_gpus(item, spec, kind, gpu, len(whole))
    if counted is None:
        return NodeProblem("UnknownAccelerator", f"nothing says how many {gpu.name} a node has", _INSTALL)
    gpus, usable, count_layer = counted
    kind = kind or machine_with_gpus(item.node_type, gpu, gpus)
    physical = _labelled_gpus(item) or (None if kind is None else kind.gpus)
    if not gpu.mig and count_layer == CAPACITY and physical is not None and gpus > physical:
        message = f"the GPUs are shared between pods (a node offers {gpus} and has {physical})"
        return NodeProblem("SharedGpu", message, _UNSHARE)
    inter, inter_layer = _identify_network(item, kind, gpu, gpus)
    spot = any(item.labels.get(mark.label) == mark.value for mark in table.spot)
    return NodeFacts(gpu, gpus, usable, inter, kind, spot, gpu_layer, count_layer, inter_layer)


def _find_sharing_problem(
    item: Node, profile: str | None, whole: Sequence[str], devices: Sequence[PublishedDevice]
) -> NodeProblem | None:
    """Return the problem of a node whose GPUs are cut or shared while no MIG profile of its slices is known."""
    table = label_table()
    if not whole and any(device.kind == table.dra_slice for device in devices):
        remedy = "disable MIG on the nodes meant for training"
        return NodeProblem("MigPartitioned", "the GPUs are cut into MIG slices (ResourceSlice)", remedy)
    for rule in table.partitioned:
        text = item.labels.get(rule.label)
        if rule.matches(text) and not (profile and rule.code == "MigPartitioned"):
            return NodeProblem(rule.code, f"{rule.message} ({rule.label}={shown(text, quote=False)})", rule.remedy)
    if item.shared:
        return NodeProblem("SharedGpu", f"the GPUs are shared between pods ({', '.join(item.shared)})", _UNSHARE)
    if item.slices and not profile and not item.gpus:
        names = ", ".join(f"{table.mig_resource_prefix}{name}" for name, *_ in item.slices)
        return NodeProblem("MigPartitioned", f"the GPUs are cut into MIG slices ({names})", _UNCUT)
    return None


def _find_mig_profile(item: Node, spec: gpu_pool.GPUPoolSpec | None) -> str | None:
    """Return the MIG profile of the slices that a node offers.

    None if its GPUs are whole, or cut into several kinds of slices of which nothing chooses one.
    """
    if spec is not None and spec.mig is not None:
        return spec.mig
    table = label_table()
    for layer in table.layer:
        _, cut, profile = item.labels.get(layer.product, "").partition("-MIG-")
        if cut:
            return find_profile(profile)
    for label in table.mig_profile_labels:
        if item.labels.get(label):
            return find_profile(item.labels[label])
    return item.slices[0][0] if len(item.slices) == 1 and not item.gpus else None


def _find_label_source(item: Node) -> LabelSource | None:
    """Return the first entry of `labels.toml` whose product label the node has; None if it has none of them."""
    return next((layer for layer in label_table().layer if layer.product in item.labels), None)


def _unknown_gpu_problem(item: Node, whole: Sequence[str]) -> NodeProblem | None:
    """Return the reason why the node's GPU is unknown; None if the node has none."""
    code, table, named = "UnknownAccelerator", label_table(), _find_label_source(item)
    if whole:
        products = ", ".join(shown(product) for product in sorted(set(whole))[:3])
        return NodeProblem(code, f"no facts for {products} of the ResourceSlices", _WRITE_POOL)
    others = [resource for resource in item.other_devices if table.is_other_gpu(resource)]
    if others and not item.gpus:
        remedy = "Tilecast prices NVIDIA GPUs alone; leave them to other jobs"
        return NodeProblem(code, f"the accelerator is {others[0]}", remedy)
    if named is not None:
        typical = find_node_type(item.node_type)
        other = "" if typical is None else f", which is not the {typical.gpu} of instance type {shown(item.node_type)}"
        product = f"{shown(item.labels[named.product])} of label {named.product}{other}"
        return NodeProblem(code, f"no facts for {product}", _WRITE_POOL)
    if item.gpus or item.slices:
        kind = f", and {shown(item.node_type)} is no known instance type" if item.node_type else ""
        return NodeProblem(code, f"no label says which GPU they have{kind}", _INSTALL)
    mark = next((mark for mark in table.present if item.labels.get(mark.label) == mark.value), None)
    if mark is not None:
        message = f"label {mark.label} says that they have GPUs, which no device plugin offers and no label names"
        return NodeProblem(
            code, message, "install the driver and the device plugin, or write a GPUPool that selects them"
        )
    return None


def _identify_gpu(
    item: Node, spec: gpu_pool.GPUPoolSpec | None, kind: NodeType | None, whole: Sequence[str]
) -> tuple[Gpu | None, str]:
    """Return the GPU and the layer that names it."""
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
    for layer in label_table().layer:
        product = item.labels.get(layer.product)
        name = None if product is None else layer.gpu_name(product, parse_count(item.labels.get(layer.memory_mib)))
        if name is not None:
            try:
                return find_gpu(name), layer.name
            except SpecError:
                if layer.is_exact:
                    return None, ""
    if kind is not None:
        return find_gpu(kind.gpu), "instance type"
    return None, ""


def _count_gpus(
    item: Node, spec: gpu_pool.GPUPoolSpec | None, kind: NodeType | None, gpu: Gpu, devices: int
) -> tuple[int, int, str] | None:
    """Return how many GPUs or slices the node has, how many of them pods may use, and the layer that says so.

    None if no layer does. If a device plugin offers no GPU at all, labels still give the number, but none are usable.
    """
    cut = {name: (total, usable) for name, total, usable in item.slices}
    if gpu.mig in cut:
        return (*cut[gpu.mig], CAPACITY)
    if item.gpus:
        return item.gpus, min(item.allocatable, item.gpus), CAPACITY
    if devices:
        return devices, devices, RESOURCE_SLICE
    named = _find_label_source(item)
    labelled = parse_count(item.labels.get(named.count)) if named is not None else None
    if named is not None and labelled:
        total, layer = labelled, named.name
    elif kind is not None and not kind.any_size:
        total, layer = kind.gpus, "instance type"
    elif spec is not None and spec.gpus_per_node:
        total, layer = spec.gpus_per_node, "override"
    else:
        return None
    return total, total if item.gpus is None else 0, layer


def _labelled_gpus(item: Node) -> int | None:
    """Return the number of physical GPUs of the node, from its labels; None if they do not say."""
    counts = (parse_count(item.labels.get(layer.count)) for layer in label_table().layer if layer.count)
    return next((number for number in counts if number), None)


def _identify_network(item: Node, kind: NodeType | None, gpu: Gpu, gpus: int) -> tuple[Link, str]:
    """Return the link to other nodes, and the layer that names it."""
    if kind is not None and kind.inter is not None and (gpus >= kind.gpus or not kind.any_size):
        return kind.inter, "instance type"
    rates = ((layer, parse_count(item.labels.get(layer.network_mbit_per_s))) for layer in label_table().layer)
    labelled = next(((layer, rate) for layer, rate in rates if rate), None)
    if labelled is not None:
        return ethernet_link(labelled[1] / 1000), labelled[0].name
    return default_network(gpu, _labelled_gpus(item) or gpus), "default"
