"""Tiles and waves: the blocks into which a library cuts a matrix product, and how well the blocks fill the GPU.

A product C[m, n] = A[m, k] B[k, n] is cut into tiles of `rows` × `cols` outputs. Each streaming multiprocessor (SM)
computes one tile at a time. So `T` tiles need `W = ceil(T / SMs)` waves, and the last wave may be nearly empty. If
there are fewer tiles than SMs, libraries also cut `k` (split-K).

`CANDIDATES` lists the tile shapes, from `constants.toml`. `choose_tiling` returns the candidate with the least cost.
The neural networks do not depend on this choice, because they see the waves of every candidate (`features`).
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
    """A tile shape that libraries choose from, with its efficiency.

    A tile of `rows` × `cols` loads rows + cols operands for rows × cols products. So shared memory and the L2 cache
    bound small tiles, and `efficiency` grows with the harmonic mean of the sides.
    """

    rows: int
    cols: int
    efficiency: float
    """Fraction of an SM's peak that the inner loop reaches if `k` is long."""


CANDIDATES: Mapping[str, tuple[TileCandidate, ...]] = {
    units: tuple(TileCandidate(*tile) for tile in tiles.candidates)
    for units, tiles in constants.shipped_constants().tiles.items()
}
"""Tile shapes that libraries choose from, by compute units (`find_compute_units`)."""


def find_compute_units(precision: str, gpu: Gpu) -> str:
    """Return the units that run matrix products of a precision: `tensor` for tensor cores, `simt` for CUDA cores."""
    has_tensor_cores = gpu.compute_capability >= constants.shipped_constants().kernels.tensor_core_capability
    return "tensor" if precision in TENSOR_PRECISIONS and has_tensor_cores else "simt"


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles into which a library splits N kernels, as columns (N,)."""

    rows: Floats
    """Rows of a tile."""
    cols: Floats
    """Columns of a tile."""
    split_k: Floats
    """Number of parts into which `k` is cut."""
    tiles: Floats
    """Number of tiles."""
    waves: Floats
    """Number of waves."""
    fill: Floats
    """Fraction of the SMs that the last wave keeps busy."""


def count_tiles(m: Floats, n: Floats, batch: Floats, rows: float, cols: float) -> Floats:
    """Return the number of tiles of `rows` × `cols` that cover `batch` matrices of m × n, (N,)."""
    return np.ceil(m / rows) * np.ceil(n / cols) * batch


def choose_tiling(m: Floats, n: Floats, k: Floats, batch: Floats, gpu: Gpu, units: str) -> Tiling:
    """Return the cheapest tile shape and split of `k` for each of N matrix products.

    `units` is the kind of compute units that they run on, a key of `CANDIDATES`.

    The cost is `waves · rows · cols · (k / split + prologue) / efficiency · (1 + cost · (split - 1))` multiply-adds per
    SM. The constant `cost` is the relative cost of one more split. Of tiles with equal cost, the first one of
    `CANDIDATES` is taken, which is the largest tile.
    """
    known = constants.shipped_constants()
    prologue_k, splits, cost_of_split = known.tiles[units].prologue_k, known.split_k.splits, known.split_k.cost
    best = np.full(len(m), np.inf)
    columns = np.ones((6, len(m)))
    for tile in CANDIDATES[units]:
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
