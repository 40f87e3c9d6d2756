"""The MLP of a layer on one rank: dense, or experts behind a router.

Columns are over shards, (S,). Some frameworks launch one kernel for all experts of a rank. Others launch one kernel per
expert (`frameworks.Framework.grouped_products`), which costs host time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tilecast import frameworks
from tilecast.frameworks import Composed
from tilecast.graph import CollectiveCall, KernelTable, Op
from tilecast.model import Model
from tilecast.spec import ExpertDispatch, Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import PHASES, Numerics
from tilecast.zoo.parts import (
    NORMED,
    Linear,
    RankSizes,
    Sublayer,
    build_residual_sum,
    count_norm_parameters,
    list_tensor_parallel_collectives,
    zeros,
)


def build_mlp(workload: Workload, rank: RankSizes) -> Sublayer:
    """Return the dense MLP of a layer, with a gate if the model's MLPs are gated."""
    model, numerics = workload.model, Numerics.from_workload(workload)
    e, h, t = numerics.element, model.hidden, rank.tensor
    dims = model.get_dimensions(Transformer)
    f = model.ffn_hidden if dims.dense_ffn_hidden is None else dims.dense_ffn_hidden
    tokens, outer = rank.tokens, rank.outer_tokens
    dropout = model.dropout and workload.training
    ups = 2.0 if model.gated_mlp else 1.0
    ops = layers.norm("mlp.norm", numerics, outer, h, rms=model.rms_norm, readers=ups)
    ops += layers.linear("mlp.up", numerics, tokens, h, ups * f / t, bias=model.bias, cast=NORMED)
    ops += _build_activation("mlp.activation", workload, numerics, tokens * f / t)
    spread = (1.0, outer / tokens)
    ops += layers.linear("mlp.down", numerics, tokens, f / t, h, bias=model.bias, cast=spread)
    if dims.output_norms:
        ops += layers.norm("mlp.output-norm", numerics, outer, h, rms=model.rms_norm)
    ops += build_residual_sum("mlp.residual", numerics, outer * h, dropout)
    # A product whose weight is frozen keeps its input only for the adapter beside it.
    narrow = numerics.product_input if workload.lora_targets == "all" or not workload.lora_rank else 0.0
    narrow *= numerics.keeps_inputs
    reads = ups if numerics.casts_inputs else 1.0
    extra = numerics.gelu_extra if dims.tanh_gelu and not model.gated_mlp else 0.0
    activation_bytes = (
        (e + numerics.norm_extra + reads * narrow) * outer * h
        + tokens * (e * (_count_kept_tensors(model, numerics) - 1) + narrow + extra) * f / t
        + (outer * h if dropout else 0.0)
        + ((e + numerics.norm_extra) * outer * h if dims.output_norms else 0.0)
    )
    parameters = (ups + 1) * h * f / t + (2 if dims.output_norms else 1) * count_norm_parameters(model)
    if model.bias:
        parameters = parameters + ups * f / t + h
    linears = (Linear("mlp.up", tokens, float(h), ups * f / t, ups), Linear("mlp.down", tokens, f / t, float(h)))
    collectives = list_tensor_parallel_collectives("mlp", workload, rank)
    inside = tokens * (e * (_count_kept_tensors(model, numerics) - 1) + narrow) * f / t
    normed = narrow * outer * h
    freed = [("mlp_act", narrow * tokens * f / t), ("mlp", inside + (normed if numerics.fuses_norms else 0.0))]
    if not numerics.fuses_norms:
        freed.append(("layernorm", normed))
    return Sublayer(
        ops, collectives, parameters, activation_bytes, selected=e * tokens * f / t, linears=linears, freed=tuple(freed)
    )


def _count_kept_tensors(model: Model, numerics: Numerics) -> int:
    """Return how many tensors of the MLP's width are saved for the backward pass.

    Without a gate, these are the input and the output of the activation. With a gate, they are the two inputs of the
    gate, their product and, unless the gate is one kernel, the activated input.
    """
    if not model.gated_mlp:
        return 2
    return 3 if numerics.fused_gate else 4


