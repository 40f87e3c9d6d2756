"""Classifiers of images: AlexNet, VGG, DenseNet, GoogLeNet and Inception v3.

Sources: Krizhevsky, arXiv 1404.5997 (the single-column AlexNet of torchvision); Simonyan and Zisserman, arXiv 1409.1556
(table 1); Huang et al., arXiv 1608.06993 (table 1); Szegedy et al., arXiv 1409.4842 (table 1, with batch norm and a 3x3
in place of the 5x5 convolution, as in torchvision); Szegedy et al., arXiv 1512.00567 (figures 5 to 7, table 1). The
auxiliary classifier of Inception v3 runs in training only, as published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tilecast.model import numbered_field
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Classifier


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Vgg(Classifier):
    """Dimensions of VGG."""

    stages: tuple[int, int, int, int, int] = numbered_field("stage")
    """Convolutions of each stage."""
    batch_norm: bool = False
    """Whether a norm follows each convolution."""


def build_vgg(net: NetworkBuilder, dims: Vgg) -> None:
    """Build VGG: five stages of 3x3 convolutions."""
    for number, depth in enumerate(dims.stages, 1):
        for _ in range(depth):
            net.add_conv(min(32 * 2**number, 512), 3, bias=True)
            if dims.batch_norm:
                net.add_channel_norm()
            net.add_activation()
        net.add_pool(2, 2)
    _add_dense_head(net, dims.classes)


def build_alexnet(net: NetworkBuilder, dims: Classifier) -> None:
    """Build AlexNet: five convolutions and three poolings."""
    for out, kernel, stride, padding, pooled in (
        (64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False), (256, 3, 1, 1, True),
    ):  # fmt: skip
        net.add_conv(out, kernel, stride, bias=True, padding=padding)
        net.add_activation()
        if pooled:
            net.add_pool(3, 2, padding=0)
    _add_dense_head(net, dims.classes)


def _add_dense_head(net: NetworkBuilder, classes: int) -> None:
    """Add two dense layers of 4096 outputs with ReLU and dropout, a dense layer to the classes, and the loss."""
    for _ in range(2):
        net.add_dense(4096)
        net.add_activation()
        net.add_dropout()
    net.add_dense(classes)
    net.add_cross_entropy()


_BOTTLENECK = 4
"""Channels of a layer's 1x1 convolution, in units of the growth rate."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DenseNet(Classifier):
    """Dimensions of DenseNet."""

    stages: tuple[int, int, int, int] = numbered_field("stage")
    """Layers of each stage."""
    growth: int
    """Channels that each layer adds."""
    stem: int | None = None
    """Channels of the stem. None for twice `growth`."""


