"""SegFormer: four stages of attention with fewer keys than queries, and a decoder of dense layers over all four.

Source: Xie et al., arXiv 2105.15203, sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.walk import Walk

_STEMS = ((7, 4), (3, 2), (3, 2), (3, 2))
"""Kernel and stride of the overlapping patches of each stage."""
NEEDS = (
    *(f"{name}{number}" for name in ("stage", "width", "heads", "reduction") for number in range(1, 5)), "decoder",
)  # fmt: skip


def segformer(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write stages of `stage1` ... layers, `width1` ... wide with `heads1` ... heads, and the decoder.

    The keys and values of a stage come from an image that is smaller by `reduction1` ... a side. The decoder is
    `decoder` wide and predicts one of `classes` (150) per pixel at a quarter of the image's side.
    """
    reached = []
    for number, (kernel, stride) in enumerate(_STEMS, start=1):
        walk.conv(int(extra[f"width{number}"]), kernel, stride, bias=True)
        _norm(walk)
        for _ in range(int(extra[f"stage{number}"])):
            _layer(walk, int(extra[f"heads{number}"]), int(extra[f"reduction{number}"]), int(extra.get("ratio", 4)))
        _norm(walk)
        reached.append(walk.shape)
    width, finest = int(extra["decoder"]), reached[0][1]
    for channels, size in reached:
        walk.again((channels, size))
        walk.conv(width, 1, bias=True)
        walk.size = finest
        walk.resize(float(size[1] * size[2]) / (finest[1] * finest[2]))
    walk.concatenate(4 * width)
    walk.unit(width, 1)
    walk.dropout()
    walk.conv(int(extra.get("classes", 150)), 1, bias=True)
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
