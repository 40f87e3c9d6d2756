"""The TrainingJob: what a user asks for, and the status that answers it.

The models here are the source of `crds/trainingjobs.yaml`. A field exists only once something honours it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from tilecast import models
from tilecast.advise import FINISHING, Baseline, Budget, Constraints, Request
from tilecast.api.base import Door, Rule, Toleration, check, envelope
from tilecast.api.fields import mapping
from tilecast.frameworks import FRAMEWORKS
from tilecast.models import huggingface, traced
from tilecast.models.traced import document as graph_document
from tilecast.models.traced import onnx_file
from tilecast.spec import (
    Attention,
    Checkpointing,
    Execution,
    Framework,
    GradientSync,
    MemoryFormat,
    Model,
    Objective,
    Offload,
    Optimizer,
    Precision,
    Quantization,
    ServerUpdates,
    SpecError,
    Stated,
    Workload,
)
from tilecast.trace import Trace

KIND = "TrainingJob"
Mode = Literal["Off", "Advise", "Initial"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""Off writes the status only, Advise annotates too, Initial also writes the node choice, once, before the job runs."""

MAX_BATCH = 2**24
MAX_SEQUENCE = 2**24
MAX_GPUS = 2**17
MAX_CONFIG_BYTES = 2**18
MAX_CONFIG_DEPTH = 32
"""Of a config.json written into a job; the largest of the Hugging Face Hub, with a name for each of 21,000 labels,
belong into a ConfigMap."""


class Transformer(Door):
    """Dimensions of a dense transformer, for a model that no preset describes."""

    family: Literal["decoder", "encoder"] = Field(
        default="decoder", description="decoder attends to earlier tokens only (GPT, Llama), encoder to all (BERT)."
    )
    layers: int = Field(ge=1, le=1024, description="Transformer blocks.")
    hidden_size: int = Field(ge=1, le=2**18, description="Width of the residual stream.")
    attention_heads: int = Field(ge=1, le=4096, description="Query heads of one block.")
    key_value_heads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Key and value heads; fewer than attentionHeads is grouped-query attention.",
    )
    head_size: int | None = Field(
        default=None, ge=1, le=4096, description="Width of one head; hiddenSize / attentionHeads if absent."
    )
    feed_forward_size: int | None = Field(
        default=None, ge=1, le=2**20, description="Inner width of the MLP; four times hiddenSize if absent."
    )
    vocabulary_size: int = Field(ge=1, le=2**22, description="Rows of the embedding and columns of the output layer.")
    learned_positions: int = Field(
        default=0, ge=0, le=MAX_SEQUENCE, description="Rows of a learned position embedding; 0 if there is none."
    )
    rotary: bool = Field(default=False, description="Whether queries and keys are rotated by position (RoPE).")
    gated_feed_forward: bool = Field(default=False, description="Whether the MLP has a gate (SwiGLU and its kin).")
    rms_norm: bool = Field(default=False, description="RMSNorm instead of LayerNorm.")
    bias: bool = Field(default=True, description="Whether linear layers add a bias.")
    tied_embeddings: bool = Field(default=True, description="Whether the output layer shares the embedding's weights.")
    dropout: bool = Field(default=False, description="Whether the training run uses dropout.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.headSize) || self.hiddenSize % self.attentionHeads == 0",
            lambda m: m.head_size is not None or m.hidden_size % m.attention_heads == 0,
            "hiddenSize is not a multiple of attentionHeads",
            "correct one of them, or give headSize",
        ),
        Rule(
            "!has(self.keyValueHeads) || self.attentionHeads % self.keyValueHeads == 0",
            lambda m: m.key_value_heads is None or m.attention_heads % m.key_value_heads == 0,
            "attentionHeads is not a multiple of keyValueHeads",
            "let every key/value head serve the same number of query heads",
        ),
    )

    def model(self, name: str) -> Model:
        """These dimensions as a `Model`."""
        return models.model_from(
            {
                "name": name,
                "family": self.family,
                "layers": self.layers,
                "hidden": self.hidden_size,
                "heads": self.attention_heads,
                "kv_heads": self.key_value_heads or self.attention_heads,
                "head_dim": self.head_size or self.hidden_size // self.attention_heads,
                "ffn_hidden": self.feed_forward_size or 4 * self.hidden_size,
                "vocab": self.vocabulary_size,
                "positions": self.learned_positions,
                "gated_mlp": self.gated_feed_forward,
                "rms_norm": self.rms_norm,
                "rotary": self.rotary,
                "causal": self.family == "decoder",
                "bias": self.bias,
                "tied_embeddings": self.tied_embeddings,
                "dropout": self.dropout,
            }
        )


OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
"""What the API server allows as a name. The operator asks for the object by it, so that nothing else may pass: a name
with `../` in it would lead to the objects of another namespace."""
KEY_NAME = r"^[-._a-zA-Z0-9]+$"
"""What it allows as a key of a ConfigMap."""


class ConfigMapKeyRef(Door):
    """A key of a ConfigMap in the job's namespace."""

    name: str = Field(
        min_length=1,
        max_length=253,
        pattern=OBJECT_NAME,
        description="Name of the ConfigMap.",
    )
    key: str = Field(
        default="config.json",
        min_length=1,
        max_length=253,
        pattern=KEY_NAME,
        description="Key whose value is the text of a config.json.",
    )


class HuggingFace(Door):
    """A model as the Hugging Face Hub describes it. Exactly one of the fields is set."""

    config: dict[str, Any] | None = Field(
        default=None,
        max_length=512,
        description="Content of the model's config.json; keys that do not decide a dimension are ignored.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    config_map_key_ref: ConfigMapKeyRef | None = Field(
        default=None, description="Where that content is kept, in the job's namespace."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.config) != has(self.configMapKeyRef)",
            lambda m: (m.config is None) != (m.config_map_key_ref is None),
            "needs exactly one of config and configMapKeyRef",
            "write for instance configMapKeyRef: {name: my-model}",
        ),
    )

    @field_validator("config")
    @classmethod
    def _check_config(cls, config: dict[str, Any] | None) -> dict[str, Any] | None:
        """Text that nobody could mean is refused before anything walks through it."""
        problem = None
        if _is_deeper(config, MAX_CONFIG_DEPTH):
            problem = f"is nested more than {MAX_CONFIG_DEPTH} deep"
        elif len(json.dumps(config, default=str)) > MAX_CONFIG_BYTES:
            problem = f"is larger than {MAX_CONFIG_BYTES // 1024} KiB"
        if problem:
            remedy = "keep the keys that decide dimensions, or keep it in a ConfigMap and name that in configMapKeyRef"
            raise PydanticCustomError("rule", "{problem}", {"problem": problem, "remedy": remedy})
        return config


def _is_deeper(value: object, levels: int) -> bool:
    """Whether anything lies more than `levels` below the value."""
    found = [value]
    for _ in range(levels + 1):
        inner = [
            each.values() if isinstance(each, Mapping) else each for each in found if isinstance(each, Mapping | list)
        ]
        found = [each for children in inner for each in children]
        if not found:
            return False
    return True


class GraphKeyRef(ConfigMapKeyRef):
    """A key of a ConfigMap in the job's namespace that holds a graph."""

    key: str = Field(
        default="graph.json",
        min_length=1,
        max_length=253,
        pattern=KEY_NAME,
        description="Key that holds what `tilecast trace` wrote (under data), or an ONNX file (under binaryData).",
    )


class GraphRef(Door):
    """A model as the graph of its operators, without weights."""

    config_map_key_ref: GraphKeyRef = Field(description="Where the graph is kept, in the job's namespace.")


class ModelSource(Door):
    """The architecture: a preset by name, its dimensions, a config, or a graph. Exactly one of the fields is set."""

    preset: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        description="Name of an architecture that Tilecast knows, for instance llama-2-7b, bert-large or resnet-50.",
    )
    transformer: Transformer | None = Field(default=None, description="Dimensions of a dense transformer.")
    hugging_face: HuggingFace | None = Field(default=None, description="The config.json of a Hugging Face model.")
    graph_ref: GraphRef | None = Field(default=None, description="A graph of operators in a ConfigMap.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.preset), has(self.transformer), has(self.huggingFace), has(self.graphRef)]"
            ".filter(x, x).size() == 1",
            lambda m: [m.preset, m.transformer, m.hugging_face, m.graph_ref].count(None) == 3,
            "needs exactly one of preset, transformer, huggingFace and graphRef",
            "write for instance preset: llama-2-7b",
        ),
    )


class BatchRange(Door):
    """The global batches that a job may be given."""

    min: int = Field(ge=1, le=MAX_BATCH, description="Smallest global batch.")
    max: int = Field(ge=1, le=MAX_BATCH, description="Largest global batch.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("self.min <= self.max", lambda m: m.min <= m.max, "min is above max", "swap them"),
    )


