"""Run searches in threads of the operator, or in search processes if there are cores for them.

Among the waiting searches of a namespace, the shortest goes first.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import queue
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from tilecast.advice import Advice, Request
from tilecast.hardware import Pool
from tilecast_operator import control_group, pickles
from tilecast_operator.kube.fair_limiter import FairLimiter
from tilecast_operator.kube.journal import Journal
from tilecast_operator.search_process import Cause, SearchLimits, SearchProcess

Advise: TypeAlias = Callable[[Request, Sequence[Pool]], Advice]

log = logging.getLogger("tilecast")

PATIENCE = 50.0
"""Time after its arrival in which shorter searches of its namespace can still overtake a search.

It is a multiple of the search's expected length.
"""
MOST_PATIENCE_S = 2.0
"""Longest such time in seconds, however long the search is."""
NEWEST = 0.2
"""Weight of the newest search in the expected duration of its kind."""


class SearchRunner:
    """Runner of searches outside the event loop.

    Args:
        advise: The search. It must be a module's function if it runs in processes.
        threads: Threads of the operator, used if there are no processes.
        processes: Number of search processes. With 0 the limits cannot be enforced.
        limits: Limits of each search in a process.
        restarted: Function to call, in a thread, with the cause whenever a process was replaced.
        budget_s: Seconds of searches per minute that a namespace may use before it waits behind the others.
        journal: Journal in which the requesting object is noted while a thread of this process searches.
    """

    def __init__(
        self,
        advise: Advise,
        threads: int,
        processes: int,
        limits: SearchLimits | None = None,
        restarted: Callable[[Cause], None] = lambda cause: None,
        budget_s: float = math.inf,
        journal: Journal | None = None,
    ) -> None:
        self._advise = advise
        self._journal = journal or Journal("", ())
        self._executor = ThreadPoolExecutor(processes or threads, "search")
        self._is_stopped = False
        search, limits = partial(_search_and_pickle, advise), limits or SearchLimits()
        if processes and (shortage := control_group.describe_memory_shortage(limits.memory_mib, control_group.ROOT)):
            log.warning("%s", shortage)
        self._processes = [SearchProcess(search, limits, restarted) for _ in range(processes)]
        self._idle: queue.SimpleQueue[SearchProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self.turns = FairLimiter(processes + 1 if processes else threads, budget_s)
        """Limiter of concurrent searches.

        It allows one more than there are processes, so that each has its next search ready.
        """
        self._began: dict[object, float] = {}
        """Time at which each current search began."""
        self._expected_s: dict[Hashable, float] = {}
        """Expected duration of a search, by kind."""

    async def run_search(
        self,
        request: Request,
        pools: Sequence[Pool],
        on_search: Callable[[Advice, float], None] | None = None,
        key: Hashable = None,
    ) -> Advice:
        """Wait for a permit, run a search and return its advice. If the search fails, raise its error.

        Args:
            request: The request.
            pools: The pools to search.
            on_search: Function to call with the advice and the seconds of the search without its wait.
            key: The key under which permits are requested.

        Raises:
            SearchInterruptedError: The search exceeded a limit of its process, or its process ended twice.
        """
        kind = (request.workload.model.family, request.precisions, request.batches is None, len(pools))
        expected_s = self._expected_s.get(kind, 0.0)
        rank = time.monotonic() + min(PATIENCE * expected_s, MOST_PATIENCE_S)
        async with self.turns.acquire(key, rank=rank, expected_s=expected_s) as turn:
            if self._is_stopped:
                # The turn came because another search was cancelled; nobody waits for the answer any more.
                raise asyncio.CancelledError
            search = partial(contextvars.copy_context().run, self._search, request, tuple(pools))
            advice, spent_s = await asyncio.get_running_loop().run_in_executor(self._executor, search)
            turn.seconds = spent_s
        known_s = self._expected_s.get(kind, spent_s)
        self._expected_s[kind] = known_s + NEWEST * (spent_s - known_s)
        if on_search is not None:
            on_search(advice, spent_s)
        return advice

    def stop(self) -> None:
        """Stop the processes. Threads end when their current work is done."""
        self._is_stopped = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.stop()

    def resident_bytes(self) -> int:
        """Return the resident memory of all search processes, in bytes."""
        return sum(process.resident_bytes for process in self._processes)

    def find_longest_running_s(self) -> float:
        """Return the seconds for which the oldest current search has run, or 0 if no search runs."""
        began = min(self._began.copy().values(), default=None)
        return 0.0 if began is None else time.monotonic() - began

    def _search(self, request: Request, pools: Sequence[Pool]) -> tuple[Advice, float]:
        """Search in this thread or in a search process. Return the advice and the search's seconds."""
        search = object()
        self._began[search] = time.monotonic()
        try:
            if not self._processes:
                return self._journal.call_recorded(_search_and_time, self._advise, request, pools)
            process = self._idle.get()
            try:
                data = process.call_function(request, pools)
            finally:
                self._idle.put(process)
            answer: tuple[Advice, float] = pickles.load(data, (request, *pools))
            return answer
        finally:
            del self._began[search]


def _search_and_pickle(advise: Advise, request: Request, pools: Sequence[Pool]) -> bytes:
    """Return a pickle of the advice and the search's seconds, without request and pools."""
    return pickles.dump(_search_and_time(advise, request, pools), (request, *pools))


def _search_and_time(advise: Advise, request: Request, pools: Sequence[Pool]) -> tuple[Advice, float]:
    """Search, and return the advice and the search's seconds."""
    began = time.monotonic()
    advice = advise(request, pools)
    return advice, time.monotonic() - began
