"""Explain why the best plan of every other pool, and every neighbour of the recommended plan, is not recommended.

A neighbour differs from the recommended plan by one step in one dimension. The reason comes from the plans that the
search priced. The change that would remove the reason is found by pricing with other inputs. A change for another pool
must make that pool the recommended one. A change for a neighbour must put the neighbour ahead of the plan that is
recommended now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilecast import memory, search, step, uncertainty, zoo
from tilecast.advice.choose import (
    Choice,
    Ranking,
    choose_on_pool,
    count_gpus_on_fastest_link,
    is_measured_plan_with_recomputation,
    is_split_too_far,
    recommend_choice,
    simplicity_sort_keys,
)
from tilecast.advice.pricing import CandidatePlans, DetailedForecasts
from tilecast.advice.values import Change, Request, WhyNot, format_excess
from tilecast.advice.what_if.changes import (
    bisect_integers,
    describe_larger_memory,
    describe_pool_growth,
    list_pool_sizes,
    scale_all_links,
    select_sizes_to_try_first,
    with_pool_gpus,
)
from tilecast.cost import price_of_1000_steps
from tilecast.hardware import Pool
from tilecast.search import Mask, PlanLimits
from tilecast.spec import Floats, Ints, Plan, Plans, Workload
from tilecast.step import blocks

SPEEDS = np.arange(20, 161) / 20
"""Factors on the speed of all links to try."""


def explain_why_not(request: Request, ranking: Ranking) -> tuple[WhyNot, ...]:
    """Return why the other choices, and the neighbours of the first choice, are not recommended."""
    choices = ranking.choices
    if not choices:
        return ()
    others = zip(choices[1:], ranking.is_tied[1:], strict=True)
    return (*(_explain_pool(request, choices, *other) for other in others), *_explain_neighbours(request, choices[0]))


def _explain_pool(request: Request, choices: Sequence[Choice], choice: Choice, is_tied: bool) -> WhyNot:
    """Return why the choice of another pool is not recommended.

    Args:
        request: the job.
        choices: the choices of all pools, the recommended one first.
        choice: the choice to explain.
        is_tied: whether the choice ties with the recommended one within the forecast's uncertainty.
    """
    best, noun = choices[0], request.objective_record.quantity.measure
    ratio = choice.value / best.value if best.value > 0 else None
    change = _find_winning_change(request, choices, choice)
    if request.objective_record.fewest_gpus and choice.gpus > best.gpus:
        code, ratio = "MoreGpus", choice.gpus / best.gpus
        message = f"{choice.gpus} GPUs against {best.gpus}"
    elif ratio is not None and is_tied:
        more = "" if choice.gpus == best.gpus else f", with {choice.gpus} GPUs against {best.gpus}"
        more = ", but tight in memory" if choice.is_tight and not best.is_tight else more
        code, message = "Tie", f"{ratio:.2f}x the {noun}, within the forecast's error{more}"
    else:
        code = request.objective_record.quantity.worse_code
        times = "" if ratio is None else f"{ratio:.2f}x the {noun}"
        message = f"{times} on {_format_gpu_count(choice.gpus)}" if times else "costs more than nothing"
    return WhyNot(
        "pool", choice.candidates.pool.name, choice.candidates.plans.row(choice.row), code, message, ratio, change
    )


def _find_winning_change(request: Request, choices: Sequence[Choice], choice: Choice) -> Change | None:
    """Return the smallest change of a pool by which its choice would be recommended, or None if no change helps."""
    others = tuple(item for item in choices if item is not choice)
    if request.objective_record.fewest_gpus:
        return None
    for name in request.objective_record.quantity.winning_changes:
        if (change := _WINNING_CHANGES[name](request, choices[0], choice, others)) is not None:
            return change
    return None


def _is_recommended(request: Request, choice: Choice, others: tuple[Choice, ...]) -> bool:
    return recommend_choice(request, (choice, *others)) is choice


def _is_clearly_recommended(request: Request, choice: Choice, others: tuple[Choice, ...]) -> bool:
    """Return whether a choice of a changed pool is recommended by so much that a new search would agree.

    A new search might recommend another plan that ties with this choice. So the choice must still be recommended if its
    amounts are worse by the width of two ties.
    """
    widths = [float(uncertainty.tie_width_between_pools(choice.errors, other.errors)[0]) for other in others]
    return _is_recommended(request, choice.scale_amounts(math.exp(2 * max(widths, default=0.0))), others)


MOST_CONFIRMED = 256
"""Most GPUs of a changed pool that is searched again to confirm a narrow win."""


def _is_pool_recommended(request: Request, pool: Pool, others: tuple[Choice, ...]) -> bool:
    """Return whether a changed pool is recommended over the other choices after a new search of the pool."""
    outcome = choose_on_pool(request, pool)
    return isinstance(outcome, Choice) and _is_recommended(request, outcome, others)


def _find_winning_size(request: Request, best: Choice, choice: Choice, others: tuple[Choice, ...]) -> Change | None:
    """Return the smallest growth by which a pool would become the recommended pool, or None if no growth helps."""
    pool, limits = choice.candidates.pool, request.constraints
    known: dict[int, Choice | None] = {}
    possible = list_pool_sizes(pool)

    def choose_at_size(gpus: int) -> Choice | None:
        wide = with_pool_gpus(pool, gpus)
        is_wide = wide.max_nodes > (limits.max_nodes or wide.max_nodes)
        is_barred = limits.gpus is not None or gpus > (limits.max_gpus or gpus) or is_wide
        # No plan gets faster by a larger factor than its number of GPUs grows.
        if is_barred or choice.value * pool.max_gpus / gpus > best.value * math.exp(uncertainty.largest_tie_width()):
            return None
        if gpus not in known:
            outcome = choose_on_pool(request, wide, PlanLimits(gpus=gpus))
            known[gpus] = outcome if isinstance(outcome, Choice) else None
        return known[gpus]

    def find_smallest_size(test: Callable[[Request, Choice, tuple[Choice, ...]], bool]) -> int | None:
        def works(index: int) -> bool:
            return (found := choose_at_size(possible[index])) is not None and test(request, found, others)

        fails = 0
        for index in select_sizes_to_try_first(pool, possible):
            if works(index):
                # For a large pool, a quarter of its nodes is fine enough.
                parts = 8 if possible[index] <= MOST_CONFIRMED else 4
                tolerance = max(with_pool_gpus(pool, possible[index]).max_nodes // parts, 1)
                return possible[bisect_integers(works, fails, index, tolerance)]
            fails = index
        return None

    gpus = find_smallest_size(_is_recommended)
    if gpus is not None and not _is_clearly_recommended(request, known[gpus] or choice, others):
        is_confirmed = gpus <= MOST_CONFIRMED and _is_pool_recommended(request, with_pool_gpus(pool, gpus), others)
        gpus = gpus if is_confirmed else find_smallest_size(_is_clearly_recommended)
    return None if gpus is None else describe_pool_growth(pool, gpus, "wins")


def _find_winning_links(request: Request, best: Choice, choice: Choice, others: tuple[Choice, ...]) -> Change | None:
    """Return the smallest speed-up of a pool's links by which the pool would be recommended, or None."""
    offer, pool = choice.offer(), choice.candidates.pool
    hidden = 1 - offer.breakdown["communication"] / offer.step_s
    if choice.value * hidden > best.value * math.exp(uncertainty.largest_tie_width()):
        return None
    workload = choice.candidates.variants[choice.candidates.variant[choice.row]]
    plan = choice.candidates.plans.take(np.array([choice.row]))

    def choose_with_faster_links(speeds: Floats) -> list[Choice]:
        steps = _step_seconds_on_faster_links(workload, plan, pool, speeds)[0]
        return [choice.scale_amounts(ratio, ratio) for ratio in (steps / steps[0]).tolist()]

    if not _is_recommended(request, choose_with_faster_links(SPEEDS[[0, -1]])[-1], others):
        return None
    fast = choose_with_faster_links(SPEEDS)

    def find_lowest_speed(test: Callable[[Request, Choice, tuple[Choice, ...]], bool]) -> float | None:
        return _find_lowest_speed(lambda place: test(request, fast[place], others))

    speed = find_lowest_speed(_is_recommended)
    if speed is not None and not (
        pool.max_gpus <= MOST_CONFIRMED and _is_pool_recommended(request, scale_all_links(pool, speed), others)
    ):
        speed = find_lowest_speed(_is_clearly_recommended)
    return None if speed is None else _describe_links(speed)