class Training(Door):
    """How the model is trained (or, for inference, run)."""

    sequence_length: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SEQUENCE,
        description="Tokens of one sample, padding included. Required by models that read tokens; images have none, "
        "and a graph of fixed length says it itself.",
    )
    global_batch_size: int = Field(ge=1, le=MAX_BATCH, description="Samples of one optimizer step, over all GPUs.")
    global_batch_size_range: BatchRange | None = Field(
        default=None,
        description="Global batches that the job may be given instead; absent keeps globalBatchSize. Plans of unlike "
        "batches compare by the sample, and steps are those of globalBatchSize.",
    )
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BATCH,
        description="Samples of one forward pass on one GPU; absent leaves it to the search.",
    )
    precision: Precision = Field(default="bf16", description="Precision of the matrix multiplications.")
    allowed_precisions: list[Precision] = Field(
        default_factory=list,
        max_length=8,
        description="Every precision that the job may be trained in, its own among them; empty allows that one only.",
    )
    framework: Framework | None = Field(
        default=None,
        description="What runs the training: it limits plans to those that it executes and decides what memory holds; "
        "absent allows every plan, with 16-bit weights and gradients and FP32 masters.",
    )
    optimizer: Optimizer | None = Field(
        default=None,
        description="Optimizer, which decides the bytes of its state; adamw if absent, none for inference.",
    )
    fused_optimizer: bool = Field(
        default=True,
        description="Whether the weight update is one kernel; false prices one pass over memory per arithmetic step.",
    )
    fused_loss: bool = Field(
        default=False,
        description="Whether softmax and cross-entropy are one kernel (Liger, Apex, flash-attn), which keeps no FP32 "
        "copy of the logits; compiled execution has it anyway.",
    )
    offload: Offload = Field(
        default="none",
        description="What lives in the host's memory: optimizer keeps the optimizer's states there and updates the "
        "weights on the CPU, parameters (ZeRO stage 3, no pipeline) the weights too.",
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = Field(
        default="auto",
        description="What the backward pass computes again to save memory; auto leaves it to the search.",
    )
    attention: Attention = Field(
        default="auto",
        description="flash never writes the attention matrix to memory, eager does; auto takes flash if it runs.",
    )
    execution: Execution = Field(
        default="eager", description="How kernels are launched, which decides the overhead of each."
    )
    memory_format: MemoryFormat = Field(
        default="contiguous",
        description="How images lie in memory: contiguous (NCHW, PyTorch's default), around whose convolutions tensor "
        "cores need copies, or channelsLast (NHWC). Compiled and XLA jobs choose for themselves.",
    )
    input_samples_per_second: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="Samples that the input pipeline (reading, decoding, augmenting) of each node delivers every "
        "second; no step is shorter than they take. Absent leaves the input pipeline out of the forecast.",
    )
    bucket_mib: int | None = Field(
        default=None,
        alias="bucketMiB",
        ge=1,
        le=65536,
        description="Size in MiB of the buckets in which gradients are reduced (DistributedDataParallel's "
        "bucket_cap_mb); absent takes the framework's.",
    )
    gradient_sync: GradientSync = Field(
        default="allReduce",
        description="How replicas sum gradients: among themselves, or by parameter servers of their own on the "
        "network, which add to no bill.",
    )
    parameter_servers: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Servers that share the gradients, each on a node of its own with the pool's network; absent is "
        "one for each node that holds replicas.",
    )
    server_updates: ServerUpdates | None = Field(
        default=None,
        description="Whether parameter servers wait for the gradients of all replicas before they answer; "
        "synchronous if absent.",
    )
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Train only LoRA adapters of this rank beside the dense layers; absent trains every weight.",
    )
    quantization: Quantization | None = Field(
        default=None,
        description="What the frozen weights of the layers are held in under LoRA: nf4 is 4 bits and scales (QLoRA); "
        "absent holds them in 16 bits.",
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="Optimizer steps of the whole run; with them time and cost to finish appear.",
    )
    tokens: int | None = Field(default=None, ge=1, le=10**18, description="Tokens of the whole run, instead of steps.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.microBatchSize) || self.globalBatchSize % self.microBatchSize == 0",
            lambda m: m.micro_batch_size is None or m.global_batch_size % m.micro_batch_size == 0,
            "globalBatchSize is not a multiple of microBatchSize",
            "correct one of them, or leave microBatchSize out",
        ),
        Rule(
            "!(has(self.steps) && has(self.tokens))",
            lambda m: m.steps is None or m.tokens is None,
            "steps and tokens both say how long the run is",
            "keep one of them",
        ),
        Rule(
            "!has(self.tokens) || has(self.sequenceLength)",
            lambda m: m.tokens is None or m.sequence_length is not None,
            "tokens needs sequenceLength",
            "give sequenceLength, or steps instead of tokens",
        ),
        Rule(
            "!has(self.quantization) || has(self.loraRank)",
            lambda m: m.quantization is None or m.lora_rank is not None,
            "quantization needs loraRank, since quantized weights have no gradients",
            "give loraRank, or leave quantization out",
        ),
        Rule(
            "!has(self.quantization) || (self.precision in ['fp16', 'bf16'] && (!has(self.allowedPrecisions) || "
            "self.allowedPrecisions.all(p, p in ['fp16', 'bf16'])))",
            lambda m: m.quantization is None or {m.precision, *m.allowed_precisions} <= {"fp16", "bf16"},
            "quantization needs a 16-bit precision, in which products read the weights",
            "use bf16 or fp16, or leave quantization out",
        ),
        Rule(
            "!(has(self.parameterServers) || has(self.serverUpdates)) || self.gradientSync == 'parameterServer'",
            lambda m: (m.parameter_servers or m.server_updates) is None or m.gradient_sync == "parameterServer",
            "parameterServers and serverUpdates say nothing of gradientSync allReduce",
            "leave them out, or use gradientSync parameterServer",
        ),
        Rule(
            "!has(self.globalBatchSizeRange) || (self.globalBatchSizeRange.min <= self.globalBatchSize && "
            "self.globalBatchSize <= self.globalBatchSizeRange.max)",
            lambda m: (
                m.global_batch_size_range is None
                or m.global_batch_size_range.min <= m.global_batch_size <= m.global_batch_size_range.max
            ),
            "globalBatchSize is outside globalBatchSizeRange",
            "choose one within it",
        ),
        Rule(
            "!has(self.allowedPrecisions) || self.allowedPrecisions.size() == 0 || "
            "self.precision in self.allowedPrecisions",
            lambda m: not m.allowed_precisions or m.precision in m.allowed_precisions,
            "precision is not among allowedPrecisions",
            "add it there, or choose one of them",
        ),
    )


