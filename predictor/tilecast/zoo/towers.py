"""Encoders of images and of sound beside a language model or beside another encoder.

A language model as in LLaVA (arXiv 2304.08485, section 4.1), another encoder as in CLIP (arXiv 2103.00020, section
2.3). They run for every sample before the model's own first layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import Rank


def with_towers(graph: Graph, workload: Workload, shards: Shards, build: Callable[[Workload, Shards], Graph]) -> Graph:
    """Return the graph of a model with its towers before it; `build` builds each tower.

    A tower's layers run one after the other, all on the first pipeline stage.
    """
    blocks: list[Block] = []
    host = graph.host_bytes_per_sample
    for place, tower in enumerate(workload.model.towers):
        own = replace(workload, model=tower, sequence_length=1)
        own_graph = build(own, shards)
        last = (_projector(own, shards),) if "projector" in tower.extra else own_graph.last
        named = f"tower{place + 1}"
        blocks += (
            replace(block, name=f"{named}-{block.name}", positions=())
            for block in (*own_graph.first, *own_graph.layers, *last)
        )
        host += own_graph.host_bytes_per_sample
    return replace(graph, first=(*blocks, *graph.first), host_bytes_per_sample=host)


def _projector(workload: Workload, shards: Shards) -> Block:
    """Build the projector from a tower's tokens to the language model's.

    Two dense layers run over `projector_tokens` of a sample, from width `projector_inputs` to `projector` and on to
    `projector_outputs` (0: only the first layer). There are `projectors` (1) such projectors, which read different
    layers of the tower (DeepStack, arXiv 2406.04334).
    """
    extra, numerics = workload.model.extra, Numerics.of(workload)
    inputs, inner = extra["projector_inputs"], extra["projector"]
    rows = shards.micro_batch.astype(float) * extra["projector_tokens"]
    widths = [(inputs, inner)]
    if outputs := extra.get("projector_outputs", 0.0):
        widths.append((inner, outputs))
    ops = layers.norm("projector.norm", numerics, rows, inputs, rms=False)
    parameters, activation_bytes = 2 * inputs, numerics.element * rows * inputs
    for number, (read, written) in enumerate(widths):
        ops += layers.linear(f"projector{number + 1}", numerics, rows, read, written, bias=True)
        parameters += read * written + written
        activation_bytes = activation_bytes + numerics.element * rows * read
    ops += layers.pointwise("projector.activation", numerics, rows * inner)
    whole = np.full(len(shards), parameters)
    alike = int(extra.get("projectors", 1.0))
    frozen = whole if workload.lora_rank else np.zeros(1)
    return Block("projector", alike, tuple(ops), whole, np.stack([activation_bytes] * 3), frozen_parameters=frozen)


def build_queries(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of the Q-Former of BLIP-2 (Li et al., arXiv 2301.12597, section 3.1).

    It is an encoder of `extra.queries` (32) learned queries. In every `extra.memory_every`-th (2) layer they attend to
    `extra.memory_tokens` (257) tokens of width `extra.memory_width`.
    """
    model, extra = workload.model, workload.model.extra
    queries = Rank.of(shards, extra.get("queries", 32.0))
    memory = Rank.of(shards, extra.get("memory_tokens", 257.0))
    looking = -(-model.layers // int(extra.get("memory_every", 2)))
    blocks = []
    for name, repeat, seen in (("query-layer", model.layers - looking, None), ("looking-layer", looking, memory)):
        if repeat:
            blocks.append(transformer.layer(name, workload, queries, repeat=repeat, causal=False, memory=seen))
    graph = transformer.graph(workload, queries, queries, tuple(blocks))
    parameters = np.full(len(shards), extra.get("queries", 32.0) * model.hidden)
    frozen = parameters if workload.lora_rank else np.zeros(1)
    learned = Block("queries", 1, (), parameters, np.zeros((3, 1)), frozen_parameters=frozen)
    return replace(graph, first=(learned,), last=(), host_bytes_per_sample=0.0)
