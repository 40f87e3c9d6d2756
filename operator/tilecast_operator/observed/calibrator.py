"""Learn calibrations from the cluster's runs, for each namespace and for all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilecast.api.calibration import ObservedRun, PoolCalibration, PoolError, build_correction_records
from tilecast.api.status import TrainingJobStatus
from tilecast.learning import calibration
from tilecast.learning.calibration import LEVELS, Calibration, Run
from tilecast.learning.namespace_calibration import NamespaceCalibration, find_quarantine_reasons
from tilecast.spec import Floats
from tilecast_operator.observed.reports import CompleteForecast, StepWindow
from tilecast_operator.observed.run_store import RunStore

MAX_FIT = 512
"""Most runs of a namespace that are fitted, the newest. The time of a fit grows with the cube of their number."""
REFIT_TOLERANCE = 0.005
"""Relative change of the common corrections above which namespaces without a new run are fitted again."""


@dataclass(frozen=True, slots=True)
class GroupErrors:
    """Median relative errors of raw and of calibrated forecasts for the runs of one GPU, precision and family."""

    runs: int
    bias: Mapping[str, float]
    absolute: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MeasuredForecast:
    """Stored forecast of a running job's plan, with the step times measured since it was stored."""

    forecast: CompleteForecast
    window: StepWindow

    @classmethod
    def from_status(cls, status: TrainingJobStatus | None) -> MeasuredForecast | None:
        """Return the stored forecast and measured steps in a job's status, or None."""
        if status is None:
            return None
        forecast, window = CompleteForecast.from_stored(status.forecast), StepWindow.from_status(status.observed)
        return None if forecast is None or window is None else cls(forecast, window)

    def make_calibration_run(self, namespace: str) -> Run:
        """Return this forecast and its measured steps as a run for calibration, measured in a namespace."""
        gpu, precision, family, scale, workload = self.forecast.group
        return Run(
            self.forecast.pool, gpu, precision, family, scale, workload,
            self.forecast.raw_seconds, self.window.seconds, self.window.observations,
            self.forecast.framework or "", namespace,
        )  # fmt: skip

    def make_observed_run(
        self, namespace: str, name: str, uid: str, account: str = "", namespace_uid: str = ""
    ) -> ObservedRun:
        """Return this forecast and its measured steps as a job's run, with the source of its reports."""
        latest, forecast = self.window.latest, self.forecast
        return ObservedRun(
            uid, self.window.time, self.make_calibration_run(namespace), name, account, latest.source, namespace_uid,
            forecast.gpus, forecast.plan, self.window.parts,
        )  # fmt: skip


