"""LoRA adapters on one rank, and the kernels that quantized base weights need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from tilecast import frameworks, fuse
from tilecast.graph import Op
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import Linear, Sublayer

_ATTENTION = ("attention", "cross-attention")
"""Prefixes of the names of attention's projections."""


def dequantize_weights(workload: Workload, parts: Sequence[Sublayer], calls: Floats) -> list[Op]:
    """Return the kernels that quantized weights need before the matrix products that read them.

    A weight in NF4 is dequantized to 16 bits before the forward product, and again before the product for the input
    gradient (bitsandbytes, autograd/_functions.py MatMul4Bit; torchao, dtypes/nf4tensor.py LinearNF4). The routed
    experts of a rank are dequantized too, by `calls` kernels for each of their two weight matrices. For dense layers in
    INT8 see `_emit_int8_kernels`.
    """
    numerics, width = Numerics.from_workload(workload), frameworks.frozen_weight_bits(workload) / 8
    linears = [item for part in parts for item in part.linears]
    ops, weights = list[Op](), list[tuple[str, Floats | float, Floats]]()
    if workload.frozen_bits == 8:
        ops = [op for item in linears for op in _emit_int8_kernels(numerics, item)]
    else:
        weights = [(item.name, item.inputs * item.outputs, np.ones(1)) for item in linears]
    weights += [("experts", part.expert_parameters, 2 * calls) for part in parts if part.expert_parameters.any()]
    return ops + [
        layers.memory_pass(
            f"{name}.dequantize", numerics.vector, elements, width, numerics.element, phase, launches=launches
        )
        for name, elements, launches in weights
        for phase in numerics.phases
    ]


def _emit_int8_kernels(numerics: Numerics, item: Linear) -> list[Op]:
    """Return the element-wise kernels before and after the products of a dense layer with INT8 weights.

    The forward pass casts the input to FP16, quantizes it row by row, and dequantizes the INT32 result of the product.
    The backward pass copies the weight in 16 bits and scales the copy in place (bitsandbytes, autograd/_functions.py
    MatMul8bitLt). The products themselves are priced as products in 16 bits, because no measurements exist of INT8
    products and of products of outliers.
    """
    vector, element = numerics.vector, numerics.element
    cast = element if vector == "bf16" else 0.0
    inputs, outputs = item.rows * item.inputs * item.modules, item.rows * item.outputs
    ops = [
        layers.memory_pass(f"{item.name}.quantize", vector, inputs, element + cast, 1.0 + cast),
        layers.memory_pass(f"{item.name}.dequantize", vector, outputs, 4.0, element),
    ]
    if numerics.training:
        weight = item.inputs * item.outputs
        ops.append(
            layers.memory_pass(f"{item.name}.dequantize", vector, weight, 1.0 + element, 2 * element, "backward")
        )
    return ops


def dequantize_head(workload: Workload, elements: Floats) -> list[Op]:
    """Return the kernels that a quantized weight of the projection to logits needs, of `elements` on each shard, (S,).

    If no weight is quantized, the list is empty.
    """
    if not elements.any():
        return []
    numerics, width = Numerics.from_workload(workload), frameworks.frozen_weight_bits(workload) / 8
    return [
        layers.memory_pass("head.dequantize", numerics.vector, elements, width, numerics.element, phase)
        for phase in numerics.phases
    ]


def count_quantized_head(workload: Workload) -> float:
    """Return the number of elements in the weight that projects to logits, or 0 if it is not quantized or not its own.

    Heads that classify are small and are left out.
    """
    model, framework = workload.model, frameworks.find_framework(workload)
    dims = model.dimensions
    if workload.frozen_bits >= 8 or not framework.quantizes_head or not isinstance(dims, Transformer) or dims.classes:
        return 0.0
    has_weight = not model.tied_embeddings or framework.unties_embeddings
    return float(model.vocab * model.hidden) if has_weight else 0.0