class JobConstraints(Door):
    """Limits on the answer. What is absent is not limited."""

    gpus: int | None = Field(default=None, ge=1, le=MAX_GPUS, description="Use exactly this many GPUs.")
    max_gpus: int | None = Field(default=None, ge=1, le=MAX_GPUS, description="Use at most this many GPUs.")
    max_nodes: int | None = Field(default=None, ge=1, le=MAX_GPUS, description="Use at most this many nodes.")
    max_tensor_parallel: int | None = Field(
        default=None, ge=1, le=4096, description="Split no layer over more GPUs than this."
    )
    allowed_pools: list[str] = Field(
        default_factory=list, max_length=64, description="Names of the pools to consider; empty considers every pool."
    )
    allow_sharing: bool = Field(
        default=False,
        description="Let the job run on part of a GPU: pools of MIG slices are considered too.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.gpus) || !has(self.maxGpus) || self.gpus <= self.maxGpus",
            lambda m: m.gpus is None or m.max_gpus is None or m.gpus <= m.max_gpus,
            "gpus is above maxGpus",
            "lower gpus or raise maxGpus",
        ),
    )


class BaselinePlan(Door):
    """How the job is split today. Degrees that are absent are 1; data takes the GPUs that remain."""

    data: int | None = Field(default=None, ge=1, le=MAX_GPUS, description="Replicas that see different samples.")
    tensor: int = Field(default=1, ge=1, le=4096, description="GPUs that share each layer.")
    pipeline: int = Field(default=1, ge=1, le=4096, description="Stages of consecutive layers.")
    context: int = Field(default=1, ge=1, le=4096, description="GPUs that share one sequence.")
    expert: int = Field(default=1, ge=1, le=4096, description="GPUs that share the experts.")
    virtual_stages: int = Field(default=1, ge=1, le=1024, description="Pieces of the model that each stage holds.")
    zero_stage: int | None = Field(
        default=None, ge=0, le=3, description="What data-parallel ranks shard; absent takes the fastest that fits."
    )
    micro_batch_size: int | None = Field(
        default=None, ge=1, le=MAX_BATCH, description="Samples of one forward pass; absent takes the fastest that fits."
    )
    activation_checkpointing: Checkpointing | None = Field(
        default=None, description="What is recomputed; absent takes the fastest that fits."
    )

    def stated(self) -> Stated:
        """The same as a `Stated`."""
        return Stated(
            data=self.data,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            expert=self.expert,
            virtual_stages=self.virtual_stages,
            zero_stage=self.zero_stage,
            micro_batch=self.micro_batch_size,
            checkpointing=self.activation_checkpointing,
        )


