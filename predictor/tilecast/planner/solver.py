"""Search for a plan: start from a linear program or a simple rule, then improve it by local search.

Equal queues get equal plans, because no step depends on the clock and random numbers have a fixed seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from tilecast import uncertainty
from tilecast.planner import owners, references, relaxation
from tilecast.planner.assignment import Assignment, PoolTimeline, QueueScore, is_better_score
from tilecast.planner.columns import QueueColumns, build_columns
from tilecast.planner.policies import POLICIES, QueuePolicy, smith_ratio
from tilecast.planner.problem import QueueProblem, UnplannedJob, check_problem, sort_jobs
from tilecast.planner.relaxation import JobClasses, RelaxedSolution
from tilecast.planner.repeats import TriedMoves
from tilecast.spec import Floats, Ints, SpecError

EFFORT = 600_000
"""Number of job starts that may be simulated. Each trial counts `_TRIAL` more, whatever its size."""
_TRIAL = 60
_REPEATED = 4
"""What a move that repeats another one counts instead."""
_MAX_SMALL_JOBS = 40
"""Largest queue that is annealed whatever its gap. In larger ones the most promising options are tried first."""
_MAX_SWAP_JOBS = 100
"""Largest queue in which swaps of every pair of jobs are tried. In larger ones only single jobs move."""
MAX_ANNEALED_JOBS = 100
"""Largest queue that is annealed if its plan may be far from the best one."""
_CLOSE = 0.05
"""Gap up to which a plan is close enough to its bound, so that the order of the jobs raises the bound no more."""
_MET = 1e-6
"""Gap up to which a plan counts as one that meets its bound, so that only a local search follows."""
FAR = 0.3
"""Gap above which a plan may be far from the best one, so that the search of a larger queue goes on."""
_TRIED_OPTIONS = 3
"""Number of options, the most promising ones, that are tried first for each job of a larger queue."""
_TRIED_OPTIONS_NEW = 12
"""Number of options that are tried for each new job if the present plan is extended."""
_MOST_LISTED = 20_000
"""Most options of a larger queue that one round lists."""
_MAX_NEW_SHARE = 0.1
"""Largest share of new jobs at which a large queue's present plan is extended instead of planned anew."""
_RESUME_DIVISOR = 4
"""Divisor of the effort for a queue that is planned from the present plan, from which the next arrival continues."""
_ANNEALED, _ANNEALED_RUNS = 0.6, 4
"""Part of the effort that a run of simulated annealing may take, and the number of runs from the same start."""
_RESTARTED, _IMPROVED = 0.3, 0.4
"""Shares of the effort for the search with restarts, and for the last local search."""
_RESTARTS, _RESTART_MOVES = 40, 6
"""Most restarts of the local search, and the most jobs that a restart moves at random."""
_TRIALS_PER_OPTION = 20
"""Most trials per option in one run of simulated annealing."""
_COUNTED_EQUAL = 3
"""Most jobs of a class of equal jobs with one GPU count that add to the effort of a search with annealing."""
_MISSED_PRICE = 0.1
"""Penalty in simulated annealing for a missed deadline of mean weight, as a share of the deciding value."""
_NEAR_MOVES = 0.3
"""Share of annealing moves that go to the next larger or smaller GPU count."""
_EXCHANGES = 0.4
"""Share of the moves of simulated annealing in which two jobs exchange their pools and counts."""
_TEMPERATURES = 0.03, 0.0005
"""First and last temperature of annealing, as shares of the deciding value."""
_TEMPERATURES_AGAIN = 0.01, 0.0005
"""Those of the last run, which begins at the best plan."""
_REACH = NormalDist().inv_cdf(1 - uncertainty.ODDS) / NormalDist().inv_cdf(0.95)
"""Distance of two forecasts, in half-widths, whose order is wrong with probability `uncertainty.ODDS`."""
ORDERS: Mapping[str, str] = {
    "kueue": "by priority, then by creation, as Kueue starts jobs",
    "free": "by priority, then by what the policy gains (for completion: weighted shortest processing time)",
}
"""Orders in which jobs may start, by their names for `--order`."""
_FREE_DIVISOR = 3
"""Divisor of the effort of each round in a free order, where good plans are found sooner."""
_ORDER_ROUNDS = 3
"""Most rounds in which the jobs of a free order are sorted by the options of the last plan."""
MAX_LOSS = 0.03
"""Largest loss, as a share of the deciding value, at which the present plan is kept."""


