"""Choose the plan to recommend: first one on each pool, then one pool.

A recommended plan is at most a factor `MOST_BEHIND` behind the best forecast in the quantity that the objective
minimises. Among the plans that close to the best, these rules are applied in order:

1. Keep the plans with memory to spare.
2. Drop the plans that wait much longer than the others for a slow host.
3. Keep the cheapest plans, then the fastest. One of the two is the objective itself.
4. Take the simplest plan, the one that a practitioner tries first: data parallelism before ZeRO before tensor
   parallelism before pipelines, nothing recomputed, fewer GPUs.

On a pool, the rules choose one plan for each number of GPUs (`_choose_for_each_count`), and then among these plans. So
the plan for a number of GPUs does not depend on which other numbers are possible. `rank_choices` applies the same rules
to the chosen plans of the pools.

The speed of the host is not known, and a plan with a faster forecast may wait longer for it. Such a plan does not beat
a plan that is faster on a slow host, if their forecasts are at most `uncertainty.MOST_TIED` apart (`_keep_near_best`).
There are two exceptions: a plan that is clearly faster for no more money (`_find_faster_for_no_more`), and a plan that
is clearly cheaper and as fast (`_find_cheaper_and_as_fast`).

A pool without an eligible plan is rejected with a reason (`choose_or_reject`). `rank_choices` orders the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from tilecast import constants, memory, search, uncertainty, zoo
from tilecast.advice.pricing import CandidatePlans, DetailedForecasts, find_candidates
from tilecast.advice.values import Decision, Offer, Rejection, Request, format_excess, round_up_to_three_digits
from tilecast.hardware import Pool
from tilecast.memo import Memo
from tilecast.recomputation import CHECKPOINTING
from tilecast.search import NO_LIMITS, Mask, PlanLimits
from tilecast.spec import PRECISIONS, Floats, Ints, Plan, Plans, Precision, Workload
from tilecast.step.blocks import has_attention_kernels
from tilecast.step.placement import count_gpus_on_each_node
from tilecast.uncertainty import ErrorWidths

MAX_TIED = 128
"""Most plans of a pool that are checked for a tie with its best plan."""
MOST_BEHIND = 1.02
"""Largest ratio of a recommended plan to the best forecast, in the quantity that the objective minimises."""
MOST_DEARER = 1.01
"""Largest ratio of a recommended plan's cost to that of another near-best plan with as much memory to spare."""
_SAME_COST = MOST_DEARER**0.5
"""Ratio up to which two costs count as equal.

It applies among plans with the same number of GPUs, and again among the plans chosen for each number.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended plan of a pool, with the amounts and the uncertainty of its forecast."""

    candidates: CandidatePlans
    eligible: Mask
    """Rows of `candidates` among which the plan was chosen, (n,)."""
    row: int
    """Row of the plan in `candidates`."""
    value: float
    """Amount of the quantity that the objective minimises."""
    best: float
    """Lowest `value` of all eligible plans."""
    counterpart: float
    """Cost if the objective minimises time, otherwise time."""
    preference: tuple[int, ...]
    """Sort keys of the plan from `simplicity_sort_keys`."""
    ties: int
    """Number of other plans of the pool that tie with its best plan within the forecast's uncertainty."""
    details: DetailedForecasts
    place: int
    """Index of the plan in `details`."""
    errors: ErrorWidths
    """Uncertainties of the plan's forecast, in columns of length one."""
    slow: float
    """The same amount as `value`, forecast for a slow host CPU."""
    decision: Decision
    """Rule that preferred this plan to the pool's best forecast."""

    @property
    def gpus(self) -> int:
        return int(self.candidates.gpus[self.row])

    @property
    def is_tight(self) -> bool:
        return bool(self.candidates.take(slice(self.row, self.row + 1)).tight[0])

    def offer(self) -> Offer:
        """Return the plan as an offer whose reason is still empty."""
        return self.details.offer(self.place)

    def scale_amounts(self, factor: float, counterpart: float = 1.0) -> Choice:
        """Return a copy with `value`, `best` and `slow` times `factor`, and the cost or time times `counterpart`."""
        return replace(
            self,
            value=self.value * factor,
            best=self.best * factor,
            slow=self.slow * factor,
            counterpart=self.counterpart * counterpart,
        )


