"""Assemble the operator from the cache, the writer, the runtime and the controllers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from tilecast.advice import advise
from tilecast.api import gpu_pool, pool_learning, training_job
from tilecast_operator.advisor import Advisor, ReadRequest
from tilecast_operator.controllers.admission import AdmissionController
from tilecast_operator.controllers.advice_waits import AdviceWaits
from tilecast_operator.controllers.advisor_client import AdvisorClient
from tilecast_operator.controllers.capacity import FreeGpuCounter
from tilecast_operator.controllers.contention import WriteContention
from tilecast_operator.controllers.destinations import BetterPoolFinder
from tilecast_operator.controllers.device_use import DeviceUseReader
from tilecast_operator.controllers.estimates import EstimateWriter
from tilecast_operator.controllers.job_advice import JobAdvisor
from tilecast_operator.controllers.jobs import JobController
from tilecast_operator.controllers.kueue_features import KueueDetector
from tilecast_operator.controllers.learning import PoolLearningController
from tilecast_operator.controllers.observations import StepReportReceiver
from tilecast_operator.controllers.placement import Placer
from tilecast_operator.controllers.planned_jobs import QueuePositions
from tilecast_operator.controllers.pod_logs import PodLogReader
from tilecast_operator.controllers.pools import NODES, PoolController
from tilecast_operator.controllers.quarantined import QuarantineController
from tilecast_operator.controllers.queue_jobs import QueueJobReader
from tilecast_operator.controllers.queue_plans import QueuePlanController
from tilecast_operator.controllers.requests import JobRequestIndex
from tilecast_operator.controllers.requeues import RequeueController
from tilecast_operator.controllers.runtime import Runtime, SharedContext
from tilecast_operator.controllers.scoring import ForecastComparison
from tilecast_operator.controllers.shards import NamespaceShard
from tilecast_operator.controllers.targets import TargetReader
from tilecast_operator.controllers.token_reviews import TokenReviewer
from tilecast_operator.controllers.training_jobs import MeasuredTargetReader, StatusWriter, TrainingJobController
from tilecast_operator.interruptions import InterruptedSearches
from tilecast_operator.kube.cache import CacheTable
from tilecast_operator.kube.client import Api
from tilecast_operator.kube.discovery import ServedApis
from tilecast_operator.kube.documents import WriterIdentity
from tilecast_operator.kube.journal import Journal
from tilecast_operator.kube.lease import Election, Leadership
from tilecast_operator.kube.lists import ListCheck
from tilecast_operator.kube.times import format_time
from tilecast_operator.kube.writer import Writer
from tilecast_operator.metrics import Metrics
from tilecast_operator.objects.documents import ADVICE_KEYS, COMPONENT, LEASE_ADDRESS
from tilecast_operator.objects.kinds import KINDS
from tilecast_operator.objects.quarantine import open_quarantine
from tilecast_operator.objects.tables import Cache
from tilecast_operator.queue_planner import QueuePlanner
from tilecast_operator.relay import ReportForwarder
from tilecast_operator.report_guard import ReportGuard
from tilecast_operator.search_process import SearchLimits
from tilecast_operator.searches import Advise, SearchRunner
from tilecast_operator.selector import LabelSelector
from tilecast_operator.settings import Settings
from tilecast_operator.timings import ControllerDelays

WORKERS = 512
"""Number of keys that are worked on at once, one namespace having at most half.

It is so large that a job waits only for its own search, which jobs with equal requests share.
"""

ALTERNATIVES = re.compile(r"(; known: |, or use one of ).*", re.DOTALL)
"""Pattern of the end of an error's text that lists what exists instead, such as the present pools."""

DEFAULT_TIMINGS = ControllerDelays()


