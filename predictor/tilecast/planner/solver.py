"""Search for a plan: list scheduling on the relaxation, then a local search that counts its simulations.

The same queue always gets the same plan: no step depends on the clock, and random numbers come from a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tilecast import uncertainty
from tilecast.planner import owners, references, relaxation
from tilecast.planner.assignment import Assignment, QueueScore, is_better_score
from tilecast.planner.columns import QueueColumns, build_columns
from tilecast.planner.policies import POLICIES, QueuePolicy
from tilecast.planner.problem import QueueProblem, UnplannedJob, check_problem
from tilecast.planner.relaxation import JobClasses, RelaxedSolution
from tilecast.spec import Floats, SpecError

EFFORT = 600_000
"""Number of job starts that may be simulated; each trial costs `_TRIAL` more, whatever its size."""
_TRIAL = 60
_MAX_SWAP_JOBS = 40
"""Largest queue in which every pair of jobs is tried; in larger ones only single jobs move."""
_TRIED_OPTIONS = 3
"""Options tried for each job of a larger queue: the most promising ones."""
_TRIED_OPTIONS_NEW = 12
"""Options tried for each new job of a queue that is planned from the present one."""
_MOST_LISTED = 20_000
"""Most options of a larger queue that are listed at once."""
_MAX_NEW_SHARE = 0.1
"""Largest share of new jobs with which a large queue is planned from the present one."""
_RESUME_DIVISOR = 4
"""Divisor of the effort for a queue that is planned from the present plan, from which the next arrival continues."""
_RESTARTS = 40
"""Number of restarts near the best plan in the search of a small queue."""
_RESTART_MOVES = 6
"""Most jobs that a restart moves."""
_REACH = NormalDist().inv_cdf(1 - uncertainty.ODDS) / NormalDist().inv_cdf(0.95)
"""Half-widths between two forecasts whose order is wrong with probability `uncertainty.ODDS`."""
MAX_LOSS = 0.03
"""Largest loss for keeping the present plan, as a share of the deciding value."""


@dataclass(frozen=True, slots=True)
class QueueSolution:
    """An option for every job of a checked problem."""

    columns: QueueColumns
    policy: QueuePolicy
    option: list[int]
    finish: Floats
    score: QueueScore
    best: QueueScore
    """Score of the plan before changes that the forecasts cannot tell apart were undone."""
    bound: float | None
    """Lower bound of the deciding part of the score over all plans; None if it was not requested or not solved."""
    refused: tuple[UnplannedJob, ...] = ()

    @property
    def gap(self) -> float | None:
        """Distance of the plan from the bound, as a ratio of the bound; the best plan is no farther from the plan."""
        if self.bound is None or not self.score:
            return None
        value = self.score[self.policy.deciding]
        return value / self.bound - 1 if self.bound > 0 else 0.0 if value <= 0 else None


def solve(
    problem: QueueProblem, policy: str = "completion", *, effort: int = EFFORT, is_bounded: bool = True
) -> QueueSolution:
    """Return a plan for a queue.

    Args:
        problem: jobs and pools.
        policy: a key of `POLICIES`.
        effort: how many job starts may be simulated in search of a better plan.
        is_bounded: whether to solve the relaxation, which bounds the distance from the best plan, and from which large
            queues start.

    Raises:
        SpecError: the policy is unknown, needs a price that a pool lacks, or the problem is invalid.
    """
    if policy not in POLICIES:
        raise SpecError("policy", f"{policy!r} is not known", f"use {', '.join(POLICIES)}")
    record = POLICIES[policy]
    feasible, refused = check_problem(problem)
    columns = build_columns(feasible)
    if record.needs_price and (pool := next((item.pool for item in columns.options if item.cost is None), None)):
        raise SpecError(f"pool {pool}", f"has no price, which policy {policy} needs", "give its GPUPool a price")
    if not feasible.jobs:
        return QueueSolution(columns, record, [], np.zeros(0), (), (), None, refused)
    first = _starting_plan(columns, record)
    relaxed = None
    if is_bounded:
        classes = JobClasses.from_columns(columns)
        relaxed = _bound_score(columns, record, classes, first)
        spread = Assignment(columns, record, classes.assign_options(columns, relaxed.share))
        first = spread if is_better_score(spread.score, first.score) else first
    current = _search_plan(first, effort // _RESUME_DIVISOR if _continues_plan(columns) else effort)
    best = current.score
    _undo_small_changes(current, effort)
    owners.exchange_places(current, effort // _RESUME_DIVISOR)
    bound = None if relaxed is None else relaxed.bound
    return QueueSolution(columns, record, current.option, current.finish, current.score, best, bound, refused)


def _starting_plan(columns: QueueColumns, policy: QueuePolicy) -> Assignment:
    """Return the best plan that needs no search: a reference, or the present plan.

    The present plan wins while it is hardly worse. In a large queue with few new jobs, only the present plan is
    considered.
    """
    is_new = columns.present < 0
    own = references.choose_fastest(columns)
    there = [own[job] if item < 0 else item for job, item in enumerate(columns.present.tolist())]
    if _continues_plan(columns):
        current = Assignment(columns, policy, there)
        budget, promise = _TrialBudget(EFFORT), _estimate_gains(current)
        for job in np.flatnonzero(is_new).tolist():
            options = np.arange(columns.first[job], columns.first[job + 1])
            for item in options[np.argsort(-promise[options], kind="stable")][:_TRIED_OPTIONS_NEW].tolist():
                budget.try_moves(current, {job: item})
        return current
    ways = (there, references.choose_earliest(columns), own, references.choose_cheapest(columns))
    several = [Assignment(columns, policy, way) for way in ways]
    best = several[0]
    for other in several[1:]:
        best = other if is_better_score(other.score, best.score) else best
    is_kept = not is_new.any() and _is_nearly_best(policy, several[0].score, best.score)
    return several[0] if is_kept else best


def _continues_plan(columns: QueueColumns) -> bool:
    """Return whether a large queue is planned from the present plan because few of its jobs are new."""
    return len(columns.present) > _MAX_SWAP_JOBS and float((columns.present < 0).mean()) < _MAX_NEW_SHARE


def _is_nearly_best(policy: QueuePolicy, score: QueueScore, best: QueueScore) -> bool:
    """Return whether a score is so little worse than the best that the difference does not matter."""
    deciding = policy.deciding
    return score[:deciding] <= best[:deciding] and score[deciding] <= best[deciding] * (1 + MAX_LOSS)


def _bound_score(columns: QueueColumns, policy: QueuePolicy, classes: JobClasses, first: Assignment) -> RelaxedSolution:
    """Return the relaxation of a queue under a policy."""
    if policy.name == "completion":
        return relaxation.bound_completion(columns, classes, float(first.finish.max()))
    if policy.name == "cost":
        return relaxation.bound_cost(columns, classes, first.score[0])
    ones = np.ones(len(columns.weight))
    if policy.name == "makespan":
        return relaxation.bound_peak(columns, classes, 0 * ones, ones, first.score[0])
    return relaxation.bound_peak(columns, classes, columns.arrival, columns.alone, first.score[0])


def _search_plan(first: Assignment, effort: int) -> Assignment:
    """Return the best plan found by moves of single jobs, swaps of two, and restarts from random moves."""
    budget = _TrialBudget(effort)
    best = first.copy()
    _improve_plan(best, budget)
    if len(best.option) > _MAX_SWAP_JOBS:
        return best
    draw = np.random.default_rng(0)
    for _ in range(_RESTARTS):
        if budget.is_spent:
            break
        other = best.copy()
        count = draw.integers(1, min(len(other.option), _RESTART_MOVES) + 1)
        moved = draw.choice(len(other.option), size=count, replace=False)
        moves = {int(job): int(draw.choice(other.columns.options_of(int(job)))) for job in moved}
        other.apply_moves(moves, other.try_moves(moves)[1])
        _improve_plan(other, budget)
        if is_better_score(other.score, best.score):
            best = other
    return best


@dataclass(slots=True)
class _TrialBudget:
    """Number of trials that a search has left."""

    left: int

    @property
    def is_spent(self) -> bool:
        return self.left <= 0

    def try_moves(self, current: Assignment, moves: dict[int, int]) -> bool:
        """Apply the moves if they improve the score, and return whether they did."""
        before = current.simulated
        score, changed = current.try_moves(moves)
        self.left -= current.simulated - before + _TRIAL
        if not is_better_score(score, current.score):
            return False
        current.apply_moves(moves, changed)
        return True


def _improve_plan(current: Assignment, budget: _TrialBudget) -> None:
    """Move jobs, then swap pairs of them, until no trial improves the plan or the budget is spent."""
    while not budget.is_spent:
        is_better = False
        for job, options in _list_moves(current):
            for option in options:
                if option != current.option[job] and not budget.is_spent:
                    is_better |= budget.try_moves(current, {job: option})
        if not is_better and len(current.option) <= _MAX_SWAP_JOBS:
            is_better = _swap_pairs(current, budget)
        if not is_better:
            return


def _swap_pairs(current: Assignment, budget: _TrialBudget) -> bool:
    """Exchange the pools of two jobs wherever that improves the plan, and return whether any exchange did."""
    columns, is_better = current.columns, False
    for one in range(len(current.option)):
        for two in range(one + 1, len(current.option)):
            pools = columns.pool[current.option[one]], columns.pool[current.option[two]]
            if pools[0] == pools[1] or budget.is_spent:
                continue
            for there in columns.options_of(one):
                for here in columns.options_of(two):
                    if (columns.pool[there], columns.pool[here]) == (pools[1], pools[0]) and not budget.is_spent:
                        is_better |= budget.try_moves(current, {one: there, two: here})
    return is_better


def _list_moves(current: Assignment) -> Sequence[tuple[int, Sequence[int]]]:
    """Return jobs with the options to try, the most promising first; all of them for a small queue."""
    columns = current.columns
    promise = _estimate_gains(current)
    if len(current.option) <= _MAX_SWAP_JOBS:
        order = np.argsort(-np.maximum.reduceat(promise, columns.first[:-1]), kind="stable")
        return [(int(job), sorted(columns.options_of(int(job)), key=lambda item: -promise[item])) for job in order]
    places = np.argsort(-promise, kind="stable")
    listed = dict[int, list[int]]()
    for option in places[: min(int(np.searchsorted(-promise[places], 0.0)), _MOST_LISTED)].tolist():
        options = listed.setdefault(int(columns.job[option]), [])
        if len(options) < _TRIED_OPTIONS:
            options.append(option)
    return list(listed.items())


def _estimate_gains(current: Assignment) -> Floats:
    """Return the estimated gain of each option, (m,), for its job and for the jobs behind it on both pools."""
    columns = current.columns
    chosen = np.array(current.option)
    finish = current.finish
    begin = finish - columns.seconds[chosen]
    weight, jobs = columns.weight, columns.job
    start, behind = np.zeros(len(jobs)), np.zeros(len(jobs))
    for index, pool in enumerate(current.pools):
        here = np.flatnonzero(columns.pool == index)
        if not len(pool.jobs) or not len(here):
            continue
        line = np.array(pool.jobs)
        place = np.searchsorted(line, jobs[here])
        begins = np.append(begin[line], pool.finish.max())
        waits = np.where(begin[line] > 0, weight[line], 0.0)
        after = np.append(np.cumsum(waits[::-1])[::-1], 0.0)
        start[here], behind[here] = begins[place], after[place]
    room = np.array([max(pool.gpus, 1) for pool in columns.pools])[columns.pool]
    delay = columns.seconds * columns.gpus / room * behind
    own = weight[jobs] * (finish[jobs] - start - columns.seconds)
    return np.asarray(own + delay[chosen][jobs] - delay)


def _undo_small_changes(current: Assignment, effort: int) -> None:
    """Undo changes from the present plan, job by job, that gain less than the forecasts can tell."""
    columns, policy = current.columns, current.policy
    best, budget = current.score, _TrialBudget(effort)
    for job in np.flatnonzero((columns.present >= 0) & (columns.present != current.option)).tolist():
        here, there = int(columns.present[job]), current.option[job]
        spread = math.hypot(columns.width[here], columns.width[there])
        ratio = math.expm1(spread if columns.is_running[job] else min(_REACH * spread, uncertainty.MOST_TIED))
        score, changed = current.try_moves({job: here})
        lost = score[policy.deciding] - current.score[policy.deciding]
        is_none = score[: policy.deciding] <= current.score[: policy.deciding]
        is_none &= lost <= policy.stake(columns, job, here, ratio)
        if is_none and (columns.is_running[job] or _is_nearly_best(policy, score, best)):
            current.apply_moves({job: here}, changed)
        budget.left -= sum(len(pool.jobs) for pool in changed.values()) + _TRIAL
        if budget.is_spent:
            return
