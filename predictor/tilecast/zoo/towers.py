"""Encoders of images and of sound (towers) in front of a language model or beside another encoder.

LLaVA has a tower in front of a language model (arXiv 2304.08485, section 4.1). CLIP has a tower beside an encoder of
text (arXiv 2103.00020, section 2.3). Towers run for every sample before the model's first layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.model import Model, Projector
from tilecast.spec import Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import RankSizes, build_uniform_block


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class QueryEncoder(Transformer):
    """Dimensions of an encoder of learned queries."""

    queries: int = 32
    memory_tokens: int = 257
    """Number of tokens that queries attend to, besides each other."""
    memory_every: int = 2
    """Distance between layers that attend to these tokens."""


def prepend_towers(
    graph: Graph,
    workload: Workload,
    shards: Shards,
    find_builder: Callable[[Model], Callable[[Workload, Shards], Graph]],
) -> Graph:
    """Return the graph of a model with the layers of its towers in front, on the first pipeline stage.

    `find_builder` returns the function that builds the graph of a tower.
    """
    blocks: list[Block] = []
    host = graph.host_bytes_per_sample
    for place, tower in enumerate(workload.model.towers):
        own = replace(workload, model=tower, sequence_length=1)
        own_graph = find_builder(tower)(own, shards)
        last = (_build_projector(own, shards, tower.projector),) if tower.projector else own_graph.last
        named = f"tower{place + 1}"
        blocks += (
            replace(block, name=f"{named}-{block.name}", positions=())
            for block in (*own_graph.first, *own_graph.layers, *last)
        )
        host += own_graph.host_bytes_per_sample
    return replace(graph, first=(*blocks, *graph.first), host_bytes_per_sample=host)


def _build_projector(workload: Workload, shards: Shards, dims: Projector) -> Block:
    """Return the block of dense layers that map the tokens of a tower to the width of the language model."""
    numerics = Numerics.from_workload(workload)
    inputs, inner = dims.inputs, dims.inner
    rows = shards.micro_batch.astype(float) * dims.tokens
    widths = [(inputs, inner)]
    if outputs := dims.outputs:
        widths.append((inner, outputs))
    ops = layers.norm("projector.norm", numerics, rows, inputs, rms=False)
    parameters, activation_bytes = 2 * inputs, numerics.element * rows * inputs
    for number, (read, written) in enumerate(widths):
        ops += layers.linear(f"projector{number + 1}", numerics, rows, read, written, bias=True)
        parameters += read * written + written
        activation_bytes = activation_bytes + numerics.element * rows * read
    ops += layers.pointwise("projector.activation", numerics, rows * inner)
    block = build_uniform_block("projector", len(shards), ops, parameters, activation_bytes, frozen=numerics.frozen)
    return replace(block, repeat=int(dims.count or 1))


def build_queries(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of the Q-Former of BLIP-2 (Li et al., arXiv 2301.12597, section 3.1).

    The Q-Former is an encoder of learned queries, which in some layers attend to the tokens of an image.
    """
    model, dims = workload.model, workload.model.get_dimensions(QueryEncoder)
    queries = RankSizes.from_shards(shards, dims.queries)
    memory = RankSizes.from_shards(shards, dims.memory_tokens)
    looking = -(-model.layers // dims.memory_every)
    blocks = []
    for name, repeat, seen in (("query-layer", model.layers - looking, None), ("looking-layer", looking, memory)):
        if repeat:
            blocks.append(transformer.build_layer(name, workload, queries, repeat=repeat, causal=False, memory=seen))
    graph = transformer.build_graph(workload, queries, queries, tuple(blocks))
    parameters = np.full(len(shards), float(dims.queries * model.hidden))
    frozen = parameters if workload.lora_rank else np.zeros(1)
    learned = Block("queries", 1, (), parameters, np.zeros((3, 1)), frozen_parameters=frozen)
    return replace(graph, first=(learned,), last=(), host_bytes_per_sample=0.0)
