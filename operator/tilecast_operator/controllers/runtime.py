"""The loop of every controller: one queue of keys, workers, and tries again.

The rules are those of the work queues of Kubernetes controllers: each key at most once, never two workers on one key;
adding a key that waits changes nothing, adding a key that is being worked on queues it again for when that is done.
Keys in the background are worked on a few at a time, so that thousands of them hold up no other key.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tilecast_operator.answer import INPUT_QUARANTINED, Declined
from tilecast_operator.cluster.api import UNREACHABLE, Api, ApiError, retry_s
from tilecast_operator.cluster.cache import Cache
from tilecast_operator.cluster.journal import Journal
from tilecast_operator.cluster.kinds import Key
from tilecast_operator.cluster.leadership import Leadership, NotLeaderError
from tilecast_operator.cluster.view import stamp
from tilecast_operator.cluster.writer import Writer
from tilecast_operator.controllers.answer_times import AnswerTimes
from tilecast_operator.metrics import Metrics
from tilecast_operator.settings import Settings

KeyT = TypeVar("KeyT", bound=Hashable)

CONDITIONAL_TRIES = 6
"""How often a write is meant for the object as it was seen, which keeps two operators from writing over each other."""

BACKGROUND_AT_ONCE = 4
"""Keys in the background that are worked on at once, or are next: others wait behind no more searches of theirs."""

TAKE_OVER_S = 30.0
"""Within this time a replica that has begun to lead looks at everything. New jobs need not wait for that."""

log = logging.getLogger("tilecast")


@dataclass(frozen=True, slots=True)
class SharedContext:
    """What all controllers share."""

    settings: Settings
    client: Api
    cache: Cache
    leadership: Leadership
    writer: Writer
    runtime: Runtime
    metrics: Metrics
    answers: AnswerTimes
    clock: Callable[[], float]
    journal: Journal

    def set_aside(self, key: Key) -> Declined | None:
        """Return the answer about an object that is set aside; None where it is not."""
        text = self.cache.quarantine.why(key)
        return None if text is None else Declined(INPUT_QUARANTINED, text)

    def now(self) -> str:
        """The time as Kubernetes writes it."""
        return stamp(self.clock())


class TryAgainError(Exception):
    """A key could not be worked off for a reason that may pass."""


class KeyQueue(Generic[KeyT]):
    """Keys to be worked on. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ready: asyncio.Queue[KeyT] = asyncio.Queue()
        self._waiting: set[KeyT] = set()
        self._running: set[KeyT] = set()
        self._again: dict[KeyT, bool] = {}
        """Keys that are due again once the work on them is done, and whether in the background."""
        self._background: dict[KeyT, None] = {}
        """Keys that wait for others of the background."""
        self._admitted: set[KeyT] = set()
        """Those of the background that wait for them no longer."""
        self._later: list[tuple[float, int, tuple[KeyT, bool]]] = []
        self._due: dict[tuple[KeyT, bool], float] = {}
        """When a key is due, in the background or not: each has its own time."""
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._last_progress = clock()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._background.keys() | {key for key, _ in self._due})

    def add(self, key: KeyT, delay_s: float = 0.0, *, in_background: bool = False) -> None:
        """Work on the key, not before `delay_s` from now. Of several delays the shortest counts, and a key that is
        wanted at once is no longer one of the background."""
        if key in self._waiting:
            return
        if delay_s > 0:
            self._add_later((key, in_background), self._clock() + delay_s)
        elif key in self._running:
            self._again[key] = in_background and self._again.get(key, True)
        elif in_background:
            self._background[key] = None
            self._admit()
        else:
            self._background.pop(key, None)
            self._put(key)

    def _add_later(self, entry: tuple[KeyT, bool], due: float) -> None:
        if due < self._due.get(entry, math.inf):
            self._due[entry] = due
            heapq.heappush(self._later, (due, next(self._order), entry))
            self._tidy()
            if self._later[0][2] == entry:
                self._wake()

    def _put(self, key: KeyT) -> None:
        if not self._waiting and not self._running:
            self._last_progress = self._clock()
        for in_background in (False, True):
            self._due.pop((key, in_background), None)
        self._waiting.add(key)
        self._ready.put_nowait(key)

    def _admit(self) -> None:
        """Make keys of the background ready, the first first, while few of them are."""
        while self._background and len(self._admitted) < BACKGROUND_AT_ONCE:
            key = next(iter(self._background))
            del self._background[key]
            self._admitted.add(key)
            self._put(key)

    def ready(self) -> Iterator[KeyT]:
        """The keys that could be taken now."""
        self._move_due()
        return itertools.chain(self._waiting, self._background)

    async def take(self) -> KeyT:
        """The next key; call `done` with it afterwards."""
        self._move_due()
        key = await self._ready.get()
        self._waiting.discard(key)
        self._running.add(key)
        return key

    def _wake(self) -> None:
        """Move keys to the ready ones as they become due. One timer does that for every worker that waits."""
        if self._timer:
            self._timer.cancel()
        self._move_due()
        if self._later:
            self._timer = asyncio.get_running_loop().call_later(self._later[0][0] - self._clock(), self._wake)

    def is_in_background(self, key: KeyT) -> bool:
        """Whether a key that is worked on is one of the background."""
        return key in self._admitted

    def done(self, key: KeyT) -> None:
        """Say that the work on a key has ended, well or not."""
        self._last_progress = self._clock()
        self._running.discard(key)
        self._admitted.discard(key)
        if key in self._again:
            self.add(key, in_background=self._again.pop(key))
        self._admit()

    def stalled_s(self) -> float:
        """How long work has been ready or under way without any being finished; 0 when there is none."""
        return self._clock() - self._last_progress if self._waiting or self._running else 0.0

    def _tidy(self) -> None:
        """Let go of delays that shorter ones have replaced, before they outnumber the others."""
        if len(self._later) > 2 * len(self._due) + 64:
            self._later = [item for item in self._later if self._due.get(item[2]) == item[0]]
            heapq.heapify(self._later)

    def wait_s(self) -> float | None:
        """How long until a key can be taken, in seconds; None while there is none."""
        self._move_due()
        if self._waiting:
            return 0.0
        return self._later[0][0] - self._clock() if self._later else None

    def _move_due(self) -> None:
        """Make keys ready whose time has come."""
        while self._later:
            due, _, entry = self._later[0]
            if self._due.get(entry) == due:
                if due > self._clock():
                    return
                del self._due[entry]
                key, in_background = entry
                self.add(key, in_background=in_background)
            heapq.heappop(self._later)