def choose_on_pool(
    request: Request, pool: Pool, limits: PlanLimits = NO_LIMITS, only_plans: Plans | None = None
) -> Choice | Rejection:
    """Search a pool and return its recommended plan or its rejection. For the arguments see `enumerate_plans`."""
    return choose_or_reject(request, find_candidates(request, pool, limits, only_plans))


def choose_or_reject(request: Request, candidates: CandidatePlans) -> Choice | Rejection:
    """Return the recommended plan of a pool, or the reason why the pool has none."""
    pool, limits = candidates.pool, request.constraints
    within = candidates.within(limits)
    if limits.allowed_pools and pool.name not in limits.allowed_pools:
        return Rejection(pool.name, "NotAllowed", "not in constraints.allowedPools", f"add {pool.name} to it")
    if pool.gpu.mig and not limits.allow_sharing:
        return Rejection(pool.name, "SharingNotAllowed", "a slice of a GPU", "set constraints.allowSharing")
    if not candidates.variants and not has_attention_kernels(request.workload, pool.gpu):
        title = constants.shipped_constants().attention[request.workload.attention].title
        return Rejection(pool.name, "AttentionNotSupported", f"no kernels of {title}", "set training.attention to auto")
    if not candidates.variants:
        return _build_precision_rejection(request, pool)
    if not within.any():
        return _build_gpu_count_rejection(request, pool)
    if not (within & candidates.fits).any():
        return _build_memory_rejection(request, candidates, within)
    for quantity in request.objective_record.needed_quantities:
        if not quantity.is_known(pool):
            return Rejection(pool.name, *quantity.if_unknown)
    mask = keep_sensible_plans(request, candidates, within & candidates.fits & candidates.is_within_bound(request))
    return choose_plan(request, candidates, mask) or _build_bound_rejection(
        request, candidates, within & candidates.fits
    )


def choose_plan(request: Request, candidates: CandidatePlans, eligible: Mask) -> Choice | None:
    """Return the recommended plan among the eligible rows, (n,). If no eligible row has a known value, return None."""
    value = candidates.objective_value(request)
    eligible = eligible & np.isfinite(value)
    if not eligible.any():
        return None
    if request.objective_record.fewest_gpus:
        eligible = eligible & (candidates.gpus == candidates.gpus[eligible].min())
    rows = np.flatnonzero(eligible)
    best = float(value[rows].min())
    near = rows[value[rows] <= best * np.exp(uncertainty.MOST_TIED)]
    table = _ComparedColumns.from_candidates(request, candidates.take(near))
    of_each_count = _choose_for_each_count(table, candidates.gpus[near])
    chosen, decision = _choose_among(table, np.array([*of_each_count]), np.arange(len(near)))
    decision = of_each_count[chosen] if decision == "best" else decision
    row = int(near[chosen])
    tied = _find_tied_rows(request, candidates, near, row)
    details = DetailedForecasts.from_rows(candidates, tied)
    errors = details.errors()
    place = int(np.flatnonzero(tied == row)[0])
    widths = uncertainty.tie_width_on_pool(
        errors, errors.take(np.array([0])), _has_other_replica_count(candidates, tied)
    )
    return Choice(
        candidates=candidates,
        eligible=eligible,
        row=row,
        value=float(value[row]),
        best=best,
        counterpart=float(table.counterpart[chosen]),
        preference=tuple(int(column[chosen]) for column in table.simplicity),
        ties=int(np.count_nonzero(value[tied] <= best * np.exp(widths))) - 1 if best > 0 else len(tied) - 1,
        details=details,
        place=place,
        errors=errors.take(np.array([place])),
        slow=float(table.slow[chosen]),
        decision=decision,
    )


