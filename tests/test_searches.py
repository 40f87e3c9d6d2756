"""Processes that search: equal questions share a search, and no search is lost with its process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from operator_store import JOBS, Store, job, node, on_first_pool, operator, settled
from tilecast import advice as advising
from tilecast import zoo
from tilecast.advice import Advice, Request
from tilecast.api.status import Parallelism
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.learning.calibration import Calibration, Correction
from tilecast.spec import Plan, SpecError, Workload
from tilecast_operator import pickles, result_cache
from tilecast_operator import searches as where_searches_run
from tilecast_operator.kube.queue import BACKGROUND_AT_ONCE
from tilecast_operator.pickles import measure_pickled_size
from tilecast_operator.result_cache import ResultCache
from tilecast_operator.search_process import SearchInterruptedError
from tilecast_operator.searches import MOST_PATIENCE_S, SearchRunner

GPU = find_gpu("t4")
LONG_S = 0.2
POOL = Pool("t4", GPU, 1, 4, find_link(GPU.intra_link), find_link("ethernet-10"))


def request(batch: int = 8) -> Request:
    workload = Workload(zoo.find_preset("gpt2"), 128, batch, precision="fp16")
    return Request(f"job-{batch}", workload)


def die(asked: Request, pools: Sequence[Pool]) -> Advice:
    """Search, but kill the process the first time."""
    marker = Path(os.environ["DEAD"])
    if not marker.exists():
        marker.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return advising.advise(asked, pools)


DEADLY = 16


def die_of(asked: Request, pools: Sequence[Pool]) -> Advice:
    """Search, but kill the process whenever the deadly job is asked."""
    if asked.workload.global_batch == DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    return advising.advise(asked, pools)


def refuse(asked: Request, pools: Sequence[Pool]) -> Advice:
    raise SpecError("training.precision", "'fp8' is too new", "use fp16")


async def test_a_process_gives_the_answer_that_a_thread_gives() -> None:
    threads, processes = SearchRunner(advising.advise, 1, 0), SearchRunner(advising.advise, 1, 1)
    try:
        for batch in (8, 16):
            assert await processes.run_search(request(batch), [POOL]) == await threads.run_search(
                request(batch), [POOL]
            )
    finally:
        threads.stop()
        processes.stop()


async def test_an_answer_of_a_process_shares_the_pools_of_the_operator_with_all_others() -> None:
    searches, asked = SearchRunner(advising.advise, 1, 1), request()
    pool = replace(POOL, calibration=Calibration((Correction(("t4",), ratio=1.2, runs=10, own=10),)))
    try:
        advice = await searches.run_search(asked, [pool])
    finally:
        searches.stop()
    assert advice.request is asked and all(offer.pool is pool for offer in (*advice.offers, *advice.pareto))
    assert (
        measure_pickled_size(advice, (Pool, Request))
        <= len(pickles.dump(advice, (asked, pool)))
        < len(pickles.dump(advice, ()))
    )


async def test_a_memo_keeps_no_more_bytes_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache, "MOST_BYTES", 10_000)
    memo: ResultCache[bytes] = ResultCache(100)

    async def compute(size: int) -> bytes:
        return b"x" * size

    async def get(key: int, size: int) -> int:
        await memo.get(key, lambda: compute(size))
        await asyncio.sleep(0)
        return len(memo)

    assert [await get(key, 1000) for key in range(12)] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]
    assert 9000 < memo.bytes <= 10_000
    assert await get(12, 5000) == 5, "the oldest go, as many as it takes"
    assert await get(13, 50_000) == 1, "one that is too large for itself is kept until the next"
    assert await get(14, 1000) == 1 and memo.bytes < 2000
    memo.drop(14)
    assert len(memo) == memo.bytes == 0


async def test_a_memo_lets_go_of_no_result_that_is_being_made_and_of_every_failure() -> None:
    memo: ResultCache[int] = ResultCache(2)
    made, go_on = list[int](), asyncio.Event()

    async def compute(key: int) -> int:
        made.append(key)
        await go_on.wait()
        if key == 3:
            raise ValueError(key)
        return key

    asked = [asyncio.ensure_future(memo.get(key, lambda key=key: compute(key))) for key in (0, 1, 2, 3, 0)]
    await asyncio.sleep(0)
    asked[3].cancel()
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*asked[:3], asked[4]) == [0, 1, 2, 0]
    assert made == [0, 1, 2, 3], "each once, however many are made at the same time"
    assert len(memo) == 2


async def test_a_memo_bounds_the_number_of_what_cannot_be_weighed() -> None:
    memo: ResultCache[object] = ResultCache(2)

    async def compute() -> object:
        return lambda: None

    for key in range(5):
        assert callable(await memo.get(key, compute))
    await asyncio.sleep(0)
    assert (len(memo), memo.bytes) == (2, 0)


@pytest.mark.slow
async def test_a_process_says_why_nothing_can_be_advised() -> None:
    searches = SearchRunner(refuse, 1, 1)
    try:
        with pytest.raises(SpecError, match=r"training\.precision: 'fp8' is too new; use fp16") as refused:
            await searches.run_search(request(), [POOL])
        assert (refused.value.field, refused.value.remedy) == ("training.precision", "use fp16")
    finally:
        searches.stop()


@pytest.mark.long
async def test_a_search_outlives_the_process_that_did_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAD", str(tmp_path / "dead"))
    searches = SearchRunner(die, 1, 1)
    try:
        advices = await asyncio.gather(*(searches.run_search(request(batch), [POOL]) for batch in (8, 16, 24)))
        assert [advice.request.name for advice in advices] == ["job-8", "job-16", "job-24"]
    finally:
        searches.stop()


@pytest.mark.long
async def test_a_search_that_kills_every_process_fails_alone() -> None:
    searches = SearchRunner(die_of, 1, 1)
    try:
        batches = [8 * (1 + number) for number in range(6)]
        tried = (searches.run_search(request(batch), [POOL]) for batch in batches)
        answers = dict(zip(batches, await asyncio.gather(*tried, return_exceptions=True), strict=True))
    finally:
        searches.stop()
    assert isinstance(answers.pop(DEADLY), SearchInterruptedError)
    assert all(isinstance(answer, Advice) for answer in answers.values())


@pytest.mark.slow
def test_no_process_outlives_an_operator_that_was_killed() -> None:
    code = (
        "import os\n"
        "from tilecast_operator.searches import SearchRunner\n"
        "from multiprocessing import active_children\n"
        "searches = SearchRunner(len, 1, 1)\n"
        "print(active_children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    ends_s = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < ends_s, "it lives on"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("later_s", "order"),
    [(0.0, ["begun", "short", "long"]), (MOST_PATIENCE_S + 0.1, ["begun", "long", "short"])],
    ids=["the shortest is next", "and none waits for ever"],
)
async def test_of_searches_that_wait_the_shortest_is_next(
    monkeypatch: pytest.MonkeyPatch, later_s: float, order: list[str]
) -> None:
    now_s, made, go_on = [0.0], list[str](), threading.Event()
    monkeypatch.setattr(where_searches_run, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def search(asked: Request, pools: Sequence[Pool]) -> Advice:
        made.append(asked.name)
        if asked.name == "begun":
            go_on.wait(60)
        now_s[0] += LONG_S if asked.workload.model.family == "encoder" else 0.0
        return on_first_pool(asked, pools)

    def asked(model: str, name: str) -> Request:
        return Request(name, Workload(zoo.find_preset(model), 128, 8, precision="fp16"))

    searches = SearchRunner(search, 1, 0)
    try:
        for model in ("gpt2", "bert-base"):
            await searches.run_search(asked(model, "known"), [POOL])
        made.clear()
        waiting = [
            asyncio.create_task(searches.run_search(asked("bert-base", name), [POOL])) for name in ("begun", "long")
        ]
        await asyncio.sleep(0)
        now_s[0] += later_s
        waiting += [asyncio.create_task(searches.run_search(asked("gpt2", name), [POOL])) for name in ("gone", "short")]
        await asyncio.sleep(0)
        waiting[2].cancel()
        go_on.set()
        await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        go_on.set()
        searches.stop()
    assert made == order, "one that nobody waits for any longer is not made"


async def test_what_is_written_of_an_answer_is_made_once_for_all_jobs_that_ask_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, made, parallelism = Store(), list[str](), Parallelism.from_plan

    def counting(plan: Plan) -> Parallelism:
        made.append(str(plan))
        return parallelism(plan)

    monkeypatch.setattr(Parallelism, "from_plan", counting)
    for number in range(12):
        store.put(f"{JOBS}/j{number}", job(f"j{number}", objective=("time", "cost")[number % 2]))
    async with operator(store, on_first_pool) as running:
        await settled(running)
    assert all(store.objects[f"{JOBS}/j{number}"]["status"]["recommendation"] for number in range(12))
    assert len(made) == 2, "one for the status and the annotations of each of the two"


@pytest.mark.slow
async def test_a_new_job_waits_behind_few_of_those_that_other_pools_make_due() -> None:
    store, order, go_on, names = Store(), list[int](), threading.Event(), [f"j{number:02}" for number in range(40)]

    def put(name: str, number: int) -> dict[str, Any]:
        training = {"sequenceLength": 128, "globalBatchSize": 8 * (1 + number), "precision": "bf16"}
        return store.put(f"{JOBS}/{name}", job(name, training=training))

    def search(asked: Request, pools: Sequence[Pool]) -> Advice:
        order.append(asked.workload.global_batch // 8 - 1)
        if len(pools) > 1:
            go_on.wait(60)
        return on_first_pool(asked, pools)

    for number, name in enumerate(names):
        put(name, number)
    async with operator(store, search) as running:
        await settled(running)
        order.clear()
        for path in list(store.objects):
            running.cache.put_object(store.objects[path])
        await settled(running)
        assert order == []
        try:
            running.cache.put_object(node("n2", "NVIDIA-A100-SXM4-80GB"))
            async with asyncio.timeout(30):
                while not order:
                    await asyncio.sleep(0.01)
            running.cache.put_object(put("new", len(names)))
            await asyncio.sleep(0.1)
        finally:
            go_on.set()
        await settled(running)
    assert sorted(order) == list(range(len(names) + 1))
    assert order.index(len(names)) <= BACKGROUND_AT_ONCE


async def test_jobs_that_ask_the_same_are_answered_by_one_search_and_wait_behind_no_other() -> None:
    store, order, go_on = Store(), list[int](), threading.Event()
    names_of: dict[int, list[str]] = {}
    for number in range(60):
        batch, name = 8 * (1 + number % 20), f"j{number:02}"
        training = {"sequenceLength": 128, "globalBatchSize": batch, "precision": "bf16"}
        store.put(f"{JOBS}/{name}", job(name, training=training))
        names_of.setdefault(batch, []).append(name)

    def search(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            order.append(asked.workload.global_batch)
            if len(order) == 2:
                go_on.wait(60)
        return on_first_pool(asked, pools)

    def answered(batch: int) -> int:
        return sum("status" in store.objects[f"{JOBS}/{name}"] for name in names_of[batch])

    async with operator(store, search) as running:
        # The second search waits: all three jobs of the first one are answered meanwhile.
        try:
            async with asyncio.timeout(30):
                while len(order) < 2 or answered(order[0]) < 3:
                    await asyncio.sleep(0.01)
            assert len(order) == 2
        finally:
            go_on.set()
        await settled(running)
    assert sorted(order) == sorted(names_of)
    assert all(answered(batch) == 3 for batch in names_of)
