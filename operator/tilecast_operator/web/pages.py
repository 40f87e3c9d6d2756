"""Write the pages from the objects of the cluster. Every text of an object is escaped, and no page has a script."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TypeVar
from urllib.parse import urlencode

from tilecast.planner.references import REFERENCES
from tilecast.render import charts
from tilecast.render.gantt import MOST_BARS, Bar, draw_gantt
from tilecast.render.page import definition_list, fraction_bar, html_figure, html_page, html_table
from tilecast.render.units import format_duration, format_interval, shorten_text
from tilecast.web.answers import Form
from tilecast.web.page import EXAMPLE, write_page
from tilecast_operator.kube.times import format_time
from tilecast_operator.web.rows import JobRow, MeasuredRow, PolicyRow, PoolRow, QueueRow, QueueSlot
from tilecast_operator.web.watches import ClusterState

ItemT = TypeVar("ItemT")

ROWS = 100
"""Rows of a page of a table."""
MOST_POINTS = 500
"""Most jobs in the pictures of forecasts. They are those that were measured last."""
MOST_CHARTS = 24
"""Most pools with a chart of their own."""
MOST_FORM_POOLS = 12
"""Most pools that the form is filled with."""
LONGEST_SEARCH = 320
"""Most characters of a search. A namespace and a name have at most 317."""
_LONGEST_LABEL = 28
"""Most characters of a pool's name in a legend."""
_NAMED_POOLS = 5
"""Pools with a colour of their own in the pictures of forecasts."""
_MOST_RATIO = 3.0
"""Largest multiple of the measured step that is drawn."""
_MEASURED_TITLES = ("job", "pool", "forecast", "range", "measured", "error", "uncorrected", "reports", "last, UTC")
_MEASURED_NUMBERS = "forecast|range|measured|error|uncorrected|reports"
_SLOT_TITLES = ("job", "pool", "place", "GPUs", "starts", "range", "ends", "why")
_SLOT_NUMBERS = "place|GPUs|starts|range|ends"
_NAVIGATION = (
    ("./", "Pools"),
    ("jobs", "Jobs"),
    ("forecasts", "Forecasts"),
    ("queue", "Queue"),
    ("play/", "Try a job"),
)
STYLE = """\
nav{display:flex;flex-wrap:wrap;gap:4px 14px;margin:0 0 20px;border-bottom:1px solid var(--line)}
nav a{padding:6px 2px;color:var(--soft);text-decoration:none;border-bottom:2px solid transparent}
nav a:hover{color:var(--ink)}nav a[aria-current]{color:var(--ink);border-color:var(--bar);font-weight:600}
a{color:var(--bar)}.card.stale{border-left-color:var(--bad)}.card.stale strong{font-size:16px}
form.search{display:flex;flex-wrap:wrap;gap:8px;margin:12px 0}
form.search label{display:flex;flex-wrap:wrap;align-items:center;gap:8px;color:var(--soft)}
form.search input,form.search button{padding:7px 9px;border:1px solid var(--line);border-radius:6px;
background:var(--card);color:var(--ink);font:15px/1.3 system-ui,sans-serif;max-width:100%}
:focus-visible{outline:2px solid var(--bar);outline-offset:2px}
.turn{display:flex;gap:20px;margin:12px 0}.card>dl.facts:first-child{margin-top:0}
td.wrap{min-width:210px}.scroll.picture{margin-bottom:16px}.scroll.picture>figure{min-width:720px}
.scroll.picture>figure>.scroll>.chart{width:100%}
"""
"""CSS of these pages beside that of every page."""


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Query of a page: the text to search for in names, and the page number, from 1."""

    search: str = ""
    page: int = 1

    @classmethod
    def from_values(cls, search: str, page: str) -> PageQuery:
        """Return the query that two texts describe. If `page` is not a number, it counts as 1."""
        number = int(page) if page.isascii() and page.isdigit() and len(page) <= 6 else 1
        return cls(search.strip()[:LONGEST_SEARCH], max(number, 1))


def write_pools(state: ClusterState, query: PageQuery, now_s: float) -> str:
    """Return the page of pools, with totals of the cluster."""
    pools, measured = state.pools.list_rows(), _list_measured(state)
    free = [pool.free for pool in pools if pool.free is not None]
    facts = [
        ("pools", str(len(pools))),
        ("GPUs", f"{sum(pool.gpus or 0 for pool in pools):,}"),
        ("free GPUs", f"{sum(free):,}" if free else ""),
        ("jobs", f"{len(state.jobs):,}"),
        ("measured jobs", f"{len(measured):,}"),
        ("median error", f"{_find_median_error(measured):.1%}" if measured else ""),
    ]
    shown, turn = _paginate(pools, query, "./")
    titles = ["pool", "GPU", "nodes x GPUs", "in use", "price/GPU/h", "network", "error", "from"]
    if has_problem := not all(pool.is_ready for pool in shown):
        titles.append("why")
    rows = [("" if pool.is_ready else "out", _write_pool(pool)[: 8 + has_problem]) for pool in shown]
    body = [f'<section class="card">{definition_list(facts)}</section>']
    if rows:
        numeric = "nodes x GPUs|price/GPU/h|error"
        body += [html_table(_count_noun("pool", len(pools), len(rows)), titles, rows, numeric), turn]
        body.append(
            '<p class="soft">Error: median of (forecast - measured) / measured over the runs on a pool, each '
            "forecast without that run. Where nothing reads free GPUs, in use is empty.</p>"
        )
    else:
        body.append("<p>There is no GPUPool. The operator writes one for every kind of GPU node that it finds.</p>")
    return _write_frame("Pools", "./", body, state, now_s)


def _write_pool(pool: PoolRow) -> list[str]:
    used = ""
    if pool.free is not None and pool.gpus:
        share = min(max(1.0 - pool.free / pool.gpus, 0.0), 1.0)
        used = f"{fraction_bar(share / 2)} {max(pool.gpus - pool.free, 0)} of {pool.gpus}"
    shown = (pool.gpu, pool.shape.replace("x", " x ", 1), used, pool.price, pool.link, _format_ratio(pool.error_ratio))
    cells = [cell if cell is used else escape(cell) for cell in shown]
    return [escape(pool.name), *cells, escape(pool.origin), escape("" if pool.is_ready else pool.reason)]


def write_jobs(state: ClusterState, query: PageQuery, now_s: float) -> str:
    """Return the page of jobs, with their recommendations and measured steps."""
    words = query.search.casefold()
    jobs = [job for job in state.jobs.list_rows() if words in job.full_name.casefold()]
    shown, turn = _paginate(jobs, query, "jobs")
    titles = ("job", "pool", "GPUs", "plan", "step, 90% range", "1000 steps", "measured", "error", "why")
    rows = [("", _write_job(job)) for job in shown]
    body = [
        '<form class="search" method="get" action="jobs" role="search"><label>Namespace or name '
        f'<input type="search" name="q" value="{escape(query.search)}" maxlength="{LONGEST_SEARCH}"></label>'
        '<button type="submit">Search</button></form>'
    ]
    if rows:
        numeric = "GPUs|step, 90% range|1000 steps|measured|error"
        body += [html_table(_count_noun("TrainingJob", len(jobs), len(rows)), titles, rows, numeric), turn]
    else:
        body.append("<p>No TrainingJob has this in its name.</p>" if words else "<p>There is no TrainingJob.</p>")
    return _write_frame("Jobs", "jobs", body, state, now_s)


def _write_job(job: JobRow) -> list[str]:
    measured = job.measured
    texts = (
        job.pool,
        job.gpus,
        job.plan,
        f"{job.step}, {job.range}" if job.range else job.step,
        job.cost,
        "" if measured is None else format_duration(measured.step_s),
        "" if measured is None else _format_ratio(measured.error_ratio),
        f"{job.reason}: {job.message}" if job.reason and job.message else job.reason or job.message,
    )
    return [_write_name(job), *(escape(text) for text in texts)]


def write_forecasts(state: ClusterState, query: PageQuery, now_s: float) -> str:
    """Return the page that compares forecasts with measured steps."""
    measured = _list_measured(state)
    if not measured:
        body = [
            "<p>No step of a job was measured yet. A training script reports its steps with "
            "<code>tilecast_observe</code>; the operator also reads them from Prometheus or logs.</p>"
        ]
        return _write_frame("Forecasts", "forecasts", body, state, now_s)
    inside = sum(one.is_inside for _, one in measured)
    raw = [abs(one.raw_ratio) for _, one in measured if one.raw_ratio is not None]
    facts = [
        ("measured jobs", f"{len(measured):,}"),
        ("median error", f"{_find_median_error(measured):.1%}"),
        ("without corrections", f"{statistics.median(raw):.1%}" if raw else ""),
        ("bias", _format_ratio(statistics.median(one.error_ratio for _, one in measured))),
        ("inside the 90% range", f"{inside / len(measured):.0%}"),
    ]
    shown, turn = _paginate(measured, query, "forecasts")
    rows = [("" if one.is_inside else "off", _write_measured(job, one)) for job, one in shown]
    caption = f"{_count_noun('measured job', len(measured), len(rows))}, the last reported first"
    table = html_table(caption, _MEASURED_TITLES, rows, _MEASURED_NUMBERS)
    body = [
        f'<section class="card">{definition_list(facts)}</section>',
        _draw_forecasts(measured[:MOST_POINTS], len(measured)),
        "<h2>Measured jobs</h2>",
        table,
        turn,
        '<p class="soft">Error: (forecast - measured) / measured. A marked row lies outside its range.</p>',
    ]
    return _write_frame("Forecasts", "forecasts", body, state, now_s)


def _list_measured(state: ClusterState) -> list[tuple[JobRow, MeasuredRow]]:
    """Return each job that has a measured step, with that step. The job that reported last comes first."""
    found = [(job, job.measured) for job in state.jobs.list_rows() if job.measured is not None]
    return sorted(found, key=lambda item: item[1].time, reverse=True)


def _find_median_error(measured: Sequence[tuple[JobRow, MeasuredRow]]) -> float:
    return statistics.median(abs(one.error_ratio) for _, one in measured)


def _write_measured(job: JobRow, measured: MeasuredRow) -> list[str]:
    texts = (
        measured.pool,
        format_duration(measured.forecast_s),
        format_interval(measured.lower_s, measured.upper_s),
        format_duration(measured.step_s),
        _format_ratio(measured.error_ratio),
        _format_ratio(measured.raw_ratio),
        f"{measured.samples:,}",
        measured.time.removesuffix("Z").replace("T", " "),
    )
    return [_write_name(job), *(escape(text) for text in texts)]


def _draw_forecasts(measured: Sequence[tuple[JobRow, MeasuredRow]], count: int) -> str:
    """Return two figures as HTML: forecasts over measured steps, and the ratio of both over measured steps.

    `count` is the number of all measured jobs, of which `measured` may be only the newest.
    """
    steps, ratios = dict[str, list[charts.Point]](), dict[str, list[charts.Point]]()
    for job, one in measured:
        text = (
            f"{job.full_name}, forecast {format_duration(one.forecast_s)}, measured {format_duration(one.step_s)}, "
            f"error {_format_ratio(one.error_ratio)}"
        )
        pool, ratio = one.pool or "unknown pool", max(one.error_ratio + 1.0, 0.0)
        steps.setdefault(pool, []).append(charts.Point(one.step_s, one.forecast_s, text))
        ratios.setdefault(pool, []).append(charts.Point(one.step_s, min(ratio, _MOST_RATIO), text))
    low, high = min(one.step_s for _, one in measured), max(one.step_s for _, one in measured)
    ends = (low, max(high, low * 1.01))
    equal = charts.Series("as measured", tuple(charts.Point(end, end) for end in ends), is_reference=True)
    one_to_one = charts.Series("as measured", tuple(charts.Point(end, 1.0) for end in ends), is_reference=True)
    seconds = charts.Axis("measured step", charts.format_tick_seconds, 10)
    pictures = (
        charts.Chart(
            "Forecast of a step over its measurement",
            seconds,
            charts.Axis("forecast", charts.format_tick_seconds, 10),
            (*_group_pools(steps), equal),
        ),
        charts.Chart(
            f"Forecast as a multiple of its measurement, drawn up to {_MOST_RATIO:g}",
            seconds,
            charts.Axis("forecast / measured"),
            (*_group_pools(ratios), one_to_one),
        ),
    )
    more = f", of the {len(measured)} jobs that were reported last" if count > len(measured) else ""
    figures = [
        html_figure(chart.title + more, charts.draw_svg(chart, f"forecasts-{index}"))
        for index, chart in enumerate(pictures)
    ]
    return f'<div class="pair">{"".join(figures)}</div>'


def _group_pools(points: Mapping[str, Sequence[charts.Point]]) -> list[charts.Series]:
    """Return a series for each of the pools with the most points, and one series for all other pools."""
    names = sorted(points, key=lambda name: (-len(points[name]), name))
    series = [
        charts.Series(shorten_text(name, _LONGEST_LABEL), tuple(points[name]), joined=False)
        for name in names[:_NAMED_POOLS]
    ]
    if others := tuple(point for name in names[_NAMED_POOLS:] for point in points[name]):
        series.append(charts.Series("other pools", others, joined=False))
    return series


def write_queue(state: ClusterState, query: PageQuery, now_s: float) -> str:
    """Return the page of the queue's plan: what each pool runs over time, and which jobs wait."""
    slots = [(job, job.queue) for job in state.jobs.list_rows() if job.queue is not None]
    queues = state.queues.list_rows()
    if not slots and not queues:
        body = ["<p>The queue is not planned. The chart's value <code>queue.enabled</code> turns its plan on.</p>"]
        return _write_frame("Queue", "queue", body, state, now_s)
    body = [part for row in queues[:8] for part in _write_totals(row)]
    body += _draw_pools(slots, {pool.name: pool.gpus or 0 for pool in state.pools.list_rows()}, now_s)
    shown_jobs = sum(1 for _, slot in slots if slot.pool)
    if (others := sum((row.waiting or 0) + (row.running or 0) for row in queues) - shown_jobs) > 0:
        body.append(
            f'<p class="soft">The plan has {_count_noun("more job", others, others)}, which no TrainingJob represents: '
            "those of other kinds have their pool in an annotation. They take GPUs that seem free here.</p>"
        )
    placed = sorted(slots, key=lambda item: (not item[1].pool, item[1].position or 0, item[1].pool, item[0].full_name))
    shown, turn = _paginate(placed, query, "queue")
    if shown:
        rows = [("" if slot.pool else "out", _write_slot(job, slot, now_s)) for job, slot in shown]
        table = html_table(_count_noun("planned job", len(slots), len(rows)), _SLOT_TITLES, rows, _SLOT_NUMBERS)
        body += ["<h2>Jobs of the plan</h2>", table, turn]
    for row in queues[:8]:
        if row.refused:
            refused = [("out", [escape(text) for text in texts]) for texts in row.refused]
            body.append("<h2>Not planned as asked</h2>")
            body.append(html_table(f"Of {row.name}", ("job", "problem", "remedy"), refused))
    return _write_frame("Queue", "queue", body, state, now_s)


