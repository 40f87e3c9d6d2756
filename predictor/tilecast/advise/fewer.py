"""How few GPUs do almost as well: what the last doublings of a plan's GPUs bring, and what they cost."""

from __future__ import annotations

import math

import numpy as np

from tilecast.advise.choose import Choice
from tilecast.advise.values import Request
from tilecast.cost import per_1000_steps

SEVERAL = 3
"""GPUs are too many where the price of a step rises by so many times the logarithm of what its time falls by: of twice
as many GPUs those that make it less than 1.19 times as fast."""


def fewer_gpus(request: Request, choice: Choice) -> str | None:
    """What the fastest plan for the same batch on half of the recommended GPUs takes, in a sentence, or on half of
    those and so on, as far as each doubling costs several times what it gains; None where the last does not, or where
    not time alone counts."""
    if request.goal.saves_gpus or request.goal.bound:
        return None
    found = choice.found
    same = found.batch == found.batch[choice.row]
    rows = np.flatnonzero(choice.kept & same & (found.gpus <= choice.gpus // 2))
    roomy = rows if choice.is_tight else rows[~found.take(rows).tight]
    chosen, gpus, times = choice.row, found.gpus[roomy], found.step_s[roomy]
    while (near := np.flatnonzero(gpus <= found.gpus[chosen] // 2)).size:
        half = int(roomy[near[np.argmin(times[near])]])
        faster = math.log(found.step_s[half] / found.step_s[chosen])
        dearer = math.log(found.gpus[chosen] / found.gpus[half]) - faster
        if dearer < SEVERAL * max(faster, 0.0):
            break
        chosen = half
    if chosen == choice.row:
        return None

    def told(row: int) -> str:
        seconds = float(found.step_s[row])
        time = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
        if found.pool.price_per_gpu_hour is None:
            return time
        cost = per_1000_steps(float(found.hourly[row]), seconds)
        return f"{time} and {cost:,.3g} {found.pool.currency} per 1000 steps"

    count, faster = int(found.gpus[chosen]), float(found.step_s[chosen] / found.step_s[choice.row])
    few = "Half of the GPUs take" if 2 * count == choice.gpus else f"{count} of the {choice.gpus} GPUs take"
    return (
        f"{few} {told(chosen)} with {found.plans.row(chosen)}, instead of {told(choice.row)}: the rest make a step "
        f"{faster:.2f}x as fast at {choice.gpus / count / faster:.3g}x the price."
    )
