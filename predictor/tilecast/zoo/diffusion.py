"""Diffusion transformers with one stream of latent patches, as diffusers builds them.

DiT (Peebles and Xie, arXiv 2212.09748), PixArt (Chen et al., arXiv 2310.00426), CogVideoX (Yang et al., arXiv
2408.06072) and Wan (arXiv 2503.20314); in diffusers models/transformers/ and models/attention.py.

Images and videos become latents, and texts become encoder states, before training; the frozen networks that make them
are not part of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers, modulated
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.walk import Walk

NEEDS = ("blocks", "width", "attention_heads", "inner", "image_tokens", "patch_values", "output_values")


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph, data parallel only.

    Dimensions of `Model.extra`; those that are not required are 0 unless a default is named:

    - `blocks` blocks run over `image_tokens` patches of `patch_values` numbers; their MLP is `inner` wide.
    - Patches attend to `text_tokens` states of `text_width`, or form one sequence with them if `joined`. They also
      attend to `frame_tokens` states of `frame_width`, those of a video's first image.
    - A vector of `vector_width` (default `width`) encodes the time and, with `size_conditions`, the size of the image.
      A block makes its scales from it with `own_modulations` dense layers, or adds a table to the scales that all
      blocks share. With classes (`labels`), each block embeds time and class itself.
    - With `query_key_norm` queries and keys are normed, by head or, with `norm_across_heads`, over all heads; with
      `rotates` they are rotated. `norm_weights` says that the modulated norms have weights.
    """
    extra = workload.model.extra
    width, image, text = int(extra["width"]), extra["image_tokens"], extra.get("text_tokens", 0.0)
    frame = extra.get("frame_tokens", 0.0)
    is_joined = bool(extra.get("joined"))
    tokens = image + text if is_joined else image
    read = () if is_joined else tuple(states for states in (text, frame) if states)

    def embed(walk: Walk) -> None:
        _embed(walk, extra)

    def write(walk: Walk) -> None:
        _block(walk, extra, tokens, read)

    def finish(walk: Walk) -> None:
        if is_joined:
            attention.norm(walk, tokens, width)
        if extra.get("own_modulations"):
            modulated.vector(walk, int(extra.get("vector_width", width)), 2 * width)
        else:
            modulated.table(walk, 2, width)
        modulated.modulated(walk, image, width, weights=bool(extra.get("norm_weights")))
        attention.linear(walk, image, width, int(extra["output_values"]))
        modulated.loss(walk, image * extra["output_values"])

    inputs = image * extra["patch_values"] + text * extra.get("text_width", 0.0) + frame * extra.get("frame_width", 0.0)
    return Graph(
        (modulated.block("embedding", 1, tokens, embed, workload, shards),),
        (modulated.block("block", int(extra["blocks"]), tokens, write, workload, shards),),
        (modulated.block("head", 1, tokens, finish, workload, shards),),
        np.zeros(len(shards)),
        len(shards),
        host_bytes_per_sample=2.0 * inputs,
    )


def _embed(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write the embeddings of patches, time and states that the blocks read.

    States that blocks attend to are kept once for all blocks.
    """
    width, image, text = int(extra["width"]), extra["image_tokens"], extra.get("text_tokens", 0.0)
    vector = int(extra.get("vector_width", width))
    attention.linear(walk, image, int(extra["patch_values"]), width)
    if not extra.get("labels"):
        _time(walk, int(extra.get("time_width", modulated.TIME_WIDTH)), vector)
    if extra.get("size_conditions"):
        for numbers in (2.0, 1.0):  # height and width, and their ratio (PixArtAlphaCombinedTimestepSizeEmbeddings)
            _time(walk, modulated.TIME_WIDTH, width // 3, numbers)
    if text:
        attention.linear(walk, text, int(extra["text_width"]), width)
        for _ in range(int(extra.get("text_layers", 1)) - 1):
            modulated.gelu(walk, text, width)
            attention.linear(walk, text, width, width)
    if frame := extra.get("frame_tokens", 0.0):
        seen = int(extra["frame_width"])
        attention.norm(walk, frame, seen)
        attention.linear(walk, frame, seen, seen)
        modulated.gelu(walk, frame, seen)
        attention.linear(walk, frame, seen, width)
        attention.norm(walk, frame, width)
    if not extra.get("joined"):
        walk.keep(walk.batch * (text + frame) * width)
    if not extra.get("own_modulations"):
        modulated.vector(walk, vector, 6 * width)


def _time(walk: Walk, inputs: int, width: int, numbers: float = 1.0) -> None:
    """Write the embedding of a time step, or of `numbers` such scalars."""
    attention.linear(walk, numbers, inputs, width)
    walk.ops += layers.pointwise("silu", walk.numerics, walk.batch * numbers * width)
    attention.linear(walk, numbers, width, width)


def _block(walk: Walk, extra: Mapping[str, float], tokens: float, read: tuple[float, ...]) -> None:
    """Write one block: attention among `tokens` tokens, attention to the states `read`, and an MLP."""
    width, heads, inner = int(extra["width"]), int(extra["attention_heads"]), int(extra["inner"])
    has_weights = bool(extra.get("norm_weights"))
    if extra.get("labels"):
        _time(walk, modulated.TIME_WIDTH, width)
        walk.parameters += extra["labels"] * width
    for _ in range(int(extra.get("own_modulations", 0))):
        modulated.vector(walk, int(extra.get("vector_width", width)), 6 * width)
    if not extra.get("own_modulations"):
        modulated.table(walk, 6, width)
    modulated.modulated(walk, tokens, width, weights=has_weights)
    attention.linear(walk, tokens, width, width)
    for _ in ("key", "value"):
        attention.beside(walk, tokens, width, width)
    for _ in ("query", "key"):
        _normed(walk, extra, tokens)
    if extra.get("rotates"):
        modulated.rotary(walk, 2 * tokens, width)
    attention.core(walk, tokens, tokens, width, heads)
    attention.linear(walk, tokens, width, width)
    modulated.gated_sum(walk, tokens, width)
    if read:
        _look(walk, extra, tokens, read)
    modulated.modulated(walk, tokens, width, weights=has_weights)
    attention.linear(walk, tokens, width, inner)
    modulated.gelu(walk, tokens, inner)
    attention.linear(walk, tokens, inner, width)
    modulated.gated_sum(walk, tokens, width)


def _look(walk: Walk, extra: Mapping[str, float], tokens: float, read: tuple[float, ...]) -> None:
    """Write attention to states that do not change from block to block.

    Each kind of state has its own keys and values, and the results are added.
    """
    width, heads = int(extra["width"]), int(extra["attention_heads"])
    if extra.get("read_norm"):
        attention.norm(walk, tokens, width)
    attention.linear(walk, tokens, width, width)
    _normed(walk, extra, tokens)
    for states in read:
        for _ in ("key", "value"):
            attention.beside(walk, states, width, width)
        _normed(walk, extra, states)
        attention.core(walk, tokens, states, width, heads)
    for _ in read[1:]:
        attention.residual(walk, tokens, width)
    attention.linear(walk, tokens, width, width)
    attention.residual(walk, tokens, width)


def _normed(walk: Walk, extra: Mapping[str, float], tokens: float) -> None:
    """Write the norm of queries or of keys, if the model has one."""
    width = int(extra["width"])
    if not extra.get("query_key_norm"):
        return
    if extra.get("norm_across_heads"):
        modulated.query_key_norm(walk, tokens, width, groups=1, rms=True)
    else:
        modulated.query_key_norm(walk, tokens, width, groups=int(extra["attention_heads"]), rms=False)
