"""Runs that are withdrawn, forgotten, late, numerous, or of a replaced job, and the forecasts they still correct."""

from __future__ import annotations

import asyncio
import copy
import re
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from operator_store import operator, settled
from test_learning import LEARNING, RUN, TRAINING_JOBS, SharedStore
from test_observe import metrics, until
from test_targets import operating, shown, targeted, train_job
from test_transfer_operator import NODES, advised, report
from test_transfer_operator import better as better_places
from tilecast.advice import advise
from tilecast.api import pool_learning
from tilecast.api.calibration import ObservedRun
from tilecast.learning.job_calibration import NO_PARTS, MeasuredParts
from tilecast_operator.advisor import Advisor
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.controllers import pools
from tilecast_operator.controllers.learning import CALIBRATION
from tilecast_operator.kube.kinds import Key
from tilecast_operator.observed import run_store
from tilecast_operator.observed.calibrator import FittedCalibration
from tilecast_operator.observed.reports import RefusedReport, StepReport, add_report
from tilecast_operator.report import better_placement

STEP = "tilecast.dev/observed-step-seconds"


def annotate(store: SharedStore, name: str, seconds: float | None) -> None:
    path = f"{TRAINING_JOBS.format('team')}/{name}"
    document = copy.deepcopy(store.objects[path])
    if seconds is None:
        del document["metadata"]["annotations"][STEP]
    else:
        document["metadata"]["annotations"][STEP] = f"{seconds:.6g}"
    store.put(path, document)


def ratio(store: SharedStore, name: str) -> float:
    """Return the correction that measured runs give a job's first alternative."""
    return float(store.status("team", name)["alternatives"][0].get("ownRunsRatio", 1.0))


async def test_a_step_that_a_job_brings_along_counts_at_once() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        raw_s = (await advised(running, store, "team", "a"))["recommendation"]["stepSeconds"]["target"]
        store.add("team", "b")
        annotate(store, "b", 1.5 * raw_s)
        running.cache.put_object(copy.deepcopy(store.objects[f"{TRAINING_JOBS.format('team')}/b"]))
        await settled(running)
        assert store.status("team", "b")["observed"]["samples"] == 1
        assert ratio(store, "b") > 1.05


async def test_a_run_that_is_withdrawn_corrects_no_successor_any_longer() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        raw_s = (await advised(running, store, "team", "a"))["recommendation"]["stepSeconds"]["target"]
        await advised(running, store, "team", "twin")
        annotate(store, "a", 1.5 * raw_s)
        await until(running, store, lambda: store.step_s("team", "twin") > 1.05 * raw_s)
        annotate(store, "a", None)
        await until(running, store, lambda: "observed" not in store.status("team", "a"))
        await until(running, store, lambda: store.runs == [])
        await settled(running)
        assert "your run" not in store.status("team", "twin")["recommendation"]["reason"]
        assert store.step_s("team", "twin") < 1.05 * raw_s


@pytest.mark.slow
async def test_a_run_that_is_forgotten_corrects_nobody_any_longer() -> None:
    store = SharedStore()
    store.clock_s = 1_800_000_000.0
    async with operator(store, advise, NODES, discovery=True) as running:
        raw_s = (await advised(running, store, "team", "a"))["recommendation"]["stepSeconds"]["target"]
        await advised(running, store, "team", "twin")
        await report(running, "team", "a", 1.5 * raw_s)
        await until(running, store, lambda: store.step_s("team", "twin") > 1.05 * raw_s and store.runs)
        document = copy.deepcopy(store.objects[LEARNING])
        document["metadata"].setdefault("annotations", {})[pool_learning.FORGET] = f"job/{store.runs[0]['uid']}"
        running.cache.put_object(store.put(LEARNING, document))
        await until(running, store, lambda: store.runs == [])
        await settled(running)
        assert "your run" not in store.status("team", "twin")["recommendation"]["reason"]
        assert store.step_s("team", "twin") < 1.05 * raw_s
        assert ratio(store, "a") == 1.0
    async with operator(store, advise, NODES, discovery=True) as again:
        await settled(again)
        assert store.status("team", "a")["observed"] and ratio(store, "a") == 1.0


