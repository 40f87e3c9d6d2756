"""Format advice as text with one line per pool, the recommended pool first, and reasons against the others."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from tilecast import zoo
from tilecast.advice import Advice, Change, Offer, WhyNot
from tilecast.advice.choose import MAX_TIED, MOST_BEHIND
from tilecast.advice.reasons import BOUND_BY
from tilecast.advice.values import format_ratio
from tilecast.hardware import Pool
from tilecast.objectives import OBJECTIVES
from tilecast.render.columns import align_columns
from tilecast.render.units import (
    GIB,
    format_count,
    format_duration,
    format_gibibyte_range,
    format_gibibytes,
    format_interval,
    format_money,
    format_parameters,
    format_rate,
    format_step_count,
)
from tilecast.step import PARTS

_TITLES = (
    *("", "POOL", "GPUS", "PLAN", "STEP", "90% RANGE", "TOK/S/GPU", "SAMPLES/S/GPU", "MFU", "RUN TIME", "RUN COST"),
    *("COST/1K STEPS", "GiB/GPU", "WHY"),
)
_RIGHT = tuple(title for title in _TITLES if title not in ("", "POOL", "PLAN", "90% RANGE", "WHY"))

_PART_NAMES = {"communication": "exposed communication", "bubble": "pipeline bubble", "launch": "kernel launches"}


WIDTH = 128
"""Width in characters at which sentences are wrapped."""
MAX_WHY_NOT = 6
"""Most lines on why other plans are not recommended. JSON and YAML list all."""


_FIRM = "\N{NO-BREAK SPACE}"
"""Space at which a line is never wrapped."""


def advice_text(advice: Advice) -> str:
    """Return the advice as a text table of pools with notes, ending in a newline."""
    best = advice.best
    names = [offer.pool.name for offer in advice.offers] + [item.pool for item in advice.rejections]
    width = max(map(len, (*names, advice.baseline.pool.name if advice.baseline else "", "POOL")))
    rows = [_offer_cells(">" if offer is best else " ", offer, width) for offer in advice.offers]
    if advice.usual is not None and is_usual_shown(advice, advice.usual):
        rows.append(_offer_cells("~", advice.usual, width))
    if advice.baseline is not None:
        rows.append(_offer_cells("=", advice.baseline, width))
    alerts = [line for alert in advice.alerts for line in wrap_text("! ", alert)]
    lines = [advice_headline(advice), *alerts, "", *(align_columns(_TITLES, rows, _RIGHT) if rows else [])]
    marks = [row[0] for row in rows] + ["x"] * bool(advice.rejections)
    for item in advice.rejections:
        remedy = item.remedy if item.change is None else describe_change(item.change)
        lines += wrap_text(f"x  {item.pool.ljust(width)}  ", f"{item.message}: {remedy}")
    lines += ["", *(_legend_lines(best, marks) if best is not None else [])]
    if best is None:
        lines.append("No pool can run this job as asked. Behind each colon stands the smallest change that would help.")
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
    """Return a text line with the job's name, model, parameters, precision, batch and objective.

    A job that is named as its model has the name once. Samples that are pairs of answers are counted beside the tokens.
    """
    workload = advice.request.workload
    unit = "tokens" if workload.samples_are_tokens else "samples"
    amount = workload.tokens_per_step
    batch = f"{f'{amount:,}' if amount < 100_000 else format_count(amount)} {unit}/step"
    if workload.preference.sequences == 2:
        batch += f" in {workload.global_batch:,} pairs"
    precision = advice.best.workload.precision if advice.best else workload.precision
    size = format_parameters(zoo.count_parameters(replace(workload, lora_rank=0)))
    planned = advice.best.workload if advice.best else workload
    steps = [] if planned.steps is None else [format_step_count(planned.steps)]
    names = dict.fromkeys((advice.request.name, workload.model.name))
    head = (*names, f"{size} parameters", precision, batch, *steps)
    return "  ".join((*head, f"objective: {advice.request.objective}"))


def is_usual_shown(advice: Advice, usual: Offer) -> bool:
    """Return whether the usual plan gets a row of its own: it is on the recommended pool, and no other row shows it."""
    best, base = advice.best, advice.baseline
    if best is None or usual.pool.name != best.pool.name or usual.plan == best.plan:
        return False
    return base is None or (usual.pool.name, usual.plan) != (base.pool.name, base.plan)


def _offer_cells(mark: str, offer: Offer, width: int) -> tuple[str, ...]:
    currency = offer.pool.currency
    each = offer.cost_per_1000_steps if offer.cost_to_finish is None else None
    taken = format_gibibyte_range(offer.memory_lower_bytes, offer.memory_upper_bytes)
    rate, has_tokens = format_rate(offer.tokens_per_s_and_gpu), offer.workload.samples_are_tokens
    # That a step is bound by compute is the rule, and MFU says how well it computes.
    reason = offer.reason.replace(f"; {BOUND_BY['compute']}", "")
    return (
        mark,
        offer.pool.name.ljust(width),
        f"{offer.nodes}x{offer.gpus_per_node}",
        str(offer.plan),
        format_duration(offer.step_s),
        format_interval(offer.lower_s, offer.upper_s),
        rate if has_tokens else "",
        "" if has_tokens else rate,
        f"{offer.mfu:.0%}",
        format_duration(offer.finish_s),
        format_money(offer.cost_to_finish, currency),
        format_money(each, currency),
        f"{taken}/{format_gibibytes(offer.memory_available_bytes)}",
        f"{reason}; not free now" if offer.fits_now is False else reason,
    )


_DECISIONS: dict[str, str] = {
    "best": "this one has the best forecast",
    "host": "this one was chosen because it waits less for the CPUs of its nodes",
    "memory": "this one was chosen because it has memory to spare",
    "price": "this one was chosen because it costs less",
    "time": "this one was chosen because it is faster",
    "simplicity": "this one was chosen because it is simpler to run",
}


def describe_ties(advice: Advice) -> str:
    """Return a sentence on the plans that tie with the recommended one.

    The sentence says how many they are, why this one was chosen, and how far it is behind the best forecast.
    """
    others = f"{advice.ties} other plans are" if advice.ties > 1 else "One other plan is"
    others = f"At least {others}" if advice.ties >= MAX_TIED - 1 else others
    behind = "" if advice.tie_ratio < 1.0005 else f", {advice.tie_ratio - 1:.1%} behind the best forecast"
    return f"{others} as good within the forecast's error; {_DECISIONS[advice.decision]}{behind}."


_MARKS = {
    ">": "recommended",
    "~": "the usual plan",
    "=": "your baseline",
    "x": "cannot run the job",
}
"""Meanings of the marks at the beginning of the table's lines."""


