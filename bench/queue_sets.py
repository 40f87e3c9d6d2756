"""Plans of random sets of mixed jobs: do caps on GPU counts improve them, how far is the bound, do short jobs start.

python bench/queue_sets.py [--sets 200] [--jobs 30] [--caps 4,8,16,32] [--order kueue|free] [--seed 0]
    [--effort N] [--options FILE.json]

A set draws jobs of 8 to 70 B models and some small ones, each of 2,000 to 200,000 steps, cut to `--longest` days on its
fastest option, and of weight 1 to 5, for 64 H100, 64 A100-80 and 32 L4. Options are forecasts, which `--options` keeps
in a file for the next run. A cap removes all options above a number of GPUs, except those of a job without a smaller
one. A cap can only remove plans, so a plan that is better with a cap shows what the search missed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tilecast.api import training_job
from tilecast.inputs.pools import PoolOptions, read_pools
from tilecast.planner.options import build_capacity, list_job_options
from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, QueueProblem
from tilecast.planner.solver import EFFORT, ORDERS, QueueSolution, solve

GPUS = "h100-sxm:64,a100-sxm-80gb:64,l4:32"
MODELS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "llama-3.1-8b": (8192, (64, 128, 256)),
    "qwen2.5-14b": (4096, (64, 128, 256)),
    "gemma-2-9b": (4096, (64, 128)),
    "qwen2.5-32b": (4096, (64, 128)),
    "llama-3-70b": (4096, (64, 128)),
    "gpt2": (1024, (256, 512)),
    "bert-large": (512, (256, 512)),
}
"""Sequence length and global batch sizes of each model that a set draws from."""
STEPS = 1000
"""Steps for which the options are priced."""
SHORT_S = 3600.0
"""Run time below which a job counts as short, on its fastest option."""
Menu: TypeAlias = list[tuple[JobOption, ...]]


def price_menu() -> Menu:
    """Return the options of every model and batch size for `STEPS` steps."""
    pools = read_pools(PoolOptions(gpus=GPUS))
    menu = Menu()
    for model, (length, batches) in MODELS.items():
        for batch in batches:
            training = {"sequenceLength": length, "globalBatchSize": batch, "precision": "bf16", "steps": STEPS}
            spec = {"model": {"preset": model}, "training": training}
            document = training_job.training_job_document(f"{model}-{batch}", spec)
            menu.append(list_job_options(training_job.read_request(document), pools))
    return menu


def load_menu(path: Path | None) -> Menu:
    """Return the options of every kind of job, from a file if it exists. Otherwise price them and write the file."""
    if path is not None and path.exists():
        return [tuple(JobOption(**item) for item in kind) for kind in json.loads(path.read_text())]
    menu = price_menu()
    if path is not None:
        path.write_text(json.dumps([[asdict(item) for item in kind] for kind in menu]))
    return menu


def random_set(
    menu: Menu, pools: Sequence[PoolCapacity], count: int, seed: int, longest_s: float, has_weights: bool = True
) -> QueueProblem:
    """Return a set of `count` jobs of random kinds, lengths and weights that came a minute apart.

    Args:
        menu: options of each kind of job for `STEPS` steps.
        pools: the pools.
        count: number of jobs.
        seed: seed of the draw.
        longest_s: most seconds of a job on its fastest option.
        has_weights: whether weights differ.
    """
    draw = np.random.default_rng(seed)
    jobs = []
    for index in range(count):
        kind = menu[int(draw.integers(len(menu)))]
        steps = 10 ** draw.uniform(np.log10(2e3), np.log10(2e5))
        weight = float(draw.integers(1, 6)) if has_weights else 1.0
        scale = min(steps / STEPS, longest_s / min(item.seconds for item in kind))
        options = tuple(scale_option(item, scale) for item in kind)
        jobs.append(QueuedJob(f"j{index}", options, arrival_s=60.0 * (index - count), weight=weight))
    return QueueProblem(tuple(jobs), tuple(pools))


def scale_option(option: JobOption, scale: float) -> JobOption:
    """Return an option with its times and cost multiplied by `scale`."""
    ends = {name: getattr(option, name) * scale for name in ("seconds", "lower_s", "upper_s")}
    return replace(option, **ends, cost=None if option.cost is None else option.cost * scale)


def cap_counts(problem: QueueProblem, most: int) -> QueueProblem:
    """Return the set without options of more than `most` GPUs. A job without a smaller option keeps its smallest."""
    jobs = []
    for job in problem.jobs:
        least = max(most, min(item.gpus for item in job.options))
        jobs.append(replace(job, options=tuple(item for item in job.options if item.gpus <= least)))
    return replace(problem, jobs=tuple(jobs))


def late_urgent_jobs(solution: QueueSolution) -> tuple[int, int]:
    """Return how many short jobs of weight 5 start after the first tenth of the makespan, and how many there are."""
    columns = solution.columns
    fastest = np.minimum.reduceat(columns.seconds, columns.first[:-1])
    start = solution.finish - columns.seconds[solution.option]
    urgent = (fastest < SHORT_S) & (columns.weight == columns.weight.max())
    return int((urgent & (start > 0.1 * solution.finish.max())).sum()), int(urgent.sum())


def main() -> None:
    """Print a line for each set, and the totals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--caps", default="4,8,16,32")
    parser.add_argument("--longest", type=float, default=3.0, help="days of the longest job on its fastest option")
    parser.add_argument("--order", choices=tuple(ORDERS), default="kueue")
    parser.add_argument("--effort", type=int, default=EFFORT, help="number of job starts that a search may simulate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", type=Path)
    options = parser.parse_args()
    menu, pools = load_menu(options.options), [build_capacity(pool) for pool in read_pools(PoolOptions(gpus=GPUS))]
    caps = [int(text) for text in options.caps.split(",") if text]
    began, values, gains, gaps, late, urgent = time.process_time(), [], [], [], 0, 0
    for seed in range(options.seed, options.seed + options.sets):
        problem = random_set(menu, pools, options.jobs, seed, options.longest * 86400)
        solution = solve(problem, order=options.order, effort=options.effort)
        capped = [solve(cap_counts(problem, cap), order=options.order, effort=options.effort).score[1] for cap in caps]
        values.append(solution.score[1] / 3600)
        gains.append(1 - min([solution.score[1], *capped]) / solution.score[1])
        gaps.append(solution.gap or 0.0)
        missed, short = late_urgent_jobs(solution)
        late, urgent = late + missed, urgent + short
        print(f"set {seed}: {values[-1]:.2f} h, a cap improves {gains[-1]:.2%}, gap {gaps[-1]:.1%}", flush=True)
    seconds = (time.process_time() - began) / options.sets
    print(
        f"order {options.order}, {options.sets} sets of {options.jobs}: mean completion {np.mean(values):.2f} h; "
        f"a cap improves {np.mean(gains):.2%} in the mean, {max(gains):.2%} at most, "
        f"{np.mean(np.array(gains) > 0.02):.1%} of sets by more than 2 %; "
        f"gap {np.mean(gaps):.1%} in the mean, {np.mean(np.array(gaps) > 0.3):.1%} of sets above 30 %; "
        f"short jobs of weight 5 that start late: {late} of {urgent}; {seconds:.1f} s a set"
    )


if __name__ == "__main__":
    main()
