"""Results are kept by equality, up to the stated number."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tilecast import memo, search, zoo
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.memo import Memo, once
from tilecast.spec import Plan, Plans, Precision, Workload


def test_a_result_is_made_once_for_equal_keys() -> None:
    made: list[int] = []
    results: Memo[int] = Memo(2)

    def ask(value: int) -> int:
        return results.get(("value", value), lambda: made.append(value) or value)

    assert [ask(value) for value in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]  # 2 was the least recently used when 3 came
    memo.clear_all_memos()
    assert ask(1) == 1
    assert made == [1, 2, 3, 2, 1]


def test_what_is_kept_changes_no_price() -> None:
    gpu = find_gpu("a100-80")
    pool = Pool(gpu.name, gpu, 8, 2, find_link(gpu.intra_link), find_link("infiniband-hdr-8x200"))
    plan = Plans.from_plans(Plan(data=2, tensor=4, pipeline=2, sequence_parallel=True, gradient_accumulation=32))
    jobs = [Workload(zoo.find_preset("llama-2-7b"), 2048, 64, execution=mode) for mode in ("eager", "compiled")]
    memo.clear_all_memos()
    alone = []
    for job in jobs:
        alone.append(search.price(job, plan, pool))
        memo.clear_all_memos()
    for job in jobs:
        search.find(job, pool)
    after = [search.price(job, plan, pool) for job in jobs]
    assert [one.step_s[0] for one in after] == [one.step_s[0] for one in alone]
    assert [one.memory_bytes[0] for one in after] == [one.memory_bytes[0] for one in alone]
    assert after[0].step_s[0] != after[1].step_s[0]


@pytest.mark.parametrize(("precision", "names"), [("bf16", ("a100-80", "l4")), ("fp8", ("h100-sxm", "b200"))])
def test_memory_on_a_pool_does_not_depend_on_others(precision: Precision, names: tuple[str, str]) -> None:
    pools = []
    for name in names:
        gpu = find_gpu(name)
        pools.append(Pool(name, gpu, 8, 2, find_link(gpu.intra_link), find_link("infiniband-hdr-8x200")))
    job = Workload(zoo.find_preset("llama-2-7b"), 2048, 64, precision)
    memo.clear_all_memos()
    for pool in pools:
        plans = search.find(job, pool)
        alone = search.price(job, plans.plans, pool)
        assert np.array_equal(plans.memory_bytes, alone.memory_bytes)
        assert np.array_equal(plans.upper_bytes, alone.upper_bytes)


def test_threads_that_ask_at_once_get_one_result() -> None:
    """With `functools.cache` each thread makes its own, and a graph is priced by the kernels of another."""
    start, made = threading.Barrier(4), list[object]()

    def make() -> object:
        made.append(object())
        time.sleep(0.05)
        return made[-1]

    get = once(make)

    def ask(_: int) -> object:
        start.wait()
        return get()

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(ask, range(4)))
    assert len(made) == 1 and all(result is made[0] for result in results)
    assert get() is made[0]


def test_a_failure_is_not_kept() -> None:
    results = iter([ZeroDivisionError, 7])

    def make() -> int:
        if (found := next(results)) is ZeroDivisionError:
            raise ZeroDivisionError
        assert isinstance(found, int)
        return found

    get = once(make)
    with pytest.raises(ZeroDivisionError):
        get()
    assert get() == get() == 7


def test_threads_price_a_search_on_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operators in one process, or two visitors of the page, may ask for the same search at once."""
    build, both = zoo.build_sharded_graph, threading.Barrier(2, timeout=0.5)

    def build_anew(job: Workload, plans: Plans) -> zoo.ShardedGraph:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
        memo.clear_all_memos()
        return build(job, plans)

    gpu = find_gpu("a100-80")
    pool = Pool(gpu.name, gpu, 8, 2, find_link(gpu.intra_link), find_link("infiniband-hdr-8x200"))
    memo.clear_all_memos()
    table = search.find(Workload(zoo.find_preset("gpt2"), 1024, 64), pool)
    monkeypatch.setattr(zoo, "build_sharded_graph", build_anew)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: table.step_s, range(2))
    assert np.array_equal(first, second) and np.array_equal(first, table.step_s)
