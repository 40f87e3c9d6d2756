"""The spec of a TrainingJob, and its conversion to a `Request`.

`crds/trainingjobs.yaml` is generated from the models here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field

from tilecast import zoo
from tilecast.advice import Baseline, Budget, Constraints, Request
from tilecast.advice.values import LimitsAt
from tilecast.api.base import (
    API_VERSION,
    MAX_BATCH,
    MAX_GPUS,
    OBJECT_NAME,
    ApiModel,
    ValidationRule,
    check_envelope,
    list_field,
    optional_field,
    optional_plan_field,
    plan_field,
    validate_model,
)
from tilecast.api.job_kinds import JOB_APIS
from tilecast.api.model_source import ConfigMapKeyRef, ModelSource
from tilecast.api.stored_model import ModelReference as ModelReference
from tilecast.api.stored_model import config_map_content as config_map_content
from tilecast.api.stored_model import read_model, sequence_length
from tilecast.api.training import Training
from tilecast.frameworks import FRAMEWORKS, TABLES, UNSET, find_first_version, parse_version
from tilecast.layout import parse_layout
from tilecast.model import Model
from tilecast.objectives import OBJECTIVES, Objective, list_objectives_bounded_by
from tilecast.recomputation import PATTERN, Checkpointing, join_modules, split_modules
from tilecast.search import FRAMEWORKS as ABILITIES
from tilecast.search import find_framework_features
from tilecast.spec import (
    FROZEN_BITS,
    FROZEN_PARTS,
    PIPELINE_SCHEDULES,
    PREFERENCE_FRAMEWORKS,
    PartialPlan,
    Schedule,
    SpecError,
    Workload,
)
from tilecast.zoo.families import FAMILIES
from tilecast.zoo.towers import check_frozen_parts

KIND = "TrainingJob"
Mode = Literal["Off", "Advise", "Initial"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""Modes of a job.

Off writes only the status. Advise also writes annotations. Initial also writes the node choice, once, before the job
runs.
"""


class JobConstraints(ApiModel):
    """Limits on the recommended plan. Absent fields set no limit."""

    gpus: int | None = optional_field("Use exactly this many GPUs.", ge=1, le=MAX_GPUS)
    max_gpus: int | None = optional_field("Use at most this many GPUs.", ge=1, le=MAX_GPUS)
    max_nodes: int | None = optional_field("Use at most this many nodes.", ge=1, le=MAX_GPUS)
    max_tensor_parallel: int | None = optional_field("Split no layer over more GPUs than this.", ge=1, le=4096)
    allowed_pools: list[str] = list_field("Names of the pools to consider; empty considers every pool.", max_length=64)
    allow_sharing: bool = Field(
        default=False, description="Let the job run on part of a GPU: pools of MIG slices are considered too."
    )

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "!has(self.gpus) || !has(self.maxGpus) || self.gpus <= self.maxGpus",
            lambda m: m.gpus is None or m.max_gpus is None or m.gpus <= m.max_gpus,
            "gpus is above maxGpus",
            "lower gpus or raise maxGpus",
        ),
    )

    def to_constraints(self) -> Constraints:
        """Return the limits as the search's `Constraints`."""
        return Constraints(
            gpus=self.gpus,
            max_gpus=self.max_gpus,
            max_nodes=self.max_nodes,
            max_tensor=self.max_tensor_parallel,
            allowed_pools=tuple(self.allowed_pools),
            allow_sharing=self.allow_sharing,
        )


