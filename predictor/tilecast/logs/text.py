"""Read steps from the lines of a text log, in one pass and within bounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tilecast.logs.arguments import RunFacts
from tilecast.logs.steps import LoggedRun, StepSeries, find_median

MAX_LINE = 4096
"""Most characters of a line that are read."""
CHUNK = 1 << 20
MAX_SERIES = 64
"""Most progress bars, told apart by their length, that are tracked."""
_UNITS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0, "s/it": 1.0, "it/s": -1.0}
"""Seconds per unit, or -1 for a rate."""

TIME = r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)"
NUMBER = r"(?P<seconds>\d{1,12}(?:\.\d{1,15})?(?:[eE]-?\d{1,2})?)"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PAUSE = re.compile(
    r"\b(?:validation|validat(?:e|ing)|evaluat(?:e|ion|ing)|eval(?:_\w+)?|val loss|"
    r"(?:sav(?:e|ed|ing)|writ(?:e|ing|ten))\b.{0,40}\bcheckpoint|checkpoint\b.{0,40}\b(?:saved|saving|written))",
    re.ASCII | re.IGNORECASE,
)
_PAUSE_WORDS = ("val", "checkpoint")


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Patterns of the lines in which a training program logs its steps.

    Each pattern has a group `step` (a number), and a group `seconds` (duration) or `time` (when the line was written).
    An optional group `unit` matches a key of `_UNITS`. The field `unit` applies to patterns without that group. An
    optional group `series` tells progress bars apart: the one that ran longest is used.
    """

    name: str
    patterns: Sequence[re.Pattern[str]]
    word: str
    """Text that every line with a step contains. It is tested first, because that is fast."""
    unit: str = "s"
    argument: re.Pattern[str] | None = None
    """Pattern of a line with a program argument, with groups `name` and `value`."""
    facts: Sequence[re.Pattern[str]] = ()
    """Patterns with groups named `gpus`, `gpu` or like a plan column."""
    read_facts: Callable[[str], Mapping[str, object]] | None = None
    """Function that returns such values from a line, by name."""


def _make_series_table() -> dict[tuple[bool, str], StepSeries]:
    return {}


@dataclass(slots=True)
class _FormatReader:
    """Reader of one text format, with the steps found so far."""

    format: TextFormat
    facts: RunFacts = field(default_factory=RunFacts)
    series: dict[tuple[bool, str], StepSeries] = field(default_factory=_make_series_table)
    is_paused: bool = False

    def read_line(self, line: str) -> None:
        """Record the step in a line, if it has one. Before the first step, record what the line says about the run."""
        if self.format.word in line:
            for pattern in self.format.patterns:
                if match := pattern.search(line):
                    self._add_match(match)
                    return
        if not self.series:
            self._read_facts(line)

    def _read_facts(self, line: str) -> None:
        if self.format.argument is not None and (match := self.format.argument.search(line)):
            self.facts.add_argument(match["name"], match["value"])
        for pattern in self.format.facts:
            if match := pattern.search(line):
                self.facts.add_values({name: text for name, text in match.groupdict().items() if text})
        if self.format.read_facts is not None:
            self.facts.add_values(self.format.read_facts(line))

    def _add_match(self, match: re.Match[str]) -> None:
        groups = match.groupdict()
        key = (bool(groups.get("time")), groups.get("series") or "")
        if key not in self.series and len(self.series) >= MAX_SERIES:
            return
        # The pattern also matches digits that form no valid date.
        with suppress(ValueError, OverflowError):
            if key[0]:
                text = groups["time"].replace(",", ".")
                value = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
                series = self.series.setdefault(key, StepSeries(is_clock=True, resolution_s=1.0))
                if "." in text:
                    series.resolution_s = 0.001
            else:
                factor, number = _UNITS[groups.get("unit") or self.format.unit], float(groups["seconds"])
                value = number * factor if factor > 0 else 1 / number if number > 0 else 0.0
                series = self.series.setdefault(key, StepSeries())
            series.add_step(int(groups["step"]), value, is_paused=self.is_paused)
            self.is_paused = False

    def find_run(self) -> LoggedRun | None:
        """Return the run, with the step of the longest series, or None if there are too few steps."""
        found = [(median, series) for series in self.series.values() if (median := find_median(series)) is not None]
        if not found:
            return None
        # Lines with a duration say more than the times of other lines.
        (seconds, steps), _ = max(found, key=lambda item: (not item[1].is_clock, item[0][0] * len(set(item[1].steps))))
        return LoggedRun(seconds, steps, self.format.name, self.facts.gpus, self.facts.gpu, self.facts.plan)


def find_logged_run(lines: Iterable[str], formats: Sequence[TextFormat]) -> LoggedRun | None:
    """Return the run in a log's lines, by the first format that finds steps, or None if there are too few steps."""
    readers = [_FormatReader(item) for item in formats]
    for raw in lines:
        line = _COLOUR.sub("", raw[:MAX_LINE]) if "\x1b" in raw else raw[:MAX_LINE]
        lower = line.lower()
        is_pause = any(word in lower for word in _PAUSE_WORDS) and _PAUSE.search(line) is not None
        for reader in readers:
            reader.is_paused |= is_pause
            reader.read_line(line)
    return next((run for reader in readers if (run := reader.find_run()) is not None), None)


def iterate_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, each cut to `MAX_LINE` bytes, with bounded memory.

    Carriage returns end lines too, because progress bars write them. Invalid UTF-8 is replaced.
    """
    with path.open("rb") as handle:
        rest = b""
        while chunk := handle.read(CHUNK):
            *whole, rest = (rest + chunk.replace(b"\r", b"\n")).split(b"\n")
            rest = rest[:MAX_LINE]
            for line in whole:
                yield line[:MAX_LINE].decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")


def split_lines(content: bytes) -> Iterator[str]:
    """Yield the lines of a log in memory, split like those of `iterate_lines`."""
    for line in content.replace(b"\r", b"\n").split(b"\n"):
        if line:
            yield line[:MAX_LINE].decode("utf-8", "replace")
