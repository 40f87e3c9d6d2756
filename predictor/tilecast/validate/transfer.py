"""Test transfer: how much one measured run of a model improves the forecasts of its other runs.

A pair has a known row and a target row with equal source and model. The known row corrects the forecast of the target
row (`tilecast.learning.job_calibration`). There are four kinds of pairs. The target row has another GPU, another number
of equal GPUs, another plan on as many GPUs, or only another global batch.

Three forecasts are compared: raw, corrected, and scaled by the whole error of the known row. Errors are averaged over
the known rows of a target row, then over the target rows of a split group, then over groups. The share of steps within
the range is averaged in the same way.
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
    estimate_correction_factors,
    find_shared_levels,
    shipped_deviations,
)
from tilecast.spec import Floats, Ints, Plan, Plans, SpecError
from tilecast.validate import Track, iterate_without_progress
from tilecast.validate import calibration as curves
from tilecast.validate.cells import Row
from tilecast.validate.runs import read_table

KINDS = ("other GPU", "other count", "other plan", "other batch")
MOST_SEEN = 12
"""Most known rows of each kind for a target row. They are chosen by a hash of their ids.

Some tables measure every plan and would give hundreds.
"""


@dataclass(frozen=True, slots=True)
class TransferRuns:
    """R measured rows with forecasts and the properties by which `pair_runs` pairs them. Arrays are (R,)."""

    measured: curves.MeasuredRuns
    table: tuple[str, ...]
    source: tuple[str, ...]
    group: tuple[str, ...]
    """Table and split group of each row."""
    model: tuple[tuple[str, ...], ...]
    """Key that is equal for rows that may correct each other's forecasts."""
    places: tuple[RunSetting, ...]
    plans: tuple[Plan, ...]

    @property
    def predicted_s(self) -> Floats:
        return np.array([run.predicted_s for run in self.measured.runs])

    @property
    def deviation(self) -> Floats:
        """Natural logarithm of predicted over observed step time, (R,)."""
        return np.array([run.deviation for run in self.measured.runs])

    @property
    def observed_s(self) -> Floats:
        return np.array([run.observed_s for run in self.measured.runs])

    def find_pair_kind(self, known_row: int, target_row: int) -> str | None:
        """Return the kind of a pair of rows, one of `KINDS`. If plans, GPUs and batch are equal, return None."""
        here, there = self.places[known_row], self.places[target_row]
        if here.gpu != there.gpu:
            return "other GPU"
        one, other = self.plans[known_row], self.plans[target_row]
        if one.gpus != other.gpus:
            return "other count"
        has_same_split = all(getattr(one, name) == getattr(other, name) for name in SPLIT_COLUMNS)
        if has_same_split and here.global_batch != there.global_batch:
            return "other batch"
        return None if one == other else "other plan"


_ALIKE = ("model_name", "precision", "framework", "mode", "task")
_TABLE = "table"


def read_named_rows(paths: Sequence[Path]) -> list[Row]:
    """Return the rows of runs tables, each with the file name of its table added.

    Raises:
        SpecError: a file cannot be read.
    """
    return [{**row, _TABLE: path.name} for path in paths for row in read_table(path)]


def read_transfer_runs(paths: Sequence[Path], track: Track = iterate_without_progress) -> TransferRuns:
    """Return the rows of runs tables that have a trusted measurement, with their forecasts.

    Args:
        paths: paths of the tables.
        track: shows progress over the groups of rows.

    Raises:
        SpecError: a file cannot be read, or no row has a trusted measurement and can be forecast.
    """
    measured = curves.forecast_runs(read_named_rows(paths), track)
    return build_transfer_runs(measured, [row.get("source", "") for row in measured.rows])


