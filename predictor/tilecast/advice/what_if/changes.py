"""Inputs of an advice that a remedy may change, and the function that changes each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np

from tilecast import memory
from tilecast.advice.values import Change, Request
from tilecast.frameworks import with_framework
from tilecast.hardware import Link, Pool
from tilecast.search import divisors
from tilecast.spec import PartialPlan

GIB = 2**30

Apply: TypeAlias = Callable[[Request, Pool, Any], tuple[Request, Pool]]


def apply_change(change: Change, request: Request, pool: Pool) -> tuple[Request, Pool]:
    """Return the request and the pool after a change.

    Raises:
        KeyError: the change names no input.
    """
    return CHANGES[change.input](request, pool, change.value)


def _make_request_change(change: Callable[[Request, Any], Request]) -> Apply:
    """Return a function on a request and a pool that applies `change` to the request only."""
    return lambda request, pool, value: (change(request, value), pool)


def _make_pool_change(change: Callable[[Pool, Any], Pool]) -> Apply:
    """Return a function on a request and a pool that applies `change` to the pool only."""
    return lambda request, pool, value: (request, change(pool, value))


def _make_field_setter(attribute: str, name: str, kind: Callable[[Any], Any]) -> Apply:
    """Return a function that sets the field `name` of the attribute `attribute` of a request, unless that is None."""

    def change(request: Request, value: Any) -> Request:
        whole = getattr(request, attribute)
        return request if whole is None else replace(request, **{attribute: replace(whole, **{name: kind(value)})})

    return _make_request_change(change)


def _make_planned_field_setter(name: str, kind: Callable[[Any], Any]) -> Apply:
    """Return a function that sets a field of the workload, and of the user's plan if the plan states that field."""
    alone, planned = _make_field_setter("workload", name, kind), _make_field_setter("plan", name, kind)

    def run(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
        if getattr(request.plan, name, None) is not None:
            request, pool = planned(request, pool, value)
        return alone(request, pool, value)

    return run


def _with_precision(request: Request, value: Any) -> Request:
    return replace(request, workload=replace(request.workload, precision=value), precisions=())


def _with_batch(request: Request, value: Any) -> Request:
    low, high = request.batches or (int(value), int(value))
    batches = (min(low, int(value)), max(high, int(value))) if request.batches else None
    return replace(request, workload=replace(request.workload, global_batch=int(value)), batches=batches)


def _with_allowed_pool(request: Request, value: Any) -> Request:
    limits = request.constraints
    return replace(request, constraints=replace(limits, allowed_pools=(*limits.allowed_pools, str(value))))


def with_pool_gpus(pool: Pool, gpus: int) -> Pool:
    """Return a copy of the pool with `gpus` GPUs. A partly used node is filled before nodes are added."""
    per_node = max(pool.gpus_per_node, min(gpus, pool.usual_gpus_per_node))
    return replace(pool, gpus_per_node=per_node, max_nodes=-(-gpus // per_node), spare_gpus=0)


def select_sizes_to_try_first(pool: Pool, possible: Sequence[int]) -> list[int]:
    """Return the indices of the GPU counts in `possible` to try first.

    These are the counts with the pool's number of nodes times a factor in `FURTHER`. For a pool that is part of a node,
    larger parts and the whole node are included. Index 0, the pool's present size, is never returned.
    """
    gpus = np.array(possible)
    per_node = np.maximum(pool.gpus_per_node, np.minimum(gpus, pool.usual_gpus_per_node))
    tried = np.array([1, *FURTHER]) * pool.max_nodes
    return [place for place in np.flatnonzero(np.isin(-(-gpus // per_node), tried)).tolist() if place]


FURTHER = (2, 4, 8)
"""Factors by which a pool's node count is increased."""


def _with_framework(request: Request, value: Any) -> Request:
    return replace(request, workload=with_framework(request.workload, value))


def list_pool_sizes(pool: Pool) -> list[int]:
    """Return the GPU counts that a pool could grow to, ascending. The present count is the first.

    The larger counts are parts of a node that divide its number of GPUs, and whole nodes, up to `FURTHER[-1]` times the
    pool's nodes.
    """
    whole, most = (
        (pool.usual_gpus_per_node if pool.is_partial_node else pool.gpus_per_node),
        FURTHER[-1] * pool.max_nodes,
    )
    parts = [part for part in divisors(whole) if pool.max_gpus < part < whole]
    own = [pool.max_gpus, *parts] if pool.is_partial_node else [pool.max_gpus] if pool.spare_gpus else []
    first = pool.max_nodes + (pool.spare_gpus > 0)
    return [*own, *range(whole * first, whole * most + 1, whole)]


def describe_pool_growth(pool: Pool, gpus: int, effect: Literal["fits", "wins"]) -> Change:
    """Return the change by which a pool grows to `gpus` GPUs, with a text that describes it.

    Nodes keep their number of GPUs. The node of a pool that is part of a node grows up to the usual number.
    """
    wide = with_pool_gpus(pool, gpus)
    if not pool.is_partial_node:
        return Change("pool.maxNodes", wide.max_nodes, effect, describe_node_count(wide.max_nodes, pool))
    nodes, own = ("1 node", "") if wide.max_nodes == 1 else (f"{wide.max_nodes} nodes", "1 node of ")
    text = f"{nodes} of {wide.gpus_per_node} GPUs instead of {own}{pool.gpus_per_node}"
    return Change("pool.gpus", gpus, effect, text)


def describe_node_count(nodes: int, pool: Pool) -> str:
    """Return text on the growth of a pool to `nodes` equal nodes. If one node is smaller, the text counts GPUs."""
    if pool.spare_gpus:
        return f"{nodes * pool.gpus_per_node} GPUs instead of {pool.max_gpus}"
    return f"{nodes} nodes instead of {pool.max_nodes}" if pool.max_nodes else f"raise its maxNodes to {nodes}"


def scale_all_links(pool: Pool, factor: float) -> Pool:
    """Return the pool with the bandwidth of every link multiplied by `factor` and its latency divided by it."""
    return replace(pool, intra=scale_link(pool.intra, factor), inter=scale_link(pool.inter, factor))


def scale_link(link: Link, factor: float) -> Link:
    """Return a link with its bandwidth multiplied by `factor` and its latency divided by it."""
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
        beyond=scale_link(link.beyond, factor) if link.beyond else None,
    )


CHANGES: Mapping[str, Apply] = {
    "training.precision": _make_request_change(_with_precision),
    "training.globalBatchSize": _make_request_change(_with_batch),
    "training.sequenceLength": _make_field_setter("workload", "sequence_length", int),
    "training.microBatchSize": _make_planned_field_setter("micro_batch", int),
    "training.activationCheckpointing": _make_planned_field_setter("checkpointing", str),
    "training.fusedLoss": _make_field_setter("workload", "fused_loss", bool),
    "training.offload": _make_field_setter("workload", "offload", str),
    "training.framework": _make_request_change(_with_framework),
    "training.gradientSync": _make_field_setter("workload", "gradient_sync", str),
    "plan": _make_request_change(lambda request, value: replace(request, plan=PartialPlan.parse(str(value), "plan"))),
    "plan.zeroStage": _make_field_setter("plan", "zero_stage", int),
    "constraints.gpus": _make_field_setter("constraints", "gpus", int),
    "constraints.maxGpus": _make_field_setter("constraints", "max_gpus", int),
    "constraints.maxNodes": _make_field_setter("constraints", "max_nodes", int),
    "constraints.maxTensorParallel": _make_field_setter("constraints", "max_tensor", int),
    "constraints.allowedPools": _make_request_change(_with_allowed_pool),
    "constraints.allowSharing": _make_field_setter("constraints", "allow_sharing", lambda value: value == "true"),
    "targetStepSeconds": _make_request_change(lambda request, value: replace(request, target_step_s=float(value))),
    "deadlineSeconds": _make_request_change(lambda request, value: replace(request, deadline_s=float(value))),
    "budget.amount": _make_field_setter("budget", "amount", float),
    "pool.gpus": _make_pool_change(lambda pool, value: with_pool_gpus(pool, int(value))),
    "pool.maxNodes": _make_pool_change(lambda pool, value: replace(pool, max_nodes=int(value), spare_gpus=0)),
    "pool.price.perGpuHour": _make_pool_change(lambda pool, value: replace(pool, price_per_gpu_hour=float(value))),
    "pool.gpu.memoryGib": _make_pool_change(
        lambda pool, value: replace(pool, gpu=replace(pool.gpu, memory_bytes=float(value) * 2**30))
    ),
    "pool.links": _make_pool_change(lambda pool, value: scale_all_links(pool, float(value))),
}
"""Functions that change the inputs, by the names of the inputs.

A name is a path in a TrainingJob's spec, `plan.…` for a field of a stated plan, or `pool.…` for a field of the pool.
`pool.links` is the factor on the speed of all links.
"""


def bisect_integers(predicate: Callable[[int], bool], false_end: int, true_end: int, tolerance: int = 1) -> int:
    """Return an integer between both ends for which `predicate` is true, found by bisection.

    `predicate` is false for an integer at most `tolerance` away from the result, on the side of `false_end`.
    """
    while abs(true_end - false_end) > tolerance:
        middle = (false_end + true_end) // 2
        false_end, true_end = (false_end, middle) if predicate(middle) else (middle, true_end)
    return true_end


def describe_larger_memory(pool: Pool, needed_bytes: float) -> Change:
    """Return the change to GPUs with more memory, the fewest whole GiB that are enough for `needed_bytes`."""

    def holds(gib: int) -> bool:
        return memory.usable_bytes(replace(pool.gpu, memory_bytes=float(gib * GIB))) >= needed_bytes

    present = math.floor(pool.gpu.memory_bytes / GIB)
    size = bisect_integers(holds, present, present + 2 * math.ceil(needed_bytes / GIB))
    return Change("pool.gpu.memoryGib", size, "fits", f"GPUs of {size} GiB")
