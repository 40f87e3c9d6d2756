"""Inputs of the neural networks that predict kernels: monotone columns and details, from a kernel's dimensions.

Columns measure times in clock cycles of the GPU, and sizes in fractions of its L2 cache. So a column has equal values
on two GPUs that a kernel keeps busy for equally many cycles. A column never falls when a dimension of the kernel grows.
The weights of the networks on columns are non-negative (`utilization`). So a predicted time never falls either.

Details may rise or fall. The details of a matrix product are the fill of its last wave and the alignment of its sides.
Their effect is at most a fraction of the time that doubling a dimension adds.

`compute_network_inputs` is the entry point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tilecast import constants
from tilecast.graph import KINDS, Dims, KernelType, gemm_output_bytes
from tilecast.hardware import Gpu
from tilecast.kernels import tiles
from tilecast.memo import Memo
from tilecast.spec import ELEMENT_BYTES, Floats


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """Dimensions of N batched matrix products C[m, n] = A[m, k] B[k, n], as columns (N,)."""

    m: Floats
    n: Floats
    k: Floats
    batch: Floats


def build_gemm_product(dims: Dims) -> MatrixProduct:
    """Return GEMMs as matrix products."""
    return MatrixProduct(dims["m"], dims["n"], dims["k"], dims["batch"])


def build_conv_product(dims: Dims) -> MatrixProduct:
    """Return convolutions as the matrix products of cuDNN's implicit GEMM (Chetlur et al., arXiv 1410.0759).

    The product depends on the direction: forward pass, gradient of the input or gradient of the weight.
    """
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
    """Return, for each convolution, whether it is 2-D (depth 1) and has one group, (N,) bool.

    Only such convolutions were measured on tensor cores.
    """
    return np.asarray((dims["groups"] == 1) & (dims["k_d"] == 1) & (dims["in_d"] == 1) & (dims["out_d"] == 1))


def count_tensor_rate_doublings(gpu: Gpu, precision: str) -> float:
    """Return how many times an SM's tensor-core rate has doubled from the usual rate: log2 of their ratio, at least 0.

    The rate, in bytes, is the peak FLOP/s of one SM per clock cycle, times the bytes of an element.
    """
    # Address computations and loads of an implicit GEMM are equally fast on all generations of GPUs. With each doubling
    # of the rate, arithmetic hides less of their time.
    rate = gpu.peak(precision) / (gpu.sm_count * gpu.boost_clock_hz) * ELEMENT_BYTES[precision]
    return max(float(np.log2(rate / constants.shipped_constants().kernels.usual_tensor_rate)), 0.0)


def pack_groups_into_gemm(work: KernelWork) -> KernelWork:
    """Return convolutions as the matrix products that tensor cores run, with several small groups in one product.

    The sides of such a product are at least `constants.Kernels.packed_channels` long. The product also multiplies
    inputs of one group with weights of another group, and these results are discarded.
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

    cuDNN does so in FP32 over flat images, for 3 × 3 filters with stride one and one group (cuDNN API:
    cudnnConvolutionForward, which has no Winograd algorithm for three-dimensional convolutions).
    """
    if precision != "fp32":
        return np.zeros(len(dims["batch"]), bool)
    square = (dims["k_h"] == 3) & (dims["k_w"] == 3) & (dims["in_d"] == 1) & (dims["groups"] == 1)
    has_stride_one = (dims["in_h"] < 1.5 * dims["out_h"]) & (dims["in_w"] < 1.5 * dims["out_w"])
    return np.asarray(square & has_stride_one)


def is_volume_convolution(dims: Dims) -> npt.NDArray[np.bool_]:
    """Return whether each convolution runs a window of several pixels over volumes, (N,) bool.

    cuDNN has kernels of its own for tensors of five dimensions, whatever the depth of the window.
    """
    window = dims["k_d"] * dims["k_h"] * dims["k_w"]
    return np.asarray((dims["k_d"] > 1) | ((dims["in_d"] > 1) & (window > 1)))


def build_attention_product(dims: Dims) -> MatrixProduct:
    """Return fused attention as one matrix product per sample and head, as FlashAttention-2 splits it into blocks.

    The sides m and n are the queries and the head size, and k is the number of keys.
    """
    return MatrixProduct(dims["seq_q"], dims["head_dim"], dims["seq_kv"], dims["batch"] * dims["heads"])


PRODUCTS: Mapping[str, Callable[[Dims], MatrixProduct]] = {
    "gemm": build_gemm_product,
    "conv": build_conv_product,
    "attention": build_attention_product,
}
"""Functions that return the kernels of a kind as matrix products, by kind. Other kinds are bound by bandwidth."""
ROWWISE = ("softmax", "layernorm", "rmsnorm")
"""Kinds that a network predicts if the model file has a network for rows. Otherwise `formulas` predicts them."""


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
    """Return log2(1 + cycles), where `cycles` are the seconds in clock cycles of the GPU, (N,)."""
    return np.log2(1.0 + seconds * gpu.boost_clock_hz)


def _compute_predictor_inputs(work: KernelWork, gpu: Gpu, precision: str) -> tuple[tuple[str, ...], Floats]:
    """Return the names, (D,), and the values, (N, D), of the utilization predictor's inputs for N kernels.

    If no network predicts the kind of kernel, there are no columns.
    """
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
    """Return the input columns that only matrix products have, (N,), by name."""
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
    """Return the ratio of FLOPs with padding to FLOPs without padding on tensor cores, (N,), at least 1.

    Channels of a convolution are padded to whole words. A GEMM is padded in the two sides that are contiguous in
    memory.
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
    """Return the FLOPs of each kernel that run without tensor cores because its channels do not fill a word, (N,).

    Only convolutions have such FLOPs.
    """
    if work.kind != "conv":
        return np.zeros(len(work.flops))
    channels = work.dims["c_in"] / work.dims["groups"]
    return work.flops * np.minimum(channels, WORD / 2) / channels


