"""The corridor of the operator: watched objects in, advice out, written once and only when it differs.

Watch events only store what they brought and enqueue a key. Workers take keys, compute what the object should say
(`desired` and `amended`, pure functions) and write the difference by server-side apply. Nothing is remembered that
the cluster does not also hold, so that a restart, a second operator or a lost event cost nothing but time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from tilecast import nodes
from tilecast.advise import Advice, advise
from tilecast.api import gpu_pool as gpupool
from tilecast.api import training_job as trainingjob
from tilecast.api.base import API_VERSION, GROUP, VERSION
from tilecast.jobs import kueue
from tilecast.spec import SpecError
from tilecast_operator import capacity, observe
from tilecast_operator.api import UNREACHABLE, ApiError, retry_s
from tilecast_operator.jobs import Answer, Desk
from tilecast_operator.learning import Score, Taught
from tilecast_operator.observe import Refused
from tilecast_operator.queue import KeyQueue
from tilecast_operator.report import annotations as marks
from tilecast_operator.report import events, pools
from tilecast_operator.report.metrics import Metrics
from tilecast_operator.report.status import (
    Fit,
    Refusal,
    Status,
    Verdict,
    capacity_condition,
    condition,
    conditions,
    fitted,
    message,
    refused,
    scored,
    status,
    unscored,
)
from tilecast_operator.scoring import Scores
from tilecast_operator.settings import Settings
from tilecast_operator.verdicts import Advise, Verdicts, is_passing
from tilecast_operator.view import PLURALS, Document, Key, View, marks_digest, stamp, status_digest

log = logging.getLogger("tilecast")


class SearchError(Exception):
    """A search ended in a defect. The job says so in its status, and is tried again."""


NODES = Key("Node")
"""The key of everything that makes pools."""
CAPACITY = Key("Capacity")
"""The key of everything that says what is free."""
CALIBRATION = Key("Calibration")
"""The key of everything that measured steps teach."""
KUEUE = {"ClusterQueue": "clusterqueues", "ResourceFlavor": "resourceflavors", "LocalQueue": "localqueues"}
"""What is read of Kueue, by kind."""
NO_MARKS = marks_digest({})


@dataclass(frozen=True, slots=True)
class Desired:
    """What an object should say."""

    status: Status
    annotations: Mapping[str, str] | None
    """Ours, all of them; None leaves them as they are."""
    note: events.Note | None = None


def desired(view: View, verdict: Verdict, is_off: bool, fit: Fit, now: str, target: Answer | None = None) -> Desired:
    """What a job should say for a verdict. In mode Off that is its status only."""
    before = view.status
    applied = None if target is None else target.applied
    found = conditions(verdict, is_off, view.generation, now, before.get("conditions") or (), fit, applied)
    answer = fitted(status(verdict, view.generation, found), fit)
    if target is not None:
        answer["summary"]["target"] = target.name
    if isinstance(verdict, Advice) and verdict.best is not None and (since := started(view, target)) is not None:
        answer["forecast"] = {"frozenAt": since or now}
    if is_off:
        return Desired(answer, {})
    wanted = {} if isinstance(verdict, Refusal) else marks.advice_annotations(verdict)
    return Desired(answer, wanted, events.note(verdict, before.get("summary") or {}, answer["summary"]))


def amended(
    view: View,
    before: Status,
    is_off: bool,
    fit: Fit,
    now: str,
    score: Score | None = None,
    refusal: str | None = None,
    target: Answer | None = None,
) -> Desired:
    """What a job should say that keeps its forecast: the same, but for what is free now, that it has started, how its
    measured steps compare, or why what was told of them does not count, and what became of its target."""
    since, is_marked = started(view, target), view.marks != NO_MARKS
    answer = fitted({**before, "observedGeneration": view.generation}, fit)
    fresh = {"CapacityAvailable": capacity_condition(fit, view.generation, now, before["conditions"])}
    if target is not None and not target.is_gone:
        fresh["Applied"] = condition("Applied", *target.applied, view.generation, now, before["conditions"])
    answer["conditions"] = [
        fresh.get(item["type"], {**item, "observedGeneration": view.generation}) for item in before["conditions"]
    ]
    if score is not None:
        answer = scored(answer, score, now)
    else:
        answer = unscored(answer, now)
        if since is not None:
            answer["forecast"] = answer.get("forecast") or {"frozenAt": since or now}
    if refusal is not None and score is None:
        answer["conditions"] = refused(answer["conditions"], refusal, now)
    if is_off or is_marked:
        return Desired(answer, {} if is_off else None)
    return Desired(answer, marks.recommendation_annotations(before["recommendation"], before.get("inputsHash", "")))


def started(view: View, target: Answer | None = None) -> str | None:
    """When the job began to run, as far as it says: a time, or an empty text where it says only that it did.

    A TrainingJob by itself runs nothing. It has started once whoever starts it says so in an annotation, once a
    measured step is there, or once the job that it names has; that one may be gone by now.
    """
    inputs = dict(view.inputs)
    told = inputs.get(marks.STARTED, "").strip()
    if told.lower() not in ("", "false"):
        return _stamp(told)
    if marks.OBSERVED in inputs:
        return ""
    if target is None:
        return None
    is_over = target.is_gone and "forecast" in view.status
    return "" if target.has_started or target.observed is not None or is_over else None


class Client(Protocol):
    """What the corridor needs of an API client."""

    def apply(self, path: str, document: Mapping[str, Any], *, force: bool = True) -> Awaitable[dict[str, Any]]:
        """Server-side apply."""

    def create(self, path: str, document: Mapping[str, Any]) -> Awaitable[dict[str, Any]]:
        """Create an object."""

    def get(self, path: str, query: Mapping[str, str] = ...) -> Awaitable[dict[str, Any]]:
        """Read an object, or a list."""

    def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> Awaitable[dict[str, Any]]:
        """JSON patch."""

    def delete(self, path: str, uid: str, resource_version: str) -> Awaitable[dict[str, Any]]:
        """Delete an object that is still as it was seen."""


class Corridor:
    """Watched state, the queue, and the workers. Belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        metrics: Metrics,
        advisor: Advise = advise,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.queue: KeyQueue[Key] = KeyQueue(time.monotonic)
        self._client = client
        self._clock = clock
        self._verdicts = Verdicts(client, advisor, metrics, settings.advisors, settings.advice_cache)
        self._scores = Scores(self._verdicts, metrics, self._now)
        self._reviews: OrderedDict[bytes, tuple[float, Document]] = OrderedDict()
        self._reviewing = 0
        self.jobs = Desk(settings, client, metrics, self._verdicts, self._cluster, self._target_changed, advisor, clock)
        self._trainers: dict[Key, list[tuple[str, str]]] = {}
        """What the TrainJobs that are named told last."""
        self._objects: dict[Key, View] = {}
        self._touched: set[Key] = set()
        """Jobs whose status somebody else wrote: they are compared in full."""
        self._nodes: dict[str, nodes.Node] = {}
        self._slices: dict[str, nodes.Slice | None] = {}
        """By name; None is one that is of no use here, and counted all the same."""
        self._observed = capacity.Observed()
        self._free: dict[str, capacity.Free] = {}
        self._fits: dict[Key, tuple[tuple[str, int, int], Fit, float]] = {}
        """Pool, nodes and GPUs per node of each recommendation, what was said of them, and since when."""
        self._report: nodes.NodesReport | None = None
        self._found: dict[str, nodes.FoundPool] = {}
        self._forget: set[str] = set()
        self._told: set[str] = set()
        """What Events said of unknown accelerators."""
        self._uids: dict[tuple[str, str, str], str] = {}
        """Of nodes, slices and what Kueue has, by resource, namespace and name."""
        self._is_dirty = False
        self._is_listed = False
        self._last_new_s = time.monotonic()
        self._failures: dict[Key, int] = {}
        self._problem: str | None = "the utilization model is not loaded yet"
        self._differs_since: dict[str, float] = {}
        self._difference: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Load the model and start the workers."""
        self._tasks = [asyncio.create_task(self._work(), name=f"worker-{n}") for n in range(self.settings.writers)]
        self._tasks.append(asyncio.create_task(self._compare(), name="watch-check"))
        if self.settings.jobs:
            self.jobs.start()
        self.queue.add(NODES, self.settings.settle_s)

    async def stop(self) -> None:
        """Stop the workers; what they were about to write is computed again at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.jobs.stop()
        self._verdicts.stop()

    def unhealthy(self) -> str | None:
        """Why this process should be restarted, if it should."""
        ended = [task.get_name() for task in self._tasks if task.done()] + self.jobs.ended()
        if ended:
            return f"{', '.join(ended)} ended"
        now_s = time.monotonic()
        for resource, since_s in self._differs_since.items():
            if now_s - since_s > self.settings.stall_s:
                return f"the watch of {resource} is stale: {self._difference[resource]}"
        stalled_s = self.queue.stalled_s()
        return f"no work finished for {stalled_s:.0f} s" if stalled_s > self.settings.stall_s else None

    def unready(self) -> str | None:
        """Why no advice can be given yet, if none can."""
        return self._problem or (None if self._report is not None else "nodes are not read yet")

    def listed(self) -> None:
        """Take note that everything which makes pools has been seen once."""
        self._is_listed = True

    def see_node(self, body: Document) -> None:
        """Take note of a node that exists."""
        self._comes("nodes", body)
        found = nodes.node(body)
        before = self._nodes.get(found.name)
        if before == found:
            return
        self._nodes[found.name] = found
        if before is None:
            self._last_new_s = time.monotonic()
        if before is not None and before.schedulable != found.schedulable:
            self.queue.add(CAPACITY, self.settings.capacity_settle_s)
        self._pools_changed()

    def lose_node(self, body: Document) -> None:
        """Take note of a node that is gone."""
        if self._goes("nodes", body) and self._nodes.pop(body["metadata"]["name"], None) is not None:
            self._pools_changed()

    def see_slice(self, body: Document) -> None:
        """Take note of a ResourceSlice that exists."""
        self._comes("resourceslices", body)
        found, name = nodes.resource_slice(body), str(body["metadata"]["name"])
        if name not in self._slices or self._slices[name] != found:
            self._slices[name] = found
            self._last_new_s = time.monotonic()
            self._pools_changed()

    def lose_slice(self, body: Document) -> None:
        """Take note of a ResourceSlice that is gone."""
        name = str(body["metadata"]["name"])
        if self._goes("resourceslices", body) and name in self._slices:
            del self._slices[name]
            self._pools_changed()

    def see_kueue(self, body: Document) -> None:
        """Take note of a ClusterQueue, ResourceFlavor or LocalQueue that exists."""
        kind, name = body["kind"], str(body["metadata"]["name"])
        self._comes(KUEUE[kind], body)
        self.jobs.see_kueue(body)
        if kind == "ClusterQueue":
            self._observed.queues[name] = kueue.quotas(body)
        elif kind == "ResourceFlavor":
            self._observed.flavors[name] = kueue.node_labels(body)
        else:
            return
        self.queue.add(CAPACITY, self.settings.capacity_settle_s)

    def lose_kueue(self, body: Document) -> None:
        """Take note of one that is gone."""
        kind, name = body["kind"], str(body["metadata"]["name"])
        if not self._goes(KUEUE[kind], body):
            return
        self.jobs.lose_kueue(body)
        if kind != "LocalQueue":
            known = self._observed.queues if kind == "ClusterQueue" else self._observed.flavors
            known.pop(name, None)
            self.queue.add(CAPACITY, self.settings.capacity_settle_s)

    def see_pods(self, used: Mapping[str, int] | None) -> None:
        """Take note of the GPUs that pods hold, by node; None where that is not known."""
        self._seen("pods")
        self._observed.used = used
        self.queue.add(CAPACITY, self.settings.capacity_settle_s)

    def see(self, body: Document) -> None:
        """Take note of a TrainingJob or GPUPool that exists."""
        key, view = Key.of(body), View.of(body)
        self._seen(PLURALS[key.kind])
        known = self._objects.get(key)
        if known is not None and not view.is_newer_than(known):
            return
        if known is not None and known.uid != view.uid:
            self._drop(key)
            known = None
        if known is not None and known.digest != view.digest:
            self._touched.add(key)
        self._objects[key] = view
        if known is None:
            self._last_new_s = time.monotonic()
        if key.kind == trainingjob.KIND:
            self.jobs.see_request(body)
            if known is None or key in self._touched:
                self._scores.recall(key, view)
        if key.kind == gpupool.KIND and known is None:
            self._scores.learner.recall(key.name, view.status)
        if key.kind == gpupool.KIND and (known is None or not known.asks_as(view)):
            self._pools_changed()
        self.queue.add(key)

    def lose(self, body: Document) -> None:
        """Take note of a TrainingJob or GPUPool that is gone."""
        key = Key.of(body)
        self._seen(PLURALS[key.kind])
        known = self._objects.get(key)
        if known is not None and known.uid != body["metadata"].get("uid", known.uid):
            return  # another of its name is there by now
        self._drop(key)
        if key.kind == gpupool.KIND:
            self._pools_changed()
        else:
            self.jobs.lose_request(body)

    def _drop(self, key: Key) -> None:
        """Keep nothing of an object."""
        self._objects.pop(key, None)
        self._failures.pop(key, None)
        self._touched.discard(key)
        self._fits.pop(key, None)
        self._trainers.pop(key, None)
        self._scores.forget(key)

    def _cluster(self) -> tuple[nodes.NodesReport | None, Mapping[str, nodes.Node]]:
        return self._report, self._nodes

    def _target_changed(self, namespace: str, name: str) -> None:
        self.queue.add(Key(trainingjob.KIND, namespace, name))

    async def put_observation(self, namespace: str, name: str, token: str, body: bytes) -> None:
        """Take a report that a pod PUT.

        Raises:
            Refused: it does not count, and why.
        """
        try:
            node = observe.reviewed(await self._review(token), namespace)
            await self._measured(Key(trainingjob.KIND, namespace, name), observe.from_body(body, node))
        except Refused as answer:
            self.metrics.observations.labels("put", answer.outcome).inc()
            raise

    async def told(self, key: Key, answer: Any) -> None:
        """Take what Prometheus answers to a job's query."""
        try:
            found = observe.from_prometheus(answer)
            if found is not None:
                await self._measured(key, found)
        except Refused as refusal:
            self.metrics.observations.labels("prometheus", refusal.outcome).inc()
            log.warning("%s: what Prometheus tells does not count: %s", key, refusal)

    async def _see_trainer(self, key: Key, status: Document) -> None:
        """Take what the status of a TrainJob tells of the step of the job that names it, once for as long as it tells
        the same."""
        told, before = observe.trainer_metrics(status), self._trainers.get(key)
        if not told or before == told:
            return
        self._trainers[key] = told
        try:
            found, score = observe.from_trainer(status), self._scores[key]
            # A process that has just begun may see what an earlier one took.
            is_taken = found is not None and before is None and score is not None and score.window.ends_with(found)
            if found is not None and not is_taken:
                await self._measured(key, found)
        except Refused as refusal:
            self.metrics.observations.labels("trainJob", refusal.outcome).inc()
            log.warning("%s: what its TrainJob tells does not count: %s", key, refusal)

    def queries(self) -> Iterator[tuple[Key, str]]:
        """Every job that has advice, with the query for its step: its own, its pool's, or the operator's. One after the
        other, for ten thousand at once would keep everybody else waiting."""
        for key, view in list(self._objects.items()):
            best = view.status.get("recommendation") if key.kind == trainingjob.KIND else None
            if not best:
                continue
            pool = self._objects.get(Key(gpupool.KIND, "", best["pool"]))
            sources = (view.document, {} if pool is None else pool.document)
            own = next((text for one in sources if (text := (one.get("spec") or {}).get("observationQuery"))), None)
            yield key, observe.query(own or self.settings.prometheus_query, key.namespace, key.name)

    async def _measured(self, key: Key, report: observe.Report) -> None:
        """Hold a report against its job's forecast; the more there are, the rarer the status says so."""
        score = await self._scores.take(key, self._objects.get(key), self._report, report)
        self.queue.add(key, self.settings.observe_settle_s * min(score.window.samples, 60))
        self.queue.add(CALIBRATION, self.settings.calibrate_settle_s)

    async def _review(self, token: str) -> Document:
        """What the API server says of a token, asked once a minute.

        Raises:
            Refused: it cannot be asked.
        """
        if not token:
            raise Refused("unauthenticated", 401, "there is no bearer token; project one with audience tilecast")
        digest, now_s = hashlib.sha256(token.encode()).digest(), time.monotonic()
        known = self._reviews.get(digest)
        if known is not None and now_s - known[0] < REVIEW_HOLDS_S:
            return known[1]
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [observe.AUDIENCE]},
        }
        if self._reviewing >= MAX_REVIEWING:
            raise Refused("unavailable", 503, "too many tokens are being reviewed; report again later")
        self._reviewing += 1
        try:
            found = await self._client.create("/apis/authentication.k8s.io/v1/tokenreviews", asked)
        except (ApiError, *UNREACHABLE) as error:
            log.warning("a token cannot be reviewed: %s", error)
            raise Refused("unavailable", 503, "the token cannot be reviewed now; report again later") from None
        finally:
            self._reviewing -= 1
        self._reviews[digest] = (now_s, found)
        while len(self._reviews) > MAX_REVIEWS:
            self._reviews.popitem(last=False)
        return found

    def _seen(self, resource: str) -> None:
        self.metrics.watch.labels(resource).set(self._clock())

    def _comes(self, resource: str, body: Document) -> None:
        self._seen(resource)
        metadata = body["metadata"]
        self._uids[resource, metadata.get("namespace", ""), metadata["name"]] = metadata.get("uid", "")

    def _goes(self, resource: str, body: Document) -> bool:
        """Whether that object is gone, and not only one that had its name before: events about the two may come in
        any order."""
        self._seen(resource)
        metadata = body["metadata"]
        key, uid = (resource, metadata.get("namespace", ""), metadata["name"]), metadata.get("uid", "")
        if self._uids.get(key, uid) != uid:
            return False
        self._uids.pop(key, None)
        return True

    def _pools_changed(self) -> None:
        self._is_dirty = True
        self.queue.add(NODES, self.settings.settle_s)

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            try:
                await self._reconcile(key)
                self._failures.pop(key, None)
            except (ApiError, *UNREACHABLE, SearchError) as error:
                self._retry(key, error)
            except Exception:
                log.exception("%s: unexpected failure", key)
                self._retry(key, None)
            finally:
                self.queue.done(key)
                self.metrics.queue.set(len(self.queue))

    def _retry(self, key: Key, error: Exception | None) -> None:
        """Try again later, unless the object is gone. Content that the API server will not take may be taken once the
        CRDs are as new as this process."""
        code = error.status if isinstance(error, ApiError) else None
        if code == 404:
            self._drop(key)
            return
        attempt = self._failures[key] = self._failures.get(key, 0) + 1
        wait_s = retry_s(attempt, error, self.settings.retry_first_s, self.settings.retry_most_s)
        if code == 422:
            wait_s = max(wait_s, self.settings.retry_most_s)
        log.warning("%s: %s; again in %.1f s", key, error or "see above", wait_s)
        self.metrics.retries.inc()
        self.queue.add(key, wait_s)

    async def _reconcile(self, key: Key) -> None:
        if key == NODES:
            await self._warm_up()
            await self._refresh()
        elif key == CAPACITY:
            self._read_capacity()
        elif key == CALIBRATION:
            await self._learn()
        elif self._report is not None:  # everything is due once the nodes are read
            view = self._objects.get(key)
            if key.kind == gpupool.KIND:
                await self._describe_pool(key, view)
            elif view is not None:
                await self._advise_job(key, view)
            else:
                self._drop(key)

    async def _warm_up(self) -> None:
        """Load the utilization model; one that cannot be read is retried."""
        if self._problem is None:
            return
        try:
            await self._verdicts.warm_up()
        except SpecError as error:
            self._problem = str(error)
            raise OSError(str(error)) from None
        self._problem = None

    async def _refresh(self) -> None:
        """Read the pools anew; where they differ, every job is due.

        Not before everything is listed: half the nodes would be written down as pools that have lost the others.
        """
        if not await self._has_all():
            self.queue.add(NODES, max(self.settings.settle_s, 0.01))
            return
        if self._is_dirty or self._report is None:
            self._is_dirty = False
            own = [view.document for key, view in self._objects.items() if key.kind == gpupool.KIND]
            everyone, slices = list(self._nodes.values()), [item for item in self._slices.values() if item]
            try:
                bare = await self._verdicts.run(nodes.pools, everyone, own, slices, tuple(self._forget))
            except Exception:
                self._is_dirty = True
                raise
            if self._report is None:
                await self._learn()
            self._use(bare.calibrated(self._scores.learner.table))
        # Last, for an API server that takes no Event now must not keep anybody from the rest.
        if self._report is not None:
            await self._post_unknown(self._report)

    def _use(self, report: nodes.NodesReport) -> None:
        """Answer by these pools from now on."""
        before, self._report = self._report, report
        self._found = {item.pool.name: item for item in report.found}
        self._verdicts.use(report)
        self._read_capacity()
        for name in {*self._found, *report.invalid, *report.obsolete, *(item.name for item in self._pool_keys())}:
            self.queue.add(Key(gpupool.KIND, "", name))
        if before is not None and before.pools == report.pools and _whys(before) == _whys(report):
            return
        shapes = (f"{item.pool.name} {item.nodes}x{item.pool.gpus_per_node}" for item in report.found)
        log.info("pools: %s", ", ".join(shapes) or "none")
        self._all_jobs_due()

    async def _has_all(self) -> bool:
        """Whether all that makes pools has been seen once: as much as the API server counts, or, where it counts none
        or more come and go than can be counted, all that came before a long pause."""
        if self._is_listed:
            return True
        here = {"nodes": len(self._nodes), "gpupools": len(self._pool_keys()), "resourceslices": len(self._slices)}
        there = [await self._count(resource) for resource in here if resource in self._counted_resources()]
        seen = [here[resource] for resource in here if resource in self._counted_resources()]
        is_counted = None not in there
        is_short = any(count is not None and count != known for count, known in zip(there, seen, strict=True))
        paused_s = time.monotonic() - self._last_new_s
        pause_s = LISTING_PAUSE_S if is_short else UNCOUNTED_PAUSE_S
        self._is_listed = (is_counted and not is_short) or paused_s > pause_s
        return self._is_listed

    def _counted_resources(self) -> list[str]:
        left_out = {"resourceslices"} if not self.settings.read_resource_slices else set()
        return [resource for resource in _LISTS if resource not in left_out]

    async def _count(self, resource: str) -> int | None:
        """How many objects the API server has; None where it does not say."""
        if resource == "nodes" and self.settings.node_selector:
            return None
        try:
            return _total(await self._client.get(_LISTS[resource], {"limit": "1"}))
        except (ApiError, *UNREACHABLE):
            return None

    async def _learn(self) -> None:
        """Fit what the runs teach; where forecasts change by it, every job that has not started is due."""
        learner = self._scores.learner
        if learner.adopt(await self._verdicts.run(Taught.by, learner.ordered())):
            self._pools_changed()
        for name in learner.pools():
            self.queue.add(Key(gpupool.KIND, "", name))
        self.metrics.show_calibration(learner)

    def _pool_keys(self) -> list[Key]:
        return [key for key in self._objects if key.kind == gpupool.KIND]

    def _all_jobs_due(self) -> None:
        self.jobs.pools_changed()
        for key in self._objects:
            if key.kind == trainingjob.KIND:
                self.queue.add(key)

    def _read_capacity(self) -> None:
        """See what is free; jobs that fit and did not, or the other way round, are due, and so are their pools."""
        if self._report is None:
            return
        before, self._free = self._free, self._observed.free(self._report.found, self._nodes)
        self.metrics.show_pools(self._report, self._free)
        for name in before.keys() | self._free.keys():
            if before.get(name) != self._free.get(name):
                self.queue.add(Key(gpupool.KIND, "", name))
        for job, (place, fit, since_s) in self._fits.items():
            if fit != self._fit(dict(zip(_PLACE, place, strict=True))):
                # A pool on the brink of being full would else have every job of it written again each time.
                hold_s = CAPACITY_HOLDS * self.settings.capacity_settle_s
                self.queue.add(job, max(since_s + hold_s - time.monotonic(), 0.0))

    async def _advise_job(self, key: Key, view: View) -> None:
        """Write what differs. The status comes last: it is what says that the rest was written.

        Raises:
            SearchError: the status says InternalError, and the search is due again.
        """
        document, before = view.document, _whole(view.status)
        is_off, is_touched = _is_off(document), key in self._touched
        target = await self.jobs.answer(key.namespace, key.name, document)
        annotation = dict(view.inputs).get(marks.OBSERVED, None if target is None else target.observed)
        if target is not None and target.is_gone:
            pass  # what it told stands
        elif annotation is None:
            self._scores.withdraw(key, view)
        elif (
            before.get("recommendation")
            and self._report is not None
            and await self._scores.annotated(key, view, self._report, annotation)
        ):
            self.queue.add(CALIBRATION, self.settings.calibrate_settle_s)
        if target is not None and before.get("recommendation"):
            await self._see_trainer(key, target.trainer)
        score = self._scores[key]
        has_started = started(view, target) is not None or score is not None
        if has_started and before.get("recommendation"):
            self._fits.pop(key, None)
            refusal = self._scores.refusal(key)
            await self._write(key, view, amended(view, before, is_off, STARTED, self._now(), score, refusal, target))
            return
        question = await self._verdicts.question(key.namespace, document)
        if question.has_config_map:
            # ConfigMaps are read by name and not watched, so that the operator needs to list none.
            self.queue.add(key, self.settings.config_map_poll_s)
        is_current = before.get("observedGeneration") == view.generation and "forecast" not in before
        if is_current and target is None and not is_touched and not has_started and (view.marks == NO_MARKS) == is_off:
            best, digest = before.get("recommendation"), await self._verdicts.inputs_hash(question)
            if best and digest is not None and digest == before.get("inputsHash"):
                await self._write(key, view, amended(view, before, is_off, self._fit_of(key, best), self._now()))
                return
        verdict = await self._verdicts.verdict(question) if target is None else target.verdict
        if target is None and is_current and before.get("recommendation"):
            verdict = await self._verdicts.held(question, verdict, before["recommendation"])
        fit = STARTED if has_started else self._fit_of(key, _place(verdict))
        want = desired(view, verdict, is_off, fit, self._now(), target)
        had_pool = bool((before.get("summary") or {}).get("pool"))
        if await self._write(key, view, want):
            self.metrics.count_advice(verdict, changed=had_pool and want.note is not None)
        self._touched.discard(key)
        if is_passing(verdict):
            raise SearchError(message(verdict))

    async def _write(self, key: Key, view: View, want: Desired) -> bool:
        """Write what differs; returns whether the status did."""
        if want.annotations is not None and view.marks != marks_digest(want.annotations):
            view = await self._apply(key, "", view, {"metadata": {"annotations": dict(want.annotations)}})
        if want.note is not None:
            await self._post(key, view, want.note)
        if status_digest(want.status) == view.digest:
            return False
        await self._apply(key, "/status", view, {"status": want.status})
        return True

    def _fit_of(self, key: Key, best: Mapping[str, Any] | None) -> Fit:
        """Whether a job's recommendation could start now; it is due again when that changes."""
        if best is None:
            self._fits.pop(key, None)
            return NOTHING_TO_FIT
        fit, place = self._fit(best), (best["pool"], best["nodes"], best["gpusPerNode"])
        before = self._fits.get(key)
        if before is None or before[0] != place:
            since_s = -math.inf
        else:
            since_s = before[2] if before[1] == fit else time.monotonic()
        self._fits[key] = (place, fit, since_s)
        return fit

    def _fit(self, best: Mapping[str, Any]) -> Fit:
        """Whether a recommendation could start now. It says no numbers, which would change by the minute."""
        found, free = self._found.get(best["pool"]), self._free.get(best["pool"])
        if found is not None and best["nodes"] > found.nodes:
            return Fit("False", "TooFewNodes", f"the plan needs {best['nodes']} nodes and fewer exist now", False)
        if found is None or free is None:
            return NOT_OBSERVED
        if free.fits(best["nodes"], best["gpusPerNode"]):
            return Fit("True", "GpusFree", f"the GPUs are free now, as {free.source} shows", True)
        text = f"others use the GPUs now, as {free.source} shows; the job would wait"
        return Fit("False", "GpusInUse", text, False)

    async def _describe_pool(self, key: Key, view: View | None) -> None:
        """Write a pool down that discovery found, say of any what became of it, and take back what is obsolete."""
        report = self._report
        if report is None:
            return
        if key.name in report.obsolete:
            if view is not None and self.settings.discovery:
                await self._withdraw(key, view)
            return
        found: nodes.FoundPool | SpecError | None = report.invalid.get(key.name) or self._found.get(key.name)
        if isinstance(found, nodes.FoundPool) and self.settings.discovery:
            view = await self._write_down(key, view, found)
        if found is None or view is None:
            return
        before, learner = view.status.get("conditions") or (), self._scores.learner
        is_found = isinstance(found, nodes.FoundPool)
        learnt = learner.pool(key.name, found.pool.gpu.name) if isinstance(found, nodes.FoundPool) else {}
        drifted = learner.drifted(key.name) if is_found else 0
        want = pools.pool_status(found, view.generation, self._now(), before, self._free.get(key.name), learnt, drifted)
        if status_digest(want) != view.digest:
            await self._apply(key, "/status", view, {"status": want})
        if isinstance(found, nodes.FoundPool) and found.note is not None:
            self._expire(key, want)

    async def _write_down(self, key: Key, view: View | None, found: nodes.FoundPool) -> View | None:
        """The pool's object as discovery wants it; one that a user wrote or edited stays as it is.

        Raises:
            ApiError: among others 409, where a user has just changed a field that would be changed here.
        """
        document = nodes.discovered(found)
        if document is None or (view is not None and view.asks(document)):
            self._forget.discard(key.name)
            return view
        if view is not None:
            document["metadata"]["uid"] = view.uid
        applied = await self._counted("gpupools", self._client.apply(key.path, document, force=False))
        answer = View.of(applied)
        name, spec = gpupool.parse(answer.document)
        if view is None and gpupool.discovery(answer.document, spec) is None:
            log.warning("%s: somebody else created %s at the same time; it is theirs", key, name)
            bare = {"apiVersion": API_VERSION, "kind": key.kind, "metadata": {"name": name, "uid": answer.uid}}
            answer = View.of(await self._counted("gpupools", self._client.apply(key.path, bare, force=False)))
            self._pools_changed()
        self._forget.discard(key.name)
        known = self._objects.get(key)
        if known is None or answer.is_newer_than(known):
            self._objects[key] = answer
        return answer

    async def _withdraw(self, key: Key, view: View) -> None:
        """Delete a pool of discovery's, if it still is as it was seen."""
        try:
            await self._counted("gpupools", self._client.delete(key.path, view.uid, view.resource_version))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        self._forget.discard(key.name)

    def _expire(self, key: Key, want: Status) -> None:
        """Count nodes that have been missing for long as gone."""
        shrunk = next(item for item in want["conditions"] if item["type"] == "ScaledDown")
        since = _seconds(shrunk["lastTransitionTime"])
        if shrunk["status"] != "True" or since is None:
            return
        left_s = since + self.settings.pool_retention_s - self._clock()
        if left_s > 0:
            self.queue.add(key, left_s)
        elif key.name not in self._forget:
            self._forget.add(key.name)
            self._pools_changed()

    async def _post_unknown(self, report: nodes.NodesReport) -> None:
        """Say once which GPUs nobody knows, about the first node that has them; how many there are is a metric."""
        unknown = {
            f"{item.message}; {item.remedy}": item.nodes[0]
            for item in report.left_out
            if item.code == "UnknownAccelerator"
        }
        self._told &= unknown.keys()
        for text in unknown.keys() - self._told:
            note, node = events.Note("Warning", "UnknownAccelerator", text[: events.MAX_NOTE]), unknown[text]
            body = events.event(
                note, "default", node, node, "Node", self._now(), self.settings.instance, api_version="v1"
            )
            if await self._create_event(body, node):
                self._told.add(text)

    async def _apply(self, key: Key, subresource: str, view: View, content: Mapping[str, Any]) -> View:
        """Apply fields to the object as it was seen, and keep what the API server made of them. When that has failed
        some times, the watch may have lost what is new: then to the object as it is; a spec that changed meanwhile is
        due again.

        Raises:
            ApiError: among others 409, where the object has changed since: another operator may have said the same.
        """
        identity = {"name": key.name, "uid": view.uid}
        identity |= {"namespace": key.namespace} if key.namespace else {}
        if self._failures.get(key, 0) < CONDITIONAL_TRIES and view.resource_version:
            identity["resourceVersion"] = view.resource_version
        metadata = {**content.get("metadata", {}), **identity}
        document = {"apiVersion": API_VERSION, "kind": key.kind, **content, "metadata": metadata}
        resource = PLURALS[key.kind] + subresource
        answer = View.of(await self._counted(resource, self._client.apply(key.path + subresource, document)))
        known = self._objects.get(key)
        if known is not None and answer.is_newer_than(known):
            self._objects[key] = answer
        if not answer.asks_as(view):
            self.queue.add(key)
        return answer

    async def _post(self, key: Key, view: View, found: events.Note) -> None:
        body = events.event(found, key.namespace, key.name, view.uid, key.kind, self._now(), self.settings.instance)
        await self._create_event(body, key)

    async def _create_event(self, body: Document, about: object) -> bool:
        """Create an Event; one that is there already was said before. An Event that cannot be written is no reason to
        wait: returns whether it is there."""
        path = f"/api/v1/namespaces/{body['metadata']['namespace']}/events"
        try:
            await self._counted("events", self._client.create(path, body))
        except ApiError as error:
            if error.status == 429 or error.status >= 500:
                raise
            if error.status == 409:
                return True
            log.warning("%s: Event not written: %s", about, error)
            return False
        return True

    async def _counted(self, resource: str, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        with self.metrics.writing(resource):
            return await answer

    async def _compare(self) -> None:
        """Count now and then what the API server has: a watch that went silent would leave no other trace."""
        while True:
            await asyncio.sleep(self.settings.watch_check_s)
            for resource in self._counted_resources():
                there = await self._count(resource)
                apart = {"nodes": len(self._nodes), "resourceslices": len(self._slices)}
                here = apart.get(resource, sum(PLURALS[key.kind] == resource for key in self._objects))
                if there is None or there == here:
                    self._differs_since.pop(resource, None)
                else:
                    self._difference[resource] = f"the API server has {there} objects, {here} were seen"
                    self._differs_since.setdefault(resource, time.monotonic())

    def _now(self) -> str:
        return stamp(self._clock())


CAPACITY_HOLDS = 6
"""What is said of a job's capacity stays for so many times `capacity_settle_s`."""
_PLACE = ("pool", "nodes", "gpusPerNode")

CONDITIONAL_TRIES = 6
"""How often a write is meant for the object as it was seen, which keeps two operators from writing over each other."""
REVIEW_HOLDS_S = 60.0
"""How long the answer to a TokenReview is taken for granted."""
MAX_REVIEWS = 4096
MAX_REVIEWING = 32
"""TokenReviews under way: whoever floods us with tokens does not flood the API server."""

LISTING_PAUSE_S = 30.0
"""A first list is taken to be over after so long without a new object, whatever the API server counts."""
UNCOUNTED_PAUSE_S = 10.0
"""The same where it counts nothing, as of nodes that a selector chooses."""

NOTHING_TO_FIT = Fit("Unknown", "NoRecommendation", "there is no plan that could start")
NOT_OBSERVED = Fit(
    "Unknown", "NotObserved", "what is free is not read; install Kueue, or the chart with capacity.readPods"
)
STARTED = Fit("Unknown", "JobStarted", "the job has started; its forecast is frozen")

_LISTS = {
    "nodes": "/api/v1/nodes",
    "gpupools": f"/apis/{GROUP}/{VERSION}/gpupools",
    "trainingjobs": f"/apis/{GROUP}/{VERSION}/trainingjobs",
    "resourceslices": "/apis/resource.k8s.io/v1/resourceslices",
}
"""Paths of what is counted."""


def _place(verdict: Verdict) -> dict[str, Any] | None:
    """Where a verdict sends its job, as a status says it."""
    best = None if isinstance(verdict, Refusal) else verdict.best
    if best is None:
        return None
    return {"pool": best.pool.name, "nodes": best.nodes, "gpusPerNode": best.gpus_per_node}


def _whole(found: Status) -> Status:
    """A status as it was written here; from one of which somebody took parts, nothing is kept."""
    is_whole = bool(found.get("conditions")) and bool(found.get("summary"))
    return found if is_whole else {}


def _total(page: Document) -> int | None:
    """How many objects a list has of which one page was read."""
    metadata, items = page.get("metadata") or {}, page.get("items") or ()
    if not metadata.get("continue"):
        return len(items)
    left = metadata.get("remainingItemCount")
    return None if left is None else len(items) + int(left)


def _is_off(document: Document) -> bool:
    """Whether a job asks for its status only, whatever else is wrong with it; YAML reads a bare Off as false."""
    spec = document.get("spec")
    mode = spec.get("mode") if isinstance(spec, Mapping) else None
    return mode == "Off" or mode is False


def _whys(report: nodes.NodesReport) -> tuple[object, ...]:
    """What a job without pools is told."""
    return () if report.found else (report.left_out, {name: str(error) for name, error in report.invalid.items()})


def _seconds(text: object) -> float | None:
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found.replace(tzinfo=found.tzinfo or UTC).timestamp()


def _stamp(text: str) -> str:
    """A time as the API server writes it; empty where the text is none."""
    found = _seconds(text) if len(text) <= 40 else None
    return "" if found is None else stamp(found)
