"""Read fields of documents by path, without errors for missing fields or unexpected types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Document: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str | int, ...]
"""Keys of mappings and positions in lists, from the outside in."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A change of a document: the path of a field, and its new value."""

    path: Path
    value: Any


def value_at_path(document: Any, path: Path) -> Any:
    """Return the value at a path in a document, or None if the path does not exist."""
    for part in path:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def as_mapping(value: object) -> Document:
    """Return the value if it is a mapping, otherwise an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def list_mappings_in(value: object) -> list[Document]:
    """Return those items of a list that are mappings. If the value is not a list, return an empty list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
