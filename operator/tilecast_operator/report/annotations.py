"""The annotations of an advised job: what a script or a person needs, in under 4 KiB."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tilecast.advise import Advice
from tilecast.api.base import GROUP
from tilecast.render import document

NODE_TYPE = f"{GROUP}/recommended-node-type"
POOL = f"{GROUP}/recommended-pool"
NODE_SELECTOR = f"{GROUP}/recommended-node-selector"
GPUS = f"{GROUP}/recommended-gpus"
PARALLELISM = f"{GROUP}/recommended-parallelism"
STEP_SECONDS = f"{GROUP}/predicted-step-seconds"
CONFIDENCE = f"{GROUP}/prediction-confidence"
HASH = f"{GROUP}/advice-hash"

KEYS = (NODE_TYPE, POOL, NODE_SELECTOR, GPUS, PARALLELISM, STEP_SECONDS, CONFIDENCE, HASH)
"""Every annotation that the operator writes; it owns these and no other."""

STARTED = f"{GROUP}/started"
OBSERVED = f"{GROUP}/observed-step-seconds"

INPUTS = (STARTED, OBSERVED)
"""Every annotation that is read: users, and what starts their jobs, write these."""

MAX_BYTES = 4096


def advice_annotations(advice: Advice) -> dict[str, str]:
    """The annotations of an advice; none where there is no recommendation."""
    best = advice.best
    if best is None:
        return {}
    found = recommendation_annotations(document.recommendation(best), advice.inputs_hash)
    return found if best.pool.node_type else {**found, NODE_TYPE: best.pool.gpu.product}


def recommendation_annotations(best: Mapping[str, Any], inputs_hash: str) -> dict[str, str]:
    """The annotations of a recommendation as a status holds it; without a node type it is the pool's name."""
    step = best["stepSeconds"]
    found = {
        NODE_TYPE: best.get("nodeType") or best["pool"],
        POOL: best["pool"],
        NODE_SELECTOR: json.dumps(dict(sorted(best["nodeSelector"].items())), separators=(",", ":")),
        GPUS: str(best["gpus"]),
        PARALLELISM: json.dumps(best["parallelism"], separators=(",", ":")),
        STEP_SECONDS: f"{step['target']:g}",
        CONFIDENCE: f"{step['lowerBound']:g}-{step['upperBound']:g} s",
        HASH: inputs_hash[:63],
    }
    return found if size_bytes(found) <= MAX_BYTES else {**found, NODE_SELECTOR: "{}"}


def size_bytes(found: Mapping[str, str]) -> int:
    """Bytes of keys and values, as the API server counts them."""
    return sum(len(key.encode()) + len(value.encode()) for key, value in found.items())
