"""The API server's clock, which ages are measured by: that of this machine may be a day off."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

ROUNDING_S = 2.0
"""The header is of whole seconds and takes a moment to arrive; a clock further off was put back."""


class ServerClock:
    """Unix time as the API server last said it, carried on by a clock that only runs forward.

    Args:
        local: this machine's clock, until the API server has answered.
        timer: seconds that only grow.
    """

    def __init__(self, local: Callable[[], float] = time.time, timer: Callable[[], float] = time.monotonic) -> None:
        self._local = local
        self._timer = timer
        self._offset_s: float | None = None

    def note(self, date: str) -> None:
        """Take note of the Date header of an answer; one that is none is left alone."""
        try:
            offset_s = parsedate_to_datetime(date).timestamp() - self._timer()
        except (TypeError, ValueError):
            return
        # Of a header the fraction is cut off, so that the latest is nearest.
        if self._offset_s is None or not 0.0 <= self._offset_s - offset_s <= ROUNDING_S:
            self._offset_s = offset_s

    def __call__(self) -> float:
        """Unix time, s."""
        return self._local() if self._offset_s is None else self._timer() + self._offset_s
