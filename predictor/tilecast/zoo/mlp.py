"""The MLP of a layer on one rank: dense, or experts behind a router."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilecast.frameworks import Composed
from tilecast.graph import CollectiveCall, Op
from tilecast.model import Model
from tilecast.spec import Floats, Workload
from tilecast.zoo import grouped, layers
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import NORMED, PHASES, Linear, Part, Rank, norm_parameters, residual, tensor_collectives


def mlp(workload: Workload, rank: Rank) -> Part:
    """Build a dense MLP, gated if the model's MLPs are."""
    model, numerics = workload.model, Numerics.of(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    dense = model.own(Transformer).dense_ffn_hidden
    f = model.ffn_hidden if dense is None else dense
    tokens, outer = rank.tokens, rank.outer_tokens
    dropout = model.dropout and workload.training
    ups = 2.0 if model.gated_mlp else 1.0
    ops = layers.norm("mlp.norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.linear("mlp.up", numerics, tokens, h, ups * f / t, bias=model.bias, cast=NORMED)
    ops += _activation("mlp.activation", workload, numerics, tokens * f / t)
    spread = (1.0, outer / tokens)
    ops += layers.linear("mlp.down", numerics, tokens, f / t, h, bias=model.bias, cast=spread)
    ops += residual("mlp.residual", numerics, outer * h, dropout)
    narrow = numerics.product_input
    activation_bytes = (
        (e + numerics.norm_extra + narrow) * outer * h
        + tokens * (e * (_mlp_tensors(model, numerics) - 1) + narrow) * f / t
        + (outer * h if dropout else 0.0)
    )
    parameters = (ups + 1) * h * f / t + norm_parameters(model)
    if model.bias:
        parameters = parameters + ups * f / t + h
    linears = (Linear("mlp.up", tokens, float(h), ups * f / t, ups), Linear("mlp.down", tokens, f / t, float(h)))
    none = np.zeros(1)
    collectives = tensor_collectives("mlp", workload, rank)
    return Part(ops, collectives, parameters, activation_bytes, none, none, e * tokens * f / t, linears)


def _mlp_tensors(model: Model, numerics: Numerics) -> int:
    """Return how many tensors of the MLP's width are kept.

    Without a gate these are the activation's input and output. With a gate they are its two inputs, their product and,
    unless the gate is one kernel, the activated input.
    """
    if not model.gated_mlp:
        return 2
    return 3 if numerics.fused_gate else 4


def expert_mlp(workload: Workload, rank: Rank, experts: int) -> Part:
    """Build a router, the `top_k` experts that each token visits, and the shared MLP that all tokens visit.

    Experts are whole: their tensor-parallel size is one, as Megatron folds them over tensor and data ranks. With a
    balanced router, a rank therefore computes `top_k` experts for its part of the tokens.
    """
    model, dims, numerics = workload.model, workload.model.own(Transformer), Numerics.of(workload)
    e, h, f, t = numerics.element, model.hidden, model.ffn_hidden, rank.tensor
    outer = rank.outer_tokens
    tokens = rank.tokens / t
    chosen = dims.top_k
    slots = tokens * chosen * dims.capacity_factor
    local = experts / rank.expert
    ups = 2.0 if model.gated_mlp else 1.0
    shared = dims.shared_ffn_hidden
    calls = grouped.launches(workload, local)

    ops = layers.norm("experts.norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.linear("experts.router", numerics.unquantized, tokens, h, float(experts))
    ops += layers.pointwise("experts.gate", numerics, tokens * experts, kernels=4, absorbed=False)
    ops += layers.pointwise("experts.dispatch", numerics, slots * h, kernels=2, absorbed=False, backward=(1.0, 1.0))
    ops += grouped.linear("up", numerics, local, slots, (h, ups * f), calls, bias=model.bias)
    ops += _activation("experts.activation", workload, numerics, slots * f)
    ops += grouped.linear("down", numerics, local, slots, (f, h), calls)
    if model.bias:
        ops += grouped.weighted_bias(numerics, slots * h, calls)
    ops += layers.pointwise("experts.combine", numerics, slots * h, kernels=2, absorbed=False, backward=(1.0, 1.0))
    linears: tuple[Linear, ...] = ()
    if shared:
        ops += layers.linear("experts.shared-up", numerics, tokens, h, ups * shared)
        ops += _activation("experts.shared-activation", workload, numerics, tokens * shared)
        ops += layers.linear("experts.shared-down", numerics, tokens, shared, h)
        linears = (
            Linear("experts.shared-up", tokens, float(h), ups * shared, ups),
            Linear("experts.shared-down", tokens, shared, float(h)),
        )
    ops += residual("experts.residual", numerics, outer * h, model.dropout and workload.training)
    wide = _mlp_tensors(model, numerics)
    narrow = numerics.product_input
    # Kept per slot: the inputs of an expert's products in the type that these read, the inputs of its activation, and
    # a copy of its output for the gradient of the tokens' weights. Hand-written kernels need no such copy, since they
    # multiply these weights in before the second product.
    slot = narrow * (h + f) + e * (wide - 1) * f + (0.0 if workload.fused_kernels else e * h)
    activation_bytes = (2 * e + numerics.norm_extra) * outer * h + slots * slot + e * tokens * wide * shared
    selected = e * slots * (h + f) + e * tokens * shared
    one = (ups + 1) * h * f
    parameters = one * local + h * experts + (ups + 1) * h * shared + norm_parameters(model)
    collectives = [
        CollectiveCall(f"experts.{name}", "all_to_all", "expert", e * slots * h, phase, fanout=chosen)
        for phase in PHASES
        for name in ("dispatch", "combine")
    ]
    return Part(ops, collectives, parameters, activation_bytes, np.zeros(1), one * local, selected, linears)


def _activation(name: str, workload: Workload, numerics: Numerics, elements: Floats) -> list[Op]:
    model, dims = workload.model, workload.model.own(Transformer)
    if model.gated_mlp:
        one = layers.pointwise(name, numerics, elements, reads=2.0, backward=(3.0, 2.0))
        # Eager code runs a kernel for the gate's activation and one for the product; backward, one for each factor and
        # one for the activation.
        apart = layers.pointwise(name, numerics, elements, reads=3.0, writes=2.0, backward=(6.0, 3.0))
        apart = [replace(op, launches=2.0 if op.phase == "forward" else 3.0) for op in apart]
        ops = layers.fused_into("elementwise", apart, one)
        if dims.activation_clamp and workload.execution not in ("compiled", "xla"):
            # Clamps the two inputs one after the other and joins them; backward, a mask for each and the same copies.
            ops += layers.pointwise(f"{name}.clamp", numerics, elements, reads=4.0, writes=4.0, backward=(6.0, 4.0))
        return ops
    kind: Composed = "tanh-gelu" if dims.tanh_gelu else "gelu"
    return layers.pointwise(name, numerics, elements, kind=kind)
