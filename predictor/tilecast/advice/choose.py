"""Choose the plan to recommend: first one on each pool, then one pool.

Of a pool's plans, those that tie with the best one (`find_ties`) are narrowed down in three steps. Those with memory to
spare stay; then those that are not clearly behind in the criterion that the objective leaves open (price where time
counts, time where price counts); then those that are not clearly behind on a slow host. Of the rest, the plan is taken
that a practitioner tries first: data parallelism before ZeRO before tensor parallelism before pipelines, nothing
recomputed, fewer GPUs.

A plan that a practitioner tries even earlier, and that is behind the chosen one in neither criterion, is taken instead,
however it does on a slow host.

A pool without such a plan is rejected with a reason (`choose_or_reject`). `rank_choices` orders the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from tilecast import memory, search, uncertainty, zoo
from tilecast.advice.pricing import Candidates, Details, find_candidates
from tilecast.advice.values import Offer, Rejection, Request
from tilecast.hardware import Pool
from tilecast.memo import Memo
from tilecast.search import Limits, Mask
from tilecast.spec import CHECKPOINTING, PRECISIONS, Floats, Ints, Plan, Plans, Precision, Workload, distinct
from tilecast.uncertainty import Errors

MAX_TIED = 128
"""Most plans of a pool that are compared with its best one, to see whether the forecast can tell them apart."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended plan of a pool, and what else the forecast cannot tell from the best."""

    candidates: Candidates
    eligible: Mask
    """Rows that it was chosen from."""
    row: int
    value: float
    best: float
    """Lowest value of all eligible plans. Plans that tie may be behind it."""
    other: float
    """Value of the criterion that the objective leaves open: `Candidates.other` of the plan."""
    preference: tuple[int, ...]
    """`simplicity` of the plan."""
    ties: int
    details: Details
    place: int
    """Index of the recommended plan in `details`."""
    errors: Errors
    """Uncertainties of its forecast, in columns of length one."""

    @property
    def gpus(self) -> int:
        return int(self.candidates.gpus[self.row])

    @property
    def is_tight(self) -> bool:
        return bool(self.candidates.take(slice(self.row, self.row + 1)).tight[0])

    def offer(self) -> Offer:
        """Return the plan in full."""
        return self.details.offer(self.place)

    def scaled(self, factor: float, other: float = 1.0) -> Choice:
        """Return the choice with its value, and the criterion that the objective leaves open, multiplied by factors."""
        return replace(self, value=self.value * factor, best=self.best * factor, other=self.other * other)


_UNLIMITED = Limits()


def choose_on(
    request: Request, pool: Pool, limits: Limits = _UNLIMITED, exactly: Plans | None = None
) -> Choice | Rejection:
    """Enumerate, price and choose for one pool; `enumerate_plans` describes the arguments."""
    return choose_or_reject(request, find_candidates(request, pool, limits, exactly))


def choose_or_reject(request: Request, candidates: Candidates) -> Choice | Rejection:
    """Return the plan that represents a pool in the ranking, or the reason why the pool has none."""
    pool, limits = candidates.pool, request.constraints
    within = candidates.within(limits)
    if limits.allowed_pools and pool.name not in limits.allowed_pools:
        return Rejection(pool.name, "NotAllowed", "not in constraints.allowedPools", f"add {pool.name} to it")
    if pool.gpu.mig and not limits.allow_sharing:
        return Rejection(pool.name, "SharingNotAllowed", "a slice of a GPU", "set constraints.allowSharing")
    if not candidates.variants:
        return _reject_precision(request, pool)
    if not within.any():
        return _reject_gpu_count(request, pool)
    if not (within & candidates.fits).any():
        return _reject_memory(request, candidates, within)
    for quantity in request.goal.needed_quantities:
        if not quantity.is_known(pool):
            return Rejection(pool.name, *quantity.if_unknown)
    mask = sensible(request, candidates, within & candidates.fits & candidates.allowed(request))
    return choose(request, candidates, mask) or _reject_bound(request, candidates, within & candidates.fits)


