"""The status of a GPUPool: the nodes it has, what is free of them, the layer of every fact, or what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tilecast.nodes import FoundPool
from tilecast.spec import SpecError
from tilecast_operator.capacity import Free
from tilecast_operator.report.status import Status, condition


def pool_status(
    found: FoundPool | SpecError,
    generation: int,
    now: str,
    current: Iterable[Mapping[str, Any]],
    free: Free | None = None,
    learnt: Mapping[str, Any] | None = None,
    superseded: int = 0,
) -> Status:
    """The whole status. A condition keeps the time of its last transition while its status stays.

    Args:
        found: the pool, or what is wrong with it.
        generation: of the spec that was read.
        now: RFC 3339, for conditions whose status changes.
        current: the conditions as they are now.
        free: what nobody uses; None where that is not known.
        learnt: what the pool's runs teach, as its status says it.
        superseded: runs of the pool that newer ones contradict.
    """
    before = list(current)
    states = [*_states(found, free), *_drift(learnt, superseded)]
    conditions = [condition(*state, generation, now, before) for state in states]
    head: Status = {"observedGeneration": generation, "conditions": conditions}
    why = states[0][2]
    if isinstance(found, SpecError):
        return {**head, **(learnt or {}), "summary": {"reason": why}}
    pool = found.pool
    price = pool.price_per_gpu_hour
    gpus = {"total": found.gpus_total, "allocatable": found.gpus_allocatable}
    answer: Status = {
        **head,
        **(learnt or {}),
        "nodes": found.nodes,
        "gpus": gpus if free is None else {**gpus, "free": free.gpus},
        "facts": {name: {"value": value[:253], "layer": layer} for name, (value, layer) in found.facts.items()},
        "kueueFlavor": free.flavor if free is not None else found.kueue_flavor,
        "topology": [
            {"key": level.key[:317], "domains": level.domains, "largest": level.largest} for level in found.topology
        ],
        "summary": {
            "gpu": pool.gpu.name[:63],
            "shape": f"{found.nodes}x{pool.gpus_per_node}",
            "link": pool.inter.name[:63],
            "origin": "User" if found.note is None else "Discovered",
            "reason": why,
            **({} if price is None else {"price": f"{price:.4g} {pool.currency}"}),
            **({} if free is None else {"free": f"{free.gpus}/{found.gpus_total}"}),
        },
    }
    return {key: value for key, value in answer.items() if value not in ("", [])}


def _states(found: FoundPool | SpecError, free: Free | None) -> list[tuple[str, str, str, str]]:
    """Type, status, reason and message of every condition; Ready is the first."""
    if isinstance(found, SpecError):
        return [
            ("Ready", "False", "InvalidSpec", str(found)),
            ("ScaledDown", "Unknown", "InvalidSpec", "the pool's nodes are not counted"),
            ("CapacityKnown", "False", "InvalidSpec", "the pool's nodes are not counted"),
        ]
    if found.nodes == 0:
        ready = ("NoNodesNow", "no node of the pool exists now; it is priced as spec says")
    else:
        ready = ("NodesFound", "; ".join((f"{found.nodes} nodes with {found.gpus_total} GPUs", *found.remarks)))
    if found.nodes < found.pool.max_nodes:
        scaled = ("True", "FewerNodes", f"{found.nodes} of at most {found.pool.max_nodes} nodes exist")
    else:
        scaled = ("False", "AllNodes", "every node that the pool can have exists")
    if free is None:
        known = ("False", "NotObserved", "install Kueue, or the chart with capacity.readPods, to see what is free")
    else:
        known = ("True", free.source, f"what is free is read from {free.source}")
    return [("Ready", "True", *ready), ("ScaledDown", *scaled), ("CapacityKnown", *known)]


def _drift(learnt: Mapping[str, Any] | None, superseded: int) -> list[tuple[str, str, str, str]]:
    """The condition Drifted, of a pool that has had runs."""
    if not learnt:
        return []
    if superseded:
        text = f"the newest runs contradict {superseded} older ones, which no longer count; what changed on the nodes?"
        return [("Drifted", "True", "ErrorsChanged", text)]
    return [("Drifted", "False", "ErrorsSteady", "the newest runs agree with the older ones")]
