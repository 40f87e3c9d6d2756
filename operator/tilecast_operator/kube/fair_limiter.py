"""Limit on the number of callers that run at once, fair between namespaces.

Work that delays the start of a job goes first, and each namespace has a budget of seconds per minute.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from tilecast_operator.kube.fair_queue import FairQueue

WINDOW_S = 60.0
"""Seconds over which the use of a namespace is summed."""
HELD_FIRST_S = 10.0
"""Seconds within the window in which held jobs of a namespace go ahead of all other jobs.

After that, they wait for the permits of their own namespace. So holding many jobs blocks nobody else.
"""
LEAST_S = 1e-3
"""Shortest expected use of a permit, in seconds, so that a permit of unknown length counts too."""


@dataclass(frozen=True, slots=True)
class PermitRequest:
    """Request of a namespace for a permit, which tells whether a job cannot start before the permit is given."""

    namespace: str = ""
    is_held: bool = False
    """Whether a job cannot start before it."""


NOBODY = PermitRequest()


class RecentUse:
    """Seconds that each namespace has used within the last minute.

    Args:
        clock: monotonic time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, deque[tuple[int, float]]] = {}
        """Pairs of a whole second and the time used in it, so that there is at most one pair per second."""
        self._tidied_s = clock()

    def add(self, namespace: str, seconds: float) -> None:
        """Add seconds that a namespace used just now."""
        if self._clock() - self._tidied_s > WINDOW_S:
            self._tidied_s = self._clock()
            self.find_namespaces_over(0.0)
        entries, now = self._used.setdefault(namespace, deque()), int(self._clock())
        if entries and entries[-1][0] == now:
            seconds += entries.pop()[1]
        entries.append((now, seconds))

    def sum_used_s(self, namespace: str) -> float:
        """Return the seconds that a namespace has used within the last minute."""
        entries, since = self._used.get(namespace), self._clock() - WINDOW_S
        if entries is None:
            return 0.0
        while entries and entries[0][0] <= since:
            entries.popleft()
        if not entries:
            del self._used[namespace]
        return math.fsum(seconds for _, seconds in entries)

    def find_namespaces_over(self, limit_s: float) -> dict[str, float]:
        """Return the used seconds of each namespace that has used at least `limit_s` seconds."""
        used = {namespace: self.sum_used_s(namespace) for namespace in list(self._used)}
        return {namespace: seconds for namespace, seconds in used.items() if 0.0 < seconds >= limit_s}


