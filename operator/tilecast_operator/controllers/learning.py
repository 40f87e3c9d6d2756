"""Controller of measured runs. It reads reports and PoolLearnings, and writes PoolLearnings.

A run is the measured step of one job. Corrections of forecasts are learned from runs.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Collection
from functools import partial
from typing import Any

from tilecast.api import pool_learning
from tilecast.api.calibration import ObservedRun
from tilecast.api.fields import as_mapping
from tilecast.api.pool_learning import ForgetRequest
from tilecast.spec import SpecError
from tilecast_operator.controllers.runtime import SharedContext, TryAgainError
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.controller_state import ControllerState, StateTable
from tilecast_operator.kube.documents import EventContent, make_apply_document
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.lists import ListCheck
from tilecast_operator.metrics import OWN_RUNS, Metrics
from tilecast_operator.objects.kinds import KINDS, complete_item, make_object_path
from tilecast_operator.objects.view import LearningView as LearningView
from tilecast_operator.observed.calibrator import Calibrator, FittedCalibration, MeasuredForecast
from tilecast_operator.observed.earlier_runs import get_run_setting
from tilecast_operator.observed.run_requesters import RunRequesters
from tilecast_operator.observed.run_store import RunStore, name_template

log = logging.getLogger("tilecast")

CALIBRATION = Key("Calibration")
"""Work queue key for fitting corrections to the runs again."""
UNSERVED = "the API server serves no PoolLearnings; bring the chart's CRDs"
FORGET_PATH = f"/metadata/annotations/{pool_learning.FORGET.replace('/', '~1')}"


class CorrectionMetrics:
    """Metrics on how much measured runs change the forecasts of jobs. Belongs to one event loop."""

    def __init__(self, records: ControllerState, metrics: Metrics) -> None:
        self._runs: StateTable[str] = records.add_table()
        """Kind of the runs that correct each job, from `OWN_RUNS`."""
        self._ratios: StateTable[float] = records.add_table()
        """Factor by which the runs change the step time of each job's best plan."""
        for run in OWN_RUNS:
            metrics.own_runs_jobs.labels(run).set_function(partial(self._count_jobs, run))
            metrics.own_runs_change.labels(run).set_function(partial(self._median_change, run))

    def set_origin(self, key: Key, run: str | None) -> None:
        """Record which kind of runs corrects a job's forecast. None means that no run does.

        `run` is one of `OWN_RUNS`, or None.
        """
        if run is None:
            self._runs.pop(key, None)
        else:
            self._runs[key] = run

    def set_ratio(self, key: Key, ratio: float | None) -> None:
        """Record the factor by which runs change the step time of a job's best plan. None means that no run does."""
        if ratio is None:
            self._ratios.pop(key, None)
        else:
            self._ratios[key] = ratio

    def _list_ratios(self, run: str) -> list[float]:
        return [ratio for key, ratio in self._ratios.items() if self._runs.get(key) == run]

    def _count_jobs(self, run: str) -> int:
        return len(self._list_ratios(run))

    def _median_change(self, run: str) -> float:
        """Return the median of the relative changes in step time that one kind of runs causes, without their signs.

        Return NaN if these runs correct no job.
        """
        ratios = self._list_ratios(run)
        return statistics.median(abs(ratio - 1) for ratio in ratios) if ratios else math.nan