def _describe_links(speed: float) -> Change:
    return Change("pool.links", speed, "wins", f"{speed:g}x the speed of all links")


def find_winning_price(request: Request, choice: Choice, others: tuple[Choice, ...]) -> Change | None:
    """Return the change to the highest price at which a pool's choice would be recommended, or None.

    The price is compared with the choices of the other pools. If the pool has no price, there is no such change.
    """
    price, pool = choice.candidates.pool.price_per_gpu_hour, choice.candidates.pool
    ratio = _find_winning_factor(request, choice, others)
    if not price or ratio is None:
        return None
    limit = _round_down_to_three_digits(price * ratio)
    text = f"a price below {limit:g} {pool.currency} per GPU and hour"
    return Change("pool.price.perGpuHour", limit, "wins", text) if limit > 0 else None


_WINNING_CHANGES: Mapping[str, Callable[[Request, Choice, Choice, tuple[Choice, ...]], Change | None]] = {
    "nodes": _find_winning_size,
    "links": _find_winning_links,
    "price": lambda request, best, choice, others: find_winning_price(request, choice, others),
}
"""Functions that find the smallest change that makes a pool the recommended one, by kind of change."""

BISECTIONS = 40
"""Number of bisection steps on the logarithm of a factor, enough for all digits that texts show."""


