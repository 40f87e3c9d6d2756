"""Value of a plan of the whole queue: arrivals of a trace replayed, by four references and by the plan.

python bench/queue_policies.py DATA [--setting a|b] [--malleable] [--seeds 20] [--jobs 150] [--warm 0]
    [--loads 40,80,120] [--csv FILE] [--plot FILE.svg]
python bench/queue_policies.py --exact 200

The second form plans that many small random queues, those of tests/test_queue.py, and prints for every policy how far
its plans are behind the best of all plans.

DATA holds `second/queue` and `e2e`. In setting (a) every job runs on one K80, P100 or V100 at the rate that was
measured there for its type and batch; types without a model are left out and counted. In setting (b) jobs are drawn
from published training runs on up to 8 GPUs, and arrivals are the trace's. Such jobs run on A100, H100, L4 or T4 as
measured where a row is of that GPU. Elsewhere they take the forecast times a deviation drawn from those of all rows;
its constants were fitted without the row's source. With `--malleable`, a plan may give a job other counts, up to 16
GPUs, whose forecasts deviate as the pool's do; all other placements give it what its published run had. Placements see
forecasts, or with `perfect` the actual times. Plans are made when a job comes, and when one ends while others wait, as
the operator makes them. A load of 100 % means that jobs arrive over the least time in which the pools can do all of the
work.

Calibrated placements see forecasts that earlier runs correct: those of jobs that ended or ran for ten minutes, and none
still to come. `tilecast.learning.calibration` corrects them as an operator does; with `own steps` a workload that
already ran on the pool takes the median of the steps measured there. Every placement runs the first `--warm` jobs and
learns from them, and they count only in the last end and the cost. Order and admission are Kueue's (`BestEffortFIFO`);
nothing that runs is preempted or moved.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from queue_learning import Arrival, Place, State, StepLearner, measured_run, scaled
from tilecast import zoo
from tilecast.advice import Constraints, Request
from tilecast.hardware import find_gpu
from tilecast.inputs.gpu_list import build_assumed_pool
from tilecast.learning.calibration import MIN_OBSERVATIONS, Run, digest_workload, name_framework, name_gpu_range
from tilecast.model import Model
from tilecast.planner.columns import build_columns, isolated_s
from tilecast.planner.options import build_capacity, list_job_options
from tilecast.planner.policies import POLICIES
from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, QueueProblem
from tilecast.planner.relaxation import JobClasses, bound_peak
from tilecast.planner.solver import solve
from tilecast.planner.timeline import FreeNodes, PoolTasks, simulate_start_times
from tilecast.spec import Workload
from tilecast.validate.cells import read_integer, read_number
from tilecast.validate.runs import read_table
from tilecast_lab.validate import runs
from tilecast_lab.validate.table import read_published_row

GPUS = {"V100": "v100-sxm", "P100": "p100", "K80": "k80"}
"""GPUs of the table, in the order in which a queue's flavors would list them: the fastest first."""
EACH = 4
"""GPUs of every pool."""
EFFORT = 4_000


Placement = Callable[[State, int], None]
"""Chooses options in `place` for the arrived job and other waiting ones; a job without one takes any pool with room."""


def own_best(state: State, job: int) -> None:
    arrival = state.arrivals[job]
    state.place[job] = min(arrival.asked_options(arrival.options), key=lambda item: item.seconds)


def cheapest(state: State, job: int) -> None:
    arrival = state.arrivals[job]
    state.place[job] = min(arrival.asked_options(arrival.options), key=lambda item: (item.cost or 0.0, item.seconds))


def any_room(state: State, job: int) -> None:
    pass


def earliest(state: State, job: int) -> None:
    state.learn(state.running)

    def ends(option: JobOption) -> float:
        pool = next(item for item in state.pools if item.name == option.pool)
        here = [
            (state.remaining(one).seconds, state.place[one].gpus)
            for one in state.running
            if state.place[one].pool == pool.name
        ]
        queue = [state.place[one] for one in state.waiting if one != job and state.place[one].pool == pool.name]
        here += [(item.seconds, item.gpus) for item in queue]
        tasks = PoolTasks([gpus for _, gpus in here] + [option.gpus], [left for left, _ in here] + [option.seconds])
        return simulate_start_times(pool, tasks)[-1] + option.seconds

    state.place[job] = min(state.arrivals[job].asked_options(state.options(job)), key=ends)


