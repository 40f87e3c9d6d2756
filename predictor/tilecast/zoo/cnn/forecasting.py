"""The Temporal Fusion Transformer (Lim et al., arXiv 1912.09363, section 4).

Gates select among the variables of a time series; two LSTMs and attention over the whole series follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo import layers
from tilecast.zoo.cnn import attention, sequence
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.walk import Walk

_CONTEXTS = 4
"""Number of context vectors computed from the static variables."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TemporalFusion(Images):
    """Dimensions of the Temporal Fusion Transformer; the width of its image is the number of steps."""

    width: int
    """Width of the states."""
    history: int
    """Steps before the forecast."""
    observed: int
    """Variables of each of these steps."""
    known: int
    """Variables of each future step."""
    static: int
    """Variables of the whole series."""
    static_rows: int
    """Values of the static variables, in total."""
    attention_heads: int
    """Heads of an attention layer."""
    quantiles: int
    """Quantiles that are forecast of each future step."""


def temporal_fusion(walk: Walk, dims: TemporalFusion) -> None:
    """Write a model of `width` that forecasts `quantiles` of every future step.

    The image's width is the number of steps. The first `history` steps have `observed` variables, the future ones have
    `known` variables. The `static` variables have `static_rows` values in total.
    """
    width, steps, past = dims.width, float(walk.size[2]), dims.history
    static = dims.static
    walk.parameters += dims.static_rows * width
    walk.ops += layers.embedding("static", walk.numerics, walk.batch * static, float(width))
    _select(walk, 1.0, static, width)
    for _ in range(_CONTEXTS):
        _gated(walk, 1.0, width, width)
    for count, variables in ((past, dims.observed), (steps - past, dims.known)):
        elements = walk.batch * count * variables * width
        walk.ops += layers.pointwise("variables", walk.numerics, elements, kernels=2)
        walk.parameters += 2 * variables * width
        _select(walk, count, variables, width)
        walk.shape = width, (1, 1, int(count))
        sequence.recur(walk, width)
    _gate(walk, steps, width)
    _gated(walk, steps, width, width, context=True)
    heads = dims.attention_heads
    attention.linear(walk, steps, width, 2 * width + width // heads, bias=False)
    attention.core(walk, steps, steps, width, heads)
    attention.linear(walk, steps, width // heads, width, bias=False)
    future = steps - past
    _gate(walk, future, width)
    _gated(walk, future, width, width)
    _gate(walk, future, width)
    attention.linear(walk, future, width, dims.quantiles)
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, walk.batch * future * dims.quantiles, kernels=6)


def _select(walk: Walk, steps: float, variables: int, width: int) -> None:
    """Write the selection of variables: a gated network for each, and their sum with weights from one over all."""
    _gated(walk, steps, variables * width, width, outputs=variables, context=steps > 1)
    for _ in range(variables):
        _gated(walk, steps, width, width)
    elements = walk.batch * steps * variables * width
    walk.ops += layers.pointwise("select", walk.numerics, elements, absorbed=False, kernels=2)
    walk.keep(elements)


def _gated(
    walk: Walk, steps: float, inputs: int, width: int, *, outputs: int = 0, context: bool = False
) -> None:  # fmt: skip
    """Write a gated residual network: two dense layers around an ELU, a gate, the sum with the input, and a norm.

    The input is projected where its width differs from the output's. With `context` a static vector is added behind the
    first layer.
    """
    out = outputs or width
    if out != inputs:
        attention.linear(walk, steps, inputs, out)
    attention.linear(walk, steps, inputs, width)
    if context:
        attention.linear(walk, 1.0, width, width, bias=False)
        attention.residual(walk, steps, width)
    walk.keep(walk.batch * steps * width)
    walk.ops += layers.pointwise("elu", walk.numerics, walk.batch * steps * width)
    attention.linear(walk, steps, width, width)
    _gate(walk, steps, width, out)


def _gate(walk: Walk, steps: float, inputs: int, outputs: int = 0) -> None:
    """Write a dense layer to twice the width, one half of which gates the other, then a residual sum and a norm."""
    out = outputs or inputs
    elements = walk.batch * steps * out
    attention.linear(walk, steps, inputs, 2 * out)
    walk.keep(2 * elements)
    walk.ops += layers.pointwise("gate", walk.numerics, elements, reads=2.0, backward=(3.0, 2.0))
    if walk.numerics.training:
        walk.ops += layers.pointwise("dropout", walk.numerics, elements, mask_bytes=1.0, backward=(1.0, 1.0))
    attention.residual(walk, steps, out)
    attention.norm(walk, steps, out)