class Permit:
    """Permission to run, given to one caller."""

    __slots__ = ("queue", "request", "seconds")

    def __init__(self, permit_request: PermitRequest, queue: FairQueue[_Waiter]) -> None:
        self.request = permit_request
        """Request that received the permit."""
        self.queue = queue
        """Queue that charges the permit's use to its namespace."""
        self.seconds: float | None = None
        """Seconds of the work, if they differ from the time for which the permit was held."""


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller that waits for a permit."""

    rank: float
    expected_s: float
    permit: asyncio.Future[Permit]
    is_held_by: dict[str, bool] = field(default_factory=dict)
    """Namespaces that the waiter waits for, each with whether a job there cannot start before it."""


class FairLimiter:
    """Limit on the number of tasks that run at once. Belongs to one event loop.

    If the limit is reached, a task waits. Tasks that delay the start of a job are first. Then namespaces take turns.
    Namespaces over their budget are last.

    Args:
        max_running: largest number of tasks that run at once.
        budget_s: seconds per minute that a namespace may use before it waits behind the others.
        clock: monotonic time, in seconds.
    """

    def __init__(
        self, max_running: int, budget_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._free = max_running
        self._budget_s = budget_s
        self._clock = clock
        self._used, self._used_held = RecentUse(clock), RecentUse(clock)
        self._held: FairQueue[_Waiter] = FairQueue()
        """Waiters of all namespaces that delay the start of a job."""
        self._everybody: FairQueue[_Waiter] = FairQueue()
        self._requests: dict[Hashable, list[PermitRequest]] = {}
        """Pending requests by key."""
        self._waiters: dict[Hashable, list[_Waiter]] = {}
        """Waiting waiters by key."""

    def find_namespaces_over_budget(self) -> dict[str, float]:
        """Return the namespaces over their budget, each with the seconds it used in the last minute."""
        return self._used.find_namespaces_over(self._budget_s)

    def find_namespaces_behind_others(self) -> dict[str, float]:
        """Return the namespaces over their budget, each with the seconds it used in the last minute.

        The result is empty if no other namespace has had a permit lately, because then they wait behind nobody.
        """
        return self.find_namespaces_over_budget() if len(self._used.find_namespaces_over(0.0)) > 1 else {}

    @contextmanager
    def add_request(self, key: Hashable, permit_request: PermitRequest) -> Iterator[None]:
        """Record that a namespace waits for the work with this key, for the duration of a `with` block."""
        requests = self._requests.setdefault(key, [])
        requests.append(permit_request)
        for waiter in self._waiters.get(key, ()):
            self._enqueue(waiter, permit_request)
        try:
            yield
        finally:
            requests.remove(permit_request)
            for waiter in self._waiters.get(key, ()):
                self._withdraw_request(waiter, permit_request, requests)
            if not requests:
                del self._requests[key]

    @asynccontextmanager
    async def acquire(
        self, key: Hashable, permit_request: PermitRequest = NOBODY, rank: float = 0.0, expected_s: float = 0.0
    ) -> AsyncIterator[Permit]:
        """Wait for a permit, which lasts until the end of the `with` block.

        Args:
            key: key of the work, under which `add_request` recorded namespaces.
            permit_request: request to use if `add_request` recorded none.
            rank: order within the namespace. The lowest rank is next.
            expected_s: expected use of the permit, in seconds.
        """
        requests, expected_s = self._requests.get(key) or [permit_request], max(expected_s, LEAST_S)
        if self._free:
            self._free -= 1
            permit = Permit(max(requests, key=lambda one: one.is_held), self._everybody)
            permit.queue.charge(permit.request.namespace, expected_s)
        else:
            permit = await self._wait_for_permit(key, requests, rank, expected_s)
        namespace, began_s = permit.request.namespace, self._clock()
        try:
            yield permit
        finally:
            seconds = self._clock() - began_s if permit.seconds is None else permit.seconds
            permit.queue.charge(namespace, seconds - expected_s)
            if namespace:
                self._used.add(namespace, seconds)
            if permit.request.is_held:
                self._used_held.add(namespace, seconds)
            self._pass_permit_on()

    async def _wait_for_permit(
        self, key: Hashable, requests: Iterable[PermitRequest], rank: float, expected_s: float
    ) -> Permit:
        waiter = _Waiter(rank, expected_s, asyncio.get_running_loop().create_future())
        for request in requests:
            self._enqueue(waiter, request)
        waiters = self._waiters.setdefault(key, [])
        waiters.append(waiter)
        try:
            return await waiter.permit
        except asyncio.CancelledError:
            self._remove_waiter(waiter)
            if waiter.permit.done() and not waiter.permit.cancelled():
                self._pass_permit_on()
            raise
        finally:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[key]

    def _enqueue(self, waiter: _Waiter, permit_request: PermitRequest) -> None:
        """Add a waiter to the queue of the requesting namespace."""
        namespace, known = permit_request.namespace, waiter.is_held_by
        if waiter.permit.done() or known.get(namespace) in (True, permit_request.is_held):
            return
        known[namespace] = permit_request.is_held
        self._everybody.push(waiter, namespace, (not permit_request.is_held, waiter.rank))
        if permit_request.is_held:
            self._held.push(waiter, namespace, (waiter.rank,))

    def _withdraw_request(self, waiter: _Waiter, permit_request: PermitRequest, others: list[PermitRequest]) -> None:
        """Remove a request from a waiter, which then waits only for its other requests.

        A waiter without requests keeps its place, because the next caller with its key needs its result.
        """
        if permit_request in others or waiter.permit.done():
            return
        namespace = permit_request.namespace
        if permit_request.is_held:
            waiter.is_held_by[namespace] = False
            self._held.withdraw(waiter, namespace)
            self._everybody.push(waiter, namespace, (True, waiter.rank))
        if others and all(other.namespace != namespace for other in others):
            del waiter.is_held_by[namespace]
            self._everybody.withdraw(waiter, namespace)

    def _remove_waiter(self, waiter: _Waiter) -> None:
        self._held.remove(waiter)
        self._everybody.remove(waiter)

    def _pass_permit_on(self) -> None:
        """Pass a returned permit to the next waiter, if there is one."""
        while (chosen := self._find_next_waiter()) is not None:
            waiter, permit = chosen
            self._remove_waiter(waiter)
            if not waiter.permit.done():
                permit.queue.charge(permit.request.namespace, waiter.expected_s)
                waiter.permit.set_result(permit)
                return
        self._free += 1

    def _find_next_waiter(self) -> tuple[_Waiter, Permit] | None:
        def may_overtake(_: _Waiter, namespace: str) -> bool:
            return self._used_held.sum_used_s(namespace) < HELD_FIRST_S

        def is_within_budget(waiter: _Waiter, namespace: str) -> bool:
            return waiter.is_held_by[namespace] or self._used.sum_used_s(namespace) < self._budget_s

        queue = self._held
        if (chosen := queue.pop(may_overtake)) is None:
            queue = self._everybody
            chosen = queue.pop(is_within_budget) or queue.pop()
        if chosen is None:
            return None
        waiter, namespace = chosen
        return waiter, Permit(PermitRequest(namespace, waiter.is_held_by[namespace]), queue)
