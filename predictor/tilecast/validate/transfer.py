"""What one measured run of a model is worth for its runs elsewhere: forecasts of rows of a source and model, each
corrected by one other row of them (`tilecast.transfer`).

Three kinds of pairs are told apart: rows on another GPU; on the same GPU in another number; and as many of the same GPU
with another plan. Every forecast is made with constants fitted without the source. Beside the raw and the corrected one
stand three scalings of the measured step: by the ratio of the two forecasts, which is the raw forecast times all that
the run was off; by peak FLOP/s; and by memory bandwidth, both for the model FLOPs of a GPU. An error is the mean over
what a row is forecast from, then over the rows of a split group, then over groups; so is a share of steps in a range.
Intervals hold 90 % of what resampling the sources gives.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilecast import calibration
from tilecast.spec import Floats, Ints, Plan, Plans, SpecError
from tilecast.transfer import MOST, JobRun, Mask, Place, alike, corrected, deviations, usual
from tilecast.validate import Track, residuals, runs, untracked
from tilecast.validate import calibration as curves
from tilecast.validate.cells import Row

KINDS = ("other GPU", "other count", "other plan")
MOST_SEEN = 12
"""Rows of each kind that a row is forecast from, chosen by a rule on their ids: tables that try every plan have
hundreds."""
DRAWS = 1000
ESTIMATES = ("raw", "corrected", "scaled", "FLOP/s", "bandwidth")


@dataclass(frozen=True, slots=True)
class Subjects:
    """Graded rows that were forecast. Arrays are (R,)."""

    measured: curves.MeasuredRuns
    table: tuple[str, ...]
    source: tuple[str, ...]
    group: tuple[str, ...]
    """Split group, and its table."""
    model: tuple[tuple[str, ...], ...]
    """What rows have alike that a run of one may correct the forecast of another."""
    places: tuple[Place, ...]
    plans: tuple[Plan, ...]
    flops: Floats
    """Model FLOPs of a step on each GPU."""
    peak: Floats
    """FLOP/s."""
    bandwidth: Floats
    """Bytes per second."""

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
        """The share of jobs like each that deviate little."""
        return np.array([usual(place.family) for place in self.places])

    def kind_of(self, seen: int, asked: int) -> str | None:
        """Which of `KINDS` a pair of rows is; None of two runs of one plan on one GPU."""
        if self.places[seen].gpu != self.places[asked].gpu:
            return "other GPU"
        one, other = self.plans[seen], self.plans[asked]
        if one.gpus != other.gpus:
            return "other count"
        return None if one == other else "other plan"


_ALIKE = ("model_name", "precision", "framework", "mode", "task")
_TABLE = "table"


def subjects(paths: Sequence[Path], track: Track = untracked) -> Subjects:
    """The graded rows of runs tables with their forecasts.

    Args:
        paths: of the tables.
        track: sees the groups of rows.

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
            Place.of(gpu.name, gpu.architecture, case.workload) for gpu, case in zip(gpus, measured.cases, strict=True)
        ),
        plans,
        np.array([item.model_flops or 0.0 for item in measured.forecasts]) / [plan.gpus for plan in plans],
        np.array([gpu.peak(case.workload.precision) for gpu, case in zip(gpus, measured.cases, strict=True)]),
        np.array([gpu.memory_bandwidth_bytes_per_s for gpu in gpus]),
    )


def pairs(subjects: Subjects) -> dict[str, tuple[Ints, Ints]]:
    """Of each kind that there is, the indices of rows that were seen and of those that are asked for, (P,) each."""
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
    """Pairs of a kind with what each way of forecasting makes of them, (P,) each."""

    kind: str
    seen: Ints
    asked: Ints
    errors: Mapping[str, Floats]
    """Absolute relative errors, by one of `ESTIMATES`."""
    width: Floats
    """What the half-width of the range is multiplied by, because of the run."""
    covered: tuple[Floats, Floats]
    """Whether the raw and the corrected range hold the measured step."""


def shared(subjects: Subjects, seen: Ints, asked: Ints) -> Mask:
    """Which of the levels of deviations the rows of each pair have in common, (5, P)."""
    return np.concatenate(
        [
            alike(
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
    """Ratio and width of each pair, (P,) each, from one run whose deviation is (P,), of jobs of which a `share`, (P,),
    deviates little."""
    itself = np.ones((*shared.shape, 1, 1), dtype=bool)
    once = np.ones((len(deviation), 1), dtype=np.int64)
    both = corrected(known or deviations(), share, itself, shared[..., None, None], deviation[:, None], once)
    return np.clip(both[0][:, 0], 1 / MOST, MOST), both[1][:, 0]


def held(
    subjects: Subjects, kind: str, seen: Ints, asked: Ints, known: Mapping[str, float] | None = None
) -> PairErrors:
    """Forecast the rows that are asked for, each by one run that was seen."""
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
    """What the pairs of a kind say over the groups of one table, or of all. Errors and shares are macro means."""

    kind: str
    table: str
    pairs: int
    groups: int
    sources: int
    errors: Mapping[str, float]
    """By one of `ESTIMATES`."""
    gain: float
    """The corrected error over the raw one."""
    interval: tuple[float, float]
    """Of the gain, when sources are drawn anew."""
    width: float
    covered: tuple[float, float]
    width_interval: tuple[float, float]
    covered_interval: tuple[float, float]
    """Of what the corrected range covers."""


def line(subjects: Subjects, item: PairErrors, table: str = "") -> Line:
    """The pairs of a table's rows, or of all, in one line."""
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
    """Means of pairs over what a row is forecast from, over the rows of a group, and over groups."""

    sources: tuple[str, ...]
    groups: tuple[str, ...]
    weight: Floats
    """Of each pair among those of its row, (P,)."""
    place: Ints
    """Cell of each pair's row: a group's rows of one source, (P,)."""
    cells: Ints
    """Group and source of each cell, (2, C)."""
    size: Floats
    """Rows of each cell, (C,)."""

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
        """How often each source is drawn when as many are drawn as there are, (sources,)."""
        count = len(self.sources)
        return np.bincount(rng.integers(count, size=count), minlength=count).astype(float)

    def __call__(self, column: Floats, drawn: Floats | None = None) -> float:
        """The mean of a column (P,), sources counting as often as they were drawn."""
        times = np.ones(len(self.sources)) if drawn is None else drawn
        total = np.bincount(self.place, self.weight * column, len(self.size))
        group, source = self.cells
        sums, sizes = (np.bincount(group, times[source] * one, len(self.groups)) for one in (total, self.size))
        all_ = np.bincount(group, self.size, len(self.groups))
        weight = sizes / all_
        return float((weight * sums / np.maximum(sizes, 1e-12)).sum() / weight.sum())


def report(subjects: Subjects) -> str:
    """Every kind of pairs over all tables, and over each."""
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
"""The table's columns. `gain` is the corrected error over the raw one, `in range` the share of the steps that the raw
and the corrected range hold, `range` how wide the latter is against the former. `90 %` is the interval of what stands
before it (of the corrected range, where there are two) when sources are drawn anew."""
_WIDTHS = (7, 7, 8, 10, 10, 10, 10, 10, 6, 11, 13, 12, 7, 11)
_TITLES = f"{'a run on':<22}" + "".join(f"{name:>{width}}" for (name, _), width in zip(_COLUMNS, _WIDTHS, strict=True))


def _cell(name: str, item: Line) -> str:
    return f"{name[:22]:<22}" + "".join(cell(item) for _, cell in _COLUMNS)
