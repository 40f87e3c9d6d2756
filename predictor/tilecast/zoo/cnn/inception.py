"""GoogLeNet and Inception v3: modules of parallel branches, concatenated.

The auxiliary classifier of Inception v3 counts in training only, as published.

Sources: Szegedy et al., arXiv 1409.4842 (table 1, with batch norm and a 3x3 in place of the 5x5 convolution, as in
torchvision); Szegedy et al., arXiv 1512.00567 (figures 5 to 7, table 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tilecast.zoo.cnn.images import Classifier
from tilecast.zoo.cnn.walk import Walk

Unit: TypeAlias = tuple[int, int | tuple[int, int], int]
"""Output channels, kernel and stride of a convolution with norm and ReLU."""
Branch: TypeAlias = Sequence[Unit]


def googlenet(walk: Walk, dims: Classifier) -> None:
    """Write GoogLeNet: nine modules of four branches, which are 1x1; 3x3; 5x5 (as 3x3); pooling and 1x1."""
    walk.unit(64, 7, 2)
    walk.pool(3, 2)
    walk.unit(64, 1)
    walk.unit(192, 3)
    walk.pool(3, 2)
    for index, (one, three_in, three, five_in, five, pooled) in enumerate((
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64),
        (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
    )):  # fmt: skip
        if index in (2, 7):
            walk.pool(3, 2)
        branches: list[Branch] = [[(one, 1, 1)], [(three_in, 1, 1), (three, 3, 1)], [(five_in, 1, 1), (five, 3, 1)]]
        _module(walk, branches, pooled=pooled)
    walk.classify(dims.classes, dropout=True)


def inception_v3(walk: Walk, dims: Classifier) -> None:
    """Write Inception v3: a stem, three modules A, a reduction, four modules C, a reduction, and two modules E."""
    classes = dims.classes
    walk.unit(32, 3, 2, padding=0)
    walk.unit(32, 3, padding=0)
    walk.unit(64, 3)
    walk.pool(3, 2, padding=0)
    walk.unit(80, 1)
    walk.unit(192, 3, padding=0)
    walk.pool(3, 2, padding=0)
    for pooled in (32, 64, 64):
        _module(
            walk,
            [[(64, 1, 1)], [(48, 1, 1), (64, 5, 1)], [(64, 1, 1), (96, 3, 1), (96, 3, 1)]],
            pooled=pooled,
            average=True,
        )
    _module(walk, [[(384, 3, 2)], [(64, 1, 1), (96, 3, 1), (96, 3, 2)]])
    row, column = (1, 7), (7, 1)
    for width in (128, 160, 160, 192):
        double: Branch = [(width, 1, 1), (width, column, 1), (width, row, 1), (width, column, 1), (192, row, 1)]
        _module(
            walk, [[(192, 1, 1)], [(width, 1, 1), (width, row, 1), (192, column, 1)], double], pooled=192, average=True
        )
    if walk.numerics.training:
        _auxiliary(walk, classes)
    _module(walk, [[(192, 1, 1), (320, 3, 2)], [(192, 1, 1), (192, row, 1), (192, column, 1), (192, 3, 2)]])
    for _ in range(2):
        _module_e(walk)
    walk.classify(classes, dropout=True)


def _module(walk: Walk, branches: Sequence[Branch], *, pooled: int = 0, average: bool = False) -> None:
    """Write `branches` and a pooling branch side by side, concatenated.

    With `pooled` the pooling branch ends in a 1x1 convolution to that many channels. Otherwise the branches end with
    stride 2, and the pooling branch is the pooled input itself.
    """
    entry = walk.shape
    walk.fork(len(branches) + 1)
    channels = 0
    for index, branch in enumerate(branches):
        if index:
            walk.again(entry)
        _run(walk, branch)
        channels += walk.channels
    walk.again(entry)
    if pooled:
        walk.pool(3, 1, average=average)
        walk.unit(pooled, 1)
    else:
        walk.pool(3, 2, padding=0)
    walk.concatenate(channels + walk.channels)


def _run(walk: Walk, branch: Branch) -> None:
    for out, kernel, stride in branch:
        walk.unit(out, kernel, stride, padding=0 if stride > 1 else None)


def _module_e(walk: Walk) -> None:
    entry = walk.shape
    walk.fork(4)
    for before in ([(384, 1, 1)], [(448, 1, 1), (384, 3, 1)]):
        walk.shape = entry
        _run(walk, before)
        split = walk.shape
        walk.fork(2)
        for kernel in ((1, 3), (3, 1)):
            if kernel == (3, 1):
                walk.again(split)
            walk.unit(384, kernel)
    walk.again(entry)
    walk.unit(320, 1)
    walk.again(entry)
    walk.pool(3, 1, average=True)
    walk.unit(192, 1)
    walk.concatenate(320 + 4 * 384 + 192)


def _auxiliary(walk: Walk, classes: int) -> None:
    entry = walk.shape
    walk.fork(2)
    walk.pool(5, 3, padding=0, average=True)
    walk.unit(128, 1)
    walk.unit(768, 5, padding=0)
    walk.classify(classes)
    walk.shape = entry
