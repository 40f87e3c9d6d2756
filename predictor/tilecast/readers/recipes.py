"""Read recipes of Trainer, TRL, axolotl, LLaMA-Factory, torchtune and MaxText.

Configurations of DeepSpeed, Accelerate and FSDP that accompany them are read too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilecast import zoo
from tilecast.launch_options.options_table import Facts, OptionTable, Setting, spell_option
from tilecast.readers import models
from tilecast.readers.documents import flatten, load_mapping
from tilecast.readers.reading import LaunchReading, check_batch, compute_data_degree, drop_none
from tilecast.spec import Framework, PartialPlan, SpecError

ReadText = Callable[[str], str]
"""Function that returns the text of a file by its name."""


@dataclass(slots=True)
class PrioritizedFacts:
    """Facts from several sources. If sources disagree, the earlier one takes precedence.

    Errors name the file of the source.
    """

    facts: list[Facts] = field(default_factory=list)

    def get(self, target: str, default: Any = None) -> Any:
        """Return the value of a target from the first source that sets the target.

        If no source sets it, return the first launcher's default for it, or else `default`.
        """
        for one in self.facts:
            if target in one.values:
                return one.values[target]
        return next((one.table.defaults[target] for one in self.facts if target in one.table.defaults), default)

    def stated(self, target: str) -> Any:
        """Return the value of a target from the first source that sets the target, or None. Defaults are ignored."""
        return next((one.values[target] for one in self.facts if target in one.values), None)

    def find_option(self, target: str, default: str) -> str:
        """Return the option that sets a target, or `default` if no option does."""
        return next((one.origins[target] for one in self.facts if target in one.origins), default)

    def fields(self) -> dict[str, Any]:
        """Return those fields of a `LaunchReading` that combine the facts of all sources."""
        origins: dict[str, str] = {}
        unpriced: dict[str, str] = {}
        unknown: list[str] = []
        for one in self.facts:
            origins = {**one.origins, **origins}
            unpriced |= one.unpriced
            unknown += one.unknown
        first = self.facts[0]
        return {
            "title": "LitGPT" if _is_litgpt(self) else first.table.title,
            "table": first.table.name,
            "origins": origins,
            "unpriced": unpriced,
            "unknown": tuple(dict.fromkeys(unknown)),
        }


def read_recipe(
    name: str,
    settings: Sequence[Setting],
    where: str,
    read_text: ReadText,
    gpus: int | None,
    extra: Sequence[Facts] = (),
    gpus_per_node: int | None = None,
) -> LaunchReading:
    """Return the job and plan that the options of a recipe describe.

    Args:
        name: the table of options.
        settings: the options.
        where: name of the recipe in errors.
        read_text: function that reads a file that the recipe names.
        gpus: number of GPUs, or None if it is unknown.
        extra: facts of accompanying files, such as that of `accelerate config`.
        gpus_per_node: GPUs per node, the size of a group in hybrid sharding.

    Raises:
        SpecError: options contradict each other, or a file cannot be read.
    """
    ranked = PrioritizedFacts([OptionTable.read(name).read_facts(settings, where), *extra])
    gpus = ranked.stated("world.gpus") or gpus
    if (devices := ranked.stated("world.devices")) and int(devices) > 0:
        gpus = int(devices) * _read_degree(ranked, "world.nodes", where)
        gpus_per_node = gpus_per_node or (int(devices) if _is_litgpt(ranked) else None)
    notes = _add_files(ranked, read_text, where)
    is_bare = any(spell_option(one.option) == "deepspeed" and not one.values for one in settings)
    if is_bare and not ranked.stated("deepspeed"):
        ranked.facts[0].unpriced["--deepspeed"] = "names no file, so that nothing says the ZeRO stage"
    if name == "maxtext":
        _add_mesh(ranked.facts[0], gpus)
    tensor, pipeline, context = (
        _read_degree(ranked, f"plan.{one}", where) for one in ("tensor", "pipeline", "context")
    )
    data = compute_data_degree(gpus, tensor, pipeline, context, where)
    micro = _read_micro_batch(ranked, where or "command")
    training = {
        key.removeprefix("training."): value
        for items in (
            *(one.table.defaults for one in reversed(ranked.facts)),
            *(one.values for one in reversed(ranked.facts)),
        )
        for key, value in items.items()
        if key.startswith("training.")
    }
    _add_source_and_target(ranked, training, where or "command")
    framework, zero, offload = _read_sharding(ranked, name, data)
    rank = training.pop("loraRankOfAdapter", 8)
    training["precision"], weights = _read_precision(ranked, name, zero >= 2)
    training |= drop_none({"weights": weights, "offload": offload})
    training |= _read_adapters(ranked, name, rank, training)
    if loss := _read_loss(ranked, name, training, micro):
        training["loss"] = loss
        training.pop("fusedLoss", None)
        notes.append(f"Log-probabilities of the loss {loss} are priced as the framework's own loss on all tokens.")
    if ranked.stated("relora"):
        if training.get("loraRank"):
            notes.append("The adapters are merged into the weights now and then (relora), which is not priced.")
        else:
            ranked.facts[0].unpriced.setdefault(
                ranked.find_option("relora", "relora"), "there are no adapters to merge"
            )
    if training.get("quantization") == "int8" and zero >= 2:
        option = ranked.find_option("quantized", "quantization")
        ranked.facts[0].unpriced.setdefault(option, "bitsandbytes has no INT8 weights that ranks share")
    if name == "deepspeed" or framework in ("deepspeed", "huggingface-deepspeed"):
        training.pop("weights", None)
        if ranked.stated("offload_parameters") and not ranked.stated("offload_optimizer"):
            option = ranked.find_option("offload_parameters", "offload_param")
            reason = "weights on the host beside an optimizer on the GPU are not priced"
            ranked.facts[0].unpriced.setdefault(option, reason)
    mode = ranked.get("plan.checkpointing", "none")
    if framework == "litgpt" and zero == 3:
        mode = _read_litgpt_recomputation(ranked, gpus, gpus_per_node)
    if name == "torchtune" and ranked.stated("wrapped"):
        mode, count = _wrapped_layers(ranked, mode, where)
        training |= drop_none({"recomputeLayers": count})
    stated = next((one.text for one in settings if one.option == "gradient_checkpointing"), "")
    # Unsloth's checkpointing moves the inputs of layers to the host.
    if name == "axolotl" and (kind := {"offload": "saved", "unsloth": "inputs"}.get(stated)):
        ranked.facts[0].values.setdefault("offloaded", kind)
        ranked.facts[0].origins.setdefault("offloaded", "gradient_checkpointing")
    if ranked.stated("offloaded"):
        training["offloadActivations"] = 1.0
        mode, because = _read_offloaded_recomputation(ranked, name, mode, bool(training.get("loraRank")), where)
        notes += because
    plan = PartialPlan(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=_read_degree(ranked, "plan.expert", where),
        zero_stage=zero,
        micro_batch=micro,
        checkpointing=mode,
        sequence_parallel=name == "maxtext" and tensor > 1,
    )
    accumulation = _read_accumulation(ranked, micro, where)
    if data is not None and "globalBatchSize" not in training:
        training["globalBatchSize"] = micro * accumulation * data
    check_batch(training.get("globalBatchSize"), micro, data, where, "batch")
    if name == "torchtune" and not training.get("loraRank"):
        _check_update(ranked.facts[0], settings, gpus == 1 and accumulation == 1)
    if zero and (degree := _read_shard_degree(ranked, name, data, where)):
        training["shardDegree"] = degree
    elif ranked.stated("hybrid") and gpus_per_node and data and data > gpus_per_node:
        training["shardDegree"] = gpus_per_node
    if zero < 2:
        training.pop("shardDegree", None)
    return LaunchReading(
        framework=framework,
        training=drop_none(training),
        plan=plan,
        model_name=_read_model_name(ranked, where or "command"),
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        notes=tuple(notes),
        **ranked.fields(),
    )


def _add_source_and_target(ranked: PrioritizedFacts, training: dict[str, Any], where: str) -> None:
    """Set the sequence length to the sum of the lengths of source and target, which scripts of decoders join.

    If the model is not known to be a decoder, the options are not priced.
    """
    lengths = [ranked.stated("source_length"), ranked.stated("target_length")]
    if lengths == [None, None]:
        return
    found = models.find_preset_in_name(_read_model_name(ranked, where))
    if None not in lengths and found is not None and zoo.find_preset(found).family in ("decoder", "moe", "deepseek"):
        for option, length in zip(("source_length", "target_length"), map(int, lengths), strict=True):
            if length < 1:
                raise SpecError(ranked.find_option(option, option), f"{length} is no length", "give tokens from 1")
        training.setdefault("sequenceLength", sum(map(int, lengths)))
        return
    option = ranked.find_option("source_length", ranked.find_option("target_length", ""))
    ranked.facts[0].unpriced[option] = "lengths of source and target are priced together, and for decoders alone"


def _read_loss(ranked: PrioritizedFacts, name: str, training: Mapping[str, Any], micro: int) -> str | None:
    """Return the loss on preferences that a recipe trains, or None if it trains the model's own loss.

    Losses of one method with equal forward passes, such as TRL's `hinge` of DPO, count as the method.
    """
    unpriced = ranked.facts[0].unpriced
    loss = training.get("loss")
    if name == "torchtune" and ranked.stated("loss") == "dpo":
        loss = "dpo"
    elif name == "llamafactory" and (stage := ranked.stated("stage")) in ("dpo", "kto"):
        loss = (ranked.stated("pref_loss") or "dpo") if stage == "dpo" else "kto"
    elif name == "trl":
        loss = _read_trl_method(ranked)
    labels = ranked.stated("labels")
    if labels is not None and (loss != "reward" or labels != 1):
        unpriced[ranked.find_option("labels", "")] = (
            "a classifier as the head is priced for rewards of one number alone"
        )
    if loss is None:
        return None
    option = ranked.find_option("training.loss", ranked.find_option("stage", name))
    if training.get("fusedLoss"):
        unpriced[ranked.find_option("training.fusedLoss", option)] = f"a fused loss is not priced for the loss {loss}"
    if loss == "kto" and micro == 1:
        unpriced[option] = "KTO needs two answers or more in a micro-batch"
    return str(loss)


_TRL_LOSSES: Mapping[str, Mapping[str, str]] = {
    "kto": {"kto": "kto"}, "orpo": {}, "reward": {},
    "cpo": {"sigmoid": "cpo", "hinge": "cpo", "ipo": "cpo", "simpo": "simpo"},
    "dpo": {
        **dict.fromkeys((
            "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
            "aot_pair", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
        ), "dpo"),
        "ipo": "ipo",
    },
}  # fmt: skip
"""Loss on preferences for each method of TRL and value of its `--loss_type`, if its forward passes are known."""


def _read_trl_method(ranked: PrioritizedFacts) -> str | None:
    """Return the loss on preferences of one of TRL's methods, or None for supervised fine-tuning."""
    method, kinds, unpriced = ranked.stated("method"), ranked.stated("loss_type") or (), ranked.facts[0].unpriced
    words = [word.strip("[],\"'") for word in kinds]
    if method is None:
        signs = ("beta", "training.precomputedReference")
        if option := next((found for sign in signs if (found := ranked.find_option(sign, ""))), ""):
            unpriced[option] = "the file does not say which of TRL's methods reads it, such as trl dpo --config FILE"
        return None
    known = _TRL_LOSSES.get(method, dict.fromkeys(("nll", "dft", "chunked_nll"), ""))
    if strange := next((word for word in words if word and word not in known), ""):
        unpriced[ranked.find_option("loss_type", "--loss_type")] = f"{strange[:40]!r} of {method} is not priced"
    if method not in _TRL_LOSSES:
        return None
    losses = {known[word] for word in words if word in known}
    return losses.pop() if len(losses) == 1 else str(method)


