"""Write the launch of torchtitan 0.2, with a `job.toml` of options from `config/job_config.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tilecast.layout import count_virtual_stage_end_layers
from tilecast.render.launch import script
from tilecast.render.launch.setting import (
    LaunchScript,
    LaunchSetting,
    Table,
    allocator_environment,
    matmul_environment,
    torchrun_command,
)

_FLAVORS: Mapping[str, tuple[str, str]] = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3.1-8b": ("llama3", "8B"),
    "llama-3-70b": ("llama3", "70B"),
    "llama-3.1-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "llama-4-scout": ("llama4", "17bx16e"),
    "llama-4-maverick": ("llama4", "17bx128e"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"),
    "deepseek-v2": ("deepseek_v3", "236B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
}
"""torchtitan's model name and flavor for each of our presets that it ships."""
FAMILIES: tuple[str, ...] = ("decoder", "moe", "deepseek")
"""Model families that torchtitan's trainer accepts."""
_NAMES: Mapping[str, str] = {"adam": "Adam", "adamw": "AdamW"}
_SCHEDULES: Mapping[str, str] = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleavedZeroBubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualPipeV": "DualPipeV",
}
"""PyTorch's name of each pipeline schedule (distributed/pipelining/schedules.py)."""
_RESHARD: Mapping[int, str] = {2: "never", 3: "always"}


def _local_batch(setting: LaunchSetting) -> int:
    """Return `local_batch_size`: samples of a micro-batch, or of all micro-batches of a step with a pipeline."""
    plan = setting.plan
    return plan.micro_batch * (plan.gradient_accumulation if plan.pipeline > 1 else 1)


def _pipeline_schedule(setting: LaunchSetting) -> str:
    """Return PyTorch's name of the pipeline schedule. The default is 1F1B, interleaved with virtual stages."""
    stated = setting.plan.schedule or setting.workload.pipeline_schedule
    return _SCHEDULES[stated or ("interleaved" if setting.plan.virtual_stages > 1 else "1f1b")]


