"""Read the dimensions of a model from torchtitan's own definition of it, which is Python, without running it.

`torchtitan/models/FAMILY/__init__.py` has a function for each flavor, which calls a builder of layers with the
dimensions as literals (torchtitan 0.3). They become the `config.json` of a model of the same architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilecast.readers.python import BuiltObject, ReadText, read_registered

_Config = dict[str, Any]
_Fields = Mapping[str, Any]


def define_model(flavor: str, module: Sequence[str], read_text: ReadText, package: Sequence[str]) -> _Config | None:
    """Return `spec.model` of a flavor that the package defines, or None if its architecture is not known.

    Args:
        flavor: the flavor.
        module: names that lead from the package to the module of the family.
        read_text: function that reads a file of the package by name.
        package: folders that lead to the package, with its own.

    Raises:
        SpecError: the definition cannot be read.
    """
    name = "/".join((*module, "__init__.py"))
    builders = (*_CONFIGS, *_TOWERS, "compute_ffn_hidden_dim")
    built = read_registered(read_text(name), name, flavor, read_text, package, module, builders)
    layers = None if built is None else built.fields.get("layers")
    if built is None or not isinstance(layers, BuiltObject) or layers.name not in _CONFIGS:
        return None
    own = {key: _read_dimension(value) for key, value in layers.fields.items()}
    config = {
        "hidden_size": built.fields.get("dim"), "vocab_size": built.fields.get("vocab_size"),
        "num_hidden_layers": own.get("n_layers"), **_CONFIGS[layers.name](own),
    }  # fmt: skip
    tower = built.fields.get("vision_encoder")
    vision = _TOWERS[tower.name](tower.fields) if isinstance(tower, BuiltObject) and tower.name in _TOWERS else {}
    if tower is not None and (not vision or layers.name not in _PAIRS):
        return None
    if not all(_is_literal(key, value) for key, value in (*config.items(), *vision.items())):
        return None
    if config.get("q_lora_rank") == 0:
        config["q_lora_rank"] = None
    config["tie_word_embeddings"] = built.fields.get("enable_weight_tying") is True
    if vision:
        kind, architecture = _PAIRS[layers.name]
        config = {
            "model_type": kind, "architectures": [architecture], "text_config": config, "vision_config": vision,
            "tie_word_embeddings": config["tie_word_embeddings"],
        }  # fmt: skip
    return {"huggingFace": {"config": config}}


_NAMES = ("model_type", "architectures", "deepstack_visual_indexes")
"""Fields of a config that are no numbers."""


def _is_literal(key: str, value: object) -> bool:
    """Return whether a field of a config was read. Most fields are whole numbers."""
    return key in _NAMES or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31)


def _read_dimension(value: object) -> object:
    """Return a value, or the width of a gated feed-forward block of Llama (torchtitan 0.3, compute_ffn_hidden_dim)."""
    if not isinstance(value, BuiltObject) or value.name != "compute_ffn_hidden_dim":
        return value
    hidden, unit, factor = value.fields.get("0"), value.fields.get("multiple_of", 1), value.fields.get(_FACTOR)
    factor = 1 if factor is None else factor
    if not isinstance(hidden, int) or not isinstance(unit, int) or not isinstance(factor, int | float) or unit < 1:
        return None
    width = factor * int(2 * 4 * hidden / 3)
    return -(-int(width) // unit) * unit if math.isfinite(width) else None


_FACTOR = "ffn_dim_multiplier"


def _describe_attention(own: _Fields) -> _Config:
    heads = own.get("n_heads")
    found = {"num_attention_heads": heads, "num_key_value_heads": own.get("n_kv_heads") or heads}
    return found | ({"head_dim": own["head_dim"]} if "head_dim" in own else {})


def _describe_llama(own: _Fields) -> _Config:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": own.get("hidden_dim"),
        **_describe_attention(own),
    }  # fmt: skip


def _describe_qwen3(own: _Fields) -> _Config:
    return {**_describe_llama(own), "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def _describe_experts(own: _Fields) -> _Config:
    width = own.get("moe_hidden_dim")
    return {
        "moe_intermediate_size": width, "intermediate_size": width, "num_experts": own.get("num_experts"),
        "num_experts_per_tok": own.get("top_k"), **_describe_attention(own),
    }  # fmt: skip


def _describe_qwen3_moe(own: _Fields) -> _Config:
    return {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **_describe_experts(own)}


def _describe_deepseek(own: _Fields) -> _Config:
    width, shared = own.get("moe_hidden_dim"), own.get("num_shared_experts")
    return {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        "num_attention_heads": own.get("n_heads"), "num_key_value_heads": own.get("n_heads"),
        "kv_lora_rank": own.get("kv_lora_rank"), "qk_nope_head_dim": own.get("qk_nope_head_dim"),
        "qk_rope_head_dim": own.get("qk_rope_head_dim"), "v_head_dim": own.get("v_head_dim"),
        "intermediate_size": own.get("dense_hidden_dim"), "moe_intermediate_size": width,
        "n_routed_experts": own.get("num_experts"), "n_shared_experts": shared,
        "num_experts_per_tok": own.get("router_top_k"), "first_k_dense_replace": own.get("n_dense_layers"),
        "n_group": own.get("router_num_expert_groups") or 1, "topk_group": own.get("router_num_limited_groups") or 1,
        "q_lora_rank": own.get("q_lora_rank"),
    }  # fmt: skip


def _describe_gpt_oss(own: _Fields) -> _Config:
    # Heads are the same in all of them.
    return {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "intermediate_size": own.get("hidden_dim"),
        "num_local_experts": own.get("num_experts"), "num_experts_per_tok": own.get("top_k"),
    }  # fmt: skip


def _describe_delta_layers(own: _Fields) -> _Config:
    return {
        "linear_num_key_heads": own.get("n_key_heads"), "linear_num_value_heads": own.get("n_value_heads"),
        "linear_key_head_dim": own.get("key_head_dim"), "linear_value_head_dim": own.get("value_head_dim"),
        "linear_conv_kernel_dim": 4, "full_attention_interval": own.get("full_attention_interval", 4),
    }  # fmt: skip


def _describe_qwen3_5(own: _Fields) -> _Config:
    return {
        **_describe_llama(own), **_describe_delta_layers(own), "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
    }  # fmt: skip


def _describe_qwen3_5_moe(own: _Fields) -> _Config:
    return {
        **_describe_experts(own), **_describe_delta_layers(own), "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "shared_expert_intermediate_size": own.get("shared_expert_hidden_dim"),
    }  # fmt: skip


def _describe_qwen_tower(own: _Fields) -> _Config:
    return {
        "model_type": "qwen3_vl_vision", "hidden_size": own.get("dim"), "intermediate_size": own.get("ffn_dim"),
        "depth": own.get("num_layers"), "num_heads": own.get("num_heads"), "patch_size": own.get("patch_size"),
        "temporal_patch_size": own.get("temporal_patch_size"), "deepstack_visual_indexes": [],
    }  # fmt: skip


def _describe_kimi_tower(own: _Fields) -> _Config:
    return {
        "model_type": "moonvit", "hidden_size": own.get("dim"), "intermediate_size": own.get("ffn_dim"),
        "num_hidden_layers": own.get("num_layers"), "num_attention_heads": own.get("num_heads"),
        "patch_size": own.get("patch_size", 14),
    }  # fmt: skip


_CONFIGS: Mapping[str, Callable[[_Fields], _Config]] = {
    "_build_llama3_layers": _describe_llama,
    "_build_qwen3_layers": _describe_qwen3,
    "_build_qwen3_moe_layers": _describe_qwen3_moe,
    "_build_dsv3_layers": _describe_deepseek,
    "_build_kimi_layers": _describe_deepseek,
    "_build_gptoss_layers": _describe_gpt_oss,
    "_build_qwen35_layers": _describe_qwen3_5,
    "_build_qwen35_moe_layers": _describe_qwen3_5_moe,
}
"""Config of a builder's layers, from its arguments."""
_TOWERS: Mapping[str, Callable[[_Fields], _Config]] = {
    "_qwen35_vision_encoder_config": _describe_qwen_tower,
    "_vision_encoder_config": _describe_kimi_tower,
}
"""Config of an encoder of images, from the arguments of its builder."""
_PAIRS = {
    "_build_qwen35_layers": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "_build_qwen35_moe_layers": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "_build_kimi_layers": ("kimi_vl", "KimiVLForConditionalGeneration"),
}
"""Type and architecture of a model of text and images, by the builder of its layers for text."""
