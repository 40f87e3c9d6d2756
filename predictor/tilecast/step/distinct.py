"""One helper for all formulas of a step: each is evaluated once for equal rows of the columns that it reads.

Most plans of a table share most parts of a step. `StepInputs.per_distinct` evaluates a formula on one row of each kind,
and its result gives the values of any rows of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar, cast

import numpy as np

from tilecast.hardware import Pool
from tilecast.spec import Columns, Distinct, Floats, Ints, Plans, Rows, distinct
from tilecast.step.placement import joined
from tilecast.zoo import Sharded

Value = TypeVar("Value", bound="Floats | Columns")


@dataclass(frozen=True, slots=True)
class PerDistinct(Generic[Value]):
    """Values of a formula for the n rows of a table, of which k are distinct."""

    values: Value
    """Values of the distinct rows, (k,), or (4, k) at the ZeRO stages from 0 to 3."""
    index: Rows
    """Place of each row among the distinct ones, (n,)."""

    def take(self, rows: slice | Rows) -> Value:
        """Return the values of the chosen rows, in the order given."""
        index, values = self.index[rows], self.values
        return cast("Value", values.take(index) if isinstance(values, Columns) else values.take(index, axis=-1))


Column = Literal["shard", "checkpointing", "links", "pipeline", "degrees", "accumulates"]
"""Integers that formulas of a step depend on.

Rows with equal `links` place equally many ranks on a node; equal `degrees` are equal numbers of ranks of every kind.
Both differ between rows whose speeds or bucket sizes differ. `accumulates` is 1 for a single micro-batch.
"""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A table of n plans under their shards, all different in more than ZeRO stage and virtual stages."""

    sharded: Sharded
    plans: Plans
    speed: Floats | None
    """Factor on the speed of all links, (n,); None leaves the pool's."""
    bucket_mib: Floats | None
    """Size of the buckets of gradients in MiB, (n,); None leaves the framework's."""
    place: Rows
    """Row of each plan of the whole table, where neighbours may differ in these stages alone."""
    _columns: Mapping[Column, Ints]
    _distinct: dict[tuple[Column, ...], tuple[Distinct, Sharded, Plans]]
    """Distinct rows by the names of columns, which other formulas and other pools of the same shape find again."""

    @classmethod
    def of(
        cls,
        sharded: Sharded,
        plans: Plans,
        pool: Pool,
        *,
        speed: Floats | None = None,
        bucket_mib: Floats | None = None,
    ) -> StepInputs:
        """Return the inputs of the steps of plans on a pool, with other links or buckets where these are given."""
        trials = [np.unique(column, return_inverse=True)[1] for column in (speed, bucket_mib) if column is not None]
        neighbours = plans.distinct_splits(*trials)
        rows, trials = neighbours.first, [column[neighbours.first] for column in trials]
        sharded, plans = sharded.take(rows), plans.take(rows)
        links = joined(plans.gpus, pool)
        degrees = distinct(plans.tensor, plans.expert, plans.context, plans.pipeline, plans.data, *trials)
        columns: dict[Column, Ints] = {
            "shard": sharded.index,
            "checkpointing": plans.checkpointing,
            "links": distinct(links, *trials).index if trials else links,
            "pipeline": plans.pipeline,
            "degrees": degrees.index,
            "accumulates": np.minimum(plans.gradient_accumulation, 2),
        }
        speed, bucket_mib = (None if column is None else column[rows] for column in (speed, bucket_mib))
        known: dict[tuple[Column, ...], tuple[Distinct, Sharded, Plans]] = {
            ("degrees",): (degrees, sharded.take(degrees.first), plans.take(degrees.first))
        }
        return cls(sharded, plans, speed, bucket_mib, neighbours.index, columns, known)

    def speed_at(self, rows: Rows) -> Floats | float:
        """Return the factors on the speed of the links of some rows."""
        return 1.0 if self.speed is None else self.speed[rows]

    def bucket_mib_at(self, rows: Rows) -> Floats | None:
        """Return the sizes of the buckets of some rows; None for the framework's."""
        return None if self.bucket_mib is None else self.bucket_mib[rows]

    def per_distinct(
        self, names: tuple[Column, ...], formula: Callable[[Sharded, Plans, Rows], Value]
    ) -> PerDistinct[Value]:
        """Evaluate a formula once for rows that are equal in the columns of these names.

        `formula` is called with shards and plans of one row of each kind, (k,), and their places in the table.
        """
        rows, sharded, plans = self._rows(names)
        return PerDistinct(formula(sharded, plans, rows.first), rows.index)

    def per_zero_stage(
        self, names: tuple[Column, ...], formula: Callable[[Sharded, Plans, Rows], Floats]
    ) -> PerDistinct[Floats]:
        """Evaluate a formula as `per_distinct` does, on the same rows at each ZeRO stage from 0 to 3, (4 k,)."""
        rows = self._rows(names)[0]
        four = np.tile(rows.first, 4)
        plans = replace(self.plans.take(four), zero_stage=np.repeat(np.arange(4), len(rows)))
        return PerDistinct(formula(self.sharded.take(four), plans, four).reshape(4, -1), rows.index)

    def _rows(self, names: tuple[Column, ...]) -> tuple[Distinct, Sharded, Plans]:
        if names not in self._distinct:
            rows = distinct(*(self._columns[name] for name in names))
            self._distinct[names] = rows, self.sharded.take(rows.first), self.plans.take(rows.first)
        return self._distinct[names]

    def rows_of(self, plans: slice | Rows) -> tuple[slice | Rows, Rows]:
        """Return the rows that the chosen plans of the whole table have, and the place of each plan among them."""
        place = self.place[plans]
        if isinstance(plans, slice) and len(place):
            return slice(place[0], place[-1] + 1), place - place[0]  # consecutive plans have consecutive rows
        return np.unique(place, return_inverse=True)
