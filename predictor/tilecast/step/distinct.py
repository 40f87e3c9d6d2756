"""Evaluate each formula of a step once for all rows that are equal in the columns that it reads.

Most plans of a table share most parts of a step. `StepInputs.evaluate_per_distinct` evaluates a formula on one row
of each kind. Its result, a `DistinctValues`, gives the values of any rows of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar, cast

import numpy as np

from tilecast.hardware import Pool
from tilecast.spec import Columns, DistinctRows, Floats, Ints, Plans, Rows, distinct_rows
from tilecast.step.placement import classify_by_links
from tilecast.zoo import ShardedGraph

Value = TypeVar("Value", bound="Floats | Columns")


@dataclass(frozen=True, slots=True)
class DistinctValues(Generic[Value]):
    """Values of a formula for the n rows of a table, stored only for its k distinct rows."""

    values: Value
    """Values of the distinct rows, (k,), or (4, k) at the ZeRO stages from 0 to 3."""
    index: Rows
    """Index of each row among the distinct rows, (n,)."""

    def take(self, rows: slice | Rows) -> Value:
        """Return the values of the chosen rows of the table, in the given order."""
        index, values = self.index[rows], self.values
        return cast("Value", values.take(index) if isinstance(values, Columns) else values.take(index, axis=-1))


Column = Literal["shard", "checkpointing", "links", "pipeline", "degrees", "accumulates"]
"""Integer columns on which formulas of a step depend.

