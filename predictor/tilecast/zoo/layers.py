"""Building blocks of all model families: functions that return the operators of one part of a layer.

The operators are those of the forward pass and, in training, of the backward pass. Shapes use the symbols of
`tilecast.spec`. Every dimension may be a column over shards, (S,).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np

from tilecast import constants
from tilecast.frameworks import Composed
from tilecast.graph import KernelTable, Op, Phase
from tilecast.spec import ELEMENT_BYTES, QUANTIZED, Floats, PassName
from tilecast.zoo.numerics import Numerics

Dim: TypeAlias = Floats | float
"""A dimension: a column over shards, (S,), or one number for all shards."""


def linear(
    name: str,
    numerics: Numerics,
    tokens: Floats,
    inputs: Dim,
    outputs: Dim,
    *,
    bias: bool = False,
    trainable: bool | None = None,
    input_gradient: bool = True,
    cast: tuple[Dim, Dim] = (1.0, 1.0),
) -> list[Op]:
    """Return the operators of a dense layer: Y[tokens, outputs] = X[tokens, inputs] W.

    The backward pass has two GEMMs with the FLOPs of the forward GEMM, for the gradients of X and W. A bias adds a
    reduction over tokens.

    Args:
        name: prefix of the operators' names.
        numerics: how tensors are stored and kernels are fused.
        tokens: rows of X.
        inputs: columns of X.
        outputs: columns of Y.
        bias: whether the layer has a bias.
        trainable: whether the weight has a gradient. By default it has one unless the job freezes weights.
        input_gradient: whether X has a gradient.
        cast: fractions of X and of Y's gradient that this layer casts to FP8. The fractions are below 1 if a norm
            already writes FP8, or if tensor-parallel ranks gather operands that each rank has already cast.
    """
    ops = quantize(name, numerics, tokens * inputs * cast[0], "forward")
    ops.append(gemm(name, numerics, tokens, outputs, inputs))
    if bias and numerics.adds_bias:
        added = elementwise(f"{name}.bias", numerics, tokens * outputs, 1, 1)
        ops += drop_when_fused("elementwise", added)
    if not numerics.training:
        return ops
    ops += quantize(f"{name}.gradient", numerics, tokens * outputs * cast[1], "backward")
    if input_gradient:
        ops.append(gemm(f"{name}.input-gradient", numerics, tokens, inputs, outputs, "backward"))
    if not numerics.frozen if trainable is None else trainable:
        sizes = (outputs, inputs, tokens)
        ops.append(gemm(f"{name}.weight-gradient", numerics, *sizes, "backward", accumulated=numerics.accumulates))
        if bias:
            ops += elementwise(f"{name}.bias-gradient", numerics, tokens * outputs, 1, 0, phase="backward")
    return ops


def gemm(
    name: str,
    numerics: Numerics,
    m: Dim,
    n: Dim,
    k: Dim,
    phase: Phase = "forward",
    *,
    batch: Dim = 1.0,
    accumulated: bool = False,
    **options: Any,
) -> Op:
    """Return `batch` matrix products of [m, k] and [k, n] as one operator.

    If `accumulated`, the result is added to an FP32 buffer. The `options` are further fields of `Op`.
    """
    sizes = {"batch": batch, "m": m, "n": n, "k": k, "accumulated": float(accumulated)}
    return Op(name, KernelTable.from_dimensions("gemm", numerics.matrix, **sizes), phase, **options)


def matrix_products(
    name: str, numerics: Numerics, batch: Dim, *shapes: tuple[str, Dim, Dim, Dim], selective: bool = True
) -> list[Op]:
    """Return the operators of a product in the forward pass and of its gradients, each with `batch` matrix products.

    A shape is (label, m, n, k), for a product of [m, k] and [k, n]. The first shape is the forward pass, and all others
    are gradients. If `selective`, selective recomputation repeats the forward pass.
    """
    first, *gradients = [
        gemm(f"{name}{label}", numerics, m, n, k, "backward", batch=batch)
        for label, m, n, k in (shapes if numerics.training else shapes[:1])
    ]
    return [replace(first, phase="forward", selective=selective), *gradients]


def rowwise(name: str, numerics: Numerics, kind: str, rows: Floats, cols: Dim, *, launches: float = 1.0) -> list[Op]:
    """Return a kernel over `rows` rows of `cols` elements and, in training, its gradient as `launches` kernels."""
    ops = [Op(name, KernelTable.from_dimensions(kind, numerics.vector, rows=rows, cols=cols, backward=0.0))]
    if numerics.training:
        backward = KernelTable.from_dimensions(kind, numerics.vector, rows=rows, cols=cols, backward=1.0)
        ops.append(Op(f"{name}.gradient", backward, "backward", launches=launches))
    return ops


def quantize(name: str, numerics: Numerics, elements: Floats, phase: Phase) -> list[Op]:
    """Return the cast of a GEMM operand to 8 or 4 bits, or an empty list if GEMMs run in more bits.

    The cast reads 16 bits per element. In training it writes two copies, one by rows for this product and one by
    columns for the gradient (Transformer Engine, pytorch/tensor/float8_tensor.py and mxfp8_tensor.py: rowwise and
    columnwise usage; torchao, float8/float8_linear.py casts both operands). NVFP4 reads the operand once more to find
    the maximum of the tensor, which scales the maxima of the blocks (common/cast/nvfp4).
    """
    if numerics.matrix not in QUANTIZED or not np.any(elements):
        return []
    written = ELEMENT_BYTES[numerics.matrix] * (2.0 if numerics.training else 1.0) / numerics.element
    reads = 2.0 if numerics.matrix == "nvfp4" else 1.0
    return elementwise(f"{name}{QUANTIZE}", numerics, elements, reads, written, phase=phase)


QUANTIZE = ".quantize"
"""Suffix of the names of casts to 8 or 4 bits."""


def memory_pass(
    name: str,
    precision: str,
    elements: Dim,
    read_bytes: Dim,
    written_bytes: Dim,
    phase: Phase = "forward",
    *,
    drawn: bool = False,
    **options: Any,
) -> Op:
    """Return an element-wise kernel that reads `read_bytes` and writes `written_bytes` for each element.

    If `drawn`, the kernel also draws a random number per element, which takes time. The `options` are further fields of
    `Op`.
    """
    sizes = {"elements": elements, "read_bytes": read_bytes, "written_bytes": written_bytes, "drawn": float(drawn)}
    return Op(name, KernelTable.from_dimensions("elementwise", precision, **sizes), phase, **options)


def elementwise(
    name: str,
    numerics: Numerics,
    elements: Floats,
    reads: Dim,
    writes: Dim,
    *,
    phase: Phase = "forward",
    mask_bytes: float = 0.0,
    **options: Any,
) -> list[Op]:
    """Return an element-wise kernel that reads `reads` tensors and writes `writes` tensors of `elements` elements.

    The tensors have the type of activations. A dropout mask has `mask_bytes` per element. The mask is drawn and written
    in the forward pass, and read in the backward pass. The `options` are further fields of `Op`.
    """
    is_forward = phase == "forward"
    read = reads * numerics.element + (0.0 if is_forward else mask_bytes)
    written = writes * numerics.element + (mask_bytes if is_forward else 0.0)
    drawn = mask_bytes > 0 and is_forward
    return [memory_pass(name, numerics.vector, elements, read, written, phase, drawn=drawn, **options)]


def conv_dims(
    batch: Floats, image: Sequence[float], window: Sequence[float], output: Sequence[float], groups: Dim = 1.0
) -> dict[str, Dim]:
    """Return the sizes of a convolution by their names in `graph.KINDS`. The direction is not included.

    Args:
        batch: number of images.
        image: channels, depth, height and width of the input.
        window: depth, height and width of the kernel.
        output: channels, depth, height and width of the output.
        groups: number of channel groups.
    """
    names = ("c_in", "in_d", "in_h", "in_w", "k_d", "k_h", "k_w", "c_out", "out_d", "out_h", "out_w")
    return {"batch": batch, "groups": groups, **dict(zip(names, (*image, *window, *output), strict=True))}


def convolution(
    name: str,
    numerics: Numerics,
    dims: Mapping[str, Dim],
    *,
    transposed: bool = False,
    trainable: bool = True,
    input_gradient: bool = True,
) -> list[Op]:
    """Return the operators of a convolution: forward, gradients, and layout copies where the kernels need them.

    `dims` is the result of `conv_dims`. A transposed convolution exchanges the forward pass and the input gradient.
    """
    ops = drop_when_fused("layout", _layout_copies(name, numerics, dims, input_gradient + trainable))
    kind = "direct_conv" if _has_no_tensor_kernel(numerics, dims) else "conv"
    passes: list[tuple[str, float, Phase]] = [("", float(transposed), "forward")]
    passes += [(".input-gradient", float(not transposed), "backward")] * (numerics.training and input_gradient)
    passes += [(".weight-gradient", 2.0, "backward")] * (numerics.training and trainable)
    for label, direction, phase in passes:
        table = KernelTable.from_dimensions(kind, numerics.matrix, **dims, direction=direction)
        ops.append(Op(f"{name}{label}", table, phase))
    return ops


def _layout_copies(name: str, numerics: Numerics, dims: Mapping[str, Dim], gradients: int) -> list[Op]:
    """Return the layout copies around a convolution on tensor cores, or an empty list if it needs none.

    Tensor-core kernels read and write channels-last tensors whose channels fill whole words. Each call of the library
    copies its inputs and outputs. `gradients` is the number of gradients. Depthwise convolutions run on other kernels
    and need no copies.
    """
    if numerics.matrix == "fp32" or _is_depthwise(dims):
        return []
    known = constants.shipped_constants().kernels
    moved: Floats = np.zeros(1)
    for side, prefix in (("c_in", "in"), ("c_out", "out")):
        channels = np.asarray(dims[side])
        is_whole_words = bool(np.any(channels % known.word_elements == 0))
        is_unpadded = side == "c_in" and bool(np.all(channels <= known.unpadded_channels))
        if not numerics.channels_last or not (is_whole_words or is_unpadded):
            sizes = (dims[f"{prefix}_{axis}"] for axis in ("d", "h", "w"))
            moved = moved + dims["batch"] * channels * prod(sizes)
    if not moved.any():
        return []
    copies = elementwise(f"{name}.layout", numerics, moved, 1.0, 1.0, launches=0.0)
    if numerics.training and gradients:
        gradient = replace(copies[0], name=f"{name}.layout.gradient", phase="backward", count=float(gradients))
        copies.append(gradient)
    return copies


def _has_no_tensor_kernel(numerics: Numerics, dims: Mapping[str, Dim]) -> bool:
    """Return whether a grouped convolution has no kernel for tensor cores."""
    groups = np.asarray(dims["groups"])
    is_grouped = bool(np.all(groups > 1)) and not _is_depthwise(dims)
    is_untuned = is_grouped and bool(np.all(groups % constants.shipped_constants().kernels.tuned_groups))
    return numerics.matrix != "fp32" and numerics.channels_last and is_untuned


def _is_depthwise(dims: Mapping[str, Dim]) -> bool:
    """Return whether every group of a convolution has one input channel."""
    groups = np.asarray(dims["groups"])
    return bool(np.all(groups > 1)) and bool(np.all(groups == np.asarray(dims["c_in"])))


def channel_norm(name: str, numerics: Numerics, elements: Floats, *, flat: bool = True) -> list[Op]:
    """Return the batch, instance or group norm of images. Samples are volumes unless `flat`.

    In each direction, one kernel computes statistics and another one normalises.
    """
    ops = pointwise(name, numerics, elements, reads=2.0, absorbed=False, backward=(4.0, 1.0))
    return ops if flat else _compose_as_chain(name, numerics, elements, "channelnorm", "norm", ops)


def pool(name: str, numerics: Numerics, before: Floats, ratio: Dim) -> list[Op]:
    """Return a maximum or mean pooling over `before` elements, whose output has `ratio` times as many elements."""
    ops = elementwise(name, numerics, before, 1.0, ratio)
    if numerics.training:
        ops += elementwise(f"{name}.gradient", numerics, before, 2 * ratio, 1.0, phase="backward")
    return ops


def norm(name: str, numerics: Numerics, rows: Floats, cols: float, *, rms: bool, readers: float = 1.0) -> list[Op]:
    """Return a layer norm, or an RMS norm if `rms`, over rows of `cols` elements, whose output `readers` products read.

    The backward pass has two kernels, one for the input gradient and one for the gradients of weight and bias. Eager
    autocast runs both passes in FP32. Each product then casts its input to 16 bits, and the gradient back.
    """
    kind: Composed = "rmsnorm" if rms else "layernorm"
    inside = numerics.in_fp32 if numerics.autocast else numerics
    ops = rowwise(name, inside, kind, rows, cols, launches=2.0)
    ops = _compose_as_chain(name, inside, rows * cols, kind, "norm", ops)
    if numerics.autocast:
        casts = pointwise(f"{name}.cast", numerics, rows * cols, reads=2.0, writes=1.0, backward=(1.0, 2.0))
        ops += [replace(op, count=readers) for op in casts]
    return ops


@dataclass(frozen=True, slots=True)
class KernelChain:
    """Element-wise kernels that together compute one operator.

    `forward` and `backward` each count the tensors read, the tensors written and the kernels of that pass.
    """

    forward: tuple[float, float, int]
    backward: tuple[float, float, int]
    wide: bool
    """Whether autocast runs the chain in FP32, because it has powers or sums."""


_GELU = KernelChain((10.0, 8.0, 8), (16.0, 10.0, 10), wide=True)
CHAINS: Mapping[Composed, KernelChain] = {
    "rmsnorm": KernelChain((5.0, 4.0, 7), (12.5, 7.5, 12), wide=True),
    "layernorm": KernelChain((5.0, 3.0, 5), (12.0, 6.0, 10), wide=True),
    "channelnorm": KernelChain((5.0, 3.0, 5), (12.0, 6.0, 10), wide=True),
    "gelu": _GELU,
    "tanh-gelu": _GELU,
    "hard-swish": KernelChain((5.0, 4.0, 4), (9.0, 5.0, 5), wide=False),
    "dropout": KernelChain((4.25, 4.25, 5), (3.0, 2.0, 2), wide=False),
}
"""Operators that a framework may compose of element-wise kernels, counted from the formulas and their derivatives.