def build_transfer_runs(measured: curves.MeasuredRuns, sources: Sequence[str]) -> TransferRuns:
    """Return measured runs with the properties by which `pair_runs` pairs them.

    Args:
        measured: the runs. Their rows have the name of their table, as from `read_named_rows`.
        sources: name of the publication of each run, (R,).

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
    """Return the pairs of each kind, by name of the kind, as two arrays of row indices, (P,) each.

    The first array has the known rows, and the second array has the target rows.
    """
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, model in enumerate(subjects.model):
        alike[model].append(index)
    ids = [row["id"] for row in subjects.measured.rows]
    out: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for members in alike.values():
        for target in members:
            known_rows: dict[str | None, list[int]] = defaultdict(list)
            for one in members:
                if one != target:
                    known_rows[subjects.find_pair_kind(one, target)].append(one)
            for kind in KINDS:
                order = sorted(known_rows[kind], key=lambda one: zlib.crc32(f"{ids[one]} {ids[target]}".encode()))
                out[kind] += [(one, target) for one in order[:MOST_SEEN]]
    return {kind: (np.array(out[kind]).T[0], np.array(out[kind]).T[1]) for kind in KINDS if out[kind]}


@dataclass(frozen=True, slots=True)
class PairErrors:
    """Forecast errors of P pairs of one kind. Arrays are (P,)."""

    kind: str
    known_rows: Ints
    target_rows: Ints
    errors: Mapping[str, Floats]
    """Absolute relative errors by kind of forecast: raw, corrected or scaled."""
    width: Floats
    """Factor on the half-width of the range, as corrected by the known run."""
    covered: tuple[Floats, Floats]
    """1 if the measured step is within the range, else 0, for the raw and the corrected range."""


def shared_pair_levels(subjects: TransferRuns, known_rows: Ints, target_rows: Ints) -> Mask:
    """Return a mask (6, P): whether the two rows of each pair agree at each of the `LEVELS` of `job_calibration`."""
    return np.concatenate(
        [
            find_shared_levels(
                JobRun(subjects.places[one], subjects.plans[one], 0.0),
                subjects.places[other],
                Plans.from_plans(subjects.plans[other]),
            )
            for one, other in zip(known_rows, target_rows, strict=True)
        ],
        axis=1,
    )


def pair_corrections(
    shared: Mask, deviation: Floats, sigmas: Mapping[str, float] | None = None
) -> tuple[Floats, Floats]:
    """Return the factors that one known run gives on forecasts and on the widths of their ranges, (P,) each.

    Args:
        shared: at which of the 6 `LEVELS` the rows of each pair agree, (6, P).
        deviation: log(predicted / observed) of the known run of each pair, (P,).
        sigmas: standard deviations by level. None for `job_calibration.shipped_deviations()`.
    """
    itself = np.ones((*shared.shape, 1, 1), dtype=bool)
    once = np.ones((len(deviation), 1), dtype=np.int64)
    both = estimate_correction_factors(
        sigmas or shipped_deviations(), itself, shared[..., None, None], deviation[:, None], once
    )
    return np.clip(both[0][:, 0], 1 / MAX_RATIO, MAX_RATIO), both[1][:, 0]


def pair_errors(
    subjects: TransferRuns, kind: str, known_rows: Ints, target_rows: Ints, sigmas: Mapping[str, float] | None = None
) -> PairErrors:
    """Return the errors of three forecasts of each target row: raw, corrected by the known row, and scaled by it.

    Args:
        subjects: the rows that `known_rows` and `target_rows` index.
        kind: kind of the pairs, one of `KINDS`.
        known_rows: index of the known row of each pair, (P,).
        target_rows: index of the target row of each pair, (P,).
        sigmas: standard deviations by level. None for `job_calibration.shipped_deviations()`.
    """
    ratio, width = pair_corrections(
        shared_pair_levels(subjects, known_rows, target_rows), subjects.deviation[known_rows], sigmas
    )
    raw, measured = subjects.predicted_s, subjects.observed_s
    steps = {
        "raw": raw[target_rows],
        "corrected": raw[target_rows] * ratio,
        "scaled": measured[known_rows] * raw[target_rows] / raw[known_rows],
    }
    off = {name: calibration.relative_error(column, measured[target_rows]) for name, column in steps.items()}
    half = subjects.measured.half_width[target_rows]
    return PairErrors(
        kind,
        known_rows,
        target_rows,
        {name: np.abs(column) for name, column in off.items()},
        width,
        (
            (np.abs(np.log1p(off["raw"])) <= half).astype(float),
            (np.abs(np.log1p(off["corrected"])) <= half * width).astype(float),
        ),
    )


def transfer_report(subjects: TransferRuns) -> str:
    """Return a text report with one line for each kind of pairs: numbers, errors and coverage."""
    lines = [f"{len(subjects.table)} measured runs of {len(set(subjects.source))} sources", "", _TITLES]
    for kind, (known_rows, target_rows) in pair_runs(subjects).items():
        item = pair_errors(subjects, kind, known_rows, target_rows)
        errors = [_mean_over_groups(column, target_rows, subjects) for column in item.errors.values()]
        raw, corrected = (_mean_over_groups(column, target_rows, subjects) for column in item.covered)
        width = _mean_over_groups(item.width, target_rows, subjects)
        lines.append(
            f"{kind:<22}{len(target_rows):7d}"
            + "".join(f"{error:10.1%}" for error in errors)
            + f"{errors[1] / errors[0]:6.2f}{raw:7.0%} {corrected:5.0%}{width:6.2f}x"
        )
    return "\n".join(lines)


_TITLES = (
    f"{'a run on':<22}{'pairs':>7}{'raw':>10}{'corrected':>10}{'scaled':>10}{'gain':>6}{'in range':>13}{'range':>7}"
)
"""Columns of the report.

`gain` is the corrected error over the raw one, `in range` the share of the steps within the raw and the corrected
range, `range` the width of the corrected range over the raw one.
"""


def _mean_over_groups(column: Floats, target_rows: Ints, subjects: TransferRuns) -> float:
    """Return the mean of a column (P,) of pairs: over pairs of a target row, then over rows, then over groups."""
    rows, row = np.unique(target_rows, return_inverse=True)
    group = np.unique([subjects.group[one] for one in rows], return_inverse=True)[1]
    of_row = np.bincount(row, column) / np.bincount(row)
    return float(np.mean(np.bincount(group, of_row) / np.bincount(group)))
