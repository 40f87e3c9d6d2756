"""A job's own measured runs: held against their forecasts, and what they make of every other one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilecast.advise.ran import ran
from tilecast.advise.values import Advice, Offer, Request
from tilecast.hardware import Pool
from tilecast.spec import Plan, SpecError, Stated
from tilecast.transfer import WHOLE, JobRun, JobRuns, Place

SLIP = 10.0
"""A step so many times its forecast, or so many times shorter, is one of another unit."""
APART = 1.5
"""Two measurements of one setting further apart than this factor are not of one job."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A step of the job as somebody measured it."""

    pool: Pool
    gpus: int
    seconds: float
    plan: Plan | Stated | None = None
    """What is known of the plan; the fastest that agrees with it is taken to have run."""
    waited_s: float = 0.0
    """Seconds of the step that went by waiting for the data loader."""
    field: str = "--measured"
    """What errors call it."""


@dataclass(frozen=True, slots=True)
class OwnRun:
    """A measurement beside its forecast in seconds, which no own run has corrected."""

    measurement: Measurement
    plan: Plan
    forecast_s: float

    @property
    def ratio(self) -> float:
        """What its step is multiplied by to be the one that was measured, waiting for the loader aside."""
        return (self.measurement.seconds - self.measurement.waited_s) / self.forecast_s

    def own(self, request: Request) -> JobRun:
        """The same for transfer."""
        pool = self.measurement.pool
        place = Place.of(pool.gpu.name, pool.gpu.architecture, request.workload)
        plan = self.measurement.plan
        names = tuple(name for name in WHOLE if plan is not None and getattr(plan, name, None) is not None)
        return JobRun(
            place,
            self.plan,
            -math.log(self.ratio),
            waited_s=self.measurement.waited_s,
            gpus_per_node=pool.gpus_per_node,
            fields=names,
        )

    def __str__(self) -> str:
        return f"{self.measurement.gpus} {self.measurement.pool.name}"


def own_runs(request: Request, measurements: Sequence[Measurement]) -> tuple[OwnRun, ...]:
    """The measurements with their forecasts.

    Raises:
        SpecError: one is impossible, or of another unit, or two contradict each other; or no plan can be as one says.
    """
    items: list[OwnRun] = []
    for one in measurements:
        item = _own_run(request, one)
        for other in items:
            same = (item.plan, item.measurement.pool.name) == (other.plan, other.measurement.pool.name)
            if same and abs(math.log(one.seconds / other.measurement.seconds)) > math.log(APART):
                problem = f"{item} take {one.seconds:g} s here and {other.measurement.seconds:g} s there"
                raise SpecError(one.field, problem, "name the plans, or leave one of them out")
        items.append(item)
    return tuple(items)


def _own_run(request: Request, one: Measurement) -> OwnRun:
    if not 0 < one.seconds < 1e9 or not 0 <= one.waited_s < one.seconds:
        text = f"{one.seconds:g} s, {one.waited_s:g} s of them waiting, is no step time"
        raise SpecError(one.field, text, "give seconds, more than 0")
    try:
        held = ran(request, replace(one.pool, own=JobRuns()), one.gpus, one.plan)
    except SpecError as error:
        raise SpecError(one.field, error.problem, error.remedy) from None
    spent = one.seconds - one.waited_s
    if spent < held.least_s:
        peak = f"{one.gpus} {one.pool.name} at their peak take {held.least_s:.3g} s for {held.plan}"
        raise SpecError(one.field, f"{spent:.3g} s is faster than the roofline: {peak}", "check the unit and the plan")
    if abs(math.log(spent / held.step_s)) > math.log(SLIP):
        text = f"{spent:.3g} s is {spent / held.step_s:.3g} times the forecast of {held.step_s:.3g} s for {held.plan}"
        raise SpecError(one.field, text, "check the unit, the batch and the plan")
    return OwnRun(one, held.plan, held.step_s)


def corrected(request: Request, pools: Sequence[Pool], items: Sequence[OwnRun]) -> tuple[Pool, ...]:
    """The pools as the job's own runs correct them."""
    own = JobRuns(tuple(item.own(request) for item in items))
    return tuple(replace(pool, own=own) for pool in pools)


def with_notes(advice: Advice, items: Sequence[OwnRun]) -> Advice:
    """The advice with what the own runs did to every offer in its reason, and with the runs in the notes."""
    if not items:
        return advice
    runs = f"your run on {items[0]}" if len(items) == 1 else f"your {len(items)} runs"

    def offer(one: Offer) -> Offer:
        return replace(one, reason=f"{one.reason}; x{one.carried:.2f} from {runs}")

    return replace(
        advice,
        offers=tuple(offer(one) for one in advice.offers),
        baseline=offer(advice.baseline) if advice.baseline else None,
        notes=(*advice.notes, *(_note(item) for item in items)),
        confidence=f"{runs}; {advice.confidence}" if advice.best else advice.confidence,
    )


def with_note(advice: Advice, job: str) -> Advice:
    """The advice with what a run of another workload did to every offer in its reason."""

    def offer(one: Offer) -> Offer:
        return replace(one, reason=f"{one.reason}; x{one.carried:.2f} from the run of {job}, another workload")

    offers, baseline = tuple(offer(one) for one in advice.offers), advice.baseline
    return replace(advice, offers=offers, baseline=offer(baseline) if baseline else None)


def _note(item: OwnRun) -> str:
    waited = item.measurement.waited_s
    loader = f" beside {waited:.3g} s of waiting for its loader, which stay on every pool" if waited else ""
    spent = f"{item.measurement.seconds - waited:.3g} s{loader}"
    return f"Your run on {item} ({item.plan}) took {spent}, {item.ratio:.2f}x its forecast of {item.forecast_s:.3g} s."