def _find_winning_factor(request: Request, choice: Choice, others: tuple[Choice, ...]) -> float | None:
    """Return the largest factor on the amounts of a choice with which the choice is recommended.

    The factor is between 0.0001 and 10,000. If even the smallest factor is too large, return None.
    """
    low, high = math.log(1e-4), math.log(1e4)

    def wins(factor: float) -> bool:
        return _is_recommended(request, choice.scale_amounts(factor), others)

    if choice.value <= 0 or not wins(math.exp(low)):
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if wins(math.exp(middle)) else (low, middle)
    return math.exp(low)


def _round_down_to_three_digits(value: float) -> float:
    """Return a number rounded down to three significant figures, or 0 for a negative number."""
    if value <= 0:
        return 0.0
    scale = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(np.round(math.floor(value / scale) * scale, 10))


def _explain_neighbours(request: Request, best: Choice) -> Iterator[WhyNot]:
    """Yield the reason why each neighbour of the recommended plan is not recommended."""
    candidates, workload = best.candidates, best.candidates.variants[best.candidates.variant[best.row]]
    plan = candidates.plans.row(best.row)
    near = _find_neighbours(candidates, workload, plan, int(candidates.variant[best.row]))
    if not near:
        return
    table = Plans.from_plans(plan, *(neighbour for _, neighbour, _ in near))
    rows = np.array([best.row, *(row for _, _, row in near)])
    if np.all(rows >= 0):  # they are in the table that was searched
        step_s, needed = candidates.step_s[rows], candidates.memory_bytes[rows]
        errors = DetailedForecasts.from_rows(candidates, rows).errors()
    else:
        priced = search.price(workload, table, candidates.pool)
        step_s, needed, errors = priced.step_s, priced.memory_bytes, uncertainty.forecast_errors(priced)
    weight = table.gpus / plan.gpus if request.objective_record.quantity.grows_with_gpus else np.ones(len(table))
    values = step_s * weight
    ratios = values / values[0]
    more = np.array([False, *(subject == "gpus" for subject, _, _ in near)])
    ties = np.log(ratios) <= uncertainty.tie_width_on_pool(errors, errors.take(np.array([0])), more)
    over = needed - memory.usable_bytes(candidates.pool.gpu)
    is_behind = (ratios > 1) & (over <= 0) & ~ties & (rows >= 0)
    speeds = _find_winning_speeds(workload, table, candidates.pool, weight, np.flatnonzero(is_behind))
    for index, (subject, neighbour, row) in enumerate(near, 1):
        priced_neighbour = _NeighbourPlan(
            request, best, subject, neighbour, row, float(ratios[index]), bool(ties[index])
        )
        yield priced_neighbour.explain(float(over[index]), float(needed[index]), speeds.get(index))