class OperatorParts:
    """All parts of the operator, which run in one event loop.

    Args:
        settings: Settings of the operator.
        client: Client of the API server.
        metrics: Metrics of the operator.
        search: Function that searches for plans.
        clock: Unix time, in seconds.
        read: Function that returns the request that a spec describes.
        timings: Waits of the controllers.
    """

    def __init__(
        self,
        settings: Settings,
        client: Api,
        metrics: Metrics,
        search: Advise = advise,
        clock: Callable[[], float] = time.time,
        read: ReadRequest = training_job.to_request,
        timings: ControllerDelays = DEFAULT_TIMINGS,
    ) -> None:
        self.leadership = leadership = Leadership(is_alone=not settings.lease)
        self.election = _make_election(settings, client, leadership) if settings.lease else None
        client.fence = leadership.require_leadership
        metrics.set_leadership_metric(leadership.is_leader)
        leadership.add_listener(metrics.set_leadership_metric)
        metrics.holds.set(settings.jobs and settings.place)
        self.journal = journal = Journal(settings.journal, KINDS)
        quarantine = open_quarantine(settings.journal, journal.suspects, clock)
        journal.isolate(quarantine.suspects)
        cache = Cache(journal, quarantine)
        author = WriterIdentity(COMPONENT, settings.instance, ADVICE_KEYS, ALTERNATIVES)
        writer = Writer(
            client,
            cache,
            leadership,
            metrics.count_write,
            lambda: format_time(clock()),
            author,
            KINDS,
            settings.writers,
        )
        selector = LabelSelector.from_json(settings.namespace_selector, "TILECAST_NAMESPACE_SELECTOR")
        runtime = Runtime(settings, metrics, journal)
        cache.set_removal_callback(runtime.records.drop_record)
        runtime.records.may_exist = cache.may_exist
        answers = AdviceWaits(runtime.records, metrics.answers, metrics.oldest, clock)
        context = SharedContext(
            settings, timings, client, cache, leadership, writer, runtime, metrics, answers, clock, journal
        )
        self.settings, self.metrics, self.cache, self.runtime = settings, metrics, cache, runtime
        if selector is not None:
            NamespaceShard(context, selector)
        searches = _make_search_runner(settings, search, metrics, journal)
        self.queue_planner = queue_planner = QueuePlanner(
            has_process=settings.queue and settings.search_processes > 0,
            memory_mib=settings.search_memory_mib,
            restarted=lambda cause: metrics.restarts.labels(cause).inc(),
        )
        metrics.search_memory.set_function(lambda: searches.resident_bytes() + queue_planner.resident_bytes())
        self.advisor = advisor = Advisor(
            client,
            searches,
            metrics.count_search,
            settings.advisors,
            settings.advice_cache,
            InterruptedSearches(clock),
            journal, read,
        )  # fmt: skip
        self.lists = _make_list_check(settings, timings, client, cache)
        self.capacity = capacity = FreeGpuCounter(context)
        self.learning = learning = PoolLearningController(context, self.lists)
        self.pools = pools = PoolController(context, advisor, capacity, self.lists, learning)
        scores = ForecastComparison(context, advisor, learning)
        self.observations = observations = StepReportReceiver(
            context, pools, scores, TokenReviewer(client, timings.review_holds_s)
        )
        self.guard = ReportGuard(
            settings.reports_per_client, clock, lambda outcome: metrics.observations.labels("put", outcome).inc()
        )
        self.relay = ReportForwarder(leadership, self.election, settings.tls_certificate)
        self.requests = requests = JobRequestIndex(cache, runtime.add)
        self.devices = DeviceUseReader(context, requests)
        self.planned = planned = QueuePositions(runtime.records, is_on=settings.queue)
        discovery, contention = ServedApis(client), WriteContention(context)
        job_answers = AdvisorClient(context, advisor, pools, learning)
        advice = JobAdvisor(context, job_answers, requests, planned, contention)
        self.logs = PodLogReader(context, requests, observations, advice)
        self.kueue = kueue_check = KueueDetector(context, discovery)
        placer = Placer(context, discovery, advice, kueue_check)
        self.admission = admission = AdmissionController(context, placer, requests, advice)
        self.targets = targets = TargetReader(context, discovery, requests, advice, admission)
        self.estimates: EstimateWriter | None = None
        if settings.queue:
            queue_jobs = QueueJobReader(context, advice)
            if settings.queue_estimates and settings.jobs and settings.read_kueue:
                self.estimates = EstimateWriter(context, kueue_check, planned)
            QueuePlanController(context, capacity, requests, queue_jobs, planned, queue_planner, self.estimates)
        TrainingJobController(
            context,
            job_answers,
            MeasuredTargetReader(targets, observations, scores, self.devices),
            BetterPoolFinder(context, job_answers, capacity),
            StatusWriter(context, learning, planned, contention),
        )
        if settings.jobs:
            requeues = RequeueController(context, placer, advice, admission, kueue_check)
            JobController(context, requests, advice, admission, requeues)
        self.quarantined = QuarantineController(context)
        leadership.add_listener(self._on_leadership_change)

    def start(self) -> None:
        """Start the workers and the background tasks. A worker loads the model."""
        self.runtime.start(WORKERS)
        self.runtime.add_task(self.lists.compare_counts(self.settings.watch_check_s), "watch-check")
        self.runtime.add_task(self.quarantined.run_checks(), "quarantine")
        is_kueue_written = (self.settings.jobs and self.settings.place) or self.estimates is not None
        if self.settings.read_kueue and is_kueue_written:
            self.runtime.add_task(self.kueue.run_checks(), "kueue-check")
        if self.settings.jobs and self.settings.read_logs:
            self.runtime.add_task(self.logs.run_polls(), "logs")
        if self.election is not None:
            self.runtime.add_task(self.election.run_election(), "election")
        self.runtime.add(NODES, self.settings.settle_s)

    async def stop(self) -> None:
        """Write the accepted reports, then stop everything.

        Other pending writes are computed again at the next start, or by the next leader.
        """
        await self.observations.flush_reports()
        self.leadership.stop_leading()
        await self.runtime.stop()
        await self.admission.stop()
        if self.election is not None:
            await self.election.release_lease()
        await self.relay.close()
        self.advisor.stop()
        self.queue_planner.stop()
        self.journal.close()

    def _on_leadership_change(self, is_leading: bool) -> None:
        if is_leading:
            cache = self.cache
            everything = (NODES, *cache.pools, *cache.training_jobs, *cache.jobs)
            self.runtime.queue_all_keys(everything)

    def set_pod_usage(self, used: Mapping[str, int] | None) -> None:
        """Set the number of GPUs that pods hold, by node. None means unknown."""
        self.capacity.set_pod_usage(used)

    def find_health_problem(self) -> str | None:
        """Return why the process should be restarted, or None."""
        return self.runtime.find_health_problem() or self.lists.find_stale_watch(self.settings.stall_s)

    def find_readiness_problem(self) -> str | None:
        """Return why there can be no advice yet, or None."""
        return self.advisor.problem or (None if self.pools.report is not None else "nodes are not read yet")