def largest_quantized_weight(parts: Sequence[Sublayer], calls: Floats) -> Floats:
    """Return the number of elements in the largest weight that is dequantized at one time, (S,).

    MatMul4Bit dequantizes the weight of its product in each direction and frees the result. LinearNF4 does the same,
    and MatMul8bitLt does so in the backward pass. Experts are dequantized in `calls` kernels for each of their two
    weight matrices.
    """
    sizes = [item.inputs * item.outputs / item.modules for part in parts for item in part.linears]
    experts = [part.expert_parameters / (2 * calls) for part in parts]
    return np.asarray(reduce(np.maximum, [*sizes, *experts], np.zeros(1)))


def list_adapted(workload: Workload, linears: Sequence[Linear]) -> Sequence[Linear]:
    """Return the dense layers that get a LoRA adapter.

    If `lora_targets` is `attention` and some layers are named as projections of attention, only these layers get one.
    Otherwise all layers do.
    """
    projections = [item for item in linears if item.name.startswith(_ATTENTION)]
    return projections if projections and workload.lora_targets == "attention" else linears


def count_dropout_bytes(workload: Workload, linears: Sequence[Linear]) -> Floats:
    """Return the bytes that dropout before the adapters adds to those saved for the backward pass, (S,).

    With dropout, each adapter saves its own copy of its input and a mask of one byte per element. The input of the
    layer itself is then not saved. The exception is the output projection, whose input the attention kernel saves as
    its own result. Queries, keys and values share one adapter (LitGPT, litgpt/lora.py: LoRALinear, LoRAQKVLinear).
    """
    element, total = Numerics.from_workload(workload).element, np.zeros(1)
    for item in list_adapted(workload, linears):
        copies = 1.0 if item.name.endswith(".qkv") else item.modules
        kept = 0.0 if item.name.endswith(".output") else element
        total = total + item.rows * item.inputs * (copies * (element + 1.0) - kept)
    return total


def _count_adapters(workload: Workload, item: Linear) -> float:
    """Return the number of adapters beside a dense layer, which may stand for several that read the same input.

    Adapters of unequal outputs, as those of queries and of fewer keys and values, are taken as equal.
    """
    if not frameworks.find_framework(workload).adapters_of_each:
        return 1.0
    return 3.0 if item.name.endswith(".qkv") else item.modules


def build_adapters(workload: Workload, linears: Sequence[Linear]) -> tuple[list[Op], Floats]:
    """Return the operators of the LoRA adapters and the number of adapter parameters, (S,).

    An adapter is a down-projection and an up-projection of small rank (arXiv 2106.09685, section 4.1). `list_adapted`
    says which dense layers have one. Routers and routed experts have none.
    """
    numerics, rank = Numerics.from_workload(workload), float(workload.lora_rank)
    ops: list[Op] = []
    parameters = np.zeros(1)
    for item in list_adapted(workload, linears):
        number = _count_adapters(workload, item)
        outputs = item.outputs / number
        own = layers.linear(f"lora.{item.name}.down", numerics, item.rows, item.inputs, rank, trainable=True)
        own += layers.linear(f"lora.{item.name}.up", numerics, item.rows, rank, outputs, trainable=True)
        own += layers.pointwise(f"lora.{item.name}.add", numerics, item.rows * outputs, reads=2.0)
        ops += own if number == 1 else [replace(op, count=op.count * number) for op in own]
        parameters = parameters + rank * (number * item.inputs + item.outputs)
        if workload.dora:
            ops += _build_norms(workload, item) + _build_rescaling(numerics, item)
            parameters = parameters + item.outputs
    return ops, parameters


