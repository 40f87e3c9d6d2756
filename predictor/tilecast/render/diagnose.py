"""Format the comparison of a measured step with its forecast, as text and as plain data."""

from __future__ import annotations

import math
from typing import Any

from tilecast.api.advice import Measured, SuspectLine
from tilecast.diagnose import Diagnosis, Suspect
from tilecast.render.columns import align_columns
from tilecast.render.units import format_duration, format_interval

_NAMES = {"communication": "exposed communication", "unstated": "what the job leaves out"}


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Return text that compares the measured step with the forecast and names the likeliest cause of the error."""
    inside = "inside" if diagnosis.is_in_range else "outside"
    span = format_interval(diagnosis.lower_s, diagnosis.upper_s)
    change = f"{abs(diagnosis.ratio - 1):.1%} {'longer' if diagnosis.ratio > 1 else 'shorter'}"
    measured, forecast = format_duration(diagnosis.measured_s), format_duration(diagnosis.forecast_s)
    head = f"Measured {measured}, {change} than the forecast of {forecast}; "
    rows = [_list_suspect_cells(one) for one in (*diagnosis.suspects, diagnosis.unstated)]
    titles = ("IF ONLY THIS WERE OFF", "FORECAST", "WOULD BE", "STANDARD ERRORS")
    return "\n".join([f"{head}{inside} its 90 % range of {span}.", _verdict_sentence(diagnosis), "",
                      *align_columns(titles, rows, titles[1:])]) + "\n"  # fmt: skip


def _list_suspect_cells(suspect: Suspect) -> tuple[str, ...]:
    needed = format_duration(suspect.needed_s) if suspect.needed_s > 0 else "less than none"
    apart = f"{suspect.standard_errors:.1f}" if math.isfinite(suspect.standard_errors) else ""
    return (_NAMES.get(suspect.line, suspect.line), format_duration(suspect.forecast_s), needed, apart)


def _verdict_sentence(diagnosis: Diagnosis) -> str:
    first = diagnosis.suspects[0]
    name = _NAMES.get(first.line, first.line)
    text = f"Most probably off: {name}"
    if first.is_plausible:
        return f"{text}, {first.standard_errors:.1f} of its own standard errors."
    if diagnosis.unstated.is_plausible:
        return (
            f"{text}, but no line's own error reaches that far: more likely it is what the job leaves out "
            "(data loading, clocks, another plan or batch, a busy node)."
        )
    return f"{text}, but nothing explains so much: check that the job, the plan and the pool are those that ran."


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON-compatible data. The likeliest cause of the error comes first."""
    causes = [
        SuspectLine.model_validate(one, from_attributes=True) for one in (*diagnosis.suspects, diagnosis.unstated)
    ]
    return Measured(
        measured_seconds=diagnosis.measured_s,
        ratio=diagnosis.ratio,
        inside_range=diagnosis.is_in_range,
        suspects=causes,
    ).document()