class JobBaseline(Door):
    """What you would run today; it is priced as a row of its own."""

    pool: str = Field(min_length=1, max_length=63, description="Name of the pool.")
    gpus: int = Field(ge=1, le=MAX_GPUS, description="Number of GPUs.")
    plan: BaselinePlan | None = Field(
        default=None, description="How the job is split; absent takes the best plan on these GPUs."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.plan) || (has(self.plan.data) ? self.plan.data * self.plan.tensor * self.plan.pipeline * "
            "self.plan.context == self.gpus : "
            "self.gpus % (self.plan.tensor * self.plan.pipeline * self.plan.context) == 0)",
            lambda m: m.plan is None or _multiply(m.plan, m.gpus),
            "the degrees of plan do not multiply to gpus",
            "correct one of them",
        ),
    )


def _multiply(plan: BaselinePlan, gpus: int) -> bool:
    others = plan.tensor * plan.pipeline * plan.context
    return gpus % others == 0 if plan.data is None else plan.data * others == gpus


class JobBudget(Door):
    """What the whole run may cost."""

    amount: float = Field(gt=0, le=1e15, description="The amount.")
    currency: str = Field(
        default="USD", pattern="^[A-Z]{3}$", max_length=3, description="Its currency, that of the pools' prices."
    )


TARGETS: Mapping[str, str] = {
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "Job": "batch/v1",
}
"""API version of each kind of job that can be advised."""


class TargetRef(Door):
    """A job of another kind in the same namespace."""

    api_version: str = Field(min_length=1, max_length=63, description="API version of the kind, for instance batch/v1.")
    kind: Literal["TrainJob", "PyTorchJob", "JobSet", "Job"] = Field(description="Kind of the job.")
    name: str = Field(min_length=1, max_length=253, pattern=OBJECT_NAME, description="Name of the job.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"{json.dumps(dict(TARGETS))}[self.kind] == self.apiVersion".replace('"', "'"),
            lambda m: TARGETS[m.kind] == m.api_version,
            "apiVersion is not that of kind",
            f"write one of {', '.join(f'{version} {kind}' for kind, version in TARGETS.items())}",
        ),
    )


class TrainingJobSpec(Door):
    """The desired training run and the limits of the advice."""

    workload: Literal["training", "inference"] = Field(
        default="training",
        description="training prices forward, backward and optimizer; inference prices forward alone.",
    )
    model: ModelSource = Field(description="Architecture of the model.")
    training: Training = Field(description="How it is trained.")
    constraints: JobConstraints | None = Field(default=None, description="Limits on the answer.")
    objective: Objective = Field(
        default="time",
        description="What is best: the shortest step (time), the cheapest step (cost), the shortest run "
        "(timeToFinish), the cheapest run that meets deadlineSeconds (cheapestBeforeDeadline), the shortest that keeps "
        "to the budget (fastestWithinBudget), or the fewest GPUs that hold the job (fewestGpus).",
    )
    deadline_seconds: int | None = Field(
        default=None, ge=1, le=10**11, description="How long the run may take, for cheapestBeforeDeadline."
    )
    budget: JobBudget | None = Field(default=None, description="What the run may cost, for fastestWithinBudget.")
    baseline: JobBaseline | None = Field(default=None, description="What you would run today, for comparison.")
    observation_query: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="PromQL that gives the job's step in seconds, where the operator asks Prometheus: $namespace and "
        "$name stand for the job's. Absent takes the pool's, or the operator's.",
    )
    target_ref: TargetRef | None = Field(
        default=None,
        description="The job that this advice is for: its own GPUs are the baseline, and it is annotated as well.",
    )
    mode: Mode = Field(
        default="Advise",
        description="Advise writes status, annotations and Events; Off writes the status only; Initial also writes the "
        "node choice into the job of targetRef before it starts. Write Off in quotes.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.mode) || self.mode != 'Initial' || has(self.targetRef)",
            lambda m: m.mode != "Initial" or m.target_ref is not None,
            "mode Initial has no job to place",
            "name one in targetRef, or annotate the job itself with tilecast.dev/mode: Initial",
        ),
        Rule(
            "self.workload == 'training' || !has(self.training.optimizer) || self.training.optimizer == 'none'",
            lambda m: m.workload == "training" or m.training.optimizer in (None, "none"),
            "inference has no optimizer",
            "leave training.optimizer out",
        ),
        Rule(
            "self.workload == 'training' || self.training.activationCheckpointing in ['auto', 'none']",
            lambda m: m.workload == "training" or m.training.activation_checkpointing in ("auto", "none"),
            "inference has no backward pass to recompute for",
            "leave training.activationCheckpointing out",
        ),
        Rule(
            "!(self.objective in ['timeToFinish', 'cheapestBeforeDeadline', 'fastestWithinBudget']) || "
            "has(self.training.steps) || has(self.training.tokens)",
            lambda m: m.objective not in FINISHING or (m.training.steps or m.training.tokens) is not None,
            "the objective needs to know how long the run is",
            "give training.steps or training.tokens",
        ),
        Rule(
            "(self.objective == 'cheapestBeforeDeadline') == has(self.deadlineSeconds)",
            lambda m: (m.objective == "cheapestBeforeDeadline") == (m.deadline_seconds is not None),
            "deadlineSeconds and objective cheapestBeforeDeadline go together",
            "give both or neither",
        ),
        Rule(
            "(self.objective == 'fastestWithinBudget') == has(self.budget)",
            lambda m: (m.objective == "fastestWithinBudget") == (m.budget is not None),
            "budget and objective fastestWithinBudget go together",
            "give both or neither",
        ),
    )


