"""`tilecast advise`: the best pool and plan for a job."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from tilecast.advise import Baseline, advise
from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK, inputs
from tilecast.render.document import FORMATS


def arguments(parser: argparse.ArgumentParser) -> None:
    inputs.job_arguments(parser)
    inputs.pool_arguments(parser)
    parser.add_argument("--baseline", metavar="POOL:N", help="what you would run today, priced as a row of its own")
    parser.add_argument("-o", "--output", choices=tuple(FORMATS), default="table")


def run(options: argparse.Namespace) -> int:
    request = inputs.job(options).request()
    if options.baseline:
        request = replace(request, baseline=Baseline(*inputs.pair("--baseline", options.baseline)))
    advice = advise(request, inputs.pools(options))
    sys.stdout.write(FORMATS[options.output](advice))
    return EXIT_OK if advice.best else EXIT_NO_RECOMMENDATION
