"""Kernels that move bytes and hardly compute: durations from fitted ceilings, no network.

    t = ramp + max(traffic / (l2_share · L2), spilled / (dram_share · DRAM), rows · row_cycles / (SMs · clock),
                   row bytes / (rate · clock))

Bytes beyond the L2 spill to DRAM: none below one L2, all above two. Row-wise kernels read a row more than
once; the further passes hit the L2 while the rows in flight, one on every SM, fit into it, and cost traffic
once they do not. A row costs an SM a number of cycles however short it is, and a single SM streams a whole
row however many stand by. Every term is non-decreasing in every dimension. The ceilings are fitted per case
(`tilecast_fit`) and hold on all GPUs; the share of DRAM bandwidth is corrected for dies seen in training.
"""

from __future__ import annotations

import numpy as np

from tilecast.graph import Dims
from tilecast.hardware import Gpu
from tilecast.kernels.utilization import Ceiling, die
from tilecast.spec import Floats


def dram_bytes(moved: Floats, gpu: Gpu) -> Floats:
    """How many of the bytes go to DRAM: none up to one L2, all from two L2 on, shape (N,)."""
    return np.clip(2.0 * (moved - gpu.l2_bytes), 0.0, moved)


def memory_floor_s(moved: Floats, gpu: Gpu) -> Floats:
    """Seconds below which no kernel can move that many bytes: L2 bandwidth, and DRAM's beyond two L2."""
    beyond = np.where(moved > 2.0 * gpu.l2_bytes, moved / gpu.memory_bandwidth_bytes_per_s, 0.0)
    return np.maximum(moved / gpu.l2_bandwidth_bytes_per_s, beyond)


def bandwidth_bound_s(moved: Floats, rows: Floats, gpu: Gpu, ceiling: Ceiling) -> Floats:
    """Duration of kernels that must move `moved` bytes in `rows` rows (0 where there are none), shape (N,)."""
    row_bytes = np.where(rows > 0, moved / np.maximum(rows, 1.0), 0.0)
    missed = np.clip(gpu.sm_count * row_bytes / (ceiling.reuse_share * gpu.l2_bytes), 0.0, 1.0)
    passes = np.where(row_bytes > ceiling.resident_row_bytes, ceiling.extra_passes * missed, 0.0)
    traffic = moved * (1.0 + passes)
    dram_share = ceiling.dram_share * ceiling.dies.get(die(gpu), 1.0)
    cached = traffic / (ceiling.l2_share * gpu.l2_bandwidth_bytes_per_s)
    spilled = dram_bytes(traffic, gpu) / (dram_share * gpu.memory_bandwidth_bytes_per_s)
    each_row = rows * ceiling.row_cycles / (gpu.sm_count * gpu.boost_clock_hz)
    one_row = row_bytes / (ceiling.sm_bytes_per_clock * gpu.boost_clock_hz)
    slowest: Floats = np.maximum.reduce([cached, spilled, each_row, one_row])
    return ceiling.ramp_s + slowest


DRAWING_SM_CYCLES = 0.18
"""Cycles of an SM for one random number. Philox4x32-10 (Salmon et al., SC 2011) spends ten rounds of two wide
multiplications and the exclusive ors on four numbers, some ten lane cycles of the 64 integer lanes of an SM for each;
the dropout of Aceso's tables (V100, FP16 and FP32, MIT) takes so much longer than its bytes."""


def drawing_s(numbers: Floats, gpu: Gpu) -> Floats:
    """Seconds that drawing so many random numbers adds to a kernel, shape (N,)."""
    return numbers * DRAWING_SM_CYCLES / (gpu.sm_count * gpu.boost_clock_hz)


def rows(d: Dims, moved: Floats) -> Floats:
    """Rows of the row-wise kinds, zero for the rest, shape (N,)."""
    return d["rows"] if "rows" in d else np.zeros(len(moved))
