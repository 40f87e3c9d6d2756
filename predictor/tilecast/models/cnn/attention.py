"""Attention over the pixels of a walk: the layers of transformers that stand inside convolutional networks (Vaswani et
al., arXiv 1706.03762, section 3)."""

from __future__ import annotations

from tilecast.models import layers
from tilecast.models.cnn.walk import Walk


def norm(walk: Walk, tokens: float, width: int) -> None:
    """A layer norm over so many tokens of a sample."""
    walk.keep(walk.batch * tokens * width)
    walk.ops += layers.norm("layer-norm", walk.numerics, walk.batch * tokens, float(width), rms=False)
    walk.parameters += 2 * width


def linear(walk: Walk, tokens: float, inputs: int, outputs: int, *, bias: bool = True) -> None:
    """A dense layer over so many tokens of a sample."""
    walk.keep(walk.batch * tokens * inputs)
    beside(walk, tokens, inputs, outputs, bias=bias)


def beside(walk: Walk, tokens: float, inputs: int, outputs: int, *, bias: bool = True) -> None:
    """A dense layer over tokens that something else keeps already."""
    walk.ops += layers.linear(
        "linear", walk.numerics, walk.batch * tokens, float(inputs), float(outputs), bias=bias
    )  # fmt: skip
    walk.parameters += inputs * outputs + (outputs if bias else 0)


def residual(walk: Walk, tokens: float, width: int) -> None:
    """The sum with the input of a part."""
    walk.ops += layers.pointwise("residual", walk.numerics, walk.batch * tokens * width, reads=2.0, backward=(2.0, 1.0))


def attend(
    walk: Walk, queries: float, keys: float, width: int, heads: int, *, key_width: int = 0, bias: bool = True
) -> None:
    """`queries` tokens of `width` look at `keys` tokens, of `key_width` where they are others; `bias` is that of the
    projections to queries, keys and values. All three read what they look at as it is kept once: other tokens by
    whoever wrote them, for every layer that looks at them."""
    linear(walk, queries, width, width, bias=bias)
    for _ in ("key", "value"):
        beside(walk, keys, key_width or width, width, bias=bias)
    core(walk, queries, keys, width, heads)
    linear(walk, queries, width, width)
    residual(walk, queries, width)


def core(walk: Walk, queries: float, keys: float, width: int, heads: int) -> None:
    """Attention between projections and output."""
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
    """Two dense layers, with a ReLU between them, or with a product of one half of the first's outputs and the GELU of
    the other."""
    linear(walk, tokens, width, inner * (2 if gated else 1))
    elements = walk.batch * tokens * inner
    if gated:
        walk.keep(2 * elements)
        walk.ops += layers.pointwise("gate", walk.numerics, elements, reads=2.0, kernels=2, backward=(3.0, 2.0))
    else:
        walk.ops += layers.pointwise("relu", walk.numerics, elements)
    linear(walk, tokens, inner, width)
    residual(walk, tokens, width)
