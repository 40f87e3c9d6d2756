"""`tilecast show`: what Tilecast knows, and what it sees in a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tilecast import zoo
from tilecast.cli import EXIT_OK, pool_inputs
from tilecast.hardware import Pool, find_gpu, gpu_facts, gpus, link_facts, links, mig_profiles
from tilecast.nodes import NodesReport
from tilecast.render.columns import columns
from tilecast.spec import Model, SpecError, Workload

Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(_LISTS), help="pools needs --nodes, --gpus or --context")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them, with its facts and their sources")
    pool_inputs.pool_arguments(parser)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")


def run(options: argparse.Namespace) -> int:
    if options.what != "pools" and (options.nodes or options.gpus or options.context):
        raise SpecError("--nodes", f"says nothing of {options.what}", "leave it out, or show pools")
    if options.name is None:
        rows = _LISTS[options.what](options)
        view = _VIEWS.get(options.what, dict)
        text = _json(rows) if options.output == "json" else "\n".join(_table([view(row) for row in rows]))
    else:
        facts = _ONE[options.what](options)
        text = _json(facts) if options.output == "json" else "\n".join(_facts(facts))
    print(text)
    return EXIT_OK


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _table(rows: list[Row]) -> list[str]:
    """Return lines of a table with the rows' keys as titles; columns of numbers are aligned right."""
    names = list(rows[0]) if rows else []
    right = [name for name in names if all(isinstance(row[name], int | float) for row in rows)]
    return columns(names, [[_cell(row[name]) for name in names] for row in rows], right)


def _facts(facts: Row) -> list[str]:
    """Return one line per fact; the entries of mappings are indented."""
    lines = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            lines += [name, *(f"  {key:<26}{_cell(item)}" for key, item in value.items())]
        else:
            lines.append(f"{name:<28}{_cell(value)}")
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
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
    distinct = {model.name: model for model in zoo.presets().values()}
    return [
        {"MODEL": name, "FAMILY": model.family, "PARAMETERS": round(_parameters(model))}
        for name, model in sorted(distinct.items())
    ]


def _parameters(model: Model) -> float:
    return zoo.parameters(Workload(model, 128, 1))


def _model(options: argparse.Namespace) -> Row:
    model = zoo.preset(options.name)
    facts = {key: value for key, value in asdict(model).items() if value not in (None, 0, {}) and key != "extra"}
    source = "the published configuration of that name, or the table of its paper"
    row = {**facts, **model.extra, "parameters": _parameters(model)}
    return {**row, "sources": {"dimensions": source}}


def _links(_: argparse.Namespace) -> list[Row]:
    return [
        {
            "LINK": link.name,
            "GB/s": link.bandwidth_bytes_per_s / 1e9,
            "PER": "node" if link.per_node else "GPU",
            "reaches": link.efficiency,
        }
        for link in links().values()
    ]


def _link(options: argparse.Namespace) -> Row:
    return link_facts(options.name).model_dump(exclude_defaults=True)


def _report(options: argparse.Namespace) -> NodesReport:
    report = pool_inputs.nodes_report(options)
    report.refuse_invalid()
    return report


def _pools(options: argparse.Namespace) -> list[Row]:
    if options.gpus:
        return [_pool_row(pool, "--gpus") for pool in pool_inputs.pools(options)]
    report = _report(options)
    rows = [_pool_row(item.pool, item.facts.get("gpu", ("", ""))[1], item.remarks) for item in report.entries]
    for item in report.left_out:
        why = f"{_amount(len(item.nodes))} not priced ({item.code}): {item.message}; {item.remedy}"
        rows.append(dict.fromkeys(_POOL) | {"POOL": "-", "WHY": why})
    if report.other_nodes:
        rows.append(dict.fromkeys(_POOL) | {"POOL": "-", "WHY": f"{_amount(report.other_nodes)} without a GPU"})
    return rows


def _amount(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


_POOL = ("POOL", "GPU", "NODES", "GPUS/NODE", "INTRA", "INTER", "PRICE", "CURRENCY", "GPU KNOWN BY", "WHY")


def _pool_row(pool: Pool, layer: str, remarks: Sequence[str] = ()) -> Row:
    shape, links = (pool.max_nodes, pool.gpus_per_node), (pool.intra.name, pool.inter.name)
    price = (pool.price_per_gpu_hour, pool.currency)
    return dict(
        zip(_POOL, (pool.name, pool.gpu.name, *shape, *links, *price, layer, "; ".join(remarks) or None), strict=True)
    )


def _pool_view(row: Row) -> Row:
    """Return a row of pools for people, with its nodes and its price in one column each."""
    shown = {name: value for name, value in row.items() if name not in ("GPUS/NODE", "CURRENCY")}
    if row["NODES"] is not None:
        shown["NODES"] = f"{row['NODES']}x{row['GPUS/NODE']}"
        shown["PRICE"] = "unknown" if row["PRICE"] is None else f"{row['PRICE']:g} {row['CURRENCY']}"
    return shown


def _usual(pool: Pool) -> Row:
    """Return what is assumed about a pool of `--gpus`."""
    return {
        "name": pool.name,
        "most nodes": pool.max_nodes,
        "GPUs": pool.max_nodes * pool.gpus_per_node,
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


def _numbers(facts: Mapping[str, str]) -> Row:
    """Return the facts of a pool with counts and prices as numbers."""
    row: Row = {}
    for name, value in facts.items():
        amount, _, currency = value.partition(" ")
        if name == "price" and currency:
            row |= {name: float(amount), "currency": currency}
        else:
            row[name] = int(value) if value.isdecimal() else value
    return row


def _pool(options: argparse.Namespace) -> Row:
    if options.gpus:
        usual = {pool.name: pool for pool in pool_inputs.pools(options)}
        if options.name not in usual:
            raise SpecError("NAME", f"there is no pool {options.name!r}", f"known: {', '.join(usual)}")
        return _usual(usual[options.name])
    report = _report(options)
    for item in report.entries:
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
                "facts": _numbers({name: value for name, (value, _) in item.facts.items()}),
                "known by": {name: layer for name, (_, layer) in item.facts.items()},
                "node selector": dict(pool.node_selector),
                "tolerations": [dict(toleration) for toleration in pool.tolerations],
            }
    for left in report.left_out:
        if options.name in left.nodes:
            facts = {"node": options.name, "code": left.code, "not priced because": left.message, "remedy": left.remedy}
            return {**facts, "alike": len(left.nodes) - 1}
    known = ", ".join(item.pool.name for item in report.entries)
    raise SpecError("NAME", f"there is no pool or unpriced node {options.name!r}", f"known: {known or 'none'}")


_LISTS: Mapping[str, Callable[[argparse.Namespace], list[Row]]] = {
    "gpus": _gpus,
    "models": _models,
    "links": _links,
    "pools": _pools,
}
_VIEWS: Mapping[str, Callable[[Row], Row]] = {
    "models": lambda row: row | {"PARAMETERS": f"{row['PARAMETERS'] / 1e6:,.0f}M"},
    "links": lambda row: row | {"reaches": f"{row['reaches']:.0%}"},
    "pools": _pool_view,
}
"""Functions that turn rows into rows for people, for lists whose rows need it."""
_ONE: Mapping[str, Callable[[argparse.Namespace], Row]] = {
    "gpus": _gpu,
    "models": _model,
    "links": _link,
    "pools": _pool,
}
