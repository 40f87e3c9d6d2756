"""Record which objects are being read, in a file that survives the process.

An object that kills the process while it is read would kill the next process too. Every thread has a slot in the file.
The slot has the key of the object that the thread is reading, and is empty otherwise. So after a sudden death, the
slots name the objects that were being read.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import threading
import types
from collections.abc import Callable, Container, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from tilecast_operator.kube.isolation import ReadIsolation
from tilecast_operator.kube.kinds import Key

ResultT = TypeVar("ResultT")

log = logging.getLogger("tilecast")

FILE = "journal"
SLOTS = 64
"""Number of slots of the file. The first has the state of the process, and each other one belongs to a thread.

Further threads record nothing.
"""
SLOT_BYTES = 512
"""Size of a slot. Kind, namespace and name of an object are shorter together."""
LENGTH_BYTES = 2
NOTHING = bytes(LENGTH_BYTES)
RUNNING, ENDED = b"running", b"ended  "
POLL_S = 0.005
"""Seconds between two attempts of a task to run its next step."""
LOOP_S = 0.2
"""Longest time, in seconds, for which a suspect blocks the event loop until other threads have finished reading."""

_CURRENT: ContextVar[bytes] = ContextVar("_CURRENT", default=NOTHING)
"""Note of the object that this task is reading. Threads and tasks that it starts inherit it."""


class _JournalSlot:
    """Region of the journal file that belongs to one thread."""

    __slots__ = ("note", "region")

    def __init__(self, region: memoryview | bytearray) -> None:
        self.region = region
        self.note = NOTHING


class Journal:
    """File that names the object that each thread of this process is reading.

    Args:
        folder: folder of the file. If empty, the notes are kept in memory and are lost with the process.
        kinds: kinds of the objects that are read. A note of another kind is damaged.
    """

    def __init__(self, folder: str, kinds: Container[str]) -> None:
        self.suspects: tuple[Key, ...] = ()
        """Objects that the last process was reading when it died. Empty if it ended normally."""
        size = SLOTS * SLOT_BYTES
        self._map: mmap.mmap | bytearray = bytearray(size)
        if folder:
            try:
                self._map = _map_file(Path(folder) / FILE, size)
            except OSError as error:
                log.warning("journal: %s; what is read at a sudden end is not remembered", error)
            self.suspects = _read_suspects(bytes(self._map), kinds)
        self._view = memoryview(self._map)
        self._view[:] = bytes(size)
        self._view[: len(RUNNING)] = RUNNING
        self._numbers = itertools.count(1)
        self._local = threading.local()
        self._isolation = ReadIsolation()

    def isolate(self, keys: Iterable[Key]) -> None:
        """Set the suspects, which no thread may read while another thread reads. Call this before any read."""
        self._isolation.suspects = frozenset(map(_encode_key, keys))

    def close(self) -> None:
        """Record that this process ends normally."""
        self._view[: len(ENDED)] = ENDED

    @contextmanager
    def record_reading(self, key: Key) -> Iterator[None]:
        """Record, for the duration of a `with` block, that an object is being read."""
        slot, note = self._get_thread_slot(), _encode_key(key)
        self._isolation.enter(note, LOOP_S if note in self._isolation.suspects else 0.0)
        before = _swap_note(slot, note)
        try:
            yield
        finally:
            _swap_note(slot, before)
            self._isolation.leave(note)

    @types.coroutine
    def await_recorded(self, key: Key, work: Coroutine[Any, Any, ResultT]) -> Generator[Any, Any, ResultT]:
        """Await a coroutine. The journal names the object while the coroutine runs, but not while it waits.

        If the object is a suspect, every step of the coroutine waits until no other thread reads an object.
        """
        note, slot, isolation = _encode_key(key), self._get_thread_slot(), self._isolation
        token = _CURRENT.set(note)
        value, error = None, None
        try:
            while True:
                try:
                    # Keys without a name never wait: the work on such a key contains the steps of suspects.
                    while key.name and not isolation.try_enter(note):
                        yield from asyncio.sleep(POLL_S).__await__()
                except BaseException as raised:
                    value, error = None, raised
                    isolation.enter(note, 0.0)
                before = _swap_note(slot, note)
                try:
                    waited_for = work.send(value) if error is None else work.throw(error)
                except StopIteration as ended:
                    result: ResultT = ended.value
                    return result
                finally:
                    _swap_note(slot, before)
                    if key.name:
                        isolation.leave(note)
                try:
                    value, error = (yield waited_for), None
                except BaseException as raised:
                    value, error = None, raised
        finally:
            _CURRENT.reset(token)

    def call_recorded(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Call a function in a thread. The journal names the object that the calling task is reading."""
        slot, note = self._get_thread_slot(), _CURRENT.get()
        self._isolation.enter(note)
        before = _swap_note(slot, note)
        try:
            return function(*arguments)
        finally:
            _swap_note(slot, before)
            self._isolation.leave(note)

    def _get_thread_slot(self) -> _JournalSlot:
        slot: _JournalSlot | None = getattr(self._local, "slot", None)
        if slot is None:
            number = next(self._numbers)
            start = number * SLOT_BYTES
            region = self._view[start : start + SLOT_BYTES] if number < SLOTS else bytearray(SLOT_BYTES)
            slot = self._local.slot = _JournalSlot(region)
        return slot


def _map_file(path: Path, size: int) -> mmap.mmap:
    with path.open("a+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def _encode_key(key: Key) -> bytes:
    text = f"{key.kind}/{key.namespace}/{key.name}".encode()[: SLOT_BYTES - LENGTH_BYTES]
    return len(text).to_bytes(LENGTH_BYTES, "big") + text


def _swap_note(slot: _JournalSlot, note: bytes) -> bytes:
    """Write a note into a slot, and return the note that was there before."""
    before, slot.note = slot.note, note
    slot.region[: len(note)] = note
    return before


def _read_suspects(data: bytes, kinds: Container[str]) -> tuple[Key, ...]:
    """Return the objects that a process was reading when it died. After a normal end, return an empty tuple."""
    if not data.startswith(RUNNING):
        return ()
    keys = dict[Key, None]()
    for start in range(SLOT_BYTES, len(data), SLOT_BYTES):
        length = int.from_bytes(data[start : start + LENGTH_BYTES], "big")
        first = start + LENGTH_BYTES
        kind, _, rest = data[first : first + min(length, SLOT_BYTES)].decode(errors="replace").partition("/")
        namespace, _, name = rest.partition("/")
        if kind in kinds and name:
            keys[Key(kind, namespace, name)] = None
    return tuple(keys)