class BaselinePlan(ApiModel):
    """How the job is split today. Degrees that are absent are 1; data takes the GPUs that remain."""

    data: int | None = plan_field("data", default=None, le=MAX_GPUS)
    tensor: int = plan_field("tensor", default=1, le=4096)
    pipeline: int = plan_field("pipeline", default=1, le=4096)
    context: int = plan_field("context", default=1, le=4096)
    expert: int = plan_field("expert", default=1, le=4096)
    expert_tensor: int = plan_field("expert_tensor", default=1, le=4096)
    virtual_stages: int = plan_field("virtual_stages", default=1, le=1024)
    schedule: Schedule | None = plan_field("schedule", ge=None, default=None)
    zero_stage: int | None = optional_plan_field("zero_stage", le=3)
    micro_batch: int | None = optional_plan_field("micro_batch", le=MAX_BATCH)
    checkpointing: Checkpointing | None = optional_plan_field("checkpointing", ge=None, pattern=PATTERN, max_length=96)

    def to_partial_plan(self) -> PartialPlan:
        """Return the plan as a `PartialPlan`, which leaves absent settings to the search."""
        stated = PartialPlan(**dict(self))
        if modules := split_modules(stated.checkpointing or "none"):
            return replace(stated, checkpointing=join_modules(modules))
        return stated


class JobBaseline(ApiModel):
    """The pool and plan in use today. The advice shows a forecast of it for comparison."""

    pool: str = Field(min_length=1, max_length=63, description="Name of the pool.")
    gpus: int = Field(ge=1, le=MAX_GPUS, description="Number of GPUs.")
    plan: BaselinePlan | None = optional_field("How the job is split; absent takes the best plan on these GPUs.")

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "!has(self.plan) || (has(self.plan.data) ? self.plan.data * self.plan.tensor * self.plan.pipeline * "
            "self.plan.context == self.gpus : "
            "self.gpus % (self.plan.tensor * self.plan.pipeline * self.plan.context) == 0)",
            lambda m: m.plan is None or _has_degrees_for_gpus(m.plan, m.gpus),
            "the degrees of plan do not multiply to gpus",
            "correct one of them",
        ),
    )

    def to_baseline(self) -> Baseline:
        """Return the baseline of the document as the `Baseline` of a request."""
        return Baseline(self.pool, self.gpus, self.plan.to_partial_plan() if self.plan else None)


def _has_degrees_for_gpus(plan: BaselinePlan, gpus: int) -> bool:
    others = plan.tensor * plan.pipeline * plan.context
    return gpus % others == 0 if plan.data is None else plan.data * others == gpus


class JobBudget(ApiModel):
    """Most money that the whole run may cost."""

    amount: float = Field(gt=0, le=1e15, description="The amount.")
    currency: str = Field(
        default="USD", pattern="^[A-Z]{3}$", max_length=3, description="Its currency, that of the pools' prices."
    )


if TYPE_CHECKING:
    KindName: TypeAlias = str
else:
    KindName = Literal[tuple(JOB_APIS)]

_VERSIONS = json.dumps(dict(JOB_APIS)).replace('"', "'")


class TargetRef(ApiModel):
    """A job of another kind in the same namespace."""

    api_version: str = Field(min_length=1, max_length=63, description="API version of the kind, for instance batch/v1.")
    kind: KindName = Field(description="Kind of the job.")
    name: str = Field(min_length=1, max_length=253, pattern=OBJECT_NAME, description="Name of the job.")

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            f"{_VERSIONS}[self.kind] == self.apiVersion",
            lambda m: JOB_APIS[m.kind] == m.api_version,
            "apiVersion is not that of kind",
            f"write one of {', '.join(f'{version} {kind}' for kind, version in JOB_APIS.items())}",
        ),
    )


_OBJECTIVES = [f"{record.summary} ({name})" for name, record in OBJECTIVES.items()]


_TIMED = list_objectives_bounded_by("deadlineSeconds")
_PAID = list_objectives_bounded_by("budget")


