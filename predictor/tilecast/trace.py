"""Traced models: the operators that a program ran on one batch, with the shapes of every tensor.

An ONNX file or a program of `torch.export` is reduced to these two classes; `tilecast.zoo.traced` turns them into a
graph of kernels for any micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceOperator:
    """One operator.

    `kind` is a key of `tilecast.zoo.traced.OPERATORS`; inputs and outputs name tensors, "" where an optional one is
    left out.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Operators in the order they ran, on `batch` samples of `sequence` tokens (1 where samples are not tokens).

    `shapes` has every tensor: the samples that come in (`inputs`), the trained `parameters`, and what operators read
    and write. Traces compare by identity, so that values derived from one are derived once.
    """

    batch: int
    sequence: int
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: Mapping[str, Shape]
    operators: tuple[TraceOperator, ...]
