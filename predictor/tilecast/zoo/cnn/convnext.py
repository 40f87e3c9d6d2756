"""ConvNeXt, versions 1 and 2: depthwise convolutions of 7 x 7 and dense layers over each pixel.

Sources: Liu et al., arXiv 2201.03545, section 2; Woo et al., arXiv 2301.00808, section 3.2, for version 2, which
normalises each channel's response over the image.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.zoo import layers
from tilecast.zoo.cnn.walk import Walk

NEEDS = tuple(f"{name}{number}" for name in ("stage", "width") for number in range(1, 5))


def convnext(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write a classifier of four stages of `stage1` ... `stage4` blocks, `width1` ... `width4` wide.

    A stem cuts the image into patches of `patch` (4) pixels a side. `response_norm` selects version 2.
    """
    walk.conv(int(extra["width1"]), int(extra.get("patch", 4)), int(extra.get("patch", 4)), bias=True)
    _norm(walk)
    for number in range(1, 5):
        if number > 1:
            _norm(walk)
            walk.conv(int(extra[f"width{number}"]), 2, 2, bias=True)
        for _ in range(int(extra[f"stage{number}"])):
            _block(walk, bool(extra.get("response_norm")))
    walk.mean()
    _norm(walk)
    walk.dense(int(extra.get("classes", 1000)))
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
