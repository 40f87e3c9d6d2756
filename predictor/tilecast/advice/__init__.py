"""Advise on a job: rank the plans that the search finds, and say why the others are not recommended.

`advise` is the entry point. `values` defines what goes in and out, `rank` prices the plans of a pool, `choose` picks
one per pool, `boards` orders the pools, `remedies` and `why` explain what is not recommended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tilecast import __version__, constants, hardware, kernels, zoo
from tilecast.advice import stated
from tilecast.advice.batches import neighbour_batch
from tilecast.advice.boards import choose_or_reject, is_tie, rank_choices, rank_key
from tilecast.advice.buckets import best_bucket_size
from tilecast.advice.choose import Choice
from tilecast.advice.fewer import fewer_gpus
from tilecast.advice.rank import Candidates, Details, find_candidates, pareto, too_large, variants
from tilecast.advice.remedies import remedied
from tilecast.advice.values import (
    Advice,
    AdviceOrigin,
    Baseline,
    Budget,
    Change,
    Constraints,
    Offer,
    Rejection,
    Request,
    WhyNot,
)
from tilecast.advice.why import why_not
from tilecast.hardware import Pool
from tilecast.objectives import bounded_by
from tilecast.search import Limits
from tilecast.sharing import Sharing, consider
from tilecast.spec import Model, SearchTooLargeError, SpecError

__all__ = [
    "Advice",
    "AdviceOrigin",
    "Baseline",
    "Budget",
    "Change",
    "Constraints",
    "Offer",
    "Rejection",
    "Request",
    "WhyNot",
    "advise",
    "inputs_hash",
]


def advise(request: Request, pools: Sequence[Pool]) -> Advice:
    """Recommend the best plan of every pool, ranked by the request's objective.

    Args:
        request: the job and its limits.
        pools: the pools that the job may run on; their order does not matter.

    Raises:
        SpecError: the request contradicts itself, or names a pool that does not exist.
        SearchTooLargeError: the search has too many plans or operators, whatever is left out.
    """
    _check(request, pools)
    considered = sorted(pools, key=_name)
    fields = _fields(request, considered)
    outcomes = [choose_or_reject(request, each) for each in fields]
    ranking = rank_choices(request, [item for item in outcomes if isinstance(item, Choice)])
    choices = ranking.choices
    offers = tuple(_explained(request, choice, choices) for choice in choices)
    rejections = [
        remedied(request, each, item, choices)
        for each, item in zip(fields, outcomes, strict=True)
        if isinstance(item, Rejection)
    ]
    baseline, refused, notes = _baseline(request, considered)
    shared = _sharing(request, offers)
    version, digest = kernels.model_info()
    return Advice(
        request=request,
        offers=offers,
        pareto=_pareto(request, choices),
        rejections=(*rejections, *refused),
        baseline=baseline,
        uncapped=_uncapped(request, fields) if request.constraints != Constraints() else None,
        sharing=shared,
        why_not=why_not(request, choices),
        ties=ranking.ties,
        tie_ratio=ranking.ratio,
        notes=(
            *request.workload.model.notes,
            *_notes(request, offers),
            *_input_notes(offers),
            *_of_best(choices, partial(neighbour_batch, request), best_bucket_size, partial(fewer_gpus, request)),
            *_sharing_notes(request, shared),
            *notes,
        ),
        plans_evaluated=sum(len(each) for each in fields),
        confidence=_confidence(offers),
        provenance=AdviceOrigin(
            version=__version__,
            model_version=version,
            model_sha256=digest,
            constants_sha256=constants.digest(),
            data_sha256=hardware.digest(),
            layers={pool.name: dict(sorted(pool.layers.items())) for pool in considered if pool.layers},
            runs={pool.name: runs for pool in considered if (runs := pool.calibration.runs)},
        ),
        inputs_hash=inputs_hash(request, considered, digest),
    )


MOST_KERNELS = 64_000
"""Most operators that are priced for a job that leaves its batch or precision open.

The number is the model's operators times global batches, precisions and pools. Each takes 0.1 ms and 3 KB. The largest
published model whose layers all differ may have 13 such combinations.
"""
MOST_PLANS = 500_000
"""Most plans of all pools together that one search prices, each 2 us and 500 to 900 bytes.

