"""The first screen: one line per pool, the chosen one first, and why the others are not it."""

from __future__ import annotations

from tilecast.advise import Advice, Offer, Rejection
from tilecast.render.columns import columns
from tilecast.render.units import count, duration, gibibytes, interval, money
from tilecast.step import PARTS

_TITLES = ("", "POOL", "GPUS", "PLAN", "STEP", "(90%)", "FINISH", "COST", "COST/1K", "GiB/GPU", "WHY")
_RIGHT = ("GPUS", "STEP", "FINISH", "COST", "COST/1K", "GiB/GPU")

_PART_NAMES = {"communication": "exposed communication", "bubble": "pipeline bubble"}


def table(advice: Advice) -> str:
    """The advice as a screen of text, ending in a newline."""
    rows = [_offer(">" if offer is advice.best else " ", offer) for offer in advice.offers]
    if advice.baseline is not None:
        rows.append(_offer("=", advice.baseline))
    rows += [_rejection(item) for item in advice.rejections]
    lines = [_headline(advice), "", *columns(_TITLES, rows, _RIGHT), ""]
    best = advice.best
    if best is None:
        lines.append("No pool can run this job. The nearest changes that would help stand in the last column.")
    else:
        lines += _footer(advice, best)
    return "\n".join(lines) + "\n"


def _headline(advice: Advice) -> str:
    workload = advice.request.workload
    unit = "tokens" if workload.samples_are_tokens else "samples"
    batch = f"{count(workload.tokens_per_step)} {unit}/step"
    head = (advice.request.name, workload.model.name, workload.precision, batch)
    return "  ".join((*head, f"objective: {advice.request.objective}"))


def _offer(mark: str, offer: Offer) -> tuple[str, ...]:
    currency = offer.pool.currency
    return (
        mark,
        offer.pool.name,
        f"{offer.nodes}x{offer.gpus_per_node}",
        str(offer.plan),
        duration(offer.step_s),
        interval(offer.lower_s, offer.upper_s),
        duration(offer.finish_s) if offer.finish_s is not None else "",
        money(offer.cost_to_finish, currency) if offer.cost_to_finish is not None else "",
        money(offer.cost_per_1000_steps, currency) if offer.cost_per_1000_steps is not None else "",
        f"{gibibytes(offer.memory_bytes)}/{gibibytes(offer.memory_available_bytes)}",
        offer.reason,
    )


def _rejection(item: Rejection) -> tuple[str, ...]:
    memory = ""
    if item.memory_bytes is not None and item.memory_available_bytes is not None:
        memory = f"{gibibytes(item.memory_bytes)}/{gibibytes(item.memory_available_bytes)}"
    why = f"{item.message}: {item.remedy}"
    return ("x", item.pool, "", str(item.plan) if item.plan else "", "", "", "", "", "", memory, why)


def _footer(advice: Advice, best: Offer) -> list[str]:
    lines = []
    base = advice.baseline
    if base is not None:
        told = f"{base.step_s / best.step_s:.1f}x as fast as your baseline"
        if base.cost_per_1000_steps and best.cost_per_1000_steps:
            change = best.cost_per_1000_steps / base.cost_per_1000_steps - 1
            told += f" at {abs(change):.0%} {'more' if change > 0 else 'less'} cost"
        lines.append(told + ".")
    if advice.uncapped is not None and advice.uncapped.step_s < best.step_s * 0.97:
        free = advice.uncapped
        lines.append(
            f"Without the job's own limits: {free.pool.name} {free.nodes}x{free.gpus_per_node} {free.plan}, "
            f"{duration(free.step_s)}."
        )
    if advice.ties:
        others = f"{advice.ties} other plans tie" if advice.ties > 1 else "One other plan ties"
        behind = "" if advice.tie_ratio < 1.0005 else f", {advice.tie_ratio - 1:.1%} behind the best of them"
        lines.append(f"{others} within the forecast's error; the simplest is shown{behind}.")
    lines += advice.notes
    parts = [
        f"{_PART_NAMES.get(part, part)} {duration(best.breakdown[part])}"
        for part in PARTS
        if best.breakdown[part] >= 0.001 * best.step_s
    ]
    lines.append(f"{duration(best.step_s)} = {' + '.join(parts)}")
    priced = [offer.pool for offer in advice.offers if offer.pool.price_per_gpu_hour is not None]
    if priced:
        prices = (f"{pool.name} {money(pool.price_per_gpu_hour or 0.0, pool.currency)}" for pool in priced)
        lines.append(
            f"Prices per GPU and hour (on-demand list prices unless a GPUPool says otherwise): {', '.join(prices)}"
        )
    lines.append(f"How sure?  {advice.confidence}")
    model = f"model {advice.provenance.model_version}, {advice.provenance.model_sha256[:12]}"
    lines.append(f"{advice.plans_evaluated:,} plans priced; {model}; inputs {advice.inputs_hash}")
    return lines
