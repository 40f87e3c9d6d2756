"""The Temporal Fusion Transformer (Lim et al., arXiv 1912.09363, section 4).

Gates select among the variables of a time series; two LSTMs and attention over the whole series follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo import layers
from tilecast.zoo.cnn import attention, sequence
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Images

_CONTEXTS = 4
"""Number of context vectors computed from the static variables."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TemporalFusion(Images):
    """Dimensions of the Temporal Fusion Transformer. A series is an image whose width is its number of steps."""

    width: int
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
    quantiles: int
    """Quantiles that are forecast of each future step."""


def build_temporal_fusion(net: NetworkBuilder, dims: TemporalFusion) -> None:
    """Build the Temporal Fusion Transformer, which forecasts `quantiles` of every future step of a series."""
    width, steps, past = dims.width, float(net.size[2]), dims.history
    static = dims.static
    net.parameters += dims.static_rows * width
    net.ops += layers.embedding("static", net.numerics, net.batch * static, float(width))
    _add_variable_selection(net, 1.0, static, width)
    for _ in range(_CONTEXTS):
        _add_gated_residual(net, 1.0, width, width)
    for count, variables in ((past, dims.observed), (steps - past, dims.known)):
        elements = net.batch * count * variables * width
        net.add_pointwise("variables", elements, kernels=2)
        net.parameters += 2 * variables * width
        _add_variable_selection(net, count, variables, width)
        net.shape = width, (1, 1, int(count))
        sequence.add_lstm(net, width)
    _add_gate(net, steps, width)
    _add_gated_residual(net, steps, width, width, context=True)
    heads = dims.attention_heads
    attention.add_dense(net, steps, width, 2 * width + width // heads, bias=False)
    attention.add_dot_product_attention(net, steps, steps, width, heads)
    attention.add_dense(net, steps, width // heads, width, bias=False)
    future = steps - past
    _add_gate(net, future, width)
    _add_gated_residual(net, future, width, width)
    _add_gate(net, future, width)
    attention.add_dense(net, future, width, dims.quantiles)
    net.add_training_pointwise("loss", net.batch * future * dims.quantiles, kernels=6)


def _add_variable_selection(net: NetworkBuilder, steps: float, variables: int, width: int) -> None:
    """Add the selection of variables: a weighted sum of one gated residual network per variable.

    Another gated residual network computes the weights from all variables.
    """
    _add_gated_residual(net, steps, variables * width, width, outputs=variables, context=steps > 1)
    for _ in range(variables):
        _add_gated_residual(net, steps, width, width)
    elements = net.batch * steps * variables * width
    net.add_pointwise("select", elements, absorbed=False, kernels=2)
    net.keep_elements(elements)


def _add_gated_residual(
    net: NetworkBuilder, steps: float, inputs: int, width: int, *, outputs: int = 0, context: bool = False
) -> None:
    """Add a gated residual network: two dense layers with an ELU between them, a gate, a residual sum and a norm.

    The input is projected if its width differs from the output's. If `context`, a static vector is added after the
    first dense layer.
    """
    out = outputs or width
    if out != inputs:
        attention.add_dense(net, steps, inputs, out)
    attention.add_dense(net, steps, inputs, width)
    if context:
        attention.add_dense(net, 1.0, width, width, bias=False)
        attention.add_residual(net, steps, width)
    net.keep_elements(net.batch * steps * width)
    net.add_pointwise("elu", net.batch * steps * width)
    attention.add_dense(net, steps, width, width)
    _add_gate(net, steps, width, out)


def _add_gate(net: NetworkBuilder, steps: float, inputs: int, outputs: int = 0) -> None:
    """Add a gated linear unit (GLU), dropout, a residual sum and a layer norm."""
    out = outputs or inputs
    elements = net.batch * steps * out
    attention.add_dense(net, steps, inputs, 2 * out)
    net.keep_elements(2 * elements)
    net.add_pointwise("gate", elements, reads=2.0, backward=(3.0, 2.0))
    net.add_training_pointwise("dropout", elements, mask_bytes=1.0, backward=(1.0, 1.0))
    attention.add_residual(net, steps, out)
    attention.add_layer_norm(net, steps, out)
