"""Enumerate the plans of a pool as columns, and price them by the formulas of `step` and `memory`.

`enumeration` lists the plans. `engines` says which of them a framework executes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from tilecast import memory, step, zoo
from tilecast.constants import Constants
from tilecast.hardware import Gpu, Pool
from tilecast.kernels import KernelTimes
from tilecast.memo import Memo
from tilecast.memory import Footprint
from tilecast.search.engines import FRAMEWORKS, Abilities, Dimension, Mask, abilities, engine
from tilecast.search.enumeration import (
    NO_LIMITS,
    Limits,
    allows_groups,
    allows_pieces,
    divisors,
    enumerate_bounded,
    enumerate_plans,
    expert_degrees,
    find_frameworks,
    has_equal_pieces,
    has_whole_groups,
    recomputations,
    splits_heads,
    stages_are_full,
)
from tilecast.spec import Floats, Ints, Plans, Workload
from tilecast.step import StepTimes, blocks
from tilecast.step.distinct import StepInputs
from tilecast.zoo import Sharded

__all__ = [
    "FRAMEWORKS",
    "NO_LIMITS",
    "Abilities",
    "Dimension",
    "Limits",
    "Mask",
    "PlanTable",
    "Priced",
    "abilities",
    "allows_groups",
    "allows_pieces",
    "divisors",
    "engine",
    "enumerate_plans",
    "expert_degrees",
    "find",
    "find_frameworks",
    "has_equal_pieces",
    "has_whole_groups",
    "plan_table",
    "price",
    "price_sharded",
    "recomputations",
    "splits_heads",
    "stages_are_full",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Priced:
    """Plans with their full prices on one pool, every column (n,)."""

    plans: Plans
    times: StepTimes
    footprint: Footprint
    usable_bytes: float

    @property
    def step_s(self) -> Floats:
        return self.times.total

    @property
    def launch_s(self) -> Floats:
        return self.times.launch

    @property
    def memory_bytes(self) -> Floats:
        return self.footprint.total

    @property
    def upper_bytes(self) -> Floats:
        return self.footprint.upper

    @property
    def fits(self) -> Mask:
        return self.footprint.total <= self.usable_bytes


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Plans of a pool with their bytes and seconds, as columns (n,); `price` gives rows with full prices.

    Bytes and seconds are evaluated at the first access.
    """

    plans: Plans
    usable_bytes: float
    is_bounded: bool
    """Whether some node counts were left out, because there were more plans than the limit."""
    _space: _Space
    _memory: Callable[[], tuple[Floats, Floats, memory.Bills]]
    _steps: Callable[[], tuple[step.Steps | None, Floats, Floats]]
    """Arguments of the formulas of steps (None for an empty table), seconds of each step, and seconds it waits for the
    host."""

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def sharded(self) -> Sharded:
        return self._space.sharded()

    @property
    def memory_bytes(self) -> Floats:
        return self._memory()[0]

    @property
    def upper_bytes(self) -> Floats:
        """Upper end of the memory range, (n,)."""
        return self._memory()[1]

    @property
    def fits(self) -> Mask:
        return self.memory_bytes <= self.usable_bytes

    @property
    def step_s(self) -> Floats:
        return self._steps()[1]

    @property
    def launch_s(self) -> Floats:
        """Seconds of each step that wait for the host, (n,)."""
        return self._steps()[2]

    def bill(self, rows: Ints) -> Footprint:
        """Return the memory bills of some of the rows, in the given order."""
        return self._memory()[2].rows(rows)

    def price(self, rows: Ints) -> Priced:
        """Return the full prices of some of the rows, in the given order.

        Raises:
            IndexError: the table has no rows.
        """
        steps = self._steps()[0]
        if steps is None:
            raise IndexError("a table of no plans has no rows")
        return Priced(self.plans.take(rows), steps.rows(rows), self.bill(rows), self.usable_bytes)


def find(workload: Workload, pool: Pool, limits: Limits = NO_LIMITS) -> PlanTable:
    """Return every plan of a pool that divides evenly and that the workload's framework executes, with prices.

    Raises:
        SpecError: the pool's GPU or the framework cannot run the workload's precision, or the framework cannot offload
            as the workload asks.
    """
    return _TABLES.get(
        (workload, pool, limits), lambda: _build_plan_table(workload, _find_space(workload, pool, limits), pool)
    )


def plan_table(workload: Workload, plans: Plans, pool: Pool) -> PlanTable:
    """Return the given plans with prices on a pool.

    Raises:
        SpecError: the pool's GPU cannot run the workload's precision.
    """
    return _build_plan_table(workload, _Space.from_plans(workload, plans, False, pool), pool)


def _find_space(workload: Workload, pool: Pool, limits: Limits) -> _Space:
    """Return the enumerated plans of a workload, shared by all pools of one shape."""
    gpu = pool.gpu
    gpu_key = bool(gpu.mig), memory.reads_both_layouts(gpu)
    key = workload, pool.gpus_per_node, pool.max_nodes, pool.domain, *gpu_key, limits
    return _SPACES.get(key, lambda: _Space.from_plans(workload, *enumerate_bounded(workload, pool, limits), pool))