class Calibrator:
    """Corrections learned from the runs of a store.

    Args:
        store: the runs.
        trusted: namespaces whose runs count fully for everybody.
    """

    def __init__(self, store: RunStore, trusted: Collection[str] = ()) -> None:
        self._store = store
        self._trusted = frozenset(trusted)
        self._fitted = FittedCalibration.fit((), ())
        self._tables: Mapping[str | None, Calibration] = self._fitted.tables
        """Calibrations that forecasts use.

        They are those of the newest fit, except for changes too small to renew advice.
        """
        self._quarantine_reasons: dict[str, tuple[list[Run], list[str]]] = {}
        """Runs by namespace, and why each is not learned from. Cached, so that the same runs are judged only once."""

    def adopt_fit(self, fitted: FittedCalibration) -> bool:
        """Use the result of a fit from now on. Return whether it changes forecasts.

        A namespace keeps its calibration until the new one differs enough.
        """
        before, self._fitted = self._tables, fitted
        known = {name: before.get(name, before[None]) for name in {*before, *fitted.tables}}
        self._tables = {
            name: table if table.differs_from(known[name]) else known[name] for name, table in fitted.tables.items()
        }
        return any(self._tables.get(name, self.default_table) is not table for name, table in known.items())

    @property
    def default_table(self) -> Calibration:
        """Calibration that forecasts use in namespaces without runs."""
        return self._tables[None]

    @property
    def namespace_tables(self) -> Mapping[str, Calibration]:
        """Calibrations that forecasts use in namespaces with runs, by namespace."""
        return {name: table for name, table in self._tables.items() if name is not None}

    @property
    def _reported_table(self) -> Calibration:
        """Calibration that statuses and metrics show: that of the only namespace with runs, or the default."""
        names = [name for name in self._fitted.tables if name is not None]
        return self._fitted.find_table(names[0] if len(names) == 1 else None)

    def make_pool_calibration_status(self, name: str, gpu: str) -> tuple[PoolCalibration | None, PoolError | None]:
        """Return `calibration` and `error` for a pool's status. Each is None if there are no runs for it."""
        if not self._store.list_pool_runs(name):
            return None, None
        status = PoolCalibration(corrections=build_correction_records(self._reported_table, gpu))
        runs, errors = self._fitted.runs, self._fitted.errors
        mine = np.array([run.pool == name for run in runs], dtype=bool)
        if not mine.any():
            return status, None
        raw, calibrated = (round(float(np.median(column[mine])), 4) for column in (_raw_errors(runs), errors))
        return status, PoolError(raw_ratio=raw, calibrated_ratio=calibrated)

    def count_drifted(self, name: str) -> int:
        """Return how many runs of a pool are ignored because newer runs of their namespaces contradict them.

        Return 0 unless the change is confirmed: by runs of a second namespace, by runs of a trusted namespace, or
        because no other namespace has runs of the pool.
        """
        of_namespace = _group_by_namespace(self._store.list_pool_runs(name))
        counts = {
            space: calibration.find_drift_start([item.run for item in members]) or 0
            for space, members in of_namespace.items()
        }
        since = [space for space, count in counts.items() if count]
        is_confirmed = len(since) > 1 or len(counts) == 1 or not self._trusted.isdisjoint(since)
        return sum(counts.values()) if is_confirmed else 0

    def list_quarantined_runs(self) -> list[tuple[ObservedRun, str]]:
        """Return the runs that are excluded from learning, each with the reason."""
        of_namespace = _group_by_namespace(self._store.list_all_runs())
        before, self._quarantine_reasons = self._quarantine_reasons, {}
        for name, members in of_namespace.items():
            runs = [item.run for item in members]
            same = name in before and before[name][0] == runs
            self._quarantine_reasons[name] = before[name] if same else (runs, find_quarantine_reasons(runs))
        return [
            (item, why)
            for name, members in of_namespace.items()
            for item, why in zip(members, self._quarantine_reasons[name][1], strict=True)
            if why
        ]

    def count_runs_by_state(self) -> Mapping[tuple[str, str], int]:
        """Return the number of runs by pool and state: `Counts`, `Superseded`, or the reason for their exclusion."""
        quarantined = self.list_quarantined_runs()
        counts = Counter((item.run.pool, why) for item, why in quarantined)
        kept = Counter(item.run.pool for item in self._store.list_all_runs())
        counting = Counter(run.pool for run in self._fitted.runs)
        doubted = Counter(item.run.pool for item, _ in quarantined)
        for pool in kept:
            counts[pool, "Counts"] = counting[pool]
            counts[pool, "Superseded"] = max(kept[pool] - counting[pool] - doubted[pool], 0)
        return counts

    @property
    def bounded_namespaces(self) -> frozenset[str]:
        """Namespaces whose influence on the forecasts of others is at its limit."""
        return self._fitted.namespaces.bounded

    def count_runs_by_group(self) -> Mapping[tuple[str, ...], int]:
        """Return the number of runs that count, by GPU, precision and model family."""
        return Counter(map(_make_group_key, self._fitted.runs))

    def compute_group_errors(
        self, shown: Mapping[tuple[str, ...], tuple[str, ...]]
    ) -> dict[tuple[str, ...], GroupErrors]:
        """Return raw and calibrated errors by GPU, precision and model family.

        The calibrated error of a run uses the corrections of all other runs.

        Args:
            shown: for each group, the group under which it is shown.
        """
        runs = self._fitted.runs
        if not runs:
            return {}
        columns = {"raw": _raw_errors(runs), "calibrated": self._fitted.errors}
        groups = [shown[_make_group_key(run)] for run in runs]
        rows = {group: np.array([one == group for one in groups]) for group in set(groups)}
        return {
            group: GroupErrors(
                int(mine.sum()),
                {stage: float(np.median(column[mine])) for stage, column in columns.items()},
                {stage: float(np.median(np.abs(column[mine]))) for stage, column in columns.items()},
            )
            for group, mine in rows.items()
        }

    def find_group_ratios(self) -> dict[tuple[str, ...], float]:
        """Return the correction factor by GPU, precision and model family."""
        depth = dict(LEVELS)["kind"]
        return {
            (item.group[0], item.group[1], item.group[2]): item.ratio
            for item in self._reported_table.corrections
            if len(item.group) == depth
        }

    def make_fit_arguments(self) -> tuple[tuple[Run, ...], frozenset[str], FittedCalibration]:
        """Return the arguments of `FittedCalibration.fit`.

        They are the newest runs of every namespace, oldest first, the trusted namespaces and the previous fit.
        """
        of_namespace = _group_by_namespace(self._store.list_all_runs())
        runs = tuple(item.run for members in of_namespace.values() for item in members[-MAX_FIT:])
        return runs, self._trusted, self._fitted


