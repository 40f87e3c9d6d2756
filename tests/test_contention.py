"""Two operators that answer the same jobs differently: each backs off, and says so."""

from __future__ import annotations

import asyncio
import copy
import logging
from dataclasses import replace
from itertools import pairwise

import pytest
from prometheus_client import generate_latest

from operator_store import JOBS, TIMINGS, Store, job, operator, settled
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.controllers import contention
from tilecast_operator.controllers.contention import (
    FIRST_PAUSE_S,
    MOST_PAUSE_S,
    WrittenAdvice,
    update_overwritten_advice,
)

DAY_S = 86_400.0
PATH = f"{JOBS}/a"
OTHER = "team-b/tilecast"


def contest(ends_s: float) -> list[float]:
    """Return the times at which two operators write, up to `ends_s`, if both follow `contested`.

    Each meets the other's answer at once or after its pause.
    """
    claims = [WrittenAdvice(1, b"mine", 0.0), WrittenAdvice(1, b"theirs", 0.0)]
    now_s, shown, written = 0.0, 1, list[float]()
    while now_s < ends_s:
        mover = 1 - shown
        after = update_overwritten_advice(claims[mover], 1, claims[shown].digest, now_s)
        assert after is not None
        claims[mover] = after
        now_s = max(now_s, after.until_s)
        claims[mover] = WrittenAdvice(1, after.digest, now_s, after.replaced)
        shown = mover
        written.append(now_s)
    return written


def test_two_operators_write_ever_more_seldom() -> None:
    written = contest(DAY_S)
    assert written[:2] == [0.0, 0.0] and written[2] == FIRST_PAUSE_S
    pauses = [later - before for before, later in pairwise(written)]
    assert pauses == sorted(pauses) and pauses[-1] == MOST_PAUSE_S
    assert len(written) < 64


def test_an_answer_that_has_stood_is_written_over_once_more_at_once() -> None:
    claim = WrittenAdvice(1, b"mine", 0.0, 3)
    soon, late = (
        update_overwritten_advice(claim, 1, b"theirs", 10.0),
        update_overwritten_advice(claim, 1, b"theirs", 10_000.0),
    )
    assert soon is not None and soon.until_s == 10.0 + soon.pause_s and soon.is_contended(20.0)
    assert late is not None and late.until_s == 0.0 and not late.is_contended(10_000.0)
    assert update_overwritten_advice(claim, 2, b"theirs", 10.0) is None, "somebody has asked something new"
    assert update_overwritten_advice(claim, 1, b"mine", 10.0) is None


def replaced(store: Store, running: OperatorParts, writer: str | None, pool: str) -> None:
    """Replace the stored answer by another one."""
    body = copy.deepcopy(store.objects[PATH])
    body["status"]["summary"]["pool"] = pool
    body["status"].pop("writer", None)
    if writer is not None:
        body["status"]["writer"] = writer
    running.cache.put_object(store.put(PATH, body))


def statuses(store: Store) -> int:
    return sum(path == f"{PATH}/status" for _, path in store.writes)


@pytest.mark.parametrize(("writer", "named"), [(OTHER, OTHER), (None, contention.EARLIER)])
@pytest.mark.slow
def test_an_operator_leaves_a_job_to_another_and_says_so(
    caplog: pytest.LogCaptureFixture, writer: str | None, named: str
) -> None:
    async def scene(store: Store) -> None:
        async with operator(store, instance="ours") as running:
            await settled(running)
            assert store.objects[PATH]["status"]["writer"] == "ours"
            before = statuses(store)
            for number in range(10):
                replaced(store, running, writer, f"pool-{number}")
                await settled(running)
            assert statuses(store) == before + contention.FREE_OVERWRITES
            assert b"tilecast_contended_objects 1.0" in generate_latest(running.metrics.registry)
            (event,) = (item for item in store.events.values() if item["reason"] == "Contended")
            assert named in event["message"] and "ours" in event["message"] and event["type"] == "Warning"
            # A new question is answered at once.
            body = copy.deepcopy(store.objects[PATH])
            body["spec"]["objective"] = "cost"
            running.cache.put_object(store.put(PATH, body))
            await settled(running)
            status = store.objects[PATH]["status"]
            assert status["writer"] == "ours" and status["observedGeneration"] == 2

    store = Store()
    store.put(PATH, job())
    with caplog.at_level(logging.WARNING):
        asyncio.run(scene(store))
    (line,) = (record.getMessage() for record in caplog.records if "answers it too" in record.getMessage())
    assert named in line and "ours" in line


def test_an_operator_waits_after_annotations_that_another_has_replaced_at_once() -> None:
    timings = replace(TIMINGS, conflict_first_s=1000.0, conflict_most_s=1000.0)

    async def scene(store: Store) -> None:
        async with operator(store, timings=timings, instance="ours") as running:

            def annotate(path: str) -> None:
                """Replace the annotations between our write of them and that of the status."""
                if path == f"{PATH}/status":
                    body = copy.deepcopy(store.objects[PATH])
                    body["metadata"]["annotations"]["tilecast.dev/recommended-pool"] = f"theirs-{store.version}"
                    running.cache.put_object(store.put(PATH, body))

            store.before_write = annotate
            await settled(running)
            assert len(store.writes) == 2 and "status" not in store.objects[PATH]
            store.before_write = lambda path: None
            # A new question is answered at once.
            body = copy.deepcopy(store.objects[PATH])
            body["spec"]["objective"] = "cost"
            running.cache.put_object(store.put(PATH, body))
            await settled(running)
            assert store.objects[PATH]["status"]["writer"] == "ours"

    store = Store()
    store.put(PATH, job())
    asyncio.run(scene(store))


def test_replicas_of_one_release_and_people_are_not_taken_for_another() -> None:
    async def scene(store: Store) -> None:
        async with operator(store, instance="ours") as running:
            await settled(running)
            before = statuses(store)
            for number in range(5):
                replaced(store, running, "ours", f"pool-{number}")
                await settled(running)
            assert statuses(store) == before + 5
            assert not [item for item in store.events.values() if item["reason"] == "Contended"]

    store = Store()
    store.put(PATH, job())
    asyncio.run(scene(store))


def test_an_equal_answer_of_another_is_left_as_it_is() -> None:
    async def scene(store: Store) -> None:
        async with operator(store, instance="ours") as running:
            await settled(running)
        async with operator(store, instance="theirs") as running:
            before = len(store.writes)
            await settled(running)
            assert len(store.writes) == before and store.objects[PATH]["status"]["writer"] == "ours"

    store = Store()
    store.put(PATH, job())
    asyncio.run(scene(store))
