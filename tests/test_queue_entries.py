"""When one more job, or a waiting one, would start and end on each pool."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilecast
from test_queue import job, option
from test_queue_cli import batch_job, kueue, planned, shown, training_job, written
from tilecast import shipped
from tilecast.cli import main
from tilecast.planner import ranges
from tilecast.planner.columns import build_columns
from tilecast.planner.entries import PoolEnd, forecast_submitted_job, list_planned_entries, list_waiting_ends
from tilecast.planner.kueue_starts import list_kueue_entries
from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, QueueProblem, mark_as_running
from tilecast.planner.references import simulate_kueue
from tilecast.planner.solver import QueueSolution, solve
from tilecast.planner.totals import build_report
from tilecast.spec import SpecError


def drawn(draw: random.Random) -> tuple[QueueProblem, QueuedJob]:
    """Draw a queue, and one more job."""
    pools = tuple(
        PoolCapacity(f"p{i}", draw.randint(1, 3), draw.choice([1, 2, 4]), quotas={"q": draw.randint(2, 6)})
        for i in range(draw.randint(1, 3))
    )
    jobs = []
    for index in range(draw.randint(2, 12)):
        work = draw.uniform(1, 20)
        ways = [
            option(pool.name, gpus, work / gpus ** draw.uniform(0.5, 0.95), width=draw.uniform(0.05, 0.4))
            for pool in pools
            for gpus in (1, 2, 4)
            if pool.can_hold(gpus) and (gpus == 1 or draw.random() < 0.6)
        ]
        given: dict[str, Any] = {"priority": draw.choice([0, 0, 5]), "queue": draw.choice(["", "q"])}
        one = job(f"j{index}", *ways, arrival_s=-draw.uniform(0, 5), weight=draw.choice([1.0, 3.0]), **given)
        if index == 0:
            one = mark_as_running(replace(one, present=(ways[0].pool, ways[0].gpus)), 0.5)
        jobs.append(one)
    return QueueProblem(tuple(jobs[:-1]), pools), replace(jobs[-1], name="new", arrival_s=0.0)


def only(one: QueuedJob, way: JobOption) -> QueuedJob:
    return replace(one, options=(way,), present=(way.pool, way.gpus) if one.is_running else None)


def fixed(solution: QueueSolution) -> list[QueuedJob]:
    """Return the jobs of a plan, each with its place in the plan alone, in the order of the plan."""
    columns = solution.columns
    return [only(one, columns.options[way]) for one, way in zip(columns.problem.jobs, solution.option, strict=True)]


def at(one: QueuedJob, end: str) -> QueuedJob:
    """Return a job whose forecasts are at one end of their ranges."""
    if not end:
        return one
    return replace(one, options=tuple(replace(way, seconds=getattr(way, end)) for way in one.options))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.slow
def test_the_entry_of_one_more_job_is_its_place_in_a_plan_of_all_others_as_they_are(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "shipped_common_share", lambda: 1.0)
    problem, new = drawn(random.Random(seed))  # noqa: S311
    solution = solve(problem, effort=2000, is_bounded=False)
    others, submitted = fixed(solution), forecast_submitted_job(solution, new)
    assert submitted.refusal is None and submitted.entries
    assert [entry.finish_s for entry in submitted.entries] == sorted(entry.finish_s for entry in submitted.entries)
    best = dict[str, float]()
    for way in new.options:
        if new.queue and way.gpus > problem.pool(way.pool).quotas["q"]:
            assert way not in [entry.option for entry in submitted.entries]
            continue
        ends = []
        for end in ("", "lower_s", "upper_s"):
            again = solve(
                QueueProblem(tuple(at(one, end) for one in (*others, only(new, way))), problem.pools),
                effort=0,
                is_bounded=False,
            )
            row = [one.name for one in again.columns.problem.jobs].index("new")
            ends.append(float(again.finish[row]))
            if not end:
                assert [one.name for one in again.columns.problem.jobs if one.name != "new"] == [
                    one.name for one in others
                ]
                later = sum(
                    float(again.finish[place]) > float(solution.finish[names_of(solution).index(one.name)]) + 1e-6
                    for place, one in enumerate(again.columns.problem.jobs)
                    if one.name != "new"
                )
        best[way.pool] = min(best.get(way.pool, ends[0]), ends[0])
        for entry in submitted.entries:
            if entry.option == way:
                assert entry.finish_s == pytest.approx(ends[0])
                assert entry.start_s == pytest.approx(ends[0] - way.seconds, abs=1e-9)
                runs = way.seconds, way.lower_s, way.upper_s
                starts = [max(end - run, 0.0) for end, run in zip(ends, runs, strict=True)]
                said = entry.start_lower_s, entry.start_upper_s
                assert said == pytest.approx((min(starts), max(starts)), abs=1e-9)
                assert entry.finish_lower_s == pytest.approx(min(starts) + way.lower_s)
                assert entry.finish_upper_s == pytest.approx(max(starts) + way.upper_s)
                assert entry.delayed == later
    assert {entry.option.pool: entry.finish_s for entry in submitted.entries} == pytest.approx(best)


def names_of(solution: QueueSolution) -> list[str]:
    return [one.name for one in solution.columns.problem.jobs]


def test_own_errors_of_the_jobs_ahead_cancel_and_the_common_part_stays() -> None:
    ways = [option("a", 1, 10.0, width=0.3)]
    queue = QueueProblem(
        tuple(job(f"j{i}", *ways, arrival_s=float(-9 + i)) for i in range(9)), (PoolCapacity("a", 1, 1),)
    )
    solution, common = solve(queue), ranges.shipped_common_share()
    for place, entry in enumerate(list_planned_entries(solution)):
        share = math.sqrt(common**2 + (1 - common**2) / max(place, 1))
        assert entry.start_s == pytest.approx(10.0 * place)
        said = entry.start_lower_s, entry.start_upper_s
        assert said == pytest.approx((entry.start_s * math.exp(-0.3 * share), entry.start_s * math.exp(0.3 * share)))
        begun, run = entry.start_s - entry.start_lower_s, 10 - 10 * math.exp(-0.3)
        sooner = math.sqrt(begun**2 + run**2 + 2 * common**2 / share * begun * run)
        assert entry.finish_lower_s == pytest.approx(entry.finish_s - sooner)
        assert math.hypot(begun, run) < sooner < begun + run or place == 0
    report = build_report(solution).job_times[8]
    assert (report.lower_s, report.upper_s) == (entry.finish_lower_s, entry.finish_upper_s)


def test_the_errors_of_jobs_with_one_forecast_do_not_cancel() -> None:
    same, other = (replace(option("a", 1, 10.0, width=0.3), plan=plan, step_s=1.0) for plan in ("x", "y"))
    jobs = [job(f"j{i}", same if i != 2 else other, arrival_s=float(-9 + i)) for i in range(4)]
    entries = list_planned_entries(solve(QueueProblem(tuple(jobs), (PoolCapacity("a", 1, 1),))))
    common = ranges.shipped_common_share()
    for entry, own, alike in zip(entries[1:], (1.0, 1.0, 5 / 9), (1.0, 0.0, 2 / 3), strict=True):
        share = math.sqrt(common**2 + (1 - common**2) * own)
        assert entry.start_upper_s == pytest.approx(entry.start_s * math.exp(0.3 * share))
        begun, run = entry.start_upper_s - entry.start_s, 10 * math.exp(0.3) - 10
        correlation = (common**2 + (1 - common**2) * alike) / share
        later = math.sqrt(begun**2 + run**2 + 2 * correlation * begun * run)
        assert entry.finish_upper_s == pytest.approx(entry.finish_s + later)


def test_the_common_part_states_its_source(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    table = shipped.read_table("tilecast.planner", "ranges.toml")
    del table["starts"]["source"]
    monkeypatch.setattr(shipped, "read_table", lambda package, name: table)
    request.addfinalizer(ranges.shipped_common_share.cache_clear)
    ranges.shipped_common_share.cache_clear()
    with pytest.raises(SpecError, match=r"^ranges\.toml: starts\.common: has no source; write "):
        ranges.shipped_common_share()


def test_priority_and_a_free_order_decide_the_turn_of_one_more_job() -> None:
    pools = (PoolCapacity("a", 1, 1),)
    queue = QueueProblem(tuple(job(f"j{i}", option("a", 1, 10.0 + i), arrival_s=-i) for i in range(3)), pools)
    new = job("new", option("a", 1, 1.0))
    kueue_order, free = solve(queue), solve(queue, order="free")
    assert forecast_submitted_job(kueue_order, new).entries[0].start_s == pytest.approx(33.0)
    assert forecast_submitted_job(free, new).entries[0].start_s == 0.0
    urgent = forecast_submitted_job(kueue_order, replace(new, priority=1)).entries[0]
    assert (urgent.start_s, urgent.delayed) == (0.0, 3)
    heavy = forecast_submitted_job(free, job("new", option("a", 1, 10.5))).entries[0]
    assert (heavy.start_s, heavy.delayed) == (10.0, 2)


def test_a_job_that_no_pool_can_run_says_why() -> None:
    queue = QueueProblem((job("j", option("a", 1, 1.0)),), (PoolCapacity("a", 1, 1),))
    submitted = forecast_submitted_job(solve(queue), job("new", option("a", 4, 1.0)))
    assert submitted.entries == () and submitted.refusal is not None
    assert "no place for 4 GPUs" in submitted.refusal.problem


@pytest.mark.parametrize("seed", range(10))
def test_the_entries_of_waiting_jobs_have_the_planned_place_and_the_other_pools(seed: int) -> None:
    problem, _ = drawn(random.Random(seed))  # noqa: S311
    solution = solve(problem, effort=2000, is_bounded=False)
    listed, planned_entries = list_waiting_ends(solution), list_planned_entries(solution)
    report = build_report(solution)
    for row, one in enumerate(solution.columns.problem.jobs):
        place = report.job_times[row]
        entry = planned_entries[row]
        assert (entry.finish_s, entry.finish_lower_s, entry.finish_upper_s) == pytest.approx(
            (place.finish_s, place.lower_s, place.upper_s)
        )
        assert one.is_running == (row not in listed)
        if not one.is_running:
            there = {item.option.pool: item for item in listed[row]}
            same = there[entry.option.pool]
            assert (same.option, same.finish_s, same.start_s) == (entry.option, entry.finish_s, entry.start_s)
            assert there.keys() == {way.pool for way in one.options}
            assert all(moved_end(solution, row, item) == pytest.approx(item.finish_s) for item in listed[row])
    assert list_waiting_ends(solution, effort=-1) == {}


def moved_end(solution: QueueSolution, row: int, entry: PoolEnd) -> float:
    """Return the end of a job if it alone moves to another place."""
    jobs = fixed(solution)
    jobs[row] = only(jobs[row], entry.option)
    again = solve(replace(solution.columns.problem, jobs=tuple(jobs)), effort=0, is_bounded=False)
    return float(again.finish[row])


def test_the_command_says_when_one_more_job_would_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = written(tmp_path, training_job("one"), training_job("two"))
    new = tmp_path / "new.json"
    new.write_text(json.dumps(training_job("one")))
    words = jobs, "--gpus", "t4:1,l4:1", "--policy", "makespan"
    plain, asked = planned(capsys, *words), planned(capsys, *words, "--if-submitted", str(new))
    assert plain.pop("ifSubmitted") is None
    submitted = asked.pop("ifSubmitted")
    assert asked == plain and submitted["name"] == "one (new)" and submitted["refusal"] is None
    for entry in submitted["pools"]:
        there = [one["finishSeconds"] for one in plain["jobs"] if one["pool"] == entry["pool"]]
        last = max(there, key=lambda end: end["target"], default={"target": 0.0, "lowerBound": 0.0, "upperBound": 0.0})
        assert entry["startSeconds"] == pytest.approx(last, rel=0.05)
        assert entry["startSeconds"]["target"] == pytest.approx(last["target"])
    assert {entry["pool"] for entry in submitted["pools"]} == {"t4", "l4"}
    out = " ".join(shown(capsys, *words, "--if-submitted", str(new)).split())
    assert "one (new), if it were submitted now, would start now on 1 GPU of " in out
    assert f", first on {submitted['pools'][0]['pool']}." in out
    with_python = tilecast.queue(jobs, gpus="t4:1,l4:1", policy="makespan", if_submitted=training_job("one"))
    assert with_python.to_dict()["ifSubmitted"] == submitted


def test_one_more_job_says_on_which_pools_it_ends_after_its_deadline() -> None:
    pools = PoolCapacity("a", 1, 1), PoolCapacity("b", 1, 1)
    solution = solve(QueueProblem((job("j", option("a", 1, 10.0), arrival_s=-1.0),), pools))
    ways = option("a", 1, 2.0), option("b", 1, 8.0)
    free = forecast_submitted_job(solution, job("new", *ways))
    assert [entry.late_s for entry in free.entries] == [None, None] and free.late is None
    early = forecast_submitted_job(solution, job("new", *ways, deadline_s=8.0))
    assert [(entry.option.pool, entry.late_s) for entry in early.entries] == [("b", 0.0), ("a", 4.0)]
    assert early.late is None
    late = forecast_submitted_job(solution, job("new", *ways, deadline_s=5.0))
    assert [entry.late_s for entry in late.entries] == [3.0, 7.0]
    assert late.late is not None and (late.late.late_s, late.late.latest_start_s) == (3.0, 3.0)
    horizon = solve(replace(solution.columns.problem, horizon_s=5.0))
    assert [entry.late_s for entry in forecast_submitted_job(horizon, job("new", *ways)).entries] == [3.0, 7.0]


@pytest.mark.parametrize("is_alone", [True, False])
def test_the_command_says_that_one_more_job_ends_after_its_deadline(
    is_alone: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, one = tmp_path / "new.json", training_job("one")
    idle = {"kind": "List", "apiVersion": "v1", "items": []}
    words = written(tmp_path, idle if is_alone else one), "--gpus", "t4:1", "--if-submitted", str(new)
    new.write_text(json.dumps(training_job("new", deadlineSeconds=1)))
    submitted = planned(capsys, *words)["ifSubmitted"]
    (entry,) = submitted["pools"]
    assert entry["lateSeconds"] == pytest.approx(entry["finishSeconds"]["target"] - 1)
    assert submitted["late"]["lateSeconds"] == entry["lateSeconds"] and submitted["late"]["job"] == "new"
    assert submitted["late"]["onTime"]["latestStartSeconds"] < 0
    out = " ".join(shown(capsys, *words).split())
    assert "after its deadline. No pool is fast enough: 1 GPU of t4 takes " in out
    run_s = submitted["late"]["onTime"]["seconds"]
    new.write_text(json.dumps(training_job("new", deadlineSeconds=round(run_s * 1.5))))
    out = " ".join(shown(capsys, *words).split())
    assert ("It is on time if it starts within " in out) != is_alone
    new.write_text(json.dumps(training_job("new", deadlineSeconds=10_000_000)))
    submitted = planned(capsys, *words)["ifSubmitted"]
    assert submitted["late"] is None and submitted["pools"][0]["lateSeconds"] == 0
    assert "after its deadline" not in shown(capsys, *words)


@pytest.mark.parametrize("order", ["kueue", "free"])
def test_one_more_job_has_an_answer_where_nothing_else_can_be_planned(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = training_job("new")
    file = tmp_path / "new.json"
    file.write_text(json.dumps(new))
    endless = training_job("endless", training={"globalBatchSize": 256, "precision": "fp16"})
    done = {**batch_job("done"), "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    idle = {"kind": "List", "apiVersion": "v1", "items": []}
    for other, count in ((idle, 0), (endless, 1), (done, 0)):
        words = written(tmp_path, other), "--gpus", "t4:1,l4:1", "--order", order, "--if-submitted", str(file)
        document = planned(capsys, *words)
        assert document["jobs"] == [] and len(document["unplanned"]) == count
        submitted = document["ifSubmitted"]
        assert submitted["name"] == "new" and submitted["refusal"] is None
        assert [(entry["startSeconds"]["target"], entry["delayedJobs"]) for entry in submitted["pools"]] == [(0, 0)] * 2
        assert "new, if it were submitted now, would start now on 1 GPU of" in shown(capsys, *words)
    with_python = tilecast.queue(words[0], gpus="t4:1,l4:1", order=order, if_submitted=new)
    assert with_python.to_dict()["ifSubmitted"] == submitted and "would start now" in str(with_python)


def test_one_more_job_without_metadata_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = training_job("new")
    del new["metadata"]
    file = tmp_path / "new.json"
    file.write_text(json.dumps(new))
    out = shown(capsys, written(tmp_path, training_job("one")), "--gpus", "t4:1", "--if-submitted", str(file))
    assert "x  unnamed  metadata.name: is missing or no name: write metadata: {name: my-name}" in out


def test_the_quota_of_one_more_job_holds_and_a_file_of_two_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = str(Path(__file__).resolve().parent.parent / "examples" / "clusters" / "mixed.yaml")
    jobs = written(tmp_path, training_job("other"), *kueue(quota=0))
    new = tmp_path / "new.json"
    new.write_text(json.dumps(batch_job("new")))
    assert "x  new  no pool can run it" in shown(capsys, jobs, "--nodes", mixed, "--if-submitted", str(new))
    new.write_text(json.dumps({"kind": "List", "items": [batch_job("new"), batch_job("newer")]}))
    assert main(["queue", jobs, "--nodes", mixed, "--if-submitted", str(new)]) == 2
    assert "--if-submitted: holds 2 jobs; give a file with one job" in capsys.readouterr().err
    assert main(["queue", jobs, "--nodes", mixed, "--if-submitted", str(new), "-o", "csv"]) == 2
    assert "--if-submitted: -o csv has no place for it; use -o table or -o json" in capsys.readouterr().err


@given(seconds=st.floats(1.0, 1e6), width=st.floats(0.01, 1.5), ran=st.floats(0.0, 20.0), more=st.floats(0.0, 5.0))
def test_what_remains_of_a_run_is_what_runs_that_last_so_long_still_need(
    seconds: float, width: float, ran: float, more: float
) -> None:
    whole = job("a", option("p", 1, seconds, width=width), option("other", 2, seconds / 2), present=("p", 1))
    (here, elsewhere), later = (
        mark_as_running(whole, ran * seconds).options,
        mark_as_running(whole, (ran + more) * seconds).options[0],
    )
    assert 0 < here.lower_s <= here.seconds <= here.upper_s
    assert later.seconds + more * seconds >= here.seconds * (1 - 1e-9), "a run that lasts longer ends no earlier"
    assert elsewhere.seconds * 2 <= here.seconds * (1 + 1e-9), "the same share of the run is left"
    if not ran:
        assert here.seconds == seconds
        assert (here.lower_s, here.upper_s) == pytest.approx((seconds * math.exp(-width), seconds * math.exp(width)))


def test_a_run_near_its_forecast_may_still_need_much() -> None:
    """Of 10,000 runs drawn from the forecast, those that last longer than 90 s end in the stated range in 90 %."""
    draw, width = random.Random(1), math.log(1.47)  # noqa: S311 (no secret)
    drawn = [100.0 * math.exp(draw.gauss(0, width / 1.6449)) for _ in range(10_000)]
    left = [run - 90.0 for run in drawn if run > 90.0]
    whole = job("a", option("p", 1, 100.0, width=width), present=("p", 1))
    (here,) = mark_as_running(whole, 90.0).options
    held = sum(here.lower_s <= rest <= here.upper_s for rest in left) / len(left)
    assert 0.88 <= held <= 0.92
    assert 0.48 <= sum(rest < here.seconds for rest in left) / len(left) <= 0.52


def test_without_a_range_the_forecast_is_taken_to_be_right() -> None:
    whole = job("a", option("p", 1, 100.0, width=0.0), present=("p", 1))
    for ran_s, left_s in ((90.0, 10.0), (500.0, 2.0)):
        (here,) = mark_as_running(whole, ran_s).options
        assert (here.lower_s, here.seconds, here.upper_s) == pytest.approx((left_s, left_s, left_s))


@pytest.mark.parametrize("ran", [1.3, 1.6, 2.0, 5.0, 1000.0])
def test_the_end_of_a_run_far_past_its_forecast_is_not_certain(ran: float) -> None:
    whole = job("a", option("p", 1, 100.0, width=0.1), present=("p", 1))
    (here,) = mark_as_running(whole, 100.0 * ran).options
    assert here.seconds >= 2.0
    assert here.lower_s < 0.6 * here.seconds
    assert here.upper_s > 1.5 * here.seconds


@pytest.mark.parametrize("seed", range(40))
def test_a_job_that_kueue_places_starts_where_kueue_finds_room(seed: int) -> None:
    problem, _ = drawn(random.Random(seed))  # noqa: S311
    solution = solve(problem)
    held = solution.columns
    flavors = {one.name: [pool.name for pool in reversed(problem.pools)] for one in held.problem.jobs}
    asking = {row: 1 for row, runs in enumerate(held.is_running) if not runs and row % 3}
    entries = list_kueue_entries(solution, asking, flavors)
    assert entries.keys() == asking.keys()
    ways = [
        tuple(way for way in one.options if way.gpus == 1) if row in asking else (held.options[solution.option[row]],)
        for row, one in enumerate(held.problem.jobs)
    ]
    jobs = tuple(replace(one, options=way, is_advised=True) for one, way in zip(held.problem.jobs, ways, strict=True))
    alone = simulate_kueue(build_columns(replace(held.problem, jobs=jobs)), flavors)
    for row, entry in entries.items():
        assert entry.finish_s == pytest.approx(alone.finish[row]) and entry.option.gpus == 1
        assert entry.start_lower_s <= entry.start_s <= entry.start_upper_s


def test_kueue_tries_the_flavors_of_a_queue_in_their_order() -> None:
    pools = PoolCapacity("a", 1, 1), PoolCapacity("b", 1, 1)
    ways = option("a", 1, 10.0), option("b", 1, 30.0)
    jobs = tuple(job(f"j{number}", *ways, queue="q", arrival_s=float(number - 5)) for number in range(3))
    solution = solve(QueueProblem(jobs, pools))
    assert [solution.columns.options[way].pool for way in solution.option] == ["a", "a", "a"]
    order = {f"j{number}": ["b", "a"] for number in range(3)}
    entries = list_kueue_entries(solution, dict.fromkeys(range(3), 1), order)
    assert [entries[row].option.pool for row in range(3)] == ["b", "a", "a"]
    assert [entries[row].start_s for row in range(3)] == [0.0, 0.0, 10.0]
    mixed = list_kueue_entries(solution, {2: 1}, order)
    assert mixed.keys() == {2} and (mixed[2].option.pool, mixed[2].start_s) == ("b", 0.0)


def test_the_flavors_of_one_job_are_not_those_of_another_of_its_queue() -> None:
    pools = PoolCapacity("a", 1, 1), PoolCapacity("b", 1, 1)
    jobs = (
        job("both", option("a", 1, 10.0), option("b", 1, 30.0), queue="q", arrival_s=-2.0),
        job("one", option("b", 1, 30.0), queue="q", arrival_s=-1.0),
    )
    solution = solve(QueueProblem(jobs, pools))
    entries = list_kueue_entries(solution, {0: 1, 1: 1}, {"both": ["a", "b"], "one": ["b"]})
    assert [(entries[row].option.pool, entries[row].start_s) for row in (0, 1)] == [("a", 0.0), ("b", 0.0)]
