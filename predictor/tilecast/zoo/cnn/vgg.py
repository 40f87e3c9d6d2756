"""AlexNet and VGG: convolutions, then three dense layers.

Sources: Krizhevsky, arXiv 1404.5997 (the single-column AlexNet of torchvision); Simonyan and Zisserman,
arXiv 1409.1556 (table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model import numbered
from tilecast.zoo.cnn.images import Classifier
from tilecast.zoo.cnn.walk import Walk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Vgg(Classifier):
    """Dimensions of VGG."""

    stages: tuple[int, int, int, int, int] = numbered("stage")
    """Convolutions of each stage."""
    batch_norm: bool = False
    """Whether a norm follows each convolution."""


def vgg(walk: Walk, dims: Vgg) -> None:
    """Write VGG: five stages of 3x3 convolutions."""
    for number, depth in enumerate(dims.stages, 1):
        for _ in range(depth):
            walk.conv(min(32 * 2**number, 512), 3, bias=True)
            if dims.batch_norm:
                walk.norm()
            walk.activate()
        walk.pool(2, 2)
    _dense_head(walk, dims.classes)


def alexnet(walk: Walk, dims: Classifier) -> None:
    """Write AlexNet: five convolutions and three poolings."""
    for out, kernel, stride, padding, pooled in (
        (64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False), (256, 3, 1, 1, True),
    ):  # fmt: skip
        walk.conv(out, kernel, stride, bias=True, padding=padding)
        walk.activate()
        if pooled:
            walk.pool(3, 2, padding=0)
    _dense_head(walk, dims.classes)


def _dense_head(walk: Walk, classes: int) -> None:
    for _ in range(2):
        walk.dense(4096)
        walk.activate()
        walk.dropout()
    walk.dense(classes)
    walk.loss()
