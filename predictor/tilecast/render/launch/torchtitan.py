"""Write the launch of torchtitan, with a `job.py` (`launch_options/tables/torchtitan-0.3.toml`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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


TABLE = "torchtitan-0.3"
"""Table of the options that are written."""


@cache
def _list_flavors() -> Mapping[str, tuple[str, str]]:
    """Return torchtitan's module and flavor for each preset that torchtitan supports."""
    facts = OptionTable.read(TABLE).facts
    flavors = {preset: (name, one) for name, own in facts["flavors"].items() for one, preset in own.items()}
    return {**flavors, **{preset: flavors[other] for preset, other in facts["written_as"].items()}}


def _local_batch(setting: LaunchSetting) -> int:
    """Return `local_batch_size`: samples per micro-batch, or with a pipeline, of all micro-batches of a step."""
    plan = setting.plan
    return plan.micro_batch * (plan.gradient_accumulation if plan.pipeline > 1 else 1)


def _pipeline_schedule(setting: LaunchSetting) -> str:
    """Return the pipeline schedule. The default is 1F1B, or interleaved 1F1B if the plan has virtual stages."""
    stated = setting.plan.schedule or setting.workload.pipeline_schedule
    return stated or ("interleaved" if setting.plan.virtual_stages > 1 else "1f1b")


def _count_end_layers(setting: LaunchSetting) -> int:
    """Return how many of embedding and loss count as pipeline layers: 2 for both, 1 for the loss alone, or 0."""
    plan = setting.plan
    return count_virtual_stage_end_layers(setting.model.layers, plan.pipeline, plan.virtual_stages) or 0


def _layers_per_virtual_stage(setting: LaunchSetting) -> object:
    """Return the number of layers per virtual stage, or None without virtual stages.

    Embedding and loss are included if they count as layers.
    """
    plan = setting.plan
    if plan.virtual_stages == 1:
        return None
    return (setting.model.layers + _count_end_layers(setting)) // (plan.pipeline * plan.virtual_stages)


_CONVERTERS: Mapping[str, str] = {"fp8": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter"}
"""torchtitan's model converter for each quantized precision."""

_VALUES: Values = {
    "model.flavor": lambda s: _find_model(s)[1],
    "converters": lambda s: _CONVERTERS.get(s.workload.precision),
    # Its models take FlexAttention or FlashAttention alone, and the latter is what is priced.
    "attention": lambda s: "flash",
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
    "stage_layers": _layers_per_virtual_stage,
    "less_first": lambda s: int(_count_end_layers(s) == 2) if s.plan.pipeline > 1 else None,
    "less_last": lambda s: int(_count_end_layers(s) > 0) if s.plan.pipeline > 1 else None,
    "plan.micro_batch": lambda s: s.plan.micro_batch if s.plan.pipeline > 1 else None,
    "plan.context": lambda s: s.plan.context,
    "plan.expert": lambda s: s.plan.expert if s.plan.expert > 1 else None,
    "plan.checkpointing": lambda s: s.plan.checkpointing,
    # It captures the step as a CUDA graph unless told otherwise, which is not priced.
    "without_graphs": lambda s: True,
    "training.execution": lambda s: s.workload.execution,
}
"""Functions that return the values to write, by name in `launch_options/tables/torchtitan-0.3.toml`."""


def _find_model(setting: LaunchSetting) -> tuple[str, str]:
    """Return torchtitan's module and flavor for a model. If torchtitan has no such flavor, use the model's name."""
    modules = OptionTable.read(TABLE).facts["modules"]
    return _list_flavors().get(setting.model.name, (modules[setting.model.family], setting.model.name))


def write_torchtitan_launch(setting: LaunchSetting) -> LaunchScript:
    """Return a `torchrun` command for `torchtitan.train`, with its `job.py`."""
    module, flavor = _find_model(setting)
    notes = []
    if setting.model.name not in _list_flavors():
        notes.append(f"torchtitan ships no flavor of {flavor}: add its dimensions to torchtitan.models.{module}")
    if setting.plan.checkpointing == "selective":
        notes.append("selective recomputation keeps attention and every second matrix product")
    notes.append("learning rate, data and tokenizer (hf_assets_path) are yours")
    command = torchrun_command(setting, "-m", "torchtitan.train", "--module", "job", "--config", "train")
    environment = {**allocator_environment(setting), **matmul_environment(setting.workload)}
    return LaunchScript(command, environment, {"job.py": "\n".join(_format_job(setting, module)) + "\n"}, notes=notes)


def _format_job(setting: LaunchSetting, module: str) -> Iterator[str]:
    """Yield the lines of `job.py`, whose function `train` returns the configuration."""
    options = OptionTable.read(TABLE).format_sections(_VALUES, setting)
    spec, converter = options["model_spec"], options["model_spec"].pop("converters", None)
    optimizer, recomputes = options["optimizer"], options["activation_checkpoint"]
    yield "from torchtitan.components.loss import CrossEntropyLoss"
    yield "from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig"
    if converter:
        yield f"from torchtitan.components.quantization import {converter}"
    yield "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig"
    if recomputes != "None":
        yield f"from torchtitan.distributed.activation_checkpoint import {recomputes.partition('.')[0]}"
    yield "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader"
    yield "from torchtitan.models.common.config_utils import decoder_vocab_size"
    yield f"from torchtitan.models.{module} import model_registry"
    yield "from torchtitan.trainer import Trainer"
    yield from ("", "", "def train() -> Trainer.Config:")
    yield "    model_spec = model_registry("
    yield from (f"        {key}={_format(value)}," for key, value in spec.items())
    if converter:
        yield f"        converters=[{converter}.Config(model_compile_enabled={options['compile']['enable']})],"
    yield from ("    )", "    return Trainer.Config(", "        model_spec=model_spec,")
    yield "        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),"
    yield '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),'
    yield "        optimizer=OptimizersContainer.Config("
    yield f"            implementation={_format(optimizer['implementation'])},"
    name = _format(optimizer["param_groups"]["optimizer_name"])
    yield "            param_groups=["
    yield f'                ParamGroupConfig(pattern=".*", optimizer_name={name}, optimizer_kwargs={{"lr": 3e-4}}),'
    yield from ("            ],", "        ),")
    for section, build in (("training", "TrainingConfig"), ("parallelism", "ParallelismConfig")):
        yield f"        {section}={build}("
        yield from (f"            {key}={_format(value)}," for key, value in options[section].items())
        yield "        ),"
    yield f"        activation_checkpoint={recomputes}{'' if recomputes == 'None' else '()'},"
    yield f"        compile=CompileConfig(enable={options['compile']['enable']}),"
    yield "    )"


def _format(value: object) -> str:
    """Return the value of an option as a Python expression."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def refusal_reason(setting: LaunchSetting) -> str:
    """Return why torchtitan cannot run a setting as the forecast assumes, or "" if it can."""
    if setting.workload.fused_loss and setting.workload.execution != "compiled":
        return "its loss is fused where it is compiled alone"
    if setting.workload.recompute_layers is not None:
        return "since 0.3 it recomputes all layers of a stage or none"
    return ""