def _write_totals(row: QueueRow) -> list[str]:
    totals = row.totals or PolicyRow("", None, None, None)
    facts = [
        ("waiting", _format_number(row.waiting)),
        ("running", _format_number(row.running)),
        ("mean completion", format_duration(totals.completion_s)),
        ("last end", format_duration(totals.makespan_s)),
        ("late", _format_number(totals.missed)),
        ("behind the best by at most", "" if row.gap_ratio is None else f"{row.gap_ratio:.1%}"),
        ("planned, UTC", row.planned_at.removesuffix("Z").replace("T", " ")),
        ("minimizes", row.policy),
    ]
    parts = [f'<section class="card"><strong>{escape(row.name)}</strong>{definition_list(facts)}</section>']
    if row.references and row.totals:
        rows = [
            ("best" if policy is row.totals else "", [escape(text) for text in _write_policy(policy)])
            for policy in (row.totals, *row.references)
        ]
        titles = ("policy", "mean completion", "last end", "late")
        parts.append(html_table("Beside what is done without a plan", titles, rows, "mean completion|last end|late"))
    elif not row.totals and row.reason:
        parts.append(f"<p>{escape(row.reason)}</p>")
    return parts


def _write_policy(policy: PolicyRow) -> list[str]:
    ends = (format_duration(policy.completion_s), format_duration(policy.makespan_s))
    summary = REFERENCES[policy.name][0] if policy.name in REFERENCES else policy.name
    return [summary, *ends, _format_number(policy.missed)]


