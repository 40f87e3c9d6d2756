"""Transformer layers inside convolutional networks, in which each pixel is a token.

Source: Vaswani et al., arXiv 1706.03762, section 3. `tokens`, `queries` and `keys` are numbers of tokens per sample.
"""

from __future__ import annotations

import numpy as np

from tilecast.zoo import layers
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.parts import Linear


def add_layer_norm(net: NetworkBuilder, tokens: float, width: int) -> None:
    """Add a layer norm of `width` features over `tokens` tokens per sample."""
    net.keep_elements(net.batch * tokens * width)
    net.ops += layers.norm("layer-norm", net.numerics, net.batch * tokens, float(width), rms=False)
    net.parameters += 2 * width


def add_dense(net: NetworkBuilder, tokens: float, inputs: int, outputs: int, *, bias: bool = True) -> None:
    """Add a dense layer over `tokens` tokens per sample. Its input is saved to compute the gradient of the weight."""
    net.keep_elements(net.batch * tokens * inputs)
    add_dense_on_kept(net, tokens, inputs, outputs, bias=bias)


def add_dense_on_kept(net: NetworkBuilder, tokens: float, inputs: int, outputs: int, *, bias: bool = True) -> None:
    """Add a dense layer over `tokens` tokens per sample whose input another operator already saves."""
    if tokens > 1:
        net.linears.append(Linear("linear", net.batch * tokens, float(inputs), float(outputs)))
    net.ops += layers.linear("linear", net.numerics, net.batch * tokens, float(inputs), float(outputs), bias=bias)
    net.parameters += inputs * outputs + (outputs if bias else 0)


def add_pixel_attention(net: NetworkBuilder, keys: float, inner: int) -> None:
    """Add unfused attention of all pixels to `keys` keys per sample, over `inner` channels, but no output projection.

    Queries, keys and values are dense layers over the current tensor. The scores are saved for the backward pass.
    """
    width, pixels = net.channels, float(net.size[1] * net.size[2])
    add_dense(net, pixels, width, inner)
    add_dense_on_kept(net, pixels, width, inner)
    add_dense_on_kept(net, pixels, width, inner)
    net.add_batched_matmul(pixels, keys, float(inner))
    net.add_pointwise("softmax", net.batch * pixels * keys, reads=2.0, absorbed=False)
    net.add_batched_matmul(pixels, float(inner), keys)
    scores = 2 * keys if net.numerics.keeps_softmax_input else keys
    net.keep_elements(net.batch * pixels * (scores + 3 * inner))
    net.raise_peak(2.0 * net.batch * pixels * keys)
    net.channels = inner


def add_residual(net: NetworkBuilder, tokens: float, width: int) -> None:
    """Add the residual sum: the input of a sublayer plus its output."""
    net.add_pointwise("residual", net.batch * tokens * width, reads=2.0, backward=(2.0, 1.0))


def add_multi_head_attention(
    net: NetworkBuilder, queries: float, keys: float, width: int, heads: int, *, key_width: int = 0, bias: bool = True
) -> None:
    """Add multi-head attention with its projections and the residual sum.

    The tokens of the queries are saved once for the backward pass. If keys and values come from other tokens, the
    caller must add the bytes of those.

    Args:
        net: the network under construction.
        queries: number of query tokens per sample.
        keys: number of key tokens per sample.
        width: width of a query token.
        heads: number of heads.
        key_width: width of a key token. If 0, it equals `width`.
        bias: whether the projections to queries, keys and values have biases.
    """
    add_dense(net, queries, width, width, bias=bias)
    for _ in ("key", "value"):
        add_dense_on_kept(net, keys, key_width or width, width, bias=bias)
    add_dot_product_attention(net, queries, keys, width, heads)
    add_dense(net, queries, width, width)
    add_residual(net, queries, width)


def add_dot_product_attention(net: NetworkBuilder, queries: float, keys: float, width: int, heads: int) -> None:
    """Add scaled dot-product attention without projections."""
    ones = np.ones_like(net.batch)
    sequences = layers.Sequences(net.batch, queries * ones, keys * ones)
    net.ops += layers.attention("attention", net.numerics, sequences, heads * ones, heads * ones, width / heads)
    scores = 0.0 if net.numerics.flash else 2.0 * heads * queries * keys
    net.keep_elements(net.batch * (2.0 * keys * width + queries * width + scores))
    net.raise_peak(net.batch * (2.0 * (2.0 * keys + queries) * width + scores))


def add_feed_forward(net: NetworkBuilder, tokens: float, width: int, inner: int, *, gated: bool = False) -> None:
    """Add two dense layers with an activation between them, and the residual sum.

    The activation is a ReLU. If `gated`, it is a GEGLU, which multiplies half of the first layer's outputs with the
    GELU of the other half.
    """
    add_dense(net, tokens, width, inner * (2 if gated else 1))
    elements = net.batch * tokens * inner
    if gated:
        net.keep_elements(2 * elements)
        net.add_pointwise("gate", elements, reads=2.0, kernels=2, backward=(3.0, 2.0))
    else:
        net.add_pointwise("relu", elements)
    add_dense(net, tokens, inner, width)
    add_residual(net, tokens, width)
