"""Learn corrections of forecasts from measured steps.

The logarithm of raw forecast over measurement is a sum of independent deviations (random effects). Groups of runs have
deviations in common: the cluster, a GPU, a precision and model family on a GPU, a range of GPU counts, and one
workload. Runs of one framework and model family have another deviation in common on all GPUs. The last deviation is
that of the single run. `calibration.toml` has the variances of all deviations.

Given the runs so far, the expected deviation of a new run is the best linear unbiased prediction (Henderson 1975;
Robinson, Statistical Science 6, 1991). It shrinks the estimate of each group towards the coarser group that contains
it, and finally towards 0. A group with fewer runs is shrunk more.

A group counts only once it has `MIN_OBSERVATIONS` observations, so that no single one moves a forecast. Runs far from
the others are moved towards them (Huber's weights). If the newest runs of a pool contradict its older ones, the older
ones no longer count.

`Run` is the input and `Calibration` the output. `fit_calibration` computes a `Calibration` from runs by a `RunFit`.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np

from tilecast.learning.consensus import Consensus, ContributorEstimate
from tilecast.model import Model
from tilecast.shipped import NumbersFile
from tilecast.spec import Floats, Ints, Workload

MIN_OBSERVATIONS = 3
"""Fewest observations with which a group affects a forecast."""
PROVEN_RUNS = 3
"""Fewest runs of a workload's own group for its forecast to count as proven."""
MAX_RATIO = 3.0
"""Largest factor of a correction, up or down. A larger error means that another job ran."""
HUBER_LIMIT = 2.5
"""Distance, in standard deviations, beyond which a run is moved towards the others."""
COVERAGE = 0.9
"""Share of runs that a range holds."""
HALF_WIDTH_90 = 1.645
"""Half-width of a normal variable's 90 % range, in standard deviations."""
MAD_TO_DEVIATION = 1.4826
"""Ratio of a normal variable's standard deviation to its median absolute deviation."""
MEDIAN_ERROR = 1.2533
"""Ratio of the standard errors of the median and the mean of normal variables: the root of half of pi."""
DRIFT_WINDOW = 8
"""Most of a pool's newest runs that are compared with its older ones. The fewest is half of it."""
DRIFT_LIMIT = 4.0
"""Least shift of the newest runs, in standard errors, at which the older runs no longer count."""


ValueT = TypeVar("ValueT", Floats, np.float64)


def relative_error(predicted: ValueT, observed: ValueT) -> ValueT:
    """Return the signed relative error, (predicted - observed) / observed, of numbers or of arrays (n,).

    +0.3 means that the forecast step is 30 % too long.
    """
    return (predicted - observed) / observed


def digest_workload(workload: Workload) -> str:
    """Return a hash of a workload's properties that affect its step time, as 8 hexadecimal digits."""
    text = json.dumps(replace(workload, steps=None), sort_keys=True, default=_to_json_value)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _to_json_value(value: object) -> object:
    """Return a value in a form that `json.dumps` accepts: models and dataclasses as mappings, other values as text."""
    if isinstance(value, Model):
        return value.document()
    return {item.name: getattr(value, item.name) for item in fields(value)} if is_dataclass(value) else repr(value)


def name_gpu_range(gpus: int) -> str:
    """Return the range of a GPU count as text: "1", "2-8", "9-64" or ">64"."""
    return next(name for limit, name in GPU_RANGES if gpus <= limit)


GPU_RANGES: tuple[tuple[float, str], ...] = ((1, "1"), (8, "2-8"), (64, "9-64"), (math.inf, ">64"))


GroupKey: TypeAlias = tuple[str, ...]
"""GPU, precision, family, range of GPU counts and workload. A shorter key names a coarser group."""


@dataclass(frozen=True, slots=True)
class Run:
    """A job that ran: its properties, and the seconds of its step as forecast without corrections and as measured.

    The measured step is the median of `observations` reports.
    """

    pool: str
    gpu: str
    precision: str
    family: str
    scale: str
    workload: str
    predicted_s: float
    observed_s: float
    observations: int = 1
    framework: str = ""
    """Name from `name_framework`.

    If empty, the framework is unknown, and the run shares no deviation with its framework.
    """
    namespace: str = ""
    """Namespace that the job ran in."""

    @property
    def deviation(self) -> float:
        """Natural logarithm of predicted over observed step time. It is positive if the forecast is too long."""
        return math.log(self.predicted_s / self.observed_s)


