"""The status of a TrainingJob: the advice, what became of it, and how far it was off."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from tilecast.api.base import StatusModel, Toleration, plan_field
from tilecast.spec import Checkpointing, Precision


class Condition(StatusModel):
    """One aspect of the state, as Kubernetes writes it."""

    type: str = Field(max_length=64, description="What the condition is about.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int = Field(ge=0, description="Generation of the spec that was looked at.")
    last_transition_time: str = Field(
        max_length=32,
        description="When status last changed.",
        json_schema_extra={"format": "date-time"},
    )
    reason: str = Field(min_length=1, max_length=64, description="Why, in one stable CamelCase word.")
    message: str = Field(max_length=1024, description="Why and what to do about it, in a sentence.")

    @classmethod
    def known(cls, value: object) -> list[Condition]:
        """The conditions of a status, as far as they are some."""
        known = []
        for item in value if isinstance(value, list) else []:
            try:
                known.append(cls.model_validate(item))
            except ValidationError:
                continue
        return known


class Parallelism(StatusModel):
    """How the job is split, in Megatron's words."""

    data: int = plan_field("data")
    tensor: int = plan_field("tensor")
    pipeline: int = plan_field("pipeline")
    context: int = plan_field("context")
    expert: int = plan_field("expert")
    zero_stage: int = plan_field("zero_stage", le=3)
    micro_batch_size: int = plan_field("micro_batch")
    gradient_accumulation: int = plan_field("gradient_accumulation")
    activation_checkpointing: Checkpointing = plan_field("checkpointing", ge=None)
    virtual_stages: int = plan_field("virtual_stages", default=1)
    sequence_parallel: bool = plan_field("sequence_parallel", ge=None, default=False)


class StepSeconds(StatusModel):
    """The forecast of one optimizer step with its range."""

    target: float = Field(ge=0, description="The forecast.")
    lower_bound: float = Field(ge=0, description="Lower end of the 90 % range.")
    upper_bound: float = Field(ge=0, description="Upper end of the 90 % range.")


class MemoryBytes(StatusModel):
    """Memory of one GPU."""

    used: int = Field(ge=0, description="Peak that the plan cannot do without.")
    lower_bound: int | None = Field(default=None, ge=0, description="Lower end of the range of what a run takes.")
    upper_bound: int | None = Field(
        default=None, ge=0, description="Upper end: the allocator never gives memory back, and the bill is too low."
    )
    available: int = Field(ge=0, description="What the GPU leaves to the job.")
    fit: Literal["fits", "tight"] | None = Field(
        default=None, description="Whether all of the range fits, or the peak alone; what does not fit is rejected."
    )


class Alternative(StatusModel):
    """One plan in short."""

    pool: str = Field(max_length=63, description="Name of the pool.")
    nodes: int = Field(ge=1, description="Nodes.")
    gpus_per_node: int = Field(ge=1, description="GPUs used on each node.")
    gpus: int = Field(ge=1, description="GPUs in all.")
    plan: str = Field(max_length=128, description="The split in short.")
    global_batch_size: int | None = Field(
        default=None, ge=1, description="Samples of one optimizer step, which a range leaves to the advice."
    )
    precision: Precision | None = Field(default=None, description="Precision of the matrix multiplications.")
    step_seconds: StepSeconds = Field(description="Forecast of one step.")
    cost_per1000_steps: float | None = Field(
        default=None,
        alias="costPer1000Steps",
        ge=0,
        description="Price of 1000 steps; absent where the pool has no price.",
    )
    finish_seconds: float | None = Field(
        default=None, ge=0, description="Seconds of the whole run, where its length is known."
    )
    fits_now: bool | None = Field(default=None, description="Whether so many GPUs are free now, where that is known.")
    raw_step_seconds: float | None = Field(
        default=None,
        ge=0,
        description="The step without what the job's own measured runs say of it, where there are any.",
    )
    own_runs_ratio: float | None = Field(default=None, gt=0, description="What those runs multiplied it by.")
    reason: str = Field(max_length=256, description="What decides its place.")


