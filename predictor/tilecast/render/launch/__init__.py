"""Write the command, the configuration files and the training-script lines that launch a plan.

Each launcher has a module. Its output depends on the same inputs as the forecast: the plan, the workload and the
framework's record in `frameworks.toml`. Learning rates, data and tokenizers are left to the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tilecast import frameworks, untrusted, zoo
from tilecast.frameworks import FRAMEWORKS, with_framework
from tilecast.launch_options.options_table import UNKNOWN, OptionTable
from tilecast.render.launch import deepspeed, huggingface, megatron, pytorch, torchtitan
from tilecast.render.launch.setting import LaunchScript, LaunchSetting, OwnCommand, is_script_name
from tilecast.render.units import format_duration, format_memory
from tilecast.search import find_engine, find_framework_features
from tilecast.spec import (
    PRECISIONS,
    Attention,
    Execution,
    Framework,
    Optimizer,
    Plan,
    Plans,
    Precision,
    SpecError,
    Weights,
    Workload,
)

__all__ = [
    "LAUNCHERS",
    "LaunchScript",
    "LaunchSetting",
    "Launcher",
    "OwnCommand",
    "carry_over",
    "check_launchable",
    "choose_setting",
    "find_unsupported_feature",
    "list_launchers",
    "write_launch",
]

_ALL: tuple[Optimizer, ...] = ("sgd", "momentum", "adam", "adamw", "lamb")
_ANY: tuple[Attention, ...] = ("auto", "flash", "eager", "flash2", "cudnn", "memoryEfficient")


def _no_refusal(setting: LaunchSetting) -> str:
    """Return an empty string, for launchers that can run every setting."""
    return ""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that launches training jobs, with the function that writes its command and the jobs it supports."""

    options: str
    """Name of its table in `launch_options/tables`."""
    frameworks: tuple[Framework, ...]
    """Frameworks as which its jobs are forecast. The first one that can execute the plan is used."""
    write: Callable[[LaunchSetting], LaunchScript]
    executions: tuple[Execution, ...] = ("eager", "compiled")
    optimizers: tuple[Optimizer, ...] = _ALL
    attention: tuple[Attention, ...] = _ANY
    precisions: tuple[Precision, ...] = PRECISIONS
    families: tuple[str, ...] = ()
    """Model families for which it has a training script. Empty if the user supplies the script."""
    reads_loss: bool = False
    """Whether the loss comes from the output of a Transformers model."""
    weights: tuple[Weights, ...] = ()
    """Values of `Workload.weights` that it can set besides its framework's default."""
    requests_types: bool = False
    """Whether it can set the data types of gradients and optimizer moments."""
    has_adapters: bool = True
    """Whether the training script can add LoRA adapters."""
    also: tuple[Framework, ...] = ()
    """Frameworks that it runs too, only for jobs that name them."""
    offloads_activations: bool = False
    """Whether it can set the offloading of activations to the host."""
    find_refusal: Callable[[LaunchSetting], str] = _no_refusal
    """Function that returns why a setting would not run as priced, or an empty string if it would."""

    def runs(self, framework: Framework) -> bool:
        """Return whether the launcher runs jobs of a framework: of its own, or of one with the same training engine."""
        own = map(find_engine, self.frameworks)
        return framework in self.also or (find_engine(framework) in own and FRAMEWORKS[framework].host != "graph")

    @property
    def version(self) -> str:
        """Product and version for which the options are written, such as `torchtitan 0.2`."""
        return OptionTable.read(self.options).writes

    @property
    def source(self) -> str:
        """Reference to the files of the framework that define the options of its launcher."""
        return OptionTable.read(self.options).source


