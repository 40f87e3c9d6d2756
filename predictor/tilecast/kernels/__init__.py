"""Durations of kernels on a GPU: roofline, tiles and waves, and a learned utilization.

`seconds` prices a whole `KernelTable` at once: the kinds with a network (`features.family`) go through one onnxruntime
call, the others, bound by bandwidth, through `formulas`. A duration is the kernel's time on the GPU including its ramp
of a few microseconds, without the CPU's launch, and obeys these laws: never NaN; never above the dense peak (after
Winograd's reduction); never above DRAM bandwidth once the bytes exceed two L2, nor above L2 bandwidth below that; and
doubling a dimension never lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tilecast import constants
from tilecast.graph import KINDS, Dims, KernelTable, Kind
from tilecast.hardware import Gpu
from tilecast.kernels import features, formulas, tiles, utilization
from tilecast.spec import PRECISIONS, Floats, Ints, SpecError

Rows: TypeAlias = npt.NDArray[np.intp]
Names: TypeAlias = npt.NDArray[np.str_]
Mask: TypeAlias = npt.NDArray[np.bool_]

__all__ = ["KernelTimes", "model_info", "seconds"]

FLAGS = ("accumulated", "causal", "backward", "direction", "drawn", "read_bytes", "written_bytes")
"""Dimensions that may be zero."""
LARGEST = 2.0**48
"""Largest possible dimension of a kernel; a larger one is a typing error."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Durations of the N kernels of a table on one GPU. All columns are (N,)."""

    table: KernelTable
    gpu: Gpu
    seconds: Floats
    spread: Floats
    """Relative half-width of the 90 % interval, from `seconds / (1 + spread)` to `seconds · (1 + spread)`."""
    roofline_s: Floats
    """Seconds that peak FLOP/s and bandwidth alone would allow."""
    irregular: npt.NDArray[np.bool_]
    """Whether a product on tensor cores has two sides or more that no library is tuned for. No measured table has such
    products, so they are priced like regular ones."""
    implicit: Floats
    """Value of `features.doublings` for convolutions on tensor cores that are priced as the matrix product they run as;
    0 for all other kernels."""

    @property
    def utilization(self) -> Floats:
        """Share of the roofline that is reached, in (0, 1], shape (N,)."""
        return self.roofline_s / self.seconds

    def tiling(self) -> tiles.Tiling:
        """Return how each kernel is cut into tiles; kinds without tiles report one tile and one wave, (N,) each."""
        columns = np.ones((6, len(self.table)))
        for kind, precision, rows, d in _groups(self.table):
            if kind.name in features.PRODUCTS:
                p = features.PRODUCTS[kind.name](d)
                tiling = tiles.choose(p.m, p.n, p.k, p.batch, self.gpu, tiles.units(precision, self.gpu))
                parts = (tiling.rows, tiling.cols, tiling.split_k, tiling.tiles, tiling.waves, tiling.fill)
                columns[:, rows] = np.stack(parts)
        return tiles.Tiling(*columns)


