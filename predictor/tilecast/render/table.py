"""Format advice as text with one line per pool. The recommended pool is first, and reasons against others follow."""

from __future__ import annotations

import textwrap
from dataclasses import replace

from tilecast import zoo
from tilecast.advice import Advice, Offer, WhyNot
from tilecast.advice.choose import MAX_TIED
from tilecast.objectives import OBJECTIVES
from tilecast.render.columns import align_columns
from tilecast.render.units import (
    format_count,
    format_duration,
    format_gibibyte_range,
    format_gibibytes,
    format_interval,
    format_money,
    format_parameters,
)
from tilecast.step import PARTS

_TITLES = ("", "POOL", "GPUS", "PLAN", "STEP", "(90%)", "FINISH", "COST", "COST/1K", "GiB/GPU", "WHY")
_RIGHT = ("GPUS", "STEP", "FINISH", "COST", "COST/1K", "GiB/GPU")

_PART_NAMES = {"communication": "exposed communication", "bubble": "pipeline bubble"}


WIDTH = 128
"""Width in characters at which sentences are wrapped."""
MAX_WHY_NOT = 6
"""Most lines on why other plans are not recommended. JSON and YAML list all reasons."""


_FIRM = "\N{NO-BREAK SPACE}"
"""Space at which a line is not wrapped."""


def advice_text(advice: Advice) -> str:
    """Return the advice as a text table of pools with notes, ending in a newline."""
    best = advice.best
    names = [offer.pool.name for offer in advice.offers] + [item.pool for item in advice.rejections]
    width = max(map(len, (*names, advice.baseline.pool.name if advice.baseline else "", "POOL")))
    rows = [_offer_cells(">" if offer is best else " ", offer, width) for offer in advice.offers]
    if advice.baseline is not None:
        rows.append(_offer_cells("=", advice.baseline, width))
    lines = [advice_headline(advice), "", *(align_columns(_TITLES, rows, _RIGHT) if rows else [])]
    for item in advice.rejections:
        lines += wrap_text(f"x  {item.pool.ljust(width)}  ", f"{item.message}: {item.remedy}")
    lines.append("")
    if best is None:
        lines.append(
            "No pool can run this job. The nearest change that would help each of them stands behind the colon."
        )
        return "\n".join([*lines, *_note_lines(advice)]) + "\n"
    return "\n".join([*lines, *_footer_lines(advice, best)]) + "\n"


def wrap_text(head: str, text: str) -> list[str]:
    """Return wrapped lines of a text. The first line begins with `head`, and later lines are indented by its width."""
    indent = " " * len(head)
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


def advice_headline(advice: Advice) -> str:
    """Return a text line with the job's name, model, parameters, precision, batch and objective."""
    workload = advice.request.workload
    unit = "tokens" if workload.samples_are_tokens else "samples"
    batch = f"{format_count(workload.tokens_per_step)} {unit}/step"
    precision = advice.best.workload.precision if advice.best else workload.precision
    size = format_parameters(zoo.count_parameters(replace(workload, lora_rank=0)))
    head = (advice.request.name, workload.model.name, f"{size} parameters", precision, batch)
    return "  ".join((*head, f"objective: {advice.request.objective}"))


def _offer_cells(mark: str, offer: Offer, width: int) -> tuple[str, ...]:
    currency = offer.pool.currency
    each = offer.cost_per_1000_steps if offer.cost_to_finish is None else None
    taken = format_gibibyte_range(offer.memory_lower_bytes, offer.memory_upper_bytes)
    return (
        mark,
        offer.pool.name.ljust(width),
        f"{offer.nodes}x{offer.gpus_per_node}",
        str(offer.plan),
        format_duration(offer.step_s),
        format_interval(offer.lower_s, offer.upper_s),
        format_duration(offer.finish_s),
        format_money(offer.cost_to_finish, currency),
        format_money(each, currency),
        f"{taken}/{format_gibibytes(offer.memory_available_bytes)}",
        f"{offer.reason}; not free now" if offer.fits_now is False else offer.reason,
    )


_DECISIONS: dict[str, str] = {
    "best": "of these the best forecast is shown",
    "host": "of these the one that waits least for its host is shown",
    "memory": "of these one with memory to spare is shown",
    "price": "of these the cheapest is shown",
    "time": "of these the fastest is shown",
    "simplicity": "of these the simplest is shown",
}


def describe_decision(advice: Advice) -> str:
    """Return a phrase that says what decided among plans that tie, and how far the plan is behind the best of them."""
    behind = "" if advice.tie_ratio < 1.0005 else f", {advice.tie_ratio - 1:.1%} behind the best forecast"
    return f"{_DECISIONS[advice.decision]}{behind}"


