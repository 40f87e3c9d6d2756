"""Write the texts of an advice: the reason of each offer, notes on the job, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tilecast import memory, zoo
from tilecast.advice.choose import Choice, Ranking
from tilecast.advice.pricing import CandidatePlans, DetailedForecasts
from tilecast.advice.sharing import SharingAdvice, find_sharing_options
from tilecast.advice.values import Offer, Request, format_ratio
from tilecast.hardware.boards import GIB
from tilecast.search import Mask
from tilecast.spec import Floats, Plans


def explain_choices(request: Request, ranking: Ranking) -> tuple[Offer, ...]:
    """Return the offers of the ranked choices, each with the reason for its place in the ranking."""
    return tuple(_explain_choice(request, place, ranking) for place in range(len(ranking.choices)))


def describe_offers(request: Request, offers: Sequence[Offer]) -> tuple[str, ...]:
    """Return notes on the job's model and data loader, and on inputs that the recommendation changes or ignores."""
    return (
        *request.workload.model.notes,
        *_describe_changed_inputs(request, offers),
        *_describe_unused_schedule(request, offers),
        *_describe_input_pipeline(offers),
        *_describe_host_memory(offers),
    )


def _explain_choice(request: Request, place: int, ranking: Ranking) -> Offer:
    """Return the offer of the choice at index `place` of the ranking, with the reason for its rank."""
    choices = ranking.choices
    best, choice = choices[0], choices[place]
    offer = choice.offer()
    bound = BOUND_BY[offer.bottleneck]
    if offer.is_tight:
        most, held = (round(size / GIB) for size in (offer.memory_upper_bytes, offer.memory_available_bytes))
        # Rounding must not say that what may not fit does.
        bound += f"; may not fit ({max(most, held + 1)} of {held} GiB)"
    if request.deadline_s is not None and (offer.finish_s or 0.0) * offer.upper_s / offer.step_s > request.deadline_s:
        bound += f"; {'misses' if (offer.finish_s or 0.0) > request.deadline_s else 'may miss'} the deadline"
    if request.target_step_s is not None and offer.upper_s > request.target_step_s:
        bound += "; may miss the target"
    goal = request.objective_record
    if goal.quantity.amount_format:
        amount = goal.quantity.amount(offer.pool, offer.gpus, offer.step_s)
        bound += f"; {goal.quantity.amount_format.format(1000 * amount)} per 1000 steps"
    if choice is best:
        is_least = goal.fewest_gpus or best.value <= min(item.best for item in choices)
        standing = goal.best if is_least else f"among the {goal.best}"
    elif goal.fewest_gpus and choice.gpus > best.gpus:
        standing = f"{choice.gpus / best.gpus:.3g}x the GPUs"
    elif best.value <= 0:
        standing = "costs more than nothing"
    elif ranking.is_tied[place]:
        more = " with more GPUs" if choice.gpus > best.gpus else ""
        standing = f"a tie, {choice.value / best.value:.2f}x the {goal.quantity.measure}{more}"
    else:
        standing = f"{format_ratio(choice.value / best.value)} the {goal.quantity.measure}"
    return replace(offer, reason=f"{standing}; {bound}")


BOUND_BY: Mapping[str, str] = {
    "compute": "compute-bound",
    "communication": "bound by communication",
    "bubble": "bound by the pipeline's bubble",
    "optimizer": "bound by the optimizer's memory traffic",
    "launch": "bound by kernel launches",
    "input": "bound by its input",
}
"""Texts on the bottleneck of a step, by the part of the step that is the bottleneck."""


def explain_pareto(request: Request, choices: Sequence[Choice]) -> tuple[Offer, ...]:
    """Return the offers of the Pareto front of all choices, fastest first."""
    front = _select_pareto_front(request, [(choice.candidates, choice.eligible) for choice in choices])
    offers: dict[tuple[str, int], Offer] = {}
    for choice in choices:
        rows = np.array([row for candidates, row in front if candidates is choice.candidates], dtype=np.int64)
        if len(rows):
            details = DetailedForecasts.from_rows(choice.candidates, rows)
            offers |= {(choice.candidates.pool.name, int(row)): details.offer(place) for place, row in enumerate(rows)}
    found_offers = (offers[candidates.pool.name, row] for candidates, row in front)
    return tuple(replace(offer, reason=BOUND_BY[offer.bottleneck]) for offer in found_offers)


MAX_PARETO = 8