def _draw_pools(slots: Sequence[tuple[JobRow, QueueSlot]], gpus: dict[str, int], now_s: float) -> list[str]:
    """Return a chart for each pool that the plan uses."""
    by_pool: dict[str, list[tuple[Bar, JobRow, QueueSlot]]] = {}
    for color, (job, slot) in enumerate(slots):
        if bar := _make_bar(job, slot, color, now_s):
            by_pool.setdefault(slot.pool, []).append((bar, job, slot))
    if not by_pool:
        return []
    end_s = max(bar.finish_s for items in by_pool.values() for bar, _, _ in items)
    parts = ["<h2>Pools over time</h2>"]
    for index, name in enumerate(sorted(by_pool)[:MOST_CHARTS]):
        ordered = sorted(by_pool[name], key=lambda item: (item[0].start_s, item[0].finish_s, item[0].name))
        bars = [
            replace(bar, tooltip=_describe_bar(bar, job, slot, now_s)) if number < MOST_BARS else bar
            for number, (bar, job, slot) in enumerate(ordered)
        ]
        size = f"{gpus[name]} GPUs; " if gpus.get(name) else ""
        label = f"{name}: {size}{_count_noun('job', len(bars), len(bars))}. A bar is as high as the job has GPUs."
        picture = draw_gantt(str(index), label, gpus.get(name, 0), bars, end_s)
        parts.append(f'<div class="scroll picture" tabindex="0">{picture}</div>')
    if len(by_pool) > MOST_CHARTS:
        parts.append(f'<p class="soft">{len(by_pool) - MOST_CHARTS} more pools are not drawn.</p>')
    return parts


