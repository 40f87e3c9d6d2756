"""Inputs of the utilization networks: dimensionless columns that never fall when a dimension grows, and details.

Times are counted in clock cycles of the GPU and sizes in shares of its L2 cache, so that no column depends on which GPU
it is: a product that keeps the SMs of two GPUs busy for equally many cycles looks the same on both. Every column is
non-decreasing in every dimension of the kernel. With the non-negative weights of the network (`utilization`), this
proves that predicted times are non-decreasing too. The details of a product (how full its last wave is, how its sides
align) may rise or fall: the amount that they add is bounded by the growth of the rest when a dimension is doubled.

`network_inputs` is the entry point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tilecast import constants
from tilecast.graph import KINDS, Dims, Kind, gemm_output_bytes
from tilecast.hardware import Gpu
from tilecast.kernels import tiles
from tilecast.memo import Memo
from tilecast.spec import ELEMENT_BYTES, Floats


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """N kernels as matrix products C[m, n] = A[m, k] B[k, n], `batch` at a time; columns are (N,)."""

    m: Floats
    n: Floats
    k: Floats
    batch: Floats


def gemm_product(d: Dims) -> MatrixProduct:
    """Return a GEMM as a product, unchanged."""
    return MatrixProduct(d["m"], d["n"], d["k"], d["batch"])


def conv_product(d: Dims) -> MatrixProduct:
    """Return a convolution as the implicit GEMM that cuDNN runs (Chetlur et al., arXiv 1410.0759), per direction."""
    outputs = d["batch"] * d["out_d"] * d["out_h"] * d["out_w"]
    inputs = d["batch"] * d["in_d"] * d["in_h"] * d["in_w"]
    volume = d["k_d"] * d["k_h"] * d["k_w"]
    c_in, c_out = d["c_in"] / d["groups"], d["c_out"] / d["groups"]
    direction = d["direction"].astype(int)
    return MatrixProduct(
        m=np.choose(direction, [outputs, inputs, c_out]),
        n=np.choose(direction, [c_out, c_in, c_in * volume]),
        k=np.choose(direction, [c_in * volume, c_out * volume, outputs]),
        batch=d["groups"],
    )


def is_image_convolution(d: Dims) -> npt.NDArray[np.bool_]:
    """Return which convolutions are over images in one group, like those measured on tensor cores, (N,) bool."""
    flat: npt.NDArray[np.bool_] = (d["groups"] == 1) & (d["k_d"] == 1) & (d["in_d"] == 1) & (d["out_d"] == 1)
    return flat


def tensor_rate_doublings(gpu: Gpu, precision: str) -> float:
    """Return how often the rate at which a multiprocessor's tensor cores take bytes has doubled over the usual one.

    With each doubling, the addresses and loads of an implicit GEMM, whose rate stayed the same, hide less behind its
    arithmetic.
    """
    rate = gpu.peak(precision) / (gpu.sm_count * gpu.boost_clock_hz) * ELEMENT_BYTES[precision]
    return max(float(np.log2(rate / constants.shipped().kernels.usual_tensor_rate)), 0.0)


def pack_groups_into_gemm(w: KernelWork) -> KernelWork:
    """Return convolutions as the implicit GEMM of tensor cores, with small groups packed into one product.

    A packed product has sides of `constants.Kernels.packed_channels` at least and computes cross terms of its groups in
    vain.
    """
    d = w.dims
    c_in, c_out = d["c_in"] / d["groups"], d["c_out"] / d["groups"]
    packed = constants.shipped().kernels.packed_channels
    together = np.minimum(np.maximum(np.ceil(packed / np.minimum(c_in, c_out)), 1.0), d["groups"])
    packs = d["groups"] / together

    def side(channels: Floats) -> Floats:
        return np.minimum(np.maximum(channels, packed), channels * d["groups"])

    product = conv_product({**d, "groups": packs, "c_in": side(c_in) * packs, "c_out": side(c_out) * packs})
    sides = {"batch": product.batch, "m": product.m, "n": product.n, "k": product.k}
    dims = {**sides, "accumulated": np.zeros(len(product.m))}
    return KernelWork("gemm", dims, w.flops * together, w.moved_bytes, exact=False)


def uses_winograd(d: Dims, precision: str) -> npt.NDArray[np.bool_]:
    """Return which convolutions cuDNN runs by Winograd: FP32, 3 × 3, stride one, one group, shape (N,) bool."""
    if precision != "fp32":
        return np.zeros(len(d["batch"]), bool)
    square = (d["k_h"] == 3) & (d["k_w"] == 3) & (d["k_d"] == 1) & (d["groups"] == 1)
    same: npt.NDArray[np.bool_] = (d["in_h"] < 1.5 * d["out_h"]) & (d["in_w"] < 1.5 * d["out_w"])
    fits: npt.NDArray[np.bool_] = square & same
    return fits


def attention_product(d: Dims) -> MatrixProduct:
    """Return fused attention as the thread blocks of FlashAttention-2 see it: query rows × head size per head."""
    return MatrixProduct(d["seq_q"], d["head_dim"], d["seq_kv"], d["batch"] * d["heads"])


PRODUCTS: Mapping[str, Callable[[Dims], MatrixProduct]] = {
    "gemm": gemm_product,
    "conv": conv_product,
    "attention": attention_product,
}
"""Kinds that compute more than they move, and the functions that turn their dimensions into a matrix product."""
ROWWISE = ("softmax", "layernorm", "rmsnorm")
"""Row-wise kinds that a network may refine; a model file without them falls back to `formulas`."""


def network_family(kind: str, precision: str, gpu: Gpu) -> str:
    """Return the network that prices a kind of kernel on a GPU; kinds without one are their own family.

    On tensor cores a convolution is an implicit GEMM and shares its network; in FP32 it has its own, because of
    Winograd.
    """
    if kind in ("gemm", "conv"):
        units = tiles.compute_units(precision, gpu)
        return "conv_simt" if (kind, units) == ("conv", "simt") else f"gemm_{units}"
    return "rows" if kind in ROWWISE else kind


def _log2_cycles(seconds: Floats, gpu: Gpu) -> Floats:
    """Return log2 of one plus these seconds in clock cycles."""
    return np.log2(1.0 + seconds * gpu.boost_clock_hz)


def _network_columns(w: KernelWork, gpu: Gpu, precision: str) -> tuple[tuple[str, ...], Floats]:
    """Return names and values of the network's columns: shape (D,) and (N, D)."""
    moved = w.moved_bytes
    columns = {
        "dram_cycles": _log2_cycles(moved / gpu.memory_bandwidth_bytes_per_s, gpu),
        "l2_cycles": _log2_cycles(moved / gpu.l2_bandwidth_bytes_per_s, gpu),
        "l2_eighths": np.log2(1.0 + 8.0 * moved / gpu.l2_bytes),
        "l2_doubles": np.log2(1.0 + 0.5 * moved / gpu.l2_bytes),
    }
    if w.kind in PRODUCTS:
        columns |= _product_columns(w, PRODUCTS[w.kind](w.dims), gpu, precision)
    elif w.kind in ROWWISE:
        columns |= _rowwise_columns(w.dims, moved, gpu)
    else:
        return (), np.zeros((len(moved), 0))
    return tuple(columns), np.array(list(columns.values())).T


