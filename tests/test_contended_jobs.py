"""Two operators that give the same Jobs different advice: each backs off, and says so."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from job_store import JOBS, PLACING, JobStore, serving, until
from operator_store import settled
from tilecast.advice import Advice, Request, advise
from tilecast.hardware import Pool
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.objects.documents import ADVICE_KEYS, HASH, POOL

PATH = f"{JOBS}/a"
ADVISING = replace(PLACING, place=False)
WRITES_AT_MOST = 6
"""Most writes: each operator's first answer, one over an answer of the other, and writes that cross meanwhile."""


class WatchedStore(JobStore):
    """Store that shows every written job to all operators, as watches do."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[OperatorParts] = []

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        written = super().put(path, body)
        if path.startswith(JOBS):
            for running in self.operators:
                running.cache.put_object(copy.deepcopy(written))
        return written

    def count(self) -> int:
        """Return how often jobs were annotated."""
        return sum(path.startswith(JOBS) for _, path in self.writes)

    def messages(self) -> list[str]:
        return [item["message"] for item in self.events.values() if item["reason"] == "Contended"]


def otherwise(request: Request, pools: Sequence[Pool]) -> Advice:
    """Return a different answer to the same question."""
    return replace(advise(request, pools), inputs_hash="0123456789abcdef")


async def quiet(store: WatchedStore) -> None:
    """Wait until all operators are idle, or until it is clear that they write without end."""
    quick = asyncio.gather(*(settled(running) for running in store.operators))
    endless = asyncio.create_task(until(lambda: store.count() > 10 * WRITES_AT_MOST, "writes without an end"))
    await asyncio.wait({quick, endless}, return_when=asyncio.FIRST_COMPLETED)
    endless.cancel()
    quick.cancel()


@pytest.mark.slow
async def test_two_operators_leave_a_job_of_another_kind_to_each_other(caplog: pytest.LogCaptureFixture) -> None:
    store = WatchedStore()
    store.job("job", mode=None)
    with caplog.at_level(logging.WARNING):
        async with (
            serving(store, replace(ADVISING, instance="ours")) as ours,
            serving(store, replace(ADVISING, instance="theirs"), otherwise) as theirs,
        ):
            store.operators = [ours, theirs]
            for running in store.operators:
                running.cache.put_object(copy.deepcopy(store.now()))
            await until(lambda: HASH in store.annotations(), "an answer")
            await quiet(store)
            assert 2 <= store.count() <= WRITES_AT_MOST
            assert store.messages() and all("another release" in text for text in store.messages())
            shown = [generate_latest(running.metrics.registry) for running in store.operators]
            assert any(b"tilecast_contended_objects 1.0" in text for text in shown)
            # A new question is answered at once.
            before, body = store.count(), copy.deepcopy(store.now())
            body["metadata"]["annotations"]["tilecast.dev/training"] = '{"globalBatchSize": 512, "precision": "fp16"}'
            store.put(PATH, body)
            await until(lambda: store.count() > before, "an answer to what is asked now")
    assert "answers it too" in caplog.text


@pytest.mark.parametrize("change", ["removed", "foreign", "led"])
@pytest.mark.slow
async def test_what_people_and_other_replicas_write_is_put_right_at_once(change: str) -> None:
    store = WatchedStore()
    store.job("job", mode=None)
    async with serving(store, replace(ADVISING, instance="ours")) as ours:
        store.operators = [ours]
        ours.cache.put_object(copy.deepcopy(store.now()))
        await until(lambda: HASH in store.annotations(), "an answer")
        answer = store.annotations()
        for number in range(5):
            await settled(ours)
            body = copy.deepcopy(store.now())
            if change == "removed":
                body["metadata"]["annotations"] = {k: v for k, v in answer.items() if k not in ADVICE_KEYS}
            else:
                body["metadata"]["annotations"][POOL] = f"pool-{number}"
            if change == "foreign":
                (manager,) = body["metadata"]["managedFields"]
                del manager["fieldsV1"]["f:metadata"]["f:annotations"][f"f:{POOL}"]
            if change == "led":
                ours.leadership.stop_leading()
                ours.leadership.extend_lead(asyncio.get_running_loop().time() + 600.0)
            store.put(PATH, body)
            await until(lambda: store.annotations() == answer, "its own answer")
        assert not store.messages()
