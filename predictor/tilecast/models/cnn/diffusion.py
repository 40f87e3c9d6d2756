"""The U-Net of latent diffusion: residual blocks that know the noise level, and at the finer sizes transformers that
see the pixels and a text (Rombach et al., arXiv 2112.10752, section 3.3 and table 15).

Images become latents, and texts states, before training; the frozen networks that make them are no part of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.models import layers
from tilecast.models.cnn import attention
from tilecast.models.cnn.walk import Walk


def diffusion_unet(walk: Walk, extra: Mapping[str, float]) -> None:
    """`base` channels, times 1, 2, 4 and 4 at full, half, quarter and eighth size, `blocks` residual blocks at each on
    the way down and one more on the way up; transformers at all sizes but the last."""
    base, blocks = int(extra["base"]), int(extra["blocks"])
    widths = [base, 2 * base, 4 * base, 4 * base]
    latents, noise = walk.shape, 4 * base
    walk.shape = base, (1, 1, 1)
    walk.dense(noise)
    walk.activate("silu")
    walk.dense(noise)
    walk.shape = latents
    walk.conv(base, 3, bias=True)
    skips = [walk.shape]
    for level, width in enumerate(widths):
        for _ in range(blocks):
            _stage(walk, extra, width, noise, attends=level < 3)
            skips.append(walk.shape)
        if level < 3:
            walk.conv(width, 3, 2, bias=True)
            skips.append(walk.shape)
    _residual(walk, widths[-1], noise)
    _transform(walk, extra)
    _residual(walk, widths[-1], noise)
    for level in (3, 2, 1, 0):
        for _ in range(blocks + 1):
            walk.concatenate(walk.channels + skips.pop()[0])
            _stage(walk, extra, widths[level], noise, attends=level < 3)
        if level:
            walk.upsample()
            walk.conv(walk.channels, 3, bias=True)
    walk.norm()
    walk.activate("silu")
    walk.conv(latents[0], 3, bias=True)
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, walk.elements, reads=2.0, kernels=3)


def _stage(walk: Walk, extra: Mapping[str, float], width: int, noise: int, *, attends: bool) -> None:
    _residual(walk, width, noise)
    if attends:
        _transform(walk, extra)


def _residual(walk: Walk, out: int, noise: int) -> None:
    """Two convolutions behind norms; between them the noise level, projected, is added to every pixel."""
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


def _transform(walk: Walk, extra: Mapping[str, float]) -> None:
    """A transformer layer over all pixels: attention to each other and to the text, and a gated MLP of four times the
    width."""
    width, (_, height, across) = walk.shape
    pixels = float(height * across)
    heads = int(extra["attention_heads"]) if "attention_heads" in extra else width // int(extra.get("head_width", 64))
    walk.norm()
    attention.linear(walk, pixels, width, width)
    text = {"keys": extra["text_tokens"], "key_width": int(extra["text_width"])}
    for seen in ({"keys": pixels}, text):
        attention.norm(walk, pixels, width)
        attention.attend(walk, pixels, width=width, heads=heads, bias=False, **seen)  # type: ignore[arg-type]
    attention.norm(walk, pixels, width)
    attention.feed_forward(walk, pixels, width, 4 * width, gated=True)
    attention.linear(walk, pixels, width, width)
    walk.add()
