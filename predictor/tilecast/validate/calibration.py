"""Test `learning.calibration` on tables of measured runs.

Rows with equal GPU and equal `source` are treated as runs of one pool. `calibration_curve` measures how forecast errors
fall as runs of the pool are observed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilecast.learning import calibration
from tilecast.learning.calibration import Calibration, Run
from tilecast.spec import Floats, SpecError
from tilecast.validate import Track, iterate_without_progress, scores
from tilecast.validate import runs as tables
from tilecast.validate.cells import Row
from tilecast.validate.reading import RunCase, read_run
from tilecast.validate.runs import Forecast, Reader
from tilecast.validate.scores import EvaluatedRows


@dataclass(frozen=True, slots=True)
class MeasuredRuns:
    """R measured rows of runs tables (`has_trusted_step`) with their forecasts. Arrays are (R,)."""

    rows: tuple[Row, ...]
    runs: tuple[Run, ...]
    half_width: Floats
    """Half-width of the forecast's range without any observation, as a logarithm."""
    cases: tuple[RunCase, ...]
    forecasts: tuple[Forecast, ...]


def forecast_runs(rows: Sequence[Row], track: Track = iterate_without_progress) -> MeasuredRuns:
    """Return the rows of runs tables with a trusted measurement, with their forecasts, as runs of pools.

    Args:
        rows: rows of runs tables.
        track: wraps the loop over groups of rows, to show progress.
    """
    forecasts = tables.forecast_rows(rows, track)
    scored = scores.score_forecasts(rows, forecasts)
    return build_measured_runs(scored, [forecasts[place] for place in scored.index], scored.predicted_s, read_run)


def build_measured_runs(
    scored: EvaluatedRows, forecasts: Sequence[Forecast], predicted_s: Floats, reader: Reader
) -> MeasuredRuns:
    """Return rows with forecasts and measured steps as runs of pools.

    Args:
        scored: the rows with their measured steps.
        forecasts: the forecast of each row.
        predicted_s: forecast step of each row to use for the runs, in seconds, (n,).
        reader: function that reads the workload and pool of a row.
    """
    widths = [0.5 * np.log((item.upper_s or np.nan) / (item.lower_s or np.nan)) for item in forecasts]
    runs, cases = [], []
    for row, predicted, seconds in zip(scored.rows, predicted_s, scored.measured_s, strict=True):
        case = reader(row)
        cases.append(case)
        runs.append(
            Run(
                pool=f"{row.get('source', '')} {case.pool.gpu.name}",
                gpu=case.pool.gpu.name,
                precision=case.workload.precision,
                family=case.workload.model.family,
                scale=calibration.name_gpu_range(case.gpus),
                workload=calibration.digest_workload(case.workload),
                predicted_s=float(predicted),
                observed_s=float(seconds),
                framework=calibration.name_framework(case.workload),
            )
        )
    return MeasuredRuns(scored.rows, tuple(runs), np.array(widths), tuple(cases), tuple(forecasts))


@dataclass(frozen=True, slots=True)
class CalibrationPoint:
    """Forecast errors after a number of observed runs of the pool, averaged over pools and random draws."""

    observations: int
    pools: int
    rows: int
    error: float
    """Absolute relative error, averaged over each pool's runs and then over pools."""
    bias: float
    """Absolute value of a pool's median signed relative error, averaged over pools."""
    coverage: float
    """Share of the measured steps within the 90 % range."""
    width: float
    """Mean half-width of the range, as a relative error."""