class Recommendation(StatusModel):
    """The best plan of all pools."""

    pool: str = Field(max_length=63, description="Name of the pool.")
    node_type: str | None = Field(default=None, max_length=63, description="Instance type of its nodes, where known.")
    node_selector: dict[str, str] = Field(max_length=16, description="Labels that select the pool's nodes.")
    tolerations: list[Toleration] = Field(
        default_factory=list, max_length=16, description="Taints of the pool that the job must tolerate."
    )
    nodes: int = Field(ge=1, description="Nodes.")
    gpus_per_node: int = Field(ge=1, description="GPUs used on each node.")
    gpus: int = Field(ge=1, description="GPUs in all.")
    parallelism: Parallelism = Field(description="How to split the job.")
    global_batch_size: int | None = Field(
        default=None, ge=1, description="Samples of one optimizer step, which a range leaves to the advice."
    )
    precision: Precision | None = Field(default=None, description="Precision of the matrix multiplications.")
    step_seconds: StepSeconds = Field(description="Forecast of one step.")
    breakdown: dict[str, float] = Field(
        max_length=16, description="Parts of the step in seconds; they sum to the target."
    )
    bottleneck: str | None = Field(
        default=None, max_length=32, description="The largest of those parts; input wherever it adds."
    )
    memory_bytes: MemoryBytes = Field(description="Memory of one GPU.")
    tokens_per_second: float = Field(ge=0, description="Throughput in tokens, or in samples where there are no tokens.")
    cost_per1000_steps: float | None = Field(
        default=None,
        alias="costPer1000Steps",
        ge=0,
        description="Price of 1000 steps; absent where the pool has no price.",
    )
    currency: str | None = Field(default=None, max_length=3, description="Currency of the price.")
    finish_seconds: float | None = Field(
        default=None, ge=0, description="Seconds of the whole run, where its length is known."
    )
    cost_to_finish: float | None = Field(default=None, ge=0, description="Price of the whole run, likewise.")
    fits_now: bool | None = Field(default=None, description="Whether so many GPUs are free now, where that is known.")
    reason: str = Field(max_length=256, description="Why it is best.")


class FrozenForecast(StatusModel):
    """What became of the forecast when the job started, and what measured steps are held against."""

    frozen_at: str = Field(
        max_length=32,
        description="When the job started, or was seen to have; from then on its forecast stays as it is.",
        json_schema_extra={"format": "date-time"},
    )
    pool: str | None = Field(default=None, max_length=63, description="Pool that it runs on, as far as is known.")
    gpus: int | None = Field(default=None, ge=1, description="GPUs that it runs on.")
    plan: str | None = Field(default=None, max_length=128, description="How it is split.")
    raw_seconds: float | None = Field(default=None, ge=0, description="Forecast of its step before any correction.")
    step_seconds: StepSeconds | None = Field(default=None, description="The forecast with its range, corrected.")
    group: list[Annotated[str, Field(max_length=63)]] = Field(
        default_factory=list,
        max_length=5,
        description="GPU, precision, model family, range of GPU counts and digest of the workload: what calibration "
        "takes it for.",
    )
    framework: str | None = Field(default=None, max_length=32, description="Framework that it trains with.")
    followed: bool | None = Field(default=None, description="Whether it runs as recommended.")


class ObservedStep(StatusModel):
    """The measured step."""

    step_seconds: float = Field(gt=0, description="Median of the newest reports, outliers left out.")
    input_seconds: float | None = Field(
        default=None, ge=0, description="What of a step the GPU waited for data, as the newest report that says it."
    )
    samples: int = Field(ge=1, description="Reports so far.")
    source: str = Field(max_length=32, description="Where the newest came from: put, annotation, prometheus, trainJob.")
    time: str = Field(max_length=32, description="When the newest arrived.", json_schema_extra={"format": "date-time"})
    recent_step_seconds: list[float] = Field(
        default_factory=list, max_length=32, description="The newest reports, oldest first."
    )
    peak_memory_bytes: int | None = Field(default=None, ge=0, description="Most GPU memory allocated on rank 0.")
    gpu: str | None = Field(default=None, max_length=63, description="GPU as the job sees it.")
    driver: str | None = Field(default=None, max_length=32, description="Its driver.")
    node: str | None = Field(default=None, max_length=253, description="Node that the newest report came from.")
    annotation: str | None = Field(default=None, max_length=32, description="The annotation that was taken last.")


class ErrorRatio(StatusModel):
    """(predicted - observed) / observed: +0.3 is a forecast 30 % too slow."""

    raw_ratio: float = Field(description="Of the forecast before any correction.")
    calibrated_ratio: float = Field(description="Of the forecast as it was given.")


class RejectedPool(StatusModel):
    """Why a pool has no plan."""

    pool: str = Field(max_length=63, description="Name of the pool.")
    code: str = Field(max_length=64, description="The reason as a stable code.")
    message: str = Field(max_length=512, description="The reason with the number that decided.")
    remedy: str = Field(max_length=512, description="The nearest change that would help.")


class PassedOver(StatusModel):
    """A plan that is not the recommendation: the best of another pool, or one step away."""

    subject: str = Field(max_length=32, description="What differs: the pool, or a dimension of the plan.")
    pool: str = Field(max_length=63, description="Name of its pool.")
    plan: str = Field(max_length=128, description="The split in short.")
    code: str = Field(max_length=64, description="What binds, as a stable code.")
    message: str = Field(max_length=512, description="The same with the number that decided.")
    remedy: str | None = Field(
        default=None,
        max_length=512,
        description="The smallest change that would make it fit or win, if one was found.",
    )


