"""A store that keeps objects as an API server does, and an operator that serves it: no cluster, no network."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from advice_values import advice, offer
from tilecast.advice import Advice, Request
from tilecast.api import training_job
from tilecast.hardware import Pool
from tilecast_operator.advisor import ReadRequest
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube.client import ApiError
from tilecast_operator.metrics import Metrics
from tilecast_operator.objects.documents import ADVICE_KEYS
from tilecast_operator.settings import Settings
from tilecast_operator.timings import ControllerDelays

TIMINGS = ControllerDelays(first_list_s=60.0, decide_s=60.0)
"""Delays that a stall of a busy machine does not outlast: jobs are held, and first lists are awaited, for a minute."""
QUICK = Settings(
    discovery=False,
    settle_s=0.01,
    capacity_settle_s=0.0,
    retry_first_s=0.01,
    retry_most_s=0.05,
    writers=3,
    config_map_poll_s=0.02,
    observe_settle_s=0.01,
    calibrate_settle_s=0.02,
)
JOBS = "/apis/tilecast.dev/v1alpha1/namespaces/default/trainingjobs"
POOLS = "/apis/tilecast.dev/v1alpha1/gpupools"
LEARNINGS = "/apis/tilecast.dev/v1alpha1/poollearnings"
QUEUE_ADVICES = "/apis/tilecast.dev/v1alpha1/queueadvices"


def patched(document: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the document after an RFC 6902 patch, as far as the operator's patches use it."""
    result = copy.deepcopy(document)
    for item in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in item["path"].split("/")[1:]]
        node: Any = result
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]
        if item["op"] == "remove":
            del node[last]
        else:
            node[last] = item["value"]
    return result


class Store:
    """Objects by path, with resource versions, generations and server-side apply for one field manager."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.writes: list[tuple[str, str]] = []
        self.events: dict[str, dict[str, Any]] = {}
        self.faults: list[Exception] = []
        self.config_maps: dict[str, dict[str, dict[str, str]]] = {}
        self.before_write: Callable[[str], None] = lambda path: None
        self.applied: dict[str, Any] = {}
        self.counts: dict[str, dict[str, Any]] = {}
        """First pages of lists that report another number of objects than there are."""
        self.node_count = 0
        self.clock_s = 0.0
        self.clock: Callable[[], float] | None = None
        """Clock of the operators, where it is neither this machine's nor fixed at `clock_s`."""
        """Fixed time of the operators that serve this store; 0 uses the real clock."""
        self.version = 0

    async def wait_for_login(self) -> None:
        """Log in at once, as an API server that accepts every login."""

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        old = self.objects.get(path)
        self.version += 1
        is_new_spec = old is None or old.get("spec") != body.get("spec")
        meta = {
            **body["metadata"],
            "uid": old["metadata"]["uid"] if old else f"uid-{self.version}",
            "resourceVersion": str(self.version),
            "generation": (old["metadata"]["generation"] if old else 0) + is_new_spec,
        }
        self.objects[path] = {**body, "metadata": meta}
        return copy.deepcopy(self.objects[path])

    async def apply(self, path: str, document: Any, *, force: bool = True) -> dict[str, Any]:
        await asyncio.sleep(0)
        document = json.loads(json.dumps(document, allow_nan=False))
        self.before_write(path)
        self.writes.append(("apply", path))
        if self.faults:
            raise self.faults.pop(0)
        target = path.removesuffix("/status")
        if target not in self.objects:
            if (
                not path.startswith((POOLS, LEARNINGS, QUEUE_ADVICES))
                or path != target
                or "uid" in document["metadata"]
            ):
                raise ApiError(404, "not found")
            self.applied[target] = document.get("spec", {})
            return self.put(target, document)
        result = copy.deepcopy(self.objects[target])
        for precondition in ("uid", "resourceVersion"):
            there = result["metadata"][precondition]
            if document["metadata"].pop(precondition, there) != there:
                raise ApiError(409, precondition)
        if path.endswith("/status"):
            result["status"] = document["status"]
        elif path.startswith((LEARNINGS, QUEUE_ADVICES)):
            result["spec"] = document["spec"]
        elif path.startswith(POOLS):
            assert not force
            ours, spec = self.applied.get(target, {}), document.get("spec", {})
            theirs = {key for key, value in result["spec"].items() if ours.get(key) != value}
            if any(result["spec"].get(key) != value for key, value in spec.items() if key in theirs):
                raise ApiError(409, "conflict")
            theirs_now = {key: value for key, value in result["spec"].items() if key in theirs}
            result["spec"], self.applied[target] = {**theirs_now, **spec}, spec
            for part in ("labels", "annotations"):
                result["metadata"][part] = document["metadata"].get(part, {})
        else:
            given, before = document["metadata"].get("annotations", {}), result["metadata"].get("annotations", {})
            dropped = {*ADVICE_KEYS, *self.applied.get(target, ())} - given.keys()
            result["metadata"]["annotations"] = {k: v for k, v in before.items() if k not in dropped} | given
            self.applied[target] = set(given)
        return self.put(target, result) if result != self.objects[target] else result

    async def delete(self, path: str, uid: str, resource_version: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        self.writes.append(("delete", path))
        job = self.objects.get(path)
        if job is None:
            raise ApiError(404, "not found")
        if (job["metadata"]["uid"], job["metadata"]["resourceVersion"]) != (uid, resource_version):
            raise ApiError(409, "changed")
        return self.objects.pop(path)

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        await asyncio.sleep(0)
        if query and path == LEARNINGS and "fieldSelector" in query:
            name = query["fieldSelector"].removeprefix("metadata.name=")
            return {"items": [copy.deepcopy(item) for place, item in self.objects.items() if place == f"{path}/{name}"]}
        if query:
            return self.counts.get(path, self._page(path))
        if "/configmaps/" not in path:
            raise ApiError(404, "not found")
        namespace, name = path.removeprefix("/api/v1/namespaces/").split("/configmaps/")
        assert namespace == "default"
        if name == "secret":
            raise ApiError(403, "forbidden")
        if name not in self.config_maps:
            raise ApiError(404, "not found")
        return {"kind": "ConfigMap", "metadata": {"name": name}, **self.config_maps[name]}

    def _page(self, path: str) -> dict[str, Any]:
        """Return the first page of a list, with only the parts that the operator reads."""
        lists = {"/apis/tilecast.dev/v1alpha1/trainingjobs": JOBS, POOLS: POOLS, LEARNINGS: LEARNINGS}
        count = sum(item.startswith(f"{lists[path]}/") for item in self.objects) if path in lists else self.node_count
        return {"metadata": {}, "items": [{}] * count}

    async def create(self, path: str, document: Any, **options: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        name = document["metadata"]["name"]
        if name in self.events:
            raise ApiError(409, "already exists")
        self.events[name] = dict(document)
        return dict(document)


def job(name: str = "a", **spec: Any) -> dict[str, Any]:
    base = {"model": {"preset": "llama-2-7b"}, "training": {"sequenceLength": 4096, "globalBatchSize": 64}}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default", "annotations": {"mine": "stays"}},
        "spec": {**base, **spec},
    }


def node(name: str = "n1", product: str = "NVIDIA-H100-80GB-HBM3") -> dict[str, Any]:
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": product}},
        "status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}},
    }


