"""Advise on a job: rank the plans that the search finds, and say why the others are not recommended.

The entry point `advise` is a pipeline, in which each stage takes the result of the stage before:

```
Request, Pools                        values.py
   │ enumerate_pools                  enumeration.py   plans of every pool, with their bytes
   ▼
PlanEnumeration
   │ price                            pricing.py       seconds, price and memory of every plan, as columns
   ▼
CandidatePlans
   │ choose_or_reject                 choose.py        one plan for each pool, or the reason why it has none
   ▼
Choice or Rejection
   │ rank_choices                     choose.py        the pools in order, the recommended one first
   ▼
Ranking
   │ explain_choices, …               reasons.py       offers with their reasons, notes
   │ explain_why_not, …               what_if/         the pipeline again, with a changed request or pool
   ▼
Advice
```

Outside the pipeline, `measured` compares a job's own runs with their forecasts, and `incumbent` keeps an earlier
recommendation until another one is clearly better.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from operator import attrgetter
from typing import Any

from tilecast import __version__, constants, hardware, kernels
from tilecast.advice.choose import Choice, choose_or_reject, rank_choices
from tilecast.advice.enumeration import describe_skipped_plans, enumerate_pools
from tilecast.advice.pricing import price
from tilecast.advice.reasons import (
    describe_confidence,
    describe_offers,
    describe_sharing,
    explain_choices,
    explain_pareto,
    find_sharing,
)
from tilecast.advice.values import (
    Advice,
    AdviceOrigin,
    Baseline,
    Budget,
    Change,
    Constraints,
    Decision,
    Offer,
    Rejection,
    Request,
    WhyNot,
    require,
)
from tilecast.advice.what_if.alternatives import (
    describe_assumed_networks,
    describe_missing_usual_plan,
    describe_plan,
    find_best_without_constraints,
    price_baseline,
    price_safer_plan,
    price_usual_plan,
    suggest_changes,
)
from tilecast.advice.what_if.fits import add_remedies
from tilecast.advice.what_if.lateness import describe_lateness
from tilecast.advice.what_if.wins import explain_why_not
from tilecast.hardware import Pool
from tilecast.model import Model
from tilecast.objectives import list_objectives_bounded_by

__all__ = [
    "Advice",
    "AdviceOrigin",
    "Baseline",
    "Budget",
    "Change",
    "Constraints",
    "Decision",
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
        pools: the pools that the job may run on. Their order does not matter.

    Raises:
        SpecError: the request contradicts itself, or names a pool that does not exist.
        SearchTooLargeError: the search has too many plans or operators, even after node counts and batches are left
            out.
    """
    _check_request(request, pools)
    considered = sorted(pools, key=attrgetter("name"))
    origin = _describe_origin(considered)
    digest = inputs_hash(request, considered, origin.model_sha256)
    enumerations = enumerate_pools(request, considered)
    left_out = describe_skipped_plans(request, enumerations)
    candidates = [price(enumeration) for enumeration in enumerations]
    outcomes = [choose_or_reject(request, each) for each in candidates]
    ranking = rank_choices(request, [outcome for outcome in outcomes if isinstance(outcome, Choice)])
    choices = ranking.choices

    offers = explain_choices(request, ranking)
    pareto = explain_pareto(request, choices)
    sharing = find_sharing(request, offers)
    offer_notes = describe_offers(request, offers)
    sharing_notes = describe_sharing(request, sharing)
    confidence = describe_confidence(offers)

    baseline, refused, baseline_notes = price_baseline(request, considered)
    usual = price_usual_plan(request, choices)
    safer = price_safer_plan(request, choices)
    uncapped = find_best_without_constraints(request, candidates)
    alerts = describe_assumed_networks(offers)
    plan_notes = describe_plan(offers, safer)
    usual_notes = describe_missing_usual_plan(request, choices)
    suggestions = suggest_changes(request, choices)

    return Advice(
        request=request,
        offers=offers,
        pareto=pareto,
        rejections=(*add_remedies(request, candidates, outcomes, choices), *refused),
        baseline=baseline,
        alerts=tuple(alerts),
        usual=usual,
        safer=safer,
        uncapped=uncapped,
        sharing=sharing,
        why_not=explain_why_not(request, ranking),
        ties=ranking.ties,
        tie_ratio=ranking.ratio,
        decision=ranking.decision,
        notes=(
            *describe_lateness(request, choices, candidates),
            *offer_notes,
            *plan_notes,
            *usual_notes,
            *left_out,
            *suggestions,
            *sharing_notes,
            *baseline_notes,
        ),
        plans_evaluated=sum(len(each) for each in candidates),
        confidence=confidence,
        provenance=origin,
        inputs_hash=digest,
    )


def _describe_origin(pools: Sequence[Pool]) -> AdviceOrigin:
    """Return the versions and digests of all data behind an advice, and the sources of each pool's specifications."""
    version, digest = kernels.describe_model_file()
    return AdviceOrigin(
        version=__version__,
        model_version=version,
        model_sha256=digest,
        constants_sha256=constants.digest_constants(),
        data_sha256=hardware.digest_data_files(),
        layers={pool.name: dict(sorted(pool.layers.items())) for pool in pools if pool.layers},
        runs={pool.name: runs for pool in pools if (runs := pool.calibration.runs)},
    )


