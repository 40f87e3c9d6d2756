"""Write the launch of DeepSpeed 0.19, which is `ds_config.json` and the lines that initialize the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from tilecast.frameworks import gradient_bytes
from tilecast.overlap import BucketLimits, hides_gradients
from tilecast.render.launch import script
from tilecast.render.launch.setting import SCRIPT, LaunchScript, LaunchSetting, torchrun_command
from tilecast.spec import Optimizer, Plans

_OPTIMIZERS: Mapping[Optimizer, tuple[str, Mapping[str, object]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {"adam_w_mode": False}),
    "adamw": ("AdamW", {}),
    "lamb": ("Lamb", {}),
}
"""DeepSpeed's type and parameters of each optimizer. It has fused Adam and Lamb. SGD comes from `torch.optim`."""


def engine_config(setting: LaunchSetting) -> dict[str, object]:
    """Return the content of `ds_config.json`: ZeRO, data types, batch sizes and optimizer."""
    plan, workload = setting.plan, setting.workload
    settings: dict[str, object] = {
        "train_batch_size": workload.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation,
        "gradient_clipping": 1.0 if setting.framework.clips_gradients else 0.0,
        "zero_optimization": _zero_config(setting),
    }
    if workload.precision in ("bf16", "fp16"):
        wide = setting.framework.has_fp32_gradients(workload)
        settings[workload.precision] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32" if wide else workload.precision}
    if workload.optimizer in _OPTIMIZERS:
        (kind, parameters), fused = _OPTIMIZERS[workload.optimizer], script.has_fused_optimizer(setting)
        how = {"SGD": {"fused": fused}, "Lamb": {}}.get(kind, {"torch_adam": not fused})
        settings["optimizer"] = {"type": kind, "params": {**parameters, **how}}
        if not kind.startswith("Adam"):
            settings["zero_allow_untested_optimizer"] = True
            settings["zero_force_ds_cpu_optimizer"] = False
    if plan.tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": plan.tensor}
    return settings


def _zero_config(setting: LaunchSetting) -> dict[str, object]:
    """Return the ZeRO section of `ds_config.json`, with the overlap and the bucket sizes that the forecast assumes.

    For ZeRO stage 0 it has no bucket sizes.
    """
    plan, workload = setting.plan, setting.workload
    # Stage 3 is priced with overlap whatever the job says.
    settings: dict[str, object] = {
        "stage": plan.zero_stage,
        "overlap_comm": hides_gradients(workload) or plan.zero_stage == 3,
    }
    if plan.zero_stage:
        each = gradient_bytes(workload)
        bucket = round(
            float(BucketLimits.from_plans(workload, Plans.from_plans(plan), each, np.zeros(1)).rest[0]) / each
        )
        settings["reduce_bucket_size"] = bucket
        settings["allgather_bucket_size"] = bucket - bucket % 2
    if workload.offload != "none":
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if workload.offload == "parameters":
        settings["offload_param"] = {"device": "cpu", "pin_memory": True}
    return settings


def _loop_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python lines of the training loop."""
    forward, inside = script.attention_contexts(setting), "loss = loss_function(engine, batch)"
    if setting.plan.pipeline > 1:
        return [
            "batches = iter(loader)",
            "while True:",
            *script.indent_under_contexts(forward, ["loss = engine.train_batch(batches)"]),
        ]
    return [
        "for batch in loader:",
        *script.indent_under_contexts(forward, [inside]),
        "    engine.backward(loss)",
        "    engine.step()",
    ]


def write_deepspeed_launch(setting: LaunchSetting) -> LaunchScript:
    """Return the launch of a script that calls `deepspeed.initialize` on every rank."""
    plan, workload = setting.plan, setting.workload
    lines = [*script.matmul_precision_lines(workload), *script.loader_lines(setting), *script.model_lines(setting)]
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
    lines.append("engine, *_ = deepspeed.initialize(args, model=model, model_parameters=model.parameters())")
    if workload.execution == "compiled":
        lines.append("engine.compile()")
    lines += _loop_lines(setting)
    files = {"ds_config.json": json.dumps(engine_config(setting), indent=2) + "\n"}
    command = torchrun_command(setting, SCRIPT, "--deepspeed", "--deepspeed_config", "ds_config.json")
    return LaunchScript(command, files=files, script=lines)
