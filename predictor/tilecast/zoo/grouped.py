"""Operators of the experts that a rank holds: one matrix product per expert, or one grouped product for all.

Columns are over shards, (S,). Some frameworks launch one kernel for all experts of a rank, others one kernel per expert
(`frameworks.Framework.grouped_products`), which takes time on the host.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilecast import frameworks
from tilecast.graph import KernelTable, Op, Phase
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.numerics import Numerics


def launches(workload: Workload, local: Floats) -> Floats:
    """Return how many kernels a product of `local` experts is launched as, (S,)."""
    return local if frameworks.of(workload).grouped_products == "each" else np.ones(1)


def linear(
    name: str,
    numerics: Numerics,
    local: Floats,
    slots: Floats,
    sides: tuple[float, float],
    calls: Floats,
    *,
    bias: bool = False,
) -> list[Op]:
    """Return the operators of a dense layer of every expert.

    The layer has `sides` (inputs, outputs). The `slots` that a balanced router fills are shared equally by the `local`
    experts. Each operator is launched as `calls` kernels.
    """
    rows = np.maximum(slots / local, 1.0)
    product = layers.linear(f"experts.{name}", numerics, rows, *sides, bias=bias)
    return [_of_each(op, local, calls) for op in product]


def _of_each(op: Op, experts: Floats, calls: Floats) -> Op:
    """Return an operator repeated for so many experts: a batch of products, or a longer kernel of another kind."""
    dims = op.table.dims * np.ones((len(experts), 1))
    dims[:, 0] *= experts  # the batch of a product, or the elements of a pass
    kind, precision = (np.broadcast_to(column, len(dims)) for column in (op.table.kind, op.table.precision))
    return replace(op, table=KernelTable(kind, precision, dims), launches=calls)


def weighted_bias(numerics: Numerics, elements: Floats, calls: Floats) -> list[Op]:
    """Return the operators that add the experts' outputs and their biases times the tokens' weights.

    The weights are in FP32, and so is the sum. Forward: a product, a sum, a copy that joins the experts' parts, and a
    cast (Megatron-Core, transformer/moe/experts.py: _apply_bias). Backward: the cast and the copy again, then a product
    and a sum for the biases and another pair for the weights.
    """
    e = numerics.element
    passes: list[tuple[str, Phase, float, float, float]] = [("", "forward", e + 12.0, e + 12.0, 2.0)]
    if numerics.training:
        passes.append((".gradient", "backward", 2 * e + 20.0, 2 * e + 12.0, 6.0))
    return [
        Op(
            f"experts.weighted-bias{label}",
            KernelTable.of("elementwise", "fp32", elements=elements, read_bytes=read, written_bytes=written),
            phase,
            launches=each * calls,
        )
        for label, phase, read, written, each in passes
    ]
