"""Forecast running jobs, and correct the forecasts of a job by its measured steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast import search, uncertainty
from tilecast.advice.enumeration import enumerate_partial_plan
from tilecast.advice.values import Advice, Offer, Request, require
from tilecast.hardware import Pool
from tilecast.learning import calibration
from tilecast.learning.calibration import GroupKey
from tilecast.learning.job_calibration import (
    ALL_COLUMNS,
    NO_PARTS,
    JobRun,
    JobRuns,
    MeasuredParts,
    RunSetting,
    part_deviations,
)
from tilecast.search import PlanLimits
from tilecast.spec import PartialPlan, Plan, Plans, Precision, SpecError


@dataclass(frozen=True, slots=True)
class RunForecast:
    """Forecast of a running job's step with its plan. Times are seconds per step."""

    pool: Pool
    plan: Plan
    raw_s: float
    """Seconds of the step without corrections."""
    step_s: float
    lower_s: float
    upper_s: float
    group: GroupKey
    """Key by which calibration groups runs."""
    framework: str
    """Framework whose calibration the run counts for."""
    least_s: float
    """Seconds of all kernels at the peak of compute or memory bandwidth."""
    parts: Mapping[str, float]
    """Parts that sum to `step_s`."""
    exchanged_s: float
    """Seconds of collectives, including hidden ones. It is 0 for pipelines and for weights in the host's memory."""