def planned(state: State, job: int) -> None:
    state.learn(state.running)
    jobs = []
    for one in state.running:
        rest = state.remaining(one)
        present = rest.pool, rest.gpus
        jobs.append(
            QueuedJob(str(one), (rest,), state.arrivals[one].at_s - state.now, present=present, is_running=True)
        )
    for one in state.waiting:
        known = state.place.get(one)
        present_ = None if known is None else (known.pool, known.gpus)
        arrival = state.arrivals[one]
        jobs.append(QueuedJob(str(one), state.options(one), arrival.at_s - state.now, present=present_))
    plan = solve(QueueProblem(tuple(jobs), tuple(state.pools)), effort=EFFORT, is_bounded=False)
    for item, row in zip(plan.columns.problem.jobs, plan.option, strict=True):
        if not item.is_running:
            state.place[int(item.name)] = plan.columns.options[row]


def replay(
    arrivals: Sequence[Arrival], pools: Sequence[PoolCapacity], placement: Placement, learner: StepLearner | None = None
) -> tuple[list[float], list[Place]]:
    """Return when each job ends, and the pool where it ran with its GPUs."""
    nodes = {pool.name: FreeNodes(pool.gpus_per_node, pool.free) for pool in pools}
    state = State(0.0, arrivals, pools, [], {}, learner=learner)
    ends: list[tuple[float, int, list[int]]] = []
    finish, where, coming = [math.inf] * len(arrivals), [("", 0)] * len(arrivals), 0
    while coming < len(arrivals) or ends:
        state.now = min(arrivals[coming].at_s if coming < len(arrivals) else math.inf, ends[0][0] if ends else math.inf)
        was_running = len(state.running)
        while ends and ends[0][0] <= state.now:
            _, job, taken = heapq.heappop(ends)
            nodes[where[job][0]].release(state.place[job].gpus, taken)
            state.learn([job])
            del state.running[job]
        if placement is planned and state.waiting and len(state.running) < was_running:
            planned(state, state.waiting[0])
        while coming < len(arrivals) and arrivals[coming].at_s <= state.now:
            state.waiting.append(coming)
            placement(state, coming)
            coming += 1
        for job in tuple(state.waiting):
            ways = [state.place[job]] if job in state.place else by_pool(arrivals[job], pools)
            option = next((way for way in ways if nodes[way.pool].has_room(way.gpus)), None)
            if option is None:
                continue
            state.place[job], where[job] = option, (option.pool, option.gpus)
            finish[job] = state.now + arrivals[job].seconds[where[job]]
            heapq.heappush(ends, (finish[job], job, nodes[option.pool].allocate(option.gpus)))
            state.running[job] = state.now
            state.waiting.remove(job)
    return finish, where


def by_pool(arrival: Arrival, pools: Sequence[PoolCapacity]) -> list[JobOption]:
    names = [pool.name for pool in pools]
    return sorted(arrival.asked_options(arrival.options), key=lambda item: names.index(item.pool))


Knowledge = Literal["forecasts", "calibrated", "own steps", "perfect"]
WAYS: Mapping[str, tuple[Placement, Knowledge]] = {
    "plan, forecasts only": (planned, "forecasts"),
    "plan, calibrated": (planned, "calibrated"),
    "plan, own steps": (planned, "own steps"),
    "plan, perfect knowledge": (planned, "perfect"),
    "own best pool": (own_best, "forecasts"),
    "earliest completion": (earliest, "forecasts"),
    "earliest, own steps": (earliest, "own steps"),
    "Kueue's order of flavors": (any_room, "forecasts"),
    "cheapest pool": (cheapest, "forecasts"),
}
"""Placements, and their knowledge of steps."""
BASES = ("plan, forecasts only", "plan, own steps")
"""Placements by whose mean completion those of all placements are divided."""
DRAWN = (
    "plan, own steps", "plan, forecasts only", "plan, perfect knowledge",
    "own best pool", "earliest, own steps", "Kueue's order of flavors",
)  # fmt: skip
"""Placements in the picture, whose charts have six colours."""


