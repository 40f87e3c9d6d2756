"""Communication of data parallelism in a step, and the part of it that hides behind computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tilecast import collectives, constants, frameworks, overlap, zoo
from tilecast.collectives import Group
from tilecast.constants import Constants
from tilecast.hardware import Pool, find_link
from tilecast.spec import Columns, Floats, Ints, Plans, Workload
from tilecast.step.passes import MicroBatch
from tilecast.step.placement import group_of
from tilecast.step.weights import Held, reshards_weights
from tilecast.zoo import Sharded


@dataclass(frozen=True, slots=True)
class SyncSeconds(Columns):
    """Collectives of data parallelism in a step, each alone and not hidden, in seconds, (n,).

    In this order: the sum of the first bucket of gradients, that of all other buckets, the scatter of gradients, the
    gather of weights, and the gather of updated weights.
    """

    first_s: Floats
    reduce_s: Floats
    scatter_s: Floats
    gather_s: Floats
    updated_s: Floats
    first_share: Floats
    """Share of the gradients that the first bucket has."""
    reduced: Floats
    """Number of the other buckets."""
    scattered: Floats
    """Number of buckets that are scattered, and gathered after the update."""
    gathered: Floats
    """Number of parts in which weights of sharded models are gathered, one after the other."""

    def mapped(self, change: Callable[[Floats], Floats]) -> SyncSeconds:
        """Return the same collectives with changed seconds."""
        names = ("first_s", "reduce_s", "scatter_s", "gather_s", "updated_s")
        return replace(self, **{name: change(getattr(self, name)) for name in names})


def sync_seconds(
    workload: Workload,
    sharded: Sharded,
    whole: Held,
    plans: Plans,
    pool: Pool,
    caps: overlap.BucketLimits,
    gathered: Floats,
    fitted: Constants,
) -> SyncSeconds:
    """Return the data-parallel collectives over the fullest stage, (n,).

    Args:
        workload: the job.
        sharded: the model under the plans' shards.
        whole: weights of the fullest stage.
        plans: the plans, (n,).
        pool: where the job runs.
        caps: most bytes of a bucket of gradients.
        gathered: number of parts in which the weights of sharded models are gathered.
        fitted: the constants.
    """
    everything, experts = (sharded.stage(column, plans) for column in ("parameters", "expert_parameters"))
    groups = [(everything - experts, group_of(plans.replicas, plans.tensor.astype(float), plans.gpus, pool))]
    if experts.any():
        groups.append((experts, group_of(plans.expert_replicas, plans.expert.astype(float), plans.gpus, pool)))
    nil, weight, gradient = np.zeros(len(plans)), workload.weight_bytes, frameworks.gradient_bytes(workload)
    # Megatron-LM, training/arguments.py: fp8_param_gather gathers updated weights as the one byte that is held.
    updated = weight - (sharded.layered_share(plans) if frameworks.holds_fp8_alone(workload) else 0.0)

    def run(collective: str, *exchanges: tuple[Sequence[Floats], Sequence[Floats]]) -> Floats:
        """Return the seconds of exchanges by one collective, (k, n).

        Each exchange has the bytes of every group, and the number of parts in which it sends them.
        """
        total = np.zeros((len(exchanges), len(plans)))
        for place, (_, group) in enumerate(groups):
            size, count = (np.stack([one[side][place] for one in exchanges]) for side in (0, 1))
            seconds = _exchanged(workload, collective, size / count, group, pool)
            total = total + np.where(size > 0, seconds * count * fitted.factor["gradients"], 0.0)
        return total

    def counted(sizes: Sequence[Floats], counts: Sequence[Floats]) -> Floats:
        each = [np.where(size > 0, count, 0.0) for size, count in zip(sizes, counts, strict=True)]
        return np.asarray(np.maximum(np.sum(each, axis=0), 1.0))

    # Parameters that a rank holds alone are not exchanged.
    held = [np.where(group.ranks > 1, parameters, 0.0) for parameters, group in groups]
    sums = [parameters * gradient * whole.trainable for parameters in held]
    first = np.minimum(caps.first, sums[0])
    rest = [sums[0] - first, *sums[1:]]
    reduced, scattered = ([caps.count(size) for size in sizes] for sizes in (rest, sums))
    weights = [parameters * whole.gathered_bytes for parameters in held]
    renewed = [parameters * updated * whole.trainable for parameters in held]
    first_s, reduce_s = run("all_reduce", ([first, nil], [nil + 1] * 2), (rest, reduced))
    # A gather takes as long as a scatter.
    scatter_s, gather_s, updated_s = run(
        "all_gather", (sums, scattered), (weights, [gathered] * len(held)), (renewed, scattered)
    )
    return SyncSeconds(
        first_s,
        reduce_s,
        scatter_s,
        gather_s,
        updated_s,
        first_share=first / np.maximum(np.sum(sums, axis=0), 1.0),
        reduced=counted(rest, reduced),
        scattered=counted(sums, scattered),
        gathered=gathered,
    )


def _exchanged(workload: Workload, collective: str, size: Floats, group: Group, pool: Pool) -> Floats:
    """Return the seconds of a collective over replicas, (n,); a parameter server may sum the gradients."""
    if collective != "all_reduce" or workload.gradient_sync == "allReduce":
        return collectives.seconds(collective, size, group, pool.intra, pool.inter)
    servers = workload.parameter_servers or group.nodes
    waits = workload.server_updates == "synchronous"
    return collectives.serve(size, group, pool.intra, pool.inter, servers, waits=waits)


_LEAST_GATHERED = 4
"""Least number of parts of about equal size in which a graph is gathered or reduced, even without repeated layers."""


def straggler_factor(workload: Workload, plans: Plans, fitted: Constants) -> Floats:
    """Return the factor by which all ranks wait for the slowest one, (n,).

    It is the expected largest of as many normal deviates as there are ranks. They spread more where ranks are fed
    unequal samples.
    """
    spread = fitted.jitter if zoo.has_equal_sequences(workload.model) else fitted.uneven_jitter
    return np.asarray(1.0 + spread * np.sqrt(2 * np.log(np.maximum(plans.gpus, 1))))


def replica_sync(
    workload: Workload,
    sharded: Sharded,
    plans: Plans,
    held: Held,
    pool: Pool,
    fitted: Constants,
    bucket_mib: Floats | None,
    speed: Floats | float,
) -> SyncSeconds:
    """Return the collectives over replicas of plans whose ranks hold these weights; they take 0 without replicas.

    Gradients are reduced in buckets of `bucket_mib`, (n,), or as the framework does. The pool's links are `speed` times
    as fast.
    """
    blocks = max(sum(block.repeat for block in sharded.graph.layers), _LEAST_GATHERED)
    gathered = np.maximum(np.ceil(blocks / plans.pipeline), 1.0)
    active, nil, one = plans.replicas > 1, np.zeros(len(plans)), np.ones(len(plans))
    if not (workload.training and active.any()):
        return SyncSeconds(nil, nil, nil, nil, nil, nil, one, one, gathered)
    gradient = frameworks.gradient_bytes(workload)
    block_bytes = held.parameters * held.trainable * gradient / gathered
    caps = overlap.BucketLimits.of(workload, plans, gradient, block_bytes)
    if bucket_mib is not None:
        caps = overlap.BucketLimits.of_sizes(workload, bucket_mib)
    sync = sync_seconds(workload, sharded, held, plans, pool, caps, gathered, fitted)
    return sync.mapped(lambda seconds: np.where(active, seconds, 0.0) / speed)


def contention(pool: Pool) -> float:
    """Return the share of a GPU's memory bandwidth that its link inside a node can take, relative to A100 on NVLink.

    The result is at most 1: a slower bus disturbs less. The link is the one that the product has. With the pool's own
    link, a faster one would make those steps slower whose exchanges wait for another link.
    """
    link = find_link(pool.gpu.intra_link)
    return min(link.bandwidth_bytes_per_s / pool.gpu.memory_bandwidth_bytes_per_s / constants.shipped().contention, 1.0)


@dataclass(frozen=True, slots=True)
class _Passes:
    """Computation of a step behind which collectives of replicas hide, (n,)."""

    repeats: Ints
    """Number of micro-batches."""
    forward_s: Floats
    """Forward pass of a micro-batch."""
    backward_s: Floats
    overlaps: float
    """1 if collectives hide behind these passes below ZeRO 3, else 0."""
    reshards: npt.NDArray[np.bool_]
    """Whether every micro-batch gathers the weights under ZeRO 2."""


def replica_seconds(workload: Workload, plans: Plans, micro: MicroBatch, sync: SyncSeconds) -> tuple[Floats, Floats]:
    """Return exposed and hidden communication of replicas in a step at each ZeRO stage from 0 to 3, (4, n) each.

    The ZeRO stage of the plans themselves is ignored.
    """
    passes = _Passes(
        plans.gradient_accumulation,
        np.maximum(micro.slowest_s - micro.backward_s, 0.0),
        micro.backward_s,
        float(overlap.hides_gradients(workload)),
        reshards_weights(workload, replace(plans, zero_stage=np.full(len(plans), 2))),
    )
    stages = [formula(passes, sync) for formula in (_zero_0, _zero_1, _zero_2, _zero_3)]
    exposed, busy = (np.stack(column) for column in zip(*stages, strict=True))
    return exposed, np.maximum(busy - exposed, 0.0)


def _zero_0(passes: _Passes, sync: SyncSeconds) -> tuple[Floats, Floats]:
    """Return the exposed and the whole time of buckets that are all-reduced behind the last backward pass."""
    reduced = overlap.exposed(
        sync.reduce_s, sync.reduced, passes.backward_s * passes.overlaps, sync.first_s, sync.first_share
    )
    return reduced, sync.first_s + sync.reduce_s


def _zero_1(passes: _Passes, sync: SyncSeconds) -> tuple[Floats, Floats]:
    """Return the same where gradients are scattered once, and updated weights are gathered in the next forward pass."""
    scattered = overlap.exposed(sync.scatter_s, sync.scattered, passes.backward_s * passes.overlaps)
    updated = overlap.exposed(sync.updated_s, sync.scattered, passes.forward_s * passes.overlaps)
    return scattered + updated, sync.scatter_s + sync.updated_s


def _zero_2(passes: _Passes, sync: SyncSeconds) -> tuple[Floats, Floats]:
    """Return the same where every micro-batch scatters its gradients: no rank has a whole one to accumulate into."""
    scattered = overlap.exposed(sync.scatter_s, sync.scattered, passes.backward_s * passes.overlaps)
    updated = overlap.exposed(sync.updated_s, sync.scattered, passes.forward_s * passes.overlaps)
    gathered = overlap.exposed(sync.gather_s, sync.gathered, passes.forward_s)
    visible = passes.repeats * scattered + np.where(passes.reshards, passes.repeats * gathered, updated)
    busy = passes.repeats * sync.scatter_s
    return visible, busy + np.where(passes.reshards, passes.repeats * sync.gather_s, sync.updated_s)


def _zero_3(passes: _Passes, sync: SyncSeconds) -> tuple[Floats, Floats]:
    """Return the same where every pass gathers the weights block by block, and gradients are scattered behind it."""
    both = sync.gather_s + sync.scatter_s
    forward = overlap.exposed(sync.gather_s, sync.gathered, passes.forward_s)
    # The last bucket of gradients, which may hold several blocks, comes after the pass.
    last = sync.scatter_s / sync.scattered
    backward = np.maximum(overlap.exposed(both, sync.gathered, passes.backward_s), last)
    return passes.repeats * (forward + backward), passes.repeats * (sync.gather_s + both)
