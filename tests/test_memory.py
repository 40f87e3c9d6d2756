"""The memory bill against closed forms, measured peaks, and plans whose answer is plain.

The closed forms are those of arXiv 2205.05198 and arXiv 1910.02054; `memory/record.py` measured the peaks in torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import hardware, memory, zoo
from tilecast.graph import Shards
from tilecast.model import Model
from tilecast.recomputation import CHECKPOINTING
from tilecast.spec import Plan, Plans, Precision, Workload
from tilecast.zoo import layers
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.numerics import Numerics

GIB = 2**30
GPT_22B = Model("gpt-22b", "decoder", 48, 6144, 64, 64, 96, 24576, 51200, positions=2048, dropout=True,
                dimensions=zoo.Transformer())  # fmt: skip


def layer_activations(workload: Workload, plan: Plan) -> float:
    """Return the bytes that all layers keep for one micro-batch."""
    sharded = zoo.build_sharded_graph(workload, Plans.from_plans(plan))
    mode = CHECKPOINTING.index(plan.checkpointing)
    return float(sum(block.repeat * block.activation_bytes[mode][0] for block in sharded.graph.layers))


@pytest.mark.parametrize(
    ("checkpointing", "sequence_parallel", "gib"),
    [
        # Table 2 of arXiv 2205.05198 for L 48, h 6144, a 64, s 2048, b 4, t 8.
        ("none", False, 59.25),
        ("none", True, 39.56),
        ("selective", False, 29.25),
        ("selective", True, 9.56),
        ("full", False, 4.50),
    ],
)
def test_activations_of_the_22b_example(checkpointing: str, sequence_parallel: bool, gib: float) -> None:
    workload = Workload(GPT_22B, 2048, 4, "fp16", attention="eager")
    plan = Plan(tensor=8, micro_batch=4, checkpointing=checkpointing, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
    assert layer_activations(workload, plan) / GIB == pytest.approx(gib, rel=0.01)


def bill(workload: Workload, plan: Plan) -> memory.Footprint:
    plans = Plans.from_plans(plan)
    return memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans)


@pytest.mark.parametrize(
    ("zero_stage", "bytes_per_parameter"),
    # ZeRO, figure 1: 16 bytes without it, and 4 + 12/d, 2 + 14/d, 16/d with stages 1, 2, 3.
    [(0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)],
)
def test_model_states_are_those_of_zero(zero_stage: int, bytes_per_parameter: float) -> None:
    workload = Workload(zoo.find_preset("gpt2-xl"), 1024, 8, "bf16", optimizer="adam")
    footprint = bill(workload, Plan(data=8, zero_stage=zero_stage))
    states = float((footprint.parameters + footprint.gradients + footprint.optimizer)[0])
    assert states == pytest.approx(bytes_per_parameter * zoo.count_parameters(workload), rel=1e-6)


def test_a_pipeline_of_pytorch_holds_whole_gradients() -> None:
    """Its stages sum the gradients of all micro-batches before they reduce them; other pipelines keep a share."""
    plan = Plan(data=8, pipeline=4, zero_stage=2, gradient_accumulation=8)
    held = {}
    for framework in ("torchtitan", None):
        workload = Workload(
            zoo.find_preset("gpt2-xl"), 1024, 64, "bf16", framework=framework, gradient_precision="fp32"
        )  # type: ignore[arg-type]
        held[framework] = float(bill(workload, plan).gradients[0])
    assert held["torchtitan"] == pytest.approx(8 * held[None])


def test_fp32_adam_takes_sixteen_bytes_a_parameter_and_momentum_twelve() -> None:
    for optimizer, each in (("adam", 16.0), ("momentum", 12.0)):
        workload = Workload(zoo.find_preset("resnet-50"), 1, 8, "fp32", optimizer=optimizer)  # type: ignore[arg-type]
        footprint = bill(workload, Plan(micro_batch=8))
        states = float((footprint.parameters + footprint.gradients + footprint.optimizer)[0])
        assert states == pytest.approx(each * zoo.count_parameters(workload))


def test_the_bill_sums_to_its_total() -> None:
    footprint = bill(Workload(zoo.find_preset("llama-2-7b"), 4096, 8), Plan(data=8, zero_stage=3))
    assert sum(footprint.items(0).values()) == pytest.approx(float(footprint.total[0]))


@given(
    micro=st.sampled_from([1, 2, 4, 8]),
    data=st.sampled_from([1, 2, 4, 8]),
    stage=st.sampled_from([0, 1, 2]),
    mode=st.sampled_from(["none", "selective", "full"]),
)
@pytest.mark.slow
def test_more_sharding_and_more_recomputation_never_need_more(micro: int, data: int, stage: int, mode: str) -> None:
    workload = Workload(zoo.find_preset("llama-2-7b"), 2048, 64)
    one = Plan(data=data, zero_stage=stage, micro_batch=micro, checkpointing=mode)  # type: ignore[arg-type]
    other = Plan(data=data, zero_stage=stage + 1, micro_batch=micro, checkpointing="full")
    states = [
        bill_of_plan.parameters + bill_of_plan.gradients + bill_of_plan.optimizer
        for bill_of_plan in (bill(workload, one), bill(workload, other))
    ]
    assert states[1][0] <= states[0][0] * (1 + 1e-12)
    assert bill(workload, other).activations[0] <= bill(workload, one).activations[0]


RECORDED = json.loads((Path(__file__).parent / "memory" / "torch.json").read_text(encoding="utf-8"))["steps"]


@pytest.mark.parametrize("step", RECORDED, ids=[step["name"] for step in RECORDED])
def test_a_step_needs_what_torch_was_seen_to_need(step: dict[str, Any]) -> None:
    model = zoo.build_model({"name": step["name"], **step["model"]})
    workload = Workload(
        model, step["sequence"], step["batch"], step["precision"], optimizer=step["optimizer"],
        attention=step["attention"],
    )  # fmt: skip
    footprint = bill(workload, Plan(micro_batch=step["batch"], checkpointing=step["checkpointing"]))
    seen = step["bytes"]
    for name in ("parameters", "gradients", "optimizer"):
        assert footprint.items(0)[name] == seen[name]
    # Not counted: statistics of norms, the mask, the rotary tables, and gradients inside a convolutional block.
    assert float(footprint.activations[0]) == pytest.approx(seen["activations"], rel=0.01)
    assert float((footprint.activations + footprint.working)[0]) == pytest.approx(seen["peak"], rel=0.02)


def total(name: str, sequence: int, plan: Plan, **job: Any) -> float:
    """Return the bytes of a preset's job on the fullest GPU."""
    return float(bill(Workload(zoo.find_preset(name), sequence, 512, **job), plan).total[0])


