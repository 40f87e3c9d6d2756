"""Transformer-XL: segments with a memory of the previous one, and attention by relative position.

Sources: Dai et al., arXiv 1901.02860, section 3; adaptive softmax after Grave et al., arXiv 1609.04309.

The score matrix is computed by the authors' algorithm in an eager framework (appendix B: the relative shift), because
no fused attention kernel adds such position scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tilecast.graph import Block, Graph, Op, Shards
from tilecast.model import Model, Problem, numbered_field
from tilecast.spec import Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import (
    RankSizes,
    Sublayer,
    build_residual_sum,
    build_uniform_block,
    count_norm_parameters,
    list_tensor_parallel_collectives,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TransformerXl(Transformer):
    """Dimensions of Transformer-XL."""

    memory_length: int
    """Number of tokens of the previous segment that queries see."""
    cutoffs: tuple[int, ...] = numbered_field("cutoff", default=())
    """Ranks of words at which a cluster of the adaptive softmax begins. Without them the softmax is over all words."""
    shrink: int = 1
    """Factor by which each cluster's embedding is narrower than that of the previous cluster."""
    attention_dropout: bool = False

    def problems(self, model: Model) -> Iterator[Problem]:
        """Yield dimensions that contradict each other, each with the problem and a remedy."""
        yield from Transformer.problems(self, model)
        for place, (fewer, more) in enumerate(pairwise((*self.cutoffs, model.vocab)), 1):
            if more <= fewer:
                name = "cutoffs" if place < len(self.cutoffs) else "vocab"
                yield name, f"{more} is not above {fewer}", "let cutoffs ascend to the vocabulary"


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a decoder whose queries also see tokens of the previous segment."""
    workload = replace(workload, attention="eager")
    rank = RankSizes.from_shards(shards, workload.sequence_length)
    graph = transformer.build(workload, shards, _build_relative_attention)
    return replace(graph, first=(_build_embedding(workload, rank),), last=(_build_head(workload, rank),))


def _build_relative_attention(
    name: str, workload: Workload, rank: RankSizes, *, key_rank: RankSizes, causal: bool
) -> Sublayer:
    """Return the sublayer of attention by relative positions on one rank.

    The projections also run over the memory of the previous segment, but the queries of the memory are discarded.
    """
    model, dims, numerics = (
        workload.model,
        workload.model.get_dimensions(TransformerXl),
        Numerics.from_workload(workload),
    )
    e, h = numerics.element, model.hidden
    heads = model.heads / rank.tensor
    width = heads * model.head_dim
    tokens, outer = rank.tokens, rank.outer_tokens
    keys = key_rank.sequence + dims.memory_length
    read = rank.micro_batch * keys
    scores = heads * tokens * keys
    dropped = dims.attention_dropout and workload.training

    ops = layers.norm(f"{name}.norm", numerics, outer, h, rms=model.rms_norm)
    # Memory and segment are joined twice: for the layer, and for the memory of the next segment.
    ops += layers.elementwise(f"{name}.memory", numerics, read * h, 1, 1, count=2)
    ops += layers.linear(f"{name}.qkv", numerics, read, h, 3 * width)
    ops += layers.linear(f"{name}.positions", numerics, np.full(1, keys), h, width, input_gradient=False)
    # The bias of contents and that of positions are added to queries; backward, two sums over tokens and one of both.
    ops += layers.pointwise(f"{name}.query-biases", numerics, tokens * width, kernels=2, backward=(2.0, 0.5))
    # All samples share the keys of positions: each head has one product for the whole micro-batch.
    rows, head_dim = rank.micro_batch * rank.sequence, float(model.head_dim)
    ops += layers.matrix_products(
        f"{name}.position-scores",
        numerics,
        heads,
        ("", rows, keys, head_dim),
        (".query-gradient", rows, head_dim, keys),
        (".key-gradient", keys, head_dim, rows),
    )
    # The shift is a padded copy; backward, zeros are filled, the slice is copied, and the product needs another order.
    ops += layers.pointwise(f"{name}.shift", numerics, scores, absorbed=False, backward=(2.0, 3.0))
    ops += layers.elementwise(f"{name}.add-positions", numerics, scores, 2, 1)
    sequences = layers.Sequences(rank.micro_batch, rank.sequence / rank.context, np.full(1, keys))
    ops += layers.attention(name, numerics, sequences, heads, heads, model.head_dim, causal=causal, dropout=dropped)
    ops += layers.pointwise(f"{name}.join-heads", numerics, tokens * width, absorbed=False, backward=(1.0, 1.0))
    ops += layers.linear(f"{name}.output", numerics, tokens, width, h)
    ops += build_residual_sum(f"{name}.residual", numerics, outer * h, model.dropout and workload.training)

    score = scores * (2 * e + 1 if dropped else e)
    activation_bytes = 2 * e * outer * h + e * read * h + e * (3 * read + 3 * tokens) * width + outer * h + score
    parameters = 5.0 * h * width + count_norm_parameters(model)
    collectives = list_tensor_parallel_collectives(name, workload, rank)
    return Sublayer(ops, collectives, parameters, activation_bytes, score, np.zeros(1), activation_bytes - score)


def _list_clusters(model: Model) -> list[tuple[float, float, float]]:
    """Return, for each cluster of words, the number of words, the embedding width and the fraction of all tokens.

    Clusters are in order of falling word frequency. By Zipf's law, the r-th word of V makes up a fraction
    1 / (r (ln V + 0.5772)) of all tokens.
    """
    dims = model.get_dimensions(TransformerXl)
    ends = [float(end) for end in (*dims.cutoffs, model.vocab)]
    harmonic = [0.0, *(math.log(end) + 0.5772 for end in ends)]
    return [
        (end - start, model.hidden / dims.shrink**i, (harmonic[i + 1] - harmonic[i]) / harmonic[-1])
        for i, (start, end) in enumerate(zip([0.0, *ends], ends, strict=False))
    ]


def _build_embedding(workload: Workload, rank: RankSizes) -> Block:
    """Return the block of the token embedding, which has a table for each cluster of words.

    Narrower tables are followed by a projection to the hidden width.
    """
    model, numerics = workload.model, Numerics.from_workload(workload)
    h = model.hidden
    ops: list[Op] = []
    parameters = np.zeros_like(rank.tensor)
    shrinks = model.get_dimensions(TransformerXl).shrink != 1
    for words, width, share in _list_clusters(model):
        ops += layers.embedding("embedding.tokens", numerics, rank.tokens * share, width)
        parameters = parameters + words * width / rank.tensor
        if shrinks:
            ops += layers.linear("embedding.projection", numerics, rank.tokens * share, width, h)
            parameters = parameters + width * h
    ops += layers.pointwise("embedding.scale", numerics, rank.tokens * h, backward=(1.0, 1.0))
    if model.dropout and workload.training:
        ops += layers.pointwise("embedding.dropout", numerics, rank.outer_tokens * h, mask_bytes=1.0)
    activation_bytes = numerics.element * rank.outer_tokens * h + 8.0 * rank.tokens
    return build_uniform_block("embedding", len(rank.tensor), ops, parameters, activation_bytes)


def _build_head(workload: Workload, rank: RankSizes) -> Block:
    """Return the block of the adaptive softmax and its loss.

    One product scores the most frequent words, and has one more column for each further cluster. Tokens of a further
    cluster need a second product, with the words of that cluster. The weights are shared with the embedding.
    """
    model, numerics = workload.model, Numerics.from_workload(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    first, *tails = _list_clusters(model)
    shrinks = model.get_dimensions(TransformerXl).shrink != 1
    ops: list[Op] = []
    logits = largest = np.zeros_like(t)
    parameters = np.full_like(t, model.vocab + len(tails) * (h + 1) + (h * h if shrinks else 0)) / t
    for words, width, share in [(first[0] + len(tails), first[1], 1.0), *tails]:
        rows, cols = rank.tokens * share, words / t
        if shrinks:
            ops += layers.linear("head.projection", numerics, rows, h, width)
        ops += layers.linear("head.logits", numerics, rows, width, cols, bias=True)
        if workload.training:
            ops += layers.cross_entropy("head.loss", numerics, rows, cols)
        # Backward runs one cluster after the other, so that only the largest one needs scratch memory.
        logits, largest = logits + rows * cols, np.maximum(largest, rows * cols)
    if workload.training:
        # Logarithms of probabilities are in FP32. With one softmax they are negated before the target is picked. With
        # several, each cluster's rows are copied from those of the first product. Backward, each cluster fills a
        # gradient of the whole with zeros and adds its rows, and the gradients are summed.
        moved = 2.0 * len(tails) + 2.0 if tails else 1.0
        ops += layers.pointwise("head.pick", numerics.in_fp32, rank.tokens * (first[0] / t), backward=(moved, moved))
    logit_bytes, logit_working = layers.logit_bytes(numerics, returned=False)
    activation_bytes = 2 * e * rank.outer_tokens * h + logit_bytes * logits
    return build_uniform_block("head", len(t), ops, parameters, activation_bytes, working_bytes=logit_working * largest)
