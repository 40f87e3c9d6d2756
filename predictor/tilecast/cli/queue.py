"""`tilecast queue`: which job of a queue on which pool, and when each starts and ends."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK, pool_inputs
from tilecast.cli.queued import QueueDocuments, QueueReader, ReadQueue, listed
from tilecast.cli.reading import seconds
from tilecast.hardware import Pool
from tilecast.planner.options import capacity
from tilecast.planner.policies import POLICIES
from tilecast.planner.problem import QueueProblem, Unplanned
from tilecast.planner.solver import solve
from tilecast.planner.totals import QueueReport, report
from tilecast.render import queue as render
from tilecast.render.queue import QueueScreen, WhatIf
from tilecast.spec import SpecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "; ".join(f"{policy.name}: {policy.summary}" for policy in POLICIES.values())
    parser.add_argument(
        "jobs",
        help="a file or a folder with TrainingJobs, annotated jobs of other kinds, and Kueue's queues if any; "
        "- reads what `kubectl get … -o json` prints",
    )
    pool_inputs.pool_arguments(parser)
    parser.add_argument("--policy", choices=tuple(POLICIES), default="completion", help="completion if absent")
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
    parser.add_argument("--at", metavar="TIME", help="the time that counts as now, as 2026-11-02T08:15:04Z")
    parser.add_argument("-o", "--output", choices=tuple(render.FORMATS), default="table")


def run(options: argparse.Namespace) -> int:
    horizon = None if options.horizon is None else float(seconds(options.horizon, "--horizon"))
    pools = pool_inputs.pools(options)
    changed = _changed(options.what_if, pools)
    # Options are priced on pools with the larger number of nodes, so that --what-if needs no new prices.
    widest = [replace(pool, max_nodes=max(pool.max_nodes, changed.get(pool.name, 0))) for pool in pools]
    given = QueueDocuments.of(listed(options.jobs))
    labels, devices = pool_inputs.node_labels(options), pool_inputs.devices(options)
    read = QueueReader(given, widest, labels, _now(options.at), devices).read()
    problem = _problem(read, pools, horizon, given.held(pool_inputs.pool_of_node(options)) if given.pods else {})
    solution = solve(problem, options.policy)
    unplanned = (*read.unplanned, *solution.refused)
    if not solution.option:
        sys.stdout.write(render.nothing(unplanned, options.output))
        return EXIT_NO_RECOMMENDATION
    what_if = _what_if(problem, pools, changed, options.policy, solution.columns.problem.jobs)
    screen = QueueScreen(report(solution), unplanned, what_if)
    sys.stdout.write(render.FORMATS[options.output](screen))
    return EXIT_OK


def _now(text: str | None) -> datetime:
    if text is None:
        return datetime.now(UTC)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise SpecError("--at", f"cannot read {text[:40]!r}", "write for instance 2026-11-02T08:15:04Z") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _problem(
    read: ReadQueue, pools: Sequence[Pool], horizon: float | None, held: Mapping[str, int]
) -> QueueProblem:  # fmt: skip
    """Return the problem; GPUs held by pods reduce a pool's capacity, except those of running jobs of the queue."""
    ours = Counter[str]()
    for job in read.jobs:
        if job.is_running and job.present is not None:
            ours[job.present[0]] += job.present[1]
    others = {name: max(count - ours[name], 0) for name, count in held.items()}
    capacities = (
        replace(capacity(pool, others.get(pool.name, 0)), quotas=read.quotas.get(pool.name, {})) for pool in pools
    )
    return QueueProblem(read.jobs, tuple(capacities), horizon)


def _changed(texts: Sequence[str], pools: Sequence[Pool]) -> dict[str, int]:
    """Return the number of nodes that the pools named by `--what-if` would have.

    Raises:
        SpecError: a text cannot be read, or takes away more nodes than there are.
    """
    nodes, nodes_of = {pool.name: pool.max_nodes for pool in pools}, dict[str, int]()
    for text in texts:
        name, _, change = text.rpartition(":")
        if name not in nodes:
            raise SpecError("--what-if", f"there is no pool {name[:60]!r}", f"known: {', '.join(sorted(nodes))}")
        if change[:1] not in ("+", "-") or not change[1:].isdecimal() or len(change) > 6:
            raise SpecError("--what-if", f"cannot read {text[:60]!r}", f"write for instance {name}:+2")
        nodes_of[name] = nodes_of.get(name, nodes[name]) + int(change)
        if nodes_of[name] < 0:
            raise SpecError("--what-if", f"{name} has {nodes[name]} nodes", "take away no more than there are")
    return nodes_of


def _what_if(
    problem: QueueProblem, pools: Sequence[Pool], changed: Mapping[str, int], policy: str, planned: Sequence[object]
) -> WhatIf | None:
    if not changed:
        return None
    other = replace(
        problem, pools=tuple(replace(pool, nodes=changed.get(pool.name, pool.nodes)) for pool in problem.pools)
    )
    solution = solve(other, policy)
    difference = {pool.name: changed[pool.name] - pool.max_nodes for pool in pools if pool.name in changed}
    outcome: QueueReport | None = report(solution) if solution.option else None
    lost: tuple[Unplanned, ...] = tuple(item for item in solution.refused if item.is_left_out)
    return WhatIf(difference, outcome, len(solution.option) - len(planned), lost)
