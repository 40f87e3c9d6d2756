"""Comparison of forecasts with the user's own measured training runs, from CSV tables.

`reading` turns a row into a workload and a pool, `runs` forecasts rows, and `scores` computes errors. `calibration` and
`transfer` measure how much runs improve forecasts of other runs. The package `tilecast-lab` reads published tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

Track: TypeAlias = Callable[[Sequence[Any], str], Iterable[Any]]
"""Function that yields the items of a sequence and may show progress; the text names the items."""


def without_progress(items: Sequence[Any], label: str) -> Iterable[Any]:
    """Return `items` unchanged. It is a `Track` that shows no progress."""
    return items
