"""Find how few GPUs do almost as well: what the last doublings of a plan's GPUs gain, and what they cost."""

from __future__ import annotations

import math

import numpy as np

from tilecast.advice.choose import Choice
from tilecast.advice.values import Request
from tilecast.cost import per_1000_steps

SEVERAL = 3
"""Ratio at which more GPUs are too many: growth of a step's price over shrinkage of its time, both as logarithms.

For a doubling of the GPUs, it is reached where the step becomes less than 1.19 times as fast.
"""


def fewer_gpus(request: Request, choice: Choice) -> str | None:
    """Return a sentence on the fastest plan for the same batch on half of the recommended GPUs.

    Halving goes on as long as each doubling costs at least `SEVERAL` times what it gains. None if the
    doubling to the recommended number does not, or if the objective is not about time alone.
    """
    if request.goal.saves_gpus or request.goal.bound:
        return None
    candidates = choice.candidates
    same = candidates.batch == candidates.batch[choice.row]
    rows = np.flatnonzero(choice.eligible & same & (candidates.gpus <= choice.gpus // 2))
    roomy = rows if choice.is_tight else rows[~candidates.take(rows).tight]
    chosen, gpus, times = choice.row, candidates.gpus[roomy], candidates.step_s[roomy]
    while (near := np.flatnonzero(gpus <= candidates.gpus[chosen] // 2)).size:
        half = int(roomy[near[np.argmin(times[near])]])
        faster = math.log(candidates.step_s[half] / candidates.step_s[chosen])
        dearer = math.log(candidates.gpus[chosen] / candidates.gpus[half]) - faster
        if dearer < SEVERAL * max(faster, 0.0):
            break
        chosen = half
    if chosen == choice.row:
        return None

    def text(row: int) -> str:
        seconds = float(candidates.step_s[row])
        time = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
        if candidates.pool.price_per_gpu_hour is None:
            return time
        cost = per_1000_steps(float(candidates.hourly[row]), seconds)
        return f"{time} and {cost:,.3g} {candidates.pool.currency} per 1000 steps"

    count, faster = int(candidates.gpus[chosen]), float(candidates.step_s[chosen] / candidates.step_s[choice.row])
    few = "Half of the GPUs take" if 2 * count == choice.gpus else f"{count} of the {choice.gpus} GPUs take"
    return (
        f"{few} {text(chosen)} with {candidates.plans.row(chosen)}, instead of {text(choice.row)}: "
        f"the rest make a step {faster:.2f}x as fast at {choice.gpus / count / faster:.3g}x the price."
    )
