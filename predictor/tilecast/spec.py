"""Models, workloads and plans: what is trained, and how it is split over GPUs.

A `Model` has the dimensions of an architecture, a `Workload` says how it is trained, and `Plans` is a table of ways to
split that work over GPUs. Every formula of the predictor takes and returns columns, with one number per row. A single
plan is a table of one row.

All docstrings of the predictor use these symbols:

    b micro-batch   s sequence length   h hidden   a heads   k key/value heads   f MLP width
    V vocabulary    L layers            t tensor   p pipeline   d data   c context   e expert
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tilecast.model import Model
from tilecast.plan_columns import BY_FLAG, PLAN_COLUMNS, PlanColumn
from tilecast.recomputation import (
    CHECKPOINTING,
    MODULES,
    RECOMPUTED,
    Checkpointing,
    describe,
    encode_modules,
    join_modules,
)

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.signedinteger[Any]]

Rows: TypeAlias = npt.NDArray[np.intp]

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
QUANTIZED: tuple[Precision, ...] = ("fp8", "mxfp8", "nvfp4")
"""Precisions in which layers' products read operands of 8 or 4 bits. Everything else stays in BF16."""
ELEMENT_BYTES: Mapping[str, float] = {
    "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1.0 / 32, "nvfp4": 0.5 + 1.0 / 16,
}  # fmt: skip
"""Bytes per element that the matrix units read, including the scale of the element's block.

MXFP8 has a scale of one byte for 32 elements (OCP Microscaling Formats, version 1.0), NVFP4 one for 16 (and an FP32
scale for each tensor: arXiv 2509.25149, section 2). Activations of such jobs stay in BF16.
"""

