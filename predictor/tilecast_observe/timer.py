"""`StepTimer`: the time between the ends of optimizer steps, after warm-up."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from tilecast_observe.loading import Batch, Waits
from tilecast_observe.reporter import Reporter, ReporterSettings, Taken, log

if TYPE_CHECKING:
    from typing import Self

MOST_STEPS = 1024
"""Most steps between two reports whose median is taken: the latest of them."""


class StepTimer:
    """Times optimizer steps, and reports their median from a thread of its own.

    A step lasts from the end of the one before to its own end, data loading included. The host runs ahead of the GPU
    by a bounded number of kernels only, so that over many steps these intervals are the GPU's.

    Use it as a context manager around the training loop and call `step` once per optimizer step. No method raises.

    Args:
        warmup_steps: first steps that do not count: compilation, autotuning, cold caches.
        interval_s: seconds between two reports.
        settings: where reports go; from the environment if absent.
        clock: seconds, monotonic.
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
        self._waits = Waits(clock)
        self._reporter: Reporter | None = None
        try:
            self._reporter = Reporter(settings or ReporterSettings.of(os.environ), self._take, interval_s)
        except Exception:
            log.warning("step times are not reported", exc_info=True)

    def step(self) -> None:
        """An optimizer step has ended."""
        now, before = self._clock(), self._mark
        self._mark = now
        if before is None:
            return
        if self._left:
            self._left -= 1
            return
        with self._lock:
            self._steps.append(now - before)
            self._count += 1

    def loading(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a loader, the time that the GPU waits for each of them reported beside the step.

        `for batch in timer.loading(loader):` instead of `for batch in loader:`. What the loader raises is raised.
        """
        return self._waits.over(loader, lambda: self._mark is not None and self._left == 0)

    def skip(self) -> None:
        """What happens until the next step ends is no training: an evaluation, a checkpoint."""
        self._mark = None

    def start(self) -> None:
        """Begin to report; `with` does it."""
        self._mark = self._clock()
        if self._reporter is not None:
            self._reporter.start()

    def stop(self) -> None:
        """Report what is left and end; `with` does it. Waits for the last report for two seconds at most."""
        if self._reporter is not None:
            self._reporter.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _take(self, least: int) -> Taken | None:
        """What was measured since the last call that returned any; None below `least` steps."""
        with self._lock:
            if self._count < least:
                return None
            steps, count = list(self._steps), self._count
            self._steps.clear()
            self._count = 0
        seconds, waited = statistics.median(steps), self._waits.take()
        return Taken(seconds, count, None if waited is None else min(waited / count, seconds))
