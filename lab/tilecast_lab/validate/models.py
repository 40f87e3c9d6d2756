"""Models of rows of measured runs, from the preset of the row's model name, its stated dimensions and its notes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from tilecast import zoo
from tilecast.model import Model
from tilecast.spec import SpecError
from tilecast.validate.cells import Row, UnreadableRow, read_integer, read_number
from tilecast.validate.reading import with_sample_length
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.resnet import FaceResNet
from tilecast.zoo.recommender import WideDeep
from tilecast.zoo.vision import Vision
from tilecast_lab.validate.vision_names import vision_table

_DIMENSIONS = (("n_layers", "layers"), ("hidden", "hidden"), ("n_heads", "heads"), ("n_kv_heads", "kv_heads"),
         ("ffn_hidden", "ffn_hidden"), ("vocab", "vocab"))  # fmt: skip


def model_of(row: Row) -> Model:
    """Return the model of a row, with the lengths that its notes state if it encodes and decodes.

    Raises:
        UnreadableRow: the name is no preset and the stated dimensions are incomplete.
    """
    model, notes = _named_model(row), row.get("notes", "").lower()
    if zoo.is_transformer(model) and (_HAND_WRITTEN in notes or _TEACHING in row.get("framework", "").lower()):
        model = model.with_dimensions(hand_written=True)
    if model.family == "encoder" and _CLASSIFIES in row.get("model_name", "").lower():
        model = model.with_dimensions(classes=_CLASSES, pooler=True, head_transform=False)
    if model.family != "encdec":
        return model
    lengths = {f"{part}_length": noted_number(rf"\b{part} length (\d+)", notes) for part in ("encoder", "decoder")}
    return model.with_dimensions(**{name: value for name, value in lengths.items() if value})


_HAND_WRITTEN = "layernorm and gelu hand written"
"""Words in the notes of models whose norms and activations are written in PyTorch's operators."""
_CLASSIFIES = "(sequence classification)"
"""Words in the names of encoders that score whole samples, by a dense layer on one token instead of a vocabulary."""
_CLASSES = 2
"""Classes of a sample, as in IMDB's reviews."""
_TEACHING = "cs336"
"""Word in the framework of Stanford's course, whose students write all parts of a model themselves."""


def _named_model(row: Row) -> Model:
    """Return the preset of the row's model name with the row's dimensions, or a model of those dimensions alone.

    Raises:
        UnreadableRow: the name is no preset and the stated dimensions are incomplete.
    """
    stated = {ours: value for theirs, ours in _DIMENSIONS if (value := read_integer(row, theirs))}
    try:
        known = zoo.find_preset(_preset_name(row))
    except SpecError:
        described = vision_table(row)
        return zoo.build_model(described) if described else _from_dimensions(row, stated)
    if not stated or not zoo.is_transformer(known):
        return _noted_dimensions(row, with_sample_length(known, read_integer(row, "seq_len")))
    if stated.get("hidden", known.hidden) != known.hidden or stated.get("heads", known.heads) != known.heads:
        return replace(_from_dimensions(row, stated), dropout=known.dropout)
    if known.family != "decoder":
        stated.pop("vocab", None)
    model: Model = replace(known, **{"kv_heads": known.kv_heads, **stated})  # type: ignore[arg-type]
    decoded = noted_number(r"decoder length (\d+)", row.get("notes", "").lower())
    return model.with_dimensions(decoder_length=decoded) if decoded and model.family == "encdec" else model


def _drawn_size(model: Model, least: int, most: int, drawn: int) -> dict[str, int]:
    """Return the expected size of the largest of `drawn` images, and the largest possible size.

    All ranks wait for the largest image. Short sides are drawn from `least` to `most`. The long side is 4/3 of the
    short one, or 3/2 if many images are drawn (COCO's images are 640 x 480 and 640 x 427). Detectors bound the long
    side at 5/3 of the longest short side: 1333 pixels for 800. All sides are padded to multiples of 32. The result is
    empty for models without an image width.
    """
    if not isinstance(model.dimensions, Images | Vision) or model.dimensions.image_width is None:
        return {}
    side = least + drawn / (drawn + 1) * (most - least)
    ratio = 4 / 3 if drawn < _MANY else 3 / 2
    return {"image": _padded(side), "image_width": _padded(side * ratio), "largest_image": _padded(most),
            "largest_image_width": _padded(most * 5 / 3)}  # fmt: skip


def _padded(pixels: float) -> int:
    return 32 * math.ceil(pixels / 32)


_MANY = 8
"""Number of images of which one is likely to be 3/2 as wide as high."""


_IDENTITIES = (("glint360k", 360232), ("emore", 85742), ("ms1mv", 85742))
"""Number of identities of data sets of faces, by a word in their names (insightface, recognition/_datasets_)."""


