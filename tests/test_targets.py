"""TrainingJobs that name another job, and the course of jobs over time, without a cluster."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from job_store import EXAMPLES, H100, JOBS, PLACING, JobStore, serving, training_job, until
from operator_store import JOBS as TRAINING_JOBS
from operator_store import TIMINGS, node, operator, settled
from tilecast.advice import Advice, Request, advise
from tilecast.api import documents
from tilecast.hardware import Pool
from tilecast.jobs import ADMISSION_GATES, ADVISOR, APPLIED, MODE
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.times import format_time
from tilecast_operator.objects.documents import HASH


@pytest.mark.slow
async def test_the_oldest_training_job_speaks_for_a_job() -> None:
    store = JobStore()
    async with serving(store) as running:
        running.cache.put_object(store.job(mode=None, model=None))
        first, second = training_job("z-first"), training_job("a-second", "2026-01-01T00:00:01Z")
        running.cache.put_object(store.put(f"{TRAINING_JOBS}/z-first", first))
        running.cache.put_object(store.put(f"{TRAINING_JOBS}/a-second", second))
        mine = await running.targets.find_target(Key("TrainingJob", "default", "z-first"), first)
        theirs = await running.targets.find_target(Key("TrainingJob", "default", "a-second"), second)
        assert mine is not None and isinstance(mine.answer, Advice) and mine.name == "Job/a"
        assert theirs is not None and not isinstance(theirs.answer, Advice)
        assert theirs.answer.reason == "TargetConflict" and "z-first names Job a too" in theirs.answer.message
        await until(lambda: reason(store, "a-second") == "TargetConflict", "the conflict to be said")
        running.cache.remove_object(store.objects.pop(f"{TRAINING_JOBS}/z-first"))
        await until(lambda: reason(store, "a-second") == "Advised", "the other's turn")
        assert (
            await running.targets.find_target(Key("TrainingJob", "default", "x"), training_job("x", targetRef=None))
            is None
        )


def reason(store: JobStore, name: str) -> str | None:
    """Return the reason in the summary of a TrainingJob."""
    job = store.objects[f"{TRAINING_JOBS}/{name}"].get("status", {}).get("summary", {}).get("reason")
    return None if job is None else str(job)


@pytest.mark.slow
async def test_a_target_that_is_not_there_is_told_apart_from_a_kind_that_is_not() -> None:
    store = JobStore()
    async with serving(store) as running:
        request = training_job("x")
        running.cache.put_object(request)
        target = await running.targets.find_target(Key("TrainingJob", "default", "x"), request)
        assert (
            target is not None and target.applied.reason == "TargetNotFound" and "create it" in target.applied.message
        )
        store.groups.clear()
        target = await running.targets.find_target(Key("TrainingJob", "default", "x"), request)
        assert target is not None and target.applied.reason == "TargetKindNotInstalled"
        assert "this cluster has no Job of batch/v1; install its controller" in target.applied.message


async def test_a_gated_job_waits_a_while_for_the_training_job_that_names_it() -> None:
    store = JobStore()
    async with serving(store, timings=replace(TIMINGS, poll_s=0.01)) as running:
        job = store.job("job-gated", mode=None, model=None, training=None)
        job["metadata"]["labels"].pop("tilecast.dev/enabled")
        running.cache.put_object(job := store.put(f"{JOBS}/a", job))
        store.workload(job)
        await asyncio.sleep(0.05)
        assert ADVISOR in store.annotations()[ADMISSION_GATES]
        running.cache.put_object(training_job("x", mode="Initial"))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Queued"
    async with serving(store, timings=replace(TIMINGS, poll_s=0.01, owner_s=0.05)) as running:
        other = store.job("job-gated", "b", mode=None, model=None, training=None)
        other["metadata"]["labels"].pop("tilecast.dev/enabled")
        running.cache.put_object(store.put(f"{JOBS}/b", other))
        await until(lambda: store.annotations("b").get(APPLIED), "the other job to be let go")
        assert store.annotations("b")[APPLIED] == "NotAsked" and MODE not in store.annotations("b")


async def test_the_end_of_a_job_is_not_that_of_the_next_of_its_name() -> None:
    store = JobStore()
    async with serving(store) as running:
        first = store.job()
        del store.objects[f"{JOBS}/a"]
        running.cache.put_object(store.job())
        running.cache.remove_object(first)
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed"


async def test_nothing_is_kept_of_training_jobs_that_are_gone() -> None:
    async with serving(JobStore()) as running:
        for number in range(20):
            request = training_job(
                f"x{number}", targetRef={"apiVersion": "batch/v1", "kind": "Job", "name": f"a{number}"}
            )
            running.cache.put_object(request)
            running.cache.remove_object(request)
        assert list(running.requests) == []


async def test_the_next_job_of_a_name_is_held_and_let_go_on_its_own() -> None:
    store = JobStore()

    def replace_it(path: str) -> None:
        """Replace the job when the first one is about to be released."""
        if store.patches:
            store.before_write = lambda path: None
            del store.objects[f"{JOBS}/a"]
            store.job()

    store.before_write = replace_it
    async with serving(store) as running:
        first = store.job()["metadata"]["uid"]
        running.cache.put_object(copy.deepcopy(store.now()))
        await until(
            lambda: store.now()["metadata"]["uid"] != first and store.annotations().get(APPLIED),
            "the next to be let go",
        )
        assert store.annotations()[APPLIED] == "Placed"
        assert store.now()["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H100}
        assert store.patches == [f"{JOBS}/a"] * 3, "the first placed; the second placed and let go"


async def test_a_gate_that_comes_while_advice_is_written_is_seen() -> None:
    store = JobStore()

    def gate(path: str) -> None:
        store.before_write = lambda path: None
        job = copy.deepcopy(store.now())
        job["metadata"]["annotations"][MODE] = "Initial"
        store.put(path, job)  # its event never comes, because a newer state is known by then

    store.before_write = gate
    async with serving(store) as running:
        running.cache.put_object(store.job(mode=None))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and store.now()["spec"]["suspend"] is False


@pytest.mark.slow
async def test_a_gated_job_that_cannot_be_read_is_let_go() -> None:
    store = JobStore()
    async with serving(store) as running:
        job = store.job("jobset")
        job["metadata"]["annotations"] |= {ADMISSION_GATES: ADVISOR, MODE: "Initial"}
        del job["spec"]["replicatedJobs"]
        path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/a"
        running.cache.put_object(store.put(path, job))
        await until(lambda: ADMISSION_GATES not in store.objects[path]["metadata"]["annotations"], "the gate to go")
        assert store.objects[path]["metadata"]["annotations"][APPLIED] == "InvalidSpec"


@pytest.mark.parametrize("status", [{"succeeded": 1}, {"failed": 1}])
async def test_a_job_that_has_run_is_not_placed_nor_resumed(status: dict[str, int]) -> None:
    store = JobStore()
    async with serving(store) as running:
        body = store.job(new_name="ran")
        body["status"] = status
        before = store.put(f"{JOBS}/ran", body)
        running.cache.put_object(before)
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "another job to be let go")
        assert store.now("ran")["spec"] == before["spec"]


async def test_a_decision_that_comes_late_is_not_begun_to_be_written() -> None:
    store = JobStore()

    def slow(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            time.sleep(0.3)
        return advise(asked, pools)

    async with serving(store, advisor=slow, timings=replace(TIMINGS, decide_s=0.05)) as running:
        running.cache.put_object(job := store.job("job-gated"))
        store.workload(job)
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "TooLate"
        assert "nodeSelector" not in store.now()["spec"]["template"]["spec"]


def train_job(store: JobStore, **changes: Any) -> dict[str, Any]:
    (document,) = documents.load_documents((EXAMPLES / "existing" / "trainjob.yaml").read_text())
    document["metadata"] |= {"name": "a", "namespace": "default", "labels": {}}
    document["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    document["metadata"]["annotations"] = changes.pop("annotations", {})
    document["spec"]["suspend"] = changes.pop("suspend", True)
    return store.put(TRAIN_JOB, {**document, **changes})


TRAIN_JOB = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/a"
REQUEST = f"{TRAINING_JOBS}/x"


def targeted() -> JobStore:
    """Return a store with a suspended TrainJob, and the TrainingJob that names it."""
    store = JobStore()
    train_job(store)
    body = training_job("x", model={"preset": "gpt2"}, training={"sequenceLength": 512, "globalBatchSize": 16})
    body["spec"]["targetRef"] = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "a"}
    store.put(REQUEST, body)
    return store


def operating(store: JobStore) -> AbstractAsyncContextManager[OperatorParts]:
    return operator(store, advise, [node(f"n{number}") for number in range(4)], jobs=True)


async def shown(
    running: OperatorParts, store: JobStore, holds: Callable[[dict[str, Any]], object], what: str
) -> dict[str, Any]:
    """Show the operator the store's objects until `holds` is true of the TrainingJob's status, and return that."""
    for _ in range(300):
        for body in [copy.deepcopy(item) for item in store.objects.values()]:
            running.cache.put_object(body)
        await settled(running, 60)
        job: dict[str, Any] = store.objects[REQUEST].get("status", {})
        if holds(job):
            return job
        await asyncio.sleep(0.02)
    pytest.fail(f"waited in vain for {what}")


@pytest.mark.slow
async def test_a_train_job_s_own_metrics_are_scored_once_each() -> None:
    store = targeted()

    def tells(seconds: float, loss: str) -> None:
        metrics = [{"name": "loss", "value": loss}, {"name": "step_time_seconds", "value": f"{seconds:g}"}]
        train_job(store, suspend=False, status={"trainerStatus": {"metrics": metrics}})

    async with operating(store) as running:
        answer = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        forecast_s = answer["recommendation"]["stepSeconds"]["target"]
        for seconds, loss in ((forecast_s / 1.25, "3"), (forecast_s / 1.25, "2"), (forecast_s, "1")):
            tells(seconds, loss)
            await shown(running, store, lambda status: status.get("observed"), "a score")
        answer = await shown(running, store, lambda status: status["observed"]["samples"] == 2, "the second step")
        assert answer["observed"]["source"] == "trainJob" and answer["forecast"]["pool"] == "h100-sxm"
    writes = len(store.writes)
    async with operating(store) as again:
        answer = await shown(again, store, lambda status: True, "nothing")
        assert answer["observed"]["samples"] == 2 and len(store.writes) == writes, "a restart learns nothing new"
        tells(-1, "0")
        await shown(again, store, lambda status: True, "nothing")
        refused = generate_latest(again.metrics.registry).decode()
        assert 'tilecast_observations_total{outcome="invalid",source="trainJob"} 1.0' in refused


@pytest.mark.slow
async def test_a_train_job_s_own_progress_corrects_its_forecast_without_an_annotation() -> None:
    store = targeted()

    def tells(step: int, at_s: float) -> None:
        metrics = [{"name": "current_step", "value": f"{step}"}, {"name": "total_steps", "value": "1000000"}]
        trainer = {
            "lastUpdatedTime": format_time(1.8e9 + at_s), "progressPercentage": step // 10_000, "metrics": metrics
        }  # fmt: skip
        train_job(store, suspend=False, status={"trainerStatus": trainer, "jobsStatus": RUNNING})

    async with operating(store) as running:
        answer = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        forecast_s = answer["recommendation"]["stepSeconds"]["target"]
        train_job(store, suspend=False, status={"jobsStatus": RUNNING})
        answer = await shown(running, store, lambda status: observations(status, "TrainJobStatus"), "the missing gate")
        for step in (0, 40_000, 100_000):
            tells(step, step * forecast_s / 1.25 + 5000)
            answer = await shown(running, store, lambda status: True, "nothing")
            assert "observed" not in answer
        far = 100_000 + int(60 / forecast_s)
        tells(far, 5000 + far * forecast_s / 1.25)
        answer = await shown(running, store, lambda status: status.get("observed"), "a score")
        assert answer["observed"]["source"] == "trainJobProgress"
        assert answer["observed"]["stepSeconds"] == pytest.approx(forecast_s / 1.25, rel=0.03)
        assert answer["observed"]["roundingRatio"] < 0.03
        assert answer["error"]["rawRatio"] == pytest.approx(0.25, abs=0.04)


RUNNING = [{"name": "node", "active": 1, "failed": 0, "ready": 1, "succeeded": 0, "suspended": 0}]


def observations(status: dict[str, Any], text: str) -> bool:
    """Return whether the condition ObservationsAvailable mentions a text."""
    found = [item for item in status.get("conditions", []) if item["type"] == "ObservationsAvailable"]
    return any(text in item["message"] for item in found)


async def test_an_annotation_on_the_job_itself_is_a_report() -> None:
    store = targeted()
    async with operating(store) as running:
        answer = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        text = f"{answer['recommendation']['stepSeconds']['target'] / 1.1:.6g}"
        train_job(store, suspend=False, annotations={"tilecast.dev/observed-step-seconds": text})
        answer = await shown(running, store, lambda status: status.get("observed"), "a score")
        assert answer["observed"]["source"] == "annotation" and answer["error"]["rawRatio"] == pytest.approx(
            0.1, abs=1e-3
        )
        train_job(store, suspend=False)
        await shown(running, store, lambda status: "observed" not in status, "it to be taken back")


async def test_a_forecast_is_frozen_once_its_target_has_started_and_stands_when_that_is_gone() -> None:
    store = targeted()
    async with operating(store) as running:
        answer = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        assert "forecast" not in answer
        train_job(store, suspend=False)
        answer = await shown(running, store, lambda status: "forecast" in status, "the forecast to freeze")
        for number in range(4, 12):
            running.cache.put_object(node(f"n{number}"))
        await shown(running, store, lambda status: True, "nothing")
        gone = store.objects.pop(TRAIN_JOB)
        running.cache.remove_object(gone)
        await settled(running, 60)
        after = await shown(running, store, lambda status: True, "nothing")
        assert (after["recommendation"], after["forecast"]) == (answer["recommendation"], answer["forecast"])
        train_job(store)
        await shown(running, store, lambda status: "forecast" not in status, "the next job's own forecast")


async def test_a_job_that_ends_before_its_advice_could_be_written_is_advised_all_the_same() -> None:
    """This happens on a loaded machine: a webhook does not answer in time, and a short job does not wait for it."""
    store = JobStore()
    body = store.job(mode=None)
    body["spec"]["suspend"] = False

    def end(path: str) -> None:
        """Refuse the first write, and let the job end meanwhile."""
        store.before_write = lambda path: None
        done = copy.deepcopy(store.now())
        done["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        running.cache.put_object(store.put(path, done))
        store.faults = [ApiError(500, "the webhook does not answer")]

    async with serving(store) as running:
        store.before_write = end
        running.cache.put_object(store.put(f"{JOBS}/a", body))
        await until(lambda: HASH in store.annotations(), "the annotations")
        await until(lambda: not len(running.cache.jobs), "the job to be forgotten")


@pytest.mark.slow
async def test_a_job_that_ends_while_it_waits_for_a_worker_is_advised_all_the_same() -> None:
    store, go_on = JobStore(), threading.Event()

    def slow(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            go_on.wait(10)
        return advise(asked, pools)

    models = ("resnet-18", "resnet-50", "resnet-101", "vgg-16")
    async with serving(store, replace(PLACING, writers=1), slow) as running:
        for name, model in zip("abcd", models, strict=True):
            running.cache.put_object(store.job(new_name=name, mode=None, model=model))
        await asyncio.sleep(0.1)
        for name in "abcd":
            done = copy.deepcopy(store.now(name))
            done["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
            running.cache.put_object(store.put(f"{JOBS}/{name}", done))
        go_on.set()
        await until(lambda: all(HASH in store.annotations(name) for name in "abcd"), "the annotations")


@pytest.mark.slow
async def test_a_job_that_had_ended_when_it_was_first_seen_is_left_alone() -> None:
    store = JobStore()
    async with serving(store) as running:
        body = store.job(mode=None)
        body["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        running.cache.put_object(store.put(f"{JOBS}/a", body))
        running.cache.put_object(store.job(mode=None, new_name="b"))
        await until(lambda: HASH in store.annotations("b"), "the advice on the other")
        assert HASH not in store.annotations() and len(running.cache.jobs) == 1


@pytest.mark.slow
async def test_a_job_is_advised_as_soon_as_its_queue_is_there() -> None:
    store = JobStore()
    async with serving(store, replace(PLACING, read_kueue=True, config_map_poll_s=3600.0)) as running:
        running.cache.put_object(store.job("job-gated", mode=None, **{"admission-gated-by": None}))
        await until(lambda: "QueueNotFound" in str(store.events_seen()), "the queue to be missed")
        quota = [{"name": "nvidia.com/gpu", "nominalQuota": 64}]
        group = {"coveredResources": ["nvidia.com/gpu"], "flavors": [{"name": "any", "resources": quota}]}
        name = store.now()["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        for kind, metadata, content in (
            ("ResourceFlavor", {"name": "any"}, {}),
            ("ClusterQueue", {"name": "everything"}, {"resourceGroups": [group]}),
            ("LocalQueue", {"name": name, "namespace": "default"}, {"clusterQueue": "everything"}),
        ):
            running.cache.put_object({"kind": kind, "metadata": metadata, "spec": content})
        await until(lambda: HASH in store.annotations(), "the annotations")


@pytest.mark.slow
async def test_new_queues_are_no_news_to_a_job_whose_queue_is_missing() -> None:
    store, settings = JobStore(), replace(PLACING, read_kueue=True, config_map_poll_s=3600.0)
    timings = replace(TIMINGS, owner_s=0.05)
    name = "kueue.x-k8s.io/queue-name"

    def events() -> list[str]:
        every = [item["message"] for item in store.events.values() if item["involvedObject"]["name"] == "a"]
        return [text for text in every if "QueueNotFound" in text]

    def add_queue(running: OperatorParts, queue: str) -> None:
        metadata = {"name": queue, "namespace": "default"}
        running.cache.put_object({"kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": "none"}})

    for start in range(2):
        async with serving(store, settings, timings=timings) as running:
            running.cache.put_object(store.job("job-gated", mode=None, **{"admission-gated-by": None}))
            await until(events, "the queue to be missed")
            for number in range(4):
                add_queue(running, f"other-{start}-{number}")
                await settled(running)
            assert len(events()) == 1, events()
            missing = str(store.now()["metadata"]["labels"][name])
    async with serving(store, settings, timings=timings) as running:
        add_queue(running, missing)
        running.cache.put_object(store.job("job-gated", mode=None, **{"admission-gated-by": None}))
        await until(lambda: len(events()) == 2, "the other state to be told")
        assert "names ClusterQueue none, which does not exist" in events()[1]


@pytest.mark.parametrize(("kind", "changed"), [("job-kueue", {}), ("job-gated", {}), ("job-kueue", {"model": None})])
@pytest.mark.slow
async def test_why_a_job_was_let_go_is_said_in_one_event(kind: str, changed: dict[str, str | None]) -> None:
    store, timings = JobStore(), replace(TIMINGS, owner_s=0.05)
    settings = replace(PLACING, read_kueue=True, config_map_poll_s=0.1)

    def about_it() -> list[tuple[str, str]]:
        events = (item for item in store.events.values() if item["involvedObject"]["kind"] == "Job")
        return [(item["reason"], item["message"]) for item in events if item["involvedObject"]["name"] == "a"]

    document = store.job(kind, **changed)
    store.workload(document)
    for _ in range(2):  # the second operator finds the job released
        async with serving(store, settings, timings=timings) as running:
            running.cache.put_object(store.now())
            await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
            running.cache.put_object(store.job(new_name="b", mode=None))
            await until(lambda: HASH in store.annotations("b"), "the advice on the next")
            await asyncio.sleep(0.5)
    why = "InvalidAnnotations: " if changed else "QueueNotFound: "
    ((reason, text),) = about_it()
    assert reason == "NotPlaced" and text.startswith(why)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.slow
async def test_tampered_annotations_of_a_job_are_repaired(started: bool, restart: bool) -> None:
    store = JobStore()

    def change(suspend: bool, **annotations: str) -> dict[str, Any]:
        body = copy.deepcopy(store.now())
        body["spec"]["suspend"] = suspend
        body["metadata"]["annotations"] |= {f"tilecast.dev/{key}": text for key, text in annotations.items()}
        (ours,) = body["metadata"]["managedFields"]
        for key in annotations:
            ours["fieldsV1"]["f:metadata"]["f:annotations"].pop(f"f:tilecast.dev/{key}")
        return store.put(f"{JOBS}/a", body)

    evil = {"recommended-pool": "evil", "recommended-gpus": "1"}
    async with serving(store) as running:
        running.cache.put_object(store.job(mode=None))
        await until(lambda: HASH in store.annotations(), "the annotations")
        intact = store.annotations()
        if started:
            running.cache.put_object(change(False))
            await settled(running)
        if not restart:
            running.cache.put_object(change(not started, **evil))
            await until(lambda: store.annotations() == intact, "them to be repaired")
    if restart:
        change(not started, **evil)
        async with serving(store) as again:
            again.cache.put_object(copy.deepcopy(store.now()))
            await until(lambda: store.annotations() == intact, "them to be repaired")
