"""The operator's lists and watches: nodes, pods, and only what its settings name."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from tilecast_operator.kube import watch
from tilecast_operator.kube.client import Api, ApiError, Connection
from tilecast_operator.kube.server_clock import ServerClock
from tilecast_operator.objects.client import client
from tilecast_operator.objects.pods import PodInformer
from tilecast_operator.objects.tables import Cache


async def serve(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> tuple[web.AppRunner, Api]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = client(5.0)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    api.log_in(lambda: Connection(url, {}, ssl.create_default_context()))
    return runner, api


async def run_until(
    work: Coroutine[Any, Any, None], holds: Callable[[], object], runner: web.AppRunner, api: Api
) -> None:
    """Run an informer against a test server until `holds` is true, then stop everything."""
    task = asyncio.create_task(work)
    try:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()
        await runner.cleanup()


def pod(uid: str, on: str, gpus: int, version: int = 1) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    spec = {"nodeName": on, "containers": [{"resources": {"limits": limits}}]}
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}, "spec": spec}


async def test_pods_are_listed_in_pages_watched_and_listed_again_when_too_late() -> None:
    queries: list[dict[str, str]] = []
    large = "x" * 300_000
    watches = [
        [
            {"type": "ADDED", "object": {**pod("c", "n2", 2, 11), "padding": large}},
            {"type": "DELETED", "object": pod("a", "n1", 4, 12)},
            {"type": "MODIFIED", "object": pod("idle", "n1", 0, 13)},
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}}},
        ],
        [{"type": "ERROR", "object": {"code": 410, "message": "too old"}}],
    ]

    async def answer(request: web.Request) -> web.StreamResponse:
        queries.append(dict(request.query))
        if "watch" not in request.query:
            first = "continue" not in request.query
            items = [pod("a", "n1", 4), pod("idle", "n1", 0)] if first else [pod("b", "n1", 1)]
            more = {"continue": "more"} if first else {"resourceVersion": "10"}
            return web.json_response({"metadata": more, "items": items})
        if not watches:
            await asyncio.sleep(60)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in watches.pop(0):
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    runner, api = await serve(answer)
    calls: list[dict[str, int] | None] = []
    feed = PodInformer(api, lambda used: calls.append(None if used is None else dict(used)))
    await run_until(feed.run(), lambda: len(queries) >= 7, runner, api)
    assert calls[:3] == [{"n1": 5}, {"n1": 5, "n2": 2}, {"n1": 1, "n2": 2}]
    assert calls[3] == {"n1": 5}, "a list counts from the beginning"
    assert all(query["fieldSelector"].startswith("spec.nodeName!=") for query in queries)
    assert [query.get("resourceVersion") for query in queries if "watch" in query][:2] == ["10", "20"]


async def test_pods_that_cannot_be_read_are_unknown_not_none() -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "forbidden"}, status=403)

    runner, api = await serve(answer)
    calls: list[object] = []
    await run_until(PodInformer(api, calls.append).run(), lambda: calls, runner, api)
    assert calls == [None]


def machine(name: str, version: int, beat: str = "2026-01-01T00:00:00Z", **labels: str) -> dict[str, Any]:
    """Return a node with its fields in the order in which an API server writes them."""
    times = {"lastHeartbeatTime": beat, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "labels": labels}
    conditions = [{"type": "Ready", "status": "True", **times}, {"type": "DiskPressure", "status": "False", **times}]
    managed = [{"manager": "kubelet", "operation": "Update", "time": beat}]
    return {
        "kind": "Node", "apiVersion": "v1", "metadata": {**meta, "managedFields": managed},
        "status": {"capacity": {"nvidia.com/gpu": "8"}, "conditions": conditions},
    }  # fmt: skip


async def test_heartbeats_of_nodes_are_compared_and_not_parsed() -> None:
    later = "2026-01-01T00:00:%02dZ"
    beats = [machine("a", 20 + beat, later % beat) for beat in range(40)]
    # A label is never taken for a time.
    labels = [machine("a", 70, later % 41, time="2026"), machine("a", 71, later % 42, time="2027")]
    changes = [*beats, *labels, {**machine("a", 80, later % 43), "status": {"capacity": {}}}]
    watches = [
        [{"type": "MODIFIED", "object": item} for item in changes]
        + [{"type": "ADDED", "object": machine("c", 90)}, {"type": "DELETED", "object": machine("c", 91)}],
        [],
    ]
    lists = [[machine("a", 1), machine("b", 2)], [machine("a", 80)]]
    versions: list[str] = []
    counted: list[None] = []
    logins: list[None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            page = lists.pop(0) if len(lists) > 1 else lists[0]
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": page})
        versions.append(request.query["resourceVersion"])
        if not watches:
            return web.json_response({"message": "expired"}, status=401)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in watches.pop(0):
            await response.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
        return response

    runner, api = await serve(answer)
    assert api._connection is not None
    connection = api._connection
    api.log_in(lambda: logins.append(None) or connection)  # type: ignore[func-returns-value]
    cache, parsed = Cache(), []

    def see(body: Any) -> None:
        parsed.append(body["metadata"]["resourceVersion"])
        cache.put_object(body)

    pace = watch.WatchDelays(between_s=0.0, retry_first_s=0.0)
    nodes = watch.NodeInformer(api, see, cache.remove_object, "", lambda: counted.append(None), pace)
    await run_until(nodes.run(), lambda: len(versions) >= 4 and len(cache.nodes) <= 1, runner, api)
    assert parsed[:2] == ["1", "2"] and parsed[2:7] == ["20", "70", "71", "80", "90"], "of forty beats the first alone"
    assert versions[:2] == ["10", "91"], "a beat that is not parsed moves the watch on all the same"
    assert [key.name for key in cache.nodes] == ["a"], "c was deleted, and b is missing from the second list"
    assert not next(cache.nodes.values()).has_capacity, "what a beat said beside its times is known"
    assert len(counted) >= 4 and len(logins) > 1, "a watch that is refused logs in again"


def test_ages_are_measured_by_the_clock_of_the_api_server() -> None:
    true_s, ticks = 1_700_000_000.0, [500.0]
    clock = ServerClock(lambda: true_s + 25 * 3600, lambda: ticks[0])
    assert clock() == true_s + 25 * 3600, "until it has answered"
    clock.set_from_header("Tue, 14 Nov 2023 22:13:20 GMT")
    assert clock() == true_s
    ticks[0] += 60.9
    clock.set_from_header("Tue, 14 Nov 2023 22:14:20 GMT")
    assert clock() == pytest.approx(true_s + 60.9), "a fraction that was cut off puts nothing back"
    clock.set_from_header("yesterday")
    clock.set_from_header("Tue, 14 Nov 2023 21:13:20 GMT")
    assert clock() == pytest.approx(true_s - 3600), "a clock that was put right is followed"


async def test_deletion_names_what_was_seen() -> None:
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append({"method": request.method, **await request.json()})
        return web.json_response({"message": "changed"}, status=409)

    runner, api = await serve(answer)
    try:
        with pytest.raises(ApiError, match="409: changed"):
            await api.delete("/x", "u", "7")
    finally:
        await api.close()
        await runner.cleanup()
    assert seen[0]["method"] == "DELETE"
    assert seen[0]["preconditions"] == {"uid": "u", "resourceVersion": "7"}


WATCHED = """
import kopf, tilecast_operator.main
registry = kopf.get_default_registry()
every = registry._watching.get_all_handlers()
assert not registry._indexing.get_all_handlers(), "kopf wakes every object for each one that is indexed"
print(*sorted({handler.selector.any_name for handler in every}))
assert not registry._spawning.get_all_handlers() and not registry._changing.get_all_handlers()
"""


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, "gpupools namespaces poollearnings trainingjobs"),
        ({"TILECAST_LEARNING": "false"}, "gpupools trainingjobs"),
        ({"TILECAST_LEARNING": "false", "TILECAST_QUEUE": "true"}, "gpupools namespaces queueadvices trainingjobs"),
        (
            dict.fromkeys(("TILECAST_READ_RESOURCE_SLICES", "TILECAST_READ_KUEUE", "TILECAST_READ_PODS"), "true"),
            "clusterqueues gpupools namespaces poollearnings resourceflavors resourceslices trainingjobs",
        ),
    ],
)
@pytest.mark.slow
def test_only_what_the_settings_say_is_watched(settings: dict[str, str], names: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TILECAST_")} | settings
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == names.split(), done.stderr
