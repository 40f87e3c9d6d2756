"""Offline runs of Weights & Biases, `wandb/offline-run-…/run-….wandb`: messages in a LevelDB log."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from tilecast import untrusted
from tilecast.logs.arguments import RunFacts
from tilecast.logs.metrics import MetricRow, find_metric_run
from tilecast.logs.protobuf import list_messages
from tilecast.logs.steps import MAX_STEPS, LoggedRun

NAME = "Weights & Biases"
PATTERN = "run-*.wandb"
MAGIC = b":W&B"
MAX_RECORD = 2**20
MAX_VALUE = 4096
"""Longest value that is read, as JSON. Numbers are shorter."""
_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _CONFIG, _RUN, _RUN_CONFIG = 2, 5, 17, 4
_ITEM, _UPDATE, _KEY, _NESTED, _JSON = 1, 1, 1, 2, 16


def recognise(path: Path, head: bytes) -> bool:
    """Return whether a file begins like a run of Weights & Biases."""
    return head.startswith(MAGIC)


def read(path: Path) -> LoggedRun | None:
    """Return the run, or None if there are too few steps."""
    rows: list[MetricRow] = []
    facts = RunFacts()
    for record in _iterate_records(path):
        try:
            for history in list_messages(record, _HISTORY):
                values = {key: value for key, value in _iterate_items(history, _ITEM) if _is_number(value)}
                if len(rows) < MAX_STEPS and values:
                    rows.append(MetricRow(len(rows), values.get("_timestamp"), values))
            started = [part for run in list_messages(record, _RUN) for part in list_messages(run, _RUN_CONFIG)]
            for config in (*started, *list_messages(record, _CONFIG)):
                for key, value in _iterate_items(config, _UPDATE):
                    facts.add_argument(key, value.get("value") if isinstance(value, dict) else value)
        except (ValueError, OverflowError):
            continue
    run = find_metric_run(rows, NAME)
    return run and LoggedRun(run.seconds, run.steps, NAME, facts.gpus, facts.gpu, facts.plan)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _iterate_items(message: bytes, field: int) -> Iterator[tuple[str, object]]:
    """Yield the keys and values of a message's items. Nested keys are joined by slashes."""
    for item in list_messages(message, field):
        texts = list_messages(item, _JSON)
        keys = list_messages(item, _KEY) or list_messages(item, _NESTED)
        if texts and keys and len(texts[0]) <= MAX_VALUE:
            name = b"/".join(key for key in keys)[:256].decode("utf-8", "replace")
            yield name, untrusted.parse_json(texts[0])


def _iterate_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file. Records above `MAX_RECORD` are skipped."""
    with path.open("rb") as handle:
        parts: list[bytes] = []
        # Bytes of the record that is open. None: no record is, or it is too long.
        length: int | None = None
        skipped = _FILE_HEADER
        while block := handle.read(_BLOCK):
            at, skipped = skipped, 0
            while at + _HEADER <= len(block):
                _, size, kind = struct.unpack_from("<IHB", block, at)
                at += _HEADER
                piece = block[at : at + size]
                at += size
                if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(piece) < size:
                    break
                if kind in (_FULL, _FIRST):
                    parts, length = [], 0
                if length is None:
                    continue
                length += size
                if length > MAX_RECORD:
                    parts, length = [], None
                    continue
                if piece:
                    parts.append(piece)
                if kind in (_FULL, _LAST):
                    yield b"".join(parts)
                    parts, length = [], None