def _read_shard_degree(ranked: PrioritizedFacts, name: str, data: int | None, where: str) -> int | None:
    """Return the number of ranks over which weights are sharded, or None if it is all ranks or not stated.

    If the shards and replicas leave ranks over, axolotl (utils/distributed.py) uses them for more replicas.

    Raises:
        SpecError: shards times replicas are not the data-parallel ranks of the job.
    """
    shards, replicas = int(ranked.stated("shards") or 0), int(ranked.stated("replicas") or 1)
    if data is None or name not in ("axolotl", "torchtune"):
        return shards if shards > 0 and replicas > 1 else None
    left_out = shards <= 0 or (name == "axolotl" and shards == 1)
    whole = data // replicas if left_out and data % replicas == 0 else shards
    takes_rest = name == "axolotl" and replicas == 1 and whole > 0
    if replicas < 1 or whole < 1 or data % (whole * replicas) or (whole * replicas != data and not takes_rest):
        option = ranked.find_option("shards", ranked.find_option("replicas", "shards"))
        problem = f"{max(whole, 1)} (shards) x {replicas} (replicas) do not divide {data} data-parallel ranks"
        raise SpecError(
            f"{where}: {option}" if where else option, problem, "correct one of them, or the number of GPUs"
        )
    return whole if whole < data else None


