"""`tilecast fits`: whether a job fits into the memory of each pool, and on how few GPUs."""

from __future__ import annotations

import argparse
import json

from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK
from tilecast.cli.arguments import add_job_arguments, add_pool_arguments
from tilecast.cli.screen import write_screen
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.public.advising import AdviceInputs, compute_advice
from tilecast.public.results import Fits


def arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    add_pool_arguments(parser)
    parser.add_argument("--plan", help="look at this plan alone, as for `tilecast advise`")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")


def run(options: argparse.Namespace) -> int:
    job = JobOptions.from_values(options.job, vars(options))
    question = AdviceInputs(job, PoolOptions.from_attributes(options), plan=options.plan, seeks_fewest=True)
    fits = Fits.from_advice(compute_advice(question).advice)
    if options.output == "json":
        print(json.dumps(fits.to_dict(), indent=2))
    else:
        write_screen(f"{fits}\n")
    return EXIT_OK if fits else EXIT_NO_RECOMMENDATION
