"""Describe how late a run ends if its objective ignores the deadline, and which plan would be on time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilecast.advice.choose import Choice, choose_or_reject, format_time, rank_choices
from tilecast.advice.pricing import CandidatePlans
from tilecast.advice.values import Offer, Request

_FEWEST, _FASTEST = "fewestGpusBeforeDeadline", "timeToFinish"


def describe_lateness(
    request: Request, choices: Sequence[Choice], candidates: Sequence[CandidatePlans]
) -> tuple[str, ...]:
    """Return a note, in a tuple, if the recommended run misses a deadline that its objective ignores.

    Args:
        request: the job.
        choices: the chosen plan of each pool, the recommended one first.
        candidates: all plans of each pool.

    Otherwise, the tuple is empty.
    """
    if request.deadline_s is None or request.objective_record.bound == "deadlineSeconds" or not choices:
        return ()
    offer = choices[0].offer()
    late_s = _find_run_seconds(request, offer) - request.deadline_s
    if late_s <= 0:
        return ()
    end = " at the upper end of its range" if request.limits_at == "upperBound" else ""
    text = f"{offer.gpus} GPUs of {offer.pool.name} end {format_time(late_s)} late{end}"
    ahead = _choose_offer(replace(request, objective=_FEWEST, budget=None), candidates)
    if ahead is not None:
        plan = (
            f"{ahead.gpus} GPUs of {ahead.pool.name} ({ahead.plan}, {format_time(_find_run_seconds(request, ahead))})"
        )
        return (f"{text}; on time would be {plan}: see objective {_FEWEST}.",)
    fastest = _choose_offer(replace(request, objective=_FASTEST, budget=None, deadline_s=None), candidates)
    fastest = fastest or offer
    least = f"{fastest.gpus} GPUs of {fastest.pool.name} take {format_time(_find_run_seconds(request, fastest))}"
    return (f"{text}; no plan is on time: {least}. Give it more time, more GPUs or fewer steps.",)


def _choose_offer(request: Request, candidates: Sequence[CandidatePlans]) -> Offer | None:
    """Return the offer that the advice on another request, usually with another objective, would recommend, or None."""
    outcomes = [choose_or_reject(request, each) for each in candidates]
    choices = rank_choices(request, [item for item in outcomes if isinstance(item, Choice)]).choices
    return choices[0].offer() if choices else None


def _find_run_seconds(request: Request, offer: Offer) -> float:
    """Return the run time in seconds to compare with the deadline: the forecast, or the upper end of its range."""
    ratio = offer.upper_s / offer.step_s if request.limits_at == "upperBound" else 1.0
    return (offer.finish_s or 0.0) * ratio
