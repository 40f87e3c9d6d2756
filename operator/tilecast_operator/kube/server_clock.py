"""Clock of the API server, which is used to measure ages. The clock of this machine may be a day off."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

ROUNDING_S = 2.0
"""Largest expected difference in seconds, because the header has whole seconds and takes a moment to arrive.

With a larger difference, the clock was changed.
"""


class ServerClock:
    """Unix time as last reported by the API server, continued by a clock that only runs forward.

    Args:
        local: this machine's clock, used until the API server has answered.
        timer: monotonic time, in seconds.
    """

    def __init__(self, local: Callable[[], float] = time.time, timer: Callable[[], float] = time.monotonic) -> None:
        self._local = local
        self._timer = timer
        self._offset_s: float | None = None

    def set_from_header(self, date: str) -> None:
        """Set the clock from an HTTP Date header. Ignore an unreadable header."""
        try:
            offset_s = parsedate_to_datetime(date).timestamp() - self._timer()
        except (TypeError, ValueError):
            return
        # The header drops the fraction of a second, so the latest of these times is the nearest.
        if self._offset_s is None or not 0.0 <= self._offset_s - offset_s <= ROUNDING_S:
            self._offset_s = offset_s

    def __call__(self) -> float:
        """Return Unix time, in seconds."""
        return self._local() if self._offset_s is None else self._timer() + self._offset_s
