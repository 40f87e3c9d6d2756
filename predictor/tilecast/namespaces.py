"""Learn corrections from runs that the namespaces of a cluster share.

A namespace follows its own runs and those of trusted namespaces, as `calibration` describes. The influence of every
other namespace is bounded (`consensus`): its runs, whatever and however many they are, move no forecast of another
namespace by more than `SHARE`. Forecasts move further only as far as several namespaces agree. Which of a namespace's
runs count (observations of a group, outliers, older runs that newer ones contradict, doubtful runs) is decided by its
own runs alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import numpy as np

from tilecast.calibration import LEVELS, MOST, NEWEST, SOFTWARE, Calibration, Run, RunFit, current, deviations
from tilecast.consensus import Consensus, agree
from tilecast.spec import Floats

JUMP = 1.5
"""Factor of deviation from earlier runs beyond which a run is in doubt, until another job confirms it."""
ALIKE = 1.25
"""Factor within which two jobs agree."""
CONFIRMED = 2
"""Jobs that must agree on a jump."""
SHARE = 0.1
"""Largest relative change of other namespaces' forecasts by one namespace."""


class Namespaces:
    """Runs of a cluster that namespaces share.

    Args:
        runs: oldest first.
        trusted: namespaces whose runs count fully for every namespace.
        before: an earlier state, from which unchanged parts are reused.
    """

    def __init__(self, runs: Iterable[Run], trusted: Collection[str] = (), before: Namespaces | None = None) -> None:
        self._known = deviations()
        of_namespace: dict[str, list[Run]] = {}
        for run in runs:
            of_namespace.setdefault(run.namespace, []).append(run)
        self.runs = {name: tuple(current(sound(members))) for name, members in of_namespace.items()}
        """Runs that count, by namespace."""
        self._trusted = tuple(name for name in self.runs if name in trusted)
        self._alone: dict[str, RunFit] = {
            name: before._alone[name]
            if before is not None and name in before._alone and before.runs[name] == members
            else RunFit.of(members, self._known)
            for name, members in self.runs.items()
            if members and name not in trusted
        }
        self._fits: dict[str | None, RunFit] = {}
        shared = sum(self._known[name] ** 2 for name in (*(name for name, _ in LEVELS), SOFTWARE))
        self._limit = math.log1p(SHARE) / math.sqrt(shared)

    @cached_property
    def bounded(self) -> frozenset[str]:
        """Namespaces whose influence on the forecasts of others is at its bound."""
        bounded = zip(self._alone, self._consensus.bounded, strict=True)
        return frozenset(name for name, is_bounded in bounded if is_bounded)

    def fit(self, namespace: str | None = None) -> Calibration:
        """Return the corrections for the jobs of a namespace; None means a namespace without runs."""
        return self._fit(namespace).calibration()

    def left_out(self, namespace: str) -> Floats:
        """Return the signed relative errors of a namespace's current runs, each predicted from all other runs, (n,)."""
        error: Floats = np.expm1(self._fit(namespace).left_out())
        return error[: len(self.runs[namespace])]

    @property
    def _consensus(self) -> Consensus:
        self._fit(None)
        return self._taught

    def _fit(self, namespace: str | None) -> RunFit:
        if namespace not in self._fits:
            self._fits[namespace] = self._fitted(namespace)
        return self._fits[namespace]

    def _fitted(self, namespace: str | None) -> RunFit:
        others = {name: one for name, one in self._alone.items() if name != namespace}
        if namespace in self._alone and not self._trusted:
            own = self._alone[namespace]
        else:
            full = dict.fromkeys(name for name in (namespace, *self._trusted) if name in self.runs)
            own = RunFit.of([run for name in full for run in self.runs[name or ""]], self._known)
        parties, start = [one.party for one in others.values()], None
        if namespace is not None:
            shifts = dict(zip(self._alone, self._consensus.shifts, strict=True))
            start = np.array([shifts[name] for name in others])
        taught = agree(parties, self._limit, own.party, start)
        if namespace is None:
            self._taught = taught
        return own.after(taught, tuple(others.values()))


def sound(runs: Sequence[Run]) -> list[Run]:
    """Return a namespace's runs that are not in doubt (`doubts`)."""
    return [run for run, why in zip(runs, doubts(runs), strict=True) if not why]


def doubts(runs: Sequence[Run]) -> list[str]:
    """Return for each of a namespace's runs, oldest first, why nothing is learned from it; empty where it counts.

    An `Absurd` run deviates from its forecast by more than any correction can. An `Unconfirmed` run deviates by more
    than `JUMP` from the median of the earlier runs of its pool, and fewer than `CONFIRMED` runs there, itself included,
    agree on that. A pool's first `NEWEST // 2` runs are neither checked nor asked, and only its newest `NEWEST` runs
    are checked.
    """
    deviation = np.array([run.deviation for run in runs])
    reasons = ["Absurd" if abs(one) > math.log(MOST) else "" for one in deviation]
    rows_of: dict[str, list[int]] = {}
    for row, run in enumerate(runs):
        if not reasons[row]:
            rows_of.setdefault(run.pool, []).append(row)
    for rows in rows_of.values():
        column = deviation[rows]
        for number in range(max(NEWEST // 2, len(rows) - NEWEST), len(rows)):
            apart = abs(column[number] - np.median(column[:number]))
            alike = np.abs(column[NEWEST // 2 :] - column[number]) <= math.log(ALIKE)
            if apart > math.log(JUMP) and alike.sum() < CONFIRMED:
                reasons[rows[number]] = "Unconfirmed"
    return reasons
