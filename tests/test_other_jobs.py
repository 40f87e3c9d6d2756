"""Jobs of other kinds, over time: what is said once, what is let go, and when, without a cluster."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from operator_store import JOBS as TRAINING_JOBS
from operator_store import QUICK, Store, node, operator, patched, settled
from tilecast import nodes
from tilecast.advise import Advice, Request, advise
from tilecast.api import documents
from tilecast.hardware import Pool
from tilecast.jobs import ADMISSION_GATES, ADVISOR, APPLIED, JOB_KINDS, MODE, MODEL
from tilecast_operator.assembly import Assembly
from tilecast_operator.cluster.api import ApiError
from tilecast_operator.cluster.documents import ADVICE_KEYS, HASH, POOL
from tilecast_operator.cluster.kinds import Key
from tilecast_operator.controllers import admission
from tilecast_operator.metrics import Metrics
from tilecast_operator.settings import Settings

EXAMPLES = Path(__file__).parent.parent / "examples"
PLACING = replace(QUICK, jobs=True, place=True)
JOBS = "/apis/batch/v1/namespaces/default/jobs"
KUEUE = "/apis/kueue.x-k8s.io"
WORKLOADS = f"{KUEUE}/v1beta2/namespaces/default/workloads"
H100 = "NVIDIA-H100-80GB-HBM3"


class Jobs(Store):
    """A store that also takes JSON patches, and serves one Workload for each queued job."""

    def __init__(self) -> None:
        super().__init__()
        self.workloads: dict[str, dict[str, Any]] = {}
        self.has_kueue = True
        self.groups = {f"/apis/{kind.api_version}" for kind in JOB_KINDS.values()}
        self.patches: list[str] = []
        self.refuse: list[ApiError] = []

    async def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        await asyncio.sleep(0)
        self.before_write(path)
        if self.refuse:
            raise self.refuse.pop(0)
        table = self.workloads if path.startswith(WORKLOADS) else self.objects
        key = path.rpartition("/")[2] if table is self.workloads else path
        if key not in table:
            raise ApiError(404, "not found")
        found = table[key]
        if operations[0]["value"] != found["metadata"]["resourceVersion"]:
            raise ApiError(409, "changed")
        found = patched(found, operations)
        self.patches.append(path)
        if table is self.workloads:
            self.workloads[key] = found
            return found
        return self.put(path, found)

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        if path in self.objects:
            await asyncio.sleep(0)
            return copy.deepcopy(self.objects[path])
        if query and "limit" in query:
            return await super().get(path, query)
        if path == WORKLOADS:
            uid = query["labelSelector"].partition("=")[2]
            return {"items": [item for item in self.workloads.values() if item["metadata"]["labels"]["uid"] == uid]}
        if path == KUEUE and self.has_kueue:
            return {"preferredVersion": {"version": "v1beta2"}}
        if path in self.groups:
            return {"kind": "APIResourceList"}
        if path.startswith("/apis/"):
            raise ApiError(404, "not found")
        return await super().get(path, query)

    def job(self, name: str = "job", new_name: str = "a", **annotations: str | None) -> dict[str, Any]:
        """An example, stored; annotations by the last part of their key."""
        (document,) = documents.load((EXAMPLES / "existing" / f"{name}.yaml").read_text())
        document["metadata"] |= {"name": new_name, "namespace": "default", "creationTimestamp": "2026-01-01T00:00:00Z"}
        for key, value in annotations.items():
            document["metadata"]["annotations"].pop(f"tilecast.dev/{key}", None)
            if value is not None:
                document["metadata"]["annotations"][f"tilecast.dev/{key}"] = value
        return self.put(f"{JOBS}/{new_name}", document)

    def workload(self, job: Mapping[str, Any]) -> None:
        spec = {"podSets": [{"name": "main", "template": {"spec": {}}}]}
        meta = {"name": f"for-{job['metadata']['name']}", "labels": {"uid": job["metadata"]["uid"]}}
        self.workloads[meta["name"]] = {"metadata": {**meta, "resourceVersion": "1"}, "spec": spec}

    def now(self, name: str = "a") -> dict[str, Any]:
        return self.objects[f"{JOBS}/{name}"]

    def annotations(self, name: str = "a") -> dict[str, str]:
        return dict(self.now(name)["metadata"].get("annotations", {}))

    def told(self) -> list[tuple[str, str]]:
        return sorted((item["reason"], item["message"]) for item in self.events.values())


@asynccontextmanager
async def serving(
    store: Jobs,
    settings: Settings = PLACING,
    advisor: Callable[[Request, Sequence[Pool]], Advice] = advise,
) -> AsyncIterator[Assembly]:
    """An operator that knows the pools of the example cluster."""
    running = Assembly(settings, store, Metrics(), advisor)
    everyone, own, slices = nodes.parse((EXAMPLES / "clusters" / "mixed.yaml").read_text())
    assert not own and not slices
    store.node_count = len(everyone)
    for document in everyone:
        running.cache.see(document)
    running.start()
    await until(lambda: running.unready() is None, "the pools")
    try:
        yield running
    finally:
        await running.stop()


async def until(holds: Callable[[], object], what: str) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"waited in vain for {what}")


async def test_a_suspended_job_is_placed_annotated_and_let_go() -> None:
    store = Jobs()
    async with serving(store) as running:
        running.cache.see(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and store.annotations()[POOL] == "h100-sxm"
        assert store.now()["spec"]["suspend"] is False
        assert store.now()["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H100}
        assert store.patches == [f"{JOBS}/a"] * 2, "placed, then let go"
        await until(lambda: store.events, "an Event")
        assert [reason for reason, _ in store.told()] == ["Placed"]


async def test_a_workload_that_comes_late_is_waited_for() -> None:
    store = Jobs()
    async with serving(store) as running:
        running.cache.see(job := store.job("job-kueue"))
        await until(lambda: POOL in store.annotations(), "the job to be placed")
        await asyncio.sleep(0.05)
        assert ADMISSION_GATES in store.annotations()
        store.workload(job)
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        (workload,) = store.workloads.values()
        assert workload["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H100}
        assert store.now()["spec"]["suspend"] is True, "Kueue resumes it"


async def test_a_workload_that_does_not_come_will_be_made_of_the_job_as_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WORKLOAD_S", 0.1)
    store = Jobs()
    async with serving(store) as running:
        running.cache.see(store.job("job-kueue"))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and ADMISSION_GATES not in store.annotations()


async def test_without_kueue_a_gated_job_waits_for_no_workload() -> None:
    store = Jobs()
    store.has_kueue = False
    async with serving(store) as running:
        running.cache.see(store.job("job-kueue"))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and ADMISSION_GATES not in store.annotations()


async def test_a_search_that_does_not_end_holds_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HOLD_S", 0.2)
    store, ended = Jobs(), threading.Event()

    def slow(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            ended.wait(10)
        return advise(asked, pools)

    async with serving(store, advisor=slow) as running:
        running.cache.see(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "TooLate" and store.now()["spec"]["suspend"] is False
        assert "nodeSelector" not in store.now()["spec"]["template"]["spec"]
        ended.set()


async def test_a_search_that_fails_holds_no_job() -> None:
    def broken(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name == "warm-up":
            return advise(asked, pools)
        raise ZeroDivisionError

    store = Jobs()
    async with serving(store, advisor=broken) as running:
        running.cache.see(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "InternalError" and store.now()["spec"]["suspend"] is False


async def test_a_refused_choice_holds_no_job() -> None:
    store = Jobs()
    store.refuse = [ApiError(422, "the webhook says no")]
    async with serving(store) as running:
        running.cache.see(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Refused"
        await until(lambda: store.events, "an Event")
        assert any("the webhook says no" in text for _, text in store.told())


async def test_an_api_server_that_comes_and_goes_is_asked_again() -> None:
    store = Jobs()
    store.refuse = [ApiError(422, "no"), ApiError(500, "gone"), ApiError(429, "slower"), ApiError(503, "gone")]
    async with serving(store) as running:
        running.cache.see(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.patches == [f"{JOBS}/a"]


async def test_an_edit_meanwhile_is_decided_about_anew() -> None:
    store = Jobs()
    edits = iter(("first", "second"))

    def edit(path: str) -> None:
        turn = next(edits, None)
        if turn is not None:
            found = copy.deepcopy(store.now())
            found["metadata"]["labels"]["turn"] = turn
            found["metadata"]["annotations"][MODEL] = "vgg-16" if turn == "first" else "resnet-50"
            store.put(path, found)

    store.before_write = edit
    async with serving(store) as running:
        running.cache.see(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and store.now()["metadata"]["labels"]["turn"] == "second"


async def test_a_job_that_is_deleted_meanwhile_is_forgotten() -> None:
    store = Jobs()
    store.before_write = lambda path: store.objects.clear()
    async with serving(store) as running:
        running.cache.see(body := store.job())
        await until(lambda: not holds(running, body), "the task to end")
        assert store.patches == [] and store.events == {}


def holds(running: Assembly, body: dict[str, Any]) -> bool:
    """Whether it is being decided about a job."""
    return running.admission.holds(Key.of(body), body["metadata"]["uid"])


async def test_two_operators_let_a_job_go_once() -> None:
    store, bodies = Jobs(), list[dict[str, Any]]()
    async with serving(store) as one, serving(store) as two:
        for number in range(20):
            bodies.append(store.job(new_name=f"j{number}"))
            one.cache.see(bodies[-1])
            two.cache.see(copy.deepcopy(bodies[-1]))
        await until(lambda: all(store.annotations(f"j{n}").get(APPLIED) for n in range(20)), "all jobs to be let go")
        await until(lambda: not any(holds(each, body) for each in (one, two) for body in bodies), "both to be done")
        assert all(store.annotations(f"j{n}")[APPLIED] == "Placed" for n in range(20))
        counted = {path: store.patches.count(path) for path in store.patches}
        assert set(counted.values()) == {2}, "placed once, let go once"


async def test_a_job_that_was_let_go_and_suspended_again_is_left_alone() -> None:
    store = Jobs()
    async with serving(store) as running:
        running.cache.see(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        again = copy.deepcopy(store.now())
        again["spec"]["suspend"] = True
        running.cache.see(store.put(f"{JOBS}/a", again))
        running.cache.see(store.job(new_name="b"))
        await until(lambda: store.annotations("b").get(APPLIED), "another job to be let go")
        assert store.now()["spec"]["suspend"] is True


async def test_without_leave_to_place_a_job_is_let_go_as_it_is() -> None:
    store = Jobs()
    async with serving(store, replace(PLACING, place=False)) as running:
        before = store.job()
        running.cache.see(before)
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "NotAllowed"
        assert store.now()["spec"] == {**before["spec"], "suspend": False}


async def test_advice_is_said_once_and_taken_back() -> None:
    store = Jobs()
    async with serving(store) as running:
        running.cache.see(store.job(mode=None))
        await until(lambda: HASH in store.annotations(), "the annotations")
        await until(lambda: store.events, "an Event")
        writes = len(store.writes)
        for _ in range(3):
            found = copy.deepcopy(store.now())
            found["metadata"]["labels"]["seen"] = str(store.version)
            running.cache.see(store.put(f"{JOBS}/a", found))
            await until(lambda: not len(running.runtime.queue), "the queue to be empty")
        await asyncio.sleep(0.05)
        assert len(store.writes) == writes and len(store.events) == 1 and store.patches == []
        found = copy.deepcopy(store.now())
        found["metadata"]["annotations"]["tilecast.dev/mode"] = "Off"
        running.cache.see(store.put(f"{JOBS}/a", found))
        await until(lambda: not set(ADVICE_KEYS) & set(store.annotations()), "the annotations to go")
        assert MODEL in store.annotations()


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"model": None}, "tilecast.dev/model: is missing; annotate the job"),
        ({"training": "{"}, "tilecast.dev/training: '{' is no JSON mapping"),
        ({"model": "resnet-5"}, "tilecast.dev/model.preset: unknown model 'resnet-5'; did you mean"),
        ({"mode": "Auto"}, "tilecast.dev/mode: 'Auto' is no mode; use one of Off, Advise, Initial"),
    ],
)
async def test_a_wrong_annotation_is_told_in_an_event(annotations: dict[str, str | None], words: str) -> None:
    store = Jobs()
    async with serving(store) as running:
        running.cache.see(store.job(**{"mode": None, **annotations}))
        await until(lambda: store.events, "an Event")
        ((reason, text),) = store.told()
        assert reason == "RecommendationUnavailable" and words in text
        assert not set(ADVICE_KEYS) & set(store.annotations()) and store.now()["spec"]["suspend"] is True


async def test_a_namespace_s_label_asks_for_all_its_jobs() -> None:
    store = Jobs()
    async with serving(store) as running:
        body = store.job(mode=None)
        body["metadata"]["labels"] = {}
        running.cache.see(store.put(f"{JOBS}/a", body))
        await asyncio.sleep(0.05)
        assert HASH not in store.annotations()
        running.cache.see(
            {"kind": "Namespace", "metadata": {"name": "default", "labels": {"tilecast.dev/enabled": "true"}}}
        )
        await until(lambda: HASH in store.annotations(), "the annotations")


def training_job(name: str, created: str = "2026-01-01T00:00:00Z", **spec: Any) -> dict[str, Any]:
    target = {"apiVersion": "batch/v1", "kind": "Job", "name": "a"}
    training = {"globalBatchSize": 1024, "precision": "fp16"}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default", "creationTimestamp": created},
        "spec": {"model": {"preset": "resnet-50"}, "training": training, "targetRef": target, **spec},
    }


async def test_the_oldest_training_job_speaks_for_a_job() -> None:
    store = Jobs()
    async with serving(store) as running:
        running.cache.see(store.job(mode=None, model=None))
        first, second = training_job("z-first"), training_job("a-second", "2026-01-01T00:00:01Z")
        running.cache.see(store.put(f"{TRAINING_JOBS}/z-first", first))
        running.cache.see(store.put(f"{TRAINING_JOBS}/a-second", second))
        mine = await running.targets.find(Key("TrainingJob", "default", "z-first"), first)
        theirs = await running.targets.find(Key("TrainingJob", "default", "a-second"), second)
        assert mine is not None and isinstance(mine.answer, Advice) and mine.name == "Job/a"
        assert theirs is not None and not isinstance(theirs.answer, Advice)
        assert theirs.answer.reason == "TargetConflict" and "z-first names Job a too" in theirs.answer.message
        await until(lambda: reason(store, "a-second") == "TargetConflict", "the conflict to be said")
        running.cache.lose(store.objects.pop(f"{TRAINING_JOBS}/z-first"))
        await until(lambda: reason(store, "a-second") == "Advised", "the other's turn")
        assert await running.targets.find(Key("TrainingJob", "default", "x"), training_job("x", targetRef=None)) is None


def reason(store: Jobs, name: str) -> str | None:
    """Why a TrainingJob is ready or not."""
    found = store.objects[f"{TRAINING_JOBS}/{name}"].get("status", {}).get("summary", {}).get("reason")
    return None if found is None else str(found)


async def test_a_target_that_is_not_there_is_told_apart_from_a_kind_that_is_not() -> None:
    store = Jobs()
    async with serving(store) as running:
        request = training_job("x")
        running.cache.see(request)
        found = await running.targets.find(Key("TrainingJob", "default", "x"), request)
        assert found is not None and found.applied.reason == "TargetNotFound" and "create it" in found.applied.message
        store.groups.clear()
        found = await running.targets.find(Key("TrainingJob", "default", "x"), request)
        assert found is not None and found.applied.reason == "TargetKindNotInstalled"
        assert "this cluster has no Job of batch/v1; install its controller" in found.applied.message


async def test_a_gated_job_waits_a_while_for_the_training_job_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "POLL_S", 0.01)
    store = Jobs()
    async with serving(store) as running:
        job = store.job("job-kueue", mode=None, model=None, training=None)
        job["metadata"]["labels"].pop("tilecast.dev/enabled")
        running.cache.see(job := store.put(f"{JOBS}/a", job))
        store.workload(job)
        await asyncio.sleep(0.05)
        assert ADVISOR in store.annotations()[ADMISSION_GATES]
        running.cache.see(training_job("x", mode="Initial"))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed"
        monkeypatch.setattr(admission, "OWNER_S", 0.05)
        other = store.job("job-kueue", "b", mode=None, model=None, training=None)
        other["metadata"]["labels"].pop("tilecast.dev/enabled")
        running.cache.see(store.put(f"{JOBS}/b", other))
        await until(lambda: store.annotations("b").get(APPLIED), "the other job to be let go")
        assert store.annotations("b")[APPLIED] == "NotAsked" and MODE not in store.annotations("b")


async def test_the_end_of_a_job_is_not_that_of_the_next_of_its_name() -> None:
    store = Jobs()
    async with serving(store) as running:
        first = store.job()
        del store.objects[f"{JOBS}/a"]
        running.cache.see(store.job())
        running.cache.lose(first)
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed"


async def test_nothing_is_kept_of_training_jobs_that_are_gone() -> None:
    async with serving(Jobs()) as running:
        for number in range(20):
            request = training_job(
                f"x{number}", targetRef={"apiVersion": "batch/v1", "kind": "Job", "name": f"a{number}"}
            )
            running.cache.see(request)
            running.cache.lose(request)
        assert list(running.requests) == []


async def test_the_next_job_of_a_name_is_held_and_let_go_on_its_own() -> None:
    store = Jobs()

    def replace_it(path: str) -> None:
        """As the first is about to be let go."""
        if store.patches:
            store.before_write = lambda path: None
            del store.objects[f"{JOBS}/a"]
            store.job()

    store.before_write = replace_it
    async with serving(store) as running:
        first = store.job()["metadata"]["uid"]
        running.cache.see(copy.deepcopy(store.now()))
        await until(
            lambda: store.now()["metadata"]["uid"] != first and store.annotations().get(APPLIED),
            "the next to be let go",
        )
        assert store.annotations()[APPLIED] == "Placed"
        assert store.now()["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H100}
        assert store.patches == [f"{JOBS}/a"] * 3, "the first placed; the second placed and let go"


async def test_a_gate_that_comes_while_advice_is_written_is_seen() -> None:
    store = Jobs()

    def gate(path: str) -> None:
        store.before_write = lambda path: None
        found = copy.deepcopy(store.now())
        found["metadata"]["annotations"][MODE] = "Initial"
        store.put(path, found)  # the event of this never comes: a newer state is known by then

    store.before_write = gate
    async with serving(store) as running:
        running.cache.see(store.job(mode=None))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "Placed" and store.now()["spec"]["suspend"] is False


async def test_a_gated_job_that_cannot_be_read_is_let_go() -> None:
    store = Jobs()
    async with serving(store) as running:
        found = store.job("jobset")
        found["metadata"]["annotations"] |= {ADMISSION_GATES: ADVISOR, MODE: "Initial"}
        del found["spec"]["replicatedJobs"]
        path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/a"
        running.cache.see(store.put(path, found))
        await until(lambda: ADMISSION_GATES not in store.objects[path]["metadata"]["annotations"], "the gate to go")
        assert store.objects[path]["metadata"]["annotations"][APPLIED] == "InvalidSpec"


@pytest.mark.parametrize("status", [{"succeeded": 1}, {"failed": 1}])
async def test_a_job_that_has_run_is_not_placed_nor_resumed(status: dict[str, int]) -> None:
    store = Jobs()
    async with serving(store) as running:
        body = store.job(new_name="ran")
        body["status"] = status
        before = store.put(f"{JOBS}/ran", body)
        running.cache.see(before)
        running.cache.see(store.job())
        await until(lambda: store.annotations().get(APPLIED), "another job to be let go")
        assert store.now("ran")["spec"] == before["spec"]


async def test_a_decision_that_comes_late_is_not_begun_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "DECIDE_S", 0.05)
    store = Jobs()

    def slow(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            time.sleep(0.3)
        return advise(asked, pools)

    async with serving(store, advisor=slow) as running:
        running.cache.see(job := store.job("job-kueue"))
        store.workload(job)
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "TooLate"
        assert "nodeSelector" not in store.now()["spec"]["template"]["spec"]


def train_job(store: Jobs, **changes: Any) -> dict[str, Any]:
    (document,) = documents.load((EXAMPLES / "existing" / "trainjob.yaml").read_text())
    document["metadata"] |= {"name": "a", "namespace": "default", "labels": {}}
    document["metadata"]["annotations"] = changes.pop("annotations", {})
    document["spec"]["suspend"] = changes.pop("suspend", True)
    return store.put(TRAIN_JOB, {**document, **changes})


TRAIN_JOB = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/a"
REQUEST = f"{TRAINING_JOBS}/x"


def targeted() -> Jobs:
    """A store with a suspended TrainJob, and the TrainingJob that names it."""
    store = Jobs()
    train_job(store)
    body = training_job("x", model={"preset": "gpt2"}, training={"sequenceLength": 512, "globalBatchSize": 16})
    body["spec"]["targetRef"] = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "a"}
    store.put(REQUEST, body)
    return store


def operating(store: Jobs) -> AbstractAsyncContextManager[Assembly]:
    return operator(store, advise, [node(f"n{number}") for number in range(4)], jobs=True)


async def shown(running: Assembly, store: Jobs, holds: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
    """Show the running what the store has until the TrainingJob's status is so."""
    for _ in range(300):
        for body in [copy.deepcopy(item) for item in store.objects.values()]:
            running.cache.see(body)
        await settled(running, 60)
        found: dict[str, Any] = store.objects[REQUEST].get("status", {})
        if holds(found):
            return found
        await asyncio.sleep(0.02)
    pytest.fail(f"waited in vain for {what}")


