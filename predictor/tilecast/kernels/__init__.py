"""From kernels and a GPU to seconds: roofline, tiles and waves, and a learned utilization.

`seconds` prices a whole `KernelTable` at once: the kinds with a network (`features.family`) go through one
onnxruntime call, the bandwidth-bound rest through `formulas`. A duration is the kernel's time on
the GPU including its ramp of a few microseconds, without the CPU's launch, and obeys these laws: never
NaN; never above the dense peak (after Winograd's reduction); never above DRAM bandwidth once the bytes
exceed two L2, nor above L2 bandwidth below that; and doubling a dimension never lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tilecast.graph import Dims, KernelTable, Kind
from tilecast.hardware import Gpu
from tilecast.kernels import features, formulas, tiles, utilization
from tilecast.spec import PRECISIONS, Floats, Ints, SpecError

Rows: TypeAlias = npt.NDArray[np.intp]
Names: TypeAlias = npt.NDArray[np.str_]

__all__ = ["KernelTimes", "model_info", "seconds"]

FLAGS = ("accumulated", "causal", "backward", "direction", "drawn", "read_bytes", "written_bytes")
"""Dimensions that may be zero."""
LARGEST = 2.0**48
"""No dimension of a kernel is larger; what is, is a typing error."""
EXTRAPOLATION_SPREAD = 1.5
"""Factor on the spread of a kernel outside the range of shapes that was trained on."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Durations of the N kernels of a table on one GPU. All columns are (N,)."""

    table: KernelTable
    gpu: Gpu
    seconds: Floats
    spread: Floats
    """Relative half-width of the 90 % interval, from `seconds / (1 + spread)` to `seconds · (1 + spread)`."""
    roofline_s: Floats
    """The time that peak FLOP/s and bandwidth alone would allow."""
    irregular: npt.NDArray[np.bool_]
    """Products on tensor cores with two sides or more that no library is tuned for. No measured table holds such, so
    they are priced like regular ones."""

    @property
    def utilization(self) -> Floats:
        """Share of the roofline that is reached, in (0, 1], shape (N,)."""
        return self.roofline_s / self.seconds

    def tiling(self) -> tiles.Tiling:
        """How each kernel is cut into tiles; kinds without tiles report one tile and one wave, (N,) each."""
        columns = np.ones((6, len(self.table)))
        for kind, precision, rows, d in _groups(self.table):
            if kind.name in features.PRODUCTS:
                p = features.PRODUCTS[kind.name](d)
                tiling = tiles.choose(p.m, p.n, p.k, p.batch, self.gpu, tiles.units(precision, self.gpu))
                parts = (tiling.rows, tiling.cols, tiling.split_k, tiling.tiles, tiling.waves, tiling.fill)
                columns[:, rows] = np.stack(parts)
        return tiles.Tiling(*columns)


