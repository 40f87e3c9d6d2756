"""Models of several networks: the parts of a config, and the towers beside a language model."""

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
"""Keys of tables, and the dimensions of a projector that they hold."""


def place(alternatives: str, config: Mapping[str, Any]) -> str:
    """Return the first of the keys in `a | b` under which a config has a part; a dot means the config itself.

    If it has none of them, return the first key.
    """
    keys = alternatives.split(" | ")
    return next((key for key in keys if key == "." or isinstance(config.get(key), Mapping)), keys[0])


def named_tower(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the config of the published encoder that LLaVA's own files name, or None if `towers.toml` lacks it."""
    known = shipped.read_table("tilecast.zoo.huggingface", "towers.toml")
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
        sizes = {ours: float(evaluate(table[key], scope) or 0.0) for key, ours in _PROJECTOR.items() if key in table}
    except (TypeError, ValueError) as error:
        raise SpecError(path, f"its projector has no size: {str(error)[:40]}", "correct the config") from None
    if not all(0 < size <= 2**24 for size in sizes.values()):
        raise SpecError(path, "its projector has no size", "correct the config")
    return replace(tower, projector=Projector(**sizes))


def tokens(tower: Model) -> float:
    """Return how many tokens of a sample a tower hands on, class tokens excluded."""
    match tower.dimensions:
        case Spectrogram(frames=frames):
            return float(frames)
        case Wav2vec2(width_pixels=values):
            return float(values // _SAMPLES)
        case Vision(grid=(rows, columns)):
            return float(rows * columns) / (_MERGED**2 if tower.family == "swin" else 1)
    return 1.0


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
    dims = tower.dimensions
    if not isinstance(dims, Wav2vec2 | Spectrogram | Vision):
        problem = f"{tower.name} hands on neither patches of an image nor frames of a sound"
        raise SpecError(f"{path}.encoder", problem, "trace the pair with `tilecast trace`")
    width = dims.width if isinstance(dims, Wav2vec2) else tower.hidden * (_MERGED if tower.family == "swin" else 1)
    stated_layers = model.own(Transformer).decoder_layers
    decoding = model.layers if stated_layers is None else stated_layers
    read = {"decoder_layers": decoding, "encoder_length": tokens(tower)}
    stated = config.get("decoder", {}).get("cross_attention_hidden_size")
    if stated:
        read["memory_width"] = width
    elif width != model.hidden:
        tower = replace(tower, projector=Projector(model.hidden, width, tokens(tower)))
    return replace(model.having(**read), family="encdec", layers=decoding, causal=True, towers=(tower,))


def _tower_note(tower: Model) -> str:
    match tower.dimensions:
        case Spectrogram(frames=frames):
            return f"A sample holds one sound of {frames} frames, which its encoder, trained along, hears."
        case Wav2vec2(width_pixels=values):
            return f"A sample holds one sound of {values} values, which its encoder, trained along, hears."
        case Vision(image=height, width_pixels=width):
            return f"A sample holds one image of {height} x {width} pixels, which its encoder, trained along, sees."
    return "The encoder of queries is trained along."
