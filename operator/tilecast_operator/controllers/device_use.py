"""Read from Prometheus the memory, activity and power that DCGM measures on the GPUs of running jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilecast.jobs import Job
from tilecast_operator.controllers.requests import JobRequestIndex
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.controllers.targets import find_running_target
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.times import parse_time
from tilecast_operator.observed import devices
from tilecast_operator.observed.devices import DeviceUse


class DeviceUseReader:
    """Reader of memory, activity and power of GPUs, which acts as a `QuerySource`. Belongs to one event loop."""

    def __init__(self, context: SharedContext, requests: JobRequestIndex) -> None:
        self._context = context
        self._requests = requests
        self._use: StateTable[DeviceUse] = context.records.add_table()
        """Last values read for each job's target."""

    def queries(self) -> Iterator[tuple[Key, str]]:
        """Yield the key of every TrainingJob whose target runs, and the query for the target's GPUs.

        Only the leader yields queries.
        """
        for key in list(self._context.cache.training_jobs):
            if not self._context.leadership.is_leader:
                return
            job = find_running_target(self._context, self._requests, key)
            window_s = None if job is None else self._find_window_s(job)
            if job is None or window_s is None:
                continue
            query = devices.make_query(self._context.settings.dcgm_selector, job, window_s)
            if query is not None:
                yield key, query

    async def record_sample(self, key: Key, outcome: Any) -> None:
        """Record what Prometheus returned for a job's query, unless it has no values.

        A response is dropped if it may be for an earlier job with the target's name.
        """
        job = find_running_target(self._context, self._requests, key)
        if job is None or self._find_window_s(job) is None:
            return
        before, use = self.find_use(key), devices.parse_use(outcome, self._context.timestamp(), job.uid)
        if use is not None and (before is None or _is_news(before, use)):
            self._use[key] = use
            self._context.runtime.add(key, in_background=True)

    def find_use(self, key: Key) -> DeviceUse | None:
        """Return the last values read for the GPUs of a job's running target, or None if there are none."""
        use = self._use.get(key)
        job = None if use is None else find_running_target(self._context, self._requests, key)
        return use if use is not None and job is not None and job.uid == use.job_uid else None

    def _find_window_s(self, job: Job) -> int | None:
        return devices.find_window_s(parse_time(job.created), self._context.clock())


def _is_news(before: DeviceUse, now: DeviceUse) -> bool:
    """Return whether values differ enough to be written: 1 % of memory, 2 % of the time, or 5 % of power."""
    pairs = (
        (before.memory_bytes, now.memory_bytes, 0.01 * (before.memory_bytes or 0)),
        (before.tensor_ratio, now.tensor_ratio, 0.02),
        (before.power_w, now.power_w, 0.05 * (before.power_w or 0)),
    )
    return any(new is not None and (old is None or abs(new - old) > least) for old, new, least in pairs)
