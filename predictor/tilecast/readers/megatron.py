"""Read a Megatron-LM command: the model from its dimensions, the job and the plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tilecast import zoo
from tilecast.launch_options.options_table import Facts, OptionTable, Setting
from tilecast.layout import parse_layout
from tilecast.readers import models
from tilecast.readers.reading import LaunchReading, check_batch, compute_data_degree, drop_none, list_common_fields
from tilecast.recomputation import join_modules
from tilecast.spec import FROZEN_PARTS, PartialPlan, SpecError

SCRIPTS = ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py", "pretrain_mamba.py", "pretrain_llama.py")
_DIMENSIONS = "give the dimensions of the model, or name it before --"
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "BertWordPieceLowerCase": 30522,
                 "BertWordPieceCase": 28996}  # fmt: skip
"""Vocabulary size of each `--tokenizer-type` that has a fixed one."""
_COUNTS = (
    "model.layers", "model.encoder_layers", "model.decoder_layers", "model.hidden", "model.heads", "model.ffn",
    "virtual_layers", "samples",
)  # fmt: skip
"""Targets whose values must be at least 1."""
_DISPATCHERS = {"alltoall": "allToAll", "alltoall_seq": "allToAll", "allgather": "allGather"}
_FLEX = {"deepep": "deepEP", "hybridep": "hybridEP"}


def read_megatron(
    settings: Sequence[Setting], where: str, program: str, gpus: int | None, has_model: bool, table: str = "megatron"
) -> LaunchReading:
    """Return the job and plan that the options of a Megatron-LM command describe.

    Args:
        settings: the options.
        where: name of the command in errors.
        program: the training script.
        gpus: number of processes, or None if it is unknown.
        has_model: whether the user names the model separately from the command.
        table: the table of options, that of Megatron-LM or of a launcher around Megatron-Core.

    Raises:
        SpecError: an option is missing, or options contradict each other.
    """
    facts = OptionTable.read(table).read_facts(settings, where)
    if facts.get("world.devices"):
        gpus = facts.count("world.devices") * facts.count("world.nodes")
    tensor, pipeline, context = (facts.count(f"plan.{name}") for name in ("tensor", "pipeline", "context"))
    data = compute_data_degree(gpus, tensor, pipeline, context, where)
    if facts.get("plan.micro_batch") is None:
        raise SpecError(facts.field("--micro-batch-size"), "is missing", f"give it; {facts.table.title} needs it")
    micro = facts.count("plan.micro_batch")
    for target in _COUNTS:
        if facts.get(target) is not None:
            facts.count(target)
    layers = facts.get("model.layers") or facts.get("model.encoder_layers")
    has_experts = bool(facts.get("model.experts"))
    plan = PartialPlan(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=facts.count("plan.expert"),
        expert_tensor=facts.count("plan.expert_tensor", tensor) if has_experts else 1,
        virtual_stages=_read_virtual_stages(facts, pipeline, layers),
        zero_stage=1 if facts.get("training.offload") else facts.get("plan.zero_stage"),
        micro_batch=micro,
        checkpointing=_read_recomputation(facts),
        sequence_parallel=bool(facts.get("plan.sequence_parallel")) and tensor > 1,
    )
    _apply_dispatcher(facts)
    training = _read_training(facts, plan, layers)
    check_batch(training.get("globalBatchSize"), micro, data, where, "--global-batch-size")
    model, name = (None, "") if has_model else _find_model(facts, program, table)
    return LaunchReading(
        framework="nemo" if table in ("megatron-bridge", "nemo") else "megatron",
        training=training,
        plan=plan,
        model=model,
        model_name=name,
        gpus=gpus,
        notes=_list_notes(facts, plan),
        **list_common_fields(facts),
    )


def _apply_dispatcher(facts: Facts) -> None:
    """Drop what concerns experts where there are none, and add the size of the stash."""
    if not _may_have_experts(facts):
        if facts.get("training.expertOverlap") == "sharedExpert":
            del facts.values["training.expertOverlap"]
        for target in ("dispatcher", "training.expertCapacity", "stashes"):
            facts.values.pop(target, None)
    if facts.get("stashes"):
        # Its sign says whether even or actual shares count, which are the same where shares are even.
        size = abs(facts.get("stash"))
        facts.values["training.expertStash"] = size
        if size < 1:
            facts.unpriced[facts.origins["stash"]] = "a stash that spills to the host is not priced"
    if facts.get("fuses_experts") == "True" and not facts.get("training.expertCapacity"):
        facts.unknown.append(facts.origins["fuses_experts"])


def _may_have_experts(facts: Facts) -> bool:
    """Return whether the options describe a model with experts, or name one that has them or is not known."""
    name = facts.get("model.name") or facts.get("model.class")
    if facts.get("model.experts") or name is None:
        return bool(facts.get("model.experts"))
    presets = facts.table.facts.get("models", {})
    preset = models.find_preset_in_name(presets.get(str(name).rpartition(".")[2], str(name)))
    return preset is None or zoo.count_experts(zoo.find_preset(preset)) > 0


def _list_notes(facts: Facts, plan: PartialPlan) -> tuple[str, ...]:
    """Return sentences on options that the command leaves out and the forecast assumes."""
    said = {option.lstrip("-") for option in facts.ignored}
    expected = ["overlap-grad-reduce"] if plan.data != 1 else []
    expected += ["overlap-param-gather"] if plan.data != 1 and plan.zero_stage else []
    missing = [f"--{option}" for option in expected if option not in said]
    notes = [f"Priced as if {' and '.join(missing)} were set."] if missing else []
    if facts.get("training.expertStash"):
        notes.append("Copies of experts' activations into the stash and back are priced as hidden.")
    if room := facts.get("training.expertCapacity"):
        notes.append(f"Priced as if no rank of experts got over {room:g} times an even share: then a step is repeated.")
    if facts.get("fp8_attention"):
        notes.append("Attention is priced in 16 bits, though the launch has it in FP8.")
    return tuple(notes)


def _read_virtual_stages(facts: Facts, pipeline: int, layers: int | None) -> int:
    layout, each = facts.get("training.pipelineLayout"), facts.get("virtual_layers")
    if layout is not None and pipeline > 1:
        pieces = len(parse_layout(layout).pieces)
        if pieces % pipeline:
            raise SpecError(
                facts.field("--pipeline-model-parallel-layout"), f"{pieces} stages are no multiple of {pipeline}",
                "correct the layout or --pipeline-model-parallel-size",
            )  # fmt: skip
        return pieces // pipeline
    if each is not None and layers is not None:
        if layers % (pipeline * each):
            problem = f"{layers} layers are no multiple of {pipeline} stages x {each}"
            raise SpecError(facts.field("--num-layers-per-virtual-pipeline-stage"), problem, "correct one of them")
        return int(layers // (pipeline * each))
    return facts.count("plan.virtual_stages")


def _read_recomputation(facts: Facts) -> Any:
    mode, modules = facts.get("plan.checkpointing"), facts.get("recompute_modules")
    if mode == "selective" and modules == ():
        # Megatron-Core, transformer_config.py: a list without modules recomputes nothing, unlike no list.
        return "none"
    if mode == "selective" and modules and modules != ("core_attn",):
        try:
            return join_modules(modules)
        except KeyError as error:
            raise SpecError(facts.field("--recompute-modules"), f"{error} is not priced", "leave it out") from None
    return mode


def _read_training(facts: Facts, plan: PartialPlan, layers: int | None) -> dict[str, Any]:
    training = facts.get_by_prefix("training.")
    if plan.pipeline == 1:
        training.pop("pipelineLayout", None)
    precision = facts.get("recipe") if facts.get("quantized") else None
    training["precision"] = precision or facts.get("quantized") or facts.get("precision") or "fp32"
    if plan.micro_batch and plan.data and "globalBatchSize" not in training:
        training["globalBatchSize"] = plan.micro_batch * plan.data
    if (samples := facts.get("samples")) and "steps" not in training and training.get("globalBatchSize"):
        training["steps"] = max(1, samples // training["globalBatchSize"])
    if facts.get("precision_aware") and (moments := facts.get("moments")):
        training["momentPrecision"] = moments
    if (count := facts.get("offloaded_layers")) and layers:
        training["offloadActivations"] = count / layers
    if facts.get("recompute_method") == "block" and plan.checkpointing == "full" and facts.get("recompute_layers"):
        training["recomputeLayers"] = facts.get("recompute_layers") * plan.virtual_stages
    if facts.get("quantized"):
        # Without --grad-reduce-in-bf16, --bf16 sums gradients in FP32.
        training.setdefault("gradientPrecision", "fp32")
    if size := facts.get("bucket_parameters"):
        width = 2 if training.get("gradientPrecision") == "bf16" or training["precision"] == "fp16" else 4
        training["bucketMiB"] = max(1, round(size * width / 2**20))
    # A model that is named has its maker's dispatcher unless options say another.
    if facts.get("model.experts") or facts.get("dispatcher"):
        flex = _FLEX.get(facts.get("flex_backend") or "deepep")
        kind = facts.get("dispatcher") or "allgather"
        training["expertDispatch"] = flex if kind == "flex" else _DISPATCHERS.get(kind)
    training.setdefault("optimizer", facts.get("training.optimizer"))
    if layout := _read_ends(facts, plan, layers):
        training["pipelineLayout"] = layout
    if frozen := _read_frozen_parts(facts):
        training["frozenParts"] = frozen
    if facts.get("adapter") == "lora":
        targets = {str(word).rpartition(".")[2] for word in facts.get("lora_targets", ())}
        is_attention = bool(targets) and targets <= {"linear_qkv", "linear_proj"}
        training |= {"loraRank": facts.get("lora_rank"), "loraTargets": "attention" if is_attention else "all"}
    return drop_none(training)


def _read_ends(facts: Facts, plan: PartialPlan, layers: int | None) -> str | None:
    """Return the pipeline layout in which the first or the last stage has a number of layers of its own, or None.

    The others have equally many, and each virtual stage of a rank has its share (Megatron-Core,
    transformer/transformer_block.py: get_num_layers_to_build).

    Raises:
        SpecError: the layers cannot be split so, or their number is not known.
    """
    ends = facts.get_by_prefix("ends.")
    if not ends or plan.pipeline == 1:
        return None
    origin = facts.field(facts.origins[f"ends.{next(iter(ends))}"])
    layers = layers or facts.table.facts.get("layers", {}).get(str(facts.get("model.name")))
    if layers is None:
        raise SpecError(origin, "splits layers whose number is not known", "set pipeline_model_parallel_layout")
    pieces, middle = plan.virtual_stages, plan.pipeline - len(ends)
    each, rest = divmod(layers - sum(ends.values()), max(middle, 1))
    ranks = [ends.get("first", each), *[each] * (plan.pipeline - 2), ends.get("last", each)]
    if rest or each < 0 or any(number % pieces for number in ranks) or sum(ranks) != layers:
        problem = f"does not leave {layers} layers to {plan.pipeline} stages"
        raise SpecError(origin, problem, "correct it or pipeline_model_parallel_size")
    stages = ["t*" + str(number // pieces) for number in ranks * pieces]
    return "E" + "|".join(stages) + "L"


def _read_frozen_parts(facts: Facts) -> list[str]:
    """Return the parts of a model that Megatron-Bridge's `freeze_*` options do not train.

    Raises:
        SpecError: projections of some towers alone are frozen, or a part beside adapters, which other options place.
    """
    stated = facts.get_by_prefix("projection.")
    projections = [name for name, is_frozen in stated.items() if is_frozen]
    named = {f"frozen.{part}": part for part in FROZEN_PARTS if facts.get(f"frozen.{part}")}
    origins = [facts.origins[name] for name in (*named, *(f"projection.{one}" for one in projections))]
    if not origins:
        return []
    if facts.get("adapter"):
        problem = "is set beside adapters, and which parts have some is not priced"
        raise SpecError(facts.field(origins[0]), problem, "leave one of them out")
    if projections and len(projections) < len(stated):
        raise SpecError(facts.field(origins[-1]), "freezes one projection of several", "freeze all of them or none")
    return [part for part in FROZEN_PARTS if part in named.values() or (part == "projector" and projections)]


def _find_model(facts: Facts, program: str, table: str) -> tuple[dict[str, Any] | None, str]:
    """Return `spec.model` and its name. If the model is on the Hub, return None and its name there.

    Raises:
        SpecError: no option describes the model.
    """
    if (stated := facts.get("model.name")) and not facts.get("model.pattern"):
        return None, str(stated)
    if kind := facts.get("model.class"):
        name = OptionTable.read(table).facts.get("models", {}).get(str(kind).rpartition(".")[2])
        if name is None:
            field = facts.field(facts.origins["model.class"])
            raise SpecError(field, f"{str(kind)[:60]!r} is no model that is known", "name the model before --")
        return {"preset": name}, name
    return _read_model(facts, program)


def _read_model(facts: Facts, program: str) -> tuple[dict[str, Any], str]:
    """Return `spec.model` for the model that the options describe, and a name for it."""
    own = facts.get_by_prefix("model.")
    if own.get("pattern"):
        return _build_hybrid_model(facts), f"{len(str(own['pattern']))}-layer hybrid"
    wanted = _read_dimensions(facts, program)
    vocab = _find_vocabulary_size(own)
    if found := models.find_preset_by_dimensions(wanted, vocab, ("dropout", "tied", "qk_norm")):
        return {"preset": found}, found
    if vocab is None:
        raise SpecError(
            facts.field("--vocab-size"), "is missing, and no preset has these dimensions",
            "give --vocab-size, or name the model before --",
        )  # fmt: skip
    document = _build_custom_model(facts, wanted, vocab)
    return document, f"{wanted['layers']}-layer model"


def _build_hybrid_model(facts: Facts) -> dict[str, Any]:
    """Return `spec.model` of a hybrid of Mamba layers, attention, feed-forward layers and experts (Nemotron-H).

    Raises:
        SpecError: a dimension is missing, or the pattern has a layer of another kind.
    """
    own = facts.get_by_prefix("model.")
    pattern = str(own["pattern"])
    if not set(pattern) <= set("M*-E") or len(pattern) > _MAX_PATTERN:
        raise SpecError(facts.field(facts.origins["model.pattern"]), f"{pattern[:60]!r} is not read", _DIMENSIONS)
    if own.get("layers") not in (None, len(pattern)):
        problem = f"has {len(pattern)} layers, and {facts.origins['model.layers']} says {own['layers']}"
        raise SpecError(facts.field(facts.origins["model.pattern"]), problem, "correct one of them")
    if own.get("gated") or own.get("expert_latent") or own.get("prediction_layers"):
        raise SpecError(
            facts.field(facts.origins["model.pattern"]), "has layers that are not priced", "name the model before --"
        )
    heads = facts.require("model.heads", _DIMENSIONS)
    hidden, vocab = facts.require("model.hidden", _DIMENSIONS), _find_vocabulary_size(own)
    vocab = vocab or facts.table.facts.get("vocabularies", {}).get(str(own.get("tokenizer", "")))
    if vocab is None:
        raise SpecError(facts.field("--vocab-size"), "is missing", "give --vocab-size, or name the model before --")
    width = facts.count("model.mamba_head_dim", 64)
    config = {
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern), "hidden_size": hidden, "vocab_size": vocab, "num_attention_heads": heads,
        "num_key_value_heads": own.get("kv_heads") or heads, "head_dim": own.get("head_dim") or hidden // heads,
        "mamba_num_heads": own.get("mamba_heads") or 2 * hidden // width,
        "mamba_head_dim": width, "ssm_state_size": own.get("mamba_state", 128),
        "n_groups": own.get("mamba_groups", 8), "intermediate_size": own.get("ffn") or 4 * hidden,
        "tie_word_embeddings": bool(own.get("tied", False)),
    }  # fmt: skip
    if "E" in pattern:
        config |= {
            "n_routed_experts": facts.require("model.experts", _DIMENSIONS),
            "moe_intermediate_size": own.get("expert_ffn") or config["intermediate_size"],
            "num_experts_per_tok": own.get("top_k", 2),
            "moe_shared_expert_intermediate_size": own.get("shared_ffn", 0),
        }
    return {"huggingFace": {"config": config}}


_MAX_PATTERN = 1024
"""Most layers of a hybrid."""


def _find_vocabulary_size(own: dict[str, Any]) -> int | None:
    if size := own.get("padded_vocab") or own.get("vocab"):
        return int(size)
    name = models.find_preset_in_name(str(own.get("tokenizer", "")))
    return zoo.find_preset(name).vocab if name else _VOCABULARIES.get(str(own.get("tokenizer_type", "")))


def _read_dimensions(facts: Facts, program: str) -> dict[str, Any]:
    own = facts.get_by_prefix("model.")
    is_encdec = program.endswith("pretrain_t5.py")
    family = "encdec" if is_encdec else "encoder" if program.endswith("pretrain_bert.py") else "decoder"
    if is_encdec:
        layers = facts.require("model.encoder_layers", _DIMENSIONS)
        decoders = own.get("decoder_layers", layers)
        layers += decoders
    else:
        layers, decoders = own.get("layers") or facts.require("model.layers", _DIMENSIONS), 0
    hidden, heads = (facts.require(f"model.{name}", _DIMENSIONS) for name in ("hidden", "heads"))
    gated = bool(own.get("gated"))
    experts, latent = int(own.get("experts", 0) or 0), own.get("latent")
    first, every = _read_expert_layers(own.get("moe_frequency"), layers) if experts else (0, 1)
    ffn = own.get("ffn") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    expert_ffn = (own.get("expert_ffn") or ffn) if experts else 0
    positions = own.get("positions", "learned_absolute")
    head_dim = own.get("head_dim") or hidden // heads
    if latent:
        family, head_dim = "deepseek", own.get("plain_dim", 128) + own.get("rotary_dim", 64)
    elif experts:
        family = "moe"
    wanted = {
        "family": family, "layers": layers, "hidden": hidden, "heads": heads, "head_dim": head_dim,
        "kv_heads": heads if latent else own.get("kv_heads") or heads, "experts": experts, "expert_ffn": expert_ffn,
        "top_k": own.get("top_k", 2) if experts else 0, "shared_ffn": own.get("shared_ffn", 0),
        "first_dense": first, "moe_every": every, "latent": latent or 0, "gated": gated,
        "rms_norm": own.get("normalization") == "RMSNorm",
        "rotary": positions in ("rope", "mrope", "yarn") or bool(latent),
        "bias": own.get("bias", True), "tied": own.get("tied", True), "decoder_layers": decoders,
        "dropout": max(facts.get("model.attention_dropout"), facts.get("model.hidden_dropout")) > 0,
    }  # fmt: skip
    wanted["positions"] = _count_learned_positions(facts)
    if not experts or first or every > 1:
        wanted["ffn"] = ffn
    return wanted


def _count_learned_positions(facts: Facts) -> int:
    """Return the number of learned position embeddings, or 0 if positions are not learned."""
    if facts.get("model.positions", "learned_absolute") != "learned_absolute" or facts.get("model.latent"):
        return 0
    length = facts.get("training.sequenceLength")
    return int(facts.get("model.max_positions") or length or 2048)


def _read_expert_layers(text: str | None, layers: int) -> tuple[int, int]:
    """Return the number of dense layers at the beginning, and the distance from one layer with experts to the next."""
    if text is None:
        return 0, 1
    if re.fullmatch(r"\d{1,6}", text, re.ASCII) and int(text):
        return 0, int(text)
    pattern = _parse_frequency_list(text)
    if pattern is not None and len(pattern) == layers and 1 in pattern:
        first = pattern.index(1)
        if all(pattern[first:]):
            return first, 1
        every = next((n for n in range(2, layers + 1) if pattern == [int(i % n == 0) for i in range(layers)]), 0)
        if every:
            return 0, every
    raise SpecError("--moe-layer-freq", f"{text[:60]!r} is not read", "write ([0]*N+[1]*M), or every n-th layer")


def _parse_frequency_list(text: str) -> list[int] | None:
    """Return the numbers of a list expression such as `([0]*3+[1]*58)`, or None if the text is not of that form.

    Nothing is executed as Python.
    """
    if len(text) > 4096:
        return None
    items: list[int] = []
    for part in text.replace(" ", "").strip("()").split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", part.strip("()"))
        if match is None:
            return None
        part_items, times = [int(one) for one in match[1].split(",")], int(match[2] or 1)
        if len(items) + len(part_items) * times > 4096:
            return None
        items += part_items * times
    return items


def _build_custom_model(facts: Facts, wanted: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Return `spec.model` of a model that no preset describes.

    Raises:
        SpecError: the model is of a kind that only the name of a preset can describe.
    """
    own = facts.get_by_prefix("model.")
    base = {
        "hidden_size": wanted["hidden"], "num_hidden_layers": wanted["layers"], "vocab_size": vocab,
        "num_attention_heads": wanted["heads"], "num_key_value_heads": wanted["kv_heads"],
        "head_dim": wanted["head_dim"],
        "tie_word_embeddings": wanted["tied"], "max_position_embeddings": facts.get("training.sequenceLength") or 2048,
    }  # fmt: skip
    is_llama = wanted["gated"] and wanted["rms_norm"] and wanted["rotary"] and not wanted["bias"]
    if wanted["family"] == "deepseek":
        latent = {
            "model_type": "deepseek_v3", "kv_lora_rank": wanted["latent"], "q_lora_rank": own.get("query_latent"),
            "qk_nope_head_dim": own.get("plain_dim", 128), "qk_rope_head_dim": own.get("rotary_dim", 64),
            "v_head_dim": own.get("value_dim", 128), "intermediate_size": wanted.get("ffn", wanted["expert_ffn"]),
            "moe_intermediate_size": wanted["expert_ffn"], "n_routed_experts": wanted["experts"] or None,
            "n_shared_experts": wanted["shared_ffn"] // max(1, wanted["expert_ffn"]),
            "num_experts_per_tok": wanted["top_k"], "first_k_dense_replace": wanted["first_dense"],
            "n_group": own.get("expert_groups", 1), "topk_group": own.get("top_groups", 1),
        }  # fmt: skip
        base.pop("head_dim")
        return {"huggingFace": {"config": {**base, **latent, "architectures": ["DeepseekV3ForCausalLM"]}}}
    if wanted["family"] == "moe" and is_llama:
        experts = {
            "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"],
            "intermediate_size": wanted.get("ffn", wanted["expert_ffn"]), "moe_intermediate_size": wanted["expert_ffn"],
            "num_experts": wanted["experts"], "num_experts_per_tok": wanted["top_k"],
            "shared_expert_intermediate_size": wanted["shared_ffn"], "decoder_sparse_step": wanted["moe_every"],
        }  # fmt: skip
        if not wanted["first_dense"]:
            return {"huggingFace": {"config": {**base, **experts}}}
    if wanted["family"] == "decoder" and is_llama:
        kind = {"model_type": "qwen3" if own.get("qk_norm") else "llama", "intermediate_size": wanted["ffn"]}
        name = "Qwen3ForCausalLM" if own.get("qk_norm") else "LlamaForCausalLM"
        if not wanted["dropout"]:
            return {"huggingFace": {"config": {**base, **kind, "architectures": [name]}}}
    if wanted["family"] in ("decoder", "encoder"):
        return {
            "transformer": {
                "family": wanted["family"], "layers": wanted["layers"], "hiddenSize": wanted["hidden"],
                "attentionHeads": wanted["heads"], "keyValueHeads": wanted["kv_heads"], "headSize": wanted["head_dim"],
                "feedForwardSize": wanted["ffn"], "vocabularySize": vocab, "rotary": wanted["rotary"],
                "learnedPositions": wanted["positions"], "gatedFeedForward": wanted["gated"],
                "rmsNorm": wanted["rms_norm"], "bias": wanted["bias"], "tiedEmbeddings": wanted["tied"],
                "dropout": wanted["dropout"],
            }
        }  # fmt: skip
    problem = "no preset has these dimensions, and a model of this kind is not built from options"
    raise SpecError(facts.field("model"), problem, "name the model, or its config.json, before --")
