"""Read numbers from cells of runs tables, and list the reasons why a row cannot be forecast."""

from __future__ import annotations

from collections.abc import Mapping

Row = Mapping[str, str]

REASONS: Mapping[str, str] = {
    "unknown-gpu": "the GPU is not among the hardware files",
    "unknown-model": "the model name is no preset, and columns of dimensions need the laboratory (`pip install ./lab`)",
    "unknown-precision": "the precision is not one that can be priced",
    "precision-not-supported": "the GPU has no units for the precision",
    "no-batch": "neither a global batch nor a batch per GPU is stated",
    "no-sequence": "a model over sequences states no sequence length",
    "no-gpus": "the number of GPUs is not stated",
    "impossible-plan": "the stated degrees do not multiply to the GPUs, or contradict the batch or the layers",
    "impossible-size": "a dimension or a rate is outside what any kernel has",
    "no-plan": "no plan fits what is stated",
}
"""Reasons why a row is not forecast, by code."""


class UnreadableRow(Exception):  # noqa: N818  (an outcome of a row, not a failure)
    """Error that a row cannot be turned into a workload and a plan. `code` is a key of `REASONS`."""

    def __init__(self, code: str) -> None:
        super().__init__(REASONS[code])
        self.code = code


def read_integer(row: Row, column: str) -> int | None:
    """Return the whole number from 0 to 2^40 in a column. If the cell holds no such number, return None."""
    number = read_number(row, column)
    return int(number) if number is not None and number == int(number) else None


def read_number(row: Row, column: str) -> float | None:
    """Return the number from 0 to 2^40 in a column. If the cell holds no such number, return None."""
    try:
        number = float(row.get(column, "") or "nan")
    except ValueError:
        return None
    return number if 0 <= number < 2**40 else None
