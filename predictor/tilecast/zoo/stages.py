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

from tilecast.graph import Block, Graph
from tilecast.layout import split_layers
from tilecast.spec import DistinctRows, Floats, Ints, Rows, distinct_rows


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


@dataclass(frozen=True, slots=True)
class FullestStages:
    """The pipeline stages with most parameters of n plans, and the sums of columns over them."""

    index: Rows
    """Shard of each plan, (n,)."""
    pipeline: Ints
    """Ranks of each pipeline, (n,)."""
    alike: DistinctRows
    """Distinct pairs of both, m of them."""
    shares: Floats
    """Share of a traced model's layers that a stage holds, (m,)."""
    kinds: StageKinds | None
    """Unlike stages of the distinct pairs; None for a graph whose layers are not cut one by one."""
    fullest: Rows
    """Place of the fullest stage among `kinds`, (1, m)."""
    layers: Floats
    """Parameters of the layers of the fullest stage, (n,)."""
    _sums: dict[str, Floats]

    @classmethod
    def from_plans(cls, graph: Graph, index: Rows, pipeline: Ints, shares: Floats) -> FullestStages:
        """Return the fullest stages of plans with these shards, pipelines, and shares of a traced model, (n,) each."""
        alike = distinct_rows(index, pipeline)
        here, degrees, shares = index[alike.first], pipeline[alike.first], shares[alike.first]
        if not graph.has_stages:
            layers = shares * _sum_repeats(graph.layers, "parameters", here)
            fullest = np.zeros((1, len(here)), np.intp)
            return cls(index, pipeline, alike, shares, None, fullest, layers[alike.index], {})
        kinds = stage_kinds(graph, degrees)
        inside = kinds.sum_layers([_gather(block.parameters, here) for block in graph.layers])
        first, last = (_sum_repeats(blocks, "parameters", here) for blocks in (graph.first, graph.last))
        whole = kinds.add_ends(first, last, inside)
        fullest = whole.argmax(axis=0)[None]
        layers, most = (np.take_along_axis(one, fullest, axis=0)[0][alike.index] for one in (inside, whole))
        return cls(index, pipeline, alike, shares, kinds, fullest, layers, {"parameters": most})

    def sum(self, graph: Graph, column: str) -> Floats:
        """Return the sum of a column of `Block` over the blocks of the fullest stages, (n,)."""
        if column not in self._sums:
            here, degrees = self.index[self.alike.first], self.pipeline[self.alike.first]
            first, last = (_sum_repeats(blocks, column, here) for blocks in (graph.first, graph.last))
            if self.kinds is None:
                ends = np.where(degrees > 1, np.maximum(first, last), first + last)
                total = self.shares * _sum_repeats(graph.layers, column, here) + ends
            elif not any(getattr(block, column).any() for block in graph.blocks):
                total = np.zeros(len(here))
            else:
                inside = self.kinds.sum_layers([_gather(getattr(block, column), here) for block in graph.layers])
                total = np.take_along_axis(self.kinds.add_ends(first, last, inside), self.fullest, axis=0)[0]
            self._sums[column] = total[self.alike.index]
        return self._sums[column]


def _gather(column: Floats, index: Rows) -> Floats:
    """Return a column over shards, (S,) or (1,), at the shards of m plans, (m,)."""
    return np.full(len(index), column[0]) if len(column) == 1 else column[index]


def _sum_repeats(blocks: Sequence[Block], column: str, index: Rows) -> Floats:
    """Return the sum of a column of `Block` over blocks and their repetitions, for each of m plans, (m,)."""
    return _gather(sum((block.repeat * getattr(block, column) for block in blocks), np.zeros(1)), index)
