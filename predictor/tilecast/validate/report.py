"""What `tilecast validate runs` finds: tables are read and prepared once, for steps and for peaks of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilecast import constants
from tilecast.spec import Floats, SpecError
from tilecast.validate import Track, memory, residuals, runs, scores, untracked
from tilecast.validate.cells import Row
from tilecast.validate.graphs import Graphs
from tilecast.validate.memory import Peaks
from tilecast.validate.residuals import StepPart
from tilecast.validate.runs import Forecast, RunGroup


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Rows in their order, a forecast of each, the factors of the parts of a step, and the peaks of memory."""

    rows: tuple[Row, ...]
    forecasts: tuple[Forecast, ...]
    parts: tuple[StepPart, ...]
    """Empty where they were not asked for, or no row counts."""
    peaks: Peaks


def make(
    paths: Sequence[Path], track: Track = untracked, *, graphs: Path | None = None, parts: bool = False
) -> ValidationReport:
    """Forecast every row of the tables.

    Args:
        paths: of the tables.
        track: sees the groups of rows.
        graphs: a folder of graphs that rows may name.
        parts: whether the factors of the parts of a step are wanted, which takes a pricing for each.

    Raises:
        SpecError: a file cannot be read or lacks the columns of a runs table, or a graph is not what a row needs.
    """
    if graphs is not None and not graphs.is_dir():
        raise SpecError("--graphs", f"{graphs} is no folder", "name the folder that holds the graphs")
    rows = [row for path in paths for row in runs.read_table(path)]
    groups, refused = runs.prepare(rows, Graphs(graphs) if graphs is not None else None)
    forecasts = runs.forecast_prepared(rows, groups, refused, track)
    step_parts = _parts(rows, groups, forecasts) if parts else []
    return ValidationReport(tuple(rows), tuple(forecasts), tuple(step_parts), memory.measure(rows, groups, refused))


def _parts(rows: Sequence[Row], groups: Sequence[RunGroup], forecasts: Sequence[Forecast]) -> list[StepPart]:
    """The factor of each part of a step that the graded rows ask for."""
    members = [
        (group, member, rows[member.index], forecasts[member.index])
        for group in groups
        for member in group.members
        if scores.is_graded(rows[member.index])
    ]
    if not members:
        return []

    def steps(moved: Mapping[str, float]) -> Floats:
        fitted = constants.with_values(moved)
        priced = {id(group): runs.price(group, fitted) for group in {id(item[0]): item[0] for item in members}.values()}
        return np.array(
            [runs.meant(g.workload, one, m).of(one.step_s) for g, m, _, _ in members if (one := priced[id(g)])]
        )

    predicted = np.array([item.seconds for _, _, _, item in members], dtype=float)
    measured = np.array([scores.measured_s(row) for _, _, row, _ in members], dtype=float)
    ratio = residuals.ratio_of(predicted, measured)
    return residuals.parts([row for _, _, row, _ in members], ratio, residuals.shares(steps, predicted))


def text(report: ValidationReport) -> str:
    """The summary, the parts where they were asked for, and the peaks where rows have some."""
    lines = [scores.summary(report.rows, report.forecasts)]
    if report.parts:
        lines.append(residuals.parts_table(report.parts))
    return "\n\n".join(part for part in (*lines, memory.report(report.peaks)) if part)
