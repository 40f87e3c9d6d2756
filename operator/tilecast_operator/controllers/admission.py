"""Controller that places held jobs of mode Initial on nodes, and releases every held job.

A held job is one that waits for Tilecast (`Job.is_held`). One task for each held job releases it within
`ControllerDelays.decide_s` plus the time of a few writes, with or without advice. Whether a job was released can be
seen from the gate on the object alone, so a restart or a second operator does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tilecast import jobs
from tilecast.advice import Advice
from tilecast.api import training_job
from tilecast.jobs import HOLD_QUEUE, NEXT_QUEUE, QUEUE, Job, Placement, candidates
from tilecast.spec import SpecError
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.job_advice import JobAdvisor, read_job_leniently
from tilecast_operator.controllers.kueue_features import GATE, REMEDY
from tilecast_operator.controllers.placement import JobChangedError, Placer
from tilecast_operator.controllers.requests import JobRequestIndex
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.client import UNREACHABLE, ApiError, is_webhook_down
from tilecast_operator.kube.controller_state import ControllerState, StateTable
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.lease import NotLeaderError
from tilecast_operator.kube.times import parse_time
from tilecast_operator.metrics import Metrics
from tilecast_operator.outcome import AdviceRefusal, get_ready_message, get_ready_reason
from tilecast_operator.report.advice import describe_gain
from tilecast_operator.report.job_status import ConditionContent

log = logging.getLogger("tilecast")


OUTCOMES: Mapping[str, str] = {
    patches.PLACED: "the node choice was written into the job before it started",
    patches.QUEUED: "the node choice was written and the job let go; Kueue has not admitted it yet",
    "ModeAdvise": "mode Advise never changes a job",
    "ModeOff": "mode is Off: nothing but this status is written",
    "AlreadyStarted": "the job had started before it could be placed; create it suspended, or behind a gate of Kueue",
    "NotGated": "nothing holds the job for us; annotate it with tilecast.dev/mode: Initial while it is suspended, or "
    f"create it in a held queue, label {QUEUE}: {HOLD_QUEUE} and annotation {NEXT_QUEUE}: QUEUE, or, where Kueue's "
    f"feature gate {GATE} is on, with kueue.x-k8s.io/admission-gated-by: tilecast.dev/advisor",
    "QuotaReserved": "Kueue had decided about the job before it could be placed; it runs as it was",
    "QueueNotHeld": "Kueue admits jobs from the queue that the job waits in; set stopPolicy: Hold on that LocalQueue",
    "AdmissionGateOff": f"Kueue's feature gate {GATE} is off, so that nothing keeps Kueue from admitting the job while "
    f"it is placed; {REMEDY}",
    "AdmissionGateUnknown": f"Kueue does not tell whether its feature gate {GATE} is on; {REMEDY}; or say "
    "jobs.kueue.admissionGate=present in the chart",
    patches.FAILED_TO_START: "Kueue gave the job up after it was placed; see its Workload, and create the job anew",
    patches.CHANGED_SINCE: "the job started without the node choice that was written; somebody took it back",
    patches.REQUEUED: "the job had no quota in time where it was placed, and may run on any flavor of its ranking",
    "Waiting": "the job is about to be placed and let go",
    "NotAllowed": "this operator may not place jobs; install the chart with jobs.place=true",
    "OtherScheduler": "KAI or Volcano decides where the job runs; it is advised and never placed",
    "AsksByClaim": "its pods ask for GPUs by ResourceClaims, which choose the devices; it is advised and never placed",
    "NotAsked": "nobody asks for advice on the job; label it tilecast.dev/enabled: true, or name it in a TrainingJob",
    "TooLate": "no advice came in time and the job was let go as it was; look at the operator's queue and log",
    "Refused": "the API server refused the node choice and the job was let go as it was",
    "CountNotWritable": "the advice has another number of GPUs than the job's pods can have; limit constraints.gpus",
    "Finished": "the job has ended",
    "Uninstalled": "Tilecast was about to be uninstalled, and let the job go as it was",
    "OperatorDown": "the operator was down, and the chart's CronJob let the job go as it was; see the operator's log",
}
"""Text for each outcome of a job, which says why the job was placed or not.

