"""The status of a TrainingJob: the advice, the measured steps, and the error of the forecast."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from tilecast.advice import AdviceOrigin, Offer, Rejection, WhyNot
from tilecast.advice.incumbent import Incumbent
from tilecast.advice.measured import RunForecast
from tilecast.advice.sharing import GpuSharingOption
from tilecast.api.base import (
    TIME,
    StatusModel,
    Toleration,
    list_field,
    list_map_keyed_by,
    optional_field,
    plan_field,
    round_to_six_digits,
    round_to_six_digits_if_known,
    time_field,
)
from tilecast.api.parts import PartSeconds
from tilecast.recomputation import PATTERN, Checkpointing
from tilecast.spec import Plan, Precision, Schedule


class Condition(StatusModel):
    """One aspect of the state, as Kubernetes writes it."""

    type: str = Field(max_length=64, description="What the condition is about.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int = Field(ge=0, description="Generation of the spec that was looked at.")
    last_transition_time: str = time_field("When status last changed.")
    reason: str = Field(min_length=1, max_length=64, description="Why, in one stable CamelCase word.")
    message: str = Field(max_length=1024, description="Why and what to do about it, in a sentence.")


class Parallelism(StatusModel):
    """How the job is split, in Megatron's words."""

    data: int = plan_field("data")
    tensor: int = plan_field("tensor")
    pipeline: int = plan_field("pipeline")
    context: int = plan_field("context")
    expert: int = plan_field("expert")
    zero_stage: int = plan_field("zero_stage", le=3)
    micro_batch: int = plan_field("micro_batch")
    gradient_accumulation: int = plan_field("gradient_accumulation")
    checkpointing: Checkpointing = plan_field("checkpointing", ge=None, pattern=PATTERN, max_length=96)
    expert_tensor: int = plan_field("expert_tensor", default=1)
    virtual_stages: int = plan_field("virtual_stages", default=1)
    schedule: Schedule | None = plan_field("schedule", ge=None, default=None)
    sequence_parallel: bool = plan_field("sequence_parallel", ge=None, default=False)

    @classmethod
    def from_plan(cls, plan: Plan) -> Self:
        """Return the document for a plan."""
        return cls.model_validate(plan, from_attributes=True)

    def to_plan(self) -> Plan:
        """Return the document as a `Plan`."""
        return Plan(**dict(self))


class StepSeconds(StatusModel):
    """The forecast of one optimizer step with its range."""

    target: float = Field(ge=0, description="The forecast.")
    lower_bound: float = Field(ge=0, description="Lower end of the 90 % range.")
    upper_bound: float = Field(ge=0, description="Upper end of the 90 % range.")

    @classmethod
    def from_forecast(cls, forecast: Offer | GpuSharingOption | RunForecast) -> Self:
        """Return the document for the step of a forecast, with its range, in seconds."""
        ends = round_to_six_digits(forecast.lower_s), round_to_six_digits(forecast.upper_s)
        return cls(target=round_to_six_digits(forecast.step_s), lower_bound=ends[0], upper_bound=ends[1])


class MemoryBytes(StatusModel):
    """Memory that a plan takes of one GPU, and that the GPU has."""

    used: int = Field(ge=0, description="Peak that the plan cannot do without.")
    lower_bound: int | None = optional_field("Lower end of the range of what a run takes.", ge=0)
    upper_bound: int | None = optional_field(
        "Upper end: the allocator never gives memory back, and the bill is too low.", ge=0
    )
    available: int = Field(ge=0, description="What the GPU leaves to the job.")
    fit: Literal["fits", "tight"] | None = optional_field(
        "Whether all of the range fits, or the peak alone; what does not fit is rejected."
    )

    @classmethod
    def from_offer(cls, offer: Offer) -> Self:
        """Return the document for the memory of an offer's fullest GPU, in bytes."""
        return cls(
            used=round(offer.memory_bytes),
            lower_bound=round(offer.memory_lower_bytes),
            upper_bound=round(offer.memory_upper_bytes),
            available=round(offer.memory_available_bytes),
            fit="tight" if offer.is_tight else "fits",
        )


