"""Events out of order, writes that fail halfway, answers that come too late, and leftovers of others on an object."""

from __future__ import annotations

import asyncio
import copy
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from operator_store import JOBS, Store, job, node, on_first_pool, operator, ready, settled
from tilecast import nodes
from tilecast.advice import Advice, Request, inputs_hash
from tilecast.api import training_job
from tilecast.hardware import Pool
from tilecast.learning.calibration import Calibration, Correction
from tilecast.spec import SpecError
from tilecast_operator import advisor
from tilecast_operator.advisor import Advisor
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.controllers.capacity import CAPACITY_HOLDS
from tilecast_operator.controllers.pools import PoolsChange
from tilecast_operator.controllers.token_reviews import MAX_UNKNOWN
from tilecast_operator.free_gpus import GpuUsage
from tilecast_operator.kube import watch
from tilecast_operator.kube.client import ApiError, Connection
from tilecast_operator.kube.documents import EventContent, WriterIdentity, make_event_document
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.queue import KeyQueue
from tilecast_operator.metrics import Metrics
from tilecast_operator.objects.client import client
from tilecast_operator.objects.documents import POOL
from tilecast_operator.objects.pods import PodInformer
from tilecast_operator.objects.view import View
from tilecast_operator.searches import SearchRunner
from tilecast_operator.settings import Settings

STRANGE = "NVIDIA-Z900"


class Unwell(Store):
    """Refuses Events about nodes until `is_well`."""

    is_well = False

    async def create(self, path: str, document: Any, **options: Any) -> dict[str, Any]:
        if document["involvedObject"]["kind"] == "Node" and not self.is_well:
            raise ApiError(503, "unavailable")
        return await super().create(path, document)


async def test_an_event_that_cannot_be_written_keeps_no_job_waiting() -> None:
    store = Unwell()
    store.put(f"{JOBS}/a", job())
    async with operator(store, nodes=(node(), node("strange", STRANGE))) as running:
        async with asyncio.timeout(5):
            while "status" not in store.objects[f"{JOBS}/a"]:
                await asyncio.sleep(0.01)
        store.is_well = True
        await settled(running)
    assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"
    assert [one["reason"] for one in store.events.values()].count("UnknownAccelerator") == 1, "later is not never"


async def test_more_nodes_of_one_unknown_gpu_are_one_event() -> None:
    store = Store()
    async with operator(store, nodes=(node(),)) as running:
        for number in range(9, 0, -1):
            store.node_count += 1
            running.cache.put_object(node(f"strange-{number}", STRANGE))
            await settled(running)
        assert len(store.events) == 1


def born(body: dict[str, Any], uid: str, version: int) -> dict[str, Any]:
    return {**body, "metadata": {**body["metadata"], "uid": uid, "resourceVersion": str(version), "generation": 1}}


async def test_the_end_of_an_object_is_not_that_of_the_next_of_its_name() -> None:
    store = Store()
    async with operator(store) as running:
        running.cache.put_object(born(job(), "old", 900))
        running.cache.put_object(born(job(), "new", 902))
        running.cache.remove_object(born(job(), "old", 901))
        running.cache.put_object(born(job(mode="Off"), "old", 901))
        (key,) = running.cache.training_jobs
        stored = running.cache.training_jobs.get(key)
        assert stored is not None and stored.uid == "new"
        running.cache.remove_object(born(job(), "new", 903))
        assert not len(running.cache.training_jobs)


async def test_a_node_that_is_replaced_under_its_name_stays() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store, nodes=(born(node(), "old", 1),)) as running:
        await settled(running)
        running.cache.put_object(born(node(), "new", 3))
        running.cache.remove_object(born(node(), "old", 2))
        await settled(running)
        assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised" and len(running.cache.nodes) == 1
        running.cache.remove_object(born(node(), "new", 4))
        await settled(running)
        assert not len(running.cache.nodes)


async def test_a_hash_of_former_pools_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(request: Request, pools: Sequence[Pool], digest: str) -> str:
        began.set()
        assert go_on.wait(5)
        return inputs_hash(request, pools, digest)

    monkeypatch.setattr(advisor, "inputs_hash", slow)
    searcher = Advisor(Store(), SearchRunner(on_first_pool, 1, 0), Metrics().count_search, 1, 16)
    searcher.set_pools(nodes.discover_pools([node()]))
    question = await searcher.read_search_inputs("default", job())
    late = asyncio.create_task(searcher.hash_inputs(question))
    await asyncio.to_thread(began.wait, 5)
    searcher.set_pools(nodes.discover_pools([node(), node("a", "NVIDIA-A100-SXM4-40GB")]))
    go_on.set()
    before = await late
    assert before is not None and await searcher.hash_inputs(question) != before
    searcher.stop()


