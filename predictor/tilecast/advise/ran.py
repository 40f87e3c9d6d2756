"""The forecast for a plan that runs, whether it is the recommended one or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tilecast import calibration, search, uncertainty
from tilecast.advise import stated
from tilecast.advise.values import Request
from tilecast.calibration import Key
from tilecast.hardware import Pool
from tilecast.search import Limits
from tilecast.spec import Plan, Plans, Precision, SpecError, Stated


@dataclass(frozen=True, slots=True)
class Ran:
    """What is forecast for a plan that runs. Seconds of one step."""

    pool: Pool
    plan: Plan
    raw_s: float
    """Without any correction."""
    step_s: float
    lower_s: float
    upper_s: float
    group: Key
    """What calibration takes it for."""
    framework: str
    """Likewise."""
    least_s: float
    """All kernels at the peak of compute or memory."""
    parts: Mapping[str, float]
    """What `step_s` consists of."""
    exchanged_s: float
    """Collectives, hidden ones included, where they are what a step waits for; else 0: stages of a pipeline wait for
    each other, and weights in the host's memory are copied."""


def ran(
    request: Request,
    pool: Pool,
    gpus: int,
    plan: Plan | Stated | None,
    batch: int | None = None,
    precision: Precision | None = None,
) -> Ran:
    """The forecast for the plan on so many GPUs of a pool; where some of it is not said, for the fastest that fits.

    Args:
        request: the job.
        pool: where it runs.
        gpus: on how many GPUs.
        plan: the whole plan, what is known of it, or None.
        batch: global batch, where it is not the job's own.
        precision: likewise.

    Raises:
        SpecError: no plan can be so, or the pool's GPU has no units for the precision.
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
    return Ran(
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