def _build_plan_table(workload: Workload, space: _Space, pool: Pool) -> PlanTable:
    """Return plans with prices on a pool, which are evaluated at the first access."""
    zoo.find_builder(workload)
    pool.gpu.peak(workload.precision)
    gpu_bytes, priced = cache(lambda: space.gpu_bytes(pool.gpu)), cache(lambda: _price_steps(workload, space, pool))
    return PlanTable(space.plans, memory.usable_bytes(pool.gpu), space.is_bounded, space, gpu_bytes, priced)


def _price_steps(workload: Workload, space: _Space, pool: Pool) -> tuple[step.Steps | None, Floats, Floats]:
    """Return the arguments of the formulas of steps, the seconds of each step, and its stalls by the host."""
    plans, steps = space.plans, None
    step_s, launch_s = np.empty((2, len(plans)))
    if len(plans):
        sharded = space.sharded()
        kernels = blocks.kernel_seconds(workload, sharded, pool.gpu)
        steps = step.Steps.from_plans(workload, plans, space.inputs(), pool, kernels)
        for rows in _split_rows(plans):
            times = steps.rows(rows)
            step_s[rows], launch_s[rows] = times.total, times.launch
    for column in (step_s, launch_s):
        column.setflags(write=False)
    return steps, step_s, launch_s


@dataclass(frozen=True, slots=True)
class _Space:
    """Plans of a workload with those parts of their prices that are equal on all pools of one shape."""

    plans: Plans
    is_bounded: bool
    sharded: Callable[[], Sharded]
    inputs: Callable[[], StepInputs]
    memory_bills: Callable[[], tuple[memory.Bills, Floats, Floats]]
    """Memory bills, and least bytes and bytes of an allocator with room, both without the GPU's context."""

    @classmethod
    def from_plans(cls, workload: Workload, plans: Plans, is_bounded: bool, pool: Pool) -> _Space:
        splits = cache(plans.distinct_splits)

        def shard() -> Sharded:
            return zoo.shard(workload, plans.take(splits().first)).take(splits().index)

        sharded = cache(shard)

        def memory_bills() -> tuple[memory.Bills, Floats, Floats]:
            least, reserved = np.empty((2, len(plans)))
            bills = memory.Bills.of(workload, sharded(), plans, pool.gpu, splits())
            for rows in _split_rows(plans):
                bill = bills.rows(rows)
                least[rows] = bill.least
                reserved[rows] = least[rows] + bill.cached
            return bills, least, reserved

        return cls(
            plans,
            is_bounded,
            sharded,
            cache(lambda: StepInputs.from_plans(sharded(), plans, pool, splits=splits())),
            cache(memory_bills),
        )

    def gpu_bytes(self, gpu: Gpu) -> tuple[Floats, Floats, memory.Bills]:
        """Return the bytes that each plan needs on a GPU, (n,), the upper end of their range, (n,), and the bills."""
        common_bills, least, reserved = self.memory_bills()
        bills = common_bills.on_gpu(gpu)
        needed, upper = np.empty((2, len(self.plans)))
        for rows in _split_rows(self.plans):
            context = bills.context_of(rows)
            needed[rows] = least[rows] + context
            upper[rows] = memory.upper_bytes(reserved[rows] + context, bills.error)
        for column in (needed, upper):
            column.setflags(write=False)  # it is handed out more than once
        return needed, upper, bills


_SPACES: Memo[_Space] = Memo(4)
_TABLES: Memo[PlanTable] = Memo(8)


def _split_rows(plans: Plans) -> Iterator[slice]:
    """Return slices that cover all plans, of at most `CHUNK` rows each."""
    return (slice(start, start + CHUNK) for start in range(0, len(plans), CHUNK))


CHUNK = 1 << 14
"""Plans that are priced at once, so that their columns stay in the processor's second-level cache."""


def price(workload: Workload, plans: Plans, pool: Pool) -> Priced:
    """Return the full prices of all plans on a pool.

    Raises:
        SpecError: the pool's GPU cannot run the workload's precision.
    """
    sharded = zoo.shard(workload, plans)
    return price_sharded(workload, sharded, plans, pool)


def price_sharded(
    workload: Workload,
    sharded: Sharded,
    plans: Plans,
    pool: Pool,
    fitted: Constants | None = None,
    timed: KernelTimes | None = None,
) -> Priced:
    """Return the full prices of all plans on a pool, from inputs that are at hand.

    Args:
        workload: the job.
        sharded: its graph under the plans' shards, which does not depend on the pool.
        plans: the plans, (n,).
        pool: the pool.
        fitted: constants to use instead of those that ship.
        timed: seconds of the graph's kernels; None evaluates them.
    """
    priced = blocks.kernel_seconds(workload, sharded, pool.gpu, fitted, timed)
    times = step.step(workload, sharded, plans, pool, priced, fitted)
    bills = memory.footprint(workload, sharded, plans, pool.gpu)
    return Priced(plans, times, bills, memory.usable_bytes(pool.gpu))
