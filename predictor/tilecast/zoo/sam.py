"""Segment Anything (Kirillov et al., arXiv 2304.02643, appendix A).

A vision transformer, most of whose layers attend inside windows (Li et al., arXiv 2203.16527), and a small decoder of
masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers, transformer, vision
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.walk import Walk
from tilecast.zoo.numerics import Numerics

_WIDTH, _HEADS, _INNER, _DEPTH = 256, 8, 2048, 2
"""Width, heads, width of the MLP, and layers of the decoder in every published size."""
_PROMPTS = 7.0
"""Tokens of the decoder: one for the mask's quality, four for masks, and two for the prompt, a point and its
padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SegmentAnything(vision.Vision):
    """Dimensions of Segment Anything."""

    window: int
    """Side of the windows that layers see, in patches."""
    global_layers: int = 4
    """Layers that see the whole image."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of the vision transformer and the decoder.

    Some layers see the whole image, the others windows, to which the image is padded.
    """
    model, dims = replace(workload.model.having(class_tokens=0), causal=False), workload.model.own(SegmentAnything)
    side, window = dims.grid[0], dims.window
    workload = replace(workload, model=model)
    whole = replace(workload, sequence_length=side * side)
    inside = replace(workload, sequence_length=window * window)
    windows = replace(shards, micro_batch=shards.micro_batch * (-(-side // window)) ** 2)
    seeing = min(dims.global_layers, model.layers)
    blocks = []
    for name, part, shares, repeat in (
        ("window-layer", inside, windows, model.layers - seeing),
        ("global-layer", whole, shards, seeing),
    ):
        if repeat:
            one = replace(part, model=replace(model, layers=repeat), attention="eager")
            blocks += [replace(block, name=name, positions=()) for block in transformer.build(one, shares).layers]
    graph = transformer.build(whole, shards)
    return replace(
        graph,
        first=(vision.patches(whole, shards, learned=side * side * model.hidden),),
        layers=tuple(blocks),
        last=(_decoder(workload, shards, side),),
        host_bytes_per_sample=3.0 * dims.image**2,
    )


def _decoder(workload: Workload, shards: Shards, side: int) -> Block:
    """Build the neck of two convolutions and the decoder.

    In the decoder's layers prompts and pixels attend to each other. Masks have four times the side of the patches'
    grid.
    """
    walk = Walk(Numerics.of(workload), shards.micro_batch.astype(float), workload.model.hidden, (1, side, side))
    walk.reached = True
    for kernel in (1, 3):
        walk.conv(_WIDTH, kernel)
        walk.norm()
    pixels = float(side * side)
    for _ in range(_DEPTH):
        attention.attend(walk, _PROMPTS, _PROMPTS, _WIDTH, _HEADS)
        attention.norm(walk, _PROMPTS, _WIDTH)
        _look(walk, _PROMPTS, pixels)
        attention.feed_forward(walk, _PROMPTS, _WIDTH, _INNER)
        attention.norm(walk, _PROMPTS, _WIDTH)
        _look(walk, pixels, _PROMPTS)
    _look(walk, _PROMPTS, pixels)
    for channels in (_WIDTH // 4, _WIDTH // 8):
        walk.up_conv(channels)
        walk.activate("gelu")
    for outputs in (_WIDTH // 8,) * 4 + (4,):
        for width in (_WIDTH, _WIDTH, outputs):
            attention.linear(walk, 1.0, _WIDTH, width)
    walk.products(4.0, 16.0 * pixels, float(_WIDTH // 8))
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, walk.batch * 64.0 * pixels, reads=2.0, kernels=4)
    activation_bytes = walk.activation_bytes * np.ones(len(shards))
    return Block(
        "mask-decoder", 1, tuple(walk.ops), np.full(len(shards), walk.parameters), np.stack([activation_bytes] * 3)
    )


def _look(walk: Walk, queries: float, keys: float) -> None:
    """Write attention at half the width, and the norm after it."""
    half = _WIDTH // 2
    attention.linear(walk, queries, _WIDTH, half)
    for _ in ("key", "value"):
        attention.linear(walk, keys, _WIDTH, half)
    attention.core(walk, queries, keys, half, _HEADS)
    attention.linear(walk, queries, half, _WIDTH)
    attention.residual(walk, queries, _WIDTH)
    attention.norm(walk, queries, _WIDTH)
