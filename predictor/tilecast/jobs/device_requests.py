"""GPUs that pods request by Dynamic Resource Allocation: ResourceClaims, their templates and DeviceClasses.

Field names are those of `resource.k8s.io/v1`. Requests of v1beta1, which have no field `exactly`, are supported too. A
selector is a CEL expression about one device (https://kubernetes.io/docs/reference/using-api/cel/). `_FUNCTIONS` has
those functions of Kubernetes' extensions to CEL that GPU selectors use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilecast.api.base import format_value
from tilecast.api.fields import Document, as_mapping, list_mappings_in, value_at_path
from tilecast.jobs.quantities import MAX_COUNT
from tilecast.nodes import PublishedDevice, gpu_device_classes, gpu_driver
from tilecast.nodes.devices import VERSION
from tilecast.nodes.quantities import parse_count, parse_size
from tilecast.spec import SpecError

TEMPLATE, CLAIM, CLASS = "ResourceClaimTemplate", "ResourceClaim", "DeviceClass"
MAX_SELECTOR = 10 * 1024
"""Most characters of an expression, the limit of the API server."""
_MACRO = re.compile(r"\b(?:all|exists|exists_one|map|filter)\s*\(")


@dataclass(frozen=True, slots=True)
class ClaimReference:
    """An entry of a pod's `resourceClaims`, and the ResourceClaim or template that it names."""

    name: str
    """Name of the entry in the pod."""
    kind: str
    object: str
    """Name of the ResourceClaimTemplate or ResourceClaim."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """One alternative of a request in a ResourceClaim: a number of GPUs, and CEL selectors that they must satisfy."""

    name: str
    """Name of the claim and request, and of the subrequest if there are several: `gpus/trainer/h100`."""
    gpus: int
    """Number of GPUs per pod."""
    selectors: tuple[str, ...] = ()
    """CEL expressions, those of the device class first. A device must satisfy all of them."""


def read_references(spec: Document) -> tuple[ClaimReference, ...]:
    """Return the entries of a pod spec's `resourceClaims` that name a ResourceClaim or a ResourceClaimTemplate."""
    named = (
        ClaimReference(str(entry.get("name", "")), kind, str(entry[field]))
        for entry in list_mappings_in(spec.get("resourceClaims"))
        for field, kind in (("resourceClaimTemplateName", TEMPLATE), ("resourceClaimName", CLAIM))
        if entry.get(field)
    )
    return tuple(named)


def list_requests(document: Document) -> list[Document]:
    """Return the device requests of a ResourceClaim or ResourceClaimTemplate document."""
    path = ("spec", "spec") if document.get("kind") == TEMPLATE else ("spec",)
    return list_mappings_in(value_at_path(document, (*path, "devices", "requests")))


def list_alternatives(request: Document) -> list[Document]:
    """Return the alternatives of a device request, in the order in which the scheduler tries them."""
    return list_mappings_in(request.get("firstAvailable")) or [as_mapping(request.get("exactly")) or request]


def read_request(
    where: str, claim: str, request: Document, objects: Mapping[tuple[str, str], Document]
) -> tuple[DeviceRequest, ...]:
    """Return the alternatives of a device request that are for GPUs.

    Args:
        where: kind and name of the object that contains the request, for error messages.
        claim: the name of the claim in the pod.
        request: an entry of `spec.devices.requests`.
        objects: the DeviceClasses by (kind, name).

    Raises:
        SpecError: the request is for MIG slices, for all GPUs of a node, or for an invalid number of GPUs.
    """
    whole, cut = gpu_device_classes()
    name, alternatives = f"{claim}/{request.get('name', '')}", list[DeviceRequest]()
    for option in list_alternatives(request):
        device_class = str(option.get("deviceClassName", ""))
        own = objects.get((CLASS, device_class), {})
        of_class = _list_expressions(as_mapping(own.get("spec")))
        if device_class == cut:
            raise SpecError(where, f"{name} asks for slices ({cut})", f"ask for whole GPUs, class {whole}")
        if device_class != whole and not any(gpu_driver() in text for text in of_class):
            continue
        if option.get("adminAccess") is True:
            continue
        if option.get("allocationMode") == "All":
            raise SpecError(where, f"{name} asks for all GPUs of a node", "write allocationMode ExactCount and a count")
        gpus = parse_count(option.get("count", 1))
        if not gpus or gpus > MAX_COUNT:
            raise SpecError(
                where, f"{name}: count {format_value(option.get('count'))} is no number of GPUs", "write one"
            )
        label = name if option is request or "firstAvailable" not in request else f"{name}/{option.get('name', '')}"
        alternatives.append(DeviceRequest(label, gpus, (*of_class, *_list_expressions(option))))
    return tuple(alternatives)


