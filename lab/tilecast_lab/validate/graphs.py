"""Traced graphs used in place of presets: a row of a runs table selects a file by its model and image size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from tilecast import untrusted
from tilecast.api.documents import MAX_JSON_BYTES
from tilecast.model import Model
from tilecast.spec import SpecError
from tilecast.zoo import traced
from tilecast.zoo.traced import document

_IMAGE = re.compile(r"\bimage size (\d{1,5})\b")
_NAME = re.compile(r"[\w.+-]+", re.ASCII)
PARAMETERS_APART = 0.1
"""Largest relative difference allowed between a graph's parameters and those that its row states.

Versions of a library differ by less, models of one family by more.
"""


@dataclass(frozen=True, slots=True)
class GraphName:
    """Graph that a row requests: the model's name in its library, and the side of its images (0 if not stated)."""

    name: str
    image: int

    @property
    def file(self) -> str:
        """Name of the graph's file."""
        return f"{self.name}@{self.image}.json" if self.image else f"{self.name}.json"


def graph_of(row: Mapping[str, str]) -> GraphName | None:
    """Return the graph that a row requests, or None if the model's name cannot be a file name."""
    name = row.get("model_name", "").rpartition("/")[2].strip()
    if not _NAME.fullmatch(name):
        return None
    stated = _IMAGE.search(row.get("notes", "").lower())
    return GraphName(name, int(stated[1]) if stated else 0)


@dataclass(frozen=True, slots=True)
class Graphs:
    """Folder of graph documents written by `tilecast trace`."""

    folder: Path

    def model(self, row: Mapping[str, str]) -> Model | None:
        """Return the traced model of a row, or None if the folder has no graph of that name.

        Raises:
            SpecError: the graph is damaged or contradicts what the row states.
        """
        asked = graph_of(row)
        if asked is None or not (path := self.folder / asked.file).is_file():
            return None
        model = _read(path)
        for column, problem in _differences(row, asked, model):
            field = f"row {row.get('id', '')}: {column}"
            raise SpecError(field, f"{problem} in {path.name}", "trace the model that the row names")
        return model


@lru_cache(maxsize=1024)
def _read(path: Path) -> Model:
    try:
        value = untrusted.parse_json(path.read_text(encoding="utf-8"), max_bytes=MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({str(error).splitlines()[0][:80]})"
        raise SpecError(str(path), problem, "write it with `tilecast trace`") from None
    if not isinstance(value, dict) or not document.is_document(value):
        raise SpecError(str(path), "is no graph document", "write it with `tilecast trace`")
    return traced.build_model(path.stem, document.read(value, str(path)))


def _differences(row: Mapping[str, str], asked: GraphName, model: Model) -> Iterator[tuple[str, str]]:
    """Yield (column, problem) for every statement of a row that the graph contradicts."""
    trace = model.trace
    assert trace is not None  # noqa: S101 (a traced model has one)
    image = trace.shapes[trace.inputs[0]]
    if asked.image and image[-1] != asked.image:
        yield "notes", f"image size {asked.image} is {image[-1]}"
    sequence = row.get("seq_len", "")
    if trace.sequence > 1 and sequence.isdecimal() and int(sequence) != trace.sequence:
        yield "seq_len", f"{sequence} is {trace.sequence}"
    try:
        stated = float(row.get("params_b") or 0) * 1e9
    except ValueError:
        return
    counted = float(sum(prod(trace.shapes[name]) for name in trace.parameters))
    if stated > 0 and abs(counted - stated) > PARAMETERS_APART * stated:
        yield "params_b", f"{stated / 1e9:.5g} billion are {counted / 1e9:.5g}"
