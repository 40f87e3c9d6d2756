"""Controller of pools. It reads nodes, ResourceSlices and GPUPools, and provides the pools for all advice.

It also writes GPUPools for pools that it discovers, and the status of every GPUPool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilecast import nodes
from tilecast.api import gpu_pool, pool_learning
from tilecast.spec import SpecError
from tilecast_operator.advisor import Advisor
from tilecast_operator.controllers.capacity import CAPACITY, FreeGpuCounter
from tilecast_operator.controllers.learning import CALIBRATION, PoolLearningController
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.documents import EventContent, make_apply_document
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.lists import ListCheck
from tilecast_operator.objects.kinds import KINDS
from tilecast_operator.objects.view import View, digest_status
from tilecast_operator.observed.calibrator import FittedCalibration
from tilecast_operator.report.pools import PoolInputs, decide_pool
from tilecast_operator.search_inputs import PoolVersions

log = logging.getLogger("tilecast")

NODES = Key("Node")
"""Work queue key for discovering the pools again."""

LEAST_WAIT_S = 0.01
"""Shortest wait before checking again whether everything is listed, in seconds."""
UNKNOWN = "UnknownAccelerator"


@dataclass(frozen=True, slots=True)
class PoolsChange:
    """A change of the pools, with their versions before and after."""

    is_learnt: bool
    """Whether only corrections learned from runs have changed. A started job then keeps its forecast."""
    before: PoolVersions
    now: PoolVersions

    def concerns_namespace(self, namespace: str) -> bool:
        """Return whether the change affects the pools that jobs of a namespace see."""
        return not self.is_learnt or self.before.get_version(namespace) != self.now.get_version(namespace)


class PoolController:
    """Controller of the pools of the cluster. Belongs to one event loop."""

    def __init__(
        self,
        context: SharedContext,
        advisor: Advisor,
        capacity: FreeGpuCounter,
        lists: ListCheck,
        learning: PoolLearningController,
    ) -> None:
        self._context = context
        self.report: nodes.NodesReport | None = None
        """Pools without corrections of a namespace. None until they are known."""
        self._of_namespace: dict[str, nodes.NodesReport] = {}
        self._learning = learning
        self._advisor = advisor
        self._capacity = capacity
        self._lists = lists
        self._learning_in_turn = asyncio.Lock()
        self._listeners: list[Callable[[PoolsChange], None]] = []
        self._entries: dict[str, nodes.FoundPool] = {}
        self._expired: set[str] = set()
        """Names of pools whose missing nodes count as deleted."""
        self._posted: set[str] = set()
        """Texts of the Events on unknown accelerators."""
        self._is_dirty = False
        context.cache.nodes.add_listener(self._on_node_change)
        context.cache.slices.add_listener(self._on_slice_change)
        context.cache.pools.add_listener(self._on_pool_change)
        context.leadership.add_listener(self._on_leadership_change)
        context.runtime.register(NODES.kind, self._refresh_pools)
        context.runtime.register(CALIBRATION.kind, self._calibrate)
        context.runtime.register(gpu_pool.KIND, self._reconcile_pool, gone=self._on_pool_gone)

    def add_listener(self, listener: Callable[[PoolsChange], None]) -> None:
        """Register a function that is called whenever advice may change."""
        self._listeners.append(listener)

    def schedule_refresh(self) -> None:
        """Schedule a new discovery of the pools."""
        self._is_dirty = True
        self._context.runtime.add(NODES, self._context.settings.settle_s)

    def _on_leadership_change(self, is_leading: bool) -> None:
        """When this replica begins to lead, schedule a fit of corrections to the runs that the last leader stored."""
        if is_leading:
            self._context.runtime.add(CALIBRATION)

    def _on_node_change(
        self, key: Key, before: CachedObject[nodes.Node] | None, now: CachedObject[nodes.Node] | None
    ) -> None:
        if before is None or now is None:
            self.schedule_refresh()
        elif before.value != now.value:
            if before.value.schedulable != now.value.schedulable:
                self._context.runtime.add(CAPACITY, self._context.settings.capacity_settle_s)
            self.schedule_refresh()

    def _on_slice_change(self, key: Key, before: CachedObject[Any] | None, now: CachedObject[Any] | None) -> None:
        if before is None or now is None or before.value != now.value:
            self.schedule_refresh()

    def _on_pool_change(self, key: Key, before: CachedObject[View] | None, now: CachedObject[View] | None) -> None:
        if now is None:
            self.schedule_refresh()
            return
        if before is None:
            self._learning.restore_pool_status(key.name, now.value.status)
        if before is None or not before.value.has_equal_inputs(now.value):
            self.schedule_refresh()
        self._context.runtime.add(key)

    def _on_pool_gone(self, key: Key) -> None:
        """Drop a pool from the cache, because the API server does not have it.

        If the pool was discovered, schedule another write, because its CRD may be served later.
        """
        self._context.cache.pools.forget_object(key)
        if key.name in self._entries and self._context.settings.discovery:
            self._context.runtime.add(key, self._context.timings.unserved_s)

    async def _refresh_pools(self, _: Key) -> None:
        """Discover the pools again if all nodes are listed. Notify listeners of changes."""
        try:
            await self._advisor.warm_up()
        except SpecError as error:
            raise TryAgainError(str(error)) from None
        if not await self._lists.is_first_list_complete():
            self._context.runtime.add(NODES, max(self._context.settings.settle_s, LEAST_WAIT_S))
            return
        if self._is_dirty or self.report is None:
            self._is_dirty = False
            own = [view.document for view in self._context.cache.pools.values()]
            slices = [item for item in self._context.cache.slices.values() if item]
            every_node = list(self._context.cache.nodes.values())
            try:
                bare = await self._advisor.run_in_thread(
                    nodes.discover_pools, every_node, own, slices, tuple(self._expired)
                )
            except Exception:
                self._is_dirty = True
                raise
            if self.report is None:
                await self._calibrate(CALIBRATION)
            calibrator = self._learning.calibrator
            of_namespace = {name: bare.with_calibration(table) for name, table in calibrator.namespace_tables.items()}
            self._adopt_report(bare.with_calibration(calibrator.default_table), of_namespace)
        # This comes last: an API server that accepts no Event now must not hold up the rest.
        if self.report is not None and self._context.settings.owns_pools:
            await self._post_unknown_gpus(self.report)

    def find_report(self, namespace: str) -> nodes.NodesReport | None:
        """Return the pools as jobs of a namespace see them, or None until they are known."""
        return self._of_namespace.get(namespace, self.report)

    def _adopt_report(self, report: nodes.NodesReport, namespace_reports: dict[str, nodes.NodesReport]) -> None:
        """Store the pools of a new report, and notify listeners if they have changed.

        `namespace_reports` has, for each namespace with measured runs, the pools corrected by the namespace's runs.
        """
        before, self.report = self.report, report
        self._of_namespace = namespace_reports
        self._entries = {item.pool.name: item for item in report.entries}
        facts, versions = self._advisor.facts, self._advisor.versions
        self._advisor.set_pools(report, namespace_reports)
        self._capacity.set_pools(report)
        known = {key.name for key in self._context.cache.pools}
        self._schedule_pools({*self._entries, *report.invalid, *report.obsolete, *known})
        is_same = facts == self._advisor.facts
        is_learnt = is_same and before is not None and _list_reasons(before) == _list_reasons(report)
        if is_learnt and versions == self._advisor.versions:
            return
        if not is_learnt:
            shapes = (f"{item.pool.name} {item.nodes}x{item.pool.gpus_per_node}" for item in report.entries)
            log.info("pools: %s", ", ".join(shapes) or "none")
        change = PoolsChange(is_learnt, versions, self._advisor.versions)
        for listener in self._listeners:
            listener(change)

    async def _calibrate(self, _: Key) -> None:
        """Fit corrections to the runs, and schedule a refresh of the pools if forecasts change."""
        calibrator = self._learning.calibrator
        await self._learning.forget_gone_namespaces()
        async with self._learning_in_turn:  # otherwise an older fit might be adopted last
            # In a thread beside those of the searches: many runs of many namespaces take long to fit.
            if self._learning.adopt_corrections(
                await asyncio.to_thread(FittedCalibration.fit, *calibrator.make_fit_arguments())
            ):
                self.schedule_refresh()
        self._schedule_pools(self._learning.list_pools())
        self._context.metrics.set_calibration_metrics(calibrator)

    def _schedule_pools(self, names: set[str]) -> None:
        for name in names:
            self._context.runtime.add(Key(gpu_pool.KIND, "", name))

    async def _reconcile_pool(self, key: Key) -> None:
        """Write the object and status of a pool if they differ from the desired ones. Delete an obsolete pool."""
        report, seen = self.report, self._context.cache.pools.get(key)
        # All pools are reconciled once the nodes are read.
        if report is None or not self._context.settings.owns_pools:
            return
        facts, now_s = self._read_inputs(key.name, report, seen), self._context.clock()
        want = decide_pool(facts, now_s)
        if want.is_deleted and seen is not None:
            await self._context.writer.delete(key, seen)
        if want.document is not None:
            seen = await self._apply_pool(key, seen, want.document)
            want = decide_pool(replace(facts, view=seen.value), now_s)
        if facts.is_discovering and (want.is_deleted or isinstance(facts.found, nodes.FoundPool)):
            self._expired.discard(key.name)
        if want.status is None or seen is None:
            return
        if digest_status(document := want.status.document()) != seen.value.digest:
            if (seen.value.status.get("calibration") or {}).get("runs"):
                # Earlier releases kept the runs there and nowhere else.
                await self._learning.write_pool_learning(Key(pool_learning.KIND, "", key.name))
            is_conditional = self._context.runtime.is_conditional(key)
            await self._context.writer.write_status(key, seen, document, is_conditional=is_conditional)
        if want.missing_since_s is not None:
            self._expire_missing_nodes(
                key, want.missing_since_s + self._context.settings.pool_retention_s - self._context.clock()
            )

    def _read_inputs(self, name: str, report: nodes.NodesReport, seen: CachedObject[View] | None) -> PoolInputs:
        """Return the input of `decide_pool` for a pool."""
        found = report.invalid.get(name) or self._entries.get(name)
        facts = PoolInputs(
            found,
            None if seen is None else seen.value,
            is_obsolete=name in report.obsolete,
            is_discovering=self._context.settings.discovery,
            free=self._capacity.get_free_gpus(name),
        )
        if not isinstance(found, nodes.FoundPool):
            return facts
        calibrator = self._learning.calibrator
        learnt, superseded = (
            calibrator.make_pool_calibration_status(name, found.pool.gpu.name),
            calibrator.count_drifted(name),
        )
        return replace(facts, learnt=learnt, superseded=superseded)

    async def _apply_pool(
        self, key: Key, seen: CachedObject[View] | None, document: dict[str, Any]
    ) -> CachedObject[View]:
        """Write the object of a discovered pool and return the written object.

        If another client creates the object at the same time, leave it unchanged.

        Raises:
            ApiError: The write is refused, with 409 if a user has just changed a field that it would change.
        """
        if seen is not None:
            document["metadata"]["uid"] = seen.uid
        applied = await self._context.writer.apply_fields(key, document, force=False)
        answer = View.from_object(applied).document
        name, spec = gpu_pool.parse_gpu_pool(answer)
        if seen is None and gpu_pool.read_discovery(answer, spec) is None:
            log.warning("%s: somebody else created %s at the same time; it is theirs", key, name)
            bare = make_apply_document(key, KINDS[key.kind].api_version, uid=applied["metadata"]["uid"])
            applied = await self._context.writer.apply_fields(key, bare, force=False)
            self.schedule_refresh()
        return self._context.cache.pools.store_written_object(applied, is_new=True)

    def _expire_missing_nodes(self, key: Key, left_s: float) -> None:
        """Schedule that the missing nodes of a discovered pool count as deleted after `left_s` seconds."""
        if left_s > 0:
            self._context.runtime.add(key, left_s)
        elif key.name not in self._expired:
            self._expired.add(key.name)
            self.schedule_refresh()

    async def _post_unknown_gpus(self, report: nodes.NodesReport) -> None:
        """Write one Event for each unknown GPU, about the first node that has it."""
        unknown = {f"{item.message}; {item.remedy}": item.nodes[0] for item in report.left_out if item.code == UNKNOWN}
        self._posted &= unknown.keys()
        for text in unknown.keys() - self._posted:
            node = unknown[text]
            if await self._context.writer.post_event(
                Key("Node", "", node), node, EventContent("Warning", UNKNOWN, text)
            ):
                self._posted.add(text)


def _list_reasons(report: nodes.NodesReport) -> tuple[object, ...]:
    """Return the reasons why there are no pools. If there are pools, return an empty tuple."""
    return () if report.entries else (report.left_out, {name: str(error) for name, error in report.invalid.items()})
