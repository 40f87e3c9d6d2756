"""Data classes of an advice: the request, the offers, the rejections and the changes that would help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tilecast import zoo
from tilecast.advice.sharing import SharingAdvice
from tilecast.hardware import Pool
from tilecast.objectives import OBJECTIVES, Objective, ObjectiveRecord
from tilecast.spec import PartialPlan, Plan, Plans, Precision, SpecError, Workload
from tilecast.zoo.model_flops import count_model_flops

Decision: TypeAlias = Literal["best", "host", "memory", "price", "time", "simplicity"]
"""Rule that decided for a plan: forecast, less waiting for the host, memory to spare, price, time or simplicity."""


def require(is_met: object, field: str, problem: str, remedy: str) -> None:
    """Raise SpecError about a field if a requirement is not met."""
    if not is_met:
        raise SpecError(field, problem, remedy)


def format_ratio(ratio: float) -> str:
    """Return the ratio of an amount to the recommendation's amount as text, such as `1.42x` or `23.2x`."""
    digits = 2 if round(ratio, 2) < 10 else 1 if round(ratio, 1) < 100 else 0
    return f"{ratio:,.{digits}f}x"


def round_up_to_three_digits(seconds: float) -> float:
    """Return seconds rounded up to three significant figures."""
    grain = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return float(f"{math.ceil(seconds / grain - 1e-9) * grain:.6g}")


def format_excess(over_bytes: float) -> str:
    """Return excess bytes as text with at least two significant digits, such as `310 MiB`."""
    unit, name = (2**30, "GiB") if over_bytes >= 2**30 else (2**20, "MiB")
    size = over_bytes / unit
    return f"{size:.1f} {name}" if size < 100 else f"{size:,.0f} {name}"


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
    """Pool and plan that the user runs today."""

    pool: str
    gpus: int
    plan: PartialPlan | None = None
    """Plan or part of it. If None, the search chooses the plan."""
    elsewhere: Pool | None = None
    """The baseline's pool, if the job may not run on it."""

    @property
    def is_planned(self) -> bool:
        """Whether the user states the whole plan, including its micro-batch."""
        return self.plan is not None and self.plan.micro_batch is not None


@dataclass(frozen=True, slots=True)
class Budget:
    """The largest amount of money that the whole run may cost."""

    amount: float
    currency: str = "USD"


LimitsAt: TypeAlias = Literal["forecast", "upperBound"]
"""End of a forecast that must meet the limits on time."""


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
    """Smallest and largest global batch that the job may use. If None, only its own."""
    precisions: tuple[Precision, ...] = ()
    """Precisions that the job may be trained in. If empty, only its own."""
    tokens: int | None = None
    """Tokens of the whole run, if its length is given in tokens."""
    plan: PartialPlan | None = None
    """The only plan to price. If None, search for plans."""
    target_step_s: float | None = None
    """Longest step that a plan may take, in seconds; None sets no limit."""
    limits_at: LimitsAt = "forecast"
    """Time that must meet the target and the deadline: the forecast, or the upper end of its 90 % range."""

    @property
    def is_bounded(self) -> bool:
        """Whether the job has a limit on time or money, which may exclude plans that fit into memory."""
        return bool(self.objective_record.bound) or self.target_step_s is not None

    @property
    def objective_record(self) -> ObjectiveRecord:
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
    """Bytes that the plan needs at least on the GPU that holds most."""
    memory_lower_bytes: float
    memory_upper_bytes: float
    """Upper end of the memory range: the bytes that an allocator holds if it never has to release any."""
    memory_available_bytes: float
    memory: Mapping[str, float]
    tokens_per_s: float
    cost_per_1000_steps: float | None
    finish_s: float | None
    cost_to_finish: float | None
    fits_now: bool | None
    """Whether the pool has as many GPUs free now. None if that is not known."""
    reason: str
    correction: float = 1.0
    """Factor, learned from measured runs, on the step without its wait for input."""
    carried: float = 1.0
    """Part of `correction` that is learned from the job's own runs."""
    device_requests: tuple[str, ...] = ()
    """Requests in the job's ResourceClaims that the pool's devices satisfy. Empty for a job without claims."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def shared_nodes(self) -> str:
        """Sentence that says which GPU groups of the plan must share a node. Empty if each group can have its own node.

        The plan uses `nodes` groups of `gpus_per_node` GPUs. If a pool has fewer nodes, it puts several groups on one
        node.
        """
        pool, part, groups = self.pool, self.gpus_per_node, self.nodes
        if groups <= pool.max_nodes + (pool.spare_gpus >= part):
            return ""
        each = pool.gpus_per_node // part
        whole = min(-(-groups // each), pool.max_nodes)
        rest = max(groups - each * whole, 0)
        used = whole + (rest > 0)
        shared = f"a node of {pool.gpus_per_node} holds {each} of them"
        remedy = "Start each group by a command of its own, or ask for whole nodes."
        return f"The {groups} groups of {part} GPUs run on {used} nodes: {shared}. {remedy}"

    @property
    def tokens_per_s_and_gpu(self) -> float:
        return self.tokens_per_s / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs of the model in a step, divided by the FLOPs of all GPUs at their peak."""
        sharded = zoo.build_sharded_graph(self.workload, Plans.from_plans(self.plan))
        flops = count_model_flops(self.plan, sharded.graph, int(sharded.index[0]))
        return flops / (self.gpus * self.pool.gpu.peak(self.workload.precision) * self.step_s)

    @property
    def is_tight(self) -> bool:
        """Whether the upper end of the memory range exceeds the usable memory."""
        return self.memory_upper_bytes > self.memory_available_bytes

    @property
    def bottleneck(self) -> str:
        """Part of the step that takes most time, or the data loader if its given rate limits the step."""
        if self.workload.input_samples_per_s is not None and self.breakdown["input"] > 0:
            return "input"
        return max(self.breakdown, key=lambda part: self.breakdown[part])


