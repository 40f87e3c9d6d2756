"""LoRA adapters on one rank, and the kernels that quantized base weights need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from tilecast import frameworks
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


def build_adapters(workload: Workload, linears: Sequence[Linear]) -> tuple[list[Op], Floats]:
    """Return the operators of the LoRA adapters and the number of adapter parameters, (S,).

    An adapter is a down-projection and an up-projection of small rank (arXiv 2106.09685, section 4.1). `list_adapted`
    says which dense layers have one. Routers and routed experts have none.
    """
    numerics, rank = Numerics.from_workload(workload), float(workload.lora_rank)
    ops: list[Op] = []
    parameters = np.zeros(1)
    for item in list_adapted(workload, linears):
        ops += layers.linear(f"lora.{item.name}.down", numerics, item.rows, item.inputs, rank, trainable=True)
        ops += layers.linear(f"lora.{item.name}.up", numerics, item.rows, rank, item.outputs, trainable=True)
        ops += layers.pointwise(f"lora.{item.name}.add", numerics, item.rows * item.outputs, reads=2.0)
        parameters = parameters + rank * (item.inputs + item.outputs)
    return ops, parameters