class TrainingJobSpec(ApiModel):
    """The desired training run and the limits of the advice."""

    workload: Literal["training", "inference"] = Field(
        default="training",
        description="training prices forward, backward and optimizer; inference prices forward alone.",
    )
    model: ModelSource = Field(description="Architecture of the model.")
    training: Training = Field(description="How it is trained.")
    constraints: JobConstraints | None = optional_field("Limits on the answer.")
    objective: Objective = Field(
        default="time", description=f"What is best: {', '.join(_OBJECTIVES[:-1])}, or {_OBJECTIVES[-1]}."
    )
    deadline_seconds: int | None = optional_field(
        "How long the run may take, with any objective. cheapestBeforeDeadline and fewestGpusBeforeDeadline recommend "
        "only plans that meet it; elsewhere the plan of the whole queue keeps to it, and a note says what would.",
        ge=1,
        le=10**11,
    )
    target_step_seconds: float | None = optional_field(
        "How long a step may take, with any objective: with fewestGpus the fewest GPUs for such a step, with cost the "
        "least money.",
        gt=0,
        le=10**9,
    )
    limits_at: LimitsAt | None = optional_field(
        "What has to meet targetStepSeconds and deadlineSeconds: the forecast (absent), or the upper end of its 90 % "
        "range (upperBound)."
    )
    budget: JobBudget | None = optional_field("What the run may cost, for fastestWithinBudget.")
    baseline: JobBaseline | None = optional_field("What you would run today, for comparison.")
    observation_query: str | None = optional_field(
        "PromQL that gives the job's step in seconds, where the operator asks Prometheus: $namespace and "
        "$name stand for the job's. Absent takes the pool's, or the operator's.",
        min_length=1,
        max_length=1024,
    )
    target_ref: TargetRef | None = optional_field(
        "The job that this advice is for: its own GPUs are the baseline, and it is annotated as well."
    )
    mode: Mode = Field(
        default="Advise",
        description="Advise writes status, annotations and Events; Off writes the status only; Initial also writes the "
        "node choice into the job of targetRef before it starts. Write Off in quotes.",
    )

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "!has(self.mode) || self.mode != 'Initial' || has(self.targetRef)",
            lambda m: m.mode != "Initial" or m.target_ref is not None,
            "mode Initial has no job to place",
            "name one in targetRef, or annotate the job itself with tilecast.dev/mode: Initial",
        ),
        ValidationRule(
            "self.workload == 'training' || !has(self.training.optimizer) || self.training.optimizer == 'none'",
            lambda m: m.workload == "training" or m.training.optimizer in (None, "none"),
            "inference has no optimizer",
            "leave training.optimizer out",
        ),
        ValidationRule(
            "self.workload == 'training' || self.training.activationCheckpointing in ['auto', 'none']",
            lambda m: m.workload == "training" or m.training.activation_checkpointing in ("auto", "none"),
            "inference has no backward pass to recompute for",
            "leave training.activationCheckpointing out",
        ),
        ValidationRule(
            f"!(self.objective in {[name for name, record in OBJECTIVES.items() if record.is_whole_run]}) || "
            "has(self.training.steps) || has(self.training.tokens)",
            lambda m: not OBJECTIVES[m.objective].is_whole_run or (m.training.steps or m.training.tokens) is not None,
            "the objective needs to know how long the run is",
            "give training.steps or training.tokens",
        ),
        ValidationRule(
            f"!(self.objective in {_TIMED}) || has(self.deadlineSeconds)",
            lambda m: m.objective not in _TIMED or m.deadline_seconds is not None,
            f"objective {' or '.join(_TIMED)} needs deadlineSeconds",
            "give deadlineSeconds, or another objective",
        ),
        ValidationRule(
            "!has(self.deadlineSeconds) || has(self.training.steps) || has(self.training.tokens)",
            lambda m: m.deadline_seconds is None or (m.training.steps or m.training.tokens) is not None,
            "deadlineSeconds says nothing without the length of the run",
            "give training.steps or training.tokens",
        ),
        ValidationRule(
            f"(self.objective in {_PAID}) == has(self.budget)",
            lambda m: (m.objective in _PAID) == (m.budget is not None),
            f"budget and objective {' or '.join(_PAID)} go together",
            "give both or neither",
        ),
    )


