"""Transformers as graphs: decoders, encoders, encoder-decoders and mixtures of experts, all from the same layer.

Decoders are GPT, LLaMA and the like, encoders BERT, encoder-decoders T5.

Sources: FLOPs and activation bytes per layer follow Korthikanti et al., arXiv 2205.05198 (section 4, table 2),
generalised to grouped-query attention, gated MLPs, any MLP width and any element size. Tensor parallelism is Megatron's
(arXiv 1909.08053), with the sequence-parallel variant of 2205.05198. Experts follow Switch Transformers (arXiv
2101.03961) with expert parallelism over data-parallel ranks. Adapters follow LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import numpy as np

from tilecast import frameworks
from tilecast.graph import Block, CollectiveCall, Graph, Op, Shards
from tilecast.spec import Workload
from tilecast.zoo import grouped, layers
from tilecast.zoo.adapters import adapter_products, dequantized, largest_quantized
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.mlp import expert_mlp, mlp
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import Part, Rank, frozen_parameters, norm_parameters
from tilecast.zoo.self_attention import attention, memory_width

MOST_LAYERS = 4096
"""Most layers of a stack whose positions by kind are kept; of deeper ones only the numbers of layers are."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of a decoder or encoder, dense or with experts."""
    model = workload.model
    rank = Rank.of(shards, workload.sequence_length)
    return graph(workload, rank, rank, stack("layer", workload, rank, model.layers, causal=model.causal))


