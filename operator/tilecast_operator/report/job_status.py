"""Make the status of a TrainingJob: recommendation, alternatives, conditions, and the summary in kubectl's columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import ValidationError

from tilecast import constants
from tilecast.advice import Advice, Offer
from tilecast.api import status as api
from tilecast.api.base import StatusModel
from tilecast.api.status import Alternative, Condition, Summary, TrainingJobStatus
from tilecast.learning.calibration import PROVEN_RUNS
from tilecast.memo import Memo
from tilecast.render import units
from tilecast_operator.observed.calibrator import MeasuredForecast
from tilecast_operator.observed.devices import DeviceUse
from tilecast_operator.outcome import AdviceOutcome, AdviceRefusal, get_ready_message, get_ready_reason

ModelT = TypeVar("ModelT", bound=StatusModel)
State: TypeAlias = Literal["True", "False", "Unknown"]

MAX_ALTERNATIVES, MAX_PARETO, MAX_REJECTED, MAX_WHY_NOT = 16, 8, 64, 16
LOW_CONFIDENCE_FACTOR = 1.15
"""Limit for LowConfidence, as a multiple of a half-width.

The half-width is that of a model family's error from what a job description leaves out, as a logarithm. Half-widths add
in quadrature, so at this limit communication, host time and unmeasured kernels together reach 57 % of it.
"""


ANSWERS: Memo[tuple[Advice, TrainingJobStatus]] = Memo(16)
"""Cache of statuses by advice outcome, without generation and conditions. Jobs with equal requests share a status."""


@dataclass(frozen=True, slots=True)
class ConditionContent:
    """Status, reason and message of a condition, without its type and times."""

    status: State
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class CapacityStatus:
    """Whether the GPUs of a recommendation are free now, and the content of the condition CapacityAvailable."""

    aspect: ConditionContent
    fits: bool | None = None


UNOBSERVED = ConditionContent("False", "NotObserved", "no step of the job was measured yet")


def parse_status(text: bytes) -> TrainingJobStatus:
    """Return the status in a JSON text. If the text is invalid or incomplete, return an empty status."""
    try:
        status = TrainingJobStatus.model_validate_json(text)
    except ValidationError:
        return TrainingJobStatus()
    return status if status.conditions and status.summary else TrainingJobStatus()


def make_status(outcome: AdviceOutcome, generation: int, conditions: list[Condition]) -> TrainingJobStatus:
    """Return the status that shows an advice outcome, with these conditions."""
    if isinstance(outcome, AdviceRefusal):
        summary = Summary.from_truncated_values(reason=outcome.reason)
        return TrainingJobStatus(observed_generation=generation, conditions=conditions, summary=summary)
    return _replace_fields(get_advice_status(outcome), observed_generation=generation, conditions=conditions)


def get_advice_status(outcome: Advice) -> TrainingJobStatus:
    """Return the status that shows an advice outcome, without generation and conditions. It may come from a cache."""
    # The advice is kept with its status, so that its id is not reused for another advice.
    return ANSWERS.get(id(outcome), lambda: (outcome, _make_advice_status(outcome)))[1]


def _make_advice_status(outcome: Advice) -> TrainingJobStatus:
    best, baseline, uncapped = outcome.best, outcome.baseline, outcome.uncapped
    return TrainingJobStatus.from_truncated_values(
        recommendation=None if best is None else api.Recommendation.from_offer(best),
        baseline=None if baseline is None else Alternative.from_offer(baseline),
        uncapped=None if uncapped is None else Alternative.from_offer(uncapped),
        alternatives=[Alternative.from_offer(offer) for offer in outcome.offers[:MAX_ALTERNATIVES]],
        pareto=[Alternative.from_offer(offer) for offer in outcome.pareto[:MAX_PARETO]],
        rejected=[api.RejectedPool.from_rejection(item) for item in outcome.rejections[:MAX_REJECTED]],
        why_not=[api.PassedOver.from_why_not(item) for item in outcome.why_not[:MAX_WHY_NOT]],
        ties=outcome.ties if best else None,
        notes=[text[:256] for text in (*outcome.alerts, *outcome.notes)],
        plans_evaluated=outcome.plans_evaluated,
        model=api.ModelVersion.from_origin(outcome.provenance),
        inputs_hash=outcome.inputs_hash,
        summary=_make_summary(outcome),
    )


def make_conditions(
    outcome: AdviceOutcome,
    is_off: bool,
    generation: int,
    now: str,
    current: Iterable[Condition],
    fit: CapacityStatus,
    applied: ConditionContent | None = None,
) -> list[Condition]:
    """Return all conditions for an advice outcome. A condition whose status is unchanged keeps its transition time.

    Args:
        outcome: The advice, or why there is none.
        is_off: Whether the mode of the job is Off.
        generation: Generation of the spec that was read.
        now: Time for conditions whose status changes (RFC 3339).
        current: The current conditions.
        fit: Whether the recommendation could start now.
        applied: Content of the condition Applied, if the TrainingJob has a target.
    """
    before = list(current)
    aspects = _make_aspects(outcome, is_off, fit, applied)
    return [make_condition(kind, aspect, generation, now, before) for kind, aspect in aspects.items()]


def make_condition(
    kind: str, aspect: ConditionContent, generation: int, now: str, current: Iterable[Condition]
) -> Condition:
    """Return a condition. If its status is unchanged, it keeps its transition time."""
    old = next((item for item in current if item.type == kind), None)
    since = old.last_transition_time if old is not None and old.status == aspect.status else None
    return Condition.from_truncated_values(
        type=kind,
        status=aspect.status,
        observed_generation=generation,
        last_transition_time=since or now,
        reason=aspect.reason,
        message=aspect.message,
    )


def set_fit(status: TrainingJobStatus, fit: CapacityStatus) -> TrainingJobStatus:
    """Return a copy of a status with `fitsNow` set."""
    summary, best = status.summary or Summary(), status.recommendation
    if best is None:
        return _replace_fields(status, summary=_replace_fields(summary, fits_now=None))
    fits = None if fit.fits is None else "yes" if fit.fits else "no"
    best, summary = _replace_fields(best, fits_now=fit.fits), _replace_fields(summary, fits_now=fits)
    return _replace_fields(status, recommendation=best, summary=summary)


def freeze_forecast(status: TrainingJobStatus, since: str) -> TrainingJobStatus:
    """Return a copy of a status whose forecast can no longer change. `since` is the time (RFC 3339)."""
    return (
        status if status.forecast is not None else _replace_fields(status, forecast=api.FrozenForecast(frozen_at=since))
    )


def update_conditions(
    status: TrainingJobStatus, generation: int, now: str, aspects: Mapping[str, ConditionContent]
) -> TrainingJobStatus:
    """Return a copy of a status with new or replaced conditions and a new generation."""
    known = {item.type for item in status.conditions}
    fresh = [
        make_condition(item.type, aspects[item.type], generation, now, status.conditions)
        if item.type in aspects
        else _replace_fields(item, observed_generation=generation)
        for item in status.conditions
    ]
    fresh += [make_condition(kind, aspects[kind], generation, now, ()) for kind in aspects if kind not in known]
    return _replace_fields(status, observed_generation=generation, conditions=fresh)


def update_alternatives(status: TrainingJobStatus, outcome: Advice, digest: str | None) -> TrainingJobStatus:
    """Return a copy of a status with the alternatives of a newer advice outcome.

    Args:
        status: The previous status.
        outcome: The newer outcome.
        digest: Digest of the inputs of the newer outcome. None if no measured run corrects it.
    """
    alternatives = [Alternative.from_offer(offer) for offer in outcome.offers[:MAX_ALTERNATIVES]]
    return _replace_fields(status, alternatives=alternatives, alternatives_hash=digest)


def add_score(status: TrainingJobStatus, score: MeasuredForecast) -> TrainingJobStatus:
    """Return a copy of a status with measured steps and the error of the forecast."""
    error = score.forecast.error_ratios(score.window)
    return _replace_fields(
        status,
        forecast=score.forecast,
        observed=score.window.status(),
        error=error,
        summary=_replace_fields(status.summary or Summary(), error=f"{error.calibrated_ratio:+.0%}"),
    )


def add_gpu_use(status: TrainingJobStatus, use: DeviceUse) -> TrainingJobStatus:
    """Return a copy of a status with the measured use of its GPUs. The memory peak is the highest one so far."""
    before, best, ran = status.gpu_use, status.recommendation, status.forecast
    peaks = (None if before is None or before.job_uid != use.job_uid else before.peak_memory_bytes, use.memory_bytes)
    peak = max((item for item in peaks if item is not None), default=None)
    is_followed = ran is not None and ran.followed is True
    error = (best.memory_bytes.used - peak) / peak if best is not None and is_followed and peak else None
    shown = api.GpuUse(
        peak_memory_bytes=peak,
        memory_error_ratio=None if error is None else round(error, 4),
        mfu_upper_bound_ratio=use.tensor_ratio,
        power_watts=use.power_w,
        time=use.time,
        job_uid=use.job_uid,
    )
    return _replace_fields(status, gpu_use=shown)


def make_observed_aspect(score: MeasuredForecast) -> ConditionContent:
    """Return the content of the condition ObservationsAvailable for a job with measured steps."""
    error, window = score.forecast.error_ratios(score.window), score.window
    text = (
        f"{window.samples} reports, the newest by {window.latest.source}: median {window.seconds:.4g} s; "
        f"the forecast was {error.calibrated_ratio:+.0%} off, {error.raw_ratio:+.0%} before correction"
    )
    return ConditionContent("True", "Observed", text)


def remove_score(status: TrainingJobStatus) -> TrainingJobStatus:
    """Return a copy of a status without measured steps and without the error of the forecast."""
    if status.observed is None:
        return status
    frozen = status.forecast and api.FrozenForecast(frozen_at=status.forecast.frozen_at)
    summary = _replace_fields(status.summary or Summary(), error=None)
    return _replace_fields(status, observed=None, error=None, forecast=frozen, summary=summary)


def _make_aspects(
    outcome: AdviceOutcome, is_off: bool, fit: CapacityStatus, applied: ConditionContent | None = None
) -> dict[str, ConditionContent]:
    """Return status, reason and message of each condition for an advice outcome, by type of condition."""
    best = None if isinstance(outcome, AdviceRefusal) else outcome.best
    given = ConditionContent("True" if best else "False", get_ready_reason(outcome), get_ready_message(outcome))
    if best is None or isinstance(outcome, AdviceRefusal):
        confidence = ConditionContent("Unknown", "NoRecommendation", "there is no forecast to judge")
    else:
        confidence = _make_confidence_content(outcome, best)
    off, advise = "mode is Off: nothing but this status is written", "mode Advise never changes a job"
    return {
        "Ready": given,
        "RecommendationProvided": given,
        "LowConfidence": confidence,
        "CapacityAvailable": fit.aspect,
        "Applied": applied
        or (ConditionContent("False", "ModeOff", off) if is_off else ConditionContent("False", "ModeAdvise", advise)),
        "ObservationsAvailable": UNOBSERVED,
    }


def _make_confidence_content(advice: Advice, best: Offer) -> ConditionContent:
    """Return the content of the condition LowConfidence.

    It compares the forecast's range with the usual range of its model family.
    """
    family, unstated = advice.request.workload.model.family, constants.shipped_widths().unstated
    usual = unstated.get(family, unstated["other"])
    bare = f"{_format_percent(-usual)}/{_format_percent(usual)} %"
    if math.log(best.upper_s / best.lower_s) / 2 > LOW_CONFIDENCE_FACTOR * usual:
        why = f"communication, host time or unmeasured kernels widen it beyond the {bare} usual for family {family}"
        return ConditionContent(
            "True", "WideRange", f"the range is {_format_step_range(best)}: {why}; {advice.confidence}"
        )
    correction = best.pool.calibration.find_workload_correction(best.pool.gpu.name, best.workload, best.gpus)
    if correction.own < PROVEN_RUNS:
        counted = f"{correction.own} of {PROVEN_RUNS} runs like this one"
        why = f"{counted} were measured by its namespace, trusted ones or several others"
        return ConditionContent(
            "True", "FewObservations", f"the range is {_format_step_range(best)}: {why}; {advice.confidence}"
        )
    why = f"as usual for family {family} ({bare})"
    return ConditionContent(
        "False", "UsualRange", f"the range is {_format_step_range(best)}, {why}; {advice.confidence}"
    )


def format_short_plan(offer: Offer) -> str:
    """Return the plan of an offer as text, without micro-batch and recomputation, for example `fsdp16,tp2`."""
    return str(offer.plan).split(",mb")[0]


def _make_summary(advice: Advice) -> Summary:
    best = advice.best
    if best is None:
        return Summary.from_truncated_values(reason=get_ready_reason(advice))
    cost, baseline, fits = best.cost_per_1000_steps, advice.baseline, best.fits_now
    return Summary.from_truncated_values(
        pool=best.pool.name,
        gpus=f"{best.nodes}x{best.gpus_per_node}",
        plan=format_short_plan(best),
        step=units.format_duration(best.step_s),
        range=units.format_interval(best.lower_s, best.upper_s),
        reason=get_ready_reason(advice),
        memory=_format_memory(best),
        confidence=_format_step_range(best),
        speedup=None if baseline is None else f"{baseline.step_s / best.step_s:.1f}x",
        cost_per1000_steps=None if cost is None else f"{cost:.3g} {best.pool.currency}",
        fits_now=None if fits is None else "yes" if fits else "no",
        finish=None if best.finish_s is None else units.format_duration(best.finish_s),
    )


def _format_memory(offer: Offer) -> str:
    taken = units.format_gibibyte_range(offer.memory_lower_bytes, offer.memory_upper_bytes)
    tight = ", tight" if offer.is_tight else ""
    return f"{taken}/{units.format_gibibytes(offer.memory_available_bytes)} GiB{tight}"


def _format_step_range(offer: Offer) -> str:
    low, high = math.log(offer.lower_s / offer.step_s), math.log(offer.upper_s / offer.step_s)
    return f"{_format_percent(low)}/{_format_percent(high)} %"


def _format_percent(ratio_log: float) -> str:
    return f"{100 * math.expm1(ratio_log):+.0f}"


def _replace_fields(model: ModelT, **values: Any) -> ModelT:
    """Return a copy of a model with some fields replaced. A field with the value None is removed."""
    return model.model_copy(update=values)
