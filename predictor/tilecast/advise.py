"""Rank what the search found, explain it, and say why not the others."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from tilecast import __version__, kernels, search, step, uncertainty
from tilecast.hardware import Pool
from tilecast.spec import CHECKPOINTING, Floats, Ints, Objective, Plan, Plans, SpecError, Workload


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits the user puts on the answer; None is no limit."""

    gpus: int | None = None
    max_gpus: int | None = None
    max_nodes: int | None = None
    max_tensor: int | None = None
    allowed_pools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the user would run today, priced as a row of its own."""

    pool: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides an advice, except the pools."""

    name: str
    workload: Workload
    objective: Objective = "time"
    constraints: Constraints = Constraints()
    baseline: Baseline | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """One pool with the best plan on it. Seconds, bytes; `breakdown` sums to `step_s`."""

    pool: Pool
    nodes: int
    gpus_per_node: int
    plan: Plan
    step_s: float
    lower_s: float
    upper_s: float
    breakdown: Mapping[str, float]
    memory_bytes: float
    memory_available_bytes: float
    memory: Mapping[str, float]
    tokens_per_s: float
    cost_per_1000_steps: float | None
    finish_s: float | None
    cost_to_finish: float | None
    reason: str

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a pool has no offer. `code` is one of a closed list, `remedy` the nearest change that would help."""

    pool: str
    code: str
    message: str
    remedy: str
    plan: Plan | None = None
    memory_bytes: float | None = None
    memory_available_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer for one job. `offers` are the best of every pool, best first; `best` is the first of them."""

    request: Request
    offers: tuple[Offer, ...]
    rejections: tuple[Rejection, ...]
    baseline: Offer | None
    uncapped: Offer | None
    ties: int
    plans_evaluated: int
    confidence: str
    """Why the range is as wide as it is, in a sentence."""
    model_version: str
    model_sha256: str
    inputs_hash: str

    @property
    def best(self) -> Offer | None:
        return self.offers[0] if self.offers else None


def advise(request: Request, pools: Sequence[Pool]) -> Advice:
    """The best plan of every pool, ranked by the request's objective.

    Args:
        request: the job and its limits.
        pools: where it may run; the order does not matter.

    Raises:
        SpecError: the request contradicts itself, or names a pool that does not exist.
    """
    _check(request, pools)
    limits = request.constraints
    considered = sorted(pools, key=lambda pool: pool.name)
    allowed = [pool for pool in considered if not limits.allowed_pools or pool.name in limits.allowed_pools]
    offers: list[Offer] = []
    rejections = [
        Rejection(pool.name, "NotAllowed", "not in constraints.allowedPools", f"add {pool.name} to it")
        for pool in considered
        if pool not in allowed
    ]
    ties = evaluated = 0
    runner_up: dict[str, int] = {}
    for pool in allowed:
        found = _best_on(request, pool, limits)
        evaluated += found.evaluated
        if found.rejection is not None:
            rejections.append(found.rejection)
        if found.offer is not None:
            offers.append(found.offer)
            runner_up[pool.name] = found.ties
    offers.sort(key=lambda offer: _rank(request, offer))
    uncapped = None
    if offers:
        ties = runner_up[offers[0].pool.name]
        ties += sum(_rank(request, offer)[0] <= _rank(request, offers[0])[0] * TIE for offer in offers[1:])
    free = Constraints()
    if limits != free:
        others = [offer for pool in considered if (offer := _best_on(request, pool, free).offer) is not None]
        uncapped = min(others, key=lambda offer: _rank(request, offer), default=None)
    explained = tuple(replace(offer, reason=_reason(request, offer, offers)) for offer in offers)
    version, digest = kernels.model_info()
    baseline = _baseline(request, considered)
    return Advice(
        request=request,
        offers=explained,
        rejections=(*rejections, *((baseline.rejection,) if baseline and baseline.rejection else ())),
        baseline=baseline.offer if baseline else None,
        uncapped=uncapped,
        ties=ties,
        plans_evaluated=evaluated,
        confidence=_confidence(explained),
        model_version=version,
        model_sha256=digest,
        inputs_hash=inputs_hash(request, considered, digest),
    )


def inputs_hash(request: Request, pools: Sequence[Pool], model_sha256: str) -> str:
    """A short digest of everything the advice depends on: the request but for its name, the pools in any order, the
    model, the constants and the version."""
    inputs = {
        "request": asdict(replace(request, name="")),
        "pools": [asdict(pool) for pool in sorted(pools, key=lambda pool: pool.name)],
        "model": model_sha256,
        "constants": step.digest(),
        "version": __version__,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=repr).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Found:
    offer: Offer | None
    rejection: Rejection | None
    ties: int
    evaluated: int


