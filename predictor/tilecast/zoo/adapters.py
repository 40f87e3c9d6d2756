"""Adapters of LoRA on one rank, and the dequantization of base weights that are quantized to four bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from tilecast import frameworks
from tilecast.graph import Op
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import Linear, Sublayer

_ATTENTION = ("attention", "cross-attention")
"""Beginnings of the names of projections of attention."""


def dequantize_weights(workload: Workload, parts: Sequence[Sublayer], calls: Floats) -> list[Op]:
    """Return the operators that dequantize weights to 16 bits before each matrix product that reads them.

    A quantized weight is dequantized before the forward product and again before the product that computes the input
    gradient (bitsandbytes, autograd/_functions.py MatMul4Bit; torchao, dtypes/nf4tensor.py LinearNF4). A rank
    dequantizes all experts that it holds. Each of their two weight matrices takes `calls` kernels.
    """
    numerics, bits = Numerics.from_workload(workload), frameworks.find_framework(workload).quantized_bits
    weights = [(item.name, item.inputs * item.outputs, np.ones(1)) for part in parts for item in part.linears]
    weights += [("experts", part.expert_parameters, 2 * calls) for part in parts if part.expert_parameters.any()]
    return [
        layers.memory_pass(
            f"{name}.dequantize", numerics.vector, elements, bits / 8, numerics.element, phase, launches=launches
        )
        for name, elements, launches in weights
        for phase in numerics.phases
    ]


def largest_quantized_weight(parts: Sequence[Sublayer], calls: Floats) -> Floats:
    """Return the number of elements in the largest weight that is dequantized at once, (S,).

    MatMul4Bit dequantizes the weight of its product in each direction and frees the result. So does LinearNF4. Experts
    are dequantized in `calls` kernels for each of their two weight matrices.
    """
    sizes = [item.inputs * item.outputs / item.modules for part in parts for item in part.linears]
    experts = [part.expert_parameters / (2 * calls) for part in parts]
    return np.asarray(reduce(np.maximum, [*sizes, *experts], np.zeros(1)))


def list_adapted(workload: Workload, linears: Sequence[Linear]) -> Sequence[Linear]:
    """Return the dense layers that get a LoRA adapter.

    If `lora_targets` is `attention` and some layers are named as projections of attention, only those do. Otherwise
    all do.
    """
    projections = [item for item in linears if item.name.startswith(_ATTENTION)]
    return projections if projections and workload.lora_targets == "attention" else linears


def count_dropout_bytes(workload: Workload, linears: Sequence[Linear]) -> Floats:
    """Return the bytes that dropout before the adapters keeps, beside the inputs that products keep without it, (S,).

    Each adapter reads a copy of its own of the input, and the backward pass a mask of one byte. The input itself is
    kept no longer, except that of the output projection, which the kernel of attention keeps as its result. Queries,
    keys and values have one adapter (LitGPT, litgpt/lora.py: LoRALinear, LoRAQKVLinear).
    """
    element, total = Numerics.from_workload(workload).element, np.zeros(1)
    for item in list_adapted(workload, linears):
        copies = 1.0 if item.name.endswith(".qkv") else item.modules
        kept = 0.0 if item.name.endswith(".output") else element
        total = total + item.rows * item.inputs * (copies * (element + 1.0) - kept)
    return total


def build_adapters(workload: Workload, linears: Sequence[Linear]) -> tuple[list[Op], Floats]:
    """Return the operators of the LoRA adapters and the number of adapter parameters, (S,).

    Each dense layer of attention and MLP gets a down-projection and an up-projection of small rank (arXiv 2106.09685,
    section 4.1), or only those of attention where names tell them apart. Routers and routed experts get none.
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
