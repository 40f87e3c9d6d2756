"""One-stage detectors: SSD300, RetinaNet and YOLOv3.

Anchors, matching and losses run many kernels on little data, image by image, and the host reads results between them
(`NetworkBuilder.add_host_operator`). The numbers of kernels are those of the code: torchvision, models/detection, and
detectron2, modeling/matcher.py and sampling.py.

Sources: Liu et al., arXiv 1512.02325 (with a ResNet whose fourth stage keeps its stride 1, as MLPerf runs it); Lin et
al., arXiv 1612.03144 and 1708.02002; Redmon and Farhadi, arXiv 1804.02767.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from tilecast.model import numbered_field
from tilecast.zoo import layers
from tilecast.zoo.cnn import resnet
from tilecast.zoo.cnn.builder import NetworkBuilder, Shape
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.resnet import ResidualStages

MATCHING = 45.0
"""Number of kernels that match one image's anchors or regions to its boxes: overlaps, maxima, thresholds, sampling."""
_OVERLAP = 7.0
"""FP32 numbers per pair of anchor and box while overlaps are computed.

They are two corners and their distance (two numbers each), and a product (mmdet/core/bbox/geometry.py bbox_overlaps;
detectron2, structures/boxes.py pairwise_iou).
"""
_SIZED = 9
"""Anchors per pixel that guided anchoring matches instead of the predicted one (approxs, octaves and ratios)."""
PYRAMID = 256
"""Channels of every level of a feature pyramid and of the heads on it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Detector(ResidualStages):
    """Dimensions of a detector over the four stages of a ResNet."""

    stages: tuple[int, int, int, int] = numbered_field("stage")
    dilated: bool = False
    """Whether the fourth stage keeps the size of the third."""
    trained_norms: bool = False
    """Whether norms of a frozen backbone keep their inputs for gradients.

    Batch norms that use the statistics of pretraining do (MMDetection), fixed scales and offsets do not.
    """
    head_norm: bool = False
    """Whether all norms are group norms, also in the convolutions of the pyramid and of the heads."""
    largest_boxes: int = 50
    """Most boxes of an image, assumed for memory. A few COCO images have 50 and more."""
    guided: bool = False
    """Whether anchors are predicted, and features are sampled to fit them (arXiv 1901.03278)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Ssd(ResidualStages):
    """Dimensions of SSD."""

    stages: tuple[int, ...] = numbered_field("stage", default=())
    """Blocks of each of three ResNet stages. If empty, the backbone is VGG-16, as in the paper."""
    classes: int = 81
    """Categories, one of which is the background."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RetinaNet(Detector):
    """Dimensions of RetinaNet."""

    classes: int = 91
    anchors: int = 9
    """Boxes per pixel."""
    frozen: bool = False
    """Whether the norms of the backbone, its stem and its first stage stay as pretrained."""
    tower_norm: bool = False
    fused_loss: bool = False
    """Whether the focal loss is one kernel that keeps only the outputs (mmdet/ops/sigmoid_focal_loss)."""
    centered: bool = False
    """Whether a pixel also predicts how near it is to the centre of its box (FCOS, ATSS)."""
    from_backbone: bool = False
    """Whether the further levels come from the last level of the backbone rather than of the pyramid."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class YoloV3(Images):
    """Dimensions of YOLOv3."""

    classes: int = 80


def build_ssd(net: NetworkBuilder, dims: Ssd) -> None:
    """Build SSD over a ResNet for images of 300 pixels, or over VGG-16 for 300 or 512 pixels.

    Further convolutions add coarser scales to the backbone's. Each scale predicts a class and a box for 4 or 6 default
    boxes per pixel.
    """
    scales = [*_add_ssd_backbone(net, dims)]
    further = _SSD_SCALES if dims.stages else _SSD_VGG[dims.image > 300]
    for inner, out, stride, padding in further:
        for width, kernel, step, border in ((inner, 1, 1, None), (out, 3, stride, padding)):
            net.add_conv(width, kernel, step, padding=border, bias=not dims.stages)
            if dims.stages:
                net.add_channel_norm()
            net.add_activation()
        scales.append(net.shape)
    classes = dims.classes
    for boxes, scale in zip((4, *[6] * (len(scales) - 3), 4, 4), scales, strict=True):
        net.shape = scale
        net.add_branch_gradient_sums(3)
        net.add_conv(boxes * 4, 3, bias=True)
        net.shape = scale
        net.add_conv(boxes * classes, 3, bias=True)
        net.add_cross_entropy(classes)


