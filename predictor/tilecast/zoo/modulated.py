"""Parts of diffusion transformers: norms and sums that a vector of time and text modulates.

Peebles and Xie, arXiv 2212.09748, section 3.2; Esser et al., arXiv 2403.03206, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilecast.graph import Block, Shards
from tilecast.model import Dimensions
from tilecast.spec import Workload
from tilecast.zoo import layers
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.walk import Walk
from tilecast.zoo.numerics import Numerics

TIME_WIDTH = 256
"""Number of sines and cosines that encode a time step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Modulated(Dimensions):
    """Dimensions of a diffusion transformer."""

    width: int
    """Width of the tokens."""
    attention_heads: int
    """Heads of a layer."""
    image_tokens: int
    """Patches of the latents of an image or of a video."""
    patch_values: int
    """Numbers of a patch."""


def block(
    name: str, repeat: int, tokens: float, write: Callable[[Walk], None], workload: Workload, shards: Shards
) -> Block:
    """Return the block that `write` writes over `tokens` tokens of a sample, repeated `repeat` times.

    Full recomputation keeps the block's input.
    """
    width, batch = workload.model.own(Modulated).width, shards.micro_batch.astype(float)
    walk = Walk(Numerics.of(workload), batch, width, (1, 1, 1))
    write(walk)
    activation_bytes = walk.activation_bytes * np.ones(len(shards))
    read = batch * tokens * width * walk.numerics.element
    return Block(
        name,
        repeat,
        tuple(walk.ops),
        np.full(len(shards), walk.parameters),
        np.stack([activation_bytes, activation_bytes, np.minimum(activation_bytes, read)]),
    )


def vector(walk: Walk, inputs: int, outputs: int) -> None:
    """Write an activation and a dense layer over the vector that encodes time and text."""
    walk.ops += layers.pointwise("silu", walk.numerics, walk.batch * inputs)
    attention.linear(walk, 1.0, inputs, outputs)


def table(walk: Walk, rows: int, width: int) -> None:
    """Write a learned table of `rows` rows, which is added to the scales that all blocks share."""
    walk.ops += layers.pointwise("scale-shift", walk.numerics, walk.batch * rows * width, backward=(1.0, 1.0))
    walk.parameters += rows * width


def modulated(walk: Walk, tokens: float, width: int, *, weights: bool = False) -> None:
    """Write a norm, with `weights` or without, then a scale and an offset from the vector."""
    elements = walk.batch * tokens * width
    walk.keep(2 * elements)
    walk.ops += layers.norm("layer-norm", walk.numerics, walk.batch * tokens, float(width), rms=False)
    walk.ops += layers.pointwise("modulate", walk.numerics, elements, kernels=2, backward=(2.0, 1.0))
    walk.parameters += 2 * width if weights else 0


def gated_sum(walk: Walk, tokens: float, width: int) -> None:
    """Write the residual sum of a part, whose output is scaled by the vector."""
    elements = walk.batch * tokens * width
    walk.keep(elements)
    walk.ops += layers.pointwise("gate", walk.numerics, elements, reads=2.0, kernels=2, backward=(2.0, 1.0))


def query_key_norm(walk: Walk, tokens: float, width: int, *, groups: int, rms: bool) -> None:
    """Write the norm of queries or of keys, over each of `groups` parts of a token.

    The parts are the token's heads, or one for all of them. An RMS norm in PyTorch's operators keeps what it normed
    besides its input (diffusers, models/normalization.py).
    """
    elements = walk.batch * tokens * width
    walk.keep((2.0 if rms else 1.0) * elements)
    walk.ops += layers.norm("query-key-norm", walk.numerics, elements * groups / width, width / groups, rms=rms)
    walk.parameters += (1 if rms else 2) * width // groups


def rotary(walk: Walk, tokens: float, width: int) -> None:
    """Write the rotation of queries and keys, `tokens` in all, by their positions.

    The gradient needs only the positions, so no activation is kept.
    """
    walk.ops += layers.pointwise("rotary", walk.numerics, walk.batch * tokens * width, kernels=3, backward=(1.0, 1.0))


def loss(walk: Walk, elements: float) -> None:
    """Write the squared error of `elements` numbers per sample."""
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, walk.batch * elements, reads=2.0, kernels=3)


def gelu(walk: Walk, tokens: float, width: int) -> None:
    """Write a GELU over `width` numbers per token."""
    elements = walk.batch * tokens * width
    walk.keep(elements)
    walk.ops += layers.pointwise("gelu", walk.numerics, elements)
