"""Price alternatives to the recommendation, such as the baseline, the usual plan and a plan with memory to spare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilecast import frameworks, memory, overlap, search, step, uncertainty
from tilecast.advice.choose import (
    Choice,
    choose_on_pool,
    choose_or_reject,
    choose_plan,
    keep_sensible_plans,
    rank_choices,
)
from tilecast.advice.enumeration import enumerate_partial_plan
from tilecast.advice.pricing import CandidatePlans, DetailedForecasts, find_candidates
from tilecast.advice.reasons import BOUND_BY
from tilecast.advice.values import Change, Constraints, Offer, Rejection, Request, format_excess, format_ratio
from tilecast.advice.what_if.changes import apply_change, scale_link
from tilecast.cost import price_of_1000_steps
from tilecast.hardware import Link, Pool, instances
from tilecast.search import Mask, PlanLimits
from tilecast.spec import Plans, Workload
from tilecast.step import blocks


def price_baseline(request: Request, pools: Sequence[Pool]) -> tuple[Offer | None, list[Rejection], list[str]]:
    """Price the plan that the user runs today, the request's baseline.

    Returns:
        The offer of the baseline, or None if there is no baseline or the baseline cannot be priced. A list with the
            rejection of a baseline that cannot be priced. Notes on the baseline.
    """
    baseline = request.baseline
    if baseline is None:
        return None, [], []
    pool = baseline.elsewhere or next(pool for pool in pools if pool.name == baseline.pool)
    # Price a baseline even where its pool is smaller today: the user runs it now.
    nodes = max(pool.max_nodes, -(-baseline.gpus // pool.gpus_per_node))
    roomy = replace(pool, max_nodes=nodes)
    notes = []
    if baseline.gpus > pool.max_gpus:
        notes.append(
            f"Your baseline of {baseline.gpus} GPUs is larger than pool {pool.name}, which has {pool.max_gpus}."
        )
    own = replace(request, objective="time", constraints=Constraints(gpus=baseline.gpus), batches=None, precisions=())
    own = replace(own, target_step_s=None)
    table = None
    if baseline.plan is not None and pool.gpu.supports(request.workload.precision):
        table = enumerate_partial_plan(request.workload, baseline.gpus, baseline.plan, "spec.baseline.plan")
    outcome = choose_on_pool(own, roomy, PlanLimits(gpus=baseline.gpus), table)
    if isinstance(outcome, Choice):
        assumed = "" if baseline.is_planned else ", plan assumed"
        return replace(outcome.offer(), reason=f"your baseline{assumed}"), [], notes
    return None, [replace(outcome, message=f"your baseline of {baseline.gpus}: {outcome.message}")], notes


def find_best_without_constraints(request: Request, candidates: Sequence[CandidatePlans]) -> Offer | None:
    """Return the best offer if the job's constraints are ignored, or None without constraints or without offers."""
    if request.constraints == Constraints():
        return None
    free = replace(request, constraints=Constraints())
    outcomes = [choose_or_reject(free, plans) for plans in candidates]
    choices = [outcome for outcome in outcomes if isinstance(outcome, Choice)]
    if not choices:
        return None
    offer = rank_choices(free, choices).choices[0].offer()
    return replace(offer, reason=f"without the job's own constraints; {BOUND_BY[offer.bottleneck]}")


USUAL_STAGES = (0, 3, 1, 2)
"""ZeRO stages in the order in which people try them: none, then FSDP, then the others that a framework has."""


def price_usual_plan(request: Request, choices: Sequence[Choice]) -> Offer | None:
    """Return the plan that most people would run on the recommended pool: data parallelism or FSDP alone.

    The plan uses as many GPUs as the recommended plan, or if that is impossible, the next smaller number. Plans with
    memory to spare are preferred, then plans without recomputation, then data parallelism over FSDP, then the fastest
    plan. Return None if no such plan fits, if it is the recommended plan, or if the user states the plan.
    """
    if not choices or request.plan is not None:
        return None
    best = choices[0]
    candidates, plans = best.candidates, best.candidates.plans
    rows = np.flatnonzero(_is_usual(request, best) & candidates.fits)
    if not len(rows):
        return None
    stages = np.argsort(USUAL_STAGES)[plans.zero_stage[rows]]
    tight, recomputed = candidates.take(rows).tight, plans.checkpointing[rows]
    order = np.lexsort((candidates.step_s[rows], stages, recomputed, tight, -candidates.gpus[rows]))
    row = int(rows[order[0]])
    if row == best.row:
        return None
    offer = DetailedForecasts.from_rows(candidates, np.array([row])).offer(0)
    name = "data parallelism alone" if offer.plan.zero_stage < 3 else "FSDP alone"
    amount = float(candidates.objective_value(request)[row])
    ratio = (
        ""
        if best.value <= 0
        else f", {format_ratio(amount / best.value)} the {request.objective_record.quantity.measure}"
    )
    more = "; memory is tight" if offer.is_tight else ""
    more += "" if candidates.take(np.array([row])).is_within_bound(request)[0] else "; misses the job's limit"
    return replace(offer, reason=f"{name}{ratio}; {BOUND_BY[offer.bottleneck]}{more}")


