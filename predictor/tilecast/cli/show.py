"""`tilecast show`: list known GPUs, models and links, and the pools of a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from tilecast.cli import EXIT_BAD_INPUT, EXIT_OK
from tilecast.cli.arguments import add_pool_arguments
from tilecast.inputs.pools import PoolOptions
from tilecast.public import catalog
from tilecast.public.catalog import Row
from tilecast.render.rows import format_properties, rows_table
from tilecast.spec import SpecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=tuple(_CATALOGS), help="pools needs --nodes, --gpus or --context")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them, with its facts and their sources")
    add_pool_arguments(parser)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")


_FIRST_STEPS = """\
tilecast show gpus                        GPUs, their memory and peak rates
tilecast show gpus h100-sxm               one of them, with the sources of its facts
tilecast show models                      models by name, and their parameters
tilecast show links                       links in and between nodes
tilecast show pools --gpus h100-sxm:16    nodes, links and price that are assumed; of a cluster, with --nodes FILE"""


def run(options: argparse.Namespace) -> int:
    if options.what is None:
        print(_FIRST_STEPS)
        return EXIT_BAD_INPUT
    if options.what != "pools" and (options.nodes or options.gpus or options.context):
        raise SpecError("--nodes", f"says nothing of {options.what}", "leave it out, or show pools")
    list_rows, describe_row, table_row = _CATALOGS[options.what]
    pools = PoolOptions.from_attributes(options)
    if options.name is None:
        rows = list_rows(pools)
        text = (
            _format_json(rows) if options.output == "json" else "\n".join(rows_table([table_row(row) for row in rows]))
        )
    else:
        row = describe_row(options.name, pools)
        text = _format_json(row) if options.output == "json" else "\n".join(format_properties(row))
    print(text)
    return EXIT_OK


def _format_json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _format_pool_row(row: Row) -> Row:
    """Return a pool's row for the printed table, with nodes in one column and price in another."""
    shown = {name: value for name, value in row.items() if name not in ("GPUS/NODE", "CURRENCY")}
    if row["NODES"] is not None:
        shown["NODES"] = f"{row['NODES']}x{row['GPUS/NODE']}"
        shown["PRICE"] = "unknown" if row["PRICE"] is None else f"{row['PRICE']:g} {row['CURRENCY']}"
    return shown


_CATALOGS: Mapping[
    str, tuple[Callable[[PoolOptions], list[Row]], Callable[[str, PoolOptions], Row], Callable[[Row], Row]]
] = {
    "gpus": (lambda _: catalog.list_gpu_rows(), lambda name, _: catalog.describe_gpu(name), dict),
    "models": (
        lambda _: catalog.list_model_rows(),
        lambda name, _: catalog.describe_model(name),
        lambda row: row | {"PARAMETERS": f"{row['PARAMETERS'] / 1e6:,.0f}M"},
    ),
    "links": (
        lambda _: catalog.list_link_rows(),
        lambda name, _: catalog.describe_link(name),
        lambda row: row | {"reaches": f"{row['reaches']:.0%}"},
    ),
    "pools": (catalog.list_pools, catalog.describe_pool, _format_pool_row),
}
"""Functions that list all rows, describe one row, and format a table row, by kind of row."""