class Alternative(StatusModel):
    """Summary of one plan: where it runs, its split, and its forecasts."""

    pool: str = Field(max_length=63, description="Name of the pool.")
    nodes: int = Field(ge=1, description="Nodes.")
    gpus_per_node: int = Field(ge=1, description="GPUs used on each node.")
    gpus: int = Field(ge=1, description="GPUs in all.")
    plan: str = Field(max_length=128, description="The split in short.")
    global_batch_size: int | None = optional_field(
        "Samples of one optimizer step, which a range leaves to the advice.", ge=1
    )
    precision: Precision | None = optional_field("Precision of the matrix multiplications.")
    step_seconds: StepSeconds = Field(description="Forecast of one step.")
    cost_per1000_steps: float | None = optional_field(
        "Price of 1000 steps; absent where the pool has no price.", alias="costPer1000Steps", ge=0
    )
    finish_seconds: float | None = optional_field("Seconds of the whole run, where its length is known.", ge=0)
    fits_now: bool | None = optional_field("Whether so many GPUs are free now, where that is known.")
    raw_step_seconds: float | None = optional_field(
        "The step without what the job's own measured runs say of it, where there are any.", ge=0
    )
    own_runs_ratio: float | None = optional_field("What those runs multiplied it by.", gt=0)
    reason: str = Field(max_length=256, description="What decides its place.")

    @classmethod
    def from_offer(cls, offer: Offer, **more: Any) -> Self:
        """Return the summary of an offer. `more` has values of fields that a subclass adds."""
        has_runs = bool(offer.pool.own.runs)
        return cls.from_truncated_values(
            **_get_summary_fields(offer),
            plan=str(offer.plan),
            raw_step_seconds=round_to_six_digits(offer.step_s / offer.carried) if has_runs else None,
            own_runs_ratio=round_to_six_digits(offer.carried) if has_runs else None,
            **more,
        )


def _get_summary_fields(offer: Offer) -> dict[str, Any]:
    """Return the values of the fields that `Alternative` and `Recommendation` have in common."""
    return {
        "pool": offer.pool.name,
        "nodes": offer.nodes,
        "gpus_per_node": offer.gpus_per_node,
        "gpus": offer.gpus,
        "global_batch_size": offer.workload.global_batch,
        "precision": offer.workload.precision,
        "step_seconds": StepSeconds.from_forecast(offer),
        "cost_per1000_steps": round_to_six_digits_if_known(offer.cost_per_1000_steps),
        "finish_seconds": round_to_six_digits_if_known(offer.finish_s),
        "fits_now": offer.fits_now,
        "reason": offer.reason,
    }


