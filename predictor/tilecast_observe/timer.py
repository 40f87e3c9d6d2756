"""`StepTimer` measures the time between the ends of optimizer steps after warm-up, and the parts of a step."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tilecast_observe import trace
from tilecast_observe.parts import PARTS, Batch, PartTimes
from tilecast_observe.reporter import Reporter, ReporterSettings, StepSample, log

if TYPE_CHECKING:
    from typing import Self

READ_S = 600.0
"""Longest time, in seconds, that reading a profile may take."""
MOST_STEPS = 1024
"""Most steps in the median of a report. Older steps are dropped."""


class StepTimer:
    """Timer of optimizer steps. A separate thread reports the median step.

    A step lasts from the end of the previous step to the end of this one, and includes data loading. The host runs
    ahead of the GPU only by a bounded number of kernels, so over many steps the host's intervals equal the GPU's.

    Use the timer as a context manager around the training loop and call `step` once per optimizer step. No method
    raises.

    Args:
        warmup_steps: number of first steps to ignore (compilation, autotuning, cold caches).
        interval_s: seconds between two reports.
        settings: destination of the reports. Read from the environment if absent.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        warmup_steps: int = 10,
        interval_s: float = 60.0,
        settings: ReporterSettings | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._left = max(0, warmup_steps)
        self._mark: float | None = None
        self._lock = threading.Lock()
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._count = 0
        self._reporter: Reporter | None = None
        try:
            self._reporter = Reporter(
                settings or ReporterSettings.from_environment(os.environ), self._take_steps, interval_s
            )
        except Exception:
            log.warning("step times are not reported", exc_info=True)
        self._is_reporting = self._reporter is not None and self._reporter.is_reporting
        self._parts = PartTimes(clock, is_used=self._is_reporting)
        self._exposed: float | None = None
        self._is_reading = threading.Lock()

    def step(self) -> None:
        """Count an optimizer step that ends now."""
        now, before = self._clock(), self._mark
        self._mark = now
        if before is not None and self._left:
            self._left -= 1
        elif before is not None:
            with self._lock:
                self._steps.append(now - before)
                self._count += 1
        self._parts.next_step(counts=self._left == 0)

    def loading(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader, and report how long the GPU waits for data in a step.

        Write `for batch in timer.loading(loader):` instead of `for batch in loader:`. Errors of the loader are raised
        unchanged.
        """
        return self._parts.time_loader(loader)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body of a `with` statement as a part of the step.

        Parts are "forward", "backward", "optimizer" and "communication". With any other name nothing is timed. The time
        of a part inside another part counts for the inner part only.
        """
        end = self.begin(name)
        try:
            yield
        finally:
            end()

    def begin(self, name: str) -> Callable[[], None]:
        """Begin a part and return a function that ends it. Unlike with `part`, another function may end it."""
        if name not in PARTS:
            log.warning("%r is no part of a step; there are %s", name, ", ".join(PARTS))
            return lambda: None
        return self._parts.begin(name)

    def traced(self, profile: Any) -> None:
        """Read from a profile how long a step waits for its collectives, and report that time from then on.

        Use it as `torch.profiler.profile(schedule=…, on_trace_ready=timer.traced)`. A separate process on rank 0 reads
        the trace. While one trace is being read, further profiles are ignored.
        """
        if not self._is_reporting or self._is_reading.locked():
            return
        try:
            folder = tempfile.TemporaryDirectory(prefix="tilecast-observe-")
            path = Path(folder.name, "trace.json")
            profile.export_chrome_trace(str(path))
            threading.Thread(target=self._read_trace, args=(folder, path), name="tilecast-trace", daemon=True).start()
        except Exception:
            log.warning("the profile is not read", exc_info=True)

    def _read_trace(self, folder: tempfile.TemporaryDirectory[str], path: Path) -> None:
        """Read the exposed share of a trace in a separate process, and log a failure."""
        try:
            with self._is_reading, folder:
                command = [sys.executable, trace.__file__, str(path)]
                done = subprocess.run(  # noqa: S603 (this package's own file, by the interpreter that runs)
                    command, capture_output=True, text=True, check=True, timeout=READ_S
                )
                self._exposed = json.loads(done.stdout)
        except Exception as error:
            log.warning("the profile is not read: %s", error)

    def skip(self) -> None:
        """Leave out the time until the next step ends, because it is not training but an evaluation or a checkpoint."""
        self._mark = None
        self._parts.skip()

    def start(self) -> None:
        """Start reporting. A `with` statement calls this method."""
        self._mark = self._clock()
        self._parts.next_step(counts=self._left == 0)
        if self._reporter is not None:
            self._reporter.start()

    def stop(self) -> None:
        """Send a last report and end, after a wait of at most two seconds. A `with` statement calls this method."""
        if self._reporter is not None:
            self._reporter.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _take_steps(self, least: int) -> StepSample | None:
        """Return the steps since the last result, or None if there are fewer than `least`."""
        with self._lock:
            if self._count < least:
                return None
            steps, count = list(self._steps), self._count
            self._steps.clear()
            self._count = 0
        seconds = statistics.median(steps)
        return StepSample(seconds, count, _scale_parts(seconds, self._parts.take_means(), self._exposed))


def _scale_parts(seconds: float, means: Mapping[str, float], exposed: float | None) -> Mapping[str, float]:
    """Return the seconds of the parts of a step, scaled so that their sum is at most the step.

    Unless "communication" was timed, its seconds are the exposed share of the step. They are then subtracted from
    "backward", "forward" and "optimizer", in this order.

    Args:
        seconds: the median step.
        means: mean seconds of each timed part.
        exposed: share of the step in which only collectives ran, or None if no profile was read.
    """
    parts = dict(means)
    if exposed is not None and "communication" not in parts:
        left = parts["communication"] = exposed * seconds
        for name in ("backward", "forward", "optimizer"):
            within = min(left, parts.get(name, 0.0))
            left -= within
            if name in parts:
                parts[name] -= within
    most = max(seconds, sum(parts.values()))
    return {name: value * (seconds / most) for name, value in parts.items()}
