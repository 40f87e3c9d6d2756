"""What the operator does over time: pools it writes down, advice that stands, forecasts that freeze, what is free."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from advice_values import offer, request
from operator_store import JOBS, POOLS, Store, job, node, on_first_pool, operator, ready, settled
from tilecast.advise import Advice, Request, advise
from tilecast.advise.incumbent import MARGIN, Incumbent, hold
from tilecast.api.gpu_pool import DISCOVERED
from tilecast.hardware import Pool
from tilecast.jobs import kueue
from tilecast.render import document
from tilecast_operator import capacity, reconcile
from tilecast_operator.api import Api, ApiError, Connection
from tilecast_operator.pods import PodFeed
from tilecast_operator.report.annotations import KEYS, POOL

TYPE = "node.kubernetes.io/instance-type"
A100 = "NVIDIA-A100-SXM4-80GB"


def condition(found: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return next(item for item in found["status"]["conditions"] if item["type"] == kind)


def searches() -> tuple[list[str], Callable[[Request, Sequence[Pool]], Advice]]:
    """The true advice, and the pools of every search but the first, which loads the model."""
    seen: list[str] = []

    def counting(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            seen.append(",".join(pool.name for pool in pools))
        return advise(asked, pools)

    return seen, counting


SMALL = {"model": {"preset": "gpt2"}, "training": {"sequenceLength": 512, "globalBatchSize": 8, "precision": "fp16"}}


async def test_a_restart_with_everything_unchanged_does_not_even_search() -> None:
    store = Store()
    for name in "ab":
        store.put(f"{JOBS}/{name}", job(name, **SMALL))
    async with operator(store, advise) as corridor:
        await settled(corridor)
    store.writes.clear()
    seen, counting = searches()
    async with operator(store, counting) as corridor:
        await settled(corridor)
    assert (seen, store.writes) == ([], [])


async def test_a_status_that_somebody_else_wrote_is_put_right() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job(**SMALL))
    async with operator(store, advise) as corridor:
        await settled(corridor)
        wanted = store.objects[f"{JOBS}/a"]["status"]
        forged = {**store.objects[f"{JOBS}/a"], "status": {**wanted, "summary": {"pool": "moon"}}}
        corridor.see(store.put(f"{JOBS}/a", forged))
        await settled(corridor)
    assert store.objects[f"{JOBS}/a"]["status"] == wanted


async def test_annotations_that_were_deleted_come_back_at_a_restart() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job(**SMALL))
    async with operator(store, advise) as corridor:
        await settled(corridor)
    found = store.objects[f"{JOBS}/a"]
    bare = {**found, "metadata": {**found["metadata"], "annotations": {"mine": "stays"}}}
    store.put(f"{JOBS}/a", bare)
    async with operator(store, advise) as corridor:
        await settled(corridor)
    assert set(KEYS) <= store.objects[f"{JOBS}/a"]["metadata"]["annotations"].keys()


def pools_of(store: Store) -> dict[str, dict[str, Any]]:
    return {path.removeprefix(f"{POOLS}/"): item for path, item in store.objects.items() if path.startswith(POOLS)}


async def test_pools_are_written_down_described_and_left_alone() -> None:
    store = Store()
    async with operator(store, discovery=True) as corridor:
        await settled(corridor)
        pool = pools_of(store)["h100-sxm"]
        assert pool["metadata"]["labels"] == {DISCOVERED: "true"}
        assert pool["spec"]["maxNodes"] == 1 and pool["status"]["summary"]["origin"] == "Discovered"
        assert pool["status"]["facts"]["gpu"] == {"value": "h100-sxm", "layer": "gpu-feature-discovery"}
        assert store.writes == [("apply", f"{POOLS}/h100-sxm"), ("apply", f"{POOLS}/h100-sxm/status")]
    store.writes.clear()
    async with operator(store, discovery=True) as corridor, operator(store, discovery=True) as second:
        await settled(corridor)
        await settled(second)
    assert store.writes == [], "neither a restart nor a second operator writes"


async def test_without_discovery_pools_live_in_memory() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store) as corridor:
        await settled(corridor)
    assert pools_of(store) == {} and ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"


async def test_nodes_that_come_and_go_bring_no_new_advice() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    seen: list[int] = []

    def counting(asked: Request, pools: Sequence[Pool]) -> Advice:
        seen.append(len(pools))
        return on_first_pool(asked, pools)

    everyone = [node(f"n{index}") for index in range(4)]
    async with operator(store, counting, everyone, discovery=True) as corridor:
        await settled(corridor)
        before = len(seen)
        corridor.lose_node(node("n3"))
        await settled(corridor)
        pool = pools_of(store)["h100-sxm"]
        assert (pool["spec"]["maxNodes"], pool["status"]["nodes"]) == (4, 3)
        assert condition(pool, "ScaledDown")["status"] == "True"
        for index in range(3):
            corridor.lose_node(node(f"n{index}"))
        await settled(corridor)
        assert condition(pools_of(store)["h100-sxm"], "Ready")["reason"] == "NoNodesNow"
        assert len(seen) == before
        assert condition(store.objects[f"{JOBS}/a"], "CapacityAvailable")["reason"] == "TooFewNodes"
        assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised", "it is priced as if it had its nodes"
        corridor.see_node(everyone[0])
        await settled(corridor)
        assert len(seen) == before


async def test_nodes_that_stay_away_are_forgotten_and_empty_pools_withdrawn() -> None:
    store = Store()
    store.clock_s = 1_800_000_000.0
    other = node("a1", A100)
    async with operator(store, nodes=[node("n1"), node("n2"), other], discovery=True) as corridor:
        await settled(corridor)
        corridor.lose_node(node("n2"))
        corridor.lose_node(node("a1"))
        await settled(corridor)
        assert set(pools_of(store)) == {"h100-sxm", "a100-80"}
    store.clock_s += 86_401
    async with operator(store, nodes=[node("n1")], discovery=True) as corridor:
        await settled(corridor)
        assert set(pools_of(store)) == {"h100-sxm"}
        pool = pools_of(store)["h100-sxm"]
        assert pool["spec"]["maxNodes"] == 1 and condition(pool, "ScaledDown")["status"] == "False"
    writes = len(store.writes)
    async with operator(store, nodes=[node("n1")], discovery=True) as corridor:
        await settled(corridor)
    assert len(store.writes) == writes


async def test_a_user_takes_a_pool_over_by_editing_it() -> None:
    store = Store()
    async with operator(store, discovery=True) as corridor:
        await settled(corridor)
        found = pools_of(store)["h100-sxm"]
        edited = {**found, "spec": {**found["spec"], "price": {"perGpuHour": 1.5}}}
        corridor.see(store.put(f"{POOLS}/h100-sxm", edited))
        await settled(corridor)
        corridor.see_node(node("n2"))
        await settled(corridor)
        found = pools_of(store)["h100-sxm"]
        assert found["spec"] == edited["spec"], "maxNodes stays as the user left it"
        assert found["status"]["summary"]["origin"] == "User"
        assert found["status"]["facts"]["price"] == {"value": "1.5 USD", "layer": "override"}


async def test_a_users_edit_wins_a_race() -> None:
    store = Store()
    async with operator(store, discovery=True) as corridor:
        await settled(corridor)
        late: list[dict[str, Any]] = []

        def edit(path: str) -> None:
            store.before_write = lambda path: None
            found = store.objects[f"{POOLS}/h100-sxm"]
            late.append(store.put(f"{POOLS}/h100-sxm", {**found, "spec": {**found["spec"], "maxNodes": 7}}))

        store.before_write = edit
        corridor.see_node(node("n2"))
        await asyncio.sleep(0.1)
        corridor.see(late[0])
        await settled(corridor)
        assert pools_of(store)["h100-sxm"]["spec"]["maxNodes"] == 7
        assert pools_of(store)["h100-sxm"]["status"]["summary"]["origin"] == "User"


async def test_a_pool_that_a_user_creates_at_the_same_time_is_theirs() -> None:
    store = Store()
    late: list[dict[str, Any]] = []

    def create(path: str) -> None:
        store.before_write = lambda path: None
        mine = {
            "apiVersion": "tilecast.dev/v1alpha1",
            "kind": "GPUPool",
            "metadata": {"name": "h100-sxm"},
            "spec": {"selector": {"rack": "7"}, "price": {"perGpuHour": 2.0}, "gpu": {"name": "h100-sxm"}},
        }
        late.append(store.put(f"{POOLS}/h100-sxm", mine))

    store.before_write = create
    async with operator(store, discovery=True) as corridor:
        await asyncio.sleep(0.1)
        corridor.see(late[0])
        await settled(corridor)
    theirs = pools_of(store)["h100-sxm"]["spec"]
    assert theirs == {"selector": {"rack": "7"}, "price": {"perGpuHour": 2.0}, "gpu": {"name": "h100-sxm"}}


async def test_a_users_pool_over_the_same_nodes_ends_the_discovered_one() -> None:
    store = Store()
    async with operator(store, discovery=True) as corridor:
        await settled(corridor)
        spec = {"selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}
        mine = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": "mine"}, "spec": spec}
        corridor.see(store.put(f"{POOLS}/mine", mine))
        await settled(corridor)
        assert ("delete", f"{POOLS}/h100-sxm") in store.writes
    assert set(pools_of(store)) == {"mine"}


async def test_nothing_is_written_down_from_half_a_list() -> None:
    store = Store()
    store.counts["/api/v1/nodes"] = {"metadata": {"continue": "x", "remainingItemCount": 6}, "items": [{}]}
    store.put(f"{JOBS}/a", job())
    async with operator(store, nodes=[node("n1")], discovery=True) as corridor:
        corridor._is_listed = False
        for index in range(2, 8):
            await asyncio.sleep(0.03)
            assert store.writes == [] and corridor.unready() is not None
            corridor.see_node(node(f"n{index}"))
        await settled(corridor)
        assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"
    assert pools_of(store)["h100-sxm"]["spec"]["maxNodes"] == 7
    assert ("apply", f"{POOLS}/h100-sxm") in store.writes


async def test_nodes_that_nobody_counts_are_all_there_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "UNCOUNTED_PAUSE_S", 0.2)
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store, node_selector="gpu=true") as corridor:
        corridor._is_listed = False
        await asyncio.sleep(0.1)
        assert corridor.unready() is not None
        await settled(corridor)
        assert corridor.unready() is None
    assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"


async def test_unknown_accelerators_are_an_event_said_once() -> None:
    store = Store()
    strange = [node(f"z{index}", "NVIDIA-Z900") for index in range(3)]
    async with operator(store, nodes=strange) as corridor:
        await settled(corridor)
        corridor.see_node(node("n1"))
        await settled(corridor)
        value = corridor.metrics.registry.get_sample_value
        assert value("tilecast_unknown_accelerator_nodes", {"reason": "UnknownAccelerator"}) == 3
    (event,) = store.events.values()
    assert (event["reason"], event["type"]) == ("UnknownAccelerator", "Warning")
    assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "z0", "uid": "z0"}
    assert event["metadata"]["namespace"] == "default" and "Z900" in event["message"]


@pytest.mark.parametrize(
    ("annotation", "frozen_at"),
    [
        ({"tilecast.dev/started": "true"}, None),
        ({"tilecast.dev/started": "2026-05-01T12:00:00+02:00"}, "2026-05-01T10:00:00Z"),
        ({"tilecast.dev/observed-step-seconds": "8.4"}, None),
    ],
)
async def test_a_started_job_keeps_its_forecast(annotation: dict[str, str], frozen_at: str | None) -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store) as corridor:
        await settled(corridor)
        found = store.objects[f"{JOBS}/a"]
        metadata = {**found["metadata"], "annotations": {**found["metadata"]["annotations"], **annotation}}
        corridor.see(store.put(f"{JOBS}/a", {**found, "metadata": metadata}))
        await settled(corridor)
        frozen = store.objects[f"{JOBS}/a"]["status"]
        assert frozen["forecast"]["frozenAt"] == (frozen_at or frozen["forecast"]["frozenAt"])
        same = {key: value for key, value in found["status"]["recommendation"].items() if key != "fitsNow"}
        assert frozen["recommendation"] == same, "what is free does not matter to it any more"
        assert condition(store.objects[f"{JOBS}/a"], "CapacityAvailable")["reason"] == "JobStarted"
        store.writes.clear()
        corridor.see_node(node("a1", "NVIDIA-A100-SXM4-40GB"))
        changed = job(training={"sequenceLength": 2048, "globalBatchSize": 32})["spec"]
        corridor.see(store.put(f"{JOBS}/a", {**store.objects[f"{JOBS}/a"], "spec": changed}))
        await settled(corridor)
        after = store.objects[f"{JOBS}/a"]["status"]
        assert after["recommendation"] == frozen["recommendation"] and after["forecast"] == frozen["forecast"]
        assert (after["observedGeneration"], len(store.writes)) == (2, 1)
        thawed = {**store.objects[f"{JOBS}/a"]}
        thawed["metadata"] = {**thawed["metadata"], "annotations": {"mine": "stays"}}
        corridor.see(store.put(f"{JOBS}/a", thawed))
        await settled(corridor)
        after = store.objects[f"{JOBS}/a"]["status"]
        assert "forecast" not in after and after["recommendation"]["pool"] == "a100-40"


async def test_a_job_that_has_started_before_it_was_seen_is_advised_once() -> None:
    store = Store()
    body = job()
    body["metadata"]["annotations"]["tilecast.dev/started"] = "true"
    store.put(f"{JOBS}/a", body)
    async with operator(store) as corridor:
        await settled(corridor)
    assert store.objects[f"{JOBS}/a"]["status"]["forecast"]["frozenAt"].endswith("Z")
    assert store.objects[f"{JOBS}/a"]["metadata"]["annotations"][POOL] == "h100-sxm"
    writes = len(store.writes)
    async with operator(store) as corridor:
        await settled(corridor)
    assert len(store.writes) == writes == 2


async def test_what_is_free_changes_one_condition_and_asks_for_no_advice() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    seen: list[str] = []

    def counting(asked: Request, pools: Sequence[Pool]) -> Advice:
        seen.append(asked.name)
        return on_first_pool(asked, pools)

    async with operator(store, counting, [node("n1"), node("n2")], discovery=True) as corridor:
        await settled(corridor)
        first = store.objects[f"{JOBS}/a"]
        assert condition(first, "CapacityAvailable")["reason"] == "NotObserved"
        assert (
            "fitsNow" not in first["status"]["summary"] and "free" not in pools_of(store)["h100-sxm"]["status"]["gpus"]
        )
        store.writes.clear()
        corridor.see_pods({})
        await settled(corridor)
        found = store.objects[f"{JOBS}/a"]
        assert condition(found, "CapacityAvailable")["status"] == "True"
        assert found["status"]["summary"]["fitsNow"] == "yes" and found["status"]["recommendation"]["fitsNow"] is True
        assert pools_of(store)["h100-sxm"]["status"]["gpus"]["free"] == 16
        assert found["status"]["inputsHash"] == first["status"]["inputsHash"] and len(seen) == 2
        assert sorted(path for _, path in store.writes) == [f"{POOLS}/h100-sxm/status", f"{JOBS}/a/status"]
        store.writes.clear()
        corridor.see_pods({"elsewhere": 8})
        await settled(corridor)
        assert store.writes == []
        corridor.see_pods({"n1": 1})
        await settled(corridor)
        found = store.objects[f"{JOBS}/a"]
        assert condition(found, "CapacityAvailable")["reason"] == "GpusInUse", "two whole nodes are needed"
        assert found["status"]["summary"]["fitsNow"] == "no"
        corridor.see_pods(None)
        await settled(corridor)
        assert condition(store.objects[f"{JOBS}/a"], "CapacityAvailable")["reason"] == "NotObserved"
    assert len(store.events) == 1, "an Event is for advice that changes"


def cluster_queue(name: str, nominal: int, reserved: int, flavor: str = "h100") -> dict[str, Any]:
    gpus = "nvidia.com/gpu"
    quota = [{"name": "cpu", "nominalQuota": "64"}, {"name": gpus, "nominalQuota": nominal}]
    return {
        "kind": "ClusterQueue",
        "metadata": {"name": name},
        "spec": {"resourceGroups": [{"flavors": [{"name": flavor, "resources": quota}]}]},
        "status": {"flavorsReservation": [{"name": flavor, "resources": [{"name": gpus, "total": str(reserved)}]}]},
    }


async def test_kueues_quotas_say_what_is_free_before_pods_do() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    flavor = {"kind": "ResourceFlavor", "metadata": {"name": "h100"}, "spec": {"nodeLabels": labels}}
    async with operator(store, nodes=[node("n1"), node("n2")], discovery=True) as corridor:
        corridor.see_pods({"n1": 8})
        corridor.see_kueue(flavor)
        corridor.see_kueue(cluster_queue("team-a", 8, 0))
        corridor.see_kueue(cluster_queue("team-b", 8, 0))
        await settled(corridor)
        pool = pools_of(store)["h100-sxm"]["status"]
        assert (pool["gpus"]["free"], pool["kueueFlavor"]) == (16, "h100")
        assert condition(store.objects[f"{JOBS}/a"], "CapacityAvailable")["status"] == "True"
        corridor.see_kueue(cluster_queue("team-b", 8, 3))
        await settled(corridor)
        assert pools_of(store)["h100-sxm"]["status"]["gpus"]["free"] == 13
        assert condition(store.objects[f"{JOBS}/a"], "CapacityAvailable")["reason"] == "GpusInUse"
        corridor.lose_kueue(flavor)
        await settled(corridor)
        assert pools_of(store)["h100-sxm"]["status"]["gpus"]["free"] == 8, "then the pods say it"


@pytest.mark.parametrize("body", [{}, {"spec": 3}, {"spec": {"resourceGroups": [3, {"flavors": {"a": 1}}]}}])
def test_misshapen_quotas_count_nothing(body: dict[str, Any]) -> None:
    assert kueue.quotas(body) == kueue.Quotas({}, {}, {})
    assert kueue.node_labels(body) == {}


def test_a_pod_holds_what_its_containers_do_together_or_its_largest_init_container() -> None:
    def container(gpus: object) -> dict[str, Any]:
        return {"resources": {"limits": {"nvidia.com/gpu": gpus}}}

    pod = {"spec": {"containers": [container("2"), container(1), {}], "initContainers": [container("4")]}}
    assert capacity.requested(pod) == 4
    assert capacity.requested({"spec": {"containers": [container("2"), container("8")]}}) == 10
    assert capacity.requested({"spec": {"containers": [container("x"), {"resources": None}]}}) == 0


async def test_a_watch_that_lost_objects_is_unhealthy() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    nodes_path, jobs_path = "/api/v1/nodes", "/apis/tilecast.dev/v1alpha1/trainingjobs"
    store.counts[nodes_path] = {"metadata": {"continue": "x", "remainingItemCount": 0}, "items": [{}]}
    store.counts[jobs_path] = {"metadata": {"continue": "x", "remainingItemCount": 1}, "items": [{}]}
    async with operator(store, watch_check_s=0.01, stall_s=0.05) as corridor:
        await asyncio.sleep(0.3)
        assert corridor.unhealthy() == ("the watch of trainingjobs is stale: the API server has 2 objects, 1 were seen")
        store.counts[jobs_path] = {"metadata": {}, "items": [{}]}
        await asyncio.sleep(0.1)
        assert corridor.unhealthy() is None


def pool_at(price: float, name: str = "h100-sxm") -> Pool:
    found = offer().pool
    return replace(found, name=name, price_per_gpu_hour=price)


def asked_for_cost(**changes: Any) -> Request:
    return replace(request(), objective="cost", **changes)


def standing(found: Advice) -> Incumbent:
    best = document.incumbent(document.recommendation(found.offers[0]))
    assert best is not None
    return best


@pytest.mark.parametrize(("drop", "stays"), [(MARGIN / 2, True), (2 * MARGIN, False)])
def test_a_recommendation_gives_way_only_to_one_that_is_clearly_better(drop: float, stays: bool) -> None:
    pools = [pool_at(2.0, "a"), pool_at(2.1, "b")]
    before = advise(asked_for_cost(), pools)
    assert before.offers[0].pool.name == "a"
    cheaper = [pools[0], pool_at(2.0 * (1 - drop), "b")]
    after = advise(asked_for_cost(), cheaper)
    assert after.offers[0].pool.name == "b"
    held = hold(after, cheaper, standing(before))
    assert held.offers[0].pool.name == ("a" if stays else "b")
    told = held.offers[0].reason
    assert ("kept: " in told and "a change needs 3%" in told) if stays else ("replaces " in told and "better" in told)
    assert held.inputs_hash == after.inputs_hash
    assert hold(held, cheaper, standing(held)) == held, "it settles"


@pytest.mark.parametrize(
    ("pools", "changes", "why"),
    [
        ([pool_at(2.0, "b")], {}, "whose pool is gone"),
        ([replace(pool_at(2.0, "a"), max_nodes=1), pool_at(9.0, "b")], {}, "GPUs now"),
    ],
)
def test_a_recommendation_that_is_no_longer_valid_is_replaced(
    pools: list[Pool], changes: dict[str, Any], why: str
) -> None:
    old = [pool_at(2.0, "a")]
    pinned = replace(request().workload, micro_batch=None)
    asked = replace(asked_for_cost(), workload=pinned, objective="time")
    before = advise(asked, old)
    assert before.offers[0].gpus == 16
    held = hold(advise(asked, pools), pools, standing(before))
    assert "replaces " in held.offers[0].reason and why in held.offers[0].reason


def test_the_same_recommendation_is_not_talked_about() -> None:
    pools = [pool_at(2.0, "a")]
    found = advise(request(), pools)
    assert hold(found, pools, standing(found)) is found
    assert document.incumbent({"pool": "a"}) is None


async def test_prices_that_move_a_little_move_no_job() -> None:
    store = Store()
    # Steps long enough that the host, in whose favour of doubt plans are ordered, does not matter.
    training = {"sequenceLength": 1024, "globalBatchSize": 512, "precision": "fp16", "execution": "cudaGraphs"}
    store.put(f"{JOBS}/a", job("a", objective="cost", model=SMALL["model"], training=training))
    both = [node("n1"), node("a1", A100)]

    def mine(name: str, product: str, price: float) -> dict[str, Any]:
        spec = {"selector": {"nvidia.com/gpu.product": product}, "price": {"perGpuHour": price}}
        metadata = {"name": name}
        return {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": metadata, "spec": spec}

    store.put(f"{POOLS}/h", mine("h", "NVIDIA-H100-80GB-HBM3", 3.0))
    store.put(f"{POOLS}/a", mine("a", A100, 3.0))
    async with operator(store, advise, both) as corridor:
        await settled(corridor, 30)
        first = store.objects[f"{JOBS}/a"]["status"]
        names = {item["pool"]: item["costPer1000Steps"] for item in first["alternatives"]}
        best, other = sorted(names, key=lambda name: names[name])
        product = {"h": "NVIDIA-H100-80GB-HBM3", "a": A100}[other]
        level = 3.0 * names[best] / names[other]
        for share, wanted in ((0.99, best), (0.9, other)):
            corridor.see(store.put(f"{POOLS}/{other}", mine(other, product, level * share)))
            await settled(corridor, 30)
            now = store.objects[f"{JOBS}/a"]["status"]
            assert now["recommendation"]["pool"] == wanted, now["recommendation"]["reason"]
            assert now["inputsHash"] != first["inputsHash"]
    assert len(store.events) == 2, "one for the first advice, one for the change"


def test_a_wrong_setting_is_one_line_on_standard_error() -> None:
    environment = {**os.environ, "TILECAST_WRITERS": "none"}
    command = [sys.executable, "-m", "kopf", "run", "--standalone", "-m", "tilecast_operator.handlers"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: TILECAST_WRITERS: 'none' is not a whole number")
    assert len(done.stderr.strip().splitlines()) == 1


async def serve(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> tuple[web.AppRunner, Api]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = Api(5.0)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    api.connect(lambda: Connection(url, {}, ssl.create_default_context()))
    return runner, api


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
    told: list[dict[str, int] | None] = []
    feed = PodFeed(api, lambda used: told.append(None if used is None else dict(used)))
    task = asyncio.create_task(feed.run())
    try:
        async with asyncio.timeout(10):
            while len(queries) < 7:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()
        await runner.cleanup()
    assert told[:3] == [{"n1": 5}, {"n1": 5, "n2": 2}, {"n1": 1, "n2": 2}]
    assert told[3] == {"n1": 5}, "a list counts from the beginning"
    assert all(query["fieldSelector"].startswith("spec.nodeName!=") for query in queries)
    assert [query.get("resourceVersion") for query in queries if "watch" in query][:2] == ["10", "20"]


async def test_pods_that_cannot_be_read_are_unknown_not_none() -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "forbidden"}, status=403)

    runner, api = await serve(answer)
    told: list[object] = []
    task = asyncio.create_task(PodFeed(api, told.append).run())
    try:
        async with asyncio.timeout(10):
            while not told:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()
        await runner.cleanup()
    assert told == [None]


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
import kopf, tilecast_operator.handlers
registry = kopf.get_default_registry()
every = registry._watching.get_all_handlers()
assert not registry._indexing.get_all_handlers(), "kopf wakes every object for each one that is indexed"
print(*sorted({handler.selector.any_name for handler in every}))
assert not registry._spawning.get_all_handlers() and not registry._changing.get_all_handlers()
"""


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, "gpupools nodes trainingjobs"),
        (
            dict.fromkeys(("TILECAST_READ_RESOURCE_SLICES", "TILECAST_READ_KUEUE", "TILECAST_READ_PODS"), "true"),
            "clusterqueues gpupools nodes resourceflavors resourceslices trainingjobs",
        ),
    ],
)
def test_only_what_the_settings_say_is_watched(settings: dict[str, str], names: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TILECAST_")} | settings
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == names.split(), done.stderr
