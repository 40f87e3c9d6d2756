"""Store of every watched object, by kind, each with its UID and resource version.

Events may arrive in any order, late, twice, or about an object that another one of the same name has replaced. The
cache resolves this once for all controllers, which listen to it and read from it. Objects that they write come back
through `CacheTable.store_written_object`.
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
class CachedObject(Generic[ValueT]):
    """Object as the cache last saw it, parsed, with its UID and resource version."""

    uid: str
    resource_version: str
    value: ValueT

    def is_newer_than(self, other: CachedObject[ValueT]) -> bool:
        """Return whether this state is later than another state. Return True if the order is unknown.

        The other state may belong to a deleted object of the same name.
        """
        return _is_newer_version(self.resource_version, other.resource_version)


Listener: TypeAlias = Callable[[Key, CachedObject[ValueT] | None, CachedObject[ValueT] | None], None]
"""Function to call with a key, the object before and the object now. None means no object."""


class CacheTable(Generic[ValueT]):
    """Cached objects of one kind, or of several kinds with one parser."""

    def __init__(
        self,
        parse: Callable[[Document], ValueT],
        select_part: Callable[[Document], Document | None] = lambda body: body,
    ) -> None:
        self._parse = parse
        self._select_part = select_part
        """Function that returns the part of an object that may be read, or None."""
        self._objects: dict[Key, CachedObject[ValueT]] = {}
        self._listeners: list[Listener[ValueT]] = []
        self.is_kept: Callable[[Key, ValueT], bool] = lambda key, value: True
        """Function that returns whether an object is worth keeping. Others are dropped at once."""
        self.is_ours: Callable[[str], bool | None] = lambda namespace: True
        """Function that returns whether a namespace belongs to this operator, or None as long as that is unknown."""
        self._postponed: dict[Key, Document] = {}
        """Objects of namespaces for which `is_ours` is still unknown."""
        self.last_new_s = time.monotonic()
        """Time of the last new object, by the monotonic clock."""
        self.on_removed: Callable[[Key], None] = lambda key: None
        """Function to call with the key of a removed object, before the listeners."""

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._objects))

    def get(self, key: Key) -> CachedObject[ValueT] | None:
        """Return the stored object of a key, or None."""
        return self._objects.get(key)

    def values(self) -> Iterator[ValueT]:
        """Iterate over the stored values of all objects."""
        return (entry.value for entry in self._objects.values())

    def items(self) -> Iterator[tuple[Key, ValueT]]:
        """Iterate over the keys and stored values of all objects."""
        return ((key, entry.value) for key, entry in self._objects.items())

    def add_listener(self, listener: Listener[ValueT]) -> None:
        """Add a function that is called whenever an object is added, changed or removed."""
        self._listeners.append(listener)

    def put_object(self, body: Document) -> None:
        """Store a reported object, if the operator handles its namespace and no newer state is stored."""
        key, known = Key.from_object(body), self._objects.get(Key.from_object(body))
        is_ours = self.is_ours(key.namespace)
        if not is_ours:
            if is_ours is None:
                self._postponed[key] = body
            return
        if known is not None and not _is_newer_version(_get_resource_version(body), known.resource_version):
            return
        selected = self._select_part(body)
        if selected is None:
            return
        now = self._parse_object(selected)
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
        """Remove a deleted object. A newer object of the same name stays."""
        key = Key.from_object(body)
        self._postponed.pop(key, None)
        known = self._objects.get(key)
        if known is not None and known.uid == str(body["metadata"].get("uid", known.uid)):
            self._drop_object(key, known)

    def add_or_drop_namespace(self, namespace: str) -> None:
        """Store the postponed objects of a namespace if this operator handles it.

        If another operator handles it, remove all its objects. If that is still unknown, keep them postponed.
        """
        for key in [key for key in self._postponed if key.namespace == namespace]:
            self.put_object(self._postponed.pop(key))
        if self.is_ours(namespace) is False:
            for key in [key for key in self._objects if key.namespace == namespace]:
                self.forget_object(key)

    def forget_object(self, key: Key) -> None:
        """Remove an object that the API server no longer has."""
        if (known := self._objects.get(key)) is not None:
            self._drop_object(key, known)

    def store_written_object(self, body: Document, *, is_new: bool = False) -> CachedObject[ValueT]:
        """Store the object that a write returned, without calling listeners, and return its stored state.

        Args:
            body: the object.
            is_new: whether to store an object that is not in the cache. Updates pass False, because the object may be
                deleted.
        """
        key, now = Key.from_object(body), self._parse_object(self._select_part(body) or body)
        known = self._objects.get(key)
        if is_new if known is None else now.is_newer_than(known):
            self._objects[key] = now
        return now

    def _parse_object(self, body: Document) -> CachedObject[ValueT]:
        return CachedObject(str(body["metadata"].get("uid", "")), _get_resource_version(body), self._parse(body))

    def _drop_object(self, key: Key, known: CachedObject[ValueT]) -> None:
        del self._objects[key]
        self.on_removed(key)
        self._notify_listeners(key, known, None)

    def _notify_listeners(
        self, key: Key, before: CachedObject[ValueT] | None, now: CachedObject[ValueT] | None
    ) -> None:
        for listener in self._listeners:
            listener(key, before, now)


class ObjectCache:
    """The tables of all watched kinds. Belongs to one event loop.

    Args:
        tables: table of each kind, by name.
        journal: journal in which an object is noted while it is read.
        quarantine: quarantine that limits which part of an object may be read.
    """

    def __init__(self, tables: Mapping[str, CacheTable[Any]], journal: Journal, quarantine: Quarantine) -> None:
        self._tables = tables
        self._journal = journal
        self.quarantine = quarantine

    def put_object(self, body: Document) -> None:
        """Store an object that the API server reported in the table of its kind."""
        with self._journal.record_reading(Key.from_object(body)):
            self._tables[str(body["kind"])].put_object(body)

    def remove_object(self, body: Document) -> None:
        """Remove a deleted object from the table of its kind."""
        self.quarantine.remove_object(Key.from_object(body))
        self._tables[str(body["kind"])].remove_object(body)

    def set_removal_callback(self, on_removed: Callable[[Key], None]) -> None:
        """Set the function that is called with the key of every removed object, before any listener."""
        for table in self._tables.values():
            table.on_removed = on_removed

    def table(self, key: Key) -> CacheTable[Any]:
        """Return the table for an object's key."""
        return self._tables[key.kind]


def _get_resource_version(body: Document) -> str:
    return str(body["metadata"].get("resourceVersion", ""))


def _is_newer_version(version: str, other: str) -> bool:
    is_ordered = version.isdigit() and other.isdigit()
    return not is_ordered or int(version) > int(other)
