"""The head that a config asks for: what its class computes behind the last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilecast.models.families import FAMILIES
from tilecast.spec import Model

_CLASSES = 2
"""Classes of a classifier whose config does not list them; only what differs from two is written."""
_ENCODERS = ("encoder", "albert", "relative-encoder")
_IMAGES = ("vit", "swin", "convnext", "segformer", "resnet", "efficientnet", "mobilenet-v2")


def task(config: Mapping[str, Any]) -> str:
    """The first of the config's `architectures`; empty if there is none."""
    listed = config.get("architectures")
    named = str(listed[0]) if isinstance(listed, Sequence) and not isinstance(listed, str) and listed else ""
    return _OTHERWISE.get(named, named)


_OTHERWISE = {"NomicBertForPreTraining": "NomicBertForMaskedLM"}
"""Classes of a model's own code by the class of transformers that computes the same."""


def _labels(config: Mapping[str, Any]) -> int:
    """How many labels a config lists or counts; 0 if it does neither."""
    labels, number = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, Mapping):
        return len(labels)
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 < number <= _MOST else 0


_MOST = 2**20
"""Most labels that a classifier has."""


def of(config: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, float]:
    """What the head of the first of the config's `architectures` computes, beside a table of dimensions. Heads score
    every token, also those that masked-language-model training does not ask for."""
    family, named = table["family"], task(config)
    stated = _labels(config)
    classes = float(stated or _CLASSES)
    if "classes" in table:
        return {}
    if family in _IMAGES or (family == "detr" and stated):
        return {"classes": classes}
    if named.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"classes": classes, "pooler": float(family in _ENCODERS)}
    if named.endswith("ForTokenClassification"):
        return {"head_vocab": classes}
    if named.endswith("ForQuestionAnswering"):
        return {"head_vocab": 2.0}
    if family in _ENCODERS:
        return {"head_transform": 1.0, "pooler": float(named.endswith("ForPreTraining"))}
    return {}


_OF_TEXT = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_TASKS = {**dict.fromkeys(_ENCODERS, (*_OF_TEXT, "ForPreTraining")), "wav2vec2": ("ForCTC",)}
"""Heads by family whose class a config names, where another one is usual for its type; of others those of text."""


def auto(config: Mapping[str, Any], model: Model, usual: str | None) -> str | None:
    """What follows `AutoModel` in the class with the head of a config's first architecture: the `usual` of its type, or
    that of the family where that is None; none where the type has none, nor for what a teacher's answers train."""
    if not (FAMILIES[model.family].auto if usual is None else usual):
        return usual
    if task(config).endswith("WithTeacher"):
        return ""
    return next((head for head in _TASKS.get(model.family, _OF_TEXT) if task(config).endswith(head)), usual)
