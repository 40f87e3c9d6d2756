"""Results of `tilecast validate runs` as one HTML page.

It shows the ratio of forecast to measured step by every input, the factors of the parts of a step, every row, and the
memory peaks. Below each picture is a table of its figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

import numpy as np

from tilecast import __version__
from tilecast.render import charts
from tilecast.render.charts import Axis, Chart, Point, Series
from tilecast.render.page import html_figure, html_page, html_table
from tilecast.render.units import format_duration
from tilecast.validate.scores import count_lines, ranking_line
from tilecast_lab.validate import intervals, memory, residuals, scores
from tilecast_lab.validate.intervals import Interval, Intervals
from tilecast_lab.validate.memory import MemoryPeaks
from tilecast_lab.validate.report import ValidationReport
from tilecast_lab.validate.residuals import Bin, StepPart
from tilecast_lab.validate.scores import EvaluatedRows


def page(report: ValidationReport, names: Sequence[str]) -> str:
    """Return the whole page as HTML.

    Args:
        report: the results to show.
        names: names of the tables.
    """
    scored = scores.score_forecasts(report.rows, report.forecasts)
    body = [
        "<h1>Forecasts against measured steps</h1>",
        f'<p class="soft">{escape(", ".join(names))}; Tilecast {__version__}</p>',
        _lines(count_lines(report.rows, report.forecasts, scored)),
    ]
    if len(scored.measured_s):
        body += [_summary(scored), _residuals(scored), _parts(report.parts), _scatter(scored)]
    return html_page("Forecasts against measured steps by Tilecast", [*body, _peaks(report.peaks)])


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines if line)


def _summary(scored: EvaluatedRows) -> str:
    rows = [
        (
            "",
            [
                escape(item.name),
                f"{item.rows:,}",
                f"{item.groups:,}",
                *(f"{share:.1%}" for share in (item.macro, item.median, item.p90, item.bias)),
                *(f"{share:.1%}" for share in (others.roofline, others.one_mfu)),
            ],
        )
        for item, others in scores.strata(scored)
    ]
    figures = ("rows", "groups", "macro", "median", "P90", "bias", "roofline", "one-MFU")
    caption = (
        "Error of the forecast by GPU, precision, family and scale; macro: the mean over groups of their means; "
        "roofline and one-MFU: the macro errors of the baselines"
    )
    lines = _lines([ranking_line(scored), *scores.describe_left_out(scored)])
    return f"<h2>Error</h2>{lines}" + html_table(caption, ("rows of", *figures), rows, "|".join(figures))


def _residuals(scored: EvaluatedRows) -> str:
    """Return a picture and a table for every input that the rows state."""
    ratio = scores.forecast_ratio(scored)
    blocks = []
    for number, (name, key) in enumerate(residuals.COVARIATES):
        if bins := residuals.bins(key, scored.rows, ratio):
            blocks.append(_covariate(f"ratio-{number}", name, bins))
    least = f"{residuals.LEAST_ROWS} rows of {residuals.LEAST_SOURCES} sources"
    caption = (
        "Median of forecast over measured step in every bin; below 1 the forecast is too fast. Whiskers are two "
        "standard errors with the source as the unit; rows and sources stand beside each. "
        f"Off: {least} or more, and outside of the band of {residuals.TOLERANCE:.0%}."
    )
    return f'<h2>Forecast over measured</h2><p>{caption}</p><div class="pair">{"".join(blocks)}</div>'


def _covariate(identifier: str, name: str, bins: Sequence[Bin]) -> str:
    marks = [Interval(one.value, one.ratio, one.error, _counted(one.rows, one.sources), one.is_off) for one in bins]
    band = (1 - residuals.TOLERANCE, 1 + residuals.TOLERANCE)
    chart = Intervals(f"Forecast over measured by {name}", "forecast / measured", marks, band)
    rows = [
        (
            "off" if one.is_off else "",
            [escape(one.value), f"{one.rows:,}", f"{one.sources:,}", f"{one.ratio:.2f}", _error(one.error), _off(one)],
        )
        for one in bins
    ]
    titles = (name, "rows", "sources", "ratio", "±", "")
    shown = html_table(chart.title, titles, rows, "rows|sources|ratio|±")
    return _with_table(html_figure(chart.title, intervals.svg(chart, identifier)), shown)


def _counted(rows: int, sources: int) -> str:
    return f"{rows:,} of {sources}"


def _error(error: float) -> str:
    return f"{error:.2f}" if np.isfinite(error) else ""


def _off(one: Bin | StepPart) -> str:
    return "off" if one.is_off else ""


def _with_table(picture: str, rows: str) -> str:
    return f"<div>{picture}<details><summary>Figures</summary>{rows}</details></div>"


def _parts(parts: Sequence[StepPart]) -> str:
    if not parts:
        return ""
    marks = [Interval(one.name, one.factor, one.error, f"{one.share:.1%}", one.is_off) for one in parts]
    chart = Intervals("Factor that the measured steps ask for of each part of a step", "factor", marks, (0.9, 1.1))
    rows = [
        (
            "off" if one.is_off else "",
            [escape(one.name), f"{one.share:.1%}", f"{one.factor:.2f}", _error(one.error), _off(one)],
        )
        for one in parts
    ]
    caption = (
        "By how much the seconds of a part should grow, everything else and an effect of every source held equal: "
        "1 where nothing is missing. The part's mean share of a step stands beside it. Off: outside of 0.9 to 1.1 and "
        "of two standard errors."
    )
    shown = html_table(chart.title, ("part", "share", "factor", "±", ""), rows, "share|factor|±")
    picture = html_figure(chart.title, intervals.svg(chart, "parts"), "wide")
    return f"<h2>Parts of a step</h2><p>{caption}</p>{_with_table(picture, shown)}"


OTHERS = "other sources"


def _scatter(scored: EvaluatedRows) -> str:
    """Return a scatter plot of all rows and a table of the errors of all sources.

    The plot names the sources with most rows; all others share one series.
    """
    sources = [residuals.source_of(row) for row in scored.rows]
    counts = Counter(sources).most_common()
    named = [name for name, _ in counts[: charts.COLORS if len(counts) <= charts.COLORS else charts.COLORS - 1]]
    points: dict[str, list[Point]] = {name: [] for name in (*named, OTHERS)}
    for row, source, measured, predicted in zip(
        scored.rows, sources, scored.measured_s, scored.predicted_s, strict=True
    ):
        label = f"{source} {row['id']}, forecast {format_duration(predicted)}, measured {format_duration(measured)}"
        points[source if source in points else OTHERS].append(Point(float(measured), float(predicted), label))
    low = float(min(scored.measured_s.min(), scored.predicted_s.min()))
    high = float(max(scored.measured_s.max(), scored.predicted_s.max()))
    equal = Series("forecast = measured", (Point(low, low), Point(high, high)), is_reference=True)
    series = [Series(name, tuple(of), joined=False) for name, of in points.items() if of]
    x, y = (Axis(f"{name} step", charts.format_tick_seconds, 10) for name in ("measured", "forecast"))
    chart = Chart("Forecast and measured step of every row, by source", x, y, (equal, *series))
    ratio = scores.forecast_ratio(scored)
    rows = []
    for name, count in counts:
        own = ratio[np.array(sources) == name]
        rows.append(("", [escape(name), f"{count:,}", f"{np.median(own):.2f}", f"{np.mean(np.abs(own - 1)):.1%}"]))
    shown = html_table("Rows of every source", ("source", "rows", "ratio", "mean error"), rows, "rows|ratio|mean error")
    picture = html_figure(chart.title, charts.draw_svg(chart, "scatter"), "wide")
    return f"<h2>Rows</h2>{_with_table(picture, shown)}"


def _peaks(peaks: MemoryPeaks) -> str:
    if not len(peaks.measured):
        return _lines(memory.describe_counts(peaks)) if peaks.warnings else ""
    rows = [
        (
            "",
            [
                escape(item.name),
                f"{item.rows:,}",
                f"{item.error:.1%}",
                *(f"{value:.2f}" for value in (item.median, item.least, item.most)),
                *(f"{share:.1%}" for share in (item.low, item.inside)),
            ],
        )
        for item in memory.strata(peaks)
    ]
    figures = ("rows", "mean error", "median", "least", "most", "more than 10 % low", "in range")
    caption = "Bill over measured peak, by source, framework and figure"
    lines = _lines([*memory.describe_counts(peaks), *memory.describe_errors(peaks)])
    return f"<h2>Peaks of memory</h2>{lines}" + html_table(caption, ("rows of", *figures), rows, "|".join(figures))
