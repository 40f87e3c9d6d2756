"""Choose the plan to recommend: first one on each pool, then one pool.

On each pool, the plans that tie with the best one (`find_tied_plans`) are narrowed down in three steps:

1. Plans with memory to spare stay.
2. Plans that are not clearly behind in the quantity that the objective leaves open stay. It is the price where time is
   minimised, otherwise the time.
3. Plans that are not clearly behind on a slow host stay.

Of the rest, the plan is chosen that a practitioner tries first: data parallelism before ZeRO before tensor parallelism
before pipelines, nothing recomputed, fewer GPUs. A plan that a practitioner tries even earlier replaces it if it is
behind in neither quantity, however slow it is on a slow host.

A pool without such a plan is rejected with a reason (`choose_or_reject`). `rank_choices` orders the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from tilecast import constants, memory, search, uncertainty, zoo
from tilecast.advice.pricing import CandidatePlans, DetailedForecasts, find_candidates
from tilecast.advice.values import Offer, Rejection, Request, format_excess, round_up
from tilecast.hardware import Pool
from tilecast.memo import Memo
from tilecast.recomputation import CHECKPOINTING
from tilecast.search import NO_LIMITS, Mask, PlanLimits
from tilecast.spec import PRECISIONS, Floats, Ints, Plan, Plans, Precision, Workload, distinct_rows
from tilecast.step.blocks import can_attend
from tilecast.uncertainty import ErrorWidths

MAX_TIED = 128
"""Most plans of a pool that are compared with its best plan to find ties."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended plan of a pool, with its value and its offer."""

    candidates: CandidatePlans
    eligible: Mask
    """Rows of `candidates` that the plan was chosen from."""
    row: int
    """Row of the plan in `candidates`."""
    value: float
    """Amount of the quantity that the objective minimises."""
    best: float
    """Lowest such amount of all eligible plans, at most `value`."""
    counterpart: float
    """Amount of the quantity that the objective leaves open."""
    preference: tuple[int, ...]
    """`simplicity_columns` of the plan."""
    ties: int
    """Number of other plans of the pool that the forecast cannot tell from the best."""
    details: DetailedForecasts
    place: int
    """Index of the plan in `details`."""
    errors: ErrorWidths
    """Uncertainties of the plan's forecast, in columns of length one."""

    @property
    def gpus(self) -> int:
        return int(self.candidates.gpus[self.row])

    @property
    def is_tight(self) -> bool:
        return bool(self.candidates.take(slice(self.row, self.row + 1)).tight[0])

    def offer(self) -> Offer:
        """Return the plan as an offer, without a reason."""
        return self.details.offer(self.place)

    def scale_amounts(self, factor: float, counterpart: float = 1.0) -> Choice:
        """Return a copy with `value` and `best` multiplied by `factor`, and `self.counterpart` by the given factor."""
        return replace(
            self, value=self.value * factor, best=self.best * factor, counterpart=self.counterpart * counterpart
        )


def choose_on_pool(
    request: Request, pool: Pool, limits: PlanLimits = NO_LIMITS, only_plans: Plans | None = None
) -> Choice | Rejection:
    """Search a pool and return its recommended plan or its rejection; `enumerate_plans` describes the arguments."""
    return choose_or_reject(request, find_candidates(request, pool, limits, only_plans))


