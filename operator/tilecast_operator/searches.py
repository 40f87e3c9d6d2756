"""Where searches run, and in which order: in threads of the operator, or in processes of their own where there are
cores for them; of those that wait the shortest first."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeAlias

from tilecast.advise import Advice, Request
from tilecast.hardware import Pool
from tilecast_operator import pickles
from tilecast_operator.settings import RECURSION_LIMIT
from tilecast_operator.turns import Turns

Advise: TypeAlias = Callable[[Request, Sequence[Pool]], Advice]

log = logging.getLogger("tilecast")

PATIENCE = 50.0
"""A search waits for others that came so many times its length later, and for none after those."""
MOST_PATIENCE_S = 2.0
"""However long it is, it waits for none that came this much later: a job that is held has to go within seconds."""
NEWEST = 0.2
"""Share of the newest search in what one of its kind is expected to take."""


class Searches:
    """Runs searches, beside the event loop that asks for them.

    Args:
        advise: the search; where it runs in processes, a function of a module.
        threads: of the operator, where it has no processes.
        processes: of their own; 0 for none.
    """

    def __init__(self, advise: Advise, threads: int, processes: int) -> None:
        self._advise = advise
        self._processes = processes
        self._executor: Executor = _started(processes) if processes else ThreadPoolExecutor(threads, "search")
        self._turns = Turns(processes + 1 if processes else threads)
        """A process has its next search at hand, and one that dies had no more than these."""
        self._expected_s: dict[Hashable, float] = {}
        """What searches take, by their kind."""

    async def run(
        self, request: Request, pools: Sequence[Pool], counted: Callable[[Advice, float], None] | None = None
    ) -> Advice:
        """The advice; raises as the search does. A process that dies takes no search along, for another does it; only
        one that dies again, alone, raises BrokenProcessPool.

        Args:
            request: what is asked.
            pools: those to search.
            counted: called with the advice and how long the search took, without its wait, in seconds.
        """
        kind = (request.workload.model.family, request.precisions, request.batches is None, len(pools))
        expected_s = self._expected_s.get(kind, 0.0)
        async with self._turns.take(time.monotonic() + min(PATIENCE * expected_s, MOST_PATIENCE_S)):
            advice, spent_s = await self._run(request, pools)
        known_s = self._expected_s.get(kind, spent_s)
        self._expected_s[kind] = known_s + NEWEST * (spent_s - known_s)
        if counted is not None:
            counted(advice, spent_s)
        return advice

    async def _run(self, request: Request, pools: Sequence[Pool]) -> tuple[Advice, float]:
        executor = self._executor
        try:
            return await self._search(executor, request, pools)
        except BrokenProcessPool:
            if self._executor is executor:
                log.warning("a process that searches has ended; another is started")
                executor.shutdown(wait=False)
                self._executor = _started(self._processes)
        alone = _started(1)
        try:
            return await self._search(alone, request, pools)
        finally:
            alone.shutdown(wait=False)

    def stop(self) -> None:
        """End the threads or processes once they are done with what they do."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _search(self, executor: Executor, request: Request, pools: Sequence[Pool]) -> tuple[Advice, float]:
        loop, asked = asyncio.get_running_loop(), (request, tuple(pools))
        if not self._processes:
            return await loop.run_in_executor(executor, _timed, self._advise, *asked)
        data = await loop.run_in_executor(executor, _pickled, self._advise, *asked)
        answer: tuple[Advice, float] = pickles.load(data, (request, *pools))
        return answer


def _pickled(advise: Advise, request: Request, pools: Sequence[Pool]) -> bytes:
    """The same without request and pools: the answers of a thousand jobs share those of the operator."""
    return pickles.dump(_timed(advise, request, pools), (request, *pools))


def _timed(advise: Advise, request: Request, pools: Sequence[Pool]) -> tuple[Advice, float]:
    """An advice and how many seconds it took where it was made."""
    began = time.monotonic()
    advice = advise(request, pools)
    return advice, time.monotonic() - began


def _started(processes: int) -> Executor:
    # A fork would carry over locks that other threads hold.
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _prepare)


def _prepare() -> None:
    """Make this process one that searches: it ends with the operator, whatever that ended by."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION_LIMIT))
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(0)
