"""Forecasts held against measurements: training runs (`runs`) and kernels (`kernels`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

Track: TypeAlias = Callable[[Sequence[Any], str], Iterable[Any]]
"""Hands items on one after the other and may show how far it is; the text says what they are."""


def untracked(items: Sequence[Any], what: str) -> Iterable[Any]:
    """The items, nothing shown."""
    return items