@dataclass(frozen=True, slots=True)
class _ComparedColumns:
    """Columns by which n plans are compared, (n,) each."""

    value: Floats
    """Amount of the quantity that the objective minimises."""
    slow: Floats
    """The same amount as `value`, on a slow host."""
    tight: Mask
    cost: Floats
    """Price of the plan for the samples of a step; NaN if it is unknown."""
    seconds: Floats
    """Seconds for the samples of a step."""
    counterpart: Floats
    """Cost if the objective minimises time, otherwise time."""
    simplicity: tuple[Ints, ...]
    """`simplicity_sort_keys` of the plans."""

    @classmethod
    def from_candidates(cls, request: Request, candidates: CandidatePlans) -> _ComparedColumns:
        value, counterpart = candidates.objective_value(request), candidates.counterpart_value(request)
        cost, seconds = (
            (value, counterpart) if request.objective_record.quantity.grows_with_gpus else (counterpart, value)
        )
        slow = _objective_value_on_slow_host(candidates, request)
        return cls(value, slow, candidates.tight, cost, seconds, counterpart, simplicity_sort_keys(candidates))

    @classmethod
    def from_choices(cls, request: Request, choices: Sequence[Choice]) -> _ComparedColumns:
        """Return the columns of choices, one row each. If their prices are in several currencies, costs are unknown."""
        columns = ((item.value, item.slow, float(item.is_tight), item.counterpart) for item in choices)
        value, slow, tight, counterpart = np.array(list(columns)).T
        cost, seconds = (
            (value, counterpart) if request.objective_record.quantity.grows_with_gpus else (counterpart, value)
        )
        if len({item.candidates.pool.currency for item in choices}) > 1:
            cost = np.full(len(choices), np.nan)
        simplicity = tuple(np.array([item.preference for item in choices]).T)
        return cls(value, slow, tight > 0, cost, seconds, counterpart, simplicity)


def _choose_for_each_count(table: _ComparedColumns, gpus: Ints) -> dict[int, Decision]:
    """Return the chosen plan for each number of GPUs, as a mapping from its index to the rule that decided.

    Plans with other numbers of GPUs do not matter for the choice. `gpus` is the number of GPUs of each plan, (n,).
    """
    groups = (np.flatnonzero(gpus == count) for count in np.unique(gpus))
    return dict(_choose_among(table, members) for members in groups)


def _choose_among(table: _ComparedColumns, indices: Ints, others: Ints | None = None) -> tuple[int, Decision]:
    """Return the index of the plan that the rules of the module recommend, and the rule that decided.

    Args:
        table: the plans.
        indices: indices of the plans to choose from.
        others: indices of the plans to compare with. If None, compare the plans in `indices` with each other.
    """
    others = indices if others is None else others
    near = _keep_with_spare_memory(table, _keep_near_best(table, indices, others))
    decisions: list[tuple[Decision, Ints]] = [("memory", near)]
    rivals = np.union1d(near, _keep_with_spare_memory(table, _keep_near_best(table, others, others)))
    decisions.append(("host", near := _keep_fast_on_slow_host(table, near, rivals)))
    decisions.append(("price", near := _keep_near_least_amount(table.cost, near, _SAME_COST)))
    decisions.append(("time", near := _keep_near_least_amount(table.seconds, near, MOST_BEHIND)))
    order = np.lexsort((table.slow[near], table.value[near], *(column[near] for column in table.simplicity[::-1])))
    chosen = int(near[order[0]])
    faster = _find_faster_for_no_more(table, indices, chosen)
    if len(faster):
        chosen = int(faster[np.argmin(table.seconds[faster])])
        decisions.append(("time", faster))
    cheaper = _find_cheaper_and_as_fast(table, indices, others, chosen)
    if len(cheaper):
        chosen = int(cheaper[np.argmin(table.cost[cheaper])])
        decisions.append(("price", cheaper))
    first = indices[np.argmin(table.value[indices])]
    if table.value[chosen] <= table.value[first]:
        return chosen, "best"
    return chosen, next((reason for reason, kept in decisions if first not in kept), "simplicity")


