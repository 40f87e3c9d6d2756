"""The status of a TrainingJob: recommendation, alternatives, reasons, conditions, and the columns of kubectl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tilecast import constants
from tilecast.advise import Advice, Offer, WhyNot
from tilecast.calibration import ENOUGH
from tilecast.render import document, units
from tilecast_operator import observe
from tilecast_operator.learning import Score

Status: TypeAlias = dict[str, Any]

MAX_ALTERNATIVES = 16
MAX_REJECTED = 64
MAX_PARETO = 8
MAX_WHY_NOT = 16
MAX_NOTES = 8
MAX_MESSAGE = 1024
MAX_TEXT = {"pool": 63, "nodeType": 63, "plan": 128, "reason": 256, "tolerations": 16}
"""Longest value of each bounded field of an offer."""
LOW_CONFIDENCE_FACTOR = 1.15
"""LowConfidence is true above this multiple of the half-width, as a logarithm, that every range of the model family
has for what a job description leaves out. Half-widths add in quadrature, so this is where communication, host time
and unmeasured kernels together come to 57 % of it."""


NOT_OBSERVED = ("False", "NotObserved", "no step of the job was measured yet")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no advice. `reason` is stable CamelCase, `message` says the problem and the remedy."""

    reason: str
    message: str


Verdict: TypeAlias = Advice | Refusal
Applied: TypeAlias = tuple[str, str, str]
"""Status, reason and message of the condition Applied."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a recommendation could start now: status, reason and message of the condition CapacityAvailable."""

    status: str
    reason: str
    message: str
    fits: bool | None = None


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
        "recommendation": None if best is None else _clipped(document.recommendation(best)),
        "baseline": _alternative(verdict.baseline),
        "uncapped": _alternative(verdict.uncapped),
        "alternatives": [_alternative(offer) for offer in verdict.offers[:MAX_ALTERNATIVES]],
        "pareto": [_alternative(offer) for offer in verdict.pareto[:MAX_PARETO]],
        "rejected": [
            {"pool": item.pool[:63], "code": item.code[:64], "message": item.message[:512], "remedy": item.remedy[:512]}
            for item in verdict.rejections[:MAX_REJECTED]
        ],
        "whyNot": [_passed_over(item) for item in verdict.why_not[:MAX_WHY_NOT]],
        "ties": verdict.ties if best else None,
        "notes": [text[:256] for text in verdict.notes[:MAX_NOTES]],
        "plansEvaluated": verdict.plans_evaluated,
        "model": {key: value[:64] for key, value in document.model(verdict).items()},
        "inputsHash": verdict.inputs_hash[:64],
        "summary": _summary(verdict),
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def conditions(
    verdict: Verdict,
    is_off: bool,
    generation: int,
    now: str,
    current: Iterable[Mapping[str, Any]],
    fit: Fit,
    applied: Applied | None = None,
) -> list[Status]:
    """Every condition for a verdict. A condition whose status stays keeps the time of its last transition.

    Args:
        verdict: the advice, or why there is none.
        is_off: whether the job's mode is Off.
        generation: of the spec that was read.
        now: RFC 3339, for conditions whose status changes.
        current: the conditions as they are now.
        fit: whether the recommendation could start now.
        applied: whether the job that the advice is for runs as it says, where there is such a job.
    """
    before = list(current)
    return [condition(*state, generation, now, before) for state in _states(verdict, is_off, fit, applied)]


def condition(
    kind: str, state: str, why: str, text: str, generation: int, now: str, current: Iterable[Mapping[str, Any]]
) -> Status:
    """One condition. While its status stays it keeps the time of its last transition."""
    old = next((item for item in current if item.get("type") == kind), {})
    since = old.get("lastTransitionTime") if old.get("status") == state else None
    return {
        "type": kind,
        "status": state,
        "observedGeneration": generation,
        "lastTransitionTime": since or now,
        "reason": why,
        "message": text[:MAX_MESSAGE],
    }


def capacity_condition(fit: Fit, generation: int, now: str, current: Iterable[Mapping[str, Any]]) -> Status:
    """The condition CapacityAvailable."""
    return condition("CapacityAvailable", fit.status, fit.reason, fit.message, generation, now, current)


def fitted(found: Status, fit: Fit) -> Status:
    """A status that says whether its recommendation fits now, or nothing where that is not known."""
    summary = {key: value for key, value in found["summary"].items() if key != "fitsNow"}
    if not found.get("recommendation"):
        return {**found, "summary": summary}
    best = {key: value for key, value in found["recommendation"].items() if key != "fitsNow"}
    if fit.fits is not None:
        best["fitsNow"], summary["fitsNow"] = fit.fits, "yes" if fit.fits else "no"
    return {**found, "recommendation": best, "summary": summary}


def scored(found: Status, score: Score, now: str) -> Status:
    """A status with the measured steps of its job, and how far the forecast lay off."""
    forecast, window = dict(score.forecast), score.window
    error = observe.errors(forecast, window)
    off = f"{error['calibratedRatio']:+.0%}"
    text = (
        f"{window.samples} reports, the newest by {window.latest.source}: median {window.seconds:.4g} s; "
        f"the forecast was {off} off, {error['rawRatio']:+.0%} before correction"
    )
    conditions = _with(found["conditions"], "ObservationsAvailable", "True", "Observed", text, now)
    summary = {**found["summary"], "error": off}
    return {
        **found,
        "conditions": conditions,
        "forecast": forecast,
        "observed": window.status(),
        "error": error,
        "summary": summary,
    }


