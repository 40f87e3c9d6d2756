"""The MLP of a layer on one rank: dense, or experts behind a router.

Columns are over shards, (S,). Some frameworks launch one kernel for all experts of a rank. Others launch one kernel per
expert (`frameworks.Framework.grouped_products`), which takes time on the host.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilecast import frameworks
from tilecast.frameworks import Composed
from tilecast.graph import CollectiveCall, KernelTable, Op
from tilecast.model import Model
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import PHASES, Numerics
from tilecast.zoo.parts import (
    NORMED,
    Linear,
    Rank,
    Sublayer,
    count_norm_parameters,
    residual_sum,
    tensor_parallel_collectives,
    zeros,
)


def build_mlp(workload: Workload, rank: Rank) -> Sublayer:
    """Build the dense MLP of a layer, with a gate if the model has gated MLPs."""
    model, numerics = workload.model, Numerics.from_workload(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    dense = model.own(Transformer).dense_ffn_hidden
    f = model.ffn_hidden if dense is None else dense
    tokens, outer = rank.tokens, rank.outer_tokens
    dropout = model.dropout and workload.training
    ups = 2.0 if model.gated_mlp else 1.0
    ops = layers.norm("mlp.norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.linear("mlp.up", numerics, tokens, h, ups * f / t, bias=model.bias, cast=NORMED)
    ops += _build_activation("mlp.activation", workload, numerics, tokens * f / t)
    spread = (1.0, outer / tokens)
    ops += layers.linear("mlp.down", numerics, tokens, f / t, h, bias=model.bias, cast=spread)
    ops += residual_sum("mlp.residual", numerics, outer * h, dropout)
    narrow = numerics.product_input
    reads = ups if numerics.casts_inputs else 1.0
    extra = numerics.gelu_extra if model.own(Transformer).tanh_gelu and not model.gated_mlp else 0.0
    activation_bytes = (
        (e + numerics.norm_extra + reads * narrow) * outer * h
        + tokens * (e * (_count_kept_tensors(model, numerics) - 1) + narrow + extra) * f / t
        + (outer * h if dropout else 0.0)
    )
    parameters = (ups + 1) * h * f / t + count_norm_parameters(model)
    if model.bias:
        parameters = parameters + ups * f / t + h
    linears = (Linear("mlp.up", tokens, float(h), ups * f / t, ups), Linear("mlp.down", tokens, f / t, float(h)))
    collectives = tensor_parallel_collectives("mlp", workload, rank)
    return Sublayer(ops, collectives, parameters, activation_bytes, selected=e * tokens * f / t, linears=linears)


def _count_kept_tensors(model: Model, numerics: Numerics) -> int:
    """Return the number of tensors of the MLP's width that are kept for the backward pass.

    Without a gate these are the activation's input and output. With a gate they are its two inputs, their product and,
    unless the gate is one kernel, the activated input.
    """
    if not model.gated_mlp:
        return 2
    return 3 if numerics.fused_gate else 4


def build_expert_mlp(workload: Workload, rank: Rank, experts: int) -> Sublayer:
    """Build a router, the `top_k` experts that each token visits, and the shared MLP that all tokens visit.

    Experts are whole: their tensor-parallel size is one, as Megatron folds them over tensor and data ranks. With a
    balanced router, a rank therefore computes `top_k` experts for its part of the tokens.
    """
    model, dims, numerics = workload.model, workload.model.own(Transformer), Numerics.from_workload(workload)
    e, h, f, t = numerics.element, model.hidden, model.ffn_hidden, rank.tensor
    outer = rank.outer_tokens
    tokens = rank.tokens / t
    chosen = dims.top_k
    slots = tokens * chosen * dims.capacity_factor
    local = experts / rank.expert
    ups = 2.0 if model.gated_mlp else 1.0
    shared = dims.shared_ffn_hidden
    calls = count_launches(workload, local)

    ops = layers.norm("experts.norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.linear("experts.router", numerics.unquantized, tokens, h, float(experts))
    ops += layers.pointwise("experts.gate", numerics, tokens * experts, kernels=4, absorbed=False)
    ops += layers.pointwise("experts.dispatch", numerics, slots * h, kernels=2, absorbed=False, backward=(1.0, 1.0))
    ops += _expert_linear("up", numerics, local, slots, (h, ups * f), calls, bias=model.bias)
    ops += _build_activation("experts.activation", workload, numerics, slots * f)
    ops += _expert_linear("down", numerics, local, slots, (f, h), calls)
    if model.bias:
        ops += _add_weighted_bias(numerics, slots * h, calls)
    ops += layers.pointwise("experts.combine", numerics, slots * h, kernels=2, absorbed=False, backward=(1.0, 1.0))
    linears: tuple[Linear, ...] = ()
    if shared:
        ops += layers.linear("experts.shared-up", numerics, tokens, h, ups * shared)
        ops += _build_activation("experts.shared-activation", workload, numerics, tokens * shared)
        ops += layers.linear("experts.shared-down", numerics, tokens, shared, h)
        linears = (
            Linear("experts.shared-up", tokens, float(h), ups * shared, ups),
            Linear("experts.shared-down", tokens, shared, float(h)),
        )
    ops += residual_sum("experts.residual", numerics, outer * h, model.dropout and workload.training)
    wide = _count_kept_tensors(model, numerics)
    narrow = numerics.product_input
    # Kept per slot: the inputs of an expert's products in the type that these read, the inputs of its activation, and
    # a copy of its output for the gradient of the tokens' weights. Hand-written kernels need no such copy, since they
    # multiply these weights in before the second product.
    slot = narrow * (h + f) + e * (wide - 1) * f + (0.0 if workload.fused_kernels else e * h)
    activation_bytes = (2 * e + numerics.norm_extra) * outer * h + slots * slot + e * tokens * wide * shared
    selected = e * slots * (h + f) + e * tokens * shared
    one = (ups + 1) * h * f
    parameters = one * local + h * experts + (ups + 1) * h * shared + count_norm_parameters(model)
    collectives = [
        CollectiveCall(f"experts.{name}", "all_to_all", "expert", e * slots * h, phase, fanout=chosen)
        for phase in PHASES
        for name in ("dispatch", "combine")
    ]
    return Sublayer(ops, collectives, parameters, activation_bytes, zeros(), one * local, selected, linears)


def _build_activation(name: str, workload: Workload, numerics: Numerics, elements: Floats) -> list[Op]:
    model, dims = workload.model, workload.model.own(Transformer)
    if model.gated_mlp:
        one = layers.pointwise(name, numerics, elements, reads=2.0, backward=(3.0, 2.0))
        # Eager code runs a kernel for the gate's activation and one for the product; backward, one for each factor and
        # one for the activation.
        apart = layers.pointwise(name, numerics, elements, reads=3.0, writes=2.0, backward=(6.0, 3.0))
        apart = [replace(op, launches=2.0 if op.phase == "forward" else 3.0) for op in apart]
        ops = layers.replace_when_fused("elementwise", apart, one)
        if dims.activation_clamp and workload.execution not in ("compiled", "xla"):
            # Clamps the two inputs one after the other and joins them; backward, a mask for each and the same copies.
            ops += layers.pointwise(f"{name}.clamp", numerics, elements, reads=4.0, writes=4.0, backward=(6.0, 4.0))
        return ops
    kind: Composed = "tanh-gelu" if dims.tanh_gelu else "gelu"
    return layers.pointwise(name, numerics, elements, kind=kind)


def count_launches(workload: Workload, local: Floats) -> Floats:
    """Return the number of kernels that a product of `local` experts takes, (S,)."""
    return local if frameworks.find_framework(workload).grouped_products == "each" else np.ones(1)


def _expert_linear(
    name: str,
    numerics: Numerics,
    local: Floats,
    slots: Floats,
    sides: tuple[float, float],
    calls: Floats,
    *,
    bias: bool = False,
) -> list[Op]:
    """Return the operators of a dense layer in each of the `local` experts of a rank.

    A balanced router shares the `slots` (tokens to compute) equally among the experts. `sides` are the inputs and the
    outputs of the layer. Each operator is launched as `calls` kernels.
    """
    rows = np.maximum(slots / local, 1.0)
    product = layers.linear(f"experts.{name}", numerics, rows, *sides, bias=bias)
    return [_repeat_for_experts(op, local, calls) for op in product]


def _repeat_for_experts(op: Op, experts: Floats, calls: Floats) -> Op:
    """Return an operator of one expert as that of `experts`: a batch of products, or a pass over more elements."""
    dims = op.table.dims * np.ones((len(experts), 1))
    dims[:, 0] *= experts  # the batch of a product, or the elements of a pass
    kind, precision = (np.broadcast_to(column, len(dims)) for column in (op.table.kind, op.table.precision))
    return replace(op, table=KernelTable(kind, precision, dims), launches=calls)


def _add_weighted_bias(numerics: Numerics, elements: Floats, calls: Floats) -> list[Op]:
    """Return the operators that add the experts' outputs and their biases times the tokens' weights.

    The weights are in FP32, and so is the sum. Forward: a product, a sum, a copy that joins the experts' parts, and a
    cast (Megatron-Core, transformer/moe/experts.py: _apply_bias). Backward: the cast and the copy again, then a product
    and a sum for the biases and another pair for the weights.
    """
    e = numerics.element
    name = "experts.weighted-bias"
    ops = [layers.memory_pass(name, "fp32", elements, e + 12.0, e + 12.0, launches=2.0 * calls)]
    if numerics.training:
        moved = 2 * e + 20.0, 2 * e + 12.0
        ops.append(layers.memory_pass(f"{name}.gradient", "fp32", elements, *moved, "backward", launches=6.0 * calls))
    return ops
