"""Format the breakdown of a plan's step time as text: operators, roofline, exchanges and memory."""

from __future__ import annotations

import math
from typing import Any

from tilecast.advice import Offer
from tilecast.api.advice import Explained
from tilecast.explain import Explanation, PricedOperator, StepSums, SyncForecast
from tilecast.render.columns import align_columns
from tilecast.render.units import format_bytes, format_count, format_duration

SHOWN = 12
"""Most operators that are listed. The others are summed in one more line."""

_OPERATORS = ("TIME", "SHARE", "OPERATOR", "KERNEL", "RUNS", "EACH", "FACTOR", "FLOP/B", "BOUND", "REACHES", "TILES")
_EXCHANGES = ("TIME", "WHAT", "COLLECTIVE", "RANKS", "BUFFER", "RUNS", "EACH", "EXPOSED")
_SYNCS = ("ALONE", "STEP", "GRADIENTS SUMMED BY")
_RIGHT = (
    *("ALONE", "STEP", "TIME", "SHARE", "RUNS", "EACH", "FACTOR", "FLOP/B", "REACHES", "RANKS", "BUFFER", "EXPOSED"),
    "BYTES",
)


def explanation_text(offer: Offer, explanation: Explanation) -> str:
    """Return the breakdown of an offer's step time and memory as text, ending in a newline."""
    plan, gpu = offer.plan, explanation.gpu
    peak, bandwidth = gpu.peak(explanation.precision), gpu.memory_bandwidth_bytes_per_s
    lines = [
        f"{offer.pool.name}  {offer.nodes}x{offer.gpus_per_node}  {plan}  {format_duration(offer.step_s)}",
        "",
        f"{format_count(explanation.model_flops)}FLOP a step on {plan.gpus} GPUs of {format_count(peak)}FLOP/s in "
        f"{explanation.precision}: MFU {explanation.mfu:.1%}",
        f"Roofline of {gpu.name}: {format_count(bandwidth)}B/s of memory; "
        f"from {explanation.balance:.0f} FLOP/B on the peak bounds",
        "",
        f"Operators of one micro-batch through every stage, {format_duration(explanation.seconds)} of GPU time, "
        f"{plan.gradient_accumulation:,} a step:",
        *align_columns(_OPERATORS, _operator_rows(explanation), _RIGHT),
        f"TIME = RUNS x EACH (the kernel alone) x FACTOR (in a step): {_list_factors(explanation)}.",
        _format_compute_time(offer, explanation),
        "",
        *_communication_lines(offer, explanation),
        "",
        *_sync_lines(explanation),
        "Memory of the fullest GPU:",
        *align_columns(("BYTES", "SHARE", "WHAT"), _memory_rows(offer), _RIGHT),
    ]
    return "\n".join(lines) + "\n"


def format_kernel_shape(operator: PricedOperator) -> str:
    """Return the kind and the dimensions of a kernel, such as `gemm 8192x12288x4096` or `elementwise 117M of 6 B`."""
    d = operator.dims
    if operator.kind == "gemm":
        text = f"{d['m']:.0f}x{d['n']:.0f}x{d['k']:.0f}"
        text = f"{d['batch']:.0f} of {text}" if d["batch"] > 1 else text
    elif operator.kind == "attention":
        text = f"{d['batch'] * d['heads']:.0f} heads {d['seq_q']:.0f}x{d['seq_kv']:.0f}x{d['head_dim']:.0f}"
    elif operator.kind == "conv":
        sides = [f"{d[side]:.0f}" for side in ("k_d", "k_h", "k_w") if d["k_d"] > 1 or side != "k_d"]
        text = f"{'x'.join(sides)}, {d['c_in']:.0f} to {d['c_out']:.0f} channels of {d['out_h']:.0f}x{d['out_w']:.0f}"
        text += f", batch {d['batch']:.0f}"
    elif operator.kind == "elementwise":
        text = f"{format_count(d['elements'])} of {d['read_bytes'] + d['written_bytes']:g} B"
    else:
        text = "x".join(f"{value:.0f}" for name, value in d.items() if name not in ("backward", "causal"))
    return f"{operator.kind} {text}"


