"""Speed of the kernel predictor: 10,000 distinct kernels on four GPUs, batched and one at a time, and a cold start."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from tilecast import kernels
from tilecast.graph import KernelTable
from tilecast.hardware import find_gpu
from tilecast.spec import ELEMENT_BYTES

GPUS = ("h100-sxm", "a100-80", "l4", "l40s")
KERNELS = 10_000
ALONE = 200
REPEATS = 5
COLD = """
import time; start = time.perf_counter()
from tilecast import kernels
from tilecast.graph import KernelTable
from tilecast.hardware import find_gpu
kernels.predict_kernel_times(KernelTable.of("gemm", "bf16", batch=1, m=4096, n=4096, k=4096), find_gpu("h100-sxm"))
print(time.perf_counter() - start)
"""


def table() -> KernelTable:
    """Return distinct kernels: half are products, the rest attention, norms and element-wise."""
    rng = np.random.default_rng(0)
    half, some = KERNELS // 2, KERNELS // 6
    m, n, k = rng.integers(1, 16384, (3, half))
    heads, queries = rng.integers(1, 64, some), rng.integers(16, 16384, some)
    rest = KERNELS - half - 2 * some
    size = ELEMENT_BYTES["bf16"]
    return KernelTable.concatenate(
        [
            KernelTable.from_dimensions("gemm", "bf16", batch=1, m=m, n=n, k=k),
            KernelTable.from_dimensions(
                "attention", "bf16", batch=1, heads=heads, kv_heads=heads, seq_q=queries, seq_kv=queries, head_dim=128,
                causal=1, backward=rng.integers(0, 2, some),
            ),
            KernelTable.from_dimensions("rmsnorm", "bf16", rows=rng.integers(1, 1 << 16, some), cols=4096, backward=0),
            KernelTable.from_dimensions(
                "elementwise", "bf16", elements=rng.integers(1, 1 << 30, rest), read_bytes=size, written_bytes=size,
            ),
        ]
    )  # fmt: skip


def best(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the figures."""
    whole, chosen = table(), [find_gpu(name) for name in GPUS]
    rows = [KernelTable(whole.kind[i : i + 1], whole.precision[i : i + 1], whole.dims[i : i + 1]) for i in range(ALONE)]
    batched_s = best(lambda: [kernels.predict_kernel_times(whole, gpu) for gpu in chosen])
    alone_s = best(lambda: [kernels.predict_kernel_times(row, chosen[0]) for row in rows]) / ALONE
    cold = [float(subprocess.run([sys.executable, "-c", COLD], capture_output=True, check=True, text=True).stdout)  # noqa: S603
            for _ in range(3)]  # fmt: skip
    count = KERNELS * len(GPUS)
    batched, alone = count / batched_s, 1 / alone_s
    print(f"batched      {KERNELS:,} kernels on {len(GPUS)} GPUs in {batched_s * 1e3:.0f} ms: {batched:,.0f} kernels/s")
    print(f"one by one   {alone_s * 1e6:.0f} us a kernel: {alone:,.0f} kernels/s, {batched / alone:.0f} times slower")
    print(f"cold start   {min(cold) * 1e3:.0f} ms from import to the first answer")


if __name__ == "__main__":
    main()
