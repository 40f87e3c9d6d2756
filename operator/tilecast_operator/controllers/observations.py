"""Receive measured steps from all sources, and compare them with forecasts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tilecast.api import gpu_pool, training_job
from tilecast.api.fields import value_at_path
from tilecast.api.status import TrainingJobStatus
from tilecast.spec import SpecError
from tilecast_operator.controllers.pools import PoolController
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.controllers.scoring import ForecastComparison
from tilecast_operator.controllers.targets import Target
from tilecast_operator.controllers.token_reviews import TokenReviewer
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.objects.documents import OBSERVED
from tilecast_operator.objects.view import View
from tilecast_operator.observed import progress, queries, reports
from tilecast_operator.observed.calibrator import MeasuredForecast
from tilecast_operator.observed.progress import ProgressHistory
from tilecast_operator.observed.reports import RefusedReport, StepReport

log = logging.getLogger("tilecast")

QUERY = ("spec", "observationQuery")
MOST_WAITS = 60
"""Largest multiple of `observe_settle_s` after which the status of a job with many reports is written."""
FLUSH_S = 8.0
"""Longest time to write accepted reports at shutdown, in seconds. A pod has 30 s to end."""
FLUSH_POLL_S = 0.05


class StepReportReceiver:
    """Receiver of step reports. It counts each report once. Belongs to one event loop."""

    def __init__(
        self, context: SharedContext, pools: PoolController, scores: ForecastComparison, reviews: TokenReviewer
    ) -> None:
        self._context = context
        self._pools = pools
        self._scores = scores
        self._reviews = reviews
        self._trainers: StateTable[list[tuple[str, str]]] = context.records.add_table()
        """Metrics that each job's TrainJob last reported."""
        self._courses: StateTable[ProgressHistory] = context.records.add_table()
        """Progress seen so far of each job's TrainJob."""
        self._unwritten: StateTable[bool] = context.records.add_table()
        """Jobs with reports that are not in their status yet."""

    async def put(self, namespace: str, name: str, token: str, body: bytes) -> None:
        """Check the token of a step report that a pod sent by PUT, and compare the report with the forecast.

        Raises:
            RefusedReport: The report is refused. The message says why.
        """
        try:
            review = await self._reviews.review_token(token)
            node, account = reports.read_review_node(review, namespace), reports.read_review_account(review)
            await self._compare_report(
                Key(training_job.KIND, namespace, name), reports.parse_body_report(body, node, account)
            )
            if not self._context.leadership.is_leader:
                raise RefusedReport("unavailable", 503, "another replica leads now; report again later")
        except RefusedReport as refused:
            self._context.metrics.observations.labels("put", refused.outcome).inc()
            raise

    def queries(self) -> Iterator[tuple[Key, str]]:
        """Yield the key of every job with advice, and the Prometheus query for its step time.

        The query comes from the job, or else from its pool, or else from the operator's settings. Only the leader
        yields queries.
        """
        for key in self._context.cache.training_jobs:
            if not self._context.leadership.is_leader:
                return
            seen = self._context.cache.training_jobs.get(key)
            best = None if seen is None else seen.value.status.get("recommendation")
            if seen is None or not best:
                continue
            pool = self._context.cache.pools.get(Key(gpu_pool.KIND, "", str(best["pool"])))
            if (own := value_at_path(seen.value.document, QUERY)) is not None:
                with suppress(SpecError):  # its status says why
                    yield key, self._restrict_query(key, str(own))
                continue
            template = None if pool is None else value_at_path(pool.value.document, QUERY)
            yield key, queries.fill_query(template or self._context.settings.prometheus_query, key.namespace, key.name)

    def find_refusal(self, key: Key, document: Document) -> str | None:
        """Return why a job's step reports are refused or why its Prometheus query is not sent, otherwise None."""
        own = value_at_path(document, QUERY)
        if own is not None and self._context.settings.prometheus_url:
            try:
                self._restrict_query(key, str(own))
            except SpecError as error:
                return self._scores.find_refusal(key) or str(error)
        return self._scores.find_refusal(key)

    def _restrict_query(self, key: Key, template: str) -> str:
        """Return the query of a job, limited to time series of its namespace. Raise SpecError if it is not allowed."""
        if self._context.settings.observation_queries != "jobs":
            raise queries.NOT_ALLOWED
        return queries.restrict_query(template, key.namespace, key.name)

    async def record_sample(self, key: Key, outcome: Any) -> None:
        """Record the step time that Prometheus returned for a job's query."""
        try:
            report = reports.parse_prometheus_report(outcome)
            if report is not None:
                await self._compare_report(key, report)
        except RefusedReport as refused:
            self._context.metrics.observations.labels("prometheus", refused.outcome).inc()
            log.warning("%s: what Prometheus tells does not count: %s", key, refused)

    def needs_pod_log(self, key: Key) -> bool:
        """Return whether no other source has reported a job's step, so that its log may be read."""
        score = self._scores.get_measured_forecast(key)
        return score is None or score.window.latest.source == reports.LOG

    async def record_log_report(self, key: Key, report: StepReport) -> None:
        """Record the step that a job's pod has logged, unless it is known or another source has reported."""
        score = self._scores.get_measured_forecast(key)
        # A process that has just started may read a log that an earlier one has read.
        if not self.needs_pod_log(key) or (score is not None and score.window.has_newest_report(report)):
            return
        try:
            await self._compare_report(key, report)
        except RefusedReport as refused:
            self._context.metrics.observations.labels(report.source, refused.outcome).inc()
            log.warning("%s: what its pod has logged does not count: %s", key, refused)

    async def read_annotations(
        self, key: Key, seen: CachedObject[View], status: TrainingJobStatus, target: Target | None
    ) -> None:
        """Record the step times in the annotations of a job and of its target."""
        text = dict(seen.value.inputs).get(OBSERVED, None if target is None else target.observed)
        is_gone = target is not None and target.is_gone  # what it reported stays valid
        if text is None and not is_gone:
            self._scores.withdraw_annotation(key, seen.uid)
        if status.recommendation is None or not self._context.leadership.is_leader:
            return
        pools = self._pools.find_report(key.namespace)
        if not is_gone and text is not None and pools is not None:
            await self._scores.compare_annotation(key, seen, pools, text)
        if target is not None:
            await self._compare_trainer_report(key, target.trainer)
            if not reports.list_step_metrics(target.trainer):
                await self._compare_progress(key, target.trainer, _count_steps(seen.value.document))

    def mark_written(self, key: Key, score: MeasuredForecast | None) -> None:
        """Record that the status of a job now shows its measured steps."""
        if self._scores.get_measured_forecast(key) is score:
            self._unwritten.pop(key, None)

    async def flush_reports(self) -> None:
        """Wait until the statuses show every accepted report, for at most `FLUSH_S` seconds."""
        for key in self._unwritten:
            self._context.runtime.add(key)
        try:
            async with asyncio.timeout(FLUSH_S):
                while self._unwritten and self._context.leadership.is_leader:
                    await asyncio.sleep(FLUSH_POLL_S)
        except TimeoutError:
            log.warning("%s jobs have reports that could not be written", len(self._unwritten))

    async def _compare_trainer_report(self, key: Key, status: Document) -> None:
        """Compare the step in the status of a job's TrainJob with the forecast, unless that was done before."""
        metrics, before = reports.list_step_metrics(status), self._trainers.get(key)
        if not metrics or before == metrics:
            return
        self._trainers[key] = metrics
        try:
            report, score = reports.parse_trainer_report(status), self._scores.get_measured_forecast(key)
            # A process that has just started may see a report that an earlier one took.
            is_taken = (
                report is not None and before is None and score is not None and score.window.has_newest_report(report)
            )
            if report is not None and not is_taken:
                await self._compare_report(key, report)
        except RefusedReport as refused:
            self._context.metrics.observations.labels("trainJob", refused.outcome).inc()
            log.warning("%s: what its TrainJob tells does not count: %s", key, refused)

    async def _compare_progress(self, key: Key, status: Document, planned_steps: int | None) -> None:
        """Measure the step from a TrainJob's progress since its last report, and compare it with the forecast."""
        now = progress.read_progress(status, planned_steps)
        if now is None:
            self._courses.pop(key, None)
            return
        report, self._courses[key] = progress.measure_progress(self._courses.get(key), now)
        if report is not None:
            try:
                await self._compare_report(key, report)
            except RefusedReport as refused:
                self._context.metrics.observations.labels(progress.SOURCE, refused.outcome).inc()
                log.warning("%s: the progress of its TrainJob does not count: %s", key, refused)

    async def _compare_report(self, key: Key, report: StepReport) -> None:
        """Compare a report with its job's forecast, and schedule the job after a delay.

        The delay grows with the number of reports.
        """
        pools = self._pools.find_report(key.namespace)
        score = await self._scores.compare_report(key, self._context.cache.training_jobs.get(key), pools, report)
        self._unwritten[key] = True
        self._context.runtime.add(key, self._context.settings.observe_settle_s * min(score.window.samples, MOST_WAITS))


def _count_steps(document: Document) -> int | None:
    """Return the number of steps of a TrainingJob's whole run, or None if the document does not state it."""
    training = value_at_path(document, ("spec", "training"))
    if not isinstance(training, dict):
        return None
    steps, tokens = training.get("steps"), training.get("tokens")
    per_step = (training.get("globalBatchSize") or 0) * (training.get("sequenceLength") or 0)
    return steps or (-(-tokens // per_step) if tokens and per_step else None)
