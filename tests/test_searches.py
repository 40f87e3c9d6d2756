"""Where searches run: equal questions wait together, and no search is lost with the process that does it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from operator_store import JOBS, Store, job, on_first_pool, operator, settled
from tilecast import advise as advising
from tilecast import models
from tilecast.advise import Advice, Request
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.spec import SpecError, Workload
from tilecast_operator.searches import Searches

GPU = find_gpu("t4")
POOL = Pool("t4", GPU, 1, 4, find_link(GPU.intra_link), find_link("ethernet-10"))


def request(batch: int = 8) -> Request:
    workload = Workload(models.preset("gpt2"), 128, batch, precision="fp16")
    return Request(f"job-{batch}", workload)


def die(asked: Request, pools: Sequence[Pool]) -> Advice:
    """A search that takes its process along once, and says which process did it then."""
    marker = Path(os.environ["DEAD"])
    if not marker.exists():
        marker.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return advising.advise(asked, pools)


DEADLY = 16


def die_of(asked: Request, pools: Sequence[Pool]) -> Advice:
    """A search that some job kills whenever it is made."""
    if asked.workload.global_batch == DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    return advising.advise(asked, pools)


def refuse(asked: Request, pools: Sequence[Pool]) -> Advice:
    raise SpecError("training.precision", "'fp8' is too new", "use fp16")


async def test_a_process_gives_the_answer_that_a_thread_gives() -> None:
    threads, processes = Searches(advising.advise, 1, 0), Searches(advising.advise, 1, 1)
    try:
        for batch in (8, 16):
            assert await processes.run(request(batch), [POOL]) == await threads.run(request(batch), [POOL])
    finally:
        threads.stop()
        processes.stop()


async def test_a_process_says_why_nothing_can_be_advised() -> None:
    searches = Searches(refuse, 1, 1)
    try:
        with pytest.raises(SpecError, match=r"training\.precision: 'fp8' is too new; use fp16") as refused:
            await searches.run(request(), [POOL])
        assert (refused.value.field, refused.value.remedy) == ("training.precision", "use fp16")
    finally:
        searches.stop()


@pytest.mark.long
async def test_a_search_outlives_the_process_that_did_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAD", str(tmp_path / "dead"))
    searches = Searches(die, 1, 1)
    try:
        advices = await asyncio.gather(*(searches.run(request(batch), [POOL]) for batch in (8, 16, 24)))
        assert [advice.request.name for advice in advices] == ["job-8", "job-16", "job-24"]
    finally:
        searches.stop()


@pytest.mark.long
async def test_a_search_that_kills_every_process_fails_alone() -> None:
    searches = Searches(die_of, 1, 1)
    try:
        batches = [8 * (1 + number) for number in range(6)]
        tried = (searches.run(request(batch), [POOL]) for batch in batches)
        answers = dict(zip(batches, await asyncio.gather(*tried, return_exceptions=True), strict=True))
    finally:
        searches.stop()
    assert isinstance(answers.pop(DEADLY), BrokenProcessPool)
    assert all(isinstance(answer, Advice) for answer in answers.values())


def test_no_process_outlives_an_operator_that_was_killed() -> None:
    code = (
        "import asyncio, os\n"
        "from tilecast_operator.searches import Searches\n"
        "from multiprocessing import active_children\n"
        "searches = Searches(len, 1, 1)\n"
        "searches._executor.submit(os.getpid).result()\n"
        "print(active_children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    ends_s = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < ends_s, "it lives on"
        time.sleep(0.05)


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
