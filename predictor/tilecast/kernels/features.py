"""Inputs of the utilization networks: dimensionless columns that never fall when a dimension grows, and details.

Times are counted in clock cycles of the GPU and sizes in shares of its L2 cache. So a column has the same value on two
GPUs that a kernel keeps busy for equally many cycles. Every column is non-decreasing in every dimension of the kernel.
Together with the non-negative weights of the network (`utilization`), this proves that predicted times are
non-decreasing. Details of a product are the fill of its last wave and the alignment of its sides. They may rise or
fall, and their effect is bounded by the growth of the rest when a dimension is doubled.

`compute_network_inputs` is the entry point.
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
    """Columns of N kernels as matrix products C[m, n] = A[m, k] B[k, n], `batch` at a time, (N,) each."""

    m: Floats
    n: Floats
    k: Floats
    batch: Floats


def build_gemm_product(dims: Dims) -> MatrixProduct:
    """Return the dimensions of GEMMs as matrix products."""
    return MatrixProduct(dims["m"], dims["n"], dims["k"], dims["batch"])


def build_conv_product(dims: Dims) -> MatrixProduct:
    """Return convolutions as cuDNN's implicit GEMMs for each direction (Chetlur et al., arXiv 1410.0759)."""
    outputs = dims["batch"] * dims["out_d"] * dims["out_h"] * dims["out_w"]
    inputs = dims["batch"] * dims["in_d"] * dims["in_h"] * dims["in_w"]
    volume = dims["k_d"] * dims["k_h"] * dims["k_w"]
    c_in, c_out = dims["c_in"] / dims["groups"], dims["c_out"] / dims["groups"]
    direction = dims["direction"].astype(int)
    return MatrixProduct(
        m=np.choose(direction, [outputs, inputs, c_out]),
        n=np.choose(direction, [c_out, c_in, c_in * volume]),
        k=np.choose(direction, [c_in * volume, c_out * volume, outputs]),
        batch=dims["groups"],
    )


def is_image_convolution(dims: Dims) -> npt.NDArray[np.bool_]:
    """Return whether each convolution is over images and in one group, as measured on tensor cores, (N,) bool."""
    return np.asarray((dims["groups"] == 1) & (dims["k_d"] == 1) & (dims["in_d"] == 1) & (dims["out_d"] == 1))


def count_tensor_rate_doublings(gpu: Gpu, precision: str) -> float:
    """Return log2 of the byte rate of a multiprocessor's tensor cores, relative to the usual rate, at least 0.

    Address computations and loads of an implicit GEMM are equally fast on all generations of GPUs. With each doubling,
    arithmetic hides less of their time.
    """
    rate = gpu.peak(precision) / (gpu.sm_count * gpu.boost_clock_hz) * ELEMENT_BYTES[precision]
    return max(float(np.log2(rate / constants.shipped_constants().kernels.usual_tensor_rate)), 0.0)


def pack_groups_into_gemm(work: KernelWork) -> KernelWork:
    """Return convolutions as the implicit GEMM of tensor cores, with small groups packed into one product.

    A packed product has sides of at least `constants.Kernels.packed_channels`. It also computes the products across its
    groups, which are discarded.
    """
    dims = work.dims
    c_in, c_out = dims["c_in"] / dims["groups"], dims["c_out"] / dims["groups"]
    packed = constants.shipped_constants().kernels.packed_channels
    together = np.minimum(np.maximum(np.ceil(packed / np.minimum(c_in, c_out)), 1.0), dims["groups"])
    packs = dims["groups"] / together

    def count_packed_channels(channels: Floats) -> Floats:
        return np.minimum(np.maximum(channels, packed), channels * dims["groups"])

    product = build_conv_product(
        {
            **dims,
            "groups": packs,
            "c_in": count_packed_channels(c_in) * packs,
            "c_out": count_packed_channels(c_out) * packs,
        }
    )
    sides = {"batch": product.batch, "m": product.m, "n": product.n, "k": product.k}
    gemm_dims = {**sides, "accumulated": np.zeros(len(product.m))}
    return KernelWork("gemm", gemm_dims, work.flops * together, work.moved_bytes, exact=False)