def _keep_near_best(table: _ComparedColumns, indices: Ints, others: Ints) -> Ints:
    """Return the plans in `indices` that are near the best plan in `others`.

    A plan is near the best plan if its value on a usual host is at most `MOST_BEHIND` times the best. It is also near
    if its value is at most `uncertainty.MOST_TIED` behind (a logarithm) and no worse than the best plan's on a slow
    host. A plan is not near if one plan in `others` beats it by more than `MOST_BEHIND` on both hosts. If no plan is
    near, return the plan with the best forecast.
    """
    best = others[np.argmin(table.value[others])]
    value, most = table.value[indices], table.value[best] * np.exp(uncertainty.MOST_TIED)
    is_better_on_slow_host = (value <= most) & (table.slow[indices] <= table.slow[best])
    is_near = (value <= table.value[best] * MOST_BEHIND) | is_better_on_slow_host
    near = indices[is_near & ~_is_worse_on_both_hosts(table, indices, others)]
    return np.asarray(near if len(near) else indices[[np.argmin(value)]])


def _is_worse_on_both_hosts(table: _ComparedColumns, indices: Ints, others: Ints) -> Mask:
    """Return which plans in `indices` one plan in `others` clearly beats both on a usual host and on a slow host."""
    order = others[np.argsort(table.value[others], kind="stable")]
    better = np.searchsorted(table.value[order], table.value[indices] / MOST_BEHIND, side="left")
    least_slow = np.append(np.inf, np.minimum.accumulate(table.slow[order]))
    return np.asarray(least_slow[better] < table.slow[indices] / MOST_BEHIND)


def _keep_with_spare_memory(table: _ComparedColumns, indices: Ints) -> Ints:
    """Return the plans in `indices` that have memory to spare, or all of them if there is no such plan."""
    roomy = indices[~table.tight[indices]]
    return roomy if len(roomy) else indices


def _keep_fast_on_slow_host(table: _ComparedColumns, indices: Ints, rivals: Ints) -> Ints:
    """Return the plans in `indices` that are at most `MOST_BEHIND` behind the best of `rivals` on a slow host.

    If there is no such plan, return the plan with the best forecast.
    """
    fast = indices[table.slow[indices] <= table.slow[rivals].min() * MOST_BEHIND]
    return np.asarray(fast if len(fast) else indices[[np.argmin(table.value[indices])]])


def _find_faster_for_no_more(table: _ComparedColumns, indices: Ints, chosen: int) -> Ints:
    """Return the near-best plans that are clearly faster than the chosen plan, cost no more and have memory to spare.

    "Clearly" means by more than the largest tie. Such a gain is worth the risk of a few percent that a slow host may
    cost.
    """
    is_near = table.value[indices] <= table.value[indices].min() * MOST_BEHIND
    is_faster = table.seconds[indices] * np.exp(uncertainty.MOST_TIED) < table.seconds[chosen]
    is_no_dearer = table.cost[indices] <= table.cost[chosen]
    return np.asarray(indices[is_near & is_faster & is_no_dearer & ~table.tight[indices]])


def _find_cheaper_and_as_fast(table: _ComparedColumns, indices: Ints, others: Ints, chosen: int) -> Ints:
    """Return those plans in `indices` that are clearly cheaper than the chosen plan, both on usual and on slow hosts.

    These plans are at most a factor `MOST_DEARER` behind the best plan in `others`. If the chosen plan has memory to
    spare, these plans have memory to spare too. A certain saving is worth more than avoiding a wait that only a slow
    host would cause.
    """
    is_best = table.value[indices] <= table.value[others].min() * MOST_DEARER
    is_as_roomy = ~table.tight[indices] | table.tight[chosen]
    is_cheaper = table.cost[indices] * MOST_DEARER < table.cost[chosen]
    on_slow_host = table.cost[indices] * table.slow[indices] * table.value[chosen]
    is_cheaper &= on_slow_host * MOST_DEARER < table.cost[chosen] * table.slow[chosen] * table.value[indices]
    return np.asarray(indices[is_best & is_as_roomy & is_cheaper])


