"""Constants of a step at other values than those that ship, by their dotted paths in `constants.toml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from tilecast import shipped
from tilecast.constants import Constants


def with_values(moved: Mapping[str, float], table: Mapping[str, Any] | None = None) -> Constants:
    """Return the constants of a table with other values for some of them, by dotted path.

    Without a table, the fitted constants are used.
    """
    table = deepcopy(dict(_shipped() if table is None else table))
    for path, value in moved.items():
        *sections, name = path.split(".")
        place = table
        for section in sections:
            place = place[section]
        place[name] = value
    return Constants.from_table(table)


def scaled_values(places: Sequence[str], factor: float, table: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Return the constants at some dotted paths times a factor, by their paths.

    A path to a section means all constants in it. Without a table, the fitted constants are used.
    """

    def under(path: str, value: Any) -> dict[str, float]:
        if not isinstance(value, dict):
            return {} if isinstance(value, str) else {path: value * factor}
        return {place: one for name, item in value.items() for place, one in under(f"{path}.{name}", item).items()}

    values: dict[str, float] = {}
    for path in places:
        value: Any = _shipped() if table is None else table
        for key in path.split("."):
            value = value[key]
        values |= under(path, value)
    return values


@cache
def _shipped() -> dict[str, Any]:
    return shipped.read_table("tilecast", "constants.toml")