def _compute_rowwise_columns(dims: Dims, moved: Floats, gpu: Gpu) -> dict[str, Floats]:
    """Return the input columns that only row-wise kernels have, (N,), by name."""
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
    """Dimensions, FLOPs and least DRAM bytes of N kernels of one kind, as columns (N,)."""

    kind: str
    dims: Dims
    flops: Floats
    """FLOPs of each kernel. Winograd's algorithm reduces them."""
    moved_bytes: Floats
    exact: bool = True
    """Whether the kernels really are of this kind. It is False for convolutions that are predicted as GEMMs."""

    def take(self, mask: npt.NDArray[np.bool_]) -> KernelWork:
        """Return the kernels for which `mask` is True, (N,)."""
        dims = {name: column[mask] for name, column in self.dims.items()}
        return replace(self, dims=dims, flops=self.flops[mask], moved_bytes=self.moved_bytes[mask])


def compute_work(kind: KernelType, precision: str, dims: Dims) -> KernelWork:
    """Return N kernels of one kind and precision with their FLOPs and least DRAM bytes."""
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
    """Inputs of one network for N kernels."""

    names: tuple[str, ...]
    """Names of the D columns."""
    columns: Floats
    """Values of the columns, (1 + J, N, D). Index 0 of the first axis has the kernels. Index j has the kernels with
    dimension j of J dimensions doubled. J is 0 if the network has no details."""
    details: Floats
    """Values of the E details, (N, E). E is 0 if the network has no details."""


def compute_network_inputs(family: str, work: KernelWork, gpu: Gpu, precision: str) -> NetworkInputs:
    """Return the inputs of the network of a family for N kernels on a GPU.

    If no network predicts the kernels, the inputs have no columns.
    """
    doubled = REFINED.get(family, ())
    if doubled and work.exact and work.kind in REFINED_KINDS:
        key = (work.kind, precision, doubled, *(column.tobytes() for column in work.dims.values()))
        larger, details = _GPU_INDEPENDENT.get(
            key, lambda: (_append_doubled_kernels(work, doubled, precision), _compute_side_details(work.dims))
        )
        names, columns = _compute_predictor_inputs(larger, gpu, precision)
        stacked = columns.T.reshape(-1, 1 + len(doubled), len(work.flops)).transpose(1, 2, 0)
        return NetworkInputs(names, stacked, np.array([*details, *_compute_wave_details(work.dims, gpu)]).T)
    names, own = _compute_predictor_inputs(work, gpu, precision)
    same = np.broadcast_to(own, (1 + len(doubled), *own.shape))
    return NetworkInputs(names, same, np.zeros((len(own), DETAILS if doubled else 0)))


def _append_doubled_kernels(work: KernelWork, doubled: Sequence[str], precision: str) -> KernelWork:
    """Return N kernels followed by N copies per dimension in `doubled`, in which this dimension is doubled."""
    larger = {
        name: np.concatenate([2.0 * column if name == other else column for other in ("", *doubled)])
        for name, column in work.dims.items()
    }
    return compute_work(KINDS[work.kind], precision, larger)


