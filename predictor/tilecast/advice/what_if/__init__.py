"""Ask the pipeline again about what is not so: other pools, plans, batches and limits than the job's own.

`changes` lists the inputs that may change. `fits` finds the smallest change that gives a rejected pool an offer, `wins`
the one that would make another pool or plan the recommended one, and `alternatives` looks at the baseline, at the job
without its constraints, at another batch, other buckets and fewer GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilecast.advice.choose import Choice, Ranking
from tilecast.advice.pricing import Candidates
from tilecast.advice.values import Constraints, Offer, Rejection, Request, WhyNot
from tilecast.advice.what_if.alternatives import best_without_constraints, price_baseline, suggestions
from tilecast.advice.what_if.fits import remedied
from tilecast.advice.what_if.wins import why_not
from tilecast.hardware import Pool


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to the counterfactual questions about one advice."""

    rejections: tuple[Rejection, ...]
    """Rejections of pools with the change that would help, and that of the baseline."""
    baseline: Offer | None
    uncapped: Offer | None
    """The best without the job's own constraints; None if the job has none."""
    why_not: tuple[WhyNot, ...]
    suggestions: tuple[str, ...]
    """Sentences on another batch, other buckets and fewer GPUs, where they would be clearly better."""
    baseline_notes: tuple[str, ...]


def ask(
    request: Request,
    pools: Sequence[Pool],
    candidates: Sequence[Candidates],
    outcomes: Sequence[Choice | Rejection],
    ranking: Ranking,
) -> Answers:
    """Ask every counterfactual question about an advice.

    Args:
        request: the job.
        pools: all pools.
        candidates: the plans of each pool.
        outcomes: what was chosen on each pool, or why nothing was.
        ranking: the choices of all pools.
    """
    rejections = [
        remedied(request, each, outcome, ranking.choices)
        for each, outcome in zip(candidates, outcomes, strict=True)
        if isinstance(outcome, Rejection)
    ]
    verdicts = why_not(request, ranking)
    baseline, refused, notes = price_baseline(request, pools)
    return Answers(
        rejections=(*rejections, *refused),
        baseline=baseline,
        uncapped=best_without_constraints(request, candidates) if request.constraints != Constraints() else None,
        why_not=verdicts,
        suggestions=suggestions(request, ranking.choices[0]) if ranking.choices else (),
        baseline_notes=tuple(notes),
    )
