"""Learn corrections for each namespace of a cluster from the runs of all namespaces.

A namespace follows its own runs and those of trusted namespaces (`calibration`). The influence of every other namespace
is bounded (`consensus`): its runs change no forecast of another namespace by more than `MAX_INFLUENCE`. Forecasts
change further only if several namespaces agree. Which runs of a namespace count (enough observations, no outlier, not
superseded, not in doubt) depends only on its own runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import numpy as np

from tilecast.learning.calibration import (
    DRIFT_WINDOW,
    LEVELS,
    MAX_RATIO,
    SOFTWARE,
    Calibration,
    Run,
    RunFit,
    keep_current_runs,
    shipped_deviations,
)
from tilecast.learning.consensus import Consensus, find_consensus
from tilecast.spec import Floats

MAX_JUMP = 1.5
"""Largest factor between a run's deviation and that of earlier runs that needs no confirmation by another run."""
AGREEMENT = 1.25
"""Largest factor between the deviations of two runs that agree."""
MIN_CONFIRMING_RUNS = 2
"""Number of runs that must agree on a jump."""
MAX_INFLUENCE = 0.1
"""Largest relative change of other namespaces' forecasts that one namespace can cause."""


class NamespaceCalibration:
    """Runs of all namespaces of a cluster, and the calibration of each namespace that follows from them.

    Args:
        runs: the runs, oldest first.
        trusted: namespaces whose runs have full weight for every namespace.
        previous: an earlier calibration, from which fits of unchanged namespaces are reused.
    """

    def __init__(
        self, runs: Iterable[Run], trusted: Collection[str] = (), previous: NamespaceCalibration | None = None
    ) -> None:
        self._sigmas = shipped_deviations()
        of_namespace: dict[str, list[Run]] = {}
        for run in runs:
            of_namespace.setdefault(run.namespace, []).append(run)
        self.runs = {
            name: tuple(keep_current_runs(keep_accepted_runs(members))) for name, members in of_namespace.items()
        }
        """Runs that count, by namespace."""
        self._trusted = tuple(name for name in self.runs if name in trusted)
        self._own_fits: dict[str, RunFit] = {
            name: previous._own_fits[name]
            if previous is not None and name in previous._own_fits and previous.runs[name] == members
            else RunFit.from_runs(members, self._sigmas)
            for name, members in self.runs.items()
            if members and name not in trusted
        }
        self._fits: dict[str | None, RunFit] = {}
        shared = sum(self._sigmas[name] ** 2 for name in (*(name for name, _ in LEVELS), SOFTWARE))
        self._limit = math.log1p(MAX_INFLUENCE) / math.sqrt(shared)

    @cached_property
    def bounded(self) -> frozenset[str]:
        """Namespaces whose influence on the forecasts of other namespaces is cut to `MAX_INFLUENCE`."""
        bounded = zip(self._own_fits, self._consensus.is_at_limit, strict=True)
        return frozenset(name for name, is_bounded in bounded if is_bounded)

    def fit(self, namespace: str | None = None) -> Calibration:
        """Return the corrections for the jobs of a namespace. None means any namespace without runs."""
        return self._find_fit(namespace).calibration()

    def leave_one_out_errors(self, namespace: str) -> Floats:
        """Return the signed relative error of the forecast for each run of a namespace, (n,).

        The forecast of a run is corrected by all other runs.
        """
        error: Floats = np.expm1(self._find_fit(namespace).compute_leave_one_out_residuals())
        return error[: len(self.runs[namespace])]

    @property
    def _consensus(self) -> Consensus:
        self._find_fit(None)
        return self._common_consensus

    def _find_fit(self, namespace: str | None) -> RunFit:
        if namespace not in self._fits:
            self._fits[namespace] = self._fit_namespace(namespace)
        return self._fits[namespace]

    def _fit_namespace(self, namespace: str | None) -> RunFit:
        others = {name: one for name, one in self._own_fits.items() if name != namespace}
        if namespace in self._own_fits and not self._trusted:
            own = self._own_fits[namespace]
        else:
            full = dict.fromkeys(name for name in (namespace, *self._trusted) if name in self.runs)
            own = RunFit.from_runs([run for name in full for run in self.runs[name or ""]], self._sigmas)
        contributors, start = [one.contributor for one in others.values()], None
        if namespace is not None:
            shifts = dict(zip(self._own_fits, self._consensus.shifts, strict=True))
            start = np.array([shifts[name] for name in others])
        consensus = find_consensus(contributors, self._limit, own.contributor, start)
        if namespace is None:
            self._common_consensus = consensus
        return own.with_consensus_prior(consensus, tuple(others.values()))


def keep_accepted_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of a namespace that may be learned from (see `find_quarantine_reasons`)."""
    return [run for run, why in zip(runs, find_quarantine_reasons(runs), strict=True) if not why]


def find_quarantine_reasons(runs: Sequence[Run]) -> list[str]:
    """Return why each run of a namespace is excluded from learning, or "" if it is not.

    The reason is "Absurd" or "Unconfirmed". An absurd run differs from its forecast by more than the factor
    `MAX_RATIO`. An unconfirmed run differs by more than the factor `MAX_JUMP` from the median of the earlier runs of
    its pool, and fewer than `MIN_CONFIRMING_RUNS` runs of the pool, itself included, agree with it. The first
    `DRIFT_WINDOW // 2` runs of a pool are neither checked nor counted as agreeing. Only the newest `DRIFT_WINDOW` runs
    of a pool are checked.

    Args:
        runs: the runs, oldest first.
    """
    deviation = np.array([run.deviation for run in runs])
    reasons = ["Absurd" if abs(one) > math.log(MAX_RATIO) else "" for one in deviation]
    rows_of: dict[str, list[int]] = {}
    for row, run in enumerate(runs):
        if not reasons[row]:
            rows_of.setdefault(run.pool, []).append(row)
    for rows in rows_of.values():
        column = deviation[rows]
        for number in range(max(DRIFT_WINDOW // 2, len(rows) - DRIFT_WINDOW), len(rows)):
            distance = abs(column[number] - np.median(column[:number]))
            agreeing = np.abs(column[DRIFT_WINDOW // 2 :] - column[number]) <= math.log(AGREEMENT)
            if distance > math.log(MAX_JUMP) and agreeing.sum() < MIN_CONFIRMING_RUNS:
                reasons[rows[number]] = "Unconfirmed"
    return reasons
