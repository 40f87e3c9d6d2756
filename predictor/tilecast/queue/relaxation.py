"""Linear programs that no plan of a queue can beat, and the shares of options that they would like.

They know neither nodes nor an order of jobs: GPUs of a pool are one bulk that may be cut at will. What a plan is behind
them is therefore the most that it can be behind the best plan. HiGHS solves them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from tilecast.queue.columns import QueueColumns
from tilecast.spec import Floats, Ints

MOST_COLUMNS = 24_000
"""Variables of a program; time is cut into as many parts as that allows."""
_BISECTIONS = 10


@dataclass(frozen=True, slots=True)
class Relaxed:
    """What a relaxation says."""

    bound: float | None
    """What no plan can be below; None where the program was not solved."""
    share: Floats
    """How many jobs of its class take each option, for the options of `Classes`, (m,)."""


@dataclass(frozen=True, slots=True)
class Classes:
    """Equal jobs, one row a class, and their options, (m,)."""

    jobs: list[Ints]
    """Of each class, in order."""
    option: Ints
    """Of the first job of the class."""
    row: Ints
    """The class of each option."""
    count: Floats
    """Jobs of each class."""

    @classmethod
    def of(cls, columns: QueueColumns) -> Classes:
        order = np.argsort(columns.kind, kind="stable")
        bounds = np.flatnonzero(np.diff(columns.kind[order], prepend=-1))
        jobs = np.split(order, bounds[1:])
        options = [np.arange(columns.first[some[0]], columns.first[some[0] + 1]) for some in jobs]
        row = np.repeat(np.arange(len(jobs)), [len(some) for some in options])
        return cls(jobs, np.concatenate(options), row, np.array([len(some) for some in jobs], dtype=float))

    def spread(self, columns: QueueColumns, share: Floats) -> list[int]:
        """An option for every job: each class takes its options as often as the shares say, evenly by turns."""
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


def completion(columns: QueueColumns, classes: Classes, end_s: float) -> Relaxed:
    """The weighted mean of completion times: time is cut into parts, a job may be worked on in any of them, and it ends
    half its run after the mean of the times when it is worked on.

    Source: the mean busy time relaxation of Schulz and Skutella (SIAM J. Discrete Math. 15, 2002).
    """
    options = classes.option
    parts = int(np.clip(MOST_COLUMNS // len(options), 4, 64))
    edges = end_s * (np.arange(parts + 1) / parts) ** 1.5
    job = columns.job[options]
    each = columns.weight[job] / columns.weight.sum()
    length, area = columns.seconds[options], columns.seconds[options] * columns.gpus[options]
    cost = each[:, None] * (edges[:-1] + length[:, None] / 2)
    column = np.arange(cost.size).reshape(cost.shape)
    class_row = np.broadcast_to(classes.row[:, None], cost.shape)
    pool_row = len(classes.count) + columns.pool[options][:, None] * parts + np.arange(parts)
    room = (_gpus(columns)[:, None] * np.diff(edges)).ravel()
    solved = _minimum(
        cost.ravel(),
        [(class_row, column, np.ones_like(cost)), (pool_row, column, np.broadcast_to(area[:, None], cost.shape))],
        np.concatenate([classes.count, np.full(len(room), -math.inf)]),
        np.concatenate([classes.count, room]),
    )
    if solved is None:
        return Relaxed(None, _shortest(columns, classes))
    value, taken = solved
    first = np.flatnonzero(np.diff(classes.row, prepend=-1))
    alone = float((classes.count * np.minimum.reduceat(length, first) * each[first]).sum())
    waited = float((columns.weight * columns.arrival).sum() / columns.weight.sum())
    return Relaxed(max(value, alone) - waited, taken.reshape(-1, parts).sum(axis=1))


def peak(columns: QueueColumns, classes: Classes, since: Floats, scale: Floats, most: float) -> Relaxed:
    """The largest of `(end - since) / scale` over all jobs, where that is what counts: by bisection on it, each job is
    due by then, and the work that is due by any moment has to fit before it.

    Source: Lenstra, Shmoys and Tardos (Math. Programming 46, 1990), whose rounding it is not followed by.

    Args:
        columns: the jobs.
        classes: the same, equal ones as one.
        since: of each job, (n,).
        scale: of each job, (n,).
        most: what some plan reaches.
    """
    late = np.array([since[some].max() for some in classes.jobs])
    scales = np.array([scale[some[0]] for some in classes.jobs])
    low, high, share = 0.0, most, _shortest(columns, classes)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        taken = _by(columns, classes, late + middle * scales)
        if taken is None:
            low = middle
        else:
            high, share = middle, taken
    return Relaxed(low, share)


def cost(columns: QueueColumns, classes: Classes, missed: float) -> Relaxed:
    """The cost of all jobs, where at most so much weight of them may miss its deadline."""
    due = np.array([columns.due[some].max() for some in classes.jobs])
    options = classes.option
    rows = _due_rows(columns, classes, due, columns.cost[options], missed)
    return Relaxed(None if rows is None else rows[0], _shortest(columns, classes) if rows is None else rows[1])


def _by(columns: QueueColumns, classes: Classes, due: Floats) -> Floats | None:
    """Shares of options by which each class can end before it is due; None where none can."""
    solved = _due_rows(columns, classes, due, columns.seconds[classes.option] * columns.gpus[classes.option], 0.0)
    return None if solved is None else solved[1]


def _due_rows(
    columns: QueueColumns, classes: Classes, due: Floats, price: Floats, missed: float
) -> tuple[float, Floats] | None:
    """The least price of options by which classes end before they are due, but for so much weight that may not."""
    options = classes.option
    area = columns.seconds[options] * columns.gpus[options]
    is_late = columns.seconds[options] > due[classes.row]
    count, weight = len(options), columns.weight[columns.job[options]]
    finite = np.unique(due[np.isfinite(due)])
    moments = finite[np.unique(np.linspace(0, len(finite) - 1, _MOMENTS).astype(int))] if len(finite) else finite
    # Columns: options that end in time, then the same ones taken although they do not.
    column = np.arange(count)
    is_due = due[classes.row][:, None] <= moments
    choice, moment = np.nonzero(is_due & ~is_late[:, None])
    pools = len(columns.pools)
    classes_count = len(classes.count)
    moment_row = classes_count + 1 + columns.pool[options][choice] * len(moments) + moment
    room = (_gpus(columns)[:, None] * moments).ravel()
    return _minimum(
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
"""Moments at which what is due has to be done; others are left out, which only lowers a bound."""


def _gpus(columns: QueueColumns) -> Floats:
    return np.array([pool.gpus for pool in columns.pools], dtype=float)


def _shortest(columns: QueueColumns, classes: Classes) -> Floats:
    """Every class by its shortest option."""
    share = np.zeros(len(classes.option))
    for index, jobs in enumerate(classes.jobs):
        places = np.flatnonzero(classes.row == index)
        share[places[np.argmin(columns.seconds[classes.option[places]])]] = len(jobs)
    return share


def _minimum(
    price: Floats,
    entries: Sequence[tuple[Ints, Ints, Floats]],
    lower: Floats,
    upper: Floats,
    most: Floats | None = None,
    fold: int | None = None,
) -> tuple[float, Floats] | None:
    """The least of a linear function and where it is reached; None where nothing is allowed.

    Args:
        price: of each variable, all of which are at least 0.
        entries: rows, columns and values of the constraints.
        lower: of each row.
        upper: of each row.
        most: of each variable.
        fold: where variables repeat after so many, their sum is returned.
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
    solved = np.array(solver.getSolution().col_value)
    total = float(solver.getInfo().objective_function_value) * scale
    return total, solved if fold is None else solved.reshape(-1, fold).sum(axis=0)