class Recommendation(StatusModel):
    """The best plan of all pools."""

    pool: str = Field(max_length=63, description="Name of the pool.")
    node_type: str | None = optional_field("Instance type of its nodes, where known.", max_length=63)
    node_selector: dict[str, str] = Field(max_length=16, description="Labels that select the pool's nodes.")
    tolerations: list[Toleration] = list_field("Taints of the pool that the job must tolerate.", max_length=16)
    nodes: int = Field(ge=1, description="Nodes.")
    gpus_per_node: int = Field(ge=1, description="GPUs used on each node.")
    gpus: int = Field(ge=1, description="GPUs in all.")
    device_requests: list[Annotated[str, Field(max_length=200)]] = list_field(
        "Requests of the job's ResourceClaims that its devices meet, as claim/request or claim/request/alternative.",
        max_length=32,
    )
    parallelism: Parallelism = Field(description="How to split the job.")
    global_batch_size: int | None = optional_field(
        "Samples of one optimizer step, which a range leaves to the advice.", ge=1
    )
    precision: Precision | None = optional_field("Precision of the matrix multiplications.")
    step_seconds: StepSeconds = Field(description="Forecast of one step.")
    breakdown: dict[str, float] = Field(
        max_length=16, description="Parts of the step in seconds; they sum to the target."
    )
    bottleneck: str | None = optional_field("The largest of those parts; input wherever it adds.", max_length=32)
    memory_bytes: MemoryBytes = Field(description="Memory of one GPU.")
    tokens_per_second: float = Field(ge=0, description="Throughput in tokens, or in samples where there are no tokens.")
    cost_per1000_steps: float | None = optional_field(
        "Price of 1000 steps; absent where the pool has no price.", alias="costPer1000Steps", ge=0
    )
    currency: str | None = optional_field("Currency of the price.", max_length=3)
    finish_seconds: float | None = optional_field("Seconds of the whole run, where its length is known.", ge=0)
    cost_to_finish: float | None = optional_field("Price of the whole run, likewise.", ge=0)
    fits_now: bool | None = optional_field("Whether so many GPUs are free now, where that is known.")
    reason: str = Field(max_length=256, description="Why it is best.")

    @classmethod
    def from_offer(cls, offer: Offer, **more: Any) -> Self:
        """Return all details of an offer. `more` has values of fields that a subclass adds."""
        pool = offer.pool
        return cls.from_truncated_values(
            **_get_summary_fields(offer),
            node_type=pool.node_type or None,
            node_selector=dict(pool.node_selector),
            tolerations=[Toleration.model_validate(item) for item in pool.tolerations],
            device_requests=list(offer.device_requests),
            parallelism=Parallelism.from_plan(offer.plan),
            breakdown={name: round_to_six_digits(value) for name, value in offer.breakdown.items()},
            bottleneck=offer.bottleneck,
            memory_bytes=MemoryBytes.from_offer(offer),
            tokens_per_second=round_to_six_digits(offer.tokens_per_s),
            currency=None if offer.cost_per_1000_steps is None else pool.currency,
            cost_to_finish=round_to_six_digits_if_known(offer.cost_to_finish),
            **more,
        )

    def incumbent(self) -> Incumbent | None:
        """Return the recommendation for comparison with a later search, or None if it lacks a batch or precision."""
        if self.global_batch_size is None or self.precision is None:
            return None
        return Incumbent(self.pool, self.parallelism.to_plan(), self.global_batch_size, self.precision)


class FrozenForecast(StatusModel):
    """The forecast as it was when the job started. Measured steps are compared with it."""

    frozen_at: str = time_field("When the job started, or was seen to have; from then on its forecast stays as it is.")
    pool: str | None = optional_field("Pool that it runs on, as far as is known.", max_length=63)
    gpus: int | None = optional_field("GPUs that it runs on.", ge=1)
    plan: str | None = optional_field("How it is split.", max_length=128)
    raw_seconds: float | None = optional_field("Forecast of its step before any correction.", ge=0)
    step_seconds: StepSeconds | None = optional_field("The forecast with its range, corrected.")
    group: list[Annotated[str, Field(max_length=63)]] = list_field(
        "GPU, precision, model family, range of GPU counts and digest of the workload: what calibration takes it for.",
        max_length=5,
    )
    framework: str | None = optional_field("Framework that it trains with.", max_length=32)
    followed: bool | None = optional_field("Whether it runs as recommended.")


class ObservedStep(StatusModel, PartSeconds):
    """The measured step, and its parts as running means over about eight reports."""

    step_seconds: float = Field(gt=0, description="Median of the newest reports, outliers left out.")
    samples: int = Field(ge=1, description="Reports so far.")
    source: str = Field(
        max_length=32,
        description="Where the newest came from: put, annotation, prometheus, trainJob, trainJobProgress or podLog.",
    )
    rounding_ratio: float | None = optional_field("Share by which rounding may have changed the newest.", ge=0)
    time: str = time_field("When the newest arrived.")
    recent_step_seconds: list[float] = list_field("The newest reports, oldest first.", max_length=32)
    peak_memory_bytes: int | None = optional_field("Most GPU memory allocated on rank 0.", ge=0)
    gpu: str | None = optional_field("GPU as the job sees it.", max_length=63)
    driver: str | None = optional_field("Its driver.", max_length=32)
    node: str | None = optional_field("Node that the newest report came from.", max_length=253)
    annotation: str | None = optional_field("The annotation that was taken last.", max_length=32)


