"""Forecast measured training steps, one for each row of a runs table.

`group_runs` groups rows with equal workload and pool, `forecast_group` prices the plans of a group, and `forecast_rows`
does both. Rows often lack parts of their plan, so `interpret_plan` chooses among the possible plans.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tilecast import kernels, search, uncertainty, zoo
from tilecast.constants import Constants
from tilecast.hardware import Pool
from tilecast.kernels import KernelTimes
from tilecast.recomputation import CHECKPOINTING, FULL
from tilecast.search import PlanLimits, PricedPlans
from tilecast.spec import Floats, Plan, Plans, SpecError, Workload
from tilecast.step import PARTS, placement
from tilecast.validate import Track, iterate_without_progress
from tilecast.validate.cells import Row, UnreadableRow
from tilecast.validate.logged import fill_from_log
from tilecast.validate.reading import RunCase, read_run
from tilecast.zoo import ShardedGraph

COLUMNS = (
    "id", "predicted_s", "lower_s", "upper_s", "fits", "memory_bytes",
    *(f"{part}_s" for part in PARTS), "reason",
)  # fmt: skip
"""Columns of the file that `write_rows` writes, in order."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of one row. If the row cannot be forecast, only `reason` is set."""

    seconds: float | None = None
    lower_s: float | None = None
    upper_s: float | None = None
    fits: bool | None = None
    memory_bytes: float | None = None
    parts: dict[str, float] | None = None
    reason: str = ""
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One row of a runs table in a group, with its possible plans."""

    index: int
    rows: slice
    ordered: bool


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Rows of a runs table with equal workload and pool, and one table of the possible plans of all these rows."""

    workload: Workload
    pool: Pool
    plans: Plans
    sharded: ShardedGraph
    timed: KernelTimes
    members: tuple[GroupMember, ...]


Reader: TypeAlias = Callable[[Row], RunCase]
"""Function that reads a row like `reading.read_run`."""


def group_runs(rows: Sequence[Row], reader: Reader = read_run) -> tuple[list[RunGroup], dict[int, str]]:
    """Return groups of rows with equal workload and pool, and reason codes of rows that cannot be forecast.

    A group has everything that its pricing needs and that does not depend on fitted constants.

    Args:
        rows: rows of runs tables.
        reader: function that reads the workload and pool of a row.

    Returns:
        The groups, and a key of `REASONS` for each index of a row that cannot be forecast.

    Raises:
        SpecError: `reader` raises it.
    """
    refused: dict[int, str] = {}
    # Cases of one workload and pool share a graph and kernel times.
    alike: dict[tuple[Workload, Pool], list[tuple[int, RunCase, Plans]]] = defaultdict(list)
    for index, row in enumerate(rows):
        try:
            case = reader(row)
            plans = _list_possible_plans(case)
        except UnreadableRow as refusal:
            refused[index] = refusal.code
        else:
            alike[case.workload, case.pool].append((index, case, plans))
    groups = []
    for members in alike.values():
        case = members[0][1]
        plans = Plans.concatenate([table for _, _, table in members])
        ends = np.cumsum([len(table) for _, _, table in members])
        group_members = tuple(
            GroupMember(index, slice(int(end) - len(table), int(end)), _has_full_split(one))
            for end, (index, one, table) in zip(ends, members, strict=True)
        )
        try:
            sharded = zoo.build_sharded_graph(case.workload, plans)
            timed = kernels.predict_kernel_times(sharded.graph.kernels()[0], case.pool.gpu)
        except SpecError:
            refused |= dict.fromkeys((member.index for member in group_members), "impossible-size")
            continue
        groups.append(RunGroup(case.workload, case.pool, plans, sharded, timed, group_members))
    return groups, refused


def forecast_rows(rows: Sequence[Row], track: Track = iterate_without_progress) -> list[Forecast]:
    """Return the forecast of each row, in order. Rows with equal workload and pool are priced together.

    Args:
        rows: rows of runs tables.
        track: wraps the loop over groups of rows, to show progress.
    """
    groups, refused = group_runs(rows)
    forecasts = {index: Forecast(reason=code) for index, code in refused.items()}
    for group in track(groups, "groups of runs"):
        priced = forecast_group(group)
        forecasts |= {member.index: forecast_member(group, priced, member) for member in group.members}
    return [forecasts[index] for index in range(len(rows))]


def forecast_group(group: RunGroup, fitted: Constants | None = None) -> PricedPlans:
    """Return step times and memory of all plans of a group.

    Args:
        group: the group.
        fitted: constants of the cost model; None for the shipped constants.
    """
    return search.price_sharded(group.workload, group.sharded, group.plans, group.pool, fitted, group.timed)


