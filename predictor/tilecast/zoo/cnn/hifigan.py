"""HiFi-GAN: a generator of sound and two families of discriminators, trained against each other.

Source: Kong et al., arXiv 2010.05646, section 2 and appendix A, version 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo import layers
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.walk import Walk

_STAGES = ((8, 16), (8, 16), (2, 4), (2, 4))
"""Stride and kernel of each transposed convolution. Each halves the channels."""
_KERNELS = (3, 7, 11)
_PERIODS = (2, 3, 5, 7, 11)
_SCALES = ((128, 15, 1, 1), (128, 41, 2, 4), (256, 41, 2, 16), (512, 41, 4, 16), (1024, 41, 4, 16), (1024, 41, 1, 16),
           (1024, 5, 1, 1))  # fmt: skip
"""Channels, kernel, stride and groups of each convolution of a discriminator of sound at one scale."""
_PASSES = 4
"""Passes of the discriminators per step: real and made sound, once to train them and once to train the generator."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class HifiGan(Images):
    """Dimensions of HiFi-GAN."""

    base: int
    """Channels of the first convolution."""


def hifigan(walk: Walk, dims: HifiGan) -> None:
    """Write a generator that turns each frame of a spectrum into 256 samples, and in training the discriminators.

    `base` is the number of channels of its first convolution.
    """
    walk.conv(dims.base, (1, 7), bias=True)
    for stride, kernel in _STAGES:
        walk.activate("leaky-relu")
        _lengthen(walk, walk.channels // 2, kernel, stride)
        entry = walk.shape
        for width in _KERNELS:
            walk.again(entry)
            for _ in range(3):
                for _ in range(2):
                    walk.activate("leaky-relu")
                    walk.conv(walk.channels, (1, width), bias=True)
                walk.add()
            walk.add()
    walk.activate("leaky-relu")
    walk.conv(1, (1, 7), bias=True)
    walk.activate("tanh")
    if walk.numerics.training:
        samples, batch = walk.size[2], walk.batch
        walk.batch = batch * _PASSES
        _judge(walk, samples)
        walk.batch = batch


def _lengthen(walk: Walk, out: int, kernel: int, stride: int) -> None:
    """Write a transposed convolution: every column becomes `kernel` columns, which start `stride` columns apart."""
    columns = walk.size[2]
    walk.conv(out * kernel, 1)
    walk.shape = out, (1, 1, columns * stride)
    walk.parameters += out


def _judge(walk: Walk, samples: int) -> None:
    """Write the discriminators: of samples in rows of one period each, and of sound at full, half and quarter rate.

    The output of each of their convolutions but the last is compared between real and generated sound.
    """
    for period in _PERIODS:
        walk.shape = 1, (1, -(-samples // period), period)
        for out, stride in ((32, 3), (128, 3), (512, 3), (1024, 3), (1024, 1)):
            walk.conv(out, (5, 1), (stride, 1), bias=True)
            _compared(walk)
        walk.conv(1, (3, 1), bias=True)
    for scale in range(3):
        walk.shape = 1, (1, 1, samples // 2**scale)
        for out, kernel, stride, groups in _SCALES:
            walk.conv(out, (1, kernel), stride, groups=groups, bias=True)
            _compared(walk)
        walk.conv(1, (1, 3), bias=True)


def _compared(walk: Walk) -> None:
    walk.activate("leaky-relu")
    walk.ops += layers.pointwise("feature-loss", walk.numerics, walk.elements, kernels=2, absorbed=False)
