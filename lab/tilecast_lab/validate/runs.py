"""Forecasts of published training steps, which `tilecast.validate.runs` makes, with figures to judge them by.

These are the step with constants fitted without the row's source, the step of a perfect machine, and the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial

import numpy as np

from tilecast import shipped, zoo
from tilecast.constants import Constants
from tilecast.graph import Graph, KernelTable, Shards
from tilecast.hardware import Pool
from tilecast.spec import Floats, Plan, Workload
from tilecast.validate import Track, iterate_without_progress, runs
from tilecast.validate.cells import Row
from tilecast.validate.runs import Forecast, RunGroup, forecast_group, forecast_member, interpret_plan
from tilecast_lab.validate import residuals
from tilecast_lab.validate.constants import with_values
from tilecast_lab.validate.graphs import Graphs
from tilecast_lab.validate.table import read_published_row


@dataclass(frozen=True, slots=True)
class PublishedForecast(Forecast):
    """Forecast of one row of a published table; everything but `reason` is None if the row is refused."""

    left_out_s: float | None = None
    """Step in seconds with constants fitted without the row's source."""
    hidden_s: float | None = None
    """Seconds of collectives that computation hides."""
    roofline_s: float | None = None
    model_flops: float | None = None


def prepare(rows: Sequence[Row], graphs: Graphs | None = None) -> tuple[list[RunGroup], dict[int, str]]:
    """Prepare everything about the rows that does not depend on fitted constants.

    Returns:
        Groups of rows, and the codes of the reasons of refused rows by their indices.

    Raises:
        SpecError: a graph that a row names is damaged or contradicts what the row states.
    """
    return runs.group_runs(rows, partial(read_published_row, graphs=graphs))


def forecast(
    rows: Sequence[Row], track: Track = iterate_without_progress, graphs: Graphs | None = None
) -> list[PublishedForecast]:
    """Forecast all rows, in order; rows that share a workload and a pool are priced as one plan table.

    Raises:
        SpecError: a graph that a row names is damaged or contradicts what the row states.
    """
    return forecast_prepared(rows, *prepare(rows, graphs), track)


def forecast_prepared(
    rows: Sequence[Row], groups: Sequence[RunGroup], refused: Mapping[int, str], track: Track = iterate_without_progress
) -> list[PublishedForecast]:
    """Forecast all rows, in order, from the groups and reasons that `group_runs` returned for them."""
    forecasts = {index: PublishedForecast(reason=code) for index, code in refused.items()}
    unseen = constants_without_source()
    for group in track(groups, "groups of runs"):
        priced, flops = forecast_group(group), model_flops(group.workload)
        sources = {residuals.source_of(rows[member.index]) for member in group.members}
        without = {name: forecast_group(group, unseen[name]) if name in unseen else priced for name in sources}
        for member in group.members:
            one, here = forecast_member(group, priced, member), interpret_plan(group.workload, priced, member)
            other = without[residuals.source_of(rows[member.index])]
            forecasts[member.index] = PublishedForecast(
                **{item.name: getattr(one, item.name) for item in fields(Forecast)},
                left_out_s=interpret_plan(group.workload, other, member).interpolate_layers(other.step_s),
                hidden_s=here.interpolate_layers(priced.times.hidden),
                roofline_s=_roofline(group.workload, one.plan, group.pool) if one.plan else None,
                model_flops=flops,
            )
    return [forecasts[index] for index in range(len(rows))]


@cache
def constants_without_source() -> Mapping[str, Constants]:
    """Return the constants fitted without a source, by source as `residuals.source_of` names it.

    `tilecast_lab.fit.step` writes them. Sources whose rows do not move the constants are absent.
    """
    tables = shipped.read_table("tilecast_lab.validate", "left_out.toml")
    return {name: with_values(moved) for name, moved in tables.items()}


def model_flops(workload: Workload) -> float:
    """Return the FLOPs that the model needs for a step, over all GPUs and without recomputation."""
    one = np.ones(1, dtype=np.int64)
    graph = zoo.build(workload, Shards(one, one, one, one, one * 0))
    table, repeats = _operators(graph)
    return float(sum(repeats * table.flops())) * workload.global_batch


def _roofline(workload: Workload, plan: Plan, pool: Pool) -> float:
    """Return the seconds of a step on a perfect machine: every operator at the peak of compute or memory."""
    shards = Shards(*(np.array([value]) for value in (plan.micro_batch, plan.tensor, plan.context, plan.expert, 0)))
    graph = zoo.build(workload, shards)
    table, repeats = _operators(graph)
    peak = pool.gpu.peak_flops.get(workload.precision, pool.gpu.peak_flops["fp32"])
    bound = np.maximum(table.flops() / peak, table.bytes() / pool.gpu.memory_bandwidth_bytes_per_s)
    return float(sum(bound * repeats)) * plan.gradient_accumulation / plan.pipeline


def _operators(graph: Graph) -> tuple[KernelTable, Floats]:
    """Return the kernels of a graph of one shard and how often each runs, (N,)."""
    ops = [(op, op.count * block.repeat) for block in graph.blocks for op in block.ops]
    return KernelTable.concatenate([op.table for op, _ in ops]), np.array([count for _, count in ops])
