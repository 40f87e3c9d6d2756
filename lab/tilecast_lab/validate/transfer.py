"""Test of transfer on published runs, with constants that were fitted without the source of each.

`tilecast.validate.transfer` makes the pairs and their corrections. Here are two more scalings of the measured step, by
peak FLOP/s and by memory bandwidth, both per model FLOP of a GPU. Intervals are the middle 90 % over resamplings of the
sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tilecast.learning import calibration
from tilecast.spec import Floats, Ints
from tilecast.validate import Track, iterate_without_progress, transfer
from tilecast.validate.transfer import PairErrors, TransferRuns, pair_runs, read_named_rows
from tilecast_lab.validate import calibration as curves
from tilecast_lab.validate import residuals

DRAWS = 1000
"""Resamplings of the sources for an interval."""
ESTIMATES = ("raw", "corrected", "scaled", "FLOP/s", "bandwidth")
"""Ways to forecast a row from another: two forecasts and three scalings."""


def read_subjects(paths: Sequence[Path], track: Track = iterate_without_progress) -> TransferRuns:
    """Read runs tables and forecast their graded rows.

    Args:
        paths: paths of the tables.
        track: shows progress over the groups of rows.

    Raises:
        SpecError: a file cannot be read, or no row is graded and can be forecast.
    """
    measured = curves.measured(read_named_rows(paths), track)
    return transfer.build_transfer_runs(measured, [residuals.source_of(row) for row in measured.rows])


def forecast_pairs(subjects: TransferRuns, kind: str, seen: Ints, asked: Ints) -> PairErrors:
    """Forecast each row of `asked` (P,) from the run of the row in `seen` (P,), and return the errors."""
    own, measured = transfer.pair_errors(subjects, kind, seen, asked), subjects.observed_s
    cases, forecasts = subjects.measured.cases, curves.published_forecasts(subjects.measured)
    flops = np.array([item.model_flops or 0.0 for item in forecasts]) / [plan.gpus for plan in subjects.plans]
    peak = np.array([case.pool.gpu.peak(case.workload.precision) for case in cases])
    bandwidth = np.array([case.pool.gpu.memory_bandwidth_bytes_per_s for case in cases])
    work = measured[seen] * flops[asked] / np.maximum(flops[seen], 1.0)
    steps = {
        "FLOP/s": work * peak[seen] / peak[asked],
        "bandwidth": work * bandwidth[seen] / bandwidth[asked],
    }
    others = {name: np.abs(calibration.relative_error(column, measured[asked])) for name, column in steps.items()}
    return replace(own, errors={**own.errors, **others})


@dataclass(frozen=True, slots=True)
class PairSummary:
    """Summary of the pairs of a kind over one table, or over all; errors and shares are means as in `GroupMean`."""

    kind: str
    table: str
    pairs: int
    groups: int
    sources: int
    errors: Mapping[str, float]
    """Absolute relative errors by `ESTIMATES`."""
    gain: float
    """Corrected error over the raw one."""
    interval: tuple[float, float]
    """90 % interval of the gain over resamplings of the sources."""
    width: float
    covered: tuple[float, float]
    width_interval: tuple[float, float]
    covered_interval: tuple[float, float]
    """90 % interval of the coverage of the corrected range."""


def summarize_pairs(subjects: TransferRuns, item: PairErrors, table: str = "") -> PairSummary:
    """Summarise the pairs of one table's rows, or of all rows if `table` is empty."""
    rows = np.array([not table or subjects.table[row] == table for row in item.target_rows])
    asked = item.target_rows[rows]
    mean = GroupMean.of(asked, subjects)
    errors = {name: mean(column[rows]) for name, column in item.errors.items()}
    rng = np.random.default_rng(0)
    resampled = []
    for _ in range(DRAWS):
        drawn = mean.drawn(rng)
        ratio = mean(item.errors["corrected"][rows], drawn) / mean(item.errors["raw"][rows], drawn)
        resampled.append((ratio, mean(item.width[rows], drawn), mean(item.covered[1][rows], drawn)))
    low, high = np.quantile(resampled, (0.05, 0.95), axis=0).tolist()
    gain, width, held = zip(low, high, strict=True)
    raw, corrected = (mean(column[rows]) for column in item.covered)
    return PairSummary(
        item.kind,
        table,
        int(rows.sum()),
        len(mean.groups),
        len(mean.sources),
        errors,
        errors["corrected"] / errors["raw"],
        gain,
        mean(item.width[rows]),
        (raw, corrected),
        width,
        held,
    )


