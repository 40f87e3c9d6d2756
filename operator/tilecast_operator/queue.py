"""A queue of keys: each at most once, never two workers on one key, later if asked.

The rules are those of the work queues of Kubernetes controllers: adding a key that waits changes nothing, adding a
key that is being worked on queues it again for when that work is done.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class KeyQueue(Generic[KeyT]):
    """Keys to be worked on. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ready: deque[KeyT] = deque()
        self._waiting: set[KeyT] = set()
        self._running: set[KeyT] = set()
        self._again: set[KeyT] = set()
        self._later: list[tuple[float, int, KeyT]] = []
        self._due: dict[KeyT, float] = {}
        self._order = itertools.count()
        self._changed = asyncio.Event()
        self._last_progress = clock()

    def __len__(self) -> int:
        return len(self._ready) + len(self._due)

    def add(self, key: KeyT, delay_s: float = 0.0) -> None:
        """Work on the key, not before `delay_s` from now. Of several delays the shortest counts."""
        if key in self._waiting:
            return
        if delay_s > 0:
            due = self._clock() + delay_s
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                heapq.heappush(self._later, (due, next(self._order), key))
                self._tidy()
        elif key in self._running:
            self._again.add(key)
        else:
            self._due.pop(key, None)
            self._waiting.add(key)
            self._ready.append(key)
        self._changed.set()

    async def take(self) -> KeyT:
        """The next key; call `done` with it afterwards."""
        while True:
            wait_s = self._promote()
            if self._ready:
                key = self._ready.popleft()
                self._waiting.discard(key)
                self._running.add(key)
                return key
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                continue

    def done(self, key: KeyT) -> None:
        """Say that the work on a key has ended, well or not."""
        self._last_progress = self._clock()
        self._running.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def stalled_s(self) -> float:
        """How long work has been ready or under way without any being finished; 0 when there is none."""
        return self._clock() - self._last_progress if self._ready or self._running else 0.0

    def _tidy(self) -> None:
        """Let go of delays that shorter ones have replaced, before they outnumber the others."""
        if len(self._later) > 2 * len(self._due) + 64:
            self._later = [item for item in self._later if self._due.get(item[2]) == item[0]]
            heapq.heapify(self._later)

    def _promote(self) -> float | None:
        """Move due keys to the ready ones; returns the seconds until the next is due."""
        while self._later:
            due, _, key = self._later[0]
            if self._due.get(key) != due:
                heapq.heappop(self._later)
            elif due <= self._clock():
                heapq.heappop(self._later)
                del self._due[key]
                if not self._ready and not self._running:
                    self._last_progress = self._clock()
                self.add(key)
            else:
                return due - self._clock()
        return None
