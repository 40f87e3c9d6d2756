"""Durations from a new or changed question of a job to the written answer, for metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import Gauge, Histogram

from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.records import RecordPart, Records
from tilecast_operator.kube.times import parse_time

ROUNDING_S = 1.0
"""Resolution of times of creation, which are whole seconds."""


class AnswerTimes:
    """Times at which open questions of jobs were asked. Belongs to one event loop.

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
        self._since: RecordPart[float] = records.add_part(dropped=self._count_closed)
        self._open: Counter[tuple[str, str]] = Counter()
        """Number of open questions by kind and namespace."""

    def register_kind(self, kind: str) -> None:
        """Create the metrics of a kind of job, so that they exist before the first answer."""
        self._durations.labels(kind)
        self._oldest.labels(kind).set_function(lambda: self._oldest_s(kind))

    def seconds_open(self, key: Key) -> float:
        """Return the seconds since a job's question was opened; 0 if the job has no open question."""
        since = self._since.get(key)
        return 0.0 if since is None else self._timer() - since

    def count_open(self, kind: str, namespace: str) -> int:
        """Return how many questions of a kind are open in a namespace."""
        return self._open[kind, namespace]

    def _oldest_s(self, kind: str) -> float:
        since = min((since for key, since in self._since.items() if key.kind == kind), default=None)
        return 0.0 if since is None else self._timer() - since

    def open_question(self, key: Key, created: str = "") -> None:
        """Record that a job has a question without an answer, unless one is recorded already.

        Args:
            key: Key of the job.
            created: When the job was created, if it was never answered, since its event may have come late; else empty.
        """
        created_s = parse_time(created)
        age_s = 0.0 if created_s is None else max(0.0, self._clock() - created_s - ROUNDING_S)
        if key not in self._since:
            self._since[key] = self._timer() - age_s
            self._open[key.kind, key.namespace] += key in self._since

    def record_answer(self, key: Key) -> None:
        """Close a job's question and observe its duration; do nothing if no question is open."""
        since = self.withdraw_question(key)
        if since is not None:
            self._durations.labels(key.kind).observe(self._timer() - since)

    def withdraw_question(self, key: Key) -> float | None:
        """Close a job's question and return the time at which it was opened; None if none is open."""
        since = self._since.pop(key, None)
        if since is not None:
            self._count_closed(key, since)
        return since

    def _count_closed(self, key: Key, _: float) -> None:
        """Reduce the count of open questions by a closed one."""
        group = key.kind, key.namespace
        self._open[group] -= 1
        if not self._open[group]:
            del self._open[group]
