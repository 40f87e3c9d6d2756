"""Losses on preferences: two sequences a sample, a reward in place of logits, and forward passes without gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.model import Model
from tilecast.spec import Workload
from tilecast.zoo.dimensions import Transformer

ADAPTER = "lora."
"""Beginning of the names of operators of adapters."""
FAMILIES = ("decoder", "moe", "deepseek", "hybrid")
"""Families of models that are trained on preferences: those that predict the next token."""


def adapt_to_loss(workload: Workload, shards: Shards) -> tuple[Workload, Shards]:
    """Return the job and its shards as the trained model sees them: with all sequences of a sample, and its head.

    A reward model scores one token of each sequence. Without a loss on preferences, both are returned unchanged.
    """
    sequences = workload.preference.sequences
    if sequences > 1:
        shards = replace(shards, micro_batch=shards.micro_batch * sequences)
    if workload.loss == "reward" and workload.training:
        workload = replace(workload, model=workload.model.with_dimensions(classes=1))
    return workload, shards


def add_forward_passes(workload: Workload, graph: Graph) -> Graph:
    """Return the graph with the forward passes without gradients that the loss needs, as operators of its blocks.

    The reference model's passes skip adapters. They run after the forward pass of the trained model, whose activations
    exist meanwhile, and their log-probabilities need the memory of its logits once more. They recompute nothing.
    """
    needs = workload.preference
    if needs.sequences > 1:
        graph = replace(graph, host_bytes_per_sample=graph.host_bytes_per_sample * needs.sequences)
    if not (needs.reference_passes or needs.own_passes):
        return graph
    return replace(
        graph,
        first=tuple(_add_passes(workload, block) for block in graph.first),
        layers=tuple(_add_passes(workload, block) for block in graph.layers),
        last=tuple(_raise_working_bytes(_add_passes(workload, block)) for block in graph.last),
    )


def _add_passes(workload: Workload, block: Block) -> Block:
    needs, ops, collectives = workload.preference, list(block.ops), list(block.collectives)
    for prefix, passes in (("reference", needs.reference_passes), ("own-pass", needs.own_passes)):
        if not passes:
            continue
        ops += [
            replace(op, name=f"{prefix}.{op.name}", count=op.count * passes, selective=False)
            for op in block.ops
            if op.phase == "forward" and not (prefix == "reference" and op.name.startswith(ADAPTER))
        ]
        collectives += [
            replace(call, name=f"{prefix}.{call.name}", count=call.count * passes)
            for call in block.collectives
            if call.phase == "forward"
        ]
    return replace(block, ops=tuple(ops), collectives=tuple(collectives))


def _raise_working_bytes(block: Block) -> Block:
    kept = np.broadcast_to(block.activation_bytes, (3, *np.shape(block.activation_bytes)[1:]))[0]
    return replace(block, working_bytes=np.maximum(block.working_bytes, kept))


def has_token_embeddings(model: Model) -> bool:
    """Return whether a model has an embedding of tokens and a head that projects to logits of tokens."""
    dims = model.dimensions
    return model.trace is None and model.family in FAMILIES and isinstance(dims, Transformer) and not dims.classes


def is_trained_on_preferences(workload: Workload) -> bool:
    """Return whether the job's model, one that predicts the next token of a text, can be trained on preferences."""
    model = workload.model
    return has_token_embeddings(model) and model.causal and not model.towers