def build_densenet(net: NetworkBuilder, dims: DenseNet) -> None:
    """Build DenseNet: four stages, with transitions that halve channels, height and width, and a classifier."""
    growth = dims.growth
    stem = 2 * growth if dims.stem is None else dims.stem
    net.add_conv_norm_act(stem, 7, 2)
    net.add_pool(3, 2)
    for number, depth in enumerate(dims.stages, 1):
        for _ in range(depth):
            _add_densenet_layer(net, growth)
        net.add_channel_norm()
        net.add_activation()
        if number < len(dims.stages):
            net.add_conv(net.channels // 2, 1)
            net.add_pool(2, 2, average=True)
    net.add_classifier_head(dims.classes)


def _add_densenet_layer(net: NetworkBuilder, growth: int) -> None:
    """Add a bottleneck and a 3x3 convolution, and concatenate their `growth` output channels with the layer's input."""
    entry = net.shape
    net.add_branch_gradient_sums(2)
    net.add_channel_norm()
    net.add_activation()
    net.add_conv_norm_act(_BOTTLENECK * growth, 1)
    net.add_conv(growth, 3)
    net.add_concatenation(entry[0] + growth)


Unit: TypeAlias = tuple[int, int | tuple[int, int], int]
"""A convolution with norm and ReLU: its output channels, kernel and stride."""
Branch: TypeAlias = Sequence[Unit]


def build_googlenet(net: NetworkBuilder, dims: Classifier) -> None:
    """Build GoogLeNet: nine modules with 1x1, 3x3, 5x5 and pooling branches, and a classifier.

    The 5x5 branch uses a 3x3 kernel, as in torchvision.
    """
    net.add_conv_norm_act(64, 7, 2)
    net.add_pool(3, 2)
    net.add_conv_norm_act(64, 1)
    net.add_conv_norm_act(192, 3)
    net.add_pool(3, 2)
    for index, (one, three_in, three, five_in, five, pooled) in enumerate((
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64),
        (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
    )):  # fmt: skip
        if index in (2, 7):
            net.add_pool(3, 2)
        branches: list[Branch] = [[(one, 1, 1)], [(three_in, 1, 1), (three, 3, 1)], [(five_in, 1, 1), (five, 3, 1)]]
        _add_module(net, branches, pooled=pooled)
    net.add_classifier_head(dims.classes, dropout=True)


def build_inception_v3(net: NetworkBuilder, dims: Classifier) -> None:
    """Build Inception v3: a stem, three modules A, a reduction, four modules C, a reduction, and two modules E."""
    classes = dims.classes
    net.add_conv_norm_act(32, 3, 2, padding=0)
    net.add_conv_norm_act(32, 3, padding=0)
    net.add_conv_norm_act(64, 3)
    net.add_pool(3, 2, padding=0)
    net.add_conv_norm_act(80, 1)
    net.add_conv_norm_act(192, 3, padding=0)
    net.add_pool(3, 2, padding=0)
    for pooled in (32, 64, 64):
        _add_module(
            net,
            [[(64, 1, 1)], [(48, 1, 1), (64, 5, 1)], [(64, 1, 1), (96, 3, 1), (96, 3, 1)]],
            pooled=pooled,
            average=True,
        )
    _add_module(net, [[(384, 3, 2)], [(64, 1, 1), (96, 3, 1), (96, 3, 2)]])
    row, column = (1, 7), (7, 1)
    for width in (128, 160, 160, 192):
        double: Branch = [(width, 1, 1), (width, column, 1), (width, row, 1), (width, column, 1), (192, row, 1)]
        single: Branch = [(width, 1, 1), (width, row, 1), (192, column, 1)]
        _add_module(net, [[(192, 1, 1)], single, double], pooled=192, average=True)
    if net.numerics.training:
        _add_auxiliary_classifier(net, classes)
    _add_module(net, [[(192, 1, 1), (320, 3, 2)], [(192, 1, 1), (192, row, 1), (192, column, 1), (192, 3, 2)]])
    for _ in range(2):
        _add_module_e(net)
    net.add_classifier_head(classes, dropout=True)


def _add_module(net: NetworkBuilder, branches: Sequence[Branch], *, pooled: int = 0, average: bool = False) -> None:
    """Add an Inception module: `branches` and a pooling branch that read the same input, concatenated.

    If `pooled` is positive, a 1x1 convolution to `pooled` channels follows the pooling. Otherwise the module halves
    each side: the pooling has stride 2, and the last convolution of every branch must have stride 2.
    """
    entry = net.shape
    net.add_branch_gradient_sums(len(branches) + 1)
    channels = 0
    for index, branch in enumerate(branches):
        if index:
            net.continue_from(entry)
        _add_branch(net, branch)
        channels += net.channels
    net.continue_from(entry)
    if pooled:
        net.add_pool(3, 1, average=average)
        net.add_conv_norm_act(pooled, 1)
    else:
        net.add_pool(3, 2, padding=0)
    net.add_concatenation(channels + net.channels)


def _add_branch(net: NetworkBuilder, branch: Branch) -> None:
    """Add the convolutions of a branch in order. Those with a stride above 1 have no padding."""
    for out, kernel, stride in branch:
        net.add_conv_norm_act(out, kernel, stride, padding=0 if stride > 1 else None)


def _add_module_e(net: NetworkBuilder) -> None:
    """Add an Inception v3 module E, whose 3x3 branches end in parallel 1x3 and 3x1 convolutions."""
    entry = net.shape
    net.add_branch_gradient_sums(4)
    for before in ([(384, 1, 1)], [(448, 1, 1), (384, 3, 1)]):
        net.shape = entry
        _add_branch(net, before)
        split = net.shape
        net.add_branch_gradient_sums(2)
        for kernel in ((1, 3), (3, 1)):
            if kernel == (3, 1):
                net.continue_from(split)
            net.add_conv_norm_act(384, kernel)
    net.continue_from(entry)
    net.add_conv_norm_act(320, 1)
    net.continue_from(entry)
    net.add_pool(3, 1, average=True)
    net.add_conv_norm_act(192, 1)
    net.add_concatenation(320 + 4 * 384 + 192)


def _add_auxiliary_classifier(net: NetworkBuilder, classes: int) -> None:
    """Add a classifier on the current tensor, and then continue from that tensor."""
    entry = net.shape
    net.add_branch_gradient_sums(2)
    net.add_pool(5, 3, padding=0, average=True)
    net.add_conv_norm_act(128, 1)
    net.add_conv_norm_act(768, 5, padding=0)
    net.add_classifier_head(classes)
    net.shape = entry
