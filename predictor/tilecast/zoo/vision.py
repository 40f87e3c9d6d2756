"""Transformers over images: ViT and DeiT, and Swin with its windows.

Sources: Dosovitskiy et al., arXiv 2010.11929 (section 3.1, table 1); Touvron et al., arXiv 2012.12877; Liu et al.,
arXiv 2103.14030 (section 3, without the bias of relative positions, under 0.1 % of the parameters).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilecast.graph import Block, Graph, KernelTable, Op, Shards
from tilecast.spec import Floats, Model, Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import frozen_parameters


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of a vision transformer.

    Patches of `extra.patch` pixels a side, from an image of `extra.image` (by `extra.image_width`) pixels, become
    tokens beside `extra.class_tokens` (1). A classifier of `extra.classes` (1000) reads them, after one more layer with
    `extra.pooling`. Positions are learned unless `extra.learned_positions` is 0; the share `extra.seen_share` (1) of
    the patches is not masked. The workload's own sequence length is not used.
    """
    model = _classifier(workload.model)
    rows, columns = grid(model)
    added = int(model.extra.get("class_tokens", 1.0))
    tokens = max(1, round(rows * columns * model.extra.get("seen_share", 1.0))) + added
    workload = replace(workload, model=model, sequence_length=tokens)
    learned = (rows * columns + added) * int(model.extra.get("learned_positions", 1.0)) + added
    graph = _over_images(transformer.build(workload, shards), patches(workload, shards, learned * model.hidden), model)
    if not model.extra.get("pooling"):
        return graph
    pooling = transformer.build(replace(workload, model=replace(model, layers=1)), shards).layers
    return replace(graph, last=(*(replace(block, name="pooling") for block in pooling), *graph.last))


def grid(model: Model) -> tuple[int, int]:
    """Return the rows and columns of patches of an image.

    Patches overlap if `extra.patch_stride` is smaller than they are.
    """
    patch = model.extra["patch"]
    stride = model.extra.get("patch_stride", patch)
    sides = model.extra["image"], model.extra.get("image_width", model.extra["image"])
    rows, columns = (max(1, int((side - patch) // stride) + 1) for side in sides)
    return rows, columns


def build_swin(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of a Swin transformer.

    Four stages have `extra.stage1` ... `stage4` layers. Their attention stays inside windows of `extra.window` x
    `extra.window` tokens; the image is padded to whole windows, and no window is larger than it. From stage to stage
    four tokens merge into one of twice the width. `hidden` and `heads` are those of the first stage.
    """
    model = _classifier(workload.model)
    whole = grid(model)
    workload = replace(workload, model=model, attention="eager")
    embedding = patches(workload, shards, learned=2 * model.hidden)
    blocks: list[Block] = []
    for stage in range(4):
        width, heads = model.hidden * 2**stage, model.heads * 2**stage
        part = replace(
            model, layers=int(model.extra[f"stage{stage + 1}"]), hidden=width, heads=heads, kv_heads=heads,
            ffn_hidden=4 * width,
        )  # fmt: skip
        rows, columns = (max(1, side // 2**stage) for side in whole)
        window = min(int(model.extra["window"]), rows, columns)
        staged = replace(workload, model=part, sequence_length=window * window)
        windows = replace(shards, micro_batch=shards.micro_batch * -(-rows // window) * -(-columns // window))
        graph = transformer.build(staged, windows)
        if stage:
            blocks.append(_merge(f"stage{stage + 1}-merge", staged, windows))
        moved = windows.micro_batch.astype(float) * (staged.sequence_length * width)
        numerics = Numerics.of(staged)
        shuffle = layers.pointwise("windows", numerics, moved, kernels=4, absorbed=False, backward=(1.0, 1.0))
        name = f"stage{stage + 1}-layer"
        blocks += [replace(block, name=name, ops=(*block.ops, *shuffle)) for block in graph.layers]
    return _over_images(replace(graph, layers=tuple(blocks)), embedding, model)


def _classifier(model: Model) -> Model:
    return replace(model, causal=False, extra={"classes": 1000.0, **model.extra})


def _over_images(graph: Graph, embedding: Block, model: Model) -> Graph:
    image = model.extra["image"]
    pixels = image * model.extra.get("image_width", image) * model.extra.get("image_channels", 3.0)
    return replace(graph, first=(embedding,), host_bytes_per_sample=pixels)


def patches(workload: Workload, shards: Shards, learned: int) -> Block:
    """Build the embedding of patches, a convolution of kernel `extra.patch`.

    It reads `extra.patch_depth` (1) images at once, and holds `learned` further parameters (positions, class token,
    norm).
    """
    model, numerics = workload.model, Numerics.of(workload)
    image, patch = model.extra["image"], model.extra["patch"]
    width, channels = model.extra.get("image_width", image), model.extra.get("image_channels", 3.0)
    channels *= model.extra.get("patch_depth", 1.0)
    rows, columns = grid(model)
    batch = shards.micro_batch.astype(float)
    conv: dict[str, Floats | float] = {
        "batch": batch, "c_in": channels, "c_out": float(model.hidden), "in_d": 1.0, "in_h": image, "in_w": width,
        "k_d": 1.0, "k_h": patch, "k_w": patch, "out_d": 1.0, "out_h": float(rows), "out_w": float(columns),
        "groups": 1.0,
    }  # fmt: skip
    ops = [Op("patches", KernelTable.of("conv", numerics.matrix, **conv, direction=0.0))]
    if numerics.training and not numerics.frozen:
        gradient = KernelTable.of("conv", numerics.matrix, **conv, direction=2.0)
        ops.append(Op("patches.weight-gradient", gradient, "backward"))
    embedded = batch * rows * columns * model.hidden
    ops += layers.pointwise("positions", numerics, embedded, reads=2.0, backward=(1.0, 0.0))
    activation_bytes = numerics.element * (batch * channels * image * width + embedded)
    parameters = np.full(len(shards), (channels * patch**2 + 1.0) * model.hidden + learned)
    frozen = frozen_parameters(workload, parameters)
    return Block("patches", 1, tuple(ops), parameters, np.stack([activation_bytes] * 3), frozen_parameters=frozen)


def _merge(name: str, workload: Workload, shards: Shards) -> Block:
    """Build the merging of patches into tokens of the stage's width.

    It is a norm and a dense layer over four tokens side by side.
    """
    numerics, width = Numerics.of(workload), workload.model.hidden
    tokens = shards.micro_batch.astype(float) * workload.sequence_length
    inputs = 2 * width
    ops = layers.pointwise("merge.gather", numerics, tokens * inputs, absorbed=False, backward=(1.0, 1.0))
    ops += layers.norm("merge.norm", numerics, tokens, inputs, rms=False)
    ops += layers.linear("merge", numerics, tokens, inputs, float(width), trainable=True)
    activation_bytes = numerics.element * 2 * tokens * inputs
    parameters = float(inputs * width + 2 * inputs)
    return Block(name, 1, tuple(ops), np.full(len(shards), parameters), np.stack([activation_bytes] * 3))