def _check(request: Request, pools: Sequence[Pool]) -> None:
    names = [pool.name for pool in pools]
    limits = request.constraints
    unknown = [name for name in limits.allowed_pools if name not in names]
    if unknown:
        known = f"known: {', '.join(names)}"
        raise SpecError("spec.constraints.allowedPools", f"there is no pool {unknown[0]!r}", known)
    if limits.gpus and limits.max_gpus and limits.gpus > limits.max_gpus:
        raise SpecError(
            "spec.constraints.gpus", f"{limits.gpus} is above maxGpus {limits.max_gpus}", "lower gpus or raise maxGpus"
        )
    currencies = sorted({pool.currency for pool in pools if pool.price_per_gpu_hour is not None})
    if request.objective == "cost" and len(currencies) > 1:
        told = " and ".join(currencies)
        raise SpecError("spec.objective", f"pools are priced in {told}", "give every price in one currency")
    workload = request.workload
    if workload.micro_batch and workload.global_batch % workload.micro_batch:
        raise SpecError(
            "spec.training.microBatchSize",
            f"{workload.micro_batch} does not divide globalBatchSize {workload.global_batch}",
            "choose a divisor",
        )
    if request.baseline and request.baseline.pool not in names:
        known = f"known: {', '.join(names)}"
        raise SpecError("spec.baseline.pool", f"there is no pool {request.baseline.pool!r}", known)


def _best_on(request: Request, pool: Pool, limits: Constraints) -> _Found:
    workload = request.workload
    if not pool.gpu.supports(workload.precision):
        usable = next((name for name in ("bf16", "fp16", "fp32") if pool.gpu.supports(name)), "another precision")
        message = f"no {workload.precision.upper()} units"
        return _Found(None, Rejection(pool.name, "PrecisionNotSupported", message, f"train in {usable}"), 0, 0)
    most = min(
        pool.max_gpus,
        limits.max_gpus or pool.max_gpus,
        limits.max_nodes * pool.gpus_per_node if limits.max_nodes else pool.max_gpus,
    )
    bounds = search.Limits(gpus=limits.gpus, max_gpus=most, max_tensor=limits.max_tensor)
    plans = search.enumerate_plans(workload, pool, bounds)
    if not len(plans):
        return _Found(None, _no_plan(workload, pool, limits, most), 0, 0)
    priced = search.price(workload, plans, pool)
    fits = np.flatnonzero(priced.fits)
    if not len(fits):
        return _Found(None, _too_large(workload, pool, priced), 0, len(plans))
    value = _value(request, pool, priced)
    order = fits[np.argsort(value[fits], kind="stable")]
    close = order[value[order] <= value[order[0]] * TIE]
    # Among plans that the forecast cannot tell apart the simplest is shown: fewest GPUs, then dimensions.
    chosen = min(close, key=lambda row: (_complexity(plans, row), value[row]))
    return _Found(_offer(request, pool, priced, int(chosen)), None, len(close) - 1, len(plans))


TIE = 1.05
"""Plans within this factor of the best are ties: the regret of choosing between measured plans is about as large."""


def _complexity(plans: Plans, row: int) -> tuple[int, ...]:
    one = plans.row(row)
    dimensions = sum(degree > 1 for degree in (one.tensor, one.pipeline, one.context, one.expert, one.virtual_stages))
    return (one.gpus, dimensions, one.zero_stage > 0, CHECKPOINTING.index(one.checkpointing))


def _value(request: Request, pool: Pool, priced: search.Priced) -> Floats:
    """What the objective minimises within one pool: seconds, or GPU-seconds that are paid for."""
    if request.objective == "cost":
        billed: Floats = priced.step_s * _billed(pool, priced.plans.gpus)
        return billed
    return priced.step_s


def _billed(pool: Pool, gpus: Ints | int) -> Floats:
    """GPUs that are paid for: whole nodes as soon as there is more than one."""
    nodes = np.ceil(np.asarray(gpus) / pool.gpus_per_node)
    return np.where(np.asarray(gpus) <= pool.gpus_per_node, gpus, nodes * pool.gpus_per_node)


def _rank(request: Request, offer: Offer) -> tuple[float, float, str]:
    cost = math.inf if offer.cost_per_1000_steps is None else offer.cost_per_1000_steps
    first, second = (cost, offer.step_s) if request.objective == "cost" else (offer.step_s, cost)
    return (first, second, offer.pool.name)


