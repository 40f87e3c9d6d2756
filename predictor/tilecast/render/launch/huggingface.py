"""Write the launch of Hugging Face Accelerate, or of the `Trainer` of Transformers.

Both wrap a model in DistributedDataParallel, or apply `fully_shard` to it by version 2 of Accelerate's FSDP plugin. By
default, that plugin reduces gradients in 16 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from tilecast import zoo
from tilecast.launch_options.options_table import OptionTable
from tilecast.render.launch import script
from tilecast.render.launch.deepspeed import engine_config
from tilecast.render.launch.setting import (
    PORT,
    SCRIPT,
    LaunchScript,
    LaunchSetting,
    Values,
    torchrun_command,
)
from tilecast.search import find_engine

_SYNC_EACH_MICRO_BATCH = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
"""Option that makes `fully_shard` reduce-scatter the gradients of every micro-batch.

The forecast assumes it, because unsharded gradients between micro-batches would take more memory.
"""
_LISTED = ("resnet", "convnext", "efficientnet", "mobilenet-v2")
"""Families whose `_no_split_modules` FSDP can wrap, but whose layers are not a `GradientCheckpointingLayer`."""


def is_sharded(setting: LaunchSetting) -> bool:
    """Return whether the job trains with `fully_shard` rather than DistributedDataParallel."""
    framework = setting.workload.framework
    return framework is not None and find_engine(framework) == "fsdp2"


def _is_deepspeed(setting: LaunchSetting) -> bool:
    """Return whether the job trains with DeepSpeed's engine."""
    framework = setting.workload.framework
    return framework is not None and find_engine(framework) == "deepspeed"


_AUTO = ("lr", "betas", "eps", "weight_decay")
"""Parameters of the optimizer that Trainer fills into DeepSpeed's configuration."""


def _deepspeed_config(setting: LaunchSetting) -> dict[str, object]:
    """Return the content of `ds_config.json` for Trainer, which fills in the optimizer's hyperparameters."""
    config = engine_config(setting)
    optimizer = config.get("optimizer")
    if isinstance(optimizer, dict) and setting.workload.optimizer in ("adam", "adamw"):
        parameters = {**dict.fromkeys(_AUTO, "auto"), **optimizer.get("params", {})}
        config["optimizer"] = {**optimizer, "params": parameters}
    return config


_FSDP: Values = {
    "version": lambda s: 2,
    "policy": lambda s: "TRANSFORMER_BASED_WRAP",
    "plan.zero_stage": lambda s: 3 if s.plan.zero_stage == 3 else 2,
    "training.offload": lambda s: s.workload.offload,
    "plan.checkpointing": lambda s: s.plan.checkpointing,
}
"""Functions that return the values to write, by name in `launch_options/tables/fsdp.toml`."""


def _mixed_precision_policy(setting: LaunchSetting) -> str:
    """Return a `MixedPrecisionPolicy` expression with the forecast's data types, or "" without autocast."""
    if not script.uses_autocast(setting):
        return ""
    dtype = script.DTYPES[setting.workload.precision]
    reduced = "torch.float32" if setting.framework.has_fp32_gradients(setting.workload) else dtype
    return f"MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype={reduced}, output_dtype={dtype})"


_SDPA = {"flash": "flash", "efficient": "mem_efficient", "math": "math", "cudnn": "cudnn"}
"""Part of the name of PyTorch's switch for each backend of `scaled_dot_product_attention`."""
_CHOSEN = {"cudnn": "cudnn", "memoryEfficient": "efficient"}
"""Backend to leave on for each `Workload.attention` that `attn_implementation` of Transformers cannot select."""


def _attention_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python lines that switch off all attention backends except the one that the forecast assumes.

    If `attn_implementation` or PyTorch itself selects the backend, return no lines.
    """
    chosen = _CHOSEN.get(setting.workload.attention)
    others = [switch for name, switch in _SDPA.items() if chosen and name != chosen]
    return [f"torch.backends.cuda.enable_{switch}_sdp(False)" for switch in others]


def _model_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python lines that select the attention backend and build the model in FP32.

    By default, Transformers 5 would use the data type of the checkpoint. Jobs with adapters get no line that builds the
    model, because `script.model_lines` loads the base model.
    """
    if setting.workload.lora_rank or script.auto_class_suffix(setting) is None:
        return _attention_lines(setting)
    given = ["config", "dtype=torch.float32", *script.attention_arguments(setting)]
    model = f"model = AutoModel{script.auto_class_suffix(setting)}.from_config({', '.join(given)})"
    return [*_attention_lines(setting), model]