def _legend_lines(best: Offer, marks: Sequence[str]) -> list[str]:
    """Return a line that explains the table's marks and its counts of nodes and GPUs."""
    shown = (f"{mark} {meaning}" for mark, meaning in _MARKS.items() if mark in marks)
    return wrap_text("", "; ".join([*shown, _describe_shape(best), "-o wide explains plans"]))


def _describe_shape(offer: Offer) -> str:
    """Return an explanation of an offer's nodes and GPUs, such as `2x8: 2 nodes with 8 GPUs each`."""
    count, each = offer.nodes, offer.gpus_per_node
    whole = "node" if each == offer.pool.gpus_per_node or count == 1 else "part of a node"
    noun = whole if count == 1 else {"node": "nodes", "part of a node": "parts of nodes"}[whole]
    with_gpus = f"with {each} GPU{'s' * (each > 1)}{' each' * (count > 1)}"
    return f"{count}x{each}: {count} {noun} {with_gpus}"


def _why_not_lines(advice: Advice) -> list[str]:
    """Return text lines on plans that are not recommended, with the reason and a change that would help."""
    telling = [item for item in advice.why_not if item.change is not None or not _is_no_better(item)]
    lines = []
    for item in telling[:MAX_WHY_NOT]:
        what = f"{item.pool}: {item.message}" if item.subject == "pool" else f"{item.plan}: {item.message}"
        change = item.change
        # Back to the recommendation is no change that a reader asks for.
        if change is not None and advice.best is not None and change.value == str(advice.best.plan):
            change = None
        would = "" if change is None else f"; would {_EFFECTS[change.effect]} with {describe_change(change)}"
        lines += wrap_text("  ", what + would)
    return ["Why not", *lines] if lines else []


_EFFECTS = {"wins": "be ahead", "fits": "fit"}


def _is_no_better(why_not: WhyNot) -> bool:
    """Return whether a plan would be no better than the recommendation even without the reason against it."""
    bound = why_not.code in ("PoolTooSmall", "DeadlineMissed", "OverBudget")
    worse = {record.quantity.worse_code for record in OBJECTIVES.values()}
    return why_not.code in ("Tie", *worse) or (bound and (why_not.value or 0.0) >= 1)


