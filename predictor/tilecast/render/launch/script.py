"""Write the lines of a PyTorch training script by which training runs as the forecast assumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilecast import fuse, zoo
from tilecast.frameworks import has_fused_kernels
from tilecast.render.launch.setting import LaunchSetting
from tilecast.spec import Attention, Optimizer, Workload
from tilecast.zoo import ADAPTED, FAMILIES

DTYPES: Mapping[str, str] = {
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
    "fp8": "torch.bfloat16",
    "mxfp8": "torch.bfloat16",
    "nvfp4": "torch.bfloat16",
}
"""PyTorch data type of autocast for each `Workload.precision`."""
_OPTIMIZERS: Mapping[Optimizer, str] = {
    "sgd": "torch.optim.SGD(model.parameters(), {how})",
    "momentum": "torch.optim.SGD(model.parameters(), momentum=0.9, {how})",
    "adam": "torch.optim.Adam(model.parameters(), {how})",
    "adamw": "torch.optim.AdamW(model.parameters(), {how})",
    "lamb": "apex.optimizers.FusedLAMB(model.parameters())",
}
CHECKPOINT = "{module}.forward = functools.partial(checkpoint, {module}.forward, use_reentrant=False)"
"""Statement that recomputes a module with `torch.utils.checkpoint`."""
_BACKENDS: Mapping[Attention, str] = {
    "flash": "FLASH_ATTENTION", "flash2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION",
    "memoryEfficient": "EFFICIENT_ATTENTION", "eager": "MATH",
}  # fmt: skip
"""PyTorch's `SDPBackend` for each `Workload.attention`."""


def uses_autocast(setting: LaunchSetting) -> bool:
    """Return whether the job computes in 16 bits but stores weights in FP32."""
    return setting.workload.is_mixed and setting.framework.weights != "pure"


def matmul_precision_lines(workload: Workload) -> list[str]:
    """Return a Python line that turns TF32 on or off, or none for a mixed-precision job.

    PyTorch's default is FP32 for matrix products and TF32 for convolutions.
    """
    if workload.is_mixed:
        return []
    allowed = workload.precision == "tf32"
    return [f"torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = {allowed}"]


def auto_class_suffix(setting: LaunchSetting) -> str | None:
    """Return the suffix of the model's `AutoModel` class, or None if Transformers cannot build the model."""
    return zoo.auto_model_suffix(setting.model)


def layers_expression(setting: LaunchSetting) -> str:
    """Return a Python expression for the list of a model's layers."""
    lists = ("layers",) if setting.model.trace is not None else FAMILIES[setting.model.family].blocks
    names = [f"model.{name}" for name in lists]
    return names[0] if len(names) == 1 else f"[{', '.join(f'*{name}' for name in names)}]"


def attention_arguments(setting: LaunchSetting) -> list[str]:
    """Return the `attn_implementation` argument of a Transformers model, or none for other models."""
    named = {"flash": "flash_attention_2", "flash2": "flash_attention_2", "eager": "eager"}
    chosen = named.get(setting.workload.attention, "sdpa")
    chooses = setting.model.family in ADAPTED and auto_class_suffix(setting) is not None
    return [f'attn_implementation="{chosen}"'] if chooses else []


def _pretrained_model_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python lines that load the frozen base model of a LoRA job, quantized if the job requires it.

    A mixed-precision job loads it in 16 bits. PEFT makes the adapters FP32 (`autocast_adapter_dtype` of
    `get_peft_model`).
    """
    workload, lines = setting.workload, list[str]()
    given = ["checkpoint", f"dtype={DTYPES.get(workload.precision, 'torch.float32')}"]
    if workload.frozen_bits < 16:
        dtype = DTYPES[workload.precision]
        options = ["load_in_8bit=True"]
        if workload.frozen_bits < 8:
            options = ["load_in_4bit=True", 'bnb_4bit_quant_type="nf4"', f"bnb_4bit_compute_dtype={dtype}"]
            # ZeRO spreads only tensors of floats (bitsandbytes, FSDP-QLoRA).
            options += [f"bnb_4bit_quant_storage={dtype}"] if setting.plan.zero_stage >= 2 else []
        lines += ["quantized = BitsAndBytesConfig(", f"    {', '.join(options)}", ")"]
        given.append("quantization_config=quantized")
    given += attention_arguments(setting)
    return [*lines, f"model = AutoModel{auto_class_suffix(setting)}.from_pretrained(", f"    {', '.join(given)}", ")"]


def model_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python lines that prepare the model and the loss before the model is wrapped.

    Jobs with adapters load the base model first.
    """
    workload, lines = setting.workload, list[str]()
    if workload.lora_rank:
        if auto_class_suffix(setting) is None:
            lines.append("# model: the pretrained one, which the adapters are added to")
        else:
            lines += _pretrained_model_lines(setting)
        # Without target_modules PEFT chooses projections of attention.
        targets = f"r={workload.lora_rank}"
        targets += ', target_modules="all-linear"' if workload.lora_targets == "all" else ""
        targets += ", use_dora=True" if workload.dora else ""
        lines.append(f"model = peft.get_peft_model(model, LoraConfig({targets}))")
    if workload.memory_format == "channelsLast":
        lines.append("model = model.to(memory_format=torch.channels_last)")
    if has_fused_kernels(workload):
        lines.append(
            "# with fused kernels for bias, activation, dropout, mask and softmax, such as Apex's, in the model"
        )
    if setting.framework.weights == "pure" and workload.is_mixed:
        lines.append(f"model = model.to({DTYPES[workload.precision]})  # optimizer too, no FP32 copy")
    if "loss" in fuse.passes(replace(workload, execution="eager")) or setting.framework.loss == "fused":
        lines.append("loss_function = flash_attn.losses.cross_entropy.CrossEntropyLoss(inplace_backward=True)")
    return lines


