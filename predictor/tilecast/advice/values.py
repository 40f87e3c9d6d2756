"""Data classes of an advice: the request, the offers, the rejections and the changes that would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tilecast.advice.sharing import SharingAdvice
from tilecast.hardware import Pool
from tilecast.objectives import OBJECTIVES, Objective, ObjectiveRecord
from tilecast.spec import PartialPlan, Plan, Precision, SpecError, Workload

Decision: TypeAlias = Literal["best", "host", "memory", "price", "time", "simplicity"]
"""What decided for a plan: the best forecast, less waiting for the host, memory to spare, price, time or simplicity."""


def require(is_met: object, field: str, problem: str, remedy: str) -> None:
    """Raise SpecError about a field unless a requirement is met."""
    if not is_met:
        raise SpecError(field, problem, remedy)


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits that the user sets on recommended plans. A field that is None sets no limit."""

    gpus: int | None = None
    max_gpus: int | None = None
    max_nodes: int | None = None
    max_tensor: int | None = None
    allowed_pools: tuple[str, ...] = ()
    allow_sharing: bool = False
    """Whether the job may run on a part of a GPU: a MIG slice, or a GPU shared with other jobs."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Pool and plan that the user would use today."""

    pool: str
    gpus: int
    plan: PartialPlan | None = None
    """Plan or part of it; None leaves the plan to the search."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Most that the whole run may cost."""

    amount: float
    currency: str = "USD"


@dataclass(frozen=True, slots=True)
class Request:
    """All inputs of an advice except the pools."""

    name: str
    workload: Workload
    """The job as requested, in its preferred precision and with its own global batch."""
    objective: Objective = "time"
    constraints: Constraints = Constraints()
    baseline: Baseline | None = None
    deadline_s: float | None = None
    budget: Budget | None = None
    batches: tuple[int, int] | None = None
    """Smallest and largest global batch that the job may get; None keeps its own."""
    precisions: tuple[Precision, ...] = ()
    """Every precision that the job may be trained in; empty keeps its own."""
    tokens: int | None = None
    """Tokens of the whole run, if its length is given in tokens."""
    plan: PartialPlan | None = None
    """The only plan to price; None leaves it to the search."""

    @property
    def goal(self) -> ObjectiveRecord:
        """Record of the request's objective: the quantity to minimise and the inputs that it needs."""
        return OBJECTIVES[self.objective]


@dataclass(frozen=True, slots=True)
class Offer:
    """A plan on a pool with its forecast time, cost and memory, in seconds and bytes.

    `breakdown` sums to `step_s`, and `memory` to `memory_bytes`.
    """

    pool: Pool
    nodes: int
    gpus_per_node: int
    plan: Plan
    workload: Workload
    """The job as this offer trains it, with its global batch and precision."""
    step_s: float
    lower_s: float
    upper_s: float
    breakdown: Mapping[str, float]
    memory_bytes: float
    """Bytes that the plan cannot do without on its fullest GPU."""
    memory_lower_bytes: float
    memory_upper_bytes: float
    """Upper end of the range: the bytes that an allocator holds if it never has to release memory."""
    memory_available_bytes: float
    memory: Mapping[str, float]
    tokens_per_s: float
    cost_per_1000_steps: float | None
    finish_s: float | None
    cost_to_finish: float | None
    fits_now: bool | None
    """Whether the pool has as many GPUs free now; None where that is not known."""
    reason: str
    correction: float = 1.0
    """Factor on the step, without the wait for input, that is learned from measured runs."""
    carried: float = 1.0
    """Part of `correction` that comes from the job's own runs."""
    device_requests: tuple[str, ...] = ()
    """Requests of the job's ResourceClaims that the pool's devices meet; empty for a job without claims."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def is_tight(self) -> bool:
        """Whether the upper end of the memory range does not fit."""
        return self.memory_upper_bytes > self.memory_available_bytes

    @property
    def bottleneck(self) -> str:
        """Component with the most time in the breakdown, or the data loader if its given rate limits the step."""
        if self.workload.input_samples_per_s is not None and self.breakdown["input"] > 0:
            return "input"
        return max(self.breakdown, key=lambda part: self.breakdown[part])


@dataclass(frozen=True, slots=True)
class Change:
    """Smallest change of one input that makes a plan fit or win. `what_if.changes.apply_change` applies it."""

    input: str
    """Key of `tilecast.advice.what_if.changes.CHANGES`: the path of the input in the job, or in the pool."""
    value: float | str
    """Value that the input must have, in the unit of the input's field."""
    effect: Literal["fits", "wins"]
    text: str
    """The change as a phrase: `micro-batch 4 -> 1`."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Reason why a pool has no offer.

    `code` is from a fixed list. `remedy` says which change would help.
    """

    pool: str
    code: str
    message: str
    remedy: str
    plan: Plan | None = None
    memory_bytes: float | None = None
    memory_available_bytes: float | None = None
    change: Change | None = None
    """The remedy as a change that was tried and helps; None if none was found."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Reason why a plan is not recommended. The plan is another pool's best, or a neighbour of the recommended plan."""

    subject: str
    """Difference to the recommendation: `pool`, or a dimension of the plan such as `tensor` or `zeroStage`."""
    pool: str
    plan: Plan
    code: str
    """Code of the reason.

    One of the `worse_code` of a quantity (`Slower`, `Dearer`), `MoreGpus`, `OutOfMemory`, `PoolTooSmall`,
    `Constraint`, `DeadlineMissed`, `OverBudget`, `NotNeeded` or `Tie`.
    """
    message: str
    value: float | None
    """The number that decided: the ratio to the recommendation, or the bytes that are too many."""
    change: Change | None


@dataclass(frozen=True, slots=True)
class AdviceOrigin:
    """Versions, digests and sources of the data from which an advice was computed."""

    version: str
    model_version: str
    model_sha256: str
    """Digest of the utilization model's file."""
    constants_sha256: str
    """Digest of the fitted constants."""
    data_sha256: str
    """Digest of the facts that ship: GPUs, links, protocols, instance types."""
    layers: Mapping[str, Mapping[str, str]]
    """Source of each hardware fact, by pool."""
    runs: Mapping[str, int]
    """Number of measured runs that correct the forecasts, by pool; pools without any are absent."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of advising one job. `offers` has the best plan of every pool, with the recommended plan first."""

    request: Request
    offers: tuple[Offer, ...]
    pareto: tuple[Offer, ...]
    """Plans of all pools that no other beats in step time, cost and GPUs at once, fastest first."""
    rejections: tuple[Rejection, ...]
    baseline: Offer | None
    uncapped: Offer | None
    """The best offer without the job's own constraints; None if the job has no constraints."""
    why_not: tuple[WhyNot, ...]
    ties: int
    """Number of other plans that the forecast cannot tell from the best one."""
    tie_ratio: float
    """Value of the recommended plan over the lowest value among the plans that tie with it, at least 1."""
    decision: Decision
    """What decided for the recommended plan, against the best forecast."""
    notes: tuple[str, ...]
    """Further facts for the reader, one sentence each."""
    plans_evaluated: int
    confidence: str
    """Reason for the width of the range, in one sentence."""
    provenance: AdviceOrigin
    inputs_hash: str
    sharing: SharingAdvice | None = None
    """Ways to share a GPU, if the best plan uses a single one and sharing is worthwhile or allowed."""

    @property
    def best(self) -> Offer | None:
        return self.offers[0] if self.offers else None
