"""`tilecast validate`: forecasts against measured steps, kernels and collectives, and runs against each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from tilecast.cli import EXIT_OK
from tilecast.cli.progress import track


def arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, help_ in (
        ("runs", "tables of measured training steps"),
        ("kernels", "tables of measured kernels"),
        ("collectives", "tables of measured collectives"),
        ("transfer", "what one run of those tables is worth for the others of its source and model"),
    ):
        kind = kinds.add_parser(name, help=help_)
        kind.add_argument("files", nargs="+", type=Path, metavar="FILE")
        if name == "transfer":
            continue
        kind.add_argument("--rows", type=Path, metavar="OUT.csv", help="write one forecast per input row")
        if name == "runs":
            kind.add_argument("-o", "--output", choices=("table", "html"), default="table")
            kind.add_argument("--parts", action="store_true", help="also the factor of each part of a step")
            help_ = "graphs that `tilecast trace` wrote: MODEL.json, or MODEL@SIZE.json where notes state an image size"
            kind.add_argument("--graphs", type=Path, metavar="DIR", help=help_)
        if name == "kernels":
            kind.add_argument("--utilization-model", type=Path, metavar="FILE.onnx")


def run(options: argparse.Namespace) -> int:
    print(_REPORTS[options.what](options).rstrip("\n"))
    return EXIT_OK


def _runs(options: argparse.Namespace) -> str:
    from tilecast.validate import page, report, runs

    is_page = options.output == "html"
    result = report.make(options.files, track, graphs=options.graphs, parts=options.parts or is_page)
    if options.rows is not None:
        runs.write_rows(options.rows, result.rows, result.forecasts)
    return page.page(result, [path.name for path in options.files]) if is_page else report.text(result)


def _kernels(options: argparse.Namespace) -> str:
    from tilecast.validate import kernels

    return kernels.run(options.files, options.rows, options.utilization_model, track=track)


def _collectives(options: argparse.Namespace) -> str:
    from tilecast.validate import collectives

    return collectives.run(options.files, options.rows, track=track)


def _transfer(options: argparse.Namespace) -> str:
    from tilecast.validate import transfer

    return transfer.report(transfer.subjects(options.files, track))


_REPORTS = {"runs": _runs, "kernels": _kernels, "collectives": _collectives, "transfer": _transfer}