def _wrapped_layers(ranked: PrioritizedFacts, mode: str, where: str) -> tuple[str, int | None]:
    """Return the recomputation that torchtune's `ac_mode` sets, and the number of layers if it is not all layers.

    `ac_mode` only takes effect if `enable_activation_checkpointing` is not set. With both, recipes recompute nothing
    (recipes/full_finetune_distributed.py).

    Raises:
        SpecError: `ac_option` is neither "op" nor a number.
    """
    if mode == "full":
        return "none", None
    if ranked.stated("wrapped") == "full":
        return "full", None
    every, option = str(ranked.stated("wrapped_layers") or ""), ranked.find_option("wrapped_layers", "ac_option")
    if every == "op":
        return "selective", None
    if not re.fullmatch(r"\d{1,6}", every):
        problem = f"{every[:40]!r} is not read"
        raise SpecError(f"{where}: {option}" if where else option, problem, 'use "op", or every n-th layer')
    layers = zoo.find_preset(_read_model_name(ranked, where)).layers
    count = layers // int(every) if int(every) > 1 else layers
    return ("full", count if count < layers else None) if count else ("none", None)


def _read_offloaded_recomputation(
    ranked: PrioritizedFacts, name: str, mode: str, has_adapters: bool, where: str
) -> tuple[str, list[str]]:
    """Return the recomputation of a job that offloads activations, and a list with at most one note.

    There is a note if the job recomputes something else than the recipe states.

    Args:
        ranked: the facts of the recipe.
        name: the recipe's table of options.
        mode: the recomputation that the recipe states.
        has_adapters: whether the job trains adapters.
        where: name of the recipe in errors.

    Raises:
        SpecError: the launcher offloads activations only with recomputation, and the recipe states no recomputation.
    """
    option = ranked.find_option("offloaded", "offloaded")
    if mode == "none" and name != "trl":
        checks = "enable_activation_checkpointing" if name == "torchtune" else "gradient_checkpointing"
        problem = f"{ranked.facts[0].table.title} offloads activations only with {checks}"
        raise SpecError(f"{where}: {option}" if where else option, problem, f"set {checks}, or leave {option} out")
    # axolotl, core/builders/base.py and loaders/model.py: with adapters, offloading replaces recomputation, unless FSDP
    # recomputes on its own.
    stated_by = ranked.find_option("plan.checkpointing", "")
    replaces = name == "axolotl" and has_adapters and ranked.stated("offloaded") == "saved"
    if replaces and stated_by == "gradient_checkpointing":
        return "none", [f"With adapters, axolotl's {option} offloads activations in place of recomputing them."]
    return mode, []