def _product_columns(w: KernelWork, product: MatrixProduct, gpu: Gpu, precision: str) -> dict[str, Floats]:
    ratio = gpu.sustained_ratio[precision]
    if w.kind == "attention":
        ratio = gpu.sustained_ratio.get("attention", ratio)
    peak = gpu.peak(precision) * ratio
    per_sm = peak / gpu.sm_count
    element = ELEMENT_BYTES[precision]
    written = gemm_output_bytes(w.dims, element) if w.kind == "gemm" else element
    outputs = written * product.batch * product.m * product.n
    right = element * product.batch * product.n * product.k
    left = element * product.batch * product.m * product.k
    if w.kind == "gemm":
        # A convolution that is priced as a product reads its input once, however often the product repeats it.
        left, right = np.minimum(left, w.moved_bytes), np.minimum(right, w.moved_bytes)
    dram = gpu.memory_bandwidth_bytes_per_s
    columns = {
        "compute_cycles": _log2_cycles(w.flops / peak, gpu),
        "m": np.log2(1.0 + product.m),
        "n": np.log2(1.0 + product.n),
        "k": np.log2(1.0 + product.k),
        "batch": np.log2(1.0 + product.batch),
        "output_cycles": _log2_cycles(outputs / dram, gpu),
        "right_cycles": _log2_cycles(right / dram, gpu),
        "left_cycles": _log2_cycles(left / dram, gpu),
    }
    if w.kind != "attention":
        columns["aligned_cycles"] = _log2_cycles(w.flops * _alignment_waste(w) / peak, gpu)
        columns["narrow_cycles"] = _log2_cycles(_narrow_channel_flops(w) / gpu.peak("fp32"), gpu)
    for name, share in SPILL_SHARES.items():
        spilled = np.clip(2.0 * (w.moved_bytes - share * gpu.l2_bytes), 0.0, w.moved_bytes)
        columns[f"spilled_{name}"] = _log2_cycles(spilled / dram, gpu)
    if w.kind != "attention" and tiles.compute_units(precision, gpu) == "simt":
        for name, after_s in HEATED_S.items():
            beyond = np.clip(w.flops / peak / after_s - 1.0, 0.0, 1.0)
            columns[f"heated_{name}"] = _log2_cycles(w.flops / peak * beyond, gpu)
    shapes = ATTENTION_TILES if w.kind == "attention" else tuple((t.rows, t.cols) for t in tiles.CANDIDATES["tensor"])
    # A block of the backward pass computes five products where one of the forward pass computes two.
    longer = np.where(w.dims["backward"] > 0, 2.5, 1.0) if w.kind == "attention" else 1.0
    for rows, cols in shapes:
        whole = tiles.count_tiles(product.m, product.n, product.batch, rows, cols)
        waves = np.ceil(whole / gpu.sm_count)
        width = np.where(np.isinf(cols), product.n, cols)
        columns[f"waves_{rows}x{cols}"] = _log2_cycles(waves * 2.0 * rows * width * product.k * longer / per_sm, gpu)
        columns[f"tiles_{rows}x{cols}"] = np.log2(1.0 + whole / gpu.sm_count)
    if w.kind == "attention":
        padded = np.ceil(product.n / HEAD_PADDING) * HEAD_PADDING
        columns["padded_head"] = np.log2(padded)
        columns["padded_cycles"] = _log2_cycles(w.flops * padded / product.n / peak, gpu)
        columns["sequences"] = np.log2(1.0 + w.dims["batch"])
        columns["kv_heads"] = np.log2(1.0 + w.dims["kv_heads"])
    return columns


