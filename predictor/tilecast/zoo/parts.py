"""Sublayers of a transformer layer on one rank: the operators, collectives and bytes that all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from tilecast.graph import Block, CollectiveCall, Graph, Op, Shards
from tilecast.model import Model
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.numerics import Numerics

NORMED = (0.0, 1.0)
"""Value of `cast` in `layers.linear` after a norm that writes its output in FP8 itself.

Transformer Engine's LayerNormLinear does, and a compiler does the same.
"""


@dataclass(frozen=True, slots=True)
class RankSizes:
    """Sizes of a micro-batch on one rank, as columns over shards, (S,) each."""

    micro_batch: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    sequence_parallel: Floats
    sequence: float
    """Full sequence length. A rank holds 1 / `context` of it."""
    expert_tensor: Floats
    """Number of ranks that share each expert."""

    @classmethod
    def from_shards(cls, shards: Shards, sequence: float) -> RankSizes:
        """Return the sizes of a micro-batch on one rank, for each shard. Samples have `sequence` tokens."""
        tensor = shards.tensor.astype(float)
        return cls(
            shards.micro_batch.astype(float),
            tensor,
            shards.context.astype(float),
            shards.expert.astype(float),
            np.where((shards.sequence_parallel > 0) & (tensor > 1), 1.0, 0.0),
            float(sequence),
            shards.expert_tensor.astype(float),
        )

    @property
    def tokens(self) -> Floats:
        """Number of tokens that a rank processes in a micro-batch, for each of S shards, (S,)."""
        return self.micro_batch * self.sequence / self.context

    @property
    def outer_tokens(self) -> Floats:
        """Number of tokens per rank in norms and residual sums, (S,). Sequence parallelism divides them."""
        return self.tokens / np.where(self.sequence_parallel > 0, self.tensor, 1.0)


@dataclass(frozen=True, slots=True)
class Linear:
    """A dense layer that can have an adapter: its rows, inputs and outputs on one rank, each (S,) or a number."""

    name: str
    rows: Floats
    inputs: Floats | float
    outputs: Floats | float
    modules: float = 1.0
    """Number of modules over which the outputs are divided, each with a weight of the same size."""


def zeros() -> Floats:
    """Return a column of one zero, (1,), which stands for zero on every shard."""
    return np.zeros(1)


@dataclass(frozen=True, slots=True)
class Sublayer:
    """An attention or MLP sublayer of a layer: operators, collectives, parameters and saved activations.

    Parameters and activations are columns over shards, (S,).
    """

    ops: list[Op]
    collectives: list[CollectiveCall]
    parameters: Floats
    activation_bytes: Floats
    """Bytes that are kept for the backward pass."""
    scores: Floats = field(default_factory=zeros)
    """Bytes of `activation_bytes` that are attention scores."""
    expert_parameters: Floats = field(default_factory=zeros)
    selected: Floats = field(default_factory=zeros)
    """Bytes kept if selective recomputation keeps attention and every second product (arXiv 2410.06511, 2.3)."""
    linears: tuple[Linear, ...] = ()
    """Dense layers that can have adapters."""
    freed: tuple[tuple[str, Floats], ...] = ()
    """Bytes of `activation_bytes` that recomputing a module frees, by name in `recomputation.MODULES`."""
    scratch: Floats = field(default_factory=zeros)
    """Bytes of buffers that one layer needs while it runs, beside what all layers keep."""

    @classmethod
    def from_kept_bytes(cls, activation_bytes: Floats) -> Sublayer:
        """Return a sublayer without operators that saves `activation_bytes`, (S,), for the backward pass."""
        return cls([], [], zeros(), activation_bytes)

    @classmethod
    def join(cls, parts: Sequence[Sublayer]) -> Sublayer:
        """Return one sublayer that joins the operators, collectives and columns of several sublayers."""
        return cls(*(reduce(add, (getattr(part, item.name) for part in parts)) for item in fields(cls)))


def list_key_value_collectives(name: str, keys: Floats) -> tuple[CollectiveCall, CollectiveCall]:
    """Return the collectives by which context-parallel ranks gather each other's keys and values, `keys` bytes in all.

    The forward pass gathers keys and values. The backward pass gathers them again, and exchanges their gradients.
    """
    return (
        CollectiveCall(f"{name}.keys", "all_gather", "context", keys, "forward"),
        CollectiveCall(f"{name}.keys.gradient", "all_gather", "context", 2 * keys, "backward"),
    )


def build_residual_sum(name: str, numerics: Numerics, elements: Floats, dropout: bool) -> list[Op]:
    """Return the residual sum after a sublayer, with dropout before it if `dropout` is not zero.

    In the backward pass, dropout is one pass, and the gradients of the two branches are summed. Under eager autocast,
    the residual stream is in FP32. A 16-bit branch is added to it, and the gradient is cast for the branch.
    """
    sum_ = layers.pointwise(name, numerics, elements, reads=2.0, backward=(2.0, 1.0))
    if numerics.autocast:
        sum_ = layers.pointwise(name, numerics, elements, reads=3.0, writes=2.0, backward=(6.0, 3.0))
    if not dropout:
        return sum_
    drop = f"{name}.dropout"
    masked = layers.pointwise(drop, numerics, elements, mask_bytes=1.0, backward=(1.0, 1.0), kind="dropout")
    both = layers.pointwise(name, numerics, elements, reads=2.0, mask_bytes=1.0, backward=(2.0, 2.0))
    return layers.replace_when_fused("elementwise", masked + sum_, both)


def build_uniform_block(
    name: str,
    shards: int,
    ops: Sequence[Op],
    parameters: Floats | float,
    activation_bytes: Floats,
    *,
    frozen: bool = False,
    **columns: Any,
) -> Block:
    """Return a block that runs once and saves the same activations in every recomputation mode.

    Args:
        name: name of the block.
        shards: number of shards.
        ops: operators.
        parameters: weights, (S,) or one number.
        activation_bytes: bytes saved for the backward pass, (S,) or (1,).
        frozen: whether the weights have no gradient.
        columns: further columns of the block.
    """
    weights = parameters * np.ones(shards)
    kept = np.stack([activation_bytes * np.ones(shards)] * 3)
    return Block(name, 1, tuple(ops), weights, kept, frozen_parameters=weights if frozen else zeros(), **columns)


def build_one_block_graph(block: Block, host_bytes_per_sample: float) -> Graph:
    """Return the graph of a network that has a single block and runs data-parallel only."""
    shards = len(block.parameters)
    return Graph((), (block,), (), np.zeros(shards), shards, host_bytes_per_sample)


def list_tensor_parallel_collectives(name: str, workload: Workload, rank: RankSizes) -> list[CollectiveCall]:
    """Return the collectives of Megatron's tensor parallelism around half a layer.

    These are an all-reduce in the forward pass and one in the backward pass. With sequence parallelism, each pass has
    an all-gather and a reduce-scatter instead, and the backward pass has a second all-gather for the gradient of the
    weight, unless the weight belongs to a frozen part. FP8 products gather their inputs in FP8 (Transformer Engine,
    module/layernorm_linear.py and module/base.py: grad_output_preprocess).
    """
    numerics = Numerics.from_workload(workload)
    size = numerics.element * rank.tokens * workload.model.hidden
    plain = np.where(rank.sequence_parallel > 0, 0.0, size)
    spread = size - plain
    gathered = spread * numerics.product_input / numerics.element
    again = 2.0 if numerics.keeps_inputs else 1.0
    collectives: list[CollectiveCall] = [
        CollectiveCall(f"{name}.reduce", "all_reduce", "tensor", plain, "forward"),
        CollectiveCall(f"{name}.reduce.gradient", "all_reduce", "tensor", plain, "backward"),
    ]
    if spread.any():
        collectives += [
            CollectiveCall(f"{name}.gather", "all_gather", "tensor", gathered, "forward"),
            CollectiveCall(f"{name}.scatter", "reduce_scatter", "tensor", spread, "forward"),
            CollectiveCall(f"{name}.gather.gradient", "all_gather", "tensor", gathered, "backward", count=again),
            CollectiveCall(f"{name}.scatter.gradient", "reduce_scatter", "tensor", spread, "backward"),
        ]
    return collectives


def count_norm_parameters(model: Model) -> float:
    """Return the number of weights of one norm over the hidden state. An RMS norm has no bias."""
    return float(model.hidden if model.rms_norm else 2 * model.hidden)
