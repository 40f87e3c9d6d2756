"""Controller that annotates jobs of all kinds except TrainingJob, and writes Events about them.

Held jobs are handled in `admission`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilecast import jobs, untrusted
from tilecast.api.fields import as_mapping
from tilecast.jobs import JOB_KINDS, Job
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.admission import AdmissionController
from tilecast_operator.controllers.desired import ALREADY_STARTED, decide_job
from tilecast_operator.controllers.job_advice import (
    AdviceRequest,
    JobAdvisor,
    encode_relevant_fields,
    read_job_leniently,
)
from tilecast_operator.controllers.pools import PoolsChange
from tilecast_operator.controllers.queue_jobs import UNREADABLE
from tilecast_operator.controllers.requests import JobRequestIndex
from tilecast_operator.controllers.requeues import RequeueController, is_preempted, is_requeued
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.objects.documents import HASH, NODE_SELECTOR
from tilecast_operator.objects.kinds import make_object_path
from tilecast_operator.objects.view import FOREIGN, select_operator_annotations
from tilecast_operator.observed.progress import name_stage
from tilecast_operator.outcome import (
    AdviceOutcome,
    AdviceRefusal,
    find_interruption,
    get_ready_message,
    is_internal_error,
)
from tilecast_operator.report.advice import make_advice_annotations, make_job_event

log = logging.getLogger("tilecast")

NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(slots=True)
class _JobState:
    """State of a job that the controller keeps only in memory."""

    is_owed: bool = False
    """Whether the job still needs advice. A job that was seen unfinished gets advice even if it ends before that."""
    posted: EventContent | None = None
    """Last Event that was written."""
    left_out: str = ""
    """Reason in the last Event about a job that the queue plan leaves out, without its numbers."""
    looks: int = 0
    """Number of checks, since the release, of whether Kueue has admitted the job."""
    intact: Mapping[str, str] | None = None
    """Annotations of Tilecast before another client changed them."""


class JobController:
    """Controller of jobs that request advice, of all kinds except TrainingJob. Belongs to one event loop."""

    def __init__(
        self,
        context: SharedContext,
        requests: JobRequestIndex,
        advice: JobAdvisor,
        admission: AdmissionController,
        requeues: RequeueController,
    ) -> None:
        self._context = context
        self._requeues = requeues
        self._requests = requests
        self._advice = advice
        self._admission = admission
        self._states = context.records.add_table(_JobState)
        self._queueless: StateTable[bool] = context.records.add_table()
        """Jobs with a queue that is not known yet."""
        context.cache.jobs.is_kept = self._is_cached
        context.cache.jobs.add_listener(self._on_job_change)
        context.cache.namespaces.add_listener(self._on_namespace_change)
        for table in (context.cache.local_queues, context.cache.cluster_queues, context.cache.flavors):
            table.add_listener(self._on_queue_change)
        advice.answers.pools.add_listener(self._on_pools_change)
        for kind in JOB_KINDS:
            context.runtime.register(kind, self._reconcile_job, context.cache.jobs)
            context.answers.register_kind(kind)

    def _is_cached(self, key: Key, document: Document) -> bool:
        """Return whether the cache must keep a job.

        The cache keeps jobs that wait for Tilecast or Kueue, targets of TrainingJobs, jobs without advice, and jobs
        that could request advice by a label.
        """
        job = read_job_leniently(document)
        return (
            _is_queued(job)
            or job.is_held
            or key in self._requests
            or self._needs_advice(key)
            or _may_request_advice(job)
        )

    def _on_job_change(
        self, key: Key, before: CachedObject[Document] | None, now: CachedObject[Document] | None
    ) -> None:
        if now is None:
            self._requests.notify_requesters(key)
            return
        if not read_job_leniently(now.value).is_finished:
            self._states.get_or_make(key).is_owed = True
        if before is not None and FOREIGN in now.value and FOREIGN not in before.value:
            self._states.get_or_make(key).intact = select_operator_annotations(
                before.value["metadata"].get("annotations") or {}
            )
        self._admission.held.track_job(key, before, now)
        self._admission.start_decision(key, now)
        self._context.runtime.add(key)
        is_other = before is None or encode_relevant_fields(before.value) != encode_relevant_fields(now.value)
        if is_other and (
            before is not None or not select_operator_annotations(now.value["metadata"].get("annotations") or {})
        ):
            created = "" if before else str(now.value["metadata"].get("creationTimestamp", ""))
            self._context.answers.start_wait(key, created)
        stages = [None if seen is None else name_stage(seen.value.get("status") or {}) for seen in (before, now)]
        if is_other or stages[0] != stages[1]:
            self._requests.notify_requesters(key)

    def _on_namespace_change(self, key: Key, before: CachedObject[Any] | None, now: CachedObject[Any] | None) -> None:
        """Reconcile all jobs of a namespace when its label that requests advice changes."""
        labels = [{} if seen is None else seen.value.labels for seen in (before, now)]
        if now is not None and labels[0].get(jobs.ENABLED) != labels[1].get(jobs.ENABLED):
            for job in self._context.cache.jobs:
                if job.namespace == key.name:
                    self._context.runtime.add(job)

    def _on_queue_change(self, key: Key, before: CachedObject[Any] | None, now: CachedObject[Any] | None) -> None:
        for job in self._queueless:
            self._context.runtime.add(job)

    def _on_pools_change(self, change: PoolsChange) -> None:
        for key in {*self._context.cache.jobs, *self._requests}:
            if change.concerns_namespace(key.namespace):
                seen = self._context.cache.jobs.get(key)
                annotations = {} if seen is None else seen.value["metadata"].get("annotations") or {}
                self._context.runtime.add(key, in_background=bool(select_operator_annotations(annotations)))

    async def _reconcile_job(self, key: Key) -> None:
        """Write the annotations and Events of a job that is not held."""
        seen = self._context.cache.jobs.get(key)
        if seen is None and key in self._requests:
            # The cache dropped the job when it was seen, because no TrainingJob targeted it then.
            seen = self._context.cache.jobs.store_written_object(
                await self._context.client.get(make_object_path(key)), is_new=True
            )
        if seen is None or self._admission.is_deciding(key, seen.uid) or not self._advice.answers.is_ready:
            return
        if await self._advise_job(key, seen):
            self._context.answers.end_wait(key)
            self._states.get_or_make(key).is_owed = False
            if key not in self._queueless:
                await self._post_left_out_event(key)
            if not self._is_cached(key, seen.value):
                self._context.cache.jobs.forget_object(key)

    async def _post_left_out_event(self, key: Key) -> None:
        """Write an Event about an advised job that the queue plan leaves out, once for each reason.

        Reasons that differ only in numbers count as equal. A job without advice already has an Event with the reason.
        """
        text, seen = self._advice.planned.find_left_out_reason(key), self._context.cache.jobs.get(key)
        reason = NUMBER.sub("", text)
        if seen is None or text in ("", UNREADABLE) or reason == self._states.get_or_make(key).left_out:
            return
        job = read_job_leniently(seen.value)
        if HASH in job.annotations:
            note = EventContent("Warning", "NotPlanned", f"the plan of the whole queue leaves it out: {text}")
            if await self._context.try_post_event(key, job.uid, note):
                self._states.get_or_make(key).left_out = reason

    async def _advise_job(self, key: Key, seen: CachedObject[Document]) -> bool:
        """Write the changed annotations and Events of a job. Return whether nothing is left to do for now."""
        if self._context.find_quarantine(key) is not None:
            return True
        job = await self._advice.read_job(seen.value)
        own, advice_request = select_operator_annotations(job.annotations), self._advice.find_advice_request(key, job)
        if _is_queued(job):
            return await self._record_admission(
                key, job, own if (intact := self._pop_original_annotations(key)) is None else intact
            )
        if is_preempted(job) and self._context.settings.place:
            await self._schedule_check(key, job, await self._requeues.list_workloads(key, job.uid))
            return True
        self._stop_checks(key)
        if is_requeued(job) and self._context.settings.place:
            await self._requeues.widen_workloads(key, job)
        is_settled = job.has_started or job.annotations.get(jobs.APPLIED) == patches.PLACED
        if is_settled and own and FOREIGN in seen.value and not job.is_owned:
            ours = {name: text for name, text in own.items() if name not in seen.value[FOREIGN]}
            await self._repair_annotations(key, job, ours, advice_request)
            return True
        if (job.is_finished and not self._needs_advice(key)) or job.is_owned or (is_settled and own):
            return True
        if isinstance(advice_request, AdviceRefusal):
            await self._post_event_once(key, job, make_job_event(advice_request, job.annotations.get(jobs.APPLIED)))
            return True
        if advice_request is None or advice_request.mode == "Off":
            if own:
                await self._advice.annotate(key, job, {})
            return True
        answer, _ = await self._advice.advise_job(job, advice_request, writes_advice=advice_request.mode == "Initial")
        if (pause := find_interruption(answer)) is not None:
            self._context.runtime.add(key, pause.again_s, in_background=True)
            if own:
                return True
        if isinstance(answer, AdviceRefusal) and answer.reason == "QueueNotFound":
            # After a start of the operator a job may be seen before its queue, and a missing queue may be created.
            is_first = key not in self._queueless
            self._queueless[key] = True
            again_s = self._context.timings.owner_s if is_first else self._context.settings.config_map_poll_s
            self._context.runtime.add(key, again_s)
            if is_first:
                return False
        else:
            self._queueless.pop(key, None)
        if await self._advice.must_yield(key, seen.value, advice_request, answer):
            return True
        await self._write_outcome(key, job, answer, writes_advice=advice_request.mode == "Initial")
        self._advice.record_write(key, seen.value, advice_request, answer)
        if is_internal_error(answer):
            raise TryAgainError(get_ready_message(answer))
        return True

    def _needs_advice(self, key: Key) -> bool:
        return (self._states.get(key) or _JobState()).is_owed

    def _pop_original_annotations(self, key: Key) -> Mapping[str, str] | None:
        """Return the job's annotations of Tilecast from before another client changed them, and forget this copy."""
        state = self._states.get_or_make(key)
        intact, state.intact = state.intact, None
        return intact

    async def _repair_annotations(
        self, key: Key, job: Job, ours: Mapping[str, str], advice_request: AdviceRequest | AdviceRefusal | None
    ) -> None:
        """Restore the annotations of Tilecast on a started job after another client has changed them.

        The restored annotations come from a copy made before the change. If there is no copy, they come from the
        present advice, if that agrees with the unchanged annotations.

        Args:
            key: Key of the job.
            job: The job as it was seen.
            ours: Annotations of Tilecast that are unchanged.
            advice_request: The request for advice on the job.
        """
        intact = self._pop_original_annotations(key)
        if intact is None and isinstance(advice_request, AdviceRequest) and ours:
            answer, _ = await self._advice.advise_job(
                job, advice_request, writes_advice=advice_request.mode == "Initial"
            )
            advised = {} if isinstance(answer, AdviceRefusal) else make_advice_annotations(answer)
            intact = advised if ours.items() <= advised.items() else None
        if intact:
            applied = job.annotations.get(jobs.APPLIED)
            await self._advice.annotate(key, job, intact if applied is None else {**intact, jobs.APPLIED: applied})

    async def _record_admission(self, key: Key, job: Job, annotations: Mapping[str, str]) -> bool:
        """Record whether Kueue has admitted a placed job. Return whether Kueue has decided.

        Args:
            key: Key of the job.
            job: The job as it was seen.
            annotations: Annotations of Tilecast that the job has or should have.
        """
        if not self._context.settings.place:  # the operator may not read Workloads either
            return True
        workloads = await self._requeues.list_workloads(key, job.uid)
        decided = patches.find_kueue_outcome(job, workloads, _read_node_selector(annotations))
        if decided is None:
            self._context.answers.end_wait(key)  # it was answered when it was released
            await self._schedule_check(key, job, workloads)
            return False
        self._stop_checks(key)
        outcome, more = decided
        await self._advice.annotate(key, job, {**annotations, jobs.APPLIED: outcome})
        self._admission.held.count_outcome(outcome)
        await self._admission.post_outcome_event(key, job, outcome, more)
        self._requests.notify_requesters(key)
        return True

    async def _schedule_check(self, key: Key, job: Job, workloads: Sequence[Document]) -> None:
        """Schedule the next check of whether Kueue has admitted a job. Requeue a job that has waited too long."""
        left_s = await self._requeues.requeue_if_due(key, job, workloads)
        if left_s is None:
            self._stop_checks(key)
            return
        state = self._states.get_or_make(key)
        timings = self._context.timings
        look_s = min(timings.look_first_s * 2.0 ** min(state.looks, 16), timings.look_most_s)
        self._context.runtime.add(key, min(look_s, max(left_s, timings.look_least_s)))
        state.looks += 1

    def _stop_checks(self, key: Key) -> None:
        """Stop checking whether Kueue has admitted a job, and forget how long it has waited for quota."""
        self._states.get_or_make(key).looks = 0
        self._requeues.forget_wait(key)

    async def _write_outcome(self, key: Key, job: Job, outcome: AdviceOutcome, *, writes_advice: bool) -> None:
        """Write the annotations and Events of an advice outcome. `decide_job` describes the arguments."""
        want = decide_job(job, outcome, writes_advice=writes_advice)
        if want.missed is not None:
            self._admission.held.count_outcome(ALREADY_STARTED)
            await self._post_event_once(key, job, want.missed)
        if want.annotations is not None:
            await self._advice.annotate(key, job, want.annotations)
            self._context.metrics.count_advice(outcome, is_changed=bool(select_operator_annotations(job.annotations)))
            self._context.answers.record_outcome(key)
        if want.note is not None:
            await self._post_event_once(key, job, want.note, is_change=want.is_change)

    async def _post_event_once(self, key: Key, job: Job, note: EventContent, *, is_change: bool = False) -> None:
        """Write an Event about a job, unless the last one had the same content."""
        before, author = self._states.get_or_make(key).posted, self._context.writer.author
        if before is not None and author.get_constant_content(before) == author.get_constant_content(note):
            return
        if await self._context.try_post_event(key, job.uid, note, is_change=is_change or before is not None):
            self._states.get_or_make(key).posted = note


def _read_node_selector(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Return the node selector in the annotations of Tilecast, or an empty mapping."""
    try:
        return as_mapping(untrusted.parse_json(annotations.get(NODE_SELECTOR, "")))
    except ValueError:
        return {}


def _is_queued(job: Job) -> bool:
    """Return whether a job was placed and released, but not yet admitted by Kueue."""
    return job.annotations.get(jobs.APPLIED) == patches.QUEUED and not job.is_held


def _may_request_advice(job: Job) -> bool:
    """Return whether a job could request advice by a label.

    Such a job has not ended, and it requests GPUs, or its runtime may, or it is marked for Tilecast.
    """
    is_marked = jobs.ENABLED in job.labels or jobs.MODEL in job.annotations
    return not job.is_finished and not job.is_owned and bool(job.gpus or is_marked or job.kind.runtimes)