def _keep_near_least_amount(amounts: Floats, indices: Ints, ratio: float) -> Ints:
    """Return the indices whose amount is at most `ratio` times the least amount, or all if any amount is unknown."""
    some = amounts[indices]
    return np.asarray(indices[some <= some.min() * ratio]) if np.all(np.isfinite(some)) else indices


def _find_tied_rows(request: Request, candidates: CandidatePlans, rows: Ints, row: int) -> Ints:
    """Return the best of `rows` by the objective, at most `MAX_TIED`, best first, with `row` added if it is missing."""
    some = candidates.take(rows)
    ordered = rows[np.lexsort((some.step_s, some.objective_value(request)))][:MAX_TIED]
    return ordered if row in ordered else np.append(ordered, row)


def _has_other_replica_count(candidates: CandidatePlans, rows: Ints) -> Mask:
    """Return which plans, (k,), equal the first plan except in data parallelism and gradient accumulation."""
    plans, variant = candidates.plans.take(rows), candidates.variant[rows]
    columns = [getattr(plans, item.name) for item in fields(Plans) if item.name not in _REPLICAS]
    return np.asarray(np.all([column == column[0] for column in (*columns, variant)], axis=0))


_REPLICAS = ("data", "gradient_accumulation")
"""Plan columns that change how often a GPU repeats its work."""


def _objective_value_on_slow_host(candidates: CandidatePlans, request: Request) -> Floats:
    """Return the time or cost that the objective minimises, (n,), as forecast for a slow host CPU."""
    return np.asarray(
        candidates.objective_value(request)
        * uncertainty.slow_host_step_s(candidates.step_s, candidates.launch_s)
        / candidates.step_s
    )


def simplicity_sort_keys(candidates: CandidatePlans) -> tuple[Ints, ...]:
    """Return sort keys, (n,) each, that put the plans a practitioner would try first at the beginning.

    The most important key is the first one.

    The keys are: the variant of the job (its own batch and precision first); the most complex way of splitting (none,
    ZeRO, tensor, context or expert, pipeline); the number of degrees above one and of schedules other than 1F1B;
    recomputation; the ZeRO stage; the ranks of a replica; the GPUs.
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
"""Largest share of a GPU's memory for which a model, with its training state and one sample, is not split."""
THIRD = 1 / 3
"""Largest share of a GPU's memory for which the training state of a model is not split."""


def keep_sensible_plans(request: Request, candidates: CandidatePlans, eligible: Mask) -> Mask:
    """Return which of the eligible plans, (n,), a practitioner would use without a special reason.

    - A model that takes at most `HALF` of a GPU's memory is not split if every GPU has a sample. - A model that takes
    at most `THIRD` is not sharded by ZeRO where a plan without ZeRO is eligible. - A replica is split in few ways
    (`is_split_too_far`). - Tensor parallelism stays on the GPUs that the fastest link joins, and on at most
    `MOST_TENSOR` of them. - A plan that the user has measured is not run with recomputation instead
    (`is_measured_plan_with_recomputation`).

    A rule that would leave no plan is skipped. If the user sets the plan, no rule applies. If the user limits tensor
    parallelism, that limit replaces the rules on tensor parallelism.
    """
    if request.plan is not None:
        return eligible
    plans = candidates.plans
    split = (plans.tensor > 1) | (plans.pipeline > 1) | (plans.context > 1) | (plans.expert > 1)
    masks = [~(split & _fits_unsplit(candidates, HALF))]
    if np.any(eligible & ~split & (plans.data > 1) & (plans.zero_stage == 0)):
        masks.append(~((plans.zero_stage > 0) & _fits_unsplit(candidates, THIRD)))
    masks.append(~is_split_too_far(candidates))
    masks.append(~is_measured_plan_with_recomputation(candidates, eligible))
    if request.constraints.max_tensor is None:
        masks += [plans.tensor <= count_gpus_on_fastest_link(candidates), plans.tensor <= MOST_TENSOR]
    for mask in masks:
        narrowed = eligible & mask
        eligible = narrowed if narrowed.any() else eligible
    return eligible