def inputs_hash(request: Request, pools: Sequence[Pool], model_sha256: str) -> str:
    """Return a digest, 16 characters long, of all inputs that can change an advice.

    The digest covers the request without its name, the pools, whose order does not matter, the utilization model, the
    constants and the version. It leaves out the GPUs that are free now, the source of each fact, and the class by which
    Transformers builds the model.
    """
    inputs = {
        "request": replace(request, name=""),
        "pools": [_list_advice_inputs(pool) for pool in sorted(pools, key=attrgetter("name"))],
        "model": model_sha256,
        "constants": constants.digest_constants(),
        "version": __version__,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=_encode_value).encode()).hexdigest()[:16]


def _list_advice_inputs(pool: Pool) -> dict[str, object]:
    """Return those specifications of a pool on which an advice depends, by field name.

    The GPUs of a smaller node and the job's own runs are included if there are any. The calibration's `software` is
    included if it is set.
    """
    facts = _get_field_values(replace(pool, free_gpus=None, layers={}))
    if not pool.spare_gpus:
        del facts["spare_gpus"]
    if not pool.own.runs:
        del facts["own"]
    if not pool.calibration.software:
        facts["calibration"] = _get_field_values(pool.calibration)
        del facts["calibration"]["software"]
    return facts


def _get_field_values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _encode_value(value: object) -> object:
    """Return a value that JSON cannot hold as one that it can: a dictionary for a record, text for anything else."""
    if not is_dataclass(value):
        return repr(value)
    if not isinstance(value, Model):
        return _get_field_values(value)
    return {name: fact for name, fact in value.document().items() if name != "auto"}


def _check_request(request: Request, pools: Sequence[Pool]) -> None:
    """Raise SpecError if the request contradicts itself or names a pool that does not exist."""
    names = [pool.name for pool in pools]
    known = f"known: {', '.join(names)}"
    limits, workload, goal = request.constraints, request.workload, request.objective_record
    for name in limits.allowed_pools:
        require(name in names, "spec.constraints.allowedPools", f"there is no pool {name!r}", known)
    is_reachable = not (limits.gpus and limits.max_gpus) or limits.gpus <= limits.max_gpus
    problem = f"{limits.gpus} is above maxGpus {limits.max_gpus}"
    require(is_reachable, "spec.constraints.gpus", problem, "lower gpus or raise maxGpus")
    has_length = workload.steps is not None or request.tokens is not None
    problem = f"{goal.name} needs to know how long the run is"
    require(has_length or not goal.is_whole_run, "spec.objective", problem, "give training.steps or training.tokens")
    for name, given in (("deadlineSeconds", request.deadline_s), ("budget", request.budget)):
        problem = f"is missing, and objective {goal.name} needs it"
        require(given is not None or goal.bound != name, f"spec.{name}", problem, f"add spec.{name}")
    problem = "says nothing without the length of the run"
    is_measurable = has_length or request.deadline_s is None
    require(is_measurable, "spec.deadlineSeconds", problem, "give training.steps or training.tokens")
    problem = f"has no meaning with objective {goal.name}"
    remedy = f"use objective {' or '.join(list_objectives_bounded_by('budget'))}"
    require(request.budget is None or goal.bound == "budget", "spec.budget", problem, remedy)
    is_timed = request.deadline_s is not None or request.target_step_s is not None
    problem = "upperBound says nothing without a limit on time"
    remedy = "give targetStepSeconds or deadlineSeconds, or leave it out"
    require(is_timed or request.limits_at == "forecast", "spec.limitsAt", problem, remedy)
    _check_currencies(request, pools)
    low, high = request.batches or (workload.global_batch, workload.global_batch)
    problem = f"{workload.global_batch} is not between {low} and {high}"
    remedy = "choose one within globalBatchSizeRange"
    require(low <= workload.global_batch <= high, "spec.training.globalBatchSize", problem, remedy)
    is_allowed = not request.precisions or workload.precision in request.precisions
    problem = f"{workload.precision} is not among allowedPrecisions"
    require(is_allowed, "spec.training.precision", problem, "add it there, or choose one of them")
    is_divided = not workload.micro_batch or workload.global_batch % workload.micro_batch == 0
    problem = f"{workload.micro_batch} does not divide globalBatchSize {workload.global_batch}"
    require(is_divided, "spec.training.microBatchSize", problem, "choose a divisor")
    if request.baseline and request.baseline.elsewhere is None:
        problem = f"there is no pool {request.baseline.pool!r}"
        require(request.baseline.pool in names, "spec.baseline.pool", problem, known)


def _check_currencies(request: Request, pools: Sequence[Pool]) -> None:
    """Raise SpecError if the objective needs prices but prices and budget are not all in one currency."""
    if not request.objective_record.needs_price:
        return
    allowed = request.constraints.allowed_pools
    priced = [pool for pool in pools if pool.price_per_gpu_hour is not None and (not allowed or pool.name in allowed)]
    currencies = sorted({pool.currency for pool in priced})
    problem = f"pools are priced in {' and '.join(currencies)}"
    remedy = "give every price in one currency, or narrow allowedPools"
    require(len(currencies) <= 1, "spec.objective", problem, remedy)
    if request.budget and currencies:
        problem = f"{request.budget.currency} is not {currencies[0]}, in which the pools are priced"
        remedy = f"give the budget in {currencies[0]}"
        require(request.budget.currency == currencies[0], "spec.budget.currency", problem, remedy)
