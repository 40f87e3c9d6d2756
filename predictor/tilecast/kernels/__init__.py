"""Durations of kernels on a GPU, from neural networks and from formulas.

`predict_kernel_times` predicts the durations of all kernels of a `KernelTable`. One onnxruntime call predicts the kinds
of kernels that have a neural network (`features.find_network_family`). The other kinds are bound by bandwidth, and
`formulas` predicts them. A duration includes the few microseconds that a kernel takes to start on the GPU. It does not
include the launch by the CPU.

Every duration is a finite number. The FLOP rate never exceeds the dense peak (after Winograd's reduction). The byte
rate never exceeds the L2 bandwidth. It never exceeds the DRAM bandwidth if a kernel moves more than two L2 sizes.
Doubling a dimension never lowers a duration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tilecast import constants
from tilecast.graph import KINDS, Dims, KernelTable, KernelType
from tilecast.hardware import Gpu
from tilecast.kernels import features, formulas, tiles, utilization
from tilecast.spec import PRECISIONS, Floats, Ints, SpecError

Rows: TypeAlias = npt.NDArray[np.intp]
Names: TypeAlias = npt.NDArray[np.str_]
Mask: TypeAlias = npt.NDArray[np.bool_]

__all__ = ["KernelTimes", "describe_model_file", "predict_kernel_times"]

FLAGS = ("accumulated", "causal", "backward", "direction", "drawn", "read_bytes", "written_bytes")
"""Dimensions that may be zero."""
LARGEST = 2.0**48
"""Largest accepted dimension of a kernel. A larger dimension can only be a mistake in the input."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Predicted durations of the N kernels of a table on one GPU, as columns (N,)."""

    table: KernelTable
    gpu: Gpu
    seconds: Floats
    spread: Floats
    """Relative half-width of the 90 % interval, from `seconds / (1 + spread)` to `seconds · (1 + spread)`."""
    roofline_s: Floats
    """Fewest seconds that peak FLOP/s and memory bandwidth allow."""
    irregular: npt.NDArray[np.bool_]
    """Whether a kernel is a tensor-core product with two or more sides of a size that no library is tuned for.

    No measured table has such products, so they are predicted like other products.
    """
    implicit: Floats
    """Result of `features.count_tensor_rate_doublings` for convolutions that are predicted as matrix products on tensor
    cores. It is 0 for all other kernels."""

    @property
    def utilization(self) -> Floats:
        """Fraction of the roofline that each kernel reaches, in (0, 1], (N,)."""
        return self.roofline_s / self.seconds

    def tiling(self) -> tiles.Tiling:
        """Return the tiles into which a library splits each kernel.

        All numbers are 1 for a kernel that is not split into tiles.
        """
        columns = np.ones((6, len(self.table)))
        for kind, precision, rows, dims in _group_kernels(self.table):
            if kind.name in features.PRODUCTS:
                sides, units = features.PRODUCTS[kind.name](dims), tiles.find_compute_units(precision, self.gpu)
                tiling = tiles.choose_tiling(sides.m, sides.n, sides.k, sides.batch, self.gpu, units)
                columns[:, rows] = [tiling.rows, tiling.cols, tiling.split_k, tiling.tiles, tiling.waves, tiling.fill]
        return tiles.Tiling(*columns)


def predict_kernel_times(
    table: KernelTable, gpu: Gpu, *, model: Path | None = None, bounded: bool = True
) -> KernelTimes:
    """Return the predicted durations of all kernels of a table on a GPU.

    Args:
        table: N kernels of any kinds and precisions.
        gpu: the GPU. It need not be one of the GPUs in the training data.
        model: a model file that `python -m tilecast_lab fit` wrote. None takes the shipped file.
        bounded: whether durations of smaller convolutions bound those of convolutions on tensor cores
            (`_apply_convolution_bounds`).

    Raises:
        SpecError: the GPU lacks a precision of the table, a dimension is not a sensible number, or the model file is
            damaged.
    """
    learned = utilization.load_model(model)
    batch = _NetworkBatch(learned, gpu)
    total, spread, roofline = np.zeros((3, len(table)))
    irregular, implicit, share = np.zeros(len(table), bool), np.zeros(len(table)), np.ones(len(table))
    flat: list[Rows] = []
    for kind, precision, rows, dims in _group_kernels(table):
        _require_valid_sizes(kind, dims)
        if kind.name == "gemm" and tiles.find_compute_units(precision, gpu) == "tensor":
            irregular[rows] = features.has_irregular_sides(dims)
        plain = features.compute_work(kind, precision, dims)
        compute_s = plain.flops / gpu.peak(precision) if kind.name in features.PRODUCTS else np.zeros(len(rows))
        roofline[rows] = np.maximum(compute_s, formulas.memory_floor_s(plain.moved_bytes, gpu))
        name = list_case_names(kind, precision, dims, gpu)
        priced, family = plain, features.find_network_family(kind.name, precision, gpu)
        if family == "conv_simt":
            deep = features.is_volume_convolution(dims)
            share[rows] = np.where(deep, constants.shipped_constants().kernels.volume_share, 1.0)
        if kind.name == "conv" and family == "gemm_tensor":
            measured = learned.was_trained_on(family, name[0], gpu) & (dims["groups"] == 1)
            if measured.any():
                flat.append(rows[measured])
            if not (measured.all() and features.is_image_convolution(dims)[0]):
                # Such convolutions were not measured on this GPU's tensor cores: they are priced as implicit GEMMs.
                priced, name = features.pack_groups_into_gemm(plain), np.full(len(rows), "tensor")
                implicit[rows] = features.count_tensor_rate_doublings(gpu, precision)
        for text in sorted(set(name.tolist())):
            part = name == text
            if context := learned.find_context(family, text, gpu):
                spread[rows[part]] = batch.add_kernels(family, context, priced.take(part), precision, rows[part])
            else:
                ceiling = learned.find_ceiling(text)
                total[rows[part]] = _price_by_formula(kind, dims, part, plain, gpu, ceiling)
                spread[rows[part]] = ceiling.spread.find_half_width(gpu, utilization.name_die(gpu) in ceiling.dies)
    batch.predict_seconds(total)
    times = KernelTimes(table, gpu, np.maximum(total / share, roofline), spread, roofline, irregular, implicit)
    return _apply_convolution_bounds(times, np.concatenate(flat), model) if flat and bounded else times


