"""Estimates in annotations of Kueue's Workloads, and that nothing of ours writes a limit that ends a run."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from job_store import PLACING, WORKLOADS, JobStore, serving, until
from test_queue_operator import NOW_S, kueue
from tilecast import jobs
from tilecast.api import crds
from tilecast.api.status import TrainingJobStatus
from tilecast.spec import SpecError
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.controllers import estimates, run_limits
from tilecast_operator.controllers.queue_plans import QUEUE
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.lease import NotLeaderError
from tilecast_operator.kube.times import format_time
from tilecast_operator.settings import from_environment

ROOT = Path(__file__).resolve().parent.parent
ESTIMATING = replace(
    PLACING, queue=True, queue_interval_s=0.01, queue_policy="completion", read_kueue=True, queue_estimates=True
)
LIMITS = ("activeDeadlineSeconds", "max-exec-time-seconds", "maximumExecutionTimeSeconds")
"""Fields and labels with which Kubernetes and Kueue end a run."""
KEYS = {jobs.START_ESTIMATE, jobs.START_RANGE, jobs.RUN_ESTIMATE, jobs.RUN_RANGE}


class WritingStore(JobStore):
    """Store that keeps all that was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = list[str]()
        self.lists = 0
        """Number of times that the Workloads of a job were listed."""
        self.failing = dict[str, Exception]()
        """Error of each patch of the Workload of a job, by name of the job."""
        self.failing_lists = list[Exception]()
        """Errors of the next lists of Workloads."""

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        if path == WORKLOADS and "labelSelector" in query:
            self.lists += 1
            if self.failing_lists:
                raise self.failing_lists.pop(0)
        return await super().get(path, query)

    async def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        self.written.append(json.dumps(operations))
        if (error := self.failing.get(path.rpartition("/for-")[2])) is not None:
            raise error
        return await super().patch(path, operations)

    async def apply(self, path: str, document: Any, *, force: bool = True) -> dict[str, Any]:
        self.written.append(json.dumps(document))
        return await super().apply(path, document, force=force)


def waiting(store: JobStore, name: str) -> dict[str, Any]:
    """Store a job that waits in a queue of Kueue and asks for advice alone."""
    document = store.job("job-kueue", name, training='{"globalBatchSize": 1024, "precision": "fp16", "steps": 20000}')
    document["metadata"]["annotations"]["tilecast.dev/mode"] = "Advise"
    return store.put(f"/apis/batch/v1/namespaces/default/jobs/{name}", document)


def annotations_of(store: JobStore, name: str) -> dict[str, str]:
    return dict(store.workloads[f"for-{name}"]["metadata"].get("annotations") or {})


@pytest.mark.slow
async def test_the_workload_of_a_waiting_job_says_when_it_starts_and_how_long_it_runs() -> None:
    store, names = WritingStore(), [f"j{number}" for number in range(8)]
    for name in names:
        store.workload(waiting(store, name))
    async with serving(store, ESTIMATING) as running:
        kueue(running)
        for name in names:
            running.cache.put_object(store.now(name))
        await until(lambda: all(annotations_of(store, name).keys() >= KEYS for name in names), "the estimates")
        planned = {name: running.planned.get_position(Key("Job", "default", name)) for name in names}
        await until(
            lambda: all(annotations_of(store, name) == described(running, name) for name in names), "what is planned"
        )
    assert any(place and str(place.earliest_start) < str(place.latest_start) for place in planned.values())
    for name in names:
        said = annotations_of(store, name)
        assert said.keys() == KEYS
        earliest, latest = said[jobs.START_RANGE].split("/")
        assert earliest <= said[jobs.START_ESTIMATE] <= latest
        lower, upper = map(int, said[jobs.RUN_RANGE].split("-"))
        assert 0 < lower < int(said[jobs.RUN_ESTIMATE]) < upper
    assert not any(limit in text for text in store.written for limit in LIMITS)


