"""Reader of what DCGM measures of the GPUs of running jobs, from Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilecast_operator.controllers.requests import JobRequestIndex
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.controllers.targets import find_running_target
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.kinds import Key
from tilecast_operator.observed import devices
from tilecast_operator.observed.devices import DeviceUse


class DeviceUseReader:
    """Reader of memory, activity and power of GPUs. It is a `QuerySource`. Belongs to one event loop."""

    def __init__(self, context: SharedContext, requests: JobRequestIndex) -> None:
        self._context = context
        self._requests = requests
        self._use: StateTable[tuple[str, DeviceUse]] = context.records.add_table()
        """UID of each job's target, and what was read last of it."""

    def queries(self) -> Iterator[tuple[Key, str]]:
        """Yield the key of every TrainingJob whose target runs, and the query for the target's GPUs.

        Only the leader yields queries.
        """
        for key in list(self._context.cache.training_jobs):
            if not self._context.leadership.is_leader:
                return
            job = find_running_target(self._context, self._requests, key)
            query = None if job is None else devices.make_query(self._context.settings.dcgm_selector, job)
            if query is not None:
                yield key, query

    async def score_sample(self, key: Key, outcome: Any) -> None:
        """Record what Prometheus returned for a job's query, unless it has no values."""
        job, use = (
            find_running_target(self._context, self._requests, key),
            devices.parse_use(outcome, self._context.timestamp()),
        )
        before = self.find_use(key)
        if job is not None and use is not None and (before is None or _is_news(before, use)):
            self._use[key] = job.uid, use
            self._context.runtime.add(key, in_background=True)

    def find_use(self, key: Key) -> DeviceUse | None:
        """Return what was read last of the GPUs of a job's target. Return None if nothing was, or it runs no more."""
        uid, use = self._use.get(key) or ("", None)
        job = None if use is None else find_running_target(self._context, self._requests, key)
        return use if job is not None and job.uid == uid else None


def _is_news(before: DeviceUse, now: DeviceUse) -> bool:
    """Return whether values differ enough for a write: 1 % of memory, 2 % of the time, or 5 % of power."""
    pairs = (
        (before.memory_bytes, now.memory_bytes, 0.01 * (before.memory_bytes or 0)),
        (before.tensor_ratio, now.tensor_ratio, 0.02),
        (before.power_w, now.power_w, 0.05 * (before.power_w or 0)),
    )
    return any(new is not None and (old is None or abs(new - old) > least) for old, new, least in pairs)