def _layer_interval(setting: LaunchSetting) -> str | None:
    """Return n as text if every n-th layer is recomputed, or None if the job sets no number of layers."""
    layers = setting.workload.recompute_layers
    return None if layers is None else str(_stage_layers(setting) // layers)


def _stage_layers(setting: LaunchSetting) -> int:
    """Return the number of layers of the fullest pipeline stage."""
    return -(-setting.model.layers // setting.plan.pipeline)


def _counted_ends(setting: LaunchSetting) -> int:
    """Return 2 if embedding and loss count as pipeline layers, 1 if only the loss does, or 0."""
    plan = setting.plan
    return count_virtual_stage_end_layers(setting.model.layers, plan.pipeline, plan.virtual_stages) or 0


def _layers_per_virtual_stage(setting: LaunchSetting) -> object:
    """Return the number of layers per virtual stage, or None without virtual stages.

    Embedding and loss are included if they count as layers.
    """
    plan = setting.plan
    if plan.virtual_stages == 1:
        return None
    return (setting.model.layers + _counted_ends(setting)) // (plan.pipeline * plan.virtual_stages)


_CONVERTERS: Mapping[str, str] = {"fp8": "quantize.linear.float8", "mxfp8": "quantize.linear.mx"}
"""torchtitan's model converter for each quantized precision."""


_JOB: Mapping[str, Table] = {
    "model": (
        ("name", lambda s: _FLAVORS.get(s.model.name, (None, None))[0]),
        ("flavor", lambda s: _FLAVORS.get(s.model.name, (None, None))[1]),
        ("converters", lambda s: (name := _CONVERTERS.get(s.workload.precision)) and [name]),
    ),
    "optimizer": (
        ("name", lambda s: _NAMES[s.workload.optimizer]),
        ("implementation", lambda s: "fused" if script.has_fused_optimizer(s) else "foreach"),
    ),
    "training": (
        ("local_batch_size", _local_batch),
        ("global_batch_size", lambda s: s.workload.global_batch),
        ("seq_len", lambda s: s.workload.sequence_length),
        ("steps", lambda s: s.workload.steps),
        ("max_norm", lambda s: 1.0 if s.framework.clips_gradients else 0.0),
        ("mixed_precision_param", lambda s: "bfloat16" if s.workload.is_mixed else "float32"),
        ("mixed_precision_reduce", lambda s: "float32"),
        ("enable_cpu_offload", lambda s: s.workload.offload == "parameters" or None),
    ),
    "parallelism": (
        ("data_parallel_replicate_degree", lambda s: s.plan.data // s.shard_degree),
        ("data_parallel_shard_degree", lambda s: s.shard_degree),
        ("fsdp_reshard_after_forward", lambda s: _RESHARD.get(s.plan.zero_stage)),
        ("tensor_parallel_degree", lambda s: s.plan.tensor),
        ("pipeline_parallel_degree", lambda s: s.plan.pipeline),
        ("pipeline_parallel_schedule", lambda s: _pipeline_schedule(s) if s.plan.pipeline > 1 else None),
        # Its DualPipeV overlaps a forward and a backward pass unless told otherwise, which is not priced.
        ("pipeline_parallel_expert_parallel_overlap",
         lambda s: False if s.plan.pipeline > 1 and _pipeline_schedule(s) == "DualPipeV" else None),
        ("pipeline_parallel_layers_per_stage", _layers_per_virtual_stage),
        ("pipeline_parallel_first_stage_less_layers",
         lambda s: int(_counted_ends(s) == 2) if s.plan.pipeline > 1 else None),
        ("pipeline_parallel_last_stage_less_layers",
         lambda s: int(_counted_ends(s) > 0) if s.plan.pipeline > 1 else None),
        ("pipeline_parallel_microbatch_size", lambda s: s.plan.micro_batch if s.plan.pipeline > 1 else None),
        ("context_parallel_degree", lambda s: s.plan.context),
        ("expert_parallel_degree", lambda s: s.plan.expert if s.plan.expert > 1 else None),
    ),
    "activation_checkpoint": (
        ("mode", lambda s: "selective" if s.workload.recompute_layers else s.plan.checkpointing),
        ("selective_ac_option",
         lambda s: _layer_interval(s) or ("op" if s.plan.checkpointing == "selective" else None)),
    ),
    "compile": (("enable", lambda s: s.workload.execution == "compiled"),),
}  # fmt: skip


def write_torchtitan_launch(setting: LaunchSetting) -> LaunchScript:
    """Return a `torchrun` command for `torchtitan.train`, with its `job.toml`."""
    lines, notes = [], []
    if setting.model.name not in _FLAVORS:
        notes.append(f"torchtitan ships no flavor of {setting.model.name}: register its dimensions under [model]")
    if setting.plan.checkpointing == "selective":
        notes.append("selective recomputation keeps attention and every second matrix product")
    for section, table in _JOB.items():
        items = [(key, value(setting)) for key, value in table]
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in items if value is not None]
    command = torchrun_command(setting, "-m", "torchtitan.train", "--job.config_file", "job.toml")
    environment = {**allocator_environment(setting), **matmul_environment(setting.workload)}
    return LaunchScript(command, environment, {"job.toml": "\n".join(lines) + "\n"}, notes=notes)


def refusal_reason(setting: LaunchSetting) -> str:
    """Return why torchtitan cannot run a setting as priced, or an empty string if it can."""
    plan = setting.plan
    if setting.workload.fused_loss and setting.workload.execution != "compiled":
        return "its loss is fused where it is compiled alone"
    layers = setting.workload.recompute_layers
    if layers is not None and _stage_layers(setting) % layers:
        return f"it recomputes every n-th layer of a stage, not {layers} of {_stage_layers(setting)}"
    sharded = (plan.data > 1 and plan.zero_stage > 0) or plan.context > 1
    if setting.workload.is_mixed and plan.tensor * plan.pipeline > 1 and not sharded:
        return "without FSDP its tensor and pipeline parallelism compute in FP32 (distributed/utils.py)"
    return ""
