"""Requeue placed jobs that get no quota. A job is requeued once, to all flavors on which it can run.

The node selection is removed from the job first and from its Workload second. Otherwise the Workload would contradict
the job, and Kueue would give the job up. A node affinity then limits the Workload to the flavors of the ranking. A job
that has quota or runs is never changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilecast import jobs
from tilecast.advice import Advice
from tilecast.api.fields import Document
from tilecast.jobs import Job
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.admission import AdmissionController
from tilecast_operator.controllers.job_advice import AdviceRequest, JobAdvisor
from tilecast_operator.controllers.kueue_features import KueueDetector
from tilecast_operator.controllers.placement import JobChangedError, Placer
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.times import parse_time
from tilecast_operator.objects.kinds import make_object_path

log = logging.getLogger("tilecast")

REFUSALS = (400, 403, 422)
"""HTTP statuses with which the API server refuses a change.

It does so, for instance, for kinds whose jobs are fixed once they have run.
"""


class RankedFlavor(NamedTuple):
    """A flavor of a job's queue on which the job can run, and whether it has free quota."""

    name: str
    node_labels: Mapping[str, str]
    has_room: bool


def is_requeued(job: Job) -> bool:
    """Return whether a job was requeued to other flavors and has not started since."""
    return job.annotations.get(jobs.APPLIED) == patches.REQUEUED and is_waiting(job)


def is_preempted(job: Job) -> bool:
    """Return whether a placed job had started, and now waits for Kueue again."""
    return job.annotations.get(jobs.APPLIED) == patches.PLACED and is_waiting(job)


def is_waiting(job: Job) -> bool:
    """Return whether Kueue keeps a job from running."""
    return bool(job.queue) and job.is_suspended and not job.is_finished and not job.is_held


class RequeueController:
    """Controller that requeues placed jobs that wait too long for quota. Belongs to one event loop."""

    def __init__(
        self,
        context: SharedContext,
        placer: Placer,
        advice: JobAdvisor,
        admission: AdmissionController,
        kueue_check: KueueDetector,
    ) -> None:
        self._context = context
        self._placer = placer
        self._advice = advice
        self._admission = admission
        self._kueue = kueue_check
        self._due_s: StateTable[float] = context.records.add_table()
        """Time at which each job is requeued, by the monotonic clock."""

    def forget_wait(self, key: Key) -> None:
        """Forget when a job began to wait for quota."""
        self._due_s.pop(key, None)

    async def list_workloads(self, key: Key, uid: str) -> Sequence[Document]:
        """Return the Workloads that Kueue created for a job. Raise the errors of `KueueDetector.list_workloads`."""
        return await self._kueue.list_workloads(key.namespace, uid) or ()

    async def requeue_if_due(self, key: Key, job: Job, workloads: Sequence[Document]) -> float | None:
        """Requeue a job to other flavors on which it can run, if it has waited too long for quota.

        Args:
            key: Key of the job.
            job: The job as it was seen.
            workloads: The Workloads that Kueue created for the job.

        Returns:
            Seconds until the job must be checked again. None once the job is requeued.
        """
        limit_s = self._context.settings.requeue_s
        if not limit_s or not is_waiting(job) or not workloads or any(map(patches.is_reserved, workloads)):
            self.forget_wait(key)
            return limit_s or float("inf")
        left_s = self._due_s.setdefault(key, time.monotonic() + limit_s + self._planned_wait_s(key)) - time.monotonic()
        if left_s > 0:
            return left_s
        try:
            if await self._requeue_job(key, job.uid):
                self.forget_wait(key)
                return None
        except JobChangedError:
            pass  # the next try sees the job as it is by then
        except ApiError as error:
            if error.status not in REFUSALS:
                raise
            log.warning("%s: may not run on other flavors: %s", key, error)
        return self._context.timings.requeue_again_s

    async def widen_workloads(self, key: Key, job: Job) -> None:
        """Allow Kueue to admit a requeued job to every flavor on which it can run.

        `job` must have been read without its node selection.
        """
        if flavors := await self._rank_flavors(key, job):
            await self._placer.widen_workloads(key, job, [flavor.node_labels for flavor in flavors])

    def _planned_wait_s(self, key: Key) -> float:
        """Return the seconds until the queue plan starts a job. Return 0 if it is not planned."""
        position = self._advice.planned.get_position(key)
        start_s = None if position is None or not position.pool else parse_time(position.start)
        return 0.0 if start_s is None else max(0.0, start_s - self._context.clock())

    async def _requeue_job(self, key: Key, uid: str) -> bool:
        """Remove the node selection from a job that still waits, and widen its Workloads.

        Return whether this was done.
        """
        document = await self._context.client.get(make_object_path(key))
        job = await self._advice.read_job({**document, "kind": key.kind})
        if job.uid != uid or not is_waiting(job) or job.annotations.get(jobs.APPLIED) == patches.REQUEUED:
            return False
        if any(map(patches.is_reserved, await self.list_workloads(key, uid))):
            return False
        open_job, chosen = jobs.remove_advised_selector(job), job.workers[0].node_selector if job.workers else {}
        flavors = await self._rank_flavors(key, open_job)
        others = [flavor for flavor in flavors if not flavor.node_labels.items() <= chosen.items()]
        if not others:
            return False
        operations = patches.make_unplacing_patch(document, job.kind.remove_placement(document, job))
        await self._placer.patch_job(key, operations)
        limit_s = self._context.settings.requeue_s
        names = ", ".join(flavor.name for flavor in flavors)
        text = f"no quota for {limit_s:g} s where it was placed; with {job.gpus} GPUs as before it may run on {names}"
        await self._admission.post_requeue_event(key, job, text)
        await self.widen_workloads(key, open_job)
        return True

    async def _rank_flavors(self, key: Key, job: Job) -> list[RankedFlavor]:
        """Return the flavors on which a job can run with its present number of GPUs, best first.

        A job with several groups of pods gets at most one flavor, because Kueue would choose a flavor for each group
        separately.
        """
        advice_request = self._advice.find_advice_request(key, job)
        if not isinstance(advice_request, AdviceRequest):
            return []
        answer, choice = await self._advice.advise_job(job, advice_request, writes_advice=True)
        if not isinstance(answer, Advice) or choice is None:
            return []
        flavors = dict[str, RankedFlavor]()
        for offer in answer.offers:
            candidate = choice.find_candidate(offer.pool.name)
            if candidate.flavor is not None and offer.gpus == job.gpus:
                flavor = RankedFlavor(candidate.flavor.name, candidate.flavor.node_labels, candidate.has_room(job.gpus))
                flavors.setdefault(flavor.name, flavor)
        ranking = list(flavors.values())
        return ranking if len(job.workers) == 1 else sorted(ranking, key=lambda flavor: not flavor.has_room)[:1]
