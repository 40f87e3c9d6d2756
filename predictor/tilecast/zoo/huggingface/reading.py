"""Reading of dimensions from a config by the expressions of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilecast.spec import SpecError
from tilecast.zoo.huggingface.expressions import evaluate, first_key, lone_keys
from tilecast.zoo.reading import type_of

__all__ = ["Scope", "count", "fill", "first_key", "value"]

_MOST = {"layers": 1024, "experts": 4096, "vocab": 2**22}
_LARGEST = 2**20
"""Largest value of a dimension that has no entry in `_MOST`."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A config, and the defaults of the keys that it leaves out."""

    config: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def merged(self) -> dict[str, Any]:
        """The config with the defaults of its type."""
        return {**self.defaults, **self.config}


def value(expression: str, config: Mapping[str, Any]) -> Any:
    """Return the value of an expression over a config; None if it computes with something that is no number."""
    try:
        return evaluate(expression, config)
    except TypeError:
        return None


def count(number: object) -> int:
    """Return a whole number of at least 1 that a config states, or 0 for anything else."""
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else 0


def fill(table: dict[str, Any], read: Mapping[str, str], scope: Scope, path: str) -> None:
    """Read dimensions into a table, in the order of its expressions.

    An expression can use dimensions that are already in the table, as `model`.

    Raises:
        SpecError: a value is no size, or too large.
    """
    merged = scope.merged
    for name, expression in read.items():
        try:
            key, value = _stated(expression, scope.config)
            if value is None:
                value = evaluate(expression, {**merged, "model": table})
        except TypeError as error:
            raise SpecError(f"{path}.{first_key(expression)}", f"{str(error)[:40]!r} is no size", _SIZE) from None
        if value is None:
            continue
        where = f"{path}.{key}"
        table[name] = _dimension(name, value, type_of(table["family"], name), where)


_SIZE = "give a number from 0"


def _stated(expression: str, config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the first key among an expression's alternatives that the config states, and its value.

    Only plain keys count. A value stated under an old name thus goes before the default of the new name. The value is
    None if no such key is stated.
    """
    for key in lone_keys(expression):
        if (value := evaluate(key, config)) is not None:
            return key, value
    return first_key(expression), None


def _boolean(value: object, where: str) -> bool:
    if isinstance(value, list | dict | str):
        raise SpecError(where, f"{str(value)[:40]!r} is no size", _SIZE)
    return bool(value)


def _dimension(name: str, value: object, written: str, field: str) -> object:
    """Return a dimension of the type that its family's dataclass has for it: a number within bounds, a list, a truth.

    A rate of dropout becomes a truth.
    """
    if written == "bool":
        return _boolean(value, field)
    if written.startswith("tuple") and isinstance(value, list):
        return tuple(_size(name, item, "int", f"{field}[{place}]") for place, item in enumerate(value))
    return _size(name, value, written, field)


def _size(name: str, value: object, written: str, field: str) -> float:
    """Return a number within bounds, which is whole unless its type says otherwise."""
    if not isinstance(value, int | float) or not 0 <= value <= 2**40:
        raise SpecError(field, f"{str(value)[:40]!r} is no size", _SIZE)
    if written == "float" and value < _LARGEST:
        return float(value)
    if value != int(value) or value > _MOST.get(name, _LARGEST):
        problem = f"{value:g} is not a whole number up to {_MOST.get(name, _LARGEST)}"
        raise SpecError(field, problem, "correct the config")
    return int(value)
