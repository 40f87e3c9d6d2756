"""Measure how long jobs wait for advice after a new or changed request, for metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import Gauge, Histogram

from tilecast_operator.kube.controller_state import ControllerState, StateTable
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.times import parse_time

ROUNDING_S = 1.0
"""Resolution of creation times in seconds. Kubernetes rounds them to whole seconds."""


class AdviceWaits:
    """Record of the jobs that wait for advice, and since when. Belongs to one event loop.

    Args:
        records: Records of the jobs. A job stops waiting when its record is dropped.
        durations: Histogram of the seconds that jobs wait for advice, by kind of job.
        oldest: Gauge of the longest present wait in seconds, by kind of job.
        clock: Clock of the API server, in Unix time.
        timer: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        records: ControllerState,
        durations: Histogram,
        oldest: Gauge,
        clock: Callable[[], float],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._durations = durations
        self._oldest = oldest
        self._clock = clock
        self._timer = timer
        self._since: StateTable[float] = records.add_table(on_drop=self._subtract_waiting)
        self._open: Counter[tuple[str, str]] = Counter()
        """Number of waiting jobs, by kind and namespace."""

    def register_kind(self, kind: str) -> None:
        """Create the metrics of a kind of job, so that they are exported before the first advice."""
        self._durations.labels(kind)
        self._oldest.labels(kind).set_function(lambda: self._longest_wait_s(kind))

    def get_waiting_seconds(self, key: Key) -> float:
        """Return how many seconds a job has waited for advice, or 0 if it does not wait."""
        since = self._since.get(key)
        return 0.0 if since is None else self._timer() - since

    def count_waiting(self, kind: str, namespace: str) -> int:
        """Return the number of jobs of a kind in a namespace that wait for advice."""
        return self._open[kind, namespace]

    def _longest_wait_s(self, kind: str) -> float:
        since = min((since for key, since in self._since.items() if key.kind == kind), default=None)
        return 0.0 if since is None else self._timer() - since

    def start_wait(self, key: Key, created: str = "") -> None:
        """Record that a job begins to wait for advice, unless it already waits.

        Args:
            key: Key of the job.
            created: Time of the job's creation (RFC 3339), at which its first wait begins. For a later wait, pass "".
                It begins now.
        """
        created_s = parse_time(created)
        age_s = 0.0 if created_s is None else max(0.0, self._clock() - created_s - ROUNDING_S)
        if key not in self._since:
            self._since[key] = self._timer() - age_s
            self._open[key.kind, key.namespace] += key in self._since

    def record_outcome(self, key: Key) -> None:
        """End a job's wait, and add its seconds to the histogram. Ignore jobs that do not wait."""
        since = self.end_wait(key)
        if since is not None:
            self._durations.labels(key.kind).observe(self._timer() - since)

    def end_wait(self, key: Key) -> float | None:
        """End a job's wait without advice. Return when it began, or None if the job does not wait."""
        since = self._since.pop(key, None)
        if since is not None:
            self._subtract_waiting(key, since)
        return since

    def _subtract_waiting(self, key: Key, _: float) -> None:
        """Subtract a job that no longer waits from the count of waiting jobs."""
        group = key.kind, key.namespace
        self._open[group] -= 1
        if not self._open[group]:
            del self._open[group]
