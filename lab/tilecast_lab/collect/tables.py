"""Tables that a run writes: measured kernels row by row, with GPU and software, and the count of skipped kernels."""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from .cases import KINDS, KernelCase, KernelKind


class CollectError(Exception):
    """Raised if the run cannot start or continue; the message is one line with the remedy."""


class SkippedError(Exception):
    """Raised if one kernel cannot be measured here; `reason` is counted, `detail` is shown once per reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call over the bursts of a kernel."""

    median_s: float
    least_s: float
    most_s: float
    runs: int

    @classmethod
    def of(cls, bursts_s: Sequence[float]) -> Timing:
        return cls(statistics.median(bursts_s), min(bursts_s), max(bursts_s), len(bursts_s))


@dataclass(frozen=True, slots=True)
class Environment:
    """GPU and software of a measurement, as the columns of a table have them."""

    gpu: str
    driver: str
    cuda: str
    pytorch: str


MEASURED = ("n_runs", "latency_min_us", "latency_max_us", "driver", "cuda", "pytorch")
"""Last columns of every table."""


def header(kind: KernelKind) -> list[str]:
    """Return the columns of a kind's table."""
    return ["source", "gpu", *kind.columns, "latency_us", *kind.labels, *MEASURED]


def row(case: KernelCase, timing: Timing, environment: Environment) -> list[str]:
    """Return the row of a measured case, in the order of `header`."""
    cells = case.cells() | {
        "source": "tilecast", "gpu": environment.gpu, "latency_us": f"{timing.median_s * 1e6:.4f}",
        "n_runs": timing.runs, "latency_min_us": f"{timing.least_s * 1e6:.4f}",
        "latency_max_us": f"{timing.most_s * 1e6:.4f}", "driver": environment.driver, "cuda": environment.cuda,
        "pytorch": environment.pytorch,
    }  # fmt: skip
    return [str(cells[name]) for name in header(case.kind)]


class _Echo:
    """Text stream that also writes every line to a second stream, after a prefix."""

    def __init__(self, file: TextIO, copy: TextIO | None, prefix: str) -> None:
        self.file, self.copy, self.prefix = file, copy, prefix

    def write(self, line: str) -> int:
        if self.copy is not None:
            self.copy.write(self.prefix + line)
            self.copy.flush()
        written = self.file.write(line)
        self.file.flush()
        return written


class Tables:
    """Tables of a run: files `<kind>.csv` in one folder, created with the first row and flushed with every row."""

    def __init__(self, folder: Path, environment: Environment, copy: TextIO | None = None) -> None:
        """Create the folder for the tables.

        Args:
            folder: folder of the tables.
            environment: GPU and software of the run.
            copy: stream that gets every line too, as `<kind>.csv:LINE`, for machines that keep a log but no files.

        Raises:
            CollectError: the folder has a table already, or cannot be created.
        """
        if names := [name for name in KINDS if (folder / f"{name}.csv").exists()]:
            raise CollectError(f"--output: {folder} has {names[0]}.csv already; name a new folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CollectError(f"--output: {folder} cannot be made ({error.strerror}); name another folder") from None
        self.folder, self.environment, self.copy = folder, environment, copy
        self.started: set[str] = set()

    def write(self, case: KernelCase, timing: Timing) -> None:
        """Append the row of a measured case."""
        name = f"{case.kind.name}.csv"
        with (self.folder / name).open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(_Echo(file, self.copy, f"{name}:"), lineterminator="\n")
            if name not in self.started:
                writer.writerow(header(case.kind))
                self.started.add(name)
            writer.writerow(row(case, timing, self.environment))


@dataclass(slots=True)
class Tally:
    """Counts of a run so far."""

    measured: Counter[str] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of skipped kernels by kind and reason."""
    details: dict[tuple[str, str], str] = field(default_factory=dict)
    """Detail of the first skipped kernel, by kind and reason."""

    def __str__(self) -> str:
        lines = [f"measured {self.measured.total()}: " + ", ".join(f"{k} {n}" for k, n in self.measured.items())]
        for (kind, reason), count in sorted(self.skipped.items()):
            detail = self.details.get((kind, reason), "")
            lines.append(f"skipped {count} {kind}: {reason}" + (f" (first: {detail})" if detail else ""))
        return "\n".join(lines)


class Measure(Protocol):
    """Function that measures the seconds of a case."""

    def __call__(self, case: KernelCase) -> Timing:
        """Measure one case.

        Raises:
            SkippedError: the case cannot be measured.
            CollectError: neither this nor any later case can be measured.
        """


def collect(
    cases: Iterable[KernelCase], measure: Measure, tables: Tables, tally: Tally, *, budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Measure cases in order until they or the budget end; a case that has begun is finished.

    Args:
        cases: cases to measure.
        measure: measures one case.
        tables: receives the rows.
        tally: counts measured and skipped cases; it is up to date if the run fails.
        budget_s: no case begins after this many seconds.
        clock: returns seconds since a fixed moment.

    Raises:
        CollectError: the device failed; rows written before are complete.
    """
    begin = clock()
    for number, case in enumerate(cases):
        spent_s = clock() - begin
        if spent_s >= budget_s:
            break
        if number and number % 100 == 0:
            done = f"{spent_s / 60:.1f} of {budget_s / 60:g} min: {tally.measured.total()} rows"
            print(f"{done}, {tally.skipped.total()} skipped", file=sys.stderr, flush=True)
        try:
            tables.write(case, measure(case))
        except SkippedError as skip:
            key = (case.kind.name, skip.reason)
            tally.skipped[key] += 1
            tally.details.setdefault(key, skip.detail)
        else:
            tally.measured[case.kind.name] += 1
