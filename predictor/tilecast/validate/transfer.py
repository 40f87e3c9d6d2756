"""Test of transfer: how much one measured run of a model improves the forecasts of its runs elsewhere.

Each row of a source and model is forecast with a correction from one other row of the same source and model
(`tilecast.learning.job_calibration`). There are four kinds of pairs: on another GPU; on another number of the same
GPU; on the same GPUs with another plan; and there with another global batch only.

Beside the raw and the corrected forecast there is the measured step scaled by the ratio of the two raw forecasts, which
corrects by the whole error of the run. An error is the mean over the rows that a row is forecast from, then over the
rows of a split group, then over groups. The share of steps in a range is averaged likewise.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilecast.learning import calibration
from tilecast.learning.job_calibration import (
    MAX_RATIO,
    SPLIT_COLUMNS,
    JobRun,
    Mask,
    RunSetting,
    correction_factors,
    shared_levels,
    shipped_deviations,
)
from tilecast.spec import Floats, Ints, Plan, Plans, SpecError
from tilecast.validate import Track, without_progress
from tilecast.validate import calibration as curves
from tilecast.validate.cells import Row
from tilecast.validate.runs import read_table

KINDS = ("other GPU", "other count", "other plan", "other batch")
MOST_SEEN = 12
"""Largest number of rows of each kind that a row is forecast from, chosen by a hash of their ids.

