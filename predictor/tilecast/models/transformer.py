"""Transformers as graphs: decoders (GPT, LLaMA …), encoders (BERT …), encoder-decoders (T5 …) and mixtures
of experts, all from the same layer.

Sources: FLOPs and activation bytes per layer follow Korthikanti et al., arXiv 2205.05198 (section 4, table 2),
generalised to grouped-query attention, gated MLPs, any MLP width and any element size; tensor parallelism is
Megatron's (arXiv 1909.08053), with the sequence-parallel variant of 2205.05198; experts follow Switch
Transformers (arXiv 2101.03961) with expert parallelism over data-parallel ranks; adapters follow LoRA (arXiv
2106.09685).

`Model.extra` of every transformer: `experts` of which each token visits `top_k`, in every `moe_every`-th layer after
the first `first_dense`, the other layers with an MLP of width `dense_ffn_hidden`; `shared_ffn_hidden`, an MLP beside
the experts that all tokens visit; for attention that does not reach everywhere `sliding_window` or `attention_chunk`
tokens, where every `global_every`-th layer sees all (none if it is not stated); `global_projections` further dense
layers that make the queries, keys and values of an encoder's tokens that see all (Longformer, arXiv 2004.05150, section
3.1); `activation_clamp`, the limit of an activation's inputs; and `tanh_gelu` where GELU is its tanh form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import numpy as np

from tilecast import frameworks
from tilecast.frameworks import Composed
from tilecast.graph import Block, Graph, KernelTable, Op, Phase, Shards, Transfer
from tilecast.models import grouped, layers
from tilecast.models.layers import Numerics
from tilecast.spec import Floats, Model, Workload

MOST_LAYERS = 4096
"""Of deeper stacks only the number of layers is kept, not where each kind stands."""
NORMED = (0.0, 1.0)
"""What of a product's operands is cast to FP8 where a norm comes before it (Transformer Engine, LayerNormLinear; a
compiler writes the norm's output so)."""
_PHASES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank sees of a micro-batch, as columns over shards, each (S,)."""

    micro_batch: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    sequence_parallel: Floats
    sequence: float
    """Full sequence length; this rank holds sequence / context of it."""

    @classmethod
    def of(cls, shards: Shards, sequence: float) -> Rank:
        tensor = shards.tensor.astype(float)
        return cls(
            shards.micro_batch.astype(float),
            tensor,
            shards.context.astype(float),
            shards.expert.astype(float),
            np.where((shards.sequence_parallel > 0) & (tensor > 1), 1.0, 0.0),
            float(sequence),
        )

    @property
    def tokens(self) -> Floats:
        return self.micro_batch * self.sequence / self.context

    @property
    def outer_tokens(self) -> Floats:
        """Tokens of the parts outside tensor parallelism (norms, residuals): spread by sequence parallelism."""
        return self.tokens / np.where(self.sequence_parallel > 0, self.tensor, 1.0)


def build(workload: Workload, shards: Shards) -> Graph:
    """The graph of a decoder or encoder, dense or with experts."""
    model = workload.model
    rank = Rank.of(shards, workload.sequence_length)
    return graph(workload, rank, rank, stack("layer", workload, rank, model.layers, causal=model.causal))


def build_encoder_decoder(workload: Workload, shards: Shards) -> Graph:
    """The graph of an encoder-decoder. `extra.decoder_layers` of the layers decode (half by default); the encoder reads
    `extra.encoder_length` and the decoder `extra.decoder_length` tokens (default: the sequence length)."""
    model = workload.model
    encoder = Rank.of(shards, model.extra.get("encoder_length", workload.sequence_length))
    decoder = Rank.of(shards, model.extra.get("decoder_length", workload.sequence_length))
    decoding = int(model.extra.get("decoder_layers", model.layers // 2))
    layers_ = stack("encoder-layer", workload, encoder, model.layers - decoding, causal=False)
    start = model.layers - decoding
    layers_ += stack("decoder-layer", workload, decoder, decoding, causal=True, memory=encoder, start=start)
    return graph(workload, encoder, decoder, layers_)


class Attend(Protocol):
    """Builds the attention half of a layer."""

    def __call__(self, name: str, workload: Workload, rank: Rank, *, key_rank: Rank, causal: bool) -> Part:
        """The part named `name` whose queries are those of `rank` and whose keys those of `key_rank`."""


def stack(
    name: str,
    workload: Workload,
    rank: Rank,
    depth: int,
    *,
    causal: bool,
    memory: Rank | None = None,
    attend: Attend | None = None,
    start: int = 0,
) -> tuple[Block, ...]:
    """`depth` layers as blocks of equal ones: with experts or without, attending locally or to everything. The first
    of them is the model's layer `start`."""
    extra = workload.model.extra
    experts = int(extra.get("experts", 0))
    every, dense = int(extra.get("moe_every", 1)), min(int(extra.get("first_dense", 0)), depth)
    reach = extra.get("sliding_window", 0.0) or extra.get("attention_chunk", 0.0)
    is_bounded = 0 < reach < rank.sequence
    far = int(extra.get("global_every", depth + 1)) if is_bounded else 1
    expert = depth // every - dense // every if experts else 0
    seeing = depth // far
    both = depth // math.lcm(every, far) - dense // math.lcm(every, far) if experts else 0
    kinds = {
        (False, False): seeing - both,
        (False, True): depth - expert - seeing + both,
        (True, False): both,
        (True, True): expert - both,
    }
    numbers = range(1, depth + 1) if depth <= MOST_LAYERS else ()
    blocks = []
    for (sparse, local), repeat in kinds.items():
        if not repeat:
            continue
        label = "-".join([*["local"] * local, *["expert"] * sparse, name])
        seen = workload if local or not is_bounded else _seeing_all(workload)
        chosen = experts if sparse else 0
        block = layer(label, seen, rank, repeat=repeat, causal=causal, memory=memory, experts=chosen, attend=attend)
        positions = tuple(
            start + number - 1
            for number in numbers
            if (experts > 0 and number % every == 0 and number > dense) is sparse and (number % far != 0) is local
        )
        blocks.append(replace(block, positions=positions))
    return tuple(blocks)


