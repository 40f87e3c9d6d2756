"""Multi-head attention on one rank: self-attention, or cross-attention to an encoder's tokens."""

from __future__ import annotations

import numpy as np

from tilecast.graph import Op
from tilecast.model import Model
from tilecast.spec import Workload
from tilecast.zoo import layers
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.layers import Sequences
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import (
    NORMED,
    Linear,
    RankSizes,
    Sublayer,
    build_residual_sum,
    count_norm_parameters,
    list_key_value_collectives,
    list_tensor_parallel_collectives,
)


def find_memory_width(model: Model) -> float:
    """Return the width of the tokens from which cross-attention computes its keys and values."""
    width = model.get_dimensions(Transformer).memory_width
    return model.hidden if width is None else width


def _has_separate_projections(model: Model) -> bool:
    """Return whether queries, keys and values have a product each, as in encoders and in decoders with RMS norms."""
    return model.rms_norm or model.family == "encoder"


def _build_projections(
    name: str, workload: Workload, rank: RankSizes, key_rank: RankSizes
) -> tuple[list[Op], list[Linear]]:
    """Return the operators that compute queries, keys and values, and the dense layers that can get an adapter."""
    model, numerics = workload.model, Numerics.from_workload(workload)
    h, t, tokens = model.hidden, rank.tensor, rank.tokens
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    readers = 3.0 if _has_separate_projections(model) else 1.0
    ops = layers.norm(f"{name}.norm", numerics, rank.outer_tokens, h, rms=model.rms_norm, readers=readers)
    if key_rank is rank:
        qkv = (width + 2 * np.maximum(model.kv_heads / t, 1.0) * t * model.head_dim) / t
        ops += layers.linear(f"{name}.qkv", numerics, tokens, h, qkv, bias=model.bias, cast=NORMED)
        linears = [Linear(f"{name}.qkv", tokens, float(h), (width + 2 * kv_width) / t, 1 + 2 * kv_width / width)]
    else:
        read = find_memory_width(model)
        ops += layers.linear(f"{name}.query", numerics, tokens, h, width / t, bias=model.bias)
        ops += layers.linear(f"{name}.key-value", numerics, key_rank.tokens, read, 2 * kv_width / t, bias=model.bias)
        linears = [
            Linear(f"{name}.query", tokens, float(h), width / t),
            Linear(f"{name}.key-value", key_rank.tokens, float(read), 2 * kv_width / t),
        ]
    if model.rotary:
        rotated = tokens * (width + kv_width) / t
        # Eager code swaps and joins the halves, and sums two products (Hugging Face, apply_rotary_pos_emb). That moves
        # as many bytes as a complex product in FP32 between casts (torchtitan), and so does the gradient.
        ops += layers.pointwise(f"{name}.rotary", numerics, rotated, kernels=5, backward=(1.0, 1.0))
    if not numerics.flash:
        ops += layers.pointwise(f"{name}.transpose", numerics, tokens * width / t, kernels=3, backward=(1.0, 1.0))
    return ops, linears


