"""Seconds of data-parallel communication in a step, and the part that computation hides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from tilecast import collectives, constants, frameworks, overlap, zoo
from tilecast.collectives import RankGroup
from tilecast.constants import Constants
from tilecast.hardware import Pool, find_link
from tilecast.spec import Columns, Floats, Ints, Plans, Workload
from tilecast.step.passes import MicroBatch
from tilecast.step.placement import build_communication_group
from tilecast.step.weights import HeldWeights, count_forward_gathers, reshards_weights
from tilecast.zoo import ShardedGraph


@dataclass(frozen=True, slots=True)
class SyncSeconds(Columns):
    """Seconds of each data-parallel collective in a step, before any overlap with computation, (n,) for n plans."""

    first_s: Floats
    """All-reduce of the first bucket of gradients."""
    reduce_s: Floats
    """All-reduce of all other buckets."""
    scatter_s: Floats
    """Reduce-scatter of all gradients."""
    gather_s: Floats
    """All-gather of all weights."""
    updated_s: Floats
    """All-gather of the updated weights."""
    first_fraction: Floats
    """Share of the gradients in the first bucket."""
    reduced: Floats
    """Number of the other buckets."""
    scattered: Floats
    """Number of buckets that are scattered, and then gathered after the update."""
    gathered: Floats
    """Number of parts in which the weights of sharded models are gathered in sequence."""

    def map_seconds(self, change: Callable[[Floats], Floats]) -> SyncSeconds:
        """Return the collectives with a function applied to each column of seconds."""
        names = ("first_s", "reduce_s", "scatter_s", "gather_s", "updated_s")
        return replace(self, **{name: change(getattr(self, name)) for name in names})


def fullest_stage_sync_seconds(
    workload: Workload,
    sharded: ShardedGraph,
    held: HeldWeights,
    plans: Plans,
    pool: Pool,
    limits: overlap.BucketLimits,
    gathered: Floats,
    fitted: Constants,
) -> SyncSeconds:
    """Return the seconds of the data-parallel collectives of the fullest pipeline stage, (n,).

    Args:
        workload: the job.
        sharded: its graph under the plans' shards.
        held: weights of the fullest stage.
        plans: the plans, (n,).
        pool: the pool that the job runs on.
        limits: largest gradient bucket, in bytes.
        gathered: number of parts in which the weights of sharded models are gathered.
        fitted: the constants.
    """
    everything, experts = (sharded.sum_fullest_stage(column, plans) for column in ("parameters", "expert_parameters"))
    groups = [
        (everything - experts, build_communication_group(plans.replicas, plans.tensor.astype(float), plans.gpus, pool))
    ]
    if experts.any():
        spread = (plans.expert * plans.expert_tensor).astype(float)
        groups.append((experts, build_communication_group(plans.expert_replicas, spread, plans.gpus, pool)))
    nil, weight, gradient = np.zeros(len(plans)), workload.weight_bytes, frameworks.gradient_bytes(workload)
    # Megatron-LM, training/arguments.py: fp8_param_gather gathers updated weights as the one byte that is held.
    updated = weight - (sharded.layer_parameter_fraction(plans) if frameworks.has_only_fp8_weights(workload) else 0.0)
    # Parameters that a rank holds alone are not exchanged.
    exchanged = [np.where(group.ranks > 1, parameters, 0.0) for parameters, group in groups]
    shares = sharded.trainable_fractions(plans)[: len(groups)]
    sums = [parameters * gradient * share for parameters, share in zip(exchanged, shares, strict=True)]
    first = np.minimum(limits.first, sums[0])
    rest = [sums[0] - first, *sums[1:]]
    reduced, scattered = ([limits.count_buckets(size) for size in sizes] for sizes in (rest, sums))
    weights = [parameters * held.gathered_bytes for parameters in exchanged]
    renewed = [parameters * updated * share for parameters, share in zip(exchanged, shares, strict=True)]
    exchange = partial(_exchange_seconds, workload, [group for _, group in groups], pool, fitted)
    copied_s, sharing_sums, sharing_weights, sharing_renewed = nil, sums, weights, renewed
    if workload.shard_degree is not None:
        # Shards are gathered and scattered inside a group; then all groups sum their gradients, shard by shard.
        shards = plans.shard_ranks(workload.shard_degree)
        splits = [(shards, plans.replicas, plans.tensor.astype(float))]
        if experts.any():
            # A group of ranks holds all experts too, and its ranks that hold the same ones share them.
            alike = np.maximum(plans.expert_replicas * shards / plans.replicas, 1.0)
            splits.append((alike, plans.expert_replicas, spread))
        near = [build_communication_group(ranks, inner, plans.gpus, pool) for ranks, _, inner in splits]
        far = [
            build_communication_group(every / ranks, inner * ranks, plans.gpus, pool) for ranks, every, inner in splits
        ]
        across = [
            np.where(every > ranks, size / ranks, 0.0) for (ranks, every, _), size in zip(splits, sums, strict=True)
        ]
        (copied_s,) = _exchange_seconds(workload, far, pool, fitted, "all_reduce", (across, scattered))
        sharing = partial(_exchange_seconds, workload, near, pool, fitted)
        sharing_sums, sharing_weights, sharing_renewed = (
            [np.where(group.ranks > 1, size, 0.0) for group, size in zip(near, sizes, strict=True)]
            for sizes in (sums, weights, renewed)
        )
    else:
        sharing = exchange
    first_s, reduce_s = exchange("all_reduce", ([first, nil], [nil + 1] * 2), (rest, reduced))
    # A gather takes as long as a scatter.
    scatter_s, gather_s, updated_s = sharing(
        "all_gather",
        (sharing_sums, scattered),
        (sharing_weights, [gathered] * len(exchanged)),
        (sharing_renewed, scattered),
    )
    return SyncSeconds(
        first_s,
        reduce_s,
        scatter_s + copied_s,
        gather_s,
        updated_s,
        first_fraction=first / np.maximum(np.sum(sums, axis=0), 1.0),
        reduced=_count_messages(rest, reduced),
        scattered=_count_messages(sums, scattered),
        gathered=gathered,
    )


def _exchange_seconds(
    workload: Workload,
    groups: Sequence[RankGroup],
    pool: Pool,
    fitted: Constants,
    collective: str,
    *exchanges: tuple[Sequence[Floats], Sequence[Floats]],
) -> Floats:
    """Return the seconds of k exchanges that use one kind of collective, (k, n).

    An exchange is a pair of lists: bytes to send, and number of messages. Each list has one array (n,) for each group.
    """
    total = np.zeros((len(exchanges), *exchanges[0][0][0].shape))
    for place, group in enumerate(groups):
        size, count = (np.stack([exchange[side][place] for exchange in exchanges]) for side in (0, 1))
        seconds = _collective_seconds(workload, collective, size / count, group, pool)
        total = total + np.where(size > 0, seconds * count * fitted.factor["gradients"], 0.0)
    return total


def _count_messages(sizes: Sequence[Floats], counts: Sequence[Floats]) -> Floats:
    """Return the number of messages summed over all groups with bytes to send, (n,). It is at least one."""
    parts = [np.where(size > 0, count, 0.0) for size, count in zip(sizes, counts, strict=True)]
    return np.asarray(np.maximum(np.sum(parts, axis=0), 1.0))


def _collective_seconds(workload: Workload, collective: str, size: Floats, group: RankGroup, pool: Pool) -> Floats:
    """Return the seconds of a data-parallel collective, (n,). Parameter servers may replace an all-reduce."""
    if collective != "all_reduce" or workload.gradient_sync == "allReduce":
        return collectives.fastest_collective_s(collective, size, group, pool.intra, pool.inter)
    servers = workload.parameter_servers or group.nodes
    waits = workload.server_updates == "synchronous"
    return collectives.parameter_server_s(size, group, pool.intra, pool.inter, servers, is_synchronous=waits)


_LEAST_GATHERED = 4
"""Fewest parts in which a model's weights are gathered, even if the model has no repeated layers."""


