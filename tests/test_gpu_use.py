"""What DCGM measures of a job's GPUs, without a cluster."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import ensure_or_fail
from operator_store import settled
from test_pod_logs import LogStore, running_job
from test_targets import REQUEST, TRAIN_JOB, train_job
from tilecast import jobs
from tilecast.api import documents, status
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.times import format_time
from tilecast_operator.observed import devices
from tilecast_operator.report import job_status
from tilecast_operator.settings import Settings

EXISTING = Path(__file__).resolve().parent.parent / "examples" / "existing"
SELECTOR = Settings().dcgm_selector
KEY = Key("TrainingJob", "default", "x")
GIB = 1 << 30


def read(kind: str, name: str = "a") -> jobs.Job:
    (document,) = documents.load_documents((EXISTING / f"{kind}.yaml").read_text())
    document["metadata"] |= {"name": name, "namespace": "team"}
    return jobs.read_job(document)


def pattern(job: jobs.Job) -> str:
    query = devices.make_query(SELECTOR, job) or ""
    return re.findall(r'pod=~"([^"]*)"', query)[0]


@pytest.mark.parametrize(
    ("kind", "own", "others"),
    [
        ("trainjob", "a-node-0-1-x7k2p", ("a-b-node-0-0-x7k2p", "ab-node-0-0-x7k2p", "a-node-0-1")),
        ("pytorchjob", "a-worker-11", ("a-b-worker-0", "a-worker-0-x", "b-a-worker-0")),
        ("job", "a-0-x7k2p", ("a-b-x7k2p", "a-0-0-x7k2p", "a", "a-x7k2p", "a-worker-0", "a-0-debug")),
    ],
)
def test_the_pods_of_a_job_alone_are_asked_for(kind: str, own: str, others: tuple[str, ...]) -> None:
    found = pattern(read(kind))
    assert re.fullmatch(found, own) and not any(re.fullmatch(found, other) for other in others)
    dotted = pattern(read(kind, "a.b"))
    assert "\\" not in dotted and re.fullmatch(dotted, own.replace("a", "a.b", 1))
    assert not re.fullmatch(dotted, own.replace("a", "axb", 1))


def name_batch_job(name: str, mode: str) -> str:
    """Return the pattern of the pods of a batch Job of that completion mode."""
    document = read_document("job")
    document["metadata"]["name"] = name
    document["spec"]["completionMode"] = mode
    return pattern(jobs.read_job(document))


def test_only_the_pods_of_an_indexed_job_have_an_index() -> None:
    indexed, other = name_batch_job("train", "Indexed"), name_batch_job("train", "NonIndexed")
    assert re.fullmatch(indexed, "train-0-x7k2p") and re.fullmatch(indexed, "train-11-x7k2p")
    assert re.fullmatch(other, "train-x7k2p")
    for name in ("train-x7k2p", "train-0-0-x7k2p", "train-debug", "train-2-debug"):
        assert not re.fullmatch(indexed, name), name
    for name in ("train-2-x7k2p", "train-debug", "train-a-x7k2p"):
        assert not re.fullmatch(other, name), name


@pytest.mark.parametrize("size", [49, 50, 51, 55, 56, 57, 58, 63])
def test_kubernetes_cuts_the_names_of_pods(size: int) -> None:
    name = ("a.b" + "c" * 60)[:size]
    indexed, other = name_batch_job(name, "Indexed"), name_batch_job(name, "NonIndexed")
    assert re.fullmatch(other, f"{name}-"[:58] + "x7k2p")
    for index in (0, 10, 12345):
        end = f"-{index}-"
        pod = name[: 58 - len(end)] + end + "x7k2p"
        assert len(pod) <= 63 and re.fullmatch(indexed, pod) and not re.fullmatch(indexed, pod.replace(".", "x"))


def test_only_names_of_kubernetes_get_into_a_query() -> None:
    job = read("job")
    assert devices.make_query("", job) is None
    assert devices.make_query(SELECTOR, read("job", 'a"} or vector(1) #')) is None
    assert 'exported_pod=~"a' in str(devices.make_query('exported_pod=~"$pods"', job))
    assert devices.make_query(SELECTOR, jobs.read_without_pods(read_document("trainjob"))) is None, "no known group"


def read_document(kind: str) -> dict[str, Any]:
    (document,) = documents.load_documents((EXISTING / f"{kind}.yaml").read_text())
    document["metadata"]["namespace"] = "team"
    return document


def answer(**values: object) -> dict[str, Any]:
    """Return what Prometheus returns for the query."""
    rows = [{"metric": {"value": name}, "value": [1.8e9, str(value)]} for name, value in values.items()]
    return {"status": "success", "data": {"resultType": "vector", "result": rows}}


def test_values_that_cannot_be_are_left_out() -> None:
    use = devices.parse_use(answer(memory=40960, tensor=0.45678, power=651.25), "t", "u")
    assert use == devices.DeviceUse(40 * GIB, 0.4568, 651.25, "t", "u")
    use = devices.parse_use(answer(memory="NaN", tensor=1.5, power=300), "t", "u")
    assert use == devices.DeviceUse(None, None, 300.0, "t", "u")
    for wrong in (
        answer(),
        answer(memory="-1"),
        answer(memory="+Inf", tensor="x"),
        {},
        None,
        [],
        {"data": {"result": [1]}},
    ):
        assert devices.parse_use(wrong, "t", "u") is None


async def told(running: OperatorParts, store: LogStore, outcome: Any) -> dict[str, Any]:
    """Tell the operator what Prometheus answers, and return the status of the TrainingJob."""
    await running.devices.record_sample(KEY, outcome)
    await settled(running)
    status: dict[str, Any] = store.objects[REQUEST]["status"]
    return status


@pytest.mark.slow
async def test_the_status_has_peak_memory_and_a_bound_on_the_mfu() -> None:
    async with running_job() as (running, store, forecast_s):
        ((key, query),) = running.devices.queries()
        assert key == KEY and 'namespace="default",pod=~"a-(node)-' in query and not store.asked
        used = store.objects[REQUEST]["status"]["recommendation"]["memoryBytes"]["used"]
        mib = used / 1.25 / (1 << 20)
        use = (await told(running, store, answer(memory=mib, tensor=0.5, power=600)))["gpuUse"]
        assert use["peakMemoryBytes"] == pytest.approx(used / 1.25, rel=1e-3)
        assert "memoryErrorRatio" not in use and "observed" not in store.objects[REQUEST]["status"], "it is not known"
        assert (use["mfuUpperBoundRatio"], use["powerWatts"]) == (0.5, 600.0)
        count = len(store.writes)
        status = await told(running, store, answer(memory=mib * 1.001, tensor=0.51, power=610))
        assert status["gpuUse"] == use and len(store.writes) == count, "small changes are no news"
        lower = (await told(running, store, answer(memory=mib / 2, tensor=0.3)))["gpuUse"]
        assert lower["peakMemoryBytes"] == use["peakMemoryBytes"] and lower["mfuUpperBoundRatio"] == 0.3
        step = {"metric": {}, "value": [1.8e9, f"{forecast_s}"]}
        await running.observations.record_sample(KEY, {"data": {"resultType": "vector", "result": [step]}})
        running.runtime.add(KEY)
        lower = (await told(running, store, answer(memory=mib / 2, tensor=0.4)))["gpuUse"]
        assert store.objects[REQUEST]["status"]["forecast"]["followed"] is True
        assert lower["memoryErrorRatio"] == pytest.approx(0.25, abs=0.01)
        seen = running.cache.jobs.get(Key("TrainJob", "default", "a"))
        assert seen is not None and running.devices.find_use(KEY) is not None
        other = {**seen.value, "metadata": {**seen.value["metadata"], "uid": "another", "resourceVersion": "9999"}}
        running.cache.jobs.put_object(other)
        assert running.devices.find_use(KEY) is None, "another job of that name is another run"
        store.version = 10_000
        train_job(store, suspend=False, status={"conditions": [{"type": "Complete", "status": "True"}]})
        running.cache.put_object(store.objects[TRAIN_JOB])
        await settled(running)
        assert not list(running.devices.queries()), "a job that has ended is not asked for"
        assert (await told(running, store, answer(memory=1)))["gpuUse"] == lower, "and keeps what was measured"


@pytest.mark.slow
async def test_a_job_takes_nothing_over_from_an_earlier_one_of_its_name() -> None:
    async with running_job() as (running, store, _):
        before = (await told(running, store, answer(memory=40_000)))["gpuUse"]
        seen = running.cache.jobs.get(Key("TrainJob", "default", "a"))
        assert seen is not None

        def rerun(age_s: float) -> list[str]:
            """Show the operator the next job of that name, and return its queries."""
            changes = {"uid": "next", "creationTimestamp": format_time(time.time() - age_s)}
            changes["resourceVersion"] = f"{10_000 + age_s:.0f}"
            running.cache.jobs.put_object({**seen.value, "metadata": {**seen.value["metadata"], **changes}})
            return [query for _, query in running.devices.queries()]

        assert not rerun(30), "the pods of the earlier one may still end"
        await running.devices.record_sample(KEY, answer(memory=50_000))
        assert running.devices.find_use(KEY) is None, "an answer to the query for the earlier one"
        (query,) = rerun(200)
        assert all(130 <= int(text) <= 140 for text in re.findall(r"\[(\d+)s\]", query))
        after = (await told(running, store, answer(memory=20_000)))["gpuUse"]
        assert (before["peakMemoryBytes"], after["peakMemoryBytes"]) == (40_000 << 20, 20_000 << 20)
        assert before["jobUid"] != after["jobUid"] == "next"


def test_a_query_looks_back_to_the_creation_of_its_job_at_most() -> None:
    ages = {0: None, 60: None, 61: 1, 300: 240, 660: 600, 86400: 600}
    assert {age: devices.find_window_s(1e9, 1e9 + age) for age in ages} == ages
    assert devices.find_window_s(None, 1e9) is None
    assert "[90s]" in str(devices.make_query(SELECTOR, read("job"), 90))


@pytest.mark.parametrize(("followed", "has_error"), [(None, False), (False, False), (True, True)])
def test_memory_is_compared_with_the_forecast_of_what_runs(followed: bool | None, *, has_error: bool) -> None:
    best = status.Recommendation.model_construct(memory_bytes=status.MemoryBytes.model_construct(used=5 * GIB))
    frozen = status.FrozenForecast(frozen_at="t", followed=followed)
    before = status.TrainingJobStatus.model_construct(recommendation=best, forecast=frozen)
    shown = job_status.add_gpu_use(before, devices.DeviceUse(4 * GIB, None, None, "t", "u")).gpu_use
    assert shown is not None and (shown.memory_error_ratio == 0.25) is has_error


def test_prometheus_evaluates_the_query(tmp_path: Path) -> None:
    program = ensure_or_fail("prometheus") / "promtool"
    query = devices.make_query(SELECTOR, read("pytorchjob"))
    labels = 'namespace="team",container="pytorch",Hostname="n1"'
    series = {
        f'DCGM_FI_DEV_FB_USED{{pod="a-worker-0",gpu="0",{labels}}}': "1000 3000 2000",
        f'DCGM_FI_DEV_FB_USED{{pod="a-worker-1",gpu="0",{labels}}}': "2500 2500 2500",
        f'DCGM_FI_DEV_FB_USED{{pod="b-worker-0",gpu="0",{labels}}}': "9000 9000 9000",
        f'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{pod="a-worker-0",gpu="0",{labels}}}': "0.2 0.4 0.6",
        f'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{pod="a-worker-1",gpu="0",{labels}}}': "0.6 0.6 0.6",
    }
    expected = [{"labels": '{value="memory"}', "value": 3000}, {"labels": '{value="tensor"}', "value": 0.5}]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "2m", "exp_samples": expected}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [test]}))
    done = subprocess.run(
        [program, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