def _make_election(settings: Settings, client: Api, leadership: Leadership) -> Election:
    host = f"[{settings.pod_ip}]" if ":" in settings.pod_ip else settings.pod_ip
    scheme = "https" if settings.tls_certificate else "http"
    address = f"{scheme}://{host}:{settings.listen_port}" if host else ""
    lease = settings.lease, settings.instance, address, LEASE_ADDRESS, settings.lease_s
    return Election(client, *lease, leadership)


def _make_search_runner(settings: Settings, search: Advise, metrics: Metrics, journal: Journal) -> SearchRunner:
    limits = SearchLimits(settings.search_s, settings.search_memory_mib)
    searches = SearchRunner(
        search,
        settings.advisors,
        settings.search_processes,
        limits,
        lambda cause: metrics.restarts.labels(cause).inc(),
        settings.search_budget_s,
        journal,
    )
    metrics.running_search.set_function(searches.find_longest_running_s)
    metrics.over_budget.set_function(lambda: len(searches.turns.find_namespaces_over_budget()))
    return searches


def _make_list_check(settings: Settings, timings: ControllerDelays, client: Api, cache: Cache) -> ListCheck:
    tables: dict[str, CacheTable[Any]] = {
        "Node": cache.nodes,
        gpu_pool.KIND: cache.pools,
        training_job.KIND: cache.training_jobs,
    }
    if settings.read_resource_slices:
        tables["ResourceSlice"] = cache.slices
    if settings.learning:
        tables[pool_learning.KIND] = cache.learnings
    first = ("Node", gpu_pool.KIND, "ResourceSlice", pool_learning.KIND)
    chosen = (("Node", settings.node_selector), (training_job.KIND, settings.namespace_selector))
    uncounted = tuple(kind for kind, selector in chosen if selector)
    return ListCheck(client, tables, first, uncounted, KINDS, timings.first_list_s, timings.first_list_uncounted_s)