def uses_winograd(dims: Dims, precision: str) -> npt.NDArray[np.bool_]:
    """Return whether cuDNN runs each convolution by Winograd's algorithm, (N,) bool.

    This holds in FP32 over flat images, for 3 × 3 filters with stride one and one group (cuDNN API:
    cudnnConvolutionForward, which has no Winograd algorithm for three-dimensional convolutions).
    """
    if precision != "fp32":
        return np.zeros(len(dims["batch"]), bool)
    square = (dims["k_h"] == 3) & (dims["k_w"] == 3) & (dims["in_d"] == 1) & (dims["groups"] == 1)
    has_stride_one = (dims["in_h"] < 1.5 * dims["out_h"]) & (dims["in_w"] < 1.5 * dims["out_w"])
    return np.asarray(square & has_stride_one)


def convolves_volumes(dims: Dims) -> npt.NDArray[np.bool_]:
    """Return whether each convolution runs a window of several pixels over volumes, (N,) bool.

    cuDNN has kernels of its own for tensors of five dimensions, whatever the depth of the window.
    """
    window = dims["k_d"] * dims["k_h"] * dims["k_w"]
    return np.asarray((dims["k_d"] > 1) | ((dims["in_d"] > 1) & (window > 1)))


def build_attention_product(dims: Dims) -> MatrixProduct:
    """Return fused attention as the thread blocks of FlashAttention-2 see it: query rows × head size per head."""
    return MatrixProduct(dims["seq_q"], dims["head_dim"], dims["seq_kv"], dims["batch"] * dims["heads"])


PRODUCTS: Mapping[str, Callable[[Dims], MatrixProduct]] = {
    "gemm": build_gemm_product,
    "conv": build_conv_product,
    "attention": build_attention_product,
}
"""Functions that turn dimensions into a matrix product, by the kinds that compute more than they move."""
ROWWISE = ("softmax", "layernorm", "rmsnorm")
"""Row-wise kinds that a network may refine; `formulas` prices them if the model file has no such network."""


def find_network_family(kind: str, precision: str, gpu: Gpu) -> str:
    """Return the name of the network that predicts a kind of kernel on a GPU. If there is no network, return the kind.

    On tensor cores a convolution is an implicit GEMM and shares the network of GEMMs. In FP32 convolutions have a
    separate network, because of Winograd.
    """
    if kind in ("gemm", "conv"):
        units = tiles.find_compute_units(precision, gpu)
        return "conv_simt" if (kind, units) == ("conv", "simt") else f"gemm_{units}"
    return "rows" if kind in ROWWISE else kind


def _log2_cycles(seconds: Floats, gpu: Gpu) -> Floats:
    """Return log2 of one plus these seconds in clock cycles."""
    return np.log2(1.0 + seconds * gpu.boost_clock_hz)


def _compute_network_columns(work: KernelWork, gpu: Gpu, precision: str) -> tuple[tuple[str, ...], Floats]:
    """Return names, (D,), and values, (N, D), of the columns of the network that predicts the kernels."""
    moved = work.moved_bytes
    columns = {
        "dram_cycles": _log2_cycles(moved / gpu.memory_bandwidth_bytes_per_s, gpu),
        "l2_cycles": _log2_cycles(moved / gpu.l2_bandwidth_bytes_per_s, gpu),
        "l2_eighths": np.log2(1.0 + 8.0 * moved / gpu.l2_bytes),
        "l2_doubles": np.log2(1.0 + 0.5 * moved / gpu.l2_bytes),
    }
    if work.kind in PRODUCTS:
        columns |= _compute_product_columns(work, PRODUCTS[work.kind](work.dims), gpu, precision)
    elif work.kind in ROWWISE:
        columns |= _compute_rowwise_columns(work.dims, moved, gpu)
    else:
        return (), np.zeros((len(moved), 0))
    return tuple(columns), np.array(list(columns.values())).T


