"""Measure the step of a TrainJob from the progress that its trainer reports by itself.

With Trainer's feature gate TrainJobStatus (alpha, off by default), a program can write `status.trainerStatus`: a
percentage, a time and metrics. Transformers does so in every TrainJob. The metrics `current_step` and `total_steps` are
those of Transformers. Other trainers report a percentage, which requires the number of steps in the TrainingJob.

A step is the time between two reports divided by the steps between them. So start-up and compilation do not count, nor
does time in which the run was suspended or restarted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilecast_operator.kube.times import parse_time
from tilecast_operator.observed.reports import StepReport

SOURCE = "trainJobProgress"
CURRENT_STEPS = ("current_step", "global_step", "step")
"""Names of metrics with the number of the current step."""
TOTAL_STEPS = ("total_steps", "max_steps")
"""Names of metrics with the run's number of steps."""
POD_COUNTS = ("name", "active", "ready", "failed", "suspended")
"""Fields of `status.jobsStatus` that change when pods stop."""
MIN_PERCENT = 5
"""Least progress at which a run is measured. Before that, kernels are compiled and caches filled."""
MAX_ROUNDING = 0.1
"""Largest share by which rounding may change a measured step. Otherwise the next report is awaited."""
TIME_RESOLUTION_S = 1.0
"""Resolution of times in a status."""
MAX_STEPS = 10**12
NOTICE_S = 60.0
"""Seconds within which reports of progress count as one, because Transformers reports every few seconds."""
MISSING = (
    "no step of the job was measured yet: {name} has no status.trainerStatus; turn on the feature gate TrainJobStatus "
    "of Kubeflow Trainer, with a program that reports (Transformers does), or report by another source"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run at one time."""

    time_s: float
    steps: float
    """Number of completed steps."""
    rounding_steps: float
    """Number of steps by which `steps` may be too small."""
    percent: float
    run: tuple[object, ...] = ()
    """Result of `read_run`, and the number of steps. If it changes, the run may have been interrupted."""

    @property
    def is_warm(self) -> bool:
        """Whether enough of the run is done to measure steps."""
        return self.percent >= MIN_PERCENT


@dataclass(frozen=True, slots=True)
class ProgressHistory:
    """Reports of a run's progress seen so far."""

    last: Progress
    """Progress seen last."""
    start: Progress | None = None
    """Progress from which steps are counted. None until the first report after the last restart."""


def name_stage(status: Mapping[str, Any]) -> tuple[object, ...] | None:
    """Return a value that changes when the progress in a TrainJob's status should be read again.

    Return None if the status has no progress.
    """
    trainer = status.get("trainerStatus")
    if not isinstance(trainer, Mapping):
        return None
    time_s = parse_time(trainer.get("lastUpdatedTime")) or 0.0
    return trainer.get("progressPercentage"), int(time_s / NOTICE_S), read_run(status)


def read_run(status: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what a TrainJob's status says about suspension and pods. It changes when the run stops or restarts."""
    conditions, counts = status.get("conditions"), status.get("jobsStatus")
    suspended = [
        (str(item.get("status")), str(item.get("lastTransitionTime")))
        for item in (conditions if isinstance(conditions, list) else [])
        if isinstance(item, Mapping) and item.get("type") == "Suspended"
    ]
    pods = [
        tuple(str(item.get(name)) for name in POD_COUNTS)
        for item in (counts if isinstance(counts, list) else [])
        if isinstance(item, Mapping)
    ]
    return (*suspended, *pods)


def read_progress(status: Mapping[str, Any], planned_steps: int | None) -> Progress | None:
    """Return the progress in a TrainJob's status, or None if it has none or the number of steps is unknown.

    Args:
        status: status of the TrainJob.
        planned_steps: number of steps in the TrainingJob. The trainer's own number takes precedence.
    """
    trainer = status.get("trainerStatus")
    if not isinstance(trainer, Mapping):
        return None
    time_s = parse_time(trainer.get("lastUpdatedTime"))
    listed = trainer.get("metrics")
    metrics = {
        item["name"]: item.get("value")
        for item in (listed if isinstance(listed, list) else [])
        if isinstance(item, Mapping) and isinstance(item.get("name"), str)
    }
    total = _find_first_count(metrics, TOTAL_STEPS) or planned_steps
    current, percent = _find_first_count(metrics, CURRENT_STEPS), trainer.get("progressPercentage")
    if time_s is None or not total:
        return None
    run = (total, *read_run(status))
    if current is not None:
        return Progress(time_s, current, 0.0, 100 * current / total, run)
    if isinstance(percent, int) and 0 <= percent <= 100:
        return Progress(time_s, percent / 100 * total, total / 100, percent, run)
    return None


def _find_first_count(metrics: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    """Return the first of the named metrics that is a whole number from 1 to `MAX_STEPS`."""
    for name in names:
        text = str(metrics.get(name, "")).removesuffix(".0")
        if text.isascii() and text.isdecimal() and len(text) <= 13 and 0 < int(text) <= MAX_STEPS:
            return int(text)
    return None


def measure_progress(course: ProgressHistory | None, now: Progress) -> tuple[StepReport | None, ProgressHistory]:
    """Return the report of the steps since counting began, and the history updated with the present progress.

    There is no report before `MIN_PERCENT`, or if rounding could change it by more than `MAX_ROUNDING`. Counting begins
    again if the run was suspended or restarted. A report of 100 % is not counted, because it includes saving the model.

    Args:
        course: reports of the run so far, or None.
        now: present progress.
    """
    # The last report of a run is late: the model is saved in between. The first one that is seen, or that comes with
    # a change of the pods, may be of before a restart. So counting begins with a later one.
    if course is None or not now.is_warm or now.percent >= 100 or now.run != course.last.run:
        return None, ProgressHistory(now)
    last, start = course.last, course.start
    if now == last:
        return None, course
    if start is None or now.steps < last.steps or now.time_s < last.time_s:
        return None, ProgressHistory(now, now)
    steps, elapsed_s = now.steps - start.steps, now.time_s - start.time_s
    if steps <= 0 or elapsed_s <= 0:
        return None, ProgressHistory(now, start)
    rounding = now.rounding_steps / steps + TIME_RESOLUTION_S / elapsed_s
    if rounding > MAX_ROUNDING:
        return None, ProgressHistory(now, start)
    seconds = elapsed_s / steps
    report = StepReport(seconds, SOURCE, steps=max(1, round(steps)), rounding_ratio=round(rounding, 4))
    return report, ProgressHistory(now, now)