def choose_or_reject(request: Request, candidates: CandidatePlans) -> Choice | Rejection:
    """Return the recommended plan of a pool, or the reason why the pool has none."""
    pool, limits = candidates.pool, request.constraints
    within = candidates.within(limits)
    if limits.allowed_pools and pool.name not in limits.allowed_pools:
        return Rejection(pool.name, "NotAllowed", "not in constraints.allowedPools", f"add {pool.name} to it")
    if pool.gpu.mig and not limits.allow_sharing:
        return Rejection(pool.name, "SharingNotAllowed", "a slice of a GPU", "set constraints.allowSharing")
    if not candidates.variants and not can_attend(request.workload, pool.gpu):
        title = constants.shipped_constants().attention[request.workload.attention].title
        return Rejection(pool.name, "AttentionNotSupported", f"no kernels of {title}", "set training.attention to auto")
    if not candidates.variants:
        return _reject_precision(request, pool)
    if not within.any():
        return _reject_gpu_count(request, pool)
    if not (within & candidates.fits).any():
        return _reject_memory(request, candidates, within)
    for quantity in request.goal.needed_quantities:
        if not quantity.is_known(pool):
            return Rejection(pool.name, *quantity.if_unknown)
    mask = keep_sensible_plans(request, candidates, within & candidates.fits & candidates.keeps_bound(request))
    return choose_plan(request, candidates, mask) or _reject_bound(request, candidates, within & candidates.fits)


def choose_plan(request: Request, candidates: CandidatePlans, eligible: Mask) -> Choice | None:
    """Return the plan to recommend among the eligible rows (n,). If no row has a known value, return None."""
    ties = find_tied_plans(request, candidates, eligible)
    return None if ties is None else _choose_among_tied(request, ties)


@dataclass(frozen=True, slots=True)
class TiedPlans:
    """The best eligible plan of a table and the plans that may tie with it: k plans, best first."""

    candidates: CandidatePlans
    """The table with all plans."""
    eligible: Mask
    """Rows of the table that the objective may choose from."""
    rows: Ints
    """Rows of the k plans in the table, (k,)."""
    near: CandidatePlans
    """The k plans alone."""
    value: Floats
    """Amount of the quantity that the objective minimises, (k,)."""
    details: DetailedForecasts
    errors: ErrorWidths
    """Uncertainties of the forecasts of the k plans."""

    def select_tied(self, indices: Ints, column: Floats) -> Ints:
        """Return the indices of the plans that tie with the lowest value of a column.

        Every plan below the highest tied value is included. All indices are returned if a value is unknown
        or zero.

        Args:
            indices: indices of some of the k plans.
            column: values of all k plans, (k,).
        """
        values = column[indices]
        if not np.all(values > 0):
            return indices
        first = int(indices[np.argmin(values)])
        tied = np.log(values / values.min()) <= self._tie_widths(first)[indices]
        return np.asarray(indices[values <= values[tied].max()])

    def _tie_widths(self, first: int) -> Floats:
        """Return the logarithm of the largest ratio at which each plan ties with the plan at index `first`, (k,)."""
        plans = self.near.plans
        columns = [getattr(plans, item.name) for item in fields(Plans) if item.name not in _REPLICAS]
        same_but_replicas = np.all([column == column[first] for column in (*columns, self.near.variant)], axis=0)
        return uncertainty.tie_width_on_pool(self.errors, self.errors.take(np.array([first])), same_but_replicas)


_REPLICAS = ("data", "gradient_accumulation")
"""Columns of plans that change how often a GPU's work is repeated."""


def find_tied_plans(request: Request, candidates: CandidatePlans, eligible: Mask) -> TiedPlans | None:
    """Return the best eligible plan and the plans that may tie with it. If no eligible value is known, return None."""
    value = candidates.objective_value(request)
    eligible = eligible & np.isfinite(value)
    if not eligible.any():
        return None
    if request.goal.fewest_gpus:
        eligible = eligible & (candidates.gpus == candidates.gpus[eligible].min())
    rows = np.flatnonzero(eligible)
    best = float(value[rows].min())
    rows = _keep_best_of_each_kind(
        candidates, rows[value[rows] <= best * np.exp(uncertainty.largest_tie_width())], request
    )
    details = DetailedForecasts.from_rows(candidates, rows)
    return TiedPlans(candidates, eligible, rows, candidates.take(rows), value[rows], details, details.errors())


