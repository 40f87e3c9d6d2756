"""Declarations of all metric families. Names have the prefix `tilecast_` and base units. A job's name is never a label.

A family that is added here is served. docs/metrics.md has a row for each.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from tilecast_operator.observed.reports import OUTCOMES, SOURCES
from tilecast_operator.outcome import REASONS
from tilecast_operator.search_process import CAUSES

WATCHED = ("nodes", "gpupools", "trainingjobs")
"""Resources that are always watched."""

SEARCHES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
ANSWERS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RATIOS = (0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
SIGNED = (*(-bound for bound in reversed(RATIOS[:-1])), 0.0, *RATIOS)
"""Bucket bounds of signed errors. A forecast of 0 has the error -1, the lowest possible."""
GROUP = ("gpu", "precision", "family")
STAGES = ("raw", "calibrated")


class MetricFamilies:
    """All metric families, in their own registry.

    Attributes:
        registry: registry of all families.
        leader_gauges: gauges that would be equal in every replica.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        self.leader_gauges: list[Gauge] = []
        ProcessCollector(namespace="tilecast", registry=registry)

        def counter(name: str, text: str, *labels: str, zero: Sequence[Sequence[str]] = ()) -> Counter:
            """Declare a counter.

            Args:
                name: name of the family.
                text: its description.
                labels: names of its labels.
                zero: known values of each label. Their combinations exist from the start, because a counter whose first
                    value is one shows no increase.
            """
            family = Counter(name, text, labels, registry=registry)
            for values in product(*zero) if zero else ():
                family.labels(*values)
            return family

        def gauge(name: str, text: str, *labels: str, of_the_cluster: bool = False) -> Gauge:
            """Declare a gauge.

            If `of_the_cluster` is set, only the leader shows the gauge, so that sums over replicas are correct.
            """
            family = Gauge(name, text, labels, registry=registry)
            if of_the_cluster:
                self.leader_gauges.append(family)
            return family

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
            """Declare a histogram with the upper bounds of its buckets."""
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        def info(name: str, text: str) -> Info:
            """Declare an info metric. Its labels have the information."""
            return Info(name, text, registry=registry)

        # Forecasts, measured steps and the errors between them.
        self.predicted = histogram(
            "tilecast_predicted_step_seconds", "Forecast step of written recommendations.", "gpu", buckets=SECONDS
        )
        self.observed = histogram(
            "tilecast_observed_step_seconds", "Measured steps of accepted reports.", "gpu", buckets=SECONDS
        )
        self.error = histogram(
            "tilecast_prediction_relative_error_ratio",
            "Signed relative error, (predicted - observed) / observed, of every accepted report.",
            "gpu",
            "stage",
            buckets=SIGNED,
        )
        self.absolute = histogram(
            "tilecast_prediction_absolute_relative_error_ratio",
            "Absolute relative error of every accepted report.",
            "gpu",
            "stage",
            buckets=RATIOS,
        )
        self.interval = counter(
            "tilecast_prediction_interval_observations",
            "Accepted reports, by whether the 90 % range of the forecast holds them.",
            *GROUP,
            "covered",
        )
        self.interval_runs = counter(
            "tilecast_prediction_interval_runs",
            "Jobs with three reports, by whether the 90 % range of the forecast holds their median.",
            *GROUP,
            "covered",
        )
        self.observations = counter(
            "tilecast_observations",
            "Reports of measured steps, by source and what became of them.",
            "source",
            "outcome",
            zero=(SOURCES, OUTCOMES),
        )
        self.followed = counter(
            "tilecast_recommendation_followed",
            "Jobs with a measured step, by whether they run as recommended.",
            "followed",
            zero=(("true", "false"),),
        )
        self.saved = counter(
            "tilecast_advice_saved_gpu_seconds",
            "GPU-seconds that measured steps of jobs which follow the advice took less than their baseline's forecast.",
        )

        # Corrections learned from the runs of the cluster.
        self.bias = gauge(
            "tilecast_prediction_bias_ratio",
            "Median signed relative error of the runs that count; calibrated is without the run itself.",
            *GROUP,
            "stage",
            of_the_cluster=True,
        )
        self.spread = gauge(
            "tilecast_prediction_run_absolute_relative_error_ratio",
            "Median absolute relative error of the runs that count, one error a run.",
            *GROUP,
            "stage",
            of_the_cluster=True,
        )
        self.runs = gauge("tilecast_prediction_runs", "Runs that count.", *GROUP, of_the_cluster=True)
        self.calibration = gauge(
            "tilecast_calibration_ratio",
            "What raw forecasts of a group are multiplied by.",
            *GROUP,
            of_the_cluster=True,
        )
        self.learnt_runs = gauge(
            "tilecast_learning_runs",
            "Runs that are kept of each pool, by whether they count, are superseded, or are in doubt and why.",
            "pool",
            "standing",
            of_the_cluster=True,
        )
        self.bounded = gauge(
            "tilecast_learning_bounded_namespaces",
            "Namespaces whose say in the forecasts of others is at its bound.",
            of_the_cluster=True,
        )
        self.own_runs_jobs = gauge(
            "tilecast_own_runs_jobs",
            "TrainingJobs whose advice measured runs correct, by whose run: its own, a successor's, a relative's.",
            "run",
            of_the_cluster=True,
        )
        self.own_runs_change = gauge(
            "tilecast_own_runs_change_ratio",
            "Median change of the step of their best offer by those runs, without its sign.",
            "run",
            of_the_cluster=True,
        )

        # Answers to jobs.
        self.recommendations = counter(
            "tilecast_recommendations",
            "Advice written to a job, by reason of its Ready condition.",
            "result",
            zero=(REASONS,),
        )
        self.changes = counter(
            "tilecast_recommendation_changes", "Recommendations that replaced another one, by the new reason.", "reason"
        )
        self.advice_duration = histogram(
            "tilecast_advice_duration_seconds", "Time to search one workload over all pools.", buckets=SEARCHES
        )
        self.plans = counter("tilecast_plans_evaluated", "Plans that were priced.")
        self.restarts = counter(
            "tilecast_search_process_restarts",
            "Processes that search or plan the queue and were replaced, by cause: "
            "the search took too long or too much memory, or it died.",
            "cause",
            zero=(CAUSES,),
        )
        self.search_memory = gauge(
            "tilecast_search_process_resident_memory_bytes",
            "Resident memory of the processes that search or plan the queue.",
        )
        self.running_search = gauge(
            "tilecast_search_running_seconds", "How long the oldest search under way has run; 0 when none does."
        )
        self.answers = histogram(
            "tilecast_answer_duration_seconds",
            "Time from a job, new or changed, to its written answer.",
            "kind",
            buckets=ANSWERS,
        )
        self.oldest = gauge(
            "tilecast_oldest_unanswered_seconds",
            "How long the job has waited that has waited longest for its answer.",
            "kind",
            of_the_cluster=True,
        )
        self.over_budget = gauge(
            "tilecast_namespaces_over_search_budget",
            "Namespaces whose searches of the last minute took more than their budget.",
            of_the_cluster=True,
        )
        self.model = info("tilecast_model", "The utilization model in use.")

        # Jobs that wait for us, and what became of them.
        self.placements = counter(
            "tilecast_placements",
            "Jobs in mode Initial, by each value that tilecast.dev/applied was given.",
            "outcome",
        )
        self.held = gauge("tilecast_held_jobs", "Jobs that wait for Tilecast now.", of_the_cluster=True)
        self.oldest_held = gauge(
            "tilecast_oldest_held_seconds",
            "How long the one of them that waits longest has waited; 0 where none waits.",
            of_the_cluster=True,
        )
        self.placement_wait = histogram(
            "tilecast_placement_wait_seconds",
            "Time from a job that waits for Tilecast until it is let go.",
            buckets=ANSWERS,
        )
        self.requeued = counter(
            "tilecast_requeued",
            "Placed jobs that could not start and were released to the other flavors of their ranking.",
        )

        # The plan of the whole queue.
        self.queue_duration = histogram(
            "tilecast_queue_advice_duration_seconds",
            "Time to plan the whole queue, from reading its jobs to the plan.",
            buckets=SECONDS,
        )
        self.queue_jobs = gauge(
            "tilecast_queue_advice_jobs",
            "Jobs of the newest plan of the queue, by what it makes of them.",
            "state",
            of_the_cluster=True,
        )
        self.queue_completion = gauge(
            "tilecast_queue_advice_completion_seconds",
            "Mean completion time by that plan, and by each reference on the same forecasts.",
            "way",
            of_the_cluster=True,
        )
        self.queue_wait = gauge(
            "tilecast_queue_advice_wait_seconds",
            "Longest time until a waiting job starts by that plan, by the pool where it starts.",
            "pool",
            of_the_cluster=True,
        )
        self.queue_gap = gauge(
            "tilecast_queue_advice_gap_ratio",
            "How far that plan is behind a bound that no plan in Kueue's order can beat, relative to the bound.",
            of_the_cluster=True,
        )
        self.queue_time = gauge(
            "tilecast_queue_advice_timestamp_seconds", "When that plan was made, as Unix time.", of_the_cluster=True
        )

        # The cluster, and the operator itself.
        self.writes = counter(
            "tilecast_writes",
            "Requests that write to the API server, by resource and HTTP outcome.",
            "resource",
            "outcome",
        )
        self.quarantined = gauge(
            "tilecast_quarantined_objects",
            "Objects that are set aside, for the operator died while it read them.",
            "kind",
        )
        self.retries = counter("tilecast_retries", "Keys that had to be tried again.")
        self.queue = gauge(
            "tilecast_queue_keys",
            "Keys that are ready or failed the last time, by kind; one that waits for its time is none.",
            "kind",
        )
        self.contended = gauge(
            "tilecast_contended_objects",
            "Objects that another operator of Tilecast answers too, and otherwise: they are left to it for minutes.",
            of_the_cluster=True,
        )
        self.leader = gauge("tilecast_leader", "1 in the replica that writes, 0 in the others.")
        self.left_out = gauge(
            "tilecast_unknown_accelerator_nodes",
            "GPU nodes that no pool has, by reason.",
            "reason",
            of_the_cluster=True,
        )
        self.capacity = gauge("tilecast_gpu_capacity", "GPUs of each pool.", "pool", "state", of_the_cluster=True)
        self.kueue = gauge(
            "tilecast_kueue_info", "What Kueue can do.", "served", "release", "stop_policy", "gate", of_the_cluster=True
        )
        self.holds = gauge("tilecast_holds_jobs", "1 where jobs may wait for this operator before they start, else 0.")
        self.watched = gauge(
            "tilecast_watch_last_event_timestamp_seconds",
            "When the API server last answered a list or a watch of a resource, Unix time.",
            "resource",
        )
        self.build = info("tilecast_build", "The version of this program.")