def choose(request: Request, candidates: Candidates, eligible: Mask) -> Choice | None:
    """Return the plan to recommend among the eligible ones, as the module docstring says; None if none is left."""
    ties = find_ties(request, candidates, eligible)
    return None if ties is None else _choose_tied(request, ties)


@dataclass(frozen=True, slots=True)
class Ties:
    """The best eligible plan of a table, and those near it that the forecast may not tell from it, (k,), best first."""

    candidates: Candidates
    """The table with all plans."""
    eligible: Mask
    rows: Ints
    """Rows of these plans in the table, (k,)."""
    near: Candidates
    """These plans alone."""
    value: Floats
    """What the objective minimises, (k,)."""
    details: Details
    errors: Errors
    """Uncertainties of their forecasts."""

    def not_behind(self, places: Ints, column: Floats) -> Ints:
        """Return the places that the forecast cannot tell from the one with the lowest value in a column.

        Places that are ahead of one of those are included too. All places are returned if a value of the column is
        unknown or zero.
        """
        values = column[places]
        if not np.all(values > 0):
            return places
        first = int(places[np.argmin(values)])
        tied = np.log(values / values.min()) <= self._width(first)[places]
        return np.asarray(places[values <= values[tied].max()])

    def _width(self, first: int) -> Floats:
        """Return the logarithm of the ratio up to which the forecast cannot tell each plan from the first, (k,)."""
        plans = self.near.plans
        columns = [getattr(plans, item.name) for item in fields(Plans) if item.name not in _REPLICAS]
        alike = np.all([column == column[first] for column in (*columns, self.near.variant)], axis=0)
        return uncertainty.tie_within(self.errors, self.errors.take(np.array([first])), alike)


_REPLICAS = ("data", "gradient_accumulation")
"""Columns that say how often a GPU's work is repeated, not what the work is."""


def find_ties(request: Request, candidates: Candidates, eligible: Mask) -> Ties | None:
    """Return the eligible plans that may tie with the best one, it included; None if no plan has a value."""
    value = candidates.value(request)
    eligible = eligible & np.isfinite(value)
    if not eligible.any():
        return None
    if request.goal.fewest_gpus:
        eligible = eligible & (candidates.gpus == candidates.gpus[eligible].min())
    rows = np.flatnonzero(eligible)
    best = float(value[rows].min())
    rows = _best_of_each_kind(candidates, rows[value[rows] <= best * np.exp(uncertainty.most_tied())], request)
    details = Details.of(candidates, rows)
    return Ties(candidates, eligible, rows, candidates.take(rows), value[rows], details, details.errors())


def _best_of_each_kind(candidates: Candidates, rows: Ints, request: Request) -> Ints:
    """Return the best `MAX_TIED` of the rows, best first, and the best of each kind of plan.

    Plans are of one kind if they are equal in all that decides among ties. Of each kind, the best plan and the best
    plan on a slow host are included.
    """
    some = candidates.take(rows)
    order = np.lexsort((some.step_s, some.value(request)))
    rows, some = rows[order], some.take(order)
    if len(rows) <= MAX_TIED:
        return rows
    mask = np.arange(len(rows)) < MAX_TIED
    slow = np.argsort(_value_on_slow_host(some, request), kind="stable")
    kinds = [*simplicity(some), some.tight.astype(np.int64)]
    mask[distinct(*kinds).first] = True
    mask[slow[distinct(*(column[slow] for column in kinds)).first]] = True
    return rows[mask]


