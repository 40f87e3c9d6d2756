"""The U-Net of latent diffusion (Rombach et al., arXiv 2112.10752, section 3.3 and table 15).

It has residual blocks that read the noise level and, at the finer sizes, transformers that attend to the pixels and to
a text. Frozen networks encode images to latents and texts to states before training; they are not part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilecast.model import Model, Problem, numbered
from tilecast.zoo import layers
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.walk import Walk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DiffusionUnet(Images):
    """Dimensions of the U-Net of latent diffusion."""

    base: int
    """Channels at full size."""
    blocks: int
    """Residual blocks at each size on the way down."""
    levels: int = 0
    """Sizes; 0: full, half, quarter and eighth, with 1, 2, 4 and 4 times `base` channels."""
    channels: tuple[int, ...] = numbered("channels", default=())
    """Channels at each size."""
    attends: tuple[int, ...] = numbered("attends", default=())
    """Transformer layers behind each block, at each size."""
    attends_middle: int = 1
    """Transformer layers in the middle."""
    attention_heads: int | None = None
    """Heads of a transformer layer; None: as many as heads of `head_width` there is room for."""
    head_width: int = 64
    """Width of a head."""
    text_tokens: int = 0
    """States of a text that pixels attend to; 0: there is no text."""
    text_width: int = 0
    """Width of such a state."""
    added_width: int = 0
    """Width of a vector that joins the noise level (SDXL, arXiv 2307.01952, section 2.2)."""

    def problems(self, model: Model) -> Iterator[Problem]:
        """Yield the dimensions that contradict others of the model."""
        yield from self.unmeasured("text")
        if len(self.channels) > 6:
            yield "channels", f"{len(self.channels)} sizes are more than 6", "trace it with `tilecast trace`"


def diffusion_unet(walk: Walk, dims: DiffusionUnet) -> None:
    """Write the U-Net with `blocks` residual blocks at each size on the way down, and one more on the way up."""
    base, blocks = dims.base, dims.blocks
    levels = _levels(dims)
    latents, noise = walk.shape, 4 * base
    walk.keep(walk.batch * dims.text_tokens * dims.text_width)
    walk.shape = base, (1, 1, 1)
    for inputs in (base, dims.added_width):
        if inputs:
            walk.shape = inputs, (1, 1, 1)
            walk.dense(noise)
            walk.activate("silu")
            walk.dense(noise)
    walk.shape = latents
    walk.conv(base, 3, bias=True)
    skips = [walk.shape]
    last = len(levels) - 1
    for level, (width, attends) in enumerate(levels):
        for _ in range(blocks):
            _stage(walk, dims, width, noise, attends)
            skips.append(walk.shape)
        if level < last:
            walk.conv(width, 3, 2, bias=True)
            skips.append(walk.shape)
    _residual(walk, levels[-1][0], noise)
    _transform(walk, dims, dims.attends_middle)
    _residual(walk, levels[-1][0], noise)
    for level, (width, attends) in reversed(list(enumerate(levels))):
        for _ in range(blocks + 1):
            channels, walk.size = skips.pop()
            walk.concatenate(walk.channels + channels)
            _stage(walk, dims, width, noise, attends)
        if level:
            walk.upsample()
            walk.conv(walk.channels, 3, bias=True)
    walk.norm()
    walk.activate("silu")
    walk.conv(latents[0], 3, bias=True)
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, walk.elements, reads=2.0, kernels=3)


def _levels(dims: DiffusionUnet) -> list[tuple[int, int]]:
    """Return for every size its channels, and the number of transformer layers behind each block."""
    base = dims.base
    if not dims.levels:
        return [(base, 1), (2 * base, 1), (4 * base, 1), (4 * base, 0)]
    attends = (*dims.attends, *(0 for _ in dims.channels))
    return list(zip(dims.channels, attends, strict=False))


def _stage(walk: Walk, dims: DiffusionUnet, width: int, noise: int, attends: int) -> None:
    _residual(walk, width, noise)
    if attends:
        _transform(walk, dims, attends)


def _residual(walk: Walk, out: int, noise: int) -> None:
    """Write two convolutions behind norms; between them the projected noise level is added to every pixel."""
    entry = walk.shape
    for place in range(2):
        walk.norm()
        walk.activate("silu")
        walk.conv(out, 3, bias=True)
        if place == 0:
            inner = walk.shape
            walk.shape = noise, (1, 1, 1)
            walk.activate("silu")
            walk.dense(out)
            walk.shape = inner
            walk.add()
    if walk.shape != entry:
        leave = walk.shape
        walk.again(entry)
        walk.conv(out, 1, bias=True)
        walk.shape = leave
    walk.add()


def _transform(walk: Walk, dims: DiffusionUnet, depth: int) -> None:
    """Write `depth` transformer layers over all pixels.

    Each layer has self-attention, cross-attention to the text, and a gated MLP of four times the width. Without a text
    there is only one self-attention.
    """
    width, (_, height, across) = walk.shape
    pixels = float(height * across)
    heads = dims.attention_heads if dims.attention_heads else width // dims.head_width
    walk.norm()
    if not dims.text_tokens:
        attention.attend(walk, pixels, pixels, width, max(1, heads))
        return
    attention.linear(walk, pixels, width, width)
    text = {"keys": dims.text_tokens, "key_width": dims.text_width}
    for _ in range(depth):
        for seen in ({"keys": pixels}, text):
            attention.norm(walk, pixels, width)
            attention.attend(walk, pixels, width=width, heads=heads, bias=False, **seen)
        attention.norm(walk, pixels, width)
        attention.feed_forward(walk, pixels, width, 4 * width, gated=True)
    attention.linear(walk, pixels, width, width)
    walk.add()
