"""Cost of planning a growing queue: processor seconds and memory for 100 to 100,000 jobs.

python bench/queue_growth.py [--jobs 100,1000,10000,100000] [--pools 20] [--kinds 40] [--seed 1]

Jobs are of `--kinds` kinds, of 1 to 8 GPUs and ten minutes to ten hours, on pools of 128 GPUs that differ up to five
times in speed. `plan` is the whole plan with its bound. `arrival` is the plan after one more job came, starting from
the earlier plan. `references` are the four references and the totals beside them. `growth` is the exponent of the
plan's seconds compared with the row before.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, QueueProblem
from tilecast.planner.solver import QueueSolution, solve
from tilecast.planner.totals import build_report

T = TypeVar("T")


def random_queue(count: int, pools: int, kinds: int, seed: int) -> QueueProblem:
    """Return a queue of `count` waiting jobs of `kinds` kinds, which came a second apart."""
    draw = np.random.default_rng(seed)
    places = tuple(PoolCapacity(f"p{index}", 16, 8, price_per_gpu_hour=1.0) for index in range(pools))
    options = list[tuple[JobOption, ...]]()
    for _ in range(kinds):
        seconds, gpus = draw.uniform(600, 36_000), int(draw.choice((1, 2, 4, 8)))
        times = [(item.name, seconds / draw.uniform(0.2, 1.0)) for item in places]
        options.append(tuple(JobOption(name, gpus, one, one * 0.7, one * 1.4, one * gpus) for name, one in times))
    jobs = (QueuedJob(f"j{index}", options[index % kinds], arrival_s=float(index - count)) for index in range(count))
    return QueueProblem(tuple(jobs), places)


def with_arrival(problem: QueueProblem, solution: QueueSolution) -> QueueProblem:
    """Return the queue after one more job came; the others stay where the plan put them."""
    chosen = [solution.columns.options[option] for option in solution.option]
    planned = [
        replace(job, present=(one.pool, one.gpus), is_advised=True)
        for job, one in zip(solution.columns.problem.jobs, chosen, strict=True)
    ]
    return replace(problem, jobs=(*planned, replace(problem.jobs[0], name="new", arrival_s=0.0)))


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work` and its processor seconds."""
    began = time.process_time()
    return work(), time.process_time() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", default="100,1000,10000,100000")
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--kinds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("   jobs   plan s  growth  arrival s  references s     gap  MB at most")
    before: tuple[int, float] | None = None
    for count in (int(text) for text in options.jobs.split(",")):
        problem = random_queue(count, options.pools, options.kinds, options.seed)
        solution, plan_s = timed(lambda problem=problem: solve(problem))
        _, references_s = timed(lambda solution=solution: build_report(solution, has_payers=False))
        after = with_arrival(problem, solution)
        _, arrival_s = timed(lambda after=after: solve(after))
        growth = "" if before is None else f"{math.log(plan_s / before[1]) / math.log(count / before[0]):.2f}"
        before = count, plan_s
        most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        gap = "" if solution.gap is None else f"{solution.gap:.1%}"
        print(
            f"{count:7d} {plan_s:8.2f} {growth:>7} {arrival_s:10.2f} {references_s:13.2f} {gap:>7} {most_mb:11.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
