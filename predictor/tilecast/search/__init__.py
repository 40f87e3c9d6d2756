"""Every plan of a pool as columns. No formula lives here: `step` and `memory` price what this enumerates.

`enumeration` says which plans there are, `engines` which of them a framework executes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast import memory, models, step
from tilecast.constants import Constants
from tilecast.hardware import Gpu, Pool
from tilecast.kernels import KernelTimes
from tilecast.memo import Memo
from tilecast.memory import Footprint
from tilecast.models import Sharded
from tilecast.search.engines import FRAMEWORKS, Abilities, Dimension, Mask, abilities, engine
from tilecast.search.enumeration import (
    NO_LIMITS,
    Limits,
    divisors,
    enumerate_bounded,
    enumerate_plans,
    expert_degrees,
    splits_heads,
    stages_are_full,
)
from tilecast.spec import Floats, Ints, Plans, Precision, Workload
from tilecast.step import StepTimes, blocks

__all__ = [
    "FRAMEWORKS", "NO_LIMITS", "Abilities", "Dimension", "Found", "Limits", "Mask", "Priced", "abilities", "divisors",
    "engine", "enumerate_plans", "expert_degrees", "find", "fitting", "price", "price_sharded", "splits_heads",
    "stages_are_full", "those", "variants",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan table with its prices on one pool, every column (n,)."""

    plans: Plans
    sharded: Sharded
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
class Found:
    """Plans of a pool with their prices, as columns of shape (n,); `price` tells any of the rows in full."""

    plans: Plans
    sharded: Sharded
    step_s: Floats
    launch_s: Floats
    """The part of the step that waits for the host."""
    memory_bytes: Floats
    upper_bytes: Floats
    """The upper end of the memory's range."""
    usable_bytes: float
    is_bounded: bool
    """Whether there were more plans than the limit, so that not every node count was tried."""
    _steps: step.Steps | None
    """What the prices were put together from; None of an empty table."""
    _bills: memory.Bills

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def fits(self) -> Mask:
        return self.memory_bytes <= self.usable_bytes

    def price(self, rows: Ints) -> Priced:
        """Some of the rows in full, in the order given.

        Raises:
            IndexError: the table has no rows.
        """
        if self._steps is None:
            raise IndexError("a table of no plans has no rows")
        parts = self.plans.take(rows), self.sharded.take(rows), self._steps.rows(rows), self._bills.rows(rows)
        return Priced(*parts, self.usable_bytes)


def find(workload: Workload, pool: Pool, limits: Limits = NO_LIMITS) -> Found:
    """Every plan of a pool that divides and that the workload's framework executes, priced.

    Raises:
        SpecError: the pool's GPU or the framework cannot run the workload's precision, or the framework cannot offload
            as the workload asks.
    """
    return _FOUND.get((workload, pool, limits), lambda: _found(workload, _space(workload, pool, limits), pool))


def those(workload: Workload, plans: Plans, pool: Pool) -> Found:
    """Given plans instead of those that `find` enumerates.

    Raises:
        SpecError: the pool's GPU cannot run the workload's precision.
    """
    return _found(workload, _Space.of(workload, plans, False, pool), pool)


def fitting(workload: Workload, pool: Pool, limits: Limits = NO_LIMITS) -> Plans:
    """The plans that `find` finds and the pool's GPU holds; no step is priced.

    Raises:
        SpecError: as `find`.
    """
    pool.gpu.peak(workload.precision)
    space = _space(workload, pool, limits)
    needed, _, _ = space.needed(pool.gpu)
    return space.plans.take(needed <= memory.usable_bytes(pool.gpu))


def _space(workload: Workload, pool: Pool, limits: Limits) -> _Space:
    gpu = pool.gpu
    alike = bool(gpu.mig), memory.reads_either(gpu)
    key = workload, pool.gpus_per_node, pool.max_nodes, pool.domain, *alike, limits
    return _SPACES.get(key, lambda: _Space.of(workload, *enumerate_bounded(workload, pool, limits), pool))


