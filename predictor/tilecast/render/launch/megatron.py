"""Write the launch of Megatron-LM (`launch_options/tables/megatron.toml`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilecast import zoo
from tilecast.frameworks import expert_dispatch, expert_overlap, gradient_bytes, has_only_fp8_weights
from tilecast.launch_options.options_table import OptionTable
from tilecast.layout import count_virtual_stage_end_layers, parse_layout, split_layers
from tilecast.overlap import hides_gradients
from tilecast.recomputation import split_modules
from tilecast.render.launch.setting import (
    LaunchScript,
    LaunchSetting,
    Values,
    allocator_environment,
    matmul_environment,
    torchrun_command,
)
from tilecast.spec import ExpertDispatch
from tilecast.zoo.deepseek import Deepseek
from tilecast.zoo.numerics import Numerics

SCRIPTS: Mapping[str, str] = {
    "decoder": "pretrain_gpt.py",
    "moe": "pretrain_gpt.py",
    "deepseek": "pretrain_gpt.py",
    "encoder": "pretrain_bert.py",
    "encdec": "pretrain_t5.py",
}
"""Megatron-LM's training script for each model family."""


def _is_encdec(setting: LaunchSetting) -> bool:
    """Return whether the model is an encoder-decoder model."""
    return setting.model.family == "encdec"


def _decoder_layers(setting: LaunchSetting) -> int:
    """Return the number of decoder layers of an encoder-decoder model."""
    return setting.transformer.count_decoder_layers(setting.model)


def _latent_attention(setting: LaunchSetting) -> Deepseek | None:
    """Return the dimensions of latent attention, or None if the model has none."""
    return setting.transformer if isinstance(setting.transformer, Deepseek) else None


def _moe_layer_frequency(setting: LaunchSetting) -> object:
    """Return the value of `--moe-layer-freq`.

    The value is n if every n-th layer has experts, or a Python list expression if the first layers are dense. If every
    layer has experts, return None.
    """
    dense, every = setting.transformer.first_dense, setting.transformer.moe_every
    if dense:
        return f"([0]*{dense}+[1]*{setting.model.layers - dense})"
    return every if every > 1 else None


def _count_end_layers(setting: LaunchSetting) -> int:
    """Return how many of embedding and loss count as pipeline layers: 2 for both, 1 for the loss alone, or 0."""
    plan = setting.plan
    if setting.workload.pipeline_layout is not None:
        return 0
    return count_virtual_stage_end_layers(setting.model.layers, plan.pipeline, plan.virtual_stages) or 0


def _count_prediction_layers(setting: LaunchSetting) -> int:
    """Return the number of multi-token-prediction layers, from the pipeline layout or else from the model."""
    layout = setting.workload.pipeline_layout
    return (parse_layout(layout).predicted if layout is not None else 0) or setting.transformer.prediction_layers


def _last_stage_layers(setting: LaunchSetting) -> object:
    """Return the number of layers of the last pipeline stage, or None if Megatron-LM needs no such option.

    The option is not needed if layers divide evenly, if embedding or loss counts as a layer, or if the job states a
    layout.
    """
    stages, layers = setting.plan.pipeline, setting.model.layers
    if layers % stages == 0 or _count_end_layers(setting) or setting.workload.pipeline_layout is not None:
        return None
    return split_layers(layers, stages, counts_ends=True)[-1]


def _position_embedding(setting: LaunchSetting) -> object:
    """Return the value of `--position-embedding-type`, or None for the default, learned positions."""
    model = setting.model
    if model.rotary:
        return "rope"
    return None if model.positions else "relative" if _is_encdec(setting) else "none"


def _fuses_loss(setting: LaunchSetting) -> bool:
    """Return whether the forecast assumes a fused cross-entropy loss."""
    return Numerics.from_workload(setting.workload).loss == "fused"


def _replica_count(setting: LaunchSetting) -> int:
    """Return the number of ranks with equal weights: data-parallel times context-parallel ranks."""
    return setting.plan.data * setting.plan.context


def _bucket_parameters(setting: LaunchSetting) -> int | None:
    """Return the number of parameters per gradient bucket, or None if the job sets no bucket size."""
    size = setting.workload.bucket_mib
    return None if size is None else round(size * 2**20 / gradient_bytes(setting.workload))


def _overlaps_tensor_parallel(setting: LaunchSetting) -> bool:
    """Return whether tensor-parallel communication overlaps with matrix products."""
    plan = setting.plan
    return plan.tensor > 1 and plan.sequence_parallel and setting.framework.tensor_overlap == "both"


