"""Speed of the plan search: plans per second and core, and the time of whole advice.

A plan counts if it divides and a framework executes it. Full detail is what `search.price` reports of a plan: every
part of its step and every line of its memory bill. Seconds per core are processor time, so that other load on the
machine does not count. Rates start from nothing: graphs, kernels and plan tables are forgotten between runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields

from tilecast import memo, search, zoo
from tilecast.cli import main as tilecast
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.memory import Footprint
from tilecast.spec import Floats, Workload
from tilecast.step import PARTS

CALCULON = 177
"""Executions that Calculon prices per second on one core (Isaev et al., SC 2023: its search of 4,096 GPUs)."""
REPEATS = 5
LARGE = "advise gpt3-175b --seq 2048 --batch 1536 --gpus h100-sxm:512,a100-80:512,l4:512,t4:512"
SMALL = "advise llama-2-7b --seq 4096 --batch 512 --gpus h100-sxm:64,a100-80:64,l4:64,t4:64"
JOBS = {
    "gpt3-175b on 512 GPUs": (Workload(zoo.find_preset("gpt3-175b"), 2048, 1536), 64),
    "llama-2-7b on 64 GPUs": (Workload(zoo.find_preset("llama-2-7b"), 4096, 512), 8),
    "mixtral-8x7b on 128 GPUs": (Workload(zoo.find_preset("mixtral-8x7b"), 4096, 1024), 16),
    "deepseek-v3 on 1,024 GPUs": (Workload(zoo.find_preset("deepseek-v3"), 4096, 4096), 128),
}


def pool(gpu: str, nodes: int) -> Pool:
    facts = find_gpu(gpu)
    return Pool(facts.name, facts, 8, nodes, find_link(facts.intra_link), find_link("infiniband-ndr-8x400"))


def fastest(action: Callable[[], object], before: Callable[[], object] = lambda: None) -> tuple[float, float]:
    """Return the least processor seconds and the least wall-clock seconds of some runs."""
    times = []
    for _ in range(REPEATS):
        before()
        spent, start = time.process_time(), time.perf_counter()
        action()
        times.append((time.process_time() - spent, time.perf_counter() - start))
    return min(one[0] for one in times), min(one[1] for one in times)


def silent(command: str) -> Callable[[], object]:
    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            tilecast(command.split())

    return run


def cold(command: str) -> tuple[float, float, float]:
    """Return the least processor and wall-clock seconds of a command in a new process, and the peak memory in MB.

    The memory is the largest resident set of all children. From the second run on the bytecode is cached, as where
    pip installed the package.
    """
    words = [sys.executable, "-m", "tilecast", *command.split()]

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    times = []
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        for _ in range(REPEATS):
            before, start = spent(), time.perf_counter()
            subprocess.run(words, check=True, capture_output=True, env=variables)  # noqa: S603
            times.append((spent() - before, time.perf_counter() - start))
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    return min(one[0] for one in times), min(one[1] for one in times), largest


def priced(workload: Workload, where: Pool) -> tuple[Floats, Floats]:
    """Return the steps and bytes of every plan."""
    plans = search.find(workload, where)
    return plans.step_s, plans.memory_bytes


def main() -> None:
    """Print the figures."""
    advices = (("gpt3-175b, four pools of 512", LARGE), ("llama-2-7b, four pools of 64", SMALL))
    # Children first: a child's largest resident set includes the time before exec, when it shared its parent's memory.
    for name, command in advices:
        processor_s, wall_s, largest = cold(command)
        print(f"{name}: cold process {wall_s:.2f} s, {processor_s:.2f} s of the processor, at most {largest:.0f} MB")
    for name, command in advices:
        for case, before in (("warm", lambda: None), ("warm, a job never seen", memo.clear_all_memos)):
            processor_s, wall_s = fastest(silent(command), before)
            print(f"{name}: {case} {wall_s * 1e3:.0f} ms, {processor_s * 1e3:.0f} ms of the processor")
    lines = len(fields(Footprint))
    print(f"detail: {len(PARTS)} parts of a step and {lines} lines of a memory bill; 1 of {os.cpu_count()} cores")
    rates = []
    for name, (workload, nodes) in JOBS.items():
        where = pool("h100-sxm", nodes)
        rows = len(search.find(workload, where))
        nothing = fastest(lambda: priced(workload, where), memo.clear_all_memos)[0]  # noqa: B023
        rates.append(rows / nothing)
        print(f"{name}: {rows:,} plans, {nothing * 1e3:.0f} ms from nothing: {rows / nothing:,.0f} plans/s/core")
    print(f"Calculon prices {CALCULON}/s/core: {rates[0] / CALCULON:,.0f} times as many")
    print(f"{rates[0]:,.0f} plans/s/core")


if __name__ == "__main__":
    main()
