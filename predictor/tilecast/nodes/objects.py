"""Node and ResourceSlice objects, reduced to the fields that determine a pool."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from sys import intern
from typing import Any

from tilecast.api.base import format_value, read_mapping
from tilecast.nodes.devices import VERSION, PublishedDevice
from tilecast.nodes.labels import read_label_table
from tilecast.nodes.quantities import parse_count, parse_size
from tilecast.spec import SpecError

_AS_PRINTED = "give the node as the API server prints it"
_mapping = partial(read_mapping, remedy=_AS_PRINTED)
_PROFILE = re.compile(r"\d+g\.\d+gb", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Node:
    """The fields of a Node object that determine its pool. A cluster may have thousands of nodes."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[tuple[str, str, str], ...]
    """Taints as (key, value, effect), without those that report a temporary state."""
    gpus: int | None
    """Whole GPUs that the device plugin reports. None if it reports no number, not even zero."""
    allocatable: int
    """Number of `gpus` that pods may use. The device plugin excludes unhealthy GPUs."""
    other_devices: tuple[str, ...]
    """Extended resources that are MIG slices, or accelerators of other vendors."""
    slices: tuple[tuple[str, int, int], ...] = ()
    """MIG slices of the node, as (profile, number, number that pods may use)."""
    shared: tuple[str, ...] = ()
    """Extended resources that are time-sliced or MPS shares of GPUs."""
    has_capacity: bool = False
    """Whether the node reports any capacity, for instance its CPUs."""
    unavailable: str = ""
    """Why no new pod can start on the node now: cordoned, not ready, or tainted with a temporary state.

    Empty if one can.

    It affects free GPUs and the present size of a pool, but not which pools there are.
    """

    @property
    def schedulable(self) -> bool:
        """Whether new pods can start on the node now."""
        return not self.unavailable

    @property
    def node_type(self) -> str:
        """Instance type of the node. Empty if no label names it."""
        return next((self.labels[key] for key in read_label_table().instance_type if key in self.labels), "")


@dataclass(frozen=True, slots=True)
class ResourceSlice:
    """GPUs that a Dynamic Resource Allocation driver publishes for one node."""

    name: str
    node: str
    pool: str
    generation: int
    """Generation of the ResourceSlice. Older generations of the same pool of slices are ignored."""
    devices: tuple[PublishedDevice, ...]


def read_node(document: Mapping[str, Any]) -> Node:
    """Return the fields of a Node document that determine its pool.

    Raises:
        SpecError: the document is not a valid Node.
    """
    metadata = _mapping(document, "metadata", "node")
    name = str(metadata.get("name", ""))[:253]
    where = f"node {format_value(name, quote=False)}"
    status, spec = _mapping(document, "status", where), _mapping(document, "spec", where)
    capacity = _mapping(status, "capacity", f"{where}: status")
    # Resources missing from `allocatable` are taken from the capacity; the API server leaves none out.
    allocatable = {**capacity, **_mapping(status, "allocatable", f"{where}: status")}
    table = read_label_table()
    taints = _require_mappings(spec.get("taints"), f"{where}: spec.taints")
    conditions = status.get("conditions")
    present = [str(resource) for resource, value in capacity.items() if parse_count(value)]
    mig = [resource for resource in present if resource.startswith(table.mig_resource_prefix)]
    shared = [resource for resource in present if _is_shared_resource(resource)]
    read_labels = _mapping(metadata, "labels", f"{where}: metadata")
    return Node(
        name=name,
        # Interned, since thousands of nodes share most of their labels.
        labels={intern(str(key)): intern(_format_label(value)) for key, value in read_labels.items()},
        taints=tuple(
            sorted(
                (str(item.get("key", "")), _format_label(item.get("value") or ""), str(item.get("effect", "")))
                for item in taints
                if item.get("key")
                and item.get("effect") in _EFFECTS
                and len(_format_label(item.get("value") or "")) <= 63
                if not table.transient_taints.matches(str(item.get("key", "")))
            )
        ),
        gpus=parse_count(capacity.get(table.gpu_resource)),
        allocatable=parse_count(allocatable.get(table.gpu_resource)) or 0,
        other_devices=tuple(sorted([*mig, *filter(table.is_other_gpu, present)])),
        slices=_count_mig_slices(
            [item for item in mig if item not in shared and _PROFILE.search(item)], capacity, allocatable
        ),
        shared=tuple(sorted(shared)),
        has_capacity=bool(capacity),
        unavailable=_explain_unavailable(spec, conditions if isinstance(conditions, list) else (), taints),
    )


def read_resource_slice(document: Mapping[str, Any]) -> ResourceSlice | None:
    """Return the GPUs that a ResourceSlice document lists for a node.

    Return None if the slice belongs to another driver or names no node. In v1beta1, attributes are under `basic`.

    Raises:
        SpecError: the document is not a valid ResourceSlice.
    """
    metadata, spec = _mapping(document, "metadata", "resourceslice"), _mapping(document, "spec", "resourceslice")
    name, table = str(metadata.get("name", ""))[:253], read_label_table()
    if spec.get("driver") != table.dra_driver or not spec.get("nodeName"):
        return None
    where = f"resourceslice {format_value(name, quote=False)}"
    owner = _mapping(spec, "pool", f"{where}: spec")
    devices = spec.get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(item, Mapping) for item in devices):
        remedy = "give the slice as the API server prints it"
        raise SpecError(f"{where}: spec.devices", "is not a list of mappings", remedy)
    read_devices = [_read_device(_mapping(device, "basic", where) or device, where) for device in devices]
    return ResourceSlice(
        name,
        intern(str(spec["nodeName"])[:253]),
        str(owner.get("name", ""))[:253],
        parse_count(owner.get("generation")) or 0,
        tuple(sorted(read_devices, key=lambda item: (item.kind, item.product, repr(item)))),
    )


