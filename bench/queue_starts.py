"""Coverage of the ranges of a planned queue: how often jobs start and end where the plan said.

python bench/queue_starts.py DATA [--seeds 100-109] [--jobs 60] [--pools h100-sxm,a100-80] [--at 0.2] [--fit]

Each seed draws that many jobs of published kinds, which wait at once for two flavors, and plans them. Then a simulation
of Kueue's order runs them with their true run times, where the plan put them: no job comes later, and none is planned
again. `own` lets each kind deviate on each pool as its published row does, or as a row drawn from all. `shared` draws a
published source for the whole queue, by its number of rows: all jobs deviate by the mean of the source, and each kind
beside by what a row differs from the mean of its source. All deviations are of forecasts with constants that were
fitted without the row's source. `--at` plans what is left once more when that share of the first plan's time is over,
with the jobs that run then, and counts what that plan says. Starts count of jobs that the plan does not start at once.
`--fit` prints the coverage for other values of the common part in `ranges.toml`.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from queue_learning import Place
from queue_policies import JobType, jobs_of_kinds, published
from tilecast.planner import ranges
from tilecast.planner.assignment import Assignment
from tilecast.planner.entries import PoolEntry, list_planned_entries
from tilecast.planner.problem import PoolCapacity, QueuedJob, QueueProblem, mark_as_running
from tilecast.planner.solver import QueueSolution, solve
from tilecast.spec import Floats
from tilecast.validate.cells import read_integer, read_number
from tilecast.validate.runs import read_table
from tilecast_lab.validate import runs

EFFORT = 60_000
LEAST_ROWS = 3
"""Fewest rows of a source whose mean counts."""
TRIED = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class Published:
    """Kinds of jobs and deviations of published rows."""

    kinds: Sequence[JobType]
    deviations: Sequence[float]
    pools: Sequence[PoolCapacity]
    means: Sequence[float]
    """Mean deviation of each source, once for each of its rows."""
    rests: Sequence[float]
    """Deviations from the mean of the row's source."""


def read_published(folder: Path, names: Sequence[str]) -> Published:
    """Return the published kinds of jobs that run on all of the named pools, and deviations of all rows."""
    kinds, deviations, pools = published(folder)
    by_source = defaultdict[str, list[float]](list)
    rows = [
        row
        for row in read_table(folder / "e2e" / "published_dev.csv")
        if row["gpu"].startswith(("A100", "H100", "T4", "L4")) and row.get("mode", "train") == "train"
    ]
    rows = [row for row in rows if (read_integer(row, "n_gpus") or 9) in (1, 2, 4, 8)]
    for row, item in zip(rows, runs.forecast(rows), strict=True):
        seconds = read_number(row, "step_time_s_derived")
        if item.left_out_s is not None and seconds is not None:
            by_source[row["source"]].append(math.log(seconds / item.left_out_s))
    large = [values for values in by_source.values() if len(values) >= LEAST_ROWS]
    able = [kind for kind in kinds if set(names) <= {item.pool for item in kind.options}]
    return Published(
        [replace(kind, options=tuple(item for item in kind.options if item.pool in names)) for kind in able],
        deviations,
        [pool for pool in pools if pool.name in names],
        [float(np.mean(values)) for values in large for _ in values],
        [value - float(np.mean(values)) for values in large for value in values],
    )


def draw_queue(known: Published, count: int, seed: int) -> tuple[QueueProblem, dict[str, Mapping[Place, float]]]:
    """Return a queue of waiting jobs, and the true seconds of each job by pool with errors of its own."""
    waiting, seconds = list[QueuedJob](), dict[str, Mapping[Place, float]]()
    for index, (guessed, _, true, *_) in enumerate(jobs_of_kinds(known.kinds, known.deviations, [0.0] * count, seed)):
        waiting.append(QueuedJob(f"j{index}", guessed, arrival_s=float(index - count)))
        seconds[f"j{index}"] = true
    return QueueProblem(tuple(waiting), tuple(known.pools)), seconds


def name_options(solution: QueueSolution) -> list[tuple[str, str, int]]:
    """Return job, pool and GPUs of every option of a plan."""
    columns = solution.columns
    names = [columns.problem.jobs[job].name for job in columns.job.tolist()]
    return [(name, item.pool, item.gpus) for name, item in zip(names, columns.options, strict=True)]


def own_seconds(
    known: Published, solution: QueueSolution, true: Mapping[str, Mapping[Place, float]], seed: int
) -> Floats:
    """Return the true seconds of every option, (m,), with errors that each kind has alone."""
    return np.array([true[name][pool, gpus] for name, pool, gpus in name_options(solution)])