Layer and channel norm: mean, squared difference, its mean, product, sum (TensorFlow, nn_impl.py: moments,
batch_normalization). RMS norm: conversion, square, mean, product, conversion, product with the weight (Hugging Face,
LlamaRMSNorm). GELU in its tanh form: power, product, sum, product, tanh, sum, product, product. Hard swish: sum, clip,
product, quotient (MMCV, HSwish). Dropout: draw in FP32, compare, convert, scale, multiply.
"""


def _compose_as_chain(
    name: str, numerics: Numerics, elements: Floats, kind: Composed, fusing: PassName, whole: list[Op]
) -> list[Op]:
    """Return an operator as the chain of element-wise kernels that its framework runs.

    The fusion pass `fusing` replaces the chain with the operators `whole`. If the framework has a kernel for the
    operator, return `whole`.
    """
    if kind not in numerics.composed:
        return whole
    chain = CHAINS[kind]
    # Models written like LlamaRMSNorm (Hugging Face) convert to FP32 themselves.
    is_wide = kind == "rmsnorm" or (chain.wide and numerics.autocast)
    inside = numerics.in_fp32 if is_wide else numerics
    ops = []
    for phase in numerics.phases:
        reads, writes, kernels = chain.forward if phase == "forward" else chain.backward
        label = name if phase == "forward" else f"{name}.gradient"
        each = reads / kernels, writes / kernels
        ops += elementwise(label, inside, elements, *each, phase=phase, count=float(kernels))
    return replace_when_fused(fusing, ops, whole)


def pointwise(
    name: str,
    numerics: Numerics,
    elements: Floats,
    *,
    reads: Dim = 1.0,
    writes: Dim = 1.0,
    mask_bytes: float = 0.0,
    kernels: int = 1,
    absorbed: bool = True,
    backward: tuple[Dim, Dim] = (2.0, 1.0),
    kind: Composed | None = None,
) -> list[Op]:
    """Return an element-wise operator, such as an activation or a residual sum, forward and backward.

    Eager code runs it as `kernels` kernels, each a full pass over memory. If `absorbed`, fusion reduces them to one.
    `backward` is the number of tensors that the gradient reads and writes. `kind` is the operator's key in `CHAINS`, if
    frameworks may compose it.
    """
    ops = elementwise(name, numerics, elements, reads, writes, mask_bytes=mask_bytes)
    if numerics.training:
        ops += elementwise(f"{name}.gradient", numerics, elements, *backward, mask_bytes=mask_bytes, phase="backward")
    eager = [replace(op, count=float(kernels)) for op in ops]
    if kind is not None and kind in numerics.composed:
        return _compose_as_chain(name, numerics, elements, kind, "elementwise", ops)
    return replace_when_fused("elementwise", eager, ops) if absorbed and kernels > 1 else eager


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences in one call of an attention kernel: their number, and the queries and keys per sequence, (S,)."""

    batch: Floats
    queries: Floats
    keys: Floats


