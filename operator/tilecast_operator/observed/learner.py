"""Calibration from the cluster's runs, for each namespace and for all together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilecast import calibration
from tilecast.api.calibration import PoolCalibration, PoolError, Seen, corrections
from tilecast.api.status import TrainingJobStatus
from tilecast.calibration import LEVELS, Calibration, Run
from tilecast.namespaces import Namespaces, doubts
from tilecast.spec import Floats
from tilecast_operator.observed.reports import ScoredForecast, Window
from tilecast_operator.observed.run_store import RunStore

MAX_FIT = 512
"""Newest runs of a namespace that are fitted: the time of a fit grows with the cube of their number."""
SLIGHT = 0.005
"""Relative change of the corrections common to all namespaces beyond which namespaces without a new run are fitted
again."""


@dataclass(frozen=True, slots=True)
class GroupErrors:
    """Relative errors of a GPU, precision and family: medians over its runs, by stage, one error a run."""

    runs: int
    bias: Mapping[str, float]
    absolute: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Score:
    """The forecast that a job is judged by, and its measured steps."""

    forecast: ScoredForecast
    window: Window

    @classmethod
    def of(cls, status: TrainingJobStatus | None) -> Score | None:
        """Return the score that the status of a job keeps; None if it keeps none."""
        if status is None:
            return None
        forecast, window = ScoredForecast.of(status.forecast), Window.of(status.observed)
        return None if forecast is None or window is None else cls(forecast, window)

    def run(self, namespace: str) -> Run:
        """Return the score as a run of a namespace, for calibration."""
        gpu, precision, family, scale, workload = self.forecast.group
        return Run(
            self.forecast.pool, gpu, precision, family, scale, workload,
            self.forecast.raw_seconds, self.window.seconds, self.window.samples,
            self.forecast.framework or "", namespace,
        )  # fmt: skip

    def seen(self, namespace: str, name: str, uid: str, account: str = "", namespace_uid: str = "") -> Seen:
        """Return the score as the run of a job, with the source of its reports."""
        latest, ran = self.window.latest, self.forecast
        return Seen(
            uid, self.window.time, self.run(namespace), name, account, latest.source, namespace_uid,
            ran.gpus, ran.plan, self.window.parts,
        )  # fmt: skip


class Learner:
    """Corrections learned from the runs of a store.

    Args:
        store: the runs.
        trusted: namespaces whose runs count fully for everybody.
    """

    def __init__(self, store: RunStore, trusted: Collection[str] = ()) -> None:
        self._store = store
        self._trusted = frozenset(trusted)
        self._taught = Taught.by((), ())
        self._tables: Mapping[str | None, Calibration] = self._taught.tables
        """Tables that forecasts use: those of the newest fit, except for changes too small to answer anybody anew."""
        self._doubts: dict[str, tuple[list[Run], list[str]]] = {}
        """Runs by namespace, and why each is not learned from. The same runs are judged only once."""

    def adopt(self, taught: Taught) -> bool:
        """Take over the result of a fit; return whether it changes forecasts.

        A namespace keeps the table that it uses until its new table differs from it.
        """
        before, self._taught = self._tables, taught
        known = {name: before.get(name, before[None]) for name in {*before, *taught.tables}}
        self._tables = {
            name: table if table.differs(known[name]) else known[name] for name, table in taught.tables.items()
        }
        return any(self._tables.get(name, self.table) is not table for name, table in known.items())

    @property
    def table(self) -> Calibration:
        """Table that forecasts use in namespaces without runs."""
        return self._tables[None]

    @property
    def tables(self) -> Mapping[str, Calibration]:
        """Tables that forecasts use in namespaces with runs."""
        return {name: table for name, table in self._tables.items() if name is not None}

    @property
    def _shown(self) -> Calibration:
        """Table for statuses and metrics: that of the only namespace with runs, or else that of all others."""
        names = [name for name in self._taught.tables if name is not None]
        return self._taught.table(names[0] if len(names) == 1 else None)

    def pool(self, name: str, gpu: str) -> tuple[PoolCalibration | None, PoolError | None]:
        """Return `calibration` and `error` for the status of a pool; None for each if no run supports it."""
        if not self._store.of(name):
            return None, None
        status = PoolCalibration(corrections=corrections(self._shown, gpu))
        runs, errors = self._taught.runs, self._taught.errors
        mine = np.array([run.pool == name for run in runs], dtype=bool)
        if not mine.any():
            return status, None
        raw, calibrated = (round(float(np.median(column[mine])), 4) for column in (_raw(runs), errors))
        return status, PoolError(raw_ratio=raw, calibrated_ratio=calibrated)

    def drifted(self, name: str) -> int:
        """Return how many of a pool's runs no longer count because newer ones of their namespace contradict them.

        Such a change has to be confirmed: by a second namespace, by a trusted one, or because no other namespace has
        runs of the pool. Otherwise the result is 0.
        """
        of_namespace: dict[str, list[Run]] = {}
        for item in self._store.of(name):
            of_namespace.setdefault(item.run.namespace, []).append(item.run)
        counts = {space: calibration.drifted(members) or 0 for space, members in of_namespace.items()}
        since = [space for space, count in counts.items() if count]
        is_confirmed = len(since) > 1 or len(counts) == 1 or not self._trusted.isdisjoint(since)
        return sum(counts.values()) if is_confirmed else 0

    def quarantined(self) -> list[tuple[Seen, str]]:
        """Return the runs that are not learned from, and why."""
        of_namespace: dict[str, list[Seen]] = {}
        for item in self._store.ordered():
            of_namespace.setdefault(item.run.namespace, []).append(item)
        before, self._doubts = self._doubts, {}
        for name, members in of_namespace.items():
            runs = [item.run for item in members]
            same = name in before and before[name][0] == runs
            self._doubts[name] = before[name] if same else (runs, doubts(runs))
        return [
            (item, why)
            for name, members in of_namespace.items()
            for item, why in zip(members, self._doubts[name][1], strict=True)
            if why
        ]

    def standing(self) -> Mapping[tuple[str, str], int]:
        """Return how many runs of each pool count, are superseded, or are in doubt and why."""
        quarantined = self.quarantined()
        counts = Counter((item.run.pool, why) for item, why in quarantined)
        held = Counter(item.run.pool for item in self._store.ordered())
        counting = Counter(run.pool for run in self._taught.runs)
        doubted = Counter(item.run.pool for item, _ in quarantined)
        for pool in held:
            counts[pool, "Counts"] = counting[pool]
            counts[pool, "Superseded"] = max(held[pool] - counting[pool] - doubted[pool], 0)
        return counts

    @property
    def bounded(self) -> frozenset[str]:
        """Namespaces whose influence on the forecasts of others is at its bound."""
        return self._taught.namespaces.bounded

    def sizes(self) -> Mapping[tuple[str, ...], int]:
        """Return how many runs count, by GPU, precision and family."""
        return Counter(map(_group, self._taught.runs))

    def errors(self, shown: Mapping[tuple[str, ...], tuple[str, ...]]) -> dict[tuple[str, ...], GroupErrors]:
        """Return errors by GPU, precision and family, raw and calibrated; the latter without the run itself.

        Args:
            shown: the group under which each group is shown.
        """
        runs = self._taught.runs
        if not runs:
            return {}
        columns = {"raw": _raw(runs), "calibrated": self._taught.errors}
        groups = [shown[_group(run)] for run in runs]
        rows = {group: np.array([one == group for one in groups]) for group in set(groups)}
        return {
            group: GroupErrors(
                int(mine.sum()),
                {stage: float(np.median(column[mine])) for stage, column in columns.items()},
                {stage: float(np.median(np.abs(column[mine]))) for stage, column in columns.items()},
            )
            for group, mine in rows.items()
        }

    def ratios(self) -> dict[tuple[str, ...], float]:
        """Return the correction by GPU, precision and family."""
        depth = dict(LEVELS)["kind"]
        return {
            (item.group[0], item.group[1], item.group[2]): item.ratio
            for item in self._shown.corrections
            if len(item.group) == depth
        }

    def question(self) -> tuple[tuple[Run, ...], frozenset[str], Taught]:
        """Return the arguments of `Taught.by`: newest runs of every namespace, trusted namespaces and the previous fit.

        The runs of each namespace are in order, oldest first.
        """
        of_namespace: dict[str, list[Run]] = {}
        for item in self._store.ordered():
            of_namespace.setdefault(item.run.namespace, []).append(item.run)
        return (
            tuple(run for members in of_namespace.values() for run in members[-MAX_FIT:]),
            self._trusted,
            self._taught,
        )


@dataclass(frozen=True, slots=True)
class Taught:
    """Result of a fit: a table for each namespace, and the runs that count, with their errors."""

    tables: Mapping[str | None, Calibration]
    """Table by namespace with runs; None is the key for all other namespaces."""
    runs: tuple[Run, ...]
    errors: Floats
    namespaces: Namespaces
    errors_of: Mapping[str, Floats]
    """Signed relative errors of the runs of each namespace, if all other runs correct the forecast; `errors` has those
    of all runs, (n,)."""
    base: Calibration
    """Table for all other namespaces when every table was last fitted. Namespaces whose runs do not change keep their
    table until this one changes."""

    @classmethod
    def by(cls, runs: Sequence[Run], trusted: Collection[str], before: Taught | None = None) -> Taught:
        """Fit corrections to these runs, oldest first, given the previous fit."""
        namespaces = Namespaces(runs, trusted, None if before is None else before.namespaces)
        common = namespaces.fit()
        tables: dict[str | None, Calibration] = {None: common}
        errors: dict[str, Floats] = {}
        known = None if before is None or common.differs(before.base, SLIGHT) else before
        for namespace, members in namespaces.runs.items():
            if known is not None and known.namespaces.runs.get(namespace) == members:
                tables[namespace], errors[namespace] = known.tables[namespace], known.errors_of[namespace]
            else:
                tables[namespace], errors[namespace] = namespaces.fit(namespace), namespaces.left_out(namespace)
        counting = tuple(run for members in namespaces.runs.values() for run in members)
        all_errors = np.concatenate([np.zeros(0), *errors.values()])
        return cls(tables, counting, all_errors, namespaces, errors, common if known is None else known.base)

    def table(self, namespace: str | None) -> Calibration:
        """Return the table of a namespace."""
        return self.tables.get(namespace, self.tables[None])


def _group(run: Run) -> tuple[str, ...]:
    return run.gpu, run.precision, run.family


def _raw(runs: Sequence[Run]) -> Floats:
    """Return the signed relative errors of raw forecasts, (n,)."""
    return calibration.relative_error(
        np.array([run.predicted_s for run in runs]), np.array([run.observed_s for run in runs])
    )
