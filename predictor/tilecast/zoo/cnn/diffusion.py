"""The U-Net of latent diffusion (Rombach et al., arXiv 2112.10752, section 3.3 and table 15).

The U-Net has residual blocks that read the noise level and, at the finer sizes, transformers that attend to the pixels
and to a text. Before training, frozen networks encode images to latents and texts to states. These networks are not
part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilecast.model import Model, Problem, numbered_field
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Images


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DiffusionUnet(Images):
    """Dimensions of the U-Net of latent diffusion."""

    base: int
    """Channels at full size."""
    blocks: int
    """Residual blocks at each size on the way down."""
    levels: int = 0
    """Number of sizes. 0 for full, half, quarter and eighth size, with 1, 2, 4 and 4 times `base` channels."""
    channels: tuple[int, ...] = numbered_field("channels", default=())
    """Channels at each size."""
    attends: tuple[int, ...] = numbered_field("attends", default=())
    """Transformer layers after each block, at each size."""
    attends_middle: int = 1
    """Transformer layers in the middle."""
    attention_heads: int | None = None
    """Heads of a transformer layer. None for the number of heads of `head_width` that fit."""
    head_width: int = 64
    text_tokens: int = 0
    """States of a text that pixels attend to; 0: there is no text."""
    text_width: int = 0
    """Width of such a state."""
    added_width: int = 0
    """Width of a vector that is added to the noise level (SDXL, arXiv 2307.01952, section 2.2)."""

    def problems(self, model: Model) -> Iterator[Problem]:
        """Yield dimensions that contradict each other, each with the problem and a remedy."""
        yield from self.unmeasured("text")
        if len(self.channels) > 6:
            yield "channels", f"{len(self.channels)} sizes are more than 6", "trace it with `tilecast trace`"


def build_diffusion_unet(net: NetworkBuilder, dims: DiffusionUnet) -> None:
    """Build the U-Net: residual blocks at each size on the way down, a middle, and blocks on the way up.

    At each size, the way up has one block more than the way down.
    """
    base, blocks = dims.base, dims.blocks
    levels = _list_levels(dims)
    latents, noise = net.shape, 4 * base
    net.keep_elements(net.batch * dims.text_tokens * dims.text_width)
    net.shape = base, (1, 1, 1)
    for inputs in (base, dims.added_width):
        if inputs:
            net.shape = inputs, (1, 1, 1)
            net.add_dense(noise)
            net.add_activation("silu")
            net.add_dense(noise)
    net.shape = latents
    net.add_conv(base, 3, bias=True)
    skips = [net.shape]
    last = len(levels) - 1
    for level, (width, attends) in enumerate(levels):
        for _ in range(blocks):
            _add_stage(net, dims, width, noise, attends)
            skips.append(net.shape)
        if level < last:
            net.add_conv(width, 3, 2, bias=True)
            skips.append(net.shape)
    _add_residual_block(net, levels[-1][0], noise)
    _add_transformer(net, dims, dims.attends_middle)
    _add_residual_block(net, levels[-1][0], noise)
    for level, (width, attends) in reversed(list(enumerate(levels))):
        for _ in range(blocks + 1):
            channels, net.size = skips.pop()
            net.add_concatenation(net.channels + channels)
            _add_stage(net, dims, width, noise, attends)
        if level:
            net.add_upsample()
            net.add_conv(net.channels, 3, bias=True)
    net.add_channel_norm()
    net.add_activation("silu")
    net.add_conv(latents[0], 3, bias=True)
    net.add_training_pointwise("loss", reads=2.0, kernels=3)


def _list_levels(dims: DiffusionUnet) -> list[tuple[int, int]]:
    """Return one pair per image size: its channels, and the transformer layers after each of its blocks."""
    base = dims.base
    if not dims.levels:
        return [(base, 1), (2 * base, 1), (4 * base, 1), (4 * base, 0)]
    attends = (*dims.attends, *(0 for _ in dims.channels))
    return list(zip(dims.channels, attends, strict=False))


def _add_stage(net: NetworkBuilder, dims: DiffusionUnet, width: int, noise: int, attends: int) -> None:
    """Add a residual block and, if `attends` is positive, that number of transformer layers."""
    _add_residual_block(net, width, noise)
    if attends:
        _add_transformer(net, dims, attends)


def _add_residual_block(net: NetworkBuilder, out: int, noise: int) -> None:
    """Add a residual block of two convolutions. Between them, the noise embedding is added to every pixel."""
    entry = net.shape
    for place in range(2):
        net.add_channel_norm()
        net.add_activation("silu")
        net.add_conv(out, 3, bias=True)
        if place == 0:
            inner = net.shape
            net.shape = noise, (1, 1, 1)
            net.add_activation("silu")
            net.add_dense(out)
            net.shape = inner
            net.add_branch()
    if net.shape != entry:
        leave = net.shape
        net.continue_from(entry)
        net.add_conv(out, 1, bias=True)
        net.shape = leave
    net.add_branch()


def _add_transformer(net: NetworkBuilder, dims: DiffusionUnet, depth: int) -> None:
    """Add `depth` transformer layers over all pixels.

    Each layer has self-attention, cross-attention to the text, and a gated MLP of four times the width. A model without
    text has a single self-attention instead.
    """
    width, (_, height, across) = net.shape
    pixels = float(height * across)
    heads = dims.attention_heads if dims.attention_heads else width // dims.head_width
    net.add_channel_norm()
    if not dims.text_tokens:
        attention.add_multi_head_attention(net, pixels, pixels, width, max(1, heads))
        return
    attention.add_dense(net, pixels, width, width)
    text = {"keys": dims.text_tokens, "key_width": dims.text_width}
    for _ in range(depth):
        for seen in ({"keys": pixels}, text):
            attention.add_layer_norm(net, pixels, width)
            attention.add_multi_head_attention(net, pixels, width=width, heads=heads, bias=False, **seen)
        attention.add_layer_norm(net, pixels, width)
        attention.add_feed_forward(net, pixels, width, 4 * width, gated=True)
    attention.add_dense(net, pixels, width, width)
    net.add_branch()