def attention(
    name: str,
    numerics: Numerics,
    sequences: Sequences,
    heads: Floats,
    kv_heads: Floats,
    head_dim: float,
    *,
    causal: bool = False,
    dropout: bool = False,
    value_dim: float | None = None,
    biased: bool = False,
    wide_softmax: bool = False,
) -> list[Op]:
    """Return scaled dot-product attention, as one fused kernel if `numerics.flash`, otherwise as several kernels.

    Args:
        name: prefix of the operators' names.
        numerics: how tensors are stored, and whether attention is fused (`flash`).
        sequences: number of sequences, and queries and keys of each.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: width of a query and a key.
        causal: whether a causal mask applies.
        dropout: whether attention weights are dropped out in training.
        value_dim: width of a value. By default it is `head_dim`.
        biased: whether a trained table of biases is added to the scores.
        wide_softmax: whether the softmax runs in FP32 and its result is cast to 16 bits. `numerics` may require it too.
    """
    values = head_dim if value_dim is None else value_dim
    if numerics.flash:
        dims: dict[str, Dim] = {
            "batch": sequences.batch, "heads": heads, "kv_heads": kv_heads, "seq_q": sequences.queries,
            "seq_kv": sequences.keys, "causal": float(causal),
        }  # fmt: skip
        return _fused_attention(name, numerics, dims, head_dim, values)
    matrices, queries, keys = sequences.batch * heads, sequences.queries, sequences.keys
    masks = 2 if causal else 1
    weights, gradient = _softmax(
        name, numerics, matrices * queries, keys, masks, biased=biased, wide=wide_softmax or numerics.wide_softmax
    )
    if dropout and numerics.training:
        scores = matrices * queries * keys
        drawn = pointwise(f"{name}.dropout", numerics, scores, mask_bytes=1.0, backward=(1.0, 1.0), kind="dropout")
        weights += _mark_selective(drawn)
    return _unfused_attention(name, numerics, sequences, matrices, (head_dim, values), weights, gradient)