async def test_a_job_that_kueue_places_is_forecast_on_the_flavor_that_kueue_tries_first() -> None:
    store, advised, placed = WritingStore(), Key("Job", "default", "advised"), Key("Job", "default", "placed")
    store.workload(waiting(store, "advised"))
    held = store.job("job-kueue", "placed", training='{"globalBatchSize": 1024, "precision": "fp16", "steps": 20000}')
    store.workload(held)
    async with serving(store, ESTIMATING) as running:
        assert running.estimates is not None
        kueue(running)
        running.cache.put_object(store.now("advised"))
        running.cache.put_object(store.now("placed"))
        await until(lambda: annotations_of(store, "advised").keys() >= KEYS, "the estimate of the first")
        await until(lambda: annotations_of(store, "placed").keys() >= KEYS, "the estimate of the second")
        forecasts = [running.estimates.find_forecast(key) for key in (advised, placed)]
        planned = [running.planned.get_position(key) for key in (advised, placed)]
    assert [place.pool for place in forecasts if place] == ["t4", "h100-sxm"]
    assert [place.pool for place in planned if place] == ["h100-sxm", "h100-sxm"]


async def test_a_start_that_has_passed_is_forecast_anew() -> None:
    store, now_s = WritingStore(), NOW_S
    store.workload(waiting(store, "late"))
    async with serving(store, ESTIMATING, clock=lambda: now_s) as running:
        kueue(running)
        running.cache.put_object(store.now("late"))
        await until(lambda: annotations_of(store, "late").keys() >= KEYS, "the estimate")
        assert annotations_of(store, "late")[jobs.START_ESTIMATE] == format_time(NOW_S)
        now_s = NOW_S + 86_400
        running.runtime.add(QUEUE)
        await until(lambda: annotations_of(store, "late")[jobs.START_ESTIMATE] == format_time(now_s), "the next one")


def described(running: OperatorParts, name: str) -> dict[str, str]:
    """Return the annotations that say when a job is forecast to run."""
    assert running.estimates is not None
    place = running.estimates.find_forecast(Key("Job", "default", name))
    if place is None or place.run_seconds is None:
        return {}
    run = place.run_seconds
    return {
        jobs.START_ESTIMATE: str(place.start),
        jobs.START_RANGE: f"{place.earliest_start}/{place.latest_start}",
        jobs.RUN_ESTIMATE: str(round(run.target)),
        jobs.RUN_RANGE: f"{round(run.lower_bound)}-{round(run.upper_bound)}",
    }


@asynccontextmanager
async def estimating(store: WritingStore, names: Sequence[str], **settings: Any) -> AsyncIterator[OperatorParts]:
    """Run an operator for waiting jobs that have Workloads."""
    for name in names:
        store.workload(waiting(store, name))
    async with serving(store, replace(ESTIMATING, **settings)) as running:
        kueue(running)
        for name in names:
            running.cache.put_object(store.now(name))
        yield running


@pytest.mark.slow
async def test_jobs_of_one_second_are_planned_in_the_order_of_their_workloads() -> None:
    store, names = WritingStore(), ["a", "b", "c", "d", "e", "f"]
    async with estimating(store, names) as running:
        for name, uid in zip(names, ("6", "2", "5", "1", "4", "3"), strict=True):
            created = "2026-01-01T00:00:01Z" if name == "f" else "2026-01-01T00:00:00Z"
            store.workloads[f"for-{name}"]["metadata"] |= {"uid": uid, "creationTimestamp": created}

        def are_in_turn() -> bool:
            places = [running.planned.get_position(Key("Job", "default", name)) for name in "dbecaf"]
            waits = [(str(place.pool), place.position or 0) for place in places if place]
            pools = {pool: [number for of, number in waits if of == pool] for pool, _ in waits}
            return len(waits) == len(names) and all(numbers == sorted(numbers) for numbers in pools.values())

        await until(are_in_turn, "the order of the Workloads")


@pytest.mark.parametrize("error", [ValueError("no"), NotLeaderError("no"), ApiError(403, "no"), ApiError(500, "no")])
@pytest.mark.slow
async def test_a_workload_that_cannot_be_written_keeps_no_other_job_from_its_estimates(error: Exception) -> None:
    store, names = WritingStore(), [f"j{number}" for number in range(6)]
    store.failing["j0"] = error
    async with estimating(store, names) as running:
        await until(lambda: all(annotations_of(store, name).keys() == KEYS for name in names[1:]), "all others")
        assert annotations_of(store, "j0") == {}
        del store.failing["j0"]
        if isinstance(error, NotLeaderError):
            running.runtime.queue_all_keys(())
        await until(lambda: annotations_of(store, "j0").keys() == KEYS, "the last, whose position is the same")


