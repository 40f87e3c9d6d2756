"""Fields of documents by path, in whatever shape a document comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Document: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str | int, ...]
"""Keys of mappings and positions in lists, from the outside in."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field of a document and the whole value that it shall have."""

    path: Path
    value: Any


def value_at(document: Any, path: Path) -> Any:
    """The value at a path; None where the document has none."""
    for part in path:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def mapping(value: object) -> Document:
    """The same, or an empty one where it is no mapping."""
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> list[Document]:
    """The mappings of a list; none where it is no list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