def describe_missing_usual_plan(request: Request, choices: Sequence[Choice]) -> list[str]:
    """Return a sentence, in a list, if neither data parallelism nor FSDP alone fits the recommended pool.

    The list is empty if one of them fits, or if the user states the plan.
    """
    if not choices or request.plan is not None:
        return []
    candidates = choices[0].candidates
    rows = np.flatnonzero(_is_usual(request, choices[0]))
    if not len(rows) or candidates.fits[rows].any():
        return []
    row = int(rows[np.argmin(candidates.memory_bytes[rows])])
    plan, over = candidates.plans.row(row), candidates.memory_bytes[row] - memory.usable_bytes(candidates.pool.gpu)
    name = "Data parallelism" if plan.zero_stage < 3 else "FSDP"
    return [f"{name} alone does not fit: {plan} needs {format_excess(over)} too much."]


def _is_usual(request: Request, best: Choice) -> Mask:
    """Return which plans of the recommended pool are data parallelism or FSDP alone, (n,).

    Such a plan also has the recommended plan's precision and global batch, has at most its number of GPUs, and meets
    the job's constraints.
    """
    candidates, plans = best.candidates, best.candidates.plans
    is_alone = np.all([getattr(plans, name) == 1 for name in _DEGREES], axis=0)
    mask = is_alone & (candidates.variant == candidates.variant[best.row])
    return np.asarray(mask & (candidates.gpus <= best.gpus) & candidates.within(request.constraints))


_DEGREES = ("tensor", "pipeline", "context", "expert", "expert_tensor", "virtual_stages")
"""Plan columns that are 1 if data parallelism is the only way of splitting."""


def price_safer_plan(request: Request, choices: Sequence[Choice]) -> Offer | None:
    """Return the best plan with memory to spare on the recommended pool if the recommended plan's memory is tight.

    If the user states the plan, or wants the fewest GPUs, the safer plan uses the same number of GPUs. If memory is not
    tight or there is no such plan, return None.
    """
    if not choices or not choices[0].is_tight:
        return None
    best = choices[0]
    candidates, eligible = best.candidates, best.eligible
    if request.plan is not None:
        request = replace(request, plan=None)
        candidates = find_candidates(request, candidates.pool, PlanLimits(gpus=best.gpus))
        eligible = candidates.within(request.constraints) & candidates.fits & candidates.is_within_bound(request)
        eligible = keep_sensible_plans(request, candidates, eligible)
    if request.objective_record.fewest_gpus:
        eligible = eligible & (candidates.gpus == best.gpus)
    roomy = choose_plan(request, candidates, eligible & ~candidates.tight)
    if roomy is None:
        return None
    offer = roomy.offer()
    ratio = (
        ""
        if best.value <= 0
        else f", {format_ratio(roomy.value / best.value)} the {request.objective_record.quantity.measure}"
    )
    return replace(offer, reason=f"memory to spare{ratio}; {BOUND_BY[offer.bottleneck]}")


def describe_plan(offers: Sequence[Offer], safer: Offer | None) -> tuple[str, ...]:
    """Return notes that explain details of the recommended plan and of the plan with memory to spare.

    The details are GPU groups that share a node, and ZeRO with a single data-parallel rank.
    """
    if not offers:
        return ()
    shown = (offers[0],) if safer is None else (offers[0], safer)
    notes = [offer.shared_nodes for offer in shown if offer.shared_nodes]
    notes += [
        f"zero{offer.plan.zero_stage}-dp1: ZeRO shards over the context-parallel ranks too."
        for offer in shown
        if offer.plan.zero_stage in (1, 2) and offer.plan.data == 1 and offer.plan.context > 1
    ]
    return tuple(dict.fromkeys(notes))


def find_plan_with_spare_memory(request: Request, pool: Pool) -> Offer | None:
    """Return the plan of a pool that uses the fewest GPUs among those with memory to spare, or None."""
    candidates = find_candidates(request, pool)
    eligible = candidates.within(request.constraints) & candidates.fits
    choice = choose_plan(replace(request, objective="fewestGpus"), candidates, eligible & ~candidates.tight)
    return None if choice is None else choice.offer()


ASSUMED_LAYERS = ("assumed", "default")
"""Sources of a pool's network that are guesses: `--gpus`, and nodes whose network nothing states."""
DECISIVE = 0.1
"""Fraction of a step spent waiting for an assumed network, above which the assumption is an alert."""


