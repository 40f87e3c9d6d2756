"""Reading of measured CSV tables, plain or gzipped, and writing of the same tables with forecasts added."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tilecast.spec import Floats, SpecError

ADDED = ("predicted_us", "lower_us", "upper_us", "reason")


def find_tables(data: Path, pattern: str) -> list[Path]:
    """Return the tables below a folder whose paths match a pattern, sorted by path.

    Raises:
        SpecError: there is none.
    """
    paths = sorted(data.glob(pattern))
    if not paths:
        raise SpecError(str(data), f"has no {pattern}", "give the folder of the measured tables")
    return paths


def read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table; short rows are filled with empty cells.

    Raises:
        SpecError: the file cannot be read or is not CSV.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
        lines = list(csv.reader(io.StringIO(text)))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(str(path), f"cannot be read as CSV ({error})", "give a CSV file, plain or gzipped") from None
    header = lines[0] if lines else []
    return header, [line + [""] * (len(header) - len(line)) for line in lines[1:] if line]


Forecasts = tuple[Floats, Floats, Floats, Sequence[str]]
"""Columns over the rows: seconds, lower and upper end of the 90 % range (NaN where there is a reason), and reason."""


def write_csv(path: Path, tables: Iterable[tuple[list[str], list[list[str]], Forecasts]]) -> None:
    """Write every row of the tables in order, followed by the columns `ADDED`.

    Several tables share the union of their columns. Times are written in microseconds.

    Raises:
        SpecError: the file cannot be written.
    """
    entries = list(tables)
    header = list(dict.fromkeys(name for names, _, _ in entries for name in names))
    try:
        with path.open("w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow([*header, *ADDED])
            for names, rows, (*times, reason) in entries:
                place = [names.index(name) if name in names else None for name in header]
                for i, cells in enumerate(rows):
                    shown = ["" if np.isnan(column[i]) else f"{column[i] * 1e6:.4f}" for column in times]
                    writer.writerow(["" if j is None else cells[j] for j in place] + [*shown, reason[i]])
    except OSError as error:
        raise SpecError(str(path), "cannot be written", str(error.strerror or error)) from None
