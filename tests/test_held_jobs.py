"""Metrics of the jobs that wait for the operator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_client import generate_latest

from job_store import JOBS, PLACING, JobStore, serving, until
from tilecast.advice import Advice, Request, advise
from tilecast.hardware import Pool
from tilecast.jobs import APPLIED
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.admission import OUTCOMES
from tilecast_operator.kube.kinds import Key


def shown(running: OperatorParts, name: str, **labels: str) -> float | None:
    return running.metrics.registry.get_sample_value(f"tilecast_{name}", labels)


async def test_a_job_that_waits_is_shown_with_the_time_since_it_was_created() -> None:
    store, searching, go_on = JobStore(), threading.Event(), threading.Event()

    def search(request: Request, pools: Sequence[Pool]) -> Advice:
        if request.name != "warm-up":
            searching.set()
            go_on.wait(60)
        return advise(request, pools)

    async with serving(store, PLACING, search) as running:
        assert (shown(running, "held_jobs"), shown(running, "oldest_held_seconds")) == (0, 0)
        running.cache.put_object(store.job(mode="Initial"))
        await until(searching.is_set, "the search")
        oldest_s = shown(running, "oldest_held_seconds")
        assert shown(running, "held_jobs") == 1 and oldest_s is not None and oldest_s > 1e6, "created long ago"
        go_on.set()
        await until(lambda: APPLIED in store.annotations(), "the job to be let go")
        await until(lambda: shown(running, "placement_wait_seconds_count") == 1, "the wait to be counted")
        running.cache.put_object(store.now())
        assert (shown(running, "held_jobs"), shown(running, "oldest_held_seconds")) == (0, 0)
        wait_s = shown(running, "placement_wait_seconds_sum")
        assert wait_s is not None and wait_s >= oldest_s
        assert shown(running, "placements_total", outcome="Placed") == 1


async def test_a_job_that_begins_to_wait_later_has_waited_since_then() -> None:
    store = JobStore()
    async with serving(store) as running:
        document = store.job(mode="Advise")
        document["spec"]["suspend"] = True
        running.cache.put_object(store.put(f"{JOBS}/a", document))
        document["metadata"]["annotations"]["tilecast.dev/mode"] = "Initial"
        running.cache.put_object(store.put(f"{JOBS}/a", document))
        await until(lambda: shown(running, "placement_wait_seconds_count") == 1, "the job to be let go")
        wait_s = shown(running, "placement_wait_seconds_sum")
        assert wait_s is not None and wait_s < 1e5


@pytest.mark.slow
async def test_every_outcome_is_counted_from_zero_and_once() -> None:
    store = JobStore()
    async with serving(store) as running:
        outcomes = {
            sample.labels["outcome"]: sample.value
            for metric in running.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "tilecast_placements_total"
        }
        assert not any(outcomes.values())
        assert OUTCOMES.keys() - outcomes.keys() == {"Waiting", "Finished", "Uninstalled", "OperatorDown"}
        job = store.job("job-kueue", mode="Initial")
        store.workload(job)
        running.cache.put_object(job)
        await until(lambda: store.annotations().get(APPLIED) == patches.QUEUED, "the job to be let go")
        store.admit(running)
        await until(lambda: store.annotations().get(APPLIED) == patches.PLACED, "Kueue to admit it")
        await until(lambda: shown(running, "placements_total", outcome="Placed") == 1, "that to be counted")
        assert shown(running, "placements_total", outcome="Queued") == 1
        running.cache.put_object(store.now())
        await asyncio.sleep(0.05)
        assert shown(running, "placements_total", outcome="Placed") == 1


async def test_a_job_that_is_deleted_waits_no_more_and_a_follower_shows_none() -> None:
    store = JobStore()
    async with serving(store) as running:
        job = store.job("job-kueue", mode="Initial")
        running.cache.put_object(job)
        assert shown(running, "held_jobs") == 1
        running.cache.remove_object(store.objects.pop(f"{JOBS}/a"))
        assert shown(running, "held_jobs") == 0
        running.metrics.set_leadership_metric(False)
        assert b"held" not in generate_latest(running.metrics.registry)


@pytest.mark.parametrize("reason", ["ModeAdvise"])
async def test_a_job_that_is_let_go_as_it_was_is_counted_by_the_reason(reason: str) -> None:
    store = JobStore()
    async with serving(store) as running:
        running.cache.put_object(store.job("job-gated", mode="Advise"))
        await until(lambda: shown(running, "placements_total", outcome=reason) == 1, "the reason")


class DeletingStore(JobStore):
    """Store that deletes a job as its operator releases it, and ends the operator's right to write."""

    running: OperatorParts

    async def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        body = await super().patch(path, operations)
        self.running.cache.remove_object(body)
        self.running.leadership.stop_leading()
        return body


async def test_a_replica_that_stops_leading_keeps_nothing_of_a_job_that_is_deleted() -> None:
    store, key = DeletingStore(), Key("Job", "default", "a")
    async with serving(store) as running:
        store.running = running
        job = store.job("job-gated", mode="Advise")
        running.cache.put_object(job)
        await until(lambda: store.patches, "the job to be let go")
        await until(lambda: not running.admission.is_deciding(key, job["metadata"]["uid"]), "the end of the decision")
        assert key not in running.runtime.records
