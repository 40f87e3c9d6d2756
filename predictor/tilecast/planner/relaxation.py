"""Lower bounds on the score of every plan of a queue, from linear programs.

The programs ignore node boundaries and divide the GPUs of a pool freely. All but one ignore the order of jobs too. The
distance of a plan from the bound is therefore at least its distance from the best plan. HiGHS solves the programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from tilecast.planner.columns import QueueColumns
from tilecast.spec import Floats, Ints

MOST_COLUMNS = 48_000
"""Most variables of a program. It limits into how many intervals time is divided."""
_MOST_PARTS = 100
"""Most intervals into which time is divided."""
_BISECTIONS = 10


@dataclass(frozen=True, slots=True)
class RelaxedSolution:
    """Solution of a linear program: the lower bound, and how many jobs use each option."""

    bound: float | None
    """Lower bound on the value of every plan. None if the program was not solved."""
    share: Floats
    """For each option of `JobClasses`, the number of jobs of its class that use it, (m,)."""


@dataclass(frozen=True, slots=True)
class JobClasses:
    """Classes of equal jobs, with the m options of all classes. Each class is one row of a linear program."""

    jobs: list[Ints]
    """Jobs of each class, in order."""
    option: Ints
    """Index of each option among the options of the first job of its class."""
    row: Ints
    """Index of the class of each option."""
    count: Floats
    """Number of jobs in each class."""

    @classmethod
    def from_columns(cls, columns: QueueColumns) -> JobClasses:
        """Return the classes of equal jobs of a queue. Jobs of one class may differ in their present options."""
        order = np.argsort(columns.need, kind="stable")
        bounds = np.flatnonzero(np.diff(columns.need[order], prepend=-1))
        jobs = np.split(order, bounds[1:])
        options = [np.arange(columns.first[some[0]], columns.first[some[0] + 1]) for some in jobs]
        row = np.repeat(np.arange(len(jobs)), [len(some) for some in options])
        return cls(jobs, np.concatenate(options), row, np.array([len(some) for some in jobs], dtype=float))

    def assign_options(self, columns: QueueColumns, share: Floats) -> list[int]:
        """Return an option for every job, so that each class uses its options in proportion to `share`, (m,)."""
        chosen = [-1] * len(columns.weight)
        for index, jobs in enumerate(self.jobs):
            places = np.flatnonzero(self.row == index)
            part = share[places] / max(share[places].sum(), 1e-12)
            taken = np.zeros(len(places))
            for turn, job in enumerate(jobs):
                best = int(np.argmax(part * (turn + 1) - taken))
                taken[best] += 1
                chosen[job] = int(columns.first[job]) + best
        return chosen


def bound_completion(
    columns: QueueColumns, classes: JobClasses, end_s: float, most_columns: int = MOST_COLUMNS
) -> RelaxedSolution:
    """Return a lower bound of the weighted mean of completion times.

    Time is divided into intervals, and the program may spread a job over any of them. A job ends half its run time
    after the mean of the times at which it runs. The dual variables of the program, one price per job, give a second
    bound that does not depend on intervals. The highest of these bounds and of the fastest run times alone is returned.

    Source: the mean busy time relaxation of Schulz and Skutella (SIAM J. Discrete Math. 15, 2002).

    Args:
        columns: the jobs.
        classes: classes of equal jobs.
        end_s: seconds from now in which all jobs can be finished. If infinite, there is no bound.
        most_columns: largest number of variables of the program. A smaller program is solved sooner but gives a lower
            bound.
    """
    if not math.isfinite(end_s):
        return RelaxedSolution(None, _count_fastest_options(columns, classes))
    options = classes.option
    parts = int(np.clip(most_columns // len(options), 4, _MOST_PARTS))
    # The last interval begins at `end_s` and has room for everything, because the best plan may end later.
    edges = end_s * np.append(np.arange(parts) / (parts - 1), 1.0) ** 1.5
    job = columns.job[options]
    each = columns.weight[job] / columns.weight.sum()
    length, area = columns.seconds[options], columns.seconds[options] * columns.gpus[options]
    cost = each[:, None] * (edges[:-1] + length[:, None] / 2)
    column = np.arange(cost.size).reshape(cost.shape)
    class_row = np.broadcast_to(classes.row[:, None], cost.shape)
    pool_row = len(classes.count) + columns.pool[options][:, None] * parts + np.arange(parts)
    gpus = _count_gpus_by_pool(columns)
    room = gpus[:, None] * np.diff(edges)
    room[:, -1] = np.where(gpus > 0, math.inf, 0.0)
    room = room.ravel()
    solved = _solve_program(
        cost.ravel(),
        [(class_row, column, np.ones_like(cost)), (pool_row, column, np.broadcast_to(area[:, None], cost.shape))],
        np.concatenate([classes.count, np.full(len(room), -math.inf)]),
        np.concatenate([classes.count, room]),
    )
    if solved is None:
        return RelaxedSolution(None, _count_fastest_options(columns, classes))
    value, taken, prices = solved
    value = max(value, _bound_by_prices(columns, classes, each, prices[: len(classes.count)]))
    first = np.flatnonzero(np.diff(classes.row, prepend=-1))
    alone = float((classes.count * np.minimum.reduceat(length, first) * each[first]).sum())
    waited = float((columns.weight * columns.arrival).sum() / columns.weight.sum())
    return RelaxedSolution(max(value, alone) - waited, taken.reshape(-1, parts).sum(axis=1))


def _bound_by_prices(columns: QueueColumns, classes: JobClasses, each: Floats, prices: Floats) -> float:
    """Return the lower bound of the weighted mean completion time that follows from a price of each job.

    The bound does not include the time that jobs have waited already. In this dual of the program, a job earns its
    price and pays for its GPU time and its delay. GPU time costs just enough that no option at any moment earns more
    than it pays. Then the sum of the prices, less the cost of all GPU time, is a lower bound for every plan. Over time,
    the cost of a pool's GPU is the maximum of 0 and one falling line for each option. This function is convex, so
    straight lines between a few moments lie above it and keep the bound valid.

    Args:
        columns: the jobs.
        classes: classes of equal jobs.
        each: weight of each option's job, as a share of all weights, (m,).
        prices: price of a job of each class. Any prices give a bound.
    """
    if not each.all():
        return -math.inf  # a job without weight would pay its price forever
    paid = _price_gpus(columns, classes.option, prices[classes.row], each)[1]
    return float(classes.count @ prices - _count_gpus_by_pool(columns) @ paid[:, -1])


def _price_gpus(columns: QueueColumns, options: Ints, prices: Floats, each: Floats) -> tuple[Floats, Floats]:
    """Return moments in seconds, (t,), and the cost of one GPU of each pool from now until each moment, (pools, t).

    The costs are those that `_bound_by_prices` describes.

    Args:
        columns: the jobs.
        options: some options, (m,).
        prices: the price of the job of each option, (m,).
        each: weight of the job of each option, as a share of all weights, (m,).
    """
    length, pool = columns.seconds[options], columns.pool[options]
    area = length * columns.gpus[options]
    height, slope = (prices - each * length / 2) / area, each / area
    end_s = max(float((height / slope).max()), 0.0)
    moments = end_s * (np.arange(_PRICED_MOMENTS) / (_PRICED_MOMENTS - 1)) ** 1.5
    paid = np.zeros((len(columns.pools), len(moments)))
    for index in range(len(paid)):
        here = np.flatnonzero(pool == index)
        cost = np.zeros(len(moments))
        for some in np.array_split(here, -(-len(here) // _PRICED_AT_ONCE)) if len(here) else ():
            lines = height[some][:, None] - slope[some][:, None] * moments
            cost = np.maximum(cost, lines.max(axis=0))
        paid[index, 1:] = np.cumsum(np.diff(moments) * (cost[1:] + cost[:-1]) / 2)
    return moments, paid


@dataclass(frozen=True, slots=True)
class _StartRules:
    """Constraints of a linear program, r rows, that say which jobs may start later than now.

    Each row is for one job and some of its options. The share of the job that starts later on these options is at most
    the share of the necessary GPUs or nodes that earlier jobs take now. Necessary are those that must be taken so that
    none of these options has room.
    """

    later: tuple[Ints, Ints]
    """Rows, and options of their jobs."""
    now: tuple[Ints, Ints, Floats]
    """Rows, options of earlier jobs, and the part that each takes of what must be taken."""
    count: int

    @classmethod
    def from_columns(cls, columns: QueueColumns) -> _StartRules:
        """Return the rules of a queue: a row for each job, pool and number of GPUs of its options there.

        The row of a GPU count holds all options of the job on that pool with at most as many GPUs. The row bounds all
        these options by what must be taken so that the largest of them has no room. A job of whole nodes has no room if
        too few nodes are wholly free. Each earlier job takes as many nodes as its GPUs need, at least one. A job of
        fewer GPUs has no room if no node has as many free GPUs, for which earlier jobs must take GPUs on every node
        that had enough. Jobs that arrive later or have a quota may also wait for other reasons, and have no rows.
        """
        later, now, count = [(np.zeros(0, int),) * 2], [(np.zeros(0, int), np.zeros(0, int), np.zeros(0))], 0
        on_pool = [np.flatnonzero(columns.pool == index) for index in range(len(columns.pools))]
        for job, queued in enumerate(columns.problem.jobs):
            if columns.arrival[job] > 0:
                continue
            for index, pool in enumerate(columns.pools):
                here = on_pool[index]
                earlier, own = here[: np.searchsorted(here, columns.first[job])], columns.get_option_range(job)
                own = np.arange(own.start, own.stop)[columns.pool[own.start : own.stop] == index]
                if queued.queue in pool.quotas or not len(own):
                    continue
                for most in np.unique(columns.gpus[own]).tolist():
                    if most >= pool.gpus_per_node:
                        need = pool.free.count(pool.gpus_per_node) - -(-most // pool.gpus_per_node) + 1
                        takes = -(-columns.gpus[earlier] // pool.gpus_per_node)
                    else:
                        need = sum(max(free - most + 1, 0) for free in pool.free)
                        takes = columns.gpus[earlier]
                    if need <= 0:
                        continue  # a running job that the free nodes could not hold
                    some = own[columns.gpus[own] <= most]
                    later.append((np.full(len(some), count), some))
                    now.append((np.full(len(earlier), count), earlier, np.minimum(takes / need, 1.0)))
                    count += 1
        rows, options = (np.concatenate(parts) for parts in zip(*later, strict=True))
        now_rows, now_options, parts = (np.concatenate(each) for each in zip(*now, strict=True))
        return cls((rows, options), (now_rows, now_options, parts), count)


def bound_completion_in_order(columns: QueueColumns, end_s: float, most_columns: int = MOST_COLUMNS) -> float | None:
    """Return a lower bound of the weighted mean of completion times that takes the order of job starts into account.

    A job either runs from now on or starts later. The simulation looks at the jobs in order and starts each job that
    has room. So a job starts later only if the earlier jobs that run from now on leave no room for it, which
    `_StartRules` writes as rows of the program. The program is that of `bound_completion` with one more variable for
    each option: the share of the option that runs from now on and uses its GPUs until its end. A simulated plan
    satisfies all rows with shares of 0 and 1, and no job of it ends before the time that the program computes. So the
    optimum bounds every plan.

    As in `bound_completion`, prices give a bound without intervals. An option that starts later also pays the prices of
    its rows. An option that runs from now on receives the prices of the rows of later jobs. If an option costs less
    than its job's price, the difference is subtracted, so any prices give a bound.

    Args:
        columns: the jobs.
        end_s: seconds from now in which all jobs can be finished.
        most_columns: largest number of variables of the program.

    Returns:
        The bound, or None if the program is too large or was not solved, or if `end_s` is infinite.
    """
    count, jobs = len(columns.options), len(columns.weight)
    if count > _MOST_ORDERED_OPTIONS or not math.isfinite(end_s):
        return None
    rules, each = _StartRules.from_columns(columns), columns.share[columns.job]
    length, gpus = columns.seconds, columns.gpus
    parts = int(np.clip(most_columns // count, 4, _MOST_PARTS))
    edges = end_s * np.append(np.arange(parts) / (parts - 1), 1.0) ** 1.5
    cost = each[:, None] * (edges[:-1] + length[:, None] / 2)
    option = np.arange(count)
    # Variables: work of each option in each interval, then its share from now on, then its share that starts later.
    work = np.arange(count * parts).reshape(count, parts)
    now, later = work.size + option, work.size + count + option
    # Rows: one for each job, one for each option (its work is its share), the room of each pool, and the rules.
    room_row = jobs + count + columns.pool[:, None] * parts + np.arange(parts)
    room = _count_gpus_by_pool(columns)[:, None] * np.diff(edges)
    room[:, -1] = np.where(room[:, 0] > 0, math.inf, 0.0)
    first_rule = jobs + count + room.size
    held = np.clip(length[:, None] - edges[:-1], 0.0, np.diff(edges)) * gpus[:, None]
    held[:, -1] = 0.0  # the last interval has room for everything
    ones, area = np.ones(count), np.broadcast_to((length * gpus)[:, None], work.shape)
    solved = _solve_program(
        np.concatenate([cost.ravel(), each * length, np.zeros(count)]),
        [
            (columns.job, now, ones),
            (columns.job, later, ones),
            (jobs + option, later, -ones),
            (np.broadcast_to(jobs + option[:, None], work.shape), work, np.ones(work.shape)),
            (room_row, work, area),
            (room_row, np.broadcast_to(now[:, None], work.shape), held),
            (first_rule + rules.later[0], later[rules.later[1]], np.ones(len(rules.later[0]))),
            (first_rule + rules.now[0], now[rules.now[1]], -rules.now[2]),
        ],
        np.concatenate([np.ones(jobs), np.zeros(count), np.full(room.size + rules.count, -math.inf)]),
        np.concatenate([np.ones(jobs), np.zeros(count), room.ravel(), np.zeros(rules.count)]),
    )
    if solved is None:
        return None
    value, _, prices = solved
    if each.all():
        value = max(
            value, _bound_completion_by_duals(columns, rules, prices[:jobs], np.maximum(-prices[first_rule:], 0.0))
        )
    return value - float(columns.share @ columns.arrival)


def _bound_completion_by_duals(
    columns: QueueColumns, rules: _StartRules, job_prices: Floats, rule_prices: Floats
) -> float:
    """Return the lower bound of the weighted mean completion time that follows from prices of jobs and start rules.

    The bound does not include the time that jobs have waited already.

    Args:
        columns: the jobs, all with weights above 0.
        rules: the rules of their starts.
        job_prices: price of each job, (n,). Any prices give a bound.
        rule_prices: price of each rule, (r,), at least 0.
    """
    count, each = len(columns.options), columns.share[columns.job]
    pays = np.bincount(rules.later[1], rule_prices[rules.later[0]], count)
    gets = np.bincount(rules.now[1], rule_prices[rules.now[0]] * rules.now[2], count)
    moments, paid = _price_gpus(columns, np.arange(count), job_prices[columns.job] - pays, each)
    # What a GPU costs falls with time, so that straight lines lie below what it has cost up to each time.
    until = np.empty(count)
    for pool, sums in enumerate(paid):
        here = columns.pool == pool
        until[here] = np.interp(columns.seconds[here], moments, sums)
    short = job_prices[columns.job] - (each * columns.seconds + columns.gpus * until - gets)
    lost = np.maximum(np.maximum.reduceat(short, columns.first[:-1]), 0.0)
    return float(job_prices.sum() - lost.sum() - _count_gpus_by_pool(columns) @ paid[:, -1])


_MOST_ORDERED_OPTIONS = 1_500
"""Most options of a queue whose bound knows the order of the jobs. The number of its entries is quadratic in it."""
_PRICED_MOMENTS = 500
"""Moments between which the cost of a GPU is a straight line."""
_PRICED_AT_ONCE = 2_000
"""Options whose cost is compared at once, which limits the memory."""


def bound_peak(
    columns: QueueColumns, classes: JobClasses, since: Floats, scale: Floats, reachable: float
) -> RelaxedSolution:
    """Return a lower bound of the largest `(end - since) / scale` over all jobs, for policies that minimize it.

    Bisection finds the smallest feasible value. Each value gives every job a deadline, and is feasible if the work that
    is due by each moment fits into the GPU time before that moment.

    Source: Lenstra, Shmoys and Tardos (Math. Programming 46, 1990), without their rounding step.

    Args:
        columns: the jobs.
        classes: classes of equal jobs.
        since: the time from which the duration of each job is measured, (n,).
        scale: the divisor of the duration of each job, (n,).
        reachable: upper end of the bisection, a value that some plan reaches.
    """
    late = np.array([since[some].max() for some in classes.jobs])
    scales = np.array([scale[some[0]] for some in classes.jobs])
    area = columns.seconds[classes.option] * columns.gpus[classes.option]
    low, high, share = 0.0, reachable, _count_fastest_options(columns, classes)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        solved = _minimize_price_by_deadline(columns, classes, late + middle * scales, area, 0.0)
        if solved is None:
            low = middle
        else:
            high, share = middle, solved[1]
    return RelaxedSolution(low, share)


def bound_cost(columns: QueueColumns, classes: JobClasses, missed: float) -> RelaxedSolution:
    """Return a lower bound of the cost of all jobs. Jobs of at most `missed` total weight may miss their deadlines."""
    due = np.array([columns.due[some].max() for some in classes.jobs])
    options = classes.option
    rows = _minimize_price_by_deadline(columns, classes, due, columns.cost[options], missed)
    return RelaxedSolution(
        None if rows is None else rows[0], _count_fastest_options(columns, classes) if rows is None else rows[1]
    )


def _minimize_price_by_deadline(
    columns: QueueColumns, classes: JobClasses, due: Floats, price: Floats, missed: float
) -> tuple[float, Floats, Floats] | None:
    """Return the least total price to finish all jobs in time, and the solution of its linear program.

    The solution is the number of jobs per option, (m,), and the prices of the rows. If the jobs cannot finish in time,
    return None.

    Args:
        columns: the jobs.
        classes: classes of equal jobs.
        due: deadline of each class in seconds from now.
        price: price of each option of the classes, (m,).
        missed: largest total weight of jobs that may end late.
    """
    options = classes.option
    area = columns.seconds[options] * columns.gpus[options]
    is_late = columns.seconds[options] > due[classes.row]
    count, weight = len(options), columns.weight[columns.job[options]]
    finite = np.unique(due[np.isfinite(due)])
    moments = finite[np.unique(np.linspace(0, len(finite) - 1, _MOMENTS).astype(int))] if len(finite) else finite
    # Columns: first the options that end in time, then the same options taken although they end late.
    column = np.arange(count)
    is_due = due[classes.row][:, None] <= moments
    choice, moment = np.nonzero(is_due & ~is_late[:, None])
    pools = len(columns.pools)
    classes_count = len(classes.count)
    moment_row = classes_count + 1 + columns.pool[options][choice] * len(moments) + moment
    room = (_count_gpus_by_pool(columns)[:, None] * moments).ravel()
    return _solve_program(
        np.concatenate([price, price]),
        [
            (classes.row, column, np.ones(count)),
            (classes.row, column + count, np.ones(count)),
            (np.full(count, classes_count), column + count, np.where(np.isfinite(due[classes.row]), weight, 0.0)),
            (moment_row, choice, area[choice]),
        ],
        np.concatenate([classes.count, [-math.inf], np.full(pools * len(moments), -math.inf)]),
        np.concatenate([classes.count, [missed], room]),
        np.concatenate([np.where(is_late, 0.0, math.inf), np.full(count, math.inf if missed > 0 else 0.0)]),
        fold=count,
    )


_MOMENTS = 16
"""Number of moments at which the due work is checked. Checking fewer moments only lowers a bound."""


def _count_gpus_by_pool(columns: QueueColumns) -> Floats:
    """Return the most GPUs of each pool that the jobs may use at once, by its nodes and by the quotas of their queues.

    A pool that a job without a quota may use is limited by its nodes alone.
    """
    gpus = np.array([pool.gpus for pool in columns.pools], dtype=float)
    for index, pool in enumerate(columns.pools):
        if pool.quotas:
            here = np.unique(columns.job[columns.pool == index]).tolist()
            quotas = [pool.quotas.get(queue, pool.gpus) for queue in {columns.problem.jobs[job].queue for job in here}]
            gpus[index] = min(pool.gpus, sum(quotas))
    return gpus


def _count_fastest_options(columns: QueueColumns, classes: JobClasses) -> Floats:
    """Return the number of jobs per option, (m,), if every job uses its fastest option."""
    share = np.zeros(len(classes.option))
    for index, jobs in enumerate(classes.jobs):
        places = np.flatnonzero(classes.row == index)
        share[places[np.argmin(columns.seconds[classes.option[places]])]] = len(jobs)
    return share


def _solve_program(
    price: Floats,
    entries: Sequence[tuple[Ints, Ints, Floats]],
    lower: Floats,
    upper: Floats,
    most: Floats | None = None,
    fold: int | None = None,
) -> tuple[float, Floats, Floats] | None:
    """Return the minimum of a linear program, its optimal variables, and the prices of its rows.

    If it has no optimum, return None.

    Args:
        price: coefficient of each variable. All variables are at least 0.
        entries: rows, columns and values of the constraints.
        lower: lower bound of each row.
        upper: upper bound of each row.
        most: upper bound of each variable, or None if the variables have none.
        fold: number of variables to return. Variables whose indices differ by a multiple of `fold` are summed.
    """
    row, column = (np.concatenate([item[part].ravel() for item in entries]) for part in (0, 1))
    value = np.concatenate([item[2].ravel() for item in entries])
    order = np.argsort(column, kind="stable")
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(price), len(lower)
    scale = float(np.abs(price).max(initial=0.0)) or 1.0
    program.col_cost_ = price / scale
    program.col_lower_ = np.zeros(len(price))
    program.col_upper_ = np.full(len(price), highspy.kHighsInf) if most is None else most
    program.row_lower_, program.row_upper_ = lower, upper
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(column, minlength=len(price)))])
    program.a_matrix_.index_, program.a_matrix_.value_ = row[order], value[order]
    solver = highspy.Highs()
    for name, setting in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        solver.setOptionValue(name, setting)
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = solver.getSolution()
    solved, prices = np.array(solution.col_value), np.array(solution.row_dual) * scale
    total = float(solver.getInfo().objective_function_value) * scale
    return total, solved if fold is None else solved.reshape(-1, fold).sum(axis=0), prices
