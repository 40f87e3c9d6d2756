"""Text of a manifest to plain dictionaries, with hostile text refused before it costs anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import yaml

from tilecast.spec import SpecError

Document: TypeAlias = dict[str, Any]

MAX_YAML_BYTES = 4 * 2**20
"""YAML is read at one or two megabytes per second; longer input has to come as JSON."""
MAX_JSON_BYTES = 512 * 2**20
"""`kubectl get nodes -o json` writes about 10 KiB per node."""
MAX_DEPTH = 64
"""Nesting of a Node with its managed fields stays below 20."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPENING = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSING = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


def load(text: str, name: str = "manifest", limit_bytes: int | None = None) -> list[Document]:
    """Every document of a YAML or JSON stream; the items of a `List` count as documents of their own.

    Args:
        text: what the file or pipe held.
        name: what messages call it.
        limit_bytes: refuse longer text; None takes `MAX_JSON_BYTES` and `MAX_YAML_BYTES`.

    Raises:
        SpecError: the text is neither YAML nor JSON, is too long or too deep, uses YAML aliases, or holds
            something that is not a mapping.
    """
    is_json = text.lstrip()[:1] in ("{", "[")
    limit = limit_bytes or (MAX_JSON_BYTES if is_json else MAX_YAML_BYTES)
    if len(text) > limit:
        remedy = "split it" if is_json else "split it, or give it as JSON"
        raise SpecError(name, f"is longer than {limit / 2**20:.3g} MiB", remedy)
    found = _json(text) if is_json else None
    return list(_flatten(_yaml(text, name) if found is None else found, name))


def _json(text: str) -> list[Any] | None:
    """The JSON value as a list of one, or None where the text is not JSON (flow-style YAML, perhaps)."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return None


def _yaml(text: str, name: str) -> list[Any]:
    if len(text) > MAX_YAML_BYTES:
        raise SpecError(name, "is not JSON", "check where it was cut off")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, _OPENING) - isinstance(event, _CLOSING)
            if depth > MAX_DEPTH:
                raise SpecError(name, f"is nested more than {MAX_DEPTH} levels deep", "flatten it")
            if isinstance(event, yaml.AliasEvent):
                raise SpecError(name, f"uses the YAML alias *{event.anchor}", "write the value out")
        return [document for document in yaml.load_all(text, Loader=_LOADER) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", None) or error).split())
        raise SpecError(name, f"is not YAML{where}: {what[:120]}", "correct the syntax") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(name, f"holds a value that YAML cannot mean: {str(error)[:80]}", "quote it") from None


def _flatten(values: list[Any], name: str) -> Iterator[Document]:
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            kind = "a list" if isinstance(value, list) else "plain text" if isinstance(value, str) else "a bare value"
            raise SpecError(name, f"document {index + 1} is {kind}", "write a mapping with apiVersion, kind and spec")
        if str(value.get("kind", "")).endswith("List") and "items" in value:
            items = value["items"]
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise SpecError(f"{name}: items", "is not a list of mappings", "write one mapping per item")
            kind = str(value["kind"]).removesuffix("List")
            for item in items:
                yield item if "kind" in item or not kind else {"kind": kind, **item}
        else:
            yield value
