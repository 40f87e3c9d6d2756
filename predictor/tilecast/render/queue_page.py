"""Format the plan of a queue as an HTML page with one Gantt chart per pool."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from tilecast.planner.totals import PlannedTimes, QueueReport
from tilecast.render import charts
from tilecast.render.page import definition_list, html_figure, html_page, html_table
from tilecast.render.units import format_duration

_WIDTH, _LEFT, _ROW, _GAP, _AXIS = 1080.0, 120.0, 16.0, 3.0, 26.0
MOST_BARS = 60
"""Most jobs that a pool's chart shows. They are the jobs that start first."""


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
    """Return an HTML figure with one bar per job of a pool over time, sorted by start. `pool` is its index."""
    columns, option = queue_report.solution.columns, queue_report.solution.option
    capacity = columns.pools[pool]
    here = [place for place in queue_report.job_times if columns.pool[option[place.job]] == pool]
    here.sort(key=lambda place: (place.start_s, place.finish_s, place.job))
    name = f"{capacity.name}: {capacity.nodes} nodes of {capacity.gpus_per_node} GPUs"
    if not here:
        return f'<p class="soft">{escape(name)}, nothing runs here by the plan.</p>'
    drawn, end = here[:MOST_BARS], max(queue_report.plan.makespan_s, 1e-9)
    height = len(drawn) * (_ROW + _GAP) + _AXIS
    label = f"{name}; {len(here)} jobs"
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" aria-labelledby="gantt-{pool}">',
        f'<title id="gantt-{pool}">{escape(label)}</title>',
        *_time_axis(end, height - _AXIS),
        *(_job_bar(queue_report, place, row, end) for row, place in enumerate(drawn)),
        "</svg>",
    ]
    more = f" ({len(here) - len(drawn)} that start later are not drawn)" if len(here) > len(drawn) else ""
    return html_figure(label + more, "".join(parts))


def _time_to_pixels(seconds: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 20) * seconds / end


def _time_axis(end: float, bottom: float) -> list[str]:
    parts = []
    for moment in np.linspace(0, end, 7):
        x = _time_to_pixels(float(moment), end)
        parts.append(f'<path class="grid" d="M{x:.1f} 0V{bottom:.1f}"/>')
        text = format_duration(float(moment)) if moment else "now"
        parts.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{text}</text>')
    return parts


def _job_bar(queue_report: QueueReport, times: PlannedTimes, row: int, end: float) -> str:
    """Return SVG for one job: a bar from start to end, a line over the range of its end, and a tooltip.

    `row` counts bars from the top. `end` is the last second of the axis.
    """
    columns = queue_report.solution.columns
    job = columns.problem.jobs[times.job]
    option = columns.options[queue_report.solution.option[times.job]]
    top = row * (_ROW + _GAP) + 2
    left, right = _time_to_pixels(times.start_s, end), _time_to_pixels(times.finish_s, end)
    early, late = _time_to_pixels(times.lower_s, end), min(_time_to_pixels(times.upper_s, end), _WIDTH - 4)
    text = (
        f"{job.name}: {option.gpus} GPUs, {option.plan}, starts {format_duration(times.start_s)}, "
        f"ends {format_duration(times.finish_s)} ({format_duration(times.lower_s)} to {format_duration(times.upper_s)})"
    )
    shade = times.job % charts.COLORS
    middle = top + _ROW / 2
    return (
        f"<g><title>{escape(text)}</title>"
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 1.5):.1f}" height="{_ROW:.1f}" rx="2" '
        f'style="fill:var(--c{shade});opacity:.8"/>'
        f'<path class="quiet" d="M{early:.1f} {middle:.1f}H{late:.1f}"/>'
        f'<text x="{_LEFT - 6:.1f}" y="{top + 12:.1f}" text-anchor="end">{escape(_shorten_name(job.name))}</text></g>'
    )


def _shorten_name(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


_NAME = 17
