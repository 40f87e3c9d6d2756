"""Diffusion transformers with one stream of latent patches: DiT (Peebles and Xie, arXiv 2212.09748), PixArt (Chen et
al., arXiv 2310.00426), CogVideoX (Yang et al., arXiv 2408.06072) and Wan (arXiv 2503.20314), as diffusers builds them.

Images and videos become latents, and texts states, before training; the frozen networks that make them are no part of
the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.models import modulated
from tilecast.models.cnn import attention
from tilecast.models.cnn.walk import Walk
from tilecast.spec import Workload

NEEDS = ("blocks", "width", "attention_heads", "inner", "image_tokens", "patch_values", "output_values")


def build(workload: Workload, shards: Shards) -> Graph:
    """The graph: `blocks` blocks over `image_tokens` patches of `patch_values` numbers, whose MLP is `inner` wide.
    Patches attend to `text_tokens` states of `text_width`, or stand beside them if they are `joined`. A vector of
    `vector_width` (`width`) says the time: a block makes its scales of it with `own_modulations` dense layers, or
    shares one with all others. Where there are classes (`labels`), each block embeds time and class itself. Data
    parallel only."""
    extra = workload.model.extra
    width, image, text = int(extra["width"]), extra["image_tokens"], extra.get("text_tokens", 0.0)
    vector = int(extra.get("vector_width", width))
    is_joined = bool(extra.get("joined"))
    tokens = image + text if is_joined else image

    def embed(walk: Walk) -> None:
        attention.linear(walk, image, int(extra["patch_values"]), width)
        if not extra.get("labels"):
            _time(walk, int(extra.get("time_width", modulated.TIME_WIDTH)), vector)
        if text:
            attention.linear(walk, text, int(extra["text_width"]), width)
            for _ in range(int(extra.get("text_layers", 1)) - 1):
                modulated.gelu(walk, text, width)
                attention.linear(walk, text, width, width)
        if not extra.get("own_modulations"):
            modulated.vector(walk, vector, 6 * width)

    def finish(walk: Walk) -> None:
        modulated.vector(walk, vector, 2 * width)
        modulated.modulated(walk, image, width)
        attention.linear(walk, image, width, int(extra["output_values"]))
        modulated.loss(walk, image * extra["patch_values"])

    def write(walk: Walk) -> None:
        _block(walk, extra, tokens, 0.0 if is_joined else text)

    return Graph(
        (modulated.block("embedding", 1, tokens, embed, workload, shards),),
        (modulated.block("block", int(extra["blocks"]), tokens, write, workload, shards),),
        (modulated.block("head", 1, tokens, finish, workload, shards),),
        np.zeros(len(shards)),
        len(shards),
        host_bytes_per_sample=2.0 * (image * extra["patch_values"] + text * extra.get("text_width", 0.0)),
    )


def _time(walk: Walk, inputs: int, width: int) -> None:
    """The vector of a time step."""
    attention.linear(walk, 1.0, inputs, width)
    modulated.vector(walk, width, width)


def _block(walk: Walk, extra: Mapping[str, float], tokens: float, read: float) -> None:
    """Attention among `tokens` tokens, to `read` states of a text, and an MLP."""
    width, heads, inner = int(extra["width"]), int(extra["attention_heads"]), int(extra["inner"])
    if extra.get("labels"):
        _time(walk, modulated.TIME_WIDTH, width)
        walk.parameters += extra["labels"] * width
    for _ in range(int(extra.get("own_modulations", 0))):
        modulated.vector(walk, int(extra.get("vector_width", width)), 6 * width)
    modulated.modulated(walk, tokens, width)
    for _ in ("query", "key", "value"):
        attention.linear(walk, tokens, width, width)
    if extra.get("positions"):
        modulated.positions(walk, tokens, width, heads)
    attention.core(walk, tokens, tokens, width, heads)
    attention.linear(walk, tokens, width, width)
    modulated.gated_sum(walk, tokens, width)
    if read:
        if extra.get("read_norm"):
            attention.norm(walk, tokens, width)
        attention.attend(walk, tokens, read, width, heads)
    modulated.modulated(walk, tokens, width)
    attention.linear(walk, tokens, width, inner)
    modulated.gelu(walk, tokens, inner)
    attention.linear(walk, tokens, inner, width)
    modulated.gated_sum(walk, tokens, width)