def _choose_tied(request: Request, ties: Ties) -> Choice:
    """Return the plan to recommend among those that tie, as the module docstring says."""
    near, value = ties.near, ties.value
    places = ties.not_behind(np.arange(len(near)), value)
    count = len(places) - 1
    tight = near.tight[places]
    places = places if tight.all() else places[~tight]
    other, slow = near.other(request), _value_on_slow_host(near, request)
    places = ties.not_behind(places, other)
    columns = simplicity(near.take(places))
    order = np.lexsort((near.step_s[places], slow[places], *columns[::-1]))
    ordered = places[order]
    robust = ordered[np.isin(ordered, ties.not_behind(places, slow))][0]
    no_worse = (value[ordered] <= value[robust]) & ~(other[ordered] > other[robust])
    first = order[no_worse][0]
    place = int(places[first])
    return Choice(
        candidates=ties.candidates,
        eligible=ties.eligible,
        row=int(ties.rows[place]),
        value=float(value[place]),
        best=float(value.min()),
        other=float(other[place]),
        preference=tuple(int(column[first]) for column in columns),
        ties=count,
        details=ties.details,
        place=place,
        errors=ties.errors.take(np.array([place])),
    )


def _value_on_slow_host(candidates: Candidates, request: Request) -> Floats:
    """Return what the objective minimises, on a slow host, (n,)."""
    return np.asarray(
        candidates.value(request) * uncertainty.cautious(candidates.step_s, candidates.launch_s) / candidates.step_s
    )


def simplicity(candidates: Candidates) -> tuple[Ints, ...]:
    """Return columns that are lower for a plan that is tried earlier, the most important first.

    They prefer the job's own batch and precision; then no splitting, ZeRO, tensor parallelism, context or expert
    parallelism, pipelines, in this order; fewer degrees of parallelism at once; nothing recomputed; a lower ZeRO stage;
    fewer ranks that a replica is split over; fewer GPUs.
    """
    plans = candidates.plans
    sharded = np.minimum(plans.zero_stage, 1)
    split = [sharded, plans.tensor > 1, (plans.context > 1) | (plans.expert > 1), plans.pipeline > 1]
    rung = np.max([step * np.asarray(used, np.int64) for step, used in enumerate(split, 1)], axis=0)
    degrees = (plans.tensor, plans.pipeline, plans.context, plans.expert, plans.virtual_stages)
    several = np.sum([degree > 1 for degree in degrees], axis=0)
    replica = plans.tensor * plans.pipeline * plans.context
    return candidates.variant, rung, several, plans.checkpointing, plans.zero_stage, replica, candidates.gpus


HALF, THIRD = 1 / 2, 1 / 3
"""Shares of a GPU's memory up to which a model counts as small.

A model that takes at most `HALF`, with its training state and one sample, is not split over ranks. If it takes at most
`THIRD`, its training state is not split either.
"""


def sensible(request: Request, candidates: Candidates, eligible: Mask) -> Mask:
    """Keep the eligible rows that a practitioner would use without a special reason.

    A model that a GPU holds with room to spare is replicated, not split, as long as every GPU has a sample. A replica
    that is small, or has no NVLink, is split in two ways at most. Tensor parallelism stays on GPUs that NVLink joins,
    where the node has any, and on at most `MOST_TENSOR` of them.

    A rule that would leave nothing is skipped. No rule applies to a stated plan, and a stated limit on tensor
    parallelism lifts the rules on it.
    """
    if request.plan is not None:
        return eligible
    plans = candidates.plans
    split = (plans.tensor > 1) | (plans.pipeline > 1) | (plans.context > 1) | (plans.expert > 1)
    masks = [~(split & _fits_whole(candidates, HALF))]
    if np.any(eligible & ~split & (plans.data > 1) & (plans.zero_stage == 0)):
        masks.append(~((plans.zero_stage > 0) & _fits_whole(candidates, THIRD)))
    masks.append(~is_split_too_far(candidates))
    if request.constraints.max_tensor is None:
        masks += [plans.tensor <= fastest_domain(candidates), plans.tensor <= MOST_TENSOR]
    for mask in masks:
        narrowed = eligible & mask
        eligible = narrowed if narrowed.any() else eligible
    return eligible


MOST_TENSOR = 8
"""Most ranks that split a product, even where NVLink joins the GPUs of a whole rack.

Of the 3,460 measured steps at hand three use more, all over a network between nodes.
"""