def seconds(table: KernelTable, gpu: Gpu, *, model: Path | None = None, bounded: bool = True) -> KernelTimes:
    """Return the durations of all kernels of the table on a GPU, in one batched call of the runtime.

    Args:
        table: N kernels of any kinds and precisions.
        gpu: the GPU; one that was not in the training data is priced by the general law.
        model: a file that `python -m tilecast_lab fit` wrote; None takes the one that ships.
        bounded: whether the times of convolutions on tensor cores are limited by those of their parts (`_bounded`).

    Raises:
        SpecError: the GPU lacks a precision of the table, a dimension is not a sensible number, or the model file is
            damaged.
    """
    learned = utilization.load(model)
    questions = _Questions(learned, gpu)
    total, spread, roofline = np.zeros((3, len(table)))
    irregular, implicit, share = np.zeros(len(table), bool), np.zeros(len(table)), np.ones(len(table))
    flat: list[Rows] = []
    for kind, precision, rows, d in _groups(table):
        _require_sensible(kind, d)
        if kind.name == "gemm" and tiles.units(precision, gpu) == "tensor":
            irregular[rows] = features.irregular(d)
        plain = features.work(kind, precision, d)
        compute_s = plain.flops / gpu.peak(precision) if kind.name in features.PRODUCTS else np.zeros(len(rows))
        roofline[rows] = np.maximum(compute_s, formulas.memory_floor_s(plain.moved_bytes, gpu))
        name = case(kind, precision, d, gpu)
        priced, family = plain, features.family(kind.name, precision, gpu)
        if family == "conv_simt":
            share[rows] = np.where(d["k_d"] > 1, constants.shipped().kernels.volume_share, 1.0)
        if kind.name == "conv" and family == "gemm_tensor":
            measured = learned.knows(family, name[0], gpu) & (d["groups"] == 1)
            if measured.any():
                flat.append(rows[measured])
            if not (measured.all() and features.is_flat(d)[0]):
                # Such convolutions were not measured on this GPU's tensor cores: they are priced as implicit GEMMs.
                priced, name = features.packed_gemm(plain), np.full(len(rows), "tensor")
                implicit[rows] = features.doublings(gpu, precision)
        for text in sorted(set(name.tolist())):
            part = name == text
            if context := learned.context(family, text, gpu):
                spread[rows[part]] = questions.add(family, context, priced.take(part), precision, rows[part])
            else:
                ceiling = learned.ceiling(text)
                total[rows[part]] = _by_formula(kind, d, part, plain, gpu, ceiling)
                spread[rows[part]] = ceiling.spread.on(gpu, utilization.die(gpu) in ceiling.dies)
    questions.answer(total)
    times = KernelTimes(table, gpu, np.maximum(total / share, roofline), spread, roofline, irregular, implicit)
    return _bounded(times, np.concatenate(flat), model) if flat and bounded else times


class _Questions:
    """Inputs of the networks on one GPU, by family: all kernels go through one call of the runtime."""

    def __init__(self, learned: utilization.Utilization, gpu: Gpu) -> None:
        self.learned, self.gpu, self.fed = learned, gpu, gpu.unlimited()
        self.inputs: dict[str, list[features.Inputs]] = {}
        self.contexts: dict[str, list[Ints]] = {}
        self.rows: dict[str, list[Rows]] = {}

    def add(self, family: str, context: utilization.Context, work: features.Work, precision: str, rows: Rows) -> Floats:
        """Add the kernels of these rows and return their spreads, (n,).

        Raises:
            SpecError: the model file expects other columns.
        """
        asked = features.inputs(family, work, self.fed, precision)
        network = self.learned.description.networks[family]
        if asked.names != network.columns:
            raise SpecError("utilization model", f"expects other columns for {family}", utilization.REMEDY)
        own = asked.columns[0]
        outside = ((own < network.low) | (own > network.high)).any(axis=1)
        self.inputs.setdefault(family, []).append(asked)
        self.contexts.setdefault(family, []).append(np.full(len(own), context.index, np.int64))
        self.rows.setdefault(family, []).append(rows)
        return np.asarray(context.spread * np.where(outside, constants.shipped().kernels.extrapolation_spread, 1.0))

    def answer(self, total: Floats) -> None:
        """Write the seconds of every added kernel into its row of `total`, (N,)."""
        if not self.inputs:
            return
        cycles = self.learned.log2_cycles(
            {family: features.joined(parts) for family, parts in self.inputs.items()},
            {family: np.concatenate(parts) for family, parts in self.contexts.items()},
        )
        for family, column in cycles.items():
            total[np.concatenate(self.rows[family])] = np.exp2(column) / self.gpu.boost_clock_hz


def _by_formula(
    kind: Kind, d: Dims, part: Mask, plain: features.Work, gpu: Gpu, ceiling: utilization.Ceiling
) -> Floats:
    """Return the seconds of the kernels of a kind in `part`, which no network prices, (n,)."""
    moved = plain.moved_bytes[part]
    if kind.name == "direct_conv":
        return formulas.direct_conv_s(plain.flops[part], moved, gpu, ceiling)
    count = formulas.rows(d, plain.moved_bytes)[part]
    cols = d["cols"][part] if "cols" in d else formulas.THREADS
    drawn_s = formulas.drawing_s(d["drawn"] * d["elements"], gpu)[part] if "drawn" in d else 0.0
    return formulas.bandwidth_bound_s(moved, count, gpu, ceiling, cols) + drawn_s


