"""`metrics.csv` of Lightning's CSVLogger, and other CSV files with a step number and a time in each row."""

import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tilecast.logs.metrics import STEP_METRICS, STEP_NUMBERS, MetricRow, find_metric_run, list_clock_metrics
from tilecast.logs.steps import MAX_STEPS, LoggedRun
from tilecast.logs.text import iterate_lines
from tilecast.spec import SpecError

NAME = "Lightning CSV"


def recognise(path: Path, head: bytes) -> bool:
    """Return whether a file has the name of a CSV file, and column titles in its first line."""
    return path.suffix == ".csv" and b"," in head.split(b"\n")[0]


def read(path: Path) -> LoggedRun | None:
    """Return the run, or None if there are too few steps.

    Raises:
        SpecError: no column contains step numbers, or no column contains times.
    """
    lines = iterate_lines(path)
    columns = next(csv.reader([next(lines, "").removeprefix("\ufeff")]), [])
    times = [*list_clock_metrics(columns), *(name for name in STEP_METRICS if name in columns)]
    numbers = [name for name in STEP_NUMBERS if name in columns]
    for found, noun in ((numbers, "step number"), (times, "time of a step")):
        if not found:
            problem = f"has no column with a {noun}"
            raise SpecError(str(path), problem, "log step_time (seconds) or ThroughputMonitor, or give the seconds")
    return find_metric_run(list(islice(_iterate_rows(lines, columns), MAX_STEPS)), NAME)


def _iterate_rows(lines: Iterator[str], columns: list[str]) -> Iterator[MetricRow]:
    for line in lines:
        try:
            (cells,) = csv.reader([line])
        except (csv.Error, ValueError):
            continue
        values = {
            name: number
            for name, cell in zip(columns, cells, strict=False)
            if (number := _parse_number(cell)) == number
        }
        step = next((int(values[name]) for name in STEP_NUMBERS if name in values), None)
        yield MetricRow(step, None, values)


def _parse_number(cell: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        return float("nan")
    return number if abs(number) < 1e15 else float("nan")
