"""DeepSeek V2 and V3: multi-head latent attention, and MLPs that are dense or have routed and shared experts.

Sources: DeepSeek-V2, arXiv 2405.04434 (section 2.1 and appendix C); DeepSeek-V3, arXiv 2412.19437 (section 4.2).

The projections of keys and queries run separately, as the papers write them. To merge the up-projection of the keys
into that of the queries would help only in decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast import frameworks
from tilecast.graph import Graph, Op, Shards
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import (
    Linear,
    RankSizes,
    Sublayer,
    build_residual_sum,
    count_norm_parameters,
    list_key_value_collectives,
    list_tensor_parallel_collectives,
    zeros,
)
from tilecast.zoo.self_attention import count_sequences


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Deepseek(Transformer):
    """Dimensions of a decoder with multi-head latent attention."""

    latent: int
    """Width of the vector that keys and values are projected up from."""
    rotary_dim: int
    """Numbers of a query that are rotated."""
    value_dim: int
    query_latent: int = 0
    """Width of the vector that queries are projected up from. 0 if they come from the hidden state."""
    index_heads: int = 0
    """Heads of the indexer that chooses the keys of each query (DeepSeek-V3.2, sparse attention).

    0 if all keys are read.
    """
    index_dim: int = 128
    """Width of the indexer's heads."""
    index_top_k: int = 2048
    """Keys that the indexer chooses for a query."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a decoder with latent attention, in which queries have width `Model.head_dim`."""
    return transformer.build(workload, shards, _build_latent_attention)


def _build_latent_attention(
    name: str, workload: Workload, rank: RankSizes, *, key_rank: RankSizes, causal: bool
) -> Sublayer:
    """Return the latent attention sublayer of one rank.

    Every tensor-parallel rank computes all down-projections, their norms, and the one rotated key that all heads share.
    The up-projections and the heads are split over these ranks.
    """
    model, dims, numerics = workload.model, workload.model.get_dimensions(Deepseek), Numerics.from_workload(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    tokens, outer = rank.tokens, rank.outer_tokens
    heads = model.heads / t
    query, rotated, value = float(model.head_dim), float(dims.rotary_dim), float(dims.value_dim)
    latent, query_latent = float(dims.latent), float(dims.query_latent)
    down, up = latent + rotated, heads * (query - rotated + value)

    ops = layers.norm(f"{name}.norm", numerics, outer, h, rms=model.rms_norm)
    parameters = count_norm_parameters(model) * np.ones_like(t)
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
    rotary = layers.pointwise(
        f"{name}.rotary", numerics, tokens * rotated * (heads + 1), kernels=3, backward=(1.0, 1.0)
    )
    is_compiled = workload.execution in ("compiled", "xla")
    launches = frameworks.find_framework(workload).latent_rotary_launches
    ops += rotary if is_compiled else layers.set_launches(rotary, launches)
    # Rotated and plain parts are joined, for queries and for keys; a key's rotated part is repeated for every head.
    ops += layers.pointwise(
        f"{name}.concatenate", numerics, tokens * heads * query, kernels=2, absorbed=False, backward=(1.0, 1.0)
    )
    seen = workload
    if dims.index_heads and rank.sequence > dims.index_top_k:
        # Chosen keys are as many as those of a window of that length.
        seen = replace(workload, model=model.with_dimensions(sliding_window=dims.index_top_k))
        indexer, weights, kept = _build_indexer(f"{name}.index", workload, rank)
        ops += indexer
    elif dims.index_heads:
        _, weights, kept = _build_indexer(f"{name}.index", workload, rank)
    else:
        weights, kept = 0.0, zeros()
    parameters = parameters + weights
    sequences = count_sequences(seen, rank, key_rank, causal)
    ops += layers.attention(name, numerics, sequences, heads, heads, query, value_dim=value, causal=causal)
    ops += build_residual_sum(f"{name}.residual", numerics, outer * h, dropout=False)

    score = np.zeros(1) if numerics.flash else e * heads * tokens * key_rank.sequence
    activation_bytes = (
        2 * e * outer * h  # inputs of the norm and of the down-projections
        + 2 * e * outer * (latent + query_latent)  # latent vectors before and after their norms
        + e * tokens * heads * 2 * (query + value)  # q, k, v and the input of the output projection
        + (4.0 * heads * tokens if numerics.flash else score)
        + kept
    )
    keys = e * tokens * heads * (query + value) * rank.context
    collectives = [*list_tensor_parallel_collectives(name, workload, rank), *list_key_value_collectives(name, keys)]
    selected = e * tokens * heads * (query + value) + 4.0 * heads * tokens  # q and the output of attention
    # The latent vectors stay, from which queries, keys and values are projected up again. The norm of the input is no
    # part of a product (Megatron-Core, models/gpt/gpt_layer_specs.py: input_layernorm of multi_latent_attention).
    freed = (
        ("core_attn", score),
        ("layernorm", e * outer * h),
        ("mla_up_proj", e * tokens * heads * (2 * query + value)),
    )
    return Sublayer(ops, collectives, parameters, activation_bytes, score, np.zeros(1), selected, tuple(linears), freed)


def _build_indexer(name: str, workload: Workload, rank: RankSizes) -> tuple[list[Op], float, Floats]:
    """Return the indexer of sparse attention: its operators, its number of parameters, and the bytes it saves, (S,).

    Every tensor-parallel rank runs all heads of the indexer. Each head scores a query against every earlier key. A
    weighted sum of the scores chooses the keys (DeepSeek-V3.2-Exp, inference/model.py: Indexer). In training the scores
    have gradients, since they learn from the attention to the chosen keys.
    """
    dims, numerics = workload.model.get_dimensions(Deepseek), Numerics.from_workload(workload)
    h, tokens, width = float(workload.model.hidden), rank.tokens, float(dims.index_heads * dims.index_dim)
    sides = [(float(dims.query_latent or h), width), (h, float(dims.index_dim)), (h, float(dims.index_heads))]
    ops: list[Op] = []
    for label, (inputs, outputs) in zip(("query", "key", "weight"), sides, strict=True):
        ops += layers.linear(f"{name}.{label}", numerics, tokens, inputs, outputs)
    ops += layers.norm(f"{name}.norm", numerics, tokens, float(dims.index_dim), rms=False)
    queries, keys = rank.sequence / rank.context * dims.index_heads, rank.sequence * (1 + 1 / rank.context) / 4
    inner = float(dims.index_dim)
    ops += layers.matrix_products(
        f"{name}.scores",
        numerics.unquantized,
        rank.micro_batch,
        ("", queries, keys, inner),
        (".query-gradient", queries, inner, keys),
        (".key-gradient", keys, inner, queries),
        selective=False,
    )
    scores = tokens * keys
    # The kernel sums over the heads; choosing the largest reads the sums, in FP32.
    ops.append(layers.memory_pass(f"{name}.top-k", "fp32", scores, 4.0, 0.0))
    parameters = sum(inputs * outputs for inputs, outputs in sides) + 2.0 * dims.index_dim
    return ops, parameters, numerics.element * tokens * (width + 2.0 * dims.index_dim)
