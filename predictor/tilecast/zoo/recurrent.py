"""Recurrent layers: LSTM and GRU as cuDNN runs them.

The products with the layer's input are one matrix product for all steps. The products with the previous state are one
for each step: each has only a micro-batch's rows, and waits for the previous one (Appleyard et al., arXiv 1604.01946,
section 3). The gradient of the recurrent weights is one product for all steps again.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.graph import KernelTable, Op
from tilecast.spec import Floats
from tilecast.zoo import layers
from tilecast.zoo.numerics import Numerics

GATES: Mapping[str, int] = {"lstm": 4, "gru": 3}
"""Number of gates of each kind of cell: each has a product with the input and one with the state."""


def recurrent(
    name: str,
    numerics: Numerics,
    *,
    batch: Floats,
    steps: float,
    inputs: float,
    hidden: float,
    cell: str = "lstm",
    directions: int = 1,
) -> tuple[list[Op], float, Floats]:
    """Return the operators, the parameters and the kept elements of a layer of `hidden` cells over `steps`.

    The parameters include two biases, as cuDNN holds them. The elements are kept until the backward pass, (S,).
    """
    gates = GATES[cell]
    width = gates * hidden
    ops: list[Op] = []
    for direction in range(directions):
        label = f"{name}.{'backwards' if direction else 'forwards'}"
        ops += layers.linear(f"{label}.input", numerics, batch * steps, inputs, width)
        ops += _steps(label, numerics, batch, steps, hidden, width)
    parameters = directions * width * (inputs + hidden + 2.0)
    activation_bytes = batch * steps * (inputs + directions * (width + 2.0 * hidden))
    return ops, parameters, activation_bytes


def _steps(name: str, numerics: Numerics, batch: Floats, steps: float, hidden: float, width: float) -> list[Op]:
    """Return the chain of products with the state, each followed by one kernel for the gates."""

    def product(m: Floats | float, n: float, k: Floats | float) -> KernelTable:
        return KernelTable.of("gemm", numerics.matrix, batch=1.0, m=m, n=n, k=k)

    def gates(reads: float, writes: float) -> KernelTable:
        element = numerics.element
        return KernelTable.of(
            "elementwise", numerics.vector, elements=batch * hidden, read_bytes=reads * element,
            written_bytes=writes * element,
        )  # fmt: skip

    share = width / hidden
    ops = [
        Op(f"{name}.state", product(batch, width, hidden), count=steps),
        Op(f"{name}.gates", gates(2 * share + 1, share + 2), count=steps),
    ]
    if numerics.training:
        ops += [
            Op(f"{name}.gates.gradient", gates(share + 4, share + 1), "backward", count=steps),
            Op(f"{name}.state.gradient", product(batch, hidden, width), "backward", count=steps),
            Op(f"{name}.state.weight-gradient", product(width, hidden, batch * steps), "backward"),
        ]
    return ops
