"""EfficientDet: a bidirectional feature pyramid of separable convolutions over EfficientNet.

Source: Tan et al., arXiv 1911.09070, section 3.3 and table 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo.cnn import mobile
from tilecast.zoo.cnn.detection import focal_loss
from tilecast.zoo.cnn.tensor import Size
from tilecast.zoo.cnn.walk import Walk

_READ = (2, 4, 6)
"""Indices of the stages of EfficientNet that the pyramid reads; their sides are 1/8, 1/16 and 1/32 of the image's."""
_ANCHORS = 9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EfficientDet(mobile.EfficientNet):
    """Dimensions of EfficientDet."""

    pyramids: int
    """Bidirectional pyramids, one after the other."""
    pyramid_channels: int
    """Channels of every level."""
    head_layers: int
    """Separable convolutions of a head before its last."""
    classes: int = 90
    """Categories."""


def efficientdet(walk: Walk, dims: EfficientDet) -> None:
    """Write `pyramids` bidirectional pyramids of `pyramid_channels` over five levels, and the heads on every level.

    A head has `head_layers` separable convolutions and one for its outputs. One head predicts the classes and one the
    boxes of nine anchors per pixel. The levels share the weights of the convolutions, but each has its own norms.
    """
    channels = dims.pyramid_channels
    backbone = mobile.efficientnet_levels(walk, dims)
    levels = _extended(walk, [backbone[index] for index in _READ], channels)
    for number in range(dims.pyramids):
        levels = _pyramid(walk, levels, channels, first=number == 0)
    for outputs, is_class in ((_ANCHORS * dims.classes, True), (_ANCHORS * 4, False)):
        weights = 0.0
        for place, level in enumerate(levels):
            walk.shape = level
            walk.fork(2)
            before = walk.parameters
            norms = _tower(walk, dims.head_layers, channels, outputs)
            weights = walk.parameters - before - norms
            walk.parameters = before + norms + (weights if place == 0 else 0.0)
            if is_class:
                focal_loss(walk)


def _extended(walk: Walk, levels: list[tuple[int, Size]], channels: int) -> list[tuple[int, Size]]:
    """Add two coarser levels: the last level at `channels` and half its size, and again at half of that."""
    walk.shape = levels[-1]
    walk.conv(channels, 1, bias=True)
    walk.norm()
    walk.pool(3, 2)
    coarser = walk.shape
    walk.pool(3, 2)
    return [*levels, coarser, walk.shape]


def _pyramid(walk: Walk, levels: list[tuple[int, Size]], channels: int, *, first: bool) -> list[tuple[int, Size]]:
    """Write one pyramid, from the coarsest level to the finest and back, and return its levels.

    The finest and the coarsest level have one node each, the others two. The `first` pyramid projects levels that are
    not `channels` wide: the finest once, the others once per direction.
    """
    for level in levels:
        if first and level[0] != channels:
            for _ in range(1 if level is levels[0] else 2):
                walk.again(level)
                walk.conv(channels, 1, bias=True)
                walk.norm()
    sizes = [size for _, size in levels]
    for place in range(len(sizes) - 2, -1, -1):
        walk.shape = channels, sizes[place]
        _node(walk, inputs=2, resized="upsample")
    for place in range(1, len(sizes)):
        walk.shape = channels, sizes[place]
        _node(walk, inputs=3 if place < len(sizes) - 1 else 2, resized="pool")
    return [(channels, size) for size in sizes]


def _node(walk: Walk, *, inputs: int, resized: str) -> None:
    """Write one node: resize one input from the next level, sum all inputs with weights, and convolve the sum."""
    if resized == "pool":
        channels, (depth, height, width) = walk.shape
        walk.again((channels, (depth, 2 * height, 2 * width)))
        walk.pool(3, 2)
    else:
        walk.resize(0.25)
    for _ in range(inputs):
        walk.scale()
    for _ in range(inputs - 1):
        walk.add()
    walk.parameters += inputs
    walk.activate("silu")
    walk.separable(walk.channels)
    walk.norm()


def _tower(walk: Walk, depth: int, channels: int, outputs: int) -> float:
    """Write the layers of a head and return the number of parameters of its norms."""
    norms = 0.0
    for _ in range(depth):
        walk.separable(channels)
        walk.norm()
        norms += 2.0 * channels
        walk.activate("silu")
    walk.separable(outputs)
    return norms
