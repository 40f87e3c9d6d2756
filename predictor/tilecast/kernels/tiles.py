"""Tiles and waves: how a library cuts a matrix product into thread blocks, and how often those fill the GPU.

A product C[m, n] = A[m, k] B[k, n] is cut into tiles of `rows` × `cols` outputs. Each streaming multiprocessor (SM)
computes one tile at a time, so `T` tiles need `W = ceil(T / SMs)` waves, and the last wave may be nearly empty. Where
there are fewer tiles than SMs, libraries also cut `k` (split-K).

The candidates are data (`CANDIDATES`), the choice between them is one explicit cost (`choose`). The utilization network
does not depend on that choice: it sees the waves of every candidate (`features`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilecast.hardware import Gpu
from tilecast.spec import Floats

TENSOR_PRECISIONS: tuple[str, ...] = ("tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tile shape and the share of the SM's peak that its inner loop reaches with a long `k`.

    A tile of `rows` × `cols` loads rows + cols operands for rows × cols products, so small tiles are bound by shared
    memory and the L2 cache: `efficiency` grows with the harmonic mean of the sides.
    """

    rows: int
    cols: int
    efficiency: float


CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "simt": (
        Candidate(128, 128, 1.00),
        Candidate(128, 64, 0.97),
        Candidate(64, 128, 0.97),
        Candidate(64, 64, 0.65),
        Candidate(128, 32, 0.70),
        Candidate(32, 128, 0.70),
        Candidate(64, 32, 0.40),
        Candidate(32, 64, 0.40),
        Candidate(32, 32, 0.40),
    ),
    "tensor": (
        Candidate(256, 128, 1.00),
        Candidate(128, 256, 1.00),
        Candidate(128, 128, 0.92),
        Candidate(128, 64, 0.78),
        Candidate(64, 128, 0.78),
        Candidate(64, 64, 0.62),
        Candidate(64, 32, 0.42),
        Candidate(32, 64, 0.42),
        Candidate(32, 32, 0.30),
    ),
}
"""Tiles that libraries choose from, by the units that run them. `simt`: the tiles found in the kernel names of
NeuSight's FP32 tables (cuBLAS 12.1), with the efficiencies that reproduce its choices best. `tensor`: the tile menu of
CUTLASS, which cuBLAS's names also show."""

PROLOGUE_K = {"simt": 0.0, "tensor": 192.0}
"""Length of `k` that costs as much as filling the pipeline and writing the tile out."""

SPLITS = (1, 2, 4, 8, 16)
SPLIT_COST = 0.4
"""Share of a tile's time that each extra split of `k` adds for the reduction of partial sums."""


def units(precision: str, gpu: Gpu) -> str:
    """Return which units run a matrix product, `tensor` or `simt`. FP16 on Pascal has no tensor cores."""
    has_tensor_cores = gpu.compute_capability >= 7.0
    return "tensor" if precision in TENSOR_PRECISIONS and has_tensor_cores else "simt"


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of N kernels. All columns are (N,); `fill` is the share of the last wave that has work."""

    rows: Floats
    cols: Floats
    split_k: Floats
    tiles: Floats
    waves: Floats
    fill: Floats


def count(m: Floats, n: Floats, batch: Floats, rows: float, cols: float) -> Floats:
    """Return the number of tiles that cover `batch` outputs of m × n, shape (N,)."""
    return np.ceil(m / rows) * np.ceil(n / cols) * batch


def choose(m: Floats, n: Floats, k: Floats, batch: Floats, gpu: Gpu, kind: str) -> Tiling:
    """Return the cheapest candidate and split of `k` for each product, shape (N,) each.

    The cost of a candidate, in units of one output-row-column-k product per SM, is `waves · rows · cols · (k / split +
    prologue) / efficiency · (1 + SPLIT_COST · (split - 1))`. Ties go to the first candidate of the table, the largest
    tile.
    """
    best = np.full(len(m), np.inf)
    columns = np.ones((6, len(m)))
    for tile in CANDIDATES[kind]:
        whole = count(m, n, batch, tile.rows, tile.cols)
        for split in SPLITS:
            tiles = np.ceil(whole * split)
            waves = np.ceil(tiles / gpu.sm_count)
            depth = np.ceil(k / split) + PROLOGUE_K[kind]
            cost = waves * tile.rows * tile.cols * depth / tile.efficiency * (1.0 + SPLIT_COST * (split - 1))
            better = cost < best
            best = np.where(better, cost, best)
            fill = tiles / gpu.sm_count - (waves - 1)
            row = (tile.rows, tile.cols, split, tiles, waves, fill)
            columns = np.where(better, np.stack([np.broadcast_to(value, len(m)) for value in row]), columns)
    return Tiling(*columns)
