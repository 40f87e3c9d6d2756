"""Return Tilecast's built-in GPUs, models and links, and the pools of a cluster, as plain dictionaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilecast import hardware, zoo
from tilecast.hardware import Pool, find_gpu, find_link_file, instances, list_mig_profiles, read_gpu_file
from tilecast.inputs import pools as pool_inputs
from tilecast.inputs.pools import PoolOptions
from tilecast.model import Model
from tilecast.nodes import NodesReport
from tilecast.spec import SpecError, Workload

Row = dict[str, Any]


def list_gpu_rows() -> list[Row]:
    """Return a row for each built-in GPU: memory, bandwidth, SMs, dense peak rates and MIG profiles."""
    return [
        {
            "GPU": gpu.name,
            "GiB": gpu.memory_bytes / 2**30,
            "GB/s": gpu.memory_bandwidth_bytes_per_s / 1e9,
            "SMs": gpu.sm_count,
            "dense TFLOP/s": {name: rate / 1e12 for name, rate in gpu.peak_flops.items()},
            "MIG slices": [profile.name for profile in list_mig_profiles(gpu)],
        }
        for gpu in hardware.list_gpus().values()
    ]


def describe_gpu(name: str) -> Row:
    """Return the specifications of a GPU with their sources, and its MIG profiles.

    Raises:
        SpecError: nothing has that name.
    """
    facts = read_gpu_file(name).model_dump(exclude_defaults=True)
    slices = {
        profile.name: {
            "SMs": profile.sms,
            "GiB": round(profile.memory_bytes / 2**30, 2),
            "memory_share": profile.memory_share,
            "per_gpu": profile.instances,
        }
        for profile in list_mig_profiles(find_gpu(facts["name"]))
    }
    return {**facts, "mig_slices": slices} if slices else facts


def list_model_rows() -> list[Row]:
    """Return a row for each model preset: its name, its family and its number of parameters."""
    distinct = {model.name: model for model in zoo.presets().values()}
    return [
        {"MODEL": name, "FAMILY": model.family, "PARAMETERS": round(_count_parameters(model))}
        for name, model in sorted(distinct.items())
    ]


def _count_parameters(model: Model) -> float:
    return zoo.count_parameters(Workload(model, 128, 1))


def describe_model(name: str) -> Row:
    """Return the dimensions of a model preset, with its number of parameters and the source of the dimensions.

    Raises:
        SpecError: nothing has that name.
    """
    model = zoo.find_preset(name)
    whole = model.document()
    own = whole.pop("extra")
    facts = {key: value for key, value in whole.items() if value not in (None, 0)}
    source = "the published configuration of that name, or the table of its paper"
    row = {**facts, **own, "parameters": _count_parameters(model)}
    return {**row, "sources": {"dimensions": source}}


def list_link_rows() -> list[Row]:
    """Return a row for each built-in link: its bandwidth, and the fraction of the bandwidth that transfers reach."""
    return [
        {
            "LINK": link.name,
            "GB/s": link.bandwidth_bytes_per_s / 1e9,
            "PER": "node" if link.per_node else "GPU",
            "reaches": link.efficiency,
        }
        for link in hardware.list_links().values()
    ]


def describe_link(name: str) -> Row:
    """Return the specifications of a link with their sources. `ethernet-N` means N Gb/s per node, for any N.

    Raises:
        SpecError: nothing has that name.
    """
    if (link := instances.find_network(name)).name not in hardware.list_links():
        known = describe_link("ethernet-10")
        return {**known, "name": link.name, "bandwidth_gb_per_s": link.bandwidth_bytes_per_s / 1e9}
    return find_link_file(name).model_dump(exclude_defaults=True)


def _read_valid_nodes_report(options: PoolOptions) -> NodesReport:
    report = pool_inputs.read_nodes_report(options)
    report.raise_if_invalid()
    return report


def list_pools(options: PoolOptions) -> list[Row]:
    """Return a row for each pool, and a row for each node that is in no pool, with the reason."""
    if options.gpus:
        return [_build_pool_row(pool, "--gpus") for pool in pool_inputs.read_pools(options)]
    report = _read_valid_nodes_report(options)
    rows = [_build_pool_row(item.pool, item.facts.get("gpu", ("", ""))[1], item.remarks) for item in report.entries]
    for item in report.left_out:
        why = f"{_count_nodes(len(item.nodes))} not priced ({item.code}): {item.message}; {item.remedy}"
        rows.append(dict.fromkeys(_POOL) | {"POOL": "-", "WHY": why})
    if report.other_nodes:
        rows.append(dict.fromkeys(_POOL) | {"POOL": "-", "WHY": f"{_count_nodes(report.other_nodes)} without a GPU"})
    return rows


def _count_nodes(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


_POOL = ("POOL", "GPU", "NODES", "GPUS/NODE", "INTRA", "INTER", "PRICE", "CURRENCY", "GPU KNOWN BY", "WHY")


def _build_pool_row(pool: Pool, layer: str, remarks: Sequence[str] = ()) -> Row:
    shape, links = (pool.max_nodes, pool.gpus_per_node), (pool.intra.name, pool.inter.name)
    price = (pool.price_per_gpu_hour, pool.currency)
    return dict(
        zip(_POOL, (pool.name, pool.gpu.name, *shape, *links, *price, layer, "; ".join(remarks) or None), strict=True)
    )


def _describe_assumed_pool(pool: Pool) -> Row:
    """Return the properties of a pool given by `--gpus`, including the nodes, links and price assumed for it."""
    return {
        "name": pool.name,
        "most nodes": pool.max_nodes,
        "GPUs": pool.max_gpus,
        "node type": pool.node_type,
        "facts": {
            "gpu": pool.gpu.name,
            "gpusPerNode": pool.gpus_per_node,
            "intraNode": pool.intra.name,
            "interNode": pool.inter.name,
            "price": pool.price_per_gpu_hour,
            "currency": pool.currency,
        },
    }


def _parse_numbers(properties: Mapping[str, str]) -> Row:
    """Return a pool's properties with counts and prices converted from text to numbers."""
    row: Row = {}
    for name, value in properties.items():
        amount, _, currency = value.partition(" ")
        if name == "price" and currency:
            row |= {name: float(amount), "currency": currency}
        else:
            row[name] = int(value) if value.isdecimal() else value
    return row


