"""Admission: jobs in mode Initial that wait for us in; node choices, and jobs that are let go, out.

A job that waits is handled by a task of its own and let go within `HOLD_S`, advised or not. Only the job itself says
whether it was let go: a restart, a second operator or an edit meanwhile find the same gate, or none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from tilecast import jobs
from tilecast.advise import Advice
from tilecast.api import training_job
from tilecast.jobs import Job, Placement, candidates
from tilecast.spec import SpecError
from tilecast_operator.answer import Declined, message, reason
from tilecast_operator.cluster.api import UNREACHABLE, ApiError
from tilecast_operator.cluster.cache import Stored
from tilecast_operator.cluster.discovery import ServedApis
from tilecast_operator.cluster.documents import Note, applied_fields
from tilecast_operator.cluster.kinds import KINDS, KUEUE, Key
from tilecast_operator.cluster.view import Document
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.job_advice import JobAdvice, about
from tilecast_operator.controllers.requests import Requests
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.report.advice import advice_annotations, gain
from tilecast_operator.report.job_status import Aspect

log = logging.getLogger("tilecast")

HOLD_S = 6.0
"""How long a job that waits for us is kept at most, from when it is first seen; below the ten seconds that are promised
by what the last write takes."""
DECIDE_S = 5.0
"""How much of that may pass before it is known where the job goes. The rest is for writing it, which must not end
between the job and its Workload."""
OWNER_S = 3.0
"""How long a gated job that asks for nothing itself waits for the TrainingJob that names it."""
WORKLOAD_S = 2.0
"""How long a placed job waits for the Workload that Kueue makes of it. Made later, it is made of the job as placed."""
POLL_S = 0.2
"""Between looks at what another controller has yet to make, and between tries to let a job go."""
MOST_WAIT_S = 5.0
"""Longest between tries to let a job go."""

OUTCOMES: Mapping[str, str] = {
    patches.PLACED: "the node choice was written into the job before it started",
    "ModeAdvise": "mode Advise never changes a job",
    "ModeOff": "mode is Off: nothing but this status is written",
    "AlreadyStarted": "the job had started before it could be placed; create it suspended, or behind a gate of Kueue",
    "NotGated": "nothing holds the job for us; annotate it with tilecast.dev/mode: Initial while it is suspended, or "
    "create it with kueue.x-k8s.io/admission-gated-by: tilecast.dev/advisor",
    "Waiting": "the job is about to be placed and let go",
    "NotAllowed": "this operator may not place jobs; install the chart with jobs.place=true",
    "NotAsked": "nobody asks for advice on the job; label it tilecast.dev/enabled: true, or name it in a TrainingJob",
    "TooLate": "no advice came in time and the job was let go as it was; look at the operator's queue and log",
    "Refused": "the API server refused the node choice and the job was let go as it was",
    "CountNotWritable": "the advice has another number of GPUs than the job's pods can have; limit constraints.gpus",
    "Finished": "the job has ended",
}
"""Why a job was placed or not, in a sentence; what is not here is the reason of a `Declined`."""


class _ChangedError(Exception):
    """The job is another than the one that was decided about."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """What becomes of a job that waits."""

    outcome: str
    """`PLACED`, or the reason why it is let go as it is."""
    text: str = ""
    placement: Placement | None = None
    advice: Advice | None = None


class Admission:
    """Every job that waits for us. Belongs to one event loop."""

    def __init__(self, context: SharedContext, discovery: ServedApis, requests: Requests, advice: JobAdvice) -> None:
        self._context = context
        self._discovery = discovery
        self._requests = requests
        self._advice = advice
        self._tasks: dict[tuple[Key, str], asyncio.Task[None]] = {}
        """By job and uid: what is decided about one job says nothing of the next of its name."""
        self._texts: dict[Key, str] = {}
        """Why each job was let go, in a sentence."""

    async def stop(self) -> None:
        """Stop everything; what waits then is let go by the next operator that starts."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def consider(self, key: Key, seen: Stored[Document]) -> None:
        """Begin to decide about a job, if it waits for us."""
        job, place = about(seen.value), (key, seen.uid)
        if job.is_held and not job.is_owned and place not in self._tasks:
            task = asyncio.create_task(self._hold(key, seen.uid), name=f"hold-{key.namespace}/{key.name}")
            self._tasks[place] = task
            task.add_done_callback(lambda done: self._ended(key, seen.uid, done))

    def holds(self, key: Key, uid: str) -> bool:
        """Whether it is being decided about a job."""
        return (key, uid) in self._tasks

    def forget(self, key: Key) -> None:
        """Let go of a job that is gone."""
        self._texts.pop(key, None)

    def applied(self, key: Key, job: Job, mode: training_job.Mode) -> Aspect:
        """The condition Applied of a TrainingJob with this target."""
        if mode != "Initial":
            return Aspect("False", f"Mode{mode}", OUTCOMES[f"Mode{mode}"])
        outcome = job.annotations.get(jobs.APPLIED)
        if outcome is None:
            outcome = "Waiting" if job.is_held else "AlreadyStarted" if job.has_started else "NotGated"
            outcome = "NotAllowed" if outcome == "NotGated" and not self._context.settings.place else outcome
        text = self._texts.get(key) or OUTCOMES.get(outcome, "the job was let go as it was; see its Events")
        return Aspect("True" if outcome == patches.PLACED else "False", outcome, text)

    def _ended(self, key: Key, uid: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop((key, uid), None)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("%s: could not be let go: %r", key, error)
        if (seen := self._context.cache.jobs.get(key)) is not None:
            self.consider(key, seen)
            self._context.runtime.add(key)

    def _same(self, key: Key, uid: str) -> Document | None:
        """The job as it is now; None if it is gone, or another of its name is there."""
        seen = self._context.cache.jobs.get(key)
        return seen.value if seen is not None and seen.uid == uid else None

    async def _hold(self, key: Key, uid: str) -> None:
        """Place a job that waits for us, if that is wanted, and let it go in any case."""
        decision = _Decision("TooLate")
        try:
            async with asyncio.timeout(HOLD_S):
                decision = await self._decide_and_place(key, uid)
        except (ApiError, *UNREACHABLE) as error:
            if not isinstance(error, TimeoutError):
                log.warning("%s: not placed: %s", key, error)
                decision = _Decision("Refused", text=f"{OUTCOMES['Refused']}: {error}")
        except Exception:
            log.exception("%s: not placed", key)
            decision = _Decision("InternalError", text="placing failed; the operator's log has the rest")
        await self._let_go(key, uid, decision)

    async def _decide_and_place(self, key: Key, uid: str) -> _Decision:
        """What becomes of the job, its node choice written where there is one."""
        late = asyncio.get_running_loop().time() + DECIDE_S
        while True:
            document = self._same(key, uid)
            if document is None:
                return _Decision("Finished")
            async with asyncio.timeout_at(late):
                try:
                    decision = await self._decide(key, document)
                except SpecError as error:
                    return _Decision("InvalidSpec", text=str(error))
            if decision.placement is None:
                return decision
            try:
                await self._place(key, document, decision.placement, decision.advice)
            except _ChangedError:
                await self._renew(key)
                continue
            return decision

    async def _decide(self, key: Key, document: Document) -> _Decision:
        job = await self._advice.read(document)
        asked = self._advice.asked(key, job)
        waited_s = 0.0
        while asked is None and waited_s < OWNER_S:
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
            asked = self._advice.asked(key, job)
        if asked is None:
            return _Decision("NotAsked")
        if isinstance(asked, Declined):
            return _Decision(asked.reason, text=asked.message)
        if asked.mode != "Initial":
            return _Decision(f"Mode{asked.mode}")
        if not self._context.settings.place:
            return _Decision("NotAllowed")
        if job.is_finished or job.has_started:
            return _Decision("AlreadyStarted")
        while not self._advice.is_ready:
            await asyncio.sleep(POLL_S)
        answer, found = await self._advice.answer(job, asked, is_placed=True)
        while isinstance(answer, Declined) and answer.reason == "QueueNotFound" and waited_s < OWNER_S:
            # At the start a job may be seen before its queue.
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
            answer, found = await self._advice.answer(job, asked, is_placed=True)
        if isinstance(answer, Declined) or answer.best is None or found is None:
            return _Decision(reason(answer), text=message(answer))
        placement, offer = candidates.placement(answer.best, job, found), answer.best
        if placement is None:
            return _Decision("CountNotWritable")
        text = f"placed on {offer.pool.name}, {offer.nodes}x{offer.gpus_per_node} GPUs: {offer.reason}{gain(answer)}"
        return _Decision(patches.PLACED, text, placement, answer)

    async def _place(self, key: Key, document: Document, placement: Placement, advice: Advice | None) -> None:
        """Write the node choice and the advice, and make the job's Workload ask for the same nodes.

        Raises:
            _ChangedError: the job is another by now.
            ApiError: the API server refuses it.
        """
        job = await self._advice.read(document)
        if not job.is_held:
            return
        # Trainer 2.2 and later has `runtimePatches` instead of `podTemplateOverrides`.
        newer = key.kind != "TrainJob" or (
            not document.get("spec", {}).get("podTemplateOverrides")
            and await self._discovery.has_field(key.kind, "runtimePatches")
        )
        changes = jobs.changes(document, job, placement, runtime_patches=newer)
        if operations := patches.placing(document, changes):
            await self._patch(key, operations)
        if advice is not None:
            fields = applied_fields(key, {"uid": job.uid, "annotations": advice_annotations(advice)})
            body = await self._context.writer.apply(key, fields)
            if self._context.cache.jobs.get(key) is not None:
                self._context.cache.jobs.see(body)
            self._context.metrics.count_advice(advice, changed=False)
        if job.queue:
            await self._place_workload(key, job, placement)

    async def _patch(self, key: Key, operations: list[patches.Operation]) -> None:
        try:
            self._context.cache.jobs.keep(
                await self._context.writer.patch(key.path, KINDS[key.kind].plural, operations)
            )
        except ApiError as error:
            if error.status in (404, 409):
                raise _ChangedError from None
            raise

    async def _place_workload(self, key: Key, job: Job, placement: Placement) -> None:
        """Make the Workload that Kueue made for the job ask for the same nodes. Kueue may have read the job before it
        was placed and make the Workload only now, so that its absence is no leave to go."""
        version = await self._discovery.version(KUEUE)
        if version is None:
            return
        path = f"/apis/{KUEUE}/{version}/namespaces/{key.namespace}/workloads"
        waited_s = 0.0
        while waited_s < WORKLOAD_S:
            listed = await self._context.client.get(path, {"labelSelector": f"{KUEUE}/job-uid={job.uid}"})
            found = listed.get("items") or ()
            undecided = (item for item in found if not patches.is_reserved(item))
            differing = [
                (item, operations) for item in undecided if (operations := patches.admitting(item, job, placement))
            ]
            for item, operations in differing:
                try:
                    await self._context.writer.patch(f"{path}/{item['metadata']['name']}", "workloads", operations)
                except ApiError as error:
                    if error.status not in (404, 409):
                        raise
            if found and not differing:
                return
            if not found:
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S

    async def _let_go(self, key: Key, uid: str, decision: _Decision) -> None:
        """Take our gate off, whatever it takes; then say what became of the job."""
        wait_s = POLL_S
        while True:
            document = self._same(key, uid)
            if document is None:
                return
            try:
                job = about(document)
                operations = patches.releasing(document, job, decision.outcome)
                if operations:
                    await self._patch(key, operations)
                    await self._tell(key, job, decision)
                return
            except _ChangedError:
                await self._renew(key)
            except Exception as error:
                log.warning("%s: not let go yet: %r", key, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MOST_WAIT_S)
                await self._renew(key)

    async def _tell(self, key: Key, job: Job, decision: _Decision) -> None:
        """Say what became of a job that was let go."""
        text = self._texts[key] = decision.text or OUTCOMES.get(decision.outcome, decision.outcome)
        self._requests.notify(key)
        is_placed = decision.outcome == patches.PLACED
        note = (
            Note("Normal", "Placed", text) if is_placed else Note("Warning", "NotPlaced", f"{decision.outcome}: {text}")
        )
        try:
            await self._context.writer.post(key, job.uid, note)
        except ApiError as error:
            log.warning("%s: Event not written: %s", key, error)

    async def _renew(self, key: Key) -> None:
        """Read the job anew; one that is gone is forgotten."""
        try:
            self._context.cache.jobs.see(await self._context.client.get(key.path))
        except ApiError as error:
            if error.status == 404:
                self._context.cache.jobs.forget(key)
        except UNREACHABLE as error:
            log.warning("%s: cannot be read: %s", key, error)