def _alignment_waste(w: KernelWork) -> Floats:
    """Return the ratio of products that tensor cores compute with padding to those without, shape (N,).

    The channels, or the two sides of a GEMM that are contiguous in memory, are padded to whole words.
    """
    d = w.dims
    sides = (d["c_in"] / d["groups"], d["c_out"] / d["groups"]) if w.kind == "conv" else (d["n"], d["k"])
    waste = np.ones(len(w.flops))
    for side in sides:
        waste = waste * np.ceil(side / WORD) * WORD / side
    return waste


def _narrow_channel_flops(w: KernelWork) -> Floats:
    """Return the FLOPs of convolutions on channels that do not fill a word, which run without tensor cores, (N,)."""
    if w.kind != "conv":
        return np.zeros(len(w.flops))
    channels = w.dims["c_in"] / w.dims["groups"]
    return w.flops * np.minimum(channels, WORD / 2) / channels


def _rowwise_columns(d: Dims, moved: Floats, gpu: Gpu) -> dict[str, Floats]:
    in_flight = gpu.sm_count * moved / d["rows"] / gpu.l2_bytes
    missed = moved * (1.0 + np.clip(4.0 * in_flight, 0.0, 1.0))
    return {
        "rows": np.log2(1.0 + d["rows"]),
        "cols": np.log2(1.0 + d["cols"]),
        "wide_cols": np.log2(1.0 + np.maximum(d["cols"] - 1024.0, 0.0)),
        "rows_per_sm": np.log2(1.0 + d["rows"] / gpu.sm_count),
        "waves": np.log2(np.ceil(d["rows"] / gpu.sm_count)),
        "in_flight": np.log2(1.0 + 16.0 * in_flight),
        "missed_cycles": _log2_cycles(missed / gpu.memory_bandwidth_bytes_per_s, gpu),
    }