def shared_seconds(
    known: Published, solution: QueueSolution, true: Mapping[str, Mapping[Place, float]], seed: int
) -> Floats:
    """Return the true seconds of every option, (m,), with errors that one published source has in common."""
    draw, columns = np.random.default_rng(1000 + seed), solution.columns
    common, rest = float(draw.choice(known.means)), dict[tuple[str, str, int, float], float]()
    for item in columns.options:
        key = item.pool, item.plan, item.gpus, item.step_s
        if key not in rest:
            rest[key] = float(draw.choice(known.rests))
    logs = [common + rest[item.pool, item.plan, item.gpus, item.step_s] for item in columns.options]
    return np.asarray(columns.seconds * np.exp(logs))


ERRORS: Mapping[str, Callable[[Published, QueueSolution, Mapping[str, Mapping[Place, float]], int], Floats]] = {
    "own": own_seconds,
    "shared": shared_seconds,
}


def plan_again(
    problem: QueueProblem, solution: QueueSolution, seconds: Floats, at: float
) -> tuple[QueueSolution, Floats]:
    """Return the plan of what is left at a share of the makespan, and the true remaining seconds of its options."""
    finish = Assignment(replace(solution.columns, seconds=seconds), solution.policy, list(solution.option)).finish
    start, now_s = finish - seconds[solution.option], at * float(finish.max())
    true = dict(zip(name_options(solution), seconds.tolist(), strict=True))
    left = []
    for job, chosen, begin_s, end_s in zip(
        solution.columns.problem.jobs, solution.option, start.tolist(), finish.tolist(), strict=True
    ):
        if end_s <= now_s:
            continue
        one = replace(job, arrival_s=job.arrival_s - now_s)
        if begin_s <= now_s:
            item = solution.columns.options[chosen]
            one = mark_as_running(replace(one, present=(item.pool, item.gpus)), now_s - begin_s)
            true[job.name, item.pool, item.gpus] = end_s - now_s
        left.append(one)
    again = solve(QueueProblem(tuple(left), problem.pools), effort=EFFORT, is_bounded=False)
    return again, np.array([true[option] for option in name_options(again)])


def count_held(entries: Sequence[PoolEntry], start: Floats, finish: Floats) -> tuple[list[bool], list[bool]]:
    """Return of each job that waits whether it starts in its range, and of each job whether it ends in its range."""
    pairs = list(zip(entries, start.tolist(), finish.tolist(), strict=True))
    starts = [one.start_lower_s - 1e-6 <= at <= one.start_upper_s + 1e-6 for one, at, _ in pairs if one.start_s > 1]
    return starts, [one.finish_lower_s <= end <= one.finish_upper_s for one, _, end in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", default="100-109")
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--pools", default="h100-sxm,a100-80")
    parser.add_argument(
        "--at", type=float, default=0.0, help="share of the first plan's time after which to plan again"
    )
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    known = read_published(options.data, options.pools.split(","))
    shipped = ranges.shipped_common_share()
    first, last = map(int, options.seeds.split("-"))
    held: dict[tuple[float, str], list[tuple[list[bool], list[bool]]]] = defaultdict(list)
    for seed in range(first, last + 1):
        problem, true = draw_queue(known, options.jobs, seed)
        first_plan = solve(problem, effort=EFFORT, is_bounded=False)
        for errors, draw_seconds in ERRORS.items():
            solution, seconds = first_plan, draw_seconds(known, first_plan, true, seed)
            if options.at:
                solution, seconds = plan_again(problem, solution, seconds, options.at)
            columns = replace(solution.columns, seconds=seconds)
            finish = Assignment(columns, solution.policy, list(solution.option)).finish
            for common in TRIED if options.fit else (shipped,):
                ranges.shipped_common_share = lambda common=common: common  # type: ignore[assignment]
                entries = list_planned_entries(solution)
                held[common, errors].append(count_held(entries, finish - seconds[solution.option], finish))
    print("common  errors    starts in range  ends in range  starts  seeds with < 85 % of starts")
    for common in dict.fromkeys(key[0] for key in held):
        rows = {errors: held[common, errors] for errors in ERRORS}
        for errors, found in (*rows.items(), ("both", [one for some in rows.values() for one in some])):
            starts, ends = ([one for some in found for one in some[part]] for part in (0, 1))
            low = sum(np.mean(some[0]) < 0.85 for some in found)
            print(f"{common:6.2f}  {errors:8}{np.mean(starts):17.1%}{np.mean(ends):15.1%}{len(starts):8}{low:4}")


if __name__ == "__main__":
    main()
