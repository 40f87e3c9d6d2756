"""ResNet, ResNeXt, Wide ResNet and SE-ResNeXt: residual stages of basic or bottleneck blocks.

Sources: He et al., arXiv 1512.03385 (table 1; the stride of a bottleneck is in its 3x3 convolution, as in torchvision
and in MLPerf's "v1.5"); Xie et al., arXiv 1611.05431; Zagoruyko and Komodakis, arXiv 1605.07146; Hu et al.,
arXiv 1709.01507; for faces Deng et al., arXiv 1801.07698 (section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.zoo.cnn.walk import Walk


def resnet(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write a classifier of four stages of `stage1` ... `stage4` blocks.

    `bottleneck` selects the kind of block, `groups` and `group_width` its cardinality (ResNeXt, Wide ResNet), and
    `excite` the reduction of squeeze-and-excitation. `small_stem` is a 3x3 stem without pooling, for images of 32
    pixels. `stride_first` puts the stride of a bottleneck into its first convolution, as in the authors' own networks.
    """
    stem(walk, small=bool(extra.get("small_stem")))
    for number in range(1, 5):
        stage(walk, extra, number)
    walk.classify(int(extra.get("classes", 1000)))


def stem(walk: Walk, *, small: bool = False) -> None:
    """Write the first convolution and pooling, which reduce each side to a quarter; a `small` stem keeps the size."""
    walk.unit(64, 3 if small else 7, 1 if small else 2)
    if not small:
        walk.pool(3, 2)


def stage(walk: Walk, extra: Mapping[str, float], number: int, *, stride: int = 2) -> None:
    """Write stage `number` (1 to 4). All stages but the first begin with `stride`."""
    for index in range(int(extra[f"stage{number}"])):
        _block(walk, extra, 64 * 2 ** (number - 1), stride if number > 1 and not index else 1)


def _block(walk: Walk, extra: Mapping[str, float], width: int, stride: int) -> None:
    entry = walk.shape
    if extra.get("bottleneck"):
        groups = int(extra.get("groups", 1))
        inner = width * int(extra.get("group_width", 64)) * groups // 64
        early = bool(extra.get("stride_first"))
        walk.unit(inner, 1, stride if early else 1)
        walk.unit(inner, 3, 1 if early else stride, groups=groups)
        walk.unit(4 * width, 1, activation="none")
    else:
        walk.unit(width, 3, stride)
        walk.unit(width, 3, activation="none")
    if extra.get("excite"):
        walk.excite(walk.channels // int(extra["excite"]))
    leave = walk.shape
    if leave != entry:
        walk.again(entry)
        walk.unit(leave[0], 1, stride, activation="none")
    walk.add()
    walk.activate()


def face_resnet(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write a recogniser of faces of 112 pixels.

    It has four stages, which begin with stride 2, of blocks of a norm and two 3x3 convolutions. Its output is an
    embedding of 512 numbers, which `identities.classifier` reads.
    """
    walk.unit(64, 3, activation="prelu")
    walk.parameters += walk.channels
    for number in range(1, 5):
        for index in range(int(extra[f"stage{number}"])):
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
