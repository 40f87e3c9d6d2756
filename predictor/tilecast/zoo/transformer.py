"""Transformers as graphs: decoders, encoders, encoder-decoders and mixtures of experts, all from the same layer.

GPT and LLaMA are decoders, BERT is an encoder, and T5 is an encoder-decoder.

Sources: FLOPs and activation bytes per layer follow Korthikanti et al., arXiv 2205.05198 (section 4, table 2),
generalised to grouped-query attention, gated MLPs, any MLP width and any element size. Tensor parallelism is Megatron's
(arXiv 1909.08053), with the sequence-parallel variant of 2205.05198. Experts follow Switch Transformers (arXiv
2101.03961) with expert parallelism over data-parallel ranks. Adapters follow LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from tilecast import frameworks
from tilecast.graph import Block, CollectiveCall, Graph, Op, Shards
from tilecast.layout import parse_layout
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.adapters import (
    build_adapters,
    count_dropout_bytes,
    count_quantized_head,
    count_rescaled_bytes,
    dequantize_head,
    dequantize_weights,
    largest_norm_bytes,
    largest_quantized_weight,
)
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.mlp import build_expert_mlp, build_mlp, count_launches
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import RankSizes, Sublayer, build_uniform_block, count_norm_parameters, zeros
from tilecast.zoo.self_attention import build_attention, find_memory_width

MOST_LAYERS = 4096
"""Most layers of a stack for which the position of each layer is kept. For deeper stacks, only their number is."""


class AttentionBuilder(Protocol):
    """A function that builds the attention sublayer of a layer."""

    def __call__(
        self, name: str, workload: Workload, rank: RankSizes, *, key_rank: RankSizes, causal: bool
    ) -> Sublayer:
        """Return the attention sublayer called `name`, with the queries of `rank` and the keys of `key_rank`."""


def build(workload: Workload, shards: Shards, attend: AttentionBuilder | None = None) -> Graph:
    """Return the graph of a decoder or encoder, dense or with experts.

    `attend` builds the attention of the layers. If it is None, the layers have the usual attention.
    """
    model, rank = workload.model, RankSizes.from_shards(shards, workload.sequence_length)
    blocks = build_stack("layer", workload, rank, model.layers, causal=model.causal, attend=attend)
    graph = build_graph(workload, rank, rank, blocks, attend)
    depth = parse_layout(workload.pipeline_layout).predicted if workload.pipeline_layout else 0
    return _predict_further_tokens(workload, rank, graph, depth) if depth else graph


def _predict_further_tokens(workload: Workload, rank: RankSizes, graph: Graph, depth: int) -> Graph:
    """Return the graph with `depth` modules for multi-token prediction after the layers.

    A module projects the output of the layer before it and the embedding of the next token to the hidden size, runs one
    more layer of the last kind, and shares the head (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """
    numerics, hidden = Numerics.from_workload(workload), workload.model.hidden
    last = max(graph.layers, key=lambda block: max(block.positions, default=workload.model.layers - 1))
    ops = layers.linear("mtp.projection", numerics, rank.tokens, 2.0 * hidden, hidden / rank.tensor)
    number = workload.model.layers
    module = replace(
        last,
        name=f"mtp.{last.name}",
        repeat=depth,
        ops=(*last.ops, *ops),
        parameters=last.parameters + 2.0 * hidden * hidden / rank.tensor,
        activation_bytes=last.activation_bytes + 2.0 * numerics.element * rank.outer_tokens * hidden,
        positions=tuple(range(number, number + depth)),
    )
    heads = tuple(
        replace(block, name=f"mtp.{block.name}", repeat=depth, parameters=0.0 * block.parameters)
        for block in graph.last
    )
    return replace(graph, layers=(*graph.layers, module), last=(*graph.last, *heads))


def build_encoder_decoder(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of an encoder-decoder."""
    dims = workload.model.get_dimensions(Transformer)
    encoder = RankSizes.from_shards(
        shards, workload.sequence_length if dims.encoder_length is None else dims.encoder_length
    )
    decoder = RankSizes.from_shards(
        shards, workload.sequence_length if dims.decoder_length is None else dims.decoder_length
    )
    return build_graph(workload, encoder, decoder, build_encoder_decoder_layers(workload, encoder, decoder))


def build_encoder_decoder_layers(workload: Workload, encoder: RankSizes, decoder: RankSizes) -> tuple[Block, ...]:
    """Return the encoder's layers, followed by the layers of a decoder that attends to the encoder's tokens."""
    model = workload.model
    decoding = model.get_dimensions(Transformer).count_decoder_layers(model)
    encoding = model.layers - decoding
    blocks = build_stack("encoder-layer", workload, encoder, encoding, causal=False)
    return blocks + build_stack(
        "decoder-layer", workload, decoder, decoding, causal=True, memory=encoder, start=encoding
    )


def build_stack(
    name: str,
    workload: Workload,
    rank: RankSizes,
    depth: int,
    *,
    causal: bool,
    memory: RankSizes | None = None,
    attend: AttentionBuilder | None = None,
    start: int = 0,
) -> tuple[Block, ...]:
    """Return `depth` layers as blocks, each of which consists of equal layers.

    Layers differ in whether they have experts or a dense MLP, and whether attention is local or to all tokens. `start`
    is the position of the first layer in the model.
    """
    dims = workload.model.get_dimensions(Transformer)
    experts = dims.experts
    every, dense = dims.moe_every, min(dims.first_dense, depth)
    reach = dims.sliding_window or dims.attention_chunk
    is_bounded = 0 < reach < rank.sequence
    far = (dims.global_every or depth + 1) if is_bounded else 1
    expert = depth // every - dense // every if experts else 0
    seeing = depth // far
    both = depth // math.lcm(every, far) - dense // math.lcm(every, far) if experts else 0
    kinds = {
        (False, False): seeing - both,
        (False, True): depth - expert - seeing + both,
        (True, False): both,
        (True, True): expert - both,
    }
    unbounded = replace(workload, model=workload.model.with_dimensions(sliding_window=0, attention_chunk=0))
    numbers = range(1, depth + 1) if depth <= MOST_LAYERS else ()
    blocks = []
    for (sparse, local), repeat in kinds.items():
        if not repeat:
            continue
        label = "-".join([*["local"] * local, *["expert"] * sparse, name])
        seen = unbounded if is_bounded and not local else workload
        chosen = experts if sparse else 0
        block = build_layer(
            label, seen, rank, repeat=repeat, causal=causal, memory=memory, experts=chosen, attend=attend
        )
        positions = tuple(
            start + number - 1
            for number in numbers
            if (experts > 0 and number % every == 0 and number > dense) is sparse and (number % far != 0) is local
        )
        blocks.append(replace(block, positions=positions))
    return tuple(blocks)


def build_graph(
    workload: Workload,
    first: RankSizes,
    last: RankSizes,
    blocks: tuple[Block, ...],
    attend: AttentionBuilder | None = None,
) -> Graph:
    """Return the graph of embedding, `blocks`, head, and the layers that predict later tokens.

    `first` describes a rank's micro-batch at the embedding, and `last` at the head. `attend` builds the attention of
    the layers that predict later tokens, or is None for the usual attention.
    """
    head = _build_head(workload, last)
    further = _build_prediction_layers(workload, last, head, attend) if workload.training else ()
    return Graph(
        first=(build_embedding(workload, first),),
        layers=blocks,
        last=(head, *further),
        boundary_bytes=Numerics.from_workload(workload).element * first.tokens / first.tensor * workload.model.hidden,
        shards=len(first.tensor),
        host_bytes_per_sample=16.0 * workload.sequence_length,
    )


def _build_prediction_layers(
    workload: Workload, rank: RankSizes, head: Block, attend: AttentionBuilder | None
) -> tuple[Block, ...]:
    """Return the layers that predict later tokens, each with a projection, a transformer layer and the model's head.

    The projection reads the concatenated hidden state and embedding of the next token, each after a norm
    (Megatron-Core, transformer/multi_token_prediction.py). Embedding and head share their weights with the model's
    embedding and head.
    """
    model, dims, numerics = workload.model, workload.model.get_dimensions(Transformer), Numerics.from_workload(workload)
    number = dims.prediction_layers
    is_laid_out = workload.pipeline_layout is not None and parse_layout(workload.pipeline_layout).predicted > 0
    if not number or is_laid_out:
        return ()
    e, h, outer = numerics.element, float(model.hidden), rank.outer_tokens
    layer = build_layer("prediction-layer", workload, rank, repeat=1, causal=True, experts=dims.experts, attend=attend)
    ops = layers.norm("prediction.norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.norm("prediction.embedding-norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.linear("prediction.projection", numerics, rank.tokens, 2 * h, h / rank.tensor)
    own = 2 * h * h / rank.tensor + 2 * count_norm_parameters(model)
    kept = layer.activation_bytes + 4 * e * outer * h
    shared = replace(head, name="prediction-head", parameters=np.zeros_like(head.parameters), frozen_parameters=zeros())
    whole = replace(
        layer,
        ops=(*ops, *layer.ops),
        parameters=layer.parameters + own,
        activation_bytes=np.stack([kept[0]] * len(kept)),
    )
    return (*[whole] * number, *[shared] * number)


def build_layer(
    name: str,
    workload: Workload,
    rank: RankSizes,
    *,
    repeat: int,
    causal: bool,
    experts: int = 0,
    memory: RankSizes | None = None,
    attend: AttentionBuilder | None = None,
    has_mlp: bool = True,
) -> Block:
    """Return the block of a transformer layer on one rank, repeated `repeat` times.

    The layer has self-attention, cross-attention to the tokens of `memory` if there are any, and an MLP or experts
    unless `has_mlp` is False. `attend` builds the self-attention, or is None for the usual one.
    """
    model, numerics = workload.model, Numerics.from_workload(workload)
    parts = [(attend or build_attention)("attention", workload, rank, key_rank=rank, causal=causal)]
    if memory is not None:
        parts.append(build_attention("cross-attention", workload, rank, key_rank=memory, causal=False))
    if has_mlp:
        parts.append(build_expert_mlp(workload, rank, experts) if experts else build_mlp(workload, rank))
    whole = Sublayer.join(parts)
    ops, parameters, frozen, copied = tuple(whole.ops), whole.parameters, zeros(), zeros()
    if workload.lora_rank:
        adapters, added = build_adapters(workload, whole.linears)
        ops, frozen, parameters = ops + tuple(adapters), parameters, parameters + added
        if workload.frozen_bits < 16:
            calls = count_launches(workload, np.maximum(experts / rank.expert, 1.0))
            ops += tuple(dequantize_weights(workload, parts, calls))
            copies = frameworks.find_framework(workload).dequantized_copies
            copied = copies * numerics.element * largest_quantized_weight(parts, calls)
        copied = np.maximum(copied, largest_norm_bytes(workload, whole.linears))
        parts.append(Sublayer.from_kept_bytes(count_rescaled_bytes(workload, whole.linears)))
    if workload.lora_rank and workload.training and frameworks.find_framework(workload).adapter_dropout:
        parts.append(Sublayer.from_kept_bytes(count_dropout_bytes(workload, whole.linears)))
    if numerics.frozen_input:
        read = sum((item.rows * item.inputs for item in whole.linears), zeros())
        parts.append(Sublayer.from_kept_bytes(numerics.frozen_input * read))
    inputs = numerics.residual_element * rank.outer_tokens * model.hidden
    activation_bytes = _stack_activation_bytes(numerics, parts, inputs)
    gathered = sum((call.size_bytes for call in whole.collectives if call.group == "context"), zeros())
    return Block(
        name,
        repeat,
        ops,
        parameters=parameters,
        activation_bytes=activation_bytes,
        collectives=tuple(whole.collectives),
        expert_parameters=whole.expert_parameters,
        working_bytes=activation_bytes[0] * 0.5 + np.where(rank.context > 1, gathered, 0.0),
        copied_bytes=copied + whole.scratch,
        frozen_parameters=frozen,
        freed_bytes=_sum_freed_bytes(parts),
        remembered_bytes=numerics.element * memory.outer_tokens * find_memory_width(model) if memory else zeros(),
    )


def _stack_activation_bytes(numerics: Numerics, parts: Sequence[Sublayer], inputs: Floats) -> Floats:
    """Return the bytes that a layer saves for its backward pass, (recomputation modes, S).

    `inputs` are the bytes of the layer's input on each shard, (S,).
    """
    everything = sum((part.activation_bytes for part in parts), zeros())
    if numerics.saves_operators:
        selective = sum((part.selected for part in parts), inputs)
    else:
        selective = sum((part.activation_bytes - part.scores for part in parts), zeros())
    return np.stack([everything, selective, inputs])


def _sum_freed_bytes(parts: Sequence[Sublayer]) -> dict[str, Floats]:
    """Return the bytes that are freed if a module of a layer is recomputed, (S,), by module."""
    freed: dict[str, Floats] = {}
    for module, size in (item for part in parts for item in part.freed):
        freed[module] = freed.get(module, zeros()) + size
    return freed


def build_embedding(workload: Workload, rank: RankSizes) -> Block:
    """Return the block of the token and position embeddings, with the norm, dropout and projection after them.

    Frozen embeddings have no backward pass.
    """
    model, dims, numerics = workload.model, workload.model.get_dimensions(Transformer), Numerics.from_workload(workload)
    numerics = replace(numerics, frozen=numerics.frozen and not workload.copies_embeddings)
    numerics = replace(numerics, training=numerics.training and not numerics.frozen)
    e, h = numerics.element, model.hidden
    ops = layers.embedding("embedding.tokens", numerics, rank.tokens, h)
    if model.positions:
        ops += layers.pointwise("embedding.positions", numerics, rank.outer_tokens * h, reads=2.0, backward=(1.0, 0.0))
    if dims.embedding_norm:
        ops += layers.norm("embedding.norm", numerics, rank.outer_tokens, h, rms=model.rms_norm)
    if model.dropout and workload.training:
        ops += layers.pointwise("embedding.dropout", numerics, rank.outer_tokens * h, mask_bytes=1.0)
    activation_bytes = e * rank.outer_tokens * h + 8.0 * rank.tokens
    width = h if dims.embedding_hidden is None else dims.embedding_hidden
    parameters = model.vocab * width / rank.tensor + model.positions * width
    if width != h:
        parameters = parameters + width * h + h
        ops += layers.linear("embedding.projection", numerics, rank.tokens, width, h)
    parameters = parameters + dims.token_types * width
    if dims.embedding_norm:
        parameters = parameters + count_norm_parameters(model)
    collectives = (CollectiveCall("embedding.tokens", "all_reduce", "tensor", e * rank.tokens * h, "forward"),)
    block = build_uniform_block(
        "embedding",
        len(rank.tensor),
        ops,
        parameters,
        activation_bytes,
        frozen=numerics.frozen,
        collectives=collectives,
    )
    if not workload.copies_embeddings:
        return block
    return replace(block, parameters=2.0 * block.parameters, frozen_parameters=block.parameters)


def _build_head(workload: Workload, rank: RankSizes) -> Block:
    """Return the block of the final norm, the projection to logits and the loss.

    In a model with `classes` the head classifies one pooled token of each sample.
    """
    model, dims, numerics = workload.model, workload.model.get_dimensions(Transformer), Numerics.from_workload(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    classes, framework = dims.classes, frameworks.find_framework(workload)
    scores_all = model.family == "encoder" and framework.scores_all_tokens
    rows = rank.micro_batch if classes else rank.tokens * (1.0 if scores_all else dims.head_share)
    scored = model.vocab if dims.head_vocab is None else dims.head_vocab
    vocab = classes * np.ones_like(t) if classes else scored / t
    ops: list[Op] = []
    parameters = np.zeros_like(t)
    if dims.final_norm:
        ops += layers.norm("head.norm", numerics, rank.outer_tokens, h, rms=model.rms_norm)
        parameters = parameters + count_norm_parameters(model)
    if dims.head_transform:
        ops += layers.linear("head.transform", numerics, rows, h, h, bias=True)
        ops += layers.pointwise("head.activation", numerics, rows * h)
        ops += layers.norm("head.transform-norm", numerics, rows, h, rms=False)
        parameters = parameters + h * h + h + 2 * h + model.vocab / t
    if dims.pooler:
        ops += layers.linear("head.pooler", numerics, rank.micro_batch, h, h, bias=True)
        parameters = parameters + h * h + h + 2 * h + 2
    trainable = True if workload.copies_embeddings else None
    ops += layers.linear("head.logits", numerics.unquantized, rows, h, vocab, trainable=trainable)
    quantized = count_quantized_head(workload) / t
    ops += dequantize_head(workload, quantized)
    if dims.capped_logits:
        ops += layers.pointwise("head.cap", numerics, rows * vocab, kernels=3, backward=(1.0, 1.0))
    if workload.training:
        ops += layers.cross_entropy("head.loss", numerics, rows, vocab)
    if classes:
        parameters = parameters + classes * h + classes
    elif not model.tied_embeddings or framework.unties_embeddings:
        parameters = parameters + model.vocab * h / t
    # Trainer.compute_loss drops the model's outputs. Decoders shift their logits first, which copies them.
    logit_bytes, logit_working = layers.logit_bytes(numerics, returned=not scores_all)
    if dims.capped_logits and workload.training:
        logit_bytes += e  # the tanh keeps its result
    if workload.loss_chunks > 1:
        # The gradients of a piece's logits are computed with its loss, and its logits freed.
        logit_bytes, logit_working = 0.0, (logit_bytes + logit_working) / workload.loss_chunks
    activation_bytes = e * rank.outer_tokens * h * 2 + logit_bytes * rows * vocab
    collectives = (CollectiveCall("head.loss", "all_reduce", "tensor", 8.0 * rows, "forward", count=2.0),)
    block = build_uniform_block(
        "head", len(t), ops, parameters, activation_bytes, frozen=numerics.frozen, collectives=collectives,
        working_bytes=logit_working * rows * vocab + e * framework.dequantized_copies * quantized,
    )  # fmt: skip
    if not workload.copies_embeddings or classes:
        return block
    # PEFT trains a copy of the head's weight even if the frozen one is the embedding's.
    return replace(block, parameters=block.parameters + model.vocab * h / t)
