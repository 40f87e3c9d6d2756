"""The operator over time: pools it writes, advice it keeps, forecasts it freezes, and free GPUs."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from email.utils import formatdate
from typing import Any

import pytest
from prometheus_client import generate_latest

from advice_values import offer, request
from operator_store import JOBS, POOLS, TIMINGS, Store, job, node, on_first_pool, operator, ready, settled
from tilecast.advice import Advice, Request, advise
from tilecast.advice.incumbent import MARGIN, Incumbent, keep_incumbent
from tilecast.api.gpu_pool import DISCOVERED
from tilecast.api.status import Recommendation
from tilecast.hardware import Pool
from tilecast.jobs import kueue
from tilecast.jobs.quantities import count_pod_gpus
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.server_clock import ServerClock
from tilecast_operator.objects.documents import ADVICE_KEYS, POOL

TYPE = "node.kubernetes.io/instance-type"
A100 = "NVIDIA-A100-SXM4-80GB"


def condition(status: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return next(item for item in status["status"]["conditions"] if item["type"] == kind)


def searches() -> tuple[list[str], Callable[[Request, Sequence[Pool]], Advice]]:
    """Return a list and a search that records its pools there, except those of the warm-up.

    The search gives the true advice.
    """
    seen: list[str] = []

    def counting(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            seen.append(",".join(pool.name for pool in pools))
        return advise(asked, pools)

    return seen, counting


SMALL = {"model": {"preset": "gpt2"}, "training": {"sequenceLength": 512, "globalBatchSize": 8, "precision": "fp16"}}


@pytest.mark.slow
async def test_a_restart_with_everything_unchanged_does_not_even_search() -> None:
    store = Store()
    for name in "ab":
        store.put(f"{JOBS}/{name}", job(name, **SMALL))
    async with operator(store, advise) as running:
        await settled(running)
    store.writes.clear()
    seen, counting = searches()
    async with operator(store, counting) as running:
        await settled(running)
    assert (seen, store.writes) == ([], [])


async def test_a_status_that_somebody_else_wrote_is_put_right() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job(**SMALL))
    async with operator(store, advise) as running:
        await settled(running)
        status = store.objects[f"{JOBS}/a"]["status"]
        forged = {**store.objects[f"{JOBS}/a"], "status": {**status, "summary": {"pool": "moon"}}}
        running.cache.put_object(store.put(f"{JOBS}/a", forged))
        await settled(running)
    assert store.objects[f"{JOBS}/a"]["status"] == status


@pytest.mark.slow
async def test_annotations_that_were_deleted_come_back_at_a_restart() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job(**SMALL))
    async with operator(store, advise) as running:
        await settled(running)
    document = store.objects[f"{JOBS}/a"]
    bare = {**document, "metadata": {**document["metadata"], "annotations": {"mine": "stays"}}}
    store.put(f"{JOBS}/a", bare)
    async with operator(store, advise) as running:
        await settled(running)
    assert set(ADVICE_KEYS) <= store.objects[f"{JOBS}/a"]["metadata"]["annotations"].keys()


def pools_of(store: Store) -> dict[str, dict[str, Any]]:
    return {path.removeprefix(f"{POOLS}/"): item for path, item in store.objects.items() if path.startswith(POOLS)}


async def test_pools_are_written_down_described_and_left_alone() -> None:
    store = Store()
    async with operator(store, discovery=True) as running:
        await settled(running)
        pool = pools_of(store)["h100-sxm"]
        assert pool["metadata"]["labels"] == {DISCOVERED: "true"}
        assert pool["spec"]["maxNodes"] == 1 and pool["status"]["summary"]["origin"] == "Discovered"
        assert pool["status"]["facts"]["gpu"] == {"value": "h100-sxm", "layer": "gpu-feature-discovery"}
        assert store.writes == [("apply", f"{POOLS}/h100-sxm"), ("apply", f"{POOLS}/h100-sxm/status")]
    store.writes.clear()
    async with operator(store, discovery=True) as running, operator(store, discovery=True) as second:
        await settled(running)
        await settled(second)
    assert store.writes == [], "neither a restart nor a second operator writes"


async def test_pools_come_back_with_their_crd() -> None:
    store, is_served = Store(), True

    def unserved(path: str) -> None:
        if path.startswith(POOLS) and not is_served:
            raise ApiError(404, "the server could not find the requested resource")

    store.before_write = unserved
    async with operator(store, discovery=True, timings=replace(TIMINGS, unserved_s=0.02)) as running:
        await settled(running)
        (name,) = pools_of(store)
        path = f"{POOLS}/{name}"
        running.cache.put_object(store.objects[path])
        is_served = False
        running.cache.remove_object(store.objects.pop(path))
        await asyncio.sleep(0.2)
        assert not pools_of(store)
        is_served = True
        async with asyncio.timeout(60):
            while not pools_of(store):
                await asyncio.sleep(0.01)


async def test_without_discovery_pools_live_in_memory() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store) as running:
        await settled(running)
    assert pools_of(store) == {} and ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"


async def test_nodes_that_come_and_go_bring_no_new_advice() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    seen: list[int] = []

    def counting(asked: Request, pools: Sequence[Pool]) -> Advice:
        seen.append(len(pools))
        return on_first_pool(asked, pools)

    everyone = [node(f"n{index}") for index in range(4)]
    async with operator(store, counting, everyone, discovery=True) as running:
        await settled(running)
        before = len(seen)
        running.cache.remove_object(node("n3"))
        await settled(running)
        pool = pools_of(store)["h100-sxm"]
        assert (pool["spec"]["maxNodes"], pool["status"]["nodes"]) == (4, 3)
        assert condition(pool, "ScaledDown")["status"] == "True"
        for index in range(3):
            running.cache.remove_object(node(f"n{index}"))
        await settled(running)
        assert condition(pools_of(store)["h100-sxm"], "Ready")["reason"] == "NoNodesNow"
        assert len(seen) == before
        assert condition(store.objects[f"{JOBS}/a"], "CapacityAvailable")["reason"] == "TooFewNodes"
        assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised", "it is priced as if it had its nodes"
        running.cache.put_object(everyone[0])
        await settled(running)
        assert len(seen) == before


async def test_nodes_that_stay_away_are_forgotten_and_empty_pools_withdrawn() -> None:
    store = Store()
    store.clock_s = 1_800_000_000.0
    other = node("a1", A100)
    async with operator(store, nodes=[node("n1"), node("n2"), other], discovery=True) as running:
        await settled(running)
        running.cache.remove_object(node("n2"))
        running.cache.remove_object(node("a1"))
        await settled(running)
        assert set(pools_of(store)) == {"h100-sxm", "a100-80"}
    store.clock_s += 86_401
    async with operator(store, nodes=[node("n1")], discovery=True) as running:
        await settled(running)
        assert set(pools_of(store)) == {"h100-sxm"}
        pool = pools_of(store)["h100-sxm"]
        assert pool["spec"]["maxNodes"] == 1 and condition(pool, "ScaledDown")["status"] == "False"
    writes = len(store.writes)
    async with operator(store, nodes=[node("n1")], discovery=True) as running:
        await settled(running)
    assert len(store.writes) == writes


async def test_a_machine_a_day_ahead_forgets_no_pool() -> None:
    store, now_s = Store(), 1_800_000_000.0
    store.clock_s = now_s
    async with operator(store, nodes=[node("n1"), node("a1", A100)], discovery=True) as running:
        await settled(running)
        running.cache.remove_object(node("a1", A100))
        await settled(running)
    machine = ServerClock(lambda: now_s + 25 * 3600, lambda: 0.0)
    store.clock = machine
    machine.set_from_header(formatdate(now_s + 60, usegmt=True))
    async with operator(store, nodes=[node("n1")], discovery=True) as running:
        await settled(running)
        assert set(pools_of(store)) == {"h100-sxm", "a100-80"}
    machine.set_from_header(formatdate(now_s + 25 * 3600, usegmt=True))
    async with operator(store, nodes=[node("n1")], discovery=True) as running:
        await settled(running)
        assert set(pools_of(store)) == {"h100-sxm"}, "it is the API server's day that counts"


async def test_a_user_takes_a_pool_over_by_editing_it() -> None:
    store = Store()
    async with operator(store, discovery=True) as running:
        await settled(running)
        gpu_pool = pools_of(store)["h100-sxm"]
        edited = {**gpu_pool, "spec": {**gpu_pool["spec"], "price": {"perGpuHour": 1.5}}}
        running.cache.put_object(store.put(f"{POOLS}/h100-sxm", edited))
        await settled(running)
        running.cache.put_object(node("n2"))
        await settled(running)
        gpu_pool = pools_of(store)["h100-sxm"]
        assert gpu_pool["spec"] == edited["spec"], "maxNodes stays as the user left it"
        assert gpu_pool["status"]["summary"]["origin"] == "User"
        assert gpu_pool["status"]["facts"]["price"] == {"value": "1.5 USD", "layer": "override"}


async def test_a_users_edit_wins_a_race() -> None:
    store = Store()
    async with operator(store, discovery=True) as running:
        await settled(running)
        late: list[dict[str, Any]] = []

        def edit(path: str) -> None:
            store.before_write = lambda path: None
            job = store.objects[f"{POOLS}/h100-sxm"]
            late.append(store.put(f"{POOLS}/h100-sxm", {**job, "spec": {**job["spec"], "maxNodes": 7}}))

        store.before_write = edit
        running.cache.put_object(node("n2"))
        async with asyncio.timeout(30):
            while not late:
                await asyncio.sleep(0.01)
        running.cache.put_object(late[0])
        await settled(running)
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
    async with operator(store, discovery=True) as running:
        async with asyncio.timeout(60):
            while not late:
                await asyncio.sleep(0.01)
        running.cache.put_object(late[0])
        await settled(running)
    theirs = pools_of(store)["h100-sxm"]["spec"]
    assert theirs == {"selector": {"rack": "7"}, "price": {"perGpuHour": 2.0}, "gpu": {"name": "h100-sxm"}}


async def test_a_users_pool_over_the_same_nodes_ends_the_discovered_one() -> None:
    store = Store()
    async with operator(store, discovery=True) as running:
        await settled(running)
        spec = {"selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}
        mine = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": "mine"}, "spec": spec}
        running.cache.put_object(store.put(f"{POOLS}/mine", mine))
        await settled(running)
        assert ("delete", f"{POOLS}/h100-sxm") in store.writes
    assert set(pools_of(store)) == {"mine"}


async def test_nothing_is_written_down_from_half_a_list() -> None:
    store = Store()
    store.counts["/api/v1/nodes"] = {"metadata": {"continue": "x", "remainingItemCount": 6}, "items": [{}]}
    store.put(f"{JOBS}/a", job())
    async with operator(store, nodes=[node("n1")], discovery=True) as running:
        for index in range(2, 8):
            await asyncio.sleep(0.03)
            assert store.writes == [] and running.find_readiness_problem() is not None
            running.cache.put_object(node(f"n{index}"))
        await settled(running)
        assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"
    assert pools_of(store)["h100-sxm"]["spec"]["maxNodes"] == 7
    assert ("apply", f"{POOLS}/h100-sxm") in store.writes


async def test_nodes_that_nobody_counts_are_all_there_after_a_pause() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    timings = replace(TIMINGS, first_list_uncounted_s=1.0)
    async with operator(store, timings=timings, node_selector="gpu=true") as running:
        await asyncio.sleep(0.1)
        assert running.find_readiness_problem() is not None
        await settled(running)
        assert running.find_readiness_problem() is None
    assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"


async def test_a_store_that_went_back_is_noticed_at_the_next_look_though_the_counts_agree() -> None:
    store = Store()
    page = {"metadata": {"resourceVersion": "900"}, "items": [{}]}
    store.counts = {"/api/v1/nodes": page}
    async with operator(store, watch_check_s=0.02) as running:
        await settled(running)
        assert running.find_health_problem() is None
        page["metadata"] = {"resourceVersion": "905"}
        await asyncio.sleep(0.2)
        assert running.find_health_problem() is None
        page["metadata"] = {"resourceVersion": "41"}
        async with asyncio.timeout(60):
            while (text := running.find_health_problem()) is None:
                await asyncio.sleep(0.01)
        assert text.startswith("the store of nodes was restored: it is at 41, and was at 90")


async def test_unknown_accelerators_are_an_event_said_once() -> None:
    store = Store()
    strange = [node(f"z{index}", "NVIDIA-Z900") for index in range(3)]
    async with operator(store, nodes=strange) as running:
        await settled(running)
        running.cache.put_object(node("n1"))
        await settled(running)
        value = running.metrics.registry.get_sample_value
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
    async with operator(store) as running:
        await settled(running)
        document = store.objects[f"{JOBS}/a"]
        metadata = {**document["metadata"], "annotations": {**document["metadata"]["annotations"], **annotation}}
        running.cache.put_object(store.put(f"{JOBS}/a", {**document, "metadata": metadata}))
        await settled(running)
        frozen = store.objects[f"{JOBS}/a"]["status"]
        assert frozen["forecast"]["frozenAt"] == (frozen_at or frozen["forecast"]["frozenAt"])
        same = {key: value for key, value in document["status"]["recommendation"].items() if key != "fitsNow"}
        assert frozen["recommendation"] == same, "what is free does not matter to it any more"
        assert condition(store.objects[f"{JOBS}/a"], "CapacityAvailable")["reason"] == "JobStarted"
        store.writes.clear()
        running.cache.put_object(node("a1", "NVIDIA-A100-SXM4-40GB"))
        changed = job(training={"sequenceLength": 2048, "globalBatchSize": 32})["spec"]
        running.cache.put_object(store.put(f"{JOBS}/a", {**store.objects[f"{JOBS}/a"], "spec": changed}))
        await settled(running)
        after = store.objects[f"{JOBS}/a"]["status"]
        assert after["recommendation"] == frozen["recommendation"] and after["forecast"] == frozen["forecast"]
        assert (after["observedGeneration"], len(store.writes)) == (2, 1)
        thawed = {**store.objects[f"{JOBS}/a"]}
        thawed["metadata"] = {**thawed["metadata"], "annotations": {"mine": "stays"}}
        running.cache.put_object(store.put(f"{JOBS}/a", thawed))
        await settled(running)
        after = store.objects[f"{JOBS}/a"]["status"]
        assert "forecast" not in after and after["recommendation"]["pool"] == "a100-40"


async def test_a_job_that_has_started_before_it_was_seen_is_advised_once() -> None:
    store = Store()
    body = job()
    body["metadata"]["annotations"]["tilecast.dev/started"] = "true"
    store.put(f"{JOBS}/a", body)
    async with operator(store) as running:
        await settled(running)
    assert store.objects[f"{JOBS}/a"]["status"]["forecast"]["frozenAt"].endswith("Z")
    assert store.objects[f"{JOBS}/a"]["metadata"]["annotations"][POOL] == "h100-sxm"
    writes = len(store.writes)
    async with operator(store) as running:
        await settled(running)
    assert len(store.writes) == writes == 2


async def test_what_is_free_changes_one_condition_and_asks_for_no_advice() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    seen: list[str] = []

    def counting(asked: Request, pools: Sequence[Pool]) -> Advice:
        seen.append(asked.name)
        return on_first_pool(asked, pools)

    async with operator(store, counting, [node("n1"), node("n2")], discovery=True) as running:
        await settled(running)
        first = store.objects[f"{JOBS}/a"]
        assert condition(first, "CapacityAvailable")["reason"] == "NotObserved"
        assert (
            "fitsNow" not in first["status"]["summary"] and "free" not in pools_of(store)["h100-sxm"]["status"]["gpus"]
        )
        store.writes.clear()
        running.set_pod_usage({})
        await settled(running)
        document = store.objects[f"{JOBS}/a"]
        assert condition(document, "CapacityAvailable")["status"] == "True"
        assert (
            document["status"]["summary"]["fitsNow"] == "yes"
            and document["status"]["recommendation"]["fitsNow"] is True
        )
        assert pools_of(store)["h100-sxm"]["status"]["gpus"]["free"] == 16
        assert document["status"]["inputsHash"] == first["status"]["inputsHash"] and len(seen) == 2
        assert sorted(path for _, path in store.writes) == [f"{POOLS}/h100-sxm/status", f"{JOBS}/a/status"]
        store.writes.clear()
        running.set_pod_usage({"elsewhere": 8})
        await settled(running)
        assert store.writes == []
        running.set_pod_usage({"n1": 1})
        await settled(running)
        document = store.objects[f"{JOBS}/a"]
        assert condition(document, "CapacityAvailable")["reason"] == "GpusInUse", "two whole nodes are needed"
        assert document["status"]["summary"]["fitsNow"] == "no"
        running.set_pod_usage(None)
        await settled(running)
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
    async with operator(store, nodes=[node("n1"), node("n2")], discovery=True) as running:
        running.set_pod_usage({"n1": 8})
        running.cache.put_object(flavor)
        running.cache.put_object(cluster_queue("team-a", 8, 0))
        running.cache.put_object(cluster_queue("team-b", 8, 0))
        await settled(running)
        pool = pools_of(store)["h100-sxm"]["status"]
        assert (pool["gpus"]["free"], pool["kueueFlavor"]) == (16, "h100")
        assert condition(store.objects[f"{JOBS}/a"], "CapacityAvailable")["status"] == "True"
        running.cache.put_object(cluster_queue("team-b", 8, 3))
        await settled(running)
        assert pools_of(store)["h100-sxm"]["status"]["gpus"]["free"] == 13
        assert condition(store.objects[f"{JOBS}/a"], "CapacityAvailable")["reason"] == "GpusInUse"
        running.cache.remove_object(flavor)
        await settled(running)
        assert pools_of(store)["h100-sxm"]["status"]["gpus"]["free"] == 8, "then the pods say it"


@pytest.mark.parametrize("body", [{}, {"spec": 3}, {"spec": {"resourceGroups": [3, {"flavors": {"a": 1}}]}}])
def test_misshapen_quotas_count_nothing(body: dict[str, Any]) -> None:
    assert kueue.read_quotas(body) == kueue.Quotas({}, {}, {})
    assert kueue.read_node_labels(body) == {}


def test_a_pod_holds_what_its_containers_do_together_or_its_largest_init_container() -> None:
    def container(gpus: object) -> dict[str, Any]:
        return {"resources": {"limits": {"nvidia.com/gpu": gpus}}}

    pod = {"spec": {"containers": [container("2"), container(1), {}], "initContainers": [container("4")]}}
    assert count_pod_gpus(pod) == 4
    assert count_pod_gpus({"spec": {"containers": [container("2"), container("8")]}}) == 10
    assert count_pod_gpus({"spec": {"containers": [container("x"), {"resources": None}]}}) == 0


async def test_a_watch_that_lost_objects_is_unhealthy() -> None:
    store = Store()
    store.put(f"{JOBS}/a", job())
    nodes_path, jobs_path = "/api/v1/nodes", "/apis/tilecast.dev/v1alpha1/trainingjobs"
    store.counts[nodes_path] = {"metadata": {"continue": "x", "remainingItemCount": 0}, "items": [{}]}
    store.counts[jobs_path] = {"metadata": {"continue": "x", "remainingItemCount": 1}, "items": [{}]}
    async with operator(store, watch_check_s=0.01, stall_s=0.05) as running:
        async with asyncio.timeout(60):
            while (text := running.find_health_problem()) is None:
                await asyncio.sleep(0.01)
        assert text == "the watch of trainingjobs is stale: the API server has 2 objects, 1 were seen"
        store.counts[jobs_path] = {"metadata": {}, "items": [{}]}
        async with asyncio.timeout(60):
            while running.find_health_problem() is not None:
                await asyncio.sleep(0.01)


def pool_at(price: float, name: str = "h100-sxm") -> Pool:
    base = offer().pool
    return replace(base, name=name, price_per_gpu_hour=price)


def asked_for_cost(**changes: Any) -> Request:
    return replace(request(), objective="cost", **changes)


def standing(advice: Advice) -> Incumbent:
    best = Recommendation.from_offer(advice.offers[0]).incumbent()
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
    held = keep_incumbent(after, cheaper, standing(before))
    assert held.offers[0].pool.name == ("a" if stays else "b")
    reason = held.offers[0].reason
    assert (
        ("kept: " in reason and "a change needs 3%" in reason)
        if stays
        else ("replaces " in reason and "better" in reason)
    )
    assert held.inputs_hash == after.inputs_hash
    assert keep_incumbent(held, cheaper, standing(held)) == held, "it settles"


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
    held = keep_incumbent(advise(asked, pools), pools, standing(before))
    assert "replaces " in held.offers[0].reason and why in held.offers[0].reason


def test_the_same_recommendation_is_not_talked_about() -> None:
    pools = [pool_at(2.0, "a")]
    advice = advise(request(), pools)
    assert keep_incumbent(advice, pools, standing(advice)) is advice
    assert Recommendation.from_offer(advice.offers[0]).model_copy(update={"precision": None}).incumbent() is None


@pytest.mark.slow
async def test_prices_that_move_a_little_move_no_job() -> None:
    store = Store()
    # Steps long enough that the host does not matter, for whose uncertain time the order of plans allows.
    training = {"sequenceLength": 1024, "globalBatchSize": 512, "precision": "fp16", "execution": "cudaGraphs"}
    store.put(f"{JOBS}/a", job("a", objective="cost", model=SMALL["model"], training=training))
    both = [node("n1"), node("a1", A100)]

    def mine(name: str, product: str, price: float) -> dict[str, Any]:
        spec = {"selector": {"nvidia.com/gpu.product": product}, "price": {"perGpuHour": price}}
        metadata = {"name": name}
        return {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": metadata, "spec": spec}

    store.put(f"{POOLS}/h", mine("h", "NVIDIA-H100-80GB-HBM3", 3.0))
    store.put(f"{POOLS}/a", mine("a", A100, 3.0))
    async with operator(store, advise, both) as running:
        await settled(running, 30)
        first = store.objects[f"{JOBS}/a"]["status"]
        names = {item["pool"]: item["costPer1000Steps"] for item in first["alternatives"]}
        best, other = sorted(names, key=lambda name: names[name])
        product = {"h": "NVIDIA-H100-80GB-HBM3", "a": A100}[other]
        level = 3.0 * names[best] / names[other]
        for share, expected in ((0.99, best), (0.9, other)):
            running.cache.put_object(store.put(f"{POOLS}/{other}", mine(other, product, level * share)))
            await settled(running, 30)
            now = store.objects[f"{JOBS}/a"]["status"]
            assert now["recommendation"]["pool"] == expected, now["recommendation"]["reason"]
            assert now["inputsHash"] != first["inputsHash"]
    assert len(store.events) == 2, "one for the first advice, one for the change"


@pytest.mark.slow
def test_a_wrong_setting_is_one_line_on_standard_error() -> None:
    environment = {**os.environ, "TILECAST_WRITERS": "none"}
    command = [sys.executable, "-m", "kopf", "run", "--standalone", "-m", "tilecast_operator.main"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: TILECAST_WRITERS: 'none' is not a whole number")
    assert len(done.stderr.strip().splitlines()) == 1


async def test_the_newest_event_names_the_pool_after_any_number_of_flips() -> None:
    store, products = Store(), ("NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB")
    store.put(f"{JOBS}/a", job())
    store.clock_s = 1.8e9
    async with operator(store, nodes=(node("n", products[0]),)) as running:
        await settled(running)
        for turn in range(1, 5):
            store.clock_s += 60
            body = node("n", products[turn % 2])
            body["metadata"]["resourceVersion"] = str(1000 + turn)
            running.cache.put_object(body)
            await settled(running)
            newest = max(store.events.values(), key=lambda item: item["lastTimestamp"])
            pool = store.objects[f"{JOBS}/a"]["status"]["recommendation"]["pool"]
            assert f" {pool}," in newest["message"].split(" (was")[0]
        metrics = generate_latest(running.metrics.registry).decode().splitlines()
    counted = [line for line in metrics if line.startswith("tilecast_writes_total{") and "events" in line]
    assert counted and all('outcome="ok"' in line for line in counted), counted


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.slow
async def test_tampered_annotations_are_repaired(started: bool, restart: bool) -> None:
    store = Store()
    store.put(f"{JOBS}/a", job(**SMALL))

    def tamper() -> dict[str, Any]:
        body = copy.deepcopy(store.objects[f"{JOBS}/a"])
        body["metadata"]["annotations"] |= {POOL: "evil", "tilecast.dev/recommended-gpus": "1"}
        return store.put(f"{JOBS}/a", body)

    async with operator(store, advise) as running:
        await settled(running)
        if started:
            body = copy.deepcopy(store.objects[f"{JOBS}/a"])
            body["metadata"]["annotations"]["tilecast.dev/started"] = "true"
            running.cache.put_object(store.put(f"{JOBS}/a", body))
            await settled(running)
        intact = store.objects[f"{JOBS}/a"]["metadata"]["annotations"]
        if not restart:
            running.cache.put_object(tamper())
            await settled(running)
    if restart:
        tamper()
        async with operator(store, advise) as again:
            await settled(again)
    assert store.objects[f"{JOBS}/a"]["metadata"]["annotations"] == intact


async def test_nothing_is_remembered_of_a_job_that_is_gone() -> None:
    store = Store()
    key, kept = Key("TrainingJob", "default", "a"), Key("TrainingJob", "default", "b")
    store.put(f"{JOBS}/a", job("a"))
    store.put(f"{JOBS}/b", job("b"))
    async with operator(store) as running:
        await settled(running)
        assert key in running.runtime.records and kept in running.runtime.records
        running.cache.remove_object(store.objects.pop(f"{JOBS}/a"))
        running.runtime.add(key)
        await settled(running)
        assert key not in running.runtime.records and kept in running.runtime.records
