"""Stages of a pipeline: which layers each rank has.

Usually all stages have equally many layers. If the number of layers is not divisible by the number of stages, a
framework may count the embedding as a layer, the loss as a layer, or both. The first and the last stage then have fewer
layers (Megatron-Core, transformer/transformer_block.py: account_for_embedding_in_pipeline_split and
account_for_loss_in_pipeline_split). A job may also set the layers of every stage (`tilecast.layout`).

With virtual stages (interleaving), a rank has several model chunks. Its layers are the sum over these chunks. Under
ZB-V and DualPipeV, the model is cut into 2 p pieces for p ranks, which run through the ranks and back. Rank k has the
pieces k and 2 p - 1 - k, so the first rank has both ends of the model (PyTorch, distributed/pipelining/_utils.py:
generate_stage_to_rank_mapping).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilecast.graph import Block, Graph
from tilecast.layout import split_layers
from tilecast.spec import DistinctRows, Floats, Ints, Plans, Rows, distinct_rows


@dataclass(frozen=True, slots=True)
class StageKinds:
    """The distinct pipeline stages of each of n plans, at most K stages per plan.

    Stages are equal if they hold equally many layers of each block and the same ends of the model. A plan with fewer
    than K distinct stages repeats its last one.
    """

    layers: Floats
    """Number of layers of each of B blocks, (B, K, n)."""
    first: Floats
    """1 for a stage with the blocks before the layers, otherwise 0, (K, n)."""
    last: Floats
    """1 for a stage with the blocks after the layers, otherwise 0, (K, n)."""
    number: Floats
    """Position in the pipeline, from 0, of the first stage of this kind, (K, n)."""

    def sum_layers(self, columns: Sequence[Floats]) -> Floats:
        """Return the sum of a quantity over the layers of each stage, (K, n).

        For each block, `columns` has an array (n,) with the quantity in one layer of that block.
        """
        total = np.zeros(self.first.shape)
        for layers, column in zip(self.layers, columns, strict=True):
            total += layers * column
        return total

    def add_ends(self, first: Floats, last: Floats, layers: Floats) -> Floats:
        """Return the sum of a quantity over the layers and the end blocks of each stage, (K, n).

        Args:
            first: the quantity of the blocks before the layers, (n,). Only the first stage gets it.
            last: the quantity of the blocks after the layers, (n,). Only the last stage gets it.
            layers: the quantity of the stage's layers, (K, n).
        """
        total: Floats = self.first * first
        total += layers
        total += self.last * last
        return total


def is_folded_by_plan(graph: Graph, plans: Plans) -> Ints:
    """Return 1 for each plan whose first rank has both ends of the model, and 0 for all others, (n,)."""
    if not plans.schedule.any():
        return np.full(len(plans), int(graph.is_folded))
    own = (plans.schedule == 0) & graph.is_folded
    return np.asarray((plans.stage_holdings == 1) | own).astype(np.int64)


def find_stage_kinds(graph: Graph, pipeline: Ints, folded: Ints) -> StageKinds:
    """Return the distinct pipeline stages of n plans.

    Args:
        graph: the graph of the model.
        pipeline: number of pipeline ranks of each plan, (n,).
        folded: result of `is_folded_by_plan`, (n,).
    """
    codes = 2 * pipeline + folded
    used = np.flatnonzero(np.bincount(codes))
    kinds_by_code = [_find_kinds_of_degree(graph, int(code) // 2, is_folded=bool(code % 2)) for code in used]
    most = max((kinds.shape[1] for kinds in kinds_by_code), default=1)
    table = np.zeros((len(graph.layers) + 3, most, int(codes.max(initial=0)) + 1))
    for code, kinds in zip(used, kinds_by_code, strict=True):
        table[:, :, code] = kinds[:, np.minimum(np.arange(most), kinds.shape[1] - 1)]
    columns = table.take(codes, axis=2)
    return StageKinds(columns[3:], columns[0], columns[1], columns[2])


def _find_kinds_of_degree(graph: Graph, pipeline: int, *, is_folded: bool) -> Floats:
    """Return the k distinct stages of a pipeline with `pipeline` ranks, as an array (3 + B, k).

    Its rows are: whether the stage is the first, whether it is the last, the position of the first such stage from 0,
    and the number of layers of each of the B blocks.
    """
    if (pipeline, is_folded) not in graph.stage_kinds:
        counts, seen = _count_layers(graph, pipeline, is_folded=is_folded), dict[tuple[float, ...], int]()
        last = 0 if is_folded else pipeline - 1
        for number, row in enumerate(counts.tolist()):
            seen.setdefault((number == 0, number == last, *row), number)
        rows = [(*key[:2], number, *key[2:]) for key, number in seen.items()]
        graph.stage_kinds[pipeline, is_folded] = np.array(rows, float).T
    return graph.stage_kinds[pipeline, is_folded]


def _count_layers(graph: Graph, pipeline: int, *, is_folded: bool) -> Floats:
    """Return the number of layers of each block on each pipeline rank, (pipeline, B), for B blocks of equal layers."""
    if pipeline == 1:
        return np.array([[block.repeat for block in graph.layers]], float)
    order = graph.list_layer_indexes()
    counts = np.zeros((pipeline, len(graph.layers)))
    pieces = 2 * pipeline
    if is_folded:
        has_layout = len(graph.layout) == pieces and sum(graph.layout) == len(order)
        split = graph.layout if has_layout else split_layers(len(order), pieces, counts_ends=graph.counts_ends)
        owners = np.repeat(np.minimum(np.arange(pieces), pieces - 1 - np.arange(pieces)), split)
    elif graph.layout and len(graph.layout) % pipeline == 0 and sum(graph.layout) == len(order):
        # Piece k of every rank comes before piece k + 1 of any rank.
        owners = np.repeat(np.arange(len(graph.layout)) % pipeline, graph.layout)
    else:
        owners = np.repeat(np.arange(pipeline), split_layers(len(order), pipeline, counts_ends=graph.counts_ends))
    np.add.at(counts, (owners, np.array(order)), 1.0)
    return counts


@dataclass(frozen=True, slots=True)
class FullestStages:
    """The pipeline stage with the most parameters in each of n plans, with sums of `Block` columns over that stage."""

    index: Rows
    """Shard index of each plan, (n,)."""
    pipeline: Ints
    """Number of pipeline ranks of each plan, (n,)."""
    schedule: Ints
    """Pipeline schedule of each plan, (n,)."""
    distinct_pairs: DistinctRows
    """The m distinct pairs of shard and pipeline ranks. Folded pipelines are pairs of their own."""
    shares: Floats
    """Largest fraction of a traced model's parameters in a stage, (m,)."""
    kinds: StageKinds | None
    """Distinct stages of the m pairs. None if the graph is not divided into stages by whole layers."""
    fullest: Rows
    """Index of the fullest stage in `kinds`, (1, m)."""
    layers: Floats
    """Parameters of the layers of the fullest stage, (n,)."""
    _sums: dict[str, Floats]

    @classmethod
    def from_plans(cls, graph: Graph, index: Rows, plans: Plans, shares: Floats) -> FullestStages:
        """Return the fullest stages of n plans.

        Args:
            graph: the graph of the model.
            index: index of each plan's shard, (n,).
            plans: the plans, (n,).
            shares: largest fraction of a traced model's parameters in a stage, (n,).
        """
        pipeline, folded = plans.pipeline, is_folded_by_plan(graph, plans)
        distinct_pairs = distinct_rows(index, pipeline, folded)
        first_rows = distinct_pairs.first
        here, degrees, shares = index[first_rows], pipeline[first_rows], shares[first_rows]
        if not graph.has_stages:
            layers = shares * _sum_repeats(graph.layers, "parameters", here)
            fullest = np.zeros((1, len(here)), np.intp)
            every = layers[distinct_pairs.index]
            return cls(index, pipeline, plans.schedule, distinct_pairs, shares, None, fullest, every, {})
        kinds = find_stage_kinds(graph, degrees, folded[first_rows])
        inside = kinds.sum_layers([_select_shards(block.parameters, here) for block in graph.layers])
        first, last = (_sum_repeats(blocks, "parameters", here) for blocks in (graph.first, graph.last))
        whole = kinds.add_ends(first, last, inside)
        fullest = whole.argmax(axis=0)[None]
        layers, most = (np.take_along_axis(one, fullest, axis=0)[0][distinct_pairs.index] for one in (inside, whole))
        sums = {"parameters": most}
        return cls(index, pipeline, plans.schedule, distinct_pairs, shares, kinds, fullest, layers, sums)

    def is_for_plans(self, index: Rows, plans: Plans) -> bool:
        """Return whether these fullest stages were computed for `plans` and for the shard indices `index`, (n,)."""
        return self.index is index and self.pipeline is plans.pipeline and self.schedule is plans.schedule

    def find_most(self, graph: Graph, column: str) -> Floats:
        """Return the largest sum of a column of `Block` over the blocks of any stage of each plan, (n,).

        For a model that is not divided into stages by whole layers, it is the sum over the fullest stage.
        """
        if self.kinds is None:
            return self.sum(graph, column)
        here = self.index[self.distinct_pairs.first]
        first, last = (_sum_repeats(blocks, column, here) for blocks in (graph.first, graph.last))
        inside = self.kinds.sum_layers([_select_shards(getattr(block, column), here) for block in graph.layers])
        return np.asarray(self.kinds.add_ends(first, last, inside).max(axis=0)[self.distinct_pairs.index])

    def sum(self, graph: Graph, column: str) -> Floats:
        """Return the sum of a column of `Block` over the blocks of each plan's fullest stage, (n,)."""
        if column not in self._sums:
            here, degrees = self.index[self.distinct_pairs.first], self.pipeline[self.distinct_pairs.first]
            first, last = (_sum_repeats(blocks, column, here) for blocks in (graph.first, graph.last))
            if self.kinds is None:
                ends = np.where(degrees > 1, np.maximum(first, last), first + last)
                total = self.shares * _sum_repeats(graph.layers, column, here) + ends
            elif not any(getattr(block, column).any() for block in graph.blocks):
                total = np.zeros(len(here))
            else:
                inside = self.kinds.sum_layers([_select_shards(getattr(block, column), here) for block in graph.layers])
                total = np.take_along_axis(self.kinds.add_ends(first, last, inside), self.fullest, axis=0)[0]
            self._sums[column] = total[self.distinct_pairs.index]
        return self._sums[column]


def _select_shards(column: Floats, index: Rows) -> Floats:
    """Return the values of a column, (S,) or (1,), at the shard index of each of m plans, (m,)."""
    return np.full(len(index), column[0]) if len(column) == 1 else column[index]


def _sum_repeats(blocks: Sequence[Block], column: str, index: Rows) -> Floats:
    """Return the sum of a column of `Block` over blocks and their repetitions, for each of m plans, (m,).

    `index` holds the shard index of each plan, (m,).
    """
    return _select_shards(sum((block.repeat * getattr(block, column) for block in blocks), np.zeros(1)), index)