def _why_not_lines(advice: Advice) -> list[str]:
    """Return text lines on plans that are not recommended, with the obstacle and a change that would help."""
    telling = [item for item in advice.why_not if item.change is not None or not _is_no_better(item)]
    lines = []
    for item in telling[:MAX_WHY_NOT]:
        what = f"{item.pool}: {item.message}" if item.subject == "pool" else f"{item.plan}: {item.message}"
        change = item.change
        would = "" if change is None else f"; would {'win' if change.effect == 'wins' else 'fit'}: {change.text}"
        lines += wrap_text("  ", what + would)
    return ["Why not", *lines] if lines else []


def _is_no_better(why_not: WhyNot) -> bool:
    """Return whether a plan would not beat the recommendation even without its obstacle."""
    bound = why_not.code in ("PoolTooSmall", "DeadlineMissed", "OverBudget")
    worse = {record.quantity.worse_code for record in OBJECTIVES.values()}
    return why_not.code in ("Tie", *worse) or (bound and (why_not.value or 0.0) >= 1)


def _pareto_lines(advice: Advice) -> list[str]:
    """Return text lines that list the Pareto set in time, cost and GPUs. For fewer than two plans, return none."""
    if len(advice.pareto) < 2:
        return []
    parts = []
    for offer in advice.pareto:
        cost = offer.cost_per_1000_steps
        each = f" {format_money(cost, offer.pool.currency)}/1k" if cost is not None else ""
        size = offer.workload.global_batch
        batch = "" if size == advice.offers[0].workload.global_batch else f" batch {size}"
        where = f"{offer.pool.name} {offer.nodes}x{offer.gpus_per_node} {offer.plan}{batch}"
        parts.append(f"{where} {format_duration(offer.step_s)}{each}".replace(" ", _FIRM))
    return [line.replace(_FIRM, " ") for line in wrap_text("Trade-offs  ", " | ".join(parts))]


def _note_lines(advice: Advice) -> list[str]:
    return [line for note in advice.notes for line in wrap_text("", note)]


def _footer_lines(advice: Advice, best: Offer) -> list[str]:
    lines = []
    base = advice.baseline
    if base is not None:
        ratio = base.step_s / best.step_s
        text = f"{ratio:.1f}x as fast as your baseline" if ratio >= 1 else f"{1 / ratio:.1f}x slower than your baseline"
        if (base.pool.name, base.plan, base.workload) == (best.pool.name, best.plan, best.workload):
            text = "Your baseline is what is recommended"
        elif base.cost_per_1000_steps and best.cost_per_1000_steps:
            change = best.cost_per_1000_steps / base.cost_per_1000_steps - 1
            text += f" at {abs(change):.0%} {'more' if change > 0 else 'less'} cost"
        lines.append(text + ".")
    free = advice.uncapped
    if free is not None and (free.pool.name, free.plan) != (best.pool.name, best.plan):
        lines.append(
            f"Without the job's own limits: {free.pool.name} {free.nodes}x{free.gpus_per_node} {free.plan}, "
            f"{format_duration(free.step_s)}."
        )
    if advice.ties:
        others = f"{advice.ties} other plans tie" if advice.ties > 1 else "One other plan ties"
        others = f"At least {others}" if advice.ties >= MAX_TIED - 1 else others
        lines.append(f"{others} within the forecast's error; {describe_decision(advice)}.")
    lines += _note_lines(advice)
    parts = [
        f"{_PART_NAMES.get(part, part)} {format_duration(best.breakdown[part])}"
        for part in PARTS
        if best.breakdown[part] >= 0.001 * best.step_s
    ]
    lines.append(f"{format_duration(best.step_s)} = {' + '.join(parts)}")
    lines += [*_why_not_lines(advice), *_pareto_lines(advice)]
    priced = [offer.pool for offer in advice.offers if offer.pool.price_per_gpu_hour is not None]
    if priced:
        prices = (f"{pool.name} {format_money(pool.price_per_gpu_hour or 0.0, pool.currency)}" for pool in priced)
        lines += wrap_text("Prices per GPU and hour (list prices unless a GPUPool says otherwise): ", ", ".join(prices))
    lines.append(f"How sure?  {advice.confidence}")
    model = f"model {advice.provenance.model_version}, {advice.provenance.model_sha256[:12]}"
    lines.append(f"{advice.plans_evaluated:,} plans priced; {model}; inputs {advice.inputs_hash}")
    return lines
