"""Speed of one forecast: a training step of a given model and plan, from a cold process and warm."""

from __future__ import annotations

import subprocess
import sys
import time

from tilecast import zoo
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.search import price
from tilecast.spec import Plan, Plans, Workload

REPEATS = 50
COLD_RUNS = 5
COLD = """
import time; start = time.perf_counter()
import sys; sys.path.insert(0, "bench")
from step import once
once()
print(time.perf_counter() - start)
"""


def once() -> float:
    """Return the seconds of a step of LLaMA-2-7B on two nodes of eight H100, ZeRO 1 over 16 ranks."""
    workload = Workload(model=zoo.find_preset("llama-2-7b"), precision="bf16", sequence_length=4096, global_batch=128)
    pool = Pool("h100-sxm", find_gpu("h100-sxm"), 8, 2, find_link("nvlink4"), find_link("infiniband-ndr-8x400"))
    priced = price(workload, Plans.from_plans(Plan(data=16, gradient_accumulation=8, zero_stage=1)), pool)
    return float(priced.step_s[0])


def main() -> None:
    """Print the figures."""
    once()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    cold = []
    for _ in range(COLD_RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", COLD], capture_output=True, check=True)  # noqa: S603
        cold.append(time.perf_counter() - start)
    times.sort()
    print(f"warm   {times[0] * 1e3:.1f} ms at best, median {times[REPEATS // 2] * 1e3:.1f} ms")
    print(f"cold   {min(cold):.2f} s at best for a whole process, worst {max(cold):.2f} s")


if __name__ == "__main__":
    main()