@dataclass(frozen=True, slots=True)
class KernelWork:
    """N kernels of one kind with their FLOPs (reduced for Winograd) and least DRAM bytes, both (N,)."""

    kind: str
    dims: Dims
    flops: Floats
    moved_bytes: Floats
    exact: bool = True
    """Whether they run as the kind they are; a convolution priced as a matrix product is not refined."""

    def take(self, part: npt.NDArray[np.bool_]) -> KernelWork:
        """Return the chosen kernels."""
        dims = {name: column[part] for name, column in self.dims.items()}
        return replace(self, dims=dims, flops=self.flops[part], moved_bytes=self.moved_bytes[part])


def compute_work(kind: Kind, precision: str, d: Dims) -> KernelWork:
    """Return the work of N kernels."""
    element = np.full(len(next(iter(d.values()))), ELEMENT_BYTES[precision])
    flops, moved = kind.flops(d), kind.bytes(d, element)
    if kind.name == "attention":
        # Queries beyond the keys of a causal mask see nothing, but more queries never make the work less.
        flops = np.maximum(flops, kind.flops({**d, "seq_q": np.minimum(d["seq_q"], d["seq_kv"])}))
    if kind.name == "conv":
        flops = flops / np.where(uses_winograd(d, precision), constants.shipped().kernels.winograd_reduction, 1.0)
    return KernelWork(kind.name, d, flops, moved)


@dataclass(frozen=True, slots=True)
class NetworkInputs:
    """Inputs of a network for N kernels.

    `columns` is (1 + J, N, D): the kernels themselves, then with each of J dimensions doubled where the family is
    refined. `details` is (N, E); E is zero for families that are not refined.
    """

    names: tuple[str, ...]
    columns: Floats
    details: Floats


def network_inputs(family: str, w: KernelWork, gpu: Gpu, precision: str) -> NetworkInputs:
    """Return the inputs of a family's network. Kinds that no network prices have no columns."""
    grown = REFINED.get(family, ())
    if grown and w.exact and w.kind in REFINED_KINDS:
        key = (w.kind, precision, grown, *(column.tobytes() for column in w.dims.values()))
        larger, details = _GPU_INDEPENDENT.get(
            key, lambda: (_append_doubled(w, grown, precision), _side_details(w.dims))
        )
        names, columns = _network_columns(larger, gpu, precision)
        stacked = columns.T.reshape(-1, 1 + len(grown), len(w.flops)).transpose(1, 2, 0)
        return NetworkInputs(names, stacked, np.array([*details, *_wave_details(w.dims, gpu)]).T)
    names, own = _network_columns(w, gpu, precision)
    same = np.broadcast_to(own, (1 + len(grown), *own.shape))
    return NetworkInputs(names, same, np.zeros((len(own), DETAILS if grown else 0)))


def _append_doubled(w: KernelWork, grown: Sequence[str], precision: str) -> KernelWork:
    """Return the kernels, followed by the same ones with each of some dimensions doubled."""
    larger = {
        name: np.concatenate([2.0 * column if name == other else column for other in ("", *grown)])
        for name, column in w.dims.items()
    }
    return compute_work(KINDS[w.kind], precision, larger)


_GPU_INDEPENDENT: Memo[tuple[KernelWork, list[Floats]]] = Memo(8)
"""Inputs of refined kernels that are the same on every GPU: `_append_doubled` and `_side_details`."""


