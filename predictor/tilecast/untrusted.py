"""Parse JSON and show text from untrusted sources. JSON that is too long or too deeply nested is refused first.

Python's `repr`, copies and comparisons use C stack for each level of nesting, and a full stack kills the process.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from tilecast.spec import SpecError

MAX_DEPTH = 64
"""Deepest nesting allowed. A Node with its managed fields stays below 20, a config.json below 10."""
MAX_BYTES = 4 * 2**20
"""Longest text allowed. The API server stores objects of up to 1.5 MiB."""

ValueT = TypeVar("ValueT")


class TooDeepError(ValueError):
    """Error that JSON is nested deeper than allowed."""


class TooLongError(ValueError):
    """Error that JSON is longer than allowed."""


def parse_json(text: str | bytes, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of JSON text, after checking its length and nesting.

    Raises:
        TooLongError, TooDeepError: the text exceeds a bound and is not parsed.
        ValueError: the text is not JSON.
    """
    if len(text) > max_bytes:
        raise TooLongError(f"is longer than {max_bytes / 2**20:.3g} MiB")
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if is_deeper(text, max_depth):
        raise TooDeepError(f"is nested more than {max_depth} levels deep")
    return json.loads(text)


def parse_json_mapping(text: str | bytes, field: str, subject: str, remedy: str) -> dict[str, Any]:
    """Return the mapping in a JSON text, after checking its length and nesting.

    Args:
        text: the JSON.
        field: field or annotation that errors name as the place to correct.
        subject: name of the text in errors, as in "<subject> is no JSON mapping".
        remedy: advice in the error about text that is not JSON or not a mapping.

    Raises:
        SpecError: the text is not a mapping, not JSON, longer than `MAX_BYTES` or nested more than `MAX_DEPTH` levels
            deep.
    """
    try:
        value = parse_json(text)
    except TooDeepError as error:
        raise SpecError(field, f"{subject} {error}", "flatten it") from None
    except TooLongError as error:
        raise SpecError(field, f"{subject} {error}", "leave out what decides no dimension") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SpecError(field, f"{subject} is no JSON mapping", remedy)
    return value


def is_deeper(text: str, levels: int) -> bool:
    """Return whether parsing a JSON text could nest deeper than `levels`.

    Text that is not JSON may count as deeper than it is.
    """
    if text.count("[") + text.count("{") <= levels:
        return False
    marks = text.encode("utf-8", "surrogatepass")
    if b"\\" in marks:
        marks = _ESCAPED.sub(b"", marks)
    # Only quotes and brackets remain, then only brackets outside strings. Each round removes the innermost level.
    brackets = _STRING.sub(b"", marks.translate(_ALIKE, _OTHERS).replace(b'""', b""))
    for left in range(levels, -1, -1):
        if brackets.count(b"[") <= left:
            return False
        brackets = brackets.replace(b"[]", b"")
    return True


_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"')
_ALIKE = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(code for code in range(256) if code not in b'"[]{}')


def empty_containers_below(value: ValueT, levels: int = MAX_DEPTH) -> ValueT:
    """Empty each mapping and list deeper than `levels` in a parsed JSON value, in place, and return the value.

    The value is walked level by level, without recursion.
    """
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        if not level:
            return value
        level = [
            child
            for each in level
            for child in (each.values() if type(each) is dict else each)
            if type(child) in _NESTING
        ]
    for each in level:
        each.clear()
    return value


_NESTING = frozenset((dict, list))


def blank_unprintable(text: str) -> str:
    """Return a text with a blank instead of each character that cannot be printed, such as a line break."""
    return "".join(char if char.isprintable() else " " for char in text)
