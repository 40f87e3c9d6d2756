"""Diffusion transformers with one stream of latent patches, as diffusers builds them.

Sources: DiT (Peebles and Xie, arXiv 2212.09748), PixArt (Chen et al., arXiv 2310.00426), CogVideoX (Yang et al., arXiv
2408.06072) and Wan (arXiv 2503.20314); diffusers, models/transformers/ and models/attention.py.

Before training, frozen networks encode images and videos to latents, and texts to encoder states. These networks are
not part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilecast.graph import Graph, Shards
from tilecast.model import Model, Problem
from tilecast.spec import Workload
from tilecast.zoo import modulated
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.modulated import TIME_WIDTH, ModulatedTransformer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DiffusionTransformer(ModulatedTransformer):
    """Dimensions of a diffusion transformer with one stream of tokens."""

    blocks: int
    inner: int
    """Width of the MLP of a block."""
    output_values: int
    """Numbers that are predicted per patch."""
    text_tokens: int = 0
    """States of a text that patches attend to; 0: there is no text."""
    text_width: int = 0
    """Width of such a state."""
    text_layers: int = 1
    """Dense layers that project text states to `width`."""
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
    """Dense layers with which each block computes its scales from the vector. 0 if it adds a table to shared scales."""
    labels: int = 0
    """Classes for which each block has its own embedding, besides the time. 0 if there are none."""
    query_key_norm: bool = False
    norm_across_heads: bool = False
    """Whether the norm of queries and keys is over all heads together, not per head."""
    rotates: bool = False
    """Whether queries and keys are rotated."""
    read_norm: bool = False
    """Whether a norm precedes cross-attention to states."""
    norm_weights: bool = False
    """Whether the modulated norms have weights."""

    @property
    def vector(self) -> int:
        """Width of the vector that encodes the diffusion time."""
        return self.width if self.vector_width is None else self.vector_width

    def problems(self, model: Model) -> Iterator[Problem]:
        """Yield dimensions that contradict each other, each with the problem and a remedy."""
        return self.unmeasured("text", "frame")


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a diffusion transformer, which runs data parallel only."""
    dims = workload.model.get_dimensions(DiffusionTransformer)
    width, image, text = dims.width, dims.image_tokens, dims.text_tokens
    frame = dims.frame_tokens
    is_joined = dims.joined
    tokens = image + text if is_joined else image
    read = () if is_joined else tuple(states for states in (text, frame) if states)

    def add_head(net: NetworkBuilder) -> None:
        """Add the output layer and the loss."""
        if is_joined:
            attention.add_layer_norm(net, tokens, width)
        if dims.own_modulations:
            modulated.add_vector_dense(net, dims.vector, 2 * width)
        else:
            modulated.add_scale_table(net, 2, width)
        modulated.add_modulated_norm(net, image, width, weights=dims.norm_weights)
        attention.add_dense(net, image, width, dims.output_values)
        modulated.add_squared_error(net, image * dims.output_values)

    blocks: list[modulated.BlockPlan] = [
        ("embedding", 1, lambda net: _add_embeddings(net, dims)),
        ("block", dims.blocks, lambda net: _add_block(net, dims, tokens, read)),
        ("head", 1, add_head),
    ]
    inputs = image * dims.patch_values + text * dims.text_width + frame * dims.frame_width
    return modulated.build_graph(blocks, tokens, inputs, workload, shards)


