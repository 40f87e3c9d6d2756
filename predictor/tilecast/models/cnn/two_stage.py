"""Two-stage detectors: Faster R-CNN and Mask R-CNN, over a feature pyramid or over one level of features.

Matching of anchors and non-maximum suppression are no matrix work and are left out, as in one-stage detectors.

Sources: Ren et al., arXiv 1506.01497; Lin et al., arXiv 1612.03144; He et al., arXiv 1703.06870 (figure 4: a head of
the fourth stage, "C4", or of two dense layers); detectron2's configurations of the same names, "DC5" among them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.models import layers
from tilecast.models.cnn import resnet
from tilecast.models.cnn.detection import PYRAMID, backbone, feature_pyramid, on_every_level
from tilecast.models.cnn.walk import Size, Walk

_SIZES = 5
"""Sizes of anchors: one on each level of a pyramid, all of them on a single level."""
_SHAPES = 3
"""Aspect ratios of anchors."""


def faster_rcnn(walk: Walk, extra: Mapping[str, float]) -> None:
    """Proposals on the features of a ResNet whose norms, stem and first stage are frozen, then a class and a box for
    each of `proposals` regions per image.

    The features are a pyramid; with `dilated` the fourth stage at the size of the third; with `region_stage` the third
    stage, and the fourth runs on every region.
    """
    whole = bool(extra.get("region_stage"))
    levels = _features(walk, extra)
    _propose(walk, levels)
    images = walk.batch
    walk.batch = images * extra["proposals"]
    _align(walk, levels[0][0], 14 if whole else 7)
    if whole:
        walk.fixed_norms = True
        resnet.stage(walk, extra, 4)
        walk.fixed_norms = False
        walk.mean()
    else:
        _dense_head(walk)
    _detect(walk, int(extra.get("classes", 81)))
    walk.batch = images


def mask_rcnn(walk: Walk, extra: Mapping[str, float]) -> None:
    """Faster R-CNN on a pyramid, and in training on a quarter of the regions (on 100 otherwise) a mask of 28 x 28."""
    faster_rcnn(walk, extra)
    images = walk.batch
    walk.batch = images * (extra["proposals"] / 4 if walk.numerics.training else 100.0)
    _align(walk, PYRAMID, 14)
    for _ in range(4):
        walk.conv(PYRAMID, 3, bias=True)
        walk.activate()
    walk.up_conv(PYRAMID)
    walk.activate()
    walk.conv(int(extra.get("classes", 81)), 1, bias=True)
    walk.loss(2)
    walk.batch = images


def _features(walk: Walk, extra: Mapping[str, float]) -> list[tuple[int, Size]]:
    """Channels and sizes of the levels that proposals and regions are cut from."""
    if extra.get("region_stage"):
        backbone(walk, extra, frozen=True, stages=3)
        return [walk.shape]
    levels = backbone(walk, extra, frozen=True)
    if extra.get("dilated"):
        return levels[-1:]
    pyramid = feature_pyramid(walk, levels)
    channels, (_, height, width) = pyramid[-1]
    return [*pyramid, (channels, (1, -(-height // 2), -(-width // 2)))]


def _propose(walk: Walk, levels: list[tuple[int, Size]]) -> None:
    """On every level a 3x3 convolution, and on that whether there is something in each anchor's box, and where."""
    anchors = _SHAPES * (_SIZES if len(levels) == 1 else 1)

    def head() -> None:
        walk.conv(walk.channels, 3, bias=True)
        walk.activate()
        entry = walk.shape
        walk.conv(anchors, 1, bias=True)
        walk.again(entry)
        walk.conv(anchors * 4, 1, bias=True)

    on_every_level(walk, levels, head)


def _align(walk: Walk, channels: int, side: int) -> None:
    """Regions cut out of the features as `side` x `side` pixels, each from four samples of four neighbours."""
    walk.shape = (channels, (1, side, side))
    walk.ops += layers.pointwise("align", walk.numerics, walk.elements, reads=4.0, absorbed=False, backward=(1.0, 4.0))


def _dense_head(walk: Walk) -> None:
    for _ in range(2):
        walk.dense(1024)
        walk.activate()


def _detect(walk: Walk, classes: int) -> None:
    """A class, background among them, and a box for every class."""
    entry = walk.shape
    walk.dense(classes * 4)
    walk.shape = entry
    walk.dense(classes)
    walk.loss()
