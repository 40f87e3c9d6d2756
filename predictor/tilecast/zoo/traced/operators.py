"""The operators that a traced model may have, each with the kernels of both passes and the tensors that it keeps.

All sources of traces share one table, `OPERATORS`. Sizes come from the shapes of the tensors. A tensor that depends on
the samples grows with the micro-batch; all others keep their traced size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np

from tilecast.graph import Op
from tilecast.spec import Floats
from tilecast.trace import Shape, TraceOperator
from tilecast.zoo import layers
from tilecast.zoo.numerics import Numerics

Keeps = Literal["nothing", "input", "inputs", "output", "attention", "mask"]
"""Tensors of an operator that stay alive until the backward pass.

"input" is the first input, "inputs" are both factors of a product, "attention" is query, key, value and output with
their scores or statistics, and "mask" is one byte per element.
"""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as an operator reads or writes it."""

    shape: Shape
    batched: bool
    """Whether it depends on the samples and therefore grows with the micro-batch."""
    trained: bool
    """Whether a gradient flows into it."""
    strided: bool
    """Whether its elements are in another order in memory than its shape says, after a transposition without a copy."""
    wide: bool = False
    """Whether it is FP32 in a job whose mixed precision promotes tensors.

    These are weights, the samples themselves, outputs of norms and softmax, and what element-wise operators compute
    from one of those.
    """


@dataclass(frozen=True, slots=True)
class Site:
    """An operator with the tensors that it reads and its largest output."""

    kind: str
    attributes: tuple[tuple[str, float], ...]
    inputs: tuple[Operand, ...]
    output: Operand

    def attribute(self, name: str, default: float = 0.0) -> float:
        """Return an attribute of the operator, or `default` if it has none of that name."""
        return dict(self.attributes).get(name, default)


def elements(operand: Operand, scale: Floats) -> Floats:
    """Return the elements of a tensor on each shard, (S,).

    `scale` is the micro-batch divided by the traced batch, a column over shards, (S,).
    """
    return float(prod(operand.shape)) * (scale if operand.batched else np.ones_like(scale))


def width(operand: Operand, numerics: Numerics) -> float:
    """Return the bytes of an element, divided by those of an activation."""
    return 2.0 if operand.wide and numerics.promotes else 1.0


def _stored(numerics: Numerics, operand: Operand) -> Numerics:
    """Return the numerics of a kernel over tensors that are stored like `operand`."""
    return replace(numerics, vector="fp32", element=4.0) if width(operand, numerics) > 1 else numerics


def _casts(name: str, numerics: Numerics, operand: Operand, scale: Floats, *, launches: float = 1.0) -> list[Op]:
    """Return the casts of an FP32 tensor that a product reads under mixed precision.

    Forward it is copied to 16 bits, backward its gradient is copied to FP32.
    """
    if not (operand.wide and numerics.promotes):
        return []
    count = elements(operand, scale)
    ops = layers.elementwise(f"{name}.cast", numerics, count, 2.0, 1.0, launches=launches)
    if operand.trained:
        ops += layers.elementwise(
            f"{name}.cast-gradient", numerics, count, 1.0, 2.0, phase="backward", launches=launches
        )
    return ops


