"""SegFormer: four stages of attention with fewer keys than queries, and a decoder of dense layers over all four.

Source: Xie et al., arXiv 2105.15203, sections 3.1 and 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model import numbered_field
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Images

_STEMS = ((7, 4), (3, 2), (3, 2), (3, 2))
"""Kernel and stride of the overlapping patches of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Segformer(Images):
    """Dimensions of SegFormer."""

    stages: tuple[int, int, int, int] = numbered_field("stage")
    """Layers of each stage."""
    widths: tuple[int, int, int, int] = numbered_field("width")
    """Channels of each stage."""
    heads: tuple[int, int, int, int] = numbered_field("heads")
    """Heads of a layer of each stage."""
    reductions: tuple[int, int, int, int] = numbered_field("reduction")
    """Factor by which keys and values have fewer pixels per side than queries, in each stage."""
    decoder: int
    """Channels of the decoder."""
    ratio: int = 4
    """Width of a layer's MLP relative to the layer's."""

    classes: int = 150
    """Categories of a pixel."""


def build_segformer(net: NetworkBuilder, dims: Segformer) -> None:
    """Build SegFormer: four stages, and a decoder that predicts a category for each 4 x 4 pixels."""
    reached = []
    for (kernel, stride), width, depth, heads, reduction in zip(
        _STEMS, dims.widths, dims.stages, dims.heads, dims.reductions, strict=True
    ):
        net.add_conv(width, kernel, stride, bias=True)
        _add_layer_norm(net)
        for _ in range(depth):
            _add_layer(net, heads, reduction, dims.ratio)
        _add_layer_norm(net)
        reached.append(net.shape)
    width, finest = dims.decoder, reached[0][1]
    for channels, size in reached:
        net.continue_from((channels, size))
        net.add_conv(width, 1, bias=True)
        net.size = finest
        net.add_resize(float(size[1] * size[2]) / (finest[1] * finest[2]))
    net.add_concatenation(4 * width)
    net.add_conv_norm_act(width, 1)
    net.add_dropout()
    net.add_conv(dims.classes, 1, bias=True)
    net.add_cross_entropy()


def _add_layer(net: NetworkBuilder, heads: int, reduction: int, ratio: int) -> None:
    """Add a transformer layer whose keys come from an image that is `reduction` times smaller per side.

    Its MLP has `ratio` times the width and a 3x3 depthwise convolution.
    """
    width, size = net.shape
    pixels = float(size[1] * size[2])
    _add_layer_norm(net)
    attention.add_dense(net, pixels, width, width)
    if reduction > 1:
        net.continue_from((width, size))
        net.add_conv(width, reduction, reduction, bias=True)
        _add_layer_norm(net)
    keys = float(net.size[1] * net.size[2])
    net.shape = width, size
    for _ in ("key", "value"):
        attention.add_dense(net, keys, width, width)
    attention.add_dot_product_attention(net, pixels, keys, width, heads)
    attention.add_dense(net, pixels, width, width)
    net.add_branch()
    _add_layer_norm(net)
    net.add_conv(ratio * width, 1, bias=True)
    net.add_conv(ratio * width, 3, groups=ratio * width, bias=True)
    net.add_activation("gelu")
    net.add_conv(width, 1, bias=True)
    net.add_branch()


def _add_layer_norm(net: NetworkBuilder) -> None:
    """Add a layer norm over the channels of each pixel."""
    attention.add_layer_norm(net, float(net.size[1] * net.size[2]), net.channels)
