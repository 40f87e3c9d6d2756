"""MobileNet v2 and v3, EfficientNet v1 and v2: inverted residuals of depthwise convolutions.

Sources: Sandler et al., arXiv 1801.04381 (table 2); Howard et al., arXiv 1905.02244 (tables 1 and 2); Tan and Le,
arXiv 1905.11946 (table 1) and arXiv 2104.00298 (table 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilecast.zoo.cnn.builder import NetworkBuilder, Shape
from tilecast.zoo.cnn.images import Classifier


@dataclass(frozen=True, slots=True)
class _BlockStage:
    """A stage of `repeat` inverted residual blocks with `out` output channels each.

    `stride` is the stride of the first block. `expansion` is the ratio of inner to input channels. `excite` is the
    channel reduction of squeeze-and-excitation, or 0 without it. A `fused` block has one full convolution in place of
    the expansion and the depthwise convolution (EfficientNet v2).
    """

    repeat: int
    out: int
    kernel: int
    stride: int
    expansion: float
    excite: int = 0
    activation: str = "silu"
    fused: bool = False


_MOBILENET_V2 = tuple(
    _BlockStage(repeat, out, 3, stride, expansion, activation="relu")
    for expansion, out, repeat, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    )
)  # fmt: skip

_MOBILENET_V2_FEATURES = (24, 32, 96, 320)
"""Output channels of the stages whose features segmenters read (mmseg/models/backbones/mobilenet_v2.py)."""

# Kernel, expanded channels, output channels, squeeze-and-excitation, activation, stride.
_Row = tuple[int, int, int, int, str, int]
_MOBILENET_V3_LARGE: tuple[_Row, ...] = (
    (3, 16, 16, 0, "relu", 1), (3, 64, 24, 0, "relu", 2), (3, 72, 24, 0, "relu", 1), (5, 72, 40, 1, "relu", 2),
    (5, 120, 40, 1, "relu", 1), (5, 120, 40, 1, "relu", 1), (3, 240, 80, 0, "hard-swish", 2),
    (3, 200, 80, 0, "hard-swish", 1), (3, 184, 80, 0, "hard-swish", 1), (3, 184, 80, 0, "hard-swish", 1),
    (3, 480, 112, 1, "hard-swish", 1), (3, 672, 112, 1, "hard-swish", 1), (5, 672, 160, 1, "hard-swish", 2),
    (5, 960, 160, 1, "hard-swish", 1), (5, 960, 160, 1, "hard-swish", 1),
)  # fmt: skip
_MOBILENET_V3_SMALL: tuple[_Row, ...] = (
    (3, 16, 16, 1, "relu", 2), (3, 72, 24, 0, "relu", 2), (3, 88, 24, 0, "relu", 1), (5, 96, 40, 1, "hard-swish", 2),
    (5, 240, 40, 1, "hard-swish", 1), (5, 240, 40, 1, "hard-swish", 1), (5, 120, 48, 1, "hard-swish", 1),
    (5, 144, 48, 1, "hard-swish", 1), (5, 288, 96, 1, "hard-swish", 2), (5, 576, 96, 1, "hard-swish", 1),
    (5, 576, 96, 1, "hard-swish", 1),
)  # fmt: skip

_EFFICIENTNET = tuple(
    _BlockStage(repeat, out, kernel, stride, expansion, excite=4)
    for repeat, out, kernel, stride, expansion in (
        (1, 16, 3, 1, 1), (2, 24, 3, 2, 6), (2, 40, 5, 2, 6), (3, 80, 3, 2, 6), (3, 112, 5, 1, 6), (4, 192, 5, 2, 6),
        (1, 320, 3, 1, 6),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MobileNetV3(Classifier):
    """Dimensions of MobileNet v3."""

    large: bool = False
    """Whether it is the large one of the two."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EfficientNet(Classifier):
    """Dimensions of EfficientNet v1."""

    width: float
    """Channels, relative to B0."""
    depth: float
    """Blocks of a stage, relative to B0."""
    wide_excite: bool = False
    """Whether the width of squeeze-and-excitation is a share of a block's inner channels, not of its input channels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EfficientNetV2(Classifier):
    """Dimensions of EfficientNet v2."""

    millions: int
    """Parameters in millions: 24 (S), 54 (M) or 119 (L)."""


def _list_v2_stages(*stages: tuple[int, int, int, float]) -> tuple[_BlockStage, ...]:
    """Return the stages of an EfficientNet v2, of which the first three are fused.

    Each argument is the (repeat, channels, stride, expansion) of one stage.
    """
    return tuple(
        _BlockStage(repeat, out, 3, stride, expansion, excite=0 if index < 3 else 4, fused=index < 3)
        for index, (repeat, out, stride, expansion) in enumerate(stages)
    )


_EFFICIENTNET_V2: Mapping[int, tuple[_BlockStage, ...]] = {
    24: _list_v2_stages((2, 24, 1, 1), (4, 48, 2, 4), (4, 64, 2, 4), (6, 128, 2, 4), (9, 160, 1, 6), (15, 256, 2, 6)),
    54: _list_v2_stages(
        (3, 24, 1, 1), (5, 48, 2, 4), (5, 80, 2, 4), (7, 160, 2, 4), (14, 176, 1, 6), (18, 304, 2, 6), (5, 512, 1, 6)
    ),
    119: _list_v2_stages(
        (4, 32, 1, 1), (7, 64, 2, 4), (7, 96, 2, 4), (10, 192, 2, 4), (19, 224, 1, 6), (25, 384, 2, 6), (7, 640, 1, 6)
    ),
}
"""Stages of the three published sizes, keyed by their parameters in millions."""


def build_mobilenet_v2(net: NetworkBuilder, dims: Classifier) -> None:
    """Build MobileNet v2 of width 1."""
    net.add_conv_norm_act(32, 3, 2)
    _add_stages(net, _MOBILENET_V2)
    net.add_conv_norm_act(1280, 1)
    net.add_classifier_head(dims.classes, dropout=True)


def add_mobilenet_v2_features(net: NetworkBuilder, output_stride: int) -> list[Shape]:
    """Add MobileNet v2 without its classifier. Return the shapes of its features at four depths, finest first.

    Once features are 1 / `output_stride` of the image's side, later stages keep this size.
    """
    net.add_conv_norm_act(32, 3, 2)
    shapes, stride = [], 2
    for stage in _MOBILENET_V2:
        step = stage.stride if stride < output_stride else 1
        stride *= step
        _add_stages(net, [replace(stage, stride=step)])
        if stage.out in _MOBILENET_V2_FEATURES:
            shapes.append(net.shape)
    return shapes


def add_mobilenet_v3_features(net: NetworkBuilder, *, large: bool, output_stride: int = 32) -> list[Shape]:
    """Add the blocks of MobileNet v3 and return the output shape of each block.

    Once features are 1 / `output_stride` of the image's side, later blocks keep this size.
    """
    net.add_conv_norm_act(16, 3, 2, activation="hard-swish")
    shapes, reached = [], 2
    for kernel, inner, out, excite, activation, stride in _MOBILENET_V3_LARGE if large else _MOBILENET_V3_SMALL:
        entry, step = net.shape, stride if reached < output_stride else 1
        reached *= step
        if inner != net.channels:
            net.add_conv_norm_act(inner, 1, activation=activation)
        net.add_conv_norm_act(inner, kernel, step, groups=inner, activation=activation)
        if excite:
            net.add_squeeze_excite(round_channels(inner / 4))
        net.add_conv_norm_act(out, 1, activation="none")
        if net.shape == entry:
            net.add_branch()
        shapes.append(net.shape)
    return shapes


def build_mobilenet_v3(net: NetworkBuilder, dims: MobileNetV3) -> None:
    """Build MobileNet v3 in its small or large variant."""
    large = dims.large
    add_mobilenet_v3_features(net, large=large)
    net.add_conv_norm_act(6 * net.channels, 1, activation="hard-swish")
    net.add_global_mean()
    net.add_dense(1280 if large else 1024)
    net.add_activation("hard-swish")
    net.add_dropout()
    net.add_dense(dims.classes)
    net.add_cross_entropy()


def build_efficientnet(net: NetworkBuilder, dims: EfficientNet) -> None:
    """Build EfficientNet v1: the stages of B0 with scaled channels and blocks, and a classifier."""
    add_efficientnet_stages(net, dims)
    net.add_conv_norm_act(round_channels(1280 * dims.width), 1, activation="silu")
    net.add_classifier_head(dims.classes, dropout=True)


def add_efficientnet_stages(net: NetworkBuilder, dims: EfficientNet) -> list[Shape]:
    """Add the stem and the stages of EfficientNet v1, and return the output shape of each stage."""
    net.add_conv_norm_act(round_channels(32 * dims.width), 3, 2, activation="silu")
    shapes = []
    for stage in _EFFICIENTNET:
        repeat, out = math.ceil(stage.repeat * dims.depth), round_channels(stage.out * dims.width)
        _add_stages(net, [replace(stage, repeat=repeat, out=out)], wide=dims.wide_excite)
        shapes.append(net.shape)
    return shapes


def build_efficientnet_v2(net: NetworkBuilder, dims: EfficientNetV2) -> None:
    """Build EfficientNet v2 in size S, M or L."""
    stages = _EFFICIENTNET_V2[dims.millions]
    net.add_conv_norm_act(stages[0].out, 3, 2, activation="silu")
    _add_stages(net, stages)
    net.add_conv_norm_act(1280, 1, activation="silu")
    net.add_classifier_head(dims.classes, dropout=True)


def round_channels(channels: float) -> int:
    """Return `channels` rounded to a multiple of 8 that is at least 8 and at least 90 % of `channels`."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near if near >= 0.9 * channels else near + 8