Tables that try every plan have hundreds.
"""


@dataclass(frozen=True, slots=True)
class TransferRuns:
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

    def kind_of(self, seen: int, asked: int) -> str | None:
        """Return the kind (of `KINDS`) of a pair of rows; None for equal plans on equal GPUs."""
        here, there = self.places[seen], self.places[asked]
        if here.gpu != there.gpu:
            return "other GPU"
        one, other = self.plans[seen], self.plans[asked]
        if one.gpus != other.gpus:
            return "other count"
        has_same_split = all(getattr(one, name) == getattr(other, name) for name in SPLIT_COLUMNS)
        if has_same_split and here.global_batch != there.global_batch:
            return "other batch"
        return None if one == other else "other plan"


_ALIKE = ("model_name", "precision", "framework", "mode", "task")
_TABLE = "table"


def table_rows(paths: Sequence[Path]) -> list[Row]:
    """Return the rows of runs tables, each with its table's name.

    Raises:
        SpecError: a file cannot be read.
    """
    return [{**row, _TABLE: path.name} for path in paths for row in read_table(path)]


def read_transfer_runs(paths: Sequence[Path], track: Track = without_progress) -> TransferRuns:
    """Read runs tables and forecast their graded rows.

    Args:
        paths: paths of the tables.
        track: shows progress over the groups of rows.

    Raises:
        SpecError: a file cannot be read, or no row is graded and can be forecast.
    """
    measured = curves.forecast_runs(table_rows(paths), track)
    return to_transfer_runs(measured, [row.get("source", "") for row in measured.rows])


def to_transfer_runs(measured: curves.MeasuredRuns, sources: Sequence[str]) -> TransferRuns:
    """Return measured runs with what `pair_runs` compares of them.

    Args:
        measured: runs whose rows have the name of their table, as `table_rows` gives it.
        sources: publication of each run.

    Raises:
        SpecError: there are no runs.
    """
    if not measured.runs:
        problem = "holds no row of grade A or B with a measured step time that can be forecast"
        raise SpecError("runs", problem, "see `tilecast validate runs` for the reasons")
    return TransferRuns(
        measured,
        tuple(row[_TABLE] for row in measured.rows),
        tuple(sources),
        tuple(f"{row[_TABLE]}: {row.get('split_group', '')}" for row in measured.rows),
        tuple((name, *(row.get(key, "") for key in _ALIKE)) for name, row in zip(sources, measured.rows, strict=True)),
        tuple(
            RunSetting.from_workload(case.pool.gpu.name, case.pool.gpu.architecture, case.workload)
            for case in measured.cases
        ),
        tuple(item.plan for item in measured.forecasts if item.plan is not None),
    )


def pair_runs(subjects: TransferRuns) -> dict[str, tuple[Ints, Ints]]:
    """Return pairs of runs by kind: row indices of the known run and of the run forecast from it, (P,) each."""
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
    """Absolute relative errors by the way in which a row is forecast from the other."""
    width: Floats
    """Factor on the half-width of the range that follows from the run."""
    covered: tuple[Floats, Floats]
    """1 if the measured step is inside the range, else 0; for the raw and the corrected range."""


def shared_pair_levels(subjects: TransferRuns, seen: Ints, asked: Ints) -> Mask:
    """Return which levels of deviations (`LEVELS` of `job_calibration`) the rows of each pair share, (6, P)."""
    return np.concatenate(
        [
            shared_levels(
                JobRun(subjects.places[one], subjects.plans[one], 0.0),
                subjects.places[other],
                Plans.from_plans(subjects.plans[other]),
            )
            for one, other in zip(seen, asked, strict=True)
        ],
        axis=1,
    )


def pair_corrections(
    shared: Mask, deviation: Floats, known: Mapping[str, float] | None = None
) -> tuple[Floats, Floats]:
    """Return the correction's ratio and width for each pair, (P,) each, from one run each.

    Args:
        shared: the levels of deviations that both rows of a pair share, (6, P).
        deviation: log(predicted / observed) of the run, (P,).
        known: deviations to use in place of `tilecast.learning.job_calibration.shipped_deviations()`.
    """
    itself = np.ones((*shared.shape, 1, 1), dtype=bool)
    once = np.ones((len(deviation), 1), dtype=np.int64)
    both = correction_factors(known or shipped_deviations(), itself, shared[..., None, None], deviation[:, None], once)
    return np.clip(both[0][:, 0], 1 / MAX_RATIO, MAX_RATIO), both[1][:, 0]


def pair_errors(
    subjects: TransferRuns, kind: str, seen: Ints, asked: Ints, known: Mapping[str, float] | None = None
) -> PairErrors:
    """Forecast each row of `asked` (P,) from the run of the row in `seen` (P,), and return the errors."""
    ratio, width = pair_corrections(shared_pair_levels(subjects, seen, asked), subjects.deviation[seen], known)
    raw, measured = subjects.predicted_s, subjects.observed_s
    steps = {"raw": raw[asked], "corrected": raw[asked] * ratio, "scaled": measured[seen] * raw[asked] / raw[seen]}
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


def transfer_report(subjects: TransferRuns) -> str:
    """Return a report as text: a line for each kind of pairs, with means as in the module's description."""
    lines = [f"{len(subjects.table)} measured runs of {len(set(subjects.source))} sources", "", _TITLES]
    for kind, (seen, asked) in pair_runs(subjects).items():
        item = pair_errors(subjects, kind, seen, asked)
        errors = [_mean_over_groups(column, asked, subjects) for column in item.errors.values()]
        raw, corrected = (_mean_over_groups(column, asked, subjects) for column in item.covered)
        width = _mean_over_groups(item.width, asked, subjects)
        lines.append(
            f"{kind:<22}{len(asked):7d}"
            + "".join(f"{error:10.1%}" for error in errors)
            + f"{errors[1] / errors[0]:6.2f}{raw:7.0%} {corrected:5.0%}{width:6.2f}x"
        )
    return "\n".join(lines)


_TITLES = (
    f"{'a run on':<22}{'pairs':>7}{'raw':>10}{'corrected':>10}{'scaled':>10}{'gain':>6}{'in range':>13}{'range':>7}"
)
"""Columns of the report.

`gain` is the corrected error over the raw one, `in range` the share of the steps inside the raw and the corrected
range, `range` the width of the corrected range over the raw one.
"""


def _mean_over_groups(column: Floats, asked: Ints, subjects: TransferRuns) -> float:
    """Return the mean over groups of the means over their rows of the means over the pairs of each, (P,) -> scalar."""
    rows, row = np.unique(asked, return_inverse=True)
    group = np.unique([subjects.group[one] for one in rows], return_inverse=True)[1]
    of_row = np.bincount(row, column) / np.bincount(row)
    return float(np.mean(np.bincount(group, of_row) / np.bincount(group)))
