"""Records by key: the state that controllers keep about an object, beside the object itself.

A record has parts. Each controller declares its part, and reads and fills it. When an object is gone, its whole record
is dropped here, so that no controller has to clean up after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tilecast_operator.kube.kinds import Key

ValueT = TypeVar("ValueT")


class RecordPart(dict[Key, ValueT]):
    """One part of all records, by key.

    Args:
        make: makes the value of a key that has none yet; None if only the controller can set it.
        dropped: called with each key whose record was dropped, and with the key's value.
    """

    def __init__(self, make: Callable[[], ValueT] | None, dropped: Callable[[Key, ValueT], None]) -> None:
        super().__init__()
        self._make = make
        self.dropped = dropped

    def of(self, key: Key) -> ValueT:
        """Return the value of a key, made first if there is none.

        Raises:
            KeyError: there is no value, and this part cannot make one.
        """
        value = self.get(key)
        if value is None:
            if self._make is None:
                raise KeyError(key)
            value = self[key] = self._make()
        return value


class Records:
    """The records of all keys. Belongs to one event loop."""

    def __init__(self) -> None:
        self._parts: list[RecordPart[Any]] = []

    def part(
        self, make: Callable[[], ValueT] | None = None, dropped: Callable[[Key, ValueT], None] = lambda key, value: None
    ) -> RecordPart[ValueT]:
        """Declare a part of every record; the arguments are those of `RecordPart`."""
        part = RecordPart(make, dropped)
        self._parts.append(part)
        return part

    def drop(self, key: Key) -> None:
        """Drop the record of an object that is gone."""
        for part in self._parts:
            if key in part:
                part.dropped(key, part.pop(key))

    def __contains__(self, key: Key) -> bool:
        return any(key in part for part in self._parts)
