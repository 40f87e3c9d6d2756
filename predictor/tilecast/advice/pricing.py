"""Price enumerated plans as columns, and selected plans in full.

Steps of different global batches are compared per sample: amounts are scaled to the job's own batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from tilecast import memory, uncertainty
from tilecast.advice.enumeration import PlanEnumeration, enumerate_plans
from tilecast.advice.values import Constraints, Offer, Request
from tilecast.cost import price_of_1000_steps
from tilecast.hardware import Pool
from tilecast.objectives import Quantity
from tilecast.search import NO_LIMITS, Mask, PlanLimits, PlanTable, PricedPlans
from tilecast.spec import Floats, Ints, Plans, Workload
from tilecast.step.placement import count_gpus_on_each_node
from tilecast.uncertainty import ErrorWidths


@dataclass(frozen=True, slots=True)
class CandidatePlans:
    """The n plans of all variants of a job that a pool can run, as columns of shape (n,)."""

    pool: Pool
    variants: tuple[Workload, ...]
    """Variants of the job (precision, global batch) that the pool's GPU supports."""
    variant: Ints
    """Index into `variants`."""
    tables: tuple[PlanTable, ...]
    """Tables of plans that the rows come from."""
    table: Ints
    """Index into `tables`, (n,)."""
    origin: Ints
    """Row in that table, (n,)."""
    plans: Plans
    gpus: Ints
    memory_bytes: Floats
    upper_bytes: Floats
    fits: Mask
    batch: Floats
    steps: Floats
    """Number of steps of the whole run. NaN if its length is unknown."""
    _seconds: Callable[[], tuple[Floats, Floats]]
    """Function that returns the seconds of each step and of its host stalls. It computes them once."""

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, rows: slice | Ints) -> CandidatePlans:
        """Return the candidates at the given rows, in that order."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        seconds = cache(lambda: (self.step_s[rows], self.launch_s[rows]))
        return replace(self, plans=self.plans.take(rows), _seconds=seconds, **columns)

    @property
    def step_s(self) -> Floats:
        return self._seconds()[0]

    @property
    def launch_s(self) -> Floats:
        """Seconds of each plan's step in which the GPU waits for the host, (n,)."""
        return self._seconds()[1]

    @property
    def hourly(self) -> Floats:
        """Price of each plan's GPUs per hour, (n,), NaN if the pool has no price."""
        price = self.pool.price_per_gpu_hour
        return self.gpus.astype(float) * (np.nan if price is None else price)

    @property
    def tight(self) -> Mask:
        """Whether the upper end of each plan's memory range exceeds the GPU's memory, (n,)."""
        return self.upper_bytes > memory.usable_bytes(self.pool.gpu)

    @property
    def finish_s(self) -> Floats:
        return self.steps * self.step_s

    @property
    def cost_to_finish(self) -> Floats:
        return self.hourly * self.finish_s / 3600

    def within(self, limits: Constraints) -> Mask:
        """Return which plans meet the job's constraints, (n,)."""
        mask = np.ones(len(self), dtype=bool)
        if limits.gpus is not None:
            mask &= self.gpus == limits.gpus
        if limits.max_gpus is not None:
            mask &= self.gpus <= limits.max_gpus
        if limits.max_nodes is not None:
            mask &= self.gpus // count_gpus_on_each_node(self.gpus, self.pool) <= limits.max_nodes
        if limits.max_tensor is not None:
            mask &= self.plans.tensor <= limits.max_tensor
        return mask

    def objective_value(self, request: Request) -> Floats:
        """Return the time or cost that the objective minimises, (n,). Unknown values are NaN."""
        return self._amount(request, request.objective_record.quantity)

    def counterpart_value(self, request: Request) -> Floats:
        """Return the cost if the objective minimises time, otherwise the time, (n,). Unknown values are NaN."""
        return self._amount(request, request.objective_record.counterpart)

    def _amount(self, request: Request, quantity: Quantity) -> Floats:
        """Return each plan's amount of a quantity, (n,), for the whole run or for one step of the job's own batch."""
        steps = self.steps if request.objective_record.is_whole_run else request.workload.global_batch / self.batch
        return quantity.amount(self.pool, self.gpus.astype(float), self.step_s * steps)

    def is_within_bound(self, request: Request) -> Mask:
        """Return which plans meet the job's deadline, budget and target step time, (n,)."""
        mask = np.ones(len(self), dtype=bool)
        if request.objective_record.bound == "budget" and request.budget is not None:
            mask &= self.cost_to_finish <= request.budget.amount
        limits = []
        if request.objective_record.bound == "deadlineSeconds" and request.deadline_s is not None:
            limits.append((self.finish_s, request.deadline_s))
        if request.target_step_s is not None:
            limits.append((self.step_s, request.target_step_s))
        for seconds, limit in limits:
            mask &= seconds <= limit
        if limits and request.limits_at == "upperBound":
            rows = np.flatnonzero(mask)
            ratio = DetailedForecasts.from_rows(self, rows).upper_ratios()
            mask[rows] = np.all([seconds[rows] * ratio <= limit for seconds, limit in limits], axis=0)
        return mask

    def least_step_s(self, request: Request, mask: Mask) -> float:
        """Return the shortest step time in seconds among the plans in `mask`, for comparison with a limit on time.

        If the job compares the upper ends of ranges with its limits, return the shortest upper end of a step's 90 %
        range.
        """
        rows = np.flatnonzero(mask)
        seconds = self.step_s[rows]
        if request.limits_at == "upperBound":
            seconds = seconds * DetailedForecasts.from_rows(self, rows).upper_ratios()
        return float(seconds.min())


