"""What to type to run a plan: the options of a training framework that mean its degrees.

One table a framework. A row is an option and what it is for a `Setting`: None leaves it out, True writes the bare
option. Learning rates, data and tokenizers are the user's and appear in none.

Names are those of PyTorch 2 (torchrun, `fully_shard`), of DeepSpeed 0.16 and later (`tensor_parallel`), of Megatron-LM
with Megatron-Core 0.12 and later (`megatron/training/arguments.py`), and of torchtitan 0.2 (`config/job_config.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tilecast.render.units import duration
from tilecast.search import FRAMEWORKS
from tilecast.spec import Framework, Model, Plan, Plans, SpecError, Workload


@dataclass(frozen=True, slots=True)
class Setting:
    """A plan on nodes, and the job that it runs."""

    name: str
    workload: Workload
    plan: Plan
    pool: str
    nodes: int
    gpus_per_node: int
    step_s: float

    @property
    def model(self) -> Model:
        return self.workload.model

    def own(self, name: str) -> int:
        """A dimension that only the model's family has; 0 where it has none."""
        return int(self.model.extra.get(name, 0))


Value: TypeAlias = Callable[[Setting], object]
Table: TypeAlias = Sequence[tuple[str, Value]]


def launch(framework: str, setting: Setting) -> str:
    """The command, and the configuration it reads, as text ending in a newline.

    Raises:
        SpecError: the framework cannot run the plan or the model; the message says what of it.
    """
    executor, write = LAUNCHERS[framework]
    reason = cannot(executor, setting.workload, setting.plan)
    if reason:
        remedy = f"let the search keep to it: --launch {framework} without --plan"
        raise SpecError("--launch", f"{framework} cannot run {setting.plan}: {reason}", remedy)
    where = f"{setting.name} on {setting.pool}, {setting.nodes}x{setting.gpus_per_node} GPUs"
    head = f"# {where}: {setting.plan}, {duration(setting.step_s)} a step"
    return "\n".join([head, *write(setting)]) + "\n"


def cannot(framework: Framework, workload: Workload, plan: Plan) -> str:
    """What of a plan a framework does not execute; empty if nothing."""
    able = FRAMEWORKS[framework]
    if not workload.training:
        return "a forward pass alone is no training"
    if workload.lora_rank and framework in ("megatron", "torchtitan"):
        return "it trains no LoRA adapters"
    if workload.precision not in able.precisions:
        return f"it has no {workload.precision}"
    if workload.offload not in able.offload:
        return f"it does not offload {workload.offload}"
    if bool(able.executes(Plans.of(plan))[0]):
        return ""
    degrees = {"data": plan.data, "tensor": plan.tensor, "pipeline": plan.pipeline, "context": plan.context,
               "expert": plan.expert, "virtual": plan.virtual_stages}  # fmt: skip
    for name, degree in degrees.items():
        if degree > 1 and name not in able.parallelism:
            return f"it has no {name} parallelism" if name != "virtual" else "it has no virtual stages"
    if plan.checkpointing not in able.checkpointing:
        return f"it has no {plan.checkpointing} recomputation"
    if plan.tensor > 1 and plan.sequence_parallel not in able.sequence_parallel:
        return f"its tensor parallelism {'never' if plan.sequence_parallel else 'always'} splits norms by sequence"
    return f"it has no ZeRO stage {plan.zero_stage} with these degrees"


def _torchrun(setting: Setting, *program: str) -> list[str]:
    """The command; without a static first node, every node runs it alike."""
    if setting.nodes == 1:
        options = ["--standalone", f"--nproc-per-node={setting.gpus_per_node}"]
    else:
        options = [
            f"--nnodes={setting.nodes}",
            f"--nproc-per-node={setting.gpus_per_node}",
            "--rdzv-backend=c10d",
            '--rdzv-endpoint="$MASTER_ADDR:29500"',
            f"--rdzv-id={setting.name}",
        ]
    return _wrapped(["torchrun", *options, *program])