IMPOSSIBLE: list[tuple[str, int, Plan, str, dict[str, Any]]] = [
    # Model states only: parameters x bytes each / ranks that share them. Adam in 16 bit takes 16 bytes a parameter:
    # weight 2, gradient 2, optimizer 12. ZeRO-1 leaves 4 + 12/d, ZeRO-2 2 + 14/d, ZeRO-3 16/d. 1 GiB = 1.074e9 bytes.
    ("llama-2-7b", 2048, Plan(), "h100-sxm", {}),  # 6.7e9 x 16 B = 100 GiB > 80
    ("llama-2-7b", 2048, Plan(data=8), "a100-80", {}),  # replicas share nothing: 100 GiB > 80
    ("llama-2-7b", 2048, Plan(data=4, zero_stage=1), "a100-40", {}),  # 6.7e9 x 7 B = 44 GiB > 40
    ("llama-2-7b", 2048, Plan(tensor=4), "l4", {}),  # 6.7e9 x 16 B / 4 = 25 GiB > 22.5
    ("llama-3-8b", 2048, Plan(data=8, zero_stage=2), "a10g", {}),  # 8.0e9 x 3.75 B = 28 GiB > 22.5
    ("llama-2-13b", 2048, Plan(data=8), "a100-40", {}),  # 13.0e9 x 16 B = 194 GiB > 40
    ("llama-2-13b", 2048, Plan(data=8, zero_stage=1), "l40s", {}),  # 13.0e9 x 5.5 B = 67 GiB > 45
    ("llama-2-13b", 2048, Plan(data=4, zero_stage=3), "a100-40", {}),  # 13.0e9 x 4 B = 48 GiB > 40
    ("llama-2-70b", 2048, Plan(data=8, zero_stage=3), "h100-sxm", {}),  # 69e9 x 2 B = 128 GiB > 80
    ("llama-2-70b", 2048, Plan(tensor=4), "h200", {}),  # 69e9 x 16 B / 4 = 257 GiB > 140.4
    ("llama-2-70b", 2048, Plan(data=64, zero_stage=2), "h100-sxm", {}),  # 69e9 x 2.2 B = 142 GiB > 80
    ("gpt3-175b", 2048, Plan(tensor=8, pipeline=2), "a100-80", {}),  # 175e9 x 1 B = 163 GiB > 80
    ("gpt3-175b", 2048, Plan(data=16, zero_stage=3), "h200", {}),  # 175e9 x 1 B = 163 GiB > 140.4
    ("llama-3.1-405b", 2048, Plan(data=64, zero_stage=3, checkpointing="full"), "h100-sxm", {}),  # 405e9 / 4 = 94 GiB
    ("mixtral-8x7b", 2048, Plan(data=8, zero_stage=3), "h100-sxm", {}),  # 46.7e9 x 2 B = 87 GiB > 80
    ("gpt2-xl", 1024, Plan(), "t4", {}),  # 1.56e9 x 16 B = 23 GiB > 15
    ("gpt2-xl", 1024, Plan(), "v100-sxm", {"precision": "fp32"}),  # 1.56e9 x (4 + 4 + 8) B = 23 GiB > 16
    ("opt-6.7b", 2048, Plan(data=4, zero_stage=1), "v100-sxm-32", {"precision": "fp16"}),  # 6.7e9 x 7 B = 43 GiB > 32
    ("t5-11b", 512, Plan(data=4, zero_stage=2), "a100-40", {}),  # 11.3e9 x 5.5 B = 58 GiB > 40
    ("gpt-neox-20b", 2048, Plan(tensor=2), "a100-80", {}),  # 20.6e9 x 16 B / 2 = 153 GiB > 80
    # With adapters the base weights remain: 2 bytes a parameter on every rank, unless they are sharded.
    ("llama-2-13b", 512, Plan(), "a10g", {"lora_rank": 8}),  # 13.0e9 x 2 B = 24 GiB > 22.5
    ("llama-2-7b", 512, Plan(data=8), "p4", {"lora_rank": 8, "precision": "fp16"}),  # 6.7e9 x 2 B = 12.5 GiB > 7.5
    ("llama-2-70b", 512, Plan(data=8), "h100-sxm", {"lora_rank": 16}),  # 69e9 x 2 B = 128 GiB > 80
    ("llama-3.1-405b", 512, Plan(tensor=8), "h100-sxm", {"lora_rank": 16}),  # 405e9 x 2 B / 8 = 94 GiB > 80
    # Activations: layers x tokens x bytes of a token.
    # Unfused scores: 32 layers x 32 heads x 8192^2 x 2 B = 128 GiB > 80.
    ("llama-2-7b", 8192, Plan(data=64, zero_stage=3), "h100-sxm", {"attention": "eager"}),
    # Just the inputs of norms and products: 32 layers x 131072 tokens x 4 x 4096 numbers x 2 B = 128 GiB > 80.
    ("llama-3-8b", 131072, Plan(data=64, zero_stage=3), "h100-sxm", {}),
    # Logits: 64 x 1024 tokens x 50257 words x 2 B = 6 GiB, their normalised copy 12, two gradients 24: 43 GiB > 40.
    ("gpt2", 1024, Plan(micro_batch=64, checkpointing="full"), "a100-40", {}),
    # 24 layers x 16 heads x 64 x 512^2 x 5 B = 30 GiB of scores > 15.
    ("bert-large", 512, Plan(micro_batch=64), "t4", {"precision": "fp16", "attention": "eager"}),
    # Convolutions of ResNet-50 make 11.1e6 numbers of an image and norms as many: 2048 x 22e6 x 4 B = 168 GiB > 80.
    ("resnet-50", 1, Plan(micro_batch=2048), "a100-80", {"precision": "fp32", "optimizer": "momentum"}),
    # VGG-16's convolutions make 13.5e6 numbers of an image: 512 x 13.5e6 x 4 B = 26 GiB > 15.
    ("vgg-16", 1, Plan(micro_batch=512), "t4", {"precision": "fp32", "optimizer": "momentum"}),
]


