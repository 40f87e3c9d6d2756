"""The operator's metrics: prefix `tilecast_`, base units, never the name of a job in a label."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics

import tilecast
from tilecast.advise import Advice
from tilecast.nodes import NodesReport
from tilecast.render import document
from tilecast_operator.answer import Answer, reason
from tilecast_operator.free_gpus import Free
from tilecast_operator.observed.learner import Learner, Score
from tilecast_operator.observed.reports import error

_SEARCHES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
_SIGNED = (*(-bound for bound in reversed(_RATIOS[:-2])), 0.0, *_RATIOS)
"""A forecast of nothing errs by -1, so that lower bounds end there."""


class Metrics:
    """Every instrument, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
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
        text = "Median signed relative error of the runs that count; calibrated is without the run itself."
        self.bias = gauge("tilecast_prediction_bias_ratio", text, staged)
        text = "Accepted reports, by whether the 90 % range of the forecast holds them."
        self.interval = counter("tilecast_prediction_interval_observations", text, [*group, "covered"])
        self.calibration = gauge(
            "tilecast_calibration_ratio", "What raw forecasts of a group are multiplied by.", group
        )
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
        self.queue = gauge("tilecast_queue_keys", "Keys that wait to be worked on.")
        text = "GPU nodes that no pool has, by reason."
        self.left_out = gauge("tilecast_unknown_accelerator_nodes", text, ["reason"])
        self.capacity = gauge("tilecast_gpu_capacity", "GPUs of each pool.", ["pool", "state"])
        text = "When the last event of a resource arrived."
        self.watch = gauge("tilecast_watch_last_event_timestamp_seconds", text, ["resource"])
        self.model = Info("tilecast_model", "The utilization model in use.", registry=registry)
        self.build = Info("tilecast_build", "The version of this program.", registry=registry)
        self.build.info({"version": tilecast.__version__})

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
            labels = (answer.best.pool.gpu.name, workload.precision, workload.model.family)
            self.predicted.labels(*labels).observe(answer.best.step_s)

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
        covered = forecast.step_seconds.lower_bound <= seconds <= forecast.step_seconds.upper_bound
        self.interval.labels(*group, "true" if covered else "false").inc()
        if score.window.samples == 1:
            self.followed.labels("true" if forecast.followed else "false").inc()
        if forecast.followed and steps and baseline is not None:
            self.saved.inc(max(0.0, baseline - seconds * forecast.gpus) * steps)

    def show_calibration(self, learner: Learner) -> None:
        """Show what the runs teach now."""
        self.bias.clear()
        for labels, value in learner.biases().items():
            self.bias.labels(*labels).set(value)
        self.calibration.clear()
        for group, value in learner.ratios().items():
            self.calibration.labels(*group).set(value)

    def count_search(self, advice: Advice, duration_s: float) -> None:
        """Count one search."""
        self.advice_duration.observe(duration_s)
        self.plans.inc(advice.plans_evaluated)
        self.model.info(document.model(advice))

    def show_pools(self, report: NodesReport, free: Mapping[str, Free]) -> None:
        """Show the pools as they are now; what is gone goes, and what is not known is absent."""
        self.left_out.clear()
        for left_out in report.left_out:
            self.left_out.labels(left_out.code).inc(len(left_out.nodes))
        self.capacity.clear()
        for found in report.found:
            self.capacity.labels(found.pool.name, "total").set(found.gpus_total)
            self.capacity.labels(found.pool.name, "allocatable").set(found.gpus_allocatable)
            if found.pool.name in free:
                self.capacity.labels(found.pool.name, "free").set(free[found.pool.name].gpus)
