"""A placed job that gets no quota in time may run on the other flavors of its ranking, once, and in a safe order."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import job_store
from existing_jobs import ONE_OF_EACH
from job_store import H100, JOBS, PLACING, WORKLOADS, JobStore, training_job, until
from operator_store import TIMINGS, patched, ready
from test_place import example
from tilecast.jobs import (
    APPLIED,
    CHOSEN_LABELS,
    JOB_KINDS,
    Placement,
    compute_changes,
    read_job,
    remove_advised_selector,
)
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.controllers import patches
from tilecast_operator.kube.client import ApiError

PRODUCT, ARCH = "nvidia.com/gpu.product", "kubernetes.io/arch"
T4, A100 = "Tesla-T4", "NVIDIA-A100-SXM4-80GB"
SETTINGS = replace(PLACING, read_kueue=True, requeue_s=0.2)
REQUIRED = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")


LOOKS = {"look_first_s": 0.02, "look_most_s": 0.02, "look_least_s": 0.02}
serving = partial(job_store.serving, timings=replace(TIMINGS, **LOOKS, requeue_again_s=0.02))


def kueue(running: OperatorParts, quotas: Mapping[str, int], more: Mapping[str, str] | None = None) -> None:
    """Show a queue with one flavor for each product of GPUs; `more` are labels of each flavor."""
    for product in quotas:
        spec = {"nodeLabels": {PRODUCT: product, **(more or {})}}
        running.cache.put_object({"kind": "ResourceFlavor", "metadata": {"name": product.lower()}, "spec": spec})
    flavors = [
        {"name": product.lower(), "resources": [{"name": "nvidia.com/gpu", "nominalQuota": quota}]}
        for product, quota in quotas.items()
    ]
    group = {"coveredResources": ["nvidia.com/gpu"], "flavors": flavors}
    running.cache.put_object(
        {"kind": "ClusterQueue", "metadata": {"name": "all"}, "spec": {"resourceGroups": [group]}, "status": {}}
    )
    metadata = {"name": "team", "namespace": "default"}
    running.cache.put_object({"kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": "all"}})


def pods_of(document: Mapping[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]["template"]["spec"]
    return spec


def pod_set(store: JobStore) -> dict[str, Any]:
    spec: dict[str, Any] = store.workloads["for-a"]["spec"]["podSets"][0]["template"]["spec"]
    return spec


def terms(spec: Any) -> list[dict[str, Any]] | None:
    for part in REQUIRED:
        spec = spec.get(part, {})
    return spec or None


def wants(*products: str) -> list[dict[str, Any]]:
    return [{"matchExpressions": [{"key": PRODUCT, "operator": "In", "values": [product]}]} for product in products]


async def placed(store: JobStore, running: OperatorParts, **changed: Any) -> None:
    """Wait until a job is placed on H100 and released to Kueue, which has yet to decide."""
    document = store.job("job-kueue")
    pods_of(document).update(changed)
    document = store.put(f"{JOBS}/a", document)
    store.workload(document)
    running.cache.put_object(document)
    await until(lambda: store.annotations().get(APPLIED) == patches.QUEUED, "the job to be let go")
    assert pods_of(store.now())["nodeSelector"][PRODUCT] == H100 == pod_set(store)["nodeSelector"][PRODUCT]


@pytest.mark.slow
async def test_a_job_without_quota_may_run_on_its_other_flavors() -> None:
    store = JobStore()
    async with serving(store, SETTINGS) as running:
        kueue(running, {T4: 64, H100: 64, A100: 64})
        await placed(store, running)
        kueue(running, {T4: 64, H100: 0, A100: 64})
        before = len(store.patches)
        await until(lambda: terms(pod_set(store)), "the Workload to be widened")
        assert store.annotations()[APPLIED] == "Requeued" and store.now()["spec"]["suspend"] is True
        assert pods_of(store.now())["nodeSelector"] == {} == pod_set(store)["nodeSelector"]
        assert terms(pod_set(store)) == wants(A100, T4), "without the one that has no quota, best first"
        assert store.patches[before:] == [f"{JOBS}/a", f"{WORKLOADS}/for-a"], "the job first"
        await until(lambda: any(reason == "Requeued" for reason, _ in store.events_seen()), "an Event")
        (text,) = (text for reason, text in store.events_seen() if reason == "Requeued")
        assert "0.2 s" in text and "4 GPUs" in text and f"{A100}, {T4}".lower() in text
        metrics = running.metrics.registry
        assert metrics.get_sample_value("tilecast_requeued_total") == 1
        assert metrics.get_sample_value("tilecast_placements_total", {"outcome": "Requeued"}) == 1
        running.cache.put_object(store.now())
        await asyncio.sleep(0.5)
        assert len(store.patches) == before + 2, "once"


async def test_a_job_that_is_preempted_may_run_elsewhere_and_one_that_runs_is_not_touched() -> None:
    store = JobStore()
    async with serving(store, SETTINGS) as running:
        kueue(running, {T4: 64, H100: 64})
        await placed(store, running)
        store.admit(running)
        await until(lambda: store.annotations()[APPLIED] == patches.PLACED, "it to start")
        store.decide("QuotaReserved")
        before = len(store.patches)
        await asyncio.sleep(0.5)
        assert len(store.patches) == before
        store.decide("Evicted")
        body = copy.deepcopy(store.now())
        body["spec"]["suspend"] = True
        running.cache.put_object(store.put(f"{JOBS}/a", body))
        await until(lambda: terms(pod_set(store)), "the Workload to be widened")
        assert store.annotations()[APPLIED] == "Requeued" and pods_of(store.now())["nodeSelector"] == {}
        assert terms(pod_set(store)) == wants(H100, T4)


@pytest.mark.parametrize("kind", ["QuotaReserved", "Finished"])
@pytest.mark.slow
async def test_a_job_that_kueue_has_decided_about_is_left_alone(kind: str) -> None:
    store = JobStore()
    async with serving(store, SETTINGS) as running:
        kueue(running, {T4: 64, H100: 64})
        await placed(store, running)
        store.decide(kind)
        before = len(store.patches)
        await asyncio.sleep(0.6)
        assert len(store.patches) == before and pod_set(store)["nodeSelector"] == {PRODUCT: H100}


@pytest.mark.slow
async def test_it_is_switched_off_by_nothing_and_a_single_flavor_is_kept() -> None:
    for settings, quotas in ((replace(SETTINGS, requeue_s=0.0), {T4: 64, H100: 64}), (SETTINGS, {H100: 64})):
        store = JobStore()
        async with serving(store, settings) as running:
            kueue(running, quotas)
            await placed(store, running)
            await asyncio.sleep(0.6)
            assert store.annotations()[APPLIED] == patches.QUEUED
            assert pods_of(store.now())["nodeSelector"] == {PRODUCT: H100}


async def test_what_the_author_asked_for_stays_and_what_was_chosen_beside_goes() -> None:
    store = JobStore()
    own = {"kubernetes.io/os": "linux"}
    term = {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    async with serving(store, SETTINGS) as running:
        kueue(running, {T4: 64, H100: 64}, {ARCH: "amd64"})
        await placed(store, running, nodeSelector={**own, PRODUCT: A100}, affinity=affinity)
        assert store.annotations()[CHOSEN_LABELS] == ARCH
        assert pods_of(store.now())["nodeSelector"] == {**own, PRODUCT: H100, ARCH: "amd64"}
        await until(lambda: terms(pod_set(store)), "the Workload to be widened")
        assert pods_of(store.now())["nodeSelector"] == own == pod_set(store)["nodeSelector"]
        assert pods_of(store.now())["affinity"] == affinity and CHOSEN_LABELS not in store.annotations()
        alternatives = terms(pod_set(store))
        assert alternatives is not None and len(alternatives) == 2
        expressions = [{item["key"]: item["values"] for item in each["matchExpressions"]} for each in alternatives]
        assert expressions == [
            {"kubernetes.io/os": ["linux"], ARCH: ["amd64"], PRODUCT: [product]} for product in (H100, T4)
        ]


async def test_a_restart_between_the_two_writes_is_made_good() -> None:
    store = JobStore()
    async with serving(store, SETTINGS) as running:
        kueue(running, {T4: 64, H100: 64})
        await placed(store, running)

        def cut(path: str) -> None:
            if path.startswith(WORKLOADS):
                raise ApiError(503, "gone")

        store.before_write = cut
        await until(lambda: store.annotations()[APPLIED] == "Requeued", "the job to be released")
    assert terms(pod_set(store)) is None
    store.before_write = lambda path: None
    async with serving(store, SETTINGS) as again:
        kueue(again, {T4: 64, H100: 64})
        again.cache.put_object(store.now())
        await until(lambda: terms(pod_set(store)) == wants(H100, T4), "the Workload to be widened")
        assert again.metrics.registry.get_sample_value("tilecast_requeued_total") == 0


async def test_a_kind_whose_jobs_are_fixed_once_they_ran_stays_as_it_is() -> None:
    store = JobStore()
    async with serving(store, SETTINGS) as running:
        kueue(running, {T4: 64, H100: 64})
        await placed(store, running)
        store.refuse = [ApiError(422, "field is immutable")] * 3
        await until(lambda: not store.refuse, "it to be tried")
        await until(lambda: store.annotations()[APPLIED] == "Requeued", "it to be released")


@pytest.mark.slow
async def test_the_trainingjob_that_names_it_says_so() -> None:
    store = JobStore()
    owner = training_job("for-a", mode="Initial")
    async with serving(store, SETTINGS) as running:
        kueue(running, {T4: 64, H100: 64})
        path = "/apis/tilecast.dev/v1alpha1/namespaces/default/trainingjobs/for-a"
        running.cache.put_object(store.put(path, owner))
        await placed(store, running)

        def applied() -> Any:
            conditions = store.objects[path].get("status", {}).get("conditions", ())
            return next((item for item in conditions if item["type"] == "Applied"), {})

        await until(lambda: applied().get("reason") == "Requeued", "the condition")
        assert applied()["status"] == "False" and "may run on" in applied()["message"]
        assert ready(store.objects[path])["status"] == "True"


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_choice_is_taken_out_of_every_kind(name: str, newer: bool) -> None:
    document = example(name)
    job = read_job(document)
    put = Placement({PRODUCT: H100, ARCH: "amd64"})
    marks = ["kubernetes.io/arch"]
    chosen = patched(
        document,
        patches.make_placing_patch(document, compute_changes(document, job, put, has_runtime_patches=newer), marks),
    )
    after = read_job(chosen)
    assert after.workers[0].node_selector.items() >= put.node_selector.items()
    kind = JOB_KINDS[document["kind"]]
    released = patched(chosen, patches.make_unplacing_patch(chosen, kind.remove_placement(chosen, after)))
    left = read_job(released)
    assert not left.workers[0].node_selector.keys() & put.node_selector.keys()
    assert [pods.node_selector for pods in left.workers] == [
        pods.node_selector for pods in remove_advised_selector(after).workers
    ]
    assert [pods.tolerations for pods in left.workers] == [pods.tolerations for pods in after.workers]
    assert (left.gpus, left.annotations[APPLIED]) == (job.gpus, "Requeued")
    assert CHOSEN_LABELS not in left.annotations and kind.remove_placement(released, left) == []