def straggler_factor(workload: Workload, plans: Plans, fitted: Constants) -> Floats:
    """Return the ratio of the slowest rank's time to the mean over all ranks, (n,).

    Ranks' times are taken as normally distributed, and the slowest is the expected maximum over all ranks. The spread
    is larger if ranks read samples of unequal length.
    """
    spread = fitted.jitter if zoo.has_equal_sequences(workload.model) else fitted.uneven_jitter
    return np.asarray(1.0 + spread * np.sqrt(2 * np.log(np.maximum(plans.gpus, 1))))


def replica_sync_seconds(
    workload: Workload,
    sharded: ShardedGraph,
    plans: Plans,
    held: HeldWeights,
    pool: Pool,
    fitted: Constants,
    bucket_mib: Floats | None,
    speed: Floats | float,
) -> SyncSeconds:
    """Return the seconds of data-parallel collectives, (n,), or 0 for a plan with a single data-parallel rank.

    Args:
        workload: the job.
        sharded: its graph under the plans' shards.
        plans: the plans, (n,).
        held: weights of the fullest rank.
        pool: the pool that the job runs on.
        fitted: the constants.
        bucket_mib: size of gradient buckets in MiB, (n,), or None for the framework's own buckets.
        speed: factor on the speed of all links, (n,).
    """
    blocks = max(sum(block.repeat for block in sharded.graph.layers), _LEAST_GATHERED)
    gathered = np.maximum(np.ceil(blocks / plans.pipeline), 1.0)
    active, nil, one = plans.replicas > 1, np.zeros(len(plans)), np.ones(len(plans))
    if not (workload.training and active.any()):
        return SyncSeconds(nil, nil, nil, nil, nil, nil, one, one, gathered)
    gradient = frameworks.gradient_bytes(workload)
    block_bytes = held.parameters * held.trainable * gradient / gathered
    caps = overlap.BucketLimits.from_plans(workload, plans, gradient, block_bytes)
    if bucket_mib is not None:
        caps = overlap.BucketLimits.from_sizes(workload, bucket_mib)
    sync = fullest_stage_sync_seconds(workload, sharded, held, plans, pool, caps, gathered, fitted)
    return sync.map_seconds(lambda seconds: np.where(active, seconds, 0.0) / speed)


