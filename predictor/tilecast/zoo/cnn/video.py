"""Networks of three-dimensional convolutions over clips: inflated ResNets, R(2+1)D, SlowFast, C3D.

Sources: Carreira and Zisserman, arXiv 1705.07750 (I3D); Feichtenhofer et al., arXiv 1812.03982 (SlowFast and SlowOnly,
table 1); Tran et al., arXiv 1711.11248 (R(2+1)D), 1904.02811 (CSN) and 1412.0767 (C3D). A clip of `image_depth` images
is a volume.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model import numbered_field
from tilecast.zoo.cnn.builder import NetworkBuilder, Shape
from tilecast.zoo.cnn.images import Classifier

_LATERAL = 2
"""Channels of a connection from the fast to the slow path, relative to those of the fast path."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class VideoResNet(Classifier):
    """Dimensions of a ResNet over clips."""

    classes: int = 400
    stages: tuple[int, int, int, int] = numbered_field("stage")
    """Blocks of each stage."""
    bottleneck: bool = False
    """Whether blocks have three convolutions, with a narrow one in the middle, rather than two."""
    stem_depth: int = 1
    """Images that a kernel of the stem reads."""
    stem_stride: int = 1
    """Factor by which the stem's convolution shortens the clip, and its pooling shortens it again."""
    inflated: tuple[int, ...] = numbered_field("inflated", default=(0, 0, 1, 1))
    """Distance, per stage, between blocks that also read the previous and the next image. 0 if no block does."""
    factored: bool = False
    """Whether a convolution over space and one over time replace each convolution, with a stride in both (R(2+1)D)."""
    depthwise: bool = False
    """Whether the middle convolution of a block has one group for each channel (CSN)."""
    attends: int = 0
    """Number of non-local blocks in stage 2, at most two, and in stage 3, at most three."""
    fast: int = 0
    """Factor by which a second, narrow path reads more images (SlowFast). 0 if there is one path."""
    narrow: int = 8
    """Factor by which the fast path has fewer channels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Clip(Classifier):
    """Dimensions of C3D."""

    classes: int = 101


def build_video_resnet(net: NetworkBuilder, dims: VideoResNet) -> None:
    """Build a ResNet over video clips. If `fast` is set, a second path reads `fast` times as many images (SlowFast)."""
    clip = net.shape
    slow: list[Shape] = [clip]
    fast: list[Shape] = []
    if dims.fast:
        fast.append((clip[0], (clip[1][0] * dims.fast, *clip[1][1:])))
    for number in range(5):
        if dims.fast:
            net.shape = fast[-1]
            _add_path_stage(net, dims, number, narrow=dims.narrow)
            fast.append(net.shape)
            if number < 4:
                net.continue_from(net.shape)
                net.add_conv(_LATERAL * net.channels, (5, 1, 1), (dims.fast, 1, 1))
        lateral = net.channels if dims.fast and number < 4 else 0
        net.shape = slow[-1]
        _add_path_stage(net, dims, number)
        if lateral:
            net.add_concatenation(net.channels + lateral)
        slow.append(net.shape)
    if dims.fast:
        net.channels += fast[-1][0]
    net.add_global_mean()
    net.add_dropout()
    net.add_dense(dims.classes)
    net.add_cross_entropy()


def _add_path_stage(net: NetworkBuilder, dims: VideoResNet, number: int, narrow: int = 1) -> None:
    """Add one stage of a path, or its stem if `number` is 0.

    `narrow` is 1 for the slow path. The fast path has 1 / `narrow` of its channels, and all its blocks convolve over
    time.
    """
    if number == 0:
        depth = 5 if narrow > 1 else dims.stem_depth
        if dims.factored:
            net.add_conv_norm_act(45, (1, 7, 7), (1, 2, 2))
            net.add_conv_norm_act(64, (3, 1, 1))
            net.add_pool((1, 3, 3), (1, 2, 2))
            return
        net.add_conv_norm_act(64 // narrow, (depth, 7, 7), (dims.stem_stride, 2, 2))
        net.add_pool((1, 3, 3), (dims.stem_stride, 2, 2))
        return
    width = 64 * 2 ** (number - 1) // narrow
    every = 1 if narrow > 1 else dims.inflated[number - 1]
    for index in range(dims.stages[number - 1]):
        _add_block(net, dims, width, 2 if number > 1 and not index else 1, bool(every) and index % every == 0)
        if dims.attends and number in (2, 3) and index % 2:
            _add_nonlocal(net)


def _add_block(net: NetworkBuilder, dims: VideoResNet, width: int, stride: int, inflated: bool) -> None:
    """Add a residual block. If `inflated`, one of its convolutions also covers three steps of time."""
    entry, flat = net.shape, (1, stride, stride)
    over_time, out = 3 if inflated else 1, 4 * width if dims.bottleneck else width
    if dims.bottleneck:
        net.add_conv_norm_act(width, (1 if dims.depthwise else over_time, 1, 1))
        if dims.depthwise:
            net.add_conv_norm_act(width, 3, (stride,) * 3, groups=width)
        else:
            net.add_conv_norm_act(width, (1, 3, 3), flat)
        net.add_conv_norm_act(out, 1, activation="none")
    elif dims.factored:
        _add_factored(net, out, stride)
        net.add_activation()
        _add_factored(net, out, 1)
    else:
        net.add_conv_norm_act(out, (over_time, 3, 3), flat)
        net.add_conv_norm_act(out, (over_time, 3, 3), activation="none")
    leave = net.shape
    if leave != entry:
        net.continue_from(entry)
        shrinks = dims.factored or dims.depthwise
        net.add_conv_norm_act(leave[0], 1, (stride,) * 3 if shrinks else flat, activation="none")
    net.add_branch()
    net.add_activation()


def _add_factored(net: NetworkBuilder, out: int, stride: int) -> None:
    """Add a convolution over space, one over time, and a norm (R(2+1)D).

    The two convolutions have as many parameters as one 3x3x3 convolution (section 3.5).
    """
    between = net.channels * out * 27 // (9 * net.channels + 3 * out)
    net.add_conv_norm_act(between, (1, 3, 3), (1, stride, stride))
    net.add_conv(out, (3, 1, 1), (stride, 1, 1))
    net.add_channel_norm()


def _add_nonlocal(net: NetworkBuilder) -> None:
    """Add a non-local block, whose pixels attend to a pooled clip (arXiv 1711.07971, section 3.2).

    The poolings of keys and values save their inputs, and an index of eight bytes for each output.
    """
    shape, inner = net.shape, net.channels // 2
    pixels = float(shape[1][0] * shape[1][1] * shape[1][2])
    scores = pixels * pixels / 4
    for _ in range(3):
        net.continue_from(shape)
        net.add_conv(inner, 1, bias=True)
    for rows, cols, depth in ((pixels, pixels / 4, float(inner)), (pixels, float(inner), pixels / 4)):
        net.add_batched_matmul(rows, cols, depth)
    net.add_pointwise("softmax", net.batch * scores, reads=2.0, absorbed=False)
    pooled = pixels / 4 * 2 * inner * (1.0 + 8.0 / net.numerics.element)
    net.keep_elements(net.batch * (scores * (1.0 + net.numerics.keeps_softmax_input) + pooled + 3 * pixels * inner))
    net.raise_peak(2.0 * net.batch * scores)
    net.shape = inner, shape[1]
    net.add_conv_norm_act(shape[0], 1, activation="none")
    net.add_branch()


def build_c3d(net: NetworkBuilder, dims: Clip) -> None:
    """Build C3D: eight convolutions of 3x3x3, five poolings and two wide dense layers."""
    for number, (width, convolutions) in enumerate(((64, 1), (128, 1), (256, 2), (512, 2), (512, 2))):
        for _ in range(convolutions):
            net.add_conv(width, 3, bias=True)
            net.add_activation()
        net.add_pool((1 if number == 0 else 2, 2, 2), (1 if number == 0 else 2, 2, 2))
    for _ in range(2):
        net.add_dense(4096)
        net.add_activation()
        net.add_dropout()
    net.add_dense(dims.classes)
    net.add_cross_entropy()
