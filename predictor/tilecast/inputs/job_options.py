"""Options of a job: command-line flags that are also keywords of the Python API, and set fields of the spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from tilecast.objectives import OBJECTIVES
from tilecast.spec import (
    ATTENTIONS,
    EXECUTIONS,
    EXPERT_DISPATCHES,
    EXPERT_OVERLAPS,
    GRADIENT_SYNCS,
    LORA_TARGETS,
    MEMORY_FORMATS,
    OPTIMIZERS,
    PIPELINE_SCHEDULES,
    PRECISIONS,
    QUANTIZATIONS,
    SERVER_UPDATES,
    STATE_BYTES,
    WEIGHTS,
    Framework,
)


def split_words(text: str) -> list[str]:
    """Return the words of a text that separates them by commas or plus signs."""
    return [word.strip() for word in text.replace("+", ",").split(",")]


@dataclass(frozen=True, slots=True)
class JobOption:
    """An option of a job: the path of the spec field that it sets, and its command-line argument."""

    path: str
    help: str | None = None
    type: Callable[[str], object] = str
    choices: Sequence[str] | None = None
    metavar: str | None = None


BARE_OPTIONS: Mapping[str, JobOption] = {
    "seq": JobOption("training.sequenceLength", "tokens per sample, for a bare model", int),
    "batch": JobOption("training.globalBatchSize", "samples per optimizer step, for a bare model", int),
    "precision": JobOption("training.precision", "for a bare model; bf16 if absent", choices=PRECISIONS),
    "optimizer": JobOption("training.optimizer", "for a bare model; adamw if absent", choices=OPTIMIZERS),
    "weights": JobOption(
        "training.weights",
        "how 16-bit training holds them, for a bare model; the framework's if absent",
        choices=WEIGHTS,
    ),
    "gradient_precision": JobOption(
        "training.gradientPrecision", "for a bare model; the framework's if absent", choices=("fp32", "bf16", "fp16")
    ),
    "moment_precision": JobOption(
        "training.momentPrecision", "of the optimizer, for a bare model; fp32 if absent", choices=tuple(STATE_BYTES)
    ),
    "loss_chunks": JobOption("training.lossChunks", "pieces of the loss, for a bare model; 1 if absent", int),
    "lora_rank": JobOption("training.loraRank", "train only LoRA adapters of this rank, for a bare model", int),
    "lora_targets": JobOption(
        "training.loraTargets", "dense layers with adapters, for a bare model; all if absent", choices=LORA_TARGETS
    ),
    "quantization": JobOption(
        "training.quantization", "of frozen weights under --lora-rank, for a bare model", choices=QUANTIZATIONS
    ),
    "attention": JobOption(
        "training.attention",
        "for a bare model; what the framework chooses if absent",
        choices=ATTENTIONS,
    ),
    "execution": JobOption("training.execution", "for a bare model; eager if absent", choices=EXECUTIONS),
    "memory_format": JobOption(
        "training.memoryFormat", "of images, for a bare model; contiguous if absent", choices=MEMORY_FORMATS
    ),
    "recompute_modules": JobOption(
        "training.recomputeModules",
        "modules of a layer to recompute, such as layernorm,moe_act, for a bare model",
        split_words,
        metavar="MODULES",
    ),
    "recompute_layers": JobOption(
        "training.recomputeLayers", "layers of each stage to recompute whole, for a bare model", int
    ),
    "offload_activations": JobOption(
        "training.offloadActivations", "share of activations in the host's memory, for a bare model", float
    ),
    "shard_degree": JobOption(
        "training.shardDegree", "data-parallel ranks that share weights and states (HSDP), for a bare model", int
    ),
    "bucket_mib": JobOption("training.bucketMiB", "of gradients, for a bare model; the framework's if absent", int),
    "pipeline_schedule": JobOption(
        "training.pipelineSchedule", "for a bare model; 1f1b or interleaved if absent", choices=PIPELINE_SCHEDULES
    ),
    "pipeline_layout": JobOption(
        "training.pipelineLayout", "layers of each virtual stage, such as Et*3|(tt|)*29,m|L", metavar="LAYOUT"
    ),
    "gradient_sync": JobOption(
        "training.gradientSync", "for a bare model; allReduce if absent", choices=GRADIENT_SYNCS
    ),
    "parameter_servers": JobOption("training.parameterServers", "for a bare model; one for each node if absent", int),
    "server_updates": JobOption(
        "training.serverUpdates", "for a bare model; synchronous if absent", choices=SERVER_UPDATES
    ),
    "expert_dispatch": JobOption(
        "training.expertDispatch", "of tokens, for a bare model; the framework's if absent", choices=EXPERT_DISPATCHES
    ),
    "expert_overlap": JobOption(
        "training.expertOverlap",
        "what runs beside --expert-dispatch, for a bare model; the framework's if absent",
        choices=EXPERT_OVERLAPS,
    ),
    "framework": JobOption(
        "training.framework", "that runs the training, for a bare model", choices=get_args(Framework)
    ),
    "framework_version": JobOption(
        "training.frameworkVersion", "of --framework, such as 2.6 of PyTorch; a recent one if absent", metavar="VERSION"
    ),
}
"""Options of a model that is given without a job, by name."""

ANY_OPTIONS: Mapping[str, JobOption] = {
    "steps": JobOption("training.steps", "optimizer steps, for the time and cost to finish", int),
    "input_samples_per_second": JobOption(
        "training.inputSamplesPerSecond",
        "what the input pipeline of each node delivers; no step is shorter than that takes",
        float,
        metavar="RATE",
    ),
    "max_gpus": JobOption("constraints.maxGpus", type=int),
    "objective": JobOption("objective", choices=list(OBJECTIVES)),
    "deadline": JobOption("deadlineSeconds", "for cheapestBeforeDeadline: seconds, or 90min, 36h, 14d", metavar="TIME"),
    "budget": JobOption("budget", "for fastestWithinBudget: 5000 (USD), or 5000EUR", metavar="AMOUNT"),
}
"""Options of every job, by name."""

JOB_OPTIONS: Mapping[str, JobOption] = {**BARE_OPTIONS, **ANY_OPTIONS}


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The user's description of a job, with values of options that override fields of its spec."""

    job: object
    """A preset's name, a path or "-", the mapping of a TrainingJob, of a Hugging Face config or of a graph, a config of
    Transformers, or a `Trace`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values by the name of the option, a key of `JOB_OPTIONS`. Options left out keep the job's value."""
    command: Sequence[str] = ()
    """Words of a launch command, or a configuration file of a launcher, that say the job; `job` may name its model."""
    lenient: bool = False
    """Whether options of the command that are not priced are ignored."""
    gpus: int | None = None
    """GPUs of the job if its command does not say their number."""

    @classmethod
    def from_values(cls, job: object, values: Mapping[str, Any]) -> JobOptions:
        """Return the options for a job. Values that are None or have unknown names are ignored."""
        known = {name: values[name] for name in JOB_OPTIONS if values.get(name) is not None}
        return cls(job, known, tuple(values.get("command") or ()), bool(values.get("lenient")))

    @property
    def title(self) -> str:
        """Name of the job in errors: its name or path if it is a string, and "model" otherwise."""
        return self.job if isinstance(self.job, str) else "model"
