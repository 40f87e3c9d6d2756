"""Controller of TrainingJobs. It reads the jobs, and writes status, annotations and Events."""

from __future__ import annotations

from dataclasses import replace

from tilecast.api import training_job
from tilecast.api.status import TrainingJobStatus
from tilecast_operator.controllers import capacity
from tilecast_operator.controllers.advisor_client import AdvisorClient, add_run_notes
from tilecast_operator.controllers.capacity import Destination
from tilecast_operator.controllers.contention import WriteContention
from tilecast_operator.controllers.desired import (
    UNANNOTATED,
    DesiredTrainingJob,
    TargetWithMeasurements,
    TrainingJobInputs,
    decide_training_job,
)
from tilecast_operator.controllers.destinations import BetterPoolFinder
from tilecast_operator.controllers.device_use import DeviceUseReader
from tilecast_operator.controllers.learning import CALIBRATION, PoolLearningController
from tilecast_operator.controllers.observations import StepReportReceiver
from tilecast_operator.controllers.planned_jobs import QueuePositions
from tilecast_operator.controllers.pools import PoolsChange
from tilecast_operator.controllers.requests import read_mode, read_target
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.controllers.scoring import ForecastComparison
from tilecast_operator.controllers.targets import TargetReader
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.objects.view import View, annotations_digest, digest_status
from tilecast_operator.outcome import AdviceOutcome, find_interruption, get_ready_message, is_internal_error
from tilecast_operator.report import job_status

UNANSWERED = digest_status({})


class MeasuredTargetReader:
    """Reader of the targets and measured steps of TrainingJobs. Belongs to one event loop."""

    def __init__(
        self,
        targets: TargetReader,
        observations: StepReportReceiver,
        scores: ForecastComparison,
        devices: DeviceUseReader,
    ) -> None:
        self._targets = targets
        self._devices = devices
        self.observations = observations
        self.scores = scores

    async def read_target_with_measurements(
        self, key: Key, seen: CachedObject[View], document: Document, before: TrainingJobStatus
    ) -> TargetWithMeasurements:
        """Return the target and the measured steps of a job. Raise the errors of `TargetReader.find_target`."""
        target = await self._targets.find_target(key, document)
        await self.observations.read_annotations(key, seen, before, target)
        return TargetWithMeasurements(
            target,
            self.scores.get_measured_forecast(key),
            self.observations.find_refusal(key, document),
            self._devices.find_use(key),
        )


class StatusWriter:
    """Writer of advice to TrainingJobs. Belongs to one event loop."""

    def __init__(
        self,
        context: SharedContext,
        learning: PoolLearningController,
        planned: QueuePositions,
        contention: WriteContention,
    ) -> None:
        self._context = context
        self._learning = learning
        self._planned = planned
        self._contention = contention

    async def write_outcome(
        self, key: Key, seen: CachedObject[View], desired: DesiredTrainingJob, before: TrainingJobStatus
    ) -> bool:
        """Write what differs from the desired state of a job, unless another operator writes to the job.

        Return whether the status was written.

        Args:
            key: Key of the job.
            seen: The job as it was seen.
            desired: Status, annotations and Event that the job should have.
            before: The present status.

        Raises:
            ApiError: The write is refused, with 409 if the job has changed since it was seen.
        """
        generation = seen.value.generation
        if self._contention.must_wait(key, generation):
            return False
        try:
            return await self._write_changes(key, seen, desired, before)
        except ApiError as error:
            if error.status == 409:
                self._contention.record_conflict(key, generation)
            raise

    async def _write_changes(
        self, key: Key, seen: CachedObject[View], desired: DesiredTrainingJob, before: TrainingJobStatus
    ) -> bool:
        is_conditional, asked = self._context.runtime.is_conditional(key), seen.value
        status = self._planned.add_position(read_target(key.namespace, asked.document) or key, desired.status, before)
        document, first = status.document(), next(iter(status.alternatives), None)
        digest = digest_status(document)
        if digest != asked.digest and before.observed_generation is not None:
            writer = before.writer
            if await self._contention.must_yield(key, seen.uid, writer, asked.generation, asked.digest):
                return False
        if desired.annotations is not None and asked.annotations_digest != annotations_digest(desired.annotations):
            seen = await self._context.writer.annotate(key, seen, desired.annotations, is_conditional=is_conditional)
        if desired.note is not None:
            await self._context.writer.post_event(
                key, seen.uid, desired.note, is_change=bool(asked.status.get("summary"))
            )
        self._learning.corrected.set_ratio(key, None if first is None else first.own_runs_ratio)
        is_other = digest != seen.value.digest
        if is_other:
            signed = document | {"writer": self._contention.signature}
            seen = await self._context.writer.write_status(key, seen, signed, is_conditional=is_conditional)
            self._contention.record_write(key, asked.generation, digest)
            self._planned.on_write()
        # A step that the job already reports is compared with the forecast that was just written.
        if not seen.value.has_equal_inputs(asked) or (
            is_other and status.forecast is not None and before.forecast is None
        ):
            self._context.runtime.add(key)
        return is_other


