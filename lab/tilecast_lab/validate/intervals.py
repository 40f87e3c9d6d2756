"""Draw estimates with their standard errors as rows of a picture.

Each row has a mark and a whisker of two standard errors on either side. A band shows where an estimate should be. The
picture is SVG, drawn with `tilecast.render.charts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tilecast.render.charts import SHAPES, WIDTH, Axis, AxisScale, draw_muted_text

_LEFT, _RIGHT, _TOP, _ROW, _BOTTOM = 200.0, 124.0, 10.0, 22.0, 44.0
_MOST_NAME = 25
_REACH = 4.0
"""Largest ratio of a whisker's end to its mark; longer whiskers are cut off."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A positive estimate, the standard error of its logarithm (NaN if not known), and the text beside it."""

    name: str
    value: float
    error: float
    text: str
    is_off: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        """Two standard errors below and above; the estimate itself where the error is not known."""
        reach = min(math.exp(2 * self.error), _REACH) if math.isfinite(self.error) else 1.0
        return self.value / reach, self.value * reach

    @property
    def label(self) -> str:
        """The whole row in words."""
        error = f" ± {self.error:.2f}" if math.isfinite(self.error) else ""
        return f"{self.name}: {self.value:.2f}{error}, {self.text}{', off' if self.is_off else ''}"


@dataclass(frozen=True, slots=True)
class Intervals:
    """Estimates over one logarithmic axis, and the ends of the band."""

    title: str
    axis: str
    rows: Sequence[Interval]
    band: tuple[float, float]


def svg(chart: Intervals, name: str) -> str:
    """Return the picture as an `<svg>` element; `name` begins its identifiers, so it must be unique on its page."""
    values = [end for row in chart.rows for end in row.ends]
    x = AxisScale(Axis(chart.axis, base=2), [*values, *chart.band], _LEFT, WIDTH - _RIGHT)
    bottom = _TOP + _ROW * len(chart.rows)
    height = bottom + _BOTTOM
    size = f'width="{WIDTH:.0f}" height="{height:.0f}" viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
    low, high = (x.to_pixels(end) for end in chart.band)
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="{name}-title">',
        f'<title id="{name}-title">{escape(chart.title)}</title>',
        f'<path class="band" d="M{low:.1f} {_TOP}H{high:.1f}V{bottom:.1f}H{low:.1f}z"/>',
    ]
    for tick in x.ticks:
        left = x.to_pixels(tick)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP}" y2="{bottom:.1f}"/>')
        parts.append(draw_muted_text(left, bottom + 16, x.axis.text(tick), "middle"))
    for index, row in enumerate(chart.rows):
        parts += _row(row, x, _TOP + _ROW * (index + 0.5))
    center = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{center}" y="{bottom + 36:.1f}" text-anchor="middle">{escape(chart.axis)}</text>')
    return "\n".join([*parts, "</svg>"])


def _row(row: Interval, x: AxisScale, top: float) -> list[str]:
    """Return a mark between its name and its text; estimates that are off have a colour and a mark of their own."""
    color = int(row.is_off)
    low, high = (x.to_pixels(end) for end in row.ends)
    short = row.name if len(row.name) <= _MOST_NAME else f"{row.name[: _MOST_NAME - 1]}…"
    whisker = f'<line class="line" stroke="var(--c{color})" x1="{low:.1f}" x2="{high:.1f}" y1="{top}" y2="{top}"/>'
    mark = f'<g transform="translate({x.to_pixels(row.value):.1f} {top})" fill="var(--c{color})">{SHAPES[color]}'
    return [
        f'<text x="{_LEFT - 10}" y="{top + 4}" text-anchor="end">{escape(short)}</text>',
        whisker,
        f"{mark}<title>{escape(row.label)}</title></g>",
        draw_muted_text(WIDTH - _RIGHT + 10, top + 4, f"{row.text}{', off' if row.is_off else ''}", "start"),
    ]