def _pareto_lines(advice: Advice) -> list[str]:
    """Return text lines that list the Pareto set in time, cost and GPUs. For fewer than two plans, return none."""
    if len(advice.pareto) < 2:
        return []
    parts, groups = [], list[str]()
    for offer in advice.pareto:
        if offer.nodes > 1 and offer.gpus_per_node not in (1, offer.pool.gpus_per_node) and not groups:
            groups = [f"({offer.nodes}x{offer.gpus_per_node}: {offer.nodes} groups of {offer.gpus_per_node} GPUs)"]
        cost = offer.cost_per_1000_steps
        each = f" {format_money(cost, offer.pool.currency)}/1k steps" if cost is not None else ""
        size = offer.workload.global_batch
        batch = "" if size == advice.offers[0].workload.global_batch else f" batch {size}"
        where = f"{offer.pool.name} {offer.nodes}x{offer.gpus_per_node} {offer.plan}{batch}"
        parts.append(f"{where} {format_duration(offer.step_s)}{each}".replace(" ", _FIRM))
    text = " ".join([" | ".join(parts), *(note.replace(" ", _FIRM) for note in groups)])
    return [line.replace(_FIRM, " ") for line in wrap_text("Trade-offs  ", text)]


def _note_lines(advice: Advice) -> list[str]:
    return [line for note in advice.notes for line in wrap_text("", note)]


def _reason_sentence(advice: Advice, best: Offer) -> str:
    """Return a sentence that says why the recommended pool and plan are best, with the numbers behind the decision."""
    goal = advice.request.objective_record
    is_least = advice.tie_ratio < 1.0005
    least = _LEAST.get(goal.quantity.name, f"uses the least {goal.quantity.measure}")
    least = least if is_least else f"is among the {goal.best} within the forecast's error"
    least = "needs the fewest GPUs" if goal.fewest_gpus else least
    gpus = f"{best.gpus} GPUs" if best.gpus > 1 else "1 GPU"
    where = f"{best.pool.name} with {gpus}"
    others = [offer for offer in advice.offers[1:] if offer.pool.name != best.pool.name]
    if others:
        mine, ratios = _amount_per_sample(advice, best), []
        for offer in others:
            amount = offer.gpus / best.gpus if goal.fewest_gpus else _amount_per_sample(advice, offer) / (mine or 1.0)
            ratios.append((amount, offer.pool.name))
        ratio, name = min(ratios)
        noun = "GPUs" if goal.fewest_gpus else goal.quantity.measure
        least += "" if ratio >= 1 or not is_least else ", within the forecast's error"
        first = f"{where} {least} ({name}, the next pool: {format_ratio(ratio)} the {noun})"
    else:
        alone = "pool that can run the job" if advice.rejections else "pool given"
        first = f"{where} is the only {alone}, and this plan {least} on it"
        if best.gpus < best.pool.max_gpus:
            only, size = f"{best.pool.name} is the only {alone}", best.pool.max_gpus
            idle = "" if goal.saves_gpus else f" ({size - best.gpus} idle)"
            first = f"{only}; on {best.gpus} of its {size} GPUs{idle} this plan {least}"
            first = f"{only}, and this plan {least}, {best.gpus} of {size}" if goal.fewest_gpus else first
    busy = best.breakdown["compute"] / best.step_s
    part = best.bottleneck
    share = f"{best.breakdown[part] / best.step_s:.0%}"
    waits = "" if part == "compute" else f" and {share} on {_PART_NAMES.get(part, part)}"
    room = ", and have memory to spare"
    if best.is_tight:
        needed, most, held = best.memory_bytes / GIB, best.memory_upper_bytes / GIB, best.memory_available_bytes / GIB
        room = f". It may not fit: of {held:.1f} GiB it needs {needed:.1f}, but PyTorch may take {most:.1f} and run out"
    return f"Why: {first}; the GPUs spend {busy:.0%} of a step on compute{waits}{room}."


_LEAST = {"seconds": "takes the least time", "price": "costs the least"}
"""Verb phrase for the pool or plan with the least of a quantity, by the quantity's name."""


def _compare_with_best(advice: Advice, best: Offer, other: Offer) -> str:
    """Return a phrase, with a leading comma, that compares a plan with memory to spare with the recommendation."""
    amount = _amount_per_sample(advice, best)
    if not amount:
        return ""
    ratio = _amount_per_sample(advice, other) / amount
    beyond = f" (memory to spare may cost {MOST_BEHIND - 1:.0%})" if ratio > MOST_BEHIND else ""
    return f", {ratio - 1:+.1%} {advice.request.objective_record.quantity.measure}{beyond}"