def describe_assumed_networks(offers: Sequence[Offer]) -> list[str]:
    """Return a sentence for each offer whose step waits long for a network that is only assumed.

    The wait is long if it takes more than the fraction `DECISIVE` of the step. The sentence gives the step time with
    the GPU's usual network instead. If that is the assumed network, it gives the time with 100 Gb/s Ethernet, or with
    400 Gb/s if 100 Gb/s is assumed.
    """
    sentences = []
    for offer in offers:
        pool = offer.pool
        if pool.layers.get("interNode") not in ASSUMED_LAYERS or offer.nodes == 1 or offer.gpus <= pool.domain:
            continue
        fraction = 1 - _step_s_on_network(offer, scale_link(pool.inter, ENDLESS)) / offer.step_s
        if fraction <= DECISIVE:
            continue
        usual = instances.find_default_network(pool.gpu, instances.find_default_gpus_per_node(pool.gpu))
        other = usual if usual.name != pool.inter.name else instances.build_ethernet_link(100)
        if other.name == pool.inter.name:
            other = instances.build_ethernet_link(400)
        seconds = _step_s_on_network(offer, other)
        kind = "the usual " if other is usual else ""
        is_listed = pool.layers["interNode"] == "assumed"
        state = f"--gpus {pool.gpu.name}:{pool.max_gpus}@LINK" if is_listed else "labels of the nodes or a GPUPool"
        sentences.append(
            f"The network of {pool.name} is a guess: {fraction:.0%} of its step waits for {pool.inter.name}. "
            f"With {kind}{other.name} it takes {format_ratio(seconds / offer.step_s)} the time. State yours: {state}."
        )
    return sentences


ENDLESS = 1e3
"""Factor on the speed of a link that makes its communication time negligible."""


def _step_s_on_network(offer: Offer, network: Link) -> float:
    """Return the seconds of an offer's step if its pool had another network between nodes."""
    pool = replace(offer.pool, inter=network)
    return float(search.price(offer.workload, Plans.from_plans(offer.plan), pool).step_s[0])


def suggest_changes(request: Request, choices: Sequence[Choice]) -> list[str]:
    """Return sentences on another batch, other bucket sizes and fewer GPUs, where these would be clearly better.

    The sentences are about the first of the ranked `choices`.
    """
    if not choices:
        return []
    best = choices[0]
    answers = (_suggest_batch(request, best), _suggest_bucket_size(best), _suggest_fewer_gpus(request, best))
    return [answer for answer in answers if answer is not None]


