"""Forecasts of measured training steps: one row out per row in, and the error by GPU, precision, family, scale."""

from __future__ import annotations

import csv
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilecast import calibration, kernels, models, search, step, uncertainty
from tilecast.graph import Shards
from tilecast.hardware import Pool
from tilecast.kernels import KernelTimes
from tilecast.models import Sharded
from tilecast.search import Limits, Priced
from tilecast.spec import CHECKPOINTING, Floats, Plan, Plans, SpecError, Workload
from tilecast.step import PARTS, Constants, constants_with
from tilecast.validate import Track, residuals, untracked
from tilecast.validate.graphs import Graphs
from tilecast.validate.table import Case, Refusal, Row, integer, read

COLUMNS = (
    "id", "predicted_s", "lower_s", "upper_s", "fits", "memory_bytes",
    *(f"{part}_s" for part in PARTS), "reason",
)  # fmt: skip
"""The columns of the rows file, in order."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is predicted for one row; everything but `reason` is None when the row is refused."""

    seconds: float | None = None
    left_out_s: float | None = None
    """The step with constants fitted without the row's source."""
    lower_s: float | None = None
    upper_s: float | None = None
    fits: bool | None = None
    memory_bytes: float | None = None
    parts: dict[str, float] | None = None
    reason: str = ""
    roofline_s: float | None = None
    model_flops: float | None = None
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One input row: its index, its rows of the plan table, and whether those stand in order of preference."""

    index: int
    rows: slice
    ordered: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that share a workload and a pool: one plan table, and which of its rows belong to which input row."""

    workload: Workload
    pool: Pool
    plans: Plans
    sharded: Sharded
    timed: KernelTimes
    members: tuple[Member, ...]


def prepare(rows: Sequence[Row], graphs: Graphs | None = None) -> tuple[list[Group], dict[int, str]]:
    """Everything about the rows that does not depend on fitted constants, and the refused rows' reasons.

    Raises:
        SpecError: a graph that a row names is damaged, or of another model.
    """
    refused: dict[int, str] = {}
    alike: dict[str, list[tuple[int, Case, Plans]]] = defaultdict(list)
    for index, row in enumerate(rows):
        try:
            case = read(row, graphs)
            plans = _plans(case)
        except Refusal as refusal:
            refused[index] = refusal.code
        else:
            alike[_key(case)].append((index, case, plans))
    groups = []
    for members in alike.values():
        case = members[0][1]
        plans = Plans.concatenate([table for _, _, table in members])
        ends = np.cumsum([len(table) for _, _, table in members])
        found = tuple(
            Member(index, slice(int(end) - len(table), int(end)), _is_stated(one))
            for end, (index, one, table) in zip(ends, members, strict=True)
        )
        try:
            sharded = models.shard(case.workload, plans)
            timed = kernels.seconds(sharded.graph.kernels()[0], case.pool.gpu)
        except SpecError:
            refused |= dict.fromkeys((member.index for member in found), "impossible-size")
            continue
        groups.append(Group(case.workload, case.pool, plans, sharded, timed, found))
    return groups, refused


def _key(case: Case) -> str:
    """What cases share that one graph and one set of kernel times serves. A trace is told by its identity."""
    model = case.workload.model
    plain = replace(case.workload, model=replace(model, trace=None))
    return repr((plain, case.pool, id(model.trace)))


def forecast(rows: Sequence[Row], track: Track = untracked, graphs: Graphs | None = None) -> list[Forecast]:
    """Forecasts of all rows, in order. Rows that share a workload and a pool are priced as one plan table.

    Raises:
        SpecError: a graph that a row names is damaged, or of another model.
    """
    return _forecast(rows, *prepare(rows, graphs), track)


def _forecast(rows: Sequence[Row], groups: Sequence[Group], refused: Mapping[int, str], track: Track) -> list[Forecast]:
    found = {index: Forecast(reason=code) for index, code in refused.items()}
    unseen = left_out()
    for group in track(groups, "groups of runs"):
        priced = price(group)
        sources = {residuals.source_of(rows[member.index]) for member in group.members}
        without = {name: price(group, unseen[name]) if name in unseen else priced for name in sources}
        for member in group.members:
            one = _one(group.workload, group.pool, priced, member)
            other = without[residuals.source_of(rows[member.index])]
            found[member.index] = replace(one, left_out_s=meant(group.workload, other, member).of(other.step_s))
    return [found[index] for index in range(len(rows))]


