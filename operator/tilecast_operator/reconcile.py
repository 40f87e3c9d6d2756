"""The corridor of the operator: watched objects in, advice out, written once and only when it differs.

Watch events only store what they brought and enqueue a key. Workers take keys, compute what the object should say
(`desired`, a pure function) and write the difference by server-side apply. Nothing is remembered that the cluster
does not also hold, so that a restart, a second operator or a lost event cost nothing but time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, TypeAlias

import aiohttp

from tilecast import models
from tilecast.advise import Advice, Request, advise
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.manifests import gpupool, nodes, trainingjob
from tilecast.manifests.door import API_VERSION, GROUP, VERSION
from tilecast.spec import SpecError, Workload
from tilecast_operator.api import ApiError
from tilecast_operator.queue import KeyQueue
from tilecast_operator.report import annotations as marks
from tilecast_operator.report import events, pools
from tilecast_operator.report.metrics import Metrics
from tilecast_operator.report.status import Refusal, Status, Verdict, conditions, message, status
from tilecast_operator.settings import Settings

Document: TypeAlias = Mapping[str, Any]
Advise: TypeAlias = Callable[[Request, Sequence[Pool]], Advice]

log = logging.getLogger("tilecast")


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What a worker works on: one object, or all nodes at once."""

    kind: str
    namespace: str = ""
    name: str = ""

    @property
    def path(self) -> str:
        """Path of the object in the API."""
        plural = {trainingjob.KIND: "trainingjobs", gpupool.KIND: "gpupools"}[self.kind]
        scope = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"/apis/{GROUP}/{VERSION}{scope}/{plural}/{self.name}"


class SearchError(Exception):
    """A search ended in a defect. The job says so in its status, and is tried again."""


NODES = Key("Node")
"""The key of everything that makes pools."""


@dataclass(frozen=True, slots=True)
class View:
    """What is kept of an object: enough to know what it should say and whether it already does."""

    uid: str
    generation: int
    resource_version: str
    document: bytes
    """apiVersion, kind, metadata.name and spec as canonical JSON."""
    annotations: Mapping[str, str]
    """Those of ours."""
    digest: str
    """Of the status without its times."""
    conditions: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, body: Document) -> View:
        """The view of an object as the API server sent it."""
        metadata, found = body["metadata"], dict(body.get("status") or {})
        own = {key: value for key, value in (metadata.get("annotations") or {}).items() if key in marks.KEYS}
        document = {
            "apiVersion": body.get("apiVersion", API_VERSION),
            "kind": body.get("kind", ""),
            "metadata": {"name": metadata["name"]},
            "spec": body.get("spec"),
        }
        return cls(
            uid=metadata.get("uid", ""),
            generation=int(metadata.get("generation", 0)),
            resource_version=str(metadata.get("resourceVersion", "")),
            document=_canonical(document),
            annotations=own,
            digest=digest(found),
            conditions=tuple(dict(item) for item in found.get("conditions") or ()),
            summary=dict(found.get("summary") or {}),
        )

    def is_newer_than(self, other: View) -> bool:
        """Whether this is a later state, or another object of the name; where that cannot be told, yes."""
        ours, theirs = self.resource_version, other.resource_version
        is_ordered = self.uid == other.uid and ours.isdigit() and theirs.isdigit()
        return not is_ordered or int(ours) > int(theirs)


@dataclass(frozen=True, slots=True)
class Desired:
    """What an object should say."""

    status: Status
    annotations: Mapping[str, str] = field(default_factory=dict)
    note: events.Note | None = None


def desired(view: View, verdict: Verdict, is_off: bool, now: str) -> Desired:
    """What a job should say for a verdict. In mode Off that is its status only."""
    found = conditions(verdict, is_off, view.generation, now, view.conditions)
    answer = status(verdict, view.generation, found)
    if is_off:
        return Desired(answer)
    wanted = {} if isinstance(verdict, Refusal) else marks.advice_annotations(verdict)
    return Desired(answer, wanted, events.note(verdict, view.summary, answer["summary"]))


def digest(found: Mapping[str, Any]) -> str:
    """A digest of a status that ignores when its conditions last changed and how numbers are spelt."""
    bare = dict(found)
    bare["conditions"] = [
        {key: value for key, value in item.items() if key != "lastTransitionTime"}
        for item in found.get("conditions") or ()
    ]
    return hashlib.sha256(_canonical(bare)).hexdigest()


