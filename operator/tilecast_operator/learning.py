"""What the cluster's runs teach: remembered in the statuses of pools and jobs, and learnt anew from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast import calibration
from tilecast.calibration import LEVELS, Calibration, Run
from tilecast.manifests import calibration as kept
from tilecast.manifests.calibration import MAX_RUNS, Seen
from tilecast.spec import Floats
from tilecast_operator.observe import Window


@dataclass(frozen=True, slots=True)
class Score:
    """The forecast that a job is held to, as `status.forecast`, and its measured steps."""

    forecast: Mapping[str, Any]
    window: Window

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Score | None:
        """What the status of a job keeps; None where that is nothing."""
        forecast, window = status.get("forecast") or {}, Window.of(status.get("observed") or {})
        return cls(forecast, window) if window is not None and "rawSeconds" in forecast else None

    def run(self) -> Run:
        """The same for calibration."""
        gpu, precision, family, scale, workload = self.forecast["group"]
        return Run(
            self.forecast["pool"], gpu, precision, family, scale, workload,
            self.forecast["rawSeconds"], self.window.seconds, self.window.samples,
        )  # fmt: skip


class Learner:
    """The newest runs of every pool, and what they teach."""

    def __init__(self) -> None:
        self.table = Calibration()
        self._runs: dict[str, Seen] = {}

    def recall(self, pool: str, status: Mapping[str, Any]) -> None:
        """Take note of the runs that the status of a pool keeps, where they are not known better."""
        gpu = (status.get("summary") or {}).get("gpu")
        for item in kept.seen(pool, str(gpu), status) if gpu else []:
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

    def learn(self) -> bool:
        """Fit the runs; returns whether forecasts change by it."""
        table = calibration.fit(self._ordered())
        if not table.differs(self.table):
            return False
        self.table = table
        return True

    def pool(self, name: str, gpu: str) -> dict[str, Any]:
        """`calibration` and `error` of a pool's status; empty where it has had no run."""
        own = self._of(name)
        if not own:
            return {}
        ordered = self._ordered()
        runs = calibration.current(ordered)
        mine = np.array([run.pool == name for run in runs])
        raw = _raw(runs)
        return {
            "calibration": {"corrections": kept.corrections(self.table, gpu), "runs": kept.records(own)},
            "error": {
                "rawRatio": round(float(np.median(raw[mine])), 4),
                "calibratedRatio": round(float(np.median(calibration.left_out(ordered)[mine])), 4),
            },
        }

    def drifted(self, name: str) -> int:
        """How many of a pool's runs no longer count, because newer ones contradict them."""
        members = [item.run for item in sorted(self._of(name), key=lambda one: (one.time, one.uid))]
        return calibration.drifted(members) or 0

    def biases(self) -> dict[tuple[str, str, str, str], float]:
        """Median signed relative error by GPU, precision, family and stage: raw, or calibrated without the run."""
        runs = calibration.current(self._ordered())
        found: dict[tuple[str, str, str, str], float] = {}
        if not runs:
            return found
        columns = {
            "raw": _raw(runs),
            "calibrated": calibration.left_out(runs),
        }
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

    def _ordered(self) -> list[Run]:
        return [item.run for item in sorted(self._runs.values(), key=lambda one: (one.time, one.uid))]


def _raw(runs: Sequence[Run]) -> Floats:
    """Signed relative errors of raw forecasts, (n,)."""
    return calibration.relative_error(
        np.array([run.predicted_s for run in runs]), np.array([run.observed_s for run in runs])
    )