# Of the 3,460 measured steps at hand three use more, all over a network between nodes.
MOST_TENSOR = 8
"""Most ranks that split a matrix product, even where NVLink joins the GPUs of a whole rack."""


def count_gpus_on_fastest_link(candidates: CandidatePlans) -> int:
    """Return how many GPUs the fastest link of a pool connects: those of an island, a node or an NVLink domain."""
    intra = candidates.pool.intra
    return intra.domain if intra.beyond else candidates.pool.domain


# Of the 3,460 measured steps at hand, 32 split a replica in three ways, all on at least 32 GPUs with NVLink. So no
# measurement supports a gain that is forecast for a smaller replica split in three ways.
MOST_WAYS = 2
"""Most ways, among tensor, pipeline and context parallelism, to split a replica that is small or has no NVLink."""
LEAST_SPLIT = 32
"""Least GPUs of a replica with NVLink that may be split in more ways than `MOST_WAYS`."""


def is_split_too_far(candidates: CandidatePlans) -> Mask:
    """Return which plans, (n,), split a replica in more ways than `MOST_WAYS` although that limit applies to them.

    The limit applies to replicas of fewer than `LEAST_SPLIT` GPUs and to pools without NVLink. On a pool without
    NVLink, ZeRO counts as one of the ways if a replica fits into a node.
    """
    plans, pool = candidates.plans, candidates.pool
    degrees = (plans.tensor, plans.pipeline, plans.context)
    replica, ways = math.prod(degrees), sum((degree > 1).astype(np.int8) for degree in degrees)
    has_bus = pool.intra.kind != "nvlink"
    # No measured run shards a replica that tensor parallelism and a pipeline split over a bus.
    if has_bus:
        ways = ways + ((replica <= pool.gpus_per_node) & (plans.zero_stage > 0))
    return np.asarray(((replica < LEAST_SPLIT) | has_bus) & (ways > MOST_WAYS))


def is_measured_plan_with_recomputation(candidates: CandidatePlans, eligible: Mask) -> Mask:
    """Return which plans, (n,), equal a plan that the user measured except for added recomputation.

    Only measured plans count that do not recompute, are eligible and have memory to spare. Recomputation can only make
    such a plan slower. Its forecast may still be faster, because plans with other recomputation take over only a part
    of the measured plan's error.
    """
    plans, mask = candidates.plans, np.zeros(len(candidates), dtype=bool)
    others = [item.name for item in fields(Plans) if item.name != "checkpointing"]
    for run in candidates.pool.own.runs:
        measured = Plans.from_plans(run.plan)
        if measured.checkpointing[0] != 0:
            continue
        same = np.all([getattr(plans, name) == getattr(measured, name)[0] for name in others], axis=0)
        if np.any(same & eligible & ~candidates.tight & (plans.checkpointing == 0)):
            mask |= same & (plans.checkpointing != 0)
    return mask


def _fits_unsplit(candidates: CandidatePlans, fraction: float) -> Mask:
    """Return for which plans, (n,), the job would fit `fraction` of a GPU's memory without a split.

    The plan must also have a sample for every GPU.
    """
    most = fraction * candidates.pool.gpu.memory_bytes
    unsplit = [_UNSPLIT_BYTES.get(workload, partial(_unsplit_job_bytes, workload)) for workload in candidates.variants]
    fits = np.array(unsplit) <= most
    return np.asarray(fits[candidates.variant] & (candidates.gpus <= candidates.batch))


_UNSPLIT_BYTES: Memo[float] = Memo(64)


def _unsplit_job_bytes(workload: Workload) -> float:
    """Return the bytes of training state and activations of a job that is not split.

    The micro-batch is the job's own, or else one sample. If the model's own code spreads it over all ranks, return
    infinity.
    """
    if zoo.has_row_shardable_weights(workload.model):
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
    """Return the key by which the choices of pools are sorted, the best choice first."""
    few = choice.gpus if request.objective_record.fewest_gpus else 0
    return few, choice.value, choice.gpus, choice.candidates.pool.name