def _find_neighbours(
    candidates: CandidatePlans, workload: Workload, plan: Plan, variant: int
) -> list[tuple[str, Plan, int]]:
    """Return the neighbours of a plan that the pool could run at its present size or after growth.

    Each neighbour is a tuple of the changed dimension's name, the plan, and the plan's row in the candidates. The row
    is -1 if the pool is too small at present.
    """
    larger = list_pool_sizes(candidates.pool)[1:]
    near = []
    for subject, neighbour in _iterate_neighbour_plans(plan, workload):
        row = _find_plan_row(candidates, neighbour, variant)
        if row >= 0 or (subject == "gpus" and neighbour.gpus in larger):
            near.append((subject, neighbour, row))
    return near


def _iterate_neighbour_plans(plan: Plan, workload: Workload) -> Iterator[tuple[str, Plan]]:
    """Yield (dimension, plan) pairs for the plans that differ from a plan by one step in that dimension.

    The number of GPUs changes only if it is the changed dimension.
    """
    for name in ("tensor", "pipeline"):
        degree = getattr(plan, name)
        up: dict[str, Any] = {name: degree * 2, "data": plan.data // 2}
        down: dict[str, Any] = {name: degree // 2, "data": plan.data * 2}
        if plan.data % 2 == 0:
            yield from _iterate_with_accumulation(name, replace(plan, **up), workload)
        if degree % 2 == 0:
            yield from _iterate_with_accumulation(name, replace(plan, **down), workload)
    for name, subject in (("expert", "expert"), ("expert_tensor", "expertTensor"), ("virtual_stages", "virtualStages")):
        degree = getattr(plan, name)
        for other in (degree * 2, degree // 2 if degree % 2 == 0 else 0):
            changed: dict[str, Any] = {name: other}
            if other:
                yield subject, replace(plan, **changed)
    for schedule in (None, *search.list_searched_schedules(workload)):
        if schedule != plan.schedule and plan.pipeline > 1:
            yield "pipelineSchedule", replace(plan, schedule=schedule)
    for stage in (0, 1, 2, 3) if workload.gradient_sync == "allReduce" else ():
        if stage != plan.zero_stage:
            yield "zeroStage", replace(plan, zero_stage=stage)
    for mode in search.list_searched_recomputations(workload):
        if mode != plan.checkpointing:
            yield "activationCheckpointing", replace(plan, checkpointing=mode)
    for size in (plan.micro_batch * 2, plan.micro_batch // 2):
        if size:
            yield from _iterate_with_accumulation("microBatchSize", replace(plan, micro_batch=size), workload)
    ranks = search.divisors(workload.global_batch)
    place = ranks.index(plan.data)
    for data in (*ranks[place + 1 : place + 2], *ranks[:place][-1:]):
        yield from _iterate_with_accumulation("gpus", replace(plan, data=data), workload)


def _iterate_with_accumulation(subject: str, plan: Plan, workload: Workload) -> Iterator[tuple[str, Plan]]:
    """Yield (dimension, plan), with the gradient accumulation set to what the plan's global batch needs.

    If the batch does not divide evenly, yield nothing.
    """
    each = plan.data * plan.micro_batch
    if workload.global_batch % each == 0:
        repeats = workload.global_batch // each
        yield subject, replace(plan, gradient_accumulation=repeats, sequence_parallel=plan.tensor > 1)


def _find_plan_row(candidates: CandidatePlans, plan: Plan, variant: int) -> int:
    rows = np.flatnonzero((candidates.gpus == plan.gpus) & (candidates.variant == variant))
    one = Plans.from_plans(plan)
    for name in Plans.__dataclass_fields__:
        rows = rows[getattr(candidates.plans, name)[rows] == getattr(one, name)[0]]
    return int(rows[0]) if len(rows) else -1


def _step_seconds_on_faster_links(workload: Workload, plans: Plans, pool: Pool, speeds: Floats) -> Floats:
    """Return the step time of n plans in seconds if all links were faster by each of k factors, (n, k)."""
    sharded = zoo.build_sharded_graph(workload, plans)
    priced = blocks.kernel_seconds(workload, sharded, pool.gpu)
    return step.step_on_faster_links(workload, sharded, plans, pool, priced, speeds)


def _find_winning_speeds(
    workload: Workload, plans: Plans, pool: Pool, weight: Floats, behind: Ints
) -> dict[int, float | None]:
    """Return the factor by which all links must be faster for a plan to beat the first plan, by row of the plan.

    Args:
        workload: the job.
        plans: the plans, (n,). The first one is the best.
        pool: the pool.
        weight: factor from a plan's seconds to the quantity that the objective minimises, (n,).
        behind: rows of the plans to examine.

    Returns:
        The lowest sufficient factor in `SPEEDS` for each row in `behind`. A row is absent if no factor suffices.
    """

    def is_ahead(rows: Ints, speeds: Floats) -> Mask:
        both = np.append(0, rows)
        values = _step_seconds_on_faster_links(workload, plans.take(both), pool, speeds) * weight[both, None]
        return np.asarray(values[1:] < values[0])

    # Few plans are ahead even on the fastest links.
    if len(behind):
        behind = behind[is_ahead(behind, SPEEDS[-1:])[:, 0]]
    if not len(behind):
        return {}
    wins = [each.tolist() for each in is_ahead(behind, SPEEDS)]
    return {int(row): _find_lowest_speed(each.__getitem__) for row, each in zip(behind, wins, strict=True)}


def _find_lowest_speed(wins: Callable[[int], bool]) -> float | None:
    """Return the lowest factor in `SPEEDS` for whose index `wins` is true, or None if no factor is high enough."""
    last = len(SPEEDS) - 1
    return float(SPEEDS[bisect_integers(wins, 0, last)]) if wins(last) else None


@dataclass(frozen=True, slots=True)
class _NeighbourPlan:
    """A plan near the recommended one, and its ratio to it in the quantity that the objective minimises."""

    request: Request
    best: Choice
    subject: str
    plan: Plan
    row: int
    ratio: float
    """Ratio to the recommended plan, in the quantity that the objective minimises."""
    is_tie: bool

    def explain(self, over_bytes: float, needed_bytes: float, speed: float | None) -> WhyNot:
        """Return why the neighbour is not recommended, and the smallest change that would remove the reason.

        Args:
            over_bytes: bytes by which the neighbour exceeds the GPU's memory.
            needed_bytes: bytes that the neighbour needs.
            speed: factor on the speed of all links that puts the neighbour ahead. None if no factor does.
        """
        candidates, goal, ratio = self.best.candidates, self.request.objective_record, self._describe_ratio()
        if over_bytes > 0:
            change = self._describe_smaller_plan(needed_bytes)
            return self._build_why_not("OutOfMemory", f"needs {format_excess(over_bytes)} too much", change, over_bytes)
        if self.row < 0:
            return self._explain_small_pool()
        if not candidates.is_within_bound(self.request)[self.row]:
            return self._build_why_not(goal.missed or "TargetMissed", f"{ratio}, beyond the job's own limit")
        if not candidates.within(self.request.constraints)[self.row]:
            return self._explain_constraint()
        if goal.fewest_gpus and self.plan.gpus > self.best.gpus:
            return self._build_why_not("MoreGpus", f"{self.plan.gpus} GPUs against {self.best.gpus}")
        if self.is_tie:
            return self._build_why_not("Tie", f"{ratio}, within the forecast's error{self._explain_tie_rule()}")
        if self.ratio < 1 and not self.best.eligible[self.row]:
            return self._build_why_not("NotNeeded", f"{ratio}, but {self._explain_unusual_plan()}")
        return self._build_why_not(goal.quantity.worse_code, ratio, None if speed is None else _describe_links(speed))

    def _build_why_not(
        self, code: str, message: str, change: Change | None = None, value: float | None = None
    ) -> WhyNot:
        """Return a reason as a `WhyNot`. Without `value`, the ratio to the recommended plan is used."""
        pool, value = self.best.candidates.pool.name, self.ratio if value is None else value
        return WhyNot(self.subject, pool, self.plan, code, message, value, change)

    def _describe_ratio(self) -> str:
        """Return text with the ratio to the recommended plan, such as `1.42x the time`."""
        return f"{self.ratio:.2f}x the {self.request.objective_record.quantity.measure}"

    def _explain_unusual_plan(self) -> str:
        """Return why a better neighbour is recommended only if the user asks for it."""
        if self.plan.tensor > count_gpus_on_fastest_link(self.best.candidates):
            return "its tensor parallelism leaves NVLink; constraints.maxTensorParallel asks for it"
        if is_split_too_far(self.best.candidates.take(np.array([self.row])))[0]:
            return "it splits a small replica in three ways; a stated plan asks for it"
        if is_measured_plan_with_recomputation(self.best.candidates, self.best.eligible)[self.row]:
            return "it only adds recomputation to a plan that you measured; a stated plan asks for it"
        return "it splits what a GPU holds whole; a stated plan asks for it"

    def _explain_tie_rule(self) -> str:
        """Return why a neighbour that ties with the recommended plan is not recommended instead."""
        candidates = self.best.candidates
        if candidates.tight[self.row] and not self.best.is_tight:
            return ", but tight in memory"
        mine = tuple(int(column[0]) for column in simplicity_sort_keys(candidates.take(np.array([self.row]))))
        return ", but not within that of the fastest" if mine < self.best.preference else " and no simpler"

    def _explain_small_pool(self) -> WhyNot:
        pool = self.best.candidates.pool
        change = describe_pool_growth(pool, self.plan.gpus, "wins") if self.ratio < 1 else None
        message = f"{self._describe_ratio()} on {self.plan.gpus} GPUs, but the pool has {pool.max_gpus}"
        return self._build_why_not("PoolTooSmall", message, change)

    def _explain_constraint(self) -> WhyNot:
        limits, plan = self.request.constraints, self.plan
        nodes = -(-plan.gpus // self.best.candidates.pool.gpus_per_node)
        for name, limit, needed, is_broken in (
            ("maxTensorParallel", limits.max_tensor, plan.tensor, plan.tensor > (limits.max_tensor or plan.tensor)),
            ("gpus", limits.gpus, plan.gpus, limits.gpus not in (None, plan.gpus)),
            ("maxGpus", limits.max_gpus, plan.gpus, plan.gpus > (limits.max_gpus or plan.gpus)),
            ("maxNodes", limits.max_nodes, nodes, nodes > (limits.max_nodes or nodes)),
        ):
            if is_broken:
                text = f"{name} {limit} -> {needed}"
                change = Change(f"constraints.{name}", needed, "wins", text) if self.ratio < 1 else None
                return self._build_why_not("Constraint", f"{self._describe_ratio()}, but {name} is {limit}", change)
        return self._build_why_not("Constraint", f"{self._describe_ratio()}, but outside the job's constraints")

    def _describe_smaller_plan(self, needed_bytes: float) -> Change:
        """Return the change to a plan that fits and has the same degrees, with the fewest differences in `_OPEN`.

        If no such plan fits, return the change to GPUs with enough memory.
        """
        candidates, one = self.best.candidates, Plans.from_plans(self.plan)
        mask = candidates.fits & (candidates.variant == candidates.variant[self.best.row])
        for name in ("data", "tensor", "pipeline", "context", "expert", "expert_tensor", "virtual_stages", "schedule"):
            mask &= getattr(candidates.plans, name) == getattr(one, name)[0]
        rows = np.flatnonzero(mask)
        if not len(rows):
            return describe_larger_memory(candidates.pool, needed_bytes)
        # Of plans that differ in equally many fields, the fastest.
        changes = [getattr(candidates.plans, name)[rows] != getattr(one, name)[0] for name in _OPEN]
        first = rows[np.lexsort((candidates.step_s[rows], np.sum(changes, axis=0)))[0]]
        leaner = candidates.plans.row(int(first))
        texts = [
            f"{word} {getattr(self.plan, name)} -> {getattr(leaner, name)}"
            for name, word in _OPEN.items()
            if getattr(self.plan, name) != getattr(leaner, name)
        ]
        seconds, hourly = float(candidates.step_s[first]), float(candidates.hourly[first])
        return Change(
            input="plan",
            value=str(leaner),
            effect="fits",
            text=", ".join(texts),
            step_s=seconds,
            cost_per_1000_steps=None if math.isnan(hourly) else price_of_1000_steps(hourly, seconds),
            currency=candidates.pool.currency,
        )


_OPEN = {
    "micro_batch": "micro-batch", "zero_stage": "ZeRO stage", "checkpointing": "recomputation",
    "sequence_parallel": "sequence parallelism",
}  # fmt: skip
"""Plan columns other than degrees that affect memory, with their names in texts."""


def _format_gpu_count(gpus: int) -> str:
    return f"{gpus} GPUs" if gpus > 1 else "1 GPU"
