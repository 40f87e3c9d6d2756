"""Building blocks of all model families: functions that return the operators of one part of a layer.

They return the operators of the forward and the backward pass. Shapes follow the legend of `tilecast.spec`; every
dimension may be a column over shards, (S,).
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
"""A dimension: a column over shards, (S,), or one number for all of them."""


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

    Backward is two GEMMs of the same FLOPs, for the gradients of X and of W, plus a reduction over tokens for the bias.

    Args:
        name: beginning of the operators' names.
        numerics: how tensors are stored and kernels are fused.
        tokens: rows of X.
        inputs: columns of X.
        outputs: columns of Y.
        bias: whether there is a bias.
        trainable: whether the weight has a gradient; by default it has one unless the job's weights are frozen.
        input_gradient: whether X has a gradient.
        cast: shares of the input and of the output's gradient that are quantized here in FP8. They are below 1 where a
            norm writes its output in FP8, or where tensor-parallel ranks gather what each has cast.
    """
    ops = quantize(name, numerics, tokens * inputs * cast[0], "forward")
    ops.append(gemm(name, numerics, tokens, outputs, inputs))
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
    """Return a product of matrices [m, k] and [k, n], or a batch of products.

    Where it is `accumulated`, it is added to an FP32 buffer. The `options` are further fields of `Op`.
    """
    sizes = {"batch": batch, "m": m, "n": n, "k": k, "accumulated": float(accumulated)}
    return Op(name, KernelTable.of("gemm", numerics.matrix, **sizes), phase, **options)


def products(
    name: str, numerics: Numerics, batch: Dim, *shapes: tuple[str, Dim, Dim, Dim], selective: bool = True
) -> list[Op]:
    """Return the operators of `batch` products of matrices [m, k] and [k, n] for each of `shapes`.

    A shape is (label, m, n, k). The first one is the forward pass, which selective recomputation runs again if
    `selective`; the others are its gradients.
    """
    first, *gradients = [
        gemm(f"{name}{label}", numerics, m, n, k, "backward", batch=batch)
        for label, m, n, k in (shapes if numerics.training else shapes[:1])
    ]
    return [replace(first, phase="forward", selective=selective), *gradients]


def rowwise(name: str, numerics: Numerics, kind: str, rows: Floats, cols: Dim, *, launches: float = 1.0) -> list[Op]:
    """Return a kernel over rows of `cols` elements, and its gradient, which is launched as `launches` kernels."""
    ops = [Op(name, KernelTable.of(kind, numerics.vector, rows=rows, cols=cols, backward=0.0))]
    if numerics.training:
        backward = KernelTable.of(kind, numerics.vector, rows=rows, cols=cols, backward=1.0)
        ops.append(Op(f"{name}.gradient", backward, "backward", launches=launches))
    return ops


def quantize(name: str, numerics: Numerics, elements: Floats, phase: Phase) -> list[Op]:
    """Return the cast of an operand of `elements` to 8 or 4 bits, or an empty list if products run in more bits.

    Per element 16 bits are read. Training writes two copies, by rows for this product and by columns for the gradient
    (Transformer Engine, pytorch/tensor/float8_tensor.py and mxfp8_tensor.py: rowwise and columnwise usage; torchao,
    float8/float8_linear.py casts both operands). NVFP4 reads its operand once more, for the largest number of the
    tensor, which scales those of the blocks (common/cast/nvfp4).
    """
    if numerics.matrix not in QUANTIZED or not np.any(elements):
        return []
    written = ELEMENT_BYTES[numerics.matrix] * (2.0 if numerics.training else 1.0) / numerics.element
    reads = 2.0 if numerics.matrix == "nvfp4" else 1.0
    return elementwise(f"{name}{QUANTIZE}", numerics, elements, reads, written, phase=phase)


QUANTIZE = ".quantize"
"""End of the name of a cast to 8 or 4 bits."""


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
    """Return an element-wise kernel that reads and writes so many bytes for each of `elements`.

    Where a random number is `drawn` for each element, that takes time too. The `options` are further fields of `Op`.
    """
    sizes = {"elements": elements, "read_bytes": read_bytes, "written_bytes": written_bytes, "drawn": float(drawn)}
    return Op(name, KernelTable.of("elementwise", precision, **sizes), phase, **options)


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
    """Return a kernel over `elements` that reads `reads` tensors and writes `writes` tensors.

    The tensors have the type of activations. A dropout mask adds `mask_bytes` per element, which the forward pass draws
    and writes, and the backward pass reads. The `options` are further fields of `Op`.
    """
    is_forward = phase == "forward"
    read = reads * numerics.element + (0.0 if is_forward else mask_bytes)
    written = writes * numerics.element + (mask_bytes if is_forward else 0.0)
    drawn = mask_bytes > 0 and is_forward
    return [memory_pass(name, numerics.vector, elements, read, written, phase, drawn=drawn, **options)]