Rows with equal `pipeline` have equally many stages that hold the same pieces of the model (`Plans.stage_holdings`).
Rows with equal `links` have equally many ranks that a fast link joins. Rows with equal `degrees` have equal degrees of
parallelism. `links` and `degrees` also differ between rows with different link speeds or bucket sizes. `accumulates` is
1 for a single micro-batch, otherwise 2.
"""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the step formulas: the n distinct rows of a table of plans, with their shards.

    `Plans.distinct_splits` says which rows are distinct.
    """

    sharded: ShardedGraph
    plans: Plans
    speed: Floats | None
    """Factor on the speed of all links, (n,). None means 1."""
    bucket_mib: Floats | None
    """Size of gradient buckets in MiB, (n,). None for the framework's own buckets."""
    place: Rows
    """For each plan of the whole table, its row among the n."""
    _columns: Mapping[Column, Ints]
    _distinct: dict[tuple[Column, ...], tuple[DistinctRows, ShardedGraph, Plans]]
    """Cache of distinct rows by column names, shared by all formulas and by all pools of one shape."""

    @classmethod
    def from_plans(
        cls,
        sharded: ShardedGraph,
        plans: Plans,
        pool: Pool,
        *,
        speed: Floats | None = None,
        bucket_mib: Floats | None = None,
    ) -> StepInputs:
        """Return the inputs of the step formulas for plans on a pool.

        Args:
            sharded: the graph under the plans' shards.
            plans: the plans.
            pool: the pool.
            speed: factor on the speed of all links for each plan.
            bucket_mib: size of the gradient buckets for each plan, in MiB.
        """
        trials = [np.unique(column, return_inverse=True)[1] for column in (speed, bucket_mib) if column is not None]
        neighbours = plans.distinct_splits(*trials)
        rows, trials = neighbours.first, [column[neighbours.first] for column in trials]
        speed, bucket_mib = (None if column is None else column[rows] for column in (speed, bucket_mib))
        sharded, plans = sharded.take(rows), plans.take(rows)
        return cls.from_distinct(
            sharded, plans, neighbours.index, pool, speed=speed, bucket_mib=bucket_mib, trials=trials
        )

    @classmethod
    def from_distinct(
        cls,
        sharded: ShardedGraph,
        plans: Plans,
        place: Rows,
        pool: Pool,
        *,
        speed: Floats | None = None,
        bucket_mib: Floats | None = None,
        trials: Sequence[Ints] = (),
    ) -> StepInputs:
        """Return the inputs of the step formulas from the n distinct rows of a table of plans.

        Args:
            sharded: the graph under the shards of these rows.
            plans: these rows.
            place: for each plan of the whole table, its row among the n.
            pool: the pool.
            speed: factor on the speed of all links for each row.
            bucket_mib: size of the gradient buckets for each row, in MiB.
            trials: codes of `speed` and `bucket_mib`, where they are given.
        """
        links = classify_by_links(plans.gpus, pool)
        experts, pipeline = (plans.expert, plans.expert_tensor), plans.pipeline
        if plans.schedule.any():
            pipeline = 4 * pipeline + plans.stage_holdings
        degrees = distinct_rows(plans.tensor, *experts, plans.context, pipeline, plans.data, *trials)
        columns: dict[Column, Ints] = {
            "shard": sharded.index,
            "checkpointing": plans.checkpointing,
            "links": distinct_rows(links, *trials).index if trials else links,
            "pipeline": pipeline,
            "degrees": degrees.index,
            "accumulates": np.minimum(plans.gradient_accumulation, 2),
        }
        known: dict[tuple[Column, ...], tuple[DistinctRows, ShardedGraph, Plans]] = {
            ("degrees",): (degrees, sharded.take(degrees.first), plans.take(degrees.first))
        }
        return cls(sharded, plans, speed, bucket_mib, place, columns, known)

    def speed_at(self, rows: Rows) -> Floats | float:
        """Return the factors on the speed of all links at some rows, (k,), or the number 1."""
        return 1.0 if self.speed is None else self.speed[rows]

    def bucket_mib_at(self, rows: Rows) -> Floats | None:
        """Return the gradient bucket sizes at some rows in MiB, (k,). None for the framework's own buckets."""
        return None if self.bucket_mib is None else self.bucket_mib[rows]

    def evaluate_per_distinct(
        self, names: tuple[Column, ...], formula: Callable[[ShardedGraph, Plans, Rows], Value]
    ) -> DistinctValues[Value]:
        """Evaluate a formula once for all rows that are equal in the named columns.

        The formula takes the shards and the plans of the k distinct rows, and the indices of these rows, (k,).
        """
        rows, sharded, plans = self._distinct_rows(names)
        return DistinctValues(formula(sharded, plans, rows.first), rows.index)

    def evaluate_per_zero_stage(
        self, names: tuple[Column, ...], formula: Callable[[ShardedGraph, Plans, Rows], Floats]
    ) -> DistinctValues[Floats]:
        """Evaluate a formula like `evaluate_per_distinct`, but with each distinct row at four ZeRO stages, (4 k,).

        The stages are 0 to 3.
        """
        rows = self._distinct_rows(names)[0]
        four = np.tile(rows.first, 4)
        plans = replace(self.plans.take(four), zero_stage=np.repeat(np.arange(4), len(rows)))
        return DistinctValues(formula(self.sharded.take(four), plans, four).reshape(4, -1), rows.index)

    def _distinct_rows(self, names: tuple[Column, ...]) -> tuple[DistinctRows, ShardedGraph, Plans]:
        """Return the rows with distinct values in the named columns, with the sharded graph and the plans of each."""
        if names not in self._distinct:
            rows = distinct_rows(*(self._columns[name] for name in names))
            self._distinct[names] = rows, self.sharded.take(rows.first), self.plans.take(rows.first)
        return self._distinct[names]

    def find_distinct_rows(self, plans: slice | Rows) -> tuple[slice | Rows, Rows]:
        """Return the distinct rows that some plans of the whole table use.

        Also return, for each of these plans, the index of its row among the returned rows.
        """
        place = self.place[plans]
        if isinstance(plans, slice) and len(place):
            return slice(place[0], place[-1] + 1), place - place[0]  # consecutive plans have consecutive rows
        return np.unique(place, return_inverse=True)