The largest search in the documentation prices 400,000. Where there are more plans, some node counts are left out.
"""


def _fields(request: Request, pools: Sequence[Pool]) -> list[Candidates]:
    """Return the plans of each pool, at most `MOST_PLANS` in total.

    Raises:
        SearchTooLargeError: there are more plans even with the fewest node counts, or too many operators.
    """
    able = [len(variants(request, pool)) for pool in pools]
    kernels_priced = sum(able) * zoo.operators(request.workload)
    if max(able, default=0) > 1 and kernels_priced > MOST_KERNELS:
        raise too_large(request, kernels_priced, MOST_KERNELS, "operators in all batches, precisions and pools")
    try:
        return _find_all(request, pools, Limits())
    except SearchTooLargeError:
        return _find_all(request, pools, Limits(max_plans=MOST_PLANS // max(1, sum(able))))


def _find_all(request: Request, pools: Sequence[Pool], limits: Limits) -> list[Candidates]:
    fields: list[Candidates] = []
    for pool in pools:
        fields.append(find_candidates(request, pool, limits, most=MOST_PLANS - sum(len(each) for each in fields)))
    return fields


def inputs_hash(request: Request, pools: Sequence[Pool], model_sha256: str) -> str:
    """Return a short digest of everything that decides an advice.

    It covers the request except for its name, the pools in any order, the utilization model, the constants and the
    version. It leaves out what does not decide anything: the GPUs that are free now, the layer that each fact comes
    from, and the class that Transformers builds a model with.
    """
    inputs = {
        "request": replace(request, name=""),
        "pools": [_deciding_facts(pool) for pool in sorted(pools, key=_name)],
        "model": model_sha256,
        "constants": constants.digest(),
        "version": __version__,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=_plain).encode()).hexdigest()[:16]


def _deciding_facts(pool: Pool) -> dict[str, object]:
    """Return the facts of a pool that decide an advice.

    Corrections count only where there are any: `own` if the job has runs of its own, the calibration's `software` if it
    is set.
    """
    facts = _facts(replace(pool, free_gpus=None, layers={}))
    if not pool.own.runs:
        del facts["own"]
    if not pool.calibration.software:
        facts["calibration"] = _facts(pool.calibration)
        del facts["calibration"]["software"]
    return facts


def _facts(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _plain(value: object) -> object:
    if not is_dataclass(value):
        return repr(value)
    facts = _facts(value)
    return {name: fact for name, fact in facts.items() if name != "auto"} if isinstance(value, Model) else facts


def _name(pool: Pool) -> str:
    return pool.name


def _check(request: Request, pools: Sequence[Pool]) -> None:
    names = [pool.name for pool in pools]
    known = f"known: {', '.join(names)}"
    limits, workload, goal = request.constraints, request.workload, request.goal
    unknown = [name for name in limits.allowed_pools if name not in names]
    if unknown:
        raise SpecError("spec.constraints.allowedPools", f"there is no pool {unknown[0]!r}", known)
    if limits.gpus and limits.max_gpus and limits.gpus > limits.max_gpus:
        problem = f"{limits.gpus} is above maxGpus {limits.max_gpus}"
        raise SpecError("spec.constraints.gpus", problem, "lower gpus or raise maxGpus")
    if goal.is_whole_run and workload.steps is None and request.tokens is None:
        problem = f"{goal.name} needs to know how long the run is"
        raise SpecError("spec.objective", problem, "give training.steps or training.tokens")
    for name, given in (("deadlineSeconds", request.deadline_s), ("budget", request.budget)):
        if goal.bound == name and given is None:
            raise SpecError(f"spec.{name}", f"is missing, and objective {goal.name} needs it", f"add spec.{name}")
        if goal.bound != name and given is not None:
            problem = f"has no meaning with objective {goal.name}"
            raise SpecError(f"spec.{name}", problem, f"use objective {' or '.join(bounded_by(name))}")
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
    """Raise SpecError if prices or the budget are in more than one currency.

    Amounts in different currencies do not compare, and no exchange rate is known here.
    """
    if not request.goal.needs_price:
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


def _sharing(request: Request, offers: Sequence[Offer]) -> Sharing | None:
    """Return the ways to share a GPU, for a job whose best plan uses a single one.

    None if the job does not train, or if no way is worthwhile and the job does not allow sharing.
    """
    if not offers or offers[0].gpus > 1 or not offers[0].workload.training:
        return None
    sharing = consider(offers[0].workload, offers[0].pool, request.objective)
    return sharing if sharing and (sharing.best or request.constraints.allow_sharing) else None


_SHARED: Mapping[str, str] = {"mig": "a MIG slice", "mps": "a GPU shared by MPS", "timeSlicing": "a time-sliced GPU"}


def _sharing_notes(request: Request, shared: Sharing | None) -> list[str]:
    """Return a sentence on what sharing would bring, as a list; empty if no way to share is worthwhile."""
    if shared is None or shared.best is None:
        return []
    best = shared.best
    where = f"{_SHARED[best.kind]} {best.profile}".rstrip()
    note = (
        f"The job does not fill a GPU: {where} of {shared.pool.name} ({best.resource}; {best.jobs} such jobs per GPU) "
        f"takes {best.slowdown:.2f}x as long, {best.lower_s * 1e3:.3g}-{best.upper_s * 1e3:.3g} ms a step, at "
        f"{best.relative_cost:.0%} of the cost"
    )
    return [note + ("." if request.constraints.allow_sharing else "; constraints.allowSharing lets it.")]


def _pareto(request: Request, choices: Sequence[Choice]) -> tuple[Offer, ...]:
    front = pareto(request, [(choice.candidates, choice.eligible) for choice in choices])
    offers: dict[tuple[str, int], Offer] = {}
    for choice in choices:
        rows = np.array([row for candidates, row in front if candidates is choice.candidates], dtype=np.int64)
        if len(rows):
            details = Details.of(choice.candidates, rows)
            offers |= {(choice.candidates.pool.name, int(row)): details.offer(place) for place, row in enumerate(rows)}
    found_offers = (offers[candidates.pool.name, row] for candidates, row in front)
    return tuple(replace(offer, reason=_BOUND[offer.bottleneck]) for offer in found_offers)


def _uncapped(request: Request, fields: Sequence[Candidates]) -> Offer | None:
    """Return the best offer of all pools without the job's own constraints; None if there is none."""
    free = replace(request, constraints=Constraints())
    choices = [item for candidates in fields if isinstance(item := choose_or_reject(free, candidates), Choice)]
    if not choices:
        return None
    offer = rank_choices(free, choices).choices[0].offer()
    return replace(offer, reason=f"without the job's own constraints; {_BOUND[offer.bottleneck]}")


