"""Compute the cost of each block under each strategy, alone and after the previous block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast import collectives, constants, memory, overlap
from tilecast.constants import Constants
from tilecast.graph import Block
from tilecast.hardware import Pool
from tilecast.recomputation import FULL
from tilecast.spec import Floats, Ints, Plans, Workload
from tilecast.step import passes, placement, replicas, weights
from tilecast.step.blocks import KernelSeconds
from tilecast.zoo import ShardedGraph


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Step seconds and bytes of each of K blocks under each of S strategies, in arrays (K, S)."""

    alone_s: Floats
    """Seconds of a step that do not depend on the previous block."""
    forward_s: Floats
    """Seconds of the forward pass of a micro-batch. Communication of the next block overlaps with it."""
    backward_s: Floats
    """Seconds of the backward pass of a micro-batch. Communication of the next block overlaps with it."""
    per_step_s: tuple[Floats, Floats]
    """Seconds of communication once a step, which may overlap with the previous block's forward or backward pass."""
    per_micro_batch_s: tuple[Floats, Floats]
    """Seconds of communication per micro-batch, which may overlap with its forward or backward pass."""
    moved_bytes: Floats
    """Bytes per rank of the block's input and of other tensors that it reads. They are moved by resharding."""
    held_bytes: Floats
    """Bytes per rank of the block's weights, gradients, optimizer states and stored activations."""
    working_bytes: Floats
    """Bytes per rank of temporary memory while the block runs."""

    def pass_seconds(self, block: int) -> Floats:
        """Return the seconds of a block's forward pass (row 0) and backward pass (row 1), (2, S)."""
        return np.array([self.forward_s[block], self.backward_s[block]])

    def take(self, rows: Ints) -> BlockCosts:
        """Return the costs of only the strategies at `rows`."""
        return BlockCosts(
            self.alone_s[:, rows], self.forward_s[:, rows], self.backward_s[:, rows],
            (self.per_step_s[0][:, rows], self.per_step_s[1][:, rows]),
            (self.per_micro_batch_s[0][:, rows], self.per_micro_batch_s[1][:, rows]),
            self.moved_bytes[:, rows], self.held_bytes[:, rows], self.working_bytes[:, rows],
        )  # fmt: skip


def block_costs(
    workload: Workload, sharded: ShardedGraph, plans: Plans, pool: Pool, priced: KernelSeconds, fitted: Constants
) -> BlockCosts:
    """Return the costs of each block of a graph under each of S plans.

    `step` and `memory` price a graph with a single repetition of the block.
    """
    graph, spread = sharded.graph, 1 + constants.shipped_constants().device_memory.fragmentation
    repeats = plans.gradient_accumulation
    straggle = replicas.straggler_factor(workload, plans, fitted)
    weight_copy_bytes_per_s, reshards = (
        weights.weight_copy_bytes_per_s(pool.gpu, fitted),
        weights.reshards_weights(workload, plans),
    )
    forwards = 1.0 + weights.count_forward_gathers(workload)
    one_bucket, ones, nil = overlap.BucketLimits.single_bucket(len(plans)), np.ones(len(plans)), np.zeros(len(plans))
    rows, exchanges = [], passes.LayerCollectives(sharded, plans, pool)
    for times in priced.blocks:
        is_layer, alone = isolate_block(sharded, times.block)
        gpu_s, stall_s, exchange_s, backward_s = passes.block_seconds(
            workload, alone, plans, times, fitted, exchanges, recomputed=is_layer
        )
        whole = weights.HeldWeights.from_plans(workload, alone, plans)
        once_s = weights.optimizer_seconds(workload, whole, plans, pool.gpu, fitted)
        once_s = once_s + weights.gradient_wait_seconds(workload, alone.graph, plans, fitted)
        copied_s = weights.copy_seconds(workload, whole, plans, weight_copy_bytes_per_s)
        sync = replicas.fullest_stage_sync_seconds(workload, alone, whole, plans, pool, one_bucket, ones, fitted)
        active = (plans.replicas > 1) & (alone.sum_fullest_stage("parameters", plans) > 0)
        stage = np.where(active, plans.zero_stage, -1)
        bill = memory.footprint(workload, alone, plans, pool.gpu, updates=False)
        inputs = times.block.activation_bytes[FULL] if is_layer else graph.boundary_bytes
        rows.append((
            repeats * ((gpu_s + copied_s + exchange_s) * straggle + stall_s) + once_s,
            gpu_s + stall_s + exchange_s - backward_s,
            backward_s,
            np.where((stage == 1) | ((stage == 2) & ~reshards), sync.updated_s, nil),
            np.select([stage == 0, stage == 1], [sync.reduce_s, sync.scatter_s], nil),
            np.where((stage == 3) | ((stage == 2) & reshards), sync.gather_s * np.where(stage == 3, forwards, 1), nil),
            np.select([stage == 2, stage == 3], [sync.scatter_s, sync.gather_s + sync.scatter_s], nil),
            sharded.expand_to_plans(inputs + times.block.remembered_bytes),
            bill.parameters + bill.gradients + bill.optimizer + bill.activations * spread,
            bill.working * spread + bill.buffers,
        ))  # fmt: skip
    alone_s, forward_s, backward_s, *exchanged, moved, held, working = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    once, each = (exchanged[0], exchanged[1]), (exchanged[2], exchanged[3])
    return BlockCosts(alone_s, forward_s, backward_s, once, each, moved, held, working)


