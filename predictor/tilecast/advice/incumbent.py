"""Keep a recommendation until another is clearly better: advice that flaps helps nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast.advice.pricing import Candidates, Details, find_candidates
from tilecast.advice.values import Advice, Offer, Request
from tilecast.hardware import Pool
from tilecast.spec import Plan, Plans, Precision

MARGIN = 0.03
"""Share by which the objective must find a new recommendation better before it replaces the standing one."""


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The previous recommendation: its pool, plan, global batch and precision."""

    pool: str
    plan: Plan
    global_batch: int
    precision: Precision

    def __str__(self) -> str:
        return f"{self.plan} on {self.plan.gpus} {self.pool}"


def hold(advice: Advice, pools: Sequence[Pool], incumbent: Incumbent) -> Advice:
    """Return the advice with the standing recommendation first, unless it is invalid or beaten by `MARGIN`.

    The reason of the first offer says which of these it was. It says nothing where the new recommendation is the same.

    Args:
        advice: the result of the search now.
        pools: the pools that it was found on.
        incumbent: the previous recommendation for the same request.
    """
    best = advice.best
    if best is None or _of(best) == incumbent:
        return advice
    offer = _current(advice.request, pools, incumbent)
    if isinstance(offer, str):
        return _with(advice, replace(best, reason=f"{best.reason}; replaces {incumbent}, {offer}"), ())
    standing, value = offer
    gain = 1 - _value(advice.request, best) / value if value > 0 else 0.0
    if advice.request.goal.fewest_gpus and best.gpus < standing.gpus:
        gain = 1 - best.gpus / standing.gpus
    if gain >= MARGIN:
        return _with(advice, replace(best, reason=f"{best.reason}; replaces {incumbent}, {gain:.0%} better"), ())
    other = f"{_of(best)} is {max(gain, 0.0):.1%} better" if gain > 0 else f"{_of(best)} is no better"
    unchanged = replace(standing, reason=f"kept: {other}, a change needs {MARGIN:.0%}")
    return _with(advice, unchanged, (best,))


def _with(advice: Advice, first: Offer, then: tuple[Offer, ...]) -> Advice:
    return replace(advice, offers=(first, *then, *advice.offers[1:]))


def _of(offer: Offer) -> Incumbent:
    return Incumbent(offer.pool.name, offer.plan, offer.workload.global_batch, offer.workload.precision)


def _current(request: Request, pools: Sequence[Pool], incumbent: Incumbent) -> tuple[Offer, float] | str:
    """Return the standing recommendation, priced anew, and its value; or the reason why it is not valid any more."""
    pool = next((item for item in pools if item.name == incumbent.pool), None)
    limits = request.constraints
    if pool is None:
        return "whose pool is gone"
    if limits.allowed_pools and pool.name not in limits.allowed_pools:
        return "whose pool is not allowed"
    if incumbent.plan.gpus > pool.max_gpus:
        return f"whose pool has {pool.max_gpus} GPUs now"
    candidates, row = _row(request, pool, incumbent.plan, incumbent.global_batch, incumbent.precision)
    if row is None:
        return "which the job does not allow any more"
    if not candidates.fits[row]:
        return "which does not fit any more"
    value = float(candidates.value(request)[row])
    if not (candidates.within(limits) & candidates.allowed(request))[row] or not np.isfinite(value):
        return "which is out of the job's limits now"
    return Details.of(candidates, np.array([row])).offer(0), value


def _value(request: Request, offer: Offer) -> float:
    """Return the value of an offer that the objective minimises; infinite if the job does not allow the offer."""
    candidates, row = _row(request, offer.pool, offer.plan, offer.workload.global_batch, offer.workload.precision)
    return float(candidates.value(request)[row]) if row is not None else np.inf


def _row(request: Request, pool: Pool, plan: Plan, batch: int, precision: str) -> tuple[Candidates, int | None]:
    """Return one plan as candidates, one per variant of the job, and the row with this batch and precision."""
    candidates = find_candidates(request, pool, exactly=Plans.of(plan))
    meant = (
        index
        for index, variant in enumerate(candidates.variant)
        if (candidates.variants[variant].global_batch, candidates.variants[variant].precision) == (batch, precision)
    )
    return candidates, next(meant, None)