def fastest_domain(candidates: Candidates) -> int:
    """Return how many GPUs of a node the fastest link joins: those of an NVLink island, where there are islands."""
    intra = candidates.pool.intra
    return intra.domain if intra.beyond else candidates.pool.domain


MOST_WAYS = 2
LEAST_SPLIT = 32
"""Limits on splitting a replica in several ways among tensor, pipeline and context parallelism.

A replica is split in at most `MOST_WAYS` ways if it has fewer than `LEAST_SPLIT` GPUs or no NVLink. Of the 3,460
measured steps at hand, 32 split it in three ways, none of them on fewer than 32 GPUs (four nodes) and none without
NVLink, so no measurement supports a gain that is forecast for such a plan.
"""


def is_split_too_far(candidates: Candidates) -> Mask:
    """Return which plans split a replica in more ways than `MOST_WAYS` where that limit applies, (n,).

    Within a node without NVLink, sharding counts as one of the ways: no measured run shards what tensor parallelism and
    a pipeline split over a bus.
    """
    plans, pool = candidates.plans, candidates.pool
    degrees = (plans.tensor, plans.pipeline, plans.context)
    replica, ways = math.prod(degrees), sum((degree > 1).astype(np.int8) for degree in degrees)
    has_bus = pool.intra.kind != "nvlink"
    if has_bus:
        ways = ways + ((replica <= pool.gpus_per_node) & (plans.zero_stage > 0))
    return np.asarray(((replica < LEAST_SPLIT) | has_bus) & (ways > MOST_WAYS))


def _fits_whole(candidates: Candidates, share: float) -> Mask:
    """Return which plans leave a sample for every GPU and a model that fits whole in this share of its memory, (n,)."""
    most = share * candidates.pool.gpu.memory_bytes
    fits = np.array([whole_bytes(workload) <= most for workload in candidates.variants], bool)
    return np.asarray(fits[candidates.variant] & (candidates.gpus <= candidates.batch))


def whole_bytes(workload: Workload) -> float:
    """Return the bytes of training state and activations of a job that is not split.

    One sample at a time is assumed, or the job's own micro-batch. The result is infinite for a model whose own code
    spreads it over all ranks.
    """
    if zoo.spreads_rows(workload.model):
        return np.inf
    return _WHOLE.get(workload, lambda: _whole_bytes(workload))


_WHOLE: Memo[float] = Memo(64)


def _whole_bytes(workload: Workload) -> float:
    micro = workload.micro_batch or 1
    plan = Plan(
        micro_batch=micro,
        gradient_accumulation=workload.global_batch // micro,
        checkpointing=workload.checkpointing or CHECKPOINTING[0],
    )
    plans = Plans.of(plan)
    bill = memory.footprint(workload, zoo.shard(workload, plans), plans)
    return float((bill.parameters + bill.gradients + bill.optimizer + bill.activations)[0])


def _rank_key(request: Request, choice: Choice) -> tuple[float, float, int, str]:
    """Return the sort key of a choice: the lowest is the best."""
    few = choice.gpus if request.goal.fewest_gpus else 0
    return few, choice.value, choice.gpus, choice.candidates.pool.name


@dataclass(frozen=True, slots=True)
class Ranking:
    """Choices of all pools: the recommended one first, then the others by their value."""

    choices: tuple[Choice, ...]
    ties: int
    """Number of plans that the forecast cannot tell apart from the recommended one."""
    ratio: float
    """Forecast of the recommended plan over the lowest forecast among those that tie with it."""
    is_tied: tuple[bool, ...]
    """Whether the forecast cannot tell each choice apart from the recommended one."""


def rank_choices(request: Request, choices: Iterable[Choice]) -> Ranking:
    """Rank the choices and decide which one is recommended among the pools that tie.

    Of the pools that tie with the best one, those with memory to spare are preferred, then those that are not clearly
    behind in the criterion that the objective leaves open, then the one whose plan is tried first
    (`simplicity`).
    """
    ranked = sorted(choices, key=lambda choice: _rank_key(request, choice))
    if not ranked:
        return Ranking((), 0, 1.0, ())
    first, tied = _tied_pools(request, ranked)
    chosen = _simplest(tied)
    ordered = (chosen, *(choice for choice in ranked if choice is not chosen))
    ratio = chosen.value / first.best if first.best > 0 else 1.0
    is_tied = tuple(choice is chosen or _is_tie(request, chosen, choice) for choice in ordered)
    return Ranking(ordered, len(tied) - 1 + chosen.ties, ratio, is_tied)


