"""SegFormer: four stages of attention with fewer keys than queries, and a decoder of dense layers over all four.

Source: Xie et al., arXiv 2105.15203, sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilecast.model import Model, Problem, numbered
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.walk import Walk

_STEMS = ((7, 4), (3, 2), (3, 2), (3, 2))
"""Kernel and stride of the overlapping patches of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Segformer(Images):
    """Dimensions of SegFormer."""

    stages: tuple[int, int, int, int] = numbered("stage")
    """Layers of each stage."""
    widths: tuple[int, int, int, int] = numbered("width")
    """Channels of each stage."""
    heads: tuple[int, int, int, int] = numbered("heads")
    """Heads of a layer of each stage."""
    reductions: tuple[int, int, int, int] = numbered("reduction")
    """Factor by which the image that keys and values come from is smaller a side, in each stage."""
    decoder: int
    """Channels of the decoder."""
    ratio: int = 4
    """Width of the MLP of a layer, over that of the layer."""

    def problems(self, model: Model) -> Iterator[Problem]:
        """Yield the dimensions that contradict others of the model."""
        if self.ratio < 1:
            yield "ratio", f"must be positive, got {self.ratio}", "state one or more, or leave it out"

    classes: int = 150
    """Categories of a pixel."""


def segformer(walk: Walk, dims: Segformer) -> None:
    """Write four stages, and the decoder, which predicts a category per pixel at a quarter of the image's side."""
    reached = []
    for number, (kernel, stride) in enumerate(_STEMS, start=1):
        walk.conv(dims.widths[number - 1], kernel, stride, bias=True)
        _norm(walk)
        for _ in range(dims.stages[number - 1]):
            _layer(walk, dims.heads[number - 1], dims.reductions[number - 1], dims.ratio)
        _norm(walk)
        reached.append(walk.shape)
    width, finest = dims.decoder, reached[0][1]
    for channels, size in reached:
        walk.again((channels, size))
        walk.conv(width, 1, bias=True)
        walk.size = finest
        walk.resize(float(size[1] * size[2]) / (finest[1] * finest[2]))
    walk.concatenate(4 * width)
    walk.unit(width, 1)
    walk.dropout()
    walk.conv(dims.classes, 1, bias=True)
    walk.loss()


def _layer(walk: Walk, heads: int, reduction: int, ratio: int) -> None:
    width, size = walk.shape
    pixels = float(size[1] * size[2])
    _norm(walk)
    attention.linear(walk, pixels, width, width)
    if reduction > 1:
        walk.again((width, size))
        walk.conv(width, reduction, reduction, bias=True)
        _norm(walk)
    keys = float(walk.size[1] * walk.size[2])
    walk.shape = width, size
    for _ in ("key", "value"):
        attention.linear(walk, keys, width, width)
    attention.core(walk, pixels, keys, width, heads)
    attention.linear(walk, pixels, width, width)
    walk.add()
    _norm(walk)
    walk.conv(ratio * width, 1, bias=True)
    walk.conv(ratio * width, 3, groups=ratio * width, bias=True)
    walk.activate("gelu")
    walk.conv(width, 1, bias=True)
    walk.add()


def _norm(walk: Walk) -> None:
    attention.norm(walk, float(walk.size[1] * walk.size[2]), walk.channels)
