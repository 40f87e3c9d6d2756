"""Format the plan of a queue as an HTML page with one Gantt chart per pool."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from tilecast.planner.totals import PlannedTimes, QueueReport
from tilecast.render import charts
from tilecast.render.page import definition_list, html_figure, html_page, html_table
from tilecast.render.units import format_duration

_WIDTH, _LEFT, _RIGHT, _AXIS = 1080.0, 60.0, 20.0, 44.0
_LEAST_HEIGHT, _MOST_HEIGHT, _GPU = 80.0, 320.0, 6.0
"""Least and largest height of a chart in pixels, and the height of one GPU between these limits."""
MOST_BARS = 300
"""Most jobs in a pool's chart. The jobs that start first are shown."""
_LETTER, _LINE = 6.6, 12.0
"""Width of a letter and height of a line, in pixels."""
_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))
_ROUND = (1.0, 2.0, 3.0, 5.0, 6.0, 10.0, 12.0, 15.0, 20.0, 30.0)


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
    """Return an HTML figure of a pool's GPUs over time. The height of a job's bar is its number of GPUs.

    `pool` is the index of the pool.
    """
    columns, option = queue_report.solution.columns, queue_report.solution.option
    capacity = columns.pools[pool]
    here = [place for place in queue_report.job_times if columns.pool[option[place.job]] == pool]
    here.sort(key=lambda place: (place.start_s, place.finish_s, place.job))
    name = f"{capacity.name}: {capacity.nodes} nodes of {capacity.gpus_per_node} GPUs"
    if not here:
        return f'<p class="soft">{escape(name)}, nothing runs here by the plan.</p>'
    drawn, end = here[:MOST_BARS], max(queue_report.plan.makespan_s, 1e-9)
    gpus = [int(columns.options[option[place.job]].gpus) for place in drawn]
    lanes = assign_lanes([(place.start_s, place.finish_s, count) for place, count in zip(drawn, gpus, strict=True)])
    top_lane = max(capacity.gpus, *(high for pieces in lanes for _, high in pieces))
    height = min(max(_GPU * top_lane, _LEAST_HEIGHT), _MOST_HEIGHT)
    label = f"{name}; {len(here)} {'job' if len(here) == 1 else 'jobs'}. A bar is as high as the job has GPUs."
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height + _AXIS:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height + _AXIS:.0f}" role="img" aria-labelledby="gantt-{pool}">',
        f'<title id="gantt-{pool}">{escape(label)}</title>',
        *_gpu_axis(top_lane, height),
        *_time_axis(end, height),
        *(
            _job_bars(queue_report, place, pieces, height / top_lane, height, end)
            for place, pieces in zip(drawn, lanes, strict=True)
        ),
        "</svg>",
    ]
    more = f" ({len(here) - len(drawn)} that start later are not drawn)" if len(here) > len(drawn) else ""
    return html_figure(label + more, "".join(parts))


def assign_lanes(jobs: Sequence[tuple[float, float, int]]) -> list[list[tuple[int, int]]]:
    """Return the lanes that each job occupies in a chart, as (first, end) pairs. A lane is one GPU.

    A job gets the lowest lanes that are free from its start to its end. They need not be adjacent.

    Args:
        jobs: start, end and number of GPUs of each job, by ascending start.
    """
    running: list[tuple[float, list[tuple[int, int]]]] = []
    assigned = []
    for start, end, gpus in jobs:
        running = [item for item in running if item[0] > start + 1e-9]
        taken = sorted(piece for _, pieces in running for piece in pieces)
        pieces, lane, left = [], 0, gpus
        for first, last in [*taken, (lane + gpus + sum(high - low for low, high in taken), 0)]:
            if first > lane and left:
                pieces.append((lane, min(first, lane + left)))
                left -= pieces[-1][1] - lane
            lane = max(lane, last)
        running.append((end, pieces))
        assigned.append(pieces)
    return assigned


