"""Tiles and waves: the thread blocks into which a library cuts a matrix product, and how well they fill the GPU.

A product C[m, n] = A[m, k] B[k, n] is cut into tiles of `rows` × `cols` outputs. Each streaming multiprocessor (SM)
computes one tile at a time. So `T` tiles need `W = ceil(T / SMs)` waves, and the last wave may be nearly empty. If
there are fewer tiles than SMs, libraries also cut `k` (split-K).

The candidates are data (`CANDIDATES`, from `constants.toml`), and `choose_tiling` takes the candidate of least cost.
The utilization network does not depend on that choice, because it sees the waves of every candidate (`features`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tilecast import constants
from tilecast.hardware import Gpu
from tilecast.spec import QUANTIZED, Floats

TENSOR_PRECISIONS: tuple[str, ...] = ("tf32", "fp16", "bf16", *QUANTIZED)


@dataclass(frozen=True, slots=True)
class TileCandidate:
    """A tile shape, and the fraction of the SM's peak that its inner loop reaches with a long `k`.

    A tile of `rows` × `cols` loads rows + cols operands for rows × cols products. So shared memory and the L2 cache
    bound small tiles, and `efficiency` grows with the harmonic mean of the sides.
    """

    rows: int
    cols: int
    efficiency: float


CANDIDATES: Mapping[str, tuple[TileCandidate, ...]] = {
    units: tuple(TileCandidate(*tile) for tile in tiles.candidates)
    for units, tiles in constants.shipped_constants().tiles.items()
}
"""Tiles that libraries choose from, by the units that run them."""


def find_compute_units(precision: str, gpu: Gpu) -> str:
    """Return the units that run a matrix product: `tensor` for tensor cores or `simt` for CUDA cores.

    FP16 on Pascal has no tensor cores.
    """
    has_tensor_cores = gpu.compute_capability >= constants.shipped_constants().kernels.tensor_core_capability
    return "tensor" if precision in TENSOR_PRECISIONS and has_tensor_cores else "simt"


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of N kernels. All columns are (N,), and `fill` is the busy share of the last wave."""

    rows: Floats
    cols: Floats
    split_k: Floats
    tiles: Floats
    waves: Floats
    fill: Floats


def count_tiles(m: Floats, n: Floats, batch: Floats, rows: float, cols: float) -> Floats:
    """Return the number of tiles that cover `batch` outputs of m × n, (N,)."""
    return np.ceil(m / rows) * np.ceil(n / cols) * batch


def choose_tiling(m: Floats, n: Floats, k: Floats, batch: Floats, gpu: Gpu, kind: str) -> Tiling:
    """Return the cheapest tile and split of `k` for each product, (N,) each.

    The cost, in units of one output-row-column-k product per SM, is `waves · rows · cols · (k / split + prologue) /
    efficiency · (1 + cost · (split - 1))`, where the factor `cost` is the cost of a split. Ties go to the first
    candidate of the table, the largest tile.
    """
    known = constants.shipped_constants()
    prologue_k, splits, cost_of_split = known.tiles[kind].prologue_k, known.split_k.splits, known.split_k.cost
    best = np.full(len(m), np.inf)
    columns = np.ones((6, len(m)))
    for tile in CANDIDATES[kind]:
        whole = count_tiles(m, n, batch, tile.rows, tile.cols)
        for split in splits:
            tiles = np.ceil(whole * split)
            waves = np.ceil(tiles / gpu.sm_count)
            depth = np.ceil(k / split) + prologue_k
            cost = waves * tile.rows * tile.cols * depth / tile.efficiency * (1.0 + cost_of_split * (split - 1))
            better = cost < best
            best = np.where(better, cost, best)
            fill = tiles / gpu.sm_count - (waves - 1)
            row = (tile.rows, tile.cols, split, tiles, waves, fill)
            columns = np.where(better, np.stack([np.broadcast_to(value, len(m)) for value in row]), columns)
    return Tiling(*columns)
