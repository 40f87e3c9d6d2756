"""TOML files that ship with Tilecast, beside the modules that read them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any


def table(package: str, name: str) -> dict[str, Any]:
    """Return the tables of a file beside a package's modules."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def entries(package: str, folder: str) -> list[Traversable]:
    """Return the files of a folder beside a package's modules, in the order of their names."""
    every = files(package).joinpath(folder).iterdir()
    return sorted((entry for entry in every if entry.name.endswith(".toml")), key=lambda entry: entry.name)


def tables(package: str, folder: str) -> Mapping[str, dict[str, Any]]:
    """Return the tables of every file of such a folder, by the file's name."""
    return {entry.name: tomllib.loads(entry.read_text(encoding="utf-8")) for entry in entries(package, folder)}
