"""Compute errors of forecasts against measured steps, by GPU, precision, family and scale.

`compare_report` formats all results: errors, ranking of plans, coverage of ranges, and rows that cannot be forecast.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tilecast import uncertainty
from tilecast.learning import calibration
from tilecast.spec import Floats
from tilecast.validate.cells import Row, read_integer
from tilecast.validate.runs import Forecast

Mask: TypeAlias = npt.NDArray[np.bool_]


def has_trusted_step(row: Row) -> bool:
    """Return whether a row has a measured step time and a `trust` of A or B. Without the column, `trust` is A."""
    return row.get("trust", "A") in ("A", "B") and read_measured_seconds(row) is not None


@dataclass(frozen=True, slots=True)
class EvaluatedRows:
    """Rows with a trusted measured step (`has_trusted_step`) and a forecast. Arrays are over these rows."""

    rows: tuple[Row, ...]
    index: tuple[int, ...]
    """Index of each row among all rows of the tables."""
    measured_s: Floats
    predicted_s: Floats
    cautious_s: Floats
    """Seconds of the step on a slow host, by which ties between forecasts are decided."""
    covered: Mask
    fits: Mask
    graded: int
    """Number of rows with a `trust` of A or B and a measured step, with or without a forecast."""


def score_forecasts(rows: Sequence[Row], forecasts: Sequence[Forecast]) -> EvaluatedRows:
    """Return forecasts and measured steps of the rows that have a trusted measurement (`has_trusted_step`).

    Args:
        rows: rows of runs tables.
        forecasts: the forecast of each row.
    """
    graded = {
        index: seconds
        for index, row in enumerate(rows)
        if has_trusted_step(row) and (seconds := read_measured_seconds(row)) is not None
    }
    index = tuple(place for place in graded if forecasts[place].seconds is not None)
    items = [forecasts[place] for place in index]
    measured = np.array([graded[place] for place in index])
    predicted = np.array([item.seconds for item in items], dtype=float)
    launch = np.array([(item.parts or {}).get("launch", 0.0) for item in items], dtype=float)
    covered = [(item.lower_s or 0) <= t <= (item.upper_s or 0) for item, t in zip(items, measured, strict=True)]
    return EvaluatedRows(
        rows=tuple(rows[place] for place in index),
        index=index,
        measured_s=measured,
        predicted_s=predicted,
        cautious_s=uncertainty.slow_host_step_s(predicted, launch),
        covered=np.array(covered, dtype=bool),
        fits=np.array([bool(item.fits) for item in items], dtype=bool),
        graded=len(graded),
    )


def read_measured_seconds(row: Row) -> float | None:
    """Return the measured step of a row in seconds. If the cell holds no positive number, return None."""
    try:
        seconds = float(row.get("step_time_s_derived", ""))
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def absolute_errors(predicted: Floats, measured: Floats) -> Floats:
    """Return the absolute values of the relative errors of forecasts, (n,)."""
    return np.abs(calibration.relative_error(predicted, measured))


def mean_over_groups(errors: Floats, rows: Sequence[Row]) -> float:
    """Return the mean of the mean errors of each split group. Without rows, return NaN."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        groups[row.get("split_group", "")].append(float(error))
    return float(np.mean([np.mean(values) for values in groups.values()])) if groups else float("nan")


def name_gpu_count_range(row: Row) -> str:
    """Return the range of a row's GPU count as text, such as "2-8"."""
    return calibration.name_gpu_range(read_integer(row, "n_gpus") or 1)


BINS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("gpu", lambda row: row["gpu"]),
    ("precision", lambda row: row["precision"]),
    ("family", lambda row: row.get("family", "")),
    ("scale", name_gpu_count_range),
)


@dataclass(frozen=True, slots=True)
class SubsetErrors:
    """Relative errors of a named subset of rows: mean over groups, median, 90th percentile and bias."""

    name: str
    rows: int
    groups: int
    macro: float
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        own = " ".join(f"{cell:7.1%}" for cell in (self.macro, self.median, self.p90, self.bias))
        return f"{self.name[:28]:28s} {self.rows:5d} {self.groups:6d} {own}"


TITLES = f"{'':28} {'rows':>5} {'groups':>6} {'macro':>7} {'median':>7} {'P90':>7} {'bias':>7}"
"""Titles of the columns of a subset's text."""


def list_row_subsets(scored: EvaluatedRows) -> list[tuple[str, Mask]]:
    """Return (name, mask (n,)) of subsets of rows: all rows, then each GPU, precision, family and GPU range."""
    subsets: list[tuple[str, Mask]] = [("all", np.ones(len(scored.measured_s), dtype=bool))]
    for name, key in BINS:
        values = np.array([key(row) for row in scored.rows])
        subsets += [(f"{name} {value}", values == value) for value in sorted(set(values))]
    return subsets


def subset_errors(name: str, scored: EvaluatedRows, mask: Mask) -> SubsetErrors:
    """Return the errors of the rows that a mask (n,) selects, under the given name."""
    rows = select_rows(scored.rows, mask)
    measured = scored.measured_s[mask]
    errors = absolute_errors(scored.predicted_s[mask], measured)
    bias = np.median(calibration.relative_error(scored.predicted_s[mask], measured))
    groups = len({row.get("split_group", "") for row in rows})
    middle, most = float(np.median(errors)), float(np.quantile(errors, 0.9))
    return SubsetErrors(name, len(rows), groups, mean_over_groups(errors, rows), middle, most, float(bias))


