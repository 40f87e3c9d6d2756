"""Format advice as an HTML page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from tilecast import zoo
from tilecast.advice import Advice, Offer
from tilecast.explain import Explanation
from tilecast.plan_columns import PLAN_COLUMNS
from tilecast.render import charts
from tilecast.render.charts import Axis, Chart, Point, Series, group_points
from tilecast.render.explain import SHOWN, exchange_rows, format_kernel_shape, operator_cells
from tilecast.render.page import definition_list, fraction_bar, html_figure, html_page, html_table
from tilecast.render.risk import describe_risk
from tilecast.render.table import describe_prices, describe_ties, is_usual_shown
from tilecast.render.units import (
    format_bytes,
    format_count,
    format_duration,
    format_gibibyte_range,
    format_gibibytes,
    format_interval,
    format_money,
    format_parameters,
    format_step_count,
)
from tilecast.scaling import ScalingCurve
from tilecast.step import PARTS


def advice_page(
    advice: Advice,
    explanation: Explanation | None,
    curves: Sequence[ScalingCurve],
    sections: Sequence[tuple[str, str]] = (),
    command: str = "",
    day: str = "",
) -> str:
    """Return the advice as a complete HTML page.

    Args:
        advice: the advice to show.
        explanation: the breakdown of the recommended plan's step, or None if there is no recommendation.
        curves: the scaling curve of each pool.
        sections: title and plain text of further sections.
        command: the command line that made the page, or "".
        day: the date of the page, or "".
    """
    extra = [
        f'<h2>{escape(name)}</h2><div class="scroll" tabindex="0"><pre>{escape(text)}</pre></div>'
        for name, text in sections
    ]
    body = [
        *list_sections(advice, explanation, curves),
        *extra,
        _plan_legend(),
        _provenance_footer(advice, command, day),
    ]
    return html_page(f"{advice.request.name}: advice by Tilecast", body)


def list_sections(
    advice: Advice, explanation: Explanation | None, curves: Sequence[ScalingCurve], level: int = 1
) -> list[str]:
    """Return the sections of the advice as HTML, without a page around them.

    Args:
        advice: the advice to show.
        explanation: the breakdown of the recommended plan's step, or None if there is no recommendation.
        curves: the scaling curve of each pool.
        level: level of the heading with the job's name.
    """
    request, workload = advice.request, advice.request.workload
    unit = "tokens" if workload.samples_are_tokens else "samples"
    held = format_parameters(zoo.count_parameters(replace(workload, lora_rank=0)))
    batch = f"{format_count(workload.tokens_per_step)} {unit} a step"
    steps = (advice.best.workload if advice.best else workload).steps
    batch += "" if steps is None else f", {format_step_count(steps)}"
    subtitle = f"{workload.model.name}, {held} parameters, {workload.precision}, {batch}"
    body = [
        f"<h{level}>{escape(request.name)}</h{level}>",
        f'<p class="soft">{escape(subtitle)}; objective: {escape(request.objective)}</p>',
        _recommendation_card(advice, explanation),
        _charts_section(advice, curves),
        _pools_section(advice),
        _why_not_section(advice),
    ]
    best = advice.best
    if best is not None and explanation is not None:
        body += [
            _parts_section(advice),
            _memory_section(best),
            _kernels_section(best, explanation),
            _exchanges_section(best, explanation),
        ]
    return body


def _recommendation_card(advice: Advice, explanation: Explanation | None) -> str:
    best = advice.best
    if best is None:
        return '<div class="card"><strong>No pool can run this job.</strong><p>See why below.</p></div>'
    currency = best.pool.currency
    named = [
        ("step", format_duration(best.step_s)),
        ("90 % range", format_interval(best.lower_s, best.upper_s)),
        ("whole run", format_duration(best.finish_s)),
        ("its cost", format_money(best.cost_to_finish, currency)),
        ("1,000 steps", format_money(best.cost_per_1000_steps, currency)),
        ("MFU", f"{explanation.mfu:.1%}" if explanation else ""),
        ("memory", _format_memory_fit(best)),
        ("node type", best.pool.node_type),
    ]
    selector = ", ".join(f"{key}={value}" for key, value in best.pool.node_selector.items())
    lines = [
        f"<p>{escape(selector)}</p>" if selector else "",
        f"<p>{escape(best.reason)}. {escape(_ties_sentence(advice))}</p>",
        *(f"<p>{escape(note)}</p>" for note in (*describe_risk(advice), *advice.alerts, *advice.notes)),
    ]
    where = f"{best.pool.name}, {best.nodes} x {best.gpus_per_node} GPUs"
    plan = f"<code>{escape(str(best.plan))}</code>"
    return f'<div class="card"><strong>{escape(where)}</strong> {plan}{"".join(lines)}{definition_list(named)}</div>'


def _ties_sentence(advice: Advice) -> str:
    return describe_ties(advice) if advice.ties else ""


def _pools_section(advice: Advice) -> str:
    rows = [("best" if offer is advice.best else "", _offer_cells(offer)) for offer in advice.offers]
    if advice.usual is not None and is_usual_shown(advice, advice.usual):
        rows.append(("", _offer_cells(advice.usual)))
    if advice.baseline is not None:
        rows.append(("", _offer_cells(advice.baseline)))
    for item in advice.rejections:
        plan = f"<code>{escape(str(item.plan))}</code>" if item.plan else ""
        memory = format_bytes(item.memory_bytes) if item.memory_bytes is not None else ""
        why = escape(f"{item.message}: {item.remedy}")
        rows.append(("out", [escape(item.pool), "", plan, "", "", "", "", memory, why]))
    titles = ("pool", "GPUs", "plan", "step", "90 % range", "whole run", "1,000 steps", "memory", "why")
    caption = "The best plan of every pool, best first. Pools that cannot run the job come last."
    return "<h2>Pools</h2>" + html_table(caption, titles, rows, "GPUs|step|whole run|1,000 steps|memory")


def _offer_cells(offer: Offer) -> list[str]:
    return [
        escape(offer.pool.name),
        f"{offer.nodes} x {offer.gpus_per_node}",
        f"<code>{escape(str(offer.plan))}</code>",
        format_duration(offer.step_s),
        format_interval(offer.lower_s, offer.upper_s),
        format_duration(offer.finish_s),
        format_money(offer.cost_per_1000_steps, offer.pool.currency),
        f"{format_gibibyte_range(offer.memory_lower_bytes, offer.memory_upper_bytes)} GiB",
        escape(offer.reason),
    ]


def _format_memory_fit(offer: Offer) -> str:
    """Return the predicted range of an offer's memory and the available memory, such as `51-58 of 79 GiB`."""
    taken = format_gibibyte_range(offer.memory_lower_bytes, offer.memory_upper_bytes)
    return f"{taken} of {format_gibibytes(offer.memory_available_bytes)} GiB{', tight' if offer.is_tight else ''}"