@cache
def left_out() -> Mapping[str, Constants]:
    """Constants for every source (`residuals.source_of`) whose rows move them: those that are fitted without it
    (`tilecast_fit.step`)."""
    text = files("tilecast.validate").joinpath("left_out.toml").read_text(encoding="utf-8")
    return {name: constants_with(moved) for name, moved in tomllib.loads(text).items()}


def price(group: Group, fitted: Constants | None = None) -> Priced:
    """The plan table of a group, priced."""
    return search.price_sharded(group.workload, group.sharded, group.plans, group.pool, fitted, group.timed)


_FULL = CHECKPOINTING.index("full")


def chosen(priced: Priced, member: Member) -> int:
    """The plan that a row means among those it leaves open: the first or the fastest that fits, or the leanest if
    none does."""
    rows, start = member.rows, int(member.rows.start)
    fits = priced.fits[rows]
    if not fits.any():
        return start + int(np.argmin(priced.memory_bytes[rows]))
    if member.ordered:
        return start + int(np.argmax(fits))
    return start + int(np.argmin(np.where(fits, priced.step_s[rows], np.inf)))


@dataclass(frozen=True, slots=True)
class Meant:
    """What a row means: a plan of the table, with a `share` of its layers as another plan has them."""

    row: int
    other: int
    share: float

    def of(self, column: Floats) -> float:
        """The value of a column (n,) that is a sum over layers."""
        return float((1.0 - self.share) * column[self.row] + self.share * column[self.other])


def meant(workload: Workload, priced: Priced, member: Member) -> Meant:
    """The plan that a row means. One that does not say what it recomputes, and does not fit without recomputation, runs
    as many layers again as its memory asks where its framework can tell layers apart (Megatron-LM, megatron/training/
    arguments.py: --recompute-num-layers; PyTorch's checkpoint_wrapper wraps any module)."""
    row = chosen(priced, member)
    plans, framework = priced.plans, workload.framework
    table = np.arange(member.rows.start, member.rows.stop)
    full = table[
        (plans.checkpointing[table] == _FULL) & (plans.sequence_parallel[table] == plans.sequence_parallel[table[0]])
    ]
    start = int(table[0])
    is_open = member.ordered and plans.checkpointing[start] != _FULL and plans.checkpointing[row] == _FULL
    varies = framework is None or "recomputation" in search.abilities(framework).per_layer
    if not (is_open and varies and len(full)):
        return Meant(row, row, 0.0)
    least, most, room = priced.memory_bytes[full[0]], priced.memory_bytes[start], priced.usable_bytes
    return Meant(start, int(full[0]), float(np.clip((most - room) / max(most - least, 1.0), 0.0, 1.0)))


def _is_stated(case: Case) -> bool:
    """Whether the row says how the work is split, so that only recomputation and the like are open."""
    stated = case.stated
    micro = stated["micro_batch"] or stated["gradient_accumulation"]
    return bool(stated["data"] and stated["tensor"] and stated["pipeline"] and micro)


def _plans(case: Case) -> Plans:
    """The stated plan with what it leaves open, or every plan that agrees with what is stated."""
    if _is_stated(case):
        return _complete(case)
    anyhow = replace(case.workload, framework=None)  # what ran is not held against what the framework runs today
    table = search.enumerate_plans(anyhow, case.pool, Limits(gpus=case.gpus, tensor_across_nodes=True))
    if not len(table):
        raise Refusal("no-plan")
    keep = np.ones(len(table), dtype=bool)
    for name, value in case.stated.items():
        if value is not None and name not in ("gradient_accumulation", "virtual_stages", "zero_stage"):
            keep &= getattr(table, name) == value
    if not keep.any():
        raise Refusal("no-plan")
    return table.take(keep)


