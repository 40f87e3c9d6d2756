"""Numbers of pods and GPUs as jobs write them."""

from __future__ import annotations

from collections.abc import Iterable

from tilecast.api.fields import Document, items, mapping
from tilecast.nodes import gpu_resource
from tilecast.nodes.quantities import count, whole

MAX_COUNT = 10**9 - 1


def whole_count(value: object, otherwise: int = 1) -> int:
    """A whole number up to `MAX_COUNT`, as a number or as text; `otherwise` for anything else."""
    number = count(value)
    return otherwise if number is None or number > MAX_COUNT else number


def requested(resources: Document | None) -> int:
    """GPUs of a `resources` block; Kubernetes takes the limit for both."""
    parts = resources or {}
    return max(whole_count((parts.get(part) or {}).get(gpu_resource()), 0) for part in ("limits", "requests"))


def pod_gpus(pod: Document) -> int:
    """GPUs that a pod holds: those of its containers, or of an init container that asks for more."""
    spec = mapping(pod.get("spec"))
    every = [
        [whole(mapping(mapping(item.get("resources")).get("limits")).get(gpu_resource())) for item in containers]
        for containers in (items(spec.get("containers")), items(spec.get("initContainers")))
    ]
    return max(sum(every[0]), max(every[1], default=0))


def like(old: object, new: int) -> int | str:
    """The new number as the old one was written: text where that was text."""
    return str(new) if isinstance(old, str) else new


def any_count(entries: Iterable[Document], *counts: str) -> bool:
    """Whether an entry of a status has one of the counts above zero."""
    return any(whole_count(entry.get(name), 0) for entry in entries for name in counts)