def _wrapping_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python lines that make FSDP wrap every layer, or none if it does so by default.

    By default FSDP wraps the classes in a model's `_no_split_modules`. Some models list no classes. Some models that
    consist of several towers list classes that do not exist, and then FSDP raises an error (Accelerate,
    utils/fsdp_utils.py: fsdp2_prepare_auto_wrap_policy).
    """
    head, family = script.auto_class_suffix(setting), setting.model.family
    if (
        not is_sharded(setting)
        or family in _LISTED
        or (head is None and zoo.list_recomputation_modes(setting.model) == ("none",))
    ):
        return []
    checkpointed = "(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))"
    plugin = "accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap"
    return [
        f"layers = {checkpointed if head else script.layers_expression(setting)}",
        f"{plugin} = list({{type(layer).__name__ for layer in layers}})",
    ]


def write_accelerate_launch(setting: LaunchSetting) -> LaunchScript:
    """Return an `accelerate launch` command with its configuration file and the lines of a training script."""
    plan, workload = setting.plan, setting.workload
    command = ["accelerate", "launch", "--config_file", "accelerate.yaml"]
    if setting.nodes > 1:
        command += ["--main_process_ip", "$MASTER_ADDR", "--main_process_port", f"{PORT}"]
    exchanged = f"num_steps={plan.gradient_accumulation}, sync_each_batch={is_sharded(setting)}"
    given = ["gradient_accumulation_plugin=accumulation"]
    lines = [*script.matmul_precision_lines(workload), f"accumulation = GradientAccumulationPlugin({exchanged})"]
    if is_sharded(setting) and (policy := _mixed_precision_policy(setting)):
        lines.append(f"policy = {policy}")
        lines.append("plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)")
        given.append("fsdp_plugin=plugin")
    elif plan.data > 1 and not is_sharded(setting):
        lines.append(f"ddp = DistributedDataParallelKwargs({script.bucket_arguments(setting)})")
        given.append("kwargs_handlers=[ddp]")
    lines += [
        f"accelerator = Accelerator({', '.join(given)})",
        *script.loader_lines(setting),
        *_model_lines(setting),
        *script.model_lines(setting),
        *_recomputation_lines(setting),
        *_wrapping_lines(setting),
        *script.optimizer_lines(setting),
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "for batch in loader:",
        "    with accelerator.accumulate(model):",
        "        accelerator.backward(loss_function(model, batch))",
        *(
            [
                "        if accelerator.sync_gradients:",
                "            accelerator.clip_grad_norm_(model.parameters(), 1.0)",
            ]
            if setting.framework.clips_gradients
            else []
        ),
        "        optimizer.step()",
        "        optimizer.zero_grad()",
    ]
    return LaunchScript(
        [*command, SCRIPT],
        files={"accelerate.yaml": _format_yaml(OptionTable.read("accelerate").format_sections(_ACCELERATE, setting))},
        script=lines,
    )


def _recomputation_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python lines that turn on recomputation, or none if the FSDP plugin turns it on."""
    if is_sharded(setting) and setting.plan.checkpointing == "full":
        return []
    if setting.plan.checkpointing == "full" and script.auto_class_suffix(setting):
        again = setting.framework.recomputes_last_product
        lines = [f'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={{"use_reentrant": {again}}})']
        return [*lines, *(["model.enable_input_require_grads()"] if again and setting.workload.lora_rank else [])]
    return script.recomputation_lines(setting, script.CHECKPOINT)


def _distributed_type(setting: LaunchSetting) -> str:
    """Return Accelerate's `DistributedType`."""
    return "FSDP" if is_sharded(setting) else "MULTI_GPU" if setting.plan.gpus > 1 else "NO"


def _value_if_sharded(value: Callable[[LaunchSetting], object]) -> Callable[[LaunchSetting], object]:
    """Return a function that returns the result of `value` for jobs that use `fully_shard`, and None for other jobs."""
    return lambda setting: value(setting) if is_sharded(setting) else None


_ACCELERATE: Values = {
    "environment": lambda s: "LOCAL_MACHINE",
    "distributed": _distributed_type,
    "world.nodes": lambda s: s.nodes,
    "world.gpus": lambda s: s.plan.gpus,
    "precision": lambda s: s.workload.precision if s.workload.is_mixed else "fp32",
    "uses_cpu": lambda s: False,
    "fp8": lambda s: "AO" if s.workload.precision == "fp8" else None,
    "rendezvous": lambda s: "c10d" if s.nodes > 1 else None,
    "training.execution": lambda s: s.workload.execution,
    **{name: _value_if_sharded(value) for name, value in _FSDP.items()},
    "state_dict": _value_if_sharded(lambda s: "SHARDED_STATE_DICT"),
}
"""Functions that return the values to write, by name in `launch_options/tables/accelerate.toml`."""