def _unfused_attention(
    name: str,
    numerics: Numerics,
    sequences: Sequences,
    matrices: Floats,
    widths: tuple[float, float],
    weights: list[Op],
    gradient: Op,
) -> list[Op]:
    """Return attention as two batched GEMMs, with `weights` between them.

    Args:
        name: beginning of the operators' names.
        numerics: how tensors are stored.
        sequences: queries and keys of each sequence.
        matrices: number of score matrices, over all sequences and heads.
        widths: width of a key and of a value.
        weights: operators that compute attention weights from the scores.
        gradient: gradient of the softmax.
    """
    queries, keys, (width, values) = sequences.queries, sequences.keys, widths
    scores, *score_gradients = matrix_products(
        f"{name}.scores",
        numerics.unquantized,
        matrices,
        ("", queries, keys, width),
        (".query-gradient", queries, width, keys),
        (".key-gradient", keys, width, queries),
    )
    read = matrix_products(
        f"{name}.values",
        numerics.unquantized,
        matrices,
        ("", queries, values, keys),
        (".weights-gradient", queries, keys, values),
        (".gradient", keys, values, queries),
    )
    return [scores, *weights, *read, *([gradient, *score_gradients] if numerics.training else ())]


def _fused_attention(name: str, numerics: Numerics, dims: dict[str, Dim], head_dim: float, values: float) -> list[Op]:
    """Return attention in one fused kernel and, in training, its gradient.

    The kernel model has a single width, so the mean width over all products is used. One of two forward products, and
    two of five backward products, are as wide as the values.
    """
    forward = KernelTable.from_dimensions(
        "attention", numerics.vector, **dims, head_dim=(head_dim + values) / 2, backward=0.0
    )
    ops = [Op(name, forward, selective=True)]
    if numerics.training:
        width = (3 * head_dim + 2 * values) / 5
        backward = KernelTable.from_dimensions("attention", numerics.vector, **dims, head_dim=width, backward=1.0)
        ops.append(Op(f"{name}.gradient", backward, "backward", launches=3.0))
    return ops