async def test_what_runs_of_a_namespace_teach_is_searched_for_its_own_jobs_alone() -> None:
    searched = []

    def counted(request: Request, pools: Sequence[Pool]) -> Advice:
        searched.append(request.name)
        return on_first_pool(request, pools)

    searcher = Advisor(Store(), SearchRunner(counted, 1, 0), Metrics().count_search, 1, 16)
    bare = nodes.discover_pools([node()])
    taught = bare.with_calibration(Calibration((Correction(("h100-sxm",), ratio=1.2, runs=10, own=10),)))
    asked = {name: await searcher.read_search_inputs(name, job()) for name in ("team", "other")}
    for of_namespace, most in (({}, 1), ({"team": bare}, 1), ({"team": taught}, 2), ({"team": taught}, 2), ({}, 2)):
        before = searcher.versions
        searcher.set_pools(bare, of_namespace)
        change = PoolsChange(True, before, searcher.versions)
        for question in asked.values():
            await searcher.find_advice(question)
        assert len(searched) == most
        assert change.concerns_namespace("other") == (before.numbers == {})
        assert PoolsChange(False, before, searcher.versions).concerns_namespace("other")
    searcher.stop()


async def test_a_job_that_could_not_be_read_in_passing_is_read_again() -> None:
    failures, read = [MemoryError()], training_job.to_request

    def failing(*arguments: Any) -> Request:
        if failures:
            raise failures.pop()
        return read(*arguments)

    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store, read=failing) as running:
        await settled(running)
    assert not failures and ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"


async def test_many_jobs_do_not_each_try_to_load_a_model_that_cannot_be_read() -> None:
    tries: list[str] = []

    def unreadable(request: Request, pools: Sequence[Pool]) -> Advice:
        tries.append(request.name)
        raise SpecError("utilization model", "cannot be read", "mount one that can")

    store = Store()
    for number in range(300):
        store.put(f"{JOBS}/{number}", job(str(number)))
    async with operator(store, unreadable, retry_first_s=60.0, retry_most_s=60.0) as running:
        async with asyncio.timeout(5):
            while not tries or running.runtime.queue.find_stalled_s():
                await asyncio.sleep(0.01)
        assert len(tries) == 1
        assert "cannot be read" in str(running.find_readiness_problem())


@pytest.mark.parametrize("taken", ["conditions", "summary"])
async def test_a_status_of_which_somebody_took_a_part_is_made_whole(taken: str) -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store) as running:
        await settled(running)
    body = copy.deepcopy(store.objects[f"{JOBS}/a"])
    del body["status"][taken]
    body["metadata"]["annotations"]["tilecast.dev/started"] = "true"
    store.put(f"{JOBS}/a", body)
    async with operator(store) as running:
        await settled(running)
        assert running.metrics.registry.get_sample_value("tilecast_retries_total") == 0
    status = store.objects[f"{JOBS}/a"]["status"]
    assert status["summary"]["reason"] == "Advised" and status["forecast"]["frozenAt"]
    assert store.objects[f"{JOBS}/a"]["metadata"]["annotations"][POOL] == "h100-sxm"


async def test_what_is_left_of_a_deleted_job_is_nothing() -> None:
    store, loop = Store(), asyncio.get_running_loop()
    body = store.put(f"{JOBS}/a", job())

    def deleting(request: Request, pools: Sequence[Pool]) -> Advice:
        if request.name != "warm-up":
            store.objects.clear()
            loop.call_soon_threadsafe(running.lose, body)
        return on_first_pool(request, pools)

    async with operator(store, deleting) as running:
        await settled(running)
        assert not len(running.cache.training_jobs) and running.runtime.is_conditional(Key.from_object(body))


@pytest.mark.slow
async def test_a_queue_keeps_no_delay_that_a_shorter_one_replaced() -> None:
    queue: KeyQueue[str] = KeyQueue(lambda: 0.0)
    for number in range(100_000):
        queue.add("a", 1e6 - number)
    assert len(queue) == 1 and len(queue._later) < 200


@pytest.mark.parametrize("name", ["../../kube-system/configmaps/x", "..", "a/b", "a?watch=1", "A", "a\n", "-a", "a#"])
def test_a_config_map_s_name_leads_nowhere_else(name: str) -> None:
    model = {"huggingFace": {"configMapKeyRef": {"name": name}}}
    with pytest.raises(SpecError, match=r"spec\.model\.huggingFace\.configMapKeyRef\.name"):
        training_job.parse_training_job(job(model=model))


@pytest.mark.parametrize("key", ["../x", "a b", "a/b"])
def test_a_config_map_s_key_is_one(key: str) -> None:
    with pytest.raises(SpecError, match=r"configMapKeyRef\.key"):
        training_job.parse_training_job(job(model={"graphRef": {"configMapKeyRef": {"name": "a", "key": key}}}))