def link_contention(pool: Pool) -> float:
    """Return the ratio of link bandwidth to memory bandwidth, relative to A100 with NVLink, at most 1.

    The link is the one that the GPU product has inside a node.
    """
    # With the pool's own link, a faster one would slow down steps whose exchanges wait for another link.
    link = find_link(pool.gpu.intra_link)
    return min(
        link.bandwidth_bytes_per_s / pool.gpu.memory_bandwidth_bytes_per_s / constants.shipped_constants().contention,
        1.0,
    )


@dataclass(frozen=True, slots=True)
class _OverlappedPasses:
    """Passes of a step behind which data-parallel collectives hide, (n,)."""

    repeats: Ints
    """Number of micro-batches."""
    forward_s: Floats
    """Seconds of the forward pass of a micro-batch."""
    backward_s: Floats
    """Seconds of the backward pass of a micro-batch."""
    at_once: Ints | float
    """Number of micro-batches that run through one piece of the model in sequence, before the next piece runs."""
    overlaps: float
    """1 if the passes hide collectives at ZeRO stages below 3, else 0."""
    reshards: npt.NDArray[np.bool_]
    """Whether every micro-batch gathers the weights at ZeRO stage 2."""
    scatters: Ints
    """Number of micro-batches that scatter gradients at ZeRO stages 2 and 3."""
    warms_up: Ints
    """Number of micro-batches whose forward pass gathers the weights under ZeRO 3."""
    gathers: float
    """Number of times that ZeRO 3 gathers the weights in the forward passes of a micro-batch."""


def exposed_and_hidden_seconds(
    workload: Workload, plans: Plans, micro: MicroBatch, sync: SyncSeconds, *, interleaves: bool
) -> tuple[Floats, Floats]:
    """Return the exposed and the hidden seconds of data-parallel communication at ZeRO stages 0 to 3, (4, n) each.

    The ZeRO stages and virtual stages in `plans` are ignored. With `interleaves`, rows for virtual stages follow: ZeRO
    0 and 1, (6, n), and also ZeRO 2 if a stage sums whole gradients, (7, n). `find_zero_rows` returns the row of each
    plan.

    p micro-batches run through one virtual stage before they run through the next one. So the gradients of a virtual
    stage are summed while p micro-batches run backward through the stages before it, and weights are gathered while p
    micro-batches run forward (Megatron-Core, pipeline_parallel/schedules.py,
    forward_backward_pipelining_with_interleaving: grad_sync_func, param_sync_func).
    """
    sums = frameworks.sums_whole_gradients(workload, plans)
    passes = _OverlappedPasses(
        plans.gradient_accumulation,
        np.maximum(micro.slowest_s - micro.backward_s, 0.0),
        micro.backward_s,
        1.0,
        float(overlap.hides_gradients(workload)),
        reshards_weights(workload, replace(plans, zero_stage=np.full(len(plans), 2))),
        np.where(sums, 1, plans.gradient_accumulation) if sums.any() else plans.gradient_accumulation,
        np.minimum(plans.pipeline, plans.gradient_accumulation),
        1.0 + count_forward_gathers(workload),
    )
    formulas = (_seconds_at_zero_0, _seconds_at_zero_1, _seconds_at_zero_2, _seconds_at_zero_3)
    visible = _ExposedSeconds.from_passes(passes, sync)
    rows = [formula(passes, sync, visible) for formula in formulas]
    if interleaves:
        # Under ZeRO 2 and 3 every micro-batch exchanges by itself, whatever the order of micro-batches, unless a stage
        # sums the gradients of all.
        passes = replace(passes, at_once=np.minimum(plans.pipeline, plans.gradient_accumulation))
        visible = _ExposedSeconds.from_passes(passes, sync)
        rows += [formula(passes, sync, visible) for formula in formulas[: 3 if sums.any() else 2]]
    exposed, busy = (np.stack(column) for column in zip(*rows, strict=True))
    return exposed, np.maximum(busy - exposed, 0.0)


