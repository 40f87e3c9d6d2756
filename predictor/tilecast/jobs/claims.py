"""Find the GPUs that a job's ResourceClaims request, and the published devices that satisfy these requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilecast.api.base import format_value
from tilecast.api.fields import Document
from tilecast.jobs.device_requests import (
    CLAIM,
    CLASS,
    TEMPLATE,
    DeviceRequest,
    list_alternatives,
    list_requests,
    meets_request,
    read_request,
)
from tilecast.jobs.interface import Job, Pods
from tilecast.nodes import PublishedDevice, gpu_device_classes
from tilecast.spec import SpecError


def find_claim_objects(job: Job, objects: Mapping[tuple[str, str], Document]) -> set[tuple[str, str]]:
    """Return (kind, name) of each object that must be read to know which GPUs a job's ResourceClaims request.

    These are the job's ResourceClaims and ResourceClaimTemplates, and the DeviceClasses that they name, except NVIDIA's
    own (`gpu_device_classes`). A DeviceClass is found only if the claim that names it is in `objects`. So after reading
    the objects, call this function again.

    Args:
        job: the job.
        objects: objects that have been read already, by (kind, name).
    """
    named = {(item.kind, item.object) for pods in job.pods for item in pods.claims}
    classes = {
        (CLASS, name)
        for key in named
        for request in list_requests(objects.get(key, {}))
        for option in list_alternatives(request)
        if (name := str(option.get("deviceClassName", ""))) and name not in gpu_device_classes()
    }
    return named | classes


def resolve_claims(job: Job, objects: Mapping[tuple[str, str], Document]) -> Job:
    """Return the job with the GPUs of its ResourceClaims added to those of its pods.

    Args:
        job: the job, with only the GPUs of container resources.
        objects: ResourceClaimTemplates, ResourceClaims and DeviceClasses by (kind, name).

    Raises:
        SpecError: a claim is missing, requests MIG slices or all GPUs of a node, or is shared by several pods.
    """
    pods = tuple(_resolve_pod_claims(pods, objects) for pods in job.pods)
    # Another number of GPUs per pod would need another claim template, and other jobs may name the present one.
    return replace(job, pods=pods, is_countable=job.is_countable and not job.has_claims)


def _resolve_pod_claims(pods: Pods, objects: Mapping[tuple[str, str], Document]) -> Pods:
    claimed = list[tuple[DeviceRequest, ...]]()
    for reference in pods.claims:
        document = objects.get((reference.kind, reference.object))
        where = f"{reference.kind} {format_value(reference.object, quote=False)}"
        if document is None:
            raise SpecError(where, "cannot be read, and the job asks for devices by it", "create it, or name another")
        requests = [read_request(where, reference.name, item, objects) for item in list_requests(document)]
        gpus = [alternatives for alternatives in requests if alternatives]
        if gpus and reference.kind == CLAIM and pods.count > 1:
            raise SpecError(
                where, f"is shared by {pods.count} pods", f"name a {TEMPLATE}, which gives each pod its own"
            )
        claimed += gpus
    return replace(pods, gpus=pods.gpus + sum(first.gpus for first, *_ in claimed), requests=tuple(claimed))


def match_devices(job: Job, devices: Sequence[PublishedDevice]) -> tuple[str, ...] | str:
    """Return, for each GPU request of a job, the name of its first alternative that the devices of a pool satisfy.

    If no alternative of a request is satisfied, return the name of that request as a string.

    Raises:
        SpecError: a selector cannot be evaluated.
    """
    met = list[str]()
    for alternatives in dict.fromkeys(item for pods in job.workers for item in pods.requests):
        first = next((one for one in alternatives if any(meets_request(one, device) for device in devices)), None)
        if first is None:
            return alternatives[0].name
        met.append(first.name)
    return tuple(dict.fromkeys(met))
