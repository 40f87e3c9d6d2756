"""The parts of a transformer's layer on one rank: what a rank holds and sends, whatever the part computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add

import numpy as np

from tilecast.graph import Op, Phase, Shards, Transfer
from tilecast.models import layers
from tilecast.models.numerics import Numerics
from tilecast.spec import Floats, Model, Workload

NORMED = (0.0, 1.0)
"""What of a product's operands is cast to FP8 where a norm comes before it (Transformer Engine, LayerNormLinear; a
compiler writes the norm's output so)."""
PHASES: tuple[Phase, ...] = ("forward", "backward")


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


@dataclass(frozen=True, slots=True)
class Linear:
    """A dense layer that an adapter can stand beside: rows, inputs and outputs on one rank, each (S,) or one number."""

    name: str
    rows: Floats
    inputs: Floats | float
    outputs: Floats | float
    modules: float = 1.0
    """Over how many modules, each with a weight of the same size, the outputs spread."""


def nothing() -> Floats:
    """Zero on every shard."""
    return np.zeros(1)


@dataclass(frozen=True, slots=True)
class Part:
    """Half a layer: operators, transfers, and what it keeps for the backward pass (`activation_bytes`, of which the
    attention scores are `scores`; or `selected` where attention and every second product are kept, arXiv 2410.06511,
    section 2.3), columns of shape (S,)."""

    ops: list[Op]
    transfers: list[Transfer]
    parameters: Floats
    activation_bytes: Floats
    scores: Floats = field(default_factory=nothing)
    expert_parameters: Floats = field(default_factory=nothing)
    selected: Floats = field(default_factory=nothing)
    linears: tuple[Linear, ...] = ()
    """Where adapters go."""

    @classmethod
    def keeping(cls, activation_bytes: Floats) -> Part:
        """What layers keep besides their parts: so many bytes, (S,)."""
        return cls([], [], nothing(), activation_bytes)

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """Several parts as one."""
        return cls(*(reduce(add, (getattr(part, item.name) for part in parts)) for item in fields(cls)))


def key_transfers(name: str, keys: Floats) -> tuple[Transfer, Transfer]:
    """Keys and values of all context ranks, gathered forward; again with their gradients backward."""
    return (
        Transfer(f"{name}.keys", "all_gather", "context", keys, "forward"),
        Transfer(f"{name}.keys.gradient", "all_gather", "context", 2 * keys, "backward"),
    )


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


def frozen_parameters(workload: Workload, parameters: Floats) -> Floats:
    """Which parameters of a block without adapters have no gradient: all under LoRA, else none, (S,)."""
    return parameters if workload.lora_rank else np.zeros(1)


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
    transfers: list[Transfer] = [
        Transfer(f"{name}.reduce", "all_reduce", "tensor", plain, "forward"),
        Transfer(f"{name}.reduce.gradient", "all_reduce", "tensor", plain, "backward"),
    ]
    if spread.any():
        transfers += [
            Transfer(f"{name}.gather", "all_gather", "tensor", gathered, "forward"),
            Transfer(f"{name}.scatter", "reduce_scatter", "tensor", spread, "forward"),
            Transfer(f"{name}.gather.gradient", "all_gather", "tensor", gathered, "backward", count=2.0),
            Transfer(f"{name}.scatter.gradient", "reduce_scatter", "tensor", spread, "backward"),
        ]
    return transfers


def norm_parameters(model: Model) -> float:
    """Parameters of one norm over the hidden state: a weight, and where it is no RMS norm a bias."""
    return float(model.hidden if model.rms_norm else 2 * model.hidden)