@dataclass(frozen=True, slots=True)
class GroupMean:
    """Mean of a column of pairs: over the pairs of a row, then over the rows of a group, then over groups."""

    sources: tuple[str, ...]
    groups: tuple[str, ...]
    weight: Floats
    """Weight of each pair among those of its row, (P,)."""
    place: Ints
    """Cell of each pair's row, (P,); a cell is the rows of one source in one group."""
    cells: Ints
    """Group and source of each cell, (2, C)."""
    size: Floats
    """Number of rows in each cell, (C,)."""

    @classmethod
    def of(cls, asked: Ints, subjects: TransferRuns) -> GroupMean:
        rows, row, count = np.unique(asked, return_inverse=True, return_counts=True)
        groups, group = np.unique([subjects.group[one] for one in rows], return_inverse=True)
        sources, source = np.unique([subjects.source[one] for one in rows], return_inverse=True)
        cells, cell, size = np.unique(np.stack([group, source]), axis=1, return_inverse=True, return_counts=True)
        return cls(
            tuple(map(str, sources)), tuple(map(str, groups)), 1.0 / count[row], cell.ravel()[row], cells,
            size.astype(float),
        )  # fmt: skip

    def drawn(self, rng: np.random.Generator) -> Floats:
        """Draw as many sources as there are, with replacement, and return how often each was drawn, (sources,)."""
        count = len(self.sources)
        return np.bincount(rng.integers(count, size=count), minlength=count).astype(float)

    def __call__(self, column: Floats, drawn: Floats | None = None) -> float:
        """Return the mean of a column (P,); each source counts as often as it was drawn."""
        times = np.ones(len(self.sources)) if drawn is None else drawn
        total = np.bincount(self.place, self.weight * column, len(self.size))
        group, source = self.cells
        sums, sizes = (np.bincount(group, times[source] * one, len(self.groups)) for one in (total, self.size))
        all_ = np.bincount(group, self.size, len(self.groups))
        weight = sizes / all_
        return float((weight * sums / np.maximum(sizes, 1e-12)).sum() / weight.sum())


def report(subjects: TransferRuns) -> str:
    """Return as text a line for every kind of pairs over all tables, and one for each table if there are several."""
    tables = sorted(set(subjects.table))
    lines = [f"{len(subjects.table)} measured runs of {len(set(subjects.source))} sources", "", _TITLES]
    for kind, (seen, asked) in pair_runs(subjects).items():
        item = forecast_pairs(subjects, kind, seen, asked)
        lines.append(_cell(kind, summarize_pairs(subjects, item)))
        if len(tables) > 1:
            own = {subjects.table[row] for row in asked}
            lines += [_cell(f"  {name}", summarize_pairs(subjects, item, name)) for name in tables if name in own]
    return "\n".join(lines)


_COLUMNS: tuple[tuple[str, Callable[[PairSummary], str]], ...] = (
    ("pairs", lambda item: f"{item.pairs:7d}"),
    ("groups", lambda item: f"{item.groups:7d}"),
    ("sources", lambda item: f"{item.sources:8d}"),
    *((name, lambda item, name=name: f"{item.errors[name]:10.1%}") for name in ESTIMATES),
    ("gain", lambda item: f"{item.gain:6.2f}"),
    ("90 %", lambda item: f"{item.interval[0]:6.2f}-{item.interval[1]:.2f}"),
    ("in range", lambda item: f"{item.covered[0]:7.0%} {item.covered[1]:5.0%}"),
    ("90 %", lambda item: f"{item.covered_interval[0]:7.0%}-{item.covered_interval[1]:<4.0%}"),
    ("range", lambda item: f"{item.width:6.2f}x"),
    ("90 %", lambda item: f"{item.width_interval[0]:6.2f}-{item.width_interval[1]:.2f}"),
)
"""Columns of the report.

`gain` is the corrected error over the raw one, `in range` the share of the steps inside the raw and the corrected
range, `range` the width of the corrected range over the raw one. `90 %` is the interval of the column before it (for
the corrected range, if that column has two values) over resamplings of the sources.
"""
_WIDTHS = (7, 7, 8, 10, 10, 10, 10, 10, 6, 11, 13, 12, 7, 11)
_TITLES = f"{'a run on':<22}" + "".join(f"{name:>{width}}" for (name, _), width in zip(_COLUMNS, _WIDTHS, strict=True))


def _cell(name: str, item: PairSummary) -> str:
    return f"{name[:22]:<22}" + "".join(cell(item) for _, cell in _COLUMNS)