def _check_update(facts: Facts, settings: Sequence[Setting], is_within: bool) -> None:
    """Record that torchtune's weight update is not priced, if the recipe's update differs from the assumed one.

    Args:
        facts: the meaning of the recipe's options.
        settings: the recipe's options.
        is_within: whether the forecast assumes that a paged optimizer updates weights during the backward pass.
    """
    option = facts.origins.get("in_backward", "optimizer_in_bwd")
    stated = bool(facts.get("in_backward", False))
    kinds = [setting.text for setting in settings if setting.option.endswith("optimizer._component_")]
    if stated and not is_within:
        facts.unpriced[option] = "the update within the backward pass is priced on one GPU without accumulation alone"
    elif stated and ".Paged" not in (kinds[-1] if kinds else ""):
        facts.unpriced[option] = "the update within the backward pass is priced with a paged optimizer alone"
    elif is_within and not stated:
        facts.unpriced[option] = "on one GPU without accumulation, only the update within the backward pass is priced"


def _read_degree(ranked: PrioritizedFacts, target: str, where: str) -> int:
    """Return the count at `target`, such as a parallel degree, or 1 if no source sets it.

    Raises:
        SpecError: the count is below 1.
    """
    value = int(ranked.get(target, 1))
    if value < 1:
        name = ranked.find_option(target, target)
        raise SpecError(f"{where}: {name}" if where else name, f"{value} is no count", "give one from 1")
    return value