def _usual_expert_parallelism(case: Case) -> int:
    """As many ranks of a node, or of its NVLink domain, as divide both the experts and the data-parallel ranks; all
    ranks for what is cut by rows, and where weights are sharded: whole experts are not gathered (NeMo AutoModel,
    components/moe/parallelizer.py: only what expert parallelism leaves together is sharded)."""
    if models.spreads_rows(case.workload.model):
        return case.stated["data"] or 1
    experts = int(case.workload.model.extra.get("experts", 1))
    data = case.stated["data"] or 1
    near = case.gpus if case.stated["zero_stage"] == 3 else int(step.joined(np.array(case.gpus), case.pool))
    most = min(near, experts)
    return max(n for n in range(1, most + 1) if experts % n == 0 and data % n == 0)


_OPEN = ((0, 1), (1, 1), (2, 0), (2, 1))
"""(recomputation mode, sequence parallelism) in the order in which people turn to them."""


def _complete(case: Case) -> Plans:
    """The stated degrees with each recomputation mode that the row allows; the first that fits is meant."""
    stated = case.stated
    per_rank = case.workload.global_batch // (stated["data"] or 1)
    micro = stated["micro_batch"] or max(1, per_rank // (stated["gradient_accumulation"] or 1))
    repeats = stated["gradient_accumulation"] or max(1, round(per_rank / micro))
    samples = (stated["data"] or 1) * micro * repeats
    if (stated["pipeline"] or 1) > max(1, case.workload.model.layers) or samples > 2 * case.workload.global_batch:
        raise Refusal("impossible-plan")
    fixed = stated["checkpointing"]
    if case.workload.model.hidden == 0 or not case.workload.training:
        fixed = 0
    split = int((stated["tensor"] or 1) > 1)
    named = case.workload.framework
    split *= named is None or True in search.abilities(named).sequence_parallel
    split *= stated["sequence_parallel"] != 0
    rows = list(dict.fromkeys((mode, spread * split) for mode, spread in _OPEN if fixed in (None, mode)))
    one = {item.name: stated.get(item.name) or 0 for item in fields(Plans)}
    expert = stated["expert"] or _usual_expert_parallelism(case)
    one |= {"micro_batch": micro, "gradient_accumulation": repeats, "expert": expert}
    table = {name: np.full(len(rows), value, dtype=np.int64) for name, value in one.items()}
    table["checkpointing"] = np.array([mode for mode, _ in rows], dtype=np.int64)
    table["sequence_parallel"] = np.array([spread for _, spread in rows], dtype=np.int64)
    return Plans(**table)


def _one(workload: Workload, pool: Pool, priced: Priced, member: Member) -> Forecast:
    one = meant(workload, priced, member)
    lower, upper = uncertainty.interval(workload, priced, one.row)
    row = one.other if one.share else one.row
    plan, seconds = priced.plans.row(row), one.of(priced.step_s)
    widened = seconds / float(priced.step_s[one.row])
    return Forecast(
        seconds=seconds,
        lower_s=lower * widened,
        upper_s=upper * widened,
        fits=bool(priced.fits[row]),
        memory_bytes=one.of(priced.memory_bytes),
        parts={name: one.of(getattr(priced.times, name)) for name in PARTS},
        roofline_s=_roofline(workload, plan, pool),
        model_flops=model_flops(workload),
        plan=plan,
    )


def model_flops(workload: Workload) -> float:
    """FLOPs of a step as the model needs them, recomputation not counted, over all GPUs."""
    one = np.ones(1, dtype=np.int64)
    graph = models.build(workload, Shards(one, one, one, one, one * 0))
    per_sample = sum(block.repeat * op.count * float(op.table.flops()[0]) for block in graph.blocks for op in block.ops)
    return per_sample * workload.global_batch


def _roofline(workload: Workload, plan: Plan, pool: Pool) -> float:
    """The baseline of a perfect machine: every operator at the peak of compute or memory, nothing else."""
    shards = Shards(*(np.array([value]) for value in (plan.micro_batch, plan.tensor, plan.context, plan.expert, 0)))
    graph = models.build(workload, shards)
    seconds = 0.0
    for block in graph.blocks:
        for op in block.ops:
            peak = pool.gpu.peak_flops.get(workload.precision, pool.gpu.peak_flops["fp32"])
            bound = max(
                float(op.table.flops()[0]) / peak, float(op.table.bytes()[0]) / pool.gpu.memory_bandwidth_bytes_per_s
            )
            seconds += bound * op.count * block.repeat
    return seconds * plan.gradient_accumulation / plan.pipeline


def run(
    paths: Sequence[Path],
    rows_path: Path | None = None,
    track: Track = untracked,
    *,
    graphs: Path | None = None,
    parts: bool = False,
) -> str:
    """Predict every row of the tables, write them where asked, and return the summary, with the factors of the parts of
    a step if asked; `track` sees the groups of rows, `graphs` is a folder of graphs that rows may name.

    Raises:
        SpecError: a file cannot be read or lacks the columns of a runs table, or a graph is not what a row needs.
    """
    if graphs is not None and not graphs.is_dir():
        raise SpecError("--graphs", f"{graphs} is no folder", "name the folder that holds the graphs")
    rows = [row for path in paths for row in read_table(path)]
    groups, refused = prepare(rows, Graphs(graphs) if graphs is not None else None)
    forecasts = _forecast(rows, groups, refused, track)
    if rows_path is not None:
        write_rows(rows_path, rows, forecasts)
    found = [summary(rows, forecasts)]
    if parts and any(_is_graded(row) and item.seconds for row, item in zip(rows, forecasts, strict=True)):
        found.append(residuals.parts_table(_parts(rows, groups, forecasts)))
    return "\n\n".join(found)


def _parts(rows: Sequence[Row], groups: Sequence[Group], forecasts: Sequence[Forecast]) -> list[residuals.Part]:
    """The factor of each part of a step that the graded rows ask for."""
    kept = [
        (group, member, rows[member.index], forecasts[member.index])
        for group in groups
        for member in group.members
        if _is_graded(rows[member.index])
    ]

    def steps(moved: Mapping[str, float]) -> Floats:
        fitted = constants_with(moved)
        priced = {id(group): price(group, fitted) for group in {id(item[0]): item[0] for item in kept}.values()}
        return np.array([meant(g.workload, one, m).of(one.step_s) for g, m, _, _ in kept if (one := priced[id(g)])])

    predicted = np.array([item.seconds for _, _, _, item in kept], dtype=float)
    measured = np.array([_measured(row) for _, _, row, _ in kept], dtype=float)
    ratio = residuals.ratio_of(predicted, measured)
    return residuals.parts([row for _, _, row, _ in kept], ratio, residuals.shares(steps, predicted))


def _is_graded(row: Row) -> bool:
    return row.get("trust", "A") in ("A", "B") and _measured(row) is not None


def read_table(path: Path) -> list[Row]:
    """The rows of a runs table.

    Raises:
        SpecError: the file cannot be read, or is not such a table.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle)
            missing = {"id", "gpu", "n_gpus", "precision"} - set(reader.fieldnames or ())
            if missing:
                raise SpecError(str(path), f"lacks the columns {', '.join(sorted(missing))}", "give a runs table")
            return [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(str(path), "cannot be read", str(error)) from None


def write_rows(path: Path, rows: Sequence[Row], forecasts: Sequence[Forecast]) -> None:
    """One line per input row, in order; a refused row has its reason and nothing else."""
    try:
        with path.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(COLUMNS)
            writer.writerows(_cells(row, item) for row, item in zip(rows, forecasts, strict=True))
    except OSError as error:
        raise SpecError("--rows", f"cannot write {path}", str(error.strerror)) from None


def _cells(row: Row, item: Forecast) -> list[str]:
    if item.seconds is None or item.parts is None:
        return [row["id"], *[""] * (len(COLUMNS) - 2), item.reason]
    values = [item.seconds, item.lower_s, item.upper_s]
    return [
        row["id"],
        *(f"{value:.9g}" for value in values),
        "true" if item.fits else "false",
        f"{item.memory_bytes:.0f}",
        *(f"{item.parts[part]:.9g}" for part in PARTS),
        "",
    ]


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows of grade A and B with a measured step time and a forecast, as arrays."""

    rows: tuple[Row, ...]
    measured_s: Floats
    predicted_s: Floats
    cautious_s: Floats
    """The step that orders plans in an advice."""
    left_out_s: Floats
    roofline_s: Floats
    one_mfu_s: Floats
    covered: npt.NDArray[np.bool_]
    fits: npt.NDArray[np.bool_]
    graded: int
    """Rows of grade A and B with a measured step time, predicted or not."""


def score(rows: Sequence[Row], forecasts: Sequence[Forecast]) -> Scored:
    """Hold the forecasts against the measured step times of the rows of grade A and B, or of all if none is graded."""
    graded = [
        (row, item, seconds)
        for row, item in zip(rows, forecasts, strict=True)
        if _is_graded(row) and (seconds := _measured(row))
    ]
    kept = [(row, item, measured) for row, item, measured in graded if item.seconds is not None]
    measured = np.array([time for _, _, time in kept])
    names = [item.plan for _, item, _ in kept]
    gpus = np.array([plan.gpus if plan else 1 for plan in names], dtype=float)
    flops = np.array([item.model_flops or 0.0 for _, item, _ in kept])
    predicted = np.array([item.seconds for _, item, _ in kept], dtype=float)
    launch = np.array([(item.parts or {}).get("launch", 0.0) for _, item, _ in kept], dtype=float)
    return Scored(
        rows=tuple(row for row, _, _ in kept),
        measured_s=measured,
        predicted_s=predicted,
        cautious_s=uncertainty.cautious(predicted, launch),
        left_out_s=np.array([item.left_out_s for _, item, _ in kept], dtype=float),
        roofline_s=np.array([item.roofline_s for _, item, _ in kept], dtype=float),
        one_mfu_s=_one_mfu([row for row, _, _ in kept], flops, gpus, measured),
        covered=np.array([(item.lower_s or 0) <= t <= (item.upper_s or 0) for _, item, t in kept], dtype=bool),
        fits=np.array([bool(item.fits) for _, item, _ in kept], dtype=bool),
        graded=len(graded),
    )


def _measured(row: Row) -> float | None:
    """The measured step in seconds; None where the column holds no positive number."""
    try:
        seconds = float(row.get("step_time_s_derived", ""))
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def _one_mfu(rows: Sequence[Row], flops: Floats, gpus: Floats, measured: Floats) -> Floats:
    """The baseline of one utilisation per GPU and precision, fitted to these very rows (median)."""
    rate = flops / gpus / measured
    keys = np.array([f"{row['gpu']}|{row['precision']}" for row in rows])
    fitted = np.zeros(len(rows))
    for key in set(keys):
        fitted[keys == key] = np.median(rate[keys == key])
    return flops / gpus / np.maximum(fitted, 1.0)


def _absolute(predicted: Floats, measured: Floats) -> Floats:
    return np.abs(calibration.relative_error(predicted, measured))


def macro(errors: Floats, rows: Sequence[Row]) -> float:
    """Mean inside each split_group, then over the groups."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        groups[row.get("split_group", "")].append(float(error))
    return float(np.mean([np.mean(values) for values in groups.values()])) if groups else float("nan")


def scale_of(row: Row) -> str:
    """The bin of a row's GPU count."""
    return calibration.scale(integer(row, "n_gpus") or 1)


BINS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("gpu", lambda row: row["gpu"]),
    ("precision", lambda row: row["precision"]),
    ("family", lambda row: row.get("family", "")),
    ("scale", scale_of),
)


