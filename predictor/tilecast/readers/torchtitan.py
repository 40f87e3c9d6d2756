"""Read a torchtitan 0.2 configuration, a TOML file. Options of the command line take precedence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tilecast import zoo
from tilecast.launch_options.options_table import Facts, OptionTable, Setting
from tilecast.readers import models
from tilecast.readers.reading import LaunchReading, check_batch, compute_data_degree, drop_none, list_common_fields
from tilecast.spec import PartialPlan, SpecError


def read_torchtitan(
    settings: Sequence[Setting], where: str, gpus: int | None, has_model: bool, table: str = "torchtitan",
    define: Callable[[str], dict[str, Any] | None] | None = None,
) -> LaunchReading:  # fmt: skip
    """Return the job and plan of a torchtitan configuration. `read_megatron` describes the other arguments.

    Args:
        settings: see `read_megatron`, as the other arguments.
        where: name of the configuration in errors.
        gpus: number of GPUs, or None.
        has_model: whether the user names the model separately.
        table: the table of options.
        define: function that returns `spec.model` of a flavor from the package's own definition, if there is one.

    Raises:
        SpecError: options contradict each other, or the model is not known.
    """
    facts = OptionTable.read(table).read_facts(settings, where)
    tensor, pipeline, context = (facts.count(f"plan.{name}") for name in ("tensor", "pipeline", "context"))
    replicas, shards = facts.count("replicas"), int(facts.get("shards"))
    if gpus is None and shards > 0:
        gpus = replicas * shards * tensor * pipeline * context
    data = compute_data_degree(gpus, tensor, pipeline, context, where)
    if data is not None and data % replicas:
        raise SpecError(where, f"{replicas} replicas do not divide {data} ranks", "correct data_parallel_*_degree")
    if shards < 0 and data is not None:
        shards = data // replicas
    if data is not None and replicas * shards != data:
        problem = f"{replicas} x {shards} (data) x {tensor} (tensor) x {pipeline} (pipeline) x {context} (context)"
        raise SpecError(where, f"{problem} is not {gpus} GPUs", "correct a degree or the number of processes")
    local = facts.count("local_batch")
    micro = facts.count("plan.micro_batch") if pipeline > 1 else local
    preset, defined = ("", None) if has_model else _find_model(facts, define)
    training = _read_training(facts, data, local, context, shards, replicas)
    mode = facts.get("plan.checkpointing")
    layers = zoo.find_preset(preset).layers if preset else _count_layers(defined)
    if mode == "selective" and facts.get("interval") != "op":
        mode, count = _read_layer_interval(facts, layers, pipeline)
        training |= drop_none({"recomputeLayers": count})
    assumed = (2 if pipeline > 1 else 3) if shards > 1 or context > 1 else 0
    plan = PartialPlan(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=facts.count("plan.expert"),
        expert_tensor=facts.count("plan.expert_tensor", 1),
        virtual_stages=_read_virtual_stages(facts, pipeline, layers),
        zero_stage=facts.get("plan.zero_stage", assumed),
        micro_batch=micro,
        checkpointing=mode,
        sequence_parallel=tensor > 1 and bool(facts.get("plan.sequence_parallel", True)),
    )
    check_batch(training.get("globalBatchSize"), micro, data, where, "training.global_batch_size")
    return LaunchReading(
        framework="torchtitan",
        training=training,
        plan=plan,
        model=None if has_model else defined or {"preset": preset},
        model_name=preset or (f"{facts.get('model.name')} {facts.get('model.flavor')}" if defined else ""),
        gpus=gpus,
        **list_common_fields(facts),
    )


def _read_training(
    facts: Facts, data: int | None, local: int, context: int, shards: int, replicas: int
) -> dict[str, Any]:
    training = facts.get_by_prefix("training.")
    training.setdefault("sequenceLength", facts.get("training.sequenceLength"))
    training.setdefault("optimizer", facts.get("training.optimizer"))
    if attention := facts.table.facts.get("attention", {}).get(facts.get("model.name")):
        training.setdefault("attention", attention)
    batch = facts.get("global_batch")
    if batch is not None and batch > 0:
        training["globalBatchSize"] = int(batch)
    elif data is not None:
        training["globalBatchSize"] = local * data
    training["precision"] = facts.get("precision")
    for word in facts.get("converters", ()):
        if "float8" in word.lower() and "mx" not in word.lower():
            training["precision"] = "fp8"
        elif "mx" in word.lower():
            training["precision"] = "mxfp8"
    if (schedule := facts.get("schedule")) in ("interleavedZeroBubble", "zbv", "dualPipeV"):
        training["pipelineSchedule"] = schedule
    if replicas > 1 and shards > 1:
        training["shardDegree"] = shards
    return training


def _read_layer_interval(facts: Facts, layers: int | None, pipeline: int) -> tuple[str, int | None]:
    """Return the recomputation if every n-th layer is recomputed, and the number of such layers in a stage."""
    text = str(facts.get("interval"))
    if not text.isdecimal() or not int(text):
        field = facts.field("activation_checkpoint.selective_ac_option")
        raise SpecError(field, f"{text[:40]!r} is not read", 'use "op", or every n-th layer')
    if int(text) == 1 or layers is None:
        return "full", None
    return "full", max(1, math.ceil(layers / pipeline) // int(text))


def _read_virtual_stages(facts: Facts, pipeline: int, layers: int | None) -> int:
    each = facts.get("stage_layers")
    if each is not None and layers is not None and pipeline > 1:
        each = facts.count("stage_layers")
        counted = layers + int(facts.get("less_first", 0)) + int(facts.get("less_last", 0))
        return max(1, -(-counted // (pipeline * int(each))))
    is_interleaved = facts.get("schedule") in ("interleaved", "interleavedZeroBubble", "zbv", "dualPipeV")
    return 2 if is_interleaved and pipeline > 1 else 1


def _count_layers(model: dict[str, Any] | None) -> int | None:
    """Return the number of layers of a model that the package defines, or None."""
    if model is None:
        return None
    config = model["huggingFace"]["config"]
    return int(config.get("text_config", config)["num_hidden_layers"])


def _find_model(
    facts: Facts, define: Callable[[str], dict[str, Any] | None] | None
) -> tuple[str, dict[str, Any] | None]:
    """Return the preset for a model name and flavor, or an empty name and the package's own definition.

    Raises:
        SpecError: the name or the flavor is missing or unknown.
    """
    flavors = facts.table.facts["flavors"]
    name = facts.require("model.name", "name the model before --")
    flavor = facts.require("model.flavor", "name the model before --")
    try:
        return str(flavors[name][flavor]), None
    except KeyError:
        # Other flavors are sizes: 30B-A3B of qwen3.
        found = models.find_preset_in_name(f"{name.replace('_', '-')}-{flavor}")
        if found is not None:
            return found, None
    defined = None if define is None else define(str(flavor))
    if defined is None:
        problem = f"{flavor[:40]!r} of {name[:40]!r} is no model that is known"
        raise SpecError(facts.field("model.flavor"), problem, "name the model before --")
    return "", defined
