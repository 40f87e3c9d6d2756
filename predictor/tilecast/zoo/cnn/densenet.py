"""DenseNet: every layer reads what all earlier layers of its stage wrote (Huang et al., arXiv 1608.06993, table 1)."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model import numbered
from tilecast.zoo.cnn.images import Classifier
from tilecast.zoo.cnn.walk import Walk

_BOTTLENECK = 4
"""Channels of a layer's 1x1 convolution, in units of the growth rate."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DenseNet(Classifier):
    """Dimensions of DenseNet."""

    stages: tuple[int, int, int, int] = numbered("stage")
    """Layers of each stage."""
    growth: int
    """Channels that each layer adds."""
    stem: int | None = None
    """Channels of the stem; None: twice `growth`."""


def densenet(walk: Walk, dims: DenseNet) -> None:
    """Write a classifier of four stages; transitions between them halve channels, height and width."""
    growth = dims.growth
    stem = 2 * growth if dims.stem is None else dims.stem
    walk.unit(stem, 7, 2)
    walk.pool(3, 2)
    for number in range(1, 5):
        for _ in range(dims.stages[number - 1]):
            _layer(walk, growth)
        walk.norm()
        walk.activate()
        if number < 4:
            walk.conv(walk.channels // 2, 1)
            walk.pool(2, 2, average=True)
    walk.classify(dims.classes)


def _layer(walk: Walk, growth: int) -> None:
    entry = walk.shape
    walk.fork(2)
    walk.norm()
    walk.activate()
    walk.unit(_BOTTLENECK * growth, 1)
    walk.conv(growth, 3)
    walk.concatenate(entry[0] + growth)