@pytest.mark.parametrize(("name", "sequence", "plan", "gpu", "job"), IMPOSSIBLE)
def test_plans_that_nobody_could_run_do_not_fit(
    name: str, sequence: int, plan: Plan, gpu: str, job: dict[str, Any]
) -> None:
    assert total(name, sequence, plan, **job) > memory.usable_bytes(hardware.find_gpu(gpu))


def test_thirty_plans_are_impossible() -> None:
    assert len(IMPOSSIBLE) == 30


@pytest.mark.parametrize(
    ("name", "sequence", "plan", "gpu", "job"),
    [
        ("gpt2", 1024, Plan(micro_batch=4), "a100-40", {}),
        # nanoGPT: GPT-2 with 12 sequences a GPU, compiled.
        ("gpt2", 1024, Plan(data=8, micro_batch=12), "a100-40", {"execution": "compiled"}),
        ("llama-2-7b", 4096, Plan(data=8, zero_stage=3, checkpointing="full"), "a100-80", {}),
        # torchtitan: Llama 3 8B on eight H100 with FSDP, recomputation and a compiler.
        ("llama-3-8b", 8192, Plan(data=8, zero_stage=3, checkpointing="full"), "h100-sxm", {"execution": "compiled"}),
        ("llama-2-70b", 4096, Plan(data=64, zero_stage=3, checkpointing="full"), "a100-80", {}),
        # Megatron-LM: GPT-3 175B on tensor 8 and pipeline 8, recomputing (arXiv 2205.05198, table 3).
        (
            "gpt3-175b", 2048,
            Plan(tensor=8, pipeline=8, gradient_accumulation=64, checkpointing="selective", sequence_parallel=True),
            "a100-80", {"fused_kernels": True},
        ),
        # QLoRA's 16-bit sibling: adapters of a 7B model on one 24 GB card.
        ("llama-2-7b", 512, Plan(checkpointing="full"), "a10g", {"lora_rank": 8}),
        # NVIDIA's BERT: phase 2 in FP16 with 8 sequences on a V100 of 32 GB.
        ("bert-large", 512, Plan(data=8, micro_batch=8), "v100-sxm-32", {"precision": "fp16", "optimizer": "lamb"}),
        ("bert-large", 512, Plan(micro_batch=8), "a100-40", {}),
        # Hugging Face's run_glue: BERT base, 32 sequences of 128, on one T4.
        ("bert-base-classifier", 128, Plan(micro_batch=32), "t4", {"precision": "fp16"}),
        # torchvision's ResNet-50: 32 images a V100 in FP32; NVIDIA's: 256 images an A100 in 16 bit.
        ("resnet-50", 1, Plan(data=8, micro_batch=32), "v100-sxm", {"precision": "fp32", "optimizer": "momentum"}),
        ("resnet-50", 1, Plan(data=8, micro_batch=256), "a100-40", {"precision": "fp16", "optimizer": "momentum"}),
    ],
)  # fmt: skip
def test_plans_that_people_run_fit(name: str, sequence: int, plan: Plan, gpu: str, job: dict[str, Any]) -> None:
    assert total(name, sequence, plan, **job) < memory.usable_bytes(hardware.find_gpu(gpu))


