"""EfficientDet: a bidirectional feature pyramid of separable convolutions over EfficientNet.

Source: Tan et al., arXiv 1911.09070, section 3.3 and table 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo.cnn import mobile
from tilecast.zoo.cnn.builder import NetworkBuilder, Shape
from tilecast.zoo.cnn.detection import add_focal_loss

_READ = (2, 4, 6)
"""Indices of the stages of EfficientNet that the pyramid reads; their sides are 1/8, 1/16 and 1/32 of the image's."""
_ANCHORS = 9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EfficientDet(mobile.EfficientNet):
    """Dimensions of EfficientDet."""

    pyramids: int
    """Number of bidirectional pyramids in sequence."""
    pyramid_channels: int
    """Channels of every level."""
    head_layers: int
    """Separable convolutions of a head before the last one."""
    classes: int = 90


def build_efficientdet(net: NetworkBuilder, dims: EfficientDet) -> None:
    """Build EfficientDet: EfficientNet, bidirectional pyramids over five levels, and two heads on every level.

    One head predicts the classes and the other the boxes of nine anchors per pixel. A head has `head_layers` separable
    convolutions and an output convolution. All levels share the weights of these convolutions, but not the norms.
    """
    channels = dims.pyramid_channels
    backbone = mobile.add_efficientnet_stages(net, dims)
    levels = _add_coarser_levels(net, [backbone[index] for index in _READ], channels)
    for number in range(dims.pyramids):
        levels = _add_pyramid(net, levels, channels, first=number == 0)
    for outputs, is_class in ((_ANCHORS * dims.classes, True), (_ANCHORS * 4, False)):
        weights = 0.0
        for place, level in enumerate(levels):
            net.shape = level
            net.add_branch_gradient_sums(2)
            before = net.parameters
            norms = _add_head(net, dims.head_layers, channels, outputs)
            weights = net.parameters - before - norms
            net.parameters = before + norms + (weights if place == 0 else 0.0)
            if is_class:
                add_focal_loss(net)


def _add_coarser_levels(net: NetworkBuilder, levels: list[Shape], channels: int) -> list[Shape]:
    """Add two levels, each half as large as the previous level. Return the shapes of all levels, finest first."""
    net.shape = levels[-1]
    net.add_conv(channels, 1, bias=True)
    net.add_channel_norm()
    net.add_pool(3, 2)
    coarser = net.shape
    net.add_pool(3, 2)
    return [*levels, coarser, net.shape]


def _add_pyramid(net: NetworkBuilder, levels: list[Shape], channels: int, *, first: bool) -> list[Shape]:
    """Add one bidirectional pyramid and return the shapes of its levels, finest first.

    The finest and the coarsest level have one node, all others two. The `first` pyramid projects each level that does
    not have `channels` channels, separately for each of its nodes.
    """
    for level in levels:
        if first and level[0] != channels:
            for _ in range(1 if level is levels[0] else 2):
                net.continue_from(level)
                net.add_conv(channels, 1, bias=True)
                net.add_channel_norm()
    sizes = [size for _, size in levels]
    for place in range(len(sizes) - 2, -1, -1):
        net.shape = channels, sizes[place]
        _add_pyramid_node(net, inputs=2, resized="upsample")
    for place in range(1, len(sizes)):
        net.shape = channels, sizes[place]
        _add_pyramid_node(net, inputs=3 if place < len(sizes) - 1 else 2, resized="pool")
    return [(channels, size) for size in sizes]


def _add_pyramid_node(net: NetworkBuilder, *, inputs: int, resized: str) -> None:
    """Add a pyramid node: resize one input, sum all `inputs` inputs with trained weights, and convolve the sum.

    `resized` is "pool" or "upsample".
    """
    if resized == "pool":
        channels, (depth, height, width) = net.shape
        net.continue_from((channels, (depth, 2 * height, 2 * width)))
        net.add_pool(3, 2)
    else:
        net.add_resize(0.25)
    for _ in range(inputs):
        net.add_constant_product()
    for _ in range(inputs - 1):
        net.add_branch()
    net.parameters += inputs
    net.add_activation("silu")
    net.add_separable_conv(net.channels)
    net.add_channel_norm()


def _add_head(net: NetworkBuilder, depth: int, channels: int, outputs: int) -> float:
    """Add the layers of a head and return the number of parameters in its norms."""
    norms = 0.0
    for _ in range(depth):
        net.add_separable_conv(channels)
        net.add_channel_norm()
        norms += 2.0 * channels
        net.add_activation("silu")
    net.add_separable_conv(outputs)
    return norms