LEVELS: tuple[tuple[str, int], ...] = (("cluster", 0), ("gpu", 1), ("kind", 3), ("scale", 4), ("workload", 5))
"""Levels of group deviations, and the number of parts of a key that name a group of each level."""


SOFTWARE = "software"
"""Level of the deviation that runs of one framework and model family share on all GPUs."""


def name_framework(workload: Workload) -> str:
    """Return the name of a workload's framework. If it has no framework, return "none"."""
    return workload.framework or "none"


def name_group(run: Run) -> GroupKey:
    """Return the key of the finest group of a run: GPU, precision, family, GPU range and workload."""
    return (run.gpu, run.precision, run.family, run.scale, run.workload)


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction of the forecasts for one group of runs. The corrected forecast is the raw forecast times `ratio`."""

    group: GroupKey = ()
    ratio: float = 1.0
    width: float = 1.0
    """Factor on the half-width, as a logarithm, of the range without any runs."""
    runs: int = 0
    """Number of runs of all groups from which the ratio is learned."""
    own: int = 0
    """Number of runs of this group that confirm the correction.

    It counts all runs of the reader's namespace, of trusted ones, and of other namespaces that agree, except the one
    with most runs. So no single namespace can confirm a correction alone.
    """
    observations: int = 0
    """Number of reports in the group's runs."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections of forecasts, learned from runs.

    A group without a correction uses that of the next coarser group. If no coarser group has one, its forecasts do not
    change.
    """

    corrections: tuple[Correction, ...] = ()
    software: tuple[Correction, ...] = ()
    """Corrections by framework and model family, on any GPU. They are multiplied with the others."""

    @property
    def runs(self) -> int:
        """Number of runs that the corrections are learned from."""
        return max((item.runs for item in self.corrections), default=0)

    def find_group_correction(self, key: GroupKey) -> Correction:
        """Return the correction for a group, or else for the next coarser group that has a correction."""
        return _find_correction(self._corrections_by_group(), key)

    def _corrections_by_group(self) -> dict[GroupKey, Correction]:
        return {item.group: item for item in self.corrections}

    def find_workload_correction(self, gpu: str, workload: Workload, gpus: int) -> Correction:
        """Return the correction for a workload on `gpus` GPUs, including the ratio for its framework and family."""
        if not self.corrections:
            return Correction()
        correction = self.find_group_correction(
            (gpu, workload.precision, workload.model.family, name_gpu_range(gpus), digest_workload(workload))
        )
        return replace(
            correction,
            ratio=correction.ratio * self.find_software_ratio(name_framework(workload), workload.model.family),
        )

    def find_software_ratio(self, framework: str, family: str) -> float:
        """Return the factor for a framework and model family. The ratio of a group is multiplied by this factor."""
        return next((item.ratio for item in self.software if item.group == (framework, family)), 1.0)

    def list_factors_by_gpus(self, gpu: str, workload: Workload, gpus: Ints) -> tuple[Floats, Floats]:
        """Return the factors on the forecast and on the width of its range, for n GPU counts, (n,) each."""
        ratio, width = np.ones(len(gpus)), np.ones(len(gpus))
        if self.corrections:
            named = digest_workload(workload)
            software = self.find_software_ratio(name_framework(workload), workload.model.family)
            least = 0.0
            for most, name in GPU_RANGES:
                rows = (gpus > least) & (gpus <= most)
                one = self.find_group_correction((gpu, workload.precision, workload.model.family, name, named))
                ratio[rows], width[rows], least = one.ratio * software, one.width, most
        return ratio, width

    def differs_from(self, other: Calibration, tolerance: float = 0.01) -> bool:
        """Return whether any ratio differs from that in another calibration by more than a relative tolerance.

        Widths of ranges may differ by five times the tolerance. Calibrations also differ if one has at least twice as
        many runs of a group, or if only one has `PROVEN_RUNS` runs of the group itself.
        """
        if self is other:
            return False
        names = {item.group for item in (*self.software, *other.software)}
        if any(
            abs(math.log(self.find_software_ratio(*name) / other.find_software_ratio(*name))) > tolerance
            for name in names
        ):
            return True
        mine, theirs = self._corrections_by_group(), other._corrections_by_group()
        return any(
            _is_other_correction(_find_correction(mine, key), _find_correction(theirs, key), tolerance)
            for key in {**mine, **theirs}
        )


def _find_correction(by_group: Mapping[GroupKey, Correction], key: GroupKey) -> Correction:
    """Return the correction for a group, or else for the next coarser group that has a correction."""
    return next((by_group[key[:depth]] for _, depth in reversed(LEVELS) if key[:depth] in by_group), Correction())


def _is_other_correction(one: Correction, other: Correction, tolerance: float) -> bool:
    most, least = max(one.runs, other.runs), min(one.runs, other.runs)
    return (
        abs(math.log(one.ratio / other.ratio)) > tolerance
        or abs(math.log(one.width / other.width)) > 5 * tolerance
        or most >= 2 * least + (least == 0)
        or (one.own < PROVEN_RUNS) != (other.own < PROVEN_RUNS)
    )


@cache
def shipped_deviations() -> Mapping[str, float]:
    """Read `calibration.toml` and return the standard deviations in it, by level name.

    The levels include the software, a single run and a report.
    """
    file = NumbersFile.read_shipped("tilecast.learning", "calibration.toml")
    return file.read_numbers("deviation", (*(name for name, _ in LEVELS), SOFTWARE, "run", "report"))


def fit_calibration(runs: Sequence[Run], sigmas: Mapping[str, float] | None = None) -> Calibration:
    """Return the corrections learned from some runs, without a limit on the influence of a namespace.

    Args:
        runs: the runs, oldest first. Runs before a drift are left out (`find_drift_start`).
        sigmas: standard deviations by level. None for `shipped_deviations()`.
    """
    return RunFit.from_runs(keep_current_runs(runs), sigmas or shipped_deviations()).calibration()


def leave_one_out_errors(runs: Sequence[Run], sigmas: Mapping[str, float] | None = None) -> Floats:
    """Return the signed relative error of each current run's forecast, corrected by all other runs, (n,)."""
    error: Floats = np.expm1(
        RunFit.from_runs(keep_current_runs(runs), sigmas or shipped_deviations()).compute_leave_one_out_residuals()
    )
    return error


