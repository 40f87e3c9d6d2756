"""Where searches run: in threads of the operator, or in processes of their own where there are cores for them."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeAlias

from tilecast.advise import Advice, Request
from tilecast.hardware import Pool
from tilecast_operator.settings import RECURSION_LIMIT

Advise: TypeAlias = Callable[[Request, Sequence[Pool]], Advice]

log = logging.getLogger("tilecast")


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
        self._slots = asyncio.Semaphore(processes + 1)
        """Of processes: each has its next search at hand, and one that dies had no more than these."""

    async def run(self, request: Request, pools: Sequence[Pool]) -> Advice:
        """The advice; raises as the search does. A process that dies takes no search along, for another does it; only
        one that dies again, alone, raises BrokenProcessPool."""
        if not self._processes:
            return await self._search(self._executor, request, pools)
        async with self._slots:
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

    async def _search(self, executor: Executor, request: Request, pools: Sequence[Pool]) -> Advice:
        return await asyncio.get_running_loop().run_in_executor(executor, self._advise, request, tuple(pools))


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
