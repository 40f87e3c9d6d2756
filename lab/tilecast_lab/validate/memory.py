"""Comparison of memory bills with measured peaks, on all rows of runs tables with a `peak_mem_gb_per_gpu`.

Rows of every grade count.
A peak is one of three figures (`tilecast.memory`): the bytes that tensors took, that the allocator reserved, or that
the device reported. The notes of a row say which; without notes, the documentation of the row's source does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilecast import memory
from tilecast.memory import Figure
from tilecast.search import PricedPlans
from tilecast.spec import Floats, SpecError
from tilecast.validate import runs
from tilecast.validate.cells import Row

COLUMN = "peak_mem_gb_per_gpu"
LOW = 0.9
"""Bills below this share of the peak are too low: such a run would be admitted and would run out of memory."""
MOST_WARNINGS = 5
"""Largest number of warnings that are shown."""

_NOTED: tuple[tuple[str, Figure], ...] = (
    ("max_memory_allocated", "allocated"), ("max_memory_reserved", "reserved"), ("memory_reserved", "reserved"),
    ("max reserved", "reserved"), ("nvidia-smi", "device"),
)  # fmt: skip
"""Words in a row's notes, and the figure that they name."""
_SILENT = ("tsm repo", "tsn repo")
"""Frameworks that log no memory, beside which somebody read the device's."""
_STATED: Mapping[str, Figure] = {
    "moorethreads/simumax": "allocated",  # the logs of Megatron-LM, which its notes set beside the reserved bytes
    "lightning-ai/litgpt": "allocated",  # finetune scripts print torch.cuda.max_memory_allocated() / 1e9
    "facebookresearch/detectron2": "allocated",  # its model zoo prints max_mem of EventStorage, the allocator's maximum
    "open-mmlab/mmaction2": "allocated",  # mmcv logs torch.cuda.max_memory_allocated (runner/hooks/logger/text.py)
    "open-mmlab/mmdetection": "allocated",
    "open-mmlab/mmsegmentation": "allocated",
    "open-mmlab/mmyolo": "allocated",
    "nvlabs/stylegan2-ada-pytorch": "allocated",  # training_loop.py reports torch.cuda.max_memory_allocated
    "a-r-r-o-w/cogvideox-factory": "reserved",  # its pages copy the reserved bytes of get_memory_statistics
    "mlcommons/training_results": "allocated",  # NeMo's callback logs torch.cuda.max_memory_allocated
    "eth-easl/sailor": "allocated",  # bytes to the last digit, as PyTorch's counters are
    "pytorch/ao": "reserved",  # torchtitan's metrics print max_reserved_gib
    "pytorch/torchtune": "reserved",  # training.get_memory_stats, peak_memory_reserved
    "flagperf": "device",  # "mem" of its README: memory used of the memory of the card
    "oneflow-inc/dlperf": "device",  # a script beside the run reads nvidia-smi
}
"""Figure that a source reports as its peak, by the source's name in lower case."""


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """R rows with a measured peak and a bill; arrays are (R,)."""

    rows: tuple[Row, ...]
    figures: tuple[Figure, ...]
    measured: Floats
    """Measured peak, in bytes."""
    billed: Floats
    """Figure of the same kind in the bill, in bytes."""
    fits: Floats
    """1 if the middle of the bill's range fits the GPU that the row ran on, else 0."""
    inside: Floats
    """1 if the figure's range contains the measured peak, else 0."""
    refused: int
    """Number of rows with a peak that cannot be expressed as a workload and a plan."""
    warnings: tuple[str, ...]
    """Messages about rows with an impossible peak, one each; these rows are left out."""