def select_rows(rows: Sequence[Row], mask: Mask) -> list[Row]:
    """Return the rows that a mask (n,) selects."""
    return [row for row, is_in in zip(rows, mask, strict=True) if is_in]


def count_lines(rows: Sequence[Row], forecasts: Sequence[Forecast], scored: EvaluatedRows) -> list[str]:
    """Return lines of text with numbers of rows: with a forecast, without one by reason, and measured."""
    predicted = sum(item.seconds is not None for item in forecasts)
    lines = [f"{len(rows)} rows, {predicted} predicted, {len(rows) - predicted} refused"]
    reasons = Counter(item.reason for item in forecasts if item.reason)
    lines += [f"  refused {count:4d}  {code}" for code, count in sorted(reasons.items())]
    if not len(scored.measured_s):
        return [*lines, "no graded row with a measured step time"]
    share = len(scored.measured_s) / max(scored.graded, 1)
    return [*lines, f"grade A and B with a step time: {scored.graded}, predicted {share:.1%}"]


def ranking_line(scored: EvaluatedRows) -> str:
    """Return a line of text about how well plans are ranked. If no group has four plans, return ""."""
    tau, regret, count = rank_plans(scored.rows, scored.predicted_s, scored.measured_s)
    if not count:
        return ""
    _, advised, _ = rank_plans(scored.rows, scored.predicted_s, scored.measured_s, scored.cautious_s)
    text = f"top-1 regret {advised:.1%} as advice orders plans, {regret:.1%} by the forecast alone"
    return f"ranking: {count} groups, Kendall tau {tau:.2f}, {text}"


def coverage_lines(scored: EvaluatedRows) -> list[str]:
    """Return two lines of text: the coverage of ranges, and the share of runs that are wrongly forecast not to fit."""
    return [
        f"90 % range covers {scored.covered.mean():.1%} of the measured steps",
        f"called too large for the GPU they ran on: {(~scored.fits).mean():.1%}",
    ]


def compare_report(rows: Sequence[Row], forecasts: Sequence[Forecast]) -> str:
    """Return a text report: counts of rows, errors by GPU, precision, family and GPU range, ranking and coverage."""
    scored = score_forecasts(rows, forecasts)
    lines = count_lines(rows, forecasts, scored)
    if not len(scored.measured_s):
        return "\n".join(lines)
    lines += ["", TITLES, *(str(subset_errors(name, scored, mask)) for name, mask in list_row_subsets(scored))]
    if text := ranking_line(scored):
        lines += ["", text]
    return "\n".join([*lines, "", *coverage_lines(scored)])


_RANKED_BY = (
    *("split_group", "model_name", "gpu", "n_gpus", "global_batch", "n_layers", "n_heads", "hidden", "seq_len"),
    "precision",
)
_PLAN_COLUMNS = ("tp", "pp", "dp", "micro_batch_per_gpu", "zero_stage", "activation_checkpointing", "cp", "ep")


def rank_plans(
    rows: Sequence[Row], predicted_s: Floats, measured_s: Floats, cautious_s: Floats | None = None
) -> tuple[float, float, int]:
    """Return Kendall's tau, the top-1 regret, and the number of groups with at least four distinct plans.

    Tau and regret are averaged over these groups. Tau uses pairs whose measurements differ by more than 5 %. A tie of
    forecasts scores 0. The regret is the difference between the chosen plan's measured step and the shortest one,
    relative to the shortest.

    Args:
        rows: the rows.
        predicted_s: forecast step of each row in seconds, (n,).
        measured_s: measured step of each row in seconds, (n,).
        cautious_s: step on a slow host, (n,), which decides between plans with tied forecasts. None stands for choosing
            the plan with the shortest forecast.
    """
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[tuple(row.get(name, "") for name in _RANKED_BY)].append(index)
    taus, regrets = [], []
    for members in groups.values():
        if len({tuple(rows[i].get(name, "") for name in _PLAN_COLUMNS) for i in members}) < 4:
            continue
        predicted, measured = predicted_s[members], measured_s[members]
        first, second = np.triu_indices(len(members), 1)
        apart = np.abs(measured[first] - measured[second]) > 0.05 * np.minimum(measured[first], measured[second])
        if apart.any():
            sign = np.sign(predicted[first] - predicted[second]) * np.sign(measured[first] - measured[second])
            taus.append(float(np.mean(sign[apart])))
        decides = predicted
        if cautious_s is not None:
            tied = predicted <= predicted.min() * np.exp(uncertainty.largest_tie_width())
            decides = np.where(tied, cautious_s[members], np.inf)
        best = np.isclose(decides, decides.min(), rtol=1e-9)
        regrets.append(float(np.mean(measured[best])) / float(measured.min()) - 1)
    return (
        float(np.mean(taus)) if taus else float("nan"),
        float(np.mean(regrets)) if regrets else float("nan"),
        len(regrets),
    )