def _compute_product_columns(work: KernelWork, product: MatrixProduct, gpu: Gpu, precision: str) -> dict[str, Floats]:
    ratio = gpu.sustained_ratio[precision]
    if work.kind == "attention":
        ratio = gpu.sustained_ratio.get("attention", ratio)
    peak = gpu.peak(precision) * ratio
    per_sm = peak / gpu.sm_count
    element = ELEMENT_BYTES[precision]
    written = gemm_output_bytes(work.dims, element) if work.kind == "gemm" else element
    outputs = written * product.batch * product.m * product.n
    right = element * product.batch * product.n * product.k
    left = element * product.batch * product.m * product.k
    if work.kind == "gemm":
        # A convolution that is priced as a product reads its input once, however often the product repeats it.
        left, right = np.minimum(left, work.moved_bytes), np.minimum(right, work.moved_bytes)
    dram = gpu.memory_bandwidth_bytes_per_s
    columns = {
        "compute_cycles": _log2_cycles(work.flops / peak, gpu),
        "m": np.log2(1.0 + product.m),
        "n": np.log2(1.0 + product.n),
        "k": np.log2(1.0 + product.k),
        "batch": np.log2(1.0 + product.batch),
        "output_cycles": _log2_cycles(outputs / dram, gpu),
        "right_cycles": _log2_cycles(right / dram, gpu),
        "left_cycles": _log2_cycles(left / dram, gpu),
    }
    if work.kind != "attention":
        columns["aligned_cycles"] = _log2_cycles(work.flops * _compute_padding_ratio(work) / peak, gpu)
        columns["narrow_cycles"] = _log2_cycles(_count_narrow_channel_flops(work) / gpu.peak("fp32"), gpu)
    for name, share in SPILL_SHARES.items():
        spilled = np.clip(2.0 * (work.moved_bytes - share * gpu.l2_bytes), 0.0, work.moved_bytes)
        columns[f"spilled_{name}"] = _log2_cycles(spilled / dram, gpu)
    if work.kind != "attention" and tiles.find_compute_units(precision, gpu) == "simt":
        for name, after_s in HEATED_S.items():
            beyond = np.clip(work.flops / peak / after_s - 1.0, 0.0, 1.0)
            columns[f"heated_{name}"] = _log2_cycles(work.flops / peak * beyond, gpu)
    shapes = (
        ATTENTION_TILES if work.kind == "attention" else tuple((t.rows, t.cols) for t in tiles.CANDIDATES["tensor"])
    )
    # A block of the backward pass computes five products where one of the forward pass computes two.
    longer = np.where(work.dims["backward"] > 0, 2.5, 1.0) if work.kind == "attention" else 1.0
    for rows, cols in shapes:
        whole = tiles.count_tiles(product.m, product.n, product.batch, rows, cols)
        waves = np.ceil(whole / gpu.sm_count)
        width = np.where(np.isinf(cols), product.n, cols)
        columns[f"waves_{rows}x{cols}"] = _log2_cycles(waves * 2.0 * rows * width * product.k * longer / per_sm, gpu)
        columns[f"tiles_{rows}x{cols}"] = np.log2(1.0 + whole / gpu.sm_count)
    if work.kind == "attention":
        padded = np.ceil(product.n / HEAD_PADDING) * HEAD_PADDING
        columns["padded_head"] = np.log2(padded)
        columns["padded_cycles"] = _log2_cycles(work.flops * padded / product.n / peak, gpu)
        columns["sequences"] = np.log2(1.0 + work.dims["batch"])
        columns["kv_heads"] = np.log2(1.0 + work.dims["kv_heads"])
    return columns


def _compute_padding_ratio(work: KernelWork) -> Floats:
    """Return the ratio of FLOPs that tensor cores compute with padding to the FLOPs without padding, (N,).

    The channels, or the two sides of a GEMM that are contiguous in memory, are padded to whole words.
    """
    dims = work.dims
    if work.kind == "conv":
        sides = dims["c_in"] / dims["groups"], dims["c_out"] / dims["groups"]
    else:
        sides = dims["n"], dims["k"]
    waste = np.ones(len(work.flops))
    for side in sides:
        waste = waste * np.ceil(side / WORD) * WORD / side
    return waste


