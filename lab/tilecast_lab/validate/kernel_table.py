"""Measured table of kernels, and the builder that turns its rows into a `KernelTable`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilecast import kernels
from tilecast.graph import KernelTable
from tilecast.spec import ELEMENT_BYTES, PRECISIONS, Floats, Ints
from tilecast_lab.validate.harness import Harness

Columns = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class MeasuredKernels:
    """Measured table of R rows as K kernels; kernel `i` belongs to row `owner[i]`.

    Rows with the same `group` are held out of a fit together ("n,k" of a GEMM; batch, heads and queries of attention).
    """

    path: Path
    header: list[str]
    cells: list[list[str]]
    op: list[str]
    precision: list[str]
    gpu: list[str]
    latency_s: Floats
    harness: list[Harness]
    group: list[str]
    variant: list[str]
    reason: list[str]
    kernels: KernelTable
    owner: Ints

    def __len__(self) -> int:
        return len(self.cells)

    def fold(self) -> Ints:
        """Return which of five folds the group of each row falls into, (R,)."""
        return np.array([zlib.crc32(text.encode()) % 5 for text in self.group], np.int64)


@dataclass(slots=True)
class Builder:
    """Rows of a table while a reader turns them into kernels."""

    columns: Columns
    rows: int
    harness: str = ""
    op: list[str] = field(init=False)
    precision: list[str] = field(init=False)
    group: list[str] = field(init=False)
    variant: list[str] = field(init=False)
    reason: list[str] = field(init=False)
    tables: list[KernelTable] = field(default_factory=list)
    owners: list[Ints] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("op", "precision", "group", "variant", "reason"):
            setattr(self, name, [""] * self.rows)

    def number(self, name: str, default: float = np.nan) -> Floats:
        """Return a column as numbers; an empty cell or an absent column becomes `default`, other text NaN."""

        def read(text: str) -> float:
            try:
                return float(text) if text else default
            except ValueError:
                return np.nan

        if name not in self.columns:
            return np.full(self.rows, default)
        return np.array([read(text) for text in self.columns[name]])

    def text(self, name: str) -> np.ndarray:
        """Return a column as strings; an absent column is empty strings."""
        return np.array(self.columns.get(name, [""] * self.rows), dtype=object)

    def grouped(self, *names: str) -> None:
        """Set the group of each row: rows with the same values in these columns are held out together."""
        self.group = [",".join(cells) for cells in zip(*(self.text(name) for name in names), strict=True)]

    def varied(self, name: str) -> None:
        """Take the variant of each row from the column that says which of several kernels ran."""
        self.variant = [str(text) for text in self.text(name)]

    def refuse(self, rows: np.ndarray, reason: str) -> None:
        """Set the reason of the rows in a mask, unless they have one already."""
        for row in np.flatnonzero(rows):
            self.reason[row] = self.reason[row] or reason

    def add(self, chosen_rows: np.ndarray, kind: str, precision: str, /, **dims: npt.ArrayLike) -> None:
        """Add a kernel for each row in a mask.

        Each dimension is a scalar or a column over all rows of the table. Rows with a dimension that is not finite or
        out of range are refused as "bad-number".
        """
        where = np.flatnonzero(chosen_rows)
        chosen = {name: np.broadcast_to(np.asarray(value, float), self.rows)[where] for name, value in dims.items()}
        sound = np.ones(len(where), bool)
        for name, column in chosen.items():
            low = 0.0 if name in kernels.FLAGS else 1.0
            sound &= np.isfinite(column) & (column >= low) & (column <= kernels.LARGEST)
        self.refuse(np.isin(np.arange(self.rows), where[~sound]), "bad-number")
        if sound.any():
            self.tables.append(
                KernelTable.from_dimensions(kind, precision, **{name: c[sound] for name, c in chosen.items()})
            )
            self.owners.append(where[sound])


def each_precision(b: Builder, aliases: Mapping[str, str] | None = None) -> list[tuple[str, np.ndarray]]:
    """Return each precision of the table with the mask of its rows; refuse rows of an unknown dtype.

    Also sets the precision of the builder's rows. `aliases` maps other dtypes to precisions.
    """
    text = b.text("dtype")
    named = np.array([(aliases or {}).get(value, value) for value in text], dtype=object)
    b.precision = [str(value) for value in named]
    b.refuse(~np.isin(named, PRECISIONS), "unknown-precision")
    return [(name, named == name) for name in PRECISIONS if (named == name).any()]


def add_copy_kernels(b: Builder, rows: np.ndarray, precision: str, elements: Floats) -> None:
    """Add a copy kernel of `elements` elements for each row in a mask."""
    size = ELEMENT_BYTES[precision]
    b.add(rows, "elementwise", precision, elements=elements, read_bytes=size, written_bytes=size)
