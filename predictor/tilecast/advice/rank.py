"""Price every plan of a job on a pool, as columns, and find the Pareto front.

A job may leave its global batch and its precision open. Each combination is a variant, with a search of its own. Steps
of different batches are compared per sample: a value is scaled to the job's own batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from tilecast import memory, search, uncertainty
from tilecast.advice import stated
from tilecast.advice.values import Constraints, Offer, Request
from tilecast.cost import per_1000_steps
from tilecast.hardware import Pool
from tilecast.memo import Later
from tilecast.search import Limits, Mask, PlanTable, Priced
from tilecast.spec import PRECISIONS, Floats, Ints, Plans, SearchTooLargeError, Workload
from tilecast.uncertainty import Errors

MAX_BATCHES = 8
"""Most global batches that are tried in a range: its ends, the job's own, and those with the most factors of two."""

_UNLIMITED = Limits()


def within(plans: Plans, gpus: Ints, pool: Pool, limits: Constraints) -> Mask:
    """Return which plans of a pool keep a job's constraints, (n,); `gpus` (n,) is the size of each plan."""
    mask = np.ones(len(plans), dtype=bool)
    if limits.gpus is not None:
        mask &= gpus == limits.gpus
    if limits.max_gpus is not None:
        mask &= gpus <= limits.max_gpus
    if limits.max_nodes is not None:
        mask &= -(-gpus // pool.gpus_per_node) <= limits.max_nodes
    if limits.max_tensor is not None:
        mask &= plans.tensor <= limits.max_tensor
    return mask


def variants(request: Request, pool: Pool) -> tuple[Workload, ...]:
    """Return the job in every precision and global batch that it allows and the pool supports, its own first."""
    own = request.workload
    able = search.abilities(own.framework).precisions if own.framework else PRECISIONS
    precisions = search.variants(own, [name for name in request.precisions if name in able])
    batches = (own.global_batch, *(item for item in _batches(request) if item != own.global_batch))
    return tuple(
        replace(workload, global_batch=batch, steps=_steps(request, batch))
        for workload in precisions
        if pool.gpu.supports(workload.precision)
        for batch in batches
    )


def _batches(request: Request) -> list[int]:
    if request.batches is None:
        return []
    low, high = request.batches
    micro = request.workload.micro_batch or 1
    sizes = {low, high}
    # Numbers with the most factors of two are the ones that ranks and micro-batches divide.
    for power in range(high.bit_length(), -1, -1):
        step = 1 << power
        sizes |= set(range(-(-low // step) * step, high + 1, step)[:MAX_BATCHES])
        if len(sizes) >= MAX_BATCHES:
            break
    divided = sorted(item for item in sizes if item % micro == 0)
    return divided[:: -(-len(divided) // MAX_BATCHES)] if divided else []


def _steps(request: Request, batch: int) -> int | None:
    """Return the steps of the whole run at a global batch, which keep the job's number of tokens or samples."""
    own = request.workload
    if request.tokens is not None:
        return -(-request.tokens // (batch * own.sequence_length))
    return None if own.steps is None else -(-own.steps * own.global_batch // batch)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every plan of every variant that a pool can run, as columns (n,)."""

    pool: Pool
    variants: tuple[Workload, ...]
    """Variants that the pool's GPU supports."""
    variant: Ints
    """Index into `variants`."""
    tables: tuple[PlanTable, ...]
    """Tables that the rows come from."""
    table: Ints
    """Index into `tables`."""
    origin: Ints
    """Row in that table."""
    plans: Plans
    gpus: Ints
    memory_bytes: Floats
    upper_bytes: Floats
    fits: Mask
    batch: Floats
    steps: Floats
    """Steps of the whole run; NaN where its length is not known."""
    _seconds: Later[tuple[Floats, Floats]]
    """Seconds of each step, and of its part that waits for the host; priced at the first access."""

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, rows: slice | Ints) -> Candidates:
        """Return the chosen rows, in the order given."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        seconds = Later(lambda: (self.step_s[rows], self.launch_s[rows]))
        return replace(self, plans=self.plans.take(rows), _seconds=seconds, **columns)

    @property
    def step_s(self) -> Floats:
        return self._seconds()[0]

    @property
    def launch_s(self) -> Floats:
        """Seconds of each step that wait for the host, (n,)."""
        return self._seconds()[1]

    @property
    def hourly(self) -> Floats:
        """Price of each plan's GPUs per hour; NaN if the pool has no price."""
        price = self.pool.price_per_gpu_hour
        return self.gpus.astype(float) * (np.nan if price is None else price)

    @property
    def tight(self) -> Mask:
        """Whether the upper end of each plan's memory range does not fit."""
        return self.upper_bytes > memory.usable_bytes(self.pool.gpu)

    @property
    def finish_s(self) -> Floats:
        return self.steps * self.step_s

    @property
    def cost_to_finish(self) -> Floats:
        return self.hourly * self.finish_s / 3600

    def within(self, limits: Constraints) -> Mask:
        """Return which plans keep the job's constraints."""
        return within(self.plans, self.gpus, self.pool, limits)

    def value(self, request: Request) -> Floats:
        """Return what the objective minimises, (n,); NaN where a price is missing."""
        return self._price(request) if request.goal.is_price else self._time(request)

    def other(self, request: Request) -> Floats:
        """Return the criterion that the objective leaves open, (n,).

        It is the time in seconds if the objective minimises a price, or else the price; NaN where the price is missing.
        """
        return self._time(request) if request.goal.is_price else self._price(request)

    def _time(self, request: Request) -> Floats:
        """Return the seconds of the run, or of as many samples as a step of the job's own batch has."""
        steps = self.steps if request.goal.is_whole_run else request.workload.global_batch / self.batch
        return self.step_s * steps

    def _price(self, request: Request) -> Floats:
        return self.hourly / 3600 * self._time(request)

    def allowed(self, request: Request) -> Mask:
        """Return which plans the objective allows: those before the deadline, or within the budget."""
        mask = np.ones(len(self), dtype=bool)
        if request.goal.bound == "deadlineSeconds" and request.deadline_s is not None:
            mask &= self.finish_s <= request.deadline_s
        if request.goal.bound == "budget" and request.budget is not None:
            mask &= self.cost_to_finish <= request.budget.amount
        return mask


_COLUMNS = (
    "variant", "table", "origin", "gpus", "memory_bytes", "upper_bytes", "fits", "batch", "steps",
)  # fmt: skip


def too_large(request: Request, number: int, limit: int, noun: str) -> SearchTooLargeError:
    """Return the error for a job that leaves too much open."""
    is_range = request.batches is not None
    name = "globalBatchSizeRange" if is_range else "allowedPrecisions" if request.precisions else "globalBatchSize"
    remedy = "narrow globalBatchSizeRange and allowedPrecisions, or state constraints.gpus"
    return SearchTooLargeError.of(f"spec.training.{name}", number, limit, noun, remedy)


def find_candidates(
    request: Request, pool: Pool, limits: Limits = _UNLIMITED, exactly: Plans | None = None, most: int | None = None
) -> Candidates:
    """Return every plan that a pool could run for a job, whatever the job's constraints.

    Args:
        request: the job.
        pool: the pool.
        limits: bounds of the enumeration.
        exactly: plans to price instead of those that the search enumerates.
        most: most plans that are allowed; None for any number.

    Raises:
        SearchTooLargeError: there are more than `most` plans. They are counted before they are priced.
    """
    able = variants(request, pool)
    every: list[tuple[int, PlanTable]] = []
    for index, workload in enumerate(able):
        given = _stated(request, workload, pool) if exactly is None else exactly
        if given is not None:
            if len(given):
                every.append((index, search.those(workload, given, pool)))
            continue
        listing = search.find(workload, pool, limits)
        every.append((index, listing))
        exact = request.constraints.gpus
        if exact is not None and limits.gpus is None and not np.any(listing.plans.gpus == exact):
            every.append((index, search.find(workload, pool, replace(limits, gpus=exact))))
    every = [item for item in every if len(item[1].plans)]
    if most is not None and (count := sum(len(table.plans) for _, table in every)) > most:
        raise too_large(request, count, most, "plans left")

    def column(name: str) -> Floats:
        parts = [getattr(table, name) for _, table in every]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0), *parts])

    plans = Plans.concatenate([table.plans for _, table in every]) if every else Plans.of()
    sizes = [len(table.plans) for _, table in every]
    variant = np.repeat([index for index, _ in every], sizes).astype(np.int64)
    batches = np.array([float(item.global_batch) for item in able])
    steps = np.array([np.nan if item.steps is None else float(item.steps) for item in able])
    return Candidates(
        pool=pool,
        variants=able,
        variant=variant,
        tables=tuple(table for _, table in every),
        table=np.repeat(np.arange(len(every)), sizes),
        origin=np.concatenate([np.zeros(0, np.int64), *(np.arange(size) for size in sizes)]),
        plans=plans,
        gpus=plans.gpus,
        memory_bytes=column("memory_bytes"),
        upper_bytes=column("upper_bytes"),
        fits=column("fits").astype(bool, copy=False),
        batch=batches[variant],
        steps=steps[variant],
        _seconds=Later(lambda: (column("step_s"), column("launch_s"))),
    )


def _stated(request: Request, workload: Workload, pool: Pool) -> Plans | None:
    """Return the plans that agree with the one that the request states; None if it states none.

    They use the GPUs that the statement gives, or as many as the job may use. If the job's framework executes some of
    them, only those are returned.
    """
    given, limits = request.plan, request.constraints
    if given is None:
        return None
    most = min(pool.max_gpus, limits.gpus or limits.max_gpus or pool.max_gpus)
    gpus = given.data * given.tensor * given.pipeline * given.context if given.data else most
    if not 0 < gpus <= pool.max_gpus:
        return Plans.of()
    plans = stated.plans(workload, gpus, given, "plan")
    able = search.abilities(workload.framework).executes(plans) if workload.framework else None
    return plans.take(able) if able is not None and able.any() else plans


@dataclass(frozen=True, slots=True)
class Details:
    """Some rows of a field, priced in full."""

    field: Candidates
    rows: Ints
    priced: tuple[Priced, ...]
    """One priced table for each of the field's tables that the rows come from."""
    table: Ints
    """Index into `priced` for each row, (k,)."""
    place: Ints
    """Place of each row in that table, (k,)."""

    @classmethod
    def of(cls, candidates: Candidates, rows: Ints) -> Details:
        """Price these rows of a field, in the order given."""
        present, table = np.unique(candidates.table[rows], return_inverse=True)
        place = np.zeros(len(rows), dtype=np.int64)
        priced = []
        for index, source in enumerate(present):
            members = np.flatnonzero(table == index)
            place[members] = np.arange(len(members))
            among = rows[members]
            priced.append(candidates.tables[source].price(candidates.origin[among]))
        return cls(candidates, rows, tuple(priced), table, place)

    def errors(self) -> Errors:
        """Return the uncertainties of each row's forecast."""
        parts = [uncertainty.errors(priced) for priced in self.priced]
        columns = []
        for item in fields(Errors):
            column = np.zeros(len(self.rows))
            for index, part in enumerate(parts):
                members = self.table == index
                column[members] = getattr(part, item.name)[self.place[members]]
            columns.append(column)
        return Errors(*columns)

    def offer(self, index: int) -> Offer:
        """Return one of the rows in full; the caller fills in the reason."""
        candidates, row = self.field, int(self.rows[index])
        priced, place = self.priced[self.table[index]], int(self.place[index])
        pool, workload = candidates.pool, candidates.variants[candidates.variant[row]]
        plan = candidates.plans.row(row)
        per_node = min(plan.gpus, pool.gpus_per_node)
        seconds = float(priced.step_s[place])
        lower, upper = uncertainty.interval(workload, priced, place)
        alone = candidates.take(slice(row, row + 1))
        hourly, finish, cost = (float(column[0]) for column in (alone.hourly, alone.finish_s, alone.cost_to_finish))
        return Offer(
            pool=pool,
            nodes=-(-plan.gpus // pool.gpus_per_node),
            gpus_per_node=per_node,
            plan=plan,
            workload=workload,
            step_s=seconds,
            lower_s=lower,
            upper_s=upper,
            breakdown=priced.times.parts(place),
            memory_bytes=float(priced.memory_bytes[place]),
            memory_lower_bytes=float(priced.footprint.lower[place]),
            memory_upper_bytes=float(priced.upper_bytes[place]),
            memory_available_bytes=priced.usable_bytes,
            memory=priced.footprint.items(place),
            tokens_per_s=workload.tokens_per_step / seconds,
            cost_per_1000_steps=_known(per_1000_steps(hourly, seconds)),
            finish_s=_known(finish),
            cost_to_finish=_known(cost),
            fits_now=None if pool.free_gpus is None else plan.gpus <= pool.free_gpus,
            reason="",
            correction=float(priced.times.correction[place]),
            carried=float(priced.times.carried[place]),
        )


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


MAX_PARETO = 8


def pareto(request: Request, everything: Sequence[tuple[Candidates, Mask]]) -> list[tuple[Candidates, int]]:
    """Return at most `MAX_PARETO` plans of all pools that no other beats in time, cost and GPUs at once, fastest first.

    A pool without a price is compared by time and GPUs alone; all pools are if their prices are in several currencies.

    Args:
        request: the job.
        everything: the fields, and which of their rows count.
    """
    currencies = {
        candidates.pool.currency for candidates, _ in everything if candidates.pool.price_per_gpu_hour is not None
    }
    chosen: list[tuple[Candidates, int]] = []
    points: list[tuple[float, float, float]] = []
    for each, eligible in everything:
        # On one pool the cost is time times GPUs, so only the fastest plan of each GPU count can be on the front.
        rows = np.flatnonzero(eligible)
        gpus, own = each.gpus[rows], each.step_s[rows] * request.workload.global_batch / each.batch[rows]
        least = np.full(int(gpus.max(initial=0)) + 1, np.inf)
        np.minimum.at(least, gpus, own)
        fastest = np.flatnonzero(own == least[gpus])
        for place in fastest[np.unique(gpus[fastest], return_index=True)[1]]:
            row, seconds = int(rows[place]), float(own[place])
            price = each.pool.price_per_gpu_hour if len(currencies) == 1 else None
            chosen.append((each, row))
            points.append(
                (seconds, np.inf if price is None else float(gpus[place]) * price * seconds, float(gpus[place]))
            )
    if not points:
        return []
    axes = np.array(points)
    less = np.all(axes[:, None] <= axes[None], axis=2) & np.any(axes[:, None] < axes[None], axis=2)
    same = np.all(axes[:, None] == axes[None], axis=2) & np.tri(len(axes), k=-1, dtype=bool).T
    front = np.flatnonzero(~(less | same).any(axis=0))
    kept_rows = _spread(axes[front])
    return sorted((chosen[front[index]] for index in kept_rows), key=lambda item: _place(request, *item))


def _place(request: Request, candidates: Candidates, row: int) -> tuple[float, str]:
    return float(candidates.step_s[row] / candidates.batch[row]), candidates.pool.name


def _spread(axes: Floats) -> list[int]:
    """Return rows that show the whole front.

    First come the lowest rows on each axis, then repeatedly the row that is farthest, as a ratio, from those chosen.
    """
    finite = np.where(np.isfinite(axes), np.maximum(axes, 1e-12), np.nan)
    logs = np.log(finite)
    spans = np.nan_to_num(logs - np.nanmin(logs, axis=0, initial=np.inf, where=~np.isnan(logs)), nan=0.0)
    shown = list(dict.fromkeys(int(np.argmin(column)) for column in axes.T))
    while len(shown) < min(MAX_PARETO, len(axes)):
        distance = np.abs(spans[:, None] - spans[shown]).max(axis=2).min(axis=1)
        farthest = int(np.argmax(distance))
        if distance[farthest] <= LEAST_APART:
            break
        shown.append(farthest)
    return shown


LEAST_APART = float(np.log(1.05))
"""Least distance between two members of the front, as a logarithm; closer ones say nothing new to a reader."""