class GpuUse(StatusModel):
    """Memory, activity and power of the GPUs of the job's pods, measured by DCGM and read from Prometheus."""

    peak_memory_bytes: int | None = optional_field(
        "Most memory in use of any GPU so far, with the CUDA context and what the allocator keeps.", ge=0
    )
    memory_error_ratio: float | None = optional_field(
        "(predicted - peak) / peak of the recommendation's memoryBytes.used, once a measured step shows that the job "
        "runs as recommended (forecast.followed)."
    )
    mfu_upper_bound_ratio: float | None = optional_field(
        "Share of the last ten minutes in which tensor cores were active, mean of the GPUs: the MFU is at most that.",
        ge=0,
        le=1,
    )
    power_watts: float | None = optional_field("Mean power of a GPU in the last ten minutes.", ge=0)
    time: str = time_field("When it was read.")
    job_uid: str | None = optional_field(
        "UID of the job whose pods they are: another job has a peak of its own.", max_length=64
    )


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

    @classmethod
    def from_rejection(cls, rejection: Rejection, **more: Any) -> Self:
        """Return the document for a rejected pool. `more` has values of fields that a subclass adds."""
        return cls.from_truncated_values(
            pool=rejection.pool, code=rejection.code, message=rejection.message, remedy=rejection.remedy, **more
        )


class PassedOver(StatusModel):
    """A plan that is not the recommendation: the best of another pool, or one step away."""

    subject: str = Field(max_length=32, description="What differs: the pool, or a dimension of the plan.")
    pool: str = Field(max_length=63, description="Name of its pool.")
    plan: str = Field(max_length=128, description="The split in short.")
    code: str = Field(max_length=64, description="What binds, as a stable code.")
    message: str = Field(max_length=512, description="The same with the number that decided.")
    remedy: str | None = optional_field(
        "The smallest change that would make it fit or win, if one was found.", max_length=512
    )

    @classmethod
    def from_why_not(cls, why_not: WhyNot, **more: Any) -> Self:
        """Return the document for a plan that lost to the recommendation. `more` adds or replaces values of fields."""
        return cls.from_truncated_values(
            subject=why_not.subject,
            pool=why_not.pool,
            plan=str(why_not.plan),
            code=why_not.code,
            message=why_not.message,
            **{"remedy": None if why_not.change is None else why_not.change.text, **more},
        )


class ModelVersion(StatusModel):
    """The predictor that made the forecast."""

    version: str = Field(max_length=64, description="Version of the utilization model.")
    sha256: str = Field(max_length=64, description="Digest of its file.")

    @classmethod
    def from_origin(cls, origin: AdviceOrigin) -> Self:
        """Return the document for the version of the predictor that made an advice."""
        return cls.from_truncated_values(version=origin.model_version, sha256=origin.model_sha256)


class Summary(StatusModel):
    """Flat strings for `kubectl get`."""

    pool: str | None = optional_field("Recommended pool.", max_length=63)
    gpus: str | None = optional_field("Nodes x GPUs per node.", max_length=32)
    plan: str | None = optional_field("The split in short.", max_length=128)
    step: str | None = optional_field("Forecast of one step.", max_length=32)
    range: str | None = optional_field("Its 90 % range.", max_length=32)
    speedup: str | None = optional_field("Against the baseline.", max_length=32)
    cost_per1000_steps: str | None = optional_field("Price of 1000 steps.", alias="costPer1000Steps", max_length=32)
    error: str | None = optional_field("Measured against forecast, once measured.", max_length=32)
    reason: str | None = optional_field("Reason of the Ready condition.", max_length=64)
    fits_now: str | None = optional_field("Whether the GPUs are free now, where known.", max_length=32)
    finish: str | None = optional_field("Time of the whole run.", max_length=32)
    memory: str | None = optional_field("GiB used of available on one GPU.", max_length=32)
    confidence: str | None = optional_field("Half-width of the range, relative to the step.", max_length=32)
    target: str | None = optional_field("The job this advice is for.", max_length=253)


class RunSeconds(StatusModel):
    """How long a whole run takes by the forecast, with its 90 % range."""

    target: float = Field(ge=0, description="The forecast, in seconds.")
    lower_bound: float = Field(ge=0, description="Lower end of the 90 % range.")
    upper_bound: float = Field(ge=0, description="Upper end of the 90 % range.")


