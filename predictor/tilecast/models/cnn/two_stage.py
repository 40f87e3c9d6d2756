"""Two-stage detectors: Faster R-CNN, Mask R-CNN and what stands on them, over a feature pyramid or over one level.

Matching of anchors and non-maximum suppression are no matrix work and are left out, as in one-stage detectors.

Sources: Ren et al., arXiv 1506.01497; Lin et al., arXiv 1612.03144; He et al., arXiv 1703.06870 (figure 4: a head of
the fourth stage, "C4", or of two dense layers); detectron2's configurations of the same names, "DC5" among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tilecast.models import layers
from tilecast.models.cnn import resnet
from tilecast.models.cnn.detection import PYRAMID, backbone, feature_pyramid, on_every_level
from tilecast.models.cnn.tensor import Size
from tilecast.models.cnn.walk import Walk

_SIZES = 5
"""Sizes of anchors: one on each level of a pyramid, all of them on a single level."""
_SHAPES = 3
"""Aspect ratios of anchors."""
_REGION = 14
"""Pixels of the features that a region of the usual size spans."""
_NEIGHBOURS = 4
_SECTOR_BYTES = 32.0
"""What the memory moves for one atomic addition."""


def rpn(walk: Walk, extra: Mapping[str, float]) -> None:
    """The first stage alone: proposals on the features of a ResNet whose norms, stem and first stage are frozen.

    The features are a pyramid; with `dilated` the fourth stage at the size of the third; with `region_stage` the third
    stage.
    """
    _propose(walk, _features(walk, extra))


def faster_rcnn(walk: Walk, extra: Mapping[str, float]) -> None:
    """Both stages, or the second alone where proposals are given."""
    levels = _features(walk, extra)
    if not extra.get("given_proposals"):
        _propose(walk, levels)
    _boxes(walk, extra, levels)


def mask_rcnn(walk: Walk, extra: Mapping[str, float]) -> None:
    """Faster R-CNN, and in training on a quarter of the regions (on 100 otherwise) a mask of twice the region's pixels,
    behind four convolutions where the fourth stage did not run on the regions already."""
    levels = _features(walk, extra)
    _propose(walk, levels)
    _boxes(walk, extra, levels)
    with _kept_regions(walk, extra):
        if extra.get("region_stage"):
            walk.shape = walk.channels, (1, 7, 7)
        else:
            _align(walk, levels[0][0], 14)
            for _ in range(4):
                walk.conv(PYRAMID, 3, bias=True)
                walk.activate()
        walk.up_conv(PYRAMID)
        walk.activate()
        walk.conv(int(extra.get("classes", 81)), 1, bias=True)
        walk.loss(2)
    if extra.get("semantic_classes"):
        _segment(walk, levels[:4], int(extra["semantic_classes"]))


def keypoint_rcnn(walk: Walk, extra: Mapping[str, float]) -> None:
    """Faster R-CNN on people, and on a quarter of the regions eight convolutions and heat maps of 17 points."""
    levels = _features(walk, extra)
    _propose(walk, levels)
    _boxes(walk, extra, levels)
    with _kept_regions(walk, extra):
        _align(walk, levels[0][0], 14)
        for _ in range(8):
            walk.conv(512, 3, bias=True)
            walk.activate()
        walk.up_conv(17)
        walk.upsample()
        walk.loss(walk.size[1] * walk.size[2])


def _boxes(walk: Walk, extra: Mapping[str, float], levels: list[tuple[int, Size]]) -> None:
    """A class and a box for each of `proposals` regions per image, `cascade` (1) times over. With `region_stage` the
    fourth stage runs on every region, otherwise two dense layers."""
    images = walk.batch
    walk.batch = images * extra["proposals"]
    for _ in range(int(extra.get("cascade", 1))):
        if extra.get("region_stage"):
            _align(walk, levels[0][0], 14)
            walk.fixed_norms = True
            resnet.stage(walk, extra, 4)
            walk.fixed_norms = False
            walk.mean()
        else:
            _align(walk, levels[0][0], 7)
            for _ in range(2):
                walk.dense(1024)
                walk.activate()
        entry, classes = walk.shape, int(extra.get("classes", 81))
        walk.dense(4 if "cascade" in extra else classes * 4)
        walk.shape = entry
        walk.dense(classes)
        walk.loss()
        walk.shape = entry
    walk.batch = images


@contextmanager
def _kept_regions(walk: Walk, extra: Mapping[str, float]) -> Iterator[None]:
    """Regions that show something: a quarter of those sampled in training, the best 100 otherwise."""
    images = walk.batch
    walk.batch = images * (extra["proposals"] / 4 if walk.numerics.training else 100.0)
    yield
    walk.batch = images


def _segment(walk: Walk, levels: list[tuple[int, Size]], classes: int) -> None:
    """A class for every pixel: levels are brought to the finest one's size, convolution by convolution, and summed
    (Kirillov et al., arXiv 1901.02446, section 3)."""
    for steps, level in enumerate(levels):
        walk.shape = level
        for step in range(max(1, steps)):
            walk.unit(128, 3)
            if step < steps:
                walk.upsample()
        walk.add()
    walk.shape = 128, levels[0][1]
    walk.conv(classes, 1, bias=True)
    walk.upsample()
    walk.upsample()
    walk.loss()


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
    """Regions cut out of the features as `side` x `side` pixels, each the mean of samples between four neighbours.

    There is a sample for each pixel of the features under a region (detectron2, layers/roi_align.py: sampling_ratio 0),
    and a region is taken to be 14 pixels wide, as one of 224 on features of stride 16 (arXiv 1612.03144, equation 1).
    The gradient adds to four neighbours for each sample, one at a time: a whole sector moves for each unless channels
    lie side by side.
    """
    walk.shape = (channels, (1, side, side))
    numerics = walk.numerics
    added = _NEIGHBOURS * max(_REGION / side, 1.0) ** 2
    written = added if numerics.channels_last else added * _SECTOR_BYTES / numerics.element
    walk.ops += layers.pointwise(
        "align", numerics, walk.elements, reads=float(_NEIGHBOURS), absorbed=False, backward=(1.0, written)
    )
