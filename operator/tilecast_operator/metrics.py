"""The operator's metrics: prefix `tilecast_`, base units, never the name of a job in a label."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics

import tilecast
from tilecast.advise import Advice
from tilecast.nodes import NodesReport
from tilecast.render import document
from tilecast_operator.answer import Answer, reason
from tilecast_operator.free_gpus import Free
from tilecast_operator.observed.learner import Learner, Score
from tilecast_operator.observed.reports import error

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
_SIGNED = (*(-bound for bound in reversed(_RATIOS[:-2])), 0.0, *_RATIOS)
"""A forecast of nothing errs by -1, so that lower bounds end there."""


class Metrics:
    """Every instrument, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.recommendations = Counter(
            "tilecast_recommendations", "Advice written to a job, by reason of its Ready condition.", ["result"],
            registry=registry,
        )  # fmt: skip
        self.changes = Counter(
            "tilecast_recommendation_changes", "Recommendations that replaced another one, by the new reason.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.predicted = Histogram(
            "tilecast_predicted_step_seconds", "Forecast step of written recommendations.",
            ["gpu", "precision", "family"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        group = ["gpu", "precision", "family"]
        self.observed = Histogram(
            "tilecast_observed_step_seconds", "Measured steps of accepted reports.", group, buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.error = Histogram(
            "tilecast_prediction_relative_error_ratio",
            "Signed relative error, (predicted - observed) / observed, of every accepted report.",
            [*group, "stage"], buckets=_SIGNED, registry=registry,
        )  # fmt: skip
        self.absolute = Histogram(
            "tilecast_prediction_absolute_relative_error_ratio",
            "Absolute relative error of every accepted report.", [*group, "stage"], buckets=_RATIOS, registry=registry,
        )  # fmt: skip
        self.bias = Gauge(
            "tilecast_prediction_bias_ratio",
            "Median signed relative error of the runs that count; calibrated is without the run itself.",
            [*group, "stage"], registry=registry,
        )  # fmt: skip
        self.interval = Counter(
            "tilecast_prediction_interval_observations",
            "Accepted reports, by whether the 90 % range of the forecast holds them.", [*group, "covered"],
            registry=registry,
        )  # fmt: skip
        self.calibration = Gauge(
            "tilecast_calibration_ratio", "What raw forecasts of a group are multiplied by.", group, registry=registry
        )
        self.observations = Counter(
            "tilecast_observations", "Reports of measured steps, by source and what became of them.",
            ["source", "outcome"], registry=registry,
        )  # fmt: skip
        self.followed = Counter(
            "tilecast_recommendation_followed", "Jobs with a measured step, by whether they run as recommended.",
            ["followed"], registry=registry,
        )  # fmt: skip
        self.saved = Counter(
            "tilecast_advice_saved_gpu_seconds",
            "GPU-seconds that measured steps of jobs which follow the advice took less than their baseline's forecast.",
            registry=registry,
        )  # fmt: skip
        self.advice_duration = Histogram(
            "tilecast_advice_duration_seconds", "Time to search one workload over all pools.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), registry=registry,
        )  # fmt: skip
        self.plans = Counter("tilecast_plans_evaluated", "Plans that were priced.", registry=registry)
        self.writes = Counter(
            "tilecast_writes", "Requests that write to the API server, by resource and HTTP outcome.",
            ["resource", "outcome"], registry=registry,
        )  # fmt: skip
        self.retries = Counter("tilecast_retries", "Keys that had to be tried again.", registry=registry)
        self.queue = Gauge("tilecast_queue_keys", "Keys that wait to be worked on.", registry=registry)
        self.left_out = Gauge(
            "tilecast_unknown_accelerator_nodes",
            "GPU nodes that no pool has, by reason.",
            ["reason"],
            registry=registry,
        )
        self.capacity = Gauge("tilecast_gpu_capacity", "GPUs of each pool.", ["pool", "state"], registry=registry)
        self.watch = Gauge(
            "tilecast_watch_last_event_timestamp_seconds", "When the last event of a resource arrived.", ["resource"],
            registry=registry,
        )  # fmt: skip
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
        for stage, predicted_s in (("raw", forecast.raw_s), ("calibrated", forecast.step.target)):
            ratio = error(predicted_s, seconds)
            self.error.labels(*group, stage).observe(ratio)
            self.absolute.labels(*group, stage).observe(abs(ratio))
        covered = forecast.step.lower_bound <= seconds <= forecast.step.upper_bound
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
