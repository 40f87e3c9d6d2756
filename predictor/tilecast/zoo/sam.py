"""Segment Anything (Kirillov et al., arXiv 2304.02643, appendix A).

The model is a vision transformer with a small mask decoder. Most layers of the transformer attend inside windows (Li et
al., arXiv 2203.16527).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilecast.graph import Block, Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import transformer, vision
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import build_uniform_block

_WIDTH, _HEADS, _INNER, _DEPTH = 256, 8, 2048, 2
"""Width, heads, width of the MLP, and layers of the decoder in every published size."""
_PROMPTS = 7.0
"""Tokens of the decoder: one for the mask's quality, four for masks, two for the prompt (a point and padding)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SegmentAnything(vision.Vision):
    """Dimensions of Segment Anything."""

    window: int
    """Side of the windows that layers see, in patches."""
    global_layers: int = 4
    """Layers that see the whole image."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of Segment Anything: a vision transformer and a decoder of masks.

    Some layers attend to the whole image. The other layers attend inside windows, and the image is padded to whole
    windows.
    """
    model, dims = (
        replace(workload.model.with_dimensions(class_tokens=0), causal=False),
        workload.model.get_dimensions(SegmentAnything),
    )
    side, window = dims.grid[0], dims.window
    workload = replace(workload, model=model)
    whole = replace(workload, sequence_length=side * side)
    inside = replace(workload, sequence_length=window * window)
    windows = replace(shards, micro_batch=shards.micro_batch * (-(-side // window)) ** 2)
    seeing = min(dims.global_layers, model.layers)
    blocks = []
    for name, part, shares, repeat in (
        ("window-layer", inside, windows, model.layers - seeing),
        ("global-layer", whole, shards, seeing),
    ):
        if repeat:
            one = replace(part, model=replace(model, layers=repeat), attention="eager")
            blocks += [replace(block, name=name, positions=()) for block in transformer.build(one, shares).layers]
    graph = transformer.build(whole, shards)
    return replace(
        graph,
        first=(vision.build_patches(whole, shards, learned=side * side * model.hidden),),
        layers=tuple(blocks),
        last=(_build_decoder(workload, shards, side),),
        host_bytes_per_sample=3.0 * dims.image**2,
    )


def _build_decoder(workload: Workload, shards: Shards, side: int) -> Block:
    """Return the block of two convolutions and the decoder, in which prompts and pixels attend to each other.

    The grid of patches has `side` rows and columns. Masks have four times as many.
    """
    batch = shards.micro_batch.astype(float)
    net = NetworkBuilder(Numerics.from_workload(workload), batch, workload.model.hidden, (1, side, side))
    net.has_gradient = True
    for kernel in (1, 3):
        net.add_conv(_WIDTH, kernel)
        net.add_channel_norm()
    pixels = float(side * side)
    for _ in range(_DEPTH):
        attention.add_multi_head_attention(net, _PROMPTS, _PROMPTS, _WIDTH, _HEADS)
        attention.add_layer_norm(net, _PROMPTS, _WIDTH)
        _add_attention(net, _PROMPTS, pixels)
        attention.add_feed_forward(net, _PROMPTS, _WIDTH, _INNER)
        attention.add_layer_norm(net, _PROMPTS, _WIDTH)
        _add_attention(net, pixels, _PROMPTS)
    _add_attention(net, _PROMPTS, pixels)
    for channels in (_WIDTH // 4, _WIDTH // 8):
        net.add_up_conv(channels)
        net.add_activation("gelu")
    for outputs in (_WIDTH // 8,) * 4 + (4,):
        for width in (_WIDTH, _WIDTH, outputs):
            attention.add_dense(net, 1.0, _WIDTH, width)
    net.add_batched_matmul(4.0, 16.0 * pixels, float(_WIDTH // 8))
    net.add_training_pointwise("loss", net.batch * 64.0 * pixels, reads=2.0, kernels=4)
    return build_uniform_block("mask-decoder", len(shards), net.ops, net.parameters, net.activation_bytes)


def _add_attention(net: NetworkBuilder, queries: float, keys: float) -> None:
    """Add attention at half the width, the residual sum and a norm."""
    half = _WIDTH // 2
    attention.add_dense(net, queries, _WIDTH, half)
    for _ in ("key", "value"):
        attention.add_dense(net, keys, _WIDTH, half)
    attention.add_dot_product_attention(net, queries, keys, half, _HEADS)
    attention.add_dense(net, queries, half, _WIDTH)
    attention.add_residual(net, queries, _WIDTH)
    attention.add_layer_norm(net, queries, _WIDTH)