def _keep_best_of_each_kind(candidates: CandidatePlans, rows: Ints, request: Request) -> Ints:
    """Return the best `MAX_TIED` rows and the best row of each kind of plan, best first.

    Plans of one kind are equal in memory to spare and in `simplicity_columns`. The best plan of each kind and the best
    plan of each kind on a slow host are kept.
    """
    some = candidates.take(rows)
    order = np.lexsort((some.step_s, some.objective_value(request)))
    rows, some = rows[order], some.take(order)
    if len(rows) <= MAX_TIED:
        return rows
    mask = np.arange(len(rows)) < MAX_TIED
    slow = np.argsort(_value_on_slow_host(some, request), kind="stable")
    kinds = [*simplicity_columns(some), some.tight.astype(np.int64)]
    mask[distinct_rows(*kinds).first] = True
    mask[slow[distinct_rows(*(column[slow] for column in kinds)).first]] = True
    return rows[mask]


def _choose_among_tied(request: Request, ties: TiedPlans) -> Choice:
    """Return the plan to recommend among tied plans, by the three steps of the module docstring."""
    near, value = ties.near, ties.value
    indices = ties.select_tied(np.arange(len(near)), value)
    count = len(indices) - 1
    tight = near.tight[indices]
    indices = indices if tight.all() else indices[~tight]
    counterpart, slow = near.counterpart_value(request), _value_on_slow_host(near, request)
    indices = ties.select_tied(indices, counterpart)
    columns = simplicity_columns(near.take(indices))
    order = np.lexsort((near.step_s[indices], slow[indices], *columns[::-1]))
    ordered = indices[order]
    robust = ordered[np.isin(ordered, ties.select_tied(indices, slow))][0]
    no_worse = (value[ordered] <= value[robust]) & ~(counterpart[ordered] > counterpart[robust])
    first = order[no_worse][0]
    index = int(indices[first])
    return Choice(
        candidates=ties.candidates,
        eligible=ties.eligible,
        row=int(ties.rows[index]),
        value=float(value[index]),
        best=float(value.min()),
        counterpart=float(counterpart[index]),
        preference=tuple(int(column[first]) for column in columns),
        ties=count,
        details=ties.details,
        place=index,
        errors=ties.errors.take(np.array([index])),
    )


def _value_on_slow_host(candidates: CandidatePlans, request: Request) -> Floats:
    """Return the time or cost that the objective minimises, (n,), as forecast for a slow host CPU."""
    return np.asarray(
        candidates.objective_value(request)
        * uncertainty.slow_host_step_s(candidates.step_s, candidates.launch_s)
        / candidates.step_s
    )


def simplicity_columns(candidates: CandidatePlans) -> tuple[Ints, ...]:
    """Return sort keys, (n,) each, that order plans as a practitioner would try them, the most important key first.

    The columns are: the variant of the job (its own batch and precision first); the most complex way of splitting
    (none, ZeRO, tensor, context or expert, pipeline); the number of degrees above one, and of
    schedules other than 1F1B; recomputation; the ZeRO stage; the ranks of a replica; the GPUs.
    """
    plans = candidates.plans
    sharded = np.minimum(plans.zero_stage, 1)
    split = [sharded, plans.tensor > 1, (plans.context > 1) | (plans.expert > 1), plans.pipeline > 1]
    rung = np.max([step * np.asarray(used, np.int64) for step, used in enumerate(split, 1)], axis=0)
    degrees = (plans.tensor, plans.pipeline, plans.context, plans.expert, plans.virtual_stages, plans.expert_tensor)
    several = np.sum([*(degree > 1 for degree in degrees), plans.schedule > 0], axis=0)
    replica = plans.tensor * plans.pipeline * plans.context
    return candidates.variant, rung, several, plans.checkpointing, plans.zero_stage, replica, candidates.gpus


HALF = 1 / 2
"""Share of a GPU's memory up to which a model, with its training state and one sample, is not split over ranks."""
THIRD = 1 / 3
"""Share of a GPU's memory up to which the training state of a model is not split either."""