def describe_pool(name: str, options: PoolOptions) -> Row:
    """Return the properties of the pool `name`. If `name` is a node that is in no pool, return the reason.

    Raises:
        SpecError: nothing has that name.
    """
    if options.gpus:
        usual = {pool.name: pool for pool in pool_inputs.read_pools(options)}
        if name not in usual:
            raise SpecError("NAME", f"there is no pool {name!r}", f"known: {', '.join(usual)}")
        return _describe_assumed_pool(usual[name])
    report = _read_valid_nodes_report(options)
    for item in report.entries:
        if item.pool.name == name:
            pool = item.pool
            return {
                "name": pool.name,
                "nodes": item.nodes,
                "most nodes": pool.max_nodes,
                "GPUs": item.gpus_total,
                "allocatable": item.gpus_allocatable,
                "usable now": item.nodes - item.unusable,
                "remarks": list(item.remarks),
                "node type": pool.node_type,
                "facts": _parse_numbers({name: value for name, (value, _) in item.facts.items()}),
                "known by": {name: layer for name, (_, layer) in item.facts.items()},
                "node selector": dict(pool.node_selector),
                "tolerations": [dict(toleration) for toleration in pool.tolerations],
            }
    for left in report.left_out:
        if name in left.nodes:
            facts = {"node": name, "code": left.code, "not priced because": left.message, "remedy": left.remedy}
            return {**facts, "alike": len(left.nodes) - 1}
    known = ", ".join(item.pool.name for item in report.entries)
    raise SpecError("NAME", f"there is no pool or unpriced node {name!r}", f"known: {known or 'none'}")
