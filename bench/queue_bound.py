"""Gain of a plan that knows all future arrivals over Kueue's order of flavors, on arrivals of a trace.

python bench/queue_bound.py DATA [--seeds 20] [--jobs 150] [--loads 40,80,120] [--effort 10000000]

This is setting (a) of `queue_policies.py`. One plan of the whole trace is made before the first job comes, from every
arrival and every measured step, under the same admission. No placement can know that. A local search makes the plan, so
its gain over Kueue's order is no bound: the best plan gains more still.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import queue_policies as policies
from queue_learning import Arrival
from tilecast.planner.problem import PoolCapacity, QueuedJob, QueueProblem
from tilecast.planner.solver import solve


def ratio(jobs: Sequence[policies.Drawn], pools: Sequence[PoolCapacity], load: int, effort: int) -> float:
    """Return the mean completion by Kueue's order, divided by that of a plan that knows all arrivals."""
    at = policies.arrivals_s(jobs, pools, load)
    each = list(zip(at, jobs, strict=True))
    arrivals = [Arrival(begin, real, *rest) for begin, (_, real, *rest, _) in each]
    finish, _ = policies.replay(arrivals, pools, policies.any_room)
    queue = tuple(QueuedJob(str(index), real, begin) for index, (begin, (_, real, *_)) in enumerate(each))
    plan = solve(QueueProblem(queue, tuple(pools)), effort=effort, is_bounded=False)
    return float(np.subtract(finish, at).mean() / (plan.finish - plan.columns.arrival).mean())


def main() -> None:
    """Print a line for each load."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=150)
    parser.add_argument("--loads", default="40,80,120")
    parser.add_argument("--effort", type=int, default=10_000_000)
    options = parser.parse_args()
    folder = options.data / "second" / "queue"
    known = policies.measured(folder)
    table = policies.forecasts([key for key in known if key[0] in policies.MODELS])
    pools = [PoolCapacity(gpu, policies.EACH, 1) for gpu in policies.GPUS]
    drawn = [
        policies.jobs_of(policies.trace(folder, options.jobs, seed)[0], table, known) for seed in range(options.seeds)
    ]
    for load in map(int, options.loads.split(",")):
        ratios = [ratio(jobs, pools, load, options.effort) for jobs in drawn]
        mean = math.exp(np.log(ratios).mean())
        print(f"load {load} %: {len(ratios)} seeds; {mean:.2f} ({min(ratios):.2f}-{max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