@dataclass(frozen=True, slots=True)
class QueueSolution:
    """The plan that `solve` found: an option for every job, with its simulated ends, score and lower bound."""

    columns: QueueColumns
    policy: QueuePolicy
    option: list[int]
    finish: Floats
    score: QueueScore
    best: QueueScore
    """Score of the plan before the last step, which undoes changes whose gain is within the forecasts' uncertainty."""
    bound: float | None
    """Lower bound of the deciding value over all plans in this order. None if it was not requested or not solved."""
    refused: tuple[UnplannedJob, ...] = ()
    order: str = "kueue"
    """A key of `ORDERS`. The rows of `columns` are in this order."""
    kueue_order: tuple[str, ...] = ()
    """Names of the jobs in the order in which Kueue starts them. Empty if `order` is that order."""

    @property
    def gap(self) -> float | None:
        """Relative distance of the plan's score from its lower bound, or None without a bound.

        The plan is at most this far from the best plan.
        """
        if self.bound is None or not self.score:
            return None
        value = self.score[self.policy.deciding]
        return value / self.bound - 1 if self.bound > 0 else 0.0 if value <= 0 else None


def solve(
    problem: QueueProblem, policy: str = "completion", *, order: str = "kueue", effort: int = EFFORT,
    is_bounded: bool = True,
) -> QueueSolution:  # fmt: skip
    """Return a plan for a queue: one option for every job.

    Args:
        problem: jobs and pools.
        policy: a key of `POLICIES`.
        order: a key of `ORDERS`.
        effort: number of job starts that the search may simulate in each order that it tries.
        is_bounded: whether to solve the linear program, which gives the lower bound and a start of the search.

    Raises:
        SpecError: the policy or the order is unknown, the policy needs a price that a pool lacks, or the problem is
            invalid.
    """
    if policy not in POLICIES:
        raise SpecError("policy", f"{policy!r} is not known", f"use {', '.join(POLICIES)}")
    if order not in ORDERS:
        raise SpecError("order", f"{order!r} is not known", f"use {', '.join(ORDERS)}")
    record = POLICIES[policy]
    feasible, refused = check_problem(problem)
    columns = build_columns(feasible)
    if record.needs_price and (pool := next((item.pool for item in columns.options if item.cost is None), None)):
        raise SpecError(f"pool {pool}", f"has no price, which policy {policy} needs", "give its GPUPool a price")
    if not feasible.jobs:
        return QueueSolution(columns, record, [], np.zeros(0), (), (), None, refused, order)
    if order == "free":
        effort //= _FREE_DIVISOR
    planned = _plan_in_order(columns, record, effort, is_bounded)
    if order == "free":
        planned = _plan_in_free_order(planned, effort, is_bounded)
    elif is_bounded and record.name == "completion":
        planned = replace(planned, bound=_bound_in_order(planned))
    return replace(planned, refused=refused, order=order)


def _plan_in_free_order(first: QueueSolution, effort: int, is_bounded: bool) -> QueueSolution:
    """Return a plan in which jobs of equal priority start in the order that the policy prefers.

    Each round sorts the jobs and plans them in that order. The options of a round's plan give the order of the next
    round.
    """
    columns, policy, best = first.columns, first.policy, first
    ratio = smith_ratio(columns, np.arange(len(columns.options)))
    lowest = np.lexsort((ratio, columns.job))[columns.first[:-1]]
    keys = [policy.rank(columns, lowest, first.score[policy.deciding])]
    if np.isfinite(columns.due).any():
        keys.append(np.lexsort((keys[0], columns.due)).argsort().astype(float))
    for key in keys:
        current, ranks = first, key
        for _ in range(_ORDER_ROUNDS):
            problem = sort_jobs(current.columns.problem, ranks.tolist())
            if problem.jobs == current.columns.problem.jobs:
                break
            current = _plan_in_order(build_columns(problem), policy, effort, is_bounded)
            if not is_better_score(current.score, best.score):
                break
            best = current
            ranks = policy.rank(current.columns, np.array(current.option), current.score[policy.deciding])
            if key is not keys[0]:
                ranks = np.lexsort((ranks, current.columns.due)).argsort().astype(float)
    bounds = [item.bound for item in (first, best) if item.bound is not None]
    kueue_order = tuple(job.name for job in columns.problem.jobs)
    return replace(best, bound=max(bounds, default=None), kueue_order=kueue_order)