class PoolLearningController:
    """Controller of measured runs and of the PoolLearning objects that store them. Belongs to one event loop."""

    def __init__(self, context: SharedContext, lists: ListCheck) -> None:
        settings = context.settings
        self._context = context
        self._lists = lists
        self._is_on = settings.learning
        self._store = RunStore(is_on=settings.learning, on_change=self._notify_requesters)
        self.calibrator = Calibrator(self._store, [name.strip() for name in settings.trusted_namespaces.split(",")])
        self._posted: set[tuple[str, str]] = set()
        """Quarantined runs that already have an Event, with the reason of each."""
        self._own: StateTable[ObservedRun] = context.records.add_table()
        """Measured run of each existing job."""
        self.run_requesters = RunRequesters(context.records)
        self.corrected = CorrectionMetrics(context.records, context.metrics)
        context.cache.learnings.add_listener(self._on_learning_change)
        context.cache.namespaces.add_listener(self._on_namespace_change)
        context.runtime.register(pool_learning.KIND, self.write_pool_learning)

    def record_run(self, key: Key, uid: str, score: MeasuredForecast) -> None:
        """Record a run of a job that has a new measurement."""
        if not self._is_on:
            return
        latest, namespace = score.window.latest, self._context.cache.namespaces.get(Key("Namespace", "", key.namespace))
        known_uid = "" if namespace is None else namespace.uid
        item = score.make_observed_run(key.namespace, key.name, uid, latest.account or "", known_uid)
        self._own[key] = item
        self._store.store_run(item)
        self._context.runtime.add(CALIBRATION, self._context.settings.calibrate_settle_s)

    def restore_run(self, key: Key, uid: str, score: MeasuredForecast) -> None:
        """Record the run in a job's status, unless a newer state of the run is known."""
        item = score.make_observed_run(key.namespace, key.name, uid)
        if self._is_on:
            self._own[key] = item
        self._store.restore_runs(score.forecast.pool, [item])

    def find_runs(self, namespace: str, keys: Collection[Key], workloads: Collection[str]) -> list[ObservedRun]:
        """Return the runs that correct the forecast of a job.

        If the job itself (one of `keys`) has runs, they come first. For every other setting (pool, GPUs and plan), the
        newest run with that setting follows, newest first.

        If the job has no run, return all runs of `workloads` in the namespace, newest first. If there are no such runs,
        return the runs of jobs in the namespace whose names differ only in the generated suffix (`name_template`).

        The keys are reconciled again when a run of these workloads or names changes.

        Args:
            namespace: Namespace of the job.
            keys: Key of the job, and key of its TrainingJob if there is one.
            workloads: Digests of the workloads.
        """
        names = {name_template(key.name) for key in keys}
        runs = [item for workload in workloads for item in self._store.find_workload_runs(namespace, workload).values()]
        own = [item for key in keys if (item := self._own.get(key)) is not None and item.run.workload in workloads]
        own = [item for item in own if not self._store.is_forgotten(item)]
        run = "own" if own else "successor"
        if not runs and not own:
            run = "relative"
            runs = [item for name in names for item in self._store.find_template_runs(namespace, name).values()]
        for key in keys:
            self.run_requesters.set_requests(key, namespace, workloads, names)
            self.corrected.set_origin(key, run if own or runs else None)
        runs.sort(key=lambda one: (one.time, one.uid), reverse=True)
        if not own:
            return runs
        newest = {get_run_setting(item): item for item in reversed(runs)} | {
            get_run_setting(item): item for item in own
        }
        others = (item for item in newest.values() if item not in own)
        return [*own, *sorted(others, key=lambda one: (one.time, one.uid), reverse=True)]

    def _notify_requesters(self, item: ObservedRun) -> None:
        """Reconcile the jobs whose forecasts a run may correct.

        Jobs with runs of their own are reconciled in the background.
        """
        for key in self.run_requesters.find_requesters(item.run.namespace, item.run.workload, name_template(item.job)):
            is_other = key in self._own and self._own[key].uid != item.uid
            self._context.runtime.add(key, self._context.settings.observe_settle_s, in_background=is_other)

    def restore_pool_status(self, pool: str, status: Any) -> None:
        """Record the runs that earlier releases stored in the status of a pool."""
        if self._store.restore_status_runs(pool, status):
            self._context.runtime.add(CALIBRATION, self._context.settings.calibrate_settle_s)

    def forget_run(self, key: Key, uid: str) -> None:
        """Forget the run of a job."""
        self._own.pop(key, None)
        if self._store.drop_run(uid):
            self._context.runtime.add(CALIBRATION, self._context.settings.calibrate_settle_s)

    async def forget_gone_namespaces(self) -> None:
        """Forget the runs of deleted namespaces, once all existing namespaces are listed.

        A namespace that was deleted and created again has another UID, and its earlier runs are forgotten too.
        """
        seen = self._context.cache.namespaces
        missing = [name for name in self._store.namespaces() if seen.get(Key("Namespace", "", name)) is None]
        if missing and len(seen) and await self._lists.has_seen_all("Namespace", len(seen)):
            for name in missing:
                self._store.forget_namespace(name)
        for name in self._store.namespaces():
            if (there := seen.get(Key("Namespace", "", name))) is not None:
                self._store.forget_namespace(name, there.uid)

    def list_pools(self) -> set[str]:
        """Return the names of all pools with runs."""
        return self._store.pools()

    def adopt_corrections(self, fitted: FittedCalibration) -> bool:
        """Use newly fitted corrections. Return whether they change forecasts."""
        is_other = self.calibrator.adopt_fit(fitted)
        for pool in self._store.pools() if self._is_on else ():
            self._context.runtime.add(Key(pool_learning.KIND, "", pool))
        self._context.metrics.set_learning_metrics(self.calibrator)
        return is_other

    async def write_pool_learning(self, key: Key) -> None:
        """Write a pool's runs into its PoolLearning, and write Events about quarantined runs."""
        if key.name not in self._store.pools() or not self._context.settings.owns_pools:
            return
        if self._context.cache.learnings.get(key) is None:
            await self._read_unwatched_learning(key)
        document, seen = self._store.make_learning_document(key.name), self._context.cache.learnings.get(key)
        if seen is None or seen.value.digest != LearningView.from_object(document).digest:
            seen = await self._apply_learning(key, seen, document)
        if seen.value.forget is not None and _is_valid_forget_request(seen.value.forget):
            test = {"op": "test", "path": FORGET_PATH, "value": seen.value.forget}
            remove = {"op": "remove", "path": FORGET_PATH}
            body = await self._context.writer.patch(make_object_path(key), "poollearnings", [test, remove])
            seen = self._context.cache.learnings.store_written_object(body)
        doubted = self.calibrator.list_quarantined_runs()
        self._posted &= {(item.uid, why) for item, why in doubted}
        for item, why in doubted:
            if item.run.pool == key.name and (item.uid, why) not in self._posted:
                self._posted.add((item.uid, why))
                text = f"a run is not learnt from ({why}); `tilecast learning show --pool {key.name}` says whose"
                await self._context.writer.post_event(key, seen.uid, EventContent("Warning", "RunQuarantined", text))

    async def _read_unwatched_learning(self, key: Key) -> None:
        """Read a pool's PoolLearning from the API server if the watch has not shown it yet."""
        kind = KINDS[key.kind]
        try:
            page = await self._context.client.get(kind.path(), {"fieldSelector": f"metadata.name={key.name}"})
        except ApiError as error:
            if error.status != 404:
                raise
            raise TryAgainError(UNSERVED) from None
        for item in page.get("items") or ():
            if as_mapping(item.get("metadata")).get("name") == key.name:
                self._context.cache.learnings.put_object(complete_item(key.kind, item))

    async def _apply_learning(
        self, key: Key, seen: CachedObject[LearningView] | None, document: Document
    ) -> CachedObject[LearningView]:
        """Write a PoolLearning, unless it has changed since it was seen."""
        is_conditional = seen is not None and self._context.runtime.is_conditional(key)
        version = seen.resource_version if seen is not None and is_conditional else None
        fields = make_apply_document(key, KINDS[key.kind].api_version, resource_version=version)
        try:
            body = await self._context.writer.apply_fields(key, fields | {"spec": document["spec"]})
        except ApiError as error:
            if error.status != 404:
                raise
            # This 404 must not make a caller believe that the object which it is about to write is gone.
            raise TryAgainError(UNSERVED) from None
        return self._context.cache.learnings.store_written_object(body, is_new=True)

    def _on_learning_change(
        self, key: Key, before: CachedObject[LearningView] | None, now: CachedObject[LearningView] | None
    ) -> None:
        if now is None:
            self._forget_runs(key.name, ForgetRequest())
            return
        if before is None or before.value.digest != now.value.digest:
            document = now.value.document
            runs = pool_learning.read_learnt_runs(key.name, document)
            if before is not None and not self._context.leadership.is_leader:
                earlier = pool_learning.read_learnt_runs(key.name, before.value.document)
                self._store.drop_runs(key.name, {item.uid for item in earlier} - {item.uid for item in runs})
            self._store.restore_runs(key.name, runs, pool_learning.read_forget_requests(document))
            self._context.runtime.add(CALIBRATION, self._context.settings.calibrate_settle_s)
        forget_request = now.value.forget
        if forget_request is not None and (before is None or before.value.forget != forget_request):
            try:
                self._forget_runs(key.name, ForgetRequest.parse(forget_request))
            except SpecError as error:
                log.warning("%s: %s", key, error)

    def _forget_runs(self, pool: str, forget_request: ForgetRequest) -> None:
        """Forget the runs of a pool that a request selects, and reconcile their jobs."""
        count = self._store.forget_runs(forget_request, self._context.timestamp(), pool)
        for key, item in self._own.items():
            if item.run.pool == pool and forget_request.matches(item):
                self._context.runtime.add(key, self._context.settings.observe_settle_s)
        log.info("forgot %d runs of pool %s (%s)", count, pool, forget_request)
        self._context.runtime.add(CALIBRATION)

    def _on_namespace_change(self, key: Key, before: CachedObject[Any] | None, now: CachedObject[Any] | None) -> None:
        uid = None if now is None else now.uid
        is_new = before is None or now is None or before.uid != now.uid
        if is_new and self._store.forget_namespace(key.name, uid):
            self._context.runtime.add(CALIBRATION)


def _is_valid_forget_request(text: str) -> bool:
    try:
        ForgetRequest.parse(text)
    except SpecError:
        return False
    return True
