"""Judge each pool, which gives a choice among its plans or a reason against it, and order the choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tilecast import memory, search, uncertainty
from tilecast.advice.choose import Choice, choose, sensible
from tilecast.advice.rank import Candidates
from tilecast.advice.values import Rejection, Request
from tilecast.hardware import Pool
from tilecast.search import Mask
from tilecast.spec import PRECISIONS, Precision


def choose_or_reject(request: Request, candidates: Candidates) -> Choice | Rejection:
    """Return the plan that represents a pool in the ranking, or the reason why the pool has none."""
    pool, limits = candidates.pool, request.constraints
    within = candidates.within(limits)
    if limits.allowed_pools and pool.name not in limits.allowed_pools:
        return Rejection(pool.name, "NotAllowed", "not in constraints.allowedPools", f"add {pool.name} to it")
    if pool.gpu.mig and not limits.allow_sharing:
        return Rejection(pool.name, "SharingNotAllowed", "a slice of a GPU", "set constraints.allowSharing")
    if not candidates.variants:
        return _reject_precision(request, pool)
    if not within.any():
        return _reject_gpu_count(request, pool)
    if not (within & candidates.fits).any():
        return _reject_memory(request, candidates, within)
    if request.goal.needs_price and pool.price_per_gpu_hour is None:
        return Rejection(pool.name, "PriceUnknown", "no price known", "give its GPUPool a price")
    mask = sensible(request, candidates, within & candidates.fits & candidates.allowed(request))
    return choose(request, candidates, mask) or _reject_bound(request, candidates, within & candidates.fits)


def rank_key(request: Request, choice: Choice) -> tuple[float, float, int, str]:
    """Return the sort key of a choice: the lowest is the best."""
    few = choice.gpus if request.goal.fewest_gpus else 0
    return few, choice.value, choice.gpus, choice.candidates.pool.name


@dataclass(frozen=True, slots=True)
class Ranking:
    """Choices of all pools: the recommended one first, then the others by their value."""

    choices: tuple[Choice, ...]
    ties: int
    """Number of plans that the forecast cannot tell apart from the recommended one."""
    ratio: float
    """Forecast of the recommended plan over the lowest forecast among those that tie with it."""


def rank_choices(request: Request, choices: Iterable[Choice]) -> Ranking:
    """Rank the choices and decide which one is recommended among the pools that tie.

    Of the pools that tie with the best one, those with memory to spare are preferred, then those that are not clearly
    behind in the criterion that the objective leaves open, then the one whose plan is tried first
    (`choose.simplicity`).
    """
    ranked = sorted(choices, key=lambda choice: rank_key(request, choice))
    if not ranked:
        return Ranking((), 0, 1.0)
    few = rank_key(request, ranked[0])[0]
    first = min((choice for choice in ranked if rank_key(request, choice)[0] == few), key=lambda choice: choice.best)
    tied = [choice for choice in ranked if choice is first or _ties(request, first, choice)]
    chosen = min(_preferred(tied), key=lambda choice: (*choice.preference, choice.value))
    others = (choice for choice in ranked if choice is not chosen)
    ratio = chosen.value / first.best if first.best > 0 else 1.0
    return Ranking((chosen, *others), len(tied) - 1 + chosen.ties, ratio)


def _preferred(tied: list[Choice]) -> list[Choice]:
    """Return the choices to prefer among those that tie.

    Those with memory to spare stay, and of these the ones that are not clearly behind in the other criterion. That
    criterion decides nothing if it is unknown for one of them, or if prices are in two currencies.
    """
    roomy = [choice for choice in tied if not choice.is_tight] or tied
    known = (
        all(choice.other > 0 for choice in roomy) and len({choice.candidates.pool.currency for choice in roomy}) == 1
    )
    if not known:
        return roomy
    least = min(roomy, key=lambda choice: choice.other)
    return [choice for choice in roomy if choice is least or choice.other <= least.other * _width(least, choice)]


def _ties(request: Request, first: Choice, other: Choice) -> bool:
    """Check whether the forecast cannot tell the choice of one pool from the best plan of another."""
    same = rank_key(request, first)[0] == rank_key(request, other)[0]
    return same and other.value <= first.best * _width(first, other)


def _width(one: Choice, other: Choice) -> float:
    """Return the largest ratio at which the forecast cannot tell two choices apart."""
    return float(np.exp(uncertainty.tie_between(one.errors, other.errors)[0]))


def is_tie(request: Request, best: Choice, other: Choice) -> bool:
    """Check whether the forecast cannot tell the choices of two pools apart; `best` must not be behind `other`."""
    if rank_key(request, best)[0] != rank_key(request, other)[0] or best.value <= 0:
        return False
    return other.value <= best.value * _width(best, other)


def usable_precisions(request: Request, pool: Pool) -> list[Precision]:
    """Return the precisions that the pool's GPU supports and the job's framework trains in, the most usual first."""
    framework = request.workload.framework
    able = search.abilities(framework).precisions if framework else PRECISIONS
    named: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    return [name for name in named if pool.gpu.supports(name) and name in able]


def _reject_precision(request: Request, pool: Pool) -> Rejection:
    other = next(iter(usable_precisions(request, pool)), "another precision")
    asked = " or ".join(name.upper() for name in dict.fromkeys((request.workload.precision, *request.precisions)))
    return Rejection(pool.name, "PrecisionNotSupported", f"no {asked} units", f"train in {other}")


def _reject_gpu_count(request: Request, pool: Pool) -> Rejection:
    """Return the reason why no plan of the pool could be enumerated."""
    batch, limits = request.workload.global_batch, request.constraints
    most = min(
        pool.max_gpus,
        limits.max_gpus or pool.max_gpus,
        limits.max_nodes * pool.gpus_per_node if limits.max_nodes else pool.max_gpus,
    )
    if pool.max_gpus == 0:
        return Rejection(pool.name, "EmptyPool", "the pool has no node", "raise its maxNodes")
    if limits.gpus is not None and limits.gpus > most:
        remedy = f"ask for at most {most}" if most == pool.max_gpus else "raise maxGpus or maxNodes"
        return Rejection(pool.name, "TooFewGpus", f"{limits.gpus} GPUs asked, {most} may be used", remedy)
    if limits.gpus is not None and limits.gpus > pool.gpus_per_node and limits.gpus % pool.gpus_per_node:
        message = f"{limits.gpus} GPUs do not fill nodes of {pool.gpus_per_node} evenly"
        return Rejection(pool.name, "UnevenNodes", message, f"ask for a multiple of {pool.gpus_per_node}")
    count = "no GPU count" if limits.gpus is None else f"no split of {limits.gpus} GPUs"
    message = f"{count} divides batch {batch} and the model"
    other = "" if limits.gpus is None else "ask for another GPU count, or "
    return Rejection(pool.name, "NoDivisiblePlan", message, f"{other}choose a global batch with more divisors")


def _reject_memory(request: Request, candidates: Candidates, within: Mask) -> Rejection:
    """Return the rejection of a pool without enough memory, for its leanest plan and the largest item of its bill."""
    rows = np.flatnonzero(within)
    row = int(rows[np.argmin(candidates.memory_bytes[rows])])
    plan, workload = candidates.plans.row(row), candidates.variants[candidates.variant[row]]
    bill = candidates.tables[candidates.table[row]].bill(candidates.origin[row : row + 1]).items(0)
    largest = max(bill, key=lambda name: bill[name])
    needed, available = float(candidates.memory_bytes[row]), memory.usable_bytes(candidates.pool.gpu)
    over = needed - available
    gib = 2**30
    message = f"{largest} {bill[largest] / gib:.1f} GiB; {over / gib:.1f} GiB too much"
    if request.plan is not None:
        message = f"{plan} needs {message}"
    code = "OutOfMemory"
    if workload.model.trace is not None:
        code, message = "TensorParallelUnsupported", f"{message}; a graph is split by data and pipeline, not by tensor"
    return Rejection(
        candidates.pool.name,
        code,
        message,
        _REMEDIES["samples" if largest == "activations" and not workload.samples_are_tokens else largest],
        plan,
        needed,
        available,
    )


_REMEDIES: Mapping[str, str] = {
    "parameters": "more GPUs per job, or GPUs with more memory",
    "gradients": "more GPUs per job, or GPUs with more memory",
    "optimizer": "more GPUs per job, or a leaner optimizer",
    "activations": "a shorter sequence, or a smaller micro-batch",
    "samples": "a smaller micro-batch",
    "working": "a shorter sequence, or a loss computed in chunks",
    "buffers": "more GPUs per job, or smaller buckets in the framework",
    "fragmentation": "a smaller micro-batch, or expandable segments in the allocator",
    "context": "GPUs with more memory",
}
"""Remedies by the largest item of the memory bill."""


def _reject_bound(request: Request, candidates: Candidates, fitting: Mask) -> Rejection:
    """Return the rejection of a pool where every plan misses the deadline or costs more than the budget."""
    if request.budget is not None:
        least = float(candidates.cost_to_finish[fitting].min())
        message = f"the cheapest plan costs {least:,.0f} {request.budget.currency}, not {request.budget.amount:,.0f}"
        return Rejection(candidates.pool.name, "OverBudget", message, f"raise the budget to {least:,.0f}")
    least = float(candidates.finish_s[fitting].min())
    message = f"the fastest plan takes {_time(least)}, not {_time(request.deadline_s or 0)}"
    return Rejection(candidates.pool.name, "DeadlineMissed", message, f"allow {np.ceil(least):,.0f} s")


def _time(seconds: float) -> str:
    """Format a time in hours, in minutes if it is shorter than an hour, or in seconds if shorter than a minute."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"
