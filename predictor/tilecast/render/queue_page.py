"""Format the plan of a queue as an HTML page with one Gantt chart per pool."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tilecast.planner.totals import PlannedTimes, QueueReport
from tilecast.render.gantt import Bar, draw_gantt
from tilecast.render.page import definition_list, html_page, html_table
from tilecast.render.units import format_duration


def queue_page(
    queue_report: QueueReport,
    title: str,
    jobs: tuple[Sequence[str], Sequence[Sequence[str]]],
    totals: tuple[Sequence[str], Sequence[Sequence[str]]],
    problems: Sequence[tuple[str, str, str]],
    texts: Sequence[str],
) -> str:
    """Return a complete HTML page on a queue's plan.

    Args:
        queue_report: the plan with its totals.
        title: sentence below the heading, as text.
        jobs: titles and rows of the table of jobs, as text.
        totals: titles and rows of the table of totals, as text.
        problems: name, problem and remedy of each job that is not planned.
        texts: sentences about the plan.
    """
    plan = queue_report.plan
    named = [
        ("mean completion", format_duration(plan.completion_s)),
        ("99th percentile", format_duration(plan.worst_completion_s)),
        ("last end", format_duration(plan.makespan_s)),
        ("largest fairness ratio", f"{plan.fairness:.2f}"),
        ("late", str(plan.missed)),
    ]
    refused = [("out", [escape(cell) for cell in row]) for row in problems]
    return html_page(
        "Tilecast: the queue",
        [
            "<h1>The whole queue</h1>",
            f'<p class="soft">{escape(title)}</p>',
            f'<section class="card">{definition_list(named)}</section>',
            "<h2>Pools</h2>",
            *(_gantt_chart(queue_report, pool) for pool in range(len(queue_report.solution.columns.pools))),
            "<h2>Jobs</h2>",
            _figures_table("Every job, in the order of their starts", *jobs),
            html_table("Not planned as asked", ("job", "problem", "remedy"), refused) if refused else "",
            "<h2>Beside what is done without a plan</h2>",
            _figures_table("The same forecasts, placed five ways", *totals),
            *(f"<p>{escape(text)}</p>" for text in texts),
        ],
    )


def _figures_table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    figures = "|".join(title for title in titles[1:] if title not in ("NOW", "ADVISED", "PLAN"))
    return html_table(caption, titles, [("", [escape(cell) for cell in row]) for row in rows], figures)


def _gantt_chart(queue_report: QueueReport, pool: int) -> str:
    """Return an HTML figure of a pool's GPUs over time, with a bar for each job. `pool` is the index of the pool."""
    columns, option = queue_report.solution.columns, queue_report.solution.option
    capacity = columns.pools[pool]
    here = [place for place in queue_report.job_times if columns.pool[option[place.job]] == pool]
    here.sort(key=lambda place: (place.start_s, place.finish_s, place.job))
    name = f"{capacity.name}: {capacity.nodes} nodes of {capacity.gpus_per_node} GPUs"
    if not here:
        return f'<p class="soft">{escape(name)}, nothing runs here by the plan.</p>'
    label = f"{name}; {len(here)} {'job' if len(here) == 1 else 'jobs'}. A bar is as high as the job has GPUs."
    bars = [_make_bar(queue_report, place) for place in here]
    return draw_gantt(str(pool), label, capacity.gpus, bars, queue_report.plan.makespan_s)


def _make_bar(queue_report: QueueReport, times: PlannedTimes) -> Bar:
    columns = queue_report.solution.columns
    job = columns.problem.jobs[times.job]
    option = columns.options[queue_report.solution.option[times.job]]
    text = (
        f"{job.name}: {option.gpus} GPUs, {option.plan}, starts {format_duration(times.start_s)}, "
        f"ends {format_duration(times.finish_s)} ({format_duration(times.lower_s)} to {format_duration(times.upper_s)})"
    )
    return Bar(job.name, text, times.job, int(option.gpus), times.start_s, times.finish_s, times.lower_s, times.upper_s)
