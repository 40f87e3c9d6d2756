"""Traced models: the operators that a program ran on one batch, with the shapes of all tensors.

Readers of ONNX files and of `torch.export` programs return a `Trace`. `tilecast.zoo.traced` turns it into a graph of
kernels for any micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceOperator:
    """One operator of a traced model, with the names of its tensors."""

    kind: str
    """Kind of the operator, a key of `tilecast.zoo.traced.OPERATORS`."""
    inputs: tuple[str, ...]
    """Names of the input tensors. An optional tensor that is absent has an empty name."""
    outputs: tuple[str, ...]
    """Names of the output tensors. An optional tensor that is absent has an empty name."""
    attributes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A traced model: the operators that ran on one batch, and the shapes of all tensors.

    Traces compare by identity, so that caches can use a trace as a key.
    """

    batch: int
    """Number of samples in the batch."""
    sequence: int
    """Tokens of a sample. It is 1 if samples are not sequences of tokens."""
    inputs: tuple[str, ...]
    """Names of the tensors that hold the samples."""
    parameters: tuple[str, ...]
    """Names of the trained tensors."""
    outputs: tuple[str, ...]
    """Names of the tensors that the model returns."""
    shapes: Mapping[str, Shape]
    """Shape of every tensor, by name."""
    operators: tuple[TraceOperator, ...]
    """Operators in the order in which they ran."""
