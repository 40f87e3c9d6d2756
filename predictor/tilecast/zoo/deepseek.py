"""DeepSeek V2 and V3: multi-head latent attention, and MLPs that are dense or have routed and shared experts.

Sources: DeepSeek-V2, arXiv 2405.04434 (section 2.1 and appendix C); DeepSeek-V3, arXiv 2412.19437 (section 4.2).

Training runs the projections as they are written: absorbing the keys' up-projection into that of the queries helps
decoding only. Multi-token prediction is not part of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import Linear, Part, Rank, key_collectives, norm_parameters, residual, tensor_collectives
from tilecast.zoo.self_attention import Span


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Deepseek(Transformer):
    """Dimensions of a decoder with latent attention."""

    latent: int
    """Width of the vector that keys and values are projected up from."""
    rotary_dim: int
    """Numbers of a query that are rotated."""
    value_dim: int
    """Width of a value."""
    query_latent: int = 0
    """Width of the vector that queries are projected up from; 0: straight from the hidden state."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of the decoder.

    `Model.head_dim` is the width of a query. Keys and values are projected up from a latent vector.
    """
    rank = Rank.of(shards, workload.sequence_length)
    blocks = transformer.stack("layer", workload, rank, workload.model.layers, causal=True, attend=_latent_attention)
    return transformer.graph(workload, rank, rank, blocks)


def _latent_attention(name: str, workload: Workload, rank: Rank, *, key_rank: Rank, causal: bool) -> Part:
    """Build latent attention on one rank.

    Down-projections, their norms and the one rotated key that all heads share are whole on every tensor-parallel rank;
    up-projections and heads are split.
    """
    model, dims, numerics = workload.model, workload.model.own(Deepseek), Numerics.of(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    tokens, outer = rank.tokens, rank.outer_tokens
    heads = model.heads / t
    query, rotated, value = float(model.head_dim), float(dims.rotary_dim), float(dims.value_dim)
    latent, query_latent = float(dims.latent), float(dims.query_latent)
    down, up = latent + rotated, heads * (query - rotated + value)

    ops = layers.norm(f"{name}.norm", numerics, outer, h, rms=model.rms_norm)
    parameters = norm_parameters(model) * np.ones_like(t)
    linears = [
        Linear(f"{name}.key-value-down", outer, float(h), down),
        Linear(f"{name}.key-value-up", tokens, latent, up),
    ]
    if query_latent:
        linears.append(Linear(f"{name}.query-down", outer, float(h), query_latent))
        ops += layers.norm(f"{name}.query-norm", numerics, outer, query_latent, rms=True)
        parameters = parameters + query_latent
    linears.append(Linear(f"{name}.query-up", tokens, query_latent or float(h), heads * query))
    linears.append(Linear(f"{name}.output", tokens, heads * value, float(h)))
    for item in linears:
        ops += layers.linear(item.name, numerics, item.rows, item.inputs, item.outputs)
        parameters = parameters + item.inputs * item.outputs
    ops += layers.norm(f"{name}.latent-norm", numerics, outer, latent, rms=True)
    parameters = parameters + latent
    ops += layers.pointwise(f"{name}.rotary", numerics, tokens * rotated * (heads + 1), kernels=3, backward=(1.0, 1.0))
    # Rotated and plain parts are joined, for queries and for keys; a key's rotated part is repeated for every head.
    ops += layers.pointwise(
        f"{name}.concatenate", numerics, tokens * heads * query, kernels=2, absorbed=False, backward=(1.0, 1.0)
    )
    seen = Span.of(workload, rank, key_rank, causal)
    ops += layers.attention(
        name, numerics, batch=seen.batch, heads=heads, kv_heads=heads, seq_q=seen.queries, seq_kv=seen.keys,
        head_dim=query, value_dim=value, causal=causal, dropout=False,
    )  # fmt: skip
    ops += residual(f"{name}.residual", numerics, outer * h, dropout=False)

    score = np.zeros(1) if numerics.flash else e * heads * tokens * key_rank.sequence
    activation_bytes = (
        2 * e * outer * h  # inputs of the norm and of the down-projections
        + 2 * e * outer * (latent + query_latent)  # latent vectors before and after their norms
        + e * tokens * heads * 2 * (query + value)  # q, k, v and the input of the output projection
        + (4.0 * heads * tokens if numerics.flash else score)
    )
    keys = e * tokens * heads * (query + value) * rank.context
    collectives = [*tensor_collectives(name, workload, rank), *key_collectives(name, keys)]
    selected = e * tokens * heads * (query + value) + 4.0 * heads * tokens  # q and the output of attention
    return Part(ops, collectives, parameters, activation_bytes, score, np.zeros(1), selected, tuple(linears))