class QueueEntry(StatusModel):
    """When a waiting job would start and end on a pool, if all other jobs stayed as planned."""

    pool: str = Field(max_length=63, description="The pool.")
    gpus: int = Field(ge=1, description="GPUs with which it would end first there.")
    start: str | None = optional_field("When it would start.", **TIME)
    finish: str | None = optional_field("When it would end.", **TIME)


MAX_ENTRIES = 8
"""Most pools in `status.queue.pools`. The pools on which the job ends first are kept."""


class QueuePosition(StatusModel):
    """The pool and the time at which a job runs by the plan of the whole queue."""

    pool: str | None = optional_field(
        "Pool that the plan gives it; absent where the plan leaves it out.", max_length=63
    )
    gpus: int | None = optional_field("GPUs that it has there.", ge=1)
    position: int | None = optional_field(
        "Its place among the jobs that wait for this pool, from 1; 0 once it runs.", ge=0
    )
    start: str | None = optional_field("When it starts.", **TIME)
    finish: str | None = optional_field("When it ends.", **TIME)
    earliest_start: str | None = optional_field("Lower end of the 90 % range of its start; of a waiting job.", **TIME)
    latest_start: str | None = optional_field("Upper end of that range.", **TIME)
    run_seconds: RunSeconds | None = optional_field("How long its run takes there.")
    pools: list[QueueEntry] = list_field(
        "When a waiting job would start and end on each pool, the first to end first, if all others stayed as planned.",
        max_length=MAX_ENTRIES,
    )
    reason: str = Field(max_length=512, description="Why there and then, or why it is left out.")


class TrainingJobStatus(StatusModel):
    """The advice for the job, and its measured steps. Written by the operator only."""

    observed_generation: int | None = optional_field("Generation of the spec that was advised.", ge=0)
    writer: str | None = optional_field(
        "The operator that wrote this: namespace/name of its release's Lease, or its own name.", max_length=320
    )
    conditions: list[Condition] = list_field(
        "Ready, RecommendationProvided, LowConfidence, CapacityAvailable, Applied, ObservationsAvailable; "
        "of a job that was measured also BetterPlacementAvailable.",
        max_length=16,
        **list_map_keyed_by("type"),
    )
    recommendation: Recommendation | None = optional_field("The best plan of all pools.")
    baseline: Alternative | None = optional_field("What you would run today, priced alike.")
    uncapped: Alternative | None = optional_field("The best plan if constraints did not limit the GPUs.")
    alternatives: list[Alternative] = list_field("The best plan of every pool, best first.", max_length=16)
    alternatives_hash: str | None = optional_field(
        "Digest of the measured runs and the pools that the alternatives of a job that runs were priced "
        "anew for; absent where they are those of the recommendation.",
        max_length=64,
    )
    pareto: list[Alternative] = list_field(
        "Plans of all pools of which none is beaten in time, cost and GPUs at once, fastest first.", max_length=8
    )
    rejected: list[RejectedPool] = list_field("Pools without a plan, and why.", max_length=64)
    why_not: list[PassedOver] = list_field("Plans that the recommendation was preferred to, and why.", max_length=16)
    ties: int | None = optional_field("Plans that the forecast cannot tell from the best.", ge=0)
    notes: list[Annotated[str, Field(max_length=256)]] = list_field("What else to know, a sentence each.", max_length=8)
    plans_evaluated: int | None = optional_field("How many plans were compared.", ge=0)
    forecast: FrozenForecast | None = optional_field("Present once the job has started.")
    observed: ObservedStep | None = optional_field("Present once a step was measured.")
    error: ErrorRatio | None = optional_field("Signed relative errors of the forecast.")
    gpu_use: GpuUse | None = optional_field("Present once Prometheus had metrics of dcgm-exporter for the job's pods.")
    model: ModelVersion | None = optional_field("The predictor that made the forecast.")
    inputs_hash: str | None = optional_field("Digest of everything that decided the advice.", max_length=64)
    queue: QueuePosition | None = optional_field(
        "Its part in the plan of the whole queue, where the operator makes one."
    )
    summary: Summary | None = optional_field("Flat strings for kubectl get.")
