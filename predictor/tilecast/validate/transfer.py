"""Test of transfer: how much one measured run of a model improves the forecasts of its runs elsewhere.

Each row of a source and model is forecast with a correction from one other row of the same source and model
(`tilecast.job_calibration`). There are three kinds of pairs: on another GPU; on another number of the same GPU; and on
the same GPUs with another plan. Every forecast uses constants fitted without the source.

Beside the raw and the corrected forecast there are three scalings of the measured step: by the ratio of the two raw
forecasts, which corrects by the whole error of the run; by peak FLOP/s; and by memory bandwidth, both per model FLOP of
a GPU. An error is the mean over the rows that a row is forecast from, then over the rows of a split group, then over
groups. The share of steps in a range is averaged likewise. Intervals are the middle 90 % over resamplings of the
sources.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilecast import calibration
from tilecast.job_calibration import (
    MAX_RATIO,
    JobRun,
    Mask,
    RunSetting,
    correction_factors,
    deviations,
    shared_levels,
    small_deviation_share,
)
from tilecast.spec import Floats, Ints, Plan, Plans, SpecError
from tilecast.validate import Track, residuals, runs, untracked
from tilecast.validate import calibration as curves
from tilecast.validate.cells import Row

KINDS = ("other GPU", "other count", "other plan")
MOST_SEEN = 12
"""Largest number of rows of each kind that a row is forecast from, chosen by a hash of their ids.

Tables that try every plan have hundreds.
"""
DRAWS = 1000
"""Resamplings of the sources for an interval."""
ESTIMATES = ("raw", "corrected", "scaled", "FLOP/s", "bandwidth")
"""Ways to forecast a row from another: two forecasts and three scalings."""


@dataclass(frozen=True, slots=True)
class Subjects:
    """R graded rows with forecasts; arrays are (R,)."""

    measured: curves.MeasuredRuns
    table: tuple[str, ...]
    source: tuple[str, ...]
    group: tuple[str, ...]
    """Table and split group of each row."""
    model: tuple[tuple[str, ...], ...]
    """Key that is equal for rows of which one may correct the forecast of another."""
    places: tuple[RunSetting, ...]
    plans: tuple[Plan, ...]
    flops: Floats
    """Model FLOPs of a step per GPU."""
    peak: Floats
    """Peak FLOP/s of the GPU at the row's precision."""
    bandwidth: Floats
    """Memory bandwidth of the GPU, in bytes per second."""

    @property
    def predicted_s(self) -> Floats:
        return np.array([run.predicted_s for run in self.measured.runs])

    @property
    def deviation(self) -> Floats:
        """log(predicted / observed)."""
        return np.array([run.deviation for run in self.measured.runs])

    @property
    def observed_s(self) -> Floats:
        return np.array([run.observed_s for run in self.measured.runs])

    @property
    def usual(self) -> Floats:
        """Share of the jobs of each row's model family that deviate little."""
        return np.array([small_deviation_share(place.family) for place in self.places])

    def kind_of(self, seen: int, asked: int) -> str | None:
        """Return which of `KINDS` a pair of rows is; None if both run the same plan on the same GPU."""
        if self.places[seen].gpu != self.places[asked].gpu:
            return "other GPU"
        one, other = self.plans[seen], self.plans[asked]
        if one.gpus != other.gpus:
            return "other count"
        return None if one == other else "other plan"


_ALIKE = ("model_name", "precision", "framework", "mode", "task")
_TABLE = "table"


def subjects(paths: Sequence[Path], track: Track = untracked) -> Subjects:
    """Read runs tables and forecast their graded rows.

    Args:
        paths: paths of the tables.
        track: shows progress over the groups of rows.

    Raises:
        SpecError: a file cannot be read, or no row is graded and can be forecast.
    """
    rows: list[Row] = [{**row, _TABLE: path.name} for path in paths for row in runs.read_table(path)]
    measured = curves.measured(rows, track)
    if not measured.runs:
        problem = "holds no row of grade A or B with a measured step time that can be forecast"
        raise SpecError("runs", problem, "see `tilecast validate runs` for the reasons")
    sources = tuple(residuals.source_of(row) for row in measured.rows)
    gpus = [case.pool.gpu for case in measured.cases]
    plans = tuple(item.plan for item in measured.forecasts if item.plan is not None)
    return Subjects(
        measured,
        tuple(row[_TABLE] for row in measured.rows),
        sources,
        tuple(f"{row[_TABLE]}: {row.get('split_group', '')}" for row in measured.rows),
        tuple((name, *(row.get(key, "") for key in _ALIKE)) for name, row in zip(sources, measured.rows, strict=True)),
        tuple(
            RunSetting.of(gpu.name, gpu.architecture, case.workload)
            for gpu, case in zip(gpus, measured.cases, strict=True)
        ),
        plans,
        np.array([item.model_flops or 0.0 for item in measured.forecasts]) / [plan.gpus for plan in plans],
        np.array([gpu.peak(case.workload.precision) for gpu, case in zip(gpus, measured.cases, strict=True)]),
        np.array([gpu.memory_bandwidth_bytes_per_s for gpu in gpus]),
    )