def keep_current_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the runs without those before a drift of their pool."""
    by_pool: dict[str, list[Run]] = {}
    for run in runs:
        by_pool.setdefault(run.pool, []).append(run)
    out = []
    for members in by_pool.values():
        since = find_drift_start(members)
        out += members[since or 0 :]
    return out


def find_drift_start(runs: Sequence[Run]) -> int | None:
    """Return the index of the run at which the forecast errors of a pool shifted. If they did not, return None.

    The last k runs are compared with all earlier runs, for k from half of `DRIFT_WINDOW` to `DRIFT_WINDOW`. A shift is
    a difference of medians above `DRIFT_LIMIT` standard errors. If several k show a shift, the k that leaves the least
    absolute deviation is used.
    """
    deviation = np.array([run.deviation for run in runs])
    floor = shipped_deviations()["report"]
    segments: list[tuple[float, int]] = []
    for count in range(DRIFT_WINDOW // 2, min(DRIFT_WINDOW, len(runs) - DRIFT_WINDOW // 2) + 1):
        old, new = deviation[:-count], deviation[-count:]
        rest = np.concatenate([old - np.median(old), new - np.median(new)])
        error = MEDIAN_ERROR * max(_estimate_spread(rest), floor) * math.sqrt(1 / len(new) + 1 / len(old))
        if abs(float(np.median(new) - np.median(old))) > DRIFT_LIMIT * error:
            segments.append((float(np.abs(rest).sum()), len(runs) - count))
    return min(segments)[1] if segments else None


def robust_median(values: Sequence[float]) -> float:
    """Return the median of positive values without outliers.

    Outliers are more than five standard deviations away from the median. The standard deviation comes from the median
    absolute deviation, and is at least 1 % of the median.
    """
    middle = statistics.median(values)
    away = [abs(value - middle) for value in values]
    reach = 5 * max(MAD_TO_DEVIATION * statistics.median(away), 0.01 * middle)
    return statistics.median(value for value, far in zip(values, away, strict=True) if far <= reach)


def _estimate_spread(residuals: Floats) -> float:
    """Return the standard deviation of residuals, estimated from their median absolute value."""
    return MAD_TO_DEVIATION * float(np.median(np.abs(residuals)))


_Effect: TypeAlias = tuple[str, GroupKey]
"""A level and a group of that level, which together name a deviation."""


@dataclass(frozen=True)
class RunFit:
    """Bayesian fit of group deviations to the runs of one namespace, with a prior from other namespaces.

    An effect is the deviation of one group, in units of its standard deviation. Arrays have n runs and m effects. Runs
    of this namespace have full weight. Those of other namespaces count only through their consensus.
    """

    runs: tuple[Run, ...]
    sigmas: Mapping[str, float]
    others: tuple[RunFit, ...]
    counts: Mapping[_Effect, int]
    """Observations of every group."""
    members: Mapping[_Effect, int]
    """Number of runs of every group."""
    index: Mapping[Hashable, int]
    """Column of each effect that runs share or that other namespaces observed."""
    mean: Floats
    """Mean of the effects, learned from other namespaces, (m,)."""
    covariance: Floats
    """Covariance of the effects that remains after learning from other namespaces, (m, m)."""
    shares: Floats
    """Coefficient of each effect in each run's deviation, (n, m)."""
    noise: Floats
    """Covariance of the rest of the deviations, (n, n)."""
    inverse: Floats
    """Inverse of the covariance of the deviations, (n, n)."""
    deviation: Floats
    """Deviations of the runs, minus what other namespaces predict, (n,)."""
    robust_deviation: Floats
    """`deviation` with outliers moved towards the other runs, (n,)."""
    consensus: Consensus | None = None
    """Effects learned from other namespaces."""

    @classmethod
    def from_runs(cls, runs: Sequence[Run], sigmas: Mapping[str, float]) -> RunFit:
        """Return the fit to the given runs only, without a prior from other namespaces.

        Args:
            runs: the runs.
            sigmas: standard deviations by level.
        """
        counts: Counter[_Effect] = Counter()
        for run in runs:
            for effect in _list_effects(run):
                counts[effect] += run.observations
        if counts["cluster", ()] < MIN_OBSERVATIONS:
            counts.clear()
        shared = [
            [effect for effect in _list_effects(run, _SHARED) if counts[effect] >= MIN_OBSERVATIONS] for run in runs
        ]
        index: dict[Hashable, int] = {name: column for column, name in enumerate(dict.fromkeys(chain(*shared)))}
        shares = np.zeros((len(runs), len(index)))
        for row, effects in enumerate(shared):
            for effect in effects:
                shares[row, index[effect]] = sigmas[effect[0]]
        noise = _build_unshared_covariance(runs, sigmas, counts)
        deviation = np.array([run.deviation for run in runs])
        inverse = _invert_matrix(noise + shares @ shares.T)
        return cls(
            runs=tuple(runs),
            sigmas=sigmas,
            others=(),
            counts=counts,
            members=Counter(effect for run in runs for effect in _list_effects(run)),
            index=index,
            mean=np.zeros(len(index)),
            covariance=np.eye(len(index)),
            shares=shares,
            noise=noise,
            inverse=inverse,
            deviation=deviation,
            robust_deviation=_limit_outliers(inverse, deviation),
        )

    def with_consensus_prior(self, consensus: Consensus, others: tuple[RunFit, ...]) -> RunFit:
        """Return the fit to these runs with a consensus of other namespaces as the prior.

        The fit must not have a consensus yet.

        Args:
            consensus: the consensus.
            others: the fits of the namespaces that the consensus is from.
        """
        index = {name: column for column, name in enumerate(dict.fromkeys((*consensus.index, *self.index)))}
        shares = np.zeros((len(self.runs), len(index)))
        shares[:, [index[name] for name in self.index]] = self.shares
        mean, covariance = consensus.extend_to(len(index))
        return replace(
            self,
            others=others,
            index=index,
            mean=mean,
            covariance=covariance,
            shares=shares,
            inverse=_invert_matrix(self.noise + shares @ covariance @ shares.T),
            deviation=self.deviation - shares @ mean,
            robust_deviation=self.robust_deviation - shares @ mean,
            consensus=consensus,
        )

    @cached_property
    def contributor(self) -> ContributorEstimate:
        """The runs of this fit, as input to a consensus."""
        return ContributorEstimate.from_deviations(tuple(self.index), self.shares, self.noise, self.robust_deviation)

    def compute_leave_one_out_residuals(self) -> Floats:
        """Return each run's deviation minus the value that all other runs predict, (n,)."""
        return _leave_one_out_errors(self.inverse, self.robust_deviation, self.deviation)[0]

    def calibration(self) -> Calibration:
        """Return the corrections of all groups with at least `MIN_OBSERVATIONS` observations."""
        counts, members, most = Counter(self.counts), Counter(self.members), Counter[_Effect]()
        for one, is_apart in zip(self.others, self.consensus.disagrees if self.consensus else (), strict=True):
            counts.update({effect: count for effect, count in one.counts.items() if effect[0] in _SHARED})
            shared = {effect: count for effect, count in one.members.items() if effect[0] in _SHARED}
            members.update({} if is_apart else shared)
            most |= Counter({} if is_apart else shared)
        members.subtract(most)
        effects = sorted(
            (effect for effect, count in counts.items() if count >= MIN_OBSERVATIONS), key=lambda effect: effect[1]
        )
        ratio, width = self._estimate_group_factors(effects)
        runs = sum(len(one.runs) for one in (self, *self.others))
        by_group, by_software = list[Correction](), list[Correction]()
        for effect, each, wide in zip(effects, ratio.tolist(), width.tolist(), strict=True):
            is_software = effect[0] == SOFTWARE
            numbers = float(f"{each:.4g}"), 1.0 if is_software else float(f"{wide:.3g}")
            correction = Correction(effect[1], *numbers, runs, members[effect], counts[effect])
            (by_software if is_software else by_group).append(correction)
        return Calibration(tuple(by_group), tuple(by_software))

    def _estimate_group_factors(self, effects: Sequence[_Effect]) -> tuple[Floats, Floats]:
        """Return two factors for each of k groups, (k,) each: on forecasts, and on the half-widths of ranges."""
        if not effects:
            return np.ones(0), np.ones(0)
        loadings = np.zeros((len(self.index), len(effects)))
        local = np.zeros((len(self.runs), len(effects)))
        rows_of: dict[_Effect, list[int]] = {}
        for row, run in enumerate(self.runs):
            for effect in _list_containing_groups(name_group(run)):
                rows_of.setdefault(effect, []).append(row)
        for column, (level, key) in enumerate(effects):
            for effect in ((level, key),) if level == SOFTWARE else _list_containing_groups(key):
                if effect in self.index:
                    loadings[self.index[effect], column] = self.sigmas[effect[0]]
                elif effect[0] not in _SHARED and self.counts.get(effect, 0) >= MIN_OBSERVATIONS:
                    local[rows_of[effect], column] += self.sigmas[effect[0]] ** 2
        left = self.covariance @ loadings
        shared = self.shares @ left + local
        expected = loadings.T @ self.mean + shared.T @ (self.inverse @ self.robust_deviation)
        explained = (loadings * (loadings - left)).sum(0) + (shared * (self.inverse @ shared)).sum(0)
        before = sum(self.sigmas[name] ** 2 for name, _ in LEVELS) + self.sigmas["run"] ** 2
        if self.consensus is not None:
            gain = self.covariance @ self.shares.T @ self.inverse
            left_open = self.covariance - gain @ self.shares @ self.covariance
            explained -= self.consensus.find_unconfirmed_variance(left_open, left - gain @ shared)
        width = np.sqrt((before - explained) / before) * self._spread_factor
        return np.clip(np.exp(-expected), 1 / MAX_RATIO, MAX_RATIO), width

    @cached_property
    def _spread_factor(self) -> float:
        """Ratio of the observed spread of runs to the spread that the variances predict.

        It comes from the 90 % quantile of the leave-one-out errors, shrunk towards 1 as if 1 / (1 - `COVERAGE`) more
        runs had the predicted spread. If this namespace has no runs, the ratio is the median of those of other
        namespaces, of which the smallest is left out.
        """
        if not self.counts:
            is_apart = self.consensus.disagrees if self.consensus else ()
            fits = [one for one, alone in zip(self.others, is_apart, strict=True) if one.counts and not alone]
            spreads = sorted(one._spread_factor for one in fits)
            return float(np.quantile(spreads[1:] or [max([1.0, *spreads])], 0.5, method="lower"))
        residual, spread = _leave_one_out_errors(self.inverse, self.robust_deviation, self.deviation)
        errors = np.sort(np.abs(residual) / spread)
        rank = min(math.ceil((len(errors) + 1) * COVERAGE), len(errors)) - 1
        weight = len(errors) / (len(errors) + 1 / (1 - COVERAGE))
        return math.sqrt(1 - weight + weight * float(errors[rank] / HALF_WIDTH_90) ** 2)


