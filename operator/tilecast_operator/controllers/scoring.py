"""Compare measured steps with the frozen forecast for the pool and plan that ran.

A score is a frozen forecast together with measured steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tilecast.advice.measured import RunForecast
from tilecast.api.base import round_to_six_digits
from tilecast.api.status import FrozenForecast, Recommendation, StepSeconds, TrainingJobStatus
from tilecast.hardware import normalise_product
from tilecast.nodes import NodesReport
from tilecast.spec import PartialPlan, SpecError
from tilecast_operator.advisor import Advisor
from tilecast_operator.controllers.learning import PoolLearningController
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.kinds import Key
from tilecast_operator.objects.view import View
from tilecast_operator.observed import reports
from tilecast_operator.observed.calibrator import MeasuredForecast
from tilecast_operator.observed.reports import CompleteForecast, RefusedReport, StepReport
from tilecast_operator.report.job_status import parse_status

Origin: TypeAlias = tuple[str | None, int | None, PartialPlan | None]
"""Pool, GPUs and plan named by a report. None for those that it does not name."""


@dataclass(slots=True)
class _MeasuredJob:
    """Measured steps of a job, the placement in its last report, and its annotation if that was refused."""

    score: MeasuredForecast | None = None
    origin: Origin | None = None
    """Pool, GPUs and plan of the last report for which a forecast was made."""
    refused: tuple[str, str] | None = None
    """Refused annotation, and the reason."""


class ForecastComparison:
    """Comparison of the measured steps of running jobs with their forecasts. Runs are passed on to learning."""

    def __init__(self, context: SharedContext, advisor: Advisor, learning: PoolLearningController) -> None:
        self._context = context
        self._advisor = advisor
        self._learning = learning
        self._measured = context.records.add_table(_MeasuredJob)

    def get_measured_forecast(self, key: Key) -> MeasuredForecast | None:
        """Return the measured steps of a job and their forecast, or None if no step was measured."""
        return (self._measured.get(key) or _MeasuredJob()).score

    def load_measured_forecast(self, key: Key, seen: CachedObject[View], *, is_leader: bool) -> bool:
        """Load the measured steps and forecast from a job's status. Return whether they are new.

        The leader loads them only if they have more samples than those in memory.
        """
        score, known = (
            MeasuredForecast.from_status(parse_status(seen.value.status_json)),
            self.get_measured_forecast(key),
        )
        if score is None or score == known:
            return False
        if is_leader and known is not None:
            # A status that is not written yet may still show the steps of a log which another source has replaced.
            is_replaced = score.window.latest.source == reports.LOG != known.window.latest.source
            if is_replaced or known.window.samples >= score.window.samples:
                return False
        self._measured.get_or_make(key).score = score
        self._learning.restore_run(key, seen.uid, score)
        return True

    def withdraw_annotation(self, key: Key, uid: str) -> None:
        """Forget the measured steps that came from an annotation which was removed from the job."""
        known = self.get_measured_forecast(key)
        if known is not None and known.window.latest.source == "annotation":
            del self._measured[key]
            self._learning.forget_run(key, uid)

    def find_refusal(self, key: Key) -> str | None:
        """Return why the annotation of a job was refused, or None."""
        refused = (self._measured.get(key) or _MeasuredJob()).refused
        return None if refused is None else refused[1]

    async def compare_annotation(self, key: Key, seen: CachedObject[View], pools: NodesReport, text: str) -> bool:
        """Compare the step time in a job's annotation with the forecast. Return whether the comparison was made.

        The result is False if the same annotation was compared or refused before, or if it is refused now.
        """
        part = self._measured.get(key) or _MeasuredJob()
        is_taken = part.score is not None and part.score.window.latest.annotation == text[:32]
        if is_taken or (part.refused is not None and part.refused[0] == text):
            return False
        try:
            await self.compare_report(key, seen, pools, reports.parse_annotation_report(text))
        except RefusedReport as refused:
            self._context.metrics.observations.labels("annotation", refused.outcome).inc()
            now = self._context.cache.training_jobs.get(key)
            if now is not None and now.uid == seen.uid:  # nothing is known of another job of its name
                self._measured.get_or_make(key).refused = (text, str(refused))
            return False
        return True

    async def compare_report(
        self, key: Key, seen: CachedObject[View] | None, pools: NodesReport | None, report: StepReport
    ) -> MeasuredForecast:
        """Compare a report with the forecast of its job. Return all measured steps so far and the forecast.

        Raises:
            RefusedReport: The report does not count. The message says why.
        """
        if seen is None:
            raise RefusedReport("unknown_job", 404, f"there is no TrainingJob {key.name} in namespace {key.namespace}")
        status = parse_status(seen.value.status_json)
        best = status.recommendation
        if best is None or pools is None:
            raise RefusedReport("no_advice", 409, f"TrainingJob {key.name} has no forecast to hold a step against")
        known = self.get_measured_forecast(key)
        frozen = known.forecast if known else status.forecast
        forecast, origin = await self._find_forecast(key, seen.value, pools, report, best, frozen)
        now = self._context.cache.training_jobs.get(key)
        if now is None or now.uid != seen.uid:
            raise RefusedReport("unknown_job", 404, f"TrainingJob {key.name} was deleted meanwhile")
        self._measured.get_or_make(key).origin = origin
        reports.require_plausible(report.seconds, forecast.raw_seconds)
        known = self.get_measured_forecast(key)  # others may have reported during the forecast
        same = known is not None and known.forecast.pool_gpus_plan == forecast.pool_gpus_plan
        window = reports.add_report(known.window if known and same else None, report, self._context.timestamp())
        measured, score = self._measured.get_or_make(key), MeasuredForecast(forecast, window)
        measured.score, measured.refused = score, None
        self._learning.record_run(key, seen.uid, score)
        self._context.metrics.observations.labels(report.source, "accepted").inc()
        self._context.metrics.count_observation(score, report.seconds, report.steps, _read_baseline_gpu_seconds(status))
        return score

    async def _find_forecast(
        self,
        key: Key,
        view: View,
        pools: NodesReport,
        report: StepReport,
        best: Recommendation,
        frozen: FrozenForecast | None,
    ) -> tuple[CompleteForecast, Origin | None]:
        """Return the forecast to compare a report with, and the placement (pool, GPUs and plan) that was reported.

        It is the stored forecast `frozen`, unless the job now runs on another pool, other GPUs or another plan.

        Raises:
            RefusedReport: The pool of the report is not known, or the running plan cannot be forecast.
        """
        known = CompleteForecast.from_stored(frozen)
        origin = (_find_pool(report, pools, best), report.gpus, report.plan)
        before = (self._measured.get(key) or _MeasuredJob()).origin
        if known is not None and origin in ((None, None, None), before):
            return known, before
        standing = best.incumbent()
        name, gpus = origin[0] or best.pool, report.gpus or best.gpus
        pool = next((item for item in pools.pools if item.name == name), None)
        if standing is None or pool is None:
            raise RefusedReport("unknown_pool", 409, f"there is no pool {name} that the job could run on")
        is_recommended = name == best.pool and gpus == best.gpus and report.plan is None
        try:
            question = await self._advisor.read_search_inputs(key.namespace, view.document)
            ran = await self._advisor.forecast_running(
                question,
                pool,
                gpus,
                standing.plan if is_recommended else report.plan,
                batch=standing.global_batch,
                precision=standing.precision,
            )
        except SpecError as error:
            raise RefusedReport("no_advice", 409, f"what runs cannot be forecast: {error}") from None
        since = frozen.frozen_at if frozen is not None else self._context.timestamp()
        forecast = _freeze_forecast(ran, since, ran.plan == standing.plan and name == best.pool)
        return known if known is not None and known.pool_gpus_plan == forecast.pool_gpus_plan else forecast, origin


def _freeze_forecast(forecast: RunForecast, since: str, followed: bool) -> CompleteForecast:
    return CompleteForecast.from_truncated_values(
        frozen_at=since,
        pool=forecast.pool.name,
        gpus=forecast.plan.gpus,
        plan=str(forecast.plan),
        raw_seconds=round_to_six_digits(forecast.raw_s),
        step_seconds=StepSeconds.from_forecast(forecast),
        group=[part[:63] for part in forecast.group],
        framework=forecast.framework,
        followed=followed,
    )


def _find_pool(report: StepReport, pools: NodesReport, best: Recommendation) -> str | None:
    """Return the pool that a report comes from, or None if the report names neither node nor GPU.

    The result is the pool of the node, or else the pool with the GPU. If several pools have the GPU, the result is the
    recommended pool.

    Raises:
        RefusedReport: No pool has the GPU, or several pools have it and none of these is recommended.
    """
    if report.node is not None:
        of_node = next((item.pool.name for item in pools.entries if report.node in item.members), None)
        if of_node is not None:
            return of_node
    if report.gpu is None:
        return None
    fitting = [pool for pool in pools.pools if normalise_product(report.gpu) in pool.gpu.aliases]
    if any(pool.name == best.pool for pool in fitting):
        return best.pool
    if len(fitting) == 1:
        return fitting[0].name
    several = f"{len(fitting)} pools have" if fitting else "no pool has"
    raise RefusedReport(
        "unknown_pool", 409, f"{several} a {report.gpu[:64]}; report from a pod whose token names its node"
    )


def _read_baseline_gpu_seconds(status: TrainingJobStatus) -> float | None:
    """Return the GPU-seconds per step of the baseline in a status, or None if there is no baseline."""
    baseline = status.baseline
    return None if baseline is None else baseline.step_seconds.target * baseline.gpus
