"""Blocks of diffusion transformers: norms and sums that are modulated by a vector of time and text.

Peebles and Xie, arXiv 2212.09748, section 3.2; Esser et al., arXiv 2403.03206, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.model import Dimensions
from tilecast.spec import SpecError, Workload
from tilecast.zoo import layers
from tilecast.zoo.adapters import build_adapters, count_rescaled_bytes, largest_norm_bytes
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import build_uniform_block

TIME_WIDTH = 256
"""Number of sines and cosines that encode a time step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ModulatedTransformer(Dimensions):
    """Dimensions of a diffusion transformer."""

    width: int
    attention_heads: int
    image_tokens: int
    """Number of patches of the latents of an image or video."""
    patch_values: int
    """Numbers per patch."""


BlockPlan: TypeAlias = tuple[str, int, Callable[[NetworkBuilder], None]]
"""Name and number of repetitions of a block, and the function that adds its operators."""


def build_graph(blocks: Sequence[BlockPlan], tokens: float, inputs: float, workload: Workload, shards: Shards) -> Graph:
    """Return the graph of blocks over `tokens` tokens per sample. The first and the last block are not layers.

    A block with fewer than one repetition is left out. `inputs` counts the 16-bit numbers of a sample.

    Raises:
        SpecError: the weights under adapters are quantized.
    """
    if workload.lora_rank and workload.frozen_bits < 16:
        problem = f"quantizes {workload.model.name}, whose quantized weights are not priced"
        raise SpecError("spec.training.quantization", problem, "leave it out: frozen weights are in 16 bits")
    first, *layers_, last = [
        _build_block(name, repeat, tokens, add_operators, workload, shards)
        for name, repeat, add_operators in blocks
        if repeat > 0
    ]
    count = len(shards)
    return Graph((first,), tuple(layers_), (last,), np.zeros(count), count, host_bytes_per_sample=2.0 * inputs)


def _build_block(
    name: str,
    repeat: int,
    tokens: float,
    add_operators: Callable[[NetworkBuilder], None],
    workload: Workload,
    shards: Shards,
) -> Block:
    """Return a block over `tokens` tokens of a sample. If it is recomputed in full, only its input is saved."""
    width, batch = workload.model.get_dimensions(ModulatedTransformer).width, shards.micro_batch.astype(float)
    net = NetworkBuilder(Numerics.from_workload(workload), batch, width, (1, 1, 1), adapted=True)
    add_operators(net)
    frozen = net.numerics.frozen
    block = build_uniform_block(name, len(shards), net.ops, net.parameters, net.activation_bytes, frozen=frozen)
    if frozen:
        ops, added = build_adapters(workload, net.linears)
        block = replace(
            block,
            ops=(*block.ops, *ops),
            parameters=block.parameters + added,
            activation_bytes=block.activation_bytes + count_rescaled_bytes(workload, net.linears),
            copied_bytes=largest_norm_bytes(workload, net.linears),
        )
    kept, selective, full = block.activation_bytes
    read = batch * tokens * width * net.numerics.element
    return replace(block, repeat=repeat, activation_bytes=np.stack([kept, selective, np.minimum(full, read)]))


def add_vector_dense(net: NetworkBuilder, inputs: int, outputs: int) -> None:
    """Add an activation and a dense layer over the vector that encodes time and text."""
    net.add_pointwise("silu", net.batch * inputs)
    attention.add_dense(net, 1.0, inputs, outputs)


def add_scale_table(net: NetworkBuilder, rows: int, width: int) -> None:
    """Add a learned table of `rows` rows and its sum with the scales that all blocks share."""
    net.add_pointwise("scale-shift", net.batch * rows * width, backward=(1.0, 1.0))
    net.parameters += rows * width


def add_modulated_norm(net: NetworkBuilder, tokens: float, width: int, *, weights: bool = False) -> None:
    """Add a norm, with `weights` or without, then a scale and an offset computed from the vector."""
    elements = net.batch * tokens * width
    net.keep_elements(2 * elements)
    net.ops += layers.norm("layer-norm", net.numerics, net.batch * tokens, float(width), rms=False)
    net.add_pointwise("modulate", elements, kernels=2, backward=(2.0, 1.0))
    net.parameters += 2 * width if weights else 0


def add_gated_residual(net: NetworkBuilder, tokens: float, width: int) -> None:
    """Multiply a sublayer's output by gates computed from the modulation vector, and add it to the residual stream."""
    elements = net.batch * tokens * width
    net.keep_elements(elements)
    net.add_pointwise("gate", elements, reads=2.0, kernels=2, backward=(2.0, 1.0))


def add_query_key_norm(net: NetworkBuilder, tokens: float, width: int, *, groups: int, rms: bool) -> None:
    """Add the norm of queries or of keys, in `groups` per token: one per head, or one for all heads.

    An RMS norm written with PyTorch's operators saves its output in addition to its input (diffusers,
    models/normalization.py).
    """
    elements = net.batch * tokens * width
    net.keep_elements((2.0 if rms else 1.0) * elements)
    net.ops += layers.norm("query-key-norm", net.numerics, elements * groups / width, width / groups, rms=rms)
    net.parameters += (1 if rms else 2) * width // groups


def add_rotary(net: NetworkBuilder, tokens: float, width: int) -> None:
    """Add the rotation of queries and keys, `tokens` in all, by their positions.

    The gradient needs only the positions, so no activation is saved for the backward pass.
    """
    net.add_pointwise("rotary", net.batch * tokens * width, kernels=3, backward=(1.0, 1.0))


def add_squared_error(net: NetworkBuilder, elements: float) -> None:
    """Add the squared error of `elements` numbers per sample."""
    net.add_training_pointwise("loss", net.batch * elements, reads=2.0, kernels=3)


def add_gelu(net: NetworkBuilder, tokens: float, width: int) -> None:
    """Add a GELU over `width` numbers per token."""
    elements = net.batch * tokens * width
    net.keep_elements(elements)
    net.add_pointwise("gelu", elements)


def add_gate(net: NetworkBuilder, tokens: float, width: int) -> None:
    """Add the product of two tensors of `width` numbers per token, with a SiLU on the second."""
    elements = net.batch * tokens * width
    net.keep_elements(3 * elements)
    net.add_pointwise("gate", elements, reads=2.0, kernels=2, backward=(3.0, 2.0))


def add_mlp(net: NetworkBuilder, tokens: float, width: int, inner: int, *, weights: bool = False) -> None:
    """Add a modulated norm, with `weights` or without, an MLP with a GELU, and the gated residual sum."""
    add_modulated_norm(net, tokens, width, weights=weights)
    attention.add_dense(net, tokens, width, inner)
    add_gelu(net, tokens, inner)
    attention.add_dense(net, tokens, inner, width)
    add_gated_residual(net, tokens, width)
