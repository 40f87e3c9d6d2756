"""Inputs of an advice and how each is changed, so that anyone can apply a remedy and see its effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np

from tilecast import memory
from tilecast.advice.values import Change, Request
from tilecast.hardware import Link, Pool
from tilecast.search import divisors

GIB = 2**30

Apply: TypeAlias = Callable[[Request, Pool, Any], tuple[Request, Pool]]


def apply(change: Change, request: Request, pool: Pool) -> tuple[Request, Pool]:
    """Return the request and the pool after a change.

    Raises:
        KeyError: the change is not of an input; that of a neighbour (`plan`) describes another plan.
    """
    return CHANGES[change.input](request, pool, change.value)


def _job(change: Callable[[Request, Any], Request]) -> Apply:
    """Adapt a change of the job to the signature of `Apply`."""
    return lambda request, pool, value: (change(request, value), pool)


def _pool(change: Callable[[Pool, Any], Pool]) -> Apply:
    """Adapt a change of the pool to the signature of `Apply`."""
    return lambda request, pool, value: (request, change(pool, value))


def _part(part: str, name: str, kind: Callable[[Any], Any]) -> Apply:
    """Make a change of one field in a part of the request; it does nothing if the request has no such part."""

    def change(request: Request, value: Any) -> Request:
        whole = getattr(request, part)
        return request if whole is None else replace(request, **{part: replace(whole, **{name: kind(value)})})

    return _job(change)


def _planned(name: str, kind: Callable[[Any], Any]) -> Apply:
    """Make a change of a workload field that a stated plan may set as well; both are then changed."""
    alone, planned = _part("workload", name, kind), _part("plan", name, kind)

    def run(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
        if getattr(request.plan, name, None) is not None:
            request, pool = planned(request, pool, value)
        return alone(request, pool, value)

    return run


def _precision(request: Request, value: Any) -> Request:
    return replace(request, workload=replace(request.workload, precision=value), precisions=())


def _batch(request: Request, value: Any) -> Request:
    low, high = request.batches or (int(value), int(value))
    batches = (min(low, int(value)), max(high, int(value))) if request.batches else None
    return replace(request, workload=replace(request.workload, global_batch=int(value)), batches=batches)


def _allowed(request: Request, value: Any) -> Request:
    limits = request.constraints
    return replace(request, constraints=replace(limits, allowed_pools=(*limits.allowed_pools, str(value))))


def grown(pool: Pool, gpus: int) -> Pool:
    """Return the pool with `gpus` GPUs: part of a node grows to a whole node before the pool gets more nodes."""
    per_node = max(pool.gpus_per_node, min(gpus, pool.usual_gpus_per_node))
    return replace(pool, gpus_per_node=per_node, max_nodes=-(-gpus // per_node))


def first_sizes(pool: Pool, possible: Sequence[int]) -> list[int]:
    """Return the places in `possible` that are tried first.

    These are parts of a node, one node, and the multiples `FURTHER` of the pool's nodes. The first place, which is the
    pool's present size, is left out.
    """
    gpus = np.array(possible)
    per_node = np.maximum(pool.gpus_per_node, np.minimum(gpus, pool.usual_gpus_per_node))
    tried = np.array([1, *FURTHER]) * pool.max_nodes
    return [place for place in np.flatnonzero(np.isin(-(-gpus // per_node), tried)).tolist() if place]


FURTHER = (2, 4, 8)
"""Factors by which the nodes of a pool are multiplied to see what a larger pool would give."""


def sizes(pool: Pool) -> list[int]:
    """Return the GPU counts that a pool could grow to, ascending, its present one first.

    They are whole nodes, or divisors of one node, and at most `FURTHER[-1]` times the pool's nodes.
    """
    whole, most = (pool.usual_gpus_per_node if pool.is_part else pool.gpus_per_node), FURTHER[-1] * pool.max_nodes
    parts = [part for part in divisors(whole) if pool.max_gpus < part < whole]
    own = [pool.max_gpus, *parts] if pool.is_part else []
    return [*own, *range(whole * pool.max_nodes, whole * most + 1, whole)]


def growth(pool: Pool, gpus: int, effect: Literal["fits", "wins"]) -> Change:
    """Return the change that gives a pool `gpus` GPUs.

    Nodes keep their size; where the pool is a part of a node, they get the usual one.
    """
    wide = grown(pool, gpus)
    if not pool.is_part:
        text = f"{wide.max_nodes} nodes instead of {pool.max_nodes}"
        return Change("pool.maxNodes", wide.max_nodes, effect, text)
    nodes, own = ("1 node", "") if wide.max_nodes == 1 else (f"{wide.max_nodes} nodes", "1 node of ")
    text = f"{nodes} of {wide.gpus_per_node} GPUs instead of {own}{pool.gpus_per_node}"
    return Change("pool.gpus", gpus, effect, text)


def faster(pool: Pool, factor: float) -> Pool:
    """Return the pool with every link `factor` times as fast, in bandwidth and in latency."""
    return replace(pool, intra=_faster(pool.intra, factor), inter=_faster(pool.inter, factor))


def _faster(link: Link, factor: float) -> Link:
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor,
        protocols={
            name: replace(one, start_s=one.start_s / factor, hop_s=one.hop_s / factor)
            for name, one in link.protocols.items()
        },
        peer_s=link.peer_s / factor,
        reduction_bytes_per_s=link.reduction_bytes_per_s * factor,
        reduction_start_s=link.reduction_start_s / factor,
        beyond=_faster(link.beyond, factor) if link.beyond else None,
    )


CHANGES: Mapping[str, Apply] = {
    "training.precision": _job(_precision),
    "training.globalBatchSize": _job(_batch),
    "training.sequenceLength": _part("workload", "sequence_length", int),
    "training.microBatchSize": _planned("micro_batch", int),
    "training.activationCheckpointing": _planned("checkpointing", str),
    "training.fusedLoss": _part("workload", "fused_loss", bool),
    "training.offload": _part("workload", "offload", str),
    "training.framework": _part("workload", "framework", str),
    "training.gradientSync": _part("workload", "gradient_sync", str),
    "plan.zeroStage": _part("plan", "zero_stage", int),
    "constraints.gpus": _part("constraints", "gpus", int),
    "constraints.maxGpus": _part("constraints", "max_gpus", int),
    "constraints.maxNodes": _part("constraints", "max_nodes", int),
    "constraints.maxTensorParallel": _part("constraints", "max_tensor", int),
    "constraints.allowedPools": _job(_allowed),
    "constraints.allowSharing": _part("constraints", "allow_sharing", lambda value: value == "true"),
    "deadlineSeconds": _job(lambda request, value: replace(request, deadline_s=float(value))),
    "budget.amount": _part("budget", "amount", float),
    "pool.gpus": _pool(lambda pool, value: grown(pool, int(value))),
    "pool.maxNodes": _pool(lambda pool, value: replace(pool, max_nodes=int(value))),
    "pool.price.perGpuHour": _pool(lambda pool, value: replace(pool, price_per_gpu_hour=float(value))),
    "pool.gpu.memoryGib": _pool(
        lambda pool, value: replace(pool, gpu=replace(pool.gpu, memory_bytes=float(value) * 2**30))
    ),
    "pool.links": _pool(lambda pool, value: faster(pool, float(value))),
}
"""Every input that a remedy may name, and how it is changed.

Names are paths in a TrainingJob's spec, `plan.…` for the fields of a stated plan, and `pool.…` for those of the pool.
`pool.links` is the factor on the speed of all links.
"""


def bisect_whole(works: Callable[[int], bool], fails: int, succeeds: int, tolerance: int = 1) -> int:
    """Bisect between a number that fails and one that succeeds, and return one that works.

    A number at most `tolerance` from it, towards `fails`, does not work.
    """
    while abs(succeeds - fails) > tolerance:
        middle = (fails + succeeds) // 2
        fails, succeeds = (fails, middle) if works(middle) else (middle, succeeds)
    return succeeds


def roomier(pool: Pool, needed_bytes: float) -> Change:
    """Return the change to GPUs with the fewest whole GiB that hold this many bytes."""

    def holds(gib: int) -> bool:
        return memory.usable_bytes(replace(pool.gpu, memory_bytes=float(gib * GIB))) >= needed_bytes

    present = math.floor(pool.gpu.memory_bytes / GIB)
    size = bisect_whole(holds, present, present + 2 * math.ceil(needed_bytes / GIB))
    return Change("pool.gpu.memoryGib", size, "fits", f"GPUs of {size} GiB")
