"""Steps from the logs of pods, without a cluster."""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import generate_latest

from job_store import EXAMPLES, JobStore
from operator_store import node, operator, settled
from test_targets import REQUEST, TRAIN_JOB, shown, targeted, train_job
from tilecast.advice import advise
from tilecast.api import documents
from tilecast.jobs import JOB_KINDS, Job, Pods, read_job
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube.client import Api, ApiError, Connection
from tilecast_operator.kube.kinds import Key
from tilecast_operator.objects.client import client
from tilecast_operator.observed import pod_logs
from tilecast_operator.observed.reports import StepReport, StepWindow, add_report

PODS = "/api/v1/namespaces/default/pods"
UID = "uid-of-the-job"
KEY = Key("TrainingJob", "default", "x")


def pod(name: str, index: int = 0, gpus: int = 8, owner: str = "Job", **changes: Any) -> dict[str, Any]:
    """Return a pod that a Job of the JobSet or TrainJob `a` has made."""
    group = {"jobset.sigs.k8s.io/replicatedjob-name": "node"}
    labels = {"batch.kubernetes.io/job-completion-index": str(index), **group, **changes.pop("labels", {})}
    reference = {"controller": True, "kind": owner, "uid": changes.pop("uid", "of-its-job")}
    reference["name"] = changes.pop("owner_name", f"a-{labels['jobset.sigs.k8s.io/replicatedjob-name']}-0")
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    containers = [{"name": "sidecar"}, {"name": "node", "resources": {"limits": limits}}]
    return {
        "metadata": {
            "name": name,
            "labels": labels,
            "ownerReferences": [reference],
            "annotations": changes.pop("annotations", {}),
            **changes.pop("metadata", {}),
        },
        "spec": {"nodeName": f"n{index}", "containers": containers},
        "status": {"phase": changes.pop("phase", "Running")},
    }