@dataclass(frozen=True, slots=True)
class Ranking:
    """The choices of all pools: the recommended choice first, then the others in order of their values."""

    choices: tuple[Choice, ...]
    ties: int
    """Number of plans that tie with the recommended one within the forecast's uncertainty."""
    ratio: float
    """Value of the recommended plan over the lowest value among the plans that tie with it."""
    is_tied: tuple[bool, ...]
    """Whether each choice ties with the recommended one within the forecast's uncertainty."""
    decision: Decision = "best"
    """Rule that preferred the recommended plan to the best forecast."""


def rank_choices(request: Request, choices: Iterable[Choice]) -> Ranking:
    """Return the ranking of choices: the recommended choice first, then the others by value.

    The rules of the module select the recommended choice. If the objective is to use the fewest GPUs, they select among
    the choices with the fewest GPUs.
    """
    ranked = sorted(choices, key=lambda choice: _ranking_key(request, choice))
    if not ranked:
        return Ranking((), 0, 1.0, ())
    few = [item for item in ranked if _ranking_key(request, item)[0] == _ranking_key(request, ranked[0])[0]]
    first = min(few, key=lambda item: item.best)
    chosen, decision = _recommend(request, few)
    ordered = (chosen, *(choice for choice in ranked if choice is not chosen))
    ratio = chosen.value / first.best if first.best > 0 else 1.0
    is_tied = tuple(choice is chosen or _are_tied(request, chosen, choice) for choice in ordered)
    others = sum(_is_tied_with_best(request, first, choice) for choice in ranked if choice is not first)
    return Ranking(ordered, others + first.ties, ratio, is_tied, decision)


def recommend_choice(request: Request, choices: Iterable[Choice]) -> Choice:
    """Return the choice that the rules of the module recommend. There must be at least one choice."""
    ranked = sorted(choices, key=lambda choice: _ranking_key(request, choice))
    few = _ranking_key(request, ranked[0])[0]
    return _recommend(request, [item for item in ranked if _ranking_key(request, item)[0] == few])[0]


def _recommend(request: Request, ranked: Sequence[Choice]) -> tuple[Choice, Decision]:
    """Return the recommended one of the pools' choices, and the rule that decided.

    A pool takes part if the value of its choice is at most `MOST_BEHIND` times the best forecast of any plan. The pool
    with that forecast always takes part. If it is recommended, the rule is the one that chose its plan within the pool.
    """
    first = min(ranked, key=lambda item: item.best)
    table = _ComparedColumns.from_choices(request, ranked)
    near = np.array([item is first or item.value <= first.best * MOST_BEHIND for item in ranked])
    index, decision = _choose_among(table, np.flatnonzero(near))
    return ranked[index], decision if ranked[index] is not first else ranked[index].decision


def _is_tied_with_best(request: Request, best: Choice, choice: Choice) -> bool:
    """Return whether a choice ties with the best plan of another pool, whose choice is `best`."""
    same = _ranking_key(request, best)[0] == _ranking_key(request, choice)[0]
    return same and choice.value <= best.best * _tie_ratio(best, choice)


def _tie_ratio(first: Choice, second: Choice) -> float:
    """Return the ratio of two pools' values up to which their choices tie."""
    return float(np.exp(uncertainty.tie_width_between_pools(first.errors, second.errors)[0]))


def _are_tied(request: Request, first: Choice, second: Choice) -> bool:
    """Return whether the choices of two pools tie within the forecast's uncertainty."""
    best, behind = sorted((first, second), key=lambda choice: _ranking_key(request, choice))
    if _ranking_key(request, best)[0] != _ranking_key(request, behind)[0] or best.value <= 0:
        return False
    return behind.value <= best.value * _tie_ratio(best, behind)


def list_usable_precisions(request: Request, pool: Pool) -> list[Precision]:
    """Return the precisions that the pool's GPU and the job's framework support, the most common first."""
    framework = request.workload.framework
    supported = search.find_framework_features(framework).precisions if framework else PRECISIONS
    usual: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    return [name for name in usual if pool.gpu.supports(name) and name in supported]


