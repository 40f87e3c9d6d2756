"""`tilecast show`: what Tilecast knows, and what it sees in a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from tilecast import models
from tilecast.cli import EXIT_OK, inputs
from tilecast.hardware import find_gpu, gpu_facts, gpus, link_facts, links, mig_profiles
from tilecast.manifests.nodes import FoundPool, NodesReport
from tilecast.render.columns import columns
from tilecast.spec import Model, SpecError, Workload

Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(_LISTS), help="pools needs --nodes, --gpus or --context")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them, with its facts and their sources")
    inputs.pool_arguments(parser)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")


def run(options: argparse.Namespace) -> int:
    if options.what != "pools" and (options.nodes or options.gpus or options.context):
        raise SpecError("--nodes", f"says nothing of {options.what}", "leave it out, or show pools")
    if options.name is None:
        rows = _LISTS[options.what](options)
        text = _json(rows) if options.output == "json" else "\n".join(_table(rows))
    else:
        facts = _ONE[options.what](options)
        text = _json(facts) if options.output == "json" else "\n".join(_facts(facts))
    print(text)
    return EXIT_OK


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _table(rows: list[Row]) -> list[str]:
    """Rows under the names of their keys; figures flush right."""
    names = list(rows[0]) if rows else []
    right = [name for name in names if all(isinstance(row[name], int | float) for row in rows)]
    return columns(names, [[_told(row[name]) for name in names] for row in rows], right)


def _facts(facts: Row) -> list[str]:
    """One fact a line; mappings one level deeper."""
    lines = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            lines += [name, *(f"  {key:<26}{_told(item)}" for key, item in value.items())]
        else:
            lines.append(f"{name:<28}{_told(value)}")
    return lines


def _told(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {_told(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_told(item) for item in value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1e6 else f"{value:,.6g}"
    return f"{value}"


def _gpus(_: argparse.Namespace) -> list[Row]:
    return [
        {
            "GPU": gpu.name,
            "GiB": gpu.memory_bytes / 2**30,
            "GB/s": gpu.memory_bandwidth_bytes_per_s / 1e9,
            "SMs": gpu.sm_count,
            "dense TFLOP/s": {name: rate / 1e12 for name, rate in gpu.peak_flops.items()},
            "MIG slices": [profile.name for profile in mig_profiles(gpu)],
        }
        for gpu in gpus().values()
    ]


def _gpu(options: argparse.Namespace) -> Row:
    facts = gpu_facts(options.name).model_dump(exclude_defaults=True)
    slices = {
        profile.name: {
            "SMs": profile.sms,
            "GiB": round(profile.memory_bytes / 2**30, 2),
            "memory_share": profile.memory_share,
            "per_gpu": profile.instances,
        }
        for profile in mig_profiles(find_gpu(facts["name"]))
    }
    return {**facts, "mig_slices": slices} if slices else facts


def _models(_: argparse.Namespace) -> list[Row]:
    distinct = {model.name: model for model in models.presets().values()}
    return [
        {"MODEL": name, "FAMILY": model.family, "PARAMETERS": f"{_parameters(model) / 1e6:,.0f}M"}
        for name, model in sorted(distinct.items())
    ]


def _parameters(model: Model) -> float:
    return models.parameters(Workload(model, 128, 1))


def _model(options: argparse.Namespace) -> Row:
    model = models.preset(options.name)
    said = {key: value for key, value in asdict(model).items() if value not in (None, 0, {}) and key != "extra"}
    source = "the published configuration of that name, or the table of its paper"
    found = {**said, **model.extra, "parameters": _parameters(model)}
    return {**found, "sources": {"dimensions": source}}


def _links(_: argparse.Namespace) -> list[Row]:
    return [
        {
            "LINK": link.name,
            "GB/s": link.bandwidth_bytes_per_s / 1e9,
            "PER": "node" if link.per_node else "GPU",
            "reaches": f"{link.efficiency:.0%}",
        }
        for link in links().values()
    ]


def _link(options: argparse.Namespace) -> Row:
    return link_facts(options.name).model_dump(exclude_defaults=True)


def _report(options: argparse.Namespace) -> NodesReport:
    if options.gpus:
        raise SpecError("--gpus", "names no nodes", "give --nodes FILE or --context NAME")
    report = inputs.nodes_report(options)
    for name, error in report.invalid.items():
        raise SpecError(f"GPUPool {name}: {error.field}", error.problem, error.remedy)
    return report


def _pools(options: argparse.Namespace) -> list[Row]:
    report = _report(options)
    rows = [_pool_row(item) for item in report.found]
    for item in report.left_out:
        why = f"{_amount(len(item.nodes))} not priced ({item.code}): {item.message}; {item.remedy}"
        rows.append(dict.fromkeys(_POOL, "") | {"POOL": "-", "WHY": why})
    if report.other_nodes:
        rows.append(dict.fromkeys(_POOL, "") | {"POOL": "-", "WHY": f"{_amount(report.other_nodes)} without a GPU"})
    return rows


def _amount(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


_POOL = ("POOL", "GPU", "NODES", "INTRA", "INTER", "PRICE", "GPU KNOWN BY", "WHY")


def _pool_row(item: FoundPool) -> Row:
    pool = item.pool
    price = "unknown" if pool.price_per_gpu_hour is None else f"{pool.price_per_gpu_hour:g} {pool.currency}"
    shape = f"{pool.max_nodes}x{pool.gpus_per_node}"
    layer = item.facts.get("gpu", ("", ""))[1]
    told = (pool.name, pool.gpu.name, shape, pool.intra.name, pool.inter.name, price, layer, "; ".join(item.remarks))
    return dict(zip(_POOL, told, strict=True))


def _pool(options: argparse.Namespace) -> Row:
    report = _report(options)
    for item in report.found:
        if item.pool.name == options.name:
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
                "facts": {name: value for name, (value, _) in item.facts.items()},
                "known by": {name: layer for name, (_, layer) in item.facts.items()},
                "node selector": dict(pool.node_selector),
                "tolerations": [dict(toleration) for toleration in pool.tolerations],
            }
    for left in report.left_out:
        if options.name in left.nodes:
            facts = {"node": options.name, "code": left.code, "not priced because": left.message, "remedy": left.remedy}
            return {**facts, "alike": len(left.nodes) - 1}
    known = ", ".join(item.pool.name for item in report.found)
    raise SpecError("NAME", f"there is no pool or unpriced node {options.name!r}", f"known: {known or 'none'}")


_LISTS: Mapping[str, Callable[[argparse.Namespace], list[Row]]] = {
    "gpus": _gpus,
    "models": _models,
    "links": _links,
    "pools": _pools,
}
_ONE: Mapping[str, Callable[[argparse.Namespace], Row]] = {
    "gpus": _gpu,
    "models": _model,
    "links": _link,
    "pools": _pool,
}
