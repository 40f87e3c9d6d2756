"""Write estimates of a job's start and run time into annotations of its Kueue Workloads. Nothing enforces them.

The annotations are advice for people and schedulers. A limit that ends a run is written only for a job whose owner asks
for it (`run_limits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilecast import jobs
from tilecast.api.fields import Document, as_mapping, value_at_path
from tilecast.api.status import QueuePosition
from tilecast.jobs import JOB_KINDS
from tilecast.spec import SpecError
from tilecast_operator.controllers import patches, run_limits
from tilecast_operator.controllers.kueue_features import KueueDetector
from tilecast_operator.controllers.planned_jobs import QueuePositions, list_changed_keys
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.kube.fair_limiter import PermitRequest
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.times import parse_time
from tilecast_operator.objects.kinds import KINDS, make_object_path

ESTIMATE = "Estimate"
"""Kind of work queue keys for writing the estimates of a job, one key per job."""
MOST_TRIES = 10
"""Most attempts to find the Workload of a job. Kueue creates it after the job."""
WAIT_S = 2.0
"""Seconds until the second attempt. The wait doubles with each attempt."""
ANNOTATIONS = (jobs.START_ESTIMATE, jobs.START_RANGE, jobs.RUN_ESTIMATE, jobs.RUN_RANGE)
"""All annotations with estimates. Those without a value are removed."""


class EstimateWriter:
    """Writer of the estimates of waiting jobs, after each plan of the queue. Belongs to one event loop."""

    def __init__(self, context: SharedContext, kueue_check: KueueDetector, planned: QueuePositions) -> None:
        self._context = context
        self._kueue = kueue_check
        self._planned = planned
        self._tries: StateTable[int] = context.records.add_table()
        self._written: StateTable[tuple[str, Mapping[str, str]]] = context.records.add_table()
        """UID of each job with written estimates, and the estimates."""
        self._turns: StateTable[tuple[str, tuple[float, str]]] = context.records.add_table()
        """UID of each job with a Workload, and creation time and UID of the Workload."""
        self.kueue_positions: Mapping[Key, QueuePosition] = {}
        """Forecast of each job for which Kueue chooses the pool."""
        self._longest_s: Mapping[Key, float] = {}
        """Seconds of the longest run of each planned job, on any pool."""
        self._complaints: StateTable[str] = context.records.add_table()
        """Text of the last Event about a job's limit."""
        context.cache.jobs.add_listener(self._on_job_change)
        context.leadership.add_listener(self._on_leadership_change)
        context.runtime.register(ESTIMATE, self._write_job, gone=self._on_unserved)

    def schedule_jobs(self, keys: Iterable[Key]) -> None:
        """Schedule writing the estimates of jobs whose positions have changed."""
        for key in keys:
            if key.kind in JOB_KINDS:
                self._context.runtime.add(_make_estimate_key(key), in_background=True)

    def replace_kueue_positions(self, positions: Mapping[Key, QueuePosition]) -> set[Key]:
        """Replace the forecasts of jobs for which Kueue chooses the pool. Return the keys of changed ones."""
        before, self.kueue_positions = self.kueue_positions, positions
        return list_changed_keys(before, positions)

    def find_forecast(self, key: Key) -> QueuePosition | None:
        """Return where and when a waiting job is forecast to run: where Kueue or the plan puts it. None if unknown."""
        return self.kueue_positions.get(key, self._planned.get_position(key))

    def keep_longest_runs(self, seconds: Mapping[Key, float]) -> None:
        """Store the seconds of the longest run of each planned job. Limits of runs are computed from them."""
        self._longest_s = seconds

    def find_turn(self, key: Key) -> tuple[float, str] | None:
        """Return creation time and UID of a job's Workload, by which Kueue sorts jobs of one priority, if known."""
        known, seen = self._turns.get(key), self._context.cache.jobs.get(key)
        return known[1] if known is not None and seen is not None and known[0] == seen.uid else None

    def _keep_turn(self, key: Key, uid: str, workloads: Sequence[Document]) -> None:
        """Store the turn of a job from its oldest Workload, if there is one, and plan again if it is new."""
        turns = [
            (created_s, str(item["metadata"].get("uid", "")))
            for item in workloads
            if (created_s := parse_time(item["metadata"].get("creationTimestamp"))) is not None
        ]
        if turns and self._turns.get(key) != (uid, min(turns)):
            self._turns[key] = uid, min(turns)
            self._planned.on_write()

    def _on_job_change(
        self, key: Key, before: CachedObject[Document] | None, now: CachedObject[Document] | None
    ) -> None:
        """Schedule a job again when its owner has changed the requested limit of its run."""
        marks = [(None, None, None) if seen is None else _list_limit_marks(seen.value) for seen in (before, now)]
        if now is not None and marks[0] != marks[1]:
            self._written.pop(key, None)
            self.schedule_jobs((key,))

    def _on_leadership_change(self, is_leading: bool) -> None:
        """When this replica begins to lead, write all estimates again, because another replica may have written."""
        if is_leading:
            keys = [*self._written]
            self._written.clear()
            self.schedule_jobs(keys)

    def _on_unserved(self, key: Key) -> None:
        """Schedule a job again if the API server does not serve Workloads, because Kueue may be being replaced."""
        self._context.runtime.add(key, self._context.timings.unserved_s, in_background=True)

    async def _write_job(self, estimate_key: Key) -> None:
        """Write the estimates of a waiting job into its Workloads. If the plan leaves the job out, remove them."""
        key = _parse_estimate_key(estimate_key)
        position, seen = self._planned.get_position(key), self._context.cache.jobs.get(key)
        if seen is None or (position is not None and position.position == 0):
            self._tries.pop(key, None)
            return
        estimates = describe_estimates(self.find_forecast(key))
        if self._written.get(key) == (seen.uid, estimates):
            return
        if jobs.QUEUE not in as_mapping(value_at_path(seen.value, ("metadata", "labels"))):
            return
        self._written.pop(key, None)
        workloads = await self._kueue.list_workloads(key.namespace, seen.uid)
        is_undecided = workloads is not None and not any(map(patches.is_reserved, workloads))
        # A job that is not planned keeps its limit, but its owner may take it away. Kueue does not manage an owned job.
        is_managed = position is not None or workloads
        if workloads is not None and is_undecided and is_managed and await self._write_run_limit(key, seen, workloads):
            workloads = await self._kueue.list_workloads(key.namespace, seen.uid)
        if workloads is None:
            return
        self._keep_turn(key, seen.uid, workloads)
        are_written = [await self._write_workload(workload, estimates) for workload in workloads]
        if workloads and all(are_written):
            self._tries.pop(key, None)
            self._written[key] = seen.uid, estimates
        elif estimates and not any(map(patches.is_reserved, workloads)):
            self._wait_for_workload(key)

    async def _write_run_limit(self, key: Key, seen: CachedObject[Document], workloads: Sequence[Document]) -> bool:
        """Write or remove the limit of a waiting job's run as its owner requests. Return whether anything has changed.

        If the requested factor is invalid, write one Event about it and leave the limit unchanged.
        """
        if not run_limits.is_suspended(seen.value):
            return False
        try:
            past_s = run_limits.find_past_seconds(workloads)
            changes = run_limits.decide_limit(seen.value, self._longest_s.get(key), past_s)
        except SpecError as error:
            text = str(error)
            if self._complaints.get(key) != text and await self._context.try_post_event(
                key, seen.uid, EventContent("Warning", "InvalidRunLimit", text)
            ):
                self._complaints[key] = text
            return False
        self._complaints.pop(key, None)
        if changes is None:
            return False
        operations = patches.make_limit_patch(seen.value, changes)
        body = await self._context.writer.patch(
            make_object_path(key), KINDS[key.kind].plural, operations, PermitRequest(key.namespace)
        )
        self._context.cache.jobs.store_written_object(body)
        return True

    def _wait_for_workload(self, key: Key) -> None:
        self._tries[key] = tries = self._tries.get(key, 0) + 1
        if tries < MOST_TRIES:
            self._context.runtime.add(_make_estimate_key(key), WAIT_S * 2.0 ** (tries - 1), in_background=True)

    async def _write_workload(self, workload: Document, estimates: Mapping[str, str]) -> bool:
        """Write estimates into a Workload that has no quota yet. Return whether the Workload then has them."""
        if patches.is_reserved(workload):
            return False
        operations = patches.make_annotations_patch(workload, {key: estimates.get(key) for key in ANNOTATIONS})
        if not operations:
            return True
        path, permit = await self._kueue.find_workload_path(workload), PermitRequest(workload["metadata"]["namespace"])
        try:
            await self._context.writer.patch(path, "workloads", operations, permit)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True


