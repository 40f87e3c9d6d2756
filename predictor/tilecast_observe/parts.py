"""What a step went to: `StepTimer.loading` and `StepTimer.part`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tilecast_observe.reporter import log, torch_cuda

Batch = TypeVar("Batch")

INPUT = "input"
PARTS = ("forward", "backward", "optimizer", "communication")
"""What else of a step can be told."""
PENDING = 16
"""Most steps whose events the GPU has not reached; while there are so many, no other one is timed."""
MOST_SPANS = 256
"""Most parts of one step; one that has more is not timed."""
SHARE = 0.005
"""Most of the training's time that timing itself may take; beyond it steps go by untimed."""


@dataclass
class PartSpan:
    """A part of a step: an event or a time at either end, and the part around it."""

    name: str
    outer: str | None
    start: Any
    end: Any = None


@dataclass
class TimedStep:
    """The parts of one step, in the order in which they began."""

    spans: list[PartSpan] = field(default_factory=list)
    around: list[str] = field(default_factory=list)
    """Parts that have begun and not ended."""

    def begin(self, name: str, start: Any) -> PartSpan:
        """A part begins at an event or a time."""
        span = PartSpan(name, self.around[-1] if self.around else None, start)
        self.around.append(name)
        self.spans.append(span)
        return span

    def end(self, span: PartSpan, end: Any) -> None:
        """It ends; what began on the host's clock and ended on the GPU's does not."""
        if isinstance(span.start, float) == isinstance(end, float):
            self.around.remove(span.name)
            span.end = end

    def is_passed(self) -> bool:
        """Whether the GPU is done with all of them."""
        return all(isinstance(span.end, float) or span.end.query() for span in self.spans)

    def seconds(self) -> Iterator[tuple[str, float]]:
        """How long each took, what is a part of its own inside of it taken off."""
        for span in self.spans:
            on_host = isinstance(span.end, float)
            seconds = span.end - span.start if on_host else span.start.elapsed_time(span.end) * 1e-3
            yield span.name, seconds
            if span.outer is not None:
                yield span.outer, -seconds


class PartTimes:
    """Seconds of a step by what they went to.

    Where PyTorch uses a GPU, an event before and one behind a part say so: the host's time that hides behind queued
    kernels is none of the GPU's. They are asked for once the GPU has passed them, so nothing waits for it, and by the
    thread that trains, for no other may while a CUDA graph is captured. Elsewhere the host's clock counts. Whole steps
    are timed, and as many of them as cost little. What fails ends the timing.

    Args:
        clock: seconds, monotonic.
        is_used: whether anybody asks for the parts; nothing is timed otherwise.
    """

    def __init__(self, clock: Callable[[], float], *, is_used: bool) -> None:
        self._clock = clock
        self._is_used = is_used
        self._began: float | None = None
        """When the first part began."""
        self._spent_s = 0.0
        self._now: TimedStep | None = None
        self._lock = threading.Lock()
        self._pending: deque[TimedStep] = deque()
        self._seconds: dict[str, float] = {}
        self._steps = 0

    def next(self, counts: bool) -> None:
        """A step begins; it may be timed if it counts. What was timed until now was the whole of the step before."""
        if not self._is_used:
            return
        ended, self._now = self._now, None
        if self._began is not None:
            if ended is not None and not ended.around:
                self._pending.append(ended)
            self._collect()
            counts &= self._spent_s <= SHARE * (self._clock() - self._began) and len(self._pending) < PENDING
        if counts:
            self._now = TimedStep()

    def skip(self) -> None:
        """What runs until the next step begins is none."""
        self._now = None

    def over(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches, the wait for each of them timed; errors are the loader's own."""
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
        """Note that a part begins; what is returned notes that it ends."""
        if self._now is not None and len(self._now.spans) >= MOST_SPANS:
            self._give_up("a step has more than %d parts; they are not timed", MOST_SPANS)
        now, start = self._now, self._mark()
        if now is None or start is None:
            return _nothing
        span = now.begin(name, start)

        def end() -> None:
            after = self._mark()
            if after is not None and self._now is now and span.end is None:
                now.end(span, after)

        return end

    def take(self) -> Mapping[str, float]:
        """What a step went to in the mean since the last call, from any thread."""
        with self._lock:
            seconds, steps = self._seconds, self._steps
            self._seconds, self._steps = {}, 0
        return {name: max(value / steps, 0.0) for name, value in seconds.items()}

    def _mark(self) -> Any:
        """Now, as an event of the GPU where there is one; None where nothing is timed."""
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
            self._give_up("parts of the step are timed no longer: %s", error)
            return None
        self._spent_s += self._clock() - before
        return event

    def _collect(self) -> None:
        before = self._clock()
        try:
            while self._pending and self._pending[0].is_passed():
                parts = list(self._pending.popleft().seconds())
                with self._lock:
                    self._steps += 1
                    for name, seconds in parts:
                        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        except Exception as error:
            self._give_up("parts of the step are timed no longer: %s", error)
        self._spent_s += self._clock() - before

    def _give_up(self, message: str, *values: object) -> None:
        log.warning(message, *values)
        self._is_used, self._now = False, None
        self._pending.clear()


def _nothing() -> None:
    return None