_GPU_INDEPENDENT: Memo[tuple[KernelWork, list[Floats]]] = Memo(8)
"""Cache of inputs that do not depend on the GPU: results of `_append_doubled_kernels` and `_compute_side_details`."""


def concatenate_inputs(parts: Sequence[NetworkInputs]) -> NetworkInputs:
    """Return the inputs of one network for several groups of kernels, concatenated in order."""
    if len(parts) == 1:
        return parts[0]
    columns = np.concatenate([part.columns for part in parts], axis=1)
    return NetworkInputs(parts[0].names, columns, np.concatenate([part.details for part in parts]))


def _compute_side_details(dims: Dims) -> list[Floats]:
    """Return the details of N matrix products that do not depend on the GPU, as a list of columns (N,).

    The details of a side are its position between two powers of two (as cosine and sine of an angle), its alignment,
    and log2 of its largest odd factor.
    """
    columns = []
    for side in (dims["m"], dims["n"], dims["k"]):
        angle = 2.0 * np.pi * np.log2(side)
        columns += [np.cos(angle), np.sin(angle), *(np.where(side % unit == 0, 1.0, 0.0) for unit in ALIGNMENTS)]
        columns.append(np.log2(find_odd_factor(side)))
    return columns


def _compute_wave_details(dims: Dims, gpu: Gpu) -> list[Floats]:
    """Return the details of N matrix products that depend on the GPU, as a list of columns (N,).

    For every candidate tile, these are the fraction of its waves that is busy and one over the number of its waves.
    """
    columns = []
    for tile in tiles.CANDIDATES["tensor"]:
        waves = tiles.count_tiles(dims["m"], dims["n"], dims["batch"], tile.rows, tile.cols) / gpu.sm_count
        columns += [waves / np.ceil(waves), 1.0 / np.ceil(waves)]
    return columns


def find_odd_factor(side: Floats) -> Floats:
    """Return the largest odd factor of each of N sizes, (N,). Doubling a size does not change it.

    For a size that is not an integer, return the largest odd factor of its mantissa as an integer.
    """
    whole = np.ldexp(np.frexp(side)[0], MANTISSA_BITS).astype(np.int64)
    return (whole // (whole & -whole)).astype(float)


def has_irregular_sides(dims: Dims) -> npt.NDArray[np.bool_]:
    """Return whether at least two sides of each matrix product have a size that no library is tuned for, (N,) bool.

    Libraries are tuned for small multiples of powers of two.
    """
    middle = np.sort(np.stack([find_odd_factor(dims[name]) for name in ("m", "n", "k")]), axis=0)[1]
    return np.asarray(middle > constants.shipped_constants().regular_odd_part)


REFINED: Mapping[str, tuple[str, ...]] = dict.fromkeys(("gemm_tensor", "gemm_simt"), ("batch", "m", "n", "k"))
"""Dimensions that are doubled for the networks with details, by name of the network."""
REFINED_KINDS = ("gemm",)
"""Kinds of kernels that have details."""
WORD = 8
"""Half-precision numbers that tensor cores read at once."""
ALIGNMENTS = (8, 64, 128)
"""Factors of a side for which a detail says whether the side is a multiple."""
DETAILS = 3 * (3 + len(ALIGNMENTS)) + 2 * len(tiles.CANDIDATES["tensor"])
MANTISSA_BITS = 53
SPILL_SHARES = {"16th": 1 / 16, "8th": 1 / 8, "6th": 1 / 6, "4th": 1 / 4, "half": 1 / 2, "whole": 1.0}
"""Fractions of the L2 beyond which a kernel's bytes may come from DRAM.

Other operands pass through the cache between two uses of the bytes, so a kernel has only a fraction of it.
"""
HEATED_S = {"300us": 3e-4, "1ms": 1e-3, "3ms": 3e-3, "10ms": 1e-2, "30ms": 3e-2}
"""Times at the peak rate after which a power-limited card may have left its boost clock. L4 and T4 run FP32 products of
a few milliseconds at 0.4 and 0.87 of their peak, and of a tenth of a second at 0.25 and 0.45 (NeuSight)."""
HEAD_PADDING = 32
"""Multiple to which fused attention pads the head size."""
ATTENTION_TILES: tuple[tuple[int, float], ...] = ((32, np.inf), (64, np.inf), (128, np.inf), (256, np.inf))
"""Query rows and head columns of a thread block in attention kernels. A block spans the whole head."""
