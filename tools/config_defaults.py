"""Write `models/huggingface/defaults.toml`: what transformers fills in where a config.json leaves out a key that the
tables read. Run it where transformers is installed, with `predictor` on the path; it prints the file.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import transformers

from tilecast.models import huggingface

_OTHERS = ("model", "tie_word_embeddings")
"""Names that are no keys, and a key whose default has changed from release to release: the tables state it."""
_MOST = 8
"""Longer lists name layers, of the default's number of them."""


def main() -> None:
    """Print the file."""
    print("# What transformers fills in where a `config.json` leaves out a key that the tables of `types/` read: the")
    print(f"# defaults of the classes of transformers {transformers.__version__}, written by tools/config_defaults.py.")
    for kind in huggingface.supported():
        if kind not in transformers.CONFIG_MAPPING:
            continue
        known = dict(stated(transformers.CONFIG_MAPPING[kind]))
        asked = {key for expression in huggingface.expressions_of(kind) for key in keys(expression)}
        lines = [f"{key} = {written(known[key])}" for key in sorted(asked) if is_told(known.get(key))]
        if lines:
            name = kind if kind.replace("-", "").replace("_", "").isalnum() else json.dumps(kind)
            print(f"\n[{name}]", *lines, sep="\n")


def keys(expression: str) -> Iterator[str]:
    """The keys of a config's own level that an expression reads."""
    called = {id(node.func) for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Call)}
    for node in ast.walk(ast.parse(expression)):
        if isinstance(node, ast.Name) and id(node) not in called and node.id not in _OTHERS:
            yield node.id


def stated(config: type) -> Iterator[tuple[str, Any]]:
    """The defaults that a configuration class states; not those that it computes from other keys."""
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            yield field.name, field.default
        elif field.default_factory is not dataclasses.MISSING:
            yield field.name, field.default_factory()


def is_told(value: Any) -> bool:
    """Whether a default is a number, a word, or few of them."""
    if isinstance(value, list | tuple):
        return 0 < len(value) <= _MOST and all(isinstance(item, int | float | str) for item in value)
    return isinstance(value, int | float | str)


def written(value: Any) -> str:
    """A value as TOML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


if __name__ == "__main__":
    main()
