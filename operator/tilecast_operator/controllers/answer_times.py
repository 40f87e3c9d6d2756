"""How long answers take: from a question, new or changed, to its written answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import Gauge, Histogram

from tilecast_operator.cluster.kinds import Key
from tilecast_operator.cluster.view import seconds

ROUNDING_S = 1.0
"""Times of creation are whole seconds."""


class AnswerTimes:
    """The open questions. Belongs to one event loop.

    Args:
        durations: takes the seconds of each answer, by kind.
        oldest: shows how long the oldest question of each kind has been open.
        clock: the API server's, Unix time.
        timer: seconds that only grow.
    """

    def __init__(
        self,
        durations: Histogram,
        oldest: Gauge,
        clock: Callable[[], float],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._durations = durations
        self._oldest = oldest
        self._clock = clock
        self._timer = timer
        self._since: dict[Key, float] = {}

    def expect(self, kind: str) -> None:
        """Count the answers to a kind from zero, so that the first is an increase."""
        self._durations.labels(kind)
        self._oldest.labels(kind).set_function(lambda: self._oldest_s(kind))

    def open(self, kind: str) -> dict[Key, float]:
        """The open questions of a kind, and for how many seconds they have been so."""
        now_s = self._timer()
        return {key: now_s - since for key, since in self._since.items() if key.kind == kind}

    def _oldest_s(self, kind: str) -> float:
        return max(self.open(kind).values(), default=0.0)

    def ask(self, key: Key, created: str = "") -> None:
        """Take note of a question, unless one is open.

        Args:
            key: of the job.
            created: when the job was created, where it was never answered: its event may have come late.
        """
        created_s = seconds(created)
        age_s = 0.0 if created_s is None else max(0.0, self._clock() - created_s - ROUNDING_S)
        self._since.setdefault(key, self._timer() - age_s)

    def answer(self, key: Key) -> None:
        """Take note that an answer was written; only the first after a question counts."""
        since = self._since.pop(key, None)
        if since is not None:
            self._durations.labels(key.kind).observe(self._timer() - since)

    def forget(self, key: Key) -> None:
        """Take a question back."""
        self._since.pop(key, None)
