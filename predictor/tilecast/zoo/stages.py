"""Stages of a pipeline: the layers that each rank holds.

Stages of equal numbers of layers are the rule. Where the layers do not divide, a framework may count the embedding, the
loss or both as one layer each, so that the first and the last stage hold fewer layers (Megatron-Core,
transformer/transformer_block.py: account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split). A job
may also state the layers of every stage (`tilecast.layout`).

With virtual stages a rank holds several pieces of the model. What counts is the sum of its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilecast.graph import Graph
from tilecast.layout import split_layers
from tilecast.spec import Floats, Ints


@dataclass(frozen=True, slots=True)
class StageKinds:
    """The unlike stages of the pipelines of n plans, at most K of them.

    A pipeline with fewer kinds repeats one of them.
    """

    layers: Floats
    """Number of layers of each of B blocks, (B, K, n)."""
    first: Floats
    """1 where the stage has the blocks before the layers, (K, n)."""
    last: Floats
    """1 where the stage has the blocks after the layers, (K, n)."""
    number: Floats
    """Smallest number of a stage of the kind, from 0, (K, n)."""

    def sum_layers(self, columns: Sequence[Floats]) -> Floats:
        """Return the sum of a quantity over the layers of each stage, (K, n).

        `columns` has the quantity of one layer of each block, (n,).
        """
        total = np.zeros(self.first.shape)
        for layers, column in zip(self.layers, columns, strict=True):
            total += layers * column
        return total

    def add_ends(self, first: Floats, last: Floats, layers: Floats) -> Floats:
        """Return a quantity of each stage, (K, n), from that of the model's ends, (n,), and of its layers, (K, n)."""
        total: Floats = self.first * first
        total += layers
        total += self.last * last
        return total


def stage_kinds(graph: Graph, pipeline: Ints) -> StageKinds:
    """Return the unlike stages of a graph's pipelines of `pipeline` ranks, (n,)."""
    degrees = np.flatnonzero(np.bincount(pipeline))
    known = [_kinds_of(graph, int(degree)) for degree in degrees]
    most = max((kinds.shape[1] for kinds in known), default=1)
    table = np.zeros((len(graph.layers) + 3, most, int(pipeline.max(initial=0)) + 1))
    for degree, kinds in zip(degrees, known, strict=True):
        table[:, :, degree] = kinds[:, np.minimum(np.arange(most), kinds.shape[1] - 1)]
    columns = table.take(pipeline, axis=2)
    return StageKinds(columns[3:], columns[0], columns[1], columns[2])


def _kinds_of(graph: Graph, pipeline: int) -> Floats:
    """Return the unlike stages of a pipeline, (3 + B, k): has first, has last, number, and the layers of each block."""
    if pipeline not in graph.stage_kinds:
        counts, seen = _count_layers(graph, pipeline), dict[tuple[float, ...], int]()
        for number, row in enumerate(counts.tolist()):
            seen.setdefault((number == 0, number == pipeline - 1, *row), number)
        rows = [(*key[:2], number, *key[2:]) for key, number in seen.items()]
        graph.stage_kinds[pipeline] = np.array(rows, float).T
    return graph.stage_kinds[pipeline]


def _count_layers(graph: Graph, pipeline: int) -> Floats:
    """Return the number of layers of each block on each rank, (pipeline, B)."""
    if pipeline == 1:
        return np.array([[block.repeat for block in graph.layers]], float)
    order = graph.layer_order()
    counts = np.zeros((pipeline, len(graph.layers)))
    if graph.layout and len(graph.layout) % pipeline == 0 and sum(graph.layout) == len(order):
        # Piece k of every rank comes before piece k + 1 of any rank.
        owners = np.repeat(np.arange(len(graph.layout)) % pipeline, graph.layout)
    else:
        owners = np.repeat(np.arange(pipeline), split_layers(len(order), pipeline, counts_ends=graph.counts_ends))
    np.add.at(counts, (owners, np.array(order)), 1.0)
    return counts
