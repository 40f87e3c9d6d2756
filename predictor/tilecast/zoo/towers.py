"""Encoders of images and of sound (towers) in front of a language model or beside another encoder.

LLaVA has a tower in front of a language model (arXiv 2304.08485, section 4.1). CLIP has a tower beside an encoder of
text (arXiv 2103.00020, section 2.3). Towers run for every sample before the model's first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.model import Model, Projector
from tilecast.spec import FROZEN_PARTS, FrozenPart, SpecError, Workload
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

    Parts that the job does not train have no gradients of weights. Gradients flow through a frozen language model to
    what is trained before it, and through a frozen projector to its tower. Nothing is before a tower, so that a frozen
    one has no backward pass and keeps nothing for it. `find_builder` returns the function that builds the graph of a
    tower.
    """
    if "language" in workload.frozen_parts:
        graph = _freeze_language(graph)
    blocks: list[Block] = []
    host = graph.host_bytes_per_sample
    for place, tower in enumerate(workload.model.towers):
        own = replace(workload, model=tower, sequence_length=1, frozen_parts=())
        own_graph = find_builder(tower)(own, shards)
        inside, last = (*own_graph.first, *own_graph.layers), own_graph.last
        is_frozen = find_tower_part(tower) in workload.frozen_parts
        if tower.projector:
            last = (_build_projector(own, shards, tower.projector, workload.frozen_parts),)
        if is_frozen:
            inside = tuple(map(_drop_backward_pass, inside))
        if is_frozen and (tower.projector is None or "projector" in workload.frozen_parts):
            last = tuple(map(_drop_backward_pass, last))
        named = f"tower{place + 1}"
        blocks += (replace(block, name=f"{named}-{block.name}", positions=()) for block in (*inside, *last))
        host += own_graph.host_bytes_per_sample
    return replace(graph, first=(*blocks, *graph.first), host_bytes_per_sample=host)


def find_tower_part(tower: Model) -> FrozenPart:
    """Return the part of its model that a tower is: vision or audio."""
    return "audio" if tower.family in _SOUND_FAMILIES else "vision"


_SOUND_FAMILIES = ("speech-encoder", "wav2vec2")
"""Families of towers that read sound."""


def check_frozen_parts(model: Model, frozen: Sequence[FrozenPart]) -> None:
    """Raise SpecError if a job freezes a part that its model does not have, or all parts.

    Raises:
        SpecError: the model has no such part, or nothing is left to train.
    """
    if not frozen:
        return
    field, parts = "spec.training.frozenParts", list_parts(model)
    if not parts:
        raise SpecError(field, f"{model.name} has no towers that are read, so no parts", "leave it out")
    if lacking := [part for part in frozen if part not in parts]:
        remedy = f"use parts among {', '.join(parts)}"
        raise SpecError(field, f"{model.name} has no part {' and no part '.join(lacking)}", remedy)
    if "language" in frozen and "projector" not in parts and model.family == "encoder":
        problem = f"no gradient flows through the text encoder of {model.name}, which stands beside its towers"
        raise SpecError(field, problem, "leave language out")
    if set(frozen) == set(parts):
        raise SpecError(field, "every part is frozen, so that nothing is trained", "leave one out")


def list_parts(model: Model) -> tuple[FrozenPart, ...]:
    """Return the parts of a model with towers, in the order of `FROZEN_PARTS`. Other models have none."""
    known = {find_tower_part(tower) for tower in model.towers}
    if not known:
        return ()
    if any(tower.projector for tower in model.towers):
        known.add("projector")
    return tuple(part for part in FROZEN_PARTS if part in known or part == "language")


def _freeze_language(graph: Graph) -> Graph:
    """Return the graph of a language model that passes gradients on to its towers, but trains no weight.

    No gradient flows into the embedding of the tokens.
    """
    first, layers, last = (
        tuple(_drop_weight_gradients(block) for block in part) for part in (graph.first, graph.layers, graph.last)
    )
    return replace(graph, first=tuple(map(_drop_backward_pass, first)), layers=layers, last=last)


def _drop_weight_gradients(block: Block) -> Block:
    """Return a block with frozen weights, whose backward pass computes gradients of activations alone."""
    ops = tuple(op for op in block.ops if not op.name.endswith((".weight-gradient", ".bias-gradient")))
    return replace(block, ops=ops, frozen_parameters=block.parameters)


def _drop_backward_pass(block: Block) -> Block:
    """Return a block with frozen weights that runs forward only and keeps nothing for a backward pass."""
    return replace(
        block,
        ops=tuple(op for op in block.ops if op.phase == "forward"),
        collectives=tuple(call for call in block.collectives if call.phase == "forward"),
        activation_bytes=np.zeros_like(block.activation_bytes),
        frozen_parameters=block.parameters,
        remembered_bytes=np.zeros(1),
        freed_bytes={},
    )


def _build_projector(workload: Workload, shards: Shards, dims: Projector, frozen: Sequence[FrozenPart]) -> Block:
    """Return the block of dense layers that map the tokens of a tower to the width of the language model.

    `frozen` are the parts that the job does not train.
    """
    is_frozen = "projector" in frozen
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
        # A frozen layer keeps no input. The activation between two layers does.
        if not is_frozen or number:
            activation_bytes = activation_bytes + numerics.element * rows * read
    ops += layers.pointwise("projector.activation", numerics, rows * inner)
    block = build_uniform_block("projector", len(shards), ops, parameters, activation_bytes, frozen=numerics.frozen)
    return replace(_drop_weight_gradients(block) if is_frozen else block, repeat=int(dims.count or 1))


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