def _add_stages(net: NetworkBuilder, stages: Sequence[_BlockStage], *, wide: bool = False) -> None:
    """Add the blocks of each stage. If `wide`, squeeze-and-excitation is sized by the inner channels."""
    for stage in stages:
        for index in range(stage.repeat):
            _add_inverted_residual(net, stage, stage.stride if index == 0 else 1, wide)


def _add_inverted_residual(net: NetworkBuilder, stage: _BlockStage, stride: int, wide: bool) -> None:
    """Add one inverted residual block, and a residual sum if its output has the shape of its input."""
    entry = net.shape
    inner = int(entry[0] * stage.expansion)
    if stage.fused:
        out = inner if stage.expansion > 1 else stage.out
        net.add_conv_norm_act(out, stage.kernel, stride, activation=stage.activation)
    else:
        if inner != entry[0]:
            net.add_conv_norm_act(inner, 1, activation=stage.activation)
        net.add_conv_norm_act(inner, stage.kernel, stride, groups=inner, activation=stage.activation)
    if stage.excite:
        net.add_squeeze_excite(max(1, (inner if wide else entry[0]) // stage.excite), stage.activation)
    if not stage.fused or stage.expansion > 1:
        net.add_conv_norm_act(stage.out, 1, activation="none")
    if net.shape == entry:
        net.add_branch()
