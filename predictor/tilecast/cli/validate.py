"""`tilecast validate`: compare forecasts with measured steps, kernels and collectives.

This module reads tables of the user's runs. If `tilecast-lab` is installed, its entry points in the group
`tilecast.validate` replace these commands, and also read published tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias

from tilecast.cli import EXIT_OK
from tilecast.cli.progress import track_progress
from tilecast.spec import SpecError
from tilecast.validate import Track

Command: TypeAlias = Callable[[argparse.Namespace, Track], str]
"""Function that runs a `validate` command and returns the text to print."""


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
    print(_choose_command(options)(options, track_progress).rstrip("\n"))
    return EXIT_OK


def load_lab_function(name: str) -> Any:
    """Return the function of an entry point of `tilecast-lab`, or None if `tilecast-lab` is not installed."""
    return next((found.load() for found in entry_points(group="tilecast.validate", name=name)), None)


def _choose_command(options: argparse.Namespace) -> Command:
    """Return the command of `tilecast-lab` if it is installed. Otherwise, return the built-in command.

    Raises:
        SpecError: the options need `tilecast-lab`, which is not installed.
    """
    command: Command | None = load_lab_function(options.what)
    if command is not None:
        return command
    if options.what not in _COMMANDS:
        raise _make_lab_missing_error(f"validate {options.what}")
    for flag, usual in (("output", "table"), ("parts", False), ("graphs", None)):
        if getattr(options, flag, usual) != usual:
            raise _make_lab_missing_error(f"--{flag}")
    return _COMMANDS[options.what]


def _make_lab_missing_error(field: str) -> SpecError:
    return SpecError(
        field, "needs tilecast-lab, which is not installed", "run `pip install ./lab` in a checkout of the repository"
    )


def _validate_runs(options: argparse.Namespace, track: Track) -> str:
    from tilecast.validate import runs, scores

    rows = [row for path in options.files for row in runs.read_table(path)]
    forecasts = runs.forecast_rows(rows, track)
    if options.rows is not None:
        runs.write_rows(options.rows, rows, forecasts)
    return scores.compare_report(rows, forecasts)


def _validate_transfer(options: argparse.Namespace, track: Track) -> str:
    from tilecast.validate import transfer

    return transfer.transfer_report(transfer.read_transfer_runs(options.files, track))


_COMMANDS = {"runs": _validate_runs, "transfer": _validate_transfer}
