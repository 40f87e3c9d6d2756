"""Plans of random sets of mixed jobs by CP-SAT with counts free, compared with those of the planner.

python bench/queue_cp_sat.py [--sets 3] [--jobs 30] [--order free|kueue] [--limit 60] [--seed 0] [--options FILE.json]

It needs `pip install ortools`, which nothing else does, and which cannot be loaded beside highspy: the model is in
`queue_cp_model.py`, which runs in a process of its own. The sets are those of `queue_sets.py`. CP-SAT chooses for each
job one interval of (pool, GPUs) among the options that no smaller count beats. A pool's GPUs are a cumulative
resource without nodes. With `--order kueue`, of two jobs on one pool the earlier starts first unless it takes more
GPUs, which holds in every plan that Kueue carries out without quotas. So CP-SAT's bound holds for every plan that ends
within twice the planner's makespan. It begins with the planner's plan, has one worker and stops after `--limit` units
of deterministic time, so that its answer is always the same. What it chooses is simulated like any plan, with nodes, in
Kueue's order or, with `--order free`, in the order of its starts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from queue_sets import GPUS, load_menu, random_set
from tilecast.inputs.pools import PoolOptions, read_pools
from tilecast.planner.assignment import Assignment
from tilecast.planner.columns import build_columns
from tilecast.planner.options import build_capacity
from tilecast.planner.problem import sort_jobs
from tilecast.planner.solver import ORDERS, QueueSolution, solve

UNITS = 20_000
"""Units of time in the planner's makespan."""


def plan_by_cp_sat(solution: QueueSolution, order: str, limit: float) -> tuple[list[int], list[float], float]:
    """Return the option and the start of every job by CP-SAT, and its bound of the weighted mean completion.

    Args:
        solution: a plan of the same jobs, with which CP-SAT begins.
        order: a key of `ORDERS`. The rows of the plan are in Kueue's order if it is `kueue`.
        limit: units of deterministic time.
    """
    columns = solution.columns
    unit = float(solution.finish.max()) / UNITS
    queue = {
        "job": columns.job.tolist(),
        "pool": columns.pool.tolist(),
        "gpus": columns.gpus.tolist(),
        # Times are rounded down, so that the bound is one of the real times.
        "seconds": np.floor(columns.seconds / unit).astype(int).tolist(),
        "weight": columns.weight.astype(int).tolist(),
        "option": solution.option,
        "start": np.floor((solution.finish - columns.seconds[solution.option]) / unit).astype(int).tolist(),
        "room": [pool.gpus for pool in columns.pools],
        "end": 2 * UNITS,
        "ordered": order == "kueue",
        "limit": limit,
    }
    model = Path(__file__).with_name("queue_cp_model.py")
    run = subprocess.run(  # noqa: S603
        [sys.executable, model], input=json.dumps(queue), capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    waited = float((columns.share * columns.arrival).sum())
    return found["option"], found["start"], found["bound"] * unit / float(columns.weight.sum()) - waited


def simulate(solution: QueueSolution, order: str, option: list[int], start: list[float]) -> float:
    """Return the weighted mean completion in seconds of chosen options, simulated with nodes.

    Args:
        solution: the plan whose rows `option` and `start` have.
        order: a key of `ORDERS`; jobs start in Kueue's order or in that of `start`.
        option: option of each job.
        start: start of each job, in any unit.
    """
    columns = solution.columns
    if order == "kueue":
        return Assignment(columns, solution.policy, option).score[1]
    place = {job.name: begin for job, begin in zip(columns.problem.jobs, start, strict=True)}
    way = {
        job.name: item - int(columns.first[row])
        for row, (job, item) in enumerate(zip(columns.problem.jobs, option, strict=True))
    }
    ordered = build_columns(sort_jobs(columns.problem, [place[job.name] for job in columns.problem.jobs]))
    there = [int(ordered.first[row]) + way[job.name] for row, job in enumerate(ordered.problem.jobs)]
    return Assignment(ordered, solution.policy, there).score[1]


def main() -> None:
    """Print a line for each set, and the means."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--order", choices=tuple(ORDERS), default="kueue")
    parser.add_argument("--limit", type=float, default=60.0, help="units of deterministic time, about seconds")
    parser.add_argument("--longest", type=float, default=3.0, help="days of the longest job on its fastest option")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", type=Path)
    options = parser.parse_args()
    menu, pools = load_menu(options.options), [build_capacity(pool) for pool in read_pools(PoolOptions(gpus=GPUS))]
    rows = []
    for seed in range(options.seed, options.seed + options.sets):
        problem = random_set(menu, pools, options.jobs, seed, options.longest * 86400)
        solution = solve(problem, order=options.order)
        option, start, bound = plan_by_cp_sat(solution, options.order, options.limit)
        other = simulate(solution, options.order, option, start)
        rows.append((solution.score[1] / 3600, other / 3600, (solution.bound or 0.0) / 3600, bound / 3600))
        print(
            f"set {seed}: planner {rows[-1][0]:.2f} h, CP-SAT {rows[-1][1]:.2f} h; "
            f"bound {rows[-1][2]:.2f} h, by CP-SAT {rows[-1][3]:.2f} h",
            flush=True,
        )
    ours, theirs, bound, cp_bound = np.mean(rows, axis=0)
    print(
        f"order {options.order}, {options.sets} sets of {options.jobs}: planner {ours:.2f} h, CP-SAT {theirs:.2f} h "
        f"({theirs / ours - 1:+.1%}); bound {bound:.2f} h, by CP-SAT {cp_bound:.2f} h"
    )


if __name__ == "__main__":
    main()