def _softmax(
    name: str, numerics: Numerics, rows: Floats, cols: Floats, masks: int, *, biased: bool, wide: bool
) -> tuple[list[Op], Op]:
    """Return the operators between the two GEMMs of unfused attention, and the softmax gradient.

    These operators are scale and mask in `masks` kernels, bias, softmax and casts, over rows x cols scores.
    """
    scores = rows * cols
    scale_mask = pointwise(f"{name}.scale-mask", numerics, scores, kernels=masks, absorbed=False, backward=(1.0, 1.0))
    ops = drop_when_fused("elementwise", _mark_selective(scale_mask))
    promotes = numerics.adds_mask and not biased
    if promotes:
        # A mask in FP32 makes scores of 16 bits FP32.
        size = 2.0 if wide else 1.0
        masked = pointwise(f"{name}.mask", numerics, scores, writes=size, absorbed=False, backward=(size, 1.0))
        ops += drop_when_fused("elementwise", _mark_selective(masked))
    whole = numerics.in_fp32 if wide else numerics
    if biased:
        added = pointwise(f"{name}.bias", whole, scores, absorbed=False, backward=(1.0, 0.0))
        ops += drop_when_fused("elementwise", _mark_selective(added))
    # A wide softmax reads scores and writes their gradient in 16 bits, so it moves as much as fewer rows in FP32.
    shares = (0.75, 5 / 6) if wide and not (biased or promotes) else (1.0, 1.0)
    softmax = KernelTable.from_dimensions("softmax", whole.vector, rows=rows * shares[0], cols=cols, backward=0.0)
    ops.append(Op(f"{name}.softmax", softmax, selective=True))
    if wide:
        casts = pointwise(f"{name}.cast", numerics, scores, reads=2.0, absorbed=False, backward=(1.0, 2.0))
        ops += _mark_selective(casts)
    gradient = KernelTable.from_dimensions("softmax", whole.vector, rows=rows * shares[1], cols=cols, backward=1.0)
    return ops, Op(f"{name}.softmax.gradient", gradient, "backward")


