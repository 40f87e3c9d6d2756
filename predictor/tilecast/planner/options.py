"""Options of jobs from the search of `tilecast advise`, and capacities of pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilecast.advice import Constraints, Offer, Request
from tilecast.advice.choose import choose_plan, keep_sensible_plans
from tilecast.advice.pricing import Candidates, find_candidates
from tilecast.hardware import Pool
from tilecast.planner.problem import JobOption, PoolCapacity
from tilecast.search import Mask
from tilecast.spec import Ints, SpecError


def pool_capacity(pool: Pool, held_gpus: int = 0) -> PoolCapacity:
    """Return the capacity of a pool, of which others hold `held_gpus` GPUs."""
    return PoolCapacity(
        pool.name, pool.max_nodes, pool.gpus_per_node, held_gpus, {}, pool.price_per_gpu_hour, pool.currency
    )


def job_options(request: Request, pools: Sequence[Pool], left: float = 1.0) -> tuple[JobOption, ...]:
    """Return an option for the best plan on every pool and GPU count.

    A GPU count is included only if it is faster than every smaller one.

    Args:
        request: the job; its objective, deadline and budget are ignored.
        pools: the pools that it may run on.
        left: the share of its run that is still to come.

    Raises:
        SpecError: the length of the job's run is not known.
    """
    if request.workload.steps is None and request.tokens is None:
        problem = "how long the job runs is not known"
        raise SpecError("training.steps", problem, "give training.steps or training.tokens")
    asked = replace(request, objective="time", deadline_s=None, budget=None, baseline=None)
    return tuple(
        _to_job_option(offer, left)
        for pool in sorted(pools, key=lambda item: item.name)
        if not (request.constraints.allowed_pools and pool.name not in request.constraints.allowed_pools)
        if request.constraints.allow_sharing or not pool.gpu.mig
        for offer in _offers_by_gpus(asked, pool)
    )


def _to_job_option(offer: Offer, left: float) -> JobOption:
    ratio = left * (offer.finish_s or 0.0) / offer.step_s
    return JobOption(
        pool=offer.pool.name,
        gpus=offer.gpus,
        seconds=offer.step_s * ratio,
        lower_s=offer.lower_s * ratio,
        upper_s=offer.upper_s * ratio,
        cost=None if offer.cost_to_finish is None else offer.cost_to_finish * left,
        plan=str(offer.plan),
        step_s=offer.step_s,
    )


def _offers_by_gpus(request: Request, pool: Pool) -> list[Offer]:
    """Return the recommended plan for each useful GPU count of a pool, in ascending order of counts."""
    plans = find_candidates(request, pool)
    allowed = plans.within(request.constraints) & plans.fits
    allowed &= (plans.gpus <= pool.gpus_per_node) | (plans.gpus % pool.gpus_per_node == 0)
    offers = []
    for gpus in _faster_gpu_counts(plans, allowed):
        exact = replace(request, constraints=Constraints(gpus=gpus, max_tensor=request.constraints.max_tensor))
        choice = choose_plan(exact, plans, keep_sensible_plans(exact, plans, allowed & (plans.gpus == gpus)))
        if choice is not None:
            offers.append(choice.offer())
    return offers


def _faster_gpu_counts(plans: Candidates, allowed: Mask) -> list[int]:
    """Return the GPU counts whose best run is shorter than the best run of every smaller count."""
    counts, shortest = list[int](), np.inf
    for gpus in np.unique(plans.gpus[allowed]).tolist():
        rows: Ints = np.flatnonzero(allowed & (plans.gpus == gpus))
        best = float(plans.finish_s[rows].min())
        if best < shortest:
            counts.append(int(gpus))
            shortest = best
    return counts
