"""Comparison of predicted kernels with measured durations of single kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilecast import kernels
from tilecast.hardware import find_gpu
from tilecast.spec import PRECISIONS, Floats, SpecError
from tilecast.validate import Track, iterate_without_progress
from tilecast_lab.validate import csvfile
from tilecast_lab.validate.harness import HARNESS_SPREAD
from tilecast_lab.validate.kernel_readers import ONE_INPUT, TWO_INPUTS, read_kernels
from tilecast_lab.validate.kernel_table import MeasuredKernels


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictions for the R rows of a table.

    All columns are (R,), in seconds, NaN where `reason` says why the row is not predicted.
    """

    seconds: Floats
    lower: Floats
    upper: Floats
    roofline: Floats
    reason: list[str]


def predict(table: MeasuredKernels, model: Path | None = None) -> Prediction:
    """Predict every row that can be expressed, GPU by GPU, and add the overhead of its harness.

    Raises:
        SpecError: the model file is damaged.
    """
    kernels.describe_model_file(model)
    total, spread, roofline = np.zeros((3, len(table)))
    reason = list(table.reason)
    names = np.array(table.gpu, dtype=object)
    for name in dict.fromkeys(table.gpu):
        rows = np.flatnonzero(names == name)
        try:
            gpu = find_gpu(name)
        except SpecError:
            for row in rows:
                reason[row] = reason[row] or "unknown-gpu"
            continue
        mine = np.flatnonzero(names[table.owner] == name)
        able = np.array([gpu.supports(precision) for precision in PRECISIONS])[table.kernels.precision[mine]]
        for row in table.owner[mine[~able]]:
            reason[row] = reason[row] or "no-such-precision"
        mine = mine[able]
        if len(mine):
            part = table.kernels.take(mine)
            distinct, inverse = part.distinct()
            times = kernels.predict_kernel_times(distinct, gpu, model=model)
            np.add.at(total, table.owner[mine], times.seconds[inverse])
            np.add.at(spread, table.owner[mine], (times.seconds * times.spread)[inverse])
            np.add.at(roofline, table.owner[mine], times.roofline_s[inverse])
    blank = np.array([bool(text) for text in reason]) | (total == 0)
    added = np.array([cost.added_s for cost in table.harness])
    least = np.array([cost.least_s for cost in table.harness])
    slower = np.array([cost.times for cost in table.harness])
    after = np.array([cost.times_after_s for cost in table.harness])
    kernels_s = total + (slower - 1.0) * np.maximum(total - after, 0.0)
    predicted = np.maximum(kernels_s + added, least)
    spread = spread * slower + HARNESS_SPREAD * (predicted - kernels_s)
    nothing = np.where(blank, np.nan, 0.0)
    return Prediction(
        predicted + nothing,
        predicted**2 / np.maximum(predicted + spread, np.finfo(float).tiny) + nothing,
        predicted + spread + nothing,
        roofline + nothing,
        [text or ("not-expressible" if empty else "") for text, empty in zip(reason, blank, strict=True)],
    )


NEUSIGHT_OPS = {"bmm": "bmm", "linear": "linear", "softmax": "softmax", "ln": "ln"}
NEUSIGHT_ERRORS = {
    "bmm": (0.260, 0.138),
    "linear": (0.200, 0.139),
    "elementwise": (0.140, 0.193),
    "softmax": (0.193, 0.139),
    "ln": (0.201, 0.567),
}
"""NeuSight's published mean absolute errors by op, in and out of distribution (Lee et al., ASPLOS 2025)."""


def run(files: Sequence[Path], rows: Path | None, model: Path | None, track: Track = iterate_without_progress) -> str:
    """Predict the rows of kernel tables, write them to `rows` if it is given, and summarise the errors.

    Args:
        files: measured tables of any known kind, plain or gzipped.
        rows: CSV to write: the input's columns in their order, plus `predicted_us`, `lower_us`,
            `upper_us` and `reason`. Several inputs share the union of their columns.
        model: a file written by `python -m tilecast_lab fit`; None uses the one that ships.
        track: shows progress over the tables.

    Returns:
        A table of mean absolute errors by op, precision and GPU, beside the roofline's.

    Raises:
        SpecError: a file cannot be read, is no known table, or the model is damaged.
    """
    tables = [read_kernels(path) for path in files]
    predictions = [predict(table, model) for table in track(tables, "tables of kernels")]
    if rows is not None:
        forecasts = ((p.seconds, p.lower, p.upper, p.reason) for p in predictions)
        csvfile.write_csv(rows, ((t.header, t.cells, f) for t, f in zip(tables, forecasts, strict=True)))
    return _summary(tables, predictions, model)


def _summary(tables: Sequence[MeasuredKernels], predictions: Sequence[Prediction], model: Path | None) -> str:
    cells: dict[tuple[str, str, str], list[Floats]] = {}
    reasons: dict[str, int] = {}
    for table, p in zip(tables, predictions, strict=True):
        scored = np.isfinite(p.seconds) & np.isfinite(table.latency_s) & (table.latency_s > 0)
        inside = (p.lower <= table.latency_s) & (table.latency_s <= p.upper)
        measured = np.where(scored, table.latency_s, 1.0)
        error, plain = np.abs(p.seconds / measured - 1), np.abs(p.roofline / measured - 1)
        for i in np.flatnonzero(scored):
            values = np.array([error[i], plain[i], inside[i]])
            cells.setdefault((table.op[i], table.precision[i], table.gpu[i]), []).append(values)
        for text in p.reason:
            reasons[text] = reasons.get(text, 0) + 1
    version, digest = kernels.describe_model_file(model)
    lines = [f"utilization model {version} ({digest[:12]})", ""]
    lines.append(
        f"{'op':<40}{'precision':<11}{'GPU':<30}{'rows':>8}{'error':>9}{'roofline':>10}{'in 90 %':>9}  NeuSight"
    )
    for key in sorted(cells):
        mean = np.mean(cells[key], axis=0)
        family = key[0] if key[0] in NEUSIGHT_OPS else "elementwise" if key[0] in TWO_INPUTS + ONE_INPUT else ""
        theirs = NEUSIGHT_ERRORS.get(family) if key[1] == "fp32" else None
        note = f"  {theirs[0]:.1%} / {theirs[1]:.1%}" if theirs else ""
        lines.append(
            f"{key[0]:<40}{key[1]:<11}{key[2]:<30}{len(cells[key]):>8}{mean[0]:>9.1%}{mean[1]:>10.1%}{mean[2]:>9.1%}{note}"
        )
    empty = {text: count for text, count in sorted(reasons.items()) if text}
    lines += ["", "NeuSight's published errors: in distribution / out of distribution."] if cells else [""]
    if empty:
        lines.append("not predicted: " + ", ".join(f"{text} {count}" for text, count in empty.items()))
    return "\n".join(lines)
