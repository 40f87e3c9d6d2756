"""Caches for results of pure functions whose arguments can be compared but not hashed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

Key = TypeVar("Key")
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """Results by equality of their keys; the least recently used one is dropped first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: list[tuple[Key, Value]] = []
        self._lock = threading.Lock()
        _MEMOS.append(self)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the result for the key; call `make` where it is not stored."""
        if (stored := self.find(lambda other: other == key)) is not None:
            return stored
        value = make()
        self.put(key, value)
        return value

    def find(self, matches: Callable[[Key], bool]) -> Value | None:
        """Return the result whose key matches, the latest first."""
        with self._lock:
            items = list(self._entries)
        for entry in reversed(items):
            if matches(entry[0]):
                with self._lock:
                    self._entries = [*(other for other in self._entries if other is not entry), entry]
                return entry[1]
        return None

    def put(self, key: Key, value: Value) -> None:
        """Store a result."""
        with self._lock:
            self._entries = [*self._entries, (key, value)][-self._size :]

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._entries = []


class Lazy(Generic[Value]):
    """A value that is made when it is first needed."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make: Callable[[], Value] | None = make
        self._value: Value | None = None

    def __call__(self) -> Value:
        """Return the value; threads that call at once may make it twice."""
        if (make := self._make) is not None:
            self._value = make()
            self._make = None
        return cast("Value", self._value)


_MEMOS: list[Memo[Any, Any]] = []


def clear_all() -> None:
    """Empty every memo, as in a new process."""
    for one in _MEMOS:
        one.clear()
