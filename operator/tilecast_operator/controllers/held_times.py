"""Metrics on held jobs: their number, their waits and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tilecast_operator.controllers.job_advice import about
from tilecast_operator.kube.cache import Stored
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.records import RecordPart, Records
from tilecast_operator.kube.times import seconds
from tilecast_operator.metrics import Metrics


class HeldTimes:
    """Held jobs and the times since which they wait. Belongs to one event loop.

    Args:
        records: Records of the jobs.
        metrics: Metrics that count waits and outcomes.
        clock: Clock of the API server, in Unix time.
        outcomes: All possible outcomes of a job; each is counted from zero.
    """

    def __init__(self, records: Records, metrics: Metrics, clock: Callable[[], float], outcomes: Iterable[str]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._since: RecordPart[float] = records.part()
        metrics.held.set_function(lambda: len(self._since))
        metrics.oldest_held.set_function(self._oldest_s)
        for outcome in outcomes:
            metrics.placements.labels(outcome)

    def track_job(self, key: Key, before: Stored[Document] | None, now: Stored[Document]) -> None:
        """Begin or end the wait of a job that was seen.

        Args:
            key: Key of the job.
            before: The job as it was seen before; None for a new job, which has waited since its creation.
            now: The job as it was seen now.
        """
        job = about(now.value)
        if not job.is_held or job.is_owned:
            self._since.pop(key, None)
        elif key not in self._since:
            created_s = None if before else seconds(str(now.value["metadata"].get("creationTimestamp", "")))
            self._since[key] = self._clock() if created_s is None else created_s

    def held_since_s(self, key: Key) -> float | None:
        """Return the Unix time since which a job waits; None if the job does not wait."""
        return self._since.get(key)

    def record_release(self, key: Key, since_s: float | None, outcome: str) -> None:
        """End the wait of a released job, which began at `since_s` (Unix time), and count its outcome."""
        self._since.pop(key, None)
        if since_s is not None:
            self._metrics.placement_wait.observe(max(0.0, self._clock() - since_s))
        self.count_outcome(outcome)

    def count_outcome(self, outcome: str) -> None:
        """Count an outcome of a job."""
        self._metrics.placements.labels(outcome).inc()

    def _oldest_s(self) -> float:
        return max(0.0, self._clock() - min(self._since.values())) if self._since else 0.0