def _found(workload: Workload, space: _Space, pool: Pool) -> Found:
    plans, steps = space.plans, None
    step_s, launch_s = np.empty((2, len(plans)))
    if len(plans):
        priced = blocks.kernel_seconds(workload, space.sharded, pool.gpu)
        steps = step.Steps.of(workload, space.sharded, plans, pool, priced, alike=space.alike)
        for rows in _chunks(plans):
            times = steps.rows(rows)
            step_s[rows], launch_s[rows] = times.total, times.launch
    needed, upper, bills = space.needed(pool.gpu)
    for column in (step_s, launch_s, needed, upper):
        column.setflags(write=False)  # it is handed out more than once
    usable = memory.usable_bytes(pool.gpu)
    return Found(plans, space.sharded, step_s, launch_s, needed, upper, usable, space.is_bounded, steps, bills)


@dataclass(frozen=True, slots=True)
class _Space:
    """What a workload's plans are and cost on all pools of one shape."""

    plans: Plans
    is_bounded: bool
    sharded: Sharded
    alike: step.Alike
    bills: memory.Bills
    least_bytes: Floats
    """What a plan cannot do without, and what an allocator with room holds, both without the GPU's context."""
    reserved_bytes: Floats

    @classmethod
    def of(cls, workload: Workload, plans: Plans, is_bounded: bool, pool: Pool) -> _Space:
        least, reserved = np.empty((2, len(plans)))
        sharded = models.shard(workload, plans)
        bills = memory.Bills.of(workload, sharded, plans, pool.gpu)
        for rows in _chunks(plans):
            bill = bills.rows(rows)
            least[rows], reserved[rows] = bill.least, bill.reserved
        return cls(plans, is_bounded, sharded, step.Alike.of(sharded, plans, pool), bills, least, reserved)

    def needed(self, gpu: Gpu) -> tuple[Floats, Floats, memory.Bills]:
        """Bytes that each plan needs on a GPU, the upper end of their range, both (n,), and the bills behind them."""
        bills = self.bills.on(gpu)
        needed, upper = np.empty((2, len(self.plans)))
        for rows in _chunks(self.plans):
            context = bills.context_of(rows)
            needed[rows] = self.least_bytes[rows] + context
            upper[rows] = memory.upper_bytes(self.reserved_bytes[rows] + context, bills.error)
        return needed, upper, bills


_SPACES: Memo[tuple[Workload, int, int, int, bool, bool, Limits], _Space] = Memo(4)
_FOUND: Memo[tuple[Workload, Pool, Limits], Found] = Memo(8)


def _chunks(plans: Plans) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, len(plans), CHUNK))


CHUNK = 1 << 14
"""Plans that are put together at once: their columns stay in the processor's second-level cache."""


def variants(workload: Workload, precisions: Sequence[Precision]) -> tuple[Workload, ...]:
    """The workload in each precision that its user allows, its own first."""
    others = [name for name in dict.fromkeys(precisions) if name != workload.precision]
    return (workload, *(replace(workload, precision=name) for name in others))


def price(workload: Workload, plans: Plans, pool: Pool) -> Priced:
    """Step time and memory of every plan on a pool.

    Raises:
        SpecError: the pool's GPU cannot run the workload's precision.
    """
    sharded = models.shard(workload, plans)
    return price_sharded(workload, sharded, plans, pool)


def price_sharded(
    workload: Workload,
    sharded: Sharded,
    plans: Plans,
    pool: Pool,
    fitted: Constants | None = None,
    timed: KernelTimes | None = None,
) -> Priced:
    """As `price`, with what is at hand already: the graph (which does not depend on the pool), other constants,
    kernel times."""
    priced = blocks.kernel_seconds(workload, sharded, pool.gpu, fitted, timed)
    times = step.step(workload, sharded, plans, pool, priced, fitted)
    bills = memory.footprint(workload, sharded, plans, pool.gpu)
    return Priced(plans, sharded, times, bills, memory.usable_bytes(pool.gpu))