def choose_ticks(end_s: float) -> tuple[list[float], str]:
    """Return at most ten round times from 0 to `end_s`, in seconds, and the unit in which to write them."""
    size, unit = next(((size, unit) for size, unit in _UNITS if end_s >= 3 * size), _UNITS[-1])
    steps = (factor * power for power in (1, 10, 100, 1_000, 10_000) for factor in _ROUND)
    step = size * next((step for step in steps if end_s <= 9 * size * step), end_s / size)
    return [step * count for count in range(int(end_s / step + 1e-9) + 1)], unit


def _time_to_pixels(seconds: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / end


def _time_axis(end: float, bottom: float) -> list[str]:
    moments, unit = choose_ticks(end)
    size = next(size for size, name in _UNITS if name == unit)
    parts = []
    for moment in moments:
        x = _time_to_pixels(moment, end)
        parts.append(f'<path class="grid" d="M{x:.1f} 0V{bottom:.1f}"/>')
        text = f"{moment / size:,g} {unit}" if moment else "now"
        parts.append(charts.muted_text(x, bottom + 17, text, "middle"))
    return parts


def _gpu_axis(gpus: int, height: float) -> list[str]:
    """Return grid lines and labels at round numbers of GPUs. Lane 0 is at the bottom."""
    step = max(1, 2 ** int(np.ceil(np.log2(max(gpus, 1) / 5))))
    parts = [charts.muted_text(_LEFT - 8, height + 34, "GPUs", "end")]
    for count in range(0, gpus + 1, step):
        y = height - height * count / gpus
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(charts.muted_text(_LEFT - 8, max(y + 4, 10.0), f"{count}", "end"))
    return parts


def _job_bars(
    queue_report: QueueReport,
    times: PlannedTimes,
    pieces: Sequence[tuple[int, int]],
    lane: float,
    bottom: float,
    end: float,
) -> str:
    """Return the SVG elements of one job: a bar for each group of lanes, a line over its end's range, and a tooltip.

    Args:
        queue_report: the plan.
        times: start and end of the job.
        pieces: lanes of the job, from `assign_lanes`.
        lane: height of a lane in pixels.
        bottom: pixel coordinate of the lower end of lane 0.
        end: last second of the axis.
    """
    columns = queue_report.solution.columns
    job = columns.problem.jobs[times.job]
    option = columns.options[queue_report.solution.option[times.job]]
    left, right = _time_to_pixels(times.start_s, end), _time_to_pixels(times.finish_s, end)
    early, late = _time_to_pixels(times.lower_s, end), min(_time_to_pixels(times.upper_s, end), _WIDTH - 4)
    text = (
        f"{job.name}: {option.gpus} GPUs, {option.plan}, starts {format_duration(times.start_s)}, "
        f"ends {format_duration(times.finish_s)} ({format_duration(times.lower_s)} to {format_duration(times.upper_s)})"
    )
    parts = [f"<g><title>{escape(text)}</title>"]
    for low, high in pieces:
        parts.append(
            f'<rect x="{left:.1f}" y="{bottom - high * lane:.1f}" width="{max(right - left, 1.5):.1f}"'
            f' height="{(high - low) * lane:.1f}" style="fill:var(--c{times.job % charts.COLORS});fill-opacity:.35;'
            f'stroke:var(--c{times.job % charts.COLORS})"/>'
        )
    low, high = max(pieces, key=lambda piece: piece[1] - piece[0])
    middle = bottom - (low + high) / 2 * lane
    parts.append(f'<path class="quiet" d="M{early:.1f} {middle:.1f}H{late:.1f}"/>')
    room = int((right - left - 6) / _LETTER)
    if room >= 3 and (high - low) * lane >= _LINE:
        parts.append(f'<text x="{left + 4:.1f}" y="{middle + 4:.1f}">{escape(_shorten_name(job.name, room))}</text>')
    return "".join((*parts, "</g>"))


def _shorten_name(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
