"""Show the queue plan in statuses: the position of each job, and the totals in the QueueAdvice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from tilecast.api import queue_advice as api
from tilecast.api.base import round_to_six_digits
from tilecast.api.status import MAX_ENTRIES, QueueEntry, QueuePosition, RunSeconds
from tilecast.jobs import WEIGHT
from tilecast.planner.entries import PoolEnd, PoolEntry, list_planned_entries, list_waiting_ends
from tilecast.planner.kueue_starts import list_kueue_entries
from tilecast.planner.problem import JobOption
from tilecast.planner.references import choose_fastest
from tilecast.planner.totals import LateJob, PlannedTimes, QueueReport, list_late_jobs
from tilecast.render import units
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.times import format_time, parse_time
from tilecast_operator.objects.view import View, encode_canonical
from tilecast_operator.queue_rows import (
    PlannedQueue,
    QueueRow,
    QueueState,
    make_plan_name,
    parse_plan_name,
    plan_rows,
)
from tilecast_operator.report.job_status import ConditionContent, make_condition

LEAST_SHIFT_S = 60.0
SHIFT = 0.1
"""Least change of a shown time, as a share of the time left until then. It must also exceed `LEAST_SHIFT_S` seconds.

Forecasts are not more exact. So the passing of time alone writes nothing.
"""
RANGE_SHIFT, LEAST_RANGE_SHIFT_S = 0.1, 5.0
"""Least change of a shown start with a range, as a share of the range's width, and in seconds.

A start that was kept for longer would leave its range in a queue of short jobs.
"""
SAME = 0.05
"""Largest relative difference of a plan's numbers that count as equal. For numbers below 1, it is absolute."""
EXACT = 10
"""Largest position that is shown exactly. Later ones are rounded down to their first digit."""

RUNS = "it runs there, and nothing that runs is moved"
PLACED = "it was placed there, and waits in its queue"
WEIGHED = f"its {WEIGHT} orders the jobs of its namespace alone"
MAX_WEIGHTS = 8
"""Most namespaces whose weights the condition lists."""


def make_positions(
    plan: PlannedQueue,
    start_times_s: Mapping[str, float],
    placed_jobs: frozenset[str],
    before: Mapping[str, QueuePosition],
    now_s: float,
) -> dict[str, QueuePosition]:
    """Return the position of each job in a plan, by name of the job.

    Args:
        plan: The plan.
        start_times_s: Unix time at which each running job started.
        placed_jobs: Names of the waiting jobs that are already placed.
        before: The previous positions.
        now_s: Unix time, in seconds.
    """
    why = {item.job: f"{item.problem}; {item.remedy}" if item.remedy else item.problem for item in plan.refused}
    made = dict[str, QueuePosition]()
    if plan.report is not None:
        columns = plan.report.solution.columns
        fastest = choose_fastest(columns)
        planned, elsewhere = list_planned_entries(plan.report.solution), list_waiting_ends(plan.report.solution)
        late = {columns.problem.jobs[item.job].name: item for item in list_late_jobs(plan.report.solution)}
        for row, place in _assign_queue_numbers(plan.report):
            item = columns.options[plan.report.solution.option[row.job]]
            name = columns.problem.jobs[row.job].name
            if name in start_times_s:
                reason = RUNS
            elif name in placed_jobs:
                reason = PLACED
            else:
                reason = _explain_option(item, columns.options[fastest[row.job]])
            if columns.problem.jobs[row.job].own_weight != 1:
                reason = f"{reason}; {WEIGHED}"
            if name in late:
                reason = f"{reason}; {_explain_lateness(late[name], is_running=name in start_times_s, now_s=now_s)}"
            made[name] = QueuePosition.from_truncated_values(
                pool=item.pool,
                gpus=item.gpus,
                position=0 if name in start_times_s else _round_position(place),
                start=format_time(start_times_s[name] if name in start_times_s else now_s + row.start_s),
                finish=format_time(now_s + row.finish_s),
                **({} if name in start_times_s else _describe_wait(planned[row.job], now_s)),
                pools=_list_entries(elsewhere.get(row.job, ()), now_s),
                reason=f"{reason}; {why[name]}" if name in why else reason,
            )
    for name, text in why.items():
        made.setdefault(name, QueuePosition.from_truncated_values(reason=text))
    return {name: _keep_times(position, before.get(name), now_s) for name, position in made.items()}


