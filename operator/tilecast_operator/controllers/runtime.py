"""Work queue and workers of all controllers.

A controller registers a function for a kind of key. A worker calls the function with each key that is due. If it fails,
the worker calls it again after a back-off.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from tilecast_operator.controllers.advice_waits import AdviceWaits
from tilecast_operator.kube.cache import CacheTable
from tilecast_operator.kube.client import UNREACHABLE, Api, ApiError, compute_retry_wait_s
from tilecast_operator.kube.controller_state import ControllerState, StateTable
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.kube.journal import Journal
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.lease import Leadership, NotLeaderError
from tilecast_operator.kube.queue import KeyQueue
from tilecast_operator.kube.times import format_time
from tilecast_operator.kube.writer import Writer
from tilecast_operator.metrics import Metrics
from tilecast_operator.objects.tables import Cache
from tilecast_operator.outcome import INPUT_QUARANTINED, AdviceRefusal
from tilecast_operator.settings import Settings
from tilecast_operator.timings import ControllerDelays

CONDITIONAL_TRIES = 6
"""Number of attempts in which a write requires that the object is as it was seen.

So two operators do not overwrite each other's advice.
"""

TAKE_OVER_S = 30.0
"""Time within which a new leader reconciles all objects, in seconds. New jobs do not wait for that."""

log = logging.getLogger("tilecast")


@dataclass(frozen=True, slots=True)
class SharedContext:
    """Objects that all controllers share."""

    settings: Settings
    timings: ControllerDelays
    client: Api
    cache: Cache
    leadership: Leadership
    writer: Writer
    runtime: Runtime
    metrics: Metrics
    answers: AdviceWaits
    clock: Callable[[], float]
    journal: Journal

    @property
    def records(self) -> ControllerState:
        """Records of all objects, which the controllers fill."""
        return self.runtime.records

    def find_quarantine(self, key: Key) -> AdviceRefusal | None:
        """Return the refusal of a quarantined object, or None."""
        text = self.cache.quarantine.find_quarantine_reason(key)
        return None if text is None else AdviceRefusal(INPUT_QUARANTINED, text)

    async def try_post_event(self, key: Key, uid: str, note: EventContent, *, is_change: bool = False) -> bool:
        """Write an Event about an object. Return whether this succeeded."""
        try:
            return await self.writer.post_event(key, uid, note, is_change=is_change)
        except ApiError as error:
            log.warning("%s: Event not written: %s", key, error)
            return False

    def timestamp(self) -> str:
        """Return the current time (RFC 3339)."""
        return format_time(self.clock())


class TryAgainError(Exception):
    """Error that a key could not be reconciled for now."""


class Runtime:
    """Work queue of keys, and the workers that pass keys to controllers. It belongs to one event loop."""

    def __init__(self, settings: Settings, metrics: Metrics, journal: Journal | None = None) -> None:
        self._journal = journal or Journal("", ())
        self.queue: KeyQueue[Key] = KeyQueue(time.monotonic, lambda key: key.namespace)
        self._settings = settings
        self._metrics = metrics
        self._reconcile: dict[str, Callable[[Key], Coroutine[Any, Any, None]]] = {}
        self._gone: dict[str, Callable[[Key], None]] = {}
        self.records = ControllerState()
        """What controllers remember about an object until it is deleted."""
        self._failures: dict[Key, int] = {}
        """Number of consecutive failures of each key that failed the last time."""
        self._unwritten: StateTable[bool] = self.records.add_table()
        """Keys with advice that another replica must write. They are reconciled again when this replica leads."""
        self._tasks: list[asyncio.Task[None]] = []

    def register(
        self,
        kind: str,
        reconcile: Callable[[Key], Coroutine[Any, Any, None]],
        table: CacheTable[Any] | None = None,
        gone: Callable[[Key], None] | None = None,
    ) -> None:
        """Register the function that handles keys of a kind.

        Args:
            kind: The kind.
            reconcile: Function that handles a key.
            table: Cache of the objects. A key is dropped from it if the API server has no such object.
            gone: Function to call with such a key, instead of dropping it.
        """
        self._reconcile[kind] = reconcile
        self._gone[kind] = gone or (lambda key: None if table is None else table.forget_object(key))
        self._metrics.queue.labels(kind).set_function(lambda: self.count_backlog(kind))

    def count_backlog(self, kind: str) -> int:
        """Return the number of keys of a kind that are ready, or whose last attempt failed."""
        return sum(key.kind == kind for key in {*self.queue.iterate_ready_keys(), *self._failures})

    def add(self, key: Key, delay_s: float = 0.0, *, in_background: bool = False) -> None:
        """Queue a key that becomes due after `delay_s` seconds. Ignore a key of an unregistered kind.

        Set `in_background` if another object has changed, not the key's own object.
        """
        if key.kind in self._reconcile:
            self.queue.add(key, delay_s, in_background=in_background)

    def queue_all_keys(self, other_keys: Iterable[Key]) -> None:
        """Queue all keys, because this replica becomes leader.

        Keys with unwritten advice are due at once. `other_keys` are due within `TAKE_OVER_S`.
        """
        unwritten = sorted(self._unwritten)
        self._unwritten.clear()
        for key in unwritten:
            self.queue.add(key)
        already = set(unwritten)
        for key in other_keys:
            if key not in already:
                self.add(key, random.uniform(0.1, TAKE_OVER_S), in_background=True)  # noqa: S311

    def start(self, workers: int) -> None:
        """Start a number of workers."""
        self.queue.workers = workers
        self._tasks = [asyncio.create_task(self._run_worker(), name=f"worker-{number}") for number in range(workers)]

    def add_task(self, work: Awaitable[None], name: str) -> None:
        """Run a task that must never end. If it ends, the process is unhealthy."""
        self._tasks.append(asyncio.ensure_future(work))
        self._tasks[-1].set_name(name)

    async def stop(self) -> None:
        """Stop all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def find_health_problem(self) -> str | None:
        """Return why the process should be restarted, or None if it is healthy."""
        if ended := [task.get_name() for task in self._tasks if task.done()]:
            return f"{', '.join(ended)} ended"
        stalled_s = self.queue.find_stalled_s()
        return f"no work finished for {stalled_s:.0f} s" if stalled_s > self._settings.stall_s else None

    def is_conditional(self, key: Key) -> bool:
        """Return whether a write must fail if the object has changed.

        After several failures, writes are unconditional.
        """
        return self._failures.get(key, 0) < CONDITIONAL_TRIES

    async def _run_worker(self) -> None:
        """Take keys from the queue and reconcile them, until cancelled."""
        while True:
            key = await self.queue.take_key()
            try:
                await self._journal.await_recorded(key, self._reconcile[key.kind](key))
                self._failures.pop(key, None)
                self._unwritten.pop(key, None)
            except NotLeaderError:
                self._unwritten[key] = True
            except (ApiError, *UNREACHABLE, TryAgainError) as error:
                self._retry_later(key, error)
            except Exception:
                log.exception("%s: unexpected failure", key)
                self._retry_later(key, None)
            finally:
                self.queue.finish_key(key)
            # Keys that need no request never wait for anything. Thousands of them in a row would keep the event loop
            # from serving anything else, such as probes and reports.
            await asyncio.sleep(0)

    def _retry_later(self, key: Key, error: Exception | None) -> None:
        """Queue a key again after a back-off. If its object no longer exists, drop the object's record."""
        code = error.status if isinstance(error, ApiError) else None
        if code == 404:
            self._failures.pop(key, None)
            self.records.drop_record(key)
            self._gone[key.kind](key)
            return
        attempt = self._failures[key] = self._failures.get(key, 0) + 1
        wait_s = compute_retry_wait_s(attempt, error, self._settings.retry_first_s, self._settings.retry_most_s)
        if code == 422:
            wait_s = max(wait_s, self._settings.retry_most_s)
        log.warning("%s: %s; again in %.1f s", key, error or "see above", wait_s)
        self._metrics.retries.inc()
        self.queue.add(key, wait_s, in_background=self.queue.is_in_background(key))