def keep_sensible_plans(request: Request, candidates: CandidatePlans, eligible: Mask) -> Mask:
    """Return the eligible rows, (n,), that a practitioner would use without a special reason.

    - A model that takes at most `HALF` of a GPU's memory is replicated as long as every GPU has a sample.
    - A model that takes at most `THIRD` is not sharded by ZeRO where a plan without ZeRO is eligible.
    - A replica is split in few ways (`is_split_too_far`).
    - Tensor parallelism stays on the GPUs that the fastest link joins, and on at most `MOST_TENSOR` of them.

    A rule that would leave no row is skipped. A plan that the user sets is under no rule. A limit that the user sets on
    tensor parallelism replaces the rules on tensor parallelism.
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
        masks += [plans.tensor <= gpus_on_fastest_link(candidates), plans.tensor <= MOST_TENSOR]
    for mask in masks:
        narrowed = eligible & mask
        eligible = narrowed if narrowed.any() else eligible
    return eligible


# Of the 3,460 measured steps at hand three use more, all over a network between nodes.
MOST_TENSOR = 8
"""Most ranks that split a matrix product, even where NVLink joins the GPUs of a whole rack."""


def gpus_on_fastest_link(candidates: CandidatePlans) -> int:
    """Return how many GPUs a pool's fastest link joins: the GPUs of an island, a node or an NVLink domain."""
    intra = candidates.pool.intra
    return intra.domain if intra.beyond else candidates.pool.domain


# Of the 3,460 measured steps at hand, 32 split a replica in three ways, all on at least 32 GPUs with NVLink. So no
# measurement supports a gain that is forecast for a smaller replica split in three ways.
MOST_WAYS = 2
"""Most ways, among tensor, pipeline and context parallelism, to split a replica that is small or has no NVLink."""
LEAST_SPLIT = 32
"""Least GPUs of a replica with NVLink that may be split in more ways than `MOST_WAYS`."""


def is_split_too_far(candidates: CandidatePlans) -> Mask:
    """Return a mask of plans, (n,), that split a replica in more ways than `MOST_WAYS`, where that limit applies.

    Within a node without NVLink, ZeRO counts as one of the ways.
    """
    plans, pool = candidates.plans, candidates.pool
    degrees = (plans.tensor, plans.pipeline, plans.context)
    replica, ways = math.prod(degrees), sum((degree > 1).astype(np.int8) for degree in degrees)
    has_bus = pool.intra.kind != "nvlink"
    # No measured run shards a replica that tensor parallelism and a pipeline split over a bus.
    if has_bus:
        ways = ways + ((replica <= pool.gpus_per_node) & (plans.zero_stage > 0))
    return np.asarray(((replica < LEAST_SPLIT) | has_bus) & (ways > MOST_WAYS))


def _fits_whole(candidates: CandidatePlans, fraction: float) -> Mask:
    """Return a mask, (n,), of plans with a sample for every GPU whose unsplit job fits `fraction` of a GPU's memory."""
    most = fraction * candidates.pool.gpu.memory_bytes
    unsplit = [_UNSPLIT_BYTES.get(workload, partial(_unsplit_bytes, workload)) for workload in candidates.variants]
    fits = np.array(unsplit) <= most
    return np.asarray(fits[candidates.variant] & (candidates.gpus <= candidates.batch))


_UNSPLIT_BYTES: Memo[float] = Memo(64)


def _unsplit_bytes(workload: Workload) -> float:
    """Return the bytes of training state and activations of a job that is not split.

    The micro-batch is one sample, or the job's own. The result is infinite for a model whose own code spreads it over
    all ranks.
    """
    if zoo.has_row_sharded_weights(workload.model):
        return np.inf
    micro = workload.micro_batch or 1
    plan = Plan(
        micro_batch=micro,
        gradient_accumulation=workload.global_batch // micro,
        checkpointing=workload.checkpointing or CHECKPOINTING[0],
    )
    plans = Plans.from_plans(plan)
    bill = memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans, updates=False)
    return float((bill.parameters + bill.gradients + bill.optimizer + bill.activations)[0])


