"""Caches for results of pure functions, all of which can be emptied at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """Cache of results by key, which drops the least recently used result."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()
        _MEMOS.append(self)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the stored result for the key, or the result of `make` if none is stored."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
        value = make()
        with self._lock:
            self._results[key] = value
            if len(self._results) > self._size:
                self._results.popitem(last=False)
        return value

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._results.clear()


_MEMOS: list[Memo[Any]] = []


def clear_all() -> None:
    """Empty all caches of the process."""
    for memo in _MEMOS:
        memo.clear()
