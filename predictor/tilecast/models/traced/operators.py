"""The operators a traced model may have: for each, the kernels of its forward and backward pass and what it keeps.

One table, `OPERATORS`, serves every way a trace comes in. Sizes are read off the tensors; a tensor that depends on the
samples grows with the micro-batch, all others are as traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np

from tilecast.graph import KernelTable, Op, Phase
from tilecast.models import layers
from tilecast.models.layers import Numerics
from tilecast.spec import Floats
from tilecast.trace import Operator, Shape

Keeps = Literal["nothing", "input", "inputs", "output", "attention", "mask"]
"""Which tensors stay alive until the backward pass: the first input, all inputs, the output, an attention's inputs and
output, or a byte per element."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor where an operator meets it."""

    shape: Shape
    batched: bool
    """Whether it depends on the samples, so that it grows with the micro-batch."""
    trained: bool
    """Whether a gradient flows into it."""
    strided: bool
    """Whether its elements lie in another order than its shape says (a transposition that was not copied)."""


@dataclass(frozen=True, slots=True)
class Site:
    """An operator where it stands. `scale` is the micro-batch over the traced batch, a column over shards, (S,)."""

    kind: str
    attributes: tuple[tuple[str, float], ...]
    inputs: tuple[Operand, ...]
    output: Operand

    def attribute(self, name: str, default: float = 0.0) -> float:
        """An attribute of the operator."""
        return dict(self.attributes).get(name, default)


def elements(operand: Operand, scale: Floats) -> Floats:
    """Elements of a tensor at each micro-batch, (S,)."""
    return float(prod(operand.shape)) * (scale if operand.batched else np.ones_like(scale))


@dataclass(frozen=True, slots=True)
class Rule:
    """What an operator is made of."""

    emit: Callable[[Site, Numerics, Floats], list[Op]]
    keeps: Keeps = "nothing"
    gradient: bool = True
    """Whether a gradient flows through it."""
    chained: bool = False
    """Whether a compiler fuses it with its element-wise neighbours."""
    leads: bool = False
    """Whether a compiler fuses the element-wise operators that follow into it (norms)."""
    moves: bool = True
    """Whether it makes a new tensor; false for views of its input."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """The backward pass of an element-wise operator: tensors read and written per trained input."""

    reads: float
    writes: float


def matmul_attributes(a: Shape, b: Shape, y: Shape, *, transposed: bool = False) -> dict[str, float]:
    """Dimensions of the product y = a b as `matmul` has them; `transposed` says that a is transposed first. A matrix
    on the right meets all rows of a at once; otherwise leading dimensions are a batch."""
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
        return _contiguous(site, numerics, scale) + ops

    def product(m: Floats, n: Floats, k: Floats, phase: Phase) -> Op:
        return Op(site.kind, KernelTable.of("gemm", numerics.matrix, batch=batch, m=m, n=n, k=k), phase)

    ops = [product(rows, columns, depth, "forward")]
    if numerics.training and left.trained:
        ops.append(product(rows, depth, columns, "backward"))
    if numerics.training and right.trained:
        ops.append(product(columns, depth, rows, "backward"))
    return _contiguous(site, numerics, scale) + ops


def _contiguous(site: Site, numerics: Numerics, scale: Floats, operands: int = 2) -> list[Op]:
    """Copies of batches of matrices that lie transposed in memory."""
    ops: list[Op] = []
    for operand in site.inputs[:operands]:
        if operand.strided and len(operand.shape) > 2:
            ops += _moved("contiguous", numerics, elements(operand, scale), operand.trained)
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
    ops = layers.convolution(
        site.kind, numerics, dims, transposed=transposed, trainable=weight.trained, input_gradient=image.trained
    )
    if numerics.training and len(site.inputs) > 2 and site.inputs[2].trained:
        ops += layers.elementwise(
            f"{site.kind}.bias-gradient", numerics, elements(site.output, scale), 1, 0, phase="backward"
        )
    return ops


def _attention(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Inputs are query, key and value; the sizes stand in the attributes."""
    training = replace(numerics, training=numerics.training and site.output.trained)
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
        causal=site.attribute("causal") > 0,
        dropout=site.attribute("dropout") > 0,
    )
    return ops if numerics.flash else _contiguous(site, numerics, scale, 3) + ops


