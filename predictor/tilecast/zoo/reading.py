"""Models from tables: dimensions by name, as a preset, a document or a config states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from typing import Any

from tilecast.model import Dimensions, Model
from tilecast.spec import SpecError
from tilecast.zoo import hybrid
from tilecast.zoo.families import FAMILIES


def _types(kind: type[Model | Dimensions], *apart: str) -> dict[str, str]:
    """Return the fields of a dataclass, and their types as they are written."""
    return {item.name: str(item.type).removesuffix(" | None") for item in fields(kind) if item.name not in apart}


_GENERAL = _types(Model, "dimensions", "projector")


@cache
def _own(family: str) -> Mapping[str, str]:
    """Return the dimensions that only a family has, and their types as they are written."""
    return _types(FAMILIES[family].dimensions, "stated")


def type_of(family: str, name: str) -> str:
    """Return the type of a dimension of a family as it is written, or an empty string for one that it does not have."""
    return _own(family).get(name) or _GENERAL.get(name, "")


@cache
def _required(family: str) -> tuple[str, ...]:
    return tuple(item.name for item in fields(FAMILIES[family].dimensions) if item.default is MISSING)


def needs(family: str, pattern: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names of the dimensions that a model of the family must state.

    `pattern` lists the kinds of the layers of a hybrid.
    """
    return (*FAMILIES[family].needs, *_required(family), *hybrid.needs(pattern))


def model_from(table: Mapping[str, Any]) -> Model:
    """Return a model from dimensions as a preset or a user writes them.

    Keys of `table` are fields of `Model`, whose defaults are filled in, and of the dataclass of its family.

    Raises:
        SpecError: the family or a dimension is unknown, or a dimension is missing, not positive, of another type, too
            large beside another, or does not divide another.
    """
    family = table.get("family", "")
    if family not in FAMILIES:
        raise SpecError("model.family", f"unknown family {family!r}", f"use one of {', '.join(FAMILIES)}")
    for name in table:
        _check_known(family, name)
    values = {name: _value(name, value, type_of(family, name)) for name, value in table.items()}
    for name in needs(family, values.get("pattern", ())):
        value = values.get(name, 0)
        if not (value and min(value) > 0 if isinstance(value, tuple) else value > 0):
            raise SpecError(f"model.{name}", f"must be positive, got {value}", "state the dimension")
    own = {name: value for name, value in values.items() if name in _own(family)}
    stated = tuple(name for name in own if name != "pattern")
    general = {name: value for name, value in values.items() if name not in own}
    model = Model(**{**general, "dimensions": FAMILIES[family].dimensions(**own, stated=stated)})
    for field, problem, remedy in model.dimensions.problems(model):
        raise SpecError(f"model.{field}", problem, remedy)
    return Model(**{**_completed(general), "dimensions": model.dimensions}) if "hidden" in general else model


def _check_known(family: str, name: str) -> None:
    """Raise SpecError unless a family has a dimension of this name."""
    if not type_of(family, name):
        near = get_close_matches(name, (*_GENERAL, *_own(family)), n=1)
        remedy = f"did you mean {near[0]}?" if near else "leave it out"
        raise SpecError(f"model.{name}", f"family {family} has no such dimension", remedy)


def _value(name: str, value: Any, written: str) -> Any:
    """Return the value of a dimension in its type.

    Raises:
        SpecError: it has another type.
    """
    if written.startswith("tuple[int"):
        length = None if "..." in written else written.count("int")
        if not isinstance(value, list | tuple) or length not in (None, len(value)):
            count = f"{length} numbers" if length else "numbers"
            raise SpecError(f"model.{name}", f"{str(value)[:40]} is no list of {count}", f"list {count}")
        return tuple(_value(name, item, "int") for item in value)
    if written not in _NOUNS:
        return value
    is_number = isinstance(value, int | float)
    if not is_number or (written == "int" and value != int(value)) or (written == "bool" and value not in (0, 1)):
        raise SpecError(f"model.{name}", f"{str(value)[:40]!r} is no {_NOUNS[written]}", f"give a {_NOUNS[written]}")
    return {"int": int, "float": float, "bool": bool}[written](value)


_NOUNS = {"int": "whole number", "float": "number", "bool": "true or false"}
"""Types of dimensions, and what errors call them."""


def _completed(known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the general dimensions of a transformer with those that follow from others.

    Raises:
        SpecError: a dimension is not positive or does not divide another.
    """
    hidden, heads = known["hidden"], known["heads"]
    if "head_dim" not in known and hidden % heads:
        problem = f"hidden {hidden} is not divisible by heads {heads}"
        raise SpecError("model.heads", problem, "choose a divisor or state headDim")
    usual = {"kv_heads": heads, "head_dim": hidden // heads, "ffn_hidden": 4 * hidden}
    whole = {**usual, **known}
    if whole["head_dim"] < 1:
        raise SpecError("model.headDim", f"must be positive, got {whole['head_dim']}", "state it, or leave it out")
    if whole["kv_heads"] < 1 or heads % whole["kv_heads"]:
        problem = f"heads {heads} is not divisible by {whole['kv_heads']}"
        raise SpecError("model.kvHeads", problem, "choose a divisor")
    return whole
