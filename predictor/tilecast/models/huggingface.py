"""Models from the `config.json` of the Hugging Face Hub. `huggingface.toml` says which key holds which dimension; this
reads them, and nothing else of the file.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from tilecast import models
from tilecast.spec import Model, SpecError

_BOOLEANS = ("gated_mlp", "rms_norm", "rotary", "causal", "bias", "tied_embeddings", "dropout")
_MOST = {"layers": 1024, "experts": 4096, "vocab": 2**22}
_LARGEST = 2**20
"""Largest value of a dimension, where `_MOST` has no other."""
_CLASSES = 2
"""Classes of a classifier whose config does not list them; only what differs from two is written."""


def supported() -> tuple[str, ...]:
    """Every `model_type` that can be read, in alphabetical order."""
    return tuple(sorted(_tables()))


def is_config(document: Mapping[str, Any]) -> bool:
    """Whether a document is such a config rather than a Kubernetes object."""
    return "model_type" in document and "kind" not in document


def model(config: Mapping[str, Any], field: str = "config.json") -> Model:
    """The model that a config describes, with the head that its `architectures` names.

    Args:
        config: the file's content.
        field: what errors call it.

    Raises:
        SpecError: the `model_type` is not supported, or a key is missing or impossible.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _tables():
        problem = "is missing" if kind is None else f"{str(kind)[:40]!r} is not supported"
        raise SpecError(f"{field}.model_type", problem, f"use one of {', '.join(supported())}")
    table = dict(_tables()[kind])
    read, contains, within = table.pop("read"), table.pop("contains", {}), table.pop("within", "")
    part = config.get(within) if within else config
    if not isinstance(part, Mapping):
        raise SpecError(f"{field}.{within}", "is missing or no mapping", f"a config of {kind} holds its model there")
    path = f"{field}.{within}" if within else field
    for name, expression in read.items():
        if (value := _first(part, expression, path)) is not None:
            table[name] = bool(value) if name in _BOOLEANS else _size(name, value, f"{path}.{_key(expression)}")
    for name, (key, word) in contains.items():
        if key in part:
            table[name] = word in str(part[key])
    for name in models.needs(table["family"]):
        if name not in table:
            raise SpecError(f"{path}.{_key(read[name])}", "is missing", f"a config of {kind} states it")
    name = str(config.get("_name_or_path") or kind).rstrip("/").rpartition("/")[2][:63] or kind
    try:
        return models.model_from({"name": name, **table, **_head(config, table["family"])})
    except SpecError as error:
        dimension = error.field.removeprefix("model.")
        names = {"kvHeads": "kv_heads", "headDim": "head_dim"}
        key = read.get(names.get(dimension, dimension))
        raise SpecError(f"{path}.{_key(key)}" if key else path, error.problem, error.remedy) from None


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    """The table of each `model_type`, with what it continues filled in."""
    text = files("tilecast.models").joinpath("huggingface.toml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for name, own in tomllib.loads(text).items():
        base = found[own.pop("like")] if "like" in own else {}
        read = {**base.get("read", {}), **own.get("read", {})}
        found[name] = {**base, **own, "read": read}
    return found


def _head(config: Mapping[str, Any], family: str) -> dict[str, float]:
    """What the head of the first of the config's `architectures` computes. Heads score every token, also those that
    masked-language-model training does not ask for."""
    named = config.get("architectures")
    task = str(named[0]) if isinstance(named, Sequence) and not isinstance(named, str) and named else ""
    labels = config.get("id2label")
    classes = float(len(labels) if isinstance(labels, Mapping) and labels else _CLASSES)
    if family == "vit":
        return {"classes": classes}
    if task.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"classes": classes, "pooler": float(family in ("encoder", "albert"))}
    if task.endswith("ForTokenClassification"):
        return {"head_vocab": classes}
    if task.endswith("ForQuestionAnswering"):
        return {"head_vocab": 2.0}
    if family in ("encoder", "albert"):
        return {"head_transform": 1.0, "pooler": float(task.endswith("ForPreTraining"))}
    return {}


def _first(config: Mapping[str, Any], expression: str, path: str) -> float | None:
    """The value of the first alternative whose keys are all there."""
    for alternative in expression.split(" | "):
        terms, _, condition = alternative.partition(" if ")
        if condition and not config.get(condition):
            continue
        if terms.startswith("not "):
            if (value := _number(config, terms.removeprefix("not "), path)) is not None:
                return float(not value)
            continue
        factors = [[_number(config, key, path) for key in term.split(" * ")] for term in terms.split(" + ")]
        if all(value is not None for term in factors for value in term):
            return sum(math.prod(value for value in term if value is not None) for term in factors)
    return None


def _number(config: Mapping[str, Any], key: str, path: str) -> float | None:
    """A literal, or the number under a key; None where the key is absent or null."""
    if key.isdigit():
        return float(key)
    name, _, index = key.partition(".")
    value: Any = config.get(name)
    if index:
        value = value[int(index)] if isinstance(value, list) and len(value) > int(index) else None
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value <= 2**40:
        raise SpecError(f"{path}.{key}", f"{str(value)[:40]!r} is no size", "give a number from 0")
    return float(value)


def _size(name: str, value: float, field: str) -> float:
    """A dimension: a whole number within bounds (rates of dropout among them become 0 or 1)."""
    if name == "attention_dropout":
        return float(value > 0)
    if value != int(value) or value > _MOST.get(name, _LARGEST):
        problem = f"{value:g} is not a whole number up to {_MOST.get(name, _LARGEST)}"
        raise SpecError(field, problem, "correct the config")
    return int(value)


def _key(expression: str) -> str:
    """The first key of an expression, for messages."""
    first = expression.split(" | ")[0].partition(" if ")[0]
    return next((word for word in first.replace("not ", "").split() if not word.isdigit() and word not in "+*"), first)
