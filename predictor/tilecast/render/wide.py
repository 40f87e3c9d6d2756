"""Format advice as a wide text table with step parts, rejected plans, the Pareto set and a legend."""

from __future__ import annotations

from tilecast.advice import Advice, Offer
from tilecast.render.columns import align_columns
from tilecast.render.table import advice_text
from tilecast.render.units import format_bytes, format_count, format_duration, format_gibibyte_range, format_money
from tilecast.step import PARTS

LEGEND = """\
A plan reads dp16 data, tp2 tensor, pp2 pipeline, cp2 context, ep8 expert parallel; zero1, zero2 or fsdp (ZeRO 3) over
the data and context ranks; sp norms split by sequence over the tensor ranks; vp2 virtual stages of each pipeline rank;
mb2 samples per micro-batch; ac-full or ac-sel recomputed activations. In the table > is the recommendation, ~ data
parallelism or FSDP alone, = your baseline, x a pool that cannot run the job."""
"""Explanation of the notation of plans and of the marks in the table."""

_PARTS = tuple(part.upper() for part in PARTS)
_TITLES = ("POOL", "PLAN", "BATCH", "PRECISION", "TOK/S", "SAMPLES/S", *_PARTS, "NODE TYPE", "FREE NOW", "SELECTOR")


def wide_text(advice: Advice) -> str:
    """Return `advice_text` with tables of step parts, reasons against other plans and the Pareto set, and a legend."""
    offers = [*advice.offers, *([advice.baseline] if advice.baseline else [])]
    sections = [advice_text(advice).rstrip()]
    if offers:
        right = ("BATCH", "TOK/S", "SAMPLES/S", *_PARTS)
        sections.append("\n".join(align_columns(_TITLES, [_part_cells(offer) for offer in offers], right)))
    if advice.best is not None:
        memory = [(name, format_bytes(value)) for name, value in advice.best.memory.items() if value]
        ends = format_gibibyte_range(advice.best.memory_lower_bytes, advice.best.memory_upper_bytes)
        text = f"{ends} GiB, of which it cannot do without "
        sections.append("Memory of the recommendation: " + text + ", ".join(f"{name} {one}" for name, one in memory))
    if advice.why_not:
        rows = [
            (item.subject, item.pool, str(item.plan), item.message, item.change.text if item.change else "")
            for item in advice.why_not
        ]
        titles = ("INSTEAD OF", "POOL", "PLAN", "WHY NOT", "WHAT WOULD CHANGE THAT")
        sections.append("\n".join(align_columns(titles, rows)))
    if advice.pareto:
        titles = ("TRADE-OFF", "GPUS", "PLAN", "STEP", "COST/1K STEPS")
        sections.append(
            "\n".join(align_columns(titles, [_pareto_cells(offer) for offer in advice.pareto], titles[1:2]))
        )
    source = advice.provenance
    model = f"model {source.model_version}, {source.model_sha256[:12]}"
    sections.append(f"{advice.plans_evaluated:,} plans priced; {model}; inputs {advice.inputs_hash}")
    return "\n\n".join([*sections, LEGEND]) + "\n"


def _part_cells(offer: Offer) -> tuple[str, ...]:
    times = [format_duration(offer.breakdown[part]) if offer.breakdown[part] else "" for part in PARTS]
    free = {True: "yes", False: "no", None: ""}[offer.fits_now]
    selector = ",".join(f"{key}={value}" for key, value in offer.pool.node_selector.items())
    job = offer.workload
    rate = format_count(offer.tokens_per_s)
    rates = (rate, "") if job.samples_are_tokens else ("", rate)
    head = (offer.pool.name, str(offer.plan), f"{job.global_batch}", job.precision, *rates)
    return (*head, *times, offer.pool.node_type, free, selector)


def _pareto_cells(offer: Offer) -> tuple[str, ...]:
    priced = format_money(offer.cost_per_1000_steps, offer.pool.currency)
    return (offer.pool.name, f"{offer.gpus}", str(offer.plan), format_duration(offer.step_s), priced)
