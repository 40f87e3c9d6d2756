"""Vocoders, which turn a spectrum into sound: HiFi-GAN and WaveGlow.

Sources: Kong et al., arXiv 2010.05646, section 2 and appendix A, version 1; Prenger et al., arXiv 1811.00002, section
2. Sound is stored as an image of height 1. Dilation changes no dimension of a kernel, so it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Images

_STAGES = ((8, 16), (8, 16), (2, 4), (2, 4))
"""Stride and kernel of each transposed convolution. Each halves the channels."""
_KERNELS = (3, 7, 11)
_PERIODS = (2, 3, 5, 7, 11)
_SCALES = ((128, 15, 1, 1), (128, 41, 2, 4), (256, 41, 2, 16), (512, 41, 4, 16), (1024, 41, 4, 16), (1024, 41, 1, 16),
           (1024, 5, 1, 1))  # fmt: skip
"""Channels, kernel, stride and groups of each convolution of a discriminator of sound at one scale."""
_PASSES = 4
"""Passes of the discriminators per step.

They read real and generated sound, once to train the discriminators and once to train the generator.
"""

_MELS, _HOP, _WINDOW = 80, 256, 1024
"""Number of bands of the mel spectrogram, and its hop and window in samples."""
_GROUP, _FLOWS, _EARLY_EVERY, _EARLY = 8, 12, 4, 2
"""Samples per vector, number of flows, flows between two early outputs, and channels per early output."""
_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class HifiGan(Images):
    """Dimensions of HiFi-GAN."""

    base: int
    """Channels of the first convolution."""


def build_hifigan(net: NetworkBuilder, dims: HifiGan) -> None:
    """Build a generator that makes 256 sound samples of each spectrum frame. In training, add the discriminators."""
    net.add_conv(dims.base, (1, 7), bias=True)
    for stride, kernel in _STAGES:
        net.add_activation("leaky-relu")
        _add_transposed_conv(net, net.channels // 2, kernel, stride)
        entry = net.shape
        for width in _KERNELS:
            net.continue_from(entry)
            for _ in range(3):
                for _ in range(2):
                    net.add_activation("leaky-relu")
                    net.add_conv(net.channels, (1, width), bias=True)
                net.add_branch()
            net.add_branch()
    net.add_activation("leaky-relu")
    net.add_conv(1, (1, 7), bias=True)
    net.add_activation("tanh")
    if net.numerics.training:
        samples, batch = net.size[2], net.batch
        net.batch = batch * _PASSES
        _add_discriminators(net, samples)
        net.batch = batch


def _add_transposed_conv(net: NetworkBuilder, out: int, kernel: int, stride: int) -> None:
    """Add a transposed convolution: each column becomes `kernel` columns, which are summed at distance `stride`."""
    columns = net.size[2]
    net.add_conv(out * kernel, 1)
    net.shape = out, (1, 1, columns * stride)
    net.parameters += out


def _add_discriminators(net: NetworkBuilder, samples: int) -> None:
    """Add the multi-period discriminators, and the discriminators at full, half and quarter sampling rate.

    A feature loss follows each of their convolutions except the last.
    """
    for period in _PERIODS:
        net.shape = 1, (1, -(-samples // period), period)
        for out, stride in ((32, 3), (128, 3), (512, 3), (1024, 3), (1024, 1)):
            net.add_conv(out, (5, 1), (stride, 1), bias=True)
            _add_feature_loss(net)
        net.add_conv(1, (3, 1), bias=True)
    for scale in range(3):
        net.shape = 1, (1, 1, samples // 2**scale)
        for out, kernel, stride, groups in _SCALES:
            net.add_conv(out, (1, kernel), stride, groups=groups, bias=True)
            _add_feature_loss(net)
        net.add_conv(1, (1, 3), bias=True)


def _add_feature_loss(net: NetworkBuilder) -> None:
    """Add an activation and the loss that compares it between real and generated sound."""
    net.add_activation("leaky-relu")
    net.add_pointwise("feature-loss", kernels=2, absorbed=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WaveGlow(Images):
    """Dimensions of WaveGlow. The width of its image is the number of audio samples."""

    channels: int
    """Channels of a residual stack."""


def build_waveglow(net: NetworkBuilder, dims: WaveGlow) -> None:
    """Build WaveGlow: twelve flow steps over a sound, each with a residual stack of convolutions."""
    width, samples = dims.channels, net.size[2]
    net.shape = _MELS, (1, 1, -(-samples // _HOP))
    net.add_conv(_MELS * _WINDOW, 1)
    vectors = (1, 1, samples // _GROUP)
    spectrum = _MELS * _GROUP, vectors
    channels = _GROUP
    for flow in range(_FLOWS):
        if flow and flow % _EARLY_EVERY == 0:
            channels -= _EARLY
        net.shape = channels, vectors
        net.add_conv(channels, 1)
        net.shape = spectrum
        net.add_conv(2 * width * _LAYERS, 1, bias=True)
        net.shape = channels // 2, vectors
        net.add_conv(width, 1, bias=True)
        for layer in range(_LAYERS):
            _add_flow_layer(net, width, last=layer == _LAYERS - 1)
        net.add_conv(channels, 1, bias=True)
        net.channels = channels // 2
        net.add_pointwise("couple", reads=3.0, backward=(3.0, 3.0))


def _add_flow_layer(net: NetworkBuilder, width: int, *, last: bool) -> None:
    """Add one layer of a flow's residual stack. The `last` layer has only a skip output."""
    net.add_conv(2 * width, (1, 3), bias=True)
    net.keep_elements(net.elements)
    net.channels = width
    net.add_pointwise("gate", reads=4.0, absorbed=False, backward=(5.0, 2.0))
    net.add_conv(width if last else 2 * width, 1, bias=True)
    net.channels = width
    for _ in range(1 if last else 2):
        net.add_branch()