def _offer(request: Request, pool: Pool, priced: search.Priced, row: int) -> Offer:
    plan = priced.plans.row(row)
    seconds = float(priced.step_s[row])
    lower, upper = uncertainty.interval(request.workload, priced, row)
    nodes = -(-plan.gpus // pool.gpus_per_node)
    per_node = min(plan.gpus, pool.gpus_per_node)
    price = pool.price_per_gpu_hour
    hourly = float(_billed(pool, plan.gpus)) * price if price is not None else None
    steps = request.workload.steps
    finish = seconds * steps if steps else None
    return Offer(
        pool=pool,
        nodes=nodes,
        gpus_per_node=per_node,
        plan=plan,
        step_s=seconds,
        lower_s=lower,
        upper_s=upper,
        breakdown=priced.times.parts(row),
        memory_bytes=float(priced.memory_bytes[row]),
        memory_available_bytes=priced.usable_bytes,
        memory=priced.footprint.items(row),
        tokens_per_s=request.workload.tokens_per_step / seconds,
        cost_per_1000_steps=hourly * seconds / 3.6 if hourly is not None else None,
        finish_s=finish,
        cost_to_finish=hourly * finish / 3600 if hourly is not None and finish else None,
        reason="",
    )


def _baseline(request: Request, pools: Sequence[Pool]) -> _Found | None:
    """The best plan on exactly the GPUs that the user runs on today."""
    wanted = request.baseline
    if wanted is None:
        return None
    pool = next(pool for pool in pools if pool.name == wanted.pool)
    # A baseline is priced even where its pool is smaller today: the user runs it now.
    roomy = replace(pool, max_nodes=max(pool.max_nodes, -(-wanted.gpus // pool.gpus_per_node)))
    found = _best_on(request, roomy, Constraints(gpus=wanted.gpus))
    if found.rejection is not None:
        message = f"your baseline of {wanted.gpus}: {found.rejection.message}"
        return replace(found, rejection=replace(found.rejection, message=message))
    return replace(found, offer=replace(found.offer, reason="your baseline") if found.offer else None)


TIGHT = 0.93
"""Share of the memory from which a plan is called tight: the bill's own error can break it."""

_BOUND: Mapping[str, str] = {
    "compute": "compute-bound",
    "communication": "bound by communication",
    "bubble": "bound by the pipeline's bubble",
    "optimizer": "bound by the optimizer's memory traffic",
    "launch": "bound by kernel launches",
    "input": "bound by its input",
}


def _reason(request: Request, offer: Offer, offers: Sequence[Offer]) -> str:
    bottleneck = max(offer.breakdown, key=lambda part: offer.breakdown[part])
    bound = _BOUND[bottleneck]
    if offer.memory_bytes > TIGHT * offer.memory_available_bytes:
        bound += "; memory is tight"
    best = offers[0]
    if offer is best:
        return f"{'cheapest' if request.objective == 'cost' else 'fastest'}; {bound}"
    if request.objective == "cost" and offer.cost_per_1000_steps is None:
        return f"no price known; {bound}"
    if request.objective == "cost" and not best.cost_per_1000_steps:
        return f"costs more than nothing; {bound}"
    factor = _rank(request, offer)[0] / _rank(request, best)[0]
    told = "dearer" if request.objective == "cost" else "slower"
    return f"{factor:.1f}x {told}; {bound}"


def _no_plan(workload: Workload, pool: Pool, limits: Constraints, most: int) -> Rejection:
    """Why nothing could be enumerated."""
    batch = workload.global_batch
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


def _too_large(workload: Workload, pool: Pool, priced: search.Priced) -> Rejection:
    """The leanest plan and the line of its bill that breaks it."""
    row = int(np.argmin(priced.memory_bytes))
    bill = priced.footprint.items(row)
    largest = max(bill, key=lambda name: bill[name])
    over = float(priced.memory_bytes[row]) - priced.usable_bytes
    gib = 2**30
    message = f"{largest} {bill[largest] / gib:.1f} GiB; {over / gib:.1f} GiB too much"
    code = "OutOfMemory"
    if workload.model.trace is not None:
        code, message = "TensorParallelUnsupported", f"{message}; a graph is split by data and pipeline, not by tensor"
    return Rejection(
        pool.name,
        code,
        message,
        _REMEDIES["samples" if largest == "activations" and not workload.samples_are_tokens else largest],
        priced.plans.row(row),
        float(priced.memory_bytes[row]),
        priced.usable_bytes,
    )


_REMEDIES: Mapping[str, str] = {
    "parameters": "more GPUs per job, or GPUs with more memory",
    "gradients": "more GPUs per job, or GPUs with more memory",
    "optimizer": "more GPUs per job, or a leaner optimizer",
    "activations": "a shorter sequence, or a smaller micro-batch",
    "samples": "a smaller micro-batch",
    "working": "a shorter sequence, or a loss computed in chunks",
    "reserve": "GPUs with more memory",
}
"""What helps against each line of the memory bill."""


def _confidence(offers: Sequence[Offer]) -> str:
    if not offers:
        return "nothing to be sure of"
    best = offers[0]
    low, high = best.lower_s / best.step_s - 1, best.upper_s / best.step_s - 1
    return f"0 runs seen on this cluster: {low:+.0%}/{high:+.0%}"
