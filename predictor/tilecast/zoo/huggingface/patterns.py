"""The kinds of layers of hybrid models, by type.

Functions turn a config, with its defaults, into the words of `tilecast.zoo.hybrid`. Their rules are those of the
configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tilecast.spec import SpecError

Config: TypeAlias = Mapping[str, Any]
Pattern: TypeAlias = tuple[str, ...]


def _all(word: str) -> Callable[[Config, int], Pattern]:
    return lambda config, layers: (word,) * int(layers)


def _listed(config: Config, layers: int, words: Mapping[str, str], *keys: str) -> Pattern | None:
    """Return the words for a list of kinds of layers, from the first of the keys that has one, or None.

    A list shorter than `layers` is repeated.

    Raises:
        SpecError: a kind is not known.
    """
    for key in keys:
        kinds = config.get(key)
        if not isinstance(kinds, list) or not kinds:
            continue
        if unknown := [str(kind) for kind in kinds if str(kind) not in words]:
            raise SpecError(key, f"{unknown[0][:40]!r} is no kind of layer", f"use one of {', '.join(words)}")
        return tuple(words[str(kinds[place % len(kinds)])] for place in range(int(layers)))
    return None


def _whole(config: Config, key: str, otherwise: int) -> int:
    """Return the positive whole number under a key, or `otherwise`."""
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else otherwise


def _places(config: Config, *keys: str) -> set[int]:
    """Return the numbers of layers listed under the first of the keys that has a list."""
    lists = (config[key] for key in keys if isinstance(config.get(key), list))
    places: list[Any] = next(lists, [])
    return {place for place in places if isinstance(place, int)}


def _jamba(config: Config, layers: int) -> Pattern:
    period, offset = _whole(config, "attn_layer_period", 8), _whole(config, "attn_layer_offset", 4)
    every, first = _whole(config, "expert_layer_period", 2), _whole(config, "expert_layer_offset", 1)
    sparse = _whole(config, "num_experts", 1) > 1
    return tuple(
        f"{'attention' if place % period == offset % period else 'mamba'}"
        f"+{'moe' if sparse and place % every == first % every else 'mlp'}"
        for place in range(int(layers))
    )


def _zamba(config: Config, layers: int) -> Pattern:
    mixer = "mamba2" if config.get("model_type") == "zamba2" or "mamba_headdim" in config else "mamba"
    words = {"hybrid": "shared", "mamba": mixer, "linear_attention": mixer}
    if listed := _listed(config, layers, words, "layers_block_type"):
        return listed
    if shared := _places(config, "hybrid_layer_ids"):
        return tuple("shared" if place in shared else mixer for place in range(int(layers)))
    period, offset = _whole(config, "attn_layer_period", 6), _whole(config, "attn_layer_offset", 4)
    rest = ("shared" if place % period == offset % period else mixer for place in range(max(0, int(layers) - 3)))
    return (mixer, mixer, "shared", *rest)[: int(layers)]


def _bamba(config: Config, layers: int) -> Pattern:
    attending = _places(config, "attn_layer_indices")
    return tuple("attention+mlp" if place in attending else "mamba2+mlp" for place in range(int(layers)))


def _granite(config: Config, layers: int) -> Pattern:
    follower = "moe" if _whole(config, "num_local_experts", 0) else "mlp"
    attention, mamba = f"attention+{follower}", f"mamba2+{follower}"
    words = {"attention": attention, "full_attention": attention, "mamba": mamba, "linear_attention": mamba}
    return _listed(config, layers, words, "layer_types", "layers_block_type") or (f"mamba2+{follower}",) * int(layers)


_NEMOTRON = {"M": "mamba2", "*": "attention", "-": "+mlp", "E": "+moe"}


def _nemotron(config: Config, layers: int) -> Pattern:
    letters = config.get("hybrid_override_pattern")
    if isinstance(letters, str) and letters and set(letters) <= set(_NEMOTRON):
        return tuple(_NEMOTRON[letter] for letter in letters)[: int(layers)]
    words = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": "attention", "full_attention": "attention",
             "mlp": "+mlp", "moe": "+moe"}  # fmt: skip
    return _listed(config, layers, words, "layers_block_type", "layer_types") or ("mamba2",) * int(layers)


def _griffin(config: Config, layers: int) -> Pattern:
    words = {"recurrent": "recurrent+mlp", "attention": "local+mlp"}
    usual = {"block_types": ["recurrent", "recurrent", "attention"]}
    return _listed({**usual, **config}, layers, words, "block_types", "_block_types") or ()


def _minimax(config: Config, layers: int) -> Pattern:
    words = {
        "linear_attention": "linear+moe",
        "full_attention": "attention+moe",
        "0": "linear+moe",
        "1": "attention+moe",
    }
    usual = {"layer_types": ["linear_attention", "full_attention"]}
    return _listed({**usual, **config}, layers, words, "attn_type_list", "layer_types") or ()


def _qwen(config: Config, layers: int) -> Pattern:
    sparse = _whole(config, "num_experts", 0)
    follower = "moe" if sparse else "mlp"
    words = {"linear_attention": f"delta+{follower}", "full_attention": f"attention+{follower}"}
    if listed := _listed(config, layers, words, "layer_types"):
        return listed
    every = _whole(config, "full_attention_interval", 4)
    kinds = ["linear_attention"] * (every - 1) + ["full_attention"]
    return _listed({"layer_types": kinds}, layers, words, "layer_types") or ()


def _lfm(config: Config, layers: int) -> Pattern:
    dense = _whole(config, "num_dense_layers", 2) if _whole(config, "num_experts", 0) else int(layers)
    words = {"conv": "convolution", "full_attention": "attention"}
    mixers = _listed(config, layers, words, "layer_types")
    if mixers is None:
        attending = _places(config, "full_attn_idxs")
        mixers = tuple("attention" if place in attending else "convolution" for place in range(int(layers)))
    return tuple(f"{mixer}+{'mlp' if place < dense else 'moe'}" for place, mixer in enumerate(mixers))


PATTERNS: Mapping[str, Callable[[Config, int], Pattern]] = {
    "mamba": _all("mamba"),
    "mamba2": _all("mamba2"),
    "falcon_h1": _all("parallel+mlp"),
    "rwkv": _all("rwkv+mlp"),
    "jamba": _jamba,
    "zamba": _zamba,
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron,
    "recurrent_gemma": _griffin,
    "minimax": _minimax,
    "qwen3_next": _qwen,
    "lfm2": _lfm,
}
"""Functions that return the pattern of each kind of hybrid, from a config and the number of layers."""
