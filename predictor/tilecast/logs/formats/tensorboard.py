"""Event files of TensorBoard: TFRecord records that each contain a message `Event`."""

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tilecast.logs.metrics import MetricRow, find_metric_run
from tilecast.logs.protobuf import BYTES, FIXED32, FIXED64, VARINT, iterate_fields, list_messages, read_float
from tilecast.logs.steps import MAX_STEPS, LoggedRun

NAME = "TensorBoard"
PATTERN = "events.out.tfevents.*"
MAX_RECORD = 2**20
"""Largest record that is read. Larger ones, such as images, are skipped."""
_TIME, _STEP, _SUMMARY = 1, 2, 5
_VALUE, _TAG, _SIMPLE, _TENSOR = 1, 1, 2, 8
_CONTENT, _FLOATS = 4, 5


def recognise(path: Path, head: bytes) -> bool:
    """Return whether a file has the name of an event file."""
    return ".tfevents." in path.name


def read(*paths: Path) -> LoggedRun | None:
    """Return the run from its event files, earliest first, or None if there are too few steps."""
    rows = (row for path in paths for record in _iterate_records(path) if (row := _read_event(record)) is not None)
    return find_metric_run(list(islice(rows, MAX_STEPS)), NAME)


def _iterate_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file up to its end, or up to a record that is cut off."""
    with path.open("rb") as handle:
        while len(header := handle.read(12)) == 12:
            (size,) = struct.unpack_from("<Q", header)
            if size > 2**40:
                return
            if size > MAX_RECORD:
                handle.seek(size + 4, 1)
                continue
            record = handle.read(size + 4)
            if len(record) < size + 4:
                return
            yield record[:size]


def _read_event(record: bytes) -> MetricRow | None:
    """Return the scalars of an event, or None if it has none."""
    time, step = 0.0, 0
    values: dict[str, float] = {}
    try:
        for number, kind, value in iterate_fields(record):
            if (number, kind) == (_TIME, FIXED64) and isinstance(value, bytes):
                time = read_float(value)
            elif (number, kind) == (_STEP, VARINT) and isinstance(value, int):
                step = value
            elif (number, kind) == (_SUMMARY, BYTES) and isinstance(value, bytes):
                values.update(filter(None, map(_read_scalar, list_messages(value, _VALUE))))
    except ValueError:
        return None
    return MetricRow(step, time, values) if values else None


def _read_scalar(message: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for field, kind, value in iterate_fields(message):
        if not isinstance(value, bytes):
            continue
        if (field, kind) == (_TAG, BYTES):
            tag = value[:256].decode("utf-8", "replace")
        elif (field, kind) == (_SIMPLE, FIXED32):
            number = read_float(value)
        elif (field, kind) == (_TENSOR, BYTES):
            contents = [part for place in (_CONTENT, _FLOATS) for part in list_messages(value, place) if len(part) == 4]
            number = read_float(contents[0]) if contents else None
    return None if number is None else (tag, number)
