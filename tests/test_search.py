"""The search is exhaustive, exact under its own model, and says the same as pricing one plan alone."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import models, search
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.search import Limits
from tilecast.spec import Plan, Plans, SpecError, Workload
from tilecast.step import PARTS


def pool(gpu: str = "a100-80", nodes: int = 2, per_node: int = 8) -> Pool:
    found = find_gpu(gpu)
    return Pool(found.name, found, per_node, nodes, find_link(found.intra_link), find_link("infiniband-hdr-8x200"))


def test_enumeration_is_every_divisible_plan_of_a_small_space() -> None:
    workload = Workload(models.preset("gpt2"), 1024, 8, "bf16")
    found = {
        (one.data, one.tensor, one.pipeline, one.micro_batch, one.zero_stage, one.checkpointing, one.virtual_stages)
        for one in search.enumerate_plans(workload, pool(nodes=1), Limits(gpus=8))
    }
    expected = set()
    for data, tensor, pipeline in itertools.product(range(1, 9), repeat=3):
        if data * tensor * pipeline != 8 or 12 % tensor or 12 % pipeline or 8 % data:
            continue
        share = 8 // data
        for micro in (1, 2, 4, 8):
            if share % micro or (share // micro < pipeline and micro > 1):
                continue
            stages = [0] if data == 1 else [0, 1] if pipeline > 1 else [0, 1, 3]
            expected |= {
                (data, tensor, pipeline, micro, stage, mode, virtual)
                for stage in stages
                for mode in ("none", "selective", "full")
                for virtual in ((1, 2, 3, 4) if pipeline > 1 else (1,))
                if 12 // pipeline % virtual == 0 and (virtual == 1 or share // micro % pipeline == 0)
            }
    assert found == expected


@pytest.mark.parametrize("name", ["llama-2-7b", "bert-large", "mixtral-8x7b", "t5-v1.1-large", "resnet-50"])
def test_rows_of_a_table_equal_the_single_plan_bit_for_bit(name: str) -> None:
    model = models.preset(name)
    workload = Workload(model, 1024 if model.vocab else 1, 256, "bf16")
    plans = search.enumerate_plans(workload, pool(nodes=4))
    chosen = plans.take(np.random.default_rng(0).permutation(len(plans))[:200])
    table = search.price(workload, chosen, pool(nodes=4))
    for index, plan in enumerate(chosen):
        alone = search.price(workload, Plans.of(plan), pool(nodes=4))
        assert alone.step_s[0] == table.step_s[index], plan
        assert alone.memory_bytes[0] == table.memory_bytes[index], plan
        assert alone.times.spread[0] == table.times.spread[index], plan


def test_rows_are_distinct_and_use_the_gpus_they_say() -> None:
    plans = search.enumerate_plans(Workload(models.preset("llama-2-7b"), 4096, 128), pool(), Limits(gpus=16))
    assert (plans.gpus == 16).all()
    rows = np.column_stack([getattr(plans, item.name) for item in fields(Plans)])
    assert len(np.unique(rows, axis=0)) == len(plans)
    assert (plans.micro_batch * plans.gradient_accumulation * plans.data == 128).all()


@settings(max_examples=25, deadline=None)
@given(
    gpu=st.sampled_from(["h100-sxm", "a100-80", "l4", "t4"]),
    name=st.sampled_from(["gpt2", "llama-3.2-1b", "bert-base", "resnet-50", "mixtral-8x7b"]),
    precision=st.sampled_from(["fp32", "fp16"]),
    batch=st.sampled_from([8, 64, 96]),
)
def test_steps_are_finite_positive_and_sum(gpu: str, name: str, precision: str, batch: int) -> None:
    model = models.preset(name)
    workload = Workload(model, 512 if model.vocab else 1, batch, precision)  # type: ignore[arg-type]
    priced = search.price(workload, search.enumerate_plans(workload, pool(gpu)), pool(gpu))
    parts = np.array([getattr(priced.times, part) for part in PARTS])
    assert np.isfinite(parts).all()
    assert (parts >= 0).all()
    assert np.allclose(parts.sum(axis=0), priced.step_s)
    flops = 6 * models.parameters(workload) if model.vocab and not model.extra else 0.0
    least = flops * workload.tokens_per_step / priced.plans.gpus / find_gpu(gpu).peak(precision)
    assert (priced.step_s > least * 0.9).all()


@pytest.mark.parametrize("name", ["llama-2-7b", "mixtral-8x7b", "resnet-50"])
def test_a_faster_network_never_makes_a_step_slower(name: str) -> None:
    model = models.preset(name)
    workload = Workload(model, 1024 if model.vocab else 1, 256, "bf16")
    slow, fast = (replace(pool(nodes=4), inter=find_link(link)) for link in ("ethernet-25", "infiniband-ndr-8x400"))
    plans = search.enumerate_plans(workload, slow)
    assert np.all(search.price(workload, plans, fast).step_s <= search.price(workload, plans, slow).step_s)


def test_tensor_groups_stay_inside_nodes() -> None:
    plans = search.enumerate_plans(Workload(models.preset("gpt2"), 1024, 24), pool(nodes=3), Limits(gpus=24))
    assert set(plans.tensor.tolist()) == {1, 2, 4}
    wider = Limits(gpus=24, max_tensor=16)
    assert len(search.enumerate_plans(Workload(models.preset("gpt2"), 1024, 24), pool(nodes=3), wider)) == len(plans)


def test_recomputation_costs_time() -> None:
    workload = Workload(models.preset("llama-2-7b"), 4096, 16)
    plans = Plans.of(
        *(
            Plan(data=8, zero_stage=3, gradient_accumulation=2, checkpointing=mode)
            for mode in ("none", "selective", "full")
        )
    )
    assert np.all(np.diff(search.price(workload, plans, pool()).step_s) > 0)


def test_more_micro_batches_shrink_the_share_of_the_bubble() -> None:
    workload = Workload(models.preset("llama-2-7b"), 4096, 64)
    plans = Plans.of(*(Plan(pipeline=8, gradient_accumulation=m) for m in (8, 16, 64)))
    priced = search.price(workload, plans, pool())
    share = priced.times.bubble / priced.step_s
    assert np.all(np.diff(share) < 0)
    # 1F1B: (p - 1) / m of the ideal time, were all stages alike.
    assert share[1] == pytest.approx(7 / 16 / (1 + 7 / 16), rel=0.15)


def test_layers_that_do_not_divide_still_make_stages() -> None:
    workload = Workload(models.preset("deepseek-v3"), 4096, 512)
    plans = search.enumerate_plans(workload, pool("h100-sxm", nodes=32), Limits(gpus=256))
    uneven = plans.pipeline > 1
    assert uneven.any()
    assert (plans.virtual_stages[uneven] == 1).all()
    assert set(plans.pipeline) <= {p for p in range(1, 257) if -(-61 // p) * (p - 1) < 61}


def test_offloading_trades_memory_for_time() -> None:
    plan = Plans.of(Plan(data=8, zero_stage=3, micro_batch=1, gradient_accumulation=8))
    here, optimizer, everything = (
        search.price(Workload(models.preset("llama-2-7b"), 2048, 64, offload=where), plan, pool())
        for where in ("none", "optimizer", "parameters")
    )
    assert here.memory_bytes[0] > optimizer.memory_bytes[0] > everything.memory_bytes[0]
    assert here.step_s[0] < optimizer.step_s[0] <= everything.step_s[0]
    assert optimizer.footprint.optimizer[0] == 0 < optimizer.footprint.parameters[0]


def test_parameters_on_the_host_need_zero_three() -> None:
    workload = Workload(models.preset("llama-2-7b"), 2048, 64, offload="parameters")
    plans = search.enumerate_plans(workload, pool(), Limits(gpus=8))
    assert len(plans)
    assert set(plans.zero_stage) == {3}
    assert set(plans.pipeline) == {1}


def test_a_framework_limits_the_plans_to_what_it_executes() -> None:
    workload = Workload(models.preset("llama-2-7b"), 2048, 64)
    whole = search.find(workload, pool()).plans
    tables = {name: search.find(replace(workload, framework=name), pool()).plans for name in search.FRAMEWORKS}
    assert all(0 < len(table) < len(whole) for table in tables.values())
    assert (tables["ddp"].gpus == tables["ddp"].data).all()
    assert (tables["ddp"].zero_stage == 0).all()
    alone = tables["fsdp2"].data == 1
    assert set(tables["fsdp2"].zero_stage[~alone]) <= {2, 3}
    assert (tables["deepspeed"].virtual_stages == 1).all()
    assert set(tables["megatron"].zero_stage) == {0, 1}
    split = tables["torchtitan"].tensor > 1
    assert split.any()
    assert (tables["torchtitan"].sequence_parallel[split] == 1).all()


def test_a_framework_refuses_what_it_has_not() -> None:
    workload = Workload(models.preset("llama-2-7b"), 2048, 64, framework="ddp")
    for changes in ({"precision": "fp8"}, {"offload": "optimizer"}):
        with pytest.raises(SpecError, match="ddp has no"):
            search.find(replace(workload, **changes), pool("h100-sxm"))
    with pytest.raises(SpecError, match="deepspeed has no selective"):
        search.find(replace(workload, framework="deepspeed", checkpointing="selective"), pool())


def test_what_is_found_is_what_pricing_says() -> None:
    workload = Workload(models.preset("gpt2"), 1024, 32)
    found = search.find(workload, pool())
    rows = np.random.default_rng(1).permutation(len(found))[:100]
    priced = search.price(workload, found.plans.take(rows), pool())
    assert (priced.step_s == found.step_s[rows]).all()
    assert (priced.memory_bytes == found.memory_bytes[rows]).all()
    assert (priced.fits == found.fits[rows]).all()