def _list_expressions(holder: Document) -> tuple[str, ...]:
    return tuple(
        str(value_at_path(item, ("cel", "expression")) or "") for item in list_mappings_in(holder.get("selectors"))
    )


def meets_request(request: DeviceRequest, device: PublishedDevice) -> bool:
    """Return whether a device satisfies every CEL selector of a request.

    Raises:
        SpecError: a selector cannot be evaluated.
    """
    return all(_evaluate_selector(selector, device) for selector in request.selectors)


@lru_cache(maxsize=4096)
def _evaluate_selector(selector: str, device: PublishedDevice) -> bool:
    """Return whether a CEL selector is true for a device.

    If the device lacks an attribute that the selector reads, return False.

    Raises:
        SpecError: the selector is too long, or uses a part of CEL that is not supported here.
    """
    import cel

    shortened = format_value(selector)
    if len(selector) > MAX_SELECTOR or len(_MACRO.findall(selector)) > 1:
        raise SpecError("selectors", f"{shortened} is too complex", "write it shorter, with one macro at most")
    context = cel.Context()
    for name, function in _FUNCTIONS.items():
        context.add_function(name, function)
    context.add_variable("device", _make_device_variable(device))
    try:
        return cel.evaluate(selector, context) is True
    except (KeyError, ArithmeticError):
        return False
    except (ValueError, RuntimeError, TypeError) as error:
        problem = f"{shortened} cannot be evaluated: {format_value(str(error), quote=False)}"
        remedy = "compare attributes and capacity of device with constants"
        raise SpecError("selectors", problem, remedy) from None


def _make_device_variable(device: PublishedDevice) -> dict[str, Any]:
    """Return the value of the CEL variable `device`: the device's driver, and its attributes and capacity.

    Attributes and capacity are mappings by domain and name.
    """
    attributes, capacity = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for place, facts in ((attributes, device.attributes), (capacity, device.capacity)):
        for qualified, value in facts:
            domain, _, name = qualified.partition("/")
            is_version = isinstance(value, str) and value.startswith(VERSION)
            place.setdefault(domain, {})[name] = _parse_version(str(value)) if is_version else value
    return {"driver": gpu_driver(), "attributes": attributes, "capacity": capacity}


def _parse_version(text: str) -> list[int]:
    """Return a semantic version as [major, minor, patch]. A suffix such as `-rc1` is dropped."""
    match = re.fullmatch(
        r"v?(\d{1,9})(?:\.(\d{1,9}))?(?:\.(\d{1,9}))?(?:[-+].*)?", text.removeprefix(VERSION), re.ASCII
    )
    if match is None:
        raise ValueError(f"{text[:40]!r} is no semantic version")
    return [int(number or 0) for number in match.groups()]


def _parse_quantity(text: str) -> int:
    number = parse_size(text)
    if number is None:
        raise ValueError(f"{text[:40]!r} is no quantity")
    return number


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "lowerAscii": lambda text: str(text).lower(),
    "upperAscii": lambda text: str(text).upper(),
    "trim": lambda text: str(text).strip(),
    "quantity": _parse_quantity,
    "semver": _parse_version,
    "compareTo": lambda one, other: (one > other) - (one < other),
    "isGreaterThan": lambda one, other: one > other,
    "isLessThan": lambda one, other: one < other,
}
