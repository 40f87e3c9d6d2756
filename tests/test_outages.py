"""Admission webhooks that do not answer, as those of a restarting Kueue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from job_store import PLACING, JobStore, serving, until
from operator_store import TIMINGS
from tilecast.jobs import APPLIED
from tilecast_operator.kube.client import ApiError, is_webhook_down

DOWN = 'Internal error occurred: failed calling webhook "mjob.kb.io": failed to call webhook: connection refused'
NAMES = ("a", "b", "c")


def kueue_away(store: JobStore) -> Callable[[], None]:
    """Let every webhook of Kueue fail, and return a function that ends the outage."""
    gate, write_as_before = store.gate, store.before_write

    def write(path: str) -> None:
        if not path.startswith("/api/v1"):
            raise ApiError(500, DOWN)

    def come_back() -> None:
        store.before_write, store.gate = write_as_before, gate

    store.before_write, store.gate = write, ApiError(500, DOWN)
    return come_back


def test_only_a_webhook_that_does_not_answer_is_waited_for() -> None:
    assert is_webhook_down(ApiError(500, DOWN))
    for status, text in ((403, 'admission webhook "x" denied the request'), (500, 'admission webhook "x" denied it')):
        assert not is_webhook_down(ApiError(status, text))
    assert not is_webhook_down(TimeoutError())


SOON = replace(TIMINGS, release_most_s=0.3)


@pytest.mark.parametrize("name", ["job", "job-kueue", "job-gated"])
@pytest.mark.slow
async def test_jobs_are_placed_once_kueue_answers_again_with_one_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = JobStore()
    come_back = kueue_away(store)
    async with serving(store, PLACING, timings=SOON) as running:
        for new_name in NAMES:
            document = store.job(name, new_name)
            store.workload(document)
            running.cache.put_object(document)
        await until(lambda: caplog.records, "a warning")
        await asyncio.sleep(1.0)
        assert running.metrics.registry.get_sample_value("tilecast_held_jobs") == 3
        come_back()
        await until(lambda: all(APPLIED in store.annotations(each) for each in NAMES), "the jobs to be let go")
        outcomes = {store.annotations(each)[APPLIED] for each in NAMES}
        assert outcomes == {"Placed" if name == "job" else "Queued"}
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len([record for record in warnings if "webhook" in record.getMessage()]) == 1, warnings


async def test_a_job_that_kueue_has_yet_to_see_waits_to_hear_of_the_gate(caplog: pytest.LogCaptureFixture) -> None:
    store = JobStore()
    come_back = kueue_away(store)
    store.workload(store.job(new_name="other"))
    async with serving(store, PLACING, timings=replace(SOON, workload_s=0.1)) as running:
        running.cache.put_object(store.job("job-gated"))
        await until(lambda: "until a webhook answers" in caplog.text, "a warning")
        come_back()
        await until(lambda: APPLIED in store.annotations(), "the job to be let go")
        assert store.annotations()[APPLIED] == "Queued"


async def test_a_webhook_that_stays_away_too_long_is_waited_for_no_more() -> None:
    store = JobStore()
    store.refuse = [ApiError(500, DOWN)] * 3
    async with serving(store, timings=replace(TIMINGS, webhook_s=0.2)) as running:
        running.cache.put_object(store.job())
        await until(lambda: APPLIED in store.annotations(), "the job to be let go")
        assert store.annotations()[APPLIED] == "Refused" and store.now()["spec"]["suspend"] is False
