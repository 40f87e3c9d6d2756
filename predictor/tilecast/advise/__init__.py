"""Rank what the search found, explain it, and say why not the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from tilecast import __version__, hardware, kernels, step, uncertainty
from tilecast.advise import stated
from tilecast.advise.rank import FINISHING, PRICED, Choice, Details, Field, choose, field, pareto
from tilecast.advise.values import (
    Advice,
    Baseline,
    Budget,
    Change,
    Constraints,
    Offer,
    Provenance,
    Rejection,
    Request,
    WhyNot,
)
from tilecast.hardware import Pool
from tilecast.search import Limits, Mask
from tilecast.spec import Objective, SpecError

__all__ = [
    "FINISHING",
    "Advice",
    "Baseline",
    "Budget",
    "Change",
    "Constraints",
    "Offer",
    "Provenance",
    "Rejection",
    "Request",
    "WhyNot",
    "advise",
    "inputs_hash",
]


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
    considered = sorted(pools, key=_name)
    fields = [field(request, pool) for pool in considered]
    boards = [_board(request, found) for found in fields]
    chosen = sorted((board for board in boards if board.choice), key=lambda board: _order(request, board))
    ranked, ties, ratio = _settle(request, chosen)
    offers = tuple(_explained(request, board, ranked) for board in ranked)
    rejections = [board.rejection for board in boards if board.rejection is not None]
    baseline, refused, notes = _baseline(request, considered)
    version, digest = kernels.model_info()
    return Advice(
        request=request,
        offers=offers,
        pareto=_pareto(request, boards),
        rejections=(*rejections, *refused),
        baseline=baseline,
        uncapped=_uncapped(request, fields) if limits != Constraints() else None,
        why_not=(),
        ties=ties,
        tie_ratio=ratio,
        notes=(*_notes(request, offers), *notes),
        plans_evaluated=sum(len(found) for found in fields),
        confidence=_confidence(offers),
        provenance=Provenance(
            version=__version__,
            model_version=version,
            model_sha256=digest,
            constants_sha256=step.digest(),
            data_sha256=hardware.digest(),
            layers={pool.name: dict(sorted(pool.layers.items())) for pool in considered if pool.layers},
        ),
        inputs_hash=inputs_hash(request, considered, digest),
    )


def inputs_hash(request: Request, pools: Sequence[Pool], model_sha256: str) -> str:
    """A short digest of everything that decides an advice: the request but for its name, the pools in any order, the
    model, the constants and the version. What is free now and which layer told a fact decide nothing."""
    inputs = {
        "request": asdict(replace(request, name="")),
        "pools": [
            asdict(replace(pool, free_gpus=None, layers={})) for pool in sorted(pools, key=lambda pool: pool.name)
        ],
        "model": model_sha256,
        "constants": step.digest(),
        "version": __version__,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _name(pool: Pool) -> str:
    return pool.name


def _check(request: Request, pools: Sequence[Pool]) -> None:
    names = [pool.name for pool in pools]
    known = f"known: {', '.join(names)}"
    limits, workload, objective = request.constraints, request.workload, request.objective
    unknown = [name for name in limits.allowed_pools if name not in names]
    if unknown:
        raise SpecError("spec.constraints.allowedPools", f"there is no pool {unknown[0]!r}", known)
    if limits.gpus and limits.max_gpus and limits.gpus > limits.max_gpus:
        problem = f"{limits.gpus} is above maxGpus {limits.max_gpus}"
        raise SpecError("spec.constraints.gpus", problem, "lower gpus or raise maxGpus")
    if objective in FINISHING and workload.steps is None and request.tokens is None:
        problem = f"{objective} needs to know how long the run is"
        raise SpecError("spec.objective", problem, "give training.steps or training.tokens")
    for name, wanted, given in (
        ("deadlineSeconds", "cheapestBeforeDeadline", request.deadline_s),
        ("budget", "fastestWithinBudget", request.budget),
    ):
        if objective == wanted and given is None:
            raise SpecError(f"spec.{name}", f"is missing, and objective {wanted} needs it", f"add spec.{name}")
        if objective != wanted and given is not None:
            raise SpecError(f"spec.{name}", f"has no meaning with objective {objective}", f"use objective {wanted}")
    _check_currency(request, pools)
    low, high = request.batches or (workload.global_batch, workload.global_batch)
    if not low <= workload.global_batch <= high:
        problem = f"{workload.global_batch} is not between {low} and {high}"
        raise SpecError("spec.training.globalBatchSize", problem, "choose one within globalBatchSizeRange")
    if request.precisions and workload.precision not in request.precisions:
        problem = f"{workload.precision} is not among allowedPrecisions"
        raise SpecError("spec.training.precision", problem, "add it there, or choose one of them")
    if workload.micro_batch and workload.global_batch % workload.micro_batch:
        problem = f"{workload.micro_batch} does not divide globalBatchSize {workload.global_batch}"
        raise SpecError("spec.training.microBatchSize", problem, "choose a divisor")
    if request.baseline and request.baseline.pool not in names:
        raise SpecError("spec.baseline.pool", f"there is no pool {request.baseline.pool!r}", known)


def _check_currency(request: Request, pools: Sequence[Pool]) -> None:
    """Amounts of two currencies do not compare, and no rate of exchange is known here."""
    if request.objective not in PRICED:
        return
    allowed = request.constraints.allowed_pools
    priced = [pool for pool in pools if pool.price_per_gpu_hour is not None and (not allowed or pool.name in allowed)]
    currencies = sorted({pool.currency for pool in priced})
    if len(currencies) > 1:
        problem = f"pools are priced in {' and '.join(currencies)}"
        raise SpecError("spec.objective", problem, "give every price in one currency, or narrow allowedPools")
    if request.budget and currencies and currencies != [request.budget.currency]:
        problem = f"{request.budget.currency} is not {currencies[0]}, in which the pools are priced"
        raise SpecError("spec.budget.currency", problem, f"give the budget in {currencies[0]}")


@dataclass(frozen=True, slots=True)
class _Board:
    """What became of one pool: a choice among its plans, or a rejection."""

    found: Field
    kept: Mask
    """Plans that fit, keep the job's constraints and reach its objective's limit."""
    choice: Choice | None = None
    details: Details | None = None
    rejection: Rejection | None = None


def _board(request: Request, found: Field) -> _Board:
    pool, limits = found.pool, request.constraints
    within = found.within(limits)
    kept = within & found.fits & found.allowed(request)
    if limits.allowed_pools and pool.name not in limits.allowed_pools:
        rejection = Rejection(pool.name, "NotAllowed", "not in constraints.allowedPools", f"add {pool.name} to it")
    elif not found.variants:
        rejection = _no_units(request, pool)
    elif not within.any():
        rejection = _no_plan(request, pool)
    elif not (within & found.fits).any():
        rejection = _too_large(found, within)
    elif request.objective in PRICED and pool.price_per_gpu_hour is None:
        rejection = Rejection(pool.name, "PriceUnknown", "no price known", "give its GPUPool a price")
    elif not kept.any():
        rejection = _out_of_reach(request, found, within & found.fits)
    elif (choice := choose(request, found, kept)) is not None:
        return _Board(found, kept, choice, Details.of(found, np.array([choice.row])))
    return _Board(found, np.zeros(len(found), dtype=bool), rejection=rejection)


def _order(request: Request, board: _Board) -> tuple[float, float, int, str]:
    """What sorts pools, best first."""
    row, value = (board.choice.row, board.choice.value) if board.choice else (0, np.inf)
    gpus = int(board.found.gpus[row])
    return (gpus if request.objective == "fewestGpus" else 0, value, gpus, board.found.pool.name)


def _settle(request: Request, boards: Sequence[_Board]) -> tuple[list[_Board], int, float]:
    """The boards with the recommended one first, how many plans tie with it, and how far it may be behind the best."""
    if not boards:
        return [], 0, 1.0
    first = boards[0]
    tied = [board for board in boards if board is first or _is_tie(request, first, board)]
    chosen = min(tied, key=lambda board: board.found.gpus[board.choice.row] if board.choice else 0)
    ranked = [chosen, *(board for board in boards if board is not chosen)]
    ties = len(tied) - 1 + (chosen.choice.ties if chosen.choice else 0)
    return ranked, ties, _behind(request, chosen, first)


def _is_tie(request: Request, best: _Board, other: _Board) -> bool:
    if best.details is None or other.details is None or best.choice is None or other.choice is None:
        return False
    if _order(request, best)[0] != _order(request, other)[0] or best.choice.value <= 0:
        return False
    width = uncertainty.tie_between(best.details.errors(), other.details.errors())
    return bool(np.log(other.choice.value / best.choice.value) <= width[0])


def _behind(request: Request, chosen: _Board, first: _Board) -> float:
    """Value of the recommendation over that of the best forecast."""
    if chosen.choice is None or first.choice is None or first.choice.value <= 0:
        return 1.0
    best = first.choice.value / first.choice.ratio
    return chosen.choice.value / min(best, chosen.choice.value / chosen.choice.ratio)


def _pareto(request: Request, boards: Sequence[_Board]) -> tuple[Offer, ...]:
    found = pareto(request, [(board.found, board.kept) for board in boards])
    details = {
        id(board.found): Details.of(board.found, np.array([row for field_, row in found if field_ is board.found]))
        for board in boards
        if any(field_ is board.found for field_, _ in found)
    }
    offers = []
    for field_, row in found:
        one = details[id(field_)]
        offer = one.offer(int(np.flatnonzero(one.rows == row)[0]))
        offers.append(replace(offer, reason=_BOUND[offer.bottleneck]))
    return tuple(offers)


def _uncapped(request: Request, fields: Sequence[Field]) -> Offer | None:
    """The best of every pool there is, with none of the job's own constraints."""
    boards = []
    for found in fields:
        kept = found.fits & found.allowed(request)
        if (choice := choose(request, found, kept)) is not None:
            boards.append(_Board(found, kept, choice))
    best = min(boards, key=lambda board: _order(request, board), default=None)
    if best is None or best.choice is None:
        return None
    offer = Details.of(best.found, np.array([best.choice.row])).offer(0)
    return replace(offer, reason=f"without the job's own constraints; {_BOUND[offer.bottleneck]}")


