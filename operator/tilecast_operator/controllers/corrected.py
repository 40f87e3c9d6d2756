"""Which jobs' advice is corrected by measured runs, whose, and by how much."""

from __future__ import annotations

import math
import statistics
from functools import partial

from tilecast_operator.cluster.kinds import Key
from tilecast_operator.metrics import OWN_RUNS, Metrics


class CorrectedJobs:
    """What runs do to the advice of TrainingJobs, as metrics show it. Belongs to one event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._runs: dict[Key, str] = {}
        """Whose runs a job goes by: one of `OWN_RUNS`."""
        self._ratios: dict[Key, float] = {}
        """What they multiply the step of its first offer by."""
        for run in OWN_RUNS:
            metrics.own_runs_jobs.labels(run).set_function(partial(self._count, run))
            metrics.own_runs_change.labels(run).set_function(partial(self._typical, run))

    def ask(self, key: Key, run: str | None) -> None:
        """Take note of whose runs a job goes by."""
        if run is None:
            self._runs.pop(key, None)
        else:
            self._runs[key] = run

    def write(self, key: Key, ratio: float | None) -> None:
        """Take note of what a status says that they do; None is nothing."""
        if ratio is None:
            self._ratios.pop(key, None)
        else:
            self._ratios[key] = ratio

    def release(self, key: Key) -> None:
        """Let go of a job."""
        self._runs.pop(key, None)
        self._ratios.pop(key, None)

    def _of(self, run: str) -> list[float]:
        return [ratio for key, ratio in self._ratios.items() if self._runs.get(key) == run]

    def _count(self, run: str) -> int:
        return len(self._of(run))

    def _typical(self, run: str) -> float:
        ratios = self._of(run)
        return statistics.median(abs(ratio - 1) for ratio in ratios) if ratios else math.nan
