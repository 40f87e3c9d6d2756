"""Cells of tables of measured runs, and why a row is not predicted."""

from __future__ import annotations

import re
from collections.abc import Mapping

Row = Mapping[str, str]

REASONS: Mapping[str, str] = {
    "unknown-gpu": "the GPU is not among the hardware files",
    "unknown-model": "the row states no complete dimensions and its model name is no preset",
    "unknown-precision": "the precision is not one that can be priced",
    "precision-not-supported": "the GPU has no units for the precision",
    "no-batch": "neither a global batch nor a batch per GPU is stated",
    "no-sequence": "a model over sequences states no sequence length",
    "no-gpus": "the number of GPUs is not stated",
    "impossible-plan": "the stated degrees do not multiply to the GPUs, or contradict the batch or the layers",
    "impossible-size": "a dimension or a rate is outside what any kernel has",
    "no-plan": "no plan fits what is stated",
}
"""Every reason for which a row is not predicted."""


class UnreadRow(Exception):  # noqa: N818  (an outcome of a row, not a failure)
    """A row that cannot be expressed; `code` is a key of `REASONS`."""

    def __init__(self, code: str) -> None:
        super().__init__(REASONS[code])
        self.code = code


def integer(row: Row, column: str) -> int | None:
    """A whole number from 0 to 2^40; None where the column holds none."""
    number = real(row, column)
    return int(number) if number is not None and number == int(number) else None


def real(row: Row, column: str) -> float | None:
    """A number from 0 to 2^40; None where the column holds none."""
    try:
        number = float(row.get(column, "") or "nan")
    except ValueError:
        return None
    return number if 0 <= number < 2**40 else None


def noted(pattern: str, notes: str) -> int | None:
    """The whole number that a pattern finds in the notes, at most six digits of it."""
    match = re.search(pattern, notes)
    return int(match[1]) if match and len(match[1]) <= 6 else None
