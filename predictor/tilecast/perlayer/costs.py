"""Cost of each block under each strategy, alone and behind its neighbour."""

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
from tilecast.zoo import Sharded


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the K blocks of a graph under S strategies, columns (K, S), in seconds of a step."""

    alone_s: Floats
    """Cost that does not depend on the neighbours of the block."""
    forward_s: Floats
    """Forward pass of one micro-batch, which hides exchanges of the next block."""
    backward_s: Floats
    """Backward pass of one micro-batch, which hides exchanges of the next block."""
    once: tuple[Floats, Floats]
    """Exchanges once a step that the forward, and that the backward pass of the previous block hides."""
    each: tuple[Floats, Floats]
    """Exchanges of every micro-batch that the forward, and that the backward pass of the previous block hides."""
    moved_bytes: Floats
    """Bytes that a rank holds of the block's input and of other tensors that the block reads."""
    held_bytes: Floats
    """Bytes of states and activations that a rank holds of the block."""
    working_bytes: Floats
    """Bytes that a rank holds while the block runs."""

    def pass_seconds(self, block: int) -> Floats:
        """Return the seconds of the forward and of the backward pass of a block, (2, S)."""
        return np.array([self.forward_s[block], self.backward_s[block]])

    def take(self, rows: Ints) -> Costs:
        """Return the costs with only the chosen strategies."""
        return Costs(
            self.alone_s[:, rows], self.forward_s[:, rows], self.backward_s[:, rows],
            (self.once[0][:, rows], self.once[1][:, rows]), (self.each[0][:, rows], self.each[1][:, rows]),
            self.moved_bytes[:, rows], self.held_bytes[:, rows], self.working_bytes[:, rows],
        )  # fmt: skip


def block_costs(
    workload: Workload, sharded: Sharded, plans: Plans, pool: Pool, priced: KernelSeconds, fitted: Constants
) -> Costs:
    """Return the costs of each block of a graph under each of S plans.

    They are the prices that `step` and `memory` give for a graph with one repetition of the block alone.
    """
    graph, spread = sharded.graph, 1 + constants.shipped_constants().device_memory.fragmentation
    repeats = plans.gradient_accumulation
    straggle = replicas.straggler_factor(workload, plans, fitted)
    weight_copy_bytes_per_s, reshards = (
        weights.weight_copy_bytes_per_s(pool.gpu, fitted),
        weights.reshards_weights(workload, plans),
    )
    one_bucket, ones, nil = overlap.BucketLimits.single_bucket(len(plans)), np.ones(len(plans)), np.zeros(len(plans))
    rows, exchanges = [], passes.Exchanges(sharded, plans, pool)
    for times in priced.blocks:
        is_layer, alone = isolate_block(sharded, times.block)
        gpu_s, stall_s, exchange_s, backward_s = passes.block_seconds(
            workload, alone, plans, times, fitted, exchanges, recomputed=is_layer
        )
        whole = weights.HeldWeights.from_plans(workload, alone, plans)
        once_s = weights.optimizer_seconds(workload, whole, plans, pool.gpu, fitted)
        once_s = once_s + weights.gradient_wait_seconds(workload, alone.graph, plans, fitted)
        copied_s = weights.copy_seconds(workload, whole, plans, weight_copy_bytes_per_s)
        sync = replicas.sync_seconds(workload, alone, whole, plans, pool, one_bucket, ones, fitted)
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
            np.where((stage == 3) | ((stage == 2) & reshards), sync.gather_s, nil),
            np.select([stage == 2, stage == 3], [sync.scatter_s, sync.gather_s + sync.scatter_s], nil),
            sharded.gather(inputs + times.block.remembered_bytes),
            bill.parameters + bill.gradients + bill.optimizer + bill.activations * spread,
            bill.working * spread + bill.buffers,
        ))  # fmt: skip
    alone_s, forward_s, backward_s, *exchanged, moved, held, working = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    once, each = (exchanged[0], exchanged[1]), (exchanged[2], exchanged[3])
    return Costs(alone_s, forward_s, backward_s, once, each, moved, held, working)


