"""Reading of dimensions from a config by the expressions of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilecast.spec import SpecError
from tilecast.zoo.huggingface.expressions import evaluate, first_key, plain_keys
from tilecast.zoo.reading import dimension_type

_MOST = {"layers": 1024, "experts": 4096, "vocab": 2**22}
_LARGEST = 2**20
"""Largest value of a dimension that has no entry in `_MOST`."""
_SIZE = "give a number from 0"


def evaluate_or_none(expression: str, config: Mapping[str, Any]) -> Any:
    """Return the value of an expression over a config; None if it computes with something that is no number."""
    try:
        return evaluate(expression, config)
    except TypeError:
        return None


def fill_dimensions(
    table: dict[str, Any],
    expressions: Mapping[str, str],
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    path: str,
) -> None:
    """Read dimensions from a config into a table, by the `expressions` of its type, in their order.

    An expression can use dimensions that are already in the table, as `model`. The `defaults` are the values of keys
    that the config lacks. `path` is the place of the config in errors.

    Raises:
        SpecError: a value is no size, or too large.
    """
    whole = {**defaults, **config, "model": table}
    for name, expression in expressions.items():
        try:
            key, value = _find_stated(expression, config)
            if value is None:
                value = evaluate(expression, whole)
        except TypeError as error:
            raise SpecError(f"{path}.{first_key(expression)}", f"{str(error)[:40]!r} is no size", _SIZE) from None
        if value is not None:
            table[name] = _convert_dimension(name, value, dimension_type(table["family"], name), f"{path}.{key}")


def _find_stated(expression: str, config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the first key among an expression's alternatives that the config states, and its value.

    Only plain keys count. A value stated under an old name thus goes before the default of the new name. The value is
    None if the config states no such key.
    """
    for key in plain_keys(expression):
        if (value := evaluate(key, config)) is not None:
            return key, value
    return first_key(expression), None


def _convert_dimension(name: str, value: object, kind: str, field: str) -> Any:
    """Return a dimension in its type: a number within bounds, a list of them, or a truth.

    A rate of dropout becomes a truth. `kind` is the type as the dataclass of the family writes it; `field` is the place
    of the value in errors.
    """
    if kind == "bool" and not isinstance(value, list | dict | str):
        return bool(value)
    if kind.startswith("tuple") and isinstance(value, list):
        return tuple(_convert_dimension(name, item, "int", f"{field}[{place}]") for place, item in enumerate(value))
    if not isinstance(value, int | float) or not 0 <= value <= 2**40:
        raise SpecError(field, f"{str(value)[:40]!r} is no size", _SIZE)
    if kind == "float" and value < _LARGEST:
        return float(value)
    most = _MOST.get(name, _LARGEST)
    if value != int(value) or value > most:
        raise SpecError(field, f"{value:g} is not a whole number up to {most}", "correct the config")
    return int(value)