def _read_device(document: Mapping[str, Any], where: str) -> PublishedDevice:
    """Return a device of a ResourceSlice. Attribute and capacity names without a domain get the driver's domain."""
    table, attributes = read_label_table(), _mapping(document, "attributes", f"{where}: device")
    capacity = _mapping(document, "capacity", f"{where}: device")
    kind, product = (_mapping(attributes, key, where).get("string") for key in ("type", "productName"))
    shared = {
        intern(_qualify_attribute_name(str(name))): value
        for name, given in attributes.items()
        if str(name) not in table.dra_single and (value := _read_attribute(given)) is not None
    }
    sizes = {
        intern(_qualify_attribute_name(str(name))): size
        for name, given in capacity.items()
        if (size := _read_capacity(given))
    }
    return _intern_device(
        PublishedDevice(
            intern(str(kind or table.dra_whole)),
            intern(str(product or "")),
            tuple(sorted(shared.items())),
            tuple(sorted(sizes.items())),
        )
    )


@lru_cache(maxsize=1024)
def _intern_device(device: PublishedDevice) -> PublishedDevice:
    """Return an equal device from an earlier call, or else this device, so that equal devices share memory."""
    return device


def _qualify_attribute_name(name: str) -> str:
    return name if "/" in name else f"{read_label_table().dra_driver}/{name}"


def _read_attribute(typed_value: object) -> bool | int | str | None:
    """Return the value of a device attribute, or None if its type is unknown. Versions get the prefix `version:`."""
    if not isinstance(typed_value, Mapping):
        return None
    number, version = typed_value.get("int"), typed_value.get("version")
    if isinstance(typed_value.get("bool"), bool):
        return bool(typed_value["bool"])
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    if isinstance(typed_value.get("string"), str):
        return intern(str(typed_value["string"]))
    return intern(f"{VERSION}{version}") if isinstance(version, str) else None


def _read_capacity(capacity_entry: object) -> int:
    """Return a device capacity in bytes or as a count. If it is unreadable, return 0."""
    return parse_size(capacity_entry.get("value") if isinstance(capacity_entry, Mapping) else capacity_entry) or 0


def find_profile(text: str) -> str:
    """Return the MIG profile in a label value or resource name, such as 1g.10gb for `mig-1g.10gb.me`.

    A text without a profile is returned unchanged.
    """
    match = _PROFILE.search(text)
    return match[0].lower() if match else text


def _is_shared_resource(resource: str) -> bool:
    """Return whether a resource name is that of time-sliced or MPS-shared GPUs or MIG slices (suffix `.shared`)."""
    table = read_label_table()
    is_nvidia = resource.startswith((table.gpu_resource, table.mig_resource_prefix))
    return is_nvidia and resource.endswith(table.shared_resource_suffix)


def _count_mig_slices(
    resources: Sequence[str], capacity: Mapping[str, Any], allocatable: Mapping[str, Any]
) -> tuple[tuple[str, int, int], ...]:
    total, usable = Counter[str](), Counter[str]()
    for resource in resources:
        profile = find_profile(resource.removeprefix(read_label_table().mig_resource_prefix))
        total[profile] += parse_count(capacity[resource]) or 0
        usable[profile] += parse_count(allocatable.get(resource)) or 0
    return tuple((profile, amount, usable[profile]) for profile, amount in sorted(total.items()))


_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
"""Effects of taints.

The API server stores no taint without an effect or a key, or with a value above 63 characters.
"""


def _explain_unavailable(
    spec: Mapping[str, Any], conditions: Sequence[Any], taints: Sequence[Mapping[str, Any]]
) -> str:
    if spec.get("unschedulable") in (True, "true"):
        return "cordoned"
    ready = [item for item in conditions if isinstance(item, Mapping) and item.get("type") == "Ready"]
    if not all(item.get("status") == "True" for item in ready):
        return "not ready"
    passing = (
        str(item.get("key", ""))
        for item in taints
        if read_label_table().transient_taints.matches(str(item.get("key", "")))
        and item.get("effect") != "PreferNoSchedule"
    )
    return next((f"tainted {format_value(key, quote=False)}" for key in sorted(passing)), "")


def _require_mappings(value: object, where: str) -> Sequence[Mapping[str, Any]]:
    listed = value or []
    if not isinstance(listed, list) or not all(isinstance(item, Mapping) for item in listed):
        raise SpecError(where, "is not a list of mappings", _AS_PRINTED)
    return listed


def _format_label(value: object) -> str:
    """Return a label's value as text. In hand-written YAML it may be a bare number or `true`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