def cross_entropy(name: str, numerics: Numerics, rows: Floats, cols: Floats) -> list[Op]:
    """Return the softmax cross-entropy over `cols` classes, with one operator per pass over the logits.

    Compiled code reads the logits twice, for the maximum and the sum, and once more to write the gradient. Eager code
    copies the logits to FP32 and normalises them into a second copy, which takes two reads and one write. In the
    backward pass it fills the gradient of the target entries, computes the gradient of the logits from it, and converts
    it back.
    """
    e = numerics.element

    def passes(*each: tuple[str, float, float, Phase]) -> list[Op]:
        """Return one operator per (label, bytes read, bytes written, phase), if the job runs the phase."""
        return [
            memory_pass(f"{name}{label}", "fp32", rows * cols, read, written, phase)
            for label, read, written, phase in each
            if phase in numerics.phases
        ]

    eager = passes(("", 8.0, 4.0, "forward"), (".fill", 0.0, 4.0, "backward"), (".gradient", 8.0, 4.0, "backward"))
    if e < 4:
        eager += passes((".to-fp32", e, 4.0, "forward"), (".from-fp32", 4.0, e, "backward"))
    return replace_when_fused("loss", eager, passes(("", 2 * e, 0.0, "forward"), (".gradient", e, e, "backward")))


