"""Writer of annotations, Event and status of a TrainingJob, each only where it differs."""

from __future__ import annotations

from tilecast.api.status import TrainingJobStatus
from tilecast_operator.controllers.contention import Contention
from tilecast_operator.controllers.desired import Desired
from tilecast_operator.controllers.learning import PoolLearnings
from tilecast_operator.controllers.planned_jobs import PlannedJobs
from tilecast_operator.controllers.requests import read_target
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.cache import Stored
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.kinds import Key
from tilecast_operator.objects.view import View, annotations_digest, status_digest


class StatusWrites:
    """Writer of the answers to TrainingJobs. Belongs to one event loop."""

    def __init__(
        self, context: SharedContext, learning: PoolLearnings, planned: PlannedJobs, contention: Contention
    ) -> None:
        self._context = context
        self._learning = learning
        self._planned = planned
        self._contention = contention

    async def write_answer(self, key: Key, seen: Stored[View], want: Desired, before: TrainingJobStatus) -> bool:
        """Write differences, unless the job is left to another operator; return whether the status was written.

        Args:
            key: Key of the job.
            seen: The job as it was seen.
            want: Status, annotations and Event that the job should have.
            before: The present status.

        Raises:
            ApiError: For example 409, where the job has changed since it was seen.
        """
        generation = seen.value.generation
        if self._contention.must_wait(key, generation):
            return False
        try:
            return await self._write_changes(key, seen, want, before)
        except ApiError as error:
            if error.status == 409:
                self._contention.record_conflict(key, generation)
            raise

    async def _write_changes(self, key: Key, seen: Stored[View], want: Desired, before: TrainingJobStatus) -> bool:
        is_conditional, asked = self._context.runtime.is_conditional(key), seen.value
        status = self._planned.add_position(read_target(key.namespace, asked.document) or key, want.status, before)
        document, first = status.document(), next(iter(status.alternatives), None)
        digest = status_digest(document)
        if digest != asked.digest and before.observed_generation is not None:
            writer = before.writer
            if await self._contention.must_yield(key, seen.uid, writer, asked.generation, asked.digest):
                return False
        if want.annotations is not None and asked.annotations_digest != annotations_digest(want.annotations):
            seen = await self._context.writer.annotate(key, seen, want.annotations, is_conditional=is_conditional)
        if want.note is not None:
            await self._context.writer.post(key, seen.uid, want.note, is_change=bool(asked.status.get("summary")))
        self._learning.corrected.set_ratio(key, None if first is None else first.own_runs_ratio)
        is_other = digest != seen.value.digest
        if is_other:
            signed = document | {"writer": self._contention.signature}
            seen = await self._context.writer.write_status(key, seen, signed, is_conditional=is_conditional)
            self._contention.record_write(key, asked.generation, digest)
            self._planned.on_write()
        # A step that the job already reports is compared with the forecast that was just written.
        if not seen.value.has_same_question(asked) or (
            is_other and status.forecast is not None and before.forecast is None
        ):
            self._context.runtime.add(key)
        return is_other