def _operator_rows(explanation: Explanation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in explanation.operators[:SHOWN]:
        name, seconds, share, kernel, runs, each, *reached = operator_cells(one, explanation)
        factor = f"{math.prod(one.corrections.values()):.3g}"
        rows.append((seconds, share, name, kernel, runs, each, factor, *reached))
    rest = explanation.operators[SHOWN:]
    if rest:
        left_s = sum(one.seconds for one in rest)
        rows.append((*_format_time_and_fraction(left_s, explanation), f"{len(rest)} others", *[""] * 8))
    if explanation.copied_s:
        copied = ("weights and gradients", "copied and summed", "", "", "", "", "memory", "", "")
        rows.append((*_format_time_and_fraction(explanation.copied_s, explanation), *copied))
    return rows


def _format_time_and_fraction(seconds: float, explanation: Explanation) -> tuple[str, str]:
    """Return a duration as text, and its percentage of the time of all operators."""
    return format_duration(seconds), f"{seconds / explanation.seconds:.1%}"


def operator_cells(operator: PricedOperator, explanation: Explanation) -> tuple[str, ...]:
    """Return the cells of an operator's row in a table.

    The cells are name, total time, percentage of all operators, kernel, number of runs, time of a run, FLOP per byte,
    limiting resource, utilization of that resource, and tiles.
    """
    tiles = (
        f"{operator.tiles:,} of {operator.tile[0]}x{operator.tile[1]}, {operator.waves:.0f} waves"
        if operator.tiles > 1
        else ""
    )
    what = (
        operator.name,
        *_format_time_and_fraction(operator.seconds, explanation),
        format_kernel_shape(operator),
        f"{operator.runs:,.0f}",
        format_duration(operator.kernel_s),
    )
    return (*what, f"{operator.intensity:.0f}", operator.bound, f"{operator.utilization:.0%}", tiles)


def _list_factors(explanation: Explanation) -> str:
    """Return text that lists each correction constant of the operators with its values, sorted by name."""
    values: dict[str, set[str]] = {}
    for one in explanation.operators:
        for name, value in one.corrections.items():
            values.setdefault(name, set()).add(f"{value:.3g}")
    return ", ".join(f"{name} {' or '.join(sorted(words))}" for name, words in sorted(values.items()))


def _format_compute_time(offer: Offer, explanation: Explanation) -> str:
    """Return a line that derives the compute time of a step from that of a micro-batch."""
    sums, plan = explanation.sums, offer.plan
    stage = f" on the fullest of {plan.pipeline} stages" if plan.pipeline > 1 else ""
    slowed = (
        f" + {format_duration(sums.contended_s)} slowed by gradients" if _is_visible(sums.contended_s, offer) else ""
    )
    passes = f"{plan.gradient_accumulation:,}{_format_straggler_factor(sums, plan.gpus)}"
    text = f"{format_duration(sums.stage_s)}{stage} x {passes}{slowed}"
    return f"Compute of a step: {_add_correction_text(text, sums)} = {format_duration(offer.breakdown['compute'])}."


def _is_visible(seconds: float, offer: Offer) -> bool:
    return seconds > 1e-4 * offer.step_s


def _format_straggler_factor(sums: StepSums, gpus: int) -> str:
    return f" x {sums.waited:.3f} for the slowest of {gpus} GPUs" if sums.waited > 1 else ""


def _add_correction_text(text: str, sums: StepSums) -> str:
    return f"({text}) x {sums.correction:.3f} by runs seen here" if sums.correction != 1 else text


def _communication_lines(offer: Offer, explanation: Explanation) -> list[str]:
    exposed = offer.breakdown["communication"]
    head = f"Communication, {format_duration(exposed)} a step that nothing hides" if exposed else "Nothing is exchanged"
    sums, parts = explanation.sums, []
    if sums.exchanged_s:
        each = f"{format_duration(sums.exchanged_s)} exposed" + (" on a stage" if offer.plan.pipeline > 1 else "")
        parts.append(f"{each} x {offer.plan.gradient_accumulation:,}{_format_straggler_factor(sums, offer.plan.gpus)}")
    if _is_visible(sums.gradients_s, offer):
        parts.append(f"{format_duration(sums.gradients_s)} of gradients and weights")
    if parts:
        head += f" = {_add_correction_text(' + '.join(parts), sums)}"
    rows = [(seconds, what, *rest) for what, seconds, *rest in exchange_rows(explanation)]
    if not rows:
        return [f"{head}."]
    return [f"{head}; per micro-batch, before anything hides:", *align_columns(_EXCHANGES, rows, _RIGHT)]


def exchange_rows(explanation: Explanation) -> list[tuple[str, ...]]:
    """Return the cells of each exchange's row in a table.

    The cells are name, total time, collective, ranks, buffer size, number of runs, time of a run, and the percentage
    that is exposed. Rows of gradients and weights have no times and no percentage, because only their bytes are known.
    """
    rows: list[tuple[str, ...]] = [
        (
            f"{one.name} ({one.group})",
            format_duration(one.seconds),
            one.collective,
            f"{one.ranks}",
            format_bytes(one.size_bytes),
            f"{one.runs:,.0f}",
            format_duration(one.seconds / one.runs),
            f"{one.exposed:.0%}",
        )
        for one in explanation.exchanges
    ]
    ranks = f"{explanation.plan.data * explanation.plan.context}"
    rows += [
        (what, "", name, ranks, format_bytes(sent), runs, "", "")
        for what, name, sent, runs in gradient_exchanges(explanation)
    ]
    return rows


def gradient_exchanges(explanation: Explanation) -> list[tuple[str, str, float, str]]:
    """Return a row for each exchange of gradients or weights between data-parallel ranks.

    A row has a description, the collective, its bytes, and the number of runs. For a single run, the number is left
    empty.
    """
    if not explanation.gradient_bytes:
        return []
    plan = explanation.plan
    each = plan.zero_stage > 2 or (plan.zero_stage > 1 and plan.gradient_accumulation > 1)
    each &= not explanation.sums_whole_gradients
    when = "gradients, each micro-batch" if each else "gradients, once a step"
    if explanation.gathers:
        weights = ("weights, each micro-batch", "all_gather", explanation.gathered_bytes, f"{explanation.gathers}")
        return [(when, "reduce_scatter", explanation.gradient_bytes, ""), weights]
    collective = "all_reduce" if plan.zero_stage == 0 else "reduce_scatter, all_gather"
    return [(when, collective, explanation.gradient_bytes, "")]


def _sync_lines(explanation: Explanation) -> list[str]:
    """Return table lines that compare ways to sum gradients, such as all-reduce. The first line is the job's way."""
    if not explanation.syncs:
        return []
    rows = [
        (format_duration(one.seconds), format_duration(one.step_s), _describe_sync(one)) for one in explanation.syncs
    ]
    return ["Gradients of a step, alone on the wire, and the step with them:", *align_columns(_SYNCS, rows, _RIGHT), ""]


def _describe_sync(sync: SyncForecast) -> str:
    if not sync.servers:
        return "all-reduce"
    return f"{sync.servers} {sync.server_updates} parameter server{'s' * (sync.servers > 1)}"


def _memory_rows(offer: Offer) -> list[tuple[str, ...]]:
    available = offer.memory_available_bytes
    rows = [(format_bytes(value), f"{value / available:.1%}", name) for name, value in offer.memory.items() if value]
    free = available - offer.memory_bytes
    left = "left" if free >= 0 else "too much"
    return [*rows, (format_bytes(abs(free)), f"{abs(free) / available:.1%}", left)]


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation as JSON-compatible data, with the keys of the advice document."""
    return Explained.model_validate(explanation, from_attributes=True).document()
