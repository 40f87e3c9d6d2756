"""What measured steps teach about forecasts: the error, and the correction that follows from many of them.

The logarithm of raw forecast over measurement is the sum of independent deviations, each shared by the runs of one
group: of the cluster, of a GPU, of a precision and model family on it, of a range of GPU counts, of one workload, and
of the run alone; and, across all GPUs, of a framework and model family. `calibration.toml` says how large each is.
Given the runs seen so far, the expected deviation of a new run is the best linear unbiased prediction (Henderson 1975;
Robinson, Statistical Science 6, 1991): every group is shrunk towards the coarser one that holds it, and towards 0, by
exactly as much as its runs leave open. What a job's own runs teach of it elsewhere is `transfer`'s.

A group counts only once it has `LEAST` observations, so that nothing moves on one. Runs far from the others are drawn
in (Huber's weights). Where the newest runs of a pool contradict its older ones, the older ones no longer count.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tilecast.spec import Floats, Ints, Workload

LEAST = 3
"""Observations that a group needs before it moves a forecast."""
ENOUGH = 3
"""Runs of a workload's own group from which a forecast no longer counts as unproven."""
MOST = 3.0
"""A correction beyond this factor is no error of a forecast but another job; it stays at the factor."""
HUBER = 2.5
"""Standard deviations from which a run is drawn in."""
COVER = 0.9
Z = 1.645
"""Half-width of a normal variable's 90 % range."""
NEWEST = 8
"""At most so many of a pool's runs are held against the older ones, and at least half as many."""
DRIFT = 4.0
"""Standard errors by which the newest runs must lie apart from the older ones to supersede them."""


ValueT = TypeVar("ValueT", Floats, np.float64)


def relative_error(predicted: ValueT, observed: ValueT) -> ValueT:
    """The signed relative error, (predicted - observed) / observed: +0.3 is a forecast 30 % too slow. Columns (n,)."""
    return (predicted - observed) / observed


def digest(workload: Workload) -> str:
    """A short name for everything that a workload's step depends on."""
    said = json.dumps(asdict(replace(workload, steps=None)), sort_keys=True, default=repr)
    return hashlib.sha256(said.encode()).hexdigest()[:8]


def scale(gpus: int) -> str:
    """The range that a GPU count falls into."""
    return next(name for limit, name in SCALES if gpus <= limit)


SCALES: tuple[tuple[float, str], ...] = ((1, "1"), (8, "2-8"), (64, "9-64"), (math.inf, ">64"))


Key: TypeAlias = tuple[str, ...]
"""From coarse to fine: GPU, precision, family, scale, workload. Shorter keys are coarser groups."""


@dataclass(frozen=True, slots=True)
class Run:
    """One job that ran: what it was, and its step in seconds as forecast, uncorrected, and as measured (a median)."""

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
    """As `framework_of` names it; empty where that is not known, and then the run shares nothing by it."""

    @property
    def deviation(self) -> float:
        """log(predicted / observed)."""
        return math.log(self.predicted_s / self.observed_s)


LEVELS: tuple[tuple[str, int], ...] = (("cluster", 0), ("gpu", 1), ("kind", 3), ("scale", 4), ("workload", 5))
"""The deviation that the runs of a group share, and how much of a key names the group."""


SOFTWARE = "software"
"""The deviation that runs of one framework and model family share over all GPUs, crossed with those of `LEVELS`."""


def framework_of(workload: Workload) -> str:
    """What the runs of a workload's framework have in common, where it names none too."""
    return workload.framework or "none"


def group(run: Run) -> Key:
    """The finest group of a run."""
    return (run.gpu, run.precision, run.family, run.scale, run.workload)


@dataclass(frozen=True, slots=True)
class Correction:
    """What is known of one group. A forecast times `ratio` is the calibrated one."""

    group: Key = ()
    ratio: float = 1.0
    width: float = 1.0
    """Factor on the half-width, as a logarithm, of the range that is given without any run."""
    runs: int = 0
    """Runs of the cluster that the ratio rests on, all groups together."""
    own: int = 0
    """Those of the group itself."""
    observations: int = 0
    """Reports of the group's own runs."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections by group; a group without one takes that of the next coarser. Without any, forecasts stay."""

    corrections: tuple[Correction, ...] = ()
    software: tuple[Correction, ...] = ()
    """By framework and model family, on every GPU, beside the other."""

    @property
    def runs(self) -> int:
        """Runs that the corrections rest on."""
        return max((item.runs for item in self.corrections), default=0)

    def at(self, key: Key) -> Correction:
        """What applies to a group."""
        by_group = {item.group: item for item in self.corrections}
        return next((by_group[key[:depth]] for _, depth in reversed(LEVELS) if key[:depth] in by_group), Correction())

    def of(self, gpu: str, workload: Workload, gpus: int) -> Correction:
        """What applies to a workload on so many GPUs of a kind."""
        if not self.corrections:
            return Correction()
        found = self.at((gpu, workload.precision, workload.model.family, scale(gpus), digest(workload)))
        return replace(found, ratio=found.ratio * self.crossed(framework_of(workload), workload.model.family))

    def crossed(self, framework: str, family: str) -> float:
        """The ratio of a framework and family, which the others are multiplied by."""
        return next((item.ratio for item in self.software if item.group == (framework, family)), 1.0)

    def columns(self, gpu: str, workload: Workload, gpus: Ints) -> tuple[Floats, Floats]:
        """Ratio and width for each GPU count, (n,) each."""
        ratio, width = np.ones(len(gpus)), np.ones(len(gpus))
        if self.corrections:
            named = digest(workload)
            crossed = self.crossed(framework_of(workload), workload.model.family)
            least = 0.0
            for most, name in SCALES:
                rows = (gpus > least) & (gpus <= most)
                one = self.at((gpu, workload.precision, workload.model.family, name, named))
                ratio[rows], width[rows], least = one.ratio * crossed, one.width, most
        return ratio, width

    def differs(self, other: Calibration, tolerance: float = 0.01) -> bool:
        """Whether a forecast or its range would change by more than the tolerance, or runs became twice as many."""
        names = {item.group for item in (*self.software, *other.software)}
        if any(abs(math.log(self.crossed(*name) / other.crossed(*name))) > tolerance for name in names):
            return True
        keys = {item.group for item in (*self.corrections, *other.corrections)}
        return any(_differ(self.at(key), other.at(key), tolerance) for key in keys)


