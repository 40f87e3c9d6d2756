"""Write Karpenter NodePools. Karpenter tries the one with the greatest weight first.

https://karpenter.sh/docs/concepts/nodepools/#specweight
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilecast.advice import Advice, Offer
from tilecast.hardware.instances import list_clouds, list_node_types
from tilecast.render.dialects.parts import (
    describe_ranking,
    find_instance_type,
    is_spot,
    name_gpu_resource,
    name_offers,
    to_dns_label,
    write_comments,
    write_documents,
)

_NODE_CLASSES: Mapping[str, tuple[str, str]] = {
    "aws": ("karpenter.k8s.aws", "EC2NodeClass"),
    "azure": ("karpenter.azure.com", "AKSNodeClass"),
    "gcp": ("karpenter.k8s.gcp", "GCENodeClass"),
}
"""API group and kind of the node class of each cloud.

Sources: karpenter-provider-aws, karpenter-provider-azure, karpenter-provider-gcp, each pkg/apis.
"""
_RESERVED = ("kubernetes.io", "k8s.io", "karpenter.sh", "karpenter.k8s.aws", "karpenter.azure.com")
"""Label domains that a NodePool template must not set (karpenter: pkg/apis/v1/labels.go)."""
MAX_WEIGHT = 100


def write_node_pools(advice: Advice) -> str:
    """Return a NodePool for each pool with known instance types. The best pool has the greatest weight."""
    if advice.best is None:
        return write_comments(describe_ranking(advice, "karpenter"))
    clouds = list_clouds()
    found = [(one, _list_types(one)) for one in advice.offers]
    known = [(one, types) for one, types in found if types and clouds[types[0]] in _NODE_CLASSES]
    lines = [
        *describe_ranking(advice, "karpenter"),
        *(
            f"Not among them: {one.pool.name}: no instance type that Karpenter makes is known to have its nodes."
            for one, types in found
            if not types or clouds[types[0]] not in _NODE_CLASSES
        ),
        "Fill in the name of your node class: `default` is a guess. Limits are the nodes of each plan.",
    ]
    job = to_dns_label(advice.request.name, 30)
    names = name_offers([one for one, _ in known], 62 - len(job))
    documents = [
        _write_node_pool(f"{job}-{name}", rank, one, types, clouds[types[0]])
        for rank, (name, (one, types)) in enumerate(zip(names, known, strict=True))
    ]
    return write_documents(lines, documents) if documents else write_comments(lines)


def _list_types(offer: Offer) -> list[str]:
    """Return the instance types of one cloud whose nodes are like those of an offer's pool."""
    stated, types, clouds = find_instance_type(offer.pool), list_node_types(), list_clouds()
    if stated:
        return [stated] if stated in types else []
    pool = offer.pool
    if pool.gpu.mig:
        return []
    like = [name for name, one in types.items() if (one.gpu, one.gpus) == (pool.gpu.name, pool.gpus_per_node)]
    for cloud in _NODE_CLASSES:
        if mine := [name for name in like if clouds[name] == cloud]:
            return sorted(mine)
    return []


def _write_node_pool(name: str, rank: int, offer: Offer, types: list[str], cloud: str) -> dict[str, Any]:
    """Return the NodePool for an offer. `rank` counts from 0, and `types` are the instance types of its nodes."""
    group, kind = _NODE_CLASSES[cloud]
    labels = {key: value for key, value in offer.pool.node_selector.items() if not _is_reserved(key)}
    requirements = [
        {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": types},
        {
            "key": "karpenter.sh/capacity-type",
            "operator": "In",
            "values": ["spot" if is_spot(offer.pool) else "on-demand"],
        },
    ]
    spec: dict[str, Any] = {
        "requirements": requirements,
        "nodeClassRef": {"group": group, "kind": kind, "name": "default"},
    }
    if taints := _list_taints(offer):
        spec["taints"] = taints
    template: dict[str, Any] = {"metadata": {"labels": labels}} if labels else {}
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {
            "weight": max(MAX_WEIGHT - rank, 1),
            "limits": {name_gpu_resource(offer.pool): offer.nodes * offer.pool.gpus_per_node},
            "template": {**template, "spec": spec},
        },
    }


def _is_reserved(key: str) -> bool:
    """Return whether a label's key is in a domain that only Karpenter or Kubernetes sets."""
    domain = key.partition("/")[0]
    return any(domain == one or domain.endswith(f".{one}") for one in _RESERVED)


def _list_taints(offer: Offer) -> list[dict[str, str]]:
    """Return taints for the nodes of an offer's pool, derived from the pool's tolerations."""
    return [
        {key: toleration[key] for key in ("key", "value", "effect") if toleration.get(key)}
        for toleration in offer.pool.tolerations
        if toleration.get("key") and toleration.get("effect")
    ]