def exposed_seconds(
    workload: Workload,
    plans: Plans,
    costs: Costs,
    previous_passes_s: Floats | None,
    block: int,
    pool: Pool,
    fitted: Constants,
) -> Floats:
    """Return the seconds that the exchanges of a block add to a step.

    They are the part of the exchanges that the previous block does not hide, and the slow-down by the hidden part.

    Args:
        workload: the job.
        plans: the strategies, (S,).
        costs: costs of all blocks under the strategies.
        previous_passes_s: forward and backward pass of the previous block; (2, S) if both blocks have the same
            strategy, (2, S, 1) for every pair of strategies, None without a previous block.
        block: index of the block.
        pool: the pool that the job runs on.
        fitted: the constants.

    Returns:
        The seconds, (S,), or (S, S) for pairs, where a row is a strategy of the previous block.
    """
    share = float(overlap.hides_gradients(workload))
    slowdown = fitted.slowdown * replicas.link_contention(pool)
    total = np.zeros(len(plans))
    for index in (0, 1):
        hiding = 0.0 if previous_passes_s is None else previous_passes_s[index] * share
        for times, busy in ((1, costs.once[index][block]), (plans.gradient_accumulation, costs.each[index][block])):
            visible = np.maximum(busy - hiding, 0.0)
            total = total + times * (visible + slowdown * (busy - visible))
    return np.asarray(total * replicas.straggler_factor(workload, plans, fitted))


def resharding_seconds(plans: Plans, moved_bytes: Floats, pool: Pool) -> Floats:
    """Return the seconds of a step in which activations move between the layouts of two strategies, (S, S).

    A row is a strategy of the previous block, a column a strategy of the block. The block's input moves forward, and
    the gradient of the input backward. They are exchanged if the tensor or the context degree changes. If a strategy
    has no sequence parallelism, tensor ranks hold them whole, and they are also gathered.
    """
    count = len(plans)
    before, after = np.repeat(np.arange(count), count), np.tile(np.arange(count), count)
    tensor = plans.tensor.astype(float)
    whole = (plans.tensor > 1) & (plans.sequence_parallel == 0)
    spread_bytes = (moved_bytes / np.where(whole, tensor, 1.0))[after]
    degree = (plans.tensor[before] != plans.tensor[after]) | (plans.context[before] != plans.context[after])
    differ = degree | (whole[before] != whole[after])

    def seconds_of(collective: str, ranks: Floats, size: Floats) -> Floats:
        group = placement.communication_group(ranks, np.ones(count * count), plans.gpus[after], pool)
        return collectives.fastest_collective_s(collective, size, group, pool.intra, pool.inter)

    holders = plans.tensor * plans.context
    ranks = np.lcm(holders[before], holders[after]).astype(float)
    seconds = np.where(degree, 2 * seconds_of("all_to_all", ranks, spread_bytes), 0.0)
    for end in (before, after):
        gathered = seconds_of("all_gather", tensor[end], spread_bytes * tensor[end])
        seconds = seconds + np.where(differ & whole[end], gathered, 0.0)
    return np.asarray(seconds * plans.gradient_accumulation[after], float).reshape(count, count)


def isolate_block(sharded: Sharded, block: Block) -> tuple[bool, Sharded]:
    """Return whether a block is a layer, and the graph with one repetition of the block and nothing else."""
    is_layer = index_of_block(sharded.graph.layers, block) >= 0
    one = (replace(block, repeat=1, positions=()),)
    layers, last = (one, ()) if is_layer else ((), one)
    return is_layer, replace(sharded, graph=replace(sharded.graph, first=(), layers=layers, last=last, stages=None))


def index_of_block(blocks: tuple[Block, ...], block: Block) -> int:
    """Return the index of a block in a list, compared by identity. Return -1 if the list lacks the block."""
    return next((index for index, other in enumerate(blocks) if other is block), -1)