def _build_precision_rejection(request: Request, pool: Pool) -> Rejection:
    other = next(iter(list_usable_precisions(request, pool)), "another precision")
    asked = " or ".join(name.upper() for name in dict.fromkeys((request.workload.precision, *request.precisions)))
    return Rejection(pool.name, "PrecisionNotSupported", f"no {asked} units", f"train in {other}")


def _build_gpu_count_rejection(request: Request, pool: Pool) -> Rejection:
    """Return the rejection of a pool on which no plan meets the job's limits on the number of GPUs."""
    batch, limits = request.workload.global_batch, request.constraints
    most = min(
        pool.max_gpus,
        limits.max_gpus or pool.max_gpus,
        limits.max_nodes * pool.gpus_per_node if limits.max_nodes else pool.max_gpus,
    )
    if pool.max_gpus == 0:
        return Rejection(pool.name, "EmptyPool", "the pool has no node", "raise GPUPool.maxNodes")
    if limits.gpus is not None and limits.gpus > most:
        remedy = f"ask for at most {most}" if most == pool.max_gpus else "raise maxGpus or maxNodes"
        return Rejection(pool.name, "TooFewGpus", f"{limits.gpus} GPUs asked, {most} may be used", remedy)
    size = pool.gpus_per_node
    if (
        limits.gpus is not None
        and limits.gpus > size
        and 2 * count_gpus_on_each_node(np.array(limits.gpus), pool) < size
    ):
        message = f"{limits.gpus} GPUs fill neither nodes of {size} nor halves of them evenly"
        return Rejection(pool.name, "UnevenNodes", message, f"ask for a multiple of {size if size % 2 else size // 2}")
    count = "no GPU count" if limits.gpus is None else f"no split of {limits.gpus} GPUs"
    message = f"{count} divides batch {batch} and the model"
    other = "" if limits.gpus is None else "ask for another GPU count, or "
    return Rejection(pool.name, "NoDivisiblePlan", message, f"{other}choose a global batch with more divisors")


def _build_memory_rejection(request: Request, candidates: CandidatePlans, within: Mask) -> Rejection:
    """Return the rejection of a pool with too little memory, with the largest part of the smallest plan's memory."""
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
"""Remedies by the purpose that uses most memory. `samples` means activations of models without tokens."""


def _build_bound_rejection(request: Request, candidates: CandidatePlans, fitting: Mask) -> Rejection:
    """Return the rejection of a pool on which every plan misses the deadline or exceeds the budget."""
    target = request.target_step_s
    if target is not None and (not request.objective_record.bound or not _meets_target(request, candidates, fitting)):
        least, end = candidates.least_step_s(request, fitting), ""
        if request.limits_at == "upperBound":
            end = " at the upper end of its range"
        message = f"the fastest plan takes {least:,.3g} s a step{end}, not {target:,.3g} s"
        return Rejection(
            candidates.pool.name, "TargetMissed", message, f"allow {round_up_to_three_digits(least):g} s a step"
        )
    if request.objective_record.bound == "budget" and request.budget is not None:
        least = float(candidates.cost_to_finish[fitting].min())
        message = f"the cheapest plan costs {least:,.0f} {request.budget.currency}, not {request.budget.amount:,.0f}"
        return Rejection(candidates.pool.name, "OverBudget", message, f"raise the budget to {least:,.0f}")
    least = float(candidates.finish_s[fitting].min())
    message = f"the fastest plan takes {format_time(least)}, not {format_time(request.deadline_s or 0)}"
    return Rejection(candidates.pool.name, "DeadlineMissed", message, f"allow {np.ceil(least):,.0f} s")


def _meets_target(request: Request, candidates: CandidatePlans, fitting: Mask) -> bool:
    """Return whether any plan that fits meets the target step time. Deadline and budget are ignored."""
    alone = replace(request, objective="time", deadline_s=None, budget=None)
    return bool((fitting & candidates.is_within_bound(alone)).any())


def format_time(seconds: float) -> str:
    """Return a time as text in hours if it is at least an hour, else in minutes or in seconds."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"
