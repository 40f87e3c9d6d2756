"""Read models from tables of dimensions, as in presets, resource documents and configs."""

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

_NOUNS = {"int": "whole number", "float": "number", "bool": "true or false"}
"""Names of the types of dimensions in error messages."""
_DIVISORS = ("patch", "patch_stride", "ratio", "moe_every", "global_every", "shrink")
"""Dimensions with a default that must not be 0, because others are divided by them."""


def _list_types(kind: type[Model | Dimensions], *excluded: str) -> dict[str, str]:
    """Return the type of each field of a dataclass as its text in the source code, by field name.

    Fields named in `excluded` are left out.
    """
    return {item.name: str(item.type).removesuffix(" | None") for item in fields(kind) if item.name not in excluded}


_GENERAL = _list_types(Model, "dimensions", "projector")


@cache
def _list_family_types(family: str) -> Mapping[str, str]:
    """Return the types of the dimensions that only this family has, by name, as their text in the source code."""
    return _list_types(FAMILIES[family].dimensions, "stated")


def find_dimension_type(family: str, name: str) -> str:
    """Return the type of a dimension as its text in the source code, or an empty string if the family lacks it."""
    return _list_family_types(family).get(name) or _GENERAL.get(name, "")


def list_required_dimensions(family: str, pattern: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names of the dimensions that a model of the family must specify.

    `pattern` lists the kinds of the layers of a hybrid.
    """
    own = (item.name for item in fields(FAMILIES[family].dimensions) if item.default is MISSING)
    return (*FAMILIES[family].needs, *own, *hybrid.list_required_dimensions(pattern))


def build_model(table: Mapping[str, Any]) -> Model:
    """Return the model with the dimensions that a preset or a user wrote.

    Keys of `table` are fields of `Model` and fields of the family's dataclass. Absent fields get their defaults.

    Raises:
        SpecError: the family or a dimension is unknown, or a dimension is missing, not positive, of a wrong type, too
            large in comparison with another, or not a divisor of another.
    """
    family = table.get("family", "")
    if family not in FAMILIES:
        raise SpecError("model.family", f"unknown family {family!r}", f"use one of {', '.join(FAMILIES)}")
    for name in table:
        _check_known(family, name)
    values = {name: _convert_value(name, value, find_dimension_type(family, name)) for name, value in table.items()}
    for name in list_required_dimensions(family, values.get("pattern", ())):
        value = values.get(name, 0)
        if not (value and min(value) > 0 if isinstance(value, tuple) else value > 0):
            raise SpecError(f"model.{name}", f"must be positive, got {value}", "state the dimension")
    for name in _DIVISORS:
        if values.get(name, 1) < 1:
            problem = f"must be positive, got {values[name]}"
            raise SpecError(f"model.{name}", problem, "state one or more, or leave it out")
    own = {name: value for name, value in values.items() if name in _list_family_types(family)}
    stated = tuple(name for name in own if name != "pattern")
    general = {name: value for name, value in values.items() if name not in own}
    model = Model(**{**general, "dimensions": FAMILIES[family].dimensions(**own, stated=stated)})
    for field, problem, remedy in model.dimensions.problems(model):
        raise SpecError(f"model.{field}", problem, remedy)
    return Model(**{**_complete_dimensions(general), "dimensions": model.dimensions}) if "hidden" in general else model


def _check_known(family: str, name: str) -> None:
    """Raise SpecError if a family has no dimension of this name."""
    if not find_dimension_type(family, name):
        near = get_close_matches(name, (*_GENERAL, *_list_family_types(family)), n=1)
        remedy = f"did you mean {near[0]}?" if near else "leave it out"
        raise SpecError(f"model.{name}", f"family {family} has no such dimension", remedy)


def _convert_value(name: str, value: Any, kind: str) -> Any:
    """Return the value of a dimension, converted to the type that `kind` names.

    Raises:
        SpecError: the value has another type.
    """
    if kind.startswith("tuple[int"):
        length = None if "..." in kind else kind.count("int")
        if not isinstance(value, list | tuple) or length not in (None, len(value)):
            count = f"{length} numbers" if length else "numbers"
            raise SpecError(f"model.{name}", f"{str(value)[:40]} is no list of {count}", f"list {count}")
        return tuple(_convert_value(name, item, "int") for item in value)
    if kind not in _NOUNS:
        return value
    is_number = isinstance(value, int | float)
    if not is_number or (kind == "int" and value != int(value)) or (kind == "bool" and value not in (0, 1)):
        raise SpecError(f"model.{name}", f"{str(value)[:40]!r} is no {_NOUNS[kind]}", f"give a {_NOUNS[kind]}")
    return {"int": int, "float": float, "bool": bool}[kind](value)


def _complete_dimensions(dimensions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the general dimensions of a transformer, including those that follow from others.

    Raises:
        SpecError: a dimension is not positive or does not divide another.
    """
    hidden, heads = dimensions["hidden"], dimensions["heads"]
    if "head_dim" not in dimensions and hidden % heads:
        problem = f"hidden {hidden} is not divisible by heads {heads}"
        raise SpecError("model.heads", problem, "choose a divisor or state headDim")
    whole = {"kv_heads": heads, "head_dim": hidden // heads, "ffn_hidden": 4 * hidden, **dimensions}
    if whole["head_dim"] < 1:
        raise SpecError("model.headDim", f"must be positive, got {whole['head_dim']}", "state it, or leave it out")
    if whole["kv_heads"] < 1 or heads % whole["kv_heads"]:
        problem = f"heads {heads} is not divisible by {whole['kv_heads']}"
        raise SpecError("model.kvHeads", problem, "choose a divisor")
    return whole