_SHARED = ("cluster", "gpu", "kind", SOFTWARE)
"""Levels of deviations that contributors share. Deviations of finer groups come only from a namespace's own runs."""
_ALL = (*(name for name, _ in LEVELS), SOFTWARE)


def _list_containing_groups(key: GroupKey) -> list[_Effect]:
    """Return the effects of a group and of all coarser groups that contain it."""
    return [(name, key[:depth]) for name, depth in LEVELS if depth <= len(key)]


def _list_effects(run: Run, levels: Collection[str] = _ALL) -> list[_Effect]:
    """Return the effects of the groups that a run belongs to, at the given levels."""
    software: list[_Effect] = [(SOFTWARE, (run.framework, run.family))] if run.framework else []
    return [effect for effect in (*_list_containing_groups(name_group(run)), *software) if effect[0] in levels]


def _build_unshared_covariance(
    runs: Sequence[Run], sigmas: Mapping[str, float], counts: Mapping[_Effect, int]
) -> Floats:
    """Return the covariance of the deviations that runs do not share with other namespaces, (n, n).

    These are the deviations of single runs, of levels outside `_SHARED`, and of groups with too few observations.

    Args:
        runs: the runs.
        sigmas: standard deviations by level.
        counts: number of observations of each group.
    """
    own = np.array([sigmas["run"] ** 2 + sigmas["report"] ** 2 / run.observations for run in runs])
    for row, run in enumerate(runs):
        own[row] += sum(sigmas[name] ** 2 for name, key in _list_effects(run) if counts[name, key] < MIN_OBSERVATIONS)
    covariance: Floats = np.diag(own)
    for name, depth in LEVELS:
        if name not in _SHARED and len(runs):
            keys = [name_group(run)[:depth] for run in runs]
            _, member = np.unique(["|".join(key) for key in keys], return_inverse=True)
            holds = np.array([counts[name, key] >= MIN_OBSERVATIONS for key in keys], dtype=bool)
            covariance += sigmas[name] ** 2 * ((member[:, None] == member[None]) & holds[:, None])
    return covariance