def forecast_run(
    request: Request,
    pool: Pool,
    gpus: int,
    plan: Plan | PartialPlan | None,
    batch: int | None = None,
    precision: Precision | None = None,
) -> RunForecast:
    """Return the forecast for a run on `gpus` GPUs of a pool.

    If only some fields of the plan are known, the fastest plan that has these fields and fits is assumed. If no such
    plan fits, the plan with the least memory is assumed.

    Args:
        request: the job.
        pool: the pool that the job runs on.
        gpus: the number of GPUs.
        plan: the plan, complete or with only its known fields set, or None.
        batch: the global batch, if it is not the job's own.
        precision: the precision, if it is not the job's own.

    Raises:
        SpecError: no plan agrees with the arguments, or the pool's GPU does not support the precision.
    """
    own = request.workload
    workload = replace(own, global_batch=batch or own.global_batch, precision=precision or own.precision)
    if isinstance(plan, Plan):
        table = Plans.from_plans(plan)
    elif plan is not None:
        table = enumerate_partial_plan(workload, gpus, plan, "plan")
    else:
        nodes = max(pool.max_nodes, -(-gpus // pool.gpus_per_node))
        table = search.find(workload, replace(pool, max_nodes=nodes), PlanLimits(gpus=gpus)).plans
    if not len(table):
        raise SpecError("gpus", f"no plan splits the job over {gpus} GPUs of {pool.name}", "say the plan that runs")
    priced = search.price(workload, table, pool)
    fitting = np.where(priced.fits, priced.step_s, np.inf)
    row = int(np.argmin(fitting if priced.fits.any() else priced.memory_bytes))
    lower_s, upper_s = uncertainty.interval(workload, priced, row)
    chosen = table.row(row)
    is_plain = chosen.pipeline == 1 and workload.offload != "parameters"
    gpu, family, scale = pool.gpu.name, workload.model.family, calibration.name_gpu_range(chosen.gpus)
    return RunForecast(
        pool=pool,
        plan=chosen,
        raw_s=float(priced.step_s[row] / priced.times.correction[row]),
        step_s=float(priced.step_s[row]),
        lower_s=lower_s,
        upper_s=upper_s,
        group=(gpu, workload.precision, family, scale, calibration.digest_workload(workload)),
        framework=calibration.name_framework(workload),
        least_s=float(priced.times.least[row]),
        parts=priced.times.parts(row),
        exchanged_s=float(priced.times.communication[row] + priced.times.hidden[row]) if is_plain else 0.0,
    )


MAX_FORECAST_RATIO = 10.0
"""Largest ratio of forecast and measurement, either way. Beyond it, the unit is assumed to be wrong."""
ROUNDING = 1e-5
"""Share by which the measured parts may sum to more than the measured step."""
MAX_REPEAT_RATIO = 1.5
"""Largest ratio of two measurements of one plan on one pool before they count as contradicting each other."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured step of the job."""

    pool: Pool
    gpus: int
    seconds: float
    plan: Plan | PartialPlan | None = None
    """The plan, or the part of it that is known. The run is assumed to have used the fastest plan that agrees."""
    parts: MeasuredParts = NO_PARTS
    """Seconds of the step's parts, as far as they are known."""
    field: str = "--measured"
    """Name of the input in errors."""

    @property
    def spent_s(self) -> float:
        """Measured seconds of the step, less the wait for the data loader."""
        return self.seconds - (self.parts.input_s or 0.0)


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A measured step of the job and the uncorrected forecast of that step."""

    measurement: Measurement
    forecast: RunForecast

    @property
    def plan(self) -> Plan:
        return self.forecast.plan

    @property
    def expected_s(self) -> dict[str, float]:
        """Forecast seconds of the step by component. If the wait for the data loader was measured, it is left out."""
        without = () if self.measurement.parts.input_s is None else ("input",)
        return {name: part for name, part in self.forecast.parts.items() if name not in without}

    @property
    def measured_parts_s(self) -> dict[str, float]:
        """Measured seconds of communication and of the optimizer, by component.

        A component whose forecast is 0 is left out. Every other one is corrected separately.
        """
        known_s = {"communication": self.forecast.exchanged_s, "optimizer": self.forecast.parts["optimizer"]}
        return {name: part for name, part in self.measurement.parts.measured_parts_s.items() if known_s[name] > 0}

    @property
    def unmeasured_rest_s(self) -> float:
        """Seconds of the measured step that `measured_parts_s` does not cover."""
        return self.measurement.spent_s - sum(self.measured_parts_s.values())

    @property
    def measured_to_forecast_ratio(self) -> float:
        """Measured seconds of the step divided by its forecast seconds. Both are without a measured wait for data."""
        return self.measurement.spent_s / sum(self.expected_s.values())

    def to_job_run(self, request: Request) -> JobRun:
        """Return the run as a `JobRun`, from which `tilecast.learning.job_calibration` computes corrections."""
        pool, plan = self.measurement.pool, self.measurement.plan
        measured_parts_s = self.measured_parts_s
        elsewhere_s = {name: part for name, part in measured_parts_s.items() if name != "communication"}
        return JobRun(
            RunSetting.from_workload(pool.gpu.name, pool.gpu.architecture, request.workload),
            self.plan,
            -math.log(self.measured_to_forecast_ratio),
            waited_s=self.measurement.parts.input_s or 0.0,
            parts=self._list_part_deviations(measured_parts_s),
            parts_elsewhere=self._list_part_deviations(elsewhere_s),
            gpus_per_node=pool.gpus_per_node,
            fields=tuple(name for name in ALL_COLUMNS if plan is not None and getattr(plan, name, None) is not None),
        )

    def _list_part_deviations(self, measured_parts_s: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
        if not measured_parts_s:
            return ()
        return part_deviations(self.expected_s, self.forecast.exchanged_s, self.measurement.spent_s, measured_parts_s)

    def __str__(self) -> str:
        return f"{self.measurement.gpus} {self.measurement.pool.name}"


def forecast_earlier_runs(request: Request, measurements: Sequence[Measurement]) -> tuple[EarlierRun, ...]:
    """Return the measurements with their forecasts.

    Raises:
        SpecError: a measurement is impossible or in another unit, two measurements contradict each other, or no plan
            agrees with a measurement.
    """
    runs: list[EarlierRun] = []
    for measurement in measurements:
        run = _forecast_earlier_run(request, measurement)
        for other in runs:
            same = (run.plan, measurement.pool.name) == (other.plan, other.measurement.pool.name)
            seconds, other_s = measurement.seconds, other.measurement.seconds
            if same and abs(math.log(seconds / other_s)) > math.log(MAX_REPEAT_RATIO):
                problem = f"{run} take {seconds:g} s here and {other_s:g} s there"
                raise SpecError(measurement.field, problem, "name the plans, or leave one of them out")
        runs.append(run)
    return tuple(runs)


def _forecast_earlier_run(request: Request, measurement: Measurement) -> EarlierRun:
    """Return a measurement with its forecast.

    Raises:
        SpecError: the measurement is impossible or in another unit, or no plan agrees with it.
    """
    field, seconds, gpus, pool = measurement.field, measurement.seconds, measurement.gpus, measurement.pool

    def require_plausible(measured_s: float, expected_s: float, noun: str) -> None:
        ratio = measured_s / expected_s
        is_plausible = 1 / MAX_FORECAST_RATIO <= ratio <= MAX_FORECAST_RATIO
        problem = f"{measured_s:.3g} s is {ratio:.3g} times {noun}"
        require(is_plausible, field, problem, "check the unit, the batch and the plan")

    require(0 < seconds < 1e9, field, f"{seconds:g} s is no step time", "give seconds, more than 0")
    sum_s = measurement.parts.sum_s
    is_whole = sum_s <= seconds * (1 + ROUNDING) and measurement.spent_s > 0
    problem = f"the parts of a step of {seconds:g} s take {sum_s:g} s"
    require(is_whole, field, problem, "give what each part takes of the step; they do not overlap")
    try:
        forecast = forecast_run(request, replace(pool, own=JobRuns()), gpus, measurement.plan)
    except SpecError as error:
        raise SpecError(field, error.problem, error.remedy) from None
    run, plan = EarlierRun(measurement, forecast), forecast.plan
    peak = f"{gpus} {pool.name} at their peak take {forecast.least_s:.3g} s for {plan}"
    problem = f"{run.unmeasured_rest_s:.3g} s is faster than the roofline: {peak}"
    require(run.unmeasured_rest_s >= forecast.least_s, field, problem, "check the unit and the plan")
    require_plausible(measurement.spent_s, forecast.step_s, f"the forecast of {forecast.step_s:.3g} s for {plan}")
    if "optimizer" in run.measured_parts_s:
        update_s = forecast.parts["optimizer"]
        require_plausible(run.measured_parts_s["optimizer"], update_s, f"the forecast update of {update_s:.3g} s")
    return run


def correct_pools(request: Request, pools: Sequence[Pool], earlier_runs: Sequence[EarlierRun]) -> tuple[Pool, ...]:
    """Return copies of the pools with the job's measured runs, which correct the forecasts on these pools."""
    own = JobRuns(tuple(item.to_job_run(request) for item in earlier_runs))
    return tuple(replace(pool, own=own) for pool in pools)


def add_run_notes(advice: Advice, earlier_runs: Sequence[EarlierRun]) -> Advice:
    """Return the advice with notes on the job's measured runs, and with the correction in each offer's reason."""
    if not earlier_runs:
        return advice
    runs = f"your run on {earlier_runs[0]}" if len(earlier_runs) == 1 else f"your {len(earlier_runs)} runs"
    return replace(
        _add_to_reasons(advice, runs),
        notes=(*advice.notes, *(_describe_run(item) for item in earlier_runs)),
        confidence=f"{runs}; {advice.confidence}" if advice.best else advice.confidence,
    )


def add_related_run_note(advice: Advice, job: str) -> Advice:
    """Return the advice with another job named in each offer's reason, whose run corrected the forecast."""
    return _add_to_reasons(advice, f"the run of {job}, another workload")


def _add_to_reasons(advice: Advice, source: str) -> Advice:
    """Return the advice with `source` named in each offer's reason as the origin of the correction."""

    def add_source(offer: Offer) -> Offer:
        return replace(offer, reason=f"{offer.reason}; {offer.carried:.2f}x its forecast by {source}")

    offers, baseline = tuple(map(add_source, advice.offers)), advice.baseline
    return replace(advice, offers=offers, baseline=add_source(baseline) if baseline else None)


def _describe_run(item: EarlierRun) -> str:
    """Return a sentence that compares a measured run with its forecast."""
    measurement, forecast = item.measurement, item.forecast
    input_s = measurement.parts.input_s or 0.0
    loader = f" beside {input_s:.3g} s of waiting for its loader, which stay on every pool" if input_s else ""
    parts = [
        f"{part:.3g} s for {name} ({forecast.parts[name]:.3g} s forecast)"
        for name, part in item.measured_parts_s.items()
    ]
    rest = f"; of that {' and '.join(parts)}" if parts else ""
    spent = f"{measurement.spent_s:.3g} s{loader}"
    expected_s = sum(item.expected_s.values())
    ratio = f"{item.measured_to_forecast_ratio:.2f}x"
    return f"Your run on {item} ({item.plan}) took {spent}, {ratio} its forecast of {expected_s:.3g} s{rest}."