async def test_a_train_job_s_own_metrics_are_scored_once_each() -> None:
    store = targeted()

    def tells(seconds: float, loss: str) -> None:
        metrics = [{"name": "loss", "value": loss}, {"name": "step_time_seconds", "value": f"{seconds:g}"}]
        train_job(store, suspend=False, status={"trainerStatus": {"metrics": metrics}})

    async with operating(store) as running:
        found = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        forecast_s = found["recommendation"]["stepSeconds"]["target"]
        for seconds, loss in ((forecast_s / 1.25, "3"), (forecast_s / 1.25, "2"), (forecast_s, "1")):
            tells(seconds, loss)
            await shown(running, store, lambda status: status.get("observed"), "a score")
        found = await shown(running, store, lambda status: status["observed"]["samples"] == 2, "the second step")
        assert found["observed"]["source"] == "trainJob" and found["forecast"]["pool"] == "h100-sxm"
    writes = len(store.writes)
    async with operating(store) as again:
        found = await shown(again, store, lambda status: True, "nothing")
        assert found["observed"]["samples"] == 2 and len(store.writes) == writes, "a restart learns nothing new"
        tells(-1, "0")
        await shown(again, store, lambda status: True, "nothing")
        refused = generate_latest(again.metrics.registry).decode()
        assert 'tilecast_observations_total{outcome="invalid",source="trainJob"} 1.0' in refused


