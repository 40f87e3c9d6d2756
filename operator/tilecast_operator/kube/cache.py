"""One store of every watched object, by kind, each with its uid and resource version.

Events may arrive in any order, late, twice, or about an object that another one of the same name has replaced; the
cache sorts that out once for all. Controllers listen and read. Objects that they write come back through
`CacheTable.store_written`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from tilecast_operator.kube.journal import Journal
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.quarantine import Quarantine

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Stored(Generic[ValueT]):
    """Last seen state of an object."""

    uid: str
    resource_version: str
    value: ValueT

    def is_newer_than(self, other: Stored[ValueT]) -> bool:
        """Return whether this state is later than the other; True if that is unknown.

        The other may be of an earlier object of the same name.
        """
        return _is_newer_version(self.resource_version, other.resource_version)


Listener: TypeAlias = Callable[[Key, Stored[ValueT] | None, Stored[ValueT] | None], None]
"""Called with a key, what was there and what is there now; None for no object."""


class CacheTable(Generic[ValueT]):
    """Cached objects of one kind, or of several kinds with one parser."""

    def __init__(
        self, read: Callable[[Document], ValueT], sift: Callable[[Document], Document | None] = lambda body: body
    ) -> None:
        self._read = read
        self._sift = sift
        """Returns the part of an object that may be read, if any."""
        self._objects: dict[Key, Stored[ValueT]] = {}
        self._listeners: list[Listener[ValueT]] = []
        self.is_kept: Callable[[Key, ValueT], bool] = lambda key, value: True
        """Whether an object is of any use; others are forgotten at once."""
        self.is_ours: Callable[[str], bool | None] = lambda namespace: True
        """Whether the objects of a namespace belong to this operator; None while that is unknown."""
        self._set_aside: dict[Key, Document] = {}
        """Objects for which that is still unknown."""
        self.last_new_s = time.monotonic()
        """When the last new object came, by the monotonic clock."""
        self.gone: Callable[[Key], None] = lambda key: None
        """Called with the key of an object that is gone, before the listeners are."""

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._objects))

    def get(self, key: Key) -> Stored[ValueT] | None:
        """Return the object of a key; None if there is none."""
        return self._objects.get(key)

    def values(self) -> Iterator[ValueT]:
        """Iterate over the stored values of all objects."""
        return (entry.value for entry in self._objects.values())

    def items(self) -> Iterator[tuple[Key, ValueT]]:
        """Iterate over the keys and stored values of all objects."""
        return ((key, entry.value) for key, entry in self._objects.items())

    def add_listener(self, listener: Listener[ValueT]) -> None:
        """Add a function that is called whenever an object comes, changes or goes."""
        self._listeners.append(listener)

    def put_object(self, body: Document) -> None:
        """Record that an object exists."""
        key, known = Key.from_object(body), self._objects.get(Key.from_object(body))
        is_ours = self.is_ours(key.namespace)
        if not is_ours:
            if is_ours is None:
                self._set_aside[key] = body
            return
        if known is not None and not _is_newer_version(_resource_version(body), known.resource_version):
            return
        sifted = self._sift(body)
        if sifted is None:
            return
        now = self._parse_object(sifted)
        is_kept = self.is_kept(key, now.value)
        if known is not None and (known.uid != now.uid or not is_kept):
            self._drop_object(key, known)
            known = None
        if not is_kept:
            return
        if known is None:
            self.last_new_s = time.monotonic()
        self._objects[key] = now
        self._notify_listeners(key, known, now)

    def remove_object(self, body: Document) -> None:
        """Record that an object is gone; a later object of the same name stays."""
        key = Key.from_object(body)
        self._set_aside.pop(key, None)
        known = self._objects.get(key)
        if known is not None and known.uid == str(body["metadata"].get("uid", known.uid)):
            self._drop_object(key, known)

    def decide_ownership(self, namespace: str) -> None:
        """Add the objects of a namespace that were set aside if they are ours by now; drop all if they are not."""
        for key in [key for key in self._set_aside if key.namespace == namespace]:
            self.put_object(self._set_aside.pop(key))
        if self.is_ours(namespace) is False:
            for key in [key for key in self._objects if key.namespace == namespace]:
                self.forget_object(key)

    def forget_object(self, key: Key) -> None:
        """Drop an object that the API server no longer has."""
        if (known := self._objects.get(key)) is not None:
            self._drop_object(key, known)

    def store_written(self, body: Document, *, is_new: bool = False) -> Stored[ValueT]:
        """Store the result of a write without calling listeners; return it.

        Args:
            body: the object.
            is_new: whether the object may be new to the cache; without it, an object that is gone by now stays gone.
        """
        key, now = Key.from_object(body), self._parse_object(self._sift(body) or body)
        known = self._objects.get(key)
        if is_new if known is None else now.is_newer_than(known):
            self._objects[key] = now
        return now

    def _parse_object(self, body: Document) -> Stored[ValueT]:
        return Stored(str(body["metadata"].get("uid", "")), _resource_version(body), self._read(body))

    def _drop_object(self, key: Key, known: Stored[ValueT]) -> None:
        del self._objects[key]
        self.gone(key)
        self._notify_listeners(key, known, None)

    def _notify_listeners(self, key: Key, before: Stored[ValueT] | None, now: Stored[ValueT] | None) -> None:
        for listener in self._listeners:
            listener(key, before, now)


class ObjectCache:
    """The tables of all kinds that are watched. Belongs to one event loop.

    Args:
        tables: table of each kind, by name.
        journal: where an object is noted while it is read.
        quarantine: says what may be read of each object.
    """

    def __init__(self, tables: Mapping[str, CacheTable[Any]], journal: Journal, quarantine: Quarantine) -> None:
        self._tables = tables
        self._journal = journal
        self.quarantine = quarantine

    def put_object(self, body: Document) -> None:
        """Record that an object exists."""
        with self._journal.note_reading(Key.from_object(body)):
            self._tables[str(body["kind"])].put_object(body)

    def remove_object(self, body: Document) -> None:
        """Record that an object is gone."""
        self.quarantine.remove_object(Key.from_object(body))
        self._tables[str(body["kind"])].remove_object(body)

    def on_object_gone(self, gone: Callable[[Key], None]) -> None:
        """Set the function that is called with the key of every object that is gone, before any listener."""
        for table in self._tables.values():
            table.gone = gone

    def table(self, key: Key) -> CacheTable[Any]:
        """Return the table that an object is in."""
        return self._tables[key.kind]


def _resource_version(body: Document) -> str:
    return str(body["metadata"].get("resourceVersion", ""))


def _is_newer_version(version: str, other: str) -> bool:
    is_ordered = version.isdigit() and other.isdigit()
    return not is_ordered or int(version) > int(other)
