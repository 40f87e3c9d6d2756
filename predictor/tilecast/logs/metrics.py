"""Find the step time in the metrics of an experiment tracker: rows with a step number and a time."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilecast.logs.steps import LoggedRun, StepSeries, find_median

STEP_METRICS: Mapping[str, float] = {
    "iteration-time": 1.0,
    "train_step_timing in s": 1.0,
    "time_metrics/end_to_end(s)": 1.0,
    "perf/step_time_seconds": 1.0,
    "step_time_seconds": 1.0,
    "train_step_time_seconds": 1.0,
    "train/step_time_seconds": 1.0,
    "step_seconds": 1.0,
    "step_time_s": 1.0,
    "step_time": 1.0,
    "train/step_time": 1.0,
    "train_step_time": 1.0,
    "iter_time": 1.0,
    "step_time_ms": 1e-3,
    "train/step_time_ms": 1e-3,
    "iter_time_ms": 1e-3,
}
"""Names of metrics with the duration of a step, and their unit in seconds."""
CLOCK_METRICS: Sequence[str] = ("train|time", "_runtime", "_timestamp", "timestamp", "wall_time", "elapsed_seconds")
"""Names of metrics with a time in seconds, since the start of the run or since 1970."""
THROUGHPUT_CLOCK = ("train/time", "train/batches")
"""Clock of Lightning's ThroughputMonitor, and a metric that it writes beside it. Others name a duration so."""
STEP_NUMBERS: Sequence[str] = (
    "train/global_step", "trainer/global_step", "global_step", "iteration", "iter", "train/step", "step", "_step",
)  # fmt: skip
"""Names of metrics with the number of the step, best first."""
_PAUSE = re.compile(
    r"(?:^|[/_|. -])(?:eval|val|valid|validate|validation|test)(?:$|[/_|. -])", re.ASCII | re.IGNORECASE
)
_SYSTEM = re.compile(r"^(?:system|gpu|cpu|memory|_)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Metrics that a run recorded together."""

    step: int | None
    time: float | None
    """Time of the recording, in seconds."""
    values: Mapping[str, float]

    @property
    def is_pause(self) -> bool:
        """Whether the metrics are of a kind that only an evaluation records."""
        return any(_PAUSE.search(name) for name in self.values)


def list_clock_metrics(names: Collection[str]) -> Sequence[str]:
    """Return the metrics with a time in seconds of those with the given names, best first."""
    clock, beside = THROUGHPUT_CLOCK
    found = [name for name in CLOCK_METRICS if name in names]
    return [clock, *found] if clock in names and beside in names else found


def find_metric_run(rows: Sequence[MetricRow], name: str) -> LoggedRun | None:
    """Return the run from rows of metrics in recorded order, or None if there are too few steps.

    Step times come from the first of these sources that has enough steps: a metric that holds step durations; a metric
    that holds clock times, such as `_timestamp`; the times at which the most frequent training metric was recorded.

    Args:
        rows: the rows.
        name: name of the format.
    """
    for series in _list_series(rows):
        if (median := find_median(series)) is not None:
            return LoggedRun(*median, name)
    return None


def _list_series(rows: Sequence[MetricRow]) -> Iterable[StepSeries]:
    counts = Counter(key for row in rows for key in row.values)
    for metric, unit in STEP_METRICS.items():
        if metric in counts:
            yield _make_series(rows, metric, unit)
    for metric in list_clock_metrics(counts):
        yield _make_series(rows, metric)
    trained = [key for key in counts if not _PAUSE.search(key) and not _SYSTEM.match(key) and key not in STEP_NUMBERS]
    if trained and any(row.time is not None for row in rows):
        # A loss is recorded once for each step. Of metrics that are equally frequent it is the safest.
        metric = max(trained, key=lambda key: (counts[key], "loss" in key.lower(), key))
        yield _make_series(rows, metric, is_time=True)


def _make_series(rows: Sequence[MetricRow], metric: str, unit: float = 0.0, *, is_time: bool = False) -> StepSeries:
    """Return a series of steps, from the values of a metric or from the times of the rows that have it.

    The values are durations in `unit`, or times of logging if `unit` is 0. If `is_time`, the times of the rows are
    used.
    """
    series, is_paused = StepSeries(is_clock=not unit), False
    known = {key for row in rows if metric in row.values for key in row.values}
    # Trackers that count calls themselves have a number beside that of the program, which is in some rows alone.
    number = next((key for key in STEP_NUMBERS if key in known), None)
    for row in rows:
        if metric not in row.values or (number is not None and number not in row.values):
            is_paused |= row.is_pause
            continue
        if number is not None and not math.isfinite(row.values[number]):
            continue
        step = row.step if number is None else int(row.values[number])
        value = row.time if is_time else row.values[metric] * (unit or 1.0)
        if step is not None and value is not None:
            # Some write evaluations into the row of their step.
            series.add_step(step, value, is_paused=is_paused or row.is_pause)
            is_paused = False
    return series