def summary(rows: Sequence[Row], forecasts: Sequence[Forecast]) -> str:
    """Error by GPU, precision, family and scale beside the baselines, ranking, coverage and refusals."""
    scored = score(rows, forecasts)
    predicted = sum(item.seconds is not None for item in forecasts)
    lines = [f"{len(rows)} rows, {predicted} predicted, {len(rows) - predicted} refused"]
    for code, count in sorted(_counts(item.reason for item in forecasts if item.reason).items()):
        lines.append(f"  refused {count:4d}  {code}")
    if not len(scored.measured_s):
        return "\n".join([*lines, "no graded row with a measured step time"])
    share = len(scored.measured_s) / max(scored.graded, 1)
    lines.append(f"grade A and B with a step time: {scored.graded}, predicted {share:.1%}")
    titles = [("", -28), ("rows", 5), ("groups", 6), ("macro", 7), ("median", 7), ("P90", 7), ("bias", 7)]
    titles += [("roofline", 9), ("one-MFU", 8)]
    lines += ["", " ".join(name.rjust(width) if width > 0 else name.ljust(-width) for name, width in titles)]
    everything = np.ones(len(scored.measured_s), dtype=bool)
    lines.append(_line("all", scored, everything))
    for name, key in BINS:
        values = np.array([key(row) for row in scored.rows])
        lines += [_line(f"{name} {value}", scored, values == value) for value in sorted(set(values))]
    tau, regret, count = ranking(scored.rows, scored.predicted_s, scored.measured_s)
    if count:
        _, advised, _ = ranking(scored.rows, scored.cautious_s, scored.measured_s)
        told = f"top-1 regret {advised:.1%} as advice orders plans, {regret:.1%} by the forecast alone"
        lines += ["", f"ranking: {count} groups, Kendall tau {tau:.2f}, {told}"]
    lines += ["", residuals.table(scored.rows, residuals.ratio_of(scored.predicted_s, scored.measured_s)), ""]
    aside = macro(_absolute(scored.left_out_s, scored.measured_s), scored.rows)
    lines.append(f"macro error with each source left out of the fit of the step's constants: {aside:.1%}")
    lines.append(f"90 % range covers {scored.covered.mean():.1%} of the measured steps")
    lines.append(f"called too large for the GPU they ran on: {(~scored.fits).mean():.1%}")
    return "\n".join(lines)


