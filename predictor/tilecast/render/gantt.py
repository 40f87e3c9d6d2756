"""Draw the jobs of a pool over time as a Gantt chart. The height of a job's bar is its number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from tilecast.render import charts
from tilecast.render.page import html_figure
from tilecast.render.units import shorten_text

_WIDTH, _LEFT, _RIGHT, _AXIS = 1080.0, 60.0, 20.0, 44.0
_LEAST_HEIGHT, _MOST_HEIGHT, _GPU = 80.0, 320.0, 6.0
"""Least and most pixels of a chart's height, and the pixels of a GPU between these limits."""
MOST_BARS = 300
"""Most jobs that a chart shows. They are the jobs that start first."""
_LETTER, _LINE = 6.6, 12.0
"""Pixels of a letter's width and of a line's height."""
_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))
_ROUND = (1.0, 2.0, 3.0, 5.0, 6.0, 10.0, 12.0, 15.0, 20.0, 30.0)


@dataclass(frozen=True, slots=True)
class Bar:
    """A job of a pool's chart. Times are seconds from now, and `lower_s` to `upper_s` is the range of its end."""

    name: str
    tooltip: str
    color: int
    """Index of a colour, of which there are `charts.COLORS`; more begin again."""
    gpus: int
    start_s: float
    finish_s: float
    lower_s: float
    upper_s: float


def draw_gantt(name: str, label: str, gpus: int, bars: Sequence[Bar], end_s: float) -> str:
    """Return an HTML figure of a pool's GPUs over time.

    Args:
        name: name of the chart, unique on the page, because it is a part of an HTML identifier.
        label: title, as text.
        gpus: GPUs of the pool.
        bars: jobs by ascending start. Only the first `MOST_BARS` are drawn.
        end_s: last second of the axis.
    """
    drawn, end_s = bars[:MOST_BARS], max(end_s, 1e-9)
    lanes = assign_lanes([(bar.start_s, bar.finish_s, bar.gpus) for bar in drawn])
    top_lane = max(gpus, 1, *(high for pieces in lanes for _, high in pieces))
    height = min(max(_GPU * top_lane, _LEAST_HEIGHT), _MOST_HEIGHT)
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height + _AXIS:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height + _AXIS:.0f}" role="img" aria-labelledby="gantt-{name}">',
        f'<title id="gantt-{name}">{escape(label)}</title>',
        *_draw_gpu_axis(top_lane, height),
        *_draw_time_axis(end_s, height),
        *(_draw_bar(bar, pieces, height / top_lane, height, end_s) for bar, pieces in zip(drawn, lanes, strict=True)),
        "</svg>",
    ]
    more = f" ({len(bars) - len(drawn)} that start later are not drawn)" if len(bars) > len(drawn) else ""
    return html_figure(label + more, "".join(parts))


def assign_lanes(jobs: Sequence[tuple[float, float, int]]) -> list[list[tuple[int, int]]]:
    """Return the chart lanes of each job, as (first, end) ranges of lane numbers. Each lane stands for one GPU.

    A job gets the lowest lanes that are free from its start to its end. These lanes need not be adjacent.

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
    """Return at most ten round times from 0 to `end_s`, in seconds, and the unit in which all labels show them."""
    size, unit = next(((size, unit) for size, unit in _UNITS if end_s >= 3 * size), _UNITS[-1])
    steps = (factor * power for power in (1, 10, 100, 1_000, 10_000) for factor in _ROUND)
    step = size * next((step for step in steps if end_s <= 9 * size * step), end_s / size)
    return [step * count for count in range(int(end_s / step + 1e-9) + 1)], unit


def _time_to_pixels(seconds: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / end


def _draw_time_axis(end: float, bottom: float) -> list[str]:
    moments, unit = choose_ticks(end)
    size = next(size for size, name in _UNITS if name == unit)
    parts = []
    for moment in moments:
        x = _time_to_pixels(moment, end)
        parts.append(f'<path class="grid" d="M{x:.1f} 0V{bottom:.1f}"/>')
        text = f"{moment / size:,g} {unit}" if moment else "now"
        parts.append(charts.draw_muted_text(x, bottom + 17, text, "middle"))
    return parts


def _draw_gpu_axis(gpus: int, height: float) -> list[str]:
    """Return the SVG elements of grid lines and labels at round numbers of GPUs, from 0 at the bottom."""
    step = max(1, 2 ** int(np.ceil(np.log2(max(gpus, 1) / 5))))
    parts = [charts.draw_muted_text(_LEFT - 8, height + 34, "GPUs", "end")]
    for count in range(0, gpus + 1, step):
        y = height - height * count / gpus
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(charts.draw_muted_text(_LEFT - 8, max(y + 4, 10.0), f"{count}", "end"))
    return parts


def _draw_bar(bar: Bar, pieces: Sequence[tuple[int, int]], lane: float, bottom: float, end: float) -> str:
    """Return SVG for one job: a bar for each group of its lanes, a line over the range of its end, and a tooltip.

    Args:
        bar: the job.
        pieces: lanes of the job, as `assign_lanes` returns them.
        lane: height of a lane in pixels.
        bottom: pixel coordinate of the lower end of lane 0.
        end: last second of the axis.
    """
    left, right = _time_to_pixels(bar.start_s, end), _time_to_pixels(bar.finish_s, end)
    early, late = _time_to_pixels(bar.lower_s, end), min(_time_to_pixels(bar.upper_s, end), _WIDTH - 4)
    color = f"var(--c{bar.color % charts.COLORS})"
    parts = [f"<g><title>{escape(bar.tooltip)}</title>"]
    for low, high in pieces:
        parts.append(
            f'<rect x="{left:.1f}" y="{bottom - high * lane:.1f}" width="{max(right - left, 1.5):.1f}"'
            f' height="{(high - low) * lane:.1f}" style="fill:{color};fill-opacity:.35;stroke:{color}"/>'
        )
    low, high = max(pieces, key=lambda piece: piece[1] - piece[0])
    middle = bottom - (low + high) / 2 * lane
    if late > early:
        parts.append(f'<path class="quiet" d="M{early:.1f} {middle:.1f}H{late:.1f}"/>')
    room = int((right - left - 6) / _LETTER)
    if room >= 3 and (high - low) * lane >= _LINE:
        parts.append(f'<text x="{left + 4:.1f}" y="{middle + 4:.1f}">{escape(shorten_text(bar.name, room))}</text>')
    return "".join((*parts, "</g>"))
