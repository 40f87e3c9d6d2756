"""Build the planner's input from pools and from the plan search of `tilecast advise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilecast.advice import Constraints, Offer, Request
from tilecast.advice.choose import choose_plan, keep_sensible_plans
from tilecast.advice.enumeration import count_run_steps
from tilecast.advice.pricing import CandidatePlans, find_candidates
from tilecast.hardware import Pool
from tilecast.planner.problem import JobOption, PoolCapacity
from tilecast.search import Mask
from tilecast.spec import Ints, SpecError


def build_capacity(pool: Pool, held_gpus: int = 0) -> PoolCapacity:
    """Return the capacity of a pool in which `held_gpus` GPUs are used by jobs outside the plan."""
    return PoolCapacity(
        pool.name, pool.max_nodes, pool.gpus_per_node, held_gpus, {}, pool.price_per_gpu_hour, pool.currency
    )


def list_job_options(request: Request, pools: Sequence[Pool], remaining_fraction: float = 1.0) -> tuple[JobOption, ...]:
    """Return the options of a job: the best parallelization for each pool and useful GPU count.

    A GPU count is useful if its run is shorter than with every smaller count on that pool.

    Args:
        request: the job. Its objective, deadline and budget are ignored.
        pools: the pools that it may run on.
        remaining_fraction: the fraction of the run that is still to be done.

    Raises:
        SpecError: the request has neither a number of steps nor of tokens.
    """
    if request.workload.steps is None and request.tokens is None:
        problem = "how long the job runs is not known"
        raise SpecError("training.steps", problem, "give training.steps or training.tokens")
    asked = replace(request, objective="time", deadline_s=None, budget=None, baseline=None)
    return tuple(
        _to_job_option(offer, remaining_fraction)
        for pool in sorted(pools, key=lambda item: item.name)
        if not (request.constraints.allowed_pools and pool.name not in request.constraints.allowed_pools)
        if request.constraints.allow_sharing or not pool.gpu.mig
        for offer in _list_offers_by_gpus(asked, pool)
    )


def separate_length(request: Request) -> tuple[Request, int]:
    """Return a job that has the options of this one for a single step, and the number of this job's steps.

    Name, objective, deadline, budget and baseline, which options do not depend on, are left out. So jobs that differ
    only in these or in length share options, which `scale_options` multiplies. A job with a range of batch sizes or
    without a length keeps its length, and the number is 1.
    """
    asked = replace(request, name="", objective="time", deadline_s=None, budget=None, baseline=None)
    steps = None if request.batches else count_run_steps(request, request.workload.global_batch)
    if steps is None:
        return asked, 1
    return replace(asked, tokens=None, workload=replace(request.workload, steps=1)), steps


def scale_options(options: Sequence[JobOption], steps: int) -> tuple[JobOption, ...]:
    """Return options of a run that is `steps` times as long."""
    return tuple(
        replace(
            item,
            seconds=item.seconds * steps,
            lower_s=item.lower_s * steps,
            upper_s=item.upper_s * steps,
            cost=None if item.cost is None else item.cost * steps,
        )
        for item in options
    )


def _to_job_option(offer: Offer, remaining_fraction: float) -> JobOption:
    ratio = remaining_fraction * (offer.finish_s or 0.0) / offer.step_s
    return JobOption(
        pool=offer.pool.name,
        gpus=offer.gpus,
        seconds=offer.step_s * ratio,
        lower_s=offer.lower_s * ratio,
        upper_s=offer.upper_s * ratio,
        cost=None if offer.cost_to_finish is None else offer.cost_to_finish * remaining_fraction,
        plan=str(offer.plan),
        step_s=offer.step_s,
    )


def _list_offers_by_gpus(request: Request, pool: Pool) -> list[Offer]:
    """Return the recommended offer for each useful GPU count of a pool, in ascending order of counts."""
    plans = find_candidates(request, pool)
    allowed = plans.within(request.constraints) & plans.fits
    allowed &= (plans.gpus <= pool.gpus_per_node) | (plans.gpus % pool.gpus_per_node == 0)
    offers = []
    for gpus in _list_useful_gpu_counts(plans, allowed):
        exact = replace(request, constraints=Constraints(gpus=gpus, max_tensor=request.constraints.max_tensor))
        choice = choose_plan(exact, plans, keep_sensible_plans(exact, plans, allowed & (plans.gpus == gpus)))
        if choice is not None:
            offers.append(choice.offer())
    return offers


def _list_useful_gpu_counts(plans: CandidatePlans, allowed: Mask) -> list[int]:
    """Return the GPU counts whose fastest run is shorter than with every smaller count, ascending.

    Args:
        plans: the plans of one pool.
        allowed: which of the plans are considered.
    """
    counts, shortest = list[int](), np.inf
    for gpus in np.unique(plans.gpus[allowed]).tolist():
        rows: Ints = np.flatnonzero(allowed & (plans.gpus == gpus))
        best = float(plans.finish_s[rows].min())
        if best < shortest:
            counts.append(int(gpus))
            shortest = best
    return counts
