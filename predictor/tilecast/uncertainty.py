"""Uncertainty of forecasts: a 90 % range around a step time, and ties between plans.

The relative error of a step has independent sources: the kernels (less than their own spread, because many of them add
up), communication (networks reach a varying share of their line rate), the host (processors and framework versions
differ more than GPUs do), and everything that a job description leaves out (data loading, memory formats, clocks). Each
source's width is weighted by its part's share of the step, and widths add in quadrature. `constants.toml` has the
widths.

Between two plans of one job, much of the error cancels. What the description leaves out is the same for both. On one
pool, network, host and kernels are the same too, as far as both plans depend on them equally. What remains is the
difference of their shares, and an error of the pair that measured plans also show.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from tilecast import constants
from tilecast.constants import RangeHalfWidths
from tilecast.search import PricedPlans
from tilecast.spec import Columns, Floats, Workload


@dataclass(frozen=True, slots=True)
class ErrorWidths(Columns):
    """Half-widths of the 90 % ranges of n plans' steps by source of error, as logarithms. Every column is (n,)."""

    communication: Floats
    host: Floats
    kernels: Floats


def forecast_errors(priced: PricedPlans, widths: RangeHalfWidths | None = None) -> ErrorWidths:
    """Return the errors of each plan's step, (n,).

    Errors from properties that the job description leaves out are not included.
    """
    widths = widths or constants.shipped_widths()
    times = priced.times
    return ErrorWidths(
        widths.communication * times.communication / times.total,
        widths.host * times.launch / times.total,
        widths.kernels * times.spread * times.compute / times.total,
    )


def interval(
    workload: Workload, priced: PricedPlans, row: int, widths: RangeHalfWidths | None = None
) -> tuple[float, float]:
    """Return the lower and the upper end of the 90 % range of the step in one row, in seconds.

    The range is symmetric in the logarithm of the seconds. Runs measured on the pool's cluster make the range narrower,
    or wider if they spread more than assumed.
    """
    width, total = range_widths(workload, priced, widths)[row], priced.step_s[row]
    return float(total * np.exp(-width)), float(total * np.exp(width))


def range_widths(workload: Workload, priced: PricedPlans, widths: RangeHalfWidths | None = None) -> Floats:
    """Return the half-width of the 90 % range of the step of each plan, (n,), as the logarithm of a ratio."""
    widths = widths or constants.shipped_widths()
    own = forecast_errors(priced, widths)
    unstated = widths.unstated.get(workload.model.family, widths.unstated["other"])
    unmeasured = widths.unmeasured.get(workload.precision, 0.0)
    width = np.sqrt(unstated**2 + unmeasured**2 + own.communication**2 + own.host**2 + own.kernels**2)
    return np.asarray(width * priced.times.width)


def slow_host_step_s(step_s: Floats, launch_s: Floats, widths: RangeHalfWidths | None = None) -> Floats:
    """Return the seconds of each plan's step on a slow host, (n,), which decide ties between plans.

    Hosts differ more than GPUs and networks, and a slow host only makes a step longer. So of two plans with similar
    forecasts, the plan that waits less for its host is the better choice. In the 47 groups of plans that vTrain
    measured, the plan chosen in this way is 1.8 % behind the best plan. The plan with the best forecast is 3.9 %
    behind.
    """
    widths = widths or constants.shipped_widths()
    return np.asarray(step_s + np.expm1(widths.slow_host) * launch_s)


ODDS = 1 / 3
"""Least probability of a wrong order at which two plans tie."""
_REPEATED = NormalDist().inv_cdf(0.95) * constants.shipped_constants().jitter
"""Half-width of the 90 % range of a repeated step, from the spread between ranks with equal work."""
MOST_TIED = float(np.log(1.1))
"""Largest log ratio of two plans that tie, so that no recommended plan is more than a tenth behind."""
_REACH = NormalDist().inv_cdf(1 - ODDS) / NormalDist().inv_cdf(0.95)
"""Distance of two forecasts at which a wrong order has probability `ODDS`, relative to the half-width of a 90 % range.
"""


def tie_width_on_pool(
    errors: ErrorWidths,
    other_errors: ErrorWidths,
    has_equal_plan: npt.NDArray[np.bool_],
    widths: RangeHalfWidths | None = None,
) -> Floats:
    """Return the largest logarithm of the ratio of step times at which two plans on one pool tie. Columns broadcast.

    Args:
        errors: the errors of some plans.
        other_errors: the errors of the plans to compare with.
        has_equal_plan: whether a GPU does equal work in both plans, which then differ only in the number of replicas.
        widths: widths to use instead of those that ship.
    """
    widths = widths or constants.shipped_widths()
    squares = (
        np.where(has_equal_plan, _REPEATED, widths.plans) ** 2
        + (errors.communication - other_errors.communication) ** 2
        + (errors.host - other_errors.host) ** 2
        + (errors.kernels - other_errors.kernels) ** 2
    )
    return np.asarray(np.minimum(_REACH * np.sqrt(squares), MOST_TIED))


def tie_width_between_pools(
    errors: ErrorWidths, other_errors: ErrorWidths, widths: RangeHalfWidths | None = None
) -> Floats:
    """Return the largest logarithm of the ratio of step times at which plans on two pools tie.

    The errors of networks, hosts and kernels of the two pools are independent.
    """
    widths = widths or constants.shipped_widths()
    squares = widths.plans**2 + sum(
        one.communication**2 + one.host**2 + one.kernels**2 for one in (errors, other_errors)
    )
    return np.asarray(np.minimum(_REACH * np.sqrt(squares), MOST_TIED))


def largest_tie_width(widths: RangeHalfWidths | None = None) -> float:
    """Return the logarithm of the ratio of step times above which no two plans on one pool can tie."""
    widths = widths or constants.shipped_widths()
    squares = widths.plans**2 + widths.communication**2 + widths.host**2 + widths.kernels**2
    return min(_REACH * float(np.sqrt(squares)), MOST_TIED)
