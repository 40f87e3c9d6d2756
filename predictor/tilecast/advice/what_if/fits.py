"""Find the smallest change of one input that gives a rejected pool an offer, by trying every change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tilecast import search
from tilecast.advice.choose import Choice, choose_or_reject, list_usable_precisions
from tilecast.advice.pricing import CandidatePlans, find_candidates
from tilecast.advice.values import Change, Rejection, Request, round_up_to_three_digits
from tilecast.advice.what_if.changes import (
    FURTHER,
    apply_change,
    bisect_integers,
    describe_larger_memory,
    describe_node_count,
    describe_pool_growth,
    list_pool_sizes,
    with_pool_gpus,
)
from tilecast.advice.what_if.wins import find_winning_price
from tilecast.cost import price_of_1000_steps
from tilecast.frameworks import FRAMEWORKS
from tilecast.hardware import Pool, find_gpu, list_gpu_names
from tilecast.recomputation import CHECKPOINTING
from tilecast.search import NO_LIMITS, PlanLimits
from tilecast.spec import PREFERENCE_FRAMEWORKS, PartialPlan, Plans, Workload

MAX_COUNTS = 3
"""Most GPU counts, the largest first, on which a changed job is tried."""


def add_remedies(
    request: Request,
    candidates: Sequence[CandidatePlans],
    outcomes: Sequence[Choice | Rejection],
    choices: tuple[Choice, ...],
) -> list[Rejection]:
    """Return the rejections among the outcomes, each with the first change that would give its pool an offer.

    A rejection that no change removes stays without one.

    Args:
        request: the job.
        candidates: the plans of each pool.
        outcomes: the choice or the rejection of each pool.
        choices: the choices among the outcomes, the recommended one first.
    """
    return [
        _add_remedy(request, each, outcome, choices)
        for each, outcome in zip(candidates, outcomes, strict=True)
        if isinstance(outcome, Rejection)
    ]


def _add_remedy(
    request: Request, candidates: CandidatePlans, rejection: Rejection, others: tuple[Choice, ...]
) -> Rejection:
    """Return the rejection with the first change that would give the pool an offer.

    If no single change is enough, the remedy may name a first change and the reason that would then reject the pool.
    """
    if rejection.code == "PriceUnknown":
        change = _find_missing_price(request, candidates, others)
        return rejection if change is None else replace(rejection, remedy=change.text, change=change)
    remedy = rejection.remedy
    if rejection.code not in _CHANGES_BY_CODE:
        return rejection
    for change in _CHANGES_BY_CODE[rejection.code](request, candidates, rejection):
        outcome = _find_rejection_after_change(change, request, candidates)
        if outcome is None:
            change = _add_step_and_price(_reduce_change(change, request, candidates), request, candidates)
            return replace(rejection, remedy=change.text, change=change)
        if outcome.code != rejection.code and remedy is rejection.remedy:
            remedy = f"{change.text}, and then: {outcome.message}"
    return replace(rejection, remedy=remedy)


def _add_step_and_price(change: Change, request: Request, candidates: CandidatePlans) -> Change:
    """Return the change with the step time and the price of the plan that would be recommended after it."""
    if change.input == "pool.gpu.memoryGib":  # no such GPU has to exist, so it has neither speed nor price
        return change
    after, pool = apply_change(change, request, candidates.pool)
    outcome: Choice | Rejection | None = None
    if change.input in _MASKS:
        outcome = choose_or_reject(after, candidates)
    else:
        for count in _list_gpu_counts_to_try(after, pool):
            outcome = choose_or_reject(after, _find_executable_plans(after, pool, PlanLimits(gpus=count)))
            if isinstance(outcome, Choice):
                break
    if not isinstance(outcome, Choice):
        return change
    chosen = outcome.candidates.take(np.array([outcome.row]))
    seconds, hourly = float(chosen.step_s[0]), float(chosen.hourly[0])
    cost = None if math.isnan(hourly) else price_of_1000_steps(hourly, seconds)
    return replace(change, step_s=seconds, cost_per_1000_steps=cost, currency=pool.currency)


def _find_executable_plans(request: Request, pool: Pool, limits: PlanLimits) -> CandidatePlans:
    """Return the plans of a pool. Those that the job's framework cannot execute are marked as not fitting."""
    candidates, framework = find_candidates(request, pool, limits), request.workload.framework
    if framework is None:
        return candidates
    is_executable = search.find_framework_features(framework).executes(candidates.plans)
    return replace(candidates, fits=candidates.fits & is_executable)


