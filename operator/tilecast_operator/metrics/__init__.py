"""The operator's metrics: prefix `tilecast_`, base units, never the name of a job in a label."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

import tilecast
from tilecast.advise import Advice
from tilecast.nodes import NodesReport
from tilecast.render import document
from tilecast_operator.answer import Answer, reason
from tilecast_operator.free_gpus import Free
from tilecast_operator.metrics.declared import build_all
from tilecast_operator.metrics.families import WATCHED, MetricFamilies
from tilecast_operator.observed.learner import Learner, Score
from tilecast_operator.observed.reports import error
from tilecast_operator.queue_rows import PlannedQueue

OWN_RUNS = ("own", "successor", "relative")
"""Whose measured run corrects a job: its own, one of the same workload, one of another workload under its name."""
RUN_REPORTS = 3
"""Reports of a job by which it is judged, once."""


class Metrics(MetricFamilies):
    """Every instrument, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="tilecast", registry=self.registry)
        self._of_the_cluster = build_all(self, self.registry)
        self.build.info({"version": tilecast.__version__})
        for resource in WATCHED:
            # A resource that is never answered is as old as the process.
            self.watched.labels(resource).set_to_current_time()
        self._is_leading = True
        self.lead(True)

    def lead(self, is_leading: bool) -> None:
        """Show whether this replica leads. What would be the same in every replica is shown by that one alone, so that
        sums over replicas are right."""
        self.leader.set(is_leading)
        if is_leading != self._is_leading:
            self._is_leading = is_leading
            for collector in self._of_the_cluster:
                (self.registry.register if is_leading else self.registry.unregister)(collector)

    def count_write(self, resource: str, outcome: str) -> None:
        """Count what became of a request that writes: `ok`, the HTTP status of a refusal, or `unreachable`."""
        self.writes.labels(resource, outcome).inc()

    def count_advice(self, answer: Answer, changed: bool) -> None:
        """Count an answer that was written to a job."""
        self.recommendations.labels(reason(answer)).inc()
        if changed:
            self.changes.labels(reason(answer)).inc()
        if isinstance(answer, Advice) and answer.best is not None:
            workload = answer.request.workload
            group = (answer.best.pool.gpu.name, workload.precision, workload.model.family)
            self.predicted.labels(*group).observe(answer.best.step_s)
            # The first report of a group is an increase only where its counters were zero before.
            self.observed.labels(*group)
            for stage in ("raw", "calibrated"):
                self.error.labels(*group, stage)
                self.absolute.labels(*group, stage)
            for covered in ("true", "false"):
                self.interval.labels(*group, covered)
                self.interval_runs.labels(*group, covered)

    def count_observation(self, score: Score, seconds: float, steps: int | None, baseline: float | None) -> None:
        """Count an accepted report.

        Args:
            score: the job it is of.
            seconds: the step that it tells.
            steps: how many of them it is of, where it says so.
            baseline: GPU-seconds of a step of the job's baseline, where it has one.
        """
        forecast = score.forecast
        group = forecast.group[:3]
        self.observed.labels(*group).observe(seconds)
        for stage, predicted_s in (("raw", forecast.raw_seconds), ("calibrated", forecast.step_seconds.target)):
            ratio = error(predicted_s, seconds)
            self.error.labels(*group, stage).observe(ratio)
            self.absolute.labels(*group, stage).observe(abs(ratio))
        for counting, observed_s in (
            (self.interval, seconds),
            *([(self.interval_runs, score.window.seconds)] if score.window.samples == RUN_REPORTS else []),
        ):
            covered = forecast.step_seconds.lower_bound <= observed_s <= forecast.step_seconds.upper_bound
            counting.labels(*group, "true" if covered else "false").inc()
        if score.window.samples == 1:
            self.followed.labels("true" if forecast.followed else "false").inc()
        if forecast.followed and steps and baseline is not None:
            self.saved.inc(max(0.0, baseline - seconds * forecast.gpus) * steps)

    def show_kueue(self, served: str, release: str, stop_policy: bool, gate: str) -> None:
        """Show what Kueue can do; nothing where none is served."""
        self.kueue.clear()
        if served:
            self.kueue.labels(served, release, "true" if stop_policy else "false", gate).set(1)

    def show_learning(self, learner: Learner) -> None:
        """Show whose runs count."""
        self.learnt_runs.clear()
        for labels, count in learner.standing().items():
            self.learnt_runs.labels(*labels).set(count)
        self.bounded.set(len(learner.bounded))

    def show_calibration(self, learner: Learner) -> None:
        """Show what the runs teach now."""
        for instrument in (self.bias, self.spread, self.runs):
            instrument.clear()
        for group, errors in learner.errors().items():
            self.runs.labels(*group).set(errors.runs)
            for stage in errors.bias:
                self.bias.labels(*group, stage).set(errors.bias[stage])
                self.spread.labels(*group, stage).set(errors.absolute[stage])
        self.calibration.clear()
        for group, value in learner.ratios().items():
            self.calibration.labels(*group).set(value)

    def count_search(self, advice: Advice, duration_s: float) -> None:
        """Count one search."""
        self.advice_duration.observe(duration_s)
        self.plans.inc(advice.plans_evaluated)
        self.model.info(document.model(advice))

    def show_queue(self, plan: PlannedQueue, duration_s: float, now_s: float) -> None:
        """Show a plan of the queue, how long it took and when it was made."""
        self.queue_duration.observe(duration_s)
        self.queue_time.set(now_s)
        self.queue_completion.clear()
        counts = {"running": 0, "waiting": 0, "refused": sum(item.is_left_out for item in plan.refused)}
        if plan.report is not None:
            counts["running"] = int(plan.report.solution.columns.is_running.sum())
            counts["waiting"] = len(plan.report.places) - counts["running"]
            for way, totals in {"plan": plan.report.plan, **plan.report.references}.items():
                self.queue_completion.labels(way).set(totals.completion_s)
            gap = plan.report.solution.gap
            self.queue_gap.set(math.nan if gap is None else gap)
        for state, count in counts.items():
            self.queue_jobs.labels(state).set(count)

    def show_pools(self, report: NodesReport, free: Mapping[str, Free]) -> None:
        """Show the pools as they are now; what is gone goes, and what is not known is absent."""
        self.left_out.clear()
        for left_out in report.left_out:
            self.left_out.labels(left_out.code).inc(len(left_out.nodes))
        self.capacity.clear()
        for entry in report.entries:
            self.capacity.labels(entry.pool.name, "total").set(entry.gpus_total)
            self.capacity.labels(entry.pool.name, "allocatable").set(entry.gpus_allocatable)
            if entry.pool.name in free:
                self.capacity.labels(entry.pool.name, "free").set(free[entry.pool.name].gpus)