async def test_an_annotation_on_the_job_itself_is_a_report() -> None:
    store = targeted()
    async with operating(store) as running:
        found = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        text = f"{found['recommendation']['stepSeconds']['target'] / 1.1:.6g}"
        train_job(store, suspend=False, annotations={"tilecast.dev/observed-step-seconds": text})
        found = await shown(running, store, lambda status: status.get("observed"), "a score")
        assert found["observed"]["source"] == "annotation" and found["error"]["rawRatio"] == pytest.approx(
            0.1, abs=1e-3
        )
        train_job(store, suspend=False)
        await shown(running, store, lambda status: "observed" not in status, "it to be taken back")


async def test_a_forecast_is_frozen_once_its_target_has_started_and_stands_when_that_is_gone() -> None:
    store = targeted()
    async with operating(store) as running:
        found = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        assert "forecast" not in found
        train_job(store, suspend=False)
        found = await shown(running, store, lambda status: "forecast" in status, "the forecast to freeze")
        for number in range(4, 12):
            running.cache.see(node(f"n{number}"))
        await shown(running, store, lambda status: True, "nothing")
        gone = store.objects.pop(TRAIN_JOB)
        running.cache.lose(gone)
        await settled(running, 60)
        after = await shown(running, store, lambda status: True, "nothing")
        assert (after["recommendation"], after["forecast"]) == (found["recommendation"], found["forecast"])
        train_job(store)
        await shown(running, store, lambda status: "forecast" not in status, "the next job's own forecast")