def test_an_annotation_of_any_size_takes_no_room() -> None:
    body = job()
    body["metadata"]["annotations"]["tilecast.dev/started"] = "x" * 250_000
    assert sum(len(value) for _, value in View.from_object(body).inputs) <= 64


@pytest.mark.parametrize("name", ["a" * 199 + "-b", "a" * 199 + ".b", "a"])
def test_the_name_of_an_event_is_a_name(name: str) -> None:
    document = make_event_document(
        EventContent("Normal", "R", "t"), WriterIdentity("c", "i", ()), Key("Pod", "default", name), "v1", "u", "now"
    )
    parts = document["metadata"]["name"].split(".")
    assert all(part and part[0] != "-" and part[-1] != "-" for part in parts)


MIXED = """
metadata: {name: m1, labels: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3, nvidia.com/mig.strategy: mixed}}
status:
  capacity: {nvidia.com/mig-1g.10gb: "56", nvidia.com/gpu: "0"}
  allocatable: {nvidia.com/mig-1g.10gb: "56", nvidia.com/gpu: "0"}
"""


def test_what_is_free_of_slices_that_nobody_counts_is_absent_not_zero() -> None:
    everyone = [nodes.read_node(yaml.safe_load(MIXED)), nodes.read_node(node("whole"))]
    entries = nodes.discover_pools(everyone).entries
    assert sorted(item.pool.gpu.mig for item in entries) == ["", "1g.10gb"]
    free = GpuUsage(used={}).count_free_gpus(entries, {item.name: item for item in everyone})
    assert {name: item.gpus for name, item in free.items()} == {"h100-sxm": 8}


@pytest.mark.parametrize("page", [{"metadata": {}, "items": [{"spec": None}, {"metadata": None}]}, {}, {"items": 7}])
async def test_pods_of_a_strange_shape_end_nothing(page: dict[str, Any]) -> None:
    calls: list[object] = []
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    for item in page["items"] if isinstance(page.get("items"), list) else []:
        item["spec"] = {"containers": [gpus]}

    class Reader:
        async def wait_for_login(self) -> None:
            pass

        async def get(self, path: str, query: Any) -> dict[str, Any]:
            await asyncio.sleep(0)
            return page

        def stream_lines(self, path: str, query: Any, idle_s: float) -> Any:
            raise AssertionError

    task = asyncio.create_task(PodInformer(Reader(), calls.append, pace=watch.WatchDelays(retry_most_s=0.0)).run())
    async with asyncio.timeout(5):
        while len(calls) < 3:
            await asyncio.sleep(0)
    assert not task.done() and set(calls) == {None}
    task.cancel()


@pytest.mark.parametrize("name", ["../x", "..", ".", "x/../../y", "x?watch=1", "x#y", "%2e%2e", "a b"])
async def test_no_name_leads_a_request_elsewhere(name: str) -> None:
    api = client(1.0)
    api.log_in(lambda: Connection("http://127.0.0.1:1", {}, ssl.create_default_context()))
    path = f"/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/{name}"
    with pytest.raises(ApiError, match="there is no object"):
        await api.get(path)
    await api.close()


async def test_a_flood_of_tokens_does_not_reach_the_api_server() -> None:
    class Slow(Store):
        async def create(self, path: str, document: Any, **options: Any) -> dict[str, Any]:
            asked.append(path)
            await go_on.wait()
            return {"status": {"authenticated": False}}

    asked, go_on = list[str](), asyncio.Event()
    running = OperatorParts(Settings(), Slow(), Metrics(), on_first_pool)
    flood = [asyncio.create_task(running.observations.put("default", "a", f"t{n}", b"")) for n in range(200)]
    await asyncio.sleep(0.05)
    assert len(asked) == MAX_UNKNOWN
    go_on.set()
    answers = [getattr(item, "status", None) for item in await asyncio.gather(*flood, return_exceptions=True)]
    assert answers.count(401) == MAX_UNKNOWN and answers.count(503) == 200 - MAX_UNKNOWN


async def test_a_pool_on_the_brink_of_being_full_is_no_storm_of_writes() -> None:
    store = Store()
    for number in range(5):
        store.put(f"{JOBS}/{number}", job(str(number)))
    async with operator(store, capacity_settle_s=0.01) as running:
        running.set_pod_usage({})
        await settled(running)
        store.writes.clear()
        began_s = time.monotonic()
        for flip in range(60):
            running.set_pod_usage({"n1": 8 * (flip % 2)})
            await asyncio.sleep(0.02)
        await settled(running)
        holds = (time.monotonic() - began_s) / (CAPACITY_HOLDS * 0.01)
    states = {item["status"]["summary"]["fitsNow"] for item in store.objects.values()}
    assert states == {"no"}, "the last word is right"
    assert len(store.writes) <= 5 * (holds + 2)
