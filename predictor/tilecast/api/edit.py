"""Change fields in the text of a YAML manifest. Comments, order, quotes and indentation stay the same.

The parser only locates nodes in the text. A diff of the result shows nothing but the changed fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import yaml

from tilecast.api.fields import FieldChange, Path

_Edit: TypeAlias = tuple[Path, Any]
"""Path of a field and its new value. `_GONE` removes the field, and `_AppendedItems` appends to a list."""


class _AppendedItems(list[Any]):
    """Value of an edit that appends items to the list at its path."""


_GONE = object()


def edit_yaml(text: str, changes: Sequence[FieldChange], index: int = 0) -> str:
    """Return YAML text with fields of one document changed.

    Args:
        text: one or more YAML documents (JSON is YAML) without aliases.
        changes: fields and their new values. Missing mappings on a path are created. Missing lists are not.
        index: position of the document to change.
    """
    for change in changes:
        old = _get_node_value(_find_node(_compose_document(text, index), change.path))
        for edit in _diff_values(change.path, old, change.value):
            text = _apply_edit(text, index, edit)
    return text


def _diff_values(path: Path, old: Any, new: Any) -> Iterator[_Edit]:
    """Yield a minimal list of edits that turn the value `old` at `path` into `new`. Additions precede removals."""
    if isinstance(old, dict) and isinstance(new, dict) and old and new:
        for key, value in new.items():
            yield from _diff_values((*path, key), old.get(key), value)
        yield from ((((*path, key)), _GONE) for key in old if key not in new)
    elif isinstance(old, list) and isinstance(new, list) and old and new[: len(old)] == old:
        yield (path, _AppendedItems(new[len(old) :]))
    elif old != new or type(old) is not type(new):
        yield (path, new)


def _apply_edit(text: str, index: int, edit: _Edit) -> str:
    path, value = edit
    root = _compose_document(text, index)
    depth = next(size for size in range(len(path), -1, -1) if _find_node(root, path[:size]) is not None)
    node = _find_node(root, path[:depth])
    if isinstance(value, _AppendedItems):
        return _append_items(text, node, value) if value else text
    if depth == len(path):
        if value is not _GONE and isinstance(node, yaml.ScalarNode) and not isinstance(value, dict | list):
            return text[: node.start_mark.index] + _dump_flow_style(value) + text[_find_content_end(text, node) :]
        parent = _find_node(root, path[:-1])
        return _set_entry(text, root, parent, str(path[-1]), value)
    for part in reversed(path[depth + 1 :]):
        value = {part: value}
    if isinstance(node, yaml.MappingNode):
        return _set_entry(text, root, node, str(path[depth]), value)
    return _set_entry(text, root, _find_node(root, path[: depth - 1]), str(path[depth - 1]), {path[depth]: value})


def _set_entry(text: str, root: Any, mapping: Any, key: str, value: Any) -> str:
    """Return the text with a mapping's key set to `value`, or with the key removed if `value` is `_GONE`."""
    entry = next((pair for pair in mapping.value if pair[0].value == key), None)
    if mapping.flow_style or not mapping.value:
        plain = {**_get_node_value(mapping), key: value}
        remaining = {name: item for name, item in plain.items() if item is not _GONE}
        return text[: mapping.start_mark.index] + _dump_flow_style(remaining) + text[mapping.end_mark.index :]
    column = mapping.value[0][0].start_mark.column
    block = "" if value is _GONE else _dump_block({key: value}, column, _is_list_indented(root) is not False)
    if entry is None:
        end = _find_line_end(text, _find_content_end(text, mapping))
        return text[:end] + "\n" + block + text[end:]
    start, end = entry[0].start_mark.index, _find_line_end(text, _find_content_end(text, entry[1], entry[0]))
    if not block:
        return text[: text.rfind("\n", 0, start) + 1] + text[end + 1 :]
    return text[:start] + block.lstrip() + text[end:]


def _append_items(text: str, sequence: Any, items: Sequence[Any]) -> str:
    if sequence.flow_style:
        value = [*_get_node_value(sequence), *items]
        return text[: sequence.start_mark.index] + _dump_flow_style(value) + text[sequence.end_mark.index :]
    end = _find_line_end(text, _find_content_end(text, sequence))
    return text[:end] + "\n" + _dump_block(list(items), sequence.start_mark.column, True) + text[end:]


def _compose_document(text: str, index: int) -> Any:
    documents = (node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None)
    return next(node for position, node in enumerate(documents) if position == index)


def _find_node(node: Any, path: Path) -> Any:
    """Return the YAML node at a path below `node`, or None if the path does not exist."""
    for part in path:
        if isinstance(part, int):
            node = node.value[part] if isinstance(node, yaml.SequenceNode) and part < len(node.value) else None
        else:
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            node = next((value for key, value in pairs if key.value == part), None)
        if node is None:
            return None
    return node


def _get_node_value(node: Any) -> Any:
    if node is None:
        return None
    loader = yaml.SafeLoader("")
    return loader.construct_object(node, deep=True)


def _find_content_end(text: str, node: Any, key: Any = None) -> int:
    """Return the index after the last character of a node's content.

    PyYAML's end mark of a block node includes later comments. The content ends with its last scalar or flow node.
    """
    if isinstance(node, yaml.ScalarNode):
        if key is not None and node.start_mark.index == node.end_mark.index:
            return text.index(":", key.end_mark.index) + 1
        return len(text[: node.end_mark.index].rstrip()) if node.style in ("|", ">") else int(node.end_mark.index)
    if node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _find_content_end(text, last[1], last[0]) if isinstance(last, tuple) else _find_content_end(text, last)


def _find_line_end(text: str, index: int) -> int:
    end = text.find("\n", index)
    return len(text) if end < 0 else end


def _is_list_indented(node: Any) -> bool | None:
    """Return whether the first block list is indented deeper than its key, or None if there is no such list."""
    if isinstance(node, yaml.SequenceNode):
        return next((answer for item in node.value if (answer := _is_list_indented(item)) is not None), None)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(value, yaml.SequenceNode) and not value.flow_style:
            return bool(value.start_mark.column > key.start_mark.column)
        if (answer := _is_list_indented(value)) is not None:
            return answer
    return None


class _IndentedListDumper(yaml.SafeDumper):
    """YAML dumper that indents lists deeper than their keys."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


class _FlatListDumper(yaml.SafeDumper):
    """YAML dumper that does not indent lists under their keys."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Return the YAML node for a text. If the text has several lines, the node is a literal block."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


for _kind in (_IndentedListDumper, _FlatListDumper):
    _kind.add_representer(str, _represent_text)


def _dump_block(value: Any, column: int, is_indented: bool) -> str:
    dumper = _IndentedListDumper if is_indented and isinstance(value, dict) else _FlatListDumper
    lines = yaml.dump(value, Dumper=dumper, sort_keys=False, width=4096, default_flow_style=False).splitlines()
    return "\n".join((" " * column + line).rstrip() for line in lines)


def _dump_flow_style(value: Any) -> str:
    """Return a value as flow-style YAML, with quotes where a flow collection requires them."""
    dumped = str(yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=4096))
    return dumped.removesuffix("\n").removeprefix("[").removesuffix("]")