def _counts(values: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for value in values:
        found[value] += 1
    return found


def _line(name: str, scored: Scored, mask: npt.NDArray[np.bool_]) -> str:
    rows = [row for row, kept in zip(scored.rows, mask, strict=True) if kept]
    measured = scored.measured_s[mask]
    errors = _absolute(scored.predicted_s[mask], measured)
    bias = np.median(calibration.relative_error(scored.predicted_s[mask], measured))
    groups = len({row.get("split_group", "") for row in rows})
    cells = [macro(errors, rows), float(np.median(errors)), float(np.quantile(errors, 0.9)), float(bias)]
    others = [macro(_absolute(column[mask], measured), rows) for column in (scored.roofline_s, scored.one_mfu_s)]
    return (
        f"{name[:28]:28s} {len(rows):5d} {groups:6d} "
        + " ".join(f"{cell:7.1%}" for cell in cells)
        + f" {others[0]:9.1%} {others[1]:8.1%}"
    )


_RANKED_BY = (
    "split_group",
    "model_name",
    "gpu",
    "n_gpus",
    "global_batch",
    "n_layers",
    "n_heads",
    "hidden",
    "seq_len",
    "precision",
)
_PLAN_COLUMNS = ("tp", "pp", "dp", "micro_batch_per_gpu", "zero_stage", "activation_checkpointing", "cp", "ep")


def ranking(rows: Sequence[Row], predicted_s: Floats, measured_s: Floats) -> tuple[float, float, int]:
    """Kendall's tau over pairs measured more than 5 % apart (a predicted tie scores 0) and the regret of the plan
    predicted fastest (the mean over tied ones), both averaged over groups of at least four distinct plans."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[tuple(row.get(name, "") for name in _RANKED_BY)].append(index)
    taus, regrets = [], []
    for members in groups.values():
        if len({tuple(rows[i].get(name, "") for name in _PLAN_COLUMNS) for i in members}) < 4:
            continue
        predicted, measured = predicted_s[members], measured_s[members]
        first, second = np.triu_indices(len(members), 1)
        apart = np.abs(measured[first] - measured[second]) > 0.05 * np.minimum(measured[first], measured[second])
        if apart.any():
            sign = np.sign(predicted[first] - predicted[second]) * np.sign(measured[first] - measured[second])
            taus.append(float(np.mean(sign[apart])))
        best = np.isclose(predicted, predicted.min(), rtol=1e-9)
        regrets.append(float(np.mean(measured[best])) / float(measured.min()) - 1)
    return (
        float(np.mean(taus)) if taus else float("nan"),
        float(np.mean(regrets)) if regrets else float("nan"),
        len(regrets),
    )
