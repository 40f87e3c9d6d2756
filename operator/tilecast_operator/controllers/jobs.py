"""Jobs of other kinds that ask for advice: what they are in, annotations and Events out.

A job that waits for us is the business of `admission`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tilecast import jobs
from tilecast.jobs import JOB_KINDS, Job
from tilecast_operator.answer import Answer, Declined, is_passing, message
from tilecast_operator.cluster.api import ApiError
from tilecast_operator.cluster.cache import Stored
from tilecast_operator.cluster.documents import ADVICE_KEYS, HASH, Note, applied_fields
from tilecast_operator.cluster.kinds import Key
from tilecast_operator.cluster.view import Document, canonical, own_annotations
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.admission import OUTCOMES, OWNER_S, Admission
from tilecast_operator.controllers.job_advice import JobAdvice, about
from tilecast_operator.controllers.pools import Pools
from tilecast_operator.controllers.requests import Requests
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.observed import reports
from tilecast_operator.report.advice import advice_annotations, note_on_job

log = logging.getLogger("tilecast")


class Jobs:
    """Advises every job of another kind that asks for it. Belongs to one event loop."""

    def __init__(
        self, context: SharedContext, pools: Pools, requests: Requests, advice: JobAdvice, admission: Admission
    ) -> None:
        self._context = context
        self._requests = requests
        self._advice = advice
        self._admission = admission
        self._owed: set[Key] = set()
        """Jobs that asked while they ran and were not answered yet; they are answered even if they end meanwhile."""
        self._queueless: set[Key] = set()
        """Jobs whose queue is not known yet."""
        self._posted: dict[Key, Note] = {}
        context.cache.jobs.is_kept = self._is_kept
        context.cache.jobs.listen(self._changed)
        context.cache.namespaces.listen(self._namespace_changed)
        for table in (context.cache.local_queues, context.cache.cluster_queues, context.cache.flavors):
            table.listen(self._queue_changed)
        pools.listen(self._all_due)
        for kind in JOB_KINDS:
            context.runtime.register(kind, self._reconcile, context.cache.jobs.forget)

    def _is_kept(self, key: Key, document: Document) -> bool:
        """Whether a job could be advised: it waits for us, is named, or could ask by a label."""
        job = about(document)
        return job.is_held or key in self._requests or key in self._owed or _may_ask(job)

    def _changed(self, key: Key, before: Stored[Document] | None, now: Stored[Document] | None) -> None:
        if now is None:
            self._context.runtime.forget(key)
            self._posted.pop(key, None)
            self._owed.discard(key)
            self._queueless.discard(key)
            self._admission.forget(key)
            self._requests.notify(key)
            return
        if not about(now.value).is_finished:
            self._owed.add(key)
        self._admission.consider(key, now)
        self._context.runtime.add(key)
        if before is None or _relevant(before.value) != _relevant(now.value):
            self._requests.notify(key)

    def _namespace_changed(self, key: Key, before: Stored[Any] | None, now: Stored[Any] | None) -> None:
        """A namespace's label may ask for advice on every job in it."""
        labels = [{} if seen is None else seen.value for seen in (before, now)]
        if now is not None and labels[0].get(jobs.ENABLED) != labels[1].get(jobs.ENABLED):
            for job in self._context.cache.jobs:
                if job.namespace == key.name:
                    self._context.runtime.add(job)

    def _queue_changed(self, key: Key, before: Stored[Any] | None, now: Stored[Any] | None) -> None:
        for job in self._queueless:
            self._context.runtime.add(job)

    def _all_due(self) -> None:
        for key in {*self._context.cache.jobs, *self._requests}:
            self._context.runtime.add(key)

    async def _reconcile(self, key: Key) -> None:
        """Annotate a job that does not wait for us."""
        seen = self._context.cache.jobs.get(key)
        if seen is None and key in self._requests:
            # It was of no interest when it was seen.
            seen = self._context.cache.jobs.keep(await self._context.client.get(key.path), is_new=True)
        if seen is None or self._admission.holds(key, seen.uid) or not self._advice.is_ready:
            return
        if await self._advise(key, seen):
            self._owed.discard(key)
            if not self._is_kept(key, seen.value):
                self._context.cache.jobs.forget(key)

    async def _advise(self, key: Key, seen: Stored[Document]) -> bool:
        """Write what differs; returns whether nothing is owed to the job for now."""
        job = await self._advice.read(seen.value)
        own, asked = own_annotations(job.annotations), self._advice.asked(key, job)
        is_settled = job.has_started or job.annotations.get(jobs.APPLIED) == patches.PLACED
        if (job.is_finished and key not in self._owed) or job.is_owned or (is_settled and own):
            return True
        if isinstance(asked, Declined):
            await self._post(key, job, note_on_job(asked))
            return True
        if asked is None or asked.mode == "Off":
            if own:
                await self._annotate(key, job, {})
            return True
        answer, _ = await self._advice.answer(job, asked, is_placed=asked.mode == "Initial")
        if isinstance(answer, Declined) and answer.reason == "QueueNotFound":
            # At the start a job may be seen before its queue; and one that is missing may be created.
            is_first = key not in self._queueless
            self._queueless.add(key)
            self._context.runtime.add(key, OWNER_S if is_first else self._context.settings.config_map_poll_s)
            if is_first:
                return False
        else:
            self._queueless.discard(key)
        await self._show(key, job, answer, own, is_placed=asked.mode == "Initial")
        if is_passing(answer):
            raise TryAgainError(message(answer))
        return True

    async def _show(self, key: Key, job: Job, answer: Answer, own: Mapping[str, str], *, is_placed: bool) -> None:
        """Write the annotations and the Event of an answer.

        Args:
            key: of the job.
            job: as it was seen.
            answer: about it.
            own: our annotations that it has.
            is_placed: whether it should be placed.
        """
        advised = {} if isinstance(answer, Declined) else advice_annotations(answer)
        applied = job.annotations.get(jobs.APPLIED)
        if is_placed and job.has_started and applied is None:
            applied = "AlreadyStarted"
            await self._post(key, job, Note("Warning", "NotPlaced", f"{applied}: {OUTCOMES[applied]}"))
            marked = {**advised, jobs.APPLIED: applied}
        else:
            marked = {**advised, jobs.APPLIED: applied} if applied is not None and (own or advised) else advised
        if own != advised:
            await self._annotate(key, job, marked)
            self._context.metrics.count_advice(answer, changed=bool(own))
        if own.get(HASH) != advised.get(HASH) or isinstance(answer, Declined) or answer.best is None:
            await self._post(key, job, note_on_job(answer))

    async def _annotate(self, key: Key, job: Job, annotations: Mapping[str, str]) -> None:
        fields = applied_fields(key, {"uid": job.uid, "annotations": dict(annotations)})
        # What somebody else wrote at the same time is in the answer, and its event is old news by now.
        body = await self._context.writer.apply(key, fields)
        if self._context.cache.jobs.get(key) is not None:
            self._context.cache.jobs.see(body)

    async def _post(self, key: Key, job: Job, note: Note) -> None:
        """Write an Event, once for as long as it stays. One that cannot be written keeps nothing waiting."""
        if self._posted.get(key) == note:
            return
        try:
            is_there = await self._context.writer.post(key, job.uid, note)
        except ApiError as error:
            log.warning("%s: Event not written: %s", key, error)
            return
        if is_there:
            self._posted[key] = note


def _may_ask(job: Job) -> bool:
    """Whether a job could be advised by a label: it has not ended, and asks for GPUs or may do so in its runtime."""
    is_marked = jobs.ENABLED in job.labels or jobs.MODEL in job.annotations
    return not job.is_finished and not job.is_owned and bool(job.gpus or is_marked or job.kind.kind == "TrainJob")


def _relevant(document: Document) -> bytes:
    """What of a job matters to the TrainingJob that names it."""
    metadata, status = document["metadata"], document.get("status") or {}
    others = {key: value for key, value in (metadata.get("annotations") or {}).items() if key not in ADVICE_KEYS}
    states = [(item.get("type"), item.get("status")) for item in status.get("conditions") or ()]
    steps = reports.trainer_metrics(status)
    return canonical([metadata.get("uid"), others, metadata.get("labels"), document.get("spec"), states, steps])
