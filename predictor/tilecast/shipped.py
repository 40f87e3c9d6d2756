"""Read the TOML files that ship with Tilecast, next to the modules that use them.

`read_table` reads any file. `NumbersFile` reads a file of numbers, and refuses an unknown key or a number without a
source. A table states the source of all its numbers as `source`, or each number has its own: `name = [number,
"source"]`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

from tilecast.spec import SpecError

RecordT = TypeVar("RecordT")


def read_table(package: str, name: str) -> dict[str, Any]:
    """Return the content of the TOML file `name` in the folder of a Python package."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def list_files(package: str, folder: str) -> list[Traversable]:
    """Return the TOML files in a folder of a Python package, sorted by name."""
    found = (entry for entry in files(package).joinpath(folder).iterdir() if entry.name.endswith(".toml"))
    return sorted(found, key=lambda entry: entry.name)


def read_tables(package: str, folder: str) -> Mapping[str, dict[str, Any]]:
    """Return the content of every TOML file in a folder of a Python package, by file name."""
    return {entry.name: tomllib.loads(entry.read_text(encoding="utf-8")) for entry in list_files(package, folder)}


# pydantic could check the same, but building its schema adds a tenth of a second to the start.
@dataclass(frozen=True, slots=True)
class NumbersFile:
    """Content of a TOML file of numbers.

    A path names a table by its keys from the top, with dots between them. The path of the whole file is empty.
    """

    name: str
    tables: Mapping[str, Any]

    @classmethod
    def read_shipped(cls, package: str, name: str) -> NumbersFile:
        """Return the content of the TOML file `name` in the folder of a Python package."""
        return cls(name, read_table(package, name))

    def read_values(self, path: str, keys: Collection[str] | None = None) -> dict[str, Any]:
        """Return the values of a table without their sources. Lists become tuples.

        Args:
            path: the path of the table. The source of an enclosing table counts for it too.
            keys: the keys that the table must have besides `source`, and no others. None allows any keys.

        Raises:
            SpecError: a key is missing or unknown, or a value has no source. The message names file and key.
        """
        table, sourced = self.tables, _is_source(self.tables.get("source"))
        for key in path.split(".") if path else ():
            table = table.get(key)  # type: ignore[assignment]
            if not isinstance(table, Mapping):
                raise SpecError(f"{self.name}: {path}", "is no table", "add the table")
            sourced = sourced or _is_source(table.get("source"))
        found = {key: value for key, value in table.items() if key != "source"}
        expected = found.keys() if keys is None else keys
        if unknown := [key for key in found if key not in expected]:
            raise SpecError(self._name_key(path, unknown[0]), "is unknown", f"remove it; known: {', '.join(expected)}")
        if missing := [key for key in expected if key not in found]:
            raise SpecError(self._name_key(path, missing[0]), "is missing", "add it, with its source")
        return {key: self._read_value(value, path, key, sourced) for key, value in found.items()}

    def read_numbers(self, path: str, keys: Collection[str] | None = None) -> dict[str, float]:
        """Return the values of a table of numbers.

        Raises:
            SpecError: as in `read_values`, or a value is not a number.
        """
        return {key: self._require_number(value, path, key) for key, value in self.read_values(path, keys).items()}

    def read_record(self, kind: type[RecordT], path: str) -> RecordT:
        """Return the values of a table as a dataclass that has a field for each key.

        Raises:
            SpecError: as in `read_values`, or a value is not a number although the type of its field is a number.
        """
        types = {item.name: item.type for item in fields(kind)}  # type: ignore[arg-type]
        found = self.read_values(path, types)
        for key, value in found.items():
            if types[key] in ("int", "float"):
                self._require_number(value, path, key)
        return kind(**found)

    def _require_number(self, value: Any, path: str, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(self._name_key(path, key), f"{value!r} is no number", "write a number, with its source")
        return value

    def _read_value(self, value: Any, path: str, key: str, sourced: bool) -> Any:
        if _is_cell(value):
            return value[0]
        if not sourced and not isinstance(value, Mapping):
            remedy = f'write {key} = [value, "paper, data sheet or fit"], or add source to its table'
            raise SpecError(self._name_key(path, key), "has no source", remedy)
        return _as_tuple(value)

    def _name_key(self, path: str, key: str) -> str:
        return f"{self.name}: {path}.{key}" if path else f"{self.name}: {key}"


def drop_sources(value: Any) -> Any:
    """Return a value of a shipped file without its source. For a table, return all keys but `source`."""
    if isinstance(value, Mapping):
        return {key: drop_sources(item) for key, item in value.items() if key != "source"}
    return value[0] if _is_cell(value) else value


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _is_cell(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_source(value[1])


def _is_source(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