def build_expert_mlp(workload: Workload, rank: RankSizes, experts: int) -> Sublayer:
    """Return the sublayer of a router, `top_k` experts per token, and the shared MLP for all tokens.

    Experts are spread over tensor and data ranks as in Megatron. Each rank in a group of `rank.expert_tensor`
    neighbours gathers the tokens of the whole group, and computes a slice of each expert. The router is assumed to be
    balanced, so a rank computes as much as for `top_k` experts of each of its own tokens. The shared MLP is split over
    tensor ranks as a dense one (Megatron-Core 0.19, transformer/moe/shared_experts.py: SharedExpertMLP).
    """
    model, dims, numerics = workload.model, workload.model.get_dimensions(Transformer), Numerics.from_workload(workload)
    e, h, t, sharers = numerics.element, model.hidden, rank.tensor, rank.expert_tensor
    f = model.ffn_hidden / sharers
    outer = rank.outer_tokens
    tokens = rank.tokens / t
    chosen = dims.top_k
    slots = tokens * chosen * dims.capacity_factor
    local = experts / rank.expert
    gathered = slots * sharers
    ups = 2.0 if model.gated_mlp else 1.0
    shared = dims.shared_ffn_hidden
    width = shared / t
    inside = _find_expert_numerics(workload, numerics)
    is_wide = inside.matrix != numerics.matrix
    calls = local if is_wide else count_launches(workload, local)
    framework, dispatch = frameworks.find_framework(workload), frameworks.expert_dispatch(workload)

    ops = layers.norm("experts.norm", numerics, outer, h, rms=model.rms_norm)
    ops += layers.linear("experts.router", numerics.unquantized, tokens, h, float(experts))
    gate = layers.pointwise("experts.gate", numerics, tokens * experts, kernels=4, absorbed=False)
    grouped = framework.router_group_launches if dims.top_groups < dims.expert_groups else (0.0, 0.0)
    ops += layers.set_launches(gate, np.add(framework.router_launches, grouped).tolist())
    halves = [launches / 2 for launches in framework.permutation_launches]
    # Latent experts read a projection of the tokens, which is what is sent.
    inner = dims.expert_hidden or h
    if inner != h:
        ops += layers.linear("experts.latent-down", numerics, tokens, h, inner)
    # One half of the sorting is before the tokens are gathered, the other half after it.
    sorted_elements = (slots + gathered) / 2 * inner
    ops += layers.set_launches(_build_permutation("experts.dispatch", inside, sorted_elements, dispatch), halves)
    ops += _build_expert_linear("up", inside, local, gathered, (inner, ups * f), calls, bias=model.bias)
    ops += _build_activation("experts.activation", workload, inside, gathered * f)
    ops += _build_expert_linear("down", inside, local, gathered, (f, inner), calls)
    if model.bias:
        ops += _add_weighted_bias(inside, gathered * inner, calls)
    ops += layers.set_launches(_build_permutation("experts.combine", inside, sorted_elements, dispatch), halves)
    if inner != h:
        ops += layers.linear("experts.latent-up", numerics, tokens, inner, h)
    linears: tuple[Linear, ...] = ()
    if shared:
        ops += layers.linear("experts.shared-up", numerics, rank.tokens, h, ups * width)
        ops += _build_activation("experts.shared-activation", workload, numerics, rank.tokens * width)
        ops += layers.linear("experts.shared-down", numerics, rank.tokens, width, h)
        linears = (
            Linear("experts.shared-up", rank.tokens, float(h), ups * width, ups),
            Linear("experts.shared-down", rank.tokens, width, float(h)),
        )
    ops += build_residual_sum("experts.residual", numerics, outer * h, model.dropout and workload.training)
    wide = _count_kept_tensors(model, numerics)
    narrow, w = inside.product_input * numerics.keeps_inputs, inside.element
    # Kept per slot: the inputs of an expert's products in the type that these read, the inputs of its activation, and
    # a copy of its output for the gradient of the tokens' weights. Hand-written kernels need no such copy, since they
    # multiply these weights in before the second product.
    slot = narrow * (inner + f) + w * (wide - 1) * f
    slot = slot + (0.0 if frameworks.has_fused_kernels(workload) else w * inner)
    # Buffers of a stated capacity hold as many slots, filled or not. A stash takes the place of those of other layers.
    room = workload.expert_capacity or 1.0
    held = gathered * (workload.expert_stash or room)
    scratch = gathered * room * slot if workload.expert_stash and workload.training else zeros()
    activation_bytes = (2 * e + numerics.norm_extra) * outer * h + held * slot + e * tokens * wide * shared
    if inner != h:
        activation_bytes = activation_bytes + 2 * e * tokens * inner
    selected = w * held * (inner + f) + e * tokens * shared
    one = (ups + 1) * inner * f
    latent = 2.0 * h * inner if inner != h else 0.0
    parameters = one * local + latent + h * experts + (ups + 1) * h * width + count_norm_parameters(model)
    routing: dict[str, Any] = {"groups": dims.expert_groups, "top_groups": dims.top_groups, "dispatch": dispatch}
    collectives = [
        CollectiveCall(f"experts.{name}", "all_to_all", "expert", e * slots * inner, phase, fanout=chosen, **routing)
        for phase in PHASES
        for name in ("dispatch", "combine")
    ]
    if shared:
        collectives += list_tensor_parallel_collectives("experts.shared", workload, rank)
    if (sharers > 1).any():
        # Megatron-Core, transformer/moe/token_dispatcher.py: tokens are gathered after the exchange among experts, and
        # the outputs are scattered before they are sent back.
        size = e * gathered * inner
        for phase in PHASES:
            collectives += [
                CollectiveCall("experts.dispatch-gather", "all_gather", "expert_tensor", size, phase),
                CollectiveCall("experts.combine-scatter", "reduce_scatter", "expert_tensor", size, phase),
            ]
    freed = (
        ("layernorm", e * outer * h),
        ("moe_act", narrow * held * f),
        ("shared_experts", e * tokens * wide * shared),
        ("moe", held * slot + e * tokens * wide * shared),
    )
    return Sublayer(
        ops, collectives, parameters, activation_bytes, zeros(), one * local, selected, linears, freed, scratch
    )


