"""Split the layers of a pipeline into stages of similar cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast import chain, constants, memory, zoo
from tilecast.constants import Constants
from tilecast.hardware import Pool
from tilecast.perlayer.costs import find_block_index, isolate_block
from tilecast.spec import Floats, Ints, Plan, Plans, Workload
from tilecast.step import blocks, passes, replicas, weights
from tilecast.zoo import ShardedGraph


@dataclass(frozen=True, slots=True)
class PipelineCut:
    """The best split of a model's layers into pipeline stages.

    `layers` has the number of layers of each stage. `step_s` is the step time with this split. `even_s` is the step
    time with equally many layers in each stage.
    """

    plan: Plan
    layers: tuple[int, ...]
    step_s: float
    even_s: float


def cut_pipeline(workload: Workload, pool: Pool, plan: Plan) -> PipelineCut | None:
    """Return the split of layers into pipeline stages whose slowest stage is fastest.

    The first stage has the embedding, and the last stage has the head. Stage k of p, counted from 0, stores the
    activations of min(m, p - k) of m micro-batches. If the slowest stage takes T, a step takes (m - 1) T plus the time
    of all stages.

    Return None if there is one stage, if stages are interleaved, if the job does not train, if no split fits in memory,
    or if the layers do not divide evenly.
    """
    if plan.pipeline == 1 or plan.virtual_stages > 1 or not workload.training:
        return None
    plans = Plans.from_plans(plan)
    sharded, fitted = zoo.build_sharded_graph(workload, plans), constants.shipped_constants()
    graph = sharded.graph
    order = [find_block_index(graph.blocks, block) for block in graph.list_repetitions()]
    seconds, static, activations, working = _block_costs(workload, sharded, plan, pool, fitted)
    ends = sum(block.repeat for block in graph.first), sum(block.repeat for block in graph.last)
    depth = len(order) - sum(ends)

    def add_end_blocks(column: Floats) -> Floats:
        """Return the value of each layer, (L,).

        The first layer includes the blocks before the layers, and the last layer includes the blocks after them.
        """
        every = column[order]
        layers = every[ends[0] : ends[0] + depth].copy()
        layers[0] += every[: ends[0]].sum()
        layers[-1] += every[ends[0] + depth :].sum()
        return layers

    def sum_between(column: Floats) -> Floats:
        """Return at [i, j] the sum of a column over the layers i to j - 1, (L + 1, L + 1)."""
        upto = np.concatenate([[0.0], np.cumsum(add_end_blocks(column))])
        return np.asarray(upto[None, :] - upto[:, None])

    count = plan.pipeline
    alive = np.minimum(plan.gradient_accumulation, count - np.arange(count))[:, None, None]
    spread = 1 + constants.shipped_constants().device_memory.fragmentation
    room = memory.usable_bytes(pool.gpu) - memory.context_bytes(workload, plans, pool.gpu)[0] - working.max() * spread
    cost = add_end_blocks(seconds)
    first = chain.find_stage_starts(
        cost, sum_between(static) + alive * sum_between(activations) * spread <= room, count
    )
    if first is None or depth % count:
        return None
    straggle = float(replicas.straggler_factor(workload, plans, fitted)[0])
    repeats = plan.gradient_accumulation

    def slowest_stage_s(starts: Ints) -> float:
        """Return the seconds of the slowest stage if stages begin at the layers `starts`."""
        return float(np.add.reduceat(cost, starts).max())

    even = np.arange(count) * (depth // count)
    return PipelineCut(
        plan=plan,
        layers=tuple(np.diff([*first, depth]).tolist()),
        step_s=((repeats - 1) * slowest_stage_s(first) + cost.sum()) * straggle,
        even_s=((repeats - 1) * slowest_stage_s(even) + cost.sum()) * straggle,
    )


def _block_costs(workload: Workload, sharded: ShardedGraph, plan: Plan, pool: Pool, fitted: Constants) -> Floats:
    """Return seconds and bytes of one repetition of each of K blocks, (4, K).

    The first row has the seconds of a micro-batch. The other rows have bytes: first weights, gradients and optimizer
    states, then the activations of a micro-batch, then working memory.
    """
    plans, whole = Plans.from_plans(plan), Plans.from_plans(replace(plan, pipeline=1))
    priced = blocks.kernel_seconds(workload, sharded, pool.gpu, fitted)
    columns, exchanges = np.zeros((4, len(priced.blocks))), passes.LayerCollectives(sharded, plans, pool)
    for number, times in enumerate(priced.blocks):
        is_layer, alone = isolate_block(sharded, times.block)
        gpu_s, stall_s, exchange_s, _ = passes.block_seconds(
            workload, alone, plans, times, fitted, exchanges, recomputed=is_layer
        )
        held = weights.HeldWeights.from_plans(workload, alone, whole)
        copied_s = weights.copy_seconds(workload, held, plans, weights.weight_copy_bytes_per_s(pool.gpu, fitted))
        bill = memory.footprint(workload, alone, whole, pool.gpu, updates=False)
        columns[:, number] = (
            (gpu_s + stall_s + exchange_s + copied_s)[0],
            (bill.parameters + bill.gradients + bill.optimizer)[0],
            bill.activations[0],
            (bill.working + bill.buffers / (1 + constants.shipped_constants().device_memory.fragmentation))[0],
        )
    return columns
