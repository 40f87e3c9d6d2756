"""Memory bills against measured peaks: rows of runs tables with a `peak_mem_gb_per_gpu`, whatever their grade.

A peak is one of three figures (`tilecast.memory`): what tensors took, what the allocator held, or what the device
reported. The notes of a row say which; where they do not, what the source's own text says of its column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilecast import memory
from tilecast.memory import Figure
from tilecast.search import Priced
from tilecast.spec import Floats, SpecError
from tilecast.validate import runs
from tilecast.validate.cells import Row

COLUMN = "peak_mem_gb_per_gpu"
LOW = 0.9
"""A bill below this share of the peak is one that would have let a run die."""
MOST_WARNINGS = 5

_NOTED: tuple[tuple[str, Figure], ...] = (
    ("max_memory_allocated", "allocated"), ("max_memory_reserved", "reserved"), ("nvidia-smi", "device"),
)  # fmt: skip
"""Words of notes that name the figure."""
_STATED: Mapping[str, Figure] = {
    "moorethreads/simumax": "allocated",  # the logs of Megatron-LM, which its notes set beside the reserved bytes
    "lightning-ai/litgpt": "allocated",  # finetune scripts print torch.cuda.max_memory_allocated() / 1e9
    "facebookresearch/detectron2": "allocated",  # its model zoo prints max_mem of EventStorage, the allocator's maximum
    "mlcommons/training_results": "allocated",  # NeMo's callback logs torch.cuda.max_memory_allocated
    "eth-easl/sailor": "allocated",  # bytes to the last digit, as PyTorch's counters are
    "pytorch/ao": "reserved",  # torchtitan's metrics print max_reserved_gib
    "pytorch/torchtune": "reserved",  # training.get_memory_stats, peak_memory_reserved
    "flagperf": "device",  # "mem" of its README: memory used of the memory of the card
    "oneflow-inc/dlperf": "device",  # a script beside the run reads nvidia-smi
}
"""What a source's peaks are, by its name in lower case."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rows with a measured peak and a bill, as arrays (R,)."""

    rows: tuple[Row, ...]
    figures: tuple[Figure, ...]
    measured: Floats
    """Bytes."""
    billed: Floats
    """The bill's figure of the same kind, in bytes."""
    fits: Floats
    """1 where the middle of the range fits the GPU that the row ran on."""
    inside: Floats
    """1 where the range of the same figure holds what is measured."""
    refused: int
    """Rows with a peak that cannot be expressed."""
    warnings: tuple[str, ...]
    """Rows whose peak cannot be meant, a line each; they are left out."""


def peak_bytes(row: Row) -> float | None:
    """The measured peak; None where the column is empty. GiB, but where the notes write the same number as GB.

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
    decimal = figure(row) != "reserved" and any(abs(one - value) < 0.006 for one in gigabytes)
    return value * (1e9 if decimal else 2**30)


def figure(row: Row) -> Figure:
    """Which of the three figures a row's peak is; what the device reports where nothing says it."""
    notes = row.get("notes", "").lower()
    noted = next((kind for word, kind in _NOTED if word in notes), None)
    return noted or _STATED.get(row.get("source", "").lower(), "device")


def _cell(row: Row) -> str:
    return f"row {row.get('id', '')}: {COLUMN}"


def measure(rows: Sequence[Row], groups: Sequence[runs.RunGroup], refused: Mapping[int, str]) -> Peaks:
    """The rows with a peak, and their bills; `groups` and `refused` are what `runs.prepare` makes of the rows."""
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
        priced = runs.price(group)
        for member in members:
            place, index = runs.chosen(priced, member), member.index
            weights = float(priced.footprint.parameters[place])
            if measured[index] < weights and group.workload.offload == "none":
                problem = f"{measured[index] / 2**30:.3g} GiB is less than the weights, {weights / 2**30:.3g} GiB"
                warnings.append(str(SpecError(_cell(rows[index]), problem, "correct the peak or the plan")))
                continue
            kind = figure(rows[index])
            value, lower, upper = _billed(group, priced, kind, place)
            billed[index] = kind, value, bool(priced.fits[place]), lower <= measured[index] <= upper
    shown = sorted(billed)
    return Peaks(
        rows=tuple(rows[index] for index in shown),
        figures=tuple(billed[index][0] for index in shown),
        measured=np.array([measured[index] for index in shown]),
        billed=np.array([billed[index][1] for index in shown]),
        fits=np.array([billed[index][2] for index in shown], dtype=float),
        inside=np.array([billed[index][3] for index in shown], dtype=float),
        refused=len(measured.keys() & refused.keys()),
        warnings=tuple(warnings),
    )


def _billed(group: runs.RunGroup, priced: Priced, kind: Figure, place: int) -> tuple[float, float, float]:
    """A figure of a plan's bill and both ends of its range, in bytes. A cache grows no further than the GPU."""
    bill, stacks = priced.footprint, memory.stack_bytes(group.pool.gpu) if kind == "device" else 0.0
    lower, upper = (float(end[place]) for end in bill.spans(kind))
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
    """The bills of some rows over their peaks."""

    name: str
    rows: int
    error: float
    """Mean of the absolute errors, a share."""
    median: float
    least: float
    most: float
    low: float
    """The share of bills below `LOW`."""
    inside: float
    """The share of peaks that their ranges hold."""


def strata(peaks: Peaks) -> list[MemoryStratum]:
    """All bills, then those of every source, framework and figure."""
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


def counted(peaks: Peaks) -> list[str]:
    """How many rows were billed, and what was left out; a line each."""
    lines = [f"measured peaks of memory: {len(peaks.measured)} rows billed, {peaks.refused} refused"]
    lines += [f"  left out: {line}" for line in peaks.warnings[:MOST_WARNINGS]]
    if len(peaks.warnings) > MOST_WARNINGS:
        lines.append(f"  left out: {len(peaks.warnings) - MOST_WARNINGS} more")
    return lines


def judged(peaks: Peaks) -> list[str]:
    """The error with every source counting alike, and what was called too large; a line each."""
    ratio = peaks.billed / peaks.measured
    sources = np.array([row.get("source", "") for row in peaks.rows])
    each = [np.mean(np.abs(ratio[sources == one] - 1)) for one in set(sources)]
    return [
        f"mean over sources of the mean error of each: {np.mean(each):.1%}",
        f"called too large for the GPU they ran on: {1 - peaks.fits.mean():.1%}",
    ]


def report(peaks: Peaks) -> str:
    """The table of bills over peaks, by source, framework and figure; empty where no row has a peak."""
    if not len(peaks.measured) and not peaks.warnings:
        return ""
    lines = counted(peaks)
    if len(peaks.measured):
        lines += [_TITLES, *(_line(item) for item in strata(peaks)), *judged(peaks)]
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
