"""Kernels that move bytes and hardly compute: durations from fitted bandwidth ceilings, no network.

    t = ramp + max(bytes / (l2_share · L2), spilled / (dram_share · DRAM), row bytes / (SM · clock))

Bytes beyond the L2 spill to DRAM: none below one L2, all above two. The last term is the one row (or
element) that a single SM must stream however large the GPU is. Every term is non-decreasing in every
dimension. The shares, the ramp and the SM's rate are fitted per case (`tilecast_fit`) and hold on all GPUs.
"""

from __future__ import annotations

import numpy as np

from tilecast.graph import Dims
from tilecast.hardware import Gpu
from tilecast.kernels.utilization import Ceiling
from tilecast.spec import Floats


def dram_bytes(moved: Floats, gpu: Gpu) -> Floats:
    """How many of the bytes go to DRAM: none up to one L2, all from two L2 on, shape (N,)."""
    return np.clip(2.0 * (moved - gpu.l2_bytes), 0.0, moved)


def memory_floor_s(moved: Floats, gpu: Gpu) -> Floats:
    """Seconds below which no kernel can move that many bytes: L2 bandwidth, and DRAM's beyond two L2."""
    beyond = np.where(moved > 2.0 * gpu.l2_bytes, moved / gpu.memory_bandwidth_bytes_per_s, 0.0)
    return np.maximum(moved / gpu.l2_bandwidth_bytes_per_s, beyond)


def bandwidth_bound_s(moved: Floats, row_bytes: Floats, gpu: Gpu, ceiling: Ceiling) -> Floats:
    """Duration of kernels that move `moved` bytes, `row_bytes` of them through one SM, shape (N,)."""
    cached = moved / (ceiling.l2_share * gpu.l2_bandwidth_bytes_per_s)
    spilled = dram_bytes(moved, gpu) / (ceiling.dram_share * gpu.memory_bandwidth_bytes_per_s)
    alone = row_bytes / (ceiling.sm_bytes_per_clock * gpu.boost_clock_hz)
    return ceiling.ramp_s + np.maximum(np.maximum(cached, spilled), alone)


def row_bytes(kind: str, d: Dims, moved: Floats) -> Floats:
    """Bytes that one thread block handles from start to end: a row of the row-wise kinds, shape (N,)."""
    if "rows" in d:
        return moved / np.maximum(d["rows"], 1.0)
    return np.zeros(len(moved))
