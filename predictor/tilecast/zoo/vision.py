"""Transformers over images: ViT and DeiT, and Swin with its windows.

Sources: Dosovitskiy et al., arXiv 2010.11929 (section 3.1, table 1); Touvron et al., arXiv 2012.12877; Liu et al.,
arXiv 2103.14030 (section 3, without the bias of relative positions, under 0.1 % of the parameters).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilecast.graph import Block, Graph, KernelTable, Op, Shards
from tilecast.model import Model, numbered_field
from tilecast.spec import Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import build_uniform_block


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Vision(Transformer):
    """Dimensions of a vision transformer."""

    image: int
    """Height of an image, in pixels."""
    image_width: int | None = None
    """Width of an image in pixels. None for a square image."""
    image_channels: int = 3
    """Numbers of a pixel."""
    patch: int
    """Side of a patch, in pixels."""
    patch_stride: int | None = None
    """Distance between patches in pixels. Patches overlap if it is less than their side. None for their side."""
    patch_depth: int = 1
    """Number of images that a patch reads."""
    seen_share: float = 1.0
    """Share of the patches that are not masked."""
    class_tokens: int = 1
    """Number of tokens besides those of patches."""
    learned_positions: bool = True
    pooling: bool = False
    """Whether an attention-pooling layer precedes the classifier."""
    classes: int = 1000

    @property
    def width_pixels(self) -> int:
        """Width of an image, in pixels."""
        return self.image if self.image_width is None else self.image_width

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of an image."""
        stride = self.patch if self.patch_stride is None else self.patch_stride
        rows, columns = (max(1, (side - self.patch) // stride + 1) for side in (self.image, self.width_pixels))
        return rows, columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Swin(Vision):
    """Dimensions of a Swin transformer."""

    window: int
    """Side of the windows that attention stays in, in tokens."""
    stages: tuple[int, int, int, int] = numbered_field("stage")


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a vision transformer with its classifier."""
    model, dims = replace(workload.model, causal=False), workload.model.get_dimensions(Vision)
    rows, columns = dims.grid
    added = dims.class_tokens
    tokens = max(1, round(rows * columns * dims.seen_share)) + added
    workload = replace(workload, model=model, sequence_length=tokens)
    learned = (rows * columns + added) * dims.learned_positions + added
    embedding = build_patches(workload, shards, learned * model.hidden)
    graph = _replace_embedding(transformer.build(workload, shards), embedding, model)
    if not dims.pooling:
        return graph
    pooling = transformer.build(replace(workload, model=replace(model, layers=1)), shards).layers
    return replace(graph, last=(*(replace(block, name="pooling") for block in pooling), *graph.last))


def build_swin(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a Swin transformer.

    The image is padded to whole windows, and no window is larger than the image. Between stages, four tokens merge into
    one token of twice the width. `hidden` and `heads` are the width and the heads of the first stage.
    """
    model, dims = replace(workload.model, causal=False), workload.model.get_dimensions(Swin)
    whole = dims.grid
    workload = replace(workload, model=model, attention="eager")
    embedding = build_patches(workload, shards, learned=2 * model.hidden)
    blocks: list[Block] = []
    for stage, depth in enumerate(dims.stages):
        width, heads = model.hidden * 2**stage, model.heads * 2**stage
        part = replace(model, layers=depth, hidden=width, heads=heads, kv_heads=heads, ffn_hidden=4 * width)
        rows, columns = (max(1, side // 2**stage) for side in whole)
        window = min(dims.window, rows, columns)
        staged = replace(workload, model=part, sequence_length=window * window)
        windows = replace(shards, micro_batch=shards.micro_batch * -(-rows // window) * -(-columns // window))
        graph = transformer.build(staged, windows)
        if stage:
            blocks.append(_build_merge(f"stage{stage + 1}-merge", staged, windows))
        moved = windows.micro_batch.astype(float) * (staged.sequence_length * width)
        numerics = Numerics.from_workload(staged)
        shuffle = layers.pointwise("windows", numerics, moved, kernels=4, absorbed=False, backward=(1.0, 1.0))
        name = f"stage{stage + 1}-layer"
        blocks += [replace(block, name=name, ops=(*block.ops, *shuffle)) for block in graph.layers]
    return _replace_embedding(replace(graph, layers=tuple(blocks)), embedding, model)


def _replace_embedding(graph: Graph, embedding: Block, model: Model) -> Graph:
    dims = model.get_dimensions(Vision)
    pixels = float(dims.image * dims.width_pixels * dims.image_channels)
    return replace(graph, first=(embedding,), host_bytes_per_sample=pixels)


def build_patches(workload: Workload, shards: Shards, learned: int) -> Block:
    """Return the block of the convolution that embeds patches.

    `learned` is the number of further parameters of the block (positions, class token, norm).
    """
    model, dims, numerics = workload.model, workload.model.get_dimensions(Vision), Numerics.from_workload(workload)
    image, width, patch = dims.image, dims.width_pixels, dims.patch
    channels = dims.image_channels * dims.patch_depth
    rows, columns = dims.grid
    batch = shards.micro_batch.astype(float)
    output = (model.hidden, 1, rows, columns)
    conv = layers.conv_dims(batch, (channels, 1, image, width), (1, patch, patch), output)
    ops = [Op("patches", KernelTable.from_dimensions("conv", numerics.matrix, **conv, direction=0.0))]
    if numerics.training and not numerics.frozen:
        gradient = KernelTable.from_dimensions("conv", numerics.matrix, **conv, direction=2.0)
        ops.append(Op("patches.weight-gradient", gradient, "backward"))
    embedded = batch * rows * columns * model.hidden
    ops += layers.pointwise("positions", numerics, embedded, reads=2.0, backward=(1.0, 0.0))
    activation_bytes = numerics.element * (batch * channels * image * width + embedded)
    parameters = (channels * patch**2 + 1.0) * model.hidden + learned
    return build_uniform_block("patches", len(shards), ops, parameters, activation_bytes, frozen=numerics.frozen)


def _build_merge(name: str, workload: Workload, shards: Shards) -> Block:
    """Return the block between stages that merges four neighbouring tokens, with a norm and a dense layer over them."""
    numerics, width = Numerics.from_workload(workload), workload.model.hidden
    tokens = shards.micro_batch.astype(float) * workload.sequence_length
    inputs = 2 * width
    ops = layers.pointwise("merge.gather", numerics, tokens * inputs, absorbed=False, backward=(1.0, 1.0))
    ops += layers.norm("merge.norm", numerics, tokens, inputs, rms=False)
    ops += layers.linear("merge", numerics, tokens, inputs, float(width), trainable=True)
    activation_bytes = numerics.element * 2 * tokens * inputs
    parameters = float(inputs * width + 2 * inputs)
    return build_uniform_block(name, len(shards), ops, parameters, activation_bytes)
