"""The nouns of an advice: what is asked, what is offered, what is refused, and what would change that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tilecast.hardware import Pool
from tilecast.objectives import OBJECTIVES, Objective, ObjectiveRecord
from tilecast.sharing import Sharing
from tilecast.spec import Plan, Precision, Stated, Workload


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits the user puts on the answer; None is no limit."""

    gpus: int | None = None
    max_gpus: int | None = None
    max_nodes: int | None = None
    max_tensor: int | None = None
    allowed_pools: tuple[str, ...] = ()
    allow_sharing: bool = False
    """Whether the job may run on part of a GPU: a slice, or one it shares with others."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the user would run today, priced as a row of its own."""

    pool: str
    gpus: int
    plan: Stated | None = None
    """None leaves the plan to the search."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What the whole run may cost."""

    amount: float
    currency: str = "USD"


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides an advice, except the pools."""

    name: str
    workload: Workload
    """The job as asked, in its preferred precision and with its own global batch."""
    objective: Objective = "time"
    constraints: Constraints = Constraints()
    baseline: Baseline | None = None
    deadline_s: float | None = None
    budget: Budget | None = None
    batches: tuple[int, int] | None = None
    """Smallest and largest global batch that the job may be given; None keeps its own."""
    precisions: tuple[Precision, ...] = ()
    """Every precision that the job may be trained in; empty keeps its own."""
    tokens: int | None = None
    """Tokens of the whole run, where its length is given in tokens."""
    plan: Stated | None = None
    """The only plan to price; None leaves it to the search."""

    @property
    def goal(self) -> ObjectiveRecord:
        """What the objective makes least, and what it needs."""
        return OBJECTIVES[self.objective]


@dataclass(frozen=True, slots=True)
class Offer:
    """One plan on one pool, in full. Seconds, bytes; `breakdown` sums to `step_s` and `memory` to `memory_bytes`."""

    pool: Pool
    nodes: int
    gpus_per_node: int
    plan: Plan
    workload: Workload
    """The job as this offer trains it: with its global batch and precision."""
    step_s: float
    lower_s: float
    upper_s: float
    breakdown: Mapping[str, float]
    memory_bytes: float
    """What the plan cannot do without on its fullest GPU."""
    memory_lower_bytes: float
    memory_upper_bytes: float
    """What an allocator takes that never has to give anything back, by a bill that is too low."""
    memory_available_bytes: float
    memory: Mapping[str, float]
    tokens_per_s: float
    cost_per_1000_steps: float | None
    finish_s: float | None
    cost_to_finish: float | None
    fits_now: bool | None
    """Whether so many GPUs of the pool are free now; None where that is not known."""
    reason: str
    correction: float = 1.0
    """What the step was multiplied by because of measured runs; `step_s` over it is the raw forecast, but for what is
    waited for input."""
    carried: float = 1.0
    """The share of the job's own runs in that."""
    device_requests: tuple[str, ...] = ()
    """Requests of the job's ResourceClaims that the pool's devices meet; empty for a job without claims."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def is_tight(self) -> bool:
        """Whether the upper end of the memory's range does not fit."""
        return self.memory_upper_bytes > self.memory_available_bytes

    @property
    def bottleneck(self) -> str:
        """The largest part of the breakdown; the input where its stated rate bounds the step, for nothing else then
        shortens it."""
        if self.workload.input_samples_per_s is not None and self.breakdown["input"] > 0:
            return "input"
        return max(self.breakdown, key=lambda part: self.breakdown[part])


@dataclass(frozen=True, slots=True)
class Change:
    """The smallest change of one input that would make a plan fit or win; `tilecast.advise.changes` applies it."""

    input: str
    """A key of `tilecast.advise.changes.CHANGES`: the path of the input in the job, or in the pool."""
    value: float | str
    """What it has to be, in that field's unit."""
    effect: Literal["fits", "wins"]
    text: str
    """The same as a phrase: `micro-batch 4 -> 1`."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a pool has no offer. `code` is one of a closed list, `remedy` the nearest change that would help."""

    pool: str
    code: str
    message: str
    remedy: str
    plan: Plan | None = None
    memory_bytes: float | None = None
    memory_available_bytes: float | None = None
    change: Change | None = None
    """The remedy as a value, where one was found and tried."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """A plan that is not the recommendation: the best of another pool, or a neighbour one step away."""

    subject: str
    """What differs: `pool`, or a dimension of the plan (`tensor`, `pipeline`, `zeroStage`, `microBatchSize` …)."""
    pool: str
    plan: Plan
    code: str
    """What binds: `Slower`, `Dearer`, `MoreGpus`, `OutOfMemory`, `PoolTooSmall`, `Constraint`,
    `DeadlineMissed`, `OverBudget` or `Tie`."""
    message: str
    value: float | None
    """The number that decided: the ratio to the recommendation, or the bytes that are too many."""
    change: Change | None


@dataclass(frozen=True, slots=True)
class AdviceOrigin:
    """What an advice rests on."""

    version: str
    model_version: str
    model_sha256: str
    """Of the utilization model's file."""
    constants_sha256: str
    """Of the fitted constants."""
    data_sha256: str
    """Of the facts that ship: GPUs, links, protocols, instance types."""
    layers: Mapping[str, Mapping[str, str]]
    """By pool, where each fact of its hardware comes from."""
    runs: Mapping[str, int]
    """By pool, how many measured runs correct its forecasts; pools without any are absent."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer for one job. `offers` are the best of every pool, best first; `best` is the first of them."""

    request: Request
    offers: tuple[Offer, ...]
    pareto: tuple[Offer, ...]
    """Plans of all pools of which none is beaten in step time, cost and GPUs at once, fastest first."""
    rejections: tuple[Rejection, ...]
    baseline: Offer | None
    uncapped: Offer | None
    """The best without the job's own constraints; None where it has none."""
    why_not: tuple[WhyNot, ...]
    ties: int
    """Plans that the forecast cannot tell from the best."""
    tie_ratio: float
    """How far the recommendation is forecast behind the best of them, being simpler or with memory to spare; 1 is not
    at all."""
    notes: tuple[str, ...]
    """What else a reader must know, a sentence each."""
    plans_evaluated: int
    confidence: str
    """Why the range is as wide as it is, in a sentence."""
    provenance: AdviceOrigin
    inputs_hash: str
    sharing: Sharing | None = None
    """The parts of a GPU that would do, where the best plan uses one and a part is worth while or allowed."""

    @property
    def best(self) -> Offer | None:
        return self.offers[0] if self.offers else None
