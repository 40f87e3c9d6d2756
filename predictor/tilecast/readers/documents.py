"""Parse configurations in YAML, JSON and TOML into settings, within bounds on size and depth."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from tilecast.launch_options.options_table import Setting
from tilecast.spec import SpecError

MAX_BYTES = 2**20
MAX_DEPTH = 16


def load_mapping(text: str, name: str) -> dict[str, Any]:
    """Return the mapping in YAML, JSON or TOML text. Errors call the text `name`, the name of the file.

    Raises:
        SpecError: the text is too long, too deeply nested, or not a mapping.
    """
    if name.endswith(".toml"):
        return _load_toml(text, name)
    from tilecast.api import documents

    items = documents.load_documents(text, name, MAX_BYTES)
    if len(items) != 1:
        raise SpecError(name, f"holds {len(items)} documents", "give a file with one configuration")
    return dict(items[0])


def _load_toml(text: str, name: str) -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise SpecError(name, f"is longer than {MAX_BYTES // 2**20} MiB", "leave out what says no plan")
    # The parser of the standard library recurses at brackets. Those in strings count too.
    depths = accumulate((1 if mark in "[{" else -1 for mark in re.findall(r"[\[\]{}]", text)), initial=0)
    if max(depths) > MAX_DEPTH:
        raise SpecError(name, f"is nested more than {MAX_DEPTH} levels deep", "flatten it")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(name, f"is not TOML: {str(error)[:120]}", "correct the syntax") from None


def flatten(values: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> list[Setting]:
    """Return a setting for each value in nested mappings. The option of a setting is its path of keys, joined by dots.

    Raises:
        SpecError: the mappings are nested more than `MAX_DEPTH` levels deep.
    """
    settings: list[Setting] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth >= MAX_DEPTH:
            raise SpecError(name[:60], f"is nested more than {MAX_DEPTH} levels deep", "flatten it")
        if isinstance(value, Mapping) and value:
            settings += flatten(value, f"{name}.", depth + 1)
        else:
            settings.append(Setting(name, _to_values(value)))
    return settings


def list_leaf_settings(values: Mapping[Any, Any]) -> list[Setting]:
    """Return a setting for each value in nested mappings. The option of a setting is its innermost key."""
    return [Setting(setting.option.rpartition(".")[2], setting.values) for setting in flatten(values)]


def _to_values(value: object) -> tuple[object, ...]:
    if isinstance(value, list):
        return tuple(value)
    return (value,)