def _select_pareto_front(
    request: Request, searched: Sequence[tuple[CandidatePlans, Mask]]
) -> list[tuple[CandidatePlans, int]]:
    """Return at most `MAX_PARETO` plans that no other plan beats in time, cost and GPUs at once, fastest first.

    A pool without a price is compared by time and GPUs alone. If prices are in several currencies, all pools are
    compared in this way.

    Args:
        request: the job.
        searched: the plans of each pool, and a mask of the eligible ones.

    Returns:
        The plans of the front, each as the candidates of its pool and a row of these candidates.
    """
    currencies = {
        candidates.pool.currency for candidates, _ in searched if candidates.pool.price_per_gpu_hour is not None
    }
    chosen: list[tuple[CandidatePlans, int]] = []
    points: list[tuple[float, float, float]] = []
    for each, mask in searched:
        # On one pool the cost is time times GPUs, so only the fastest plan of each GPU count can be on the front.
        rows = np.flatnonzero(mask)
        gpus, own = each.gpus[rows], each.step_s[rows] * request.workload.global_batch / each.batch[rows]
        least = np.full(int(gpus.max(initial=0)) + 1, np.inf)
        np.minimum.at(least, gpus, own)
        fastest = np.flatnonzero(own == least[gpus])
        for place in fastest[np.unique(gpus[fastest], return_index=True)[1]]:
            row, seconds = int(rows[place]), float(own[place])
            price = each.pool.price_per_gpu_hour if len(currencies) == 1 else None
            chosen.append((each, row))
            points.append(
                (seconds, np.inf if price is None else float(gpus[place]) * price * seconds, float(gpus[place]))
            )
    if not points:
        return []
    axes = np.array(points)
    less = np.all(axes[:, None] <= axes[None], axis=2) & np.any(axes[:, None] < axes[None], axis=2)
    same = np.all(axes[:, None] == axes[None], axis=2) & np.tri(len(axes), k=-1, dtype=bool).T
    front = np.flatnonzero(~(less | same).any(axis=0))
    kept_rows = _select_evenly_spread_rows(axes[front])
    return sorted((chosen[front[index]] for index in kept_rows), key=lambda item: _pareto_sort_key(*item))


def _pareto_sort_key(candidates: CandidatePlans, row: int) -> tuple[float, str]:
    """Return the key by which the front is sorted: a plan's seconds per sample, and the name of its pool."""
    return float(candidates.step_s[row] / candidates.batch[row]), candidates.pool.name


def _select_evenly_spread_rows(axes: Floats) -> list[int]:
    """Return the indices of at most `MAX_PARETO` rows that cover a whole Pareto front of n rows.

    The rows with the least time, cost and GPUs are chosen first. Then the row that differs most from all chosen rows is
    added, again and again, until no row differs by `LEAST_DISTANCE`.

    Args:
        axes: seconds, cost and GPUs of each row, (n, 3).
    """
    finite = np.where(np.isfinite(axes), np.maximum(axes, 1e-12), np.nan)
    logs = np.log(finite)
    spans = np.nan_to_num(logs - np.nanmin(logs, axis=0, initial=np.inf, where=~np.isnan(logs)), nan=0.0)
    shown = list(dict.fromkeys(int(np.argmin(column)) for column in axes.T))
    while len(shown) < min(MAX_PARETO, len(axes)):
        distance = np.abs(spans[:, None] - spans[shown]).max(axis=2).min(axis=1)
        farthest = int(np.argmax(distance))
        if distance[farthest] <= LEAST_DISTANCE:
            break
        shown.append(farthest)
    return shown


LEAST_DISTANCE = float(np.log(1.05))
"""Least distance of two plans that the front shows, as the logarithm of a ratio."""


def _describe_changed_inputs(request: Request, offers: Sequence[Offer]) -> list[str]:
    """Return a note for each input that the recommendation changes: the global batch or the precision."""
    if not offers:
        return []
    own, best = request.workload, offers[0].workload
    notes = []
    if best.global_batch != own.global_batch:
        steps = f", {best.steps:,} steps" if best.steps is not None else ""
        notes.append(
            f"Global batch {best.global_batch} instead of {own.global_batch}, as the job's range allows{steps}; "
            "batches are compared by the sample."
        )
    if best.precision != own.precision:
        notes.append(f"Precision {best.precision} instead of {own.precision}, as the job allows.")
    return notes