def _dimension_in_words(dimension: str) -> str:
    """Return the words for a plan's dimension in camel case, such as "micro batch size" for `microBatchSize`."""
    words = re.sub("[A-Z]", lambda letter: f" {letter[0].lower()}", dimension)
    return words.replace("zero", "ZeRO").replace("gpus", "GPUs")


def _why_not_section(advice: Advice) -> str:
    if not advice.why_not:
        return ""
    rows = []
    for item in advice.why_not:
        change = f"{item.change.text} ({item.change.effect})" if item.change else ""
        cells = (_dimension_in_words(item.subject), item.pool, str(item.plan), item.message, change)
        rows.append(("", [escape(cell) for cell in cells]))
    titles = ("instead of", "pool", "plan", "why", "what would change that")
    return "<h2>Why not …</h2>" + html_table(
        "Why other plans are not recommended, and the smallest change that would help", titles, rows
    )


def _charts_section(advice: Advice, curves: Sequence[ScalingCurve]) -> str:
    plots = [("choices", _choices_chart(advice)), *_scaling_charts(curves, advice.best)]
    figures = [html_figure(chart.title, charts.draw_svg(chart, name)) for name, chart in plots if chart is not None]
    return f'<h2>Time, cost and GPUs</h2><div class="pair">{"".join(figures)}</div>' if figures else ""


def _choices_chart(advice: Advice) -> Chart | None:
    """Return a chart of step time over cost, or over GPUs unless all pools have prices. Without plans, return None.

    The chart shows the Pareto set, the best plan of each pool, the baseline, and data parallelism alone.
    """
    plans = {(offer.pool.name, str(offer.plan), offer.gpus): offer for offer in (*advice.pareto, *advice.offers)}
    named = [(offer.pool.name, offer) for offer in sorted(plans.values(), key=lambda offer: offer.pool.name)]
    if advice.usual is not None and is_usual_shown(advice, advice.usual):
        named.append(("data parallelism or FSDP alone", advice.usual))
    if advice.baseline is not None:
        named.append(("your plan today", advice.baseline))
    shown = [offer for _, offer in named]
    if not shown:
        return None
    priced = all(offer.cost_per_1000_steps is not None for offer in shown)
    amounts = [offer.cost_per_1000_steps or 0.0 if priced else float(offer.gpus) for offer in shown]
    points = [
        (
            name,
            Point(
                amount,
                offer.step_s,
                f"{offer.plan} on {_count_gpus(offer.gpus)}, {format_duration(offer.step_s)}",
                "recommended" if offer is advice.best else _count_gpus(offer.gpus),
                is_highlighted=offer is advice.best,
            ),
        )
        for (name, offer), amount in zip(named, amounts, strict=True)
    ]
    base, currency = _choose_axis_base(amounts), shown[0].pool.currency
    x = (
        Axis("cost of 1,000 steps", lambda value: format_money(value, currency), base)
        if priced
        else Axis("GPUs", format_count, base and 2)
    )
    title = "Step time against cost: each plan is the fastest at its price or on its number of GPUs"
    y = Axis("step time", charts.format_tick_seconds, _choose_axis_base([offer.step_s for offer in shown]))
    return Chart(title, x, y, group_points(points, joined=False))