Optimizer = Literal["none", "sgd", "momentum", "adam", "adamw", "lamb", "adafactor", "muon", "adamw8bit", "adamw4bit"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
Weights = Literal["master", "autocast", "sharded", "pure"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
"""Ways to store a weight in 16-bit training.

In order: 16 bits with an FP32 master, FP32 with a 16-bit cast, FP32 shards that are gathered in 16 bits, or 16 bits
alone, also for optimizer states.
"""
StatePrecision = Literal["fp32", "bf16", "fp16", "fp8"]
STATE_BYTES: Mapping[StatePrecision, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
"""Bytes per element of a gradient or of an optimizer's moment."""
Offload = Literal["none", "optimizer", "parameters"]
"""What is kept in the host's memory.

None, the optimizer's states with their update (ZeRO-Offload, arXiv 2101.06840), or also the parameters (ZeRO-Infinity,
arXiv 2104.07857).
"""
Execution = Literal["eager", "compiled", "cudaGraphs", "xla"]
EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
Attention = Literal[
    "auto", "flash", "eager", "cudnn", "flash1", "flash2", "flash3", "flash4", "flex", "memoryEfficient"
]  # fmt: skip
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
"""Implementations of attention that a job can name.

They are the framework's choice, its FlashAttention, two products around a softmax, or one library, a key of `attention`
in `constants.toml`.
"""
MemoryFormat = Literal["contiguous", "channelsLast"]
"""Layout of images in memory, by PyTorch's names: channel by channel (NCHW) or pixel by pixel (NHWC)."""
GradientSync = Literal["allReduce", "parameterServer"]
"""Ways to sum gradients over data-parallel ranks: among themselves, or by separate servers on the network."""
ServerUpdates = Literal["synchronous", "asynchronous"]
"""Whether a parameter server waits for the gradients of all workers, or for none."""
Schedule = Literal["1f1b", "interleaved", "zeroBubble", "interleavedZeroBubble", "zbv", "dualPipe", "dualPipeV"]
PIPELINE_SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
"""Orders in which a pipeline's stages run the passes of micro-batches; `tilecast.layout.SCHEDULES` has their costs."""
SCHEDULE_CODES: Mapping[Schedule | None, int] = {name: code for code, name in enumerate((None, *PIPELINE_SCHEDULES))}
"""Code of each schedule in the column `Plans.schedule`. None, which means the job's own schedule, is 0."""
FOLDED_SCHEDULES: tuple[Schedule, ...] = ("zbv", "dualPipeV")
"""Schedules that run through the ranks and back, so that the first rank has both the first and the last piece."""
ExpertDispatch = Literal["allToAll", "allGather", "deepEP", "hybridEP"]
"""Ways to send tokens to the ranks of their experts and back.

In order: NCCL's grouped sends, a gather of all tokens, or DeepEP and HybridEP, which send a token once per node and
once per rank.
"""
ExpertOverlap = Literal["none", "microBatch", "sharedExpert"]
"""Computation during which tokens are sent to experts.

It is none, that of another micro-batch (DualPipe, arXiv 2412.19437), or that of the layer's shared MLP (Megatron-Core,
transformer/moe/shared_experts.py).
"""
Quantization = Literal["nf4", "int8"]
"""Types of frozen weights of layers, other than 16 bits.

They are 4-bit NormalFloat (QLoRA, arXiv 2305.14314, section 3) and 8-bit integers (LLM.int8(), arXiv 2208.07339).
"""
FROZEN_BITS: Mapping[Quantization | None, int] = {None: 16, "int8": 8, "nf4": 4}
"""Bits of a frozen weight of the layers, without scales."""
LoraTargets = Literal["all", "attention"]
FrozenPart = Literal["vision", "audio", "projector", "language"]
"""Parts of a model with towers that a job may leave as they are.

In order: the towers that read images, those that read sound, the layers between a tower and the language model, and the
language model itself.
"""
FROZEN_PARTS: tuple[FrozenPart, ...] = get_args(FrozenPart)
LORA_TARGETS: tuple[LoraTargets, ...] = get_args(LoraTargets)
Loss = Literal["dpo", "ipo", "orpo", "simpo", "cpo", "kto", "reward"]
"""Losses on preferences. Without one, the model's own loss is trained, such as cross-entropy of the next token."""
LOSSES: tuple[Loss, ...] = get_args(Loss)


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """Sequences and forward passes that a loss on preferences needs for one sample of a micro-batch."""

    sequences: int
    """Sequences of a sample that are trained on: 2 if a chosen and a rejected answer are concatenated."""
    reference_passes: int = 0
    """Forward passes of the frozen reference model over as many sequences."""
    own_passes: int = 0
    """Further forward passes of the trained model, without gradients, over as many sequences."""


PREFERENCE_LOSSES: Mapping[Loss, PreferenceLoss] = {
    "dpo": PreferenceLoss(2, 1), "ipo": PreferenceLoss(2, 1),
    "orpo": PreferenceLoss(2), "simpo": PreferenceLoss(2), "cpo": PreferenceLoss(2),
    "kto": PreferenceLoss(1, 2, 1), "reward": PreferenceLoss(2),
}  # fmt: skip
"""Work of each loss on preferences (TRL 1.9: trainer/dpo_trainer.py, kto_trainer.py and reward_trainer.py,
experimental/orpo and cpo; torchtune 0.6, recipes/full_dpo_distributed.py and lora_dpo_distributed.py).

DPO (arXiv 2305.18290) and IPO (2310.12036) compare with a reference model, ORPO (2403.07691), CPO (2401.08417) and
SimPO (2405.14734) do not. KTO (2402.01306) has single answers, and estimates a divergence from as many mismatched
answers, which both models read without gradients.
"""
Framework = Literal[
    "ddp", "fsdp2", "deepspeed", "megatron", "torchtitan", "nemo", "megatron-deepspeed", "lightning", "huggingface",
    "accelerate", "huggingface-deepspeed", "composer", "litgpt", "torchtune", "detectron2", "jax", "tensorflow",
    "paddle", "oneflow", "mxnet", "mindspore",
]  # fmt: skip
"""Framework that runs the training. `frameworks.toml` says which plans it executes and what it stores."""
PREFERENCE_FRAMEWORKS: tuple[Framework, ...] = (
    "ddp", "fsdp2", "deepspeed", "huggingface", "accelerate", "huggingface-deepspeed", "torchtune",
)  # fmt: skip
"""Frameworks in which losses on preferences are priced: those of TRL, and torchtune."""


PassName: TypeAlias = str
"""A fusion pass, a key of `tilecast.fuse.PASSES`."""


class SpecError(ValueError):
    """Invalid input of a user.

    `field` is the path of the input, `problem` the error, and `remedy` a proposal. The message joins all three on one
    line.
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, str, str]]:
        return type(self), (self.field, self.problem, self.remedy)

    def at(self, field: str, remedy: str = "") -> SpecError:
        """Return this error with another field, and with another remedy if one is given."""
        return type(self)(field, self.problem, remedy or self.remedy)


class SearchTooLargeError(SpecError):
    """Refusal of a job that needs a larger search than allowed.

    The decision depends only on counts, so that it is the same on every machine.
    """

    @classmethod
    def from_counts(cls, field: str, number: int, limit: int, noun: str, remedy: str) -> SearchTooLargeError:
        """Return the error for a search that needs too much: `number` of `noun`, where `limit` is allowed."""
        return cls(field, f"{number:,} {noun} are more than the {limit:,} that one search prices", remedy)


@dataclass(frozen=True, slots=True)
class Workload:
    """One training job, independent of where it runs."""

    model: Model
    sequence_length: int
    global_batch: int
    precision: Precision = "bf16"
    training: bool = True
    """Whether the job trains. False means only a forward pass (inference prefill)."""
    optimizer: Optimizer = "adamw"
    weights: Weights | None = None
    """Storage of weights in 16-bit training. None for the framework's default."""
    gradient_precision: StatePrecision | None = None
    """Type in which gradients are summed, stored and reduced. None for the framework's default."""
    moment_precision: StatePrecision | None = None
    """Type of the optimizer's moments. None for that of its weights."""
    micro_batch: int | None = None
    checkpointing: Checkpointing | None = None
    """Recomputation. None leaves the choice to the search."""
    shard_degree: int | None = None
    """Data-parallel ranks over which ZeRO shards weights, gradients and states. Each such group has a full copy.

    None means all ranks.
    """
    offloaded_activations: float = 0.0
    """Share of the layers' activations that is kept in the host's memory until the backward pass."""
    recompute_layers: int | None = None
    """Layers of each pipeline stage that full recomputation applies to. None means all."""
    attention: Attention = "auto"
    execution: Execution = "eager"
    memory_format: MemoryFormat = "contiguous"
    """Layout of images and of weights of convolutions. Compilers choose for themselves."""
    input_samples_per_s: float | None = None
    """Samples per second that the input pipeline of each node delivers. None means that it never limits the step."""
    steps: int | None = None
    fused_kernels: bool | None = None
    """Whether hand-written kernels, such as Megatron's, fuse bias, activation, dropout, mask and softmax.

    They do so even in eager execution. None for the framework's default (`frameworks.has_fused_kernels`).
    """
    fused_loss: bool = False
    """Whether a hand-written loss reads the logits in place, as those of flash-attn and Apex do."""
    compiled_loss: bool = True
    """Whether compilation includes the loss."""
    fused_optimizer: bool = True
    """Whether the weight update is one kernel per parameter group, rather than one per arithmetic step."""
    offload: Offload = "none"
    loss_chunks: int = 1
    """Pieces in which the output layer and the loss run in sequence, so that only one piece's logits exist at a time.
    """
    lora_rank: int = 0
    """Rank of the LoRA adapters on linear layers, the only weights that are trained. 0 trains every parameter."""
    lora_targets: LoraTargets = "all"
    """Linear layers with adapters: all, or only the projections of attention."""
    dora: bool = False
    """Whether adapters also train the norm of each row of the adapted weight (DoRA, arXiv 2402.09353)."""
    train_embeddings: bool = False
    """Whether embedding and head are trained whole beside adapters, as copies of the frozen ones (PEFT)."""
    loss: Loss | None = None
    """Loss on preferences. None for the model's own loss."""
    precomputed_reference: bool = False
    """Whether log-probabilities of the reference model are computed before training, so that no step needs it."""
    frozen_parts: tuple[FrozenPart, ...] = ()
    """Parts of a model with towers whose weights are not trained, in the order of `FROZEN_PARTS`."""
    frozen_bits: int = 16
    """Bits per frozen weight of the layers under LoRA: 16, 8 or 4.

    8 is INT8 (LLM.int8(), arXiv 2208.07339), 4 is NF4 (QLoRA, arXiv 2305.14314). Bits of scales depend on the framework
    (`frameworks.Framework.quantized_bits`).
    """
    framework: Framework | None = None
    """Framework that must be able to execute the plans. None allows the plans of any framework."""
    framework_version: str | None = None
    """Version by which `frameworks.toml` identifies the framework, such as "2.6" of PyTorch or "25.04" of NeMo.

    None for the version that it assumes.
    """
    expert_dispatch: ExpertDispatch | None = None
    """How tokens are sent to experts. None for the framework's default."""
    expert_overlap: ExpertOverlap | None = None
    """Computation that hides this exchange. None for the framework's default."""
    expert_capacity: float | None = None
    """Tokens for which each rank of experts has buffers, as a multiple of an even share. None for those that arrive."""
    expert_stash: float | None = None
    """Size of the stash that holds the experts' activations until the backward pass, as a multiple of an even share.

    None if the buffers themselves hold them.
    """
    overlap: bool = True
    """Whether gradients are reduced during the backward pass (in buckets, as DDP and FSDP do)."""
    bucket_mib: int | None = None
    """Size of gradient buckets in MiB. None for the framework's default."""
    pipeline_schedule: Schedule | None = None
    """Order of the passes in a pipeline. None means 1F1B, interleaved if stages have several pieces."""
    pipeline_layout: str | None = None
    """Layers of each virtual stage in Megatron's notation (`tilecast.layout.parse_layout`).

    None for the framework's default.
    """
    gradient_sync: GradientSync = "allReduce"
    parameter_servers: int | None = None
    """Number of servers that sum gradients, each on a node of its own. None means one for each node with workers."""
    server_updates: ServerUpdates = "synchronous"

    @property
    def is_mixed(self) -> bool:
        """Whether training mixes a 16-bit or FP8 precision with FP32."""
        return self.precision in ("fp16", "bf16", *QUANTIZED)

    @property
    def is_quantized(self) -> bool:
        """Whether products of layers run in 8 or 4 bits."""
        return self.precision in QUANTIZED

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight and per gradient in the precision of the layers: 2 in mixed precision, otherwise 4."""
        return 2.0 if self.is_mixed else 4.0

    @property
    def preference(self) -> PreferenceLoss:
        """Sequences and forward passes of the loss on preferences. Without one, a sample is one sequence."""
        if self.loss is None or not self.training:
            return PreferenceLoss(1)
        needs = PREFERENCE_LOSSES[self.loss]
        return replace(needs, reference_passes=0) if self.precomputed_reference else needs

    @property
    def copies_embeddings(self) -> bool:
        """Whether copies of embedding and head are trained beside adapters."""
        return self.train_embeddings and self.lora_rank > 0

    @property
    def holds_reference(self) -> bool:
        """Whether weights of a frozen reference model are held. Under LoRA, it is the model without its adapters."""
        return self.preference.reference_passes > 0 and self.lora_rank == 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes, or images if the sequence length is 1."""
        return self.global_batch * self.sequence_length * self.preference.sequences

    @property
    def samples_are_tokens(self) -> bool:
        """Whether throughput is reported in tokens. Models without a sequence count samples."""
        return self.sequence_length > 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One row of `Plans` in readable form, with Megatron's names for the degrees."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero_stage: int = 0
    micro_batch: int = 1
    gradient_accumulation: int = 1
    checkpointing: Checkpointing = "none"
    sequence_parallel: bool = False
    virtual_stages: int = 1
    expert_tensor: int = 1
    schedule: Schedule | None = None
    """Order of the passes in the pipeline. None means `Workload.pipeline_schedule`."""

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        """Return the short form that tables use: `fsdp16,tp2,sp,mb1,ac-sel`."""
        sharded = {3: "fsdp", 2: "zero2-dp", 1: "zero1-dp", 0: "dp"}[self.zero_stage]
        parts = [f"{sharded}{self.data}"] if self.data > 1 or self.zero_stage or self.gpus == 1 else []
        degrees = {
            "tp": self.tensor,
            "pp": self.pipeline,
            "cp": self.context,
            "ep": self.expert,
            "etp": self.expert_tensor,
        }
        for label, degree in degrees.items():
            if degree > 1:
                parts.append(f"{label}{degree}")
            if label == "tp" and self.sequence_parallel:
                parts.append("sp")
        if self.virtual_stages > 1:
            parts.append(f"vp{self.virtual_stages}")
        if self.schedule is not None:
            parts.append(self.schedule)
        parts.append(f"mb{self.micro_batch}")
        if self.checkpointing != "none":
            parts.append(f"ac-{describe(self.checkpointing)}")
        return ",".join(parts)


@dataclass(frozen=True, slots=True)
class PartialPlan:
    """A plan as a user states it.

    Degrees that are not stated are 1. Data parallelism takes the remaining GPUs. Other columns stay open.
    """

    data: int | None = None
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    virtual_stages: int = 1
    zero_stage: int | None = None
    micro_batch: int | None = None
    checkpointing: Checkpointing | None = None
    sequence_parallel: bool | None = None
    expert_tensor: int = 1
    schedule: Schedule | None = None

    @classmethod
    def parse(cls, text: str, field: str) -> PartialPlan:
        """Parse a plan such as `tp=2,dp=8,zero=1,mb=1,ac=full`, or `zero1-dp8,tp2,mb1,ac-full` as tables print it.

        The two forms can be mixed, and spaces can replace commas. A plan with a micro-batch is complete, and columns
        that it leaves out are off. In a plan without a micro-batch they stay open. `zero=auto` leaves one column open.
        `field` is the name of the plan in errors.

        Raises:
            SpecError: a key is unknown or given twice, or a value is not a count.
        """
        items = re.split(r" *, *| +", re.sub(r" *= *", "=", text.lower().strip()))
        pairs = [
            pair
            for item in items
            for pair in (_parse_assignment(item) if "=" in item else _parse_short_form_part(item, field))
        ]
        fields: dict[str, Any] = {}
        for key, value in pairs:
            column = BY_FLAG.get(key)
            is_twice = column is not None and column.name in fields
            if is_twice and key in ("dp", "zero") and any(item.startswith("fsdp") for item in items):
                problem = f"{key} is said beside fsdp, which says dp and zero=3"
                raise SpecError(field, problem, "write dp=N,zero=STAGE in place of fsdp, or fsdp alone")
            if column is None or is_twice:
                problem = f"{key[:40]!r} is unknown" if column is None else f"{key} is given twice"
                known = ", ".join((*BY_FLAG, "fsdp"))
                raise SpecError(field, problem, f"write for instance tp=2,dp=8; known: {known}")
            fields[column.name] = _parse_plan_value(column, value, f"{key}={value}", field)
        return cls(**({**_OFF, **fields} if "micro_batch" in fields else fields))


_OFF: Mapping[str, object] = {name: column.off for name, column in PLAN_COLUMNS.items() if column.off is not None}
"""Values of columns that a complete plan leaves out."""
_PRINTED = re.compile(r"(?:zero([123])-)?dp(\d+)|fsdp(?:-dp)?(\d+)|(e?tp|[pcev]p|mb|zero)(\d+)|ac-([a-z_+]+)|(sp)")
"""Regular expression of one part of a plan's short form."""
_SCHEDULES: Mapping[str, Schedule] = {name.lower(): name for name in PIPELINE_SCHEDULES}
"""Schedules by their names in lower case."""


def _parse_assignment(text: str) -> list[tuple[str, str]]:
    """Return the key and the value of a text such as `tp=2`. `fsdp=8` gives two pairs."""
    key, _, value = (part.strip() for part in text.partition("="))
    return [("dp", value), ("zero", "3")] if key == "fsdp" else [(key, value)]


def _parse_short_form_part(text: str, field: str) -> list[tuple[str, str]]:
    """Return the keys and values of one part of a plan's short form."""
    if text in _SCHEDULES:
        return [("schedule", text)]
    part = _PRINTED.fullmatch(text)
    if part is None:
        raise SpecError(
            field, f"cannot read {text[:40]!r}", "write for instance tp=2,dp=8, or a plan as tables print it"
        )
    stage, replicas, sharded, key, count, mode, spread = part.groups()
    if mode or spread:
        return [("ac", mode)] if mode else [("sp", "1")]
    if key:
        return [(key, count)]
    zero = "3" if sharded else stage
    return [("dp", replicas or sharded), *([("zero", zero)] if zero else [])]


def _parse_plan_value(column: PlanColumn, value: str, text: str, field: str) -> object:
    if value == "auto" and column.off is not None:
        return None
    if column.name == "checkpointing":
        meant = {"sel": "selective"}.get(value, value)
        if meant in CHECKPOINTING:
            return meant
        try:
            return join_modules(meant.split("+"))
        except KeyError:
            remedy = (
                f"use ac=none, ac=sel, ac=full, ac=auto, or modules as in ac=layernorm+moe_act: {', '.join(MODULES)}"
            )
            raise SpecError(field, f"{text[:60]!r} is no recomputation", remedy) from None
    if column.name == "schedule":
        if value not in _SCHEDULES:
            remedy = f"write one of {', '.join(PIPELINE_SCHEDULES)}"
            raise SpecError(field, f"{text[:40]!r} is no pipeline schedule", remedy)
        return _SCHEDULES[value]
    least, most = column.least, column.most
    if not (value.isascii() and value.isdecimal() and len(value) <= 7 and least <= int(value) <= most):
        raise SpecError(field, f"{text[:40]!r} is out of range", f"give a count from {least} to {most}")
    return bool(int(value)) if isinstance(column.off, bool) else int(value)


@dataclass(frozen=True, slots=True)
class Columns:
    """Base class of tables. Each field is a column or another table, and all columns have the same length."""

    def take(self, rows: Rows | npt.NDArray[np.bool_] | slice) -> Self:
        """Return the chosen rows, in the given order."""
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        if isinstance(rows, slice):
            return type(self)(*[value.take(rows) if isinstance(value, Columns) else value[rows] for value in values])
        places = rows.nonzero()[0] if rows.dtype == bool else rows
        if len(places) == 1 and isinstance(values[0], np.ndarray) and len(values[0]) == 1:
            return self
        return type(self)(*[_take_values(value, places) for value in values])

    def collapse_constants(self) -> Self:
        """Return the columns, with a column of equal values stored as one value. They are read-only."""
        columns = [getattr(self, name) for name in self.__dataclass_fields__]
        return type(self)(
            *[repeat_number(one[:1].copy(), len(one)) if len(one) and (one == one[0]).all() else one for one in columns]
        )


def _take_values(column: Any, places: npt.NDArray[Any]) -> Any:
    """Return the values of a column, or of a group of columns, at the indices `places`."""
    is_constant = isinstance(column, np.ndarray) and column.strides == (0,)
    return repeat_number(column[:1], len(places)) if is_constant else column.take(places)


def repeat_number(number: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Return a read-only column that repeats one number `count` times, (count,), but stores it once."""
    number.setflags(write=False)
    return np.ndarray((count,), number.dtype, number, strides=(0,))


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """The k distinct rows among n rows of some columns.

    A formula is evaluated on the rows `first`, (k,). `index`, (n,), is the place of each row among the distinct ones,
    and spreads the results to all rows.
    """

    first: Rows
    index: Rows

    def __len__(self) -> int:
        return len(self.first)


def distinct_rows(*columns: Ints) -> DistinctRows:
    """Return the distinct rows of integer columns (n,), sorted by their values.

    Equal neighbours are merged first. Then each row is encoded as one number, with a digit for every column, and a sort
    is needed only if these codes are sparse.
    """
    rows, heads = len(columns[0]), _find_run_starts(columns)
    if len(heads) <= 1:
        return DistinctRows(heads, np.zeros(rows, np.intp))
    code, size, room = np.zeros(len(heads), np.intp), 1, max(_ROOM, 4 * len(heads))
    for column in columns:
        values = column[heads]
        low = int(values.min())
        digit, span = values - low, int(values.max()) - low + 1
        if span > room:
            distinct_values, digit = np.unique(values, return_inverse=True)
            span = len(distinct_values)
        if size * span > room:
            code, size = _renumber_codes(code, size)
        code = code * span + digit
        size *= span
    code, size = _renumber_codes(code, size)
    first = np.empty(size, np.intp)
    first[code[::-1]] = heads[::-1]
    return DistinctRows(first, np.repeat(code, np.diff(heads, append=rows)))


def merge_equal_neighbours(*columns: Ints) -> DistinctRows:
    """Return the rows after merging each run of equal neighbouring rows, in the order of the table."""
    heads = _find_run_starts(columns)
    return DistinctRows(heads, np.repeat(np.arange(len(heads)), np.diff(heads, append=len(columns[0]))))


def _find_run_starts(columns: Sequence[Ints]) -> Rows:
    """Return the indices of the rows that differ from the row before. Columns have shape (n,). Row 0 always counts."""
    if len(columns[0]) == 1:
        return np.zeros(1, np.intp)
    differs = np.zeros(len(columns[0]), bool)
    differs[:1] = True
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(differs)


_ROOM = 1 << 14
"""Number of possible codes up to which a lookup table is always used instead of a sort."""


def _renumber_codes(code: Rows, size: int) -> tuple[Rows, int]:
    """Renumber codes below `size` to 0, 1, 2, … without gaps, in the same order.

    Return the new codes and the number of distinct codes.
    """
    if size > max(_ROOM, 8 * len(code)):
        values, index = np.unique(code, return_inverse=True)
        return index.reshape(-1), len(values)
    seen = np.zeros(size, bool)
    seen[code] = True
    places = np.cumsum(seen, dtype=np.intp) - 1
    return places[code], int(places[-1]) + 1


_HOLDINGS = np.array([1 if name in FOLDED_SCHEDULES else 2 * (name == "dualPipe") for name in SCHEDULE_CODES])


def stage_holding_codes(schedule: Ints) -> Ints:
    """Return a code for the set of stages that each schedule puts on a rank, (n,).

    `schedule` has values of `SCHEDULE_CODES`. The code is 1 if a rank has the first and the last part of the model
    (`FOLDED_SCHEDULES`), 2 if it has two whole stages (DualPipe), and otherwise 0.
    """
    return _HOLDINGS.take(schedule)


@dataclass(frozen=True, slots=True)
class Plans(Columns):
    """A table of plans as integer columns, each of shape (n,).

    `expert` x `expert_tensor` divides `data` x `tensor`. Experts are spread over these ranks as in Megatron-Core, and
    ranks that share an expert are neighbours. `checkpointing` has indices into `recomputation.RECOMPUTED`.
    `gradient_accumulation` is the number of micro-batches per rank and optimizer step. `schedule` has values of
    `SCHEDULE_CODES`.
    """

    data: Ints
    tensor: Ints
    pipeline: Ints
    context: Ints
    expert: Ints
    zero_stage: Ints
    micro_batch: Ints
    gradient_accumulation: Ints
    checkpointing: Ints
    sequence_parallel: Ints
    virtual_stages: Ints
    expert_tensor: Ints
    schedule: Ints

    def __len__(self) -> int:
        return len(self.data)

    def distinct_splits(self, *columns: Ints) -> DistinctRows:
        """Return one row for each group of neighbouring plans that differ only in the columns below.

        The columns are ZeRO stage, virtual stages and pipeline schedule. Plans of a group are also equal in the given
        `columns`, (n,), and in `stage_holdings`.
        """
        open_names = ("zero_stage", "virtual_stages", "schedule")
        names = (item.name for item in fields(self) if item.name not in open_names)
        holdings = (self.stage_holdings,) if self.schedule.any() else ()
        return merge_equal_neighbours(*(getattr(self, name) for name in names), *holdings, *columns)

    @property
    def stage_holdings(self) -> Ints:
        """Return a code for the set of stages that the schedule puts on a rank, (n,), from `stage_holding_codes`."""
        return stage_holding_codes(self.schedule)

    @property
    def gpus(self) -> Ints:
        """Number of ranks of each plan, (n,)."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> Floats:
        """Number of ranks that hold the same dense weights, (n,)."""
        return (self.data * self.context).astype(float)

    def shard_ranks(self, degree: int | None) -> Floats:
        """Return the number of ranks over which ZeRO shards a dense weight, (n,).

        `degree` is the largest number of data-parallel ranks that share the shards of a weight, or None for no limit.
        """
        data = self.data if degree is None else np.minimum(self.data, degree)
        return (data * self.context).astype(float)

    @property
    def expert_replicas(self) -> Floats:
        """Number of ranks that hold the same experts, (n,). Experts are spread over tensor and data ranks."""
        return np.maximum(self.replicas * self.tensor / (self.expert * self.expert_tensor), 1.0)

    def row(self, index: int) -> Plan:
        """Return one row as a `Plan`."""
        values = {column.name: int(getattr(self, column.name)[index]) for column in fields(self)}
        code = values.pop("checkpointing")
        parallel = bool(values.pop("sequence_parallel"))
        schedule = (None, *PIPELINE_SCHEDULES)[values.pop("schedule")]
        return Plan(**values, checkpointing=RECOMPUTED[code], sequence_parallel=parallel, schedule=schedule)

    def __iter__(self) -> Iterator[Plan]:
        return (self.row(index) for index in range(len(self)))

    @classmethod
    def from_plans(cls, *plans: Plan) -> Plans:
        """Return the table with one row for each plan."""

        def column(name: str) -> Ints:
            values = [getattr(plan, name) for plan in plans]
            if name == "checkpointing":
                values = [encode_modules(value) for value in values]
            if name == "schedule":
                values = [SCHEDULE_CODES[value] for value in values]
            return np.asarray(values, dtype=np.int64)

        return cls(*(column(item.name) for item in fields(cls)))

    @classmethod
    def concatenate(cls, tables: list[Plans]) -> Plans:
        """Return all rows of all tables, in order."""
        if len(tables) == 1:
            return tables[0]
        return cls(*(np.concatenate([getattr(table, item.name) for table in tables]) for item in fields(cls)))
