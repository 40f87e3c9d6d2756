"""Cost of ten thousand observed jobs for the operator: storing runs, learning from them, and one more report.

python bench/learning.py [--runs 10000] [--namespaces 50] [--gpus 10] [--families 8] [--precisions 2]

`loop` marks work of the event loop itself, during which nobody is answered; `thread` marks work beside it.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

sys.path += [str(Path(__file__).resolve().parent.parent / "operator")]

from tilecast.api import pool_learning
from tilecast.api.calibration import ObservedRun
from tilecast.learning.calibration import GPU_RANGES, Run
from tilecast_operator.observed.calibrator import Calibrator, FittedCalibration
from tilecast_operator.observed.run_store import RunStore

CLUSTER, NOISE = 0.12, 0.1
"""Standard deviations of the part that a namespace's runs share, and of each run alone."""
ResultT = TypeVar("ResultT")


def observed(options: argparse.Namespace) -> list[ObservedRun]:
    """Return the runs of many jobs, oldest first."""
    rng = np.random.default_rng(0)
    shift = rng.normal(0.0, CLUSTER, options.namespaces)
    runs = []
    for number in range(options.runs):
        namespace, gpu = number % options.namespaces, f"gpu-{rng.integers(options.gpus)}"
        predicted_s = float(rng.uniform(0.1, 5.0))
        run = Run(
            pool=gpu,
            gpu=gpu,
            precision=("bf16", "fp16", "tf32")[rng.integers(options.precisions)],
            family=f"family-{rng.integers(options.families)}",
            scale=GPU_RANGES[rng.integers(len(GPU_RANGES))][1],
            workload=f"{rng.integers(500):08x}",
            predicted_s=predicted_s,
            observed_s=predicted_s * float(np.exp(shift[namespace] + rng.normal(0.0, NOISE))),
            observations=int(rng.integers(1, 9)),
            framework="fsdp2",
            namespace=f"team-{namespace}",
        )
        time_ = f"2027-01-{1 + number // 1440:02d}T{number // 60 % 24:02d}:{number % 60:02d}:00Z"
        runs.append(ObservedRun(f"uid-{number}", time_, run, f"job-{number}", "trainer", "put", "", 8, "dp8"))
    return runs


def timed(name: str, function: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Call a function and print how long it took."""
    began = time.perf_counter()
    result = function(*arguments)
    print(f"{name:<46}{time.perf_counter() - began:9.3f} s")
    return result


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser()
    for name, value in (("runs", 10000), ("namespaces", 50), ("gpus", 10), ("families", 8), ("precisions", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    runs = observed(parser.parse_args())
    store = RunStore()
    calibrator = Calibrator(store)
    timed("loop: every run taken", lambda: [store.store_run(item) for item in runs])
    question = timed("loop: what is to be learnt", calibrator.make_fit_arguments)
    calibrator.adopt_fit(timed("thread: learning it all", FittedCalibration.fit, *question))
    timed("loop: runs in doubt and standing", calibrator.count_runs_by_state)
    newest = runs[-1]
    longer = replace(newest, run=replace(newest.run, observed_s=newest.run.observed_s * 1.1, observations=9))
    timed("loop: one report more", store.store_run, longer)
    question = timed("loop: what is to be learnt", calibrator.make_fit_arguments)
    fitted = timed("thread: learning what changed", FittedCalibration.fit, *question)
    timed("loop: whether forecasts change", calibrator.adopt_fit, fitted)
    timed("loop: runs in doubt and standing", calibrator.count_runs_by_state)
    timed(
        "loop: runs in doubt again, for every pool", lambda: [calibrator.list_quarantined_runs() for _ in store.pools()]
    )
    documents = {
        pool: timed("loop: the PoolLearning of a pool", store.make_learning_document, pool)
        for pool in sorted(store.pools())[:1]
    }
    documents |= {pool: store.make_learning_document(pool) for pool in store.pools()}
    again = RunStore()
    for pool, document in documents.items():
        again.restore_runs(
            pool, pool_learning.read_learnt_runs(pool, document), pool_learning.read_forget_requests(document)
        )
    same = {(item.uid, item.run.workload) for item in again.list_all_runs()} == {
        (item.uid, item.run.workload) for item in store.list_all_runs()
    }
    print(f"{len(store.list_all_runs())} runs kept, a restart has {'the same' if same else 'others'}")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB resident at most")


if __name__ == "__main__":
    main()
