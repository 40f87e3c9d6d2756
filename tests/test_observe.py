"""Measured steps in the operator: valid reports, trusted senders, and the results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any

import aiohttp
import pytest
from prometheus_client import generate_latest

from operator_store import JOBS, LEARNINGS, Store, job, node, operator, settled
from tilecast.advice import advise
from tilecast.api.status import ObservedStep
from tilecast_operator import server
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube.kinds import Key
from tilecast_operator.metrics import Metrics
from tilecast_operator.observed import reports
from tilecast_operator.observed.reports import RefusedReport, StepReport, StepWindow, add_report

KEY = Key("TrainingJob", "default", "a")


def body(**fields: Any) -> bytes:
    return json.dumps({"stepSeconds": 1.5, **fields}).encode()


@pytest.mark.parametrize(
    ("sent", "outcome", "words"),
    [
        (b"", "invalid", "no JSON object"),
        (b"[1]", "invalid", "no JSON object"),
        (b"[" * 5000, "invalid", "no JSON object"),
        (b"{}", "invalid", "stepSeconds"),
        (body(stepSeconds=0), "invalid", "above 0"),
        (body(stepSeconds=-2), "invalid", "above 0"),
        (b'{"stepSeconds": NaN}', "invalid", "no time"),
        (b'{"stepSeconds": 1e999}', "invalid", "no time"),
        (body(stepSeconds="1.5"), "invalid", "stepSeconds"),
        (body(seconds=3), "invalid", "seconds"),
        (body(gpus=0), "invalid", "gpus"),
        (body(stepSeconds=1.0, inputSeconds=0.6, optimizerSeconds=0.5), "invalid", "take 1.1 s, more than stepSeconds"),
        (body(communicationSeconds=-1.0), "invalid", "communicationSeconds"),
        (body(plan={"tensors": 2}), "invalid", "plan"),
    ],
)
def test_what_is_no_report_is_refused_with_a_reason(sent: bytes, outcome: str, words: str) -> None:
    with pytest.raises(RefusedReport, match=words) as caught:
        reports.parse_body_report(sent, None)
    assert caught.value.outcome == outcome
    assert caught.value.status in (400, 422)


def test_a_report_says_where_it_comes_from() -> None:
    report = reports.parse_body_report(body(gpus=16, gpu="NVIDIA H100 80GB HBM3", plan={"tensor": 2}, steps=50), "n1")
    assert (report.seconds, report.gpus, report.node, report.steps) == (1.5, 16, "n1", 50)
    assert report.plan is not None and report.plan.tensor == 2


@pytest.mark.parametrize(
    ("seconds", "fine"), [(1.5, True), (140.0, True), (1500.0, False), (0.016, True), (0.0015, False)]
)
def test_milliseconds_are_not_taken_for_seconds(seconds: float, fine: bool) -> None:
    if fine:
        reports.require_plausible(seconds, 1.5)
        return
    with pytest.raises(RefusedReport, match=r"milliseconds|shorter") as caught:
        reports.require_plausible(seconds, 1.5)
    assert caught.value.outcome == "implausible"


def review(username: str = "system:serviceaccount:team:trainer", **changes: Any) -> dict[str, Any]:
    extra = {reports.NODE_CLAIM: ["n1"]}
    status = {"authenticated": True, "audiences": ["tilecast"], "user": {"username": username, "extra": extra}}
    return {"status": {**status, **changes}}


def test_a_token_counts_in_its_own_namespace_only() -> None:
    assert reports.read_review_node(review(), "team") == "n1"
    for answer, outcome in (
        (review(authenticated=False), "unauthenticated"),
        (review(audiences=["https://kubernetes.default.svc"]), "unauthenticated"),
        ({}, "unauthenticated"),
        (review("system:serviceaccount:other:trainer"), "forbidden"),
        (review("system:serviceaccount:team-b:trainer"), "forbidden"),
        (review("system:admin"), "forbidden"),
        (review("evil:serviceaccount:team:trainer"), "forbidden"),
    ):
        with pytest.raises(RefusedReport) as caught:
            reports.read_review_node(answer, "team")
        assert caught.value.outcome == outcome


def test_prometheus_tells_the_slowest_rank() -> None:
    def vector(*values: str) -> dict[str, Any]:
        return {"data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, value]} for value in values]}}

    report = reports.parse_prometheus_report(vector("1.5", "1.7", "NaN"))
    assert report is not None and (report.seconds, report.source) == (1.7, "prometheus")
    scalar = reports.parse_prometheus_report({"data": {"resultType": "scalar", "result": [1, "2"]}})
    assert scalar is not None and scalar.seconds == 2.0
    assert reports.parse_prometheus_report(vector()) is None
    for answer in (vector("0"), vector("-1"), {"data": {"resultType": "matrix", "result": [{"values": []}]}}, None):
        with pytest.raises(RefusedReport):
            reports.parse_prometheus_report(answer)


def test_a_trainjob_tells_its_step() -> None:
    status = {
        "trainerStatus": {"metrics": [{"name": "loss", "value": "2"}, {"name": "step_time_seconds", "value": "3.5"}]}
    }
    assert reports.parse_trainer_report(status) == StepReport(3.5, "trainJob")
    assert reports.parse_trainer_report({}) is None
    with pytest.raises(RefusedReport):
        reports.parse_trainer_report({"trainerStatus": {"metrics": [{"name": "step_time_seconds", "value": "fast"}]}})


def test_a_window_survives_a_restart_and_forgets_the_oldest() -> None:
    window = None
    for number in range(40):
        window = add_report(
            window, StepReport(2.0 + number % 2, "put", node="n1" if number < 5 else None), f"t{number:02}"
        )
    assert window is not None
    assert (window.samples, len(window.recent), window.latest.node) == (40, reports.RECENT, "n1")
    again = StepWindow.from_status(ObservedStep.model_validate(json.loads(json.dumps(window.status().document()))))
    assert again is not None and again.status() == window.status()
    assert StepWindow.from_status(None) is None


class Reviewing(Store):
    """A store that reviews tokens: a token is the name of its namespace, or `NAMESPACE@NODE`."""

    async def create(self, path: str, document: Any, **options: Any) -> dict[str, Any]:
        if not path.endswith("tokenreviews"):
            return await super().create(path, document)
        namespace, _, on = document["spec"]["token"].partition("@")
        if namespace == "forged":
            return {"status": {"authenticated": False}}
        extra = {reports.NODE_CLAIM: [on]} if on else {}
        user = {"username": f"system:serviceaccount:{namespace}:trainer", "extra": extra}
        return {"status": {"authenticated": True, "audiences": document["spec"]["audiences"], "user": user}}


def small(name: str = "a", **spec: Any) -> dict[str, Any]:
    training = {"sequenceLength": 512, "globalBatchSize": 16, "precision": "bf16"}
    return job(name, model={"preset": "gpt2"}, training=training, constraints={"gpus": 8}, **spec)


def store_with(*names: str) -> Reviewing:
    store = Reviewing()
    for name in names:
        store.put(f"{JOBS}/{name}", small(name))
    return store


async def until(running: OperatorParts, store: Store, probe: Callable[[], object]) -> None:
    """Show the operator its own writes, as the API server would, until `probe` is true."""
    async with asyncio.timeout(120):
        while not probe():
            for path in list(store.objects):
                running.cache.put_object(store.objects[path])
            await settled(running, 60)
            await asyncio.sleep(0.02)


def status(store: Store, name: str = "a") -> dict[str, Any]:
    job: dict[str, Any] = store.objects[f"{JOBS}/{name}"].get("status", {})
    return job


def learnt(store: Store) -> Any:
    return store.objects.get(f"{LEARNINGS}/h100-sxm", {}).get("spec", {}).get("runs")


def metrics(running: OperatorParts) -> str:
    return generate_latest(running.metrics.registry).decode()


@pytest.mark.slow
async def test_reports_are_scored_learnt_from_and_remembered() -> None:
    store = store_with("a")
    async with operator(store, advise, discovery=True) as running:
        await until(running, store, lambda: status(store).get("recommendation"))
        target = status(store)["recommendation"]["stepSeconds"]["target"]
        for _ in range(20):
            await running.observations.put("default", "a", "default@n1", body(stepSeconds=target / 1.3, steps=50))
        await until(running, store, lambda: status(store).get("observed", {}).get("samples") == 20)
        answer = status(store)
        assert answer["error"] == {
            "rawRatio": pytest.approx(0.3, abs=1e-3),
            "calibratedRatio": pytest.approx(0.3, abs=1e-3),
        }
        assert answer["summary"]["error"] == "+30%"
        assert answer["forecast"]["followed"] is True and answer["forecast"]["pool"] == "h100-sxm"
        (condition,) = (item for item in answer["conditions"] if item["type"] == "ObservationsAvailable")
        assert (condition["status"], condition["reason"]) == ("True", "Observed")
        await until(running, store, lambda: learnt(store))
        text = metrics(running)
        assert 'tilecast_observations_total{outcome="accepted",source="put"} 20.0' in text
        assert 'tilecast_recommendation_followed_total{followed="true"} 1.0' in text
        group = 'family="decoder",gpu="h100-sxm",precision="bf16"'
        assert 'tilecast_prediction_relative_error_ratio_count{gpu="h100-sxm",stage="raw"} 20.0' in text
        bias = next(
            line
            for line in text.splitlines()
            if line.startswith(f'tilecast_prediction_bias_ratio{{{group},stage="raw"')
        )
        assert float(bias.split()[-1]) == pytest.approx(0.3, abs=1e-3)

        store.put(f"{JOBS}/b", small("b"))
        await until(running, store, lambda: status(store, "b").get("recommendation"))
        following = status(store, "b")["recommendation"]["stepSeconds"]["target"]
        assert following == pytest.approx(target / 1.3, rel=0.05)
        assert "1 runs seen on this cluster, 1 like this one" in json.dumps(status(store, "b")["conditions"])
    writes = len(store.writes)
    async with operator(store, advise, discovery=True) as again:
        await settled(again, 60)
        for path in sorted(store.objects):
            again.cache.put_object(store.objects[path])
        store.put(f"{JOBS}/c", small("c"))
        await until(again, store, lambda: status(store, "c").get("recommendation"))
        assert status(store, "c")["recommendation"]["stepSeconds"]["target"] == pytest.approx(following, rel=1e-3)
    assert not [path for _, path in store.writes[writes:] if path.startswith(f"{JOBS}/a")], "it was all there"


async def test_what_ran_elsewhere_is_held_against_a_forecast_of_its_own() -> None:
    store = store_with("a")
    t4 = node("n2", "Tesla-T4")
    async with operator(store, advise, [node(), t4], discovery=True) as running:
        await until(running, store, lambda: status(store).get("recommendation"))
        best = status(store)["recommendation"]
        assert best["pool"] == "h100-sxm"
        with pytest.raises(RefusedReport, match="cannot be forecast") as caught:
            await running.observations.put("default", "a", "default@n2", body())
        assert caught.value.outcome == "no_advice", "a T4 has no BF16"
        plan = {"tensor": 2}
        await running.observations.put("default", "a", "default@n1", body(stepSeconds=1.0, gpus=4, plan=plan))
        await until(running, store, lambda: status(store).get("observed"))
    forecast = status(store)["forecast"]
    assert (forecast["gpus"], forecast["followed"]) == (4, False)
    assert "tp2" in forecast["plan"]
    assert forecast["rawSeconds"] > best["stepSeconds"]["target"]


async def test_refused_reports_leave_no_trace_but_their_count() -> None:
    store = store_with("a")
    store.put(f"{JOBS}/none", job("none", model={"preset": "lama"}))
    async with operator(store, advise, discovery=True) as running:
        await until(running, store, lambda: status(store).get("recommendation") and status(store, "none"))
        good = status(store)["recommendation"]["stepSeconds"]["target"]
        for namespace, name, token, sent, outcome in (
            ("default", "a", "", body(), "unauthenticated"),
            ("default", "a", "forged", body(), "unauthenticated"),
            ("default", "a", "other", body(), "forbidden"),
            ("default", "nobody", "default", body(), "unknown_job"),
            ("default", "none", "default", body(), "no_advice"),
            ("default", "a", "default", body(stepSeconds=0), "invalid"),
            ("default", "a", "default", b'{"stepSeconds": NaN}', "invalid"),
            ("default", "a", "default", body(stepSeconds=1000 * good), "implausible"),
            ("default", "a", "default", body(stepSeconds=good, gpu="RTX 4090"), "unknown_pool"),
        ):
            with pytest.raises(RefusedReport) as caught:
                await running.observations.put(namespace, name, token, sent)
            assert caught.value.outcome == outcome
            assert f'tilecast_observations_total{{outcome="{outcome}",source="put"}}' in metrics(running)
        await settled(running, 60)
    assert "observed" not in status(store)


async def test_an_annotation_is_one_report_and_a_wrong_one_is_answered() -> None:
    store = store_with("a")
    async with operator(store, advise, discovery=True) as running:
        await until(running, store, lambda: status(store).get("recommendation"))
        target = status(store)["recommendation"]["stepSeconds"]["target"]

        def annotate(text: str) -> None:
            job = store.objects[f"{JOBS}/a"]
            job["metadata"]["annotations"]["tilecast.dev/observed-step-seconds"] = text
            store.put(f"{JOBS}/a", job)

        def condition() -> dict[str, Any]:
            return next(item for item in status(store)["conditions"] if item["type"] == "ObservationsAvailable")

        annotate("fast")
        await until(running, store, lambda: condition()["reason"] == "Refused")
        assert "no number" in condition()["message"]
        annotate(f"{1.1 * target:.6g}")
        await until(running, store, lambda: condition()["reason"] == "Observed")
        for _ in range(3):
            running.cache.put_object(store.put(f"{JOBS}/a", store.objects[f"{JOBS}/a"]))
            await settled(running, 60)
        assert status(store)["observed"]["samples"] == 1
        assert status(store)["error"]["rawRatio"] == pytest.approx(1 / 1.1 - 1, abs=1e-3)


async def test_the_server_answers_puts_with_the_outcome() -> None:
    taken: list[tuple[str, str, str, bytes]] = []
    ended = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await ended.wait()

    async def take(namespace: str, name: str, token: str, sent: bytes) -> None:
        taken.append((namespace, name, token, sent))
        if name == "bad":
            raise RefusedReport("invalid", 422, "no")

    address, metrics = server.ListenAddress("127.0.0.1", 0, limits=server.ClientLimits(body_s=1.0)), Metrics()
    runner = await server.start_server(
        address, metrics.registry, lambda: None, lambda: None, lambda *_: nullcontext(), take
    )
    port = runner.port
    try:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer abc"}) as session:
            url = f"http://127.0.0.1:{port}/observations/team"
            async with session.put(f"{url}/good", data=b"{}") as answer:
                assert (answer.status, (await answer.json())["outcome"]) == (202, "accepted")
            async with session.put(f"{url}/bad", data=b"{}") as answer:
                assert (answer.status, await answer.json()) == (422, {"outcome": "invalid", "message": "no"})
            async with session.put(f"{url}/large", data=b" " * 20_000) as answer:
                assert answer.status == 413
            async with session.put(f"{url}/slow", data=slowly()) as answer:
                assert answer.status == 408
        ended.set()
    finally:
        await runner.cleanup()
    assert taken == [("team", "good", "abc", b"{}"), ("team", "bad", "abc", b"{}")]


async def test_reports_at_once_all_count() -> None:
    store = store_with("a")
    async with operator(store, advise, discovery=True) as running:
        await until(running, store, lambda: status(store).get("recommendation"))
        target = status(store)["recommendation"]["stepSeconds"]["target"]
        sent = body(stepSeconds=target)
        await asyncio.gather(*(running.observations.put("default", "a", "default@n1", sent) for _ in range(5)))
        await until(running, store, lambda: status(store).get("observed", {}).get("samples") == 5)


async def test_the_next_job_of_a_name_has_no_steps_yet() -> None:
    store = store_with("a")
    async with operator(store, advise, discovery=True) as running:
        await until(running, store, lambda: status(store).get("recommendation"))
        target = status(store)["recommendation"]["stepSeconds"]["target"]
        await running.observations.put("default", "a", "default@n1", body(stepSeconds=target))
        await until(running, store, lambda: status(store).get("observed"))
        del store.objects[f"{JOBS}/a"]
        store.put(f"{JOBS}/a", small("a"))  # this event comes before the deletion event of the earlier job
        await until(running, store, lambda: status(store).get("recommendation"))
        await running.observations.put("default", "a", "default@n1", body(stepSeconds=target))
        await until(running, store, lambda: status(store).get("observed"))
        assert status(store)["observed"]["samples"] == 1
