"""Suggest a global batch near the job's own that its GPUs share evenly, where that is clearly faster per sample."""

from __future__ import annotations

import math

from tilecast import uncertainty
from tilecast.advice.boards import choose_or_reject
from tilecast.advice.changes import apply
from tilecast.advice.choose import Choice
from tilecast.advice.rank import find_candidates
from tilecast.advice.values import Change, Request
from tilecast.hardware import Pool
from tilecast.search import Limits


def neighbour_batch(request: Request, best: Choice) -> str | None:
    """Return a sentence on the nearest global batch that all GPUs of the recommended pool divide.

    None unless the recommendation with that batch is ahead per sample by more than a tie. None also where the GPUs
    divide the job's own batch already, the job gives a range of batches or states its plan, or the objective is the
    fewest GPUs.
    """
    pool, own = best.candidates.pool, request.workload.global_batch
    most = _most_gpus(request, pool)
    part = most * (request.workload.micro_batch or 1)
    is_settled = request.goal.fewest_gpus or request.batches is not None or request.plan is not None
    if is_settled or not 1 < part <= 2 * own or own % part == 0:
        return None
    nearest = sorted({own // part * part, -(-own // part) * part} - {0}, key=lambda batch: (abs(batch - own), -batch))
    for batch in nearest:
        after, _ = apply(Change("training.globalBatchSize", batch, "wins", ""), request, pool)
        outcome = choose_or_reject(after, find_candidates(after, pool, Limits(gpus=most)))
        if not isinstance(outcome, Choice):
            continue
        ratio = _per_sample(request, outcome, batch) / _per_sample(request, best, own)
        if ratio * math.exp(uncertainty.MOST_TIED) < 1:
            gain = f"cost {ratio:.0%} as much" if request.goal.is_price else f"be {1 / ratio:.2f}x as fast"
            plan = outcome.candidates.plans.row(outcome.row)
            parts = f"{most} GPUs" + (f" at micro-batch {part // most}" if own % most == 0 else "")
            better = f"{batch} would {gain} per sample, with {plan} on {outcome.gpus} GPUs."
            return f"{parts} do not divide global batch {own}: {better}"
    return None


def _most_gpus(request: Request, pool: Pool) -> int:
    """Return the most GPUs of the pool that the job may use, in whole nodes if it uses several."""
    limits = request.constraints
    nodes = min(pool.max_nodes, limits.max_nodes or pool.max_nodes)
    most = min(nodes * pool.gpus_per_node, limits.max_gpus or pool.max_gpus)
    whole = most // pool.gpus_per_node * pool.gpus_per_node or most
    return limits.gpus or whole


def _per_sample(request: Request, choice: Choice, batch: int) -> float:
    """Return the seconds per sample, or the price per sample if the objective minimises a price."""
    seconds = float(choice.candidates.step_s[choice.row]) / batch
    return seconds * float(choice.candidates.hourly[choice.row]) if request.goal.is_price else seconds
