"""Jobs of other kinds over time, without a cluster: what is said once, and when jobs are released."""

from __future__ import annotations

import asyncio
import copy
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from job_store import H100, JOBS, PLACING, WORKLOADS, JobStore, serving, until
from operator_store import TIMINGS
from tilecast.advice import Advice, Request, advise
from tilecast.hardware import Pool
from tilecast.jobs import ADMISSION_GATES, APPLIED, MODEL, NEXT_QUEUE, QUEUE
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.kinds import Key
from tilecast_operator.objects.documents import ADVICE_KEYS, HASH, POOL


@pytest.mark.slow
async def test_a_suspended_job_is_placed_annotated_and_let_go() -> None:
    store = JobStore()
    async with serving(store) as running:
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and store.annotations()[POOL] == "h100-sxm"
        assert store.now()["spec"]["suspend"] is False
        assert store.now()["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H100}
        assert store.patches == [f"{JOBS}/a"] * 2, "placed, then let go"
        await until(lambda: store.events, "an Event")
        assert [reason for reason, _ in store.events_seen()] == ["Placed"]


async def test_a_workload_that_comes_late_is_waited_for() -> None:
    store = JobStore()
    async with serving(store) as running:
        running.cache.put_object(job := store.job("job-gated"))
        await asyncio.sleep(0.05)
        assert ADMISSION_GATES in store.annotations() and not store.patches
        store.workload(job)
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        (workload,) = store.workloads.values()
        assert workload["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H100}
        assert store.patches[0].startswith(WORKLOADS), "the Workload alone contradicts nothing"
        assert store.now()["spec"]["suspend"] is True, "Kueue resumes it"


async def test_a_workload_that_does_not_come_will_be_made_of_the_job_as_placed() -> None:
    store = JobStore()
    settings, timings = replace(PLACING, kueue_admission_gate="present"), replace(TIMINGS, workload_s=0.1)
    async with serving(store, settings, timings=timings) as running:
        running.cache.put_object(store.job("job-gated"))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Queued" and ADMISSION_GATES not in store.annotations()
        assert store.now()["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H100}


async def let_go(store: JobStore, running: OperatorParts, name: str) -> str:
    """Return the outcome of an example with a Workload, once it is released."""
    body = store.job(name)
    running.cache.put_object(body)
    store.workload(body)
    await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
    return store.annotations()[APPLIED]


@pytest.mark.parametrize("name", ["job-gated", "job-kueue"])
@pytest.mark.slow
async def test_a_queued_job_is_said_to_be_placed_once_kueue_has_admitted_it(name: str) -> None:
    store = JobStore()
    async with serving(store) as running:
        assert await let_go(store, running, name) == "Queued"
        assert store.now()["metadata"]["labels"][QUEUE] == "team" and NEXT_QUEUE not in store.annotations()
        await until(lambda: not store.events, "nothing to be said")
        store.admit(running)
        await until(lambda: store.annotations()[APPLIED] == "Placed", "the job to be placed")
        await until(lambda: store.events, "an Event")
        ((reason, text),) = store.events_seen()
        assert reason == "Placed" and text.startswith("placed on h100-sxm") and POOL in store.annotations()


async def test_a_job_that_kueue_gives_up_is_not_said_to_be_placed() -> None:
    store = JobStore()
    async with serving(store, timings=replace(TIMINGS, look_first_s=0.02)) as running:
        assert await let_go(store, running, "job-gated") == "Queued"
        store.decide("Finished", message="the selectors contradict")
        await until(lambda: store.annotations()[APPLIED] == "FailedToStart", "it to be told")
        await until(lambda: store.events, "an Event")
        ((reason, text),) = store.events_seen()
        assert reason == "NotPlaced" and "FailedToStart: " in text and "the selectors contradict" in text


@pytest.mark.slow
async def test_a_node_choice_that_somebody_took_back_is_not_said_to_be_placed() -> None:
    store = JobStore()
    async with serving(store) as running:
        assert await let_go(store, running, "job-gated") == "Queued"
        body = copy.deepcopy(store.now())
        body["spec"]["template"]["spec"]["nodeSelector"] = {}
        store.put(f"{JOBS}/a", body)
        store.admit(running)
        await until(lambda: store.annotations()[APPLIED] == "ChangedSince", "it to be told")


async def test_what_became_of_a_job_is_told_by_the_operator_that_starts_next() -> None:
    store = JobStore()
    async with serving(store) as running:
        assert await let_go(store, running, "job-kueue") == "Queued"
    body = copy.deepcopy(store.now())
    body["spec"]["suspend"] = False
    body["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    store.decide("Admitted")
    async with serving(store) as again:
        again.cache.put_object(store.put(f"{JOBS}/a", body))
        await until(lambda: store.annotations()[APPLIED] == "Placed", "the job to be placed")


@pytest.mark.parametrize(
    ("name", "gate", "queues", "decided", "outcome", "words"),
    [
        ("job-gated", None, {}, "", "AdmissionGateOff", f"AdmissionGatedBy is off, .*{QUEUE}: tilecast-hold"),
        ("job-gated", ApiError(500, "busy"), {}, "", "AdmissionGateUnknown", "jobs.kueue.admissionGate=present"),
        ("job-gated", ApiError(403, "no"), {}, "QuotaReserved", "QuotaReserved", "Kueue had decided"),
        ("job-kueue", None, {"tilecast-hold": {}}, "", "QueueNotHeld", "stopPolicy: Hold"),
        ("job-kueue", None, {"tilecast-hold": {"stopPolicy": "None"}}, "", "QueueNotHeld", "stopPolicy: Hold"),
        ("job-kueue", None, {}, "QuotaReserved", "QuotaReserved", "Kueue had decided"),
    ],
)
@pytest.mark.slow
async def test_a_job_that_kueue_may_admit_is_let_go_as_it_is(
    name: str, gate: ApiError | None, queues: dict[str, Any], decided: str, outcome: str, words: str
) -> None:
    store = JobStore()
    store.gate, store.queues = gate, queues
    async with serving(store) as running:
        body = store.job(name)
        store.workload(body)
        if decided:
            store.decide(decided)
        running.cache.put_object(body)
        await until(lambda: any(reason == "NotPlaced" for reason, _ in store.events_seen()), "an Event")
        assert store.annotations()[APPLIED] == outcome and store.now()["metadata"]["labels"][QUEUE] == "team"
        assert store.now()["spec"] == body["spec"] and not any(path.startswith(WORKLOADS) for path in store.patches)
        assert any(re.search(words, text) for _, text in store.events_seen())


@pytest.mark.parametrize(
    "queues", [{}, {"tilecast-hold": {"stopPolicy": "Hold"}}, {"tilecast-hold": {"stopPolicy": "HoldAndDrain"}}]
)
async def test_a_held_queue_needs_no_gate(queues: dict[str, Any]) -> None:
    store = JobStore()
    store.gate, store.queues = None, queues
    async with serving(store, replace(PLACING, kueue_admission_gate="absent")) as running:
        assert await let_go(store, running, "job-kueue") == "Queued"


async def test_a_gate_that_is_said_to_be_absent_is_not_asked_about() -> None:
    store = JobStore()
    async with serving(store, replace(PLACING, kueue_admission_gate="absent")) as running:
        assert await let_go(store, running, "job-gated") == "AdmissionGateOff"


async def test_what_kueue_can_do_is_told_at_the_start_and_when_it_changes() -> None:
    store = JobStore()
    settings = replace(PLACING, read_kueue=True, watch_check_s=0.02)
    async with serving(store, settings) as running:

        def shown(gate: str) -> bool:
            labels = f'gate="{gate}",release="0.18.2",served="v1beta2",stop_policy="true"'
            return f"tilecast_kueue_info{{{labels}}} 1.0" in generate_latest(running.metrics.registry).decode()

        await until(lambda: shown("unknown"), "the metric")
        store.workload(store.job("job-gated"))
        await until(lambda: shown("present"), "the metric")
        store.gate = None
        await until(lambda: shown("absent"), "the metric")
        await until(lambda: len(store.events) == 3, "Events")
        assert {item["involvedObject"]["name"] for item in store.events.values()} == {"workloads.kueue.x-k8s.io"}
        assert any(
            "Kueue 0.18.2 (v1beta2): the feature gate AdmissionGatedBy is off" in text
            for _, text in store.events_seen()
        )
        store.has_kueue = False
        await until(lambda: b"tilecast_kueue_info{" not in generate_latest(running.metrics.registry), "it to go")


@pytest.mark.slow
async def test_a_job_is_placed_even_if_what_kueue_can_do_cannot_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore()

    async def refuse(path: str, document: Any, **options: Any) -> dict[str, Any]:
        raise ApiError(429, "too many requests")

    async with serving(store) as running:
        await running.kueue.check_features()
        monkeypatch.setattr(store, "create", refuse)
        assert await let_go(store, running, "job-gated") == "Queued"


async def test_without_kueue_a_gated_job_waits_for_no_workload() -> None:
    store = JobStore()
    store.has_kueue = False
    async with serving(store) as running:
        running.cache.put_object(store.job("job-gated"))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and ADMISSION_GATES not in store.annotations()


async def test_a_search_that_does_not_end_holds_no_job() -> None:
    store, ended = JobStore(), threading.Event()

    def slow(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            ended.wait(10)
        return advise(asked, pools)

    async with serving(store, advisor=slow, timings=replace(TIMINGS, decide_s=0.2)) as running:
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "TooLate" and store.now()["spec"]["suspend"] is False
        assert "nodeSelector" not in store.now()["spec"]["template"]["spec"]
        ended.set()


async def test_a_search_that_fails_holds_no_job() -> None:
    def broken(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name == "warm-up":
            return advise(asked, pools)
        raise ZeroDivisionError

    store = JobStore()
    async with serving(store, advisor=broken) as running:
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "InternalError" and store.now()["spec"]["suspend"] is False


async def test_a_refused_choice_holds_no_job() -> None:
    store = JobStore()
    store.refuse = [ApiError(422, "the webhook says no")]
    async with serving(store) as running:
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Refused"
        await until(lambda: store.events, "an Event")
        assert any("the webhook says no" in text for _, text in store.events_seen())


@pytest.mark.slow
async def test_an_api_server_that_comes_and_goes_is_asked_again() -> None:
    store = JobStore()
    store.refuse = [ApiError(422, "no"), ApiError(500, "gone"), ApiError(429, "slower"), ApiError(503, "gone")]
    async with serving(store) as running:
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.patches == [f"{JOBS}/a"]


async def test_a_job_that_is_placed_and_not_annotated_is_placed_all_the_same() -> None:
    store = JobStore()
    store.faults = [ApiError(500, "gone")]
    async with serving(store) as running:
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and store.now()["spec"]["template"]["spec"]["nodeSelector"]
        await until(lambda: POOL in store.annotations(), "the annotations")


async def test_an_edit_meanwhile_is_decided_about_anew() -> None:
    store = JobStore()
    edits = iter(("first", "second"))

    def edit(path: str) -> None:
        turn = next(edits, None)
        if turn is not None:
            job = copy.deepcopy(store.now())
            job["metadata"]["labels"]["turn"] = turn
            job["metadata"]["annotations"][MODEL] = "vgg-16" if turn == "first" else "resnet-50"
            store.put(path, job)

    store.before_write = edit
    async with serving(store) as running:
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and store.now()["metadata"]["labels"]["turn"] == "second"


async def test_a_job_that_is_deleted_meanwhile_is_forgotten() -> None:
    store = JobStore()
    store.before_write = lambda path: store.objects.clear()
    async with serving(store) as running:
        running.cache.put_object(body := store.job())
        await until(lambda: not holds(running, body), "the task to end")
        assert store.patches == [] and store.events == {}


def holds(running: OperatorParts, body: dict[str, Any]) -> bool:
    """Return whether a decision about a job is under way."""
    return running.admission.is_deciding(Key.from_object(body), body["metadata"]["uid"])


@pytest.mark.slow
async def test_two_operators_let_a_job_go_once() -> None:
    store, bodies = JobStore(), list[dict[str, Any]]()
    async with serving(store) as one, serving(store) as two:
        for number in range(20):
            bodies.append(store.job(new_name=f"j{number}"))
            one.cache.put_object(bodies[-1])
            two.cache.put_object(copy.deepcopy(bodies[-1]))
        await until(lambda: all(store.annotations(f"j{n}").get(APPLIED) for n in range(20)), "all jobs to be let go")
        await until(lambda: not any(holds(each, body) for each in (one, two) for body in bodies), "both to be done")
        assert all(store.annotations(f"j{n}")[APPLIED] == "Placed" for n in range(20))
        counted = {path: store.patches.count(path) for path in store.patches}
        assert set(counted.values()) == {2}, "placed once, let go once"


async def test_what_another_operator_said_meanwhile_of_a_job_stays() -> None:
    store, is_told = JobStore(), False

    def tell(path: str) -> None:
        """Release the job and record its outcome as the other operator, once its node selection is written."""
        nonlocal is_told
        if is_told or path != f"{JOBS}/a" or not store.now()["spec"]["template"]["spec"].get("nodeSelector"):
            return
        is_told, job = True, copy.deepcopy(store.now())
        del job["metadata"]["annotations"][ADMISSION_GATES]
        said = {POOL: "h100-sxm", APPLIED: "Placed"}
        job["metadata"]["annotations"] |= said
        job["spec"]["suspend"] = False
        store.applied[path] = set(said)
        store.put(path, job)

    store.before_write = tell
    async with serving(store) as running:
        running.cache.put_object(body := store.job("job-gated"))
        store.workload(body)
        await until(lambda: is_told and not holds(running, body), "the decision to end")
        assert store.annotations()[APPLIED] == "Placed" and store.annotations()[POOL] == "h100-sxm"
        assert store.patches.count(f"{JOBS}/a") == 1, "placed, and let go by the other"


async def test_a_job_that_was_let_go_and_suspended_again_is_left_alone() -> None:
    store = JobStore()
    async with serving(store) as running:
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        again = copy.deepcopy(store.now())
        again["spec"]["suspend"] = True
        running.cache.put_object(store.put(f"{JOBS}/a", again))
        running.cache.put_object(store.job(new_name="b"))
        await until(lambda: store.annotations("b").get(APPLIED), "another job to be let go")
        assert store.now()["spec"]["suspend"] is True


async def test_without_leave_to_place_a_job_is_let_go_as_it_is() -> None:
    store = JobStore()
    async with serving(store, replace(PLACING, place=False)) as running:
        before = store.job()
        running.cache.put_object(before)
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "NotAllowed"
        assert store.now()["spec"] == {**before["spec"], "suspend": False}


async def test_advice_is_said_once_and_taken_back() -> None:
    store = JobStore()
    async with serving(store) as running:
        running.cache.put_object(store.job(mode=None))
        await until(lambda: HASH in store.annotations(), "the annotations")
        await until(lambda: store.events, "an Event")
        durations = ("tilecast_answer_duration_seconds_count", {"kind": "Job"})
        assert running.metrics.registry.get_sample_value(*durations) == 1
        writes = len(store.writes)
        for _ in range(3):
            job = copy.deepcopy(store.now())
            job["metadata"]["labels"]["seen"] = str(store.version)
            running.cache.put_object(store.put(f"{JOBS}/a", job))
            await until(lambda: not len(running.runtime.queue), "the queue to be empty")
        await asyncio.sleep(0.05)
        assert len(store.writes) == writes and len(store.events) == 1 and store.patches == []
        assert running.metrics.registry.get_sample_value(*durations) == 1, "what is said already is no answer"
        job = copy.deepcopy(store.now())
        job["metadata"]["annotations"]["tilecast.dev/mode"] = "Off"
        running.cache.put_object(store.put(f"{JOBS}/a", job))
        await until(lambda: not set(ADVICE_KEYS) & set(store.annotations()), "the annotations to go")
        assert MODEL in store.annotations()


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"model": None}, "tilecast.dev/model: is missing, and the command does not say it"),
        ({"training": "{"}, "tilecast.dev/training: '{' is no JSON mapping"),
        ({"model": "resnet-5"}, "tilecast.dev/model.preset: unknown model 'resnet-5'; did you mean"),
        ({"mode": "Auto"}, "tilecast.dev/mode: 'Auto' is no mode; use one of Off, Advise, Initial"),
    ],
)
@pytest.mark.slow
async def test_a_wrong_annotation_is_told_in_an_event(annotations: dict[str, str | None], words: str) -> None:
    store = JobStore()
    async with serving(store) as running:
        running.cache.put_object(store.job(**{"mode": None, **annotations}))
        await until(lambda: store.events, "an Event")
        ((reason, text),) = store.events_seen()
        assert reason == "RecommendationUnavailable" and words in text
        assert not set(ADVICE_KEYS) & set(store.annotations()) and store.now()["spec"]["suspend"] is True


async def test_a_namespace_s_label_asks_for_all_its_jobs() -> None:
    store = JobStore()
    async with serving(store) as running:
        body = store.job(mode=None)
        body["metadata"]["labels"] = {}
        running.cache.put_object(store.put(f"{JOBS}/a", body))
        await asyncio.sleep(0.05)
        assert HASH not in store.annotations()
        running.cache.put_object(
            {"kind": "Namespace", "metadata": {"name": "default", "labels": {"tilecast.dev/enabled": "true"}}}
        )
        await until(lambda: HASH in store.annotations(), "the annotations")