class Condition(Door):
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


class Parallelism(Door):
    """How the job is split, in Megatron's words."""

    data: int = Field(ge=1, description="Replicas that see different samples.")
    tensor: int = Field(ge=1, description="GPUs that share each layer.")
    pipeline: int = Field(ge=1, description="Stages of consecutive layers.")
    context: int = Field(ge=1, description="GPUs that share one sequence.")
    expert: int = Field(ge=1, description="GPUs that share the experts.")
    zero_stage: int = Field(
        ge=0, le=3, description="What data-parallel ranks shard: 1 optimizer, 2 gradients, 3 weights."
    )
    micro_batch_size: int = Field(ge=1, description="Samples of one forward pass on one GPU.")
    gradient_accumulation: int = Field(ge=1, description="Micro-batches of one rank and optimizer step.")
    activation_checkpointing: Checkpointing = Field(description="What is recomputed.")
    virtual_stages: int = Field(default=1, ge=1, description="Pieces of the model that each stage holds.")
    sequence_parallel: bool = Field(
        default=False, description="Whether tensor ranks also share what lies between layers."
    )


class StepSeconds(Door):
    """The forecast of one optimizer step with its range."""

    target: float = Field(ge=0, description="The forecast.")
    lower_bound: float = Field(ge=0, description="Lower end of the 90 % range.")
    upper_bound: float = Field(ge=0, description="Upper end of the 90 % range.")


class MemoryBytes(Door):
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


class Alternative(Door):
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
    reason: str = Field(max_length=256, description="What decides its place.")


class Recommendation(Door):
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


class Forecast(Door):
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
    followed: bool | None = Field(default=None, description="Whether it runs as recommended.")


class Observed(Door):
    """The measured step."""

    step_seconds: float = Field(gt=0, description="Median of the newest reports, outliers left out.")
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


class ErrorRatio(Door):
    """(predicted - observed) / observed: +0.3 is a forecast 30 % too slow."""

    raw_ratio: float = Field(description="Of the forecast before any correction.")
    calibrated_ratio: float = Field(description="Of the forecast as it was given.")


class RejectedPool(Door):
    """Why a pool has no plan."""

    pool: str = Field(max_length=63, description="Name of the pool.")
    code: str = Field(max_length=64, description="The reason as a stable code.")
    message: str = Field(max_length=512, description="The reason with the number that decided.")
    remedy: str = Field(max_length=512, description="The nearest change that would help.")


class PassedOver(Door):
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


class ModelVersion(Door):
    """The predictor that made the forecast."""

    version: str = Field(max_length=64, description="Version of the utilization model.")
    sha256: str = Field(max_length=64, description="Digest of its file.")


class Summary(Door):
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


class TrainingJobStatus(Door):
    """The answer. Written by the operator only."""

    observed_generation: int | None = Field(default=None, ge=0, description="Generation of the spec that was advised.")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Ready, RecommendationProvided, LowConfidence, CapacityAvailable, Applied, ObservationsAvailable.",
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
    forecast: Forecast | None = Field(default=None, description="Present once the job has started.")
    observed: Observed | None = Field(default=None, description="Present once a step was measured.")
    error: ErrorRatio | None = Field(default=None, description="Signed relative errors of the forecast.")
    model: ModelVersion | None = Field(default=None, description="The predictor that made the forecast.")
    inputs_hash: str | None = Field(
        default=None, max_length=64, description="Digest of everything that decided the advice."
    )
    summary: Summary | None = Field(default=None, description="Flat strings for kubectl get.")