def pairs(subjects: Subjects) -> dict[str, tuple[Ints, Ints]]:
    """Return the pairs of each kind: indices of the rows seen and of the rows to forecast from them, (P,) each."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, model in enumerate(subjects.model):
        alike[model].append(index)
    ids = [row["id"] for row in subjects.measured.rows]
    out: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for members in alike.values():
        for asked in members:
            seen: dict[str | None, list[int]] = defaultdict(list)
            for one in members:
                if one != asked:
                    seen[subjects.kind_of(one, asked)].append(one)
            for kind in KINDS:
                order = sorted(seen[kind], key=lambda one: zlib.crc32(f"{ids[one]} {ids[asked]}".encode()))
                out[kind] += [(one, asked) for one in order[:MOST_SEEN]]
    return {kind: (np.array(out[kind]).T[0], np.array(out[kind]).T[1]) for kind in KINDS if out[kind]}


@dataclass(frozen=True, slots=True)
class PairErrors:
    """Errors of P pairs of a kind; arrays are (P,). Row `asked` is forecast from row `seen`."""

    kind: str
    seen: Ints
    asked: Ints
    errors: Mapping[str, Floats]
    """Absolute relative errors by `ESTIMATES`."""
    width: Floats
    """Factor on the half-width of the range that follows from the run."""
    covered: tuple[Floats, Floats]
    """1 if the measured step is inside the range, else 0; for the raw and the corrected range."""


def shared(subjects: Subjects, seen: Ints, asked: Ints) -> Mask:
    """Return which levels of deviations (`tilecast.job_calibration.LEVELS`) the rows of each pair share, (5, P)."""
    return np.concatenate(
        [
            shared_levels(
                JobRun(subjects.places[one], subjects.plans[one], 0.0),
                subjects.places[other],
                Plans.of(subjects.plans[other]),
            )
            for one, other in zip(seen, asked, strict=True)
        ],
        axis=1,
    )


def corrections(
    shared: Mask, deviation: Floats, share: Floats, known: Mapping[str, float] | None = None
) -> tuple[Floats, Floats]:
    """Return the correction's ratio and width for each pair, (P,) each, from one run each.

    Args:
        shared: the levels of deviations that both rows of a pair share, (5, P).
        deviation: log(predicted / observed) of the run, (P,).
        share: share of the jobs of the model family that deviate little, (P,).
        known: deviations to use in place of `tilecast.job_calibration.deviations()`.
    """
    itself = np.ones((*shared.shape, 1, 1), dtype=bool)
    once = np.ones((len(deviation), 1), dtype=np.int64)
    both = correction_factors(known or deviations(), share, itself, shared[..., None, None], deviation[:, None], once)
    return np.clip(both[0][:, 0], 1 / MAX_RATIO, MAX_RATIO), both[1][:, 0]


def held(
    subjects: Subjects, kind: str, seen: Ints, asked: Ints, known: Mapping[str, float] | None = None
) -> PairErrors:
    """Forecast each row of `asked` (P,) from the run of the row in `seen` (P,), and return the errors."""
    ratio, width = corrections(shared(subjects, seen, asked), subjects.deviation[seen], subjects.usual[asked], known)
    raw, measured = subjects.predicted_s, subjects.observed_s
    work = measured[seen] * subjects.flops[asked] / np.maximum(subjects.flops[seen], 1.0)
    steps = {
        "raw": raw[asked],
        "corrected": raw[asked] * ratio,
        "scaled": measured[seen] * raw[asked] / raw[seen],
        "FLOP/s": work * subjects.peak[seen] / subjects.peak[asked],
        "bandwidth": work * subjects.bandwidth[seen] / subjects.bandwidth[asked],
    }
    off = {name: calibration.relative_error(column, measured[asked]) for name, column in steps.items()}
    half = subjects.measured.half_width[asked]
    return PairErrors(
        kind,
        seen,
        asked,
        {name: np.abs(column) for name, column in off.items()},
        width,
        (
            (np.abs(np.log1p(off["raw"])) <= half).astype(float),
            (np.abs(np.log1p(off["corrected"])) <= half * width).astype(float),
        ),
    )


@dataclass(frozen=True, slots=True)
class Line:
    """Summary of the pairs of a kind over one table, or over all; errors and shares are means as in `Macro`."""

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


def line(subjects: Subjects, item: PairErrors, table: str = "") -> Line:
    """Summarise the pairs of one table's rows, or of all rows if `table` is empty."""
    rows = np.array([not table or subjects.table[row] == table for row in item.asked])
    asked = item.asked[rows]
    mean = Macro.of(asked, subjects)
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
    return Line(
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
class Macro:
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
    def of(cls, asked: Ints, subjects: Subjects) -> Macro:
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


def report(subjects: Subjects) -> str:
    """Return as text a line for every kind of pairs over all tables, and one for each table if there are several."""
    tables = sorted(set(subjects.table))
    lines = [f"{len(subjects.table)} measured runs of {len(set(subjects.source))} sources", "", _TITLES]
    for kind, (seen, asked) in pairs(subjects).items():
        item = held(subjects, kind, seen, asked)
        lines.append(_cell(kind, line(subjects, item)))
        if len(tables) > 1:
            own = {subjects.table[row] for row in asked}
            lines += [_cell(f"  {name}", line(subjects, item, name)) for name in tables if name in own]
    return "\n".join(lines)


_COLUMNS: tuple[tuple[str, Callable[[Line], str]], ...] = (
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


def _cell(name: str, item: Line) -> str:
    return f"{name[:22]:<22}" + "".join(cell(item) for _, cell in _COLUMNS)
