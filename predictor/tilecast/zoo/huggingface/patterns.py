"""List the kinds of layers of hybrid models, by type of config.

Functions translate a config, with its defaults, into the words of `tilecast.zoo.hybrid`. Their rules are those of the
configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

from tilecast.spec import SpecError
from tilecast.zoo.hybrid import LETTERS

Config: TypeAlias = Mapping[str, Any]
Pattern: TypeAlias = tuple[str, ...]


def _repeat_kind(word: str) -> Callable[[Config, int], Pattern]:
    """Return a function that gives every layer of a model the same kind, `word`."""
    return lambda config, layers: (word,) * layers


def _translate_kinds(
    config: Config, layers: int, words: Mapping[str, str], *keys: str, default: Sequence[str] = ()
) -> Pattern:
    """Return the kind of each of `layers` layers, translated from a list in the config to Tilecast's `words`.

    The list is under the first of `keys` that holds a non-empty list. Without such a list, `default` is translated. A
    list with fewer than `layers` items is repeated. The result is empty if there is no list and `default` is empty.

    Raises:
        SpecError: a kind in the list is unknown.
    """
    lists = ((key, config[key]) for key in keys if isinstance(config.get(key), list) and config[key])
    key, kinds = next(lists, ("", default))
    if unknown := [str(kind) for kind in kinds if str(kind) not in words]:
        raise SpecError(key, f"{unknown[0][:40]!r} is no kind of layer", f"use one of {', '.join(words)}")
    return tuple(words[str(kinds[place % len(kinds)])] for place in range(layers)) if kinds else ()


def _fill_pattern(layers: int, places: Container[int], word: str, rest: str) -> Pattern:
    """Return a kind for each layer: `word` for layers whose index is in `places`, and `rest` for all others."""
    return tuple(word if place in places else rest for place in range(layers))


def _read_count(config: Config, key: str, default: int) -> int:
    """Return the positive integer under a key, or `default` if there is none."""
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else default


def _read_places(config: Config, key: str) -> set[int]:
    """Return the layer indexes listed under a key, or an empty set."""
    listed = config.get(key)
    return {place for place in listed if isinstance(place, int)} if isinstance(listed, list) else set()


def _jamba_pattern(config: Config, layers: int) -> Pattern:
    period, offset = _read_count(config, "attn_layer_period", 8), _read_count(config, "attn_layer_offset", 4)
    every, first = _read_count(config, "expert_layer_period", 2), _read_count(config, "expert_layer_offset", 1)
    sparse = range(first % every, layers, every) if _read_count(config, "num_experts", 1) > 1 else ()
    mixers = _fill_pattern(layers, range(offset % period, layers, period), "attention", "mamba")
    followers = _fill_pattern(layers, sparse, "moe", "mlp")
    return tuple(f"{mixer}+{follower}" for mixer, follower in zip(mixers, followers, strict=True))


def _zamba_pattern(config: Config, layers: int) -> Pattern:
    mixer = "mamba2" if config.get("model_type") == "zamba2" or "mamba_headdim" in config else "mamba"
    words = {"hybrid": "shared", "mamba": mixer, "linear_attention": mixer}
    if listed := _translate_kinds(config, layers, words, "layers_block_type"):
        return listed
    if shared := _read_places(config, "hybrid_layer_ids"):
        return _fill_pattern(layers, shared, "shared", mixer)
    period, offset = _read_count(config, "attn_layer_period", 6), _read_count(config, "attn_layer_offset", 4)
    rest = _fill_pattern(max(0, layers - 3), range(offset % period, layers, period), "shared", mixer)
    return (mixer, mixer, "shared", *rest)[:layers]


def _bamba_pattern(config: Config, layers: int) -> Pattern:
    return _fill_pattern(layers, _read_places(config, "attn_layer_indices"), "attention+mlp", "mamba2+mlp")


def _granite_pattern(config: Config, layers: int) -> Pattern:
    follower = "moe" if _read_count(config, "num_local_experts", 0) else "mlp"
    attention, mamba = f"attention+{follower}", f"mamba2+{follower}"
    words = {"attention": attention, "full_attention": attention, "mamba": mamba, "linear_attention": mamba}
    return _translate_kinds(config, layers, words, "layer_types", "layers_block_type", default=["mamba"])


def _nemotron_pattern(config: Config, layers: int) -> Pattern:
    letters = config.get("hybrid_override_pattern")
    if isinstance(letters, str) and letters and set(letters) <= set(LETTERS):
        return tuple(LETTERS[letter] for letter in letters)[:layers]
    words = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": "attention", "full_attention": "attention",
             "mlp": "+mlp", "moe": "+moe"}  # fmt: skip
    return _translate_kinds(config, layers, words, "layers_block_type", "layer_types", default=["mamba"])


def _griffin_pattern(config: Config, layers: int) -> Pattern:
    words = {"recurrent": "recurrent+mlp", "attention": "local+mlp"}
    default = ["recurrent", "recurrent", "attention"]
    # The default kinds hold only where the config lacks the key.
    return _translate_kinds({"block_types": default, **config}, layers, words, "block_types", "_block_types")


def _minimax_pattern(config: Config, layers: int) -> Pattern:
    linear, attention = "linear+moe", "attention+moe"
    words = {"linear_attention": linear, "full_attention": attention, "0": linear, "1": attention}
    default = {"layer_types": ["linear_attention", "full_attention"]}
    return _translate_kinds({**default, **config}, layers, words, "attn_type_list", "layer_types")


def _qwen_pattern(config: Config, layers: int) -> Pattern:
    follower = "moe" if _read_count(config, "num_experts", 0) else "mlp"
    words = {"linear_attention": f"delta+{follower}", "full_attention": f"attention+{follower}"}
    every = _read_count(config, "full_attention_interval", 4)
    default = ["linear_attention"] * (every - 1) + ["full_attention"]
    return _translate_kinds(config, layers, words, "layer_types", default=default)


def _lfm_pattern(config: Config, layers: int) -> Pattern:
    dense = _read_count(config, "num_dense_layers", 2) if _read_count(config, "num_experts", 0) else layers
    mixers = _translate_kinds(config, layers, {"conv": "convolution", "full_attention": "attention"}, "layer_types")
    mixers = mixers or _fill_pattern(layers, _read_places(config, "full_attn_idxs"), "attention", "convolution")
    return tuple(f"{mixer}+{'mlp' if place < dense else 'moe'}" for place, mixer in enumerate(mixers))


PATTERNS: Mapping[str, Callable[[Config, int], Pattern]] = {
    "mamba": _repeat_kind("mamba"),
    "mamba2": _repeat_kind("mamba2"),
    "falcon_h1": _repeat_kind("parallel+mlp"),
    "rwkv": _repeat_kind("rwkv+mlp"),
    "jamba": _jamba_pattern,
    "zamba": _zamba_pattern,
    "bamba": _bamba_pattern,
    "granitemoehybrid": _granite_pattern,
    "nemotron_h": _nemotron_pattern,
    "recurrent_gemma": _griffin_pattern,
    "minimax": _minimax_pattern,
    "qwen3_next": _qwen_pattern,
    "lfm2": _lfm_pattern,
}
"""Functions that return the pattern of each kind of hybrid, from a config and the number of layers."""