def parse(document: Mapping[str, Any]) -> TrainingJobSpec:
    """The spec of a TrainingJob document, checked field by field.

    Raises:
        SpecError: with the path of the first field that is wrong.
    """
    return check(TrainingJobSpec, envelope(document, KIND)[1], "spec")


def read(document: Mapping[str, Any], config_maps: Mapping[str, Mapping[str, Any]] | None = None) -> Request:
    """The advice that a TrainingJob document asks for.

    Args:
        document: the TrainingJob.
        config_maps: the ConfigMaps that are at hand, by name.

    Raises:
        SpecError: a field is wrong, or the model is unknown.
    """
    name, _ = envelope(document, KIND)
    spec = parse(document)
    stored = None
    if (found := reference(spec)) is not None:
        stored = content(found, (config_maps or {}).get(found.name))
    return request(name, spec, stored)


@dataclass(frozen=True, slots=True)
class Reference:
    """A key of a ConfigMap that a job's model is in."""

    field: str
    """What errors call it."""
    name: str
    key: str
    otherwise: str
    """What a user can do who has no ConfigMap."""


def reference(spec: TrainingJobSpec) -> Reference | None:
    """The place of a job's model, if it is in a ConfigMap."""
    model = spec.model
    if model.graph_ref is not None:
        found: ConfigMapKeyRef = model.graph_ref.config_map_key_ref
        return Reference("spec.model.graphRef.configMapKeyRef", found.name, found.key, "choose a preset")
    if model.hugging_face is None or model.hugging_face.config_map_key_ref is None:
        return None
    found, field = model.hugging_face.config_map_key_ref, "spec.model.huggingFace"
    return Reference(f"{field}.configMapKeyRef", found.name, found.key, f"write the config under {field}.config")


def content(found: Reference, config_map: Mapping[str, Any] | None) -> bytes:
    """What a ConfigMap holds under the key of a reference, text (data) or bytes (binaryData).

    Args:
        found: the reference.
        config_map: the ConfigMap; None where there is none.

    Raises:
        SpecError: the ConfigMap or its key is missing.
    """
    if config_map is None:
        remedy = f"create it beside the job, or {found.otherwise}"
        raise SpecError(f"{found.field}.name", f"there is no ConfigMap {found.name}", remedy)
    text, binary = (mapping(config_map.get(part)) for part in ("data", "binaryData"))
    if found.key in text:
        return str(text[found.key]).encode()
    if found.key not in binary:
        keys = ", ".join(sorted(str(key) for key in (*text, *binary))[:8]) or "nothing"
        problem = f"ConfigMap {found.name} has no {found.key}"
        raise SpecError(f"{found.field}.key", problem, f"it holds {keys}"[:200])
    try:
        return base64.b64decode(str(binary[found.key]))
    except ValueError:
        problem = f"{found.key} of ConfigMap {found.name} is not base64"
        raise SpecError(f"{found.field}.key", problem, "store it with `kubectl create configmap --from-file`") from None


