"""Estimates in annotations of Kueue's Workloads, and that nothing of ours writes a limit that ends a run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from job_store import PLACING, JobStore, serving, until
from test_queue_operator import kueue
from tilecast import jobs
from tilecast.api import crds
from tilecast.api.status import TrainingJobStatus
from tilecast_operator.controllers import estimates
from tilecast_operator.kube.client import ApiError
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

    async def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        self.written.append(json.dumps(operations))
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


async def test_the_workload_of_a_waiting_job_says_when_it_starts_and_how_long_it_runs() -> None:
    store, names = WritingStore(), [f"j{number}" for number in range(8)]
    for name in names:
        store.workload(waiting(store, name))
    async with serving(store, ESTIMATING) as running:
        kueue(running)
        for name in names:
            running.cache.put_object(store.now(name))
        await until(lambda: all(annotations_of(store, name).keys() >= KEYS for name in names), "the estimates")
    for name in names:
        said = annotations_of(store, name)
        assert said.keys() == KEYS
        earliest, latest = said[jobs.START_RANGE].split("/")
        assert earliest <= said[jobs.START_ESTIMATE] <= latest
        lower, upper = map(int, said[jobs.RUN_RANGE].split("-"))
        assert 0 < lower < int(said[jobs.RUN_ESTIMATE]) < upper
    assert any(annotations_of(store, name)[jobs.START_RANGE].split("/")[0] > "2026" for name in names)
    assert not any(limit in text for text in store.written for limit in LIMITS)


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


def test_nothing_that_ships_names_a_limit_that_ends_a_run() -> None:
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
    assert [str(path) for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []


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
