"""The U-Net of latent diffusion (Rombach et al., arXiv 2112.10752, section 3.3 and table 15).

It has residual blocks that read the noise level and, at the finer sizes, transformers that attend to the pixels and to
a text. Frozen networks encode images to latents and texts to states before training; they are not part of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.zoo import layers
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.walk import Walk


def diffusion_unet(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write the U-Net with `blocks` residual blocks at each size on the way down, and one more on the way up.

    By default there are `base` channels, times 1, 2, 4 and 4 at full, half, quarter and eighth size, and transformers
    at all sizes but the last. Other networks have `levels` sizes of `channels1` ... channels, with `attends1` ...
    transformer layers behind each block, and `attends_middle` in the middle. A vector of `added_width` joins the noise
    level (SDXL, arXiv 2307.01952, section 2.2).
    """
    base, blocks = int(extra["base"]), int(extra["blocks"])
    levels = _levels(extra)
    latents, noise = walk.shape, 4 * base
    walk.keep(walk.batch * extra.get("text_tokens", 0.0) * extra.get("text_width", 0.0))
    walk.shape = base, (1, 1, 1)
    for inputs in (base, int(extra.get("added_width", 0))):
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
            _stage(walk, extra, width, noise, attends)
            skips.append(walk.shape)
        if level < last:
            walk.conv(width, 3, 2, bias=True)
            skips.append(walk.shape)
    _residual(walk, levels[-1][0], noise)
    _transform(walk, extra, int(extra.get("attends_middle", 1)))
    _residual(walk, levels[-1][0], noise)
    for level, (width, attends) in reversed(list(enumerate(levels))):
        for _ in range(blocks + 1):
            channels, walk.size = skips.pop()
            walk.concatenate(walk.channels + channels)
            _stage(walk, extra, width, noise, attends)
        if level:
            walk.upsample()
            walk.conv(walk.channels, 3, bias=True)
    walk.norm()
    walk.activate("silu")
    walk.conv(latents[0], 3, bias=True)
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, walk.elements, reads=2.0, kernels=3)


def _levels(extra: Mapping[str, float]) -> list[tuple[int, int]]:
    """Return for every size its channels, and the number of transformer layers behind each block."""
    base = int(extra["base"])
    if "levels" not in extra:
        return [(base, 1), (2 * base, 1), (4 * base, 1), (4 * base, 0)]
    numbers = range(1, int(extra["levels"]) + 1)
    return [(int(extra[f"channels{number}"]), int(extra.get(f"attends{number}", 0))) for number in numbers]


def _stage(walk: Walk, extra: Mapping[str, float], width: int, noise: int, attends: int) -> None:
    _residual(walk, width, noise)
    if attends:
        _transform(walk, extra, attends)


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


def _transform(walk: Walk, extra: Mapping[str, float], depth: int) -> None:
    """Write `depth` transformer layers over all pixels.

    Each layer has self-attention, cross-attention to the text, and a gated MLP of four times the width. Without a text
    there is only one self-attention.
    """
    width, (_, height, across) = walk.shape
    pixels = float(height * across)
    heads = int(extra["attention_heads"]) if "attention_heads" in extra else width // int(extra.get("head_width", 64))
    walk.norm()
    if not extra.get("text_tokens"):
        attention.attend(walk, pixels, pixels, width, max(1, heads))
        return
    attention.linear(walk, pixels, width, width)
    text = {"keys": extra["text_tokens"], "key_width": int(extra["text_width"])}
    for _ in range(depth):
        for seen in ({"keys": pixels}, text):
            attention.norm(walk, pixels, width)
            attention.attend(walk, pixels, width=width, heads=heads, bias=False, **seen)  # type: ignore[arg-type]
        attention.norm(walk, pixels, width)
        attention.feed_forward(walk, pixels, width, 4 * width, gated=True)
    attention.linear(walk, pixels, width, width)
    walk.add()
