"""`tilecast fits`: verdict, bill, fewest GPUs, and the nearest change with its step."""

from __future__ import annotations

import pytest

import tilecast


def test_the_bill_of_every_pool_sums_to_what_it_needs() -> None:
    answer = tilecast.fits("llama-3.1-70b", seq=8192, batch=128, gpus="h100-sxm:64,a100-80:8")
    assert [pool.fits for pool in answer.pools] == [True, False]
    for pool in answer.pools:
        assert pool.memory is not None and sum(pool.memory.values()) == pytest.approx(pool.memory_bytes)
    fitting, missing = answer.pools
    assert fitting.step_seconds is not None and missing.step_seconds is None
    assert missing.remedy_step_seconds is not None and missing.remedy_cost_per_1000_steps is not None
    assert f"a100-80 would fit with {missing.remedy} (" in str(answer)


def test_a_tight_plan_says_from_how_many_gpus_memory_is_to_spare() -> None:
    (pool,) = tilecast.fits("llama-3.1-8b", seq=8192, batch=128, gpus="h100-sxm:16").pools
    assert pool.is_tight and pool.gpus is not None and pool.roomy_gpus is not None and pool.roomy_gpus > pool.gpus
    settings = {"seq": 8192, "batch": 128, "gpus": f"h100-sxm:{pool.roomy_gpus}"}
    (roomy,) = tilecast.fits("llama-3.1-8b", plan=pool.roomy_plan, **settings).pools  # type: ignore[arg-type]
    assert roomy.fits and not roomy.is_tight
    assert f"memory to spare from {pool.roomy_gpus} GPUs" in str(
        tilecast.fits("llama-3.1-8b", seq=8192, batch=128, gpus="h100-sxm:16")
    )


def test_a_plan_with_memory_to_spare_is_preferred_on_equal_gpus() -> None:
    """The fastest plan on the fewest GPUs was once shown, tight, where another left memory to spare."""
    (pool,) = tilecast.fits("llama-3.1-8b", seq=8192, batch=128, gpus="l4:16").pools
    assert pool.fits and not pool.is_tight and pool.roomy_gpus is None


def test_a_pool_without_the_precision_has_no_bill() -> None:
    answer = tilecast.fits("gpt2", seq=1024, batch=8, gpus="t4:4", precision="bf16")
    assert answer.pools[0].memory is None and "no BF16 units" in str(answer)