def _make_bar(job: JobRow, slot: QueueSlot, color: int, now_s: float) -> Bar | None:
    """Return the bar of a job from now on, without a tooltip.

    Return None if the plan does not say where, when or on how many GPUs.
    """
    if not slot.pool or not slot.gpus or slot.start_s is None or slot.finish_s is None:
        return None
    start_s, finish_s = max(slot.start_s - now_s, 0.0), max(slot.finish_s - now_s, 1.0)
    lower_s = finish_s if slot.run_lower_s is None else max(slot.start_s + slot.run_lower_s - now_s, 0.0)
    upper_s = finish_s if slot.run_upper_s is None else max(slot.start_s + slot.run_upper_s - now_s, lower_s)
    return Bar(job.name, "", color, slot.gpus, start_s, max(finish_s, start_s + 1.0), lower_s, upper_s)


def _describe_bar(bar: Bar, job: JobRow, slot: QueueSlot, now_s: float) -> str:
    begins = "runs" if slot.position == 0 else f"starts {_format_until(slot.start_s, now_s)}"
    text = f"{job.full_name}: {bar.gpus} GPUs, {begins}, ends in {format_duration(bar.finish_s)}"
    if bar.upper_s > bar.lower_s:
        text += f" ({format_duration(bar.lower_s)} to {format_duration(bar.upper_s)})"
    return text


