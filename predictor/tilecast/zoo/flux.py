"""Rectified-flow transformers: FLUX.1 and Stable Diffusion 3.

The first layers of FLUX.1 keep image and text in separate streams and attend over both; its last layers treat them
alike, with attention and MLP side by side (Esser et al., arXiv 2403.03206, section 4; sizes of black-forest-labs/flux,
src/flux/util.py).

Images become latents, and texts become encoder states, before training; the frozen networks that make them are not part
of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import modulated
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.walk import Walk

NEEDS = ("double_layers", "width", "attention_heads", "image_tokens", "text_tokens", "patch_values",
         "text_width", "pooled_width")  # fmt: skip


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph, data parallel only.

    Dimensions of `Model.extra`; defaults are in brackets:

    - `double_layers` layers of two streams, `dual_layers` (0) of which attend twice, and `single_layers` (0) of one
      stream.
    - `image_tokens` patches of `patch_values` numbers, `text_tokens` states of `text_width`, and a pooled state of
      `pooled_width`.
    - `query_key_norm` (1) and `rotates` (1): whether queries and keys are normed and rotated.
    - `text_ends` (0): 1 if nothing reads the text after the last layer of two streams.
    - `guided` (0): 1 if the guidance strength, with which the model was distilled, is embedded like the time.
    """
    extra = workload.model.extra
    width, text, image = int(extra["width"]), extra["text_tokens"], extra["image_tokens"]

    def embed(walk: Walk) -> None:
        guidance = [modulated.TIME_WIDTH] * int(extra.get("guided", 0))
        for inputs in (modulated.TIME_WIDTH, *guidance, int(extra["pooled_width"])):
            modulated.vector(walk, inputs, width)
            modulated.vector(walk, width, width)
        attention.linear(walk, text, int(extra["text_width"]), width)
        attention.linear(walk, image, int(extra["patch_values"]), width)

    def finish(walk: Walk) -> None:
        modulated.vector(walk, width, 2 * width)
        modulated.modulated(walk, image, width)
        attention.linear(walk, image, width, int(extra["patch_values"]))
        modulated.loss(walk, image * extra["patch_values"])

    tokens = text + image
    ends, twice, pairs = (int(extra.get(name, 0)) for name in ("text_ends", "dual_layers", "double_layers"))
    last_twice = ends * (twice == pairs)
    kinds: list[tuple[str, int, Callable[[Walk], None]]] = [
        ("dual", twice - last_twice, lambda walk: _double(walk, extra, text, image, attends_twice=True)),
        ("double", pairs - twice - ends + last_twice, lambda walk: _double(walk, extra, text, image)),
        (
            "last",
            ends,
            lambda walk: _double(walk, extra, text, image, attends_twice=bool(last_twice), text_ends=True),
        ),
        ("single", int(extra.get("single_layers", 0)), lambda walk: _single(walk, extra, tokens)),
    ]
    return Graph(
        (modulated.block("embedding", 1, tokens, embed, workload, shards),),
        tuple(
            modulated.block(f"{name}-layer", depth, tokens, write, workload, shards)
            for name, depth, write in kinds
            if depth > 0
        ),
        (modulated.block("head", 1, tokens, finish, workload, shards),),
        np.zeros(len(shards)),
        len(shards),
        host_bytes_per_sample=2.0 * (image * extra["patch_values"] + text * extra["text_width"]),
    )  # fmt: skip


def _double(
    walk: Walk,
    extra: Mapping[str, float],
    text: float,
    image: float,
    *,
    attends_twice: bool = False,
    text_ends: bool = False,
) -> None:
    """Write a layer of two streams.

    If it `attends_twice`, the image also attends to itself alone, with its own scales (diffusers,
    models/normalization.py: SD35AdaLayerNormZeroX). If `text_ends`, the text is not computed beyond queries, keys and
    values (models/attention.py: JointTransformerBlock, `context_pre_only`).
    """
    width, heads = int(extra["width"]), int(extra["attention_heads"])
    if attends_twice:
        modulated.vector(walk, width, 3 * width)
        modulated.modulated(walk, image, width)
        attention.linear(walk, image, width, 3 * width)
        _positions(walk, extra, image)
        attention.core(walk, image, image, width, heads)
        attention.linear(walk, image, width, width)
        modulated.gated_sum(walk, image, width)
    for tokens, scales in ((image, 6), (text, 2 if text_ends else 6)):
        modulated.vector(walk, width, scales * width)
        modulated.modulated(walk, tokens, width)
        attention.linear(walk, tokens, width, 3 * width)
        _positions(walk, extra, tokens)
    attention.core(walk, image + text, image + text, width, heads)
    for tokens in (image,) if text_ends else (image, text):
        attention.linear(walk, tokens, width, width)
        modulated.gated_sum(walk, tokens, width)
        modulated.modulated(walk, tokens, width)
        attention.linear(walk, tokens, width, 4 * width)
        modulated.gelu(walk, tokens, 4 * width)
        attention.linear(walk, tokens, 4 * width, width)
        modulated.gated_sum(walk, tokens, width)


def _single(walk: Walk, extra: Mapping[str, float], tokens: float) -> None:
    width, heads = int(extra["width"]), int(extra["attention_heads"])
    modulated.vector(walk, width, 3 * width)
    modulated.modulated(walk, tokens, width)
    attention.linear(walk, tokens, width, 7 * width)
    _positions(walk, extra, tokens)
    attention.core(walk, tokens, tokens, width, heads)
    modulated.gelu(walk, tokens, 4 * width)
    attention.linear(walk, tokens, 5 * width, width)
    modulated.gated_sum(walk, tokens, width)


def _positions(walk: Walk, extra: Mapping[str, float], tokens: float) -> None:
    """Write the norms by head and the rotation of queries and keys, where the model has them.

    FLUX has both, SD3 neither, and SD3.5 the norms (diffusers, models/transformers/transformer_sd3.py: `qk_norm`).
    """
    width, heads = int(extra["width"]), int(extra["attention_heads"])
    if extra.get("query_key_norm", 1.0):
        for _ in ("query", "key"):
            modulated.query_key_norm(walk, tokens, width, groups=heads, rms=True)
    if extra.get("rotates", 1.0):
        modulated.rotary(walk, 2 * tokens, width)