def _read_accumulation(ranked: PrioritizedFacts, micro: int, where: str) -> int:
    """Return the number of micro-batches in a step.

    A recipe of axolotl may state the samples of a rank instead, from which the number follows.

    Raises:
        SpecError: the samples of a rank are not a multiple of the micro-batch, or contradict the number of
            micro-batches.
    """
    steps = _read_degree(ranked, "accumulation", where)
    if ranked.stated("batch_of_rank") is None:
        return steps
    batch = _read_degree(ranked, "batch_of_rank", where)
    stated = ranked.stated("accumulation")
    if batch % micro or (stated is not None and steps * micro != batch):
        option = ranked.find_option("batch_of_rank", "batch_size")
        problem = f"{batch} is no multiple of a micro-batch of {micro}"
        if stated is not None:
            problem = f"{batch} is not {steps} (accumulation) x {micro} (micro-batch)"
        raise SpecError(f"{where}: {option}" if where else option, problem, "leave it out")
    return batch // micro


def _read_micro_batch(ranked: PrioritizedFacts, where: str) -> int:
    if (each := ranked.stated("per_device")) is not None:
        # MaxText counts samples by device, also by those that share a sample.
        each *= ranked.get("plan.tensor", 1) * ranked.get("plan.context", 1)
        if each < 1 or each != int(each):
            raise SpecError(where, f"{each:g} samples of a replica are no count", "correct per_device_batch_size")
        return int(each)
    micro = ranked.get("plan.micro_batch")
    if micro is None:
        batch, steps = ranked.stated("training.globalBatchSize"), ranked.stated("accumulation")
        names = [one.table.names[key] for one in ranked.facts[:1] for key, entry in one.table.options.items()
                 if entry["to"] == "plan.micro_batch"]  # fmt: skip
        if batch is None or steps is None:
            raise SpecError(f"{where}: {names[0] if names else 'batch'}", "is missing", "give the samples of a GPU")
        return max(1, int(batch) // _read_degree(ranked, "accumulation", where))
    if int(micro) < 1:
        raise SpecError(where, f"a micro-batch of {micro} is no count", "give one from 1")
    return int(micro)


def _add_files(ranked: PrioritizedFacts, read_text: ReadText, where: str) -> list[str]:
    """Add the facts of files that a source names: a DeepSpeed configuration, and Trainer's configuration of FSDP.

    Return notes on files that do not exist but whose content is known from their names.
    """
    notes: list[str] = []
    path = ranked.stated("deepspeed")
    if path:
        values = _read_deepspeed_values(str(path), read_text, ranked.facts[0].table, notes)
        table = OptionTable.read("deepspeed")
        found = [setting for setting in flatten(values) if setting.text.lower() != "auto" and setting.values != (None,)]
        facts = table.read_facts(found, str(path)[:60])
        _require_same_values(ranked.facts[0], facts)
        ranked.facts.append(facts)
    path = ranked.stated("fsdp_config")
    if path:
        values = load_mapping(path if str(path).lstrip().startswith("{") else read_text(str(path)), str(path)[:60])
        plain = {key.removeprefix("fsdp_"): value for key, value in values.items()}
        ranked.facts.append(OptionTable.read("fsdp").read_facts(flatten(plain), str(path)[:60]))
    return notes


_SHARED = ("plan.micro_batch", "accumulation", "precision")
"""Targets that options of Trainer and a DeepSpeed configuration may both state."""


def _require_same_values(options: Facts, file: Facts) -> None:
    """Raise SpecError if a DeepSpeed configuration contradicts the options of Trainer, which then does not start.

    Raises:
        SpecError: it contradicts them (transformers, integrations/deepspeed.py).
    """
    for target in _SHARED:
        stated, found = options.values.get(target), file.values.get(target)
        if stated is not None and found is not None and stated != found:
            problem = f"says {found}, and {options.origins[target]} says {stated}"
            raise SpecError(file.field(file.origins[target]), problem, 'make them equal, or write "auto" in the file')


def _add_mesh(facts: Facts, gpus: int | None) -> None:
    """Add the plan that MaxText's mesh axes describe. Each axis has one degree within nodes and one between nodes.

    A degree of -1 means all GPUs that the other degrees leave. It is supported only for data and FSDP ranks.
    """
    degrees = {
        axis: [int(facts.get(f"mesh.{kind}_{axis}", _AXES[axis][place])) for place, kind in enumerate(("ici", "dcn"))]
        for axis in _AXES
    }
    for axis in ("tensor", "pipeline", "context", "expert"):
        if min(degrees[axis]) < 1:
            raise SpecError(facts.where, f"the degree of {axis} parallelism is left open", "give a number")
        facts.values[f"plan.{axis}"] = degrees[axis][0] * degrees[axis][1]
        if degrees[axis][1] == 1:
            facts.origins[f"plan.{axis}"] = facts.origins.get(f"mesh.ici_{axis}", f"ici_{axis}_parallelism")
    if facts.values["plan.pipeline"] != 1:
        raise SpecError(facts.where, "pipeline parallelism of MaxText is not read", "describe the job by flags")
    if any(degree == 0 or degree < -1 for axis in ("fsdp", "data") for degree in degrees[axis]):
        raise SpecError(facts.where, "a degree of fsdp or data parallelism is no count", "give one from 1, or -1")
    shared = int(facts.values["plan.tensor"] * facts.values["plan.pipeline"] * facts.values["plan.context"])  # type: ignore[operator]
    expert = int(facts.values["plan.expert"])  # type: ignore[call-overload]
    fsdp, replicas = (degrees[axis][0] * degrees[axis][1] for axis in ("fsdp", "data"))
    open_axes = [axis for axis in ("fsdp", "data") for degree in degrees[axis] if degree < 0]
    if gpus is not None and open_axes:
        rest = gpus // shared // expert // abs(fsdp * replicas)
        fsdp, replicas = (fsdp * rest, replicas) if open_axes[0] == "fsdp" else (fsdp, replicas * rest)
    fsdp, replicas = abs(fsdp), abs(replicas)
    if gpus is not None and fsdp * replicas * shared * expert != gpus:
        problem = f"{fsdp} (fsdp) x {replicas} (data) x {shared * expert} (other axes) is not {gpus} GPUs"
        raise SpecError(facts.where, problem, "correct an axis or the number of GPUs")
    # Ranks of the expert axis see different samples, as replicas do.
    facts.values["plan.zero_stage"] = 3 if fsdp > 1 else 0
    if fsdp > 1 and replicas > 1:
        facts.values |= {"shards": fsdp * expert, "replicas": replicas}


_AXES: Mapping[str, tuple[int, int]] = {
    "fsdp": (-1, 1), "data": (1, -1), "tensor": (1, 1), "pipeline": (1, 1), "context": (1, 1), "expert": (1, 1),
}  # fmt: skip
"""MaxText's default degree of each axis, within nodes and between them."""


def _read_deepspeed_values(path: str, read_text: ReadText, table: OptionTable, notes: list[str]) -> dict[str, Any]:
    """Return the values of a DeepSpeed configuration.

    The content of a missing file is known if the launcher ships a file of that name.

    Args:
        path: path of the file, or the text of the configuration itself.
        read_text: function that reads a file.
        table: the launcher's options, with the names of the files that it ships.
        notes: list to which a note on a missing file is added.

    Raises:
        SpecError: the file cannot be read, and the launcher ships no file of that name.
    """
    if path.lstrip().startswith("{"):
        return load_mapping(path, "deepspeed")
    try:
        return load_mapping(read_text(path), path)
    except SpecError as error:
        if error.problem != "cannot be read":
            raise
        files: Mapping[str, Mapping[str, Any]] = table.facts.get("deepspeed_files", {})
        known = next((one for name, one in files.items() if f"/{path}".endswith(f"/{name}")), None)
        if known is None:
            problem = "cannot be read, and a name is no proof of a ZeRO stage"
            raise SpecError(path[:120], problem, "put the file where the launch looks for it") from None
    zero: dict[str, Any] = {"stage": known["stage"]}
    zero |= {f"offload_{part}": {"device": known[key]} for key, part in _HOST_PARTS.items() if key in known}
    host = "".join(f", {key} on the host" for key in _HOST_PARTS if key in known)
    text = f"{path[:120]} is not here: taken as {table.title}'s file of that name (ZeRO {known['stage']}{host})."
    notes.append(text)
    return {"zero_optimization": zero}


_HOST_PARTS: Mapping[str, str] = {"optimizer": "optimizer", "weights": "param"}
"""DeepSpeed's name of what lives on the host, by the name in a table of its files."""


def _read_sharding(ranked: PrioritizedFacts, name: str, data: int | None) -> tuple[Framework, int, str | None]:
    """Return the framework, the ZeRO stage, and the states that are offloaded to the host."""
    offload = ranked.get("offload_parameters") or ranked.get("offload_optimizer") or ranked.get("training.offload")
    kind = str(ranked.stated("distributed") or "")
    if name == "lightning":
        stated = str(ranked.get("strategy", "auto")).rpartition(".")[2]
        known = ranked.facts[0].table.facts["strategies"].get(stated)
        if known is None:
            ranked.facts[0].unpriced[ranked.facts[0].origins["strategy"]] = f"{stated[:60]!r} is not priced"
            return "lightning", 0, None
        framework, stage, *host = known
        if _is_litgpt(ranked):
            framework, stage = "litgpt", 3 if data and data > 1 else 0
        return framework, int(ranked.get("plan.zero_stage", stage)), host[0] if host else offload
    if name == "torchtune":
        return "torchtune", int(ranked.get("plan.zero_stage", 3)), offload
    if name == "maxtext":
        return "jax", int(ranked.get("plan.zero_stage", 3)), offload
    has_engine = any(one.table.name == "deepspeed" for one in ranked.facts)
    if kind == "DEEPSPEED" or ranked.stated("deepspeed") or has_engine:
        # A script of its own may build a pipeline. Trainer and Accelerate give DeepSpeed the whole model.
        is_own = name == "deepspeed" or spell_option(ranked.find_option("deepspeed", "")) == "deepspeed-config"
        engine: Framework = "deepspeed" if is_own else "huggingface-deepspeed"
        return engine, int(ranked.get("plan.zero_stage", 0)), offload
    words = str(ranked.stated("fsdp") or "").replace(",", " ").lower()
    is_sharded = kind == "FSDP" or bool(ranked.stated("fsdp_wraps")) or words not in ("", "false", "none", "()", "[]")
    if ranked.stated("shards") and int(ranked.stated("shards")) > 1:
        is_sharded = True
    if not is_sharded:
        return "huggingface", 0, None
    if "offload" in words:
        offload = "parameters"
    stage = 2 if "shard_grad_op" in words else 3
    return "accelerate", int(ranked.stated("plan.zero_stage") or stage), offload


def _is_litgpt(ranked: PrioritizedFacts) -> bool:
    """Return whether a Lightning configuration belongs to LitGPT."""
    return any(spell_option(option).startswith("train.") for one in ranked.facts for option in one.origins.values())


def _read_litgpt_recomputation(ranked: PrioritizedFacts, gpus: int | None, gpus_per_node: int | None) -> str:
    """Return the recomputation of LitGPT on several GPUs: fine-tuning recomputes all blocks, pretraining none.

    Pretraining shards weights within nodes alone (litgpt/pretrain.py: HYBRID_SHARD).
    """
    is_pretraining = spell_option(ranked.find_option("model.name", "checkpoint-dir")) == "model-name"
    if is_pretraining and gpus and gpus_per_node and gpus > gpus_per_node:
        ranked.facts[0].values.setdefault("hybrid", True)
    if not is_pretraining and ranked.stated("quantized"):
        option = ranked.find_option("quantized", "quantize")
        ranked.facts[0].unpriced.setdefault(option, "LitGPT quantizes weights on one GPU alone")
    return "none" if is_pretraining else "full"


def _read_precision(ranked: PrioritizedFacts, name: str, is_sharded: bool) -> tuple[str, str | None]:
    """Return the precision, and the value of `training.weights`, which is None for the framework's default."""
    stated, dtype = ranked.get("precision"), ranked.stated("dtype")
    if name == "lightning":
        text = str(ranked.get("lightning_precision"))
        known = ranked.facts[0].table.facts["precisions"].get(text)
        if known is None:
            ranked.facts[0].unpriced[ranked.facts[0].origins["lightning_precision"]] = f"{text[:60]!r} is not priced"
            return "bf16", None
        weights = known[1] if len(known) > 1 else None
        if _is_litgpt(ranked) and text.endswith("-mixed"):
            # Its forecast assumes weights in 16 bits.
            weights = "sharded" if is_sharded else "autocast"
        return known[0], weights
    if computed := ranked.stated("quantized_compute"):
        return str(computed), ranked.stated("weights")
    if name == "torchtune":
        return str(dtype or "fp32"), None
    if pure := ranked.stated("pure"):
        return str(pure), "pure"
    if stated in (None, "fp32") and dtype in ("bf16", "fp16"):
        return str(dtype), "pure"
    if stated in (None, "fp32"):
        return ("tf32" if ranked.stated("tf32") else "fp32"), None
    return str(stated), ranked.stated("weights")


_ATTENTION = re.compile(
    r"(?:self_attn\.)?(?:[qkvo]_proj|output_proj|q|k|v|query|key|value|c_attn|query_key_value|qkv_proj|Wqkv)"
)
"""Names of attention projections among the targets of adapters."""


_ENDS = {"embed_tokens", "lm_head"}
"""Modules that may be trained whole beside adapters."""


def _read_adapters(ranked: PrioritizedFacts, name: str, rank: int, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `spec.training` for LoRA adapters.

    If the configuration names no adapter, its LoRA rank is ignored, except in LitGPT, where a rank alone turns adapters
    on.
    """
    component = str(ranked.stated("model.component") or "").rpartition(".")[2]
    adapter = ranked.get("adapter")
    quantization = ranked.stated("quantized")
    if adapter == "qlora" or component.startswith("qlora_"):
        quantization = quantization or "nf4"
    is_litgpt = name == "lightning" and ranked.stated("training.loraRank") is not None
    has = is_litgpt or adapter in ("lora", "qlora") or component.startswith(("lora_", "qlora_"))
    option = ranked.find_option("quantized", "")
    if option and not has:
        ranked.facts[0].unpriced[option] = "quantized weights without adapters are not trained"
    if ranked.stated("dora") and not has:
        ranked.facts[0].unpriced[ranked.find_option("dora", "")] = "DoRA without adapters trains nothing"
    if option and quantization == "int8" and adapter == "qlora":
        ranked.facts[0].unpriced[option] = "QLoRA has weights in 4 bits"
    own = ranked.find_option("adapter", "")
    if has and own in ("--use_lora", "--use_peft_lora"):
        left = [
            option
            for target, option in (("training.loraRank", "--lora_r"), ("lora_targets", "--lora_target_modules"))
            if ranked.stated(target) is None
        ]
        if left:
            ranked.facts[0].unpriced[own] = f"the script's own {' and '.join(left)} are not known"
    if not has and name == "trainer" and ranked.stated("training.loraRank") is not None:
        reason = "the script may train adapters, which only --use_peft or --use_lora says"
        ranked.facts[0].unpriced[ranked.find_option("training.loraRank", "")] = reason
    if not has:
        return {"loraRank": None, "quantization": None}
    targets = [str(word).strip(",'\"[]") for item in ranked.get("lora_targets", ()) for word in str(item).split(",")]
    targets = [word for word in targets if word]
    if ranked.stated("lora_all") or ranked.stated("lora_mlp") or any(
        word in ("all", "all-linear", "linear") for word in targets
    ):  # fmt: skip
        chosen = "all"
    else:
        chosen = "attention" if all(_ATTENTION.fullmatch(word) for word in targets) else "all"
    whole = {word.strip(",'\"[]") for item in ranked.stated("whole_modules") or () for word in str(item).split(",")} - {
        ""
    }
    if whole not in (set(), _ENDS):
        names = ", ".join(sorted(whole))[:60]
        reason = f"{names}: of modules trained whole beside adapters, embed_tokens and lm_head together are priced"
        ranked.facts[0].unpriced[ranked.find_option("whole_modules", "")] = reason
    return {
        **({"trainEmbeddings": True} if whole == _ENDS else {}),
        "loraRank": training.get("loraRank") or rank,
        "loraTargets": chosen,
        **({"dora": True} if ranked.stated("dora") else {}),
        "quantization": quantization or None,
    }


_COMPONENTS: Mapping[str, str] = {"phi3_mini": "phi-3-mini", "code_llama2_7b": "llama-2-7b", "phi4_14b": "phi-4"}
"""Presets of torchtune's builders whose names differ from the preset's."""


def _read_model_name(ranked: PrioritizedFacts, where: str) -> str:
    """Return the name of the recipe's model, or "" if the recipe names no model."""
    component = ranked.stated("model.component")
    if component is None:
        return str(ranked.stated("model.name") or "")
    module, _, last = str(component).rpartition(".")
    builder = re.sub(r"^q?lora_", "", last).removesuffix("_instruct").removesuffix("_base")
    # The module is the family with its version, and the builder begins with it: qwen2_5.qwen2_5_0_5b.
    family = module.rpartition(".")[2]
    size = builder.removeprefix(f"{family}_").replace("_", ".") if re.search(r"\d_\d+b$", builder) else ""
    size = size or builder.removeprefix(f"{family}_")
    text = _COMPONENTS.get(builder) or f"{family.replace('_', '.')}-{size.replace('_', '-')}"
    found = models.find_preset_in_name(text) or models.find_preset_in_name(re.sub(r"^([a-z]+)(\d)", r"\1-\2", text))
    if found is None:
        raise SpecError(f"{where}: model._component_", f"{builder} is no model that is known", "name it before --")
    return zoo.find_preset(found).name
