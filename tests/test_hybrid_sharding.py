"""Hybrid sharding (HSDP): groups of ranks that each hold all shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilecast import memory, search, zoo
from tilecast.cli import main
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.spec import Plan, Plans, SpecError, Workload

H100 = find_gpu("h100-sxm")
POOL = Pool("h100", H100, 8, 64, find_link(H100.intra_link), find_link("ethernet-100"))
LLAMA = Workload(zoo.find_preset("llama-3.1-8b"), 8192, 512, framework="fsdp2")
PLAN = Plan(data=128, zero_stage=3, gradient_accumulation=4, checkpointing="full")
JOB = ["advise", "llama-3-8b", "--seq", "8192", "--batch", "64", "--gpus", "h100-sxm:16", "--max-gpus", "16"]


def grouped(degree: int | None, workload: Workload = LLAMA) -> Workload:
    return replace(workload, shard_degree=degree)


def states(workload: Workload, plan: Plan = PLAN) -> float:
    plans = Plans.from_plans(plan)
    bill = memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans)
    return float((bill.parameters + bill.gradients + bill.optimizer)[0])


@pytest.mark.parametrize("degree", [128, 1024])
def test_one_group_of_all_ranks_is_plain_sharding(degree: int) -> None:
    plans = Plans.from_plans(PLAN)
    priced = [search.price(job, plans, POOL) for job in (LLAMA, grouped(degree))]
    np.testing.assert_array_equal(priced[0].step_s, priced[1].step_s)
    assert states(LLAMA) == states(grouped(degree))


@pytest.mark.parametrize("degree", [8, 16, 64])
def test_a_rank_holds_the_shards_of_its_group(degree: int) -> None:
    assert states(grouped(degree)) == pytest.approx(states(LLAMA) * 128 / degree, rel=1e-9)
    assert states(grouped(degree)) == pytest.approx(states(LLAMA, replace(PLAN, data=degree)), rel=1e-9)


def test_groups_inside_a_node_spare_a_slow_network() -> None:
    plans = Plans.from_plans(PLAN)
    node, all_ranks = (float(search.price(grouped(degree), plans, POOL).step_s[0]) for degree in (8, None))
    assert node < all_ranks
    alone = search.price(LLAMA, Plans.from_plans(replace(PLAN, data=8)), POOL)
    assert node > float(alone.step_s[0])  # groups sum their gradients


def test_the_search_keeps_whole_groups_of_sharded_plans() -> None:
    plans = search.enumerate_plans(grouped(16), POOL)
    assert len(plans) and not np.any((plans.data > 16) & (plans.data % 16 > 0))
    assert not np.any((plans.data > 1) & (plans.zero_stage < 2))


def test_a_framework_without_groups_is_refused() -> None:
    with pytest.raises(SpecError, match=r"shardDegree: megatron shards over all replicas; leave it out"):
        search.enumerate_plans(replace(LLAMA, framework="megatron", shard_degree=8), POOL)


@pytest.mark.parametrize(
    ("launcher", "text"),
    [
        ("torchtitan", "data_parallel_replicate_degree=2,\n            data_parallel_shard_degree=8,"),
        ("fsdp2", 'init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))'),
    ],
)
def test_launchers_say_both_degrees(launcher: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--plan", "fsdp16,mb1,ac-full", "--shard-degree", "8", "--launch", launcher]) == 0
    assert text in capsys.readouterr().out


def test_launchers_without_groups_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    job = [*JOB, "--plan", "fsdp16,mb1,ac-full", "--shard-degree", "8"]
    assert main([*job, "--launch", "accelerate"]) == 2
    assert "huggingface shards over all replicas" in capsys.readouterr().err
    assert main([*job, "--framework", "fsdp2", "--launch", "accelerate"]) == 2
    assert "over all ranks" in capsys.readouterr().err


MIXTRAL = Workload(zoo.find_preset("mixtral-8x7b"), 4096, 512, framework="torchtitan")
EXPERTS = Plan(data=128, expert=8, zero_stage=3, gradient_accumulation=4, checkpointing="full")


@pytest.mark.parametrize("stage", [2, 3])
def test_groups_gather_their_experts_inside(stage: int) -> None:
    plan = replace(EXPERTS, zero_stage=stage)
    everything, within = (
        float(search.price(grouped(degree, MIXTRAL), Plans.from_plans(plan), POOL).times.communication[0])
        for degree in (None, 8)
    )
    # A group of 8 ranks has each expert once, so it gathers none of them over the slow network.
    # Without a gather, its sum over the groups takes twice the bytes of a scatter over all ranks.
    assert within < everything if stage == 3 else within < 2 * everything
    np.testing.assert_array_equal(
        *(search.price(grouped(degree, MIXTRAL), Plans.from_plans(plan), POOL).step_s for degree in (None, 128))
    )


def test_groups_sum_the_gradients_of_their_experts() -> None:
    alone, several = (
        float(search.price(grouped(8, MIXTRAL), Plans.from_plans(replace(EXPERTS, data=data)), POOL).step_s[0])
        for data in (8, 128)
    )
    dense = float(search.price(grouped(8), Plans.from_plans(PLAN), POOL).step_s[0]) - float(
        search.price(grouped(8), Plans.from_plans(replace(PLAN, data=8)), POOL).step_s[0]
    )
    # Mixtral has six times the parameters of the dense model, most of them in experts.
    assert several - alone > 2 * dense > 0


@pytest.mark.parametrize("option", [["--expert-dispatch", "deepEP"], ["--expert-overlap", "microBatch"]])
def test_a_dense_model_has_no_options_of_experts(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--framework", "megatron", *option]) == 2
    error = capsys.readouterr().err
    assert option[0] in error and "llama-3-8b has no experts; leave it out" in error
