"""Times that answers take, from a new or changed question to its written answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import Gauge, Histogram

from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.records import RecordPart, Records
from tilecast_operator.kube.times import seconds

ROUNDING_S = 1.0
"""Resolution of times of creation, which are whole seconds."""


class AnswerTimes:
    """Open questions, and since when they are open. Belongs to one event loop.

    Args:
        records: Records of the jobs; a question ends with its job's record.
        durations: Histogram of the seconds that each answer takes, by kind.
        oldest: Gauge of how long the oldest question of each kind has been open.
        clock: Clock of the API server, in Unix time.
        timer: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        records: Records,
        durations: Histogram,
        oldest: Gauge,
        clock: Callable[[], float],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._durations = durations
        self._oldest = oldest
        self._clock = clock
        self._timer = timer
        self._since: RecordPart[float] = records.part(dropped=self._count_closed)
        self._open: Counter[tuple[str, str]] = Counter()
        """Number of open questions by kind and namespace."""

    def register_kind(self, kind: str) -> None:
        """Count the answers to a kind from zero, so that the first one is an increase."""
        self._durations.labels(kind)
        self._oldest.labels(kind).set_function(lambda: self._oldest_s(kind))

    def seconds_open(self, key: Key) -> float:
        """Return for how many seconds a question has been open; 0 if it is not."""
        since = self._since.get(key)
        return 0.0 if since is None else self._timer() - since

    def count_open(self, kind: str, namespace: str) -> int:
        """Return how many questions of a kind are open in a namespace."""
        return self._open[kind, namespace]

    def _oldest_s(self, kind: str) -> float:
        since = min((since for key, since in self._since.items() if key.kind == kind), default=None)
        return 0.0 if since is None else self._timer() - since

    def open_question(self, key: Key, created: str = "") -> None:
        """Record a question, unless one is open already.

        Args:
            key: Key of the job.
            created: When the job was created, if it was never answered, since its event may have come late; else empty.
        """
        created_s = seconds(created)
        age_s = 0.0 if created_s is None else max(0.0, self._clock() - created_s - ROUNDING_S)
        if key not in self._since:
            self._since[key] = self._timer() - age_s
            self._open[key.kind, key.namespace] += 1

    def record_answer(self, key: Key) -> None:
        """Record that an answer was written; only the first one after a question counts."""
        since = self._close_question(key)
        if since is not None:
            self._durations.labels(key.kind).observe(self._timer() - since)

    def withdraw_question(self, key: Key) -> None:
        """Withdraw a question."""
        self._close_question(key)

    def _close_question(self, key: Key) -> float | None:
        """Return since when a question is open, and close it; None if it is not open."""
        since = self._since.pop(key, None)
        if since is not None:
            self._count_closed(key, since)
        return since

    def _count_closed(self, key: Key, _: float) -> None:
        """Count a question that is no longer open."""
        group = key.kind, key.namespace
        self._open[group] -= 1
        if not self._open[group]:
            del self._open[group]
