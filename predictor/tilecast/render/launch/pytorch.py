"""Write the `torchrun` launch of DistributedDataParallel or `fully_shard`, for PyTorch 2."""

from __future__ import annotations

from tilecast.render.launch import script
from tilecast.render.launch.setting import SCRIPT, LaunchScript, LaunchSetting, torchrun_command


def write_ddp_launch(setting: LaunchSetting) -> LaunchScript:
    """Return the launch of a script that wraps the model in DistributedDataParallel."""
    plan, workload = setting.plan, setting.workload
    wrapped = []
    if workload.execution == "cudaGraphs":
        wrapped.append("model = torch.cuda.make_graphed_callables(model, (sample,))")
    if plan.data > 1:
        wrapped.append(f"model = DistributedDataParallel(model, {script.bucket_arguments(setting)})")
    if workload.execution == "compiled":
        wrapped.append("model = torch.compile(model)")
    autocast = [f'torch.autocast("cuda", {script.DTYPES[workload.precision]})'] if script.uses_autocast(setting) else []
    lines = [
        *script.matmul_precision_lines(workload),
        *script.distributed_loader_lines(setting),
        *script.model_lines(setting),
        *script.recomputation_lines(setting, script.CHECKPOINT),
        *wrapped,
        *script.optimizer_lines(setting),
        *script.training_loop_lines(setting, autocast, "model.no_sync()" if plan.data > 1 else ""),
    ]
    return LaunchScript(torchrun_command(setting, SCRIPT), script=lines)


def write_fsdp2_launch(setting: LaunchSetting) -> LaunchScript:
    """Return the launch of a script that calls `fully_shard` on every layer and on the model.

    For ZeRO 2, weights are not resharded after the forward pass.
    """
    plan, workload = setting.plan, setting.workload
    policies = []
    if script.uses_autocast(setting):
        dtype = script.DTYPES[workload.precision]
        reduced = "torch.float32" if setting.framework.has_fp32_gradients(workload) else dtype
        policies.append(f"mp_policy=MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype={reduced})")
    if workload.offload == "parameters":
        policies.append("offload_policy=CPUOffloadPolicy()")
    copies = plan.data // setting.shard_degree
    shape = f'({plan.data},), mesh_dim_names=("dp",)'
    if copies > 1:
        shape = f'({copies}, {setting.shard_degree}), mesh_dim_names=("replicate", "shard")'
    shared = ["mesh=mesh", f"reshard_after_forward={plan.zero_stage == 3}", *policies]
    lines = [
        *script.matmul_precision_lines(workload),
        *script.distributed_loader_lines(setting),
        *script.model_lines(setting),
        *(["torchao.float8.convert_to_float8_training(model)"] if workload.precision == "fp8" else []),
        *script.recomputation_lines(setting, script.CHECKPOINT),
        f'mesh = init_device_mesh("cuda", {shape})',
        "options = dict(",
        *(f"    {option}," for option in shared),
        ")",
        f"for layer in {script.layers_expression(setting)}:",
        "    fully_shard(layer, **options)",
        "fully_shard(model, **options)",
        *(["model.compile()"] if workload.execution == "compiled" else []),
        *script.optimizer_lines(setting),
        *script.training_loop_lines(setting, []),
    ]
    return LaunchScript(torchrun_command(setting, SCRIPT), script=lines)