def _format_yaml(value: Mapping[str, object], indent: str = "") -> str:
    """Format nested mappings as YAML text. Scalars are written as JSON."""
    lines = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"{indent}{key}:", _format_yaml(item, f"{indent}  ").rstrip("\n")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(item)}")
    return "\n".join(lines) + "\n"


def _recomputes_in_trainer(setting: LaunchSetting) -> bool:
    """Return whether full recomputation is turned on by an argument of the `Trainer`."""
    return setting.plan.checkpointing == "full" and not is_sharded(setting)


def refusal_reason(setting: LaunchSetting) -> str:
    """Return why `Trainer` and Accelerate cannot run a setting as the forecast assumes. If they can, return ""."""
    if setting.workload.shard_degree is not None:
        return "its settings shard over all ranks"
    return "" if setting.workload.recompute_layers is None else "it recomputes all layers or none"


def _optimizer_name(setting: LaunchSetting) -> str:
    """Return the optimizer's name in `launch_options/tables/trainer.toml`.

    Adam is AdamW without weight decay. `OptimizerNames` has no kernel that updates many tensors by SGD.
    """
    if setting.workload.optimizer in ("sgd", "momentum"):
        return "sgd"
    return "adamw fused" if script.has_fused_optimizer(setting) else "adamw"


_TRAINER: Values = {
    "output": lambda s: f"out/{s.label}",
    "plan.micro_batch": lambda s: s.plan.micro_batch,
    "accumulation": lambda s: s.plan.gradient_accumulation,
    "training.steps": lambda s: s.workload.steps,
    "precision": lambda s: s.workload.precision,
    "tf32": lambda s: s.workload.precision,
    "training.optimizer": _optimizer_name,
    "momentum": lambda s: "momentum=0.9" if s.workload.optimizer == "momentum" else None,
    "clip": lambda s: 1.0 if s.framework.clips_gradients else 0.0,
    "plan.checkpointing": lambda s: "full" if _recomputes_in_trainer(s) else None,
    "recomputation":
        lambda s: json.dumps({"use_reentrant": s.framework.recomputes_last_product}) if _recomputes_in_trainer(s)
        else None,
    "training.execution": lambda s: s.workload.execution,
    "exchange": lambda s: _SYNC_EACH_MICRO_BATCH if is_sharded(s) and s.plan.gradient_accumulation > 1 else None,
    "training.bucketMiB": lambda s: None if is_sharded(s) or _is_deepspeed(s) else s.workload.bucket_mib,
    "fsdp": is_sharded,
    "fsdp_config": lambda s: "fsdp.json" if is_sharded(s) else None,
    "deepspeed": lambda s: "ds_config.json" if _is_deepspeed(s) else None,
}  # fmt: skip
"""Functions that return the values to write, by name in `launch_options/tables/trainer.toml`."""


def write_trainer_launch(setting: LaunchSetting) -> LaunchScript:
    """Return a `torchrun` command for a script that reads `TrainingArguments` from its command line."""
    fsdp = OptionTable.read("fsdp").format_sections(_FSDP, setting)
    files = {"fsdp.json": json.dumps(fsdp, indent=2) + "\n"} if is_sharded(setting) else {}
    if _is_deepspeed(setting):
        files["ds_config.json"] = json.dumps(_deepspeed_config(setting), indent=2) + "\n"
    lines = ["(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()", *_model_lines(setting)]
    lines += script.model_lines(setting)
    if setting.plan.checkpointing == "selective":
        lines += _recomputation_lines(setting)
    lines.append("trainer = Trainer(model=model, args=args, train_dataset=dataset)")
    if is_sharded(setting) and (policy := _mixed_precision_policy(setting)):
        lines.append(f"policy = {policy}")
        lines.append("trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy")
    lines += [line.replace("accelerator.", "trainer.accelerator.", 1) for line in _wrapping_lines(setting)]
    lines.append("trainer.train()")
    return LaunchScript(
        torchrun_command(setting, SCRIPT, *OptionTable.read("trainer").format_words(_TRAINER, setting)),
        files=files,
        script=lines,
    )
