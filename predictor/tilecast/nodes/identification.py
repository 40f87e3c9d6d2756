"""Identify a node's GPU, its number of GPUs and its network, each from the first source that has it.

The sources are, in order: a user's GPUPool, the devices of ResourceSlices, the labels of `labels.toml` (GPU Feature
Discovery, then labels of clouds), the instance types of `hardware/nodes`. If no source has it, the node has a problem.
Only the network may be assumed. Its source is then `default`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilecast.api import gpu_pool
from tilecast.api.base import format_value
from tilecast.hardware import Gpu, Link, find_gpu, find_mig_slice, list_mig_profiles
from tilecast.hardware.instances import (
    NodeType,
    add_gpus_to_machine,
    build_ethernet_link,
    find_default_network,
    find_node_type,
)
from tilecast.nodes.devices import PublishedDevice
from tilecast.nodes.labels import LabelSource, read_label_table
from tilecast.nodes.objects import Node, find_profile
from tilecast.nodes.quantities import parse_count
from tilecast.spec import SpecError

RESOURCE_SLICE = "resource-slice"
"""Source of facts that a DRA driver publishes."""
CAPACITY = "capacity"
"""Source of facts that a device plugin reports."""
_WRITE_POOL = "write a GPUPool that selects them and states the GPU"
_INSTALL = "install GPU Feature Discovery, or write a GPUPool that selects them"
_UNSHARE = "turn time-slicing and MPS off on the nodes meant for training"
_UNCUT = "select them with a GPUPool that states mig, or disable MIG on the nodes meant for training"


@dataclass(frozen=True, slots=True)
class NodeProperties:
    """GPU, number of GPUs, network and instance type of one node, with the sources of these properties."""

    gpu: Gpu
    gpus: int
    usable: int
    """Number of GPUs that pods may use."""
    inter: Link
    kind: NodeType | None
    spot: bool
    gpu_source: str
    count_source: str
    inter_source: str

    @property
    def is_offered(self) -> bool:
        """Whether a device plugin or a Dynamic Resource Allocation driver offers the GPUs to pods."""
        return self.count_source in (CAPACITY, RESOURCE_SLICE)

    @property
    def price(self) -> float | None:
        """List price of one GPU, or of one MIG slice, per hour.

        None if it is unknown, and for spot nodes, whose price changes by the hour.
        """
        price = None if self.kind is None or self.spot else self.kind.price_per_gpu_hour
        return None if price is None else price * self.gpu.share

    @property
    def identity(self) -> str:
        """Text with GPUs, network and price. Nodes with equal texts form one pool."""
        market = "spot" if self.spot else "no price" if self.price is None else f"{self.price:.6g}"
        return f"{self.gpus} x {self.gpu.name}, {self.inter.name}, {market}"


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """Problem that keeps a node with GPUs out of every pool, with a remedy."""

    code: str
    message: str
    remedy: str


def identify_node(
    node: Node, spec: gpu_pool.GPUPoolSpec | None, devices: Sequence[PublishedDevice]
) -> NodeProperties | NodeProblem | None:
    """Return the properties of a GPU node, or the problem that keeps it out of every pool.

    If the node has no GPU, return None.

    Args:
        node: the node.
        spec: the spec of the user's GPUPool that selects the node; None if there is none.
        devices: the devices that ResourceSlices publish for the node.
    """
    table = read_label_table()
    whole = [device.product for device in devices if device.kind == table.dra_whole]
    profile = _find_mig_profile(node, spec)
    problem = _find_sharing_problem(node, profile, whole, devices)
    if problem is not None:
        return problem
    kind = find_node_type(node.node_type)
    gpu, gpu_source = _identify_gpu(node, spec, kind, whole)
    if gpu is None:
        return _explain_unknown_gpu(node, whole)
    if profile and not gpu.mig:
        try:
            gpu = find_mig_slice(gpu, profile)
        except SpecError as error:
            remedy = error.remedy if list_mig_profiles(gpu) else "disable MIG on the nodes meant for training"
            return NodeProblem("MigPartitioned", error.problem, remedy)
    counted = _count_gpus(node, spec, kind, gpu, len(whole))
    if counted is None:
        return NodeProblem("UnknownAccelerator", f"nothing says how many {gpu.name} a node has", _INSTALL)
    gpus, usable, count_source = counted
    kind = kind or add_gpus_to_machine(node.node_type, gpu, gpus)
    physical = _count_labelled_gpus(node) or (None if kind is None else kind.gpus)
    if not gpu.mig and count_source == CAPACITY and physical is not None and gpus > physical:
        message = f"the GPUs are shared between pods (a node offers {gpus} and has {physical})"
        return NodeProblem("SharedGpu", message, _UNSHARE)
    inter, inter_source = _identify_network(node, kind, gpu, gpus)
    spot = any(node.labels.get(mark.label) == mark.value for mark in table.spot)
    return NodeProperties(gpu, gpus, usable, inter, kind, spot, gpu_source, count_source, inter_source)


def _find_sharing_problem(
    node: Node, profile: str | None, whole: Sequence[str], devices: Sequence[PublishedDevice]
) -> NodeProblem | None:
    """Return the problem of a node whose GPUs are cut by MIG or shared between pods. If there is none, return None.

    MIG slices are no problem if their profile is known.

    Args:
        node: the node.
        profile: the MIG profile of its slices; None if it is unknown or the GPUs are whole.
        whole: products of the whole GPUs that ResourceSlices publish for the node.
        devices: all devices that ResourceSlices publish for the node.
    """
    table = read_label_table()
    if not whole and any(device.kind == table.dra_slice for device in devices):
        remedy = "disable MIG on the nodes meant for training"
        return NodeProblem("MigPartitioned", "the GPUs are cut into MIG slices (ResourceSlice)", remedy)
    for rule in table.partitioned:
        text = node.labels.get(rule.label)
        if rule.matches(text) and not (profile and rule.code == "MigPartitioned"):
            return NodeProblem(
                rule.code, f"{rule.message} ({rule.label}={format_value(text, quote=False)})", rule.remedy
            )
    if node.shared:
        return NodeProblem("SharedGpu", f"the GPUs are shared between pods ({', '.join(node.shared)})", _UNSHARE)
    if node.slices and not profile and not node.gpus:
        names = ", ".join(f"{table.mig_resource_prefix}{name}" for name, *_ in node.slices)
        return NodeProblem("MigPartitioned", f"the GPUs are cut into MIG slices ({names})", _UNCUT)
    return None


def _find_mig_profile(node: Node, spec: gpu_pool.GPUPoolSpec | None) -> str | None:
    """Return the MIG profile of the slices that a node offers, such as 1g.10gb.

    If the GPUs are whole, return None. If a node has several profiles and nothing chooses one, return None too.
    """
    if spec is not None and spec.mig is not None:
        return spec.mig
    table = read_label_table()
    for source in table.sources:
        _, cut, profile = node.labels.get(source.product, "").partition("-MIG-")
        if cut:
            return find_profile(profile)
    for label in table.mig_profile_labels:
        if node.labels.get(label):
            return find_profile(node.labels[label])
    return node.slices[0][0] if len(node.slices) == 1 and not node.gpus else None


def _find_label_source(node: Node) -> LabelSource | None:
    """Return the first source of `labels.toml` whose product label the node has. If it has none, return None."""
    return next((source for source in read_label_table().sources if source.product in node.labels), None)


def _explain_unknown_gpu(node: Node, whole: Sequence[str]) -> NodeProblem | None:
    """Return the reason why a node's GPU is unknown. If the node has no GPU, return None.

    Args:
        node: the node.
        whole: products of the whole GPUs that ResourceSlices publish for the node.
    """
    code, table, named = "UnknownAccelerator", read_label_table(), _find_label_source(node)
    if whole:
        products = ", ".join(format_value(product) for product in sorted(set(whole))[:3])
        return NodeProblem(code, f"no facts for {products} of the ResourceSlices", _WRITE_POOL)
    others = [resource for resource in node.other_devices if table.is_other_gpu(resource)]
    if others and not node.gpus:
        remedy = "Tilecast prices NVIDIA GPUs alone; leave them to other jobs"
        return NodeProblem(code, f"the accelerator is {others[0]}", remedy)
    if named is not None:
        typical = find_node_type(node.node_type)
        other = (
            ""
            if typical is None
            else f", which is not the {typical.gpu} of instance type {format_value(node.node_type)}"
        )
        product = f"{format_value(node.labels[named.product])} of label {named.product}{other}"
        return NodeProblem(code, f"no facts for {product}", _WRITE_POOL)
    if node.gpus or node.slices:
        kind = f", and {format_value(node.node_type)} is no known instance type" if node.node_type else ""
        return NodeProblem(code, f"no label says which GPU they have{kind}", _INSTALL)
    mark = next((mark for mark in table.present if node.labels.get(mark.label) == mark.value), None)
    if mark is not None:
        message = f"label {mark.label} says that they have GPUs, which no device plugin offers and no label names"
        return NodeProblem(
            code, message, "install the driver and the device plugin, or write a GPUPool that selects them"
        )
    return None


def _identify_gpu(
    node: Node, spec: gpu_pool.GPUPoolSpec | None, kind: NodeType | None, whole: Sequence[str]
) -> tuple[Gpu | None, str]:
    """Return the GPU of a node and the name of its source. If no source names a known GPU, return None and "".

    Args:
        node: the node.
        spec: the spec of the user's GPUPool that selects the node.
        kind: the instance type of the node, if it is known.
        whole: products of the whole GPUs that ResourceSlices publish for the node.
    """
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
    for source in read_label_table().sources:
        product = node.labels.get(source.product)
        name = (
            None if product is None else source.find_gpu_name(product, parse_count(node.labels.get(source.memory_mib)))
        )
        if name is not None:
            try:
                return find_gpu(name), source.name
            except SpecError:
                if source.is_exact:
                    return None, ""
    if kind is not None:
        return find_gpu(kind.gpu), "instance type"
    return None, ""


def _count_gpus(
    node: Node, spec: gpu_pool.GPUPoolSpec | None, kind: NodeType | None, gpu: Gpu, devices: int
) -> tuple[int, int, str] | None:
    """Return the number of GPUs or MIG slices of a node, how many of them pods may use, and the source.

    If a device plugin reports 0 GPUs, the total comes from labels and 0 are usable. If no source has the number, return
    None.
    """
    cut = {name: (total, usable) for name, total, usable in node.slices}
    if gpu.mig in cut:
        return (*cut[gpu.mig], CAPACITY)
    if node.gpus:
        return node.gpus, min(node.allocatable, node.gpus), CAPACITY
    if devices:
        return devices, devices, RESOURCE_SLICE
    named = _find_label_source(node)
    labelled = parse_count(node.labels.get(named.count)) if named is not None else None
    if named is not None and labelled:
        total, source = labelled, named.name
    elif kind is not None and not kind.any_size:
        total, source = kind.gpus, "instance type"
    elif spec is not None and spec.gpus_per_node:
        total, source = spec.gpus_per_node, "override"
    else:
        return None
    return total, total if node.gpus is None else 0, source


def _count_labelled_gpus(node: Node) -> int | None:
    """Return the number of physical GPUs from a node's labels. If no label has it, return None."""
    counts = (parse_count(node.labels.get(source.count)) for source in read_label_table().sources if source.count)
    return next((number for number in counts if number), None)


def _identify_network(node: Node, kind: NodeType | None, gpu: Gpu, gpus: int) -> tuple[Link, str]:
    """Return the network link of a node to other nodes, and the name of the source."""
    if kind is not None and kind.inter is not None and (gpus >= kind.gpus or not kind.any_size):
        return kind.inter, "instance type"
    rates = ((source, parse_count(node.labels.get(source.network_mbit_per_s))) for source in read_label_table().sources)
    labelled = next(((source, rate) for source, rate in rates if rate), None)
    if labelled is not None:
        return build_ethernet_link(labelled[1] / 1000), labelled[0].name
    return find_default_network(gpu, _count_labelled_gpus(node) or gpus), "default"