def conv_dims(
    batch: Floats, image: Sequence[float], window: Sequence[float], output: Sequence[float], groups: Dim = 1.0
) -> dict[str, Dim]:
    """Return the dimensions of a convolution except its direction, by their names in `graph.KINDS`.

    Args:
        batch: images.
        image: channels, depth, height and width of the input.
        window: depth, height and width of the kernel.
        output: channels, depth, height and width of the output.
        groups: groups of channels.
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
    """Return the operators of a convolution: forward, gradients, and copies of layout where its kernels need them.

    `dims` are the dimensions of kind `conv` except its direction. The forward pass of a transposed convolution is the
    input gradient of the plain one, and the reverse.
    """
    ops = drop_when_fused("layout", _layout_copies(name, numerics, dims, input_gradient + trainable))
    kind = "direct_conv" if _lacks_tensor_kernel(numerics, dims) else "conv"
    passes: list[tuple[str, float, Phase]] = [("", float(transposed), "forward")]
    passes += [(".input-gradient", float(not transposed), "backward")] * (numerics.training and input_gradient)
    passes += [(".weight-gradient", 2.0, "backward")] * (numerics.training and trainable)
    for label, direction, phase in passes:
        table = KernelTable.of(kind, numerics.matrix, **dims, direction=direction)
        ops.append(Op(f"{name}{label}", table, phase))
    return ops


def _layout_copies(name: str, numerics: Numerics, dims: Mapping[str, Dim], gradients: int) -> list[Op]:
    """Return the copies around a convolution on tensor cores.

    Its kernels read and write channels last and whole words. Each of them is one call of the library, which copies what
    it reads and what it writes. Depthwise convolutions do not run on tensor cores and need no copies.
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


def _lacks_tensor_kernel(numerics: Numerics, dims: Mapping[str, Dim]) -> bool:
    groups = np.asarray(dims["groups"])
    is_grouped = bool(np.all(groups > 1)) and not _is_depthwise(dims)
    is_untuned = is_grouped and bool(np.all(groups % constants.shipped_constants().kernels.tuned_groups))
    return numerics.matrix != "fp32" and numerics.channels_last and is_untuned


def _is_depthwise(dims: Mapping[str, Dim]) -> bool:
    groups = np.asarray(dims["groups"])
    return bool(np.all(groups > 1)) and bool(np.all(groups == np.asarray(dims["c_in"])))


def channel_norm(name: str, numerics: Numerics, elements: Floats, *, flat: bool = True) -> list[Op]:
    """Return batch, instance or group norm of images, or of volumes if not `flat`.

    One pass computes the statistics and one normalises; backward likewise.
    """
    ops = pointwise(name, numerics, elements, reads=2.0, absorbed=False, backward=(4.0, 1.0))
    return ops if flat else _compose_as_chain(name, numerics, elements, "channelnorm", "norm", ops)


def pool(name: str, numerics: Numerics, before: Floats, ratio: Dim) -> list[Op]:
    """Return maximum or mean pooling over `before` elements, of which the share `ratio` remains."""
    ops = elementwise(name, numerics, before, 1.0, ratio)
    if numerics.training:
        ops += elementwise(f"{name}.gradient", numerics, before, 2 * ratio, 1.0, phase="backward")
    return ops


def norm(name: str, numerics: Numerics, rows: Floats, cols: float, *, rms: bool) -> list[Op]:
    """Return layer norm or RMS norm over rows of `cols` elements.

    Backward is two kernels: one for the gradient of the input, and the reduction for weight and bias.
    """
    kind: Composed = "rmsnorm" if rms else "layernorm"
    ops = []
    if numerics.autocast:
        casts = pointwise(f"{name}.cast", numerics, rows * cols, reads=2.0, writes=1.0, backward=(1.0, 2.0))
        ops += drop_when_fused("norm", casts)
    ops += rowwise(name, numerics, kind, rows, cols, launches=2.0)
    return _compose_as_chain(name, numerics, rows * cols, kind, "norm", ops)


@dataclass(frozen=True, slots=True)
class KernelChain:
    """An operator written as element-wise kernels: tensors read, tensors written and number of kernels, by pass."""

    forward: tuple[float, float, int]
    backward: tuple[float, float, int]
    wide: bool
    """Whether mixed precision runs it in FP32, as it does powers and sums."""


