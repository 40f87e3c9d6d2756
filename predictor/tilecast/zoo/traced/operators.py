"""The operators that a traced model may have, each with its kernels and with the tensors that it saves.

Traces from ONNX files and from PyTorch share the table `OPERATORS`. Sizes come from the shapes of the tensors. Tensors
that depend on the samples grow with the micro-batch. All other tensors keep their traced size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np

from tilecast.graph import Op
from tilecast.spec import Floats
from tilecast.trace import Shape
from tilecast.zoo import layers
from tilecast.zoo.numerics import Numerics

Keeps = Literal["nothing", "input", "inputs", "output", "attention", "mask"]
"""Tensors of an operator that are kept until the backward pass.

"input" is the first input, "inputs" are both factors of a product, "attention" is query, key, value and output with
their scores or statistics, and "mask" is one byte per element.
"""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operator reads or writes."""

    shape: Shape
    batched: bool
    """Whether it depends on the samples and therefore grows with the micro-batch."""
    trained: bool
    """Whether a gradient flows into it."""
    strided: bool
    """Whether a transposition without a copy has left its elements in another order in memory than its shape says."""
    wide: bool = False
    """Whether it is in FP32 in a job whose mixed precision promotes tensors.

    These are weights, the samples themselves, outputs of norms and softmax, and outputs of element-wise operators that
    read such a tensor.
    """


@dataclass(frozen=True, slots=True)
class CalledOperator:
    """An operator with the tensors that it reads and the largest tensor that it writes."""

    kind: str
    attributes: tuple[tuple[str, float], ...]
    inputs: tuple[Operand, ...]
    output: Operand

    def attribute(self, name: str, default: float = 0.0) -> float:
        """Return an attribute of the operator, or `default` if it has none of that name."""
        return dict(self.attributes).get(name, default)


@dataclass(frozen=True, slots=True)
class TraceScaling:
    """Numerics of a job, with the ratio of the job's micro-batch to the traced batch, (S,)."""

    numerics: Numerics
    ratio: Floats

    def count_elements(self, operand: Operand) -> Floats:
        """Return the number of elements of a tensor on each shard, (S,)."""
        return float(prod(operand.shape)) * (self.ratio if operand.batched else np.ones_like(self.ratio))

    def is_wide(self, operand: Operand) -> bool:
        """Return whether a tensor is FP32 although the job computes in 16 bits."""
        return operand.wide and self.numerics.promotes

    def width(self, operand: Operand) -> float:
        """Return the bytes per element of a tensor, as a multiple of those of an activation."""
        return 2.0 if self.is_wide(operand) else 1.0

    def find_numerics_of_operand(self, operand: Operand) -> Numerics:
        """Return the numerics of a kernel over tensors that are stored like `operand`."""
        return self.numerics.in_fp32 if self.is_wide(operand) else self.numerics

    def find_numerics_for_output(self, output: Operand) -> Numerics:
        """Return the job's numerics. If no gradient flows into `output`, they have no backward pass."""
        return replace(self.numerics, training=self.numerics.training and output.trained)

    def elementwise(self, name: str, operand: Operand, reads: float, writes: float, **options: Any) -> list[Op]:
        """Return a kernel over the elements of `operand` that reads `reads` and writes `writes` tensors of 16 bits."""
        return layers.elementwise(name, self.numerics, self.count_elements(operand), reads, writes, **options)


Emit: TypeAlias = Callable[[CalledOperator, TraceScaling], list[Op]]
"""Function that returns the kernels of an operator."""


@dataclass(frozen=True, slots=True)
class OperatorRule:
    """Kernels and properties of one kind of operator."""

    emit: Emit
    keeps: Keeps = "nothing"
    gradient: bool = True
    """Whether a gradient flows through the operator."""
    chained: bool = False
    """Whether a compiler fuses it with its element-wise neighbours."""
    leads: bool = False
    """Whether a compiler fuses following element-wise operators into it, as with norms."""
    moves: bool = True
    """Whether it writes a new tensor. It is false for views of the input."""
    output_precision: Literal["16-bit", "FP32", "promoted"] = "promoted"
    """Data type of the output under mixed precision. "promoted" is FP32 if an input is FP32, otherwise 16-bit."""