def _build_norms(workload: Workload, item: Linear) -> list[Op]:
    """Return the forward kernels that compute the norm of each row of a dense layer's adapted weight.

    The adapter's weight is its output for the identity matrix. It is scaled and added to the base weight, in passes of
    their own unless element-wise operators are fused. A quantized base weight is dequantized once more. Nothing of this
    has a gradient (torchtune, modules/peft/dora.py: DoRALinear; PEFT, tuners/lora/dora.py).
    """
    numerics, rank = Numerics.from_workload(workload), float(workload.lora_rank)
    vector, element, name = numerics.vector, numerics.element, f"lora.{item.name}.norm"
    # A kernel needs a row for each shard, also if its sizes are the same on all.
    inputs, outputs = item.inputs * np.ones_like(item.rows, float), item.outputs / item.modules
    weight = inputs * outputs
    ops = [
        layers.memory_pass(f"{name}.identity", vector, inputs * inputs, 0.0, element),
        layers.gemm(f"{name}.down", numerics, inputs, rank, inputs),
        layers.gemm(f"{name}.up", numerics, inputs, outputs, rank),
    ]
    if workload.frozen_bits < 16:
        width = frameworks.frozen_weight_bits(workload) / 8
        ops.append(layers.memory_pass(f"{name}.dequantize", vector, weight, width, element))
    eager = [
        *layers.elementwise(f"{name}.scale", numerics, weight, 1.0, 1.0),
        *layers.elementwise(f"{name}.add", numerics, weight, 2.0, 1.0),
        *layers.elementwise(f"{name}.reduce", numerics, weight, 1.0, 0.0),
    ]
    ops += layers.replace_when_fused("elementwise", eager, layers.elementwise(name, numerics, weight, 2.0, 0.0))
    return [replace(op, count=item.modules) for op in ops]


def _build_rescaling(numerics: Numerics, item: Linear) -> list[Op]:
    """Return the kernels that scale the outputs of a dense layer and of its adapter by DoRA's magnitudes over norms.

    The result is (scale - 1) * base + scale * adapter + base. The last sum is counted with the adapter. The backward
    pass multiplies the gradient by both scales, and sums its products with both outputs over rows, which are the
    gradients of the scale. Fused, the forward pass is part of the adapter's sum, and the backward pass is one kernel.
    """
    name, elements = f"lora.{item.name}.rescale", item.rows * item.outputs
    eager = layers.elementwise(name, numerics, elements, 4 / 3, 1.0, count=3.0)
    if not numerics.training:
        return layers.drop_when_fused("elementwise", eager)
    eager += layers.elementwise(f"{name}.gradient", numerics, elements, 10 / 7, 5 / 7, phase="backward", count=7.0)
    fused = layers.elementwise(f"{name}.gradient", numerics, elements, 3.0, 2.0, phase="backward")
    return layers.replace_when_fused("elementwise", eager, fused)


def count_rescaled_bytes(workload: Workload, linears: Sequence[Linear]) -> Floats:
    """Return the bytes that DoRA adds to those saved for the backward pass, (S,). Without DoRA, it is 0.

    The gradient of a magnitude needs the output of the dense layer and that of its adapter.
    """
    if not (workload.dora and workload.training):
        return np.zeros(1)
    element = Numerics.from_workload(workload).element
    return sum((2 * element * item.rows * item.outputs for item in list_adapted(workload, linears)), np.zeros(1))


def largest_norm_bytes(workload: Workload, linears: Sequence[Linear]) -> Floats:
    """Return the most bytes that exist at one time while DoRA computes the norms of one layer, (S,).

    These are the identity matrix and the weight of the adapter. Eager code also holds that weight scaled and the sum
    with the base weight. A quantized base weight is dequantized beside them.
    """
    if not workload.dora:
        return np.zeros(1)
    numerics, copies = Numerics.from_workload(workload), 1.0 + (workload.frozen_bits < 16)
    copies += 0.0 if "elementwise" in fuse.passes(workload) else 2.0
    sizes = [
        numerics.element * item.inputs * (item.inputs + copies * item.outputs / item.modules)
        for item in list_adapted(workload, linears)
    ]
    return np.asarray(reduce(np.maximum, sizes, np.zeros(1)))