An outcome that is not listed is the reason of an `AdviceRefusal`.
"""
_BY_OTHERS = {"Waiting", "Finished", "Uninstalled", "OperatorDown"}
"""Outcomes that only other programs give to a job."""


@dataclass(frozen=True, slots=True)
class _PlacementDecision:
    """Place of a held job, or the reason why Tilecast does not place it."""

    outcome: str
    """`PLACED` or `QUEUED`, or the reason why the job is released unchanged."""
    text: str = ""
    placement: Placement | None = None
    advice: Advice | None = None


class HoldTimes:
    """Record of when each held job began to wait, with metrics of the waits. Belongs to one event loop.

    Args:
        records: Records of the jobs.
        metrics: Metrics that count waits and outcomes.
        clock: Clock of the API server, in Unix time.
        outcomes: All possible outcomes of a job. Their counters start at zero.
    """

    def __init__(
        self, records: ControllerState, metrics: Metrics, clock: Callable[[], float], outcomes: Iterable[str]
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._since: StateTable[float] = records.add_table()
        metrics.held.set_function(lambda: len(self._since))
        metrics.oldest_held.set_function(self._longest_wait_s)
        for outcome in outcomes:
            metrics.placements.labels(outcome)

    def track_job(self, key: Key, before: CachedObject[Document] | None, now: CachedObject[Document]) -> None:
        """Begin the wait of a job that is held now, or end the wait of a job that no longer is.

        Args:
            key: Key of the job.
            before: The job as it was seen before. None means a new job, which has waited since its creation.
            now: The job as it was seen now.
        """
        job = read_job_leniently(now.value)
        if not job.is_held or job.is_owned:
            self._since.pop(key, None)
        elif key not in self._since:
            created_s = None if before else parse_time(str(now.value["metadata"].get("creationTimestamp", "")))
            self._since[key] = self._clock() if created_s is None else created_s

    def get_wait_start_s(self, key: Key) -> float | None:
        """Return the Unix time at which a job began to wait. Return None if the job does not wait."""
        return self._since.get(key)

    def record_release(self, key: Key, since_s: float | None, outcome: str) -> None:
        """Count the outcome of a released job and end its wait, which began at the Unix time `since_s`."""
        self._since.pop(key, None)
        if since_s is not None:
            self._metrics.placement_wait.observe(max(0.0, self._clock() - since_s))
        self.count_outcome(outcome)

    def count_outcome(self, outcome: str) -> None:
        """Add 1 to the metric that counts jobs with an outcome."""
        self._metrics.placements.labels(outcome).inc()

    def _longest_wait_s(self) -> float:
        return max(0.0, self._clock() - min(self._since.values())) if self._since else 0.0


class WebhookOutage:
    """Record of an outage of the admission webhooks, noticed by failed writes to jobs. Belongs to one event loop."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def record_failure(self, error: Exception) -> None:
        """Record that a webhook did not answer. Log the first failure of an outage."""
        if self._since_s is None:
            self._since_s = time.monotonic()
            log.warning("jobs that wait are neither placed nor let go until a webhook answers: %s", error)

    def record_success(self) -> None:
        """Record that a write succeeded. If an outage was recorded, log its end."""
        if self._since_s is not None:
            log.info("webhooks answer again after %.0f s", time.monotonic() - self._since_s)
            self._since_s = None


