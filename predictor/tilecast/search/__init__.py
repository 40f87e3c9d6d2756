"""List all training plans of a GPU pool, and forecast the seconds and the memory of each plan.

`enumeration` lists the plans as columns. `engines` says which plans a training framework executes. The formulas of
seconds and memory are in `step` and `memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tilecast import memory, step, zoo
from tilecast.constants import Constants
from tilecast.hardware import Gpu, Pool
from tilecast.kernels import KernelTimes
from tilecast.memo import Memo, once
from tilecast.memory import Footprint
from tilecast.search.engines import FRAMEWORKS, Dimension, FrameworkFeatures, Mask, find_engine, find_framework_features
from tilecast.search.enumeration import (
    NO_LIMITS,
    PlanLimits,
    can_schedule_virtual_stages,
    can_split_heads,
    can_use_hybrid_sharding,
    divides_into_shard_groups,
    divisors,
    enumerate_bounded,
    enumerate_plans,
    find_frameworks,
    has_equal_virtual_stages,
    has_full_stages,
    list_expert_degrees,
    list_searched_recomputations,
    list_searched_schedules,
)
from tilecast.spec import DistinctRows, Floats, Ints, Plans, Workload
from tilecast.step import StepTimes, blocks
from tilecast.step.distinct import StepInputs
from tilecast.zoo import ShardedGraph

__all__ = [
    "FRAMEWORKS",
    "NO_LIMITS",
    "Dimension",
    "FrameworkFeatures",
    "Mask",
    "PlanLimits",
    "PlanTable",
    "PricedPlans",
    "can_schedule_virtual_stages",
    "can_split_heads",
    "can_use_hybrid_sharding",
    "divides_into_shard_groups",
    "divisors",
    "enumerate_plans",
    "find",
    "find_engine",
    "find_framework_features",
    "find_frameworks",
    "has_equal_virtual_stages",
    "has_full_stages",
    "list_expert_degrees",
    "list_searched_recomputations",
    "list_searched_schedules",
    "price",
    "price_sharded",
    "tabulate_plans",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class PricedPlans:
    """Forecast seconds and memory of n plans on one pool, itemized, as columns of shape (n,)."""

    plans: Plans
    times: StepTimes
    footprint: Footprint
    usable_bytes: float

    @property
    def step_s(self) -> Floats:
        return self.times.total

    @property
    def launch_s(self) -> Floats:
        """Seconds of each step in which the GPU waits for the host, (n,)."""
        return self.times.launch

    @property
    def memory_bytes(self) -> Floats:
        return self.footprint.total

    @property
    def upper_bytes(self) -> Floats:
        """Upper end of the range of each plan's memory, (n,)."""
        return self.footprint.upper_bytes

    @property
    def fits(self) -> Mask:
        """Whether each plan needs at most the usable memory of a GPU, (n,)."""
        return self.footprint.total <= self.usable_bytes


@dataclass(frozen=True, slots=True)
class PlanTable:
    """All n plans that a search found on one pool, with their memory and seconds as columns of shape (n,).

    Memory and seconds are computed at the first access. `price` itemizes the memory and the seconds of some rows.
    """

    plans: Plans
    usable_bytes: float
    is_bounded: bool
    """Whether the search left out some plans, because there were more than its limits."""
    _space: _SearchSpace
    _memory: Callable[[], tuple[Floats, Floats, memory.FootprintTable]]
    _steps: Callable[[], tuple[step.Steps | None, Floats, Floats]]
    """Function that returns the inputs of the step formulas, the step seconds and the host stalls of all plans.

    A host stall is the time in which the GPU waits for the host. The inputs are None in an empty table.
    """

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def sharded(self) -> ShardedGraph:
        return self._space.sharded()

    @property
    def memory_bytes(self) -> Floats:
        return self._memory()[0]

    @property
    def upper_bytes(self) -> Floats:
        """Upper end of the range of each plan's memory, (n,)."""
        return self._memory()[1]

    @property
    def fits(self) -> Mask:
        """Whether each plan needs at most the usable memory of a GPU, (n,)."""
        return self.memory_bytes <= self.usable_bytes

    @property
    def step_s(self) -> Floats:
        return self._steps()[1]

    @property
    def launch_s(self) -> Floats:
        """Seconds of each step in which the GPU waits for the host, (n,)."""
        return self._steps()[2]

    def itemize_memory(self, rows: Ints) -> Footprint:
        """Return the itemized memory of the plans at the indexes `rows`, in the order of `rows`."""
        return self._memory()[2].rows(rows)

    def price(self, rows: Ints) -> PricedPlans:
        """Return the itemized seconds and memory of the plans at the indexes `rows`, in the order of `rows`.

        Raises:
            IndexError: the table has no rows.
        """
        steps = self._steps()[0]
        if steps is None:
            raise IndexError("a table of no plans has no rows")
        return PricedPlans(self.plans.take(rows), steps.rows(rows), self.itemize_memory(rows), self.usable_bytes)


