"""Uncertainty of forecasts: a 90 % range around a step time, and ties between plans.

The relative error of a step has independent sources: the kernels (their own spread, smaller because many of them add
up), communication (networks reach a varying share of their line rate), the host (processors and framework versions
differ more than GPUs do), and all that a job description leaves out (data loading, memory formats, clocks). The width
of each source is weighted by its part's share of the step, and widths add in quadrature. `constants.toml` has the
widths.

Between two plans of one job much of the error cancels. What the description leaves out is the same for both. On one
pool so are the network, the host and the kernels, as far as both plans depend on them equally. What remains is the
difference of their shares, and an error of the pair that measured plans also show.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from tilecast import constants
from tilecast.constants import Widths
from tilecast.search import Priced
from tilecast.spec import Columns, Floats, Workload


@dataclass(frozen=True, slots=True)
class Errors(Columns):
    """Half-widths of the 90 % ranges that each source leaves on plans' steps, as logarithms, every column (n,)."""

    communication: Floats
    host: Floats
    kernels: Floats


def errors(priced: Priced, known: Widths | None = None) -> Errors:
    """Return the errors of every plan of a table, without that of what the job's description leaves out."""
    known = known or constants.widths()
    times = priced.times
    return Errors(
        known.communication * times.communication / times.total,
        known.host * times.launch / times.total,
        known.kernels * times.spread * times.compute / times.total,
    )


def interval(workload: Workload, priced: Priced, row: int, known: Widths | None = None) -> tuple[float, float]:
    """Return the lower and upper end of the 90 % range of one plan's step, in seconds.

    The range is symmetric in the logarithm: a forecast is as often a factor too low as too high. Runs seen on the
    pool's cluster narrow it, or widen it where they spread further than assumed.
    """
    known = known or constants.widths()
    own = errors(priced, known).take(np.array([row]))
    unstated = known.unstated.get(workload.model.family, known.unstated["other"])
    width = np.sqrt(unstated**2 + own.communication**2 + own.host**2 + own.kernels**2)[0]
    width = width * priced.times.width[row]
    total = priced.step_s[row]
    return float(total * np.exp(-width)), float(total * np.exp(width))


def cautious(step_s: Floats, launch_s: Floats, known: Widths | None = None) -> Floats:
    """Return the step of each plan on a slow host, which decides among plans that tie, (n,).

    Hosts differ more than GPUs and networks do, and a slow one only ever makes a step longer. So of two plans with
    similar forecasts the one that depends less on its host is the better choice. In the 47 groups of plans that vTrain
    measured, the plan chosen so is 2.7 % behind the best, and the plan chosen by the plain forecast 5.0 %.
    """
    known = known or constants.widths()
    return np.asarray(step_s + np.expm1(known.slow_host) * launch_s)


ODDS = 1 / 3
"""Least probability of a wrong order at which two plans are a tie."""
_REPEATED = NormalDist().inv_cdf(0.95) * constants.shipped().jitter
"""Half-width of the 90 % range of a repeated step: the spread between ranks that do the same work."""
MOST_TIED = float(np.log(1.1))
"""Largest logarithm of the ratio of two plans in a tie: however unsure the forecast is, no plan is recommended that it
puts more than a tenth behind."""
_REACH = NormalDist().inv_cdf(1 - ODDS) / NormalDist().inv_cdf(0.95)
"""Point at which a wrong order has the probability `ODDS`, as a share of the half-width of a 90 % range."""


def tie_within(own: Errors, other: Errors, alike: npt.NDArray[np.bool_], known: Widths | None = None) -> Floats:
    """Return the logarithm of their ratio up to which two plans on one pool are a tie. Columns broadcast.

    Args:
        own: the errors of some plans.
        other: those of the plans to compare them with.
        alike: whether a GPU does the same work in both, so that they differ only in the number of replicas and the pair
            has no error of its own.
        known: widths to use instead of those that ship.
    """
    known = known or constants.widths()
    squares = (
        np.where(alike, _REPEATED, known.plans) ** 2
        + (own.communication - other.communication) ** 2
        + (own.host - other.host) ** 2
        + (own.kernels - other.kernels) ** 2
    )
    return np.asarray(np.minimum(_REACH * np.sqrt(squares), MOST_TIED))


def tie_between(own: Errors, other: Errors, known: Widths | None = None) -> Floats:
    """Return the logarithm of their ratio up to which plans on two pools are a tie.

    Networks, hosts and kernels of the two pools err independently.
    """
    known = known or constants.widths()
    squares = known.plans**2 + sum(one.communication**2 + one.host**2 + one.kernels**2 for one in (own, other))
    return np.asarray(np.minimum(_REACH * np.sqrt(squares), MOST_TIED))


def most_tied(known: Widths | None = None) -> float:
    """Return the logarithm of their ratio beyond which no two plans on one pool are a tie."""
    known = known or constants.widths()
    squares = known.plans**2 + known.communication**2 + known.host**2 + known.kernels**2
    return min(_REACH * float(np.sqrt(squares)), MOST_TIED)
