"""Measured runs in the operator: they change the forecasts of their own job and its successors, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from advice_values import offer
from operator_store import node, operator, settled
from test_learning import TRAINING_JOBS, SharedStore
from test_observe import body, until
from test_targets import operating, shown, targeted, train_job
from tilecast.advice import advise
from tilecast.api.status import Alternative, Condition, Recommendation, StepSeconds, TrainingJobStatus
from tilecast.objectives import OBJECTIVES, ObjectiveRecord, Quantity
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.observed.calibrator import MeasuredForecast
from tilecast_operator.observed.reports import CompleteForecast, StepReport, StepWindow
from tilecast_operator.observed.run_store import name_template
from tilecast_operator.report import better_placement
from tilecast_operator.report.better_placement import BetterPlacement, MoveCost
from tilecast_operator.report.job_status import ConditionContent

NODES = (node("n1"), node("n2", "NVIDIA-A100-SXM4-80GB"))


async def advised(running: OperatorParts, store: SharedStore, space: str, name: str, batch: int = 16) -> dict[str, Any]:
    store.add(space, name, batch)
    await until(running, store, lambda: store.status(space, name).get("recommendation"))
    return store.status(space, name)


async def report(running: OperatorParts, space: str, name: str, seconds: float, **fields: Any) -> None:
    await running.observations.put(space, name, f"{space}@n1", body(stepSeconds=seconds, **fields))


@pytest.mark.slow
async def test_one_report_corrects_a_jobs_alternatives_and_not_its_forecast() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        before = await advised(running, store, "team", "a")
        other = await advised(running, store, "team", "other", 48)
        stranger = await advised(running, store, "strangers", "a")
        twin = await advised(running, store, "team", "twin")
        target_s = before["recommendation"]["stepSeconds"]["target"]
        await report(running, "team", "a", 1.5 * target_s)
        await until(running, store, lambda: "alternativesHash" in store.status("team", "a"))
        await until(running, store, lambda: store.step_s("team", "twin") > 1.05 * target_s)
        await settled(running)
        after = store.status("team", "a")
        assert after["recommendation"] == before["recommendation"]
        assert after["forecast"]["stepSeconds"] == before["recommendation"]["stepSeconds"]
        assert after["error"]["calibratedRatio"] == pytest.approx(1 / 1.5 - 1, abs=1e-3)
        assert {row["pool"] for row in after["alternatives"]} == {row["pool"] for row in before["alternatives"]}
        for row in after["alternatives"]:
            assert 1.02 < row["ownRunsRatio"] <= 1.5
            assert row["stepSeconds"]["target"] == pytest.approx(row["ownRunsRatio"] * row["rawStepSeconds"], rel=1e-3)
            assert f"{row['ownRunsRatio']:.2f}x its forecast by your run on 8 h100-sxm" in row["reason"]
        assert len(twin["alternatives"]) == 2 and "ownRunsRatio" in store.status("team", "twin")["alternatives"][0]
        assert store.status("team", "other")["alternatives"] == other["alternatives"]
        assert store.status("strangers", "a")["alternatives"] == stranger["alternatives"]


@pytest.mark.slow
async def test_a_successor_is_corrected_after_a_restart_and_once_the_run_is_forgotten_no_more() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        target_s = (await advised(running, store, "team", "a"))["recommendation"]["stepSeconds"]["target"]
        await report(running, "team", "a", 1.5 * target_s, inputSeconds=0.1 * target_s)
        await until(running, store, lambda: "alternativesHash" in store.status("team", "a"))
        await until(running, store, lambda: store.runs)
    assert store.runs[0]["gpus"] == 8 and store.runs[0]["plan"] and store.runs[0]["inputSeconds"] > 0
    earlier = store.status("team", "a")
    async with operator(store, advise, NODES, discovery=True) as again:
        await settled(again)
        assert store.status("team", "a") == earlier
        again.cache.remove_object(store.objects.pop(f"{TRAINING_JOBS.format('team')}/a"))
        successor = await advised(again, store, "team", "a")
        assert successor["recommendation"]["stepSeconds"]["target"] > 1.05 * target_s
        assert "by your run on 8 h100-sxm" in successor["recommendation"]["reason"]
        fresh = await advised(again, store, "strangers", "a")
        assert fresh["recommendation"]["stepSeconds"]["target"] == target_s
    async with operator(store, advise, NODES, discovery=True, learning=False) as off:
        await settled(off)
        assert "your run" not in store.status("team", "a")["recommendation"]["reason"]
        assert all("ownRunsRatio" not in row for row in store.status("team", "a")["alternatives"])


async def test_what_a_run_tells_of_its_parts_is_kept_and_corrects_them() -> None:
    store, spaces = SharedStore(), ("silent", "team")
    async with operator(store, advise, NODES, discovery=True) as running:
        for space in spaces:
            await advised(running, store, space, "a")
        target_s = store.step_s("team", "a")
        parts = {"communicationSeconds": 0.5 * target_s, "optimizerSeconds": 0.02 * target_s}
        await report(running, "silent", "a", 1.5 * target_s)
        await report(running, "team", "a", 1.5 * target_s, **parts)
        await until(running, store, lambda: all("alternativesHash" in store.status(space, "a") for space in spaces))
        await until(running, store, lambda: len(store.runs) == 2)
        observed = store.status("team", "a")["observed"]
        kept_run = next(run for run in store.runs if run["namespace"] == "team")
        assert {key: observed[key] for key in parts} == pytest.approx(parts, rel=1e-5)
        assert {key: kept_run[key] for key in parts} == {key: observed[key] for key in parts}
        ratios = [
            {row["pool"]: row["ownRunsRatio"] for row in store.status(space, "a")["alternatives"]} for space in spaces
        ]
        assert ratios[0].keys() == ratios[1].keys() == {"h100-sxm", "a100-80"}
        for silent, apart in ((ratios[0][pool], ratios[1][pool]) for pool in ratios[0]):
            assert 1 < apart < silent, "what its links took longer lasts no longer where they do nothing"


@pytest.mark.slow
async def test_a_successor_of_the_name_with_another_batch_is_corrected_a_little() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        raw_s = (await advised(running, store, "team", "nightly-1", 32))["recommendation"]["stepSeconds"]["target"]
        target_s = (await advised(running, store, "team", "nightly-2"))["recommendation"]["stepSeconds"]["target"]
        other = await advised(running, store, "team", "weekly-1", 32)
        await report(running, "team", "nightly-2", 1.5 * target_s)
        await until(running, store, lambda: "alternativesHash" in store.status("team", "nightly-2"))
        await until(running, store, lambda: store.step_s("team", "nightly-1") > 1.005 * raw_s)
        await settled(running)
        later = await advised(running, store, "team", "nightly-bcd24", 48)
        same = await advised(running, store, "team", "nightly-3")
    reason = later["recommendation"]["reason"]
    assert "by the run of nightly-2, another workload" in reason
    assert all(1 < row["ownRunsRatio"] < 1.2 for row in later["alternatives"])
    assert same["recommendation"]["stepSeconds"]["target"] > 1.05 * target_s, "its own workload counts in full"
    assert "your run on 8 h100-sxm" in same["recommendation"]["reason"]
    assert store.status("team", "weekly-1")["recommendation"] == other["recommendation"]


@pytest.mark.parametrize(
    ("name", "made_from"),
    [("train", "train"), ("train-7", "train"), ("train-x2k9b", "train"), ("gpt2-large", "gpt2-large"), ("", "")],
)
def test_the_template_of_a_name(name: str, made_from: str) -> None:
    assert name_template(name) == made_from


async def test_an_impossible_step_corrects_nothing() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        before = await advised(running, store, "team", "a")
        await report(running, "team", "a", 50 * before["recommendation"]["stepSeconds"]["target"])
        await until(running, store, lambda: "observed" in store.status("team", "a"))
        await settled(running)
    assert store.status("team", "a")["alternatives"] == before["alternatives"]


async def test_a_job_of_another_kind_is_corrected_through_its_training_job() -> None:
    store = targeted()
    async with operating(store) as running:
        answer = await shown(running, store, lambda status: status.get("recommendation"), "advice")
        before_s = answer["recommendation"]["stepSeconds"]["target"]
        seconds = {"tilecast.dev/observed-step-seconds": f"{1.5 * before_s:.6g}"}
        train_job(store, suspend=False, annotations=seconds)
        after = await shown(running, store, lambda status: status.get("alternativesHash"), "its correction")
        assert after["alternatives"][0]["ownRunsRatio"] > 1.02
        assert after["recommendation"] == answer["recommendation"]
        assert after["forecast"]["stepSeconds"] == answer["recommendation"]["stepSeconds"]


def placement(store: SharedStore) -> dict[str, Any]:
    conditions = store.status("team", "a").get("conditions", ())
    return next((item for item in conditions if item["type"] == better_placement.KIND), {})


def news(store: SharedStore) -> list[str]:
    return [name for name, item in store.events.items() if item["reason"] == "PlaceFree"]


async def test_a_better_place_that_is_free_is_said_once() -> None:
    store, nodes = SharedStore(), (node("n1"), node("n2", "NVIDIA-L4"))
    store.clock_s = 1_800_000_000.0
    async with operator(store, advise, nodes, discovery=True) as running:
        running.set_pod_usage({"n2": 8})
        before = await advised(running, store, "team", "a")
        slow = next(row for row in before["alternatives"] if row["pool"] == "l4")
        sent = body(stepSeconds=1.2 * slow["stepSeconds"]["target"], gpus=8, gpu="NVIDIA L4")
        await running.observations.put("team", "a", "team@n2", sent)
        await until(running, store, lambda: placement(store).get("status") == "True")
        assert store.status("team", "a")["forecast"]["pool"] == slow["pool"]
        assert (
            "h100-sxm would take" in placement(store)["message"] and "a restart of 300s" in placement(store)["message"]
        )
        store.clock_s += 60
        running.set_pod_usage({"n1": 1, "n2": 8})
        await until(running, store, lambda: placement(store)["status"] == "False")
        assert placement(store)["reason"] == "NoLongerBetter"
        store.clock_s += 60
        running.set_pod_usage({"n2": 8})
        await until(running, store, lambda: placement(store)["status"] == "True")
        await settled(running)
        assert len(news(store)) == 1
    since = placement(store)["lastTransitionTime"]
    store.clock_s += 3600
    async with operator(store, advise, nodes, discovery=True) as again:
        again.set_pod_usage({"n2": 8})
        await settled(again)
        assert (placement(store)["status"], placement(store)["lastTransitionTime"]) == ("True", since)
        assert len(news(store)) == 1


def condition(status: Any, reason: str, time: str = "2027-01-15T08:00:00Z") -> Condition:
    return Condition(
        type=better_placement.KIND,
        status=status,
        observed_generation=1,
        last_transition_time=time,
        reason=reason,
        message="",
    )


def gains(
    seconds: float, cost: float, known: Condition | None, objective: str = "time", slower: float = 1.0
) -> list[float]:
    """Return the gains of a place for a job of 1 s per step and 1 USD per 1000 steps.

    The place takes `seconds` and `cost`; the job's measured step is `slower` times its forecast.
    """
    return [one.gain for one in better(seconds, cost, known, objective, slower)]


def better(
    seconds: float,
    cost: float,
    known: Condition | None = None,
    objective: str = "time",
    slower: float = 1.0,
    moving: MoveCost | None = None,
) -> list[BetterPlacement]:
    first = offer()
    pool = first.pool
    step = StepSeconds(target=seconds, lower_bound=seconds, upper_bound=seconds)
    item = Alternative(
        pool="b",
        nodes=1,
        gpus_per_node=8,
        gpus=8,
        plan="dp8",
        step_seconds=step,
        cost_per1000_steps=cost,
        raw_step_seconds=seconds / 1.1,
        reason="",
    )
    status = TrainingJobStatus(recommendation=Recommendation.from_offer(first), alternatives=[item])
    held = StepSeconds(target=1 / slower, lower_bound=0.5, upper_bound=2)
    forecast = CompleteForecast(
        frozen_at="", pool="a", gpus=8, plan="dp8", raw_seconds=1.0, step_seconds=held, group=["g"] * 5, followed=True
    )
    score = MeasuredForecast(forecast, StepWindow((1.0,), 1, "", StepReport(1.0, "put")))
    priced = type(pool)(
        **{name: getattr(pool, name) for name in pool.__dataclass_fields__} | {"price_per_gpu_hour": 0.45}
    )
    goal, least = OBJECTIVES[objective], better_placement.get_least_gain(known)
    pools = {"a": priced, "b": priced}
    return better_placement.find_better_placements(status, score, goal, pools, least, moving or MoveCost())


def test_a_better_place_saves_a_fifth_and_stays_one_while_it_saves_fifteen_percent() -> None:
    held = condition("True", "PlaceFree")
    assert gains(0.79, 0.9, None) == pytest.approx([0.21])
    assert gains(0.82, 0.9, None) == [] and gains(0.82, 0.9, held) == pytest.approx([0.18])
    assert gains(0.86, 0.9, held) == []
    assert gains(0.5, 1.1, None) == [], "dearer"
    assert gains(0.9, 0.7, None) == [] and gains(0.9, 0.7, None, "cost") == pytest.approx([0.3])
    assert gains(1.1, 0.5, None, "cost") == [], "slower"


def test_a_place_may_be_better_by_a_quantity_that_no_field_of_an_alternative_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    energy = Quantity("energy", "leaner", "hungrier", "Hungrier", "", per_gpu_hour=lambda pool: pool.gpu.tdp_w)
    monkeypatch.setitem(OBJECTIVES, "energy", ObjectiveRecord("energy", "", "", "", energy))
    (place,) = better(0.5, 2.0, None, "energy")
    assert place.gain == pytest.approx(0.5) and "50% shorter and" in place.text and " and 50% leaner than" in place.text
    assert place.pays_after == better(0.5, 0.5, None, "time")[0].pays_after
    assert gains(0.9, 0.5, None, "energy") == []


def test_a_job_that_is_slow_wherever_it_runs_has_no_better_place() -> None:
    assert gains(0.7, 0.7, None, slower=1.0) == pytest.approx([0.3])
    assert gains(0.7, 0.7, None, slower=1.5) == [], "plainly scaled it takes 0.95 s there"


@pytest.mark.parametrize(
    ("objective", "checkpoint_s", "steps"),
    [
        # 300 s over the 0.5 s that a step saves, then 600 s with 600 steps to repeat; by price a second there costs
        # 0.75 / 500 USD and a step saves 0.25 / 1000.
        ("time", None, 600),
        ("time", 1200.0, 1200),
        ("cost", None, 1800),
        ("cost", 1200.0, 3600),
    ],
)
def test_moving_costs_a_restart_and_half_of_the_time_between_checkpoints(
    objective: str, checkpoint_s: float | None, steps: int
) -> None:
    (place,) = better(0.5, 0.75, None, objective, moving=MoveCost(checkpoint_s=checkpoint_s))
    assert place.pays_after == pytest.approx(steps, abs=1)
    assert "a restart of 300s" in place.text and ("half of the 20min" in place.text) == (checkpoint_s is not None)
    few, many = (
        better(0.5, 0.75, None, objective, moving=MoveCost(checkpoint_s=checkpoint_s, left=steps + more))[0]
        for more in (-2, 2)
    )
    assert many.is_worth_it and not few.is_worth_it
    assert few.text == many.text == place.text, "or the message would change with every step"
    assert better_placement.make_aspect(None, None, [few]).reason == "NotWorthMoving"
    assert better_placement.make_aspect(condition("True", "PlaceFree"), None, [few]).reason == "NoLongerBetter"


def test_what_remains_is_what_the_time_since_the_start_leaves_at_the_measured_pace() -> None:
    best = Recommendation.from_offer(offer())
    best = best.model_copy(update={"finish_seconds": 1000 * best.step_seconds.target})
    forecast = CompleteForecast(
        frozen_at="2027-01-15T08:00:00Z", pool="a", gpus=8, plan="dp8", raw_seconds=1.0,
        step_seconds=best.step_seconds, group=["g"] * 5, followed=True,
    )  # fmt: skip
    score, start_s = MeasuredForecast(forecast, StepWindow((2.0,), 1, "", StepReport(2.0, "put"))), 1_800_000_000.0
    status = TrainingJobStatus(recommendation=best)
    stated = {"checkpointSeconds": 600, "restartSeconds": 60}
    assert MoveCost.from_job(stated, status, score, start_s + 600) == MoveCost(60, 600, pytest.approx(700))
    assert MoveCost.from_job({}, status, score, start_s + 1e6) == MoveCost(300, None, 0)
    assert MoveCost.from_job({}, status, score, start_s - 60).left == pytest.approx(1000)
    unknown = TrainingJobStatus(recommendation=best.model_copy(update={"finish_seconds": None}))
    assert MoveCost.from_job({}, unknown, score, start_s).left is None


async def test_what_moving_costs_decides_no_answer() -> None:
    store = SharedStore()
    async with operator(store, advise, NODES, discovery=True) as running:
        store.add("team", "a")
        asked = store.objects[f"{TRAINING_JOBS.format('team')}/a"]
        keys = set()
        for stated in ({}, {"checkpointSeconds": 600}, {"restartSeconds": 60}, {"globalBatchSize": 32}):
            training = asked["spec"]["training"] | stated
            document = asked | {"spec": asked["spec"] | {"training": training}}
            keys.add((await running.advisor.read_search_inputs("team", document)).key)
    assert len(keys) == 2


def test_no_event_on_flutter_within_ten_minutes() -> None:
    free, since_s = ConditionContent("True", "PlaceFree", ""), 1_800_000_000.0
    assert better_placement.is_event_due(None, free, since_s)
    assert better_placement.is_event_due(condition("False", "NoneBetter"), free, since_s + 1)
    assert not better_placement.is_event_due(condition("True", "PlaceFree"), free, since_s + 1e5)
    assert not better_placement.is_event_due(condition("False", "NoLongerBetter"), free, since_s + 599)
    assert better_placement.is_event_due(condition("False", "NoLongerBetter"), free, since_s + 600)
    again = better_placement.make_aspect(condition("False", "NoLongerBetter"), None, [])
    assert again.reason == "NoLongerBetter"