def _noted_dimensions(row: Row, model: Model) -> Model:
    """Return the model with the dimensions that the row's notes state.

    These are the number of identities and the share of them that is sampled, the side of an image, the range of an
    image's short side, or the sizes of Wide & Deep.
    """
    dimensions: dict[str, float] = {}
    notes = row.get("notes", "").lower()
    if isinstance(model.dimensions, FaceResNet):
        known = (count for word, count in _IDENTITIES if word in notes)
        dimensions["identities"] = next(known, model.dimensions.identities)
        if share := re.search(r"sample[ _]ratio ?= ?([01]\.\d+)", notes):
            dimensions["sampled"] = min(max(float(share[1]), 1e-3), 1.0)
    side = noted_number(r"\bimage size (\d{2,4})\b", notes)
    if side and side >= 32 and isinstance(model.dimensions, Images | Vision) and model.dimensions.image_width is None:
        dimensions["image"] = side
    scales = re.search(r"short side (\d{2,4})-(\d{2,4})", notes)
    if scales and 32 <= int(scales[1]) <= int(scales[2]):
        drawn = read_integer(row, "global_batch") or 2
        dimensions |= _drawn_size(model, int(scales[1]), int(scales[2]), drawn)
    if model.family == "wide-deep":
        return _with_tables(model, notes)
    return model.with_dimensions(**dimensions)


def _with_tables(model: Model, notes: str) -> Model:
    """Return Wide & Deep with the vocabulary, the embedding width and the number of hidden layers that notes state."""
    dims = model.get_dimensions(WideDeep)
    width = float(noted_number(r"embedding width (\d+)", notes) or dims.width)
    if rows := re.search(r"vocabulary ([1-9]\d{0,11})\b", notes):
        model = model.with_dimensions(table_weights=int(rows[1]) * width, width=width, wide_weights=int(rows[1]))
    if depth := noted_number(r"(\d+) hidden layers", notes):
        model = model.with_dimensions(deep=dims.deep[:1] * min(depth, 64))
    return model


def _from_dimensions(row: Row, stated: dict[str, int]) -> Model:
    family = row.get("family", "")
    gated = row.get("gated_mlp", "") in ("1", "1.0")
    notes = row.get("notes", "").lower()
    if family not in ("decoder", "encoder", "moe", "encdec") or not (stated.get("hidden") and stated.get("vocab")):
        raise UnreadableRow("unknown-model")
    if not stated.get("layers"):
        stated["layers"] = _layers(row, stated, gated)
    table: dict[str, object] = {
        "name": row.get("model_name", ""),
        "family": family,
        **stated,
        "heads": stated.get("heads") or _usual_heads(stated["hidden"]),
        "gated_mlp": gated,
        "rms_norm": gated,
        "rotary": gated,
        "bias": not gated,
        "tied_embeddings": not gated,
        "dropout": not gated and family != "moe",
        "causal": family != "encoder",
        "positions": 0 if gated else (read_integer(row, "seq_len") or 0),
    }
    table |= {name: value for name, pattern in _IN_NOTES if (value := noted_number(pattern, notes))}
    if family == "moe" and "experts" not in table:
        raise UnreadableRow("unknown-model")
    if family == "encoder":
        table |= {"embedding_norm": 1, "token_types": 2, "final_norm": 0, "head_transform": 1, "pooler": 1}
        table["head_share"] = 0.15625
    try:
        return zoo.build_model(table)
    except SpecError:
        raise UnreadableRow("unknown-model") from None


_IN_NOTES = (("head_dim", r"head_dim (\d+)"), ("experts", r"(\d+) experts"), ("top_k", r"top-?_?k ?=? ?(\d+)"),
             ("decoder_length", r"decoder length (\d+)"))  # fmt: skip
"""Dimensions for which runs tables have no column, and the patterns that find them in the notes."""


def _layers(row: Row, stated: Mapping[str, int], gated: bool) -> int:
    """Return the number of layers of a dense transformer, derived from its published parameter count.

    A layer has 4 h^2 parameters of attention and 2 h f (gated: 3 h f) of the MLP; the model has one embedding.

    Raises:
        UnreadableRow: the count is not stated, the model is a mixture of experts, or the count leaves no layer.
    """
    billions = read_number(row, "params_b")
    if billions is None:
        raise UnreadableRow("unknown-model")
    parameters, hidden = billions * 1e9, stated["hidden"]
    each = 4 * hidden**2 + (3 if gated else 2) * hidden * stated.get("ffn_hidden", 4 * hidden)
    layers = round((parameters - stated["vocab"] * hidden) / each)
    if row.get("family") == "moe" or layers < 1:
        raise UnreadableRow("unknown-model")
    return layers


def _usual_heads(hidden: int) -> int:
    """Return the largest number of heads of at least 128 columns each that divides the width; at least 1."""
    return max(heads for heads in range(1, max(1, hidden // 128) + 1) if hidden % heads == 0)


def _preset_name(row: Row) -> str:
    """Return the name of the preset that a row means.

    An encoder timed without an optimizer has a classifier on top, if there is such a preset (benchmarks of a Hugging
    Face BERT). NeMo and Megatron-Bridge train DeepSeek-V3 with the layer that predicts a further token (NeMo,
    collections/llm/recipes/deepseek_v3.py: use_mtp; Megatron-Bridge, configs/deepseek: the m of its layouts).
    """
    name = row.get("model_name", "")
    further = f"{name.removesuffix('-671B')}-mtp"
    if "nemo" in row.get("framework", "").lower() and zoo.is_preset(further):
        return further
    classifier = f"{name}-classifier"
    if row.get("family") == "encoder" and row.get("optimizer") == "none" and zoo.is_preset(classifier):
        return classifier
    return name


def noted_number(pattern: str, notes: str) -> int | None:
    """Return the whole number in the pattern's first group, or None without a match or with more than six digits."""
    match = re.search(pattern, notes)
    return int(match[1]) if match and len(match[1]) <= 6 else None
