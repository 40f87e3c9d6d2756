"""Compare today's forecasts of all measured training steps with the forecasts that are committed.

    python -m tilecast_lab reprice --data DIR            # which forecasts moved, by source
    python -m tilecast_lab reprice --data DIR --write    # accept them: write `forecasts.csv`

`forecasts.csv` has a digest of each row and its forecast, and nothing of the measurement. A change of a formula or a
constant that moves any forecast is therefore seen, whichever table it was made for.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilecast.validate import Track, iterate_without_progress
from tilecast.validate.cells import Row
from tilecast.validate.runs import read_table
from tilecast.validate.scores import absolute_errors, read_measured_seconds
from tilecast_lab.validate.csvfile import find_tables
from tilecast_lab.validate.graphs import Graphs
from tilecast_lab.validate.residuals import source_of
from tilecast_lab.validate.runs import forecast

COMMITTED = Path(__file__).with_name("forecasts.csv")
TABLES = "**/e2e/*.csv"
"""Pattern of the tables of training steps below the data folder."""
MEASURED = Path(__file__).parents[1] / "measured"
"""Folder of the tables that were measured for this project, which are always compared."""
TOLERANCE = 1e-3
"""Relative change from which a forecast counts as moved; the file has five digits."""


@dataclass(frozen=True, slots=True)
class RepricedRow:
    """Forecasts of one row: committed and of today, in seconds; None where the row is new or refused."""

    source: str
    measured_s: float | None
    before_s: float | None
    after_s: float | None

    @property
    def is_moved(self) -> bool:
        """Whether the forecast changed, appeared or went."""
        if self.before_s is None or self.after_s is None:
            return self.before_s is not self.after_s
        return abs(self.after_s / self.before_s - 1) > TOLERANCE


def digest(row: Row) -> str:
    """Return the digest of a row's cells, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def read_rows(data: Path | None = None) -> list[Row]:
    """Return the rows of the project's own tables, and of all tables of training steps below a folder.

    Raises:
        SpecError: the folder has no table, or a table cannot be read.
    """
    found = [] if data is None else find_tables(data, TABLES)
    return [row for path in (*sorted(MEASURED.glob("*.csv")), *found) for row in read_table(path)]


def read_committed(path: Path) -> dict[str, float | None]:
    """Return the committed forecasts in seconds by digest, or None for refused rows."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as handle:
        return {line["row"]: float(line["seconds"]) if line["seconds"] else None for line in csv.DictReader(handle)}


def write_committed(path: Path, forecasts: Mapping[str, float | None]) -> None:
    """Write forecasts by digest, sorted by digest."""
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(("row", "seconds"))
        for row, seconds in sorted(forecasts.items()):
            writer.writerow((row, "" if seconds is None else f"{seconds:.5g}"))


def reprice(
    rows: Sequence[Row],
    committed: Mapping[str, float | None],
    graphs: Graphs | None = None,
    track: Track = iterate_without_progress,
) -> dict[str, RepricedRow]:
    """Forecast rows, and return committed forecasts and those of today.

    Returns:
        Forecasts by the digest of the row; with `graphs`, also those of rows priced from a traced graph, whose keys end
        in `-graph`.
    """
    repriced = _reprice(rows, committed, None, track)
    if graphs is not None:
        repriced |= _reprice([row for row in rows if graphs.model(row)], committed, graphs, track)
    return repriced


def _reprice(
    rows: Sequence[Row], committed: Mapping[str, float | None], graphs: Graphs | None, track: Track
) -> dict[str, RepricedRow]:
    repriced = {}
    for row, item in zip(rows, forecast(rows, track, graphs), strict=True):
        key = digest(row) + ("-graph" if graphs else "")
        repriced[key] = RepricedRow(source_of(row), read_measured_seconds(row), committed.get(key), item.seconds)
    return repriced


def table(repriced: Mapping[str, RepricedRow]) -> str:
    """Return the moved forecasts by source as text: how many, how far, and the median error before and after."""
    groups: dict[str, list[RepricedRow]] = defaultdict(list)
    for item in repriced.values():
        groups[item.source].append(item)
    lines = [f"{'source':<44}{'rows':>6}{'moved':>7}{'median':>9}{'largest':>9}{'error before':>14}{'after':>8}"]
    for source, items in sorted(groups.items()):
        moved = [item for item in items if item.is_moved]
        if not moved:
            continue
        change = np.array([item.after_s / item.before_s - 1 for item in moved if item.after_s and item.before_s])
        largest = float(change[np.argmax(np.abs(change))]) if len(change) else float("nan")
        middle = float(np.median(change)) if len(change) else float("nan")
        before = _median_error([(item.before_s, item.measured_s) for item in items])
        after = _median_error([(item.after_s, item.measured_s) for item in items])
        lines.append(
            f"{source[:43]:<44}{len(items):>6}{len(moved):>7}{middle:>+9.1%}{largest:>+9.1%}{before:>14.1%}{after:>8.1%}"
        )
    count = sum(item.is_moved for item in repriced.values())
    lines.append(f"{count} of {len(repriced)} forecasts moved by more than {TOLERANCE:.1%}, appeared or went")
    return "\n".join(lines)


def _median_error(pairs: Sequence[tuple[float | None, float | None]]) -> float:
    """Return the median of |forecast - measured| / measured over the pairs that have both."""
    both = np.array([(seconds, measured) for seconds, measured in pairs if seconds and measured]).reshape(-1, 2)
    return float(np.median(absolute_errors(*both.T))) if len(both) else float("nan")


def run(
    data: Path, *, write: bool, graphs: Graphs | None = None, track: Track = iterate_without_progress
) -> tuple[str, bool]:
    """Compare all forecasts with the committed ones, and accept them with `write`.

    Returns:
        The table as text, and whether any forecast moved.

    Raises:
        SpecError: a table or a graph cannot be read.
    """
    committed = read_committed(COMMITTED)
    repriced = reprice(read_rows(data), committed, graphs, track)
    if write:
        write_committed(COMMITTED, {**committed, **{key: item.after_s for key, item in repriced.items()}})
    return table(repriced), any(item.is_moved for item in repriced.values())
