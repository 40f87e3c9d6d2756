"""Laws of models with towers of which a part is not trained (`training.frozenParts`)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import search, zoo
from tilecast.api.training_job import read_request
from tilecast.graph import Graph, Shards
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.search import enumerate_plans
from tilecast.spec import FROZEN_PARTS, Framework, FrozenPart, SpecError, Workload
from tilecast.zoo import huggingface
from tilecast.zoo.towers import list_parts

VISION = {"model_type": "qwen3_vl", "hidden_size": 256, "intermediate_size": 1024, "depth": 4, "num_heads": 4,
          "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
          "deepstack_visual_indexes": [1, 2]}  # fmt: skip
TEXT = {"model_type": "qwen3_vl_moe_text", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "moe_intermediate_size": 256,
        "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False}  # fmt: skip
CONFIG = {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"],
          "text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": False}  # fmt: skip
MODEL = huggingface.model(CONFIG)
PARTS = list_parts(MODEL)
SETS = [
    tuple(part for part in FROZEN_PARTS if part in chosen)
    for number in range(len(PARTS))
    for chosen in itertools.combinations(PARTS, number)
]
"""Every set of parts that leaves one to train."""
JOB = Workload(MODEL, 1024, 16, "bf16", framework="megatron")


def build(workload: Workload) -> Graph:
    one = np.ones(1, np.int64)
    return zoo.build(workload, Shards(one, one, one, one, sequence_parallel=0 * one))


def pool(gpus: int) -> Pool:
    return Pool("p", find_gpu("h100-sxm"), gpus, 1, find_link("nvlink4"), find_link("efa-3200"))


def request(training: dict[str, Any], config: dict[str, Any] = CONFIG) -> Workload:
    stated = {"globalBatchSize": 16, "sequenceLength": 1024, **training}
    spec = {"model": {"huggingFace": {"config": config}}, "training": stated}
    return read_request(
        {"apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "job"}, "spec": spec}
    ).workload


def test_a_model_has_the_parts_that_its_towers_make() -> None:
    assert PARTS == ("vision", "projector", "language")
    assert list_parts(replace(MODEL, towers=())) == ()
    speech = huggingface.model({**CONFIG, "vision_config": VISION})
    assert list_parts(speech) == PARTS


@pytest.mark.parametrize("frozen", SETS)
def test_frozen_weights_have_no_gradient_and_nothing_else_is_frozen(frozen: tuple[FrozenPart, ...]) -> None:
    built, whole = build(replace(JOB, frozen_parts=frozen)), build(JOB)
    for block, trained in zip(built.blocks, whole.blocks, strict=True):
        part = "language"
        if block.name.startswith("tower1-"):
            part = "projector" if block.name.endswith("projector") else "vision"
        names = [op.name for op in block.ops]
        assert block.parameters.tolist() == trained.parameters.tolist()
        if part not in frozen:
            assert names == [op.name for op in trained.ops] and not block.frozen_parameters.any()
            assert (block.activation_bytes == trained.activation_bytes).all()
            continue
        assert (block.frozen_parameters == block.parameters).all()
        assert not [name for name in names if name.endswith(("weight-gradient", "bias-gradient"))]
        starts = part == "vision" or block.name == "embedding" or (part == "projector" and "vision" in frozen)
        assert any(op.phase == "backward" for op in block.ops) is not starts
        if starts:
            assert not block.activation_bytes.any()
        forward = [op.name for op in trained.ops if op.phase == "forward"]
        assert [op.name for op in block.ops if op.phase == "forward"] == forward


def test_nothing_frozen_is_the_job_itself() -> None:
    assert request({}) == request({"frozenParts": []}) and request({}).frozen_parts == ()


@pytest.mark.parametrize("framework", ["megatron", "fsdp2", "deepspeed", "ddp", "huggingface", "torchtitan"])
@pytest.mark.parametrize("gpus", [1, 8])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_what_is_frozen_makes_no_plan_slower_or_larger(framework: Framework, gpus: int, data: st.DataObject) -> None:
    job = replace(JOB, framework=framework, precision=data.draw(st.sampled_from(["bf16", "fp32"])))
    cluster = pool(gpus=gpus)
    more = data.draw(st.sampled_from([chosen for chosen in SETS if chosen]))
    less = data.draw(st.sampled_from([chosen for chosen in SETS if set(chosen) < set(more)]))
    plans = enumerate_plans(job, cluster)
    before, after = (search.price(replace(job, frozen_parts=chosen), plans, cluster) for chosen in (less, more))
    # Zero-bubble schedules fill the wait for other stages with gradients of weights, of which fewer are left.
    slack = np.where(plans.schedule > 0, 5e-3, 1e-9)
    assert (after.step_s <= before.step_s * (1 + slack)).all()
    assert (after.memory_bytes <= before.memory_bytes * (1 + 1e-9)).all()


def test_a_frozen_language_model_leaves_states_of_its_projector_alone() -> None:
    cluster = pool(gpus=8)
    job = replace(JOB, frozen_parts=("vision", "language"))
    plans = enumerate_plans(job, cluster)
    sharded = zoo.build_sharded_graph(job, plans)
    projector = sum(float(b.parameters[0]) * b.repeat for b in build(job).blocks if b.name.endswith("projector"))
    trained = sharded.held_parameters(plans)[0] * sharded.trainable_fraction(plans)
    assert trained[plans.tensor == 1] == pytest.approx(projector)
    own = sharded.held_parameters(plans)[1] * sharded.trainable_fraction_of_shards(plans)
    alone = (plans.tensor == 1) & (plans.context == 1)
    assert own[alone] == pytest.approx(projector / plans.data[alone], rel=1e-6)
    dense, experts = sharded.trainable_fractions(plans)
    assert (dense > 0).all() and not experts.any()


@pytest.mark.parametrize(
    ("training", "config", "problem"),
    [
        ({"frozenParts": ["audio"]}, CONFIG, "has no part audio; use parts among vision, projector, language"),
        ({"frozenParts": ["vision", "projector", "language"]}, CONFIG, "nothing is trained; leave one out"),
        ({"frozenParts": ["vision"]}, {**TEXT, "model_type": "qwen3_moe"}, "has no towers that are read"),
        ({"frozenParts": ["vision"], "loraRank": 8}, CONFIG, "leave one of them out"),
        ({"frozenParts": ["layers"]}, CONFIG, "frozenParts"),
    ],
)
def test_parts_that_cannot_be_frozen_are_refused(
    training: dict[str, Any], config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SpecError) as caught:
        request(training, config)
    assert problem in str(caught.value) and "\n" not in str(caught.value)
