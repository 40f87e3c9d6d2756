"""Layers over a sequence, which is stored as an image of height 1 whose columns are words or frames.

The functions `add_stepwise_…` add layers of a loop over the columns, in which each step waits for the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilecast.graph import Op, Phase
from tilecast.spec import Floats
from tilecast.zoo import layers
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.numerics import Numerics

GATES: Mapping[str, int] = {"lstm": 4, "gru": 3}
"""Number of gates of each kind of cell. Each gate has a product with the input and one with the state."""


def add_embedding(net: NetworkBuilder, vocabulary: int, width: int, count: int) -> None:
    """Add the look-up of `count` vectors per sample in an embedding table of `vocabulary` rows and `width` columns."""
    net.shape = width, (1, 1, count)
    net.ops += layers.embedding("embedding", net.numerics, net.batch * count, float(width))
    net.parameters += vocabulary * width
    net.has_gradient = True


def add_dense(net: NetworkBuilder, out: int, *, bias: bool = True) -> None:
    """Add a dense layer to `out` channels that is applied at every position."""
    positions = net.batch * prod(net.size)
    net.keep_elements(net.elements)
    net.ops += layers.linear("dense", net.numerics, positions, float(net.channels), float(out), bias=bias)
    net.parameters += net.channels * out + (out if bias else 0)
    net.channels = out


def add_lstm(net: NetworkBuilder, cells: int, *, directions: int = 1) -> None:
    """Add an LSTM over the columns. With two `directions`, the output has 2 * `cells` channels."""
    add_recurrent(net, "lstm", net.size[2], net.channels, cells, directions=directions)
    net.channels = directions * cells


def add_recurrent(
    net: NetworkBuilder,
    name: str,
    steps: float,
    inputs: float,
    hidden: float,
    *,
    cell: str = "lstm",
    directions: int = 1,
) -> None:
    """Add a recurrent layer of `hidden` cells over `steps` steps, as cuDNN runs it, with two biases per gate.

    All products with the inputs are one matrix product. Each step also has a product with the previous state. This
    product has one row per sample of the micro-batch, and waits for the previous step (Appleyard et al., arXiv
    1604.01946, section 3). The gradient of the recurrent weights is one product over all steps.
    """
    width = GATES[cell] * hidden
    for direction in range(directions):
        label = f"{name}.{'backwards' if direction else 'forwards'}"
        net.ops += layers.linear(f"{label}.input", net.numerics, net.batch * steps, inputs, width)
        net.ops += _build_steps(label, net.numerics, net.batch, steps, hidden, width)
    net.parameters += directions * width * (inputs + hidden + 2.0)
    net.keep_elements(net.batch * steps * (inputs + directions * (width + 2.0 * hidden)))


def _build_steps(name: str, numerics: Numerics, batch: Floats, steps: float, hidden: float, width: float) -> list[Op]:
    """Return the operators of all recurrent steps, with gradients in training.

    Each step has one product with the previous state and one kernel for the gates.
    """

    def gates(label: str, reads: float, writes: float, phase: Phase = "forward") -> list[Op]:
        """Return the element-wise kernel that updates the states of all cells, once for each step of the sequence."""
        elements = batch * hidden
        return layers.elementwise(f"{name}.{label}", numerics, elements, reads, writes, phase=phase, count=steps)

    share = width / hidden
    ops = [layers.gemm(f"{name}.state", numerics, batch, width, hidden, count=steps)]
    ops += gates("gates", 2 * share + 1, share + 2)
    if numerics.training:
        ops += [
            *gates("gates.gradient", share + 4, share + 1, "backward"),
            layers.gemm(f"{name}.state.gradient", numerics, batch, hidden, width, "backward", count=steps),
            layers.gemm(f"{name}.state.weight-gradient", numerics, width, hidden, batch * steps, "backward"),
        ]
    return ops


def add_stepwise_dense(net: NetworkBuilder, inputs: int, outputs: int, *, bias: bool = False) -> None:
    """Add a dense layer that runs in a loop over the columns: one forward and two backward products per column."""
    steps, numerics, batch = float(net.size[2]), net.numerics, net.batch
    net.ops.append(layers.gemm("step", numerics, batch, outputs, inputs, count=steps))
    if numerics.training:
        net.ops += [
            layers.gemm("step.input-gradient", numerics, batch, inputs, outputs, "backward", count=steps),
            layers.gemm("step.weight-gradient", numerics, outputs, inputs, batch, "backward", count=steps),
        ]
    net.keep_elements(net.batch * steps * inputs)
    net.parameters += inputs * outputs + (outputs if bias else 0)


def add_stepwise_pointwise(net: NetworkBuilder, elements: float, kernels: int) -> None:
    """Add `kernels` element-wise kernels per column of a loop, each over `elements` numbers per sample."""
    steps = float(net.size[2])
    count = steps * kernels
    for phase in net.numerics.phases:
        net.ops += layers.elementwise("step", net.numerics, net.batch * elements, 2.0, 1.0, count=count, phase=phase)
    net.keep_elements(net.batch * steps * elements * kernels)


def add_stepwise_lstm(net: NetworkBuilder, inputs: int, cells: int) -> None:
    """Add an LSTM cell in a loop over the columns: products with input and state, a gate kernel and dropout."""
    for width in (inputs, cells):
        add_stepwise_dense(net, width, 4 * cells, bias=True)
    add_stepwise_pointwise(net, 4.0 * cells, 1)
    add_stepwise_pointwise(net, float(cells), 1)
