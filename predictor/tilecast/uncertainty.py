"""How sure a forecast is: a 90 % range around a step time.

The relative error of a step has independent sources: the kernels (their own spread, smaller because many of them
add up), communication (networks reach a varying share of their line rate), the host (processors and framework
versions differ more than GPUs do), and all that a job description leaves out (data loading, memory formats, clocks).
Each part's share of the step weighs its own width, and widths add in quadrature. `constants.toml` holds them.
"""

from __future__ import annotations

import math

from tilecast.search import Priced
from tilecast.spec import Workload
from tilecast.step import Widths, widths


def interval(workload: Workload, priced: Priced, row: int, known: Widths | None = None) -> tuple[float, float]:
    """Lower and upper end of the 90 % range of one plan's step, in seconds.

    The range is symmetric in the logarithm: a forecast is as often a factor too low as too high.
    """
    known = known or widths()
    parts = priced.times.parts(row)
    total = sum(parts.values())
    unstated = known.unstated.get(workload.model.family, known.unstated["other"])
    squares = (
        unstated**2,
        (known.communication * parts["communication"] / total) ** 2,
        (known.host * parts["launch"] / total) ** 2,
        (known.kernels * float(priced.times.spread[row]) * parts["compute"] / total) ** 2,
    )
    width = math.sqrt(sum(squares))
    return total * math.exp(-width), total * math.exp(width)
