"""The annotations of an advised job: what a script or a person needs, in under 4 KiB."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tilecast.advise import Advice
from tilecast.manifests.door import GROUP
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

MAX_BYTES = 4096


def advice_annotations(advice: Advice) -> dict[str, str]:
    """The annotations of an advice; none where there is no recommendation."""
    best = advice.best
    if best is None:
        return {}
    selector = json.dumps(dict(sorted(best.pool.node_selector.items())), separators=(",", ":"))
    found = {
        NODE_TYPE: best.pool.node_type or best.pool.gpu.product,
        POOL: best.pool.name,
        NODE_SELECTOR: selector,
        GPUS: str(best.gpus),
        PARALLELISM: json.dumps(document.parallelism(best.plan), separators=(",", ":")),
        STEP_SECONDS: f"{document.figures(best.step_s):g}",
        CONFIDENCE: f"{document.figures(best.lower_s):g}-{document.figures(best.upper_s):g} s",
        HASH: advice.inputs_hash[:63],
    }
    return found if size_bytes(found) <= MAX_BYTES else {**found, NODE_SELECTOR: "{}"}


def size_bytes(found: Mapping[str, str]) -> int:
    """Bytes of keys and values, as the API server counts them."""
    return sum(len(key.encode()) + len(value.encode()) for key, value in found.items())