def _recomputed_modules(setting: LaunchSetting) -> Sequence[str] | None:
    """Return the modules that selective recomputation recomputes, or None without selective recomputation."""
    if setting.plan.checkpointing == "selective":
        return ["core_attn"]
    return split_modules(setting.plan.checkpointing) or None


def _offloaded_layers(setting: LaunchSetting) -> int:
    """Return the number of layers whose activations are offloaded to the host's memory."""
    return round(setting.workload.offloaded_activations * setting.model.layers)


def _layers_per_virtual_stage(setting: LaunchSetting) -> int:
    """Return the number of layers of the virtual stage that has the most layers."""
    plan, layout = setting.plan, setting.workload.pipeline_layout
    if layout is not None and plan.pipeline > 1:
        return max(parse_layout(layout).pieces)
    return -(-max(split_layers(setting.model.layers, plan.pipeline, counts_ends=True)) // plan.virtual_stages)


def _recomputed_layers(setting: LaunchSetting) -> int:
    """Return the value of `--recompute-num-layers` for full recomputation.

    If the job sets the number of recomputed layers, return that number per virtual stage, at most all layers of a
    stage. Otherwise return 1, because layers are recomputed one at a time.
    """
    layers = setting.workload.recompute_layers
    return 1 if layers is None else min(layers // setting.plan.virtual_stages, _layers_per_virtual_stage(setting))


def _gradient_reduction_type(setting: LaunchSetting) -> str | None:
    """Return "bf16" if gradients are reduced in BF16 rather than FP32, otherwise None."""
    workload = setting.workload
    if not workload.is_mixed or workload.precision == "fp16":
        return None
    return None if setting.framework.has_fp32_gradients(workload) else "bf16"


_DISPATCHERS: Mapping[ExpertDispatch, tuple[str, str | None]] = {
    "allToAll": ("alltoall", None),
    "allGather": ("allgather", None),
    "deepEP": ("flex", "deepep"),
    "hybridEP": ("flex", "hybridep"),
}
"""Megatron-Core's token dispatcher for each `ExpertDispatch`, with the backend of the `flex` dispatcher."""
_FUSED = (4.0, 4.0)
"""Numbers of kernel launches in `frameworks.toml` that mean a fused router and a fused permutation."""

_VALUES: Values = {
    "layers": lambda s: None if _is_encdec(s) else s.model.layers,
    "model.encoder_layers": lambda s: s.model.layers - _decoder_layers(s) if _is_encdec(s) else None,
    "model.decoder_layers": lambda s: _decoder_layers(s) if _is_encdec(s) else None,
    "model.hidden": lambda s: s.model.hidden,
    "model.ffn": lambda s: s.transformer.dense_ffn_hidden or s.model.ffn_hidden,
    "model.heads": lambda s: s.model.heads,
    "groups_queries": lambda s: s.model.kv_heads < s.model.heads and not _latent_attention(s),
    "model.kv_heads":
        lambda s: s.model.kv_heads if s.model.kv_heads < s.model.heads and not _latent_attention(s) else None,
    "model.head_dim":
     lambda s: s.model.head_dim if s.model.head_dim * s.model.heads != s.model.hidden and not _latent_attention(s)
     else None,
    "has_latent": lambda s: _latent_attention(s) is not None,
    "model.query_latent": lambda s: (own := _latent_attention(s)) and (own.query_latent or None),
    "model.latent": lambda s: (own := _latent_attention(s)) and own.latent,
    "model.plain_dim": lambda s: (own := _latent_attention(s)) and s.model.head_dim - own.rotary_dim,
    "model.rotary_dim": lambda s: (own := _latent_attention(s)) and own.rotary_dim,
    "model.value_dim": lambda s: (own := _latent_attention(s)) and own.value_dim,
    "training.sequenceLength": lambda s: None if _is_encdec(s) else s.workload.sequence_length,
    "encoder_length": lambda s: s.workload.sequence_length if _is_encdec(s) else None,
    "model.decoder_length":
        lambda s: (s.transformer.decoder_length or s.workload.sequence_length) if _is_encdec(s) else None,
    "model.max_positions": lambda s: max(s.model.positions, s.workload.sequence_length),
    "model.positions": _position_embedding,
    "model.normalization": lambda s: "RMSNorm" if s.model.rms_norm else None,
    "model.gated": lambda s: s.model.gated_mlp,
    "model.bias": lambda s: s.model.bias,
    "model.qk_norm": lambda s: s.transformer.qk_norm,
    "model.tied": lambda s: s.model.tied_embeddings,
    "model.attention_dropout": lambda s: None if s.model.dropout else 0.0,
    "model.hidden_dropout": lambda s: None if s.model.dropout else 0.0,
    "model.experts": lambda s: s.transformer.experts or None,
    "model.expert_ffn": lambda s: s.model.ffn_hidden if s.transformer.experts else None,
    "model.top_k": lambda s: s.transformer.top_k if s.transformer.experts else None,
    "model.moe_frequency": lambda s: _moe_layer_frequency(s) if s.transformer.experts else None,
    "model.shared_ffn": lambda s: s.transformer.shared_ffn_hidden or None,
    "model.expert_groups": lambda s: s.transformer.expert_groups if s.transformer.expert_groups > 1 else None,
    "model.top_groups": lambda s: s.transformer.top_groups if s.transformer.expert_groups > 1 else None,
    "dispatcher": lambda s: _DISPATCHERS[expert_dispatch(s.workload)][0] if s.transformer.experts else None,
    "flex_backend": lambda s: _DISPATCHERS[expert_dispatch(s.workload)][1] if s.transformer.experts else None,
    "training.expertOverlap": lambda s: expert_overlap(s.workload) if s.transformer.experts else None,
    "training.expertCapacity": lambda s: s.workload.expert_capacity,
    "stashes": lambda s: s.workload.expert_stash is not None,
    "stash": lambda s: s.workload.expert_stash,
    "fuses_experts": lambda s: s.workload.expert_capacity is not None,
    "groups_experts": lambda s: s.transformer.experts > 0,
    "fuses_permutation": lambda s: s.transformer.experts > 0 and s.framework.permutation_launches == _FUSED,
    "fuses_router": lambda s: s.transformer.experts > 0 and s.framework.router_launches == _FUSED,
    # The installed version of FlashAttention runs.
    "training.attention": lambda s: "flash" if s.workload.attention.startswith("flash") else s.workload.attention,
    "implementation": lambda s: "transformer_engine",
    "fuses_loss": _fuses_loss,
    "loss_implementation": lambda s: "te" if _fuses_loss(s) else None,
    "training.execution": lambda s: s.workload.execution,
    "precision": lambda s: "bf16" if s.workload.is_quantized else s.workload.precision,
    "quantized": lambda s: s.workload.precision,
    "recipe": lambda s: s.workload.precision,
    "keeps_ends": lambda s: s.workload.precision == "nvfp4",
    "kept_first": lambda s: 0 if s.workload.precision == "nvfp4" else None,
    "kept_last":
        lambda s: round(s.framework.nvfp4_layers_in_bf16) if s.workload.precision == "nvfp4" else None,
    "gathers_fp8": lambda s: has_only_fp8_weights(s.workload),
    "has_fp32_gradients": lambda s: s.workload.is_mixed and s.framework.has_fp32_gradients(s.workload),
    "training.gradientPrecision": _gradient_reduction_type,
    "accumulates_apart": lambda s: not s.framework.has_fused_accumulation,
    "training.optimizer": lambda s: "momentum" if s.workload.optimizer in ("sgd", "momentum") else "adamw",
    "momentum": lambda s: {"sgd": 0.0, "momentum": 0.9}.get(s.workload.optimizer),
    "clip": lambda s: 1.0 if s.framework.clips_gradients else 0.0,
    "plan.micro_batch": lambda s: s.plan.micro_batch,
    "training.globalBatchSize": lambda s: s.workload.global_batch,
    "training.steps": lambda s: s.workload.steps,
    "plan.tensor": lambda s: s.plan.tensor,
    "plan.sequence_parallel": lambda s: s.plan.tensor > 1 and s.plan.sequence_parallel,
    "overlaps_tensor": _overlaps_tensor_parallel,
    "plan.pipeline": lambda s: s.plan.pipeline,
    # A layout determines the number of virtual stages (arguments.py asserts that it is not stated beside it).
    "plan.virtual_stages":
        lambda s: s.plan.virtual_stages if s.plan.virtual_stages > 1 and not s.workload.pipeline_layout else None,
    "training.pipelineLayout": lambda s: s.workload.pipeline_layout if s.plan.pipeline > 1 else None,
    "model.prediction_layers": lambda s: _count_prediction_layers(s) or None,
    "counts_embedding": lambda s: _count_end_layers(s) == 2,
    "counts_loss": lambda s: _count_end_layers(s) > 0,
    "last_layers": _last_stage_layers,
    "plan.context": lambda s: s.plan.context if s.plan.context > 1 else None,
    "plan.expert": lambda s: s.plan.expert if s.plan.expert > 1 else None,
    # Megatron-Core shares experts over the tensor-parallel ranks unless told otherwise (arguments.py).
    "plan.expert_tensor":
     lambda s: s.plan.expert_tensor
     if zoo.count_experts(s.model) and max(s.plan.tensor, s.plan.expert_tensor) > 1 else None,
    "plan.zero_stage": lambda s: int(s.plan.zero_stage == 1 or s.workload.offload == "optimizer"),
    "overlaps_gradients": lambda s: _replica_count(s) > 1 and hides_gradients(s.workload),
    "bucket_parameters": _bucket_parameters,
    "overlaps_weights":
        lambda s: s.plan.zero_stage == 1 and _replica_count(s) > 1 and hides_gradients(s.workload),
    "training.offload": lambda s: s.workload.offload,
    "precision_aware": lambda s: s.workload.offload == "optimizer" or s.workload.moment_precision is not None,
    "moments": lambda s: s.workload.moment_precision,
    "second_moments": lambda s: s.workload.moment_precision,
    "offloaded_layers": lambda s: _offloaded_layers(s) or None,
    "plan.checkpointing": lambda s: s.plan.checkpointing if s.plan.checkpointing in ("none", "full") else "selective",
    "recompute_modules": _recomputed_modules,
    "recompute_method":
        lambda s: ("block" if s.workload.recompute_layers else "uniform") if s.plan.checkpointing == "full" else None,
    "recompute_layers": lambda s: _recomputed_layers(s) if s.plan.checkpointing == "full" else None,
}  # fmt: skip
"""Functions that return the values to write, by name in `launch_options/tables/megatron.toml`."""


def write_megatron_launch(setting: LaunchSetting) -> LaunchScript:
    """Return the command that runs a training script of Megatron-LM with its options."""
    plan = setting.plan
    environment = {**allocator_environment(setting), **matmul_environment(setting.workload)}
    if plan.tensor > 1 or plan.context > 1:
        # One queue keeps the exchange ahead of the product that hides it; arguments.py asserts it before Blackwell.
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    notes = []
    if _position_embedding(setting) == "none":
        notes.append("Megatron-LM has no ALiBi: positions are left out")
    script = SCRIPTS[setting.model.family]
    words = OptionTable.read("megatron").format_words(_VALUES, setting)
    return LaunchScript(torchrun_command(setting, script, *words), environment, notes=notes)


def refusal_reason(setting: LaunchSetting) -> str:
    """Return why Megatron-LM cannot run a setting as the forecast assumes, or "" if it can."""
    plan = setting.plan
    if _is_encdec(setting) and plan.pipeline > 1:
        return "its T5 has no pipeline parallelism (pretrain_t5.py)"
    share, depth = setting.workload.offloaded_activations, setting.model.layers
    if share and abs(_offloaded_layers(setting) - share * depth) > 0.05:
        return f"it offloads the activations of whole layers, not a share of {share:g} of {depth}"
    if share and _offloaded_layers(setting) == depth:
        return f"it offloads at most {depth - 1} of {depth} layers"
    layers, virtual = setting.workload.recompute_layers, setting.plan.virtual_stages
    if layers is not None and layers % virtual and layers < virtual * _layers_per_virtual_stage(setting):
        return f"it recomputes equally many layers of each virtual stage, not {layers} of {virtual}"
    layout = setting.workload.pipeline_layout
    if layout is not None and plan.pipeline > 1 and parse_layout(layout).predicted != _count_prediction_layers(setting):
        return "its layout has to place the layers that predict further tokens (m in training.pipelineLayout)"
    is_overlapped = setting.transformer.experts > 0 and expert_overlap(setting.workload) == "microBatch"
    if is_overlapped and plan.pipeline > 1 and plan.virtual_stages == 1:
        return "it overlaps the exchange of experts only in interleaved pipelines (arguments.py)"
    is_shared = setting.transformer.experts > 0 and expert_overlap(setting.workload) == "sharedExpert"
    if is_shared and "shared_experts" in split_modules(plan.checkpointing):
        return "it does not recompute shared experts that run beside the exchange (transformer_config.py)"
    if is_shared and expert_dispatch(setting.workload) == "allGather":
        return "it gathers all tokens without an overlap with shared experts (transformer_config.py)"
    if setting.workload.moment_precision and not setting.plan.zero_stage:
        return "its precision-aware optimizer needs ZeRO 1 (--use-distributed-optimizer)"
    return "" if setting.workload.fused_optimizer else "its optimizer is one kernel"