def _differ(one: Correction, two: Correction, tolerance: float) -> bool:
    most, least = max(one.runs, two.runs), min(one.runs, two.runs)
    return (
        abs(math.log(one.ratio / two.ratio)) > tolerance
        or abs(math.log(one.width / two.width)) > 5 * tolerance
        or most >= 2 * least + (least == 0)
        or (one.own < ENOUGH) != (two.own < ENOUGH)
    )


@cache
def deviations() -> Mapping[str, float]:
    """The standard deviations that ship with Tilecast."""
    text = files("tilecast").joinpath("calibration.toml").read_text(encoding="utf-8")
    return {name: float(value) for name, value in tomllib.loads(text)["deviation"].items()}


def fit(runs: Sequence[Run], known: Mapping[str, float] | None = None) -> Calibration:
    """The correction of every group that has a run, and of those that hold it.

    Args:
        runs: oldest first; those that `drifted` supersedes are left aside.
        known: other deviations than `deviations()`.
    """
    found = _Fit.of(current(runs), known or deviations())
    if found is None:
        return Calibration()
    keys = sorted({group(run)[:depth] for run in found.runs for _, depth in LEVELS})
    names = sorted({(run.framework, run.family) for run in found.runs if run.framework})
    return Calibration(
        tuple(one for key in keys if (one := found.correction(key)) is not None),
        tuple(one for name in names if (one := found.crossed(name)) is not None),
    )


def left_out(runs: Sequence[Run], known: Mapping[str, float] | None = None) -> Floats:
    """The signed relative error of every current run under a calibration that has not seen it, (n,)."""
    now = current(runs)
    found = _Fit.of(now, known or deviations())
    deviation = np.array([run.deviation for run in now])
    error: Floats = np.expm1(deviation if found is None else found.left_out())
    return error


def current(runs: Iterable[Run]) -> list[Run]:
    """The runs that still count: of a pool that drifted, only those since."""
    by_pool: dict[str, list[Run]] = {}
    for run in runs:
        by_pool.setdefault(run.pool, []).append(run)
    out = []
    for members in by_pool.values():
        since = drifted(members)
        out += members[since or 0 :]
    return out


