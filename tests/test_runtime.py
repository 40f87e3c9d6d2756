"""The queue of keys and the workers: no key is lost or given twice, and background keys delay no other."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tilecast_operator.controllers.runtime import Runtime, TryAgainError
from tilecast_operator.kube.controller_state import ControllerState, StateTable
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.queue import BACKGROUND_AT_ONCE, KeyQueue
from tilecast_operator.metrics import Metrics
from tilecast_operator.settings import Settings


async def test_queue_holds_each_key_once() -> None:
    queue: KeyQueue[str] = KeyQueue(asyncio.get_running_loop().time)
    for key in "abab":
        queue.add(key)
    assert [await queue.take_key(), await queue.take_key()] == ["a", "b"]
    assert len(queue) == 0


async def test_queue_never_gives_a_running_key_twice() -> None:
    queue: KeyQueue[str] = KeyQueue(asyncio.get_running_loop().time)
    queue.add("a")
    assert await queue.take_key() == "a"
    queue.add("a")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take_key(), 0.02)
    queue.finish_key("a")
    assert await queue.take_key() == "a"


async def test_queue_delays_and_the_shortest_counts() -> None:
    loop = asyncio.get_running_loop()
    queue: KeyQueue[str] = KeyQueue(loop.time)
    queue.add("a", 10)
    queue.add("a", 0.03)
    queue.add("b", 0.01)
    began = loop.time()
    assert [await queue.take_key(), await queue.take_key()] == ["b", "a"]
    assert 0.02 < loop.time() - began < 1


@pytest.mark.parametrize("turns", range(6))
async def test_a_worker_that_is_ended_just_as_a_key_comes_ends(turns: int) -> None:
    queue: KeyQueue[str] = KeyQueue(asyncio.get_running_loop().time)
    queue.add("later", 60.0)

    async def work() -> None:
        while True:
            queue.finish_key(await queue.take_key())

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    queue.add("a")
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.2)
    assert done and task.cancelled()


async def test_a_key_wakes_one_worker_however_many_wait() -> None:
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return asyncio.get_running_loop().time()

    queue: KeyQueue[str] = KeyQueue(clock)
    queue.add("last", 60.0)
    workers = [asyncio.create_task(queue.take_key()) for _ in range(200)]
    await asyncio.sleep(0.01)
    looks = 0
    queue.add("now")
    queue.add("soon", 0.01)
    while sum(worker.done() for worker in workers) < 2:
        await asyncio.sleep(0.01)
    assert looks < 20
    for worker in workers:
        worker.cancel()


async def test_a_key_waits_behind_few_of_the_background_however_many_there_are() -> None:
    queue: KeyQueue[str] = KeyQueue(asyncio.get_running_loop().time)
    for number in range(1000):
        queue.add(f"b{number}", in_background=True)
    queue.add("new")
    queue.add("b900")
    taken = [await queue.take_key() for _ in range(BACKGROUND_AT_ONCE + 2)]
    assert set(taken) == {*(f"b{number}" for number in range(BACKGROUND_AT_ONCE)), "new", "b900"}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take_key(), 0.02)
    queue.finish_key("new")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take_key(), 0.02)
    queue.finish_key("b1")
    assert await queue.take_key() == f"b{BACKGROUND_AT_ONCE}"
    assert len(queue) == 1000 - BACKGROUND_AT_ONCE - 2


async def test_a_delay_of_the_background_and_one_that_is_not_leave_each_other_alone() -> None:
    now = 0.0
    queue: KeyQueue[str] = KeyQueue(lambda: now)
    for number in range(20):
        queue.add(f"b{number}", 300.0)
        queue.add(f"b{number}", 5.0, in_background=True)
    queue.add("own", 6.0)
    queue.add("own", 5.0, in_background=True)
    now = 6.0
    taken = [await queue.take_key() for _ in range(BACKGROUND_AT_ONCE + 1)]
    assert "own" in taken and queue.find_seconds_to_next() != 0.0
    assert len(queue) == 20 - BACKGROUND_AT_ONCE


async def test_idle_time_is_no_time_without_progress() -> None:
    now = 0.0
    queue: KeyQueue[str] = KeyQueue(lambda: now)
    for in_background in (False, True):
        now += 1000.0
        queue.add("a", in_background=in_background)
        assert queue.find_stalled_s() == 0.0
        now += 7.0
        assert queue.find_stalled_s() == 7.0
        queue.finish_key(await queue.take_key())


@pytest.mark.parametrize("in_background", [False, True])
async def test_keys_that_wait_for_nothing_let_others_have_their_turn(in_background: bool) -> None:
    worked, done = Runtime(Settings(), Metrics()), list[Key]()

    async def reconcile(key: Key) -> None:
        done.append(key)

    worked.register("Job", reconcile)
    for number in range(1000):
        worked.add(Key("Job", "default", f"j{number}"), in_background=in_background)
    worked.start(8)
    turns = 0
    async with asyncio.timeout(60):
        while len(done) < 1000:
            await asyncio.sleep(0)
            turns += 1
    await worked.stop()
    assert turns >= 1000 / 8


async def test_what_fails_in_the_background_is_tried_again_there() -> None:
    quick = Settings(retry_first_s=0.01, retry_most_s=0.01)
    worked, most, tried = Runtime(quick, Metrics()), [0, 0], Counter[Key]()

    async def reconcile(key: Key) -> None:
        tried[key] += 1
        most[0] += 1
        most[1] = max(most)
        await asyncio.sleep(0.001)
        most[0] -= 1
        if tried[key] == 1:
            raise TryAgainError("the API server is away")

    worked.register("Job", reconcile)
    for number in range(100):
        worked.add(Key("Job", "default", f"j{number}"), in_background=True)
    worked.start(64)
    async with asyncio.timeout(60):
        while len(worked.queue) or set(tried.values()) != {2}:
            await asyncio.sleep(0.01)
    await worked.stop()
    assert most[1] <= BACKGROUND_AT_ONCE


@hypothesis_settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdefgh"),
            st.sampled_from(["add", "later", "background", "background later", "add and take", "work"]),
        ),
        max_size=60,
    )
)
def test_queue_loses_nothing(steps: list[tuple[str, str]]) -> None:
    async def run() -> None:
        now = 0.0
        queue: KeyQueue[str] = KeyQueue(lambda: now)
        owed: set[str] = set()
        for key, step in steps:
            now += 1.0
            if step == "work":
                if not len(queue):
                    continue
                now += 10.0
                taken = await queue.take_key()
                assert taken in owed
                owed.discard(taken)
                queue.finish_key(taken)
                continue
            queue.add(key, 5.0 if "later" in step else 0.0, in_background="background" in step)
            owed.add(key)
            if step == "add and take":
                taken = await queue.take_key()
                owed.discard(taken)
                queue.add(taken, in_background=True)
                owed.add(taken)
                queue.finish_key(taken)
        now += 100.0
        while len(queue):
            taken = await queue.take_key()
            owed.discard(taken)
            queue.finish_key(taken)
        assert owed == set()

    asyncio.run(run())


def test_a_record_ends_with_its_object() -> None:
    records, ended = ControllerState(), list[tuple[str, list[int]]]()
    counts = records.add_table(list[int], lambda key, value: ended.append((key.name, value)))
    names: StateTable[str] = records.add_table()
    for key in (ONE, OTHER):
        counts.get_or_make(key).append(1)
        counts.get_or_make(key).append(2)
        names[key] = key.name
    records.drop_record(ONE)
    records.drop_record(ONE)
    assert ONE not in records and ended == [("a", [1, 2])]
    assert counts == {OTHER: [1, 2]} and names == {OTHER: "b"}


def test_nothing_is_recorded_of_an_object_that_is_gone() -> None:
    records = ControllerState()
    counts, names = records.add_table(list[int]), records.add_table(str)
    counts.get_or_make(ONE).append(1)
    records.may_exist = lambda key: key == OTHER
    records.drop_record(ONE)
    counts.get_or_make(ONE).append(2)
    names[ONE] = "late"
    assert names.setdefault(ONE, "late") == "late" and names.setdefault(OTHER, "there") == "there"
    assert ONE not in records and (counts, names) == ({}, {OTHER: "there"})


ONE, OTHER = Key("TrainingJob", "default", "a"), Key("TrainingJob", "default", "b")