@dataclass(frozen=True, slots=True)
class FittedCalibration:
    """Result of a fit: a calibration for each namespace, and the runs that count, with their errors."""

    tables: Mapping[str | None, Calibration]
    """Calibration by namespace with runs. The key None is for all other namespaces."""
    runs: tuple[Run, ...]
    errors: Floats
    namespaces: NamespaceCalibration
    errors_by_namespace: Mapping[str, Floats]
    """Signed relative errors of each namespace's runs, with forecasts corrected by all other runs.

    `errors` has those of all runs, (n,).
    """
    base: Calibration
    """Calibration for all other namespaces at the last complete fit.

    As long as it does not change, namespaces without new runs keep their calibration.
    """

    @classmethod
    def fit(
        cls, runs: Sequence[Run], trusted: Collection[str], previous: FittedCalibration | None = None
    ) -> FittedCalibration:
        """Fit corrections to runs, which are sorted from oldest to newest, starting from the `previous` fit."""
        namespaces = NamespaceCalibration(runs, trusted, None if previous is None else previous.namespaces)
        common = namespaces.fit()
        tables: dict[str | None, Calibration] = {None: common}
        errors: dict[str, Floats] = {}
        known = None if previous is None or common.differs_from(previous.base, REFIT_TOLERANCE) else previous
        for namespace, members in namespaces.runs.items():
            if known is not None and known.namespaces.runs.get(namespace) == members:
                tables[namespace], errors[namespace] = known.tables[namespace], known.errors_by_namespace[namespace]
            else:
                tables[namespace] = namespaces.fit(namespace)
                errors[namespace] = namespaces.leave_one_out_errors(namespace)
        counting = tuple(run for members in namespaces.runs.values() for run in members)
        all_errors = np.concatenate([np.zeros(0), *errors.values()])
        return cls(tables, counting, all_errors, namespaces, errors, common if known is None else known.base)

    def find_table(self, namespace: str | None) -> Calibration:
        """Return the calibration that a namespace uses."""
        return self.tables.get(namespace, self.tables[None])


def _group_by_namespace(runs: Iterable[ObservedRun]) -> dict[str, list[ObservedRun]]:
    groups: dict[str, list[ObservedRun]] = {}
    for item in runs:
        groups.setdefault(item.run.namespace, []).append(item)
    return groups


def _make_group_key(run: Run) -> tuple[str, ...]:
    return run.gpu, run.precision, run.family


def _raw_errors(runs: Sequence[Run]) -> Floats:
    """Return the signed relative errors of raw forecasts, (n,)."""
    return calibration.relative_error(
        np.array([run.predicted_s for run in runs]), np.array([run.observed_s for run in runs])
    )
