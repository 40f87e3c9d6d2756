"""Write `zoo/huggingface/defaults.toml`: transformers' defaults for keys that a config.json leaves out.

Only keys that the tables read are included. Run this where transformers is installed, with `predictor` on the path; it
prints the file.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import transformers

from tilecast.zoo import huggingface

_OTHERS = ("model", "tie_word_embeddings")
"""Names that are not keys, and a key that the tables state because its default changed from release to release."""
_MOST = 8
"""Longest list that is written; longer lists describe layers, for the default number of layers."""


def main() -> None:
    """Print the file."""
    print("# What transformers fills in where a `config.json` leaves out a key that the tables of `types/` read: the")
    print(f"# defaults of the classes of transformers {transformers.__version__}, written by tools/config_defaults.py.")
    for kind in huggingface.list_supported_types():
        if kind not in transformers.CONFIG_MAPPING:
            continue
        known = dict(stated(transformers.CONFIG_MAPPING[kind]))
        asked = {key for expression in huggingface.list_expressions(kind) for key in keys(expression)}
        lines = [f"{key} = {written(known[key])}" for key in sorted(asked) if is_told(known.get(key))]
        if lines:
            name = kind if kind.replace("-", "").replace("_", "").isalnum() else json.dumps(kind)
            print(f"\n[{name}]", *lines, sep="\n")


def keys(expression: str) -> Iterator[str]:
    """Yield the keys of a config's top level that an expression reads."""
    called = {id(node.func) for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Call)}
    for node in ast.walk(ast.parse(expression)):
        if isinstance(node, ast.Name) and id(node) not in called and node.id not in _OTHERS:
            yield node.id


def stated(config: type) -> Iterator[tuple[str, Any]]:
    """Yield the defaults that a configuration class states, without those that it computes from other keys."""
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            yield field.name, field.default
        elif field.default_factory is not dataclasses.MISSING:
            yield field.name, field.default_factory()


def is_told(value: Any) -> bool:
    """Return whether a default is a number, a word, or a short list of these."""
    if isinstance(value, list | tuple):
        return 0 < len(value) <= _MOST and all(isinstance(item, int | float | str) for item in value)
    return isinstance(value, int | float | str)


def written(value: Any) -> str:
    """Return a value as TOML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


if __name__ == "__main__":
    main()
