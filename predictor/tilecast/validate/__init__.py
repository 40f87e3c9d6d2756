"""Comparison of forecasts with measured training runs of one's own, from a CSV table.

`reading` turns a row into a workload and a pool, `runs` forecasts the rows, `scores` judges the forecasts,
`calibration` and `transfer` judge what measured runs teach about others. Published tables are read by `tilecast-lab`,
a distribution of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

Track: TypeAlias = Callable[[Sequence[Any], str], Iterable[Any]]
"""Function that yields the items of a sequence and may show progress; the text names the items."""


def without_progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Return `items` without showing progress."""
    return items
