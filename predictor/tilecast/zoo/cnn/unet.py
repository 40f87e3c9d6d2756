"""U-Net in two and three dimensions, nnU-Net and V-Net: down, across and up again.

Sources: Ronneberger et al., arXiv 1505.04597 (figure 1); Isensee et al., arXiv 1809.10486 (section 2); Milletari et
al., arXiv 1606.04797 (figure 2, with batch norm and kernels of 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Images


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Unet(Images):
    """Dimensions of a U-Net."""

    base: int
    """Channels of the first level."""
    depth: int
    """Number of levels."""
    max_channels: int = 512
    """Most channels of a level."""
    classes: int = 2
    """Categories of a pixel."""
    pooled: bool = False
    """Whether max pooling separates levels. Otherwise a level's first convolution has stride 2."""
    batch_norm: bool = False
    """Whether convolutions have a norm instead of a bias."""
    valid: bool = False
    """Whether convolutions have no padding."""
    narrowing: bool = False
    """Whether the second convolution of a level on the way up halves the channels, rather than the transposed one."""
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


def build_unet(net: NetworkBuilder, dims: Unet) -> None:
    """Build a U-Net with two convolutions per level on the way down and up, and a loss over all pixels."""
    base, depth, cap = dims.base, dims.depth, dims.max_channels
    first = dims.repeated_base
    channels = [min(base * 2 ** max(0, level - first), cap) for level in range(depth)]
    pooled, narrowing = dims.pooled, dims.narrowing
    skips = []
    for level, width in enumerate(channels):
        if pooled and level:
            net.add_pool(2, 2)
        _add_unet_conv(net, dims, width, 2 if level and not pooled else 1)
        _add_unet_conv(net, dims, width)
        skips.append(net.shape)
        net.add_branch_gradient_sums(1 + (level < depth - 1))
    up = channels[-2]
    for level in range(depth - 2, -1, -1):
        width = channels[level]
        net.add_up_conv(up if narrowing else width)
        if narrowing:
            net.add_activation()
        net.add_concatenation(net.channels + width)
        _add_unet_conv(net, dims, width)
        up = width // 2
        _add_unet_conv(net, dims, up if narrowing and level else width)
    net.add_conv(dims.classes, 1, bias=True)
    net.add_cross_entropy(max(2, net.channels))


def _add_unet_conv(net: NetworkBuilder, dims: Unet, out: int, stride: int = 1) -> None:
    """Add a 3x3 convolution, an optional batch norm and an activation."""
    net.add_conv(out, 3, stride, bias=not dims.batch_norm, padding=0 if dims.valid else None)
    if dims.batch_norm:
        net.add_channel_norm()
    net.add_activation()


def build_vnet(net: NetworkBuilder, dims: Vnet) -> None:
    """Build a V-Net: levels of residual blocks, separated by convolutions of kernel and stride 2.

    The finest level has one convolution on the way down. On the way up it has only the output convolution.
    """
    base, depth, convolutions = dims.base, dims.depth, dims.convolutions
    _add_vnet_conv(net, base, 3)
    net.add_branch()
    skips = [net.channels]
    for _ in range(depth - 1):
        _add_vnet_conv(net, 2 * net.channels, 2, 2)
        _add_residual_block(net, convolutions)
        skips.append(net.channels)
    for width in reversed(skips[1:-1]):
        net.add_up_conv(width)
        net.add_channel_norm()
        net.add_activation()
        net.add_concatenation(2 * width)
        _add_residual_block(net, convolutions)
    net.add_up_conv(base)
    net.add_channel_norm()
    net.add_activation()
    net.add_conv(dims.classes, 3, bias=True)
    net.add_cross_entropy()


def _add_vnet_conv(net: NetworkBuilder, out: int, kernel: int, stride: int = 1) -> None:
    """Add a convolution with a bias, a norm and an activation."""
    net.add_conv(out, kernel, stride, bias=True)
    net.add_channel_norm()
    net.add_activation()


def _add_residual_block(net: NetworkBuilder, convolutions: int) -> None:
    """Add `convolutions` convolutions and a residual sum."""
    for _ in range(convolutions):
        _add_vnet_conv(net, net.channels, 3)
    net.add_branch()