def seconds(table: KernelTable, gpu: Gpu, *, model: Path | None = None) -> KernelTimes:
    """Durations of all kernels of the table on that GPU, in one batched call of the runtime.

    Args:
        table: N kernels of any kinds and precisions.
        gpu: the GPU; one that was not in the training data is priced by the general law.
        model: a file written by `tilecast_fit`; None takes the one that ships.

    Raises:
        SpecError: the GPU lacks a precision of the table, a dimension is not a sensible number, or the model
            file is damaged.
    """
    learned = utilization.load(model)
    total, spread, roofline = np.zeros((3, len(table)))
    inputs: dict[str, list[features.Inputs]] = {}
    contexts: dict[str, list[Ints]] = {}
    where: dict[str, list[Rows]] = {}
    irregular = np.zeros(len(table), bool)
    for kind, precision, rows, d in _groups(table):
        _require_sensible(kind, d)
        if kind.name == "gemm" and tiles.units(precision, gpu) == "tensor":
            irregular[rows] = features.irregular(d)
        plain = features.work(kind, precision, d)
        compute_s = plain.flops / gpu.peak(precision) if kind.name in features.PRODUCTS else np.zeros(len(rows))
        roofline[rows] = np.maximum(compute_s, formulas.memory_floor_s(plain.moved, gpu))
        name = case(kind, precision, d, gpu)
        priced, family = plain, features.family(kind.name, precision, gpu)
        if kind.name == "conv" and family == "gemm_tensor" and not learned.knows(family, name[0], gpu):
            # No convolution was measured on the tensor cores of this GPU: it is the implicit GEMM it runs as.
            priced, name = features.packed_gemm(plain), np.full(len(rows), "tensor")
        for text in np.unique(name):
            part = name == text
            if context := learned.context(family, text, gpu):
                asked = features.inputs(family, priced.take(part), gpu, precision)
                network = learned.description.networks[family]
                if asked.names != network.columns:
                    raise SpecError("utilization model", f"expects other columns for {family}", utilization.REMEDY)
                own = asked.columns[0]
                outside = ((own < network.low) | (own > network.high)).any(axis=1)
                spread[rows[part]] = context.spread * np.where(outside, EXTRAPOLATION_SPREAD, 1.0)
                inputs.setdefault(family, []).append(asked)
                contexts.setdefault(family, []).append(np.full(len(own), context.index, np.int64))
                where.setdefault(family, []).append(rows[part])
            else:
                ceiling = learned.ceiling(text)
                moved = plain.moved[part]
                count = formulas.rows(d, plain.moved)[part]
                drawn_s = formulas.drawing_s(d["drawn"] * d["elements"], gpu)[part] if "drawn" in d else 0.0
                total[rows[part]] = formulas.bandwidth_bound_s(moved, count, gpu, ceiling) + drawn_s
                spread[rows[part]] = ceiling.spread.on(gpu, utilization.die(gpu) in ceiling.dies)
    if inputs:
        found_cycles = learned.log2_cycles(
            {family: features.joined(parts) for family, parts in inputs.items()},
            {family: np.concatenate(parts) for family, parts in contexts.items()},
        )
        for family, cycles in found_cycles.items():
            total[np.concatenate(where[family])] = np.exp2(cycles) / gpu.boost_clock_hz
    return KernelTimes(table, gpu, np.maximum(total, roofline), spread, roofline, irregular)


def model_info(model: Path | None = None) -> tuple[str, str]:
    """Version and SHA-256 of the model file that `seconds` uses.

    Raises:
        SpecError: the file is damaged.
    """
    learned = utilization.load(model)
    return learned.description.version, learned.sha256


def case(kind: Kind, precision: str, d: Dims, gpu: Gpu) -> Names:
    """Names of the trained cases that N kernels fall under, shape (N,) of strings.

    A case is what changes the code that runs but is no dimension: the units, the mask, the direction.
    """
    count = len(next(iter(d.values())))
    if kind.name == "gemm":
        units = "fp8" if precision == "fp8" else tiles.units(precision, gpu)
        names = [units, f"{units} irregular"]
        code = features.irregular(d).astype(int) if units == "simt" else np.zeros(count, int)
    elif kind.name == "conv":
        names, code = [f"conv {word}" for word in DIRECTIONS], d["direction"].astype(int)
    elif kind.name == "attention":
        names = [f"fp8 {text}" if precision == "fp8" else text for text in ATTENTION_CASES]
        code = (2 * (d["backward"] > 0) + (d["causal"] > 0)).astype(int)
    else:
        names = [kind.name, f"{kind.name} backward"]
        code = (d["backward"] > 0).astype(int) if "backward" in d else np.zeros(count, int)
    found: Names = np.array(names)[code]
    return found


DIRECTIONS = ("forward", "input gradient", "weight gradient")
ATTENTION_CASES = ("forward full", "forward causal", "backward full", "backward causal")


def _groups(table: KernelTable) -> list[tuple[Kind, str, Rows, Dims]]:
    """The kernels by kind and precision: (kind, precision, rows, dimensions of those rows)."""
    found: list[tuple[Kind, str, Rows, Dims]] = []
    for kind, rows, d in table.groups():
        codes = table.precision[rows]
        for code in np.unique(codes):
            part = codes == code
            found.append((kind, PRECISIONS[code], rows[part], {dim: column[part] for dim, column in d.items()}))
    return found


def _require_sensible(kind: Kind, d: Dims) -> None:
    for dim, column in d.items():
        low = 0.0 if dim in FLAGS else np.finfo(float).tiny
        bad = ~(np.isfinite(column) & (column >= low) & (column <= LARGEST))
        if bad.any():
            value = column[bad][0]
            raise SpecError(f"{kind.name}.{dim}", f"{value:g} is no size of a kernel", "give a positive number")