def _describe_wait(entry: PoolEntry, now_s: float) -> dict[str, Any]:
    """Return the fields of a waiting job's position that give the ranges of its start and of its run time."""
    option = entry.option
    return {
        "earliest_start": format_time(now_s + entry.start_lower_s),
        "latest_start": format_time(now_s + entry.start_upper_s),
        "run_seconds": RunSeconds(
            target=round_to_six_digits(option.seconds),
            lower_bound=round_to_six_digits(option.lower_s),
            upper_bound=round_to_six_digits(option.upper_s),
        ),
    }


def _list_entries(entries: Sequence[PoolEnd], now_s: float) -> list[QueueEntry]:
    return [
        QueueEntry(
            pool=entry.option.pool,
            gpus=entry.option.gpus,
            start=format_time(now_s + entry.start_s),
            finish=format_time(now_s + entry.finish_s),
        )
        for entry in entries[:MAX_ENTRIES]
    ]


def _assign_queue_numbers(report: QueueReport) -> list[tuple[PlannedTimes, int]]:
    """Return the planned times of each job, with its number among the waiting jobs of its pool, from 1."""
    columns, option = report.solution.columns, report.solution.option
    waits = np.zeros(len(columns.pools), dtype=int)
    order = sorted(report.job_times, key=lambda place: (place.start_s, place.job))
    lines = []
    for place in order:
        pool = int(columns.pool[option[place.job]])
        waits[pool] += not columns.is_running[place.job]
        lines.append((place, int(waits[pool])))
    return lines


def _round_position(place: int) -> int:
    step = 10 ** (len(str(place)) - 1)
    return place if place <= EXACT else place // step * step


def _explain_option(option: JobOption, fastest: JobOption) -> str:
    if (option.pool, option.gpus) == (fastest.pool, fastest.gpus):
        return "nothing else runs it faster"
    there = f"{fastest.gpus} GPUs of {fastest.pool}"
    text = f"{option.seconds / fastest.seconds:.1f} times its run on {there}"
    return f"{text}, from which others gain more or which are longer in use"


def _explain_lateness(late: LateJob, *, is_running: bool, now_s: float) -> str:
    """Return a text that says that a job ends after its deadline, and by when and where it would have to start."""
    due = format_time(_round_to_minute(now_s + late.latest_start_s + late.fastest.seconds))
    where = f"{late.fastest.gpus} GPUs of {late.fastest.pool}"
    text = f"ends after its deadline of {due}"
    if is_running:
        return text
    if late.latest_start_s < 0:
        return f"{text}; no pool is fast enough, the fastest is {where}"
    start = format_time(_round_to_minute(now_s + late.latest_start_s))
    return f"{text}; on time if it starts by {start} on {where}"


def _round_to_minute(time_s: float) -> float:
    """Return a Unix time rounded to a minute, so that texts do not change with every plan."""
    return math.floor((time_s + 0.5) / 60) * 60.0


def _keep_times(position: QueuePosition, before: QueuePosition | None, now_s: float) -> QueuePosition:
    """Return a position. Times, pools and run time that hardly differ from those of `before` are kept.

    The start is kept only together with its range, and a pool only together with all others.
    """
    if before is None or (before.pool, before.gpus) != (position.pool, position.gpus):
        return position
    kept = dict[str, Any]()
    if _is_near_time(before.finish, position.finish, now_s):
        kept["finish"] = before.finish
    most_s = _find_most_shift_s(position)
    if all(_is_near_time(getattr(before, name), getattr(position, name), now_s, most_s) for name in _STARTS):
        kept |= {name: getattr(before, name) for name in _STARTS}
    if position.position == 0 or _is_near_run(before.run_seconds, position.run_seconds):
        kept["run_seconds"] = before.run_seconds
    if _is_near_entries(before.pools, position.pools, now_s):
        kept["pools"] = before.pools
    return position.model_copy(update=kept)


