"""Metrics on jobs whose advice measured runs correct: how many, whose runs, and by how much."""

from __future__ import annotations

import math
import statistics
from functools import partial

from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.records import RecordPart, Records
from tilecast_operator.metrics import OWN_RUNS, Metrics


class CorrectedJobs:
    """Metrics on the effect that measured runs have on advice. Belongs to one event loop."""

    def __init__(self, records: Records, metrics: Metrics) -> None:
        self._runs: RecordPart[str] = records.part()
        """Origin of the runs that correct a job: one of `OWN_RUNS`."""
        self._ratios: RecordPart[float] = records.part()
        """Factor by which the runs change the step of a job's first offer."""
        for run in OWN_RUNS:
            metrics.own_runs_jobs.labels(run).set_function(partial(self._count_jobs, run))
            metrics.own_runs_change.labels(run).set_function(partial(self._median_change, run))

    def set_origin(self, key: Key, run: str | None) -> None:
        """Set the origin of the runs that correct a job; None if no runs do."""
        if run is None:
            self._runs.pop(key, None)
        else:
            self._runs[key] = run

    def set_ratio(self, key: Key, ratio: float | None) -> None:
        """Set the factor by which runs change the first offer of a job; None if there is no factor."""
        if ratio is None:
            self._ratios.pop(key, None)
        else:
            self._ratios[key] = ratio

    def _list_ratios(self, run: str) -> list[float]:
        return [ratio for key, ratio in self._ratios.items() if self._runs.get(key) == run]

    def _count_jobs(self, run: str) -> int:
        return len(self._list_ratios(run))

    def _median_change(self, run: str) -> float:
        """Return the median relative change of the step; NaN if no job is corrected."""
        ratios = self._list_ratios(run)
        return statistics.median(abs(ratio - 1) for ratio in ratios) if ratios else math.nan
