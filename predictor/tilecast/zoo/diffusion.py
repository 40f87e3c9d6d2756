"""Diffusion transformers with one stream of latent patches, as diffusers builds them.

DiT (Peebles and Xie, arXiv 2212.09748), PixArt (Chen et al., arXiv 2310.00426), CogVideoX (Yang et al., arXiv
2408.06072) and Wan (arXiv 2503.20314); in diffusers models/transformers/ and models/attention.py.

Images and videos become latents, and texts become encoder states, before training; the frozen networks that make them
are not part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.model import Model, Problem
from tilecast.spec import Workload
from tilecast.zoo import layers, modulated
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.walk import Walk
from tilecast.zoo.modulated import TIME_WIDTH, Modulated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DiffusionTransformer(Modulated):
    """Dimensions of a diffusion transformer with one stream."""

    blocks: int
    inner: int
    """Width of the MLP of a block."""
    output_values: int
    """Numbers that are predicted of a patch."""
    text_tokens: int = 0
    """States of a text that patches attend to; 0: there is no text."""
    text_width: int = 0
    """Width of such a state."""
    text_layers: int = 1
    """Dense layers that bring these states to `width`."""
    frame_tokens: int = 0
    """States of a video's first image that patches attend to; 0: there is no such image."""
    frame_width: int = 0
    """Width of such a state."""
    joined: bool = False
    """Whether patches and states form one sequence."""
    vector_width: int | None = None
    """Width of the vector that encodes the time; None: `width`."""
    time_width: int = TIME_WIDTH
    """Numbers that encode a time step."""
    size_conditions: bool = False
    """Whether the vector also encodes the size of the image."""
    own_modulations: int = 0
    """Dense layers with which each block makes its scales from the vector; 0: it adds a table to scales that all blocks
    share."""
    labels: int = 0
    """Classes that each block embeds itself, with the time; 0: there are none."""
    query_key_norm: bool = False
    """Whether queries and keys are normed."""
    norm_across_heads: bool = False
    """Whether such a norm is over all heads, not by head."""
    rotates: bool = False
    """Whether queries and keys are rotated."""
    read_norm: bool = False
    """Whether a norm precedes attention to states."""
    norm_weights: bool = False
    """Whether the modulated norms have weights."""

    @property
    def vector(self) -> int:
        """Width of the vector that encodes the time."""
        return self.width if self.vector_width is None else self.vector_width

    def problems(self, model: Model) -> Iterator[Problem]:
        """Yield the dimensions that contradict others of the model."""
        return self.unmeasured("text", "frame")


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph, data parallel only."""
    dims = workload.model.own(DiffusionTransformer)
    width, image, text = dims.width, dims.image_tokens, dims.text_tokens
    frame = dims.frame_tokens
    is_joined = dims.joined
    tokens = image + text if is_joined else image
    read = () if is_joined else tuple(states for states in (text, frame) if states)

    def embed(walk: Walk) -> None:
        _embed(walk, dims)

    def write(walk: Walk) -> None:
        _block(walk, dims, tokens, read)

    def finish(walk: Walk) -> None:
        if is_joined:
            attention.norm(walk, tokens, width)
        if dims.own_modulations:
            modulated.vector(walk, dims.vector, 2 * width)
        else:
            modulated.table(walk, 2, width)
        modulated.modulated(walk, image, width, weights=dims.norm_weights)
        attention.linear(walk, image, width, dims.output_values)
        modulated.loss(walk, image * dims.output_values)

    inputs = image * dims.patch_values + text * dims.text_width + frame * dims.frame_width
    return Graph(
        (modulated.block("embedding", 1, tokens, embed, workload, shards),),
        (modulated.block("block", dims.blocks, tokens, write, workload, shards),),
        (modulated.block("head", 1, tokens, finish, workload, shards),),
        np.zeros(len(shards)),
        len(shards),
        host_bytes_per_sample=2.0 * inputs,
    )


def _embed(walk: Walk, dims: DiffusionTransformer) -> None:
    """Write the embeddings of patches, time and states that the blocks read.

    States that blocks attend to are kept once for all blocks.
    """
    width, image, text = dims.width, dims.image_tokens, dims.text_tokens
    vector = dims.vector
    attention.linear(walk, image, dims.patch_values, width)
    if not dims.labels:
        _time(walk, dims.time_width, vector)
    if dims.size_conditions:
        for numbers in (2.0, 1.0):  # height and width, and their ratio (PixArtAlphaCombinedTimestepSizeEmbeddings)
            _time(walk, modulated.TIME_WIDTH, width // 3, numbers)
    if text:
        attention.linear(walk, text, dims.text_width, width)
        for _ in range(dims.text_layers - 1):
            modulated.gelu(walk, text, width)
            attention.linear(walk, text, width, width)
    if frame := dims.frame_tokens:
        seen = dims.frame_width
        attention.norm(walk, frame, seen)
        attention.linear(walk, frame, seen, seen)
        modulated.gelu(walk, frame, seen)
        attention.linear(walk, frame, seen, width)
        attention.norm(walk, frame, width)
    if not dims.joined:
        walk.keep(walk.batch * (text + frame) * width)
    if not dims.own_modulations:
        modulated.vector(walk, vector, 6 * width)


def _time(walk: Walk, inputs: int, width: int, numbers: float = 1.0) -> None:
    """Write the embedding of a time step, or of `numbers` such scalars."""
    attention.linear(walk, numbers, inputs, width)
    walk.ops += layers.pointwise("silu", walk.numerics, walk.batch * numbers * width)
    attention.linear(walk, numbers, width, width)


def _block(walk: Walk, dims: DiffusionTransformer, tokens: float, read: tuple[float, ...]) -> None:
    """Write one block: attention among `tokens` tokens, attention to the states `read`, and an MLP."""
    width, heads, inner = dims.width, dims.attention_heads, dims.inner
    has_weights = dims.norm_weights
    if dims.labels:
        _time(walk, modulated.TIME_WIDTH, width)
        walk.parameters += dims.labels * width
    for _ in range(dims.own_modulations):
        modulated.vector(walk, dims.vector, 6 * width)
    if not dims.own_modulations:
        modulated.table(walk, 6, width)
    modulated.modulated(walk, tokens, width, weights=has_weights)
    attention.linear(walk, tokens, width, width)
    for _ in ("key", "value"):
        attention.beside(walk, tokens, width, width)
    for _ in ("query", "key"):
        _normed(walk, dims, tokens)
    if dims.rotates:
        modulated.rotary(walk, 2 * tokens, width)
    attention.core(walk, tokens, tokens, width, heads)
    attention.linear(walk, tokens, width, width)
    modulated.gated_sum(walk, tokens, width)
    if read:
        _look(walk, dims, tokens, read)
    modulated.modulated(walk, tokens, width, weights=has_weights)
    attention.linear(walk, tokens, width, inner)
    modulated.gelu(walk, tokens, inner)
    attention.linear(walk, tokens, inner, width)
    modulated.gated_sum(walk, tokens, width)


def _look(walk: Walk, dims: DiffusionTransformer, tokens: float, read: tuple[float, ...]) -> None:
    """Write attention to states that do not change from block to block.

    Each kind of state has its own keys and values, and the results are added.
    """
    width, heads = dims.width, dims.attention_heads
    if dims.read_norm:
        attention.norm(walk, tokens, width)
    attention.linear(walk, tokens, width, width)
    _normed(walk, dims, tokens)
    for states in read:
        for _ in ("key", "value"):
            attention.beside(walk, states, width, width)
        _normed(walk, dims, states)
        attention.core(walk, tokens, states, width, heads)
    for _ in read[1:]:
        attention.residual(walk, tokens, width)
    attention.linear(walk, tokens, width, width)
    attention.residual(walk, tokens, width)


def _normed(walk: Walk, dims: DiffusionTransformer, tokens: float) -> None:
    """Write the norm of queries or of keys, if the model has one."""
    width = dims.width
    if not dims.query_key_norm:
        return
    if dims.norm_across_heads:
        modulated.query_key_norm(walk, tokens, width, groups=1, rms=True)
    else:
        modulated.query_key_norm(walk, tokens, width, groups=dims.attention_heads, rms=False)