_STARTS = ("start", "earliest_start", "latest_start")
"""Fields of a position with its start and the range of its start."""


def _find_most_shift_s(position: QueuePosition) -> float:
    """Return the seconds by which a kept start may be off. They are infinite if the start has no range."""
    earliest_s, latest_s = parse_time(position.earliest_start), parse_time(position.latest_start)
    if earliest_s is None or latest_s is None or latest_s <= earliest_s:
        return math.inf
    return max(RANGE_SHIFT * (latest_s - earliest_s), LEAST_RANGE_SHIFT_S)


def _is_near_time(before: str | None, time: str | None, now_s: float, most_s: float = math.inf) -> bool:
    """Return whether a new time is so close to the shown one that the uncertainty of forecasts explains the difference.

    If one of the times is unknown, return whether both are.

    Args:
        before: The time that is shown.
        time: The new time.
        now_s: Unix time, in seconds.
        most_s: Most seconds by which the times may differ.
    """
    old_s, new_s = parse_time(before), parse_time(time)
    if old_s is None or new_s is None:
        return before == time
    return abs(new_s - old_s) <= min(max(LEAST_SHIFT_S, SHIFT * (new_s - now_s)), most_s)


def _is_near_run(before: RunSeconds | None, run: RunSeconds | None) -> bool:
    if before is None or run is None:
        return before == run
    return _is_nearly_equal(before.document(), run.document())


def _is_near_entries(before: Sequence[QueueEntry], entries: Sequence[QueueEntry], now_s: float) -> bool:
    """Return whether two lists have the same pools and GPUs in any order, with times that hardly differ."""
    old, new = ({(entry.pool, entry.gpus): entry for entry in some} for some in (before, entries))
    return old.keys() == new.keys() and all(
        _is_near_time(getattr(old[key], name), getattr(new[key], name), now_s)
        for key in new
        for name in ("start", "finish")
    )


def make_status(
    plan: PlannedQueue, policy: str, generation: int, now: str, before: api.QueueAdviceStatus
) -> api.QueueAdviceStatus:  # fmt: skip
    """Return the QueueAdvice status that shows a plan. If it hardly differs from `before`, return `before`.

    Args:
        plan: The plan.
        policy: Key of `POLICIES`.
        generation: Generation of the spec of the QueueAdvice.
        now: Current time (RFC 3339).
        before: The current status.
    """
    aspect = _make_aspect(plan)
    left_out = [item for item in plan.refused if item.is_left_out]
    running = 0 if plan.report is None else int(plan.report.solution.columns.is_running.sum())
    waiting = 0 if plan.report is None else len(plan.report.job_times) - running
    made = api.QueueAdviceStatus.from_truncated_values(
        observed_generation=generation,
        conditions=[make_condition("Ready", aspect, generation, now, before.conditions)],
        planned_at=now,
        policy=policy,
        jobs=api.QueueCounts(waiting=waiting, running=running, refused=len(left_out)),
        totals=None if plan.report is None else api.QueueNumbers.from_totals(plan.report.plan),
        references=[]
        if plan.report is None
        else [api.ReferenceNumbers.from_totals(given, name=name) for name, given in plan.report.references.items()],
        gap_ratio=None if plan.report is None else _round_gap(plan.report),
        refused=[
            api.RefusedJob.from_truncated_values(job=item.job, message=item.problem, remedy=item.remedy)
            for item in plan.refused[: api.MAX_REFUSED]
        ],
        summary=_make_summary(plan, waiting, running, aspect.reason),
    )
    return before if _is_nearly_equal(before.document(), made.document()) else made


def _make_aspect(plan: PlannedQueue) -> ConditionContent:
    if plan.problem:
        return ConditionContent("False", "NotPlanned", plan.problem)
    if plan.report is None:
        return ConditionContent("True", "NoJobs", "no job waits or runs that could be planned")
    return ConditionContent(
        "True", "Planned", "every job that can be planned has its place" + _describe_weights(plan.report)
    )


def _describe_weights(report: QueueReport) -> str:
    """Return a text with the namespaces whose weight is not 1, or ""."""
    weights = {job.owner: job.weight for job in report.solution.columns.problem.jobs if job.weight != 1}
    named = [f"{name} {weight:g}" for name, weight in sorted(weights.items())[:MAX_WEIGHTS]]
    more = f" and {len(weights) - MAX_WEIGHTS} more" if len(weights) > MAX_WEIGHTS else ""
    return f"; by {WEIGHT} of its namespace a job counts: {', '.join(named)}{more}" if named else ""


def _round_gap(report: QueueReport) -> float | None:
    gap = report.solution.gap
    return None if gap is None else float(f"{gap:.3g}")


def _make_summary(plan: PlannedQueue, waiting: int, running: int, reason: str) -> api.QueueSummary:
    if plan.report is None:
        return api.QueueSummary.from_truncated_values(reason=reason)
    means = {name: units.format_duration(given.completion_s) for name, given in plan.report.references.items()}
    gap = plan.report.solution.gap
    return api.QueueSummary.from_truncated_values(
        jobs=f"{waiting} wait, {running} run",
        mean=units.format_duration(plan.report.plan.completion_s),
        own_best=means.get("ownBest"),
        flavors=means.get("flavors"),
        gap=None if gap is None else f"{gap:.0%}",
        reason=reason,
    )


_CHANGING = ("plannedAt", "summary", "lastTransitionTime")


def _is_nearly_equal(left: Any, right: Any) -> bool:
    """Return whether two JSON documents are equal, apart from times and small differences of numbers."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = (left.keys() | right.keys()).difference(_CHANGING)
        return all(_is_nearly_equal(left.get(key), right.get(key)) for key in keys)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_is_nearly_equal, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= SAME * max(abs(left), abs(right), 1.0)
    return bool(left == right)


def parse_position(document: Mapping[str, Any]) -> QueuePosition | None:
    """Return the queue position in the status of a TrainingJob, or None if there is no valid one."""
    try:
        return QueuePosition.model_validate(document.get("queue"))
    except ValidationError:
        return None


def parse_status(document: Mapping[str, Any]) -> api.QueueAdviceStatus:
    """Return the status of a QueueAdvice. If the status is invalid, return an empty status."""
    try:
        return api.QueueAdviceStatus.model_validate(document)
    except ValidationError:
        return api.QueueAdviceStatus()


@dataclass(frozen=True, slots=True)
class QueuePlanInputs:
    """Input of `plan_queue`: everything that a plan depends on, except the time."""

    state: QueueState
    policy: str
    """Key of `POLICIES`."""
    before: Mapping[Key, QueuePosition]
    """Position of each job in the previous plan."""
    kueue_before: Mapping[Key, QueuePosition] = field(default_factory=dict)
    """Previous forecast of each job for which Kueue chooses the pool."""


class QueuePlanResult(NamedTuple):
    """A queue plan with the position of each job."""

    plan: PlannedQueue
    positions: Mapping[Key, QueuePosition] = {}
    kueue_positions: Mapping[Key, QueuePosition] = {}
    """Forecast of each waiting job for which Kueue chooses the pool. Its position in the plan is only advice."""


def plan_queue(inputs: QueuePlanInputs, now_s: float) -> QueuePlanResult:
    """Return the queue plan at `now_s`, a Unix time, and the position of each job.

    This takes seconds for thousands of jobs.
    """
    rows, before = inputs.state.rows, {make_plan_name(key): position for key, position in inputs.before.items()}
    places = {name: (one.pool, one.gpus) for name, one in before.items() if one.pool and one.gpus}
    plan = plan_rows(inputs.state, inputs.policy, places, now_s)
    began = {row.name: row.began_s for row in rows if row.began_s is not None}
    placed = frozenset(row.name for row in rows if row.place is not None)
    positions = make_positions(plan, began, placed, before, now_s)
    return QueuePlanResult(
        plan,
        {key: position for name, position in positions.items() if (key := parse_plan_name(name)) is not None},
        _make_kueue_positions(plan, rows, inputs.kueue_before, now_s),
    )


def _make_kueue_positions(
    plan: PlannedQueue, rows: Sequence[QueueRow], before: Mapping[Key, QueuePosition], now_s: float
) -> dict[Key, QueuePosition]:
    """Return the forecast of each waiting job for which Kueue chooses the pool. Other jobs follow the plan."""
    requesting = {row.name: row for row in rows if row.requested_gpus}
    if plan.report is None or not requesting:
        return {}
    solution = plan.report.solution
    numbers = {job.name: number for number, job in enumerate(solution.columns.problem.jobs) if job.name in requesting}
    flavors = {name: [pool for pool, _ in row.quotas] for name, row in requesting.items()}
    requested_gpus = {number: requesting[name].requested_gpus for name, number in numbers.items()}
    entries = list_kueue_entries(solution, requested_gpus, flavors)
    made = dict[Key, QueuePosition]()
    for name, number in numbers.items():
        if (entry := entries.get(number)) is not None:
            position = QueuePosition.from_truncated_values(
                pool=entry.option.pool,
                gpus=entry.option.gpus,
                position=1,
                start=format_time(now_s + entry.start_s),
                finish=format_time(now_s + entry.finish_s),
                **_describe_wait(entry, now_s),
                reason="Kueue chooses its pool",
            )
            key = requesting[name].key
            made[key] = _keep_times(position, before.get(key), now_s)
    return made


def list_longest_runs(plan: PlannedQueue) -> dict[Key, float]:
    """Return the seconds of each planned job's longest run, over all pools and GPU counts that the job may get."""
    if plan.report is None:
        return {}
    columns = plan.report.solution.columns
    longest = np.maximum.reduceat(columns.seconds, columns.first[:-1]).tolist()
    named = ((parse_plan_name(job.name), seconds) for job, seconds in zip(columns.problem.jobs, longest, strict=True))
    return {key: seconds for key, seconds in named if key is not None}


@dataclass(frozen=True, slots=True)
class QueueAdviceInputs:
    """Input of `decide_queue_advice`: everything that the QueueAdvice depends on, except the time."""

    plan: PlannedQueue
    policy: str
    """Key of `POLICIES`."""
    interval_s: float
    """Shortest time between two plans, in seconds."""
    view: View | None
    """The object as it was seen, or None."""


@dataclass(frozen=True, slots=True)
class DesiredQueueAdvice:
    """Spec and status that the QueueAdvice should have."""

    spec: Document | None
    """Spec to write. None leaves the spec unchanged."""
    status: api.QueueAdviceStatus | None
    """Status to write. None if there is no object yet."""


def decide_queue_advice(inputs: QueueAdviceInputs, now_s: float) -> DesiredQueueAdvice:
    """Return the spec and status that the QueueAdvice should have at `now_s`, a Unix time."""
    view, policy = inputs.view, inputs.policy
    spec = api.QueueAdviceSpec.from_truncated_values(policy=policy, interval_seconds=inputs.interval_s).document()
    if view is None:
        return DesiredQueueAdvice(spec, None)
    is_same, before = (encode_canonical(view.document["spec"]) == encode_canonical(spec), parse_status(view.status))
    status = make_status(inputs.plan, policy, view.generation, format_time(now_s), before)
    return DesiredQueueAdvice(None if is_same else spec, status)
