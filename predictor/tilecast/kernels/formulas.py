"""Durations of kernels that move bytes and hardly compute, from fitted ceilings, without a network.

    t = ramp + max(traffic / (l2_share · L2), spilled / (dram_share · DRAM), rows · row_cycles · block / (SMs · clock),
                   row bytes / (rate · clock))

Bytes beyond the L2 spill to DRAM: none below one L2, all above two. Row-wise kernels read a row more than once. The
further passes hit the L2 while the rows in flight, one on every SM, fit into it, and add traffic once they do not. A
row costs an SM a number of cycles, and a single SM streams a whole row, however many other SMs are idle; rows of less
than a whole `block` of threads share the SM with others. Every term is non-decreasing in every dimension. The ceilings
are fitted per case (`tilecast_lab.fit`) and are the same on all GPUs; the share of DRAM bandwidth is corrected for dies
seen in training.
"""

from __future__ import annotations

import numpy as np

from tilecast import constants
from tilecast.graph import Dims
from tilecast.hardware import Gpu
from tilecast.kernels.utilization import BandwidthCeiling, name_die
from tilecast.spec import Floats


def dram_bytes(moved: Floats, gpu: Gpu) -> Floats:
    """Return how many of the bytes go to DRAM: none up to one L2, all from two L2 on, shape (N,)."""
    return np.clip(2.0 * (moved - gpu.l2_bytes), 0.0, moved)


def memory_floor_s(moved: Floats, gpu: Gpu) -> Floats:
    """Return the least seconds in which any kernel can move these bytes.

    They are those at L2 bandwidth and, beyond two L2, at DRAM bandwidth.
    """
    beyond = np.where(moved > 2.0 * gpu.l2_bytes, moved / gpu.memory_bandwidth_bytes_per_s, 0.0)
    return np.maximum(moved / gpu.l2_bandwidth_bytes_per_s, beyond)


THREADS = constants.shipped().kernels.block_threads
"""Threads of the longest block: longer rows have an SM to themselves."""


def direct_conv_s(flops: Floats, moved: Floats, gpu: Gpu, ceiling: BandwidthCeiling) -> Floats:
    """Return the duration of grouped convolutions on the CUDA cores, shape (N,)."""
    streamed = bandwidth_bound_s(moved, np.zeros(len(moved)), gpu, ceiling)
    return np.maximum(streamed, flops / (constants.shipped().kernels.direct_share * gpu.peak("fp32")))


def bandwidth_bound_s(
    moved: Floats, rows: Floats, gpu: Gpu, ceiling: BandwidthCeiling, cols: Floats | float = THREADS
) -> Floats:
    """Return the duration of kernels that must move `moved` bytes, shape (N,).

    The bytes are in `rows` rows (0 for kernels without rows) of `cols` elements.
    """
    block = np.clip(cols / THREADS, 1 / constants.shipped().kernels.resident_blocks, 1.0)
    row_bytes = np.where(rows > 0, moved / np.maximum(rows, 1.0), 0.0)
    missed = np.clip(gpu.sm_count * row_bytes / (ceiling.reuse_share * gpu.l2_bytes), 0.0, 1.0)
    passes = np.where(row_bytes > ceiling.resident_row_bytes, ceiling.extra_passes * missed, 0.0)
    traffic = moved * (1.0 + passes)
    dram_share = ceiling.dram_share * ceiling.dies.get(name_die(gpu), 1.0)
    streamed = dram_share * gpu.memory_bandwidth_bytes_per_s
    # Data from memory pass through the cache, so the cache is no slower.
    cached = traffic / np.maximum(ceiling.l2_share * gpu.l2_bandwidth_bytes_per_s, streamed)
    spilled = dram_bytes(traffic, gpu) / streamed
    each_row = rows * ceiling.row_cycles * block / (gpu.sm_count * gpu.boost_clock_hz)
    one_row = row_bytes / (ceiling.sm_bytes_per_clock * gpu.boost_clock_hz)
    slowest: Floats = np.maximum.reduce([cached, spilled, each_row, one_row])
    return ceiling.ramp_s + slowest


def random_numbers_s(numbers: Floats, gpu: Gpu) -> Floats:
    """Return the seconds that drawing random numbers adds to a kernel, shape (N,)."""
    return numbers * constants.shipped().kernels.random_number_cycles / (gpu.sm_count * gpu.boost_clock_hz)


def count_rows(d: Dims, moved: Floats) -> Floats:
    """Return the rows of the row-wise kinds, zero for the rest, shape (N,)."""
    return d["rows"] if "rows" in d else np.zeros(len(moved))