def test_a_table_is_its_rows() -> None:
    workload = Workload(zoo.find_preset("llama-2-7b"), 2048, 64)
    rows = [Plan(data=8, zero_stage=stage, micro_batch=micro) for stage in (0, 1, 3) for micro in (1, 2, 4)]
    plans = Plans.from_plans(*rows)
    table = memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans).total
    assert np.array_equal(table, np.array([bill(workload, plan).total[0] for plan in rows]))


def test_a_job_is_billed_at_its_largest_images() -> None:
    detector = zoo.find_preset("retinanet-r50")
    fixed = detector.with_dimensions(image=640, image_width=640, largest_image=None, largest_image_width=None)
    plan = Plan(micro_batch=4)
    job: dict[str, Any] = {"precision": "fp32", "optimizer": "momentum"}
    totals = {}
    for name, model in {
        "small": fixed,
        "large": fixed.with_dimensions(image=1280, image_width=1280),
        "varied": fixed.with_dimensions(largest_image=1280),
    }.items():
        totals[name] = bill(Workload(model, 1, 4, **job), plan)
    assert totals["large"].activations[0] > 3.5 * totals["small"].activations[0]
    assert totals["varied"].activations[0] == totals["large"].activations[0]
    assert totals["varied"].cached[0] > 4 * totals["large"].cached[0] > 0
    steps = (fixed, fixed.with_dimensions(largest_image=1280))
    kernels = [
        zoo.build_sharded_graph(Workload(model, 1, 4, **job), Plans.from_plans(plan)).graph.kernels()[0]
        for model in steps
    ]
    assert (kernels[0].dims == kernels[1].dims).all()


