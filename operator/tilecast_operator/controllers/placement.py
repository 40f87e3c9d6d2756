"""Write the node selection of a held job into the job and its Kueue Workload.

Nothing is written unless the job certainly waits meanwhile. Kueue reads the node selector of a job once, when it
creates the Workload. If only the job has the selector, it contradicts the flavor of the Workload, and Kueue gives the
job up. So a selection is written to the Workload first, and removed from it last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilecast import jobs
from tilecast.advice import Advice
from tilecast.api.fields import Document
from tilecast.jobs import Job, Placement
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.job_advice import JobAdvisor, read_job_leniently
from tilecast_operator.controllers.kueue_features import KueueDetector
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.client import UNREACHABLE, ApiError
from tilecast_operator.kube.discovery import ServedApis
from tilecast_operator.kube.fair_limiter import PermitRequest
from tilecast_operator.kube.kinds import Key
from tilecast_operator.objects.kinds import KINDS, make_object_path
from tilecast_operator.report.advice import make_advice_annotations

ANNOTATION_TRIES = 5
"""Number of times that the advice is written to a held job that others change at the same time."""

log = logging.getLogger("tilecast")


class JobChangedError(Exception):
    """Error raised if a job has changed since its placement was decided."""


@dataclass(frozen=True, slots=True)
class PreparedPlacement:
    """A job that can be placed, and the field changes that place it."""

    key: Key
    job: Job
    placement: Placement
    operations: Sequence[patches.Operation]
    """Changes of the job. Empty if its pods already request these nodes."""
    workloads: Sequence[Document] | None
    """Workloads that Kueue created for the job. None without Kueue, or if the job has no queue."""


class Placer:
    """Writer of node selections into jobs and Workloads. Belongs to one event loop."""

    def __init__(
        self, context: SharedContext, discovery: ServedApis, advice: JobAdvisor, kueue_check: KueueDetector
    ) -> None:
        self._context = context
        self._discovery = discovery
        self._advice = advice
        self._kueue = kueue_check

    async def prepare_placement(self, key: Key, document: Document, placement: Placement) -> PreparedPlacement | str:
        """Return the field changes that place a job, or why the job must not be changed.

        Raises:
            ApiError, OSError: The API server does not answer.
        """
        job = await self._advice.read_job(document)
        workloads = await self._await_workloads(key, job) if job.queue else None
        if workloads is not None and (refusal := await self._find_admission_risk(job, workloads)) is not None:
            return refusal
        # Trainer 2.2 and later has `runtimePatches` instead of `podTemplateOverrides`.
        newer = key.kind != "TrainJob" or (
            not document.get("spec", {}).get("podTemplateOverrides")
            and await self._discovery.has_field(KINDS[key.kind], "runtimePatches")
        )
        changes = jobs.compute_changes(document, job, placement, has_runtime_patches=newer)
        operations = patches.make_placing_patch(
            document, changes, jobs.list_labels_to_record(job, placement.node_selector)
        )
        return PreparedPlacement(key, job, placement, operations, workloads)

    async def write_placement(self, prepared: PreparedPlacement, advice: Advice | None) -> str:
        """Write the node selection into the job and its Workloads, and the advice into annotations.

        Returns:
            `PLACED`, or `QUEUED` if Kueue has not admitted the job yet.

        Raises:
            JobChangedError: The job has changed, or no longer exists.
            ApiError: The API server refuses the write.
        """
        key, job = prepared.key, prepared.job
        await self._place_workloads(prepared.workloads or (), job, prepared.placement)
        if prepared.operations:
            await self.patch_job(key, prepared.operations)
        try:
            if advice is not None:
                await self._annotate(key, job, advice)
            # Kueue may have made another Workload of the job as it was before.
            while prepared.workloads is not None and await self._place_workloads(
                await self._kueue.list_workloads(key.namespace, job.uid) or (), job, prepared.placement
            ):
                continue
        except (ApiError, *UNREACHABLE) as error:
            log.warning("%s: placed; what follows failed: %s", key, error or type(error).__name__)
        return patches.PLACED if prepared.workloads is None else patches.QUEUED

    async def widen_workloads(self, key: Key, job: Job, flavors: Sequence[Mapping[str, str]]) -> None:
        """Change the Workloads of a job so that Kueue may admit it to any of several flavors.

        The job must not have a node selection. A Workload about which Kueue has decided is not changed.

        Args:
            key: Key of the job.
            job: The job from `JobAdvisor.read_job`.
            flavors: Node labels of each flavor.

        Raises:
            ApiError: The API server refuses the write.
        """
        while await self._change_workloads(
            await self._kueue.list_workloads(key.namespace, job.uid) or (),
            lambda workload: patches.make_widening_patch(workload, job, flavors),
        ):
            continue

    async def _annotate(self, key: Key, job: Job, advice: Advice) -> None:
        """Write the advice into annotations of a job, unless another operator has released the job meanwhile.

        That operator may have recorded the outcome, which a write of the advice alone would remove.
        """
        for tries_left in reversed(range(ANNOTATION_TRIES)):
            seen = self._context.cache.jobs.get(key)
            if seen is None or seen.uid != job.uid or not read_job_leniently(seen.value).is_held:
                return
            try:
                await self._advice.annotate(key, job, make_advice_annotations(advice), seen.resource_version)
            except ApiError as error:
                if error.status != 409 or not tries_left:
                    raise
                await self.reload_job(key)
            else:
                self._context.metrics.count_advice(advice, is_changed=False)
                self._context.answers.record_outcome(key)
                return

    async def patch_job(self, key: Key, operations: Sequence[patches.Operation]) -> None:
        """Patch a job. Raise the errors of `write_placement`."""
        try:
            self._context.cache.jobs.store_written_object(
                await self._context.writer.patch(
                    make_object_path(key),
                    KINDS[key.kind].plural,
                    operations,
                    PermitRequest(key.namespace, is_held=True),
                )
            )
        except ApiError as error:
            if error.status in (404, 409):
                raise JobChangedError from None
            raise

    async def reload_job(self, key: Key) -> None:
        """Read a job from the API server into the cache. If the job no longer exists, drop it from the cache."""
        try:
            self._context.cache.jobs.put_object(await self._context.client.get(make_object_path(key)))
        except ApiError as error:
            if error.status == 404:
                self._context.cache.jobs.forget_object(key)
        except UNREACHABLE as error:
            log.warning("%s: cannot be read: %s", key, error)

    async def _find_admission_risk(self, job: Job, workloads: Sequence[Document]) -> str | None:
        """Return why Kueue might admit a job before its node selection is written. Return None if it cannot."""
        if any(patches.is_reserved(item) for item in workloads):
            return "QuotaReserved"
        if job.is_parked:
            return None if await self._kueue.is_queue_held(job.namespace, job.current_queue) else "QueueNotHeld"
        gate = await self._kueue.check_gate(workloads)
        return None if gate == "present" else "AdmissionGateOff" if gate == "absent" else "AdmissionGateUnknown"

    async def _await_workloads(self, key: Key, job: Job) -> list[Document] | None:
        """Wait up to `ControllerDelays.workload_s` for the Workloads of a job, and return them.

        Return an empty list if the job has none by then, and None if the cluster has no Kueue.
        """
        waited_s = 0.0
        while not (workloads := await self._kueue.list_workloads(key.namespace, job.uid)):
            if workloads is None or waited_s >= self._context.timings.workload_s:
                break
            await asyncio.sleep(self._context.timings.poll_s)
            waited_s += self._context.timings.poll_s
        return workloads

    async def _place_workloads(self, workloads: Sequence[Document], job: Job, placement: Placement) -> bool:
        """Write a node selection into the Workloads that Kueue has not decided about. Return whether any changed."""
        return await self._change_workloads(
            workloads, lambda workload: patches.make_workload_patch(workload, job, placement)
        )

    async def _change_workloads(
        self, workloads: Sequence[Document], change: Callable[[Document], list[patches.Operation]]
    ) -> bool:
        """Patch the Workloads that Kueue has not decided about. Return whether any changed."""
        undecided = (item for item in workloads if not patches.is_reserved(item))
        differing = [(item, operations) for item in undecided if (operations := change(item))]
        for item, operations in differing:
            try:
                claim, path = (
                    PermitRequest(item["metadata"]["namespace"], is_held=True),
                    await self._kueue.find_workload_path(item),
                )
                await self._context.writer.patch(path, "workloads", operations, claim)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
        return bool(differing)