class ModelVersion(StatusModel):
    """The predictor that made the forecast."""

    version: str = Field(max_length=64, description="Version of the utilization model.")
    sha256: str = Field(max_length=64, description="Digest of its file.")


class Summary(StatusModel):
    """Flat strings for `kubectl get`."""

    pool: str | None = Field(default=None, max_length=63, description="Recommended pool.")
    gpus: str | None = Field(default=None, max_length=32, description="Nodes x GPUs per node.")
    plan: str | None = Field(default=None, max_length=128, description="The split in short.")
    step: str | None = Field(default=None, max_length=32, description="Forecast of one step.")
    range: str | None = Field(default=None, max_length=32, description="Its 90 % range.")
    speedup: str | None = Field(default=None, max_length=32, description="Against the baseline.")
    cost_per1000_steps: str | None = Field(
        default=None, alias="costPer1000Steps", max_length=32, description="Price of 1000 steps."
    )
    error: str | None = Field(default=None, max_length=32, description="Measured against forecast, once measured.")
    reason: str | None = Field(default=None, max_length=64, description="Reason of the Ready condition.")
    fits_now: str | None = Field(default=None, max_length=32, description="Whether the GPUs are free now, where known.")
    finish: str | None = Field(default=None, max_length=32, description="Time of the whole run.")
    memory: str | None = Field(default=None, max_length=32, description="GiB used of available on one GPU.")
    confidence: str | None = Field(
        default=None, max_length=32, description="Half-width of the range, relative to the step."
    )
    target: str | None = Field(default=None, max_length=253, description="The job this advice is for.")


class QueuePosition(StatusModel):
    """Where and when a job runs by the plan of the whole queue."""

    pool: str | None = Field(
        default=None, max_length=63, description="Pool that the plan gives it; absent where the plan leaves it out."
    )
    gpus: int | None = Field(default=None, ge=1, description="GPUs that it has there.")
    position: int | None = Field(
        default=None, ge=0, description="Its place among the jobs that wait for this pool, from 1; 0 once it runs."
    )
    start: str | None = Field(
        default=None, max_length=32, description="When it starts.", json_schema_extra={"format": "date-time"}
    )
    finish: str | None = Field(
        default=None, max_length=32, description="When it ends.", json_schema_extra={"format": "date-time"}
    )
    reason: str = Field(max_length=512, description="Why there and then, or why it is left out.")


class TrainingJobStatus(StatusModel):
    """The answer. Written by the operator only."""

    observed_generation: int | None = Field(default=None, ge=0, description="Generation of the spec that was advised.")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Ready, RecommendationProvided, LowConfidence, CapacityAvailable, Applied, ObservationsAvailable; "
        "of a job that was measured also BetterPlacementAvailable.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    recommendation: Recommendation | None = Field(default=None, description="The best plan of all pools.")
    baseline: Alternative | None = Field(default=None, description="What you would run today, priced alike.")
    uncapped: Alternative | None = Field(
        default=None, description="The best plan if constraints did not limit the GPUs."
    )
    alternatives: list[Alternative] = Field(
        default_factory=list, max_length=16, description="The best plan of every pool, best first."
    )
    alternatives_hash: str | None = Field(
        default=None,
        max_length=64,
        description="Digest of the measured runs and the pools that the alternatives of a job that runs were priced "
        "anew for; absent where they are those of the recommendation.",
    )
    pareto: list[Alternative] = Field(
        default_factory=list,
        max_length=8,
        description="Plans of all pools of which none is beaten in time, cost and GPUs at once, fastest first.",
    )
    rejected: list[RejectedPool] = Field(
        default_factory=list, max_length=64, description="Pools without a plan, and why."
    )
    why_not: list[PassedOver] = Field(
        default_factory=list, max_length=16, description="Plans that the recommendation was preferred to, and why."
    )
    ties: int | None = Field(default=None, ge=0, description="Plans that the forecast cannot tell from the best.")
    notes: list[Annotated[str, Field(max_length=256)]] = Field(
        default_factory=list, max_length=8, description="What else to know, a sentence each."
    )
    plans_evaluated: int | None = Field(default=None, ge=0, description="How many plans were compared.")
    forecast: FrozenForecast | None = Field(default=None, description="Present once the job has started.")
    observed: ObservedStep | None = Field(default=None, description="Present once a step was measured.")
    error: ErrorRatio | None = Field(default=None, description="Signed relative errors of the forecast.")
    model: ModelVersion | None = Field(default=None, description="The predictor that made the forecast.")
    inputs_hash: str | None = Field(
        default=None, max_length=64, description="Digest of everything that decided the advice."
    )
    queue: QueuePosition | None = Field(
        default=None, description="Its part in the plan of the whole queue, where the operator makes one."
    )
    summary: Summary | None = Field(default=None, description="Flat strings for kubectl get.")
