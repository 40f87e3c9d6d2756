"""Writer of start and run estimates into annotations of Kueue's Workloads, which nothing enforces.

The annotations are advice for people and schedulers. No limit that ends a run is ever written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from tilecast import jobs
from tilecast.api.fields import Document, as_mapping, value_at_path
from tilecast.api.status import QueuePosition
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.kueue_features import KueueDetector
from tilecast_operator.controllers.planned_jobs import QueuePositions
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.client import UNREACHABLE, ApiError
from tilecast_operator.kube.fair_limiter import PermitRequest
from tilecast_operator.kube.kinds import Key

ESTIMATES = Key("Estimate")
"""Work queue key that makes estimates be written."""
MOST_TRIES = 10
"""Most times that the Workload of a job is looked for, which Kueue creates after the job."""
WAIT_S = 2.0

log = logging.getLogger("tilecast")


class EstimateWriter:
    """Writer of the estimates of waiting jobs after each plan of the queue. Belongs to one event loop."""

    def __init__(self, context: SharedContext, kueue_check: KueueDetector, planned: QueuePositions) -> None:
        self._context = context
        self._kueue = kueue_check
        self._planned = planned
        self._due = set[Key]()
        self._tries = Counter[Key]()
        context.runtime.register(ESTIMATES.kind, self._write_due)

    def schedule_jobs(self, keys: Iterable[Key]) -> None:
        """Have the estimates of jobs written whose positions have changed."""
        self._due.update(keys)
        self._context.runtime.add(ESTIMATES, in_background=True)

    async def _write_due(self, _: Key) -> None:
        """Write the estimates that are due. Estimates that could not be written stay due."""
        failed: Exception | None = None
        due, self._due = sorted(self._due), set()
        for key in due:
            try:
                if not await self._write_job(key):
                    self._wait_for_workload(key)
            except (ApiError, *UNREACHABLE) as error:
                self._due.add(key)
                failed = error
        if failed is not None:
            raise failed

    def _wait_for_workload(self, key: Key) -> None:
        self._tries[key] += 1
        if self._tries[key] < MOST_TRIES:
            self._due.add(key)
            self._context.runtime.add(ESTIMATES, WAIT_S, in_background=True)

    async def _write_job(self, key: Key) -> bool:
        """Write the estimates of a job into its Workloads. Return False if it may get a Workload later."""
        position, seen = self._planned.get_position(key), self._context.cache.jobs.get(key)
        if seen is None or position is None or not position.position:
            self._tries.pop(key, None)
            return True
        if jobs.QUEUE not in as_mapping(value_at_path(seen.value, ("metadata", "labels"))):
            return True
        workloads = await self._kueue.list_workloads(key.namespace, seen.uid)
        if workloads is not None and not workloads:
            return False
        self._tries.pop(key, None)
        for workload in workloads or ():
            await self._write_workload(workload, describe_estimates(position))
        return True

    async def _write_workload(self, workload: Document, estimates: Mapping[str, str]) -> None:
        operations = patches.make_annotations_patch(workload, estimates)
        if not operations or patches.is_reserved(workload):
            return
        path, permit = await self._kueue.find_workload_path(workload), PermitRequest(workload["metadata"]["namespace"])
        try:
            await self._context.writer.patch(path, "workloads", operations, permit)
        except ApiError as error:
            if error.status != 404:
                raise


def describe_estimates(position: QueuePosition) -> dict[str, str]:
    """Return the annotations that say when a waiting job starts and how long it runs, with their ranges."""
    run, said = position.run_seconds, dict[str, str]()
    if position.start is not None:
        said[jobs.START_ESTIMATE] = position.start
    if position.earliest_start is not None and position.latest_start is not None:
        said[jobs.START_RANGE] = f"{position.earliest_start}/{position.latest_start}"
    if run is not None:
        said[jobs.RUN_ESTIMATE] = f"{run.target:.0f}"
        said[jobs.RUN_RANGE] = f"{run.lower_bound:.0f}-{run.upper_bound:.0f}"
    return said
