"""Models of several networks: the parts of a config, and the towers beside a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilecast import shipped
from tilecast.spec import Model, SpecError
from tilecast.zoo import vision
from tilecast.zoo.huggingface.expressions import evaluate

_PROJECTOR = ("projector", "projector_inputs", "projector_outputs", "projector_tokens", "projectors")


def place(alternatives: str, config: Mapping[str, Any]) -> str:
    """Return the first of the keys in `a | b` under which a config has a part; a dot means the config itself.

    If it has none of them, return the first key.
    """
    keys = alternatives.split(" | ")
    return next((key for key in keys if key == "." or isinstance(config.get(key), Mapping)), keys[0])


def named_tower(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the config of the published encoder that LLaVA's own files name, or None if `towers.toml` lacks it."""
    known = shipped.table("tilecast.zoo.huggingface", "towers.toml")
    return known.get(str(config.get("mm_vision_tower")))


def is_single(table: Mapping[str, Any] | None) -> bool:
    """Return whether a table describes a single network."""
    return table is not None and not {"language", "within"} & set(table)


def has_same_prefix(one: str, other: str) -> bool:
    """Return whether the names of two types begin alike, as those of a model and its parts do."""
    return one.replace("-", "_").split("_")[0] == other.replace("-", "_").split("_")[0]


def towers(
    model: Model,
    tables: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    path: str,
    read: Callable[[str, Mapping[str, Any], str, object], Model | None],
) -> Model:
    """Return the model with the towers that tables name, and with notes on those that cannot be read."""
    parts, notes = list(model.towers), list(model.notes)
    for table in tables:
        if "when" in table and not evaluate(table["when"], config):
            continue
        key = place(table["at"], config)
        part = config if not key else config.get(key, named_tower(config))
        if not isinstance(part, Mapping):
            name = str(config.get("mm_vision_tower", "its encoder of images"))
            notes.append(f"The config does not describe {name:.80}, which is not priced.")
            continue
        where = f"{path}.{key}" if key else path
        tower = read(table["type"], part, where, config.get("model_type"))
        if tower is None:
            notes.append(f"What {key} describes, of model_type {part.get('model_type')!s:.40}, is not priced.")
            continue
        parts.append(_projected(tower, model, table, config, where))
        if key:
            notes.append(_tower_note(parts[-1]))
    return replace(model, towers=tuple(parts), notes=tuple(notes))


def _projected(tower: Model, model: Model, table: Mapping[str, Any], config: Mapping[str, Any], path: str) -> Model:
    """Return a tower with the projector of its table."""
    if "projector" not in table:
        return tower
    scope = {"tower": {"hidden": tower.hidden, "tokens": tokens(tower)}, "language": {"hidden": model.hidden},
             "config": config}  # fmt: skip
    try:
        sizes = {name: float(evaluate(table[name], scope) or 0.0) for name in _PROJECTOR if name in table}
    except (TypeError, ValueError) as error:
        raise SpecError(path, f"its projector has no size: {str(error)[:40]}", "correct the config") from None
    if not all(0 < size <= 2**24 for size in sizes.values()):
        raise SpecError(path, "its projector has no size", "correct the config")
    return replace(tower, extra={**tower.extra, **sizes})


def tokens(tower: Model) -> float:
    """Return how many tokens of a sample a tower hands on, class tokens excluded."""
    if "frames" in tower.extra:
        return tower.extra["frames"]
    if tower.family == "wav2vec2":
        return float(tower.extra["image_width"] // _SAMPLES)
    rows, columns = vision.grid(tower) if "patch" in tower.extra else (1, 1)
    return float(rows * columns) / (_MERGED**2 if tower.family == "swin" else 1)


_SAMPLES = 320
"""Values of sound per token of wav2vec 2.0 (arXiv 2006.11477, section 4.2: 20 ms at 16 kHz)."""
_MERGED = 8
"""Factor by which Swin's last stage is wider than its first, and has fewer tokens a side."""


def crossed(model: Model, config: Mapping[str, Any], path: str) -> Model:
    """Return an encoder-decoder made of a decoder and its tower (transformers, VisionEncoderDecoderModel).

    The decoder's layers also attend to the tokens of the tower, which becomes the encoder. If their widths differ and
    the decoder does not state that it reads the tower's, a dense layer stands between them.

    Raises:
        SpecError: the tower is of a type that is not known, or its tokens are not.
    """
    if len(model.towers) != 1 or model.family not in ("decoder", "encoder", "encdec"):
        raise SpecError(path, "its encoder or its decoder is of a type that is not known", "trace it: `tilecast trace`")
    (tower,) = model.towers
    if tower.family != "wav2vec2" and not {"frames", "patch"} & set(tower.extra):
        problem = f"{tower.name} hands on neither patches of an image nor frames of a sound"
        raise SpecError(f"{path}.encoder", problem, "trace the pair with `tilecast trace`")
    width = tower.extra.get("width", tower.hidden * (_MERGED if tower.family == "swin" else 1))
    decoding = model.extra.get("decoder_layers", model.layers)
    read = {"decoder_layers": decoding, "encoder_length": tokens(tower)}
    stated = config.get("decoder", {}).get("cross_attention_hidden_size")
    if stated:
        read["memory_width"] = width
    elif width != model.hidden:
        read_by = {"projector": model.hidden, "projector_inputs": width, "projector_tokens": tokens(tower)}
        tower = replace(tower, extra={**tower.extra, **read_by})
    extra = {**model.extra, **read}
    return replace(model, family="encdec", layers=int(decoding), causal=True, extra=extra, towers=(tower,))


def _tower_note(tower: Model) -> str:
    extra = tower.extra
    if "frames" in extra:
        return f"A sample holds one sound of {extra['frames']:g} frames, which its encoder, trained along, hears."
    if tower.family == "wav2vec2":
        return f"A sample holds one sound of {extra['image_width']:g} values, which its encoder, trained along, hears."
    if "patch" not in extra:
        return "The encoder of queries is trained along."
    sides = f"{extra['image']:g} x {extra.get('image_width', extra['image']):g}"
    return f"A sample holds one image of {sides} pixels, which its encoder, trained along, sees."