def find_zero_rows(stage: Ints, virtual_stages: Ints, rows: int) -> Ints:
    """Return the row of `exposed_and_hidden_seconds` for each of n plans, (n,). `rows` is the number of its rows."""
    return stage + 4 * ((virtual_stages > 1) & (stage < rows - 4))


@dataclass(frozen=True, slots=True)
class _ExposedSeconds:
    """Seconds of data-parallel collectives that no forward or backward pass overlaps, (n,) for n plans."""

    reduced: Floats
    """All-reduce of all gradients, during the last backward pass."""
    scattered: Floats
    """Reduce-scatter of the gradients, during a backward pass."""
    updated: Floats
    """All-gather of updated weights, during a forward pass."""

    @classmethod
    def from_passes(cls, passes: _OverlappedPasses, sync: SyncSeconds) -> _ExposedSeconds:
        """Return the exposed seconds of each collective."""
        share = passes.at_once * passes.overlaps
        backward_s, forward_s = passes.backward_s * share, passes.forward_s * share
        return cls(
            overlap.exposed_seconds(sync.reduce_s, sync.reduced, backward_s, sync.first_s, sync.first_fraction),
            overlap.exposed_seconds(sync.scatter_s, sync.scattered, backward_s),
            overlap.exposed_seconds(sync.updated_s, sync.scattered, forward_s),
        )


def _seconds_at_zero_0(_: _OverlappedPasses, sync: SyncSeconds, visible: _ExposedSeconds) -> tuple[Floats, Floats]:
    """Return the exposed and the total seconds under ZeRO 0: all-reduces during the last backward pass."""
    return visible.reduced, sync.first_s + sync.reduce_s


def _seconds_at_zero_1(_: _OverlappedPasses, sync: SyncSeconds, visible: _ExposedSeconds) -> tuple[Floats, Floats]:
    """Return the exposed and the total seconds under ZeRO 1.

    Gradients are scattered once, and updated weights are gathered in the next forward pass.
    """
    return visible.scattered + visible.updated, sync.scatter_s + sync.updated_s


def _seconds_at_zero_2(passes: _OverlappedPasses, sync: SyncSeconds, visible: _ExposedSeconds) -> tuple[Floats, Floats]:
    """Return the exposed and the total seconds under ZeRO 2, where every micro-batch scatters its gradients."""
    gathered_s, all_s = visible.updated, sync.updated_s
    if passes.reshards.any():
        each = overlap.exposed_seconds(sync.gather_s, sync.gathered, passes.forward_s)
        gathered_s = np.where(passes.reshards, passes.repeats * each, gathered_s)
        all_s = np.where(passes.reshards, passes.repeats * sync.gather_s, all_s)
    return passes.scatters * visible.scattered + gathered_s, passes.scatters * sync.scatter_s + all_s


def _seconds_at_zero_3(passes: _OverlappedPasses, sync: SyncSeconds, _: _ExposedSeconds) -> tuple[Floats, Floats]:
    """Return the exposed and the total seconds under ZeRO 3.

    Every pass gathers the weights block by block, and gradients are scattered behind the backward pass. Where a stage
    sums whole gradients, its weights also stay whole between a backward and the next forward pass. In this case, p
    forward passes of the first stage gather weights, and so does each backward pass that directly follows a forward
    pass: m + 1 gathers in all (PyTorch, distributed/pipelining/stage.py, backward_maybe_with_nosync).
    """
    both = sync.gather_s + sync.scatter_s
    gather_s = passes.gathers * sync.gather_s
    forward = overlap.exposed_seconds(gather_s, passes.gathers * sync.gathered, passes.forward_s)
    # The last bucket of gradients, which may hold several blocks, comes after the pass.
    last = sync.scatter_s / sync.scattered
    backward = np.maximum(overlap.exposed_seconds(both, sync.gathered, passes.backward_s), last)
    exposed_s, all_s = passes.repeats * (forward + backward), passes.repeats * (gather_s + both)
    sums = passes.repeats - passes.scatters
    if sums.any():
        alone = overlap.exposed_seconds(sync.gather_s, sync.gathered, passes.backward_s)
        kept = passes.repeats - passes.warms_up + 1
        summed_s = passes.warms_up * forward + (kept - 1) * alone + backward
        gathered_s = (passes.repeats + 1) * sync.gather_s + sync.scatter_s
        exposed_s, all_s = np.where(sums > 0, summed_s, exposed_s), np.where(sums > 0, gathered_s, all_s)
    return exposed_s, all_s
