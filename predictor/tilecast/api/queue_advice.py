"""The QueueAdvice resource: totals of the plan for all jobs and, for comparison, totals without such a plan.

The operator writes a single QueueAdvice. The pool and the start of a job are in the job's status.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field

from tilecast.api.base import TIME, StatusModel, list_field, list_map_keyed_by, optional_field
from tilecast.api.status import Condition
from tilecast.planner.totals import QueueTotals

KIND = "QueueAdvice"
MAX_REFUSED = 32


class QueueAdviceSpec(StatusModel):
    """How the queue is planned. Written by the operator, from its settings."""

    policy: Literal["completion", "makespan", "cost", "fairness"] = Field(description="What the plan minimizes.")
    interval_seconds: float = Field(ge=0, le=1e9, description="The least time between two plans.")


class QueueNumbers(StatusModel):
    """Totals of a whole queue under one plan."""

    completion_seconds: float = Field(ge=0, description="Weighted mean of completion times, from creation to end.")
    worst_completion_seconds: float = Field(ge=0, description="Their 99th percentile.")
    makespan_seconds: float = Field(ge=0, description="When the last job ends, from the plan on.")
    cost: float | None = optional_field("Price of what is left; absent where a pool has none.", ge=0)
    fairness: float = Field(
        ge=0, description="The largest completion time over that with an equal share of every pool."
    )
    missed: int = Field(ge=0, description="Jobs that end after they are due.")

    @classmethod
    def from_totals(cls, totals: QueueTotals, **more: Any) -> Self:
        """Return the document for the totals of a plan. `more` has values of fields that a subclass adds."""
        return cls.from_truncated_values(
            completion_seconds=_round_to_four_digits(totals.completion_s),
            worst_completion_seconds=_round_to_four_digits(totals.worst_completion_s),
            makespan_seconds=_round_to_four_digits(totals.makespan_s),
            cost=_round_to_four_digits(totals.cost),
            fairness=_round_to_four_digits(totals.fairness),
            missed=totals.missed,
            **more,
        )


def _round_to_four_digits(value: float | None) -> float | None:
    """Return a number rounded to four significant digits, or None if the number is None or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{max(value, 0.0):.4g}")


class ReferenceNumbers(QueueNumbers):
    """Totals of the queue under a simple policy instead of a plan for all jobs, by the same forecasts."""

    name: str = Field(max_length=32, description="ownBest, earliest, flavors or cheapest.")


class QueueCounts(StatusModel):
    """Numbers of jobs, by how the plan treats them."""

    waiting: int = Field(ge=0, description="Jobs that have not started.")
    running: int = Field(ge=0, description="Jobs that run, which the plan leaves where they are.")
    refused: int = Field(ge=0, description="Jobs that it leaves out.")


class RefusedJob(StatusModel):
    """A job that cannot be planned as asked."""

    job: str = Field(max_length=512, description="Kind, namespace and name.")
    message: str = Field(max_length=512, description="Why.")
    remedy: str = Field(max_length=512, description="What would help.")


class QueueSummary(StatusModel):
    """Flat strings for `kubectl get`."""

    jobs: str | None = optional_field("Jobs that wait and that run.", max_length=64)
    mean: str | None = optional_field("Mean completion time by the plan.", max_length=32)
    own_best: str | None = optional_field(
        "The same with each job on its own best pool, first come first served.", max_length=32
    )
    flavors: str | None = optional_field("The same by Kueue's order of flavors.", max_length=32)
    gap: str | None = optional_field("How far from the best plan it is at most.", max_length=32)
    reason: str | None = optional_field("Reason of the Ready condition.", max_length=64)


class QueueAdviceStatus(StatusModel):
    """The plan in numbers. Written by the operator only."""

    observed_generation: int | None = optional_field("Generation of the spec that was planned.", ge=0)
    conditions: list[Condition] = list_field("Ready.", max_length=8, **list_map_keyed_by("type"))
    planned_at: str | None = optional_field("When the plan was made that these numbers are of.", **TIME)
    policy: str | None = optional_field("What the plan minimizes.", max_length=32)
    jobs: QueueCounts | None = optional_field("Jobs that were planned, and that could not be.")
    totals: QueueNumbers | None = optional_field("What becomes of the queue by the plan.")
    references: list[ReferenceNumbers] = list_field(
        "What would become of it otherwise.", max_length=8, **list_map_keyed_by("name")
    )
    gap_ratio: float | None = optional_field(
        "How far the plan is behind a bound that no plan in Kueue's order can beat, relative to the bound."
    )
    refused: list[RefusedJob] = list_field("Jobs that cannot be planned as asked, and why.", max_length=MAX_REFUSED)
    summary: QueueSummary | None = optional_field("Flat strings for kubectl get.")
