"""Models of the output of `tilecast advise -o json`, from which `schemas/advice.schema.json` is generated.

The models extend those of the TrainingJob's status, so that a key means the same in both documents. Regenerate the file
with `python -m tilecast.api.advice --output schemas/advice.schema.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from tilecast import zoo
from tilecast.advice import Advice, AdviceOrigin, Change, Decision, Offer, Rejection, WhyNot
from tilecast.advice.sharing import GpuSharingOption, SharingAdvice
from tilecast.api import status
from tilecast.api.base import (
    ApiModel,
    StatusModel,
    UnboundedModel,
    list_field,
    optional_field,
    round_to_six_digits,
    round_to_six_digits_if_known,
)
from tilecast.api.status import MemoryBytes, ModelVersion, PassedOver, Recommendation, RejectedPool, StepSeconds
from tilecast.objectives import Objective
from tilecast.spec import GradientSync, ServerUpdates, Workload

# A whole number keeps its spelling, which a float would not.
Number = Annotated[int | float, WithJsonSchema({"type": "number"})]
# Fields of these types are read from the attributes of a value, which may be of another type.
Figure = Annotated[float, AfterValidator(round_to_six_digits)]
Whole = Annotated[int, BeforeValidator(round)]
Text = Annotated[str, BeforeValidator(str)]
FROM_TUPLE = BeforeValidator(list)
FROM_MAPPING = BeforeValidator(dict)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


class DetailedOffer(UnboundedModel, Recommendation):
    """All details of a plan, including those that a status omits."""

    plan: str = Field(description="The split in short, as tables print it and --plan reads it.")
    gpu: str = Field(description="Name of the pool's GPU.")
    mfu: float | None = optional_field("Model FLOPs utilization: FLOPs of the model over the peak of all GPUs.")
    tokens_per_second_per_gpu: float | None = optional_field("Throughput of one GPU, in tokens or samples.")
    memory: dict[str, int] = Field(description="The bill of the fullest GPU in bytes; it sums to memoryBytes.used.")
    own_runs_ratio: float | None = optional_field(
        "What the job's own measured runs (--measured) multiply its step by.", gt=0
    )

    @classmethod
    def from_offer(cls, offer: Offer, **more: Any) -> Self:
        """Return all details of an offer, with its plan as short text, its GPU and its memory by purpose."""
        return super().from_offer(
            offer,
            plan=str(offer.plan),
            gpu=offer.pool.gpu.name,
            mfu=round_to_six_digits(offer.mfu),
            tokens_per_second_per_gpu=round_to_six_digits(offer.tokens_per_s_and_gpu),
            memory={name: round(value) for name, value in offer.memory.items()},
            own_runs_ratio=round_to_six_digits(offer.carried) if offer.pool.own.runs else None,
            **more,
        )


class AppliedChange(StatusModel):
    """The smallest change of one input that was tried and helps."""

    input: str = Field(description="Path of the input in the job or the pool.")
    value: Number | str = Field(description="What it has to be, in that field's unit.")
    effect: Literal["fits", "wins"] = Field(description="What the plan then does.")
    text: str = Field(description="The change as a phrase.")
    step_seconds: float | None = optional_field("A step of the plan after the change, where it was priced.")
    cost_per1000_steps: float | None = optional_field(
        "Price of 1000 such steps, where it is known.", alias="costPer1000Steps"
    )

    @classmethod
    def from_change(cls, change: Change | None) -> Self | None:
        """Return the document for a suggested change of an input, or None if there is no change."""
        if change is None:
            return None
        value = round_to_six_digits(change.value) if isinstance(change.value, float) else change.value
        return cls(
            input=change.input,
            value=value,
            effect=change.effect,
            text=change.text,
            step_seconds=round_to_six_digits_if_known(change.step_s),
            cost_per1000_steps=round_to_six_digits_if_known(change.cost_per_1000_steps),
        )


class DetailedRejection(UnboundedModel, RejectedPool):
    """Why a pool has no plan, with the change that would help."""

    change: AppliedChange | None = optional_field("The remedy as a value, where one was tried.")

    @classmethod
    def from_rejection(cls, rejection: Rejection, **more: Any) -> Self:
        """Return the document for a rejection, with the suggested change."""
        return super().from_rejection(rejection, change=AppliedChange.from_change(rejection.change), **more)


class Alternative(UnboundedModel, status.Alternative):
    """One plan in short."""


class DetailedPassedOver(UnboundedModel, PassedOver):
    """A plan that is not the recommendation, with the number that decided."""

    value: float | None = optional_field("Ratio to the recommendation, or bytes that are too many.")
    change: AppliedChange | None = optional_field("The remedy as a value, where one was tried.")

    @classmethod
    def from_why_not(cls, why_not: WhyNot, **more: Any) -> Self:
        """Return the document for a rejected plan. It has the suggested change itself in place of a text."""
        return super().from_why_not(
            why_not,
            remedy=None,
            value=round_to_six_digits_if_known(why_not.value),
            change=AppliedChange.from_change(why_not.change),
            **more,
        )


class PricedModel(StatusModel):
    """The trained model, without adapters."""

    model: str = Field(description="Name of the model.")
    family: str = Field(description="What its graph is made by.")
    parameters: int = Field(description="Its parameters, those of its encoders of images or sound among them.")

    @classmethod
    def from_workload(cls, trained: Workload) -> Self:
        """Return the document for the model of a workload. Its number of parameters excludes LoRA adapters."""
        whole = zoo.count_parameters(replace(trained, lora_rank=0))
        return cls(model=trained.model.name, family=trained.model.family, parameters=round(whole))


class Provenance(StatusModel):
    """Versions and data that the advice was computed with."""

    version: str = Field(description="Version of Tilecast.")
    constants_sha256: str = Field(description="Digest of the fitted constants.")
    data_sha256: str = Field(description="Digest of the facts that ship.")
    layers: dict[str, dict[str, str]] = Field(description="By pool, where each fact of its hardware comes from.")
    calibration_runs: dict[str, int] | None = optional_field(
        "By pool, how many measured runs correct its forecasts, where any does."
    )

    @classmethod
    def from_origin(cls, origin: AdviceOrigin) -> Self:
        """Return the document for the versions and data that the advice was computed with."""
        return cls(
            version=origin.version,
            constants_sha256=origin.constants_sha256,
            data_sha256=origin.data_sha256,
            layers={pool: dict(layers) for pool, layers in origin.layers.items()},
            calibration_runs=dict(origin.runs) or None,
        )


class PartOfGpu(StatusModel):
    """The job on part of a GPU."""

    kind: str = Field(description="How the GPU is shared.")
    profile: str | None = optional_field("The MIG profile.")
    resource: str = Field(description="What a pod asks for.")
    jobs_per_gpu: int = Field(description="How many such jobs one GPU runs at once.")
    gpu_share: float = Field(description="What of the GPU a job takes from others.")
    plan: str = Field(description="The split in short.")
    step_seconds: StepSeconds = Field(description="Forecast of one step.")
    slowdown: float = Field(description="Against the whole GPU.")
    memory_bytes: MemoryBytes = Field(description="Memory of the part.")
    cost_per1000_steps: float | None = optional_field(
        "Price of 1000 steps; absent where the pool has no price.", alias="costPer1000Steps"
    )

    @classmethod
    def from_option(cls, option: GpuSharingOption) -> Self:
        """Return the document for one way to share a GPU."""
        return cls(
            kind=option.kind,
            profile=option.profile or None,
            resource=option.resource,
            jobs_per_gpu=option.jobs,
            gpu_share=round_to_six_digits(option.share),
            plan=str(option.plan),
            step_seconds=StepSeconds.from_forecast(option),
            slowdown=round_to_six_digits(option.slowdown),
            memory_bytes=MemoryBytes(used=round(option.memory_bytes), available=round(option.memory_available_bytes)),
            cost_per1000_steps=round_to_six_digits_if_known(option.cost_per_1000_steps),
        )


class SharedGpu(StatusModel):
    """Ways to run the job on part of a GPU."""

    pool: str = Field(description="Name of the pool.")
    whole_step_seconds: float = Field(description="Forecast of one step on the whole GPU.")
    best: PartOfGpu | None = optional_field("The part that is worth while.")
    options: list[PartOfGpu] = Field(description="Every part that would do.")

    @classmethod
    def from_sharing(cls, sharing: SharingAdvice) -> Self:
        """Return the document for the ways to share a GPU. It names the best way if sharing is worthwhile."""
        return cls(
            pool=sharing.pool.name,
            whole_step_seconds=round_to_six_digits(sharing.whole_s),
            best=PartOfGpu.from_option(sharing.best) if sharing.best else None,
            options=[PartOfGpu.from_option(option) for option in sharing.options],
        )


class OperatorLine(StatusModel):
    """One operator of one micro-batch through every stage."""

    name: str = Field(description="Name of the operator.")
    phase: Literal["forward", "backward"] = Field(alias="pass", description="The pass it belongs to.")
    kind: str = Field(alias="kernel", description="Kind of its kernel.")
    precision: str = Field(description="Precision of the kernel.")
    dims: Annotated[dict[str, Figure], FROM_MAPPING] = Field(
        alias="dimensions", description="Dimensions of the kernel."
    )
    runs: Figure = Field(description="How often it runs, recomputation counted.")
    seconds: Figure = Field(description="All its runs together.")
    flops: Figure = Field(description="FLOP of one run.")
    moved_bytes: Figure = Field(alias="bytes", description="Least memory traffic of one run.")
    roofline_s: Figure = Field(
        alias="rooflineSeconds", description="The least time of one run that the GPU's peaks allow."
    )
    kernel_s: Figure = Field(alias="kernelSeconds", description="Forecast of one run alone.")
    corrections: Annotated[dict[str, Figure], FROM_MAPPING] = Field(
        description="What a run takes in a step against that, by constant."
    )
    bound: Literal["compute", "memory"] = Field(description="Which peak bounds it.")
    tile: Annotated[list[int], FROM_TUPLE] = Field(description="Rows and columns of its tiles.")
    tiles: int = Field(description="How many there are.")
    waves: Figure = Field(description="In how many waves they run.")


class ExchangeLine(StatusModel):
    """Data that ranks exchange for each micro-batch."""

    name: str = Field(description="What is exchanged.")
    collective: str = Field(description="The collective, in nccl-tests' words.")
    group: str = Field(description="Which ranks take part.")
    ranks: int = Field(description="How many.")
    size_bytes: Whole = Field(alias="bytes", description="The whole buffer of one rank.")
    runs: Figure = Field(description="How often.")
    seconds: Figure = Field(description="All its runs together, before anything hides.")
    exposed: Figure = Field(description="The share that nothing hides.")


class SyncLine(StatusModel):
    """A way of summing gradients over replicas."""

    gradient_sync: GradientSync = Field(description="Among replicas, or by parameter servers.")
    server_updates: ServerUpdates | None = optional_field(
        "Whether servers wait for all replicas; absent without servers."
    )
    servers: int = Field(description="Servers, each on a node of its own; 0 without any.")
    seconds: Figure = Field(description="All gradients of a step on the wire, before anything hides.")
    step_s: Figure = Field(alias="stepSeconds", description="The step with it.")


class StepSums(StatusModel):
    """How the compute and communication of a step are summed from those of a micro-batch."""

    stage_s: Figure = Field(
        alias="stageSeconds", description="A micro-batch's operators and copies on the fullest stage."
    )
    exchanged_s: Figure = Field(
        alias="exchangedSeconds", description="What it exchanges there, and with the next stage, in the open."
    )
    contended_s: Figure = Field(
        alias="contendedSeconds", description="How much longer kernels take beside gradients, in a step."
    )
    gradients_s: Figure = Field(
        alias="gradientSeconds", description="Gradients and weights exchanged in the open, in a step."
    )
    waited: Figure = Field(alias="slowestRank", description="The slowest rank against their mean.")
    correction: Figure = Field(description="What runs seen on the cluster multiply the step by.")


class Explained(StatusModel):
    """Parts of the recommended plan, which --explain adds."""

    plan: Text = Field(description="The split in short.")
    gpu: Annotated[str, BeforeValidator(attrgetter("name"))] = Field(description="Name of the GPU.")
    model_flops: Figure = Field(description="FLOP of one optimizer step over all ranks, without recomputation.")
    mfu: Figure = Field(description="Model FLOPs utilization.")
    balance: Figure = Field(
        alias="balanceFlopPerByte", description="From where on the peak rather than the memory bounds."
    )
    seconds: Figure = Field(alias="microBatchSeconds", description="GPU time of one micro-batch through every stage.")
    copied_s: Figure = Field(alias="copiedSeconds", description="Of it, copies and sums of weights and gradients.")
    sums: StepSums = Field(description="How a step is made of micro-batches.")
    operators: Annotated[list[OperatorLine], FROM_TUPLE] = Field(description="The costliest first.")
    exchanges: Annotated[list[ExchangeLine], FROM_TUPLE] = Field(description="The longest first.")
    gradient_bytes: Whole = Field(description="Gradients of one rank on the wire; 0 where nobody holds a copy.")
    syncs: Annotated[list[SyncLine], FROM_TUPLE] = Field(
        alias="gradientSyncs",
        description="The plan with each way of summing whole gradients, the job's own first; empty without replicas "
        "and where gradients are sharded.",
    )


class SuspectLine(StatusModel):
    """An item of the step's breakdown, under the assumption that it alone is wrong."""

    line: str = Field(description="The line; unstated is what the job leaves out.")
    forecast_s: Figure = Field(alias="forecastSeconds", description="Its forecast.")
    needed_s: Figure = Field(
        alias="neededSeconds", description="What it would have to take; none can where this is not positive."
    )
    standard_errors: Annotated[Figure | None, BeforeValidator(_finite_or_none)] = optional_field(
        "How far that is; absent where it cannot be."
    )
    is_plausible: bool = Field(alias="plausible", description="Whether its own 90 % range reaches that far.")