def _list_limit_marks(document: Document) -> tuple[object, object, object]:
    """Return the three values that decide about a job's limit: owner's factor, Tilecast's annotation and label."""
    labels, annotations = (
        as_mapping(value_at_path(document, ("metadata", part))) for part in ("labels", "annotations")
    )
    return annotations.get(jobs.RUN_LIMIT_FACTOR), annotations.get(jobs.RUN_LIMIT), labels.get(jobs.RUN_LIMIT_LABEL)


def _make_estimate_key(key: Key) -> Key:
    """Return the work queue key for the estimates of a job."""
    return Key(ESTIMATE, key.namespace, f"{key.kind}/{key.name}")


def _parse_estimate_key(key: Key) -> Key:
    """Return the key of the job to which a work queue key for estimates belongs."""
    kind, _, name = key.name.partition("/")
    return Key(kind, key.namespace, name)


def describe_estimates(position: QueuePosition | None) -> dict[str, str]:
    """Return the annotations with the start and the run time of a waiting job, and their ranges.

    The result is empty if the job has no position or the plan leaves the job out.
    """
    if position is None:
        return {}
    run, said = position.run_seconds, dict[str, str]()
    if position.start is not None:
        said[jobs.START_ESTIMATE] = position.start
    if position.earliest_start is not None and position.latest_start is not None:
        said[jobs.START_RANGE] = f"{position.earliest_start}/{position.latest_start}"
    if run is not None:
        said[jobs.RUN_ESTIMATE] = f"{run.target:.0f}"
        said[jobs.RUN_RANGE] = f"{run.lower_bound:.0f}-{run.upper_bound:.0f}"
    return said
