"""LoRA's adapters on one rank, and the weights under them that are held in four bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from tilecast import frameworks
from tilecast.graph import KernelTable, Op
from tilecast.models import layers
from tilecast.models.numerics import Numerics
from tilecast.models.parts import PHASES, Linear, Part
from tilecast.spec import Floats, Workload


def dequantized(workload: Workload, parts: Sequence[Part], calls: Floats) -> list[Op]:
    """What a product with a quantized weight runs before it, forward and for the gradient of its input: the weight is
    written in 16 bits (bitsandbytes, autograd/_functions.py MatMul4Bit; torchao, dtypes/nf4tensor.py LinearNF4). A rank
    writes all experts that it holds, as their two products take so many `calls` each."""
    numerics, bits = Numerics.of(workload), frameworks.of(workload).quantized_bits
    moved = {"read_bytes": bits / 8, "written_bytes": numerics.element}
    weights = [(item.name, item.inputs * item.outputs, np.ones(1)) for part in parts for item in part.linears]
    weights += [("experts", part.expert_parameters, 2 * calls) for part in parts if part.expert_parameters.any()]
    return [
        Op(
            f"{name}.dequantize",
            KernelTable.of("elementwise", numerics.vector, elements=elements, **moved),
            phase,
            launches=launches,
        )
        for name, elements, launches in weights
        for phase in (PHASES if workload.training else PHASES[:1])
    ]


def largest_quantized(parts: Sequence[Part], calls: Floats) -> Floats:
    """Elements of the largest weight that is written in 16 bits at once, (S,): MatMul4Bit's forward and backward call
    dequantize_4bit on the weight of their one product and keep nothing of it, and LinearNF4 does alike."""
    sizes = [item.inputs * item.outputs / item.modules for part in parts for item in part.linears]
    experts = [part.expert_parameters / (2 * calls) for part in parts]
    return np.asarray(reduce(np.maximum, [*sizes, *experts], np.zeros(1)))


def adapter_products(workload: Workload, linears: Sequence[Linear]) -> tuple[list[Op], Floats]:
    """LoRA (arXiv 2106.09685, section 4.1): a down- and an up-projection of small rank beside each dense layer of
    attention and MLP, and their parameters, (S,). Routers and routed experts have none."""
    numerics, rank = Numerics.of(workload), float(workload.lora_rank)
    ops: list[Op] = []
    parameters = np.zeros(1)
    for item in linears:
        ops += layers.linear(f"lora.{item.name}.down", numerics, item.rows, item.inputs, rank, trainable=True)
        ops += layers.linear(f"lora.{item.name}.up", numerics, item.rows, rank, item.outputs, trainable=True)
        ops += layers.pointwise(f"lora.{item.name}.add", numerics, item.rows * item.outputs, reads=2.0)
        parameters = parameters + rank * (item.inputs + item.outputs)
    return ops, parameters
