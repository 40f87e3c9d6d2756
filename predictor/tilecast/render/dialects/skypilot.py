"""Write a SkyPilot task. SkyPilot tries its resources in order.

https://docs.skypilot.co/en/latest/reference/yaml-spec.html#resources-ordered
"""

from __future__ import annotations

from typing import Any

from tilecast.advice import Advice, Offer
from tilecast.hardware.instances import list_clouds
from tilecast.render.dialects.parts import (
    describe_ranking,
    find_gpu_names,
    find_instance_type,
    is_in_cluster,
    is_spot,
    list_offers_of_same_shape,
    to_dns_label,
    write_comments,
    write_documents,
)

_CLOUDS = {"aws": "aws", "azure": "azure", "gcp": "gcp", "lambda": "lambda", "nebius": "nebius", "oracle": "oci"}
"""SkyPilot's name (sky/clouds) for each cloud whose instance types ship with Tilecast."""


def write_task(advice: Advice) -> str:
    """Return a task with the resources of each pool on which the job uses the same number of nodes."""
    alike = list_offers_of_same_shape(advice, _has_as_many_nodes) if advice.offers else ()
    # SkyPilot has no name for a slice of a GPU.
    shown = [one for one in alike if not one.pool.gpu.mig]
    lines = describe_ranking(advice, "skypilot", shown)
    if not shown:
        return write_comments(lines)
    resources = [_write_resources(one) for one in shown]
    lines.append("Add setup and run. In run, nvidia-smi says which of the GPUs it got, and so which plan to take.")
    document = {
        "name": to_dns_label(advice.request.name),
        "num_nodes": shown[0].nodes,
        "resources": {"ordered": resources} if len(resources) > 1 else resources[0],
    }
    return write_documents(lines, [document])


def _has_as_many_nodes(offer: Offer, best: Offer) -> bool:
    return offer.nodes == best.nodes


def _write_resources(offer: Offer) -> dict[str, Any]:
    """Return the resources of one node of an offer: the accelerators, and the cloud or cluster if it is known."""
    written: dict[str, Any] = {"accelerators": f"{find_gpu_names(offer.pool.gpu).skypilot}:{offer.gpus_per_node}"}
    stated = find_instance_type(offer.pool)
    if is_in_cluster(offer.pool):
        written["infra"] = "kubernetes"
    elif cloud := _CLOUDS.get(list_clouds().get(stated, "")):
        written |= {"infra": cloud, "instance_type": stated}
    if is_spot(offer.pool):
        written["use_spot"] = True
    return written
