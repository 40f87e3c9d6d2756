"""Commands of `tilecast validate` on published tables, which the entry points of this distribution name."""

from __future__ import annotations

import argparse

from tilecast.validate import Track
from tilecast.validate.runs import write_rows
from tilecast_lab.validate import collectives as tables_of_collectives
from tilecast_lab.validate import kernels as tables_of_kernels
from tilecast_lab.validate import page, report
from tilecast_lab.validate import transfer as pairs_of_runs


def runs(options: argparse.Namespace, track: Track) -> str:
    """Return the summary or the page of tables of training steps."""
    is_page = options.output == "html"
    result = report.make_report(options.files, track, graphs=options.graphs, parts=options.parts or is_page)
    if options.rows is not None:
        write_rows(options.rows, result.rows, result.forecasts)
    return page.page(result, [path.name for path in options.files]) if is_page else report.text(result)


def kernels(options: argparse.Namespace, track: Track) -> str:
    """Return the errors of tables of kernels."""
    return tables_of_kernels.run(options.files, options.rows, options.utilization_model, track=track)


def collectives(options: argparse.Namespace, track: Track) -> str:
    """Return the errors of tables of collectives."""
    return tables_of_collectives.run(options.files, options.rows, track=track)


def transfer(options: argparse.Namespace, track: Track) -> str:
    """Return how much one run of a source and model says of its others."""
    return pairs_of_runs.report(pairs_of_runs.read_subjects(options.files, track))
