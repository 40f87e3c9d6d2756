"""Controller of the queue plan. It plans when and on which pool each job runs, and writes the QueueAdvice."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilecast.api import queue_advice, training_job
from tilecast.api.status import QueuePosition
from tilecast.jobs import kueue
from tilecast_operator.controllers.capacity import FreeGpuCounter
from tilecast_operator.controllers.estimates import EstimateWriter
from tilecast_operator.controllers.planned_jobs import QueuePositions
from tilecast_operator.controllers.queue_jobs import QueueJobReader
from tilecast_operator.controllers.requests import JobRequestIndex, read_target
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.documents import make_apply_document
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.times import parse_time
from tilecast_operator.objects.kinds import KINDS
from tilecast_operator.objects.view import View, digest_status
from tilecast_operator.queue_planner import QueuePlanner
from tilecast_operator.queue_rows import Holdings, PlannedQueue, QueueRow, QueueState, count_held_gpus, make_capacities
from tilecast_operator.report import queue_advice as report
from tilecast_operator.search_process import SearchInterruptedError

QUEUE = Key("Queue")
"""Work queue key for planning the queue again."""

RENEW_S, RENEW_FACTOR = report.LEAST_SHIFT_S + 5.0, 20.0
"""Seconds after which a start that has passed is forecast anew, and their least multiple of the time that a plan takes.