def _count_narrow_channel_flops(work: KernelWork) -> Floats:
    """Return the FLOPs of convolutions that run without tensor cores, as channels do not fill a word, (N,)."""
    if work.kind != "conv":
        return np.zeros(len(work.flops))
    channels = work.dims["c_in"] / work.dims["groups"]
    return work.flops * np.minimum(channels, WORD / 2) / channels


def _compute_rowwise_columns(dims: Dims, moved: Floats, gpu: Gpu) -> dict[str, Floats]:
    in_flight = gpu.sm_count * moved / dims["rows"] / gpu.l2_bytes
    missed = moved * (1.0 + np.clip(4.0 * in_flight, 0.0, 1.0))
    return {
        "rows": np.log2(1.0 + dims["rows"]),
        "cols": np.log2(1.0 + dims["cols"]),
        "wide_cols": np.log2(1.0 + np.maximum(dims["cols"] - 1024.0, 0.0)),
        "rows_per_sm": np.log2(1.0 + dims["rows"] / gpu.sm_count),
        "waves": np.log2(np.ceil(dims["rows"] / gpu.sm_count)),
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
    """Whether the kernels run as the kind states; a convolution priced as a matrix product does not."""

    def take(self, mask: npt.NDArray[np.bool_]) -> KernelWork:
        """Return the kernels at which `mask`, (N,), is True."""
        dims = {name: column[mask] for name, column in self.dims.items()}
        return replace(self, dims=dims, flops=self.flops[mask], moved_bytes=self.moved_bytes[mask])


def compute_work(kind: Kind, precision: str, dims: Dims) -> KernelWork:
    """Return the FLOPs and least DRAM bytes of N kernels of a kind."""
    element = np.full(len(next(iter(dims.values()))), ELEMENT_BYTES[precision])
    flops, moved = kind.flops(dims), kind.bytes(dims, element)
    if kind.name == "attention":
        # Queries beyond the keys of a causal mask see nothing, but more queries never make the work less.
        flops = np.maximum(flops, kind.flops({**dims, "seq_q": np.minimum(dims["seq_q"], dims["seq_kv"])}))
    if kind.name == "conv":
        flops = flops / np.where(
            uses_winograd(dims, precision), constants.shipped_constants().kernels.winograd_reduction, 1.0
        )
    return KernelWork(kind.name, dims, flops, moved)


@dataclass(frozen=True, slots=True)
class NetworkInputs:
    """Inputs of a network for N kernels.

    `columns` is (1 + J, N, D). The first plane has the kernels, and each of the others has one of J dimensions doubled.
    J is zero unless details refine the network. `details` is (N, E), where E is zero unless details refine the network.
    """

    names: tuple[str, ...]
    columns: Floats
    details: Floats


def compute_network_inputs(family: str, work: KernelWork, gpu: Gpu, precision: str) -> NetworkInputs:
    """Return the inputs of a network for N kernels; kinds that no network predicts have no columns."""
    grown = REFINED.get(family, ())
    if grown and work.exact and work.kind in REFINED_KINDS:
        key = (work.kind, precision, grown, *(column.tobytes() for column in work.dims.values()))
        larger, details = _GPU_INDEPENDENT.get(
            key, lambda: (_append_doubled(work, grown, precision), _compute_side_details(work.dims))
        )
        names, columns = _compute_network_columns(larger, gpu, precision)
        stacked = columns.T.reshape(-1, 1 + len(grown), len(work.flops)).transpose(1, 2, 0)
        return NetworkInputs(names, stacked, np.array([*details, *_compute_wave_details(work.dims, gpu)]).T)
    names, own = _compute_network_columns(work, gpu, precision)
    same = np.broadcast_to(own, (1 + len(grown), *own.shape))
    return NetworkInputs(names, same, np.zeros((len(own), DETAILS if grown else 0)))


def _append_doubled(work: KernelWork, grown: Sequence[str], precision: str) -> KernelWork:
    """Return the work of the kernels, followed by copies with one dimension doubled, for each dimension in `grown`."""
    larger = {
        name: np.concatenate([2.0 * column if name == other else column for other in ("", *grown)])
        for name, column in work.dims.items()
    }
    return compute_work(KINDS[work.kind], precision, larger)


_GPU_INDEPENDENT: Memo[tuple[KernelWork, list[Floats]]] = Memo(8)
"""Inputs of refined kernels that are equal on every GPU: results of `_append_doubled` and `_compute_side_details`."""


def join_inputs(parts: Sequence[NetworkInputs]) -> NetworkInputs:
    """Return the inputs of several groups of kernels of one network, concatenated."""
    if len(parts) == 1:
        return parts[0]
    columns = np.concatenate([part.columns for part in parts], axis=1)
    return NetworkInputs(parts[0].names, columns, np.concatenate([part.details for part in parts]))


def _compute_side_details(dims: Dims) -> list[Floats]:
    """Return the details of N products that do not depend on the GPU, as columns of (N,).

    For every side, they are its position between two powers of two (as an angle), its alignment, and its odd factor.
    """
    columns = []
    for side in (dims["m"], dims["n"], dims["k"]):
        angle = 2.0 * np.pi * np.log2(side)
        columns += [np.cos(angle), np.sin(angle), *(np.where(side % unit == 0, 1.0, 0.0) for unit in ALIGNMENTS)]
        columns.append(np.log2(find_odd_factor(side)))
    return columns


def _compute_wave_details(dims: Dims, gpu: Gpu) -> list[Floats]:
    """Return the details of N products that depend on the GPU, as columns of (N,).

    For every candidate tile, they are the busy fraction of the waves, and one over the number of waves. Like the
    details of sides, they may raise or lower a time.
    """
    columns = []
    for tile in tiles.CANDIDATES["tensor"]:
        waves = tiles.count_tiles(dims["m"], dims["n"], dims["batch"], tile.rows, tile.cols) / gpu.sm_count
        columns += [waves / np.ceil(waves), 1.0 / np.ceil(waves)]
    return columns


def find_odd_factor(side: Floats) -> Floats:
    """Return the largest odd factor of N sizes, (N,).

    For a fraction the digits of its mantissa count, so that doubling never changes the result.
    """
    whole = np.ldexp(np.frexp(side)[0], MANTISSA_BITS).astype(np.int64)
    return (whole // (whole & -whole)).astype(float)


def has_irregular_sides(dims: Dims) -> npt.NDArray[np.bool_]:
    """Return whether two or more sides of each product are sizes that no library is tuned for, (N,) bool.

    Such a side is no small multiple of a power of two.
    """
    middle = np.sort(np.stack([find_odd_factor(dims[name]) for name in ("m", "n", "k")]), axis=0)[1]
    return np.asarray(middle > constants.shipped_constants().regular_odd_part)


REFINED: Mapping[str, tuple[str, ...]] = dict.fromkeys(("gemm_tensor", "gemm_simt"), ("batch", "m", "n", "k"))
"""Dimensions that may be doubled, all that such a kernel has, by the networks whose times details refine."""
REFINED_KINDS = ("gemm",)
WORD = 8
"""Half-precision numbers that tensor cores read at once."""
ALIGNMENTS = (8, 64, 128)
DETAILS = 3 * (3 + len(ALIGNMENTS)) + 2 * len(tiles.CANDIDATES["tensor"])
MANTISSA_BITS = 53
SPILL_SHARES = {"16th": 1 / 16, "8th": 1 / 8, "6th": 1 / 6, "4th": 1 / 4, "half": 1 / 2, "whole": 1.0}
"""Shares of the L2 beyond which a kernel's bytes may come from DRAM. In benchmarks and in training steps, other
operands that are used in between leave a kernel only a part of the cache."""
HEATED_S = {"300us": 3e-4, "1ms": 1e-3, "3ms": 3e-3, "10ms": 1e-2, "30ms": 3e-2}
"""Times at the peak rate after which a power-limited card may have left its boost clock. L4 and T4 run FP32 products of
a few milliseconds at 0.4 and 0.87 of their peak, and of a tenth of a second at 0.25 and 0.45 (NeuSight)."""
HEAD_PADDING = 32
"""Multiple to which fused kernels pad a head."""
ATTENTION_TILES: tuple[tuple[int, float], ...] = ((32, np.inf), (64, np.inf), (128, np.inf), (256, np.inf))
"""Query rows and columns per thread block in attention kernels; a block spans the whole head."""