def drifted(runs: Sequence[Run]) -> int | None:
    """The index of the run with which a pool's errors began to differ from before; None where they did not.

    The newest runs, of any count from half of `NEWEST` to `NEWEST`, are held against those before: medians, and the
    median absolute deviation as the spread. Of several counts that tell them apart the one counts that leaves the least
    absolute deviation.
    """
    deviation = np.array([run.deviation for run in runs])
    floor = deviations()["report"]
    found: list[tuple[float, int]] = []
    for count in range(NEWEST // 2, min(NEWEST, len(runs) - NEWEST // 2) + 1):
        old, new = deviation[:-count], deviation[-count:]
        rest = np.concatenate([old - np.median(old), new - np.median(new)])
        error = 1.2533 * max(_mad(rest), floor) * math.sqrt(1 / len(new) + 1 / len(old))
        if abs(float(np.median(new) - np.median(old))) > DRIFT * error:
            found.append((float(np.abs(rest).sum()), len(runs) - count))
    return min(found)[1] if found else None


def median(values: Sequence[float]) -> float:
    """The median of a window of reports without those further than five median absolute deviations from it."""
    column = np.asarray(values, dtype=float)
    middle = float(np.median(column))
    reach = 5 * max(_mad(column - middle), 0.01 * middle)
    return float(np.median(column[np.abs(column - middle) <= reach]))


def _mad(residuals: Floats) -> float:
    """A standard deviation from the median absolute one."""
    return 1.4826 * float(np.median(np.abs(residuals)))


def _crossed(runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
    """Which runs share the deviation of a framework and family that was observed often enough, (n, n); a run of a known
    framework has one of its own in any case."""
    named = np.array([bool(run.framework) for run in runs])
    reports = np.array([run.observations for run in runs])
    _, of = np.unique([f"{run.framework}|{run.family}" for run in runs], return_inverse=True)
    enough = np.bincount(of, reports)[of] >= LEAST
    return np.asarray((of[:, None] == of[None]) & (named & enough)[:, None]) | np.diag(named)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Runs with their inverse covariance."""

    runs: tuple[Run, ...]
    known: Mapping[str, float]
    keys: tuple[Key, ...]
    counts: Mapping[tuple[int, Key], int]
    inverse: Floats
    """Of the covariance of the deviations, (n, n)."""
    drawn: Floats
    """Deviations, outliers drawn in, (n,)."""

    @classmethod
    def of(cls, runs: Sequence[Run], known: Mapping[str, float]) -> _Fit | None:
        if not runs:
            return None
        keys = tuple(group(run) for run in runs)
        counts: Counter[tuple[int, Key]] = Counter()
        for run, key in zip(runs, keys, strict=True):
            for _, depth in LEVELS:
                counts[depth, key[:depth]] += run.observations
        if counts[0, ()] < LEAST:
            return None
        noise = np.array([known["run"] ** 2 + known["report"] ** 2 / run.observations for run in runs])
        covariance = np.diag(noise)
        for name, depth in LEVELS:
            variance = known[name] ** 2
            _, member = np.unique(["|".join(key[:depth]) for key in keys], return_inverse=True)
            holds = np.array([counts[depth, key[:depth]] >= LEAST for key in keys])
            covariance += variance * ((member[:, None] == member[None]) & holds[:, None])
            covariance += np.diag(variance * ~holds)
        covariance += known[SOFTWARE] ** 2 * _crossed(runs)
        inverse = np.linalg.inv(covariance)
        deviation = np.array([run.deviation for run in runs])
        drawn = deviation
        for _ in range(5):
            apart, spread = cls._apart(inverse, drawn, deviation)
            drawn = deviation - apart + np.clip(apart, -HUBER * spread, HUBER * spread)
        return cls(tuple(runs), known, keys, counts, inverse, drawn)

    @staticmethod
    def _apart(inverse: Floats, drawn: Floats, deviation: Floats) -> tuple[Floats, Floats]:
        """How far each run lies from what the others expect of it, and how far it may (Rasmussen and Williams 2006,
        equations 5.10 to 5.12), (n,)."""
        precision = np.diag(inverse)
        expected = drawn - (inverse @ drawn) / precision
        return deviation - expected, 1 / np.sqrt(precision)

    def left_out(self) -> Floats:
        """Each run's deviation less what the others expect, (n,)."""
        return self._apart(self.inverse, self.drawn, np.array([run.deviation for run in self.runs]))[0]

    def correction(self, key: Key) -> Correction | None:
        """That of one group; None where the group adds nothing to the coarser one that holds it."""
        if self.counts[len(key), key] < LEAST:
            return None
        shared = np.zeros(len(self.runs))
        before = 0.0
        for name, depth in LEVELS:
            variance = self.known[name] ** 2
            before += variance
            if depth <= len(key) and self.counts[depth, key[:depth]] >= LEAST:
                shared += variance * np.array([own[:depth] == key[:depth] for own in self.keys])
        expected = float(shared @ self.inverse @ self.drawn)
        after = before - float(shared @ self.inverse @ shared)
        noise = self.known["run"] ** 2
        own = sum(one[: len(key)] == key for one in self.keys)
        bounded = min(max(math.exp(-expected), 1 / MOST), MOST)
        return Correction(
            group=key,
            ratio=float(f"{bounded:.4g}"),
            width=float(f"{math.sqrt((after + noise) / (before + noise)) * self._spread():.3g}"),
            runs=len(self.runs),
            own=own,
            observations=self.counts[len(key), key],
        )

    def crossed(self, name: tuple[str, str]) -> Correction | None:
        """That of a framework and family on every GPU; None where too little was observed of it."""
        own = np.array([(run.framework, run.family) == name for run in self.runs])
        observations = sum(run.observations for run, mine in zip(self.runs, own, strict=True) if mine)
        if observations < LEAST:
            return None
        expected = self.known[SOFTWARE] ** 2 * float(own @ self.inverse @ self.drawn)
        ratio = min(max(math.exp(-expected), 1 / MOST), MOST)
        return Correction(name, float(f"{ratio:.4g}"), 1.0, len(self.runs), int(own.sum()), observations)

    def _spread(self) -> float:
        """How much wider than assumed the runs really lie: their errors' 90 % quantile in units of the assumed one,
        weighed against as many runs that lie as assumed as it takes to know a quantile."""
        apart, spread = self._apart(self.inverse, self.drawn, np.array([run.deviation for run in self.runs]))
        held = np.sort(np.abs(apart) / spread)
        rank = min(math.ceil((len(held) + 1) * COVER), len(held)) - 1
        weight = len(held) / (len(held) + 1 / (1 - COVER))
        return math.sqrt(1 - weight + weight * float(held[rank] / Z) ** 2)