# Setting (a): K80, P100 and V100.

MODELS = {"ResNet-18": "resnet-18-cifar", "ResNet-50": "resnet-50", "Transformer": "transformer-base", "LM": "lstm-ptb"}


def model(kind: str) -> Model:
    """Return the model of a job type; LM is PyTorch's example of a language model with its defaults, on WikiText-2."""
    known = zoo.find_preset(MODELS[kind])
    return known.with_dimensions(cells=200, vocabulary=33278) if kind == "LM" else known


def forecasts(kinds: Sequence[tuple[str, int]]) -> dict[tuple[str, int], dict[str, tuple[JobOption, Run]]]:
    """Return one step of each type and batch on one GPU of each pool, and a run that takes exactly this forecast."""
    pools = [build_assumed_pool(find_gpu(gpu), 1) for gpu in GPUS.values()]
    names = {gpu: name for name, gpu in GPUS.items()}
    table = {}
    for kind, batch in kinds:
        adaptive = "adam" if kind == "Transformer" else "sgd"
        length = 32 if kind == "Transformer" else 1
        work = Workload(
            model=model(kind), sequence_length=length, global_batch=batch, precision="fp32", optimizer=adaptive, steps=1
        )
        options = list_job_options(Request("job", work, constraints=Constraints(gpus=1)), pools)
        table[kind, batch] = {
            names[item.pool]: (replace(item, pool=names[item.pool]), recorded(work, names[item.pool], item))
            for item in options
        }
    return table


def recorded(work: Workload, gpu: str, option: JobOption) -> Run:
    """Return the record of a run that takes its forecast; it has the least number of reports."""
    family, seconds = work.model.family, option.step_s
    return Run(
        option.pool, gpu, work.precision, family, name_gpu_range(option.gpus), digest_workload(work), seconds, seconds,
        observations=MIN_OBSERVATIONS, framework=name_framework(work),
    )  # fmt: skip