@pytest.mark.slow
async def test_a_run_has_only_those_looked_at_whose_forecast_it_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, question = list[str](), Advisor.read_search_inputs

    async def noting(self: Advisor, namespace: str, asked: dict[str, Any], **options: Any) -> Any:
        looked.append(asked["metadata"]["name"])
        return await question(self, namespace, asked, **options)

    monkeypatch.setattr(Advisor, "read_search_inputs", noting)
    store, names = SharedStore(), {f"j{number}": 16 + 8 * number for number in range(10)}
    async with operator(store, advise, NODES, discovery=True) as running:
        for name, batch in names.items():
            raw_s = (await advised(running, store, "team", name, batch))["recommendation"]["stepSeconds"]["target"]
            await report(running, "team", name, 1.1 * raw_s)
        await until(running, store, lambda: len(store.runs) == len(names))
        await advised(running, store, "team", "waits", 128)
        await settled(running)
        looked.clear()
        before_s = store.step_s("team", "waits")
        await report(running, "team", "j3", 1.6 * store.step_s("team", "j3"))
        await until(running, store, lambda: store.step_s("team", "waits") != before_s)
        await settled(running)
    assert set(looked) == {"j3", "waits"}


@pytest.mark.slow
async def test_metrics_tell_whose_runs_correct_how_many_jobs_and_how_far() -> None:
    store = SharedStore()

    def counts(running: OperatorParts) -> dict[str, float]:
        shown = re.findall(r'tilecast_own_runs_jobs{run="(\w+)"} (\S+)', metrics(running))
        return {run: float(value) for run, value in shown}

    async with operator(store, advise, NODES, discovery=True) as running:
        raw_s = (await advised(running, store, "team", "nightly-2"))["recommendation"]["stepSeconds"]["target"]
        assert counts(running) == {"own": 0, "successor": 0, "relative": 0}
        await report(running, "team", "nightly-2", 1.5 * raw_s)
        await until(running, store, lambda: "alternativesHash" in store.status("team", "nightly-2"))
        await advised(running, store, "team", "nightly-3")
        await advised(running, store, "team", "nightly-4", 48)
        await advised(running, store, "team", "other", 64)
        assert counts(running) == {"own": 1, "successor": 1, "relative": 1}
        change = f'tilecast_own_runs_change_ratio{{run="own"}} {ratio(store, "nightly-2") - 1:.6g}'
        assert change[:-1] in metrics(running)
    async with operator(store, advise, NODES, discovery=True) as again:
        await settled(again)
        assert counts(again) == {"own": 1, "successor": 1, "relative": 1}
        for name in ("nightly-2", "nightly-3"):
            again.cache.remove_object(store.objects.pop(f"{TRAINING_JOBS.format('team')}/{name}"))
        assert counts(again) == {"own": 0, "successor": 0, "relative": 1}
        assert 'tilecast_own_runs_change_ratio{run="own"} NaN' in metrics(again)


async def start_late(store: SharedStore, running: OperatorParts, late: Any) -> None:
    """Show a PoolLearning after everything else was answered, as its own watch may."""
    await settled(running)
    store.objects[LEARNING] = late
    running.cache.put_object(late)
    await settled(running)


@pytest.mark.slow
async def test_runs_that_are_seen_late_after_a_restart_correct_as_before() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        raw_s = (await advised(running, store, "team", "a"))["recommendation"]["stepSeconds"]["target"]
        await report(running, "team", "a", 1.5 * raw_s)
        await until(running, store, lambda: store.runs)
        running.cache.remove_object(store.objects.pop(f"{TRAINING_JOBS.format('team')}/a"))
        corrected_s = (await advised(running, store, "team", "b"))["recommendation"]["stepSeconds"]["target"]
    assert corrected_s > 1.05 * raw_s
    late = store.objects.pop(LEARNING)
    async with operator(store, advise, NODES, discovery=True) as again:
        await start_late(store, again, late)
        assert store.step_s("team", "b") == pytest.approx(corrected_s, rel=1e-6)


