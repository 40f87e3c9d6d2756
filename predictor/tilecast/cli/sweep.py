"""`tilecast sweep`: print the advice for each of several values of one input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK
from tilecast.cli.arguments import add_job_arguments, add_pool_arguments
from tilecast.cli.progress import track_progress
from tilecast.cli.screen import write_screen
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.public.sweeping import run_sweep
from tilecast.render import charts
from tilecast.render import sweep as render
from tilecast.spec import SpecError
from tilecast.sweeps import FIELDS, SweepRange, SweepRow

_FIELDS = ", ".join(f"{name} ({field.unit})" if field.unit else name for name, field in FIELDS.items())
EPILOG = f"""\
A field is a number of the job's spec (training.globalBatchSize, constraints.gpus, model.transformer.layers …) or one
of every pool: {_FIELDS}. Values are numbers, x0.5 for a share of what is there, 8..512 for every doubling and 8..64..8
for even steps."""

Writer = Callable[[str, str, Sequence[SweepRow]], str]
_TEXTS: Mapping[str, Writer] = {
    "table": render.sweep_text,
    "wide": lambda field, unit, rows: render.sweep_text(field, unit, rows, wide=True),
    "csv": render.sweep_csv,
    "json": render.sweep_json,
}
_PICTURES = (".svg", ".png")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_job_arguments(parser)
    add_pool_arguments(parser)
    parser.add_argument("--over", required=True, metavar="FIELD=VALUES", help="the number to change, and to what")
    parser.add_argument("--plot", choices=render.MEASURES, default="step", help="what a picture shows; step if absent")
    text = f"{', '.join(_TEXTS)}, or FILE.svg or FILE.png"
    parser.add_argument("-o", "--output", default="table", metavar="FORMAT|FILE", help=text)


def run(options: argparse.Namespace) -> int:
    picture = Path(options.output) if options.output.endswith(_PICTURES) else None
    if picture is None and options.output not in _TEXTS:
        raise SpecError(
            "--output", f"{options.output!r} is no format", f"use {', '.join(_TEXTS)}, FILE.svg or FILE.png"
        )
    over = SweepRange.parse(options.over)
    rows = run_sweep(
        JobOptions.from_values(options.job, vars(options)), PoolOptions.from_attributes(options), over, track_progress
    )
    unit = FIELDS[over.field].unit if over.varies_pools else ""
    if picture is not None:
        _write_chart(picture, render.sweep_chart(over.field, unit, rows, options.plot))
        print(f"wrote {picture}")
    else:
        write = write_screen if options.output in ("table", "wide") else sys.stdout.write
        write(_TEXTS[options.output](over.field, unit, rows))
    return EXIT_OK if any(row.best for row in rows) else EXIT_NO_RECOMMENDATION


def _write_chart(path: Path, chart: charts.Chart) -> None:
    """Write a chart to an image file.

    Raises:
        SpecError: matplotlib, which draws PNG, is not installed, or the file cannot be written.
    """
    try:
        if path.suffix == ".svg":
            path.write_text(charts.draw_svg(chart, "sweep", charts.STYLE) + "\n", encoding="utf-8")
        else:
            path.write_bytes(charts.draw_png(chart))
    except ImportError:
        remedy = "pip install 'tilecast[plot]', or write a .svg, which needs nothing"
        raise SpecError(str(path), "PNG needs matplotlib, which is not installed", remedy) from None
    except OSError as error:
        raise SpecError(str(path), "cannot be written", str(error.strerror or error)) from None
