"""One-stage detectors with partial stages: YOLOv5, v6, v8, YOLOX, RTMDet, PP-YOLOE.

A partial stage ("CSP", Wang et al., arXiv 1911.11929) runs its blocks on half of the channels and concatenates their
output with the other half, and with the outputs of all blocks if `dense_joins` is set. The backbone has four or five
such stages. A pyramid goes down and up again. Every level has a head, with separate or joint predictions of classes and
boxes.

Sources: Ge et al., arXiv 2107.08430 (YOLOX); Li et al., arXiv 2209.02976 (YOLOv6); Lyu et al., arXiv 2212.07784
(RTMDet); Xu et al., arXiv 2203.16250 (PP-YOLOE); MMYOLO's mmyolo/models of the same names (also YOLOv5 and v8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilecast.model import numbered_field
from tilecast.zoo.cnn.builder import NetworkBuilder, Shape
from tilecast.zoo.cnn.images import Images

_STAGES = (64, 128, 256, 512, 1024)
_LARGE_STAGES = (64, 128, 256, 512, 768, 1024)
"""Channels of the stem and of each stage at width 1. The second tuple is for networks with large images."""
_COMPARED = 8
"""Numbers per pair of pixel and object that the assignment holds in memory."""
_ALIGNED = 6
"""Like `_COMPARED`, for task-aligned assignment over a whole batch, besides one row of two numbers per candidate.

A row marks the pixel of one candidate among all pixels, in integers of 8 bytes. When the rows are added, overlaps,
alignments with and without the pixels inside boxes, these pixels and the sum are alive too (mmyolo,
assigners/batch_task_aligned_assigner.py).
"""
_MASKS = 600
"""Pixels per image to which an object is assigned, over all levels and anchors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CspDetector(Images):
    """Dimensions of a one-stage detector with cross-stage partial (CSP) stages."""

    depth: float = 1.0
    """Blocks per stage relative to the large variant."""
    width: float = 1.0
    """Channels relative to the large variant."""
    blocks: tuple[int, int, int, int] = numbered_field("blocks", default=(3, 6, 9, 3))
    """Blocks of each stage of the backbone at depth 1."""
    most_channels: int = 1024
    """Channels of the last stage at width 1."""
    neck_share: float = 1.0
    """Channels of the pyramid's levels relative to those of the stages that they read."""
    large: bool = False
    """Whether there is a fifth stage, for large images."""
    dense_joins: bool = False
    """Whether a stage concatenates the outputs of all its blocks (YOLOv8), rather than only the last."""
    branched: bool = False
    """Whether a 3x3 convolution has a parallel 1x1 convolution in training, which inference merges (RepVGG)."""
    partial: bool = True
    """Whether stages are partial. Otherwise their blocks run in sequence (small YOLOv6)."""
    kernel: int = 3
    """Side of a block's second convolution. If 5, it is depthwise and a 1x1 convolution follows (RTMDet)."""
    towers: int = 0
    """Convolutions of each head for classes and for boxes. 0 if one 1x1 convolution predicts both."""
    tower_width: int = 0
    """Channels of the towers at width 1. 0 for as many as in YOLOv8."""
    anchors: int = 1
    """Boxes per pixel."""
    box_values: int = 4
    """Numbers per box. 64 if its sides are distributions."""
    prototypes: bool = False
    """Whether masks are combinations of prototypes (YOLACT)."""
    keypoints: int = 0
    """Number of body keypoints that are predicted, or 0."""
    largest_boxes: int = 100
    """Objects to which all images of a batch are padded for the assignment, the most of any image. COCO has 100."""
    candidates: int = 10
    """Pixels among which task-aligned assignment chooses for each object."""
    classes: int = 80


