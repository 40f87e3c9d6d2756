"""The operator without a cluster: its queue, its client against a real HTTP server, and its work over a small store.

The store keeps objects as an API server does.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from advice_values import advice
from operator_store import JOBS, POOLS, Store, job, node, on_first_pool, operator, ready, settled
from tilecast.advice import Advice, Request
from tilecast.hardware import Pool
from tilecast.spec import SpecError
from tilecast_operator import server
from tilecast_operator import settings as settings_module
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.controllers.pools import NODES
from tilecast_operator.kube.client import ApiError, Connection
from tilecast_operator.kube.times import format_time
from tilecast_operator.metrics import Metrics
from tilecast_operator.objects.client import client
from tilecast_operator.objects.documents import FIELD_MANAGER, POOL
from tilecast_operator.objects.view import View, digest_status
from tilecast_operator.settings import Settings


async def test_a_job_is_advised_in_two_writes_and_one_event() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store) as running:
        await settled(running)
        assert running.find_readiness_problem() is None and running.find_health_problem() is None
    document = store.objects[f"{JOBS}/a"]
    assert document["metadata"]["annotations"][POOL] == "h100-sxm"
    assert document["metadata"]["annotations"]["mine"] == "stays"
    assert ready(document)["reason"] == "Advised"
    assert store.writes == [("apply", f"{JOBS}/a"), ("apply", f"{JOBS}/a/status")], "the status commits, so it is last"
    assert len(store.events) == 1


async def test_a_restart_and_a_second_operator_write_nothing() -> None:
    store = Store()
    for name in "abc":
        store.put(f"{JOBS}/{name}", job(name))
    async with operator(store) as first:
        await settled(first)
    store.writes.clear()
    async with operator(store) as second, operator(store) as third:
        await settled(second)
        await settled(third)
        for path in sorted(store.objects):
            second.cache.put_object(store.objects[path])
            second.cache.put_object(store.objects[path])
        await settled(second)
    assert store.writes == []
    assert len(store.events) == 3


@pytest.mark.slow
async def test_two_operators_at_once_agree() -> None:
    store = Store()
    for number in range(5):
        store.put(f"{JOBS}/{number}", job(str(number)))
    async with operator(store) as first, operator(store) as second:
        await settled(first)
        await settled(second)
    assert len(store.events) == 5
    assert all(ready(item)["reason"] == "Advised" for item in store.objects.values())


async def test_an_invalid_job_gets_a_condition_and_nothing_else() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job(training={"sequenceLength": 4096, "globalBatchSize": 0}))
    async with operator(store) as running:
        await settled(running)
    document = store.objects[f"{JOBS}/a"]
    assert ready(document)["status"] == "False" and ready(document)["reason"] == "InvalidSpec"
    assert ready(document)["message"] == "spec.training.globalBatchSize: 0 is out of range; use 1 or more"
    assert document["metadata"]["annotations"] == {"mine": "stays"}
    assert "recommendation" not in document["status"]


def stored(name: str = "m") -> dict[str, Any]:
    return {"model": {"huggingFace": {"configMapKeyRef": {"name": name}}}}


GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 4096}


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_model_in_a_config_map_is_read_when_it_is_there_and_when_it_changes() -> None:
    store, layers = Store(), []

    def noting(request: Request, pools: Sequence[Pool]) -> Advice:
        layers.append(request.workload.model.layers)
        return on_first_pool(request, pools)

    store.put(f"{JOBS}/a", job(**stored()))
    async with operator(store, noting) as running:
        await until(lambda: "status" in store.objects[f"{JOBS}/a"])
        document = ready(store.objects[f"{JOBS}/a"])
        assert (document["status"], document["reason"]) == ("False", "ModelNotFound")
        assert document["message"].startswith(
            "spec.model.huggingFace.configMapKeyRef.name: there is no ConfigMap m; create"
        )
        store.config_maps["m"] = {"data": {"config.json": json.dumps(GPT2)}}
        await until(lambda: ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised")
        store.config_maps["m"] = {"data": {"config.json": json.dumps({**GPT2, "n_layer": 24})}}
        await until(lambda: 24 in layers)
        writes = len(store.writes)
        await asyncio.sleep(0.1)
        assert len(store.writes) == writes, "an unchanged answer is not written again"
        running.cache.remove_object(store.objects.pop(f"{JOBS}/a"))
        await settled(running)
    assert layers[1:] == [12, 24]


@pytest.mark.parametrize(
    ("name", "data", "reason", "text"),
    [
        ("secret", {}, "ModelNotReadable", "rbac.readConfigMaps"),
        ("m", {"other": "{}"}, "ModelNotFound", "has no config.json; it holds other"),
        ("m", {"config.json": '{"model_type": "fnet"}'}, "InvalidSpec", "'fnet' is not supported; trace the model"),
    ],
)
async def test_a_model_that_cannot_be_read_is_a_condition(
    name: str, data: dict[str, str], reason: str, text: str
) -> None:
    store = Store()
    store.config_maps["m"] = {"data": data}
    store.put(f"{JOBS}/a", job(**stored(name)))
    async with operator(store):
        await until(lambda: "status" in store.objects[f"{JOBS}/a"])
    document = ready(store.objects[f"{JOBS}/a"])
    assert (document["status"], document["reason"]) == ("False", reason)
    assert text in document["message"]


GRAPH = (Path(__file__).parent / "graphs" / "transformer.json").read_text()


def graph_job(name: str = "m") -> dict[str, Any]:
    return job(model={"graphRef": {"configMapKeyRef": {"name": name}}}, training={"globalBatchSize": 8})


async def test_a_graph_in_a_config_map_is_read_once_and_again_when_it_changes() -> None:
    store, traces = Store(), []

    def noting(request: Request, pools: Sequence[Pool]) -> Advice:
        traces.append(request.workload.model.trace is not None)
        return on_first_pool(request, pools)

    store.put(f"{JOBS}/a", graph_job())
    async with operator(store, noting) as running:
        await until(lambda: "status" in store.objects[f"{JOBS}/a"])
        job = ready(store.objects[f"{JOBS}/a"])
        assert (job["status"], job["reason"]) == ("False", "ModelNotFound")
        assert job["message"].startswith("spec.model.graphRef.configMapKeyRef.name: there is no ConfigMap m; create")
        store.config_maps["m"] = {"binaryData": {"graph.json": base64.b64encode(GRAPH.encode()).decode()}}
        await until(lambda: ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised")
        await asyncio.sleep(0.1)
        assert len(traces) == 2, "an unchanged graph is read once"
        store.config_maps["m"] = {"data": {"graph.json": f"{GRAPH}\n"}}
        await until(lambda: len(traces) == 3)
        running.cache.remove_object(store.objects.pop(f"{JOBS}/a"))
        await settled(running)
    assert traces[1:] == [True, True]


@pytest.mark.parametrize(
    ("name", "config_map", "reason", "text"),
    [
        ("secret", {}, "ModelNotReadable", "spec.model.graphRef.configMapKeyRef: the operator may not read"),
        ("m", {"binaryData": {"other": "AA=="}}, "ModelNotFound", "has no graph.json; it holds other"),
        ("m", {"binaryData": {"graph.json": "A"}}, "ModelNotFound", "is not base64"),
        ("m", {"data": {"graph.json": "{}"}}, "InvalidSpec", "is not tilecast-graph/1"),
        ("m", {"data": {"graph.json": "{"}}, "InvalidSpec", "is no JSON mapping; store what `tilecast trace` wrote"),
        ("m", {"binaryData": {"graph.json": "CAESAA=="}}, "InvalidSpec", "ONNX file"),
    ],
)
async def test_a_graph_that_cannot_be_read_is_a_condition(
    name: str, config_map: dict[str, dict[str, str]], reason: str, text: str
) -> None:
    store = Store()
    store.config_maps["m"] = config_map
    store.put(f"{JOBS}/a", graph_job(name))
    async with operator(store):
        await until(lambda: "status" in store.objects[f"{JOBS}/a"])
    job = ready(store.objects[f"{JOBS}/a"])
    assert (job["status"], job["reason"]) == ("False", reason)
    assert text in job["message"]


async def test_mode_off_takes_the_annotations_back() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store) as running:
        await settled(running)
        running.cache.put_object(
            store.put(f"{JOBS}/a", {**store.objects[f"{JOBS}/a"], "spec": job(mode="Off")["spec"]})
        )
        await settled(running)
    document = store.objects[f"{JOBS}/a"]
    assert document["metadata"]["annotations"] == {"mine": "stays"}
    assert document["status"]["recommendation"]["pool"] == "h100-sxm"
    assert document["status"]["observedGeneration"] == 2
    assert len(store.events) == 1


@pytest.mark.parametrize("mode", ["Off", False], ids=["quoted", "bare"])
async def test_mode_off_is_kept_when_the_rest_is_wrong(mode: object) -> None:
    store = Store()
    store.put(f"{JOBS}/a", job(mode=mode, training={"globalBatchSize": 0}))
    async with operator(store) as running:
        await settled(running)
    document = store.objects[f"{JOBS}/a"]
    applied = next(item for item in document["status"]["conditions"] if item["type"] == "Applied")
    assert (ready(document)["reason"], applied["reason"]) == ("InvalidSpec", "ModeOff")
    assert store.writes == [("apply", f"{JOBS}/a/status")] and not store.events


async def test_no_pools_is_said_with_the_reason() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store, nodes=[node(product="NVIDIA-Z900")]) as running:
        await settled(running)
    assert ready(store.objects[f"{JOBS}/a"])["reason"] == "NoPools"
    assert "Z900" in ready(store.objects[f"{JOBS}/a"])["message"]


async def test_new_nodes_bring_new_advice_once() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store) as running:
        await settled(running)
        store.writes.clear()
        for number in range(20):
            running.cache.put_object(node(f"a{number}", "NVIDIA-A100-SXM4-40GB"))
        await settled(running)
        assert store.objects[f"{JOBS}/a"]["metadata"]["annotations"][POOL] == "a100-40"
        assert len(store.writes) == 2, "twenty nodes at once are one change"
        store.writes.clear()
        for number in range(20):
            running.cache.put_object(node(f"a{number}", "NVIDIA-A100-SXM4-40GB"))
        await settled(running)
        assert store.writes == []
        for number in range(20):
            running.cache.remove_object(node(f"a{number}"))
        await settled(running)
        assert store.objects[f"{JOBS}/a"]["metadata"]["annotations"][POOL] == "h100-sxm"


async def test_a_users_pool_is_described_and_wins() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    spec = {"selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "price": {"perGpuHour": 1.0}}
    mine = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": "mine"}, "spec": spec}
    async with operator(store) as running:
        await settled(running)
        running.cache.put_object(store.put(f"{POOLS}/mine", mine))
        await settled(running)
        assert store.objects[f"{JOBS}/a"]["metadata"]["annotations"][POOL] == "mine"
        assert store.objects[f"{POOLS}/mine"]["status"]["facts"]["price"] == {"value": "1 USD", "layer": "override"}
        wrong = {**store.objects[f"{POOLS}/mine"], "spec": {"gpu": {"name": "h101"}, "gpusPerNode": 1, "maxNodes": 1}}
        running.cache.put_object(store.put(f"{POOLS}/mine", wrong))
        await settled(running)
        assert ready(store.objects[f"{POOLS}/mine"])["reason"] == "InvalidSpec"
        assert store.objects[f"{JOBS}/a"]["metadata"]["annotations"][POOL] == "h100-sxm"
        running.cache.remove_object(store.objects.pop(f"{POOLS}/mine"))
        await settled(running)


FAULTS = {
    "conflict": ApiError(409, "conflict"),
    "gone": ApiError(410, "gone"),
    "too many": ApiError(429, "slow down", 0.02),
    "broken": ApiError(503, "unavailable"),
    "expired": ApiError(401, "unauthorized"),
    "cut off": aiohttp.ServerDisconnectedError(),
    "slow": TimeoutError(),
    "defect": RuntimeError("unexpected"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.slow
async def test_faults_are_retried_until_written(fault: Exception) -> None:
    store = Store()
    store.faults = [fault] * 4
    store.put(f"{JOBS}/a", job())
    async with operator(store) as running:
        # A job that lost a write waits for longer than what counts as settled.
        await until(lambda: "status" in store.objects[f"{JOBS}/a"])
        await settled(running)
        retries = running.metrics.registry.get_sample_value("tilecast_retries_total")
    assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"
    assert retries == 4 and len(store.events) == 1


async def test_a_job_deleted_meanwhile_is_forgotten() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    store.before_write = lambda path: store.objects.clear()
    async with operator(store) as running:
        await settled(running)
    assert len(store.writes) == 1 and not store.events


async def test_content_that_is_refused_is_sent_again_after_the_longest_wait() -> None:
    store = Store()
    store.faults = [ApiError(422, "invalid")]
    store.put(f"{JOBS}/a", job())
    async with operator(store, retry_most_s=1.0) as running:
        await until(lambda: len(store.writes) == 1)
        began = time.monotonic()
        await until(lambda: len(store.writes) >= 2)
        assert time.monotonic() - began > 0.5
        await settled(running)
    assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"


@pytest.mark.parametrize(("status", "is_lost"), [(403, True), (409, True), (422, True), (429, False), (503, False)])
async def test_an_event_waits_for_an_api_server_that_is_busy_and_for_nothing_else(status: int, is_lost: bool) -> None:
    class Refusing(Store):
        async def create(self, path: str, document: Any, **options: Any) -> dict[str, Any]:
            if self.faults:
                raise self.faults.pop()
            return await super().create(path, document)

        async def apply(self, path: str, document: Any, *, force: bool = True) -> dict[str, Any]:
            faults, self.faults = self.faults, []
            answer = await super().apply(path, document, force=force)
            self.faults = faults
            return answer

    store = Refusing()
    store.faults = [ApiError(status, "no")]
    store.put(f"{JOBS}/a", job())
    async with operator(store) as running:
        await settled(running)
    assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"
    assert len(store.events) == (not is_lost)


@pytest.mark.slow
async def test_a_spec_that_changes_during_a_write_is_not_lost() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    late: list[dict[str, Any]] = []

    def change(path: str) -> None:
        store.before_write = lambda path: None
        changed = {**store.objects[f"{JOBS}/a"], "spec": job(training={"globalBatchSize": 0})["spec"]}
        late.append(store.put(f"{JOBS}/a", changed))

    store.before_write = change
    async with operator(store) as running:
        await settled(running)
        running.cache.put_object(late[0])
        await settled(running)
    assert ready(store.objects[f"{JOBS}/a"])["reason"] == "InvalidSpec"


async def test_old_events_change_nothing() -> None:
    store = Store()
    first = store.put(f"{JOBS}/a", job())
    async with operator(store) as running:
        await settled(running)
        store.writes.clear()
        running.cache.put_object(first)
        await settled(running)
    assert store.writes == []


async def test_equal_workloads_are_priced_once() -> None:
    store, asked = Store(), list[str]()

    def counting(request: Request, pools: Sequence[Pool]) -> Advice:
        asked.append(request.workload.model.name)
        return on_first_pool(request, pools)

    for number in range(30):
        store.put(f"{JOBS}/{number}", job(str(number)))
    async with operator(store, counting) as running:
        await settled(running)
    assert sorted(asked) == ["gpt2", "llama-2-7b"], "the first loads the model"


async def test_a_failing_search_is_a_condition_not_a_crash() -> None:
    def broken(request: Request, pools: Sequence[Pool]) -> Advice:
        if request.name == "warm-up":
            return advice()
        raise ZeroDivisionError

    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store, broken) as running:
        began, retries = time.monotonic(), 0.0
        while retries < 2 and time.monotonic() < began + 30:
            await asyncio.sleep(0.3)
            retries = running.metrics.registry.get_sample_value("tilecast_retries_total")
        most = 4 + (time.monotonic() - began) / 0.05
        assert running.find_health_problem() is None
    assert 2 <= retries <= most, "with backoff: 10, 20, 40, 50, 50 ms"
    assert store.writes == [("apply", f"{JOBS}/a/status")] and len(store.events) == 1, "each try says the same"
    assert ready(store.objects[f"{JOBS}/a"])["reason"] == "InternalError"
    assert "ZeroDivisionError" in ready(store.objects[f"{JOBS}/a"])["message"]


async def test_a_search_that_fails_in_passing_is_tried_again() -> None:
    failures = [MemoryError(), RuntimeError()]

    def recovering(request: Request, pools: Sequence[Pool]) -> Advice:
        if request.name != "warm-up" and failures:
            raise failures.pop()
        return on_first_pool(request, pools)

    store = Store()
    for name in "ab":
        store.put(f"{JOBS}/{name}", job(name))
    async with operator(store, recovering) as running:
        await settled(running)
    assert not failures
    assert {ready(one)["reason"] for one in store.objects.values()} == {"Advised"}


async def test_a_model_that_cannot_be_read_keeps_it_unready_and_jobs_untouched() -> None:
    def unreadable(request: Request, pools: Sequence[Pool]) -> Advice:
        raise SpecError("utilization model", "cannot be read", "mount one that can")

    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store, unreadable) as running:
        await asyncio.sleep(0.1)
        assert "cannot be read" in str(running.find_readiness_problem())
    assert store.writes == []


async def test_a_dead_worker_and_a_stall_are_unhealthy() -> None:
    running = OperatorParts(Settings(stall_s=0.01), Store(), Metrics(), on_first_pool)
    running.runtime.queue.add(NODES)
    await asyncio.sleep(0.03)
    assert "no work finished" in str(running.find_health_problem())
    running.start()
    await running.stop()
    assert "ended" in str(running.find_health_problem())


def sample(running: OperatorParts, name: str, **labels: str) -> float | None:
    return running.metrics.registry.get_sample_value(name, labels)


async def test_a_key_that_waits_for_its_time_is_no_backlog_and_one_that_fails_is() -> None:
    store = Store()
    store.config_maps["m"] = {"data": {"config.json": json.dumps(GPT2)}}
    store.put(f"{JOBS}/a", job(**stored()))
    async with operator(store, config_map_poll_s=600.0, retry_first_s=60.0, retry_most_s=60.0) as running:
        await until(lambda: "status" in store.objects[f"{JOBS}/a"])
        await settled(running)
        assert len(running.runtime.queue) == 1, "it is looked at every ten minutes"
        assert sample(running, "tilecast_queue_keys", kind="TrainingJob") == 0
        store.faults = [ApiError(500, "no")]
        store.put(f"{JOBS}/b", job("b"))
        running.cache.put_object(store.objects[f"{JOBS}/b"])
        await until(lambda: sample(running, "tilecast_retries_total") == 1)
        assert sample(running, "tilecast_queue_keys", kind="TrainingJob") == 1
        assert sample(running, "tilecast_queue_keys", kind="Node") == 0


async def test_the_time_of_an_answer_is_that_since_the_job_was_created_or_changed() -> None:
    store = Store()
    store.clock_s = 1_700_000_000.0
    old = {**job("old"), "metadata": {**job("old")["metadata"], "creationTimestamp": format_time(store.clock_s - 100)}}
    store.put(f"{JOBS}/old", old)

    def times(running: OperatorParts) -> tuple[float | None, float | None]:
        name = "tilecast_answer_duration_seconds"
        labels = {"kind": "TrainingJob"}
        return sample(running, f"{name}_count", **labels), sample(running, f"{name}_bucket", le="60.0", **labels)

    async with operator(store) as running:
        await settled(running)
        assert times(running) == (1, 0), "nobody answered for a hundred seconds"
    store.clock_s += 1000
    async with operator(store) as running:
        await settled(running)
        assert times(running) == (0, 0), "what was answered before is not answered again"
        store.put(f"{JOBS}/old", {**store.objects[f"{JOBS}/old"], "spec": job(objective="cost")["spec"]})
        running.cache.put_object(store.objects[f"{JOBS}/old"])
        await settled(running)
        assert times(running) == (1, 1), "a change is a new question"


def test_digest_ignores_times_and_spelling_of_numbers() -> None:
    first = {"a": 8.0, "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "x"}]}
    same = {"conditions": [{"status": "True", "type": "Ready", "lastTransitionTime": "y"}], "a": 8}
    assert digest_status(first) == digest_status(same) != digest_status({**same, "a": 8.5})


def test_a_view_keeps_only_what_is_needed() -> None:
    body = {**job(), "status": {"alternatives": [{"pool": "p" * 50}] * 16, "summary": {"pool": "x"}}}
    body["metadata"] = {**body["metadata"], "managedFields": [{"f": "x" * 10_000}], "resourceVersion": "7"}
    view = View.from_object(body)
    assert sum(sys.getsizeof(getattr(view, name)) for name in View.__slots__) < 1000
    assert view.status["alternatives"] == body["status"]["alternatives"]


async def serve(answer: Callable[[web.Request], Awaitable[web.Response]]) -> tuple[web.AppRunner, str]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_client_applies_and_logs_in_again_when_its_token_expired() -> None:
    tokens = iter(["old", "new"])
    seen: list[tuple[str, str, dict[str, str]]] = []

    async def answer(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != "Bearer new":
            return web.json_response({"message": "expired"}, status=401)
        seen.append((request.method, request.headers["Content-Type"], dict(request.query)))
        return web.json_response({"got": await request.json()})

    runner, url = await serve(answer)
    api = client(5.0)
    try:
        api.log_in(lambda: Connection(url, {"Authorization": f"Bearer {next(tokens)}"}, ssl.create_default_context()))
        with pytest.raises(ApiError, match="401: expired"):
            await api.apply("/x", {"a": 1})
        assert await api.apply("/x", {"a": 1}) == {"got": {"a": 1}}
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Ignore", "force": "true"}
        assert seen == [("PATCH", "application/apply-patch+yaml", query)]
    finally:
        await api.close()
        await runner.cleanup()


async def test_client_reads_without_a_body() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"method": request.method, "body": await request.text(), "query": dict(request.query)})

    runner, url = await serve(answer)
    api = client(5.0)
    try:
        api.log_in(lambda: Connection(url, {}, ssl.create_default_context()))
        assert await api.get("/x") == {"method": "GET", "body": "", "query": {}}
    finally:
        await api.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("asked", "granted"), [("7", 7.0), ("3600", 120.0), ("inf", 120.0), ("nan", None), ("-1", None)]
)
async def test_client_tells_how_long_to_wait_within_bounds(asked: str, granted: float | None) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=429, text="not json", headers={"Retry-After": asked})

    runner, url = await serve(answer)
    api = client(5.0)
    try:
        api.log_in(lambda: Connection(url, {}, ssl.create_default_context()))
        with pytest.raises(ApiError) as caught:
            await api.create("/x", {})
        assert (caught.value.status, caught.value.retry_after_s) == (429, granted)
    finally:
        await api.close()
        await runner.cleanup()


async def test_server_answers_probes_and_metrics() -> None:
    state: dict[str, str | None] = {"problem": "not yet"}

    async def take(*_: object) -> None:
        return

    address, metrics = server.ListenAddress("127.0.0.1", 0), Metrics()
    runner = await server.start_server(
        address, metrics.registry, lambda: None, lambda: state["problem"], lambda *_: nullcontext(), take
    )
    url = f"http://127.0.0.1:{runner.port}"
    try:
        async with aiohttp.ClientSession() as session:
            assert (await session.get(f"{url}/healthz")).status == 200
            answer = await session.get(f"{url}/readyz")
            assert (answer.status, await answer.text()) == (503, "not yet")
            state["problem"] = None
            assert (await session.get(f"{url}/readyz")).status == 200
            text = await (await session.get(f"{url}/metrics")).text()
            assert "# TYPE tilecast_recommendations_total counter" in text
            assert 'tilecast_build_info{version="' in text
    finally:
        await runner.cleanup()


def test_settings_come_from_the_environment() -> None:
    settings = settings_module.from_environment(
        {"TILECAST_LISTEN_PORT": "0", "TILECAST_SETTLE_SECONDS": "2.5", "TILECAST_SERVICE_HOST": "10.0.0.1"}
    )
    assert (settings.listen_port, settings.settle_s, settings.writers) == (0, 2.5, Settings().writers)


@pytest.mark.parametrize(
    ("name", "value"),
    [("TILECAST_LISTEN_PORT", "http"), ("TILECAST_WRITERS", "0"), ("TILECAST_STALL_SECONDS", "-1")],
)
def test_wrong_settings_say_what_they_are_for(name: str, value: str) -> None:
    with pytest.raises(SpecError) as caught:
        settings_module.from_environment({name: value})
    assert caught.value.field == name and "\n" not in str(caught.value)
