"""Every plan of a job on a pool as columns, and what is best among them.

A job may leave its global batch and its precision open; each combination is a variant, searched by itself. Steps of
unlike batches compare by the sample: a value is scaled to the job's own batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from tilecast import memory, search, uncertainty
from tilecast.advise import stated
from tilecast.advise.values import Constraints, Offer, Request
from tilecast.cost import per_1000_steps
from tilecast.hardware import Pool
from tilecast.search import Found, Limits, Mask, Priced
from tilecast.spec import PRECISIONS, Floats, Ints, Plans, Workload
from tilecast.uncertainty import Errors

MAX_BATCHES = 8
"""Global batches tried of a range: its ends, the job's own, and what has most factors of two between them."""

_UNLIMITED = Limits()


def within(plans: Plans, gpus: Ints, pool: Pool, limits: Constraints) -> Mask:
    """Which plans of a pool, on so many GPUs each, keep a job's constraints, (n,)."""
    kept = np.ones(len(plans), dtype=bool)
    if limits.gpus is not None:
        kept &= gpus == limits.gpus
    if limits.max_gpus is not None:
        kept &= gpus <= limits.max_gpus
    if limits.max_nodes is not None:
        kept &= -(-gpus // pool.gpus_per_node) <= limits.max_nodes
    if limits.max_tensor is not None:
        kept &= plans.tensor <= limits.max_tensor
    return kept


def variants(request: Request, pool: Pool) -> tuple[Workload, ...]:
    """The job in every precision and global batch that it may be given and the pool has units for, its own first."""
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
    found = {low, high}
    # The numbers with most factors of two are the ones that ranks and micro-batches divide.
    for power in range(high.bit_length(), -1, -1):
        step = 1 << power
        found |= set(range(-(-low // step) * step, high + 1, step)[:MAX_BATCHES])
        if len(found) >= MAX_BATCHES:
            break
    divided = sorted(item for item in found if item % micro == 0)
    return divided[:: -(-len(divided) // MAX_BATCHES)] if divided else []


def _steps(request: Request, batch: int) -> int | None:
    """Steps of the whole run at a global batch: as many tokens, or as many samples, as the job asks for."""
    own = request.workload
    if request.tokens is not None:
        return -(-request.tokens // (batch * own.sequence_length))
    return None if own.steps is None else -(-own.steps * own.global_batch // batch)


@dataclass(frozen=True, slots=True)
class Field:
    """Every plan of every variant that a pool can run, as columns (n,)."""

    pool: Pool
    variants: tuple[Workload, ...]
    """Those that the pool's GPU has units for."""
    variant: Ints
    """Index into `variants`."""
    tables: tuple[Found, ...]
    """Where the rows come from."""
    table: Ints
    """Index into `tables`."""
    origin: Ints
    """The row there."""
    plans: Plans
    gpus: Ints
    step_s: Floats
    launch_s: Floats
    memory_bytes: Floats
    upper_bytes: Floats
    fits: Mask
    batch: Floats
    steps: Floats
    """Steps of the whole run; NaN where its length is not known."""

    def __len__(self) -> int:
        return len(self.step_s)

    def take(self, rows: slice | Ints) -> Field:
        """The chosen rows, in the order given."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, plans=self.plans.take(rows), **columns)

    @property
    def hourly(self) -> Floats:
        """Price of the GPUs of each plan for an hour; NaN where the pool has none."""
        price = self.pool.price_per_gpu_hour
        return self.gpus.astype(float) * (np.nan if price is None else price)

    @property
    def tight(self) -> Mask:
        """Of which plans the upper end of the memory's range does not fit."""
        return self.upper_bytes > memory.usable_bytes(self.pool.gpu)

    @property
    def finish_s(self) -> Floats:
        return self.steps * self.step_s

    @property
    def cost_to_finish(self) -> Floats:
        return self.hourly * self.finish_s / 3600

    def within(self, limits: Constraints) -> Mask:
        """Which plans keep the job's constraints."""
        return within(self.plans, self.gpus, self.pool, limits)

    def value(self, request: Request) -> Floats:
        """What the objective makes least, (n,); NaN where a price is missing."""
        return self._price(request) if request.goal.is_price else self._seconds(request)

    def other(self, request: Request) -> Floats:
        """What the objective leaves open, (n,): seconds where it makes a price least, else the price; NaN where that is
        missing."""
        return self._seconds(request) if request.goal.is_price else self._price(request)

    def _seconds(self, request: Request) -> Floats:
        """Of the run, or of as many samples as a step of the job's own batch has."""
        steps = self.steps if request.goal.is_whole_run else request.workload.global_batch / self.batch
        return self.step_s * steps

    def _price(self, request: Request) -> Floats:
        return self.hourly / 3600 * self._seconds(request)

    def allowed(self, request: Request) -> Mask:
        """Which plans the objective allows: those before the deadline, or within the budget."""
        kept = np.ones(len(self), dtype=bool)
        if request.goal.bound == "deadlineSeconds" and request.deadline_s is not None:
            kept &= self.finish_s <= request.deadline_s
        if request.goal.bound == "budget" and request.budget is not None:
            kept &= self.cost_to_finish <= request.budget.amount
        return kept


_COLUMNS = (
    "variant", "table", "origin", "gpus", "step_s", "launch_s", "memory_bytes", "upper_bytes", "fits", "batch", "steps",
)  # fmt: skip


def field(request: Request, pool: Pool, limits: Limits = _UNLIMITED, exactly: Plans | None = None) -> Field:
    """Everything that a pool could do for a job, its constraints left aside.

    Args:
        request: the job.
        pool: where.
        limits: bounds of the enumeration.
        exactly: these plans instead of those that the search enumerates.
    """
    able = variants(request, pool)
    every: list[tuple[int, Found]] = []
    for index, workload in enumerate(able):
        wanted = _stated(request, workload, pool) if exactly is None else exactly
        if wanted is not None:
            if len(wanted):
                every.append((index, search.those(workload, wanted, pool)))
            continue
        found = search.find(workload, pool, limits)
        every.append((index, found))
        exact = request.constraints.gpus
        if exact is not None and limits.gpus is None and not np.any(found.plans.gpus == exact):
            every.append((index, search.find(workload, pool, replace(limits, gpus=exact))))
    every = [item for item in every if len(item[1].plans)]

    def column(name: str) -> Floats:
        parts = [getattr(table, name) for _, table in every]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0), *parts])

    plans = Plans.concatenate([table.plans for _, table in every]) if every else Plans.of()
    sizes = [len(table.plans) for _, table in every]
    variant = np.repeat([index for index, _ in every], sizes).astype(np.int64)
    batches = np.array([float(item.global_batch) for item in able])
    steps = np.array([np.nan if item.steps is None else float(item.steps) for item in able])
    return Field(
        pool=pool,
        variants=able,
        variant=variant,
        tables=tuple(table for _, table in every),
        table=np.repeat(np.arange(len(every)), sizes),
        origin=np.concatenate([np.zeros(0, np.int64), *(np.arange(size) for size in sizes)]),
        plans=plans,
        gpus=plans.gpus,
        step_s=column("step_s"),
        launch_s=column("launch_s"),
        memory_bytes=column("memory_bytes"),
        upper_bytes=column("upper_bytes"),
        fits=column("fits").astype(bool, copy=False),
        batch=batches[variant],
        steps=steps[variant],
    )


def _stated(request: Request, workload: Workload, pool: Pool) -> Plans | None:
    """The plans that agree with the one that the request states, on the GPUs it states or on as many as may be used;
    of those the ones that the job's framework executes, if it executes any."""
    wanted, limits = request.plan, request.constraints
    if wanted is None:
        return None
    most = min(pool.max_gpus, limits.gpus or limits.max_gpus or pool.max_gpus)
    gpus = wanted.data * wanted.tensor * wanted.pipeline * wanted.context if wanted.data else most
    if not 0 < gpus <= pool.max_gpus:
        return Plans.of()
    found = stated.plans(workload, gpus, wanted, "plan")
    able = search.abilities(workload.framework).executes(found) if workload.framework else None
    return found.take(able) if able is not None and able.any() else found


@dataclass(frozen=True, slots=True)
class Details:
    """Some rows of a field, priced in full."""

    field: Field
    rows: Ints
    priced: tuple[Priced, ...]
    """A table for each of the field's tables among the rows."""
    table: Ints
    """For each row, the index of its table, (k,)."""
    place: Ints
    """For each row, its place in that table, (k,)."""

    @classmethod
    def of(cls, found: Field, rows: Ints) -> Details:
        """The rows of a field, in the order given."""
        present, table = np.unique(found.table[rows], return_inverse=True)
        place = np.zeros(len(rows), dtype=np.int64)
        priced = []
        for index, source in enumerate(present):
            members = np.flatnonzero(table == index)
            place[members] = np.arange(len(members))
            among = rows[members]
            priced.append(found.tables[source].price(found.origin[among]))
        return cls(found, rows, tuple(priced), table, place)

    def errors(self) -> Errors:
        """What may be off in each row's forecast."""
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
        """One of the rows in full; its reason is left to the caller."""
        found, row = self.field, int(self.rows[index])
        priced, place = self.priced[self.table[index]], int(self.place[index])
        pool, workload = found.pool, found.variants[found.variant[row]]
        plan = found.plans.row(row)
        per_node = min(plan.gpus, pool.gpus_per_node)
        seconds = float(priced.step_s[place])
        lower, upper = uncertainty.interval(workload, priced, place)
        alone = found.take(slice(row, row + 1))
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


def pareto(request: Request, everything: Sequence[tuple[Field, Mask]]) -> list[tuple[Field, int]]:
    """At most `MAX_PARETO` plans of all pools of which none is beaten in time, cost and GPUs at once, fastest first.

    A pool without a price, or with one in another currency than the others, is compared by time and GPUs alone.

    Args:
        request: the job.
        everything: the fields, and which of their rows count.
    """
    currencies = {found.pool.currency for found, _ in everything if found.pool.price_per_gpu_hour is not None}
    chosen: list[tuple[Field, int]] = []
    points: list[tuple[float, float, float]] = []
    for found, kept in everything:
        # On one pool the cost is time times GPUs, so the fastest plan of each count stands for all of that count.
        rows = np.flatnonzero(kept)
        gpus, own = found.gpus[rows], found.step_s[rows] * request.workload.global_batch / found.batch[rows]
        least = np.full(int(gpus.max(initial=0)) + 1, np.inf)
        np.minimum.at(least, gpus, own)
        fastest = np.flatnonzero(own == least[gpus])
        for place in fastest[np.unique(gpus[fastest], return_index=True)[1]]:
            row, seconds = int(rows[place]), float(own[place])
            price = found.pool.price_per_gpu_hour if len(currencies) == 1 else None
            chosen.append((found, row))
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


def _place(request: Request, found: Field, row: int) -> tuple[float, str]:
    return float(found.step_s[row] / found.batch[row]), found.pool.name


def _spread(axes: Floats) -> list[int]:
    """Rows that show the whole front: the least on each axis, then always the one farthest, as a ratio, from those
    shown."""
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
"""Members of the front closer than this on every axis say nothing new to a reader."""
