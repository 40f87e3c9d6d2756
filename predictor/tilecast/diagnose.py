"""Find the part of a forecast that is most probably wrong, given the measured step.

Each part has an independent log-normal error with a half-width from `uncertainty`. If only one part is wrong, its true
time is its forecast plus the difference between measured and forecast step. The most probable cause is the part whose
true time would be the fewest standard errors away from its forecast. Properties missing from the job's description are
a cause of their own, which scales the whole step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from tilecast import constants, search, uncertainty
from tilecast.hardware import Pool
from tilecast.spec import Plan, Plans, Workload

_HALF_WIDTH = NormalDist().inv_cdf(0.95)
"""Half-width of a 90 % range in standard errors."""
PLAUSIBLE = _HALF_WIDTH
"""Most standard errors at which a cause can explain a measurement: the ends of its 90 % range."""
UNSTATED = "unstated"
"""Cause that is not a part of the forecast: data loading, clocks, memory formats, another job on the node."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Part of a forecast, with the seconds it would need if no other part were wrong."""

    line: str
    """A part of the breakdown, or `UNSTATED`."""
    forecast_s: float
    needed_s: float
    """Seconds that the part would need to take. Zero or less if no time of this part can explain the measurement."""
    standard_errors: float
    """Distance of `needed_s` from the forecast. Infinite if `needed_s` is not positive."""

    @property
    def is_plausible(self) -> bool:
        return self.standard_errors <= PLAUSIBLE


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A measured step compared with its forecast."""

    measured_s: float
    forecast_s: float
    lower_s: float
    upper_s: float
    suspects: tuple[Suspect, ...]
    """Parts with an error of their own, the most probable first."""
    unstated: Suspect

    @property
    def ratio(self) -> float:
        """Ratio of the measured step time to the forecast."""
        return self.measured_s / self.forecast_s

    @property
    def is_in_range(self) -> bool:
        """Whether the measured step lies in the 90 % range of the forecast."""
        return self.lower_s <= self.measured_s <= self.upper_s


def diagnose_step(workload: Workload, plan: Plan, pool: Pool, measured_s: float) -> Diagnosis:
    """Compare a measured step of a plan on a pool with its forecast."""
    priced = search.price(workload, Plans.from_plans(plan), pool)
    known, total = constants.shipped_widths(), float(priced.step_s[0])
    parts = priced.times.parts(0)
    own = {
        "compute": known.kernels * float(priced.times.spread[0]),
        "communication": known.communication,
        "launch": known.host,
    }
    suspects = [
        _build_suspect(line, parts[line], parts[line] + measured_s - total, width)
        for line, width in own.items()
        if parts[line]
    ]
    unstated = known.unstated.get(workload.model.family, known.unstated["other"])
    lower, upper = uncertainty.interval(workload, priced, 0)
    return Diagnosis(
        measured_s=measured_s,
        forecast_s=total,
        lower_s=lower,
        upper_s=upper,
        suspects=tuple(sorted(suspects, key=lambda one: (one.standard_errors, one.line))),
        unstated=_build_suspect(UNSTATED, total, measured_s, unstated),
    )


def _build_suspect(line: str, forecast_s: float, needed_s: float, half_width: float) -> Suspect:
    apart = math.inf
    if needed_s > 0:
        logarithm = abs(math.log(needed_s / forecast_s))
        apart = logarithm * _HALF_WIDTH / half_width if half_width else math.inf if logarithm else 0.0
    return Suspect(line, forecast_s, needed_s, apart)