class TrainingJobController:
    """Controller of all TrainingJobs. Belongs to one event loop."""

    def __init__(
        self,
        context: SharedContext,
        answers: AdvisorClient,
        evidence: MeasuredTargetReader,
        destinations: BetterPoolFinder,
        writes: StatusWriter,
    ) -> None:
        self._context = context
        self._answers = answers
        self._evidence = evidence
        self._destinations = destinations
        self._writes = writes
        self._touched: StateTable[bool] = context.records.add_table()
        """Jobs with a status that somebody else wrote. They are compared in full."""
        context.cache.training_jobs.add_listener(self._on_job_change)
        answers.pools.add_listener(self._on_pools_change)
        context.runtime.register(training_job.KIND, self._reconcile_job, context.cache.training_jobs)
        context.answers.register_kind(training_job.KIND)

    def _on_job_change(self, key: Key, before: CachedObject[View] | None, now: CachedObject[View] | None) -> None:
        if now is None:
            return
        if before is not None and before.value.digest != now.value.digest:
            self._touched[key] = True
        if before is None or before.value.generation != now.value.generation:
            self._context.answers.start_wait(key, now.value.created if now.value.generation == 1 else "")
        if before is None or key in self._touched:
            self._load_score(key, now)
        self._context.runtime.add(key)

    def _load_score(self, key: Key, seen: CachedObject[View]) -> None:
        if self._evidence.scores.load_measured_forecast(key, seen, is_leader=self._context.leadership.is_leader):
            self._context.runtime.add(CALIBRATION, self._context.settings.calibrate_settle_s)

    def _on_pools_change(self, change: PoolsChange) -> None:
        """Reconcile the jobs whose pools changed. If only corrections changed, skip jobs with measured steps."""
        for key, view in list(self._context.cache.training_jobs.items()):
            is_frozen = change.is_learnt and self._evidence.scores.get_measured_forecast(key) is not None
            if change.concerns_namespace(key.namespace) and not is_frozen:
                self._context.runtime.add(key, in_background=view.digest != UNANSWERED)

    async def _reconcile_job(self, key: Key) -> None:
        """Write the Events, annotations and status of a job that differ from the desired ones, the status last.

        Raises:
            TryAgainError: The status says InternalError, and the search is due again.
        """
        seen = self._context.cache.training_jobs.get(key)
        if seen is None or not self._answers.is_ready:  # all are due once the nodes are read
            return
        read = await self._read_inputs(key, seen)
        if read is None:
            return
        facts, seen = read
        want = decide_training_job(facts, self._context.clock())
        if want.news is not None:
            await self._context.writer.post_event(key, seen.uid, want.news)
        is_written = await self._writes.write_outcome(key, seen, want, facts.before)
        if facts.answer is None:
            if facts.keeps_forecast:
                self._evidence.observations.mark_written(key, facts.evidence.score)
            return
        if is_written:
            had_pool = facts.before.summary is not None and bool(facts.before.summary.pool)
            self._context.metrics.count_advice(facts.answer, is_changed=had_pool and want.note is not None)
        if facts.is_set_aside:
            return
        self._touched.pop(key, None)
        if is_internal_error(facts.answer):
            raise TryAgainError(get_ready_message(facts.answer))
        self._context.answers.record_outcome(key)

    async def _read_inputs(
        self, key: Key, seen: CachedObject[View]
    ) -> tuple[TrainingJobInputs, CachedObject[View]] | None:
        """Return the input of `decide_training_job` and the updated job, or None if the job must not change."""
        view = seen.value
        document, before = view.document, job_status.parse_status(view.status_json)
        facts = TrainingJobInputs(view, before, is_off=read_mode(document) == "Off")
        if (why := self._context.find_quarantine(key)) is not None:
            self._context.answers.end_wait(key)
            fit = self._destinations.capacity.check_fit(key, None)
            # A job that runs keeps its forecast.
            return None if before.forecast else (replace(facts, answer=why, fit=fit, is_set_aside=True), seen)
        evidence = await self._evidence.read_target_with_measurements(key, seen, document, before)
        facts = replace(facts, evidence=evidence)
        if facts.keeps_forecast or before.observed_generation == view.generation:
            self._context.answers.end_wait(key)
        if facts.keeps_forecast:
            return await self._read_running(key, document, facts), seen
        return await self._read_waiting_job(key, seen, document, facts)

    async def _read_running(self, key: Key, document: Document, inputs: TrainingJobInputs) -> TrainingJobInputs:
        """Return the input of `decide_training_job` for a running job, whose forecast does not change."""
        before, products = inputs.before, self._answers.gpu_by_pool
        score, target = inputs.evidence.score, inputs.evidence.target
        current = await self._destinations.update_alternatives(key, document, before, score, target)
        better = self._destinations.compare_alternatives(key, document, before, current, score, target)
        return replace(inputs, fit=capacity.STARTED, current=current, products=products, better=better)

    async def _read_waiting_job(
        self, key: Key, seen: CachedObject[View], document: Document, inputs: TrainingJobInputs
    ) -> tuple[TrainingJobInputs, CachedObject[View]] | None:
        """Return the input of `decide_training_job` for a waiting job, or None if its search was interrupted."""
        view, before, target = seen.value, inputs.before, inputs.evidence.target
        question = await self._answers.read_search_inputs([key], document)
        if question.has_config_map:
            # ConfigMaps are read by name and not watched, so that the operator need not list any.
            self._context.runtime.add(key, self._context.settings.config_map_poll_s)
        best = before.recommendation
        is_current = before.observed_generation == view.generation and before.forecast is None and target is None
        is_whole = key not in self._touched and (view.annotations_digest == UNANNOTATED) == inputs.is_off
        is_same = is_current and is_whole and not inputs.has_started
        if is_same and best is not None and await self._answers.is_answered(question, before):
            fit = self._destinations.capacity.check_fit(key, Destination(best.pool, best.nodes, best.gpus_per_node))
            return replace(inputs, fit=fit, products=self._answers.gpu_by_pool), seen
        known = None if target is None else target.answer
        answer, seen = await self._answers.notices.advise_with_notices(key, seen, question, known)
        if (
            self._schedule_retry_if_interrupted(key, answer)
            and best is not None
            and before.observed_generation == view.generation
        ):
            return None
        if is_current:
            answer = await self._answers.keep_incumbent(question, answer, before)
        if target is None:
            answer = add_run_notes(question, answer)
        place = capacity.find_destination(answer)
        fit = capacity.STARTED if inputs.has_started else self._destinations.capacity.check_fit(key, place)
        return replace(inputs, answer=answer, fit=fit), seen

    def _schedule_retry_if_interrupted(self, key: Key, outcome: AdviceOutcome) -> bool:
        """Return whether the search for a job was interrupted. If so, schedule the next try."""
        if (pause := find_interruption(outcome)) is not None:
            self._context.runtime.add(key, pause.again_s, in_background=True)
        return pause is not None
