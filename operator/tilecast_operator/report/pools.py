"""The status of a GPUPool that a user wrote: the nodes it has, the layer of every fact, or what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tilecast.manifests.nodes import FoundPool
from tilecast.spec import SpecError
from tilecast_operator.report.status import MAX_MESSAGE, Status


def pool_status(
    found: FoundPool | SpecError, generation: int, now: str, current: Iterable[Mapping[str, Any]]
) -> Status:
    """The whole status. The condition keeps the time of its last transition while its status stays."""
    if isinstance(found, SpecError):
        state, why, text = "False", "InvalidSpec", str(found)
    elif found.nodes == 0:
        state, why, text = "True", "NoNodesNow", "no node of the pool exists now; it is priced as spec says"
    else:
        state, why, text = "True", "NodesFound", f"{found.nodes} nodes with {found.gpus_total} GPUs"
    old = next((item for item in current if item.get("type") == "Ready"), {})
    since = old.get("lastTransitionTime") if old.get("status") == state else None
    ready = {
        "type": "Ready",
        "status": state,
        "observedGeneration": generation,
        "lastTransitionTime": since or now,
        "reason": why,
        "message": text[:MAX_MESSAGE],
    }
    head: Status = {"observedGeneration": generation, "conditions": [ready]}
    if isinstance(found, SpecError):
        return {**head, "summary": {"reason": why}}
    pool = found.pool
    price = pool.price_per_gpu_hour
    return {
        **head,
        "nodes": found.nodes,
        "gpus": {"total": found.gpus_total, "allocatable": found.gpus_allocatable},
        "facts": {name: {"value": value[:253], "layer": layer} for name, (value, layer) in found.facts.items()},
        "summary": {
            "gpu": pool.gpu.name[:63],
            "shape": f"{found.nodes}x{pool.gpus_per_node}",
            "reason": why,
            **({} if price is None else {"price": f"{price:.4g} {pool.currency}"}),
        },
    }
