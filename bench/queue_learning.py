"""Knowledge of jobs in the replay of a queue: forecasts, and corrections from jobs that have run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from tilecast.learning.calibration import Calibration, GroupKey, Run, fit_calibration, name_group
from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, mark_as_running

Place: TypeAlias = tuple[str, int]
REPORT_S = 600.0
"""Running time in seconds after which a job has reported its step."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job's arrival time, forecasts and actual times. Places are a pool and a number of GPUs."""

    at_s: float
    options: tuple[JobOption, ...]
    seconds: Mapping[Place, float]
    """Actual seconds by place."""
    runs: Mapping[Place, Run]
    """Runs that an operator would record, by place; none is read before the job has reported."""
    asked: int
    """GPUs that the job asks for. A plan may give it others that `options` has."""

    def asked_options(self, options: Sequence[JobOption]) -> list[JobOption]:
        """Return those of some options of the job that have as many GPUs as it asks for."""
        return [item for item in options if item.gpus == self.asked]


@dataclass(slots=True)
class StepLearner:
    """Corrections learned from runs so far."""

    is_exact: bool
    """Whether a workload that ran on a pool takes the step measured there."""
    runs: list[Run] = field(default_factory=list)
    reported: set[int] = field(default_factory=set)
    steps: dict[GroupKey, list[float]] = field(default_factory=dict)
    """Ratios of measured to forecast steps, by pool and workload."""
    fitted: Calibration | None = None

    def report(self, job: int, run: Run) -> None:
        """Learn from the step of a job that ended or ran for long enough."""
        if job not in self.reported:
            self.reported.add(job)
            self.runs.append(run)
            self.steps.setdefault(name_group(run), []).append(run.observed_s / run.predicted_s)
            self.fitted = None

    def options(self, arrival: Arrival) -> tuple[JobOption, ...]:
        """Return the job's options with corrected forecasts."""
        if self.fitted is None:
            self.fitted = fit_calibration(self.runs)
        return tuple(self._corrected(self.fitted, item, arrival.runs[item.pool, item.gpus]) for item in arrival.options)

    def _corrected(self, fitted: Calibration, option: JobOption, run: Run) -> JobOption:
        key = name_group(run)
        if self.is_exact and key in self.steps:
            return scaled(option, option.seconds * float(np.median(self.steps[key])))
        ratio = fitted.find_group_correction(key).ratio * fitted.find_software_ratio(run.framework, run.family)
        return scaled(option, option.seconds * ratio)


def measured_run(run: Run, ratio: float) -> Run:
    """Return the run with a measured step of `ratio` times its forecast."""
    return replace(run, observed_s=run.predicted_s * ratio)


def scaled(option: JobOption, seconds: float) -> JobOption:
    """Return the option with a run of `seconds`, and its range and price in proportion."""
    ratio = seconds / option.seconds
    cost = None if option.cost is None else option.cost * ratio
    return replace(option, seconds=seconds, lower_s=option.lower_s * ratio, upper_s=option.upper_s * ratio, cost=cost)


@dataclass(slots=True)
class State:
    """State of the replay that a placement may read."""

    now: float
    arrivals: Sequence[Arrival]
    pools: Sequence[PoolCapacity]
    waiting: list[int]
    place: dict[int, JobOption]
    """Chosen options of jobs that wait or run."""
    running: dict[int, float] = field(default_factory=dict)
    """Start times of running jobs."""
    learner: StepLearner | None = None

    def options(self, job: int) -> tuple[JobOption, ...]:
        """Return the options of a job by current knowledge."""
        arrival = self.arrivals[job]
        return arrival.options if self.learner is None else self.learner.options(arrival)

    def learn(self, jobs: Iterable[int]) -> None:
        """Learn from the steps of jobs that have run for long enough."""
        if self.learner is not None:
            for job in jobs:
                if self.now - self.running[job] >= REPORT_S or self.is_over(job):
                    self.learner.report(job, self.arrivals[job].runs[self.place[job].pool, self.place[job].gpus])

    def is_over(self, job: int) -> bool:
        """Return whether a running job ends now."""
        place = self.place[job].pool, self.place[job].gpus
        return self.now >= self.running[job] + self.arrivals[job].seconds[place]

    def remaining(self, job: int) -> JobOption:
        """Return the option of a running job for the rest of its run, as an operator forecasts it."""
        option, ran_s = self.place[job], self.now - self.running[job]
        if self.learner is not None and job in self.learner.reported:
            whole_s = self.arrivals[job].seconds[option.pool, option.gpus]
            return scaled(option, max(whole_s - ran_s, 1.0))
        place = option.pool, option.gpus
        return mark_as_running(QueuedJob(str(job), (option,), present=place), ran_s).options[0]
