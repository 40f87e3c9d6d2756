"""Effects of the framework on a step: who launches, and what is copied, summed, recomputed and hidden."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilecast import constants, kernels, overlap, search, zoo
from tilecast.frameworks import gradient_bytes
from tilecast.graph import KernelTable, Op
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.spec import Framework, Plan, Plans, Workload
from tilecast.step import step
from tilecast.step.blocks import correction_factors, find_launch_mode, kernel_seconds
from tilecast.step.passes import MicroBatch
from tilecast.step.replicas import fullest_stage_sync_seconds
from tilecast.step.weights import (
    HeldWeights,
    hook_seconds,
    optimizer_seconds,
    weight_copy_bytes,
    weight_copy_bytes_per_s,
)

JOB = Workload(zoo.find_preset("gpt2-xl"), 1024, 64, precision="bf16")


def pool(gpu: str = "a100-80", inter: str = "infiniband-hdr-8x200", intra: str = "") -> Pool:
    facts = find_gpu(gpu)
    return Pool(gpu, facts, 8, 4, find_link(intra or facts.intra_link), find_link(inter))


def copied(job: Workload, plans: Plans) -> list[float]:
    """Return the bytes that a micro-batch copies per parameter."""
    held = HeldWeights.from_plans(job, zoo.build_sharded_graph(job, plans), plans)
    return (weight_copy_bytes(job, held, plans) / held.parameters).tolist()


def seconds(job: Workload, plan: Plan, where: Pool) -> dict[str, float]:
    plans = Plans.from_plans(plan)
    sharded = zoo.build_sharded_graph(job, plans)
    times = step(job, sharded, plans, where, kernel_seconds(job, sharded, where.gpu))
    return {**times.parts(0), "total": float(times.total[0])}


@pytest.mark.parametrize("plan", [Plan(data=16, micro_batch=4), Plan(data=16, zero_stage=3), Plan(data=8, tensor=2)])
@pytest.mark.parametrize("name", ["intra", "inter"])
def test_one_faster_link_slows_no_step_down(name: str, plan: Plan) -> None:
    """This holds whether the exchanges wait for that link or for the other one."""
    gpu_pool, before = pool("h100-sxm", "efa-3200"), np.inf
    for factor in (0.1, 0.3, 0.6, 1.0, 2.0):
        link = getattr(gpu_pool, name)
        faster = replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
        total = seconds(JOB, plan, replace(gpu_pool, **{name: faster}))["total"]
        assert total <= before * (1 + 1e-12)
        before = total


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "eager"),
        ({"framework": "tensorflow"}, "graph"),
        ({"framework": "tensorflow", "execution": "xla"}, "xla"),
        ({"framework": "megatron", "execution": "cudaGraphs"}, "cudaGraphs"),
    ],
)
def test_a_static_graph_launches_without_python(facts: dict[str, str], name: str) -> None:
    assert find_launch_mode(replace(JOB, **facts)) == name


@pytest.mark.parametrize(
    ("facts", "size"),
    [
        ({}, 2.0),
        ({"framework": "ddp"}, 4.0),
        ({"framework": "megatron"}, 4.0),
        ({"framework": "megatron", "precision": "fp16"}, 2.0),
        ({"framework": "megatron", "precision": "fp8"}, 2.0),
        ({"framework": "megatron", "precision": "fp8", "gradient_precision": "fp32"}, 4.0),
        ({"framework": "megatron", "precision": "fp8", "framework_version": "0.11"}, 4.0),
        ({"framework": "deepspeed"}, 2.0),
        ({"precision": "tf32"}, 4.0),
    ],
)
def test_gradients_have_the_framework_s_type(facts: dict[str, str], size: float) -> None:
    assert gradient_bytes(replace(JOB, **facts)) == size


def test_each_micro_batch_copies_what_its_framework_copies() -> None:
    once = Plans.from_plans(Plan(data=8, micro_batch=8), Plan(data=8, micro_batch=4, gradient_accumulation=2))
    assert copied(replace(JOB, framework="ddp"), once) == [
        12.0,
        24.0,
    ]  # casts of weights and gradients; an FP32 sum
    assert copied(replace(JOB, framework="megatron"), once) == [0.0, 0.0]  # summed by the product
    assert copied(replace(JOB, training=False), once) == [0.0, 0.0]
    sharded = Plans.from_plans(
        Plan(data=8, micro_batch=8, zero_stage=3),
        Plan(data=8, micro_batch=8, zero_stage=2),
        Plan(data=8, micro_batch=4, gradient_accumulation=2, zero_stage=2),
    )
    # Two gathers read and written, and a widening scatter; one gather and widened gradients; an eighth of an FP32 sum.
    assert copied(replace(JOB, framework="fsdp2"), sharded) == pytest.approx([14.0, 10.0, 10.0 + 12 / 8])
    assert copied(JOB, sharded) == pytest.approx([12.0, 0.0, 6 / 8])  # gathered in place after the update


def test_frozen_weights_are_gathered_and_nothing_else() -> None:
    """Under LoRA no gradient of a base weight is converted or summed; a quantized weight is gathered in 4 bits."""
    job = replace(JOB, lora_rank=8, framework="fsdp2")
    plans = Plans.from_plans(Plan(data=8, micro_batch=1, gradient_accumulation=8, zero_stage=3))
    whole, quarter = (copied(replace(job, frozen_bits=bits), plans)[0] for bits in (16, 4))
    assert whole == pytest.approx(8.0, rel=0.03)
    assert quarter == pytest.approx(8.0 * 4.5 / 16, rel=0.2)  # the embedding stays in 16 bits
    assert copied(replace(JOB, lora_rank=8, framework="ddp"), Plans.from_plans(Plan(data=8)))[0] < 0.1


def test_selective_recomputation_runs_what_its_framework_runs_again() -> None:
    plan = Plan(data=8, micro_batch=4, zero_stage=3, checkpointing="selective")
    attention = seconds(replace(JOB, framework="fsdp2"), plan, pool())
    operators = seconds(replace(JOB, framework="torchtitan"), plan, pool())
    none = seconds(replace(JOB, framework="torchtitan"), replace(plan, checkpointing="none"), pool())
    full = seconds(replace(JOB, framework="torchtitan"), replace(plan, checkpointing="full"), pool())
    assert none["compute"] < operators["compute"] < full["compute"]
    assert operators["compute"] > attention["compute"]


def test_exchanges_hide_where_the_framework_hides_them() -> None:
    plan = Plan(data=1, tensor=8, micro_batch=8, gradient_accumulation=8, sequence_parallel=True)
    shown = {
        name: seconds(replace(JOB, framework=name), plan, pool())["communication"]
        for name in ("megatron-deepspeed", "megatron", "nemo")
    }
    assert shown["megatron-deepspeed"] > shown["megatron"] > shown["nemo"] > 0


@pytest.mark.parametrize("framework", ["deepspeed", "paddle"])
def test_every_micro_batch_scatters_under_zero_2(framework: Framework) -> None:
    """So does PaddlePaddle, although its runs hold whole gradients: stage 2 takes up to 9 % longer than stage 1."""
    job = replace(JOB, framework=framework)
    plan = Plan(data=8, micro_batch=1, gradient_accumulation=8, zero_stage=1)
    once, each = (seconds(job, replace(plan, zero_stage=stage), pool())["communication"] for stage in (1, 2))
    assert 4 * once < each < 8 * once


def test_hooks_of_zero_take_the_host_time_for_each_tensor() -> None:
    """Those of stage 2 add to a step. Those of stage 3 bound short micro-batches, and hide behind long ones."""
    job = replace(JOB, framework="deepspeed")
    plans = Plans.from_plans(Plan(data=8, micro_batch=1), Plan(data=8, micro_batch=1, pipeline=2))
    sharded = zoo.build_sharded_graph(job, plans)
    graph = sharded.graph

    def wait(seconds: float, job: Workload = job) -> list[list[float]]:
        each = np.full(2, seconds)
        micro = MicroBatch(each * 0, each / 2, each, each, each, each * 0, each * 0, each)
        waits: list[list[float]] = hook_seconds(job, graph, plans, micro).tolist()
        return waits

    short, long = wait(0.1), wait(10.0)
    assert short[:2] == long[:2] == [[0.0, 0.0]] * 2
    tensors = short[2][0] / 150e-6
    assert 400 < tensors < 600  # twelve in each of 48 layers
    assert short[2] == long[2] == [150e-6 * tensors, pytest.approx(75e-6 * tensors)]
    assert short[3] == pytest.approx([2e-3 * tensors - 0.1, 1e-3 * tensors - 0.1])
    assert long[3] == [0.0, 0.0]
    assert not np.any(wait(0.1, replace(job, lora_rank=8))) and not np.any(wait(0.1, replace(job, framework="paddle")))
    short_step, host_bound = (
        seconds(job, Plan(data=8, micro_batch=1, gradient_accumulation=8, zero_stage=stage), pool("h100-sxm"))["total"]
        for stage in (1, 3)
    )
    assert short_step < 8 * 2e-3 * tensors < host_bound


def test_fsdp_gathers_for_every_micro_batch_under_zero_2() -> None:
    """FSDP shards weights again after every backward pass; DeepSpeed gathers them once they are updated."""
    plan, slow = Plan(data=16, micro_batch=1, zero_stage=2), pool(inter="ethernet-25")
    for framework, again in (("fsdp2", 3.0), ("deepspeed", 1.5)):
        once, four = (
            seconds(replace(JOB, framework=framework), replace(plan, gradient_accumulation=count), slow)
            for count in (1, 4)
        )
        # A slow network hides almost nothing; gradients are half of DeepSpeed's exchanges.
        assert four["communication"] == pytest.approx((1 + again) * once["communication"], rel=0.03)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_of_pytorch_exchanges_gradients_once(stage: int) -> None:
    """Its stages sum whole gradients and reduce them with the last micro-batch; other pipelines do so with each one."""
    plan, slow = Plan(data=8, pipeline=2, micro_batch=1, zero_stage=stage), pool("h100-sxm", intra="ethernet-25")
    more = {}
    for framework in ("torchtitan", None):
        job = replace(JOB, framework=framework)
        four, eight = (
            seconds(job, replace(plan, gradient_accumulation=count), slow)["communication"] for count in (4, 8)
        )
        more[framework] = eight / four - 1
    # Sends between stages, and weights under ZeRO 3, still cost each micro-batch the same.
    assert more["torchtitan"] < (0.2 if stage == 2 else 0.95) < more[None]


def test_virtual_stages_of_pytorch_hide_gradients_behind_those_before() -> None:
    """Under ZeRO 2 with virtual stages the exchange of a piece waits no longer than under ZeRO 1."""
    job = replace(JOB, framework="torchtitan")
    plan = Plan(data=8, pipeline=4, virtual_stages=4, micro_batch=1, gradient_accumulation=8)
    first, second = (
        seconds(job, replace(plan, zero_stage=stage), pool("h100-sxm"))["communication"] for stage in (1, 2)
    )
    assert second == pytest.approx(first)


def test_weights_in_fp8_alone_are_gathered_so() -> None:
    """NeMo gathers one byte of each updated weight of the layers, as --fp8-param-gather says; Megatron-LM two."""
    plans, where = Plans.from_plans(Plan(data=16, zero_stage=1)), pool("h100-sxm")
    job = replace(JOB, precision="fp8")
    seconds = {}
    for name in ("nemo", "megatron"):
        own = replace(job, framework=name)
        caps, units = overlap.BucketLimits.single_bucket(1), np.ones(1)
        sharded = zoo.build_sharded_graph(own, plans)
        whole = HeldWeights.from_plans(own, sharded, plans)
        seconds[name] = fullest_stage_sync_seconds(
            own, sharded, whole, plans, where, caps, units, constants.shipped_constants()
        ).updated_s[0]
    layered = zoo.build_sharded_graph(job, plans).layer_parameter_fraction(plans)[0]
    assert seconds["nemo"] == pytest.approx(seconds["megatron"] * (1 - layered / 2), rel=0.05)


def test_userbuffers_need_sequence_parallelism() -> None:
    """Without it NeMo exchanges as Megatron-Core does, with an all-reduce behind the weight's gradient."""
    plan = Plan(data=1, tensor=8, micro_batch=8, gradient_accumulation=8)
    shown = [
        seconds(replace(JOB, framework=name), plan, pool())["communication"]
        for name in ("megatron", "nemo", "megatron-deepspeed")
    ]
    assert shown[0] == pytest.approx(shown[1], rel=1e-9)
    assert shown[2] > shown[1]


