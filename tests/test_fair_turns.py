"""A sweep of one namespace delays neither other namespaces' jobs nor jobs that wait to start."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from advice_values import advice, offer
from job_store import PLACING, JobStore, serving, until
from operator_store import TIMINGS, job
from tilecast.advice import Advice, Request, advise
from tilecast.api import training_job
from tilecast.hardware import Pool
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.searches import SearchRunner

SWEEP = 300
"""Jobs of the sweep, more than one namespace may have in work at once."""
HONEST = 8 * 1000
"""Batch of the other namespace's job."""
HELD = 8 * 500
"""Batch of the job that waits to start."""
AFTER = 20
"""Searches of the sweep that begin before the other jobs come."""


def path(namespace: str, name: str) -> str:
    return f"/apis/tilecast.dev/v1alpha1/namespaces/{namespace}/trainingjobs/{name}"


def put(store: JobStore, namespace: str, name: str, batch: int) -> dict[str, Any]:
    """Store a TrainingJob with a workload of its own."""
    document = job(name, training={"sequenceLength": 128, "globalBatchSize": batch, "precision": "bf16"})
    document["metadata"]["namespace"] = namespace
    return store.put(path(namespace, name), document)


class Sweep:
    """A sweep that stops after some of its searches until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = JobStore()
        self.order: list[int] = []
        """Batches of the searches that began, in order."""
        self.asked: list[int] = []
        """Batches of the searches that were requested, in order."""
        self.go_on = threading.Event()
        run = SearchRunner.run_search

        async def seen(searches: SearchRunner, request: Request, *arguments: Any) -> Advice:
            self.asked.append(request.workload.global_batch)
            return await run(searches, request, *arguments)

        monkeypatch.setattr(SearchRunner, "run_search", seen)

    def search(self, request: Request, pools: Sequence[Pool]) -> Advice:
        batch = request.workload.global_batch
        if request.name == "warm-up":
            return advise(request, pools)
        self.order.append(batch)
        if len(self.order) == AFTER:
            self.go_on.wait(60)
        if request.workload.model.name == "llama-2-7b":
            return advice(request=request, offers=(offer(pool=pools[0]),), inputs_hash=f"{batch}")
        return advise(request, pools)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[OperatorParts]:
        """Run the operator, and yield it once the sweep has stopped."""
        try:
            async with serving(self.store, PLACING, self.search) as running:
                for number in range(SWEEP):
                    running.cache.put_object(put(self.store, "sweep", f"s{number}", 8 * (1 + number)))
                await until(lambda: len(self.order) == AFTER, "the sweep")
                try:
                    yield running
                finally:
                    self.go_on.set()
        finally:
            self.go_on.set()

    def is_answered(self, namespace: str, name: str) -> bool:
        return "observedGeneration" in self.store.objects[path(namespace, name)].get("status", {})

    def answered(self) -> int:
        """Return how many jobs of the sweep are answered."""
        return sum(self.is_answered("sweep", f"s{number}") for number in range(SWEEP))


@pytest.mark.slow
async def test_a_job_of_another_namespace_and_one_that_is_held_are_searched_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sweep = Sweep(monkeypatch)
    async with sweep.running() as running:
        running.cache.put_object(put(sweep.store, "other", "j", HONEST))
        running.cache.put_object(
            sweep.store.job("job", training=json.dumps({"globalBatchSize": HELD, "precision": "fp16"}))
        )
        await until(lambda: {HELD, HONEST} <= {*sweep.asked}, "both to be asked for")
        sweep.go_on.set()
        await until(lambda: sweep.store.annotations().get("tilecast.dev/applied"), "the held job")
        await until(lambda: sweep.is_answered("other", "j"), "the other job")
        before = sweep.answered()
        await until(lambda: sweep.answered() == SWEEP, "the sweep to end")
    assert sweep.store.annotations()["tilecast.dev/applied"] == "Placed"
    assert sweep.order[AFTER : AFTER + 2] == [HELD, HONEST]
    assert before < SWEEP // 2, "in front of most of the sweep"


@pytest.mark.slow
async def test_what_a_held_job_asks_of_a_sweep_is_searched_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that another namespace's sweep already asked moves forward when a held job asks it."""
    sweep = Sweep(monkeypatch)
    async with sweep.running() as running:
        await until(lambda: len(sweep.asked) > AFTER + 100, "more of the sweep to be asked for")
        shared = sweep.asked[-1]
        running.cache.put_object(put(sweep.store, "other", "j", shared))
        await asyncio.sleep(0.5)
        sweep.go_on.set()
        await until(lambda: sweep.is_answered("other", "j"), "the other job")
    assert shared in sweep.order[AFTER : AFTER + 3]


