"""Parts of a transformer layer on one rank: what a rank holds and sends for them, whatever they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add

import numpy as np

from tilecast.graph import CollectiveCall, Op, Phase, Shards
from tilecast.model import Model
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.numerics import Numerics

NORMED = (0.0, 1.0)
"""The `cast` of `layers.linear` after a norm, which writes its output in FP8 itself (Transformer Engine,
LayerNormLinear; a compiler does the same)."""
PHASES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Rank:
    """The part of a micro-batch that one rank sees, as columns over shards, (S,) each."""

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


@dataclass(frozen=True, slots=True)
class Linear:
    """A dense layer that an adapter can be added to: rows, inputs and outputs on one rank, each (S,) or one number."""

    name: str
    rows: Floats
    inputs: Floats | float
    outputs: Floats | float
    modules: float = 1.0
    """Number of modules that the outputs are spread over, each with a weight of the same size."""


def zeros() -> Floats:
    """Return zero for every shard."""
    return np.zeros(1)


@dataclass(frozen=True, slots=True)
class Part:
    """Half a layer: its operators, collectives, parameters and kept activations, columns of shape (S,).

    `activation_bytes` is kept for the backward pass, and `scores` of it belong to attention scores. `selected` is kept
    instead where selective recomputation keeps attention and every second product (arXiv 2410.06511, section 2.3).
    """

    ops: list[Op]
    collectives: list[CollectiveCall]
    parameters: Floats
    activation_bytes: Floats
    scores: Floats = field(default_factory=zeros)
    expert_parameters: Floats = field(default_factory=zeros)
    selected: Floats = field(default_factory=zeros)
    linears: tuple[Linear, ...] = ()
    """Dense layers that adapters can be added to."""

    @classmethod
    def keeping(cls, activation_bytes: Floats) -> Part:
        """Return a part for `activation_bytes`, (S,), that a layer keeps besides its other parts."""
        return cls([], [], zeros(), activation_bytes)

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """Return several parts as one."""
        return cls(*(reduce(add, (getattr(part, item.name) for part in parts)) for item in fields(cls)))


def key_collectives(name: str, keys: Floats) -> tuple[CollectiveCall, CollectiveCall]:
    """Return the collectives of keys and values between context-parallel ranks.

    All ranks' keys and values are gathered forward, and again with their gradients backward.
    """
    return (
        CollectiveCall(f"{name}.keys", "all_gather", "context", keys, "forward"),
        CollectiveCall(f"{name}.keys.gradient", "all_gather", "context", 2 * keys, "backward"),
    )


def residual(name: str, numerics: Numerics, elements: Floats, dropout: bool) -> list[Op]:
    """Return dropout and the residual addition.

    The gradient of an addition is free, that of dropout is one pass. Where two branches meet, their gradients are
    summed.
    """
    sum_ = layers.pointwise(name, numerics, elements, reads=2.0, backward=(2.0, 1.0))
    if not dropout:
        return sum_
    masked = layers.pointwise(
        f"{name}.dropout", numerics, elements, mask_bytes=1.0, backward=(1.0, 1.0), kind="dropout"
    )
    both = layers.pointwise(name, numerics, elements, reads=2.0, mask_bytes=1.0, backward=(2.0, 2.0))
    return layers.fused_into("elementwise", masked + sum_, both)


def frozen_parameters(workload: Workload, parameters: Floats) -> Floats:
    """Return the parameters without gradient of a block without adapters: all under LoRA, else none, (S,)."""
    return parameters if workload.lora_rank else np.zeros(1)


def tensor_collectives(name: str, workload: Workload, rank: Rank) -> list[CollectiveCall]:
    """Return what Megatron's tensor parallelism exchanges around half a layer.

    That is one all-reduce forward and one backward. With sequence parallelism it is an all-gather and a reduce-scatter
    each way, and one more all-gather backward for the weight gradient's input. Inputs of products in FP8 are gathered
    in FP8 (Transformer Engine, module/layernorm_linear.py and module/base.py: grad_output_preprocess).
    """
    numerics = Numerics.of(workload)
    size = numerics.element * rank.tokens * workload.model.hidden
    plain = np.where(rank.sequence_parallel > 0, 0.0, size)
    spread = size - plain
    gathered = spread * numerics.product_input / numerics.element
    collectives: list[CollectiveCall] = [
        CollectiveCall(f"{name}.reduce", "all_reduce", "tensor", plain, "forward"),
        CollectiveCall(f"{name}.reduce.gradient", "all_reduce", "tensor", plain, "backward"),
    ]
    if spread.any():
        collectives += [
            CollectiveCall(f"{name}.gather", "all_gather", "tensor", gathered, "forward"),
            CollectiveCall(f"{name}.scatter", "reduce_scatter", "tensor", spread, "forward"),
            CollectiveCall(f"{name}.gather.gradient", "all_gather", "tensor", gathered, "backward", count=2.0),
            CollectiveCall(f"{name}.scatter.gradient", "reduce_scatter", "tensor", spread, "backward"),
        ]
    return collectives


def norm_parameters(model: Model) -> float:
    """Return the parameters of one norm over the hidden state: a weight, and a bias unless it is an RMS norm."""
    return float(model.hidden if model.rms_norm else 2 * model.hidden)
