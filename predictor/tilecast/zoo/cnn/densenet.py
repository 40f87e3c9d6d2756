"""DenseNet: every layer reads what all earlier layers of its stage wrote (Huang et al., arXiv 1608.06993, table 1)."""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.zoo.cnn.walk import Walk

_BOTTLENECK = 4
"""Channels of a layer's 1x1 convolution, in units of the growth rate."""


def densenet(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write a classifier of four stages of `stage1` ... `stage4` layers that add `growth` channels each.

    The stem has `stem` channels (twice `growth`). Transitions between stages halve channels, height and width.
    """
    growth = int(extra["growth"])
    stem = int(extra.get("stem", 2 * growth))
    walk.unit(stem, 7, 2)
    walk.pool(3, 2)
    for number in range(1, 5):
        for _ in range(int(extra[f"stage{number}"])):
            _layer(walk, growth)
        walk.norm()
        walk.activate()
        if number < 4:
            walk.conv(walk.channels // 2, 1)
            walk.pool(2, 2, average=True)
    walk.classify(int(extra.get("classes", 1000)))


def _layer(walk: Walk, growth: int) -> None:
    entry = walk.shape
    walk.fork(2)
    walk.norm()
    walk.activate()
    walk.unit(_BOTTLENECK * growth, 1)
    walk.conv(growth, 3)
    walk.concatenate(entry[0] + growth)
