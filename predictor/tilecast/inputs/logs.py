"""Read the seconds of a training step from the log of a run.

Every format of a line is a row of `FORMATS`. The step of a log is the median of its steady steps: the first steps, in
which kernels are compiled and caches filled, are left out, and a median ignores pauses for evaluation and checkpoints.
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
    """Lines that a training program writes about a step.

    `pattern` has the groups `step` (a number) and either `seconds` or `time` (when the line was written). A group
    `unit` is a key of `_UNITS`; `unit` of the record is the unit of lines without the group.
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
    """Step of a run as its log shows it."""

    seconds: float
    """Median of the steady steps."""
    steps: int
    """Steady steps that were measured."""
    format: str


def read_logged_step(path: str) -> LoggedStep:
    """Return the step that a log shows.

    Args:
        path: a log with lines of one of `FORMATS`, or a `trainer_state.json` of Transformers.

    Raises:
        SpecError: the log cannot be read, or shows no step.
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
    """Return the step that the lines of a log show; None if no line shows one."""
    bounded = [_COLOUR.sub("", line[:MAX_LINE]) for line in lines]
    for item in FORMATS:
        found = [match for line in bounded if (match := item.pattern.search(line))]
        seconds = _step_seconds(item, found)
        if seconds:
            return LoggedStep(statistics.median(seconds), len(seconds), item.name)
    return None


def _step_seconds(item: LogFormat, found: Sequence[re.Match[str]]) -> list[float]:
    """Return the seconds of the steady steps; several ranks may have written a line about the same step."""
    if "time" in item.pattern.groupindex:
        return _seconds_between_lines(found)
    by_step: dict[int, float] = {}
    for match in found:
        groups = match.groupdict()
        value, unit = float(groups["seconds"]), groups.get("unit") or item.unit
        if value > 0:
            by_step.setdefault(int(groups["step"]), _UNITS[unit](value))
    return _leave_out_warm_up(list(by_step.values()))


def _seconds_between_lines(found: Sequence[re.Match[str]]) -> list[float]:
    """Return the seconds of a step between each line and the next, without those across a restart."""
    times: dict[int, datetime] = {}
    for match in found:
        # A pattern of digits also matches what is no time of a calendar.
        with suppress(ValueError):
            times.setdefault(int(match["step"]), datetime.fromisoformat(match["time"].replace(",", ".")))
    pairs = list(times.items())
    seconds = [
        (later - earlier).total_seconds() / (step - before)
        for (before, earlier), (step, later) in pairwise(pairs)
        if step > before
    ]
    # A line may stand for many steps, so the first interval alone holds the warm-up.
    return [value for value in seconds[1:] if value > 0]


def _leave_out_warm_up(seconds: Sequence[float]) -> list[float]:
    """Return the seconds of steps without the first ones; a log with hardly more steps than these shows none."""
    first = max(WARM_UP_STEPS, int(WARM_UP_SHARE * len(seconds)))
    return list(seconds[first:])


def _read_trainer_state(text: str) -> LoggedStep | None:
    """Return the mean step of a finished run of Transformers' Trainer; None if the text is not its state."""
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
    """Return the text of a file of at most `MAX_BYTES`; bytes that are no UTF-8 are replaced.

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