def build_encoder_decoder(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of an encoder-decoder."""
    model, dims = workload.model, workload.model.own(Transformer)
    encoder = Rank.of(shards, workload.sequence_length if dims.encoder_length is None else dims.encoder_length)
    decoder = Rank.of(shards, workload.sequence_length if dims.decoder_length is None else dims.decoder_length)
    decoding = dims.decoding(model)
    layers_ = stack("encoder-layer", workload, encoder, model.layers - decoding, causal=False)
    start = model.layers - decoding
    layers_ += stack("decoder-layer", workload, decoder, decoding, causal=True, memory=encoder, start=start)
    return graph(workload, encoder, decoder, layers_)


class Attend(Protocol):
    """A function that builds the attention half of a layer."""

    def __call__(self, name: str, workload: Workload, rank: Rank, *, key_rank: Rank, causal: bool) -> Part:
        """Build the part named `name`, with the queries of `rank` and the keys of `key_rank`."""


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
    """Return `depth` layers as blocks of equal layers.

    Layers differ in having experts or a dense MLP, and in attending locally or to everything. The first of them is the
    model's layer `start`, which only counts for their positions.
    """
    dims = workload.model.own(Transformer)
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
    return replace(workload, model=workload.model.having(sliding_window=0, attention_chunk=0))


def graph(workload: Workload, first: Rank, last: Rank, layers_: tuple[Block, ...]) -> Graph:
    """Return the graph of the usual embedding, some layers and the usual head.

    `first` is what a rank sees at the embedding, `last` what it sees at the head.
    """
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
    """Build one transformer layer on one rank.

    It has self-attention, cross-attention if there is a `memory` to attend to, and, if it `feeds`, an MLP or experts.
    `attend` builds the self-attention if that is not the usual one.
    """
    model, numerics = workload.model, Numerics.of(workload)
    parts = [(attend or attention)("attention", workload, rank, key_rank=rank, causal=causal)]
    if memory is not None:
        parts.append(attention("cross-attention", workload, rank, key_rank=memory, causal=False))
    if feeds:
        parts.append(expert_mlp(workload, rank, experts) if experts else mlp(workload, rank))
    whole = Part.joined(parts)
    ops, parameters, frozen = tuple(whole.ops), whole.parameters, np.zeros(1)
    if workload.lora_rank:
        adapters, added = adapter_products(workload, whole.linears)
        ops, frozen, parameters = ops + tuple(adapters), parameters, parameters + added
    copied = np.zeros(1)
    if workload.lora_rank and workload.frozen_bits < 16:
        calls = grouped.launches(workload, np.maximum(experts / rank.expert, 1.0))
        ops += tuple(dequantized(workload, parts, calls))
        copied = numerics.element * largest_quantized(parts, calls)
    inputs = numerics.element * rank.outer_tokens * model.hidden
    if numerics.frozen_input:
        read = sum((item.rows * item.inputs for item in whole.linears), np.zeros(1))
        parts.append(Part.keeping(numerics.frozen_input * read))
    everything = sum((part.activation_bytes for part in parts), np.zeros(1))
    without_scores = sum((part.activation_bytes - part.scores for part in parts), np.zeros(1))
    activation_bytes = np.stack(
        [
            everything,
            sum((part.selected for part in parts), inputs) if numerics.saves_operators else without_scores,
            inputs,
        ]
    )
    gathered = sum((one.size_bytes for one in whole.collectives if one.group == "context"), np.zeros(1))
    working = everything * 0.5 + np.where(rank.context > 1, gathered, 0.0)
    return Block(
        name,
        repeat,
        ops,
        parameters=parameters,
        activation_bytes=activation_bytes,
        collectives=tuple(whole.collectives),
        expert_parameters=whole.expert_parameters,
        working_bytes=working,
        copied_bytes=copied,
        frozen_parameters=frozen,
        remembered_bytes=numerics.element * memory.outer_tokens * memory_width(model) if memory else np.zeros(1),
    )


def embedding(workload: Workload, rank: Rank) -> Block:
    """Build token and position embeddings, with what follows before the first layer.

    Frozen embeddings have no backward pass.
    """
    model, dims, numerics = workload.model, workload.model.own(Transformer), Numerics.of(workload)
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
        parameters = parameters + norm_parameters(model)
    collectives = (CollectiveCall("embedding.tokens", "all_reduce", "tensor", e * rank.tokens * h, "forward"),)
    return Block(
        "embedding", 1, tuple(ops), parameters * np.ones_like(rank.tensor), np.stack([activation_bytes] * 3),
        collectives, frozen_parameters=frozen_parameters(workload, parameters),
    )  # fmt: skip


def _head(workload: Workload, rank: Rank) -> Block:
    """Build the final norm, the output projection and the loss.

    The head of a model with `classes` is a classifier on one pooled token of each sample.
    """
    model, dims, numerics = workload.model, workload.model.own(Transformer), Numerics.of(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    classes = dims.classes
    rows = rank.micro_batch if classes else rank.tokens * dims.head_share
    scored = model.vocab if dims.head_vocab is None else dims.head_vocab
    vocab = classes * np.ones_like(t) if classes else scored / t
    ops: list[Op] = []
    parameters = np.zeros_like(t)
    if dims.final_norm:
        ops += layers.norm("head.norm", numerics, rank.outer_tokens, h, rms=model.rms_norm)
        parameters = parameters + norm_parameters(model)
    if dims.head_transform:
        ops += layers.linear("head.transform", numerics, rows, h, h, bias=True)
        ops += layers.pointwise("head.activation", numerics, rows * h)
        ops += layers.norm("head.transform-norm", numerics, rows, h, rms=False)
        parameters = parameters + h * h + h + 2 * h + model.vocab / t
    if dims.pooler:
        ops += layers.linear("head.pooler", numerics, rank.micro_batch, h, h, bias=True)
        parameters = parameters + h * h + h + 2 * h + 2
    ops += layers.linear("head.logits", numerics.unquantized, rows, h, vocab)
    if workload.training:
        ops += layers.cross_entropy("head.loss", numerics, rows, vocab)
    if classes:
        parameters = parameters + classes * h + classes
    elif not model.tied_embeddings or frameworks.of(workload).unties_embeddings:
        parameters = parameters + model.vocab * h / t
    logit_bytes, logit_working = layers.logit_bytes(numerics)
    activation_bytes = e * rank.outer_tokens * h * 2 + logit_bytes * rows * vocab
    collectives = (CollectiveCall("head.loss", "all_reduce", "tensor", 8.0 * rows, "forward", count=2.0),)
    return Block(
        "head", 1, tuple(ops), parameters, np.stack([activation_bytes] * 3), collectives,
        working_bytes=logit_working * rows * vocab,
        frozen_parameters=frozen_parameters(workload, parameters),
    )  # fmt: skip
