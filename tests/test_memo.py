"""Results are kept by equality, up to the stated number."""

from __future__ import annotations

import numpy as np
import pytest

from tilecast import memo, search, zoo
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.memo import Memo
from tilecast.spec import Plan, Plans, Precision, Workload


def test_a_result_is_made_once_for_equal_keys() -> None:
    made: list[int] = []
    results: Memo[int] = Memo(2)

    def ask(value: int) -> int:
        return results.get(("value", value), lambda: made.append(value) or value)

    assert [ask(value) for value in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]  # 2 was the least recently used when 3 came
    memo.clear_all()
    assert ask(1) == 1
    assert made == [1, 2, 3, 2, 1]


def test_what_is_kept_changes_no_price() -> None:
    gpu = find_gpu("a100-80")
    pool = Pool(gpu.name, gpu, 8, 2, find_link(gpu.intra_link), find_link("infiniband-hdr-8x200"))
    plan = Plans.from_plans(Plan(data=2, tensor=4, pipeline=2, sequence_parallel=True, gradient_accumulation=32))
    jobs = [Workload(zoo.find_preset("llama-2-7b"), 2048, 64, execution=mode) for mode in ("eager", "compiled")]
    memo.clear_all()
    alone = []
    for job in jobs:
        alone.append(search.price(job, plan, pool))
        memo.clear_all()
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
    memo.clear_all()
    for pool in pools:
        plans = search.find(job, pool)
        alone = search.price(job, plans.plans, pool)
        assert np.array_equal(plans.memory_bytes, alone.memory_bytes)
        assert np.array_equal(plans.upper_bytes, alone.upper_bytes)