def _wrapped(words: Sequence[str]) -> list[str]:
    """A command over several lines of at most 100 columns, an option with its value kept together."""
    pieces: list[str] = []
    for word in words:
        if pieces and not word.startswith("-") and pieces[-1].startswith("--") and " " not in pieces[-1]:
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) < 98:
            lines[-1] += f" {piece}"
        else:
            lines.append(f"  {piece}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _options(setting: Setting, table: Table) -> list[str]:
    """The options of a table that a setting has, as words of a command."""
    words = []
    for option, value in table:
        found = value(setting)
        if found is True:
            words.append(option)
        elif found is not None and found is not False:
            words += [option, f"{found}"]
    return words


_DTYPE: Mapping[str, str] = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp8": "torch.bfloat16"}


def _script_notes(setting: Setting, lines: Sequence[tuple[str, bool]]) -> list[str]:
    """Lines of Python that the training script needs, those whose condition holds."""
    return ["", "# in train.py", *(line for line, wanted in lines if wanted)]


def _adapters(workload: Workload) -> str:
    return f"model = peft.get_peft_model(model, LoraConfig(r={workload.lora_rank})), before anything else"


def _ddp(setting: Setting) -> list[str]:
    plan, workload = setting.plan, setting.workload
    autocast = f'torch.autocast("cuda", {_DTYPE.get(workload.precision)}), around forward and loss'
    return [
        *_torchrun(setting, "train.py"),
        *_script_notes(
            setting,
            [
                (f"DataLoader(…, batch_size={plan.micro_batch})", True),
                ("model = DistributedDataParallel(model)", plan.data > 1),
                (
                    f"# {plan.gradient_accumulation} micro-batches a step, all but the last under model.no_sync()",
                    plan.gradient_accumulation > 1,
                ),
                (autocast, workload.is_mixed),
                ('torch.set_float32_matmul_precision("high")', workload.precision == "tf32"),
                ("torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), every layer",
                 plan.checkpointing == "full"),
                ("torch.utils.checkpoint.checkpoint(attention, …, use_reentrant=False), the attention of every layer",
                 plan.checkpointing == "selective"),
                ("model = torch.compile(model)", workload.execution == "compiled"),
                (_adapters(workload), workload.lora_rank > 0),
            ],
        ),
    ]  # fmt: skip


def _fsdp2(setting: Setting) -> list[str]:
    plan, workload = setting.plan, setting.workload
    dtype = _DTYPE.get(workload.precision)
    policies = ", mp_policy=policy" * workload.is_mixed
    policies += ", offload_policy=CPUOffloadPolicy()" * (workload.offload == "parameters")
    sharded = f"mesh=mesh, reshard_after_forward={plan.zero_stage == 3}{policies}"
    return [
        *_torchrun(setting, "train.py"),
        *_script_notes(
            setting,
            [
                (f"DataLoader(…, batch_size={plan.micro_batch})", True),
                (f'mesh = init_device_mesh("cuda", ({plan.data},), mesh_dim_names=("dp",))', True),
                (f"policy = MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype={dtype})", workload.is_mixed),
                ("torchao.float8.convert_to_float8_training(model)", workload.precision == "fp8"),
                ("checkpoint_wrapper(layer), every layer, before fully_shard", plan.checkpointing == "full"),
                ("checkpoint_wrapper(layer.attention), every layer, before fully_shard",
                 plan.checkpointing == "selective"),
                ("for layer in model.layers:", True),
                (f"    fully_shard(layer, {sharded})", True),
                (f"fully_shard(model, {sharded})", True),
                (f"# {plan.gradient_accumulation} micro-batches a step, each of which reduces its gradients",
                 plan.gradient_accumulation > 1),
                ('torch.set_float32_matmul_precision("high")', workload.precision == "tf32"),
                ("model.compile()", workload.execution == "compiled"),
                (_adapters(workload), workload.lora_rank > 0),
            ],
        ),
    ]  # fmt: skip


def _deepspeed(setting: Setting) -> list[str]:
    plan, workload = setting.plan, setting.workload
    zero: dict[str, object] = {"stage": plan.zero_stage, "overlap_comm": True}
    if workload.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if workload.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, object] = {
        "train_batch_size": workload.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation,
        "zero_optimization": zero,
    }
    if workload.precision in ("bf16", "fp16"):
        config[workload.precision] = {"enabled": True}
    if plan.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tensor}
    return [
        *_torchrun(setting, "train.py", "--deepspeed", "--deepspeed_config ds_config.json"),
        "",
        "# ds_config.json",
        json.dumps(config, indent=2),
        *_script_notes(
            setting,
            [
                ("engine, *_ = deepspeed.initialize(args, model=model, model_parameters=model.parameters())", True),
                (f"model = deepspeed.pipe.PipelineModule(layers, num_stages={plan.pipeline}"
                 f"{', activation_checkpoint_interval=1' * (plan.checkpointing == 'full')})", plan.pipeline > 1),
                (f"deepspeed.moe.layer.MoE(…, num_experts={setting.own('experts')}, ep_size={plan.expert})",
                 plan.expert > 1),
                ("deepspeed.checkpointing.checkpoint(layer, x), every layer",
                 plan.checkpointing == "full" and plan.pipeline == 1),
                (_adapters(workload), workload.lora_rank > 0),
            ],
        ),
    ]  # fmt: skip