_GELU = KernelChain((10.0, 8.0, 8), (16.0, 10.0, 10), wide=True)
CHAINS: Mapping[Composed, KernelChain] = {
    "rmsnorm": KernelChain((5.0, 4.0, 7), (12.5, 7.5, 12), wide=True),
    "layernorm": KernelChain((5.0, 3.0, 5), (12.0, 6.0, 10), wide=True),
    "channelnorm": KernelChain((5.0, 3.0, 5), (12.0, 6.0, 10), wide=True),
    "gelu": _GELU,
    "tanh-gelu": _GELU,
    "dropout": KernelChain((4.25, 4.25, 5), (3.0, 2.0, 2), wide=False),
}
"""Operators that a framework may compose of element-wise kernels, counted from the formulas and their derivatives.

Layer and channel norm: mean, squared difference, its mean, product, sum (TensorFlow, nn_impl.py: moments,
batch_normalization). RMS norm: conversion, square, mean, product, conversion, product with the weight (Hugging Face,
LlamaRMSNorm). GELU in its tanh form: power, product, sum, product, tanh, sum, product, product. Dropout: draw in FP32,
compare, convert, scale, multiply.
"""


def _compose_as_chain(
    name: str, numerics: Numerics, elements: Floats, kind: Composed, fusing: PassName, whole: list[Op]
) -> list[Op]:
    """Return an operator as the chain of kernels that its framework composes.

    The fusion pass `fusing` replaces the chain with `whole`. `whole` is also the answer where the framework does not
    compose the operator.
    """
    if kind not in numerics.composed:
        return whole
    chain = CHAINS[kind]
    inside = numerics.in_fp32 if chain.wide else numerics
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
    """Return an activation, dropout, residual sum or the like, forward and backward.

    Eager code runs `kernels` kernels for it, each a full pass over memory; of a chain that fusion absorbs (`absorbed`)
    one kernel remains. `kind` names the operator if a framework may compose it (`CHAINS`).
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
    """Sequences of a rank as its attention kernel sees them: their number, and the queries and keys of each, (S,)."""

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
    """Return scaled dot-product attention as one fused kernel, or unfused.

    Args:
        name: beginning of the operators' names.
        numerics: how tensors are stored, and whether attention is fused (`flash`).
        sequences: number of sequences, and queries and keys of each.
        heads: heads of the queries.
        kv_heads: heads of the keys and values.
        head_dim: width of a query and a key.
        causal: whether a causal mask applies.
        dropout: whether scores are dropped out in training.
        value_dim: width of a value where it is not `head_dim`.
        biased: whether a trained table of biases is added to the scores.
        wide_softmax: whether the softmax is in FP32, and its result is cast to 16 bits for the second product.
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
    weights, gradient = _softmax(name, numerics, matrices * queries, keys, masks, biased=biased, wide=wide_softmax)
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
    """Return attention as two batched GEMMs around the operators over the score matrices.

    Args:
        name: beginning of the operators' names.
        numerics: how tensors are stored.
        sequences: queries and keys of each sequence.
        matrices: score matrices of all sequences and heads.
        widths: width of a key and of a value.
        weights: operators that make attention weights of the scores.
        gradient: gradient of the softmax.
    """
    queries, keys, (width, values) = sequences.queries, sequences.keys, widths
    scores, *score_gradients = products(
        f"{name}.scores",
        numerics.unquantized,
        matrices,
        ("", queries, keys, width),
        (".query-gradient", queries, width, keys),
        (".key-gradient", keys, width, queries),
    )
    read = products(
        f"{name}.values",
        numerics.unquantized,
        matrices,
        ("", queries, values, keys),
        (".weights-gradient", queries, keys, values),
        (".gradient", keys, values, queries),
    )
    return [scores, *weights, *read, *([gradient, *score_gradients] if numerics.training else ())]


def _fused_attention(name: str, numerics: Numerics, dims: dict[str, Dim], head_dim: float, values: float) -> list[Op]:
    """Return attention in one fused kernel.

    The kernel has a single width, chosen for the same FLOPs: of two products forward one is as wide as the values, of
    five products backward two are.
    """
    forward = KernelTable.of("attention", numerics.vector, **dims, head_dim=(head_dim + values) / 2, backward=0.0)
    ops = [Op(name, forward, selective=True)]
    if numerics.training:
        width = (3 * head_dim + 2 * values) / 5
        backward = KernelTable.of("attention", numerics.vector, **dims, head_dim=width, backward=1.0)
        ops.append(Op(f"{name}.gradient", backward, "backward", launches=3.0))
    return ops