def _write_slot(job: JobRow, slot: QueueSlot, now_s: float) -> list[str]:
    between = ""
    if slot.earliest_s is not None and slot.latest_s is not None:
        between = f"{_format_until(slot.earliest_s, now_s)} to {_format_until(slot.latest_s, now_s)}"
    place = "runs" if slot.position == 0 else _format_number(slot.position)
    texts = (
        slot.pool or "none", place, _format_number(slot.gpus), "" if place == "runs" else
        _format_until(slot.start_s, now_s), between, _format_until(slot.finish_s, now_s), slot.reason,
    )  # fmt: skip
    return [_write_name(job), *(escape(text) for text in texts)]


def write_single_job(state: ClusterState, query: PageQuery, now_s: float) -> str:
    """Return the page of one TrainingJob. The search text of the query is its `NAMESPACE/NAME`."""
    job = next((job for job in state.jobs.list_rows() if job.full_name == query.search), None)
    if job is None:
        body = ["<p>No TrainingJob has this name now.</p>"]
        return _write_frame("Job", "job", body, state, now_s)
    advised = [
        ("pool", job.pool), ("GPUs", job.gpus), ("plan", job.plan), ("step", job.step), ("90% range", job.range),
        ("1000 steps", job.cost), ("objective", job.objective),
    ]  # fmt: skip
    why = "".join(f"<p>{escape(text)}</p>" for text in (job.reason, job.message) if text)
    body = [f'<section class="card"><strong>Recommended</strong>{definition_list(advised)}{why}</section>']
    if (measured := job.measured) is not None:
        rows = [("" if measured.is_inside else "off", _write_measured(job, measured)[1:])]
        body.append("<h2>Measured</h2>")
        body.append(html_table("The step beside its forecast", _MEASURED_TITLES[1:], rows, _MEASURED_NUMBERS))
    if (slot := job.queue) is not None:
        rows = [("" if slot.pool else "out", _write_slot(job, slot, now_s)[1:])]
        body.append("<h2>In the queue</h2>")
        body.append(html_table("Its place in the plan", _SLOT_TITLES[1:], rows, _SLOT_NUMBERS))
    return _write_frame(f"Job {job.full_name}", "job", body, state, now_s)