def _rowwise(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    cols = site.attribute("cols")
    rows = elements(site.output, scale) / cols
    training = replace(numerics, training=numerics.training and site.output.trained)
    if site.kind != "softmax":
        return layers.norm(site.kind, training, rows, cols, rms=site.kind == "rmsnorm")
    ops = [Op(site.kind, KernelTable.of("softmax", numerics.vector, rows=rows, cols=cols, backward=0.0))]
    if training.training:
        gradient = KernelTable.of("softmax", numerics.vector, rows=rows, cols=cols, backward=1.0)
        ops.append(Op(f"{site.kind}.gradient", gradient, "backward"))
    return ops


def _channel_norm(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    return layers.channel_norm(site.kind, numerics, elements(site.output, scale))


def _embedding(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    cols = float(site.output.shape[-1])
    return layers.embedding(site.kind, numerics, elements(site.output, scale) / cols, cols)


def _loss(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    cols = site.attribute("cols")
    return layers.cross_entropy(site.kind, numerics, elements(site.inputs[0], scale) / cols, np.full(1, cols))


def _pool(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    ratio = prod(site.output.shape) / prod(site.inputs[0].shape)
    training = replace(numerics, training=numerics.training and site.output.trained)
    return layers.pool(site.kind, training, elements(site.inputs[0], scale), ratio)


def _reduction(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    before = elements(site.inputs[0], scale)
    if not site.output.trained:
        return layers.elementwise(site.kind, numerics, before, 1.0, 0.0)
    return layers.pointwise(site.kind, numerics, before, writes=0.0, absorbed=False, backward=(0.0, 1.0))


def _copy(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """What is written is also what is read: concatenation, padding, gathering, interpolation."""
    return _moved(site.kind, numerics, elements(site.output, scale), site.output.trained)


def _reshape(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """A view, unless its elements lie transposed in memory."""
    return _copy(site, numerics, scale) if site.inputs[0].strided else []


def _view(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    return []


def _part(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """A slice is a view; its gradient is written into its place."""
    if not (numerics.training and site.output.trained):
        return []
    return layers.elementwise(f"{site.kind}.gradient", numerics, elements(site.output, scale), 1, 1, phase="backward")


def _sum_of_gradients(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
    """Where a tensor is read twice its two gradients are added."""
    if not numerics.training:
        return []
    return layers.elementwise("fork.gradient", numerics, elements(site.output, scale), 2, 1, phase="backward")


def _pointwise(backward: _Pass | None, *, mask: bool = False) -> Callable[[Site, Numerics, Floats], list[Op]]:
    def emit(site: Site, numerics: Numerics, scale: Floats) -> list[Op]:
        if mask and not numerics.training:
            return []
        count = elements(site.output, scale)
        reads = sum((elements(operand, scale) for operand in site.inputs), 0.0 * count) / count
        mask_bytes = float(mask)
        ops = layers.elementwise(site.kind, numerics, count, reads, 1.0, mask_bytes=mask_bytes)
        if not (numerics.training and site.output.trained):
            return ops
        trained = [operand for operand in site.inputs if operand.trained]
        if backward:
            moved = (backward.reads * max(1, len(trained) - 1), backward.writes * len(trained))
            if len(trained) > 1:
                moved = (1.0 + len(trained), float(len(trained)))
            ops += layers.elementwise(
                f"{site.kind}.gradient", numerics, count, *moved, mask_bytes=mask_bytes, phase="backward"
            )
        for operand in trained:
            if prod(operand.shape) < prod(site.output.shape):
                ops += layers.elementwise(f"{site.kind}.sum-gradient", numerics, count, 1, 0, phase="backward")
        return ops

    return emit


_FROM_INPUT = Rule(_pointwise(_Pass(2.0, 1.0)), "input", chained=True)
_FROM_OUTPUT = Rule(_pointwise(_Pass(2.0, 1.0)), "output", chained=True)
_PRODUCT = Rule(_pointwise(_Pass(2.0, 1.0)), "inputs", chained=True)
_LINEAR = Rule(_pointwise(_Pass(1.0, 1.0)), chained=True)
_SUM = Rule(_pointwise(None), chained=True)
_FLAT = Rule(_pointwise(None), gradient=False, chained=True)
_VIEW = Rule(_view, moves=False)
_NONE = Rule(_view, gradient=False)

OPERATORS: Mapping[str, Rule] = {
    "matmul": Rule(_matmul, "inputs"),
    "convolution": Rule(_convolution, "input"),
    "attention": Rule(_attention, "attention"),
    "layernorm": Rule(_rowwise, "input", leads=True),
    "rmsnorm": Rule(_rowwise, "input", leads=True),
    "softmax": Rule(_rowwise, "output"),
    "channelnorm": Rule(_channel_norm, "input", leads=True),
    "embedding": Rule(_embedding),
    "loss": Rule(_loss, "input"),
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
    "dropout": Rule(_pointwise(_Pass(1.0, 1.0), mask=True), "mask", chained=True),
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
"""Every kind of operator. Of element-wise ones `from-input` and `from-output` stand for functions of one tensor whose
derivative needs the input or the output; `scale` for those whose derivative is a constant."""


def attribute_key(operator: Operator) -> tuple[tuple[str, float], ...]:
    """The attributes of an operator in an order that does not depend on how they were written."""
    return tuple(sorted(operator.attributes.items()))
