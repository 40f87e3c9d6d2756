"""The pool that a GPUPool and its nodes form together; facts that the user wrote take precedence over the nodes'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilecast.api.base import shown
from tilecast.api.gpu_pool import NODE_TYPE_LABEL, GPUPoolSpec, PoolLinks, named_link
from tilecast.hardware import Gpu, Link, Pool, find_gpu, find_link, find_slice
from tilecast.hardware.instances import NodeType, default_network, find_node_type, machine_with_gpus
from tilecast.nodes.report import Facts
from tilecast.spec import SpecError


def override_pool(
    name: str,
    spec: GPUPoolSpec,
    observed: Pool | None = None,
    facts: Facts | None = None,
    spot: bool = False,
    layer: str = "override",
) -> tuple[Pool, Facts]:
    """Return the pool with the facts of its spec put over those that its nodes show.

    Args:
        name: the name of the GPUPool.
        spec: the spec that the user wrote.
        observed: the pool as its nodes show it; None if there are none now.
        facts: the layers of `observed`.
        spot: whether every node of the pool is sold as spot, if the spec does not say.
        layer: the layer's name for facts of the spec.

    Returns:
        The pool, and the value and layer of every fact in it.

    Raises:
        SpecError: neither the user, nor the nodes, nor the instance type say which GPU, or how many per node.
    """
    layers = dict(facts or {})
    kind = find_node_type(spec.node_type) if spec.node_type else None
    spot = spot if spec.spot is None else spec.spot
    gpu = _override_gpu(spec, kind, observed, layers, layer)
    gpus_per_node, max_nodes = _override_size(spec, gpu, kind, observed, layers, layer)
    kind = kind or machine_with_gpus(spec.node_type or "", gpu, gpus_per_node)
    intra, inter = _override_links(spec, gpu, gpus_per_node, kind, observed, layers, layer)
    price, currency = _override_price(spec, gpu, kind, observed, spot, layers, layer)
    node_type = spec.node_type or (observed.node_type if observed else "")
    selector = dict(spec.selector) or (dict(observed.node_selector) if observed else {NODE_TYPE_LABEL: node_type})
    if spec.tolerations is not None:
        tolerations: tuple[Mapping[str, str], ...] = tuple(item.plain() for item in spec.tolerations)
    else:
        tolerations = observed.tolerations if observed else ()
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
        layers={name: layer for name, (_, layer) in layers.items()},
        free_gpus=observed.free_gpus if observed else None,
    ), layers


def _override_size(
    spec: GPUPoolSpec, gpu: Gpu, kind: NodeType | None, observed: Pool | None, layers: Facts, spec_layer: str
) -> tuple[int, int]:
    """Return the GPUs of a node, and how many nodes the pool can have."""
    gpus_per_node = spec.gpus_per_node or (
        observed.gpus_per_node if observed else kind.gpus * gpu.instances if kind else None
    )
    if gpus_per_node is None:
        raise SpecError("spec.gpusPerNode", "is missing and no node shows it", "write how many GPUs a node has")
    if spec.gpus_per_node or observed is None:
        layers["gpusPerNode"] = (str(gpus_per_node), spec_layer if spec.gpus_per_node else "instance type")
    max_nodes = spec.max_nodes if spec.max_nodes is not None else (observed.max_nodes if observed else None)
    if max_nodes is None:
        raise SpecError("spec.maxNodes", "is missing and the pool has no nodes", "write how many nodes it can have")
    return gpus_per_node, max_nodes


def _find_mig_slice(gpu: Gpu, profile: str) -> Gpu:
    try:
        return find_slice(gpu, profile)
    except SpecError as error:
        raise SpecError("spec.mig", error.problem, error.remedy) from None


def _override_gpu(
    spec: GPUPoolSpec, kind: NodeType | None, observed: Pool | None, layers: Facts, spec_layer: str
) -> Gpu:
    gpu, source = None, spec_layer
    if spec.gpu is not None:
        gpu = spec.gpu.gpu()
    elif observed is not None:
        gpu, source = observed.gpu, layers["gpu"][1]
    elif kind is not None:
        gpu, source = find_gpu(kind.gpu), "instance type"
    if gpu is not None:
        if spec.mig is not None and not gpu.mig:
            gpu = _find_mig_slice(gpu, spec.mig)
        layers["gpu"] = (gpu.name, source)
        return gpu
    remedy = "write spec.gpu.name"
    if spec.node_type:
        raise SpecError("spec.nodeType", f"{shown(spec.node_type)} is not a known instance type", remedy)
    raise SpecError("spec.gpu", "is missing and no node shows it", remedy)


def _override_links(
    spec: GPUPoolSpec,
    gpu: Gpu,
    gpus_per_node: int,
    kind: NodeType | None,
    observed: Pool | None,
    layers: Facts,
    spec_layer: str,
) -> tuple[Link, Link]:
    stated = spec.links or PoolLinks()
    if stated.intra_node:
        intra, layer = named_link(stated.intra_node, "spec.links.intraNode", per_node=False), spec_layer
    elif observed and observed.intra.name == gpu.intra_link:
        intra, layer = observed.intra, ""
    else:
        intra, layer = find_link(gpu.intra_link), "gpu"
    if layer:
        layers["intraNode"] = (intra.name, layer)
        layers.pop("nvlinkDomain", None)
    if stated.nvlink_domain:
        intra = _widen_domain(intra, stated.nvlink_domain)
        layers["nvlinkDomain"] = (str(intra.domain), spec_layer)
    elif layer and not gpu.mig and intra.domain > gpus_per_node and intra.beyond is None:
        layers["nvlinkDomain"] = (str(intra.domain), layer)
    typed = kind.inter if kind else None
    if stated.inter_node and typed and typed.name == stated.inter_node:
        inter, layer = typed, spec_layer
    elif stated.inter_node:
        inter, layer = named_link(stated.inter_node, "spec.links.interNode", per_node=True), spec_layer
    elif observed:
        inter, layer = observed.inter, ""
    elif typed:
        inter, layer = typed, "instance type"
    else:
        inter, layer = default_network(gpu, gpus_per_node), "default"
    if layer:
        layers["interNode"] = (inter.name, layer)
    if stated.nics_per_node:
        inter = replace(inter, nics=stated.nics_per_node)
    return intra, inter


def _widen_domain(intra: Link, domain: int) -> Link:
    """Return the link inside nodes with a domain of `domain` GPUs across several nodes."""
    if intra.kind != "nvlink" or intra.wired or intra.beyond:
        remedy = "drop it, or name an NVLink with switches in spec.links.intraNode, for instance nvlink5-nvl72"
        raise SpecError("spec.links.nvlinkDomain", f"{intra.name} does not reach across nodes", remedy)
    return replace(intra, domain=domain)


def _override_price(
    spec: GPUPoolSpec,
    gpu: Gpu,
    kind: NodeType | None,
    observed: Pool | None,
    spot: bool,
    layers: Facts,
    spec_layer: str,
) -> tuple[float | None, str]:
    if spec.price is not None:
        own = spec.price.spot if spot and spec.price.spot is not None else spec.price.per_gpu_hour
        layers["price"] = (f"{own:g} {spec.price.currency}", spec_layer)
        return own, spec.price.currency
    if observed is not None:
        return observed.price_per_gpu_hour, observed.currency
    if kind is not None and kind.price_per_gpu_hour is not None and not spot:
        price = kind.price_per_gpu_hour * gpu.share
        layers["price"] = (f"{price:g} {kind.currency}", "instance type")
        return price, kind.currency
    return None, "USD"
