"""Communication of data parallelism in a step, and the part of it that hides behind computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast import collectives, frameworks, overlap, zoo
from tilecast.collectives import Group
from tilecast.constants import Constants
from tilecast.hardware import Pool, find_link
from tilecast.spec import Columns, Floats, Plans, Workload
from tilecast.step.passes import MicroBatch
from tilecast.step.placement import group_of
from tilecast.step.weights import Held, reshards_weights, update_seconds
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


def sync_seconds(
    workload: Workload,
    sharded: Sharded,
    whole: Held,
    plans: Plans,
    pool: Pool,
    caps: overlap.BucketLimits,
    units: Floats,
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
        units: number of parts in which the weights of sharded models are gathered.
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
    gathered = [parameters * whole.gathered_bytes for parameters in held]
    renewed = [parameters * updated * whole.trainable for parameters in held]
    first_s, reduce_s = run("all_reduce", ([first, nil], [nil + 1] * 2), (rest, reduced))
    # A gather takes as long as a scatter.
    scatter_s, gather_s, updated_s = run(
        "all_gather", (sums, scattered), (gathered, [units] * len(held)), (renewed, scattered)
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
    )


def _exchanged(workload: Workload, collective: str, size: Floats, group: Group, pool: Pool) -> Floats:
    """Return the seconds of a collective over replicas, (n,); a parameter server may sum the gradients."""
    if collective != "all_reduce" or workload.gradient_sync == "allReduce":
        return collectives.seconds(collective, size, group, pool.intra, pool.inter)
    servers = workload.parameter_servers or group.nodes
    waits = workload.server_updates == "synchronous"
    return collectives.serve(size, group, pool.intra, pool.inter, servers, waits=waits)


@dataclass(frozen=True, slots=True)
class Shared(Columns):
    """Parts of a step that plans of equal degrees share, (n,): collectives over replicas, and the update of weights."""

    sync: SyncSeconds
    """Collectives over replicas; their seconds are 0 without replicas."""
    units: Floats
    """Number of blocks of a stage that are gathered one after the other."""
    update_s: Floats
    """Seconds of the optimizer on all parameters of a stage; `update_own_s` is for the rank's own share of them."""
    update_own_s: Floats
    waited: Floats
    """Time of the slowest rank over the mean of all."""

    def hastened(self, speed: Floats | float) -> Shared:
        """Return the same parts with links `speed` times as fast, (n,)."""
        sync = {name: getattr(self.sync, name) / speed for name in _EXCHANGED}
        return replace(self, sync=replace(self.sync, **sync))


_EXCHANGED = ("first_s", "reduce_s", "scatter_s", "gather_s", "updated_s")
"""Fields of `SyncSeconds` that are seconds."""
_LEAST_UNITS = 4
"""Least number of parts of about equal size in which a graph is gathered or reduced, even without repeated layers."""


def straggle(workload: Workload, plans: Plans, fitted: Constants) -> Floats:
    """Return the factor by which all ranks wait for the slowest one, (n,).

    It is the expected largest of as many normal deviates as there are ranks. They spread more where ranks are fed
    unequal samples.
    """
    spread = fitted.jitter if zoo.has_equal_sequences(workload.model) else fitted.uneven_jitter
    return np.asarray(1.0 + spread * np.sqrt(2 * np.log(np.maximum(plans.gpus, 1))))


def at_stage(zero_stage: int, plans: Plans) -> Plans:
    """Return the same plans at another ZeRO stage."""
    return replace(plans, zero_stage=np.full(len(plans), zero_stage))


def shared_by_degrees(
    workload: Workload,
    sharded: Sharded,
    plans: Plans,
    held: Held,
    pool: Pool,
    fitted: Constants,
    caps: overlap.BucketLimits | None = None,
) -> Shared:
    """Return the parts of a step that plans share whose ranks hold these weights.

    Gradients are reduced in buckets of at most `caps`, or as the framework does.
    """
    blocks = max(sum(block.repeat for block in sharded.graph.layers), _LEAST_UNITS)
    units = np.maximum(np.ceil(blocks / plans.pipeline), 1.0)
    trained, own = held.parameters * held.trainable, held.own * held.trainable
    active, nil = plans.replicas > 1, np.zeros(len(plans))
    sync = SyncSeconds(nil, nil, nil, nil, nil, nil, nil + 1, nil + 1)
    if workload.training and active.any():
        gradient = frameworks.gradient_bytes(workload)
        block_bytes = trained * gradient / units
        caps = overlap.BucketLimits.of(workload, plans, gradient, block_bytes) if caps is None else caps
        sync = sync_seconds(workload, sharded, held, plans, pool, caps, units, fitted)
    return Shared(
        replace(sync, **{name: np.where(active, getattr(sync, name), 0.0) for name in _EXCHANGED}),
        units,
        update_seconds(workload, trained, active, pool.gpu, fitted),
        update_seconds(workload, own, np.zeros_like(active), pool.gpu, fitted),
        straggle(workload, plans, fitted),
    )


_FED = 0.147
"""Bandwidth of NVLink of the third generation over that of the memory of an A100 with 80 GB."""


def contention(pool: Pool) -> float:
    """Return the share of a GPU's memory bandwidth that its link inside a node can take, relative to A100 on NVLink.

    The result is at most 1: a slower bus disturbs less. The link is the one that the product has. With the pool's own
    link, a faster one would make those steps slower whose exchanges wait for another link.
    """
    link = find_link(pool.gpu.intra_link)
    return min(link.bandwidth_bytes_per_s / pool.gpu.memory_bandwidth_bytes_per_s / _FED, 1.0)


def gradient_sync(workload: Workload, plans: Plans, micro: MicroBatch, shared: Shared) -> tuple[Floats, Floats]:
    """Return exposed and hidden data-parallel communication of a step at each ZeRO stage from 0 to 3, (4, n) each.

    The ZeRO stage of the plans themselves is ignored.
    """
    repeats, sync = plans.gradient_accumulation, shared.sync
    backward, forward = micro.backward_s, np.maximum(micro.slowest_s - micro.backward_s, 0.0)
    hides = float(overlap.hides_gradients(workload))
    plain = overlap.exposed(sync.reduce_s, sync.reduced, backward * hides, sync.first_s, sync.first_share)
    scattered = overlap.exposed(sync.scatter_s, sync.scattered, backward * hides)
    updated = overlap.exposed(sync.updated_s, sync.scattered, forward * hides)
    both = sync.gather_s + sync.scatter_s
    gathered = overlap.exposed(sync.gather_s, shared.units, forward)
    # Stage 2 keeps no whole gradient to accumulate into, so every micro-batch scatters its gradients.
    reshards = reshards_weights(workload, at_stage(2, plans))
    second = repeats * scattered + np.where(reshards, repeats * gathered, updated)
    # The last bucket of gradients, which may hold several blocks, comes after the pass.
    last = sync.scatter_s / sync.scattered
    sharded = repeats * (gathered + np.maximum(overlap.exposed(both, shared.units, backward), last))
    visible = np.stack([plain, scattered + updated, second, sharded])
    busy = np.stack(
        [
            sync.first_s + sync.reduce_s,
            sync.scatter_s + sync.updated_s,
            repeats * sync.scatter_s + np.where(reshards, repeats * sync.gather_s, sync.updated_s),
            repeats * (sync.gather_s + both),
        ]
    )
    return visible, np.maximum(busy - visible, 0.0)
