"""Read the head that a config requests: the operators of its class after the last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilecast.model import Model
from tilecast.zoo.families import FAMILIES

_CLASSES = 2
"""Number of classes if a config does not list them. Transformers writes the number only if it is not two."""
_ENCODERS = ("encoder", "albert", "relative-encoder")
_IMAGES = ("vit", "swin", "convnext", "segformer", "resnet", "efficientnet", "mobilenet-v2")


def first_architecture(config: Mapping[str, Any]) -> str:
    """Return the first class in the config's `architectures`, or an empty string."""
    listed = config.get("architectures")
    named = str(listed[0]) if isinstance(listed, Sequence) and not isinstance(listed, str) and listed else ""
    return _OTHERWISE.get(named, named)


_OTHERWISE = {"NomicBertForPreTraining": "NomicBertForMaskedLM"}
"""Transformers class that computes the same as a class of a model's own code, by the name of the latter."""


def _count_labels(config: Mapping[str, Any]) -> int:
    """Return the number of labels in a config, or 0 if it has none."""
    labels, number = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, Mapping):
        return len(labels)
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 < number <= _MOST else 0


_MOST = 2**20
"""Most labels of a classifier."""


def read_head(config: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, int]:
    """Return the dimensions of the head that the config's first architecture computes.

    `table` holds the other dimensions of the model. The head scores every token, although training of a masked language
    model needs only the masked tokens.
    """
    family, named = table["family"], first_architecture(config)
    stated = _count_labels(config)
    classes = stated or _CLASSES
    if "classes" in table:
        return {}
    if family in _IMAGES or (family == "detr" and stated):
        return {"classes": classes}
    if named.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"classes": classes, "pooler": family in _ENCODERS}
    if named.endswith("ForTokenClassification"):
        return {"head_vocab": classes}
    if named.endswith("ForQuestionAnswering"):
        return {"head_vocab": 2}
    if family in _ENCODERS:
        return {"head_transform": True, "pooler": named.endswith("ForPreTraining")}
    return {}


_OF_TEXT = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_TASKS = {**dict.fromkeys(_ENCODERS, (*_OF_TEXT, "ForPreTraining")), "wav2vec2": ("ForCTC",)}
"""Heads, by family, for which a config's class replaces the usual one of its type. Other families use `_OF_TEXT`."""


def choose_auto_class(config: Mapping[str, Any], model: Model, default: str | None) -> str | None:
    """Return the suffix of the `AutoModel…` class for the head of a config's first architecture.

    If the architecture has a head in `_TASKS`, return that head. If it is trained on the outputs of another model
    (`...WithTeacher`), return an empty string. Otherwise return `default`, the suffix for the config's type, which is
    None if the auto class follows from the model's family.
    """
    if not (FAMILIES[model.family].auto if default is None else default):
        return default
    named = first_architecture(config)
    if named.endswith("WithTeacher"):
        return ""
    return next((head for head in _TASKS.get(model.family, _OF_TEXT) if named.endswith(head)), default)
