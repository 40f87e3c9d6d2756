"""The plan of the whole queue in the operator: its reports on jobs, its updates, and its limits."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from prometheus_client import generate_latest

from job_store import EXAMPLES, H100, PLACING, JobStore, serving, training_job, until
from job_store import JOBS as BATCH
from operator_store import JOBS, QUEUE_ADVICES, QUICK, TIMINGS, Store, node, operator, settled
from tilecast import nodes
from tilecast.advice import advise
from tilecast.api.status import QueuePosition, RunSeconds
from tilecast.jobs import APPLIED, WEIGHT
from tilecast.jobs.kueue import Quotas
from tilecast.planner import solver
from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, QueueProblem, UnplannedJob
from tilecast.planner.totals import build_report as totals
from tilecast_operator import queue_rows
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.free_gpus import FreeGpus
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.times import format_time
from tilecast_operator.queue_rows import PlannedQueue, QueueRow, QueueState, count_held_gpus, make_capacities
from tilecast_operator.report import queue_advice
from tilecast_operator.settings import Settings, from_environment

NOW_S = 1_767_225_600.0
"""2026-01-01, when these jobs were created."""
QUEUE = {"queue": True, "queue_interval_s": 0.01, "queue_policy": "completion"}
NODES = (node("fast"), node("slow", "NVIDIA-A100-SXM4-80GB"))
ADVICE = f"{QUEUE_ADVICES}/cluster"


def training(name: str, steps: int | None = 20_000, annotations: dict[str, str] | None = None, **spec: Any) -> Any:
    length = {} if steps is None else {"steps": steps}
    body = {
        "model": {"preset": "resnet-50"},
        "training": {"globalBatchSize": 256, "precision": "fp16", **length},
        "constraints": {"gpus": 8},
        **spec,
    }
    metadata = {"name": name, "namespace": "default", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {**metadata, "annotations": annotations or {}},
        "spec": body,
    }


@asynccontextmanager
async def planning(store: Store, every_node: Sequence[Any] = NODES, **settings: Any) -> AsyncIterator[OperatorParts]:
    """Run an operator that plans the queue of a store, by a clock that stands still."""
    store.clock_s = store.clock_s or NOW_S
    async with operator(store, advise, every_node, **{**QUEUE, **settings}) as running:
        await settled(running)
        yield running


def position(store: Store, name: str) -> dict[str, Any] | None:
    status = store.objects[f"{JOBS}/{name}"].get("status", {})
    return dict(status["queue"]) if "queue" in status else None


def counts(store: Store) -> dict[str, int]:
    return dict(store.objects[ADVICE]["status"]["jobs"])


async def test_every_job_says_where_and_when_it_runs_and_one_object_what_all_come_to() -> None:
    store = Store()
    for name in "abcd":
        store.put(f"{JOBS}/{name}", training(name))
    async with planning(store) as running:
        metrics = generate_latest(running.metrics.registry).decode()
    places = [position(store, name) for name in "abcd"]
    assert all(place is not None and place["gpus"] == 8 for place in places)
    pools = [str(place and place["pool"]) for place in places]
    assert set(pools) == {"h100-sxm", "a100-80"}, "not everybody waits for the fastest"
    assert sorted(place["position"] for place in places if place and place["pool"] == "h100-sxm") == list(
        range(1, pools.count("h100-sxm") + 1)
    )
    assert all(place and place["start"] < place["finish"] for place in places)
    status = store.objects[ADVICE]["status"]
    assert store.objects[ADVICE]["spec"] == {"policy": "completion", "intervalSeconds": 0.01}
    assert status["jobs"] == {"waiting": 4, "running": 0, "refused": 0}
    assert status["conditions"][0]["reason"] == "Planned" and status["plannedAt"] == "2026-01-01T00:00:00Z"
    reference = {item["name"]: item["completionSeconds"] for item in status["references"]}
    assert reference.keys() == {"ownBest", "earliest", "flavors", "cheapest"}
    assert status["totals"]["completionSeconds"] <= min(reference.values())
    assert 'tilecast_queue_advice_jobs{state="waiting"} 4.0' in metrics
    assert 'tilecast_queue_advice_completion_seconds{way="ownBest"}' in metrics
    last = max(str(place["start"]) for place in places if place and place["pool"] == "h100-sxm")
    (wait,) = re.findall(r'^tilecast_queue_advice_wait_seconds{pool="h100-sxm"} (.*)$', metrics, re.MULTILINE)
    assert datetime.fromisoformat(last).timestamp() == pytest.approx(NOW_S + float(wait), abs=1)
    assert "tilecast_queue_advice_timestamp_seconds 1.7672256e+09" in metrics


async def test_without_the_setting_nothing_is_planned_and_what_was_said_goes() -> None:
    store = Store()
    store.put(f"{JOBS}/a", training("a"))
    async with planning(store):
        assert position(store, "a")
    async with planning(store, queue=False):
        assert position(store, "a") is None


@pytest.mark.slow
async def test_time_alone_another_operator_and_events_without_news_write_nothing() -> None:
    store = Store()
    for name in "abc":
        store.put(f"{JOBS}/{name}", training(name))
    store.put(f"{JOBS}/r", training("r", annotations={"tilecast.dev/started": "2026-01-01T00:00:00Z"}))
    async with planning(store) as running:
        store.writes.clear()
        store.clock_s += 1.0
        for path in sorted(store.objects):
            body = copy.deepcopy(store.objects[path])
            body["metadata"]["labels"] = {"somebody": "else"}
            running.cache.put_object(store.put(path, body))
        await settled(running)
        assert store.writes == []
    store.clock_s += 30.0
    async with planning(store):
        pass
    assert store.writes == []


async def test_a_job_that_comes_moves_nobody_without_need() -> None:
    store = Store()
    for name in "abcd":
        store.put(f"{JOBS}/{name}", training(name))
    async with planning(store) as running:
        before = {name: position(store, name) for name in "abcd"}
        late = training("e")
        late["metadata"]["creationTimestamp"] = "2026-01-01T00:00:01Z"
        running.cache.put_object(store.put(f"{JOBS}/e", late))
        await settled(running)
        assert position(store, "e") is not None and counts(store)["waiting"] == 5
        for name, place in before.items():
            now = position(store, name)
            assert place and now and (now["pool"], now["gpus"]) == (place["pool"], place["gpus"])


async def test_a_job_that_ends_frees_its_place_and_one_that_runs_stays() -> None:
    store = Store()
    store.put(f"{JOBS}/r", training("r", annotations={"tilecast.dev/started": "2026-01-01T00:00:00Z"}))
    for name in "ab":
        store.put(f"{JOBS}/{name}", training(name))
    async with planning(store) as running:
        runs = position(store, "r")
        assert runs and runs["position"] == 0 and runs["reason"] == queue_advice.RUNS
        assert runs["start"] == "2026-01-01T00:00:00Z"
        assert counts(store) == {"waiting": 2, "running": 1, "refused": 0}
        waits = [name for name in "ab" if (place := position(store, name)) and place["start"] > runs["start"]]
        running.cache.remove_object(store.objects.pop(f"{JOBS}/r"))
        await settled(running)
        assert counts(store) == {"waiting": 2, "running": 0, "refused": 0}
        for name in waits:
            place = position(store, name)
            assert place is not None and place["position"] == 1


async def test_who_cannot_be_planned_is_named_and_the_others_are_planned() -> None:
    store = Store()
    store.put(f"{JOBS}/good", training("good"))
    store.put(f"{JOBS}/endless", training("endless", None))
    huge = {
        "model": {"preset": "llama-3.1-405b"},
        "training": {"sequenceLength": 8192, "globalBatchSize": 8, "steps": 9},
    }
    store.put(f"{JOBS}/huge", training("huge", **huge))
    store.put(f"{JOBS}/late", training("late", objective="cost", deadlineSeconds=60))
    store.put(f"{JOBS}/odd", training("odd", annotations={WEIGHT: "much"}))
    store.put(f"{JOBS}/off", training("off", mode="Off"))
    store.clock_s = NOW_S + 3600
    async with planning(store):
        pass
    good, late, off = (position(store, name) for name in ("good", "late", "off"))
    assert good and good["pool"] and late and late["pool"] and "its deadline is past" in late["reason"]
    assert off is None
    for name, text in (("endless", "training.steps"), ("huge", "no pool"), ("odd", "is no weight")):
        place = position(store, name)
        assert place is not None and "pool" not in place and text in place["reason"], (name, place)
    assert counts(store) == {"waiting": 2, "running": 0, "refused": 3}
    named = {item["job"] for item in store.objects[ADVICE]["status"]["refused"]}
    assert named == {f"TrainingJob/default/{name}" for name in ("endless", "huge", "late", "odd")}


@pytest.mark.slow
async def test_a_waiting_job_says_when_it_would_start_on_each_pool_and_how_sure_that_is() -> None:
    store = Store()
    for name in "abcd":
        store.put(f"{JOBS}/{name}", training(name))
    async with planning(store):
        pass
    for name in "abcd":
        place = position(store, name)
        assert place is not None
        entries = {entry["pool"]: entry for entry in place["pools"]}
        assert entries.keys() == {"h100-sxm", "a100-80"}
        assert [entry["finish"] for entry in place["pools"]] == sorted(entry["finish"] for entry in place["pools"])
        there = entries[place["pool"]]
        assert (there["gpus"], there["start"], there["finish"]) == (place["gpus"], place["start"], place["finish"])
        assert place["earliestStart"] <= place["start"] <= place["latestStart"]
        assert (place["position"] > 1) == (place["earliestStart"] < place["latestStart"])
        run = place["runSeconds"]
        assert 0 < run["lowerBound"] < run["target"] < run["upperBound"]


async def test_a_late_job_says_in_its_status_what_would_be_on_time() -> None:
    store = Store()
    store.put(f"{JOBS}/late", training("late", objective="cost", deadlineSeconds=60))
    async with planning(store):
        pass
    late = position(store, "late")
    assert late and "ends after its deadline of 20" in late["reason"] and "no pool is fast enough" in late["reason"]


async def test_a_policy_that_cannot_be_says_so_and_jobs_are_advised_by_themselves() -> None:
    store = Store()
    store.put(f"{JOBS}/a", training("a"))
    async with planning(store, queue_policy="cost"):
        pass
    ready = store.objects[ADVICE]["status"]["conditions"][0]
    assert (ready["status"], ready["reason"]) == ("False", "NotPlanned") and "price" in ready["message"]
    assert position(store, "a") is None
    assert store.objects[f"{JOBS}/a"]["status"]["summary"]["pool"] == "h100-sxm"


async def test_no_plan_is_made_twice_for_one_queue_nor_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def counting(*arguments: Any) -> PlannedQueue:
        plans.append(arguments)
        return queue_rows.plan_rows(*arguments)

    monkeypatch.setattr("tilecast_operator.report.queue_advice.plan_rows", counting)
    store = Store()
    store.put(f"{JOBS}/a", training("a"))
    async with planning(store) as running:
        assert len(plans) == 1
        running.cache.put_object(copy.deepcopy(store.put(f"{JOBS}/a", store.objects[f"{JOBS}/a"])))
        await settled(running)
        assert len(plans) == 1
    plans.clear()
    async with planning(store, queue_interval_s=1e6) as running:
        running.cache.put_object(store.put(f"{JOBS}/b", training("b")))
        await asyncio.sleep(0.2)
        assert len(plans) == 1, "the next one waits for the interval"


async def test_a_failure_of_the_solver_keeps_nobody_from_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> PlannedQueue:
        raise ArithmeticError

    monkeypatch.setattr("tilecast_operator.report.queue_advice.plan_rows", failing)
    store = Store()
    store.put(f"{JOBS}/a", training("a"))
    store.clock_s = NOW_S
    async with operator(store, advise, NODES, **QUEUE) as running:
        async with asyncio.timeout(30):
            while "status" not in store.objects[f"{JOBS}/a"]:
                await asyncio.sleep(0.02)
        assert running.find_health_problem() is None
    assert store.objects[f"{JOBS}/a"]["status"]["summary"]["pool"] == "h100-sxm"


PLANNING: Settings = replace(PLACING, queue=True, queue_interval_s=0.01)


def held(store: JobStore, name: str, steps: int = 2000) -> None:
    training = f'{{"globalBatchSize": 1024, "precision": "fp16", "steps": {steps}}}'
    store.job("job", name, training=training)


PATIENT = replace(TIMINGS, plan_s=60.0, decide_s=120.0)
"""Timings that wait for the plan however long it takes on a busy machine."""


@pytest.mark.slow
async def test_a_job_that_waits_for_us_is_placed_where_the_plan_says() -> None:
    store, names = JobStore(), [f"j{number}" for number in range(12)]
    for name in names:
        held(store, name)
    async with serving(store, PLANNING, timings=PATIENT) as running:
        for name in names:
            running.cache.put_object(store.now(name))
        await until_all_placed(store, names)
    chosen = {name: store.now(name)["spec"]["template"]["spec"]["nodeSelector"] for name in names}
    pools = {store.annotations(name)["tilecast.dev/recommended-pool"] for name in names}
    assert len(pools) > 1, "by itself each would go to the fastest pool"
    assert len({tuple(sorted(selector.items())) for selector in chosen.values()}) == len(pools)
    assert all(store.now(name)["spec"]["suspend"] is False for name in names)


async def until_all_placed(store: JobStore, names: Sequence[str], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not all(store.annotations(name).get(APPLIED) for name in names):
            await asyncio.sleep(0.02)
    assert {store.annotations(name)[APPLIED] for name in names} == {"Placed"}


async def test_a_job_is_not_held_for_want_of_a_plan() -> None:
    store = JobStore()
    held(store, "a")
    timings = replace(TIMINGS, plan_s=0.05)
    async with serving(store, replace(PLANNING, queue_interval_s=1e6), timings=timings) as running:
        await settled(running)
        running.cache.put_object(store.now("a"))
        await until_all_placed(store, ["a"])
    assert store.annotations("a")["tilecast.dev/recommended-pool"] == "h100-sxm"


async def test_a_job_whose_length_nobody_knows_is_placed_by_itself() -> None:
    store = JobStore()
    store.job("job", "a")
    async with serving(store, PLANNING) as running:
        running.cache.put_object(store.now("a"))
        await until_all_placed(store, ["a"])
    assert store.annotations("a")["tilecast.dev/recommended-pool"] == "h100-sxm"
    assert BATCH in next(path for path in store.objects if path.endswith("/a"))


def row(name: str, *options: JobOption, **facts: Any) -> QueueRow:
    return QueueRow(Key("Job", "default", name), options, facts.pop("created_s", NOW_S), **facts)


def option(pool: str, seconds: float, gpus: int = 8) -> JobOption:
    return JobOption(pool, gpus, seconds, seconds * 0.9, seconds * 1.1)


POOLS = (PoolCapacity("fast", 1, 8), PoolCapacity("slow", 1, 8))


def test_a_job_that_was_placed_is_moved_no_more() -> None:
    rows = [row("a", option("fast", 10.0), option("slow", 100.0), place=("slow", 8))]
    plan = queue_rows.plan_rows(QueueState(rows, (), POOLS), "completion", {}, NOW_S)
    assert plan.report is not None
    (place,) = queue_advice.make_positions(plan, {}, frozenset({rows[0].name}), {}, NOW_S).values()
    assert (place.pool, place.position, place.reason) == ("slow", 1, queue_advice.PLACED)


def test_a_training_job_that_nobody_ends_holds_its_place_for_as_long_as_its_forecast() -> None:
    runs = row("a", option("fast", 100.0), place=("fast", 8), began_s=NOW_S, is_endless=True)
    for later_s, jobs in ((50.0, 1), (109.0, 1), (111.0, 0)):
        plan = queue_rows.plan_rows(QueueState([runs], (), POOLS), "completion", {}, NOW_S + later_s)
        assert (len(plan.report.job_times) if plan.report else 0) == jobs


def test_quotas_that_contradict_a_job_name_it_and_the_rest_is_planned() -> None:
    rows = [
        row("a", option("fast", 10.0), queue="team", quotas=(("fast", 4),)),
        row("b", option("fast", 10.0), option("slow", 20.0)),
    ]
    own = (replace(POOLS[0], quotas={"team": 4}), POOLS[1])
    plan = queue_rows.plan_rows(QueueState(rows, (), own), "completion", {}, NOW_S)
    places = queue_advice.make_positions(plan, {}, frozenset(), {}, NOW_S)
    assert "may have 4 GPUs of fast" in places["Job/default/a"].reason
    assert places["Job/default/b"].pool == "fast"


def test_jobs_of_one_second_start_in_the_order_of_their_workloads() -> None:
    turns = {"a": (NOW_S - 1, "z"), "b": (NOW_S - 1, "x"), "c": (NOW_S - 1, "y"), "d": (NOW_S - 2, "zz"), "e": None}
    rows = [
        row(name, option("fast", 10.0), created_s=NOW_S - 3 if name == "d" else NOW_S - 1, turn=turn)
        for name, turn in turns.items()
    ]
    for some in (rows, rows[::-1]):
        plan = queue_rows.plan_rows(QueueState(some, (), POOLS[:1]), "completion", {}, NOW_S)
        assert plan.report is not None
        names = [job.name for job in plan.report.solution.columns.problem.jobs]
        starts = [plan.report.job_times[place].start_s for place in range(5)]
        assert [name[-1] for _, name in sorted(zip(starts, names, strict=True))] == ["d", "e", "b", "c", "a"]


def test_what_kueue_would_do_alone_is_not_what_was_planned_before() -> None:
    rows = [row(name, option("fast", 10.0, 1), option("fast", 2.0, 8), option("slow", 11.0, 1)) for name in "abc"]
    plans = [
        queue_rows.plan_rows(QueueState(rows, (), POOLS), "completion", before, NOW_S)
        for before in ({}, {item.name: ("fast", 1) for item in rows})
    ]
    first, second = (plan.report.references["flavors"] if plan.report else None for plan in plans)
    assert first is not None and first == second


def test_positions_beyond_ten_say_the_first_digit() -> None:
    rows = [row(f"{number:03}", option("fast", 10.0), created_s=NOW_S - 500 + number) for number in range(123)]
    plan = queue_rows.plan_rows(QueueState(rows, (), POOLS), "completion", {}, NOW_S)
    places = queue_advice.make_positions(plan, {}, frozenset(), {}, NOW_S)
    numbers = [places[item.name].position for item in rows]
    assert numbers[:10] == list(range(1, 11)) and numbers[10:20] == [10] * 9 + [20] and numbers[-1] == 100


def test_a_time_that_was_shown_stays_within_what_forecasts_can_tell() -> None:
    solution = solver.solve(QueueProblem((QueuedJob("a", (option("fast", 1000.0),)),), POOLS))
    plan = PlannedQueue(totals(solution), (UnplannedJob("b", "no", "yes"),))
    shown = queue_advice.make_positions(plan, {}, frozenset(), {}, NOW_S)
    assert queue_advice.make_positions(plan, {}, frozenset(), shown, NOW_S + 50) == shown
    later = queue_advice.make_positions(plan, {}, frozenset(), shown, NOW_S + 200)
    assert shown["a"].pools and shown["a"].run_seconds is not None
    assert later["a"].start != shown["a"].start and later["b"] == QueuePosition(reason="no; yes")
    status = queue_advice.make_status(
        plan, "completion", 1, "2026-01-01T00:00:00Z", queue_advice.api.QueueAdviceStatus()
    )
    assert queue_advice.make_status(plan, "completion", 1, "2026-01-02T00:00:00Z", status) is status
    for gap, is_news in ((0.04, False), (0.2, True)):
        before = status.model_copy(update={"gap_ratio": gap})
        now = queue_advice.make_status(plan, "completion", 1, "2026-01-02T00:00:00Z", before)
        assert (now is not before) is is_news, "a plan that goes on from where it is finds another gap"


def test_pools_and_the_run_are_kept_as_times_are_and_a_start_with_its_range_alone() -> None:
    def shown(run_s: float, before: dict[str, QueuePosition], now_s: float, upper_s: float = 4000.0) -> QueuePosition:
        first = replace(option("fast", run_s), upper_s=upper_s)
        waiting = QueuedJob("a", (option("fast", 1000.0), option("slow", 1e7 + 1e5 * run_s)))
        runs = QueuedJob("r", (first,), present=("fast", first.gpus), is_running=True)
        solution = solver.solve(QueueProblem((runs, waiting), (replace(POOLS[0], nodes=1), POOLS[1])))
        plan = PlannedQueue(totals(solution), ())
        return queue_advice.make_positions(plan, {"r": NOW_S}, frozenset(), before, now_s)["a"]

    first = shown(3000.0, {}, NOW_S)
    assert first.pool == "fast" and len(first.pools) == 2 and first.run_seconds is not None
    assert shown(3100.0, {"a": first}, NOW_S) == first
    wider = shown(3010.0, {"a": first}, NOW_S, upper_s=9000.0)
    assert wider.latest_start != first.latest_start
    assert wider.start != first.start, "the start goes with its range"
    longer = shown(6000.0, {"a": first}, NOW_S, upper_s=8000.0)
    assert longer.pools == shown(6000.0, {}, NOW_S, upper_s=8000.0).pools != first.pools


def test_a_run_is_kept_while_it_hardly_differs() -> None:
    before = QueuePosition(pool="fast", gpus=1, position=1, reason="", run_seconds=run(1000.0))
    for target, is_kept in ((1040.0, True), (1100.0, False)):
        now = before.model_copy(update={"run_seconds": run(target)})
        assert (queue_advice._keep_times(now, before, NOW_S) == before) is is_kept


@pytest.mark.parametrize(
    ("earliest_s", "latest_s", "shift_s", "is_kept"),
    [(80, 140, 4, True), (80, 140, 30, False), (1000, 9000, 55, True), (100, 100, 55, True), (1000, 9000, 900, False)],
)
def test_a_start_is_kept_while_it_moves_little_in_its_range(
    earliest_s: float, latest_s: float, shift_s: float, is_kept: bool
) -> None:
    def position(shift_s: float) -> QueuePosition:
        earliest, start, latest = (
            format_time(NOW_S + at + shift_s) for at in (earliest_s, (earliest_s + latest_s) / 2, latest_s)
        )
        return QueuePosition(
            pool="fast", gpus=1, position=1, reason="", start=start, earliest_start=earliest, latest_start=latest
        )

    before = position(0.0)
    assert (queue_advice._keep_times(position(shift_s), before, NOW_S) == before) is is_kept


def run(target: float) -> RunSeconds:
    return RunSeconds(target=target, lower_bound=target / 2, upper_bound=target * 2)


def test_what_others_hold_is_what_is_not_free_and_not_ours() -> None:
    every_node, own, slices = nodes.parse_objects((EXAMPLES / "clusters" / "mixed.yaml").read_text())
    entries = nodes.discover_pools([nodes.read_node(item) for item in every_node], own, slices).entries
    runs = row("a", option("t4", 10.0, 4), place=("t4", 4), began_s=NOW_S, queue="team")
    by_pods = {"t4": FreeGpus(8, "Pods"), "l4": FreeGpus(32, "Pods")}
    assert count_held_gpus(entries, by_pods, {}, [replace(runs, queue="")]) == {("t4", ""): 4}
    flavor = {"t4": FreeGpus(2, "Kueue", "first-t4")}
    queues = {"everything": Quotas({"first-t4": 16}, {}, {"first-t4": 6}), "team": Quotas({}, {}, {"first-t4": 4})}
    assert count_held_gpus(entries, flavor, queues, [runs]) == {("t4", "everything"): 6}
    shared = {"t4": FreeGpus(2, "Kueue", "any"), "l4": FreeGpus(2, "Kueue", "any")}
    held = count_held_gpus(entries, shared, {"all": Quotas({"any": 48}, {}, {"any": 24})}, [])
    assert held == {("t4", "all"): 8, ("l4", "all"): 16}, "by their sizes, where a flavor has several pools"
    (pool,) = (
        item
        for item in make_capacities(entries, held, [replace(runs, queue="all", quotas=(("t4", 12),))])
        if item.quotas
    )
    assert (pool.name, pool.held_gpus, pool.quotas) == ("t4", 8, {"all": 4})


def kueue(running: OperatorParts, reserved: int = 0) -> None:
    """Show two flavors; others reserve `reserved` of the second one's eight GPUs."""
    quotas = {"first-t4": ("Tesla-T4", 8), "second-h100": (H100, 8)}
    for name, (product, _) in quotas.items():
        metadata, spec = {"name": name}, {"nodeLabels": {"nvidia.com/gpu.product": product}}
        running.cache.put_object({"kind": "ResourceFlavor", "metadata": metadata, "spec": spec})
    flavors = [
        {"name": name, "resources": [{"name": "nvidia.com/gpu", "nominalQuota": quota}]}
        for name, (_, quota) in quotas.items()
    ]
    group = {"coveredResources": ["nvidia.com/gpu"], "flavors": flavors}
    usage = {"name": "second-h100", "resources": [{"name": "nvidia.com/gpu", "total": reserved}]}
    cluster_queue = {
        "kind": "ClusterQueue",
        "metadata": {"name": "everything"},
        "spec": {"resourceGroups": [group]},
        "status": {"flavorsReservation": [usage]},
    }
    local_queue = {
        "kind": "LocalQueue",
        "metadata": {"name": "team", "namespace": "default"},
        "spec": {"clusterQueue": "everything"},
    }
    running.cache.put_object(cluster_queue)
    running.cache.put_object(local_queue)


