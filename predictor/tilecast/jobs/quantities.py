"""Numbers of pods and GPUs in the notations that jobs use."""

from __future__ import annotations

from collections.abc import Iterable

from tilecast.api.fields import Document, as_mapping, mappings_in
from tilecast.nodes import gpu_resource
from tilecast.nodes.quantities import parse_count, parse_gpu_count

MAX_COUNT = 10**9 - 1


def count_or_default(value: object, otherwise: int = 1) -> int:
    """Return a whole number up to `MAX_COUNT` from a number or text; `otherwise` for anything else."""
    number = parse_count(value)
    return otherwise if number is None or number > MAX_COUNT else number


def requested_gpus(resources: Document | None) -> int:
    """Return the GPUs of a `resources` block: the larger of limit and request, which Kubernetes keeps equal."""
    parts = resources or {}
    return max(count_or_default((parts.get(part) or {}).get(gpu_resource()), 0) for part in ("limits", "requests"))


def pod_gpus(pod: Document) -> int:
    """Return the GPUs that a pod holds: those of its containers, or of an init container that requests more."""
    spec = as_mapping(pod.get("spec"))
    every = [
        [
            parse_gpu_count(as_mapping(as_mapping(item.get("resources")).get("limits")).get(gpu_resource()))
            for item in containers
        ]
        for containers in (mappings_in(spec.get("containers")), mappings_in(spec.get("initContainers")))
    ]
    return max(sum(every[0]), max(every[1], default=0))


def format_like(example: object, number: int) -> int | str:
    """Return a number as text if `example` is text, else as it is."""
    return str(number) if isinstance(example, str) else number


def has_any_count(entries: Iterable[Document], *counts: str) -> bool:
    """Return whether any entry of a status has one of the named counts above zero."""
    return any(count_or_default(entry.get(name), 0) for entry in entries for name in counts)