def write_play(state: ClusterState, form: Form | None, answer: str, now_s: float) -> str:
    """Return the page with the form of `tilecast web`, by default filled with the cluster's pools."""
    gpus = _write_form_gpus(state.pools.list_rows())
    if form is None:
        form = Form(model=EXAMPLE.model, gpus=gpus or EXAMPLE.gpus, seq=EXAMPLE.seq, batch=EXAMPLE.batch)
    note = "The pools are those of this cluster, with list prices and without its corrections." if gpus else ""
    header = [_write_navigation("play/", "../"), *_write_staleness(state)]
    return write_page(form, answer or (f'<p class="soft">{note}</p>' if note else ""), "".join(header))


def _write_form_gpus(pools: Sequence[PoolRow]) -> str:
    """Return the GPUs of ready pools as text for the form, without pools whose GPU `--gpus` does not know."""
    texts = dict.fromkeys(pool.form_gpus for pool in pools if pool.is_ready and pool.form_gpus and pool.gpus)
    return ",".join(list(texts)[:MOST_FORM_POOLS])


def _write_frame(title: str, path: str, body: Sequence[str], state: ClusterState, now_s: float) -> str:
    heard = [table.heard_s for table in state.tables if table.heard_s is not None]
    left_out = [f"{table.left_out:,} {table.plural}" for table in state.tables if table.left_out]
    parts = [
        _write_navigation(path, ""),
        f"<h1>{escape(title)}</h1>",
        *_write_staleness(state),
        f"<p>{escape(', '.join(left_out))} are not shown: there are too many.</p>" if left_out else "",
        *body,
        f"<footer>Page of {_format_moment(now_s)}; the API server last spoke at {_format_moment(max(heard))}. "
        '<a href="">Read again</a></footer>'
        if heard
        else "",
    ]
    return html_page(f"Tilecast: {title.lower()}", parts, STYLE)


def _write_navigation(current: str, root: str) -> str:
    links = []
    for path, name in _NAVIGATION:
        target = "./" if path == current and path.endswith("/") else f"{root}{path}" if path != "./" else root or "./"
        mark = ' aria-current="page"' if path == current else ""
        links.append(f'<a href="{target}"{mark}>{escape(name)}</a>')
    return f'<nav aria-label="Pages">{"".join(links)}</nav>'


def _write_staleness(state: ClusterState) -> list[str]:
    """Return a warning if the pages are out of date or some objects were not read yet, otherwise an empty list."""
    away = [table for table in state.tables if table.problem]
    if away:
        since = [_format_moment(table.heard_s) for table in away if table.heard_s is not None]
        text = f"{', '.join(table.plural for table in away)}: the API server {away[0].problem}"
        text += f" since {min(since)}. What is shown is of that time." if since else ", and nothing was read before."
        return [f'<div class="card stale" role="alert"><strong>Out of date</strong><p>{escape(text)}</p></div>']
    if not state.is_read:
        return ['<div class="card stale" role="alert"><strong>Not read yet</strong><p>Load the page again.</p></div>']
    return []


def _paginate(items: Sequence[ItemT], query: PageQuery, path: str) -> tuple[Sequence[ItemT], str]:
    """Return the items of one page, and links to the previous and the next page."""
    pages = max(-(-len(items) // ROWS), 1)
    number = min(query.page, pages)
    links = []
    for target, name in ((number - 1, "Previous"), (number + 1, "Next")):
        if 1 <= target <= pages:
            values = {"page": str(target), **({"q": query.search} if query.search else {})}
            links.append(f'<a href="{path}?{escape(urlencode(values, errors="replace"))}">{name}</a>')
    shown = items[(number - 1) * ROWS : number * ROWS]
    is_alone = pages == 1
    return shown, "" if is_alone else f'<p class="turn">{"".join(links)}<span>page {number} of {pages}</span></p>'


def _count_noun(noun: str, count: int, shown: int) -> str:
    text = f"{count:,} {noun}{'' if count == 1 else 's'}"
    return text if shown == count else f"{text}, {shown} of them here"


def _write_name(job: JobRow) -> str:
    target = escape(urlencode({"q": job.full_name}, errors="replace"))
    name = f'<span class="soft">{escape(job.namespace)}/</span>{escape(shorten_text(job.name, 60))}'
    return f'<a href="job?{target}">{name}</a>'


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:+.1%}"


def _format_number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _format_until(time_s: float | None, now_s: float) -> str:
    if time_s is None:
        return ""
    return f"in {format_duration(time_s - now_s)}" if time_s > now_s else "now"


def _format_moment(time_s: float) -> str:
    return format_time(time_s).replace("T", " ").removesuffix("Z") + " UTC"
