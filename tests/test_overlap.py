"""Buckets of gradients that overlap a backward pass, and parameter servers that sum them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import constants, overlap, search, zoo
from tilecast.cli import main
from tilecast.frameworks import gradient_bytes
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.render.launch import write_launch
from tilecast.render.launch.setting import LaunchSetting
from tilecast.spec import Framework, Plan, Plans, Workload
from tilecast.step import step_with_bucket_sizes
from tilecast.step.blocks import kernel_seconds
from tilecast.step.replicas import SyncSeconds, fullest_stage_sync_seconds
from tilecast.step.weights import HeldWeights

BERT = Workload(zoo.find_preset("bert-large"), 512, 256, framework="ddp")
SLOW = Pool("a100-40", find_gpu("a100-40"), 8, 2, find_link("nvlink3"), find_link("ethernet-25"))
PLAN = Plan(data=16, micro_batch=16)


def simulated(first_s: float, share: float, each_s: float, count: int, pass_s: float) -> float:
    """Return the seconds after the pass from a simulation bucket by bucket.

    Each bucket waits for its gradients and for the network.
    """
    ready = [share, *(share + (1 - share) * (place + 1) / count for place in range(count))]
    free = 0.0
    for when, seconds in zip(ready, [first_s, *[each_s] * count], strict=True):
        free = max(free, when * pass_s) + seconds
    return free - pass_s


@given(
    first_s=st.floats(0.0, 2.0),
    share=st.floats(0.0, 0.9),
    each_s=st.floats(1e-6, 3.0),
    count=st.integers(1, 60),
    pass_s=st.floats(0.0, 50.0),
)
def test_the_closed_form_is_the_timeline(
    first_s: float, share: float, each_s: float, count: int, pass_s: float
) -> None:
    busy, parts, room = (np.array([value]) for value in (each_s * count, float(count), pass_s))
    exposed = overlap.exposed_seconds(busy, parts, room, first_s, share)
    assert exposed[0] == pytest.approx(simulated(first_s, share, each_s, count, pass_s), rel=1e-9, abs=1e-9)


@given(each_s=st.floats(1e-6, 3.0), count=st.integers(1, 60), shorter=st.floats(0.0, 50.0), more=st.floats(0.0, 50.0))
def test_a_longer_pass_hides_more_and_never_the_last_bucket(
    each_s: float, count: int, shorter: float, more: float
) -> None:
    busy, parts = np.array([each_s * count]), np.array([float(count)])
    long, short = (
        float(overlap.exposed_seconds(busy, parts, np.array([room]))[0]) for room in (shorter + more, shorter)
    )
    assert each_s * (1 - 1e-9) <= long <= short * (1 + 1e-9) <= each_s * count * (1 + 1e-8)


def synced(workload: Workload, plan: Plan = PLAN, pool: Pool = SLOW) -> SyncSeconds:
    plans = Plans.from_plans(plan)
    sharded = zoo.build_sharded_graph(workload, plans)
    caps = overlap.BucketLimits.from_plans(workload, plans, 4.0, np.ones(1))
    return fullest_stage_sync_seconds(
        workload,
        sharded,
        HeldWeights.from_plans(workload, sharded, plans),
        plans,
        pool,
        caps,
        np.ones(1),
        constants.shipped_constants(),
    )


def step_s(workload: Workload, plan: Plan = PLAN, pool: Pool = SLOW) -> float:
    return float(search.price(workload, Plans.from_plans(plan), pool).step_s[0])


@pytest.mark.parametrize(
    ("facts", "first", "rest"),
    [
        ({"framework": "ddp"}, 1, 25),
        ({"framework": "ddp", "bucket_mib": 100}, 1, 100),
        ({"framework": "megatron"}, 0, 4e7 * 4 / 2**20),
        ({"framework": "megatron", "bucket_mib": 100}, 0, 100),
        ({"framework": "mxnet"}, 0, 128),
        ({"framework": "fsdp2", "bucket_mib": 100}, 0, 7),
        ({"framework": "ddp", "overlap": False}, 0, np.inf),
        ({"framework": "tensorflow"}, 0, np.inf),
        ({"framework": "deepspeed"}, 0, 5e8 * 4 / 2**20),
        ({"framework": "deepspeed", "overlap": False}, 0, 5e8 * 4 / 2**20),
        ({"framework": "deepspeed", "bucket_mib": 100}, 0, 100),
        ({"framework": "paddle"}, 0, 128),
    ],
)
def test_buckets_are_the_framework_s_unless_the_job_says_more(facts: dict[str, Any], first: float, rest: float) -> None:
    caps = overlap.BucketLimits.from_plans(replace(BERT, **facts), Plans.from_plans(PLAN), 4.0, np.full(1, 7 * 2.0**20))
    assert caps.first[0] == first * 2**20
    assert caps.rest[0] == pytest.approx(rest * 2**20)


def test_megatron_s_buckets_grow_with_the_replicas() -> None:
    wide = Plans.from_plans(replace(PLAN, data=128))
    caps = overlap.BucketLimits.from_plans(replace(BERT, framework="megatron"), wide, 4.0, np.ones(1))
    assert caps.rest[0] == 128e6 * 4


def test_smaller_buckets_pay_latency_more_often_and_larger_ones_hide_less() -> None:
    small, usual = (synced(replace(BERT, bucket_mib=size)) for size in (1, 25))
    assert small.reduced[0] > 20 * usual.reduced[0]
    assert small.reduce_s[0] > usual.reduce_s[0]
    sizes = (1, 25, 10**4)
    tiny, usual_s, whole = (step_s(replace(BERT, bucket_mib=size)) for size in sizes)
    assert usual_s < tiny and usual_s < whole


def test_buckets_after_the_backward_pass_cost_their_latency() -> None:
    """DeepSpeed hides no bucket up to ZeRO 2; in stage 3 a larger last bucket comes later."""
    job = replace(BERT, framework="deepspeed")
    small, usual = (step_s(replace(job, bucket_mib=size), replace(PLAN, zero_stage=1)) for size in (5, 1000))
    assert small > usual
    node = replace(PLAN, data=8, micro_batch=32, zero_stage=3)
    one, all_at_once = (step_s(replace(job, bucket_mib=size), node) for size in (25, 1000))
    assert one < all_at_once


def test_sizes_that_are_tried_cost_what_the_job_would_with_them() -> None:
    plans, sizes = Plans.from_plans(PLAN), (1, 25, 200)
    sharded = zoo.build_sharded_graph(BERT, plans)
    seconds = step_with_bucket_sizes(BERT, sharded, plans, SLOW, kernel_seconds(BERT, sharded, SLOW.gpu), sizes)
    assert seconds == pytest.approx([step_s(replace(BERT, bucket_mib=size)) for size in sizes], rel=1e-9)
    assert step_s(BERT) == seconds[1]


@pytest.mark.parametrize("updates", ["synchronous", "asynchronous"])
def test_more_servers_are_never_slower(updates: Any) -> None:
    job = replace(BERT, gradient_sync="parameterServer", server_updates=updates)
    seconds = [step_s(replace(job, parameter_servers=count)) for count in (1, 2, 4, 8, 16, 64)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]
    assert step_s(job) == step_s(replace(job, parameter_servers=2))  # one for each node


@pytest.mark.parametrize("ranks", [3, 4, 8, 16])
def test_one_synchronous_server_is_never_faster_than_the_ring(ranks: int) -> None:
    pool = replace(SLOW, gpus_per_node=1, max_nodes=ranks)
    plan = Plan(data=ranks, micro_batch=4)
    served = replace(BERT, gradient_sync="parameterServer", parameter_servers=1)
    assert synced(served, plan, pool).reduce_s[0] > synced(BERT, plan, pool).reduce_s[0]
    assert step_s(served, plan, pool) > step_s(BERT, plan, pool)


def test_servers_that_wait_for_nobody_are_faster() -> None:
    job = replace(BERT, gradient_sync="parameterServer", parameter_servers=4)
    assert step_s(replace(job, server_updates="asynchronous")) < step_s(job)


def test_servers_leave_gradients_whole() -> None:
    job = replace(BERT, framework=None, gradient_sync="parameterServer")
    plans = search.enumerate_plans(job, SLOW, search.PlanLimits(gpus=16))
    assert len(plans) and not plans.zero_stage.any()


BARE = ["advise", "bert-large", "--seq", "512", "--batch", "256", "--gpus", "a100-40:16"]


@pytest.mark.slow
def test_the_ways_of_summing_gradients_stand_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    served = ["--gradient-sync", "parameterServer", "--parameter-servers", "4", "--server-updates", "asynchronous"]
    plan = ["--plan", "dp=16,mb=16"]
    assert main([*BARE, *plan, *served, "--explain", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    ways = document["explanation"]["gradientSyncs"]
    assert [(one["gradientSync"], one.get("serverUpdates"), one["servers"]) for one in ways] == [
        ("parameterServer", "asynchronous", 4),
        ("allReduce", None, 0),
        ("parameterServer", "synchronous", 4),
    ]
    assert ways[0]["seconds"] < ways[2]["seconds"]
    assert ways[0]["stepSeconds"] == pytest.approx(target(document), rel=1e-3)
    assert main([*BARE, *plan, "--explain"]) == 0
    screen = capsys.readouterr().out
    assert "GRADIENTS SUMMED BY" in screen and "2 synchronous parameter servers" in screen


def target(advice: Any) -> float:
    return float(advice["recommendation"]["stepSeconds"]["target"])


def job(folder: Path, **training: Any) -> str:
    path = folder / "job.json"
    spec = {"model": {"preset": "vgg-16"}, "training": {"globalBatchSize": 512, "precision": "fp16", **training}}
    document = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "job"}, "spec": spec}
    path.write_text(json.dumps(document))
    return str(path)


def test_the_advice_names_the_fastest_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pools = ["--gpus", "a100-40:16", "--plan", "dp=16", "-o", "json"]
    words = "Gradient buckets of "
    assert main(["advise", job(tmp_path, framework="ddp", bucketMiB=1), *pools]) == 0
    slow = json.loads(capsys.readouterr().out)
    (note,) = (one for one in slow["notes"] if one.startswith(words))
    size = int(note.removeprefix(words).split()[0])
    assert "instead of 1 " in note and size > 1
    assert main(["advise", job(tmp_path, framework="ddp", bucketMiB=size), *pools]) == 0
    fast = json.loads(capsys.readouterr().out)
    assert not [one for one in fast["notes"] if one.startswith(words)]
    assert target(fast) < 0.99 * target(slow)


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"framework": "fsdp2", "bucketMiB": 25}, "spec.training.bucketMiB: fsdp2 reduces gradients block by block"),
        ({"framework": "megatron", "gradientSync": "parameterServer"}, "spec.training.gradientSync: megatron has no"),
        (
            {"offload": "parameters", "gradientSync": "parameterServer"},
            "spec.training.gradientSync: offload parameters",
        ),
        ({"parameterServers": 2}, "parameterServers and serverUpdates say nothing of gradientSync allReduce"),
        ({"bucketMiB": 0}, "spec.training.bucketMiB"),
        ({"gradientSync": "ring"}, "spec.training.gradientSync"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    training: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["advise", job(tmp_path, **training), "--gpus", "a100-40:16"]) != 0
    message = capsys.readouterr().err
    assert problem in message and message.count("\n") == 1


def test_a_plan_that_shards_gradients_has_no_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BARE, "--gradient-sync", "parameterServer", "--plan", "fsdp=16"]) != 0
    assert "zero=3 spreads gradients that a parameter server sums whole" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "framework", "stage", "problem"),
    [
        ("torchrun", "ddp", 0, "bucket_cap_mb=100, gradient_as_bucket_view=False"),
        ("accelerate", "huggingface", 0, "bucket_cap_mb=100"),
        ("trainer", "huggingface", 0, "--ddp_bucket_cap_mb 100"),
        ("megatron", "megatron", 1, "--ddp-bucket-size 26214400"),
        ("deepspeed", "deepspeed", 1, '"reduce_bucket_size": 52428800'),
    ],
)
def test_the_command_has_the_job_s_buckets(launcher: str, framework: Framework, stage: int, problem: str) -> None:
    workload = replace(BERT, framework=framework, bucket_mib=100)
    setting = LaunchSetting("job", workload, replace(PLAN, zero_stage=stage), "a100-40", 2, 8, 1.5)
    line = write_launch(launcher, setting)
    assert problem in "\n".join([" ".join(line.command), *line.files.values(), *line.script])


def test_experts_that_no_other_rank_holds_are_in_no_bucket() -> None:
    """Where every rank has its own experts, the buckets hold the weights that ranks share."""
    job = Workload(zoo.find_preset("mixtral-8x7b"), 2048, 64, framework="megatron")
    link = find_link("nvlink4")
    pool = Pool("h100", find_gpu("h100-sxm"), 8, 1, link, link)
    plans = Plans.from_plans(Plan(data=8, expert=8, micro_batch=1))
    sharded = zoo.build_sharded_graph(job, plans)
    caps = overlap.BucketLimits.from_plans(job, plans, gradient_bytes(job), np.ones(1))
    sync = fullest_stage_sync_seconds(
        job,
        sharded,
        HeldWeights.from_plans(job, sharded, plans),
        plans,
        pool,
        caps,
        np.ones(1),
        constants.shipped_constants(),
    )
    shared = sharded.sum_fullest_stage("parameters", plans) - sharded.sum_fullest_stage("expert_parameters", plans)
    whole = float((shared * gradient_bytes(job))[0])
    assert sync.scattered[0] == pytest.approx(float(caps.count_buckets(np.array([whole]))[0]))
