"""Describe the risk that a plan runs out of memory, in words that all outputs share."""

from __future__ import annotations

from tilecast.advice import Advice, Offer
from tilecast.render.units import format_duration, format_memory


def describe_memory(offer: Offer) -> str:
    """Return the range of GiB that an offer takes on a GPU, and the GiB available, as a phrase."""
    return format_memory(offer.memory_lower_bytes, offer.memory_upper_bytes, offer.memory_available_bytes)


def describe_risk(advice: Advice) -> list[str]:
    """Return sentences on a recommendation that may not fit, with the plan that has memory to spare, or none."""
    best, safer = advice.best, advice.safer
    if best is None or not best.is_tight:
        return []
    first = f"{best.plan} on {best.gpus} {best.pool.name} may run out of memory: {describe_memory(best)}."
    if safer is None:
        return [first, "No plan here has memory to spare."]
    where = f"{safer.plan} on {safer.gpus} {safer.pool.name}"
    return [first, f"Safer: {where}, {format_duration(safer.step_s)} a step, {describe_memory(safer)}."]