def build_attention(name: str, workload: Workload, rank: RankSizes, *, key_rank: RankSizes, causal: bool) -> Sublayer:
    """Return the sublayer of multi-head attention, in which the tokens of `rank` attend to those of `key_rank`.

    The sublayer is self-attention if `key_rank` is the same object as `rank`, otherwise cross-attention.
    """
    model, numerics = workload.model, Numerics.from_workload(workload)
    dims = model.get_dimensions(Transformer)
    e, h, t = numerics.element, model.hidden, rank.tensor
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    read = h if key_rank is rank else find_memory_width(model)
    tokens, outer = rank.tokens, rank.outer_tokens
    heads = model.heads / t
    kv_heads = np.maximum(model.kv_heads / t, 1.0)
    dropout = model.dropout and workload.training

    ops, linears = _build_projections(name, workload, rank, key_rank)
    sequences = count_sequences(workload, rank, key_rank, causal)
    ops += layers.attention(name, numerics, sequences, heads, kv_heads, model.head_dim, causal=causal, dropout=dropout)
    if dims.capped_scores and not numerics.flash:
        scores = sequences.batch * heads * sequences.queries * sequences.keys
        ops += layers.pointwise(f"{name}.cap", numerics, scores, kernels=3, backward=(1.0, 1.0))
    spread = (1.0, outer / tokens)
    ops += layers.linear(f"{name}.output", numerics, tokens, width / t, h, bias=model.bias, cast=spread)
    if dims.output_norms:
        ops += layers.norm(f"{name}.output-norm", numerics, outer, h, rms=model.rms_norm)
    ops += build_residual_sum(f"{name}.residual", numerics, outer * h, dropout)

    statistic = 4.0 * heads * tokens
    score = heads * tokens * key_rank.sequence * ((2 * e + 1 if dropout else e) + numerics.score_extra)
    if dims.capped_scores and not numerics.flash:
        score = score + e * heads * tokens * key_rank.sequence  # the tanh keeps its result
    narrow = numerics.product_input * numerics.keeps_inputs
    reads = 3.0 if numerics.casts_inputs and _has_separate_projections(model) else 1.0
    normed = (e + numerics.chain_extra) * (width + kv_heads * t * model.head_dim) / t
    activation_bytes = (
        (e + numerics.norm_extra + reads * narrow) * outer * h  # inputs of the norm and of the projections
        + (normed * tokens if dims.qk_norm else 0.0)
        + ((e + numerics.norm_extra) * outer * h if dims.output_norms else 0.0)
        + e * tokens * (2 * width + 2 * kv_heads * t * model.head_dim) / t  # q, k, v and the output's input
        + (narrow if narrow < e else 0.0) * tokens * width / t  # the latter again in the type that the product reads
        + (outer * h if dropout else 0.0)
        + (statistic if numerics.flash else score)
    )
    norms = 2 if dims.output_norms else 1
    parameters = (width * h * 2 + 2 * kv_width * read) / t + norms * count_norm_parameters(model)
    if model.bias:
        parameters = parameters + (width + 2 * kv_width) / t + h
    if (further := dims.global_projections) and key_rank is rank and not causal:
        ops += layers.linear(f"{name}.global", numerics, tokens, h, further * width / t)
        parameters = parameters + further * width * h / t
    collectives = list_tensor_parallel_collectives(name, workload, rank)
    if key_rank is rank:
        keys = numerics.element * tokens * 2 * kv_heads * model.head_dim
        collectives += list_key_value_collectives(name, keys * rank.context)
    linears = [Linear(f"{name}.output", tokens, width / t, float(h)), *linears]
    hidden = np.zeros(1) if numerics.flash else score
    selected = e * tokens * (2 * width / t + kv_heads * model.head_dim) + statistic  # q, v and the output of attention
    # What comes before the MLP is computed again from the layer's input and the output of attention.
    behind = (e + (narrow if narrow < e else 0.0)) * tokens * width / t + (statistic if numerics.flash else score)
    freed = [("core_attn", hidden), ("attn_out", behind + (e * outer * h if key_rank is rank else 0.0))]
    if not numerics.fuses_norms:
        freed.append(("layernorm", narrow * outer * h))
    return Sublayer(
        ops, collectives, parameters, activation_bytes, hidden, np.zeros(1), selected, tuple(linears), tuple(freed)
    )


def count_sequences(workload: Workload, rank: RankSizes, key_rank: RankSizes, causal: bool) -> Sequences:
    """Return the sequences that attention kernels run over if the tokens of `rank` attend to those of `key_rank`.

    Under context parallelism, each rank has an early and a late chunk of a causal sequence (zig-zag), so that the
    queries of every rank see about half of the sequence. Fused kernels process the keys and values of one rank after
    another (ring attention, arXiv 2310.01889). So with c ranks, the queries of a rank cost as much as c sequences of
    their own length. Unfused kernels cost as much as queries at the end of a prefix that has (1 + 1/c) / 2 of the
    sequence.

    A fused kernel skips the keys that a window or a chunk hides. Its cost is that of shorter sequences in which a query
    sees as many keys on average as in the real sequence. Without a causal mask, a window reaches as far forward as
    backward. An unfused kernel computes the whole matrix and masks it.
    """
    queries, s = rank.sequence / rank.context, rank.sequence
    dims = workload.model.get_dimensions(Transformer)
    chunk, window = float(dims.attention_chunk), float(dims.sliding_window)
    if key_rank is rank and Numerics.from_workload(workload).flash:
        if 0 < chunk < s:
            return Sequences(rank.micro_batch * queries / chunk, np.full(1, chunk), np.full(1, chunk))
        if 0 < window < s:
            # The first queries of a sequence see less than a window w: all see w - w (w - 1) / 2s keys on average.
            masked = window - window * (window - 1) / (2 * s) + (window - 1) / 2
            keys = masked if causal else window - window * window / (4 * s)
            return Sequences(rank.micro_batch * queries / window, np.full(1, window), np.full(1, keys))
        return Sequences(rank.micro_batch * rank.context, queries, queries)
    share = (1 + 1 / rank.context) / 2 if causal else np.ones_like(rank.context)
    return Sequences(rank.micro_batch, queries, key_rank.sequence * share)
