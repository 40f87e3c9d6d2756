"""Format the jobs of a scan as a text table, JSON, CSV or HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tilecast.render.columns import align_columns, format_csv
from tilecast.render.page import html_page
from tilecast.render.rows import rows_html
from tilecast.render.units import format_duration

_KEYS: Mapping[str, str] = {
    "namespace": "namespace", "name": "name", "kind": "kind", "outcome": "outcome", "model": "model",
    "batch": "globalBatchSize", "precision": "precision", "pool": "pool", "gpus": "gpus",
    "is_pool_assumed": "poolAssumed", "plan": "plan",
    "step_s": "stepSeconds", "better_pool": "betterPool", "better_gpus": "betterGpus", "better_plan": "betterPlan",
    "better_step_s": "betterStepSeconds", "gpu_hours_saved": "gpuHoursSavedPerDay",
    "money_saved": "moneySavedPerDay", "currency": "currency", "total_gpu_hours_saved": "gpuHoursSaved",
    "total_money_saved": "moneySaved", "confidence": "confidence", "reason": "reason",
    "is_better_tight": "betterMayNotFit",
}  # fmt: skip
"""Keys in JSON and CSV, by the field of a row."""
_DIGITS = 6
_TITLES = (
    "JOB", "TRAINS", "NOW", "PLAN", "STEP", "BETTER", "ITS PLAN", "ITS STEP", "GPU-H/DAY", "MONEY/DAY", "WHOLE RUN",
)  # fmt: skip


def list_scan_documents(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return rows as mappings with the keys of JSON and CSV. Numbers have six significant digits."""
    return [{_KEYS[key]: _round_value(value) for key, value in asdict(row).items()} for row in rows]


def _round_value(value: object) -> object:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def format_scan_json(rows: Sequence[Any], searches: int) -> str:
    """Return rows and totals as JSON."""
    return (
        json.dumps({"jobs": list_scan_documents(rows), "totals": _sum_totals(rows), "searches": searches}, indent=2)
        + "\n"
    )


def format_scan_csv(rows: Sequence[Any]) -> str:
    """Return rows as CSV with a header."""
    items = list_scan_documents(rows)
    return format_csv(
        [list(_KEYS.values()), *(["" if one is None else one for one in item.values()] for item in items)]
    )


def format_scan_table(rows: Sequence[Any]) -> str:
    """Return rows as a text table, followed by a summary and the reasons of jobs that were not read."""
    shown = [row for row in rows if row.outcome != "notRead"]
    cells = [_list_cells(row) for row in shown]
    lines = align_columns(_TITLES, cells, _TITLES[-3:]) if cells else []
    lines += ["", *_list_sentences(rows)]
    lines += [f"  {_format_job_name(row)} ({row.kind}): {row.reason}" for row in rows if row.reason]
    return "\n".join(lines).lstrip("\n") + "\n"


def format_scan_html(rows: Sequence[Any]) -> str:
    """Return an HTML page with a table of the scanned jobs."""
    items = [dict(zip(_TITLES, _list_cells(row), strict=True)) for row in rows if row.outcome != "notRead"]
    notes = [
        *_list_sentences(rows),
        *(f"{_format_job_name(row)} ({row.kind}): {row.reason}" for row in rows if row.reason),
    ]
    table = rows_html(items, "GPU jobs, the largest saving first", notes)
    return html_page("tilecast scan", ["<h1>GPU jobs</h1>", f'<div class="scroll" tabindex="0">{table}</div>'])


def _format_job_name(row: Any) -> str:
    return f"{row.namespace}/{row.name}" if row.namespace else row.name


def _list_cells(row: Any) -> list[str]:
    """Return the cells of a row, in the order of the titles."""
    is_better = bool(row.better_pool)
    word = "good as it is" if row.outcome == "good" else "does not run" if not is_better else ""
    return [
        _format_job_name(row),
        f"{row.model} b{row.batch} {row.precision}",
        f"{row.pool}:{row.gpus}{'?' if row.is_pool_assumed else ''}",
        row.plan,
        "does not run" if row.step_s is None else format_duration(row.step_s),
        f"{row.better_pool}:{row.better_gpus}" if is_better else word,
        f"{row.better_plan}{'!' if row.is_better_tight else ''}",
        format_duration(row.better_step_s) if is_better else "",
        f"{row.gpu_hours_saved:,.1f}" if row.gpu_hours_saved else "",
        "" if row.money_saved is None else f"{row.money_saved:,.0f} {row.currency}",
        "" if row.total_money_saved is None else f"{row.total_money_saved:,.0f} {row.currency}",
    ]


def _sum_totals(rows: Sequence[Any]) -> dict[str, Any]:
    """Return the number of rows by outcome, and the GPU hours and the money that all jobs would save on a day.

    The money is a mapping by currency.
    """
    money = dict[str, float]()
    for row in rows:
        if row.money_saved is not None:
            money[row.currency] = money.get(row.currency, 0.0) + row.money_saved
    outcomes = ("better", "doesNotRun", "good", "notRead")
    return {
        "jobs": len(rows),
        **{name: sum(row.outcome == name for row in rows) for name in outcomes},
        "gpuHoursSavedPerDay": _round_value(sum((row.gpu_hours_saved for row in rows), 0.0)),
        "moneySavedPerDay": {name: _round_value(amount) for name, amount in money.items()},
    }


def _list_sentences(rows: Sequence[Any]) -> list[str]:
    total = _sum_totals(rows)
    money = ", ".join(f"{amount:,.0f} {name}" for name, amount in total["moneySavedPerDay"].items())
    saved = f" They would save {total['gpuHoursSavedPerDay']:,.1f} GPU-hours{f' and {money}' if money else ''} a day."
    counts = f"{total['better']} of {total['jobs']} GPU jobs would be cheaper elsewhere or otherwise split, no slower."
    lines = [counts + (saved if total["better"] else "")]
    if any(row.is_pool_assumed for row in rows):
        lines.append("A job with ? may run on several pools. It is priced on the first one that is large enough.")
    if any(row.is_better_tight for row in rows):
        lines.append(
            "A plan with ! may not fit into memory: `tilecast advise` of the job has one with memory to spare."
        )
    if total["doesNotRun"]:
        lines.append(f"{total['doesNotRun']} do not run as they are, by the forecast of their memory.")
    if total["notRead"]:
        lines.append(f"{total['notRead']} were not read, and are not guessed:")
    return lines