def unscored(found: Status, now: str) -> Status:
    """A status without measured steps, whatever it said of them before."""
    if "observed" not in found:
        return found
    kept = {key: value for key, value in found.items() if key not in ("observed", "error")}
    kept["conditions"] = _with(found["conditions"], "ObservationsAvailable", *NOT_OBSERVED, now)
    kept["summary"] = {key: value for key, value in found["summary"].items() if key != "error"}
    if "forecast" in found:
        kept["forecast"] = {"frozenAt": found["forecast"]["frozenAt"]}
    return kept


def refused(conditions: list[Status], why: str, now: str) -> list[Status]:
    """Conditions that say why what was told of a measured step does not count."""
    return _with(conditions, "ObservationsAvailable", "False", "Refused", why, now)


def _with(conditions: list[Status], kind: str, state: str, why: str, text: str, now: str) -> list[Status]:
    return [
        condition(kind, state, why, text, item["observedGeneration"], now, conditions) if item["type"] == kind else item
        for item in conditions
    ]


def _states(
    verdict: Verdict, is_off: bool, fit: Fit, applied: Applied | None = None
) -> list[tuple[str, str, str, str]]:
    """Type, status, reason and message of every condition."""
    why, text = reason(verdict), message(verdict)
    best = None if isinstance(verdict, Refusal) else verdict.best
    given = "True" if best else "False"
    if best is None or isinstance(verdict, Refusal):
        confidence = ("Unknown", "NoRecommendation", "there is no forecast to judge")
    else:
        confidence = _judged(verdict, best)
    off, advise = "mode is Off: nothing but this status is written", "mode Advise never changes a job"
    mode = ("ModeOff", off) if is_off else ("ModeAdvise", advise)
    return [
        ("Ready", given, why, text),
        ("RecommendationProvided", given, why, text),
        ("LowConfidence", *confidence),
        ("CapacityAvailable", fit.status, fit.reason, fit.message),
        ("Applied", *(applied or ("False", *mode))),
        ("ObservationsAvailable", *NOT_OBSERVED),
    ]


def _judged(advice: Advice, best: Offer) -> tuple[str, str, str]:
    """Status, reason and message of LowConfidence: the range against the usual one of the job's model family."""
    family, unstated = advice.request.workload.model.family, constants.widths().unstated
    usual = unstated.get(family, unstated["other"])
    bare = f"{_percent(-usual)}/{_percent(usual)} %"
    if math.log(best.upper_s / best.lower_s) / 2 > LOW_CONFIDENCE_FACTOR * usual:
        why = f"communication, host time or unmeasured kernels widen it beyond the {bare} usual for family {family}"
        return "True", "WideRange", f"the range is {_confidence(best)}: {why}; {advice.confidence}"
    seen = best.pool.calibration.of(best.pool.gpu.name, best.workload, best.gpus)
    if seen.own < ENOUGH:
        why = f"{seen.own} of {ENOUGH} runs like this one were measured on this cluster"
        return "True", "FewObservations", f"the range is {_confidence(best)}: {why}; {advice.confidence}"
    why = f"as usual for family {family} ({bare})"
    return "False", "UsualRange", f"the range is {_confidence(best)}, {why}; {advice.confidence}"


def short_plan(offer: Offer) -> str:
    """The split without micro-batch and recomputation: `fsdp16,tp2`."""
    return str(offer.plan).split(",mb")[0]


def _alternative(offer: Offer | None) -> Status | None:
    return None if offer is None else _clipped(document.alternative(offer))


def _passed_over(item: WhyNot) -> Status:
    found = {
        "subject": item.subject[:32],
        "pool": item.pool[:63],
        "plan": str(item.plan)[:128],
        "code": item.code[:64],
        "message": item.message[:512],
    }
    return found if item.change is None else {**found, "remedy": item.change.text[:512]}


def _clipped(found: Status) -> Status:
    """The same with every text no longer than the CRD allows."""
    return {key: value[: MAX_TEXT[key]] if key in MAX_TEXT else value for key, value in found.items()}


def _summary(advice: Advice) -> Status:
    best = advice.best
    if best is None:
        return {"reason": reason(advice)}
    found = {
        "pool": best.pool.name[:63],
        "gpus": f"{best.nodes}x{best.gpus_per_node}",
        "plan": short_plan(best)[:128],
        "step": units.duration(best.step_s),
        "range": units.interval(best.lower_s, best.upper_s),
        "reason": reason(advice),
        "memory": _memory(best),
        "confidence": _confidence(best),
    }
    if advice.baseline is not None:
        found["speedup"] = f"{advice.baseline.step_s / best.step_s:.1f}x"
    if best.cost_per_1000_steps is not None:
        found["costPer1000Steps"] = f"{best.cost_per_1000_steps:.3g} {best.pool.currency}"
    if best.fits_now is not None:
        found["fitsNow"] = "yes" if best.fits_now else "no"
    if best.finish_s is not None:
        found["finish"] = units.duration(best.finish_s)
    return found


def _memory(offer: Offer) -> str:
    taken = units.gibibyte_range(offer.memory_lower_bytes, offer.memory_upper_bytes)
    tight = ", tight" if offer.is_tight else ""
    return f"{taken}/{units.gibibytes(offer.memory_available_bytes)} GiB{tight}"


def _confidence(offer: Offer) -> str:
    low, high = math.log(offer.lower_s / offer.step_s), math.log(offer.upper_s / offer.step_s)
    return f"{_percent(low)}/{_percent(high)} %"


def _percent(ratio_log: float) -> str:
    return f"{100 * math.expm1(ratio_log):+.0f}"