_LEAST_BATCH = 4
"""Images of the smallest part into which the batch of a convolution is divided."""
_BATCH = KINDS["conv"].dims.index("batch")
_DEPTHS = [KINDS["conv"].dims.index(name) for name in ("in_d", "k_d", "out_d")]


def _bounded(times: KernelTimes, rows: Rows, model: Path | None) -> KernelTimes:
    """Return the times with bounds on some convolutions, `rows`, by the times of parts of them.

    These are convolutions of one group on a GPU that was measured. They take no longer than 2, 4, 8, … parts of their
    batch one after the other, which a library may run instead, since few batches were measured. Volumes take no less
    than one of their slices.
    """

    def others(rows: Rows, dims: Floats) -> Floats:
        table = replace(times.table.take(rows), dims=dims)
        return seconds(table, times.gpu, model=model, bounded=False).seconds

    total, dims = times.seconds.copy(), times.table.dims[rows].copy()
    deep = (dims[:, _DEPTHS] > 1).any(axis=1)
    dims[:, _DEPTHS] = 1.0
    least = others(rows, dims)
    parts = 2.0
    left = np.arange(len(rows))
    while len(left := left[dims[left, _BATCH] >= _LEAST_BATCH * parts]):
        one = dims[left]
        one[:, _BATCH] /= parts
        least[left] = np.minimum(least[left], parts * others(rows[left], one))
        parts *= 2.0
    total[rows] = np.where(deep, np.maximum(total[rows], least), least)
    return replace(times, seconds=np.maximum(total, times.roofline_s))


def model_info(model: Path | None = None) -> tuple[str, str]:
    """Return version and SHA-256 of the model file that `seconds` uses.

    Raises:
        SpecError: the file is damaged.
    """
    learned = utilization.load(model)
    return learned.description.version, learned.sha256


def case(kind: Kind, precision: str, d: Dims, gpu: Gpu) -> Names:
    """Return the names of the trained cases of N kernels, shape (N,) of strings.

    A case is what changes the code that runs but is no dimension: the units, the mask, the direction.
    """
    count = len(next(iter(d.values())))
    if kind.name == "gemm":
        is_measured = gpu.compute_capability < constants.shipped().kernels.unmeasured_fp8_capability
        units = "fp8" if precision == "fp8" and is_measured else tiles.units(precision, gpu)
        names = [units, f"{units} irregular"]
        code = features.irregular(d).astype(int) if units == "simt" else np.zeros(count, int)
    elif kind.name == "conv":
        names, code = [f"conv {word}" for word in DIRECTIONS], d["direction"].astype(int)
    elif kind.name == "direct_conv":
        names, code = ["elementwise"], np.zeros(count, int)
    elif kind.name == "attention":
        names = [f"fp8 {text}" if precision == "fp8" else text for text in ATTENTION_CASES]
        code = (2 * (d["backward"] > 0) + (d["causal"] > 0)).astype(int)
    else:
        names = [kind.name, f"{kind.name} backward"]
        code = (d["backward"] > 0).astype(int) if "backward" in d else np.zeros(count, int)
    labels: Names = np.array(names)[code]
    return labels


DIRECTIONS = ("forward", "input gradient", "weight gradient")
ATTENTION_CASES = ("forward full", "forward causal", "backward full", "backward causal")


def _groups(table: KernelTable) -> list[tuple[Kind, str, Rows, Dims]]:
    """Return the kernels by kind and precision: (kind, precision, rows, dimensions of those rows).

    Convolutions are in two groups (`is_flat`).
    """
    groups: list[tuple[Kind, str, Rows, Dims]] = []
    for kind, rows, d in table.groups():
        plain = features.is_flat(d) if kind.name == "conv" else np.zeros(len(rows), bool)
        codes = 2 * table.precision[rows] + plain
        for code in np.unique(codes):
            part = codes == code
            groups.append((kind, PRECISIONS[code // 2], rows[part], {dim: column[part] for dim, column in d.items()}))
    return groups


def _require_sensible(kind: Kind, d: Dims) -> None:
    for dim, column in d.items():
        low = 0.0 if dim in FLAGS else np.finfo(float).tiny
        bad = ~(np.isfinite(column) & (column >= low) & (column <= LARGEST))
        if bad.any():
            value = column[bad][0]
            raise SpecError(f"{kind.name}.{dim}", f"{value:g} is no size of a kernel", "give a positive number")
