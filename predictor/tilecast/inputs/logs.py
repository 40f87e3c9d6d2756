"""Read the seconds of a training step from the log of a run.

Each supported line format is a row of `FORMATS`. The result is the median of the steps after warm-up, in which kernels
are compiled and caches filled. A median ignores pauses for evaluation and checkpoints.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from tilecast import untrusted
from tilecast.spec import SpecError

MAX_BYTES = 1 << 28
"""Largest log that is read, in bytes."""
MAX_LINE = 4096
"""Characters of a line that are looked at."""
WARM_UP_STEPS = 3
WARM_UP_SHARE = 0.1
"""Steps at the start of a run that are left out: at least so many, and at least this share."""
_UNITS: Mapping[str, Callable[[float], float]] = {
    "ms": lambda value: value / 1e3,
    "s": lambda value: value,
    "s/it": lambda value: value,
    "it/s": lambda value: 1 / value,
}


@dataclass(frozen=True, slots=True)
class LogFormat:
    """A format of the lines that a training program logs for its steps.

    The pattern has a group `step` (a number), and a group `seconds` (duration) or `time` (when the line was written).
    An optional group `unit` matches a key of `_UNITS`. The field `unit` applies to patterns without that group.
    """

    name: str
    pattern: re.Pattern[str]
    unit: str = "s"


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TIME = r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)"
_NUMBER = r"(?P<seconds>\d+(?:\.\d+)?(?:[eE]-?\d+)?)"
FORMATS: Sequence[LogFormat] = (
    LogFormat(
        "Megatron-LM",
        re.compile(
            rf"iteration\s+(?P<step>\d+)/\s*\d+ .*?elapsed time per iteration \((?P<unit>ms|s)\):\s*{_NUMBER}", re.ASCII
        ),
    ),
    LogFormat("MaxText", re.compile(rf"completed step: (?P<step>\d+), seconds: {_NUMBER}", re.ASCII)),
    LogFormat("DeepSpeed", re.compile(rf"steps: (?P<step>\d+) .*?iter time \(s\): {_NUMBER}", re.ASCII)),
    LogFormat("NeMo", re.compile(rf"global_step: (?P<step>\d+).*?train_step_timing in s: {_NUMBER}", re.ASCII)),
    LogFormat("nanoGPT", re.compile(rf"iter (?P<step>\d+): loss \S+, time {_NUMBER}ms", re.ASCII), "ms"),
    LogFormat("nanoGPT", re.compile(rf"step\s+(?P<step>\d+)\b.*?\bdt: {_NUMBER}(?P<unit>ms|s)", re.ASCII)),
    LogFormat("torchtitan", re.compile(rf"{_TIME}.*?\bstep:\s*(?P<step>\d+)\s", re.ASCII)),
    LogFormat("tqdm", re.compile(rf"(?P<step>\d+)/\d+ \[[^\]]*,\s*{_NUMBER}(?P<unit>s/it|it/s)", re.ASCII)),
)
"""Formats in the order in which they are tried; a log is read by the first that any of its lines has."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """The duration of a run's step, as read from its log."""

    seconds: float
    """Median of the steady steps."""
    steps: int
    """Steady steps that were measured."""
    format: str


def read_logged_step(path: str) -> LoggedStep:
    """Return the median duration of a step from a log file.

    Args:
        path: a log with lines of one of `FORMATS`, or a `trainer_state.json` of Transformers.

    Raises:
        SpecError: the log cannot be read, or contains too few steps.
    """
    text = _read_bounded_text(path)
    logged = _read_trainer_state(text) if text.lstrip().startswith("{") else None
    logged = logged or find_logged_step(re.split(r"[\r\n]+", text))
    if logged is None:
        names = ", ".join(dict.fromkeys(item.name for item in FORMATS))
        problem = f"shows no steps of {names} or trainer_state.json, or too few"
        raise SpecError(path, problem, "give the seconds of a step, for instance 1.9s")
    return logged


def find_logged_step(lines: Iterable[str]) -> LoggedStep | None:
    """Return the median duration of a step from the lines of a log, or None if they contain too few steps."""
    bounded = [_COLOUR.sub("", line[:MAX_LINE]) for line in lines]
    for item in FORMATS:
        found = [match for line in bounded if (match := item.pattern.search(line))]
        seconds = _list_steady_seconds(item, found)
        if seconds:
            return LoggedStep(statistics.median(seconds), len(seconds), item.name)
    return None


def _list_steady_seconds(log_format: LogFormat, matches: Sequence[re.Match[str]]) -> list[float]:
    """Return the seconds of each step after warm-up. If several ranks logged a step, the first line counts."""
    if "time" in log_format.pattern.groupindex:
        return _seconds_between_lines(matches)
    by_step: dict[int, float] = {}
    for match in matches:
        groups = match.groupdict()
        value, unit = float(groups["seconds"]), groups.get("unit") or log_format.unit
        if value > 0:
            by_step.setdefault(int(groups["step"]), _UNITS[unit](value))
    return _leave_out_warm_up(list(by_step.values()))


def _seconds_between_lines(matches: Sequence[re.Match[str]]) -> list[float]:
    """Return the seconds per step from the times of consecutive lines. Intervals across a restart are left out."""
    times: dict[int, datetime] = {}
    for match in matches:
        # The pattern also matches digits that form no valid date.
        with suppress(ValueError):
            times.setdefault(int(match["step"]), datetime.fromisoformat(match["time"].replace(",", ".")))
    pairs = list(times.items())
    seconds = [
        (later - earlier).total_seconds() / (step - before)
        for (before, earlier), (step, later) in pairwise(pairs)
        if step > before
    ]
    # A line may cover many steps, so the whole warm-up is in the first interval.
    return [value for value in seconds[1:] if value > 0]


def _leave_out_warm_up(seconds: Sequence[float]) -> list[float]:
    """Return the seconds of the steps after warm-up, which is empty if the log ends during warm-up."""
    first = max(WARM_UP_STEPS, int(WARM_UP_SHARE * len(seconds)))
    return list(seconds[first:])


def _read_trainer_state(text: str) -> LoggedStep | None:
    """Return the mean step from the text of a `trainer_state.json`. For other texts or unfinished runs, return None."""
    try:
        state = untrusted.parse_json(text)
    except ValueError:
        return None
    history = state.get("log_history") if isinstance(state, Mapping) else None
    if not isinstance(history, Sequence):
        return None
    for entry in reversed([item for item in history if isinstance(item, Mapping)]):
        seconds, steps = entry.get("train_runtime"), entry.get("step")
        if isinstance(seconds, int | float) and isinstance(steps, int) and seconds > 0 and steps > 0:
            return LoggedStep(seconds / steps, steps, "Transformers")
    return None


def _read_bounded_text(path: str) -> str:
    """Return the text of a file of at most `MAX_BYTES` bytes. Invalid UTF-8 is replaced.

    Raises:
        SpecError: the file cannot be read, or is too large.
    """
    try:
        file = Path(path)
        if not file.is_file():
            raise SpecError(
                path, "is no file" if file.exists() else "cannot be read: there is no such file", "name a log"
            )
        if (size := file.stat().st_size) > MAX_BYTES:
            raise SpecError(path, f"has {size:,} bytes, more than {MAX_BYTES:,}", "give its last lines")
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SpecError(path, "cannot be read", str(error.strerror or error)) from None