def measured(folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Return the seconds of a step by type, batch and GPU."""
    table: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    with (folder / "gavel_throughputs.csv").open() as lines:
        for row in csv.DictReader(lines):
            if row["n_gpus"] == "1" and row["placement"] == "packed" and float(row["steps_per_s"]) > 0:
                table[row["job_type"], int(row["batch_size"] or 0)][row["gpu"]] = 1 / float(row["steps_per_s"])
    return table


Drawn: TypeAlias = tuple[tuple[JobOption, ...], tuple[JobOption, ...], dict[Place, float], dict[Place, Run], int, float]
"""Options by forecast and by measurement, seconds and records by place, GPUs asked for, and arrival of a job."""


def trace(folder: Path, count: int, seed: int) -> tuple[list[tuple[str, int, int, float]], Counter[str]]:
    """Return consecutive jobs of the trace from a random place, and the types that were left out.

    A job is its type, batch, steps and arrival.
    """
    with (folder / "trace_0.csv").open() as lines:
        rows = [
            (row["job_type"], int(row["batch_size"] or 0), int(row["steps"]), float(row["arrival_s"]))
            for row in csv.DictReader(lines)
        ]
    able = [row for row in rows if row[0] in MODELS]
    first = int(np.random.default_rng(seed).integers(0, len(able) - count))
    return able[first : first + count], Counter(row[0] for row in rows if row[0] not in MODELS)


def jobs_of(
    rows: Sequence[tuple[str, int, int, float]],
    table: Mapping[tuple[str, int], Mapping[str, tuple[JobOption, Run]]],
    known: Mapping[tuple[str, int], Mapping[str, float]],
) -> list[Drawn]:
    """Return the jobs of a trace, each of one GPU."""
    jobs = []
    for kind, batch, steps, at in rows:
        seconds = {gpu: steps * step for gpu, step in known[kind, batch].items()}
        ways = [item for gpu, (item, _) in table[kind, batch].items() if gpu in seconds]
        runs = {
            (gpu, 1): measured_run(run, seconds[gpu] / (steps * item.seconds))
            for gpu, (item, run) in table[kind, batch].items()
            if gpu in seconds
        }
        guessed = tuple(scaled(item, item.seconds * steps) for item in ways)
        real = tuple(scaled(item, seconds[item.pool]) for item in ways)
        jobs.append((guessed, real, {(gpu, 1): item for gpu, item in seconds.items()}, runs, 1, at))
    return jobs


def least_s(jobs: Sequence[tuple[JobOption, ...]], pools: Sequence[PoolCapacity]) -> float:
    """Return the least time in which the pools can do all of the work, by the relaxation."""
    queue = tuple(QueuedJob(str(index), options) for index, options in enumerate(jobs))
    held = build_columns(QueueProblem(queue, tuple(pools)))
    ones = np.ones(len(jobs))
    most = sum(min(item.seconds for item in options) for options in jobs)
    bound = bound_peak(held, JobClasses.from_columns(held), 0 * ones, ones, most).bound
    return bound or most


# Setting (b): A100, H100, L4 and T4.

NODES = {"h100-sxm": 1, "a100-80": 2, "l4": 2, "t4": 4}
"""Nodes of each pool, in the order in which a queue's flavors would list them."""
MOST_GPUS = 16
"""Most GPUs of a malleable job."""
KINDS = 40
"""Kinds of jobs that are drawn from."""
MEDIAN_S = 7200.0
"""Median length of a run on its best pool, in seconds; runs spread by a factor e."""


@dataclass(frozen=True, slots=True)
class JobType:
    """A published job, with its measured and forecast steps."""

    options: tuple[JobOption, ...]
    measured: Mapping[str, float]
    """Ratio of measured to forecast step, by pool."""
    work: Workload
    asked: int
    """GPUs of the published run."""


def published(folder: Path, *, is_malleable: bool = False) -> tuple[list[JobType], list[float], list[PoolCapacity]]:
    """Return kinds of jobs, the logarithms of measured over forecast of all rows, and the pools."""
    rows = [
        row
        for row in read_table(folder / "e2e" / "published_dev.csv")
        if row["gpu"].startswith(("A100", "H100", "T4", "L4")) and row.get("mode", "train") == "train"
    ]
    rows = [row for row in rows if (read_integer(row, "n_gpus") or 9) in (1, 2, 4, 8)]
    pools = {}
    for name, nodes in NODES.items():
        per_node = build_assumed_pool(find_gpu(name), 1).usual_gpus_per_node
        pools[name] = build_assumed_pool(find_gpu(name), nodes * per_node)
    deviations, kinds = [], dict[tuple[Workload, int], dict[str, float]]()
    for row, item in zip(rows, runs.forecast(rows), strict=True):
        seconds = read_number(row, "step_time_s_derived")
        if item.left_out_s is None or seconds is None:
            continue
        case = read_published_row(row)
        deviation = math.log(seconds / item.left_out_s)
        deviations.append(deviation)
        work = replace(case.workload, steps=1)
        known = kinds.setdefault((work, case.gpus), {})
        known.setdefault(case.pool.gpu.name, math.exp(deviation))
    able: list[JobType] = []
    for (work, gpus), known in kinds.items():
        asked = Request("job", work, constraints=Constraints(gpus=gpus))
        options = list_job_options(asked, list(pools.values()))
        if len(options) >= 2:
            if is_malleable:
                any_count = replace(asked, constraints=Constraints(max_gpus=MOST_GPUS))
                others = list_job_options(any_count, list(pools.values()))
                options += tuple(item for item in others if item.gpus != gpus)
            ratios = {pool: ratio for pool, ratio in known.items() if pool in pools}
            able.append(JobType(options, ratios, work, gpus))
        if len(able) == KINDS:
            break
    return able, deviations, [build_capacity(pool) for pool in pools.values()]


def jobs_of_kinds(kinds: Sequence[JobType], deviations: Sequence[float], at: Sequence[float], seed: int) -> list[Drawn]:
    """Return jobs as `jobs_of` does, drawn by a seed; all jobs of a kind deviate alike on a pool."""
    draw = np.random.default_rng(seed)
    ratios = [
        {
            pool: kind.measured.get(pool, math.exp(float(draw.choice(deviations))))
            for pool in dict.fromkeys(item.pool for item in kind.options)
        }
        for kind in kinds
    ]
    jobs = []
    for moment in at:
        index = int(draw.integers(len(kinds)))
        options, ratio, asked = kinds[index].options, ratios[index], kinds[index].asked
        run_s = MEDIAN_S * math.exp(float(draw.normal()))
        factor = run_s / min(item.seconds * ratio[item.pool] for item in options if item.gpus == asked)
        guessed = tuple(scaled(item, item.seconds * factor) for item in options)
        known = tuple(scaled(item, item.seconds * ratio[item.pool]) for item in guessed)
        runs = {
            (item.pool, item.gpus): measured_run(recorded(kinds[index].work, item.pool, item), ratio[item.pool])
            for item in options
        }
        jobs.append((guessed, known, {(item.pool, item.gpus): item.seconds for item in known}, runs, asked, moment))
    return jobs


def exact(count: int) -> None:
    """Print how far plans of small queues are behind the best of all plans."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from test_queue import best_of_all, small

    for policy, record in POLICIES.items():
        behind, different, tried = [], 0, 0
        for seed in range(count):
            plan = solve(small(seed), policy)
            best = best_of_all(plan.columns, policy)
            part = record.deciding
            tried += math.prod(np.diff(plan.columns.first).tolist())
            different += bool(np.max(np.subtract(plan.score[:part], best[:part]), initial=0.0) > 1e-9)
            behind.append(max(plan.score[part] / best[part] - 1, 0.0))
        print(
            f"{policy:12}{count} queues, {tried:,} plans: behind the best by {np.mean(behind):.3%} on average and "
            f"{max(behind):.2%} at most; {sum(gap < 1e-9 for gap in behind)} are as good; {different} miss more "
            "deadlines",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--exact", type=int)
    parser.add_argument("--setting", choices=("a", "b"), default="a")
    parser.add_argument("--malleable", action="store_true", help="in setting b, a plan may give a job other counts")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=150)
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--loads", default="40,80,120")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.exact:
        exact(options.exact)
        return
    if options.data is None:
        parser.error("give DATA or --exact")
    folder = options.data / "second" / "queue"
    if options.setting == "a":
        known = measured(folder)
        table = forecasts([key for key in known if key[0] in MODELS])
        pools = [PoolCapacity(gpu, EACH, 1) for gpu in GPUS]
    else:
        kinds, deviations, pools = published(options.data, is_malleable=options.malleable)
        print(f"{len(kinds)} kinds of jobs; deviations of {len(deviations)} rows, median {np.median(deviations):+.2f}")
    rows = []
    for load in map(int, options.loads.split(",")):
        for seed in range(options.seeds):
            drawn, without = trace(folder, options.jobs, seed)
            if options.setting == "a":
                jobs = jobs_of(drawn, table, known)
            else:
                jobs = jobs_of_kinds(kinds, deviations, [row[3] for row in drawn], seed)
            rows += run(jobs, pools, load, seed, options.warm)
        report(load, [row for row in rows if row[0] == load])
    if options.setting == "a":
        print(f"left out of the trace, for want of a model: {dict(without)}")
    if options.csv:
        with options.csv.open("w", newline="") as out:
            csv.writer(out).writerows([("load", "seed", "placement", *FIGURES), *rows])
    if options.plot:
        draw(rows, options.plot, options.setting)


FIGURES = ("mean_s", "p99_s", "makespan_s", "cost", "fairness", "decision_s")


def arrivals_s(jobs: Sequence[Drawn], pools: Sequence[PoolCapacity], load: int) -> list[float]:
    """Return the arrival times of the jobs, for a load in per cent."""
    asked = [tuple(item for item in real if item.gpus == gpus) for _, real, _, _, gpus, _ in jobs]
    span = least_s(asked, pools) / (load / 100)
    first, last = jobs[0][-1], jobs[-1][-1]
    return [(arrival - first) / (last - first) * span for *_, arrival in jobs]


def run(
    jobs: Sequence[Drawn],
    pools: Sequence[PoolCapacity],
    load: int,
    seed: int,
    warm: int = 0,
) -> list[tuple[float | str, ...]]:
    """Return a row for each placement."""
    at = arrivals_s(jobs, pools, load)
    rows = []
    for name, (placement, knows) in WAYS.items():
        arrivals = [
            Arrival(begin, without_range(real) if knows == "perfect" else guessed, seconds, runs, asked)
            for begin, (guessed, real, seconds, runs, asked, _) in zip(at, jobs, strict=True)
        ]
        learner = StepLearner(knows == "own steps") if knows in ("calibrated", "own steps") else None
        clock = time.process_time()
        finish, where = replay(arrivals, pools, placement, learner)
        clock = time.process_time() - clock
        took = np.array(finish) - at
        alone = [
            isolated_s(real, pools, max(int(load / 100 * sum(pool.nodes for pool in pools)), 1)) for _, real, *_ in jobs
        ]
        cost = sum(
            next(item.cost or 0.0 for item in real if (item.pool, item.gpus) == place)
            for place, (_, real, *_) in zip(where, jobs, strict=True)
        )
        figures = (
            took[warm:].mean(),
            np.percentile(took[warm:], 99),
            max(finish),
            cost,
            float((took / alone)[warm:].max()),
        )
        rows.append((load, seed, name, *map(float, figures), clock / len(jobs)))
    return rows


def without_range(options: Sequence[JobOption]) -> tuple[JobOption, ...]:
    """Return options whose run times are certain."""
    return tuple(replace(item, lower_s=item.seconds, upper_s=item.seconds) for item in options)


def report(load: int, rows: Sequence[tuple[float | str, ...]]) -> None:
    """Print the means over the seeds, and the ratio of each mean completion to those of two plans."""
    by_name = {name: np.array([row[3:] for row in rows if row[2] == name], dtype=float) for name in WAYS}
    seeds = len(next(iter(by_name.values())))
    print(f"load {load} %: {seeds} seeds; mean completion over that of two plans, geometric mean (least-most)")
    print(f"{'':26}{'mean':>9}{'p99':>9}{'last':>9}{'cost':>8}{'unfair':>8}{'ms':>6}", *BASES, sep="    ")
    for name, table in by_name.items():
        mean = table.mean(axis=0)
        hours = "".join(f"{value / 3600:8.1f}h" for value in mean[:3])
        ratios = [table[:, 0] / by_name[base][:, 0] for base in BASES]
        shown = [f"{math.exp(np.log(ratio).mean()):6.2f} ({ratio.min():.2f}-{ratio.max():.2f})" for ratio in ratios]
        print(f"{name:26}{hours}{mean[3]:8.0f}{mean[4]:8.2f}{mean[5] * 1e3:6.1f}", *shown, sep="    ", flush=True)


def draw(rows: Sequence[tuple[float | str, ...]], path: Path, setting: str) -> None:
    """Draw mean completion by load, with a line for each placement."""
    from tilecast.render import charts
    from tilecast.render.charts import Axis, Chart, Point, Series

    hours = defaultdict[str, dict[float, list[float]]](lambda: defaultdict(list))
    for load, _, name, mean_s, *_ in rows:
        hours[str(name)][float(load)].append(float(mean_s) / 3600)
    series = tuple(
        Series(name, tuple(Point(load, float(np.mean(each))) for load, each in sorted(hours[name].items())))
        for name in DRAWN
    )
    chart = Chart(f"Mean completion by load, setting ({setting})", Axis("load, %"), Axis("hours", base=10), series)
    path.write_text(charts.draw_svg(chart, f"policies-{setting}", charts.STYLE) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
