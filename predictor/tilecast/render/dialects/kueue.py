"""Write Kueue ResourceFlavors and a ClusterQueue. Kueue tries the flavors in the order of the ranking.

https://kueue.sigs.k8s.io/docs/concepts/cluster_queue/
"""

from __future__ import annotations

from typing import Any

from tilecast.advice import Advice, Offer
from tilecast.render.dialects.parts import (
    describe_ranking,
    name_gpu_resource,
    name_offers,
    to_dns_label,
    write_comments,
    write_documents,
)

_AMPLE = {"cpu": "1000000", "memory": "1Pi"}
"""Quotas too large to limit anything. Kueue admits a pod only if its queue has a quota for every requested resource."""
_VERSION = "kueue.x-k8s.io/v1beta2"


def write_queue(advice: Advice) -> str:
    """Return a ResourceFlavor for each pool, and a ClusterQueue with the pools' GPUs as quotas, best pool first."""
    if advice.best is None:
        return write_comments(describe_ranking(advice, "kueue"))
    offers, names = advice.offers, name_offers(advice.offers)
    resources = list(dict.fromkeys(name_gpu_resource(one.pool) for one in offers))
    lines = [
        *describe_ranking(advice, "kueue"),
        "Quotas are the GPUs of the pools as they were found; those of cpu and memory limit nothing.",
        "Namespaces use the queue by a LocalQueue of their own. A job keeps its number of pods and of GPUs in each.",
        *(
            f"{one.pool.name}: add spec.nodeLabels of its nodes, which are not known; without them it is any node."
            for one in offers
            if not one.pool.node_selector
        ),
    ]
    group = {
        "coveredResources": [*_AMPLE, *resources],
        "flavors": [
            {"name": name, "resources": _write_quotas(one, resources)} for name, one in zip(names, offers, strict=True)
        ],
    }
    queue = {
        "apiVersion": _VERSION,
        "kind": "ClusterQueue",
        "metadata": {"name": to_dns_label(advice.request.name)},
        "spec": {
            "namespaceSelector": {},
            # The next flavor is tried before anything is borrowed or preempted for this one.
            "flavorFungibility": {"whenCanBorrow": "TryNextFlavor", "whenCanPreempt": "TryNextFlavor"},
            "resourceGroups": [group],
        },
    }
    flavors = [_write_flavor(name, one) for name, one in zip(names, offers, strict=True)]
    return write_documents(lines, [*flavors, queue])


def _write_flavor(name: str, offer: Offer) -> dict[str, Any]:
    """Return the ResourceFlavor of an offer's pool, which selects the pool's nodes and tolerates their taints."""
    labels, tolerations = dict(offer.pool.node_selector), [dict(one) for one in offer.pool.tolerations]
    given = {"nodeLabels": labels, "tolerations": tolerations}
    return {
        "apiVersion": _VERSION,
        "kind": "ResourceFlavor",
        "metadata": {"name": name},
        "spec": {key: value for key, value in given.items() if value},
    }


def _write_quotas(offer: Offer, resources: list[str]) -> list[dict[str, Any]]:
    """Return the quotas of the flavor for an offer. The quota is 0 for GPU resources that the offer's pool lacks."""
    own = name_gpu_resource(offer.pool)
    gpus = {name: offer.pool.max_gpus if name == own else 0 for name in resources}
    return [{"name": name, "nominalQuota": quota} for name, quota in {**_AMPLE, **gpus}.items()]
