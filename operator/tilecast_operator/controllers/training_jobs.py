"""Controller of TrainingJobs: reads the jobs, writes status, annotations and Events."""

from __future__ import annotations

from dataclasses import replace

from tilecast.api import training_job
from tilecast_operator.answer import Answer, find_interruption, is_passing, message
from tilecast_operator.controllers import capacity
from tilecast_operator.controllers.capacity import Destination
from tilecast_operator.controllers.desired import UNANNOTATED, JobFacts, decide_training_job
from tilecast_operator.controllers.destinations import Destinations
from tilecast_operator.controllers.evidence import EvidenceReader
from tilecast_operator.controllers.job_answers import JobAnswers, add_run_notes
from tilecast_operator.controllers.learning import CALIBRATION
from tilecast_operator.controllers.pools import PoolsChange
from tilecast_operator.controllers.requests import read_mode
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.controllers.status_writes import StatusWrites
from tilecast_operator.kube.cache import Stored
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.records import RecordPart
from tilecast_operator.objects.view import View, status_digest
from tilecast_operator.report import job_status

UNANSWERED = status_digest({})


class TrainingJobs:
    """Controller of all TrainingJobs. Belongs to one event loop."""

    def __init__(
        self,
        context: SharedContext,
        answers: JobAnswers,
        evidence: EvidenceReader,
        destinations: Destinations,
        writes: StatusWrites,
    ) -> None:
        self._context = context
        self._answers = answers
        self._evidence = evidence
        self._destinations = destinations
        self._writes = writes
        self._touched: RecordPart[bool] = context.records.part()
        """Jobs whose status somebody else wrote; they are compared in full."""
        context.cache.training_jobs.listen(self._on_job_change)
        answers.listen(self._on_pools_change)
        context.runtime.register(training_job.KIND, self._reconcile, context.cache.training_jobs)
        context.answers.register_kind(training_job.KIND)

    def _on_job_change(self, key: Key, before: Stored[View] | None, now: Stored[View] | None) -> None:
        if now is None:
            return
        if before is not None and before.value.digest != now.value.digest:
            self._touched[key] = True
        if before is None or before.value.generation != now.value.generation:
            self._context.answers.open_question(key, now.value.created if now.value.generation == 1 else "")
        if before is None or key in self._touched:
            self._recall_score(key, now)
        self._context.runtime.add(key)

    def _recall_score(self, key: Key, seen: Stored[View]) -> None:
        if self._evidence.recall_score(key, seen, is_leader=self._context.leadership.is_leader):
            self._context.runtime.add(CALIBRATION, self._context.settings.calibrate_settle_s)

    def _on_pools_change(self, change: PoolsChange) -> None:
        """Reconcile the jobs whose pools changed, except jobs with a score if only corrections changed."""
        for key, view in list(self._context.cache.training_jobs.items()):
            if change.concerns_namespace(key.namespace) and not (change.is_learnt and self._evidence.is_scored(key)):
                self._context.runtime.add(key, in_background=view.digest != UNANSWERED)

    async def _reconcile(self, key: Key) -> None:
        """Write Events, annotations and status of a job where they differ; the status last.

        Raises:
            TryAgainError: The status says InternalError, and the search is due again.
        """
        seen = self._context.cache.training_jobs.get(key)
        if seen is None or not self._answers.is_ready:  # all are due once the nodes are read
            return
        read = await self._read_facts(key, seen)
        if read is None:
            return
        facts, seen = read
        want = decide_training_job(facts, self._context.clock())
        if want.news is not None:
            await self._context.writer.post(key, seen.uid, want.news)
        is_written = await self._writes.write_answer(key, seen, want, facts.before)
        if facts.answer is None:
            if facts.keeps_forecast:
                self._evidence.mark_written(key, facts.evidence.score)
            return
        if is_written:
            had_pool = facts.before.summary is not None and bool(facts.before.summary.pool)
            self._context.metrics.count_advice(facts.answer, changed=had_pool and want.note is not None)
        if facts.is_set_aside:
            return
        self._touched.pop(key, None)
        if is_passing(facts.answer):
            raise TryAgainError(message(facts.answer))
        self._context.answers.record_answer(key)

    async def _read_facts(self, key: Key, seen: Stored[View]) -> tuple[JobFacts, Stored[View]] | None:
        """Return the facts about a job, and the job as updated meanwhile; None if it should not be changed."""
        view = seen.value
        document, before = view.document, job_status.parse_status(view.status_json)
        facts = JobFacts(view, before, is_off=read_mode(document) == "Off")
        if (why := self._context.find_quarantine(key)) is not None:
            self._context.answers.withdraw_question(key)
            fit = self._destinations.check_fit(key, None)
            # A job that runs keeps its forecast.
            return None if before.forecast else (replace(facts, answer=why, fit=fit, is_set_aside=True), seen)
        evidence = await self._evidence.read_evidence(key, seen, document, before)
        facts = replace(facts, evidence=evidence)
        if facts.keeps_forecast or before.observed_generation == view.generation:
            self._context.answers.withdraw_question(key)
        if facts.keeps_forecast:
            return await self._read_running(key, document, facts), seen
        return await self._read_waiting(key, seen, document, facts)

    async def _read_running(self, key: Key, document: Document, facts: JobFacts) -> JobFacts:
        """Return the facts about a running job, which keeps its forecast."""
        before, products = facts.before, self._answers.gpu_by_pool
        score, target = facts.evidence.score, facts.evidence.target
        current = await self._destinations.update_alternatives(key, document, before, score, target)
        better = self._destinations.compare_alternatives(key, document, before, current, score, target)
        return replace(facts, fit=capacity.STARTED, current=current, products=products, better=better)

    async def _read_waiting(
        self, key: Key, seen: Stored[View], document: Document, facts: JobFacts
    ) -> tuple[JobFacts, Stored[View]] | None:
        """Return the facts about a job without a frozen forecast; None while its search is interrupted."""
        view, before, target = seen.value, facts.before, facts.evidence.target
        question = await self._answers.read_question([key], document)
        if question.has_config_map:
            # ConfigMaps are read by name and not watched, so that the operator need not list any.
            self._context.runtime.add(key, self._context.settings.config_map_poll_s)
        best = before.recommendation
        is_current = before.observed_generation == view.generation and before.forecast is None and target is None
        is_whole = key not in self._touched and (view.annotations_digest == UNANNOTATED) == facts.is_off
        is_same = is_current and is_whole and not facts.has_started
        if is_same and best is not None and await self._answers.is_answered(question, before):
            fit = self._destinations.check_fit(key, Destination(best.pool, best.nodes, best.gpus_per_node))
            return replace(facts, fit=fit, products=self._answers.gpu_by_pool), seen
        answer, seen = await self._answers.answer_with_notices(
            key, seen, question, None if target is None else target.answer
        )
        if (
            self._retry_if_interrupted(key, answer)
            and best is not None
            and before.observed_generation == view.generation
        ):
            return None
        if is_current:
            answer = await self._answers.keep_incumbent(question, answer, before)
        if target is None:
            answer = add_run_notes(question, answer)
        place = capacity.find_destination(answer)
        fit = capacity.STARTED if facts.has_started else self._destinations.check_fit(key, place)
        return replace(facts, answer=answer, fit=fit), seen

    def _retry_if_interrupted(self, key: Key, answer: Answer) -> bool:
        """Return whether the search for a job was interrupted; if so, schedule the job for the next try."""
        if (pause := find_interruption(answer)) is not None:
            self._context.runtime.add(key, pause.again_s, in_background=True)
        return pause is not None