def _add_ssd_backbone(net: NetworkBuilder, dims: Ssd) -> Iterator[Shape]:
    """Add three stages of a ResNet, or VGG-16. Yield the shapes of the feature maps that predict boxes.

    Convolutions replace VGG-16's dense layers.
    """
    if dims.stages:
        resnet.add_stem(net)
        for number, stride in ((1, 1), (2, 2), (3, 1)):
            resnet.add_stage(net, dims, number, stride=stride)
        yield net.shape
        return
    for level, (width, depth) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        if level:
            net.add_pool(2, 2 if level < 4 else 1)
        for _ in range(depth):
            net.add_conv(width, 3, bias=True)
            net.add_activation()
        if level == 3:
            yield net.shape
    for kernel in (3, 1):
        net.add_conv(1024, kernel, bias=True)
        net.add_activation()
    yield net.shape


_Scale = tuple[int, int, int, int | None]
_SSD_SCALES: tuple[_Scale, ...] = (
    (256, 512, 2, None), (256, 512, 2, None), (128, 256, 2, None), (128, 256, 1, 0), (128, 256, 1, 0),
)  # fmt: skip
"""Inner channels, outer channels, stride and padding of the further scales."""
_SSD_VGG: tuple[tuple[_Scale, ...], ...] = (
    ((256, 512, 2, None), (128, 256, 2, None), (128, 256, 1, 0), (128, 256, 1, 0)),
    ((256, 512, 2, None), (128, 256, 2, None), (128, 256, 2, None), (128, 256, 2, None), (128, 256, 1, 0)),
)
"""Like `_SSD_SCALES`, over VGG-16, for images of 300 and of 512 pixels."""


def build_retinanet(net: NetworkBuilder, dims: RetinaNet) -> None:
    """Build RetinaNet: a feature pyramid over a ResNet, and a class and a box head on each level.

    The pyramid has levels for stages 2 to 4 and two coarser levels. Each head has four 3x3 convolutions before its
    output.
    """
    levels = add_backbone(net, dims, frozen=dims.frozen)
    pyramid = add_feature_pyramid(net, levels[1:], normed=dims.head_norm)
    net.shape = levels[-1] if dims.from_backbone else pyramid[-1]
    for _ in range(2):
        net.add_conv(PYRAMID, 3, 2, bias=True)
        pyramid.append(net.shape)
    classes, anchors = dims.classes, dims.anchors
    normed = dims.tower_norm
    net.split_norms = normed

    def add_tower(outputs: int, *, has_loss: bool) -> None:
        """Add a head: four 3x3 convolutions and a convolution to `outputs` channels."""
        for _ in range(4):
            add_pyramid_conv(net, 3, normed=normed)
            net.add_activation()
        if dims.guided:
            add_guided_anchors(net)
        if dims.centered and not has_loss:
            net.add_conv(1, 3, bias=True)
            net.continue_from((PYRAMID, net.size))
        net.add_conv(outputs, 3, bias=True)
        if has_loss:
            add_focal_loss(net, fused=dims.fused_loss)

    add_shared_head(net, pyramid, lambda: add_tower(anchors * classes, has_loss=True))
    add_shared_head(net, pyramid, lambda: add_tower(anchors * 4, has_loss=False))
    net.split_norms = False
    raise_peak_to_overlaps(net, dims, pyramid, anchors)
    forward, backward = (0.0, 0.0) if dims.fused_loss else net.numerics.image_loss_launches
    net.add_host_operator("match", net.batch * (MATCHING + forward), net.batch * backward)


def raise_peak_to_overlaps(net: NetworkBuilder, dims: Detector, levels: Sequence[Shape], anchors: int) -> None:
    """Raise the peak memory to that of comparing all anchors of one image with all boxes of the image.

    Each pixel of the `levels` has `anchors` anchors.
    """
    pixels = sum(size[1] * size[2] for _, size in levels)
    pairs = float(pixels * (_SIZED if dims.guided else anchors) * dims.largest_boxes)
    net.raise_peak(np.full_like(net.batch, _OVERLAP * 4.0 / net.numerics.element * pairs))


def add_focal_loss(net: NetworkBuilder, *, fused: bool = False) -> None:
    """Add the focal loss, a logistic loss in FP32 whose terms are weighted by error (arXiv 1708.02002, equation 5).

    torchvision's `sigmoid_focal_loss` runs 16 kernels in each direction and saves seven tensors for the backward pass.
    The code around it saves five more: the permuted, concatenated and selected outputs, and the target classes
    (detectron2, modeling/meta_arch/retinanet.py losses; torchvision, models/detection/retinanet.py). A compiled kernel
    saves only one tensor. MMDetection's `fused` kernel saves two tensors and the permuted outputs.
    """
    if not net.numerics.training:
        return
    count = 1 if fused else 16
    loss = layers.pointwise("loss", net.numerics.in_fp32, net.elements, reads=1.5, kernels=count, backward=(1.5, 1.0))
    net.ops += loss
    kept = 1.0 if net.numerics.fused_gate else 3.0 if fused else 12.0
    net.keep_elements(net.elements * 4.0 / net.numerics.element * kept)


