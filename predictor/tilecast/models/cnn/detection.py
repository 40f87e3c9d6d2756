"""Detectors: SSD300, RetinaNet, Mask R-CNN and YOLOv3.

Anchors, matching and non-maximum suppression are no matrix work and are left out; what they launch is the reason why
measured steps of detectors are longer than these operators.

Sources: Liu et al., arXiv 1512.02325 (with a ResNet whose fourth stage keeps its stride 1, as MLPerf runs it); Lin et
al., arXiv 1612.03144 and 1708.02002; He et al., arXiv 1703.06870; Redmon and Farhadi, arXiv 1804.02767.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilecast.models import layers
from tilecast.models.cnn import resnet
from tilecast.models.cnn.walk import Size, Walk

_PYRAMID = 256
"""Channels of every level of a feature pyramid and of the heads on it."""


def ssd(walk: Walk, extra: Mapping[str, float]) -> None:
    """SSD on images of 300 pixels: three stages of a ResNet, five further scales, and on each of the six a class and
    a box for 4 or 6 default boxes per pixel."""
    resnet.stem(walk)
    for number, stride in ((1, 1), (2, 2), (3, 1)):
        resnet.stage(walk, extra, number, stride=stride)
    scales = [walk.shape]
    for inner, out, stride, padding in (
        (256, 512, 2, None), (256, 512, 2, None), (128, 256, 2, None), (128, 256, 1, 0), (128, 256, 1, 0),
    ):  # fmt: skip
        walk.unit(inner, 1)
        walk.unit(out, 3, stride, padding=padding)
        scales.append(walk.shape)
    classes = int(extra.get("classes", 81))
    for boxes, scale in zip((4, 6, 6, 6, 4, 4), scales, strict=True):
        walk.shape = scale
        walk.fork(3)
        walk.conv(boxes * 4, 3, bias=True)
        walk.shape = scale
        walk.conv(boxes * classes, 3, bias=True)
        walk.loss(classes)


def retinanet(walk: Walk, extra: Mapping[str, float]) -> None:
    """A feature pyramid over stages 2 to 4 of a ResNet and two further levels, and on each level two towers of four
    3x3 convolutions for the classes and boxes of nine anchors per pixel."""
    levels = _backbone(walk, extra)
    pyramid = _feature_pyramid(walk, levels[1:])
    walk.shape = levels[-1] if extra.get("from_backbone") else pyramid[-1]
    for _ in range(2):
        walk.conv(_PYRAMID, 3, 2, bias=True)
        pyramid.append(walk.shape)
    classes = int(extra.get("classes", 91))
    for outputs, categories in ((9 * classes, 1), (9 * 4, 0)):

        def tower(outputs: int = outputs, categories: int = categories) -> None:
            for _ in range(4):
                walk.conv(_PYRAMID, 3, bias=True)
                walk.activate()
            walk.conv(outputs, 3, bias=True)
            if categories:
                walk.loss(2)

        _on_every_level(walk, pyramid, tower)


def mask_rcnn(walk: Walk, extra: Mapping[str, float]) -> None:
    """Proposals on a feature pyramid over a ResNet whose stem and first stage are frozen, then on `proposals` regions
    per image two dense layers, and in training on a quarter of them (100 otherwise) a mask of 28 x 28."""
    levels = _backbone(walk, extra, frozen=True)
    pyramid = _feature_pyramid(walk, levels)
    channels, (_, height, width) = pyramid[-1]
    coarsest: tuple[int, Size] = (channels, (1, -(-height // 2), -(-width // 2)))

    def propose() -> None:
        walk.conv(_PYRAMID, 3, bias=True)
        walk.activate()
        entry = walk.shape
        walk.conv(3, 1, bias=True)
        walk.shape = entry
        walk.conv(3 * 4, 1, bias=True)

    _on_every_level(walk, [*pyramid, coarsest], propose)
    classes, proposals, images = int(extra.get("classes", 81)), extra["proposals"], walk.batch
    walk.batch = images * proposals
    _align(walk, 7)
    for _ in range(2):
        walk.dense(1024)
        walk.activate()
    entry = walk.shape
    walk.dense(classes * 4)
    walk.shape = entry
    walk.dense(classes)
    walk.loss()
    walk.batch = images * (proposals / 4 if walk.numerics.training else 100.0)
    _align(walk, 14)
    for _ in range(4):
        walk.conv(_PYRAMID, 3, bias=True)
        walk.activate()
    walk.up_conv(_PYRAMID)
    walk.activate()
    walk.conv(classes, 1, bias=True)
    walk.loss(2)
    walk.batch = images


def _backbone(walk: Walk, extra: Mapping[str, float], *, frozen: bool = False) -> list[tuple[int, Size]]:
    """The shapes that the four stages of a ResNet leave."""
    shapes = []
    if frozen:
        with walk.frozen():
            resnet.stem(walk)
            resnet.stage(walk, extra, 1)
    else:
        resnet.stem(walk)
        resnet.stage(walk, extra, 1)
    shapes.append(walk.shape)
    for number in range(2, 5):
        resnet.stage(walk, extra, number)
        shapes.append(walk.shape)
    return shapes


def _feature_pyramid(walk: Walk, levels: Sequence[tuple[int, Size]]) -> list[tuple[int, Size]]:
    """From the coarsest level to the finest: a 1x1 convolution, plus the level above at twice the size, then a 3x3
    convolution. Returns the shapes, finest first."""
    pyramid: list[tuple[int, Size]] = []
    for index, level in enumerate(reversed(levels)):
        walk.shape = level
        walk.conv(_PYRAMID, 1, bias=True)
        if index:
            walk.ops += layers.pointwise("upsample", walk.numerics, walk.elements, reads=0.25, backward=(1.0, 0.25))
            walk.add()
        walk.conv(_PYRAMID, 3, bias=True)
        pyramid.insert(0, walk.shape)
    return pyramid


def _on_every_level(walk: Walk, levels: Sequence[tuple[int, Size]], head: Callable[[], None]) -> None:
    """The same head, with the same weights, on every level."""
    before = walk.parameters
    for level in levels:
        walk.parameters = before
        walk.shape = level
        walk.fork(2)
        head()


def _align(walk: Walk, side: int) -> None:
    """Regions cut out of the pyramid as `side` x `side` pixels, each from four samples of four neighbours."""
    walk.shape = (_PYRAMID, (1, side, side))
    walk.ops += layers.pointwise("align", walk.numerics, walk.elements, reads=4.0, absorbed=False, backward=(1.0, 4.0))


def yolo_v3(walk: Walk, extra: Mapping[str, float]) -> None:
    """Darknet-53 and three scales of detections, three anchors per pixel each. Every output has a logistic loss of its
    own (section 2.2)."""
    walk.unit(32, 3)
    routes = []
    for blocks in (1, 2, 8, 8, 4):
        walk.unit(2 * walk.channels, 3, 2)
        for _ in range(blocks):
            out = walk.channels
            walk.unit(out // 2, 1)
            walk.unit(out, 3)
            walk.add()
        routes.append(walk.shape)
    outputs = 3 * (5 + int(extra.get("classes", 80)))
    for width, route in zip((512, 256, 128), (None, routes[3], routes[2]), strict=True):
        if route:
            walk.unit(width, 1)
            walk.upsample()
            walk.concatenate(width + route[0])
        for _ in range(2):
            walk.unit(width, 1)
            walk.unit(2 * width, 3)
        walk.unit(width, 1)
        entry = walk.shape
        walk.fork(2)
        walk.unit(2 * width, 3)
        walk.conv(outputs, 1, bias=True)
        walk.loss(1)
        walk.shape = entry