def find(workload: Workload, pool: Pool, limits: PlanLimits = NO_LIMITS) -> PlanTable:
    """Return the table of all plans that a workload can train with on a pool.

    A plan divides the model, the batch and the GPUs without remainder, and the workload's framework executes it.

    Raises:
        SpecError: the pool's GPU or the framework cannot run the workload's precision, or the framework cannot offload
            as the workload asks.
    """
    tables = _TABLES if limits.gpus is None else _TABLES_OF_A_COUNT
    return tables.get(
        (workload, pool, limits), lambda: _build_plan_table(workload, _find_search_space(workload, pool, limits), pool)
    )


def tabulate_plans(workload: Workload, plans: Plans, pool: Pool) -> PlanTable:
    """Return a table of the given plans and no others, for a workload on a pool.

    Raises:
        SpecError: the pool's GPU cannot run the workload's precision.
    """
    return _build_plan_table(workload, _SearchSpace.from_plans(workload, plans, False, pool), pool)


def _find_search_space(workload: Workload, pool: Pool, limits: PlanLimits) -> _SearchSpace:
    """Return all plans of a workload on a pool, from a cache that pools of equal shape share."""
    gpu = pool.gpu
    gpu_key = bool(gpu.mig), memory.reads_weights_in_both_layouts(gpu)
    key = workload, pool.gpus_per_node, pool.max_nodes, pool.spare_gpus, pool.domain, *gpu_key, limits

    def enumerate_space() -> _SearchSpace:
        found = enumerate_bounded(workload, pool, limits)
        return _SearchSpace.from_plans(workload, found.plans, found.is_bounded, pool, found.splits)

    spaces = _SPACES if limits.gpus is None else _SPACES_OF_A_COUNT
    return spaces.get(key, enumerate_space)


def _build_plan_table(workload: Workload, space: _SearchSpace, pool: Pool) -> PlanTable:
    """Return a table of the plans of a search space on a pool. Its seconds and memory are computed at first access."""
    zoo.find_builder(workload)
    pool.gpu.peak(workload.precision)
    gpu_bytes, priced = once(lambda: space.gpu_bytes(pool.gpu)), once(lambda: _price_steps(workload, space, pool))
    return PlanTable(space.plans, memory.usable_bytes(pool.gpu), space.is_bounded, space, gpu_bytes, priced)


def _price_steps(workload: Workload, space: _SearchSpace, pool: Pool) -> tuple[step.Steps | None, Floats, Floats]:
    """Return the inputs of the step formulas, and the seconds of each plan's step and host stalls, (n,) each.

    A host stall is the time in which the GPU waits for the host. The inputs are None if there are no plans.
    """
    plans, steps = space.plans, None
    step_s, launch_s = np.empty((2, len(plans)))
    if len(plans):
        inputs = space.inputs()
        kernels = blocks.kernel_seconds(workload, inputs.sharded, pool.gpu)
        steps = step.Steps.from_plans(workload, plans, inputs, pool, kernels)
        for rows in _split_rows(plans):
            step_s[rows], launch_s[rows] = steps.total_seconds(rows)
    for column in (step_s, launch_s):
        column.setflags(write=False)
    return steps, step_s, launch_s


