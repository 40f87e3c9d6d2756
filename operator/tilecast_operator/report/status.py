"""The status of a TrainingJob: recommendation, alternatives, reasons, conditions, and the columns of kubectl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor, log10
from typing import Any, TypeAlias

from tilecast.advise import Advice, Offer

Status: TypeAlias = dict[str, Any]

MAX_ALTERNATIVES = 16
MAX_REJECTED = 64
MAX_MESSAGE = 1024
DIGITS = 6
"""Significant digits of every figure in a status: beyond them a forecast says nothing."""
LOW_CONFIDENCE_RATIO = 0.25
"""Half-width of the range over the step from which LowConfidence is true."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no advice. `reason` is stable CamelCase, `message` says the problem and the remedy."""

    reason: str
    message: str


Verdict: TypeAlias = Advice | Refusal


def reason(verdict: Verdict) -> str:
    """The one word that a verdict comes down to, as in the Ready condition."""
    if isinstance(verdict, Refusal):
        return verdict.reason
    return "Advised" if verdict.best else "NoFittingPlan"


def message(verdict: Verdict) -> str:
    """The sentence behind `reason`."""
    if isinstance(verdict, Refusal):
        return verdict.message[:MAX_MESSAGE]
    best = verdict.best
    if best is not None:
        return f"{best.plan} on {best.nodes} x {best.gpus_per_node} of {best.pool.name}: {best.reason}"[:MAX_MESSAGE]
    causes = [f"{item.pool}: {item.message}; {item.remedy}" for item in verdict.rejections]
    return ("no pool can run the job. " + " | ".join(causes))[:MAX_MESSAGE]


