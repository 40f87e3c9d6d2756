"""Format dictionaries as text tables and HTML tables."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from tilecast.render.columns import align_columns

Row = Mapping[str, Any]


def rows_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a text table. The first row's keys are the titles. Numbers are aligned to the right."""
    names = list(rows[0]) if rows else []
    right = [name for name in names if all(isinstance(row[name], int | float) for row in rows)]
    return align_columns(names, [[format_cell(row[name]) for name in names] for row in rows], right)


def format_properties(row: Row) -> list[str]:
    """Return a text line for each item of a dictionary. Items of a nested dictionary are indented below its key."""
    lines = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            lines += [name, *(f"  {key:<26}{format_cell(item)}" for key, item in value.items())]
        else:
            lines.append(f"{name:<28}{format_cell(value)}")
    return lines


def format_cell(value: Any) -> str:
    """Format any value as the text of a table cell. None becomes an empty string."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {format_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(format_cell(item) for item in value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1e6 else f"{value:,.6g}"
    return f"{value}"


def rows_html(rows: Sequence[Row], title: str = "", notes: Sequence[str] = ()) -> str:
    """Return an HTML table of rows, with a title above it and a paragraph for each note below it."""
    names = list(rows[0]) if rows else []
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(format_cell(row.get(name)))}</td>' for name in names)}</tr>" for row in rows
    )
    before = f"<p><b>{html.escape(title)}</b></p>" if title else ""
    table_ = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    return f"<div>{before}{table_}{''.join(f'<p>{html.escape(note)}</p>' for note in notes)}</div>"