def peak_bytes(row: Row) -> float | None:
    """Return the measured peak in bytes, or None if the column is empty.

    The column is in GiB, unless the notes state the same number as GB and the figure is not the reserved bytes.

    Raises:
        SpecError: the column holds no positive number.
    """
    text = row.get(COLUMN, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not 0 < value < 2**20:
        raise SpecError(_cell(row), f"{text[:40]!r} is no positive number of GiB", "correct the cell")
    gigabytes = (float(number) for number in re.findall(r"(\d+(?:\.\d+)?) GB\b", row.get("notes", "")))
    decimal = peak_figure(row) != "reserved" and any(abs(one - value) < 0.006 for one in gigabytes)
    return value * (1e9 if decimal else 2**30)


def peak_figure(row: Row) -> Figure:
    """Return which of the three figures a row's peak is; "device" if neither its notes nor its source say so."""
    notes = row.get("notes", "").lower()
    if row.get("framework", "").lower().startswith(_SILENT):
        return "device"
    noted = next((kind for word, kind in _NOTED if word in notes), None)
    return noted or _STATED.get(row.get("source", "").lower(), "device")


def _cell(row: Row) -> str:
    return f"row {row.get('id', '')}: {COLUMN}"


def measure_peaks(rows: Sequence[Row], groups: Sequence[runs.RunGroup], refused: Mapping[int, str]) -> MemoryPeaks:
    """Return the rows with a peak and their bills.

    `groups` and `refused` are results of `runs.group_runs` for `rows`. A peak smaller than the plan's weights becomes
    a warning, unless the workload offloads them.
    """
    warnings: list[str] = []
    measured: dict[int, float] = {}
    for number, row in enumerate(rows):
        try:
            peak = peak_bytes(row)
        except SpecError as error:
            warnings.append(str(error))
            continue
        if peak is not None:
            measured[number] = peak
    billed: dict[int, tuple[Figure, float, bool, bool]] = {}
    for group in groups:
        members = [member for member in group.members if member.index in measured]
        if not members:
            continue
        priced = runs.forecast_group(group)
        for member in members:
            place, index = runs.choose_plan(priced, member), member.index
            weights = float(priced.footprint.parameters[place])
            if measured[index] < weights and group.workload.offload == "none":
                problem = f"{measured[index] / 2**30:.3g} GiB is less than the weights, {weights / 2**30:.3g} GiB"
                warnings.append(str(SpecError(_cell(rows[index]), problem, "correct the peak or the plan")))
                continue
            kind = peak_figure(rows[index])
            value, lower, upper = _billed(group, priced, kind, place)
            billed[index] = kind, value, bool(priced.fits[place]), lower <= measured[index] <= upper
    shown = sorted(billed)
    return MemoryPeaks(
        rows=tuple(rows[index] for index in shown),
        figures=tuple(billed[index][0] for index in shown),
        measured=np.array([measured[index] for index in shown]),
        billed=np.array([billed[index][1] for index in shown]),
        fits=np.array([billed[index][2] for index in shown], dtype=float),
        inside=np.array([billed[index][3] for index in shown], dtype=float),
        refused=len(measured.keys() & refused.keys()),
        warnings=tuple(warnings),
    )


def _billed(group: runs.RunGroup, priced: PricedPlans, kind: Figure, place: int) -> tuple[float, float, float]:
    """Return a figure of the bill of the plan at `place` and both ends of its range, in bytes.

    The allocator's cache grows no further than the GPU's usable memory.
    """
    bill, stacks = priced.footprint, memory.thread_stack_bytes(group.pool.gpu) if kind == "device" else 0.0
    lower, upper = (float(end[place]) for end in bill.figure_range(kind))
    value = float(getattr(bill, kind)[place])
    if kind == "device":
        value = max(min(value, priced.usable_bytes), float(bill.total[place]))
    return value + stacks, lower + stacks, upper + stacks


_BINS: tuple[tuple[str, Callable[[Row, Figure], str]], ...] = (
    ("source", lambda row, _: row.get("source", "")),
    ("framework", lambda row, _: row.get("framework", "")),
    ("figure", lambda _, kind: kind),
)


@dataclass(frozen=True, slots=True)
class MemoryStratum:
    """Bills over peaks of a subset of the rows."""

    name: str
    rows: int
    error: float
    """Mean absolute relative error."""
    median: float
    least: float
    most: float
    low: float
    """Share of the bills below `LOW` times the peak."""
    inside: float
    """Share of the peaks inside their ranges."""


def strata(peaks: MemoryPeaks) -> list[MemoryStratum]:
    """Return the stratum of all bills, then one for every source, framework and figure."""
    ratio = peaks.billed / peaks.measured
    everything = [_stratum("all", ratio, peaks.inside)]
    for name, key in _BINS:
        values = np.array([key(row, kind) for row, kind in zip(peaks.rows, peaks.figures, strict=True)])
        masks = [(value, values == value) for value in sorted(set(values))]
        everything += [_stratum(f"{name} {value}", ratio[mask], peaks.inside[mask]) for value, mask in masks]
    return everything


def _stratum(name: str, ratio: Floats, inside: Floats) -> MemoryStratum:
    error, low = float(np.mean(np.abs(ratio - 1))), float(np.mean(ratio < LOW))
    ends = float(ratio.min()), float(ratio.max())
    return MemoryStratum(name, len(ratio), error, float(np.median(ratio)), *ends, low, float(inside.mean()))


def describe_counts(peaks: MemoryPeaks) -> list[str]:
    """Return lines of text about how many rows were billed and which were left out."""
    lines = [f"measured peaks of memory: {len(peaks.measured)} rows billed, {peaks.refused} refused"]
    lines += [f"  left out: {line}" for line in peaks.warnings[:MOST_WARNINGS]]
    if len(peaks.warnings) > MOST_WARNINGS:
        lines.append(f"  left out: {len(peaks.warnings) - MOST_WARNINGS} more")
    return lines


def describe_errors(peaks: MemoryPeaks) -> list[str]:
    """Return two lines of text: the error with equal weight for every source, and the share called too large."""
    ratio = peaks.billed / peaks.measured
    sources = np.array([row.get("source", "") for row in peaks.rows])
    each = [np.mean(np.abs(ratio[sources == one] - 1)) for one in set(sources)]
    return [
        f"mean over sources of the mean error of each: {np.mean(each):.1%}",
        f"called too large for the GPU they ran on: {1 - peaks.fits.mean():.1%}",
    ]


def report(peaks: MemoryPeaks) -> str:
    """Return the table of bills over peaks by source, framework and figure, empty if no row has a peak."""
    if not len(peaks.measured) and not peaks.warnings:
        return ""
    lines = describe_counts(peaks)
    if len(peaks.measured):
        lines += [_TITLES, *(_line(item) for item in strata(peaks)), *describe_errors(peaks)]
    return "\n".join(lines)


_TITLES = (
    f"{'bill / peak':<44} {'rows':>5} {'error':>7} {'median':>7} {'least':>6} {'most':>6} {'>10% low':>9} "
    f"{'in range':>9}"
)


def _line(item: MemoryStratum) -> str:
    return (
        f"{item.name[:44]:<44} {item.rows:>5} {item.error:>7.1%} {item.median:>7.2f} "
        f"{item.least:>6.2f} {item.most:>6.2f} {item.low:>9.1%} {item.inside:>9.1%}"
    )
