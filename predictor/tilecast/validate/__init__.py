"""Comparison of forecasts with measurements: training runs, memory peaks, kernels and collectives.

Each command of `tilecast validate` has its module here. Read `runs` first, which forecasts a table of measured training
runs; `kernels` and `collectives` do the same for tables of single kernels and of collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

Track: TypeAlias = Callable[[Sequence[Any], str], Iterable[Any]]
"""Function that yields the items of a sequence and may show progress; the text names the items."""


def untracked(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Return `items` without showing progress."""
    return items