def _add_embeddings(net: NetworkBuilder, dims: DiffusionTransformer) -> None:
    """Add the embeddings of image patches, of the diffusion time, and of the states of a text or a frame.

    The states to which blocks attend are saved once for the backward passes of all blocks.
    """
    width, image, text = dims.width, dims.image_tokens, dims.text_tokens
    vector = dims.vector
    attention.add_dense(net, image, dims.patch_values, width)
    if not dims.labels:
        _add_scalar_embedding(net, dims.time_width, vector)
    if dims.size_conditions:
        for numbers in (2.0, 1.0):  # height and width, and their ratio (PixArtAlphaCombinedTimestepSizeEmbeddings)
            _add_scalar_embedding(net, modulated.TIME_WIDTH, width // 3, numbers)
    if text:
        attention.add_dense(net, text, dims.text_width, width)
        for _ in range(dims.text_layers - 1):
            modulated.add_gelu(net, text, width)
            attention.add_dense(net, text, width, width)
    if frame := dims.frame_tokens:
        seen = dims.frame_width
        attention.add_layer_norm(net, frame, seen)
        attention.add_dense(net, frame, seen, seen)
        modulated.add_gelu(net, frame, seen)
        attention.add_dense(net, frame, seen, width)
        attention.add_layer_norm(net, frame, width)
    if not dims.joined:
        net.keep_elements(net.batch * (text + frame) * width)
    if not dims.own_modulations:
        modulated.add_vector_dense(net, vector, 6 * width)


def _add_scalar_embedding(net: NetworkBuilder, inputs: int, width: int, numbers: float = 1.0) -> None:
    """Add the embedding of `numbers` scalars, such as the diffusion time: two dense layers with a SiLU between them."""
    attention.add_dense(net, numbers, inputs, width)
    net.add_pointwise("silu", net.batch * numbers * width)
    attention.add_dense(net, numbers, width, width)


def _add_block(net: NetworkBuilder, dims: DiffusionTransformer, tokens: float, counts: Sequence[float]) -> None:
    """Add one block over `tokens` tokens: self-attention, cross-attention and an MLP.

    `counts` holds the number of states of each kind, such as text, to which the block attends.
    """
    width, heads = dims.width, dims.attention_heads
    if dims.labels:
        _add_scalar_embedding(net, modulated.TIME_WIDTH, width)
        net.parameters += dims.labels * width
    for _ in range(dims.own_modulations):
        modulated.add_vector_dense(net, dims.vector, 6 * width)
    if not dims.own_modulations:
        modulated.add_scale_table(net, 6, width)
    modulated.add_modulated_norm(net, tokens, width, weights=dims.norm_weights)
    attention.add_dense(net, tokens, width, width)
    for _ in ("key", "value"):
        attention.add_dense_on_kept(net, tokens, width, width)
    for _ in ("query", "key"):
        _add_query_key_norm(net, dims, tokens)
    if dims.rotates:
        modulated.add_rotary(net, 2 * tokens, width)
    attention.add_dot_product_attention(net, tokens, tokens, width, heads)
    attention.add_dense(net, tokens, width, width)
    modulated.add_gated_residual(net, tokens, width)
    if counts:
        _add_cross_attention(net, dims, tokens, counts)
    modulated.add_mlp(net, tokens, width, dims.inner, weights=dims.norm_weights)


def _add_cross_attention(
    net: NetworkBuilder, dims: DiffusionTransformer, tokens: float, counts: Sequence[float]
) -> None:
    """Add cross-attention of `tokens` tokens to each kind of states, and sum the results.

    `counts` holds the number of states of each kind. Each kind has its own keys and values. The bytes of the states are
    not counted here.
    """
    width, heads = dims.width, dims.attention_heads
    if dims.read_norm:
        attention.add_layer_norm(net, tokens, width)
    attention.add_dense(net, tokens, width, width)
    _add_query_key_norm(net, dims, tokens)
    for states in counts:
        for _ in ("key", "value"):
            attention.add_dense_on_kept(net, states, width, width)
        _add_query_key_norm(net, dims, states)
        attention.add_dot_product_attention(net, tokens, states, width, heads)
    for _ in counts[1:]:
        attention.add_residual(net, tokens, width)
    attention.add_dense(net, tokens, width, width)
    attention.add_residual(net, tokens, width)


def _add_query_key_norm(net: NetworkBuilder, dims: DiffusionTransformer, tokens: float) -> None:
    """Add a norm over the queries or the keys of `tokens` tokens, if the model has such norms."""
    if dims.query_key_norm:
        across = dims.norm_across_heads
        groups = 1 if across else dims.attention_heads
        modulated.add_query_key_norm(net, tokens, dims.width, groups=groups, rms=across)