class _NetworkBatch:
    """Batch of kernels on one GPU that are added one by one, and then predicted by one call of the ONNX runtime."""

    def __init__(self, learned: utilization.UtilizationModel, gpu: Gpu) -> None:
        self.learned, self.gpu, self.input_gpu = learned, gpu, gpu.without_fp32_limit()
        self.inputs: dict[str, list[features.NetworkInputs]] = {}
        self.contexts: dict[str, list[Ints]] = {}
        self.rows: dict[str, list[Rows]] = {}

    def add_kernels(
        self, family: str, context: utilization.KernelContext, work: features.KernelWork, precision: str, rows: Rows
    ) -> Floats:
        """Add n kernels for one network to the batch, and return the relative spread of each prediction, (n,).

        Args:
            family: name of the network.
            context: bias row of the network, and spread of its predictions.
            work: the kernels.
            precision: precision of the kernels.
            rows: row of each kernel in the output of `predict_seconds`, (n,).

        Raises:
            SpecError: the model file expects other columns.
        """
        asked = features.compute_network_inputs(family, work, self.input_gpu, precision)
        network = self.learned.description.networks[family]
        if asked.names != network.columns:
            raise SpecError("utilization model", f"expects other columns for {family}", utilization.REMEDY)
        own = asked.columns[0]
        outside = ((own < network.low) | (own > network.high)).any(axis=1)
        self.inputs.setdefault(family, []).append(asked)
        self.contexts.setdefault(family, []).append(np.full(len(own), context.index, np.int64))
        self.rows.setdefault(family, []).append(rows)
        return np.asarray(
            context.spread * np.where(outside, constants.shipped_constants().kernels.extrapolation_spread, 1.0)
        )

    def predict_seconds(self, total: Floats) -> None:
        """Write the predicted seconds of every added kernel into its row of `total`, (N,)."""
        if not self.inputs:
            return
        cycles = self.learned.predict_log2_cycles(
            {family: features.concatenate_inputs(parts) for family, parts in self.inputs.items()},
            {family: np.concatenate(parts) for family, parts in self.contexts.items()},
        )
        for family, column in cycles.items():
            total[np.concatenate(self.rows[family])] = np.exp2(column) / self.gpu.boost_clock_hz


def _price_by_formula(
    kind: KernelType, dims: Dims, mask: Mask, work: features.KernelWork, gpu: Gpu, ceiling: utilization.BandwidthCeiling
) -> Floats:
    """Return the seconds of n kernels of a kind for which there is no network, (n,).

    Args:
        kind: the kind of the kernels.
        dims: dimensions of a group of kernels.
        mask: True for the n kernels of the group to predict.
        work: FLOPs and bytes of the group.
        gpu: the GPU.
        ceiling: fitted bandwidth limits of the n kernels.
    """
    moved = work.moved_bytes[mask]
    if kind.name == "direct_conv":
        return formulas.direct_conv_s(work.flops[mask], moved, gpu, ceiling)
    count = formulas.count_rows(dims, work.moved_bytes)[mask]
    cols = dims["cols"][mask] if "cols" in dims else formulas.THREADS
    drawn_s = formulas.random_numbers_s(dims["drawn"] * dims["elements"], gpu)[mask] if "drawn" in dims else 0.0
    written_share = formulas.compute_written_share(dims, work.moved_bytes)[mask]
    return formulas.bandwidth_bound_s(moved, count, gpu, ceiling, cols, written_share) + drawn_s