def read_kind(kind: str, gpus: int) -> Job:
    """Return the example of a kind under the name `a`, as if its pods had so many GPUs together."""
    (document,) = documents.load_documents((EXAMPLES / "existing" / f"{kind}.yaml").read_text())
    document["metadata"] |= {"name": "a", "namespace": "default", "uid": UID}
    return replace(read_job(document), pods=(Pods("node", (), gpus // 8, 8),))


def page(*pods: Mapping[str, Any], **metadata: str) -> dict[str, Any]:
    return {"metadata": metadata, "items": list(pods)}


def lines(seconds: float, first: int = 1, count: int = 40) -> bytes:
    """Return what Megatron-LM logs, after a slow first step."""
    text = ""
    for step in range(first, first + count):
        ms = 1000 * seconds * (20 if step == 1 else 1)
        text += f" iteration {step:8d}/  500000 | consumed samples: {step * 16:12d} | elapsed time per iteration (ms): "
        text += f"{ms:.1f} | learning rate: 1.0E-04 | global batch size:    16 | lm loss: 2.1E+00 |\n"
    return text.encode()


ARGUMENTS = b"""------------------------ arguments ------------------------
  tensor_model_parallel_size ...................... 2
  pipeline_model_parallel_size .................... 1
  world_size ...................................... 16
-------------------- end of arguments ---------------------
"""


class LogStore(JobStore):
    """Store that also has pods with logs."""

    def __init__(self) -> None:
        super().__init__()
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, bytes | Exception] = {}
        self.asked: list[tuple[str, Mapping[str, str]]] = []

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        if path != PODS:
            return await super().get(path, query)
        self.asked.append((path, query))
        return page(*self.pods)

    async def read_bytes(self, path: str, query: Mapping[str, str], limit: int) -> bytes:
        await asyncio.sleep(0)
        self.asked.append((path, query))
        assert path.startswith(f"{PODS}/") and path.endswith("/log") and int(query["limitBytes"]) == limit
        content = self.logs[path.removeprefix(f"{PODS}/").removesuffix("/log")]
        if isinstance(content, Exception):
            raise content
        if "tailLines" in query:
            content = b"".join(content.splitlines(keepends=True)[-int(query["tailLines"]) :])
        return content[:limit]


@asynccontextmanager
async def running_job(**settings: Any) -> AsyncIterator[tuple[OperatorParts, LogStore, float]]:
    """Run an operator beside a TrainJob that has started, and yield also the forecast of its step in seconds."""
    store = LogStore()
    store.objects = targeted().objects
    async with operator(store, advise, [node(f"n{number}") for number in range(4)], jobs=True, **settings) as running:
        answer = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        train_job(store, suspend=False, status={"jobsStatus": [{"name": "node", "active": 1}]})
        await shown(running, store, lambda status: status.get("forecast"), "the forecast to freeze")
        best = answer["recommendation"]
        store.pods = [pod(f"a-node-0-{index}", index) for index in range(best["gpus"] // 8 or 1)]
        store.logs = {item["metadata"]["name"]: b"" for item in store.pods}
        yield running, store, best["stepSeconds"]["target"]


async def read(running: OperatorParts, store: LogStore) -> dict[str, Any]:
    """Read the logs once, and return the status of the TrainingJob."""
    await running.logs.read_logs()
    await settled(running)
    status: dict[str, Any] = store.objects[REQUEST]["status"]
    return status


@pytest.mark.slow
async def test_what_a_pod_has_logged_corrects_its_forecast_without_an_annotation() -> None:
    async with running_job(read_logs=True, log_poll_s=0.02) as (running, store, forecast_s):
        last = store.pods[-1]["metadata"]["name"]
        store.logs[last] = b"Traceback of nothing\n" + lines(forecast_s / 1.25)
        status = await shown(running, store, lambda status: status.get("observed"), "the log to be read")
        observed = status["observed"]
        assert observed["source"] == "podLog" and observed["node"] == store.pods[-1]["spec"]["nodeName"]
        assert observed["stepSeconds"] == pytest.approx(forecast_s / 1.25, rel=0.01)
        assert status["error"]["rawRatio"] == pytest.approx(0.25, abs=0.02)
        assert store.asked[0] == (PODS, {"labelSelector": "jobset.sigs.k8s.io/jobset-name=a", "limit": "500"})
        assert {query["container"] for path, query in store.asked if path != PODS} == {"node"}
    count = len(store.writes)
    async with operator(store, advise, [node(f"n{number}") for number in range(4)], jobs=True) as again:
        status = await read(again, store)
        assert status["observed"]["samples"] == 1 and len(store.writes) == count, "a restart learns nothing new"


@pytest.mark.slow
async def test_a_log_counts_once_until_it_has_more_and_each_other_source_wins() -> None:
    async with running_job() as (running, store, forecast_s):
        name = store.pods[0]["metadata"]["name"]
        store.logs[name] = lines(forecast_s)
        for _ in range(3):
            assert (await read(running, store))["observed"]["samples"] == 1
        store.logs[name] += lines(forecast_s * 1.1, 41, 80)
        assert (await read(running, store))["observed"]["samples"] == 2
        train_job(store, suspend=False, annotations={"tilecast.dev/observed-step-seconds": f"{2 * forecast_s:.6g}"})
        status = await shown(running, store, lambda s: s["observed"]["source"] == "annotation", "the annotation")
        assert status["observed"]["samples"] == 1, "what was logged is replaced"
        assert status["observed"]["recentStepSeconds"] == [pytest.approx(2 * forecast_s, rel=1e-4)]
        store.logs[name] += lines(forecast_s, 121, 200)
        store.asked.clear()
        assert (await read(running, store))["observed"]["source"] == "annotation" and not store.asked


@pytest.mark.slow
async def test_no_log_is_read_of_a_job_that_waits_has_ended_or_is_not_named() -> None:
    async with running_job() as (running, store, forecast_s):
        store.logs[store.pods[0]["metadata"]["name"]] = lines(forecast_s)
        store.asked.clear()
        for changes in (
            {"suspend": True},
            {"suspend": False, "status": {"conditions": [{"type": "Complete", "status": "True"}]}},
        ):
            train_job(store, **changes)
            running.cache.put_object(store.objects[TRAIN_JOB])
            await settled(running)
            assert "observed" not in await read(running, store) and not store.asked
        train_job(store, suspend=False, status={"jobsStatus": [{"name": "node", "active": 1}]})
        running.cache.put_object(store.objects[TRAIN_JOB])
        running.leadership.stop_leading()
        await running.logs.read_logs()
        assert not store.asked, "only the leader reads"


@pytest.mark.slow
async def test_a_status_that_still_shows_a_log_does_not_bring_it_back() -> None:
    async with running_job(observe_settle_s=60.0) as (running, store, forecast_s):
        name = store.pods[0]["metadata"]["name"]
        for content in (lines(forecast_s), lines(forecast_s * 1.1)):
            store.logs[name] = content
            await running.logs.read_logs()
        running.runtime.add(KEY)
        await settled(running)
        stale = copy.deepcopy(store.objects[REQUEST])
        assert stale["status"]["observed"]["samples"] == 2
        result = [{"metric": {}, "value": [1.8e9, f"{2 * forecast_s}"]}]
        await running.observations.record_sample(KEY, {"data": {"resultType": "vector", "result": result}})
        stale["status"]["plansEvaluated"] = 7  # somebody else has written it
        running.cache.put_object(store.put(REQUEST, stale))
        running.runtime.add(KEY)
        await settled(running)
        observed = store.objects[REQUEST]["status"]["observed"]
        assert (observed["source"], observed["samples"]) == ("prometheus", 1)


HOSTILE: Mapping[str, bytes | Exception] = {
    "no steps": b"hello\n" * 500,
    "empty": b"",
    "binary": b"\x00\xff\x1b[7m\xc3" * (1 << 17),
    "one line": b"iteration " * (1 << 17),
    "deep": b"[" * (1 << 20),
    "carriage returns": b"\r" * (1 << 20),
    "zero": lines(0.0),
    "milliseconds": lines(1e9),
    "huge numbers": b" iteration 9%s/ 1 | elapsed time per iteration (ms): 9%s |\n" % (b"9" * 400, b"9" * 400) * 9,
    "forbidden": ApiError(403, "pods/log is forbidden"),
    "gone": ApiError(404, "not found"),
    "no kubelet": ApiError(500, "dial tcp: connection refused"),
    "unreachable": TimeoutError(),
    "unexpected": KeyError("nothing"),
}


@pytest.mark.slow
async def test_no_log_however_wrong_counts_or_ends_the_reading() -> None:
    async with running_job() as (running, store, forecast_s):
        pods, name = store.pods, store.pods[0]["metadata"]["name"]
        for what, content in HOSTILE.items():
            store.logs = dict.fromkeys(store.logs, content)
            assert "observed" not in await read(running, store), what
        for items in ([], [7], [{}], [{"metadata": 1, "spec": [], "status": "x"}], [pod("a", uid="x", owner="Pod")]):
            store.pods = items
            assert "observed" not in await read(running, store)
        counts = generate_latest(running.metrics.registry).decode()
        assert 'tilecast_observations_total{outcome="implausible",source="podLog"} 1.0' in counts
        store.pods, store.logs = [pod(name)], {name: lines(forecast_s)}
        assert "observed" not in await read(running, store), "the other pod is missing, and the log states no number"
        store.pods, store.logs = pods, store.logs | {pods[-1]["metadata"]["name"]: b""}
        assert (await read(running, store))["observed"]["source"] == "podLog", "the next log is read"


def test_pods_are_ordered_by_rank_and_others_are_left_out() -> None:
    def names(*pods: dict[str, Any], gpus: int = 8, kind: str = "trainjob", **metadata: str) -> tuple[list[str], Any]:
        found = pod_logs.find_pods(page(*pods, **metadata), read_kind(kind, gpus))
        return [item.name for item in found.candidates], found.gpus

    many = [pod(f"p{index}", index) for index in (10, 2, 0, 1)]
    assert names(*many, gpus=32) == (["p0", "p10"], 32)
    assert names(*many, gpus=8000, **{"continue": "token"}) == (["p0"], 8000)
    mixed = pod("p0"), pod("ended", 1, phase="Failed"), pod("waits", 2, phase="Pending")
    assert names(*mixed, gpus=16) == (["p0"], 16)
    assert names(*mixed, gpus=24) == (["p0"], None), "a pod is missing"
    assert names(*mixed, gpus=0) == (["p0"], None), "what the job asks for is not known"
    own, other = pod("own", uid=UID, owner="PyTorchJob"), pod("other", 1, uid="x", owner="PyTorchJob")
    assert names(own, other, kind="pytorchjob") == (["own"], 8)
    roles = [pod(role, labels={"training.kubeflow.org/replica-type": role}) for role in ("worker", "master")]
    assert names(*roles)[0] == ["master", "worker"]
    launcher = pod("launcher", gpus=0, labels={"jobset.sigs.k8s.io/replicatedjob-name": "launcher"})
    assert names(launcher, pod("p0"), pod("loader", gpus=0)) == (["p0", "launcher"], 8)
    (chosen,) = pod_logs.find_pods(
        page(pod("p0", annotations={"kubectl.kubernetes.io/default-container": "sidecar"})), read_kind("trainjob", 8)
    ).candidates
    assert (chosen.container, chosen.node) == ("sidecar", "n0")
    assert all(JOB_KINDS[kind].pod_label for kind in ("TrainJob", "PyTorchJob", "JobSet", "Job"))


def test_workers_that_have_ended_do_not_make_the_run_smaller() -> None:
    ended = [pod(f"p{index}", index, phase="Succeeded") for index in (1, 2, 3)]
    found = pod_logs.find_pods(page(pod("p0"), *ended), read_kind("trainjob", 32))
    assert ([item.name for item in found.candidates], found.gpus) == (["p0"], 32), "rank 0 still saves"
    assert pod_logs.find_pods(page(pod("p0")), read_kind("trainjob", 32)).gpus is None, "they were deleted"
    run = pod_logs.read_run([lines(2.0)], b"")
    assert run is not None and pod_logs.make_report(run, "n0", None) is None, "the size of the run is not known"
    run = pod_logs.read_run([ARGUMENTS + lines(2.0)], b"")
    assert run is not None and (report := pod_logs.make_report(run, "n0", 8)) is not None
    assert report.gpus == 16, "the world size of the log counts more than the job's number"


@pytest.mark.parametrize("kind", ["job", "pytorchjob", "jobset", "trainjob"])
def test_the_pods_of_another_owner_are_not_of_the_job(kind: str) -> None:
    def is_taken(**changes: Any) -> bool:
        owner = {"job": "Job", "pytorchjob": "PyTorchJob"}.get(kind, "Job")
        return bool(pod_logs.find_pods(page(pod("p", **{"owner": owner} | changes)), read_kind(kind, 8)).candidates)

    assert is_taken(uid=UID)
    assert not is_taken(uid=UID, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    if kind in ("job", "pytorchjob"):
        assert not is_taken(uid="of-a-deleted-job-of-that-name")
        return
    assert is_taken(uid="of-its-job", owner_name="a-node-11")
    for name in ("evil", "a", "a-node", "a-node-", "a-node-0x", "a-other-0", "b-node-0"):
        assert not is_taken(uid="of-its-job", owner_name=name), name
    assert not is_taken(uid=UID, owner="ReplicaSet"), "its own label does not suffice"


def test_the_plan_is_read_from_rank_0_and_the_steps_from_the_last_pod() -> None:
    run = pod_logs.read_run([ARGUMENTS, lines(2.0)], b"")
    assert run is not None and run.seconds == pytest.approx(2.0) and run.plan is not None and run.plan.tensor == 2
    assert pod_logs.read_run([ARGUMENTS], b"") is None
    report = pod_logs.make_report(run, "n1", 16)
    assert report == StepReport(run.seconds, "podLog", node="n1", gpus=16, plan=run.plan)


def test_a_line_that_a_limit_has_cut_is_no_step() -> None:
    whole = lines(2.0, count=1000)
    head, tail = whole[: pod_logs.HEAD_BYTES], lines(4.0, 5000, 5000)[: pod_logs.TAIL_BYTES]
    assert not head.endswith(b"\n") and not tail.endswith(b"\n")
    run = pod_logs.read_run([head], tail)
    assert run is not None and run.seconds == pytest.approx(4.0), "most of the steps are of the end"
    whole = lines(2.0, 10, 5)
    shown = whole[: whole.rindex(b"(ms): 2000") + len(b"(ms): 2")]
    filled = b"loading\n" + b"x" * (pod_logs.HEAD_BYTES - len(shown) - 9) + b"\n" + shown
    assert len(filled) == pod_logs.HEAD_BYTES and pod_logs.read_run([filled], b"") is None
    run = pod_logs.read_run([whole], b"")
    assert run is not None and run.seconds == pytest.approx(2.0), "the five steps suffice where all are whole"


def test_a_report_of_another_source_replaces_those_of_a_log_and_a_log_weighs_half() -> None:
    window = add_report(None, StepReport(1.0, "podLog"), "t0")
    window = add_report(window, StepReport(1.2, "podLog"), "t1")
    assert (window.recent, window.samples, window.observations) == ((1.0, 1.2), 2, 1)
    assert StepWindow((1.0,), 9, "t", StepReport(1.0, "podLog")).observations == 4
    window = add_report(window, StepReport(3.0, "put"), "t2")
    assert (window.recent, window.samples, window.latest.source) == ((3.0,), 1, "put")


@asynccontextmanager
async def served(content: bytes, status: int = 200) -> AsyncIterator[tuple[Api, list[web.Request]]]:
    """Serve an answer for every path, and yield a client of that server."""
    asked = list[web.Request]()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for start in range(0, len(content), 1 << 14):
            await response.write(content[start : start + (1 << 14)])
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api = client(10.0)
    api.log_in(lambda: Connection(f"http://127.0.0.1:{runner.addresses[0][1]}", {}, ssl.create_default_context()))
    try:
        yield api, asked
    finally:
        await api.close()
        await runner.cleanup()


async def test_the_client_reads_text_within_a_bound() -> None:
    text = bytes(range(256)) * 4096
    async with served(text) as (api, asked):
        assert await api.read_bytes(f"{PODS}/a/log", {"limitBytes": "1000"}, 1000) == text[:1000]
        assert await api.read_bytes(f"{PODS}/a/log", {}, 1 << 30) == text
        assert asked[0].query == {"limitBytes": "1000"} and "*/*" in asked[0].headers["Accept"]
        with pytest.raises(ApiError, match="404"):
            await api.read_bytes(f"{PODS}/../../log", {}, 10)
    async with served(b'{"message": "pods/log is forbidden"}', 403) as (api, _):
        with pytest.raises(ApiError, match="403: pods/log is forbidden"):
            await api.read_bytes(f"{PODS}/a/log", {}, 1000)