class AdmissionController:
    """Controller that places and releases every held job. Belongs to one event loop."""

    def __init__(self, context: SharedContext, placer: Placer, requests: JobRequestIndex, advice: JobAdvisor) -> None:
        self._context = context
        self._placer = placer
        self._requests = requests
        self._advice = advice
        self._tasks: dict[tuple[Key, str], asyncio.Task[None]] = {}
        """Tasks by key and UID of the job. The UID distinguishes jobs that have the same name at different times."""
        context.leadership.add_listener(self._on_leadership_change)
        self._texts: StateTable[str] = context.records.add_table()
        """Sentence on why each job was released."""
        outcomes = OUTCOMES.keys() - _BY_OTHERS if context.settings.jobs else ()
        self._outage = WebhookOutage()
        self.held = HoldTimes(context.records, context.metrics, context.clock, outcomes)

    async def stop(self) -> None:
        """Stop all tasks. The next operator to start releases the jobs that still wait."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start_decision(self, key: Key, seen: CachedObject[Document]) -> None:
        """Start the task that places and releases a job, if the job is held.

        Only the leader starts tasks. No task is started for a job that another job created.
        """
        job, place = read_job_leniently(seen.value), (key, seen.uid)
        if self._context.leadership.is_leader and job.is_held and not job.is_owned and place not in self._tasks:
            task = asyncio.create_task(self._handle_held_job(key, seen.uid), name=f"hold-{key.namespace}/{key.name}")
            self._tasks[place] = task
            task.add_done_callback(lambda done: self._on_task_end(key, seen.uid, done))

    def is_deciding(self, key: Key, uid: str) -> bool:
        """Return whether a task is placing or releasing a job."""
        return (key, uid) in self._tasks

    def get_applied_condition(self, key: Key, job: Job, mode: training_job.Mode) -> ConditionContent:
        """Return the content of the condition Applied for the TrainingJob that targets a job."""
        if mode != "Initial":
            return ConditionContent("False", f"Mode{mode}", OUTCOMES[f"Mode{mode}"])
        outcome = job.annotations.get(jobs.APPLIED)
        if outcome is None:
            outcome = "Waiting" if job.is_held else "AlreadyStarted" if job.has_started else "NotGated"
            outcome = "NotAllowed" if outcome == "NotGated" and not self._context.settings.place else outcome
        text = "" if outcome == patches.QUEUED else self._texts.get(key, "")
        text = text or OUTCOMES.get(outcome, "the job was let go as it was; see its Events")
        return ConditionContent("True" if outcome == patches.PLACED else "False", outcome, text)

    def _on_leadership_change(self, is_leading: bool) -> None:
        """Start deciding about all held jobs when this replica becomes leader.

        Cancel all decisions when it loses the lead.
        """
        if not is_leading:
            for task in self._tasks.values():
                task.cancel()
            return
        for key in self._context.cache.jobs:
            if (seen := self._context.cache.jobs.get(key)) is not None:
                self.start_decision(key, seen)

    def _on_task_end(self, key: Key, uid: str, task: asyncio.Task[None]) -> None:
        """Log why the task of a job failed. Start a new task if the job is still held."""
        self._tasks.pop((key, uid), None)
        if not self._context.leadership.is_leader:
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: could not be let go: %r", key, error)
        if (seen := self._context.cache.jobs.get(key)) is not None:
            self.start_decision(key, seen)
            self._context.runtime.add(key)

    def _find_job(self, key: Key, uid: str) -> Document | None:
        """Return the cached job with a key and UID. Return None if there is none."""
        seen = self._context.cache.jobs.get(key)
        return seen.value if seen is not None and seen.uid == uid else None

    async def _handle_held_job(self, key: Key, uid: str) -> None:
        await self._context.journal.await_recorded(key, self._place_and_release(key, uid))

    async def _place_and_release(self, key: Key, uid: str) -> None:
        """Place a held job if its mode is Initial. Release the job in any case."""
        decision = _PlacementDecision("TooLate")
        try:
            decision = await self._decide_and_place(key, uid)
        except (ApiError, *UNREACHABLE) as error:
            if not isinstance(error, TimeoutError):
                log.warning("%s: not placed: %s", key, error)
                decision = _PlacementDecision("Refused", text=f"{OUTCOMES['Refused']}: {error}")
        except NotLeaderError:
            return  # the replica that leads decides
        except Exception:
            log.exception("%s: not placed", key)
            decision = _PlacementDecision("InternalError", text="placing failed; the operator's log has the rest")
        await self._release_job(key, uid, decision)

    async def _decide_and_place(self, key: Key, uid: str) -> _PlacementDecision:
        """Decide where a job runs, write its node selection, and return the decision.

        If the job changes meanwhile, decide again. If a webhook does not answer, retry for up to
        `ControllerDelays.webhook_s`.
        """
        timings, now_s = self._context.timings, asyncio.get_running_loop().time
        late_s, patient_s, wait_s = now_s() + timings.decide_s, now_s() + timings.webhook_s, timings.poll_s
        while True:
            document = self._find_job(key, uid)
            if document is None:
                return _PlacementDecision("Finished")
            try:
                return await self._place_job(key, document, late_s)
            except JobChangedError:
                await self._placer.reload_job(key)
            except ApiError as error:
                if not is_webhook_down(error) or now_s() > patient_s:
                    raise
                self._outage.record_failure(error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, timings.release_most_s)
                late_s = now_s() + timings.decide_s
                await self._placer.reload_job(key)

    async def _place_job(self, key: Key, document: Document, late_s: float) -> _PlacementDecision:
        """Decide where the job in `document` runs, write its node selection, and return the decision.

        Raise TimeoutError if no decision is made by `late_s`, a time on the event loop's clock. Also raise the errors
        of `Placer.write_placement`.
        """
        async with asyncio.timeout_at(late_s):
            try:
                decision = await self._decide_placement(key, document)
            except SpecError as error:
                return _PlacementDecision("InvalidSpec", text=str(error))
            if decision.placement is None or not read_job_leniently(document).is_held:
                return decision
            prepared = await self._placer.prepare_placement(key, document, decision.placement)
        if isinstance(prepared, str):
            return replace(decision, outcome=prepared)
        # No timeout here: a choice that is written halfway may contradict itself.
        return replace(decision, outcome=await self._placer.write_placement(prepared, decision.advice))

    async def _decide_placement(self, key: Key, document: Document) -> _PlacementDecision:
        """Return where the job runs, without writing anything.

        Wait for the job's TrainingJob and queue, which may appear in the cache later than the job.
        """
        if (refusal := self._context.find_quarantine(key)) is not None:
            return _PlacementDecision(refusal.reason, text=refusal.message)
        job = await self._advice.read_job(document)
        advice_request = self._advice.find_advice_request(key, job)
        timings, waited_s = self._context.timings, 0.0
        while advice_request is None and waited_s < timings.owner_s:
            await asyncio.sleep(timings.poll_s)
            waited_s += timings.poll_s
            advice_request = self._advice.find_advice_request(key, job)
        if advice_request is None:
            return _PlacementDecision("NotAsked")
        if isinstance(advice_request, AdviceRefusal):
            return _PlacementDecision(advice_request.reason, text=advice_request.message)
        if advice_request.mode != "Initial":
            return _PlacementDecision(f"Mode{advice_request.mode}")
        if not self._context.settings.place:
            return _PlacementDecision("NotAllowed")
        if job.other_scheduler or job.has_claims:
            return _PlacementDecision("OtherScheduler" if job.other_scheduler else "AsksByClaim")
        if job.is_finished or job.has_started:
            return _PlacementDecision("AlreadyStarted")
        while not self._advice.answers.is_ready:
            await asyncio.sleep(timings.poll_s)
        await self._advice.planned.wait_until_planned(key, timings.plan_s)
        answer, choice = await self._advice.advise_job(job, advice_request, writes_advice=True)
        while isinstance(answer, AdviceRefusal) and answer.reason == "QueueNotFound" and waited_s < timings.owner_s:
            # After a start of the operator a job may be seen before its queue.
            await asyncio.sleep(timings.poll_s)
            waited_s += timings.poll_s
            answer, choice = await self._advice.advise_job(job, advice_request, writes_advice=True)
        if isinstance(answer, AdviceRefusal) or answer.best is None or choice is None:
            return _PlacementDecision(get_ready_reason(answer), text=get_ready_message(answer))
        placement, offer = candidates.find_job_placement(answer.best, job, choice), answer.best
        if placement is None:
            return _PlacementDecision("CountNotWritable")
        where = f"{offer.pool.name}, {offer.nodes}x{offer.gpus_per_node} GPUs"
        text = f"placed on {where}: {offer.reason}{describe_gain(answer)}"
        return _PlacementDecision(patches.PLACED, text, placement, answer)

    async def _release_job(self, key: Key, uid: str, decision: _PlacementDecision) -> None:
        """Release a held job, retrying until that succeeds, and report the outcome."""
        timings = self._context.timings
        wait_s = timings.poll_s
        while True:
            document = self._find_job(key, uid)
            if document is None:
                return
            try:
                job = read_job_leniently(document)
                operations = patches.make_release_patch(document, job, decision.outcome)
                if operations:
                    since_s = self.held.get_wait_start_s(key)
                    await self._placer.patch_job(key, operations)
                    self._outage.record_success()
                    self.held.record_release(key, since_s, decision.outcome)
                    await self._report_outcome(key, job, decision)
                return
            except JobChangedError:
                await self._placer.reload_job(key)
            except Exception as error:
                if is_webhook_down(error):
                    self._outage.record_failure(error)
                else:
                    log.warning("%s: not let go yet: %r", key, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, timings.release_most_s)
                await self._placer.reload_job(key)

    async def _report_outcome(self, key: Key, job: Job, decision: _PlacementDecision) -> None:
        """Count the outcome of a released job and write an Event about it.

        If Kueue has yet to admit the job, its Event is written when Kueue has decided.
        """
        is_chosen = decision.outcome in (patches.PLACED, patches.QUEUED)
        text = decision.text if is_chosen or decision.placement is None else ""
        self._texts[key] = text or OUTCOMES.get(decision.outcome, decision.outcome)
        self._requests.notify_requesters(key)
        if decision.outcome != patches.QUEUED:
            await self.post_outcome_event(key, job, decision.outcome)

    async def post_outcome_event(self, key: Key, job: Job, outcome: str, kueue_message: str = "") -> None:
        """Write an Event that says where a job runs, or why it was not placed as advised.

        Args:
            key: Key of the job.
            job: The job as it was seen.
            outcome: `PLACED`, or the reason why the job is not placed.
            kueue_message: Message of Kueue about the outcome.
        """
        if outcome == patches.PLACED:
            note = EventContent("Normal", "Placed", self._texts.get(key) or OUTCOMES[outcome])
        else:
            was_told = outcome not in (patches.FAILED_TO_START, patches.CHANGED_SINCE)
            text = self._texts.get(key, "") if was_told else ""
            text = (text or OUTCOMES.get(outcome, outcome)) + (f": {kueue_message}" if kueue_message else "")
            self._texts[key] = text
            note = EventContent("Warning", "NotPlaced", f"{outcome}: {text}")
        await self._context.try_post_event(key, job.uid, note)

    async def post_requeue_event(self, key: Key, job: Job, text: str) -> None:
        """Write an Event which says that a placed job may now run on other flavors."""
        self._texts[key] = text
        self.held.count_outcome(patches.REQUEUED)
        self._context.metrics.requeued.inc()
        self._requests.notify_requesters(key)
        await self._context.try_post_event(key, job.uid, EventContent("Normal", patches.REQUEUED, text))