def _seeing_all(workload: Workload) -> Workload:
    extra = {**workload.model.extra, "sliding_window": 0.0, "attention_chunk": 0.0}
    return replace(workload, model=replace(workload.model, extra=extra))


def graph(workload: Workload, first: Rank, last: Rank, layers_: tuple[Block, ...]) -> Graph:
    """The usual embedding, these layers, and the usual head; `first` and `last` are what those two see."""
    return Graph(
        first=(embedding(workload, first),),
        layers=layers_,
        last=(_head(workload, last),),
        boundary_bytes=Numerics.of(workload).element * first.tokens / first.tensor * workload.model.hidden,
        shards=len(first.tensor),
        host_bytes_per_sample=16.0 * workload.sequence_length,
    )


def layer(
    name: str,
    workload: Workload,
    rank: Rank,
    *,
    repeat: int,
    causal: bool,
    experts: int = 0,
    memory: Rank | None = None,
    attend: Attend | None = None,
    feeds: bool = True,
) -> Block:
    """One transformer layer on one rank: self-attention, cross-attention where there is a `memory` to
    attend to, then where it `feeds` an MLP or experts. `attend` builds another self-attention than the usual one."""
    model, numerics = workload.model, Numerics.of(workload)
    parts = [(attend or attention)("attention", workload, rank, key_rank=rank, causal=causal)]
    if memory is not None:
        parts.append(attention("cross-attention", workload, rank, key_rank=memory, causal=False))
    if feeds:
        parts.append(_experts(workload, rank, experts) if experts else _mlp(workload, rank))
    ops = tuple(op for part in parts for op in part.ops)
    transfers = tuple(transfer for part in parts for transfer in part.transfers)
    parameters = sum((part.parameters for part in parts), np.zeros(1))
    frozen = np.zeros(1)
    if workload.lora_rank:
        adapters, added = _adapters(workload, [linear for part in parts for linear in part.linears])
        ops, frozen, parameters = ops + tuple(adapters), parameters, parameters + added
    copied = np.zeros(1)
    if workload.lora_rank and workload.frozen_bits < 16:
        calls = grouped.launches(workload, np.maximum(experts / rank.expert, 1.0))
        ops += tuple(_dequantized(workload, parts, calls))
        copied = numerics.element * _largest_quantized(parts, calls)
    inputs = numerics.element * rank.outer_tokens * model.hidden
    if numerics.frozen_input:
        read = sum((item.rows * item.inputs for part in parts for item in part.linears), np.zeros(1))
        parts.append(Part.keeping(numerics.frozen_input * read))
    without_scores = sum((part.kept - part.scores for part in parts), np.zeros(1))
    kept = np.stack(
        [
            sum((part.kept for part in parts), np.zeros(1)),
            sum((part.selected for part in parts), inputs) if numerics.saves_operators else without_scores,
            inputs,
        ]
    )
    gathered = sum((one.size_bytes for one in transfers if one.group == "context"), np.zeros(1))
    working = sum((part.kept for part in parts), np.zeros(1)) * 0.5 + np.where(rank.context > 1, gathered, 0.0)
    return Block(
        name,
        repeat,
        ops,
        parameters=parameters,
        activation_bytes=kept,
        transfers=transfers,
        expert_parameters=sum((part.expert_parameters for part in parts), np.zeros(1)),
        working_bytes=working,
        copied_bytes=copied,
        frozen_parameters=frozen,
        remembered_bytes=numerics.element * memory.outer_tokens * _memory_width(model) if memory else np.zeros(1),
    )


