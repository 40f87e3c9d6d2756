"""Diffusion transformers of diffusers: kernels and activations of their blocks, keys of a config, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilecast import search, zoo
from tilecast.advice.enumeration import enumerate_partial_plan
from tilecast.graph import Block, Graph, KernelTable, Op, Shards
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.recomputation import CHECKPOINTING
from tilecast.render.launch import LaunchSetting, check_launchable, write_launch
from tilecast.search import PlanLimits
from tilecast.spec import PartialPlan, Plan, SpecError, Workload
from tilecast.zoo import huggingface

PUBLISHED = json.loads((Path(__file__).parent / "configs.json").read_text())
DIT = "facebook/DiT-XL-2-256/transformer"
PIXART = "PixArt-alpha/PixArt-XL-2-1024-MS/transformer"
COG2, COG5 = "THUDM/CogVideoX-2b/transformer", "THUDM/CogVideoX-5b/transformer"
COG15 = "THUDM/CogVideoX1.5-5B/transformer"
WAN = "Wan-AI/Wan2.1-T2V-14B-Diffusers/transformer"
WAN_IMAGE = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers/transformer"
SD3, SD35 = "stabilityai/stable-diffusion-3-medium/transformer", "stabilityai/stable-diffusion-3.5-medium/transformer"
FLUX = "black-forest-labs/FLUX.1-dev/transformer"
ONE = np.ones(1, dtype=np.int64)
BF16 = 2.0


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**PUBLISHED[name]["config"], **changes}


def graph(name: str, **changes: Any) -> Graph:
    workload = Workload(huggingface.model(config(name, **changes)), 1, 1)
    return zoo.build(workload, Shards(ONE, ONE, ONE, ONE, ONE * 0))


def block(name: str, **changes: Any) -> Block:
    return graph(name, **changes).layers[0]


def named(part: Block, name: str) -> list[Op]:
    """Return the kernels of that name in a forward pass, once for each time that they run."""
    return [op for op in part.ops if op.name == name for _ in range(int(op.count))]


def activation_bytes(part: Block) -> float:
    return float(part.activation_bytes[0, 0])


@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if "_class_name" in one["config"]])
def test_parameters_are_those_of_diffusers(name: str) -> None:
    """SD3 once had 1.5 % too many, for the text after its last block, and FLUX.1 0.1 % too few, for guidance."""
    assert zoo.count_parameters(Workload(huggingface.model(config(name)), 1, 1)) == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize("dual", [range(13), range(24)])
def test_the_last_layer_of_sd3_drops_the_text(dual: range) -> None:
    """JointTransformerBlock with `context_pre_only`: two modulations of six, and no output and no MLP for the text.

    This also applies where the last layer attends twice.
    """
    built = graph(SD35, dual_attention_layers=list(dual))
    last = built.layers[-1]
    assert last.name == "last-layer" and sum(part.repeat for part in built.layers) == 24
    assert len(named(last, "query-key-norm")) == (6 if 23 in dual else 4)
    before, width = built.layers[0 if 23 in dual else 1], 1536
    modulations, output, mlp = 4 * (width**2 + width), width**2 + width, 8 * width**2 + 5 * width
    assert before.parameters[0] - last.parameters[0] == modulations + output + mlp
    assert activation_bytes(last) < activation_bytes(before)


@pytest.mark.parametrize(
    ("name", "norm", "rows", "width", "norms", "rotations"),
    [
        (DIT, "", 0, 0, 0, 0),
        (PIXART, "", 0, 0, 0, 0),
        (COG2, "layernorm", 30 * (17550 + 226), 64, 2, 0),
        (COG5, "layernorm", 48 * (17550 + 226), 64, 2, 3),
        (WAN, "rmsnorm", 32760, 5120, 4, 3),
        (WAN_IMAGE, "rmsnorm", 32760, 5120, 5, 3),
        (SD3, "", 0, 0, 0, 0),
        (SD35, "rmsnorm", 24 * 4096, 64, 6, 0),
        (FLUX, "rmsnorm", 24 * 4096, 128, 4, 6),
    ],
)
def test_queries_and_keys_are_normed_and_rotated_where_the_model_does_so(
    name: str, norm: str, rows: float, width: float, norms: int, rotations: int
) -> None:
    """CogVideoX norms each head, and Wan all heads together, in either attention; DiT, PixArt and SD3 do not.

    A rotation is three kernels.
    """
    part = block(name)
    qk_norms = named(part, "query-key-norm")
    assert len(qk_norms) == norms
    assert len(named(part, "rotary")) == rotations
    if qk_norms:
        same = KernelTable.from_dimensions(norm, "bf16", rows=np.array([float(rows)]), cols=float(width), backward=0.0)
        assert qk_norms[0].table.kind[0] == same.kind[0]
        assert qk_norms[0].table.dims[0].tolist() == same.dims[0].tolist()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        # Beside the 20 tensors of tokens x width of a DiT block: CogVideoX the inputs of two norms; PixArt the query's
        # input, query and input of the output of a second attention, whose keys and values are of the text.
        (DIT, 0.0),
        (COG2, 2.0),
        (PIXART, 3.0 + 2 * 300 / 4096),
        # Wan's RMS norms keep two tensors each, over tokens and over the text; its own norm before the text one.
        (WAN, 4.0 + 3.0 + 1.0 + 2.0 + 4 * 512 / 32760 - 8 * (1 - 13824 / (4 * 5120))),
    ],
)
def test_a_block_keeps_what_its_backward_pass_reads_once(name: str, more: float) -> None:
    """Count the tensors of figure 3 of Peebles and Xie.

    These are two norms and their inputs, the input of query, key and value, these three, the outputs' inputs, the
    gated tensors, and twice the MLP of four widths.
    """
    extra = huggingface.model(config(name)).document()["extra"]
    tokens = extra["image_tokens"] + (extra["text_tokens"] if extra.get("joined") else 0.0)
    vectors = 4
    assert activation_bytes(block(name)) / (BF16 * extra["width"]) == pytest.approx((20 + more) * tokens, abs=vectors)


def test_a_video_from_an_image_attends_to_it_besides() -> None:
    """The image adds 257 states of CLIP, their own keys and values, and an embedding of two norms and two dense layers.

    Source: diffusers, transformer_wan.py, WanImageEmbedding.
    """
    plain, seeing = graph(WAN), graph(WAN_IMAGE)
    assert seeing.layers[0].parameters[0] - plain.layers[0].parameters[0] == 2 * (5120 * 5120 + 5120) + 5120
    embedder = 2 * 1280 + 1280 * 1280 + 1280 + 1280 * 5120 + 5120 + 2 * 5120
    wider_patches = 20 * 4 * 5120
    assert seeing.first[0].parameters[0] - plain.first[0].parameters[0] == embedder + wider_patches
    scores = [op for op in seeing.layers[0].ops if op.name.startswith("attention") and op.phase == "forward"]
    assert {257.0, 512.0, 32760.0} <= {float(size) for op in scores for size in op.table.dims.ravel()}
    assert activation_bytes(seeing.layers[0]) > activation_bytes(plain.layers[0])
    assert (
        graph(WAN_IMAGE, image_dim=None, added_kv_proj_dim=None).layers[0].parameters[0]
        == plain.layers[0].parameters[0]
    )


def test_patches_of_several_frames_are_fewer_and_longer() -> None:
    """CogVideoX 1.5 pads 21 frames of latents to 22 and reads two at once."""
    extra = huggingface.model(config(COG15)).document()["extra"]
    assert (extra["image_tokens"], extra["patch_values"]) == (11 * 48 * 85, 2 * 2 * 2 * 16)
    assert huggingface.model(config(COG15, patch_size_t=None)).document()["extra"]["image_tokens"] == 21 * 48 * 85


@pytest.mark.parametrize(("name", "dense"), [(DIT, True), (COG5, True), (PIXART, False), (WAN, False)])
def test_only_models_without_a_shared_table_end_in_a_dense_layer_over_the_time(name: str, dense: bool) -> None:
    (head,) = graph(name).last
    rows = [float(op.table.dims[0, 1]) for op in head.ops if op.table.kind[0] == 0 and op.phase == "forward"]
    assert (1.0 in rows) is dense, rows


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (WAN, {"text_dim": None}, "config.json.text_dim: must be positive beside text_tokens 512; state it"),
        (COG5, {"text_embed_dim": None}, "config.json.text_embed_dim: must be positive beside text_tokens 226"),
        (PIXART, {"caption_channels": None}, "config.json.caption_channels: must be positive beside text_tokens 300"),
        ("stable-diffusion-v1-5/unet", {"cross_attention_dim": None}, "config.json.cross_attention_dim: must be pos"),
        (DIT, {"norm_type": "layer_norm"}, "config.json.norm_type: 'layer_norm' is not supported; ada_norm_zero and"),
        (DIT, {"norm_type": None}, "config.json.norm_type: is missing; ada_norm_zero and ada_norm_single are read"),
    ],
)
def test_what_a_config_lacks_or_means_otherwise_is_one_line(name: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        huggingface.model(config(name, **changes))
    assert str(caught.value).startswith(problem) and "\n" not in str(caught.value)


def test_a_model_of_classes_needs_no_text() -> None:
    assert huggingface.model(config(DIT, caption_channels=None)).document()["extra"]["text_tokens"] == 0


def pool(gpu: str = "h200") -> Pool:
    link = find_link("nvlink4")
    return Pool(gpu, find_gpu(gpu), gpus_per_node=8, max_nodes=1, intra=link, inter=link)


def test_blocks_are_recomputed_whole_or_not_at_all() -> None:
    """Selective recomputation would run attention again and save no memory."""
    workload = Workload(huggingface.model(config(WAN)), 1, 8)
    plans = search.find(workload, pool(), PlanLimits(gpus=8)).plans
    assert {CHECKPOINTING[mode] for mode in plans.checkpointing} == {"none", "full"}
    assert set(enumerate_partial_plan(workload, 8, PartialPlan(data=8), "--plan").checkpointing.tolist()) == {0, 2}
    problem = "has nothing that selective recomputation would save memory of; use none or full"
    with pytest.raises(SpecError, match=problem):
        enumerate_partial_plan(workload, 8, PartialPlan(data=8, checkpointing="selective"), "--plan")
    with pytest.raises(SpecError, match="^training.activationCheckpointing: .*" + problem):
        search.find(Workload(workload.model, 1, 8, checkpointing="selective"), pool(), PlanLimits(gpus=8))


def test_norms_and_rotations_take_time_and_memory() -> None:
    """Without its norms of queries and keys and without its rotation, Wan is faster and smaller."""
    whole = huggingface.model(config(WAN))
    bare = whole.with_dimensions(query_key_norm=False, rotates=False)
    plan = PartialPlan(data=8, zero_stage=3, checkpointing="full")
    seconds, bytes_ = [], []
    for model in (whole, bare):
        workload = Workload(model, 1, 8)
        prices = search.price(workload, enumerate_partial_plan(workload, 8, plan, "--plan"), pool())
        seconds.append(float(prices.step_s[0]))
        bytes_.append(activation_bytes(zoo.build(workload, Shards(ONE, ONE, ONE, ONE, ONE * 0)).layers[0]))
    assert 1.01 < seconds[0] / seconds[1] < 1.5
    assert bytes_[0] - bytes_[1] == pytest.approx(BF16 * 5120 * (6 * 32760 + 2 * 512))


@pytest.mark.parametrize(
    ("name", "lists"),
    [
        (WAN, "model.blocks"),
        (DIT, "model.transformer_blocks"),
        (COG5, "model.transformer_blocks"),
        (SD3, "model.transformer_blocks"),
        (FLUX, "[*model.transformer_blocks, *model.single_transformer_blocks]"),
    ],
)
def test_launch_lines_name_the_lists_of_blocks_that_diffusers_has(name: str, lists: str) -> None:
    workload = Workload(huggingface.model(config(name)), 1, 8)
    plan = Plan(data=8, zero_stage=3, checkpointing="full")
    written = write_launch("fsdp2", LaunchSetting("job", workload, plan, "h200", 1, 8, 1.0)).script
    assert written.count(f"for layer in {lists}:") == 2
    assert not any(
        "AutoModel" in line
        for line in write_launch("accelerate", LaunchSetting("job", workload, plan, "h200", 1, 8, 1.0)).script
    )
    with pytest.raises(
        SpecError, match=f"trainer trains no .* Transformers builds no model of family {workload.model.family}"
    ):
        check_launchable("trainer", workload)


def adapted(name: str, rank: int, **how: Any) -> Graph:
    workload = Workload(huggingface.model(config(name)), 1, 1, "bf16", lora_rank=rank, **how)
    return zoo.build(workload, Shards(ONE, ONE, ONE, ONE, ONE * 0))


@pytest.mark.parametrize("name", [COG2, FLUX])
def test_adapters_freeze_the_weights_of_a_diffusion_transformer(name: str) -> None:
    """Frozen weights have no gradient products; adapters of rank r add r (inputs + outputs) to each dense layer."""

    def count(built: Graph, column: str) -> float:
        return sum(float(part.repeat * getattr(part, column)[0]) for part in built.blocks)

    whole, small, large = (adapted(name, rank) for rank in (0, 8, 16))
    weights, once, twice = (count(built, "parameters") for built in (whole, small, large))
    assert 0 < once - weights == pytest.approx((twice - weights) / 2)
    assert count(small, "frozen_parameters") == pytest.approx(weights)
    assert all(op.name != "linear.weight-gradient" for part in small.blocks for op in part.ops)


@pytest.mark.parametrize("name", [COG2, FLUX])
def test_dora_keeps_the_outputs_that_it_scales_in_a_diffusion_transformer(name: str) -> None:
    """An adapter of rank r adds r (inputs + outputs) parameters, and its magnitudes as many as it has outputs."""
    lora, dora = (adapted(name, 8, dora=one) for one in (False, True))
    for plain, scaled in zip(lora.blocks, dora.blocks, strict=True):
        sums = [op.table.groups()[0][2]["elements"][0] for op in plain.ops if op.name.endswith(".add")]
        assert float(scaled.activation_bytes[0, 0] - plain.activation_bytes[0, 0]) == pytest.approx(4 * sum(sums))
        assert (scaled.copied_bytes[0] > 0) == (scaled.parameters[0] > plain.parameters[0]) == bool(sums)
        assert float(scaled.frozen_parameters[0]) == float(plain.frozen_parameters[0])


def test_quantized_weights_of_a_diffusion_transformer_are_refused() -> None:
    with pytest.raises(SpecError, match=r"training\.quantization"):
        adapted(COG2, 8, frozen_bits=4)