def _softmax(
    name: str, numerics: Numerics, rows: Floats, cols: Floats, masks: int, *, biased: bool, wide: bool
) -> tuple[list[Op], Op]:
    """Return the operators between the two products of unfused attention, and the gradient of the softmax.

    They run over rows x cols scores: scale and mask in `masks` kernels, bias, softmax and its casts.
    """
    scores = rows * cols
    scale_mask = pointwise(f"{name}.scale-mask", numerics, scores, kernels=masks, absorbed=False, backward=(1.0, 1.0))
    ops = drop_when_fused("elementwise", _mark_selective(scale_mask))
    whole = numerics.in_fp32 if wide else numerics
    if biased:
        added = pointwise(f"{name}.bias", whole, scores, absorbed=False, backward=(1.0, 0.0))
        ops += drop_when_fused("elementwise", _mark_selective(added))
    # A wide softmax reads scores and writes their gradient in 16 bits, so it moves as much as fewer rows in FP32.
    shares = (0.75, 5 / 6) if wide and not biased else (1.0, 1.0)
    softmax = KernelTable.of("softmax", whole.vector, rows=rows * shares[0], cols=cols, backward=0.0)
    ops.append(Op(f"{name}.softmax", softmax, selective=True))
    if wide:
        casts = pointwise(f"{name}.cast", numerics, scores, reads=2.0, absorbed=False, backward=(1.0, 2.0))
        ops += _mark_selective(casts)
    gradient = KernelTable.of("softmax", whole.vector, rows=rows * shares[1], cols=cols, backward=1.0)
    return ops, Op(f"{name}.softmax.gradient", gradient, "backward")


def cross_entropy(name: str, numerics: Numerics, rows: Floats, cols: Floats) -> list[Op]:
    """Return the softmax cross-entropy over `cols` classes, one operator per pass over the logits.

    A compiler reads the logits twice (maximum, sum), and once more to write their gradient. Eager frameworks copy them
    to FP32, normalise the copy into a second one (two reads, one write), fill the gradient of the picked entries, turn
    it into that of the logits, and convert it back.
    """
    e = numerics.element

    def passes(*each: tuple[str, float, float, Phase]) -> list[Op]:
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
    """Return the bytes that a loss keeps of each logit until its backward pass, and needs besides during it.

    Eager frameworks keep a normalised copy of the logits in FP32. They also keep the logits if the model has `returned`
    them to the training loop, which holds them. Backward, two gradients in FP32 are added: that of the picked entries
    and that of the logits.

    Where weights are in 16 bits alone, only some frameworks copy the logits to FP32 (`loss_element`).

    Megatron's `parallel` loss keeps the softmax in FP32, turns it into the gradient in place, and converts that
    (tensor_parallel/cross_entropy.py). An `upcast` loss turns a shifted copy of FP32 logits into the gradient, in
    place, beside those logits. A `fused` loss keeps the logits, and writes their gradient in their type. If the logits
    are cut into chunks, the gradients of only one chunk exist at a time.
    """
    if not numerics.training:
        return numerics.element, 4.0
    if numerics.loss == "fused":
        return numerics.element, numerics.element / numerics.loss_chunks
    if numerics.loss == "parallel":
        return 4.0, numerics.element
    if numerics.loss == "upcast":
        return 8.0, numerics.element
    kept = (numerics.element if returned else 0.0) + numerics.loss_element
    return kept, 2 * numerics.loss_element / numerics.loss_chunks


def embedding(name: str, numerics: Numerics, rows: Floats, cols: float) -> list[Op]:
    """Return a table look-up and, backward, the scatter-add of its gradient."""
    return rowwise(name, numerics, "embedding", rows, cols, launches=4.0)


def drop_when_fused(name: PassName, ops: Iterable[Op]) -> list[Op]:
    """Return the operators, marked as removed by the fusion pass `name`."""
    return [replace(op, unless=name) for op in ops]


def replace_when_fused(name: PassName, eager: Iterable[Op], fused: Iterable[Op]) -> list[Op]:
    """Return the eager operators, and those that the fusion pass `name` replaces them with."""
    return drop_when_fused(name, eager) + [replace(op, only=name) for op in fused]


def launch_as(ops: Iterable[Op], launches: Sequence[float]) -> list[Op]:
    """Return operators, each of which is launched as so many kernels in the forward and in the backward pass."""
    share = {"forward": float(launches[0]), "backward": float(launches[1])}
    return [replace(op, launches=share[op.phase] / op.count) for op in ops]


def _mark_selective(ops: Iterable[Op]) -> list[Op]:
    """Return the operators, with the forward ones marked for selective recomputation."""
    return [replace(op, selective=op.phase == "forward") for op in ops]
