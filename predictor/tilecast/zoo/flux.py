"""Rectified-flow transformers: FLUX.1 and Stable Diffusion 3.

The first layers of FLUX.1 keep image and text in separate streams and attend over both; its last layers treat them
alike, with attention and MLP side by side (Esser et al., arXiv 2403.03206, section 4; sizes of black-forest-labs/flux,
src/flux/util.py).

Images become latents, and texts become encoder states, before training; the frozen networks that make them are not part
of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import modulated
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.walk import Walk
from tilecast.zoo.modulated import Modulated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Flux(Modulated):
    """Dimensions of a rectified-flow transformer."""

    double_layers: int
    """Layers of two streams, one of the image and one of the text."""
    dual_layers: int = 0
    """First of these layers, in which the image also attends to itself alone."""
    single_layers: int = 0
    """Layers of one stream."""
    text_tokens: int
    """States of a text."""
    text_width: int
    """Width of such a state."""
    pooled_width: int
    """Width of the state of the whole text."""
    query_key_norm: bool = True
    """Whether queries and keys are normed."""
    rotates: bool = True
    """Whether queries and keys are rotated."""
    text_ends: bool = False
    """Whether nothing reads the text after the last layer of two streams."""
    guided: bool = False
    """Whether the guidance strength, with which the model was distilled, is embedded like the time."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph, data parallel only."""
    dims = workload.model.own(Flux)
    width, text, image = dims.width, dims.text_tokens, dims.image_tokens

    def embed(walk: Walk) -> None:
        guidance = [modulated.TIME_WIDTH] * dims.guided
        for inputs in (modulated.TIME_WIDTH, *guidance, dims.pooled_width):
            modulated.vector(walk, inputs, width)
            modulated.vector(walk, width, width)
        attention.linear(walk, text, dims.text_width, width)
        attention.linear(walk, image, dims.patch_values, width)

    def finish(walk: Walk) -> None:
        modulated.vector(walk, width, 2 * width)
        modulated.modulated(walk, image, width)
        attention.linear(walk, image, width, dims.patch_values)
        modulated.loss(walk, image * dims.patch_values)

    tokens = text + image
    ends, twice, pairs = int(dims.text_ends), dims.dual_layers, dims.double_layers
    last_twice = ends * (twice == pairs)
    kinds: list[tuple[str, int, Callable[[Walk], None]]] = [
        ("dual", twice - last_twice, lambda walk: _double(walk, dims, text, image, attends_twice=True)),
        ("double", pairs - twice - ends + last_twice, lambda walk: _double(walk, dims, text, image)),
        (
            "last",
            ends,
            lambda walk: _double(walk, dims, text, image, attends_twice=bool(last_twice), text_ends=True),
        ),
        ("single", dims.single_layers, lambda walk: _single(walk, dims, tokens)),
    ]
    return Graph(
        (modulated.block("embedding", 1, tokens, embed, workload, shards),),
        tuple(
            modulated.block(f"{name}-layer", depth, tokens, write, workload, shards)
            for name, depth, write in kinds
            if depth > 0
        ),
        (modulated.block("head", 1, tokens, finish, workload, shards),),
        np.zeros(len(shards)),
        len(shards),
        host_bytes_per_sample=2.0 * (image * dims.patch_values + text * dims.text_width),
    )  # fmt: skip


def _double(
    walk: Walk,
    dims: Flux,
    text: float,
    image: float,
    *,
    attends_twice: bool = False,
    text_ends: bool = False,
) -> None:
    """Write a layer of two streams.

    If it `attends_twice`, the image also attends to itself alone, with its own scales (diffusers,
    models/normalization.py: SD35AdaLayerNormZeroX). If `text_ends`, the text is not computed beyond queries, keys and
    values (models/attention.py: JointTransformerBlock, `context_pre_only`).
    """
    width, heads = dims.width, dims.attention_heads
    if attends_twice:
        modulated.vector(walk, width, 3 * width)
        modulated.modulated(walk, image, width)
        attention.linear(walk, image, width, 3 * width)
        _positions(walk, dims, image)
        attention.core(walk, image, image, width, heads)
        attention.linear(walk, image, width, width)
        modulated.gated_sum(walk, image, width)
    for tokens, scales in ((image, 6), (text, 2 if text_ends else 6)):
        modulated.vector(walk, width, scales * width)
        modulated.modulated(walk, tokens, width)
        attention.linear(walk, tokens, width, 3 * width)
        _positions(walk, dims, tokens)
    attention.core(walk, image + text, image + text, width, heads)
    for tokens in (image,) if text_ends else (image, text):
        attention.linear(walk, tokens, width, width)
        modulated.gated_sum(walk, tokens, width)
        modulated.modulated(walk, tokens, width)
        attention.linear(walk, tokens, width, 4 * width)
        modulated.gelu(walk, tokens, 4 * width)
        attention.linear(walk, tokens, 4 * width, width)
        modulated.gated_sum(walk, tokens, width)


def _single(walk: Walk, dims: Flux, tokens: float) -> None:
    width, heads = dims.width, dims.attention_heads
    modulated.vector(walk, width, 3 * width)
    modulated.modulated(walk, tokens, width)
    attention.linear(walk, tokens, width, 7 * width)
    _positions(walk, dims, tokens)
    attention.core(walk, tokens, tokens, width, heads)
    modulated.gelu(walk, tokens, 4 * width)
    attention.linear(walk, tokens, 5 * width, width)
    modulated.gated_sum(walk, tokens, width)


def _positions(walk: Walk, dims: Flux, tokens: float) -> None:
    """Write the norms by head and the rotation of queries and keys, where the model has them.

    FLUX has both, SD3 neither, and SD3.5 the norms (diffusers, models/transformers/transformer_sd3.py: `qk_norm`).
    """
    width, heads = dims.width, dims.attention_heads
    if dims.query_key_norm:
        for _ in ("query", "key"):
            modulated.query_key_norm(walk, tokens, width, groups=heads, rms=True)
    if dims.rotates:
        modulated.rotary(walk, 2 * tokens, width)
