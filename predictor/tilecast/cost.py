"""Cost of steps."""

from __future__ import annotations


def per_1000_steps(hourly: float, step_s: float) -> float:
    """Return the cost of 1000 steps of `step_s` seconds each, in the currency of the price of an hour."""
    return hourly * step_s / 3.6
