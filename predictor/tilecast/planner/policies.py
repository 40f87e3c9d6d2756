"""Policies of a queue: each defines the objective by which plans are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tilecast.planner.columns import QueueColumns
from tilecast.spec import Floats, Ints

Terms: TypeAlias = tuple[Floats | None, tuple[Floats, ...]]


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """An objective by which plans are compared in lexicographic order.

    The first value compared is the total weight of the jobs that miss their deadline. The maximum of one quantity over
    all jobs comes next, and then sums over jobs.
    """

    name: str
    summary: str
    terms: Callable[[QueueColumns, Ints, Ints, Floats], Terms]
    """Function that returns what jobs add to the score.

    Its arguments are the columns, some jobs (k,), their options (k,) and their ends (k,). It returns the column whose
    maximum is minimized first, or None, and the columns whose sums are minimized next, (k,) each.
    """
    stake: Callable[[QueueColumns, int, int, float], float]
    """Function that returns by how much a longer run of one job raises the deciding value.

    Its arguments are the columns, a job, an option, and the added run time as a ratio.
    """
    rank: Callable[[QueueColumns, Ints, float], Floats]
    """Function that returns the keys by which jobs are sorted in a free order, (n,).

    Its arguments are the columns, an option of each job (n,), and the deciding value of a plan.
    """
    deciding: int = 1
    """Index of the score's value by which plans are judged. The values before it are only counts."""
    unit: Literal["seconds", "price", "ratio"] = "seconds"
    needs_price: bool = False
    has_equal_jobs: bool = True
    """Whether jobs that differ only in name and arrival are interchangeable once they have arrived."""

    def __reduce__(self) -> tuple[Callable[[str], QueuePolicy], tuple[str]]:
        """Pickle the policy by its name, because its functions cannot be pickled."""
        return _find_policy, (self.name,)


def _completion_score_terms(columns: QueueColumns, jobs: Ints, options: Ints, finish: Floats) -> Terms:
    return None, (_completion_fraction(columns, jobs, finish), columns.cost[options])


def _completion_fraction(columns: QueueColumns, jobs: Ints, finish: Floats) -> Floats:
    """Return what each of k jobs adds to the weighted mean completion time, in seconds, (k,)."""
    return np.asarray(columns.share[jobs] * (finish - columns.arrival[jobs]))


def _makespan_score_terms(columns: QueueColumns, jobs: Ints, options: Ints, finish: Floats) -> Terms:
    return finish, (_completion_fraction(columns, jobs, finish), columns.cost[options])


def _cost_score_terms(columns: QueueColumns, jobs: Ints, options: Ints, finish: Floats) -> Terms:
    return None, (columns.cost[options], _completion_fraction(columns, jobs, finish))


def _fairness_score_terms(columns: QueueColumns, jobs: Ints, options: Ints, finish: Floats) -> Terms:
    ratio = (finish - columns.arrival[jobs]) / columns.alone[jobs]
    return ratio, (ratio / len(columns.weight), columns.cost[options])


def smith_ratio(columns: QueueColumns, options: Ints) -> Floats:
    """Return the time that each option occupies its whole pool, divided by the weight of its job, in seconds, (k,).

    If GPUs were divisible, jobs in ascending order of this ratio would have the least weighted mean completion time.

    Source: Smith (Naval Research Logistics Quarterly 3, 1956).
    """
    room = np.array([max(pool.gpus, 1) for pool in columns.pools])[columns.pool[options]]
    return np.asarray(columns.seconds[options] * columns.gpus[options] / room / columns.weight[columns.job[options]])


def _completion_stake(columns: QueueColumns, job: int, option: int, ratio: float) -> float:
    return float(columns.share[job] * columns.seconds[option] * ratio)


def _fairness_stake(columns: QueueColumns, job: int, option: int, ratio: float) -> float:
    return float(columns.seconds[option] * ratio / columns.alone[job])


POLICIES: dict[str, QueuePolicy] = {
    record.name: record
    for record in (
        QueuePolicy(
            "completion", "the least weighted mean of completion times", _completion_score_terms, _completion_stake,
            lambda columns, options, value: smith_ratio(columns, options),
        ),
        QueuePolicy(
            "makespan", "the earliest end of the last job", _makespan_score_terms,
            lambda columns, job, option, ratio: float(columns.seconds[option] * ratio),
            lambda columns, options, value: -columns.seconds[options],
        ),
        QueuePolicy(
            "cost", "the least cost", _cost_score_terms,
            lambda columns, job, option, ratio: float(columns.cost[option] * ratio),
            lambda columns, options, value: smith_ratio(columns, options),
            unit="price", needs_price=True,
        ),
        QueuePolicy(
            "fairness", "the least of the largest finish-time fairness ratio", _fairness_score_terms, _fairness_stake,
            lambda columns, options, value: columns.arrival + value * columns.alone - columns.seconds[options],
            unit="ratio", has_equal_jobs=False,
        ),
    )
}  # fmt: skip
"""Policies by their names for `--policy`."""


def _find_policy(name: str) -> QueuePolicy:
    return POLICIES[name]