def _ranking_key(request: Request, choice: Choice) -> tuple[float, float, int, str]:
    """Return the sort key of a choice; the best choice has the lowest key."""
    few = choice.gpus if request.goal.fewest_gpus else 0
    return few, choice.value, choice.gpus, choice.candidates.pool.name


@dataclass(frozen=True, slots=True)
class Ranking:
    """Choices of all pools: the recommended one first, then the others by their values."""

    choices: tuple[Choice, ...]
    ties: int
    """Number of plans that the forecast cannot tell apart from the recommended one."""
    ratio: float
    """Value of the recommended plan over the lowest value among the plans that tie with it."""
    is_tied: tuple[bool, ...]
    """For each choice, whether the forecast cannot tell it apart from the recommended one."""


def rank_choices(request: Request, choices: Iterable[Choice]) -> Ranking:
    """Return the choices in order: the recommended choice first, then the others by value.

    Among pools that tie, a plan with memory to spare is preferred, then one that is not clearly behind in the quantity
    that the objective leaves open, then the simplest one (`simplicity_columns`).
    """
    ranked = sorted(choices, key=lambda choice: _ranking_key(request, choice))
    if not ranked:
        return Ranking((), 0, 1.0, ())
    first, tied = _find_tied_choices(request, ranked)
    chosen = _select_simplest(tied)
    ordered = (chosen, *(choice for choice in ranked if choice is not chosen))
    ratio = chosen.value / first.best if first.best > 0 else 1.0
    is_tied = tuple(choice is chosen or _are_tied(request, chosen, choice) for choice in ordered)
    return Ranking(ordered, len(tied) - 1 + chosen.ties, ratio, is_tied)


def recommend_choice(request: Request, choices: Iterable[Choice]) -> Choice:
    """Return the recommended choice of a sequence that is not empty."""
    return _select_simplest(
        _find_tied_choices(request, sorted(choices, key=lambda choice: _ranking_key(request, choice)))[1]
    )


def _find_tied_choices(request: Request, ranked: Sequence[Choice]) -> tuple[Choice, list[Choice]]:
    """Return the choice of the pool with the best plan, and the choices that tie with that best plan."""
    few = _ranking_key(request, ranked[0])[0]
    first = min(
        (choice for choice in ranked if _ranking_key(request, choice)[0] == few), key=lambda choice: choice.best
    )
    return first, [choice for choice in ranked if choice is first or _ties_with_best(request, first, choice)]


def _select_simplest(tied: list[Choice]) -> Choice:
    """Return the preferred choice with the simplest plan."""
    return min(_select_preferred(tied), key=lambda choice: (*choice.preference, choice.value))


def _select_preferred(tied: list[Choice]) -> list[Choice]:
    """Return the tied choices with memory to spare that are not clearly behind in the quantity left open.

    That quantity decides nothing if it is unknown for one of the choices or if prices are in two currencies.
    """
    roomy = [choice for choice in tied if not choice.is_tight] or tied
    currencies = {choice.candidates.pool.currency for choice in roomy}
    if len(currencies) > 1 or not all(choice.counterpart > 0 for choice in roomy):
        return roomy
    least = min(roomy, key=lambda choice: choice.counterpart)
    return [item for item in roomy if item is least or item.counterpart <= least.counterpart * _tie_ratio(least, item)]


def _ties_with_best(request: Request, best: Choice, choice: Choice) -> bool:
    """Return whether a choice ties with the best plan of another pool, whose choice is `best`."""
    same = _ranking_key(request, best)[0] == _ranking_key(request, choice)[0]
    return same and choice.value <= best.best * _tie_ratio(best, choice)


def _tie_ratio(first: Choice, second: Choice) -> float:
    """Return the largest ratio of two values within which choices of two pools count as tied."""
    return float(np.exp(uncertainty.tie_width_between_pools(first.errors, second.errors)[0]))


