"""WaveGlow: invertible flows over audio, each around a stack of dilated convolutions.

Source: Prenger et al., arXiv 1811.00002, section 2. Audio is a flat image of height 1. Dilation changes no dimension of
a kernel, so it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo import layers
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.walk import Walk

_MELS, _HOP, _WINDOW = 80, 256, 1024
"""Number of bands of the mel spectrogram, and its hop and window in samples."""
_GROUP, _FLOWS, _EARLY_EVERY, _EARLY = 8, 12, 4, 2
"""Samples per vector; number of flows; flows between two early outputs; channels that leave at each early output."""
_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WaveGlow(Images):
    """Dimensions of WaveGlow; the width of its image is the number of samples of sound."""

    channels: int
    """Channels of a residual stack."""


def waveglow(walk: Walk, dims: WaveGlow) -> None:
    """Write twelve flows over segments of `image_width` samples, with `channels` in their residual stacks."""
    width, samples = dims.channels, walk.size[2]
    walk.shape = _MELS, (1, 1, -(-samples // _HOP))
    walk.conv(_MELS * _WINDOW, 1)
    vectors = (1, 1, samples // _GROUP)
    spectrum = _MELS * _GROUP, vectors
    channels = _GROUP
    for flow in range(_FLOWS):
        if flow and flow % _EARLY_EVERY == 0:
            channels -= _EARLY
        walk.shape = channels, vectors
        walk.conv(channels, 1)
        walk.shape = spectrum
        walk.conv(2 * width * _LAYERS, 1, bias=True)
        walk.shape = channels // 2, vectors
        walk.conv(width, 1, bias=True)
        for layer in range(_LAYERS):
            _residual(walk, width, last=layer == _LAYERS - 1)
        walk.conv(channels, 1, bias=True)
        walk.channels = channels // 2
        walk.ops += layers.pointwise("couple", walk.numerics, walk.elements, reads=3.0, backward=(3.0, 3.0))


def _residual(walk: Walk, width: int, *, last: bool) -> None:
    walk.conv(2 * width, (1, 3), bias=True)
    walk.keep(walk.elements)
    walk.channels = width
    walk.ops += layers.pointwise("gate", walk.numerics, walk.elements, reads=4.0, absorbed=False, backward=(5.0, 2.0))
    walk.conv(width if last else 2 * width, 1, bias=True)
    walk.channels = width
    for _ in range(1 if last else 2):
        walk.add()