@pytest.mark.parametrize(
    ("framework", "each"),
    [
        # AdamW in one kernel: weight and two moments in and out; the gradient read, and clipped (three passes).
        ("megatron", 24 + 4 * 4 + 2),  # FP32 gradients, and also the 16-bit weight
        ("torchtune", 12 + 2),  # everything in 16 bit, nothing clipped
        ("litgpt", 76 / 2 + 4 * 2),  # the same, step by step
        ("oneflow", 76 + 2 + 4 + 4 + 2),  # the update reads an FP32 copy of the 16-bit gradient
    ],
)
def test_an_update_moves_the_states_that_are_held(framework: Framework, each: float) -> None:
    job, plans, gpu = replace(JOB, framework=framework), Plans.from_plans(Plan()), find_gpu("a100-80")
    sharded = zoo.build_sharded_graph(job, plans)
    moved = optimizer_seconds(
        job, HeldWeights.from_plans(job, sharded, plans), plans, gpu, constants.shipped_constants()
    ) * weight_copy_bytes_per_s(gpu, constants.shipped_constants())
    assert moved[0] / sharded.sum_fullest_stage("parameters", plans)[0] == pytest.approx(each)


@pytest.mark.parametrize(("framework", "more"), [("ddp", 4 * 4.0), ("oneflow", 0.0), ("megatron", 0.0)])
def test_buckets_that_are_copies_are_read_and_written_twice(framework: Framework, more: float) -> None:
    """DistributedDataParallel copies FP32 gradients into its buckets and back, if it has other replicas."""
    job, gpu = replace(JOB, framework=framework), find_gpu("a100-80")
    plans = Plans.from_plans(Plan(), Plan(data=8))
    sharded = zoo.build_sharded_graph(job, plans)
    moved = optimizer_seconds(
        job, HeldWeights.from_plans(job, sharded, plans), plans, gpu, constants.shipped_constants()
    ) * weight_copy_bytes_per_s(gpu, constants.shipped_constants())
    each = moved / sharded.sum_fullest_stage("parameters", plans)
    assert each[1] - each[0] == pytest.approx(more)