def join_inputs(parts: Sequence[NetworkInputs]) -> NetworkInputs:
    """Return the inputs of several groups of kernels of one family, one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = np.concatenate([part.columns for part in parts], axis=1)
    return NetworkInputs(parts[0].names, columns, np.concatenate([part.details for part in parts]))


def _side_details(d: Dims) -> list[Floats]:
    """Return the details of N products that are the same on every GPU, (N,) each.

    They are the position of every side between two powers of two (as an angle), its alignment, and its odd part.
    """
    columns = []
    for side in (d["m"], d["n"], d["k"]):
        angle = 2.0 * np.pi * np.log2(side)
        columns += [np.cos(angle), np.sin(angle), *(np.where(side % unit == 0, 1.0, 0.0) for unit in ALIGNMENTS)]
        columns.append(np.log2(odd_part(side)))
    return columns


def _wave_details(d: Dims, gpu: Gpu) -> list[Floats]:
    """Return the details of N products that depend on the GPU, (N,) each.

    They are the fill of the last wave and the share of one wave, for every candidate tile. Like those of the sides,
    they may change times with any sign and in any direction.
    """
    columns = []
    for tile in tiles.CANDIDATES["tensor"]:
        waves = tiles.count_tiles(d["m"], d["n"], d["batch"], tile.rows, tile.cols) / gpu.sm_count
        columns += [waves / np.ceil(waves), 1.0 / np.ceil(waves)]
    return columns


def odd_part(side: Floats) -> Floats:
    """Return N sizes without their factors of two, shape (N,): odd whole numbers.

    For a fraction the digits of its mantissa count, so that doubling never changes the result.
    """
    whole = np.ldexp(np.frexp(side)[0], MANTISSA_BITS).astype(np.int64)
    return (whole // (whole & -whole)).astype(float)


def has_irregular_sides(d: Dims) -> npt.NDArray[np.bool_]:
    """Return which products have two sides or more that no library is tuned for, (N,).

    Such a side is no small multiple of a power of two.
    """
    middle = np.sort(np.stack([odd_part(d[name]) for name in ("m", "n", "k")]), axis=0)[1]
    is_irregular: npt.NDArray[np.bool_] = middle > constants.shipped().regular_odd_part
    return is_irregular


REFINED: Mapping[str, tuple[str, ...]] = dict.fromkeys(("gemm_tensor", "gemm_simt"), ("batch", "m", "n", "k"))
"""Families whose times details refine, and the dimensions that may be doubled: all that such a kernel has."""
REFINED_KINDS = ("gemm",)
WORD = 8
"""Half-precision numbers that tensor cores take at once."""
ALIGNMENTS = (8, 64, 128)
DETAILS = 3 * (3 + len(ALIGNMENTS)) + 2 * len(tiles.CANDIDATES["tensor"])
MANTISSA_BITS = 53
SPILL_SHARES = {"16th": 1 / 16, "8th": 1 / 8, "6th": 1 / 6, "4th": 1 / 4, "half": 1 / 2, "whole": 1.0}
"""Shares of the L2 beyond which a kernel's bytes may come from DRAM: both harnesses and training steps use other
operands in between, which leave a kernel only a part of the cache."""
HEATED_S = {"300us": 3e-4, "1ms": 1e-3, "3ms": 3e-3, "10ms": 1e-2, "30ms": 3e-2}
"""Times at the peak after which a power-limited card may have left its boost clock: L4 and T4 run FP32 products of a
few milliseconds at 0.4 and 0.87 of their peak, those of a tenth of a second at 0.25 and 0.45 (NeuSight's tables)."""
HEAD_PADDING = 32
"""Multiple to which fused kernels pad a head."""
ATTENTION_TILES: tuple[tuple[int, float], ...] = ((32, np.inf), (64, np.inf), (128, np.inf), (256, np.inf))
"""Query rows and columns per thread block in attention kernels; a block spans the whole head."""
