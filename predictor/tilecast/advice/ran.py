"""Forecast a plan that runs, whether it is the recommended one or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tilecast import calibration, search, uncertainty
from tilecast.advice import stated
from tilecast.advice.values import Request
from tilecast.calibration import Key
from tilecast.hardware import Pool
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
        table = stated.plans(workload, gpus, plan, "plan")
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
