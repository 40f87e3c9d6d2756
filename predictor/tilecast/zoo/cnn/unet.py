"""U-Net in two and three dimensions, nnU-Net and V-Net: down, across and up again.

Sources: Ronneberger et al., arXiv 1505.04597 (figure 1); Isensee et al., arXiv 1809.10486 (section 2); Milletari et
al., arXiv 1606.04797 (figure 2, with batch norm and kernels of 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.walk import Walk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Unet(Images):
    """Dimensions of a U-Net."""

    base: int
    """Channels of the first level."""
    depth: int
    """Levels."""
    max_channels: int = 512
    """Most channels of a level."""
    classes: int = 2
    """Categories of a pixel."""
    pooled: bool = False
    """Whether max pooling is between levels; otherwise a level's first convolution has stride 2."""
    batch_norm: bool = False
    """Whether convolutions have a norm in place of a bias."""
    valid: bool = False
    """Whether convolutions have no padding."""
    narrowing: bool = False
    """Whether, on the way up, a level's second convolution halves the channels, not the transposed convolution."""
    repeated_base: bool = False
    """Whether the first two levels have the same channels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Vnet(Images):
    """Dimensions of a V-Net."""

    base: int
    """Channels of the first level."""
    depth: int
    """Levels."""
    convolutions: int
    """Convolutions of a residual block."""
    classes: int = 3
    """Categories of a voxel."""


def unet(walk: Walk, dims: Unet) -> None:
    """Write a U-Net of `depth` levels of two convolutions, from `base` to at most `max_channels` (512) channels.

    With `pooled` there is max pooling between levels, otherwise the first convolution of a level has stride 2.
    `batch_norm` puts norms behind convolutions in place of biases. `valid` leaves out the padding. `narrowing` halves
    the channels in the second convolution of a level on the way up, not in the transposed convolution. `repeated_base`
    gives the first two levels the same channels. The loss is over all pixels.
    """
    base, depth, cap = dims.base, dims.depth, dims.max_channels
    first = dims.repeated_base
    channels = [min(base * 2 ** max(0, level - first), cap) for level in range(depth)]
    pooled, narrowing = dims.pooled, dims.narrowing
    skips = []
    for level, width in enumerate(channels):
        if pooled and level:
            walk.pool(2, 2)
        _convolution(walk, dims, width, 2 if level and not pooled else 1)
        _convolution(walk, dims, width)
        skips.append(walk.shape)
        walk.fork(1 + (level < depth - 1))
    up = channels[-2]
    for level in range(depth - 2, -1, -1):
        width = channels[level]
        walk.up_conv(up if narrowing else width)
        if narrowing:
            walk.activate()
        walk.concatenate(walk.channels + width)
        _convolution(walk, dims, width)
        up = width // 2
        _convolution(walk, dims, up if narrowing and level else width)
    walk.conv(dims.classes, 1, bias=True)
    walk.loss(max(2, walk.channels))


def _convolution(walk: Walk, dims: Unet, out: int, stride: int = 1) -> None:
    norm = dims.batch_norm
    walk.conv(out, 3, stride, bias=not norm, padding=0 if dims.valid else None)
    if norm:
        walk.norm()
    walk.activate()


def vnet(walk: Walk, dims: Vnet) -> None:
    """Write a V-Net of `depth` levels of residual blocks of `convolutions` each.

    Convolutions of kernel and stride 2 halve the size between levels. The first level is one convolution of `base`
    channels, and on the way up it has only the convolution to the classes.
    """
    base, depth, convolutions = dims.base, dims.depth, dims.convolutions
    _normed(walk, base, 3)
    walk.add()
    skips = [walk.channels]
    for _ in range(depth - 1):
        _normed(walk, 2 * walk.channels, 2, 2)
        _residual(walk, convolutions)
        skips.append(walk.channels)
    for width in reversed(skips[1:-1]):
        walk.up_conv(width)
        walk.norm()
        walk.activate()
        walk.concatenate(2 * width)
        _residual(walk, convolutions)
    walk.up_conv(base)
    walk.norm()
    walk.activate()
    walk.conv(dims.classes, 3, bias=True)
    walk.loss()


def _normed(walk: Walk, out: int, kernel: int, stride: int = 1) -> None:
    walk.conv(out, kernel, stride, bias=True)
    walk.norm()
    walk.activate()


def _residual(walk: Walk, convolutions: int) -> None:
    for _ in range(convolutions):
        _normed(walk, walk.channels, 3)
    walk.add()