def logit_bytes(numerics: Numerics, *, returned: bool = True) -> tuple[float, float]:
    """Return the bytes per logit that a loss saves for its backward pass, and those that this pass needs in addition.

    Eager frameworks save a normalised FP32 copy of the logits. If the model returns the logits to the training loop
    (`returned`), they also stay in memory. The backward pass adds two FP32 gradients, of the target entries and of the
    logits.

    If weights are stored only in 16 bits, only some frameworks copy the logits to FP32 (`loss_element`).

    Megatron's `parallel` loss saves the softmax in FP32, turns it into the gradient in place, and converts the gradient
    (tensor_parallel/cross_entropy.py). An `upcast` loss saves FP32 logits and a shifted copy, and turns the copy into
    the gradient in place. A `fused` loss saves the logits and writes the gradient in their type. If the loss processes
    the logits in chunks, only one chunk's gradients exist at a time.

    The training loop may get a copy of the logits in FP32 as well (`returned_copy`).
    """
    if not numerics.training:
        return numerics.element, 4.0
    if numerics.loss == "fused":
        return numerics.element, numerics.element / numerics.loss_chunks
    if numerics.loss == "parallel":
        return 4.0, numerics.element
    if numerics.loss == "upcast":
        return 8.0 + numerics.returned_copy, numerics.element
    kept = (numerics.element + numerics.returned_copy if returned else 0.0) + numerics.loss_element
    return kept, 2 * numerics.loss_element / numerics.loss_chunks


def embedding(name: str, numerics: Numerics, rows: Floats, cols: float) -> list[Op]:
    """Return a look-up in an embedding table and, in training, the scatter-add of its gradient."""
    return rowwise(name, numerics, "embedding", rows, cols, launches=4.0)


def drop_when_fused(name: PassName, ops: Iterable[Op]) -> list[Op]:
    """Return the operators, each marked to be removed by the fusion pass `name`."""
    return [replace(op, unless=name) for op in ops]


def replace_when_fused(name: PassName, eager: Iterable[Op], fused: Iterable[Op]) -> list[Op]:
    """Return the `eager` and `fused` operators, marked so that the fusion pass `name` replaces the eager ones."""
    return drop_when_fused(name, eager) + [replace(op, only=name) for op in fused]


def set_launches(ops: Iterable[Op], launches: Sequence[float]) -> list[Op]:
    """Return the operators with `launches` (forward, backward) as the total number of kernel launches of each pass."""
    share = {"forward": float(launches[0]), "backward": float(launches[1])}
    return [replace(op, launches=share[op.phase] / op.count) for op in ops]


def _mark_selective(ops: Iterable[Op]) -> list[Op]:
    """Return the operators, with each forward operator marked to be repeated by selective recomputation."""
    return [replace(op, selective=op.phase == "forward") for op in ops]
