"""Write remarks on a config: sizes that it lacks, counts that are not read, and presets that resemble it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tilecast import zoo
from tilecast.model import Model
from tilecast.zoo.huggingface.expressions import find_first_key
from tilecast.zoo.huggingface.reading import evaluate_or_none
from tilecast.zoo.reading import list_required_dimensions

_INNER = ("chunk", "kernel", "patch_depth", "image_channels", "sliding_window")
"""Dimensions inside layers whose defaults hardly ever change, or depend on a switch."""
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab")
"""Dimensions that every stack of layers has, including hybrids."""
_KEY = re.compile(r"[A-Za-z_]\w*")


def describe_defaults(
    model: Model,
    expressions: Mapping[str, str],
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    place: str,
) -> tuple[str, ...]:
    """Return notes on the sizes that a config leaves out or sets to null. Rates and switches do not count as sizes.

    Args:
        model: the model that was read.
        expressions: the expressions by which the dimensions of the model were read, by name.
        config: the config.
        defaults: values of transformers for keys that a config leaves out.
        place: path of the config in the file, or an empty text for the file itself.
    """
    pattern = getattr(model.dimensions, "pattern", ())
    sizes = (*_SIZES, *list_required_dimensions(model.family, pattern))
    needed: Sequence[str] = sizes if pattern else tuple(expressions)
    absent: dict[str, str] = {}
    null: dict[str, str] = {}
    for name, text in expressions.items():
        if name in _INNER or name not in needed or evaluate_or_none(text, config) is not None:
            continue
        for key in _KEY.findall(text):
            value = defaults.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 2 or config.get(key) is not None:
                continue
            if key in config and name in sizes:
                priced = getattr(model, name, None) or getattr(model.dimensions, name, None)
                null[key] = f"{key} is null" + (f", and {priced} is priced" if priced else "")
            elif key not in config:
                absent[key] = f"{key} {value}"
    notes = [f"In {place or 'the config'}, {text}." for text in null.values()]
    if absent:
        where = place or "The config"
        notes.append(f"{where} lacks sizes. Priced are Transformers' defaults: {', '.join(absent.values())}.")
    return tuple(notes)


_FURTHER = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", "mtp_num_layers")
"""Keys that count the layers or modules of multi-token prediction."""
_COUNT = re.compile(r"(layers|experts|heads|modules|blocks)$|(^|_)(mtp|nextn)(_|$)")
"""Patterns of keys that count parts of a model."""
_DERIVED = ("num_key_value_heads", "num_heads")
"""Counts of latent attention and of Mamba 2 that follow from other keys."""


def describe_unread_keys(table: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on keys of a config that count parts of the model but that its type's table does not read.

    Parts that predict further tokens have their own note. Other keys are noted only for decoders, because the counts of
    other models repeat each other.
    """
    notes = []
    if further := [f"{key} {config[key]}" for key in _FURTHER if _is_count(config.get(key), 1)]:
        notes.append(f"Layers that predict further tokens are not priced ({', '.join(further)}).")
    if table.get("family") in ("decoder", "hybrid"):
        known = {*_KEY.findall(str(dict(table))), *_FURTHER, *_DERIVED}
        unread = [
            f"{key} {value}"
            for key, value in config.items()
            if key not in known and _COUNT.search(key) and _is_count(value, 2)
        ]
        if unread:
            notes.append(f"Not read from the config: {', '.join(unread[:8])}.")
    return tuple(notes)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_COMPARED = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "experts")
"""Dimensions by which a config and a preset are compared."""
_FEWEST = 4
"""Fewest dimensions that a config must state to be compared."""


def suggest_preset(expressions: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """Return a phrase with the preset that a config describes, or an empty text.

    This is the preset that the config names, or a preset that differs from the config in at most one dimension. The
    phrase says which key differs.
    """
    stated = str(config.get("_name_or_path", "")).rstrip("/")
    if stated and zoo.is_preset(stated):
        return f"the preset {zoo.find_preset(stated).name}, which the config names"
    sizes = {name: evaluate_or_none(expressions[name], config) for name in _COMPARED if name in expressions}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if len(sizes) < _FEWEST:
        return ""
    phrases: dict[int, str] = {}
    for preset in sorted(zoo.presets().values(), key=lambda one: one.name):
        values = {name: _read_size(preset, name) for name in sizes}
        if not all(values.values()):
            continue
        others = [name for name, size in sizes.items() if values[name] != size]
        if not others:
            phrases.setdefault(0, f"the preset {preset.name}, which has these dimensions")
        elif len(others) == 1:
            key = find_first_key(expressions[others[0]])
            phrases.setdefault(
                1, f"the preset {preset.name}, which differs in {key} alone, {values[others[0]]} instead of "
                f"{sizes[others[0]]!r:.20}"
            )  # fmt: skip
    return next((phrases[count] for count in sorted(phrases)), "")


def _read_size(preset: Model, name: str) -> Any:
    """Return a dimension of a preset by name, or None if its family has no such dimension."""
    return getattr(preset, name, getattr(preset.dimensions, name, None))