def choose_plan(priced: PricedPlans, member: GroupMember) -> int:
    """Return the index of the most plausible plan of a row in the plan table of its group.

    It is the fastest plan that fits the GPU memory, or the first that fits if the plans are in order of preference. If
    no plan fits, it is the plan with the least memory.
    """
    rows, start = member.rows, int(member.rows.start)
    fits = priced.fits[rows]
    if not fits.any():
        return start + int(np.argmin(priced.memory_bytes[rows]))
    if member.ordered:
        return start + int(np.argmax(fits))
    return start + int(np.argmin(np.where(fits, priced.step_s[rows], np.inf)))


@dataclass(frozen=True, slots=True)
class InterpretedPlan:
    """The plan that a row most plausibly ran.

    A fraction `share` of the layers runs as in row `other` of the plan table, and the rest as in row `row`.
    """

    row: int
    other: int
    share: float

    def interpolate_layers(self, column: Floats) -> float:
        """Return the plan's value of a column (n,) of the plan table. The column must be a sum over layers."""
        return float((1.0 - self.share) * column[self.row] + self.share * column[self.other])


def interpret_plan(workload: Workload, priced: PricedPlans, member: GroupMember) -> InterpretedPlan:
    """Return the plan that a row most plausibly ran.

    If the row gives no recomputation mode and needs recomputation to fit, it recomputes as few layers as its memory
    allows. This needs a framework that can choose layers (Megatron-LM, megatron/training/arguments.py:
    --recompute-num-layers; PyTorch's checkpoint_wrapper wraps any module).
    """
    row = choose_plan(priced, member)
    plans, framework = priced.plans, workload.framework
    table = np.arange(member.rows.start, member.rows.stop)
    full = table[
        (plans.checkpointing[table] == FULL) & (plans.sequence_parallel[table] == plans.sequence_parallel[table[0]])
    ]
    start = int(table[0])
    is_open = member.ordered and plans.checkpointing[start] != FULL and plans.checkpointing[row] == FULL
    varies = framework is None or "recomputation" in search.find_framework_features(framework).per_layer
    if not (is_open and varies and len(full)):
        return InterpretedPlan(row, row, 0.0)
    least, most, room = priced.memory_bytes[full[0]], priced.memory_bytes[start], priced.usable_bytes
    return InterpretedPlan(start, int(full[0]), float(np.clip((most - room) / max(most - least, 1.0), 0.0, 1.0)))


def _has_full_split(case: RunCase) -> bool:
    """Return whether a row gives data, tensor and pipeline parallelism and a micro-batch or gradient accumulation."""
    stated = case.stated
    micro = stated["micro_batch"] or stated["gradient_accumulation"]
    return bool(stated["data"] and stated["tensor"] and stated["pipeline"] and micro)


def _list_possible_plans(case: RunCase) -> Plans:
    """Return all plans that a row may have run with: those that agree with the columns that it gives.

    Raises:
        UnreadableRow: the given columns contradict each other, or no plan agrees with them.
    """
    if _has_full_split(case):
        return _list_complete_plans(case)
    anyhow = replace(case.workload, framework=None)  # the run may use abilities that the framework lacks today
    table = search.enumerate_plans(anyhow, case.pool, PlanLimits(gpus=case.gpus, tensor_across_nodes=True))
    if not len(table):
        raise UnreadableRow("no-plan")
    keep = np.ones(len(table), dtype=bool)
    for name, value in case.stated.items():
        if value is not None and name not in ("gradient_accumulation", "virtual_stages", "zero_stage"):
            keep &= getattr(table, name) == value
    if not keep.any():
        raise UnreadableRow("no-plan")
    return table.take(keep)


def _choose_expert_parallelism(case: RunCase) -> int:
    """Return the usual degree of expert parallelism for a row that does not state it.

    It is the largest number that divides both the experts and the data-parallel ranks, up to the GPUs of an NVLink
    domain or node. With ZeRO stage 3 the limit is all GPUs: frameworks first spread whole experts over ranks, and shard
    an expert only if several ranks remain for it (NeMo AutoModel, components/moe/parallelizer.py). Models with row-wise
    sharded embedding tables use all data-parallel ranks.
    """
    if zoo.has_row_shardable_weights(case.workload.model):
        return case.stated["data"] or 1
    experts = zoo.count_experts(case.workload.model) or 1
    data = case.stated["data"] or 1
    near = (
        case.gpus
        if case.stated["zero_stage"] == 3
        else int(placement.count_joined_gpus(np.array(case.gpus), case.pool))
    )
    most = min(near, experts)
    return max(n for n in range(1, most + 1) if experts % n == 0 and data % n == 0)


_OPEN = ((0, 1), (1, 1), (2, 0), (2, 1))
"""Pairs of recomputation mode and sequence parallelism, in the order in which users try them."""


