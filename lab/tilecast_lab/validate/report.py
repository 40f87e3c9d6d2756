"""Results of `tilecast validate runs`; tables are read and prepared once for both steps and memory peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilecast.spec import Floats, SpecError
from tilecast.validate import Track, iterate_without_progress
from tilecast.validate.cells import Row
from tilecast.validate.runs import RunGroup, forecast_group, interpret_plan, read_table
from tilecast.validate.scores import has_trusted_step, read_measured_seconds
from tilecast_lab.validate import memory, residuals, runs, scores
from tilecast_lab.validate.constants import with_values
from tilecast_lab.validate.graphs import Graphs
from tilecast_lab.validate.memory import MemoryPeaks
from tilecast_lab.validate.residuals import StepPart
from tilecast_lab.validate.runs import PublishedForecast


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Rows in their order, a forecast for each, the factors of the parts of a step, and the memory peaks."""

    rows: tuple[Row, ...]
    forecasts: tuple[PublishedForecast, ...]
    parts: tuple[StepPart, ...]
    """Factors of the parts of a step; empty if they were not requested or no row is graded."""
    peaks: MemoryPeaks


def make_report(
    paths: Sequence[Path], track: Track = iterate_without_progress, *, graphs: Path | None = None, parts: bool = False
) -> ValidationReport:
    """Forecast every row of the tables.

    Args:
        paths: paths of the tables.
        track: shows progress over the groups of rows.
        graphs: folder of graphs that rows may name.
        parts: whether to fit the factors of the parts of a step, which prices all rows once more for each part.

    Raises:
        SpecError: a file cannot be read or lacks the columns of a runs table, or a graph does not match its row.
    """
    if graphs is not None and not graphs.is_dir():
        raise SpecError("--graphs", f"{graphs} is no folder", "name the folder that holds the graphs")
    rows = [row for path in paths for row in read_table(path)]
    groups, refused = runs.prepare(rows, Graphs(graphs) if graphs is not None else None)
    forecasts = runs.forecast_prepared(rows, groups, refused, track)
    step_parts = _parts(rows, groups, forecasts) if parts else []
    return ValidationReport(
        tuple(rows), tuple(forecasts), tuple(step_parts), memory.measure_peaks(rows, groups, refused)
    )


def _parts(rows: Sequence[Row], groups: Sequence[RunGroup], forecasts: Sequence[PublishedForecast]) -> list[StepPart]:
    """Fit the factor of each part of a step to the graded rows."""
    members = [
        (group, member, rows[member.index], forecasts[member.index])
        for group in groups
        for member in group.members
        if has_trusted_step(rows[member.index])
    ]
    if not members:
        return []

    def steps(moved: Mapping[str, float]) -> Floats:
        fitted = with_values(moved)
        priced = {
            id(group): forecast_group(group, fitted) for group in {id(item[0]): item[0] for item in members}.values()
        }
        return np.array(
            [
                interpret_plan(g.workload, one, m).interpolate_layers(one.step_s)
                for g, m, _, _ in members
                if (one := priced[id(g)])
            ]
        )

    predicted = np.array([item.seconds for _, _, _, item in members], dtype=float)
    measured = np.array([read_measured_seconds(row) for _, _, row, _ in members], dtype=float)
    ratio = residuals.ratio_of(predicted, measured)
    return residuals.parts([row for _, _, row, _ in members], ratio, residuals.shares(steps, predicted))


def text(report: ValidationReport) -> str:
    """Return the summary as text, with the parts if they were requested and the peaks if rows have some."""
    lines = [scores.summary(report.rows, report.forecasts)]
    if report.parts:
        lines.append(residuals.parts_table(report.parts))
    return "\n\n".join(part for part in (*lines, memory.report(report.peaks)) if part)