@pytest.mark.slow
async def test_a_list_that_is_not_found_is_asked_for_again() -> None:
    store, names = WritingStore(), ["a", "b", "c"]
    store.failing_lists = [ApiError(404, "not found"), ApiError(404, "not found")]
    async with estimating(store, names):
        await until(lambda: all(annotations_of(store, name).keys() == KEYS for name in names), "the estimates")
    assert not store.failing_lists


async def test_a_position_with_the_same_estimates_costs_no_request() -> None:
    store, names = WritingStore(), ["a", "b", "c"]
    async with estimating(store, names) as running:
        await until(lambda: all(annotations_of(store, name).keys() == KEYS for name in names), "the estimates")
        await until(lambda: not running.runtime.count_backlog("Estimate"), "the queue")
        await asyncio.sleep(0.05)
        lists, written = store.lists, len(store.written)
        assert running.estimates is not None
        running.estimates.schedule_jobs(running.cache.jobs)
        await asyncio.sleep(0.1)
        assert (store.lists, len(store.written)) == (lists, written)
        running.estimates._on_leadership_change(True)  # another replica may have written meanwhile
        await until(lambda: store.lists == lists + len(names), "a look at each")


async def test_a_job_that_the_plan_leaves_out_loses_its_estimates_unless_it_has_quota() -> None:
    store, names = WritingStore(), ["a", "b"]
    async with estimating(store, names) as running:
        await until(lambda: all(annotations_of(store, name).keys() == KEYS for name in names), "the estimates")
        store.workloads["for-a"]["metadata"]["annotations"]["theirs"] = "stays"
        store.decide("QuotaReserved", "b")
        for name in names:
            document = copy.deepcopy(store.now(name))
            document["metadata"]["annotations"][jobs.TRAINING] = '{"globalBatchSize": 1024, "precision": "fp16"}'
            running.cache.put_object(store.put(f"/apis/batch/v1/namespaces/default/jobs/{name}", document))
        await until(lambda: annotations_of(store, "a") == {"theirs": "stays"}, "the estimates to go")
        await until(lambda: running.planned.find_left_out_reason(Key("Job", "default", "b")), "the plan")
        await asyncio.sleep(0.1)
        assert annotations_of(store, "b").keys() == KEYS


@pytest.mark.parametrize("missing", ["jobs", "read_kueue"])
async def test_without_rights_on_workloads_nothing_asks_for_them(missing: str) -> None:
    store = WritingStore()
    async with estimating(store, ["a"], **{missing: False, "place": False}) as running:
        await asyncio.sleep(0.2)
        assert (running.estimates, store.lists) == (None, 0)


async def test_the_version_of_kueue_is_asked_again_where_jobs_are_not_placed() -> None:
    store = WritingStore()
    async with estimating(store, ["a"], place=False, watch_check_s=0.01) as running:
        await until(lambda: running.kueue.features.served == "v1beta2", "the version")
        await until(lambda: annotations_of(store, "a").keys() == KEYS, "the estimates")
    assert not [reason for reason, _ in store.events_seen() if reason == "KueueFeatures"]


async def test_without_the_setting_no_workload_is_annotated() -> None:
    store = WritingStore()
    store.workload(waiting(store, "a"))
    async with serving(store, replace(ESTIMATING, queue_estimates=False)) as running:
        kueue(running)
        running.cache.put_object(store.now("a"))
        await until(lambda: running.planned.get_position(next(iter(running.cache.jobs))), "the plan")
        await asyncio.sleep(0.1)
    assert annotations_of(store, "a") == {}
    assert from_environment({}).queue_estimates is False


async def test_a_workload_that_comes_later_or_is_changed_meanwhile_gets_its_estimate(monkeypatch: Any) -> None:
    monkeypatch.setattr(estimates, "WAIT_S", 0.01)
    store = WritingStore()
    document = waiting(store, "a")
    async with serving(store, ESTIMATING) as running:
        kueue(running)
        running.cache.put_object(store.now("a"))
        await until(lambda: running.planned.get_position(next(iter(running.cache.jobs))), "the plan")
        store.refuse.append(ApiError(409, "changed"))
        store.workload(document)
        await until(lambda: annotations_of(store, "a").keys() >= KEYS, "the estimate")
        assert not store.refuse


