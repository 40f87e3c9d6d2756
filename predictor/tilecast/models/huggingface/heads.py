"""The head that a config asks for: what its class computes behind the last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_CLASSES = 2
"""Classes of a classifier whose config does not list them; only what differs from two is written."""
_ENCODERS = ("encoder", "albert", "relative-encoder")
_IMAGES = ("vit", "swin", "convnext", "segformer", "resnet", "efficientnet", "mobilenet-v2")


def task(config: Mapping[str, Any]) -> str:
    """The first of the config's `architectures`; empty if there is none."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, Sequence) and not isinstance(named, str) and named else ""


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
