"""The operator's metrics: prefix `tilecast_`, base units, never the name of a job in a label."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics

import tilecast
from tilecast.advise import Advice
from tilecast.manifests.nodes import NodesReport
from tilecast.render import document
from tilecast_operator.capacity import Free
from tilecast_operator.report.status import Verdict, reason

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


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

    def count_advice(self, verdict: Verdict, changed: bool) -> None:
        """Count a verdict that was written to a job."""
        self.recommendations.labels(reason(verdict)).inc()
        if changed:
            self.changes.labels(reason(verdict)).inc()
        if isinstance(verdict, Advice) and verdict.best is not None:
            workload = verdict.request.workload
            labels = (verdict.best.pool.gpu.name, workload.precision, workload.model.family)
            self.predicted.labels(*labels).observe(verdict.best.step_s)

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
