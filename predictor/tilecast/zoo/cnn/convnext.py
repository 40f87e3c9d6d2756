"""ConvNeXt, versions 1 and 2: depthwise convolutions of 7 x 7 and dense layers over each pixel.

Sources: Liu et al., arXiv 2201.03545, section 2; Woo et al., arXiv 2301.00808, section 3.2, for version 2, which
normalises each channel's response over the image.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model import numbered_field
from tilecast.zoo import layers
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Classifier


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ConvNext(Classifier):
    """Dimensions of ConvNeXt."""

    stages: tuple[int, int, int, int] = numbered_field("stage")
    """Blocks of each stage."""
    widths: tuple[int, int, int, int] = numbered_field("width")
    """Channels of each stage."""
    patch: int = 4
    """Side of a patch that the stem cuts, in pixels."""
    response_norm: bool = False
    """Whether each channel's response is normed, which makes it version 2."""


def build_convnext(net: NetworkBuilder, dims: ConvNext) -> None:
    """Build ConvNeXt: a stem that cuts the image into patches, four stages, and a classifier."""
    net.add_conv(dims.widths[0], dims.patch, dims.patch, bias=True)
    _add_layer_norm(net)
    for number, (depth, width) in enumerate(zip(dims.stages, dims.widths, strict=True)):
        if number:
            _add_layer_norm(net)
            net.add_conv(width, 2, 2, bias=True)
        for _ in range(depth):
            _add_block(net, dims.response_norm)
    net.add_global_mean()
    _add_layer_norm(net)
    net.add_dense(dims.classes)
    net.add_cross_entropy()


def _add_block(net: NetworkBuilder, has_response_norm: bool) -> None:
    """Add a ConvNeXt block: a 7x7 depthwise convolution, a layer norm, two 1x1 convolutions and the residual sum."""
    width = net.channels
    net.add_conv(width, 7, groups=width, bias=True)
    _add_layer_norm(net)
    net.add_conv(4 * width, 1, bias=True)
    net.add_activation("gelu")
    if has_response_norm:
        net.keep_elements(net.elements)
        net.add_pointwise("response-norm", reads=2.0, kernels=3)
        net.parameters += 2 * net.channels
    net.add_conv(width, 1, bias=True)
    if not has_response_norm:
        net.add_constant_product()
        net.parameters += width
    net.add_branch()


def _add_layer_norm(net: NetworkBuilder) -> None:
    """Add a layer norm over the channels of each pixel."""
    net.keep_elements(net.elements)
    rows = net.elements / net.channels
    net.ops += layers.norm("layer-norm", net.numerics, rows, float(net.channels), rms=False)
    net.parameters += 2 * net.channels
