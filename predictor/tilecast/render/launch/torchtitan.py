"""Write the launch of torchtitan, with a `job.toml` (`launch_options/tables/torchtitan.toml`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from tilecast.launch_options.options_table import OptionTable
from tilecast.layout import count_virtual_stage_end_layers
from tilecast.render.launch import script
from tilecast.render.launch.setting import (
    LaunchScript,
    LaunchSetting,
    Values,
    allocator_environment,
    matmul_environment,
    torchrun_command,
)

FAMILIES: tuple[str, ...] = ("decoder", "moe", "deepseek")
"""Model families that torchtitan's trainer accepts."""


@cache
def _list_flavors() -> Mapping[str, tuple[str, str]]:
    """Return torchtitan's model name and flavor for each preset that torchtitan supports."""
    facts = OptionTable.read("torchtitan").facts
    flavors = {preset: (name, one) for name, own in facts["flavors"].items() for one, preset in own.items()}
    return {**flavors, **{preset: flavors[other] for preset, other in facts["written_as"].items()}}


def _local_batch(setting: LaunchSetting) -> int:
    """Return `local_batch_size`: samples per micro-batch, or with a pipeline, of all micro-batches of a step."""
    plan = setting.plan
    return plan.micro_batch * (plan.gradient_accumulation if plan.pipeline > 1 else 1)


def _pipeline_schedule(setting: LaunchSetting) -> str:
    """Return the pipeline schedule. The default is 1F1B, interleaved with virtual stages."""
    stated = setting.plan.schedule or setting.workload.pipeline_schedule
    return stated or ("interleaved" if setting.plan.virtual_stages > 1 else "1f1b")


def _layer_interval(setting: LaunchSetting) -> str | None:
    """Return n as text if every n-th layer is recomputed, or None if the job sets no number of recomputed layers."""
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

_VALUES: Values = {
    "model.name": lambda s: _list_flavors().get(s.model.name, (None, None))[0],
    "model.flavor": lambda s: _list_flavors().get(s.model.name, (None, None))[1],
    "converters": lambda s: (name := _CONVERTERS.get(s.workload.precision)) and [name],
    "training.optimizer": lambda s: s.workload.optimizer,
    "implementation": lambda s: "fused" if script.has_fused_optimizer(s) else "foreach",
    "local_batch": _local_batch,
    "global_batch": lambda s: s.workload.global_batch,
    "training.sequenceLength": lambda s: s.workload.sequence_length,
    "training.steps": lambda s: s.workload.steps,
    "clip": lambda s: 1.0 if s.framework.clips_gradients else 0.0,
    "precision": lambda s: "bf16" if s.workload.is_mixed else "fp32",
    "reduced": lambda s: "float32",
    "training.offload": lambda s: "parameters" if s.workload.offload == "parameters" else None,
    "replicas": lambda s: s.plan.data // s.shard_degree,
    "shards": lambda s: s.shard_degree,
    "plan.zero_stage": lambda s: s.plan.zero_stage,
    "plan.tensor": lambda s: s.plan.tensor,
    "plan.pipeline": lambda s: s.plan.pipeline,
    "schedule": lambda s: _pipeline_schedule(s) if s.plan.pipeline > 1 else None,
    # Its DualPipeV overlaps a forward and a backward pass unless told otherwise, which is not priced.
    "overlaps_experts": lambda s: False if s.plan.pipeline > 1 and _pipeline_schedule(s) == "dualPipeV" else None,
    "stage_layers": _layers_per_virtual_stage,
    "less_first": lambda s: int(_counted_ends(s) == 2) if s.plan.pipeline > 1 else None,
    "less_last": lambda s: int(_counted_ends(s) > 0) if s.plan.pipeline > 1 else None,
    "plan.micro_batch": lambda s: s.plan.micro_batch if s.plan.pipeline > 1 else None,
    "plan.context": lambda s: s.plan.context,
    "plan.expert": lambda s: s.plan.expert if s.plan.expert > 1 else None,
    "plan.checkpointing": lambda s: "selective" if s.workload.recompute_layers else s.plan.checkpointing,
    "interval": lambda s: _layer_interval(s) or ("op" if s.plan.checkpointing == "selective" else None),
    "training.execution": lambda s: s.workload.execution,
}
"""Functions that return the values to write, by name in `launch_options/tables/torchtitan.toml`."""


def write_torchtitan_launch(setting: LaunchSetting) -> LaunchScript:
    """Return a `torchrun` command for `torchtitan.train`, with its `job.toml`."""
    lines, notes = [], []
    if setting.model.name not in _list_flavors():
        notes.append(f"torchtitan ships no flavor of {setting.model.name}: register its dimensions under [model]")
    if setting.plan.checkpointing == "selective":
        notes.append("selective recomputation keeps attention and every second matrix product")
    table = OptionTable.read("torchtitan")
    sections: dict[str, dict[str, object]] = {one.option.partition(".")[0]: {} for one in table.list_written()}
    for section, items in (sections | table.format_sections(_VALUES, setting)).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in items.items()]
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