def test_a_product_on_a_bus_is_disturbed_less() -> None:
    """The same gradients take longer over a bus, and slow down each second of computation less."""
    job, plan = replace(JOB, framework="ddp"), Plan(data=8, micro_batch=8)
    places = {gpu: pool(gpu) for gpu in ("a100-80", "a100-80-pcie")}
    alone = Plan(micro_batch=8, gradient_accumulation=8)
    beside = {gpu: seconds(job, plan, place) for gpu, place in places.items()}
    hidden = {gpu: beside[gpu]["compute"] - seconds(job, alone, places[gpu])["compute"] / 8 for gpu in places}
    assert beside["a100-80-pcie"]["communication"] > beside["a100-80"]["communication"]
    assert 0 < hidden["a100-80-pcie"] < 3 * hidden["a100-80"]


def test_the_host_s_work_per_step_grows_with_the_tensors() -> None:
    shallow = replace(JOB, model=replace(JOB.model, layers=2))
    first, second = (seconds(job, Plan(micro_batch=64), pool())["launch"] for job in (shallow, JOB))
    assert 0 < first < second


def test_replicas_wait_for_every_tensor_where_samples_differ() -> None:
    """Replicas of an image model add host work that grows with its tensors, not with the batch or their number.

    Decoders, which are fed streams of tokens, and code with fused kernels add none.
    """

    def more(job: Workload, samples: int, replicas: int = 8) -> float:
        alone, beside = (seconds(job, Plan(data=n, micro_batch=samples), pool())["launch"] for n in (1, replicas))
        return beside - alone

    small, large = (
        Workload(zoo.find_preset(name), 1, 512, "fp16", framework="ddp") for name in ("resnet-50", "bert-large")
    )
    large = replace(large, sequence_length=128)
    assert more(small, 64) == pytest.approx(more(small, 16), rel=1e-9) == pytest.approx(more(small, 64, 2), rel=1e-9)
    assert 0 < more(small, 64) < more(large, 64)
    assert more(replace(JOB, framework="ddp"), 8) == more(replace(small, fused_kernels=True), 64) == 0


