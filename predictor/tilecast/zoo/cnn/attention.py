"""Transformer layers inside convolutional networks, with the pixels of a walk as tokens.

Source: Vaswani et al., arXiv 1706.03762, section 3. `tokens`, `queries` and `keys` count tokens per sample.
"""

from __future__ import annotations

from tilecast.zoo import layers
from tilecast.zoo.cnn.walk import Walk


def norm(walk: Walk, tokens: float, width: int) -> None:
    """Write a layer norm over `tokens` of each sample."""
    walk.keep(walk.batch * tokens * width)
    walk.ops += layers.norm("layer-norm", walk.numerics, walk.batch * tokens, float(width), rms=False)
    walk.parameters += 2 * width


def linear(walk: Walk, tokens: float, inputs: int, outputs: int, *, bias: bool = True) -> None:
    """Write a dense layer over `tokens` of each sample, and keep its input."""
    walk.keep(walk.batch * tokens * inputs)
    beside(walk, tokens, inputs, outputs, bias=bias)


def beside(walk: Walk, tokens: float, inputs: int, outputs: int, *, bias: bool = True) -> None:
    """Write a dense layer over `tokens` of each sample that another operator keeps already."""
    walk.ops += layers.linear(
        "linear", walk.numerics, walk.batch * tokens, float(inputs), float(outputs), bias=bias
    )  # fmt: skip
    walk.parameters += inputs * outputs + (outputs if bias else 0)


def residual(walk: Walk, tokens: float, width: int) -> None:
    """Write the sum with the input of a sublayer."""
    walk.ops += layers.pointwise("residual", walk.numerics, walk.batch * tokens * width, reads=2.0, backward=(2.0, 1.0))


def attend(
    walk: Walk, queries: float, keys: float, width: int, heads: int, *, key_width: int = 0, bias: bool = True
) -> None:
    """Write attention with its projections and the residual sum.

    The input is kept once for all three projections. Keys and values that come from other tokens are kept by whoever
    wrote those tokens, for all layers that read them.

    Args:
        walk: the network under construction.
        queries: tokens that attend.
        keys: tokens that they attend to.
        width: width of the queries.
        heads: number of heads.
        key_width: width of the keys where it is not `width`.
        bias: whether the projections to queries, keys and values have biases.
    """
    linear(walk, queries, width, width, bias=bias)
    for _ in ("key", "value"):
        beside(walk, keys, key_width or width, width, bias=bias)
    core(walk, queries, keys, width, heads)
    linear(walk, queries, width, width)
    residual(walk, queries, width)


def core(walk: Walk, queries: float, keys: float, width: int, heads: int) -> None:
    """Write attention itself, without the projections before and behind it."""
    ones = walk.batch / walk.batch
    walk.ops += layers.attention(
        "attention",
        walk.numerics,
        batch=walk.batch,
        heads=heads * ones,
        kv_heads=heads * ones,
        seq_q=queries * ones,
        seq_kv=keys * ones,
        head_dim=width / heads,
        causal=False,
        dropout=False,
    )
    scores = 0.0 if walk.numerics.flash else 2.0 * heads * queries * keys
    walk.keep(walk.batch * (2.0 * keys * width + queries * width + scores))
    walk.differentiate(walk.batch * (2.0 * (2.0 * keys + queries) * width + scores))


def feed_forward(walk: Walk, tokens: float, width: int, inner: int, *, gated: bool = False) -> None:
    """Write two dense layers with an activation between them, and the residual sum.

    The activation is a ReLU or, if `gated`, the product of one half of the first layer's outputs with the GELU of the
    other half.
    """
    linear(walk, tokens, width, inner * (2 if gated else 1))
    elements = walk.batch * tokens * inner
    if gated:
        walk.keep(2 * elements)
        walk.ops += layers.pointwise("gate", walk.numerics, elements, reads=2.0, kernels=2, backward=(3.0, 2.0))
    else:
        walk.ops += layers.pointwise("relu", walk.numerics, elements)
    linear(walk, tokens, inner, width)
    residual(walk, tokens, width)
