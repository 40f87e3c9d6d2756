"""The last results of a pure function whose arguments can be compared but not hashed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """Results by equality of their keys; the one that was not asked for longest goes first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: list[tuple[Key, Value]] = []
        self._lock = threading.Lock()
        _MEMOS.append(self)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The result for the key, made where it is not at hand."""
        if (found := self.find(lambda other: other == key)) is not None:
            return found
        value = make()
        self.put(key, value)
        return value

    def find(self, matches: Callable[[Key], bool]) -> Value | None:
        """The result whose key matches, the latest first."""
        with self._lock:
            kept = list(self._kept)
        for entry in reversed(kept):
            if matches(entry[0]):
                with self._lock:
                    self._kept = [*(other for other in self._kept if other is not entry), entry]
                return entry[1]
        return None

    def put(self, key: Key, value: Value) -> None:
        """Keep a result."""
        with self._lock:
            self._kept = [*self._kept, (key, value)][-self._size :]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept = []


_MEMOS: list[Memo[Any, Any]] = []


def forget() -> None:
    """Empty every memo, as in a process that has answered nothing yet."""
    for one in _MEMOS:
        one.clear()
