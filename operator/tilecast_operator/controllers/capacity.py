"""Track the free capacity of each pool, from Kueue's quotas and running pods.

When it changes, the pools are reconciled. A job is reconciled if the GPUs of its recommendation become free or busy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilecast.api import gpu_pool
from tilecast.jobs import kueue
from tilecast.nodes import NodesReport
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.free_gpus import FreeGpus, GpuUsage
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.kinds import Key
from tilecast_operator.outcome import AdviceOutcome, AdviceRefusal
from tilecast_operator.report.job_status import CapacityStatus, ConditionContent

CAPACITY = Key("Capacity")
"""Work queue key for reading the free capacity again."""
CAPACITY_HOLDS = 6
"""How long a job's condition CapacityAvailable is kept after a change, as a multiple of `capacity_settle_s`."""

NOTHING_TO_FIT = CapacityStatus(ConditionContent("Unknown", "NoRecommendation", "there is no plan that could start"))
NOT_OBSERVED = CapacityStatus(
    ConditionContent(
        "Unknown", "NotObserved", "what is free is not read; install Kueue, or the chart with capacity.readPods"
    )
)
STARTED = CapacityStatus(ConditionContent("Unknown", "JobStarted", "the job has started; its forecast is frozen"))


class Destination(NamedTuple):
    """The recommended pool, number of nodes and GPUs per node."""

    pool: str
    nodes: int
    gpus_per_node: int


def find_destination(outcome: AdviceOutcome) -> Destination | None:
    """Return the pool and the nodes of the best plan, or None if the advice outcome has no plan."""
    best = None if isinstance(outcome, AdviceRefusal) else outcome.best
    return None if best is None else Destination(best.pool.name, best.nodes, best.gpus_per_node)


@dataclass(frozen=True, slots=True)
class _ShownCapacity:
    """Free capacity shown in a job's status, the recommendation that it is about, and the time of the change."""

    place: Destination
    fit: CapacityStatus
    since_s: float


class FreeGpuCounter:
    """Counter of the free GPUs of every pool. Belongs to one event loop."""

    def __init__(self, context: SharedContext) -> None:
        self._context = context
        self._report: NodesReport | None = None
        self._nodes: dict[str, int] = {}
        """Number of nodes, by pool."""
        self._used: Mapping[str, int] | None = None
        self._free: dict[str, FreeGpus] = {}
        self._shown: StateTable[_ShownCapacity] = context.records.add_table()
        self._listeners: list[Callable[[], None]] = []
        context.runtime.register(CAPACITY.kind, self._update_free_gpus)
        context.cache.cluster_queues.add_listener(self._on_quota_change)
        context.cache.flavors.add_listener(self._on_quota_change)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Register a function that is called whenever the free capacity changes."""
        self._listeners.append(listener)

    def set_pod_usage(self, gpus_by_node: Mapping[str, int] | None) -> None:
        """Set the number of GPUs that pods use on each node. None means unknown."""
        self._used = gpus_by_node
        self._schedule_update()

    def set_pools(self, report: NodesReport) -> None:
        """Set the pools whose free GPUs are counted."""
        self._report, self._nodes = report, {item.pool.name: item.nodes for item in report.entries}
        self._read_free_gpus(report)

    def get_free_gpus(self, pool: str) -> FreeGpus | None:
        """Return the free GPUs of a pool. Return None if they are unknown."""
        return self._free.get(pool)

    def check_fit(self, job: Key, destination: Destination | None) -> CapacityStatus:
        """Return whether the GPUs of a job's recommendation are free now.

        From then on, the job is reconciled when this changes.
        """
        if destination is None:
            self.stop_tracking_fit(job)
            return NOTHING_TO_FIT
        fit, before = self._find_fit(destination), self._shown.get(job)
        if before is None or before.place != destination:
            since_s = -math.inf
        else:
            since_s = before.since_s if before.fit == fit else time.monotonic()
        self._shown[job] = _ShownCapacity(destination, fit, since_s)
        return fit

    def stop_tracking_fit(self, job: Key) -> None:
        """Stop reconciling a job when the GPUs of its recommendation become free or busy."""
        self._shown.pop(job, None)

    def _on_quota_change(self, key: Key, before: CachedObject[Any] | None, now: CachedObject[Any] | None) -> None:
        self._schedule_update()

    def _schedule_update(self) -> None:
        self._context.runtime.add(CAPACITY, self._context.settings.capacity_settle_s)

    async def _update_free_gpus(self, _: Key) -> None:
        if self._report is not None:
            self._read_free_gpus(self._report)

    def _read_free_gpus(self, report: NodesReport) -> None:
        """Count the free GPUs. Reconcile the pools and jobs that the count affects."""
        usage = GpuUsage(
            {key.name: kueue.read_quotas(document) for key, document in self._context.cache.cluster_queues.items()},
            {key.name: kueue.read_node_labels(document) for key, document in self._context.cache.flavors.items()},
            self._used,
        )
        by_name = {key.name: node for key, node in self._context.cache.nodes.items()}
        before, self._free = self._free, usage.count_free_gpus(report.entries, by_name)
        if self._context.settings.owns_pools:
            self._context.metrics.set_pool_metrics(report, self._free)
        for name in before.keys() | self._free.keys():
            if before.get(name) != self._free.get(name):
                self._context.runtime.add(Key(gpu_pool.KIND, "", name))
        if before != self._free:
            for listener in self._listeners:
                listener()
        for job, shown in self._shown.items():
            if shown.fit != self._find_fit(shown.place):
                # Otherwise a pool that is nearly full would have all its jobs written again at each change.
                hold_s = CAPACITY_HOLDS * self._context.settings.capacity_settle_s
                self._context.runtime.add(job, max(shown.since_s + hold_s - time.monotonic(), 0.0))

    def _find_fit(self, destination: Destination) -> CapacityStatus:
        """Return whether the GPUs of a recommendation are free now, with the reason."""
        # The message does not count free GPUs, because the number would change every minute.
        there, free = self._nodes.get(destination.pool), self._free.get(destination.pool)
        if there is not None and destination.nodes > there:
            text = f"the plan needs {destination.nodes} nodes and fewer exist now"
            return CapacityStatus(ConditionContent("False", "TooFewNodes", text), False)
        if there is None or free is None:
            return NOT_OBSERVED
        if free.fits_plan(destination.nodes, destination.gpus_per_node):
            return CapacityStatus(
                ConditionContent("True", "GpusFree", f"the GPUs are free now, as {free.source} shows"), True
            )
        text = f"others use the GPUs now, as {free.source} shows; the job would wait"
        return CapacityStatus(ConditionContent("False", "GpusInUse", text), False)
