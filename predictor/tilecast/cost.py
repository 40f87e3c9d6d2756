"""Cost of steps."""

from __future__ import annotations


def price_of_1000_steps(hourly: float, step_s: float) -> float:
    """Return the price of 1000 steps of `step_s` seconds each, from the price of an hour of all GPUs."""
    return hourly * step_s / 3.6
