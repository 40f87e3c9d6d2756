"""Parse YAML and JSON manifests into dictionaries, and refuse text that is too long or too deeply nested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from tilecast import untrusted
from tilecast.spec import SpecError
from tilecast.untrusted import MAX_DEPTH

Document: TypeAlias = dict[str, Any]

MAX_YAML_BYTES = 4 * 2**20
"""Longest YAML text. YAML is parsed at one or two megabytes per second, so longer input must be JSON."""
MAX_JSON_BYTES = 512 * 2**20
"""Longest JSON text. `kubectl get nodes -o json` writes about 10 KiB per node."""
MAX_ALIASED_VALUES = 100_000
"""Most values of a YAML text with its aliases expanded. A manifest has some hundred values."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPENING = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSING = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


def load_documents(text: str, name: str = "manifest", limit_bytes: int | None = None) -> list[Document]:
    """Return the documents in YAML or JSON text. Items of a Kubernetes `List` are separate documents.

    Args:
        text: content of the file or pipe.
        name: name of the text in errors.
        limit_bytes: maximum length of the text. The default is `MAX_JSON_BYTES` or `MAX_YAML_BYTES`. YAML is never
            longer than `MAX_YAML_BYTES`.

    Raises:
        SpecError: the text is neither YAML nor JSON, is too long or too deeply nested, contains a document that is not
            a mapping, or has more than `MAX_ALIASED_VALUES` values after expansion of its aliases.
    """
    is_json = text.lstrip()[:1] in ("{", "[")
    limit = limit_bytes or (MAX_JSON_BYTES if is_json else MAX_YAML_BYTES)
    if len(text) > limit:
        remedy = "split it" if is_json else "split it, or give it as JSON"
        raise SpecError(name, f"is longer than {limit / 2**20:.3g} MiB", remedy)
    value = _parse_json(text, name, limit) if is_json else None
    return list(_iterate_list_items(_parse_yaml(text, name) if value is None else value, name))


def _parse_json(text: str, name: str, limit: int) -> list[Any] | None:
    """Return a list with the parsed JSON value, or None if the text is not JSON, such as flow-style YAML.

    Raises:
        SpecError: the JSON is nested too deeply.
    """
    try:
        return [untrusted.parse_json(text, max_bytes=limit)]
    except untrusted.TooDeepError as error:
        raise SpecError(name, str(error), "flatten it") from None
    except ValueError:
        return None


def _parse_yaml(text: str, name: str) -> list[Any]:
    if len(text) > MAX_YAML_BYTES:
        raise SpecError(name, "is not JSON", "check where it was cut off")
    with _convert_yaml_errors(name):
        _check_yaml_size(text, name)
        return [document for document in yaml.load_all(text, Loader=_LOADER) if document is not None]


@contextmanager
def _convert_yaml_errors(name: str) -> Iterator[None]:
    """Convert errors of PyYAML that occur in the `with` block to a SpecError about the text called `name`."""
    try:
        yield
    except SpecError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", None) or error).split())
        raise SpecError(name, f"is not YAML{where}: {what[:120]}", "correct the syntax") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(name, f"holds a value that YAML cannot mean: {str(error)[:80]}", "quote it") from None


def expand_aliases(text: str, name: str = "manifest") -> str:
    """Return YAML text with each alias replaced by the value that it refers to.

    If the text has no aliases, return it unchanged. Otherwise, comments are lost.

    Raises:
        SpecError: the text is not YAML, is too deeply nested, or its expanded aliases have too many values.
    """
    with _convert_yaml_errors(name):
        has_aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=_LOADER))
    if not has_aliases:
        return text
    return yaml.dump_all(_parse_yaml(text, name), Dumper=_NoAliasDumper, sort_keys=False, width=4096)


class _NoAliasDumper(yaml.SafeDumper):
    """YAML dumper that repeats a value that occurs several times, instead of writing aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _check_yaml_size(text: str, name: str) -> None:
    """Raise an error if YAML text, with expanded aliases, is too deeply nested or has too many values.

    Raises:
        SpecError: the text is too deeply nested, an alias refers to a value that contains the alias, or text with
            anchors has too many values.
    """
    values = 0
    named: dict[str, tuple[int, int]] = {}
    within = [_OpenCollection(None, 0)]
    for event in yaml.parse(text, Loader=_LOADER):
        size = height = 0
        if isinstance(event, _OPENING):
            within.append(_OpenCollection(event.anchor, values))
            size = 1
        elif isinstance(event, _CLOSING):
            closed = within.pop()
            height = closed.height + 1
            if closed.anchor:
                named[closed.anchor] = values - closed.before, height
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor:
                named[event.anchor] = 1, 0
        elif isinstance(event, yaml.AliasEvent):
            if any(one.anchor == event.anchor for one in within):
                raise SpecError(name, f"uses the YAML alias *{event.anchor} inside of what it names", "write it out")
            size, height = named.get(event.anchor or "", (0, 0))
        values += size
        within[-1].height = max(within[-1].height, height)
        if len(within) - 1 + height > MAX_DEPTH:
            raise SpecError(name, f"is nested more than {MAX_DEPTH} levels deep", "flatten it")
        if named and values > MAX_ALIASED_VALUES:
            problem = f"means more than {MAX_ALIASED_VALUES:,} values by its YAML aliases"
            raise SpecError(name, problem, "write the values out")


@dataclass(slots=True)
class _OpenCollection:
    """A list or mapping that the YAML parser has begun but not finished."""

    anchor: str | None
    before: int
    """Number of values before it."""
    height: int = 0
    """Number of levels below it so far."""


def _iterate_list_items(values: list[Any], name: str) -> Iterator[Document]:
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