def test_memory_costs_a_framework_less_where_vector_units_have_time() -> None:
    fitted, factors = constants.shipped_constants(), {}
    for name in ("a100-80", "h200", "h100-sxm", "rtx-a6000", "l40"):
        factors[name] = fitted.memory_factor("eager", find_gpu(name))
    assert list(factors.values()) == sorted(factors.values(), reverse=True)
    assert factors["h100-sxm"] == pytest.approx(fitted.memory["eager"], rel=1e-3)
    slow = find_gpu("l40")
    fast = replace(slow, memory_bandwidth_bytes_per_s=2 * slow.memory_bandwidth_bytes_per_s)
    assert 1 < fitted.memory_factor("eager", fast) / fitted.memory_factor("eager", slow) < 2, (
        "faster memory still gains"
    )


def test_every_plan_has_a_finite_step() -> None:
    plans = search.enumerate_plans(JOB, pool(), search.PlanLimits(gpus=8))
    sharded = zoo.build_sharded_graph(JOB, plans)
    times = step(JOB, sharded, plans, pool(), kernel_seconds(JOB, sharded, pool().gpu))
    assert np.isfinite(times.total).all() and (times.total > 0).all()


def test_cublas_runs_measured_fp8_products_faster_than_cutlass() -> None:
    def corrected(gpu: str, framework: str, precision: str = "fp8") -> dict[str, float]:
        job = Workload(zoo.find_preset("gpt2-xl"), 1024, 8, precision=precision, framework=framework)  # type: ignore[arg-type]
        op = Op("product", KernelTable.from_dimensions("gemm", precision, batch=1, m=4096, n=4096, k=4096))
        times = kernels.predict_kernel_times(op.table, find_gpu(gpu))
        return {name: float(value[0]) for name, value in correction_factors(job, op, times, np.arange(1)).items()}

    assert 0.5 < corrected("h100-sxm", "nemo")["fp8.cublas"] < 1
    for gpu, framework, precision in (
        ("h100-sxm", "torchtitan", "fp8"), ("b200", "nemo", "fp8"), ("h100-sxm", "nemo", "bf16"),
    ):  # fmt: skip
        assert "fp8.cublas" not in corrected(gpu, framework, precision)


def test_the_slower_of_power_and_addresses_bounds_a_convolution() -> None:
    sizes = dict.fromkeys(("in_d", "k_d", "out_d"), 1) | dict.fromkeys(("in_h", "in_w", "out_h", "out_w"), 64)
    dims = {**sizes, "batch": 32, "c_in": 320, "c_out": 320, "k_h": 3, "k_w": 3, "groups": 1, "direction": 0}
    job = Workload(zoo.find_preset("resnet-50"), 1, 32, precision="fp16")
    factors = {}
    for limited in (True, False):
        gpu = find_gpu("b200")
        gpu = gpu if limited else replace(gpu, sustained_ratio=dict.fromkeys(gpu.sustained_ratio, 1.0))
        op = Op("convolution", KernelTable.from_dimensions("conv", "fp16", **dims))
        times = kernels.predict_kernel_times(op.table, gpu)
        factors[limited] = float(correction_factors(job, op, times, np.arange(1))["implicit.convolution"][0])
    assert 1.0 <= factors[True] < factors[False]
    assert factors[True] == pytest.approx(max(1.0, factors[False] * find_gpu("b200").sustained_ratio["fp16"]))
