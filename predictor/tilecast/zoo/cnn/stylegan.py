"""StyleGAN2 (Karras et al., arXiv 1912.04958) with adaptive augmentation (arXiv 2006.06676), as its authors train it.

Sizes and passes: NVlabs/stylegan2-ada-pytorch, training/networks.py, training/loss.py and train.py (`auto`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Images

_STYLE = 512
_NARROW_LEVELS = 4
"""Number of sizes, from the finest, whose layers run in 16 bits."""
_GENERATOR_PASSES = 1 + 2 / (4 * 2)
"""Forward and backward passes of the generator per step.

One is the usual pass. Every fourth step has a penalty over half the images, whose gradient is differentiated again and
takes twice as long.
"""
_DISCRIMINATOR_PASSES = 2 + 2 / 3 + 2 / 16
"""Forward and backward passes of the discriminator per step.

They are over real and over generated images, through it to the generator without gradients of its weights, and a
penalty every sixteenth step.
"""
_AUGMENTING_KERNELS = 60
"""Passes over the images that augmentation takes (training/augment.py: blits, geometry, colour)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StyleGan(Images):
    """Dimensions of StyleGAN2. Images are square, and their side is a power of two."""

    base: int = 32768
    """Channels of a layer times its side. A layer has at most `most_channels`."""
    most_channels: int = 512
    mapping_layers: int = 2
    """Number of dense layers that map random numbers to a style."""


def build_stylegan(net: NetworkBuilder, dims: StyleGan) -> None:
    """Build the generator and the discriminator, with the number of passes that each runs per training step."""
    sides = [2**power for power in range(2, dims.image.bit_length())]
    image = net.shape
    with _repeat_passes(net, _GENERATOR_PASSES):
        _add_generator(net, dims, sides)
    if net.numerics.training:
        counted = net.parameters
        with net.freeze_layers():
            _add_generator(net, dims, sides)
        net.parameters = counted
        net.shape = image
        net.add_pointwise("augment", kernels=_AUGMENTING_KERNELS, absorbed=False)
        net.has_gradient = True
        with _repeat_passes(net, _DISCRIMINATOR_PASSES):
            _add_discriminator(net, dims, sides)


@contextmanager
def _repeat_passes(net: NetworkBuilder, passes: float) -> Iterator[None]:
    """Repeat the layers added inside this context `passes` times, with the activation memory of a single pass.

    The scratch memory is that of all passes, because penalties need a second graph, the graph of their gradient.
    """
    batch, kept = net.batch, net.activation_bytes
    net.batch = batch * (passes if net.numerics.training else 1.0)
    yield
    net.activation_bytes = kept + (net.activation_bytes - kept) * batch / net.batch
    net.batch = batch


def _count_channels(dims: StyleGan, side: int) -> int:
    """Return the number of channels at images of `side` pixels."""
    return min(dims.base // side, dims.most_channels)


@contextmanager
def _set_precision_at_side(net: NetworkBuilder, dims: StyleGan, side: int) -> Iterator[None]:
    """Run the layers added inside this context in FP32, unless `side` is one of the finest sizes."""
    numerics = net.numerics
    if side < dims.image >> (_NARROW_LEVELS - 1):
        net.numerics = replace(numerics.in_fp32, matrix="fp32")
    yield
    net.numerics = numerics


def _add_generator(net: NetworkBuilder, dims: StyleGan, sides: list[int]) -> None:
    """Add the mapping network and the synthesis network, with modulated convolutions at each of `sides`."""
    net.shape = _STYLE, (1, 1, 1)
    for _ in range(dims.mapping_layers):
        net.add_dense(_STYLE)
        net.add_activation("leaky-relu")
    net.shape = _count_channels(dims, 4), (1, 4, 4)
    net.parameters += net.channels * 16
    for side in sides:
        with _set_precision_at_side(net, dims, side):
            for layer in range(1 if side == 4 else 2):
                add_modulated_conv(net, _count_channels(dims, side), doubles_side=side > 4 and layer == 0)
            entry = net.shape
            net.continue_from(entry)
            _add_style(net)
            net.is_kept = True
            net.add_conv(3, 1, bias=True)
            net.add_resize(0.25)
            net.add_branch()
            net.shape = entry


def _add_style(net: NetworkBuilder) -> None:
    """Add a dense layer from the style to one scale per channel, and scale the current tensor."""
    net.parameters += (_STYLE + 1) * net.channels
    net.keep_elements(net.elements)
    net.add_pointwise("modulate", absorbed=False, backward=(3.0, 1.0))


def add_modulated_conv(net: NetworkBuilder, out: int, *, doubles_side: bool) -> None:
    """Add a style-modulated convolution, its demodulation, noise, a bias and an activation.

    If `doubles_side`, the convolution is transposed and doubles the side, and a 4x4 filter follows.
    """
    _add_style(net)
    _, height, width = net.size
    # Demodulation scales a copy of the weight for every image, in FP32.
    net.keep_elements(net.batch * net.channels * out * 9 * 4.0 / net.numerics.element)
    if doubles_side:
        # The transposed convolution has the work of one over the smaller image.
        net.add_conv(out, 3)
        net.size = 1, 2 * height, 2 * width
        _add_filter(net)
    else:
        net.add_conv(out, 3)
    net.parameters += net.channels + 1
    net.keep_elements(net.elements)
    net.add_pointwise("demodulate", absorbed=False, backward=(3.0, 1.0))
    net.add_pointwise("bias-activation", absorbed=False, backward=(2.0, 1.0))


def _add_filter(net: NetworkBuilder) -> None:
    """Add a low-pass filter over the current tensor. Its gradient needs no tensor."""
    net.add_pointwise("filter", reads=2.0, absorbed=False, backward=(2.0, 1.0))


def _add_discriminator(net: NetworkBuilder, dims: StyleGan, sides: list[int]) -> None:
    """Add the discriminator: a residual block per size, from the finest to the coarsest, and dense layers."""
    net.shape = 3, (1, dims.image, dims.image)
    _add_activated_conv(net, _count_channels(dims, dims.image), 1)
    for side in sides[:0:-1]:
        with _set_precision_at_side(net, dims, side):
            entry, out = net.shape, _count_channels(dims, side // 2)
            net.keep_output()
            _add_filter(net)
            net.add_conv(out, 1, 2)
            net.continue_from(entry)
            _add_activated_conv(net, entry[0], 3)
            net.keep_output()
            _add_filter(net)
            _add_activated_conv(net, out, 3, 2)
            net.add_branch()
    with _set_precision_at_side(net, dims, 4):
        net.channels += 1
        _add_activated_conv(net, _count_channels(dims, 4), 3)
        net.add_dense(_count_channels(dims, 4))
        net.add_activation("leaky-relu")
        net.add_dense(1)
        net.add_training_pointwise("loss", kernels=4)


def _add_activated_conv(net: NetworkBuilder, out: int, kernel: int, stride: int = 1) -> None:
    """Add a convolution with a bias and an activation."""
    # The activation's gradient needs its output alone, which the next convolution keeps.
    net.add_conv(out, kernel, stride)
    net.parameters += out
    net.add_pointwise("bias-activation", absorbed=False, backward=(2.0, 1.0))
