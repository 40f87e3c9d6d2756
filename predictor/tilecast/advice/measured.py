"""Forecast plans that run, compare a job's own measured runs with them, and correct every other forecast with those."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast import search, uncertainty
from tilecast.advice.enumeration import stated_plans
from tilecast.advice.values import Advice, Offer, Request
from tilecast.hardware import Pool
from tilecast.learning import calibration
from tilecast.learning.calibration import Key
from tilecast.learning.job_calibration import (
    ALL_COLUMNS,
    NO_PARTS,
    JobRun,
    JobRuns,
    MeasuredParts,
    RunSetting,
    part_deviations,
)
from tilecast.search import Limits
from tilecast.spec import Plan, Plans, Precision, SpecError, Stated


@dataclass(frozen=True, slots=True)
class RunForecast:
    """Forecast for a plan that runs. Times are seconds of one step."""

    pool: Pool
    plan: Plan
    raw_s: float
    """The step without any correction."""
    step_s: float
    lower_s: float
    upper_s: float
    group: Key
    """Key that calibration groups the run by."""
    framework: str
    """Framework that calibration counts the run for."""
    least_s: float
    """Time of all kernels at the peak of compute or memory bandwidth."""
    parts: Mapping[str, float]
    """Parts that sum to `step_s`."""
    exchanged_s: float
    """Time of collectives, hidden ones included, where a step waits for them.

    Zero otherwise: the stages of a pipeline wait for each other, and weights in the host's memory are copied.
    """


def forecast_run(
    request: Request,
    pool: Pool,
    gpus: int,
    plan: Plan | Stated | None,
    batch: int | None = None,
    precision: Precision | None = None,
) -> RunForecast:
    """Return the forecast for a plan on `gpus` GPUs of a pool.

    If the plan is known only in part, the fastest plan that agrees with it and fits is taken; if none fits, the
    leanest.

    Args:
        request: the job.
        pool: the pool that it runs on.
        gpus: the number of GPUs.
        plan: the whole plan, the part of it that is known, or None.
        batch: the global batch, if it is not the job's own.
        precision: the precision, if it is not the job's own.

    Raises:
        SpecError: no plan agrees with this, or the pool's GPU does not support the precision.
    """
    own = request.workload
    workload = replace(own, global_batch=batch or own.global_batch, precision=precision or own.precision)
    if isinstance(plan, Plan):
        table = Plans.of(plan)
    elif plan is not None:
        table = stated_plans(workload, gpus, plan, "plan")
    else:
        nodes = max(pool.max_nodes, -(-gpus // pool.gpus_per_node))
        table = search.find(workload, replace(pool, max_nodes=nodes), Limits(gpus=gpus)).plans
    if not len(table):
        raise SpecError("gpus", f"no plan splits the job over {gpus} GPUs of {pool.name}", "say the plan that runs")
    priced = search.price(workload, table, pool)
    fitting = np.where(priced.fits, priced.step_s, np.inf)
    row = int(np.argmin(fitting if priced.fits.any() else priced.memory_bytes))
    lower_s, upper_s = uncertainty.interval(workload, priced, row)
    chosen = table.row(row)
    is_plain = chosen.pipeline == 1 and workload.offload != "parameters"
    gpu, family, scale = pool.gpu.name, workload.model.family, calibration.scale(chosen.gpus)
    return RunForecast(
        pool=pool,
        plan=chosen,
        raw_s=float(priced.step_s[row] / priced.times.correction[row]),
        step_s=float(priced.step_s[row]),
        lower_s=lower_s,
        upper_s=upper_s,
        group=(gpu, workload.precision, family, scale, calibration.digest(workload)),
        framework=calibration.framework_of(workload),
        least_s=float(priced.times.least[row]),
        parts=priced.times.parts(row),
        exchanged_s=float(priced.times.communication[row] + priced.times.hidden[row]) if is_plain else 0.0,
    )


MAX_FORECAST_RATIO = 10.0
"""Factor, up or down, between step and forecast above which a measurement is taken to be in another unit."""
ROUNDING = 1e-5
"""Relative excess that the sum of the parts may have over the step."""
MAX_REPEAT_RATIO = 1.5
"""Largest factor between two measurements of one setting that may belong to the same job."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured step of the job."""

    pool: Pool
    gpus: int
    seconds: float
    plan: Plan | Stated | None = None
    """The known part of the plan; the fastest plan that agrees with it is taken to have run."""
    parts: MeasuredParts = NO_PARTS
    """Seconds of the step's parts, as far as they are known."""
    field: str = "--measured"
    """Candidates name that errors show."""

    @property
    def spent_s(self) -> float:
        """Seconds in which the GPU did not wait for the data loader."""
        return self.seconds - (self.parts.input_s or 0.0)


