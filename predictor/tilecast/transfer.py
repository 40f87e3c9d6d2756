"""What a job's own measured runs teach about its forecasts on every other GPU, count and plan.

The logarithm of raw forecast over measurement, less what the cluster's other runs explain (`calibration`), is a sum of
deviations that runs of one job share: of the job wherever it runs; of how its plan cuts the model; of that and of what
is computed; of the GPU's architecture; of one and the same setting; and of the run alone. `calibration.toml` says how
large each is. They cross: runs on two GPUs share what their plans have alike, runs of two plans what their GPUs have.
What is expected of a setting is the best linear unbiased prediction c' K^-1 d (Henderson 1975; Robinson, Statistical
Science 6, 1991), so a run moves its own job everywhere, by as much as what the two share deserves, and no other job.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from tilecast.spec import Floats, Plan, Plans, Workload

MOST = 3.0
"""A correction beyond this factor is no error of a forecast but another job; it stays at the factor."""
LEVELS = ("job", "split", "shape", "architecture", "setting")
"""The deviations that runs of one job share, as `alike` has them."""
SPLIT = ("tensor", "pipeline", "context", "expert", "zero_stage", "checkpointing")
"""What of a plan says how it cuts the model; the rest says how many copies there are, and of how many samples."""
_WHOLE = tuple(item.name for item in fields(Plans))


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU and what a job computes there, as far as a deviation of its forecast may go with it."""

    gpu: str
    architecture: str
    precision: str
    sequence_length: int
    global_batch: int

    @classmethod
    def of(cls, gpu: str, architecture: str, workload: Workload) -> Place:
        """That of a workload on a GPU."""
        return cls(gpu, architecture, workload.precision, workload.sequence_length, workload.global_batch)


@dataclass(frozen=True, slots=True)
class Own:
    """A measured run of the job."""

    place: Place
    plan: Plan
    deviation: float
    """log(predicted / observed), of the forecast as it is without the job's own runs."""
    reports: int = 1
    """Medians of steps that the measurement is the median of."""


def alike(own: Own, place: Place, plans: Plans) -> npt.NDArray[np.bool_]:
    """Which of the deviations, a row for each of `LEVELS`, a run shares with each of the plans at a place, (5, n)."""
    seen, ran = own.place, Plans.of(own.plan)
    shape = (seen.precision, seen.sequence_length) == (place.precision, place.sequence_length)
    every = np.ones(len(plans), dtype=bool)
    split = np.all([getattr(plans, name) == getattr(ran, name) for name in SPLIT], axis=0)
    whole = np.all([getattr(plans, name) == getattr(ran, name) for name in _WHOLE], axis=0)
    return np.stack(
        [every, split, split & shape, every & (seen.architecture == place.architecture), whole & (seen == place)]
    )


@cache
def deviations() -> Mapping[str, float]:
    """The standard deviations that ship with Tilecast, and `narrowing`."""
    text = files("tilecast").joinpath("calibration.toml").read_text(encoding="utf-8")
    return {name: float(value) for name, value in tomllib.loads(text)["job"].items()}


@dataclass(frozen=True, slots=True)
class Transfer:
    """The runs of one job, and what they make of its forecasts; without any, forecasts stay as they are."""

    runs: tuple[Own, ...] = ()

    def columns(self, place: Place, plans: Plans, known: Mapping[str, float] | None = None) -> tuple[Floats, Floats]:
        """What the steps of plans are multiplied by, and what the half-width of their ranges is, (n,) each.

        Args:
            place: the GPU, and what is computed there.
            plans: the plans, (n,).
            known: other deviations than `deviations()`.
        """
        if not self.runs:
            return np.ones(len(plans)), np.ones(len(plans))
        known = known or deviations()
        variance = np.array([known[name] ** 2 for name in LEVELS])
        ran = Plans.of(*(one.plan for one in self.runs))
        among = np.stack(
            [self._shared(variance, one.place, ran.take(np.array([row]))) for row, one in enumerate(self.runs)]
        )
        noise = [known["run"] ** 2 + known["report"] ** 2 / one.reports for one in self.runs]
        inverse = np.linalg.inv(among[:, :, 0] + np.diag(noise))
        shared = self._shared(variance, place, plans)
        expected = np.array([one.deviation for one in self.runs]) @ inverse @ shared
        explained = np.einsum("in,ij,jn->n", shared, inverse, shared) / (variance.sum() + known["run"] ** 2)
        ratio = np.clip(np.exp(-expected), 1 / MOST, MOST)
        return ratio, np.asarray((1.0 - np.clip(explained, 0.0, 1.0)) ** known["narrowing"])

    def _shared(self, variance: Floats, place: Place, plans: Plans) -> Floats:
        """The covariance of each run's deviation with that of each plan at a place, (k, n)."""
        return np.stack([variance @ alike(one, place, plans) for one in self.runs])