_SCRIPTS: Mapping[str, str] = {
    "decoder": "pretrain_gpt.py",
    "moe": "pretrain_gpt.py",
    "deepseek": "pretrain_gpt.py",
    "encoder": "pretrain_bert.py",
    "encdec": "pretrain_t5.py",
}
"""Megatron-LM's training script by family."""


def _moe_frequency(setting: Setting) -> object:
    """Which layers are mixtures: one in so many, or a list where the first are dense."""
    dense, every = setting.own("first_dense"), max(setting.own("moe_every"), 1)
    if dense:
        return f'"([0]*{dense}+[1]*{setting.model.layers - dense})"'
    return every if every > 1 else None


def _last_stage(setting: Setting) -> object:
    """Layers of the last stage, where they do not divide."""
    stages, layers = setting.plan.pipeline, setting.model.layers
    return layers - -(-layers // stages) * (stages - 1) if layers % stages else None


_MEGATRON: Table = (
    ("--num-layers", lambda s: s.model.layers),
    ("--hidden-size", lambda s: s.model.hidden),
    ("--ffn-hidden-size", lambda s: s.own("dense_ffn_hidden") or s.model.ffn_hidden),
    ("--num-attention-heads", lambda s: s.model.heads),
    ("--group-query-attention", lambda s: s.model.kv_heads < s.model.heads and not s.own("latent")),
    ("--num-query-groups",
     lambda s: s.model.kv_heads if s.model.kv_heads < s.model.heads and not s.own("latent") else None),
    ("--kv-channels",
     lambda s: s.model.head_dim if s.model.head_dim * s.model.heads != s.model.hidden and not s.own("latent")
     else None),
    ("--multi-latent-attention", lambda s: s.own("latent") > 0),
    ("--q-lora-rank", lambda s: s.own("query_latent") or None),
    ("--kv-lora-rank", lambda s: s.own("latent") or None),
    ("--qk-head-dim", lambda s: s.model.head_dim - s.own("rotary_dim") if s.own("latent") else None),
    ("--qk-pos-emb-head-dim", lambda s: s.own("rotary_dim") if s.own("latent") else None),
    ("--v-head-dim", lambda s: s.own("value_dim") or None),
    ("--seq-length", lambda s: s.workload.sequence_length),
    ("--max-position-embeddings", lambda s: max(s.model.positions, s.workload.sequence_length)),
    ("--position-embedding-type", lambda s: "rope" if s.model.rotary else None),
    ("--normalization", lambda s: "RMSNorm" if s.model.rms_norm else None),
    ("--swiglu", lambda s: s.model.gated_mlp),
    ("--disable-bias-linear", lambda s: not s.model.bias),
    ("--qk-layernorm", lambda s: s.own("qk_norm") > 0),
    ("--untie-embeddings-and-output-weights", lambda s: not s.model.tied_embeddings),
    ("--attention-dropout", lambda s: None if s.model.dropout else 0.0),
    ("--hidden-dropout", lambda s: None if s.model.dropout else 0.0),
    ("--num-experts", lambda s: s.own("experts") or None),
    ("--moe-ffn-hidden-size", lambda s: s.model.ffn_hidden if s.own("experts") else None),
    ("--moe-router-topk", lambda s: s.own("top_k") if s.own("experts") else None),
    ("--moe-layer-freq", lambda s: _moe_frequency(s) if s.own("experts") else None),
    ("--moe-shared-expert-intermediate-size", lambda s: s.own("shared_ffn_hidden") or None),
    ("--moe-token-dispatcher-type", lambda s: "alltoall" if s.plan.expert > 1 else None),
    ("--moe-grouped-gemm", lambda s: s.own("experts") > 0),
    ("--attention-backend",
     lambda s: {"flash": "flash", "eager": "unfused"}.get(s.workload.attention)),
    ("--bf16", lambda s: s.workload.precision in ("bf16", "fp8")),
    ("--fp16", lambda s: s.workload.precision == "fp16"),
    ("--fp8-format", lambda s: "hybrid" if s.workload.precision == "fp8" else None),
    ("--optimizer", lambda s: {"sgd": "sgd", "momentum": "sgd"}.get(s.workload.optimizer, "adam")),
    ("--micro-batch-size", lambda s: s.plan.micro_batch),
    ("--global-batch-size", lambda s: s.workload.global_batch),
    ("--train-iters", lambda s: s.workload.steps),
    ("--tensor-model-parallel-size", lambda s: s.plan.tensor),
    ("--sequence-parallel", lambda s: s.plan.tensor > 1 and s.plan.sequence_parallel),
    ("--pipeline-model-parallel-size", lambda s: s.plan.pipeline),
    ("--num-virtual-stages-per-pipeline-rank",
     lambda s: s.plan.virtual_stages if s.plan.virtual_stages > 1 else None),
    ("--decoder-last-pipeline-num-layers", _last_stage),
    ("--context-parallel-size", lambda s: s.plan.context if s.plan.context > 1 else None),
    ("--expert-model-parallel-size", lambda s: s.plan.expert if s.plan.expert > 1 else None),
    ("--expert-tensor-parallel-size", lambda s: 1 if s.plan.expert > 1 and s.plan.tensor > 1 else None),
    ("--use-distributed-optimizer", lambda s: s.plan.zero_stage == 1),
    ("--overlap-grad-reduce", lambda s: s.plan.data > 1 and s.workload.overlap),
    ("--overlap-param-gather", lambda s: s.plan.zero_stage == 1 and s.workload.overlap),
    ("--optimizer-cpu-offload", lambda s: s.workload.offload == "optimizer"),
    ("--use-precision-aware-optimizer", lambda s: s.workload.offload == "optimizer"),
    ("--recompute-granularity", lambda s: s.plan.checkpointing if s.plan.checkpointing != "none" else None),
    ("--recompute-method", lambda s: "uniform" if s.plan.checkpointing == "full" else None),
    ("--recompute-num-layers", lambda s: 1 if s.plan.checkpointing == "full" else None),
)  # fmt: skip


def _megatron(setting: Setting) -> list[str]:
    model = setting.model
    if model.family not in _SCRIPTS:
        problem = f"Megatron-LM has no training script for {model.name} (family {model.family})"
        raise SpecError("--launch", problem, f"use another of {', '.join(LAUNCHERS)}")
    return _torchrun(setting, _SCRIPTS[model.family], *_options(setting, _MEGATRON))


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
"""torchtitan's name and flavor of the presets that it has."""


def _whole_share(setting: Setting) -> int:
    """Samples of one forward and backward schedule: a pipeline takes a rank's whole share at once."""
    plan = setting.plan
    return plan.micro_batch * (plan.gradient_accumulation if plan.pipeline > 1 else 1)


def _converters(setting: Setting) -> object:
    return ["quantize.linear.float8"] if setting.workload.precision == "fp8" else None


_RESHARD: Mapping[int, str] = {2: "never", 3: "always"}

_TORCHTITAN: Mapping[str, Table] = {
    "model": (
        ("name", lambda s: _FLAVORS.get(s.model.name, (None, None))[0]),
        ("flavor", lambda s: _FLAVORS.get(s.model.name, (None, None))[1]),
        ("converters", _converters),
    ),
    "optimizer": (("name", lambda s: {"adam": "Adam"}.get(s.workload.optimizer, "AdamW")),),
    "training": (
        ("local_batch_size", _whole_share),
        ("global_batch_size", lambda s: s.workload.global_batch),
        ("seq_len", lambda s: s.workload.sequence_length),
        ("steps", lambda s: s.workload.steps),
        ("mixed_precision_param", lambda s: "bfloat16" if s.workload.is_mixed else "float32"),
        ("enable_cpu_offload", lambda s: s.workload.offload == "parameters" or None),
    ),
    "parallelism": (
        ("data_parallel_replicate_degree", lambda s: s.plan.data if s.plan.zero_stage == 0 else 1),
        ("data_parallel_shard_degree", lambda s: s.plan.data if s.plan.zero_stage else 1),
        ("fsdp_reshard_after_forward", lambda s: _RESHARD.get(s.plan.zero_stage)),
        ("tensor_parallel_degree", lambda s: s.plan.tensor),
        ("pipeline_parallel_degree", lambda s: s.plan.pipeline),
        ("pipeline_parallel_schedule",
         lambda s: ("Interleaved1F1B" if s.plan.virtual_stages > 1 else "1F1B") if s.plan.pipeline > 1 else None),
        ("pipeline_parallel_layers_per_stage",
         lambda s: s.model.layers // (s.plan.pipeline * s.plan.virtual_stages) if s.plan.virtual_stages > 1 else None),
        ("pipeline_parallel_first_stage_less_layers", lambda s: 0 if s.plan.pipeline > 1 else None),
        ("pipeline_parallel_last_stage_less_layers", lambda s: 0 if s.plan.pipeline > 1 else None),
        ("pipeline_parallel_microbatch_size", lambda s: s.plan.micro_batch if s.plan.pipeline > 1 else None),
        ("context_parallel_degree", lambda s: s.plan.context),
        ("expert_parallel_degree", lambda s: s.plan.expert if s.plan.expert > 1 else None),
    ),
    "activation_checkpoint": (
        ("mode", lambda s: s.plan.checkpointing),
        ("selective_ac_option", lambda s: "op" if s.plan.checkpointing == "selective" else None),
    ),
    "compile": (("enable", lambda s: s.workload.execution == "compiled"),),
}  # fmt: skip


def _torchtitan(setting: Setting) -> list[str]:
    if setting.model.family not in ("decoder", "moe", "deepseek"):
        problem = f"torchtitan trains no {setting.model.name} (family {setting.model.family})"
        raise SpecError("--launch", problem, f"use another of {', '.join(LAUNCHERS)}")
    lines = [*_torchrun(setting, "-m torchtitan.train", "--job.config_file job.toml"), "", "# job.toml"]
    if setting.model.name not in _FLAVORS:
        lines.append(f"# torchtitan ships no flavor of {setting.model.name}: register its dimensions under [model]")
    for section, table in _TORCHTITAN.items():
        found = [(key, value(setting)) for key, value in table]
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in found if value is not None]
    if setting.plan.checkpointing == "selective":
        lines.append("# operator-level recomputation is the closest it has to recomputing the attention core")
    return lines


LAUNCHERS: Mapping[str, tuple[Framework, Callable[[Setting], list[str]]]] = {
    "torchrun": ("ddp", _ddp),
    "fsdp2": ("fsdp2", _fsdp2),
    "deepspeed": ("deepspeed", _deepspeed),
    "megatron": ("megatron", _megatron),
    "torchtitan": ("torchtitan", _torchtitan),
}
"""What `--launch` knows: the framework whose plans it runs, and how it is told."""
