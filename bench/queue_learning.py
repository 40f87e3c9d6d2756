"""What a replay of a queue knows of its jobs, and learns from those that have run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tilecast.calibration import Calibration, Key, Run, fit, group
from tilecast.queue.problem import JobOption, PoolCapacity

REPORT_S = 600.0
"""A job that has run so long has reported its step."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job that comes at some time, what is forecast of it, and what it takes."""

    at_s: float
    options: tuple[JobOption, ...]
    seconds: Mapping[str, float]
    """By pool."""
    runs: Mapping[str, Run]
    """What an operator would record of it, by pool; nobody reads one before the job has reported."""


@dataclass(slots=True)
class StepLearner:
    """What runs have taught until now."""

    is_exact: bool
    """Whether a workload that ran on a pool takes the step that was measured there."""
    runs: list[Run] = field(default_factory=list)
    reported: set[int] = field(default_factory=set)
    steps: dict[Key, list[float]] = field(default_factory=dict)
    """Measured over forecast by pool and workload."""
    fitted: Calibration | None = None

    def report(self, job: int, run: Run) -> None:
        """Take in the step of a job that ended or ran for long enough."""
        if job not in self.reported:
            self.reported.add(job)
            self.runs.append(run)
            self.steps.setdefault(group(run), []).append(run.observed_s / run.predicted_s)
            self.fitted = None

    def options(self, arrival: Arrival) -> tuple[JobOption, ...]:
        """The job's options by corrected forecasts."""
        if self.fitted is None:
            self.fitted = fit(self.runs)
        return tuple(self._corrected(self.fitted, item, arrival.runs[item.pool]) for item in arrival.options)

    def _corrected(self, fitted: Calibration, option: JobOption, run: Run) -> JobOption:
        key = group(run)
        if self.is_exact and key in self.steps:
            return scaled(option, option.seconds * float(np.median(self.steps[key])))
        ratio = fitted.at(key).ratio * fitted.crossed(run.framework, run.family)
        return scaled(option, option.seconds * ratio)


def measured_run(run: Run, ratio: float) -> Run:
    """The run with a measured step so many times its forecast."""
    return replace(run, observed_s=run.predicted_s * ratio)


def scaled(option: JobOption, seconds: float) -> JobOption:
    """The option with a run of so many seconds, its range and price in proportion."""
    ratio = seconds / option.seconds
    cost = None if option.cost is None else option.cost * ratio
    return replace(option, seconds=seconds, lower_s=option.lower_s * ratio, upper_s=option.upper_s * ratio, cost=cost)


@dataclass(slots=True)
class State:
    """What a placement may look at."""

    now: float
    arrivals: Sequence[Arrival]
    pools: Sequence[PoolCapacity]
    waiting: list[int]
    place: dict[int, JobOption]
    """Of jobs that wait or run."""
    running: dict[int, float] = field(default_factory=dict)
    """When each began."""
    learner: StepLearner | None = None

    def options(self, job: int) -> tuple[JobOption, ...]:
        """The options of a job by what is known now."""
        arrival = self.arrivals[job]
        return arrival.options if self.learner is None else self.learner.options(arrival)

    def learn(self, jobs: Iterable[int]) -> None:
        """Take in the steps of jobs that have run for long enough."""
        if self.learner is not None:
            for job in jobs:
                if self.now - self.running[job] >= REPORT_S or self.is_over(job):
                    self.learner.report(job, self.arrivals[job].runs[self.place[job].pool])

    def is_over(self, job: int) -> bool:
        """Whether a job that runs ends now."""
        return self.now >= self.running[job] + self.arrivals[job].seconds[self.place[job].pool]

    def left(self, job: int) -> float:
        """Forecast seconds that are left of a job that runs; what has outrun its forecast has a little left."""
        option = self.place[job]
        if self.learner is not None and job in self.learner.reported:
            run = self.arrivals[job].runs[option.pool]
            forecast_s = next(item.seconds for item in self.arrivals[job].options if item.pool == option.pool)
            return max(forecast_s * run.observed_s / run.predicted_s - (self.now - self.running[job]), 1.0)
        return max(option.seconds - (self.now - self.running[job]), 0.02 * option.seconds)
