"""Runs in MLflow's SQLite database, `mlflow.db`, which MLflow 3.18 writes by default."""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tilecast.logs.arguments import RunFacts
from tilecast.logs.formats.mlflow import MAX_METRICS, MAX_POINTS
from tilecast.logs.metrics import MetricRow, find_metric_run
from tilecast.logs.steps import MAX_STEPS, LoggedRun
from tilecast.spec import SpecError

if TYPE_CHECKING:
    from sqlite3 import Connection

NAME = "MLflow database"
PATTERN = "mlflow.db"
MAGIC = b"SQLite format 3\0"
MAX_VALUE = 2**20
"""Longest value of a cell, in bytes. A longer one is an error."""
MAX_PARAMS = 10_000
"""Most parameters of a run that are read."""
MAX_INSTRUCTIONS = 10**9
"""Most instructions of SQLite's virtual machine that a database may take, so that no schema keeps it busy."""
_CHUNK = 100_000
_TABLES = "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name IN ('metrics', 'params')"
_RUNS = "SELECT DISTINCT run_uuid FROM metrics WHERE key NOT LIKE 'system/%' ORDER BY run_uuid"
_KEYS = "SELECT DISTINCT key FROM metrics WHERE run_uuid = ? AND key NOT LIKE 'system/%' ORDER BY key LIMIT ?"
_POINTS = "SELECT timestamp, step, value FROM metrics WHERE run_uuid = ? AND key = ? AND is_nan = 0 LIMIT ?"
_PARAMS = "SELECT key, value FROM params WHERE run_uuid = ? LIMIT ?"


def recognise(path: Path, head: bytes) -> bool:
    """Return whether a file begins like an SQLite database."""
    return head.startswith(MAGIC)


def read(path: Path, run: str = "") -> LoggedRun | None:
    """Return the run, or None if it has too few steps. The database is only read, and no view or function of it runs.

    Args:
        path: the database.
        run: ID of the run. It may be empty if the database has a single run with metrics.

    Raises:
        SpecError: the database cannot be read, is none of MLflow, or does not have the run or has several.
    """
    import sqlite3  # the operator reads logs of pods too, and needs no database

    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1.0)
        try:
            return _read_run(connection, path, run)
        finally:
            connection.close()
    except (sqlite3.Error, OverflowError) as error:
        raise SpecError(
            str(path), "cannot be read as a database of MLflow", " ".join(str(error).split())[:200]
        ) from None


def _read_run(connection: Connection, path: Path, run: str) -> LoggedRun | None:
    from sqlite3 import SQLITE_LIMIT_LENGTH

    turns = count(1)
    connection.set_progress_handler(lambda: next(turns) > MAX_INSTRUCTIONS // _CHUNK, _CHUNK)
    connection.setlimit(SQLITE_LIMIT_LENGTH, MAX_VALUE)
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    connection.execute("PRAGMA trusted_schema = OFF")
    if connection.execute(_TABLES).fetchone()[0] != 2:
        raise SpecError(str(path), "is an SQLite database without the metrics of MLflow", "name the one of MLflow")
    # Errors name runs, on one line.
    known = [name for (name,) in connection.execute(_RUNS) if isinstance(name, str) and name.isprintable()]
    if not run and len(known) > 1:
        raise SpecError(str(path), f"has {len(known)} runs", f"name one of them, for instance {path}/{known[-1][:64]}")
    if run and run not in known:
        remedy = f"name one of its runs, for instance {path}/{known[-1][:64]}" if known else "name another log"
        raise SpecError(f"{path}/{run}", "is no run with metrics in this database", remedy)
    chosen = run or "".join(known)
    points: dict[tuple[float, int], dict[str, float]] = defaultdict(dict)
    keys = [key for (key,) in connection.execute(_KEYS, (chosen, MAX_METRICS)) if isinstance(key, str)]
    for key in keys:
        for stamp, step, value in connection.execute(_POINTS, (chosen, key, MAX_POINTS // len(keys))):
            # A column of SQLite holds values of any type.
            if isinstance(stamp, int) and isinstance(step, int) and isinstance(value, int | float):
                points[stamp / 1e3, step][key] = float(value)
    rows = [MetricRow(step, time, values) for (time, step), values in sorted(points.items())[:MAX_STEPS]]
    facts = RunFacts()
    for key, value in connection.execute(_PARAMS, (chosen, MAX_PARAMS)):
        if isinstance(key, str):
            facts.add_argument(key, value)
    found = find_metric_run(rows, NAME)
    return found and LoggedRun(found.seconds, found.steps, NAME, facts.gpus, facts.gpu, facts.plan)