def _baseline(request: Request, pools: Sequence[Pool]) -> tuple[Offer | None, list[Rejection], list[str]]:
    """Price the plan that the user runs today.

    Returns:
        The offer or None, the rejection if the plan cannot be priced, and notes on the baseline.
    """
    incumbent = request.baseline
    if incumbent is None:
        return None, [], []
    pool = next(pool for pool in pools if pool.name == incumbent.pool)
    # Price a baseline even where its pool is smaller today: the user runs it now.
    nodes = max(pool.max_nodes, -(-incumbent.gpus // pool.gpus_per_node))
    roomy = replace(pool, max_nodes=nodes)
    notes = []
    if incumbent.gpus > pool.max_gpus:
        notes.append(
            f"Your baseline of {incumbent.gpus} GPUs is larger than pool {pool.name}, which has {pool.max_gpus}."
        )
    own = replace(request, objective="time", constraints=Constraints(gpus=incumbent.gpus), batches=None, precisions=())
    table = None
    if incumbent.plan is not None and pool.gpu.supports(request.workload.precision):
        table = stated.plans(request.workload, incumbent.gpus, incumbent.plan, "spec.baseline.plan")
    outcome = choose_or_reject(own, find_candidates(own, roomy, Limits(gpus=incumbent.gpus), table))
    if isinstance(outcome, Choice):
        return replace(outcome.offer(), reason="your baseline"), [], notes
    return None, [replace(outcome, message=f"your baseline of {incumbent.gpus}: {outcome.message}")], notes


_BOUND: Mapping[str, str] = {
    "compute": "compute-bound",
    "communication": "bound by communication",
    "bubble": "bound by the pipeline's bubble",
    "optimizer": "bound by the optimizer's memory traffic",
    "launch": "bound by kernel launches",
    "input": "bound by its input",
}


def _explained(request: Request, choice: Choice, choices: Sequence[Choice]) -> Offer:
    """Return the offer of a choice with the reason for its place in the ranking."""
    offer, best = choice.offer(), choices[0]
    bound = _BOUND[offer.bottleneck]
    if offer.is_tight:
        bound += "; memory is tight"
    if request.deadline_s is not None and (offer.finish_s or 0.0) * offer.upper_s / offer.step_s > request.deadline_s:
        bound += "; may miss the deadline"
    goal = request.goal
    if choice is best:
        is_least = goal.fewest_gpus or best.value <= min(item.best for item in choices)
        return replace(offer, reason=f"{'' if is_least else 'among the '}{goal.best}; {bound}")
    if goal.fewest_gpus and choice.gpus > best.gpus:
        return replace(offer, reason=f"{choice.gpus / best.gpus:.3g}x the GPUs; {bound}")
    if best.value <= 0:
        return replace(offer, reason=f"costs more than nothing; {bound}")
    factor = choice.value / best.value
    if is_tie(request, *sorted((best, choice), key=lambda item: rank_key(request, item))):
        more = " with more GPUs" if choice.gpus > best.gpus else ""
        return replace(offer, reason=f"a tie ({factor:.2f}x){more}; {bound}")
    return replace(offer, reason=f"{factor:.1f}x {goal.other}; {bound}")


def _notes(request: Request, offers: Sequence[Offer]) -> list[str]:
    """Return a note on each input of the job that the recommendation changed: global batch and precision."""
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


NEAR = 0.8
"""Share of the input pipeline's rate above which a step is said to come near to that bound."""


def _input_notes(offers: Sequence[Offer]) -> list[str]:
    """Return a note on what the recommended plan needs from the input pipeline of each node.

    It is a warning where the stated rate bounds the step or nearly does. Where the model reads images and no rate is
    stated, it gives the rate that is needed.
    """
    if not offers:
        return []
    best = offers[0]
    stated, samples = best.workload.input_samples_per_s, best.workload.global_batch / best.nodes
    if stated is None:
        if not zoo.reads_images(best.workload.model):
            return []
        rate = f"{_rate(samples / best.step_s)} images/s"
        return [f"The input pipeline of each node has to deliver {rate}; state it as training.inputSamplesPerSecond."]
    without = samples / (best.step_s - best.breakdown["input"])
    if without > stated:
        text = f"each node could take {_rate(without)} samples/s and gets {_rate(stated)}"
        return [f"The input pipeline bounds the step: {text}."]
    text = f"{without / stated:.0%} of the {_rate(stated)} samples/s that the input pipeline of each node delivers"
    return [f"The step takes {text}."] if without > NEAR * stated else []


def _rate(per_s: float) -> str:
    """Return a rate with three significant figures."""
    return f"{float(f'{per_s:.3g}'):,g}"


def _of_best(choices: Sequence[Choice], *questions: Callable[[Choice], str | None]) -> list[str]:
    """Ask each question about the recommendation and return the answers; empty without a recommendation."""
    return [answer for choice in choices[:1] for ask in questions if (answer := ask(choice))]


def _confidence(offers: Sequence[Offer]) -> str:
    if not offers:
        return "nothing to be sure of"
    best = offers[0]
    low, high = best.lower_s / best.step_s - 1, best.upper_s / best.step_s - 1
    seen = best.pool.calibration.of(best.pool.gpu.name, best.workload, best.gpus)
    own = f", {seen.own} like this one" if seen.own else ""
    return f"{seen.runs} runs seen on this cluster{own}: {low:+.0%}/{high:+.0%}"