def on_first_pool(request: Request, pools: Sequence[Pool]) -> Advice:
    return advice(request=request, offers=(offer(pool=pools[0]),), inputs_hash=f"{len(pools)}{pools[0].name}")


@asynccontextmanager
async def operator(
    store: Store,
    advisor: Callable[[Request, Sequence[Pool]], Advice] = on_first_pool,
    nodes: Sequence[Any] = (node(),),
    timings: ControllerDelays = TIMINGS,
    read: ReadRequest = training_job.to_request,
    **settings: Any,
) -> AsyncIterator[OperatorParts]:
    """Run an operator that has seen everything in the store, as kopf would show it."""
    clock = store.clock or ((lambda: store.clock_s) if store.clock_s else time.time)
    running = OperatorParts(replace(QUICK, **settings), store, Metrics(), advisor, clock, read, timings=timings)
    store.node_count = len(nodes)
    for item in nodes:
        running.cache.put_object(item)
    for path in sorted(store.objects):
        body = copy.deepcopy(store.objects[path])
        running.cache.put_object(body)
    running.start()
    try:
        yield running
    finally:
        await running.stop()


async def settled(running: OperatorParts, limit_s: float = 60.0) -> None:
    """Wait until no key is ready, running, or due soon."""
    async with asyncio.timeout(limit_s):
        quiet = 0
        while quiet < 3:
            await asyncio.sleep(0.02)
            wait_s = running.runtime.queue.find_seconds_to_next()
            is_busy = (wait_s is not None and wait_s < 5.0) or running.runtime.queue.find_stalled_s()
            quiet = 0 if is_busy else quiet + 1


def ready(job: dict[str, Any]) -> dict[str, Any]:
    return next(item for item in job["status"]["conditions"] if item["type"] == "Ready")
