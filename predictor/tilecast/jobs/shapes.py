"""Check the types of the job fields that are read.

A shape is `str`, a list with the shape of every item, or a mapping of keys to shapes. The key `EVERY` matches all keys.
Keys that a shape does not name are not checked here, because the API server checks them (PodSpec of core/v1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from tilecast.api.base import format_value
from tilecast.api.fields import Path, value_at_path
from tilecast.jobs.quantities import MAX_COUNT
from tilecast.nodes.quantities import parse_count
from tilecast.spec import SpecError

Shape: TypeAlias = Mapping[str, Any] | list[Any] | type[str]

EVERY = "*"
RESOURCES: Shape = {"limits": {}, "requests": {}}
CONTAINER: Shape = {"command": [str], "args": [str], "resources": RESOURCES}
_TERM: Shape = {"matchExpressions": [{"values": [str]}]}
POD: Shape = {
    "containers": [CONTAINER],
    "nodeSelector": {EVERY: str},
    "tolerations": [{}],
    "priorityClassName": str,
    "schedulerName": str,
    "resourceClaims": [{"name": str, "resourceClaimName": str, "resourceClaimTemplateName": str}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]}}},
}


def require_shape(value: object, shape: Shape, path: Path) -> None:
    """Raise SpecError if a value does not have the expected shape. None is accepted except as an item of a list.

    Args:
        value: the value.
        shape: the expected shape.
        path: path of the value in the document, for the message.

    Raises:
        SpecError: the value has another shape.
    """
    if value is None:
        return
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise _make_shape_error(value, path, "a list")
        for index, item in enumerate(value):
            if item is None:
                raise _make_shape_error(item, (*path, index), _describe_shape(shape[0]))
            require_shape(item, shape[0], (*path, index))
    elif isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            raise _make_shape_error(value, path, "a mapping")
        for key, inner in value.items():
            if (inner_shape := shape.get(EVERY, shape.get(key))) is not None:
                require_shape(inner, inner_shape, (*path, key))
    elif not isinstance(value, shape):
        raise _make_shape_error(value, path, "text")


def read_count_at(document: object, path: Path, default: int = 1) -> int:
    """Return the whole number at a path of a document, or `default` if there is no value.

    Raises:
        SpecError: the value is not a whole number up to `MAX_COUNT`.
    """
    value = value_at_path(document, path)
    if value is None:
        return default
    number = None if isinstance(value, bool) else parse_count(value)
    if number is None or number > MAX_COUNT:
        raise SpecError(
            format_path(path), f"{format_value(value)} is no number of pods", f"write a whole number up to {MAX_COUNT}"
        )
    return number


def format_path(path: Path) -> str:
    """Return a path as text for messages, such as `spec.containers[0].name`."""
    first, *rest = path
    return str(first) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)


def _describe_shape(shape: Shape) -> str:
    return "a list" if isinstance(shape, list) else "a mapping" if isinstance(shape, Mapping) else "text"


def _make_shape_error(value: object, path: Path, kind: str) -> SpecError:
    remedy = "write it in quotes" if kind == "text" else f"write {kind}, or leave it out"
    return SpecError(format_path(path), f"{format_value(value)} is not {kind}", remedy)
