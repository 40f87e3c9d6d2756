"""Limit on the number of callers that run at once, fair between namespaces.

Work that holds up the start of a job goes first, and each namespace has a budget of seconds in a minute.
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
"""Seconds over which the use of a namespace is added up."""
HELD_FIRST_S = 10.0
"""Seconds that the held jobs of a namespace may use within that time ahead of everybody else's jobs. Later ones wait
for the turn of their namespace, so that holding many jobs stops nobody."""
LEAST_S = 1e-3
"""Shortest time that a turn is expected to take, in seconds, so that a turn of unknown length counts too."""


@dataclass(frozen=True, slots=True)
class PermitRequest:
    """Request of a namespace for a turn, and whether a job in the namespace waits for the turn before it starts."""

    namespace: str = ""
    is_held: bool = False
    """Whether the start of a job waits for it."""


NOBODY = PermitRequest()


class RecentUse:
    """Seconds that each namespace has used within the last minute.

    Args:
        clock: monotonic time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, deque[tuple[int, float]]] = {}
        """Pairs of a whole second and the time used in it, so that there are at most as many as seconds."""
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
    """Permission of a caller to run."""

    __slots__ = ("queue", "request", "seconds")

    def __init__(self, permit_request: PermitRequest, queue: FairQueue[_Waiter]) -> None:
        self.request = permit_request
        """For whom the turn is."""
        self.queue = queue
        """The queue in which the turn is charged."""
        self.seconds: float | None = None
        """Seconds that the turn took, if they differ from the time for which it was held."""


@dataclass(eq=False, slots=True)
class _Waiter:
    """Caller that waits for a turn."""

    rank: float
    expected_s: float
    turn: asyncio.Future[Permit]
    is_held_by: dict[str, bool] = field(default_factory=dict)
    """Namespaces that the ticket waits for, and whether a job of each waits for it to start."""