_COLUMNS = (
    "variant", "table", "origin", "gpus", "memory_bytes", "upper_bytes", "fits", "batch", "steps",
)  # fmt: skip


def find_candidates(
    request: Request, pool: Pool, limits: PlanLimits = NO_LIMITS, only_plans: Plans | None = None
) -> CandidatePlans:
    """Enumerate and price the plans of one pool. For the arguments see `enumerate_plans`."""
    return price(enumerate_plans(request, pool, limits, only_plans))


def price(enumeration: PlanEnumeration) -> CandidatePlans:
    """Return the enumerated plans with their times, prices and memory, as columns.

    Seconds are evaluated at the first access, because a pool that is rejected for its memory does not need them.
    """
    tables = enumeration.tables

    def column(name: str) -> Floats:
        parts = [getattr(table, name) for _, table in tables]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0), *parts])

    plans = Plans.concatenate([table.plans for _, table in tables]) if tables else Plans.from_plans()
    sizes = [len(table.plans) for _, table in tables]
    # Columns of indices are narrow, since a search of the most plans is near its limit of memory.
    variant = np.repeat(np.array([index for index, _ in tables], np.int32), sizes)
    batches = np.array([float(item.global_batch) for item in enumeration.variants])
    steps = np.array([np.nan if item.steps is None else float(item.steps) for item in enumeration.variants])
    return CandidatePlans(
        pool=enumeration.pool,
        variants=enumeration.variants,
        variant=variant,
        tables=tuple(table for _, table in tables),
        table=np.repeat(np.arange(len(tables), dtype=np.int32), sizes),
        origin=np.concatenate([np.zeros(0, np.int32), *(np.arange(size, dtype=np.int32) for size in sizes)]),
        plans=plans,
        gpus=plans.gpus,
        memory_bytes=column("memory_bytes"),
        upper_bytes=column("upper_bytes"),
        fits=column("fits").astype(bool, copy=False),
        batch=batches[variant],
        steps=steps[variant],
        _seconds=cache(lambda: (column("step_s"), column("launch_s"))),
    )


