"""Read pod and GPU counts from fields of jobs and pods."""

from __future__ import annotations

from collections.abc import Iterable

from tilecast.api.fields import Document, as_mapping, list_mappings_in
from tilecast.nodes import gpu_resource
from tilecast.nodes.quantities import parse_count, parse_gpu_count

MAX_COUNT = 10**9 - 1


def count_or_default(value: object, default: int = 1) -> int:
    """Return a number or text as a whole number up to `MAX_COUNT`. For any other value, return `default`."""
    number = parse_count(value)
    return default if number is None or number > MAX_COUNT else number


def count_requested_gpus(resources: Document | None) -> int:
    """Return the GPUs that a container's `resources` request: its limit or its request, whichever is larger."""
    parts = resources or {}
    return max(count_or_default((parts.get(part) or {}).get(gpu_resource()), 0) for part in ("limits", "requests"))


def count_pod_gpus(pod: Document) -> int:
    """Return the GPUs that a pod holds: those of all its containers, or of an init container that has more."""
    spec = as_mapping(pod.get("spec"))
    every = [
        [
            parse_gpu_count(as_mapping(as_mapping(item.get("resources")).get("limits")).get(gpu_resource()))
            for item in containers
        ]
        for containers in (list_mappings_in(spec.get("containers")), list_mappings_in(spec.get("initContainers")))
    ]
    return max(sum(every[0]), max(every[1], default=0))


def format_quantity_like(example: object, number: int) -> int | str:
    """Return a number as text if `example` is text, otherwise the number itself."""
    return str(number) if isinstance(example, str) else number


def has_any_count(entries: Iterable[Document], *fields: str) -> bool:
    """Return whether any of the named fields is above 0 in any entry of a status."""
    return any(count_or_default(entry.get(name), 0) for entry in entries for name in fields)
