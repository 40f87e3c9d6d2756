"""Cache of the newest results of slow computations, limited in number and in bytes."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

from tilecast.hardware import Pool
from tilecast_operator.pickles import measure_pickled_size

log = logging.getLogger("tilecast")

ResultT = TypeVar("ResultT")

MOST_BYTES = 16 * 2**20
"""Largest size of a cache in bytes of pickled results. Pools do not count, because the operator has them anyway."""


class ResultCache(Generic[ResultT]):
    """Cache of results by key. Concurrent requests for one key share one computation.

    If there are too many results, or they are too large, the least recently used finished ones are dropped. Failures
    are not cached.

    Args:
        size: Largest number of results.
        shared: Types of parts that results share with other objects. These parts do not count.
    """

    def __init__(self, size: int, shared: tuple[type, ...] = (Pool,)) -> None:
        self._size = size
        self._shared = shared
        self._results: OrderedDict[Hashable, asyncio.Future[ResultT]] = OrderedDict()
        self._weights: dict[asyncio.Future[ResultT], int] = {}
        self.bytes = 0
        """Bytes of the cached results."""

    def __len__(self) -> int:
        return len(self._results)

    async def get(self, key: Hashable, compute: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the result of a key. If it is not cached, compute and cache it."""
        result = self._results.get(key)
        if result is None:
            result = self._results[key] = asyncio.ensure_future(compute())
            result.add_done_callback(partial(self._record_size, key))
        self._results.move_to_end(key)
        return await asyncio.shield(result)

    def drop(self, key: Hashable) -> None:
        """Drop the result of a key."""
        if (result := self._results.pop(key, None)) is not None:
            self.bytes -= self._weights.pop(result, 0)

    def clear(self) -> None:
        """Drop all results."""
        self._results.clear()
        self._weights.clear()
        self.bytes = 0

    def _record_size(self, key: Hashable, ended: asyncio.Future[ResultT]) -> None:
        failed = ended.cancelled() or ended.exception() is not None  # whoever asked may be gone by now
        if self._results.get(key) is not ended:
            return
        if failed:
            self.drop(key)
            return
        try:
            size = measure_pickled_size(ended.result(), self._shared)
        except Exception:
            log.exception("an answer cannot be weighed")
            size = 0
        self._weights[ended] = size
        self.bytes += size
        while len(self._weights) > self._size or (self.bytes > MOST_BYTES and len(self._weights) > 1):
            self.drop(next(key for key, result in self._results.items() if result in self._weights))
