"""Steps from the progress that TrainJobs report by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast_operator.kube.times import format_time
from tilecast_operator.observed import reports
from tilecast_operator.observed.progress import (
    MAX_ROUNDING,
    Progress,
    ProgressHistory,
    measure_progress,
    name_stage,
    read_progress,
)  # fmt: skip
from tilecast_operator.observed.reports import StepReport, StepWindow

START = 1.8e9


def status(percent: int | None, at_s: float, **metrics: object) -> dict[str, Any]:
    """Return the status of a TrainJob."""
    trainer: dict[str, Any] = {"lastUpdatedTime": format_time(START + at_s)}
    if percent is not None:
        trainer["progressPercentage"] = percent
    trainer["metrics"] = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return {"trainerStatus": trainer}


def test_the_steps_of_transformers_are_exact() -> None:
    progress = read_progress(status(12, 100, loss=2.1, current_step=125, total_steps=1000), None)
    assert progress == Progress(START + 100, 125, 0.0, 12.5, (1000,))


def test_a_percentage_needs_the_number_of_steps() -> None:
    assert read_progress(status(12, 100), None) is None
    assert read_progress(status(12, 100), 2000) == Progress(START + 100, 240, 20, 12, (2000,))
    assert read_progress(status(12, 100, total_steps=500), 2000) == Progress(START + 100, 60, 5, 12, (500,))


@pytest.mark.parametrize(
    "body", [{}, {"trainerStatus": None}, {"trainerStatus": {"metrics": "x", "progressPercentage": "5"}}]
)
def test_a_status_without_progress_has_none(body: dict[str, Any]) -> None:
    assert read_progress(body, 100) is None


@given(
    seconds=st.floats(0.2, 60), total=st.integers(200, 10**6), start_up_s=st.floats(0, 3600), first=st.integers(5, 40),
    more=st.integers(1, 50),
)  # fmt: skip
def test_the_true_step_is_within_the_rounding(
    seconds: float, total: int, start_up_s: float, first: int, more: int
) -> None:
    """The percentage is cut down to a whole number, and the time to a whole second."""

    def told(done: int) -> Progress:
        progress = read_progress(status(100 * done // total, int(start_up_s + done * seconds)), total)
        assert progress is not None
        return progress

    before, after = told(first * total // 100 + 1), told(min(total - 1, (first + more) * total // 100))
    report, course = measure_progress(ProgressHistory(before, before), after)
    assert course.last == after
    if report is None:
        assert course.start == before
    else:
        assert report.rounding_ratio is not None and report.rounding_ratio <= MAX_ROUNDING
        assert report.seconds == pytest.approx(seconds, rel=1.2 * report.rounding_ratio)
        assert course.start == after


def told(percent: float, at_s: float, *run: object) -> Progress:
    """Return the progress of a run of 1000 steps."""
    return Progress(at_s, percent * 10, 0.0, percent, run)


def test_nothing_is_measured_early_or_late() -> None:
    early = ProgressHistory(told(4.9, 0))
    assert measure_progress(None, told(4.9, 0)) == (None, early)
    assert measure_progress(early, told(5, 60)) == (None, ProgressHistory(told(5, 60), told(5, 60)))
    counted = ProgressHistory(told(5, 0), told(5, 0))
    assert measure_progress(counted, told(100, 950)) == (None, ProgressHistory(told(100, 950)))
    assert measure_progress(counted, told(5, 60)) == (None, ProgressHistory(told(5, 60), told(5, 0)))
    report, _ = measure_progress(counted, told(15, 200))
    assert report == StepReport(2.0, "trainJobProgress", steps=100, rounding_ratio=0.005)


def measure(*course: Progress) -> list[float]:
    """Return the seconds of the steps that are measured in a course of progress."""
    found, seen = list[float](), None
    for now in course:
        report, seen = measure_progress(seen, now)
        found += [] if report is None else [report.seconds]
    return found


def test_a_restart_from_a_checkpoint_above_the_start_of_counting_is_seen() -> None:
    """Rounding keeps the start of counting far behind the last status."""

    def rounded(percent: int, at_s: float) -> Progress:
        return Progress(at_s, percent * 10, 10, percent)

    running = [rounded(percent, percent * 10.0) for percent in range(9, 19)]
    # The run is down for an hour at 18 %, and goes on at 15 %.
    later = [rounded(percent, 3600 + percent * 10.0) for percent in range(15, 30)]
    assert measure(*running, *later) == [pytest.approx(1.0, rel=0.01)]


@pytest.mark.parametrize("is_seen_while_down", [True, False])
def test_the_time_of_a_suspension_is_no_step(is_seen_while_down: bool) -> None:
    """A TrainJob keeps its last report while it is down, and until the first new one."""
    down = [told(20, 200, "suspended"), told(20, 200, "resumed")][not is_seen_while_down :]
    assert measure(told(6, 60), told(8, 80), told(20, 200), *down, told(21, 7000, "resumed")) == [1.0]
    assert measure(told(20, 200, "resumed"), told(21, 7000, "resumed"), told(30, 7090, "resumed")) == [1.0]


@pytest.mark.parametrize(
    "change",
    [
        {"conditions": [{"type": "Suspended", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
        {"conditions": [{"type": "Suspended", "status": "False", "lastTransitionTime": "2026-01-01T01:00:00Z"}]},
        {"jobsStatus": [{"name": "node", "active": 0, "ready": 1, "failed": 0}]},
        {"jobsStatus": [{"name": "node", "active": 1, "ready": 0, "failed": 0}]},
        {"jobsStatus": [{"name": "node", "active": 1, "ready": 1, "failed": 1}]},
        {"jobsStatus": "x", "conditions": [1]},
    ],
)
def test_suspension_and_pods_tell_that_a_run_was_down(change: dict[str, Any]) -> None:
    body = {**status(12, 100), "jobsStatus": [{"name": "node", "active": 1, "ready": 1, "failed": 0, "succeeded": 0}]}
    before, after = read_progress(body, 1000), read_progress({**body, **change}, 1000)
    assert before is not None and after is not None and before.run != after.run
    assert name_stage(body) != name_stage({**body, **change})


def test_each_source_has_a_weight_in_learning() -> None:
    assert set(reports.SOURCES) == set(reports.SOURCE_WEIGHTS)
    for source, observations in (("put", 6), ("trainJobProgress", 3)):
        assert StepWindow((1.0,) * 6, 6, "2026-01-01T00:00:00Z", StepReport(1.0, source)).observations == observations
    window = StepWindow((1.0,), 1, "2026-01-01T00:00:00Z", StepReport(1.0, "trainJobProgress", rounding_ratio=0.05))
    assert window.observations == 1
    assert window.status().rounding_ratio == 0.05 and StepWindow.from_status(window.status()) == window
    exact = reports.add_report(window, StepReport(1.0, "put"), "2026-01-01T00:01:00Z")
    assert exact.status().rounding_ratio is None