def calibration_curve(runs: MeasuredRuns, counts: Sequence[int], least: int, draws: int = 20) -> list[CalibrationPoint]:
    """Return forecast errors for each number of observed runs.

    In every pool, runs are drawn at random as observed, and the remaining runs are forecast. A smaller count uses the
    first runs of a larger count, and the same runs are forecast for every count.

    Args:
        runs: runs of pools with their forecasts.
        counts: numbers of observed runs.
        least: fewest runs of a pool that is used. It must exceed every count.
        draws: number of random draws for each pool and count.

    Raises:
        ValueError: `least` does not exceed every count.
    """
    pools: dict[str, list[int]] = {}
    for index, run in enumerate(runs.runs):
        pools.setdefault(run.pool, []).append(index)
    large = {name: members for name, members in pools.items() if len(members) >= least}
    if least <= max(counts):
        raise ValueError("least must exceed every count, so that something is left to forecast")
    points = []
    for count in counts:
        figures, rows = [], 0
        for number, (_, members) in enumerate(sorted(large.items())):
            rows += len(members)
            for draw in range(draws):
                order = np.random.default_rng((number, draw)).permutation(members)
                seen, rest = order[:count], order[max(counts) :]
                figures.append(_calibrated_errors(runs, seen, rest))
        error, bias, coverage, width = np.mean(figures, axis=0)
        points.append(CalibrationPoint(count, len(large), rows, error, bias, coverage, width))
    return points


def _calibrated_errors(
    runs: MeasuredRuns, observed_rows: npt.NDArray[np.int64], forecast_rows: npt.NDArray[np.int64]
) -> tuple[float, ...]:
    """Return error, bias, coverage and width of some runs' forecasts, which are corrected by other runs.

    `CalibrationPoint` describes the four values.

    Args:
        runs: all runs.
        observed_rows: indices of the runs that the corrections are fitted to.
        forecast_rows: indices of the runs that are forecast.
    """
    table = calibration.fit_calibration([runs.runs[index] for index in observed_rows])
    left_out = [runs.runs[index] for index in forecast_rows]
    one = [table.find_group_correction(calibration.name_group(run)) for run in left_out]
    software = [table.find_software_ratio(run.framework, run.family) for run in left_out]
    ratio = np.array([item.ratio for item in one]) * software
    half = runs.half_width[forecast_rows] * np.array([item.width for item in one])
    observed = np.array([run.observed_s for run in left_out])
    predicted = np.array([run.predicted_s for run in left_out]) * ratio
    error = calibration.relative_error(predicted, observed)
    covered = np.abs(np.log(predicted / observed)) <= half
    return (
        float(np.mean(np.abs(error))),
        float(np.abs(np.median(error))),
        float(np.mean(covered)),
        float(np.mean(np.expm1(half))),
    )


COUNTS = (0, 3, 10, 30)


def calibration_report(runs: MeasuredRuns) -> str:
    """Return a text report: errors by number of observed runs, and the corrections fitted to all runs.

    Only pools with enough runs count for the errors.

    Raises:
        SpecError: there are no runs.
    """
    if not runs.runs:
        problem = "holds no row of grade A or B with a measured step time that can be forecast"
        raise SpecError("runs", problem, "see `tilecast validate runs` for the reasons")
    pools = [run.pool for run in runs.runs]
    sizes = Counter(pools)
    lines = [f"{len(pools)} measured runs in {len(sizes)} pools, a GPU of a source each", "", _HEADER]
    for most in range(1, len(COUNTS)):
        counts = COUNTS[: most + 1]
        least = counts[-1] + 5
        if max(sizes.values()) < least:
            break
        lines += [_format_point(point) for point in calibration_curve(runs, counts, least)] + [""]
    return "\n".join([*lines, *correction_lines(calibration.fit_calibration(runs.runs))])


_HEADER = f"{'observations of the pool':<26}{'pools':>6}{'rows':>6}{'error':>8}{'bias':>8}{'in range':>10}{'range':>8}"


def _format_point(point: CalibrationPoint) -> str:
    return (
        f"{point.observations:<26}{point.pools:>6}{point.rows:>6}{point.error:>8.1%}{point.bias:>8.1%}"
        f"{point.coverage:>10.1%}{point.width:>8.0%}"
    )


def correction_lines(table: Calibration) -> list[str]:
    """Return one line of text per correction of a calibration. Corrections of single workloads are left out."""
    shown = [item for item in table.corrections if len(item.group) < len(calibration.LEVELS)]
    return [f"{'correction of':<44}{'ratio':>8}{'range':>8}{'runs':>6}"] + [
        f"{' '.join(item.group) or 'every run':<44}{item.ratio:>8.3f}{item.width:>7.2f}x{item.own:>6}" for item in shown
    ]
