"""Segmentation: a dilated ResNet, HRNet, MobileNet or U-Net, a head that classifies pixels, and an auxiliary head.

Sources: the heads of MMSegmentation 0.x (mmseg/models/decode_heads) and its configurations of the same names. Papers:
Long et al., arXiv 1411.4038 (FCN); Zhao et al., arXiv 1612.01105 (PSPNet); Chen et al., arXiv 1706.05587 and
1802.02611 (DeepLab v3 and v3+); Xiao et al., arXiv 1807.10221 (UPerNet); Kirillov et al., arXiv 1901.02446 (FPN); Wang
et al., arXiv 1711.07971 (non-local attention) and 1908.07919 (HRNet); Howard et al., arXiv 1905.02244 (LR-ASPP).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilecast.model import numbered_field
from tilecast.zoo.cnn import attention, mobile, resnet
from tilecast.zoo.cnn.builder import Architecture, NetworkBuilder, Shape
from tilecast.zoo.cnn.detection import add_feature_pyramid, join_levels
from tilecast.zoo.cnn.resnet import ResidualStages

_PYRAMID_SIDES = (1, 2, 3, 6)
"""Sides to which the pyramid of PSPNet pools the features."""
_FILTER_SIDES = (1, 3, 5, 7)
"""Sides of the computed filters of DMNet."""
_DILATIONS = 3
"""Dilated convolutions of a spatial pyramid (DeepLab)."""
_LITE_BRANCHES = (64, 32)
"""Channels to which LR-ASPP projects the features at 1/4 and at 1/2 of the image's side."""
_LOSS_BYTES = 4.0
"""Bytes of a logit in the softmax and the loss, which run in FP32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Segmenter(ResidualStages):
    """Dimensions of a segmenter."""

    stages: tuple[int, ...] = numbered_field("stage", default=())
    output_stride: int = 8
    """Factor by which the last features of a ResNet or MobileNet are smaller than the image: 8, 16 or 32."""
    branch_width: int = 0
    """Channels of the finest branch of an HRNet. 0 for another backbone."""
    branch_blocks: int = 4
    """Blocks of a branch between two exchanges of an HRNet."""
    modules: tuple[int, ...] = numbered_field("module", default=(1, 4, 3))
    """Exchanges in each stage of an HRNet."""
    mobile: bool = False
    """Whether the backbone is a MobileNet v2."""
    mobile_v3: bool = False
    """Whether the backbone is the large MobileNet v3."""
    base: int = 0
    """Channels of the first level of a U-Net. 0 for another backbone."""
    head_width: int = 512
    """Channels of the head."""
    classes: int = 19
    """Categories of a pixel."""
    auxiliary: bool = True
    """Whether training has a second, small head on earlier features."""


@dataclass(frozen=True, slots=True)
class _PixelAttention:
    """Attention over the pixels of a head's features, with a convolution before and after."""

    share: int = 2
    """Ratio of the head's channels to those of queries and keys."""
    keys: int | None = None
    """Number of keys that a pixel attends to. None for all pixels."""
    is_cross: bool = False
    """Whether a pixel attends only to the pixels of its row and its column."""
    maps: int = 1
    """Attention maps per pixel."""
    losses: int = 1
    """Logits for the whole image that have a loss of their own."""
    codes: int = 0
    """Number of codewords, from each of which the difference of every pixel is computed (EncNet)."""
    merges: bool = True
    """Whether a convolution merges the result with the features."""


_ATTENTION: Mapping[str, _PixelAttention] = {
    "nonlocal": _PixelAttention(), "dnl": _PixelAttention(), "gcnet": _PixelAttention(4, 1),
    "ccnet": _PixelAttention(8, is_cross=True, maps=2), "danet": _PixelAttention(8, losses=3, merges=False),
    "ann": _PixelAttention(2, 110, maps=2), "emanet": _PixelAttention(1, 64, maps=3),
    "encnet": _PixelAttention(1, 1, codes=32, merges=False),
}  # fmt: skip
"""Attention of heads by name (mmseg/models/decode_heads, files `NAME_head.py`)."""