def test_the_backward_pass_of_a_network_is_billed_at_its_fullest_moment() -> None:
    # VGG-16's last convolution comes before most activations are kept; the first of a U-Net's way up after half.
    job: dict[str, Any] = {"precision": "fp32", "optimizer": "momentum"}
    classifier = bill(Workload(zoo.find_preset("vgg-16"), 1, 8, **job), Plan(micro_batch=8))
    segmenter = bill(Workload(zoo.find_preset("unet-2d"), 1, 8, **job), Plan(micro_batch=8))
    assert segmenter.working[0] / segmenter.activations[0] > classifier.working[0] / classifier.activations[0]


def test_a_block_that_is_sharded_has_its_whole_gradient_while_it_is_reduced() -> None:
    model = zoo.find_preset("llama-2-70b")
    trained, frozen = (
        bill(
            Workload(model, 512, 8, framework="fsdp2", optimizer="momentum", lora_rank=rank),
            Plan(data=8, zero_stage=3, gradient_accumulation=2),
        ).working[0]
        for rank in (0, 8)
    )
    layer = model.hidden**2 * 2 + 2 * model.hidden * 1024 + 3 * model.hidden * model.ffn_hidden
    assert trained - frozen == pytest.approx((2 + 4) * layer, rel=0.1)


def test_quantized_weights_of_layers_take_their_bits_in_every_precision() -> None:
    model = zoo.find_preset("llama-2-7b")
    precisions: dict[Precision, float] = {"bf16": 2.0, "fp32": 4.0}
    for precision, other in precisions.items():
        job = Workload(model, 512, 8, precision, lora_rank=8, frozen_bits=4, framework="ddp")
        held = bill(job, Plan()).parameters[0]
        outside = 2 * model.vocab * model.hidden
        inside = zoo.count_parameters(replace(job, lora_rank=0)) - outside
        assert held == pytest.approx(inside * 4.5 / 8 + outside * other, rel=0.03)


