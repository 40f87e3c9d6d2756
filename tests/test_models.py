"""Published models have their published sizes, and their FLOPs are the closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import models
from tilecast.graph import Shards
from tilecast.spec import Model, SpecError, Workload

# Parameters in millions as each model's authors publish them (model card or paper; torchvision for images).
PUBLISHED = {
    "gpt2": 124.4,
    "gpt2-medium": 354.8,
    "gpt2-large": 774.0,
    "gpt2-xl": 1557.6,
    "llama-2-7b": 6738.4,
    "llama-2-13b": 13015.9,
    "llama-2-70b": 68976.6,
    "llama-3-8b": 8030.3,
    "llama-3-70b": 70553.7,
    "llama-3.1-405b": 405853.4,
    "llama-3.2-1b": 1235.8,
    "mistral-7b": 7241.7,
    "tinyllama-1.1b": 1100.0,
    "qwen2.5-7b": 7615.6,
    "qwen2.5-32b": 32763.9,
    "qwen3-8b": 8190.7,
    "gemma-2b": 2506.2,
    "gemma-7b": 8537.7,
    "opt-1.3b": 1315.8,
    "opt-13b": 12853.5,
    "bloom-560m": 559.2,
    "bloom": 176247.3,
    "gpt-j-6b": 6050.9,
    "gpt-neox-20b": 20554.6,
    "falcon-7b": 6921.7,
    "mpt-7b": 6649.3,
    "mixtral-8x7b": 46702.8,
    "qwen3-235b-a22b": 235093.6,
    "gpt-oss-120b": 116829.2,
    "bert-large": 336.2,
    "t5-v1.1-small": 77.0,
    "t5-v1.1-large": 783.2,
    "t5-v1.1-xxl": 11135.3,
    "bart-large": 406.3,
    "resnet-18": 11.69,
    "resnet-34": 21.80,
    "resnet-50": 25.56,
    "resnet-101": 44.55,
    "resnet-152": 60.19,
    "resnext101-32x4d": 44.18,
    "se-resnext101-32x4d": 48.96,
    "vgg-16": 138.36,
    "vgg-19": 143.67,
}

ONE = np.ones(1, dtype=np.int64)
WHOLE = Shards(ONE, ONE, ONE, ONE, ONE * 0)


def flops(workload: Workload) -> float:
    """FLOPs of the matrix work of one pass over one sample."""
    graph = models.build(workload, WHOLE)
    return sum(
        block.repeat * op.count * float(op.table.flops()[0])
        for block in graph.blocks
        for op in block.ops
        if op.table.kind[0] <= 2
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    model = models.preset(name)
    workload = Workload(model, 128 if model.vocab else 1, 1)
    assert models.parameters(workload) / 1e6 == pytest.approx(PUBLISHED[name], rel=0.004)


@given(
    layers=st.integers(1, 8),
    heads=st.sampled_from([4, 8, 16]),
    head_dim=st.sampled_from([32, 64, 128]),
    sequence=st.sampled_from([128, 512, 2048]),
    batch=st.integers(1, 4),
)
def test_gpt_forward_flops_are_the_closed_form(
    layers: int, heads: int, head_dim: int, sequence: int, batch: int
) -> None:
    """24 b s h^2 + 4 b s^2 h per layer and 2 b s h V for the head (arXiv 2104.04473)."""
    hidden, vocab = heads * head_dim, 1000
    model = Model(
        "gpt", "decoder", layers, hidden, heads, heads, head_dim, 4 * hidden, vocab, positions=sequence, causal=True
    )
    workload = Workload(model, sequence, batch, "fp16", training=False, attention="eager")
    closed = layers * (24 * sequence * hidden**2 + 4 * sequence**2 * hidden) + 2 * sequence * hidden * vocab
    assert flops(workload) == pytest.approx(closed)


def test_flash_attention_skips_what_a_causal_mask_hides() -> None:
    model = models.preset("gpt2")
    eager, flash = (
        flops(Workload(model, 1024, 1, "fp16", training=False, attention=kind)) for kind in ("eager", "flash")
    )
    hidden_half = model.layers * 2 * 1024**2 * model.hidden
    assert eager - flash == pytest.approx(hidden_half, rel=0.01)


@pytest.mark.parametrize("name", ["llama-2-7b", "bert-large", "resnet-50", "mixtral-8x7b"])
def test_backward_is_twice_forward(name: str) -> None:
    model = models.preset(name)
    sequence = 512 if model.vocab else 1
    forward = flops(Workload(model, sequence, 1, "fp16", training=False, attention="eager"))
    both = flops(Workload(model, sequence, 1, "fp16", attention="eager"))
    # The first convolution has no gradient of its input.
    assert both == pytest.approx(3 * forward, rel=0.01)


def test_resnet_50_forward_is_four_gigamacs() -> None:
    workload = Workload(models.preset("resnet-50"), 1, 1, "fp16", training=False)
    assert flops(workload) / 2e9 == pytest.approx(4.1, rel=0.02)


@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("name", ["gpt3-1.3b", "llama-2-7b", "llama-2-70b"])
def test_tensor_parallel_ranks_share_the_matrix_work(name: str, tensor: int) -> None:
    model = models.preset(name)
    workload = Workload(model, 2048, 1, "bf16")
    shards = Shards(ONE, ONE * tensor, ONE, ONE, ONE * 0)
    work = sum(
        block.repeat * op.count * float(op.table.flops()[0])
        for block in models.build(workload, shards).blocks
        for op in block.ops
        if op.table.kind[0] <= 2
    )
    assert work * tensor == pytest.approx(flops(workload), rel=1e-9)


def test_columns_equal_one_row_at_a_time() -> None:
    """The graph of many shards is, column by column, the graph of each shard alone."""
    workload = Workload(models.preset("llama-2-7b"), 2048, 8, "bf16")
    micro, tensor = (grid.ravel() for grid in np.meshgrid([1, 2, 4], [1, 2, 8]))
    many = models.build(workload, Shards(micro, tensor, micro * 0 + 1, micro * 0 + 1, (tensor > 1).astype(np.int64)))
    for index in range(len(micro)):
        alone = models.build(
            workload,
            Shards(micro[[index]], tensor[[index]], ONE, ONE, (tensor[[index]] > 1).astype(np.int64)),
        )
        for block, single in zip(many.blocks, alone.blocks, strict=True):
            assert np.broadcast_to(block.parameters, len(micro))[index] == single.parameters[0]
            for op, lone in zip(block.ops, single.ops, strict=True):
                rows = op.table.dims if len(op.table) == len(micro) else np.repeat(op.table.dims, len(micro), axis=0)
                assert (rows[index] == lone.table.dims[0]).all(), op.name


def test_unknown_preset_offers_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean llama-2-7b"):
        models.preset("lama-2-7b")


def test_presets_are_many_and_distinct() -> None:
    assert len({model.name for model in models.presets().values()}) >= 60


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"family": "rnn"}, "model.family"),
        ({"hidden": 0}, "model.hidden"),
        ({"heads": 7}, "model.heads"),
        ({"kv_heads": 3}, "model.kvHeads"),
    ],
)
def test_impossible_dimensions_name_the_field(change: dict[str, object], field: str) -> None:
    table = {"name": "x", "family": "decoder", "layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
    with pytest.raises(SpecError) as caught:
        models.model_from({**table, **change})
    assert caught.value.field == field
