"""`tilecast queue`: plan on which pool each job of a queue runs, and when it starts and ends."""

from __future__ import annotations

import argparse
import sys

from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK
from tilecast.cli.arguments import add_pool_arguments
from tilecast.cli.progress import track_progress
from tilecast.cli.screen import write_screen
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.queue import read_documents
from tilecast.planner.policies import POLICIES
from tilecast.planner.solver import ORDERS
from tilecast.public.queueing import QueueInputs, plan_queue
from tilecast.render import queue as render
from tilecast.render.queue import QueueScreen
from tilecast.spec import SpecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "; ".join(f"{policy.name}: {policy.summary}" for policy in POLICIES.values())
    parser.add_argument(
        "jobs",
        help="a file or a folder with TrainingJobs, annotated jobs of other kinds, and Kueue's queues if any; "
        "- reads what `kubectl get … -o json` prints",
    )
    add_pool_arguments(parser)
    parser.add_argument("--policy", choices=tuple(POLICIES), default="completion", help="completion if absent")
    parser.add_argument(
        "--order",
        choices=tuple(ORDERS),
        default="kueue",
        help="order in which jobs may start, kueue if absent; "
        + "; ".join(f"{name}: {summary}" for name, summary in ORDERS.items()),
    )
    parser.add_argument(
        "--horizon", metavar="TIME", help="when everything is due that has no deadline: seconds, or 90min, 36h, 14d"
    )
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="POOL:+N",
        help="also what N more nodes of a pool would buy (or fewer: POOL:-N); may be repeated",
    )
    parser.add_argument(
        "--if-submitted",
        metavar="JOB",
        help="a file with one more job: also when it would start and end on each pool, if it were submitted now",
    )
    parser.add_argument("--at", metavar="TIME", help="the time that counts as now, as 2026-11-02T08:15:04Z")
    parser.add_argument("-o", "--output", choices=tuple(render.FORMATS), default="table")


def run(options: argparse.Namespace) -> int:
    if options.if_submitted is not None and options.output not in ("table", "json"):
        raise SpecError("--if-submitted", f"-o {options.output} has no place for it", "use -o table or -o json")
    result = plan_queue(
        QueueInputs(
            read_documents(options.jobs, may_be_empty=options.if_submitted is not None),
            PoolOptions.from_attributes(options),
            options.policy,
            options.order,
            options.horizon,
            options.what_if,
            options.at,
            [] if options.if_submitted is None else read_documents(options.if_submitted),
        ),
        track_progress,
    )
    if not isinstance(result, QueueScreen):
        sys.stdout.write(render.empty_queue_text(result, options.output))
        return EXIT_OK if result.submitted is not None and result.submitted.entries else EXIT_NO_RECOMMENDATION
    write = write_screen if options.output == "table" else sys.stdout.write
    write(render.FORMATS[options.output](result))
    return EXIT_OK
