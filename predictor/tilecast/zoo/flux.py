"""Rectified-flow transformers: FLUX.1, FLUX.2 and Stable Diffusion 3.

The first layers of FLUX.1 keep image and text in separate streams and attend over both. The last layers have one
stream, with attention and MLP in parallel (Esser et al., arXiv 2403.03206, section 4; sizes of black-forest-labs/flux,
src/flux/util.py).

Before training, frozen networks encode images to latents and texts to encoder states. These networks are not part of
the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import modulated
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.modulated import ModulatedTransformer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Flux(ModulatedTransformer):
    """Dimensions of a rectified-flow transformer."""

    double_layers: int
    """Number of layers with two streams, one of the image and one of the text."""
    dual_layers: int = 0
    """Number of these layers, from the first on, in which the image also attends to itself alone."""
    single_layers: int = 0
    """Number of layers with one stream."""
    text_tokens: int
    """Number of states of a text."""
    text_width: int
    """Width of such a state."""
    pooled_width: int = 0
    """Width of the state of the whole text. 0 if there is none."""
    gated_ratio: int = 0
    """Ratio of a gated MLP's width to the layer's (FLUX.2). 0 for MLPs with a GELU and four times the width."""
    shared_scales: bool = False
    """Whether all layers of a kind share scales and offsets (FLUX.2)."""
    query_key_norm: bool = True
    rotates: bool = True
    """Whether queries and keys are rotated."""
    text_ends: bool = False
    """Whether the text is not read after the last layer with two streams."""
    guided: bool = False
    """Whether the guidance strength, from distillation, is embedded like the time."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a rectified-flow transformer, which runs data parallel only."""
    dims = workload.model.get_dimensions(Flux)
    width, text, image = dims.width, dims.text_tokens, dims.image_tokens

    def add_embeddings(net: NetworkBuilder) -> None:
        """Add the embeddings of diffusion time, guidance, pooled text, text states and image patches."""
        guidance = [modulated.TIME_WIDTH] * dims.guided
        for inputs in (modulated.TIME_WIDTH, *guidance, *[dims.pooled_width] * (dims.pooled_width > 0)):
            modulated.add_vector_dense(net, inputs, width)
            modulated.add_vector_dense(net, width, width)
        for scales in (6, 6, 3) if dims.shared_scales else ():
            modulated.add_vector_dense(net, width, scales * width)
        attention.add_dense(net, text, dims.text_width, width)
        attention.add_dense(net, image, dims.patch_values, width)

    def add_head(net: NetworkBuilder) -> None:
        """Add the output layer and the loss."""
        modulated.add_vector_dense(net, width, 2 * width)
        modulated.add_modulated_norm(net, image, width)
        attention.add_dense(net, image, width, dims.patch_values)
        modulated.add_squared_error(net, image * dims.patch_values)

    tokens = text + image
    ends, twice, pairs = int(dims.text_ends), dims.dual_layers, dims.double_layers
    last_twice = ends * (twice == pairs)
    kinds: list[modulated.BlockPlan] = [
        ("dual-layer", twice - last_twice, lambda net: _add_double_layer(net, dims, text, image, attends_twice=True)),
        ("double-layer", pairs - twice - ends + last_twice, lambda net: _add_double_layer(net, dims, text, image)),
        (
            "last-layer",
            ends,
            lambda net: _add_double_layer(net, dims, text, image, attends_twice=bool(last_twice), text_ends=True),
        ),
        ("single-layer", dims.single_layers, lambda net: _add_single_layer(net, dims, tokens)),
    ]
    blocks = [("embedding", 1, add_embeddings), *kinds, ("head", 1, add_head)]
    inputs = image * dims.patch_values + text * dims.text_width
    return modulated.build_graph(blocks, tokens, inputs, workload, shards)


def _add_double_layer(
    net: NetworkBuilder, dims: Flux, text: float, image: float, *, attends_twice: bool = False, text_ends: bool = False
) -> None:
    """Add a layer with separate image and text streams, whose tokens attend to each other.

    If `attends_twice`, the image tokens also attend to the image alone, after a further modulated norm (diffusers,
    models/normalization.py: SD35AdaLayerNormZeroX). If `text_ends`, the text stream stops after attention
    (models/attention.py: JointTransformerBlock, `context_pre_only`).
    """
    width, heads = dims.width, dims.attention_heads
    if attends_twice:
        _add_projections(net, dims, image, scales=3, outputs=3)
        attention.add_dot_product_attention(net, image, image, width, heads)
        attention.add_dense(net, image, width, width)
        modulated.add_gated_residual(net, image, width)
    for tokens, scales in ((image, 6), (text, 2 if text_ends else 6)):
        _add_projections(net, dims, tokens, scales, outputs=3)
    attention.add_dot_product_attention(net, image + text, image + text, width, heads)
    for tokens in (image,) if text_ends else (image, text):
        attention.add_dense(net, tokens, width, width)
        modulated.add_gated_residual(net, tokens, width)
        if not dims.gated_ratio:
            modulated.add_mlp(net, tokens, width, 4 * width)
            continue
        modulated.add_modulated_norm(net, tokens, width)
        attention.add_dense(net, tokens, width, 2 * dims.gated_ratio * width)
        modulated.add_gate(net, tokens, dims.gated_ratio * width)
        attention.add_dense(net, tokens, dims.gated_ratio * width, width)
        modulated.add_gated_residual(net, tokens, width)


def _add_single_layer(net: NetworkBuilder, dims: Flux, tokens: float) -> None:
    """Add a layer over one stream of `tokens` tokens, with attention and MLP side by side."""
    width, heads = dims.width, dims.attention_heads
    gated = dims.gated_ratio
    _add_projections(net, dims, tokens, scales=3, outputs=3 + 2 * gated if gated else 7)
    attention.add_dot_product_attention(net, tokens, tokens, width, heads)
    if gated:
        modulated.add_gate(net, tokens, gated * width)
    else:
        modulated.add_gelu(net, tokens, 4 * width)
    attention.add_dense(net, tokens, (1 + (gated or 4)) * width, width)
    modulated.add_gated_residual(net, tokens, width)


def _add_projections(net: NetworkBuilder, dims: Flux, tokens: float, scales: int, outputs: int) -> None:
    """Add a modulated norm and the dense layer that computes queries, keys and values.

    `scales` is the number of modulating vectors that a dense layer computes. `outputs` is the output width of the main
    dense layer, as a multiple of the model's width. FLUX also norms and rotates queries and keys. SD3 does neither, and
    SD3.5 only norms them (diffusers, models/transformers/transformer_sd3.py: `qk_norm`).
    """
    width, heads = dims.width, dims.attention_heads
    if not dims.shared_scales:
        modulated.add_vector_dense(net, width, scales * width)
    modulated.add_modulated_norm(net, tokens, width)
    attention.add_dense(net, tokens, width, outputs * width)
    if dims.query_key_norm:
        for _ in ("query", "key"):
            modulated.add_query_key_norm(net, tokens, width, groups=heads, rms=True)
    if dims.rotates:
        modulated.add_rotary(net, 2 * tokens, width)
