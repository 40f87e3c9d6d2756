"""Turns: every item once, no namespace more than one round behind the others, held jobs first."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tilecast_operator.kube.fair_limiter import HELD_FIRST_S, WINDOW_S, FairLimiter, PermitRequest, RecentUse
from tilecast_operator.kube.fair_queue import SPARE_NAMESPACES, FairQueue
from tilecast_operator.kube.queue import KeyQueue

NAMESPACES = st.sampled_from("abcde")


def taken(queue: FairQueue[int], cost: float = 1.0) -> list[int]:
    """Return every item in order; each uses `cost`."""
    order = []
    while (chosen := queue.pop()) is not None:
        order.append(chosen[0])
        queue.charge(chosen[1], cost)
    return order


@hypothesis_settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 20), NAMESPACES, st.floats(0, 9)), max_size=60), st.data())
@pytest.mark.slow
def test_each_item_goes_on_once_for_a_namespace_that_wants_it(
    pushed: list[tuple[int, str, float]], data: st.DataObject
) -> None:
    queue: FairQueue[int] = FairQueue()
    namespaces_of = defaultdict[int, set[str]](set)
    for item, namespace, rank in pushed:
        queue.push(item, namespace, (rank,))
        namespaces_of[item].add(namespace)
    for item in data.draw(st.lists(st.sampled_from(range(21)), max_size=8)):
        if data.draw(st.booleans()):
            queue.remove(item)
            namespaces_of.pop(item, None)
        elif item in namespaces_of:
            queue.withdraw(item, namespaces_of[item].pop())
            if not namespaces_of[item]:
                del namespaces_of[item]
    assert sorted(queue) == sorted(namespaces_of) and len(queue) == len(namespaces_of)
    while (chosen := queue.pop()) is not None:
        item, namespace = chosen
        assert namespace in namespaces_of.pop(item) and item not in queue
        queue.charge(namespace, data.draw(st.floats(0, 5)))
    assert not namespaces_of and not len(queue)


@given(st.text("abcde", max_size=60), st.integers(1, 3))
def test_a_namespace_waits_for_one_round_of_the_others(others: str, late: int) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, namespace in enumerate(others):
        queue.push(number, namespace)
    for _ in range(len(others) // 2):
        chosen = queue.pop()
        assert chosen is not None
        queue.charge(chosen[1], 1.0)
    for number in range(1000, 1000 + late):
        queue.push(number, "late")
    before, order = Counter[str](), taken(queue)
    for number in order[: order.index(999 + late)]:
        before[others[number] if number < 1000 else "late"] += 1
    assert all(count <= late for count in before.values()), "none goes on more often before it"


@given(st.text("abcde", max_size=60), st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_namespaces_are_served_alike_and_each_its_lowest_rank_first(of: str, ranks: list[int]) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, namespace in enumerate(of):
        queue.push(number, namespace, (ranks[number],))
    waiting, served, order = Counter(of), Counter[str](), taken(queue)
    for number in order:
        served[of[number]] += 1
        others = [served[name] for name, count in waiting.items() if served[name] < count]
        assert all(served[of[number]] <= count + 1 for count in others)
    for name in waiting:
        own = [number for number in order if of[number] == name]
        assert own == sorted(own, key=lambda number: (ranks[number], number))


def test_an_item_has_the_rank_that_it_was_given_last() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "xyz":
        queue.push(item, "a", (1.0,))
    queue.push("z", "a", (0.0,))
    queue.push("x", "a", (2.0,))
    assert [queue.pop(), queue.pop(), queue.pop(), queue.pop()] == [("z", "a"), ("y", "a"), ("x", "a"), None]


def test_a_namespace_pays_for_long_turns_and_idle_time_earns_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(30):
        queue.push(f"a{number}", "a")
        queue.push(f"b{number}", "b")
    order = []
    for _ in range(24):
        chosen = queue.pop()
        assert chosen is not None
        order.append(chosen[1])
        queue.charge(chosen[1], 10.0 if chosen[1] == "a" else 1.0)
    assert order.count("a") == 3, "ten times as long, a tenth as often"
    queue.push("late", "c")
    queue.push("later", "c")
    assert queue.pop() == ("late", "c")
    queue.charge("c", 1.0)
    second = queue.pop()
    assert second is not None and second[1] == "b", "not two at once for the time that it was away"


def test_one_that_had_to_stand_aside_does_not_make_up_for_it() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        for name in "ab":
            queue.push(f"{name}{number}", name)
    for _ in range(6):
        chosen = queue.pop(lambda _, namespace: namespace == "b")
        assert chosen is not None and chosen[1] == "b"
        queue.charge("b", 1.0)
    order = ""
    while (chosen := queue.pop()) is not None:
        order += chosen[1]
        queue.charge(chosen[1], 1.0)
    assert "aaa" not in order[:6]


def test_a_queue_forgets_namespaces_that_do_not_wait() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.push(-1, "stays", (1.0,))
    queue.push(-2, "stays", (1.0,))
    for number in range(5000):
        queue.push(number, f"n{number}")
        queue.charge("stays", 2.0)
        assert queue.pop() == (number, f"n{number}")
    assert len(queue._used) <= 3 * SPARE_NAMESPACES
    queue.remove(-1)
    queue.withdraw(-2, "stays")
    assert not queue._used and not queue._lines


def test_usage_is_that_of_the_last_minute() -> None:
    now = [0.0]
    usage = RecentUse(lambda: now[0])
    for second in range(100):
        now[0] = second + 0.5
        usage.add("a", 0.25)
        usage.add("a", 0.25)
    assert usage.sum_used_s("a") == pytest.approx(30.0) and usage.sum_used_s("b") == 0.0
    assert usage.find_namespaces_over(30.0) == {"a": pytest.approx(30.0)} and not usage.find_namespaces_over(31.0)
    now[0] += WINDOW_S + 1.0
    assert usage.find_namespaces_over(0.0) == {}
    for number in range(1000):
        now[0] += 1.0
        usage.add(f"n{number}", 1.0)
    assert len(usage._used) <= 2 * WINDOW_S + 2, "what nobody asks for is forgotten too"


class TimedTurns:
    """Takes turns that last until the test ends them."""

    def __init__(self, at_once: int, budget_s: float = 1e9) -> None:
        self.now = 0.0
        self.turns = FairLimiter(at_once, budget_s, lambda: self.now)
        self.order: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, name: str, namespace: str, *, is_held: bool = False, rank: float = 0.0) -> asyncio.Task[None]:
        """Ask for a turn."""

        async def take() -> None:
            with self.turns.add_request(name, PermitRequest(namespace, is_held)):
                async with self.turns.acquire(name, rank=rank):
                    self.order.append(name)
                    self.running[name] = asyncio.Event()
                    await self.running[name].wait()

        self._tasks.append(asyncio.create_task(take()))
        await asyncio.sleep(0)
        return self._tasks[-1]

    async def finish(self, seconds: float = 1.0) -> None:
        """End the oldest turn after `seconds`."""
        self.now += seconds
        self.running.pop(next(iter(self.running))).set()
        for _ in range(5):
            await asyncio.sleep(0)

    async def finish_all(self, seconds: float = 1.0) -> list[str]:
        """End all turns one after the other, and return the order in which they began."""
        while self.running:
            await self.finish(seconds)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.order


async def test_a_sweep_delays_nobody_by_more_than_what_runs() -> None:
    work = TimedTurns(2)
    for number in range(800):
        await work.ask(f"sweep-{number}", "a")
    for _ in range(100):
        await work.finish()
    begun = len(work.order)
    await work.ask("job", "b")
    await work.ask("held", "c", is_held=True)
    for _ in range(2):
        await work.finish()
    assert work.order[begun:] == ["held", "job"]


async def test_held_jobs_go_first_and_stop_nobody() -> None:
    work = TimedTurns(1)
    for number in range(40):
        await work.ask(f"held-{number}", "a", is_held=True)
        await work.ask(f"sweep-{number}", "b")
    await work.ask("held-c", "c", is_held=True)
    order = await work.finish_all()
    assert order[1:3] == ["held-1", "held-c"] or order[1:3] == ["held-c", "held-1"]
    first = next(index for index, name in enumerate(order) if name.startswith("sweep"))
    assert first <= HELD_FIRST_S + 2, "held jobs of one namespace have so much and no more ahead of others"
    rest = order[first:]
    assert abs(sum(name.startswith("held") for name in rest[:20]) - 10) <= 2, "then they take turns"


async def test_over_its_budget_a_namespace_waits_behind_all_others_and_nobody_waits_for_nothing() -> None:
    work = TimedTurns(1, budget_s=5.0)
    for number in range(20):
        await work.ask(f"a{number}", "a")
    for _ in range(5):
        await work.finish()
    assert work.turns.find_namespaces_over_budget() == {"a": 5.0}
    for number in range(8):
        await work.ask(f"b{number}", "b")
    await work.ask("held", "a", is_held=True)
    order = await work.finish_all(0.5)
    late = order[6:]
    assert late[0] == "held", "a job that is held waits for its namespace's turn, and for no more"
    assert late[1:9] == [f"b{number}" for number in range(8)]
    assert late[9:] == [f"a{number}" for number in range(6, 20)], "there is nobody else, so it goes on"


async def test_what_a_held_job_asks_is_no_longer_behind_what_others_who_ask_it_wait_for() -> None:
    work = TimedTurns(1)
    for number in range(10):
        await work.ask(f"a{number}", "a")
    with work.turns.add_request("a9", PermitRequest("b", is_held=True)):
        await work.finish()
    assert work.order[-1] == "a9"


async def test_a_held_job_that_waits_no_longer_is_no_reason_to_hurry() -> None:
    work = TimedTurns(1)
    for number in range(4):
        await work.ask(f"a{number}", "a")
    with work.turns.add_request("a3", PermitRequest("b", is_held=True)):
        pass
    alone = asyncio.create_task(hold_for_a_moment(work.turns))
    await asyncio.sleep(0)
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(alone), 0.01)
    assert (await work.finish_all())[:4] == ["a0", "a1", "a2", "a3"]
    await alone


async def hold_for_a_moment(turns: FairLimiter) -> None:
    """Claim a turn, drop the claim before the turn comes, and leave the shared work to others."""

    async def compute() -> None:
        async with turns.acquire("shared"):
            pass

    with turns.add_request("shared", PermitRequest("a", is_held=True)):
        made = asyncio.ensure_future(compute())
        await asyncio.sleep(0)
    await made


@pytest.mark.parametrize("loops", range(4))
async def test_no_turn_is_lost_with_somebody_who_is_ended_as_it_comes(loops: int) -> None:
    turns = FairLimiter(1)
    go_on = asyncio.Event()

    async def take() -> None:
        async with turns.acquire("x"):
            await go_on.wait()

    first, second = asyncio.create_task(take()), asyncio.create_task(take())
    await asyncio.sleep(0)
    go_on.set()
    for _ in range(loops):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    async with asyncio.timeout(1), turns.acquire("y"):
        pass


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(NAMESPACES, st.booleans(), st.floats(0, 2)), max_size=40), st.integers(1, 3))
@pytest.mark.slow
def test_no_room_is_idle_while_somebody_waits(asked: list[tuple[str, bool, float]], at_once: int) -> None:
    async def run() -> None:
        work = TimedTurns(at_once, budget_s=3.0)
        for number, (namespace, is_held, rank) in enumerate(asked):
            await work.ask(f"{number}", namespace, is_held=is_held, rank=rank)
        while work.running:
            assert len(work.running) == min(at_once, len(asked) - len(work.order) + len(work.running))
            await work.finish()
        assert sorted(work.order, key=int) == [str(number) for number in range(len(asked))]

    asyncio.run(run())


def in_turn(names: Iterable[str]) -> str:
    """Return the first letters of the names."""
    return "".join(name[0] for name in names)


async def test_keys_of_a_namespace_wait_behind_one_round_of_the_others_and_leave_them_workers() -> None:
    queue: KeyQueue[str] = KeyQueue(lambda: 0.0, lambda key: key[0].strip("-"))
    queue.workers = 8
    for number in range(100):
        queue.add(f"a{number}")
    begun = [await queue.take_key() for _ in range(4)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take_key(), 0.01)
    for number in range(3):
        queue.add(f"b{number}")
        queue.add(f"c{number}")
    queue.add("-nodes")
    assert sorted(in_turn([await queue.take_key() for _ in range(3)])) == ["-", "b", "c"]
    queue.finish_key(begun[0])
    assert in_turn([await queue.take_key()]) in "bc", "one namespace has three of eight, and the others one each"


async def test_the_background_takes_turns_too() -> None:
    queue: KeyQueue[str] = KeyQueue(lambda: 0.0, lambda key: key[0])
    for number in range(100):
        queue.add(f"a{number}", in_background=True)
    queue.add("b0", in_background=True)
    order = []
    for _ in range(8):
        order.append(await queue.take_key())
        queue.finish_key(order[-1])
    assert "b0" in order[:5]
