"""Traced models: the operators that a program ran on one batch, with the shapes of all tensors.

An ONNX file or a program of `torch.export` is reduced to these two classes. `tilecast.zoo.traced` turns them into a
graph of kernels for any micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceOperator:
    """One operator of a traced model.

    `kind` is a key of `tilecast.zoo.traced.OPERATORS`. Inputs and outputs name tensors, "" for an optional one that is
    left out.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Operators in the order in which they ran, on `batch` samples of `sequence` tokens (1 if samples are not tokens).

    `shapes` has every tensor: the incoming samples (`inputs`), the trained `parameters`, and the tensors that operators
    read and write. Traces compare by identity, so that values derived from one are computed once.
    """

    batch: int
    sequence: int
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: Mapping[str, Shape]
    operators: tuple[TraceOperator, ...]
