"""Draw 1,000 advices and count how often a law of advice is broken.

    python bench/advices.py [ADVICES] [SEED]

A draw is one of 9 models, 12 GPUs, 34 GPU counts and 2 objectives. The laws are those of `LAWS`. Advices of one model,
GPU and objective are compared with each other, and lists of pools with their parts.

Plans that the forecast cannot tell apart differ in how long they wait for their host, whose speed is not known. So a
recommendation counts as worse only if it is worse on a usual host and on a slow one
(`tilecast.uncertainty.slow_host_step_s`). What is worse on a usual host alone is counted separately.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from tilecast import uncertainty, zoo
from tilecast.advice import Request
from tilecast.advice.choose import Choice, choose_or_reject, rank_choices
from tilecast.advice.pricing import CandidatePlans, find_candidates
from tilecast.inputs.gpu_list import parse_gpu_list
from tilecast.objectives import Objective
from tilecast.spec import Floats, SpecError, Workload

SEED = 34
MODELS = {
    "gpt2": (1024, 512), "bert-large": (512, 1024), "resnet-50": (1, 2048), "llama-3.2-1b": (4096, 256),
    "llama-3.1-8b": (8192, 512), "gemma-2-9b": (4096, 256), "qwen2.5-14b": (4096, 480), "mixtral-8x7b": (4096, 256),
    "llama-3-70b": (8192, 512),
}  # fmt: skip
"""Sequence length and global batch by model."""
GPUS = (
    *("h100-sxm", "h200", "b200", "gb200", "a100-80", "a100-40"),
    *("h100-pcie", "h20", "l40s", "l4", "a10g", "rtx-4090"),
)
COUNTS = (*range(1, 25), 40, 48, 64, 96, 100, 128, 136, 152, 256)
OBJECTIVES: tuple[Objective, ...] = ("time", "cost")
LAWS = {
    "answered": "every list of GPUs is read",
    "more GPUs, best": "with more GPUs the best forecast in the objective is not worse",
    "more GPUs, recommended": "with more GPUs the recommended plan is at most 2 % worse",
    "equal GPUs": "recommendations that use equally many GPUs of a kind are equal",
    "dearer": "no tied plan with as much memory to spare is more than 1 % cheaper",
    "slower": "no tied plan is more than 2 % better in the objective",
    "cost": "objective cost costs at most 1 % more than objective time, or has more memory to spare",
    "longer list, best": "with more pools the best forecast is not worse",
    "longer list, recommended": "with more pools the recommended plan is at most 2 % worse",
    "ties of others": "whether two plans tie does not depend on what else is offered",
}
USUAL = "on a usual host"
"""Law that counts what is worse on a usual host alone."""
CLOSE = 1 + 1e-9
TIED = 1.01
"""Largest ratio to the best plan at which a plan that the forecast cannot tell from it counts as tied."""


@dataclass(frozen=True, slots=True)
class DrawnAdvice:
    """The recommendation of a draw, with all that the laws need."""

    name: str
    objective: Objective
    count: int
    choice: Choice | None
    slow: float = np.inf
    """Amount of the quantity that the objective minimises, on a slow host."""
    cost: float = np.nan
    upper_bytes: float = np.inf
    broken: tuple[str, ...] = ()
    """Laws that are broken within the pool."""

    @property
    def best(self) -> float:
        return np.inf if self.choice is None else self.choice.best

    @property
    def value(self) -> float:
        return np.inf if self.choice is None else self.choice.value

    def is_behind(self, other: DrawnAdvice, ratio: float) -> bool:
        """Return whether the recommendation is behind another by more than a ratio on a usual and on a slow host."""
        return self.value > other.value * ratio * CLOSE and self.slow > other.slow * ratio * CLOSE


def draw_questions(number: int, seed: int) -> dict[tuple[str, str], list[tuple[int, Objective]]]:
    """Return the drawn counts and objectives by model and GPU."""
    every = [*product(MODELS, GPUS, COUNTS, OBJECTIVES)]
    chosen = [every[place] for place in np.random.default_rng(seed).permutation(len(every))[:number]]
    questions: dict[tuple[str, str], list[tuple[int, Objective]]] = defaultdict(list)
    for model, gpu, count, objective in chosen:
        questions[model, gpu].append((count, objective))
    return questions


def advise_on(model: str, gpu: str, asked: Sequence[tuple[int, Objective]]) -> list[DrawnAdvice]:
    """Return the recommendation for each count and objective."""
    sequence, batch = MODELS[model]
    workload = Workload(zoo.find_preset(model), sequence, batch)
    drawn = []
    for count in sorted({count for count, _ in asked}):
        objectives = [objective for one, objective in asked if one == count]
        candidates: CandidatePlans | None = None
        for objective in objectives:
            request, name = Request("drawn", workload, objective), f"{model} on {gpu}:{count} for {objective}"
            try:
                candidates = candidates or find_candidates(request, parse_gpu_list(f"{gpu}:{count}")[0])
            except SpecError:
                drawn.append(DrawnAdvice(name, objective, count, None, broken=("answered",)))
                continue
            choice = choose_or_reject(request, candidates)
            known = isinstance(choice, Choice)
            drawn.append(
                check_choice(name, request, count, choice) if known else DrawnAdvice(name, objective, count, None)
            )
    return drawn


def check_choice(name: str, request: Request, count: int, choice: Choice) -> DrawnAdvice:
    """Return a recommendation with the laws that it breaks against the other plans of its pool."""
    candidates, row = choice.candidates, choice.row
    value, slow = candidates.objective_value(request), value_on_slow_host(candidates, request)
    cost, upper = candidates.hourly * candidates.step_s / candidates.batch, candidates.upper_bytes
    tied = choice.eligible & (value <= choice.best * TIED)
    broken = []
    slow_cost = cost * slow / value
    dearer = (cost[row] > cost * 1.01 * CLOSE) & (slow_cost[row] > slow_cost * 1.01 * CLOSE)
    if np.any(tied & (upper <= upper[row]) & dearer):
        broken.append("dearer")
    if value[row] > 1.02 * CLOSE * choice.best:
        broken.append(USUAL)
    if np.any(tied & (value[row] > 1.02 * CLOSE * value) & (slow[row] > 1.02 * CLOSE * slow)):
        broken.append("slower")
    return DrawnAdvice(
        name, request.objective, count, choice, float(slow[row]), float(cost[row]), float(upper[row]), tuple(broken)
    )


def value_on_slow_host(candidates: CandidatePlans, request: Request) -> Floats:
    """Return the amount that the objective minimises, (n,), as forecast for a slow host."""
    step_s = candidates.step_s
    return candidates.objective_value(request) * uncertainty.slow_host_step_s(step_s, candidates.launch_s) / step_s


def compare_counts(drawn: Sequence[DrawnAdvice]) -> Iterator[tuple[str, str]]:
    """Yield each broken law, with its case, among advices of one model and GPU."""
    for objective in OBJECTIVES:
        ordered = sorted((one for one in drawn if one.objective == objective), key=lambda one: one.count)
        for few, many in pairwise(ordered):
            if many.best > few.best * CLOSE:
                yield "more GPUs, best", f"{many.name}: {many.best / few.best:.3f} of {few.count}"
            if many.value > few.value * 1.02 * CLOSE and not many.is_behind(few, 1.02):
                yield USUAL, f"{many.name}: {many.value / few.value:.3f} of {few.count}"
            if many.is_behind(few, 1.02):
                yield "more GPUs, recommended", f"{many.name}: {many.value / few.value:.3f} of {few.count}"
        plans: dict[int, tuple[object, str]] = {}
        for one in ordered:
            if one.choice is not None:
                plan = one.choice.candidates.plans.row(one.choice.row)
                before = plans.setdefault(one.choice.gpus, (plan, one.name))
                if before[0] != plan:
                    yield "equal GPUs", f"{one.name}: {plan}, but {before[1]}: {before[0]}"
    times = {one.count: one for one in drawn if one.objective == "time" and one.choice is not None}
    for one in drawn:
        other = times.get(one.count)
        if one.objective == "cost" and one.choice is not None and other is not None:
            is_dearer = one.cost > other.cost * 1.01 * CLOSE
            if is_dearer and other.upper_bytes <= one.upper_bytes:
                yield "cost", f"{one.name}: {one.cost / other.cost:.3f} of objective time"


def compare_lists(model: str, drawn: Sequence[DrawnAdvice], seed: int) -> Iterator[tuple[str, str]]:
    """Yield each broken law, with its case, among lists of one to three pools of one model."""
    sequence, batch = MODELS[model]
    shuffled = np.random.default_rng((seed, list(MODELS).index(model)))
    for objective in OBJECTIVES:
        request = Request("drawn", Workload(zoo.find_preset(model), sequence, batch), objective)
        own = [one for one in drawn if one.objective == objective and one.choice is not None]
        for _ in range(len(own)):
            some = [own[place] for place in shuffled.permutation(len(own))[:6]]
            chosen = list({one.choice.candidates.pool.name: one for one in some if one.choice}.values())[:3]
            if len(chosen) < 2:
                continue
            slow = {id(one.choice): one for one in chosen}
            before: DrawnAdvice | None = None
            ties: dict[frozenset[int], bool] = {}
            for length in range(1, len(chosen) + 1):
                ranking = rank_choices(request, [one.choice for one in chosen[:length] if one.choice])
                first = slow[id(ranking.choices[0])]
                best = min(one.best for one in chosen[:length])
                name = " + ".join(one.name for one in chosen[:length])
                if first.value > 1.02 * CLOSE * best and all(
                    first.is_behind(one, 1.02) for one in chosen[:length] if one.best == best
                ):
                    yield "longer list, best", name
                if before is not None and first.is_behind(before, 1.02):
                    yield "longer list, recommended", f"{name}: {first.value / before.value:.3f}"
                before = first
                for one, tied in zip(ranking.choices[1:], ranking.is_tied[1:], strict=True):
                    pair = frozenset((id(first.choice), id(one)))
                    if ties.setdefault(pair, tied) != tied:
                        yield "ties of others", name


def main(number: int = 1000, seed: int = SEED) -> None:
    """Print the number of broken laws, and each case."""
    start, broken, cases = time.perf_counter(), Counter[str](), list[tuple[str, str]]()
    answered = total = 0
    by_model: dict[str, list[DrawnAdvice]] = defaultdict(list)
    questions = sorted(draw_questions(number, seed).items())
    for (model, gpu), asked in questions:
        drawn = advise_on(model, gpu, asked)
        cases += [(law, one.name) for one in drawn for law in one.broken]
        cases += compare_counts(drawn)
        total += len(drawn)
        answered += sum(one.choice is not None for one in drawn)
        by_model[model] += drawn
        if gpu == [other for (name, other), _ in questions if name == model][-1]:
            cases += compare_lists(model, by_model.pop(model), seed)
    broken.update(law for law, _ in cases)
    for law, case in cases:
        print(f"{law:24s}  {case}")
    print(f"\n{total} advices (seed {seed}), {answered} with a plan, in {time.perf_counter() - start:.0f} s")
    print(f"{broken.pop(USUAL, 0):5d}  more than 2 % worse on a usual host, but not on a slow one (no broken laws)")
    for law, text in LAWS.items():
        print(f"{broken[law]:5d}  {text}")
    print(f"{broken.total():5d}  broken laws")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
