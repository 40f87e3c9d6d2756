"""Format rows as an aligned text table or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence


def align_columns(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Return the lines of an aligned text table. Columns that are empty in all rows are left out.

    Args:
        titles: titles of the columns.
        rows: cells of each row, as text.
        right: titles of the columns to align to the right.
    """
    shown = [place for place in range(len(titles)) if not rows or any(row[place] for row in rows)]
    cells = [[str(row[place]) for place in shown] for row in (titles, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(shown))]
    flush = [titles[place] in right for place in shown]
    return [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, flush, strict=True)
        ).rstrip()
        for row in cells
    ]


def format_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return the rows as CSV text with one line per row."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
