"""Layers over a sequence in a walk: a flat image of height 1 whose columns are words or frames.

The functions `step_...` write layers of a loop over the columns, in which each step waits for the one before it.
"""

from __future__ import annotations

from tilecast.graph import KernelTable, Op
from tilecast.spec import Floats
from tilecast.zoo import layers
from tilecast.zoo.cnn.walk import Walk
from tilecast.zoo.recurrent import recurrent


def embed(walk: Walk, vocabulary: int, width: int, count: int) -> None:
    """Write the look-up of `count` vectors of `width` per sample in a table; no gradient flows further back."""
    walk.shape = width, (1, 1, count)
    walk.ops += layers.embedding("embedding", walk.numerics, walk.batch * count, float(width))
    walk.parameters += vocabulary * width
    walk.reached = True


def dense(walk: Walk, out: int, *, bias: bool = True) -> None:
    """Write a dense layer that all positions share."""
    places = walk.size[0] * walk.size[1] * walk.size[2]
    walk.keep(walk.elements)
    walk.ops += layers.linear(
        "dense", walk.numerics, walk.batch * places, float(walk.channels), float(out), bias=bias
    )  # fmt: skip
    walk.parameters += walk.channels * out + (out if bias else 0)
    walk.channels = out


def recur(walk: Walk, cells: int, *, directions: int = 1) -> None:
    """Write an LSTM as cuDNN runs it. Two directions double the output channels."""
    ops, parameters, activation_bytes = recurrent(
        "lstm", walk.numerics, batch=walk.batch, steps=float(walk.size[2]), inputs=float(walk.channels),
        hidden=float(cells), directions=directions,
    )  # fmt: skip
    walk.ops += ops
    walk.parameters += parameters
    walk.keep(activation_bytes)
    walk.channels = directions * cells


def step_dense(walk: Walk, inputs: int, outputs: int, *, bias: bool = False) -> None:
    """Write a dense layer of a loop over the columns: one product per column, with two gradients of its own."""

    def product(m: Floats | float, n: float, k: Floats | float) -> KernelTable:
        return KernelTable.of("gemm", walk.numerics.matrix, batch=1.0, m=m, n=n, k=k)

    steps = float(walk.size[2])
    walk.ops.append(Op("step", product(walk.batch, float(outputs), float(inputs)), count=steps))
    if walk.numerics.training:
        walk.ops += [
            Op("step.input-gradient", product(walk.batch, float(inputs), float(outputs)), "backward", count=steps),
            Op("step.weight-gradient", product(float(outputs), float(inputs), walk.batch), "backward", count=steps),
        ]
    walk.keep(walk.batch * steps * inputs)
    walk.parameters += inputs * outputs + (outputs if bias else 0)


def step_pointwise(walk: Walk, elements: float, kernels: int) -> None:
    """Write `kernels` element-wise kernels over `elements` per sample, for every column of a loop."""
    steps = float(walk.size[2])
    for phase in ("forward", "backward") if walk.numerics.training else ("forward",):
        walk.ops += layers.elementwise(
            "step", walk.numerics, walk.batch * elements, 2.0, 1.0, count=steps * kernels, phase=phase
        )  # fmt: skip
    walk.keep(walk.batch * steps * elements * kernels)


def step_cell(walk: Walk, inputs: int, cells: int) -> None:
    """Write an LSTM cell of a loop: products with input and state, one kernel for the gates, and dropout."""
    for width in (inputs, cells):
        step_dense(walk, width, 4 * cells, bias=True)
    step_pointwise(walk, 4.0 * cells, 1)
    step_pointwise(walk, float(cells), 1)
