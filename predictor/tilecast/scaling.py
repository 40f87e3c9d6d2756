"""Find the fastest step on each pool for each number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast.advice import Constraints, Request
from tilecast.advice.pricing import DetailedForecasts, find_candidates
from tilecast.hardware import Pool


@dataclass(frozen=True, slots=True)
class FastestPlan:
    """The fastest plan on a number of GPUs of one pool, with the seconds and the cost of its steps."""

    gpus: int
    plan: str
    step_s: float
    lower_s: float
    upper_s: float
    """Upper end of the 90 % range of the step. `lower_s` is the lower end."""
    cost_per_1000_steps: float | None


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """The fastest plans of a job on one pool, one for each number of GPUs, ascending.

    Numbers of GPUs on which no plan fits are left out.
    """

    pool: str
    currency: str
    points: tuple[FastestPlan, ...]


def find_scaling_curves(request: Request, pools: Sequence[Pool]) -> tuple[ScalingCurve, ...]:
    """Return the scaling curve of every pool that can run the job, sorted by pool name.

    The job's constraints, objective, deadline and budget are ignored.
    """
    free = replace(request, objective="time", constraints=Constraints(), batches=None, deadline_s=None, budget=None)
    by_pool = (_find_curve(free, pool) for pool in sorted(pools, key=lambda pool: pool.name))
    return tuple(curve for curve in by_pool if curve.points)


def _find_curve(request: Request, pool: Pool) -> ScalingCurve:
    """Return the scaling curve of a job on a pool. If no plan fits, the curve has no points."""
    every = find_candidates(request, pool)
    fastest = []
    for gpus in np.unique(every.gpus[every.fits]):
        rows = np.flatnonzero(every.fits & (every.gpus == gpus))
        fastest.append(int(rows[np.argmin(every.step_s[rows])]))
    forecasts = DetailedForecasts.from_rows(every, np.array(fastest, dtype=np.int64))
    offers = [forecasts.offer(index) for index in range(len(fastest))]
    points = tuple(
        FastestPlan(item.gpus, str(item.plan), item.step_s, item.lower_s, item.upper_s, item.cost_per_1000_steps)
        for item in offers
    )
    return ScalingCurve(pool.name, pool.currency, points)
