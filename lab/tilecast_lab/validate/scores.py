"""Errors of forecasts of published runs, beside those of baselines and of forecasts without the row's source.

`summary` is the whole text; `tilecast.validate.scores` has what it shares with tables of one's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from tilecast.spec import Floats
from tilecast.validate import scores
from tilecast.validate.cells import Row
from tilecast.validate.scores import (
    SubsetErrors,
    absolute_errors,
    count_lines,
    list_row_subsets,
    mean_over_groups,
    ranking_line,
    select_rows,
    subset_errors,
)
from tilecast_lab.validate import residuals
from tilecast_lab.validate.runs import PublishedForecast


@dataclass(frozen=True, slots=True)
class EvaluatedRows(scores.EvaluatedRows):
    """Graded rows as of one's own tables, with other forecasts of each; times are in seconds."""

    left_out_s: Floats
    roofline_s: Floats
    one_mfu_s: Floats


def score_forecasts(rows: Sequence[Row], forecasts: Sequence[PublishedForecast]) -> EvaluatedRows:
    """Compare forecasts with measured step times of trusted rows (`tilecast.validate.scores.has_trusted_step`)."""
    own = scores.score_forecasts(rows, forecasts)
    items = [forecasts[place] for place in own.index]
    gpus = np.array([item.plan.gpus if item.plan else 1 for item in items], dtype=float)
    flops = np.array([item.model_flops or 0.0 for item in items])
    return EvaluatedRows(
        **{item.name: getattr(own, item.name) for item in fields(scores.EvaluatedRows)},
        left_out_s=np.array([item.left_out_s for item in items], dtype=float),
        roofline_s=np.array([item.roofline_s for item in items], dtype=float),
        one_mfu_s=_one_mfu(own.rows, flops, gpus, own.measured_s),
    )


def _one_mfu(rows: Sequence[Row], flops: Floats, gpus: Floats, measured: Floats) -> Floats:
    """Return the steps of a baseline with one utilisation per GPU and precision: the median over these very rows."""
    rate = flops / gpus / measured
    keys = np.array([f"{row['gpu']}|{row['precision']}" for row in rows])
    fitted = np.zeros(len(rows))
    for key in set(keys):
        fitted[keys == key] = np.median(rate[keys == key])
    return flops / gpus / np.maximum(fitted, 1.0)


@dataclass(frozen=True, slots=True)
class BaselineErrors:
    """Macro errors of the baselines on the rows of a stratum."""

    roofline: float
    one_mfu: float


def strata(scored: EvaluatedRows) -> list[tuple[SubsetErrors, BaselineErrors]]:
    """Return the errors of all rows, then of every GPU, precision, family and scale."""
    items = []
    for name, mask in list_row_subsets(scored):
        rows, measured = select_rows(scored.rows, mask), scored.measured_s[mask]
        others = [
            mean_over_groups(absolute_errors(column[mask], measured), rows)
            for column in (scored.roofline_s, scored.one_mfu_s)
        ]
        items.append((subset_errors(name, scored, mask), BaselineErrors(*others)))
    return items


def describe_left_out(scored: EvaluatedRows) -> list[str]:
    """Return lines of text: the error on sources left out, the coverage of ranges, and the share said not to fit."""
    aside = mean_over_groups(absolute_errors(scored.left_out_s, scored.measured_s), scored.rows)
    return [
        f"macro error with each source left out of the fit of the step's constants: {aside:.1%}",
        *scores.coverage_lines(scored),
    ]


def forecast_ratio(scored: EvaluatedRows) -> Floats:
    """Return forecast over measured, (rows,)."""
    return residuals.ratio_of(scored.predicted_s, scored.measured_s)


def summary(rows: Sequence[Row], forecasts: Sequence[PublishedForecast]) -> str:
    """Return as text the errors by GPU, precision, family and scale, baselines, ranking, coverage and refusals."""
    scored = score_forecasts(rows, forecasts)
    lines = count_lines(rows, forecasts, scored)
    if not len(scored.measured_s):
        return "\n".join(lines)
    lines += ["", f"{scores.TITLES} {'roofline':>9} {'one-MFU':>8}"]
    lines += [f"{item} {others.roofline:9.1%} {others.one_mfu:8.1%}" for item, others in strata(scored)]
    if text := ranking_line(scored):
        lines += ["", text]
    return "\n".join([*lines, "", residuals.table(scored.rows, forecast_ratio(scored)), "", *describe_left_out(scored)])