def recommended(request: Request, choices: Iterable[Choice]) -> Choice:
    """Return the first choice of their ranking; there must be at least one."""
    return _simplest(_tied_pools(request, sorted(choices, key=lambda choice: _rank_key(request, choice)))[1])


def _tied_pools(request: Request, ranked: Sequence[Choice]) -> tuple[Choice, list[Choice]]:
    """Return the choice of the pool with the best plan, and the choices of all pools that tie with that plan."""
    few = _rank_key(request, ranked[0])[0]
    first = min((choice for choice in ranked if _rank_key(request, choice)[0] == few), key=lambda choice: choice.best)
    return first, [choice for choice in ranked if choice is first or _ties(request, first, choice)]


def _simplest(tied: list[Choice]) -> Choice:
    """Return the choice, among those to prefer, whose plan is tried first."""
    return min(_preferred(tied), key=lambda choice: (*choice.preference, choice.value))


def _preferred(tied: list[Choice]) -> list[Choice]:
    """Return the choices to prefer among those that tie.

    Those with memory to spare stay, and of these the ones that are not clearly behind in the other criterion. That
    criterion decides nothing if it is unknown for one of them, or if prices are in two currencies.
    """
    roomy = [choice for choice in tied if not choice.is_tight] or tied
    known = (
        all(choice.other > 0 for choice in roomy) and len({choice.candidates.pool.currency for choice in roomy}) == 1
    )
    if not known:
        return roomy
    least = min(roomy, key=lambda choice: choice.other)
    return [choice for choice in roomy if choice is least or choice.other <= least.other * _width(least, choice)]


def _ties(request: Request, first: Choice, other: Choice) -> bool:
    """Return whether the forecast cannot tell the choice of one pool from the best plan of another."""
    same = _rank_key(request, first)[0] == _rank_key(request, other)[0]
    return same and other.value <= first.best * _width(first, other)


def _width(one: Choice, other: Choice) -> float:
    """Return the largest ratio at which the forecast cannot tell two choices apart."""
    return float(np.exp(uncertainty.tie_between(one.errors, other.errors)[0]))


def _is_tie(request: Request, one: Choice, other: Choice) -> bool:
    """Return whether the forecast cannot tell the choices of two pools apart."""
    best, behind = sorted((one, other), key=lambda choice: _rank_key(request, choice))
    if _rank_key(request, best)[0] != _rank_key(request, behind)[0] or best.value <= 0:
        return False
    return behind.value <= best.value * _width(best, behind)


def usable_precisions(request: Request, pool: Pool) -> list[Precision]:
    """Return the precisions that the pool's GPU supports and the job's framework trains in, the most usual first."""
    framework = request.workload.framework
    able = search.abilities(framework).precisions if framework else PRECISIONS
    named: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    return [name for name in named if pool.gpu.supports(name) and name in able]


def _reject_precision(request: Request, pool: Pool) -> Rejection:
    other = next(iter(usable_precisions(request, pool)), "another precision")
    asked = " or ".join(name.upper() for name in dict.fromkeys((request.workload.precision, *request.precisions)))
    return Rejection(pool.name, "PrecisionNotSupported", f"no {asked} units", f"train in {other}")


