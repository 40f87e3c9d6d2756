"""`tilecast scan`: forecast every GPU job of a cluster or folder as it is, and show what would be cheaper."""

from __future__ import annotations

import argparse
import sys

from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK
from tilecast.cli.arguments import add_pool_arguments
from tilecast.cli.progress import track_progress
from tilecast.cli.screen import write_screen
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.scan import read_scanned_jobs
from tilecast.public.scanning import LEAST_SAVING, JobScanner
from tilecast.render import scan as rendered
from tilecast.spec import SpecError

EXIT_UNREAD = 4
"""Exit status with `--strict` if a job or a file could not be read."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 all jobs are good as they are; 2 invalid input; 3 a job would be cheaper elsewhere, or does "
        "not run as it is; 4 with --strict, a job or a file could not be read. --exit-zero turns 3 and 4 into 0."
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="files and folders of manifests, - for standard input; none: --context"
    )
    add_pool_arguments(parser)
    parser.add_argument(
        "--least-saving",
        type=float,
        default=100 * LEAST_SAVING,
        metavar="PERCENT",
        help="least saving of a day's price that makes a place or plan better (default: %(default)g)",
    )
    parser.add_argument("--lenient", action="store_true", help="ignore options that change speed and are not priced")
    parser.add_argument("--strict", action="store_true", help="exit with 4 if a job or a file could not be read")
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 whatever is found")
    parser.add_argument("-o", "--output", choices=("table", "csv", "json", "html"), default="table")


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.least_saving < 100:
        raise SpecError("--least-saving", f"{options.least_saving:g} is no share", "give a percentage from 0 to 99")
    given = read_scanned_jobs(options.files, options.context)
    scanner = JobScanner.from_options(
        PoolOptions.from_attributes(options), options.least_saving / 100, lenient=options.lenient
    )
    found = scanner.scan(given.jobs, track_progress)
    texts = {
        "table": lambda: rendered.format_scan_table(found.rows),
        "csv": lambda: rendered.format_scan_csv(found.rows),
        "json": lambda: rendered.format_scan_json(found.rows, found.searches),
        "html": lambda: rendered.format_scan_html(found.rows),
    }
    write = write_screen if options.output == "table" else sys.stdout.write
    write(texts[options.output]())
    if options.exit_zero:
        return EXIT_OK
    if options.strict and (found.has_unread or given.unread_files):
        return EXIT_UNREAD
    return EXIT_NO_RECOMMENDATION if found.needs_attention else EXIT_OK
