"""TrainingJobs: what they ask in; status, annotations and Events out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilecast.advise import Advice
from tilecast.api import training_job
from tilecast.api.status import Summary, TrainingJobStatus
from tilecast_operator.advisor import Advisor
from tilecast_operator.answer import Answer, Declined, is_passing, message
from tilecast_operator.cluster.cache import Stored
from tilecast_operator.cluster.documents import OBSERVED, STARTED, Note
from tilecast_operator.cluster.kinds import Key
from tilecast_operator.cluster.view import View, annotations_digest, seconds, stamp, status_digest
from tilecast_operator.controllers import capacity
from tilecast_operator.controllers.capacity import Capacity, Destination
from tilecast_operator.controllers.observations import Observations
from tilecast_operator.controllers.pools import Pools
from tilecast_operator.controllers.requests import mode_of
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.controllers.scoring import Scores
from tilecast_operator.controllers.targets import Target, Targets
from tilecast_operator.observed.learner import Score
from tilecast_operator.report import job_status
from tilecast_operator.report.advice import advice_annotations, note, recommendation_annotations
from tilecast_operator.report.job_status import Aspect, Fit

UNANNOTATED = annotations_digest({})


@dataclass(frozen=True, slots=True)
class Desired:
    """What an object should say."""

    status: TrainingJobStatus
    annotations: Mapping[str, str] | None
    """Ours, all of them; None leaves them as they are."""
    note: Note | None = None


def desired(view: View, answer: Answer, is_off: bool, fit: Fit, now: str, target: Target | None = None) -> Desired:
    """What a job should say for an answer. In mode Off that is its status only."""
    before = job_status.stored(view.status)
    applied = None if target is None else target.applied
    conditions = job_status.conditions(answer, is_off, view.generation, now, before.conditions, fit, applied)
    status = job_status.fitted(job_status.status(answer, view.generation, conditions), fit)
    summary = status.summary or Summary()
    if target is not None:
        summary = summary.model_copy(update={"target": target.name})
        status = status.model_copy(update={"summary": summary})
    if isinstance(answer, Advice) and answer.best is not None and (since := started(view, before, target)) is not None:
        status = job_status.started(status, since or now)
    if is_off:
        return Desired(status, {})
    annotations = {} if isinstance(answer, Declined) else advice_annotations(answer)
    return Desired(status, annotations, note(answer, before.summary or Summary(), summary))


def amended(
    view: View,
    before: TrainingJobStatus,
    is_off: bool,
    fit: Fit,
    now: str,
    score: Score | None = None,
    refusal: str | None = None,
    target: Target | None = None,
) -> Desired:
    """What a job should say that keeps its forecast: the same, but for what is free now, that it has started, how its
    measured steps compare, or why what was told of them does not count, and what became of its target."""
    since = started(view, before, target)
    aspects = {"CapacityAvailable": fit.aspect}
    if target is not None and not target.is_gone:
        aspects["Applied"] = target.applied
    status = job_status.fitted(before, fit)
    if score is not None:
        status = job_status.scored(status, score)
        aspects["ObservationsAvailable"] = job_status.observed_aspect(score)
    else:
        if status.observed is not None:
            aspects["ObservationsAvailable"] = job_status.UNOBSERVED
        status = job_status.unscored(status)
        if since is not None:
            status = job_status.started(status, since or now)
        if refusal is not None:
            aspects["ObservationsAvailable"] = Aspect("False", "Refused", refusal)
    status = job_status.amended(status, view.generation, now, aspects)
    best = before.recommendation
    if is_off or best is None or view.annotations_digest != UNANNOTATED:
        return Desired(status, {} if is_off else None)
    return Desired(status, recommendation_annotations(best, before.inputs_hash or ""))


def started(view: View, before: TrainingJobStatus, target: Target | None = None) -> str | None:
    """When the job began to run, as far as it says: a time, or an empty text where it says only that it did.

    A TrainingJob by itself runs nothing. It has started once whoever starts it says so in an annotation, once a
    measured step is there, or once the job that it names has; that one may be gone by now.
    """
    inputs = dict(view.inputs)
    text = inputs.get(STARTED, "").strip()
    if text.lower() not in ("", "false"):
        since_s = seconds(text) if len(text) <= 40 else None
        return "" if since_s is None else stamp(since_s)
    if OBSERVED in inputs:
        return ""
    if target is None:
        return None
    is_over = target.is_gone and before.forecast is not None
    return "" if target.has_started or target.observed is not None or is_over else None


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
    ) -> None:
        self._context = context
        self._advisor = advisor
        self._pools = pools
        self._capacity = capacity
        self._observations = observations
        self._scores = scores
        self._targets = targets
        self._touched: set[Key] = set()
        """Jobs whose status somebody else wrote: they are compared in full."""
        context.cache.training_jobs.listen(self._changed)
        pools.listen(self._all_due)
        context.runtime.register(training_job.KIND, self._reconcile, self._gone)

    def _changed(self, key: Key, before: Stored[View] | None, now: Stored[View] | None) -> None:
        if now is None:
            self._forget(key)
            return
        if before is not None and before.value.digest != now.value.digest:
            self._touched.add(key)
        if before is None or key in self._touched:
            self._scores.recall(key, now)
        self._context.runtime.add(key)

    def _forget(self, key: Key) -> None:
        """Keep nothing of a job that is gone."""
        self._context.runtime.forget(key)
        self._touched.discard(key)
        self._capacity.forget(key)
        self._observations.forget(key)

    def _all_due(self) -> None:
        for key in self._context.cache.training_jobs:
            self._context.runtime.add(key)

    def _gone(self, key: Key) -> None:
        """The API server has no such job, whatever the watch says."""
        self._context.cache.training_jobs.forget(key)
        self._forget(key)

    async def _reconcile(self, key: Key) -> None:
        """Write what differs. The status comes last: it is what says that the rest was written.

        Raises:
            TryAgainError: the status says InternalError, and the search is due again.
        """
        seen = self._context.cache.training_jobs.get(key)
        if seen is None or self._pools.report is None:  # all are due once the nodes are read
            return
        view = seen.value
        document, before = view.document, job_status.stored(view.status)
        is_off = mode_of(document) == "Off"
        target = await self._targets.find(key, document)
        await self._observations.look_at(key, seen, before, target)
        score = self._scores.get(key)
        has_started = started(view, before, target) is not None or score is not None
        if has_started and before.recommendation is not None:
            self._capacity.forget(key)
            refusal = self._scores.refusal(key)
            want = amended(view, before, is_off, capacity.STARTED, self._context.now(), score, refusal, target)
            await self._write(key, seen, want)
            return
        question = await self._advisor.question(key.namespace, document)
        if question.has_config_map:
            # ConfigMaps are read by name and not watched, so that the operator needs to list none.
            self._context.runtime.add(key, self._context.settings.config_map_poll_s)
        best = before.recommendation
        is_current = before.observed_generation == view.generation and before.forecast is None and target is None
        is_whole = key not in self._touched and (view.annotations_digest == UNANNOTATED) == is_off
        if is_current and is_whole and not has_started and best is not None:
            digest = await self._advisor.inputs_hash(question)
            if digest is not None and digest == before.inputs_hash:
                fit = self._capacity.fit(key, Destination(best.pool, best.nodes, best.gpus_per_node))
                await self._write(key, seen, amended(view, before, is_off, fit, self._context.now()))
                return
        answer = await self._advisor.answer(question) if target is None else target.answer
        if is_current and best is not None:
            answer = await self._advisor.standing(question, answer, best.document())
        fit = capacity.STARTED if has_started else self._capacity.fit(key, _place(answer))
        want = desired(view, answer, is_off, fit, self._context.now(), target)
        had_pool = before.summary is not None and bool(before.summary.pool)
        if await self._write(key, seen, want):
            self._context.metrics.count_advice(answer, changed=had_pool and want.note is not None)
        self._touched.discard(key)
        if is_passing(answer):
            raise TryAgainError(message(answer))

    async def _write(self, key: Key, seen: Stored[View], want: Desired) -> bool:
        """Write what differs; returns whether the status did."""
        is_conditional, asked = self._context.runtime.is_conditional(key), seen.value
        if want.annotations is not None and asked.annotations_digest != annotations_digest(want.annotations):
            seen = await self._context.writer.annotate(key, seen, want.annotations, is_conditional=is_conditional)
        if want.note is not None:
            await self._context.writer.post(key, seen.uid, want.note)
        document = want.status.document()
        is_other = status_digest(document) != seen.value.digest
        if is_other:
            seen = await self._context.writer.write_status(key, seen, document, is_conditional=is_conditional)
        if not seen.value.asks_as(asked):
            self._context.runtime.add(key)
        return is_other


def _place(answer: Answer) -> Destination | None:
    """Where an answer sends its job."""
    best = None if isinstance(answer, Declined) else answer.best
    return None if best is None else Destination(best.pool.name, best.nodes, best.gpus_per_node)