def _describe_unused_schedule(request: Request, offers: Sequence[Offer]) -> list[str]:
    """Return a note that the job's pipeline schedule is unused, if the recommended plan has no pipeline."""
    schedule = request.workload.pipeline_schedule
    if schedule is None or not offers or offers[0].plan.pipeline > 1:
        return []
    return [f"Pipeline schedule {schedule} changes nothing: {offers[0].plan} has no pipeline."]


NEAR = 0.8
"""Share of the data loader's rate that a step must use for a note to mention it."""


def _describe_input_pipeline(offers: Sequence[Offer]) -> list[str]:
    """Return the samples per second that each node's data loader has to deliver, as a list with at most one note.

    If the user gives the loader's rate, the note appears only if the loader limits the step or nearly does. Otherwise
    it appears only for a model that reads images.
    """
    if not offers:
        return []
    best = offers[0]
    stated, samples = best.workload.input_samples_per_s, best.workload.global_batch / best.nodes
    if stated is None:
        if not zoo.reads_images(best.workload.model):
            return []
        rate = f"{_format_rate(samples / best.step_s)} images/s"
        return [f"The input pipeline of each node has to deliver {rate}; state it as training.inputSamplesPerSecond."]
    without = samples / (best.step_s - best.breakdown["input"])
    if without > stated:
        text = f"each node could take {_format_rate(without)} samples/s and gets {_format_rate(stated)}"
        return [f"The input pipeline bounds the step: {text}."]
    text = (
        f"{without / stated:.0%} of the {_format_rate(stated)} samples/s that the input pipeline of each node delivers"
    )
    return [f"The step takes {text}."] if without > NEAR * stated else []


def _describe_host_memory(offers: Sequence[Offer]) -> list[str]:
    """Return a note, in a list, on the host memory that offloaded activations take. Without any, the list is empty."""
    if not offers or not offers[0].workload.offloaded_activations:
        return []
    best = offers[0]
    plans = Plans.from_plans(best.plan)
    sharded = zoo.build_sharded_graph(best.workload, plans)
    each = float(memory.host_activation_bytes(best.workload, sharded, plans)[0])
    text = f"{each / GIB:.1f} GiB a GPU, {each * best.gpus_per_node / GIB:.0f} GiB a node"
    return [f"Offloaded activations take at most {text}, in page-locked memory of the host."]


def _format_rate(per_s: float) -> str:
    """Return a rate with three significant figures."""
    return f"{float(f'{per_s:.3g}'):,g}"


def find_sharing(request: Request, offers: Sequence[Offer]) -> SharingAdvice | None:
    """Return the ways to share the GPU of a recommended plan that trains on one GPU. For other plans, return None.

    If no way is worthwhile and the job does not allow sharing, return None too.
    """
    if not offers or offers[0].gpus > 1 or not offers[0].workload.training:
        return None
    sharing = find_sharing_options(offers[0].workload, offers[0].pool, request.objective)
    return sharing if sharing and (sharing.best or request.constraints.allow_sharing) else None


_SHARED: Mapping[str, str] = {"mig": "a MIG slice", "mps": "a GPU shared by MPS", "timeSlicing": "a time-sliced GPU"}


def describe_sharing(request: Request, shared: SharingAdvice | None) -> list[str]:
    """Return a sentence, in a list, on the best way to share a GPU. If no way is worthwhile, the list is empty."""
    if shared is None or shared.best is None:
        return []
    best = shared.best
    where = f"{_SHARED[best.kind]} {best.profile}".rstrip()
    note = (
        f"The job does not fill a GPU: {where} of {shared.pool.name} ({best.resource}; {best.jobs} such jobs per GPU) "
        f"takes {best.slowdown:.2f}x the time, {best.lower_s * 1e3:.3g}-{best.upper_s * 1e3:.3g} ms a step, at "
        f"{best.relative_cost:.2f}x the price"
    )
    return [note + ("." if request.constraints.allow_sharing else "; constraints.allowSharing lets it.")]


def describe_confidence(offers: Sequence[Offer]) -> str:
    """Return text that says how wide the recommendation's range is, and how many measured runs support it."""
    if not offers:
        return "nothing to be sure of"
    best = offers[0]
    low, high = best.lower_s / best.step_s - 1, best.upper_s / best.step_s - 1
    seen = best.pool.calibration.find_workload_correction(best.pool.gpu.name, best.workload, best.gpus)
    own = f", {seen.own} like this one" if seen.own else ""
    return (
        f"{seen.runs} runs seen on this cluster{own}: of 10 measured steps 9 should take between {-low:.0%} less "
        f"and {high:.0%} more time than the forecast"
    )