def _build_segmenter(
    head: Callable[[NetworkBuilder, Segmenter, list[Shape]], None], net: NetworkBuilder, dims: Segmenter
) -> None:
    """Build the backbone, the head and the auxiliary head. The logits of each loss have the size of the image."""
    image = net.shape
    features = _add_backbone(net, dims)
    if not (dims.branch_width or dims.base):
        # The gradient of the last activation needs its output, which some heads only pool or join with others.
        net.keep_output()
        net.is_kept = True
    head(net, dims, features)
    _classify_pixels(net, dims, image)
    if dims.auxiliary and net.numerics.training:
        net.continue_from(features[-2])
        net.add_branch_gradient_sums(2)
        net.add_conv_norm_act(max(dims.head_width // 2, 16), 3)
        _classify_pixels(net, dims, image)


def _classify_pixels(net: NetworkBuilder, dims: Segmenter, image: Shape) -> None:
    """Add the class logits of every pixel of the image, and the loss of these logits.

    Dropout drops whole channels, so its mask is small. The loss saves the log-softmax for the backward pass. During the
    loss, memory also holds the logits, and a sorted copy with its indices, from which the accuracy is computed
    (mmseg/models/losses/accuracy.py). If the softmax saves its input, the logits stay until the backward pass.
    """
    net.keep_output()
    net.add_training_pointwise("dropout", mask_bytes=0.0, backward=(1.0, 1.0), kind="dropout")
    net.add_conv(dims.classes, 1, bias=True)
    small = net.size
    net.size = image[1]
    net.add_resize(small[1] * small[2] / (net.size[1] * net.size[2]))
    net.add_cross_entropy()
    logits = net.elements * _LOSS_BYTES / net.numerics.element
    kept = 2.0 if net.numerics.keeps_softmax_input else 1.0
    net.keep_elements(kept * logits)
    net.raise_peak((4.0 - kept) * logits)


def _add_backbone(net: NetworkBuilder, dims: Segmenter) -> list[Shape]:
    """Add the backbone and return the shapes of the feature maps that the heads read, in order of depth."""
    if dims.base:
        return _add_unet(net, dims.base)
    if dims.branch_width:
        return _add_hrnet(net, dims)
    if dims.mobile:
        return mobile.add_mobilenet_v2_features(net, dims.output_stride)
    if dims.mobile_v3:
        return _add_mobilenet_v3(net, dims.output_stride)
    resnet.add_stem(net, deep=dims.deep_stem)
    shapes, stride = [], 4
    for number in range(1, 5):
        grows = number > 1 and stride < dims.output_stride
        stride *= 2 if grows else 1
        resnet.add_stage(net, dims, number, stride=2 if grows else 1, dilated=number > 1 and not grows)
        shapes.append(net.shape)
    return shapes


def _add_mobilenet_v3(net: NetworkBuilder, output_stride: int) -> list[Shape]:
    """Add the large MobileNet v3 and return its features at 1/2, 1/4 and 1 / `output_stride` of the image's side.

    Source: mmseg/models/backbones/mobilenet_v3.py with out_indices (1, 3, 16), as its configurations of LR-ASPP have.
    """
    shapes = mobile.add_mobilenet_v3_features(net, large=True, output_stride=output_stride)
    net.add_conv_norm_act(6 * net.channels, 1, activation="hard-swish")
    return [shapes[0], shapes[2], net.shape]


def _add_unet(net: NetworkBuilder, base: int) -> list[Shape]:
    """Add a U-Net of five levels and return the shapes of its decoder levels, coarsest first."""
    skips: list[Shape] = []
    for level in range(5):
        if level:
            net.add_pool(2, 2)
        for _ in range(2):
            net.add_conv_norm_act(base * 2**level, 3)
        skips.append(net.shape)
    shapes = [net.shape]
    for channels, size in reversed(skips[:-1]):
        net.add_upsample()
        net.size = size
        net.add_conv_norm_act(channels, 1)
        net.add_concatenation(2 * channels)
        for _ in range(2):
            net.add_conv_norm_act(channels, 3)
        shapes.append(net.shape)
    return shapes


def _add_hrnet(net: NetworkBuilder, dims: Segmenter) -> list[Shape]:
    """Add an HRNet, and concatenate its branches at the size of the finest branch. Return that shape twice.

    Every module runs `branch_blocks` blocks on each branch, and then adds the resized outputs of all other branches to
    the branch.
    """
    for _ in range(2):
        net.add_conv_norm_act(64, 3, 2)
    for _ in range(dims.branch_blocks):
        resnet.add_block(net, replace(dims, bottleneck=True), 64)
    finest, branches = net.shape, [net.shape]
    for count, modules in enumerate(dims.modules, 2):
        branches = [*branches, branches[-1]]
        for place, shape in enumerate(branches):
            width = dims.branch_width * 2**place
            if shape[0] != width:
                net.continue_from(shape)
                net.add_conv_norm_act(width, 3, 2 if place == count - 1 else 1)
                branches[place] = net.shape
        for _ in range(modules):
            for shape in branches:
                net.shape = shape
                for _ in range(dims.branch_blocks):
                    resnet.add_block(net, dims, shape[0])
                net.keep_output()
            _exchange_branches(net, branches)
    net.shape = sum(channels for channels, _ in branches), finest[1]
    net.add_pointwise("resize", backward=(1.0, 1.0))
    net.add_concatenation(net.channels)
    return [net.shape, net.shape]


def _exchange_branches(net: NetworkBuilder, branches: Sequence[Shape]) -> None:
    """Add to each branch the outputs of all other branches, resized to its shape."""
    for target, goal in enumerate(branches):
        for source, shape in enumerate(branches):
            if source == target:
                continue
            net.continue_from(shape)
            for step in range(source, target):
                last = step == target - 1
                net.add_conv_norm_act(goal[0] if last else shape[0], 3, 2, activation="none" if last else "relu")
            if source > target:
                net.add_conv_norm_act(goal[0], 1, activation="none")
                net.add_resize(0.25 ** (source - target))
            net.shape = goal
            net.add_branch()
        net.add_activation()


def _add_fcn(net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add the FCN head, which consists of a few convolutions.

    For ResNet and MobileNet backbones, the output of these convolutions is concatenated with the features.
    """
    if dims.branch_width:
        net.add_conv_norm_act(net.channels, 1)
        return
    entry = net.shape
    for _ in range(1 if dims.base or dims.mobile else 2):
        net.add_conv_norm_act(dims.head_width, 3)
    if not dims.base:
        net.add_concatenation(entry[0] + dims.head_width)
        net.add_conv_norm_act(dims.head_width, 3)


def _add_pooled_pyramid(net: NetworkBuilder, dims: Segmenter) -> None:
    """Add pyramid pooling: features are pooled to four sizes, projected, resized and concatenated with the input."""
    entry, width = net.shape, dims.head_width
    for side in _PYRAMID_SIDES:
        net.continue_from(entry)
        net.add_pointwise("pool", writes=0.0, absorbed=False, backward=(0.0, 1.0))
        net.size = 1, side, side
        net.add_conv_norm_act(width, 1)
        net.size = entry[1]
        net.add_resize(0.0)
        net.keep_elements(0 * net.elements)
    net.add_concatenation(entry[0] + len(_PYRAMID_SIDES) * width)
    net.add_conv_norm_act(width, 3)


def _add_pspnet(net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add the PSPNet head, which is pyramid pooling."""
    _add_pooled_pyramid(net, dims)


def _add_spatial_pyramid(net: NetworkBuilder, dims: Segmenter, *, separable: bool) -> None:
    """Add atrous spatial pyramid pooling (ASPP): parallel dilated convolutions and a global mean, concatenated."""
    entry, width = net.shape, dims.head_width
    net.add_pointwise("mean", writes=0.0, absorbed=False, backward=(0.0, 1.0))
    net.size = 1, 1, 1
    net.add_conv_norm_act(width, 1)
    net.keep_output()
    net.continue_from(entry)
    net.add_conv_norm_act(width, 1)
    net.keep_output()
    for _ in range(_DILATIONS):
        net.continue_from(entry)
        if separable:
            net.add_conv_norm_act(entry[0], 3, groups=entry[0], dilated=True)
        net.add_conv_norm_act(width, 1 if separable else 3, dilated=not separable)
        net.keep_output()
    net.add_concatenation((2 + _DILATIONS) * width)
    net.add_conv_norm_act(width, 3)


def _add_deeplab_v3(net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add the DeepLab v3 head, which is an atrous spatial pyramid pooling."""
    _add_spatial_pyramid(net, dims, separable=False)


def _add_deeplab_v3_plus(net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add the DeepLab v3+ head: a separable ASPP, and a decoder that also reads the first stage's features."""
    _add_spatial_pyramid(net, dims, separable=True)
    width, coarse, fine = dims.head_width, net.size, features[0]
    net.keep_output()
    net.continue_from(fine)
    narrow = 48 if width > 128 else 12
    net.add_conv_norm_act(narrow, 1)
    net.keep_output()
    net.channels = width
    net.add_resize(coarse[1] * coarse[2] / (fine[1][1] * fine[1][2]))
    net.add_concatenation(width + narrow)
    for _ in range(2):
        net.add_conv_norm_act(net.channels, 3, groups=net.channels)
        net.add_conv_norm_act(width, 1)


def _add_upernet(net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add the UPerNet head: pyramid pooling on the last stage, a feature pyramid, and its levels concatenated."""
    width = dims.head_width
    _add_pooled_pyramid(net, dims)
    for shape in features[-2::-1]:
        net.continue_from(shape)
        net.add_conv_norm_act(width, 1)
        net.add_resize(0.25)
        net.add_branch()
        net.continue_from(net.shape)
        net.add_conv_norm_act(width, 3)
    for _ in features[1:]:
        net.add_resize(0.25)
    net.add_concatenation(len(features) * width)
    net.add_conv_norm_act(width, 3)


def _add_fpn(net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add the semantic FPN head: a feature pyramid whose levels are summed at the size of the finest."""
    join_levels(net, add_feature_pyramid(net, features))


def _add_lite_pyramid(net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add the LR-ASPP head: coarse features, scaled by their means and joined with projections of finer features.

    Source: mmseg/models/decode_heads/lraspp_head.py. The means of 49 x 49 pixels are few and are left out of memory.
    """
    entry, width = net.shape, dims.head_width
    net.add_pointwise("pool", writes=0.0, absorbed=False, backward=(0.0, 1.0))
    net.size = 1, 1, 1
    net.add_conv_norm_act(width, 1, activation="sigmoid")
    net.continue_from(entry)
    net.add_conv_norm_act(width, 1)
    net.keep_output()
    net.add_pointwise("scale", reads=2.0, absorbed=False, backward=(3.0, 2.0))
    net.keep_output()  # the resized scales
    net.add_conv(width, 1, bias=True)
    coarse = net.size
    for fine, branch in zip(features[1::-1], _LITE_BRANCHES, strict=True):
        net.shape = width, fine[1]
        net.add_resize(coarse[1] * coarse[2] / (fine[1][1] * fine[1][2]))
        net.continue_from(fine)
        net.add_conv(branch, 1, bias=True)
        net.add_concatenation(width + branch)
        net.add_conv_norm_act(width, 1)
        coarse = net.size


def _add_ocrnet(net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add the OCRNet head: soft regions, the mean feature of each region, and attention of pixels to regions."""
    entry, image, width = net.shape, net.size, dims.head_width
    net.add_conv_norm_act(entry[0] if dims.branch_width else width // 2, 1 if dims.branch_width else 3)
    if dims.branch_width:
        _classify_pixels(net, dims, (net.channels, (1, 4 * image[1], 4 * image[2])))
    net.continue_from(entry)
    net.add_conv_norm_act(width, 3)
    pixels = float(image[1] * image[2])
    for rows, depth in ((float(dims.classes), pixels), (pixels, float(dims.classes))):
        net.add_batched_matmul(rows, float(width), depth)
    for _ in range(2):
        net.continue_from(net.shape)
        net.add_conv_norm_act(width // 2, 1)
        net.keep_output()
        net.channels = width
    net.add_conv_norm_act(width, 1)
    net.keep_output()
    net.add_concatenation(2 * width)
    net.add_conv_norm_act(width, 1)


def _add_attention(kind: _PixelAttention, net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add a head in which all pixels attend to pixels, or to summaries of pixels, between two convolutions."""
    entry, width = net.shape, dims.head_width
    net.add_conv_norm_act(width, 3)
    shape, inner = net.shape, max(width // kind.share, 8)
    pixels = float(shape[1][1] * shape[1][2])
    keys = float(shape[1][1] + shape[1][2]) if kind.is_cross else float(kind.keys or pixels)
    for _ in range(kind.maps):
        attention.add_pixel_attention(net, keys, inner)
        net.add_conv_norm_act(width, 1, activation="none")
        net.add_branch()
    if kind.codes:
        net.keep_elements(2.0 * net.elements * kind.codes)
        net.raise_peak(net.elements * kind.codes)
        net.add_pointwise("encode", net.elements * kind.codes, kernels=3, absorbed=False)
    net.add_conv_norm_act(width, 3)
    if kind.merges:
        net.add_concatenation(entry[0] + width)
        net.add_conv_norm_act(width, 3)
    shape, image = net.shape, (net.channels, tuple(side * dims.output_stride for side in net.size[1:]))
    for _ in range(kind.losses - 1):
        net.continue_from(entry)
        net.add_conv_norm_act(width, 3)
        net.add_conv_norm_act(width, 3)
        _classify_pixels(net, dims, (image[0], (1, image[1][0], image[1][1])))
        net.shape = shape


def _add_context_pyramid(net: NetworkBuilder, dims: Segmenter, features: list[Shape], *, dynamic: bool) -> None:
    """Add the head of APCNet or DMNet: contexts of several sizes, concatenated with the features.

    APCNet weights the pooled features of a size for every pixel. A `dynamic` context of DMNet is a depthwise
    convolution with filters that are computed from the pooled features.
    """
    entry, width = net.shape, dims.head_width
    pixels = float(entry[1][1] * entry[1][2])
    for side in _FILTER_SIDES if dynamic else _PYRAMID_SIDES:
        net.continue_from(entry)
        net.add_conv_norm_act(width, 1)
        net.keep_output()
        if dynamic:
            net.parameters += entry[0] * width
            net.add_conv_norm_act(width, side, groups=width)
        else:
            net.parameters += (entry[0] + width) * width
            net.add_pointwise("add")
            net.add_conv(side * side, 1, bias=True)
            net.add_batched_matmul(pixels, float(width), float(side * side))
            net.channels = width
            net.add_conv_norm_act(width, 1)
            net.keep_output()
            net.add_branch()
            net.add_activation()
            net.add_conv_norm_act(width, 1)
        net.keep_output()
    net.add_concatenation(entry[0] + len(_PYRAMID_SIDES) * width)
    net.add_conv_norm_act(width, 3)


def _add_psanet(net: NetworkBuilder, dims: Segmenter, features: list[Shape]) -> None:
    """Add the PSANet head: two attention maps of all pixels to all pixels, at half the size of the features.

    A convolution computes each pixel's map relative to its position. The scores are collected from these maps.
    """
    entry, width = net.shape, dims.head_width
    half = 1, max(entry[1][1] // 2, 1), max(entry[1][2] // 2, 1)
    pixels = float(half[1] * half[2])
    for _ in range(2):
        net.continue_from(entry)
        net.add_conv_norm_act(width, 1)
        net.keep_output()
        net.size = half
        net.add_resize(4.0)
        net.add_conv_norm_act(width, 1)
        net.add_conv((2 * half[1] - 1) * (2 * half[2] - 1), 1)
        net.raise_peak(2.0 * net.elements)
        scores = net.batch * pixels * pixels
        net.add_pointwise("softmax", scores, reads=2.0, absorbed=False)
        net.keep_elements(scores * (2.0 if net.numerics.keeps_softmax_input else 1.0))
        net.add_batched_matmul(pixels, float(width), pixels)
    net.shape = 2 * width, half
    net.add_conv_norm_act(entry[0], 1)
    net.keep_output()
    net.size = entry[1]
    net.add_resize(0.25)
    net.add_concatenation(2 * entry[0])
    net.add_conv_norm_act(width, 3)


_HEADS: Mapping[str, Callable[[NetworkBuilder, Segmenter, list[Shape]], None]] = {
    "fcn": _add_fcn, "pspnet": _add_pspnet, "deeplab-v3": _add_deeplab_v3, "deeplab-v3-plus": _add_deeplab_v3_plus,
    "upernet": _add_upernet, "semantic-fpn": _add_fpn, "ocrnet": _add_ocrnet,
    "psanet": _add_psanet, "lraspp": _add_lite_pyramid,
    "apcnet": partial(_add_context_pyramid, dynamic=False), "dmnet": partial(_add_context_pyramid, dynamic=True),
    **{name: partial(_add_attention, kind) for name, kind in _ATTENTION.items()},
}  # fmt: skip

SEGMENTERS: Mapping[str, Architecture[Segmenter]] = {
    name: Architecture(Segmenter, partial(_build_segmenter, head)) for name, head in _HEADS.items()
}
"""Families of segmenters by the name of their head."""