LAUNCHERS: Mapping[str, Launcher] = {
    "torchrun": Launcher(
        "torchrun", ("ddp",), pytorch.write_ddp_launch, ("eager", "compiled", "cudaGraphs"), weights=("pure",)
    ),
    "fsdp2": Launcher("fsdp2", ("fsdp2",), pytorch.write_fsdp2_launch, weights=("pure",)),
    "deepspeed": Launcher("deepspeed", ("deepspeed",), deepspeed.write_deepspeed_launch),
    "megatron": Launcher(
        "megatron",
        ("megatron",),
        megatron.write_megatron_launch,
        families=tuple(megatron.SCRIPTS),
        executions=("eager", "cudaGraphs"),
        attention=("auto", "flash", "eager", "flash2", "flash3", "cudnn"),
        optimizers=("sgd", "momentum", "adam", "adamw"),
        requests_types=True,
        has_adapters=False,
        offloads_activations=True,
        find_refusal=megatron.refusal_reason,
    ),
    "torchtitan": Launcher(
        torchtitan.TABLE,
        ("torchtitan",),
        torchtitan.write_torchtitan_launch,
        families=torchtitan.FAMILIES,
        optimizers=("adam", "adamw"),
        attention=("auto", "flash"),
        has_adapters=False,
        find_refusal=torchtitan.refusal_reason,
    ),
    "accelerate": Launcher(
        "accelerate",
        ("huggingface", "accelerate"),
        huggingface.write_accelerate_launch,
        find_refusal=huggingface.refusal_reason,
    ),
    "trainer": Launcher(
        "trainer",
        ("huggingface", "accelerate"),
        huggingface.write_trainer_launch,
        also=("huggingface-deepspeed",),
        precisions=("fp32", "tf32", "fp16", "bf16"),
        optimizers=("sgd", "momentum", "adam", "adamw"),
        reads_loss=True,
        find_refusal=huggingface.refusal_reason,
    ),
}
"""Launchers by their name for `--launch`."""


def write_launch(launcher: str, setting: LaunchSetting) -> LaunchScript:
    """Return the command, the files and the script lines that run a plan.

    Args:
        launcher: a key of `LAUNCHERS`.
        setting: the plan and its job. If the job names no framework, a framework of the launcher is chosen.

    Raises:
        SpecError: the launcher cannot run the plan or the job as the forecast assumes. The message says why.
    """
    check_launchable(launcher, setting.workload)
    chosen = _with_framework(launcher, setting)
    framework = chosen.workload.framework
    reason = find_unsupported_feature(framework, chosen.workload, chosen.plan) if framework else ""
    if reason := reason or LAUNCHERS[launcher].find_refusal(chosen):
        remedy = f"let the search keep to it: --launch {launcher} without --plan, or use another launcher"
        raise SpecError("--launch", f"{launcher} cannot run {setting.plan} as priced: {reason}", remedy)
    return LAUNCHERS[launcher].write(chosen)


def launch_text(
    launcher: str,
    setting: LaunchSetting,
    safer: LaunchSetting | None = None,
    is_stated: bool = False,
    own: OwnCommand | None = None,
) -> str:
    """Return a launch as text. Comments at the top name version, pool, plan, step time, memory and data types.

    Args:
        launcher: a key of `LAUNCHERS`.
        setting: the plan and its job.
        safer: a plan with memory to spare, if the memory of the plan in `setting` is tight. If the launcher can run the
            safer plan, that plan is printed instead.
        is_stated: whether the user chose the plan. If so, this plan is printed, and a comment names the safer plan.
        own: the user's present launch, whose options are copied, or None.

    Raises:
        SpecError: as in `write_launch`.
    """
    setting, risk = choose_setting(launcher, setting, safer, is_stated)
    line, chosen = carry_over(launcher, write_launch(launcher, setting), own), _with_framework(launcher, setting)
    where = f"{setting.name} on {setting.pool}, {setting.nodes}x{setting.gpus_per_node} GPUs"
    head = f"{where}: {setting.plan}, {_describe_time_and_memory(setting)}"
    shared = [setting.shared_nodes] if setting.shared_nodes else []
    entry = LAUNCHERS[launcher]
    options = f"options of {entry.version} ({entry.source})"
    return line.text(
        [options, head, *shared, *risk, f"priced as {chosen.workload.framework}: {_describe_states(chosen)}"]
    )


def choose_setting(
    launcher: str, setting: LaunchSetting, safer: LaunchSetting | None, is_stated: bool
) -> tuple[LaunchSetting, list[str]]:
    """Return the setting to launch, and sentences about its memory if the memory of the recommended plan is tight.

    The arguments are those of `launch_text`.
    """
    if not setting.is_tight:
        return setting, []
    tight = f"{setting.plan} ({_describe_time_and_memory(setting)}) may run out of memory"
    if safer is None or not _can_launch(launcher, safer):
        return setting, [f"tight: {tight}, and no plan here has memory to spare"]
    if is_stated:
        return setting, [f"tight: {tight}; safer is --plan {safer.plan} ({_describe_time_and_memory(safer)})"]
    return safer, [f"{tight}: this is the safer plan; --plan {setting.plan} prints the tight one"]


def _can_launch(launcher: str, setting: LaunchSetting) -> bool:
    """Return whether a launcher can run a plan as the forecast assumes."""
    try:
        write_launch(launcher, setting)
    except SpecError:
        return False
    return True