def _are_tied(request: Request, first: Choice, second: Choice) -> bool:
    """Return whether the forecast cannot tell the choices of two pools apart."""
    best, behind = sorted((first, second), key=lambda choice: _ranking_key(request, choice))
    if _ranking_key(request, best)[0] != _ranking_key(request, behind)[0] or best.value <= 0:
        return False
    return behind.value <= best.value * _tie_ratio(best, behind)


def list_usable_precisions(request: Request, pool: Pool) -> list[Precision]:
    """Return the precisions that the pool's GPU supports and the job's framework runs, the most usual first."""
    framework = request.workload.framework
    supported = search.abilities(framework).precisions if framework else PRECISIONS
    usual: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    return [name for name in usual if pool.gpu.supports(name) and name in supported]


def _reject_precision(request: Request, pool: Pool) -> Rejection:
    other = next(iter(list_usable_precisions(request, pool)), "another precision")
    asked = " or ".join(name.upper() for name in dict.fromkeys((request.workload.precision, *request.precisions)))
    return Rejection(pool.name, "PrecisionNotSupported", f"no {asked} units", f"train in {other}")


def _reject_gpu_count(request: Request, pool: Pool) -> Rejection:
    """Return the rejection of a pool where no plan keeps the job's limits on the number of GPUs."""
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


def _reject_memory(request: Request, candidates: CandidatePlans, within: Mask) -> Rejection:
    """Return the rejection of a pool without enough memory. It names the largest memory use of the smallest plan."""
    rows = np.flatnonzero(within)
    row = int(rows[np.argmin(candidates.memory_bytes[rows])])
    plan, workload = candidates.plans.row(row), candidates.variants[candidates.variant[row]]
    bill = candidates.tables[candidates.table[row]].itemize_memory(candidates.origin[row : row + 1]).items(0)
    largest = max(bill, key=lambda name: bill[name])
    needed, available = float(candidates.memory_bytes[row]), memory.usable_bytes(candidates.pool.gpu)
    gib = 2**30
    message = f"needs {needed / gib:.1f} GiB a GPU, {format_excess(needed - available)} too much"
    message += f" ({largest}: {bill[largest] / gib:.1f} GiB)"
    if request.plan is not None:
        message = f"{plan} {message}"
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
        memory=bill,
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
"""Remedies by the largest item of the memory bill; `samples` are activations of models without tokens."""


def _reject_bound(request: Request, candidates: CandidatePlans, fitting: Mask) -> Rejection:
    """Return the rejection of a pool where every plan misses the deadline or costs more than the budget."""
    target = request.target_step_s
    if target is not None and (not request.goal.bound or not _meets_target(request, candidates, fitting)):
        least, end = candidates.least_step_s(request, fitting), ""
        if request.limits_at == "upperBound":
            end = " at the upper end of its range"
        message = f"the fastest plan takes {least:,.3g} s a step{end}, not {target:,.3g} s"
        return Rejection(candidates.pool.name, "TargetMissed", message, f"allow {round_up(least):g} s a step")
    if request.goal.bound == "budget" and request.budget is not None:
        least = float(candidates.cost_to_finish[fitting].min())
        message = f"the cheapest plan costs {least:,.0f} {request.budget.currency}, not {request.budget.amount:,.0f}"
        return Rejection(candidates.pool.name, "OverBudget", message, f"raise the budget to {least:,.0f}")
    least = float(candidates.finish_s[fitting].min())
    message = f"the fastest plan takes {_format_time(least)}, not {_format_time(request.deadline_s or 0)}"
    return Rejection(candidates.pool.name, "DeadlineMissed", message, f"allow {np.ceil(least):,.0f} s")


def _meets_target(request: Request, candidates: CandidatePlans, fitting: Mask) -> bool:
    """Return whether a plan that fits meets the target for a step, whatever the deadline and the budget are."""
    alone = replace(request, objective="time", deadline_s=None, budget=None)
    return bool((fitting & candidates.keeps_bound(alone)).any())


def _format_time(seconds: float) -> str:
    """Return a time as text in hours if it is at least an hour, else in minutes or in seconds."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"
