"""Controller of TrainingJobs: reads what they ask, and writes status, annotations and Events."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from tilecast.advice import Advice
from tilecast.api import training_job
from tilecast.api.fields import mapping
from tilecast.api.status import TrainingJobStatus
from tilecast.objectives import OBJECTIVES
from tilecast_operator.advisor import Advisor
from tilecast_operator.answer import Answer, Declined, interrupted, is_passing, message
from tilecast_operator.controllers import capacity
from tilecast_operator.controllers.budget_notices import BudgetNotices
from tilecast_operator.controllers.capacity import Capacity, Destination
from tilecast_operator.controllers.contention import Contention
from tilecast_operator.controllers.desired import UNANNOTATED, amended, desired, started
from tilecast_operator.controllers.learning import CALIBRATION, PoolLearnings
from tilecast_operator.controllers.observations import Observations
from tilecast_operator.controllers.planned_jobs import PlannedJobs
from tilecast_operator.controllers.pools import Pools, PoolsChange
from tilecast_operator.controllers.requests import mode_of
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.controllers.scoring import Scores
from tilecast_operator.controllers.status_writes import StatusWrites
from tilecast_operator.controllers.targets import Target, Targets
from tilecast_operator.kube.cache import Stored
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.documents import Note
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.records import RecordPart
from tilecast_operator.objects.view import View, status_digest
from tilecast_operator.observed.calibrator import Score
from tilecast_operator.question import Question
from tilecast_operator.report import better_placement, job_status
from tilecast_operator.report.better_placement import BetterPlace, MoveCost

log = logging.getLogger("tilecast")

UNANSWERED = status_digest({})


class TrainingJobs:
    """Answers every TrainingJob. Belongs to one event loop."""

    def __init__(
        self,
        context: SharedContext,
        advisor: Advisor,
        pools: Pools,
        capacity: Capacity,
        observations: Observations,
        scores: Scores,
        targets: Targets,
        learning: PoolLearnings,
        planned: PlannedJobs,
        contention: Contention,
    ) -> None:
        self._context = context
        self._advisor = advisor
        self._pools = pools
        self._capacity = capacity
        self._observations = observations
        self._scores = scores
        self._targets = targets
        self._learning = learning
        self._writes = StatusWrites(context, learning, planned, contention)
        self._notices = BudgetNotices(context, advisor)
        self._touched: RecordPart[bool] = context.records.part()
        """Jobs whose status somebody else wrote; they are compared in full."""
        context.cache.training_jobs.listen(self._changed)
        pools.listen(self._pools_changed)
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
        if self._scores.recall(key, seen, is_leader=self._context.leadership.is_leader):
            self._context.runtime.add(CALIBRATION, self._context.settings.calibrate_settle_s)

    def _pools_changed(self, change: PoolsChange) -> None:
        """Reconcile the jobs whose pools changed, those with an answer in the background.

        Jobs with a score are left out where only corrections changed.
        """
        for key, view in list(self._context.cache.training_jobs.items()):
            if change.concerns(key.namespace) and not (change.is_learnt and self._scores.get(key)):
                self._context.runtime.add(key, in_background=view.digest != UNANSWERED)

    async def _reconcile(self, key: Key) -> None:
        """Write what differs.

        The status comes last: it says that the rest was written.

        Raises:
            TryAgainError: The status says InternalError, and the search is due again.
        """
        seen = self._context.cache.training_jobs.get(key)
        if seen is None or self._pools.report is None:  # all are due once the nodes are read
            return
        if await self._set_aside(key, seen):
            return
        view = seen.value
        document, before = view.document, job_status.stored(view.status_json)
        is_off = mode_of(document) == "Off"
        target = await self._targets.find(key, document)
        await self._observations.look_at(key, seen, before, target)
        refusal = self._observations.refusal(key, document)
        score = self._scores.get(key)
        has_started = started(view, before, target) is not None or score is not None
        keeps_forecast = has_started and before.recommendation is not None
        if keeps_forecast or before.observed_generation == view.generation:
            self._context.answers.withdraw(key)
        if keeps_forecast:
            gpus, now = self._products(), self._context.now()
            current = await self._alternatives(key, document, before, score, target)
            want = amended(view, current, is_off, capacity.STARTED, now, gpus, score, refusal, target)
            want = replace(want, status=await self._placed_better(key, seen, want.status, score, before, target))
            await self._writes.write(key, seen, want, before)
            self._observations.written(key, score)
            return
        question = await self._question(key, document)
        if question.has_config_map:
            # ConfigMaps are read by name and not watched, so that the operator need not list any.
            self._context.runtime.add(key, self._context.settings.config_map_poll_s)
        best = before.recommendation
        is_current = before.observed_generation == view.generation and before.forecast is None and target is None
        is_whole = key not in self._touched and (view.annotations_digest == UNANNOTATED) == is_off
        if is_current and is_whole and not has_started and best is not None:
            digest = await self._advisor.inputs_hash(question)
            if digest is not None and digest == before.inputs_hash:
                fit = self._capacity.fit(key, Destination(best.pool, best.nodes, best.gpus_per_node))
                want = amended(view, before, is_off, fit, self._context.now(), self._products(), refusal=refusal)
                await self._writes.write(key, seen, want, before)
                return
        answer, seen = await self._notices.answer(key, seen, question, None if target is None else target.answer)
        if self._waits(key, answer) and best is not None and before.observed_generation == view.generation:
            return
        if is_current and best is not None:
            answer = await self._advisor.standing(question, answer, best.incumbent())
        if target is None and isinstance(answer, Advice):
            answer = question.own.with_notes(answer)
        fit = capacity.STARTED if has_started else self._capacity.fit(key, capacity.destination(answer))
        want = desired(view, before, answer, is_off, fit, self._context.now(), target, refusal)
        had_pool = before.summary is not None and bool(before.summary.pool)
        if await self._writes.write(key, seen, want, before):
            self._context.metrics.count_advice(answer, changed=had_pool and want.note is not None)
        self._touched.pop(key, None)
        if is_passing(answer):
            raise TryAgainError(message(answer))
        self._context.answers.answer(key)

    async def _set_aside(self, key: Key, seen: Stored[View]) -> bool:
        """Return whether a job is quarantined, and say why in its status; one that runs keeps its forecast."""
        if (why := self._context.set_aside(key)) is None:
            return False
        self._context.answers.withdraw(key)
        before, fit, now = job_status.stored(seen.value.status_json), self._capacity.fit(key, None), self._context.now()
        if before.forecast is None:
            want = desired(seen.value, before, why, mode_of(seen.value.document) == "Off", fit, now)
            if await self._writes.write(key, seen, replace(want, annotations=None, note=None), before):
                self._context.metrics.count_advice(why, changed=False)
        return True

    def _waits(self, key: Key, answer: Answer) -> bool:
        """Return whether the search for a job was interrupted; the job is reconciled when it is tried again."""
        if (pause := interrupted(answer)) is not None:
            self._context.runtime.add(key, pause.again_s, in_background=True)
        return pause is not None

    async def _question(self, key: Key, document: Document, unless: str | None = None) -> Question:
        """Return what a job asks, with what its earlier runs say.

        Runs whose digest is `unless` are not priced.
        """
        question = await self._advisor.question(key.namespace, document)
        return await self._advisor.measured(question, partial(self._learning.runs_of, key.namespace, [key]), unless)

    async def _alternatives(
        self, key: Key, document: Document, before: TrainingJobStatus, score: Score | None, target: Target | None
    ) -> TrainingJobStatus:
        """Return the status of a job that runs, with alternatives corrected by its own measured steps."""
        if score is None and before.alternatives_hash is None:
            return before
        if target is not None:
            answer, is_own = target.answer, True
            digest = "" if isinstance(answer, Declined) else answer.inputs_hash
        else:
            try:
                question = await self._question(key, document, before.alternatives_hash)
            except (ApiError, OSError) as error:  # the measured steps are written all the same
                log.warning("%s: alternatives stay as they are: %s", key, error)
                return before
            digest, is_own = question.runs_hash, bool(question.own.items)
            if digest == (before.alternatives_hash or ""):
                return before
            answer = await self._advisor.answer(question)
            if isinstance(answer, Advice):
                answer = question.own.with_notes(answer)
        if isinstance(answer, Declined) or answer.best is None:
            return before
        is_own = is_own and bool(answer.best.pool.own.runs)
        if not is_own and before.alternatives_hash is None:
            return before
        return job_status.compared(before, answer, digest if is_own else None)

    async def _placed_better(
        self, key: Key, seen: Stored[View], status: TrainingJobStatus, score: Score | None, before: TrainingJobStatus,
        target: Target | None,
    ) -> TrainingJobStatus:  # fmt: skip
        """Return a status that says whether the job would do better elsewhere now.

        An Event says so once.
        """
        report, is_over = self._pools.report, target is not None and (target.is_finished or target.is_gone)
        known = next((item for item in before.conditions if item.type == better_placement.KIND), None)
        if is_over or score is None or status.alternatives_hash is None or report is None:
            self._capacity.hide(key)
            without = better_placement.JOB_ENDED if is_over else better_placement.UNKNOWN
            aspect = None if known is None else without
        else:
            spec = seen.value.document.get("spec") or {}
            goal = OBJECTIVES[str(spec.get("objective") or "time")]
            least = better_placement.least_gain(known)
            moving = MoveCost.of(mapping(spec.get("training")), before, score, self._context.clock())
            pools = {pool.name: pool for pool in report.pools}
            places = better_placement.places(status, score, goal, pools, least, moving)
            worth = [item for item in places if item.is_worth_it]
            free = next((item for item in worth if self._capacity.fit(key, _destination(item)).fits), None)
            if free is None:
                self._capacity.fit(key, _destination(places[0]) if places else None)
            aspect = better_placement.aspect(known, free, places)
        if aspect is None:
            return status
        if better_placement.is_news(known, aspect, self._context.clock()) and mode_of(seen.value.document) != "Off":
            await self._context.writer.post(key, seen.uid, Note("Normal", aspect.reason, aspect.message))
        generation, now = seen.value.generation, self._context.now()
        return job_status.amended(status, generation, now, {better_placement.KIND: aspect})

    def _products(self) -> dict[str, str]:
        """Return the GPU of each pool, by name of the pool."""
        return {} if self._pools.report is None else {one.name: one.gpu.product for one in self._pools.report.pools}


def _destination(place: BetterPlace) -> Destination:
    return Destination(place.alternative.pool, place.alternative.nodes, place.alternative.gpus_per_node)