A shown start is kept for a shift of up to `LEAST_SHIFT_S`.
"""

log = logging.getLogger("tilecast")


class QueuePlanController:
    """Controller that plans the queue again when jobs or pools change. Belongs to one event loop.

    Two plans are at least `queue_interval_s` apart.
    """

    def __init__(
        self,
        context: SharedContext,
        capacity: FreeGpuCounter,
        requests: JobRequestIndex,
        queue_jobs: QueueJobReader,
        planned_jobs: QueuePositions,
        planner: QueuePlanner,
        estimates: EstimateWriter | None,
    ) -> None:
        self._context = context
        self._capacity = capacity
        self._requests = requests
        self._jobs = queue_jobs
        self._planned = planned_jobs
        self._planner = planner
        self._estimates = estimates
        planned_jobs.on_write = self._schedule_plan
        self._advice_key = Key(queue_advice.KIND, "", context.settings.queue_name)
        self._plan: PlannedQueue | None = None
        self._state: QueueState | None = None
        """Input of the newest plan."""
        self._held: Holdings = {}
        """GPUs that others used at the last check."""
        self._last_s = -math.inf
        self._renew_s = math.inf
        """Unix time from which the plan is made again, even if nothing changes."""
        cache = context.cache
        cache.training_jobs.add_listener(self._on_training_job_change)
        cache.jobs.add_listener(lambda key, before, now: self._schedule_plan())
        for meaning in (cache.namespaces, cache.workload_priorities, cache.pod_priorities):
            meaning.add_listener(self._on_priority_change)
        for table in (cache.cluster_queues, cache.flavors, cache.local_queues):
            table.add_listener(self._on_quota_change)
        cache.queue_advices.add_listener(self._on_advice_change)
        queue_jobs.answers.pools.add_listener(lambda change: self._schedule_full_read())
        capacity.add_listener(self._schedule_plan)
        context.leadership.add_listener(lambda is_leading: self._schedule_plan())
        context.runtime.register(QUEUE.kind, self._reconcile_queue)
        context.runtime.register(queue_advice.KIND, self._write_advice, gone=self._on_advice_gone)

    def _schedule_plan(self) -> None:
        settings = self._context.settings
        left_s = self._last_s + settings.queue_interval_s - time.monotonic()
        self._context.runtime.add(QUEUE, max(left_s, settings.settle_s))

    def _on_training_job_change(
        self, key: Key, before: CachedObject[View] | None, now: CachedObject[View] | None
    ) -> None:
        for seen in (before, now):
            target = None if seen is None else read_target(key.namespace, seen.value.document)
            if target is not None:
                self._jobs.drop_row(target)
        self._schedule_plan()

    def _on_priority_change(self, key: Key, before: CachedObject[Any] | None, now: CachedObject[Any] | None) -> None:
        if before is None or now is None or before.value != now.value:
            self._schedule_full_read()

    def _on_quota_change(self, key: Key, before: CachedObject[Any] | None, now: CachedObject[Any] | None) -> None:
        if before is None or now is None or before.value.get("spec") != now.value.get("spec"):
            self._jobs.clear_rows()
        self._schedule_plan()

    def _schedule_full_read(self) -> None:
        self._jobs.clear_rows()
        self._schedule_plan()

    def _on_advice_change(self, key: Key, before: CachedObject[View] | None, now: CachedObject[View] | None) -> None:
        if key == self._advice_key:
            self._context.runtime.add(key)

    async def _reconcile_queue(self, _: Key) -> None:
        """Plan the queue again if jobs, pools or free GPUs have changed, or if a forecast start has passed."""
        settings = self._context.settings
        if not self._jobs.answers.is_ready or not self._context.leadership.is_leader:
            return  # it is due again once the nodes are read, or this replica leads
        if self._last_s + settings.queue_interval_s > time.monotonic():
            self._schedule_plan()
            return
        self._last_s = began_s = time.monotonic()
        state = await self._read_state()
        if state == self._state and self._context.clock() < self._renew_s:
            self._schedule_renewal()
            return
        before = self._find_previous_positions(state.rows)
        kueue_before = {} if self._estimates is None else self._estimates.kueue_positions
        facts = report.QueuePlanInputs(state, settings.queue_policy, before, kueue_before)
        now_s = self._context.clock()
        try:
            plan, positions, kueue_positions = await self._planner.plan(facts, now_s)
        except SearchInterruptedError as error:
            raise TryAgainError(f"the queue is not planned: its process {error}") from None
        self._state, self._plan = state, plan
        changed = self._planned.replace_plan(positions)
        if self._estimates is not None:
            self._estimates.keep_longest_runs(report.list_longest_runs(plan))
            self._estimates.schedule_jobs(changed | self._estimates.replace_kueue_positions(kueue_positions))
        for key in changed:
            self._context.runtime.add(key, in_background=key in facts.before)
            self._requests.notify_requesters(key)
        duration_s = time.monotonic() - began_s
        self._renew_s = self._find_renewal_time(state, duration_s, now_s)
        self._schedule_renewal()
        self._context.metrics.set_queue_metrics(plan, duration_s, now_s)
        self._context.runtime.add(self._advice_key)

    def _find_renewal_time(self, state: QueueState, duration_s: float, now_s: float) -> float:
        """Return the Unix time from which the plan is made again, even if nothing changes.

        That is some time after the first estimate of a start in a Workload has passed while its job still waits. The
        time is infinite if there is no estimate.
        """
        if self._estimates is None:
            return math.inf
        forecasts = [self._estimates.find_forecast(row.key) for row in state.rows if row.queue and row.began_s is None]
        starts = [start_s for item in forecasts if item and (start_s := parse_time(item.start)) is not None]
        return max(min(starts, default=math.inf), now_s) + max(RENEW_S, RENEW_FACTOR * duration_s)

    def _schedule_renewal(self) -> None:
        if math.isfinite(self._renew_s):
            left_s = self._renew_s - self._context.clock()
            self._context.runtime.add(QUEUE, max(left_s, self._context.settings.queue_interval_s), in_background=True)

    async def _read_state(self) -> QueueState:
        """Return the input of the queue plan: the jobs, and the pools with the GPUs that others use."""
        # A job that was just admitted or has just ended is counted twice for a moment. Therefore GPUs count as held by
        # others once they were held at two reads in a row.
        rows, refused = await self._jobs.read_rows()
        if (estimates := self._estimates) is not None:
            rows = [row if (turn := estimates.find_turn(row.key)) is None else replace(row, turn=turn) for row in rows]
        entries = self._jobs.answers.found_pools
        names = [item.pool.name for item in entries]
        free = {name: known for name in names if (known := self._capacity.get_free_gpus(name)) is not None}
        queues = {key.name: kueue.read_quotas(item) for key, item in self._context.cache.cluster_queues.items()}
        now, before = count_held_gpus(entries, free, queues, rows), self._held
        held = {place: min(count, before.get(place, 0)) for place, count in now.items()}
        self._held = now
        if held != now:
            self._schedule_plan()
        held = {place: count for place, count in held.items() if count}
        return QueueState(rows, refused, make_capacities(entries, held, rows))

    def _find_previous_positions(self, rows: Sequence[QueueRow]) -> dict[Key, QueuePosition]:
        """Return the previous position of each job, from the last plan or from the status of its TrainingJob."""
        before = dict[Key, QueuePosition]()
        for row in rows:
            position = self._planned.get_position(row.key)
            if position is None and self._plan is None:
                first = self._requests.find_requester(row.key)
                key = row.key if first is None else Key(training_job.KIND, row.key.namespace, first[0])
                seen = self._context.cache.training_jobs.get(key)
                position = None if seen is None else report.parse_position(seen.value.status)
            if position is not None:
                before[row.key] = position
        return before

    async def _write_advice(self, key: Key) -> None:
        """Write the spec and status of the QueueAdvice if they differ from the desired ones."""
        if self._plan is None or key != self._advice_key:
            return
        settings, now_s = self._context.settings, self._context.clock()
        seen = self._context.cache.queue_advices.get(key)
        view = None if seen is None else seen.value
        facts = report.QueueAdviceInputs(self._plan, settings.queue_policy, settings.queue_interval_s, view)
        want = report.decide_queue_advice(facts, now_s)
        if want.spec is not None:
            fields = make_apply_document(key, KINDS[key.kind].api_version) | {"spec": want.spec}
            body = await self._context.writer.apply_fields(key, fields)
            seen = self._context.cache.queue_advices.store_written_object(body, is_new=True)
            want = report.decide_queue_advice(replace(facts, view=seen.value), now_s)
        if seen is None or want.status is None or digest_status(want.status.document()) == seen.value.digest:
            return
        is_conditional = self._context.runtime.is_conditional(key)
        await self._context.writer.write_status(key, seen, want.status.document(), is_conditional=is_conditional)

    def _on_advice_gone(self, key: Key) -> None:
        """Drop a QueueAdvice that the API server does not have from the cache.

        Schedule it again, because its CRD may be installed later.
        """
        self._context.cache.queue_advices.forget_object(key)
        self._context.runtime.add(key, self._context.timings.unserved_s)