def _list_complete_plans(case: RunCase) -> Plans:
    """Return the plans that a row may stand for if it states all degrees of parallelism, with the most likely first.

    There is one plan for each possible pair of recomputation mode and sequence parallelism.

    Raises:
        UnreadableRow: the degrees contradict the batch or the number of layers.
    """
    stated = case.stated
    per_rank = case.workload.global_batch // (stated["data"] or 1)
    micro = stated["micro_batch"] or max(1, per_rank // (stated["gradient_accumulation"] or 1))
    repeats = stated["gradient_accumulation"] or max(1, round(per_rank / micro))
    samples = (stated["data"] or 1) * micro * repeats
    if (stated["pipeline"] or 1) > max(1, case.workload.model.layers) or samples > 2 * case.workload.global_batch:
        raise UnreadableRow("impossible-plan")
    fixed = stated["checkpointing"]
    model = case.workload.model
    recomputed = zoo.list_recomputation_modes(model) if fixed or zoo.is_transformer(model) else ()
    names_mode = fixed is None or fixed < len(CHECKPOINTING)
    if not case.workload.training or (names_mode and CHECKPOINTING[fixed or 0] not in recomputed):
        fixed = 0
    split = int((stated["tensor"] or 1) > 1)
    named = case.workload.framework
    split *= named is None or True in search.find_framework_features(named).sequence_parallel
    split *= stated["sequence_parallel"] != 0
    tried = ((fixed, 1),) if fixed is not None and fixed >= len(CHECKPOINTING) else _OPEN
    rows = list(dict.fromkeys((mode, spread * split) for mode, spread in tried if fixed in (None, mode)))
    one = {item.name: stated.get(item.name) or 0 for item in fields(Plans)}
    expert = stated["expert"] or _choose_expert_parallelism(case)
    one |= {"micro_batch": micro, "gradient_accumulation": repeats, "expert": expert}
    table = {name: np.full(len(rows), value, dtype=np.int64) for name, value in one.items()}
    table["checkpointing"] = np.array([mode for mode, _ in rows], dtype=np.int64)
    table["sequence_parallel"] = np.array([spread for _, spread in rows], dtype=np.int64)
    return Plans(**table)


def forecast_member(group: RunGroup, priced: PricedPlans, member: GroupMember) -> Forecast:
    """Return the forecast of one row of a group.

    Args:
        group: the group.
        priced: step times and memory of its plans, from `forecast_group`.
        member: the row.
    """
    one = interpret_plan(group.workload, priced, member)
    lower, upper = uncertainty.interval(group.workload, priced, one.row)
    row = one.other if one.share else one.row
    seconds = one.interpolate_layers(priced.step_s)
    widened = seconds / float(priced.step_s[one.row])
    return Forecast(
        seconds=seconds,
        lower_s=lower * widened,
        upper_s=upper * widened,
        fits=bool(priced.fits[row]),
        memory_bytes=one.interpolate_layers(priced.memory_bytes),
        parts={name: one.interpolate_layers(getattr(priced.times, name)) for name in PARTS},
        plan=priced.plans.row(row),
    )


def read_table(path: Path) -> list[Row]:
    """Return the rows of a runs table, a CSV file, as mappings of column to text.

    If a step names a log, as `@train.log`, it is read from the log.

    Raises:
        SpecError: the file or a log cannot be read, or the file lacks the columns of a runs table.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle)
            missing = {"id", "gpu", "n_gpus", "precision"} - set(reader.fieldnames or ())
            if missing:
                raise SpecError(str(path), f"lacks the columns {', '.join(sorted(missing))}", "give a runs table")
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise SpecError(str(path), problem, "check the path and the rights of the file") from None
    return [fill_from_log(row, path.parent) for row in rows]


def write_rows(path: Path, rows: Sequence[Row], forecasts: Sequence[Forecast]) -> None:
    """Write the forecasts to a CSV file, one line per input row. A row without a forecast has only id and reason.

    Raises:
        SpecError: the file cannot be written.
    """
    try:
        with path.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(COLUMNS)
            writer.writerows(_forecast_cells(row, item) for row, item in zip(rows, forecasts, strict=True))
    except OSError as error:
        raise SpecError("--rows", f"cannot write {path}", str(error.strerror)) from None


def _forecast_cells(row: Row, forecast: Forecast) -> list[str]:
    if forecast.seconds is None or forecast.parts is None:
        return [row["id"], *[""] * (len(COLUMNS) - 2), forecast.reason]
    values = [forecast.seconds, forecast.lower_s, forecast.upper_s]
    return [
        row["id"],
        *(f"{value:.9g}" for value in values),
        "true" if forecast.fits else "false",
        f"{forecast.memory_bytes:.0f}",
        *(f"{forecast.parts[part]:.9g}" for part in PARTS),
        "",
    ]
