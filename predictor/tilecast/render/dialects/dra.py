"""Write a ResourceClaimTemplate of Dynamic Resource Allocation. The first pool with free devices satisfies it.

https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/#prioritized-list
"""

from __future__ import annotations

import json
import re
from typing import Any

from tilecast.advice import Advice, Offer
from tilecast.hardware import Pool
from tilecast.nodes import gpu_device_classes, gpu_driver
from tilecast.render.dialects.parts import (
    describe_ranking,
    list_offers_of_same_shape,
    list_products,
    name_offers,
    to_dns_label,
    write_comments,
    write_documents,
)

MAX_ALTERNATIVES, MAX_DEVICES = 8, 32
"""Most subrequests of a request, and most devices of a claim (k8s.io/api/resource/v1/types.go)."""


def write_claim(advice: Advice) -> str:
    """Return a ResourceClaimTemplate for the GPUs of one pod, with an alternative for each pool.

    Only pools on which the job has the same number of pods are alternatives.
    """
    alike = list_offers_of_same_shape(advice, _has_as_many_pods) if advice.offers else ()
    shown = [one for one in alike if one.gpus_per_node <= MAX_DEVICES][:MAX_ALTERNATIVES]
    lines = describe_ranking(advice, "dra", shown)
    if not shown:
        return write_comments(lines)
    pods = shown[0].nodes
    lines.append(
        f"Name the template in each of the job's {pods} pods: spec.resourceClaims[].resourceClaimTemplateName."
    )
    if pods > 1 and len(shown) > 1:
        lines.append("Every pod chooses by itself: pods of one job may get different GPUs, unless affinity joins them.")
    requests = [_write_subrequest(label, one) for label, one in zip(name_offers(shown), shown, strict=True)]
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": f"{to_dns_label(advice.request.name, 58)}-gpus"},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpus", "firstAvailable": requests}]}}},
    }
    return write_documents(lines, [document])


def _has_as_many_pods(offer: Offer, best: Offer) -> bool:
    return offer.nodes == best.nodes


def _write_subrequest(name: str, offer: Offer) -> dict[str, Any]:
    """Return the alternative for the GPUs of one pod of an offer."""
    whole, sliced = gpu_device_classes()
    return {
        "name": name,
        "deviceClassName": sliced if offer.pool.gpu.mig else whole,
        "allocationMode": "ExactCount",
        "count": offer.gpus_per_node,
        "selectors": [{"cel": {"expression": text}} for text in _write_selectors(offer.pool)],
    }


def _write_selectors(pool: Pool) -> list[str]:
    """Return CEL expressions that are true only for devices like the GPUs of a pool."""
    attributes = f"device.attributes[{json.dumps(gpu_driver())}]"
    # A label has dashes where the driver's name of a product has spaces.
    products = "|".join(re.escape(name.lower()).replace("\\-", "[- ]") for name in list_products(pool))
    selectors = [f"{attributes}.productName.lowerAscii().matches({json.dumps(f'^({products})$')})"]
    return [*selectors, f"{attributes}.profile == {json.dumps(pool.gpu.mig)}"] if pool.gpu.mig else selectors
