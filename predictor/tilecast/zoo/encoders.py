"""Encoders that differ from BERT: ALBERT, ELECTRA, and encoders with relative positions.

The layers of ALBERT share one set of weights (Lan et al., arXiv 1909.11942, section 3.1). ELECTRA's pretraining has a
small generator, which fills in masked tokens, and a discriminator, which detects replaced ones (Clark et al., arXiv
2003.10555, section 2; sizes in appendix A). DeBERTa (He et al., arXiv 2006.03654, section 3.1: content to position and
position to content) and XLNet (Yang et al., arXiv 1906.08237, section 2.3; Dai et al., arXiv 1901.02860, section 3.3)
compute scores of relative positions by separate products, without fusion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import RankSizes, Sublayer
from tilecast.zoo.self_attention import build_attention

_HEAD_DIM = 64
"""Width of a head in the generator of every published size."""


def build_albert(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of ALBERT, whose layers share one set of weights.

    Each of the L layers counts 1/L of the shared parameters.
    """
    graph = transformer.build(workload, shards)
    shared = tuple(replace(block, parameters=block.parameters / block.repeat) for block in graph.layers)
    return replace(graph, layers=shared)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Electra(Transformer):
    """Dimensions of ELECTRA's discriminator, and the dimensions in which the generator differs."""

    generator_hidden: int


def build_electra(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of ELECTRA: a generator that fills in masked tokens, and a discriminator that finds them.

    The generator runs first and has as many layers as the discriminator. The two share a token embedding of width
    `hidden`. The generator predicts `head_share` of the tokens. The discriminator computes one score for every token.
    """
    model = workload.model
    width = model.get_dimensions(Electra).generator_hidden
    heads = width // _HEAD_DIM
    generator = replace(
        model.with_dimensions(embedding_hidden=model.hidden),
        hidden=width, heads=heads, kv_heads=heads, head_dim=_HEAD_DIM, ffn_hidden=4 * width,
    )  # fmt: skip
    discriminator = model.with_dimensions(head_share=1.0, head_vocab=1)
    small = transformer.build(replace(workload, model=generator), shards)
    large = transformer.build(replace(workload, model=discriminator), shards)
    prediction = transformer.build(workload, shards).last
    (embedding,) = small.first
    projection = float(model.hidden * width + width)
    embedding = replace(embedding, parameters=np.full_like(embedding.parameters, projection))
    generating = (embedding, *small.layers, *prediction)
    named = tuple(replace(block, name=f"generator-{block.name}") for block in generating)
    return replace(large, first=(*named, *large.first))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RelativeEncoder(Transformer):
    """Dimensions of an encoder with relative positions."""

    relative_positions: int = 0
    """Number of learned position embeddings. 0 for computed embeddings, twice as many as tokens."""
    position_projections: int = 0
    """Number of dense layers over the position embeddings in each layer."""
    position_scores: int = 0
    """Number of products for position scores in each layer, besides the usual scores."""


def build_relative(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of an encoder with unfused attention and a table of relative positions."""
    graph = transformer.build(replace(workload, attention="eager"), shards, _build_relative_attention)
    (first,) = graph.first
    table = first.parameters + workload.model.get_dimensions(RelativeEncoder).relative_positions * workload.model.hidden
    return replace(graph, first=(replace(first, parameters=table),))


def _build_relative_attention(
    name: str, workload: Workload, rank: RankSizes, *, key_rank: RankSizes, causal: bool
) -> Sublayer:
    """Return the attention sublayer with the operators and parameters of relative positions."""
    part = build_attention(name, workload, rank, key_rank=key_rank, causal=causal)
    model, dims, numerics = (
        workload.model,
        workload.model.get_dimensions(RelativeEncoder),
        Numerics.from_workload(workload),
    )
    h, width = float(model.hidden), model.heads * model.head_dim / rank.tensor
    heads = model.heads / rank.tensor
    positions = float(dims.relative_positions) or 2 * rank.sequence
    ops = list(part.ops)
    for number in range(dims.position_scores):
        label = f"{name}.position{number + 1}"
        ops += layers.linear(f"{label}.projection", numerics, np.full(1, positions), h, width)
        # Scores of every token, in each head, against the positions, and their two gradients.
        s, head_dim = rank.sequence, float(model.head_dim)
        ops += layers.matrix_products(
            label,
            numerics.unquantized,
            rank.micro_batch * heads,
            (".scores", s, positions, head_dim),
            (".gradient1", s, head_dim, positions),
            (".gradient2", positions, head_dim, s),
        )
        ops += layers.pointwise(f"{label}.gather", numerics, rank.micro_batch * heads * rank.sequence**2, reads=2.0,
                                kernels=2)  # fmt: skip
    parameters = part.parameters + dims.position_projections * (h + 1.0) * width
    return replace(part, ops=ops, parameters=parameters)