def _baseline(request: Request, pools: Sequence[Pool]) -> tuple[Offer | None, list[Rejection], list[str]]:
    """The plan that the user runs today, or why it cannot be priced, and what to say about it."""
    wanted = request.baseline
    if wanted is None:
        return None, [], []
    pool = next(pool for pool in pools if pool.name == wanted.pool)
    # A baseline is priced even where its pool is smaller today: the user runs it now.
    nodes = max(pool.max_nodes, -(-wanted.gpus // pool.gpus_per_node))
    roomy = replace(pool, max_nodes=nodes)
    notes = []
    if wanted.gpus > pool.max_gpus:
        notes.append(f"Your baseline of {wanted.gpus} GPUs is larger than pool {pool.name}, which has {pool.max_gpus}.")
    own = replace(request, objective="time", constraints=Constraints(gpus=wanted.gpus), batches=None, precisions=())
    table = None
    if wanted.plan is not None and pool.gpu.supports(request.workload.precision):
        table = stated.plans(request.workload, wanted.gpus, wanted.plan, "spec.baseline.plan")
    board = _board(own, field(own, roomy, Limits(gpus=wanted.gpus), table))
    if board.details is not None:
        return replace(board.details.offer(0), reason="your baseline"), [], notes
    if board.rejection is None:
        return None, [], notes
    message = f"your baseline of {wanted.gpus}: {board.rejection.message}"
    return None, [replace(board.rejection, message=message)], notes


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

_BEST: Mapping[Objective, tuple[str, str]] = {
    "time": ("fastest", "slower"),
    "cost": ("cheapest", "dearer"),
    "timeToFinish": ("first to finish", "later"),
    "cheapestBeforeDeadline": ("cheapest before the deadline", "dearer"),
    "fastestWithinBudget": ("fastest within the budget", "slower"),
    "fewestGpus": ("fewest GPUs", "slower"),
}
"""What the best is called by each objective, and what the others are."""


def _explained(request: Request, board: _Board, ranked: Sequence[_Board]) -> Offer:
    """The offer of a board with the reason for its place."""
    offer, best = _offer(board), ranked[0]
    bound = _BOUND[offer.bottleneck]
    if offer.memory_bytes > TIGHT * offer.memory_available_bytes:
        bound += "; memory is tight"
    if request.deadline_s is not None and (offer.finish_s or 0.0) * offer.upper_s / offer.step_s > request.deadline_s:
        bound += "; may miss the deadline"
    word, other = _BEST[request.objective]
    if board is best:
        return replace(offer, reason=f"{word}; {bound}")
    if board.choice is None or best.choice is None:
        return offer
    few = _offer(best).gpus
    if request.objective == "fewestGpus" and offer.gpus > few:
        return replace(offer, reason=f"{offer.gpus / few:.3g}x the GPUs; {bound}")
    if best.choice.value <= 0:
        return replace(offer, reason=f"costs more than nothing; {bound}")
    factor = board.choice.value / best.choice.value
    if _is_tie(request, *sorted((best, board), key=lambda item: _order(request, item))):
        return replace(offer, reason=f"a tie ({factor:.2f}x) with more GPUs; {bound}")
    return replace(offer, reason=f"{factor:.1f}x {other}; {bound}")


def _offer(board: _Board) -> Offer:
    if board.details is None:
        raise ValueError(f"pool {board.found.pool.name} has no offer")
    return board.details.offer(0)


def _notes(request: Request, offers: Sequence[Offer]) -> list[str]:
    """What the recommendation changed about the job."""
    if not offers:
        return []
    own, best = request.workload, offers[0].workload
    notes = []
    if best.global_batch != own.global_batch:
        steps = f", {best.steps:,} steps" if best.steps is not None else ""
        notes.append(
            f"Global batch {best.global_batch} instead of {own.global_batch}, as the job's range allows{steps}; "
            "batches are compared by the sample."
        )
    if best.precision != own.precision:
        notes.append(f"Precision {best.precision} instead of {own.precision}, as the job allows.")
    return notes


def _no_units(request: Request, pool: Pool) -> Rejection:
    usable = next((name for name in ("bf16", "fp16", "fp32") if pool.gpu.supports(name)), "another precision")
    asked = " or ".join(name.upper() for name in dict.fromkeys((request.workload.precision, *request.precisions)))
    return Rejection(pool.name, "PrecisionNotSupported", f"no {asked} units", f"train in {usable}")


def _no_plan(request: Request, pool: Pool) -> Rejection:
    """Why nothing could be enumerated."""
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


def _too_large(found: Field, within: Mask) -> Rejection:
    """The leanest plan and the line of its bill that breaks it."""
    rows = np.flatnonzero(within)
    leanest = Details.of(found, rows[[int(np.argmin(found.memory_bytes[rows]))]]).offer(0)
    bill = leanest.memory
    largest = max(bill, key=lambda name: bill[name])
    over = leanest.memory_bytes - leanest.memory_available_bytes
    gib = 2**30
    message = f"{largest} {bill[largest] / gib:.1f} GiB; {over / gib:.1f} GiB too much"
    code = "OutOfMemory"
    workload = leanest.workload
    if workload.model.trace is not None:
        code, message = "TensorParallelUnsupported", f"{message}; a graph is split by data and pipeline, not by tensor"
    return Rejection(
        found.pool.name,
        code,
        message,
        _REMEDIES["samples" if largest == "activations" and not workload.samples_are_tokens else largest],
        leanest.plan,
        leanest.memory_bytes,
        leanest.memory_available_bytes,
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


def _out_of_reach(request: Request, found: Field, fitting: Mask) -> Rejection:
    """Nothing finishes before the deadline, or nothing is as cheap as the budget."""
    if request.budget is not None:
        least = float(found.cost_to_finish[fitting].min())
        message = f"the cheapest plan costs {least:,.0f} {request.budget.currency}, not {request.budget.amount:,.0f}"
        return Rejection(found.pool.name, "OverBudget", message, f"raise the budget to {least:,.0f}")
    least = float(found.finish_s[fitting].min())
    message = f"the fastest plan takes {least:,.0f} s, not {request.deadline_s or 0:,.0f} s"
    return Rejection(found.pool.name, "DeadlineMissed", message, f"allow {np.ceil(least):,.0f} s")


def _confidence(offers: Sequence[Offer]) -> str:
    if not offers:
        return "nothing to be sure of"
    best = offers[0]
    low, high = best.lower_s / best.step_s - 1, best.upper_s / best.step_s - 1
    return f"0 runs seen on this cluster: {low:+.0%}/{high:+.0%}"