def _list_gpu_counts_to_try(request: Request, pool: Pool) -> list[int]:
    """Return the GPU counts to try for a job after a change, the largest first."""
    limits = request.constraints
    if limits.gpus is not None:
        return [limits.gpus]
    most = min(pool.max_gpus, limits.max_gpus or pool.max_gpus, (limits.max_nodes or 2**40) * pool.gpus_per_node)
    return _list_gpu_counts(pool, most)[: -MAX_COUNTS - 1 : -1]


def _reduce_change(change: Change, request: Request, candidates: CandidatePlans) -> Change:
    """Return a helpful change with its value moved towards the present value as far as the change still helps.

    The value of inputs in `_BISECTED` is found by bisection between the present value and the helpful value.
    """
    if change.input not in _BISECTED:
        return change
    present, grain, text = _BISECTED[change.input]
    start = present(request, candidates.pool) // grain

    def with_value(value: int) -> Change:
        return replace(change, value=value * grain, text=text(value * grain, candidates.pool))

    def is_helpful(value: int) -> bool:
        return _find_rejection_after_change(with_value(value), request, candidates) is None

    return with_value(bisect_integers(is_helpful, start, int(change.value) // grain))


def _describe_sequence_length(length: int, pool: Pool) -> str:
    return f"sequences of {length} tokens"


TOKEN_MULTIPLE = 64
"""Suggested sequence lengths are multiples of this number of tokens."""


_BISECTED: Mapping[str, tuple[Callable[[Request, Pool], int], int, Callable[[int, Pool], str]]] = {
    "pool.maxNodes": (lambda request, pool: pool.max_nodes, 1, describe_node_count),
    "training.sequenceLength": (
        lambda request, pool: request.workload.sequence_length,
        TOKEN_MULTIPLE,
        _describe_sequence_length,
    ),
}
"""For each bisected input: functions for its present value and its text, and the multiple to round its values to."""


def _find_rejection_after_change(change: Change, request: Request, candidates: CandidatePlans) -> Rejection | None:
    """Return the rejection that a pool gets after a change. If the change gives the pool an offer, return None."""
    after, pool = apply_change(change, request, candidates.pool)
    if change.input in _MASKS:
        return _get_rejection_or_none(choose_or_reject(after, candidates))
    limits = after.constraints
    needs_only_to_fit, first = _offers_every_fitting_plan(after, pool), None

    def rejection_with(search_limits: PlanLimits) -> Rejection | None:
        smaller = _find_executable_plans(after, pool, search_limits)
        fits = needs_only_to_fit and (smaller.within(limits) & smaller.fits).any()
        return None if fits else _get_rejection_or_none(choose_or_reject(after, smaller))

    for count in _list_gpu_counts_to_try(after, pool):
        outcome = rejection_with(PlanLimits(gpus=count))
        if outcome is None:
            return None
        first = first or outcome
    if first is not None and first.code != "NoDivisiblePlan":
        return first
    return rejection_with(NO_LIMITS)


def _get_rejection_or_none(outcome: Choice | Rejection) -> Rejection | None:
    return outcome if isinstance(outcome, Rejection) else None


def _offers_every_fitting_plan(request: Request, pool: Pool) -> bool:
    """Return whether every plan that fits the pool gives an offer.

    That is true if no plan is stated, the pool is allowed, no quantity that the objective needs is unknown, and time
    and cost have no limits.
    """
    limits = request.constraints
    allowed = not limits.allowed_pools or pool.name in limits.allowed_pools
    known = all(quantity.is_known(pool) for quantity in request.objective_record.needed_quantities)
    return (
        request.plan is None
        and allowed
        and known
        and not request.is_bounded
        and (limits.allow_sharing or not pool.gpu.mig)
    )


def _list_gpu_counts(pool: Pool, limit: int) -> list[int]:
    """Return GPU counts of a pool up to `limit`, ascending: divisors of a node, powers of two nodes, and all nodes."""
    nodes = {1 << power for power in range(pool.max_nodes.bit_length())} | {limit // pool.gpus_per_node}
    every = {*search.divisors(pool.gpus_per_node), *(count * pool.gpus_per_node for count in nodes)}
    return sorted(count for count in every if 0 < count <= min(limit, pool.max_gpus))


_MASKS = (
    "constraints.allowedPools",
    "constraints.allowSharing",
    "constraints.maxGpus",
    "constraints.maxNodes",
    "constraints.maxTensorParallel",
    "deadlineSeconds",
    "budget.amount",
    "targetStepSeconds",
)
"""Inputs that only select among plans that are already priced."""


def _suggest_allowing_pool(request: Request, candidates: CandidatePlans, rejection: Rejection) -> Iterator[Change]:
    yield Change(
        "constraints.allowedPools", candidates.pool.name, "fits", f"add {candidates.pool.name} to allowedPools"
    )


def _suggest_sharing(request: Request, candidates: CandidatePlans, rejection: Rejection) -> Iterator[Change]:
    yield Change("constraints.allowSharing", "true", "fits", "set constraints.allowSharing")


def _suggest_precisions(request: Request, candidates: CandidatePlans, rejection: Rejection) -> Iterator[Change]:
    for name in list_usable_precisions(request, candidates.pool):
        yield Change("training.precision", name, "fits", f"train in {name}")


def _suggest_nodes(request: Request, candidates: CandidatePlans, rejection: Rejection) -> Iterator[Change]:
    for nodes in (1, 2, 4, 8, 16, 32):
        yield Change("pool.maxNodes", nodes, "fits", describe_node_count(nodes, candidates.pool))


def _suggest_gpu_counts(request: Request, candidates: CandidatePlans, rejection: Rejection) -> Iterator[Change]:
    """Yield changes to other GPU counts, the nearest first, then to larger pools and other global batches."""
    asked, limits = request.constraints.gpus, request.constraints
    if asked is not None:
        possible = _list_gpu_counts(candidates.pool, limits.max_gpus or candidates.pool.max_gpus)
        for count in sorted(possible, key=lambda count: (abs(count - asked), count))[:8]:
            yield Change("constraints.gpus", count, "fits", f"ask for {count} GPUs")
        wide = with_pool_gpus(candidates.pool, asked)
        if asked == wide.max_gpus and candidates.pool.is_partial_node:
            yield describe_pool_growth(candidates.pool, asked, "fits")
        elif asked == wide.max_gpus > candidates.pool.max_gpus:
            yield Change("pool.maxNodes", wide.max_nodes, "fits", describe_node_count(wide.max_nodes, candidates.pool))
    yield from _suggest_batches(request, candidates, rejection)


def _suggest_batches(request: Request, candidates: CandidatePlans, rejection: Rejection) -> Iterator[Change]:
    """Yield changes to global batches that divide evenly over the job's GPUs, or over a divisor of their number.

    The nearest to the job's own batch comes first.
    """
    own, gpus = request.workload.global_batch, request.constraints.gpus or 1
    micro = request.workload.micro_batch or 1
    multiples = {micro * part * max(1, round(own / (micro * part))) for part in search.divisors(gpus)}
    for batch in sorted(multiples - {own}, key=lambda batch: (abs(batch - own), batch))[:8]:
        yield Change("training.globalBatchSize", batch, "fits", f"global batch {own} -> {batch}")


MUCH = 4.0
"""Ratio of needed to present GPU memory above which a pool may also grow by the factors `FAR`."""
FAR = (16, 32, 64)


def _suggest_memory_savings(request: Request, candidates: CandidatePlans, rejection: Rejection) -> Iterator[Change]:
    """Yield changes that reduce a job's memory per GPU, starting with the one that costs the user least."""
    yield from _suggest_looser_limits(request, candidates)
    yield from _suggest_frameworks(request)
    workload, pool, over = request.workload, candidates.pool, rejection.memory_bytes or 0.0
    yield from _suggest_smaller_settings(request)
    if workload.gradient_sync == "parameterServer":
        yield Change("training.gradientSync", "allReduce", "fits", "gradients summed by replicas, which may shard them")
    yield from _suggest_smaller_plans(request, pool, rejection)
    if workload.model.vocab and workload.training and not workload.fused_loss and workload.loss is None:
        yield Change("training.fusedLoss", 1, "fits", "a fused loss (training.fusedLoss)")
    if request.constraints.gpus is None and pool.is_partial_node:
        for gpus in list_pool_sizes(pool)[1:]:
            yield describe_pool_growth(pool, gpus, "fits")
    elif request.constraints.gpus is None:
        for times in FURTHER if over <= MUCH * pool.gpu.memory_bytes else (*FURTHER, *FAR):
            nodes = pool.max_nodes * times
            yield Change("pool.maxNodes", nodes, "fits", describe_node_count(nodes, pool))
    framework = workload.framework
    offloads = framework is None or "optimizer" in search.find_framework_features(framework).offload
    if workload.training and workload.offload == "none" and offloads:
        yield Change("training.offload", "optimizer", "fits", "optimizer states in the host's memory")
    if workload.samples_are_tokens and workload.model.trace is None:
        for length in (workload.sequence_length // part // TOKEN_MULTIPLE * TOKEN_MULTIPLE for part in (2, 4)):
            if length:
                yield Change("training.sequenceLength", length, "fits", _describe_sequence_length(length, pool))
    if over > 0 and any(over <= find_gpu(name).memory_bytes for name in list_gpu_names()):
        yield describe_larger_memory(pool, over)


def _suggest_smaller_settings(request: Request) -> Iterator[Change]:
    """Yield changes to settings of the job or its plan that need less memory than the present ones."""
    workload, plan = request.workload, request.plan
    stage = plan.zero_stage if plan is not None else None
    if stage is not None and workload.training and workload.gradient_sync == "allReduce":
        for higher in range(stage + 1, 4):
            yield Change("plan.zeroStage", higher, "fits", f"ZeRO stage {stage} -> {higher}")
    micro = (plan.micro_batch if plan is not None else None) or workload.micro_batch
    for size in search.divisors(micro)[-2::-1] if micro else []:
        if workload.global_batch % size == 0:
            yield Change("training.microBatchSize", size, "fits", f"micro-batch {micro} -> {size}")
    mode = (plan.checkpointing if plan is not None else None) or workload.checkpointing
    if mode is not None and workload.training:
        leaner = CHECKPOINTING[CHECKPOINTING.index(mode) + 1 :] if mode in CHECKPOINTING else CHECKPOINTING[-1:]
        for more in leaner:
            words = {"selective": "recompute attention (selective)", "full": "recompute every layer (full)"}[more]
            yield Change("training.activationCheckpointing", more, "fits", words)


def _suggest_smaller_plans(request: Request, pool: Pool, rejection: Rejection) -> Iterator[Change]:
    """Yield the change to a plan that fits on the same GPUs and differs in the fewest columns from the user's plan.

    If several plans differ in equally many columns, the fastest is taken. If no plan fits, nothing is yielded.
    """
    if request.plan is None or rejection.plan is None:
        return
    free = replace(request, plan=None)
    candidates = _find_executable_plans(free, pool, PlanLimits(gpus=rejection.plan.gpus))
    rows = np.flatnonzero(candidates.within(request.constraints) & candidates.fits)
    if not len(rows):
        return
    plans, own = candidates.plans.take(rows), Plans.from_plans(rejection.plan)
    changes = np.sum([getattr(plans, name) != getattr(own, name)[0] for name in _PLAN_COLUMNS], axis=0)
    plan = candidates.plans.row(int(rows[np.lexsort((candidates.step_s[rows], changes))[0]]))
    yield Change("plan", str(plan), "fits", f"{plan} instead")


_PLAN_COLUMNS = (
    *("data", "tensor", "pipeline", "context", "expert", "virtual_stages"),
    *("micro_batch", "zero_stage", "checkpointing"),
)
"""Columns in which a plan that fits may differ from the user's plan."""


def _suggest_frameworks(request: Request) -> Iterator[Change]:
    """Yield changes to other frameworks, which may shard more of the optimizer state, if the job names a framework."""
    workload, plan = request.workload, request.plan
    mode = (plan.checkpointing if plan is not None else None) or workload.checkpointing
    for name, abilities in search.FRAMEWORKS.items():
        if workload.gradient_sync != "allReduce" or (workload.bucket_mib and not FRAMEWORKS[name].has_buckets):
            continue
        runs = workload.precision in abilities.precisions and workload.offload in abilities.offload
        cells = FRAMEWORKS[name]
        runs = runs and (workload.loss is None or name in PREFERENCE_FRAMEWORKS)
        runs = runs and workload.pipeline_schedule in (None, *cells.schedules)
        runs = runs and (workload.pipeline_layout is None or cells.states_layouts)
        runs = runs and _can_split_stages(replace(workload, framework=name), request.plan)
        if workload.framework not in (None, name) and runs and (mode is None or abilities.recomputes(mode)):
            yield Change("training.framework", name, "fits", f"{name} instead of {workload.framework}")


def _can_split_stages(workload: Workload, plan: PartialPlan | None) -> bool:
    """Return whether the workload's framework can divide the layers into the pipeline stages of the user's plan."""
    if plan is None or plan.pipeline == 1:
        return True
    return search.has_full_stages(workload, plan.pipeline) and (
        plan.virtual_stages == 1 or search.has_equal_virtual_stages(workload, plan.pipeline, plan.virtual_stages)
    )


def _suggest_looser_limits(request: Request, candidates: CandidatePlans) -> Iterator[Change]:
    """Yield a change for each of the job's own limits that relaxes it just enough for a plan to fit."""
    limits, per_node = request.constraints, candidates.pool.gpus_per_node
    for name, count, key in (
        ("constraints.gpus", "gpus", candidates.gpus),
        ("constraints.maxGpus", "max_gpus", candidates.gpus),
        ("constraints.maxNodes", "max_nodes", -(-candidates.gpus // per_node)),
        ("constraints.maxTensorParallel", "max_tensor", candidates.plans.tensor),
    ):
        limit = getattr(limits, count)
        if limit is None:
            continue
        # The pool's plans are priced already, so a mask says which of them the other limits leave.
        others: dict[str, Any] = {count: None}
        fitting = candidates.within(replace(limits, **others)) & candidates.fits & candidates.is_within_bound(request)
        if fitting.any():
            needed = int(key[fitting].min())
            yield Change(name, needed, "fits", f"{name.partition('.')[2]} {limit} -> {needed}")


def _suggest_looser_bound(request: Request, candidates: CandidatePlans, rejection: Rejection) -> Iterator[Change]:
    """Yield a change to the deadline of the fastest plan that fits, or to the budget of the cheapest one."""
    fitting = candidates.within(request.constraints) & candidates.fits
    if request.objective_record.bound == "deadlineSeconds":
        needed = math.ceil(float(candidates.finish_s[fitting].min()))
        yield Change("deadlineSeconds", needed, "fits", f"deadlineSeconds {request.deadline_s or 0:.0f} -> {needed}")
    elif request.budget is not None:
        needed = math.ceil(float(candidates.cost_to_finish[fitting].min()))
        yield Change("budget.amount", needed, "fits", f"budget {request.budget.amount:,.0f} -> {needed:,}")


def _suggest_meeting_target(request: Request, candidates: CandidatePlans, rejection: Rejection) -> Iterator[Change]:
    """Yield changes to larger pools, then a change to the target step time that the fastest fitting plan meets."""
    pool, limits = candidates.pool, request.constraints
    if limits.gpus is None and limits.max_gpus is None and limits.max_nodes is None and not pool.is_partial_node:
        for times in FURTHER:
            nodes = pool.max_nodes * times
            yield Change("pool.maxNodes", nodes, "fits", describe_node_count(nodes, pool))
    needed = round_up_to_three_digits(candidates.least_step_s(request, candidates.within(limits) & candidates.fits))
    yield Change("targetStepSeconds", needed, "fits", f"targetStepSeconds {request.target_step_s:g} -> {needed:g}")


_CHANGES_BY_CODE = {
    "NotAllowed": _suggest_allowing_pool,
    "SharingNotAllowed": _suggest_sharing,
    "PrecisionNotSupported": _suggest_precisions,
    "EmptyPool": _suggest_nodes,
    "TooFewGpus": _suggest_gpu_counts,
    "UnevenNodes": _suggest_gpu_counts,
    "NoDivisiblePlan": _suggest_gpu_counts,
    "OutOfMemory": _suggest_memory_savings,
    "TensorParallelUnsupported": _suggest_memory_savings,
    "DeadlineMissed": _suggest_looser_bound,
    "OverBudget": _suggest_looser_bound,
    "TargetMissed": _suggest_meeting_target,
}
"""Functions that yield the changes to try, by the rejection's code. The least costly change comes first."""


def _find_missing_price(request: Request, candidates: CandidatePlans, others: tuple[Choice, ...]) -> Change | None:
    """Return the change that gives a pool a price low enough to be recommended.

    If no other pool has a plan, any price is enough. If no price helps, return None.
    """
    pool = replace(candidates.pool, price_per_gpu_hour=1.0)
    outcome = choose_or_reject(request, replace(candidates, pool=pool))
    if not isinstance(outcome, Choice):
        return None
    if not others:
        return Change("pool.price.perGpuHour", 1.0, "wins", "give it a price (GPUPool spec.price.perGpuHour)")
    return find_winning_price(request, outcome, others)
