"""The `training` field of a TrainingJob: how its model is trained."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tilecast.api.base import MAX_BATCH, MAX_SEQUENCE, ApiModel, ValidationRule, list_field, optional_field
from tilecast.recomputation import RecomputedModule
from tilecast.spec import (
    Attention,
    Execution,
    ExpertDispatch,
    ExpertOverlap,
    Framework,
    FrozenPart,
    GradientSync,
    LoraTargets,
    Loss,
    MemoryFormat,
    Offload,
    Optimizer,
    Precision,
    Quantization,
    Schedule,
    ServerUpdates,
    StatePrecision,
    Weights,
)

RESTART_S = 300.0
"""Seconds that restarting a job takes, if the job does not say."""


class BatchRange(ApiModel):
    """The global batches that a job may be given."""

    min: int = Field(ge=1, le=MAX_BATCH, description="Smallest global batch.")
    max: int = Field(ge=1, le=MAX_BATCH, description="Largest global batch.")

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule("self.min <= self.max", lambda m: m.min <= m.max, "min is above max", "swap them"),
    )


class Training(ApiModel):
    """How the model is trained (or, for inference, run)."""

    sequence_length: int | None = optional_field(
        "Tokens of one sample, padding included. Required by models that read tokens; images have none, "
        "and a graph of fixed length says it itself.",
        ge=1,
        le=MAX_SEQUENCE,
    )
    global_batch_size: int = Field(ge=1, le=MAX_BATCH, description="Samples of one optimizer step, over all GPUs.")
    global_batch_size_range: BatchRange | None = optional_field(
        "Global batches that the job may be given instead; absent keeps globalBatchSize. Plans of unlike "
        "batches compare by the sample, and steps are those of globalBatchSize."
    )
    micro_batch_size: int | None = optional_field(
        "Samples of one forward pass on one GPU; absent leaves it to the search.", ge=1, le=MAX_BATCH
    )
    precision: Precision = Field(default="bf16", description="Precision of the matrix multiplications.")
    allowed_precisions: list[Precision] = list_field(
        "Every precision that the job may be trained in, its own among them; empty allows that one only.", max_length=8
    )
    framework: Framework | None = optional_field(
        "What runs the training: it limits plans to those that it executes and decides what memory holds; "
        "absent allows the plans of all frameworks, priced as PyTorch's own kernels run them, with 16-bit weights and "
        "gradients and FP32 masters. A framework with fused kernels is faster and can keep less."
    )
    framework_version: str | None = optional_field(
        "Version of the framework, for what changed between versions: of PyTorch (2.6) for frameworks on top of it, of "
        "Megatron-Core (0.12) for megatron, of the release (25.04) for nemo; absent is a recent one.",
        pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){0,3}$",
        max_length=19,
    )
    optimizer: Optimizer | None = optional_field(
        "Optimizer, which decides the bytes of its state; adamw if absent, none for inference."
    )
    weights: Weights | None = optional_field(
        "How weights are held in 16-bit training: master (16 bit, FP32 masters beside), autocast (FP32, with 16-bit "
        "casts), sharded (FP32 shards, gathered in 16 bit) or pure (16 bit alone, optimizer states too); absent takes "
        "the framework's."
    )
    gradient_precision: Literal["fp32", "bf16", "fp16"] | None = optional_field(
        "Type in which gradients are summed, held and reduced where weights have FP32 masters (Megatron's "
        "--grad-reduce-in-bf16); absent takes the framework's."
    )
    moment_precision: StatePrecision | None = optional_field(
        "Type of the optimizer's moments where weights have FP32 masters (Megatron's precision-aware optimizer); fp32 "
        "if absent."
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
    loss_chunks: int | None = optional_field(
        "Pieces in which the output layer and the loss run, so that one piece's logits exist at a time (Liger's "
        "fused linear cross-entropy, torchtune's LinearCrossEntropyLoss); absent is one piece.",
        ge=1,
        le=65536,
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = Field(
        default="auto",
        description="What the backward pass computes again to save memory; auto leaves it to the search.",
    )
    shard_degree: int | None = optional_field(
        "Data-parallel ranks that share weights, gradients and optimizer states at ZeRO stages 2 and 3 (HSDP); groups "
        "of so many ranks hold copies of them. Absent shares them among all ranks.",
        ge=2,
        le=2**20,
    )
    offload_activations: float | None = optional_field(
        "Share of the activations of layers that waits for the backward pass in the host's memory, from which it is "
        "copied while layers run; absent keeps all of them on the GPU.",
        gt=0,
        le=1,
    )
    recompute_modules: list[RecomputedModule] = list_field(
        "Modules of a layer that the backward pass computes again, and no others, in the words of Megatron-Core's "
        "--recompute-modules; mlp_act is the activation of a dense MLP, attn_out all of attention behind the "
        "projections of queries, keys and values. Empty leaves it to activationCheckpointing.",
        max_length=8,
    )
    recompute_layers: int | None = optional_field(
        "Layers of each pipeline stage that are computed again whole, the others not at all; absent is all of them "
        "or none, as activationCheckpointing says.",
        ge=1,
        le=4096,
    )
    attention: Attention = Field(
        default="auto",
        description="What runs attention: auto is what the framework chooses for its version and the GPU, flash its "
        "FlashAttention, eager two products that write the attention matrix to memory; or one library by name.",
    )
    execution: Execution = Field(
        default="eager", description="How kernels are launched, which decides the overhead of each."
    )
    memory_format: MemoryFormat = Field(
        default="contiguous",
        description="How images lie in memory: contiguous (NCHW, PyTorch's default), around whose convolutions tensor "
        "cores need copies, or channelsLast (NHWC). Compiled and XLA jobs choose for themselves.",
    )
    input_samples_per_second: float | None = optional_field(
        "Samples that the input pipeline (reading, decoding, augmenting) of each node delivers every "
        "second; no step is shorter than they take. Absent leaves the input pipeline out of the forecast.",
        gt=0,
        le=1e9,
    )
    expert_dispatch: ExpertDispatch | None = optional_field(
        "How tokens get to the ranks of their experts: allToAll (NCCL, every copy), allGather (all tokens to all "
        "ranks), deepEP or hybridEP (once to a node and once to a rank); absent takes the framework's."
    )
    expert_overlap: ExpertOverlap | None = optional_field(
        "What runs beside that exchange: none, microBatch, the computation of another micro-batch (DualPipe, "
        "Megatron's --overlap-moe-expert-parallel-comm), or sharedExpert, the layer's shared MLP (Megatron's "
        "--moe-shared-expert-overlap); absent takes the framework's."
    )
    expert_capacity: float | None = optional_field(
        "Tokens for which the buffers of each rank of experts have room, as a multiple of an even share (Megatron's "
        "--moe-expert-rank-capacity-factor); absent holds those that arrive.",
        ge=1,
        le=4096,
    )
    expert_stash: float | None = optional_field(
        "Size of the stash in which the activations of experts wait for the backward pass, as a multiple of an even "
        "share (Megatron's --moe-paged-stash); absent leaves them in buffers of expertCapacity.",
        ge=1,
        le=4096,
    )
    bucket_mib: int | None = optional_field(
        "Size in MiB of the buckets in which gradients are reduced (DistributedDataParallel's "
        "bucket_cap_mb); absent takes the framework's.",
        alias="bucketMiB",
        ge=1,
        le=65536,
    )
    pipeline_schedule: Schedule | None = optional_field(
        "Order in which pipeline stages run the passes of micro-batches; absent is 1F1B, interleaved where stages have "
        "several pieces. dualPipe holds the weights twice."
    )
    pipeline_layout: str | None = optional_field(
        "Layers of each virtual stage in Megatron's words, such as Et*3|(tt|)*29,m|L: E embedding, t layer, m "
        "multi-token prediction, L loss. A pipeline of p ranks has 1/p of these stages on each. Absent splits layers "
        "evenly, with embedding and loss as layers if that is needed.",
        min_length=1,
        max_length=4096,
    )
    gradient_sync: GradientSync = Field(
        default="allReduce",
        description="How replicas sum gradients: among themselves, or by parameter servers of their own on the "
        "network, which add to no bill.",
    )
    parameter_servers: int | None = optional_field(
        "Servers that share the gradients, each on a node of its own with the pool's network; absent is "
        "one for each node that holds replicas.",
        ge=1,
        le=4096,
    )
    server_updates: ServerUpdates | None = optional_field(
        "Whether parameter servers wait for the gradients of all replicas before they answer; synchronous if absent."
    )
    lora_rank: int | None = optional_field(
        "Train only LoRA adapters of this rank beside the dense layers; absent trains every weight.", ge=1, le=4096
    )
    lora_targets: LoraTargets | None = optional_field(
        "Dense layers that get adapters: attention are its projections alone, PEFT's default for most models; all if "
        "absent."
    )
    dora: bool | None = optional_field(
        "Whether adapters also train the norm of each row of the adapted weight (DoRA), as torchtune and PEFT compute "
        "it; false if absent."
    )
    loss: Loss | None = optional_field(
        "Loss on preferences: dpo and ipo concatenate a chosen and a rejected answer and compare them with a frozen "
        "reference model (the model without its adapters under LoRA), orpo, simpo and cpo do without one, kto has "
        "single answers, reward trains a head of one output on pairs. A sample, as in globalBatchSize, is a pair. "
        "Absent is the model's own loss, such as the cross-entropy of the next token."
    )
    precomputed_reference: bool | None = optional_field(
        "Whether log-probabilities of the reference model are computed before training (TRL's "
        "precompute_ref_log_probs), so that no step needs it; false if absent."
    )
    train_embeddings: bool | None = optional_field(
        "Whether copies of embedding and head are trained whole beside adapters (PEFT's modules_to_save of "
        "embed_tokens and lm_head), with the frozen ones held too; false if absent."
    )
    frozen_parts: list[FrozenPart] = list_field(
        "Parts of a model with encoders of images or sound that are not trained: vision and audio are the encoders, "
        "projector the layers behind them, language the model that reads them. They have no gradients of weights and "
        "no optimizer state; language passes gradients on to what is trained before it. Empty trains every part.",
        max_length=4,
    )
    quantization: Quantization | None = optional_field(
        "What the frozen weights of the layers are held in under LoRA: nf4 is 4 bits and scales (QLoRA), int8 8 bits "
        "(bitsandbytes); absent holds them in 16 bits."
    )
    steps: int | None = optional_field(
        "Optimizer steps of the whole run; with them time and cost to finish appear.", ge=1, le=10**12
    )
    tokens: int | None = optional_field("Tokens of the whole run, instead of steps.", ge=1, le=10**18)
    checkpoint_seconds: float | None = optional_field(
        "Time between two checkpoints. A job that moves repeats half of that on average, which "
        "BetterPlacementAvailable weighs; no forecast depends on it.",
        gt=0,
        le=10**7,
    )
    restart_seconds: float | None = optional_field(
        "Time from the end of the job's pods to its next step, wherever it is restarted; "
        f"{RESTART_S:.0f} if absent. BetterPlacementAvailable weighs it; no forecast depends on it.",
        ge=0,
        le=10**6,
    )

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "!has(self.microBatchSize) || self.globalBatchSize % self.microBatchSize == 0",
            lambda m: m.micro_batch_size is None or m.global_batch_size % m.micro_batch_size == 0,
            "globalBatchSize is not a multiple of microBatchSize",
            "correct one of them, or leave microBatchSize out",
        ),
        ValidationRule(
            "!has(self.frameworkVersion) || has(self.framework)",
            lambda m: m.framework_version is None or m.framework is not None,
            "frameworkVersion says nothing without framework",
            "name the framework, or leave frameworkVersion out",
        ),
        ValidationRule(
            "!has(self.recomputeModules) || self.recomputeModules.size() == 0 || "
            "self.activationCheckpointing in ['auto', 'selective']",
            lambda m: not m.recompute_modules or m.activation_checkpointing in ("auto", "selective"),
            "recomputeModules says something else than activationCheckpointing none or full",
            "leave one of them out",
        ),
        ValidationRule(
            "!has(self.recomputeLayers) || (self.activationCheckpointing in ['auto', 'full'] && "
            "(!has(self.recomputeModules) || self.recomputeModules.size() == 0))",
            lambda m: (
                m.recompute_layers is None
                or (m.activation_checkpointing in ("auto", "full") and not m.recompute_modules)
            ),
            "recomputeLayers counts layers that are recomputed whole",
            "use activationCheckpointing full or auto, without recomputeModules",
        ),
        ValidationRule(
            "!(has(self.steps) && has(self.tokens))",
            lambda m: m.steps is None or m.tokens is None,
            "steps and tokens both say how long the run is",
            "give one",
        ),
        ValidationRule(
            "!has(self.tokens) || has(self.sequenceLength)",
            lambda m: m.tokens is None or m.sequence_length is not None,
            "tokens needs sequenceLength",
            "give sequenceLength, or steps instead of tokens",
        ),
        ValidationRule(
            "!has(self.loraTargets) || has(self.loraRank)",
            lambda m: m.lora_targets is None or m.lora_rank is not None,
            "loraTargets says where adapters of LoRA are, and the job has none",
            "give loraRank, or leave loraTargets out",
        ),
        ValidationRule(
            "!has(self.dora) || has(self.loraRank)",
            lambda m: m.dora is None or m.lora_rank is not None,
            "dora says how adapters of LoRA train, and the job has none",
            "give loraRank, or leave dora out",
        ),
        ValidationRule(
            "!has(self.precomputedReference) || (has(self.loss) && self.loss in ['dpo', 'ipo', 'kto'])",
            lambda m: m.precomputed_reference is None or m.loss in ("dpo", "ipo", "kto"),
            "precomputedReference speaks of a reference model, which only the losses dpo, ipo and kto have",
            "give one of these as loss, or leave precomputedReference out",
        ),
        ValidationRule(
            "!has(self.loss) || self.loss != 'kto' || !has(self.microBatchSize) || self.microBatchSize > 1",
            lambda m: m.loss != "kto" or m.micro_batch_size != 1,
            "loss kto compares the answers of one micro-batch, and microBatchSize is 1",
            "use a microBatchSize of 2 or more, or leave it out",
        ),
        ValidationRule(
            "!has(self.trainEmbeddings) || has(self.loraRank)",
            lambda m: m.train_embeddings is None or m.lora_rank is not None,
            "trainEmbeddings says what is trained beside adapters of LoRA, and the job has none",
            "give loraRank, or leave trainEmbeddings out",
        ),
        ValidationRule(
            "!has(self.frozenParts) || self.frozenParts.size() == 0 || !has(self.loraRank)",
            lambda m: not m.frozen_parts or m.lora_rank is None,
            "frozenParts says which weights are trained, and under loraRank only adapters are",
            "leave one of them out",
        ),
        ValidationRule(
            "!has(self.quantization) || has(self.loraRank)",
            lambda m: m.quantization is None or m.lora_rank is not None,
            "quantization needs loraRank, since quantized weights have no gradients",
            "give loraRank, or leave quantization out",
        ),
        ValidationRule(
            "!has(self.quantization) || (self.precision in ['fp16', 'bf16'] && (!has(self.allowedPrecisions) || "
            "self.allowedPrecisions.all(p, p in ['fp16', 'bf16'])))",
            lambda m: m.quantization is None or {m.precision, *m.allowed_precisions} <= {"fp16", "bf16"},
            "quantization needs a 16-bit precision, in which products read the weights",
            "use bf16 or fp16, or leave quantization out",
        ),
        ValidationRule(
            "!(has(self.parameterServers) || has(self.serverUpdates)) || self.gradientSync == 'parameterServer'",
            lambda m: (m.parameter_servers or m.server_updates) is None or m.gradient_sync == "parameterServer",
            "parameterServers and serverUpdates say nothing of gradientSync allReduce",
            "leave them out, or use gradientSync parameterServer",
        ),
        ValidationRule(
            "!has(self.globalBatchSizeRange) || (self.globalBatchSizeRange.min <= self.globalBatchSize && "
            "self.globalBatchSize <= self.globalBatchSizeRange.max)",
            lambda m: (
                m.global_batch_size_range is None
                or m.global_batch_size_range.min <= m.global_batch_size <= m.global_batch_size_range.max
            ),
            "globalBatchSize is outside globalBatchSizeRange",
            "choose one within it",
        ),
        ValidationRule(
            "!has(self.allowedPrecisions) || self.allowedPrecisions.size() == 0 || "
            "self.precision in self.allowedPrecisions",
            lambda m: not m.allowed_precisions or m.precision in m.allowed_precisions,
            "precision is not among allowedPrecisions",
            "add it there, or choose one of them",
        ),
    )
