"""Durations of kernels that memory bandwidth bounds, from formulas with fitted constants.

    t = ramp + max(cached, spilled / (dram_share · DRAM), rows · row_cycles · block / (SMs · clock),
                   row bytes / (rate · clock))

    cached = min(traffic / (l2_share · L2), reads / (cached_read_share · L2) + writes / (dram_share · DRAM))

L2 and DRAM are the bandwidths of the cache and of memory. The reads and writes of element-wise kernels are known. For
other kernels `cached` is the first of the two times. No bytes spill to DRAM if the traffic fits into the L2. All
bytes do if the traffic exceeds twice the size of the L2.

A row-wise kernel may read a row several times. The rows in flight are one row per SM. If they fit into the L2, further
reads hit the cache. Otherwise further reads add traffic. A row takes an SM a number of cycles. One SM streams a whole
row, even if other SMs are idle. A row with fewer elements than a `block` of threads shares the SM with other rows.
Every term is non-decreasing in every dimension.

The constants are fitted per case (`tilecast_lab.fit`) and are equal on all GPUs. Only `dram_share` has a correction for
each die in the training data.
"""

from __future__ import annotations

import numpy as np

from tilecast import constants
from tilecast.graph import Dims
from tilecast.hardware import Gpu
from tilecast.kernels.utilization import BandwidthCeiling, name_die
from tilecast.spec import Floats


def count_dram_bytes(moved: Floats, gpu: Gpu) -> Floats:
    """Return how many of the `moved` bytes go to DRAM, (N,).

    No bytes go to DRAM up to the size of the L2, and all bytes do from twice that size on.
    """
    return np.clip(2.0 * (moved - gpu.l2_bytes), 0.0, moved)


def memory_floor_s(moved: Floats, gpu: Gpu) -> Floats:
    """Return a lower bound on the seconds in which a kernel moves `moved` bytes, (N,).

    The bound follows from the L2 bandwidth and, beyond twice the size of the L2, also from the DRAM bandwidth.
    """
    beyond = np.where(moved > 2.0 * gpu.l2_bytes, moved / gpu.memory_bandwidth_bytes_per_s, 0.0)
    return np.maximum(moved / gpu.l2_bandwidth_bytes_per_s, beyond)


THREADS = constants.shipped_constants().kernels.block_threads
"""Threads of the largest block. A row with at least as many elements has an SM to itself."""


def direct_conv_s(flops: Floats, moved: Floats, gpu: Gpu, ceiling: BandwidthCeiling) -> Floats:
    """Return the seconds of grouped convolutions on CUDA cores, (N,), from their FLOPs and their moved bytes."""
    streamed = bandwidth_bound_s(moved, np.zeros(len(moved)), gpu, ceiling)
    return np.maximum(streamed, flops / (constants.shipped_constants().kernels.direct_share * gpu.peak("fp32")))


def bandwidth_bound_s(
    moved: Floats,
    rows: Floats,
    gpu: Gpu,
    ceiling: BandwidthCeiling,
    cols: Floats | float = THREADS,
    written_share: Floats | float = 1.0,
) -> Floats:
    """Return the seconds of kernels that are bound by memory bandwidth, (N,).

    Args:
        moved: bytes that each kernel must move, (N,).
        rows: rows of each kernel, or 0 for a kernel without rows, (N,).
        gpu: the GPU.
        ceiling: fitted constants of the kernels.
        cols: elements of a row.
        written_share: share of the bytes that a kernel writes, or 1 if it is unknown.
    """
    block = np.clip(cols / THREADS, 1 / constants.shipped_constants().kernels.resident_blocks, 1.0)
    row_bytes = np.where(rows > 0, moved / np.maximum(rows, 1.0), 0.0)
    missed = np.clip(gpu.sm_count * row_bytes / (ceiling.reuse_share * gpu.l2_bytes), 0.0, 1.0)
    passes = np.where(row_bytes > ceiling.resident_row_bytes, ceiling.extra_passes * missed, 0.0)
    traffic = moved * (1.0 + passes)
    dram_share = ceiling.dram_share * ceiling.dies.get(name_die(gpu), 1.0)
    streamed = dram_share * gpu.memory_bandwidth_bytes_per_s
    # Data from memory pass through the cache, so the cache is no slower.
    cached = traffic / np.maximum(ceiling.l2_share * gpu.l2_bandwidth_bytes_per_s, streamed)
    cached_read_share = constants.shipped_constants().kernels.cached_read_share
    read = (1.0 - written_share) / (cached_read_share * gpu.l2_bandwidth_bytes_per_s)
    cached = np.minimum(cached, traffic * (read + written_share / streamed))
    spilled = count_dram_bytes(traffic, gpu) / streamed
    each_row = rows * ceiling.row_cycles * block / (gpu.sm_count * gpu.boost_clock_hz)
    one_row = row_bytes / (ceiling.sm_bytes_per_clock * gpu.boost_clock_hz)
    slowest: Floats = np.maximum.reduce([cached, spilled, each_row, one_row])
    return ceiling.ramp_s + slowest


def random_numbers_s(numbers: Floats, gpu: Gpu) -> Floats:
    """Return the seconds that each kernel takes to draw its number of random numbers on a GPU, (N,)."""
    return numbers * constants.shipped_constants().kernels.random_number_cycles / (gpu.sm_count * gpu.boost_clock_hz)


def count_rows(dims: Dims, moved: Floats) -> Floats:
    """Return the rows, such as those of a softmax, that each of N kernels of one kind processes, (N,).

    It is 0 for kinds that do not work row by row.
    """
    return dims["rows"] if "rows" in dims else np.zeros(len(moved))


def compute_written_share(dims: Dims, moved: Floats) -> Floats:
    """Return the share of the bytes of N kernels of one kind that they write, (N,).

    It is 1 for kinds that are not element-wise, for which it is unknown, and for kernels that move no bytes.
    """
    if "written_bytes" not in dims:
        return np.ones(len(moved))
    both = dims["read_bytes"] + dims["written_bytes"]
    return np.where(both > 0, dims["written_bytes"] / np.where(both > 0, both, 1.0), 1.0)