def request(name: str, spec: TrainingJobSpec, stored: bytes | None = None) -> Request:
    """A checked spec as a `Request`.

    Args:
        name: of the job.
        spec: of the job.
        stored: what is at the spec's `reference`, if it has one.

    Raises:
        SpecError: the model is unknown or cannot be read, or the sequence length does not suit it.
    """
    training = spec.training
    model = _model(name, spec, stored)
    sequence_length = _sequence_length(model, training)
    steps = training.steps
    if training.tokens is not None:
        steps = -(-training.tokens // (training.global_batch_size * sequence_length))
    is_training = spec.workload == "training"
    checkpointing = "none" if not is_training else training.activation_checkpointing
    workload = Workload(
        model=model,
        sequence_length=sequence_length,
        global_batch=training.global_batch_size,
        precision=training.precision,
        training=is_training,
        optimizer=(training.optimizer or "adamw") if is_training else "none",
        micro_batch=training.micro_batch_size,
        checkpointing=None if checkpointing == "auto" else checkpointing,
        attention=training.attention,
        execution=training.execution,
        memory_format=training.memory_format,
        bucket_mib=training.bucket_mib,
        gradient_sync=training.gradient_sync,
        parameter_servers=training.parameter_servers,
        server_updates=training.server_updates or "synchronous",
        fused_optimizer=training.fused_optimizer,
        fused_loss=training.fused_loss,
        offload=training.offload if is_training else "none",
        input_samples_per_s=training.input_samples_per_second,
        steps=steps,
        lora_rank=training.lora_rank or 0,
        frozen_bits=16 if training.quantization is None else 4,
        framework=training.framework,
    )
    _check_sync(training)
    batches = training.global_batch_size_range
    limits = spec.constraints or JobConstraints()
    return Request(
        name=name,
        workload=workload,
        objective=spec.objective,
        constraints=Constraints(
            gpus=limits.gpus,
            max_gpus=limits.max_gpus,
            max_nodes=limits.max_nodes,
            max_tensor=limits.max_tensor_parallel,
            allowed_pools=tuple(limits.allowed_pools),
            allow_sharing=limits.allow_sharing,
        ),
        baseline=_baseline(spec.baseline) if spec.baseline else None,
        deadline_s=None if spec.deadline_seconds is None else float(spec.deadline_seconds),
        budget=Budget(spec.budget.amount, spec.budget.currency) if spec.budget else None,
        batches=(batches.min, batches.max) if batches else None,
        precisions=tuple(training.allowed_precisions),
        tokens=training.tokens,
    )


def _check_sync(training: Training) -> None:
    """The framework reduces gradients in buckets, or by servers, where the job says so."""
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


def _baseline(given: JobBaseline) -> Baseline:
    return Baseline(given.pool, given.gpus, given.plan.stated() if given.plan else None)


def _model(name: str, spec: TrainingJobSpec, stored: bytes | None) -> Model:
    source, found = spec.model, reference(spec)
    if found is not None and stored is None:
        raise SpecError(found.field, "is not read here", found.otherwise)
    if found is not None and stored is not None and source.graph_ref is not None:
        return traced.model(found.name, _trace(found, stored, spec.training.sequence_length))
    if source.hugging_face is not None:
        config = source.hugging_face.config or {}
        if found is not None and stored is not None:
            config = _json(found, stored, "store the text of the model's config.json")
        return huggingface.model(config, "spec.model.huggingFace.config")
    try:
        if source.transformer is not None:
            return source.transformer.model(name)
        return models.preset(str(source.preset))
    except SpecError as error:
        field = "spec.model.preset" if source.transformer is None else "spec.model.transformer"
        raise SpecError(field, error.problem, error.remedy) from None


def _json(found: Reference, stored: bytes, remedy: str) -> dict[str, Any]:
    """The mapping that a ConfigMap's text is."""
    try:
        value = json.loads(stored)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise SpecError(f"{found.field}.key", f"{found.key} of ConfigMap {found.name} is no JSON mapping", remedy)
    return value


def _trace(found: Reference, stored: bytes, sequence: int | None) -> Trace:
    """The graph that a ConfigMap holds: a document of `tilecast trace`, which starts like JSON, or an ONNX file."""
    field = f"{found.field}.key"
    if stored.lstrip()[:1] == b"{":
        value = _json(found, stored, "store what `tilecast trace` wrote")
        return graph_document.read(value, field)
    try:
        return onnx_file.parse(stored, field, sequence)
    except SpecError as error:
        if error.field != "--seq":
            raise
        raise SpecError("spec.training.sequenceLength", error.problem, error.remedy) from None


def _sequence_length(model: Model, training: Training) -> int:
    """Tokens of one sample; 1 for a model without a vocabulary, which counts samples; of a graph what it was traced
    with; where nothing is said, what a model pads every text to (CLIP, Whisper)."""
    field = "spec.training.sequenceLength"
    given = training.sequence_length
    if model.trace is not None:
        if given not in (None, 1) and model.trace.sequence == 1:
            raise SpecError(field, f"{model.name} reads no tokens", "leave it out")
        if given not in (None, model.trace.sequence):
            problem = f"{model.name} was traced with {model.trace.sequence} tokens per sample"
            raise SpecError(field, problem, "leave it out, or trace anew")
        return model.trace.sequence
    if model.vocab == 0:
        if given not in (None, 1):
            takes = "reads images, not tokens" if models.reads_images(model) else "takes samples of one length"
            raise SpecError(field, f"{model.name} {takes}", "leave it out")
        return 1
    if given is None and (usual := int(model.extra.get("text_length", 0))):
        return usual
    if given is None:
        raise SpecError(field, "is missing", f"{model.name} reads tokens: say how many per sample")
    if model.positions and given > model.positions:
        raise SpecError(field, f"{given} is above the {model.positions} positions that {model.name} has", "shorten it")
    return given
