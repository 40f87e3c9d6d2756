"""Build the pool of a GPUPool that a user wrote. Fields of its spec take precedence over properties of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilecast.api.base import format_value
from tilecast.api.gpu_pool import NODE_TYPE_LABEL, GPUPoolSpec, PoolLinks, find_pool_link
from tilecast.hardware import Gpu, Link, Pool, find_gpu, find_link, find_mig_slice
from tilecast.hardware.instances import NodeType, add_gpus_to_machine, find_default_network, find_node_type
from tilecast.nodes.report import Facts
from tilecast.spec import SpecError


def override_pool(
    name: str,
    spec: GPUPoolSpec,
    observed: Pool | None = None,
    properties: Facts | None = None,
    spot: bool = False,
    source: str = "override",
) -> tuple[Pool, Facts]:
    """Return the pool of a GPUPool. Fields of the spec replace properties of the nodes.

    Args:
        name: the name of the GPUPool.
        spec: the spec of the GPUPool.
        observed: the pool that its nodes form. None if there are no nodes now.
        properties: value and source of the properties of `observed`.
        spot: whether every node of the pool is a spot node, if the spec does not say.
        source: name of the source that properties from the spec get.

    Returns:
        The pool, and value and source of its properties, by name.

    Raises:
        SpecError: the GPU, the GPUs per node or the number of nodes is in neither the spec nor any other source.
    """
    merged = _PoolMerge(spec, observed, dict(properties or {}), source)
    kind = find_node_type(spec.node_type) if spec.node_type else None
    gpu = merged.choose_gpu(kind)
    gpus_per_node = merged.choose_gpus_per_node(gpu, kind)
    max_nodes = merged.choose_max_nodes()
    kind = kind or add_gpus_to_machine(spec.node_type or "", gpu, gpus_per_node)
    intra = merged.choose_intra_link(gpu, gpus_per_node)
    inter = merged.choose_inter_link(gpu, gpus_per_node, kind)
    price, currency = merged.choose_price(gpu, kind, is_spot=spot if spec.spot is None else spec.spot)
    node_type = spec.node_type or (observed.node_type if observed else "")
    selector = dict(spec.selector) or (dict(observed.node_selector) if observed else {NODE_TYPE_LABEL: node_type})
    tolerations: tuple[Mapping[str, str], ...] = observed.tolerations if observed else ()
    if spec.tolerations is not None:
        tolerations = tuple(item.to_pod_toleration() for item in spec.tolerations)
    return Pool(
        name=name,
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        max_nodes=max_nodes,
        intra=intra,
        inter=inter,
        node_type=node_type,
        node_selector={key: value for key, value in selector.items() if value},
        tolerations=tolerations,
        price_per_gpu_hour=price,
        currency=currency,
        layers={name: origin for name, (_, origin) in merged.facts.items()},
        free_gpus=observed.free_gpus if observed else None,
    ), merged.facts


@dataclass(frozen=True, slots=True)
class _PoolMerge:
    """The spec of a GPUPool and the pool that its nodes form.

    Each method chooses one property of the resulting pool and records its value and source in `facts`.
    """

    spec: GPUPoolSpec
    observed: Pool | None
    facts: Facts
    source: str
    """Name of the source of facts in the spec."""

    def choose_gpu(self, kind: NodeType | None) -> Gpu:
        gpu, source, spec = None, self.source, self.spec
        if spec.gpu is not None:
            gpu = spec.gpu.gpu()
        elif self.observed is not None:
            gpu, source = self.observed.gpu, self.facts["gpu"][1]
        elif kind is not None:
            gpu, source = find_gpu(kind.gpu), "instance type"
        if gpu is not None:
            if spec.mig is not None and not gpu.mig:
                gpu = _find_mig_slice(gpu, spec.mig)
            self.facts["gpu"] = (gpu.name, source)
            return gpu
        remedy = "write spec.gpu.name"
        if spec.node_type:
            raise SpecError("spec.nodeType", f"{format_value(spec.node_type)} is not a known instance type", remedy)
        raise SpecError("spec.gpu", "is missing and no node shows it", remedy)

    def choose_gpus_per_node(self, gpu: Gpu, kind: NodeType | None) -> int:
        if self.spec.gpus_per_node:
            gpus, source = self.spec.gpus_per_node, self.source
        elif self.observed is not None:
            return self.observed.gpus_per_node
        elif kind is not None:
            gpus, source = kind.gpus * gpu.instances, "instance type"
        else:
            raise SpecError("spec.gpusPerNode", "is missing and no node shows it", "write how many GPUs a node has")
        self.facts["gpusPerNode"] = (str(gpus), source)
        return gpus

    def choose_max_nodes(self) -> int:
        if self.spec.max_nodes is not None:
            return self.spec.max_nodes
        if self.observed is None:
            raise SpecError("spec.maxNodes", "is missing and the pool has no nodes", "write how many nodes it can have")
        return self.observed.max_nodes

    def choose_intra_link(self, gpu: Gpu, gpus_per_node: int) -> Link:
        stated = self.spec.links or PoolLinks()
        if stated.intra_node:
            intra, source = find_pool_link(stated.intra_node, "spec.links.intraNode", per_node=False), self.source
        elif self.observed and self.observed.intra.name == gpu.intra_link:
            intra, source = self.observed.intra, ""
        else:
            intra, source = find_link(gpu.intra_link), "gpu"
        if source:
            self.facts["intraNode"] = (intra.name, source)
            self.facts.pop("nvlinkDomain", None)
        if stated.nvlink_domain:
            intra, source = _with_nvlink_domain(intra, stated.nvlink_domain), self.source
            self.facts["nvlinkDomain"] = (str(intra.domain), source)
        elif source and not gpu.mig and intra.domain > gpus_per_node and intra.beyond is None:
            self.facts["nvlinkDomain"] = (str(intra.domain), source)
        return intra

    def choose_inter_link(self, gpu: Gpu, gpus_per_node: int, kind: NodeType | None) -> Link:
        stated, typed = self.spec.links or PoolLinks(), kind.inter if kind else None
        if stated.inter_node and typed and typed.name == stated.inter_node:
            inter, source = typed, self.source
        elif stated.inter_node:
            inter, source = find_pool_link(stated.inter_node, "spec.links.interNode", per_node=True), self.source
        elif self.observed:
            inter, source = self.observed.inter, self.facts["interNode"][1]
        elif typed:
            inter, source = typed, "instance type"
        else:
            inter, source = find_default_network(gpu, gpus_per_node), "default"
        self.facts["interNode"] = (inter.name, source)
        return replace(inter, nics=stated.nics_per_node) if stated.nics_per_node else inter

    def choose_price(self, gpu: Gpu, kind: NodeType | None, *, is_spot: bool) -> tuple[float | None, str]:
        price = self.spec.price
        if price is not None:
            amount = price.spot if is_spot and price.spot is not None else price.per_gpu_hour
            self.facts["price"] = (f"{amount:g} {price.currency}", self.source)
            return amount, price.currency
        if self.observed is not None:
            return self.observed.price_per_gpu_hour, self.observed.currency
        if kind is not None and kind.price_per_gpu_hour is not None and not is_spot:
            listed = kind.price_per_gpu_hour * gpu.share
            self.facts["price"] = (f"{listed:g} {kind.currency}", "instance type")
            return listed, kind.currency
        return None, "USD"


def _find_mig_slice(gpu: Gpu, profile: str) -> Gpu:
    try:
        return find_mig_slice(gpu, profile)
    except SpecError as error:
        raise SpecError("spec.mig", error.problem, error.remedy) from None


def _with_nvlink_domain(intra: Link, domain: int) -> Link:
    """Return the link with an NVLink domain of `domain` GPUs, which may span several nodes."""
    if intra.kind != "nvlink" or intra.wired or intra.beyond:
        remedy = "drop it, or name an NVLink with switches in spec.links.intraNode, for instance nvlink5-nvl72"
        raise SpecError("spec.links.nvlinkDomain", f"{intra.name} does not reach across nodes", remedy)
    return replace(intra, domain=domain)