def _reject_gpu_count(request: Request, pool: Pool) -> Rejection:
    """Return the reason why no plan of the pool could be enumerated."""
    batch, limits = request.workload.global_batch, request.constraints
    most = min(
        pool.max_gpus,
        limits.max_gpus or pool.max_gpus,
        limits.max_nodes * pool.gpus_per_node if limits.max_nodes else pool.max_gpus,
    )
    if pool.max_gpus == 0:
        return Rejection(pool.name, "EmptyPool", "the pool has no node", "raise its maxNodes")
    if limits.gpus is not None and limits.gpus > most:
        remedy = f"ask for at most {most}" if most == pool.max_gpus else "raise maxGpus or maxNodes"
        return Rejection(pool.name, "TooFewGpus", f"{limits.gpus} GPUs asked, {most} may be used", remedy)
    if limits.gpus is not None and limits.gpus > pool.gpus_per_node and limits.gpus % pool.gpus_per_node:
        message = f"{limits.gpus} GPUs do not fill nodes of {pool.gpus_per_node} evenly"
        return Rejection(pool.name, "UnevenNodes", message, f"ask for a multiple of {pool.gpus_per_node}")
    count = "no GPU count" if limits.gpus is None else f"no split of {limits.gpus} GPUs"
    message = f"{count} divides batch {batch} and the model"
    other = "" if limits.gpus is None else "ask for another GPU count, or "
    return Rejection(pool.name, "NoDivisiblePlan", message, f"{other}choose a global batch with more divisors")


def _reject_memory(request: Request, candidates: Candidates, within: Mask) -> Rejection:
    """Return the rejection of a pool without enough memory, for its leanest plan and the largest item of its bill."""
    rows = np.flatnonzero(within)
    row = int(rows[np.argmin(candidates.memory_bytes[rows])])
    plan, workload = candidates.plans.row(row), candidates.variants[candidates.variant[row]]
    bill = candidates.tables[candidates.table[row]].bill(candidates.origin[row : row + 1]).items(0)
    largest = max(bill, key=lambda name: bill[name])
    needed, available = float(candidates.memory_bytes[row]), memory.usable_bytes(candidates.pool.gpu)
    over = needed - available
    gib = 2**30
    message = f"{largest} {bill[largest] / gib:.1f} GiB; {over / gib:.1f} GiB too much"
    if request.plan is not None:
        message = f"{plan} needs {message}"
    code = "OutOfMemory"
    if workload.model.trace is not None:
        code, message = "TensorParallelUnsupported", f"{message}; a graph is split by data and pipeline, not by tensor"
    return Rejection(
        candidates.pool.name,
        code,
        message,
        _REMEDIES["samples" if largest == "activations" and not workload.samples_are_tokens else largest],
        plan,
        needed,
        available,
    )


_REMEDIES: Mapping[str, str] = {
    "parameters": "more GPUs per job, or GPUs with more memory",
    "gradients": "more GPUs per job, or GPUs with more memory",
    "optimizer": "more GPUs per job, or a leaner optimizer",
    "activations": "a shorter sequence, or a smaller micro-batch",
    "samples": "a smaller micro-batch",
    "working": "a shorter sequence, or a loss computed in chunks",
    "buffers": "more GPUs per job, or smaller buckets in the framework",
    "fragmentation": "a smaller micro-batch, or expandable segments in the allocator",
    "context": "GPUs with more memory",
}
"""Remedies by the largest item of the memory bill."""


def _reject_bound(request: Request, candidates: Candidates, fitting: Mask) -> Rejection:
    """Return the rejection of a pool where every plan misses the deadline or costs more than the budget."""
    if request.budget is not None:
        least = float(candidates.cost_to_finish[fitting].min())
        message = f"the cheapest plan costs {least:,.0f} {request.budget.currency}, not {request.budget.amount:,.0f}"
        return Rejection(candidates.pool.name, "OverBudget", message, f"raise the budget to {least:,.0f}")
    least = float(candidates.finish_s[fitting].min())
    message = f"the fastest plan takes {_time(least)}, not {_time(request.deadline_s or 0)}"
    return Rejection(candidates.pool.name, "DeadlineMissed", message, f"allow {np.ceil(least):,.0f} s")


def _time(seconds: float) -> str:
    """Format a time in hours, in minutes if it is shorter than an hour, or in seconds if shorter than a minute."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"
