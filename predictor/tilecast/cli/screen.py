"""Write text to a terminal, with colours where they carry meaning, and none in a pipe or with `NO_COLOR`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import TextIO

_STYLES: Mapping[str, str] = {
    "best": "bold green",
    "own": "cyan",
    "refused": "red",
    "warning": "yellow",
    "error": "bold red",
}
"""Style for the library rich, by meaning."""
_MEANINGS = (
    r"(?m)^(?P<best>>  .*)$",
    r"(?m)^(?P<own>=  .*)$",
    r"(?m)^(?P<refused>x  .*)$",
    r"(?m)^(?P<warning>! .*)$",
    r"(?P<warning>may not fit(?: \(\d+ of \d+ GiB\))?|memory may run out)",
    r"(?m)^\S+ +(?P<warning>tight)  ",
    r"(?m)^\S+ +(?P<refused>no)  ",
    r"(?m)^(?P<refused>.* ends \S+ late\b)",
    r"(?m)^(?P<warning>\d+ were not read)\b",
    r"(?m)\b(?P<refused>do(?:es)? not run)\b",
    r"(?m)^(?P<best>[1-9]\d* of \d+ GPU jobs would be cheaper)\b",
)
"""Patterns that find coloured parts of texts. Each has a group named after a meaning."""


def write_screen(text: str) -> None:
    """Write the text of a screen to standard output, in colours if it is a terminal."""
    sys.stdout.write(color_text(text, sys.stdout))


def color_text(text: str, stream: TextIO) -> str:
    """Return the text with colours if the stream is a terminal that shows them, otherwise unchanged."""
    if not _has_colors(stream):
        return text
    parts, end = list[str](), 0
    for begin, stop, meaning in sorted(_find_colored_spans(text)):
        if begin >= end:
            parts += [text[end:begin], _color_by_meaning(text[begin:stop], meaning)]
            end = stop
    return "".join((*parts, text[end:]))


def color_word(word: str, meaning: str, stream: TextIO) -> str:
    """Return a word in the colour of its meaning if the stream is a terminal with colours, otherwise unchanged."""
    return _color_by_meaning(word, meaning) if _has_colors(stream) else word


def _color_by_meaning(text: str, meaning: str) -> str:
    from rich.color import ColorSystem
    from rich.style import Style

    return Style.parse(_STYLES[meaning]).render(text, color_system=ColorSystem.STANDARD)


def _find_colored_spans(text: str) -> list[tuple[int, int, str]]:
    return [
        (*found.span(name), name)
        for pattern in _MEANINGS
        for found in re.finditer(pattern, text)
        for name in found.groupdict()
    ]


def _has_colors(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colours. A non-empty `NO_COLOR` turns them off (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
