"""Find a model by the dimensions or the name in a launch command."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tilecast import zoo
from tilecast.model import Model
from tilecast.spec import SpecError
from tilecast.zoo.deepseek import Deepseek

_FAMILIES = ("decoder", "moe", "deepseek", "encoder", "encdec")


def dimensions(model: Model) -> dict[str, Any]:
    """Return those dimensions of a transformer that a launch command can contain."""
    own = model.dimensions if isinstance(model.dimensions, zoo.Transformer) else zoo.Transformer()
    latent = own if isinstance(own, Deepseek) else None
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.heads if latent else model.kv_heads,
        "head_dim": model.head_dim,
        "ffn": own.dense_ffn_hidden or model.ffn_hidden,
        "experts": own.experts,
        "expert_ffn": model.ffn_hidden if own.experts else 0,
        "top_k": own.top_k if own.experts else 0,
        "shared_ffn": own.shared_ffn_hidden,
        "first_dense": own.first_dense if own.experts else 0,
        "moe_every": own.moe_every if own.experts else 1,
        "latent": latent.latent if latent else 0,
        "gated": model.gated_mlp,
        "rms_norm": model.rms_norm,
        "rotary": model.rotary,
        "positions": model.positions,
        "bias": model.bias,
        "tied": model.tied_embeddings,
        "dropout": model.dropout,
        "decoder_layers": own.count_decoder_layers(model) if model.family == "encdec" else 0,
        "family": model.family,
    }


@cache
def _list_transformers() -> tuple[tuple[str, int, dict[str, Any]], ...]:
    """Return the name, the vocabulary size and the dimensions of every transformer preset."""
    known = (model for model in zoo.presets().values() if model.family in _FAMILIES and not model.towers)
    return tuple((model.name, model.vocab, dimensions(model)) for model in known)


def find_preset_by_dimensions(
    wanted: Mapping[str, Any], vocab: int | None, optional: tuple[str, ...] = ()
) -> str | None:
    """Return the name of the first preset with the given dimensions, or None if there is no such preset.

    Args:
        wanted: dimensions by name, as the function `dimensions` names them.
        vocab: size of the vocabulary, which may differ from the preset's by up to 2,048 rows of padding, or None if
            unknown.
        optional: dimensions that may differ if no preset has all of them.
    """
    alike = [
        (name, size, own)
        for name, size, own in _list_transformers()
        if all(own[key] == value for key, value in wanted.items() if key not in optional)
        and (vocab is None or abs(vocab - size) <= 2048)
    ]
    exact = [name for name, _, own in alike if all(own[key] == wanted[key] for key in optional if key in wanted)]
    return exact[0] if exact else alike[0][0] if alike else None


def find_preset_in_name(name: str) -> str | None:
    """Return the preset named at the end of a Hugging Face Hub name or a path, or None."""
    for text in (name, name.rstrip("/").rpartition("/")[2]):
        try:
            if text:
                return zoo.find_preset(text).name
        except SpecError:
            continue
    return None
