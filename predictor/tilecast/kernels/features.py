"""What the utilization network sees: dimensionless columns that never fall when a dimension grows.

Times are counted in clock cycles of the GPU at hand and sizes in shares of its L2 cache, so that nothing
names a GPU: a product that keeps the SMs of two GPUs busy for equally many cycles looks the same on both.
Every column is non-decreasing in every dimension of the kernel, which is half of the proof that predicted
times are; the other half are the non-negative weights of the network (`utilization`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilecast.graph import Dims
from tilecast.hardware import Gpu
from tilecast.kernels import tiles
from tilecast.spec import ELEMENT_BYTES, Floats

WINOGRAD_REDUCTION = 2.0
"""FLOPs that Winograd saves in a 3 × 3 convolution of stride one: F(2×2, 3×3) needs 2.25 times fewer
products (Lavin & Gray, arXiv 1509.09308), of which the transforms give some back."""


@dataclass(frozen=True, slots=True)
class Product:
    """N kernels as matrix products C[m, n] = A[m, k] B[k, n], `batch` at a time; columns are (N,)."""

    m: Floats
    n: Floats
    k: Floats
    batch: Floats


def gemm_product(d: Dims) -> Product:
    """A GEMM as it is."""
    return Product(d["m"], d["n"], d["k"], d["batch"])


def conv_product(d: Dims) -> Product:
    """A convolution as the implicit GEMM that cuDNN runs (Chetlur et al., arXiv 1410.0759), per direction."""
    outputs = d["batch"] * d["out_d"] * d["out_h"] * d["out_w"]
    inputs = d["batch"] * d["in_d"] * d["in_h"] * d["in_w"]
    volume = d["k_d"] * d["k_h"] * d["k_w"]
    c_in, c_out = d["c_in"] / d["groups"], d["c_out"] / d["groups"]
    direction = d["direction"].astype(int)
    return Product(
        m=np.choose(direction, [outputs, inputs, c_out]),
        n=np.choose(direction, [c_out, c_in, c_in * volume]),
        k=np.choose(direction, [c_in * volume, c_out * volume, outputs]),
        batch=d["groups"],
    )


PACKED_CHANNELS = 32
"""Channels of a group below which several groups share a tile, their cross terms computed in vain."""


def packed_gemm(d: Dims, flops: Floats) -> tuple[Dims, Floats]:
    """A convolution as the implicit GEMM of tensor cores, small groups packed into one product: its dimensions as
    those of `gemm`, and the FLOPs it then takes."""
    width = np.minimum(d["c_in"], d["c_out"]) / d["groups"]
    together = np.minimum(np.maximum(np.ceil(PACKED_CHANNELS / width), 1.0), d["groups"])
    product = conv_product({**d, "groups": d["groups"] / together})
    dims = {"batch": product.batch, "m": product.m, "n": product.n, "k": product.k}
    return dims, flops * together


def winograd(d: Dims, precision: str) -> npt.NDArray[np.bool_]:
    """Which convolutions cuDNN runs by Winograd: FP32, 3 × 3, stride one, one group, shape (N,) bool."""
    if precision != "fp32":
        return np.zeros(len(d["batch"]), bool)
    square = (d["k_h"] == 3) & (d["k_w"] == 3) & (d["k_d"] == 1) & (d["groups"] == 1)
    same: npt.NDArray[np.bool_] = (d["in_h"] < 1.5 * d["out_h"]) & (d["in_w"] < 1.5 * d["out_w"])
    found: npt.NDArray[np.bool_] = square & same
    return found


def attention_product(d: Dims) -> Product:
    """Fused attention as the thread blocks of FlashAttention-2 see it: query rows × head size per head."""
    return Product(d["seq_q"], d["head_dim"], d["seq_kv"], d["batch"] * d["heads"])


PRODUCTS: Mapping[str, Callable[[Dims], Product]] = {
    "gemm": gemm_product,
    "conv": conv_product,
    "attention": attention_product,
}
"""Kinds that compute more than they move, and how their dimensions read as a matrix product."""
ROWWISE = ("softmax", "layernorm", "rmsnorm")
"""Row-wise kinds that a network may refine; a model file without them falls back to `formulas`."""


def family(kind: str, precision: str, gpu: Gpu) -> str:
    """The network that prices a kind of kernel on a GPU; kinds without one are their own family.

    On tensor cores a convolution is an implicit GEMM and shares its network; in FP32 Winograd sets it apart.
    """
    if kind in ("gemm", "conv"):
        units = tiles.units(precision, gpu)
        return "conv_simt" if (kind, units) == ("conv", "simt") else f"gemm_{units}"
    return "rows" if kind in ROWWISE else kind


def _cycles(seconds: Floats, gpu: Gpu) -> Floats:
    """log2 of one plus that many seconds in clock cycles."""
    return np.log2(1.0 + seconds * gpu.boost_clock_hz)


def columns(
    kind: str, d: Dims, flops: Floats, moved: Floats, gpu: Gpu, precision: str
) -> tuple[tuple[str, ...], Floats]:
    """Names and values of the network's inputs for N kernels of one kind: shape (D,) and (N, D).

    `flops` are the kernels' operations (already reduced for Winograd), `moved` their least DRAM bytes. Kinds
    that no network prices have no columns.
    """
    found = {
        "dram_cycles": _cycles(moved / gpu.memory_bandwidth_bytes_per_s, gpu),
        "l2_cycles": _cycles(moved / gpu.l2_bandwidth_bytes_per_s, gpu),
        "l2_eighths": np.log2(1.0 + 8.0 * moved / gpu.l2_bytes),
        "l2_doubles": np.log2(1.0 + 0.5 * moved / gpu.l2_bytes),
    }
    if kind in PRODUCTS:
        found |= _product_columns(kind, PRODUCTS[kind](d), flops, moved, gpu, precision)
    elif kind in ROWWISE:
        found |= _row_columns(d, moved, gpu)
    else:
        return (), np.zeros((len(moved), 0))
    return tuple(found), np.stack(list(found.values()), axis=1)


def _product_columns(
    kind: str, product: Product, flops: Floats, moved: Floats, gpu: Gpu, precision: str
) -> dict[str, Floats]:
    peak = gpu.peak(precision) * gpu.sustained_ratio[precision]
    per_sm = peak / gpu.sm_count
    element = ELEMENT_BYTES[precision]
    outputs = element * product.batch * product.m * product.n
    right = element * product.batch * product.n * product.k
    left = element * product.batch * product.m * product.k
    if kind == "gemm":
        # A convolution priced as a product reads its input once, however often the product repeats it.
        left, right = np.minimum(left, moved), np.minimum(right, moved)
    dram = gpu.memory_bandwidth_bytes_per_s
    found = {
        "compute_cycles": _cycles(flops / peak, gpu),
        "m": np.log2(1.0 + product.m),
        "n": np.log2(1.0 + product.n),
        "k": np.log2(1.0 + product.k),
        "batch": np.log2(1.0 + product.batch),
        "output_cycles": _cycles(outputs / dram, gpu),
        "right_cycles": _cycles(right / dram, gpu),
        "left_cycles": _cycles(left / dram, gpu),
    }
    shapes = ATTENTION_TILES if kind == "attention" else tuple((t.rows, t.cols) for t in tiles.CANDIDATES["tensor"])
    for rows, cols in shapes:
        whole = tiles.count(product.m, product.n, product.batch, rows, cols)
        waves = np.ceil(whole / gpu.sm_count)
        width = np.where(np.isinf(cols), product.n, cols)
        found[f"waves_{rows}x{cols}"] = _cycles(waves * 2.0 * rows * width * product.k / per_sm, gpu)
        found[f"tiles_{rows}x{cols}"] = np.log2(1.0 + whole / gpu.sm_count)
    if kind == "attention":
        padded = np.ceil(product.n / HEAD_PADDING) * HEAD_PADDING
        found["padded_head"] = np.log2(padded)
        found["padded_cycles"] = _cycles(flops * padded / product.n / peak, gpu)
    return found


def _row_columns(d: Dims, moved: Floats, gpu: Gpu) -> dict[str, Floats]:
    in_flight = gpu.sm_count * moved / d["rows"] / gpu.l2_bytes
    missed = moved * (1.0 + np.clip(4.0 * in_flight, 0.0, 1.0))
    return {
        "rows": np.log2(1.0 + d["rows"]),
        "cols": np.log2(1.0 + d["cols"]),
        "wide_cols": np.log2(1.0 + np.maximum(d["cols"] - 1024.0, 0.0)),
        "rows_per_sm": np.log2(1.0 + d["rows"] / gpu.sm_count),
        "waves": np.log2(np.ceil(d["rows"] / gpu.sm_count)),
        "in_flight": np.log2(1.0 + 16.0 * in_flight),
        "missed_cycles": _cycles(missed / gpu.memory_bandwidth_bytes_per_s, gpu),
    }


HEAD_PADDING = 32
"""Fused kernels pad a head to a multiple of this."""
ATTENTION_TILES: tuple[tuple[int, float], ...] = ((32, np.inf), (64, np.inf), (128, np.inf), (256, np.inf))
"""Query rows per thread block in attention kernels; a block spans the whole head."""
