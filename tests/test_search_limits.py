"""A search that takes too much is ended without harm to others, reports it, is retried, and replaces no advice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence

import pytest

from job_store import JobStore, serving, until
from operator_store import JOBS, Store, job, node, on_first_pool, operator, ready, settled
from tilecast import zoo
from tilecast.advice import Advice, Request, advise
from tilecast.advice.enumeration import MOST_PLANS
from tilecast.api import training_job
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.jobs import APPLIED
from tilecast.spec import Workload
from tilecast_operator.interruptions import FIRST_S, MOST_S, InterruptedSearches, find_retry_wait_s
from tilecast_operator.search_process import Cause, SearchInterruptedError, SearchLimits, SearchProcess
from tilecast_operator.searches import SearchRunner

GPU = find_gpu("t4")
POOL = Pool("t4", GPU, 1, 4, find_link(GPU.intra_link), find_link("ethernet-10"))
BATCHES = (8, 16, 24, 32)
TOO_LONG, TOO_LARGE, DEADLY = 16, 24, 40
LIMITS = SearchLimits(seconds=5.0, memory_mib=320)
CLOCK_S = 1_700_000_000.0


def pool(gpu: str, gpus_per_node: int, nodes: int) -> Pool:
    facts = find_gpu(gpu)
    return Pool(gpu, facts, gpus_per_node, nodes, find_link(facts.intra_link), find_link("infiniband-ndr-8x400"))


def request(batch: int) -> Request:
    return Request(f"job-{batch}", Workload(zoo.find_preset("gpt2"), 128, batch, precision="fp16"))


def greedy(asked: Request, pools: Sequence[Pool]) -> Advice:
    """Search endlessly for one batch size, take too much memory for another, and crash for a third."""
    batch = asked.workload.global_batch
    while batch == TOO_LONG:
        time.sleep(0.1)
    if batch == DEADLY:
        os.kill(os.getpid(), signal.SIGSEGV)
    if batch == TOO_LARGE:
        blocks = [bytes(1 << 20) for _ in range(1024)]
        raise AssertionError(len(blocks))
    return on_first_pool(asked, pools)


@pytest.mark.long
async def test_a_search_that_breaks_a_limit_is_ended_and_takes_no_other_along() -> None:
    causes = list[Cause]()
    searches = SearchRunner(greedy, 1, 2, LIMITS, causes.append)
    asked = (*BATCHES, DEADLY, *BATCHES)
    try:
        tried = (searches.run_search(request(batch), [POOL]) for batch in asked)
        answers = await asyncio.gather(*tried, return_exceptions=True)
        assert searches.resident_bytes() > 0 and searches.find_longest_running_s() == 0.0
    finally:
        searches.stop()
    ended = {
        batch: (answer.cause, str(answer))
        for batch, answer in zip(asked, answers, strict=True)
        if isinstance(answer, SearchInterruptedError)
    }
    assert ended == {
        TOO_LONG: ("timeout", "took longer than 5 s"),
        TOO_LARGE: ("memory", "needed more than 320 MiB of memory"),
        DEADLY: ("died", f"ended its process, signal {signal.SIGSEGV:d}"),
    }
    assert sum(isinstance(answer, Advice) for answer in answers) == 4
    # A search that runs out of memory in a used process is tried in a new one, as is one that ends its process.
    assert causes.count("timeout") == 2 and 2 <= causes.count("memory") <= 4 and causes.count("died") == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "precisions"),
    [((16, 16, 16, 16), ["bf16"]), ((2, 4, 4, 4), ["bf16", "fp16", "fp32"])],
    ids=["large pools", "three precisions"],
)
def test_the_largest_searches_that_counts_allow_stay_within_the_limits(
    nodes: Sequence[int], precisions: list[str]
) -> None:
    training = {"sequenceLength": 4096, "globalBatchSize": 5040, "precision": "bf16"}
    gpus = ("h100-sxm", 8), ("a100-sxm-80gb", 8), ("l4", 8), ("t4", 4)
    pools = [pool(gpu, gpus_per_node, count) for (gpu, gpus_per_node), count in zip(gpus, nodes, strict=True)]
    spec = {"model": {"preset": "mixtral-8x7b"}, "training": {**training, "allowedPrecisions": precisions}}
    asked = training_job.read_request(training_job.training_job_document("large", spec))
    process = SearchProcess(advise, SearchLimits())
    try:
        answer = process.call_function(asked, pools)
        assert 0.75 * MOST_PLANS < answer.plans_evaluated <= MOST_PLANS
    finally:
        process.stop()


async def test_the_search_that_runs_can_be_seen() -> None:
    go_on = asyncio.Event()
    loop = asyncio.get_running_loop()

    def waiting(asked: Request, pools: Sequence[Pool]) -> Advice:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return on_first_pool(asked, pools)

    searches = SearchRunner(waiting, 1, 0)
    try:
        assert searches.find_longest_running_s() == 0.0
        running = asyncio.create_task(searches.run_search(request(8), [POOL]))
        await until(lambda: searches.find_longest_running_s() > 0.0, "the search to run")
        go_on.set()
        await running
        assert (searches.find_longest_running_s(), searches.resident_bytes()) == (0.0, 0)
    finally:
        searches.stop()


def test_a_search_that_was_interrupted_waits_ever_longer() -> None:
    now_s = 0.0
    interruptions = InterruptedSearches(lambda: CLOCK_S + now_s, lambda: now_s)
    error = SearchInterruptedError("timeout", "took longer than 30 s")
    waits = []
    for tries in range(1, 8):
        assert interruptions.find_refusal("asked") is None
        answer = interruptions.add_interruption("asked", error)
        assert f"(try {tries})" in answer.message and "took longer than 30 s" in answer.message
        waits.append(answer.again_s)
        now_s += answer.again_s - 1.0
        later = interruptions.find_refusal("asked")
        assert later is not None and later.message == answer.message and later.again_s == pytest.approx(1.0)
        assert interruptions.find_refusal("another") is None
        now_s += 1.0
    assert waits == [FIRST_S, 240.0, 960.0, 3840.0, 15360.0, MOST_S, MOST_S]
    interruptions.forget_search("asked")
    assert interruptions.add_interruption("asked", error).again_s == find_retry_wait_s(1)


async def test_an_interrupted_search_is_told_and_neither_kept_nor_made_again_at_once() -> None:
    store, tries = Store(), list[str]()
    store.put(f"{JOBS}/a", job("a"))
    store.put(f"{JOBS}/b", job("b"))
    store.clock_s = CLOCK_S

    def endless(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name != "warm-up":
            tries.append(asked.name)
            raise SearchInterruptedError("timeout", "took longer than 30 s")
        return on_first_pool(asked, pools)

    async with operator(store, endless) as running:
        await settled(running)
        state = ready(store.objects[f"{JOBS}/a"])
        assert (state["status"], state["reason"]) == ("False", "SearchInterrupted")
        assert state["message"].startswith(
            "the search took longer than 30 s and was interrupted (try 1); it is tried again after 2023-11-14T22:14:20Z"
        )
        assert ready(store.objects[f"{JOBS}/b"])["message"] == state["message"]
        writes = len(store.writes)
        running.cache.put_object(node("n2", "NVIDIA-A100-SXM4-80GB"))
        await settled(running)
        assert len(tries) == 1, "jobs that ask the same share the try, and other pools make no new one"
        assert len(store.writes) == writes
        due_s = running.runtime.queue.find_seconds_to_next()
        assert due_s is not None and due_s <= FIRST_S


async def test_a_job_with_advice_keeps_it_when_a_later_search_is_interrupted() -> None:
    store, is_endless = Store(), False
    store.put(f"{JOBS}/a", job("a"))

    def search(asked: Request, pools: Sequence[Pool]) -> Advice:
        if is_endless:
            raise SearchInterruptedError("memory", "needed more than 320 MiB of memory")
        return on_first_pool(asked, pools)

    async with operator(store, search) as running:
        await settled(running)
        before = store.objects[f"{JOBS}/a"]
        assert ready(before)["reason"] == "Advised"
        is_endless = True
        running.cache.put_object(node("n2", "NVIDIA-A100-SXM4-80GB"))
        await settled(running)
        assert store.objects[f"{JOBS}/a"] == before
        # A changed question has no advice to keep.
        store.put(f"{JOBS}/a", {**before, "spec": {**before["spec"], "objective": "cost"}})
        running.cache.put_object(store.objects[f"{JOBS}/a"])
        await settled(running)
        after = store.objects[f"{JOBS}/a"]
        assert ready(after)["reason"] == "SearchInterrupted" and "recommendation" not in after["status"]


async def test_a_search_that_is_interrupted_holds_no_job() -> None:
    def endless(asked: Request, pools: Sequence[Pool]) -> Advice:
        if asked.name == "warm-up":
            return advise(asked, pools)
        raise SearchInterruptedError("died", "ended its process, signal 9")

    store = JobStore()
    async with serving(store, advisor=endless) as running:
        running.cache.put_object(store.job())
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "SearchInterrupted" and store.now()["spec"]["suspend"] is False