def _describe_time_and_memory(setting: LaunchSetting) -> str:
    """Return the step time and the memory of a plan as text."""
    text = f"{format_duration(setting.step_s)} a step"
    if setting.memory_bytes is None:
        return text
    return f"{text}, {format_memory(*setting.memory_bytes)}"


def launch_document(
    launcher: str, setting: LaunchSetting, safer: LaunchSetting | None = None, own: OwnCommand | None = None
) -> dict[str, object]:
    """Return the launch as JSON-compatible data.

    If the launcher can run the plan `safer`, the key `safer` has its launch.

    Raises:
        SpecError: as in `write_launch`.
    """
    line = carry_over(launcher, write_launch(launcher, setting), own)
    framework = _with_framework(launcher, setting).workload.framework
    document: dict[str, object] = {
        "launcher": launcher, "version": LAUNCHERS[launcher].version, "framework": framework, **line.document(),
    }  # fmt: skip
    if safer is not None and _can_launch(launcher, safer):
        document["safer"] = {"plan": str(safer.plan), **launch_document(launcher, safer, own=own)}
    return document


_SAME: Mapping[str, str] = {"trl": "trainer"}
"""Tables whose scripts take the options of another table too."""
MAX_LEFT = 12
"""Most options that a note lists as not carried over."""


def carry_over(launcher: str, line: LaunchScript, own: OwnCommand | None) -> LaunchScript:
    """Return a launch into which the user's own script and options are copied, such as learning rate and data.

    A note names what cannot be copied: options of another launcher's script, values that the shell computes, and the
    content of configuration files.

    Args:
        launcher: a key of `LAUNCHERS`.
        line: the launch of the plan that the launcher wrote.
        own: the user's present launch, or None, in which case `line` is returned unchanged.
    """
    if own is None:
        return line
    note = "not carried over: what your configuration says beside the plan, such as data and learning rate"
    if not own.program or not own.table:
        return replace(line, notes=(*line.notes, note))
    first = tuple(takewhile(lambda word: not word.startswith("-"), own.words))
    options = [(one.option, *map(str, one.values)) for one in OptionTable.read(own.table).list_own(own.words)]
    kept = [words for words in (first, *options) if words]
    is_script = is_script_name(own.program) and _is_carried(own.program)
    has_script = is_script and any(map(is_script_name, line.command))
    is_same = has_script and LAUNCHERS[launcher].options == _SAME.get(own.table, own.table)
    left = [words for words in kept if not is_same or not all(map(_is_carried, words)) or _is_configuration(words)]
    if is_same:
        carried = [tuple(map(_name_variable, words)) for words in kept if words not in left]
        line = line.with_own_options(_name_variable(own.program), carried)
    if not left:
        return line if is_same else replace(line, notes=(*line.notes, note))
    texts = (_COMPUTED.sub(r"(\1)", _name_variable(" ".join(words))) for words in left[:MAX_LEFT])
    shown = [" ".join(untrusted.blank_unprintable(text).split())[:80] for text in texts]
    more = f" and {len(left) - MAX_LEFT} more" if len(left) > MAX_LEFT else ""
    return replace(line, notes=(*line.notes, f"not carried over: {', '.join(shown)}{more}"))


def _is_configuration(words: Sequence[str]) -> bool:
    """Return whether the words before all options name a configuration file, which may determine a plan itself."""
    suffixes = (".json", ".yaml", ".yml", ".toml")
    return not words[0].startswith("-") and any(word.endswith(suffixes) for word in words)


_VARIABLE = re.compile(rf"{UNKNOWN}([A-Za-z_]\w*){UNKNOWN}", re.ASCII)
_COMPUTED = re.compile(rf"{UNKNOWN}([^{UNKNOWN}]*){UNKNOWN}")


def _name_variable(word: str) -> str:
    """Return a word in which each variable whose value only the shell knows is written as `${NAME}`."""
    return _VARIABLE.sub(r"${\1}", word)


def _is_carried(word: str) -> bool:
    """Return whether a word can be written into a command without a change of its meaning.

    A word cannot be written if a part of it is computed by the shell, or if it has both a variable and characters that
    a shell interprets. A dollar sign that is not part of a variable cannot be written either.
    """
    plain = _VARIABLE.sub("", word)
    return plain.isprintable() and (plain == word or not re.search(r"[\"`\\!]", plain)) and "$" not in plain