def build_csp_detector(net: NetworkBuilder, dims: CspDetector) -> None:
    """Build a one-stage detector: a backbone of partial stages, a feature pyramid and the heads."""
    channels = [_scale_channels(dims, width) for width in (_LARGE_STAGES if dims.large else _STAGES)]
    channels[-1] = _scale_channels(dims, dims.most_channels)
    net.add_conv_norm_act(channels[0], 6 if dims.anchors > 1 else 3, 2, activation="silu")
    stages = (*dims.blocks[:3], dims.blocks[2] // 3, dims.blocks[3]) if dims.large else dims.blocks
    features: list[Shape] = []
    for width, blocks in zip(channels[1:], stages, strict=True):
        _add_conv(net, dims, width, 3, 2)
        _add_stage(net, dims, width, _scale_blocks(dims, blocks), has_residuals=True)
        features.append(net.shape)
    _add_pooled_pyramid(net)
    features[-1] = net.shape
    levels = _add_pyramid(net, dims, features[1:])
    if dims.prototypes:
        net.continue_from(levels[0])
        net.add_conv_norm_act(_scale_channels(dims, 256), 3, activation="silu")
        net.add_upsample()
        net.add_conv_norm_act(_scale_channels(dims, 256), 3, activation="silu")
        net.add_conv_norm_act(32, 1, activation="silu")
    for level in levels:
        net.shape = level
        _add_head(net, dims, levels[0][0])
    _assign_objects(net, dims, levels)


def _scale_channels(dims: CspDetector, channels: int) -> int:
    """Return a number of channels times the width factor, rounded up to a multiple of 8."""
    return max(8, math.ceil(channels * dims.width / 8) * 8)


def _scale_blocks(dims: CspDetector, blocks: int) -> int:
    """Return a number of blocks times the depth factor, rounded, and at least 1."""
    return max(1, round(blocks * dims.depth))


def _add_conv(net: NetworkBuilder, dims: CspDetector, out: int, kernel: int, stride: int = 1) -> None:
    """Add a convolution, a norm and an activation.

    If `dims.branched` is true, a 3x3 convolution gets a parallel 1x1 convolution, and a parallel norm if the shape does
    not change.
    """
    entry = net.shape
    if dims.branched and kernel == 3:
        net.add_conv_norm_act(out, 3, stride, activation="none")
        leave = net.shape
        net.continue_from(entry)
        net.add_conv_norm_act(out, 1, stride, activation="none")
        net.add_branch()
        if leave == entry:
            net.add_channel_norm(keeps_input=False)
            net.add_branch()
        net.add_activation("silu" if dims.partial else "relu")
    else:
        net.add_conv_norm_act(out, kernel, stride, activation="silu")


def _add_stage(net: NetworkBuilder, dims: CspDetector, out: int, blocks: int, *, has_residuals: bool) -> None:
    """Add a stage of `blocks` blocks to `out` channels. If `has_residuals`, each block ends in a residual sum."""
    if not dims.partial:
        for _ in range(blocks):
            _add_conv(net, dims, out, 3)
        return
    entry, half = net.shape, out // 2
    if dims.dense_joins:
        net.add_conv_norm_act(out, 1, activation="silu")
    else:
        net.add_conv_norm_act(half, 1, activation="silu")
        net.continue_from(entry)
        net.add_conv_norm_act(half, 1, activation="silu")
    net.channels = half
    for _ in range(blocks):
        if dims.dense_joins:
            net.add_conv_norm_act(half, 3, activation="silu")
        elif dims.branched or dims.kernel > 3:
            _add_conv(net, dims, half, 3)
        else:
            net.add_conv_norm_act(half, 1, activation="silu")
        if dims.kernel > 3:
            net.add_conv_norm_act(half, dims.kernel, groups=half, activation="silu")
            net.add_conv_norm_act(half, 1, activation="silu")
        else:
            _add_conv(net, dims, half, 3)
        if has_residuals:
            net.add_branch()
    net.add_concatenation(half * (2 + blocks) if dims.dense_joins else out)
    if dims.kernel > 3 and has_residuals:
        net.add_squeeze_excite(out)
    net.add_conv_norm_act(out, 1, activation="silu")


def _add_pooled_pyramid(net: NetworkBuilder) -> None:
    """Add spatial pyramid pooling (SPPF) with a 1x1 convolution before and after it.

    Three 5x5 poolings follow each other. Their outputs are concatenated with the input of the first pooling.
    """
    out = net.channels
    net.add_conv_norm_act(out // 2, 1, activation="silu")
    for _ in range(3):
        net.add_pool(5, 1)
    net.add_concatenation(2 * out)
    net.add_conv_norm_act(out, 1, activation="silu")


def _add_pyramid(net: NetworkBuilder, dims: CspDetector, features: list[Shape]) -> list[Shape]:
    """Add a feature pyramid with a top-down and a bottom-up path. Return the shapes of its levels, finest first."""
    blocks = _scale_blocks(dims, 12 if not dims.partial else 3)
    carried: list[Shape] = []
    for read, size in reversed(features[:-1]):
        channels = int(read * dims.neck_share)
        if not dims.dense_joins:
            net.add_conv_norm_act(channels, 1, activation="silu")
        carried.append(net.shape)
        width, net.size = net.channels, size
        net.add_resize(0.25)
        net.add_concatenation(width + read)
        _add_stage(net, dims, channels, blocks, has_residuals=False)
    levels = [net.shape]
    for channels, _ in features[1:]:
        before, size = carried.pop()
        net.continue_from(net.shape)
        net.add_conv_norm_act(net.channels, 3, 2, activation="silu")
        net.size = size
        net.add_concatenation(net.channels + before)
        _add_stage(net, dims, int(channels * dims.neck_share), blocks, has_residuals=False)
        levels.append(net.shape)
    return levels


def _assign_objects(net: NetworkBuilder, dims: CspDetector, levels: list[Shape]) -> None:
    """Add the memory that the loss needs to assign objects to pixels, and the operators of masks.

    Detectors without anchors compare all pixels with all objects of an image. Masks are computed for each pixel that
    has an object, at a quarter of the image's side (mmyolo/models/task_modules/assigners and
    dense_heads/yolov5_ins_head).
    """
    if dims.towers:
        pixels = sum(float(size[1] * size[2]) for _, size in levels)
        numbers = _COMPARED if dims.tower_width else _ALIGNED + 2 * dims.candidates
        net.raise_peak(net.batch * pixels * dims.largest_boxes * numbers * 4.0 / net.numerics.element)
    if dims.prototypes:
        masks = net.batch * _MASKS * (dims.image / 4) ** 2
        net.raise_peak(2 * masks * 4.0 / net.numerics.element)
        net.add_training_pointwise("masks", masks, kernels=4)


def _add_head(net: NetworkBuilder, dims: CspDetector, finest: int) -> None:
    """Add the head and loss of one pyramid level. `finest` is the number of channels of the finest level."""
    entry, classes = net.shape, dims.classes
    if not dims.towers:
        net.add_conv(dims.anchors * (classes + 5 + 32 * dims.prototypes), 1, bias=True)
        net.add_training_pointwise("loss", kernels=6)
        return
    wide = _scale_channels(dims, dims.tower_width) if dims.tower_width else max(finest, min(classes, 100))
    narrow = wide if dims.tower_width else max(16, finest // 4, 4 * (dims.box_values // 4))
    if dims.tower_width:
        net.add_conv_norm_act(wide, 1, activation="silu")
        entry = net.shape
    for tower, outputs in ((wide, classes), (narrow, dims.box_values + 3 * dims.keypoints)):
        net.continue_from(entry)
        for _ in range(dims.towers):
            net.add_conv_norm_act(tower, 3, activation="silu")
        net.add_conv(outputs, 1, bias=True)
        net.add_training_pointwise("loss", kernels=6)
