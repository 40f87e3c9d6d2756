"""The 90 % ranges of starts and ends of a planned queue.

The queue is simulated with every forecast at the lower end of its range, and again at the upper end. This would give
the range of each start if all forecasts were wrong in the same direction. But only a part of a forecast's error is
common to all jobs (`ranges.toml`). The rest is independent between workloads and partly cancels in the sum of the work
ahead of a job, which makes the ranges narrower. Jobs that train the same way on the same pool share one forecast of
their step, and thus one error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

import numpy as np

from tilecast.planner.assignment import Assignment
from tilecast.planner.columns import QueueColumns
from tilecast.planner.policies import QueuePolicy
from tilecast.planner.problem import JobOption
from tilecast.shipped import NumbersFile
from tilecast.spec import Floats, Ints


@dataclass(frozen=True, slots=True)
class TimeRanges:
    """Starts and ends of n jobs with their 90 % ranges, in seconds from now, (n,) each."""

    start: Floats
    start_lower: Floats
    start_upper: Floats
    finish: Floats
    finish_lower: Floats
    finish_upper: Floats


@cache
def shipped_common_share() -> float:
    """Return the common share of the errors of forecasts, from `ranges.toml`: the same error in all jobs of a queue."""
    return NumbersFile.read_shipped("tilecast.planner", "ranges.toml").read_numbers("starts", ("common",))["common"]


def simulate_ends(
    columns: QueueColumns, policy: QueuePolicy, option: Sequence[int]
) -> tuple[Assignment, Assignment, Assignment]:
    """Return a plan simulated three times: with all forecasts as they are, and at both ends of their ranges.

    The order is (forecasts, lower ends, upper ends).
    """
    lower, upper = (
        replace(columns, seconds=np.fromiter(map(attrgetter(name), columns.options), float, len(columns.options)))
        for name in ("lower_s", "upper_s")
    )
    plan, early, late = (Assignment(each, policy, list(option)) for each in (columns, lower, upper))
    return plan, early, late


def find_ranges(columns: QueueColumns, policy: QueuePolicy, option: Sequence[int]) -> TimeRanges:
    """Return the starts and ends of all jobs of a plan with their ranges.

    Args:
        columns: the queue.
        policy: the policy of the plan.
        option: the option of each job, (n,).
    """
    plan, *others = simulate_ends(columns, policy, option)
    chosen, ends = np.array(option, dtype=int), [item.finish for item in (plan, *others)]
    found = np.zeros((6, len(chosen)))
    for pool in plan.pools:
        rows = np.array(pool.jobs, dtype=int)
        if len(rows):
            here = find_pool_ranges(columns, chosen[rows], [item[rows] for item in ends])
            found[:, rows] = [getattr(here, name) for name in TimeRanges.__slots__]
    return TimeRanges(*found)


def find_pool_ranges(columns: QueueColumns, options: Ints, finish: Sequence[Floats]) -> TimeRanges:
    """Return the starts and ends of the k jobs of one pool with their ranges.

    Args:
        columns: the queue.
        options: the option of each job, (k,).
        finish: the end of each job at the forecasts, at the lower and at the upper ends of their ranges, (k,) each.
    """
    chosen = [columns.options[item] for item in options.tolist()]
    run = [columns.seconds[options], *(np.array([getattr(item, name) for item in chosen]) for name in _ENDS)]
    start, early, late = (np.maximum(end - taken, 0.0) for end, taken in zip(finish, run, strict=True))
    share, correlation = find_start_shares(start, run[0] * columns.gpus[options], _number_forecasts(chosen))
    low = _interpolate(start, np.minimum(np.minimum(early, late), start), share)
    high = _interpolate(start, np.maximum(np.maximum(early, late), start), share)
    return TimeRanges(
        start,
        low,
        high,
        finish[0],
        finish[0] - _combine_half_widths(start - low, run[0] - run[1], correlation),
        finish[0] + _combine_half_widths(high - start, run[2] - run[0], correlation),
    )


_ENDS = "lower_s", "upper_s"


def find_start_shares(start: Floats, work: Floats, kinds: Ints) -> tuple[Floats, Floats]:
    """Return how uncertain each start of a pool is, and its correlation with the job's own run, (k,) each.

    A start's uncertainty is a share of the width between all forecasts low and all high: 1 if all forecasts err alike.
    The errors of the jobs that start earlier are partly common to all jobs. The other part is common to the jobs of one
    kind, is independent between kinds, and adds up in quadrature, weighted by the work of each kind.

    Args:
        start: start of each job, (k,).
        work: GPU seconds of each job, (k,).
        kinds: number of the forecast that each job shares with others, (k,).
    """
    order = np.argsort(start, kind="stable")
    ahead = np.searchsorted(start[order], start * (1 - 1e-9) - 1e-9)
    earlier, alike = _sum_earlier_of_kind(work[order], kinds[order], ahead[order])
    total, squares = (
        np.append(0.0, np.cumsum(values)) for values in (work[order], work[order] * (work[order] + 2 * earlier))
    )
    is_behind = total[ahead] > 0
    own = np.divide(squares[ahead], total[ahead] ** 2, out=np.ones(len(start)), where=is_behind)
    same = np.zeros(len(start))
    same[order] = alike
    same = np.divide(same, total[ahead], out=np.zeros(len(start)), where=is_behind)
    common = shipped_common_share()
    share = np.sqrt(common**2 + (1 - common**2) * own)
    return np.asarray(share), np.asarray((common**2 + (1 - common**2) * same) / share)


def _sum_earlier_of_kind(work: Floats, kinds: Ints, ahead: Ints) -> tuple[Floats, Floats]:
    """Return the work of each job's kind before the job, with and without jobs that start with it, (k,) each.

    Args:
        work: GPU seconds of each job in the order of the starts, (k,).
        kinds: number of the forecast of each job, (k,).
        ahead: number of jobs that start earlier than each, (k,).
    """
    order = np.argsort(kinds, kind="stable")
    kinds, ahead = kinds[order], ahead[order]
    before = np.cumsum(work[order]) - work[order]
    is_first = np.diff(kinds, prepend=-1) != 0
    is_later = is_first | (np.diff(ahead, prepend=-1) != 0)
    found = np.empty((2, len(work)))
    of_kind = before - before[is_first][np.cumsum(is_first) - 1]
    found[:, order] = of_kind, of_kind[is_later][np.cumsum(is_later) - 1]
    return found[0], found[1]


def _number_forecasts(options: Sequence[JobOption]) -> Ints:
    """Return a number for each option, from 0, the same for options whose forecasts have one error, (k,)."""
    numbers = dict[tuple[object, ...], int]()
    keys = (
        (row,) if math.isnan(item.step_s) else (item.plan, item.gpus, item.step_s) for row, item in enumerate(options)
    )
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=int)


def _combine_half_widths(start: Floats, run: Floats, correlation: Floats) -> Floats:
    """Return the half-width of each end, from those of start and run and their correlation, (k,)."""
    return np.asarray(np.sqrt(start**2 + run**2 + 2 * correlation * start * run))


def _interpolate(start: Floats, end: Floats, share: Floats) -> Floats:
    """Return values between `start` and `end`, (k,): `start` for a share of 0, `end` for a share of 1.

    Positive finite values are interpolated on a logarithmic scale, other values linearly.
    """
    is_positive = (start > 0) & (end > 0) & np.isfinite(start) & np.isfinite(end)
    ratio = np.divide(end, start, out=np.ones(len(start)), where=is_positive)
    linear = start + np.subtract(end, start, out=np.zeros(len(start)), where=np.isfinite(start)) * share
    return np.where(is_positive, start * ratio**share, linear)
