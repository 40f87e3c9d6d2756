"""Inputs of an advice, each with how it is changed: what a remedy names, anyone can apply and see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np

from tilecast.advise.values import Change, Request
from tilecast.hardware import Link, Pool
from tilecast.search import divisors

Apply: TypeAlias = Callable[[Request, Pool, Any], tuple[Request, Pool]]


def apply(change: Change, request: Request, pool: Pool) -> tuple[Request, Pool]:
    """The request and the pool after a change.

    Raises:
        KeyError: the change is one of a neighbour (`plan`), which is no input.
    """
    return CHANGES[change.input](request, pool, change.value)


def _training(name: str, kind: type = str) -> Apply:
    def run(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
        return replace(request, workload=replace(request.workload, **{name: kind(value)})), pool

    return run


def _planned(name: str, kind: type = str) -> Apply:
    """An input of the job that a stated plan may state as well, which is then changed alike."""
    alone = _training(name, kind)

    def run(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
        plan, changed = request.plan, {name: kind(value)}
        if plan is not None and getattr(plan, name) is not None:
            request = replace(request, plan=replace(plan, **changed))
        return alone(request, pool, value)

    return run


def _stage(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    if request.plan is None:
        return request, pool
    return replace(request, plan=replace(request.plan, zero_stage=int(value))), pool


def _precision(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    return replace(request, workload=replace(request.workload, precision=value), precisions=()), pool


def _batch(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    low, high = request.batches or (int(value), int(value))
    batches = (min(low, int(value)), max(high, int(value))) if request.batches else None
    return replace(request, workload=replace(request.workload, global_batch=int(value)), batches=batches), pool


def _constraint(name: str) -> Apply:
    def run(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
        changed: dict[str, Any] = {name: int(value)}
        return replace(request, constraints=replace(request.constraints, **changed)), pool

    return run


def _allowed(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    limits = request.constraints
    return replace(request, constraints=replace(limits, allowed_pools=(*limits.allowed_pools, str(value)))), pool


def _deadline(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    return replace(request, deadline_s=float(value)), pool


def _budget(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    if request.budget is None:
        return request, pool
    return replace(request, budget=replace(request.budget, amount=float(value))), pool


def _sharing(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    return replace(request, constraints=replace(request.constraints, allow_sharing=value == "true")), pool


def _nodes(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    return request, replace(pool, max_nodes=int(value))


def _gpus(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    return request, grown(pool, int(value))


def grown(pool: Pool, gpus: int) -> Pool:
    """The pool with so many GPUs: a part of a node grows to a whole one before there are more of them."""
    per_node = max(pool.gpus_per_node, min(gpus, pool.usual_gpus_per_node))
    return replace(pool, gpus_per_node=per_node, max_nodes=-(-gpus // per_node))


def leaps(pool: Pool, possible: Sequence[int]) -> list[int]:
    """Places of the sizes of a pool that are tried first: parts of a node, a node, and so many times its nodes."""
    gpus = np.array(possible)
    per_node = np.maximum(pool.gpus_per_node, np.minimum(gpus, pool.usual_gpus_per_node))
    tried = np.array([1, *FURTHER]) * pool.max_nodes
    return [place for place in np.flatnonzero(np.isin(-(-gpus // per_node), tried)).tolist() if place]


FURTHER = (2, 4, 8)
"""How many times as many nodes a pool is imagined to have."""


def sizes(pool: Pool) -> list[int]:
    """GPUs that a pool can be had with, ascending from its own: whole nodes, and of one node a divisor; at most
    `FURTHER[-1]` times its nodes."""
    whole, most = (pool.usual_gpus_per_node if pool.is_part else pool.gpus_per_node), FURTHER[-1] * pool.max_nodes
    parts = [part for part in divisors(whole) if pool.max_gpus < part < whole]
    own = [pool.max_gpus, *parts] if pool.is_part else []
    return [*own, *range(whole * pool.max_nodes, whole * most + 1, whole)]


def more(pool: Pool, gpus: int, effect: Literal["fits", "wins"]) -> Change:
    """So many GPUs instead of those that a pool has, in nodes of its own size, or of the usual one where it is a part
    of a node."""
    wide = grown(pool, gpus)
    if not pool.is_part:
        text = f"{wide.max_nodes} nodes instead of {pool.max_nodes}"
        return Change("pool.maxNodes", wide.max_nodes, effect, text)
    nodes, own = ("1 node", "") if wide.max_nodes == 1 else (f"{wide.max_nodes} nodes", "1 node of ")
    text = f"{nodes} of {wide.gpus_per_node} GPUs instead of {own}{pool.gpus_per_node}"
    return Change("pool.gpus", gpus, effect, text)


def _price(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    return request, replace(pool, price_per_gpu_hour=float(value))


def _memory(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    return request, replace(pool, gpu=replace(pool.gpu, memory_bytes=float(value) * 2**30))


def _links(request: Request, pool: Pool, value: Any) -> tuple[Request, Pool]:
    return request, faster(pool, float(value))


def faster(pool: Pool, factor: float) -> Pool:
    """The pool with every link that many times as fast, in bandwidth as in latency."""
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
    "training.precision": _precision,
    "training.globalBatchSize": _batch,
    "training.sequenceLength": _training("sequence_length", int),
    "training.microBatchSize": _planned("micro_batch", int),
    "training.activationCheckpointing": _planned("checkpointing"),
    "training.fusedLoss": _training("fused_loss", bool),
    "training.offload": _training("offload"),
    "training.framework": _training("framework"),
    "training.gradientSync": _training("gradient_sync"),
    "plan.zeroStage": _stage,
    "constraints.gpus": _constraint("gpus"),
    "constraints.maxGpus": _constraint("max_gpus"),
    "constraints.maxNodes": _constraint("max_nodes"),
    "constraints.maxTensorParallel": _constraint("max_tensor"),
    "constraints.allowedPools": _allowed,
    "constraints.allowSharing": _sharing,
    "deadlineSeconds": _deadline,
    "budget.amount": _budget,
    "pool.gpus": _gpus,
    "pool.maxNodes": _nodes,
    "pool.price.perGpuHour": _price,
    "pool.gpu.memoryGib": _memory,
    "pool.links": _links,
}
"""Every input that a remedy may name: paths of a TrainingJob's spec, `plan.…` for those of a plan that is asked for,
`pool.…` for those of the pool; `pool.links` is how many times as fast the links are."""
