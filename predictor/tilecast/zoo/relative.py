"""Encoders whose attention computes scores of relative positions as separate products, unfused.

DeBERTa (He et al., arXiv 2006.03654, section 3.1: content to position and position to content) and XLNet (Yang et al.,
arXiv 1906.08237, section 2.3; Dai et al., arXiv 1901.02860, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import Part, Rank
from tilecast.zoo.self_attention import attention


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RelativeEncoder(Transformer):
    """Dimensions of an encoder with relative positions."""

    relative_positions: int = 0
    """Embeddings of positions; 0: twice as many as tokens, computed rather than learned."""
    position_projections: int = 0
    """Dense layers over these embeddings in each layer."""
    position_scores: int = 0
    """Products of scores in each layer beside the usual one."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of the encoder."""
    plain = replace(workload, attention="eager")
    model, dims = plain.model, plain.model.own(RelativeEncoder)
    rank = Rank.of(shards, plain.sequence_length)
    blocks = transformer.stack("layer", plain, rank, model.layers, causal=model.causal, attend=_attention)
    graph = transformer.graph(plain, rank, rank, blocks)
    first = graph.first[0]
    table = first.parameters + dims.relative_positions * model.hidden
    return replace(graph, first=(replace(first, parameters=table),))


def _attention(name: str, workload: Workload, rank: Rank, *, key_rank: Rank, causal: bool) -> Part:
    """Build the usual attention, with the operators and parameters that relative positions add."""
    part = attention(name, workload, rank, key_rank=key_rank, causal=causal)
    model, dims, numerics = workload.model, workload.model.own(RelativeEncoder), Numerics.of(workload)
    h, width = float(model.hidden), model.heads * model.head_dim / rank.tensor
    heads = model.heads / rank.tensor
    positions = float(dims.relative_positions) or 2 * rank.sequence
    ops = list(part.ops)
    projections = dims.position_projections
    for number in range(dims.position_scores):
        label = f"{name}.position{number + 1}"
        ops += layers.linear(f"{label}.projection", numerics, np.full(1, positions), h, width)
        # Scores of every token, in each head, against the positions, and their two gradients.
        s, width_of_head = rank.sequence, float(model.head_dim)
        ops += layers.products(
            label,
            numerics.unquantized,
            rank.micro_batch * heads,
            (".scores", s, positions, width_of_head),
            (".gradient1", s, width_of_head, positions),
            (".gradient2", positions, width_of_head, s),
        )
        ops += layers.pointwise(f"{label}.gather", numerics, rank.micro_batch * heads * rank.sequence**2, reads=2.0,
                                kernels=2)  # fmt: skip
    parameters = part.parameters + projections * (h + 1.0) * width
    return replace(part, ops=ops, parameters=parameters)