def _count_gpus(gpus: float) -> str:
    """Return a number of GPUs as text."""
    return "1 GPU" if gpus == 1 else f"{gpus:g} GPUs"


def _choose_axis_base(values: Sequence[float]) -> int:
    """Return 10, for a logarithmic axis, if the values span a factor above 4. Otherwise return 0, for a linear axis."""
    return 10 if min(values, default=0.0) > 0 and max(values) > 4 * min(values) else 0


def _scaling_charts(curves: Sequence[ScalingCurve], best: Offer | None) -> list[tuple[str, Chart | None]]:
    """Return charts of step time and of cost over the number of GPUs, each with a name for its HTML identifiers.

    The chart of step time also shows the 90 % range of each pool's step time, and the ideal time of the recommended
    pool.
    """
    if not curves:
        return []
    gpus = Axis("GPUs", format_count, base=2)
    steps = group_points(
        (
            curve.pool,
            Point(
                p.gpus,
                p.step_s,
                f"{_count_gpus(p.gpus)}, {format_duration(p.step_s)}, {p.plan}",
                low=p.lower_s,
                high=p.upper_s,
            ),
        )
        for curve in curves
        for p in curve.points
    )
    times = [point.y for series in steps for point in series.points]
    own = next((curve for curve in curves if best is not None and curve.pool == best.pool.name), None)
    if own is not None and len(own.points) > 1:
        first = own.points[0]
        ideal = tuple(Point(p.gpus, first.step_s * first.gpus / p.gpus) for p in own.points)
        steps = (*steps, Series(f"ideal on {own.pool}", ideal, is_reference=True))
    y = Axis("step time", charts.format_tick_seconds, _choose_axis_base(times))
    plots: list[tuple[str, Chart | None]] = [
        ("scaling", Chart("Step time of the fastest plan by GPUs, with the 90 % range", gpus, y, steps))
    ]
    costs = group_points(
        (curve.pool, Point(p.gpus, cost, f"{_count_gpus(p.gpus)}, {format_money(cost, curve.currency)}"))
        for curve in curves
        for p in curve.points
        if (cost := p.cost_per_1000_steps) is not None
    )
    if costs:
        currency = curves[0].currency
        axis = Axis("cost of 1,000 steps", lambda value: format_money(value, currency))
        plots.append(("cost", Chart("Cost of 1,000 steps of these plans", gpus, axis, costs)))
    return plots


def _parts_section(advice: Advice) -> str:
    shown = [*advice.offers, *([advice.baseline] if advice.baseline else [])]
    rows = [
        ("", [part, *(_part_cell(offer, part) for offer in shown)])
        for part in PARTS
        if any(offer.breakdown[part] >= 0.0005 * offer.step_s for offer in shown)
    ]
    rows.append(("", ["step", *(format_duration(offer.step_s) for offer in shown)]))
    titles = ("part", *(offer.pool.name if offer is not advice.baseline else "baseline" for offer in shown))
    caption = "Seconds of each part that nothing else hides. They sum to the step."
    return "<h2>Where the time goes</h2>" + html_table(caption, titles, rows)


def _part_cell(offer: Offer, part: str) -> str:
    seconds = offer.breakdown[part]
    return f"{format_duration(seconds)}<br>{fraction_bar(seconds / offer.step_s)}" if seconds else ""


def _memory_section(best: Offer) -> str:
    available = best.memory_available_bytes
    rows = [
        ("", [name, format_bytes(value), f"{value / available:.1%}", fraction_bar(value / available)])
        for name, value in best.memory.items()
        if value
    ]
    free = available - best.memory_bytes
    rows.append(("", ["left", format_bytes(free), f"{free / available:.1%}", fraction_bar(free / available)]))
    caption = f"Least memory of the fullest GPU under the recommended plan. A run takes {_format_memory_fit(best)}."
    return "<h2>Memory</h2>" + html_table(caption, ("what", "bytes", "share", "of the GPU"), rows, "bytes|share")


