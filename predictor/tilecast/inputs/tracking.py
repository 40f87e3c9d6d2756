"""Functions that show the progress of a long computation while they yield the items of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

Track: TypeAlias = Callable[[Sequence[Any], str], Iterable[Any]]
"""Function that yields the items of a sequence and may show progress. Its second argument says what the items are."""


def iterate_without_progress(items: Sequence[Any], label: str) -> Iterable[Any]:
    """Return `items` unchanged. It is a `Track` that shows no progress."""
    return items
