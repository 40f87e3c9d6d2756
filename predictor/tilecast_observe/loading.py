"""How long the GPU waited for data: `StepTimer.loading`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tilecast_observe.reporter import torch_cuda

Batch = TypeVar("Batch")

PENDING = 64
"""Most waits whose events the GPU has not reached; what comes beyond them is not timed."""


class Waits:
    """Seconds in which nothing ran because a batch was not there yet.

    Where PyTorch uses a GPU, an event before and one behind the call for a batch say so: the host's wait that hides
    behind queued kernels is none of the GPU's. They are asked for once the GPU has passed them, so nothing waits for
    it. Elsewhere the host's clock counts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._timed = False
        self._pending: deque[tuple[Any, Any]] = deque()

    def over(self, loader: Iterable[Batch], counts: Callable[[], bool]) -> Iterator[Batch]:
        """The loader's batches, the wait for each of them timed where it counts; errors are the loader's own."""
        batches = iter(loader)
        while True:
            end = self._begin() if counts() else None
            try:
                batch = next(batches)
            except StopIteration:
                return
            if end is not None:
                end()
            yield batch

    def take(self) -> float | None:
        """The seconds since the last call; None where no loader is timed."""
        self._collect()
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
            return seconds if self._timed else None

    def _begin(self) -> Callable[[], None] | None:
        """Note that the wait begins; what is returned notes that it ends. None where no more can be noted."""
        self._timed = True
        cuda = torch_cuda()
        if cuda is None:
            before = self._clock()
            return lambda: self._add(self._clock() - before)
        self._collect()
        if len(self._pending) >= PENDING:
            return None
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()

        def ended() -> None:
            end.record()
            with self._lock:
                self._pending.append((start, end))

        return ended

    def _collect(self) -> None:
        with self._lock:
            while self._pending and self._pending[0][1].query():
                start, end = self._pending.popleft()
                self._seconds += start.elapsed_time(end) * 1e-3

    def _add(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds
