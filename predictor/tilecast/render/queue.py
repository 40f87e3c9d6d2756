"""Format the plan of a job queue as text, JSON, CSV or HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilecast.planner.entries import PoolEntry, SubmittedJob
from tilecast.planner.problem import JobOption, QueuedJob, UnplannedJob
from tilecast.planner.references import REFERENCES
from tilecast.planner.solver import FAR, MAX_ANNEALED_JOBS
from tilecast.planner.totals import LateJob, PlannedTimes, QueueReport, QueueTotals, list_late_jobs
from tilecast.render import queue_page
from tilecast.render.columns import align_columns, format_csv
from tilecast.render.table import wrap_text
from tilecast.render.units import format_duration, format_interval, format_money

SCHEMA_VERSION = 1
MOST_LINES = 40
"""Most jobs in the text output. The other formats list all jobs."""
_TITLES = ("JOB", "NOW", "ADVISED", "GPUS", "PLAN", "START", "FINISH", "(90%)", "COST", "GAIN")
_TOTALS = ("", "MEAN", "P99", "LAST", "COST", "FAIRNESS", "LATE")


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A change in the node counts of the pools, and the plan of the queue after it."""

    nodes: Mapping[str, int]
    """Change in the number of nodes, by pool. A negative number removes nodes."""
    report: QueueReport | None
    """Plan with the changed pools. None if no job can then be planned."""
    jobs: int
    """Change in the number of queued jobs that are planned."""
    lost: tuple[UnplannedJob, ...]
    """Jobs that are planned only without the change."""


@dataclass(frozen=True, slots=True)
class QueueScreen:
    """Screen of a queue: its plan, the jobs that are not planned, and answers to further questions."""

    report: QueueReport
    unplanned: tuple[UnplannedJob, ...]
    what_if: NodeChange | None = None
    """Plan with other node counts. None if the user asks for none."""
    other_order: QueueReport | None = None
    """Plan of the same jobs in the other order of `ORDERS`."""
    submitted: SubmittedJob | None = None
    """When one more job would start and end. None if no such job is given."""


@dataclass(frozen=True, slots=True)
class EmptyQueue:
    """A queue in which no job can be planned."""

    unplanned: tuple[UnplannedJob, ...]
    submitted: SubmittedJob | None = None
    """When one more job would start and end on the pools. None if no such job is given."""
    currency: str = "USD"


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A queued job with its planned start and end, and the pool, GPUs and parallelism that the plan chooses."""

    times: PlannedTimes
    job: QueuedJob
    option: JobOption

    @property
    def present(self) -> str:
        """Pool and number of GPUs on which the job runs, or would run without advice. "-" if unknown."""
        if self.job.present is None:
            return "-"
        return f"{self.job.present[0]}:{self.job.present[1]}{' (runs)' if self.job.is_running else ''}"


def list_planned_jobs(queue_report: QueueReport) -> list[PlannedJob]:
    """Return the planned jobs of a report in queue order."""
    columns, option = queue_report.solution.columns, queue_report.solution.option
    return [
        PlannedJob(place, columns.problem.jobs[place.job], columns.options[option[place.job]])
        for place in queue_report.job_times
    ]


def queue_text(screen: QueueScreen) -> str:
    """Return the plan as text with one line per job, totals and notes, ending in a newline."""
    queue_report = screen.report
    order = _sort_by_start(queue_report)
    rows = [_job_cells(queue_report, placed) for placed in order[:MOST_LINES]]
    lines = [
        queue_headline(queue_report),
        "",
        *align_columns(_TITLES, rows, ("GPUS", "START", "FINISH", "COST", "GAIN")),
    ]
    if len(order) > MOST_LINES:
        lines.append(f"and {len(order) - MOST_LINES} more that start later: -o csv lists all")
    lines += [
        *_refusal_lines(screen.unplanned),
        "",
        *align_columns(_TOTALS, totals_rows(queue_report, screen.other_order), _TOTALS[1:]),
        "",
    ]
    lines += _submitted_lines(screen.submitted, _find_currency(queue_report))
    lines += [line for text in payment_lines(queue_report) for line in wrap_text("", text)]
    lines += [line for text in queue_notes(screen) for line in wrap_text("", text)]
    moved = sum(placed.job.present is not None and placed.job.present[0] != placed.option.pool for placed in order)
    lines.append(f"{_count(len(order), 'job')} planned, {moved} of them elsewhere than now.")
    return "\n".join(lines) + "\n"


def _count(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 job" or "3 jobs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _sort_by_start(queue_report: QueueReport) -> list[PlannedJob]:
    """Return the planned jobs of a report, sorted by planned start."""
    return sorted(
        list_planned_jobs(queue_report),
        key=lambda placed: (placed.times.start_s, placed.times.finish_s, placed.times.job),
    )


def _refusal_lines(unplanned: Sequence[UnplannedJob]) -> list[str]:
    """Return text lines that name each job that cannot be planned, with the problem and the remedy."""
    return [line for item in unplanned for line in wrap_text(f"x  {item.job}  ", f"{item.problem}: {item.remedy}")]


def queue_headline(queue_report: QueueReport) -> str:
    """Return a text line with the number of jobs, the pools and the scheduling policy."""
    columns, policy = queue_report.solution.columns, queue_report.solution.policy
    pools = ", ".join(f"{pool.name} {pool.nodes}x{pool.gpus_per_node}" for pool in columns.pools)
    order = queue_report.solution.order
    return f"{_count(len(columns.weight), 'job')} on {pools}; policy {policy.name}: {policy.summary}; order {order}"


def _job_cells(queue_report: QueueReport, planned: PlannedJob) -> tuple[str, ...]:
    place, option = planned.times, planned.option
    return (
        planned.job.name,
        planned.present,
        option.pool,
        str(option.gpus),
        option.plan,
        _format_start(place.start_s),
        format_duration(place.finish_s),
        format_interval(place.lower_s, place.upper_s),
        _format_price(queue_report, option.cost),
        format_gain(place.gain_s),
    )


def format_gain(seconds: float) -> str:
    """Format a gain (+) or loss (-) of seconds, such as `+2h`. Below one second, return `0`."""
    if abs(seconds) < 1:
        return "0"
    return f"{'+' if seconds > 0 else '-'}{format_duration(abs(seconds))}"


def _format_price(queue_report: QueueReport, amount: float | None) -> str:
    return format_money(amount, _find_currency(queue_report))


def _find_currency(queue_report: QueueReport) -> str:
    pools = queue_report.solution.columns.pools
    return next((pool.currency for pool in pools if pool.price_per_gpu_hour is not None), "USD")


def totals_rows(queue_report: QueueReport, other_order: QueueReport | None = None) -> list[tuple[str, ...]]:
    """Return the cells of the totals table: the plan, the plan in the other order, and each reference policy."""
    others = [] if other_order is None else [other_order]
    named = [
        (f"this plan, {_ORDER_NAMES[queue_report.solution.order]}", queue_report.plan),
        *((f"a plan, {_ORDER_NAMES[other.solution.order]}", other.plan) for other in others),
        *((REFERENCES[name][0], held) for name, held in queue_report.references.items()),
    ]
    return [
        (
            name,
            format_duration(held.completion_s),
            format_duration(held.worst_completion_s),
            format_duration(held.makespan_s),
            _format_price(queue_report, held.cost),
            f"{held.fairness:.2f}",
            str(held.missed),
        )
        for name, held in named
    ]


_ORDER_NAMES = {"kueue": "Kueue's order", "free": "free order"}


def late_lines(queue_report: QueueReport) -> list[str]:
    """Return a sentence for each job that ends late, with what would make it end in time. The latest jobs are first."""
    jobs, lines = queue_report.solution.columns.problem.jobs, []
    late = list_late_jobs(queue_report.solution)
    for item in late[:_PAID]:
        job = jobs[item.job]
        text = f"{job.name} ends {format_duration(item.late_s)} late"
        lines.append(
            f"{text}: it runs already, give it more time." if job.is_running else text + _explain_late_remedy(item)
        )
    if len(late) > _PAID:
        lines.append(f"{len(late) - _PAID} more end late by less than that.")
    return lines


def _explain_late_remedy(late: LateJob) -> str:
    """Return text on what would let a late job end in time: the end of a sentence, and one more sentence."""
    many = late.fastest.gpus > 1
    where = f"{late.fastest.gpus} GPU{'s' * many} of {late.fastest.pool}"
    if late.latest_start_s >= 0:
        start = "at once" if late.latest_start_s < 1 else f"within {format_duration(late.latest_start_s)}"
        return f". It is on time if it starts {start} on {where}: give it a higher priority."
    least, planned = format_duration(-late.latest_start_s), format_duration(late.late_s)
    more = f"{planned} more" if least == planned else f"{planned} more, {least} if it starts at once"
    run = f"{where} take{'' if many else 's'} {format_duration(late.fastest.seconds)}"
    return f". No pool is fast enough: {run}. Give it {more}, or fewer steps."


def payment_lines(queue_report: QueueReport) -> list[str]:
    """Return sentences on the jobs that the plan delays and on those that gain by it. The largest delays come first."""
    jobs = queue_report.solution.columns.problem.jobs
    losing = sorted((place for place in queue_report.job_times if place.gain_s <= -1), key=lambda place: place.gain_s)
    lines = []
    for place in losing[:_PAID]:
        taken = f"; its place goes to {', '.join(place.payers)}" if place.payers else ""
        lines.append(f"{jobs[place.job].name} pays {format_duration(-place.gain_s)}{taken}.")
    if len(losing) > _PAID:
        lines.append(f"{len(losing) - _PAID} more pay less than that.")
    won = sum(place.gain_s for place in queue_report.job_times if place.gain_s > 0)
    lost = -sum(place.gain_s for place in losing)
    lines.append(
        f"Against each on its own best pool jobs gain {format_duration(won)} in all, and pay {format_duration(lost)}."
    )
    return lines


_PAID = 4


def queue_notes(screen: QueueScreen) -> list[str]:
    """Return sentences on the optimality gap, on the cost of not moving jobs, and on other node counts."""
    solution, texts = screen.report.solution, list[str]()
    if solution.gap is not None:
        gap = max(solution.gap, 0.0)
        order = "Kueue's" if solution.order == "kueue" else "any"
        texts.append(f"A plan in {order} order is at most {gap:.1%} better in {solution.policy.name}.")
        texts += [_explain_gap(len(solution.option))] if gap > FAR else []
    texts += _describe_order_cost(screen)
    deciding = solution.policy.deciding
    if solution.best[deciding] and solution.score[deciding] > solution.best[deciding] * 1.0005:
        ratio = solution.score[deciding] / solution.best[deciding] - 1
        texts.append(f"Jobs that gain less than forecasts can tell stay where they are, which costs {ratio:.1%}.")
    return [*late_lines(screen.report), *texts, *node_change_lines(screen)]


def _explain_gap(jobs: int) -> str:
    """Return a sentence that says why a plan may be far from its bound."""
    found = (
        "simulated annealing found no better plan"
        if jobs <= MAX_ANNEALED_JOBS
        else f"queues of more than {MAX_ANNEALED_JOBS} jobs are not annealed, and jobs are moved one by one"
    )
    return f"The bound counts GPUs as divisible, so that the best plan may be closer; {found}."


def _describe_order_cost(screen: QueueScreen) -> list[str]:
    """Return a sentence on what Kueue's order costs compared with the free order, or [] if unknown or small."""
    if screen.other_order is None:
        return []
    scores = {report.solution.order: report.solution for report in (screen.report, screen.other_order)}
    kueue, free = scores["kueue"], scores["free"]
    deciding = kueue.policy.deciding
    texts = []
    if kueue.score[0] > free.score[0]:
        texts.append(
            f"In Kueue's order, jobs of weight {kueue.score[0] - free.score[0]:g} more are late than in free order."
        )
    if free.score[deciding] > 0:
        cost = kueue.score[deciding] / free.score[deciding] - 1
        if cost >= _LEAST_COST and not texts:
            see = "" if screen.report.solution.order == "free" else ": see the plan with --order free"
            texts.append(f"Kueue's order costs {cost:.1%} in {kueue.policy.name}{see}.")
    return texts


_LEAST_COST = 0.001


_ENTRY_TITLES = ("POOL", "GPUS", "PLAN", "START", "(90%)", "FINISH", "(90%)", "COST", "DELAYS")


def _submitted_lines(submitted: SubmittedJob | None, currency: str) -> list[str]:
    """Return the lines of a table with the start and end of one more job on each pool, and a sentence as summary."""
    if submitted is None:
        return []
    name, entries, refusal = submitted.name, submitted.entries, submitted.refusal
    rows = [_entry_cells(entry, currency) for entry in entries]
    lines = [] if refusal is None else _refusal_lines([refusal])
    if entries:
        lines += align_columns(_ENTRY_TITLES, rows, ("GPUS", "START", "FINISH", "COST", "DELAYS"))
        text = f"{name}, if it were submitted now, {describe_entries(entries)}{_describe_lateness(submitted)}"
        lines += wrap_text("", text)
    return [*lines, ""]


def _describe_lateness(submitted: SubmittedJob) -> str:
    """Return the end of a sentence: how late one more job would end and what would help, or that it ends in time.

    If the job ends in time, the text also names the pools on which it would be late.
    """
    if submitted.late is not None:
        return f", {format_duration(submitted.late.late_s)} after its deadline{_explain_late_remedy(submitted.late)}"
    late = [f"{format_duration(item.late_s)} on {item.option.pool}" for item in submitted.entries if item.late_s]
    return f", in time for its deadline. It would be late by {', '.join(late)}." if late else "."


def _entry_cells(entry: PoolEntry, currency: str) -> tuple[str, ...]:
    return (
        entry.option.pool,
        str(entry.option.gpus),
        entry.option.plan,
        _format_start(entry.start_s),
        format_interval(entry.start_lower_s, entry.start_upper_s) if entry.start_upper_s >= 1 else "",
        format_duration(entry.finish_s),
        format_interval(entry.finish_lower_s, entry.finish_upper_s),
        format_money(entry.option.cost, currency),
        "" if not entry.delayed else f"{entry.delayed} job{'s' * (entry.delayed > 1)}",
    )


def _format_start(seconds: float) -> str:
    return "now" if seconds < 1 else format_duration(seconds)


def describe_entries(entries: Sequence[PoolEntry]) -> str:
    """Return a phrase that says when a job would start on each pool, earliest first, and on which it ends first."""
    ordered = sorted(entries, key=lambda item: (item.start_s, item.finish_s))
    starts = [
        f"{'now' if item.start_s < 1 else f'in {format_duration(item.start_s)}'} on {item.option.gpus} "
        f"GPU{'s' * (item.option.gpus > 1)} of {item.option.pool}"
        for item in ordered
    ]
    first = min(entries, key=lambda item: item.finish_s)
    end = f"finishes in {format_duration(first.finish_s)}"
    where = "" if len(ordered) == 1 else f", first on {first.option.pool}"
    return f"would start {', '.join(starts)}, and {end}{where}"


def node_change_lines(screen: QueueScreen) -> list[str]:
    """Return sentences on how other node counts would change the totals. Without other node counts, return none."""
    what_if = screen.what_if
    if what_if is None:
        return []
    nodes = ", ".join(
        f"{count:+d} {'node' if abs(count) == 1 else 'nodes'} of {name}" for name, count in what_if.nodes.items()
    )
    if what_if.report is None:
        return [f"With {nodes} nothing can be planned."]
    old, new = screen.report.plan, what_if.report.plan
    parts = [
        f"mean completion {format_duration(old.completion_s)} -> {format_duration(new.completion_s)}",
        f"last end {format_duration(old.makespan_s)} -> {format_duration(new.makespan_s)}",
    ]
    if old.cost is not None and new.cost is not None:
        parts.append(f"cost {_format_price(screen.report, old.cost)} -> {_format_price(screen.report, new.cost)}")
    parts.append(f"late {old.missed} -> {new.missed}")
    if what_if.jobs:
        parts.append(f"{what_if.jobs:+d} {'job' if abs(what_if.jobs) == 1 else 'jobs'} planned")
    return [
        f"With {nodes}: {', '.join(parts)}.",
        *(f"Then {item.job} is left out: {item.problem}." for item in what_if.lost),
    ]


def queue_document(screen: QueueScreen) -> dict[str, object]:
    """Return the plan as JSON-compatible data."""
    queue_report = screen.report
    solution, what_if = queue_report.solution, screen.what_if
    jobs = solution.columns.problem.jobs
    return {
        "schemaVersion": SCHEMA_VERSION,
        "policy": solution.policy.name,
        "order": solution.order,
        "jobs": [_job_document(placed) for placed in list_planned_jobs(queue_report)],
        "unplanned": [_unplanned_document(item) for item in screen.unplanned],
        "totals": {
            "plan": _totals_document(queue_report.plan),
            **{name: _totals_document(item) for name, item in queue_report.references.items()},
        },
        "orders": {
            item.solution.order: _totals_document(item.plan) for item in (queue_report, screen.other_order) if item
        },
        "late": [_late_document(jobs[item.job].name, item) for item in list_late_jobs(solution)],
        "gapRatio": solution.gap,
        "whatIf": None
        if what_if is None
        else {
            "nodes": dict(what_if.nodes),
            "totals": None if what_if.report is None else _totals_document(what_if.report.plan),
            "jobs": what_if.jobs,
        },
        "ifSubmitted": None if screen.submitted is None else _submitted_document(screen.submitted),
    }


def _submitted_document(submitted: SubmittedJob) -> dict[str, object]:
    return {
        "name": submitted.name,
        "pools": [
            {
                "pool": entry.option.pool,
                "gpus": entry.option.gpus,
                "plan": entry.option.plan,
                "startSeconds": {
                    "target": entry.start_s,
                    "lowerBound": entry.start_lower_s,
                    "upperBound": entry.start_upper_s,
                },
                "finishSeconds": {
                    "target": entry.finish_s,
                    "lowerBound": entry.finish_lower_s,
                    "upperBound": entry.finish_upper_s,
                },
                "cost": entry.option.cost,
                "delayedJobs": entry.delayed,
                "lateSeconds": entry.late_s,
            }
            for entry in submitted.entries
        ],
        "refusal": None if submitted.refusal is None else _unplanned_document(submitted.refusal),
        "late": None if submitted.late is None else _late_document(submitted.name, submitted.late),
    }


def _unplanned_document(unplanned: UnplannedJob) -> dict[str, object]:
    return {
        "job": unplanned.job,
        "problem": unplanned.problem,
        "remedy": unplanned.remedy,
        "leftOut": unplanned.is_left_out,
    }


def _late_document(name: str, late: LateJob) -> dict[str, object]:
    return {
        "job": name,
        "lateSeconds": late.late_s,
        "onTime": {
            "pool": late.fastest.pool,
            "gpus": late.fastest.gpus,
            "seconds": late.fastest.seconds,
            "latestStartSeconds": late.latest_start_s,
        },
    }


def _totals_document(totals: QueueTotals) -> dict[str, object]:
    names = {
        "completion_s": "completionSeconds",
        "worst_completion_s": "worstCompletionSeconds",
        "makespan_s": "makespanSeconds",
    }
    return {names.get(name, name): value for name, value in asdict(totals).items()}


def _job_document(planned: PlannedJob) -> dict[str, object]:
    place, job, option = planned.times, planned.job, planned.option
    return {
        "name": job.name,
        "running": job.is_running,
        "now": None if job.present is None else {"pool": job.present[0], "gpus": job.present[1]},
        "pool": option.pool,
        "gpus": option.gpus,
        "plan": option.plan,
        "stepSeconds": option.step_s,
        "startSeconds": place.start_s,
        "finishSeconds": {"target": place.finish_s, "lowerBound": place.lower_s, "upperBound": place.upper_s},
        "cost": option.cost,
        "gainSeconds": place.gain_s,
        "payers": list(place.payers),
    }


def queue_json(screen: QueueScreen) -> str:
    """Return the plan as JSON text."""
    return json.dumps(queue_document(screen), indent=2) + "\n"


def job_rows(screen: QueueScreen) -> list[dict[str, Any]]:
    """Return one dictionary per planned job. Times are in seconds from now."""
    return [
        {
            "job": placed.job.name,
            "now": placed.present,
            "pool": placed.option.pool,
            "gpus": placed.option.gpus,
            "plan": placed.option.plan,
            "start_seconds": placed.times.start_s,
            "finish_seconds": placed.times.finish_s,
            "lower_seconds": placed.times.lower_s,
            "upper_seconds": placed.times.upper_s,
            "cost": placed.option.cost,
            "gain_seconds": placed.times.gain_s,
        }
        for placed in list_planned_jobs(screen.report)
    ]


def queue_csv(screen: QueueScreen) -> str:
    """Return the plan as CSV with one line per job. Jobs that are not planned come last."""
    seconds = ("start", "finish", "lower", "upper")
    lines: list[Sequence[object]] = [
        ("job", "now", "pool", "gpus", "plan", *(f"{name}_s" for name in seconds), "cost", "gain_s", "problem")
    ]
    for row in job_rows(screen):
        cost = "" if row["cost"] is None else f"{row['cost']:.2f}"
        times = [f"{row[f'{name}_seconds']:.0f}" for name in seconds]
        lines.append((*list(row.values())[:5], *times, cost, f"{row['gain_seconds']:.0f}", ""))
    lines += [(item.job, *[""] * 10, f"{item.problem}; {item.remedy}") for item in screen.unplanned]
    return format_csv(lines)


def queue_html(screen: QueueScreen) -> str:
    """Return the plan as a complete HTML page."""
    queue_report = screen.report
    problems = [(item.job, item.problem, item.remedy) for item in screen.unplanned]
    texts = [*payment_lines(queue_report), *queue_notes(screen)]
    rows = [_job_cells(queue_report, placed) for placed in _sort_by_start(queue_report)]
    return queue_page.queue_page(
        queue_report,
        queue_headline(queue_report),
        (_TITLES, rows),
        (_TOTALS, totals_rows(queue_report, screen.other_order)),
        problems,
        texts,
    )


def empty_queue_text(queue: EmptyQueue, output: str) -> str:
    """Return text for a queue in which no job can be planned, or JSON if `output`, the value of `-o`, asks for it."""
    if output == "json":
        return json.dumps(empty_queue_document(queue), indent=2) + "\n"
    lines = _refusal_lines(queue.unplanned) or ["No job waits or runs."]
    return "\n".join([*lines, *_submitted_lines(queue.submitted, queue.currency)]).rstrip("\n") + "\n"


def empty_queue_document(queue: EmptyQueue) -> dict[str, object]:
    """Return JSON-compatible data for a queue in which no job can be planned."""
    return {
        "schemaVersion": SCHEMA_VERSION,
        "jobs": [],
        "unplanned": [_unplanned_document(item) for item in queue.unplanned],
        "ifSubmitted": None if queue.submitted is None else _submitted_document(queue.submitted),
    }


FORMATS: Mapping[str, Callable[[QueueScreen], str]] = {
    "table": queue_text,
    "json": queue_json,
    "csv": queue_csv,
    "html": queue_html,
}
"""Formatting function of each value of `-o`."""