@dataclass(frozen=True, slots=True)
class DetailedForecasts:
    """Full forecasts of k selected plans."""

    candidates: CandidatePlans
    rows: Ints
    priced: tuple[PricedPlans, ...]
    """One priced table for each table of candidates that has selected rows."""
    table: Ints
    """Index into `priced` for each row, (k,)."""
    place: Ints
    """Row in that priced table, (k,)."""

    @classmethod
    def from_rows(cls, candidates: CandidatePlans, rows: Ints) -> DetailedForecasts:
        """Return full forecasts of the given rows of candidates, in the same order."""
        present, table = np.unique(candidates.table[rows], return_inverse=True)
        place = np.zeros(len(rows), dtype=np.int64)
        priced = []
        for index, source in enumerate(present):
            members = np.flatnonzero(table == index)
            place[members] = np.arange(len(members))
            among = rows[members]
            priced.append(candidates.tables[source].price(candidates.origin[among]))
        return cls(candidates, rows, tuple(priced), table, place)

    def errors(self) -> ErrorWidths:
        """Return the uncertainties of the forecasts of all rows, (k,)."""
        parts = [uncertainty.forecast_errors(priced) for priced in self.priced]
        starts = np.cumsum([0, *(len(priced.plans) for priced in self.priced)])
        rows = starts[self.table] + self.place
        return ErrorWidths(
            *(np.concatenate([getattr(part, item.name) for part in parts])[rows] for item in fields(ErrorWidths))
        )

    def upper_ratios(self) -> Floats:
        """Return the upper end of each step's 90 % range, divided by the forecast, (k,)."""
        if not self.priced:
            return np.ones(0)
        firsts = (int(self.rows[self.table == index][0]) for index in range(len(self.priced)))
        jobs = [self.candidates.variants[self.candidates.variant[row]] for row in firsts]
        widths = [uncertainty.range_widths(job, priced) for job, priced in zip(jobs, self.priced, strict=True)]
        starts = np.cumsum([0, *map(len, widths)])
        return np.asarray(np.exp(np.concatenate(widths)[starts[self.table] + self.place]))

    def offer(self, index: int) -> Offer:
        """Return the forecast at an index as an offer whose reason is still empty."""
        candidates, row = self.candidates, int(self.rows[index])
        priced, place = self.priced[self.table[index]], int(self.place[index])
        pool, workload = candidates.pool, candidates.variants[candidates.variant[row]]
        plan = candidates.plans.row(row)
        per_node = int(count_gpus_on_each_node(np.array(plan.gpus), pool))
        seconds = float(priced.step_s[place])
        lower, upper = uncertainty.interval(workload, priced, place)
        one = candidates.take(slice(row, row + 1))
        per_1000 = price_of_1000_steps(float(one.hourly[0]), seconds)
        amounts = (per_1000, float(one.finish_s[0]), float(one.cost_to_finish[0]))
        cost, finish_s, cost_to_finish = (None if np.isnan(amount) else amount for amount in amounts)
        return Offer(
            pool=pool,
            nodes=plan.gpus // per_node,
            gpus_per_node=per_node,
            plan=plan,
            workload=workload,
            step_s=seconds,
            lower_s=lower,
            upper_s=upper,
            breakdown=priced.times.parts(place),
            memory_bytes=float(priced.memory_bytes[place]),
            memory_lower_bytes=float(priced.footprint.lower_bytes[place]),
            memory_upper_bytes=float(priced.upper_bytes[place]),
            memory_available_bytes=priced.usable_bytes,
            memory=priced.footprint.items(place),
            tokens_per_s=workload.tokens_per_step / seconds,
            cost_per_1000_steps=cost,
            finish_s=finish_s,
            cost_to_finish=cost_to_finish,
            fits_now=None if pool.free_gpus is None else plan.gpus <= pool.free_gpus,
            reason="",
            correction=float(priced.times.correction[place]),
            carried=float(priced.times.carried[place]),
        )