@pytest.mark.slow
async def test_a_step_withdrawn_while_no_operator_ran_stays_withdrawn() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        raw_s = (await advised(running, store, "team", "a"))["recommendation"]["stepSeconds"]["target"]
        annotate(store, "a", 1.5 * raw_s)
        await until(running, store, lambda: store.runs)
    annotate(store, "a", None)
    late = store.objects.pop(LEARNING)
    async with operator(store, advise, NODES, discovery=True, calibrate_settle_s=0.5) as again:
        store.objects[LEARNING] = late
        await asyncio.sleep(0.2)
        again.cache.put_object(late)
        await until(again, store, lambda: store.runs == [])
        assert (await advised(again, store, "team", "b"))["recommendation"]["stepSeconds"]["target"] == raw_s


@pytest.mark.slow
async def test_a_jobs_own_run_counts_however_many_others_ran_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "MAX_RUNS", 2)
    store = SharedStore()
    same: dict[str, Any] = {"gpus": 8, "plan": {"data": 8, "zeroStage": 0, "microBatchSize": 2}}
    store.clock_s, others = 1_800_000_000.0, [f"other{number}" for number in range(4)]
    async with operator(store, advise, NODES, discovery=True) as running:
        raw_s = (await advised(running, store, "team", "own"))["recommendation"]["stepSeconds"]["target"]
        for name in others:
            await advised(running, store, "team", name)
        await report(running, "team", "own", 2.0 * raw_s, **same)
        await until(running, store, lambda: "alternativesHash" in store.status("team", "own"))
        await settled(running)
        alone, writes = store.status("team", "own"), len(store.writes)
        for name in others:
            store.clock_s += 60
            await report(running, "team", name, raw_s, **same)
            await until(running, store, lambda name=name: "alternativesHash" in store.status("team", name))  # type: ignore[misc]
        await until(running, store, lambda: {run["job"] for run in store.runs} == {"other2", "other3"})
        await settled(running)
        assert store.status("team", "own")["alternatives"] == alone["alternatives"]
        of_own = f"{TRAINING_JOBS.format('team')}/own"
        assert not [path for _, path in store.writes[writes:] if path.startswith(of_own)], "nothing of it has changed"
        assert (await advised(running, store, "team", "next"))["recommendation"]["stepSeconds"]["target"] < 1.05 * raw_s
    async with operator(store, advise, NODES, discovery=True) as again:
        await settled(again)
        assert store.status("team", "own")["alternatives"] == alone["alternatives"]


async def test_a_report_of_a_job_that_was_replaced_meanwhile_counts_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, may_end = SharedStore(), asyncio.Event()
    priced, was_asked = Advisor.forecast_running, asyncio.Event()

    async def slow(*arguments: Any, **chosen: Any) -> Any:
        was_asked.set()
        await may_end.wait()
        return await priced(*arguments, **chosen)

    monkeypatch.setattr(Advisor, "forecast_running", slow)
    async with operator(store, advise, NODES, discovery=True) as running:
        raw_s = (await advised(running, store, "team", "a"))["recommendation"]["stepSeconds"]["target"]
        sent = asyncio.create_task(report(running, "team", "a", 1.5 * raw_s))
        await was_asked.wait()
        running.cache.remove_object(store.objects.pop(f"{TRAINING_JOBS.format('team')}/a"))
        await advised(running, store, "team", "a", 32)
        may_end.set()
        with pytest.raises(RefusedReport) as caught:
            await sent
        assert caught.value.outcome == "unknown_job"
        await settled(running)
        assert "observed" not in store.status("team", "a") and "forecast" not in store.status("team", "a")


async def test_a_job_that_is_created_anew_during_a_forecast_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store, priced, replaced = SharedStore(), Advisor.forecast_running, list[str]()
    path = f"{TRAINING_JOBS.format('team')}/a"
    async with operator(store, advise, NODES, discovery=True) as running:

        async def replacing(*arguments: Any, **chosen: Any) -> Any:
            done = await priced(*arguments, **chosen)
            if not replaced:
                replaced.append(path)
                old = store.objects.pop(path)
                running.cache.remove_object(copy.deepcopy(old))
                metadata = {
                    "name": "a",
                    "namespace": "team",
                    "annotations": {STEP: old["metadata"]["annotations"][STEP]},
                }
                new = {name: part for name, part in old.items() if name != "status"} | {"metadata": metadata}
                running.cache.put_object(store.put(path, new))
            return done

        monkeypatch.setattr(Advisor, "forecast_running", replacing)
        raw_s = (await advised(running, store, "team", "a"))["recommendation"]["stepSeconds"]["target"]
        annotate(store, "a", 1.5 * raw_s)
        running.cache.put_object(copy.deepcopy(store.objects[path]))
        await settled(running)
        assert replaced and "observed" in store.status("team", "a")