def list_launchers(setting: LaunchSetting) -> dict[str, Framework]:
    """Return the launchers that can run the plan as it was forecast, as a mapping from name to framework.

    A forecast for that launcher uses the properties of that framework.
    """
    able = (name for name in LAUNCHERS if _can_launch(name, setting))
    chosen = {name: _with_framework(name, setting).workload.framework for name in able}
    return {name: framework for name, framework in chosen.items() if framework is not None}


def check_launchable(launcher: str, workload: Workload) -> None:
    """Raise SpecError if a launcher cannot run a job with any plan.

    Raises:
        SpecError: the launcher is unknown, or it does not support a property of the job. The message gives a remedy.
    """
    if launcher not in LAUNCHERS:
        raise SpecError("launcher", f"{launcher!r} is not known", f"known: {', '.join(LAUNCHERS)}")
    entry = LAUNCHERS[launcher]
    others = ", ".join(name for name, other in LAUNCHERS.items() if workload.execution in other.executions)
    if not workload.training:
        raise SpecError("--launch", f"{launcher} trains, and a forward pass alone is no training", "leave it out")
    model = workload.model
    any_model = (name for name, other in LAUNCHERS.items() if not other.families and not other.reads_loss)
    remedy = f"use one of {', '.join(any_model)}"
    if entry.reads_loss and model.trace is None and zoo.auto_model_suffix(model) is None:
        text = f"{launcher} trains no {model.name}: Transformers builds no model of family {model.family}"
        raise SpecError("--launch", text, remedy)
    if entry.reads_loss and model.trace is None and not zoo.auto_model_suffix(model):
        text = f"{launcher} trains no {model.name}: no AutoModel that is known here returns the loss that is priced"
        raise SpecError("--launch", text, remedy)
    if entry.families and model.family not in entry.families:
        raise SpecError("--launch", f"{launcher} trains no {model.name} (family {model.family})", remedy)
    if entry.families and (model.towers or model.get_dimensions(zoo.Transformer).classes):
        beside = "towers beside its language model" if model.towers else "a classifier as its head"
        raise SpecError("--launch", f"{launcher}'s script trains no {model.name}, which has {beside}", remedy)
    for what, value, known in (
        ("precision", workload.precision, entry.precisions),
        ("execution", workload.execution, entry.executions),
        ("optimizer", workload.optimizer, entry.optimizers),
        ("attention", workload.attention, entry.attention),
    ):
        if value not in known:
            remedy = f"use {what} {' or '.join(known)}"
            if what == "execution" and others:
                remedy += f", or launch it by {others}"
            raise SpecError("--launch", f"{launcher} has no {what} {value}", remedy)
    _check_types_and_loss(launcher, workload, entry)
    if workload.gradient_sync != "allReduce":
        remedy = "use training.gradientSync allReduce, or leave --launch out"
        raise SpecError("--launch", f"{launcher} starts no parameter servers", remedy)
    if workload.train_embeddings:
        text = f"{launcher} is not written with training.trainEmbeddings"
        raise SpecError("--launch", text, "leave it out, and give your script's LoraConfig modules_to_save")
    if workload.loss is not None:
        remedy = "use TRL, axolotl, LLaMA-Factory or torchtune for it, or leave --launch out"
        raise SpecError("--launch", f"{launcher}'s script trains on no preferences (loss {workload.loss})", remedy)
    if workload.frozen_parts:
        raise SpecError("--launch", f"{launcher} is not written with training.frozenParts", "leave --launch out")
    if workload.lora_rank and not entry.has_adapters:
        raise SpecError("--launch", f"{launcher} trains no LoRA adapters", "use another launcher")


def _check_types_and_loss(launcher: str, workload: Workload, entry: Launcher) -> None:
    """Raise SpecError if a launcher cannot set the job's loss chunks or its data types.

    The data types are those of weights, gradients and optimizer moments.
    """
    if workload.loss_chunks != 1:
        raise SpecError("--launch", f"{launcher} is not told here of training.lossChunks", "leave it out")
    if workload.offloaded_activations and not entry.offloads_activations:
        able = " or ".join(name for name, one in LAUNCHERS.items() if one.offloads_activations)
        text = f"{launcher} is not told here of training.offloadActivations"
        raise SpecError("--launch", text, f"leave it out, or launch it by {able}")
    if not workload.is_mixed:
        return
    own = frameworks.FRAMEWORKS[workload.framework or entry.frameworks[0]]
    if workload.weights not in (None, own.weights, *entry.weights):
        text = f"{launcher} is not told here to hold weights as {workload.weights}"
        raise SpecError("--launch", text, f"use training.weights {own.weights}, or another launcher")
    if entry.requests_types:
        return
    if workload.moment_precision not in (None, "fp32"):
        text = f"{launcher} has no moments in {workload.moment_precision}"
        raise SpecError("--launch", text, "leave training.momentPrecision out, or launch it by megatron")
    plain = replace(workload, gradient_precision=None)
    if frameworks.gradient_bytes(workload) != frameworks.gradient_bytes(plain):
        text = f"{launcher} has no gradients in {workload.gradient_precision}"
        raise SpecError("--launch", text, "leave training.gradientPrecision out, or launch it by megatron")


