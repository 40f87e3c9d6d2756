"""Controller of TrainingJobs: reads what they ask, and writes status, annotations and Events."""

from __future__ import annotations

from dataclasses import replace

from tilecast.api import training_job
from tilecast_operator.answer import Answer, interrupted, is_passing, message
from tilecast_operator.controllers import capacity
from tilecast_operator.controllers.capacity import Destination
from tilecast_operator.controllers.desired import UNANNOTATED, JobFacts, decide
from tilecast_operator.controllers.destinations import Destinations
from tilecast_operator.controllers.evidence import EvidenceReader
from tilecast_operator.controllers.job_answers import JobAnswers, noted
from tilecast_operator.controllers.learning import CALIBRATION
from tilecast_operator.controllers.pools import PoolsChange
from tilecast_operator.controllers.requests import mode_of
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.controllers.status_writes import StatusWrites
from tilecast_operator.kube.cache import Stored
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.records import RecordPart
from tilecast_operator.objects.view import View, status_digest
from tilecast_operator.report import job_status

UNANSWERED = status_digest({})


class TrainingJobs:
    """Answers every TrainingJob. Belongs to one event loop."""

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
        context.cache.training_jobs.listen(self._changed)
        answers.listen(self._pools_changed)
        context.runtime.register(training_job.KIND, self._reconcile, context.cache.training_jobs)
        context.answers.expect(training_job.KIND)

    def _changed(self, key: Key, before: Stored[View] | None, now: Stored[View] | None) -> None:
        if now is None:
            return
        if before is not None and before.value.digest != now.value.digest:
            self._touched[key] = True
        if before is None or before.value.generation != now.value.generation:
            self._context.answers.ask(key, now.value.created if now.value.generation == 1 else "")
        if before is None or key in self._touched:
            self._recall(key, now)
        self._context.runtime.add(key)

    def _recall(self, key: Key, seen: Stored[View]) -> None:
        if self._evidence.recall(key, seen, is_leader=self._context.leadership.is_leader):
            self._context.runtime.add(CALIBRATION, self._context.settings.calibrate_settle_s)

    def _pools_changed(self, change: PoolsChange) -> None:
        """Reconcile the jobs whose pools changed, those with an answer in the background.

        Jobs with a score are left out where only corrections changed.
        """
        for key, view in list(self._context.cache.training_jobs.items()):
            if change.concerns(key.namespace) and not (change.is_learnt and self._evidence.is_scored(key)):
                self._context.runtime.add(key, in_background=view.digest != UNANSWERED)

    async def _reconcile(self, key: Key) -> None:
        """Write what differs.

        The status comes last: it says that the rest was written.

        Raises:
            TryAgainError: The status says InternalError, and the search is due again.
        """
        seen = self._context.cache.training_jobs.get(key)
        if seen is None or not self._answers.is_ready:  # all are due once the nodes are read
            return
        read = await self._read(key, seen)
        if read is None:
            return
        facts, seen = read
        want = decide(facts, self._context.clock())
        if want.news is not None:
            await self._context.writer.post(key, seen.uid, want.news)
        is_written = await self._writes.write(key, seen, want, facts.before)
        if facts.answer is None:
            if facts.keeps_forecast:
                self._evidence.written(key, facts.evidence.score)
            return
        if is_written:
            had_pool = facts.before.summary is not None and bool(facts.before.summary.pool)
            self._context.metrics.count_advice(facts.answer, changed=had_pool and want.note is not None)
        if facts.is_set_aside:
            return
        self._touched.pop(key, None)
        if is_passing(facts.answer):
            raise TryAgainError(message(facts.answer))
        self._context.answers.answer(key)

    async def _read(self, key: Key, seen: Stored[View]) -> tuple[JobFacts, Stored[View]] | None:
        """Return what decides what a job should say, and the job as it is by then; None to leave it as it is."""
        view = seen.value
        document, before = view.document, job_status.stored(view.status_json)
        facts = JobFacts(view, before, is_off=mode_of(document) == "Off")
        if (why := self._context.set_aside(key)) is not None:
            self._context.answers.withdraw(key)
            fit = self._destinations.fit(key, None)
            # A job that runs keeps its forecast.
            return None if before.forecast else (replace(facts, answer=why, fit=fit, is_set_aside=True), seen)
        evidence = await self._evidence.read(key, seen, document, before)
        facts = replace(facts, evidence=evidence)
        if facts.keeps_forecast or before.observed_generation == view.generation:
            self._context.answers.withdraw(key)
        if facts.keeps_forecast:
            return await self._running(key, document, facts), seen
        return await self._waiting(key, seen, document, facts)

    async def _running(self, key: Key, document: Document, facts: JobFacts) -> JobFacts:
        """Return the facts about a job that keeps its forecast, because it runs."""
        before, products = facts.before, self._answers.products
        score, target = facts.evidence.score, facts.evidence.target
        current = await self._destinations.alternatives(key, document, before, score, target)
        better = self._destinations.better(key, document, before, current, score, target)
        return replace(facts, fit=capacity.STARTED, current=current, products=products, better=better)

    async def _waiting(
        self, key: Key, seen: Stored[View], document: Document, facts: JobFacts
    ) -> tuple[JobFacts, Stored[View]] | None:
        """Return the facts about a job that has no forecast to keep; None while its search is interrupted."""
        view, before, target = seen.value, facts.before, facts.evidence.target
        question = await self._answers.question([key], document)
        if question.has_config_map:
            # ConfigMaps are read by name and not watched, so that the operator need not list any.
            self._context.runtime.add(key, self._context.settings.config_map_poll_s)
        best = before.recommendation
        is_current = before.observed_generation == view.generation and before.forecast is None and target is None
        is_whole = key not in self._touched and (view.annotations_digest == UNANNOTATED) == facts.is_off
        is_same = is_current and is_whole and not facts.has_started
        if is_same and best is not None and await self._answers.is_answered(question, before):
            fit = self._destinations.fit(key, Destination(best.pool, best.nodes, best.gpus_per_node))
            return replace(facts, fit=fit, products=self._answers.products), seen
        answer, seen = await self._answers.first(key, seen, question, None if target is None else target.answer)
        if self._waits(key, answer) and best is not None and before.observed_generation == view.generation:
            return None
        if is_current:
            answer = await self._answers.standing(question, answer, before)
        if target is None:
            answer = noted(question, answer)
        place = capacity.destination(answer)
        fit = capacity.STARTED if facts.has_started else self._destinations.fit(key, place)
        return replace(facts, answer=answer, fit=fit), seen

    def _waits(self, key: Key, answer: Answer) -> bool:
        """Return whether the search for a job was interrupted; the job is reconciled when it is tried again."""
        if (pause := interrupted(answer)) is not None:
            self._context.runtime.add(key, pause.again_s, in_background=True)
        return pause is not None
