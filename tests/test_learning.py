"""Learning in the operator: where runs are kept, how they are forgotten, and how little a hostile namespace gains."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from operator_store import LEARNINGS, POOLS, job, operator, patched, settled
from test_observe import Reviewing, body, metrics, until
from tilecast.advice import advise
from tilecast.api import pool_learning
from tilecast.api.calibration import ObservedRun
from tilecast.api.pool_learning import MAX_KEPT, ForgetRequest
from tilecast.cli import main
from tilecast.learning.calibration import Calibration, Correction, Run
from tilecast.spec import SpecError
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.controllers import pools
from tilecast_operator.kube.client import ApiError
from tilecast_operator.observed.calibrator import Calibrator, FittedCalibration
from tilecast_operator.observed.run_store import RunStore

TRAINING_JOBS = "/apis/tilecast.dev/v1alpha1/namespaces/{}/trainingjobs"
LEARNING = f"{LEARNINGS}/h100-sxm"
RUN = Run("p", "h100-sxm", "bf16", "decoder", "2-8", "w", 1.2, 1.0, 5, "none", "team")


class SharedStore(Reviewing):
    """A store with several namespaces."""

    def add(self, namespace: str, name: str, batch: int = 16) -> None:
        training = {"sequenceLength": 512, "globalBatchSize": batch, "precision": "bf16"}
        document = job(name, model={"preset": "gpt2"}, training=training, constraints={"gpus": 8})
        document["metadata"]["namespace"] = namespace
        self.put(f"{TRAINING_JOBS.format(namespace)}/{name}", document)

    def status(self, namespace: str, name: str) -> dict[str, Any]:
        document: dict[str, Any] = self.objects[f"{TRAINING_JOBS.format(namespace)}/{name}"].get("status", {})
        return document

    def step_s(self, namespace: str, name: str) -> float:
        return float(self.status(namespace, name)["recommendation"]["stepSeconds"]["target"])

    @property
    def runs(self) -> list[dict[str, Any]]:
        document: list[dict[str, Any]] = self.objects.get(LEARNING, {}).get("spec", {}).get("runs", [])
        return document

    async def patch(self, path: str, operations: Any) -> dict[str, Any]:
        self.writes.append(("patch", path))
        assert operations[0]["op"] == "test"
        return self.put(path, patched(self.objects[path], operations[1:]))


def namespace(name: str, uid: str = "") -> dict[str, Any]:
    metadata = {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": "1", "labels": {}}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


async def measure(
    running: OperatorParts, store: SharedStore, space: str, factor: float, names: Mapping[str, int]
) -> None:
    """Create jobs that each report three times a step of `factor` times their raw forecast."""
    for name, batch in names.items():
        store.add(space, name, batch)
    await until(running, store, lambda: all(store.status(space, name).get("recommendation") for name in names))
    for name in names:
        raw_s = store.step_s(space, name)
        for _ in range(3):
            await running.observations.put(space, name, f"{space}@n1", body(stepSeconds=factor * raw_s))


async def forecast(running: OperatorParts, store: SharedStore, space: str, name: str) -> float:
    store.add(space, name, 24)
    await until(running, store, lambda: store.status(space, name).get("recommendation"))
    return store.step_s(space, name)


HONEST = {f"h{n}": 16 + 8 * n for n in range(4)}


async def test_runs_are_kept_with_who_measured_them_and_not_in_the_pool() -> None:
    store = SharedStore()
    async with operator(store, advise, discovery=True) as running:
        running.cache.put_object(namespace("honest"))
        await measure(running, store, "honest", 1.2, {"a": 16})
        await until(running, store, lambda: store.runs)
    (stored,) = store.runs
    assert (stored["namespace"], stored["job"], stored["serviceAccount"]) == ("honest", "a", "trainer")
    assert (stored["source"], stored["namespaceUid"], stored["observations"]) == ("put", "uid-honest", 3)
    pool = store.objects[f"{POOLS}/h100-sxm"]["status"]
    assert pool["calibration"]["corrections"]
    assert "honest" not in json.dumps(pool) and "runs" not in pool["calibration"]


@pytest.mark.slow
async def test_a_hostile_namespace_moves_nobody_and_is_shown() -> None:
    store = SharedStore()
    async with operator(store, advise, discovery=True) as running:
        await measure(running, store, "honest", 1.13, HONEST)
        await until(running, store, lambda: len(store.runs) == 4)
        before = [await forecast(running, store, space, f"{space}-before") for space in ("honest", "third")]
        await measure(running, store, "evil", 8.0, {"e1": 16, "e2": 24, "e3": 32})
        await until(running, store, lambda: len(store.runs) == 7)
        await until(running, store, lambda: "RunQuarantined" in {one["reason"] for one in store.events.values()})
        after = [await forecast(running, store, space, f"{space}-after") for space in ("honest", "third")]
        assert after == pytest.approx(before, rel=1e-3)
        assert 'tilecast_learning_runs{pool="h100-sxm",standing="Absurd"} 3.0' in metrics(running)
        await measure(running, store, "sly", 2.5, {f"s{n}": 16 + n for n in range(8)})
        await until(running, store, lambda: len(store.runs) == 15)
        later = [await forecast(running, store, space, f"{space}-later") for space in ("honest", "third")]
        for now, then in zip(later, before, strict=True):
            assert 1 / 1.101 <= now / then <= 1.101
        assert await forecast(running, store, "sly", "own") > 1.5 * before[1], "it follows its own runs"
        assert "tilecast_learning_bounded_namespaces 1.0" in metrics(running)
    conditions = store.objects[f"{POOLS}/h100-sxm"]["status"]["conditions"]
    assert next(item for item in conditions if item["type"] == "Drifted")["status"] == "False"


@pytest.mark.slow
async def test_a_namespace_alone_makes_nobody_else_sure() -> None:
    def confidence(name: str) -> tuple[float, float, str]:
        status = store.status("third", name)
        step = status["recommendation"]["stepSeconds"]
        reason = next(item["reason"] for item in status["conditions"] if item["type"] == "LowConfidence")
        return step["lowerBound"] / step["target"], step["upperBound"] / step["target"], reason

    store = SharedStore()
    async with operator(store, advise, discovery=True) as running:
        await forecast(running, store, "third", "before")
        before = confidence("before")
        await measure(running, store, "evil", 2.9, {f"e{n}": 16 + n for n in range(12)})
        await until(running, store, lambda: len(store.runs) == 12)
        await until(running, store, lambda: running.learning.calibrator.default_table.runs >= 6)
        await forecast(running, store, "third", "after")
        after = confidence("after")
        assert after[2] == before[2]
        assert after[:2] == pytest.approx(before[:2], rel=1e-3)


async def test_jobs_are_answered_while_runs_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    store, begun, may_end = SharedStore(), threading.Event(), threading.Event()
    was_let: list[bool] = []

    def slow(*question: Any) -> FittedCalibration:
        if question[0]:
            begun.set()
            was_let.append(may_end.wait(20))
        return FittedCalibration.fit(*question)

    monkeypatch.setattr(pools, "FittedCalibration", SimpleNamespace(fit=slow))
    async with operator(store, advise, discovery=True, advisors=1) as running:
        try:
            await measure(running, store, "team", 1.2, {"a": 16})
            while not begun.is_set():
                await asyncio.sleep(0.02)
            store.add("other", "b", 24)
            path = f"{TRAINING_JOBS.format('other')}/b"
            running.cache.put_object(store.objects[path])
            while not store.status("other", "b").get("recommendation") and not was_let:
                await asyncio.sleep(0.02)
        finally:
            may_end.set()
        await settled(running)
    assert all(was_let), "the answer came only once the learning gave up waiting for it"


@pytest.mark.slow
async def test_trusted_namespaces_teach_everybody_and_none_does_without_learning() -> None:
    for settings, factor in (({"trusted_namespaces": "bench, x"}, 1.5), ({}, 1.1), ({"learning": False}, 1.0)):
        store = SharedStore()
        async with operator(store, advise, discovery=True, **settings) as running:
            raw_s = await forecast(running, store, "team", "before")
            await measure(running, store, "bench", 1.5, {f"s{n}": 16 + n for n in range(12)})
            await until(running, store, lambda store=store: "error" in store.status("bench", "s11"))  # type: ignore[misc]
            await settled(running, 60)
            assert await forecast(running, store, "team", "after") == pytest.approx(factor * raw_s, rel=0.06)
            assert LEARNING in store.objects or factor == 1.0


@pytest.mark.slow
async def test_a_deleted_namespace_is_forgotten_at_once_and_after_a_restart() -> None:
    store = SharedStore()
    there = [namespace(name) for name in ("honest", "gone", "later")]
    async with operator(store, advise, discovery=True) as running:
        for one in there:
            running.cache.put_object(one)
        for one in there:
            await measure(running, store, one["metadata"]["name"], 1.2, {"a": 16})
        await until(running, store, lambda: len(store.runs) == 3)
        running.cache.remove_object(there[1])
        del store.objects[f"{TRAINING_JOBS.format('gone')}/a"]
        await until(running, store, lambda: {run["namespace"] for run in store.runs} == {"honest", "later"})
    store.counts["/api/v1/namespaces"] = {"metadata": {}, "items": [{}]}
    del store.objects[f"{TRAINING_JOBS.format('later')}/a"]
    async with operator(store, advise, discovery=True) as again:
        again.cache.put_object(namespace("honest"))
        await until(again, store, lambda: {run["namespace"] for run in store.runs} == {"honest"})
    store.put(LEARNING, {**store.objects[LEARNING]})
    del store.objects[f"{TRAINING_JOBS.format('honest')}/a"]
    async with operator(store, advise, discovery=True) as again:
        again.cache.put_object(namespace("honest", "another of its name"))
        await until(again, store, lambda: store.runs == [])


@pytest.mark.slow
async def test_an_administrator_has_a_namespace_a_job_or_a_pool_forgotten_for_good() -> None:
    store = SharedStore()
    store.clock_s = 1_800_000_000.0
    async with operator(store, advise, discovery=True) as running:
        for space in ("a", "b", "c"):
            await measure(running, store, space, 1.2, {"x": 16, "y": 24})
        await until(running, store, lambda: len(store.runs) == 6)
        uid = next(run["uid"] for run in store.runs if run["namespace"] == "b")
        for text, left in (("namespace/a", 4), (f"job/{uid}", 3), ("nonsense", 3)):
            document = copy.deepcopy(store.objects[LEARNING])
            document["metadata"].setdefault("annotations", {})[pool_learning.FORGET] = text
            running.cache.put_object(store.put(LEARNING, document))
            await until(running, store, lambda left=left: len(store.runs) == left)  # type: ignore[misc]
            await settled(running, 60)
        assert store.objects[LEARNING]["metadata"]["annotations"] == {pool_learning.FORGET: "nonsense"}
    async with operator(store, advise, discovery=True) as again:
        await settled(again, 60)
        assert len(store.runs) == 3, "statuses of jobs do not bring them back"
        again.cache.remove_object(store.objects.pop(LEARNING))
        await until(again, store, lambda: LEARNING in store.objects)
        assert store.runs == []
    async with operator(store, advise, discovery=True) as again:
        await settled(again, 60)
        assert store.runs == []


@pytest.mark.slow
async def test_runs_in_the_status_of_a_pool_are_taken_over_once_as_of_unknown_origin() -> None:
    store = SharedStore()
    async with operator(store, advise, discovery=True) as running:
        await measure(running, store, "team", 1.2, {"a": 16, "b": 24})
        await until(running, store, lambda: len(store.runs) == 2)
    old = [
        {key: run[key] for key in run if key in pool_learning.RunRecord.model_json_schema()["properties"]}
        for run in store.runs
    ]
    pool = store.objects[f"{POOLS}/h100-sxm"]
    pool["status"]["calibration"]["runs"] = [{**old[0], "uid": f"old-{n}"} for n in range(3)] + old
    del store.objects[LEARNING]
    async with operator(store, advise, discovery=True) as again:
        await until(again, store, lambda: len(store.runs) == 5)
        await until(again, store, lambda: "runs" not in store.objects[f"{POOLS}/h100-sxm"]["status"]["calibration"])
    assert sorted(run["namespace"] for run in store.runs) == ["", "", "", "team", "team"]


@pytest.mark.slow
async def test_what_no_watch_has_shown_yet_is_not_written_over() -> None:
    store = SharedStore()
    async with operator(store, advise, discovery=True) as running:
        await measure(running, store, "team", 1.2, {"a": 16, "b": 24})
        await until(running, store, lambda: len(store.runs) == 2)
    del store.objects[f"{TRAINING_JOBS.format('team')}/a"]
    written = store.objects.pop(LEARNING)
    async with operator(store, advise, discovery=True) as again:
        store.objects[LEARNING] = written
        await settled(again, 60)
        assert again.learning.list_pools()
    assert {run["job"] for run in store.runs} == {"a", "b"}


async def test_what_the_replica_that_led_wrote_last_is_not_written_over() -> None:
    store = SharedStore()
    async with operator(store, advise, discovery=True, retry_first_s=1.0, retry_most_s=1.0) as running:
        await measure(running, store, "team", 1.2, {"a": 16})
        await until(running, store, lambda: len(store.runs) == 1)
        newer = copy.deepcopy(store.objects[LEARNING])
        newer["spec"]["runs"].append({**newer["spec"]["runs"][0], "uid": "uid-other", "job": "other"})
        newer = store.put(LEARNING, newer)
        count = store.writes.count(("apply", LEARNING))
        store.add("team", "b", 24)
        running.cache.put_object(copy.deepcopy(store.objects[f"{TRAINING_JOBS.format('team')}/b"]))
        while not store.status("team", "b").get("recommendation"):
            await asyncio.sleep(0.01)
        running.cache.put_object(copy.deepcopy(store.objects[f"{TRAINING_JOBS.format('team')}/b"]))
        await running.observations.put("team", "b", "team@n1", body(stepSeconds=1.2 * store.step_s("team", "b")))
        while store.writes.count(("apply", LEARNING)) == count:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert {run["job"] for run in store.runs} == {"a", "other"}, "it has changed since it was seen"
        running.cache.put_object(newer)
        await until(running, store, lambda: len(store.runs) == 3)


@pytest.mark.slow
async def test_no_pool_is_lost_where_poollearnings_are_not_served() -> None:
    store, lost = SharedStore(), list[str]()
    async with operator(store, advise, discovery=True) as running:
        await measure(running, store, "team", 1.2, {"a": 16})
        await until(running, store, lambda: len(store.runs) == 1)
    names = pool_learning.RunRecord.model_json_schema()["properties"]
    old = [{key: run[key] for key in run if key in names} for run in store.runs]
    store.objects[f"{POOLS}/h100-sxm"]["status"]["calibration"]["runs"] = old
    del store.objects[LEARNING]
    tried = list[str]()

    def refuse(path: str) -> None:
        if path.startswith(LEARNINGS):
            tried.append(path)
            raise ApiError(404, "the server could not find the requested resource")

    store.before_write = refuse
    async with operator(store, advise, discovery=True) as again:
        again.cache.pools.add_listener(lambda key, before, now: lost.append(key.name) if now is None else None)
        while len(tried) < 4:
            await asyncio.sleep(0.01)
        assert not lost
        store.before_write = lambda path: None
        await until(again, store, lambda: len(store.runs) == 1)


def item(number: int, space: str = "team", pool: str = "p") -> ObservedRun:
    run = Run(pool, "h100-sxm", "bf16", "decoder", "2-8", f"w{number}", 1.2, 1.0, 5, "none", space)
    return ObservedRun(
        f"{space}-{number:05}", f"2026-01-01T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}Z", run
    )


def test_forecasts_of_a_namespace_change_once_its_own_table_differs_from_the_one_they_go_by() -> None:
    calibrator, bare = Calibrator(RunStore()), FittedCalibration.fit((), ())

    def adopt(**ratios: float) -> tuple[bool, dict[str, float]]:
        tables: dict[str | None, Calibration] = {
            None if name == "others" else name: Calibration((Correction(("h100-sxm",), ratio=ratio, runs=10, own=10),))
            for name, ratio in ratios.items()
        }
        is_other = calibrator.adopt_fit(replace(bare, tables=tables))
        by = {"others": calibrator.default_table, **calibrator.namespace_tables}
        return is_other, {name: table.corrections[0].ratio for name, table in by.items()}

    assert adopt(others=1.0, team=1.2) == (True, {"others": 1.0, "team": 1.2})
    assert adopt(others=1.006, team=1.3) == (True, {"others": 1.0, "team": 1.3}), "strangers go on as they are"
    assert adopt(others=1.009, team=1.305) == (False, {"others": 1.0, "team": 1.3})
    assert adopt(others=1.012, team=1.31) == (True, {"others": 1.012, "team": 1.3}), "small changes add up"
    assert adopt(others=1.012, team=1.314, new=1.015) == (True, {"others": 1.012, "team": 1.314, "new": 1.012})
    assert adopt(others=1.012, new=1.012) == (True, {"others": 1.012, "new": 1.012}), "a namespace is forgotten"


@pytest.mark.slow
def test_a_pool_keeps_so_many_runs_and_a_flood_drives_out_only_itself() -> None:
    store = RunStore()
    for number in range(8):
        store.store_run(item(number, "honest"))
    for space in range(40):
        for number in range(100):
            store.store_run(item(100 + number, f"flood-{space}"))
    stored = store.list_pool_runs("p")
    assert len(stored) == MAX_KEPT
    assert sum(one.run.namespace == "honest" for one in stored) == 8
    document = pool_learning.pool_learning_document(
        "p", [replace_texts(one) for one in stored], [(ForgetRequest(), "now")]
    )
    assert len(json.dumps(document)) < 2**20
    again = RunStore()
    again.restore_runs("p", pool_learning.read_learnt_runs("p", store.make_learning_document("p")))
    assert again.make_learning_document("p") == store.make_learning_document("p")


def replace_texts(one: ObservedRun) -> ObservedRun:
    """Return the run with names of the greatest usual length."""
    return ObservedRun("u" * 36, one.time, one.run, "j" * 63, "s" * 63, "prometheus", "n" * 36)


def test_what_cannot_be_forgotten_is_refused() -> None:
    assert str(ForgetRequest.parse("namespace/team-a")) == "namespace/team-a"
    assert ForgetRequest.parse(" all ").matches(item(1))
    assert ForgetRequest.parse("namespace/").matches(item(1, ""))
    assert not ForgetRequest.parse("job/x").matches(item(1))
    for text in ("", "namespace", "pool/x", "all/x", "job/a b"):
        with pytest.raises(SpecError, match="names nothing"):
            ForgetRequest.parse(text)


def test_the_command_line_shows_who_taught_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [item(n, "honest") for n in range(6)]
    wild = [
        ObservedRun(one.uid, one.time, Run("p", *forged(one.run)), "job", "trainer", "put")
        for one in (item(n, "evil") for n in range(2))
    ]
    file = tmp_path / "learnings.json"
    file.write_text(
        json.dumps({"kind": "List", "items": [pool_learning.pool_learning_document("p", [*runs, *wild], [])]})
    )
    assert main(["learning", "list", "--file", str(file)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in listed[1:]] == [
        ["p", "evil", "2", "0", "-85%"],
        ["p", "honest", "6", "6", "+20%"],
    ]
    assert "2 quarantined: Absurd" in listed[1]
    assert main(["learning", "show", "--file", str(file), "--namespace", "evil"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and all("evil/job" in line and "trainer" in line and "Absurd" in line for line in shown[1:])
    file.write_text("{}")
    assert main(["learning", "list", "--file", str(file)]) == 2
    assert "holds no PoolLearnings" in capsys.readouterr().err


def forged(run: Run) -> tuple[Any, ...]:
    return (run.gpu, run.precision, run.family, run.scale, run.workload, run.predicted_s, 8.0, 5, "none", "evil")


def test_the_command_line_asks_the_operator_to_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "kubectl"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["learning", "forget", "--namespace", "evil", "--context", "prod"]) == 0
    assert main(["learning", "forget", "--pool", "a100", "--all"]) == 0
    assert (tmp_path / "asked").read_text().splitlines() == [
        "--context prod annotate poollearnings.tilecast.dev --all tilecast.dev/forget=namespace/evil --overwrite",
        "annotate poollearnings.tilecast.dev a100 tilecast.dev/forget=all --overwrite",
    ]
    assert main(["learning", "forget", "--job", "a b"]) == 2
    assert "names nothing" in capsys.readouterr().err