def training_job_document(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a TrainingJob object with a name and a spec, as a dictionary."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def parse_training_job(document: Mapping[str, Any]) -> TrainingJobSpec:
    """Return the validated spec of a TrainingJob document.

    Raises:
        SpecError: a field is invalid. The error has the path of the first invalid field.
    """
    return validate_model(TrainingJobSpec, check_envelope(document, KIND)[1], "spec")


def read_request(document: Mapping[str, Any], config_maps: Mapping[str, Mapping[str, Any]] | None = None) -> Request:
    """Return a TrainingJob document as a request for advice, after validation.

    Args:
        document: the TrainingJob.
        config_maps: ConfigMaps by name, one of which may contain the model.

    Raises:
        SpecError: a field is wrong, or the model is unknown or cannot be read.
    """
    name, _ = check_envelope(document, KIND)
    spec = parse_training_job(document)
    stored = None
    if (place := find_model_reference(spec)) is not None:
        stored = config_map_content(place, (config_maps or {}).get(place.name))
    return to_request(name, spec, stored)


def find_model_reference(spec: TrainingJobSpec) -> ModelReference | None:
    """Return the ConfigMap key that contains a job's model, or None if no ConfigMap does."""
    model = spec.model
    if model.graph_ref is not None:
        key: ConfigMapKeyRef = model.graph_ref.config_map_key_ref
        return ModelReference("spec.model.graphRef.configMapKeyRef", key.name, key.key, "choose a preset")
    if model.hugging_face is None or model.hugging_face.config_map_key_ref is None:
        return None
    key, field = model.hugging_face.config_map_key_ref, "spec.model.huggingFace"
    return ModelReference(f"{field}.configMapKeyRef", key.name, key.key, f"write the config under {field}.config")


def to_request(name: str, spec: TrainingJobSpec, stored: bytes | None = None) -> Request:
    """Return a validated spec as a request for advice.

    Args:
        name: name of the job.
        spec: spec of the job.
        stored: content of the ConfigMap key that the spec refers to, or None if it refers to none.

    Raises:
        SpecError: the model is unknown, unreadable or too large, the sequence length is invalid for it, the framework
            does not support the spec's precision, pipeline or gradient reduction, or the spec has settings for experts
            that the model does not have.
    """
    training = spec.training
    model = read_model(name, spec.model, find_model_reference(spec), stored, training.sequence_length)
    workload = _to_workload(spec, model, sequence_length(model, training.sequence_length))
    _check_precision(training)
    _check_gradient_sync(training)
    _check_pipeline(training, model)
    _check_experts(training, model)
    _check_data_types(training)
    _check_loss(spec, workload)
    _check_adapters(training, workload)
    check_frozen_parts(model, workload.frozen_parts)
    if spec.model.hugging_face is not None or spec.model.graph_ref is not None:
        zoo.count_operators(workload)  # refuses models that are too large, while the job is read
    batches = training.global_batch_size_range
    return Request(
        name=name,
        workload=workload,
        objective=spec.objective,
        constraints=(spec.constraints or JobConstraints()).to_constraints(),
        baseline=spec.baseline.to_baseline() if spec.baseline else None,
        deadline_s=None if spec.deadline_seconds is None else float(spec.deadline_seconds),
        budget=Budget(spec.budget.amount, spec.budget.currency) if spec.budget else None,
        batches=(batches.min, batches.max) if batches else None,
        precisions=tuple(training.allowed_precisions),
        tokens=training.tokens,
        target_step_s=spec.target_step_seconds,
        limits_at=spec.limits_at or "forecast",
    )


_WORKLOAD_FIELDS = {
    *("precision", "attention", "execution", "memory_format", "bucket_mib", "gradient_sync", "parameter_servers"),
    *("fused_optimizer", "fused_loss", "framework", "framework_version", "pipeline_schedule", "pipeline_layout"),
    *("expert_dispatch", "expert_overlap", "weights", "gradient_precision", "moment_precision", "shard_degree"),
    *("expert_capacity", "expert_stash"),
}
"""Fields that `Training` and `Workload` have in common."""


def _to_workload(spec: TrainingJobSpec, model: Model, sequence_length: int) -> Workload:
    """Return the workload for a spec, its model, and the number of tokens per sample."""
    training, is_training = spec.training, spec.workload == "training"
    checkpointing = _read_recomputation(training) if is_training else "none"
    workload = Workload(
        **training.model_dump(include=_WORKLOAD_FIELDS),
        model=model,
        sequence_length=sequence_length,
        global_batch=training.global_batch_size,
        training=is_training,
        optimizer=(training.optimizer or "adamw") if is_training else "none",
        micro_batch=training.micro_batch_size,
        checkpointing=None if checkpointing == "auto" else checkpointing,
        server_updates=training.server_updates or "synchronous",
        offload=training.offload if is_training else "none",
        loss_chunks=training.loss_chunks or 1,
        input_samples_per_s=training.input_samples_per_second,
        offloaded_activations=(training.offload_activations or 0.0) if is_training else 0.0,
        recompute_layers=training.recompute_layers if is_training else None,
        steps=training.steps,
        lora_rank=training.lora_rank or 0,
        lora_targets=training.lora_targets or "all",
        dora=training.dora or False,
        train_embeddings=training.train_embeddings or False,
        loss=training.loss if is_training else None,
        precomputed_reference=training.precomputed_reference or False,
        frozen_parts=tuple(part for part in FROZEN_PARTS if part in training.frozen_parts) if is_training else (),
        frozen_bits=FROZEN_BITS[training.quantization],
    )
    if training.tokens is None:
        return workload
    return replace(workload, steps=-(-training.tokens // workload.tokens_per_step))


def _read_recomputation(training: Training) -> Checkpointing:
    """Return the recomputation that the job sets. If it sets none, return "auto"."""
    if training.recompute_modules:
        return join_modules(training.recompute_modules)
    return "full" if training.recompute_layers is not None else training.activation_checkpointing


def _check_precision(training: Training) -> None:
    """Raise SpecError if the version of the spec's framework does not support the spec's precision.

    Raises:
        SpecError: the version is too old.
    """
    name, version = training.framework, training.framework_version
    first = None if name is None else find_first_version(name, training.precision)
    if first is not None and version is not None and parse_version(version) < parse_version(first):
        problem, remedy = f"{name} {version} has no {training.precision}", f"use version {first} or later, or bf16"
        raise SpecError("spec.training.precision", problem, remedy)


def _check_loss(spec: TrainingJobSpec, workload: Workload) -> None:
    """Raise SpecError if the spec has a loss on preferences that its model or framework does not support.

    Raises:
        SpecError: the job does not train, the model does not predict the next token, the framework trains on no
            preferences, or weights of a reference model would lie on the host.
    """
    if spec.training.loss is None:
        return
    field, loss, remedy = "spec.training.loss", spec.training.loss, "leave loss out"
    if spec.workload != "training":
        raise SpecError(field, f"{loss} trains, and the workload is {spec.workload}", remedy)
    if not zoo.is_trained_on_preferences(workload):
        problem = f"{loss} trains decoders without encoders beside them, and {workload.model.name} is none"
        raise SpecError(field, problem, f"{remedy}, or choose a decoder")
    if spec.training.framework not in (None, *PREFERENCE_FRAMEWORKS):
        problem = f"{loss} is priced as TRL and torchtune compute it, and the framework is {spec.training.framework}"
        raise SpecError(field, problem, f"use framework {' or '.join(PREFERENCE_FRAMEWORKS)}, or {remedy}")
    needs = workload.preference
    if workload.offload == "parameters" and (needs.reference_passes or needs.own_passes):
        problem = f"the forward passes of {loss} without gradients are not priced with weights on the host"
        raise SpecError(field, problem, "use offload optimizer or none")
    if workload.pipeline_schedule or workload.pipeline_layout:
        raise SpecError(
            field, f"{loss} is not priced in a pipeline", f"leave pipelineSchedule and -Layout, or {remedy}"
        )
    for name, is_set in (("fusedLoss", workload.fused_loss), ("lossChunks", workload.loss_chunks > 1)):
        if is_set:
            problem = f"is of the model's own loss, and not priced for the loss {loss}"
            raise SpecError(f"spec.training.{name}", problem, f"leave it out, or {remedy}")


def _check_adapters(training: Training, workload: Workload) -> None:
    """Raise SpecError if the spec's framework has no such adapters, or its model no embedding and head beside them.

    Raises:
        SpecError: LitGPT would train DoRA, or whole embeddings are trained of a model that is no language model.
    """
    if training.dora and training.framework == "litgpt":
        problem = "litgpt has adapters of LoRA alone (litgpt/lora.py)"
        raise SpecError("spec.training.dora", problem, "use framework torchtune or huggingface, or leave dora out")
    model = workload.model
    if training.train_embeddings and not zoo.has_token_embeddings(model):
        problem = f"{model.name} of family {model.family} has no embedding and head of tokens"
        raise SpecError("spec.training.trainEmbeddings", problem, "leave it out")


def _check_pipeline(training: Training, model: Model) -> None:
    """Raise SpecError if the framework or the model does not allow the spec's pipeline schedule and layout.

    Raises:
        SpecError: the framework does not support them, or the layout has another number of layers than the model.
    """
    cells = FRAMEWORKS[training.framework or UNSET]
    who, schedule, layout = training.framework or "the job", training.pipeline_schedule, training.pipeline_layout
    has_pipeline = training.framework is None or "pipeline" in find_framework_features(training.framework).parallelism
    if schedule is not None and not (has_pipeline and schedule in cells.schedules):
        able = [name for name, one in ABILITIES.items() if "pipeline" in one.parallelism]
        others = ", ".join(name for name in able if schedule in FRAMEWORKS[name].schedules)
        known = ", ".join(name for name in PIPELINE_SCHEDULES if name in cells.schedules)
        problem = f"{who} has no {schedule if has_pipeline else 'pipeline parallelism'}"
        remedy = (f"use {known}" if has_pipeline else "leave it out") + (f", or use framework {others}" * bool(others))
        raise SpecError("spec.training.pipelineSchedule", problem, remedy)
    if layout is None:
        return
    field = "spec.training.pipelineLayout"
    if not cells.states_layouts:
        raise SpecError(field, f"{who} splits layers by its own rule", "leave it out, or use framework megatron")
    if model.trace is not None or not FAMILIES[model.family].splits_sequence:
        raise SpecError(field, f"{model.name} is no stack of equal layers", "leave it out")
    try:
        stated = parse_layout(layout)
    except SpecError as error:
        raise error.at(field) from error
    if stated.layers != model.layers:
        problem = f"lays out {stated.layers} layers t, {model.name} has {model.layers}"
        raise SpecError(field, problem, f"write {model.layers} layers t in all, or leave it out")


def _check_experts(training: Training, model: Model) -> None:
    """Raise SpecError if a spec sets how tokens are sent to experts and the model has none, or settings conflict.

    Megatron-Core has the overlap with shared experts beside NCCL's sends and the flex dispatcher, without their
    recomputation, room for more tokens with HybridEP, and a stash where there is such room, without offload
    (transformer/transformer_config.py).
    """
    stated = {"expertDispatch": training.expert_dispatch, "expertOverlap": training.expert_overlap,
              "expertCapacity": training.expert_capacity, "expertStash": training.expert_stash}  # fmt: skip
    for field, value in stated.items():
        if value is not None and not zoo.count_experts(model):
            raise SpecError(f"spec.training.{field}", f"{model.name} has no experts", "leave it out")
    if training.expert_overlap == "sharedExpert":
        field = "spec.training.expertOverlap"
        if training.expert_dispatch == "allGather":
            raise SpecError(field, "sharedExpert is not beside expertDispatch: allGather", "use another expertDispatch")
        if "shared_experts" in training.recompute_modules:
            problem = "sharedExpert is not beside the recomputation of shared_experts"
            raise SpecError(field, problem, "leave shared_experts out of training.recomputeModules")
    if training.expert_capacity is not None and training.expert_dispatch != "hybridEP":
        problem = "is the room that hybridEP has, and expertDispatch does not say it"
        raise SpecError("spec.training.expertCapacity", problem, "add expertDispatch: hybridEP, or leave it out")
    if training.expert_stash is not None and training.expert_capacity is None:
        raise SpecError("spec.training.expertStash", "stands beside expertCapacity alone", "add that, or leave it out")
    if training.expert_stash is not None and training.offload_activations is not None:
        problem = "does not go with training.offloadActivations"
        raise SpecError("spec.training.expertStash", problem, "leave one of them out")


def _check_data_types(training: Training) -> None:
    """Raise SpecError if the framework does not support the data types that the spec sets.

    These are the types of weights, gradients and optimizer moments.

    Raises:
        SpecError: the data types are not supported, or the job trains in FP32.
    """
    stated = {"weights": training.weights, "gradientPrecision": training.gradient_precision,
              "momentPrecision": training.moment_precision}  # fmt: skip
    first = next((name for name, value in stated.items() if value is not None), None)
    if first is None:
        return
    if training.precision in ("fp32", "tf32"):
        problem = f"a job in {training.precision} holds everything in FP32"
        raise SpecError(f"spec.training.{first}", problem, "leave it out, or train in 16 bit")
    name = training.framework
    own = FRAMEWORKS[name or UNSET].weights
    weights = training.weights or own
    if name is not None and weights not in (own, *TABLES[FRAMEWORKS[name].engine]["holds"]):
        known = " or ".join(TABLES[FRAMEWORKS[name].engine]["holds"])
        raise SpecError("spec.training.weights", f"{name} does not hold weights as {weights}", f"use {known}")
    narrow = "fp16" if training.precision == "fp16" else "bf16"
    allowed = {"master": ("fp32", narrow), "pure": (narrow,)}.get(weights, ("fp32",))
    if training.gradient_precision not in (None, *allowed):
        problem = f"gradients of {training.precision} jobs with weights {weights} are in {' or '.join(allowed)}"
        raise SpecError("spec.training.gradientPrecision", problem, f"use {allowed[0]}, or leave it out")
    if training.moment_precision is not None and weights != "master":
        problem = f"moments of weights {weights} have the type of the weights"
        raise SpecError("spec.training.momentPrecision", problem, "leave it out, or use weights master")


def _check_gradient_sync(training: Training) -> None:
    """Raise SpecError if the framework does not support the spec's gradient buckets or parameter servers.

    Raises:
        SpecError: the framework does not support them, or parameter servers are combined with offloaded parameters.
    """
    name, is_served = training.framework, training.gradient_sync == "parameterServer"
    if is_served and training.offload == "parameters":
        problem = "offload parameters spreads gradients that a parameter server sums whole"
        raise SpecError("spec.training.gradientSync", problem, "use allReduce, or another offload")
    if name is None:
        return
    if training.bucket_mib is not None and not FRAMEWORKS[name].has_buckets:
        raise SpecError("spec.training.bucketMiB", f"{name} reduces gradients block by block", "leave it out")
    if is_served and FRAMEWORKS[name].engine != "ddp":
        known = ", ".join(other for other, cells in FRAMEWORKS.items() if cells.engine == "ddp")
        problem = f"{name} has no parameter server"
        raise SpecError("spec.training.gradientSync", problem, f"use allReduce, or one of {known}")