@dataclass(frozen=True, slots=True)
class _SearchSpace:
    """Plans of a workload, with functions that compute what is equal on all pools of one shape."""

    plans: Plans
    is_bounded: bool
    sharded: Callable[[], ShardedGraph]
    inputs: Callable[[], StepInputs]
    itemized_memory: Callable[[], tuple[memory.FootprintTable, Floats, Floats]]
    """Function that returns the itemized memory and two columns of bytes, (n,) each.

    The columns are the bytes that each plan needs, and the bytes that an allocator reserves if the GPU has room.
    Neither counts the CUDA context.
    """

    @classmethod
    def from_plans(
        cls, workload: Workload, plans: Plans, is_bounded: bool, pool: Pool, known: DistinctRows | None = None
    ) -> _SearchSpace:
        """Return the search space of a workload's plans. Intermediate results are computed at the first access.

        `known` is `plans.distinct_splits()`, or None.
        """
        splits = once(plans.distinct_splits if known is None else lambda: known)

        def shard_distinct() -> tuple[ShardedGraph, Plans]:
            distinct = plans.take(splits().first)
            return zoo.build_sharded_graph(workload, distinct), distinct

        sharded = once(shard_distinct)

        def itemized_memory() -> tuple[memory.FootprintTable, Floats, Floats]:
            least, reserved = np.empty((2, len(plans)))
            bills = memory.FootprintTable.from_distinct(workload, *sharded(), plans, pool.gpu, splits())
            for rows in _split_rows(plans):
                least[rows], reserved[rows] = bills.allocator_bytes(rows)
            return bills, least, reserved

        return cls(
            plans,
            is_bounded,
            once(lambda: sharded()[0].take(splits().index)),
            once(lambda: StepInputs.from_distinct(*sharded(), splits().index, pool)),
            once(itemized_memory),
        )

    def gpu_bytes(self, gpu: Gpu) -> tuple[Floats, Floats, memory.FootprintTable]:
        """Return each plan's bytes on a GPU, (n,), upper limits of these bytes, (n,), and the itemized memory."""
        common_bills, least, reserved = self.itemized_memory()
        bills = common_bills.on_gpu(gpu)
        needed, upper = np.empty((2, len(self.plans)))
        for rows in _split_rows(self.plans):
            context = bills.context_bytes_of(rows)
            needed[rows] = least[rows] + context
            upper[rows] = memory.upper_bytes(reserved[rows] + context, bills.error)
        for column in (needed, upper):
            column.setflags(write=False)  # it is handed out more than once
        return needed, upper, bills


_SPACES: Memo[_SearchSpace] = Memo(4)
_TABLES: Memo[PlanTable] = Memo(8)
# One advice asks for several counts of GPUs to explain itself. They are small, and must not displace whole pools.
_SPACES_OF_A_COUNT: Memo[_SearchSpace] = Memo(2)
_TABLES_OF_A_COUNT: Memo[PlanTable] = Memo(4)


def _split_rows(plans: Plans) -> Iterator[slice]:
    """Return consecutive slices of at most `CHUNK` rows, which together cover all plans."""
    return (slice(start, start + CHUNK) for start in range(0, len(plans), CHUNK))


CHUNK = 1 << 14
"""Number of plans that are priced at once. Their columns fit the processor's second-level cache."""


def price(workload: Workload, plans: Plans, pool: Pool) -> PricedPlans:
    """Return the itemized seconds and memory of plans of a workload on a pool.

    Raises:
        SpecError: the pool's GPU cannot run the workload's precision.
    """
    sharded = zoo.build_sharded_graph(workload, plans)
    return price_sharded(workload, sharded, plans, pool)


def price_sharded(
    workload: Workload,
    sharded: ShardedGraph,
    plans: Plans,
    pool: Pool,
    constants: Constants | None = None,
    kernel_times: KernelTimes | None = None,
) -> PricedPlans:
    """Return the itemized seconds and memory of plans, like `price`, but from a sharded graph that is already built.

    Args:
        workload: the job.
        sharded: the graph that `zoo.build_sharded_graph` returns for these plans.
        plans: the plans, (n,).
        pool: the GPU pool.
        constants: fitted constants of the formulas. None takes the shipped constants.
        kernel_times: seconds of the kernels of the graph. None computes them.
    """
    priced = blocks.kernel_seconds(workload, sharded, pool.gpu, constants, kernel_times)
    times = step.step(workload, sharded, plans, pool, priced, constants)
    bills = memory.footprint(workload, sharded, plans, pool.gpu)
    return PricedPlans(plans, times, bills, memory.usable_bytes(pool.gpu))
