"""ResNet, ResNeXt, Wide ResNet and SE-ResNeXt: residual stages of basic or bottleneck blocks.

Sources: He et al., arXiv 1512.03385 (table 1; the stride of a bottleneck is in its 3x3 convolution, as in torchvision
and in MLPerf's "v1.5"); Xie et al., arXiv 1611.05431; Zagoruyko and Komodakis, arXiv 1605.07146; Hu et al.,
arXiv 1709.01507; for faces Deng et al., arXiv 1801.07698 (section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model import numbered
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.walk import Walk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Residual(Images):
    """Dimensions of the residual stages of a ResNet."""

    stages: tuple[int, ...] = numbered("stage")
    """Blocks of each stage."""
    bottleneck: bool = False
    """Whether blocks have three convolutions around a narrow one, not two."""
    stride_first: bool = False
    """Whether the stride of a bottleneck is in its first convolution, as in the authors' own networks."""
    groups: int = 1
    """Groups of a bottleneck's middle convolution (ResNeXt)."""
    group_width: int = 64
    """Channels of a group in the first stage (ResNeXt, Wide ResNet)."""
    excite: int = 0
    """Reduction of squeeze-and-excitation; 0: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ResNet(Residual):
    """Dimensions of a ResNet that classifies."""

    stages: tuple[int, int, int, int] = numbered("stage")
    """Blocks of each stage."""
    classes: int = 1000
    """Categories."""
    small_stem: bool = False
    """Whether the stem is one 3x3 convolution without pooling, for images of 32 pixels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FaceResNet(Images):
    """Dimensions of a recogniser of faces."""

    stages: tuple[int, int, int, int] = numbered("stage")
    """Blocks of each stage."""
    identities: int
    """People among whom it classifies in training."""
    sampled: float = 1.0
    """Share of the identities that each step uses."""


def resnet(walk: Walk, dims: ResNet) -> None:
    """Write a classifier of four stages."""
    stem(walk, small=dims.small_stem)
    for number in range(1, 5):
        stage(walk, dims, number)
    walk.classify(dims.classes)


def stem(walk: Walk, *, small: bool = False) -> None:
    """Write the first convolution and pooling, which reduce each side to a quarter; a `small` stem keeps the size."""
    walk.unit(64, 3 if small else 7, 1 if small else 2)
    if not small:
        walk.pool(3, 2)


def stage(walk: Walk, dims: Residual, number: int, *, stride: int = 2) -> None:
    """Write stage `number` (1 to 4). All stages but the first begin with `stride`."""
    for index in range(dims.stages[number - 1]):
        _block(walk, dims, 64 * 2 ** (number - 1), stride if number > 1 and not index else 1)


def _block(walk: Walk, dims: Residual, width: int, stride: int) -> None:
    entry = walk.shape
    if dims.bottleneck:
        groups = dims.groups
        inner = width * dims.group_width * groups // 64
        early = dims.stride_first
        walk.unit(inner, 1, stride if early else 1)
        walk.unit(inner, 3, 1 if early else stride, groups=groups)
        walk.unit(4 * width, 1, activation="none")
    else:
        walk.unit(width, 3, stride)
        walk.unit(width, 3, activation="none")
    if dims.excite:
        walk.excite(walk.channels // dims.excite)
    leave = walk.shape
    if leave != entry:
        walk.again(entry)
        walk.unit(leave[0], 1, stride, activation="none")
    walk.add()
    walk.activate()


def face_resnet(walk: Walk, dims: FaceResNet) -> None:
    """Write a recogniser of faces of 112 pixels.

    It has four stages, which begin with stride 2, of blocks of a norm and two 3x3 convolutions. Its output is an
    embedding of 512 numbers, which `identities.classifier` reads.
    """
    walk.unit(64, 3, activation="prelu")
    walk.parameters += walk.channels
    for number in range(1, 5):
        for index in range(dims.stages[number - 1]):
            _face_block(walk, 32 * 2**number, 1 if index else 2)
    walk.norm()
    walk.dropout()
    walk.dense(512)
    walk.norm()


def _face_block(walk: Walk, width: int, stride: int) -> None:
    entry = walk.shape
    walk.norm()
    walk.unit(width, 3, activation="prelu")
    walk.parameters += width
    walk.unit(width, 3, stride, activation="none")
    if walk.shape != entry:
        walk.again(entry)
        walk.unit(width, 1, stride, activation="none")
    walk.add()
