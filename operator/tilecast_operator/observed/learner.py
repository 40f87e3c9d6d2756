"""What the cluster's runs teach: remembered in the statuses of pools and jobs, and learnt anew from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast import calibration
from tilecast.api.calibration import MAX_RUNS, PoolCalibration, PoolError, Seen, corrections, records, seen
from tilecast.api.status import TrainingJobStatus
from tilecast.calibration import LEVELS, Calibration, Run
from tilecast.spec import Floats
from tilecast_operator.observed.reports import ScoredForecast, Window

MAX_FIT = 512
"""Runs of all pools that are learnt from, the newest: the fit grows with their cube."""


@dataclass(frozen=True, slots=True)
class Score:
    """The forecast that a job is held to, and its measured steps."""

    forecast: ScoredForecast
    window: Window

    @classmethod
    def of(cls, status: TrainingJobStatus | None) -> Score | None:
        """What the status of a job keeps; None where that is nothing."""
        if status is None:
            return None
        forecast, window = ScoredForecast.of(status.forecast), Window.of(status.observed)
        return None if forecast is None or window is None else cls(forecast, window)

    def run(self) -> Run:
        """The same for calibration."""
        gpu, precision, family, scale, workload = self.forecast.group
        return Run(
            self.forecast.pool, gpu, precision, family, scale, workload,
            self.forecast.raw_seconds, self.window.seconds, self.window.samples,
        )  # fmt: skip


class Learner:
    """The newest runs of every pool, and what they teach."""

    def __init__(self) -> None:
        self.table = Calibration()
        self._runs: dict[str, Seen] = {}
        self._taught = Taught(Calibration(), (), np.zeros(0))

    def recall(self, pool: str, status: Mapping[str, Any]) -> None:
        """Take note of the runs that the status of a pool keeps, where they are not known better."""
        gpu = (status.get("summary") or {}).get("gpu")
        for item in seen(pool, str(gpu), status) if gpu else []:
            known = self._runs.get(item.uid)
            if known is None or known.time < item.time:
                self._runs[item.uid] = item

    def take(self, uid: str, score: Score) -> None:
        """Take note of a run as it is now. A pool keeps its newest."""
        item = self._runs[uid] = Seen(uid, score.window.time, score.run())
        of_pool = sorted(self._of(item.run.pool), key=lambda one: (one.time, one.uid))
        for old in of_pool[:-MAX_RUNS]:
            del self._runs[old.uid]

    def drop(self, uid: str) -> None:
        """Let go of a run."""
        self._runs.pop(uid, None)

    def adopt(self, taught: Taught) -> bool:
        """Take over what the runs teach; returns whether forecasts change by it."""
        self._taught = taught
        if not taught.table.differs(self.table):
            return False
        self.table = taught.table
        return True

    def pools(self) -> set[str]:
        """The pools that have had runs."""
        return {item.run.pool for item in self._runs.values()}

    def pool(self, name: str, gpu: str) -> tuple[PoolCalibration | None, PoolError | None]:
        """`calibration` and `error` of a pool's status; None where it has had no run."""
        own = self._of(name)
        if not own:
            return None, None
        found = PoolCalibration(corrections=corrections(self.table, gpu), runs=records(own))
        runs, errors = self._taught.runs, self._taught.errors
        mine = np.array([run.pool == name for run in runs], dtype=bool)
        if not mine.any():
            return found, None
        raw, calibrated = (round(float(np.median(column[mine])), 4) for column in (_raw(runs), errors))
        return found, PoolError(raw_ratio=raw, calibrated_ratio=calibrated)

    def drifted(self, name: str) -> int:
        """How many of a pool's runs no longer count, because newer ones contradict them."""
        members = [item.run for item in sorted(self._of(name), key=lambda one: (one.time, one.uid))]
        return calibration.drifted(members) or 0

    def biases(self) -> dict[tuple[str, str, str, str], float]:
        """Median signed relative error by GPU, precision, family and stage: raw, or calibrated without the run."""
        runs, errors = self._taught.runs, self._taught.errors
        found: dict[tuple[str, str, str, str], float] = {}
        if not runs:
            return found
        columns = {"raw": _raw(runs), "calibrated": errors}
        groups = [(run.gpu, run.precision, run.family) for run in runs]
        for group in set(groups):
            rows = np.array([one == group for one in groups])
            for stage, column in columns.items():
                found[(*group, stage)] = float(np.median(column[rows]))
        return found

    def ratios(self) -> dict[tuple[str, str, str], float]:
        """Correction by GPU, precision and family."""
        depth = dict(LEVELS)["kind"]
        return {
            (item.group[0], item.group[1], item.group[2]): item.ratio
            for item in self.table.corrections
            if len(item.group) == depth
        }

    def _of(self, pool: str) -> list[Seen]:
        return [item for item in self._runs.values() if item.run.pool == pool]

    def ordered(self) -> list[Run]:
        """The newest runs, oldest first."""
        return [item.run for item in sorted(self._runs.values(), key=lambda one: (one.time, one.uid))[-MAX_FIT:]]


@dataclass(frozen=True, slots=True)
class Taught:
    """What runs teach, those of them that count, and their signed relative errors under what the others teach, (n,)."""

    table: Calibration
    runs: tuple[Run, ...]
    errors: Floats

    @classmethod
    def by(cls, runs: Sequence[Run]) -> Taught:
        """What these runs teach, oldest first."""
        return cls(calibration.fit(runs), tuple(calibration.current(runs)), calibration.left_out(runs))


def _raw(runs: Sequence[Run]) -> Floats:
    """Signed relative errors of raw forecasts, (n,)."""
    return calibration.relative_error(
        np.array([run.predicted_s for run in runs]), np.array([run.observed_s for run in runs])
    )