def compute_matmul_sizes(left: Shape, right: Shape, output: Shape, *, transposed: bool = False) -> dict[str, float]:
    """Return the attributes of `matmul` for a product of tensors with these shapes.

    If `transposed`, `left` is transposed first.

    If `right` is a matrix or a vector, it is multiplied with all rows of `left` at once. Otherwise the leading
    dimensions are a batch.
    """
    depth = left[0 if transposed and len(left) > 1 else -1]
    columns = 1 if len(right) == 1 else output[-1]
    if len(right) <= 2:
        return {"batch": 1, "rows": prod(output) // columns, "columns": columns, "depth": depth}
    rows = 1 if len(left) == 1 else output[-2]
    return {"batch": prod(output) // (rows * columns), "rows": rows, "columns": columns, "depth": depth}


def _cast_inputs(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    """Return the casts of FP32 tensors that a product reads under mixed precision, and of their gradients.

    In the forward pass a tensor is copied to 16 bits, in the backward pass its gradient is copied to FP32. Casts of
    weights run inside the framework without Python, so their launches take no host time.
    """
    ops: list[Op] = []
    for operand in call.inputs[:3]:
        if emission.is_wide(operand):
            launches = 1.0 if operand.batched else 0.0
            ops += emission.elementwise(f"{call.kind}.cast", operand, 2.0, 1.0, launches=launches)
            if operand.trained:
                name = f"{call.kind}.cast-gradient"
                ops += emission.elementwise(name, operand, 1.0, 2.0, phase="backward", launches=launches)
    return ops


def _emit_matmul(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    (left, right), ratio = call.inputs[:2], emission.ratio
    names = ("batch", "rows", "columns", "depth")
    batch, rows, columns, depth = (call.attribute(name) * np.ones_like(ratio) for name in names)
    if call.output.batched:
        if batch[0] > 1:
            batch = batch * ratio
        elif left.batched:
            rows = rows * ratio
        else:
            columns = columns * ratio
    ops = _cast_inputs(call, emission) + _copy_transposed(call, emission)
    if batch[0] == 1 and left.batched and not right.batched:
        bias = len(call.inputs) > 2 and call.inputs[2].trained
        return ops + layers.linear(
            call.kind, emission.numerics, rows, depth, columns, bias=bias, trainable=right.trained,
            input_gradient=left.trained,
        )  # fmt: skip
    shapes = [("", rows, columns, depth)]
    shapes += [("", rows, depth, columns)] * left.trained + [("", columns, depth, rows)] * right.trained
    return ops + layers.matrix_products(call.kind, emission.numerics, batch, *shapes, selective=False)


def _copy_transposed(call: CalledOperator, emission: TraceScaling, operands: int = 2) -> list[Op]:
    """Return copies of those inputs, among the first `operands`, that are matrices transposed in memory."""
    ops: list[Op] = []
    for operand in call.inputs[:operands]:
        if operand.strided and len(operand.shape) > 2:
            ops += _build_copy("contiguous", operand, emission)
    return ops


def _build_copy(name: str, operand: Operand, emission: TraceScaling) -> list[Op]:
    """Return the copy of a tensor in the forward pass and, if it has a gradient, the copy of the gradient."""
    numerics, count = emission.find_numerics_of_operand(operand), emission.count_elements(operand)
    if operand.trained:
        return layers.pointwise(name, numerics, count, backward=(1.0, 1.0))
    return layers.elementwise(name, numerics, count, 1.0, 1.0)


def _emit_convolution(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    image, weight = call.inputs[:2]
    flat = (1,) * (5 - len(image.shape))
    inputs = (image.shape[1], *flat, *image.shape[2:])
    outputs = (call.output.shape[1], *flat, *call.output.shape[2:])
    transposed = bool(call.attribute("transposed"))
    if transposed:
        inputs, outputs = outputs, inputs
    batch = image.shape[0] * (emission.ratio if call.output.batched else np.ones_like(emission.ratio))
    dims = layers.conv_dims(batch, inputs, (*flat, *weight.shape[2:]), outputs, call.attribute("groups", 1.0))
    ops = _cast_inputs(call, emission)
    ops += layers.convolution(
        call.kind, emission.numerics, dims, transposed=transposed, trainable=weight.trained,
        input_gradient=image.trained,
    )  # fmt: skip
    if emission.numerics.training and len(call.inputs) > 2 and call.inputs[2].trained:
        ops += emission.elementwise(f"{call.kind}.bias-gradient", call.output, 1, 0, phase="backward")
    return ops


def _emit_attention(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    """Return the kernels of attention. The sizes of attention are among the attributes of the call.

    The inputs are query, key, value and, optionally, tensors that are added to the scores. An added tensor that is
    trained is a bias, not a mask.
    """
    numerics = emission.numerics
    is_biased = any(operand.trained for operand in call.inputs[3:])
    names = ("heads", "kv_heads", "seq_q", "seq_kv")
    heads, kv_heads, queries, keys = (np.full(1, call.attribute(name)) for name in names)
    ops = layers.attention(
        call.kind,
        emission.find_numerics_for_output(call.output),
        layers.Sequences(call.attribute("batch") * emission.ratio, queries, keys),
        heads,
        kv_heads,
        call.attribute("head_dim"),
        causal=call.attribute("causal") > 0 and not is_biased,
        dropout=call.attribute("dropout") > 0,
        biased=is_biased,
        wide_softmax=numerics.promotes,
    )
    ops = _cast_inputs(call, emission) + ops
    return ops if numerics.flash else _copy_transposed(call, emission, 3) + ops


def _emit_rowwise(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    """Return the kernels of a softmax or of a norm over rows."""
    cols = call.attribute("cols")
    rows = emission.count_elements(call.output) / cols
    numerics = emission.find_numerics_for_output(call.output)
    if numerics.promotes:
        numerics = replace(numerics.in_fp32, autocast=False)
    if call.kind == "softmax":
        return layers.rowwise(call.kind, numerics, "softmax", rows, cols)
    return _cast_to_fp32(call, emission) + layers.norm(call.kind, numerics, rows, cols, rms=call.kind == "rmsnorm")


def _cast_to_fp32(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    """Return the cast of a norm's 16-bit input to FP32 under mixed precision, and the cast of its gradient."""
    source = call.inputs[0]
    if source.wide or not emission.numerics.promotes:
        return []
    ops = emission.elementwise(f"{call.kind}.cast", source, 1.0, 2.0)
    if emission.numerics.training and source.trained:
        ops += emission.elementwise(f"{call.kind}.cast-gradient", source, 2.0, 1.0, phase="backward")
    return ops


def _emit_channel_norm(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    """Return the kernels of a channel norm.

    Batch and instance norm have weights in FP32 and read images in their own type. Group norm runs in FP32.
    """
    casts = _cast_to_fp32(call, emission) if call.attribute("groups") else []
    count = emission.count_elements(call.output)
    return casts + layers.channel_norm(call.kind, emission.find_numerics_of_operand(call.output), count)


def _emit_embedding(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    cols = float(call.output.shape[-1])
    return layers.embedding(call.kind, emission.numerics, emission.count_elements(call.output) / cols, cols)


def _emit_loss(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    cols = call.attribute("cols")
    rows = emission.count_elements(call.inputs[0]) / cols
    return layers.cross_entropy(call.kind, emission.numerics, rows, np.full(1, cols))


def _emit_pool(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    numerics = emission.find_numerics_for_output(call.output)
    numerics = numerics.in_fp32 if emission.is_wide(call.output) else numerics
    ratio = prod(call.output.shape) / prod(call.inputs[0].shape)
    return layers.pool(call.kind, numerics, emission.count_elements(call.inputs[0]), ratio)


def _emit_reduction(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    source = call.inputs[0]
    before, numerics = emission.count_elements(source), emission.find_numerics_of_operand(source)
    if not call.output.trained:
        return layers.elementwise(call.kind, numerics, before, 1.0, 0.0)
    return layers.pointwise(call.kind, numerics, before, writes=0.0, absorbed=False, backward=(0.0, 1.0))


def _emit_copy(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    """Return a kernel that reads as much as it writes, as in concatenation, padding, gathering and interpolation."""
    return _build_copy(call.kind, call.output, emission)


def _emit_reshape(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    """Return a copy if the input is transposed in memory. Otherwise a reshape is a view without a kernel."""
    return _emit_copy(call, emission) if call.inputs[0].strided else []


def _emit_nothing(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    return []


def _emit_slice_gradient(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    """Return the kernels of a slice's backward pass. Its forward pass has none, because a slice is a view.

    One kernel copies the gradient. Another fills the whole tensor with zeros if it is larger than the slice.
    """
    if not (emission.numerics.training and call.output.trained):
        return []
    numerics, name = emission.find_numerics_of_operand(call.output), f"{call.kind}.gradient"
    ops = layers.elementwise(name, numerics, emission.count_elements(call.output), 1, 1, phase="backward")
    whole = call.inputs[0]
    if prod(whole.shape) > prod(call.output.shape):
        ops += layers.elementwise(name, numerics, emission.count_elements(whole), 0, 1, phase="backward")
    return ops


def _emit_gradient_sum(call: CalledOperator, emission: TraceScaling) -> list[Op]:
    """Return the kernel that adds the two gradients of a tensor that is read twice."""
    if not emission.numerics.training:
        return []
    numerics, count = emission.find_numerics_of_operand(call.output), emission.count_elements(call.output)
    return layers.elementwise("fork.gradient", numerics, count, 2, 1, phase="backward")


def _emit_pointwise(reads_backward: float | None, *, mask: bool = False) -> Emit:
    """Return the function that emits an element-wise operator.

    Args:
        reads_backward: number of tensors that the backward pass reads for each trained input. None if the operator has
            no backward kernel, as for a sum.
        mask: whether the operator draws a mask of one byte per element, as dropout does.
    """

    def emit(call: CalledOperator, emission: TraceScaling) -> list[Op]:
        numerics = emission.numerics
        if mask and not numerics.training:
            return []
        count, made = emission.count_elements(call.output), emission.width(call.output)
        read_elements = sum((emission.count_elements(one) * emission.width(one) for one in call.inputs), 0.0 * count)
        mask_bytes = float(mask)
        ops = layers.elementwise(call.kind, numerics, count, read_elements / count, made, mask_bytes=mask_bytes)
        if not (numerics.training and call.output.trained):
            return ops
        trained = [operand for operand in call.inputs if operand.trained]
        if reads_backward:
            read = made * reads_backward if len(trained) < 2 else made * (1.0 + len(trained))
            moved = read, sum(emission.width(one) for one in trained)
            name = f"{call.kind}.gradient"
            ops += layers.elementwise(name, numerics, count, *moved, mask_bytes=mask_bytes, phase="backward")
        for operand in trained:
            if prod(operand.shape) < prod(call.output.shape):
                ops += layers.elementwise(f"{call.kind}.sum-gradient", numerics, count, made, 0, phase="backward")
            elif reads_backward is None and emission.width(operand) < made:
                ops += layers.elementwise(f"{call.kind}.cast-gradient", numerics, count, 2.0, 1.0, phase="backward")
        return ops

    return emit


_FROM_INPUT = OperatorRule(_emit_pointwise(2.0), "input", chained=True)
_FROM_OUTPUT = OperatorRule(_emit_pointwise(2.0), "output", chained=True)
_LINEAR = OperatorRule(_emit_pointwise(1.0), chained=True)
_VIEW = OperatorRule(_emit_nothing, moves=False)

OPERATORS: Mapping[str, OperatorRule] = {
    "matmul": OperatorRule(_emit_matmul, "inputs", output_precision="16-bit"),
    "convolution": OperatorRule(_emit_convolution, "input", output_precision="16-bit"),
    "attention": OperatorRule(_emit_attention, "attention", output_precision="16-bit"),
    "layernorm": OperatorRule(_emit_rowwise, "input", leads=True, output_precision="FP32"),
    "rmsnorm": OperatorRule(_emit_rowwise, "input", leads=True, output_precision="FP32"),
    "softmax": OperatorRule(_emit_rowwise, "output", output_precision="FP32"),
    "channelnorm": OperatorRule(_emit_channel_norm, "input", leads=True),
    "embedding": OperatorRule(_emit_embedding),
    "loss": OperatorRule(_emit_loss, "input", output_precision="FP32"),
    "pool": OperatorRule(_emit_pool, "output"),
    "reduction": OperatorRule(_emit_reduction),
    "copy": OperatorRule(_emit_copy, chained=True),
    "reshape": OperatorRule(_emit_reshape, moves=False),
    **dict.fromkeys(("transpose", "view"), _VIEW),
    "part": OperatorRule(_emit_slice_gradient, moves=False),
    "fork": OperatorRule(_emit_gradient_sum),
    "add": OperatorRule(_emit_pointwise(None), chained=True),
    "multiply": OperatorRule(_emit_pointwise(2.0), "inputs", chained=True),
    **dict.fromkeys(("scale", "select", "cast"), _LINEAR),
    "dropout": OperatorRule(_emit_pointwise(1.0, mask=True), "mask", chained=True),
    "from-input": _FROM_INPUT,
    "from-output": _FROM_OUTPUT,
    **dict.fromkeys(("erf", "power"), _FROM_INPUT),
    **dict.fromkeys(("tanh", "sigmoid", "root", "reciprocal-root"), _FROM_OUTPUT),
    **dict.fromkeys(("gelu", "silu"), _FROM_INPUT),
    "relu": _FROM_OUTPUT,
    "compare": OperatorRule(_emit_pointwise(None), gradient=False, chained=True),
    "constant": OperatorRule(_emit_nothing, gradient=False),
}
"""Rule of every kind of operator.

Three kinds cover element-wise functions of one tensor: `from-input` and `from-output` have a derivative that needs the
input or the output, `scale` has a constant derivative.
"""