@dataclass(frozen=True, slots=True)
class Linear:
    """A dense layer that an adapter can stand beside: rows, inputs and outputs on one rank, each (S,) or one number."""

    name: str
    rows: Floats
    inputs: Floats | float
    outputs: Floats | float
    modules: float = 1.0
    """Over how many modules, each with a weight of the same size, the outputs spread."""


@dataclass(frozen=True, slots=True)
class Part:
    """Half a layer: operators, transfers, and what it keeps for the backward pass (`kept`, of which the
    attention scores are `scores`; or `selected` where attention and every second product are kept, arXiv 2410.06511,
    section 2.3), columns of shape (S,)."""

    ops: list[Op]
    transfers: list[Transfer]
    parameters: Floats
    kept: Floats
    scores: Floats
    expert_parameters: Floats
    selected: Floats
    linears: tuple[Linear, ...] = ()
    """Where adapters go."""

    @classmethod
    def keeping(cls, kept: Floats) -> Part:
        """What layers keep besides their parts: so many bytes, (S,)."""
        none = np.zeros(1)
        return cls([], [], none, kept, none, none, none)


def _memory_width(model: Model) -> float:
    """Width of the tokens that cross-attention reads."""
    return model.extra.get("memory_width", model.hidden)


def attention(name: str, workload: Workload, rank: Rank, *, key_rank: Rank, causal: bool) -> Part:
    """Multi-head attention with as many key and value heads as the model has, of `rank` to the tokens of `key_rank`."""
    model, numerics = workload.model, Numerics.of(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    width = model.heads * model.head_dim
    kv_width = model.kv_heads * model.head_dim
    read = h if key_rank is rank else _memory_width(model)
    tokens, outer = rank.tokens, rank.outer_tokens
    heads = model.heads / t
    kv_heads = np.maximum(model.kv_heads / t, 1.0)
    trainable = not numerics.frozen
    dropout = model.dropout and workload.training

    ops = layers.norm(f"{name}.norm", numerics, outer, h, rms=model.rms_norm)
    if key_rank is rank:
        qkv = (width + 2 * kv_heads * t * model.head_dim) / t
        ops += layers.linear(f"{name}.qkv", numerics, tokens, h, qkv, bias=model.bias, trainable=trainable, cast=NORMED)
    else:
        ops += layers.linear(f"{name}.query", numerics, tokens, h, width / t, bias=model.bias, trainable=trainable)
        ops += layers.linear(
            f"{name}.key-value", numerics, key_rank.tokens, read, 2 * kv_width / t, bias=model.bias, trainable=trainable
        )
    if model.rotary:
        rotated = tokens * (width + kv_width) / t
        # Eager: the halves turned and joined, two products and their sum (Hugging Face, apply_rotary_pos_emb), as many
        # bytes as a complex product in FP32 between casts (torchtitan); its gradient alike.
        ops += layers.pointwise(f"{name}.rotary", numerics, rotated, kernels=5, backward=(1.0, 1.0))
    if not numerics.flash:
        ops += layers.pointwise(f"{name}.transpose", numerics, tokens * width / t, kernels=3, backward=(1.0, 1.0))
    seen = Span.of(workload, rank, key_rank, causal)
    ops += layers.attention(
        name,
        numerics,
        batch=seen.batch,
        heads=heads,
        kv_heads=kv_heads,
        seq_q=seen.queries,
        seq_kv=seen.keys,
        head_dim=model.head_dim,
        causal=causal,
        dropout=dropout,
    )
    spread = (1.0, outer / tokens)
    ops += layers.linear(
        f"{name}.output", numerics, tokens, width / t, h, bias=model.bias, trainable=trainable, cast=spread
    )
    ops += residual(f"{name}.residual", numerics, outer * h, dropout)

    statistic = 4.0 * heads * tokens
    score = heads * tokens * key_rank.sequence * ((2 * e + 1 if dropout else e) + numerics.score_extra)
    narrow = numerics.product_input
    kept = (
        (e + numerics.norm_extra + narrow) * outer * h  # the norm's input and the projection's
        + e * tokens * (2 * width + 2 * kv_heads * t * model.head_dim) / t  # q, k, v and the output's input
        + (narrow if narrow < e else 0.0) * tokens * width / t  # the latter again as the product reads it
        + (outer * h if dropout else 0.0)
        + (statistic if numerics.flash else score)
    )
    parameters = (width * h * 2 + 2 * kv_width * read) / t + norm_parameters(model)
    if model.bias:
        parameters = parameters + (width + 2 * kv_width) / t + h
    if (further := model.extra.get("global_projections", 0.0)) and key_rank is rank and not causal:
        ops += layers.linear(f"{name}.global", numerics, tokens, h, further * width / t, trainable=trainable)
        parameters = parameters + further * width * h / t
    transfers = tensor_transfers(name, workload, rank)
    if key_rank is rank:
        keys = numerics.element * tokens * 2 * kv_heads * model.head_dim
        transfers += key_transfers(name, keys * rank.context)
    linears = [Linear(f"{name}.output", tokens, width / t, float(h))]
    if key_rank is rank:
        linears.append(Linear(f"{name}.qkv", tokens, float(h), (width + 2 * kv_width) / t, 1 + 2 * kv_width / width))
    else:
        linears.append(Linear(f"{name}.query", tokens, float(h), width / t))
        linears.append(Linear(f"{name}.key-value", key_rank.tokens, float(read), 2 * kv_width / t))
    hidden = np.zeros(1) if numerics.flash else score
    selected = e * tokens * (2 * width / t + kv_heads * model.head_dim) + statistic  # q, v and what attention wrote
    return Part(ops, transfers, parameters, kept, hidden, np.zeros(1), selected, tuple(linears))


def key_transfers(name: str, keys: Floats) -> tuple[Transfer, Transfer]:
    """Keys and values of all context ranks, gathered forward; again with their gradients backward."""
    return (
        Transfer(f"{name}.keys", "all_gather", "context", keys, "forward"),
        Transfer(f"{name}.keys.gradient", "all_gather", "context", 2 * keys, "backward"),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences of a rank as its attention kernel sees them: how many, their queries and their keys, each (S,)."""

    batch: Floats
    queries: Floats
    keys: Floats

    @classmethod
    def of(cls, workload: Workload, rank: Rank, key_rank: Rank, causal: bool) -> Span:
        """What the queries of `rank` see of the tokens of `key_rank`.

        Under context parallelism ranks hold one early and one late piece of a causal sequence (zig-zag), so that all
        see half of it: as if their queries ended a prefix of (1 + 1/c) / 2 of the sequence. A fused kernel skips what a
        window or a chunk hides: it is given pieces of that length, whose queries see as many keys on average as they
        do in truth (without a causal mask a window reaches as far ahead as back). An unfused one computes the whole
        matrix and masks it.
        """
        queries = rank.sequence / rank.context
        chunk, window = (workload.model.extra.get(key, 0.0) for key in ("attention_chunk", "sliding_window"))
        is_skipping = key_rank is rank and Numerics.of(workload).flash
        if is_skipping and 0 < chunk < rank.sequence:
            return cls(rank.micro_batch * queries / chunk, np.full(1, chunk), np.full(1, chunk))
        if is_skipping and 0 < window < rank.sequence and not causal:
            keys = window - window * window / (4 * rank.sequence)
            return cls(rank.micro_batch * queries / window, np.full(1, window), np.full(1, keys))
        if is_skipping and 0 < window < rank.sequence:
            # The first queries of a sequence see less than a window: w - w (w - 1) / 2s keys on average.
            keys = window - window * (window - 1) / (2 * rank.sequence) + (window - 1) / 2
            return cls(rank.micro_batch * queries / window, np.full(1, window), np.full(1, keys))
        share = (1 + 1 / rank.context) / 2 if causal else np.ones_like(rank.context)
        return cls(rank.micro_batch, queries, key_rank.sequence * share)


def _mlp(workload: Workload, rank: Rank) -> Part:
    model, numerics = workload.model, Numerics.of(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    f = model.extra.get("dense_ffn_hidden", model.ffn_hidden)
    tokens, outer = rank.tokens, rank.outer_tokens
    dropout = model.dropout and workload.training
    ups = 2.0 if model.gated_mlp else 1.0
    trainable = not numerics.frozen
    ops = layers.norm("mlp.norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.linear("mlp.up", numerics, tokens, h, ups * f / t, bias=model.bias, trainable=trainable, cast=NORMED)
    ops += _activation("mlp.activation", workload, numerics, tokens * f / t)
    spread = (1.0, outer / tokens)
    ops += layers.linear("mlp.down", numerics, tokens, f / t, h, bias=model.bias, trainable=trainable, cast=spread)
    ops += residual("mlp.residual", numerics, outer * h, dropout)
    narrow = numerics.product_input
    kept = (
        (e + numerics.norm_extra + narrow) * outer * h
        + tokens * (e * (_mlp_tensors(model, numerics) - 1) + narrow) * f / t
        + (outer * h if dropout else 0.0)
    )
    parameters = (ups + 1) * h * f / t + norm_parameters(model)
    if model.bias:
        parameters = parameters + ups * f / t + h
    linears = (Linear("mlp.up", tokens, float(h), ups * f / t, ups), Linear("mlp.down", tokens, f / t, float(h)))
    none = np.zeros(1)
    transfers = tensor_transfers("mlp", workload, rank)
    return Part(ops, transfers, parameters, kept, none, none, e * tokens * f / t, linears)


def _mlp_tensors(model: Model, numerics: Numerics) -> int:
    """Tensors of the MLP's width that are kept: the activation's input and output; with a gate its two inputs, their
    product, and where it is not one kernel the activated one."""
    if not model.gated_mlp:
        return 2
    return 3 if numerics.fused_gate else 4


def _experts(workload: Workload, rank: Rank, experts: int) -> Part:
    """A router, then `top_k` of the experts for every token, and the shared MLP for all. Experts are whole (their
    tensor-parallel size is one, as Megatron folds them over tensor and data ranks), so a rank computes `top_k` experts
    for its part of the tokens when the router is balanced."""
    model, numerics = workload.model, Numerics.of(workload)
    e, h, f, t = numerics.element, model.hidden, model.ffn_hidden, rank.tensor
    outer = rank.outer_tokens
    tokens = rank.tokens / t
    chosen = model.extra.get("top_k", 1.0)
    slots = tokens * chosen * model.extra.get("capacity_factor", 1.0)
    local = experts / rank.expert
    ups = 2.0 if model.gated_mlp else 1.0
    shared = model.extra.get("shared_ffn_hidden", 0.0)
    calls = grouped.launches(workload, local)

    ops = layers.norm("experts.norm", numerics, outer, h, rms=model.rms_norm)
    trainable = not numerics.frozen
    ops += layers.linear("experts.router", numerics.unquantized, tokens, h, float(experts), trainable=trainable)
    ops += layers.pointwise("experts.gate", numerics, tokens * experts, kernels=4, absorbed=False)
    ops += layers.pointwise("experts.dispatch", numerics, slots * h, kernels=2, absorbed=False, backward=(1.0, 1.0))
    ops += grouped.linear("up", numerics, local, slots, (h, ups * f), calls, bias=model.bias)
    ops += _activation("experts.activation", workload, numerics, slots * f)
    ops += grouped.linear("down", numerics, local, slots, (f, h), calls)
    if model.bias:
        ops += grouped.weighted_bias(numerics, slots * h, calls)
    ops += layers.pointwise("experts.combine", numerics, slots * h, kernels=2, absorbed=False, backward=(1.0, 1.0))
    linears: tuple[Linear, ...] = ()
    if shared:
        ops += layers.linear("experts.shared-up", numerics, tokens, h, ups * shared, trainable=not numerics.frozen)
        ops += _activation("experts.shared-activation", workload, numerics, tokens * shared)
        ops += layers.linear("experts.shared-down", numerics, tokens, shared, h, trainable=not numerics.frozen)
        linears = (
            Linear("experts.shared-up", tokens, float(h), ups * shared, ups),
            Linear("experts.shared-down", tokens, shared, float(h)),
        )
    ops += residual("experts.residual", numerics, outer * h, model.dropout and workload.training)
    wide = _mlp_tensors(model, numerics)
    narrow = numerics.product_input
    # What an expert's products read, as they read it, its activation's inputs, and what a kept copy of its output is
    # for, the gradient of the weights: hand-written kernels multiply them in before the second product.
    slot = narrow * (h + f) + e * (wide - 1) * f + (0.0 if workload.fused_kernels else e * h)
    kept = (2 * e + numerics.norm_extra) * outer * h + slots * slot + e * tokens * wide * shared
    selected = e * slots * (h + f) + e * tokens * shared
    one = (ups + 1) * h * f
    parameters = one * local + h * experts + (ups + 1) * h * shared + norm_parameters(model)
    transfers = [
        Transfer(f"experts.{name}", "all_to_all", "expert", e * slots * h, phase, fanout=chosen)
        for phase in _PHASES
        for name in ("dispatch", "combine")
    ]
    return Part(ops, transfers, parameters, kept, np.zeros(1), one * local, selected, linears)


def _activation(name: str, workload: Workload, numerics: Numerics, elements: Floats) -> list[Op]:
    model = workload.model
    if model.gated_mlp:
        one = layers.pointwise(name, numerics, elements, reads=2.0, backward=(3.0, 2.0))
        # Eager code activates the gate and multiplies, backward a kernel for either factor and one for the activation.
        apart = layers.pointwise(name, numerics, elements, reads=3.0, writes=2.0, backward=(6.0, 3.0))
        apart = [replace(op, launches=2.0 if op.phase == "forward" else 3.0) for op in apart]
        ops = layers.fused_into("elementwise", apart, one)
        if model.extra.get("activation_clamp") and workload.execution not in ("compiled", "xla"):
            # Both inputs limited, one after the other, and joined again; backward a mask for each, and the same copies.
            ops += layers.pointwise(f"{name}.clamp", numerics, elements, reads=4.0, writes=4.0, backward=(6.0, 4.0))
        return ops
    kind: Composed = "tanh-gelu" if model.extra.get("tanh_gelu") else "gelu"
    return layers.pointwise(name, numerics, elements, kind=kind)


def residual(name: str, numerics: Numerics, elements: Floats, dropout: bool) -> list[Op]:
    """Dropout and the residual addition. The gradient of an addition is free; that of dropout is a pass, and
    where two branches meet their gradients are summed."""
    sum_ = layers.pointwise(name, numerics, elements, reads=2.0, backward=(2.0, 1.0))
    if not dropout:
        return sum_
    masked = layers.pointwise(
        f"{name}.dropout", numerics, elements, mask_bytes=1.0, backward=(1.0, 1.0), kind="dropout"
    )
    both = layers.pointwise(name, numerics, elements, reads=2.0, mask_bytes=1.0, backward=(2.0, 2.0))
    return layers.fused_into("elementwise", masked + sum_, both)


def embedding(workload: Workload, rank: Rank) -> Block:
    """Token and position embeddings, with what follows before the first layer. Frozen ones have no backward pass."""
    model, numerics = workload.model, Numerics.of(workload)
    numerics = replace(numerics, training=numerics.training and not numerics.frozen)
    e, h = numerics.element, model.hidden
    ops = layers.embedding("embedding.tokens", numerics, rank.tokens, h)
    if model.positions:
        ops += layers.pointwise("embedding.positions", numerics, rank.outer_tokens * h, reads=2.0, backward=(1.0, 0.0))
    if model.extra.get("embedding_norm"):
        ops += layers.norm("embedding.norm", numerics, rank.outer_tokens, h, rms=model.rms_norm)
    if model.dropout and workload.training:
        ops += layers.pointwise("embedding.dropout", numerics, rank.outer_tokens * h, mask_bytes=1.0)
    kept = e * rank.outer_tokens * h + 8.0 * rank.tokens
    width = model.extra.get("embedding_hidden", h)
    parameters = model.vocab * width / rank.tensor + model.positions * width
    if width != h:
        parameters = parameters + width * h + h
        ops += layers.linear("embedding.projection", numerics, rank.tokens, width, h)
    parameters = parameters + model.extra.get("token_types", 0.0) * width
    if model.extra.get("embedding_norm"):
        parameters = parameters + norm_parameters(model)
    transfers = (Transfer("embedding.tokens", "all_reduce", "tensor", e * rank.tokens * h, "forward"),)
    return Block(
        "embedding", 1, tuple(ops), parameters * np.ones_like(rank.tensor), np.stack([kept] * 3), transfers,
        frozen_parameters=frozen(workload, parameters),
    )  # fmt: skip


def frozen(workload: Workload, parameters: Floats) -> Floats:
    """Which parameters of a block without adapters have no gradient: all under LoRA, else none, (S,)."""
    return parameters if workload.lora_rank else np.zeros(1)


def _head(workload: Workload, rank: Rank) -> Block:
    """The final norm, the output projection on `extra.head_share` of the tokens (all by default) and the loss; or,
    with `extra.classes`, a classifier on one pooled token of each sample."""
    model, numerics = workload.model, Numerics.of(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    classes = model.extra.get("classes", 0.0)
    rows = rank.micro_batch if classes else rank.tokens * model.extra.get("head_share", 1.0)
    vocab = classes * np.ones_like(t) if classes else model.extra.get("head_vocab", model.vocab) / t
    trainable = not numerics.frozen
    ops: list[Op] = []
    parameters = np.zeros_like(t)
    if model.extra.get("final_norm", 1.0):
        ops += layers.norm("head.norm", numerics, rank.outer_tokens, h, rms=model.rms_norm)
        parameters = parameters + norm_parameters(model)
    if model.extra.get("head_transform"):
        ops += layers.linear("head.transform", numerics, rows, h, h, bias=True, trainable=trainable)
        ops += layers.pointwise("head.activation", numerics, rows * h)
        ops += layers.norm("head.transform-norm", numerics, rows, h, rms=False)
        parameters = parameters + h * h + h + 2 * h + model.vocab / t
    if model.extra.get("pooler"):
        ops += layers.linear("head.pooler", numerics, rank.micro_batch, h, h, bias=True, trainable=trainable)
        parameters = parameters + h * h + h + 2 * h + 2
    ops += layers.linear("head.logits", numerics.unquantized, rows, h, vocab, trainable=trainable)
    if workload.training:
        ops += layers.cross_entropy("head.loss", numerics, rows, vocab)
    if classes:
        parameters = parameters + classes * h + classes
    elif not model.tied_embeddings or frameworks.of(workload).unties_embeddings:
        parameters = parameters + model.vocab * h / t
    logit_kept, logit_working = layers.logit_bytes(numerics)
    kept = e * rank.outer_tokens * h * 2 + logit_kept * rows * vocab
    transfers = (Transfer("head.loss", "all_reduce", "tensor", 8.0 * rows, "forward", count=2.0),)
    return Block(
        "head", 1, tuple(ops), parameters, np.stack([kept] * 3), transfers, working_bytes=logit_working * rows * vocab,
        frozen_parameters=frozen(workload, parameters),
    )  # fmt: skip


def tensor_transfers(name: str, workload: Workload, rank: Rank) -> list[Transfer]:
    """What Megatron's tensor parallelism exchanges around half a layer: one all-reduce forward and one
    backward, or with sequence parallelism an all-gather and a reduce-scatter each way, and one more gather
    backward for the weight gradient's input. What a product reads in FP8 is gathered so (Transformer Engine,
    module/layernorm_linear.py and module/base.py: grad_output_preprocess)."""
    numerics = Numerics.of(workload)
    size = numerics.element * rank.tokens * workload.model.hidden
    plain = np.where(rank.sequence_parallel > 0, 0.0, size)
    spread = size - plain
    gathered = spread * numerics.product_input / numerics.element
    found: list[Transfer] = [
        Transfer(f"{name}.reduce", "all_reduce", "tensor", plain, "forward"),
        Transfer(f"{name}.reduce.gradient", "all_reduce", "tensor", plain, "backward"),
    ]
    if spread.any():
        found += [
            Transfer(f"{name}.gather", "all_gather", "tensor", gathered, "forward"),
            Transfer(f"{name}.scatter", "reduce_scatter", "tensor", spread, "forward"),
            Transfer(f"{name}.gather.gradient", "all_gather", "tensor", gathered, "backward", count=2.0),
            Transfer(f"{name}.scatter.gradient", "reduce_scatter", "tensor", spread, "backward"),
        ]
    return found


def norm_parameters(model: Model) -> float:
    """Parameters of one norm over the hidden state: a weight, and where it is no RMS norm a bias."""
    return float(model.hidden if model.rms_norm else 2 * model.hidden)


def _dequantized(workload: Workload, parts: Sequence[Part], calls: Floats) -> list[Op]:
    """What a product with a quantized weight runs before it, forward and for the gradient of its input: the weight is
    written in 16 bits (bitsandbytes, autograd/_functions.py MatMul4Bit; torchao, dtypes/nf4tensor.py LinearNF4). A rank
    writes all experts that it holds, as their two products take so many `calls` each."""
    numerics, bits = Numerics.of(workload), frameworks.of(workload).quantized_bits
    moved = {"read_bytes": bits / 8, "written_bytes": numerics.element}
    weights = [(item.name, item.inputs * item.outputs, np.ones(1)) for part in parts for item in part.linears]
    weights += [("experts", part.expert_parameters, 2 * calls) for part in parts if part.expert_parameters.any()]
    return [
        Op(
            f"{name}.dequantize",
            KernelTable.of("elementwise", numerics.vector, elements=elements, **moved),
            phase,
            launches=launches,
        )
        for name, elements, launches in weights
        for phase in (_PHASES if workload.training else _PHASES[:1])
    ]


def _largest_quantized(parts: Sequence[Part], calls: Floats) -> Floats:
    """Elements of the largest weight that is written in 16 bits at once, (S,): MatMul4Bit's forward and backward call
    dequantize_4bit on the weight of their one product and keep nothing of it, and LinearNF4 does alike."""
    sizes = [item.inputs * item.outputs / item.modules for part in parts for item in part.linears]
    experts = [part.expert_parameters / (2 * calls) for part in parts]
    return np.asarray(reduce(np.maximum, [*sizes, *experts], np.zeros(1)))


def _adapters(workload: Workload, linears: Sequence[Linear]) -> tuple[list[Op], Floats]:
    """LoRA (arXiv 2106.09685, section 4.1): a down- and an up-projection of small rank beside each dense layer of
    attention and MLP, and their parameters, (S,). Routers and routed experts have none."""
    numerics, rank = Numerics.of(workload), float(workload.lora_rank)
    ops: list[Op] = []
    parameters = np.zeros(1)
    for item in linears:
        ops += layers.linear(f"lora.{item.name}.down", numerics, item.rows, item.inputs, rank)
        ops += layers.linear(f"lora.{item.name}.up", numerics, item.rows, rank, item.outputs)
        ops += layers.pointwise(f"lora.{item.name}.add", numerics, item.rows * item.outputs, reads=2.0)
        parameters = parameters + rank * (item.inputs + item.outputs)
    return ops, parameters
