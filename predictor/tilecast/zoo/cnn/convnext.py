"""ConvNeXt, versions 1 and 2: depthwise convolutions of 7 x 7 and dense layers over each pixel.

Sources: Liu et al., arXiv 2201.03545, section 2; Woo et al., arXiv 2301.00808, section 3.2, for version 2, which
normalises each channel's response over the image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilecast.model import Model, Problem, numbered
from tilecast.zoo import layers
from tilecast.zoo.cnn.images import Classifier
from tilecast.zoo.cnn.walk import Walk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ConvNext(Classifier):
    """Dimensions of ConvNeXt."""

    stages: tuple[int, int, int, int] = numbered("stage")
    """Blocks of each stage."""
    widths: tuple[int, int, int, int] = numbered("width")
    """Channels of each stage."""
    patch: int = 4
    """Side of a patch that the stem cuts, in pixels."""
    response_norm: bool = False
    """Whether each channel's response is normed, which makes it version 2."""

    def problems(self, model: Model) -> Iterator[Problem]:
        """Yield the dimensions that contradict others of the model."""
        if self.patch < 1:
            yield "patch", f"must be positive, got {self.patch}", "state one or more, or leave it out"


def convnext(walk: Walk, dims: ConvNext) -> None:
    """Write a classifier of four stages, behind a stem that cuts the image into patches."""
    walk.conv(dims.widths[0], dims.patch, dims.patch, bias=True)
    _norm(walk)
    for number in range(1, 5):
        if number > 1:
            _norm(walk)
            walk.conv(dims.widths[number - 1], 2, 2, bias=True)
        for _ in range(dims.stages[number - 1]):
            _block(walk, dims.response_norm)
    walk.mean()
    _norm(walk)
    walk.dense(dims.classes)
    walk.loss()


def _block(walk: Walk, responds: bool) -> None:
    width = walk.channels
    walk.conv(width, 7, groups=width, bias=True)
    _norm(walk)
    walk.conv(4 * width, 1, bias=True)
    walk.activate("gelu")
    if responds:
        walk.keep(walk.elements)
        walk.ops += layers.pointwise("response-norm", walk.numerics, walk.elements, reads=2.0, kernels=3)
        walk.parameters += 2 * walk.channels
    walk.conv(width, 1, bias=True)
    if not responds:
        walk.scale()
        walk.parameters += width
    walk.add()


def _norm(walk: Walk) -> None:
    """Write a layer norm over the channels of each pixel."""
    walk.keep(walk.elements)
    rows = walk.elements / walk.channels
    walk.ops += layers.norm("layer-norm", walk.numerics, rows, float(walk.channels), rms=False)
    walk.parameters += 2 * walk.channels