@pytest.mark.parametrize(
    ("gpu", "gib"),
    # 2 channels over PCIe, 16 on H800, 24 on H100: each with a ring's buffer and both ways of a tree's, 10 MiB each.
    [("l4", 60 / 1024), ("h800-sxm", 480 / 1024), ("h100-sxm", 720 / 1024)],
)
def test_a_communicator_takes_the_channels_of_the_link(gpu: str, gib: float) -> None:
    workload = Workload(zoo.find_preset("gpt2"), 1024, 8)
    alone, together = (
        memory.context_bytes(workload, Plans.from_plans(plan), hardware.find_gpu(gpu))[0]
        for plan in (Plan(), Plan(data=8))
    )
    assert (together - alone) / GIB == pytest.approx(gib)


def test_an_all_to_all_takes_buffers_for_every_peer_of_a_node() -> None:
    # 8 H100 of a node: 7 peers with 32 channels of 10 MiB (NVIDIA/nccl, issue 1685, tells 3.3 GB with those of 2 MiB).
    workload, gpu = Workload(zoo.find_preset("mixtral-8x7b"), 4096, 64), hardware.find_gpu("h100-sxm")

    def context(expert: int) -> float:
        return float(memory.context_bytes(workload, Plans.from_plans(Plan(data=64, expert=expert)), gpu)[0])

    one = memory.channel_buffers(gpu).communicator_bytes
    assert context(8) - context(1) - one == 7 * 32 * 10 * 2**20
    assert context(8) == context(64)


def test_only_layers_of_the_library_leave_unused_gradients() -> None:
    """Only dense layers of Megatron-Core fuse the accumulation: a U-Net under NeMo has none, a decoder has."""
    for name, sequence, has in (("stable-diffusion-v2", 1, False), ("gpt2", 1024, True)):
        workload = Workload(zoo.find_preset(name), sequence, 8, "fp16", framework="nemo", gradient_precision="fp32")
        footprint = bill(workload, Plan(data=8, zero_stage=1))
        assert bool(footprint.buffers[0] > 0) is has
        assert footprint.gradients[0] == pytest.approx(2 * footprint.parameters[0], rel=0.05)


@pytest.mark.parametrize(("weights", "element"), [("autocast", 4.0), ("pure", 2.0)])
def test_full_recomputation_keeps_the_residual_stream_in_its_own_type(weights: Any, element: float) -> None:
    model = zoo.find_preset("llama-2-7b")
    job = Workload(model, 512, 4, framework="huggingface", weights=weights, lora_rank=8, frozen_bits=4)
    kept = layer_activations(job, Plan(micro_batch=4, checkpointing="full"))
    assert kept == element * 4 * 512 * model.hidden * model.layers


@pytest.mark.parametrize(
    ("preset", "version", "frozen_bits", "kept"),
    [
        ("llama-2-7b", "2.6", 16, 6.0),
        ("gpt2", "2.6", 16, 4.0),  # modeling_gpt2.py before 4.46 gave the loss 16-bit logits
        ("gpt2", "2.6", 4, 10.0),  # autocast runs the loss in FP32, and Accelerate copies the returned logits to FP32
        ("gpt2", "2.11", 16, 6.0),
    ],
)
def test_bytes_of_logits_that_hugging_face_keeps_in_pure_16_bits(
    preset: str, version: str, frozen_bits: int, kept: float
) -> None:
    adapters = {"lora_rank": 8, "frozen_bits": frozen_bits} if frozen_bits < 16 else {}
    job = Workload(
        zoo.find_preset(preset), 512, 4, framework="huggingface", framework_version=version, weights="pure", **adapters
    )
    assert layers.logit_bytes(Numerics.from_workload(job))[0] == kept


def _autocast_bert(version: str, **changes: Any) -> Workload:
    fields: dict[str, Any] = {"framework": "huggingface", "attention": "eager", **changes}
    return Workload(zoo.find_preset("bert-large"), 128, 32, "fp16", framework_version=version, **fields)