async def test_a_job_that_ends_before_its_advice_could_be_written_is_advised_all_the_same() -> None:
    """As on a loaded machine, where a webhook does not answer in time and a short job does not wait for it."""
    store = Jobs()
    body = store.job(mode=None)
    body["spec"]["suspend"] = False

    def end(path: str) -> None:
        """The first write is refused, and meanwhile the job ends."""
        store.before_write = lambda path: None
        done = copy.deepcopy(store.now())
        done["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        running.cache.see(store.put(path, done))
        store.faults = [ApiError(500, "the webhook does not answer")]

    async with serving(store) as running:
        store.before_write = end
        running.cache.see(store.put(f"{JOBS}/a", body))
        await until(lambda: HASH in store.annotations(), "the annotations")
        await until(lambda: not len(running.cache.jobs), "the job to be forgotten")


async def test_a_job_that_ends_while_it_waits_for_a_worker_is_advised_all_the_same() -> None:
    store, go_on = Jobs(), threading.Event()

    def slow(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            go_on.wait(10)
        return advise(asked, pools)

    models = ("resnet-18", "resnet-50", "resnet-101", "vgg-16")
    async with serving(store, replace(PLACING, writers=1), slow) as running:
        for name, model in zip("abcd", models, strict=True):
            running.cache.see(store.job(new_name=name, mode=None, model=model))
        await asyncio.sleep(0.1)
        for name in "abcd":
            done = copy.deepcopy(store.now(name))
            done["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
            running.cache.see(store.put(f"{JOBS}/{name}", done))
        go_on.set()
        await until(lambda: all(HASH in store.annotations(name) for name in "abcd"), "the annotations")


async def test_a_job_that_had_ended_when_it_was_first_seen_is_left_alone() -> None:
    store = Jobs()
    async with serving(store) as running:
        body = store.job(mode=None)
        body["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        running.cache.see(store.put(f"{JOBS}/a", body))
        running.cache.see(store.job(mode=None, new_name="b"))
        await until(lambda: HASH in store.annotations("b"), "the advice on the other")
        assert HASH not in store.annotations() and len(running.cache.jobs) == 1


async def test_a_job_is_advised_as_soon_as_its_queue_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Jobs()
    async with serving(store, replace(PLACING, read_kueue=True, config_map_poll_s=3600.0)) as running:
        running.cache.see(store.job("job-kueue", mode=None, **{"admission-gated-by": None}))
        await until(lambda: "QueueNotFound" in str(store.told()), "the queue to be missed")
        quota = [{"name": "nvidia.com/gpu", "nominalQuota": 64}]
        group = {"coveredResources": ["nvidia.com/gpu"], "flavors": [{"name": "any", "resources": quota}]}
        name = store.now()["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        for kind, metadata, content in (
            ("ResourceFlavor", {"name": "any"}, {}),
            ("ClusterQueue", {"name": "everything"}, {"resourceGroups": [group]}),
            ("LocalQueue", {"name": name, "namespace": "default"}, {"clusterQueue": "everything"}),
        ):
            running.cache.see({"kind": kind, "metadata": metadata, "spec": content})
        await until(lambda: HASH in store.annotations(), "the annotations")
