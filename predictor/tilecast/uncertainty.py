"""How sure a forecast is: a 90 % range around a step time.

The relative error of a step has three independent sources: the kernels (their own spread, smaller because
many of them add up), communication, and everything a job description leaves out (data loading, framework,
clocks). Each part's share of the step weighs its own spread; they add in quadrature.
"""

from __future__ import annotations

import numpy as np

from tilecast.hardware import Pool
from tilecast.search import Priced
from tilecast.spec import Workload

UNSTATED = 0.16
"""What descriptions leave out: half-width of the 90 % range of published runs on one node."""
COMMUNICATION = 0.45
"""Of exposed communication: networks reach a varying share of their line rate."""
LAUNCH = 0.5
"""Of host time: processors and framework versions differ by more than GPUs do."""


def interval(workload: Workload, pool: Pool, priced: Priced, row: int) -> tuple[float, float]:
    """Lower and upper end of the 90 % range of one plan's step, in seconds.

    The range is symmetric in the logarithm: a forecast is as often a factor too low as too high.
    """
    parts = priced.times.parts(row)
    total = sum(parts.values())
    share = {name: value / total for name, value in parts.items()}
    width = np.sqrt(
        UNSTATED**2
        + (COMMUNICATION * share["communication"]) ** 2
        + (LAUNCH * share["launch"]) ** 2
        + (float(priced.times.spread[row]) * share["compute"] * 0.5) ** 2
    )
    return total * float(np.exp(-width)), total * float(np.exp(width))