def status(verdict: Verdict, generation: int, conditions: list[Status]) -> Status:
    """The whole status for a verdict, conditions included as given."""
    head: Status = {"observedGeneration": generation, "conditions": conditions}
    if isinstance(verdict, Refusal):
        return {**head, "summary": {"reason": verdict.reason}}
    best = verdict.best
    found: Status = {
        **head,
        "recommendation": None if best is None else _recommendation(best),
        "baseline": _alternative(verdict.baseline),
        "uncapped": _alternative(verdict.uncapped),
        "alternatives": [_alternative(offer) for offer in verdict.offers[:MAX_ALTERNATIVES]],
        "rejected": [
            {"pool": item.pool[:63], "code": item.code[:64], "message": item.message[:512], "remedy": item.remedy[:512]}
            for item in verdict.rejections[:MAX_REJECTED]
        ],
        "plansEvaluated": verdict.plans_evaluated,
        "model": {"version": verdict.model_version[:64], "sha256": verdict.model_sha256[:64]},
        "inputsHash": verdict.inputs_hash[:64],
        "summary": _summary(verdict),
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def conditions(
    verdict: Verdict, is_off: bool, generation: int, now: str, current: Iterable[Mapping[str, Any]]
) -> list[Status]:
    """Every condition for a verdict. A condition whose status stays keeps the time of its last transition.

    Args:
        verdict: the advice, or why there is none.
        is_off: whether the job's mode is Off.
        generation: of the spec that was read.
        now: RFC 3339, for conditions whose status changes.
        current: the conditions as they are now.
    """
    before = {str(item.get("type")): item for item in current}
    out = []
    for kind, state, why, text in _states(verdict, is_off):
        old = before.get(kind, {})
        since = old.get("lastTransitionTime") if old.get("status") == state else None
        out.append(
            {
                "type": kind,
                "status": state,
                "observedGeneration": generation,
                "lastTransitionTime": since or now,
                "reason": why,
                "message": text[:MAX_MESSAGE],
            }
        )
    return out


def _states(verdict: Verdict, is_off: bool) -> list[tuple[str, str, str, str]]:
    """Type, status, reason and message of every condition."""
    why, text = reason(verdict), message(verdict)
    best = None if isinstance(verdict, Refusal) else verdict.best
    given = "True" if best else "False"
    if best is None or isinstance(verdict, Refusal):
        confidence = ("Unknown", "NoRecommendation", "there is no forecast to judge")
    elif _half_width(best) > LOW_CONFIDENCE_RATIO:
        confidence = ("True", "WideRange", f"the range is {_confidence(best)}: {verdict.confidence}")
    else:
        confidence = ("False", "NarrowRange", f"the range is {_confidence(best)}: {verdict.confidence}")
    applied = "mode is Off: nothing but this status is written" if is_off else "mode Advise never changes a job"
    return [
        ("Ready", given, why, text),
        ("RecommendationProvided", given, why, text),
        ("LowConfidence", *confidence),
        (
            "CapacityAvailable",
            "Unknown",
            "NotObserved",
            "free capacity is not watched; pools count every node they have",
        ),
        ("Applied", "False", "ModeOff" if is_off else "ModeAdvise", applied),
        ("ObservationsAvailable", "False", "NotObserved", "measured step times are not read"),
    ]


def parallelism(offer: Offer) -> Status:
    """The plan, in the field names of the API."""
    plan = offer.plan
    return {
        "data": plan.data,
        "tensor": plan.tensor,
        "pipeline": plan.pipeline,
        "context": plan.context,
        "expert": plan.expert,
        "zeroStage": plan.zero_stage,
        "microBatchSize": plan.micro_batch,
        "gradientAccumulation": plan.gradient_accumulation,
        "activationCheckpointing": plan.checkpointing,
    }


def rounded(value: float) -> float:
    """The value to `DIGITS` significant digits."""
    return round(value, DIGITS - 1 - floor(log10(abs(value)))) if value else 0.0


def short_plan(offer: Offer) -> str:
    """The split without micro-batch and recomputation: `fsdp16,tp2`."""
    return str(offer.plan).split(",mb")[0]


def duration(seconds: float) -> str:
    """Seconds as a person says them: `820ms`, `8.2s`, `30.6h`, `12d`."""
    for limit, unit, name in ((1.0, 1e-3, "ms"), (600.0, 1.0, "s"), (7200.0, 60.0, "min"), (345600.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g}{name}"
    return f"{seconds / 86400:.3g}d"


def _step(offer: Offer) -> Status:
    return {
        "target": rounded(offer.step_s),
        "lowerBound": rounded(offer.lower_s),
        "upperBound": rounded(offer.upper_s),
    }


def _alternative(offer: Offer | None) -> Status | None:
    if offer is None:
        return None
    found: Status = {
        "pool": offer.pool.name[:63],
        "nodes": offer.nodes,
        "gpusPerNode": offer.gpus_per_node,
        "gpus": offer.gpus,
        "plan": str(offer.plan)[:128],
        "stepSeconds": _step(offer),
        "reason": offer.reason[:256],
    }
    if offer.cost_per_1000_steps is not None:
        found["costPer1000Steps"] = rounded(offer.cost_per_1000_steps)
    return found


def _recommendation(offer: Offer) -> Status:
    pool = offer.pool
    found: Status = {
        "pool": pool.name[:63],
        "nodeType": pool.node_type[:63] or None,
        "nodeSelector": dict(pool.node_selector),
        "tolerations": [dict(item) for item in pool.tolerations[:16]],
        "nodes": offer.nodes,
        "gpusPerNode": offer.gpus_per_node,
        "gpus": offer.gpus,
        "parallelism": parallelism(offer),
        "stepSeconds": _step(offer),
        "breakdown": {name: rounded(value) for name, value in offer.breakdown.items()},
        "memoryBytes": {"used": round(offer.memory_bytes), "available": round(offer.memory_available_bytes)},
        "tokensPerSecond": rounded(offer.tokens_per_s),
        "reason": offer.reason[:256],
    }
    if offer.cost_per_1000_steps is not None:
        found |= {"costPer1000Steps": rounded(offer.cost_per_1000_steps), "currency": pool.currency}
    if offer.finish_s is not None:
        found["finishSeconds"] = rounded(offer.finish_s)
    return {key: value for key, value in found.items() if value not in (None, [])}


def _summary(advice: Advice) -> Status:
    best = advice.best
    if best is None:
        return {"reason": reason(advice)}
    found = {
        "pool": best.pool.name[:63],
        "gpus": f"{best.nodes}x{best.gpus_per_node}",
        "plan": short_plan(best)[:128],
        "step": duration(best.step_s),
        "range": f"{duration(best.lower_s)}-{duration(best.upper_s)}",
        "reason": reason(advice),
        "memory": f"{best.memory_bytes / 2**30:.0f}/{best.memory_available_bytes / 2**30:.0f} GiB",
        "confidence": _confidence(best),
    }
    if advice.baseline is not None:
        found["speedup"] = f"{advice.baseline.step_s / best.step_s:.1f}x"
    if best.cost_per_1000_steps is not None:
        found["costPer1000Steps"] = f"{best.cost_per_1000_steps:.3g} {best.pool.currency}"
    if best.finish_s is not None:
        found["finish"] = duration(best.finish_s)
    return found


def _half_width(offer: Offer) -> float:
    return (offer.upper_s - offer.lower_s) / 2 / offer.step_s


def _confidence(offer: Offer) -> str:
    low, high = offer.lower_s / offer.step_s - 1, offer.upper_s / offer.step_s - 1
    return f"{100 * low:+.0f}/{100 * high:+.0f} %"