@dataclass(frozen=True, slots=True)
class OwnRun:
    """A measurement and its forecast in seconds, which none of the job's own runs has corrected."""

    measurement: Measurement
    forecast: RunForecast

    @property
    def plan(self) -> Plan:
        return self.forecast.plan

    @property
    def expected_s(self) -> dict[str, float]:
        """Parts of the forecast, without the wait for data where that was measured."""
        without = () if self.measurement.parts.input_s is None else ("input",)
        return {name: part for name, part in self.forecast.parts.items() if name not in without}

    @property
    def separate_s(self) -> dict[str, float]:
        """Measured seconds of the parts with a correction of their own: those that are forecast to take some time."""
        known_s = {"communication": self.forecast.exchanged_s, "optimizer": self.forecast.parts["optimizer"]}
        return {name: part for name, part in self.measurement.parts.separate_s.items() if known_s[name] > 0}

    @property
    def rest_s(self) -> float:
        """Seconds of the measured step that the parts in `separate_s` leave."""
        return self.measurement.spent_s - sum(self.separate_s.values())

    @property
    def ratio(self) -> float:
        """Factor from the forecast step to the measured one, the wait for the data loader left out."""
        return self.measurement.spent_s / sum(self.expected_s.values())

    def own(self, request: Request) -> JobRun:
        """Return the run in the form that `tilecast.learning.job_calibration` reads."""
        pool, plan = self.measurement.pool, self.measurement.plan
        separate_s = self.separate_s
        elsewhere_s = {name: part for name, part in separate_s.items() if name != "communication"}
        return JobRun(
            RunSetting.of(pool.gpu.name, pool.gpu.architecture, request.workload),
            self.plan,
            -math.log(self.ratio),
            waited_s=self.measurement.parts.input_s or 0.0,
            parts=self._part_deviations(separate_s),
            parts_elsewhere=self._part_deviations(elsewhere_s),
            gpus_per_node=pool.gpus_per_node,
            fields=tuple(name for name in ALL_COLUMNS if plan is not None and getattr(plan, name, None) is not None),
        )

    def _part_deviations(self, separate_s: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
        if not separate_s:
            return ()
        return part_deviations(self.expected_s, self.forecast.exchanged_s, self.measurement.spent_s, separate_s)

    def __str__(self) -> str:
        return f"{self.measurement.gpus} {self.measurement.pool.name}"


def own_runs(request: Request, measurements: Sequence[Measurement]) -> tuple[OwnRun, ...]:
    """Return the measurements with their forecasts.

    Raises:
        SpecError: a measurement is impossible or in another unit, two of them contradict each other, or no plan agrees
            with what one of them says.
    """
    items: list[OwnRun] = []
    for one in measurements:
        item = _own_run(request, one)
        for other in items:
            same = (item.plan, item.measurement.pool.name) == (other.plan, other.measurement.pool.name)
            if same and abs(math.log(one.seconds / other.measurement.seconds)) > math.log(MAX_REPEAT_RATIO):
                problem = f"{item} take {one.seconds:g} s here and {other.measurement.seconds:g} s there"
                raise SpecError(one.field, problem, "name the plans, or leave one of them out")
        items.append(item)
    return tuple(items)


def _own_run(request: Request, one: Measurement) -> OwnRun:
    if not 0 < one.seconds < 1e9:
        raise SpecError(one.field, f"{one.seconds:g} s is no step time", "give seconds, more than 0")
    if one.parts.sum_s > one.seconds * (1 + ROUNDING) or one.spent_s <= 0:
        text = f"the parts of a step of {one.seconds:g} s take {one.parts.sum_s:g} s"
        raise SpecError(one.field, text, "give what each part takes of the step; they do not overlap")
    try:
        held = forecast_run(request, replace(one.pool, own=JobRuns()), one.gpus, one.plan)
    except SpecError as error:
        raise SpecError(one.field, error.problem, error.remedy) from None
    item = OwnRun(one, held)
    if item.rest_s < held.least_s:
        peak = f"{one.gpus} {one.pool.name} at their peak take {held.least_s:.3g} s for {held.plan}"
        text = f"{item.rest_s:.3g} s is faster than the roofline: {peak}"
        raise SpecError(one.field, text, "check the unit and the plan")
    _require_plausible(one.field, one.spent_s, held.step_s, f"the forecast of {held.step_s:.3g} s for {held.plan}")
    if "optimizer" in item.separate_s:
        update_s = held.parts["optimizer"]
        _require_plausible(
            one.field, item.separate_s["optimizer"], update_s, f"the forecast update of {update_s:.3g} s"
        )
    return item


def _require_plausible(field: str, seconds: float, expected_s: float, what: str) -> None:
    ratio = seconds / expected_s
    if not 1 / MAX_FORECAST_RATIO <= ratio <= MAX_FORECAST_RATIO:
        text = f"{seconds:.3g} s is {ratio:.3g} times {what}"
        raise SpecError(field, text, "check the unit, the batch and the plan")


def corrected(request: Request, pools: Sequence[Pool], items: Sequence[OwnRun]) -> tuple[Pool, ...]:
    """Return the pools with the corrections from the job's own runs."""
    own = JobRuns(tuple(item.own(request) for item in items))
    return tuple(replace(pool, own=own) for pool in pools)


def with_notes(advice: Advice, items: Sequence[OwnRun]) -> Advice:
    """Return the advice with the runs in its notes and, in each offer's reason, the correction from them."""
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
    """Return the advice with the correction from a run of another workload in each offer's reason."""

    def offer(one: Offer) -> Offer:
        return replace(one, reason=f"{one.reason}; x{one.carried:.2f} from the run of {job}, another workload")

    offers, baseline = tuple(offer(one) for one in advice.offers), advice.baseline
    return replace(advice, offers=offers, baseline=offer(baseline) if baseline else None)


def _note(item: OwnRun) -> str:
    one, forecast = item.measurement, item.forecast
    input_s = one.parts.input_s or 0.0
    loader = f" beside {input_s:.3g} s of waiting for its loader, which stay on every pool" if input_s else ""
    parts = [
        f"{part:.3g} s for {name} ({forecast.parts[name]:.3g} s forecast)" for name, part in item.separate_s.items()
    ]
    rest = f"; of that {' and '.join(parts)}" if parts else ""
    spent = f"{one.spent_s:.3g} s{loader}"
    expected_s = sum(item.expected_s.values())
    return f"Your run on {item} ({item.plan}) took {spent}, {item.ratio:.2f}x its forecast of {expected_s:.3g} s{rest}."