def _plan_in_order(columns: QueueColumns, record: QueuePolicy, effort: int, is_bounded: bool) -> QueueSolution:
    """Return a plan in which jobs start in the order of the rows of `columns`.

    Later jobs may overtake ones that do not fit.
    """
    first = _choose_starting_plan(columns, record)
    relaxed = None
    if is_bounded:
        classes = JobClasses.from_columns(columns)
        relaxed = _bound_score(columns, record, classes, first)
        spread = Assignment(columns, record, classes.assign_options(columns, relaxed.share))
        first = spread if is_better_score(spread.score, first.score) else first
    bound = None if relaxed is None else relaxed.bound
    current = _search_plan(first, effort // _RESUME_DIVISOR if _only_extends_plan(columns) else effort, bound)
    best = current.score
    _undo_small_changes(current, effort)
    owners.swap_within_owners(current, effort // _RESUME_DIVISOR)
    return QueueSolution(columns, record, current.option, current.finish, current.score, best, bound)


def _choose_starting_plan(columns: QueueColumns, policy: QueuePolicy) -> Assignment:
    """Return the plan from which the search starts: the present plan or a reference, whichever is better.

    The present plan is chosen if it is hardly worse than the best reference. In a large queue with few new jobs, it is
    always chosen, and the new jobs are added to it.
    """
    is_new = columns.present < 0
    own = references.choose_fastest(columns)
    there = [own[job] if item < 0 else item for job, item in enumerate(columns.present.tolist())]
    if _only_extends_plan(columns):
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


def _only_extends_plan(columns: QueueColumns) -> bool:
    """Return whether the queue is large and few of its jobs are new, so that the present plan is only extended."""
    return len(columns.present) > _MAX_SMALL_JOBS and float((columns.present < 0).mean()) < _MAX_NEW_SHARE


def _is_nearly_best(policy: QueuePolicy, score: QueueScore, best: QueueScore) -> bool:
    """Return whether a score is worse than the best score by at most the fraction `MAX_LOSS` of its deciding value.

    The values before the deciding value must not be worse at all.
    """
    deciding = policy.deciding
    return score[:deciding] <= best[:deciding] and score[deciding] <= best[deciding] * (1 + MAX_LOSS)


def _bound_score(
    columns: QueueColumns, policy: QueuePolicy, classes: JobClasses, start_plan: Assignment
) -> RelaxedSolution:
    """Return the solution of the linear program that bounds the score of a queue under a policy.

    Args:
        columns: the queue.
        policy: the policy.
        classes: classes of equal jobs.
        start_plan: any plan. Its score is the upper end of the search for a bound.
    """
    if policy.name == "completion":
        most = relaxation.MOST_COLUMNS // (_RESUME_DIVISOR if _only_extends_plan(columns) else 1)
        return relaxation.bound_completion(columns, classes, float(start_plan.finish.max()), most)
    if policy.name == "cost":
        return relaxation.bound_cost(columns, classes, start_plan.score[0])
    ones = np.ones(len(columns.weight))
    if policy.name == "makespan":
        return relaxation.bound_peak(columns, classes, 0 * ones, ones, start_plan.score[1])
    return relaxation.bound_peak(columns, classes, columns.arrival, columns.alone, start_plan.score[1])


def _bound_in_order(planned: QueueSolution) -> float | None:
    """Return the lower bound of a plan in Kueue's order: the higher of its bound and the one for plans in that order.

    If there is neither, return None. A bound that is close to the plan is returned as it is.
    """
    if planned.gap is not None and planned.gap <= _CLOSE:
        return planned.bound
    most = relaxation.MOST_COLUMNS // (_RESUME_DIVISOR if _only_extends_plan(planned.columns) else 1)
    found = relaxation.bound_completion_in_order(planned.columns, float(planned.finish.max()), most)
    return max((item for item in (planned.bound, found) if item is not None), default=None)


def _search_plan(first: Assignment, effort: int, bound: float | None) -> Assignment:
    """Return the best plan that local search with random restarts and simulated annealing find.

    The best GPU count of one job depends on the counts of all others, so a search that only accepts improvements soon
    finds no more moves. Simulated annealing also accepts moves that make the plan worse. Runs that differ only in their
    random moves may end 10 % apart, so several runs compete, with only the usual GPU counts. One more run, with all
    counts and at low temperatures, begins at the best plan so far.

    Finally, jobs are moved and swapped until nothing improves the best plan.

    A larger queue is improved by local search. Only if its plan may be far from the best one is it annealed too.

    Equal jobs are interchangeable, so a queue of few kinds of jobs with one GPU count each gets less effort.

    Args:
        first: the plan to begin with.
        effort: number of job starts that each part of the search may simulate.
        bound: lower bound of the deciding value, or None.
    """
    if len(first.option) > _MAX_SMALL_JOBS:
        first = first.copy()
        _improve_plan(first, _TrialBudget(effort))
        is_far = bound is not None and first.score[first.policy.deciding] > bound * (1 + FAR)
        if len(first.option) > MAX_ANNEALED_JOBS or not is_far:
            return first
    elif _meets_bound(first, bound):
        first = first.copy()
        _improve_plan(first, _TrialBudget(effort))
        return first
    share = _count_distinct_share(first.columns)
    effort = int(effort * share)
    columns, best = first.columns, _restart_search(first, _TrialBudget(int(effort * _RESTARTED)))
    kept = _list_usual_options(columns)
    some = columns.select_options(kept)
    start = _choose_starting_plan(some, first.policy)
    for seed in range(_ANNEALED_RUNS):
        found = _anneal_plan(start, _make_annealing_budget(effort, share * len(kept)), seed, _TEMPERATURES)
        if is_better_score(found.score, best.score):
            best = Assignment(columns, first.policy, kept[found.option].tolist())
    again = _anneal_plan(best, _make_annealing_budget(effort, share * len(columns.options)), 0, _TEMPERATURES_AGAIN)
    best = again if is_better_score(again.score, best.score) else best
    current = best.copy()
    _improve_plan(current, _TrialBudget(int(effort * _IMPROVED)))
    return current


def _restart_search(first: Assignment, budget: _TrialBudget) -> Assignment:
    """Return the best plan of a local search that restarts from random changes of the best plan so far."""
    best = first.copy()
    _improve_plan(best, budget)
    draw = random.Random(0)  # noqa: S311
    for _ in range(_RESTARTS):
        if budget.is_spent:
            break
        other = best.copy()
        jobs = draw.sample(range(len(other.option)), draw.randint(1, min(len(other.option), _RESTART_MOVES)))
        moves = {job: draw.choice(other.columns.get_option_range(job)) for job in jobs}
        other.apply_moves(moves, other.try_moves(moves)[1])
        _improve_plan(other, budget)
        if is_better_score(other.score, best.score):
            best = other
    return best


def _list_usual_options(columns: QueueColumns) -> Ints:
    """Return the indices of the options whose number of GPUs is a power of 2.

    A subset always has the present option of a job and its options with the fewest GPUs.
    """
    least = np.minimum.reduceat(columns.gpus, columns.first[:-1])[columns.job]
    is_kept = (columns.gpus == least) | (columns.gpus & (columns.gpus - 1) == 0)
    is_kept[columns.present[columns.present >= 0]] = True
    return np.flatnonzero(is_kept)


def _make_annealing_budget(effort: int, options: float) -> _TrialBudget:
    """Return the budget of one run of simulated annealing over a number of options."""
    return _TrialBudget(int(min(effort * _ANNEALED, 2 * _TRIAL * _TRIALS_PER_OPTION * options)))


def _meets_bound(current: Assignment, bound: float | None) -> bool:
    """Return whether no plan can be better in the values up to the deciding one."""
    deciding = current.policy.deciding
    if bound is None or any(current.score[:deciding]):
        return False
    return current.score[deciding] <= bound + _MET * abs(bound)


def _count_distinct_share(columns: QueueColumns) -> float:
    """Return the share of the options that is left if each class of equal jobs with one GPU count has few jobs.

    Jobs with several counts on a pool all remain: their counts depend on each other, even if the jobs are equal.
    """
    jobs = np.bincount(columns.need)
    options = np.bincount(columns.need, np.diff(columns.first))
    places = np.unique(columns.job * len(columns.pools) + columns.pool) // len(columns.pools)
    is_rigid = np.bincount(columns.need, np.bincount(places)) == options
    left = np.where(is_rigid, np.minimum(_COUNTED_EQUAL / np.maximum(jobs, 1), 1.0), 1.0)
    return float((options * left).sum() / options.sum())


def _anneal_plan(first: Assignment, budget: _TrialBudget, seed: int, temperatures: tuple[float, float]) -> Assignment:
    """Return the best plan found by simulated annealing, with random moves of one job and exchanges of two jobs.

    Source: Kirkpatrick, Gelatt and Vecchi (Science 220, 1983).

    Args:
        first: the plan to begin with.
        budget: number of job starts that the annealing may simulate.
        seed: seed of the random moves.
        temperatures: the first and the last temperature, as shares of the deciding value.
    """
    movable = np.flatnonzero(np.diff(first.columns.first) > 1).tolist()
    if not movable:
        return first
    columns, deciding, effort = first.columns, first.policy.deciding, budget.left
    current, best = first.copy(), first.copy()
    here, least = current.score, best.score
    draw, (hot, cold) = random.Random(seed), temperatures  # noqa: S311
    while not budget.is_spent:
        moves = _draw_moves(current, movable, draw)
        if not moves:
            budget.left -= 1
            continue
        score, changed = budget.simulate_moves(current, moves)
        # A missed deadline has a price here, so that the walk can pass through plans that miss another one.
        missed = (score[0] - here[0]) * len(columns.weight) / columns.weight.sum()
        worse = score[deciding] - here[deciding] + missed * _MISSED_PRICE * abs(least[deciding])
        temperature = abs(least[deciding]) * cold * (hot / cold) ** (budget.left / effort)
        if worse <= 0 or draw.random() < math.exp(-worse / max(temperature, 1e-300)):
            current.apply_moves(moves, changed)
            here = score
            if is_better_score(score, least):
                best, least = current.copy(), score
    return best


def _draw_moves(current: Assignment, movable: Sequence[int], draw: random.Random) -> dict[int, int]:
    """Return random moves: of one job, or of two that exchange their pools and GPU counts. The moves may be empty.

    Args:
        current: the plan.
        movable: jobs with several options.
        draw: the source of random numbers.
    """
    columns, option = current.columns, current.option
    job, kind = draw.choice(movable), draw.random()
    if kind < _EXCHANGES:
        other = draw.choice(movable)
        there, here = (
            _find_similar_option(columns, job, option[other]),
            _find_similar_option(columns, other, option[job]),
        )
        return {} if there in (None, option[job]) or here is None else {job: there, other: here}
    options = columns.get_option_range(job)
    item = option[job] + draw.choice((-1, 1)) if kind < _EXCHANGES + _NEAR_MOVES else draw.choice(options)
    return {} if item == option[job] or item not in options else {job: item}


def _find_similar_option(columns: QueueColumns, job: int, option: int) -> int | None:
    """Return the option of a job with the same pool and GPU count as an option of another job, or None."""
    pool, gpus = columns.pool[option], columns.gpus[option]
    same = (item for item in columns.get_option_range(job) if columns.pool[item] == pool and columns.gpus[item] == gpus)
    return next(same, None)


@dataclass(slots=True)
class _TrialBudget:
    """Number of job starts that a search may still simulate."""

    left: int

    @property
    def is_spent(self) -> bool:
        return self.left <= 0

    def try_moves(self, current: Assignment, moves: dict[int, int], tried: TriedMoves | None = None) -> bool:
        """Apply moves to the plan if they improve its score, and return whether they do.

        Args:
            current: the plan.
            moves: new options by job.
            tried: moves that did not improve this plan. Moves that repeat one of them are not simulated.
        """
        if tried is not None and tried.is_repeated(current, moves):
            self.left -= _REPEATED
            return False
        score, changed = self.simulate_moves(current, moves)
        if not is_better_score(score, current.score):
            return False
        current.apply_moves(moves, changed)
        if tried is not None:
            tried.forget()
        return True

    def simulate_moves(
        self, current: Assignment, moves: Mapping[int, int]
    ) -> tuple[QueueScore, dict[int, PoolTimeline]]:
        """Return the score and the timelines that moves would give, and subtract the trial from the budget.

        The moves are not applied (`Assignment.try_moves`).
        """
        before = current.simulated
        score, changed = current.try_moves(moves)
        self.left -= current.simulated - before + _TRIAL
        return score, changed


def _improve_plan(current: Assignment, budget: _TrialBudget) -> None:
    """Move single jobs and swap pairs of jobs until nothing improves the plan or the budget is spent.

    In a larger queue, only the most promising options are tried until none of them improves the plan. All others follow
    then.
    """
    is_wide = len(current.option) <= _MAX_SMALL_JOBS
    tried = TriedMoves.from_columns(current.columns) if current.policy.has_equal_jobs else None
    while not budget.is_spent:
        is_better = False
        for job, options in _list_moves(current, is_wide=is_wide):
            for option in options:
                if option != current.option[job] and not budget.is_spent:
                    is_better |= budget.try_moves(current, {job: option}, tried)
        if not is_better and is_wide and len(current.option) <= _MAX_SWAP_JOBS:
            is_better = _swap_pairs(current, budget, tried)
        if not is_better and is_wide:
            return
        is_wide |= not is_better


def _swap_pairs(current: Assignment, budget: _TrialBudget, tried: TriedMoves | None) -> bool:
    """Swap the pools of two jobs wherever that improves the plan. Return whether any swap was made."""
    columns, is_better = current.columns, False
    for one in range(len(current.option)):
        for two in range(one + 1, len(current.option)):
            pools = columns.pool[current.option[one]], columns.pool[current.option[two]]
            if pools[0] == pools[1] or budget.is_spent:
                continue
            for there in columns.get_option_range(one):
                for here in columns.get_option_range(two):
                    if (columns.pool[there], columns.pool[here]) == (pools[1], pools[0]) and not budget.is_spent:
                        is_better |= budget.try_moves(current, {one: there, two: here}, tried)
    return is_better


def _list_moves(current: Assignment, *, is_wide: bool) -> Sequence[tuple[int, Sequence[int]]]:
    """Return (job, options to try) pairs, the most promising job first.

    Args:
        current: the plan.
        is_wide: whether to list all options of every job, not only the most promising ones.
    """
    columns = current.columns
    promise = _estimate_gains(current)
    if is_wide:
        order = np.argsort(-np.maximum.reduceat(promise, columns.first[:-1]), kind="stable")
        return [
            (int(job), sorted(columns.get_option_range(int(job)), key=lambda item: -promise[item])) for job in order
        ]
    places = np.argsort(-promise, kind="stable")
    listed = dict[int, list[int]]()
    for option in places[: min(int(np.searchsorted(-promise[places], 0.0)), _MOST_LISTED)].tolist():
        options = listed.setdefault(int(columns.job[option]), [])
        if len(options) < _TRIED_OPTIONS:
            options.append(option)
    return list(listed.items())


def _estimate_gains(current: Assignment) -> Floats:
    """Return by how much a move to each option would reduce the sum of weighted completion times, estimated, (m,).

    The estimate includes the effect on jobs that start later in the old pool and in the new pool.
    """
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
    """Move jobs back to their present options if their moves gain less than the uncertainty of the forecasts."""
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
