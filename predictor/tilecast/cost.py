"""Cost of training steps, from the price of GPUs."""

from __future__ import annotations


def price_of_1000_steps(price_per_hour: float, step_s: float) -> float:
    """Return the price of 1000 steps of `step_s` seconds on GPUs that together cost `price_per_hour`."""
    return price_per_hour * step_s / 3.6