def queued(store: JobStore, name: str, steps: int = 2000) -> dict[str, Any]:
    training = f'{{"globalBatchSize": 1024, "precision": "fp16", "steps": {steps}}}'
    document = store.job("job-kueue", name, training=training)
    store.workload(document)
    return document


@pytest.mark.long
async def test_behind_kueue_a_job_waits_in_its_queue_for_the_pool_of_the_plan() -> None:
    store, names = JobStore(), [f"j{number:02}" for number in range(32)]
    async with serving(store, replace(PLANNING, read_kueue=True), timings=PATIENT) as running:
        kueue(running)
        for name in names:
            running.cache.put_object(queued(store, name))
        await until(lambda: all(store.annotations(name).get(APPLIED) == "Queued" for name in names), "all to be let go")
        pools = {store.annotations(name)["tilecast.dev/recommended-pool"] for name in names}
        assert pools == {"t4", "h100-sxm"}
        before = {name: running.planned.get_position(Key("Job", "default", name)) for name in names}
        urgent = {"kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}, "value": 7}
        running.cache.put_object(urgent)
        late = queued(store, "late")
        late["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "urgent"
        running.cache.put_object(store.put(f"{BATCH}/late", late))
        await until(lambda: store.annotations("late").get(APPLIED) == "Queued", "the late one to be let go")
        await settled(running)
        first = running.planned.get_position(Key("Job", "default", "late"))
        assert first and first.position == 1, "it has the highest priority"
        for name, place in before.items():
            now = running.planned.get_position(Key("Job", "default", name))
            assert place and now and now.pool == place.pool and now.reason == queue_advice.PLACED
        store.admit(running, names[0])
        await settled(running)
        started = running.planned.get_position(Key("Job", "default", names[0]))
        assert started and started.position == 0 and started.reason == queue_advice.RUNS
    assert all(store.now(name)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team" for name in names)


@pytest.mark.slow
async def test_pods_priorities_decide_the_order_and_a_class_that_changes_changes_it() -> None:
    store, names = JobStore(), ["a", "b", "c"]
    for name, class_ in zip(names, ("low", "", "high"), strict=True):
        document = queued(store, name)
        document["metadata"]["annotations"]["tilecast.dev/mode"] = "Advise"
        document["metadata"]["annotations"]["tilecast.dev/constraints"] = '{"allowedPools": ["h100-sxm"], "gpus": 4}'
        document["spec"]["template"]["spec"] |= {"priorityClassName": class_} if class_ else {}
        store.put(f"{BATCH}/{name}", document)

    def order() -> list[str]:
        known = {name: running.planned.get_position(Key("Job", "default", name)) for name in names}
        return sorted(known, key=lambda name: 0 if (place := known[name]) is None else place.position)

    async with serving(store, replace(PLANNING, read_kueue=True)) as running:
        kueue(running, reserved=4)
        for name, value in (("low", -1), ("high", 1)):
            running.cache.put_object({"kind": "PriorityClass", "metadata": {"name": name}, "value": value})
        for name in names:
            running.cache.put_object(copy.deepcopy(store.now(name)))
        await settled(running)
        assert order() == ["c", "b", "a"]
        running.cache.put_object(
            {"kind": "PriorityClass", "metadata": {"name": "low", "resourceVersion": "2"}, "value": 9}
        )
        await settled(running)
        assert order() == ["a", "c", "b"]
        default = {"kind": "PriorityClass", "metadata": {"name": "all"}, "value": 5, "globalDefault": True}
        running.cache.put_object(default)
        await settled(running)
        assert order() == ["a", "b", "c"]


@pytest.mark.slow
async def test_a_job_that_the_plan_is_without_says_so_once_in_an_event() -> None:
    store = JobStore()
    odd = store.job("job", "odd", mode=None, weight="much", training=LONG)
    store.job("job", "endless", mode=None)
    store.job("job", "unknown", mode=None, model="resnet-5", training=LONG)
    store.job("job", "good", mode=None, training=LONG)

    def left_out() -> list[tuple[str, str]]:
        seen = [(item["involvedObject"]["name"], item["message"]) for item in store.events.values()
                if item["reason"] == "NotPlanned"]  # fmt: skip
        return sorted(seen)

    leaves_out = "the plan of the whole queue leaves it out: "
    async with serving(store, PLANNING) as running:
        for name in ("odd", "endless", "unknown", "good"):
            running.cache.put_object(copy.deepcopy(store.now(name)))
        await until(lambda: len(left_out()) == 2, "both to be told")
        await settled(running)
        (first, why_endless), (second, why_odd) = left_out()
        assert (first, second) == ("endless", "odd")
        assert why_endless.startswith(leaves_out) and "training.steps" in why_endless
        assert why_odd.startswith(leaves_out) and "'much' is no weight; write a number above 0" in why_odd
        assert all("tilecast.dev/advice-hash" in store.annotations(name) for name in ("odd", "endless"))
        for number in range(3):
            changed = copy.deepcopy(store.now("good"))
            changed["metadata"]["labels"]["seen"] = str(number)
            running.cache.put_object(store.put(f"{BATCH}/good", changed))
            await settled(running)
        assert len(left_out()) == 2, "plans that are made anew say nothing twice"
        odd = copy.deepcopy(store.now("odd"))
        odd["metadata"]["annotations"]["tilecast.dev/weight"] = "2"
        running.cache.put_object(store.put(f"{BATCH}/odd", odd))
        await settled(running)
        place = running.planned.get_position(Key("Job", "default", "odd"))
        assert place and place.pool and len(left_out()) == 2
    async with serving(store, PLANNING) as running:
        for name in ("odd", "endless", "unknown", "good"):
            running.cache.put_object(copy.deepcopy(store.now(name)))
        await settled(running)
    assert len(left_out()) == 2, "nor does the operator that starts next"


LONG = '{"globalBatchSize": 1024, "precision": "fp16", "steps": 2000}'


async def test_what_others_hold_counts_at_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def noting(state: QueueState, *arguments: Any) -> PlannedQueue:
        held.append({pool.name: pool.held_gpus for pool in state.pools}["h100-sxm"])
        return queue_rows.plan_rows(state, *arguments)

    monkeypatch.setattr("tilecast_operator.report.queue_advice.plan_rows", noting)
    store = JobStore()
    async with serving(store, replace(PLANNING, read_kueue=True)) as running:
        kueue(running, reserved=4)
        await until(lambda: held and held[-1] == 4, "others to be seen")
        kueue(running, reserved=0)
        await until(lambda: held[-1] == 0, "them to be gone")
    assert held[0] == 0


async def test_a_training_job_says_where_the_job_goes_that_it_names() -> None:
    store = JobStore()
    store.put(f"{JOBS}/for-a", named("for-a"))
    async with serving(store, PLANNING) as running:
        running.cache.put_object(copy.deepcopy(store.objects[f"{JOBS}/for-a"]))
        document = store.job("job", "a", mode=None, model=None, training=None)
        document["metadata"]["labels"] = {}
        running.cache.put_object(store.put(f"{BATCH}/a", document))
        await until(lambda: "queue" in store.objects[f"{JOBS}/for-a"].get("status", {}), "the plan to be told")
        await settled(running)
    status = store.objects[f"{JOBS}/for-a"]["status"]
    assert status["queue"]["pool"] == status["recommendation"]["pool"] == "h100-sxm"
    assert counts(store) == {"waiting": 1, "running": 0, "refused": 0}, "one job, not two"


def named(name: str) -> dict[str, Any]:
    """Return a TrainingJob that names Job a, and states how long it runs."""
    return training_job(name, training={"globalBatchSize": 1024, "precision": "fp16", "steps": 100})


async def test_an_operator_that_is_killed_leaves_every_job_to_the_next() -> None:
    store, names = JobStore(), [f"j{number}" for number in range(6)]
    for name in names:
        held(store, name)
    slow = replace(PLANNING, queue_interval_s=1e6)
    async with serving(store, slow) as running:
        await settled(running)
        for name in names:
            running.cache.put_object(store.now(name))
        await asyncio.sleep(0.1)
    async with serving(store, replace(PLANNING, queue=False)) as next_one:
        for name in names:
            next_one.cache.put_object(copy.deepcopy(store.now(name)))
        await until_all_placed(store, names)
    assert all(store.now(name)["spec"]["suspend"] is False for name in names)


def test_the_policy_is_one_of_four() -> None:
    settings = from_environment({"TILECAST_QUEUE": "true", "TILECAST_QUEUE_POLICY": "fairness"})
    assert settings.queue and settings.queue_policy == "fairness" and not QUICK.queue
    with pytest.raises(ValueError, match="TILECAST_QUEUE_POLICY"):
        from_environment({"TILECAST_QUEUE_POLICY": "luck"})


def team(name: str, number: int, **annotations: str) -> Any:
    item = training(f"{name}-{number}", annotations=annotations)
    item["metadata"]["namespace"] = name
    return item


def space(name: str, weight: str | None = None) -> Any:
    metadata = {"name": name, "uid": f"uid-{name}", "annotations": {} if weight is None else {WEIGHT: weight}}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


@pytest.mark.parametrize("weights", [dict.fromkeys(range(6), "1000000"), {5: "1000000", 4: "0.001"}])
@pytest.mark.slow
async def test_a_tenants_weights_move_nobody_else_and_those_of_a_namespace_do(weights: dict[int, str]) -> None:
    store, four = Store(), (*NODES, node("slower", "NVIDIA-L4"))
    for number in range(6):
        for name in ("team-a", "team-b"):
            store.put(f"{JOBS.replace('default', name)}/{name}-{number}", team(name, number))
    paths = sorted(path for path in store.objects if "trainingjobs" in path)

    def placed(name: str) -> dict[str, Any]:
        return {path: store.objects[path]["status"]["queue"]["pool"] for path in paths if name in path}

    async with planning(store, four) as running:
        for name in ("team-a", "team-b"):
            running.cache.put_object(space(name))
        await settled(running)
        before = placed("team-a")
        assert len({*before.values()}) > 1
        for number, weight in weights.items():
            path = f"{JOBS.replace('default', 'team-b')}/team-b-{number}"
            body = copy.deepcopy(store.objects[path])
            body["metadata"]["annotations"] = {WEIGHT: weight}
            running.cache.put_object(store.put(path, body))
        await settled(running)
        assert placed("team-a") == before
        assert "of its namespace alone" in store.objects[paths[-1]]["status"]["queue"]["reason"]
        running.cache.put_object(space("team-b", "1000"))
        await settled(running)
        assert placed("team-a") != before, "administrators own namespaces"
        message = store.objects[ADVICE]["status"]["conditions"][0]["message"]
        assert message.endswith("by tilecast.dev/weight of its namespace a job counts: team-b 1000")
        running.cache.put_object(space("team-b", "much"))
        await settled(running)
        assert store.objects[ADVICE]["status"]["refused"][0]["job"] == "Namespace/team-b"
