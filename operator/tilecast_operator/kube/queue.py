"""Queue of the keys that controllers work on.

The rules are those of work queues of Kubernetes controllers: the queue contains each key at most once, and no two
workers handle one key. Adding a key that waits changes nothing. Adding a key that is being worked on queues it again
for when that is done. Namespaces take turns. Only a few background keys are worked on at a time, so that thousands of
them delay no other key.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from tilecast_operator.kube.fair_queue import FairQueue

KeyT = TypeVar("KeyT", bound=Hashable)

BACKGROUND_AT_ONCE = 4
"""Most background keys that are ready or being worked on. So other keys wait for few background searches."""


class KeyQueue(Generic[KeyT]):
    """Queue of keys to be worked on, in which namespaces take turns. It belongs to one event loop.

    Args:
        clock: Monotonic clock, in seconds.
        namespace_of: Function that returns the namespace of a key, empty for cluster-scoped keys.
    """

    def __init__(self, clock: Callable[[], float], namespace_of: Callable[[KeyT], str] = lambda _: "") -> None:
        self._clock = clock
        self._namespace_of = namespace_of
        self.workers = math.inf
        """Number of keys that can be worked on at once.

        A namespace has at most half of the workers that other namespaces leave. So there is always a worker for the
        next namespace, whatever keys of other namespaces wait for.
        """
        self._ready: FairQueue[KeyT] = FairQueue()
        self._idle: deque[asyncio.Future[KeyT]] = deque()
        """Workers that wait for a key."""
        self._running: set[KeyT] = set()
        self._running_of: Counter[str] = Counter()
        """Number of running keys by namespace."""
        self._again: dict[KeyT, bool] = {}
        """Keys that are due again once the work on them is done, and whether in the background."""
        self._background: FairQueue[KeyT] = FairQueue()
        """Background keys that wait for other background keys."""
        self._admitted: set[KeyT] = set()
        """Background keys that are ready or being worked on."""
        self._later: list[tuple[float, int, tuple[KeyT, bool]]] = []
        self._due: dict[tuple[KeyT, bool], float] = {}
        """Time at which a key is due, separately for the background."""
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._last_progress = clock()

    def __len__(self) -> int:
        return len(self._ready) + len({*self._background, *(key for key, _ in self._due)})

    def add(self, key: KeyT, delay_s: float = 0.0, *, in_background: bool = False) -> None:
        """Add a key that becomes due after `delay_s` seconds.

        Of several delays, the shortest counts. A background key that is added again without a delay and without
        `in_background` is no longer a background key.
        """
        if key in self._ready:
            return
        if delay_s > 0:
            self._add_later((key, in_background), self._clock() + delay_s)
        elif key in self._running:
            self._again[key] = in_background and self._again.get(key, True)
        elif in_background:
            self._background.push(key, self._namespace_of(key))
            self._admit_background()
        else:
            self._background.remove(key)
            self._make_ready(key)

    def _add_later(self, entry: tuple[KeyT, bool], due: float) -> None:
        if due < self._due.get(entry, math.inf):
            self._due[entry] = due
            heapq.heappush(self._later, (due, next(self._order), entry))
            self._drop_replaced_delays()
            if self._later[0][2] == entry:
                self._on_timer()

    def _make_ready(self, key: KeyT) -> None:
        if not self._ready and not self._running:
            self._last_progress = self._clock()
        for in_background in (False, True):
            self._due.pop((key, in_background), None)
        self._ready.push(key, self._namespace_of(key))
        self._serve_idle_workers()

    def _admit_background(self) -> None:
        """Make background keys ready until the limit on background keys is reached."""
        while len(self._admitted) < BACKGROUND_AT_ONCE and (chosen := self._background.pop()) is not None:
            key, namespace = chosen
            self._background.charge(namespace, 1.0)
            self._admitted.add(key)
            self._make_ready(key)

    def iterate_ready_keys(self) -> Iterator[KeyT]:
        """Iterate over all keys that are ready to be taken, including background keys."""
        self._move_due_keys()
        return itertools.chain(self._ready, self._background)

    async def take_key(self) -> KeyT:
        """Wait for the next key and return it. The caller must call `finish_key` afterwards."""
        self._move_due_keys()
        key = self._start_next()
        if key is not None:
            return key
        place: asyncio.Future[KeyT] = asyncio.get_running_loop().create_future()
        self._idle.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._remove_from_running(place.result())
                self._make_ready(place.result())
            raise

    def _start_next(self) -> KeyT | None:
        """Mark the next key as running and return it. If no key may run, return None."""
        chosen = self._ready.pop(self._has_worker)
        if chosen is None:
            return None
        key, namespace = chosen
        self._ready.charge(namespace, 1.0)
        self._running.add(key)
        self._running_of[namespace] += 1
        return key

    def _has_worker(self, _: KeyT, namespace: str) -> bool:
        """Return whether a namespace may use another worker: it must use fewer workers than are free.

        Cluster-scoped keys always get a worker, because they are few.
        """
        return not namespace or self._running_of[namespace] < self.workers - len(self._running)

    def _serve_idle_workers(self) -> None:
        """Give ready keys to waiting workers."""
        while self._idle:
            if self._idle[0].done():  # the worker has been cancelled meanwhile
                self._idle.popleft()
            elif (key := self._start_next()) is not None:
                self._idle.popleft().set_result(key)
            else:
                return

    def _on_timer(self) -> None:
        """Make due keys ready, and set the timer for the next one."""
        if self._timer:
            self._timer.cancel()
        self._move_due_keys()
        if self._later:
            self._timer = asyncio.get_running_loop().call_later(self._later[0][0] - self._clock(), self._on_timer)

    def is_in_background(self, key: KeyT) -> bool:
        """Return whether a key that is being worked on is a background key."""
        return key in self._admitted

    def finish_key(self, key: KeyT) -> None:
        """Record that the work on a key has ended or failed."""
        self._last_progress = self._clock()
        self._remove_from_running(key)
        self._admitted.discard(key)
        if key in self._again:
            self.add(key, in_background=self._again.pop(key))
        self._admit_background()
        self._serve_idle_workers()

    def _remove_from_running(self, key: KeyT) -> None:
        namespace = self._namespace_of(key)
        self._running.discard(key)
        self._running_of[namespace] -= 1
        if not self._running_of[namespace]:
            del self._running_of[namespace]

    def find_stalled_s(self) -> float:
        """Return the seconds for which no key was finished although there was work. Return 0 if there is no work."""
        return self._clock() - self._last_progress if self._ready or self._running else 0.0

    def _drop_replaced_delays(self) -> None:
        """Remove the entries of delays that shorter delays have replaced, once they outnumber the valid entries."""
        if len(self._later) > 2 * len(self._due) + 64:
            self._later = [item for item in self._later if self._due.get(item[2]) == item[0]]
            heapq.heapify(self._later)

    def find_seconds_to_next(self) -> float | None:
        """Return the seconds until the next key is due, or None if no key is delayed."""
        self._move_due_keys()
        if self._ready:
            return 0.0
        return self._later[0][0] - self._clock() if self._later else None

    def _move_due_keys(self) -> None:
        """Make keys ready that have become due."""
        while self._later:
            due, _, entry = self._later[0]
            if self._due.get(entry) == due:
                if due > self._clock():
                    return
                del self._due[entry]
                key, in_background = entry
                self.add(key, in_background=in_background)
            heapq.heappop(self._later)