def _find_expert_numerics(workload: Workload, numerics: Numerics) -> Numerics:
    """Return the numerics of the experts' products, and of the operators on tokens before and after these products.

    If autocast does not cover the grouped product, it runs in FP32, the type of the stored weights.
    """
    framework = frameworks.find_framework(workload)
    is_cast = framework.autocasts_experts or framework.weights != "autocast" or not workload.is_mixed
    if is_cast or not workload.training or workload.lora_rank:
        return numerics
    return replace(numerics.in_fp32, matrix="fp32", product_input=4.0)


_PERMUTATION_PASSES: Mapping[ExpertDispatch, int] = {"allToAll": 2, "allGather": 1, "deepEP": 1, "hybridEP": 1}
"""Number of passes over all copies of the tokens that sort them before the experts. As many follow after the experts.

Grouped sends need copies in the order of ranks, and experts need them in their own order (Megatron-Core,
transformer/moe/token_dispatcher.py: permute, sort_chunks_by_idxs). Gathers and DeepEP send unsorted tokens. Their
copies are made at the destination.
"""


def _build_permutation(name: str, numerics: Numerics, elements: Floats, dispatch: ExpertDispatch) -> list[Op]:
    """Return the operators that sort copies of tokens by expert, or those that restore the order of the tokens."""
    passes = _PERMUTATION_PASSES[dispatch]
    return layers.pointwise(name, numerics, elements, kernels=passes, absorbed=False, backward=(1.0, 1.0))


def _build_activation(name: str, workload: Workload, numerics: Numerics, elements: Floats) -> list[Op]:
    model, dims = workload.model, workload.model.get_dimensions(Transformer)
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
    """Return the number of kernels in which a product of `local` experts runs, (S,)."""
    return local if frameworks.find_framework(workload).grouped_products == "each" else np.ones(1)


def _build_expert_linear(
    name: str,
    numerics: Numerics,
    local: Floats,
    slots: Floats,
    sides: tuple[Floats | float, Floats | float],
    calls: Floats,
    *,
    bias: bool = False,
) -> list[Op]:
    """Return the operators of a dense layer in each of the `local` experts of a rank.

    A balanced router divides the `slots` (tokens to compute) equally among the experts. `sides` are the inputs and the
    outputs of the layer. Each operator is launched as `calls` kernels.
    """
    rows = np.maximum(slots / local, 1.0)
    product = layers.linear(f"experts.{name}", numerics, rows, *sides, bias=bias)
    return [_repeat_for_experts(op, local, calls) for op in product]


def _repeat_for_experts(op: Op, experts: Floats, calls: Floats) -> Op:
    """Return an operator of one expert, repeated for several experts.

    A matrix product becomes a batch of products. Any other operator gets more elements.
    """
    dims = op.table.dims * np.ones((len(experts), 1))
    dims[:, 0] *= experts  # the batch of a product, or the elements of a pass
    kind, precision = (np.broadcast_to(column, len(dims)) for column in (op.table.kind, op.table.precision))
    return replace(op, table=KernelTable(kind, precision, dims), launches=calls)


def _add_weighted_bias(numerics: Numerics, elements: Floats, calls: Floats) -> list[Op]:
    """Return the operators that multiply the experts' outputs and biases by the tokens' weights and sum them.

    The weights and the sum are in FP32. The forward pass has a product, a sum, a copy that joins the experts' outputs,
    and a cast (Megatron-Core, transformer/moe/experts.py: _apply_bias). The backward pass repeats the cast and the
    copy. Then it runs a product and a sum for the biases, and another product and sum for the weights.
    """
    e = numerics.element
    name = "experts.weighted-bias"
    ops = [layers.memory_pass(name, "fp32", elements, e + 12.0, e + 12.0, launches=2.0 * calls)]
    if numerics.training:
        moved = 2 * e + 20.0, 2 * e + 12.0
        ops.append(layers.memory_pass(f"{name}.gradient", "fp32", elements, *moved, "backward", launches=6.0 * calls))
    return ops