class Client(Protocol):
    """What the corridor needs of an API client."""

    def apply(self, path: str, document: Mapping[str, Any]) -> Awaitable[dict[str, Any]]:
        """Server-side apply."""

    def create(self, path: str, document: Mapping[str, Any]) -> Awaitable[dict[str, Any]]:
        """Create an object."""

    def get(self, path: str) -> Awaitable[dict[str, Any]]:
        """Read an object."""


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
        self._advisor = advisor
        self._clock = clock
        self._executor = ThreadPoolExecutor(settings.advisors, thread_name_prefix="advise")
        self._objects: dict[Key, View] = {}
        self._nodes: dict[str, nodes.Node] = {}
        self._report: nodes.NodesReport | None = None
        self._is_dirty = False
        self._refreshing = asyncio.Lock()
        self._advice: OrderedDict[bytes, asyncio.Future[Verdict]] = OrderedDict()
        self._failures: dict[Key, int] = {}
        self._problem: str | None = "the utilization model is not loaded yet"
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Load the model and start the workers."""
        self._tasks = [asyncio.create_task(self._work(), name=f"worker-{n}") for n in range(self.settings.writers)]
        self.queue.add(NODES, self.settings.settle_s)

    async def stop(self) -> None:
        """Stop the workers; what they were about to write is computed again at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def unhealthy(self) -> str | None:
        """Why this process should be restarted, if it should."""
        ended = [task.get_name() for task in self._tasks if task.done()]
        if ended:
            return f"{', '.join(ended)} ended"
        stalled_s = self.queue.stalled_s()
        return f"no work finished for {stalled_s:.0f} s" if stalled_s > self.settings.stall_s else None

    def unready(self) -> str | None:
        """Why no advice can be given yet, if none can."""
        return self._problem or (None if self._report is not None else "nodes are not read yet")

    def see_node(self, body: Document) -> None:
        """Take note of a node that exists."""
        self._seen("nodes")
        found = nodes.node(body)
        if self._nodes.get(found.name) != found:
            self._nodes[found.name] = found
            self._pools_changed()

    def lose_node(self, name: str) -> None:
        """Take note of a node that is gone."""
        self._seen("nodes")
        if self._nodes.pop(name, None) is not None:
            self._pools_changed()

    def see(self, body: Document) -> None:
        """Take note of a TrainingJob or GPUPool that exists."""
        key, view = _key(body), View.of(body)
        self._seen(_RESOURCES[key.kind])
        known = self._objects.get(key)
        if known is not None and not view.is_newer_than(known):
            return
        self._objects[key] = view
        if key.kind == gpupool.KIND and (known is None or known.document != view.document):
            self._pools_changed()
        self.queue.add(key)

    def lose(self, body: Document) -> None:
        """Take note of a TrainingJob or GPUPool that is gone."""
        key = _key(body)
        self._seen(_RESOURCES[key.kind])
        self._objects.pop(key, None)
        self._failures.pop(key, None)
        if key.kind == gpupool.KIND:
            self._pools_changed()

    def _seen(self, resource: str) -> None:
        self.metrics.watch.labels(resource).set(self._clock())

    def _pools_changed(self) -> None:
        self._is_dirty = True
        self.queue.add(NODES, self.settings.settle_s)

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            try:
                await self._reconcile(key)
                self._failures.pop(key, None)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, SearchError) as error:
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
            self._objects.pop(key, None)
            return
        attempt = self._failures[key] = self._failures.get(key, 0) + 1
        wait_s = min(self.settings.retry_first_s * 2 ** min(attempt - 1, 16), self.settings.retry_most_s)
        if code == 422:
            wait_s = self.settings.retry_most_s
        if isinstance(error, ApiError) and error.retry_after_s is not None:
            wait_s = max(wait_s, error.retry_after_s)
        log.warning("%s: %s; again in %.1f s", key, error or "see above", wait_s)
        self.metrics.retries.inc()
        self.queue.add(key, wait_s)

    async def _reconcile(self, key: Key) -> None:
        if self._problem is not None:
            await self._warm_up()
        if key == NODES:
            await self._refresh()
            return
        if self._report is None:
            await self._refresh()
        view = self._objects.get(key)
        if view is None or self._report is None:
            return
        if key.kind == trainingjob.KIND:
            await self._advise_job(key, view)
        else:
            await self._describe_pool(key, view)

    async def _warm_up(self) -> None:
        """Load the utilization model by pricing one small job; a model that cannot be read is retried."""
        async with self._refreshing:
            if self._problem is None:
                return
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._executor, self._advisor, *_small_job())
            except SpecError as error:
                self._problem = str(error)
                raise OSError(str(error)) from None
            self._problem = None

    async def _refresh(self) -> None:
        """Read the pools anew; where they differ, every job is due."""
        async with self._refreshing:
            if not self._is_dirty and self._report is not None:
                return
            self._is_dirty = False
            own = [json.loads(view.document) for key, view in self._objects.items() if key.kind == gpupool.KIND]
            everyone = list(self._nodes.values())
            loop = asyncio.get_running_loop()
            report = await loop.run_in_executor(self._executor, nodes.pools, everyone, own)
            before, self._report = self._report, report
        self.metrics.show_pools(report)
        if before is not None and _same(before, report):
            return
        shapes = (f"{item.pool.name} {item.nodes}x{item.pool.gpus_per_node}" for item in report.found)
        log.info("pools: %s", ", ".join(shapes) or "none")
        if before is None:
            return
        is_new = before.pools != report.pools
        if is_new:
            self._advice.clear()
        for key in self._objects:
            if is_new or key.kind == gpupool.KIND:
                self.queue.add(key)

    async def _advise_job(self, key: Key, view: View) -> None:
        """Write what differs. The status comes last: it is what says that the rest was written.

        Raises:
            SearchError: the status says InternalError, and the search is due again.
        """
        verdict, is_off = await self._verdict(key, view)
        want = desired(view, verdict, is_off, self._now())
        if dict(view.annotations) != dict(want.annotations):
            await self._apply(key, "", view, {"metadata": {"annotations": dict(want.annotations)}})
        if want.note is not None:
            await self._post(key, view, want.note)
        if digest(want.status) != view.digest:
            await self._apply(key, "/status", view, {"status": want.status})
            self.metrics.count_advice(verdict, changed=bool(view.summary.get("pool")) and want.note is not None)
        if _is_passing(verdict):
            raise SearchError(message(verdict))

    async def _describe_pool(self, key: Key, view: View) -> None:
        report = self._report
        if report is None:
            return
        found: nodes.FoundPool | SpecError | None = report.invalid.get(key.name)
        found = found or next((item for item in report.found if item.pool.name == key.name), None)
        if found is None:
            return
        want = pools.pool_status(found, view.generation, self._now(), view.conditions)
        if digest(want) != view.digest:
            await self._apply(key, "/status", view, {"status": want})

    async def _verdict(self, key: Key, view: View) -> tuple[Verdict, bool]:
        """The answer to a job, and whether its mode is Off. Jobs with equal specs share one search."""
        document = json.loads(view.document)
        is_off = _is_off(document)
        try:
            spec = trainingjob.parse(document)
        except SpecError as error:
            return Refusal("InvalidSpec", str(error)), is_off
        stored: bytes | None = None
        if (reference := trainingjob.reference(spec)) is not None:
            # ConfigMaps are read by name and not watched, so that the operator needs to list none.
            self.queue.add(key, self.settings.config_map_poll_s)
            found = await self._config_map(key.namespace, reference)
            if isinstance(found, Refusal):
                return found, is_off
            try:
                stored = trainingjob.content(reference, found)
            except SpecError as error:
                return Refusal("ModelNotFound", str(error)), is_off
        cache_key = _canonical(spec.model_dump(exclude={"mode"})) + hashlib.sha256(stored or b"").digest()
        cached = self._advice.get(cache_key)
        if cached is None:
            cached = self._advice[cache_key] = asyncio.ensure_future(self._search(spec, stored))
            while len(self._advice) > self.settings.advice_cache:
                self._advice.popitem(last=False)
        self._advice.move_to_end(cache_key)
        verdict = await asyncio.shield(cached)
        if _is_passing(verdict) and self._advice.get(cache_key) is cached:
            del self._advice[cache_key]
        return verdict, is_off

    async def _config_map(self, namespace: str, reference: trainingjob.Reference) -> Mapping[str, Any] | Refusal | None:
        """The ConfigMap, None where there is none, or why it cannot be read.

        Raises:
            ApiError, OSError: the API server did not answer; the job is due again.
        """
        try:
            found = await self._client.get(f"/api/v1/namespaces/{namespace}/configmaps/{reference.name}")
        except ApiError as error:
            if error.status == 404:
                return None
            if error.status != 403:
                raise
            text = f"{reference.field}: the operator may not read ConfigMap {reference.name}; install the chart"
            return Refusal("ModelNotReadable", f"{text} with rbac.readConfigMaps, or {reference.otherwise}")
        return found

    async def _search(self, spec: trainingjob.TrainingJobSpec, stored: bytes | None) -> Verdict:
        loop = asyncio.get_running_loop()
        try:
            # A stored graph takes a while to read, beside searches rather than behind them.
            request = await asyncio.to_thread(trainingjob.request, "", spec, stored)
            report = self._report
            if report is None or not report.pools:
                return Refusal("NoPools", _why_no_pools(report))
            began = time.monotonic()
            advice = await loop.run_in_executor(self._executor, self._advisor, request, report.pools)
        except SpecError as error:
            return Refusal("InvalidSpec", str(error))
        except Exception as error:
            log.exception("advice failed")
            return Refusal(
                _INTERNAL_ERROR, f"advice failed with {type(error).__name__}; the operator's log has the rest"
            )
        self.metrics.count_search(advice, time.monotonic() - began)
        return advice

    async def _apply(self, key: Key, subresource: str, view: View, content: Mapping[str, Any]) -> None:
        """Apply fields, and keep what the API server made of them. A spec that changed meanwhile is due again,
        for its own event is by then older than what is kept."""
        identity = {"name": key.name, "uid": view.uid, **({"namespace": key.namespace} if key.namespace else {})}
        metadata = {**content.get("metadata", {}), **identity}
        document = {"apiVersion": API_VERSION, "kind": key.kind, **content, "metadata": metadata}
        resource = _RESOURCES[key.kind] + subresource
        answer = View.of(await self._counted(resource, self._client.apply(key.path + subresource, document)))
        known = self._objects.get(key)
        if known is not None and answer.is_newer_than(known):
            self._objects[key] = answer
        if answer.document != view.document:
            self.queue.add(key)

    async def _post(self, key: Key, view: View, found: events.Note) -> None:
        body = events.event(found, key.namespace, key.name, view.uid, key.kind, self._now(), self.settings.instance)
        try:
            await self._counted("events", self._client.create(f"/api/v1/namespaces/{key.namespace}/events", body))
        except ApiError as error:
            if error.status == 429 or error.status >= 500:
                raise
            if error.status != 409:
                log.warning("%s: Event not written: %s", key, error)

    async def _counted(self, resource: str, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        outcome = "unreachable"
        try:
            found = await answer
            outcome = "ok"
        except ApiError as error:
            outcome = str(error.status)
            raise
        finally:
            self.metrics.writes.labels(resource, outcome).inc()
        return found

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_RESOURCES = {trainingjob.KIND: "trainingjobs", gpupool.KIND: "gpupools"}


_INTERNAL_ERROR = "InternalError"


def _is_passing(verdict: Verdict) -> bool:
    """Whether a verdict is a failure of this process, which another try may not have."""
    return isinstance(verdict, Refusal) and verdict.reason == _INTERNAL_ERROR


def _is_off(document: Document) -> bool:
    """Whether a job asks for its status only, whatever else is wrong with it; YAML reads a bare Off as false."""
    spec = document.get("spec")
    mode = spec.get("mode") if isinstance(spec, Mapping) else None
    return mode == "Off" or mode is False


def _key(body: Document) -> Key:
    metadata = body["metadata"]
    return Key(str(body["kind"]), str(metadata.get("namespace", "")), str(metadata["name"]))


def _same(before: nodes.NodesReport, after: nodes.NodesReport) -> bool:
    same_errors = {name: str(error) for name, error in before.invalid.items()} == {
        name: str(error) for name, error in after.invalid.items()
    }
    return same_errors and before.found == after.found and before.left_out == after.left_out


def _why_no_pools(report: nodes.NodesReport | None) -> str:
    try:
        pools = report.require() if report is not None else ()
    except SpecError as error:
        return str(error)
    return f"{len(pools)} pools"


def _small_job() -> tuple[Request, list[Pool]]:
    workload = Workload(model=models.preset("gpt2"), sequence_length=128, global_batch=1, precision="fp16")
    gpu = find_gpu("t4")
    return Request("warm-up", workload), [Pool("t4", gpu, 1, 1, find_link(gpu.intra_link), find_link("ethernet-10"))]


def _canonical(value: object) -> bytes:
    """JSON with sorted keys, whole numbers spelt without a fraction."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), default=str).encode()


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