def test_old_softmaxes_keep_their_input() -> None:
    plan = Plan(micro_batch=32)
    kept = [layer_activations(_autocast_bert(version), plan) for version in ("1.10", "1.11")]
    assert kept[0] - kept[1] == 24 * 32 * 16 * 128**2 * 4.0
    fp32 = [replace(_autocast_bert(version), precision="fp32") for version in ("1.10", "1.11")]
    assert layer_activations(fp32[0], plan) - layer_activations(fp32[1], plan) == 24 * 32 * 16 * 128**2 * 4.0
    fused = [layer_activations(_autocast_bert(version, fused_kernels=True), plan) for version in ("1.10", "1.11")]
    assert fused[0] == fused[1]


@pytest.mark.parametrize(("version", "holds"), [("1.13", True), ("2.0", False)])
def test_gradients_stayed_between_steps_before_pytorch_2(version: str, holds: bool) -> None:
    footprint = bill(_autocast_bert(version), Plan(micro_batch=32))
    assert bool(footprint.gradients[0] > 0) is holds


def test_hugging_face_scores_every_token_of_an_encoder() -> None:
    model = zoo.find_preset("bert-large")
    own = Workload(model, 128, 32, "fp16", framework="ddp")
    theirs = replace(own, framework="huggingface")
    heads = [zoo.build(job, _one_shard(32)).last[0] for job in (own, theirs)]
    products = [next(op for op in head.ops if op.name == "head.logits").table.flops()[0] for head in heads]
    assert products[1] == pytest.approx(products[0] / 0.15625)


def _one_shard(micro_batch: int) -> Shards:
    one = np.ones(1, dtype=np.int64)
    return Shards(one * micro_batch, one, one, one, one * 0)


@pytest.mark.parametrize(
    ("framework", "version", "kept"),
    [("deepspeed", "2.6", 4.0), ("huggingface-deepspeed", "2.6", 2.0), ("huggingface-deepspeed", "2.7", 4.0)],
)
def test_deepspeed_runs_hugging_face_s_losses_in_16_bits(framework: Any, version: str, kept: float) -> None:
    job = Workload(zoo.find_preset("gpt2"), 512, 4, framework=framework, framework_version=version)
    assert layers.logit_bytes(Numerics.from_workload(job), returned=False)[0] == kept


@pytest.mark.parametrize(
    ("framework", "precision", "held"),
    [("ddp", "fp16", 4.0), ("ddp", "fp32", 0.0), ("mxnet", "fp16", 0.0), ("nemo", "fp16", 0.0)],
)
def test_a_loop_in_pytorch_holds_images_in_fp32(framework: Any, precision: Precision, held: float) -> None:
    job = Workload(zoo.find_preset("resnet-50"), 0, 8, precision, framework=framework)
    assert Numerics.from_workload(job).keeps_wide_images is (held > 0)
    wide = zoo.build(job, _one_shard(8)).blocks[0].activation_bytes[0]
    side = zoo.find_preset("resnet-50").get_dimensions(Images).image
    without = replace(job, framework="mxnet") if held else job
    narrow = zoo.build(without, _one_shard(8)).blocks[0].activation_bytes[0]
    assert wide - narrow == held * 8 * 3 * side**2


def _count_ops(job: Workload, suffix: str) -> int:
    blocks = zoo.build(job, _one_shard(8)).layers
    return sum(op.name.endswith(suffix) and op.phase == "forward" for block in blocks for op in block.ops)


def test_old_dense_layers_add_their_bias_apart() -> None:
    assert [_count_ops(_autocast_bert(version), ".bias") for version in ("1.11", "1.12")] == [4, 0]
    image = Workload(zoo.find_preset("resnet-50"), 0, 8, "fp16", framework="ddp", framework_version="1.11")
    assert not any(op.name.endswith(".bias") for op in zoo.build(image, _one_shard(8)).blocks[0].ops)


@pytest.mark.parametrize(("changes", "count"), [({}, 1), ({"framework": "ddp"}, 0)])
def test_hugging_face_adds_the_mask_of_an_encoder_apart(changes: dict[str, Any], count: int) -> None:
    assert _count_ops(_autocast_bert("2.6", **changes), "attention.mask") == count