def add_backbone(net: NetworkBuilder, dims: Detector, *, frozen: bool = False, stages: int = 4) -> list[Shape]:
    """Add the first `stages` stages of a ResNet and return their output shapes.

    If `frozen`, the stem, the first stage and the norms are not trained.
    """
    net.fixed_norms = frozen and not (dims.trained_norms or dims.head_norm)
    net.split_norms = dims.head_norm
    with net.freeze_layers() if frozen else nullcontext():
        resnet.add_stem(net)
        resnet.add_stage(net, dims, 1)
    shapes = [net.shape]
    for number in range(2, stages + 1):
        dilated = number == 4 and dims.dilated
        resnet.add_stage(net, dims, number, stride=1 if dilated else 2, dilated=dilated)
        shapes.append(net.shape)
    net.fixed_norms = False
    return shapes


def add_feature_pyramid(net: NetworkBuilder, levels: Sequence[Shape], *, normed: bool = False) -> list[Shape]:
    """Add a feature pyramid over stages with the shapes `levels`. Return the shapes of its levels, finest first.

    Each level has a 1x1 convolution of its stage, a sum with the upsampled next coarser level, and a 3x3 convolution.
    If `normed`, a norm follows each convolution.
    """
    pyramid: list[Shape] = []
    for index, level in enumerate(reversed(levels)):
        net.shape = level
        add_pyramid_conv(net, 1, normed=normed)
        if index:
            net.add_resize(0.25)
            net.add_branch()
        add_pyramid_conv(net, 3, normed=normed)
        pyramid.insert(0, net.shape)
    return pyramid


def join_levels(net: NetworkBuilder, levels: Sequence[Shape]) -> None:
    """Bring every pyramid level to the finest size with convolutions and upsampling, and sum the results."""
    for steps, level in enumerate(levels):
        net.shape = level
        for step in range(max(1, steps)):
            net.add_conv_norm_act(128, 3)
            if step < steps:
                net.add_upsample()
        net.add_branch()
    net.shape = 128, levels[0][1]


def add_pyramid_conv(net: NetworkBuilder, kernel: int, *, normed: bool) -> None:
    """Add a convolution to `PYRAMID` channels. It is followed by a norm if `normed`, and has a bias otherwise."""
    net.add_conv(PYRAMID, kernel, bias=not normed)
    if normed:
        net.add_channel_norm()


def add_guided_anchors(net: NetworkBuilder) -> None:
    """Add guided anchoring: predictions of anchor positions and shapes, and a deformable convolution."""
    entry = net.shape
    for outputs in (1, 2):
        net.continue_from(entry)
        net.add_conv(outputs, 1, bias=True)
    net.continue_from(entry)
    resnet.add_deformable_sampling(net, 1)
    net.add_conv(PYRAMID, 3)
    net.add_activation()


def add_shared_head(net: NetworkBuilder, levels: Sequence[Shape], head: Callable[[], None]) -> None:
    """Call `head` once per pyramid level to add its layers. All levels share one set of weights."""
    before = net.parameters
    for level in levels:
        net.parameters = before
        net.shape = level
        net.add_branch_gradient_sums(2)
        head()


def build_yolo_v3(net: NetworkBuilder, dims: YoloV3) -> None:
    """Build YOLOv3: Darknet-53, and detections at three scales with three anchors per pixel.

    Every output has a logistic loss (section 2.2).
    """
    net.add_conv_norm_act(32, 3)
    routes = []
    for blocks in (1, 2, 8, 8, 4):
        net.add_conv_norm_act(2 * net.channels, 3, 2)
        for _ in range(blocks):
            out = net.channels
            net.add_conv_norm_act(out // 2, 1)
            net.add_conv_norm_act(out, 3)
            net.add_branch()
        routes.append(net.shape)
    outputs = 3 * (5 + dims.classes)
    for width, route in zip((512, 256, 128), (None, routes[3], routes[2]), strict=True):
        if route:
            net.add_conv_norm_act(width, 1)
            net.add_upsample()
            net.add_concatenation(width + route[0])
        for _ in range(2):
            net.add_conv_norm_act(width, 1)
            net.add_conv_norm_act(2 * width, 3)
        net.add_conv_norm_act(width, 1)
        entry = net.shape
        net.add_branch_gradient_sums(2)
        net.add_conv_norm_act(2 * width, 3)
        net.add_conv(outputs, 1, bias=True)
        net.add_cross_entropy(1)
        net.shape = entry
