"""Metrics of the operator. Names have the prefix `tilecast_` and base units. A job's name is never a label."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import tilecast
from tilecast.advice import Advice
from tilecast.api.status import ModelVersion
from tilecast.nodes import NodesReport
from tilecast.planner.totals import QueueReport
from tilecast_operator.free_gpus import FreeGpus
from tilecast_operator.metrics.families import STAGES, WATCHED, MetricFamilies
from tilecast_operator.metrics.groups import BoundedGroups, Series
from tilecast_operator.observed.calibrator import Calibrator, MeasuredForecast
from tilecast_operator.observed.reports import relative_error
from tilecast_operator.outcome import AdviceOutcome, get_ready_reason
from tilecast_operator.queue_rows import PlannedQueue

OWN_RUNS = ("own", "successor", "relative")
"""Kinds of runs that can correct a job.

They are of the job itself, of the same workload, or of another workload with its name.
"""
MOST_GROUPS = 64
"""Most groups of GPU, precision and model family with their own series. Users can make any number of groups."""
MOST_GPUS = 12
RUN_REPORTS = 3
"""Number of reports after which a job's forecast error is counted, once."""


class Metrics(MetricFamilies):
    """All metrics of the operator, in a Prometheus registry."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        staged = tuple((stage,) for stage in STAGES)
        steps: Series = {self.predicted: ((),), self.observed: ((),), self.error: staged, self.absolute: staged}
        covered: Series = dict.fromkeys((self.interval, self.interval_runs), (("true",), ("false",)))
        self._gpus = BoundedGroups(self.registry, MOST_GPUS, steps, clock)
        self._groups = BoundedGroups(self.registry, MOST_GROUPS, covered, clock)
        self.build.info({"version": tilecast.__version__})
        for resource in WATCHED:
            # A resource that was never answered is as old as the process.
            self.watched.labels(resource).set_to_current_time()
        self._is_leading = True
        self.set_leadership_metric(True)

    def set_leadership_metric(self, is_leading: bool) -> None:
        """Show whether this replica leads.

        Series that would be the same in every replica are shown only by the leader, so that sums over replicas are
        correct.
        """
        self.leader.set(is_leading)
        if is_leading != self._is_leading:
            self._is_leading = is_leading
            for collector in self.leader_gauges:
                (self.registry.register if is_leading else self.registry.unregister)(collector)

    def count_write(self, resource: str, outcome: str) -> None:
        """Count the outcome of a write request: `ok`, the HTTP status of a refusal, or `unreachable`."""
        self.writes.labels(resource, outcome).inc()

    def count_advice(self, outcome: AdviceOutcome, is_changed: bool) -> None:
        """Count an advice outcome written to a job, and separately whether it changed."""
        self.recommendations.labels(get_ready_reason(outcome)).inc()
        if is_changed:
            self.changes.labels(get_ready_reason(outcome)).inc()
        if isinstance(outcome, Advice) and outcome.best is not None:
            self.predicted.labels(*self._gpus.use_labels((outcome.best.pool.gpu.name,))).observe(outcome.best.step_s)

    def count_observation(
        self, score: MeasuredForecast, seconds: float, steps: int | None, baseline: float | None
    ) -> None:
        """Count an accepted report of a measured step.

        Args:
            score: measured steps of the job, and their forecast.
            seconds: the reported step time.
            steps: number of steps that the report covers, or None if unknown.
            baseline: GPU-seconds per step of the job's baseline, or None if it has no baseline.
        """
        forecast = score.forecast
        gpu, precision, family = forecast.group[:3]
        shown = self._gpus.use_labels((gpu,))
        self.observed.labels(*shown).observe(seconds)
        for stage, predicted_s in zip(STAGES, (forecast.raw_seconds, forecast.step_seconds.target), strict=True):
            ratio = relative_error(predicted_s, seconds)
            self.error.labels(*shown, stage).observe(ratio)
            self.absolute.labels(*shown, stage).observe(abs(ratio))
        for counter, observed_s in (
            (self.interval, seconds),
            *([(self.interval_runs, score.window.seconds)] if score.window.samples == RUN_REPORTS else []),
        ):
            covered = forecast.step_seconds.lower_bound <= observed_s <= forecast.step_seconds.upper_bound
            self._groups.increment_counter(counter, (gpu, precision, family), "true" if covered else "false")
        if score.window.samples == 1:
            self.followed.labels("true" if forecast.followed else "false").inc()
        if forecast.followed and steps and baseline is not None:
            self.saved.inc(max(0.0, baseline - seconds * forecast.gpus) * steps)

    def set_kueue_metrics(self, served: str, release: str, stop_policy: bool, gate: str) -> None:
        """Show the version and features of Kueue. If Kueue is not served, show no series."""
        self.kueue.clear()
        if served:
            self.kueue.labels(served, release, "true" if stop_policy else "false", gate).set(1)

    def set_learning_metrics(self, calibrator: Calibrator) -> None:
        """Show how many runs are learned from, and how many namespaces are at their limit of influence."""
        self.learnt_runs.clear()
        for labels, count in calibrator.count_runs_by_state().items():
            self.learnt_runs.labels(*labels).set(count)
        self.bounded.set(len(calibrator.bounded_namespaces))

    def set_calibration_metrics(self, calibrator: Calibrator) -> None:
        """Show the errors and the corrections of the current calibration."""
        for instrument in (self.bias, self.spread, self.runs):
            instrument.clear()
        shown = self._groups.map_groups_to_labels(calibrator.count_runs_by_group())
        for group, errors in calibrator.compute_group_errors(shown).items():
            self.runs.labels(*group).set(errors.runs)
            for stage in errors.bias:
                self.bias.labels(*group, stage).set(errors.bias[stage])
                self.spread.labels(*group, stage).set(errors.absolute[stage])
        self.calibration.clear()
        for group, value in calibrator.find_group_ratios().items():
            if shown.get(group) == group:
                self.calibration.labels(*group).set(value)

    def count_search(self, advice: Advice, duration_s: float) -> None:
        """Count one search and its duration in seconds."""
        self.advice_duration.observe(duration_s)
        self.plans.inc(advice.plans_evaluated)
        self.model.info(ModelVersion.from_origin(advice.provenance).document())

    def set_queue_metrics(self, plan: PlannedQueue, duration_s: float, now_s: float) -> None:
        """Show the queue plan, the seconds that planning took, and the time of the plan."""
        self.queue_duration.observe(duration_s)
        self.queue_time.set(now_s)
        self.queue_completion.clear()
        self.queue_wait.clear()
        counts = {"running": 0, "waiting": 0, "refused": sum(item.is_left_out for item in plan.refused)}
        if plan.report is not None:
            counts["running"] = int(plan.report.solution.columns.is_running.sum())
            counts["waiting"] = len(plan.report.job_times) - counts["running"]
            for way, totals in {"plan": plan.report.plan, **plan.report.references}.items():
                self.queue_completion.labels(way).set(totals.completion_s)
            for pool, wait_s in _find_longest_waits(plan.report).items():
                self.queue_wait.labels(pool).set(wait_s)
            gap = plan.report.solution.gap
            self.queue_gap.set(math.nan if gap is None else gap)
        for state, count in counts.items():
            self.queue_jobs.labels(state).set(count)

    def set_pool_metrics(self, report: NodesReport, free: Mapping[str, FreeGpus]) -> None:
        """Show the GPUs of the current pools and the nodes without a pool. Unknown numbers have no series."""
        self.left_out.clear()
        for left_out in report.left_out:
            self.left_out.labels(left_out.code).inc(len(left_out.nodes))
        self.capacity.clear()
        for entry in report.entries:
            self.capacity.labels(entry.pool.name, "total").set(entry.gpus_total)
            self.capacity.labels(entry.pool.name, "allocatable").set(entry.gpus_allocatable)
            if entry.pool.name in free:
                self.capacity.labels(entry.pool.name, "free").set(free[entry.pool.name].gpus)


def _find_longest_waits(report: QueueReport) -> dict[str, float]:
    """Return the seconds until the last waiting job of each pool starts, by name of the pool."""
    solution, waits = report.solution, dict[str, float]()
    for row in report.job_times:
        if not solution.columns.is_running[row.job]:
            pool = solution.columns.options[solution.option[row.job]].pool
            waits[pool] = max(waits.get(pool, 0.0), row.start_s)
    return waits