@pytest.mark.slow
async def test_questions_are_read_in_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading may take long as well: a stored graph has up to a mebibyte of JSON."""
    read, go_on, first = list[str](), threading.Event(), threading.Event()
    request = training_job.to_request

    def slow(name: str, spec: training_job.TrainingJobSpec, stored: bytes | None) -> Request:
        batch = spec.training.global_batch_size
        read.append("other" if batch == HONEST else "sweep")
        if len(read) == 2:
            first.set()
        if len(read) <= 2:
            go_on.wait(60)
        return request(name, spec, stored)

    store = JobStore()
    try:
        async with serving(store, PLACING, advise_first) as running:
            monkeypatch.setattr(running.advisor, "_request_of", slow)
            for number in range(100):
                running.cache.put_object(put(store, "sweep", f"s{number}", 8 * (1 + number)))
            await until(first.is_set, "the sweep to be read")
            running.cache.put_object(put(store, "other", "j", HONEST))
            await asyncio.sleep(0.5)
            go_on.set()
            await until(lambda: "status" in store.objects[path("other", "j")], "the other job")
    finally:
        go_on.set()
    assert "other" in read[2:5]


def advise_first(request: Request, pools: Sequence[Pool]) -> Advice:
    return advise(request, pools) if request.name == "warm-up" else advice(request=request)


async def test_writes_of_one_namespace_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store, written, release = JobStore(), list[str](), asyncio.Event()
    apply: Callable[..., Any] = store.apply

    async def slow(place: str, document: Any, *, force: bool = True) -> dict[str, Any]:
        if "/trainingjobs/" in place:
            written.append(place.split("/")[5])
            if len(written) <= PLACING.writers:
                await release.wait()
        result: dict[str, Any] = await apply(place, document, force=force)
        return result

    monkeypatch.setattr(store, "apply", slow)
    async with serving(store, PLACING, advise_first) as running:
        for number in range(100):
            running.cache.put_object(put(store, "sweep", f"s{number}", 8))
        await until(lambda: len(written) == PLACING.writers, "writes")
        running.cache.put_object(put(store, "other", "j", 8))
        await asyncio.sleep(0.5)
        release.set()
        await until(lambda: "status" in store.objects[path("other", "j")], "the other job")
    assert "other" in written[: PLACING.writers + 3]


@pytest.mark.slow
async def test_a_job_is_told_once_that_it_waits_behind_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store, messages = JobStore(), dict[str, str]()
    statuses = Counter[str]()
    apply: Callable[..., Any] = store.apply

    async def watched(place: str, document: Any, *, force: bool = True) -> dict[str, Any]:
        if place.endswith("/status") and "/trainingjobs/" in place:
            statuses[place] += 1
            (ready,) = (item for item in document["status"]["conditions"] if item["type"] == "Ready")
            if ready["reason"] == "Queued":
                assert ready["status"] == "Unknown" and "observedGeneration" not in document["status"]
                messages[place] = ready["message"]
        result: dict[str, Any] = await apply(place, document, force=force)
        return result

    def search(request: Request, pools: Sequence[Pool]) -> Advice:
        if request.name == "warm-up":
            return advise(request, pools)
        time.sleep(0.01)
        return advice(request=request, offers=(offer(pool=pools[0]),), inputs_hash=str(request.workload.global_batch))

    monkeypatch.setattr(store, "apply", watched)
    timings = replace(TIMINGS, tell_after_s=0.1, tell_again_s=0.1)
    async with serving(store, replace(PLACING, search_budget_s=0.1), search, timings) as running:
        for number in range(60):
            running.cache.put_object(put(store, "sweep", f"s{number}", 8 * (1 + number)))
        await until(lambda: running.advisor.find_namespaces_over_budget(), "the sweep to be over its budget")
        assert sample(running, "tilecast_namespaces_over_search_budget") == 1.0
        assert sample(running, "tilecast_oldest_unanswered_seconds", kind="TrainingJob") > 0.0
        assert not running.advisor.find_namespaces_behind_others() and not messages, "there is nobody else"
        for number in range(60):
            running.cache.put_object(put(store, "other", f"o{number}", 8 * (1000 + number)))
        places = [(name, f"{name[0]}{number}") for name in ("sweep", "other") for number in range(60)]

        def is_answered(namespace: str, name: str) -> bool:
            return "observedGeneration" in store.objects[path(namespace, name)].get("status", {})

        await until(lambda: all(is_answered(*place) for place in places), "every answer")
        await until(lambda: not sample(running, "tilecast_oldest_unanswered_seconds", kind="TrainingJob"), "none left")
        assert sample(running, "tilecast_retries_total") == 0.0
    assert any("/namespaces/sweep/" in place for place in messages)
    assert all(statuses[place] == 2 for place in messages), "one write more, for those that waited"
    assert all(count == 1 for place, count in statuses.items() if place not in messages)
    text = next(message for place, message in messages.items() if "/sweep/" in place)
    assert re.fullmatch(
        r"its namespace used \d+ s of searches in the last minute, and jobs of others go first; \d+ of its jobs wait",
        text,
    )


def sample(running: OperatorParts, name: str, **labels: str) -> float:
    value = running.metrics.registry.get_sample_value(name, labels)
    assert value is not None
    return value