async def test_what_was_learnt_of_fewer_runs_never_replaces_what_was_learnt_of_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, may_end, begun = SharedStore(), threading.Event(), list[int]()
    runs = [replace(RUN, pool="h100-sxm", workload=f"w{number}", observed_s=0.9) for number in range(8)]
    items = [
        ObservedRun(f"u{number}", f"2026-01-01T00:0{number}:00Z", run, f"j{number}") for number, run in enumerate(runs)
    ]

    def slow(known: Any, *question: Any) -> FittedCalibration:
        begun.append(len(known))
        if len(known) == 4:
            may_end.wait(20)
        return FittedCalibration.fit(known, *question)

    def written(count: int) -> Any:
        return store.put(LEARNING, pool_learning.pool_learning_document("h100-sxm", items[:count], []))

    monkeypatch.setattr(pools, "FittedCalibration", SimpleNamespace(fit=slow))
    written(4)
    async with operator(store, advise, discovery=True, calibrate_settle_s=600.0) as running:
        while not begun:
            await asyncio.sleep(0.01)
        running.cache.put_object(written(8))
        running.runtime.add(CALIBRATION)
        await asyncio.sleep(0.3)
        may_end.set()
        await settled(running)
        assert running.learning.calibrator.default_table.runs == 8


@pytest.mark.slow
async def test_a_job_that_has_ended_is_not_told_to_move() -> None:
    store = targeted()
    async with operating(store) as running:
        answer = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        seconds = {STEP: f"{1.5 * answer['recommendation']['stepSeconds']['target']:.6g}"}
        train_job(store, suspend=False, annotations=seconds)
        running_job = await shown(running, store, lambda status: better(status), "what is better")
        assert better(running_job)["reason"] == "NoneBetter"
        train_job(
            store, suspend=False, annotations=seconds, status={"conditions": [{"type": "Complete", "status": "True"}]}
        )
        ended = await shown(running, store, lambda status: better(status)["reason"] != "NoneBetter", "its end")
        assert (better(ended)["status"], better(ended)["reason"]) == ("False", "JobEnded")


def better(status: dict[str, Any]) -> dict[str, Any]:
    return next((item for item in status.get("conditions", ()) if item["type"] == better_placement.KIND), {})


def test_a_place_that_costs_nothing_can_be_named_to_a_job_that_wants_the_least_price() -> None:
    (place,) = better_places(0.5, 0.0, None, "cost")
    assert (place.gain, place.pays_after) == (1.0, 0)


def test_a_step_is_never_shorter_than_what_it_waits_for() -> None:
    window = None
    for seconds, waited in ((1.0, 0.1), (1.0, 0.1), (5.0, 4.8)):
        window = add_report(window, StepReport(seconds, "put", parts=MeasuredParts(waited)), "t")
    assert window is not None and window.seconds == 1.0
    assert window.parts.sum_s < window.seconds
    later = add_report(window, StepReport(0.5, "annotation"), "t")
    assert later.latest.parts.input_s == pytest.approx(0.1 * (0.5 + (4.8 - 0.5) / 3)), "the mean of the reports' shares"
    silent = add_report(None, StepReport(1.0, "put"), "t")
    assert silent.parts == NO_PARTS


async def test_nothing_is_kept_of_who_asked_once_it_is_gone() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        await advised(running, store, "team", "a")
        workloads = {"w"}
        there, gone = (Key("TrainingJob", "team", name) for name in ("a", "gone"))
        running.learning.find_runs("team", [there, gone], workloads)
        assert running.learning.run_requesters.find_requesters("team", "w", "") == {there}, (
            "nobody would let go of the other"
        )
        running.cache.remove_object(store.objects.pop(f"{TRAINING_JOBS.format('team')}/a"))
        assert len(running.learning.run_requesters) == 0