_LEAST_BATCH = 4
"""Fewest images of a smaller convolution into which `_apply_convolution_bounds` splits a batch."""
_BATCH_COLUMN = KINDS["conv"].dims.index("batch")
_DEPTH_COLUMNS = [KINDS["conv"].dims.index(name) for name in ("in_d", "k_d", "out_d")]


def _apply_convolution_bounds(times: KernelTimes, rows: Rows, model: Path | None) -> KernelTimes:
    """Return kernel times in which the convolutions in `rows` respect bounds from smaller convolutions.

    A convolution takes no longer than 2, 4, 8, … convolutions in sequence, each over an equal fraction of its batch. A
    convolution over volumes takes at least as long as a convolution over one slice of the volume. The convolutions have
    one group, and run on a GPU that was measured.
    """
    # A library may run the parts instead, and few batch sizes were measured.

    def price_parts(rows: Rows, dims: Floats) -> Floats:
        table = replace(times.table.take(rows), dims=dims)
        return predict_kernel_times(table, times.gpu, model=model, bounded=False).seconds

    total, dims = times.seconds.copy(), times.table.dims[rows].copy()
    deep = (dims[:, _DEPTH_COLUMNS] > 1).any(axis=1)
    dims[:, _DEPTH_COLUMNS] = 1.0
    least = price_parts(rows, dims)
    parts = 2.0
    left = np.arange(len(rows))
    while len(left := left[dims[left, _BATCH_COLUMN] >= _LEAST_BATCH * parts]):
        one = dims[left]
        one[:, _BATCH_COLUMN] /= parts
        least[left] = np.minimum(least[left], parts * price_parts(rows[left], one))
        parts *= 2.0
    total[rows] = np.where(deep, np.maximum(total[rows], least), least)
    return replace(times, seconds=np.maximum(total, times.roofline_s))


def describe_model_file(model: Path | None = None) -> tuple[str, str]:
    """Return the version and the SHA-256 of a model file, by default of the file that `predict_kernel_times` uses.

    Raises:
        SpecError: the file is damaged.
    """
    learned = utilization.load_model(model)
    return learned.description.version, learned.sha256


def list_case_names(kind: KernelType, precision: str, dims: Dims, gpu: Gpu) -> Names:
    """Return the name of the training case of each of N kernels, such as `backward causal`, (N,) of strings.

    A case combines properties that change the code of a kernel and are not dimensions. They are the compute units, the
    mask and the direction of the pass.
    """
    count = len(next(iter(dims.values())))
    if kind.name == "gemm":
        is_measured = gpu.compute_capability < constants.shipped_constants().kernels.unmeasured_fp8_capability
        units = "fp8" if precision == "fp8" and is_measured else tiles.find_compute_units(precision, gpu)
        names = [units, f"{units} irregular"]
        code = features.has_irregular_sides(dims).astype(int) if units == "simt" else np.zeros(count, int)
    elif kind.name == "conv":
        names, code = [f"conv {word}" for word in DIRECTIONS], dims["direction"].astype(int)
    elif kind.name == "direct_conv":
        names, code = ["elementwise"], np.zeros(count, int)
    elif kind.name == "attention":
        names = [f"fp8 {text}" if precision == "fp8" else text for text in ATTENTION_CASES]
        code = (2 * (dims["backward"] > 0) + (dims["causal"] > 0)).astype(int)
    else:
        names = [kind.name, f"{kind.name} backward"]
        code = (dims["backward"] > 0).astype(int) if "backward" in dims else np.zeros(count, int)
    labels: Names = np.array(names)[code]
    return labels


DIRECTIONS = ("forward", "input gradient", "weight gradient")
ATTENTION_CASES = ("forward full", "forward causal", "backward full", "backward causal")


def _group_kernels(table: KernelTable) -> list[tuple[KernelType, str, Rows, Dims]]:
    """Return the kernels of a table in groups of one kind and precision.

    A group has the kind, the precision, the rows of its kernels in the table, and their dimensions by name.
    Convolutions are also grouped by `features.is_image_convolution`.
    """
    groups: list[tuple[KernelType, str, Rows, Dims]] = []
    for kind, rows, dims in table.groups():
        plain = features.is_image_convolution(dims) if kind.name == "conv" else np.zeros(len(rows), bool)
        codes = 2 * table.precision[rows] + plain
        for code in np.unique(codes):
            part = codes == code
            groups.append(
                (kind, PRECISIONS[code // 2], rows[part], {dim: column[part] for dim, column in dims.items()})
            )
    return groups


def _require_valid_sizes(kind: KernelType, dims: Dims) -> None:
    """Raise SpecError if a dimension is not finite, not positive, or too large. Flags may be zero."""
    for dim, column in dims.items():
        low = 0.0 if dim in FLAGS else np.finfo(float).tiny
        bad = ~(np.isfinite(column) & (column >= low) & (column <= LARGEST))
        if bad.any():
            value = column[bad][0]
            raise SpecError(f"{kind.name}.{dim}", f"{value:g} is no size of a kernel", "give a positive number")
