"""Format a sweep over values of one setting as a text table with bars, CSV, JSON or a chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from tilecast.advice import Offer
from tilecast.api.advice import Alternative, DetailedRejection
from tilecast.api.base import round_to_six_digits
from tilecast.render.charts import Axis, Chart, Point, Series, format_tick_seconds
from tilecast.render.columns import align_columns, format_csv
from tilecast.render.units import format_count, format_duration, format_interval, format_money
from tilecast.sweeps import SweepRow, relative_throughput, throughput_per_gpu

Measure = Literal["step", "cost", "throughput"]
MEASURES: tuple[Measure, ...] = ("step", "cost", "throughput")

BAR = 24
"""Width of the longest bar in characters."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


def sweep_text(field: str, unit: str, rows: Sequence[SweepRow], *, wide: bool = False) -> str:
    """Return a text table with the best offer for each swept value. If `wide`, list the best offer of every pool."""
    titles = (
        _make_value_title(field, unit),
        "POOL",
        "GPUS",
        "PLAN",
        "STEP",
        "(90%)",
        "COST/1K",
        "/S/GPU",
        "EFF",
        "STEP",
    )
    longest = max((offer.step_s for row in rows for offer in _list_shown_offers(row, wide)), default=1.0)
    lines: list[tuple[str, ...]] = []
    for row in rows:
        offers = _list_shown_offers(row, wide)
        if not offers:
            why = row.advice.rejections[0] if row.advice.rejections else None
            text = f"{why.pool}: {why.message}" if why else "no pool"
            lines.append((row.label, text, *[""] * (len(titles) - 2)))
        lines += [
            (
                row.label,
                offer.pool.name,
                f"{offer.nodes}x{offer.gpus_per_node}",
                str(offer.plan),
                format_duration(offer.step_s),
                format_interval(offer.lower_s, offer.upper_s),
                format_money(offer.cost_per_1000_steps, offer.pool.currency),
                format_count(throughput_per_gpu(offer)),
                f"{relative_throughput(rows, offer):.0%}",
                text_bar(offer.step_s / longest),
            )
            for offer in offers
        ]
    right = (titles[0], "GPUS", "COST/1K", "/S/GPU", "EFF")
    unit = "tokens" if rows[0].advice.request.workload.samples_are_tokens else "samples"
    note = f"/S/GPU: {unit} per second and GPU; EFF: of the best that the same pool reaches here."
    return "\n".join([*align_columns(titles, lines, right), "", note]) + "\n"


def text_bar(fraction: float) -> str:
    """Return a bar of block characters. Its length is a fraction of `BAR` columns, rounded to an eighth of a column."""
    eighths = max(1, round(min(fraction, 1.0) * BAR * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def sweep_csv(field: str, unit: str, rows: Sequence[SweepRow]) -> str:
    """Return the sweep as CSV with one line per swept value and pool."""
    lines: list[Sequence[object]] = [
        (field, "pool", "nodes", "gpusPerNode", "plan", "stepSeconds", "lowerBound", "upperBound",
         "costPer1000Steps", "tokensPerSecond", "efficiency", "best"),
    ]  # fmt: skip
    for row in rows:
        for offer in row.advice.offers:
            cost = "" if offer.cost_per_1000_steps is None else f"{offer.cost_per_1000_steps:.6g}"
            times = [f"{value:.6g}" for value in (offer.step_s, offer.lower_s, offer.upper_s)]
            shares = [
                f"{offer.tokens_per_s:.6g}",
                f"{relative_throughput(rows, offer):.4g}",
                str(offer is row.best).lower(),
            ]
            place = [offer.pool.name, offer.nodes, offer.gpus_per_node, offer.plan]
            lines.append([f"{row.value:g}", *place, *times, cost, *shares])
    return format_csv(lines)


def sweep_document(field: str, unit: str, rows: Sequence[SweepRow]) -> dict[str, Any]:
    """Return the sweep as JSON-compatible data. Each row has a value, its offers and its rejected pools."""
    return {
        "schemaVersion": "1",
        "field": field,
        **({"unit": unit} if unit else {}),
        "rows": [
            {
                "value": round_to_six_digits(row.value),
                "offers": [_offer_document(rows, offer) for offer in row.advice.offers],
                "rejected": [DetailedRejection.from_rejection(item).document() for item in row.advice.rejections],
            }
            for row in rows
        ],
    }


def sweep_json(field: str, unit: str, rows: Sequence[SweepRow]) -> str:
    """Return the sweep as JSON text."""
    return json.dumps(sweep_document(field, unit, rows), indent=2) + "\n"


def sweep_chart(field: str, unit: str, rows: Sequence[SweepRow], measure: Measure = "step") -> Chart:
    """Return a chart of step time, cost or throughput over the swept values, with one line per pool."""
    names = sorted({offer.pool.name for row in rows for offer in row.advice.offers})
    values = [row.value for row in rows]
    is_wide = min(values, default=0) > 0 and max(values) > 4 * min(values)
    series = []
    for name in names:
        pairs = [(row, offer) for row in rows for offer in row.advice.offers if offer.pool.name == name]
        points = [
            Point(row.value, number, f"{field} {row.label}, {_format_measure(measure, offer, number)}, {offer.plan}")
            for row, offer in pairs
            if (number := _measure_offer(measure, offer)) is not None
        ]
        series.append(Series(name, tuple(points)))
    request, currency = rows[0].advice.request, _first_currency(rows)
    heights = [point.y for one in series for point in one.points]
    base = 10 if min(heights, default=0) > 0 and max(heights) > 20 * min(heights) else 0
    y = {
        "step": Axis("step time", format_tick_seconds, base),
        "cost": Axis("cost of 1,000 steps", lambda value: format_money(value, currency), base),
        "throughput": Axis("tokens/s" if request.workload.samples_are_tokens else "samples/s", format_count, base),
    }[measure]
    x = Axis(f"{field}{f' ({unit})' if unit else ''}", lambda value: f"{value:g}", base=2 if is_wide else 0)
    return Chart(f"{request.name}: {y.title} over {field}", x, y, tuple(series))


def _list_shown_offers(row: SweepRow, wide: bool) -> Sequence[Offer]:
    return row.advice.offers if wide else row.advice.offers[:1]


def _make_value_title(field: str, unit: str) -> str:
    name = field.rpartition(".")[2] if not field.startswith("link.") else field.removeprefix("link.")
    return f"{name} {unit}".strip().upper()


def _measure_offer(measure: Measure, offer: Offer) -> float | None:
    return {"step": offer.step_s, "cost": offer.cost_per_1000_steps, "throughput": offer.tokens_per_s}[measure]


def _format_measure(measure: Measure, offer: Offer, number: float) -> str:
    if measure == "step":
        return format_duration(number)
    return format_money(number, offer.pool.currency) if measure == "cost" else f"{format_count(number)}/s"


def _first_currency(rows: Sequence[SweepRow]) -> str:
    return next((offer.pool.currency for row in rows for offer in row.advice.offers), "USD")


def _offer_document(rows: Sequence[SweepRow], offer: Offer) -> dict[str, Any]:
    more = {
        "tokensPerSecond": round_to_six_digits(offer.tokens_per_s),
        "efficiency": round_to_six_digits(relative_throughput(rows, offer)),
    }
    return Alternative.from_offer(offer).document() | more
