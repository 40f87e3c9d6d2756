"""Correct a job's forecasts by its earlier runs.

These are runs of the job itself and of equal jobs in its namespace. If there are none, the newest run of another
workload with the job's name is used.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilecast.advice import Advice, Request
from tilecast.advice.enumeration import list_job_variants
from tilecast.advice.measured import (
    MAX_FORECAST_RATIO,
    EarlierRun,
    Measurement,
    add_related_run_note,
    add_run_notes,
    forecast_earlier_runs,
)
from tilecast.api.calibration import ObservedRun
from tilecast.hardware import Pool
from tilecast.learning import calibration
from tilecast.learning.calibration import Calibration
from tilecast.learning.job_calibration import JobRun, JobRuns, MeasuredParts, RunSetting
from tilecast.spec import PartialPlan, Plan, SpecError, Workload

log = logging.getLogger("tilecast")

MOST_RUNS = 8
"""Most runs that correct the forecasts of a job. The newest are used."""
STEP_GRID = 0.02
"""Rounding of the logarithm of a measured step. A smaller change does not renew a job's advice."""
PART_GRID = 0.05
"""Rounding of a part's share of the step. A smaller change does not renew a job's advice."""


def get_run_setting(run: ObservedRun) -> tuple[str, int | None, str | None]:
    """Return the pool, GPU count and plan of a run."""
    return run.run.pool, run.gpus, run.plan


def round_run_values(run: ObservedRun) -> tuple[object, ...]:
    """Return the values of a run that affect forecasts, rounded to `STEP_GRID` and `PART_GRID`."""
    step_s = run.run.observed_s
    parts = (run.parts.input_s, run.parts.communication_s, run.parts.optimizer_s)
    shares = [None if part is None else round(part / step_s / PART_GRID) for part in parts]
    return *get_run_setting(run), round(math.log(step_s) / STEP_GRID), *shares


def list_possible_workloads(request: Request, pools: Sequence[Pool]) -> dict[str, Workload]:
    """Return every workload that the job's precision and batch options allow on the pools, by workload digest."""
    by_gpu = {pool.gpu.name: list_job_variants(request, pool) for pool in pools}
    every = {(item.precision, item.global_batch): item for items in by_gpu.values() for item in items}
    return {calibration.digest_workload(item): item for item in every.values()}


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """Earlier runs of a job, compared with their forecasts."""

    items: tuple[EarlierRun, ...] = ()
    own: JobRuns = field(default_factory=JobRuns)
    """The same runs as input of `job_calibration`, which corrects forecasts of other plans."""
    related_job: str = ""
    """Name of the job whose run of another workload is used with little weight, because this workload has no run."""

    @classmethod
    def from_runs(
        cls, request: Request, pools: Sequence[Pool], known: Mapping[str, Workload], runs: Sequence[ObservedRun]
    ) -> EarlierRuns:
        """Compare the newest runs with forecasts for the current pools. `runs` is sorted newest first.

        A run with too little information, or with impossible numbers, is left out.
        """
        named, pairs = {pool.name: pool for pool in pools}, []
        for run in runs[:MOST_RUNS]:
            pool = named.get(run.run.pool)
            if pool is None or pool.gpu.name != run.run.gpu or run.gpus is None or run.plan is None:
                continue
            if run.run.workload not in known:
                if (related := _compare_related_run(request, pool, run)) is not None:
                    return cls((), JobRuns((related,)), run.job)
                continue
            meant = replace(request, workload=known[run.run.workload])
            if (item := _compare_run(meant, pool, run)) is not None:
                pairs.append((item, item.to_job_run(meant)))
        return cls(tuple(item for item, _ in pairs), JobRuns(tuple(one for _, one in pairs)))

    def correct_pools(self, pools: Sequence[Pool]) -> Sequence[Pool]:
        """Return the pools, corrected by these runs."""
        return [replace(pool, own=self.own) for pool in pools] if self.own.runs else pools

    def add_notes(self, advice: Advice) -> Advice:
        """Return the advice with notes on the effect of these runs."""
        return add_related_run_note(advice, self.related_job) if self.related_job else add_run_notes(advice, self.items)


def _compare_run(request: Request, pool: Pool, run: ObservedRun) -> EarlierRun | None:
    """Return a run with its forecast, without impossible parts. If the step itself is impossible, return None."""
    seen, problem = run.parts, ""
    fewer = (replace(seen, optimizer_s=None), replace(seen, communication_s=None), MeasuredParts(seen.input_s))
    for parts in dict.fromkeys((seen, *fewer)):
        try:
            plan = PartialPlan.parse(run.plan or "", "plan")
            step = Measurement(pool, run.gpus or 1, run.run.observed_s, plan, parts, f"the run of {run.job}")
            (item,) = forecast_earlier_runs(request, [step])
        except SpecError as error:
            problem = str(error)
        else:
            return item
    log.info("not learnt from: %s", problem)
    return None


def _compare_related_run(request: Request, pool: Pool, run: ObservedRun) -> JobRun | None:
    """Compare a run of another workload with the job's name with the forecast that was made for that run.

    Return None if model family or precision differ, or if the measured step is too far off to be in seconds.
    """
    seen, workload, spent = run.run, request.workload, run.run.observed_s - (run.parts.input_s or 0.0)
    if (seen.family, seen.precision) != (workload.model.family, workload.precision) or spent <= 0:
        return None
    known = pool.calibration
    ratio = known.find_group_correction(calibration.name_group(seen)).ratio * known.find_software_ratio(
        seen.framework, seen.family
    )
    deviation = math.log(seen.predicted_s * ratio / spent)
    if abs(deviation) > math.log(MAX_FORECAST_RATIO):
        return None
    place = RunSetting.from_workload(pool.gpu.name, pool.gpu.architecture, workload)
    return JobRun(place, Plan(data=run.gpus or 1), deviation, seen.observations, is_relative=True)


def describe_pools(pools: Sequence[Pool]) -> str:
    """Return a text that identifies the pools, without corrections from runs and without free GPUs."""
    return repr([replace(pool, free_gpus=None, layers={}, calibration=Calibration(), own=JobRuns()) for pool in pools])


def digest_alternatives(key: bytes, pools: str, runs: Sequence[ObservedRun]) -> str:
    """Return a short digest of the inputs of a job's alternatives. Corrections from runs of other jobs do not count.

    Args:
        key: digest of the job's request.
        pools: the pools as described by `describe_pools`.
        runs: runs of the job. They are rounded by `round_run_values`.
    """
    steps = [round_run_values(one) for one in runs[:MOST_RUNS]]
    return hashlib.sha256(key + repr((pools, steps)).encode()).hexdigest()[:16]
