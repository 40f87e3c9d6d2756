"""AlexNet and VGG: convolutions, then three dense layers.

Sources: Krizhevsky, arXiv 1404.5997 (the single-column AlexNet of torchvision); Simonyan and Zisserman,
arXiv 1409.1556 (table 1).
"""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.zoo.cnn.walk import Walk


def vgg(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write VGG: five stages of `stage1` ... `stage5` 3x3 convolutions, with `batch_norm` each followed by a norm."""
    for number in range(1, 6):
        for _ in range(int(extra[f"stage{number}"])):
            walk.conv(min(32 * 2**number, 512), 3, bias=True)
            if extra.get("batch_norm"):
                walk.norm()
            walk.activate()
        walk.pool(2, 2)
    _dense_head(walk, int(extra.get("classes", 1000)))


def alexnet(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write AlexNet: five convolutions and three poolings."""
    for out, kernel, stride, padding, pooled in (
        (64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False), (256, 3, 1, 1, True),
    ):  # fmt: skip
        walk.conv(out, kernel, stride, bias=True, padding=padding)
        walk.activate()
        if pooled:
            walk.pool(3, 2, padding=0)
    _dense_head(walk, int(extra.get("classes", 1000)))


def _dense_head(walk: Walk, classes: int) -> None:
    for _ in range(2):
        walk.dense(4096)
        walk.activate()
        walk.dropout()
    walk.dense(classes)
    walk.loss()