def exposed_seconds(
    workload: Workload,
    plans: Plans,
    costs: BlockCosts,
    previous_passes_s: Floats | None,
    block: int,
    pool: Pool,
    fitted: Constants,
) -> Floats:
    """Return the seconds that data-parallel communication of a block adds to a step.

    The seconds are those of communication that does not overlap with the previous block, and those by which overlap
    slows down computation.

    Args:
        workload: the job.
        plans: the strategies, (S,).
        costs: costs of all blocks under the strategies.
        previous_passes_s: seconds of the forward and backward pass of the previous block. Shape (2, S) pairs each
            strategy with itself, and (2, S, 1) pairs it with every strategy. None means no previous block.
        block: index of the block.
        pool: the pool that the job runs on.
        fitted: the constants.

    Returns:
        The seconds, (S,), or (S, S) for all pairs. A row is a strategy of the previous block.
    """
    share = float(overlap.hides_gradients(workload))
    slowdown = fitted.slowdown * replicas.link_contention(pool)
    total = np.zeros(len(plans))
    for index in (0, 1):
        hiding = 0.0 if previous_passes_s is None else previous_passes_s[index] * share
        for times, busy in (
            (1, costs.per_step_s[index][block]),
            (plans.gradient_accumulation, costs.per_micro_batch_s[index][block]),
        ):
            visible = np.maximum(busy - hiding, 0.0)
            total = total + times * (visible + slowdown * (busy - visible))
    return np.asarray(total * replicas.straggler_factor(workload, plans, fitted))


def resharding_seconds(plans: Plans, moved_bytes: Floats, pool: Pool) -> Floats:
    """Return the step seconds of resharding activations between two blocks, (S, S).

    A row is the strategy of the previous block, and a column is the strategy of the block. If the tensor or context
    degree changes, ranks exchange the block's input and its gradient by all-to-all. Without sequence parallelism,
    tensor ranks hold whole activations, so they also run an all-gather.
    """
    count = len(plans)
    before, after = np.repeat(np.arange(count), count), np.tile(np.arange(count), count)
    tensor = plans.tensor.astype(float)
    whole = (plans.tensor > 1) & (plans.sequence_parallel == 0)
    spread_bytes = (moved_bytes / np.where(whole, tensor, 1.0))[after]
    degree = (plans.tensor[before] != plans.tensor[after]) | (plans.context[before] != plans.context[after])
    differ = degree | (whole[before] != whole[after])

    def seconds_of(collective: str, ranks: Floats, size: Floats) -> Floats:
        group = placement.build_communication_group(ranks, np.ones(count * count), plans.gpus[after], pool)
        return collectives.fastest_collective_s(collective, size, group, pool.intra, pool.inter)

    holders = plans.tensor * plans.context
    ranks = np.lcm(holders[before], holders[after]).astype(float)
    seconds = np.where(degree, 2 * seconds_of("all_to_all", ranks, spread_bytes), 0.0)
    for end in (before, after):
        gathered = seconds_of("all_gather", tensor[end], spread_bytes * tensor[end])
        seconds = seconds + np.where(differ & whole[end], gathered, 0.0)
    return np.asarray(seconds * plans.gradient_accumulation[after], float).reshape(count, count)


def isolate_block(sharded: ShardedGraph, block: Block) -> tuple[bool, ShardedGraph]:
    """Return whether a block is a layer, and a graph with a single repetition of the block."""
    is_layer = find_block_index(sharded.graph.layers, block) >= 0
    one = (replace(block, repeat=1, positions=()),)
    layers, last = (one, ()) if is_layer else ((), one)
    return is_layer, replace(sharded, graph=replace(sharded.graph, first=(), layers=layers, last=last, stages=None))


def find_block_index(blocks: tuple[Block, ...], block: Block) -> int:
    """Return the index of a block in `blocks`, compared by identity, or -1 if it is not there."""
    return next((index for index, other in enumerate(blocks) if other is block), -1)