def _inputs_cast(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Return the casts of all tensors that a product reads.

    Casts of weights run inside the framework without Python, so their launches cost nothing.
    """
    ops: list[Op] = []
    for operand in site.inputs[:3]:
        ops += _casts(site.kind, numerics, operand, scale, launches=1.0 if operand.batched else 0.0)
    return ops


@dataclass(frozen=True, slots=True)
class Rule:
    """Kernels and properties of one kind of operator."""

    emit: Callable[[Site, Numerics, Floats], list[Op]]
    keeps: Keeps = "nothing"
    gradient: bool = True
    """Whether a gradient flows through it."""
    chained: bool = False
    """Whether a compiler fuses it with its element-wise neighbours."""
    leads: bool = False
    """Whether a compiler fuses the element-wise operators that follow into it, as with norms."""
    moves: bool = True
    """Whether it makes a new tensor. It is false for views of the input."""
    answers: Literal["16-bit", "FP32", "promoted"] = "promoted"
    """Type of the output under mixed precision: 16 bits for products, FP32 for norms and softmax, else the inputs'."""


@dataclass(frozen=True, slots=True)
class _OperatorPass:
    """Number of tensors that the backward pass of an element-wise operator reads and writes per trained input."""

    reads: float
    writes: float


def matmul_attributes(a: Shape, b: Shape, y: Shape, *, transposed: bool = False) -> dict[str, float]:
    """Return the attributes of `matmul` for the product y = a b, where a is transposed first if `transposed`.

    If b is a matrix or a vector, it is multiplied with all rows of a at once. Otherwise the leading dimensions are a
    batch.
    """
    depth = a[0 if transposed and len(a) > 1 else -1]
    columns = 1 if len(b) == 1 else y[-1]
    if len(b) <= 2:
        return {"batch": 1, "rows": prod(y) // columns, "columns": columns, "depth": depth}
    rows = 1 if len(a) == 1 else y[-2]
    return {"batch": prod(y) // (rows * columns), "rows": rows, "columns": columns, "depth": depth}


def _matmul(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    left, right = site.inputs[:2]
    batch, rows, columns, depth = (
        site.attribute(name) * np.ones_like(scale) for name in ("batch", "rows", "columns", "depth")
    )
    if site.output.batched:
        if batch[0] > 1:
            batch = batch * scale
        elif left.batched:
            rows = rows * scale
        else:
            columns = columns * scale
    biased = len(site.inputs) > 2
    if batch[0] == 1 and left.batched and not right.batched:
        ops = layers.linear(
            site.kind, numerics, rows, depth, columns, bias=biased and site.inputs[2].trained,
            trainable=right.trained, input_gradient=left.trained,
        )  # fmt: skip
        return _inputs_cast(site, numerics, scale) + _contiguous(site, numerics, scale) + ops

    shapes = [("", rows, columns, depth)]
    shapes += [("", rows, depth, columns)] * left.trained + [("", columns, depth, rows)] * right.trained
    ops = layers.products(site.kind, numerics, batch, *shapes, selective=False)
    return _inputs_cast(site, numerics, scale) + _contiguous(site, numerics, scale) + ops


def _contiguous(site: Site, numerics: Numerics, scale: Floats, operands: int = 2) -> list[Op]:
    """Return the copies of batches of matrices that are transposed in memory."""
    ops: list[Op] = []
    for operand in site.inputs[:operands]:
        if operand.strided and len(operand.shape) > 2:
            ops += _moved("contiguous", _stored(numerics, operand), elements(operand, scale), operand.trained)
    return ops


def _moved(name: str, numerics: Numerics, count: Floats, trained: bool, reads: Floats | float = 1.0) -> list[Op]:
    if trained:
        return layers.pointwise(name, numerics, count, reads=reads, backward=(1.0, 1.0))
    return layers.elementwise(name, numerics, count, reads, 1.0)


def _convolution(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    image, weight = site.inputs[:2]
    depth = len(image.shape) - 2
    names = ("d", "h", "w")[3 - depth :]
    dims: dict[str, Floats | float] = {
        "batch": image.shape[0] * (scale if site.output.batched else np.ones_like(scale)),
        "c_in": float(image.shape[1]), "c_out": float(site.output.shape[1]), "groups": site.attribute("groups", 1.0),
        **{f"{prefix}_{name}": 1.0 for prefix in ("in", "k", "out") for name in ("d", "h", "w")},
    }  # fmt: skip
    for prefix, sizes in (("in", image.shape[2:]), ("k", weight.shape[2:]), ("out", site.output.shape[2:])):
        dims |= {f"{prefix}_{name}": float(size) for name, size in zip(names, sizes, strict=True)}
    transposed = bool(site.attribute("transposed"))
    if transposed:
        dims |= {"c_in": dims["c_out"], "c_out": dims["c_in"]}
        dims |= {f"in_{name}": dims[f"out_{name}"] for name in names} | {
            f"out_{name}": dims[f"in_{name}"] for name in names
        }
    ops = _inputs_cast(site, numerics, scale)
    ops += layers.convolution(
        site.kind, numerics, dims, transposed=transposed, trainable=weight.trained, input_gradient=image.trained
    )
    if numerics.training and len(site.inputs) > 2 and site.inputs[2].trained:
        ops += layers.elementwise(
            f"{site.kind}.bias-gradient", numerics, elements(site.output, scale), 1, 0, phase="backward"
        )
    return ops


def _attention(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Return the kernels of attention.

    The inputs are query, key, value and, optionally, tensors that are added to the scores. An added tensor that is
    trained is a bias, not a mask. The sizes are in the attributes.
    """
    training = replace(numerics, training=numerics.training and site.output.trained)
    is_biased = any(operand.trained for operand in site.inputs[3:])
    heads, kv_heads, seq_q, seq_kv = (
        np.full(1, site.attribute(name)) for name in ("heads", "kv_heads", "seq_q", "seq_kv")
    )
    ops = layers.attention(
        site.kind,
        training,
        batch=site.attribute("batch") * scale,
        heads=heads,
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=site.attribute("head_dim"),
        causal=site.attribute("causal") > 0 and not is_biased,
        dropout=site.attribute("dropout") > 0,
        biased=is_biased,
        wide_softmax=numerics.promotes,
    )
    ops = _inputs_cast(site, numerics, scale) + ops
    return ops if numerics.flash else _contiguous(site, numerics, scale, 3) + ops


def _rowwise(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    cols = site.attribute("cols")
    rows = elements(site.output, scale) / cols
    training = replace(numerics, training=numerics.training and site.output.trained)
    if numerics.promotes:
        training = replace(training, vector="fp32", element=4.0, autocast=False)
    if site.kind != "softmax":
        casts = _widened(site, numerics, scale)
        return casts + layers.norm(site.kind, training, rows, cols, rms=site.kind == "rmsnorm")
    return layers.rowwise(site.kind, training, "softmax", rows, cols)


def _widened(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Return the cast of a norm's 16-bit input to FP32 under mixed precision, and the cast of its gradient."""
    source = site.inputs[0]
    if source.wide or not numerics.promotes:
        return []
    count = elements(source, scale)
    ops = layers.elementwise(f"{site.kind}.cast", numerics, count, 1.0, 2.0)
    if numerics.training and source.trained:
        ops += layers.elementwise(f"{site.kind}.cast-gradient", numerics, count, 2.0, 1.0, phase="backward")
    return ops


def _channel_norm(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Return the kernels of a channel norm.

    Batch and instance norm have weights in FP32 and read images in their own type. Group norm runs in FP32.
    """
    casts = _widened(site, numerics, scale) if site.attribute("groups") else []
    return casts + layers.channel_norm(site.kind, _stored(numerics, site.output), elements(site.output, scale))


def _embedding(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    cols = float(site.output.shape[-1])
    return layers.embedding(site.kind, numerics, elements(site.output, scale) / cols, cols)


def _loss(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    cols = site.attribute("cols")
    return layers.cross_entropy(site.kind, numerics, elements(site.inputs[0], scale) / cols, np.full(1, cols))


def _pool(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    ratio = prod(site.output.shape) / prod(site.inputs[0].shape)
    training = replace(numerics, training=numerics.training and site.output.trained)
    training = _stored(training, site.output)
    return layers.pool(site.kind, training, elements(site.inputs[0], scale), ratio)


def _reduction(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    before = elements(site.inputs[0], scale)
    numerics = _stored(numerics, site.inputs[0])
    if not site.output.trained:
        return layers.elementwise(site.kind, numerics, before, 1.0, 0.0)
    return layers.pointwise(site.kind, numerics, before, writes=0.0, absorbed=False, backward=(0.0, 1.0))


def _copy(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Return a kernel that reads as much as it writes, as in concatenation, padding, gathering and interpolation."""
    stored = _stored(numerics, site.output)
    return _moved(site.kind, stored, elements(site.output, scale), site.output.trained)


def _reshape(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Return nothing, as a reshape is a view, or a copy if the input is transposed in memory."""
    return _copy(site, numerics, scale) if site.inputs[0].strided else []


def _view(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    return []


def _part(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Return the gradient of a slice, which is written into a tensor of zeros. The slice itself is a view."""
    if not (numerics.training and site.output.trained):
        return []
    stored, name = _stored(numerics, site.output), f"{site.kind}.gradient"
    ops = layers.elementwise(name, stored, elements(site.output, scale), 1, 1, phase="backward")
    whole = site.inputs[0]
    if prod(whole.shape) > prod(site.output.shape):
        ops += layers.elementwise(name, stored, elements(whole, scale), 0, 1, phase="backward")
    return ops


def _sum_of_gradients(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Return the kernel that adds the two gradients of a tensor that is read twice."""
    if not numerics.training:
        return []
    numerics = _stored(numerics, site.output)
    return layers.elementwise("fork.gradient", numerics, elements(site.output, scale), 2, 1, phase="backward")


def _pointwise(backward: _OperatorPass | None, *, mask: bool = False) -> Callable[[Site, Numerics, Floats], list[Op]]:
    def emit(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
        if mask and not numerics.training:
            return []
        count = elements(site.output, scale)
        made = width(site.output, numerics)
        reads = sum((elements(one, scale) * width(one, numerics) for one in site.inputs), 0.0 * count) / count
        mask_bytes = float(mask)
        ops = layers.elementwise(site.kind, numerics, count, reads, made, mask_bytes=mask_bytes)
        if not (numerics.training and site.output.trained):
            return ops
        trained = [operand for operand in site.inputs if operand.trained]
        if backward:
            read = made * backward.reads if len(trained) < 2 else made * (1.0 + len(trained))
            written = backward.writes * sum(width(one, numerics) for one in trained)
            ops += layers.elementwise(
                f"{site.kind}.gradient", numerics, count, read, written, mask_bytes=mask_bytes, phase="backward"
            )
        for operand in trained:
            if prod(operand.shape) < prod(site.output.shape):
                ops += layers.elementwise(f"{site.kind}.sum-gradient", numerics, count, made, 0, phase="backward")
            elif backward is None and width(operand, numerics) < made:
                ops += layers.elementwise(f"{site.kind}.cast-gradient", numerics, count, 2.0, 1.0, phase="backward")
        return ops

    return emit


_FROM_INPUT = Rule(_pointwise(_OperatorPass(2.0, 1.0)), "input", chained=True)
_FROM_OUTPUT = Rule(_pointwise(_OperatorPass(2.0, 1.0)), "output", chained=True)
_PRODUCT = Rule(_pointwise(_OperatorPass(2.0, 1.0)), "inputs", chained=True)
_LINEAR = Rule(_pointwise(_OperatorPass(1.0, 1.0)), chained=True)
_SUM = Rule(_pointwise(None), chained=True)
_FLAT = Rule(_pointwise(None), gradient=False, chained=True)
_VIEW = Rule(_view, moves=False)
_NONE = Rule(_view, gradient=False)

OPERATORS: Mapping[str, Rule] = {
    "matmul": Rule(_matmul, "inputs", answers="16-bit"),
    "convolution": Rule(_convolution, "input", answers="16-bit"),
    "attention": Rule(_attention, "attention", answers="16-bit"),
    "layernorm": Rule(_rowwise, "input", leads=True, answers="FP32"),
    "rmsnorm": Rule(_rowwise, "input", leads=True, answers="FP32"),
    "softmax": Rule(_rowwise, "output", answers="FP32"),
    "channelnorm": Rule(_channel_norm, "input", leads=True),
    "embedding": Rule(_embedding),
    "loss": Rule(_loss, "input", answers="FP32"),
    "pool": Rule(_pool, "output"),
    "reduction": Rule(_reduction),
    "copy": Rule(_copy, chained=True),
    "reshape": Rule(_reshape, moves=False),
    "transpose": _VIEW,
    "view": _VIEW,
    "part": Rule(_part, moves=False),
    "fork": Rule(_sum_of_gradients),
    "add": _SUM,
    "multiply": _PRODUCT,
    "scale": _LINEAR,
    "select": _LINEAR,
    "cast": _LINEAR,
    "dropout": Rule(_pointwise(_OperatorPass(1.0, 1.0), mask=True), "mask", chained=True),
    "from-input": _FROM_INPUT,
    "from-output": _FROM_OUTPUT,
    "erf": _FROM_INPUT,
    "power": _FROM_INPUT,
    "tanh": _FROM_OUTPUT,
    "sigmoid": _FROM_OUTPUT,
    "root": _FROM_OUTPUT,
    "reciprocal-root": _FROM_OUTPUT,
    "gelu": _FROM_INPUT,
    "silu": _FROM_INPUT,
    "relu": _FROM_OUTPUT,
    "compare": _FLAT,
    "constant": _NONE,
}
"""Rule of every kind of operator.

Three kinds cover element-wise functions of one tensor: `from-input` and `from-output` have a derivative that needs the
input or the output, `scale` has a constant derivative.
"""


def attribute_key(operator: TraceOperator) -> tuple[tuple[str, float], ...]:
    """Return the attributes of an operator, sorted by name so that they can be compared and hashed."""
    return tuple(sorted(operator.attributes.items()))