def has_fused_optimizer(setting: LaunchSetting) -> bool:
    """Return whether the forecast assumes a fused optimizer, which updates many tensors in one kernel."""
    return "optimizer" in fuse.passes(setting.workload)


def optimizer_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python line that builds the optimizer, fused or not as the forecast assumes."""
    how = "fused=True" if has_fused_optimizer(setting) else "foreach=True"
    return [f"optimizer = {_OPTIMIZERS[setting.workload.optimizer].format(how=how)}"]


def bucket_arguments(setting: LaunchSetting) -> str:
    """Return the gradient-bucket arguments of DistributedDataParallel as Python text."""
    size = setting.workload.bucket_mib
    capped = "" if size is None else f"bucket_cap_mb={size}, "
    return f"{capped}gradient_as_bucket_view={setting.framework.gradient_copies == 1.0}"


def loader_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python line that builds the data loader, with the micro-batch as its batch size."""
    return [f"loader = DataLoader(dataset, batch_size={setting.plan.micro_batch})"]


def distributed_loader_lines(setting: LaunchSetting) -> list[str]:
    """Return the Python lines that initialize the process group and build a data loader of this rank's own samples.

    Without a `DistributedSampler` every rank would train on the same samples.
    """
    if setting.plan.gpus == 1:
        return loader_lines(setting)
    return [
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        "torch.distributed.init_process_group()",
        f"loader = DataLoader(dataset, batch_size={setting.plan.micro_batch}, sampler=DistributedSampler(dataset))",
    ]


def attention_context_managers(setting: LaunchSetting) -> list[str]:
    """Return the context managers that select the attention backend, or none if PyTorch chooses it."""
    backend = _BACKENDS.get(setting.workload.attention)
    return [f"sdpa_kernel(SDPBackend.{backend})"] if backend else []


def indent_under_contexts(managers: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Return the indented lines of a loop's body, enclosed in a `with` statement if there are context managers."""
    return _indent_lines([f"with {', '.join(managers)}:", *_indent_lines(lines)] if managers else lines)


def training_loop_lines(setting: LaunchSetting, forward: Sequence[str], deferred_context: str = "") -> list[str]:
    """Return the Python lines of a training loop with gradient accumulation.

    Args:
        setting: the plan and its job.
        forward: context managers of the forward pass.
        deferred_context: context manager that postpones the gradient exchange to the last micro-batch, or an empty
            string if every micro-batch exchanges its gradients.
    """
    workload, count = setting.workload, setting.plan.gradient_accumulation
    scaled = workload.precision == "fp16"
    forward = [*forward, *attention_context_managers(setting)]
    share = f" / {count}" if count > 1 else ""
    loss = f"loss = loss_function(model, batch){share}"
    body = [f"with {', '.join(forward)}:", f"    {loss}"] if forward else [loss]
    body.append("scaler.scale(loss).backward()" if scaled else "loss.backward()")
    if count > 1 and deferred_context:
        body = [f"with contextlib.nullcontext() if i % {count} == 0 else {deferred_context}:", *_indent_lines(body)]
    update = ["scaler.unscale_(optimizer)"] if scaled and setting.framework.clips_gradients else []
    if setting.framework.clips_gradients:
        update.append("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
    update += ["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]
    update.append("optimizer.zero_grad()")
    head = ["scaler = torch.amp.GradScaler()"] if scaled else []
    if count == 1:
        return [*head, "for batch in loader:", *_indent_lines([*body, *update])]
    counted = f"for i, batch in enumerate(loader, start=1):  # {count} micro-batches a step"
    return [*head, counted, *_indent_lines(body), f"    if i % {count} == 0:", *_indent_lines(_indent_lines(update))]


def recomputation_lines(setting: LaunchSetting, wrap: str) -> list[str]:
    """Return the Python lines that turn on recomputation of layers or of attention cores, or [] without recomputation.

    `wrap` is the statement that turns recomputation on for one module, with `{module}` as a placeholder.
    """
    module = {"full": "layer", "selective": "layer.attention.core"}.get(setting.plan.checkpointing)
    count = setting.workload.recompute_layers
    chosen = layers_expression(setting) + ("" if count is None else f"[:{count}]")
    return [f"for layer in {chosen}:", f"    {wrap.format(module=module)}"] if module else []


def _indent_lines(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