def limit_of(store: JobStore, name: str) -> tuple[str | None, str | None]:
    """Return the limit of a job that Kueue enforces, and the mark that it is ours."""
    metadata = store.now(name)["metadata"]
    return metadata["labels"].get(jobs.RUN_LIMIT_LABEL), metadata["annotations"].get(jobs.RUN_LIMIT)


def change(store: JobStore, running: OperatorParts, name: str, part: str, key: str, value: str | None) -> None:
    """Set or remove a label or an annotation of a job, as its owner would."""
    document = copy.deepcopy(store.now(name))
    document["metadata"][part].pop(key, None)
    if value is not None:
        document["metadata"][part][key] = value
    running.cache.put_object(store.put(f"/apis/batch/v1/namespaces/default/jobs/{name}", document))


async def test_only_the_owner_gets_a_limit_and_takes_it_away() -> None:
    store, names = WritingStore(), ["a", "b", "c"]
    async with estimating(store, names) as running:
        await until(lambda: all(annotations_of(store, name).keys() == KEYS for name in names), "the estimates")
        assert [limit_of(store, name) for name in names] == [(None, None)] * 3
        change(store, running, "a", "annotations", jobs.RUN_LIMIT_FACTOR, "")
        change(store, running, "b", "annotations", jobs.RUN_LIMIT_FACTOR, "3")
        await until(lambda: limit_of(store, "a")[0] and limit_of(store, "b")[0], "both limits")
        twice, thrice = (int(str(limit_of(store, name)[0])) for name in "ab")
        assert limit_of(store, "a")[1] == str(twice) and twice == pytest.approx(thrice / 3 * 2, abs=2)
        assert twice >= 2 * int(annotations_of(store, "a")[jobs.RUN_ESTIMATE]) - 2
        assert limit_of(store, "c") == (None, None)
        change(store, running, "a", "annotations", jobs.RUN_LIMIT_FACTOR, None)
        await until(lambda: limit_of(store, "a") == (None, None), "the limit to go")
        change(store, running, "c", "labels", jobs.RUN_LIMIT_LABEL, "77")
        change(store, running, "c", "annotations", jobs.RUN_LIMIT_FACTOR, "2")
        await asyncio.sleep(0.2)
        assert limit_of(store, "c") == ("77", None), "the owner's own limit stays"


@pytest.mark.parametrize("field", ["accumulatedPastExecutionTimeSeconds", "accumulatedPastExexcutionTimeSeconds"])
async def test_the_time_of_earlier_admissions_is_added_since_kueue_counts_it(field: str) -> None:
    store, names = WritingStore(), ["a", "b"]
    async with estimating(store, names) as running:
        await until(lambda: all(annotations_of(store, name).keys() == KEYS for name in names), "the estimates")
        store.workloads["for-b"] = {**store.workloads["for-b"], "status": {field: 1_000_000}}
        for name in names:
            change(store, running, name, "annotations", jobs.RUN_LIMIT_FACTOR, "2")
        await until(lambda: all(limit_of(store, name)[0] for name in names), "both limits")
        never, evicted = (int(str(limit_of(store, name)[0])) for name in names)
        assert evicted == pytest.approx(never + 1_000_000, abs=2)


async def test_an_owner_takes_a_limit_away_from_a_job_that_is_no_longer_planned() -> None:
    store, names = WritingStore(), ["a", "b"]
    async with estimating(store, names) as running:
        await until(lambda: all(annotations_of(store, name).keys() == KEYS for name in names), "the estimates")
        change(store, running, "a", "annotations", jobs.RUN_LIMIT_FACTOR, "2")
        await until(lambda: limit_of(store, "a")[0], "the limit")
        change(store, running, "a", "annotations", "tilecast.dev/mode", "Off")
        await until(lambda: running.planned.get_position(Key("Job", "default", "a")) is None, "a plan without it")
        await until(lambda: annotations_of(store, "a") == {}, "the estimates to go")
        assert limit_of(store, "a")[0]
        change(store, running, "a", "annotations", jobs.RUN_LIMIT_FACTOR, None)
        await until(lambda: limit_of(store, "a") == (None, None), "the limit to go")