def _limit_outliers(inverse: Floats, deviation: Floats) -> Floats:
    """Return the deviations of runs, (n,), with outliers moved towards the values that the other runs predict.

    Args:
        inverse: inverse covariance of the deviations, (n, n).
        deviation: deviations of the runs, (n,).
    """
    robust = deviation
    for _ in range(5):
        residual, spread = _leave_one_out_errors(inverse, robust, deviation)
        robust = deviation - residual + np.clip(residual, -HUBER_LIMIT * spread, HUBER_LIMIT * spread)
    return robust


def _leave_one_out_errors(inverse: Floats, robust: Floats, deviation: Floats) -> tuple[Floats, Floats]:
    """Return leave-one-out prediction errors of deviations and their standard deviations, (n,) each.

    Source: Rasmussen and Williams 2006, equations 5.10 to 5.12.

    Args:
        inverse: inverse covariance of the deviations, (n, n).
        robust: deviations from which to predict, (n,).
        deviation: deviations to compare with the predictions, (n,).
    """
    precision = np.diag(inverse)
    expected = robust - (inverse @ robust) / precision
    return deviation - expected, 1 / np.sqrt(precision)


def _invert_matrix(covariance: Floats) -> Floats:
    return np.asarray(np.linalg.inv(covariance), dtype=np.float64)