def _kernels_section(best: Offer, explanation: Explanation) -> str:
    rows = [("", [escape(cell) for cell in operator_cells(one, explanation)]) for one in explanation.operators[:SHOWN]]
    titles = ("operator", "time", "share", "kernel", "runs", "each", "FLOP/B", "bound by", "reaches", "tiles")
    caption = (
        f"The costliest of {len(explanation.operators)} operators of one micro-batch through every stage, "
        f"{format_duration(explanation.seconds)} of GPU time, {best.plan.gradient_accumulation:,} a step"
    )
    chart = _roofline_chart(explanation)
    picture = html_figure(chart.title, charts.draw_svg(chart, "roofline"), "wide")
    return f"<h2>Kernels</h2>{picture}" + html_table(caption, titles, rows, "time|share|runs|each|FLOP/B|reaches")


def _roofline_chart(explanation: Explanation) -> Chart:
    """Return a roofline chart: FLOP/s over FLOP per byte, with operators as points."""
    gpu, peak = explanation.gpu, explanation.gpu.peak(explanation.precision)
    bandwidth = gpu.memory_bandwidth_bytes_per_s
    shown = [
        one
        for one in explanation.operators
        if one.flops > 0 and one.intensity > 0 and one.precision == explanation.precision
    ]
    low = min([one.intensity for one in shown] + [explanation.balance / 10])
    high = max([one.intensity for one in shown] + [explanation.balance * 10])
    roof = Series(
        f"roofline of {gpu.name}",
        (Point(low, low * bandwidth), Point(explanation.balance, peak), Point(high, peak)),
        is_reference=True,
    )
    points = (
        (
            one.kind,
            Point(
                one.intensity,
                one.flops / one.kernel_s,
                f"{one.name}, {format_kernel_shape(one)}, {one.utilization:.0%} of it",
            ),
        )
        for one in shown
    )
    marks = group_points(points, joined=False)[: charts.COLORS]
    peaks = f"{format_count(peak)}FLOP/s in {explanation.precision}, {format_count(bandwidth)}B/s of memory"
    title = f"Speed of kernels under the GPU's limits (roofline): {peaks}"
    x, y = Axis("FLOP per byte", lambda value: f"{value:g}", 10), Axis("FLOP/s", format_count, 10)
    return Chart(title, x, y, (roof, *marks))


def _exchanges_section(best: Offer, explanation: Explanation) -> str:
    if not explanation.exchanges and not explanation.gradient_bytes:
        return ""
    titles = ("what", "time", "collective", "ranks", "buffer", "runs")
    rows = [("", [escape(cell) for cell in row[: len(titles)]]) for row in exchange_rows(explanation)]
    exposed = format_duration(best.breakdown["communication"])
    caption = f"Seconds per micro-batch if computation hid none of it. {exposed} of a step are not hidden."
    return "<h2>Communication</h2>" + html_table(caption, titles, rows, "time|ranks|buffer|runs")


def _plan_legend() -> str:
    return f"<h2>How a plan reads</h2>{_list_plan_columns()}"


def _list_plan_columns() -> str:
    """Return an HTML list that explains each part of the text of a plan."""
    items = "".join(
        f"<div><dt><code>{escape(column.example)}</code></dt><dd>{escape(column.legend)}</dd></div>"
        for column in PLAN_COLUMNS.values()
        if column.example
    )
    return f'<dl class="facts">{items}</dl>'


def write_caveats(advice: Advice) -> str:
    """Return HTML that says how sure the forecast is, which prices were used, and how to read the text of a plan."""
    prices = describe_prices(advice)
    lines = [f"How sure? {advice.confidence}", f"Prices per GPU and hour: {prices}" if prices else ""]
    texts = "".join(f'<p class="soft">{escape(line)}</p>' for line in lines if line)
    return f"{texts}<details><summary>How a plan reads</summary>{_list_plan_columns()}</details>"


def _provenance_footer(advice: Advice, command: str, day: str) -> str:
    source = advice.provenance
    text = describe_prices(advice)
    made = f"Made by `{command}`" if command else ""
    lines = [
        " on ".join(part for part in (made or ("Made" if day else ""), day) if part),
        f"How sure? {advice.confidence}",
        f"Prices per GPU and hour: {text}" if text else "",
        f"{advice.plans_evaluated:,} plans priced by Tilecast {source.version}; "
        f"utilization model {source.model_version}, {source.model_sha256[:12]}; "
        f"constants {source.constants_sha256[:12]}; facts {source.data_sha256[:12]}; inputs {advice.inputs_hash}.",
    ]
    return f"<footer>{''.join(f'<p>{escape(line)}</p>' for line in lines if line)}</footer>"