def _suggest_batch(request: Request, best: Choice) -> str | None:
    """Return a sentence on the nearest global batch that is a multiple of the pool's number of GPUs.

    Return None unless the recommendation with that batch is better per sample by more than a tie. Also return None if
    the GPUs divide the job's own batch, if the job gives a range of batches or states its plan, or if the objective is
    the fewest GPUs.
    """
    pool, own = best.candidates.pool, request.workload.global_batch
    most = _max_usable_gpus(request, pool)
    part = most * (request.workload.micro_batch or 1)
    is_settled = request.objective_record.fewest_gpus or request.batches is not None or request.plan is not None
    if is_settled or not 1 < part <= 2 * own or own % part == 0:
        return None
    nearest = sorted({own // part * part, -(-own // part) * part} - {0}, key=lambda batch: (abs(batch - own), -batch))
    for batch in nearest:
        after, _ = apply_change(Change("training.globalBatchSize", batch, "wins", ""), request, pool)
        outcome = choose_on_pool(after, pool, PlanLimits(gpus=most))
        if not isinstance(outcome, Choice):
            continue
        ratio = _amount_per_sample(request, outcome, batch) / _amount_per_sample(request, best, own)
        if ratio * math.exp(uncertainty.MOST_TIED) < 1:
            gain = request.objective_record.quantity.gain.format(ratio=ratio)
            plan = outcome.candidates.plans.row(outcome.row)
            parts = f"{most} GPUs" + (f" at micro-batch {part // most}" if own % most == 0 else "")
            better = f"{batch} would {gain} per sample, with {plan} on {outcome.gpus} GPUs."
            return f"Global batch {own} does not split evenly over {parts}: a global batch of {better}"
    return None


def _max_usable_gpus(request: Request, pool: Pool) -> int:
    """Return the largest number of the pool's GPUs that the job may use.

    If the number exceeds one node, it is rounded down to whole nodes. A number that the job sets itself is returned as
    it is.
    """
    limits = request.constraints
    nodes = min(pool.max_nodes, limits.max_nodes or pool.max_nodes)
    most = min(nodes * pool.gpus_per_node, limits.max_gpus or pool.max_gpus)
    whole = most // pool.gpus_per_node * pool.gpus_per_node or most
    return limits.gpus or whole


def _amount_per_sample(request: Request, choice: Choice, batch: int) -> float:
    """Return how much of the quantity that the objective minimises a choice uses for one sample."""
    seconds = float(choice.candidates.step_s[choice.row]) / batch
    return request.objective_record.quantity.amount(choice.candidates.pool, choice.gpus, seconds)


SIZES_MIB = (1, 2, 5, 10, 25, 50, 100, 200, 400, 800)
"""Gradient bucket sizes to try, in MiB."""


LEAST_GAIN = 0.01
"""Share of the step that another bucket size must save to be suggested."""


def _suggest_bucket_size(best: Choice) -> str | None:
    """Return a sentence on the bucket size in `SIZES_MIB` with the fastest step, if it saves more than `LEAST_GAIN`.

    If it saves less, if no gradient buckets overlap the backward pass, or if the framework has no bucket size, return
    None.
    """
    candidates, row = best.candidates, best.row
    workload, plan = candidates.variants[candidates.variant[row]], candidates.plans.row(row)
    has_buckets = (
        workload.training and workload.framework is not None and frameworks.find_framework(workload).has_buckets
    )
    if not (has_buckets and overlap.hides_gradients(workload)) or plan.zero_stage > 1 or plan.data * plan.context == 1:
        return None
    sharded = candidates.tables[candidates.table[row]].sharded.take(candidates.origin[row : row + 1])
    priced = blocks.kernel_seconds(workload, sharded, candidates.pool.gpu)
    seconds = step.step_with_bucket_sizes(workload, sharded, Plans.from_plans(plan), candidates.pool, priced, SIZES_MIB)
    fastest = int(np.argmin(seconds))
    gain = 1 - float(seconds[fastest] / candidates.step_s[row])
    if gain <= LEAST_GAIN:
        return None
    return (
        f"Gradient buckets of {SIZES_MIB[fastest]} MiB instead of {_describe_bucket_size(workload)} would take "
        f"{gain:.0%} off the step (training.bucketMiB)."
    )


def _describe_bucket_size(workload: Workload) -> str:
    """Return the job's bucket size as text in MiB, or text that says that the framework chooses it."""
    if workload.bucket_mib is not None:
        return f"{workload.bucket_mib}"
    size = frameworks.find_framework(workload).bucket_mib[1]
    return f"{size:g}" if size else f"{workload.framework}'s own"


# Doubling the GPUs reaches it where the step becomes less than 1.19 times as fast.
SEVERAL = 3
"""Relative growth of a step's price over relative fall of its time, as logarithms, above which GPUs are too many."""


def _suggest_fewer_gpus(request: Request, choice: Choice) -> str | None:
    """Return a sentence on the fastest plan with fewer GPUs, if the additional GPUs of the recommendation gain little.

    The GPU count is halved while the larger count costs too much for its gain in speed (`SEVERAL`). Return None if it
    is never halved, or if the objective is not about time alone.
    """
    if request.objective_record.saves_gpus or request.is_bounded:
        return None
    candidates = choice.candidates
    same = candidates.batch == candidates.batch[choice.row]
    rows = np.flatnonzero(choice.eligible & same & (candidates.gpus <= choice.gpus // 2))
    roomy = rows if choice.is_tight else rows[~candidates.take(rows).tight]
    chosen, gpus, times = choice.row, candidates.gpus[roomy], candidates.step_s[roomy]
    while (near := np.flatnonzero(gpus <= candidates.gpus[chosen] // 2)).size:
        half = int(roomy[near[np.argmin(times[near])]])
        faster = math.log(candidates.step_s[half] / candidates.step_s[chosen])
        dearer = math.log(candidates.gpus[chosen] / candidates.gpus[half]) - faster
        if dearer < SEVERAL * max(faster, 0.0):
            break
        chosen = half
    if chosen == choice.row:
        return None

    def text(row: int) -> str:
        seconds = float(candidates.step_s[row])
        time = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
        if candidates.pool.price_per_gpu_hour is None:
            return time
        cost = price_of_1000_steps(float(candidates.hourly[row]), seconds)
        return f"{time} and {cost:,.3g} {candidates.pool.currency} per 1000 steps"

    count, ratio = int(candidates.gpus[chosen]), float(candidates.step_s[choice.row] / candidates.step_s[chosen])
    few = "Half of the GPUs take" if 2 * count == choice.gpus else f"{count} of the {choice.gpus} GPUs take"
    return (
        f"{few} {text(chosen)} with {candidates.plans.row(chosen)}, instead of {text(choice.row)}: "
        f"all {choice.gpus} take {ratio:.2f}x the time at {choice.gpus / count * ratio:.3g}x the price."
    )
