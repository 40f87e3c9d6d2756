"""Read suspects alone, without other readers.

An object is a suspect if an earlier process died while it read the object and others. While a suspect is read, no other
thread reads anything, so that another death shows which object caused it.
"""

from __future__ import annotations

import threading
from collections import Counter


class ReadIsolation:
    """Lock under which threads read objects concurrently, except that a suspect is read alone.

    Methods identify an object by its note in the journal.
    """

    def __init__(self) -> None:
        self.suspects: frozenset[bytes] = frozenset()
        """Objects to read alone. They are set before anything is read."""
        self._changed = threading.Condition()
        self._readers = Counter[tuple[int, bytes]]()
        """Number of times that a thread is reading an object, by thread id and note."""
        self._alone: bytes | None = None
        """Suspect that is being read or is next. All other readers wait."""

    def try_enter(self, note: bytes) -> bool:
        """Register this thread as a reader if it may read an object now. Return whether it may."""
        if not self.suspects:
            return True
        with self._changed:
            return self._try_admit(note)

    def enter(self, note: bytes, limit_s: float | None = None) -> None:
        """Wait until this thread may read an object, then register it as a reader.

        After `limit_s` seconds the thread stops waiting and reads the object concurrently. None means no limit.
        """
        if self.suspects:
            with self._changed:
                if not self._changed.wait_for(lambda: self._try_admit(note), limit_s):
                    self._readers[threading.get_ident(), note] += 1

    def leave(self, note: bytes) -> None:
        """Record that this thread has finished reading an object."""
        if not self.suspects:
            return
        with self._changed:
            self._readers[threading.get_ident(), note] -= 1
            self._readers += Counter()  # without readers that have left
            if self._alone == note and not any(read == note for _, read in self._readers):
                self._alone = None
            self._changed.notify_all()

    def _try_admit(self, note: bytes) -> bool:
        if self._alone not in (None, note):
            return False
        thread = threading.get_ident()
        if note in self.suspects:
            self._alone = note
            if any(reader != thread for reader, _ in self._readers):
                return False
        self._readers[thread, note] += 1
        return True
