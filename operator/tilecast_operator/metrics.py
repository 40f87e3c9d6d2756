"""The operator's metrics: prefix `tilecast_`, base units, never the name of a job in a label."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

import tilecast
from tilecast.advise import Advice
from tilecast.nodes import NodesReport
from tilecast.render import document
from tilecast_operator.answer import REASONS, Answer, reason
from tilecast_operator.free_gpus import Free
from tilecast_operator.observed.learner import Learner, Score
from tilecast_operator.observed.reports import OUTCOMES, SOURCES, error
from tilecast_operator.queue_rows import PlannedQueue

WATCHED = ("nodes", "gpupools", "trainingjobs")
"""Resources that are always watched."""

OWN_RUNS = ("own", "successor", "relative")
"""Whose measured run corrects a job: its own, one of the same workload, one of another workload under its name."""
_SEARCHES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
RUN_REPORTS = 3
"""Reports of a job by which it is judged, once."""
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_ANSWERS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
_SIGNED = (*(-bound for bound in reversed(_RATIOS[:-2])), 0.0, *_RATIOS)
"""A forecast of nothing errs by -1, so that lower bounds end there."""


class Metrics:
    """Every instrument, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(namespace="tilecast", registry=registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        group = ["gpu", "precision", "family"]
        staged = [*group, "stage"]
        text = "Advice written to a job, by reason of its Ready condition."
        self.recommendations = counter("tilecast_recommendations", text, ["result"])
        text = "Recommendations that replaced another one, by the new reason."
        self.changes = counter("tilecast_recommendation_changes", text, ["reason"])
        text = "Forecast step of written recommendations."
        self.predicted = histogram("tilecast_predicted_step_seconds", text, group, buckets=_SECONDS)
        text = "Measured steps of accepted reports."
        self.observed = histogram("tilecast_observed_step_seconds", text, group, buckets=_SECONDS)
        text = "Signed relative error, (predicted - observed) / observed, of every accepted report."
        self.error = histogram("tilecast_prediction_relative_error_ratio", text, staged, buckets=_SIGNED)
        text = "Absolute relative error of every accepted report."
        self.absolute = histogram("tilecast_prediction_absolute_relative_error_ratio", text, staged, buckets=_RATIOS)
        text = "Accepted reports, by whether the 90 % range of the forecast holds them."
        self.interval = counter("tilecast_prediction_interval_observations", text, [*group, "covered"])
        text = "Jobs with three reports, by whether the 90 % range of the forecast holds their median."
        self.interval_runs = counter("tilecast_prediction_interval_runs", text, [*group, "covered"])
        text = "Reports of measured steps, by source and what became of them."
        self.observations = counter("tilecast_observations", text, ["source", "outcome"])
        text = "Jobs with a measured step, by whether they run as recommended."
        self.followed = counter("tilecast_recommendation_followed", text, ["followed"])
        text = (
            "GPU-seconds that measured steps of jobs which follow the advice took less than their baseline's forecast."
        )
        self.saved = counter("tilecast_advice_saved_gpu_seconds", text)
        text = "Time to search one workload over all pools."
        self.advice_duration = histogram("tilecast_advice_duration_seconds", text, buckets=_SEARCHES)
        self.plans = counter("tilecast_plans_evaluated", "Plans that were priced.")
        text = "Requests that write to the API server, by resource and HTTP outcome."
        self.writes = counter("tilecast_writes", text, ["resource", "outcome"])
        self.retries = counter("tilecast_retries", "Keys that had to be tried again.")
        text = "Keys that are ready or failed the last time, by kind; one that waits for its time is none."
        self.queue = gauge("tilecast_queue_keys", text, ["kind"])
        text = "Time from a job, new or changed, to its written answer."
        self.answers = histogram("tilecast_answer_duration_seconds", text, ["kind"], buckets=_ANSWERS)
        self.leader = gauge("tilecast_leader", "1 in the replica that writes, 0 in the others.")
        text = "GPU nodes that no pool has, by reason."
        self.left_out = gauge("tilecast_unknown_accelerator_nodes", text, ["reason"])
        self.capacity = gauge("tilecast_gpu_capacity", "GPUs of each pool.", ["pool", "state"])
        self.kueue = gauge("tilecast_kueue_info", "What Kueue can do.", ["served", "release", "stop_policy", "gate"])
        text = "Lists and watches of a resource that the API server answered."
        self.watches = counter("tilecast_watch_successes", text, ["resource"])
        self.model = Info("tilecast_model", "The utilization model in use.", registry=registry)
        self.build = Info("tilecast_build", "The version of this program.", registry=registry)
        self.build.info({"version": tilecast.__version__})
        learning = self._add_learning()
        self._add_queue()
        self._count_from_zero()
        queue = (self.queue_jobs, self.queue_completion, self.queue_gap, self.queue_time)
        self._of_the_cluster = (*learning, *queue, self.left_out, self.capacity, self.kueue)
        self._is_leading = True
        self.lead(True)

    def _add_learning(self) -> tuple[Gauge, ...]:
        gauge, group = partial(Gauge, registry=self.registry), ["gpu", "precision", "family"]
        text = "Median signed relative error of the runs that count; calibrated is without the run itself."
        self.bias = gauge("tilecast_prediction_bias_ratio", text, [*group, "stage"])
        text = "Median absolute relative error of the runs that count, one error a run."
        self.spread = gauge("tilecast_prediction_run_absolute_relative_error_ratio", text, [*group, "stage"])
        self.runs = gauge("tilecast_prediction_runs", "Runs that count.", group)
        self.calibration = gauge(
            "tilecast_calibration_ratio", "What raw forecasts of a group are multiplied by.", group
        )
        text = "Runs that are kept of each pool, by whether they count, are superseded, or are in doubt and why."
        self.learnt_runs = gauge("tilecast_learning_runs", text, ["pool", "standing"])
        text = "Namespaces whose say in the forecasts of others is at its bound."
        self.bounded = gauge("tilecast_learning_bounded_namespaces", text)
        text = "TrainingJobs whose advice measured runs correct, by whose run: its own, a successor's, a relative's."
        self.own_runs_jobs = gauge("tilecast_own_runs_jobs", text, ["run"])
        text = "Median change of the step of their best offer by those runs, without its sign."
        self.own_runs_change = gauge("tilecast_own_runs_change_ratio", text, ["run"])
        known = (self.bias, self.spread, self.runs, self.calibration, self.learnt_runs, self.bounded)
        return (*known, self.own_runs_jobs, self.own_runs_change)

    def _add_queue(self) -> None:
        gauge = partial(Gauge, registry=self.registry)
        text = "Time to plan the whole queue, from reading its jobs to the plan."
        self.queue_duration = Histogram(
            "tilecast_queue_advice_duration_seconds", text, registry=self.registry, buckets=_SECONDS
        )
        text = "Jobs of the newest plan of the queue, by what it makes of them."
        self.queue_jobs = gauge("tilecast_queue_advice_jobs", text, ["state"])
        text = "Mean completion time by that plan, and by each reference on the same forecasts."
        self.queue_completion = gauge("tilecast_queue_advice_completion_seconds", text, ["way"])
        text = "How far that plan is behind a bound that no plan can beat, relative to the bound."
        self.queue_gap = gauge("tilecast_queue_advice_gap_ratio", text)
        self.queue_time = gauge("tilecast_queue_advice_timestamp_seconds", "When that plan was made, as Unix time.")

    def _count_from_zero(self) -> None:
        """A counter that begins at one shows no increase."""
        for result in REASONS:
            self.recommendations.labels(result)
        for source, outcome in product(SOURCES, OUTCOMES):
            self.observations.labels(source, outcome)
        for followed in ("true", "false"):
            self.followed.labels(followed)
        for resource in WATCHED:
            self.watches.labels(resource)

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
