"""The QueueAdvice: what the plan of the whole queue comes to, beside what would become of it without one.

The operator keeps one for all the jobs that it answers. Each job says in its own status where and when it runs.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tilecast.api.base import StatusModel
from tilecast.api.status import Condition

KIND = "QueueAdvice"
MAX_REFUSED = 32


class QueueAdviceSpec(StatusModel):
    """How the queue is planned. Written by the operator, from its settings."""

    policy: Literal["completion", "makespan", "cost", "fairness"] = Field(description="What the plan makes least.")
    interval_seconds: float = Field(ge=0, le=1e9, description="The least time between two plans.")


class QueueNumbers(StatusModel):
    """What becomes of a whole queue."""

    completion_seconds: float = Field(ge=0, description="Weighted mean of completion times, from creation to end.")
    worst_completion_seconds: float = Field(ge=0, description="Their 99th percentile.")
    makespan_seconds: float = Field(ge=0, description="When the last job ends, from the plan on.")
    cost: float | None = Field(default=None, ge=0, description="Price of what is left; absent where a pool has none.")
    fairness: float = Field(
        ge=0, description="The largest completion time over that with an equal share of every pool."
    )
    missed: int = Field(ge=0, description="Jobs that end after they are due.")


class ReferenceNumbers(QueueNumbers):
    """What would become of it without a plan for all jobs, on the same forecasts."""

    name: str = Field(max_length=32, description="ownBest, earliest, flavors or cheapest.")


class QueueCounts(StatusModel):
    """Jobs by what the plan makes of them."""

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

    jobs: str | None = Field(default=None, max_length=64, description="Jobs that wait and that run.")
    mean: str | None = Field(default=None, max_length=32, description="Mean completion time by the plan.")
    own_best: str | None = Field(
        default=None,
        max_length=32,
        description="The same with each job on its own best pool, first come first served.",
    )
    flavors: str | None = Field(default=None, max_length=32, description="The same by Kueue's order of flavors.")
    gap: str | None = Field(default=None, max_length=32, description="How far from the best plan it is at most.")
    reason: str | None = Field(default=None, max_length=64, description="Reason of the Ready condition.")


class QueueAdviceStatus(StatusModel):
    """The plan in numbers. Written by the operator only."""

    observed_generation: int | None = Field(default=None, ge=0, description="Generation of the spec that was planned.")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=8,
        description="Ready.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    planned_at: str | None = Field(
        default=None,
        max_length=32,
        description="When the plan was made that these numbers are of.",
        json_schema_extra={"format": "date-time"},
    )
    policy: str | None = Field(default=None, max_length=32, description="What the plan makes least.")
    jobs: QueueCounts | None = Field(default=None, description="Jobs that were planned, and that could not be.")
    totals: QueueNumbers | None = Field(default=None, description="What becomes of the queue by the plan.")
    references: list[ReferenceNumbers] = Field(
        default_factory=list,
        max_length=8,
        description="What would become of it otherwise.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    gap_ratio: float | None = Field(
        default=None, description="How far the plan is behind a bound that no plan can beat, relative to the bound."
    )
    refused: list[RefusedJob] = Field(
        default_factory=list, max_length=MAX_REFUSED, description="Jobs that cannot be planned as asked, and why."
    )
    summary: QueueSummary | None = Field(default=None, description="Flat strings for kubectl get.")
