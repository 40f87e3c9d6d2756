"""What earlier runs of one job say of its forecasts: its own, those of jobs of its namespace that are the same, and for
want of both the newest of another workload under its name."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilecast import calibration
from tilecast.advise import Advice, Request
from tilecast.advise.measured import SLIP, Measurement, OwnRun, own_runs, with_note, with_notes
from tilecast.advise.rank import variants
from tilecast.api.calibration import Seen
from tilecast.calibration import Calibration
from tilecast.hardware import Pool
from tilecast.spec import Plan, SpecError, Stated, Workload
from tilecast.transfer import JobRun, JobRuns, MeasuredParts, Place

log = logging.getLogger("tilecast")

MOST_RUNS = 8
"""Runs that a job's forecasts are corrected by, the newest."""
GRID = 0.02
"""Change of a measured step, as a logarithm, of about which jobs are priced anew."""
PART_GRID = 0.05
"""Change of the share of a part of it, likewise."""


def setting(one: Seen) -> tuple[str, int | None, str | None]:
    """Where a run was measured, and how it was split."""
    return one.run.pool, one.gpus, one.plan


def shown(one: Seen) -> tuple[object, ...]:
    """What of a run jobs go by, to within `GRID`."""
    step_s = one.run.observed_s
    parts = (one.parts.input_s, one.parts.communication_s, one.parts.optimizer_s)
    shares = [None if part is None else round(part / step_s / PART_GRID) for part in parts]
    return *setting(one), round(math.log(step_s) / GRID), *shares


def workloads(request: Request, pools: Sequence[Pool]) -> dict[str, Workload]:
    """Everything that a job may be trained as on any of the pools, by its digest."""
    by_gpu = {pool.gpu.name: variants(request, pool) for pool in pools}
    every = {(item.precision, item.global_batch): item for items in by_gpu.values() for item in items}
    return {calibration.digest(item): item for item in every.values()}


@dataclass(frozen=True, slots=True)
class OwnRuns:
    """Earlier runs of a job beside their forecasts."""

    items: tuple[OwnRun, ...] = ()
    own: JobRuns = field(default_factory=JobRuns)
    """The same for transfer."""
    relative: str = ""
    """Name of the job whose run of another workload counts a little, for want of one of this."""

    @classmethod
    def of(
        cls, request: Request, pools: Sequence[Pool], known: Mapping[str, Workload], runs: Sequence[Seen]
    ) -> OwnRuns:
        """The newest of these runs, newest first, held against the forecasts for the pools as they are. One that says
        too little, or cannot be meant, is left out."""
        named, pairs = {pool.name: pool for pool in pools}, []
        for run in runs[:MOST_RUNS]:
            pool = named.get(run.run.pool)
            if pool is None or pool.gpu.name != run.run.gpu or run.gpus is None or run.plan is None:
                continue
            if run.run.workload not in known:
                if (alike := _relative(request, pool, run)) is not None:
                    return cls((), JobRuns((alike,)), run.job)
                continue
            meant = replace(request, workload=known[run.run.workload])
            if (item := _own(meant, pool, run)) is not None:
                pairs.append((item, item.own(meant)))
        return cls(tuple(item for item, _ in pairs), JobRuns(tuple(one for _, one in pairs)))

    def corrected(self, pools: Sequence[Pool]) -> Sequence[Pool]:
        """The pools as these runs correct them."""
        return [replace(pool, own=self.own) for pool in pools] if self.own.runs else pools

    def noted(self, advice: Advice) -> Advice:
        """An advice on those pools with what the runs did to it."""
        return with_note(advice, self.relative) if self.relative else with_notes(advice, self.items)


def _own(request: Request, pool: Pool, run: Seen) -> OwnRun | None:
    """A run beside its forecast: without the parts that cannot be meant; None where the step cannot."""
    seen, problem = run.parts, ""
    fewer = (replace(seen, optimizer_s=None), replace(seen, communication_s=None), MeasuredParts(seen.input_s))
    for parts in dict.fromkeys((seen, *fewer)):
        try:
            plan = Stated.parse(run.plan or "", "plan")
            step = Measurement(pool, run.gpus or 1, run.run.observed_s, plan, parts, f"the run of {run.job}")
            (item,) = own_runs(request, [step])
        except SpecError as error:
            problem = str(error)
        else:
            return item
    log.info("not learnt from: %s", problem)
    return None


def _relative(request: Request, pool: Pool, run: Seen) -> JobRun | None:
    """A run of another workload of the same name, for transfer, held against what was forecast of it then; None where
    it is of another kind of model, another precision, or a unit that cannot be meant."""
    seen, workload, spent = run.run, request.workload, run.run.observed_s - (run.parts.input_s or 0.0)
    if (seen.family, seen.precision) != (workload.model.family, workload.precision) or spent <= 0:
        return None
    known = pool.calibration
    ratio = known.at(calibration.group(seen)).ratio * known.crossed(seen.framework, seen.family)
    deviation = math.log(seen.predicted_s * ratio / spent)
    if abs(deviation) > math.log(SLIP):
        return None
    place = Place.of(pool.gpu.name, pool.gpu.architecture, workload)
    return JobRun(place, Plan(data=run.gpus or 1), deviation, seen.observations, is_relative=True)


def facts(pools: Sequence[Pool]) -> str:
    """What the pools are, whatever runs teach and whoever uses them now."""
    return repr([replace(pool, free_gpus=None, layers={}, calibration=Calibration(), own=JobRuns()) for pool in pools])


def identity(key: bytes, pools: str, runs: Sequence[Seen]) -> str:
    """A short digest of what decides a job's alternatives, but for what other runs teach: what it asks, what the pools
    are, and its own runs to within `GRID`."""
    steps = [shown(one) for one in runs[:MOST_RUNS]]
    return hashlib.sha256(key + repr((pools, steps)).encode()).hexdigest()[:16]
