"""Read fields of documents by path. Missing fields and fields of another type raise no error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Document: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str | int, ...]
"""Keys of mappings and positions in lists, from the outside in."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """Path of a field in a document, and the field's new value."""

    path: Path
    value: Any


def value_at_path(document: Any, path: Path) -> Any:
    """Return the value at a path; None if the document has none."""
    for part in path:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def as_mapping(value: object) -> Document:
    """Return the value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def mappings_in(value: object) -> list[Document]:
    """Return the mappings in a list; an empty list if the value is no list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