async def test_a_factor_that_is_no_number_gets_an_event_and_no_limit() -> None:
    store, names = WritingStore(), ["a", "b"]
    async with estimating(store, names) as running:
        await until(lambda: all(annotations_of(store, name).keys() == KEYS for name in names), "the estimates")
        change(store, running, "a", "annotations", jobs.RUN_LIMIT_FACTOR, "soon")
        await until(lambda: [one for one in store.events_seen() if one[0] == "InvalidRunLimit"], "the Event")
        assert limit_of(store, "a") == (None, None)
        change(store, running, "a", "annotations", jobs.RUN_LIMIT_FACTOR, "2")
        await until(lambda: limit_of(store, "a")[0], "the limit")


async def test_a_job_with_quota_or_that_runs_gets_no_limit() -> None:
    store, names = WritingStore(), ["a", "b"]
    async with estimating(store, names) as running:
        await until(lambda: all(annotations_of(store, name).keys() == KEYS for name in names), "the estimates")
        store.decide("QuotaReserved", "a")
        change(store, running, "a", "annotations", jobs.RUN_LIMIT_FACTOR, "2")
        change(store, running, "b", "annotations", jobs.RUN_LIMIT_FACTOR, "2")
        await until(lambda: limit_of(store, "b")[0], "the limit of the other")
        await asyncio.sleep(0.1)
        assert limit_of(store, "a") == (None, None)


@pytest.mark.parametrize("text", ["0.9", "101", "nan", "inf", "-2", "two", "1e400", "2 h", "9" * 400])
def test_nonsense_is_no_factor(text: str) -> None:
    with pytest.raises(SpecError, match=r"run-limit-factor: .* is no factor; write a number from 1 to 100"):
        run_limits.read_factor({jobs.RUN_LIMIT_FACTOR: text})
    document = {"kind": "Job", "metadata": {"annotations": {jobs.RUN_LIMIT_FACTOR: "2"}}, "spec": {"suspend": True}}
    assert run_limits.is_suspended(document) and not run_limits.is_suspended({"kind": "Job"})
    assert run_limits.decide_limit(document, None) is None
    assert set((run_limits.decide_limit(document, 1e300) or {}).values()) == {str(2**31 - 1)}
    assert set((run_limits.decide_limit(document, 10.1) or {}).values()) == {"21"}
    odd = [{}, {"status": None}, {"status": {"accumulatedPastExecutionTimeSeconds": "7"}}]
    assert run_limits.find_past_seconds(odd) == 0


def test_nothing_that_ships_names_a_limit_that_ends_a_run_but_the_label_that_an_owner_asks_for() -> None:
    # The chart's own hooks bound themselves. A training job is no object of the chart.
    hooks = {"release.yaml", "release-when-down.yaml"}
    files = [
        path
        for folder in ("predictor/tilecast", "operator/tilecast_operator", "charts/tilecast/templates")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml", ".yaml", ".tpl") and path.name not in hooks
    ]
    assert len(files) > 300
    pattern = re.compile("|".join((*LIMITS, "active_deadline", "maximum_execution", "max_exec")))
    assert [path.name for path in files if pattern.search(path.read_text(encoding="utf-8"))] == ["keys.py"]
    users = {path.name for path in files if "RUN_LIMIT_LABEL" in path.read_text(encoding="utf-8")}
    assert users == {"keys.py", "__init__.py", "run_limits.py", "patches.py", "estimates.py"}


def test_the_series_of_a_single_job_are_fields_of_its_status() -> None:
    text = (ROOT / "charts" / "tilecast" / "files" / "custom-resource-state.yaml").read_text()
    jobs_alone = yaml.safe_load(text)["spec"]["resources"][0]["metrics"]
    paths = [one["each"]["gauge"]["path"] for one in jobs_alone if "gauge" in one["each"]]
    status = crds.structural_schema(TrainingJobStatus)
    assert sum("queue" in path for path in paths) == 6
    for path in paths:
        found = status
        for name in path[1:]:
            found = found["properties"][name]
