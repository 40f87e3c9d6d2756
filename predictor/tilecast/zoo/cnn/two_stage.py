"""Two-stage detectors: Faster R-CNN, Mask R-CNN and their variants, over a feature pyramid or over one level.

Matching of anchors and non-maximum suppression are not matrix work and are left out, as in one-stage detectors.

Sources: Ren et al., arXiv 1506.01497; Lin et al., arXiv 1612.03144; He et al., arXiv 1703.06870 (figure 4: a head of
the fourth stage, "C4", or of two dense layers); detectron2's configurations of the same names, including "DC5".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tilecast import constants
from tilecast.zoo import layers
from tilecast.zoo.cnn import resnet
from tilecast.zoo.cnn.detection import PYRAMID, Detector, backbone, feature_pyramid, on_every_level
from tilecast.zoo.cnn.tensor import Size
from tilecast.zoo.cnn.walk import Walk

_SIZES = 5
"""Number of sizes of anchors: one on each level of a pyramid, all of them on a single level."""
_SHAPES = 3
"""Number of aspect ratios of anchors."""
_REGION = 14
"""Side of a region of the usual size, in pixels of the features."""
_NEIGHBOURS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TwoStage(Detector):
    """Dimensions of detectors that propose regions."""

    region_stage: bool = False
    """Whether the fourth stage of the ResNet runs on every region, not on the image."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RegionCnn(TwoStage):
    """Dimensions of detectors that classify the regions."""

    proposals: int
    """Regions of an image that are classified in training."""
    given_proposals: bool = False
    """Whether regions are given, not proposed."""
    cascade: int | None = None
    """Heads, each of which refines the boxes of the one before; None: there is one, with boxes for each class."""
    classes: int = 81
    """Categories, one of which is the background."""
    semantic_classes: int = 0
    """Categories of every pixel of the image; 0: pixels are not classified."""


def rpn(walk: Walk, dims: TwoStage) -> None:
    """Write the first stage alone: proposals on the features of a ResNet.

    Norms, stem and first stage of the ResNet are frozen. The features are a pyramid; with `dilated` the fourth stage at
    the size of the third; with `region_stage` the third stage.
    """
    _propose(walk, _features(walk, dims))


def faster_rcnn(walk: Walk, dims: RegionCnn) -> None:
    """Write both stages, or only the second one with `given_proposals`."""
    levels = _features(walk, dims)
    if not dims.given_proposals:
        _propose(walk, levels)
    _boxes(walk, dims, levels)


def mask_rcnn(walk: Walk, dims: RegionCnn) -> None:
    """Write Faster R-CNN and a head for masks.

    The head runs on a quarter of the regions in training and on 100 otherwise. A mask has twice the region's pixels a
    side. There are four convolutions before it, unless the fourth stage ran on the regions already (`region_stage`).
    With `semantic_classes` every pixel of the image is classified as well.
    """
    levels = _features(walk, dims)
    _propose(walk, levels)
    _boxes(walk, dims, levels)
    with _kept_regions(walk, dims):
        if dims.region_stage:
            walk.shape = walk.channels, (1, 7, 7)
        else:
            _align(walk, levels[0][0], 14)
            for _ in range(4):
                walk.conv(PYRAMID, 3, bias=True)
                walk.activate()
        walk.up_conv(PYRAMID)
        walk.activate()
        walk.conv(dims.classes, 1, bias=True)
        walk.loss(2)
    if dims.semantic_classes:
        _segment(walk, levels[:4], dims.semantic_classes)


def keypoint_rcnn(walk: Walk, dims: RegionCnn) -> None:
    """Write Faster R-CNN and a head for the 17 keypoints of people.

    The head has eight convolutions and writes a heat map per keypoint. It runs on a quarter of the regions in training
    and on 100 otherwise.
    """
    levels = _features(walk, dims)
    _propose(walk, levels)
    _boxes(walk, dims, levels)
    with _kept_regions(walk, dims):
        _align(walk, levels[0][0], 14)
        for _ in range(8):
            walk.conv(512, 3, bias=True)
            walk.activate()
        walk.up_conv(17)
        walk.upsample()
        walk.loss(walk.size[1] * walk.size[2])


def _boxes(walk: Walk, dims: RegionCnn, levels: list[tuple[int, Size]]) -> None:
    """Write the prediction of a class and a box for each of `proposals` regions per image, `cascade` (1) times over.

    With `region_stage` the fourth stage of the ResNet runs on every region, otherwise two dense layers.
    """
    images = walk.batch
    walk.batch = images * dims.proposals
    for _ in range(dims.cascade or 1):
        if dims.region_stage:
            _align(walk, levels[0][0], 14)
            walk.fixed_norms = True
            resnet.stage(walk, dims, 4)
            walk.fixed_norms = False
            walk.mean()
        else:
            _align(walk, levels[0][0], 7)
            for _ in range(2):
                walk.dense(1024)
                walk.activate()
        entry, classes = walk.shape, dims.classes
        walk.dense(4 if dims.cascade else classes * 4)
        walk.shape = entry
        walk.dense(classes)
        walk.loss()
        walk.shape = entry
    walk.batch = images


@contextmanager
def _kept_regions(walk: Walk, dims: RegionCnn) -> Iterator[None]:
    """Write layers that run only on regions with objects: a quarter of `proposals` in training, 100 otherwise."""
    images = walk.batch
    walk.batch = images * (dims.proposals / 4 if walk.numerics.training else 100.0)
    yield
    walk.batch = images


def _segment(walk: Walk, levels: list[tuple[int, Size]], classes: int) -> None:
    """Write the prediction of a class for every pixel (Kirillov et al., arXiv 1901.02446, section 3).

    Convolutions, each followed by an upsampling, bring every level to the size of the finest one; the results are
    summed.
    """
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


def _features(walk: Walk, dims: TwoStage) -> list[tuple[int, Size]]:
    """Write the backbone and return channels and size of the levels that proposals and regions are cut from."""
    if dims.region_stage:
        backbone(walk, dims, frozen=True, stages=3)
        return [walk.shape]
    levels = backbone(walk, dims, frozen=True)
    if dims.dilated:
        return levels[-1:]
    pyramid = feature_pyramid(walk, levels)
    channels, (_, height, width) = pyramid[-1]
    return [*pyramid, (channels, (1, -(-height // 2), -(-width // 2)))]


def _propose(walk: Walk, levels: list[tuple[int, Size]]) -> None:
    """Write on every level a 3x3 convolution, and behind it a score and a box for each anchor."""
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
    """Write the cutting of regions out of the features as `side` x `side` pixels (RoIAlign).

    Each pixel is the mean of samples, and each sample is interpolated between four neighbours. There is one sample for
    each pixel of the features under a region (detectron2, layers/roi_align.py: sampling_ratio 0). A region is assumed
    to be 14 pixels wide, like a region of 224 pixels on features of stride 16 (arXiv 1612.03144, equation 1). The
    gradient is added to four neighbours per sample with single atomic additions. Unless channels are adjacent in memory
    (channels last), each addition moves a whole sector.
    """
    walk.shape = (channels, (1, side, side))
    numerics = walk.numerics
    added = _NEIGHBOURS * max(_REGION / side, 1.0) ** 2
    sector_bytes = constants.shipped().kernels.sector_bytes
    written = added if numerics.channels_last else added * sector_bytes / numerics.element
    walk.ops += layers.pointwise(
        "align", numerics, walk.elements, reads=float(_NEIGHBOURS), absorbed=False, backward=(1.0, written)
    )
