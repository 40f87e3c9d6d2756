"""Keep a job's recommendation until another is clearly better, so that the advice does not flap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast.advice.pricing import CandidatePlans, DetailedForecasts, find_candidates
from tilecast.advice.values import Advice, Offer, Request
from tilecast.hardware import Pool
from tilecast.spec import Plan, Plans, Precision

MARGIN = 0.03
"""Share of the objective's value by which a new recommendation must be better to replace the previous one."""


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The previous recommendation of a job."""

    pool: str
    plan: Plan
    global_batch: int
    precision: Precision

    @classmethod
    def from_offer(cls, offer: Offer) -> Incumbent:
        return cls(offer.pool.name, offer.plan, offer.workload.global_batch, offer.workload.precision)

    def __str__(self) -> str:
        return f"{self.plan} on {self.plan.gpus} {self.pool}"


def keep_incumbent(advice: Advice, pools: Sequence[Pool], incumbent: Incumbent) -> Advice:
    """Return the advice with the previous recommendation first, unless it is invalid or beaten by `MARGIN`.

    The reason of the first offer says that the previous recommendation was kept, or why it was replaced.

    Args:
        advice: the advice of a new search.
        pools: the pools of that search.
        incumbent: the previous recommendation for the same request.
    """
    best = advice.best
    if best is None or Incumbent.from_offer(best) == incumbent:
        return advice
    offer = _price_incumbent(advice.request, pools, incumbent)
    if isinstance(offer, str):
        return _put_offers_first(advice, replace(best, reason=f"{best.reason}; replaces {incumbent}, {offer}"), ())
    standing, value = offer
    gain = 1 - _objective_value(advice.request, best) / value if value > 0 else 0.0
    if advice.request.objective_record.fewest_gpus and best.gpus < standing.gpus:
        gain = 1 - best.gpus / standing.gpus
    if gain >= MARGIN:
        return _put_offers_first(
            advice, replace(best, reason=f"{best.reason}; replaces {incumbent}, {gain:.0%} better"), ()
        )
    found = Incumbent.from_offer(best)
    other = f"{found} is {gain:.1%} better" if gain > 0 else f"{found} is no better"
    unchanged = replace(standing, reason=f"kept: {other}, a change needs {MARGIN:.0%}")
    return _put_offers_first(advice, unchanged, (best,))


def _put_offers_first(advice: Advice, first: Offer, second: tuple[Offer, ...]) -> Advice:
    return replace(advice, offers=(first, *second, *advice.offers[1:]))


def _price_incumbent(request: Request, pools: Sequence[Pool], incumbent: Incumbent) -> tuple[Offer, float] | str:
    """Return the previous recommendation priced anew, with its value, or the reason why it is no longer valid."""
    pool = next((item for item in pools if item.name == incumbent.pool), None)
    limits = request.constraints
    if pool is None:
        return "whose pool is gone"
    if limits.allowed_pools and pool.name not in limits.allowed_pools:
        return "whose pool is not allowed"
    if incumbent.plan.gpus > pool.max_gpus:
        return f"whose pool has {pool.max_gpus} GPUs now"
    candidates, row = _find_plan(request, pool, incumbent.plan, incumbent.global_batch, incumbent.precision)
    if row is None:
        return "which the job does not allow any more"
    if not candidates.fits[row]:
        return "which does not fit any more"
    value = float(candidates.objective_value(request)[row])
    if not (candidates.within(limits) & candidates.is_within_bound(request))[row] or not np.isfinite(value):
        return "which is out of the job's limits now"
    return DetailedForecasts.from_rows(candidates, np.array([row])).offer(0), value


def _objective_value(request: Request, offer: Offer) -> float:
    """Return the time or cost that the objective minimises. If the job forbids the offer, return infinity."""
    candidates, row = _find_plan(request, offer.pool, offer.plan, offer.workload.global_batch, offer.workload.precision)
    return float(candidates.objective_value(request)[row]) if row is not None else np.inf


def _find_plan(
    request: Request, pool: Pool, plan: Plan, batch: int, precision: str
) -> tuple[CandidatePlans, int | None]:
    """Return a plan priced in every variant of the job, and the row of the variant with `batch` and `precision`.

    Returns:
        The priced variants as candidates.
        The row of that variant in the candidates, or None if there is none.
    """
    candidates = find_candidates(request, pool, only_plans=Plans.from_plans(plan))
    meant = (
        index
        for index, variant in enumerate(candidates.variant)
        if (candidates.variants[variant].global_batch, candidates.variants[variant].precision) == (batch, precision)
    )
    return candidates, next(meant, None)
