"""Transformers over images: ViT and DeiT, and Swin with its windows.

Sources: Dosovitskiy et al., arXiv 2010.11929 (section 3.1, table 1); Touvron et al., arXiv 2012.12877; Liu et al.,
arXiv 2103.14030 (section 3, without the bias of relative positions, under 0.1 % of the parameters).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilecast.graph import Block, Graph, KernelTable, Op, Shards
from tilecast.models import layers, transformer
from tilecast.models.layers import Numerics
from tilecast.spec import Floats, Model, Workload


def build(workload: Workload, shards: Shards) -> Graph:
    """The graph of a vision transformer: patches of `extra.patch` pixels of an image of `extra.image` become tokens,
    one more token is the class, read by a classifier of `extra.classes` (1000). The workload's own sequence length
    is not used."""
    model = _classifier(workload.model)
    tokens = (int(model.extra["image"]) // int(model.extra["patch"])) ** 2 + 1
    workload = replace(workload, model=model, sequence_length=tokens)
    embedding = _patches(workload, shards, learned=(tokens + 1) * model.hidden)
    return _over_images(transformer.build(workload, shards), embedding, model)


def build_swin(workload: Workload, shards: Shards) -> Graph:
    """The graph of a Swin transformer: four stages of `extra.stage1` ... `stage4` layers, whose attention stays inside
    windows of `extra.window` x `extra.window` tokens; from stage to stage four tokens merge into one of twice the
    width. `hidden` and `heads` are the first stage's."""
    model = _classifier(workload.model)
    window = int(model.extra["window"])
    side = int(model.extra["image"]) // int(model.extra["patch"])
    workload = replace(workload, model=model, sequence_length=window * window, attention="eager")
    embedding = _patches(workload, shards, learned=2 * model.hidden)
    blocks: list[Block] = []
    for stage in range(4):
        width, heads = model.hidden * 2**stage, model.heads * 2**stage
        part = replace(
            model, layers=int(model.extra[f"stage{stage + 1}"]), hidden=width, heads=heads, kv_heads=heads,
            ffn_hidden=4 * width,
        )  # fmt: skip
        staged = replace(workload, model=part)
        windows = replace(shards, micro_batch=shards.micro_batch * (side // 2**stage // window) ** 2)
        graph = transformer.build(staged, windows)
        if stage:
            blocks.append(_merge(f"stage{stage + 1}-merge", staged, windows))
        moved = windows.micro_batch.astype(float) * (window * window * width)
        numerics = Numerics.of(staged)
        shuffle = layers.pointwise("windows", numerics, moved, kernels=4, absorbed=False, backward=(1.0, 1.0))
        name = f"stage{stage + 1}-layer"
        blocks += [replace(block, name=name, ops=(*block.ops, *shuffle)) for block in graph.layers]
    return _over_images(replace(graph, layers=tuple(blocks)), embedding, model)


def _classifier(model: Model) -> Model:
    return replace(model, causal=False, extra={"classes": 1000.0, **model.extra})


def _over_images(graph: Graph, embedding: Block, model: Model) -> Graph:
    return replace(graph, first=(embedding,), host_bytes_per_sample=3.0 * model.extra["image"] ** 2)


def _patches(workload: Workload, shards: Shards, *, learned: int) -> Block:
    """A convolution of kernel and stride `patch`, and `learned` further parameters (positions, class token, norm)."""
    model, numerics = workload.model, Numerics.of(workload)
    image, patch = model.extra["image"], model.extra["patch"]
    side = image // patch
    batch = shards.micro_batch.astype(float)
    conv: dict[str, Floats | float] = {
        "batch": batch, "c_in": 3.0, "c_out": float(model.hidden), "in_d": 1.0, "in_h": image, "in_w": image,
        "k_d": 1.0, "k_h": patch, "k_w": patch, "out_d": 1.0, "out_h": side, "out_w": side, "groups": 1.0,
    }  # fmt: skip
    ops = [Op("patches", KernelTable.of("conv", numerics.matrix, **conv, direction=0.0))]
    if numerics.training:
        gradient = KernelTable.of("conv", numerics.matrix, **conv, direction=2.0)
        ops.append(Op("patches.weight-gradient", gradient, "backward"))
    embedded = batch * side**2 * model.hidden
    ops += layers.pointwise("positions", numerics, embedded, reads=2.0, backward=(1.0, 0.0))
    kept = numerics.element * (batch * 3.0 * image**2 + embedded)
    parameters = (3.0 * patch**2 + 1.0) * model.hidden + learned
    return Block("patches", 1, tuple(ops), np.full(len(shards), parameters), np.stack([kept] * 3))


def _merge(name: str, workload: Workload, shards: Shards) -> Block:
    """Patch merging into tokens of the stage's width: a norm and a dense layer over four tokens side by side."""
    numerics, width = Numerics.of(workload), workload.model.hidden
    tokens = shards.micro_batch.astype(float) * workload.sequence_length
    inputs = 2 * width
    ops = layers.pointwise("merge.gather", numerics, tokens * inputs, absorbed=False, backward=(1.0, 1.0))
    ops += layers.norm("merge.norm", numerics, tokens, inputs, rms=False)
    ops += layers.linear("merge", numerics, tokens, inputs, float(width))
    kept = numerics.element * 2 * tokens * inputs
    parameters = float(inputs * width + 2 * inputs)
    return Block(name, 1, tuple(ops), np.full(len(shards), parameters), np.stack([kept] * 3))