@dataclass(frozen=True, slots=True)
class Change:
    """Smallest change of one input that makes a plan fit or become recommended.

    `what_if.changes.apply_change` applies the change.
    """

    input: str
    """Key of `tilecast.advice.what_if.changes.CHANGES`: the path of the input in the job or in the pool."""
    value: float | str
    """Value that the input must have, in the unit of the input's field."""
    effect: Literal["fits", "wins"]
    text: str
    """The change as a phrase: `micro-batch 4 -> 1`."""
    step_s: float | None = None
    """Seconds of a step of the plan after the change; None if it was not priced."""
    cost_per_1000_steps: float | None = None
    """Price of 1000 such steps; None if it is not known."""
    currency: str = "USD"


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
    """Change that was tried and helps. None if none was found."""
    memory: Mapping[str, float] | None = None
    """Bytes by purpose on the GPU of `plan` that holds most. They sum to `memory_bytes`."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Reason why a plan is not recommended. The plan is another pool's best, or a neighbour of the recommended plan."""

    subject: str
    """How the plan differs from the recommended one: `pool`, or a plan dimension such as `tensor` or `zeroStage`."""
    pool: str
    plan: Plan
    code: str
    """Code of the reason.

    One of the `worse_code` of a quantity (`Slower`, `Dearer`), `MoreGpus`, `OutOfMemory`, `PoolTooSmall`,
    `Constraint`, `DeadlineMissed`, `OverBudget`, `TargetMissed`, `NotNeeded` or `Tie`.
    """
    message: str
    value: float | None
    """The number that decided: the ratio to the recommendation, or the bytes beyond the GPU's memory."""
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
    """Digest of the shipped tables: GPUs, links, protocols and instance types."""
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
    """Plans of all pools that no other plan beats in step time, cost and GPUs at once, fastest first."""
    rejections: tuple[Rejection, ...]
    baseline: Offer | None
    uncapped: Offer | None
    """The best offer without the job's own constraints; None if the job has no constraints."""
    why_not: tuple[WhyNot, ...]
    ties: int
    """Number of other plans that tie with the best one within the forecast's uncertainty."""
    tie_ratio: float
    """Value of the recommended plan over the lowest value among the plans that tie with it, at least 1."""
    decision: Decision
    """Rule that preferred the recommended plan to the best forecast."""
    notes: tuple[str, ...]
    """Further facts for the reader, one sentence each."""
    plans_evaluated: int
    confidence: str
    """Sentence on how wide the range is, and why."""
    provenance: AdviceOrigin
    inputs_hash: str
    alerts: tuple[str, ...] = ()
    """Assumptions that decide the forecast, one sentence each, to be shown before the plans."""
    usual: Offer | None = None
    """Data parallelism or FSDP alone on the recommended pool, as most people would run the job.

    None if that is the recommended plan, if it does not fit, or if the user states the plan.
    """
    safer: Offer | None = None
    """Best plan with memory to spare on the recommended pool, if the recommended plan is tight and one exists."""
    sharing: SharingAdvice | None = None
    """Ways to share a GPU, if the best plan uses a single one and sharing is worthwhile or allowed."""

    @property
    def best(self) -> Offer | None:
        return self.offers[0] if self.offers else None
