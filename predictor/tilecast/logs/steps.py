"""Find the steady duration of a step from the steps in a log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from tilecast.learning.calibration import robust_median
from tilecast.spec import PartialPlan

MAX_STEPS = 1_000_000
"""Most steps of a log that are read. Later ones are ignored."""
WARM_UP_STEPS = 3
WARM_UP_SHARE = 0.1
"""Share of the steps after each start of a run that is left out as warm-up. At least `WARM_UP_STEPS` are."""
MIN_STEPS = 2
"""Fewest measured intervals from which a step is computed."""
MAX_LAG = 2
"""Most logging intervals by which ranks that share a log may differ. A step that goes back further is a restart."""
MAX_NUMBER = 1e15
"""Largest step number, and most seconds of a step or a time, that are accepted."""
RESOLUTIONS = 100
"""Shortest span between two times of a log that is measured, in multiples of their resolution."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run as described by its log."""

    seconds: float
    """Median of the steady steps."""
    steps: int
    """Number of logged intervals that were measured."""
    format: str
    gpus: int | None = None
    gpu: str | None = None
    """Product name of the GPU."""
    plan: PartialPlan | None = None


@dataclass(slots=True)
class StepSeries:
    """Steps of a run in logged order.

    The values are durations of a step in seconds or, for a clock, the times of logging in seconds.
    """

    is_clock: bool = False
    resolution_s: float = 0.001
    """Smallest difference between two times."""
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    paused: list[bool] = field(default_factory=list)
    """Whether an evaluation or a checkpoint preceded the step."""

    def add_step(self, step: int, value: float, *, is_paused: bool = False) -> None:
        """Add a logged step, unless there are too many, or its number or value is invalid."""
        # A number that is not finite fails both comparisons.
        is_sound = abs(step) < MAX_NUMBER and abs(value) < MAX_NUMBER
        if len(self.steps) < MAX_STEPS and is_sound and (self.is_clock or value > 0):
            self.steps.append(step)
            self.values.append(value)
            self.paused.append(is_paused)

    def list_steady_seconds(self) -> list[float]:
        """Return the seconds per step of each interval after warm-up, without evaluations and checkpoints.

        Each attempt of a restarted run has its own warm-up. Intervals across a restart are left out. If several ranks
        log a step, only the first is used.
        """
        interval = _median_interval(self.steps)
        attempts = [_RunAttempt(self, rows, interval) for rows in self._split_attempts(interval)]
        steady = [item for attempt in attempts for item in attempt.intervals(self.is_clock, self.resolution_s)]
        kept = [seconds for seconds, is_paused in steady if not is_paused]
        return kept if len(kept) >= MIN_STEPS else [seconds for seconds, _ in steady]

    def _split_attempts(self, interval: int) -> list[list[int]]:
        """Return the rows of each attempt. A step that goes far back begins a new attempt."""
        attempts: list[list[int]] = []
        highest = 0
        for row, step in enumerate(self.steps):
            if not attempts or step < highest - MAX_LAG * interval:
                attempts.append([])
                highest = step
            attempts[-1].append(row)
            highest = max(highest, step)
        return attempts


class _RunAttempt:
    """Steps of a run between two restarts, each step once and in order."""

    def __init__(self, series: StepSeries, rows: Sequence[int], interval: int) -> None:
        self._steps: list[int] = []
        self._values: list[float] = []
        self._paused: list[bool] = []
        is_paused = False
        for row in rows:
            is_paused |= series.paused[row]
            if not self._steps or series.steps[row] > self._steps[-1]:
                self._steps.append(series.steps[row])
                self._values.append(series.values[row])
                self._paused.append(is_paused)
                is_paused = False
        self._first = max(-(-WARM_UP_STEPS // interval), int(WARM_UP_SHARE * len(self._steps)))

    def intervals(self, is_clock: bool, resolution_s: float) -> list[tuple[float, bool]]:
        """Return, for each interval after warm-up, the seconds per step and whether it contains a pause."""
        if not is_clock:
            return list(zip(self._values, self._paused, strict=True))[self._first :]
        steps, times, paused = (column[self._first :] for column in (self._steps, self._values, self._paused))
        if len(steps) < 2:
            return []
        typical = statistics.median(later - earlier for earlier, later in pairwise(times))
        # Coarse times need a long span. Half of a short log is the longest that leaves several of them.
        wanted = math.ceil(RESOLUTIONS * resolution_s / max(typical, resolution_s / 10))
        stride = max(1, min(wanted, len(steps) // 2))
        pauses = list(accumulate(paused))
        found = []
        for start in range(len(steps) - stride):
            seconds = (times[start + stride] - times[start]) / (steps[start + stride] - steps[start])
            if seconds > 0:
                found.append((seconds, pauses[start + stride] > pauses[start]))
        return found


def _median_interval(steps: Sequence[int]) -> int:
    """Return the median difference between consecutive logged steps, at least 1."""
    numbers = sorted(set(steps))
    return max(1, int(statistics.median_low([b - a for a, b in pairwise(numbers)]))) if len(numbers) > 1 else 1


def find_median(series: StepSeries) -> tuple[float, int] | None:
    """Return the median seconds per step without outliers, and the number of intervals.

    Return None if there are too few intervals.
    """
    seconds = series.list_steady_seconds()
    return (robust_median(seconds), len(seconds)) if len(seconds) >= MIN_STEPS else None
