"""Read configs of several networks: their parts, and the towers beside a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilecast import shipped
from tilecast.model import Model, Projector
from tilecast.spec import SpecError
from tilecast.zoo.cnn.speech import Wav2vec2
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.huggingface.expressions import evaluate
from tilecast.zoo.speech import Spectrogram
from tilecast.zoo.vision import Vision

_PROJECTOR = {"projector": "inner", "projector_inputs": "inputs", "projector_outputs": "outputs",
              "projector_tokens": "tokens", "projectors": "count"}  # fmt: skip
"""Keys of tables for the dimensions of a projector, by dimension."""


def find_part_key(alternatives: str, config: Mapping[str, Any]) -> str:
    """Return the first of several keys under which the config holds a nested config, or else the first key.

    `alternatives` are keys separated by ` | `. The key "." is the config itself.
    """
    keys = alternatives.split(" | ")
    return next((key for key in keys if key == "." or isinstance(config.get(key), Mapping)), keys[0])


def find_named_tower(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the config of the image encoder that a LLaVA config names, or None if `towers.toml` lacks it."""
    known = shipped.read_table("tilecast.zoo.huggingface", "towers.toml")
    return known.get(str(config.get("mm_vision_tower")))


def is_single_network(table: Mapping[str, Any] | None) -> bool:
    """Return whether a type's table describes one network rather than several."""
    return table is not None and not {"language", "within"} & set(table)


def has_same_prefix(first: str, second: str) -> bool:
    """Return whether the names of two model types begin with the same word."""
    return first.replace("-", "_").split("_")[0] == second.replace("-", "_").split("_")[0]


def add_towers(
    model: Model,
    tables: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    path: str,
    read_tower: Callable[[str, Mapping[str, Any], str, object], Model | None],
) -> Model:
    """Return the model with the towers that `tables` describe. Add a note for each tower that cannot be read.

    `read_tower` returns the tower that a nested config describes, or None. `path` is the config's place in error
    messages.
    """
    parts, notes = list(model.towers), list(model.notes)
    for table in tables:
        if "when" in table and not evaluate(table["when"], config):
            continue
        key = find_part_key(table["at"], config)
        part = config if not key else config.get(key, find_named_tower(config))
        if not isinstance(part, Mapping):
            name = str(config.get("mm_vision_tower", "its encoder of images"))
            notes.append(f"The config does not describe {name:.80}, which is not priced.")
            continue
        where = f"{path}.{key}" if key else path
        tower = read_tower(table["type"], part, where, config.get("model_type"))
        if tower is None:
            notes.append(f"What {key} describes, of model_type {part.get('model_type')!s:.40}, is not priced.")
            continue
        notes += tower.notes
        parts.append(_add_projector(replace(tower, notes=()), model, table, config, where))
        if key:
            notes.append(_describe_tower(parts[-1]))
    return replace(model, towers=tuple(parts), notes=tuple(notes))


def _add_projector(tower: Model, model: Model, table: Mapping[str, Any], config: Mapping[str, Any], path: str) -> Model:
    """Return the tower with the projector that its table describes, or the unchanged tower if there is no projector.

    Raises:
        SpecError: a size of the projector is missing or impossible.
    """
    if "projector" not in table:
        return tower
    known = {"tower": {"hidden": tower.hidden, "tokens": count_tokens(tower)}, "language": {"hidden": model.hidden},
             "config": config}  # fmt: skip
    try:
        sizes = {ours: float(evaluate(table[key], known) or 0.0) for key, ours in _PROJECTOR.items() if key in table}
    except (TypeError, ValueError) as error:
        raise SpecError(path, f"its projector has no size: {str(error)[:40]}", "correct the config") from None
    if not all(0 < size <= 2**24 for size in sizes.values()):
        raise SpecError(path, "its projector has no size", "correct the config")
    return replace(tower, projector=Projector(**sizes))


def count_tokens(tower: Model) -> float:
    """Return the number of tokens per sample that a tower passes to the language model. Class tokens do not count."""
    match tower.dimensions:
        case Spectrogram(frames=frames):
            return float(frames)
        case Wav2vec2(width_pixels=values):
            return float(values // _SAMPLES)
        case Vision(grid=(rows, columns)):
            return float(rows * columns) / (_MERGED**2 if tower.family == "swin" else 1)
    return 1.0


_SAMPLES = 320
"""Audio samples per token of wav2vec 2.0 (arXiv 2006.11477, section 4.2: 20 ms at 16 kHz)."""
_MERGED = 8
"""Ratio of the width of Swin's last stage to that of its first. Tokens per side fall by the same ratio."""


def join_encoder_decoder(model: Model, config: Mapping[str, Any], path: str) -> Model:
    """Return an encoder-decoder made of a decoder and its tower (transformers, VisionEncoderDecoderModel).

    The tower becomes the encoder, and the decoder layers also attend to its tokens. A dense layer joins encoder and
    decoder if their widths differ, unless the decoder sets `cross_attention_hidden_size`.

    Raises:
        SpecError: the type of the encoder or decoder is unknown, or the number of the encoder's tokens is unknown.
    """
    if len(model.towers) != 1 or model.family not in ("decoder", "encoder", "encdec"):
        raise SpecError(path, "its encoder or its decoder is of a type that is not known", "trace it: `tilecast trace`")
    (tower,) = model.towers
    dims = tower.dimensions
    if not isinstance(dims, Wav2vec2 | Spectrogram | Vision):
        problem = f"{tower.name} hands on neither patches of an image nor frames of a sound"
        raise SpecError(f"{path}.encoder", problem, "trace the pair with `tilecast trace`")
    width = dims.width if isinstance(dims, Wav2vec2) else tower.hidden * (_MERGED if tower.family == "swin" else 1)
    stated_layers = model.get_dimensions(Transformer).decoder_layers
    decoding = model.layers if stated_layers is None else stated_layers
    read = {"decoder_layers": decoding, "encoder_length": count_tokens(tower)}
    stated = config.get("decoder", {}).get("cross_attention_hidden_size")
    if stated:
        read["memory_width"] = width
    elif width != model.hidden:
        tower = replace(tower, projector=Projector(model.hidden, width, count_tokens(tower)))
    return replace(model.with_dimensions(**read), family="encdec", layers=decoding, causal=True, towers=(tower,))


def _describe_tower(tower: Model) -> str:
    """Return a note for users on what the tower assumes of a sample, such as the size of its image."""
    match tower.dimensions:
        case Spectrogram(frames=frames):
            return f"A sample holds one sound of {frames} frames, which its encoder hears."
        case Wav2vec2(width_pixels=values):
            return f"A sample holds one sound of {values} values, which its encoder hears."
        case Vision(image=height, width_pixels=width):
            return f"A sample holds one image of {height} x {width} pixels, which its encoder sees."
    return "The encoder of queries is trained along."
