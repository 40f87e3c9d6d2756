"""Describe charts as data classes, and draw them as SVG or PNG.

The SVG needs neither network nor script, and follows the light or dark mode of the browser. Each series has a colour
and a marker shape. The `<title>` of a marker contains the values of its point, for tooltips and screen readers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from html import escape

from tilecast.render.units import format_duration

WIDTH, HEIGHT = 560.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 24.0, 14.0, 50.0
_LEGEND_ROW = 22.0
_MOST_TICKS = 8


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart, with a title, a format for tick labels and a linear or logarithmic scale."""

    title: str
    text: Callable[[float], str] = "{:g}".format
    base: int = 0
    """Base of a logarithmic axis. 0 for a linear axis, which begins at zero."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a series. `label` is its tooltip, and `text` is drawn next to its marker if there is room."""

    x: float
    y: float
    label: str = ""
    text: str = ""
    low: float | None = None
    high: float | None = None
    """Upper end of the range of `y`; `low` is the lower end. The ranges of a joined series are drawn as a band."""
    is_highlighted: bool = False
    """Whether the text is placed before the texts of other points."""


@dataclass(frozen=True, slots=True)
class Series:
    """A named list of points. If `joined` is true, a line connects the points in list order."""

    name: str
    points: tuple[Point, ...]
    joined: bool = True
    is_reference: bool = False
    """Whether the series is a reference line, drawn grey, dashed and without markers."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of several series with two axes. All values on a logarithmic axis are positive."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


def group_points(named_points: Iterable[tuple[str, Point]], joined: bool = True) -> tuple[Series, ...]:
    """Group (name, point) pairs into one series per name, in the order in which the names first occur."""
    groups: dict[str, list[Point]] = {}
    for name, point in named_points:
        groups.setdefault(name, []).append(point)
    return tuple(Series(name, tuple(points), joined) for name, points in groups.items())


def format_tick_seconds(value: float) -> str:
    """Format a tick label of seconds. Values of one second or more stay in seconds, such as `3,600s`."""
    return f"{value:,g}s" if value >= 1 else format_duration(value)


STYLE = """\
.chart{--c0:#0063a8;--c1:#b3480a;--c2:#00735a;--c3:#a03c78;--c4:#7a5c00;--c5:#5a4fcf;--ink:#1c2024;--faint:#dde1e6;
--soft:#5c6670;font:12px system-ui,sans-serif;max-width:100%;height:auto}
.chart text{fill:var(--ink)}.chart .soft{fill:var(--soft)}.chart .grid{stroke:var(--faint)}
.chart .band{fill:var(--faint);opacity:.6}.chart .range{opacity:.14}
.chart .quiet{stroke:var(--soft);stroke-dasharray:5 4;fill:none}.chart .line{fill:none;stroke-width:2}
@media(prefers-color-scheme:dark){.chart{--c0:#5cb3f2;--c1:#f29a5c;--c2:#4fc9a8;--c3:#e58fc2;--c4:#e0c04c;--c5:#a79ef5;
--ink:#e8eaed;--faint:#343a42;--soft:#a2acb8}}
"""
"""CSS of the charts. An HTML page or a standalone SVG file includes it once."""

COLORS = 6
SHAPES = (
    '<circle r="4.5"/>',
    '<path d="M-4.5-4.5h9v9h-9z"/>',
    '<path d="M0-6 5.5 4.5h-11z"/>',
    '<path d="M0-6 6 0 0 6-6 0z"/>',
    '<path d="M0 6 5.5-4.5h-11z"/>',
    '<path d="M-5-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z"/>',
)
"""SVG marker of each colour."""
_MATPLOTLIB = "os^Dv*"
"""matplotlib's marker for each colour."""


def draw_svg(chart: Chart, name: str, style: str = "") -> str:
    """Return the chart as an `<svg>` element.

    Args:
        chart: the chart to draw.
        name: prefix of the identifiers inside the element, unique on its page.
        style: CSS to include in the element, needed only for a standalone SVG file.
    """
    x = AxisScale(chart.x, [p.x for s in chart.series for p in s.points], _LEFT, WIDTH - _RIGHT)
    heights = [value for s in chart.series for p in s.points for value in (p.y, p.low, p.high) if value is not None]
    y = AxisScale(chart.y, heights, HEIGHT - _BOTTOM, _TOP)
    legend, height = _draw_legend(chart)
    size = f'width="{WIDTH:.0f}" height="{height:.0f}" viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="{name}-title">',
        f'<title id="{name}-title">{escape(chart.title)}</title>',
        *([f"<style>{style}</style>"] if style else []),
        *_draw_frame(chart, x, y),
    ]
    labelled: list[tuple[Point, float, float]] = []
    markers: list[tuple[float, float]] = []
    for color, series in _color_series(chart):
        places = [(x.to_pixels(point.x), y.to_pixels(point.y)) for point in series.points]
        if band := _draw_band(series, x, y):
            parts.append(f'<polygon class="range" fill="var(--c{color % COLORS})" points="{band}"/>')
        if (series.joined or series.is_reference) and len(places) > 1:
            path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
            look = 'class="quiet"' if series.is_reference else f'class="line" stroke="var(--c{color % COLORS})"'
            parts.append(f'<polyline {look} points="{path}"/>')
        for point, (left, top) in zip(series.points, places, strict=True):
            if not series.is_reference:
                text = escape(f"{series.name}: {point.label or f'{x.axis.text(point.x)}, {y.axis.text(point.y)}'}")
                mark = f'<g transform="translate({left:.1f} {top:.1f})" fill="var(--c{color % COLORS})">'
                parts.append(f"{mark}{SHAPES[color % COLORS]}<title>{text}</title></g>")
                markers.append((left, top))
            if point.text:
                labelled.append((point, left, top))
    labels = _MarkerLabels(markers)
    for point, left, top in sorted(labelled, key=lambda item: not item[0].is_highlighted):
        parts += labels.draw(left, top, point.text)
    return "\n".join([*parts, *legend, "</svg>"])


def _draw_band(series: Series, x: AxisScale, y: AxisScale) -> str:
    """Return the corners of the band between the low and high values of a series, as `points` of an SVG polygon.

    Return "" if no line joins the points of the series or fewer than two of them have a range.
    """
    ranges = [(point.x, point.low, point.high) for point in series.points]
    known = [(place, low, high) for place, low, high in ranges if low is not None and high is not None]
    if not series.joined or len(known) < 2:
        return ""
    corners = [(place, high) for place, _, high in known] + [(place, low) for place, low, _ in reversed(known)]
    return " ".join(f"{x.to_pixels(place):.1f},{y.to_pixels(value):.1f}" for place, value in corners)


class _MarkerLabels:
    """Texts next to markers, placed so that none covers another.

    If there is no room for a text, it is left out, because the tooltip of its marker shows the same values.
    """

    def __init__(self, markers: Iterable[tuple[float, float]]) -> None:
        self._boxes = [(left - 5, left + 5, top - 5, top + 5) for left, top in markers]
        """Left, right, top and bottom, in pixels, of everything that a text must not cover."""

    def draw(self, left: float, top: float, text: str) -> list[str]:
        """Return the SVG elements of a text next to the marker at a pixel position, or [] if it does not fit."""
        width = 6.6 * len(text)
        for is_left, down in ((False, -6.0), (True, -6.0), (False, 15.0), (True, 15.0)):
            start = left - 8 - width if is_left else left + 8
            box = start, start + width, top + down - 10, top + down + 2
            if box[0] < 0 or box[1] > WIDTH or any(map(partial(_is_overlapping, box), self._boxes)):
                continue
            self._boxes.append(box)
            return [draw_muted_text(box[1] if is_left else box[0], top + down, text, "end" if is_left else "start")]
        return []


def _is_overlapping(first: tuple[float, float, float, float], second: tuple[float, float, float, float]) -> bool:
    """Return whether two rectangles (left, right, top, bottom) overlap."""
    return first[0] < second[1] and second[0] < first[1] and first[2] < second[3] and second[2] < first[3]


def _color_series(chart: Chart) -> list[tuple[int, Series]]:
    """Return (colour index, series) pairs. After a reference line, the next series has the same colour index."""
    marks, color = [], 0
    for series in chart.series:
        marks.append((color, series))
        color += not series.is_reference
    return marks


class AxisScale:
    """A mapping from the values of an axis to the pixels between `start` and `end`."""

    def __init__(self, axis: Axis, values: list[float], start: float, end: float) -> None:
        self.axis, self.start, self.end = axis, start, end
        low, high = min(values, default=1.0), max(values, default=1.0)
        self.ticks = _choose_log_ticks(low, high, axis.base) if axis.base else _choose_linear_ticks(high)
        low, high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        self.low, self.span = (
            self._take_axis_logarithm(low),
            max(self._take_axis_logarithm(high) - self._take_axis_logarithm(low), 1e-12),
        )

    def _take_axis_logarithm(self, value: float) -> float:
        return math.log(value) if self.axis.base else value

    def to_pixels(self, value: float) -> float:
        """Return the pixel coordinate of a value along the axis."""
        return self.start + (self._take_axis_logarithm(value) - self.low) / self.span * (self.end - self.start)


def _choose_linear_ticks(high: float) -> list[float]:
    """Return evenly spaced round numbers from zero up to the first one that reaches `high`."""
    rough = (high or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * round_ for round_ in (1, 2, 2.5, 5, 10) if power * round_ >= rough * 0.999)
    return [step * count for count in range(math.ceil(high / step - 1e-9) + 1 or 1)] or [0.0, step]


def _choose_log_ticks(low: float, high: float, base: int) -> list[float]:
    """Return powers of `base` that enclose `low` and `high`.

    If the range spans at most two powers of ten, ticks at 2 and 5 times a power are added. If it spans many powers,
    some are skipped.
    """
    first = math.floor(math.log(low, base) + 1e-9)
    last = max(math.ceil(math.log(high, base) - 1e-9), first + 1)
    stride = -(-(last - first) // _MOST_TICKS)
    ticks = [float(base) ** power for power in range(first, last + 1, stride)]
    if base == 10 and last - first <= 2:
        finer = sorted(tick * factor for tick in ticks for factor in (1, 2, 5))
        inside = [tick for tick in finer if low * 0.999 <= tick <= high * 1.001]
        below, above = [tick for tick in finer if tick < low * 0.999], [tick for tick in finer if tick > high * 1.001]
        return [*below[-1:], *inside, *above[:1]]
    return ticks if ticks[-1] >= high * 0.999 else [*ticks, ticks[-1] * float(base) ** stride]


def _draw_frame(chart: Chart, x: AxisScale, y: AxisScale) -> list[str]:
    """Return the SVG elements of grid lines, tick labels and axis titles."""
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for tick in y.ticks:
        top = y.to_pixels(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{top:.1f}" y2="{top:.1f}"/>')
        parts.append(draw_muted_text(_LEFT - 8, top + 4, chart.y.text(tick), "end"))
    for tick in x.ticks:
        left = x.to_pixels(tick)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(draw_muted_text(left, bottom + 18, chart.x.text(tick), "middle"))
    center, middle = (_LEFT + right) / 2, (_TOP + bottom) / 2
    turned = f'transform="translate(16 {middle}) rotate(-90)"'
    parts.append(f'<text x="{center}" y="{bottom + 40}" text-anchor="middle">{escape(chart.x.title)}</text>')
    parts.append(f'<text {turned} text-anchor="middle">{escape(chart.y.title)}</text>')
    return parts


def draw_muted_text(left: float, top: float, text: str, anchor: str) -> str:
    """Return an SVG `<text>` element in a muted colour at a pixel position. `anchor` is its `text-anchor`."""
    return f'<text class="soft" x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _draw_legend(chart: Chart) -> tuple[list[str], float]:
    """Return the SVG elements of the legend below the chart, and the height of chart and legend in pixels."""
    parts, left, top = [], _LEFT, HEIGHT + 6
    for color, series in _color_series(chart):
        width = 26 + 7.2 * len(series.name)
        if left + width > WIDTH and left > _LEFT:
            left, top = _LEFT, top + _LEGEND_ROW
        mark = f'<g fill="var(--c{color % COLORS})">{SHAPES[color % COLORS]}</g>'
        mark = '<path class="quiet" d="M-8 0h16"/>' if series.is_reference else mark
        words = f'<text x="14" y="4">{escape(series.name)}</text>'
        parts.append(f'<g transform="translate({left + 8:.1f} {top:.1f})">{mark}{words}</g>')
        left += width + 16
    return parts, top + _LEGEND_ROW - 6


def draw_png(chart: Chart) -> bytes:
    """Return the chart as the bytes of a PNG image of 1,200 by 675 pixels.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for color, series in _color_series(chart):
        look = "--" if series.is_reference else ("-" if series.joined else "") + _MATPLOTLIB[color % COLORS]
        axes.plot([point.x for point in series.points], [point.y for point in series.points], look, label=series.name)
    axes.set(title=chart.title, xlabel=chart.x.title, ylabel=chart.y.title)
    for axis, lines, scale, limit in (
        (chart.x, axes.xaxis, axes.set_xscale, axes.set_xlim),
        (chart.y, axes.yaxis, axes.set_yscale, axes.set_ylim),
    ):
        if axis.base:
            scale("log", base=axis.base)
        else:
            limit(0)
        lines.set_major_formatter(_make_tick_formatter(axis))
    axes.grid(alpha=0.3)
    axes.legend()
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _make_tick_formatter(axis: Axis) -> Callable[[float, float], str]:
    return lambda value, _: axis.text(value)
