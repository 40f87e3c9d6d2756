"""Transformers as graphs: decoders (GPT, LLaMA …), encoders (BERT …), encoder-decoders (T5 …) and mixtures
of experts, all from the same layer.

Sources: FLOPs and activation bytes per layer follow Korthikanti et al., arXiv 2205.05198 (section 4, table 2),
generalised to grouped-query attention, gated MLPs, any MLP width and any element size; tensor parallelism is
Megatron's (arXiv 1909.08053), with the sequence-parallel variant of 2205.05198; experts follow Switch
Transformers (arXiv 2101.03961) with expert parallelism over data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast.graph import Block, Graph, KernelTable, Op, Phase, Shards, Transfer
from tilecast.models import layers
from tilecast.models.layers import Numerics
from tilecast.spec import Floats, Model, Workload

_PHASES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank sees of a micro-batch, as columns over shards, each (S,)."""

    micro_batch: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    sequence_parallel: Floats
    sequence: float
    """Full sequence length; this rank holds sequence / context of it."""

    @classmethod
    def of(cls, shards: Shards, sequence: float) -> _Rank:
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
    rank = _Rank.of(shards, workload.sequence_length)
    return _graph(workload, rank, rank, _stack("layer", workload, rank, model.layers, causal=model.causal))


def build_encoder_decoder(workload: Workload, shards: Shards) -> Graph:
    """The graph of an encoder-decoder. `extra.decoder_layers` of the layers decode (half by default); the decoder
    reads `extra.decoder_length` tokens (default: the sequence length)."""
    model = workload.model
    encoder = _Rank.of(shards, workload.sequence_length)
    decoder = _Rank.of(shards, model.extra.get("decoder_length", workload.sequence_length))
    decoding = int(model.extra.get("decoder_layers", model.layers // 2))
    layers_ = _stack("encoder-layer", workload, encoder, model.layers - decoding, causal=False)
    layers_ += _stack("decoder-layer", workload, decoder, decoding, causal=True, memory=encoder)
    return _graph(workload, encoder, decoder, layers_)


def _stack(
    name: str, workload: Workload, rank: _Rank, depth: int, *, causal: bool, memory: _Rank | None = None
) -> tuple[Block, ...]:
    """`depth` layers, of which every `extra.moe_every`-th has experts where the model has any."""
    experts = int(workload.model.extra.get("experts", 0))
    sparse = depth // int(workload.model.extra.get("moe_every", 1)) if experts else 0
    blocks = []
    if depth - sparse:
        blocks.append(layer(name, workload, rank, repeat=depth - sparse, causal=causal, memory=memory))
    if sparse:
        expert_name = f"expert-{name}"
        blocks.append(layer(expert_name, workload, rank, repeat=sparse, causal=causal, memory=memory, experts=experts))
    return tuple(blocks)


def _graph(workload: Workload, first: _Rank, last: _Rank, layers_: tuple[Block, ...]) -> Graph:
    return Graph(
        first=(_embedding(workload, first),),
        layers=layers_,
        last=(_head(workload, last),),
        boundary_bytes=Numerics.of(workload).element * first.tokens / first.tensor * workload.model.hidden,
        shards=len(first.tensor),
        host_bytes_per_sample=16.0 * workload.sequence_length,
    )


def layer(
    name: str,
    workload: Workload,
    rank: _Rank,
    *,
    repeat: int,
    causal: bool,
    experts: int = 0,
    memory: _Rank | None = None,
) -> Block:
    """One transformer layer on one rank: self-attention, cross-attention where there is a `memory` to
    attend to, then an MLP or experts."""
    model, numerics = workload.model, Numerics.of(workload)
    parts = [_attention("attention", workload, rank, key_rank=rank, causal=causal)]
    if memory is not None:
        parts.append(_attention("cross-attention", workload, rank, key_rank=memory, causal=False))
    parts.append(_experts(workload, rank, experts) if experts else _mlp(workload, rank))
    ops = tuple(op for part in parts for op in part.ops)
    transfers = tuple(transfer for part in parts for transfer in part.transfers)
    if workload.lora_rank:
        ops += tuple(_adapters(workload, rank))
    kept = np.stack(
        [
            sum((part.kept for part in parts), np.zeros(1)),
            sum((part.kept - part.scores for part in parts), np.zeros(1)),
            numerics.element * rank.outer_tokens * model.hidden,
        ]
    )
    return Block(
        name,
        repeat,
        ops,
        parameters=sum((part.parameters for part in parts), np.zeros(1)),
        activation_bytes=kept,
        transfers=transfers,
        expert_parameters=sum((part.expert_parameters for part in parts), np.zeros(1)),
        working_bytes=sum((part.kept for part in parts), np.zeros(1)) * 0.5,
        trainable_share=_trainable_share(workload),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Half a layer: operators, transfers, and what it keeps for the backward pass (`kept`, of which the
    attention scores are `scores`), columns of shape (S,)."""

    ops: list[Op]
    transfers: list[Transfer]
    parameters: Floats
    kept: Floats
    scores: Floats
    expert_parameters: Floats


def _attention(name: str, workload: Workload, rank: _Rank, *, key_rank: _Rank, causal: bool) -> _Part:
    model, numerics = workload.model, Numerics.of(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    width = model.heads * model.head_dim
    kv_width = model.kv_heads * model.head_dim
    tokens, outer = rank.tokens, rank.outer_tokens
    heads = model.heads / t
    kv_heads = np.maximum(model.kv_heads / t, 1.0)
    trainable = not numerics.frozen
    dropout = model.dropout and workload.training

    remembered = model.extra.get("memory_length", 0.0) if key_rank is rank else 0.0
    ops = layers.norm(f"{name}.norm", numerics, outer, h, rms=model.rms_norm)
    if remembered:
        ops += layers.linear(
            f"{name}.memory", numerics, rank.micro_batch * remembered, h, 2 * kv_width / t, trainable=trainable
        )
        ops += _relative_positions(name, numerics, rank, model, heads, remembered)
    if key_rank is rank:
        qkv = (width + 2 * kv_heads * t * model.head_dim) / t
        ops += layers.linear(f"{name}.qkv", numerics, tokens, h, qkv, bias=model.bias, trainable=trainable)
    else:
        ops += layers.linear(f"{name}.query", numerics, tokens, h, width / t, bias=model.bias, trainable=trainable)
        ops += layers.linear(
            f"{name}.key-value", numerics, key_rank.tokens, h, 2 * kv_width / t, bias=model.bias, trainable=trainable
        )
    if model.rotary:
        rotated = tokens * (width + kv_width) / t
        ops += layers.pointwise(f"{name}.rotary", numerics, rotated, kernels=3, backward=(1.0, 1.0))
    if not numerics.flash:
        ops += layers.pointwise(f"{name}.transpose", numerics, tokens * width / t, kernels=3, backward=(1.0, 1.0))
    ops += layers.attention(
        name,
        numerics,
        batch=rank.micro_batch,
        heads=heads,
        kv_heads=kv_heads,
        seq_q=rank.sequence / rank.context,
        seq_kv=_keys(rank, key_rank.sequence + remembered, causal),
        head_dim=model.head_dim,
        causal=causal,
        dropout=dropout,
    )
    ops += layers.linear(f"{name}.output", numerics, tokens, width / t, h, bias=model.bias, trainable=trainable)
    ops += _residual(f"{name}.residual", numerics, outer * h, dropout)

    statistic = 4.0 * heads * tokens
    score = heads * tokens * (key_rank.sequence + remembered) * (2 * e + 1 if dropout else e)
    kept = (
        2 * e * outer * h  # the norm's input and the projection's
        + e * tokens * (2 * width + 2 * kv_heads * t * model.head_dim) / t  # q, k, v and the output's input
        + (outer * h if dropout else 0.0)
        + (statistic if numerics.flash else score)
    )
    parameters = (width * h * 2 + 2 * kv_width * h) / t + _norm_parameters(model)
    if model.bias:
        parameters = parameters + (width + 2 * kv_width) / t + h
    transfers = _tensor_transfers(name, workload, rank)
    if key_rank is rank:
        keys = numerics.element * tokens * 2 * kv_heads * model.head_dim
        transfers += [
            Transfer(f"{name}.keys", "all_gather", "context", keys * rank.context, "forward"),
            Transfer(f"{name}.keys.gradient", "all_gather", "context", 2 * keys * rank.context, "backward"),
        ]
    return _Part(ops, transfers, parameters, kept, np.zeros(1) if numerics.flash else score, np.zeros(1))


def _keys(rank: _Rank, sequence: float, causal: bool) -> Floats:
    """Keys that the queries of a rank attend to. Under context parallelism ranks hold one early and one late piece of a
    causal sequence (zig-zag), so that all see half of it: as if their queries ended a prefix of
    (1 + 1/c) / 2 of the sequence."""
    share = (1 + 1 / rank.context) / 2 if causal else np.ones_like(rank.context)
    return sequence * share


def _relative_positions(
    name: str, numerics: Numerics, rank: _Rank, model: Model, heads: Floats, remembered: float
) -> list[Op]:
    """Transformer-XL's position scores (arXiv 1901.02860, section 3.3): a second query-by-position product of the
    size of the scores, shifted and added to them."""
    keys = rank.sequence + remembered
    matrices = rank.micro_batch * heads
    ops = []
    shapes: list[tuple[float, float, float, Phase]] = [(rank.sequence, keys, model.head_dim, "forward")]
    if numerics.training:
        shapes += [
            (rank.sequence, model.head_dim, keys, "backward"),
            (keys, model.head_dim, rank.sequence, "backward"),
        ]
    for m, n, k, phase in shapes:
        table = KernelTable.of("gemm", numerics.matrix, batch=matrices, m=m, n=n, k=k)
        ops.append(Op(f"{name}.positions", table, phase))
    scores = matrices * rank.sequence * keys
    return ops + layers.pointwise(f"{name}.shift", numerics, scores, kernels=3, backward=(1.0, 1.0), absorbed=False)


def _mlp(workload: Workload, rank: _Rank) -> _Part:
    model, numerics = workload.model, Numerics.of(workload)
    e, h, f, t = numerics.element, model.hidden, model.ffn_hidden, rank.tensor
    tokens, outer = rank.tokens, rank.outer_tokens
    dropout = model.dropout and workload.training
    ups = 2.0 if model.gated_mlp else 1.0
    trainable = not numerics.frozen
    ops = layers.norm("mlp.norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.linear("mlp.up", numerics, tokens, h, ups * f / t, bias=model.bias, trainable=trainable)
    ops += _activation("mlp.activation", workload, numerics, tokens * f / t)
    ops += layers.linear("mlp.down", numerics, tokens, f / t, h, bias=model.bias, trainable=trainable)
    ops += _residual("mlp.residual", numerics, outer * h, dropout)
    kept = 2 * e * outer * h + e * tokens * (ups + 1) * f / t + (outer * h if dropout else 0.0)
    parameters = (ups + 1) * h * f / t + _norm_parameters(model)
    if model.bias:
        parameters = parameters + ups * f / t + h
    return _Part(ops, _tensor_transfers("mlp", workload, rank), parameters, kept, np.zeros(1), np.zeros(1))


def _experts(workload: Workload, rank: _Rank, experts: int) -> _Part:
    """A router, then `top_k` of the experts for every token. Experts are whole (their tensor-parallel size is one, as
    Megatron folds them over tensor and data ranks), so a rank computes `top_k` experts for its part of the
    tokens when the router is balanced."""
    model, numerics = workload.model, Numerics.of(workload)
    e, h, f, t = numerics.element, model.hidden, model.ffn_hidden, rank.tensor
    outer = rank.outer_tokens
    tokens = rank.tokens / t
    chosen = model.extra.get("top_k", 1.0)
    slots = tokens * chosen * model.extra.get("capacity_factor", 1.0)
    local = experts / rank.expert
    ups = 2.0 if model.gated_mlp else 1.0
    shared = model.extra.get("shared_ffn_hidden", 0.0)

    def grouped(label: str, inputs: float, outputs: float) -> list[Op]:
        rows = np.maximum(slots / local, 1.0)
        found = layers.linear(f"experts.{label}", numerics, rows, inputs, outputs, trainable=not numerics.frozen)
        return [_batched(op, local) for op in found]

    ops = layers.norm("experts.norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.linear("experts.router", numerics, tokens, h, float(experts), trainable=not numerics.frozen)
    ops += layers.pointwise("experts.gate", numerics, tokens * experts, kernels=4, absorbed=False)
    ops += layers.pointwise("experts.dispatch", numerics, slots * h, kernels=2, absorbed=False, backward=(1.0, 1.0))
    ops += grouped("up", h, ups * f)
    ops += _activation("experts.activation", workload, numerics, slots * f)
    ops += grouped("down", f, h)
    ops += layers.pointwise("experts.combine", numerics, slots * h, kernels=2, absorbed=False, backward=(1.0, 1.0))
    if shared:
        ops += layers.linear("experts.shared-up", numerics, tokens, h, ups * shared)
        ops += _activation("experts.shared-activation", workload, numerics, tokens * shared)
        ops += layers.linear("experts.shared-down", numerics, tokens, shared, h)
    ops += _residual("experts.residual", numerics, outer * h, model.dropout and workload.training)
    kept = 2 * e * outer * h + e * slots * (2 * h + (ups + 1) * f) + e * tokens * (ups + 1) * shared
    one = (ups + 1) * h * f
    parameters = one * local + h * experts + (ups + 1) * h * shared + _norm_parameters(model)
    transfers = [
        Transfer(f"experts.{name}", "all_to_all", "expert", e * slots * h, phase, fanout=chosen)
        for phase in _PHASES
        for name in ("dispatch", "combine")
    ]
    return _Part(ops, transfers, parameters, kept, np.zeros(1), one * local)


def _batched(op: Op, batch: Floats) -> Op:
    """The same GEMM for each of `batch` experts at once (a grouped GEMM)."""
    dims = op.table.dims.copy()
    dims[:, 0] = batch
    return replace(op, table=replace(op.table, dims=dims))


def _activation(name: str, workload: Workload, numerics: Numerics, elements: Floats) -> list[Op]:
    model = workload.model
    kernels = int(model.extra.get("activation_kernels", 1))
    if model.gated_mlp:
        return layers.pointwise(name, numerics, elements, reads=2.0, kernels=kernels, backward=(3.0, 2.0))
    return layers.pointwise(name, numerics, elements, kernels=kernels)


def _residual(name: str, numerics: Numerics, elements: Floats, dropout: bool) -> list[Op]:
    """Dropout and the residual addition. The gradient of an addition is free; that of dropout is a pass, and
    where two branches meet their gradients are summed."""
    sum_ = layers.pointwise(name, numerics, elements, reads=2.0, backward=(2.0, 1.0))
    if not dropout:
        return sum_
    masked = layers.pointwise(f"{name}.dropout", numerics, elements, mask_bytes=1.0, backward=(1.0, 1.0))
    both = layers.pointwise(name, numerics, elements, reads=2.0, mask_bytes=1.0, backward=(2.0, 2.0))
    return layers.fused_into("elementwise", masked + sum_, both)


def _embedding(workload: Workload, rank: _Rank) -> Block:
    model, numerics = workload.model, Numerics.of(workload)
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
        parameters = parameters + _norm_parameters(model)
    transfers = (Transfer("embedding.tokens", "all_reduce", "tensor", e * rank.tokens * h, "forward"),)
    return Block(
        "embedding", 1, tuple(ops), parameters * np.ones_like(rank.tensor), np.stack([kept] * 3), transfers,
        trainable_share=_trainable_share(workload),
    )  # fmt: skip


def _head(workload: Workload, rank: _Rank) -> Block:
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
        parameters = parameters + _norm_parameters(model)
    if model.extra.get("head_transform"):
        ops += layers.linear("head.transform", numerics, rows, h, h, bias=True, trainable=trainable)
        ops += layers.pointwise("head.activation", numerics, rows * h)
        ops += layers.norm("head.transform-norm", numerics, rows, h, rms=False)
        parameters = parameters + h * h + h + 2 * h + model.vocab / t
    if model.extra.get("pooler"):
        ops += layers.linear("head.pooler", numerics, rank.micro_batch, h, h, bias=True, trainable=trainable)
        parameters = parameters + h * h + h + 2 * h + 2
    ops += layers.linear("head.logits", numerics, rows, h, vocab, trainable=trainable)
    if workload.training:
        ops += layers.cross_entropy("head.loss", numerics, rows, vocab)
    if classes:
        parameters = parameters + classes * h + classes
    elif not model.tied_embeddings:
        parameters = parameters + model.vocab * h / t
    logits = rows * vocab * 4.0
    kept = e * rank.outer_tokens * h * 2 + e * rows * vocab
    transfers = (Transfer("head.loss", "all_reduce", "tensor", 8.0 * rows, "forward", count=2.0),)
    return Block(
        "head", 1, tuple(ops), parameters, np.stack([kept] * 3), transfers, working_bytes=logits,
        trainable_share=_trainable_share(workload),
    )  # fmt: skip


def _tensor_transfers(name: str, workload: Workload, rank: _Rank) -> list[Transfer]:
    """What Megatron's tensor parallelism exchanges around half a layer: one all-reduce forward and one
    backward, or with sequence parallelism an all-gather and a reduce-scatter each way, and one more gather
    backward for the weight gradient's input."""
    size = Numerics.of(workload).element * rank.tokens * workload.model.hidden
    plain = np.where(rank.sequence_parallel > 0, 0.0, size)
    spread = size - plain
    found: list[Transfer] = [
        Transfer(f"{name}.reduce", "all_reduce", "tensor", plain, "forward"),
        Transfer(f"{name}.reduce.gradient", "all_reduce", "tensor", plain, "backward"),
    ]
    if spread.any():
        found += [
            Transfer(f"{name}.gather", "all_gather", "tensor", spread, "forward"),
            Transfer(f"{name}.scatter", "reduce_scatter", "tensor", spread, "forward"),
            Transfer(f"{name}.gather.gradient", "all_gather", "tensor", spread, "backward", count=2.0),
            Transfer(f"{name}.scatter.gradient", "reduce_scatter", "tensor", spread, "backward"),
        ]
    return found


def _norm_parameters(model: Model) -> float:
    return float(model.hidden if model.rms_norm else 2 * model.hidden)


def _adapters(workload: Workload, rank: _Rank) -> list[Op]:
    """LoRA (arXiv 2106.09685): a down- and an up-projection of small rank beside each linear layer."""
    model, numerics = workload.model, Numerics.of(workload)
    ops: list[Op] = []
    for name, inputs, outputs in _linear_shapes(model):
        ops += layers.linear(f"lora.{name}.down", numerics, rank.tokens, inputs, float(workload.lora_rank))
        ops += layers.linear(f"lora.{name}.up", numerics, rank.tokens, float(workload.lora_rank), outputs / rank.tensor)
        ops += layers.pointwise(f"lora.{name}.add", numerics, rank.tokens * outputs / rank.tensor, reads=2.0)
    return ops


def _linear_shapes(model: Model) -> list[tuple[str, float, float]]:
    width, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    ups = 2.0 if model.gated_mlp else 1.0
    return [
        ("qkv", float(model.hidden), float(width + 2 * kv)),
        ("output", float(width), float(model.hidden)),
        ("up", float(model.hidden), ups * model.ffn_hidden),
        ("down", float(model.ffn_hidden), float(model.hidden)),
    ]


def _trainable_share(workload: Workload) -> float:
    if not workload.lora_rank:
        return 1.0
    shapes = _linear_shapes(workload.model)
    adapters = sum(workload.lora_rank * (inputs + outputs) for _, inputs, outputs in shapes)
    return min(1.0, adapters / sum(inputs * outputs for _, inputs, outputs in shapes))
