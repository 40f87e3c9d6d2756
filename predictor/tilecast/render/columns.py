"""Rows of text under titles, as wide as they need to be."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence


def columns(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Lines of a table; columns that nothing fills are left out, those named in `right` are set flush right."""
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


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV, a line each."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
