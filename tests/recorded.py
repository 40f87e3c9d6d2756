"""Recordings of a running operator, as `bench/record_metrics.py` makes them, and tests of promtool over them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

FOLDER = Path(__file__).parent / "recorded"
KINDS = ("idle", "busy")
_RUN = re.compile(r"(.+)x(\d+)")
_SERIES = re.compile(r"(\w+)\{(.*)\}")
_COUNTER = re.compile(r"_(total|count|sum|bucket)\{")
_TIMESTAMP = re.compile(r"_timestamp_seconds\{")
ABSENT = "_"
STALE = "stale"


@dataclass(frozen=True, slots=True)
class Recording:
    """Metrics scraped once a minute: values by series, `_` where there was none."""

    began_s: float
    """Unix time of the first scrape, which is time zero for promtool."""
    columns: Mapping[str, Sequence[str]]

    @property
    def minutes(self) -> int:
        """Number of scrapes."""
        return len(next(iter(self.columns.values())))

    def names(self) -> set[str]:
        """Return the names of metrics."""
        return {name.partition("{")[0] for name in self.columns}

    def shapes(self) -> set[tuple[str, frozenset[str]]]:
        """Return the names of metrics with the names of their labels."""
        return {(name.partition("{")[0], frozenset(labels(name))) for name in self.columns}

    def only(self, names: set[str]) -> Recording:
        """Return the series of some metrics."""
        return replace(self, columns={name: c for name, c in self.columns.items() if name.partition("{")[0] in names})

    def moving(self) -> set[str]:
        """Return the names of the counters that grew."""
        moved = (name for name, column in self.columns.items() if _COUNTER.search(name) and grown(column) > 0)
        return {name.partition("{")[0] for name in moved}

    def repeated(self, times: int) -> Recording:
        """Return the recording repeated that many times in a row.

        Counters continue, gauges repeat, and timestamps keep their age.
        """
        columns = {name: _repeated(name, column, times, self.minutes) for name, column in self.columns.items()}
        return replace(self, columns=columns)

    def on_promtools_clock(self) -> Recording:
        """Return the recording with timestamps that count from its first scrape."""

        def moved(value: str) -> str:
            return value if value == ABSENT else f"{float(value) - self.began_s:.12g}"

        return replace(
            self,
            columns={
                name: [moved(value) for value in column] if _TIMESTAMP.search(name) else column
                for name, column in self.columns.items()
            },
        )


def labels(name: str) -> dict[str, str]:
    """Return the labels in the name of a series."""
    return dict(re.findall(r'(\w+)="([^"]*)"', name))


def load(path: Path) -> Recording:
    """Read the recording in a file."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    columns = {name: _expanded(text) for name, text in document["series"].items()}
    return Recording(document["began"], columns)


def grown(column: Sequence[str]) -> float:
    """Return by how much a counter grew; one that appeared grew from nothing."""
    values = [0.0 if value == ABSENT else float(value) for value in column]
    return values[-1] - values[0]


def _expanded(text: str) -> list[str]:
    """Return the values of promtool's notation, where `VALUExTIMES` is a value followed by TIMES copies."""
    column: list[str] = []
    for word in text.split():
        match = _RUN.fullmatch(word)
        column += [match[1]] * (int(match[2]) + 1) if match else [word]
    return column


def _repeated(name: str, column: Sequence[str], times: int, minutes: int) -> list[str]:
    if _TIMESTAMP.search(name):
        step = 60.0 * minutes
    elif _COUNTER.search(name):
        step = grown(column)
    else:
        step = 0.0
    known = next((value for value in column if value != ABSENT), ABSENT)
    values, result = list(column), list[str]()
    for turn in range(times):
        result += [value if value == ABSENT else f"{float(value) + turn * step:.12g}" for value in values]
        # A series that appears in the first repetition exists in the later ones from their start.
        values = ["0" if value == ABSENT and _COUNTER.search(name) else value for value in values]
        values = [known if value == ABSENT else value for value in values]
    return result


Change: TypeAlias = Callable[[dict[str, list[str]], int], None]
"""Function that changes the columns of all series from a given minute on."""


def replaced(series: str, value: Callable[[int], float]) -> Change:
    """Return a change that sets a gauge to a function of the minutes since the change began; the gauge may be new."""

    def change(columns: dict[str, list[str]], begin: int) -> None:
        column = columns.setdefault(series, [ABSENT] * len(next(iter(columns.values()))))
        column[begin:] = [f"{value(minute):.12g}" for minute in range(len(column) - begin)]

    return change


def everywhere(series: str, value: float) -> Change:
    """Return a change that sets a gauge to one value from the first scrape on."""

    def change(columns: dict[str, list[str]], begin: int) -> None:
        columns[series] = [f"{value:.12g}"] * len(columns[series])

    return change


def added(pattern: str, per_minute: float) -> Change:
    """Return a change that makes the counters whose series match `pattern` grow faster."""

    def change(columns: dict[str, list[str]], begin: int) -> None:
        names = [name for name in columns if re.search(pattern, name)]
        assert names, pattern
        for name in names:
            column = columns[name]
            column[begin:] = [
                f"{(0.0 if value == ABSENT else float(value)) + per_minute * minute:.12g}"
                for minute, value in enumerate(column[begin:])
            ]

    return change


def frozen(pattern: str) -> Change:
    """Return a change that freezes the series that match `pattern`."""

    def change(columns: dict[str, list[str]], begin: int) -> None:
        names = [name for name in columns if re.search(pattern, name)]
        assert names, pattern
        for name in names:
            columns[name][begin:] = [columns[name][begin]] * (len(columns[name]) - begin)

    return change


def silent(is_there: Callable[[int], bool]) -> Change:
    """Return a change after which an operator is scraped only in some minutes."""

    def change(columns: dict[str, list[str]], begin: int) -> None:
        for column in columns.values():
            for minute in range(begin, len(column)):
                if not is_there(minute - begin):
                    column[minute] = STALE if column[minute - 1] not in (STALE, ABSENT) else ABSENT

    return change


def both(*changes: Change) -> Change:
    """Return a change that applies these changes in order."""

    def change(columns: dict[str, list[str]], begin: int) -> None:
        for each in changes:
            each(columns, begin)

    return change


def promtool_test(
    name: str,
    recording: Recording,
    alerts: Collection[tuple[str, str]],
    others: Mapping[str, str],
    target: Mapping[str, str],
) -> dict[str, Any]:
    """Return a test of promtool in which exactly these alerts fire, at any time.

    Args:
        name: of the test.
        recording: the scraped metrics.
        alerts: their names and severities.
        others: series of other exporters, in promtool's notation.
        target: labels that Prometheus adds to the targets that it scrapes.
    """
    text = ",".join(f'{key}="{value}"' for key, value in target.items())
    columns = [
        {"series": _labelled(series, text), "values": " ".join(column)} for series, column in recording.columns.items()
    ] + [{"series": series, "values": values} for series, values in others.items()]
    fired = f'group by (alertname, severity) (count_over_time(ALERTS{{alertstate="firing"}}[{recording.minutes}m]))'
    samples = [
        {"labels": f'{{alertname="{alert}", severity="{severity}"}}', "value": 1} for alert, severity in sorted(alerts)
    ]
    query = {"expr": fired, "eval_time": f"{recording.minutes - 1}m", "exp_samples": samples}
    return {"name": name, "interval": "1m", "input_series": columns, "promql_expr_test": [query]}


def _labelled(series: str, text: str) -> str:
    match = _SERIES.fullmatch(series)
    assert match is not None, series
    return f"{match[1]}{{{','.join(filter(None, (match[2], text)))}}}"
