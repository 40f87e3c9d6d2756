"""Read dimensions from a config by the expressions of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilecast.spec import SpecError
from tilecast.zoo.huggingface.expressions import evaluate, find_first_key, list_plain_keys
from tilecast.zoo.reading import find_dimension_type

_MOST = {"layers": 1024, "experts": 4096, "vocab": 2**22}
_LARGEST = 2**20
"""Largest value of a dimension without an entry in `_MOST`."""
_SIZE = "give a number from 0"
_COUNT = "give a whole number from 1"
_POSITIVE = ("layers", "hidden", "heads", "vocab")
"""Dimensions that must not be 0."""


def evaluate_or_none(expression: str, config: Mapping[str, Any]) -> Any:
    """Return the value of an expression over a config, or None if one of its operands is not a number."""
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
    """Add to `table` the dimensions that the `expressions` of a type compute from a config.

    The expressions are evaluated in order. A later expression can use the dimensions already computed, under the key
    `model`. `defaults` has values for keys that the config lacks. `path` is the config's place in error messages.

    Raises:
        SpecError: a value is not a size, or is too large.
    """
    whole = {**defaults, **config, "model": table}
    for name, expression in expressions.items():
        try:
            key, value = _find_stated_value(expression, config)
            if value is None:
                value = evaluate(expression, whole)
        except TypeError as error:
            raise SpecError(f"{path}.{find_first_key(expression)}", f"{str(error)[:40]!r} is no size", _SIZE) from None
        if value is not None:
            table[name] = _convert_dimension(name, value, find_dimension_type(table["family"], name), f"{path}.{key}")


def _find_stated_value(expression: str, config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the first alternative of an expression that is a key in the config, and its value.

    So keys of the config take precedence over defaults, even if the config uses an old name of a key. If the config has
    none of the keys, return the expression's first key and None.
    """
    for key in list_plain_keys(expression):
        if (value := evaluate(key, config)) is not None:
            return key, value
    return find_first_key(expression), None


def _convert_dimension(name: str, value: object, kind: str, field: str) -> Any:
    """Return a config value as the type of its dimension: a number within bounds, a tuple of numbers, or a bool.

    A dropout rate becomes a bool. `kind` is the type as written in the family's dataclass. `field` is the value's place
    in error messages.

    Raises:
        SpecError: the value is not a size, or is too large.
    """
    if kind == "bool" and not isinstance(value, list | dict | str):
        return bool(value)
    if kind.startswith("tuple") and isinstance(value, list):
        return tuple(_convert_dimension(name, item, "int", f"{field}[{place}]") for place, item in enumerate(value))
    is_flag = isinstance(value, bool) and name in _POSITIVE
    if is_flag or not isinstance(value, int | float) or not 0 <= value <= 2**40:
        raise SpecError(field, f"{str(value)[:40]!r} is no size", _COUNT if name in _POSITIVE else _SIZE)
    if kind == "float" and value < _LARGEST:
        return float(value)
    most = _MOST.get(name, _LARGEST)
    if value != int(value) or value > most:
        raise SpecError(field, f"{value:g} is not a whole number up to {most}", "correct the config")
    return int(value)