class Runtime:
    """Brings keys to the controllers of their kinds. Belongs to one event loop."""

    def __init__(self, settings: Settings, metrics: Metrics, journal: Journal | None = None) -> None:
        self._journal = journal or Journal("")
        self.queue: KeyQueue[Key] = KeyQueue(time.monotonic)
        self._settings = settings
        self._metrics = metrics
        self._reconcile: dict[str, Callable[[Key], Coroutine[Any, Any, None]]] = {}
        self._gone: dict[str, Callable[[Key], None]] = {}
        self._failures: dict[Key, int] = {}
        self._unwritten: set[Key] = set()
        """Keys whose answers another replica has to write; they are worked off anew when this one leads."""
        self._tasks: list[asyncio.Task[None]] = []

    def register(
        self,
        kind: str,
        reconcile: Callable[[Key], Coroutine[Any, Any, None]],
        gone: Callable[[Key], None] = lambda key: None,
    ) -> None:
        """Work off keys of a kind by `reconcile`; `gone` is called where the API server has no such object."""
        self._reconcile[kind], self._gone[kind] = reconcile, gone
        self._metrics.queue.labels(kind).set_function(lambda: self.backlog(kind))

    def backlog(self, kind: str) -> int:
        """How many keys of a kind are ready, or failed the last time. Others wait for their time."""
        return sum(key.kind == kind for key in {*self.queue.ready(), *self._failures})

    def add(self, key: Key, delay_s: float = 0.0, *, in_background: bool = False) -> None:
        """Work off a key, not before `delay_s` from now; one of a kind that no controller has is left alone. What is
        due because of something else than itself is for the background."""
        if key.kind in self._reconcile:
            self.queue.add(key, delay_s, in_background=in_background)

    def lead(self, others: Iterable[Key]) -> None:
        """Work off what another replica has not written, and look at the others within `TAKE_OVER_S`: it may have ended
        between two writes."""
        unwritten, self._unwritten = self._unwritten, set()
        for key in sorted(unwritten):
            self.queue.add(key)
        for key in others:
            if key not in unwritten:
                self.add(key, random.uniform(0.1, TAKE_OVER_S), in_background=True)  # noqa: S311

    def start(self, workers: int) -> None:
        """Start the workers."""
        self._tasks = [asyncio.create_task(self._work(), name=f"worker-{number}") for number in range(workers)]

    def add_task(self, work: Awaitable[None], name: str) -> None:
        """Run something beside the workers that never ends either."""
        self._tasks.append(asyncio.ensure_future(work))
        self._tasks[-1].set_name(name)

    async def stop(self) -> None:
        """Stop everything; what was about to be written is computed again at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def unhealthy(self) -> str | None:
        """Why this process should be restarted, if it should."""
        if ended := [task.get_name() for task in self._tasks if task.done()]:
            return f"{', '.join(ended)} ended"
        stalled_s = self.queue.stalled_s()
        return f"no work finished for {stalled_s:.0f} s" if stalled_s > self._settings.stall_s else None

    def is_conditional(self, key: Key) -> bool:
        """Whether a write is meant for the object as it was seen. After some failures the watch may have lost what is
        new: then for the object as it is."""
        return self._failures.get(key, 0) < CONDITIONAL_TRIES

    def forget(self, key: Key) -> None:
        """Let go of an object that is gone."""
        self._failures.pop(key, None)
        self._unwritten.discard(key)

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            try:
                await self._journal.steps(key, self._reconcile[key.kind](key))
                self._failures.pop(key, None)
                self._unwritten.discard(key)
            except NotLeaderError:
                self._unwritten.add(key)
            except (ApiError, *UNREACHABLE, TryAgainError) as error:
                self._retry(key, error)
            except Exception:
                log.exception("%s: unexpected failure", key)
                self._retry(key, None)
            finally:
                self.queue.done(key)
            # Thousands of keys of which nothing is to be asked or written never wait for anything, and nobody else of
            # the event loop, probes and reports, would get a turn.
            await asyncio.sleep(0)

    def _retry(self, key: Key, error: Exception | None) -> None:
        """Try again later, unless the object is gone. Content that the API server will not take may be taken once the
        CRDs are as new as this process."""
        code = error.status if isinstance(error, ApiError) else None
        if code == 404:
            self.forget(key)
            self._gone[key.kind](key)
            return
        attempt = self._failures[key] = self._failures.get(key, 0) + 1
        wait_s = retry_s(attempt, error, self._settings.retry_first_s, self._settings.retry_most_s)
        if code == 422:
            wait_s = max(wait_s, self._settings.retry_most_s)
        log.warning("%s: %s; again in %.1f s", key, error or "see above", wait_s)
        self._metrics.retries.inc()
        self.queue.add(key, wait_s, in_background=self.queue.is_in_background(key))
