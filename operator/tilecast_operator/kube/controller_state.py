"""Records in which controllers remember facts about objects, one record for each object's key.

A record consists of parts. Each controller declares its own part, and reads and fills it. When an object is deleted,
its whole record is dropped here, and no part of it can be stored any more. So no controller has to clean up after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tilecast_operator.kube.kinds import Key

ValueT = TypeVar("ValueT")


class StateTable(dict[Key, ValueT]):
    """One part of all records, by key. Values are not stored for objects that no longer exist.

    Args:
        records: the records that this is a part of.
        make: function that makes the value for a key that has none, or None if only the controller sets it.
        on_drop: function to call with the key and the value of each dropped record.
    """

    def __init__(
        self, records: ControllerState, make: Callable[[], ValueT] | None, on_drop: Callable[[Key, ValueT], None]
    ) -> None:
        super().__init__()
        self._records = records
        self._make = make
        self.on_drop = on_drop

    def __setitem__(self, key: Key, value: ValueT) -> None:
        if self._records.may_exist(key):
            super().__setitem__(key, value)

    def get_or_make(self, key: Key) -> ValueT:
        """Return the value of a key. If the key has none, make and store one.

        Raises:
            KeyError: there is no value, and this part cannot make one.
        """
        if self._make is None:
            return self[key]
        return self.setdefault(key, self._make())

    def setdefault(self, key: Key, default: ValueT) -> ValueT:
        """Return the value of a key. If the key has none, store and return `default`."""
        if key not in self:
            self[key] = default
        return self.get(key, default)


class ControllerState:
    """The records of all keys. Belongs to one event loop."""

    def __init__(self) -> None:
        self._parts: list[StateTable[Any]] = []
        self.may_exist: Callable[[Key], bool] = lambda key: True
        """Function that returns whether the object of a key may exist. If not, nothing is recorded for it."""

    def add_table(
        self, make: Callable[[], ValueT] | None = None, on_drop: Callable[[Key, ValueT], None] = lambda key, value: None
    ) -> StateTable[ValueT]:
        """Declare a part of every record, and return it. `StateTable` describes the arguments."""
        part = StateTable(self, make, on_drop)
        self._parts.append(part)
        return part

    def drop_record(self, key: Key) -> None:
        """Drop the record of an object that no longer exists."""
        for part in self._parts:
            if key in part:
                part.on_drop(key, part.pop(key))

    def __contains__(self, key: Key) -> bool:
        return any(key in part for part in self._parts)