def _amount_per_sample(advice: Advice, offer: Offer) -> float:
    """Return how much of the quantity that the objective minimises an offer uses for one sample."""
    return (
        advice.request.objective_record.quantity.amount(offer.pool, offer.gpus, offer.step_s)
        / offer.workload.global_batch
    )


def _baseline_sentence(advice: Advice, best: Offer, base: Offer) -> str:
    """Return a sentence that compares the baseline with the recommendation."""
    if (base.pool.name, base.plan, base.workload) == (best.pool.name, best.plan, best.workload):
        return "Your baseline is what is recommended."
    stated = advice.request.baseline
    who = f"Your baseline on {base.gpus} {base.pool.name}"
    who = who if stated is None or stated.is_planned else f"{who}, if it runs {base.plan},"
    text = f"{who} takes {format_ratio(base.step_s / best.step_s)} the time"
    if base.cost_per_1000_steps and best.cost_per_1000_steps:
        text += f" and {format_ratio(base.cost_per_1000_steps / best.cost_per_1000_steps)} the price"
    return f"{text} of what is recommended, on {best.gpus} {best.pool.name}."


def _footer_lines(advice: Advice, best: Offer) -> list[str]:
    lines = wrap_text("", _reason_sentence(advice, best))
    if advice.baseline is not None:
        lines += wrap_text("", _baseline_sentence(advice, best, advice.baseline))
    if advice.safer is not None and advice.safer.pool.name == best.pool.name:
        safer = advice.safer
        taken = format_gibibyte_range(safer.memory_lower_bytes, safer.memory_upper_bytes)
        lines.append(
            f"With memory to spare: {safer.plan} on {safer.gpus} GPUs, {format_duration(safer.step_s)} a step, "
            f"{taken} of {format_gibibytes(safer.memory_available_bytes)} GiB{_compare_with_best(advice, best, safer)}."
        )
    free = advice.uncapped
    if free is not None and (free.pool.name, free.plan) != (best.pool.name, best.plan):
        lines.append(
            f"Without the job's own limits: {free.pool.name} {free.nodes}x{free.gpus_per_node} {free.plan}, "
            f"{format_duration(free.step_s)}."
        )
    if advice.ties:
        lines += wrap_text("", describe_ties(advice))
    lines += _note_lines(advice)
    parts = [
        f"{_PART_NAMES.get(part, part)} {format_duration(best.breakdown[part])}"
        for part in PARTS
        if best.breakdown[part] >= 0.001 * best.step_s
    ]
    lines.append(f"{format_duration(best.step_s)} = {' + '.join(parts)}")
    lines += [*_why_not_lines(advice), *_pareto_lines(advice)]
    if prices := describe_prices(advice):
        lines += wrap_text("Prices per GPU and hour: ", prices)
    lines.append(f"How sure?  {advice.confidence}")
    return lines


def describe_prices(advice: Advice) -> str:
    """Return text with the price of a GPU in each pool that can run the job, or "" if no pool has a price."""
    pools = (offer.pool for offer in advice.offers)
    return ", ".join(_describe_price(pool) for pool in pools if pool.price_per_gpu_hour is not None)


def _describe_price(pool: Pool) -> str:
    """Return text with the price of a GPU of a pool. A list price is followed by its instance type."""
    text = f"{pool.name} {format_money(pool.price_per_gpu_hour or 0.0, pool.currency)}"
    is_listed = pool.node_type and pool.layers.get("price") in (None, "instance type")
    return f"{text} (list, {pool.node_type})" if is_listed else text


def describe_change(change: Change) -> str:
    """Return a change as text, followed by the step time and price of the changed plan as far as they are known."""
    return describe_priced(change.text, change.step_s, change.cost_per_1000_steps, change.currency)


def describe_priced(text: str, step_s: float | None, cost_per_1000_steps: float | None, currency: str) -> str:
    """Return a text, followed in parentheses by a step time and the price of 1000 steps as far as they are known."""
    parts = [] if step_s is None else [f"{format_duration(step_s)} a step"]
    if cost_per_1000_steps is not None:
        parts.append(f"{format_money(cost_per_1000_steps, currency)}/1k steps")
    return f"{text} ({', '.join(parts)})" if parts else text
