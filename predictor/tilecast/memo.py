"""Caches for the results of pure functions. `clear_all_memos` empties all caches at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """A thread-safe cache of at most `size` results by key, which drops the least recently used result."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()
        _MEMOS.append(self)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the result stored under a key. If there is none, call `make`, store its result and return it."""
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
        """Drop all results of this cache."""
        with self._lock:
            self._results.clear()


def once(make: Callable[[], Value]) -> Callable[[], Value]:
    """Return a function that calls `make` at its first call and returns that result at every call.

    If several threads call the function at the same time, one of them makes the result and all get the same object.
    With `functools.cache`, each thread would make its own.
    """
    lock, results = threading.Lock(), list[Value]()

    def get() -> Value:
        if not results:
            with lock:
                if not results:
                    results.append(make())
        return results[0]

    return get


_MEMOS: list[Memo[Any]] = []


def clear_all_memos() -> None:
    """Empty every `Memo` of the process."""
    for memo in _MEMOS:
        memo.clear()
