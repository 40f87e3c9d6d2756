"""Time the parts of a step, for `StepTimer.loading` and `StepTimer.part`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tilecast_observe.reporter import log, torch_cuda

Batch = TypeVar("Batch")

INPUT = "input"
"""Name of the part in which the step waits for data."""
PARTS = ("forward", "backward", "optimizer", "communication")
"""Names of the other parts of a step."""
PENDING = 16
"""Most timed steps with CUDA events that the GPU has not reached yet. At this number, the next step is not timed."""
MOST_SPANS = 256
"""Most spans in one step. A step with more ends the timing of parts."""
SHARE = 0.005
"""Largest share of the training's time that the timing itself may take. Above it, steps are not timed."""


@dataclass
class PartSpan:
    """One run of a part of a step: its start and end, as CUDA events or times, and the enclosing part's name."""

    name: str
    outer: str | None
    start: Any
    end: Any = None


@dataclass
class TimedStep:
    """Spans of one step, in the order in which they began."""

    spans: list[PartSpan] = field(default_factory=list)
    around: list[str] = field(default_factory=list)
    """Names of the parts that have begun and not ended, outermost first."""

    def begin(self, name: str, start: Any) -> PartSpan:
        """Begin a part at an event or a time, and return its span."""
        span = PartSpan(name, self.around[-1] if self.around else None, start)
        self.around.append(name)
        self.spans.append(span)
        return span

    def end(self, span: PartSpan, end: Any) -> None:
        """End a part. The span counts only if its start and end are both CUDA events or both times of the host."""
        if isinstance(span.start, float) == isinstance(end, float):
            self.around.remove(span.name)
            span.end = end

    def is_passed(self) -> bool:
        """Return whether the GPU has passed the ends of all spans."""
        return all(isinstance(span.end, float) or span.end.query() for span in self.spans)

    def part_seconds(self) -> Iterator[tuple[str, float]]:
        """Yield part names with seconds. The time of an inner part is subtracted from the enclosing part."""
        for span in self.spans:
            on_host = isinstance(span.end, float)
            seconds = span.end - span.start if on_host else span.start.elapsed_time(span.end) * 1e-3
            yield span.name, seconds
            if span.outer is not None:
                yield span.outer, -seconds


class PartTimes:
    """Timer of the parts of steps.

    If PyTorch uses a GPU, CUDA events before and after a part measure it, because the host runs ahead of queued
    kernels. The events are queried after the GPU has passed them, so that nothing waits for the GPU. The training
    thread queries them, because no other thread may do so while a CUDA graph is captured. Without a GPU, the host's
    clock measures.

    A step is timed as a whole or not at all. Only so many steps are timed that the cost stays below `SHARE`. Any
    failure ends the timing.

    Args:
        clock: function that returns monotonic seconds.
        is_used: whether the parts are reported. Otherwise nothing is timed.
    """

    def __init__(self, clock: Callable[[], float], *, is_used: bool) -> None:
        self._clock = clock
        self._is_used = is_used
        self._began: float | None = None
        """Time at which the first part began, by the clock."""
        self._spent_s = 0.0
        self._now: TimedStep | None = None
        self._lock = threading.Lock()
        self._pending: deque[TimedStep] = deque()
        self._seconds: dict[str, float] = {}
        self._steps = 0

    def next_step(self, counts: bool) -> None:
        """End the current step and begin the next one. The next step may be timed only if `counts` is true."""
        if not self._is_used:
            return
        ended, self._now = self._now, None
        if self._began is not None:
            if ended is not None and not ended.around:
                self._pending.append(ended)
            self._collect_passed_steps()
            counts &= self._spent_s <= SHARE * (self._clock() - self._began) and len(self._pending) < PENDING
        if counts:
            self._now = TimedStep()

    def skip(self) -> None:
        """Discard the current step and time nothing until the next step begins."""
        self._now = None

    def time_loader(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader and time the wait for each batch. Errors of the loader are raised unchanged."""
        batches = iter(loader)
        while True:
            end = self.begin(INPUT)
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                end()
            yield batch

    def begin(self, name: str) -> Callable[[], None]:
        """Begin a part and return a function that ends it."""
        if self._now is not None and len(self._now.spans) >= MOST_SPANS:
            self._stop_timing("a step has more than %d parts; they are not timed", MOST_SPANS)
        now, start = self._now, self._read_clock()
        if now is None or start is None:
            return do_nothing
        span = now.begin(name, start)

        def end() -> None:
            after = self._read_clock()
            if after is not None and self._now is now and span.end is None:
                now.end(span, after)

        return end

    def take_means(self) -> Mapping[str, float]:
        """Return the mean seconds of each part over the steps since the last call. Any thread may call this method."""
        with self._lock:
            seconds, steps = self._seconds, self._steps
            self._seconds, self._steps = {}, 0
        return {name: max(value / steps, 0.0) for name, value in seconds.items()}

    def _read_clock(self) -> Any:
        """Return the current time as a CUDA event, or as seconds without a GPU, or None if the step is not timed."""
        if self._now is None:
            return None
        before = self._clock()
        self._began = before if self._began is None else self._began
        try:
            cuda = torch_cuda()
            if cuda is None:
                return before
            if cuda.is_current_stream_capturing():
                self._now = None
                return None
            event = cuda.Event(enable_timing=True)
            event.record()
        except Exception as error:
            self._stop_timing("parts of the step are timed no longer: %s", error)
            return None
        self._spent_s += self._clock() - before
        return event

    def _collect_passed_steps(self) -> None:
        """Add the seconds of all pending steps that the GPU has passed."""
        before = self._clock()
        try:
            while self._pending and self._pending[0].is_passed():
                parts = list(self._pending.popleft().part_seconds())
                with self._lock:
                    self._steps += 1
                    for name, seconds in parts:
                        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        except Exception as error:
            self._stop_timing("parts of the step are timed no longer: %s", error)
        self._spent_s += self._clock() - before

    def _stop_timing(self, message: str, *values: object) -> None:
        """Log a warning and end the timing of parts."""
        log.warning(message, *values)
        self._is_used, self._now = False, None
        self._pending.clear()


def do_nothing(*_: object, **__: object) -> None:
    """Accept any arguments and return None."""
