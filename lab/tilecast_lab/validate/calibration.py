"""Test of calibration on published runs, with constants that were fitted without the source of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tilecast.learning import calibration
from tilecast.validate import Track, iterate_without_progress
from tilecast.validate import calibration as curves
from tilecast.validate.cells import Row
from tilecast_lab.validate import residuals, runs, scores
from tilecast_lab.validate.runs import PublishedForecast
from tilecast_lab.validate.table import read_published_row


def measured(rows: Sequence[Row], track: Track = iterate_without_progress) -> curves.MeasuredRuns:
    """Forecast the graded rows of runs tables and return them as runs of pools.

    The constants of each forecast are fitted without the row's source.
    """
    forecasts = runs.forecast(rows, track)
    scored = scores.score_forecasts(rows, forecasts)
    return curves.build_measured_runs(
        scored, [forecasts[place] for place in scored.index], scored.left_out_s, read_published_row
    )


def published_forecasts(runs: curves.MeasuredRuns) -> list[PublishedForecast]:
    """Return the forecasts of the runs that `measured` returned."""
    return [item for item in runs.forecasts if isinstance(item, PublishedForecast)]


def errors_from_unrelated_runs(
    runs: curves.MeasuredRuns, count: int = 10, draws: int = 8, known: Mapping[str, float] | None = None
) -> tuple[int, float, float]:
    """Measure what observations of other models of a source do to a model's forecasts.

    Every model of a source is forecast from `count` runs of the source's other models, drawn at random; this is
    repeated `draws` times.

    Returns:
        Number of sources with enough runs of other models, and the mean absolute relative error without and with the
        correction; every source counts the same.
    """
    of_source: dict[str, list[int]] = {}
    for index, row in enumerate(runs.rows):
        of_source.setdefault(residuals.source_of(row), []).append(index)
    raw, corrected = [], []
    for number, (_, members) in enumerate(sorted(of_source.items())):
        errors = []
        for model in sorted({runs.rows[index].get("model_name", "") for index in members}):
            own = [index for index in members if runs.rows[index].get("model_name", "") == model]
            others = [index for index in members if index not in own]
            for draw in range(draws if len(others) >= count else 0):
                seen = np.random.default_rng((number, draw)).permutation(others)[:count]
                table = calibration.fit_calibration([runs.runs[index] for index in seen], known)
                for run in (runs.runs[index] for index in own):
                    ratio = table.find_group_correction(calibration.name_group(run)).ratio * table.find_software_ratio(
                        run.framework, run.family
                    )
                    errors.append([abs(math.exp(run.deviation) * factor - 1) for factor in (1.0, ratio)])
        if errors:
            without, with_ = np.mean(errors, axis=0)
            raw.append(without)
            corrected.append(with_)
    return len(raw), float(np.mean(raw)), float(np.mean(corrected))