class FairLimiter:
    """Limit on the number of tasks that run at once. Belongs to one event loop.

    If the limit is reached, a task waits. Tasks that delay the start of a job are first. Then namespaces alternate.
    Namespaces over their budget are last.

    Args:
        max_running: largest number of tasks that run at once.
        budget_s: seconds that a namespace may use within a minute before it waits behind the others.
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
        """Tickets of all namespaces that the start of a job waits for."""
        self._everybody: FairQueue[_Waiter] = FairQueue()
        self._claims: dict[Hashable, list[PermitRequest]] = {}
        """Claims by key: what is requested now, and by whom."""
        self._tickets: dict[Hashable, list[_Waiter]] = {}
        """Waiting tickets by key."""

    def find_namespaces_over_budget(self) -> dict[str, float]:
        """Return the namespaces over their budget, each with its used seconds of the last minute."""
        return self._used.find_namespaces_over(self._budget_s)

    def find_namespaces_behind_others(self) -> dict[str, float]:
        """Return the namespaces over their budget. If no other namespace had a turn lately, return none."""
        return self.find_namespaces_over_budget() if len(self._used.find_namespaces_over(0.0)) > 1 else {}

    @contextmanager
    def add_request(self, key: Hashable, permit_request: PermitRequest) -> Iterator[None]:
        """Record in a `with` block that the claim's namespace waits for the search with this key."""
        claims = self._claims.setdefault(key, [])
        claims.append(permit_request)
        for ticket in self._tickets.get(key, ()):
            self._enqueue(ticket, permit_request)
        try:
            yield
        finally:
            claims.remove(permit_request)
            for ticket in self._tickets.get(key, ()):
                self._withdraw_request(ticket, permit_request, claims)
            if not claims:
                del self._claims[key]

    @asynccontextmanager
    async def acquire(
        self, key: Hashable, permit_request: PermitRequest = NOBODY, rank: float = 0.0, expected_s: float = 0.0
    ) -> AsyncIterator[Permit]:
        """Wait for a turn, which lasts until the end of a `with` block.

        Args:
            key: key of the work, under which `add_request` recorded namespaces.
            permit_request: namespace that takes the turn if no namespace claims the key.
            rank: order within the namespace. The lowest rank is next.
            expected_s: how long the turn is expected to take, in seconds.
        """
        claims, expected_s = self._claims.get(key) or [permit_request], max(expected_s, LEAST_S)
        if self._free:
            self._free -= 1
            turn = Permit(max(claims, key=lambda one: one.is_held), self._everybody)
            turn.queue.charge(turn.request.namespace, expected_s)
        else:
            turn = await self._wait_for_permit(key, claims, rank, expected_s)
        namespace, began_s = turn.request.namespace, self._clock()
        try:
            yield turn
        finally:
            seconds = self._clock() - began_s if turn.seconds is None else turn.seconds
            turn.queue.charge(namespace, seconds - expected_s)
            if namespace:
                self._used.add(namespace, seconds)
            if turn.request.is_held:
                self._used_held.add(namespace, seconds)
            self._pass_permit_on()

    async def _wait_for_permit(
        self, key: Hashable, requests: Iterable[PermitRequest], rank: float, expected_s: float
    ) -> Permit:
        ticket = _Waiter(rank, expected_s, asyncio.get_running_loop().create_future())
        for claim in requests:
            self._enqueue(ticket, claim)
        tickets = self._tickets.setdefault(key, [])
        tickets.append(ticket)
        try:
            return await ticket.turn
        except asyncio.CancelledError:
            self._remove_ticket(ticket)
            if ticket.turn.done() and not ticket.turn.cancelled():
                self._pass_permit_on()
            raise
        finally:
            tickets.remove(ticket)
            if not tickets:
                del self._tickets[key]

    def _enqueue(self, ticket: _Waiter, permit_request: PermitRequest) -> None:
        """Add a ticket to the queue of the claim's namespace."""
        namespace, known = permit_request.namespace, ticket.is_held_by
        if ticket.turn.done() or known.get(namespace) in (True, permit_request.is_held):
            return
        known[namespace] = permit_request.is_held
        self._everybody.push(ticket, namespace, (not permit_request.is_held, ticket.rank))
        if permit_request.is_held:
            self._held.push(ticket, namespace, (ticket.rank,))

    def _withdraw_request(self, ticket: _Waiter, permit_request: PermitRequest, others: list[PermitRequest]) -> None:
        """Remove a claim from a ticket. The ticket then waits only for its other claims.

        A ticket without claims keeps its place, because the next caller with its key needs its result.
        """
        if permit_request in others or ticket.turn.done():
            return
        namespace = permit_request.namespace
        if permit_request.is_held:
            ticket.is_held_by[namespace] = False
            self._held.withdraw(ticket, namespace)
            self._everybody.push(ticket, namespace, (True, ticket.rank))
        if others and all(other.namespace != namespace for other in others):
            del ticket.is_held_by[namespace]
            self._everybody.withdraw(ticket, namespace)

    def _remove_ticket(self, ticket: _Waiter) -> None:
        self._held.remove(ticket)
        self._everybody.remove(ticket)

    def _pass_permit_on(self) -> None:
        """Pass an ended turn to the next ticket, if there is one."""
        while (chosen := self._next_ticket()) is not None:
            ticket, turn = chosen
            self._remove_ticket(ticket)
            if not ticket.turn.done():
                turn.queue.charge(turn.request.namespace, ticket.expected_s)
                ticket.turn.set_result(turn)
                return
        self._free += 1

    def _next_ticket(self) -> tuple[_Waiter, Permit] | None:
        def may_overtake(_: _Waiter, namespace: str) -> bool:
            return self._used_held.sum_used_s(namespace) < HELD_FIRST_S

        def is_within_budget(ticket: _Waiter, namespace: str) -> bool:
            return ticket.is_held_by[namespace] or self._used.sum_used_s(namespace) < self._budget_s

        queue = self._held
        if (chosen := queue.pop(may_overtake)) is None:
            queue = self._everybody
            chosen = queue.pop(is_within_budget) or queue.pop()
        if chosen is None:
            return None
        ticket, namespace = chosen
        return ticket, Permit(PermitRequest(namespace, ticket.is_held_by[namespace]), queue)