class Measured(StatusModel):
    """Comparison with measured runs, which --measured adds."""

    measured_seconds: Figure = Field(description="The step as measured.")
    ratio: Figure = Field(description="Measured over forecast.")
    inside_range: bool = Field(description="Whether it lies in the 90 % range.")
    suspects: list[SuspectLine] = Field(description="The most probable first, what the job leaves out last.")


class Launched(ApiModel):
    """Files and command that run the recommendation, which --launch adds."""

    launcher: str = Field(description="What --launch named.")
    framework: str = Field(description="The framework that the advice is priced with.")
    command: list[str] = Field(description="Words of the command; $NAME in one is a variable of the shell.")
    environment: dict[str, str] = Field(default_factory=dict, description="Variables that it needs.")
    files: dict[str, str] = Field(default_factory=dict, description="Files that it reads, by name.")
    script: list[str] = list_field("Lines of Python for the training script.")
    notes: list[str] = list_field("What the reader has to know besides.")
    safer: dict[str, Any] | None = optional_field(
        "Where the recommendation is tight: the plan with memory to spare, and its launch with the same keys."
    )


SCHEMA_VERSION: Literal["1"] = "1"
"""Version of `schemas/advice.schema.json`. It changes when a key changes its meaning or is removed."""


class AdviceDocument(StatusModel):
    """Output of `tilecast advise -o json`. Keys without a value are left out.

    New keys may be added without a change of `schema_version`.
    """

    schema_version: Literal["1"] = Field(description="Version of this schema.")
    job: str = Field(description="Name of the job.")
    objective: Objective = Field(description="What is best.")
    workload: PricedModel = Field(description="What is trained.")
    recommendation: DetailedOffer | None = optional_field("The best plan of all pools.")
    baseline: DetailedOffer | None = optional_field("What the user would run today.")
    usual: DetailedOffer | None = optional_field("Data parallelism or FSDP alone, as most people would run the job.")
    safer: DetailedOffer | None = optional_field(
        "The best plan with memory to spare, where the recommendation is tight."
    )
    uncapped: DetailedOffer | None = optional_field("The best without the job's own constraints.")
    alternatives: list[DetailedOffer] = Field(description="The best plan of every other pool, best first.")
    pareto: list[Alternative] = Field(description="Plans that none beats in time, cost and GPUs at once.")
    rejected: list[DetailedRejection] = Field(description="Pools without a plan, and why.")
    why_not: list[DetailedPassedOver] = Field(description="What binds the others.")
    ties: int = Field(description="Plans that the forecast cannot tell from the recommendation.")
    tie_ratio: float = Field(description="How far the recommendation is behind the best of them; 1 is not at all.")
    alerts: list[str] = list_field("Assumptions that decide the forecast, a sentence each.")
    decided_by: Decision = Field(
        description="What decided against the best forecast: best (nothing did), host (shorter waits for the host), "
        "memory (to spare), price, time or simplicity."
    )
    notes: list[str] = Field(description="What else a reader must know.")
    confidence: str = Field(description="Why the range is as wide as it is.")
    plans_evaluated: int = Field(description="How many plans were compared.")
    model: ModelVersion = Field(description="The predictor that made the forecast.")
    provenance: Provenance = Field(description="What else the advice rests on.")
    inputs_hash: str = Field(description="Digest of everything that decided the advice.")
    sharing: SharedGpu | None = optional_field("Of a job that cannot fill a GPU: parts that would do.")
    explanation: Explained | None = optional_field("With --explain.")
    measured: Measured | None = optional_field("With --measured.")
    per_layer: dict[str, Any] | None = optional_field("With --per-layer.")
    launch: Launched | None = optional_field("With --launch.")

    @classmethod
    def from_advice(cls, advice: Advice) -> Self:
        """Return the document for an advice, with all offers, rejections and notes."""
        best, baseline, usual, safer, uncapped = (
            None if offer is None else DetailedOffer.from_offer(offer)
            for offer in (advice.best, advice.baseline, advice.usual, advice.safer, advice.uncapped)
        )
        return cls(
            schema_version=SCHEMA_VERSION,
            job=advice.request.name,
            objective=advice.request.objective,
            workload=PricedModel.from_workload(advice.request.workload),
            recommendation=best,
            baseline=baseline,
            usual=usual,
            safer=safer,
            alerts=list(advice.alerts),
            uncapped=uncapped,
            alternatives=[DetailedOffer.from_offer(offer) for offer in advice.offers[1:]],
            pareto=[Alternative.from_offer(offer) for offer in advice.pareto],
            rejected=[DetailedRejection.from_rejection(item) for item in advice.rejections],
            why_not=[DetailedPassedOver.from_why_not(item) for item in advice.why_not],
            ties=advice.ties,
            tie_ratio=round_to_six_digits(advice.tie_ratio),
            decided_by=advice.decision,
            notes=list(advice.notes),
            confidence=advice.confidence,
            plans_evaluated=advice.plans_evaluated,
            model=ModelVersion.from_origin(advice.provenance),
            provenance=Provenance.from_origin(advice.provenance),
            inputs_hash=advice.inputs_hash,
            sharing=SharedGpu.from_sharing(advice.sharing) if advice.sharing else None,
        )

    def document(self) -> dict[str, Any]:
        """Return the document as a dictionary of the fields that were set. `sharing` comes after the rejected pools."""
        values = super().document()
        return {key: values[key] for key in _PRINTED if key in values}


_PRINTED = [str(field.alias) for field in AdviceDocument.model_fields.values()]
_PRINTED.insert(_PRINTED.index("whyNot"), _PRINTED.pop(_PRINTED.index("sharing")))


def build_advice_schema() -> dict[str, Any]:
    """Return the JSON schema of an `AdviceDocument`."""
    generated = AdviceDocument.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **generated}


def format_schema() -> str:
    """Return the JSON schema as the text of its file."""
    return json.dumps(build_advice_schema(), indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the JSON schema to the file that `--output` names, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tilecast.api.advice")
    parser.add_argument("--output", type=Path, required=True)
    parser.parse_args(arguments).output.write_text(format_schema(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
