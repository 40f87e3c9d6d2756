"""Measurement of kernels on one GPU into tables that `tilecast validate kernels` reads.

It runs as `python -m tilecast_lab collect`, or alone as `python -m collect` from the folder above it on a GPU node. It
imports only the standard library and, once it measures, PyTorch with CUDA; therefore its imports are relative.

A seeded plan draws shapes log-uniformly and interleaves the kinds, so that a run stays balanced when its budget ends.
A duration is the median of repeated bursts between two CUDA events. Before a burst the L2 is filled with other data,
and the GPU is kept busy until the host has queued the whole burst, so that no launch by the host is timed. The calls of
a burst rotate over buffers larger than twice the L2. All data is random. Rows are written as they are measured; cases
that the GPU or PyTorch cannot run are skipped and counted.

`cases` draws the plan, `device` measures, `tables` writes the results. The plan, the budget, the tables and the choice
of bursts are tested. `Device` and `LAUNCHERS`, which use PyTorch, have never run on a GPU: compare the first table of a
new machine with one you trust. `steps` measures whole training steps, and has run on an H100.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from .cases import KINDS, plan_cases
from .device import Device
from .tables import CollectError, Tables, Tally, collect


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog="collect", description="Measure kernels on one GPU into CSV tables.")
    parser.add_argument("-o", "--output", type=Path, default=Path("measured"), help="new folder for the tables")
    parser.add_argument("--budget-minutes", type=float, default=60.0, help="stop after that long (default: 60)")
    parser.add_argument("--cases", type=int, default=5000, help="stop after that many kernels (default: 5000)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="what to measure")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes (default: 0)")
    parser.add_argument("--echo", action="store_true", help="print every row too, as FILE:ROW")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; needs neither PyTorch nor a GPU")
    return parser


def run(given: argparse.Namespace) -> int:
    """Run the command on parsed arguments and return the exit status."""
    try:
        if not 0 < given.budget_minutes < math.inf:
            raise CollectError(f"--budget-minutes: {given.budget_minutes:g} measures nothing; give a positive number")
        if given.cases < 1:
            raise CollectError(f"--cases: {given.cases} leaves nothing to measure; give a positive number")
        cases = islice(plan_cases(list(dict.fromkeys(given.kinds)), given.seed), given.cases)
        if given.dry_run:
            counts: Counter[str] = Counter()
            for case in cases:
                print(case)
                counts[case.kind.name] += 1
            print(f"{given.cases} kernels: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
            return 0
        device = Device()
        tables = Tables(given.output, device.environment, sys.stdout if given.echo else None)
        print(f"{device.environment} -> {given.output}", file=sys.stderr)
        tally = Tally()
        try:
            collect(cases, device, tables, tally, budget_s=given.budget_minutes * 60)
        finally:
            print(tally, file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except CollectError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return 0


def main() -> int:
    """Run the command on the arguments of the process and return the exit status."""
    return run(arguments().parse_args())