def find_unsupported_feature(framework: Framework, workload: Workload, plan: Plan) -> str:
    """Return a sentence about the first feature of a plan that a framework does not support, or "" if there is none."""
    supported = find_framework_features(framework)
    if workload.precision not in supported.precisions:
        return f"it has no {workload.precision}"
    if workload.offload not in supported.offload:
        return f"it does not offload {workload.offload}"
    if workload.bucket_mib is not None and not bool(
        frameworks.FRAMEWORKS[framework].allows_bucket_size(Plans.from_plans(plan))[0]
    ):
        return f"its buckets have a size of their own at ZeRO stage {plan.zero_stage}, not training.bucketMiB"
    if workload.shard_degree is not None and not supported.hybrid_shards:
        return "it shards over all replicas"
    if workload.expert_capacity is not None and not supported.has_expert_capacity:
        return "its experts have room for the tokens that arrive, not for training.expertCapacity"
    if not frameworks.can_shard_frozen_weights(workload) and plan.zero_stage >= 2:
        return "bitsandbytes has no INT8 weights that ranks share"
    if workload.offloaded_activations and not bool(supported.offloads(Plans.from_plans(plan))[0]):
        if supported.offload_activations == "none":
            return "it keeps activations on the GPU"
        return "it offloads activations without pipeline and recomputation"
    if workload.recompute_layers is not None and "recomputation" not in supported.per_layer:
        return "it recomputes all layers or none"
    cells, schedule = frameworks.FRAMEWORKS[framework], plan.schedule or workload.pipeline_schedule
    if plan.pipeline > 1 and schedule is not None and schedule not in cells.schedules:
        return f"it has no pipeline schedule {schedule}"
    if plan.pipeline > 1 and workload.pipeline_layout is not None and not cells.states_layouts:
        return "it splits the layers of a pipeline by its own rule, not by training.pipelineLayout"
    if bool(supported.executes(Plans.from_plans(plan))[0]):
        return ""
    degrees = {"data": plan.data, "tensor": plan.tensor, "pipeline": plan.pipeline, "context": plan.context,
               "expert": plan.expert, "expert_tensor": plan.expert_tensor, "virtual": plan.virtual_stages}  # fmt: skip
    for name, degree in degrees.items():
        if degree > 1 and name not in supported.parallelism:
            return (
                f"it has no {name.replace('_', ' ')} parallelism" if name != "virtual" else "it has no virtual stages"
            )
    if not supported.recomputes(plan.checkpointing):
        return f"it has no {plan.checkpointing} recomputation"
    if plan.tensor > 1 and plan.sequence_parallel not in supported.sequence_parallel:
        return f"its tensor parallelism {'never' if plan.sequence_parallel else 'always'} splits norms by sequence"
    return f"it has no ZeRO stage {plan.zero_stage} with these degrees"


def _with_framework(launcher: str, setting: LaunchSetting) -> LaunchSetting:
    """Return the setting with a framework in its job: the job's own, or the launcher's first that can run the plan."""
    if setting.workload.framework is not None:
        return setting
    frameworks = LAUNCHERS[launcher].frameworks
    runs = (
        name for name in frameworks if bool(find_framework_features(name).executes(Plans.from_plans(setting.plan))[0])
    )
    return replace(setting, workload=with_framework(setting.workload, next(runs, frameworks[-1])))


_WEIGHTS: Mapping[str, str] = {
    "master": "16-bit weights with FP32 masters",
    "autocast": "FP32 weights under autocast",
    "sharded": "FP32 shards gathered in 16 bit",
    "pure": "weights and optimizer in 16 bit",
}
"""Description of each value of `Framework.weights`."""


def _describe_states(setting: LaunchSetting) -> str:
    """Return the data types of weights, gradients and optimizer as text."""
    if not setting.workload.is_mixed:
        return "weights, gradients and optimizer in FP32"
    gradients = "FP32" if setting.framework.has_fp32_gradients(setting.workload) else "16-bit"
    return f"{_WEIGHTS[setting.framework.weights]}, {gradients} gradients"
