"""One-stage detectors: SSD300, RetinaNet and YOLOv3.

Anchors, matching and non-maximum suppression are not matrix work and are left out. The kernels that they launch are
the reason why measured steps of detectors are longer than these operators.

Sources: Liu et al., arXiv 1512.02325 (with a ResNet whose fourth stage keeps its stride 1, as MLPerf runs it); Lin et
al., arXiv 1612.03144 and 1708.02002; Redmon and Farhadi, arXiv 1804.02767.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from tilecast.model import numbered
from tilecast.zoo import layers
from tilecast.zoo.cnn import resnet
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.resnet import Residual
from tilecast.zoo.cnn.tensor import Size
from tilecast.zoo.cnn.walk import Walk

PYRAMID = 256
"""Channels of every level of a feature pyramid and of the heads on it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Detector(Residual):
    """Dimensions of a detector over the four stages of a ResNet."""

    stages: tuple[int, int, int, int] = numbered("stage")
    """Blocks of each stage."""
    dilated: bool = False
    """Whether the fourth stage keeps the size of the third."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Ssd(Residual):
    """Dimensions of SSD."""

    stages: tuple[int, int, int] = numbered("stage")
    """Blocks of each stage."""
    classes: int = 81
    """Categories, one of which is the background."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RetinaNet(Detector):
    """Dimensions of RetinaNet."""

    classes: int = 91
    """Categories."""
    anchors: int = 9
    """Boxes per pixel."""
    frozen: bool = False
    """Whether the norms of the backbone, its stem and its first stage stay as pretrained."""
    tower_norm: bool = False
    """Whether the towers have norms."""
    from_backbone: bool = False
    """Whether the further levels come from the last level of the backbone, not of the pyramid."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class YoloV3(Images):
    """Dimensions of YOLOv3."""

    classes: int = 80
    """Categories."""


def ssd(walk: Walk, dims: Ssd) -> None:
    """Write SSD for images of 300 pixels.

    It has three stages of a ResNet and five further scales. Each of the six scales predicts a class and a box for 4 or
    6 default boxes per pixel.
    """
    resnet.stem(walk)
    for number, stride in ((1, 1), (2, 2), (3, 1)):
        resnet.stage(walk, dims, number, stride=stride)
    scales = [walk.shape]
    for inner, out, stride, padding in (
        (256, 512, 2, None), (256, 512, 2, None), (128, 256, 2, None), (128, 256, 1, 0), (128, 256, 1, 0),
    ):  # fmt: skip
        walk.unit(inner, 1)
        walk.unit(out, 3, stride, padding=padding)
        scales.append(walk.shape)
    classes = dims.classes
    for boxes, scale in zip((4, 6, 6, 6, 4, 4), scales, strict=True):
        walk.shape = scale
        walk.fork(3)
        walk.conv(boxes * 4, 3, bias=True)
        walk.shape = scale
        walk.conv(boxes * classes, 3, bias=True)
        walk.loss(classes)


def retinanet(walk: Walk, dims: RetinaNet) -> None:
    """Write RetinaNet: a feature pyramid over a ResNet, and two towers on each level.

    The pyramid covers stages 2 to 4 and two further levels. One tower predicts the classes and one the boxes;
    each has four 3x3 convolutions.
    """
    levels = backbone(walk, dims, frozen=dims.frozen)
    pyramid = feature_pyramid(walk, levels[1:])
    walk.shape = levels[-1] if dims.from_backbone else pyramid[-1]
    for _ in range(2):
        walk.conv(PYRAMID, 3, 2, bias=True)
        pyramid.append(walk.shape)
    classes, anchors = dims.classes, dims.anchors
    normed = dims.tower_norm
    for outputs, categories in ((anchors * classes, 1), (anchors * 4, 0)):

        def tower(outputs: int = outputs, categories: int = categories) -> None:
            for _ in range(4):
                walk.conv(PYRAMID, 3, bias=not normed)
                if normed:
                    walk.norm()
                walk.activate()
            walk.conv(outputs, 3, bias=True)
            if categories:
                focal_loss(walk)

        on_every_level(walk, pyramid, tower)


def focal_loss(walk: Walk) -> None:
    """Write the focal loss: a logistic loss per output, weighted by its error (arXiv 1708.02002, equation 5), in FP32.

    torchvision's `sigmoid_focal_loss` runs it as 16 kernels in each direction, which keep seven tensors. The code
    around it keeps five more: the outputs permuted, concatenated and selected, and the target classes (detectron2,
    modeling/meta_arch/retinanet.py losses; torchvision, models/detection/retinanet.py). A fused kernel keeps only one.
    """
    if not walk.numerics.training:
        return
    numerics = replace(walk.numerics, vector="fp32", element=4.0)
    walk.ops += layers.pointwise("loss", numerics, walk.elements, reads=1.5, kernels=16, backward=(1.5, 1.0))
    walk.keep(walk.elements * 4.0 / walk.numerics.element * (1.0 if numerics.fused_gate else 12.0))


def backbone(walk: Walk, dims: Detector, *, frozen: bool = False, stages: int = 4) -> list[tuple[int, Size]]:
    """Write the first `stages` of a ResNet and return the shape of each stage's output.

    A `frozen` backbone trains neither its stem, nor its first stage, nor its norms.
    """
    walk.fixed_norms = frozen
    with walk.frozen() if frozen else nullcontext():
        resnet.stem(walk)
        resnet.stage(walk, dims, 1)
    shapes = [walk.shape]
    for number in range(2, stages + 1):
        resnet.stage(walk, dims, number, stride=1 if number == 4 and dims.dilated else 2)
        shapes.append(walk.shape)
    walk.fixed_norms = False
    return shapes


def feature_pyramid(walk: Walk, levels: Sequence[tuple[int, Size]]) -> list[tuple[int, Size]]:
    """Write a feature pyramid over `levels` and return the shapes of its levels, finest first.

    From the coarsest level to the finest, each is a 1x1 convolution, plus the coarser level at twice its size, then a
    3x3 convolution.
    """
    pyramid: list[tuple[int, Size]] = []
    for index, level in enumerate(reversed(levels)):
        walk.shape = level
        walk.conv(PYRAMID, 1, bias=True)
        if index:
            walk.resize(0.25)
            walk.add()
        walk.conv(PYRAMID, 3, bias=True)
        pyramid.insert(0, walk.shape)
    return pyramid


def on_every_level(walk: Walk, levels: Sequence[tuple[int, Size]], head: Callable[[], None]) -> None:
    """Add the operators of `head` on every pyramid level; the levels share one set of weights."""
    before = walk.parameters
    for level in levels:
        walk.parameters = before
        walk.shape = level
        walk.fork(2)
        head()


def yolo_v3(walk: Walk, dims: YoloV3) -> None:
    """Write Darknet-53 and detections at three scales with three anchors per pixel each.

    Every output has its own logistic loss (section 2.2).
    """
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
    outputs = 3 * (5 + dims.classes)
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
