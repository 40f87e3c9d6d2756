"""Rectified-flow transformers: FLUX.1, whose first layers keep image and text apart and attend over both, and whose
last layers treat them alike, with attention and MLP side by side (Esser et al., arXiv 2403.03206, section 4; sizes of
black-forest-labs/flux, src/flux/util.py).

Images become latents, and texts states, before training; the frozen networks that make them are no part of the step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.models import layers
from tilecast.models.cnn import attention
from tilecast.models.cnn.walk import Walk
from tilecast.models.layers import Numerics
from tilecast.spec import Workload

NEEDS = ("double_layers", "width", "attention_heads", "image_tokens", "text_tokens", "patch_values",
         "text_width", "pooled_width")  # fmt: skip
_TIME_WIDTH = 256


def build(workload: Workload, shards: Shards) -> Graph:
    """The graph: `double_layers` layers of two streams, `single_layers` of one, `image_tokens` patches of
    `patch_values` numbers and `text_tokens` states of `text_width`, beside a pooled state of
    `pooled_width`. Data parallel only."""
    extra = workload.model.extra
    width, text, image = int(extra["width"]), extra["text_tokens"], extra["image_tokens"]
    heads = int(extra["attention_heads"])

    def embed(walk: Walk) -> None:
        for inputs in (_TIME_WIDTH, int(extra["pooled_width"])):
            _vector(walk, inputs, width)
            _vector(walk, width, width)
        attention.linear(walk, text, int(extra["text_width"]), width)
        attention.linear(walk, image, int(extra["patch_values"]), width)

    def finish(walk: Walk) -> None:
        _vector(walk, width, 2 * width)
        _modulated(walk, image, width)
        attention.linear(walk, image, width, int(extra["patch_values"]))
        if walk.numerics.training:
            elements = walk.batch * image * extra["patch_values"]
            walk.ops += layers.pointwise("loss", walk.numerics, elements, reads=2.0, kernels=3)

    tokens = text + image
    kinds: list[tuple[str, Callable[[Walk], None]]] = [
        ("double", lambda walk: _double(walk, text, image, width, heads)),
        ("single", lambda walk: _single(walk, tokens, width, heads)),
    ]
    counted = [(name, int(extra.get(f"{name}_layers", 0)), write) for name, write in kinds]
    return Graph(
        (_block("embedding", 1, embed, workload, shards),),
        tuple(_block(f"{name}-layer", repeat, write, workload, shards) for name, repeat, write in counted if repeat),
        (_block("head", 1, finish, workload, shards),),
        np.zeros(len(shards)),
        len(shards),
        host_bytes_per_sample=2.0 * (image * extra["patch_values"] + text * extra["text_width"]),
    )  # fmt: skip


def _block(name: str, repeat: int, write: Callable[[Walk], None], workload: Workload, shards: Shards) -> Block:
    """What `write` writes, `repeat` times. Full recomputation keeps what the layer reads."""
    extra = workload.model.extra
    batch = shards.micro_batch.astype(float)
    walk = Walk(Numerics.of(workload), batch, int(extra["width"]), (1, 1, 1))
    write(walk)
    kept = walk.kept * np.ones(len(shards))
    read = batch * (extra["text_tokens"] + extra["image_tokens"]) * extra["width"] * walk.numerics.element
    return Block(
        name,
        repeat,
        tuple(walk.ops),
        np.full(len(shards), walk.parameters),
        np.stack([kept, kept, np.minimum(kept, read)]),
    )


def _vector(walk: Walk, inputs: int, outputs: int) -> None:
    """A dense layer over the vector that says time and text, behind its activation."""
    walk.ops += layers.pointwise("silu", walk.numerics, walk.batch * inputs)
    attention.linear(walk, 1.0, inputs, outputs)


def _modulated(walk: Walk, tokens: float, width: int) -> None:
    """A norm without weights, then a scale and an offset from the vector."""
    elements = walk.batch * tokens * width
    walk.keep(2 * elements)
    walk.ops += layers.norm("layer-norm", walk.numerics, walk.batch * tokens, float(width), rms=False)
    walk.ops += layers.pointwise("modulate", walk.numerics, elements, kernels=2, backward=(2.0, 1.0))


def _gated_sum(walk: Walk, tokens: float, width: int) -> None:
    elements = walk.batch * tokens * width
    walk.keep(elements)
    walk.ops += layers.pointwise("gate", walk.numerics, elements, reads=2.0, kernels=2, backward=(2.0, 1.0))


def _positions(walk: Walk, tokens: float, width: int, heads: int) -> None:
    """Queries and keys are normed by head and rotated."""
    elements = walk.batch * tokens * 2 * width
    walk.keep(2 * elements)
    walk.ops += layers.norm("query-key-norm", walk.numerics, elements * heads / width, width / heads, rms=True)
    walk.ops += layers.pointwise("rotary", walk.numerics, elements, kernels=3, backward=(1.0, 1.0))
    walk.parameters += 2 * width // heads


def _double(walk: Walk, text: float, image: float, width: int, heads: int) -> None:
    for tokens in (image, text):
        _vector(walk, width, 6 * width)
        _modulated(walk, tokens, width)
        attention.linear(walk, tokens, width, 3 * width)
        _positions(walk, tokens, width, heads)
    attention.core(walk, image + text, image + text, width, heads)
    for tokens in (image, text):
        attention.linear(walk, tokens, width, width)
        _gated_sum(walk, tokens, width)
        _modulated(walk, tokens, width)
        attention.linear(walk, tokens, width, 4 * width)
        _gelu(walk, tokens, 4 * width)
        attention.linear(walk, tokens, 4 * width, width)
        _gated_sum(walk, tokens, width)


def _single(walk: Walk, tokens: float, width: int, heads: int) -> None:
    _vector(walk, width, 3 * width)
    _modulated(walk, tokens, width)
    attention.linear(walk, tokens, width, 7 * width)
    _positions(walk, tokens, width, heads)
    attention.core(walk, tokens, tokens, width, heads)
    _gelu(walk, tokens, 4 * width)
    attention.linear(walk, tokens, 5 * width, width)
    _gated_sum(walk, tokens, width)


def _gelu(walk: Walk, tokens: float, width: int) -> None:
    elements = walk.batch * tokens * width
    walk.keep(elements)
    walk.ops += layers.pointwise("gelu", walk.numerics, elements)
