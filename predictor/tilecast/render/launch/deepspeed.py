"""Write the launch of DeepSpeed: `ds_config.json` and the lines that initialize the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from tilecast.frameworks import gradient_bytes
from tilecast.launch_options.options_table import OptionTable
from tilecast.overlap import BucketLimits, hides_gradients
from tilecast.render.launch import script
from tilecast.render.launch.setting import SCRIPT, LaunchScript, LaunchSetting, Values, torchrun_command
from tilecast.spec import Optimizer, Plans

_OPTIMIZERS: Mapping[Optimizer, tuple[str, Mapping[str, object]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {"adam_w_mode": False}),
    "adamw": ("AdamW", {}),
    "lamb": ("Lamb", {}),
}
"""DeepSpeed's type and parameters of each optimizer. It has fused Adam and Lamb. SGD comes from `torch.optim`."""


def _find_optimizer_type(setting: LaunchSetting) -> str | None:
    """Return DeepSpeed's name for the type of the job's optimizer, or None if DeepSpeed has no such optimizer."""
    return _OPTIMIZERS[setting.workload.optimizer][0] if setting.workload.optimizer in _OPTIMIZERS else None


def _optimizer_parameters(setting: LaunchSetting) -> Mapping[str, object] | None:
    """Return the parameters of the optimizer for DeepSpeed's configuration, fused or not as the forecast assumes."""
    if setting.workload.optimizer not in _OPTIMIZERS:
        return None
    (kind, parameters), fused = _OPTIMIZERS[setting.workload.optimizer], script.has_fused_optimizer(setting)
    how = {"SGD": {"fused": fused}, "Lamb": {}}.get(kind, {"torch_adam": not fused})
    return {**parameters, **how}


def _gradient_type(setting: LaunchSetting) -> str | None:
    """Return the data type in which gradients accumulate, or None to use DeepSpeed's default."""
    workload = setting.workload
    if workload.precision not in ("bf16", "fp16"):
        return None
    return "fp32" if setting.framework.has_fp32_gradients(workload) else workload.precision


def _bucket_elements(setting: LaunchSetting) -> int | None:
    """Return the number of elements in a gradient bucket that the forecast assumes, or None without ZeRO."""
    plan, workload = setting.plan, setting.workload
    if not plan.zero_stage:
        return None
    each = gradient_bytes(workload)
    limits = BucketLimits.from_plans(workload, Plans.from_plans(plan), each, np.zeros(1))
    return round(float(limits.rest[0]) / each)


def _is_untested(setting: LaunchSetting) -> bool:
    """Return whether DeepSpeed needs `zero_allow_untested_optimizer` to accept the optimizer."""
    kind = _find_optimizer_type(setting)
    return kind is not None and not kind.startswith("Adam")


_VALUES: Values = {
    "training.globalBatchSize": lambda s: s.workload.global_batch,
    "plan.micro_batch": lambda s: s.plan.micro_batch,
    "accumulation": lambda s: s.plan.gradient_accumulation,
    "clip": lambda s: 1.0 if s.framework.clips_gradients else 0.0,
    "plan.zero_stage": lambda s: s.plan.zero_stage,
    # Stage 3 is priced with overlap whatever the job says.
    "overlap": lambda s: hides_gradients(s.workload) or s.plan.zero_stage == 3,
    "bucket": _bucket_elements,
    "even_bucket": lambda s: None if (count := _bucket_elements(s)) is None else count - count % 2,
    "offload_optimizer": lambda s: "optimizer" if s.workload.offload != "none" else None,
    "pins_optimizer": lambda s: True if s.workload.offload != "none" else None,
    "offload_parameters": lambda s: "parameters" if s.workload.offload == "parameters" else None,
    "pins_parameters": lambda s: True if s.workload.offload == "parameters" else None,
    "bf16": lambda s: "bf16" if s.workload.precision == "bf16" else None,
    "fp16": lambda s: "fp16" if s.workload.precision == "fp16" else None,
    "training.gradientPrecision": _gradient_type,
    "training.optimizer": lambda s: "momentum" if _find_optimizer_type(s) == "SGD" else s.workload.optimizer,
    "parameters": _optimizer_parameters,
    "allows_any": lambda s: True if _is_untested(s) else None,
    "forces_own": lambda s: False if _is_untested(s) else None,
    "plan.tensor": lambda s: s.plan.tensor if s.plan.tensor > 1 else None,
}
"""Functions that return the values to write, by name in `launch_options/tables/deepspeed.toml`."""


def engine_config(setting: LaunchSetting) -> dict[str, object]:
    """Return the content of `ds_config.json`: ZeRO, data types, batch sizes and optimizer."""
    return OptionTable.read("deepspeed").format_sections(_VALUES, setting)


def _loop_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python lines of the training loop."""
    forward, inside = script.attention_context_managers(setting), "loss = loss_function(engine, batch)"
    if setting.plan.pipeline > 1:
        return ["while True:", *script.indent_under_contexts(forward, ["loss = engine.train_batch()"])]
    return [
        "for batch in loader:",
        *script.indent_under_contexts(forward, [inside]),
        "    engine.backward(loss)",
        "    engine.step()",
    ]


def write_deepspeed_launch(setting: LaunchSetting) -> LaunchScript:
    """Return the launch of a script that calls `deepspeed.initialize` on every rank."""
    plan, workload = setting.plan, setting.workload
    lines = [*script.matmul_precision_lines(workload), *script.model_lines(setting)]
    if plan.expert > 1:
        shape = f"num_experts={setting.transformer.experts}, ep_size={plan.expert}"
        lines.append(f"moe = deepspeed.moe.layer.MoE(hidden_size={setting.model.hidden}, expert=mlp, {shape})")
    if plan.pipeline > 1:
        interval = int(plan.checkpointing == "full")
        stages = f"num_stages={plan.pipeline}, activation_checkpoint_interval={interval}"
        lines.append(f"model = deepspeed.pipe.PipelineModule(layers, {stages})")
    else:
        wrap = "{module}.forward = functools.partial(deepspeed.checkpointing.checkpoint, {module}.forward)"
        lines += script.recomputation_lines(setting, wrap)
    # Its own loader gives each data-parallel rank another share, with the micro-batch of the file.
    given = "args, model=model, model_parameters=model.parameters(), training_data=dataset"
    lines.append(f"engine, _, loader, _ = deepspeed.initialize({given})")
    if workload.execution == "compiled":
        lines.append("engine.compile()")
    lines += _loop_lines(setting)
    files = {"ds_config.json": json.dumps(engine_config(setting), indent=2) + "\n"}
    command = torchrun_command(setting, SCRIPT, "--deepspeed", "--deepspeed_config", "ds_config.json")
    return LaunchScript(command, files=files, script=lines)
